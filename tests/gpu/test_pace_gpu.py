"""A link that is held to a rate: copies of one stream, of two, and experts that the device fetches."""

from time import perf_counter

import pytest
import torch

pytest.importorskip("triton")

from penstock.bench.speed.held import held_link
from penstock.engine import placing
from penstock.memory.streams import CudaStream
from penstock.ops.slots import Places
from penstock.ops.triton import slots as triton_slots
from penstock.weights.streaming.slots import SlotRule, SlotTable

DEVICE = torch.device("cuda", 0)
SIZE, RATE = 16 << 20, 8e9


def seconds(streams: list[CudaStream], up: bool) -> float:
    """How long ten copies on each stream take."""
    host = [torch.empty(SIZE, dtype=torch.uint8, pin_memory=True) for _ in streams]
    near = [torch.empty(SIZE, dtype=torch.uint8, device=DEVICE) for _ in streams]
    for turns in (1, 10):
        torch.cuda.synchronize()
        begin = perf_counter()
        for _ in range(turns):
            for stream, far, here in zip(streams, host, near, strict=True):
                stream.copy(*((here, far) if up else (far, here)))
        torch.cuda.synchronize()
    return perf_counter() - begin


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_copies_take_no_less_than_at_the_rate(count: int, up: bool) -> None:
    streams, before = [CudaStream(DEVICE) for _ in range(count)], CudaStream.copy
    with held_link("cuda", RATE):
        held = seconds(streams, up)
        assert placing.copy_rate(DEVICE, seconds=0.05) <= RATE
    assert held > count * 10 * SIZE / RATE * 0.99
    assert CudaStream.copy is before, "it is let go"


def test_experts_that_the_device_fetches_take_no_less() -> None:
    experts, size = 16, 1 << 20
    host = torch.zeros(experts, size, dtype=torch.uint8).pin_memory()
    memory = torch.zeros(2 + experts, size, dtype=torch.uint8, device=DEVICE)
    table = SlotTable(1, experts, 2, DEVICE, SlotRule(16.0, 1.0))
    places = Places(0, 2, experts, memory.data_ptr(), size, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    pairs = torch.ones(experts, dtype=torch.int32, device=DEVICE)

    def took(turns: int) -> float:
        torch.cuda.synchronize()
        begin = perf_counter()
        for _ in range(turns):
            table.begin()
            parts = triton_slots.expert_step(table.arrays(0), pairs, experts, 1.0, places, 2)
            for part in range(2):
                triton_slots.fetch(parts, places, host.data_ptr(), part)
        torch.cuda.synchronize()
        return perf_counter() - begin

    took(1)
    asked = int(table.counts[0, 0] - table.counts[0, 1])
    with held_link("cuda", RATE):
        took(1)
        before = int(table.counts[0, 0] - table.counts[0, 1])
        held = took(20)
        come = int(table.counts[0, 0] - table.counts[0, 1]) - before
    assert asked == experts
    assert held > come * size / RATE * 0.99
