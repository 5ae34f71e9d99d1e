"""Decides of how many missing experts of a layer the CPU computes how many, by what both were seen to take.

The link brings some experts while the CPU computes the others where they rest, so a layer takes as long as
the later of both. What each takes for so many experts is a straight line through what was measured while both
ran, of which old measurements count less and less. Now and then everything comes through the link, to know
what that takes; where the CPU makes layers slower than that by more than `MARGIN`, everything comes for a
while.

Nothing here reaches torch or a clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

MARGIN = 1.03
"""A layer may take at most so many times as long with the CPU as without."""
HAND_OVER = 15e3
"""Nanoseconds from the device's question to the CPU's work and back, until it has been seen."""
FADES = 0.7
"""A review leaves so much of what was measured before it."""
AGAIN = 64
"""Reviews after which what is not in use is tried again."""
WORTH = 100
"""Trials of the CPU take at most one of so many parts of the time."""
_FIRST = 3
"""The CPU begins with one of so many experts."""


class Times(IntEnum):
    """Times say what a row of measured times is of, by so many experts.

    ALONE, TOGETHER: a layer with so many missing, without and with the CPU. REST: all but the CPU, where so
    many came beside it. LATE: what a layer took beyond the CPU's work, where the CPU computed so many and was
    later than the rest.
    """

    ALONE = 0
    TOGETHER = 1
    REST = 2
    LATE = 3


@dataclass(slots=True)
class CpuShares:
    """CpuShares say of steps with about as many tokens how many experts the CPU takes.

    experts: of a layer. most: that the CPU takes at a time. always: whether it takes some of any number; else
    measurements say whether it takes any.
    """

    experts: int
    most: int
    always: bool
    times: NDArray[np.float64] = field(init=False)
    """Rows of Times: for each number of experts how often, and nanoseconds in all, faded."""
    took: NDArray[np.float64] = field(init=False)
    """The same of the CPU's work alone."""
    shares: list[int] = field(init=False)
    """Numbers that the CPU takes of 0, 1, 2, ... missing experts."""
    reviews: int = 0
    """Reviews in which something had been measured."""
    slower_until: int = 0
    """The review from which the CPU is tried again."""

    def __post_init__(self) -> None:
        """Begin with a guess, or with measuring what it takes without the CPU."""
        self.times, self.took = np.zeros((len(Times), self.experts + 1, 2)), np.zeros((self.most + 1, 2))
        self.shares = self._first() if self.always else self._none()

    def review(self, times: NDArray[np.int64], took: NDArray[np.int64]) -> Sequence[int]:
        """Return the shares from now on. times, took: what was measured since the last review, shaped as the
        fields."""
        if not times[:, :, 0].any():
            return self.shares
        self.reviews += 1
        for kept, new in (*zip(self.times, times, strict=True), (self.took, took)):
            if new.any():
                kept *= FADES
                kept += new
        self.shares = self._decided(used=bool(times[Times.TOGETHER, :, 0].any()))
        return self.shares

    def _decided(self, *, used: bool) -> list[int]:
        """Return the shares from now on. used: whether the CPU has computed any since the last review."""
        if not self.always:
            if self.reviews < self.slower_until:
                return self._none()
            if self.reviews % AGAIN == 0:
                if used:
                    return self._none()
                self.took[:], self.times[Times.LATE] = 0, 0  # That was long ago.
                return [min(count, 1) for count in range(self.experts + 1)]
            if (slower := self._slower()) > MARGIN:
                self.slower_until = self.reviews + max(AGAIN, round(WORTH * (slower - 1)))
                self.times[Times.TOGETHER] = 0
                return self._none()
        rest, cpu = self._rest_line(), self._cpu_line()
        if rest is None or cpu is None:
            return self._first()
        return self._best(rest, cpu)

    def _slower(self) -> float:
        """Return how many times as long layers take with the CPU as without, of those that miss as many
        experts; 0 where that is not known."""
        alone, together = self.times[Times.ALONE], self.times[Times.TOGETHER]
        both = (alone[:, 0] > 0) & (together[:, 0] > 0)
        without = (alone[both, 1] / alone[both, 0] * together[both, 0]).sum()
        return float(together[both, 1].sum() / without) if without else 0.0

    def _best(self, rest: "CostLine", cpu: "CostLine") -> list[int]:
        """Return of each number of missing experts how many the CPU takes for the later of both to be the
        earliest."""
        missing, mine = np.arange(self.experts + 1)[:, None], np.arange(self.most + 1)[None, :]
        both = np.maximum(rest.first + rest.each * (missing - mine), cpu.first + cpu.each * mine)
        alone = np.inf if self.always else rest.first + rest.each * missing[1:]
        both[1:, :1], both[0, 0] = alone, 0.0
        found: list[int] = np.where(mine > missing, np.inf, both).argmin(1).tolist()
        return found

    def _rest_line(self) -> "CostLine | None":
        return line_through(self.times[Times.ALONE] + self.times[Times.REST])

    def _cpu_line(self) -> "CostLine | None":
        line = line_through(self.took)
        return line and CostLine(line.first + self._hand_over(), line.each)

    def _hand_over(self) -> float:
        count, spent = self.times[Times.LATE].sum(0)
        return max(float(spent / count), 0.0) if count else HAND_OVER

    def _none(self) -> list[int]:
        return [0] * (self.experts + 1)

    def _first(self) -> list[int]:
        return [min(-(-count // _FIRST), self.most) for count in range(self.experts + 1)]


@dataclass(frozen=True, slots=True)
class CostLine:
    """A line is what so many experts take: a time for all, and one for each."""

    first: float
    each: float


def line_through(times: NDArray[np.float64]) -> CostLine | None:
    """Return the line nearest to mean times by number, weighted by how often each was seen; neither of its
    times is below 0. None where nothing was seen. times: `[numbers, 2]`, how often, and the sum."""
    counts = np.flatnonzero(times[:, 0])
    if not len(counts):
        return None
    weights, means = times[counts, 0], times[counts, 1] / times[counts, 0]
    x, y = np.average(counts, weights=weights), np.average(means, weights=weights)
    spread = float((weights * (counts - x) ** 2).sum())
    each = float((weights * (counts - x) * (means - y)).sum()) / spread if spread else y / max(x, 1.0)
    each = min(max(each, 0.0), y / x if x else 0.0)
    return CostLine(float(y - each * x), float(each))
