"""Lanes on CUDA: large copies arrive whole and in order, whatever is late, and let other streams' copies come
between."""

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.memory.link import LUMP, LumpStream, more_streams
from penstock.memory.streams import CudaStream, Pieces

CUDA = torch.device("cuda")
LATE = 2_000_000
"""Clock cycles, about 1 ms."""
MIB = 1 << 20


class Slow(CudaStream):
    """A lane whose every third copy begins late."""

    number = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._late()
        super().copy(target, source)

    def copy_pieces(self, target: Tensor, source: Tensor, pieces: Pieces) -> None:
        self._late()
        super().copy_pieces(target, source, pieces)

    def _late(self) -> None:
        self.number += 1
        if self.number % 3 == 0:
            with torch.cuda.stream(self._queue()):
                torch.cuda._sleep(LATE)


def pinned(size: int) -> Tensor:
    words = torch.randint(2**62, (size // 8,), dtype=torch.int64)
    return words.view(torch.uint8).pin_memory()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("parts", [1, 9])
def test_large_copies_arrive_whole_and_in_order(parts: int, late: bool) -> None:
    first, kind = CudaStream(CUDA), Slow if late else CudaStream
    line = LumpStream((kind(CUDA, clock=first.clock), kind(CUDA, clock=first.clock)), MIB)
    size, rng = 24 * MIB, np.random.default_rng(0)
    sent, back = [pinned(size) for _ in range(6)], [pinned(size) for _ in range(6)]
    between = torch.empty(size, dtype=torch.uint8, device=CUDA)
    bounds = np.unique(np.concatenate(([0, size], rng.integers(1, size, parts - 1))))
    pieces = np.stack((bounds[:-1], bounds[:-1], np.diff(bounds)), 1)
    for turn, (one, other) in enumerate(zip(sent, back, strict=True)):
        line.copy_pieces(between, one, pieces)
        line.copy(between[:100], one[100:200])
        if turn % 2:
            line.copy(other, between)
        else:
            line.copy_pieces(other, between, pieces)
    line.mark().wait()
    for one, other in zip(sent, back, strict=True):
        assert torch.equal(other[100:], one[100:])
        assert torch.equal(other[:100], one[100:200])
    line.close()


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_copy_that_is_needed_now_waits_for_few_lumps(way: str) -> None:
    first = CudaStream(CUDA)
    line = more_streams(CUDA, first)[way == "down"]
    hosts = pinned(1024 * MIB), pinned(MIB)
    devices = [torch.empty(len(host), dtype=torch.uint8, device=CUDA) for host in hosts]
    (target, into), (source, of) = (devices, hosts) if way == "up" else (hosts, devices)

    def once() -> tuple[float, float]:
        torch.cuda.synchronize()
        begun = line.mark()
        line.copy(target, source)
        first.copy(into, of)
        there, done = first.mark(), line.mark()
        done.wait()
        return there.when() - begun.when(), done.when() - begun.when()

    once()
    there, whole = min(once() for _ in range(5))
    lumps = 1024 * MIB // LUMP
    assert there < whole * 8 / lumps, f"after {there * 1e3:.2f} of {whole * 1e3:.2f} ms"
    line.close()
