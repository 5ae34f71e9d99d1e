"""Prefix blocks between tiers while requests come, wait, grow, stop and begin anew: in a hall whose transfers
land when a test says so."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from halls import TEN, Hall, Worker
from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.host import HostLedger
from penstock.sched.event import Event
from penstock.sched.found import FoundTokens
from penstock.sched.rates import TransferRates
from penstock.sched.request import Phase
from penstock.sched.rules import Names
from penstock.sched.tiers import Tiers
from penstock.step.plan import BlockId, Landed, Plan, RequestId, Route
from plain.test_scheduler_long import Nights
from worlds import ALPHABET

BLOCKS, HOST, SIZE = 16, 32, 4
A, B = [0, 1, 2, 0, 1, 1, 0, 2, 2, 0, 1, 0, 2], [1, 1, 2, 0, 0, 1, 2, 2, 2, 0, 1, 1, 0]
"""Three full blocks and a token each."""


class Porter(Worker):
    """What it does not hold back lands in the step in which it sets out."""

    def __init__(self, *shape: Any) -> None:
        super().__init__(*shape)
        self.held: set[Route] = set()

    def _land(self, waits: bool) -> Iterator[Landed]:
        held = {id: transfer for id, transfer in self.going.items() if transfer.route in self.held}
        for id in held:
            del self.going[id]
        while self.going:
            yield from super()._land(waits=True)
        self.going = held


class Quay(Hall):
    """A hall with a porter, and a clock that goes when it is told."""

    def __init__(
        self,
        *,
        blocks: int = BLOCKS,
        host_blocks: int = HOST,
        block_size: int = SIZE,
        disk: int = 0,
        **more: Any,
    ) -> None:
        more = {"store": "eager", "long_from": None} | more
        super().__init__(blocks=blocks, host_blocks=host_blocks, block_size=block_size, disk=disk, **more)
        self.worker: Porter = Porter(blocks, host_blocks, block_size, more.get("rope_from"))
        self.now = 0.0
        self.scheduler._arrivals._clock = lambda: self.now
        self.tiers = self.scheduler.tiers

    @property
    def disk(self) -> DiskLedger:
        assert self.tiers.disk is not None
        return self.tiers.disk

    def hold(self, *routes: Route) -> None:
        self.worker.held = set(routes)

    def keep(self, prompt: Sequence[int]) -> None:
        """Compute a prompt, and let all of it go where it goes."""
        self.submit(prompt, 1)
        self.drain()

    def only_on_host(self, *prompts: Sequence[int]) -> None:
        for prompt in prompts:
            self.keep(prompt)
        self.ledger.forget()

    def only_on_disk(self, *prompts: Sequence[int]) -> None:
        self.only_on_host(*prompts)
        self.host.forget()

    def phase(self, id: RequestId) -> Phase:
        return self.scheduler._requests[id].phase


def routes(plan: Plan) -> list[tuple[Route, int]]:
    return [(transfer.route, len(transfer.blocks)) for transfer in plan.transfers]


# -- as it should be
# ---------------------------------------------------------------------------------------------------------


def test_blocks_go_down_and_out_and_come_in_and_up_again() -> None:
    hall = Quay(disk=9)
    hall.submit(A, 1)
    assert [routes(hall.step()) for _ in range(3)] == [[], [(Route.DOWN, 3)], [(Route.OUT, 3)]]
    hall.ledger.forget()
    hall.host.forget()
    hall.submit(A, 2)
    plans = [hall.step() for _ in range(3)]
    assert [(routes(plan), plan.tokens) for plan in plans] == [
        ([(Route.IN, 3)], 0),
        ([(Route.UP, 3)], 0),
        ([], 1),
    ]
    hall.drain()
    assert hall.ended[-1].cached == 12


@pytest.mark.parametrize("where", [Route.UP, Route.IN])
def test_two_who_want_the_same_at_once_both_get_it(where: Route) -> None:
    hall = Quay(disk=9)
    (hall.only_on_host if where is Route.UP else hall.only_on_disk)(A)
    hall.hold(where)
    for _ in range(2):
        hall.submit(A, 5)
    for _ in range(3):
        hall.step()
    hall.hold()
    hall.drain()
    assert all(known.output == known.expected for known in hall.ended)


@pytest.mark.parametrize("where", [Route.UP, Route.IN])
def test_who_is_stopped_while_its_blocks_come_leaves_them_to_others(where: Route) -> None:
    hall = Quay(disk=9)
    (hall.only_on_host if where is Route.UP else hall.only_on_disk)(A)
    hall.hold(where)
    id = hall.submit(A, 5)
    assert [route for route, _ in routes(hall.step())] == [where]
    hall.stop(id)
    hall.hold()
    for _ in range(2):
        hall.step()
    assert (hall.ledger if where is Route.UP else hall.host).cached == 3
    hall.drain()


def test_whose_blocks_come_too_late_from_the_disk_computes_them() -> None:
    hall = Quay(disk=9)
    hall.only_on_disk(A)
    hall.hold(Route.IN)
    hall.submit(A, 2)
    assert routes(hall.step()) == [(Route.IN, 3)]
    assert hall.step().tokens == 0
    hall.now += 1000.0
    assert hall.step().tokens == len(A)
    assert hall.tiers.counts.late == 3
    hall.hold()
    hall.drain()


def test_who_waits_does_so_until_blocks_should_have_come_and_for_as_long_as_computing_takes() -> None:
    """Three blocks should come in ten seconds, and would be computed in twelve."""
    hall = Quay(disk=9)
    hall.only_on_disk(A)
    hall.tiers.rates = TransferRates(token=1.0, block={Route.IN: 3.0})
    hall.hold(Route.IN)
    hall.submit(A, 2)
    assert routes(hall.step()) == [(Route.IN, 3)]
    for now, tokens in ((1.0, 0), (15.0, 0), (21.0, 0), (23.0, len(A))):
        hall.now = now
        assert hall.step().tokens == tokens
    hall.hold()
    hall.drain()


def test_a_long_request_has_no_use_for_copies_to_the_device() -> None:
    """However slow they are: it reads its blocks where they have come to."""
    for long_from in (20, None):
        hall = Quay(disk=30, host_blocks=60, blocks=30, long_from=long_from, max_step_tokens=64)
        prompt = [*A, *A, *A]
        hall.only_on_disk(prompt)
        hall.tiers.rates = TransferRates(token=1.0, block={Route.IN: 1.0, Route.UP: 1000.0})
        hall.submit(prompt, 1)
        assert (hall.step().tokens < len(prompt)) == (long_from is not None)
        hall.drain()


def test_after_an_interrupt_nothing_is_on_its_way() -> None:
    hall = Quay(disk=9)
    hall.only_on_disk(A)
    hall.hold(Route.IN)
    hall.submit(A, 1)
    hall.step()
    assert hall.tiers.rates.queued(Route.IN, hall.now + 10.0) > 0
    hall.hold()
    hall.interrupt()
    assert hall.tiers.rates.queued(Route.IN, hall.now + 10.0) == 0
    hall.drain()


@pytest.mark.parametrize("lost", [0, 2])
def test_what_is_lost_on_its_way_from_the_disk_is_computed(lost: int) -> None:
    hall = Quay(disk=9)
    hall.only_on_disk(A)
    del hall.worker.disk[list(hall.worker.disk)[lost]]
    hall.submit(A, 4)
    hall.drain()
    assert hall.tiers.counts.lost[Route.IN] == 1


@pytest.mark.parametrize("route", [Route.OUT, Route.IN])
def test_what_some_rank_lacks_all_forget(route: Route) -> None:
    """A transfer's loss may be one rank's alone: the others still have the record."""
    disk = DiskLedger(9, [] if route is Route.OUT else [bytes([at]) * 16 for at in range(3)])
    tiers = Tiers(BlockLedger(4), HostLedger(8), disk=disk)
    names = Names([bytes([at]) * 16 for at in range(3)], [None] * 3)
    id = tiers._go(route, names, (), tiers.host.allocate_near(3))
    tiers.plan()
    list(tiers.landed([Landed(id, 0.0, (1,), names.keys[1:2] if route is Route.IN else ())]))
    assert [disk.find(key) for key in names.keys] == [True, False, True]
    assert tiers.plan()[1] == (names.keys[1],)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_pages_for_what_is_lost_on_its_way_to_the_device_are_free_again(lost: int) -> None:
    pages, host, keys = BlockLedger(4), HostLedger(4), [bytes([letter]) * 16 for letter in b"abc"]
    tiers = Tiers(pages, host, store="eager")
    blocks = host.allocate(3)
    for block, key in zip(blocks, keys, strict=True):
        host.seal(block, key)
    host.release(blocks)
    id = tiers.bring_up(Names(keys, [None, *keys[:-1]]), blocks)
    tiers.plan()
    [(transfer, names, right)] = tiers.landed([Landed(id, 0.0, (lost,))])
    assert (len(names), right) == (3, lost)
    pages.check([transfer.pages[:right]])
    host.check([])


def test_what_could_not_be_read_this_time_is_read_the_next() -> None:
    hall = Quay(disk=9)
    hall.only_on_disk(A)
    disk, hall.worker.disk = hall.worker.disk, {}
    gone, hall.worker.gone = hall.worker.gone, lambda transfer: ()
    hall.submit(A, 1)
    hall.drain()
    assert len(hall.disk) == 3
    hall.worker.disk, hall.worker.gone = disk, gone
    hall.host.forget()
    hall.ledger.forget()
    hall.submit(A, 1)
    hall.drain()
    assert hall.tiers.counts.lost[Route.IN] == 3
    assert hall.tiers.counts.moved[Route.IN] == 3


def test_what_comes_from_the_disk_leaves_room_on_the_host_for_others() -> None:
    hall = Quay(host_blocks=4, disk=9)
    hall.only_on_disk(A)
    hall.hold(Route.IN)
    hall.submit(A, 1)
    assert routes(hall.step()) == [(Route.IN, 2)]
    hall.submit(A, 1)
    hall.step()
    assert hall.host.available == 2
    hall.hold()
    hall.drain()


def test_who_computes_up_to_what_is_coming_leaves_the_rest_of_a_step_to_others() -> None:
    hall = Quay(disk=30, blocks=30, host_blocks=60, max_step_tokens=64)
    long = [*A, *A, *A, *A]
    hall.only_on_disk(long)
    hall.tiers.rates = TransferRates(token=1.0, block={Route.IN: 4.0})
    hall.hold(Route.IN)
    hall.submit(long, 1)
    hall.submit(B, 1)
    plan = hall.step()
    assert ([len(share.tokens) for share in plan.shares], routes(plan)) == ([24, len(B)], [(Route.IN, 6)])
    hall.hold()
    hall.drain()


@pytest.mark.parametrize("tokens", [1, 3, 4, 12])
def test_steps_that_run_ahead_keep_as_many_blocks(tokens: int) -> None:
    """Also those that are full only with what a request says."""
    kept = []
    for ahead in (False, True):
        hall = Quay(ahead=ahead)
        hall.submit(A, tokens)
        hall.drain()
        kept.append((hall.ledger.cached, hall.host.cached))
    assert kept[0] == kept[1] == ((len(A) + tokens - 1) // SIZE,) * 2


def test_who_wants_log_probabilities_of_its_prompt_computes_all_of_it() -> None:
    hall = Quay()
    hall.only_on_host(A)
    hall.submit(A, 1, scored=True)
    plan = hall.step()
    assert (routes(plan), plan.tokens) == ([], len(A))


def test_a_disk_that_is_only_read_is_read_and_never_written() -> None:
    hall = Quay(disk=9)
    hall.only_on_disk(A)
    hall.tiers.disk = DiskLedger(0, list(hall.worker.disk))
    hall.submit(A, 2)
    hall.submit(B, 2)
    hall.drain()
    assert hall.tiers.counts.moved == {Route.IN: 3, Route.UP: 3, Route.DOWN: 6, Route.OUT: 3}, (
        "what went out did so before"
    )
    assert hall.scheduler.forget() > 0
    hall.drain()
    assert not hall.worker.disk


def test_who_comes_from_another_tier_may_be_preempted() -> None:
    """It has found a block, and waits for more, when the oldest needs that block."""
    hall = Quay(blocks=7, max_sequences=2)
    hall.keep(A)
    assert hall.ledger.cached == 3
    hall.ledger.allocate(7 - 2)  # All but the first of them, which were unused for longer, are gone.
    hall.ledger.release([BlockId(page) for page in range(7) if hall.ledger._holders[page]])
    hall.hold(Route.UP)
    oldest, other = hall.submit([2], 20), hall.submit(A, 2)
    hall.step()
    while hall.scheduler.running == 2:
        hall.step()
    assert (hall.phase(oldest), hall.phase(other)) == (Phase.RUNNING, Phase.WAITING)
    hall.hold()
    hall.drain()
    assert all(known.output == known.expected for known in hall.ended)


def test_the_end_of_an_interrupted_step_is_a_new_beginning() -> None:
    hall = Quay(disk=9)
    hall.only_on_host(A)
    hall.only_on_disk(B)
    for prompt in (A, B):
        hall.submit(prompt, 3)
    hall.step()
    hall.interrupt()
    hall.drain()
    assert len(hall.ended) == 4


# -- findings: priority and pages
# --------------------------------------------------------------------------------------------


def test_whose_blocks_come_too_late_from_the_host_computes_them() -> None:
    hall = Quay()
    hall.only_on_host(A)
    hall.hold(Route.UP)
    hall.submit(A, 2)
    assert routes(hall.step()) == [(Route.UP, 3)]
    hall.now += 1000.0
    assert hall.step().tokens == 0, "the step that was under way may have held it up"
    hall.now += 1000.0
    plan = hall.step()
    assert (routes(plan), plan.tokens) == ([], len(A))


def test_the_oldest_is_not_preempted_for_pages_that_are_on_their_way_to_a_younger_one() -> None:
    prompt = [*A, 0, 1, 1, 2]
    hall = Quay(blocks=8, max_sequences=2)
    hall.only_on_host(prompt)
    hall.hold(Route.UP)
    oldest = hall.submit([0] * 4, 16)
    hall.step()
    hall.submit(prompt, 1)
    assert (Route.UP, 4) in routes(hall.step())
    for _ in range(13):
        hall.step()
        assert hall.phase(oldest) is Phase.RUNNING
    hall.hold()
    hall.drain()


@pytest.mark.parametrize("route", [Route.OUT, Route.IN])
def test_a_long_request_keeps_the_host_blocks_that_it_needs_next(route: Route) -> None:
    """Without a disk it would."""
    hall = Quay(host_blocks=8, disk=20, long_from=20, recent=0)
    if route is Route.IN:
        hall.only_on_disk([*A, *A])
    id = hall.submit(TEN * 2, 12)
    hall.step()
    hall.step()
    hall.hold(route)
    hall.submit([*A, 1] if route is Route.IN else [*B, 1], 1)
    for _ in range(10):
        hall.step()
        assert hall.phase(id) is Phase.RUNNING


def test_blocks_that_are_others_on_the_host_come_from_the_disk_for_long_requests_alone() -> None:
    """As where they rest in fp8: none goes up, and none comes down."""
    hall = Quay(host_blocks=20, blocks=12, disk=20, long_from=20, recent=0, alike=False)
    hall.only_on_disk([*A, *A], B)
    assert len(hall.disk) == len([*A, *A]) // SIZE
    hall.submit([*A, *A], 2)
    went = [routes(hall.step()) for _ in range(3)]
    assert went == [[(Route.IN, len(hall.disk) - (len([*A, *A]) % SIZE == 0))], [], []]
    hall.drain()
    hall.host.forget()
    hall.submit([*A, 1], 2)
    assert [routes(hall.step()) for _ in range(2)] == [[], []]
    hall.drain()
    assert hall.worker.landed[Route.UP] == hall.worker.landed[Route.DOWN] == 0


def test_a_slow_disk_keeps_no_long_request_waiting() -> None:
    hall = Quay(host_blocks=8, disk=100, long_from=20)
    hall.hold(Route.OUT)
    for first in range(3):
        hall.submit([first, *A], 1)
    while hall.live or hall.tiers.ready:
        hall.step()
    hall.submit(TEN * 2, 1)
    assert any(hall.step().shares for _ in range(3))


# -- findings: what is forgotten
# ---------------------------------------------------------------------------------------------


def test_what_was_on_its_way_to_the_device_when_all_was_forgotten_is_not_found() -> None:
    hall = Quay()
    hall.only_on_host(A)
    hall.hold(Route.UP)
    hall.submit(A, 1)
    hall.step()
    hall.scheduler.forget()
    hall.hold()
    while hall.live:
        hall.step()
    hall.submit(A, 1)
    assert hall.step().tokens == len(A)


def test_a_plan_does_not_forget_what_it_brings_in() -> None:
    hall = Quay(disk=4)
    hall.only_on_disk(A)
    hall.hold(Route.OUT)
    for first in range(3):
        hall.submit([first, first, *B[:3]], 1)  # A block each.
        hall.step()
        hall.step()
    hall.submit(A, 1)
    plan = hall.step()
    while not any(transfer.route is Route.IN for transfer in plan.transfers):
        plan = hall.step()
    (keys,) = [transfer.keys for transfer in plan.transfers if transfer.route is Route.IN]
    assert not set(keys) & set(plan.forget)


def test_no_more_goes_to_the_disk_than_it_holds() -> None:
    hall = Quay(disk=4, host_blocks=40)
    hall.hold(Route.OUT)
    for first in range(3):
        hall.submit([first, *A], 1)
        for _ in range(4):
            hall.step()
    assert sum(len(transfer.blocks) for transfer in hall.worker.going.values()) <= 4


def test_after_an_interrupt_all_that_is_on_disk_is_known() -> None:
    hall = Quay(disk=40)
    hall.keep(A)
    hall.submit(B, 4)
    hall.step()
    hall.step()
    hall.interrupt()
    hall.drain()
    hall.keep([2, 2, *A])
    assert set(hall.worker.disk) == set(hall.disk._there)


@pytest.mark.parametrize("planned", [False, True])
def test_after_an_interrupt_the_disk_still_forgets_what_it_should(planned: bool) -> None:
    hall = Quay(disk=9)
    hall.keep(A)
    hall.scheduler.forget()
    if planned:
        hall.scheduler.plan()
    hall.recover()
    hall.keep(B)
    assert set(hall.worker.disk) == set(hall.disk._there)


# -- findings: lazily
# --------------------------------------------------------------------------------------------------------


def given_up(hall: Quay) -> Iterator[bytes]:
    """Keys that the device has given up and the host does not have, step after step, until nobody is left."""
    while hall.live or hall.tiers.moving:
        before = set(hall.ledger._by_key)
        hall.step()
        yield from (key for key in before - set(hall.ledger._by_key) if hall.host.find(key) is None)


def test_lazily_what_the_device_gives_up_has_gone_to_the_host_before() -> None:
    """A request after another takes a block or two, of sixteen; the host has room for all."""
    chance, lost = random.Random(0), list[bytes]()
    hall = Quay(store="lazy", host_blocks=400, max_step_tokens=8)
    for _ in range(60):
        hall.submit([chance.randrange(ALPHABET) for _ in range(8)], 1)
        lost += given_up(hall)
    assert not lost


def test_lazily_what_was_forgotten_goes_to_the_host_again() -> None:
    def run() -> int:
        before = hall.tiers.counts.moved[Route.DOWN]
        for first in range(3):
            hall.keep([first, *A, *B])
        return hall.tiers.counts.moved[Route.DOWN] - before

    hall = Quay(store="lazy", blocks=12)
    first = run()
    assert first > 0
    hall.scheduler.forget()
    hall.ledger.reset()
    assert run() == first


# -- findings: rates and counts
# ----------------------------------------------------------------------------------------------


def test_waiting_for_a_transfer_does_not_make_tokens_dearer() -> None:
    rates = TransferRates()
    for _ in range(50):
        rates.stepped(0, 0, 0.02, ended=False)
    rates.stepped(100, 100, 1.0, ended=True)
    assert rates.token == pytest.approx(0.01)


@settings(deadline=None)
@given(st.floats(0, 0.1), st.floats(1e-6, 1e-2), st.lists(st.integers(1, 4000), min_size=2, max_size=40))
def test_what_each_transfer_takes_is_told_from_what_each_block_takes(
    first: float, each: float, counts: list[int]
) -> None:
    rates = TransferRates()
    for blocks in counts:
        rates.moved(Route.IN, blocks, first + each * blocks)
        seconds = rates.seconds(Route.IN, blocks)
        assert seconds is not None
        assert rates.beside[Route.IN] >= 0
        assert rates.block[Route.IN] > 0
    if max(counts[-6:]) >= 4 * min(counts[-6:]):
        assert rates.seconds(Route.IN, 512) == pytest.approx(first + each * 512, rel=0.02)


def test_measurements_that_are_no_line_still_say_how_long_it_takes() -> None:
    rates = TransferRates()
    for blocks, seconds in ((10, 1.0), (1000, 0.9), (20, 1.1), (500, 0.2)):
        rates.moved(Route.UP, blocks, seconds)
    assert rates.beside[Route.UP] >= 0
    assert 1e-4 < rates.block[Route.UP] < 0.1


def test_few_blocks_are_computed_where_a_transfer_takes_long_to_begin() -> None:
    """A disk that answers after 30 ms, and a device whose every step takes 12 ms beside 40 us for a token."""
    rates = TransferRates()
    for tokens in (512, 8192, 1024, 16384, 4096):
        rates.stepped(tokens, tokens, 0.012 + 40e-6 * tokens, ended=True)
    for blocks in (4, 256, 32, 100):
        rates.moved(Route.IN, blocks, 0.03 + 1.6e-3 * blocks)
    assert rates.token == pytest.approx(40e-6, rel=0.01)
    assert rates.computed_first(8, 64, 0) == 8
    front = rates.computed_first(512, 64, 0)
    rates.late = 0.0
    assert rates.seconds(Route.IN, 512 - front) == pytest.approx(rates.computing(0, front * 64), rel=0.1)
    front = rates.computed_first(512, 64, 0)
    assert rates.seconds(Route.IN, 512 - front) == pytest.approx(rates.computing(0, front * 64), rel=0.02)


def test_tokens_far_back_are_dearer_to_compute() -> None:
    """What does not pay at the beginning may pay behind a long context."""
    rates = TransferRates(token=1e-5, block={Route.UP: 1e-3}, doubles_at=1000)
    assert not rates.loading_pays(rates.seconds(Route.UP, 10), 0, 640)
    assert rates.loading_pays(rates.seconds(Route.UP, 10), 4000, 640)
    assert rates.work(0, 1000) + rates.work(1000, 500) == pytest.approx(rates.work(0, 1500))


@pytest.mark.parametrize(("step_tokens", "sequences", "output"), [(4, 4, 2), (4, 4, 12), (8, 8, 5)])
def test_a_long_prompt_goes_on_however_many_come_whose_blocks_are_on_the_host(
    step_tokens: int, sequences: int, output: int
) -> None:
    """They are admitted without tokens, and then have one in each step: never so many that less than a block
    is left."""
    hall = Quay(
        blocks=60, host_blocks=100, max_step_tokens=step_tokens, max_sequences=sequences, long_from=30
    )
    prompt = [0, 1, 2, 0, 0, 1, 2, 0]
    hall.only_on_host([*prompt, 0])
    long = hall.submit([2, 1] * 20, 2)
    brought = 0
    for step in range(40):
        while hall.scheduler.waiting < 2:
            hall.ledger.forget()
            hall.submit([*prompt, step % 3], output)
        brought += sum(transfer.route is Route.UP for transfer in hall.step().transfers)
    assert brought > 1, "what came had tokens of its own"
    assert long not in hall.live
    hall.drain()


def test_a_disk_that_was_slow_once_is_tried_again() -> None:
    hall = Quay(disk=9)
    hall.only_on_disk(A)
    hall.tiers.rates.token, hall.tiers.rates.block[Route.IN] = 0.001, 1.0
    for _ in range(50):
        hall.submit(A, 1)
        hall.drain()
        hall.ledger.forget()
        hall.host.forget()
    assert hall.tiers.counts.moved[Route.IN] > 0


def test_blocks_that_are_computed_all_the_same_are_counted_once() -> None:
    hall = Quay(max_step_tokens=8)
    hall.only_on_host([*A, *B, *A])
    hall.tiers.rates.token, hall.tiers.rates.block[Route.UP] = 0.001, 1.0
    hall.submit([*A, *B, *A], 1)
    hall.drain()
    assert hall.tiers.counts.recomputed == 9


def test_what_came_from_the_disk_is_part_of_what_was_not_computed() -> None:
    hall = Quay(disk=9)
    hall.only_on_disk(A)
    hall.submit(A, 1)
    hall.step()
    hall.tiers.rates.token, hall.tiers.rates.block[Route.UP] = 0.001, 1.0
    plan = hall.scheduler.plan()
    assert plan.tokens == len(A)
    (event,) = hall.scheduler.commit(plan, hall.worker.run(plan))
    assert event.cached_disk <= event.cached


@pytest.mark.parametrize("computed_first", [False, True])
def test_what_comes_from_the_disk_in_several_parts_is_counted_in_full(computed_first: bool) -> None:
    """The host has room for few of the prompt's blocks at a time, and the first may be computed meanwhile."""
    hall, prompt = Quay(blocks=40, host_blocks=8, disk=40, max_step_tokens=8, long_from=None), [*A, *B] * 5
    hall.only_on_disk(prompt)
    if computed_first:
        hall.tiers.rates.block[Route.IN], hall.tiers.rates.token = 0.04, 0.01
        hall.worker.seconds = 0.04
    before = replace(hall.tiers.counts)
    id, events, computed = hall.submit(prompt, 1), list[Event](), 0
    while id in hall.live:
        plan = hall.scheduler.plan()
        computed += plan.tokens
        if computed:  # From now on reading is faster than computing.
            hall.tiers.rates.block[Route.IN] = hall.worker.seconds = 1e-5
        events += hall.scheduler.commit(plan, hall.worker.run(plan))
        if events:
            break
    (event,) = events
    assert hall.tiers.counts.moved[Route.IN] > hall.host.near // 2, "it came in one part"
    assert event.cached == event.cached_disk == len(prompt) - computed
    assert (computed > 4) == computed_first
    assert hall.tiers.counts.found_disk - before.found_disk == event.cached_disk
    assert hall.tiers.counts.prompts - before.prompts == len(prompt)


