"""Completions as OpenAI's clients read them: whole, and piece by piece."""

import secrets
from collections.abc import Sequence
from time import time

from penstock.api.outputs import Completion, Delta
from penstock.api.text import Tokenizer
from penstock.step.plan import TokenLogprob
from penstock.step.request import FinishReason

Answer = dict[str, object]


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> Answer:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(completions: Sequence[Completion]) -> Answer:
    prompt = sum(len(one.prompt_tokens) for one in completions)
    output = sum(len(other.tokens) for one in completions for other in one.outputs)
    cached = sum(one.cached_tokens for one in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finish(reason: FinishReason | None) -> str | None:
    return None if reason is None else "length" if reason is FinishReason.LENGTH else "stop"


class Chat:
    """Answers to a conversation."""

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        self._head: Answer = {"id": new_id("chatcmpl"), "created": int(time()), "model": model}
        self._tokenizer = tokenizer
        self._greeted: set[int] = set()

    def whole(self, completions: Sequence[Completion]) -> Answer:
        [completion] = completions
        choices = [
            {
                "index": output.index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": self._logprobs(output.logprobs) if output.logprobs is not None else None,
                "finish_reason": finish(output.finish_reason),
            }
            for output in completion.outputs
        ]
        return self._head | {"object": "chat.completion", "choices": choices, "usage": usage(completions)}

    def pieces(self, prompt: int, deltas: Sequence[Delta]) -> list[Answer]:
        """Chunks for what came of the outputs of a prompt, one for each output."""
        chunks = []
        for index, text, logprobs, reason in _by_output(deltas):
            said: Answer = {"role": "assistant", "content": text} if index not in self._greeted else {"content": text} if text else {}
            self._greeted.add(index)
            choice = {
                "index": index,
                "delta": said,
                "logprobs": self._logprobs(logprobs) if logprobs else None,
                "finish_reason": finish(reason),
            }
            chunks.append(self._chunk([choice]))
        return chunks

    def last(self, completions: Sequence[Completion]) -> Answer:
        """The chunk that tells the usage."""
        return self._chunk([]) | {"usage": usage(completions)}

    def _chunk(self, choices: Sequence[Answer]) -> Answer:
        return self._head | {"object": "chat.completion.chunk", "choices": choices}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> Answer:
        content = [
            self._entry(one.token, one.logprob) | {"top_logprobs": [self._entry(token, logprob) for token, logprob in one.top]}
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Answer:
        written = self._tokenizer.token_bytes(token)
        return {"token": written.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(written)}


class Texts:
    """Continuations of texts."""

    def __init__(self, model: str, tokenizer: Tokenizer | None, echoes: Sequence[str] | None, outputs: int) -> None:
        """echoes: what is said again before each prompt's continuations. outputs: of each prompt."""
        self._head: Answer = {"id": new_id("cmpl"), "object": "text_completion", "created": int(time()), "model": model}
        self._tokenizer, self._echoes, self._outputs = tokenizer, echoes, outputs
        self._ends: dict[int, int] = {}
        """Of each choice's tokens so far, in characters of its text."""
        self._echoed: set[int] = set()

    def whole(self, completions: Sequence[Completion]) -> Answer:
        choices = [
            self._choice(prompt, output.index, output.text, output.logprobs, output.finish_reason, told=output.logprobs is not None)
            for prompt, one in enumerate(completions)
            for output in one.outputs
        ]
        return self._head | {"choices": choices, "usage": usage(completions)}

    def pieces(self, prompt: int, deltas: Sequence[Delta]) -> list[Answer]:
        return [
            self._head | {"choices": [self._choice(prompt, index, text, logprobs, reason, told=bool(logprobs))]}
            for index, text, logprobs, reason in _by_output(deltas)
        ]

    def last(self, completions: Sequence[Completion]) -> Answer:
        return self._head | {"choices": [], "usage": usage(completions)}

    def _choice(
        self, prompt: int, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, reason: FinishReason | None, *, told: bool
    ) -> Answer:
        number = prompt * self._outputs + index
        if self._echoes is not None and number not in self._echoed:
            self._echoed.add(number)
            text = self._echoes[prompt] + text
        listed = self._logprobs(number, logprobs or ()) if told else None
        return {"index": number, "text": text, "logprobs": listed, "finish_reason": finish(reason)}

    def _logprobs(self, number: int, tokens: Sequence[TokenLogprob]) -> Answer:
        offsets, at = [], self._ends.get(number, 0)
        for one in tokens:
            offsets.append(at)
            at += len(self._text(one.token))
        self._ends[number] = at
        return {
            "tokens": [self._text(one.token) for one in tokens],
            "token_logprobs": [_finite(one.logprob) for one in tokens],
            "top_logprobs": [{self._text(token): _finite(logprob) for token, logprob in one.top} for one in tokens],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)


def _by_output(deltas: Sequence[Delta]) -> list[tuple[int, str, list[TokenLogprob], FinishReason | None]]:
    """What came of each output: its index, text, log-probabilities, and why it has ended, if it has."""
    found: dict[int, tuple[list[str], list[TokenLogprob], list[FinishReason]]] = {}
    for delta in deltas:
        texts, logprobs, reasons = found.setdefault(delta.index, ([], [], []))
        texts.append(delta.text)
        logprobs.extend(delta.logprobs)
        reasons.extend([delta.finish_reason] if delta.finish_reason is not None else ())
    return [(index, "".join(texts), logprobs, reasons[0] if reasons else None) for index, (texts, logprobs, reasons) in found.items()]


def _finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, -9999.0)
