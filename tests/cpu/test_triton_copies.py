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

SIZE, LAYERS, EXPERTS = 4096, 3, 8
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
_ENTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_WRITE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)


class Engine:
    """A copy engine copies when it is called, as late as may be, and can refuse."""

    def __init__(self, late: float = 0.0, refuses: int = -1) -> None:
        self.copied, self.late, self.refuses = 0, late, refuses
        self.calls = _ENTER(self.enter), _COPY(self.copy), _WRITE(self.write)
        self.addresses = CopyCalls(*(ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self.calls))

    def enter(self, context: int) -> int:
        return 0

    def copy(self, to: int, source: int, size: int, stream: int) -> int:
        time.sleep(self.late)
        if self.copied == self.refuses:
            return 700
        self.copied += 1
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
            self.host, self.memory, EXPERTS, self.compute, None if engine is None else engine.addresses
        )
        self.experts = SlotExperts(
            layouts, dict.fromkeys(range(LAYERS), MixtureLayout(EXPERTS, None)), self.ring, self.memory,
            self.host, (self.compute, self.compute), SlotRule(1.0, 0.0), copied=self.copied,
        )  # fmt: skip
        self.experts.look_ahead()

    def layer(self, layer: int, chosen: set[int], *, recorded: bool = True) -> None:
        """Compute with the experts that are chosen, by enough pairs for the copy engine."""
        pairs = torch.tensor([one in chosen for one in range(EXPERTS)]).int()
        parts = (self.experts.recorded() if recorded else self.experts).parts(layer, pairs, 2 * EXPERTS)
        assert parts is not None
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


@pytest.mark.parametrize(
    ("slots", "ring", "late"),
    [(0, 2, None), (5, 2, 0.003), (7, 3, 0.0), (6, 4, None), (12, 8, 0.003), (24, 4, 0.0)],
)
def test_what_is_asked_for_has_come(slots: int, ring: int, late: float | None) -> None:
    """Few and many of a layer, none; steps that are not recorded between, and the host's own."""
    rng, engine = np.random.default_rng(slots + ring), None if late is None else Engine(late)
    with world(slots, ring, engine) as made:
        for turn in range(5):
            for layer in range(LAYERS):
                chosen = set(rng.permutation(EXPERTS)[: rng.integers(1, EXPERTS + 1)].tolist())
                made.layer(layer, chosen, recorded=turn % 3 != 1)
            if turn == 3:
                for layer in range(LAYERS):
                    for _, table in made.experts.waves([id for id in made.ids if id.layer == layer]):
                        made.right(layer, table)
        made.layer(0, {3})
        asked = int(made.copied.requests.asked[0])
        made.layer(0, {3})
        assert (int(made.copied.requests.asked[0]) == asked) == (slots > 0)  # nothing is asked for
        made.copied.check()
        assert engine is None or engine.copied > 0


def test_steps_of_few_pairs_keep_to_kernels() -> None:
    engine = Engine()
    with world(0, 4, engine) as made:
        parts = made.experts.recorded().parts(0, torch.tensor([1, 1] + [0] * 6).int(), 2)
        assert parts is not None
        assert [made.right(0, table) for table in parts] == [{0}, {1}]
        assert made.experts.recorded().foretells(0, 2) == 1
        assert made.experts.recorded().foretells(0, 16) is None
        assert engine.copied == 0


@pytest.mark.parametrize("refuses", [0, 2])
def test_a_copy_that_is_refused_ends_the_wait(refuses: int) -> None:
    """And what comes later is not waited for, either."""
    engine = Engine(refuses=refuses)
    with world(0, 4, engine) as made:
        with pytest.raises(AssertionError):
            made.layer(0, {1, 2, 3, 4})
        with pytest.raises(DeviceError, match="a copy was refused"):
            made.copied.check()


def test_what_is_not_there_is_not_copied() -> None:
    with world(0, 2) as made:
        box, engine = made.copied.requests.box, made.copied.copier
        box.list[:3] = torch.tensor([0, 1, 1])
        box.list[2 + EXPERTS : 4 + EXPERTS] = torch.tensor([LAYERS * EXPERTS, 0])
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
        made.copied.copier = Copier(made.copied.requests, made.host, made.memory, CopyCalls())
        for layer in range(LAYERS):
            made.layer(layer, {layer, layer + 2, layer + 4})
        assert int(made.copied.requests.asked[0]) < 0


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)
