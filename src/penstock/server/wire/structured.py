"""Defines what clients may send for an answer of a given form: OpenAI's field, and the newer one of other
servers."""

import json
from typing import Any, Literal

from msgspec import Struct

from penstock.base.errors import StructureError
from penstock.step.structure import Structure


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
