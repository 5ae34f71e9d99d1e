"""How fast things have gone lately: what computing takes, and bringing blocks. Measured by the work itself,
never by a trial that anyone waits for.

A step takes its time even for few tokens, and so does a transfer for few blocks. A transfer is a line:
something that it takes anyway, and something for each block. Computing is no line: as long as the device
waits for its work, more tokens cost nothing, and then each costs its share, the more the further back
it looks. So it is a curve through what was measured.

Why what is decided is seldom later than computing alone. Both ways are counted to the first token: bringing
with the step that is left then, and with what is computed meanwhile, at the price of the cheap tokens. So
blocks that a step would have computed for nothing are not brought. What is not known counts against the disk:
beyond what was measured computing is thought to be as cheap as it may be, a step of few tokens to take as
long as one of many, the disk to be as late as it was lately and behind all that it was asked for. A disk of
which nothing is known, or that seemed too slow, is asked for a few blocks beside while all is computed, so
that no request pays for looking. And arithmetic that goes on while its request waits is not measured: it
would seem to take no time.
"""

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median, median_low

from penstock.step.plan import Route, TransferId

_KEPT = 0.85
"""What how late the disk was before still weighs, each time that it is seen how late it is."""
_LAST = 6
"""Measurements of a way, and of steps of about one size, that are kept."""
_APART = 2
"""Two counts, one of them so many times the other, tell what lies between."""
_LEAST_SPLIT = 8
"""Blocks that are computed in part, while the others come."""
_FIXED = 2e-3
"""Seconds that bringing blocks takes beside their copies: a step is planned without them, and another when
they have come."""
_STEP = 0.02
"""Seconds that a step of few tokens may take, if less is not known and one of more tokens took as long."""
_RETRY_DISCOUNT = 0.8
"""Of what copies up took, what they are thought to take when that was too long."""
_SURE = 0.9
"""Of what bringing spares, it must take less than this."""
_LATE = 0.1
"""How much longer than expected a disk takes, until that is known, as part of that."""
_TRIED = 128
"""Tokens that are waited for from a disk at most while nothing is known of it, since then little is lost."""
_FEW = 8
"""Blocks that come beside, for no request, to tell how fast."""
_AGAIN = 8
"""Times that a disk seems too slow, until it is looked at again, at most."""
_MOST_TOLD = 128
"""Measurements of one kind that another process is believed."""


