"""Specs that differ from a given one in a single value."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import TypeVar

from penstock.arch.spec import ModelSpec, MoeSpec, Router

_T = TypeVar("_T")


def neighbours(spec: ModelSpec) -> Iterator[ModelSpec]:
    """For every value of a spec, also those of its rope and its mixture, a spec in which that one is
    another."""
    if spec.moe is None:
        *others, last = spec.stack
        yield replace(
            spec, stack=(*others, replace(last, feed_forward=MoeSpec(4, 2, 40, Router(normalise=True))))
        )
    yield from _neighbours(spec)


def _neighbours(value: _T) -> Iterator[_T]:
    for field in fields(value):  # type: ignore[arg-type]
        now = getattr(value, field.name)
        if is_dataclass(now):
            changed: object
            for changed in _neighbours(now):
                yield replace(value, **{field.name: changed})  # type: ignore[type-var]
        elif isinstance(now, tuple) and now and is_dataclass(now[-1]):
            yield replace(value, **{field.name: now[:-1]})  # type: ignore[type-var]
            for changed in _neighbours(now[-1]):
                yield replace(value, **{field.name: (*now[:-1], changed)})  # type: ignore[type-var]
        else:
            yield replace(value, **{field.name: _another(now)})  # type: ignore[type-var]


def _another(value: object) -> object:
    if isinstance(value, Enum):
        return next(other for other in type(value) if other is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple):
        return (*value[:-1], _another(value[-1])) if value else (True,)
    return 1.5
