"""Measures what steps take, from the end of one to the end of the next, and how soon outputs end.

Steps are averaged by their size. Of steps of about one size some decode more rows beside a prompt, take in
more prompts, or attend to more: by how much these take longer tells what a row, a prompt, and a token that is
attended to takes. All of this follows the latest steps and forgets those before.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

_NEW = 1 / 12
"""Weight of a new measurement in a moving average."""
_STEPS = 64
"""Steps of any size after which most of a measurement is forgotten when there is a new one."""
_OUTLIER = 3.0
"""A step counts as at most so many times what was expected, and that as at most so many times it."""
_FORGET = 1 - 1 / 512
"""Weight of what was learned from differences between steps after one more."""
_DOUBT = (8.0, 8.0, 30.0, 0.1)
"""Squares of differences, summed, that have to be seen before they count more than what was assumed."""
_CONTEXT = 1 / 1024
"""Tokens are counted in so many."""
_SWEEPS = 12
_ENDS = 64
"""Outputs that ended by themselves from which half of what was counted is forgotten."""
_TOKENS = 1 << 16
"""The same in tokens, where none ends by itself."""
_LEAST = 1 / 4
"""A step takes at least this part of its seconds without what is beside."""
Beside = tuple[float, float, float, float]
"""Rows, prompts but one, tokens that are attended to, and tokens of prompts; or the seconds of each."""
Points = tuple[tuple[float, ...], tuple[float, ...]]
"""Sizes in ascending order, and the seconds of a step of each."""


class _Mean:
    """Averages the steps of about one size."""

    __slots__ = ("beside", "count", "last", "seconds", "size")

    def __init__(self, size: float, seconds: float, beside: Beside, last: int) -> None:
        self.size, self.seconds, self.beside, self.count, self.last = size, seconds, beside, 1, last


class _Steps:
    """Averages steps by their size, of which there are two for each power of two."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}

    def add(
        self, number: int, size: float, seconds: float, beside: Beside, each: Beside
    ) -> tuple[float, float, Beside] | None:
        """Note a step. Return how long one of its size took up to now, how much longer it took, and what more
        was in it; None if it was the first.

        number: of the step. What was measured many steps before counts little.
        each: what each of what is beside takes, by what is known up to now.
        """
        key = math.frexp(size * size)[1]
        mean = self._means.get(key)
        if mean is None:
            self._means[key] = _Mean(size, seconds, beside, number)
            return None
        rows, prompts, attended, tokens = mean.beside
        more = (beside[0] - rows, beside[1] - prompts, beside[2] - attended, beside[3] - tokens)
        expected = max(mean.seconds + _product(each, more), _LEAST * mean.seconds)
        before = mean.seconds * min(_OUTLIER * seconds / expected, 1.0)
        longer = min(seconds, _OUTLIER * expected) - before
        mean.count += 1
        new = max(_NEW, 1 / mean.count, 1 - math.exp((mean.last - number) / _STEPS))
        mean.last = number
        mean.seconds = before + new * longer
        mean.size += new * (size - mean.size)
        mean.beside = (
            rows + new * more[0],
            prompts + new * more[1],
            attended + new * more[2],
            tokens + new * more[3],
        )
        return before, longer, more

    @property
    def seconds(self) -> list[float]:
        """Return what steps of each size take."""
        return [one.seconds for one in self._means.values()]

    def points(self, each: Beside) -> Points:
        """Return what steps take without what is beside, each of which takes so long."""
        found = [self._means[key] for key in sorted(self._means)]
        return tuple([one.size for one in found]), tuple(
            [max(one.seconds - _product(each, one.beside), _LEAST * one.seconds) for one in found]
        )


def _product(each: Beside, beside: Beside) -> float:
    """Return the seconds of what is beside the tokens of a step, which decide its size."""
    return each[0] * beside[0] + each[1] * beside[1] + each[2] * beside[2]


