"""Requests whose blocks come from another tier: whether they are brought or computed, who waits for them and how long, what came."""

from collections.abc import Callable, Sequence
from time import monotonic

from penstock.kv.ledger import BlockLedger, HostLedger
from penstock.sched.rules import Limits, Names, PrefixRule, names_of
from penstock.sched.tiers import Tiers
from penstock.step.plan import HostBlockId, Route, Transfer, TransferId
from penstock.step.request import Request

_PATIENCE, _LEAST_PATIENCE = 30.0, 0.1
"""Seconds for which a request waits for blocks from another tier: where it is not known how long to compute them takes, and at least."""


class Arrivals:
    """Written only by the Scheduler."""

    def __init__(
        self,
        tiers: Tiers,
        pages: BlockLedger,
        host: HostLedger,
        limits: Limits,
        prefixes: PrefixRule,
        promised: Callable[[], int],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """promised: how many host blocks others will need."""
        self._tiers, self._pages, self._host, self._prefixes, self._promised = tiers, pages, host, prefixes, promised
        self._size = limits.block_size
        self._clock = clock
        self._awaited: dict[TransferId, Request] = {}

    def reset(self) -> None:
        """Nobody waits for anything any more."""
        self._awaited.clear()

    # ---- setting out

    def fetch(self, request: Request) -> bool:
        """Bring the request's next blocks from the host, or from the disk to the host, if they are there and that is faster than to compute
        them. Whether it has to wait for them."""
        usable = self._tiers.pays and request.share_prefix and request.punctual
        if not usable or request.computed % self._size:
            return False
        first = request.computed // self._size
        if not request.long and first == len(request.blocks):
            blocks = self._host.run_of(self._prefixes.next_keys(request, first, self._size))
            if blocks and len(blocks) <= self._pages.available:
                return self._bring_up(request, first, blocks)
            if blocks:
                return False
        if not request.patient or (request.long and first != len(request.host_blocks)):
            return False
        count = self._tiers.on_disk(self._prefixes.next_keys(request, first, self._size))
        return count > 0 and self._bring_in(request, first, count)

    def _bring_up(self, request: Request, first: int, blocks: Sequence[HostBlockId]) -> bool:
        rates, count = self._tiers.rates, len(blocks)
        if not rates.loading_pays(rates.seconds(Route.UP, count), first * self._size, count * self._size):
            self._decline(request, first + count)
            rates.declined(Route.UP)
            return False
        self._wait(request, self._tiers.bring_up(names_of(request, first, count), blocks))
        return True

    def _bring_in(self, request: Request, first: int, count: int) -> bool:
        rates, names = self._tiers.rates, names_of(request, first, count)
        # A long request's chunks are two tokens at least.
        front = rates.computed_first(count, self._size, first * self._size) if self._size > 1 else 0
        if front:
            self._decline(request, first + front)
        if front == count:
            rates.declined(Route.IN)
            request.patient = False
            return False
        id = self._tiers.bring_in(names.part(front), self._promised())
        if id is None:
            return False
        if front:
            request.meets, request.meeting = first + front, id
            return False
        self._wait(request, id)
        return True

    def _decline(self, request: Request, stop: int) -> None:
        """Blocks up to this index are there, and will be computed all the same."""
        first = max(request.weighed, request.computed // self._size)
        if stop > first:
            self._tiers.counts.recomputed += stop - first
            request.weighed = stop

    # ---- waiting

    def meet(self, request: Request) -> bool:
        """Whether a request has come to blocks that are still on their way, for which it waits."""
        if not request.meets or request.computed < request.meets * self._size:
            return False
        request.meets = 0
        if request.meeting is None or not self._tiers.is_coming(request.meeting):
            return False
        self._wait(request, request.meeting)
        return True

    def _wait(self, request: Request, id: TransferId) -> None:
        request.arriving = id
        self._awaited[id] = request
        request.since = self._clock()

    def is_late(self, request: Request) -> bool:
        """Whether what a request waits for takes longer than to compute it would have; then it waits no more."""
        assert request.arriving is not None
        count = self._tiers.count_of(request.arriving)
        token, work = self._tiers.rates.token, self._tiers.rates.work(request.computed, count * self._size)
        limit = _PATIENCE if token is None else max(_LEAST_PATIENCE, 2 * token * work)
        if self._clock() - request.since < limit:
            return False
        self._tiers.counts.late += count
        request.punctual = False
        self.leave(request)
        return True

    def leave(self, request: Request) -> None:
        """The request waits for nothing any more; what is on its way will be cached."""
        if request.arriving is not None:
            del self._awaited[request.arriving]
            request.arriving = None

    # ---- what came

    def take_in(self, transfer: Transfer, names: Names, right: int) -> None:
        """The first `right` blocks of a transfer have come: to the host, where who waits will find them, or to pages, which are its own."""
        request = self._awaited.pop(transfer.id, None)
        pages = transfer.pages[:right]
        for page, name in zip(pages, names, strict=False):
            self._pages.seal(page, *name)
        if request is None:
            self._pages.release(pages)
            return
        request.arriving = None
        if transfer.route is Route.IN:
            request.patient = right == len(names)
            if request.cached is None:
                request.from_disk += right * self._size
            return
        request.blocks.extend(pages)
        request.computed += right * self._size
        request.sealed = len(request.blocks)
        if request.cached is None:
            request.from_host += right * self._size
        elif request.meeting is not None:
            self.met(request, right * self._size)

    def met(self, request: Request, tokens: int) -> None:
        """So many tokens that came from the disk while those before them were computed need not be."""
        request.meeting = None
        assert request.cached is not None
        request.cached += tokens
        request.from_host += tokens
        request.from_disk += tokens
        self._tiers.counts.found_disk += tokens
