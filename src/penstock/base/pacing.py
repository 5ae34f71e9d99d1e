"""Long work in Python that others do not wait for: it pauses, so that threads which want the interpreter's
lock find it free."""

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from penstock.base.wanted import expect_wanted

T = TypeVar("T")
_FEW = 256
_MOST_PAUSES = 128
"""Pauses that one piece of work takes at most, however large it is: 0.4 s."""
_PAUSE = 0.003
"""Seconds. A thread that is busy in Python keeps the lock for 5 ms each time that it gets it, and a step of a
model gives it away hundreds of times."""


def paced(many: Sequence[T]) -> Iterator[T]:
    """Yield all items, with a pause after every few hundred.

    Work of some microseconds an item then leaves most of the time to other threads. Raises UnwantedError when
    the items are not waited for any more.
    """
    few = max(_FEW, -(-len(many) // _MOST_PAUSES))
    for at, one in enumerate(many, 1):
        yield one
        if at % few == 0:
            expect_wanted()
            time.sleep(_PAUSE)
