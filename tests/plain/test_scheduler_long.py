"""Long requests: what rests on the host, what on the device, and that a worker who does as told always finds
the KV it reads.

A hall has eight device blocks of four tokens, twenty host blocks, sixteen tokens a step and four rows, unless
a test says otherwise; a request of twenty tokens is long.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from halls import TEN, Hall
from penstock.base.errors import RequestError
from penstock.step.plan import (
    UNKNOWN,
    Admission,
    BlockId,
    HostBlockId,
    Order,
    Plan,
    RequestId,
    Route,
    Share,
    ShareKind,
)
from penstock.step.request import FinishReason
from worlds import ALPHABET, END, sampling


def cold(plan: Plan) -> list[tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]]:
    """Each share's start and stop, how much rests on the host before and after, its new pages and its new
    host blocks."""
    return [
        (share.start, share.stop, share.cold_start, share.cold_stop, share.new_blocks, share.new_cold)
        for share in plan.shares
    ]


# -- one request
# ------------------------------------------------------------------------------------------------------------


def test_a_long_request_from_its_prompt_to_its_end() -> None:
    """Twenty-two tokens of prompt: a chunk of sixteen, one of six, of which two are left over. Then the tail
    grows to a full block and another, and the first of them goes to the host before the step that begins a
    third."""
    hall = Hall(host_blocks=20, max_sequences=1)
    prompt = [*TEN, *TEN, 1, 1]
    id = hall.submit(prompt, 9)
    out = hall.live[id].expected
    taken = tuple(range(10, 15))  # in the middle of the host's blocks
    first = Share(
        0,
        0,
        tuple(prompt[:16]),
        4,
        (),
        False,
        22,
        ShareKind.CHUNK,
        cold_start=0,
        cold_stop=16,
        near=16,
        first_new_cold=0,
        new_cold=taken[:4],
    )
    assert hall.step() == Plan((Admission(0, sampling(), tuple(prompt), ()),), (first,))
    rest = Share(
        0,
        16,
        tuple(prompt[16:]),
        5,
        (BlockId(0),),
        True,
        22,
        ShareKind.CHUNK,
        cold_start=16,
        cold_stop=20,
        near=20,
        first_new_cold=4,
        new_cold=taken[4:],
    )
    assert hall.step() == Plan((), (rest,))
    assert hall.ledger.available == 7
    for at in (22, 23):
        assert cold(hall.step()) == [(at, at + 1, 20, 20, (), ())]
    assert cold(hall.step()) == [(24, 25, 20, 20, (1,), ())], "one full block is recent"
    for at in (25, 26, 27):
        assert cold(hall.step()) == [(at, at + 1, 20, 20, (), ())]
    last = Share(
        0,
        28,
        (out[6],),
        7,
        (BlockId(2),),
        True,
        22,
        cold_start=24,
        cold_stop=24,
        near=24,
        first_new_cold=5,
        new_cold=(HostBlockId(15),),
    )
    assert hall.scheduler.plan() == Plan((), (last,), (Order(BlockId(0), HostBlockId(15)),))
    assert hall.ledger.available == 5, "the page that leaves is not free in the step that carries the order"


def test_what_a_step_under_way_sends_is_found_when_it_is_committed_itself() -> None:
    """The next plan has begun to fill more, and reads what the step under way writes."""
    hall = Hall(host_blocks=20, blocks=8, ahead=True, max_step_tokens=8)
    hall.submit([*TEN, *TEN, *TEN], 4)
    hall.step()
    assert cold(hall.step()) == [(0, 8, 0, 8, (), (10, 11))]
    assert hall.flight is not None
    assert cold(hall.flight[0]) == [(8, 16, 8, 16, (), (12, 13))]
    (request,) = hall.scheduler._queues.running
    found = [hall.host.find(request.kv.key(index)) for index in range(4)]
    assert found == [10, 11, None, None]
    hall.interrupt()
    hall.drain()


@pytest.mark.parametrize("near", [0, None])
def test_short_ones_have_a_token_of_each_step_beside_a_long_one(near: int | None) -> None:
    """Each of them in a plan that is made before the last one is committed."""
    hall = Hall(blocks=20, host_blocks=60, ahead=True, max_step_tokens=12, near=near)
    short = [hall.submit([0, 1, first], 17) for first in range(3)]
    hall.step()
    long = hall.submit(TEN * 5, 9)
    for step in range(14):
        plan = hall.step()
        assert hall.flight is not None, "the long one keeps the next plan waiting"
        ahead = {share.row: share for share in hall.flight[0].shares}
        assert sum(UNKNOWN in share.tokens for share in ahead.values()) >= 3, step
        assert len(plan.shares) >= 3
    assert set(hall.live) == {*short, long}
    hall.drain()


def test_whoever_comes_meanwhile_finds_what_has_been_committed() -> None:
    hall = Hall(host_blocks=40, blocks=8, ahead=True, max_step_tokens=8)
    prompt = [*TEN, *TEN, *TEN, *TEN]
    hall.submit(prompt, 4)
    for _ in range(4):
        hall.step()
    hall.submit([*prompt, 1], 4)
    hall.drain()
    assert hall.ended[1].cached >= 8


def test_a_page_that_left_is_free_in_the_next_step() -> None:
    hall = Hall(recent=0, max_sequences=1, share=False)
    hall.submit([0] * 20, 12)
    pages = [hall.step() for _ in range(13)]
    orders = [(order.source, at) for at, plan in enumerate(pages) for order in plan.orders]
    given = [
        (page, at) for at, plan in enumerate(pages) for share in plan.shares for page in share.new_blocks
    ]
    assert orders == [(0, 6), (1, 10)]
    assert given == [(0, 2), (1, 6), (0, 10)]


def test_a_prompt_of_whole_blocks_leaves_no_tail() -> None:
    hall = Hall()
    hall.submit([0] * 20, 2)
    hall.step()
    assert cold(hall.step()) == [(16, 20, 16, 20, (), (14,))]
    assert hall.ledger.available == 8
    assert cold(hall.step()) == [(20, 21, 20, 20, (0,), ())]


def test_chunks_are_whole_blocks_and_what_a_step_has_left_over_is_for_short_prompts() -> None:
    hall = Hall(max_step_tokens=11)
    short = hall.submit([1], 9)
    hall.step()
    hall.submit([0] * 19, 1)
    hall.submit([2], 1)
    assert [(share.start, share.stop) for share in hall.step().shares] == [(1, 2), (0, 1), (0, 8)]
    assert [(share.start, share.stop) for share in hall.step().shares] == [(2, 3), (8, 16)]
    assert [(share.start, share.stop) for share in hall.step().shares] == [(3, 4), (16, 19)]
    assert short in hall.live
    hall.drain()


def test_a_short_request_is_not_touched_by_host_blocks() -> None:
    hall = Hall()
    hall.submit([0] * 10, 9)
    plans = [hall.step() for _ in range(9)]
    assert all(not plan.orders and cold(plan)[0][2:4] == (0, 0) for plan in plans)
    assert (hall.host.available, hall.host.cached, hall.ledger.cached) == (20, 0, 4)


def test_an_output_without_an_end_makes_a_short_request_long() -> None:
    """Once it has eighteen tokens: then of its four full blocks one stays, and whenever another is full the
    one before it leaves."""
    hall = Hall(max_length=40)
    id = hall.submit([0] * 3)
    other = hall.submit([0] * 3, 2)
    orders: list[tuple[Order, ...]] = []
    while id in hall.live:
        orders.append(hall.step().orders)
    assert other not in hall.live
    assert [len(each) for each in orders if each] == [3, 1, 1, 1, 1, 1]
    assert len(orders[15]) == 3
    assert len(hall.ended[-1].output) == 37


# -- runs, sharing
# -----------------------------------------------------------------------------------------------------------


def test_what_is_computed_in_chunks_lies_side_by_side_on_the_host() -> None:
    hall = Hall(host_blocks=80, max_sequences=2)
    a, b = hall.submit([0] * 42, 30), hall.submit([1] * 38, 30)
    tables: dict[int, list[int]] = {0: [], 1: []}
    while a in hall.live and b in hall.live:
        for share in hall.step().shares:
            tables[share.row].extend(share.new_cold)
    for table in tables.values():
        assert len(table) > 12
        assert table == list(range(table[0], table[0] + len(table)))


def test_a_long_prompt_finds_the_host_blocks_of_another() -> None:
    hall = Hall()
    hall.submit([*TEN, *TEN], 1)
    hall.drain()
    hall.submit([*TEN, *TEN, 1, 1], 1)
    assert cold(hall.step()) == [(20, 22, 20, 20, (0,), (10, 11, 12, 13, 14))]
    assert hall.ended[-1].cached == 20


def test_host_blocks_are_not_found_in_the_step_that_writes_them() -> None:
    hall = Hall(max_step_tokens=64, blocks=12)
    hall.submit([*TEN, *TEN], 3)
    hall.submit([*TEN, *TEN], 3)
    assert [share[0] for share in cold(hall.step())] == [0, 0]
    hall.submit([*TEN, *TEN], 3)
    assert [share[0] for share in cold(hall.step())] == [20, 20, 16]
    hall.drain()
    assert hall.host.cached == 5, "of two blocks with the same content one is known"


def test_what_was_demoted_is_found_too() -> None:
    hall = Hall(recent=0)
    hall.submit([*TEN, *TEN], 14)
    hall.drain()
    known = hall.ended[0]
    hall.submit([*known.prompt, *known.output], 1)
    assert cold(hall.step())[0][:2] == (32, 34)


def test_long_and_short_requests_do_not_share() -> None:
    hall = Hall()
    hall.submit(TEN, 1)
    hall.drain()
    hall.submit([*TEN, *TEN], 1)
    assert cold(hall.step())[0][:2] == (0, 16)


def test_without_a_prefix_cache_nothing_is_kept_on_the_host() -> None:
    hall = Hall(share=False)
    hall.submit([0] * 20, 9)
    hall.drain()
    assert (hall.host.cached, hall.host.available) == (0, 20)


# -- admission
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "admitted"), [(20, True), (21, False)])
def test_a_newcomer_leaves_pages_for_the_tail_of_a_long_request(length: int, admitted: bool) -> None:
    """Three of eight pages, though so far it has none."""
    hall = Hall(max_step_tokens=64, long_from=30)
    hall.submit([*TEN, *TEN], 12)
    hall.step()
    hall.submit([1] * length, 1)
    assert bool(hall.step().admissions) == admitted


@pytest.mark.parametrize(("length", "admitted"), [(23, True), (24, False)])
def test_a_long_newcomer_leaves_a_host_block_for_every_other(length: int, admitted: bool) -> None:
    hall = Hall(max_step_tokens=64, host_blocks=11)
    hall.submit([*TEN, *TEN], 12)
    hall.step()
    hall.submit([1] * length, 1)
    assert bool(hall.step().admissions) == admitted


@pytest.mark.parametrize(("blocks", "admitted"), [(5, True), (4, False)])
def test_a_long_newcomer_needs_pages_for_its_tail(blocks: int, admitted: bool) -> None:
    hall = Hall(blocks=blocks)
    hall.submit([1], 9)
    hall.step()
    hall.submit([*TEN, *TEN], 12)
    assert bool(hall.step().admissions) == admitted


# -- preemption
# ------------------------------------------------------------------------------------------------------------


def running(hall: Hall) -> list[RequestId]:
    return [request.id for request in hall.scheduler._queues.running]


def until_preempted(hall: Hall) -> Plan:
    while True:
        plan = hall.step()
        if hall.scheduler.preemptions:
            return plan


def test_the_youngest_long_request_goes_when_host_blocks_run_out() -> None:
    """Thirteen host blocks, of which two begin with five each; the short one is younger, but has none."""
    hall = Hall(host_blocks=13, recent=0, blocks=12)
    old, young = hall.submit([*TEN, *TEN], 20), hall.submit([2, *TEN, *TEN[:9]], 20)
    short = hall.submit([1], 18)
    until_preempted(hall)
    assert running(hall) == [old, short]
    assert hall.live[young].output
    hall.drain()


def test_the_youngest_long_request_goes_by_itself_when_it_is_the_one_that_lacks_host_blocks() -> None:
    """Five blocks each; the older has taken the eleventh when the younger comes to need one."""
    hall = Hall(host_blocks=11, recent=0, blocks=12)
    old, young = hall.submit([*TEN, *TEN], 20), hall.submit([2, *TEN, *TEN[:9]], 20)
    short = hall.submit([1], 18)
    plan = until_preempted(hall)
    assert not plan.orders
    assert running(hall) == [old, short]
    assert len(plan.shares) == 2, "whoever is behind it runs"
    assert young in hall.live
    hall.drain()


def test_a_short_request_goes_before_a_long_one_when_pages_run_out() -> None:
    """Eight pages: the oldest comes to need six, the long one in the middle three."""
    hall = Hall(recent=1, long_from=25)
    old = hall.submit([1] * 4, 20)
    long, young = hall.submit([*TEN, *TEN], 15), hall.submit([2] * 3, 20)
    for _ in range(4):
        hall.step()
    assert running(hall) == [old, long, young]
    until_preempted(hall)
    assert running(hall) == [old, long]
    hall.drain()


def test_a_long_request_goes_when_nobody_else_can_and_returns_to_find_its_host_blocks() -> None:
    hall = Hall(blocks=6, recent=1, long_from=25)
    old, long = hall.submit([1] * 4, 20), hall.submit([*TEN, *TEN], 30)
    until_preempted(hall)
    assert running(hall) == [old]
    known = hall.live[long]
    while not (plan := hall.step()).admissions:
        assert hall.live
    (share,) = plan.shares
    assert share.start == share.cold_start >= 20
    assert len(known.prompt) + len(known.output) - 1 - share.start <= 12, "only the tail is computed again"
    hall.drain()


def test_who_was_preempted_waits_before_those_who_came_later() -> None:
    """The short one in the middle goes, though the long one is younger. The one that has not begun stays
    behind it."""
    hall = Hall(blocks=7, recent=1, long_from=25, max_sequences=3)
    old, middle = hall.submit([1], 23), hall.submit([2] * 3, 21)
    long, last = hall.submit([*TEN, *TEN], 30), hall.submit([0], 1)
    until_preempted(hall)
    assert running(hall) == [old, long]
    while middle not in running(hall):
        assert last in hall.live
        hall.step()
    assert running(hall)[:2] == [middle, long]
    hall.drain()


# -- what fits
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, 84),
        ({"max_length": 60}, 60),
        ({"host_blocks": 0}, 33),
        ({"host_blocks": 5}, 33),
        ({"recent": 7}, 33),
        ({"recent": 6}, 84),
        ({"long_from": None}, 84),
    ],
)
def test_the_longest_request_is_served_and_no_longer_one(settings: dict[str, Any], longest: int) -> None:
    hall = Hall(**settings)
    assert hall.scheduler.longest == longest
    for prompt in (1, longest // 2, longest - 1):
        hall.submit([prompt % 2] * prompt, longest - prompt)
        hall.submit([prompt % 2] * prompt)
    hall.drain()
    for max_tokens in (longest, None):
        with pytest.raises(RequestError):
            hall.scheduler.submit([0] * (1 if max_tokens else longest), sampling(), max_tokens)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {},
            "KV has room for 84 in all; shorten it, or allow host memory or disk for 96 tokens of KV (80 "
            "now)",
        ),
        ({"max_length": 60}, "the context holds 60 in all; shorten it, or allow a larger max_length"),
        (
            {"host_blocks": 0},
            "the KV blocks hold 33 in all; shorten it, or allow more device_memory, or KV in host "
            "memory (host_kv_memory)",
        ),
        (
            {"recent": 7, "max_length": 90},
            "KV has room for 33 in all; shorten it, or allow host memory or disk for 96 tokens of KV (80 "
            "now) "
            "and 9 KV blocks on the device (8 now) and a max_length of 99 (90 now)",
        ),
        (
            {"recent": 7, "host_blocks": 30},
            "KV has room for 33 in all; shorten it, or allow 9 KV blocks on the device (8 now)",
        ),
    ],
)
def test_what_can_never_fit_is_refused_with_what_would_make_it_fit(
    settings: dict[str, Any], message: str
) -> None:
    hall = Hall(**settings)
    with pytest.raises(RequestError) as refusal:
        hall.scheduler.submit([0] * 90, sampling(), 9)
    assert str(refusal.value) == f"the request has 90 tokens of prompt and 9 of output, but {message}"
    assert not hall.scheduler.busy


# -- the check itself
# --------------------------------------------------------------------------------------------------------


def decoding() -> tuple[Hall, Plan]:
    """A hall before a step with an order, and that step."""
    hall = Hall(recent=0)
    hall.submit([0] * 20, 9)
    while not (plan := hall.scheduler.plan()).orders:
        hall.scheduler.commit(plan, hall.worker.run(plan))
    return hall, plan


def chunk() -> tuple[Hall, Plan]:
    hall = Hall()
    hall.submit([0] * 30, 9)
    hall.step()
    return hall, hall.scheduler.plan()


def altered(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, shares=(replace(plan.shares[0], **changes),))


@pytest.mark.parametrize(
    ("make", "alter", "message"),
    [
        (decoding, lambda plan: replace(plan, orders=()), "reads a host block before it is written"),
        (decoding, lambda plan: replace(plan, orders=plan.orders * 2), "two orders go to one block"),
        (
            decoding,
            lambda plan: replace(plan, orders=(replace(plan.orders[0], target=3),)),
            "before it is written",
        ),
        (
            decoding,
            lambda plan: replace(plan, orders=(*plan.orders, Order(BlockId(7), HostBlockId(3)))),
            "a block that no request has",
        ),
        (
            decoding,
            lambda plan: replace(plan, orders=(replace(plan.orders[0], source=1),)),
            "writes a page that is copied",
        ),
        (decoding, lambda plan: altered(plan, start=23, tokens=(0, 0), cold_start=23), "part of a block"),
        (decoding, lambda plan: altered(plan, cold_stop=20), "wrong table of host blocks"),
        (chunk, lambda plan: altered(plan, cold_start=28), "neither on the host nor in pages"),
        (chunk, lambda plan: altered(plan, cold_start=18, start=18), "part of a block"),
        (chunk, lambda plan: altered(plan, near=16), "gap before its pages"),
        (chunk, lambda plan: altered(plan, tokens=(0,)), "wrong block table"),
    ],
)
def test_check_sees_a_wrong_plan(
    make: Callable[[], tuple[Hall, Plan]], alter: Callable[[Plan], Plan], message: str
) -> None:
    hall, plan = make()
    hall.prove(plan)
    with pytest.raises(AssertionError, match=message):
        hall.prove(alter(plan))


def test_check_sees_a_host_block_that_is_written_while_it_is_shared() -> None:
    hall, plan = chunk()
    hall.host.seal(plan.shares[0].new_cold[0], b"a key")
    with pytest.raises(AssertionError, match="writes a host block that others read"):
        hall.prove(plan)


def test_check_sees_a_host_block_that_the_ledger_does_not_know() -> None:
    hall, plan = chunk()
    hall.host.release(plan.shares[0].new_cold)
    with pytest.raises(AssertionError, match="holders on record"):
        hall.scheduler.check()


# -- interrupts
# ------------------------------------------------------------------------------------------------------------


def cut_short(call: Callable[[], object], lines: int) -> bool:
    """Calls, and interrupts before the call has run more than this many lines of the package. False if it
    ended by itself."""
    left, before = lines, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if not frame.f_globals["__name__"].startswith("penstock."):
            return None
        left -= event == "line"
        if left < 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_plan_of_long_requests_may_be_interrupted_anywhere() -> None:
    """It has an order, preempts a long request and takes none."""
    lines, unfinished = 0, True
    while unfinished:
        hall = Hall(host_blocks=10, recent=0)
        hall.submit([*TEN, *TEN], 6)
        hall.submit([2, *TEN, *TEN[:9]], 3)
        for _ in range(6):
            hall.step()
        unfinished = cut_short(hall.scheduler.plan, lines)
        lines += 7
        hall.recover()
        hall.drain()
    assert lines > 150


def halved(hall: Hall, prompt: list[int]) -> list[int]:
    """Lengths of the shares of a prompt whose blocks are on the disk alone, when a block takes as long to
    come as to compute."""
    tiers = hall.scheduler.tiers
    hall.submit(prompt, 1)
    hall.drain()
    hall.ledger.forget()
    hall.host.forget()
    hall.worker.seconds = 0.01 * hall.limits.block_size
    tiers.rates.block[Route.IN], tiers.rates.token = hall.worker.seconds, 0.01
    id = hall.submit(prompt, 1)
    shares = []
    while id in hall.live:
        shares += [len(share.tokens) for share in hall.step().shares]
    assert hall.ended[-1].cached == len(prompt) - sum(shares)
    return shares


@pytest.mark.parametrize("long_from", [None, 20])
@pytest.mark.parametrize("late", [False, True])
def test_what_comes_from_the_disk_meets_what_is_computed(
    long_from: int | None, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen blocks and two tokens: the first eight are computed while the others come, by a disk that is
    fast or late."""
    hall = Hall(blocks=40, host_blocks=40, store="eager", disk=60, long_from=long_from)
    monkeypatch.setattr(
        hall.worker.chance,
        "random",
        lambda: float(late and len(hall.live) > 0 and hall.worker.landed[Route.OUT] > 0),
    )
    shares = halved(hall, [*TEN, *TEN, *TEN, *TEN, *TEN, *TEN, 1, 2, 0, 1, 2, 2])
    assert shares == [16, 16, 2]
    assert hall.worker.landed[Route.IN] == 1
    assert hall.scheduler.tiers.counts.found_disk == 32


