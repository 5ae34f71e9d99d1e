"""Decides each step: who runs, which tokens are computed, into which blocks, who has to wait. Integers only; it never sees a tensor.

There is no prefill phase. A request has tokens, some of them computed; every step brings it closer to its own length, and when it has
caught up its last position yields one more token.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.base.errors import RequestError
from penstock.kv.keys import block_key, root_key
from penstock.kv.ledger import BlockLedger
from penstock.step.params import Sampling
from penstock.step.plan import Admission, Outcome, Plan, RequestId, Row, Share, TokenLogprob
from penstock.step.request import FinishReason, Phase, Request


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and a request may be at most."""

    block_size: int
    max_step_tokens: int
    max_sequences: int
    max_length: int
    """Tokens of a request, prompt and output together."""


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


class Scheduler:
    """Owns the requests and, through the ledger, the blocks. One thread; `plan` and `commit` alternate."""

    def __init__(self, ledger: BlockLedger, limits: Limits, prefixes: PrefixRule, *, check: bool = False) -> None:
        self.ledger = ledger
        self.limits = limits
        self.prefixes = prefixes
        self._check = check
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        """Sorted by arrival: the last is the first to be preempted."""
        self._requests: dict[RequestId, Request] = {}
        self._by_row: dict[Row, Request] = {}
        self._rows = [Row(row) for row in reversed(range(limits.max_sequences))]
        self._next_id = 0
        self.preemptions = 0

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
        """Most tokens a request may have: the context's end or, if that is less, what all KV blocks hold.

        The last token of an output is never an input, so it needs no place in a block.
        """
        return min(self.limits.max_length, self.ledger.blocks * self.limits.block_size + 1)

    def submit(self, prompt: Sequence[int], sampling: Sampling, max_tokens: int | None = None) -> RequestId:
        """Queue a request. Raises RequestError if it could never be served, before anything is changed."""
        room = self.longest - len(prompt)
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if room < 1 or (max_tokens is not None and max_tokens > room):
            asked = f"{len(prompt)} tokens of prompt" + (f" and {max_tokens} of output" if max_tokens else "")
            what = "the context holds" if self.longest == self.limits.max_length else "the KV blocks hold"
            raise RequestError(f"the request has {asked}, but {what} {self.longest} in all; shorten it, or allow more length or memory")
        request = Request(
            id=RequestId(self._next_id),
            tokens=list(prompt),
            prompt_length=len(prompt),
            max_tokens=room if max_tokens is None else max_tokens,
            sampling=sampling,
            share_prefix=self.prefixes.share and sampling.prompt_logprobs is None,
        )
        self._next_id += 1
        self._requests[request.id] = request
        self._waiting.append(request)
        return request.id

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
        shares: list[Share] = []
        budget, preempted = self._plan_running(shares)
        admissions = [] if preempted else list(self._admit(shares, budget))
        if self._check:
            self.check()
        shares.sort(key=lambda share: len(share.tokens) > 1)
        return Plan(tuple(admissions), tuple(shares))

    def _plan_running(self, shares: list[Share]) -> tuple[int, bool]:
        """Shares for the running, oldest first. Returns the tokens left in the step, and whether anyone had to go.

        Every request that only lacks its newest token gets it, so a long prompt never holds up others: chunks take what is left.
        """
        budget = self.limits.max_step_tokens - sum(request.length - request.computed == 1 for request in self._running)
        before = self.preemptions
        position = 0
        while position < len(self._running):
            request = self._running[position]
            if request.length - request.computed == 1:
                count = 1
            else:
                self._reuse(request)
                count = min(request.length - request.computed, budget)
                budget -= count
            if count:
                # Only requests behind this one are preempted, and they have no share yet.
                while self._lacking(request, count) > self.ledger.available and self._running[-1] is not request:
                    self._preempt(self._running[-1])
                if self._lacking(request, count) > self.ledger.available:
                    self._preempt(request)
                    break
                shares.append(self._share(request, count))
            position += 1
        return budget, self.preemptions > before

    def _admit(self, shares: list[Share], budget: int) -> Iterator[Admission]:
        """Requests from the queue, first come first served, while tokens, rows and blocks for their whole length are there.

        Tokens are left only when all that run have caught up, so of the blocks there are none is promised to a prompt still under way.
        """
        while self._waiting and self._rows and budget > 0:
            request = self._waiting[0]
            found = self._reuse(request)
            lacking = self._lacking(request, request.length - request.computed)
            # Every running request keeps a block in reserve, or the newcomer would be preempted as soon as they grow.
            if lacking + len(self._running) > self.ledger.available:
                self._let_go(request)
                return
            if request.cached is None:
                request.cached = found
            self._waiting.popleft()
            request.phase, request.row = Phase.RUNNING, self._rows.pop()
            self._by_row[request.row] = request
            self._running.append(request)
            prompt, output = request.tokens[: request.prompt_length], request.tokens[request.prompt_length :]
            yield Admission(request.row, request.sampling, tuple(prompt), tuple(output))
            count = min(request.length - request.computed, budget)
            budget -= count
            shares.append(self._share(request, count))

    def _lacking(self, request: Request, count: int) -> int:
        """Blocks that must be allocated before `count` more positions can be computed."""
        return -(-(request.computed + count) // self.limits.block_size) - len(request.blocks)

    def _reuse(self, request: Request) -> int:
        """Skip over full blocks that someone has computed already, or computes in this very step. Returns the tokens skipped.

        The same step is early enough: in every layer, the keys and values of all its tokens are written before any are read.
        The last token is always computed, since its logits are wanted.
        """
        size, skipped = self.limits.block_size, 0
        while request.share_prefix and request.computed == len(request.blocks) * size and request.computed + size < request.length:
            block = self.ledger.find(self._key(request, len(request.blocks)))
            if block is None:
                break
            self.ledger.hold(block)
            request.blocks.append(block)
            request.computed += size
            request.sealed = len(request.blocks)
            skipped += size
        return skipped

    def _key(self, request: Request, index: int) -> bytes:
        """The key of the request's full block `index`, with those before it."""
        size = self.limits.block_size
        while len(request.keys) <= index:
            at = len(request.keys)
            parent = request.keys[-1] if at else self.prefixes.root_of(request.prompt_length)
            request.keys.append(block_key(parent, request.tokens[at * size : (at + 1) * size]))
        return request.keys[index]

    def _share(self, request: Request, count: int) -> Share:
        """Allocate blocks for the next `count` positions, seal those that become full, and describe the work."""
        assert request.row is not None
        start, stop = request.computed, request.computed + count
        request.blocks.extend(self.ledger.allocate(self._lacking(request, count)))
        request.computed = stop
        if self.prefixes.share:
            for index in range(request.sealed, stop // self.limits.block_size):
                self.ledger.seal(request.blocks[index], self._key(request, index))
                request.sealed = index + 1
        following: tuple[int, ...] = ()
        if request.sampling.prompt_logprobs is not None and request.scored < min(stop, request.prompt_length - 1):
            following = tuple(request.tokens[start + 1 : min(stop + 1, request.prompt_length)])
        share = Share(
            row=request.row,
            start=start,
            tokens=tuple(request.tokens[start:stop]),
            first_new_block=request.tabled,
            new_blocks=tuple(request.blocks[request.tabled :]),
            sample=stop == request.length,
            prompt_length=request.prompt_length,
            next_prompt_tokens=following,
        )
        request.tabled = len(request.blocks)
        return share

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the head of the queue; its KV is computed again, or found again."""
        self._running.remove(request)
        self._vacate(request)
        self._let_go(request)
        request.phase = Phase.WAITING
        self._waiting.appendleft(request)
        self.preemptions += 1

    def _vacate(self, request: Request) -> None:
        assert request.row is not None
        del self._by_row[request.row]
        self._rows.append(request.row)
        request.row = None

    def _let_go(self, request: Request) -> None:
        self.ledger.release(request.blocks)
        request.blocks = []
        request.computed = request.sealed = request.tabled = 0

    def recover(self) -> None:
        """After a step cut short, perhaps while it was planned: no KV is trusted, and all requests start anew in order of arrival."""
        self.ledger.reset()
        self._running, self._by_row = [], {}
        self._rows = [Row(row) for row in reversed(range(self.limits.max_sequences))]
        self._waiting = deque(self._requests.values())
        for request in self._waiting:
            request.phase, request.row, request.blocks = Phase.WAITING, None, []
            request.computed = request.sealed = request.tabled = 0

    # -- commit --------------------------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, outcome: Outcome) -> list[Event]:
        """Take in what the step yielded: new tokens, and requests that end with them."""
        events = []
        for share, result in zip(plan.shares, outcome.results, strict=True):
            request = self._by_row[share.row]
            # After a preemption the prompt is computed again, but nobody wants its log-probabilities twice.
            if fresh := result.prompt_logprobs[max(0, request.scored - share.start) :]:
                request.scored = share.start + len(result.prompt_logprobs)
                events.append(Event(request.id, prompt_logprobs=fresh))
            if not share.sample:
                continue
            assert result.token is not None, f"request {request.id} was to sample and did not"
            request.tokens.append(result.token)
            finish = self._finish_of(request, result.token)
            events.append(Event(request.id, result.token, result.logprob, finish=finish, cached=request.cached or 0))
            if finish is not None:
                self._running.remove(request)
                self._end(request, finish)
        if self._check:
            self.check()
        return events

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
        self.ledger.check(request.blocks for request in self._requests.values())
        assert len(self._running) + len(self._waiting) == len(self._requests), "a request is neither running nor waiting"
        assert sorted([*self._rows, *self._by_row]) == list(range(self.limits.max_sequences)), "a row is lost or given twice"
        for request in self._running:
            owner = None if request.row is None else self._by_row[request.row]
            assert owner is request, f"request {request.id} does not own its row"
            assert request.computed <= request.length, f"request {request.id} is computed beyond its end"
            assert len(request.blocks) * self.limits.block_size >= request.computed, f"request {request.id} lacks blocks for its KV"
        for request in self._waiting:
            holds = request.row is not None or request.blocks or request.computed
            assert not holds, f"waiting request {request.id} holds something"
