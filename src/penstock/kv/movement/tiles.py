"""KV of long contexts on the move: tiles come from HOST through a ring of slots, and what was computed goes
there through staging slots.

A slot holds one plane of all its blocks behind the other, `[tokens, heads, width]`, though in a block on HOST
they alternate: so each is one dense tensor, which any attention kernel reads as it is. A run of consecutive
blocks costs a strided copy for each plane; many runs, one call for them all.

Why this is safe. Everything is called by the thread that computes, which is the only one to touch the state
here, and which waits for nothing: streams wait for each other. `copies` fills the ring, `compute` reads it
and fills staging, `out` empties staging.
1. The arithmetic of a tile starts after its copy: `take` makes compute wait for the mark behind it.
2. A slot of the ring is refilled when its tile has been read: not queued before the tile's `release`, and
   behind the mark that the release left on compute.
3. Staging is read when it is full: out waits for the mark behind what compute put there.
4. Staging is filled when it is empty: compute waits for the mark behind the slot's last copies out. So k, v
   and demoted blocks may be written over by whatever compute does next.
5. A block is read on HOST when it has landed: `begin` is given the ticket behind all that was sent, and
   copies waits for it.
6. A block on HOST is written over when nobody reads it: what is sent in a step is behind all that compute has
   waited for, thus behind the copies of all tiles that earlier steps took, and no step sends what its own
   tiles read. Tiles that nobody took are not looked at.
Each waits only for what was queued before it, so nobody waits in a circle.

Blocks whose ids lie beyond the host's pool rest on disk. They come and go by way of slots of their own
(`kv.staging`): a tile with such blocks is copied when they have been read, for which `take` waits, and with
it the host, if they are late. What is read is what was sent last (`kv.diskpool`), without a ticket.

Blocks may rest in fp8, e4m3 with a scale for each head of a block's plane: a power of two, so that scaling
is exact and only rounding loses anything, a sixteenth of a number at most, or 2^-17 of its head's largest.
Blocks are rounded on compute, into staging (3, 4), and tiles expanded on compute, behind the wait for their
copy (1), from the slot into a scratch, one for all, which is what `take` lends. Only compute touches the
scratch, so what reads a tile is done before the next is expanded over it; and the mark of `release` is behind
both that expansion and the arithmetic (2). Compute must then be the stream that the calling thread gives work
to.

An interrupt can strike between any two instructions. Progress is committed by single assignments, after all
that they promise (`queued`, `taken`, `released`, `_step`, `_slot`). That a slot is in use is noted before it
is (no ticket in `_read`, `_empty`); whoever finds it so makes a mark, which is behind all that was queued. A
step that is broken off is simply left: its successor starts at the slot behind the last that was filled, and
what was copied in part is copied over, on the same stream.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import frexp, ldexp
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.arch.layout import KVLayout, PlaneLayout
from penstock.base.trace import Trace
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.pool import plane_views
from penstock.kv.movement.sizes import ring_bytes, scratch_bytes
from penstock.kv.movement.staging import ReadAhead, WriteBehind
from penstock.memory.arena import Arena
from penstock.memory.streams import Pieces, Stream, Ticket, joined
from penstock.step.plan import HostBlockId

_FEW = 4
"""Runs of a tile that are copied one by one: a strided copy of a run is faster than its blocks as pieces."""
_Run = tuple[int, int, int]
"""Consecutive blocks of one tier: the first's place in a slot, the first's id, how many."""


class StallMeter(Protocol):
    """Who is told of each copy and each use."""

    trace: Trace | None

    def begin(self, name: str, taken: Ticket, begun: Ticket) -> None: ...

    def end(self, done: Ticket) -> None: ...

    def copied(self, name: str, size: int, first: Ticket, last: Ticket) -> None: ...

    def stalled(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Tile:
    """The KV of a sequence's next `keys` tokens, which rest in these blocks and may end within the last of
    them."""

    blocks: tuple[HostBlockId, ...]
    keys: int


@dataclass(slots=True)
class _Step:
    """The visits of a step, in order: a layer, and the index of a tile. `first`: the slot of visit 0."""

    first: int
    tiles: Sequence[Tile]
    runs: Sequence[Sequence[_Run]]
    visits: Sequence[tuple[int, int]]
    on_disk: Mapping[int, int]
    """Visits with blocks on disk, and their number among those."""
    queued: int = 0
    """Visits whose copies are queued."""
    taken: int = 0
    released: int = 0


class TileRing:
    """`slots` slots of `tile_tokens` tokens each on DEVICE, filled ahead of the arithmetic. One slot is
    enough, but then nothing is ahead.

    waits: its own, which no other ring tells of its copies.
    """

    def __init__(
        self,
        pool: HostPool,
        slots: int,
        tile_tokens: int,
        device: torch.device,
        copies: Stream,
        compute: Stream,
        waits: StallMeter | None,
        disk: ReadAhead | None = None,
    ) -> None:
        """disk: where blocks beyond the pool come from. Raises DeviceError if the device has not as much
        memory."""
        self._pool, self._copies, self._compute, self._waits, self._disk = pool, copies, compute, waits, disk
        self._slots = _slots(pool, slots, tile_tokens, device)
        layout = pool.layout
        scratch = Arena(scratch_bytes(layout, tile_tokens), device).bytes if layout.rounded_from else None
        self._capacity = tile_tokens // layout.block_size
        self._views = [
            _each_layer(layout.exact, slot if scratch is None else scratch, self._capacity)
            for slot in self._slots
        ]
        """By slot and by layer: the planes, `[tile_tokens, heads, width]`."""
        self._ready: list[Ticket | None] = [None] * slots
        """By slot: behind the last copy to it."""
        self._read: list[Ticket | None] = [None] * slots
        """By slot: behind the last use of it; none while it is used."""
        self._step = _Step(0, (), (), (), {})
        self.copied_bytes = 0

    def begin(
        self,
        tiles: Sequence[Tile],
        layers: Sequence[int],
        after: Ticket | None = None,
        seen: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Announce a step: for each layer, each tile is taken, in this order, or those whose indices `seen`
        lists for it. Copies start at once, behind `after`. Whatever is left of the step before is dropped;
        copies of it that are queued are still made."""
        block_size = self._pool.layout.block_size
        for tile in tiles:
            count = len(tile.blocks)
            assert (count - 1) * block_size < tile.keys <= count * block_size, (
                f"{tile.keys} keys in {count} blocks"
            )
            assert 0 < count <= self._capacity, f"{count} blocks in a slot of {self._capacity}"
        every = range(len(tiles))
        visits = [
            (layer, tile) for at, layer in enumerate(layers) for tile in (every if seen is None else seen[at])
        ]
        runs = [_runs(tile.blocks, self._pool.blocks) for tile in tiles]
        far = [
            [
                (at, first - self._pool.blocks, count)
                for at, first, count in some
                if first >= self._pool.blocks
            ]
            for some in runs
        ]
        on_disk = {
            visit: number
            for number, visit in enumerate(at for at, (_, tile) in enumerate(visits) if far[tile])
        }
        step = _Step((self._step.first + self._step.queued) % len(self._slots), tiles, runs, visits, on_disk)
        if after is not None:
            self._copies.wait(after)
        self._step = step
        if self._disk is not None:
            self._disk.begin([(visits[visit][0], far[visits[visit][1]]) for visit in on_disk])
        self._fill()

    def take(self) -> tuple[Tensor, ...]:
        """Lend the planes of the next tile, dense `[keys, heads, width]`: what the compute stream does from
        now on finds them, until the release. One tile is in use at a time. Raises LostKV if the disk does not
        give back what it got."""
        step, visit = self._step, self._step.taken
        assert visit == step.released, "take of a tile before the last one was released"
        self._fill(visit + 1)
        assert visit < step.queued, f"take of tile {visit} in a step of {len(step.visits)}"
        slot = self._slot_of(visit)
        taken = self._compute.mark() if self._waits else None
        self._read[slot] = None
        ready = self._ready[slot]
        assert ready is not None
        self._compute.wait(ready)
        if self._waits and taken:
            self._waits.begin(self._name(visit), taken, self._compute.mark())
        layer, tile = step.visits[visit][0], step.tiles[step.visits[visit][1]]
        layout, planes = self._pool.layout, self._views[slot][layer]
        if layout.rounded_from:
            count, placed = len(tile.blocks), layout.placed[layer]
            rests = _rows_in_slot(self._slots[slot], placed, self._capacity)
            for one, rows, plane in zip(placed, rests, planes, strict=True):
                blocks = plane.view(-1, layout.block_size, *plane.shape[1:])
                expand(rows[:count], one, blocks[:count])
        step.taken = visit + 1
        return tuple(plane[: tile.keys] for plane in planes)

    def release(self) -> None:
        """The arithmetic that was queued until now was the last to need the tile."""
        step = self._step
        assert step.taken == step.released + 1, "release of a tile that is not in use"
        mark = self._compute.mark()
        self._read[self._slot_of(step.released)] = mark
        if self._waits:
            self._waits.end(mark)
        step.released = step.taken
        self._fill()

    def _slot_of(self, visit: int) -> int:
        return (self._step.first + visit) % len(self._slots)

    def _name(self, visit: int) -> str:
        layer, tile = self._step.visits[visit]
        return f"kv.{layer}.{tile}"

    def _fill(self, needed: int = 0) -> None:
        """Queue the copies for which slots are free: those of the first `needed` visits, and others unless a
        disk lets wait for them."""
        step, waits, pool = self._step, self._waits, self._pool
        while step.queued < min(step.released + len(self._slots), len(step.visits)):
            layer, tile = step.visits[step.queued]
            number, staged = step.on_disk.get(step.queued), None
            if number is not None:
                assert self._disk is not None, "a block beyond the host's pool, and no disk"
                if step.queued >= needed and not self._disk.there(number):
                    return
                staged = self._disk.wait(number)
            slot = self._slot_of(step.queued)
            self._copies.wait(self._read[slot] or self._compute.mark())
            began = self._copies.mark() if waits and waits.trace else None
            if staged is None and len(step.runs[tile]) > _FEW:
                pieces = _pieces(pool, layer, step.tiles[tile].blocks, self._capacity)
                self._copies.copy_pieces(self._slots[slot], pool.bytes, pieces)
            else:
                planes = _rows_in_slot(self._slots[slot], pool.layout.placed[layer], self._capacity)
                for run in step.runs[tile]:
                    for host, device in _halves(pool, layer, run, staged, planes):
                        self._copies.copy_rows(device, host)
            ready = self._copies.mark()
            if number is not None and self._disk is not None:
                self._disk.copied(number, ready)
            size = len(step.tiles[tile].blocks) * self._pool.layout.layer_sizes[layer]
            if waits and began:
                waits.copied(self._name(step.queued), size, began, ready)
            self.copied_bytes += size
            self._ready[slot] = ready
            step.queued += 1


