"""Keeps random bytes of the system's at hand: to ask it for a few takes as long as for hundreds."""

import os
import threading

_POOL = 4096
"""Bytes that the system is asked for."""


class RandomPool:
    """Gives out random bytes of the system's, each once.

    Why this is safe. A lock guards what is left, and a forked process begins with nothing, so no two callers
    are given the same bytes.
    """

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._left, self._at = b"", 0

    def take(self, count: int) -> bytes:
        """Return so many random bytes."""
        if count > _POOL:
            return os.urandom(count)
        with self._lock:
            if self._at + count > len(self._left):
                self._left, self._at = os.urandom(_POOL), 0
            begin, self._at = self._at, self._at + count
            return self._left[begin : self._at]


_POOLED = RandomPool()
random_bytes = _POOLED.take
"""Returns so many random bytes, as secrets.token_bytes does."""
