"""Experts that a recorded step asks for, and the copy engine brings."""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from penstock.arch.layout import GroupId, GroupKind, MixtureLayout
from penstock.memory.streams import CudaStream
from penstock.ops.kernels import pdl_launches
from penstock.ops.native.copier import CopyCalls
from penstock.ops.triton import copies as triton_copies
from penstock.weights.streaming.copied import CopiedExperts, driver_calls
from penstock.weights.streaming.experts import Experts
from penstock.weights.streaming.residency import ExpertRoom
from penstock.weights.streaming.slots import SlotRule
from penstock.weights.streaming.slotted import SlotExperts
from penstock.weights.streaming.waits import StreamWaits
from streams import Gates, Store, layout

DEVICE = torch.device("cuda")
SIZE, LAYERS, EXPERTS, LATE = 1 << 20, 3, 16, 2_000_000
"""Bytes; clock cycles, about a millisecond."""
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)


class Late:
    """Calls of the driver for copies come late."""

    def __init__(self, stream: int, late: float) -> None:
        calls = driver_calls(stream)
        self._real, self._late, self._kept = _COPY(calls.copy), late, _COPY(self.copy)
        copy = ctypes.cast(self._kept, ctypes.c_void_p).value or 0
        self.calls = CopyCalls(calls.enter, copy, calls.write, calls.context, stream)

    def copy(self, to: int, source: int, size: int, stream: int) -> int:
        time.sleep(self._late)
        return int(self._real(to, source, size, stream))


class World:
    """Layers of experts, some in slots. What computes with a part compares all its bytes, twice."""

    def __init__(self, slots: int, ring: int, late: float, kernel: int) -> None:
        ids = [GroupId(GroupKind.EXPERT, at // EXPERTS, at % EXPERTS) for at in range(LAYERS * EXPERTS)]
        layouts = [layout(id, SIZE) for id in ids]
        rng = torch.Generator().manual_seed(1)
        self.host = torch.randint(256, (len(ids), SIZE), dtype=torch.uint8, generator=rng).pin_memory()
        self.all, self.kernel_cycles = self.host.to(DEVICE), kernel
        self.memory = torch.zeros(slots + ring, SIZE, dtype=torch.uint8, device=DEVICE)
        self.right = torch.ones((), dtype=torch.bool, device=DEVICE)
        copies = CudaStream(DEVICE)
        compute = CudaStream(DEVICE, current=True, clock=copies.clock)
        link = CudaStream(DEVICE, clock=copies.clock)
        room = ExpertRoom(SIZE, len(ids), 0, len(ids), ring, slots=slots, copies=True)
        self.ring = Experts(
            layouts, room, self.memory[slots:], self.host, Store(Gates()), copies, compute, StreamWaits(None)
        )
        self.stream = torch.cuda.Stream(DEVICE)
        self.engine = Late(self.stream.cuda_stream, late)
        self.copied = CopiedExperts(
            self.host, self.memory, EXPERTS, compute, self.engine.calls if late else None
        )
        self.experts = SlotExperts(
            layouts, dict.fromkeys(range(LAYERS), MixtureLayout(EXPERTS, None)), self.ring, self.memory,
            self.host, (link, compute), SlotRule(1.0, 0.0), copied=self.copied,
        )  # fmt: skip
        self.experts.look_ahead()

    def layer(self, number: int, pairs: torch.Tensor, most: int) -> None:
        parts = self.experts.recorded().parts(number, pairs, most)
        for table in parts or ():
            address = table[:, 0]
            place = ((address - self.memory.data_ptr()) // SIZE).clamp(min=0)
            for _ in range(2):
                same = (self.memory[place] == self.all[number * EXPERTS :][:EXPERTS]).all(1)
                self.right.logical_and_((same | (address == 0)).all())
                torch.cuda._sleep(self.kernel_cycles)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.copied.close()
        self.copied.free()


@contextmanager
def world(slots: int, ring: int, late: float = 0.0, kernel: int = 0) -> Iterator[World]:
    made = World(slots, ring, late, kernel)
    try:
        yield made
    finally:
        made.close()


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """What replays a step, which has been computed once before."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    return graph.replay


def _run(made: World, early: bool, turns: int = 8) -> tuple[int, int]:
    rng = torch.Generator().manual_seed(len(made.memory))
    pairs = torch.zeros(LAYERS, EXPERTS, dtype=torch.int32, device=DEVICE)

    def step() -> None:
        with pdl_launches(early and torch.cuda.get_device_capability() >= (9, 0)):
            for number in range(LAYERS):
                made.layer(number, pairs[number], 2 * EXPERTS)

    work = recorded(step)
    for _ in range(turns):
        chosen = torch.stack([torch.randperm(EXPERTS, generator=rng)[:7] for _ in range(LAYERS)])
        pairs.zero_().scatter_(1, chosen.to(DEVICE), 1)
        work()
    torch.cuda.synchronize()
    asked, hits, *_ = made.experts.snapshots.exact().counts.sum(0).tolist()
    return asked, hits


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("late", "kernel"), [(0.0, 0), (0.001, 0), (0.0, LATE), (0.0003, LATE // 4)])
@pytest.mark.parametrize(("slots", "ring"), [(0, 2), (9, 4), (24, 8)])
def test_whatever_is_late(slots: int, ring: int, late: float, kernel: int, early: bool) -> None:
    """Before every copy, and between what reads a part and what reads it again."""
    with world(slots, ring, late, kernel) as made:
        asked, hits = _run(made, early)
        made.copied.check()
        assert bool(made.right)
        assert asked == 8 * 7 * LAYERS
        assert (hits > 0) == (slots > 0)
        assert int(made.copied.requests.asked[0]) > 0


def test_a_step_that_does_not_wait_is_wrong() -> None:
    def never(*given: object, asks: bool) -> None:
        if asks:
            launch(*given, asks=True)

    launch = triton_copies.await_part
    with world(0, 8, 0.001) as made, patch.object(triton_copies, "await_part", never):
        _run(made, early=False, turns=2)
        assert not bool(made.right)


def test_the_host_takes_over_and_gives_back() -> None:
    with world(9, 4, 0.0003) as made:
        for _ in range(3):
            _run(made, early=True, turns=3)
            for layer in range(LAYERS):
                these = [GroupId(GroupKind.EXPERT, layer, at) for at in range(EXPERTS)]
                for experts, table in made.experts.waves(these):
                    for one in experts:
                        place = (int(table[one.expert, 0]) - made.memory.data_ptr()) // SIZE
                        assert torch.equal(made.memory[place], made.all[layer * EXPERTS + one.expert])
            made.experts.begin_recorded()
        assert bool(made.right)
