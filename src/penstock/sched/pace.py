"""Measures what steps take, from the end of one to the end of the next, and how soon outputs end."""

import math
from bisect import bisect_left
from dataclasses import dataclass

_NEW = 1 / 8
"""Weight of a new measurement in a moving average."""
_OUTLIER = 4.0
"""A step counts as at most so many times the average before it."""
_ENDS = 64
"""Outputs that ended by themselves from which half of what was counted is forgotten."""
_TOKENS = 1 << 16
"""The same in tokens, where none ends by itself."""
Points = tuple[tuple[float, ...], tuple[float, ...]]
"""Sizes in ascending order, and the seconds of a step of each."""


class _Curve:
    """Averages the seconds of steps by their size, of which there are two for each power of two."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}
        self._points: Points | None = None

    def add(self, size: float, seconds: float) -> None:
        key = math.frexp(size * size)[1]
        mean = self._means.get(key)
        if mean is not None:
            seconds = min(seconds, _OUTLIER * mean[1])
            size, seconds = mean[0] + _NEW * (size - mean[0]), mean[1] + _NEW * (seconds - mean[1])
        self._means[key] = size, seconds
        self._points = None

    @property
    def points(self) -> Points:
        if self._points is None:
            found = [self._means[key] for key in sorted(self._means)]
            self._points = tuple(size for size, _ in found), tuple(seconds for _, seconds in found)
        return self._points


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Says what steps take, by what was measured up to now.

    decodes: by their rows. chunks: of steps with some of a prompt, by all of their tokens, later positions
        counted as more.
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
        if rows >= sizes[-1] and len(sizes) > 1:
            slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
            return seconds[-1] + max(slope, 0.0) * (rows - sizes[-1])
        return _between(sizes, seconds, rows)

    def chunk(self, tokens: float) -> float:
        """Return the seconds of a step of so many tokens, some of which are of a prompt."""
        sizes, seconds = self.chunks
        if tokens > sizes[-1]:
            return seconds[-1] * tokens / sizes[-1]
        if tokens < sizes[0]:
            least = self.decodes[1][0] if self.decodes[0] else 0.0
            return max(seconds[0] * tokens / sizes[0], min(least, seconds[0]))
        return _between(sizes, seconds, tokens)


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
            self._chunks.add(prompt + rows, seconds)
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
