"""Experts that a device asks for and a thread of the host copies, by interpreted kernels."""

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import bounds
from penstock.arch.layout import GroupId, GroupKind, MixtureLayout
from penstock.base.errors import DeviceError
from penstock.memory.streams import CallerStream
from penstock.ops.native.copier import Copier, CopyCalls
from penstock.ops.native.few_bits import library
from penstock.weights.streaming import copied as copied_module
from penstock.weights.streaming.copied import CopiedExperts
from penstock.weights.streaming.experts import Experts
from penstock.weights.streaming.residency import ExpertRoom
from penstock.weights.streaming.slots import SlotRule
from penstock.weights.streaming.slotted import SlotExperts
from penstock.weights.streaming.waits import StreamWaits
from streams import Gates, Store, layout

if library() is None:
    pytest.skip("there is no C compiler", allow_module_level=True)

SIZE, LAYERS, EXPERTS = 700_000, 3, 8
"""Bytes: two chunks of what comes ahead."""
_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
)
_ENTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_WRITE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)


class Engine:
    """A copy engine copies when it is called, as late as may be, and can refuse."""

    def __init__(self, late: float = 0.0, refuses: int = -1) -> None:
        self.copied, self.late, self.refuses = list[tuple[str, int]](), late, refuses
        self.calls = _ENTER(self.enter), _COPY(self.copy_in), _COPY(self.copy_within), _WRITE(self.write)
        enter, copy_in, within, write = (ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self.calls)
        self.addresses = CopyCalls(enter, copy_in, within, write)

    def enter(self, context: int) -> int:
        return 0

    def copy_in(self, to: int, source: int, size: int, stream: int) -> int:
        time.sleep(self.late)
        if len(self.copied) == self.refuses:
            return 700
        self.copied.append(("in", size))
        ctypes.memmove(to, source, size)
        return 0

    def copy_within(self, to: int, source: int, size: int, stream: int) -> int:
        self.copied.append(("within", size))
        ctypes.memmove(to, source, size)
        return 0

    def write(self, stream: int, at: int, value: int, flags: int) -> int:
        ctypes.c_uint32.from_address(at).value = value
        return 0


