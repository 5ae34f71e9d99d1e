"""Measures how fast a CPU computes feed-forwards where they rest, while the link carries something else.

It takes no more host memory than the feed-forwards that will rest there, so where these have room it has.
"""

from contextlib import ExitStack, closing
from itertools import cycle, pairwise
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from penstock.arch.layout import GroupKind, GroupLayout, group_layouts
from penstock.arch.spec import SWIGLU
from penstock.engine.contexts import LongRoom
from penstock.engine.cpu import computable
from penstock.engine.plan import BootPlan
from penstock.memory.arena import Arena
from penstock.memory.link import streams_of
from penstock.memory.streams import Stream, Ticket
from penstock.ops.native.experts import ThreadPool
from penstock.ops.row_classes import CLASSES
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.pieces import PIECE_BYTES
from penstock.weights.streaming.residency import padded
from penstock.weights.streaming.ring import StreamRates
from penstock.weights.streaming.source import RandomSource
from penstock.weights.streaming.views import group_views

_SECONDS = 0.1
"""Seconds for which each class of rows is measured."""
_READ = 512 << 20
"""Bytes of feed-forwards that are computed in turn, if as many rest in host memory: more than a processor
keeps."""
_COPIED = 64 << 20
"""Bytes that the link carries at a time."""


def cpu_read(plan: BootPlan[LongRoom], device: torch.device, rates: StreamRates) -> tuple[float, ...]:
    """Return the bytes per second that the CPU reads of feed-forwards that it computes, by class of rows."""
    outline = plan.outline
    resting = computable(outline, plan.placement)
    layout = max(resting, key=padded)
    size = padded(layout)
    count = min(-(-_READ // size), sum(map(padded, resting)) // size)
    return rates_of(layout, outline.spec.hidden_size, outline.dtype, count, device, rates.host_to_device)


def usual_cpu_read(shape: Shape, dtype: str, device: torch.device, link: float) -> tuple[float, ...]:
    """Return the same of the feed-forwards of a shape, whatever will rest."""
    layouts = group_layouts(shape.spec, shape.names, dtype)
    layout = next(one for one in layouts if one.id.kind is GroupKind.FFN)
    return rates_of(layout, shape.spec.hidden_size, dtype, -(-_READ // padded(layout)), device, link)


def rates_of(
    layout: GroupLayout, hidden: int, dtype: str, count: int, device: torch.device, link: float
) -> tuple[float, ...]:
    """Return the bytes per second that the CPU reads of `count` feed-forwards that it computes in turn, by
    class of rows. link: bytes/s that a link to the device carries meanwhile."""
    size = padded(layout)
    source = RandomSource(dtype)
    with ExitStack() as opened:
        pool = opened.enter_context(closing(ThreadPool(max(torch.get_num_threads() - 1, 1), tiles=True)))
        arena = Arena(count * size, torch.device("cpu"), pinned_for=device)
        opened.callback(arena.close)
        copies = opened.enter_context(closing(streams_of(device)[0]))  # Its work ends before memory is freed.
        target = torch.empty(min(_COPIED, len(arena.bytes)), dtype=torch.uint8, device=device)
        groups = []
        for place in torch.split(arena.bytes, size):
            for start in range(0, size, PIECE_BYTES):
                source.read(layout, start, place[start : start + PIECE_BYTES], False)
            groups.append(group_views(layout, place))
        found, turns = list[float](), cycle(groups)
        for kind in range(CLASSES):
            x = torch.randn(1 << kind, hidden).to(getattr(torch, dtype))
            out = torch.empty_like(x)
            pool.feed_forward(x, [next(turns)], [len(x)], SWIGLU, out)
            carried = _carry(copies, arena, target, link)
            ends = [perf_counter()]
            while ends[-1] < ends[0] + _SECONDS:
                pool.feed_forward(x, [next(turns)], [len(x)], SWIGLU, out)
                ends.append(perf_counter())
            found.append(layout.size / median(end - begin for begin, end in pairwise(ends)))
            carried.wait()
        return tuple(found)


def _carry(copies: Stream, arena: Arena, target: Tensor, rate: float) -> Ticket:
    """Let a link of `rate` bytes/s carry an arena's bytes for as long as a class is measured."""
    for _ in range(round(rate * _SECONDS / len(target)) + 1):
        copies.copy(target, arena.bytes[: len(target)])
    return copies.mark()
