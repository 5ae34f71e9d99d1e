"""Prints reports of commands as one line of JSON."""

import dataclasses
import json
from collections.abc import Mapping
from math import isfinite


class JsonLine:
    """Prints a dataclass that derives from it as one line of JSON."""

    __slots__ = ()

    def line(self, **more: object) -> str:
        """Return all fields and `more` as one line of JSON. The fields of `subject` stand at its top.

        Infinite numbers are null, since JSON has none.
        """
        whole = dataclasses.asdict(self)  # type: ignore[call-overload]  # what derives from this is a dataclass
        line = {**whole.pop("subject", {}), **whole, **more}
        return json.dumps(_finite(line), default=str)


def _finite(value: object) -> object:
    """Return a value with None for every number that is infinite, or none."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
