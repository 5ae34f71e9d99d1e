"""Measures how fast computing and transfers are, and decides whether to load blocks or compute them.

Only real work is measured; no request waits for a trial. A transfer's time is a line: a fixed part, and a
part for each block. A step's time is a curve: as long as the device waits for its work more tokens cost
nothing, and beyond that each costs its share, more at later positions.

Why loading is seldom later than computing alone. Both are counted to the first token: loading with the step
that is still needed then, and with the computation that overlaps it, at the price of cheap tokens. So blocks
that a step would have computed at no cost are not loaded. Unknowns count against the disk: beyond measured
sizes computing is assumed to be as cheap as it may be, a step of few tokens as slow as one of many, and the
disk as late as lately and behind all its reads. A disk that is unknown, or seemed too slow, reads a few
blocks beside while all is computed, so that no request pays for the trial. Arithmetic that goes on while its
request waits is not measured, since it would seem to take no time.
"""

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median, median_low

from penstock.step.plan import Route, TransferId

_KEPT = 0.85
"""Weight of the old value in the moving average of the disk's lateness."""
_LAST = 6
"""Measurements that are kept, for each route and each size of step."""
_APART = 2
"""Ratio of two counts from which their difference tells the slope of a line."""
_LEAST_SPLIT = 8
"""Fewest blocks of which a part is computed while the others are read."""
_FIXED = 2e-3
"""Seconds that loading takes beside its copies: it delays the request by a step."""
_STEP = 0.02
"""Seconds that a step of few tokens is assumed to take, if none was measured and one of more took as long."""
_RETRY_DISCOUNT = 0.8
"""Factor on the measured times of copies to the device that were declined, so that they are tried again."""
_SURE = 0.9
"""Loading must take less than this part of the time that it saves."""
_LATE = 0.1
"""Initial lateness of a disk, as a part of the expected time."""
_TRIED = 128
"""Most tokens for which a request waits for a disk that was never measured, since little is lost then."""
_FEW = 8
"""Blocks that are read for no request, to measure the disk."""
_AGAIN = 8
"""Refusals of a disk after which it is measured again."""
_MOST_TOLD = 128
"""Most measurements of one kind that are taken from another process."""


class Line:
    """A line is `first + each * count` in seconds, both at least 0, fitted to the last few measurements.

    It is the median of the lines through any two of them, so that one outlier does not matter.
    """

    def __init__(self) -> None:
        self._seen = deque[tuple[float, float]](maxlen=_LAST)

    def add(self, count: float, seconds: float) -> None:
        """Note that so many blocks took so many seconds."""
        self._seen.append((count, seconds))

    def scale(self, factor: float) -> None:
        """Multiply all measured times by `factor`."""
        self._seen = deque([(count, seconds * factor) for count, seconds in self._seen], maxlen=_LAST)

    @property
    def seen(self) -> list[tuple[float, float]]:
        """Return the measurements that are kept: counts and seconds."""
        return list(self._seen)

    @property
    def most(self) -> float:
        """Return the largest count that was measured."""
        return max(count for count, _ in self._seen)

    def fit(self) -> tuple[float, float]:
        """Return `first` and `each`, in seconds. `first` is 0 where the measurements are no line."""
        apart = [
            (more[1] - less[1]) / (more[0] - less[0])
            for less in self._seen
            for more in self._seen
            if more[0] >= _APART * less[0]
        ]
        if apart:
            each = median(apart)
            first = median([seconds - each * count for count, seconds in self._seen])
            if each > 0 and first > 0:
                return first, each
        return 0.0, median([seconds / count for count, seconds in self._seen])


