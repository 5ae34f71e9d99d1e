"""Sums up which blocks and tokens are promised: to running requests for their growth, and to the queue."""

from itertools import islice, takewhile

from penstock.sched.queue import RequestQueues
from penstock.sched.request import Request
from penstock.sched.span import Pools
from penstock.sched.width import StepWidth

_AHEAD = 4
"""Host blocks of a long request that no transfer takes."""
_LOOKED_AT = 8
"""Most requests in the queue for which a request amid its prompt leaves tokens."""


class Reserves:
    """Sums over the running and waiting requests. It changes nothing."""

    def __init__(self, pools: Pools, queues: RequestQueues, width: StepWidth) -> None:
        self._pools, self._queues, self._width = pools, queues, width

    def tail(self, request: Request) -> int:
        """Return how many more pages a running request may need, beside its own and those under way to it."""
        if request.kv.fast_decode_until:
            return 1
        tiers, coming = self._pools.tiers, request.arriving
        return request.kv.reserve(request.most, 0 if coming is None else len(tiers.pages_of(coming)))

    def pages(self, newcomer: Request) -> int:
        """Return how many pages running requests may still need, and a newcomer for its whole length."""
        kv, running = newcomer.kv, sum(map(self.tail, self._queues.running))
        return running + (self.tail(newcomer) if kv.long else kv.pages_needed(kv.lacking))

    def host(self) -> int:
        """Return how many host blocks running long requests may still need.

        They are the blocks that their prompts lack, and a few more for decoding.
        """
        if not self._pools.long_spans:
            return 0
        long = (request.kv for request in self._queues.running if request.kv.long)
        return sum(_AHEAD + kv.host_needed(kv.lacking) for kv in long)

    def has_room(self, newcomer: Request) -> bool:
        """Tell whether there are blocks for a newcomer's whole length, on the device and on the host.

        Every running request keeps a block in reserve, a long one its tail. Otherwise the newcomer would be
        preempted as soon as they grow.
        """
        pools, kv = self._pools, newcomer.kv
        host = kv.host_needed(kv.lacking)
        host += sum(other.kv.long for other in self._queues.running) if kv.long else 0
        return self.pages(newcomer) <= pools.pages.available and host <= pools.host.available

    def is_full(self, *newcomers: Request) -> bool:
        """Tell whether one more request would leave less than a block of tokens to a long prompt in chunks.

        Every request may take a token in each step. One that is admitted without tokens is not held back by a
        step's tokens, but takes one as soon as its blocks have come.
        """
        running = self._queues.running
        if len(running) + self._pools.size <= self._width.tokens:
            return False
        return any(request.kv.chunks_to_host for request in (*running, *newcomers))

    def wanted(self, most: int) -> int:
        """Return how many of at most so many tokens the first requests in the queue can use.

        Only requests count that finish their prompts with them, and that there are pages for.
        """
        queues, pools, wanted = self._queues, self._pools, 0
        pages = pools.pages.available - sum(map(self.tail, queues.running))
        for request in islice(queues.waiting, min(_LOOKED_AT, len(queues.free_rows))):
            lacking = request.length - self._found(request)
            pages -= -(-request.length // pools.size)
            if request.kv.long or wanted + lacking > most or pages < 0:
                break
            wanted += lacking
        return wanted

    def _found(self, request: Request) -> int:
        """Return how many leading tokens of a request are in cached full blocks."""
        if not request.share_prefix:
            return 0
        find, keys = self._pools.pages.find, request.kv.next_keys(0)
        return self._pools.size * sum(1 for _ in takewhile(lambda key: find(key) is not None, keys))
