"""Begins timings when what is timed no longer gets faster: of peers and of penstock alike.

The first runs of anything pay for what is met for the first time: files that are read, memory that is mapped,
kernels that are chosen. How many runs that takes differs by a factor of ten between systems. So first runs
count for no system, and all of them are recorded.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Rule:
    """Decides when a baseline is warm: its last `window` runs differ by `within` of the least at most, and do
    not fall from each to the next.

    It is given up after `most` runs, which the record then says. At least `least` runs are made, warm or not.
    """

    window: int = 3
    within: float = 0.05
    most: int = 12
    least: int = 3

    def holds(self, seconds: Sequence[float]) -> bool:
        """Tell whether runs that took `seconds` are warm."""
        last = seconds[-self.window :]
        if len(last) < self.window or len(seconds) < self.least:
            return False
        falls = self.window > 1 and all(after < before for before, after in pairwise(last))
        return max(last) <= (1 + self.within) * min(last) and not falls


RULE = Rule()
BRIEF = Rule(window=2, most=5, least=2)
"""The rule for runs that take ten seconds and more each."""
AGAIN = 3
"""Times that a measurement is made anew at most, where its later half is faster than its earlier one."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Holds the seconds of every run.

    warming: of runs that warmed it up, which count nowhere.
    warm: the rule was met; if not, as many runs were made as it allows.
    seconds: of runs that were measured.
    """

    warming: tuple[float, ...]
    warm: bool
    seconds: tuple[float, ...]
    rule: Rule

    @property
    def median(self) -> float:
        """Return the median of the measured seconds."""
        return statistics.median(self.seconds)

    @property
    def falling(self) -> bool:
        """Tell whether the later half of what was measured is still faster than the earlier, by more than the
        rule lets runs differ."""
        half = len(self.seconds) // 2
        if half == 0:
            return False
        early, late = self.seconds[:half], self.seconds[-half:]
        return statistics.median(late) * (1 + self.rule.within) < statistics.median(early)

    def record(self) -> dict[str, object]:
        """Return the record for a file of results, in seconds: all runs, their statistics, and the rule that
        warmed them."""
        low, _, high = (
            statistics.quantiles(self.seconds, n=4, method="inclusive")
            if len(self.seconds) > 1
            else self.seconds * 3
        )
        return {
            "median_s": self.median,
            "least_s": min(self.seconds),
            "most_s": max(self.seconds),
            "quartiles_s": [low, high],
            "seconds": list(self.seconds),
            "count": len(self.seconds),
            "warming_s": list(self.warming),
            "warm": self.warm,
            "falling": self.falling,
            "rule": asdict(self.rule),
        }

    def __str__(self) -> str:
        warm, falls = "" if self.warm else ", NOT WARM", ", STILL FALLING" if self.falling else ""
        return (
            f"{self.median:.4g} s ({min(self.seconds):.4g} to {max(self.seconds):.4g}, {len(self.seconds)} "
            f"runs after {len(self.warming)} to warm up){warm}{falls}"
        )


def warmed(work: Callable[[], float], rule: Rule = RULE) -> tuple[tuple[float, ...], bool]:
    """Do `work`, which returns its seconds, until `rule` holds. Return all seconds, and whether it held in
    the end."""
    seconds: list[float] = []
    while not (warm := rule.holds(seconds)) and len(seconds) < rule.most:
        seconds.append(work())
    return tuple(seconds), warm


def timed(work: Callable[[], float], times: int, rule: Rule = RULE) -> Timed:
    """Warm `work` up, and measure it so many times.

    Some baselines rest on a plateau and get faster after all. A measurement that still falls counts as
    warming up and is made again, at most AGAIN times.
    """
    warming, warm = warmed(work, rule)
    found = Timed(warming, warm, tuple(work() for _ in range(times)), rule)
    for _ in range(AGAIN):
        if not found.falling:
            break
        found = Timed(found.warming + found.seconds, warm, tuple(work() for _ in range(times)), rule)
    return found


def in_turns(sides: dict[str, Callable[[], float]], rounds: int, rule: Rule = RULE) -> dict[str, Timed]:
    """Warm every side up by itself, then measure all of them `rounds` times in turns; who begins changes,
    because machines drift."""
    warm = {name: warmed(work, rule) for name, work in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            seconds[name].append(sides[name]())
    return {name: Timed(*warm[name], tuple(seconds[name]), rule) for name in sides}
