"""Small worlds for the scheduler's tests: a worker whose KV memory holds plain facts, and a referee who knows
what must come out.

The worker believes nothing but the Plan. The referee believes nothing but what was submitted: it knows every
request's output beforehand, and from the rows it names in Plans which request ran, waited, was preempted or
came back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.keys import block_keys, root_key
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler
from penstock.step.params import Sampling
from penstock.step.plan import Outcome, Plan, RequestId, Result, Row, Share, ShareKind, TokenLogprob
from penstock.step.request import FinishReason

ROOT = root_key(b"a small world")
ALPHABET = 3
END = 2


def sampling(
    seed: int = 0, *, end: Iterable[int] = (), min_tokens: int = 0, prompt_logprobs: int | None = None
) -> Sampling:
    """Greedy settings; the seed tells requests apart, and its lowest bit changes what the worlds' sampler
    chooses."""
    return Sampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias=(),
        seed=seed,
        end_tokens=frozenset(end),
        min_tokens=min_tokens,
        logprobs=None,
        prompt_logprobs=prompt_logprobs,
    )


def facts_of(tokens: Sequence[int], start: int) -> list[int]:
    """What the KV at each position of `tokens` must be: all tokens up to it, after `start`, the fact about
    the rope."""
    facts, fact = [], start
    for token in tokens:
        fact = hash((fact, token))
        facts.append(fact)
    return facts


def chosen(fact: int, seed: int) -> int:
    """The token sampled after a position whose KV is `fact`."""
    return hash((fact, seed & 1)) % ALPHABET


@dataclass
class Table:
    """A row as the worker knows it: tokens, the facts their KV must hold, and the blocks that hold them."""

    sampling: Sampling
    prompt_length: int
    tokens: list[int]
    start_fact: int
    blocks: list[int] = field(default_factory=list)
    known_facts: list[int] = field(default_factory=list)

    def facts(self, stop: int) -> list[int]:
        """Of the positions below `stop`. Tokens are only ever appended, so each is computed once."""
        done = len(self.known_facts)
        if done < stop:
            self.known_facts += facts_of(
                self.tokens[done:stop], self.known_facts[-1] if done else self.start_fact
            )
        return self.known_facts[:stop]


class Worker:
    """Runs Plans over a KV memory of facts. In a step all shares write, then all read, as they do in each
    layer of a model."""

    def __init__(self, blocks: int, block_size: int, rope_from: int | None) -> None:
        self.block_size = block_size
        self.rope_from = rope_from
        self.memory: list[int | None] = [None] * (blocks * block_size)
        self.rows: dict[Row, Table] = {}

    def start_fact(self, prompt_length: int) -> int:
        dynamic = self.rope_from is not None and prompt_length > self.rope_from
        return prompt_length if dynamic else 0

    def run(self, plan: Plan) -> Outcome:
        for admission in plan.admissions:
            tokens = [*admission.prompt, *admission.output]
            length = len(admission.prompt)
            self.rows[admission.row] = Table(admission.sampling, length, tokens, self.start_fact(length))
        written: set[int] = set()
        for share in plan.shares:
            slots = self._write(share)
            assert written.isdisjoint(slots), (
                f"row {share.row} writes where another row writes in the same step"
            )
            written.update(slots)
        for share in plan.shares:
            self.verify(share.row, share.stop)
        return Outcome(tuple(self._result(share) for share in plan.shares))

    def spoil(self, plan: Plan) -> None:
        for block in (block for share in plan.shares for block in share.new_blocks):
            first = block * self.block_size
            self.memory[first : first + self.block_size] = [None] * self.block_size

    def _write(self, share: Share) -> list[int]:
        table = self.rows[share.row]
        assert share.tokens, "a share without tokens"
        assert share.prompt_length == table.prompt_length
        assert list(share.tokens) == table.tokens[share.start : share.stop], (
            "the share's tokens are not the row's"
        )
        assert share.sample == (share.stop == len(table.tokens)), "sampled before the end, or not at it"
        assert share.first_new_block == len(table.blocks), "the block table has a gap or is overwritten"
        table.blocks.extend(share.new_blocks)
        assert len(table.blocks) == -(-share.stop // self.block_size), (
            "too few blocks for the share, or more than it needs"
        )
        facts = table.facts(share.stop)
        slots = [self._slot(table, position) for position in range(share.start, share.stop)]
        for position, slot in enumerate(slots, share.start):
            self.memory[slot] = facts[position]
        return slots

    def _slot(self, table: Table, position: int) -> int:
        index, offset = divmod(position, self.block_size)
        return table.blocks[index] * self.block_size + offset

    def verify(self, row: Row, stop: int) -> None:
        """Every position below `stop` reads as the row's own tokens."""
        table, size, read = self.rows[row], self.block_size, list[int | None]()
        for block in table.blocks[: -(-stop // size)]:
            read += self.memory[block * size : (block + 1) * size]
        assert read[:stop] == table.facts(stop), f"row {row} reads KV that is not its own prefix"

    def _result(self, share: Share) -> Result:
        table = self.rows[share.row]
        scored = enumerate(share.next_prompt_tokens, share.start + 1)
        logprobs = tuple(TokenLogprob(token, -float(position), 1, ()) for position, token in scored)
        if not share.sample:
            return Result(prompt_logprobs=logprobs)
        fact = self.memory[self._slot(table, share.stop - 1)]
        assert fact is not None
        token = chosen(fact, table.sampling.seed)
        table.tokens.append(token)
        return Result((token,), (TokenLogprob(token, -1.0, 1, ()),), logprobs)


@dataclass
class Known:
    """A request as the referee knows it."""

    id: RequestId
    prompt: list[int]
    sampling: Sampling
    expected: list[int]
    reason: FinishReason
    output: list[int] = field(default_factory=list)
    scored: list[TokenLogprob] = field(default_factory=list)
    row: Row | None = None
    computed: int = 0
    """Positions covered by the shares since the last admission."""
    covered: set[int] = field(default_factory=set)
    """Positions of its prompt that a share has computed."""
    admissions: int = 0
    finish: FinishReason | None = None
    priority: int = 0

    @property
    def cached(self) -> int:
        return len(self.prompt) - len(self.covered)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def lacks(self) -> int:
        return self.length - self.computed


class World:
    """A scheduler, a worker and a referee. Everything goes through here, and every step is judged."""

    def __init__(
        self,
        *,
        blocks: int = 5,
        block_size: int = 4,
        max_step_tokens: int = 16,
        max_sequences: int = 4,
        max_length: int = 1000,
        share: bool = True,
        rope_from: int | None = None,
    ) -> None:
        self.ledger = BlockLedger(blocks)
        self.limits = SchedulerLimits(block_size, max_step_tokens, max_sequences, max_length)
        self.rule = PrefixRule(ROOT, share, rope_from)
        self.scheduler = Scheduler(self.ledger, self.limits, self.rule, check=True)
        self.worker = Worker(blocks, block_size, rope_from)
        self.live: dict[RequestId, Known] = {}
        """In order of arrival."""
        self.ended: list[Known] = []
        self.steps = 0

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = None,
        *,
        end: Iterable[int] = (),
        min_tokens: int = 0,
        prompt_logprobs: int | None = None,
        parity: int = 0,
        priority: int = 0,
    ) -> RequestId:
        """Queue a request; those with equal settings and equal `parity` give equal outputs."""
        seed = 2 * (len(self.live) + len(self.ended)) + parity
        wanted = sampling(seed, end=end, min_tokens=min_tokens, prompt_logprobs=prompt_logprobs)
        id = self.scheduler.submit(prompt, wanted, max_tokens, priority)
        room = self.scheduler.longest - len(prompt)
        expected, reason = self._foretell(list(prompt), wanted, room if max_tokens is None else max_tokens)
        self.live[id] = Known(id, list(prompt), wanted, expected, reason, priority=priority)
        return id

    def _foretell(
        self, prompt: list[int], wanted: Sampling, max_tokens: int
    ) -> tuple[list[int], FinishReason]:
        """The request's output when it runs alone."""
        fact = facts_of(prompt, self.worker.start_fact(len(prompt)))[-1]
        output: list[int] = []
        while True:
            token = chosen(fact, wanted.seed)
            output.append(token)
            if token in wanted.end_tokens and len(output) >= wanted.min_tokens:
                return output, FinishReason.STOP
            if len(output) == max_tokens:
                return output, FinishReason.LENGTH
            fact = facts_of([token], fact)[0]

    def stop(self, id: RequestId) -> None:
        assert self.scheduler.stop(id)
        self._ends(id, FinishReason.ABORT)
        assert not self.scheduler.stop(id), "stopped twice"

    def _ends(self, id: RequestId, reason: FinishReason) -> None:
        known = self.live.pop(id)
        known.finish, known.row = reason, None
        self.ended.append(known)

    def turns(self) -> list[Known]:
        """In the order in which they are to be served."""
        return sorted(self.live.values(), key=lambda known: (known.priority, known.id))

    def running(self) -> list[Known]:
        """In this order too. Whose turn comes first is admitted first, and whose turn is last is preempted:
        `_judge` proves it in each step."""
        return [known for known in self.turns() if known.row is not None]

    def waiting(self) -> list[Known]:
        return [known for known in self.turns() if known.row is None]

    def step(self) -> Plan:
        """One step: plan, judge the plan, run it, commit it, judge what came of it."""
        before = self.running()
        plan = self.scheduler.plan()
        self._judge(plan, before)
        outcome = self.worker.run(plan)
        for share in plan.shares:
            self._of(share.row).computed = share.stop
        for known in self.running():
            assert known.row is not None
            self.worker.verify(known.row, known.computed)
        self._commit(plan, outcome)
        self.steps += 1
        return plan

    def interrupt(self) -> Plan:
        """A step of which the worker did nothing but spoil the blocks it was to write."""
        before = self.running()
        plan = self.scheduler.plan()
        self._judge(plan, before)
        self.worker.spoil(plan)
        self.recover()
        return plan

    def recover(self) -> None:
        self.scheduler.recover()
        self.scheduler.check()
        for known in self.live.values():
            known.row, known.computed = None, 0
        assert self.scheduler.running == self.ledger.cached == 0

    def drain(self) -> None:
        """Runs until nobody is left, and everything has been given back."""
        bound = self.steps + sum(len(known.prompt) + len(known.expected) for known in self.live.values())
        while self.live:
            assert self.steps < bound, "more steps than tokens"
            self.step()
        assert not self.scheduler.busy
        assert self.scheduler.plan() == Plan((), ())
        self.ledger.check([])
        assert self.ledger.available == self.ledger.blocks

    def _of(self, row: Row) -> Known:
        (known,) = (known for known in self.live.values() if known.row == row)
        return known

    def _judge(self, plan: Plan, before: list[Known]) -> None:
        """Who runs, in which order, with how many tokens. Keeps the referee's rows in step."""
        admitted = len(plan.admissions)
        survivors = before[: self.scheduler.running - admitted]
        assert self.scheduler.running - admitted <= len(before), "more run than were admitted"
        assert len(survivors) >= min(1, len(before)), "the first was preempted"
        assert not admitted or len(survivors) == len(before), (
            "someone was admitted when someone else had to go"
        )
        newcomers = self.waiting()[:admitted]
        for known in before[len(survivors) :]:
            known.row, known.computed = None, 0
        assert [a.sampling.seed for a in plan.admissions] == [known.sampling.seed for known in newcomers], (
            "somebody was overtaken"
        )
        for admission, known in zip(plan.admissions, newcomers, strict=True):
            assert list(admission.prompt) == known.prompt
            assert list(admission.output) == known.output
            known.row = admission.row
            known.admissions += 1
        rows = [known.row for known in self.running()]
        assert len(set(rows)) == len(rows), "a row has two owners"
        assert all(row is not None and 0 <= row < self.limits.max_sequences for row in rows)
        self._judge_shares(plan, survivors, newcomers)

    def _judge_shares(self, plan: Plan, survivors: list[Known], newcomers: list[Known]) -> None:
        shares = {share.row: share for share in plan.shares}
        assert len(shares) == len(plan.shares), "a row has two shares"
        for share in plan.shares:
            known = self._of(share.row)
            known.covered.update(range(share.start, min(share.stop, len(known.prompt))))
        assert sum(len(share.tokens) for share in plan.shares) == plan.tokens <= self.limits.max_step_tokens
        many = [share.kind is not ShareKind.DECODE for share in plan.shares]
        assert many == [len(share.tokens) > 1 for share in plan.shares], "a share of another kind"
        assert many == sorted(many), "a share of one token stands behind a longer one"
        if self.live:
            assert self.running()[0].row in shares, "the first has to wait"
        for known in survivors:
            assert known.lacks > 1 or known.row in shares, "a request that has caught up was held up"
        late = [known for known in survivors if known.lacks > 1]
        unserved = False
        for known in [*late, *newcomers]:
            assert known.row is not None
            share = shares.pop(known.row, None)
            finishes = share is not None and share.stop == known.length
            assert share is None or finishes or not unserved, (
                "a younger one begins a long prompt before an older one has ended its own"
            )
            unserved = unserved or share is None or share.stop < known.length
            assert share is not None or known in late, "admitted without work"
            if share is not None:
                self._judge_start(known, share)
        # What was left to those in the queue they may have found computed.
        least = (
            self.limits.max_step_tokens
            if not (newcomers or self.waiting())
            else self.limits.max_step_tokens / 2
        )
        assert not unserved or plan.tokens >= least or len(survivors) + len(newcomers) == 0, (
            "tokens left over"
        )
        for known in survivors:
            if known.row in shares:
                share = shares.pop(known.row)
                assert (share.start, len(share.tokens)) == (known.computed, 1)
        assert not shares, "a share for a row that nobody has"

    def _judge_start(self, known: Known, share: Share) -> None:
        """A share starts where the computed part ends, or later by full blocks that are known; it must not
        skip too few."""
        size = self.limits.block_size
        may_share = self.rule.share and known.sampling.prompt_logprobs is None
        if share.start != known.computed:
            assert may_share
            assert known.computed < share.start
            assert share.start % size == known.computed % size == 0
        index, offset = divmod(share.start, size)
        if (
            may_share
            and not offset
            and share.start + size <= share.stop
            and share.start + size < known.length
        ):
            found = self.ledger.find(self.key(known, index))
            assert found == share.new_blocks[index - share.first_new_block], "a known block is computed again"

    def key(self, known: Known, index: int) -> bytes:
        """The key of a request's full block, derived from its start."""
        size, tokens = self.limits.block_size, [*known.prompt, *known.output]
        key = self.rule.root_of(len(known.prompt))
        for at in range(0, (index + 1) * size, size):
            (key,) = block_keys(key, tokens[at : at + size], size)
        return key

    def _commit(self, plan: Plan, outcome: Outcome) -> None:
        running = {share.row: self._of(share.row) for share in plan.shares}
        events = self.scheduler.commit(plan, outcome)
        tokens = [event.request for event in events if event.token is not None]
        assert tokens == [running[share.row].id for share in plan.shares if share.sample], (
            "a token was lost or made up"
        )
        for event in events:
            known = self.live[event.request]
            known.scored.extend(event.prompt_logprobs)
            if event.token is None:
                assert event.finish is None
                continue
            assert event.logprob is not None
            assert event.logprob.token == event.token
            assert event.cached == known.cached, "cached tokens are counted wrongly"
            known.output.append(event.token)
            assert known.output == known.expected[: len(known.output)], "the output depends on what else ran"
            assert (event.finish is not None) == (len(known.output) == len(known.expected)), (
                "ended too early or too late"
            )
            if event.finish is not None:
                assert event.finish is known.reason
                self._ends(known.id, event.finish)
        for known in running.values():
            self._judge_scores(known)

    def _judge_scores(self, known: Known) -> None:
        """Prompt log-probabilities come once, in order, and completely before the first token."""
        positions = [int(-score.logprob) for score in known.scored]
        assert positions == list(range(1, len(positions) + 1)), (
            "prompt log-probabilities are missing, doubled or out of order"
        )
        assert [score.token for score in known.scored] == known.prompt[1 : len(positions) + 1]
        if known.sampling.prompt_logprobs is None:
            assert not positions
        elif known.output:
            assert len(positions) == len(known.prompt) - 1