class Outbox:
    """KV on its way to the host, through `slots` staging slots of `max_tokens` tokens of one layer each on
    DEVICE."""

    def __init__(
        self,
        pool: HostPool,
        slots: int,
        max_tokens: int,
        device: torch.device,
        out: Stream,
        compute: Stream,
        disk: WriteBehind | None = None,
    ) -> None:
        """disk: where blocks beyond the pool go. Raises DeviceError if the device has not as much memory."""
        self._pool, self._out, self._compute, self._disk = pool, out, compute, disk
        self._slots = _slots(pool, slots, max_tokens, device)
        self._capacity = max_tokens // pool.layout.block_size
        self._empty: list[Ticket | None] = [None] * slots
        """By slot: behind the last copies out of it; none while they are being queued."""
        self._slot = 0
        """The one to use next."""

    def send(self, layer: int, planes: Sequence[Tensor], blocks: Sequence[HostBlockId]) -> None:
        """Send the layer's planes of whole `blocks` of tokens, `[tokens, heads, width]`, of which each token
        is one run, to these blocks of the host."""
        layout = self._pool.layout
        tokens, slot = len(blocks) * layout.block_size, self._slots[self._slot]
        lengths = [len(plane) for plane in planes]
        assert set(lengths) == {tokens}, f"planes of {lengths} tokens for {len(blocks)} blocks"
        assert len(blocks) <= self._capacity, f"{len(blocks)} blocks in a slot of {self._capacity}"
        if not blocks:
            return
        self._claim()
        staged = _rows_in_slot(slot, layout.placed[layer], self._capacity)
        for one, rows, plane in zip(layout.placed[layer], staged, planes, strict=True):
            if one.rounded:
                to_fp8(plane.view(len(blocks), -1, *plane.shape[1:]), rows[: len(blocks)])
            else:
                into = rows[: len(blocks)].reshape(tokens, -1)
                self._compute.copy_rows(into, plane.view(tokens, -1).view(torch.uint8))
        self._out.wait(self._compute.mark())
        runs = _runs(blocks, self._pool.blocks)
        far = [run for run in runs if run[1] >= self._pool.blocks]
        staging = self._disk.claim() if far and self._disk else None
        for run in runs:
            for host, device in _halves(self._pool, layer, run, staging, staged):
                self._out.copy_rows(host, device)
        if far and self._disk:
            self._disk.write([(layer, (at, first - self._pool.blocks, count)) for at, first, count in far])
        self._pass_on()

    def demote(self, block: Tensor, target: HostBlockId) -> None:
        """Send all layers of a block of the device, uint8 `[bytes of a block there]`, to one of the host.
        What compute does next may write it over."""
        layout, far = self._pool.layout, target - self._pool.blocks
        exact = layout.exact
        assert len(block) == exact.block_bytes, f"{len(block)} bytes for a block of {exact.block_bytes}"
        if far >= 0:
            assert self._disk is not None, "a block beyond the host's pool, and no disk"
            claimed = self._disk.claim()
        for layers in _alike(layout, self._slots[0].numel()):
            first, count = layers.start, len(layers)
            size, wide = layout.layer_sizes[first], exact.layer_sizes[first]
            begin, at = exact.layer_offsets[first], layout.layer_offsets[first]
            rows = block[begin : begin + count * wide].view(count, wide)
            if far < 0:
                part = self._pool.block(target)[at : at + count * size].view(count, size)
            else:
                part = claimed[first : layers.stop, :size]
            staged = self._slots[self._slot][: count * size].view(count, size)
            self._claim()
            if layout.rounded_from:
                planes = plane_views(rows, exact.placed[first], layout.block_size)
                for one, plane in zip(layout.placed[first], planes, strict=True):
                    round_into(plane, one, staged[:, one.offset : one.offset + one.size])
            else:
                self._compute.copy(staged.view(-1), rows.view(-1))
            self._out.wait(self._compute.mark())
            self._out.copy_rows(part, staged)
            self._pass_on()
        if far >= 0 and self._disk:
            self._disk.write([(layer, (layer, far, 1)) for layer in range(layout.layers)])

    def landed(self) -> Ticket:
        """Done when all that has been sent and demoted is on the host."""
        return self._out.mark()

    def _claim(self) -> None:
        self._compute.wait(self._empty[self._slot] or self._out.mark())
        self._empty[self._slot] = None

    def _pass_on(self) -> None:
        self._empty[self._slot] = self._out.mark()
        self._slot = (self._slot + 1) % len(self._slots)


