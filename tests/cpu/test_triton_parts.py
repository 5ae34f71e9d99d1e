"""Experts are computed while others come: the link and the arithmetic are threads here, as late as may be."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import bounds
from penstock.arch.layout import GroupId, GroupKind, MixtureLayout
from penstock.memory.streams import CallerStream, ThreadStream, Ticket
from penstock.models import moe
from penstock.ops import experts
from penstock.ops.slots import ExpertParts, Places, SlotArrays
from penstock.ops.triton import experts as triton_experts
from penstock.ops.triton import few_bits_experts
from penstock.ops.triton import routing as triton_routing
from penstock.ops.triton import slots as triton_slots
from penstock.weights.streaming.experts import Experts
from penstock.weights.streaming.residency import ExpertRoom
from penstock.weights.streaming.slots import SlotRule
from penstock.weights.streaming.slotted import SlotExperts
from penstock.weights.streaming.waits import StreamWaits
from slot_chains import SlotChain
from streams import Gates, Store, layout

SIZE, LAYERS, EXPERTS = 64, 2, 8
LATE = 0.004
"""Seconds by which work is late."""


class Queue(ThreadStream):
    """Waits of one kind do nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.kind, self.never = "", ""

    def wait(self, ticket: Ticket) -> None:
        if not self.never or self.kind != self.never:
            super().wait(ticket)


