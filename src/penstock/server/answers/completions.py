"""Writes completions as OpenAI's clients read them: whole, and piece by piece."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import time
from typing import Protocol

from penstock.api.outputs import Completion, Delta, Output
from penstock.api.text.detokenize import Detokenizer
from penstock.api.text.tokenizer import Tokenizer
from penstock.base.randomness import random_bytes
from penstock.server.parsing.output_parser import Called, OutputParser, whole
from penstock.server.parsing.reading import Arguments, Begin, Content, End, Part, Reasoning
from penstock.step.plan import TokenLogprob
from penstock.step.request import FinishReason

Answer = dict[str, object]
BROKEN = (
    "the output could not follow its schema or grammar any further, so send a simpler one; if the request "
    "had none, the model's logits were not numbers (NaN): see the server's log"
)
"""Says why an output has ended with an error."""


def new_id(kind: str, size: int = 16) -> str:
    """Return a new random id that begins with its kind, such as "chatcmpl-". size: random bytes."""
    return kind + random_bytes(size).hex()


def new_call() -> str:
    """Return a new random id for a call of a tool."""
    return new_id("call_", 12)


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> Answer:
    """Return the body of an error. kind: its `type`, as OpenAI names it. param: the field at fault."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(completions: Sequence[Completion]) -> Answer:
    """Return the tokens of completions, as OpenAI counts them: of prompts, of outputs, found in the cache,
    and drafted."""
    prompt = sum(len(one.prompt_tokens) for one in completions)
    output = sum(len(other.tokens) for one in completions for other in one.outputs)
    cached = sum(one.cached_tokens for one in completions)
    drafted = sum(one.drafted_tokens for one in completions)
    accepted = sum(one.accepted_tokens for one in completions)
    drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
        **({"completion_tokens_details": drafts} if drafted else {}),
    }


def finish(reason: FinishReason | None, *, calls: bool = False) -> str | None:
    """Return OpenAI's finish reason; None for an output that goes on. calls: whether it has called tools."""
    if reason in (None, FinishReason.LENGTH, FinishReason.ERROR):
        return None if reason is None else reason.value
    return "tool_calls" if calls else "stop"


def cut_before(reason: FinishReason, stop: str) -> str | None:
    """Return what an output was cut off before: nothing that is known, or a stop string; None if the model
    has ended it. stop: the stop string that has ended it, if one has."""
    return stop if reason is not FinishReason.STOP or stop else None


def logprob_entries(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]) -> list[Answer]:
    """Return the log-probability of each token, and of the likeliest in its place, as chats have them."""

    def entry(token: int, logprob: float) -> Answer:
        written = tokenizer.token_bytes(token)
        return {
            "token": written.decode("utf-8", "replace"),
            "logprob": finite(logprob),
            "bytes": list(written),
        }

    return [
        entry(one.token, one.logprob)
        | {"top_logprobs": [entry(token, logprob) for token, logprob in one.top]}
        for one in tokens
    ]


class _ChatChoice:
    """Writes one answer to a conversation, as it comes."""

    def __init__(self, speech: OutputParser, *, reasons: bool) -> None:
        self._speech, self._reasons = speech, reasons
        self._greeted = False
        self.ended = 0
        """Calls of tools that are whole."""

    def delta(self, text: str, reason: FinishReason | None, stop: str) -> Answer:
        parts = self._speech.push(text)
        if reason is not None:
            parts += self._speech.finish(cut=cut_before(reason, stop))
        said = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        self.ended += sum(isinstance(part, End) for part in parts)
        delta: Answer = {"content": said} if said else {}
        if reasoning and self._reasons:
            delta["reasoning_content"] = reasoning
        if calls := _called(parts):
            delta["tool_calls"] = calls
        if not self._greeted:
            delta = {"role": "assistant", "content": None if delta and not said else said} | delta
            self._greeted = True
        return delta


def _called(parts: Sequence[Part]) -> list[Answer]:
    """Return the calls of tools among the parts, or what is added to them."""
    entries: dict[int, Answer] = {}
    for part in parts:
        if isinstance(part, Begin):
            function = {"name": part.name, "arguments": ""}
            entries[part.index] = {
                "index": part.index,
                "id": new_call(),
                "type": "function",
                "function": function,
            }
        elif isinstance(part, Arguments):
            entry = entries.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            entry["function"]["arguments"] += part.text  # type: ignore[index]
    return list(entries.values())


@dataclass(frozen=True, slots=True)
class Details:
    """Says what an answer tells beside its text.

    prompts: token ids of each prompt, if token ids are told.
    prompt_logprobs, echoed_logprobs: likeliest tokens that are told with each of the prompt's, in a field of
        their own and before those of the output; None is none.
    only_echoes: whether outputs are left out.
    texts: for each prompt, what makes the text of its outputs of their tokens.
    """

    prompts: Sequence[Sequence[int]] | None = None
    prompt_logprobs: int | None = None
    echoed_logprobs: int | None = None
    only_echoes: bool = False
    texts: Sequence[Callable[[], Detokenizer]] = ()


