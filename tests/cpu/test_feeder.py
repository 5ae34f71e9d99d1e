"""Weights that stream arrive whole and in time, whatever is late; and every single wait of the protocol is
needed for it."""

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupKind
from penstock.base.errors import CheckpointError
from penstock.base.tiers import Tier
from penstock.memory.streams import CallerStream
from penstock.weights.streaming import loading
from penstock.weights.streaming.feeder import Feeder, RingCopy
from penstock.weights.streaming.residency import Use, WeightLimits
from penstock.weights.streaming.ring import StreamRates
from penstock.weights.streaming.solver import solve
from streams import (
    BRIEF,
    LONG,
    STRIDE,
    UNIT,
    Copies,
    Gates,
    Shape,
    Store,
    World,
    content,
    cut_short,
    layout,
    no_thread_left,
    random_delays,
    within,
)

SHAPES = [
    Shape((2, 10, 2, 10), "hhhh", 10),
    Shape((2, 10, 2, 10), "hhhh", 14),
    Shape((3, 7, 5, 1, 6), "shshs", 7, piece=3, slots=1),
    Shape((3, 7, 5, 1, 6), "shshs", 9, piece=3, slots=2),
    Shape((3, 7, 5, 1, 6), "sssss", 12, piece=2, slots=5),
    Shape((4, 4, 4, 4, 4, 4), "hdsdhs", 8, slots=2),
    Shape((9, 4, 4, 9), "shsd", 9, piece=2, slots=4, again=(0,)),
    Shape((5,), "s", 5, piece=2, slots=2),
    Shape((6, 6, 6), "sss", 18, piece=6, slots=3),
]


def every(kind: str, seconds: float = 2e-3) -> Callable[[Hashable], float]:
    return lambda place: seconds if place[0] == kind else 0.0  # type: ignore[index]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("late", ["nothing", "copy", "kernel", "read", 1, 2, 3])
def test_every_kernel_sees_its_group(shape: Shape, late: str | int) -> None:
    delay = every(late) if isinstance(late, str) else random_delays(late)
    with no_thread_left(), World(shape, Gates(delay=delay), changing=True) as world:
        world.passes(4)
        assert world.wrong() == []


@pytest.mark.parametrize("seed", range(12))
def test_every_kernel_sees_its_group_where_the_solver_puts_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = tuple(int(size) for size in rng.choice([1, 3, 4, 8, 15], int(rng.integers(2, 10))))
    device, host = int(rng.integers(max(sizes), sum(sizes) + 1)), int(rng.integers(4, 40))
    shape = Shape(sizes, "", 0)
    uses = [Use(id, size * UNIT) for id, size in zip(shape.ids, sizes, strict=True)]
    placement = solve(
        uses,
        WeightLimits(device * UNIT, host * UNIT),
        StreamRates(20 * UNIT, 2 * UNIT, 1000 * UNIT),
        piece=4 * UNIT,
    )
    with World(replace(shape, solved=placement), Gates(delay=random_delays(seed)), changing=True) as world:
        world.passes(3)
        assert world.wrong() == []


# ---- without one of its waits


@dataclass(frozen=True)
class Needed:
    """A wait of the device ring: the `index`th of run `writer`, for run `user`, by their numbers in the
    ring."""

    shape: Shape
    writer: int
    index: int
    user: int

    def __str__(self) -> str:
        return f"{self.shape}-{self.writer}.{self.index}-for-{self.user}"

    @property
    def segment(self) -> int:
        """Which segment of the writer has it."""
        with World(self.shape) as world:
            return [
                n for n, segment in enumerate(world.feeder._segments[self.writer]) if segment.wait is not None
            ][self.index]

    def without(self, segments: list[list[RingCopy]]) -> list[list[RingCopy]]:
        at = [n for n, segment in enumerate(segments[self.writer]) if segment.wait is not None][self.index]
        segments[self.writer][at] = replace(segments[self.writer][at], wait=None)
        return segments


def waits_of(shape: Shape) -> list[Needed]:
    """Those whose loss can be seen: a group on HOST that is written over by itself stays what it is."""
    placement = shape.placement()
    runs = placement.device_ring.runs
    return [
        Needed(shape, number, index, wait.run)
        for number, run in enumerate(runs)
        for index, wait in enumerate(run.waits)
        if placement.homes[shape.order[run.use]] is Tier.DISK
        or shape.order[runs[wait.run].use] != shape.order[run.use]
    ]


