"""Structures as llguidance reads them, and what it says of them, in words for the client."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from math import isfinite, lcm
from time import monotonic

from penstock.base.errors import StructureError
from penstock.step.structure import Structure, StructureKind

_MOST_MULTIPLE = 20_000
"""The most that all `multipleOf` of a schema may come to, written without a point: the library takes a state
for each."""
_MOST_COMMON = 100_000
"""The least number that all of these divide: where several hold for one number, the library takes a state for
each up to that."""
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
"""JSON without space between its parts: what a model could go on and on with, and nobody needs."""
_PATIENCE = 0.5
"""Seconds in which the part of a schema is looked for that is at fault."""
_LONGEST_SAID = 300
_MOST_SHOWN = 10**30
_NO_SCHEMA = "schema must be an object or boolean"
_WITHIN = ("properties", "patternProperties", "$defs", "definitions")
_OF = ("items", "additionalProperties", "prefixItems", "anyOf", "oneOf", "allOf")


def grammar_of(structure: Structure) -> str:
    """Return a structure as a grammar of the library's. Raise StructureError for what it must not be
    given."""
    from llguidance import LLMatcher

    text = structure.text
    match structure.kind:
        case StructureKind.JSON_SCHEMA:
            return _of_schema(json.loads(text))
        case StructureKind.JSON_OBJECT:
            return _of_schema({"type": "object"})
        case StructureKind.REGEX:
            return LLMatcher.grammar_from_regex(text)
        case StructureKind.CHOICE:
            return _of_lark("start: TEXT\nTEXT: " + " | ".join(map(json.dumps, json.loads(text))))
        case StructureKind.LARK:
            return _of_lark(_with_schemas(text))


def _of_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _of_schema(schema: dict[str, object]) -> str:
    _check_multiples(schema)
    return json.dumps({"grammars": [{"json_schema": _safe(schema)}]})


def _with_schemas(text: str) -> str:
    """Return a grammar, with the schemas in it made safe. Raises StructureError."""
    parts, schemas = list[str](), list[object]()
    at = 0
    for found in re.finditer(r"%json\s*", text):
        if found.start() < at:  # Within a schema.
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
            parts += text[at : found.end()], json.dumps(_safe(schema) if isinstance(schema, dict) else schema)
        except (ValueError, RecursionError) as error:
            raise StructureError(f"what follows %json is not JSON: {error}") from error
        schemas.append(schema)
        at = end
    _check_multiples(schemas)
    return "".join([*parts, text[at:]])


def _safe(schema: dict[str, object]) -> dict[str, object]:
    """Return a schema of compact JSON, unless it has rules of its own for the library."""
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict) or own.keys() & {"whitespace_flexible", "whitespace_pattern"}:
        return schema
    return {**schema, "x-guidance": {**_COMPACT, **own}}


def _check_multiples(schema: object) -> None:
    """Check the `multipleOf` of one schema, or of several in a list. Raises StructureError if they take too
    much."""
    numbers = [number for number in _multiples(schema) if number]
    for what, came, most in (
        ("comes to", sum(numbers), _MOST_MULTIPLE),
        ("has a common multiple of", lcm(*numbers), _MOST_COMMON),
    ):
        if came > most:
            shown = came if came < _MOST_SHOWN else "more than can be shown"
            raise StructureError(
                f"multipleOf {what} {shown}, written without points; {most} are allowed, so use fewer or "
                "smaller ones"
            )


def _multiples(schema: object) -> Iterator[int]:
    """Yield every number that may be a `multipleOf`, without its point."""
    waiting = [schema]
    while waiting:
        match waiting.pop():
            case dict() as entries:
                waiting += entries.values()
                number = entries.get("multipleOf")
                if type(number) is int or (isinstance(number, float) and isfinite(number)):
                    yield int("".join(map(str, Decimal(str(number)).as_tuple().digits)))
            case list() as entries:
                waiting += entries


def said(error: str) -> str:
    """Return what a message of the library's says, in one line, without the text that it shows."""
    lines = error.splitlines()
    marks = [line.index("^") for line in lines if "^" in line and not line.strip("^ ")]
    fault = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    if fault is not None:  # Of a regular expression, which is shown four columns in.
        return f"{fault}, at character {marks[0] - 3}" if marks else fault
    text = " ".join(
        line.strip()
        for line in lines
        if line.strip("^ ") and not re.match(r"\s+\d+ \| |<non-verbose/>", line)
    )
    text = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", text)
    text = text if len(text) <= _LONGEST_SAID else f"{text[:_LONGEST_SAID]}..."
    return (
        f"{text}; make it simpler"
        if re.search(r"too (many|complex)|schema too large|fuel|; max is", text, re.IGNORECASE)
        else text
    )


def placed(structure: Structure, error: str, error_of: Callable[[dict[str, object]], str | None]) -> str:
    """Return the error with the part of a schema that it comes from, if that is found.

    The part is the smallest that has the same error by itself.

    error_of: returns what is wrong with a schema; it is asked for a while.
    """
    if structure.kind is not StructureKind.JSON_SCHEMA:
        return error
    schema = json.loads(structure.text)
    named = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path, here, late = "", schema, monotonic() + _PATIENCE
    while True:
        for step, part in _parts(here):
            if monotonic() > late:
                return f"{error}; within {path}" if path else error
            if error == error_of({**named, **part}):
                path, here = f"{path}/{step}", part
                break
        else:
            none = next((step for step, part in _steps(here) if not isinstance(part, dict | bool)), "")
            if none and _NO_SCHEMA in error:
                path = f"{path}/{none}"
            return f"{error}; at {path or 'the root of the schema'}"


def _parts(schema: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the schemas within a schema, and the way to each."""
    yield from ((step, part) for step, part in _steps(schema) if isinstance(part, dict))


def _steps(schema: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield what should be a schema within a schema, and the way to each."""
    for key in (*_WITHIN, *_OF):
        match schema.get(key):
            case dict() as entries if key in _WITHIN:
                found = [(f"{key}/{name}", part) for name, part in entries.items()]
            case list() as entries:
                found = [(f"{key}/{place}", part) for place, part in enumerate(entries)]
            case None:
                found = []
            case part:
                found = [(key, part)]
        yield from found
