"""A span of KV: what it holds after growth, truncation and release, in pools of a few blocks of four tokens.
And shares that verify drafts."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.host import HostLedger
from penstock.sched.proofs import prove_plan
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler, Storage
from penstock.sched.span import KVSpan, Pools
from penstock.sched.tiers import Tiers
from penstock.step.plan import Outcome, Plan, Result, Share, ShareKind
from penstock.step.request import FinishReason
from worlds import ROOT, chosen, facts_of, sampling

SIZE = 4
NINE = [0, 1, 2, 0, 1, 2, 0, 1, 2]


def pools(blocks: int = 5, host: int = 0, recent: int = 1) -> Pools:
    limits = SchedulerLimits(SIZE, 16, 4, 1000, recent=recent)
    return Pools(Tiers(BlockLedger(blocks), HostLedger(host)), limits, share=True)


def grown(some: Pools, tokens: list[int], *counts: int, long: bool = False) -> KVSpan:
    """A span that has computed so many of the tokens at a time, and sealed what they fill."""
    span = KVSpan(some, tokens, ROOT)
    if long:
        span.go_long()
        span.mirror_limit = 10
    for count in counts:
        some.end_orders()
        span.grow(count)
        span.seal(len(tokens))
        list(span.seal_host(len(span.host)))
        span.note_tables()
    return span


def check(*spans: KVSpan) -> None:
    """The ledgers agree with what the spans hold, and the spans with themselves."""
    some = spans[0].pools
    some.pages.check([*(span.pages for span in spans), some.leaving])
    some.host.check([span.host for span in spans])
    for span in spans:
        held = max(len(span.host), span.first_page + len(span.pages))
        assert len(span.host) * SIZE <= span.computed <= held * SIZE
        assert span.first_page <= len(span.host)
        assert span.table_length <= span.first_page + len(span.pages)
        assert span.pages_sealed * SIZE <= span.computed


# -- truncate
# ------------------------------------------------------------------------------------------------------------


def test_a_page_that_is_not_full_is_written_again() -> None:
    span = grown(pools(), NINE[:7], 7)
    span.truncate(5)
    assert (span.computed, span.pages, span.pools.pages.available) == (5, [0, 1], 3)
    check(span)


def test_pages_that_begin_behind_are_freed() -> None:
    span = grown(pools(), NINE, 9)
    span.truncate(7)
    assert (span.pages, span.table_length, span.pools.pages.free) == ([0, 1], 2, 3)
    check(span)


def test_a_sealed_page_is_unsealed_before_it_is_written_again() -> None:
    span = grown(pools(), [*NINE, 1], 10)
    first, second = span.key(0), span.key(1)
    span.truncate(6)
    assert span.pools.pages.find(second) is None
    assert span.pools.pages.find(first) == 0
    assert span.pools.pages.is_private(span.pages[1])
    del span.tokens[6:]
    span.tokens += [2, 2, 2]
    span.grow(2)
    span.seal(9)
    assert span.key(1) != second
    assert span.pools.pages.find(span.key(1)) == 1
    check(span)


def test_a_page_that_another_reads_is_given_up_and_computed_again() -> None:
    some = pools()
    other, span = grown(some, list(NINE), 9), KVSpan(some, list(NINE), ROOT)
    assert span.reuse() == 2
    span.grow(1)
    span.truncate(6)
    assert (span.computed, span.pages, other.pages) == (4, [0], [0, 1, 2])
    assert some.pages.find(other.key(1)) == 1, "what the other has computed is no longer found"
    span.grow(5)
    assert span.pages[1] not in other.pages
    check(span, other)


@pytest.mark.parametrize("length", range(10))
def test_a_short_span_is_cut_anywhere(length: int) -> None:
    span = grown(pools(), NINE, 8, 1)
    span.truncate(length)
    assert (span.computed, len(span.pages)) == (length, -(-length // SIZE))
    check(span)
    span.release()
    assert (span.pools.pages.available, span.computed) == (5, 0)


@pytest.mark.parametrize("mirrors", [0, 10])
@pytest.mark.parametrize("length", range(24))
def test_a_long_span_is_cut_anywhere(length: int, mirrors: int) -> None:
    """Where a block is on the host alone, what is left of it is computed again."""
    some = pools(blocks=8, host=9)
    span = KVSpan(some, [token % 3 for token in range(23)], ROOT)
    span.go_long()
    span.mirror_limit = mirrors
    for count in (12, 11):
        some.end_orders()
        span.grow(count)
        span.seal(23)
        list(span.seal_host(len(span.host)))
        span.note_tables()
    assert (len(span.host), span.first_page) == (5, 0 if mirrors else 5)
    span.truncate(length)
    alone = length < 20 and not mirrors
    assert span.computed == (length // SIZE * SIZE if alone else length)
    assert len(span.host) == min(5, length // SIZE)
    check(span)
    span.grow(23 - span.computed)
    span.seal(23)
    span.note_tables()
    check(span)
    span.release()
    assert some.pages.available == 8
    assert some.host.available == 9


def test_nothing_is_given_up_behind_the_end() -> None:
    span = grown(pools(), NINE, 9)
    span.fast_decode_until = 11
    span.truncate(9)
    assert (span.computed, span.fast_decode_until, len(span.pages)) == (9, 11, 3)


def test_a_shorter_span_has_no_place_for_a_decode_without_bookkeeping() -> None:
    span = grown(pools(), NINE, 9)
    span.note_fast_decode()
    assert span.fast_decode_until == 11
    span.truncate(5)
    assert span.fast_decode_until == 0


def test_a_long_span_reserves_its_tail_besides_its_mirrors() -> None:
    """Mirrored pages are given up for others, so they are no part of the three that a tail needs."""
    tokens = [*NINE, *NINE[:3]]
    span = grown(pools(blocks=8, host=9), tokens, 12, long=True)
    span.tokens += [1, 1]
    span.grow(1)
    assert (span.mirrored, len(span.pages)) == (3, 4)
    assert span.reserve(100) == 2
    span.drop_mirrors(3)
    assert (span.mirrored, span.reserve(100)) == (0, 2)


def test_a_page_with_an_order_is_held_though_the_same_plan_orders_more() -> None:
    """A step makes a block full, and its draft another: the first page is beyond the mirrors then."""
    span = grown(pools(blocks=6, host=9), [*NINE, *NINE[:4]], 5)
    some = span.pools
    span.go_long()
    span.mirror_limit = 1
    for count in (3, 1):
        some.end_orders()
        span.grow(count)
        assert not some.leaving
    span.grow(3)
    span.grow(1)
    assert [order.source for order in some.orders] == [0, 1]
    assert some.leaving == [0], "the page may be written before it is copied"
    check(span)
    some.end_orders()
    assert (span.pages, some.pages.available) == ([1, 2, 3], 3)
    check(span)


# -- shares that verify a draft
# ------------------------------------------------------------------------------------------------------------


def verifying(scheduler: Scheduler, plan: Plan, drafts: Sequence[Sequence[int]]) -> Plan:
    """The plan with these drafts behind the newest tokens of its decode shares, as one who drafts would make
    it."""
    shares = []
    for share, draft in zip(plan.shares, drafts, strict=True):
        request = scheduler._queues.by_row[share.row]
        kv, first = request.kv, share.first_new_block
        if draft:
            kv.grow(len(draft))
            kv.note_tables()
            kv.fast_decode_until = 0
            share = replace(
                share,
                kind=ShareKind.VERIFY,
                tokens=(*share.tokens, *draft),
                new_blocks=tuple(kv.pages[first - kv.first_page :]),
                cold_start=min(share.start, kv.first_page * SIZE),
                cold_stop=len(kv.host) * SIZE,
                near=kv.first_page * SIZE,
                new_cold=tuple(kv.host[share.first_new_cold :]),
            )
        shares.append(share)
    return replace(plan, shares=tuple(shares), orders=tuple(scheduler._pools.orders))


def one(max_tokens: int = 9, end: Sequence[int] = ()) -> Scheduler:
    """A world of five pages, with a request of five tokens that has got a sixth."""
    scheduler = Scheduler(BlockLedger(5), SchedulerLimits(SIZE, 16, 4, 1000), PrefixRule(ROOT), check=True)
    scheduler.submit([0, 1, 2, 0, 1], sampling(end=end), max_tokens)
    scheduler.commit(scheduler.plan(), Outcome((Result((0,)),)))
    return scheduler


@pytest.mark.parametrize(
    ("yielded", "start", "pages", "sealed"),
    [((1,), 6, 2, 1), ((2, 1), 7, 2, 1), ((2, 2, 1), 8, 2, 2), ((2, 2, 0, 1), 9, 3, 2)],
)
def test_what_holds_of_a_draft_is_kept_and_the_rest_given_up(
    yielded: tuple[int, ...], start: int, pages: int, sealed: int
) -> None:
    scheduler = one()
    plan = verifying(scheduler, scheduler.plan(), [(2, 2, 0)])
    assert plan.runs == plan.shares
    assert scheduler.ledger.available == 2
    events = scheduler.commit(plan, Outcome((Result(yielded),)))
    assert [event.token for event in events] == list(yielded)
    assert scheduler.ledger.available == 5 - pages
    assert len(scheduler.ledger._by_key) == sealed
    (share,) = scheduler.plan().shares
    assert (share.start, share.tokens, share.kind) == (start, (1,), ShareKind.DECODE)
    assert share.first_new_block == pages
    assert len(share.new_blocks) == -(-(start + 1) // SIZE) - pages


@pytest.mark.parametrize(
    ("end", "max_tokens", "kept", "reason"),
    [((2,), 9, 1, FinishReason.STOP), ((), 3, 2, FinishReason.LENGTH), ((0,), 9, 3, FinishReason.STOP)],
)
def test_a_draft_ends_where_its_request_does(
    end: tuple[int, ...], max_tokens: int, kept: int, reason: FinishReason
) -> None:
    scheduler = one(max_tokens, [token for token in end if token != 0])
    if end == (0,):
        scheduler = one(max_tokens)
        request = next(iter(scheduler._requests.values()))
        request.sampling = sampling(end=end)
    plan = verifying(scheduler, scheduler.plan(), [(2, 2, 0)])
    events = scheduler.commit(plan, Outcome((Result((2, 2, 0, 1)),)))
    assert [event.finish for event in events] == [None] * (kept - 1) + [reason]
    assert not scheduler.busy
    assert scheduler.ledger.available == 5


def test_the_next_plan_leaves_out_whose_draft_is_being_verified() -> None:
    """How many tokens it yields, nobody knows before."""
    scheduler = one()
    scheduler.submit([1, 1], sampling(), 9)
    scheduler.commit(scheduler.plan(), Outcome((Result((2,)), Result((1,)))))
    plan = verifying(scheduler, scheduler.plan(), [(2, 2), ()])
    scheduler.run_ahead(plan)
    ahead = scheduler.plan()
    assert [share.row for share in ahead.shares] == [1]
    scheduler.run_ahead(ahead)
    scheduler.commit(plan, Outcome((Result((2, 1)), Result((1,)))))
    assert [share.row for share in scheduler.plan().shares] == [0, 1]


def test_who_was_sent_back_meanwhile_keeps_the_tokens() -> None:
    scheduler = one()
    plan = verifying(scheduler, scheduler.plan(), [(2, 2, 0)])
    scheduler.run_ahead(plan)
    (request,) = scheduler._queues.running
    scheduler._growth.preempt(request)
    scheduler.commit(plan, Outcome((Result((2, 2, 1)),)))
    assert (request.tokens[5:], request.kv.computed) == ([0, 2, 2, 1], 0)
    (share,) = scheduler.plan().shares
    assert share.stop == 9


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("host", [0, 30])
def test_any_drafts_change_no_token(seed: int, host: int) -> None:
    """Pages and host blocks hold facts, and every share must read its own."""
    draw = random.Random(seed)
    long_from = 20 if host else None
    scheduler = Scheduler(
        BlockLedger(14),
        SchedulerLimits(SIZE, 16, 3, 1000, long_from, 1, draw.choice([0, None])),
        PrefixRule(ROOT),
        Storage(HostLedger(host)),
        check=True,
    )
    pages: dict[tuple[int, int], int] = {}
    beyond: dict[tuple[int, int], int] = {}
    texts: dict[int, list[int]] = {}
    for length in (5, 9, 17 if not host else 27):
        prompt = [draw.randrange(3) for _ in range(length)]
        texts[scheduler.submit(prompt, sampling(), 24 if not host else 40)] = prompt
    by_row: dict[int, int] = {}
    for _ in range(400):
        if not scheduler.busy:
            break
        plan = scheduler.plan()
        by_row = {row: request.id for row, request in scheduler._queues.by_row.items()}
        room = scheduler.ledger.available
        drafts = list[tuple[int, ...]]()
        for share in plan.shares:
            draft = draw.choice([0, 0, 2, 5]) if share.kind is ShareKind.DECODE and share.sample else 0
            drafts.append(tuple(draw.randrange(3) for _ in range(draft if room >= 6 else 0)))
            room -= 2
        plan = verifying(scheduler, plan, drafts)
        prove_plan(plan, scheduler._queues.by_row, {}, scheduler.host, SIZE)
        for order in plan.orders:
            for at in range(SIZE):
                beyond[order.target, at] = pages[order.source, at]
        results = []
        for share in plan.shares:
            text, span = texts[by_row[share.row]], scheduler._queues.by_row[share.row].kv
            facts = facts_of([*text[: share.start], *share.tokens], 0)
            where(share, span, facts, pages, beyond)
            results.append(Result(yielded(share, text, facts)))
        for event in scheduler.commit(plan, Outcome(tuple(results))):
            assert event.token == chosen(facts_of(texts[event.request], 0)[-1], 0), "a token changed"
            texts[event.request].append(event.token)
    assert not scheduler.busy
    assert scheduler.ledger.available == 14


def where(
    share: Share,
    span: KVSpan,
    facts: list[int],
    pages: dict[tuple[int, int], int],
    beyond: dict[tuple[int, int], int],
) -> None:
    """Write what a share computes to its blocks, and read all that it reads."""

    def page(position: int) -> tuple[int, int]:
        return span.pages[position // SIZE - span.first_page], position % SIZE

    for position in range(max(share.start, share.near), share.stop):
        pages[page(position)] = facts[position]
    for position in range(share.start, share.cold_stop):
        beyond[span.host[position // SIZE], position % SIZE] = facts[position]
    for position in range(share.cold_start):
        assert beyond[span.host[position // SIZE], position % SIZE] == facts[position]
    for position in range(max(share.cold_start, share.near), share.stop):
        assert pages[page(position)] == facts[position]


def yielded(share: Share, text: list[int], facts: list[int]) -> tuple[int, ...]:
    """What holds of a draft, and the token that follows it."""
    if not share.sample:
        return ()
    tokens = list[int]()
    for position in range(share.start if share.kind is ShareKind.VERIFY else share.stop - 1, share.stop):
        tokens.append(chosen(facts[position], 0))
        if position + 1 < share.stop and share.tokens[position + 1 - share.start] != tokens[-1]:
            break
    return tuple(tokens)
