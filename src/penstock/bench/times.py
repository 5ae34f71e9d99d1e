"""Computes statistics of timings: what one may say where the same thing was timed again and again."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Timings:
    """Holds statistics of one timing that was repeated, in milliseconds. The median is the number to quote,
    the least is what is possible, and the most shows what else was going on."""

    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Return the statistics of `seconds`."""
        return cls(1e3 * statistics.median(seconds), 1e3 * min(seconds), 1e3 * max(seconds), len(seconds))

    def __str__(self) -> str:
        return f"{self.median:.3g} ms ({self.least:.3g} to {self.most:.3g}, {self.count} measured)"
