"""Records what is seen of streaming: how long arithmetic waited for weights, and when each copy and each use
began and ended."""

import threading
from collections import deque
from dataclasses import dataclass

from penstock.base.trace import Trace
from penstock.memory.streams import Ticket

_MANY = 256
"""Uses after which those that are done are counted, even if `stalled` is not called."""


@dataclass(slots=True)
class _Use:
    name: str
    taken: Ticket
    begun: Ticket
    done: Ticket | None = None


class StreamWaits:
    """Keeps tickets of what is under way, and sums of what is done. Any thread may call it."""

    def __init__(self, trace: Trace | None) -> None:
        self.trace = trace
        self._lock = threading.Lock()
        self._uses: deque[_Use] = deque()
        self._copies: deque[tuple[str, int, Ticket, Ticket]] = deque()
        self._stalled = 0.0

    def begin(self, name: str, taken: Ticket, begun: Ticket) -> None:
        """Note that the arithmetic was ready for a group at `taken`, and had it at `begun`."""
        with self._lock:
            if (
                self._uses and self._uses[-1].done is None
            ):  # Broken off: it will never be, and whatever is behind it would wait.
                self._uses.pop()
            self._uses.append(_Use(name, taken, begun))

    def end(self, done: Ticket) -> None:
        """Note that it was done with the last of them."""
        with self._lock:
            if self._uses and self._uses[-1].done is None:
                self._uses[-1].done = done
            many = len(self._uses) + len(self._copies) > _MANY
        if many:
            self.stalled()

    def copied(self, name: str, size: int, first: Ticket, last: Ticket) -> None:
        """Note, for the trace, that `size` bytes of a group were copied between these."""
        with self._lock:
            self._copies.append((name, size, first, last))

    def stalled(self) -> float:
        """Return the seconds that arithmetic has waited, in all uses that are done."""
        with self._lock:
            while self._copies and self._copies[0][3].done:
                name, size, first, last = self._copies.popleft()
                if self.trace is not None:
                    self.trace.span("host to device", name, first.when(), last.when(), bytes=size)
            while self._uses and (done := self._uses[0].done) is not None and done.done:
                use = self._uses.popleft()
                taken, begun = use.taken.when(), use.begun.when()
                self._stalled += max(begun - taken, 0.0)
                if self.trace is not None:
                    self.trace.span("compute", use.name, begun, done.when())
                    if begun > taken:
                        self.trace.span("stalls", f"waits for {use.name}", taken, begun)
            return self._stalled
