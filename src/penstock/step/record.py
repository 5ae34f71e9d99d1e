"""Values that a step makes one of for each row."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool, slots: bool):
        """A frozen dataclass, where only the type checker sees to it that none is changed: when that is
        done at run time, it takes seven times as long to make one, and for hundreds of rows that is
        milliseconds of a step."""
        assert frozen
        return dataclass(slots=slots, unsafe_hash=True)
