"""KV of long contexts on the move: tiles come from HOST through a ring of slots, and what was computed goes there through staging slots.

A slot holds K of its blocks and then V, `[2, tokens, kv_heads, head_dim]`, though in a block on HOST they alternate: so each is one dense
tensor, which any attention kernel reads as it is. A run of consecutive blocks costs two strided copies.

Why this is safe. Everything is called by the thread that computes, which is the only one to touch the state here, and which waits for
nothing: streams wait for each other. `copies` fills the ring, `compute` reads it and fills staging, `out` empties staging.
1. The arithmetic of a tile starts after its copy: `take` makes compute wait for the mark behind it.
2. A slot of the ring is refilled when its tile has been read: not queued before the tile's `release`, and behind the mark that the release
   left on compute.
3. Staging is read when it is full: out waits for the mark behind what compute put there.
4. Staging is filled when it is empty: compute waits for the mark behind the slot's last copies out. So k, v and demoted blocks may be
   written over by whatever compute does next.
5. A block is read on HOST when it has landed: `begin` is given the ticket behind all that was sent, and copies waits for it.
6. A block on HOST is written over when nobody reads it: what is sent in a step is behind all that compute has waited for, thus behind the
   copies of all tiles that earlier steps took, and no step sends what its own tiles read. Tiles that nobody took are not looked at.
Each waits only for what was queued before it, so nobody waits in a circle.

Blocks whose ids lie beyond the host's pool rest on disk. They come and go by way of slots of their own (`kv.staging`): a tile with such
blocks is copied when they have been read, for which `take` waits, and with it the host, if they are late. What is read is what was sent
last (`kv.diskpool`), without a ticket.

An interrupt can strike between any two instructions. Progress is committed by single assignments, after all that they promise (`queued`,
`taken`, `released`, `_step`, `_slot`). That a slot is in use is noted before it is (no ticket in `_read`, `_empty`); whoever finds it so
makes a mark, which is behind all that was queued. A step that is broken off is simply left: its successor starts at the slot behind the
last that was filled, and what was copied in part is copied over, on the same stream.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.arch.layout import KVLayout
from penstock.base.trace import Trace
from penstock.kv.hostpool import HostPool
from penstock.kv.staging import ReadAhead, WriteBehind
from penstock.memory.arena import Arena
from penstock.memory.streams import Stream, Ticket
from penstock.step.plan import HostBlockId

_Run = tuple[int, int, int]
"""Consecutive blocks of one tier: the first's place in a slot, the first's id, how many."""


class Waits(Protocol):
    """Who is told of each copy and each use."""

    trace: Trace | None

    def begin(self, name: str, taken: Ticket, begun: Ticket) -> None: ...

    def end(self, done: Ticket) -> None: ...

    def copied(self, name: str, size: int, first: Ticket, last: Ticket) -> None: ...


@dataclass(frozen=True, slots=True)
class Tile:
    """The KV of a sequence's next `keys` tokens, which rest in these blocks and may end within the last of them."""

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
    """`slots` slots of `tile_tokens` tokens each on DEVICE, filled ahead of the arithmetic. One slot is enough, but then nothing is ahead.

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
        waits: Waits | None,
        disk: ReadAhead | None = None,
    ) -> None:
        """disk: where blocks beyond the pool come from. Raises DeviceError if the device has not as much memory."""
        self._pool, self._copies, self._compute, self._waits, self._disk = pool, copies, compute, waits, disk
        self._slots = _slots(pool, slots, tile_tokens, device)
        layout = pool.layout
        shape = 2, tile_tokens, layout.kv_heads, layout.head_dim
        self._views = [slot.view(-1).view(getattr(torch, layout.dtype)).view(shape).unbind() for slot in self._slots]
        self._ready: list[Ticket | None] = [None] * slots
        """By slot: behind the last copy to it."""
        self._read: list[Ticket | None] = [None] * slots
        """By slot: behind the last use of it; none while it is used."""
        self._step = _Step(0, (), (), (), {})
        self.copied_bytes = 0

    def begin(
        self, tiles: Sequence[Tile], layers: Sequence[int], after: Ticket | None = None, seen: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Announce a step: for each layer, each tile is taken, in this order, or those whose indices `seen` lists for it. Copies start at
        once, behind `after`. Whatever is left of the step before is dropped."""
        block_size = self._pool.layout.block_size
        for tile in tiles:
            count = len(tile.blocks)
            assert (count - 1) * block_size < tile.keys <= count * block_size, f"{tile.keys} keys in {count} blocks"
            assert 0 < count <= self._slots[0].shape[1], f"{count} blocks in a slot of {self._slots[0].shape[1]}"
        every = range(len(tiles))
        visits = [(layer, tile) for at, layer in enumerate(layers) for tile in (every if seen is None else seen[at])]
        runs = [_runs(tile.blocks, self._pool.blocks) for tile in tiles]
        far = [[(at, first - self._pool.blocks, count) for at, first, count in some if first >= self._pool.blocks] for some in runs]
        on_disk = {visit: number for number, visit in enumerate(at for at, (_, tile) in enumerate(visits) if far[tile])}
        step = _Step((self._step.first + self._step.queued) % len(self._slots), tiles, runs, visits, on_disk)
        if after is not None:
            self._copies.wait(after)
        self._step = step
        if self._disk is not None:
            self._disk.begin([(visits[visit][0], far[visits[visit][1]]) for visit in on_disk])
        self._fill()

    def take(self) -> tuple[Tensor, Tensor]:
        """K and V of the next tile, dense `[keys, kv_heads, head_dim]`: what the compute stream does from now on finds them, until the
        release. One tile is in use at a time. Raises LostKV if the disk does not give back what it got."""
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
        step.taken = visit + 1
        k, v = self._views[slot]
        keys = step.tiles[step.visits[visit][1]].keys
        return k[:keys], v[:keys]

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

    def end(self) -> None:
        """Drop whatever is left of the step; copies that are queued are still made."""
        self.begin((), ())

    def _slot_of(self, visit: int) -> int:
        return (self._step.first + visit) % len(self._slots)

    def _name(self, visit: int) -> str:
        layer, tile = self._step.visits[visit]
        return f"kv.{layer}.{tile}"

    def _fill(self, needed: int = 0) -> None:
        """Queue the copies for which slots are free: those of the first `needed` visits, and others unless a disk lets wait for them."""
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
            for run in step.runs[tile]:
                for host, device in _halves(_source(pool, layer, run, staged), run, self._slots[slot]):
                    self._copies.copy_rows(device, host)
            ready = self._copies.mark()
            if number is not None and self._disk is not None:
                self._disk.copied(number, ready)
            size = len(step.tiles[tile].blocks) * self._pool.layout.layer_bytes
            if waits and began:
                waits.copied(self._name(step.queued), size, began, ready)
            self.copied_bytes += size
            self._ready[slot] = ready
            step.queued += 1


