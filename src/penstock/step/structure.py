"""Describes the form of a whole output: JSON of a schema, a regular expression, a choice, or a grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.base.errors import StructureError

LONGEST = 64 << 10
"""Most characters of a structure's text."""
DEEPEST = 400
"""Deepest nesting of a schema's values. Compilers descend by recursion, and may allow less."""


class StructureKind(Enum):
    """A StructureKind names the language that a structure is written in."""

    JSON_SCHEMA = "JSON schema"
    JSON_OBJECT = "JSON object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "grammar"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Structure:
    """A structure is a form that an output must have (guided decoding).

    The methods below make it. They raise StructureError for obvious mistakes; compiling it finds the others.

    text: a schema as JSON, a regular expression, a list of strings as JSON, or a grammar. Empty for any JSON
        object.
    """

    kind: StructureKind
    text: str

    @staticmethod
    def json_schema(schema: str | Mapping[str, object]) -> "Structure":
        """Return the form of JSON that a JSON Schema allows. The schema is an object, or text."""
        return Structure(StructureKind.JSON_SCHEMA, _bounded(StructureKind.JSON_SCHEMA, _written(schema)))

    @staticmethod
    def json_object() -> "Structure":
        """Return the form of any JSON object."""
        return Structure(StructureKind.JSON_OBJECT, "")

    @staticmethod
    def regex(pattern: str) -> "Structure":
        """Return the form of text that a regular expression matches as a whole.

        The syntax is that of Rust's `regex`, without look-around and back-references.
        """
        return Structure(StructureKind.REGEX, _bounded(StructureKind.REGEX, pattern))

    @staticmethod
    def choice(texts: Sequence[str]) -> "Structure":
        """Return the form of text that is one of these strings."""
        if (
            isinstance(texts, str)
            or not isinstance(texts, Sequence)
            or not texts
            or not all(isinstance(text, str) for text in texts)
        ):
            raise StructureError("choice must be a list with at least one string")
        for text in texts:
            _bounded(StructureKind.CHOICE, text)
        return Structure(
            StructureKind.CHOICE, _bounded(StructureKind.CHOICE, json.dumps(list(texts), ensure_ascii=False))
        )

    @staticmethod
    def lark(grammar: str) -> "Structure":
        """Return the form of a grammar in llguidance's variant of Lark's syntax, from the rule `start` on."""
        return Structure(StructureKind.LARK, _bounded(StructureKind.LARK, grammar))


def _written(schema: object) -> str:
    """Return a JSON schema as text in one form."""
    if isinstance(schema, str):
        _bounded(StructureKind.JSON_SCHEMA, schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise StructureError(f"the JSON schema is not JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise StructureError(f"the JSON schema must be an object; got {type(schema).__name__}")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StructureError(f"the JSON schema is not JSON: {error}") from error
    if (depth := _depth(schema)) > DEEPEST:
        raise StructureError(
            f"the JSON schema is {depth} values deep; {DEEPEST} are allowed, so give a flatter one"
        )
    return text


def _depth(value: object) -> int:
    """Return the nesting depth of JSON. Its values must not contain themselves."""
    depth, level = 0, [value]
    while level:
        depth += 1
        parts = [
            one.values() if isinstance(one, Mapping) else one if isinstance(one, list | tuple) else ()
            for one in level
        ]
        level = [inner for part in parts for inner in part]
    return depth


def _bounded(kind: StructureKind, text: object) -> str:
    if not isinstance(text, str):
        raise StructureError(f"the {kind.value} must be text; got {type(text).__name__}")
    if len(text) > LONGEST:
        raise StructureError(
            f"the {kind.value} has {len(text)} characters; {LONGEST} are allowed, so give a smaller one"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StructureError(
            f"the {kind.value} is not valid Unicode at character {error.start}; give it as UTF-8"
        ) from error
    return text
