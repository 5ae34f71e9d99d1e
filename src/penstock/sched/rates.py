"""How fast things have gone lately: what a token costs to compute, and a block to bring. Measured by the work itself, never by a trial.

A step takes its time even for few tokens, and so does a transfer for few blocks. So both are lines: something that each takes, and
something for each token or block. Of a prompt some of which is computed anyway, to compute more of it costs its tokens alone; to bring that
costs both. A token costs more the further back it looks.
"""

import math
from dataclasses import dataclass, field

from penstock.step.plan import Route

_KEPT = 0.85
"""What all measurements still weigh after a new one."""
_SPREAD = 0.05
"""Of the counts' variance in their mean square, below which they say nothing about a line."""
_LEAST_SPLIT = 8
"""Blocks of which some are computed and some come."""
_FIXED = 2e-3
"""Seconds that bringing blocks takes beside their copies: a step is planned without them, and another when they have come."""
_HOPE = 0.8
_SURE = 0.8
"""Bringing blocks must be so much faster than computing them."""
_LEAST_TOKENS = 64
"""Of a step whose time says something about the cost of a token."""


class Line:
    """`first + each * count`, by least squares in which newer measurements weigh more; never less than nothing."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, count: float, seconds: float) -> None:
        self._weight = self._weight * _KEPT + 1
        self._x = self._x * _KEPT + count
        self._y = self._y * _KEPT + seconds
        self._xx = self._xx * _KEPT + count * count
        self._xy = self._xy * _KEPT + count * seconds

    def scale(self, factor: float) -> None:
        """As if all had taken so much of its time."""
        self._y *= factor
        self._xy *= factor

    def fit(self) -> tuple[float, float]:
        """`first` and `each`. Where the counts are too much alike, or what is measured is no line, nothing is said to be taken beside."""
        around = self._xx - self._x * self._x / self._weight
        if around > _SPREAD * self._xx:
            each = (self._xy - self._x * self._y / self._weight) / around
            first = (self._y - each * self._x) / self._weight
            if each > 0 and first > 0:
                return first, each
        return 0.0, self._xy / self._xx


@dataclass(slots=True)
class Rates:
    """Seconds, unknown until something has been measured."""

    token: float | None = None
    """For each of the first tokens of a prompt."""
    block: dict[Route, float] = field(default_factory=dict)
    beside: dict[Route, float] = field(default_factory=dict)
    """What a transfer takes beside its blocks."""
    doubles_at: float = math.inf
    """The position at which a token costs twice as much as the first."""
    _work: float = 0.0
    _tokens: int = 0
    _seconds: float = 0.0
    _steps: Line = field(default_factory=Line)
    _moves: dict[Route, Line] = field(default_factory=dict)

    def work(self, start: int, tokens: int) -> float:
        """Of so many tokens from this position on, in that of the first."""
        return tokens * (1 + (start + tokens / 2) / self.doubles_at)

    def stepped(self, work: float, tokens: int, seconds: float, ended: bool) -> None:
        """A step of so many tokens. ended: whether its arithmetic was waited for, which is when all steps before it have ended too. A step
        without any only waited, which says nothing."""
        if not tokens:
            return
        self._work += work
        self._tokens += tokens
        self._seconds += seconds
        if ended:
            if self._tokens >= _LEAST_TOKENS:
                self._steps.add(self._work, self._seconds)
                self.token = self._steps.fit()[1]
            self._work, self._tokens, self._seconds = 0.0, 0, 0.0

    def moved(self, route: Route, blocks: int, seconds: float) -> None:
        line = self._moves.setdefault(route, Line())
        line.add(blocks, seconds)
        self.beside[route], self.block[route] = line.fit()

    def loading_pays(self, seconds: float | None, start: int, tokens: int) -> bool:
        """Whether to bring blocks of so many tokens from this position on, which takes so long, rather than compute them. What is not known
        is tried."""
        return seconds is None or self.token is None or seconds + _FIXED < _SURE * self.token * self.work(start, tokens)

    def declined(self, route: Route) -> None:
        """It did not pay to bring blocks this way. Next time it is thought to be a little faster, so that what was slow is tried again."""
        if route in self.block:
            self.block[route] *= _HOPE
            self.beside[route] = self.beside.get(route, 0.0) * _HOPE
        if route in self._moves:
            self._moves[route].scale(_HOPE)

    def computed_first(self, blocks: int, size: int, start: int) -> int:
        """Of so many blocks on disk, of `size` tokens each and from this position on, how many of the first had better be computed while
        the rest comes, so that both are done at once. All of them where what would be left to come is not worth the waiting."""
        each = self.block.get(Route.IN)
        if each is None or self.token is None or blocks < _LEAST_SPLIT:
            return 0 if self.loading_pays(self.seconds(Route.IN, blocks), start, blocks * size) else blocks
        computing = self.token * self.work(start, blocks * size) / blocks
        front = math.ceil((self.beside.get(Route.IN, 0.0) + blocks * each) / (each + computing))
        rest = blocks - front
        if rest < _LEAST_SPLIT // 2 or not self.loading_pays(self.seconds(Route.IN, rest), start, blocks * size):
            return blocks
        return front

    def seconds(self, route: Route, blocks: int) -> float | None:
        per_block = self.block.get(route)
        return None if per_block is None else self.beside.get(route, 0.0) + per_block * blocks
