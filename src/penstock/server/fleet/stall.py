"""Tells whether a process that loads a model still gets on."""

from collections.abc import Callable
from time import monotonic

import psutil

STALL = 600.0
"""Seconds in which a load has neither computed nor read anything when it is given up: twice as many as a
compiler of kernels has, for which it waits."""
LOOK = 2.0
"""Seconds between two looks at it."""
_IDLE = 0.02
"""Share of the time that a process computes at most though it only waits."""


class StallWatch:
    """A watch looks at what a process has computed and read, and notes since when that has been nothing."""

    def __init__(self, pid: int, clock: Callable[[], float] = monotonic) -> None:
        """Begin to look at a process, by its number."""
        self._pid, self._clock = pid, clock
        self._looked = self._since = clock()
        self._seen = self._used()

    def seconds(self) -> float:
        """Return the seconds for which the process has not got on, as of this look."""
        now, used = self._clock(), self._used()
        before, share = self._seen, _IDLE * (now - self._looked)
        if used is None or before is None or used[1] > before[1] or used[0] - before[0] > share:
            self._since = now
        self._seen, self._looked = used, now
        return now - self._since

    def _used(self) -> tuple[float, int] | None:
        """Return the seconds that it has computed, and the bytes that it has read; None if nobody knows."""
        try:
            process = psutil.Process(self._pid)
            took, read = process.cpu_times(), process.io_counters()
        except (psutil.Error, AttributeError, OSError):
            return None
        return took.user + took.system, read.read_bytes + read.read_chars
