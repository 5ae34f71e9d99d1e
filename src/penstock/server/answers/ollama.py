"""Answers of /api/chat and /api/generate: lines of JSON, each with what has come since the one before.

An answer is always made as a stream; one that is not sent as a stream is what the lines add up to.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any

import msgspec

from penstock.api.outputs import Delta
from penstock.api.reader import PromptReader
from penstock.api.sequences import PreparedPrompt
from penstock.api.text.tokenizer import Tokenizer
from penstock.base.errors import LengthError, PenstockError
from penstock.base.units import counted
from penstock.server.answers.completions import BROKEN, cut_before, logprob_entries, new_call
from penstock.server.answers.prompts import read, read_chat
from penstock.server.broker.calls import Call
from penstock.server.parsing.dialects import Dialect, dialect_of
from penstock.server.parsing.output_parser import OutputParser
from penstock.server.parsing.reading import Arguments, Begin, Broken, Content, End, Part, Reasoning
from penstock.server.wire.ollama import RENAMED, OllamaChatRequest, OllamaGenerateRequest
from penstock.server.wire.requests import ChatRequest
from penstock.server.wire.responses import named_here
from penstock.step.request import FinishReason

LINES = "application/x-ndjson"
Line = dict[str, Any]


def read_ollama(
    reader: PromptReader, asked: OllamaChatRequest | OllamaGenerateRequest, dialect: Dialect | None
) -> tuple[list[PreparedPrompt], "OllamaStream"]:
    """Return the only prompt of a checked request, and what writes the answer. May be called from any thread.

    Raise FieldError and RequestError for what cannot be served.
    """
    with named_here(RENAMED):
        request = asked.request()
        request.check()
        dropped = False
        if isinstance(request, ChatRequest):
            dialect = dialect or dialect_of(reader.tokenizer.templates)
            # Behind no mark does a form begin that a call could come before: as with ollama, it goes first.
            if dropped := bool(asked.format and request.tools and not dialect.channels):
                request.tool_choice = "none"
            ready, speech = read_chat(reader, request, dialect, clamps=True)
        else:
            [ready], _ = read(reader, request)
            speech = OutputParser
    ready = _within(ready, asked.most_context, asked.most_tokens, reader.limits.max_model_len)
    stream = OllamaStream(asked, speech(), reader.tokenizer)
    stream.ignored = ["tools"] if dropped else []
    return [ready], stream


def _within(ready: PreparedPrompt, context: int | None, most: int | None, longest: int) -> PreparedPrompt:
    """Return a prompt whose answer ends where there is no room for more. Raise LengthError.

    context: tokens of both, as the client wants it. most: of the answer. longest: tokens that the server has
        room for.
    """
    room = min(longest, context or longest) - len(ready.tokens)
    if room < 1:
        raise LengthError(
            f"the prompt has {counted(len(ready.tokens), 'token')}, but options.num_ctx is {context}; "
            "raise num_ctx, or shorten the prompt"
        )
    return replace(ready, max_tokens=min(room, most or room))


class OllamaStream:
    """Writes one answer as it comes."""

    media_type = LINES

    def __init__(
        self,
        asked: OllamaChatRequest | OllamaGenerateRequest,
        speech: OutputParser,
        tokenizer: Tokenizer,
    ) -> None:
        self._asked, self._speech, self._tokenizer = asked, speech, tokenizer
        self._chats = isinstance(asked, OllamaChatRequest)
        self._said, self._thought, self._calls, self._logprobs = (
            list[Any](),
            list[Any](),
            list[Any](),
            list[Any](),
        )
        """All of it where the answer is no stream; else what was not sent yet."""
        self._called: list[str] = []
        """The name of the call that is being read, and pieces of its arguments."""
        self._number = 0
        """Calls that are whole."""
        self._finish: FinishReason | None = None
        self.response: Line = {}
        self.ignored: list[str] = []
        """Fields without effect, for this model."""
        self.load_seconds = 0.0
        """Seconds for which the request has waited for its model, before it was submitted."""

    async def events(self, call: Call) -> AsyncGenerator[bytes]:
        """Yield all lines; none if no stream was asked for. Raises what keeps it from being complete."""
        async for deltas in call.pieces():
            self._take(deltas)
            if self._asked.streams and (self._said or self._thought or self._calls):
                yield self._line(self._piece())
        if self._finish is FinishReason.ERROR:
            raise PenstockError(BROKEN)
        self.response = self._piece() | self._end(call)
        if self._asked.streams:
            yield self._line(self.response)

    def failure(self, message: str) -> bytes:
        """Return the last line, when something has kept the answer from being complete."""
        return self._line({"error": message})

    def _line(self, content: Line) -> bytes:
        return msgspec.json.encode(content) + b"\n"

    # ---- what comes

    def _take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            parts = self._speech.push(delta.text)
            if self._asked.logprobs:
                self._logprobs += logprob_entries(self._tokenizer, delta.logprobs)
            if delta.finish_reason is not None:
                self._finish = delta.finish_reason
                parts += self._speech.finish(cut=cut_before(delta.finish_reason, delta.stop))
            for part in parts:
                self._add(part)

    def _add(self, part: Part) -> None:
        match part:
            case Reasoning():
                if self._asked.tells_reasoning:
                    self._thought.append(part.text)
            case Content() | Broken():
                self._said.append(part.text)
            case Begin():
                self._called = [part.name]
            case Arguments():
                self._called.append(part.text)
            case End():
                name, *arguments = self._called
                given = msgspec.Raw("".join(arguments).encode() or b"{}")
                function = {"index": self._number, "name": name, "arguments": given}
                self._calls.append({"id": new_call(), "function": function})
                self._number += 1

    def _piece(self) -> Line:
        """Return what was not told yet."""
        said, thought = "".join(self._said), "".join(self._thought)
        line: Line = {"model": self._asked.model, "created_at": stamp(datetime.now(UTC))}
        if self._chats:
            message: Line = {"role": "assistant", "content": said}
            if thought:
                message["thinking"] = thought
            if self._calls:
                message["tool_calls"] = self._calls
            line["message"] = message
        else:
            line["response"] = said
            if thought:
                line["thinking"] = thought
        if self._logprobs:
            line["logprobs"] = self._logprobs
        self._said, self._thought, self._calls, self._logprobs = [], [], [], []
        return line | {"done": False}

    def _end(self, call: Call) -> Line:
        """Return what the last line has besides: why it has ended, tokens, and nanoseconds."""
        completion, now = call.so_far(), monotonic()
        began = call.scheduled_time or call.arrival_time
        first = call.first_token_time or now
        return {
            "done": True,
            "done_reason": "length" if self._finish is FinishReason.LENGTH else "stop",
            "total_duration": _nanoseconds(now - call.arrival_time + self.load_seconds),
            "load_duration": _nanoseconds(self.load_seconds),
            "prompt_eval_count": len(completion.prompt_tokens),
            "prompt_eval_duration": _nanoseconds(first - began),
            "eval_count": len(completion.tokens),
            # Clients divide by it, and on a busy machine all tokens may come at once.
            "eval_duration": _nanoseconds(now - first),
        }


def loaded(asked: OllamaChatRequest | OllamaGenerateRequest, *, unloads: bool = False) -> Line:
    """Return the answer to a request without a prompt: the model is there. unloads: or will not be."""
    said: Line = (
        {"message": {"role": "assistant", "content": ""}}
        if isinstance(asked, OllamaChatRequest)
        else {"response": ""}
    )
    head = {"model": asked.model, "created_at": stamp(datetime.now(UTC))}
    return head | said | {"done": True, "done_reason": "unload" if unloads else "load"}


def stamp(when: datetime) -> str:
    """Return a time by RFC 3339, in UTC."""
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return max(int(seconds * 1e9), 0)
