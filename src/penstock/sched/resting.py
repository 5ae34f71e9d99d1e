"""Says when speculation rests, and what it may lose.

While it rests, all requests run ahead, as without speculation. Before each plan some of them are looked at:
whether a draft of what is known of them pays by now. Then speculation wakes: nothing is begun until nothing
is under way, so that all requests are known at once, and goes on together.
"""

from collections.abc import Callable, Sequence

from penstock.sched.request import Request
from penstock.sched.suffix import NO_DRAFT, Draft

_FIRST, _FREE, _MOST, _LEAST = 8.0, 0.5, 64.0, -1.0
"""Plain steps that may be lost: before anything is known or behind the first loss after gains, where nothing
is gained, and right behind drafts that gained much. The last is how much may be owed."""
_RATE = 0.005
"""The part of a plain step that may be lost by drafts for each."""
_FADING = 1 / 16
"""Part of what was gained that counts no more after a plain step."""
_LOOKS, _AHEAD_LOOKS = 0.005, 0.03
"""Parts of a plain step that may pass by looking: where the device waits meanwhile, and where it computes."""
_SAVED, _OWED = 8.0, 32.0
"""Plans whose time for looks may be saved up, and those by which a look that took long is made up for."""


class DraftBudget:
    """Bounds what drafts cost beside plain decoding, counted in plain steps.

    Where nothing ever holds, no stretch of steps loses more than `_FREE`, `_RATE` of each step, and what one
    probe costs. Much may be lost by one step right behind drafts that gained as much, or nothing would be
    gained where a step of many tokens takes long. When it has lost, no more than `_FIRST` may be.
    """

    def __init__(self) -> None:
        self.left = _FIRST

    @property
    def full(self) -> bool:
        """Tell whether as much is left as there ever is where nothing is gained."""
        return self.left >= _FREE

    def plain(self) -> None:
        """Note a plain step."""
        if self.left > _FREE:
            self.left = max(self.left - _FADING * (self.left - _FREE), _FREE)
        else:
            self.left = min(self.left + _RATE, _FREE)

    def spend(self, cost: float) -> None:
        """Note a step that took so many plain steps more than its tokens are worth.

        It is less than 0 if drafts have gained.
        """
        self.left = max(min(self.left - cost, _FIRST if cost > 0 else _MOST), _LEAST)


class Lookout:
    """Looks at what might be drafted for requests that run ahead, for some of them before each plan.

    A draft that was seen is kept for as long as what becomes known goes along it.
    """

    def __init__(self, propose: Callable[[Request, int], Draft], clock: Callable[[], float]) -> None:
        """Look by `propose`, as of Drafter. clock: returns seconds."""
        self._propose, self._clock = propose, clock
        self._seen: dict[int, tuple[int, Draft]] = {}
        """By request: how many of its tokens were known, and the draft behind these."""
        self._next = 0
        """Place of the request that is looked at next."""
        self._left = self._least = 0.0
        """Seconds that looking may take now, less than 0 if they are owed, and the least that this may be."""
        self._began = 0.0

    def forget(self) -> None:
        """Forget what was seen, and the seconds that it took: it was worth them."""
        self._seen.clear()
        self._left = max(self._left, 0.0)

    def begin(self, plain: float, ahead: bool) -> bool:
        """Tell whether there is time to look before a plan. `end` must follow then.

        plain: seconds of a plain step. ahead: whether the device computes meanwhile.
        """
        more = (_AHEAD_LOOKS if ahead else _LOOKS) * plain
        self._left, self._least = min(self._left + more, _SAVED * more), -_OWED * more
        self._began = self._clock()
        return self._left >= 0

    def end(self) -> None:
        """Count the seconds since `begin`."""
        self._left = max(self._left - (self._clock() - self._began), self._least)

    def look(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        """Return a draft behind the known tokens of each request, and so of those that are on their way, too.

        At one it is looked at least. There is none of those at which there was no time to look, and of which
        none is left.

        requests: at least one, with the most tokens of a draft behind those on their way.
        """
        seen, until, count = self._seen, self._began + self._left, len(requests)
        self._seen = {request.id: seen[request.id] for request, _ in requests if request.id in seen}
        for number in range(count):
            request, most = requests[(self._next + number) % count]
            self._seen[request.id] = request.known, self._propose(request, most + request.unknown)
            if self._clock() >= until:
                break
        self._next = (self._next + number + 1) % count
        return [self._known(request) for request, _ in requests]

    def _known(self, request: Request) -> Draft:
        """Return what is left of the draft that was seen of a request."""
        known, draft = self._seen.get(request.id, (request.known, NO_DRAFT))
        went = tuple(request.tokens[known : request.known])
        return draft.behind(len(went)) if draft.tokens[: len(went)] == went else NO_DRAFT
