"""Rows: how KV blocks lie in the slots of a ring or an outbox, and in host memory.

What moves a block (`tiles`) copies rows of bytes, a plane of a layer of each block, and knows nothing of what
they mean.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from penstock.arch.layout import KVLayout, PlaneLayout
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.sizes import ring_bytes
from penstock.memory.arena import Arena
from penstock.memory.streams import Pieces, joined
from penstock.step.plan import HostBlockId

Run = tuple[int, int, int]
"""A Run is some consecutive blocks of one tier: the first's place in a slot, the first's number there, how
many."""


def slot_memory(pool: HostPool, slots: int, tokens: int, device: torch.device) -> list[Tensor]:
    """Return slots for so many tokens of any layer, flat uint8."""
    layout = pool.layout
    blocks = tokens // layout.block_size
    assert slots * blocks > 0, f"{slots} slots of {tokens} tokens"
    assert tokens == blocks * layout.block_size, (
        f"{tokens} tokens are not whole blocks of {layout.block_size}"
    )
    return list(Arena(ring_bytes(layout, slots, tokens), device).bytes.view(slots, -1))


def rows_in_slot(slot: Tensor, placed: Sequence[PlaneLayout], capacity: int) -> list[Tensor]:
    """Return where the planes of `capacity` blocks lie in a slot, each uint8 `[capacity, bytes in a
    block]`."""
    return [
        slot[capacity * one.offset : capacity * (one.offset + one.size)].view(capacity, one.size)
        for one in placed
    ]


def each_layer(layout: KVLayout, slot: Tensor, capacity: int) -> list[tuple[Tensor, ...]]:
    """Return where the planes of each layer lie in a slot, `[tokens, heads, width]`, in their own dtype."""
    kinds = {}
    for placed in set(layout.placed):
        rows = rows_in_slot(slot, placed, capacity)
        kinds[placed] = tuple(
            part.view(getattr(torch, one.dtype)).view(-1, one.plane.heads, one.plane.width)
            for one, part in zip(placed, rows, strict=True)
        )
    return [kinds[placed] for placed in layout.placed]


def alike(layout: KVLayout, room: int) -> Iterator[range]:
    """Cut the layers of a block that keep something into runs of equal ones, each of at most `room` bytes."""
    first = 0
    while first < layout.layers:
        size = layout.layer_sizes[first]
        stop, most = first + 1, max(room // size, 1) if size else 1
        while stop < min(layout.layers, first + most) and layout.planes[stop] == layout.planes[first]:
            stop += 1
        if size:
            yield range(first, stop)
        first = stop


def pieces(pool: HostPool, layer: int, blocks: Sequence[HostBlockId], capacity: int) -> Pieces:
    """Return the copies of one layer of blocks on the host to a slot for `capacity` of them."""
    layout, count = pool.layout, len(blocks)
    order = np.arange(count)
    rests = np.fromiter(blocks, np.int64, count) * layout.block_bytes + layout.layer_offsets[layer]
    parts = [
        np.stack((capacity * one.offset + order * one.size, rests + one.offset, np.full(count, one.size)), 1)
        for one in layout.placed[layer]
    ]
    return joined(np.concatenate(parts))


def runs(blocks: Sequence[int], near: int = -1) -> list[Run]:
    """Return the runs of consecutive blocks. near: a run lies on one side of this block."""
    pairs = enumerate(pairwise(blocks), 1)
    starts = [0, *(at for at, (last, block) in pairs if block != last + 1 or block == near)][: len(blocks)]
    return [(at, blocks[at], stop - at) for at, stop in pairwise([*starts, len(blocks)])]


def beyond(some: Sequence[Run], near: int) -> list[Run]:
    """Return the runs beyond the host's `near` blocks, with the first's number on disk."""
    return [(at, first - near, count) for at, first, count in some if first >= near]


def halves(
    pool: HostPool, layer: int, run: Run, staging: Tensor | None, planes: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each plane of a run's blocks in host memory, and in a slot.

    Both are uint8 `[blocks, bytes of a block's plane]`, rows of any stride. staging: where blocks beyond the
    host's pool lie.
    """
    at, first, count = run
    if first < pool.blocks:
        rows = pool.layer_rows(layer, first, count)
    else:
        assert staging is not None, "a block beyond the host's pool, and no disk"
        rows = staging[at : at + count]
    for one, plane in zip(pool.layout.placed[layer], planes, strict=True):
        yield rows[:, one.offset : one.offset + one.size], plane[at : at + count]
