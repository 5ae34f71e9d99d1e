"""Work on a thread ends when nobody waits for it any more: long work asks whether it is wanted."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class UnwantedError(Exception):
    """Work is broken off because its client has gone, or its time is over. Nobody is left to be told."""


@dataclass(slots=True)
class Waiter:
    """Waits for a piece of work. `gone` is set once, on any thread, and read by the work."""

    gone: bool = False


class _Own(threading.local):
    waiter: Waiter | None = None


_own = _Own()


def while_wanted(waiter: Waiter, work: Callable[[], T]) -> T:
    """Return what `work` returns. Within it, `expect_wanted` asks for this waiter."""
    _own.waiter = waiter
    try:
        expect_wanted()
        return work()
    finally:
        _own.waiter = None


def expect_wanted() -> None:
    """Raise UnwantedError if the waiter for this thread's work has gone."""
    if _own.waiter is not None and _own.waiter.gone:
        raise UnwantedError("nobody waits for this any more")