@pytest.mark.parametrize("needed", [needed for shape in SHAPES for needed in waits_of(shape)], ids=str)
@pytest.mark.parametrize("side", ["host", "stream"])
def test_every_wait_of_the_ring_is_needed(needed: Needed, side: str) -> None:
    """Held up in the midst of a use, the writer of its bytes waits; without the wait it does not. On the side
    of the host, the use is not over because it has not been released; on the side of the stream, because the
    kernel still runs."""
    shape = needed.shape
    runs = shape.placement().device_ring.runs
    visit = len(shape.order) + runs[needed.user].use
    segment = needed.segment
    written = "copy", (needed.writer, segment), 1 if needed.user < needed.writer else 2

    def run(mutant: bool) -> bool:
        """Whether all kernels have seen their bytes."""
        gates = Gates([("kernel", visit)])
        doctor = needed.without if mutant and side == "host" else lambda segments: segments
        with World(shape, gates, changing=True, doctor=doctor) as world:
            if mutant and side == "stream":
                world.copies.never_waits = needed.writer, segment
            uses = iter(shape.order * 3)
            for group in islice(uses, visit):
                world.use(group)
            group = next(uses)
            world.take(group)
            if side == "stream":
                world.weights.release(group)
            assert gates.passes(written, LONG if mutant else BRIEF) == mutant
            gates.open()
            if mutant:
                return not world.wrong()
            if side == "host":
                world.weights.release(group)
            for group in uses:
                world.use(group)
            return not world.wrong()

    assert run(mutant=False)
    assert not run(mutant=True)


@dataclass(frozen=True)
class Read:
    """A piece of the host ring, by the run of the device ring that it is part of, and whatever is read into
    its slot next."""

    shape: Shape
    number: int

    def __str__(self) -> str:
        return f"{self.shape}-piece-{self.number}"

    @property
    def visit(self) -> int:
        """In the second pass."""
        return len(self.shape.order) + self.shape.placement().host_ring.runs[self.number].use

    def place(self, laps: int) -> Hashable:
        """Of the read that is the `laps`th into the slot from the one in the second pass on."""
        ring = self.shape.placement().host_ring
        slot, turn, number = ring.runs[self.number].offset, 1, self.number
        while laps:
            number += 1
            turn, number = turn + number // len(ring.runs), number % len(ring.runs)
            laps -= ring.runs[number].offset == slot
        run = ring.runs[number]
        group = self.shape.order[run.use]
        before = sum(
            other.use < run.use and self.shape.order[other.use] == group
            for other in ring.runs
            if other.start == run.start
        )
        times = self.shape.order.count(group)
        return "read", str(group), run.start, turn * times + before

    def copies(self, world: World) -> list[Hashable]:
        """Of the second pass, out of its slot."""
        runs = world.placement.device_ring.runs
        run = next(
            run for run, one in enumerate(runs) if one.use == world.placement.host_ring.runs[self.number].use
        )
        own = world.feeder._segments[run]
        return [
            ("copy", (run, index), 1) for index, segment in enumerate(own) if segment.piece == self.number
        ]


READS = [Read(shape, number) for shape in SHAPES for number in range(len(shape.placement().host_ring.runs))]


@contextmanager
def host(world: World) -> Iterator[None]:
    """The thread that computes, going through three passes. It is waited for, with all gates open."""
    faults = list[BaseException]()

    def work() -> None:
        try:
            world.passes(3)
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        world.gates.open()
        thread.join()
    assert not faults


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arithmetic_must_wait_for_its_copies(shape: Shape) -> None:
    runs = shape.placement().device_ring.runs

    with World(shape) as world:
        last = [len(segments) - 1 for segments in world.feeder._segments]

    def right(run: int, mutant: bool) -> bool:
        gates = Gates([("copy", (run, last[run]), 0)])
        with World(shape, gates, changing=True) as world:
            world.computing.never_waits = run if mutant else None
            with host(world):
                assert gates.passes(("kernel", runs[run].use), LONG if mutant else BRIEF) == mutant
            return not world.wrong()

    for run in range(len(runs)):
        assert right(run, mutant=False)
        assert not right(run, mutant=True)


@pytest.mark.parametrize("read", READS, ids=str)
def test_a_copy_must_wait_for_its_piece(read: Read) -> None:
    class Hasty(Feeder):
        """Believes that every piece has landed."""

        @property
        def _landed(self) -> list[int]:  # type: ignore[override]
            return _Always([1 << 30])

        @_landed.setter
        def _landed(self, _: list[int]) -> None:
            pass

    def right(feeder: type[Feeder]) -> bool:
        gates = Gates([read.place(0)])
        with World(read.shape, gates, changing=True, feeder_class=feeder) as world:
            with host(world):
                mutant = feeder is Hasty
                assert gates.passes(("kernel", read.visit), LONG if mutant else BRIEF) == mutant
            return not world.wrong()

    assert right(Feeder)
    assert not right(Hasty)


