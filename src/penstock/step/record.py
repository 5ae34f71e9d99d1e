"""Makes dataclasses that are cheap to create, for values that a step makes for each row."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool, slots: bool):
        """Make a dataclass that is frozen for the type checker alone.

        A check at run time takes seven times as long to create one, milliseconds a step for hundreds of rows.
        """
        assert frozen
        return dataclass(slots=slots, unsafe_hash=True)
