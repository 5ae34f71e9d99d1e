"""Decides each step: who runs, which tokens are computed, into which blocks, who has to wait. Integers only; it never sees a tensor.

There is no prefill phase. A request has tokens, some of them computed; every step brings it closer to its own length, and when it has
caught up its last position yields one more token.

The KV of a long request rests in host blocks, where there are any. Its chunks are whole blocks, which go there at once; only what the
last one leaves over, and what is decoded, goes to pages of the device alone: the tail. Of the tail's full blocks the newest few stay.
The last of the blocks that are on the host are near: in pages as well, as long as nobody else needs these, and so need not stream.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from time import monotonic

from penstock.base.errors import RequestError
from penstock.kv.keys import block_keys, root_key
from penstock.kv.ledger import BlockLedger, DiskLedger, HostLedger
from penstock.sched.tiers import Name, Store, Tiers
from penstock.step.params import Sampling
from penstock.step.plan import (
    Admission,
    BlockId,
    HostBlockId,
    Landed,
    Order,
    Outcome,
    Plan,
    RequestId,
    Route,
    Row,
    Share,
    TokenLogprob,
    Transfer,
    TransferId,
)
from penstock.step.request import FinishReason, Phase, Request

_PATIENCE, _LEAST_PATIENCE = 30.0, 0.1
"""Seconds for which a request waits for blocks from another tier: where it is not known how long to compute them takes, and at least."""
_AHEAD = 4
"""Host blocks of a long request that no transfer takes."""
_EARLY = 2
"""Tokens before a request would be too long for the device it becomes long: its newest one still has a place there, and the next not."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and a request may be at most."""

    block_size: int
    max_step_tokens: int
    max_sequences: int
    max_length: int
    """Tokens of a request, prompt and output together."""
    long_from: int | None = None
    """Tokens, prompt and output together, from which a request is long; None, or more than KV on the device holds, is what that does not
    hold. Without host blocks no request is long."""
    recent: int = 2
    """Newest full blocks of a long request that are on the device alone."""
    near: int | None = None
    """Most blocks of a long request that are both on the host and on the device; None is as many as there are pages to spare."""


@dataclass(frozen=True, slots=True)
class PrefixRule:
    """How prefixes are named, so that equal names mean equal KV.

    With dynamic rope the KV of a prompt longer than `length_matters_from` depends on the prompt's length, which then enters the root.
    """

    root: bytes
    share: bool = True
    length_matters_from: int | None = None

    def root_of(self, prompt_length: int) -> bytes:
        if self.length_matters_from is None or prompt_length <= self.length_matters_from:
            return self.root
        return root_key(self.root, prompt_length)


@dataclass(frozen=True, slots=True)
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


