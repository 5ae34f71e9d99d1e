"""Answers of /v1/responses: items, and the events that tell of them as they come.

A response is always made as a stream; one that is not sent as a stream is what the stream adds up to.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from time import time
from typing import Any

import msgspec

from penstock.api.outputs import Completion, Delta
from penstock.api.reader import PromptReader
from penstock.api.sequences import PreparedPrompt
from penstock.api.text.tokenizer import Tokenizer
from penstock.server.answers.completions import BROKEN, cut_before, logprob_entries, new_call, new_id
from penstock.server.answers.prompts import read_chat
from penstock.server.broker.calls import Call
from penstock.server.parsing.dialects import Dialect
from penstock.server.parsing.output_parser import OutputParser
from penstock.server.parsing.reading import Arguments, Begin, Broken, Content, End, Part, Reasoning
from penstock.server.wire.conversation import Message
from penstock.server.wire.items import messages_of
from penstock.server.wire.responses import RENAMED, ResponsesRequest, named_here
from penstock.step.request import FinishReason

Item = dict[str, Any]
Keep = Callable[[str, bytes, Sequence[Message]], None]
"""Takes a response's name, what was answered, and the conversation up to its end."""
_CONVERSATION = msgspec.json.Decoder(list[Message])
_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""The type of an item's content, by the item's type. Calls have no content."""


def read_response(
    reader: PromptReader, asked: ResponsesRequest, dialect: Dialect | None, *, before: bytes
) -> tuple[list[PreparedPrompt], "ResponseStream"]:
    """Return the only prompt of a checked request, and what writes its response. May be called from any
    thread.

    dialect: how the model writes; None is what its templates say.
    before: the conversation that it goes on with, as JSON; empty if there is none.

    Raise FieldError and RequestError for what cannot be served.
    """
    messages = messages_of(asked.input, _CONVERSATION.decode(before) if before else ())
    with named_here(RENAMED):
        chat = asked.chat(messages)
        chat.check()
        ready, speech = read_chat(reader, chat, dialect)
    return [ready], ResponseStream(asked, messages, ready, speech(), reader.tokenizer)


class ResponseStream:
    """Writes one response as it comes."""

    media_type = "text/event-stream"

    def __init__(
        self,
        asked: ResponsesRequest,
        messages: Sequence[Message],
        ready: PreparedPrompt,
        speech: OutputParser,
        tokenizer: Tokenizer,
    ) -> None:
        self.response = _begun(asked, ready)
        self._asked, self._messages, self._speech, self._tokenizer = asked, messages, speech, tokenizer
        self._events: list[bytes] = []
        self._number = 0
        """Of the next event."""
        self._item: Item | None = None
        """The item that is being written."""
        self._text: list[str] = []
        self._logprobs: list[Any] = []
        """Of the item."""
        self._pending: list[Any] = []
        """Log-probabilities of tokens without text so far."""
        self._called: list[Any] = []
        """Log-probabilities of a call's tokens, which are given out if it is broken off."""
        self._reasoned = 0
        """Tokens of reasoning."""
        self._finish: FinishReason | None = None
        self.keep: Keep | None = None
        """Keeps the response, if it is to be kept."""

    async def events(self, call: Call) -> AsyncGenerator[bytes]:
        """Yield all events, as server-sent ones; none if no stream was asked for. Raises what keeps it from
        being complete."""
        for kind in ("created", "in_progress"):
            self._tell(f"response.{kind}", response=self.response)
        for event in self._drain_events():
            yield event
        async for deltas in call.pieces():
            self._take(deltas)
            for event in self._drain_events():
                yield event
        self._end(call.so_far())
        if self.keep is not None and self.response["status"] != "failed":
            said = [
                item
                for item in self.response["output"]
                if item["type"] != "function_call" or item["status"] == "completed"
            ]
            self.keep(
                self.response["id"], msgspec.json.encode(self.response), messages_of(said, self._messages)
            )
        for event in self._drain_events():
            yield event

    def failure(self, message: str) -> bytes:
        """Return the last event, when something has kept the response from being complete."""
        self._close("incomplete")
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        self._tell("response.failed", response=self.response)
        return b"".join(self._drain_events())

    def _drain_events(self) -> list[bytes]:
        """Return and clear the pending server-sent events."""
        events, self._events = self._events, []
        return events

    def _tell(self, kind: str, **fields: object) -> None:
        if self._asked.streams:
            event = {"type": kind, "sequence_number": self._number, **fields}
            self._events.append(
                b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
            )
            self._number += 1

    # ---- what comes

    def _take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            thinking = self._speech.thinking
            parts = self._speech.push(delta.text)
            self._reasoned += len(delta.tokens) if thinking or self._speech.thinking else 0
            self._pending += logprob_entries(self._tokenizer, delta.logprobs)
            if delta.finish_reason is not None:
                self._finish = delta.finish_reason
                parts += self._speech.finish(cut=cut_before(delta.finish_reason, delta.stop))
            for part in parts:
                self._add(part)

    def _add(self, part: Part) -> None:
        match part:
            case Reasoning():
                self._say("reasoning", part.text)
            case Content():
                self._say("message", part.text)
            case Begin():
                self._open("function_call", call_id=new_call(), name=part.name, arguments="")
                self._called, self._pending = self._pending, []
            case Arguments():
                self._text.append(part.text)
                self._called += self._pending
                self._pending = []
                self._tell("response.function_call_arguments.delta", **self._place(), delta=part.text)
            case End():
                self._close("completed")
                self._pending = []
            case Broken() if self._asked.streams or not part.text:  # Without one it was cut off.
                self._close("incomplete")
                self._pending = []
            case Broken():  # It has not been sent yet.
                self.response["output"].pop()
                self._item = None
                self._pending = self._called + self._pending
                self._say("message", part.text)

    def _say(self, kind: str, text: str) -> None:
        if self._item is None or self._item["type"] != kind:
            self._open(
                kind,
                **(
                    {"role": "assistant", "content": []}
                    if kind == "message"
                    else {"summary": [], "content": []}
                ),
            )
            self._tell("response.content_part.added", **self._place(), content_index=0, part=self._part(""))
        self._text.append(text)
        fields = {"content_index": 0, "delta": text}
        if kind == "message":
            fields["logprobs"] = self._pending
            self._logprobs += self._pending
        self._pending = []
        self._tell(f"response.{_PARTS[kind]}.delta", **self._place(), **fields)

    def _open(self, kind: str, **fields: object) -> None:
        self._close("completed")
        self._item = {"id": new_id(_PREFIXES[kind]), "type": kind, "status": "in_progress", **fields}
        self.response["output"].append(self._item)
        self._text, self._logprobs = [], []
        self._tell(
            "response.output_item.added", output_index=len(self.response["output"]) - 1, item=self._item
        )

    def _close(self, status: str) -> None:
        if self._item is None:
            return
        kind, text = self._item["type"], "".join(self._text)
        self._item["status"] = status
        if kind == "function_call":
            self._item["arguments"] = text
            self._tell(
                "response.function_call_arguments.done",
                **self._place(),
                name=self._item["name"],
                arguments=text,
            )
        else:
            part = self._part(text)
            self._item["content"] = [part]
            place = self._place() | {"content_index": 0}
            logprobs = {"logprobs": self._logprobs} if kind == "message" else {}
            self._tell(f"response.{_PARTS[kind]}.done", **place, text=text, **logprobs)
            self._tell("response.content_part.done", **place, part=part)
        self._tell(
            "response.output_item.done", output_index=len(self.response["output"]) - 1, item=self._item
        )
        self._item = None

    def _place(self) -> dict[str, object]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.response["output"]) - 1}

    def _part(self, text: str) -> Item:
        assert self._item is not None
        part: Item = {"type": _PARTS[self._item["type"]], "text": text}
        return (
            part | {"annotations": [], "logprobs": self._logprobs}
            if self._item["type"] == "message"
            else part
        )

    def _end(self, completion: Completion) -> None:
        cut, broken = self._finish is FinishReason.LENGTH, self._finish is FinishReason.ERROR
        self._close("incomplete" if cut or broken else "completed")
        status = "failed" if broken else "incomplete" if cut else "completed"
        made, given = len(completion.tokens), len(completion.prompt_tokens)
        self.response |= {
            "status": status,
            "completed_at": int(time()) if status == "completed" else None,
            "error": {"code": "server_error", "message": BROKEN} if broken else None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": given,
                "input_tokens_details": {"cached_tokens": completion.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": made,
                "output_tokens_details": {"reasoning_tokens": self._reasoned},
                "total_tokens": given + made,
            },
        }
        self._tell(f"response.{status}", response=self.response)


def _begun(asked: ResponsesRequest, ready: PreparedPrompt) -> Item:
    """Return a response before its first output."""
    sampling = ready.samplings[0]
    form = {"type": "text"} if asked.text is None or asked.text.format is None else asked.text.format
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": asked.model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": asked.stores,
        "temperature": sampling.temperature,
        "text": {"format": form, "verbosity": asked.text and asked.text.verbosity},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": asked.user,
    }
