"""Experts that come and go: whatever the routing, the rings and what is late, the right bytes; and each wait
is needed for it."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from expert_worlds import ROOMS, SIZE, WIDE, World, every, expert, routed
from penstock.arch.layout import GroupId
from penstock.base.errors import CheckpointError
from penstock.base.tiers import Tier
from penstock.base.trace import Trace
from penstock.bench.routing.policies import Room, Today
from penstock.memory.streams import CallerStream, Ticket
from penstock.weights.streaming import experts as module
from penstock.weights.streaming.experts import Experts
from streams import (
    BRIEF,
    LONG,
    OURS_AND_LOCKS,
    STRIDE,
    Gates,
    content,
    cut_short,
    everywhere,
    no_thread_left,
    random_delays,
    within,
)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges begin after a few passes."""
    monkeypatch.setattr(module, "REVIEW", 3)
    monkeypatch.setattr(module, "FADE", 7)


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("late", ["nothing", "copy", "kernel", "read", 1, 2])
def test_every_kernel_sees_its_expert(room: tuple[int, int, int, int], late: str | int) -> None:
    rng = np.random.default_rng(len(str(late)))
    with (
        no_thread_left(),
        World(room, Gates(delay=every(late) if isinstance(late, str) else random_delays(late))) as world,
    ):
        for _ in range(12):
            for layer in range(3):
                world.layer(routed(rng, layer, skew=0.8))
        assert world.wrong() == []
        world.check()


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("seed", range(3))
def test_layers_may_be_broken_off_and_experts_taken_unexpectedly(
    room: tuple[int, int, int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    with World(room, Gates(delay=random_delays(seed, longest=1e-3))) as world:
        layer = 0
        for _ in range(50):
            ids = routed(rng, layer, skew=0.5)
            world.experts.expect(ids)
            if rng.random() < 0.2:
                ids = [id for id in reversed(world.ids) if id.layer == layer]
            for id in ids:
                world.take(id)
                if rng.random() < 0.1:
                    break
                world.experts.release(id)
            layer = int(rng.integers(3)) if rng.random() < 0.3 else (layer + 1) % 3
        assert world.wrong() == []
        world.check()


@pytest.mark.parametrize("name", [name for name, room in ROOMS.items() if room[0]])
def test_favourites_move_to_the_device(name: str) -> None:
    """As many experts as stay there are used again and again, the others now and then. They never take the
    place of one of their layer."""
    with World(ROOMS[name]) as world:
        favourites = [id for id in world.ids if world.experts.homes[id].tier is not Tier.DEVICE][
            : world.room[0]
        ]
        rng = np.random.default_rng(0)
        for _ in range(60):
            for layer in range(3):
                world.layer(
                    [id for id in world.ids if id.layer == layer and (id in favourites or rng.random() < 0.1)]
                )
                world.check()
        homes = world.experts.homes
        left = {id for id in favourites if homes[id].tier is not Tier.DEVICE}
        there = {id for id in world.ids if homes[id].tier is Tier.DEVICE} - set(favourites)
        assert len({id.layer for id in left | there}) <= 1
        assert len(left) < len(favourites)
        assert world.wrong() == []
        before = world.experts.copied_bytes
        for layer in range(3):
            world.layer([id for id in favourites if id.layer == layer and id not in left])
        assert world.experts.copied_bytes == before


def test_favourites_move_from_disk_to_host() -> None:
    with World((0, 4, 2, 4)) as world:
        favourites = [id for id in world.ids if world.experts.homes[id].tier is Tier.DISK][:4]
        for _ in range(12):
            for layer in range(3):
                world.layer([id for id in favourites if id.layer == layer])
                world.check()
        assert all(world.experts.homes[id].tier is Tier.HOST for id in favourites)
        assert world.wrong() == []


def test_reads_and_copies_are_counted() -> None:
    with World(ROOMS["disk"]) as world:
        for _ in range(3):
            world.every()
        assert world.experts.copied_bytes == world.experts.read_bytes == 3 * 12 * SIZE


# ---- in waves


@pytest.mark.parametrize(
    "room", [*ROOMS.values(), *WIDE.values()], ids=[*ROOMS, *(f"wide, {name}" for name in WIDE)]
)
@pytest.mark.parametrize("late", ["nothing", "copy", "kernel", "read", 1, 2])
def test_every_kernel_of_a_wave_sees_its_expert(room: tuple[int, int, int, int], late: str | int) -> None:
    """With exchanges, which `check` finds done."""
    rng = np.random.default_rng(len(str(late)))
    with (
        no_thread_left(),
        World(room, Gates(delay=every(late) if isinstance(late, str) else random_delays(late))) as world,
    ):
        first = list(world.experts.homes.items())
        for _ in range(12):
            for layer in range(3):
                world.waves(routed(rng, layer, skew=0.8))
        assert world.wrong() == []
        world.check()
        assert not room[0] or list(world.experts.homes.items()) != first


@pytest.mark.parametrize("room", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("seed", range(3))
def test_waves_may_be_broken_off(room: tuple[int, int, int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    with World(room, Gates(delay=random_delays(seed, longest=1e-3))) as world:
        for turn in range(60):
            ids = routed(rng, turn % 3, skew=0.5)
            (world.waves if rng.random() < 0.8 else lambda ids, _: world.layer(ids))(
                ids, lambda: bool(rng.random() < 0.05)
            )
        assert world.wrong() == []
        world.check()


@pytest.mark.parametrize(
    "room", [*ROOMS.values(), *WIDE.values()], ids=[*ROOMS, *(f"wide, {name}" for name in WIDE)]
)
def test_the_next_wave_comes_while_one_is_computed(room: tuple[int, int, int, int]) -> None:
    """Those that stay come first and count for nothing, then those on HOST, as many at a time as leave the
    next as many slots, and those from DISK, which are read meanwhile."""
    on_device, _, ring, host_ring = room
    with World(room, each=12, layers=1) as world:
        experts = world.experts
        waves = []
        here, near, far = (
            [id for id in world.ids if experts.homes[id].tier is tier]
            for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)
        )
        left = [*near, *far]
        for wave in experts.waves(world.ids):
            waves.append(list(wave))
            held = {id for id in wave if experts.homes[id].tier is not Tier.DEVICE}
            assert held <= experts._coming.keys()
            left = [id for id in left if id not in wave]
            if held and left and ring > 1 and host_ring != 1:
                assert left[0] in experts._coming
            experts.take_wave(wave)
            experts.release_wave(wave)
        assert (waves.pop(0) if on_device else []) == here
        assert [id for wave in waves for id in wave] == [*near, *far]
        assert max(map(len, waves)) <= max(1, ring // 2)
        for wave in waves:
            assert sum(experts.homes[id].tier is Tier.DISK for id in wave) <= max(1, host_ring // 2)
        if not host_ring:
            assert len(waves[0]) == max(1, ring // 2)


def test_an_exchange_that_was_broken_off_is_finished_before_anything_is_expected() -> None:
    with World(ROOMS["host"]) as world:
        experts = world.experts
        newcomer, resident = (
            next(id for id in world.ids if experts.homes[id].tier is tier and id.layer == layer)
            for tier, layer in ((Tier.HOST, 0), (Tier.DEVICE, 1))
        )
        experts._used[newcomer] = 100
        experts._least[Tier.DEVICE] = [resident]
        experts.expect([newcomer])
        world.take(newcomer)
        finish, experts._finish_exchange = (
            experts._finish_exchange,
            lambda: (_ for _ in ()).throw(KeyboardInterrupt),
        )  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            experts.release(newcomer)
        experts._finish_exchange = finish  # type: ignore[method-assign]
        experts.expect([])
        assert experts.homes[resident].tier is Tier.HOST
        world.check()


# ---- without one of its waits


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
def test_a_copy_must_wait_for_the_kernel_on_what_it_writes_over(room: tuple[int, int, int, int]) -> None:
    def right(mutant: bool) -> bool:
        gates = Gates([("kernel", 0)])
        with World(room, gates) as world:
            first, *rest = [
                id for id in world.ids if world.experts.homes[id].tier is not Tier.DEVICE and id.layer == 0
            ]
            slot = world.device.data_ptr()
            ids = [first, *rest, *([first] if len(rest) < room[2] else [])]
            world.experts.expect([first])
            view = world.take(first)
            slot = "device", (view.data_ptr() - world.device.data_ptr()) // SIZE
            world.copies.never_waits = slot if mutant else None
            world.experts.release(first)
            host = threading.Thread(target=partial(world.layer, (ids * 3)[1:]))
            host.start()
            assert gates.passes(("copy", slot, 1), LONG if mutant else BRIEF) == mutant
            gates.open()
            host.join()
            return not world.wrong()

    assert right(mutant=False)
    assert not right(mutant=True)


@pytest.mark.parametrize("waves", [False, True])
@pytest.mark.parametrize(
    "name", ["host", "all tiers", "all tiers, rings of one", "disk, the larger host ring"]
)
def test_a_slot_that_is_given_up_must_not_be_written_over_while_its_expert_is_used(
    name: str, waves: bool
) -> None:
    """A newcomer stays in the slot it came in, and the next one comes to that of whom it has replaced, whose
    kernel still runs."""

    def right(mutant: bool) -> bool:
        gates = Gates([("kernel", 0)])
        with World(ROOMS[name], gates) as world:
            experts = world.experts
            newcomer, *others = [
                id for id in world.ids if experts.homes[id].tier is not Tier.DEVICE and id.layer == 2
            ]
            resident = next(id for id in world.ids if experts.homes[id].tier is Tier.DEVICE and id.layer < 2)
            left = "device", experts.homes[resident].slot
            experts._used[newcomer] = 100
            experts._least[Tier.DEVICE] = [resident]
            world.copies.never_waits = left if mutant else None
            use = world.waves if waves else world.layer
            use([resident])
            use([newcomer])
            assert experts.homes[newcomer].tier is Tier.DEVICE
            host = threading.Thread(target=lambda: [use(others) for _ in range(3)])
            host.start()
            assert gates.passes(("copy", left, 0), LONG if mutant else BRIEF) == mutant
            gates.open()
            host.join()
            world.check()
            return not world.wrong()

    assert right(mutant=False)
    assert not right(mutant=True)


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
def test_arithmetic_must_wait_for_its_copies(room: tuple[int, int, int, int]) -> None:
    def right(mutant: bool) -> bool:
        gates = Gates([("copy", ("device", slot), 0) for slot in range(16)])
        with World(room, gates) as world:
            world.computing.never_waits = 0 if mutant else None
            id = next(id for id in world.ids if world.experts.homes[id].tier is not Tier.DEVICE)
            world.layer([id])
            assert gates.passes(("kernel", 0), LONG if mutant else BRIEF) == mutant
            gates.open()
            return not world.wrong()

    assert right(mutant=False)
    assert not right(mutant=True)


@pytest.mark.parametrize("name", WIDE)
def test_a_wave_must_wait_for_the_last_of_its_copies(name: str) -> None:
    """Those of its experts that come from one tier are copied in their order; the last of them is held."""

    def right(mutant: bool) -> bool:
        gates = Gates()
        with World(WIDE[name], gates, each=12, layers=1) as world:
            experts, tier = world.experts, Tier.DISK if name == "disk" else Tier.HOST
            experts.expect([])
            wave = [id for id in world.ids if experts.homes[id].tier is tier][:2]
            gates.shut(("copy", ("device", experts._ring[1]), 0))
            world.computing.never_waits = 1 if mutant else None
            world.waves(wave)
            assert gates.passes(("kernel", len(wave) - 1), LONG if mutant else BRIEF) == mutant
            gates.open()
            return not world.wrong()

    assert right(mutant=False)
    assert not right(mutant=True)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["host", "disk"])
def test_no_slot_of_a_wave_is_written_over_while_any_of_it_is_computed(name: str, which: int) -> None:
    """A kernel of the first wave is held, and so are all that come to its slot. There are more experts than
    slots."""

    class Early(Experts):
        """Leaves its marks when a wave has been taken, not when it has been computed."""

        def take_wave(self, ids: Sequence[GroupId]) -> None:
            super().take_wave(ids)
            mark = self._compute.mark()
            self.marks = {self._coming[id].slot: mark for id in ids if id in self._coming}

        def _fetch(self) -> None:
            for slot, mark in getattr(self, "marks", {}).items():
                self._done[slot] = mark
            super()._fetch()

    def right(experts_class: type[Experts]) -> bool:
        early, gates = experts_class is Early, Gates([("kernel", which)])
        with World(WIDE[name], gates, each=12, layers=1, experts_class=experts_class) as world:
            world.experts.expect([])
            slot = "device", world.experts._ring[which]
            host = threading.Thread(target=world.waves, args=(world.ids,))
            host.start()
            assert gates.passes(("copy", slot, 1), LONG if early else BRIEF) == early
            gates.open()
            host.join()
            return not world.wrong()

    assert right(Experts)
    assert not right(Early)


@pytest.mark.parametrize(
    "room",
    [room for room in ROOMS.values() if room[3]],
    ids=[name for name, room in ROOMS.items() if room[3]],
)
def test_a_copy_must_wait_until_its_expert_has_been_read(room: tuple[int, int, int, int]) -> None:
    class Hasty(Experts):
        def _bring(self, id: GroupId, coming: module._Arrival) -> Ticket:
            coming.reads = []
            return super()._bring(id, coming)

    def right(experts: type[Experts]) -> bool:
        world = World(room, experts_class=experts)
        gates = world.gates
        id = next(id for id in world.ids if world.experts.homes[id].tier is Tier.DISK)
        gates.shut(("read", str(id), 0, 0))
        with world:
            host = threading.Thread(target=world.layer, args=([id],))
            host.start()
            assert gates.passes(("kernel", 0), LONG if experts is Hasty else BRIEF) == (experts is Hasty)
            gates.open()
            host.join()
            return not world.wrong()

    assert right(Experts)
    assert not right(Hasty)


@pytest.mark.parametrize(
    "room",
    [room for room in ROOMS.values() if room[3]],
    ids=[name for name, room in ROOMS.items() if room[3]],
)
def test_a_read_must_wait_until_its_slot_has_been_copied(room: tuple[int, int, int, int]) -> None:
    """Copies are held; what is read next comes to the same slot of the host ring."""

    def right(mutant: bool) -> bool:
        gates = Gates([("copy", ("device", slot), 0) for slot in range(16)])
        with World(room, gates) as world:
            world.copies.blind = mutant
            ids = [id for id in world.ids if world.experts.homes[id].tier is Tier.DISK]
            # As many one after another as the ring has slots, and one more.
            alone = ids[: room[3] + 1]
            last = "read", str(alone[-1]), 0, 0
            host = threading.Thread(target=lambda: [world.layer([id]) for id in alone])
            host.start()
            assert gates.passes(last, LONG if mutant else BRIEF) == mutant
            gates.open()
            host.join()
            return not world.wrong()

    assert right(mutant=False)
    assert not right(mutant=True)


def test_a_read_must_wait_until_a_host_home_that_was_given_up_has_been_copied() -> None:
    """Who stayed on HOST came to the device a moment ago, and gives its place to one from DISK; the next is
    read into it."""

    def right(mutant: bool) -> bool:
        gates = Gates()
        with World((0, 1, 4, 1), gates) as world:
            experts = world.experts
            experts.expect([])
            stays = next(id for id in world.ids if experts.homes[id].tier is Tier.HOST)
            home = experts.homes[stays].slot
            newcomer, second = [
                id for id in world.ids if experts.homes[id].tier is Tier.DISK and id.layer != stays.layer
            ][:2]
            experts._used[newcomer] = 100
            experts._least[Tier.HOST] = [stays]
            gates.shut(("copy", ("device", experts._ring[0]), 0))
            world.copies.blind = mutant

            def work() -> None:
                for id in (stays, newcomer, second):
                    world.layer([id])

            host = threading.Thread(target=work)
            host.start()
            assert gates.passes(("read", str(second), 0, 0), LONG if mutant else BRIEF) == mutant
            gates.open()
            host.join()
            assert experts.homes[newcomer].tier is Tier.HOST
            assert world.host_ring == [home]
            return not world.wrong()

    assert right(mutant=False)
    assert not right(mutant=True)


# ---- interrupts, and what readers meet


def prepared(room: tuple[int, int, int, int], *, threads: bool, seed: int) -> World:
    """On its way, with exchanges at hand on both tiers."""
    world = World(
        room, Gates(delay=random_delays(seed, longest=3e-4)), compute=None if threads else CallerStream()
    )
    for layer in range(2):
        world.layer([expert(layer, 0), expert(layer, 3)])
    experts = world.experts
    experts._used.update(dict.fromkeys((id for id in world.ids if id.layer == 2), 100))
    for tier, least in experts._least.items():
        least[:] = [id for id, home in experts.homes.items() if home.tier is tier]
    return world


STRUCK = (
    "expect",
    "expect anew",
    "take",
    "take unexpectedly",
    "release",
    "take a wave",
    "release a wave",
)
STRUCK_ROOMS = (
    ("host", True),
    ("host", False),
    ("all tiers", True),
    ("all tiers, the larger host ring", False),
    ("disk", True),
    ("wide, all tiers", True),
)


@pytest.mark.parametrize(
    ("room", "threads", "name"),
    [
        (*room, name)
        for turn, room in enumerate(STRUCK_ROOMS)
        for other, name in enumerate(STRUCK)
        if STRIDE == 1 or (turn + other) % 2
    ],
)
def test_an_interrupt_anywhere_does_no_harm(room: str, name: str, threads: bool) -> None:
    """Places in which an interrupt can strike, and a second one where the first is being mended."""
    place, interrupted = len(room + name) % STRIDE, True
    while interrupted:
        world = prepared(
            WIDE[room[6:]] if room.startswith("wide, ") else ROOMS[room], threads=threads, seed=place
        )
        experts = world.experts
        ids = [expert(2, number) for number in range(4)]
        away = next(id for id in ids if experts.homes[id].tier is not Tier.DEVICE)
        call: Callable[[], object] = partial(experts.expect, ids)
        if name != "expect":
            experts.expect(ids)
        if name == "expect anew":
            world.take(ids[0])
        elif name == "take":
            call = partial(experts.take, away)
        elif name == "take unexpectedly":
            call = partial(experts.take, expert(1, 1))
        elif name == "release":
            for id in ids[: ids.index(away)]:
                world.take(id)
                experts.release(id)
            world.take(away)
            call = partial(experts.release, away)
        elif "wave" in name:
            wave = next(wave for wave in experts.waves(ids) if experts.homes[wave[0]].tier is not Tier.DEVICE)
            call = partial(experts.take_wave, wave)
            if name == "release a wave":
                call()
                call = partial(experts.release_wave, wave)
        interrupted = cut_short(call, place, OURS_AND_LOCKS)
        cut_short(partial(experts.expect, [expert(0, 1)]), place % 23, OURS_AND_LOCKS)
        try:
            assert within(LONG, world.every)
            assert within(LONG, world.check)
            assert world.wrong() == []
        finally:
            assert within(LONG, world.close)
        place += STRIDE
    assert place > 3


def test_a_read_that_an_interrupt_has_left_behind_harms_nobody() -> None:
    """It is held until another expert has been read into its slot, if that can be; the copy of that one comes
    after both."""
    place, interrupted = 0, True
    while interrupted:
        gates, copied = Gates(), Gates([("copy", ("device", 0), 0)])
        with World((0, 0, 1, 1), gates) as world:
            world.copies.gates = copied
            world.experts.expect([])
            first, second = world.ids[:2]
            gates.shut(("read", str(first), 0, 0))
            interrupted = cut_short(partial(world.experts.expect, [first]), place, OURS_AND_LOCKS)
            host = threading.Thread(target=world.layer, args=([second],))
            host.start()
            gates.passes(("read", str(second), 0, 0), BRIEF)
            gates.open()
            if world.store.reads[first, 0]:
                assert gates.passes(("read", str(first), 0, 0))
            copied.open()
            host.join()
            assert world.wrong() == []
        place += 1


def test_close_at_any_moment() -> None:
    ids = [expert(0, number) for number in range(4)]
    for moment in range(14):
        with no_thread_left():
            world = World(ROOMS["disk"], Gates(delay=random_delays(moment, longest=3e-3)))
            world.every()
            world.experts.expect(ids)
            steps = [
                step for id in ids for step in (partial(world.take, id), partial(world.experts.release, id))
            ]
            for step in steps[:moment]:
                step()
            assert within(LONG, world.close)


def test_an_interrupt_anywhere_in_closing_does_no_harm() -> None:
    """Closing again ends what is left."""

    def strike(where: int) -> bool:
        with no_thread_left(), World(ROOMS["disk"], Gates(delay=random_delays(where, longest=5e-4))) as world:
            world.experts.expect(world.ids[:4])
            struck: bool = cut_short(world.experts.close, where, OURS_AND_LOCKS)
            assert within(LONG, world.experts.close)
            reads = world.experts._reads
            assert reads is not None
            assert all(task.done for one in reads._under_way.values() for task in one.tasks)
        return struck

    assert everywhere(strike) > 20


def test_what_a_reader_meets_is_raised_where_the_expert_is_taken() -> None:
    with no_thread_left(), World(ROOMS["disk"]) as world:
        world.every()
        damaged = expert(1, 2)
        world.store.faults = {(damaged, 0): CheckpointError(f"{damaged} is damaged")}
        for _ in range(3):
            with pytest.raises(CheckpointError, match=r"expert\.1\.2 is damaged"):
                world.every()
        assert world.wrong() == []


def test_an_expert_is_checked_until_it_has_been_read_whole_once() -> None:
    """A read whose end nobody saw, because the layer was broken off, has proved nothing."""
    with World(ROOMS["disk, rings of one"]) as world:
        first, second = world.ids[:2]
        world.store.faults = {(first, 0): CheckpointError("damaged")}
        world.experts.expect([first])
        until = time.monotonic() + LONG
        while not world.store.reads[first, 0]:
            assert time.monotonic() < until
        world.layer([second])
        with pytest.raises(CheckpointError, match="damaged"):
            world.layer([first])
        world.store.faults = {}
        for _ in range(3):
            world.layer([first])
        assert (world.store.reads[first, 0], world.store.unchecked[first, 0]) == (5, 2)


def test_a_use_that_was_broken_off_does_not_hold_up_the_accounts() -> None:
    with World(ROOMS["disk"], trace=Trace()) as world:
        world.experts.expect(world.ids[:1])
        world.take(world.ids[0])
        for _ in range(100):
            world.every()
        world.computing.mark().wait()
        world.waits.stalled()
        assert not world.waits._uses


def test_an_expert_that_is_still_to_be_used_stays() -> None:
    """Though it is used least, and one of its layer that came is used most."""
    with World(ROOMS["host"]) as world:
        experts = world.experts
        resident = next(id for id in world.ids if experts.homes[id].tier is Tier.DEVICE)
        newcomer = next(
            id for id in world.ids if experts.homes[id].tier is Tier.HOST and id.layer == resident.layer
        )
        experts._used[newcomer] = 100
        experts._least[Tier.DEVICE] = [resident]
        world.layer([newcomer, resident])
        assert experts.homes[resident].tier is Tier.DEVICE
        assert experts.copied_bytes == SIZE
        assert world.wrong() == []


def test_the_ring_is_lent_behind_all_copies() -> None:
    """What a pass that was broken off has left on its way, too."""
    gates = Gates([("copy", ("device", 4), 0)])
    world = World((4, 8, 2, 0), gates)
    experts = world.experts
    one = next(id for id in world.ids if experts.homes[id].tier is Tier.HOST)
    assert experts.ring_slots == 2
    experts.expect([one])
    experts.lend_ring()
    world.computing.kernel(0, one, world.device[4])
    try:
        assert not gates.passes(("kernel", 0), BRIEF)
    finally:
        gates.open()
    assert gates.passes(("kernel", 0))
    assert np.array_equal(world.computing.seen[0][1], content(one, 0, SIZE))
    world.close()


def test_the_ring_is_taken_back_behind_all_that_was_computed() -> None:
    gates = Gates([("kernel", 0)])
    world = World((4, 8, 2, 0), gates)
    experts = world.experts
    one = next(id for id in world.ids if experts.homes[id].tier is Tier.HOST)
    experts.lend_ring()
    world.device[4].fill_(7)
    world.computing.kernel(0, one, world.device[4])
    experts.take_ring_back()
    experts.expect([one])
    try:
        assert not gates.passes(("copy", ("device", 4), 0), BRIEF)
    finally:
        gates.open()
    world.expected.clear()
    assert gates.passes(("copy", ("device", 4), 0))
    assert (world.computing.seen[0][1] == 7).all()
    world.close()


@pytest.mark.parametrize("seed", range(3))
def test_the_replay_of_this_policy_hits_as_often_as_it_does(seed: int) -> None:
    rng, room = np.random.default_rng(seed), (6, 18, 2, 0)
    world = World(room, layers=3, each=8)
    replayed = Today(Room(3, 8, room[0]))
    found = 0
    with world:
        for _ in range(60):
            for layer in range(3):
                asked = np.unique((rng.zipf(1.5, size=3) * (layer + 3)) % 8)
                ids = [expert(layer, int(number)) for number in asked]
                hits = sum(world.experts.homes[id].tier is Tier.DEVICE for id in ids)
                world.layer(ids)
                assert replayed.step(layer, asked) == hits
                found += hits
        assert world.experts.returned_bytes > 0
        assert found > 0
