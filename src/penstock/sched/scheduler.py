"""Decides each step: who runs, which tokens are computed, into which blocks, who has to wait. Integers only;
it never sees a tensor.

There is no prefill phase. A request has tokens, some of them computed; every step brings it closer to its own
length, and when it has caught up its last position yields one more token.

The KV of a long request rests in host blocks, where there are any. Its chunks are whole blocks, which go
there at once; only what the last one leaves over, and what is decoded, goes to pages of the device alone: the
tail. Of the tail's full blocks the newest few stay. The last of the blocks that are on the host are near: in
pages as well, as long as nobody else needs these, and so need not stream.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from math import inf
from time import monotonic

from penstock.kv.ledger.blocks import BlockLedger, DiskLedger, HostLedger
from penstock.sched.arrivals import Arrivals
from penstock.sched.needs import Needs
from penstock.sched.proofs import prove_kv, prove_plan, prove_rows
from penstock.sched.rules import Limits, PrefixRule, admit
from penstock.sched.tiers import Store, Tiers
from penstock.step.params import Sampling
from penstock.step.plan import (
    UNKNOWN,
    Admission,
    BlockId,
    HostBlockId,
    Landed,
    Order,
    Outcome,
    Plan,
    RequestId,
    Row,
    Share,
    TokenLogprob,
)
from penstock.step.record import record
from penstock.step.request import FinishReason, Phase, Request

_AHEAD = 4
"""Host blocks of a long request that no transfer takes."""
_EARLY = 2
"""Tokens before a request would be too long for the device it becomes long: its newest one still has a place
there, and the next not."""

_SMOOTH, _SMOOTHEST = 8, 4096
"""Steps after which twice as much is tried again, where one was too large for the memory; twice as many each
time that it was, and at most."""
_LOOKED_AT = 8
"""Requests in the queue for which one in the midst of its prompt makes room, at most."""


@record(frozen=True, slots=True)
class Event:
    """Something happened to a request in a step: a token, its end, or log-probabilities of its prompt."""

    request: RequestId
    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    cached: int = 0
    """Prompt tokens of the request whose KV was found instead of computed."""
    cached_host: int = 0
    cached_disk: int = 0
    """Those of them that had to come from the host, and from the disk."""
    fault: str = ""
    """Why it ended, where that is a fault of its own and comes without a token."""


class Scheduler:
    """Owns the requests and, through the ledgers, the blocks. One thread; plans are committed in the order in
    which they were made.

    `plan` and `commit` alternate, or a step runs ahead: when it has begun, `run_ahead` lets the next be
    planned before it is committed, where `may_run_ahead`. A request's newest token is then UNKNOWN to the
    plan. If it turns out to end the request, what the later step computes of that request is dropped: it
    wrote only where nobody else reads, before anyone is given that room.

    With `host` blocks, a step has room for one block of tokens, and for two tokens.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        limits: Limits,
        prefixes: PrefixRule,
        *,
        host: HostLedger | None = None,
        alike: bool = True,
        store: Store = "off",
        disk: DiskLedger | None = None,
        doubles_at: float = inf,
        clock: Callable[[], float] = monotonic,
        check: bool = False,
    ) -> None:
        """alike: whether blocks on the host are what they are on the device. store: when full blocks of short
        requests go to the host.

        disk: what is there; it comes by way of host blocks. doubles_at: the position at which a token takes
        twice as long to compute.
        """
        least = max(2, limits.block_size)
        assert host is None or limits.max_step_tokens >= least, (
            f"a step of {limits.max_step_tokens} tokens, {least} needed for host blocks"
        )
        self.ledger = ledger
        self.host = HostLedger(0) if host is None else host
        step_blocks = -(-limits.max_step_tokens // limits.block_size)
        self.tiers = Tiers(
            ledger,
            self.host,
            alike=alike,
            store=store if prefixes.share else "off",
            disk=disk,
            step_blocks=step_blocks,
        )
        self.tiers.rates.doubles_at = doubles_at
        self.limits = limits
        self.prefixes = prefixes
        self._needs = Needs(limits)
        self._arrivals = Arrivals(self.tiers, ledger, self.host, limits, prefixes, self._cold_promised, clock)
        self._check = check
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        """Sorted by their turns: the last is the first to be preempted."""
        self._requests: dict[RequestId, Request] = {}
        self._long = 0
        """How many of them are long."""
        self._by_row: dict[Row, Request] = {}
        self._rows = [Row(row) for row in reversed(range(limits.max_sequences))]
        self._next_id = 0
        self._orders: list[Order] = []
        """Of the step under way."""
        self._leaving: list[BlockId] = []
        """Pages that are nobody's but are read by orders: held until the step is committed."""
        self._flights: deque[list[Request]] = deque()
        """Of plans that are not committed yet, whose the shares are."""
        self._step_tokens, self._step_rows = limits.max_step_tokens, limits.max_sequences
        """Most tokens and requests of a step: fewer than the limits for a while after one was too large for
        the memory."""
        self._smooth, self._wait = 0, 0
        """Steps since then, and before more is tried."""
        self.preemptions = 0
        self.wrong = 0
        """Answers that ended because logits were not numbers."""
        self._longest_short = ledger.blocks * limits.block_size + 1
        # What the host holds and a block of tail: after a preemption all full blocks are computed into host
        # blocks.
        most = (self.host.blocks + 1) * limits.block_size if self.host.blocks else 0
        self._longest_long = (
            most if ledger.blocks >= self._needs.long_pages else min(most, self._longest_short)
        )
        self._long_from = (
            self._longest_short + 1
            if limits.long_from is None
            else min(self._longest_short + 1, limits.long_from)
        )

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def is_waiting(self, id: RequestId) -> bool:
        """Whether it is in the queue: no step has had it, or it was preempted."""
        request = self._requests.get(id)
        return request is not None and request.phase is Phase.WAITING

    @property
    def longest(self) -> int:
        """Most tokens a request may have: the context's end or, if that is less, what KV on the device holds,
        or on the host.

        The last token of an output is never an input, so it needs no place in a block.
        """
        return min(self.limits.max_length, max(self._longest_short, self._longest_long))

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int | None = None,
        priority: int = 0,
        salt: bytes = b"",
    ) -> RequestId:
        """Queue a request, before those of a higher number. Raises RequestError if it could never be served,
        before anything is changed.

        Without `max_tokens` it may have all the room there is, and is long at once for its prompt, or when
        its output has grown.
        """
        room = self.admissible(len(prompt), max_tokens)
        request = Request(
            id=RequestId(self._next_id),
            tokens=list(prompt),
            prompt=tuple(prompt),
            max_tokens=room if max_tokens is None else max_tokens,
            sampling=sampling,
            share_prefix=self.prefixes.share and sampling.prompt_logprobs is None,
            priority=priority,
            salt=salt,
        )
        # When its first token is known, a step that runs ahead has the second.
        request.long = self._becomes_long(request, len(prompt) + (max_tokens or _EARLY + 1))
        self._long += request.long
        self._next_id += 1
        self._requests[request.id] = request
        self._queue(request)
        return request.id

    def _queue(self, request: Request) -> None:
        """Put it where its turn is."""
        if not self._waiting or self._waiting[-1].turn < request.turn:
            self._waiting.append(request)
        else:
            self._waiting.insert(
                sum(1 for _ in takewhile(lambda other: other.turn < request.turn, self._waiting)), request
            )

    def admissible(self, prompt: int, max_tokens: int | None, *, or_more: bool = False) -> int:
        """Most tokens of output that a prompt of so many may have. From any thread. Raises RequestError if it
        could never be served.

        or_more: whether it may have more tokens than that, for all that is known."""
        return admit(prompt, max_tokens, self.longest, self._why_too_long, or_more=or_more)

    def _becomes_long(self, request: Request, reach: int) -> bool:
        """Whether a request that comes to `reach` tokens, if it may have so many, is long: it is not if it
        does not fit as such."""
        most = request.prompt_length + request.max_tokens
        return min(reach, most) >= self._long_from and most <= self._longest_long

    def _why_too_long(self, total: int) -> str:
        if self.longest == self.limits.max_length or not self.host.blocks:
            context = self.longest == self.limits.max_length
            what, more = (
                ("the context holds", "more length")
                if context
                else ("the KV blocks hold", "more memory, or KV in host memory")
            )
            return f"{what} {self.longest} in all; shorten it, or allow {more}"
        size, needed = self.limits.block_size, list[str]()
        if total > (self.host.blocks + 1) * size:
            needed.append(
                f"host memory or disk for {(total - 1) // size * size} tokens of KV "
                f"({self.host.blocks * size} now)"
            )
        if self.ledger.blocks < self._needs.long_pages:
            needed.append(f"{self._needs.long_pages} KV blocks on the device ({self.ledger.blocks} now)")
        if total > self.limits.max_length:
            needed.append(f"a max_length of {total} ({self.limits.max_length} now)")
        return f"KV has room for {self.longest} in all; shorten it, or allow {' and '.join(needed)}"

    def stop(self, id: RequestId, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request now, wherever it is, and free what it holds. False if it has already ended."""
        request = self._requests.get(id)
        if request is None:
            return False
        if request.phase is Phase.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            if request.computed and len(request.tokens) == len(request.prompt):
                self.tiers.rates.abandoned()
        self._end(request, reason)
        return True

    # -- plan
    # --------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The next step. Empty only if there is nothing to do."""
        self._orders = []
        shares: list[Share] = []
        self._free_near()
        budget, whole, preempted = self._plan_running(shares)
        admissions = [] if preempted else list(self._admit(shares, budget, whole))
        if runs := [share for share in shares if len(share.tokens) > 1]:
            shares = [share for share in shares if len(share.tokens) == 1] + runs
        plan = Plan(
            tuple(admissions), tuple(shares), tuple(self._orders), *self.tiers.plan(self._cold_promised())
        )
        if shares:
            self._flights.append([self._by_row[share.row] for share in shares])
        if self._check:
            self.check()
            prove_plan(plan, self._by_row, self.host, self.limits.block_size)
        return plan

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step may be planned before the last is committed. Where long requests are it may
        not: what they send to the host is named when it is committed, and the next step reads it."""
        return not self._long

    def run_ahead(self, plan: Plan) -> None:
        """This plan, the last, is being carried out, and the next will be made before it is committed."""
        for request, share in zip(self._flights[-1], plan.shares, strict=True):
            if share.sample:
                request.tokens.append(UNKNOWN)
                request.unknown += 1
                request.ending = len(request.tokens) - len(request.prompt) >= request.max_tokens

    def _plan_running(self, shares: list[Share]) -> tuple[int, bool, bool]:
        """Shares for the running, oldest first. Returns the tokens left in the step, whether these are only
        for prompts that they finish, and whether anyone had to go.

        Every request that only lacks its newest token gets it, so a long prompt never holds up others: chunks
        take what is left. One that is not finished in this step leaves up to half of that to prompts which
        can be, behind it or in the queue: so there is never more than one in the midst of its prompt, and
        nobody waits for that one.
        """
        running = self._running
        budget = self._step_tokens - sum(
            [len(request.tokens) - request.computed == 1 for request in running if not request.ending]
        )
        before = self.preemptions
        position, whole = 0, False
        while position < len(running):
            request = running[position]
            start = request.computed
            if start < request.steady and not request.ending and len(request.tokens) - start == 1:
                assert request.row is not None
                shares.append(
                    Share(
                        request.row,
                        start,
                        (request.tokens[start],),
                        request.tabled,
                        (),
                        True,
                        len(request.prompt),
                    )
                )
                request.computed = start + 1
                position += 1
                continue
            if request.ending or (request.arriving is not None and not self._arrivals.is_late(request)):
                position += 1
                continue
            if request.length - request.computed == 1:
                count = 1
            else:
                self._reuse(request)
                if self._arrivals.meet(request) or self._arrivals.fetch(request):
                    position += 1
                    continue
                count = self._chunk(request, budget, whole)
                unfinished = request.computed + count < self._needs.goal(request)
                if unfinished and not whole:
                    whole = True
                    count = self._needs.chunk(request, budget - self._wanted(budget // 2)) or count
                budget -= count
            if count:
                lacking = self._needs.pages(request, count) - self.ledger.available
                if 0 < lacking <= sum(len(other.blocks) for other in running if other.ending):
                    position += 1  # They will be free when the step under way is over.
                    continue
                if self._needs.is_chunk(request) and not request.blocks:
                    request.near -= min(
                        request.near, max(0, self._needs.pages(request, count) - self.ledger.available)
                    )
                if not self._make_room(position, count):
                    lacking = self._needs.pages(request, count) - self.ledger.available
                    if 0 < lacking <= self.tiers.pages_held:
                        position += 1  # They will be free when they have landed.
                        continue
                    self._preempt(request)
                    continue
                shares.append(self._share(request, count))
            position += 1
        return budget, whole, self.preemptions > before

    def _chunk(self, request: Request, budget: int, whole: bool) -> int:
        """Tokens that a request computes of its prompt; none if they do not finish it where only `whole`
        prompts go on."""
        count = self._needs.chunk(request, max(budget, 0))
        return count if not whole or request.computed + count == self._needs.goal(request) else 0

    def _wanted(self, most: int) -> int:
        """Of at most so many tokens, those that the first in the queue want, whose prompts are finished by
        them and have room."""
        wanted, pages = 0, self.ledger.available - sum(map(self._tail, self._running))
        for request in islice(self._waiting, min(_LOOKED_AT, len(self._rows))):
            lacking = request.length - self._found(request)
            pages -= -(-request.length // self.limits.block_size)
            if request.long or wanted + lacking > most or pages < 0:
                break
            wanted += lacking
        return wanted

    def _found(self, request: Request) -> int:
        """Tokens at its beginning whose blocks it would find, each with the one before."""
        size = self.limits.block_size
        if not request.share_prefix:
            return 0
        keys = self.prefixes.next_keys(request, 0, size)
        return size * sum(1 for _ in takewhile(lambda key: self.ledger.find(key) is not None, keys))

    def _make_room(self, position: int, count: int) -> bool:
        """Preempts until the running request has the blocks for `count` more positions. False if it has to go
        itself.

        Only requests behind it are preempted, and they have no share yet: the last that has such blocks, of
        those that need pages of the device short ones first, since they are sooner computed again. Before
        anyone goes, near pages do.
        """
        request = self._running[position]
        while True:
            lacking = self._needs.pages(request, count) - self.ledger.available
            if lacking > 0 and self._give_near(self._running[position:], lacking):
                continue
            lacks_pages = lacking > 0
            if not lacks_pages and (
                not request.long or self._needs.host(request, count) <= self.host.available
            ):
                return True
            behind = [
                other
                for other in self._running[position + 1 :]
                if (other.blocks if lacks_pages else other.long)
            ]
            if not behind:
                return False
            self._preempt(max(behind, key=lambda other: (lacks_pages and not other.long, other.turn)))

    def _admit(self, shares: list[Share], budget: int, whole: bool) -> Iterator[Admission]:
        """Requests from the queue, each in its turn, while tokens, rows and blocks for their whole length are
        there.

        Whose prompt comes from another tier is admitted without tokens. whole: whether tokens are only for
        prompts that they finish.
        """
        while self._waiting and self._rows and len(self._running) < self._step_rows:
            request = self._waiting[0]
            self._reuse(request)
            room = self._has_room(request)
            comes = room and not self._is_full(request) and self._arrivals.fetch(request)
            count = 0 if comes else self._chunk(request, budget, whole)
            if not room or not (comes or (count and not self._is_full())):
                self._let_go(request)
                return
            if request.long:
                self._find_near(request, self.ledger.available - self._promised(request))
            self._waiting.popleft()
            request.phase, request.row = Phase.RUNNING, self._rows.pop()
            self._by_row[request.row] = request
            insort(self._running, request, key=lambda other: other.turn)
            yield Admission(
                request.row, request.sampling, request.prompt, tuple(request.tokens[request.prompt_length :])
            )
            if comes:
                continue
            if request.computed + count < self._needs.goal(request):
                whole = True
                count = self._needs.chunk(request, budget - self._wanted(budget // 2)) or count
            budget -= count
            shares.append(self._share(request, count))

    def _is_full(self, *newcomers: Request) -> bool:
        """Whether one more, with a token in each step, would leave less than a block of tokens to a long
        prompt that is not done with.

        Who is admitted without tokens is not held back by the tokens of a step, and has one in each as soon
        as its blocks have come."""
        yet = any(map(self._needs.is_chunk, (*self._running, *newcomers)))
        return yet and len(self._running) + self.limits.block_size > self._step_tokens

    def _has_room(self, request: Request) -> bool:
        """Whether there are blocks for a newcomer's whole length, on the device and on the host.

        Every running request keeps a block in reserve, or the newcomer would be preempted as soon as they
        grow; a long one its tail.
        """
        cold = self._needs.host(request, request.length - request.computed)
        cold += sum(other.long for other in self._running) if request.long else 0
        return self._promised(request) <= self.ledger.available and cold <= self.host.available

    def _promised(self, newcomer: Request) -> int:
        """Device blocks that those who run may come to need, and a newcomer for its whole length."""
        pages = sum(map(self._tail, self._running))
        return pages + (
            self._tail(newcomer)
            if newcomer.long
            else self._needs.pages(newcomer, newcomer.length - newcomer.computed)
        )

    def _tail(self, request: Request) -> int:
        """Device blocks that who runs may come to need beside those that are its own or on their way to
        it."""
        if request.steady:
            return 1
        return self._needs.tail(
            request, 0 if request.arriving is None else len(self.tiers.pages_of(request.arriving))
        )

    def _cold_promised(self) -> int:
        """Host blocks that long requests which run may come to need: what their prompts still lack, and some
        more for what they decode."""
        if not self._long:
            return 0
        long = (request for request in self._running if request.long)
        return sum(_AHEAD + self._needs.host(request, request.length - request.computed) for request in long)

    # -- near pages: what is in them is on the host as well

    def _find_near(self, request: Request, spare: int) -> None:
        """A long newcomer may have so many near pages, and holds those that someone has left."""
        request.near = max(0, spare if self.limits.near is None else min(spare, self.limits.near))
        first = have = len(request.host_blocks)
        # What follows the first of them needs pages too.
        least = max(0, request.length // self.limits.block_size - request.near)
        while (
            first > least
            and (page := self.ledger.find(self.prefixes.key(request, first - 1, self.limits.block_size)))
            is not None
        ):
            self.ledger.hold(page)
            request.blocks.insert(0, page)
            first -= 1
        request.paged, request.shown = first, have

    def _free_near(self) -> None:
        """Near pages are free before anyone has a share: for the next token of all who run, and for the first
        in the queue."""
        if not self._long:
            return
        wanted = sum(
            self._needs.pages(request, 1) for request in self._running if self._needs.newest_only(request)
        )
        if self._waiting and self._rows:
            promised = self._promised(self._waiting[0])
            if promised - self.ledger.available <= sum(map(self._needs.near, self._running)):
                wanted = max(wanted, promised)
        self._give_near(self._running, wanted - self.ledger.available)

    def _give_near(self, requests: Sequence[Request], count: int) -> bool:
        """Give up so many near pages of these, or as many as there are, of the youngest first. Whether there
        was one. Those who have a share are not among them: they will read these pages."""
        given = 0
        for request in reversed(requests):
            some = min(self._needs.near(request), count - given)
            if some > 0:
                given += some
                request.near = self._needs.near(request) - some
                self._drop_pages(request, some)
        return given > 0

    def _drop_pages(self, request: Request, count: int) -> None:
        """A long request's first pages, near ones, are no longer its own. Who reads them for an order keeps
        them until then."""
        dropped, request.blocks = request.blocks[:count], request.blocks[count:]
        request.paged += count
        ordered = {order.source for order in self._orders}
        self._leaving += [page for page in dropped if page in ordered]
        self.ledger.release([page for page in dropped if page not in ordered])

    def _reuse(self, request: Request) -> int:
        """Skip over full blocks that someone has computed already, or computes in this very step. Returns the
        tokens skipped.

        The same step is early enough: in every layer, the keys and values of all its tokens are written
        before any are read. That is so for pages; a host block is found after the step that wrote it. The
        last token is always computed, since its logits are wanted.
        """
        size = self.limits.block_size
        first = len(request.host_blocks if request.long else request.blocks)
        if not request.share_prefix or request.computed != first * size:
            return 0
        keys = self.prefixes.next_keys(request, first, size)
        found = (self._hold_cold if request.long else self._hold)(request, keys)
        skipped = found * size
        if found:
            request.computed += skipped
            request.sealed = first + found
        if skipped and request.long and request.meeting is not None and request.cached is not None:
            self._arrivals.met(request, skipped)
        if skipped and request.long and request.blocks:
            # Its pages would have a gap before what is computed next.
            self._drop_pages(request, len(request.blocks))
        return skipped

    def _hold(self, request: Request, keys: Sequence[bytes]) -> int:
        """How many of the first of these are in pages, which are the request's from now on."""
        blocks = self.ledger.run_of(keys)
        if blocks:
            self.ledger.hold_run(keys, blocks)
            self.tiers.use(keys[: len(blocks)])
            request.blocks += blocks
        return len(blocks)

    def _hold_cold(self, request: Request, keys: Sequence[bytes]) -> int:
        """The same of host blocks, also of those on disk."""
        count = 0
        for key in keys:
            block = self.host.find(key)
            if block is None:
                break
            self.tiers.use((key,))
            self.host.hold(block)
            request.host_blocks.append(block)
            count += 1
        return count

    def _share(self, request: Request, count: int) -> Share:
        """Allocate blocks for the next `count` positions, seal pages that become full, and describe the
        work."""
        assert request.row is not None
        start, stop, size = request.computed, request.computed + count, self.limits.block_size
        if request.cached is None:
            request.cached = start
            self.tiers.counts.began(
                request.prompt_length, start, min(request.from_host, start), min(request.from_disk, start)
            )
        pages, first = self._needs.pages(request, count), self._needs.first_page(request, count)
        if request.long:
            have, chunk = len(request.host_blocks), self._needs.is_chunk(request)
            cold = self._extend_cold(request, count)
            request.paged = first
            if not chunk:
                self._orders += map(Order, request.blocks[have - first :], cold)
                self._drop_pages(request, max(0, self._needs.near(request) - request.near))
        request.blocks.extend(self.ledger.allocate(pages))
        request.computed, first = stop, request.paged
        if self.prefixes.share:
            self._show(request)
        new = max(request.tabled, first)
        following: tuple[int, ...] = ()
        if request.sampling.prompt_logprobs is not None and request.scored < min(
            stop, request.prompt_length - 1
        ):
            following = tuple(request.tokens[start + 1 : min(stop + 1, request.prompt_length)])
        share = Share(
            row=request.row,
            start=start,
            tokens=tuple(request.tokens[start:stop]),
            first_new_block=new,
            new_blocks=tuple(request.blocks[new - first :]),
            sample=stop == request.length,
            prompt_length=request.prompt_length,
            next_prompt_tokens=following,
            cold_start=min(start, first * size),
            cold_stop=len(request.host_blocks) * size,
            near=first * size,
            first_new_cold=request.host_tabled,
            new_cold=tuple(request.host_blocks[request.host_tabled :]),
        )
        request.tabled, request.host_tabled = first + len(request.blocks), len(request.host_blocks)
        request.steady = self._steady(request) if share.sample and not request.long else 0
        return share

    def _steady(self, request: Request) -> int:
        """See Request; of a short one that has come to its own length."""
        blocks = len(request.blocks)
        if not self.prefixes.share:
            return blocks * self.limits.block_size
        return blocks * self.limits.block_size - 1 if request.sealed >= blocks - 1 else 0

    def _show(self, request: Request) -> None:
        """Seal pages that are full when the step has computed them, as far as their tokens are known."""
        full = min(request.computed, request.known) // self.limits.block_size
        known = request.shown if request.long else request.sealed
        for index in range(max(known, request.paged), full):
            self.ledger.seal(
                request.blocks[index - request.paged],
                self.prefixes.key(request, index, self.limits.block_size),
            )
        if request.long:
            request.shown = full
        else:
            request.sealed = full

    def _extend_cold(self, request: Request, count: int) -> list[HostBlockId]:
        """The host blocks that a share of `count` positions fills, by itself or by orders, now the request's
        last."""
        have = len(request.host_blocks)
        after = request.host_blocks[-1] if have else None
        cold = self.host.allocate(
            self._needs.host(request, count), after, request.length // self.limits.block_size - have
        )
        request.host_blocks.extend(cold)
        return cold

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the queue, before all whose turn is later; its KV is computed again,
        or found again."""
        self._running.remove(request)
        self._vacate(request)
        self._let_go(request)
        request.phase = Phase.WAITING
        self._queue(request)
        self.preemptions += 1

    def _vacate(self, request: Request) -> None:
        assert request.row is not None
        del self._by_row[request.row]
        self._rows.append(request.row)
        request.row = None

    def _let_go(self, request: Request) -> None:
        self._arrivals.leave(request)
        request.meets, request.meeting = 0, None
        self.ledger.release(request.blocks)
        self.host.release(request.host_blocks)
        request.blocks, request.host_blocks = [], []
        request.computed = request.sealed = request.shown = request.tabled = request.host_tabled = 0
        request.paged = request.near = request.steady = 0

    def forget(self) -> int:
        """Drop all cached KV, on the device and beyond. Returns how many blocks were given up."""
        return self.tiers.forget() + self.ledger.forget() + self.host.forget()

    def narrow(self, plan: Plan) -> RequestId | None:
        """The step of this plan was too large for the memory: the next ones have at most half of its tokens
        and requests. After some that succeed they have twice as much again, and later each time that this was
        too much.

        To be followed by `recover`. Returns a request whose smallest step does not fit, and that is to be
        stopped."""
        least = max(2, self.limits.block_size) if self.host.blocks else 1
        if len(plan.shares) == 1 and plan.tokens <= least:
            return self._by_row[plan.shares[0].row].id
        self._step_tokens, self._step_rows = max(plan.tokens // 2, least), max(len(plan.shares) // 2, 1)
        self._smooth, self._wait = 0, min(max(2 * self._wait, _SMOOTH), _SMOOTHEST)
        return None

    @property
    def narrowed(self) -> tuple[int, int] | None:
        """Most tokens and requests of a step, if these are fewer than the limits since one was too large for
        the memory."""
        now, most = (
            (self._step_tokens, self._step_rows),
            (self.limits.max_step_tokens, self.limits.max_sequences),
        )
        return None if now == most else now

    def _widen(self) -> None:
        """A step has succeeded."""
        self._smooth += 1
        if self._smooth >= self._wait:
            self._smooth = 0
            self._step_tokens = min(2 * self._step_tokens, self.limits.max_step_tokens)
            self._step_rows = min(2 * self._step_rows, self.limits.max_sequences)
            if self.narrowed is None:
                self._wait = 0

    def recover(self, landed: Sequence[Landed] = ()) -> None:
        """After a step cut short, perhaps while it was planned, and when nothing is under way any more: only
        KV that committed steps have written to the host is trusted, and all requests start anew, each in its
        turn. landed: the last of what was under way."""
        self.tiers.reset(landed)
        self.ledger.reset()
        self.host.vacate()
        self._arrivals.reset()
        self._orders, self._leaving = [], []
        self._flights.clear()
        self._running, self._by_row = [], {}
        self._rows = [Row(row) for row in reversed(range(self.limits.max_sequences))]
        self._waiting = deque(sorted(self._requests.values(), key=lambda request: request.turn))
        for request in self._waiting:
            request.phase, request.row, request.blocks, request.host_blocks = Phase.WAITING, None, [], []
            request.computed = request.sealed = request.shown = request.tabled = request.host_tabled = 0
            request.paged = request.near = request.meets = request.steady = 0
            request.arriving = request.meeting = None
            del request.tokens[request.known :]
            request.unknown, request.ending = 0, False

    # -- commit
    # --------------------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, outcome: Outcome) -> list[Event]:
        """Take in what the step yielded: new tokens, and requests that end with them; and what has come from
        other tiers. What it computed for requests that have ended since it was planned is dropped."""
        events, rates = list[Event](), self.tiers.rates
        requests = self._flights.popleft() if plan.shares else []
        for transfer, names, right in self.tiers.landed(outcome.landed):
            self._arrivals.take_in(transfer, names, right)
        if plan.shares:
            if self.narrowed is not None:
                self._widen()
            work = plan.tokens + sum(
                [rates.work(share.start, len(share.tokens)) - len(share.tokens) for share in plan.runs]
            )
            rates.stepped(work, plan.tokens, outcome.seconds, any(share.sample for share in plan.shares))
        self.ledger.release(self._leaving)
        self._orders, self._leaving = [], []
        size, finished = self.limits.block_size, Phase.FINISHED
        for request, share, result in zip(requests, plan.shares, outcome.results, strict=True):
            if request.phase is finished:
                continue
            start, stop = share.start, share.start + len(share.tokens)
            if request.long:
                self._seal_cold(request)
            elif stop // size > start // size and self.prefixes.share:
                self._show(request)
                for index in range(start // size, stop // size):
                    self.tiers.computed(*self.prefixes.name(request, index, size))
            # After a preemption the prompt is computed again, but nobody wants its log-probabilities twice.
            if result.prompt_logprobs and (fresh := result.prompt_logprobs[max(0, request.scored - start) :]):
                request.scored = start + len(result.prompt_logprobs)
                events.append(Event(request.id, prompt_logprobs=fresh))
            if not share.sample:
                continue
            token = result.token
            assert token is not None, f"request {request.id} was to sample and did not"
            if request.unknown:
                request.tokens[stop] = token
                request.unknown -= 1
            else:
                request.tokens.append(token)
            finish = (
                FinishReason.ERROR
                if result.broken
                else self._finish_of(request, token, stop + 1 - len(request.prompt))
            )
            if result.wrong:
                self._disown(request)
                finish = FinishReason.ERROR
            cached, from_host, from_disk = request.cached or 0, 0, 0
            if request.from_host or request.from_disk:
                from_host, from_disk = (
                    max(0, min(request.from_host, cached) - request.from_disk),
                    min(request.from_disk, cached),
                )
            events.append(Event(request.id, token, result.logprob, (), finish, cached, from_host, from_disk))
            if finish is not None:
                self.stop(request.id, finish)
            elif (
                not request.long
                and (reach := len(request.tokens) + _EARLY) >= self._long_from
                and self._becomes_long(request, reach)
            ):
                self._long += 1
                request.long, request.shown, request.sealed, request.steady = True, request.sealed, 0, 0
                request.near = (
                    len(request.blocks)
                    if self.limits.near is None
                    else min(len(request.blocks), self.limits.near)
                )
        if self._check:
            self.check()
        return events

    def _disown(self, request: Request) -> None:
        """Nothing of its KV is to be found by others any more, on any tier: what is no number spreads in a
        pass, also to tokens before it, and so to others' answers."""
        self.wrong += 1
        if self.prefixes.share:
            size = self.limits.block_size
            keys = [self.prefixes.key(request, index, size) for index in range(request.known // size)]
            for key in keys:
                self.ledger.forget_one(key)
                self.host.forget_one(key)
            self.tiers.forget_some(keys)

    def _seal_cold(self, request: Request) -> None:
        """Its host blocks have been written: from now on others find them."""
        if self.prefixes.share:
            for index in range(request.sealed, len(request.host_blocks)):
                name = self.prefixes.name(request, index, self.limits.block_size)
                self.host.seal(request.host_blocks[index], *name)
                self.tiers.sealed_on_host(request.host_blocks[index], *name)
        request.sealed = len(request.host_blocks)

    def _finish_of(self, request: Request, token: int, output: int) -> FinishReason | None:
        """Whether the request ends with this token, when it has so many of output."""
        if token in request.sampling.end_tokens and output >= request.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if output >= request.max_tokens else None

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.row is not None:
            self._vacate(request)
        self._let_go(request)
        request.phase, request.finish = Phase.FINISHED, reason
        del self._requests[request.id]
        self._long -= request.long

    def check(self) -> None:
        """Prove that blocks, rows and phases agree. Raises AssertionError with what is wrong."""
        moving_pages, moving_blocks = self.tiers.held()
        requests = self._requests.values()
        self.ledger.check([*(request.blocks for request in requests), self._leaving, *moving_pages])
        self.host.check([*(request.host_blocks for request in requests), *moving_blocks])
        assert len(self._running) + len(self._waiting) == len(requests), (
            "a request is neither running nor waiting"
        )
        assert self._long == sum(request.long for request in requests), (
            "a long request is not counted, or one that has ended is"
        )
        prove_rows(self._running, self._waiting, self._by_row, self._rows, self.limits.max_sequences)
        for request in self._running:
            prove_kv(request, self.limits.block_size)
