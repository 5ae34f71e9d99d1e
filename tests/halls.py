"""Halls for the scheduler's tests: a scheduler with host blocks, a worker who does as told and always has to
find the KV it reads, and a referee.

A hall has eight device blocks of four tokens, twenty host blocks, sixteen tokens a step and four rows, unless
a test says otherwise; a request of twenty tokens is long.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.host import HostLedger
from penstock.sched.proofs import prove_plan
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler
from penstock.sched.speculation import Speculation
from penstock.sched.storage import Storage
from penstock.sched.tiers import Store
from penstock.step.params import Sampling
from penstock.step.plan import (
    UNKNOWN,
    BlockId,
    HostBlockId,
    Landed,
    Outcome,
    Plan,
    RequestId,
    Result,
    Route,
    Row,
    Share,
    Transfer,
    TransferId,
)
from penstock.step.request import FinishReason
from worlds import ROOT, chosen, facts_of, sampling

TEN = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
Facts = list[int | None]


@dataclass
class Table:
    """A row as the worker knows it: tokens, what their KV must be, and where it is told that the KV rests."""

    sampling: Sampling
    prompt_length: int
    tokens: list[int]
    start_fact: int
    pages: dict[int, BlockId] = field(default_factory=dict)
    cold: list[HostBlockId] = field(default_factory=list)
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
    """Keeps a fact for every position of every page and host block. A step: orders, then pages are written,
    then all is read, then the host is written, as late as may be."""

    def __init__(self, blocks: int, host_blocks: int, size: int, rope_from: int | None) -> None:
        self.size = size
        self.rope_from = rope_from
        self.pages: list[Facts] = [[None] * size for _ in range(blocks)]
        self.host: list[Facts] = [[None] * size for _ in range(host_blocks)]
        self.rows: dict[Row, Table] = {}
        self.near = 0
        """Blocks on the host that need not have come from there, for rows of one token."""
        self.chance = random.Random(size)
        self.going: dict[TransferId, Transfer] = {}
        self.landed: Counter[Route] = Counter()
        self.disk: dict[bytes, Facts] = {}
        self.lossy = False
        self.seconds = 1e-3
        """That a block takes to another tier; a token takes ten milliseconds."""

    def start_fact(self, prompt_length: int) -> int:
        return prompt_length if self.rope_from is not None and prompt_length > self.rope_from else 0

    def run(self, plan: Plan) -> Outcome:
        for admission in plan.admissions:
            length = len(admission.prompt)
            tokens = [*admission.prompt, *admission.output]
            self.rows[admission.row] = Table(admission.sampling, length, tokens, self.start_fact(length))
        for share in plan.shares:
            self._extend(share)
        for order in plan.orders:
            self.host[order.target] = list(self.pages[order.source])
        written = self._write_pages(plan)
        sources, targets = {order.source for order in plan.orders}, {order.target for order in plan.orders}
        assert len(targets) == len(plan.orders), "two orders have the same end"
        assert written.isdisjoint(sources), "a page that leaves is written"
        read: set[HostBlockId] = set()
        for share in plan.shares:
            self.verify(share)
            table = self.rows[share.row]
            own = targets.intersection(table.cold)
            read.update(set(table.cold[: share.cold_start // self.size]) - own)
            targets -= own
        assert not targets, "an order that brings a block to nobody"
        self._write_host(plan, read | {order.target for order in plan.orders})
        for key in plan.forget:
            self.disk.pop(key, None)
        self.going |= {transfer.id: transfer for transfer in plan.transfers}
        results = tuple(self._result(share) for share in plan.shares)
        return Outcome(results, tuple(self._land(waits=not plan.shares)), 0.01 * plan.tokens)

    def _land(self, waits: bool) -> Iterator[Landed]:
        """Some of what is under way has arrived by now, and reads what it reads as late as that; at least
        one, if somebody waits for it."""
        for id in [id for id in self.going if self.chance.random() < 0.4] or list(self.going)[: int(waits)]:
            transfer = self.going.pop(id)
            self.landed[transfer.route] += 1
            lost = [
                index for index in range(len(transfer.blocks)) if self.lossy and self.chance.random() < 0.1
            ]
            for index, block in enumerate(transfer.blocks):
                if transfer.route is Route.UP:
                    self.pages[transfer.pages[index]] = (
                        list(self.host[block]) if index not in lost else [None] * self.size
                    )
                elif transfer.route is Route.DOWN:
                    self.host[block] = (
                        list(self.pages[transfer.pages[index]]) if index not in lost else [None] * self.size
                    )
                elif transfer.route is Route.OUT and index not in lost:
                    self.disk[transfer.keys[index]] = list(self.host[block])
                elif transfer.route is Route.IN:
                    found = self.disk.get(transfer.keys[index])
                    lost += [index] if found is None and index not in lost else []
                    self.host[block] = (
                        list(found) if found is not None and index not in lost else [None] * self.size
                    )
            yield Landed(id, self.seconds * len(transfer.blocks), tuple(sorted(lost)), self.gone(transfer))

    def gone(self, transfer: Transfer) -> tuple[bytes, ...]:
        return tuple(key for key in transfer.keys if transfer.route is Route.IN and key not in self.disk)

    def spoil(self, plan: Plan) -> list[Landed]:
        """All that the step was to write is rubbish, and what was under way has ended."""
        self.going |= {transfer.id: transfer for transfer in plan.transfers}
        reports = list[Landed]()
        while self.going:
            reports += self._land(waits=True)
        return self._spoil(plan, reports)

    def _spoil(self, plan: Plan, reports: list[Landed]) -> list[Landed]:
        for share in plan.shares:
            for page in share.new_blocks:
                self.pages[page] = [None] * self.size
            for index, block in enumerate(share.new_cold, share.first_new_cold):
                if index * self.size >= share.start:
                    self.host[block] = [None] * self.size
        for order in plan.orders:
            self.host[order.target] = [None] * self.size
        return reports

    def _extend(self, share: Share) -> None:
        table, size = self.rows[share.row], self.size
        assert share.tokens, "a share without tokens"
        assert share.prompt_length == table.prompt_length
        known = table.tokens[share.start : share.stop]
        assert len(known) == len(share.tokens), "a share goes beyond what its row has"
        assert share.tokens in (tuple(known), (UNKNOWN,)), "the share's tokens are not the row's"
        assert share.sample == (share.stop == len(table.tokens)), "sampled before the end, or not at it"
        assert share.first_new_cold == len(table.cold), "the table of host blocks has a gap or is overwritten"
        table.cold.extend(share.new_cold)
        assert len(table.cold) * size == share.cold_stop, (
            "the table of host blocks does not end with what rests there"
        )
        assert 0 <= share.cold_start <= min(share.start, share.cold_stop)
        assert share.cold_start % size == share.cold_stop % size == 0
        for index, page in enumerate(share.new_blocks, share.first_new_block):
            assert index * size >= share.near, "a page for what is on the host alone"
            table.pages[index] = page
        assert max(table.pages, default=0) <= (share.stop - 1) // size, "a page beyond the share's end"
        if share.cold_stop > share.start:
            assert len(share.tokens) > 1, "a row of one token writes to the host"
            assert share.start % size == 0, "a chunk that starts in a tail"
            assert share.cold_stop > share.stop - size, "a full block of a chunk is left on the device"
        assert share.cold_start == min(share.start, share.near), (
            "what is near is read from the host, or what is not is not"
        )
        assert share.near <= share.cold_stop, "a gap between what is on the host and what is near"

    def _write_pages(self, plan: Plan) -> set[BlockId]:
        written: set[tuple[BlockId, int]] = set()
        for share in plan.shares:
            table = self.rows[share.row]
            facts = table.facts(share.stop)
            for position in range(max(share.start, share.near), share.stop):
                page, offset = table.pages[position // self.size], position % self.size
                assert (page, offset) not in written, "two rows write to the same place"
                written.add((page, offset))
                self.pages[page][offset] = facts[position]
        return {page for page, _ in written}

    def verify(self, share: Share) -> None:
        """What a share reads: the host's blocks, then pages, then for what goes to the host alone what is in
        hand."""
        table, size = self.rows[share.row], self.size
        read: Facts = [fact for block in table.cold[: share.cold_start // size] for fact in self.host[block]]
        facts = table.facts(share.stop)
        first = share.start if share.near > share.start else share.stop
        read += [self.pages[table.pages[at // size]][at % size] for at in range(share.cold_start, first)]
        read += facts[first : share.near]
        read += [
            self.pages[table.pages[at // size]][at % size] for at in range(max(first, share.near), share.stop)
        ]
        assert read == facts, f"row {share.row} reads KV that is not its own prefix"
        self.near += max(0, share.cold_stop - share.near) // size if len(share.tokens) == 1 else 0

    def _write_host(self, plan: Plan, taken: set[HostBlockId]) -> None:
        for share in plan.shares:
            table = self.rows[share.row]
            facts = table.facts(share.stop)
            for index in range(share.start // self.size, share.cold_stop // self.size):
                block = table.cold[index]
                assert block not in taken, (
                    "a host block is written that someone else reads or writes in the same step"
                )
                taken.add(block)
                self.host[block] = list(facts[index * self.size : (index + 1) * self.size])

    def _result(self, share: Share) -> Result:
        if not share.sample:
            return Result()
        table = self.rows[share.row]
        token = chosen(table.facts(len(table.tokens))[-1], table.sampling.seed)
        table.tokens.append(token)
        return Result((token,))


@dataclass
class Known:
    """A request as the referee knows it."""

    id: RequestId
    prompt: list[int]
    expected: list[int]
    reason: FinishReason
    output: list[int] = field(default_factory=list)
    cached: int = 0
    computed: set[int] = field(default_factory=set)
    """Positions of its prompt that a share has computed."""


LIMITS: dict[str, Any] = {
    "block_size": 4,
    "max_step_tokens": 16,
    "max_sequences": 4,
    "max_length": 1000,
    "long_from": 20,
    "recent": 1,
    "near": 0,
}
"""Limits of a hall that names no others."""


class Hall:
    """A scheduler with host blocks, the worker and a referee who knows every request's output beforehand."""

    speculation: Speculation | None = None

    def __init__(
        self,
        *,
        blocks: int = 8,
        host_blocks: int = 20,
        store: Store = "off",
        disk: int = 0,
        share: bool = True,
        rope_from: int | None = None,
        ahead: bool = False,
        alike: bool = True,
        **limits: Any,
    ) -> None:
        """Begin without requests.

        ahead: whether a step begins before the last is committed.
        alike: whether blocks on the host have the bytes of those in pages.
        limits: fields of `SchedulerLimits`, beside those of LIMITS.
        """
        self.ahead, self.flight = ahead, cast(tuple[Plan, Outcome] | None, None)
        self.ledger, self.host = BlockLedger(blocks), HostLedger(host_blocks)
        self.limits = SchedulerLimits(**{**LIMITS, **limits})
        self.scheduler = Scheduler(
            self.ledger,
            self.limits,
            PrefixRule(ROOT, share, rope_from),
            Storage(self.host, DiskLedger(disk) if disk else None, store, alike),
            speculation=self.speculation,
            check=True,
        )
        self.worker = Worker(blocks, host_blocks, self.limits.block_size, rope_from)
        self.live: dict[RequestId, Known] = {}
        self.ended: list[Known] = []
        self.demoted = self.ran_ahead = 0

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = None,
        *,
        end: Iterable[int] = (),
        scored: bool = False,
        priority: int = 0,
    ) -> RequestId:
        wanted = sampling(end=end, prompt_logprobs=0 if scored else None)
        id = self.scheduler.submit(prompt, wanted, max_tokens, priority)
        most = self.scheduler.longest - len(prompt) if max_tokens is None else max_tokens
        fact = facts_of(prompt, self.worker.start_fact(len(prompt)))[-1]
        expected: list[int] = []
        while len(expected) < most and not (expected and expected[-1] in wanted.end_tokens):
            expected.append(chosen(fact, wanted.seed))
            fact = facts_of(expected[-1:], fact)[0]
        stopped = expected[-1] in wanted.end_tokens
        self.live[id] = Known(
            id, list(prompt), expected, FinishReason.STOP if stopped else FinishReason.LENGTH
        )
        return id

    def stop(self, id: RequestId) -> None:
        assert self.scheduler.stop(id)
        self.scheduler.check()
        self.ended.append(self.live.pop(id))

    def step(self) -> Plan:
        """Returns the plan that is committed, or has begun if none is."""
        if self.flight is None or self.ahead:
            before = self.scheduler.preemptions
            plan = self.scheduler.plan()
            self._judge(plan, preempted=self.scheduler.preemptions > before)
            begun = plan, self.worker.run(plan)
            if self.ahead and plan.shares:
                self.scheduler.run_ahead(plan)
                self.ran_ahead += any(UNKNOWN in share.tokens for share in plan.shares)
                if self.flight is None:
                    self.flight = begun
                    return plan
                self.flight, begun = begun, self.flight
            elif self.flight is not None:  # Nothing is left to begin before that is known.
                self._take(*self.flight)
                self.flight = None
        else:
            begun, self.flight = self.flight, None
        self._take(*begun)
        return begun[0]

    def _take(self, plan: Plan, outcome: Outcome) -> None:
        for event in self.scheduler.commit(plan, outcome):
            known = self.live[event.request]
            assert event.token is not None
            known.output.append(event.token)
            known.cached = event.cached
            assert event.cached_host + event.cached_disk <= event.cached
            # A plan ahead of this event may compute more of a request that was preempted.
            assert self.ahead or event.cached == len(known.prompt) - len(known.computed), (
                "cached is not computed"
            )
            assert known.output == known.expected[: len(known.output)], "the output depends on what else ran"
            assert (event.finish is not None) == (len(known.output) == len(known.expected)), (
                "ended too early or too late"
            )
            if event.finish is not None:
                assert event.finish is known.reason
                self.ended.append(self.live.pop(known.id))

    def prove(self, plan: Plan) -> None:
        prove_plan(
            plan,
            self.scheduler._queues.by_row,
            self.scheduler._written_ahead(),
            self.host,
            self.limits.block_size,
        )

    def _judge(self, plan: Plan, *, preempted: bool) -> None:
        size, recent = self.limits.block_size, self.limits.recent
        assert bool(self.live) >= bool(plan.shares), "a step for nobody"
        # Who had to go, though nobody else is there, comes back with the next.
        assert (
            bool(plan.shares) or not self.live or self.scheduler.tiers.moving or self.flight or preempted
        ), "an empty step"
        assert plan.tokens <= self.limits.max_step_tokens
        many = [len(share.tokens) > 1 for share in plan.shares]
        assert many == sorted(many), "a share of one token stands behind a longer one"
        assert len({share.row for share in plan.shares}) == len(plan.shares), "a row has two shares"
        self.demoted += len(plan.orders)
        self._note_found(plan)
        for share in plan.shares:
            is_chunk = share.cold_stop > share.start
            if is_chunk and not share.sample:
                assert share.stop % size == 0, "a chunk leaves part of a block before the prompt's end"
            if share.cold_stop and not is_chunk:
                assert (share.start - share.cold_stop) // size <= recent, (
                    "full blocks of the tail stay longer than they should"
                )

    def _note_found(self, plan: Plan) -> None:
        """What a plan computes counts as computed, also if it is not carried out."""
        for share in plan.shares:
            known = self.live[self.scheduler._queues.by_row[share.row].id]
            known.computed.update(range(share.start, min(share.stop, len(known.prompt))))

    def interrupt(self) -> None:
        """What has begun and is not committed may have been carried out in part."""
        if self.flight is not None:
            self.worker.spoil(self.flight[0])
        self.flight = None
        plan = self.scheduler.plan()
        self._note_found(plan)
        self.recover(self.worker.spoil(plan))

    def recover(self, landed: Sequence[Landed] = ()) -> None:
        self.scheduler.recover(landed)
        self.scheduler.check()
        assert self.scheduler.running == self.ledger.cached == 0

    def drain(self) -> None:
        """Runs until nobody is left, and everything has been given back. Whoever is the oldest goes on until
        it ends, so it does end."""
        # Of all that are computed in vain, none is before the oldest that waits has begun.
        left = 50 + 4 * sum(len(known.prompt) + len(known.expected) for known in self.live.values()) * max(
            1, len(self.live)
        )
        while self.live:
            assert left > 0, "it does not come to an end"
            left -= 1
            self.step()
        assert not self.scheduler.busy
        idle = 0
        while self.step() != Plan((), ()) or self.scheduler.tiers.moving or self.scheduler.tiers.ready:
            idle += 1
            assert idle < 500, "it moves for ever"
        self.ledger.check([])
        self.host.check([])
        assert (self.ledger.available, self.host.available) == (self.ledger.blocks, self.host.blocks)