class _Always(list[int]):
    def __getitem__(self, _: object) -> int:  # type: ignore[override]
        return super().__getitem__(0)

    def __setitem__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("read", READS, ids=str)
def test_a_read_must_wait_until_its_slot_has_been_copied(read: Read) -> None:
    def right(mutant: bool) -> bool:
        gates = Gates()
        with World(read.shape, gates, changing=True) as world:
            gates.shut(read.copies(world)[-1])
            world.copies.blind = mutant
            with host(world):
                assert gates.passes(read.place(1), LONG if mutant else BRIEF) == mutant
            return not world.wrong()

    assert right(mutant=False)
    assert not right(mutant=True)


class Elsewhere(Tensor):
    """Memory that says it is on a device, so that what goes there goes through slots."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")


def test_a_loader_must_wait_until_its_slot_has_been_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot for three pieces: the second may not be read before the first has been copied out of it."""
    monkeypatch.setattr(loading, "PIECE", 4 * UNIT)
    group = layout(GroupId(GroupKind.FFN, 0), 12 * UNIT)

    def loaded(mutant: bool) -> bool:
        target, slot = torch.zeros(group.size, dtype=torch.uint8), torch.zeros(4 * UNIT, dtype=torch.uint8)
        gates = Gates([("copy", target.data_ptr(), 0)])
        copies = Copies(gates)
        copies.blind = mutant
        place = target.as_subclass(Elsewhere)
        thread = threading.Thread(
            target=lambda: loading.load([(group, place)], Store(gates), [slot], copies, None)
        )
        thread.start()
        assert gates.passes(("read", "ffn.0", 4 * UNIT, 0), LONG if mutant else BRIEF) == mutant
        gates.open()
        thread.join()
        copies.close()
        return np.array_equal(target.numpy(), content(group.id, 0, group.size))

    assert loaded(mutant=False)
    assert not loaded(mutant=True)