def round_into(plane: Tensor, placed: PlaneLayout, rows: Tensor) -> None:
    """Put a plane of blocks, `[blocks, block_size, heads, width]`, into rows as it rests, uint8 `[blocks,
    bytes]`."""
    if placed.rounded:
        to_fp8(plane, rows)
    else:
        rows.copy_(plane.flatten(1).view(torch.uint8))


def expand(rows: Tensor, placed: PlaneLayout, plane: Tensor) -> None:
    """Do the reverse of `round_into`."""
    if placed.rounded:
        from_fp8(rows, plane)
    else:
        plane.flatten(1).view(torch.uint8).copy_(rows)


def to_fp8(blocks: Tensor, rows: Tensor) -> None:
    """Round a plane of blocks, `[..., block_size, heads, width]` of any strides, into rows, uint8 `[...,
    bytes of a block's plane]`.

    A head's scale is the least power of two by which its numbers come to e4m3's largest, 448, or below: found
    in the bits of a float32, as logarithms are not exact. What would be rounded up to infinity is rounded
    down.
    """
    values, scales = _fp8_parts(rows, blocks.shape[-3:])
    most = ldexp(15 / 16, frexp(torch.finfo(blocks.dtype).max)[1])  # of four significant bits
    largest = torch.linalg.vector_norm(blocks, torch.inf, (-3, -1), keepdim=True, dtype=torch.float32).clamp_(
        max=most
    )
    # Of 448, or 1.75 * 2^8, a fraction above 1.75 carries into the exponent. No float32 is scaled by less
    # than the least normal one.
    exponent = ((largest.view(torch.int32) + 0x1FFFFF) >> 23).sub_(8).clamp_(min=1)
    scale = torch.where(largest > 0, (exponent << 23).view(torch.float32), 1.0)
    values.copy_((blocks / scale).clamp_(-most / scale, most / scale))
    scales.copy_(scale)


