"""Counts the prompt tokens of a request that it never computes, by the tier where their KV was found."""

from dataclasses import dataclass, field
from typing import NamedTuple

_HOST, _DISK, _COMPUTED = 1, 2, 3
_FROM_HOST = bytes([_HOST, _HOST, _DISK, _COMPUTED]).ljust(256, b"\0")
_FROM_DISK = bytes([_DISK, _DISK, _DISK, _COMPUTED]).ljust(256, b"\0")
"""Tables say what a position that comes from a tier becomes, by what it was."""


class FoundByTier(NamedTuple):
    """Counts tokens found on the device (or where a long request reads them), on the host, and on disk."""

    device: int = 0
    host: int = 0
    disk: int = 0


_NOTHING = FoundByTier()


@dataclass(slots=True)
class FoundTokens:
    """Keeps which prompt tokens of a request were found, and not computed by any of its shares.

    Blocks may be found at any time: between two chunks of a prompt, in several parts, and after a preemption.
    A position that was computed once stays so, however often its KV is found later.
    """

    prompt: int
    """Tokens of the prompt."""
    reached: int = 0
    """Positions [0, reached) have been computed, or found, at least once."""
    tiers: FoundByTier = _NOTHING
    _marks: bytearray = field(default_factory=bytearray)
    """One for each position of the prompt, or none until one may have been found."""

    @property
    def total(self) -> int:
        """Return how many prompt tokens were not computed."""
        return sum(self.tiers)

    def set_out(self, start: int, stop: int, *, disk: bool) -> None:
        """Note that blocks with positions [start, stop) are on their way from the host or the disk.

        They count as found there if the request comes to skip them. Those that it had reached before stay
        what they are.
        """
        marks, part = self._marked(), slice(max(start, self.reached), min(stop, self.prompt))
        marks[part] = marks[part].translate(_FROM_DISK if disk else _FROM_HOST)

    def compute(self, start: int, stop: int) -> FoundByTier:
        """Note that a share computes positions [start, stop), and that those before them are there.

        Returns how many of these had never been reached, and so have been found since the last share.
        """
        start, stop = min(start, self.prompt), min(stop, self.prompt)
        before, self.reached = self.reached, max(self.reached, stop)
        if start == before and not self._marks:
            return _NOTHING
        marks = self._marked(before)
        new, lost = self._count(before, start), self._count(start, min(stop, before))
        marks[start:stop] = bytes([_COMPUTED]) * (stop - start)
        had = zip(self.tiers, new, lost, strict=True)
        self.tiers = FoundByTier(*(tokens + more - less for tokens, more, less in had))
        return new

    def _marked(self, computed: int | None = None) -> bytearray:
        """Return the marks. `computed`: leading positions that were computed if there are no marks yet."""
        if not self._marks:
            count = self.reached if computed is None else computed
            self._marks = bytearray(self.prompt)
            self._marks[:count] = bytes([_COMPUTED]) * count
        return self._marks

    def _count(self, start: int, stop: int) -> FoundByTier:
        return FoundByTier(*(self._marks.count(mark, start, stop) for mark in (0, _HOST, _DISK)))