# ---- passes that are not gone through


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_groups_may_be_passed_over_taken_again_and_not_released(shape: Shape, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with no_thread_left(), World(shape, Gates(delay=random_delays(seed, longest=1e-3))) as world:
        at = 0
        for _ in range(60):
            group = shape.order[at]
            world.take(group)
            if rng.random() < 0.8:
                world.weights.release(group)
            # The next, one further on, or a pass anew.
            further = int(rng.integers(at, len(shape.order) + 1)) if rng.random() < 0.6 else 0
            at = (at + 1 if rng.random() < 0.6 else further) % len(shape.order)
        assert world.wrong() == []


# ---- the end


@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
def test_close_at_any_moment(shape: Shape) -> None:
    """With reads, copies and kernels under way, before and after every take and release."""
    for moment in range(4 * len(shape.order)):
        with no_thread_left():
            world = World(shape, Gates(delay=random_delays(moment, longest=4e-3))).load()
            for group in (shape.order * 2)[: moment // 2]:
                world.use(group)
            if moment % 2:
                world.take(shape.order[moment // 2 % len(shape.order)])
            assert within(LONG, world.weights.close)
            reads = sum(world.store.reads.values())
            world.weights.close()
            world.computing.close()
            assert world.store.closed
            assert world.wrong_so_far() == []
            assert sum(world.store.reads.values()) == reads


def test_close_while_another_thread_waits_for_a_group() -> None:
    shape = SHAPES[4]
    with no_thread_left():
        gates = Gates([("read", "ffn.0", 0, 0)])
        world = World(shape, gates).load()

        def wait() -> None:
            with pytest.raises(AssertionError, match="take after close"):
                world.take(shape.order[0])

        waiting = threading.Thread(target=wait)
        waiting.start()
        closing = threading.Thread(target=world.weights.close)
        closing.start()
        waiting.join(LONG)
        assert not waiting.is_alive()
        gates.open()
        closing.join(LONG)
        assert not closing.is_alive()
        world.computing.close()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "s" in shape.homes], ids=str)
def test_what_a_reader_meets_is_raised_where_the_group_is_taken(shape: Shape) -> None:
    damaged = max(number for number, home in enumerate(shape.homes) if home == "s")
    fault = CheckpointError(f"ffn.{damaged} is damaged")
    with no_thread_left(), World(shape) as world:
        world.passes(1)
        world.store.faults = {
            (shape.ids[damaged], start): fault for start in range(0, shape.sizes[damaged] * UNIT, UNIT)
        }
        # What was read ahead may still be used, but then no more, and never with a wrong byte.
        for _ in range(3):
            with pytest.raises(CheckpointError, match=f"ffn.{damaged} is damaged"):
                world.passes(8)
        assert world.wrong() == []


def test_the_first_read_is_checked_until_it_has_succeeded() -> None:
    shape = Shape((3, 3, 3), "sss", 3, piece=3, slots=1)
    with World(shape) as world:
        world.passes(3)
        world.weights.close()  # Readers are ahead.
        assert all(
            world.store.reads[piece] - world.store.unchecked[piece] == 1 for piece in world.store.reads
        )


# ---- counts


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_pass_moves_every_streamed_byte_once(shape: Shape) -> None:
    with World(shape) as world:
        world.passes(2)
        settle(world.feeder)
        before = world.weights.stats()
        world.passes(5)
        settle(world.feeder)
        after = world.weights.stats()
        assert after.copied - before.copied == 5 * world.placement.streamed
        assert after.read - before.read == 5 * world.placement.read
        assert (after.device, after.host, after.disk) == tuple(
            world.placement.resting(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)
        )


def settle(feeder: Feeder) -> None:
    """Wait until the rings are as full as they get."""
    late = time.monotonic() + LONG
    while not full(feeder):
        assert time.monotonic() < late
        time.sleep(1e-4)


def full(feeder: Feeder) -> bool:
    """Whether the next copy waits for a release, all that has been claimed has landed, and nothing more can
    be claimed."""
    with feeder._lock:
        count, pieces = len(feeder._runs), feeder._pieces
        visit, index = feeder._place
        wait = feeder._segments[visit % count][index].wait
        if (
            wait is None
            or visit // count * count + wait - (0 if wait < visit % count else count) < feeder._released
        ):
            return False
        if not pieces:
            return True
        owner = feeder._owner[pieces[feeder._claimed % len(pieces)].slot]
        return (
            feeder._claimed == sum(turn + 1 for turn in feeder._landed)
            and owner >= 0
            and feeder._after(owner) > feeder._place
        )


# ---- interrupts

AT_ONCE = Shape((3, 7, 5, 1, 6), "shshs", 9, piece=3, slots=2)
CALLS = {
    "take": (None, 2),
    "take what is far ahead": (None, 4),
    "take anew": (None, 0),
    "take the next, unreleased": (2, 3),
    "take anew, unreleased": (2, 0),
    "release": (2, None),
}
"""By name: the group in use, and the one that is then taken; None: the former is released."""


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("threads", "anew"), [(True, 0), (False, 3)], ids=["threads", "at_once"])
def test_an_interrupt_anywhere_in_take_and_release_does_no_harm(name: str, threads: bool, anew: int) -> None:
    """Afterwards groups are taken from number `anew` on, and all is as ever; nothing hangs, also not on
    closing."""
    used, taken = CALLS[name]
    shape, place, interrupted = AT_ONCE, len(name) % STRIDE, True
    while interrupted:
        world = World(
            shape,
            Gates(delay=random_delays(place, longest=3e-4)),
            compute=None if threads else CallerStream(),
        ).load()
        for group in [*shape.order, *shape.order[:2]]:
            world.use(group)
        if used is not None:
            world.take(shape.order[used])
        take, release = world.weights.take, world.weights.release
        call = (
            partial(release, shape.order[used or 0]) if taken is None else partial(take, shape.order[taken])
        )
        interrupted = cut_short(call, place, ("penstock", "threading"))
        uses = partial(use_all, world, [*shape.order[anew:], *shape.order * 2])
        assert within(LONG, uses)
        assert world.wrong() == []
        assert within(LONG, world.close)
        place += STRIDE
    assert place > 15


def use_all(world: World, groups: Sequence[GroupId]) -> None:
    for group in groups:
        world.use(group)


def test_what_a_run_must_wait_for_is_waited_for_though_it_is_passed_over() -> None:
    """The third run has no wait of its own for the first: it comes behind the second, which has one."""
    shape = Shape((10, 4, 6), "hhh", 10)
    assert not shape.placement().device_ring.runs[2].waits
    gates = Gates([("kernel", 0)])
    with World(shape, gates) as world:
        world.take(shape.order[0])
        world.take(shape.order[2])
        assert not gates.passes(("copy", (2, 0), 0), BRIEF)
        gates.open()
        assert world.wrong() == []