def test_what_was_found_and_computed_after_a_preemption_is_not_counted() -> None:
    found = FoundTokens(20)
    assert found.compute(0, 4) == (0, 0, 0)
    found.set_out(4, 12, disk=True)
    found.set_out(8, 16, disk=False)
    assert found.compute(16, 20) == found.tiers == (0, 4, 8)
    found.compute(20, 30)  # The output.
    found.set_out(4, 8, disk=False)  # Preempted, it finds less, and computes the rest.
    assert found.compute(8, 20) == (0, 0, 0)
    assert found.tiers == (0, 0, 4)
    found.compute(0, 20)
    assert found.tiers == (0, 0, 0)


# -- anything at any time
# ----------------------------------------------------------------------------------------------------


class Tides(Nights):
    """Nights at a quay: transfers are held back and let go, time passes, all is forgotten."""

    @initialize(
        blocks=st.integers(2, 14),
        host_blocks=st.integers(1, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_step_tokens=st.sampled_from([4, 8, 17, 64]),
        max_sequences=st.integers(1, 5),
        long_from=st.sampled_from([None, None, 12, 30]),
        store=st.sampled_from(["eager", "eager", "lazy", "off"]),
        disk=st.sampled_from([0, 3, 40]),
        lossy=st.booleans(),
    )
    def begin(
        self, block_size: int, max_step_tokens: int, max_sequences: int, lossy: bool = False, **more: Any
    ) -> None:
        step = max(block_size, max_step_tokens, max_sequences)
        self.hall: Quay = Quay(
            block_size=block_size, max_step_tokens=step, max_sequences=max_sequences, **more
        )
        self.hall.worker.lossy = lossy

    @rule(held=st.sets(st.sampled_from(list(Route))))
    def hold(self, held: set[Route]) -> None:
        self.hall.hold(*held)

    @rule(seconds=st.sampled_from([0.01, 0.2, 40.0]))
    def wait(self, seconds: float) -> None:
        self.hall.now += seconds

    @rule()
    def forget_all(self) -> None:
        self.hall.scheduler.forget()

    @precondition(lambda self: self.hall.ended)
    @rule(which=st.integers(0, 60))
    def again(self, which: int) -> None:
        """With nothing of it left on the device."""
        self.hall.ledger.forget()
        other = self.hall.ended[which % len(self.hall.ended)]
        self.submit([*other.prompt, *other.output, 0], 3, 2, False)

    @rule()
    def interrupt(self) -> None:
        self.hall.hold()
        super().interrupt()

    def teardown(self) -> None:
        if hasattr(self, "hall"):
            self.hall.hold()
        super().teardown()


TestTides = Tides.TestCase
TestTides.settings = settings(max_examples=75, stateful_step_count=30, derandomize=True, deadline=None)