class World:
    """Layers of experts, some in slots, and others that are copied; what is computed compares their bytes."""

    def __init__(self, slots: int, ring: int, engine: Engine | None) -> None:
        self.ids = [GroupId(GroupKind.EXPERT, at // EXPERTS, at % EXPERTS) for at in range(LAYERS * EXPERTS)]
        layouts = [layout(id, SIZE) for id in self.ids]
        rng = np.random.default_rng(1)
        self.host = torch.from_numpy(rng.integers(0, 256, (len(self.ids), SIZE), np.uint8))
        self.memory = torch.zeros(slots + ring, SIZE, dtype=torch.uint8)
        self.compute = CallerStream()
        room = ExpertRoom(SIZE, len(self.ids), 0, len(self.ids), ring, slots=slots, copies=True)
        self.ring = Experts(
            layouts, room, self.memory[slots:], self.host, Store(Gates()), self.compute, self.compute,
            StreamWaits(None),
        )  # fmt: skip
        self.copied = CopiedExperts(
            self.host, self.memory, EXPERTS, self.compute, ahead=ring >= 4,
            calls=None if engine is None else engine.addresses,
        )  # fmt: skip
        self.experts = SlotExperts(
            layouts, dict.fromkeys(range(LAYERS), MixtureLayout(EXPERTS, None)), self.ring, self.memory,
            self.host, (self.compute, self.compute), SlotRule(1.0, 0.0), copied=self.copied,
        )  # fmt: skip
        self.experts.look_ahead()

    def layer(self, layer: int, chosen: set[int], told: int = -1, *, recorded: bool = True) -> None:
        """Compute with the experts that are chosen, and foretell one for the next layer."""
        pairs = torch.tensor([one in chosen for one in range(EXPERTS)]).int()
        standing = self.experts.recorded() if recorded else self.experts
        parts = standing.parts(layer, pairs, len(chosen))
        assert parts is not None
        following = standing.foretells(layer, len(chosen))
        if following is not None and told >= 0:
            standing.foretell(following, torch.nn.functional.one_hot(torch.tensor([told]), EXPERTS) * 9.0, 1, None)
            time.sleep(0.02)
        seen = set[int]()
        for table in parts:
            seen |= self.right(layer, table)
        assert seen == chosen

    def right(self, layer: int, table: torch.Tensor) -> set[int]:
        there = {expert for expert, (address, *_) in enumerate(table.tolist()) if address}
        for expert in there:
            place = (int(table[expert, 0]) - self.memory.data_ptr()) // SIZE
            assert torch.equal(self.memory[place], self.host[layer * EXPERTS + expert]), (layer, expert)
        return there


@contextmanager
def world(slots: int, ring: int, engine: Engine | None = None) -> Iterator[World]:
    made = World(slots, ring, engine)
    try:
        with bounds.lent(map(bounds.span, (made.host, made.memory))):
            yield made
    finally:
        made.copied.close()
        made.copied.free()
        made.ring.close()


@pytest.mark.parametrize("late", [None, 0.0, 0.003])
@pytest.mark.parametrize(("slots", "ring"), [(0, 2), (5, 2), (7, 3), (6, 4), (12, 8), (24, 4)])
def test_what_is_asked_for_has_come(slots: int, ring: int, late: float | None) -> None:
    """Few and many of a layer, right and wrong ones foretold, steps that are not recorded between, and the
    host's own."""
    rng = np.random.default_rng(slots + ring)
    engine = None if late is None else Engine(late)
    with world(slots, ring, engine) as made:
        for turn in range(6):
            for layer in range(LAYERS):
                chosen = set(rng.permutation(EXPERTS)[: rng.integers(1, EXPERTS + 1)].tolist())
                made.layer(layer, chosen, int(rng.integers(EXPERTS)), recorded=turn % 3 != 1)
            if turn == 3:
                for layer in range(LAYERS):
                    these = [id for id in made.ids if id.layer == layer]
                    for _, table in made.experts.waves(these):
                        made.right(layer, table)
        made.copied.check()
        asked, hits, _, right = made.experts.snapshots.exact().counts.sum(0).tolist()
        came, ahead = made.copied.copier.brought.tolist()
        assert came > 0
        assert (ahead > 0) == (right > 0)
        assert came <= (asked - hits) * SIZE


def test_what_is_foretold_comes_ahead_and_only_then() -> None:
    """In chunks, to its own place; the rest of it comes when it is asked for, and nothing comes twice."""
    engine = Engine()
    with world(0, 4, engine) as made:
        made.layer(0, {1, 2}, told=5)
        assert engine.copied == [("in", SIZE)] * 2 + [("in", 524_288), ("in", SIZE - 524_288)]
        made.layer(1, {5}, told=3)
        assert engine.copied[4:5] == [("within", SIZE)]
        assert made.copied.copier.brought.tolist() == [3 * SIZE, SIZE]
        before = len(engine.copied)
        made.layer(2, {4})
        assert engine.copied[before:] == [("in", SIZE)]


@pytest.mark.parametrize("refuses", [0, 2])
def test_a_copy_that_is_refused_ends_the_wait(refuses: int) -> None:
    """Also of what is foretold; and what comes later is not waited for, either."""
    engine = Engine(refuses=refuses)
    with world(0, 4, engine) as made:
        with pytest.raises(AssertionError):
            made.layer(0, {1, 2}, told=5)
            made.layer(1, {6, 7})
        with pytest.raises(DeviceError, match="a copy was refused"):
            made.copied.check()


def test_what_is_not_there_is_not_copied() -> None:
    with world(0, 2) as made:
        box, engine = made.copied.requests.box, made.copied.copier
        box.list[:4] = torch.tensor([0, 1, 1, 1])
        box.list[3 + EXPERTS : 5 + EXPERTS] = torch.tensor([LAYERS * EXPERTS, 0])
        box.asked.fill_(1)
        _until(lambda: bool(engine.failed))
        with pytest.raises(DeviceError, match="what was asked for is not there"):
            made.copied.check()


def test_nothing_is_waited_for_when_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied_module, "LIMIT_LOOKS", 200)
    with world(0, 2) as made:
        made.copied.copier.close()
        with pytest.raises(AssertionError):
            made.layer(0, {3})
        with pytest.raises(DeviceError, match="not in time"):
            made.copied.check()


def test_numbers_wrap_around() -> None:
    with world(4, 4) as made:
        made.copied.copier.close()
        for one in (made.copied.requests.asked, made.copied.requests.came, made.copied.requests.box.asked):
            one.fill_(2**31 - 3)
        made.copied.copier = Copier(made.copied.requests, made.host, made.memory, 7, CopyCalls())
        for layer in range(LAYERS):
            made.layer(layer, {layer, layer + 2, layer + 4}, told=layer + 3)
        assert int(made.copied.requests.asked[0]) < 0


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)
