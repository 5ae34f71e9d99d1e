"""Checks the tools that a request names, describes them to templates, and holds the model to them where it
has to call one."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from msgspec import Struct

from penstock.base.pacing import paced
from penstock.server.parsing.dialects import Dialect
from penstock.server.parsing.jsontext import MalformedError, loaded
from penstock.server.parsing.turns import channel_messages
from penstock.server.wire.conversation import Message
from penstock.server.wire.decoding import FieldError, converted

MOST_TOOLS = 128
MOST_CALLS = 32
"""The most calls where there have to be some: a small model may find no end."""
_PLAIN = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON as templates write it, and models are used to."""
_OPEN = {
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


class _Function(Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Has no effect: what a model must write is what it is held to, and what it may write it is not."""


class _Tool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Function


class _NamedTool(Struct, forbid_unknown_fields=True):
    name: str


class _ToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _NamedTool


@dataclass(frozen=True, slots=True)
class Tools:
    """Lists the tools that the model may call; none if it must not."""

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of the arguments of each function."""
    described: Sequence[Mapping[str, object]] = ()
    """Tools as templates read them."""
    several: bool = True
    """There may be more than one call."""
    forced: tuple[str, ...] = ()
    """Functions, one of which it has to call; none if it may also say something else."""

    def __bool__(self) -> bool:
        return bool(self.schemas)

    def schema(self) -> str:
        """Return the schema of a list of calls, where there have to be some. Raise FieldError."""
        one = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{at}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for at, name in enumerate(self.forced)
        ]
        calls: dict[str, object] = {
            "type": "array",
            "items": {"anyOf": one},
            "minItems": 1,
            "maxItems": MOST_CALLS if self.several else 1,
        }
        try:
            own = {
                str(at): _moved(_closed(self.schemas[name]), f"#/$defs/{at}")
                for at, name in enumerate(self.forced)
            }
            return json.dumps(calls | {"$defs": own, "x-guidance": _PLAIN})
        except RecursionError as error:
            raise _too_deep() from error

    def arguments(self, name: str) -> str:
        """Return the schema of the arguments of a function, where they have to keep to it. Raise
        FieldError."""
        try:
            return json.dumps({**_closed(self.schemas[name]), "x-guidance": _PLAIN}, ensure_ascii=False)
        except RecursionError as error:
            raise _too_deep() from error


def _too_deep() -> FieldError:
    return FieldError("the parameters of a tool are nested too deeply; send a flatter schema", "tools")


def tools_of(tools: Sequence[object] | None, choice: object, parallel: bool | None) -> Tools:
    """Return the tools of a request. Raise FieldError for what they must not be."""
    if tools is None:
        if choice not in (None, "none", "auto"):
            raise FieldError(
                "tool_choice asks for a call, but there are no tools; send tools with it, or leave it out",
                "tool_choice",
            )
        return Tools()
    if not 1 <= len(tools) <= MOST_TOOLS:
        raise FieldError(
            f"there are {len(tools)} tools, but a request may have 1 to {MOST_TOOLS}; send fewer, or leave "
            "tools out if there are none",
            "tools",
        )
    functions = [converted(tool, _Tool, f"tools[{at}]", "tools").function for at, tool in enumerate(tools)]
    schemas: dict[str, Mapping[str, Any]] = {}
    for at, function in enumerate(functions):
        if not _NAME.fullmatch(function.name):
            raise FieldError(
                f"tools[{at}] is called {function.name[:160]!r}, but a name has from 1 to 128 letters, "
                "digits, underscores, dots and hyphens",
                "tools",
            )
        if function.name in schemas:
            raise FieldError(
                f"tools[{at}] has the name {function.name!r} of an earlier tool; give each tool its own name",
                "tools",
            )
        schema = function.parameters or {"type": "object", "properties": {}}
        if schema.get("type", "object") != "object":
            raise FieldError(
                f"the parameters of {function.name!r} must be an object, not of type "
                f"{str(schema['type'])[:40]!r}",
                "tools",
            )
        schemas[function.name] = schema
    if choice == "none":
        return Tools()
    described = [_described(function, schemas[function.name]) for function in functions]
    forced = _forced(choice, schemas)
    # A function that is named is called once, as with OpenAI; "required" is a call or more.
    several = parallel is not False and not (forced and choice != "required")
    return Tools(schemas, described, several, forced)


def _forced(choice: object, schemas: Mapping[str, object]) -> tuple[str, ...]:
    if choice in (None, "auto"):
        return ()
    if choice == "required":
        return tuple(schemas)
    if isinstance(choice, str):
        raise FieldError(
            f"tool_choice {choice[:40]!r} must be none, auto, required, or an object that names a function",
            "tool_choice",
        )
    name = converted(choice, _ToolChoice, "tool_choice", "tool_choice").function.name
    if name not in schemas:
        raise FieldError(
            f"tool_choice names {name[:160]!r}, which is not one of the tools: {', '.join(schemas)[:200]}",
            "tool_choice",
        )
    return (name,)


def _described(function: _Function, schema: Mapping[str, Any]) -> Mapping[str, object]:
    described = {} if function.description is None else {"description": function.description}
    return {"type": "function", "function": {"name": function.name, **described, "parameters": schema}}


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema without other arguments than those that it names, unless it says so."""
    return (
        {"type": "object", **schema}
        if _OPEN & schema.keys()
        else {"type": "object", **schema, "additionalProperties": False}
    )


def _moved(schema: object, place: str) -> object:
    """Return a schema that stands somewhere in another, its references following it."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(one, place) for one in schema] if isinstance(schema, list) else schema


def template_messages(messages: Sequence[Message], dialect: Dialect) -> list[dict[str, object]]:
    """Return messages as templates read them: arguments of calls, which clients have as text, are objects."""
    found = [_message(message.plain(), dialect) for message in paced(messages)]
    return channel_messages(found) if dialect.channels else found


def _message(message: dict[str, object], dialect: Dialect) -> dict[str, object]:
    if message["role"] == "developer" and not dialect.names_developer:
        message["role"] = "system"
    calls = message.pop("tool_calls", None)
    if calls:
        assert isinstance(calls, list)
        message["tool_calls"] = [_call(call, dialect) for call in calls]
    if isinstance(answered := message.get("tool_call_id"), str):
        message["tool_call_id"] = _id(answered, dialect)
    return message


def _call(call: Mapping[str, Any], dialect: Dialect) -> Mapping[str, Any]:
    if isinstance(name := call.get("id"), str):
        call = {**call, "id": _id(name, dialect)}
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = loaded(text or "{}")
    except MalformedError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _id(name: str, dialect: Dialect) -> str:
    return (
        sha256(name.encode()).hexdigest()[:9] if dialect.short_ids and not _SHORT_ID.fullmatch(name) else name
    )
