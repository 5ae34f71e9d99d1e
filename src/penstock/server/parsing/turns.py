"""Shapes conversations and tools so that templates of models that write in channels take them: those know one
message of instructions, at the head, and one call in a message, and nothing that is said besides it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.base.pacing import paced
from penstock.server.parsing.harmony import APART, CHANNEL, END, MESSAGE, START
from penstock.server.parsing.jsontext import written

EFFORTS = ("low", "medium", "high")
"""Such models can be asked to reason this much."""
_INSTRUCTIONS = ("system", "developer")
_PREAMBLE = f"{END}{START}assistant{CHANNEL}commentary{MESSAGE}"
"""Stands between reasoning and what is said before a call: templates write both as one message."""
_REASONING = ("reasoning_content", "reasoning")
Turn = dict[str, object]


def channel_messages(messages: Sequence[Turn]) -> list[Turn]:
    """Return a conversation with all instructions at its head, and each call in a message of its own, its
    answers behind it."""
    lead = [one for one in messages if one["role"] in _INSTRUCTIONS and one["content"]]
    said = APART.join(str(one["content"]) for one in lead)
    shaped: list[Turn] = [{"role": one["role"], "content": said} for one in lead[:1]]
    calling: list[Turn] = []
    answers: list[Turn] = []
    for message in paced(messages):
        if message["role"] == "tool" and calling:
            answers.append(message)
        elif message["role"] not in _INSTRUCTIONS:
            shaped += _answered(calling, answers)
            calling, answers = _calling(message), []
            if not calling:
                shaped.append(message)
    return shaped + _answered(calling, answers)


def _calling(message: Turn) -> list[Turn]:
    """Return a message with calls as messages with one call each; none if it has no calls. What is said
    besides stands in the first."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    said, thought = message["content"], next((message[key] for key in _REASONING if message.get(key)), None)
    first = message
    if said and thought:
        first = {key: value for key, value in message.items() if key not in _REASONING}
        first |= {"reasoning_content": f"{thought}{_PREAMBLE}{said}", "content": ""}
    later: Turn = {"role": message["role"], "content": ""}
    return [{**(later if at else first), "tool_calls": [call]} for at, call in enumerate(calls)]


def _answered(calling: Sequence[Turn], answers: Sequence[Turn]) -> list[Turn]:
    """Return calls, each with its answers behind it; those to none of them come last."""
    own: dict[object, list[Turn]] = {}
    for answer in answers:
        own.setdefault(answer.get("tool_call_id"), []).append(answer)
    turns: list[Turn] = []
    for message in calling:
        turns += [message, *own.pop(_name(message), ())]
    return turns + [answer for left in own.values() for answer in left]


def _name(message: Turn) -> str:
    """Return the id of a message's only call; empty if it has none."""
    match message:
        case {"tool_calls": [{"id": str(name)}]}:
            return name
    return ""


def channel_tools(described: Iterable[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Return tools as such templates write them: they take a description for granted, and some defaults as
    text."""
    return [{**tool, "function": _function(tool["function"])} for tool in described]


def _function(function: Any) -> Mapping[str, object]:
    parameters = function["parameters"]
    properties = parameters.get("properties")
    if isinstance(properties, Mapping):
        parameters = {
            **parameters,
            "properties": {name: _parameter(schema) for name, schema in properties.items()},
        }
    return {"description": "", **function, "parameters": parameters}


def _parameter(schema: object) -> object:
    if not isinstance(schema, Mapping) or isinstance(default := schema.get("default", ""), str):
        return schema
    return {**schema, "default": written(default)} if {"enum", "oneOf"} & schema.keys() else schema