class Scheduler:
    """Owns the requests and, through the ledgers, the blocks. One thread; `plan` and `commit` alternate.

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
        clock: Callable[[], float] = monotonic,
        check: bool = False,
    ) -> None:
        """alike: whether blocks on the host are what they are on the device. store: when full blocks of short requests go to the host.

        disk: what is there; it comes by way of host blocks.
        """
        least = max(2, limits.block_size)
        assert host is None or limits.max_step_tokens >= least, f"a step of {limits.max_step_tokens} tokens, {least} needed for host blocks"
        self.ledger = ledger
        self.host = HostLedger(0) if host is None else host
        step_blocks = -(-limits.max_step_tokens // limits.block_size)
        self.tiers = Tiers(ledger, self.host, alike=alike, store=store if prefixes.share else "off", disk=disk, step_blocks=step_blocks)
        self.limits = limits
        self.prefixes = prefixes
        self._clock = clock
        self._arriving: dict[TransferId, Request] = {}
        self._check = check
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        """Sorted by arrival: the last is the first to be preempted."""
        self._requests: dict[RequestId, Request] = {}
        self._by_row: dict[Row, Request] = {}
        self._rows = [Row(row) for row in reversed(range(limits.max_sequences))]
        self._next_id = 0
        self._orders: list[Order] = []
        """Of the step under way."""
        self._leaving: list[BlockId] = []
        """Pages that are nobody's but are read by orders: held until the step is committed."""
        self.preemptions = 0
        self._pages = limits.recent + 2
        """Device blocks that a long request needs: the recent ones, one on its way to the host, one that is being filled."""
        self._longest_short = ledger.blocks * limits.block_size + 1
        # What the host holds and a block of tail: after a preemption all full blocks are computed into host blocks.
        most = (self.host.blocks + 1) * limits.block_size if self.host.blocks else 0
        self._longest_long = most if ledger.blocks >= self._pages else min(most, self._longest_short)
        self._long_from = self._longest_short + 1 if limits.long_from is None else min(self._longest_short + 1, limits.long_from)

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def longest(self) -> int:
        """Most tokens a request may have: the context's end or, if that is less, what KV on the device holds, or on the host.

        The last token of an output is never an input, so it needs no place in a block.
        """
        return min(self.limits.max_length, max(self._longest_short, self._longest_long))

    def submit(self, prompt: Sequence[int], sampling: Sampling, max_tokens: int | None = None) -> RequestId:
        """Queue a request. Raises RequestError if it could never be served, before anything is changed.

        Without `max_tokens` it may have all the room there is, and is long at once for its prompt, or when its output has grown.
        """
        room = self.longest - len(prompt)
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if room < 1 or (max_tokens is not None and max_tokens > room):
            raise RequestError(self._refusal(len(prompt), max_tokens))
        request = Request(
            id=RequestId(self._next_id),
            tokens=list(prompt),
            prompt_length=len(prompt),
            max_tokens=room if max_tokens is None else max_tokens,
            sampling=sampling,
            share_prefix=self.prefixes.share and sampling.prompt_logprobs is None,
        )
        request.long = self._becomes_long(request, len(prompt) + (max_tokens or _EARLY))
        self._next_id += 1
        self._requests[request.id] = request
        self._waiting.append(request)
        return request.id

    def _becomes_long(self, request: Request, reach: int) -> bool:
        """Whether a request that comes to `reach` tokens, if it may have so many, is long: it is not if it does not fit as such."""
        most = request.prompt_length + request.max_tokens
        return min(reach, most) >= self._long_from and most <= self._longest_long

    def _refusal(self, prompt: int, max_tokens: int | None) -> str:
        asked = f"{prompt} tokens of prompt" + (f" and {max_tokens} of output" if max_tokens else "")
        if self.longest == self.limits.max_length or not self.host.blocks:
            context = self.longest == self.limits.max_length
            what, more = ("the context holds", "more length") if context else ("the KV blocks hold", "more memory, or KV in host memory")
            return f"the request has {asked}, but {what} {self.longest} in all; shorten it, or allow {more}"
        size, total = self.limits.block_size, prompt + (max_tokens or 1)
        needed = []
        if total > (self.host.blocks + 1) * size:
            needed.append(f"host memory or disk for {(total - 1) // size * size} tokens of KV ({self.host.blocks * size} now)")
        if self.ledger.blocks < self._pages:
            needed.append(f"{self._pages} KV blocks on the device ({self.ledger.blocks} now)")
        if total > self.limits.max_length:
            needed.append(f"a max_length of {total} ({self.limits.max_length} now)")
        return f"the request has {asked}, but KV has room for {self.longest} in all; shorten it, or allow {' and '.join(needed)}"

    def stop(self, id: RequestId, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request now, wherever it is, and free what it holds. False if it has already ended."""
        request = self._requests.get(id)
        if request is None:
            return False
        if request.phase is Phase.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
        self._end(request, reason)
        return True

    # -- plan ----------------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The next step. Empty only if there is nothing to do."""
        self._orders = []
        shares: list[Share] = []
        self._free_near()
        budget, preempted = self._plan_running(shares)
        admissions = [] if preempted else list(self._admit(shares, budget))
        shares.sort(key=lambda share: len(share.tokens) > 1)
        plan = Plan(tuple(admissions), tuple(shares), tuple(self._orders), *self.tiers.plan(self._cold_promised()))
        if self._check:
            self.check()
            self._check_plan(plan)
        return plan

    def _plan_running(self, shares: list[Share]) -> tuple[int, bool]:
        """Shares for the running, oldest first. Returns the tokens left in the step, and whether anyone had to go.

        Every request that only lacks its newest token gets it, so a long prompt never holds up others: chunks take what is left.
        """
        budget = self.limits.max_step_tokens - sum(request.length - request.computed == 1 for request in self._running)
        before = self.preemptions
        position = 0
        while position < len(self._running):
            request = self._running[position]
            if request.arriving is not None and not self._is_late(request):
                position += 1
                continue
            if request.length - request.computed == 1:
                count = 1
            else:
                self._reuse(request)
                if self._meet(request) or self._fetch(request):
                    position += 1
                    continue
                count = self._chunk(request, budget)
                # Whoever is still under way afterwards leaves no tokens to those behind, nor to newcomers.
                budget = budget - count if request.computed + count == request.length else 0
            if count:
                if self._is_chunk(request) and not request.blocks:
                    request.near -= min(request.near, max(0, self._lacking(request, count) - self.ledger.available))
                if not self._make_room(position, count):
                    lacking = self._lacking(request, count) - self.ledger.available
                    if 0 < lacking <= self.tiers.pages_held:
                        position += 1  # They will be free when they have landed.
                        continue
                    self._preempt(request)
                    continue
                shares.append(self._share(request, count))
            position += 1
        return budget, self.preemptions > before

    def _chunk(self, request: Request, budget: int) -> int:
        """How many tokens a request computes if it has `budget`; of a long one whole blocks, at least two tokens, or all it lacks.

        Who has been admitted always has one: those admitted with it computed a token each beside its first chunk, as they do from then on.
        """
        lacking = (request.meets * self.limits.block_size or request.length) - request.computed
        if not request.long or lacking <= budget:
            return min(lacking, budget)
        count = budget - budget % self.limits.block_size
        return count if count > 1 else 0

    def _make_room(self, position: int, count: int) -> bool:
        """Preempts until the running request has the blocks for `count` more positions. False if it has to go itself.

        Only requests behind it are preempted, and they have no share yet: the youngest that has such blocks, of those that need
        pages of the device short ones first, since they are sooner computed again. Before anyone goes, near pages do.
        """
        request = self._running[position]
        while True:
            lacking = self._lacking(request, count) - self.ledger.available
            if lacking > 0 and self._give_near(self._running[position:], lacking):
                continue
            lacks_pages = lacking > 0
            if not lacks_pages and (not request.long or self._cold_after(request, count) - len(request.host_blocks) <= self.host.available):
                return True
            behind = [other for other in self._running[position + 1 :] if (other.blocks if lacks_pages else other.long)]
            if not behind:
                return False
            self._preempt(max(behind, key=lambda other: (lacks_pages and not other.long, other.id)))

    def _admit(self, shares: list[Share], budget: int) -> Iterator[Admission]:
        """Requests from the queue, first come first served, while tokens, rows and blocks for their whole length are there.

        Whose prompt comes from another tier is admitted without tokens.
        """
        while self._waiting and self._rows:
            request = self._waiting[0]
            self._reuse(request)
            room = self._has_room(request)
            comes = room and not self._is_full(request) and self._fetch(request)
            count = 0 if comes else self._chunk(request, max(budget, 0))
            if not room or not (comes or (count and not self._is_full())):
                self._let_go(request)
                return
            if request.long:
                self._find_near(request, self.ledger.available - self._promised(request))
            self._waiting.popleft()
            request.phase, request.row = Phase.RUNNING, self._rows.pop()
            self._by_row[request.row] = request
            insort(self._running, request, key=lambda other: other.id)
            prompt, output = request.tokens[: request.prompt_length], request.tokens[request.prompt_length :]
            yield Admission(request.row, request.sampling, tuple(prompt), tuple(output))
            if comes:
                continue
            budget = budget - count if request.computed + count == request.length else 0
            shares.append(self._share(request, count))

    def _is_full(self, *newcomers: Request) -> bool:
        """Whether one more, with a token in each step, would leave less than a block of tokens to a long prompt that has yet to come."""
        yet = any(request.long and (request.arriving is not None or request in newcomers) for request in (*self._running, *newcomers))
        return yet and len(self._running) + self.limits.block_size > self.limits.max_step_tokens

    def _has_room(self, request: Request) -> bool:
        """Whether there are blocks for a newcomer's whole length, on the device and on the host.

        Every running request keeps a block in reserve, or the newcomer would be preempted as soon as they grow; a long one its tail.
        """
        cold = self._cold_after(request, request.length - request.computed) - len(request.host_blocks)
        cold += sum(other.long for other in self._running) if request.long else 0
        return self._promised(request) <= self.ledger.available and cold <= self.host.available

    def _promised(self, newcomer: Request) -> int:
        """Device blocks that those who run may come to need, and a newcomer for its whole length."""
        pages = sum(map(self._tail, self._running))
        return pages + (self._tail(newcomer) if newcomer.long else self._lacking(newcomer, newcomer.length - newcomer.computed))

    def _cold_promised(self) -> int:
        """Host blocks that long requests which run may come to need: what their prompts still lack, and some more for what they decode."""
        long = (request for request in self._running if request.long)
        return sum(_AHEAD + self._cold_after(request, request.length - request.computed) - len(request.host_blocks) for request in long)

    def _tail(self, request: Request) -> int:
        """Device blocks that who runs may come to need beside those it has: one, or what its prompt still lacks; a long one its tail."""
        if not request.long:
            coming = len(self.tiers.pages_of(request.arriving)) if request.arriving is not None else 0
            return max(1, self._lacking(request, request.length - request.computed) - coming)
        most = -(-(request.prompt_length + request.max_tokens - 1) // self.limits.block_size)
        return max(1, min(self._pages, most) - len(request.blocks) + self._near(request))

    def _lacking(self, request: Request, count: int) -> int:
        """Device blocks that must be allocated before `count` more positions can be computed."""
        return -(-(request.computed + count) // self.limits.block_size) - self._first_page(request, count) - len(request.blocks)

    def _first_page(self, request: Request, count: int) -> int:
        """Index of the first block that is in a page when `count` more positions are computed: those it has stay."""
        if request.blocks or not request.long:
            return request.paged
        have = len(request.host_blocks)
        if not self._is_chunk(request):
            return have
        return min(self._cold_after(request, count), max(have, request.length // self.limits.block_size - request.near))

    # -- near pages: what is in them is on the host as well

    def _near(self, request: Request) -> int:
        """How many of a request's pages are near."""
        return len(request.host_blocks) - request.paged if request.blocks and request.long else 0

    def _find_near(self, request: Request, spare: int) -> None:
        """A long newcomer may have so many near pages, and holds those that someone has left."""
        request.near = max(0, spare if self.limits.near is None else min(spare, self.limits.near))
        first = have = len(request.host_blocks)
        # What follows the first of them needs pages too.
        least = max(0, request.length // self.limits.block_size - request.near)
        while first > least and (page := self.ledger.find(self._key(request, first - 1))) is not None:
            self.ledger.hold(page)
            request.blocks.insert(0, page)
            first -= 1
        request.paged, request.shown = first, have

    def _free_near(self) -> None:
        """Near pages are free before anyone has a share: for the next token of all who run, and for the first in the queue."""
        wanted = sum(self._lacking(request, 1) for request in self._running if request.length - request.computed == 1)
        if self._waiting and self._rows:
            promised = self._promised(self._waiting[0])
            if promised - self.ledger.available <= sum(map(self._near, self._running)):
                wanted = max(wanted, promised)
        self._give_near(self._running, wanted - self.ledger.available)

    def _give_near(self, requests: Sequence[Request], count: int) -> bool:
        """Give up so many near pages of these, or as many as there are, of the youngest first. Whether there was one. Those who have a
        share are not among them: they will read these pages."""
        given = 0
        for request in reversed(requests):
            some = min(self._near(request), count - given)
            if some > 0:
                given += some
                request.near = self._near(request) - some
                self._drop_pages(request, some)
        return given > 0

    def _drop_pages(self, request: Request, count: int) -> None:
        """A long request's first pages, near ones, are no longer its own. Who reads them for an order keeps them until then."""
        dropped, request.blocks = request.blocks[:count], request.blocks[count:]
        request.paged += count
        ordered = {order.source for order in self._orders}
        self._leaving += [page for page in dropped if page in ordered]
        self.ledger.release([page for page in dropped if page not in ordered])

    def _is_chunk(self, request: Request) -> bool:
        """Whether what a request computes next goes to the host, as far as it fills blocks; else to its tail."""
        return request.long and request.length - request.computed > 1

    def _cold_after(self, request: Request, count: int) -> int:
        """Host blocks that a request has when `count` more positions are computed."""
        if not request.long:
            return 0
        if self._is_chunk(request):
            return (request.computed + count) // self.limits.block_size
        return max(len(request.host_blocks), request.computed // self.limits.block_size - self.limits.recent)

    def _reuse(self, request: Request) -> int:
        """Skip over full blocks that someone has computed already, or computes in this very step. Returns the tokens skipped.

        The same step is early enough: in every layer, the keys and values of all its tokens are written before any are read. That is so
        for pages; a host block is found after the step that wrote it. The last token is always computed, since its logits are wanted.
        """
        size, skipped = self.limits.block_size, 0
        blocks = len(request.host_blocks if request.long else request.blocks)
        while request.share_prefix and request.computed == blocks * size and request.computed + size < request.length:
            key = self._key(request, blocks)
            if not (self._hold_cold(request, key) if request.long else self._hold(request, key)):
                break
            blocks += 1
            request.computed += size
            request.sealed = blocks
            skipped += size
        if skipped and request.long and request.meeting is not None and request.cached is not None:
            self._met(request, skipped)
        if skipped and request.long and request.blocks:
            # Its pages would have a gap before what is computed next.
            self._drop_pages(request, len(request.blocks))
        return skipped

    def _fetch(self, request: Request) -> bool:
        """Bring the request's next blocks from the host, or from the disk to the host, if they are there and that is faster than to compute
        them. Whether they come."""
        usable = self.tiers.pays and request.share_prefix and request.punctual
        if not usable or request.computed % self.limits.block_size:
            return False
        rates, size, first = self.tiers.rates, self.limits.block_size, request.computed // self.limits.block_size
        blocks = list[HostBlockId]()
        if not request.long and first == len(request.blocks):
            blocks = self.host.run_of(self._next_keys(request, first))
        count = len(blocks)
        if count and count <= self.ledger.available:
            if rates.loading_pays(rates.seconds(Route.UP, count), count * size):
                request.arriving, _ = self.tiers.bring_up(self._names(request, first, count), blocks)
                self._wait(request)
                return True
            self._decline(request, first + count)
            rates.declined(Route.UP)
            return False
        if count or not request.patient or (request.long and first != len(request.host_blocks)):
            return False
        count = self.tiers.on_disk(self._next_keys(request, first))
        if not count:
            return False
        names = self._names(request, first, count)
        # A long request's chunks are two tokens at least.
        front = rates.computed_first(len(names), size) if size > 1 else 0
        if front:
            self._decline(request, first + front)
        if front == len(names):
            rates.declined(Route.IN)
            request.patient = False
            return False
        begun = self.tiers.bring_in(names[front:], self._cold_promised())
        if begun is None:
            return False
        if front:
            request.meets, request.meeting = first + front, begun[0]
            return False
        request.arriving = begun[0]
        self._wait(request)
        return True

    def _decline(self, request: Request, stop: int) -> None:
        """Blocks up to this index are there, and will be computed all the same."""
        first = max(request.weighed, request.computed // self.limits.block_size)
        if stop > first:
            self.tiers.counts.recomputed += stop - first
            request.weighed = stop

    def _meet(self, request: Request) -> bool:
        """Whether a request has come to blocks that are still on their way, for which it waits."""
        if not request.meets or request.computed < request.meets * self.limits.block_size:
            return False
        request.meets = 0
        if request.meeting is None or not self.tiers.is_coming(request.meeting):
            return False
        request.arriving = request.meeting
        self._wait(request)
        return True

    def _next_keys(self, request: Request, first: int) -> Sequence[bytes]:
        """Of the request's full blocks from `first` on, but for one that holds its last token."""
        last = (request.length - 1) // self.limits.block_size
        if first >= last:
            return ()
        self._key(request, last - 1)
        return request.keys[first:last]

    def _names(self, request: Request, first: int, count: int) -> list[Name]:
        keys = request.keys
        return list(map(Name, keys[first : first + count], [keys[first - 1] if first else None, *keys[first : first + count - 1]]))

    def _wait(self, request: Request) -> None:
        assert request.arriving is not None
        self._arriving[request.arriving] = request
        request.since = self._clock()

    def _is_late(self, request: Request) -> bool:
        """Whether what a request waits for takes longer than to compute it would have; then it waits no more."""
        assert request.arriving is not None
        count = self.tiers.count_of(request.arriving)
        token = self.tiers.rates.token
        limit = _PATIENCE if token is None else max(_LEAST_PATIENCE, 2 * token * count * self.limits.block_size)
        if self._clock() - request.since < limit:
            return False
        self.tiers.counts.late += count
        request.punctual = False
        self._depart(request)
        return True

    def _depart(self, request: Request) -> None:
        """The request waits for nothing any more; what is on its way will be cached."""
        if request.arriving is not None:
            del self._arriving[request.arriving]
            request.arriving = None

    def _hold(self, request: Request, key: bytes) -> bool:
        block = self.ledger.find(key)
        if block is None:
            return False
        self.tiers.use(key)
        self.ledger.hold(block)
        request.blocks.append(block)
        return True

    def _hold_cold(self, request: Request, key: bytes) -> bool:
        block = self.host.find(key)
        if block is None:
            return False
        self.tiers.use(key)
        self.host.hold(block)
        request.host_blocks.append(block)
        return True

    def _key(self, request: Request, index: int) -> bytes:
        """The key of the request's full block `index`, with those before it."""
        keys, size = request.keys, self.limits.block_size
        if len(keys) <= index:
            # All that there are: whoever asks for one will ask for the next.
            parent = keys[-1] if keys else self.prefixes.root_of(request.prompt_length)
            keys += block_keys(parent, request.tokens[len(keys) * size :], size)
        return keys[index]

    def _share(self, request: Request, count: int) -> Share:
        """Allocate blocks for the next `count` positions, seal pages that become full, and describe the work."""
        assert request.row is not None
        start, stop, size = request.computed, request.computed + count, self.limits.block_size
        if request.cached is None:
            request.cached = start
            self.tiers.counts.began(request.prompt_length, start, min(request.from_host, start), min(request.from_disk, start))
        pages, first = self._lacking(request, count), self._first_page(request, count)
        if request.long:
            have, chunk = len(request.host_blocks), self._is_chunk(request)
            cold = self._extend_cold(request, count)
            request.paged = first
            if not chunk:
                self._orders += map(Order, request.blocks[have - first :], cold)
                self._drop_pages(request, max(0, self._near(request) - request.near))
        request.blocks.extend(self.ledger.allocate(pages))
        request.computed, first = stop, request.paged
        if self.prefixes.share:
            self._show(request)
        new = max(request.tabled, first)
        following: tuple[int, ...] = ()
        if request.sampling.prompt_logprobs is not None and request.scored < min(stop, request.prompt_length - 1):
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
        return share

    def _show(self, request: Request) -> None:
        """Seal pages that are full when the step has computed them."""
        full = request.computed // self.limits.block_size
        known = request.shown if request.long else request.sealed
        for index in range(max(known, request.paged), full):
            self.ledger.seal(request.blocks[index - request.paged], self._key(request, index))
        if request.long:
            request.shown = full
        else:
            request.sealed = full

    def _extend_cold(self, request: Request, count: int) -> list[HostBlockId]:
        """The host blocks that a share of `count` positions fills, by itself or by orders, now the request's last."""
        have = len(request.host_blocks)
        after = request.host_blocks[-1] if have else None
        lacking = self._cold_after(request, count) - have
        cold = self.host.allocate(lacking, after, request.length // self.limits.block_size - have)
        request.host_blocks.extend(cold)
        return cold

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the queue, before all younger ones; its KV is computed again, or found again."""
        self._running.remove(request)
        self._vacate(request)
        self._let_go(request)
        request.phase = Phase.WAITING
        self._waiting.insert(sum(1 for _ in takewhile(lambda other: other.id < request.id, self._waiting)), request)
        self.preemptions += 1

    def _vacate(self, request: Request) -> None:
        assert request.row is not None
        del self._by_row[request.row]
        self._rows.append(request.row)
        request.row = None

    def _let_go(self, request: Request) -> None:
        self._depart(request)
        request.meets, request.meeting = 0, None
        self.ledger.release(request.blocks)
        self.host.release(request.host_blocks)
        request.blocks, request.host_blocks = [], []
        request.computed = request.sealed = request.shown = request.tabled = request.host_tabled = 0
        request.paged = request.near = 0

    def forget(self) -> int:
        """Drop all cached KV, on the device and beyond. Returns how many blocks were given up."""
        return self.tiers.forget() + self.ledger.forget() + self.host.forget()

    def recover(self, landed: Sequence[Landed] = ()) -> None:
        """After a step cut short, perhaps while it was planned, and when nothing is under way any more: only KV that committed steps have
        written to the host is trusted, and all requests start anew in order of arrival. landed: the last of what was under way."""
        self.tiers.reset(landed)
        self.ledger.reset()
        self.host.vacate()
        self._arriving.clear()
        self._orders, self._leaving = [], []
        self._running, self._by_row = [], {}
        self._rows = [Row(row) for row in reversed(range(self.limits.max_sequences))]
        self._waiting = deque(self._requests.values())
        for request in self._waiting:
            request.phase, request.row, request.blocks, request.host_blocks = Phase.WAITING, None, [], []
            request.computed = request.sealed = request.shown = request.tabled = request.host_tabled = 0
            request.paged = request.near = request.meets = 0
            request.arriving = request.meeting = None

    # -- commit --------------------------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, outcome: Outcome) -> list[Event]:
        """Take in what the step yielded: new tokens, and requests that end with them; and what has come from other tiers."""
        events = []
        for transfer, names, right in self.tiers.landed(outcome.landed):
            self._arrived(transfer, names, right)
        self.tiers.rates.stepped(plan.tokens, outcome.seconds, any(share.sample for share in plan.shares))
        self.ledger.release(self._leaving)
        self._orders, self._leaving = [], []
        for share, result in zip(plan.shares, outcome.results, strict=True):
            request = self._by_row[share.row]
            if request.long:
                self._seal_cold(request)
            elif self.prefixes.share:
                for index in range(share.start // self.limits.block_size, share.stop // self.limits.block_size):
                    parent = self._key(request, index - 1) if index else None
                    self.tiers.computed(request.blocks[index], self._key(request, index), parent)
            # After a preemption the prompt is computed again, but nobody wants its log-probabilities twice.
            if fresh := result.prompt_logprobs[max(0, request.scored - share.start) :]:
                request.scored = share.start + len(result.prompt_logprobs)
                events.append(Event(request.id, prompt_logprobs=fresh))
            if not share.sample:
                continue
            assert result.token is not None, f"request {request.id} was to sample and did not"
            request.tokens.append(result.token)
            finish = self._finish_of(request, result.token)
            events.append(
                Event(
                    request.id,
                    result.token,
                    result.logprob,
                    finish=finish,
                    cached=request.cached or 0,
                    cached_host=max(0, min(request.from_host, request.cached or 0) - request.from_disk),
                    cached_disk=min(request.from_disk, request.cached or 0),
                )
            )
            if finish is not None:
                self._running.remove(request)
                self._end(request, finish)
            elif not request.long and self._becomes_long(request, request.length + _EARLY):
                request.long, request.shown, request.sealed = True, request.sealed, 0
                request.near = len(request.blocks) if self.limits.near is None else min(len(request.blocks), self.limits.near)
        if self._check:
            self.check()
        return events

    def _arrived(self, transfer: Transfer, names: Sequence[Name], right: int) -> None:
        """The first `right` blocks of a transfer have come: to the host, where who waits will find them, or to pages, which are its own."""
        request = self._arriving.pop(transfer.id, None)
        size, pages = self.limits.block_size, transfer.pages[:right]
        for page, name in zip(pages, names, strict=False):
            self.ledger.seal(page, *name)
        if request is None:
            self.ledger.release(pages)
            return
        request.arriving = None
        if transfer.route is Route.IN:
            request.patient = right == len(names)
            if request.cached is None:
                request.from_disk += right * size
            return
        request.blocks.extend(pages)
        request.computed += right * size
        request.sealed = len(request.blocks)
        if request.cached is None:
            request.from_host += right * size
        elif request.meeting is not None:
            self._met(request, right * size)

    def _met(self, request: Request, tokens: int) -> None:
        """So many tokens that came from the disk while those before them were computed need not be."""
        request.meeting = None
        assert request.cached is not None
        request.cached += tokens
        request.from_host += tokens
        request.from_disk += tokens
        self.tiers.counts.found_disk += tokens

    def _seal_cold(self, request: Request) -> None:
        """Its host blocks have been written: from now on others find them."""
        if self.prefixes.share:
            for index in range(request.sealed, len(request.host_blocks)):
                name = self._key(request, index), self._key(request, index - 1) if index else None
                self.host.seal(request.host_blocks[index], *name)
                self.tiers.sealed_on_host(request.host_blocks[index], *name)
        request.sealed = len(request.host_blocks)

    def _finish_of(self, request: Request, token: int) -> FinishReason | None:
        if token in request.sampling.end_tokens and request.output_length >= request.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if request.output_length >= request.max_tokens else None

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.row is not None:
            self._vacate(request)
        self._let_go(request)
        request.phase, request.finish = Phase.FINISHED, reason
        del self._requests[request.id]

    def check(self) -> None:
        """Prove that blocks, rows and phases agree. Raises AssertionError with what is wrong."""
        size = self.limits.block_size
        moving_pages, moving_blocks = self.tiers.held()
        self.ledger.check([*(request.blocks for request in self._requests.values()), self._leaving, *moving_pages])
        self.host.check([*(request.host_blocks for request in self._requests.values()), *moving_blocks])
        assert len(self._running) + len(self._waiting) == len(self._requests), "a request is neither running nor waiting"
        assert sorted([*self._rows, *self._by_row]) == list(range(self.limits.max_sequences)), "a row is lost or given twice"
        for queue in (self._running, self._waiting):
            assert all(older.id < younger.id for older, younger in pairwise(queue)), "a queue is not in order of arrival"
        for request in self._running:
            owner = None if request.row is None else self._by_row[request.row]
            assert owner is request, f"request {request.id} does not own its row"
            assert request.computed <= request.length, f"request {request.id} is computed beyond its end"
            blocks = max(len(request.host_blocks), request.paged + len(request.blocks))
            assert blocks * size >= request.computed, f"request {request.id} lacks blocks for its KV"
            assert request.paged <= len(request.host_blocks), f"request {request.id} has a gap between host blocks and pages"
            reached = request.paged + len(request.blocks) >= len(request.host_blocks) or not request.blocks
            assert reached, f"request {request.id} has pages that end before its host blocks"
            assert len(request.host_blocks) * size <= request.computed, f"request {request.id} has host blocks beyond its KV"
            assert request.long or not request.host_blocks, f"request {request.id} is short and has host blocks"
        for request in self._waiting:
            holds = request.row is not None or request.blocks or request.host_blocks or request.computed
            assert not holds, f"waiting request {request.id} holds something"

    def _check_plan(self, plan: Plan) -> None:
        """Prove of what a step writes to the host, and of what it reads there, that it is its own or final. Raises AssertionError."""
        size = self.limits.block_size
        sources = {order.target: order.source for order in plan.orders}
        assert len(sources) == len(plan.orders), "two orders go to one block"
        written: set[HostBlockId] = set()
        for share in plan.shares:
            request = self._by_row[share.row]
            name, blocks = f"request {request.id}", request.host_blocks
            assert share.cold_stop == len(blocks) * size == request.host_tabled * size, f"{name} has a wrong table of host blocks"
            assert request.tabled == request.paged + len(request.blocks) == -(-share.stop // size), f"{name} has a wrong block table"
            assert share.near == request.paged * size <= share.cold_stop, f"{name} has a gap before its pages"
            assert share.cold_start == min(share.near, share.start), f"{name} reads what is neither on the host nor in pages"
            assert share.cold_start % size == 0, f"{name} has part of a block on the host"
            assert share.cold_stop <= share.start or share.start % size == 0, f"{name} writes part of a block to the host"
            assert len(share.tokens) > 1 or share.cold_stop <= share.start, f"{name} decodes into a host block"
            for index in range(request.sealed, len(blocks)):
                assert self.host.is_private(blocks[index]), f"{name} writes a host block that others read"
                assert blocks[index] not in written, f"{name} writes a host block that another writes"
                ordered = sources.pop(blocks[index], None) is not None
                assert ordered == (index * size < share.start), f"{name} reads a host block before it is written, or writes it twice"
                written.add(blocks[index])
            pages = request.blocks[max(0, share.start // size - request.paged) :]
            assert not {order.source for order in plan.orders}.intersection(pages), f"{name} writes a page that is copied to the host"
        assert not sources, "an order of nobody's block"
