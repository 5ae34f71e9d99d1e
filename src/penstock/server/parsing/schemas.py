"""Reads a function's schema for the types of an argument, where a model writes that as plain text."""

from collections.abc import Mapping
from typing import Any

from penstock.server.parsing.jsontext import MalformedError, loaded, written

_DEEPEST = 16
"""Schemas within schemas that are looked into."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Python's constants as JSON: templates have no other way to write these."""
_OF = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


def kinds_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that the argument may have; none if the schema leaves it open. One that it does
    not know is a string."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return frozenset({"string"})
    return _kinds(properties[key], schema, 0, set())


def _kinds(schema: object, root: Mapping[str, Any], depth: int, seen: set[int]) -> frozenset[str]:
    """Return the JSON types that a schema allows; none if it leaves them open.

    seen: schemas, by their ids, that were looked into. Nothing new comes of one that many others refer to.
    """
    if not isinstance(schema, Mapping) or depth > _DEEPEST or id(schema) in seen:
        return frozenset()
    seen.add(id(schema))
    if isinstance(place := schema.get("$ref"), str):
        return _kinds(_found(place, root), root, depth + 1, seen)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(one for one in named if isinstance(one, str))
    for several in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(several), list):
            return frozenset().union(*(_kinds(one, root, depth + 1, seen) for one in options))
    values = (
        schema["enum"]
        if isinstance(schema.get("enum"), list)
        else [schema["const"]]
        if "const" in schema
        else []
    )
    return frozenset(_OF[type(value)] for value in values)


def _found(place: str, root: Mapping[str, Any]) -> object:
    """Return the part of a schema that "#/a/b" points to."""
    here: object = root
    for step in place.removeprefix("#").split("/")[1:]:
        here = here.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(here, Mapping) else None
    return here if place.startswith("#") else None


def typed(text: str, kinds: frozenset[str]) -> str:
    """Return the text as JSON of one of the kinds, or of any if there are none; as a string where it is
    nothing else."""
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    try:
        value = loaded(bare)
    except MalformedError:
        return written(text)
    kind = _OF[type(value)]
    if kind == "string" or (
        "string" in kinds and (kind not in kinds or kind in ("integer", "number", "boolean"))
    ):
        return written(text)
    return bare