class Curve:
    """A curve maps a step's work to seconds, piecewise linear through what was measured, and never falls.

    It has two points for each power of two. A point is the median of the last few measurements near it, so
    that neither many steps of one size nor one outlier says anything about others.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, deque[tuple[float, float]]] = {}
        self._middle: dict[int, tuple[float, float]] = {}
        self._work: list[float] = []
        self._seconds: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def add(self, work: float, seconds: float) -> None:
        """Note that a step of so much work took so many seconds."""
        size = math.frexp(work * work)[1]
        self._sizes.setdefault(size, deque(maxlen=_LAST)).append((seconds, work))
        self._middle[size] = median_low(self._sizes[size])
        points, least = list[tuple[float, float]](), math.inf
        for size in sorted(self._middle, reverse=True):
            seconds, work = self._middle[size]
            # What was seen once may have been held up: then it takes no more than what is more.
            seconds = min(seconds, least) if len(self._sizes[size]) == 1 else seconds
            least = min(least, seconds)
            points.append((work, seconds))
        points.reverse()
        self._work = [work for work, _ in points]
        self._seconds = list(accumulate([seconds for _, seconds in points], max))

    @property
    def points(self) -> list[tuple[float, float]]:
        """Return work and seconds of each point, in order of work."""
        return list(zip(self._work, self._seconds, strict=True))

    @property
    def slope(self) -> float:
        """Return the least seconds of a unit of work beyond what was measured, or 0 if unknown."""
        work, seconds = self._work[-1], self._seconds[-1]
        before = bisect_left(self._work, work / 2) - 1
        return (
            0.0
            if before < 0
            else min((seconds - self._seconds[before]) / (work - self._work[before]), seconds / work)
        )

    @property
    def mean(self) -> float:
        """Return the seconds a unit of the most work that was measured."""
        return self._seconds[-1] / self._work[-1]

    def at(self, work: float, least: float = 0.0, dear: bool = False) -> float:
        """Return the seconds that so much work takes.

        least: lower bound for less work than was ever measured, up to the time of the least work that was.
        dear: whether more work than was ever measured is extrapolated by the mean time of a unit, not by the
            slope.
        """
        index = bisect_left(self._work, work)
        if index == len(self._work):
            return self.mean * work if dear else self._seconds[-1] + self.slope * (work - self._work[-1])
        if not index:
            return max(self._seconds[0] * work / self._work[0], min(least, self._seconds[0]))
        span = self._work[index] - self._work[index - 1]
        return (
            self._seconds[index - 1]
            + (self._seconds[index] - self._seconds[index - 1]) * (work - self._work[index - 1]) / span
        )


@dataclass(slots=True)
class _TimedTransfer:
    """Holds one transfer under way to a tier.

    since, before: when its route was idle last, and how many blocks have set out since then before it.
    due: when it is expected to have come, in seconds of the scheduler's clock.
    """

    route: Route
    blocks: int
    at: float
    since: float
    before: int
    due: float


@dataclass(slots=True)
class TransferRates:
    """Holds the measured rates, in seconds. They are unknown until something was measured."""

    token: float | None = None
    """Seconds for each of the first tokens of a long prompt, or None.

    Without a measured step it is all that is known about computing.
    """
    block: dict[Route, float] = field(default_factory=dict)
    """Seconds for each block of a transfer, by route."""
    beside: dict[Route, float] = field(default_factory=dict)
    """Seconds that a transfer takes beside its blocks, by route."""
    late: float = _LATE
    """Moving average of how much longer than expected the disk takes, as a part of that."""
    doubles_at: float = math.inf
    """Position at which a token costs twice as much as the first."""
    _work: float = 0.0
    _tokens: int = 0
    _seconds: float = 0.0
    _hidden: bool = False
    """True if arithmetic under way overlaps its request's wait, so that its time cannot be measured."""
    _steps: Curve = field(default_factory=Curve)
    _moves: dict[Route, Line] = field(default_factory=dict)
    _coming: dict[TransferId, _TimedTransfer] = field(default_factory=dict)
    _declined: int = 0
    """Refusals of the disk since it was last accepted."""

    # ---- what was measured

    def stepped(self, work: float, tokens: int, seconds: float, ended: bool) -> None:
        """Note a step of so many tokens. Neither steps without tokens nor decode steps are measured.

        ended: whether its arithmetic was waited for. Then all steps before it have ended too.
        """
        if not tokens or (work <= tokens and not self._tokens and self.doubles_at < math.inf):
            return
        self._work += work
        self._tokens += tokens
        self._seconds += seconds
        if ended:
            if not self._hidden:
                self._steps.add(self._work, self._seconds)
                self.token = self._steps.slope or self._steps.mean
            self._work, self._tokens, self._seconds, self._hidden = 0.0, 0, 0.0, False

    def waited(self) -> None:
        """Note that a request waits for blocks while its arithmetic goes on: its time cannot be measured."""
        self._hidden = True

    def abandoned(self) -> None:
        """Note that a request ended amid its prompt: its arithmetic goes on, and its end is not awaited."""
        self._work, self._tokens, self._seconds, self._hidden = 0.0, 0, 0.0, True

    def sets_out(self, id: TransferId, route: Route, blocks: int, now: float) -> None:
        """Note that blocks set out, behind those of the same route."""
        last = next((coming for coming in reversed(self._coming.values()) if coming.route is route), None)
        since, before = (now, 0) if last is None else (last.since, last.before + last.blocks)
        due = now + self.queued(route, now) + (self._expected(route, blocks) or 0.0)
        self._coming[id] = _TimedTransfer(route, blocks, now, since, before, due)

    def moved(self, route: Route, blocks: int, seconds: float) -> None:
        """Note a transfer's time. Reads that overlap are measured together; copies are measured alone."""
        if route is Route.IN:
            coming = next(
                (one for one in self._coming.values() if one.route is route and one.blocks == blocks), None
            )
            if coming is not None:
                blocks, seconds = blocks + coming.before, seconds + coming.at - coming.since
            if expected := self.seconds(route, blocks):
                self.late = _KEPT * self.late + (1 - _KEPT) * min(max(seconds / expected - 1, 0), 1)
        line = self._moves.setdefault(route, Line())
        line.add(blocks, seconds)
        self.beside[route], self.block[route] = line.fit()

    def came(self, id: TransferId) -> None:
        """Note that a transfer is no longer under way."""
        self._coming.pop(id, None)

    def reset(self) -> None:
        """Note that no transfer and no step is under way."""
        self._coming.clear()
        self._work, self._tokens, self._seconds, self._hidden = 0.0, 0, 0.0, False

    # ---- for the next process

    def told(self) -> dict[str, object]:
        """Return the measurements in plain numbers, for the next process."""
        moves = {route.name: line.seen for route, line in self._moves.items()}
        return {"steps": self._steps.points, "moves": moves, "late": self.late}

    def recall(self, told: object, steps: bool) -> None:
        """Take over the measurements of another process, as `told` returned them. Malformed ones are ignored.

        A disk that was only written is assumed to be read as fast, so that it is used by a process that reads
        once.

        steps: whether that process computes as this one does.
        """
        if not isinstance(told, dict):
            return
        for work, seconds in _pairs(told.get("steps")) if steps else ():
            self._steps.add(work, seconds)
        if self._steps:
            self.token = self._steps.slope or self._steps.mean
        moves = told.get("moves")
        if isinstance(moves, dict):
            for route in Route:
                for blocks, seconds in _pairs(moves.get(route.name)) or (
                    _pairs(moves.get(Route.OUT.name)) if route is Route.IN else ()
                ):
                    self._moves.setdefault(route, Line()).add(blocks, seconds)
                if route in self._moves:
                    self.beside[route], self.block[route] = self._moves[route].fit()
        late = told.get("late")
        if isinstance(late, float) and 0 <= late <= 1:
            self.late = late

    # ---- what that tells

    def work(self, start: int, tokens: int) -> float:
        """Return the work of so many tokens from position `start` on, in units of the first token's work."""
        return tokens * (1 + (start + tokens / 2) / self.doubles_at)

    def computing(self, start: int, tokens: int, least: float = 0.0, dear: bool = False) -> float:
        """Return the seconds that computing so many tokens from position `start` on takes.

        least, dear: see `Curve.at`.
        """
        work = self.work(start, tokens)
        return self._steps.at(work, least, dear) if self._steps else (self.token or 0.0) * work

    def seconds(self, route: Route, blocks: float) -> float | None:
        """Return the seconds that so many blocks take by this route, or None if it was never measured."""
        per_block = self.block.get(route)
        return None if per_block is None else self.beside.get(route, 0.0) + per_block * blocks

    def _expected(self, route: Route, blocks: int) -> float | None:
        """Return the seconds that so many blocks are expected to take by this route, or None.

        Copies to the device that were never measured take as long as copies from it. Reads include lateness.
        For more blocks than were ever read at a time there is no fixed part: a line through few points is no
        guide.
        """
        seconds = self.seconds(route, blocks)
        if seconds is None and route is Route.UP:
            return self.seconds(Route.DOWN, blocks)
        if seconds is None or route is not Route.IN:
            return seconds
        seen = self._moves[route].most if route in self._moves else math.inf
        if blocks > seen:
            seconds = (self.seconds(route, seen) or 0.0) * blocks / seen
        return seconds * (1 + self.late)

    def queued(self, route: Route, now: float) -> float:
        """Return the seconds until all of a route have come.

        Late ones may take as long again as they are late.
        """
        coming = [one for one in self._coming.values() if one.route is route]
        return max(0.0, coming[-1].due - now, now - coming[0].due) if coming else 0.0

    @property
    def backlog(self) -> float:
        """Return the seconds that the device may still take, at most, for steps that were not waited for."""
        return self._steps.at(self._work) if self._steps else 0.0

    def due(self, id: TransferId) -> float:
        """Return when a transfer was expected to have come, as it set out."""
        return self._coming[id].due

    # ---- what is decided

    def loading_pays(
        self, seconds: float | None, start: int, tokens: int, after: int = 0, dear: bool = False
    ) -> bool:
        """Tell whether to load tokens from position `start` on, in `seconds`, rather than compute them.

        If a time is unknown, loading is tried. after: tokens that are computed after them in any case.
        """
        if seconds is None or self.token is None:
            return True
        # A step of the last tokens alone takes its time too.
        spared = self.computing(start, tokens + after, dear=dear) - self.computing(start + tokens, after)
        return seconds + _FIXED < _SURE * spared

    def copying_pays(self, blocks: int, size: int, start: int, after: int, now: float) -> bool:
        """Tell whether to copy blocks of `size` tokens from the host rather than compute them.

        For more tokens than were ever computed, copies are assumed to be faster. after: as for
        `loading_pays`.
        """
        seconds = self._expected(Route.UP, blocks)
        if self.loading_pays(
            None if seconds is None else self.queued(Route.UP, now) + seconds,
            start,
            blocks * size,
            after,
            True,
        ):
            return True
        # Next time the way up is thought to be a little faster, if that would help.
        if self.loading_pays(0.0, start, blocks * size, after) and Route.UP in self._moves:
            self._moves[Route.UP].scale(_RETRY_DISCOUNT)
            self.beside[Route.UP], self.block[Route.UP] = self._moves[Route.UP].fit()
        return False

    def computed_first(
        self, blocks: int, size: int, start: int, after: int = 1, now: float = 0.0, up: bool = True
    ) -> int:
        """Return how many of the first of so many blocks on disk to compute while the others are read.

        Both should end at once. All are computed where reading the others is not worth the wait.

        size: tokens of a block. start: position of the first one. after: as for `loading_pays`.
        up: whether blocks are copied to the device when they have come.
        """
        tokens = blocks * size
        if self.token is None or Route.IN not in self.block:
            return 0 if tokens <= _TRIED else blocks
        queued = self.queued(Route.IN, now)

        def computed(front: int) -> float:
            return self.computing(start, front * size)

        def come(front: int) -> float:
            return queued + (self._expected(Route.IN, blocks - front) or 0.0)

        def ready(front: int) -> float:
            copied = self._expected(Route.UP, blocks - front) or 0.0
            return max(computed(front), come(front)) + copied * up

        front = 0
        if blocks >= _LEAST_SPLIT:
            # The fewest that are not done before the rest has come, or one less, or none.
            even = bisect_left(range(blocks - 1), True, key=lambda front: computed(front) >= come(front))
            front = min((0, max(even - 1, 0), even), key=ready)
        unseen = self.computing(start + tokens, after, _STEP) - self.computing(start + tokens, after)
        if not self.loading_pays(ready(front) + unseen, start, tokens, after):
            return blocks
        self._declined = 0
        return front

    def look_again(self) -> int:
        """Return how many blocks to read now, for no request, to see whether a slow disk is fast enough
        again."""
        if any(coming.route is Route.IN for coming in self._coming.values()):
            return 0
        self._declined += 1
        return _FEW if self._declined.bit_count() == 1 or self._declined % _AGAIN == 0 else 0


def _pairs(told: object) -> list[tuple[float, float]]:
    """Return a list of counts and seconds, or an empty one if any of it is malformed or impossible."""
    if not isinstance(told, list) or len(told) > _MOST_TOLD:
        return []
    pairs = [tuple(pair) for pair in told if isinstance(pair, list | tuple) and len(pair) == 2]
    right = [
        (float(count), float(seconds))
        for count, seconds in pairs
        if isinstance(count, int | float)
        and isinstance(seconds, int | float)
        and 1 <= count <= 1e12
        and 1e-7 <= seconds <= 1e6
    ]
    return right if len(right) == len(told) else []
