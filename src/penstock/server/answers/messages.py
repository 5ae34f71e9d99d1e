"""Answers of /v1/messages: blocks of content, and the events that tell of them as they come.

A message is always made as a stream; one that is not sent as a stream is what the stream adds up to.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from penstock.api.outputs import Completion, Delta
from penstock.api.reader import PromptReader
from penstock.api.sequences import PreparedPrompt
from penstock.base.errors import PenstockError
from penstock.server.answers.completions import BROKEN, cut_before, new_id
from penstock.server.answers.prompts import chat_tokens, read_chat
from penstock.server.answers.protocols import anthropic_error
from penstock.server.broker.calls import Call
from penstock.server.parsing.dialects import Dialect
from penstock.server.parsing.output_parser import OutputParser
from penstock.server.parsing.reading import Arguments, Begin, Broken, Content, End, Part, Reasoning
from penstock.server.wire.messages import RENAMED, CountTokensRequest, MessagesRequest
from penstock.server.wire.responses import named_here
from penstock.step.request import FinishReason

PING_SECONDS = 15.0
"""Seconds without anything to tell after which a stream has a ping, so that no one on the way takes it for
dead: a long prompt may take minutes."""
Block = dict[str, Any]
_FIELDS = {"text": "text", "thinking": "thinking"}
"""The field of a block that has its text, by the block's type."""


def read_message(
    reader: PromptReader, asked: MessagesRequest, dialect: Dialect | None
) -> tuple[list[PreparedPrompt], "MessageStream"]:
    """Return the only prompt of a checked request, and what writes the answer. May be called from any thread.

    Raise FieldError and RequestError for what cannot be served.
    """
    with named_here(RENAMED):
        chat = asked.chat()
        chat.check()
        ready, speech = read_chat(reader, chat, dialect, clamps=True)
    return [ready], MessageStream(asked, ready, speech())


def count_message(reader: PromptReader, asked: CountTokensRequest, dialect: Dialect | None) -> int:
    """Return the tokens of a prompt. Raises FieldError and RequestError."""
    with named_here(RENAMED):
        chat = asked.chat()
        chat.check()
        return len(chat_tokens(reader, chat, dialect))


class MessageStream:
    """Writes one message as it comes."""

    media_type = "text/event-stream"

    def __init__(self, asked: MessagesRequest, ready: PreparedPrompt, speech: OutputParser) -> None:
        self._asked, self._speech = asked, speech
        self._events: list[bytes] = []
        self._block: Block | None = None
        """The block that is being written."""
        self._text: list[str] = []
        """Its text, or the input of a tool as JSON."""
        self._called = 0
        """Calls that are whole."""
        self._finish: FinishReason | None = None
        self._stop = ""
        self.response: Block = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(ready.tokens), 0, 0),
        }

    async def events(self, call: Call) -> AsyncGenerator[bytes]:
        """Yield all events, as server-sent ones; none if no stream was asked for. Raises what keeps it from
        being complete."""
        self._tell("message_start", message=self.response)
        self._tell("ping")
        if self._events:
            yield self._drain()
        pieces = call.pieces()
        while True:
            try:
                # What ends the wait is met where there is nothing to give out yet: no piece is lost.
                async with asyncio.timeout(PING_SECONDS) as wait:
                    deltas = await anext(pieces)
            except StopAsyncIteration:
                break
            except TimeoutError:
                if not wait.expired():  # It is what has ended the call.
                    raise
                self._tell("ping")
                pieces = call.pieces()
            else:
                self._take(deltas)
            if self._events:
                yield self._drain()
        self._end(call.so_far())
        if self._events:
            yield self._drain()

    def failure(self, message: str) -> bytes:
        """Return the last event, when something has kept the message from being complete."""
        self._events = []
        self._tell(
            "error", **{key: one for key, one in anthropic_error(message, 500).items() if key != "type"}
        )
        return self._drain()

    def _drain(self) -> bytes:
        """Return and clear the events that were not sent yet."""
        events, self._events = self._events, []
        return b"".join(events)

    def _tell(self, kind: str, **fields: object) -> None:
        if self._asked.streams:
            event = msgspec.json.encode({"type": kind, **fields})
            self._events.append(b"event: " + kind.encode() + b"\ndata: " + event + b"\n\n")

    # ---- what comes

    def _take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            parts = self._speech.push(delta.text)
            if delta.finish_reason is not None:
                self._finish, self._stop = delta.finish_reason, delta.stop
                parts += self._speech.finish(cut=cut_before(delta.finish_reason, delta.stop))
            for part in parts:
                self._add(part)

    def _add(self, part: Part) -> None:
        match part:
            case Reasoning():
                if self._asked.tells_reasoning:
                    self._say("thinking", part.text)
            case Content():
                self._say("text", part.text)
            case Begin():
                self._open({"type": "tool_use", "id": new_id("toolu_", 12), "name": part.name, "input": {}})
            case Arguments():
                self._text.append(part.text)
                self._add_to({"type": "input_json_delta", "partial_json": part.text})
            case End():
                self._called += 1
                self._close()
            case Broken() if self._asked.streams:
                self._text = []
                self._close()
            case Broken():  # It has not been sent yet.
                self.response["content"].pop()
                self._block = None
                if part.text:
                    self._say("text", part.text)

    def _say(self, kind: str, text: str) -> None:
        if self._block is None or self._block["type"] != kind:
            self._open({"type": kind, _FIELDS[kind]: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._text.append(text)
        self._add_to({"type": f"{kind}_delta", _FIELDS[kind]: text})

    def _open(self, block: Block) -> None:
        self._close()
        self._block, self._text = block, []
        self.response["content"].append(block)
        self._tell("content_block_start", index=self._place, content_block=block)

    def _add_to(self, delta: Block) -> None:
        self._tell("content_block_delta", index=self._place, delta=delta)

    def _close(self) -> None:
        if self._block is None:
            return
        text = "".join(self._text)
        if self._block["type"] == "tool_use":
            self._block["input"] = msgspec.Raw(text.encode() or b"{}")
        else:
            self._block[_FIELDS[self._block["type"]]] = text
        if self._block["type"] == "thinking":  # Clients keep no thoughts without one.
            self._block["signature"] = new_id("sig_")
            self._add_to({"type": "signature_delta", "signature": self._block["signature"]})
        self._tell("content_block_stop", index=self._place)
        self._block = None

    @property
    def _place(self) -> int:
        """Return the number of the last block."""
        return len(self.response["content"]) - 1

    def _end(self, completion: Completion) -> None:
        if self._finish is FinishReason.ERROR:
            raise PenstockError(BROKEN)
        self._close()
        reason, made = "end_turn", len(completion.tokens)
        if self._finish is FinishReason.LENGTH:
            reason = "max_tokens" if made >= self._asked.max_tokens else "model_context_window_exceeded"
        elif self._called:
            reason = "tool_use"
        elif self._stop:
            reason = "stop_sequence"
        ended = {"stop_reason": reason, "stop_sequence": self._stop or None}
        usage = _usage(len(completion.prompt_tokens), completion.cached_tokens, made)
        self.response |= {**ended, "usage": usage}
        self._tell("message_delta", delta=ended, usage=usage)
        self._tell("message_stop")


def _usage(prompt: int, cached: int, made: int) -> dict[str, int]:
    """Return the tokens of a message, as Anthropic counts them: those that were found are no input."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": made,
    }
