"""Decides each step: who runs, which tokens are computed, into which blocks, and who waits.

It works on integers only and never sees a tensor. There is no prefill phase. A request has tokens, some of
them computed. Every step brings it closer to its own length. When it has caught up, its last position yields
one more token.

    submit -> queue -> plan: running requests grow, then waiting ones are admitted -> Plan
                       commit: Outcome -> tokens, sealed blocks, Events
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from math import inf
from time import monotonic

from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.host import HostLedger
from penstock.sched.arrivals import Arrivals
from penstock.sched.drafting import EARLY, Drafting
from penstock.sched.event import Event
from penstock.sched.foresight import Foresight
from penstock.sched.growth import Growth
from penstock.sched.proofs import prove_kv, prove_plan, prove_rows
from penstock.sched.queue import RequestQueues
from penstock.sched.request import Phase, Request
from penstock.sched.reserves import Reserves
from penstock.sched.room import RequestRoom
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.span import KVSpan, Pools
from penstock.sched.speculation import Speculation
from penstock.sched.storage import Storage
from penstock.sched.tiers import Tiers
from penstock.sched.width import StepWidth
from penstock.step.adapter import LoadedAdapter
from penstock.step.params import Sampling
from penstock.step.plan import UNKNOWN, Landed, Outcome, Plan, RequestId, Result, Share, ShareKind
from penstock.step.request import FinishReason


class Scheduler:
    """Owns the requests and, through the ledgers, the blocks. One thread; plans are committed in order.

    `plan` and `commit` alternate, or a step runs ahead: when it has begun, `run_ahead` lets the next one be
    planned before it is committed. A request's newest token is then UNKNOWN to the plan. With host blocks, a
    step has room for one block of tokens, and for two tokens.

    Why this is safe. Steps are carried out in the order of their plans, and so is all that they write to
    pages and to the host. `kv.movement.tiles` and `kv.movement.transfers` say by which waits.
    1. A plan made ahead lets a request read its own blocks that the step under way writes, on the host too.
    They are read behind that step.
    2. It gives no other request a block that the step under way writes. Pages are found by others as soon as
    they are planned, and are written behind that step like its own. Host blocks are found when they have been
    sealed, and `commit` seals no more of them than its own share has filled (`Share.cold_stop`). Blocks that
    a later plan fills are sealed by that plan's commit. So the blocks that `recover` trusts have been
    written.
    3. If the newest token ends a request, the later step's work for it is dropped. That step wrote only to
    blocks that were the request's alone. A request that gets these blocks writes them in a later step.
    4. A request that the later plan has sent back to the queue holds no block when the earlier plan is
    committed, so nothing of it is sealed. It keeps the token.
    5. Pages that orders of a plan read, and that no request holds, are given to the next plan at the soonest.
    That plan's step writes them behind the step that reads them.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        limits: SchedulerLimits,
        prefixes: PrefixRule,
        storage: Storage | None = None,
        *,
        doubles_at: float = inf,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = monotonic,
        check: bool = False,
    ) -> None:
        """Begin without requests.

        doubles_at: position at which a token takes twice as long to compute.
        clock: returns seconds. speculation: chooses drafts, None for none.
        check: whether to prove after every plan and commit that blocks, rows and phases agree.
        """
        storage = storage or Storage()
        least = max(2, limits.block_size)
        assert storage.host is None or limits.max_step_tokens >= least, (
            f"a step of {limits.max_step_tokens} tokens, {least} needed for host blocks"
        )
        self.ledger, self.host = ledger, storage.host or HostLedger(0)
        self.tiers = Tiers(
            ledger,
            self.host,
            alike=storage.alike,
            store=storage.store if prefixes.share else "off",
            disk=storage.disk,
            step_blocks=-(-limits.max_step_tokens // limits.block_size),
        )
        self.tiers.rates.doubles_at = doubles_at
        self.limits, self.prefixes, self._check = limits, prefixes, check
        self._least = least if self.host.blocks else 1
        """Tokens of the smallest step."""
        self._pools = Pools(self.tiers, limits, share=prefixes.share)
        self._queues = RequestQueues(limits.max_sequences)
        self._width = StepWidth(limits.max_step_tokens, limits.max_sequences)
        self._reserves = Reserves(self._pools, self._queues, self._width)
        self._arrivals = Arrivals(self.tiers, limits.block_size, self._reserves.host, clock)
        self._growth = Growth(self._pools, self._queues, self._reserves, self._arrivals, self._width)
        self._room = RequestRoom(limits, ledger.blocks, self.host.blocks, self._pools.long_pages)
        self.longest, self.admissible = self._room.longest, self._room.admissible
        """The most tokens of a request, and how many of output a prompt may have: see RequestRoom."""
        self._drafting = Drafting(self._pools, self._room, self._width, speculation) if speculation else None
        self.speculation = speculation
        self.foresight = Foresight(self._pools, self._queues, self._width, prefixes, clock)
        self._requests: dict[RequestId, Request] = {}
        self._next_id = self.wrong = 0
        """The next request's id, and answers that ended because logits were not numbers."""
        self._flights: deque[tuple[Plan, list[Request]]] = deque()
        """Plans with shares that are not committed yet, and the requests of these shares."""

    @property
    def busy(self) -> bool:
        """Tell whether there is a request that has not ended."""
        return bool(self._requests)

    @property
    def running(self) -> int:
        """Return the number of requests that have a row."""
        return len(self._queues.running)

    @property
    def waiting(self) -> int:
        """Return the number of requests in the queue."""
        return len(self._queues.waiting)

    @property
    def preemptions(self) -> int:
        """Return how many times a request was preempted."""
        return self._growth.preemptions

    @property
    def narrowed(self) -> tuple[int, int] | None:
        """Return the most tokens and requests of a step if one was too large for the memory, else None."""
        return self._width.narrowed

    @property
    def adapters(self) -> set[int]:
        """Return the slots of adapters that requests need which have not ended."""
        return {request.adapter for request in self._requests.values()}

    def is_waiting(self, id: RequestId) -> bool:
        """Tell whether a request is in the queue: it is new, or was preempted."""
        request = self._requests.get(id)
        return request is not None and request.phase is Phase.WAITING

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int | None = None,
        priority: int = 0,
        salt: bytes = b"",
        foreseen: int = 0,
        adapter: LoadedAdapter | None = None,
    ) -> RequestId:
        """Queue a request, before those with a higher priority number.

        Without `max_tokens` it may use all the room there is. It becomes long at once, or when its output has
        grown. Prefixes are shared only with requests of the same salt and of the same adapter, by its digest.
        foreseen: see Request.

        Raises RequestError, before anything is changed, if it could never be served.
        """
        room, tokens = self.admissible(len(prompt), max_tokens), list(prompt)
        slot, digest = (adapter.slot, adapter.digest) if adapter else (0, b"")
        request = Request(
            id=RequestId(self._next_id),
            tokens=tokens,
            prompt=tuple(prompt),
            max_tokens=room if max_tokens is None else max_tokens,
            sampling=sampling,
            kv=KVSpan(self._pools, tokens, self.prefixes.root_of(len(prompt), salt, digest)),
            share_prefix=self.prefixes.share and sampling.prompt_logprobs is None,
            adapter=slot,
            scope=(salt, digest),
            priority=priority,
            foreseen=foreseen,
        )
        # When its first token is known, a step that runs ahead has the second.
        if self._room.is_long(len(prompt) + (max_tokens or EARLY + 1), request.most):
            request.kv.go_long()
        self._next_id += 1
        self._requests[request.id] = request
        self._queues.wait(request)
        return request.id

    def stop(self, id: RequestId, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request now, wherever it is, and free its blocks. Return False if it has already ended."""
        if (request := self._requests.pop(id, None)) is None:
            return False
        begun = request.phase is Phase.RUNNING and request.kv.computed
        if begun and len(request.tokens) == len(request.prompt):
            self.tiers.rates.abandoned()
        if self._drafting is not None:
            self._drafting.finished(request, reason)
        self._queues.remove(request)
        self._growth.let_go(request)
        request.phase, request.finish = Phase.FINISHED, reason
        self._pools.long_spans -= request.kv.long
        return True

    # ---- plan

    def plan(self) -> Plan:
        """Return the next step. It is empty only if there is nothing to do before a step under way is
        committed."""
        if self._drafting is not None and self._drafting.waits(
            [plan for plan, _ in self._flights], self._queues.running
        ):
            return Plan((), ())
        shares: list[Share] = []
        decode, pools = ShareKind.DECODE, self._pools
        pools.end_orders()
        self._growth.free_mirrors()
        budget, whole, preempted = self._growth.run(shares)
        admissions = [] if preempted else list(self._growth.admit(shares, budget, whole))
        if runs := [share for share in shares if share.kind is not decode]:
            shares = [share for share in shares if share.kind is decode] + runs
        if self._drafting is not None:
            shares = self._drafting.extend(shares, self._queues.by_row)
        plan = Plan(
            tuple(admissions), tuple(shares), tuple(pools.orders), *self.tiers.plan(self._reserves.host())
        )
        if shares:
            self._flights.append((plan, [self._queues.by_row[share.row] for share in shares]))
        if self._check:
            self.check()
            prove_plan(plan, self._queues.by_row, self._written_ahead(), self.host, self.limits.block_size)
        return plan

    def _written_ahead(self) -> dict[RequestId, int]:
        """Return how many leading host blocks of each request an uncommitted plan before the last one
        fills."""
        return {
            request.id: share.cold_stop // self.limits.block_size
            for plan, requests in islice(self._flights, max(len(self._flights) - 1, 0))
            for request, share in zip(requests, plan.shares, strict=True)
        }

    def run_ahead(self, plan: Plan) -> None:
        """Note that the last plan is being carried out, and the next one will be made before its commit."""
        verify = ShareKind.VERIFY
        for request, share in zip(self._flights[-1][1], plan.shares, strict=True):
            if share.kind is verify:
                request.ending = True
            elif share.sample:
                request.tokens.append(UNKNOWN)
                request.unknown += 1
                request.ending = len(request.tokens) - len(request.prompt) >= request.max_tokens

    # ---- commit

    def commit(self, plan: Plan, outcome: Outcome) -> list[Event]:
        """Take in a step's outcome: new tokens, requests that end with them, and landed transfers.

        Results for requests that have ended since the plan are dropped.
        """
        events, size, finished = list[Event](), self.limits.block_size, Phase.FINISHED
        verify, room = ShareKind.VERIFY, self._room
        requests = self._flights.popleft()[1] if plan.shares else []
        for transfer, names, right in self.tiers.landed(outcome.landed):
            self._arrivals.take_in(transfer, names, right)
        if plan.shares:
            self._learn(plan, outcome.seconds)
        if not self._flights:
            self._pools.end_orders()
        for request, share, result in zip(requests, plan.shares, outcome.results, strict=True):
            if request.phase is finished:
                continue
            start, stop, cold = share.start, share.start + len(share.tokens), share.cold_stop
            if stop // size > start // size or (cold and cold > request.kv.host_sealed * size):
                self._seal(request, share, stop)
            # After a preemption the prompt is computed again, but its log-probabilities are reported once.
            if result.prompt_logprobs and (fresh := result.prompt_logprobs[max(0, request.scored - start) :]):
                request.scored = start + len(result.prompt_logprobs)
                events.append(Event(request.id, prompt_logprobs=fresh))
            if not share.sample:
                continue
            if result.embedding and not result.wrong:
                events.append(Event(request.id, embedding=result.embedding))
            if share.kind is verify and self.speculation is not None:
                kept = request.kept(start + 1, result.tokens)
                self.speculation.learn(request, share, result.tokens, kept)
            finish = self._append(request, start + 1 if share.kind is verify else stop, result, events)
            if share.kind is verify:
                self._verified(request, share, result)
            if finish is not None:
                self.stop(request.id, finish)
                continue
            reach = len(request.tokens) + EARLY
            if reach >= room.long_from and not request.kv.long and room.is_long(reach, request.most):
                request.kv.go_long()
        self._ended(plan, outcome.seconds)
        return events

    def _ended(self, plan: Plan, seconds: float) -> None:
        """Note that a step has been committed."""
        if self._drafting is not None:
            self._drafting.stepped(plan, seconds, idle=not self._requests)
        if self._check:
            self.check()

    def _learn(self, plan: Plan, seconds: float) -> None:
        """Note that a step has succeeded, and how long it took."""
        rates = self.tiers.rates
        if self._width.narrowed is not None:
            self._width.widen()
        work = plan.tokens + sum(
            [rates.work(share.start, len(share.tokens)) - len(share.tokens) for share in plan.runs]
        )
        rates.stepped(work, plan.tokens, seconds, any(share.sample for share in plan.shares))

    def _seal(self, request: Request, share: Share, stop: int) -> None:
        """Let others find the blocks that a committed share has filled, up to position `stop`."""
        kv, size = request.kv, self.limits.block_size
        if share.cold_stop:
            for block, name in kv.seal_host(share.cold_stop // size):
                self.tiers.sealed_on_host(block, *name)
        if self.prefixes.share and not kv.long:
            kv.seal(request.known)
            for index in range(share.start // size, min(stop, request.known) // size):
                self.tiers.computed(*kv.name(index))

    def _verified(self, request: Request, share: Share, result: Result) -> None:
        """Give up the KV of what did not hold of a draft, and let others find that of what did."""
        request.ending = False
        request.kv.truncate(len(request.tokens) - 1)
        if not result.wrong:
            self._seal(request, share, request.kv.computed)

    def _append(self, request: Request, at: int, result: Result, events: list[Event]) -> FinishReason | None:
        """Append the tokens that a share yielded, the first at position `at`, and an event for each.

        It stops at a token that ends the request, and returns the reason for that, or None.
        """
        tiers = request.found.tiers
        found = sum(tiers), tiers.host, tiers.disk
        assert result.tokens, f"request {request.id} was to sample and did not"
        tokens, sampling, faulty = request.tokens, request.sampling, result.broken or result.wrong
        before, finish = at - len(request.prompt), None
        for kept, token in enumerate(result.tokens, 1):
            if request.unknown:
                tokens[at] = token
                request.unknown -= 1
            else:
                tokens.append(token)
            if token in sampling.end_tokens and before + kept >= sampling.min_tokens:
                finish = FinishReason.STOP
            elif before + kept >= request.max_tokens:
                finish = FinishReason.LENGTH
            if faulty and kept == len(result.tokens):
                finish = FinishReason.ERROR
            logprob = result.logprobs[kept - 1] if result.logprobs else None
            drafts = (request.drafts.drafted, request.drafts.accepted)
            events.append(Event(request.id, token, logprob, (), finish, *found, drafts=drafts))
            if finish is not None:
                break
        if faulty and result.wrong:
            self._disown(request)
        return finish

    def _disown(self, request: Request) -> None:
        """Remove the request's blocks from the prefix cache on all tiers, after logits with a NaN.

        A NaN spreads in a pass, also to tokens before it, and so to other requests that share the blocks.
        """
        self.wrong += 1
        if self.prefixes.share:
            keys = [request.kv.key(index) for index in range(request.known // self.limits.block_size)]
            for key in keys:
                self.ledger.forget_one(key)
                self.host.forget_one(key)
            self.tiers.forget_some(keys)

    # ---- beginning anew

    def forget(self) -> int:
        """Drop all cached KV, on the device and beyond. Return how many blocks were evicted. Outputs that
        drafts are looked up in go, too."""
        if self._drafting is not None:
            self._drafting.forget()
        return self.tiers.forget() + self.ledger.forget() + self.host.forget()

    def narrow(self, plan: Plan | None) -> RequestId | None:
        """Make the next steps smaller, since this plan's step was too large for the memory (see StepWidth).
        plan: None if it was a step that drafts; then only that is left out for a while.

        `recover` must follow. Returns a request that has to be stopped, if its smallest step does not fit, or
        None.
        """
        if self._drafting is not None:
            self._drafting.pause(plan)
        if plan is None or self._width.narrow(plan, self._least):
            return None
        return self._queues.by_row[plan.shares[0].row].id

    def recover(self, landed: Sequence[Landed] = ()) -> None:
        """Start all requests anew, in order, after an interrupted step. Nothing may be under way any more.

        Only KV that committed steps have written to the host is trusted. landed: the last transfers.
        """
        self.tiers.reset(landed)
        self.ledger.reset()
        self.host.vacate()
        self._arrivals.reset()
        self._pools.reset()
        self._flights.clear()
        if self.speculation is not None:
            self.speculation.idle()
        self._queues.reset(self._requests.values())
        for request in self._requests.values():
            request.kv.reset()
            request.meets, request.arriving, request.meeting = 0, None, None
            del request.tokens[request.known :]
            request.unknown, request.ending = 0, False

    def check(self) -> None:
        """Prove that blocks, rows and phases agree. Raises AssertionError with what is wrong."""
        moving_pages, moving_blocks = self.tiers.held()
        requests, queues, pools = self._requests.values(), self._queues, self._pools
        spans = [request.kv for request in requests]
        self.ledger.check([*(kv.pages for kv in spans), pools.leaving, *moving_pages])
        self.host.check([*(kv.host for kv in spans), *moving_blocks])
        assert self.running + self.waiting == len(requests), "a request is neither running nor waiting"
        assert pools.long_spans == sum(kv.long for kv in spans), (
            "a long request is not counted, or one that has ended is"
        )
        prove_rows(queues.running, queues.waiting, queues.by_row, queues.free_rows, self.limits.max_sequences)
        for request in queues.running:
            prove_kv(request, self.limits.block_size)
