"""How fast things have gone lately: what a token costs to compute, and a block to bring. Measured by the work itself, never by a trial."""

from dataclasses import dataclass, field

from penstock.step.plan import Route

_NEW = 0.25
"""Weight of the newest measurement."""
_LEAST_SPLIT = 8
"""Blocks of which some are computed and some come."""
_FIXED = 2e-3
"""Seconds that bringing blocks takes beside their copies: a step is planned without them, and another when they have come."""
_HOPE = 0.8
_LEAST_TOKENS = 64
"""Of a step whose time says something about the cost of a token."""


@dataclass(slots=True)
class Rates:
    """Seconds, unknown until something has been measured."""

    token: float | None = None
    block: dict[Route, float] = field(default_factory=dict)
    _tokens: int = 0
    _seconds: float = 0.0

    def stepped(self, tokens: int, seconds: float, ended: bool) -> None:
        """A step of so many tokens. ended: whether its arithmetic was waited for, which is when all steps before it have ended too. A step
        without any only waited, which says nothing."""
        if not tokens:
            return
        self._tokens += tokens
        self._seconds += seconds
        if ended:
            if self._tokens >= _LEAST_TOKENS:
                self.token = _mixed(self.token, self._seconds / self._tokens)
            self._tokens, self._seconds = 0, 0.0

    def moved(self, route: Route, blocks: int, seconds: float) -> None:
        self.block[route] = _mixed(self.block.get(route), seconds / blocks)

    def loading_pays(self, seconds: float | None, tokens: int) -> bool:
        """Whether to bring blocks of so many tokens, which takes so long, rather than compute them. What is not known is tried."""
        return seconds is None or self.token is None or seconds + _FIXED < self.token * tokens

    def declined(self, route: Route) -> None:
        """It did not pay to bring blocks this way. Next time it is thought to be a little faster, so that what was slow is tried again."""
        if route in self.block:
            self.block[route] *= _HOPE

    def computed_first(self, blocks: int, size: int) -> int:
        """Of so many blocks on disk, of `size` tokens each, how many of the first had better be computed while the rest comes, so that both
        are done at once. All of them where what would be left to come is not worth the waiting."""
        each = self.block.get(Route.IN)
        if each is None or self.token is None or blocks < _LEAST_SPLIT:
            return 0 if self.loading_pays(self.seconds(Route.IN, blocks), blocks * size) else blocks
        front = int(blocks * each / (each + self.token * size))
        return front if blocks - front >= _LEAST_SPLIT // 2 else blocks

    def seconds(self, route: Route, blocks: int) -> float | None:
        per_block = self.block.get(route)
        return None if per_block is None else per_block * blocks


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + _NEW * (new - old)