def from_fp8(rows: Tensor, blocks: Tensor) -> None:
    """Expand what `to_fp8` has made into blocks of any floating dtype."""
    values, scales = _fp8_parts(rows, blocks.shape[-3:])
    blocks.copy_(values)
    blocks.mul_(scales)


def as_rested(blocks: Tensor) -> Tensor:
    """Return a plane of blocks, `[blocks, block_size, heads, width]`, as it comes back from fp8."""
    shape = blocks.shape[-3:]
    rows = torch.empty(len(blocks), shape.numel() + shape[1] * 4, dtype=torch.uint8, device=blocks.device)
    to_fp8(blocks, rows)
    back = torch.empty(blocks.shape, dtype=blocks.dtype, device=blocks.device)
    from_fp8(rows, back)
    return back


def _fp8_parts(rows: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return of each row the numbers, e4m3 of this shape `[block_size, heads, width]`, and their scales,
    float32 `[1, heads, 1]`."""
    values, scales = rows.tensor_split([shape.numel()], -1)
    return values.view(torch.float8_e4m3fn).view(*rows.shape[:-1], *shape), scales.view(torch.float32)[
        ..., None, :, None
    ]


def _slots(pool: HostPool, slots: int, tokens: int, device: torch.device) -> list[Tensor]:
    """Return slots for so many tokens of any layer, flat uint8."""
    layout = pool.layout
    blocks = tokens // layout.block_size
    assert slots * blocks > 0, f"{slots} slots of {tokens} tokens"
    assert tokens == blocks * layout.block_size, (
        f"{tokens} tokens are not whole blocks of {layout.block_size}"
    )
    return list(Arena(ring_bytes(layout, slots, tokens), device).bytes.view(slots, -1))


def _rows_in_slot(slot: Tensor, placed: Sequence[PlaneLayout], capacity: int) -> list[Tensor]:
    """Return where the planes of `capacity` blocks lie in a slot: each uint8 `[capacity, bytes of a block's
    plane]`."""
    return [
        slot[capacity * one.offset : capacity * (one.offset + one.size)].view(capacity, one.size)
        for one in placed
    ]


def _each_layer(layout: KVLayout, slot: Tensor, capacity: int) -> list[tuple[Tensor, ...]]:
    """Return where the planes of each layer lie in a slot, `[tokens, heads, width]`, in the arithmetic's
    dtype."""
    kinds = {}
    for placed in set(layout.placed):
        rows = _rows_in_slot(slot, placed, capacity)
        kinds[placed] = tuple(
            part.view(getattr(torch, one.dtype)).view(-1, one.plane.heads, one.plane.width)
            for one, part in zip(placed, rows, strict=True)
        )
    return [kinds[placed] for placed in layout.placed]


def _alike(layout: KVLayout, room: int) -> Iterator[range]:
    """Cut the layers of a block into runs of equal ones, each of at most `room` bytes."""
    first = 0
    while first < layout.layers:
        stop, most = first + 1, max(room // layout.layer_sizes[first], 1)
        while stop < min(layout.layers, first + most) and layout.planes[stop] == layout.planes[first]:
            stop += 1
        yield range(first, stop)
        first = stop


def _pieces(pool: HostPool, layer: int, blocks: Sequence[HostBlockId], capacity: int) -> Pieces:
    """Return the copies of one layer of blocks on the host to a slot for `capacity` of them."""
    layout, count = pool.layout, len(blocks)
    order = np.arange(count)
    rests = np.fromiter(blocks, np.int64, count) * layout.block_bytes + layout.layer_offsets[layer]
    parts = [
        np.stack((capacity * one.offset + order * one.size, rests + one.offset, np.full(count, one.size)), 1)
        for one in layout.placed[layer]
    ]
    return joined(np.concatenate(parts))


def _runs(blocks: Sequence[int], near: int) -> list[_Run]:
    """near: how many blocks the host's pool has; a run lies on one side of that."""
    runs: list[_Run] = []
    for at, block in enumerate(blocks):
        if runs and block == runs[-1][1] + runs[-1][2] and block != near:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((at, block, 1))
    return runs


def _halves(
    pool: HostPool, layer: int, run: _Run, staging: Tensor | None, planes: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each plane of a run's blocks in host memory, and in a slot: uint8 `[blocks, bytes of a block's
    plane]`, rows of any stride. staging: where blocks beyond the host's pool lie."""
    at, first, count = run
    if first < pool.blocks:
        rows = pool.layer_rows(layer, first, count)
    else:
        assert staging is not None, "a block beyond the host's pool, and no disk"
        rows = staging[at : at + count]
    for one, plane in zip(pool.layout.placed[layer], planes, strict=True):
        yield rows[:, one.offset : one.offset + one.size], plane[at : at + count]
