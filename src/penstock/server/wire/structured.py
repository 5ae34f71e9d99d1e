"""Defines what clients may send for an answer of a given form: OpenAI's field, and the newer one of other
servers."""

import json
from typing import Any, Literal

from msgspec import Struct

from penstock.base.errors import StructureError
from penstock.step.structure import DEEPEST, Structure


class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """Gives the schema that an answer keeps to."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """These last three change nothing: an answer is always what the schema says."""


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """Asks for a form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structure(self) -> Structure | None:
        """Return the structure that it asks for; None for plain text. Raise StructureError."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise StructureError(
                "response_format of type json_schema must have json_schema.schema, and other types must "
                "not; correct response_format"
            )
        if self.json_schema is not None:
            return Structure.json_schema(self.json_schema.schema)
        return Structure.json_object() if self.type == "json_object" else None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """Asks for a form of the answer, in exactly one of these fields."""

    json: dict[str, Any] | str | None = None
    """A schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    """The space between parts of JSON, as a regular expression; there is none if it is not given."""

    def structure(self) -> Structure:
        """Return the structure that it asks for. Raise StructureError."""
        match (self.json, self.regex, self.choice, self.grammar):
            case (schema, None, None, None) if schema is not None:
                return spaced(schema, self.whitespace_pattern)
            case (None, str(pattern), None, None):
                return Structure.regex(pattern)
            case (None, None, list(texts), None):
                return Structure.choice(texts)
            case (None, None, None, str(grammar)):
                return Structure.lark(grammar)
        raise StructureError(
            "structured_outputs must have exactly one of json, regex, choice and grammar; leave the others "
            "out"
        )


def spaced(schema: dict[str, Any] | str, pattern: str | None) -> Structure:
    """Return the structure of a schema, with space between parts as the pattern says. Raise
    StructureError."""
    if pattern is None:
        return Structure.json_schema(schema)
    loaded = json.loads(Structure.json_schema(schema).text)
    return Structure.json_schema({**loaded, "x-guidance": {"whitespace_pattern": pattern}})


_COMBINED = {"if", "then", "else", "dependentSchemas", "unevaluatedProperties", "patternProperties"}
_BRANCHES = {"anyOf", "oneOf", "allOf", "$ref"}
_NAMED = "properties", "$defs", "definitions"
_ONE = "items", "additionalProperties"
_SEVERAL = "anyOf", "oneOf", "allOf", "prefixItems"
"""Keywords with schemas by their names, with one, and with a list of them."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have no properties but those that it names, unless it says so: as
    llama.cpp, and with it ollama, reads one. Where parts of a schema hold for the same object, none of them
    names all of its properties, so it stays as it is."""
    level: list[Any] = [schema]
    for _ in range(DEEPEST):  # What is deeper is refused.
        if any(_overlaps(one) for one in level):
            return schema
        level = [part for one in level for part in _parts(one)]
    made: dict[str, Any] = _closed(schema, 0)
    return made


def _overlaps(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    several = schema.get("allOf")
    return (
        bool(schema.keys() & _COMBINED)
        or ("properties" in schema and bool(schema.keys() & _BRANCHES))
        or (isinstance(several, list) and len(several) > 1)
    )


def _parts(schema: Any) -> list[Any]:
    """Return the schemas in a schema."""
    if not isinstance(schema, dict):
        return []
    found = [schema[name] for name in _ONE if name in schema]
    for name in _NAMED:
        if isinstance(named := schema.get(name), dict):
            found += named.values()
    for name in _SEVERAL:
        if isinstance(several := schema.get(name), list):
            found += several
    return found


def _closed(schema: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > DEEPEST:
        return schema
    made = dict(schema)
    for name in schema.keys() & {*_ONE}:
        made[name] = _closed(schema[name], depth + 1)
    for name in _NAMED:
        if isinstance(named := schema.get(name), dict):
            made[name] = {key: _closed(one, depth + 2) for key, one in named.items()}
    for name in _SEVERAL:
        if isinstance(several := schema.get(name), list):
            made[name] = [_closed(one, depth + 2) for one in several]
    required, named = schema.get("required", []), schema.get("properties")
    if not isinstance(named, dict) or not isinstance(required, list):
        return made
    if all(isinstance(one, str) and one in named for one in required):
        made.setdefault("additionalProperties", False)
    return made