class World:
    """Layers of experts, some in slots. What computes with an expert compares its bytes, as does what is late
    with it."""

    def __init__(self, slots: int, ring: int, delay: Callable[[str], float]) -> None:
        ids = [GroupId(GroupKind.EXPERT, at // EXPERTS, at % EXPERTS) for at in range(LAYERS * EXPERTS)]
        layouts, mixtures = (
            [layout(id, SIZE) for id in ids],
            dict.fromkeys(range(LAYERS), MixtureLayout(EXPERTS, None)),
        )
        self.ids, self.delay, self.right = ids, delay, list[bool]()
        self.host = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (len(ids), SIZE), np.uint8))
        self.memory = torch.zeros(slots + ring, SIZE, dtype=torch.uint8)
        self.link, self.compute, self.copies = Queue("link"), Queue("compute"), Queue("copies")
        room = ExpertRoom(SIZE, len(ids), 0, len(ids), ring, slots=slots, copies=True)
        self.ring = Experts(
            layouts, room, self.memory[slots:], self.host, Store(Gates()), self.copies, self.compute,
            StreamWaits(None),
        )  # fmt: skip
        streams = self.link, self.compute
        self.experts = SlotExperts(
            layouts, mixtures, self.ring, self.memory, self.host, streams, SlotRule(1.0, 0.0)
        )
        self.left = -1
        """Fetches until one is broken off."""

    def fetch(self, parts: ExpertParts, places: Places, host: int, part: int) -> None:
        """In place of the kernel: the interpreter has one thread."""
        layer = (host - self.host.data_ptr()) // (SIZE * EXPERTS)
        start, stop = parts.starts[part : part + 2].tolist()
        for expert, place in parts.coming[:, start:stop].T.tolist():
            time.sleep(self.delay("fetch"))
            row = self.host[layer * EXPERTS + expert]
            self.memory[place, : SIZE // 2] = row[: SIZE // 2]
            time.sleep(self.delay("fetch"))
            self.memory[place, SIZE // 2 :] = row[SIZE // 2 :]

    def kernel(self, layer: int, table: torch.Tensor) -> None:
        def work() -> None:
            for expert, (address, *_) in enumerate(table.tolist()):
                if address:
                    place = (address - self.memory.data_ptr()) // SIZE
                    for _ in range(2):
                        self.right.append(
                            torch.equal(self.memory[place], self.host[layer * EXPERTS + expert])
                        )
                        time.sleep(self.delay("kernel"))

        self.compute.run(work)

    def layer(self, layer: int, chosen: set[int], never: str = "") -> None:
        self.link.never = self.compute.never = never
        self.link.kind = "behind the decision"
        pairs = torch.tensor([one in chosen for one in range(EXPERTS)]).int()
        parts = self.experts.parts(layer, pairs, len(chosen))
        assert parts is not None
        self.link.kind, self.compute.kind = "behind what was computed", "behind the fetch"
        for table in parts:
            self.kernel(layer, table)

    def host_decides(self, layer: int) -> None:
        for _, table in self.experts.waves([id for id in self.ids if id.layer == layer]):
            self.kernel(layer, table)

    def all_right(self) -> bool:
        self.compute.mark().wait()
        return all(self.right)


@contextmanager
def world(slots: int, ring: int, **late: float) -> Iterator[World]:
    made = World(slots, ring, lambda kind: late.get(kind, 0.0))
    try:
        with patch.object(triton_slots, "fetch", made.fetch):
            yield made
    finally:
        for stream in (made.link, made.compute, made.copies):
            stream.close()
        made.ring.close()


@pytest.mark.parametrize("late", ["fetch", "kernel", "both", "some"])
@pytest.mark.parametrize(("slots", "ring"), [(0, 2), (4, 2), (7, 3), (6, 8)])
def test_whatever_is_late(slots: int, ring: int, late: str) -> None:
    rng = np.random.default_rng(slots + ring)
    with world(slots, ring) as made:
        made.delay = lambda kind: (
            LATE / 8 * (late in (kind, "both") or (late == "some" and rng.random() < 0.2))
        )
        for step in range(5):
            for layer in range(LAYERS):
                if step == 3:
                    made.host_decides(layer)
                made.layer(layer, set(rng.permutation(EXPERTS)[: rng.integers(1, 7)].tolist()))
        assert made.all_right()
        assert made.experts.counts(exact=True).asked > 0


@pytest.mark.parametrize(
    ("never", "late"),
    [
        ("behind the decision", "kernel"),
        ("behind what was computed", "kernel"),
        ("behind the fetch", "fetch"),
    ],
)
def test_every_wait_is_needed(never: str, late: str) -> None:
    def all_right(removed: str, longer: int = 1) -> bool:
        with world(2, 2, **{late: LATE * longer}) as made:
            for chosen in ({0, 1, 2, 3, 4}, {3, 4, 5, 6, 7}):
                for layer in range(LAYERS):
                    made.layer(layer, chosen, removed)
            return made.all_right()

    assert all_right("")
    # On a busy machine what is late may be in time, by chance.
    assert not all(all_right(never, longer) for longer in (1, 1, 2, 4, 8, 16, 32))


def test_what_was_fetched_when_a_step_was_broken_off_is_waited_for() -> None:
    """The copy engine brings experts to the ring, where a late fetch would be."""
    for removed in ("", "broken off"):
        with world(2, 2, fetch=2 * LATE, kernel=LATE) as made:
            assert made.experts.parts(0, torch.ones(EXPERTS, dtype=torch.int32), EXPERTS) is not None
            made.compute.kind, made.compute.never = "broken off", removed
            take_back = made.ring.take_ring_back

            def noted(made: World = made, take_back: Callable[[], None] = take_back) -> None:
                made.compute.kind = ""
                take_back()

            with patch.object(made.ring, "take_ring_back", noted):
                made.host_decides(1)
            assert made.all_right() == (not removed)


def test_what_does_not_wait_is_computed_while_experts_come() -> None:
    """What is queued before the first table is asked for, and those in slots, where a single one comes."""
    with world(4, 8) as made:
        made.layer(0, {0, 1})
        assert made.all_right()
        gates = Gates(["fetch"])
        made.delay = lambda kind: gates.enter(kind) or 0.0
        parts = made.experts.parts(0, torch.tensor([1, 1, 1, 0, 0, 0, 0, 0]).int(), 3)
        assert parts is not None
        made.compute.mark().wait()
        made.kernel(0, next(parts))
        assert made.all_right()
        assert len(made.right) == 8
        gates.open()
        for table in parts:
            made.kernel(0, table)
        assert made.all_right()
        assert len(made.right) == 10


@pytest.mark.parametrize(
    ("ring", "most", "parts"),
    [
        (8, 1, (1, 8)),
        (8, 4, (2, 4)),
        (8, 8, (2, 2)),
        (8, 64, (16, 2)),
        (7, 64, (22, 2)),
        (2, 4, (4, 2)),
        (1, 2, (2, 1)),
    ],
)
def test_parts_are_few_and_leave_half_of_the_ring(ring: int, most: int, parts: tuple[int, int]) -> None:
    """How many there are, and how many of them the ring holds at once."""
    assert Places(0, 0, ring, 0, 64, torch.zeros(1)).parts(most) == parts


class Noted(CallerStream):
    """Does all at once, and notes marks and waits in one list with what is launched."""

    def __init__(self, name: str, order: list[object]) -> None:
        self.name, self.order = name, order

    def mark(self) -> Ticket:
        self.order.append(("mark", self.name, ticket := super().mark()))
        return ticket

    def wait(self, ticket: Ticket) -> None:
        self.order.append(("wait", self.name, ticket))


@contextmanager
def noted() -> Iterator[tuple[SlotExperts, list[object]]]:
    """Experts that look ahead, and what is queued, in order: names of kernels, marks, waits. Nothing is
    fetched."""

    def note(name: str, *given: object) -> object:
        order.append(name)
        return kernels[name](*given) if name in ("expert_step", "foretell") else None

    order = list[object]()
    kernels = {
        name: getattr(triton_slots, name) for name in ("expert_step", "foretell", "fetch", "fetch_ahead")
    }
    with world(2, 4) as made, ExitStack() as patched:
        made.experts._link, made.experts._compute = Noted("link", order), Noted("compute", order)
        made.experts.look_ahead()
        for name in kernels:
            patched.enter_context(patch.object(triton_slots, name, partial(note, name)))
        yield made.experts, order


def decided(experts: SlotExperts, layer: int) -> None:
    """About a layer that asks for all, and foretells one of the next."""
    parts = experts.parts(layer, torch.ones(EXPERTS, dtype=torch.int32), EXPERTS)
    assert parts is not None
    if (following := experts.foretells(layer, EXPERTS)) is not None:
        experts.foretell(following, torch.rand(1, EXPERTS), EXPERTS, None)
    list(parts)


def test_what_comes_ahead_is_queued_behind_all_parts_and_what_was_foretold() -> None:
    """And nothing that is computed waits for it before the next layer has decided."""
    with noted() as (experts, order):
        for layer in range(LAYERS):
            decided(experts, layer)
        steps = [at for at, one in enumerate(order) if one == "expert_step"]
        first, second = order[: steps[1] + 1], order[steps[1] + 1 :]
        at, (_, _, told) = first.index("fetch_ahead"), first[first.index("foretell") + 1]
        assert first[at - 1] == ("wait", "link", told)
        assert "fetch" not in first[at:]
        assert [one for one in first[at:] if one[:2] == ("mark", "link")] == []
        assert "fetch_ahead" not in second, "the last layer foretells nothing"


def test_a_recorded_step_waits_for_what_comes_ahead() -> None:
    with noted() as (experts, order):
        decided(experts, 0)
        assert "fetch_ahead" in order
        order.clear()
        experts.begin_recorded()
        (what, stream, ticket), after = order
        assert (what, stream) == ("mark", "link")
        assert after == ("wait", "compute", ticket)
        experts.begin_recorded()
        assert len(order) == 2, "there is nothing more to wait for"
        decided(experts, 0)
        decided(experts, 1)
        order.clear()
        experts.begin_recorded()
        assert not order


def test_the_host_waits_for_what_comes_ahead_and_it_is_foretold_no_more() -> None:
    """The host brings experts to the place where that came, and the device decides about the same layer."""
    for removed in ("", "before the host"):
        with world(2, 4, fetch=4 * LATE, kernel=LATE) as made:
            made.experts.look_ahead()

            def late(arrays: SlotArrays, places: Places, host: int, made: World = made) -> None:
                time.sleep(made.delay("fetch"))
                made.memory[-1] = 0

            with patch.object(triton_slots, "fetch_ahead", late):
                decided(made.experts, 0)
            made.compute.kind, made.compute.never = "before the host", removed
            take_back = made.ring.take_ring_back

            def noted(made: World = made, take_back: Callable[[], None] = take_back) -> None:
                made.compute.kind = ""
                take_back()

            with patch.object(made.ring, "take_ring_back", noted):
                made.host_decides(1)
            assert made.all_right() == (not removed)
            told = made.experts._slot_table.arrays(1).told.tolist()
            assert told[0] >= 0
            assert told[1] != int(made.experts._slot_table.turn)


def test_a_step_of_many_tokens_foretells_nothing() -> None:
    """Nearly all experts come anyway, and each token more makes foretelling longer."""
    with noted() as (experts, _):
        assert experts.foretells(0, EXPERTS) == 1
        assert experts.foretells(0, EXPERTS + 1) is None


def test_experts_of_few_bits_in_slots_compute_what_those_that_rest_do() -> None:
    """Also where some passed through the ring, and others came ahead."""
    stream, sizes = CallerStream(), (2, 5, 2, 64, 64)
    kernels = {"experts": triton_experts, "few_bits_experts": few_bits_experts, "routing": triton_routing}
    with (
        patch.object(experts, "_kernels", lambda device: triton_experts),
        patch.object(experts, "triton_kernels", kernels.get),
    ):
        chain = SlotChain(
            "mxfp4", (stream, stream, stream), device=torch.device("cpu"), sizes=sizes, slots=4, ring=4
        )
        for turn in range(2):
            chain.start.copy_(torch.randn(1, 64, generator=torch.Generator().manual_seed(turn)))
            with bounds.lent(map(bounds.span, (chain.host, chain.memory, chain.resting))):
                assert torch.equal(chain(rests=False), chain(rests=True))
    asked, hits, foretold, _ = chain.experts.snapshots.exact().counts.sum(0).tolist()
    assert asked == 2 * 2 * 2
    assert 0 < hits < asked
    assert foretold > 0


def test_experts_that_come_are_said_to_move() -> None:
    """Not those that rest: what is read of them need not wait."""

    class Mixed:
        def __init__(self) -> None:
            self.noted = list[tuple[int, bool]]()

        def compute(self, table: torch.Tensor, experts: range | None = None, *, moves: bool = False) -> None:
            self.noted.append((int(table), moves))

        def total(self) -> None:
            return None

    tables = [torch.tensor(number) for number in range(3)]
    for rests in (False, True):
        mixed, lent = Mixed(), SimpleNamespace(table=lambda layer, rests=rests: tables[2] if rests else None)
        moe._many_at_a_time(mixed, 0, lent, iter(tables[:2]))  # type: ignore[arg-type]
        assert mixed.noted == ([(2, False)] if rests else [(0, True), (1, True)])
