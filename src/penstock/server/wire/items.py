"""Reads the items of /v1/responses as the messages of a conversation."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from msgspec import Struct

from penstock.server.wire.conversation import Message
from penstock.server.wire.decoding import FieldError, converted

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_KINDS = "message, function_call, function_call_output and reasoning"
_LEADERS = ("system", "developer")


class _Said(Struct):
    """Reads a message. Items have more fields than these: ids, states, and whatever will be thought of. They
    are of no use to a model."""

    role: str
    content: str | list[dict[str, Any]]


class _Called(Struct):
    call_id: str
    name: str
    arguments: str


class _Answered(Struct):
    call_id: str
    output: str | list[dict[str, Any]]


class _Reasoned(Struct):
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None


def messages_of(
    items: str | Sequence[Mapping[str, Any]] | None, before: Sequence[Message] = ()
) -> list[Message]:
    """Return items as messages, behind those that were there before. What an assistant has thought, said and
    called one after the other is one message. Raise FieldError."""
    messages = list(before)
    if isinstance(items, str):
        return [*messages, Message(role="user", content=items)]
    for at, item in enumerate(items or ()):
        where = f"input[{at}]"
        match item.get("type", "message" if "role" in item else None):
            case "message":
                said = converted(item, _Said, where, "input")
                if said.role != "assistant":
                    messages.append(Message(role=said.role, content=_text(said.content, where)))
                else:
                    turn = _turn(messages)
                    turn.content = _both(turn.content, _text(said.content, where))
            case "function_call":
                call = converted(item, _Called, where, "input")
                turn = _turn(messages)
                calls = turn.tool_calls or []
                function = {"name": call.name, "arguments": call.arguments}
                turn.tool_calls = [*calls, {"id": call.call_id, "type": "function", "function": function}]
            case "function_call_output":
                answer = converted(item, _Answered, where, "input")
                messages.append(
                    Message(role="tool", tool_call_id=answer.call_id, content=_text(answer.output, where))
                )
            case "reasoning":
                reasoned = converted(item, _Reasoned, where, "input")
                if text := _text(reasoned.content or reasoned.summary or [], where):
                    turn = _turn(messages)
                    turn.reasoning_content = _both(turn.reasoning_content, text)
            case kind:
                raise FieldError(f"{where} is of type {str(kind)[:80]!r}; send one of {_KINDS}", "input")
    return messages


def _both(before: object, text: str) -> str:
    return f"{before}\n\n{text}" if before and isinstance(before, str) and text else text or str(before or "")


def _turn(messages: list[Message]) -> Message:
    """Return the assistant's message at the end, a new one if there is none."""
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant"))
    else:  # It may be another item's, too.
        messages[-1] = copy(messages[-1])
    return messages[-1]


def _text(parts: str | Sequence[Mapping[str, Any]], where: str) -> str:
    if isinstance(parts, str):
        return parts
    texts = []
    for part in parts:
        text = (
            part.get("refusal")
            if part.get("type") == "refusal"
            else part.get("text")
            if part.get("type") in _TEXTS
            else None
        )
        if not isinstance(text, str):
            raise FieldError(
                f"{where} has a part of type {str(part.get('type'))[:80]!r}; only text is supported, so "
                "leave it out",
                "input",
            )
        texts.append(text)
    return "".join(texts)


def led(messages: Sequence[Message], instructions: str | None) -> list[Message]:
    """Return the conversation with its instructions at the head: these and what its first messages say as
    such are one system's message."""
    lead = [instructions] if instructions else []
    rest = list(messages)
    while rest and rest[0].role in _LEADERS:
        first = rest.pop(0)
        lead += [first.content] if isinstance(first.content, str) and first.content else []
    return [Message(role="system", content="\n\n".join(lead)), *rest] if lead else rest