class Outbox:
    """KV on its way to the host, through `slots` staging slots of `max_tokens` tokens of one layer each on DEVICE."""

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
        self._empty: list[Ticket | None] = [None] * slots
        """By slot: behind the last copies out of it; none while they are being queued."""
        self._slot = 0
        """The one to use next."""

    def send(self, layer: int, k: Tensor, v: Tensor, blocks: Sequence[HostBlockId]) -> None:
        """k and v, whole `blocks` of tokens `[tokens, kv_heads, head_dim]`, of which each token is one run: to these blocks of the host."""
        tokens, slot = len(blocks) * self._pool.layout.block_size, self._slots[self._slot]
        assert len(k) == len(v) == tokens, f"K of {len(k)} tokens and V of {len(v)} for {len(blocks)} blocks"
        assert len(blocks) <= slot.shape[1], f"{len(blocks)} blocks in a slot of {slot.shape[1]}"
        if not blocks:
            return
        self._claim()
        for staged, rows in zip(slot[:, : len(blocks)], (k, v), strict=True):
            self._compute.copy_rows(staged.reshape(tokens, -1), rows.view(tokens, -1).view(torch.uint8))
        self._out.wait(self._compute.mark())
        runs = _runs(blocks, self._pool.blocks)
        far = [run for run in runs if run[1] >= self._pool.blocks]
        staging = self._disk.claim() if far and self._disk else None
        for run in runs:
            for host, device in _halves(_source(self._pool, layer, run, staging), run, slot):
                self._out.copy_rows(host, device)
        if far and self._disk:
            self._disk.write([(layer, (at, first - self._pool.blocks, count)) for at, first, count in far])
        self._pass_on()

    def demote(self, block: Tensor, target: HostBlockId) -> None:
        """All layers of a block of the device, uint8 `[block_bytes]`: to one of the host. What compute does next may write it over."""
        if target >= self._pool.blocks:
            self._demote_far(block, target - self._pool.blocks)
            return
        host = self._pool.block(target)
        assert len(block) == len(host), f"{len(block)} bytes for a block of {len(host)}"
        size = self._slots[0].numel()
        for start in range(0, len(host), size):
            part = slice(start, min(start + size, len(host)))
            staged = self._slots[self._slot].view(-1)[: part.stop - start]
            self._claim()
            self._compute.copy(staged, block[part])
            self._out.wait(self._compute.mark())
            self._out.copy(host[part], staged)
            self._pass_on()

    def _demote_far(self, block: Tensor, target: int) -> None:
        assert self._disk is not None, "a block beyond the host's pool, and no disk"
        size, layers = self._pool.layout.layer_bytes, self._pool.layout.layers
        staging, rows = self._disk.claim(), block.view(layers, size)
        for start in range(0, layers, self._slots[0].numel() // size):
            part = rows[start : start + self._slots[0].numel() // size]
            staged = self._slots[self._slot].view(-1)[: part.numel()]
            self._claim()
            self._compute.copy(staged, part.view(-1))
            self._out.wait(self._compute.mark())
            self._out.copy_rows(staging[start : start + len(part), :size], staged.view(part.shape))
            self._pass_on()
        self._disk.write([(layer, (layer, target, 1)) for layer in range(layers)])

    def landed(self) -> Ticket:
        """Done when all that has been sent and demoted is on the host."""
        return self._out.mark()

    def _claim(self) -> None:
        self._compute.wait(self._empty[self._slot] or self._out.mark())
        self._empty[self._slot] = None

    def _pass_on(self) -> None:
        self._empty[self._slot] = self._out.mark()
        self._slot = (self._slot + 1) % len(self._slots)


def ring_bytes(layout: KVLayout, slots: int, tokens: int) -> int:
    """Device memory of a ring, or of an outbox, of so many slots."""
    return slots * (tokens // layout.block_size) * layout.layer_bytes


def _slots(pool: HostPool, slots: int, tokens: int, device: torch.device) -> list[Tensor]:
    """Each uint8 `[2, blocks, bytes of a block's K or V]`."""
    layout = pool.layout
    blocks = tokens // layout.block_size
    assert slots * blocks > 0, f"{slots} slots of {tokens} tokens"
    assert tokens == blocks * layout.block_size, f"{tokens} tokens are not whole blocks of {layout.block_size}"
    return list(Arena(ring_bytes(layout, slots, tokens), device).bytes.view(slots, 2, blocks, layout.layer_bytes // 2))


def _runs(blocks: Sequence[int], near: int) -> list[_Run]:
    """near: how many blocks the host's pool has; a run lies on one side of that."""
    runs: list[_Run] = []
    for at, block in enumerate(blocks):
        if runs and block == runs[-1][1] + runs[-1][2] and block != near:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((at, block, 1))
    return runs


def _source(pool: HostPool, layer: int, run: _Run, staging: Tensor | None) -> Tensor:
    """Where one layer of a run's blocks lies in host memory: uint8 `[blocks, layer_bytes]`, rows of any stride."""
    at, first, count = run
    if first < pool.blocks:
        return pool.layer_rows(layer, first, count)
    assert staging is not None, "a block beyond the host's pool, and no disk"
    return staging[at : at + count, : pool.layout.layer_bytes]


def _halves(rows: Tensor, run: _Run, slot: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """What is one layer's K or V of consecutive blocks on the host, and in a slot: uint8 `[blocks, bytes of a block's K or V]`."""
    size, (at, _, count) = slot.shape[2], run
    for half in range(2):
        yield rows[:, half * size : (half + 1) * size], slot[half, at : at + count]