def prompt_entries(completion: Completion, tokenizer: Tokenizer | None, most: int) -> list[Answer | None]:
    """Return the log-probability of each token of a prompt but the first, and of so many of the likeliest in
    its place, as vLLM has them: by token id."""

    def entry(token: int, logprob: float, rank: int) -> Answer:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token)}

    entries: list[Answer | None] = []
    for one in completion.prompt_logprobs or ():
        if one is None:
            entries.append(None)
            continue
        top = {
            str(token): entry(token, logprob, at + 1) for at, (token, logprob) in enumerate(one.top[:most])
        }
        told: Answer = {str(one.token): entry(one.token, one.logprob, one.rank)}
        entries.append(told | top)
    return entries


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return what answers call a token."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_text(token)


class AnswerWriter(Protocol):
    """Writes answers of a kind."""

    _chunk: Answer
    """The fields of a chunk, but for its choices."""

    def whole(self, completions: Sequence[Completion]) -> Answer:
        """Return the answer of a request whose outputs are complete."""

    def pieces(self, prompt: int, deltas: Sequence[Delta]) -> list[Answer]:
        """Return the chunks for what was added to the outputs of a prompt, one chunk for each output. prompt:
        its number in the request."""

    def last(self, completions: Sequence[Completion]) -> Answer:
        """Return the chunk that gives the usage."""
        return self._chunk | {"choices": [], "usage": usage(completions)}


class ChatWriter(AnswerWriter):
    """Writes the answers to a conversation, whole or piece by piece."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        speech: Callable[[], OutputParser],
        details: Details,
        *,
        reasons: bool = True,
    ) -> None:
        """Begin to write the answers of a model.

        speech: makes a parser for each answer.
        reasons: whether reasoning is given out.
        """
        self._head: Answer = {"id": new_id("chatcmpl-"), "created": int(time()), "model": model}
        self._chunk = self._head | {"object": "chat.completion.chunk"}
        self._tokenizer, self._speech, self._details, self._reasons = tokenizer, speech, details, reasons
        self._choices: dict[int, _ChatChoice] = {}

    def whole(self, completions: Sequence[Completion]) -> Answer:
        """Return the answers of a chat.completion."""
        [completion] = completions
        choices = [
            {
                "index": output.index,
                "logprobs": self._logprobs(output.logprobs) if output.logprobs is not None else None,
                **self._said(output),
                **told_ids(self._details, output.tokens),
            }
            for output in completion.outputs
        ]
        answer = self._head | {"object": "chat.completion", "choices": choices, "usage": usage(completions)}
        if self._details.prompts is not None:
            answer["prompt_token_ids"] = self._details.prompts[0]
        if (most := self._details.prompt_logprobs) is not None:
            answer["prompt_logprobs"] = prompt_entries(completion, self._tokenizer, most)
        return answer

    def _said(self, output: Output) -> Answer:
        cut = cut_before(output.finish_reason, output.stop)
        said = whole(self._speech(), output.text, cut=cut)
        content = "".join(part.text for part in said if isinstance(part, Content))
        reasoning = "".join(part.text for part in said if isinstance(part, Reasoning))
        calls = [
            {
                "id": new_call(),
                "type": "function",
                "function": {"name": part.name, "arguments": part.arguments},
            }
            for part in said
            if isinstance(part, Called)
        ]
        message: Answer = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if reasoning and self._reasons:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "finish_reason": finish(output.finish_reason, calls=bool(calls))}

    def pieces(self, prompt: int, deltas: Sequence[Delta]) -> list[Answer]:
        """Return the chunks for what was added to the outputs of a prompt, one chunk for each output."""
        chunks = []
        for index, text, logprobs, reason, stop, tokens in by_output(deltas):
            first = not self._choices
            if (one := self._choices.get(index)) is None:
                one = self._choices[index] = _ChatChoice(self._speech(), reasons=self._reasons)
            choice = told_ids(self._details, tokens) | {
                "index": index,
                "delta": one.delta(text, reason, stop),
                "logprobs": self._logprobs(logprobs) if logprobs else None,
                "finish_reason": finish(reason, calls=bool(one.ended)),
            }
            chunks.append(self._chunk | {"choices": [choice]})
            if first and self._details.prompts is not None:
                chunks[-1]["prompt_token_ids"] = self._details.prompts[0]
        return chunks

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> Answer:
        return {"content": logprob_entries(self._tokenizer, tokens), "refusal": None}


def told_ids(details: Details, tokens: Sequence[int]) -> Answer:
    """Return the tokens of an output, if token ids are told."""
    return {} if details.prompts is None else {"token_ids": list(tokens)}


Piece = tuple[int, str, Sequence[TokenLogprob], FinishReason | None, str, Sequence[int]]
"""Index, text, log-probabilities, finish reason if it has ended, the stop string that has ended it, and
tokens: this came of an output."""


def by_output(deltas: Sequence[Delta]) -> list[Piece]:
    """Return what came of each output."""
    if len(deltas) == 1:  # The usual, in a stream.
        [only] = deltas
        return [(only.index, only.text, only.logprobs, only.finish_reason, only.stop, only.tokens)]
    found: dict[int, list[Delta]] = {}
    for delta in deltas:
        found.setdefault(delta.index, []).append(delta)
    return [
        (
            index,
            "".join(one.text for one in own),
            [each for one in own for each in one.logprobs],
            next((one.finish_reason for one in own if one.finish_reason is not None), None),
            "".join(one.stop for one in own),
            [token for one in own for token in one.tokens],
        )
        for index, own in found.items()
    ]


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can have it, which has no infinity."""
    return max(logprob, -9999.0)