# -- anything at any time
# ----------------------------------------------------------------------------------------------------


tokens = st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=40)
some = st.integers(0, 60)


class Nights(RuleBasedStateMachine):
    """A hall in which anything happens between two steps."""

    @initialize(
        blocks=st.integers(1, 12),
        host_blocks=st.integers(0, 24),
        block_size=st.sampled_from([1, 2, 4, 8]),
        max_step_tokens=st.sampled_from([2, 3, 5, 8, 17, 64]),
        max_sequences=st.integers(1, 5),
        max_length=st.sampled_from([12, 40, 1000]),
        long_from=st.sampled_from([None, None, 0, 6, 12, 30]),
        recent=st.integers(0, 3),
        near=st.sampled_from([0, None, None, 3]),
        store=st.sampled_from(["off", "eager", "eager", "lazy"]),
        disk=st.sampled_from([0, 3, 40]),
        seconds=st.sampled_from([1e-4, 0.02, 0.5]),
        share=st.sampled_from([True, True, True, False]),
        rope_from=st.sampled_from([None, None, 0, 6]),
        ahead=st.booleans(),
    )
    def begin(
        self, block_size: int, max_step_tokens: int, max_sequences: int, seconds: float, **more: Any
    ) -> None:
        step = max(
            block_size, max_step_tokens, max_sequences
        )  # With fewer tokens than sequences an engine does not start.
        self.hall = Hall(block_size=block_size, max_step_tokens=step, max_sequences=max_sequences, **more)
        self.hall.worker.seconds = seconds

    @rule(
        prompt=tokens,
        max_tokens=st.sampled_from([None, 1, 2, 5, 12, 30]),
        copies=st.sampled_from([1, 1, 2, 4]),
        ends=st.booleans(),
        scored=st.booleans(),
        priority=st.sampled_from([0, 0, -1, 1]),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int | None,
        copies: int,
        ends: bool,
        scored: bool = False,
        priority: int = 0,
    ) -> None:
        longest = self.hall.scheduler.longest
        prompt = prompt[: longest - 1]
        if max_tokens is not None:
            max_tokens = min(max_tokens, longest - len(prompt))
        for _ in range(copies):
            self.hall.submit(prompt, max_tokens, end=[END] if ends else (), scored=scored, priority=priority)

    @precondition(lambda self: self.hall.live or self.hall.ended)
    @rule(
        which=some,
        cut=some,
        more=st.lists(st.integers(0, ALPHABET - 1), max_size=3),
        max_tokens=st.sampled_from([1, 5, 30]),
    )
    def go_on(self, which: int, cut: int, more: list[int], max_tokens: int) -> None:
        """A prompt that begins like another request, perhaps with its output."""
        everyone = [*self.hall.live.values(), *self.hall.ended]
        other = everyone[which % len(everyone)]
        words = [*other.prompt, *other.output]
        self.submit(words[: 1 + cut % len(words)] + more, max_tokens, 1, False)

    @precondition(lambda self: self.hall.live)
    @rule(which=some)
    def stop(self, which: int) -> None:
        self.hall.stop(list(self.hall.live)[which % len(self.hall.live)])

    @rule(host=st.booleans())
    def forget(self, host: bool) -> None:
        if host:
            self.hall.host.forget()
        else:
            self.hall.ledger.forget()

    @rule()
    def interrupt(self) -> None:
        self.hall.interrupt()

    @rule(steps=st.sampled_from([1, 1, 2, 5, 15]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.hall.step()

    def teardown(self) -> None:
        if hasattr(self, "hall"):
            self.hall.drain()


TestNights = Nights.TestCase
TestNights.settings = settings(max_examples=60, stateful_step_count=25, derandomize=True, deadline=None)


def crowded(seed: int, short: bool = False) -> Hall:
    """A hall with little memory and much to do, which it has done: short and long ones, prompts that begin
    alike, aborts, interrupts.

    short: all of them, and steps begin before the last is committed.
    """
    chance = random.Random(seed)
    size = chance.choice([1, 2, 4, 8])
    hall = Hall(
        blocks=chance.randint(4, 12),
        host_blocks=chance.randint(8, 20),
        block_size=size,
        max_step_tokens=max(size, chance.choice([4, 7, 16, 64])),
        max_sequences=chance.randint(2, 6),
        long_from=None if short else chance.choice([None, 4 * size]),
        recent=chance.randint(0, 2),
        rope_from=chance.choice([None, None, 3 * size]),
        near=(0, None)[seed % 2],
        store=("off", "eager", "lazy")[seed % 3],
        disk=(0, 6, 60)[seed // 3 % 3],
        ahead=short or seed % 7 < 4,
    )
    hall.worker.lossy, hall.worker.seconds = seed % 4 == 0, (1e-3, 0.03)[seed % 5 == 0]
    beginnings = [[chance.randrange(ALPHABET) for _ in range(4 * size)] for _ in range(2)]
    for _ in range(100):
        room = (hall.ledger.blocks * size if short else hall.scheduler.longest) - 1
        if hall.scheduler.waiting < 3 and chance.random() < 0.4:
            prompt = (
                chance.choice(beginnings) + [chance.randrange(2) for _ in range(chance.randint(0, 3 * size))]
            )[: room // 2 + 1]
            most = chance.choice([*([] if short else [None]), *range(1, room - len(prompt) + 2)])
            hall.submit(prompt, most, end=[END] if short else ())
        elif hall.live and chance.random() < 0.03:
            hall.stop(chance.choice(list(hall.live)))
        elif chance.random() < 0.02:
            hall.interrupt()
        else:
            hall.step()
    hall.drain()
    return hall


@pytest.mark.parametrize("seed", range(5))
def test_a_crowd_of_short_ones_is_served_by_steps_that_run_ahead(seed: int) -> None:
    preemptions = hits = ran_ahead = stopped = 0
    for one in range(12 * seed, 12 * seed + 12):
        hall = crowded(one, short=True)
        preemptions += hall.scheduler.preemptions
        hits += sum(bool(known.cached) for known in hall.ended)
        ran_ahead += hall.ran_ahead
        stopped += sum(known.reason is FinishReason.STOP for known in hall.ended)
    assert preemptions > 10, "these halls are too large to prove anything"
    assert hits > 20, "these halls share too little to prove anything"
    assert ran_ahead > 100, "these halls hardly run ahead"
    assert stopped > 20, "nothing was ever computed in vain"


@pytest.mark.parametrize("seed", range(5))
def test_a_crowd_of_long_and_short_ones_is_served_and_gives_everything_back(seed: int) -> None:
    preemptions = hits = demoted = near = 0
    for hall in map(crowded, range(12 * seed, 12 * seed + 12)):
        preemptions += hall.scheduler.preemptions
        hits += sum(bool(known.cached) for known in hall.ended)
        demoted += hall.demoted
        near += hall.worker.near
    assert preemptions > 10, "these halls are too large to prove anything"
    assert hits > 20, "these halls share too little to prove anything"
    assert demoted > 100, "in these halls too little goes to the host to prove anything"
    assert near > 20, "in these halls too little is near to prove anything"