class _Differences:
    """Learns what one more row, prompt, and 1024 tokens that are attended to take: the least squares of what
    steps of about one size differ by, each as a part of what they take."""

    def __init__(self) -> None:
        self._squares = [[0.0] * len(_DOUBT) for _ in _DOUBT]
        self._products = [0.0] * len(_DOUBT)

    def add(self, before: float, longer: float, more: Beside) -> None:
        """Note that a step took longer than those before, and what more was in it."""
        weight = 1 / (before * before)
        for row, one in enumerate(more):
            squares = self._squares[row]
            for column, other in enumerate(more):
                squares[column] = _FORGET * squares[column] + weight * one * other
            self._products[row] = _FORGET * self._products[row] + weight * one * longer

    def each(self, assumed: Beside, usual: float) -> Beside:
        """Return what each takes, at least nothing. assumed: where nothing was seen. usual: seconds of a
        step."""
        found = list(assumed)
        for _ in range(_SWEEPS):
            for row, squares in enumerate(self._squares):
                doubt = _DOUBT[row] / (usual * usual or 1.0)
                others = sum([one * by for one, by in zip(squares, found, strict=True)])
                others -= squares[row] * found[row]
                found[row] = max(
                    (self._products[row] - others + doubt * assumed[row]) / (squares[row] + doubt), 0.0
                )
        return found[0], found[1], found[2], found[3]


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Says what steps take, by what was measured up to now.

    decodes: by their rows, without what these attend to. chunks: of steps with some of a prompt, by the
        tokens of that, later positions counted as more, without what is beside.
    each: seconds of a row beside a prompt, of a prompt beside another, of 1024 tokens attended to, and of as
        many tokens more or less among steps of about one size.
    ends: the chance that an output ends by itself with its next token; None before any output has ended.
    """

    decodes: Points = ((), ())
    chunks: Points = ((), ())
    ends: float | None = None
    each: Beside = (0.0, 0.0, 0.0, 0.0)

    @property
    def known(self) -> bool:
        """Tell whether a step with some of a prompt was measured."""
        return bool(self.chunks[0])

    def decode(self, rows: int, context: int = 0) -> float:
        """Return the seconds of a step that decodes so many rows, which attend to so many tokens in all."""
        sizes, seconds = self.decodes
        if not sizes:
            return self.chunk(rows)
        more = self.each[2] * context * _CONTEXT
        if rows >= sizes[-1]:
            return more + seconds[-1] + _slope(self.decodes) * (rows - sizes[-1])
        return more + _between(sizes, seconds, rows)

    def chunk(self, tokens: float, rows: int = 0, prompts: int = 1, context: int = 0) -> float:
        """Return the seconds of a step with so many tokens of prompts, which decodes so many rows too."""
        sizes, seconds = self.chunks
        beside = _product(self.each, (rows, max(prompts - 1, 0), context * _CONTEXT, 0.0))
        least = self.decodes[1][0] if self.decodes[0] else 0.0
        if tokens > sizes[-1]:
            first = min(least, seconds[-1])  # A step of one token takes as long as one that decodes.
            return beside + first + (seconds[-1] - first) * tokens / sizes[-1]
        if tokens < sizes[0]:
            return beside + max(seconds[0] * tokens / sizes[0], min(least, seconds[0]))
        return beside + _between(sizes, seconds, tokens)


def _slope(decodes: Points) -> float:
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
        self._decodes, self._chunks, self._differences = _Steps(), _Steps(), _Differences()
        self._number = 0
        """Steps that were measured."""
        self._each = (0.0, 0.0, 0.0, 0.0)
        """What each of what is beside takes, when that was asked for last."""
        self._ends, self._tokens, self._ended = 0.0, 0.0, False

    def stepped(self, prompt: float, rows: int, seconds: float, prompts: int = 1, context: int = 0) -> None:
        """Note that a step took so many seconds. prompt: its tokens of prompts, later positions counted as
        more. rows: those that it decoded. prompts: of how many the tokens are. context: tokens that the rows
        attend to."""
        attended = context * _CONTEXT
        self._number += 1
        beside: Beside
        if prompt:
            beside = (rows, prompts - 1, attended, prompt * _CONTEXT)
            found = self._chunks.add(self._number, prompt, seconds, beside, self._each)
        elif rows:
            beside = (0.0, 0.0, attended, 0.0)
            found = self._decodes.add(self._number, rows, seconds, beside, self._each)
        else:
            return
        if found is not None:
            self._differences.add(*found)

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
        row = _slope(self._decodes.points((0.0, 0.0, 0.0, 0.0)))
        all_of_them = [*self._decodes.seconds, *self._chunks.seconds]
        each = self._each = self._differences.each(
            (row, 0.0, 0.0, 0.0), sum(all_of_them) / max(len(all_of_them), 1)
        )
        return StepSeconds(
            self._decodes.points((0.0, 0.0, each[2], 0.0)), self._chunks.points(each), ends, each
        )
