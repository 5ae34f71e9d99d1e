"""Prints reports of commands as one line of JSON."""

import dataclasses
import json


class JsonLine:
    """Prints a dataclass that derives from it as one line of JSON."""

    __slots__ = ()

    def line(self, **more: object) -> str:
        """Return all fields and `more` as one line of JSON. The fields of `subject` stand at its top."""
        whole = dataclasses.asdict(self)  # type: ignore[call-overload]  # what derives from this is a dataclass
        return json.dumps({**whole.pop("subject", {}), **whole, **more}, default=str)
