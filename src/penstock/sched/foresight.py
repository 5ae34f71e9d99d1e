"""Sees what is before a new request: it times steps as they end, and looks at the queues between two of
them.

It changes nothing, and what it finds decides nothing: it only reads what the scheduler holds.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import islice
from time import monotonic

from penstock.kv.ledger.keys import block_keys
from penstock.sched.outlook import MOST_FOLLOWED, Outlook, QueuedRequest, RunningRequest
from penstock.sched.pace import StepTimes
from penstock.sched.queue import RequestQueues
from penstock.sched.request import Request
from penstock.sched.rules import PrefixRule
from penstock.sched.span import Pools
from penstock.sched.width import StepWidth
from penstock.step.plan import Plan, ShareKind
from penstock.step.request import FinishReason

_PRIORITIES = 8
"""Priorities that are counted apart behind the first of the queue; what is less urgent is counted as one."""
_AT_ONCE = 32
"""Most keys that are made at once: those behind the first that is missing are made in vain."""


def _nowhere(key: bytes) -> None:
    return None


class Foresight:
    """Times steps, and looks at the queues. Only the engine's thread has it, but for `found`."""

    def __init__(
        self,
        pools: Pools,
        queues: RequestQueues,
        width: StepWidth,
        prefixes: PrefixRule,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._pools, self._queues, self._width = pools, queues, width
        self._prefixes, self._clock = prefixes, clock
        self._times = StepTimes()
        self._since: float | None = None
        """When the last step ended or, if there was nothing to do then, when there was again."""

    # ---- what has been

    def submitted(self) -> None:
        """Note that there is a new request."""
        if self._since is None:
            self._since = self._clock()

    def stepped(self, plan: Plan, tokens: int, reasons: Sequence[FinishReason]) -> None:
        """Note that a step has ended. tokens: of outputs that it yielded. reasons: for which outputs have
        ended with it."""
        now, rates = self._clock(), self._pools.tiers.rates
        since, self._since = self._since, now if self._queues.running or self._queues.waiting else None
        if plan.shares and since is not None:
            chunks = plan.chunks
            prompt = sum([rates.work(share.start, len(share.tokens)) for share in chunks])
            context = sum([share.start for share in plan.shares if share.kind is not ShareKind.CHUNK])
            self._times.stepped(prompt, len(plan.shares) - len(chunks), now - since, len(chunks), context)
        if tokens or reasons:
            by_themselves = len(reasons) - reasons.count(FinishReason.LENGTH)
            self._times.yielded(tokens, len(reasons), by_themselves)

    def stopped(self, begun: bool) -> None:
        """Note that a request was ended by a stop string, or by who had asked for it. begun: whether it had a
        row: those that leave the queue say nothing of how long outputs become."""
        if begun:
            self._times.yielded(0, 1, 1)
        if not (self._queues.running or self._queues.waiting):
            self._since = None

    def interrupted(self) -> None:
        """Note that the step under way will not be timed."""
        self._since = None

    # ---- what is

    def look(self, under_way: bool = False) -> Outlook:
        """Return what is before a new request now. under_way: whether a step has been begun."""
        queues, pools = self._queues, self._pools
        return Outlook(
            self._clock(),
            tuple([self._runs(request) for request in queues.running]),
            tuple([self._waits(request) for request in islice(queues.waiting, MOST_FOLLOWED)]),
            self._behind(),
            pools.pages.available,
            self._width.rows,
            self._width.tokens,
            pools.size,
            pools.tiers.rates.doubles_at,
            under_way,
            pools.share,
            self._times.measured(),
        )

    def found(self, prompt: Sequence[int], salt: bytes, adapter: bytes = b"") -> int:
        """Return how many tokens of a prompt have KV that is found now, on the device or on the host. Any
        thread may call it: it looks up single keys, one behind the other up to the first that is missing.

        adapter: digest of its LoRA adapter.
        """
        pools, size = self._pools, self._pools.size
        if not pools.share:
            return 0
        pages, host = pools.pages.find, pools.host.find if pools.tiers.below_device else _nowhere
        parent, last = self._prefixes.root_of(len(prompt), salt, adapter), (len(prompt) - 1) // size
        count, more = 0, 1
        while count < last:
            keys = block_keys(parent, prompt[count * size : min(count + more, last) * size], size)
            for key in keys:
                if pages(key) is None and host(key) is None:
                    return count * size
                count += 1
            parent, more = keys[-1], min(2 * more, _AT_ONCE)
        return count * size

    def _behind(self) -> tuple[tuple[int, int], ...]:
        """Count those behind the first of the queue, by their priorities: it is in order of these."""
        waiting, at, counts = self._queues.waiting, MOST_FOLLOWED, list[tuple[int, int]]()
        while at < (end := len(waiting)):
            priority = waiting[at].priority
            if len(counts) < _PRIORITIES:
                end = bisect_right(waiting, priority, at, key=lambda request: request.priority)
            counts.append((priority, end - at))
            at = end
        return tuple(counts)

    def _runs(self, request: Request) -> RunningRequest:
        kv, length = request.kv, len(request.tokens)
        lacking = length - kv.computed
        own = len(kv.pages) - request.found.total // self._pools.size
        return RunningRequest(lacking if lacking > 1 else 0, request.most - length, max(own, 0), length)

    def _waits(self, request: Request) -> QueuedRequest:
        length, size = len(request.tokens), self._pools.size
        found = min(request.foreseen, length - 1) // size * size if request.share_prefix else 0
        lacking = length - found
        return QueuedRequest(lacking, request.most - length, request.priority, length)
