"""Fetches a request's blocks from lower tiers.

It decides to load or compute them, who waits, and how long.
"""

from collections.abc import Callable, Sequence
from math import inf
from time import monotonic

from penstock.sched.request import Request
from penstock.sched.rules import Names
from penstock.sched.tiers import Tiers
from penstock.step.plan import HostBlockId, Route, Transfer, TransferId

_PATIENCE, _LEAST_PATIENCE = 30.0, 0.05
"""Seconds for which a request waits for blocks: where the time to compute them is unknown, and at least."""


class Arrivals:
    """Keeps the requests that wait for blocks from another tier. Only the scheduler writes to it."""

    def __init__(
        self, tiers: Tiers, size: int, promised: Callable[[], int], clock: Callable[[], float] = monotonic
    ) -> None:
        """Begin with no request waiting.

        size: tokens of a block.
        promised: returns how many host blocks other requests will need.
        """
        self._tiers, self._pages, self._host = tiers, tiers.pages, tiers.host
        self._size, self._promised, self._clock = size, promised, clock
        self._awaited: dict[TransferId, Request] = {}

    def reset(self) -> None:
        """Forget all requests that wait."""
        self._awaited.clear()
        self._tiers.rates.reset()

    # ---- setting out

    def fetch(self, request: Request) -> bool:
        """Fetch the request's next blocks if that is faster than computing them. Return whether it must wait.

        Blocks come from the host to the device, or from the disk to the host.
        """
        kv = request.kv
        tiers, short = self._tiers, not kv.long
        below = tiers.below_device if short else tiers.has_lower_tier
        usable = below and request.share_prefix and request.punctual
        # With `meets` the next blocks are already under way, while the request computes those before them.
        if not usable or request.meets or kv.computed % self._size:
            return False
        first = kv.computed // self._size
        if short and first == len(kv.pages):
            blocks = self._host.run_of(kv.next_keys(first))
            if blocks and len(blocks) <= self._pages.available:
                return self._bring_up(request, first, blocks)
            if blocks:
                return False
        if not request.patient or (kv.long and first != len(kv.host)):
            return False
        count = tiers.on_disk(kv.next_keys(first))
        return count > 0 and self._bring_in(request, first, count)

    def _bring_up(self, request: Request, first: int, blocks: Sequence[HostBlockId]) -> bool:
        """Start a transfer of these host blocks to pages, if that is faster.

        Return whether the request waits.
        """
        rates, count = self._tiers.rates, len(blocks)
        if not rates.copying_pays(
            count, self._size, first * self._size, self._after(request, first + count), self._clock()
        ):
            self._decline(request, first + count)
            return False
        id = self._tiers.bring_up(request.kv.names(first, count), blocks)
        request.found.set_out(first * self._size, (first + count) * self._size, disk=False)
        rates.sets_out(id, Route.UP, count, self._clock())
        self._wait(request, id)
        return True

    def _bring_in(self, request: Request, first: int, count: int) -> bool:
        """Start a transfer of the next `count` blocks from disk to host. Return whether the request waits.

        The first blocks may be computed while the others are read.
        """
        rates, names, size = self._tiers.rates, request.kv.names(first, count), self._size
        # A long request's chunks have at least two tokens, so with blocks of one it computes none beside.
        front, after = 0, self._after(request, first + count)
        if size > 1:
            front = rates.computed_first(count, size, first * size, after, self._clock(), not request.kv.long)
        if front:
            self._decline(request, first + front)
        wanted = names.part(front)
        if front == count:
            request.patient = False
            few = rates.look_again()
            wanted = names.part(count - few if few < count else 0) if few else wanted
        id = self._tiers.bring_in(wanted, self._promised()) if len(wanted) else None
        if id is None:
            return False
        came = self._tiers.count_of(id)
        rates.sets_out(id, Route.IN, came, self._clock())
        begin = (first + count - len(wanted)) * size
        request.found.set_out(begin, begin + came * size, disk=True)
        if front == count:
            return False
        if front:
            request.meets, request.meeting = first + front, id
            return False
        self._wait(request, id)
        return True

    def _after(self, request: Request, blocks: int) -> int:
        """Return how many tokens a request computes when so many of its blocks are there."""
        return max(request.length - blocks * self._size, 0)

    def _decline(self, request: Request, stop: int) -> None:
        """Count blocks up to index `stop` that are on a lower tier and will be computed all the same."""
        first = max(request.weighed, request.kv.computed // self._size)
        if stop > first:
            self._tiers.counts.recomputed += stop - first
            request.weighed = stop

    # ---- waiting

    def meet(self, request: Request) -> bool:
        """Tell whether a request has come to blocks that are still under way. If so it waits for them."""
        if not request.meets or request.kv.computed < request.meets * self._size:
            return False
        request.meets = 0
        if request.meeting is None or not self._tiers.is_coming(request.meeting):
            return False
        self._wait(request, request.meeting)
        return True

    def _wait(self, request: Request, id: TransferId) -> None:
        """Let a request wait for a transfer."""
        request.arriving = id
        self._awaited[id] = request
        request.since = inf
        if request.begun:
            self._tiers.rates.waited()

    def is_late(self, request: Request) -> bool:
        """Tell whether a request has waited longer than its blocks take to compute. If so, end the wait.

        So no request waits much longer than it takes to load and to compute its blocks, and blocks that are
        only a little late are still used. The device's backlog is not counted: until it is done, the request
        could not compute either, and copies wait for it too.
        """
        assert request.arriving is not None
        # The wait begins at the first call: by then the steps that had begun before it are over.
        request.since = min(request.since, self._clock())
        rates, count = self._tiers.rates, self._tiers.count_of(request.arriving)
        computing = rates.computing(request.kv.computed, count * self._size)
        limit = _PATIENCE if rates.token is None else max(_LEAST_PATIENCE, computing)
        if self._clock() - max(request.since + rates.backlog, rates.due(request.arriving)) < limit:
            return False
        self._tiers.counts.late += count
        request.punctual = False
        self.leave(request)
        return True

    def leave(self, request: Request) -> None:
        """End a request's wait. The blocks of its transfer will be cached."""
        if request.arriving is not None:
            del self._awaited[request.arriving]
            request.arriving = None

    # ---- what came

    def take_in(self, transfer: Transfer, names: Names, right: int) -> None:
        """Take in the first `right` blocks of a transfer that has landed.

        Blocks on the host will be found there by the requests that wait. Pages become the request's own.
        """
        self._tiers.rates.came(transfer.id)
        request = self._awaited.pop(transfer.id, None)
        pages = transfer.pages[:right]
        for page, name in zip(pages, names, strict=False):
            self._pages.seal(page, *name)
        self._pages.brought.update(pages)
        if request is None:
            self._pages.release(pages)
            return
        request.arriving = None
        if transfer.route is Route.IN:
            request.patient = right == len(names)
            return
        request.kv.take_in(pages)
