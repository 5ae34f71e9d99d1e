"""Kernels that hold the link to a GPU to fewer bytes/s than it has, to measure what another machine would do.

Whatever crosses the link is put between `begin` and `end` on its stream. A word on the device says until when
the bytes so far take at that rate; `end` adds those that have crossed, and waits for that moment. All streams
add to the same word, by atomics, so together they are no faster.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from penstock.ops.slots import ExpertParts, Places
from penstock.ops.triton.tuning import next_power_of_2

_SLACK = 20_000
"""Nanoseconds between two copies that count as one behind the other: the launches between them."""


@triton.jit
def _until(free, nanoseconds):  # type: ignore[no-untyped-def]
    end = tl.atomic_add(free, nanoseconds) + nanoseconds
    while globaltimer() < end:
        pass


@triton.jit  # type: ignore[untyped-decorator]
def _begin(free, SLACK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Note that a copy begins."""
    now = globaltimer()
    if now > tl.load(free) + SLACK:
        tl.atomic_max(free, now)


@triton.jit(do_not_specialize=["nanoseconds"])  # type: ignore[untyped-decorator]
def _end(free, nanoseconds) -> None:  # type: ignore[no-untyped-def]
    """Wait until what has been copied would have been."""
    _until(free, nanoseconds)


@triton.jit(do_not_specialize=["part", "parts", "size", "piece", "rate"])  # type: ignore[untyped-decorator]
def _end_of_part(  # type: ignore[no-untyped-def]
    free, coming, starts, done, part, parts, size, piece, rate, COPIERS: tl.constexpr
) -> None:
    """Wait until the experts of a part would have been copied, of `size` bytes each, at `rate` bytes/ns. Of
    the one that was fetched ahead, pieces have crossed already."""
    begin, end, early = tl.load(starts + part), tl.load(starts + part + 1), tl.load(starts + parts + 1)
    size_of_all = (end - begin).to(tl.float32) * size
    for number in range(begin, end):
        if tl.load(coming + number) == early:
            size_of_all -= tl.sum(tl.load(done + tl.arange(0, COPIERS))).to(tl.float32) * piece
    _until(free, (tl.maximum(size_of_all, 0.0) / rate).to(tl.int64))


@triton.jit(do_not_specialize=["piece", "rate"])  # type: ignore[untyped-decorator]
def _end_of_pieces(free, done, piece, rate, COPIERS: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Wait until as many pieces would have been copied as programs say, of `piece` bytes each."""
    count = tl.sum(tl.load(done + tl.arange(0, COPIERS))).to(tl.float32)
    _until(free, (count * piece / rate).to(tl.int64))


class LinkPace:
    """Holds one direction of a GPU's link to a rate, on the current stream of whoever calls it."""

    def __init__(self, device: torch.device, rate: float) -> None:
        """Begin with nothing that has crossed. rate: bytes/s."""
        self._free, self._rate = torch.zeros(1, dtype=torch.int64, device=device), rate / 1e9

    def begin(self) -> None:
        """Note that something begins to cross the link."""
        _begin[(1,)](self._free, SLACK=_SLACK, num_warps=1)

    def end(self, size: int) -> None:
        """Wait until `size` bytes would have crossed since."""
        _end[(1,)](self._free, int(size / self._rate), num_warps=1)

    def end_of_part(self, parts: ExpertParts, places: Places, part: int, piece: int) -> None:
        """Wait until the experts of a part would have crossed since, but for pieces of so many bytes that
        were fetched ahead."""
        _end_of_part[(1,)](
            self._free,
            parts.coming,
            parts.starts,
            parts.done,
            part,
            len(parts.tables),
            float(places.size),
            float(piece),
            self._rate,
            COPIERS=next_power_of_2(len(parts.done)),
            num_warps=1,
        )

    def end_of_pieces(self, done: Tensor, piece: int) -> None:
        """Wait until as many pieces of so many bytes would have crossed since as `done` says."""
        _end_of_pieces[(1,)](
            self._free, done, float(piece), self._rate, COPIERS=next_power_of_2(len(done)), num_warps=1
        )