class Line:
    """A line `first + each * count` through the last few measurements. It is the middle one of the lines that
    any two of them give, so that one which was held up does not tell. Never less than nothing."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, float]](maxlen=_LAST)

    def add(self, count: float, seconds: float) -> None:
        """Note that so many blocks took so many seconds."""
        self._seen.append((count, seconds))

    def scale(self, factor: float) -> None:
        """Change all measurements as if they had taken `factor` times as long."""
        self._seen = deque([(count, seconds * factor) for count, seconds in self._seen], maxlen=_LAST)

    @property
    def seen(self) -> list[tuple[float, float]]:
        """The measurements that are kept: counts and seconds."""
        return list(self._seen)

    @property
    def most(self) -> float:
        """The largest count that was measured."""
        return max(count for count, _ in self._seen)

    def fit(self) -> tuple[float, float]:
        """Return `first` and `each`, in seconds. Where the counts are too much alike, or what is measured is
        no line, `first` is 0."""
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
    """A curve from the work of steps to seconds, straight between what was measured. More work never takes
    less.

    A point for every size that was seen, twice as many as there are powers of two: the middle one of the last
    few measurements, so that neither many steps of one size nor one that was held up says anything about
    others.
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
        """The work and seconds of each point, the least work first."""
        return list(zip(self._work, self._seconds, strict=True))

    @property
    def slope(self) -> float:
        """The seconds that one more unit of work takes beyond what was measured, at least; 0 if steps were
        too much alike to tell."""
        work, seconds = self._work[-1], self._seconds[-1]
        before = bisect_left(self._work, work / 2) - 1
        return (
            0.0
            if before < 0
            else min((seconds - self._seconds[before]) / (work - self._work[before]), seconds / work)
        )

    @property
    def mean(self) -> float:
        """The seconds for each unit of the most work that was measured."""
        return self._seconds[-1] / self._work[-1]

    def at(self, work: float, least: float = 0.0, dear: bool = False) -> float:
        """Return the seconds that so much work takes.

        least: what less work than was ever measured takes at least, if that took as long.
        dear: whether each unit of more work than that takes what it took on average, not what one more took.
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
    """Blocks under way to someone. `since`, `before`: when this way was idle last, and how many have set out
    since then before these."""

    route: Route
    blocks: int
    at: float
    since: float
    before: int
    due: float


@dataclass(slots=True)
class TransferRates:
    """The rates that were measured, in seconds. They are unknown until something has been measured."""

    token: float | None = None
    """For each of the first tokens of a long prompt. All that is known of computing as long as no step was
    measured; None: nothing is."""
    block: dict[Route, float] = field(default_factory=dict)
    beside: dict[Route, float] = field(default_factory=dict)
    """What a transfer takes beside its blocks."""
    late: float = _LATE
    """How much longer than expected the disk took lately, as part of that."""
    doubles_at: float = math.inf
    """The position at which a token costs twice as much as the first."""
    _work: float = 0.0
    _tokens: int = 0
    _seconds: float = 0.0
    _hidden: bool = False
    """Whether some of the arithmetic under way is done while its request waits, so that it is not seen how
    long it takes."""
    _steps: Curve = field(default_factory=Curve)
    _moves: dict[Route, Line] = field(default_factory=dict)
    _coming: dict[TransferId, _TimedTransfer] = field(default_factory=dict)
    _declined: int = 0
    """How often the disk seemed too slow since it did not."""

    # ---- what was measured

    def stepped(self, work: float, tokens: int, seconds: float, ended: bool) -> None:
        """Note a step of so many tokens. A step without any only waited, and one of newest tokens alone is of
        another kind: neither says anything.

        ended: whether its arithmetic was waited for, which is when all steps before it have ended too.
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
        """Note that a request that has computed something waits for blocks while its arithmetic goes on: that
        is no measurement."""
        self._hidden = True

    def abandoned(self) -> None:
        """Note that what is computed for a request is wanted no more: its arithmetic goes on, and nothing
        waits for its end."""
        self._work, self._tokens, self._seconds, self._hidden = 0.0, 0, 0.0, True

    def sets_out(self, id: TransferId, route: Route, blocks: int, now: float) -> None:
        """Note that blocks set out, behind those of the same route."""
        last = next((coming for coming in reversed(self._coming.values()) if coming.route is route), None)
        since, before = (now, 0) if last is None else (last.since, last.before + last.blocks)
        due = now + self.queued(route, now) + (self._expected(route, blocks) or 0.0)
        self._coming[id] = _TimedTransfer(route, blocks, now, since, before, due)

    def moved(self, route: Route, blocks: int, seconds: float) -> None:
        """Note that blocks have landed, so many seconds after they set out. From a disk what came at the same
        time counts too; copies are measured alone."""
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
        """Note that nothing of a transfer is under way any more."""
        self._coming.pop(id, None)

    def reset(self) -> None:
        """Note that nothing is under way any more."""
        self._coming.clear()
        self._work, self._tokens, self._seconds, self._hidden = 0.0, 0, 0.0, False

    # ---- for the next process

    def told(self) -> dict[str, object]:
        """Return what is known, in plain numbers, for the next process."""
        moves = {route.name: line.seen for route, line in self._moves.items()}
        return {"steps": self._steps.points, "moves": moves, "late": self.late}

    def recall(self, told: object, steps: bool) -> None:
        """Take over what another process knew, as `told` gave it. What is not as it should be is ignored. A
        disk that was only written is thought to be read as fast, so that a process that asks it only once has
        something of it too.

        steps: whether that process computed as this one does.
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
        """Return the work of so many tokens from position `start` on, in that of the first token."""
        return tokens * (1 + (start + tokens / 2) / self.doubles_at)

    def computing(self, start: int, tokens: int, least: float = 0.0, dear: bool = False) -> float:
        """Return the seconds until so many tokens from position `start` on are computed. least, dear: as for
        Curve."""
        work = self.work(start, tokens)
        return self._steps.at(work, least, dear) if self._steps else (self.token or 0.0) * work

    def seconds(self, route: Route, blocks: float) -> float | None:
        """Return the seconds that so many blocks take by this route; None if that is not known."""
        per_block = self.block.get(route)
        return None if per_block is None else self.beside.get(route, 0.0) + per_block * blocks

    def _expected(self, route: Route, blocks: int) -> float | None:
        """Of copies up that have not been seen yet as long as of those down. From a disk with what it may be
        late, and of more than it was seen to bring lately as if nothing was taken beside: a line through few
        goes anywhere."""
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
        """Return the seconds until what is under way has come. What is late is thought to take as long again
        as it is late."""
        coming = [one for one in self._coming.values() if one.route is route]
        return max(0.0, coming[-1].due - now, now - coming[0].due) if coming else 0.0

    @property
    def backlog(self) -> float:
        """The seconds that the device may take, at most, for what it was given and nothing has waited for
        yet."""
        return self._steps.at(self._work) if self._steps else 0.0

    def due(self, id: TransferId) -> float:
        """Return when a transfer was expected to have come as it set out."""
        return self._coming[id].due

    # ---- what is decided

    def loading_pays(
        self, seconds: float | None, start: int, tokens: int, after: int = 0, dear: bool = False
    ) -> bool:
        """Tell whether to bring blocks of so many tokens from position `start` on, which takes `seconds`,
        rather than compute them, where `after` more are computed then. What is not known is tried. dear: as
        for Curve."""
        if seconds is None or self.token is None:
            return True
        # A step of the last tokens alone takes its time too.
        spared = self.computing(start, tokens + after, dear=dear) - self.computing(start + tokens, after)
        return seconds + _FIXED < _SURE * spared

    def copying_pays(self, blocks: int, size: int, start: int, after: int, now: float) -> bool:
        """Tell whether to bring blocks of `size` tokens each from the host rather than compute them, and the
        `after` tokens after them. Of more tokens than were ever computed copies are nearly always faster."""
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
        """Return how many of the first of so many blocks on disk, of `size` tokens each and from position
        `start` on, had better be computed while the rest comes, so that both are done at once. All of them,
        where what would be left to come is not worth the waiting.

        after: tokens that are computed then. up: whether blocks are copied to the device when they have come.
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
        """Return how many blocks had better come for no request, where the disk seems too slow: a few, soon
        again at first and then now and then, so that it is seen when it is fast enough. None while others
        come."""
        if any(coming.route is Route.IN for coming in self._coming.values()):
            return 0
        self._declined += 1
        return _FEW if self._declined.bit_count() == 1 or self._declined % _AGAIN == 0 else 0


def _pairs(told: object) -> list[tuple[float, float]]:
    """A list of counts and seconds; none if there is anything else in it, or what cannot have been
    measured."""
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
