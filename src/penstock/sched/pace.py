"""Measures what steps take, from the end of one to the end of the next, and how soon outputs end."""

import math
from bisect import bisect_left
from dataclasses import dataclass

_NEW = 1 / 8
"""Weight of a new measurement in a moving average."""
_OUTLIER = 3.0
"""A step counts as at most so many times the average before it, and that as at most so many times it."""
_ENDS = 64
"""Outputs that ended by themselves from which half of what was counted is forgotten."""
_TOKENS = 1 << 16
"""The same in tokens, where none ends by itself."""
Points = tuple[tuple[float, ...], tuple[float, ...]]
"""Sizes in ascending order, and the seconds of a step of each."""


class _Curve:
    """Averages the seconds of steps by their size, of which there are two for each power of two."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float, int]] = {}
        """The mean size, its seconds, and how many steps these are of."""
        self._points: Points | None = None

    def add(self, size: float, seconds: float) -> None:
        key = math.frexp(size * size)[1]
        mean = self._means.get(key)
        count = 1
        if mean is not None:
            count = mean[2] + 1
            new, before = max(_NEW, 1 / count), min(mean[1], _OUTLIER * seconds)
            seconds = before + new * (min(seconds, _OUTLIER * before) - before)
            size = mean[0] + new * (size - mean[0])
        self._means[key] = size, seconds, count
        self._points = None

    @property
    def points(self) -> Points:
        if self._points is None:
            found = [self._means[key] for key in sorted(self._means)]
            self._points = tuple(one[0] for one in found), tuple(one[1] for one in found)
        return self._points


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Says what steps take, by what was measured up to now.

    decodes: by their rows. chunks: of steps with some of a prompt, by the tokens of that, later positions
        counted as more, without what rows that are decoded beside take.
    ends: the chance that an output ends by itself with its next token; None before any output has ended.
    """

    decodes: Points = ((), ())
    chunks: Points = ((), ())
    ends: float | None = None

    @property
    def known(self) -> bool:
        """Tell whether a step with some of a prompt was measured."""
        return bool(self.chunks[0])

    def decode(self, rows: int) -> float:
        """Return the seconds of a step that decodes so many rows."""
        sizes, seconds = self.decodes
        if not sizes:
            return self.chunk(rows)
        if rows >= sizes[-1]:
            return seconds[-1] + _each(self.decodes) * (rows - sizes[-1])
        return _between(sizes, seconds, rows)

    def chunk(self, tokens: float, rows: int = 0) -> float:
        """Return the seconds of a step with so many tokens of prompts, which decodes so many rows too."""
        sizes, seconds = self.chunks
        beside = rows * _each(self.decodes) if rows else 0.0
        if tokens > sizes[-1]:
            return beside + seconds[-1] * tokens / sizes[-1]
        if tokens < sizes[0]:
            least = self.decodes[1][0] if self.decodes[0] else 0.0
            return beside + max(seconds[0] * tokens / sizes[0], min(least, seconds[0]))
        return beside + _between(sizes, seconds, tokens)


def _each(decodes: Points) -> float:
    """Return the seconds that one more row takes: half of its part of a step, where steps of one size are all
    that is known."""
    sizes, seconds = decodes
    if not sizes or sizes[-1] == 1:
        return 0.0
    if len(sizes) == 1:
        return seconds[0] / sizes[0] / 2
    return max((seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0]), 0.0)


def _between(sizes: tuple[float, ...], seconds: tuple[float, ...], size: float) -> float:
    at = bisect_left(sizes, size)
    if at in (0, len(sizes)):
        return seconds[min(at, len(sizes) - 1)]
    part = (size - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
    return seconds[at - 1] + part * (seconds[at] - seconds[at - 1])


class StepTimes:
    """Keeps what was measured of steps, and of outputs that have ended. Only the engine's thread has it."""

    def __init__(self) -> None:
        self._decodes, self._chunks = _Curve(), _Curve()
        self._ends, self._tokens, self._ended = 0.0, 0.0, False

    def stepped(self, prompt: float, rows: int, seconds: float) -> None:
        """Note that a step took so many seconds. prompt: its tokens of prompts, later positions counted as
        more. rows: those that it decoded."""
        if prompt:
            beside = rows * _each(self._decodes.points) if rows else 0.0
            self._chunks.add(prompt, max(seconds - beside, seconds / 2))
        elif rows:
            self._decodes.add(rows, seconds)

    def yielded(self, tokens: int, ended: int, by_themselves: int) -> None:
        """Note tokens of outputs, and outputs that have ended: all, and those of them that did so before they
        had as many tokens as they might."""
        self._ended = self._ended or ended > 0
        self._tokens += tokens
        self._ends += by_themselves
        if self._ends > _ENDS or self._tokens > _TOKENS:
            self._ends, self._tokens = self._ends / 2, self._tokens / 2

    def measured(self) -> StepSeconds:
        """Return what steps take, for any thread."""
        ends = min(self._ends / max(self._tokens, 1.0), 1.0) if self._ended else None
        return StepSeconds(self._decodes.points, self._chunks.points, ends)
