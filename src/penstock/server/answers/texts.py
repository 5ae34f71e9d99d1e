"""Writes continuations of texts as OpenAI's clients read them: whole, and piece by piece."""

from collections.abc import Sequence
from dataclasses import replace
from time import time

from penstock.api.outputs import Completion, Delta
from penstock.api.text.detokenize import Detokenizer
from penstock.api.text.tokenizer import Tokenizer
from penstock.server.answers.completions import (
    Answer,
    AnswerWriter,
    Details,
    Piece,
    by_output,
    finish,
    finite,
    new_id,
    prompt_entries,
    token_text,
    told_ids,
    usage,
)
from penstock.step.plan import TokenLogprob
from penstock.step.request import FinishReason


class TextWriter(AnswerWriter):
    """Writes continuations of texts, whole or piece by piece."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer | None,
        echoes: Sequence[str] | None,
        outputs: int,
        details: Details,
    ) -> None:
        """Begin to write the continuations of a model.

        echoes: texts that are said again before each prompt's continuations.
        outputs: of each prompt.
        """
        self._chunk = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time()),
            "model": model,
        }
        self._tokenizer, self._echoes, self._outputs, self._details = tokenizer, echoes, outputs, details
        self._ends: dict[int, tuple[int, Detokenizer]] = {}
        """Where each choice's tokens so far end in its text, and what makes text of the next ones."""
        self._echoed: set[int] = set()
        """Choices that have begun."""

    def whole(self, completions: Sequence[Completion]) -> Answer:
        """Return the continuations of a text_completion."""
        if self._details.only_echoes:
            completions = [_without_outputs(one) for one in completions]
        choices = [
            self._choice(
                prompt,
                (
                    output.index,
                    output.text,
                    output.logprobs or (),
                    output.finish_reason,
                    output.stop,
                    output.tokens,
                ),
                one if output.logprobs is not None else None,
            )
            | self._of_prompt(one)
            for prompt, one in enumerate(completions)
            for output in one.outputs
        ]
        return self._chunk | {"choices": choices, "usage": usage(completions)}

    def pieces(self, prompt: int, deltas: Sequence[Delta]) -> list[Answer]:
        """Return the chunks for what was added to the outputs of a prompt, one chunk for each output."""
        return [self._chunk | {"choices": [self._choice(prompt, piece, None)]} for piece in by_output(deltas)]

    def _choice(self, prompt: int, piece: Piece, completion: Completion | None) -> Answer:
        """Return a choice, or a piece of one. completion: if it is whole, and has log-probabilities."""
        index, text, own, reason, _, tokens = piece
        echoed: list[TokenLogprob | int] = []
        number = prompt * self._outputs + index
        choice = told_ids(self._details, tokens)
        if number not in self._echoed:
            self._echoed.add(number)
            text = text if self._echoes is None else self._echoes[prompt] + text
            if self._details.prompts is not None:
                choice["prompt_token_ids"] = self._details.prompts[prompt]
        if completion is not None and self._details.echoed_logprobs is not None:
            echoed = self._echoed_logprobs(completion, self._details.echoed_logprobs)
        listed = None
        if own or completion is not None:
            listed = self._logprobs([*echoed, *own]) | {
                "text_offset": self._offsets(number, prompt, echoed, own)
            }
        return choice | {"index": number, "text": text, "logprobs": listed, "finish_reason": finish(reason)}

    def _echoed_logprobs(self, completion: Completion, most: int) -> list[TokenLogprob | int]:
        """Return log-probabilities of a prompt's tokens; of the first, which has none, the token."""
        return [
            completion.prompt_tokens[at] if one is None else replace(one, top=one.top[:most])
            for at, one in enumerate(completion.prompt_logprobs or ())
        ]

    def _of_prompt(self, completion: Completion) -> Answer:
        if (most := self._details.prompt_logprobs) is None:
            return {}
        return {"prompt_logprobs": prompt_entries(completion, self._tokenizer, most)}

    def _offsets(
        self,
        number: int,
        prompt: int,
        echoed: Sequence[TokenLogprob | int],
        own: Sequence[TokenLogprob],
    ) -> list[int]:
        """Return where each token begins in the text of a choice. Special tokens that it does not have take
        no room there."""
        if self._tokenizer is None:
            return [0] * (len(echoed) + len(own))
        echo = "" if self._echoes is None else self._echoes[prompt]
        offsets, at, text = list[int](), 0, self._tokenizer.detokenizer()
        for one in echoed:
            offsets.append(at)
            token = _token(one)
            if not self._tokenizer.is_special(token):
                at += len(text.push([token]))
            elif echo.startswith(name := self._text(token), at):  # The prompt was given with it.
                at += len(name)
        at, text = self._ends.get(number) or (len(echo), self._details.texts[prompt]())
        for one in own:
            offsets.append(at)
            at += len(text.push([one.token]))
        self._ends[number] = at, text
        return offsets

    def _logprobs(self, tokens: Sequence[TokenLogprob | int]) -> Answer:
        return {
            "tokens": [self._text(_token(one)) for one in tokens],
            "token_logprobs": [None if isinstance(one, int) else finite(one.logprob) for one in tokens],
            "top_logprobs": [
                None
                if isinstance(one, int)
                else {self._text(token): finite(logprob) for token, logprob in one.top}
                for one in tokens
            ],
        }

    def _text(self, token: int) -> str:
        return token_text(self._tokenizer, token)


def _token(one: TokenLogprob | int) -> int:
    return one if isinstance(one, int) else one.token


def _without_outputs(completion: Completion) -> Completion:
    """Return a completion whose outputs are empty."""
    empty = [
        replace(
            one,
            text="",
            tokens=(),
            logprobs=None if one.logprobs is None else (),
            finish_reason=FinishReason.LENGTH,
        )
        for one in completion.outputs
    ]
    return replace(completion, outputs=tuple(empty))
