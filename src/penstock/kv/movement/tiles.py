"""Tiles are how KV of long contexts moves between the device and the host.

A long request's KV block is computed in a chunk of its prompt, layer by layer. The outbox sends each layer of
it to a block of the host (`Outbox.send`), or all layers from a page (`Outbox.demote`). From then on the block
is read there: a run of blocks is a tile, and the ring brings one layer of a tile after the other to the
device (`TileRing.take`) whenever queries attend to it. Blocks of short requests move whole (`transfers`).

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
6. A block on HOST is written over when nothing reads it: what is sent in a step is behind all that compute
has waited for, thus behind the copies of all tiles that earlier steps took, and no step sends what its own
tiles read. Tiles that were not taken are not looked at. Each waits only for what was queued before it, so
there is no circle of waits.

Weights that stream come over the same link, and a layer needs them before its tiles. So a tile ahead waits
for the copies of weights that its layer needs and that are queued (`sooner`). Tiles of the layer at hand wait
for none, and go between the parts of what is needed later (`memory.link`). Copies that are queued wait only
for what compute was given before, which waits for no tile that is not queued yet: there is no circle.

Blocks with ids beyond the host's pool rest on disk. They come and go by way of slots of their own
(`kv.staging`): a tile with such blocks is copied when they have been read, for which `take` waits, and with
it the host, if they are late. What is read is what was sent last (`kv.diskpool`), without a ticket.

Blocks may rest in fp8 (`fp8`). They are rounded on compute, into staging (3, 4), and tiles expanded on
compute, behind the wait for their copy (1), from the slot into a scratch, one for all, which is what `take`
lends. Only compute touches the
scratch, so what reads a tile is done before the next is expanded over it; and the mark of `release` is behind
both that expansion and the arithmetic (2). Compute must then be the stream that the calling thread gives work
to.

An interrupt can strike between any two instructions. Progress is committed by single assignments, after all
that they promise (`queued`, `taken`, `released`, `_step`, `_slot`). That a slot is in use is noted before it
is (no ticket in `_read`, `_empty`); the next use that finds it so makes a
mark, which is behind all that was queued. A
step that is broken off is simply left: its successor starts at the slot behind the last that was filled, and
what was copied in part is copied over, on the same stream.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from penstock.base.trace import Trace
from penstock.kv.movement.fp8 import expand, round_into, to_fp8
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.pool import plane_views
from penstock.kv.movement.rows import (
    Run,
    alike,
    beyond,
    each_layer,
    halves,
    pieces,
    rows_in_slot,
    runs,
    slot_memory,
)
from penstock.kv.movement.sizes import scratch_bytes
from penstock.kv.movement.staging import ReadAhead, WriteBehind
from penstock.memory.arena import Arena
from penstock.memory.streams import Stream, Ticket
from penstock.step.plan import HostBlockId

Key = TypeVar("Key")
Value = TypeVar("Value")

_FEW = 4
"""Runs of a tile that are copied one by one: a strided copy of a run is faster than its blocks as pieces."""
_MOST_VIEWS = 4096
"""Views of slots and of host memory that a ring keeps: a step's tiles are mostly those of the step before,
and to make their views anew takes a host most of a visit, its copies apart."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams are those that far KV needs: copies from the host, copies to it, and what computes."""

    copies: Stream
    out: Stream
    compute: Stream


class StallMeter(Protocol):
    """A StallMeter is given each copy and each use of a tile, and adds up how long uses waited for copies."""

    trace: Trace | None

    def begin(self, name: str, taken: Ticket, begun: Ticket) -> None:
        """Note a use: it was asked for at `taken`, and could begin at `begun`."""
        ...

    def end(self, done: Ticket) -> None:
        """Note that the use that began last ends at `done`."""
        ...

    def copied(self, name: str, size: int, first: Ticket, last: Ticket) -> None:
        """Note a copy of `size` bytes between two tickets."""
        ...

    def stalled(self) -> float:
        """Return the seconds for which uses have waited."""
        ...


@dataclass(frozen=True, slots=True)
class Tile:
    """A Tile is the KV of a sequence's next `keys` tokens. They rest in these blocks, and may end within the
    last of them."""

    blocks: tuple[HostBlockId, ...]
    keys: int


@dataclass(slots=True)
class _Step:
    """A _Step has the visits of a step, in order: a layer, and the index of a tile.

    first: the slot of visit 0.
    on_disk: visits with blocks on disk, and the number of each among those.
    queued, taken, released: how many visits have their copies queued, and were taken and released.
    """

    first: int
    tiles: Sequence[Tile]
    runs: Sequence[Sequence[Run]]
    visits: Sequence[tuple[int, int]]
    on_disk: Mapping[int, int]
    queued: int = 0
    taken: int = 0
    released: int = 0


class TileRing:
    """A TileRing has slots on the device that are filled ahead of the arithmetic.

    One slot is enough, but then nothing is ahead.
    """

    def __init__(
        self,
        pool: HostPool,
        slots: int,
        tile_tokens: int,
        device: torch.device,
        streams: Streams,
        waits: StallMeter | None = None,
        disk: ReadAhead | None = None,
    ) -> None:
        """Make `slots` slots of `tile_tokens` tokens each. Raises DeviceError if there is no memory for them.

        waits: notes the copies and uses of this ring alone.
        disk: gives blocks beyond the pool.
        """
        self._pool, self._copies, self._compute = pool, streams.copies, streams.compute
        self._waits, self._disk = waits, disk
        self._slots = slot_memory(pool, slots, tile_tokens, device)
        layout = pool.layout
        scratch = Arena(scratch_bytes(layout, tile_tokens), device).bytes if layout.rounded_from else None
        self._capacity = tile_tokens // layout.block_size
        self._views = [
            each_layer(layout.exact, slot if scratch is None else scratch, self._capacity)
            for slot in self._slots
        ]
        """The planes by slot and layer, `[tile_tokens, heads, width]`."""
        kinds = {
            one: [rows_in_slot(slot, one, self._capacity) for slot in self._slots] for one in layout.placed
        }
        self._rows = [[kinds[one][at] for one in layout.placed] for at in range(slots)]
        """Where the planes' bytes lie, by slot and layer, `[blocks, bytes in a block]`."""
        self._copied: dict[tuple[int, int, Run], tuple[tuple[Tensor, Tensor], ...]] = {}
        """What a run of blocks on the host is copied from, and to, by slot and layer."""
        self._lent: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
        """What is lent of a slot and layer, by keys."""
        self._ready: list[Ticket | None] = [None] * slots
        """A ticket behind the last copy to each slot."""
        self._read: list[Ticket | None] = [None] * slots
        """A ticket behind the last use of each slot; none while it is used."""
        self._step = _Step(0, (), (), (), {})
        self.sooner: Callable[[int], Ticket | None] = lambda layer: None
        """Returns a ticket behind copies of others that a layer needs before its tiles, if there are any."""
        self.copied_bytes = 0

    def begin(
        self,
        tiles: Sequence[Tile],
        layers: Sequence[int],
        after: Ticket | None = None,
        seen: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Announce a step: the tiles that will be taken, for each layer in this order.

        seen: indices of tiles for each layer; None for all of them.
        after: a ticket that copies wait for; they start at once.

        Whatever is left of the step before is dropped. Copies of it that are queued are still made.
        """
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
        each = [runs(tile.blocks, self._pool.blocks) for tile in tiles]
        far = [beyond(some, self._pool.blocks) for some in each]
        on_disk = {
            visit: number
            for number, visit in enumerate(at for at, (_, tile) in enumerate(visits) if far[tile])
        }
        step = _Step((self._step.first + self._step.queued) % len(self._slots), tiles, each, visits, on_disk)
        if after is not None:
            self._copies.wait(after)
        self._step = step
        if self._disk is not None:
            self._disk.begin([(visits[visit][0], far[visits[visit][1]]) for visit in on_disk])
        self._fill()

    def take(self) -> tuple[Tensor, ...]:
        """Lend the planes of the next tile, dense `[keys, heads, width]`, until the release.

        What the compute stream is given from now on finds them. One tile is in use at a time. Raises LostKV
        if the disk does not give back what it got.
        """
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
            count = len(tile.blocks)
            for one, rows, plane in zip(layout.placed[layer], self._rows[slot][layer], planes, strict=True):
                blocks = plane.view(-1, layout.block_size, *plane.shape[1:])
                expand(rows[:count], one, blocks[:count])
        lent = _kept(
            self._lent, (slot, layer, tile.keys), lambda: tuple(plane[: tile.keys] for plane in planes)
        )
        step.taken = visit + 1
        return lent

    def release(self) -> None:
        """Give the tile back: the arithmetic that was queued until now was the last to need it."""
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

    def _halves(
        self, slot: int, layer: int, run: Run, staged: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        def made() -> tuple[tuple[Tensor, Tensor], ...]:
            return tuple(halves(self._pool, layer, run, staged, self._rows[slot][layer]))

        return made() if staged is not None else _kept(self._copied, (slot, layer, run), made)

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
            if (sooner := self.sooner(layer)) is not None:
                self._copies.wait(sooner)
            began = self._copies.mark() if waits and waits.trace else None
            if staged is None and len(step.runs[tile]) > _FEW:
                found = pieces(pool, layer, step.tiles[tile].blocks, self._capacity)
                self._copies.copy_pieces(self._slots[slot], pool.bytes, found)
            else:
                for run in step.runs[tile]:
                    for host, device in self._halves(slot, layer, run, staged):
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


def _kept(views: dict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """Return the views that are kept by a key, or make them and keep them."""
    found = views.get(key)
    if found is None:
        if len(views) >= _MOST_VIEWS:
            views.clear()
        found = views[key] = make()
    return found


class Outbox:
    """An Outbox sends KV to the host through staging slots on the device."""

    def __init__(
        self,
        pool: HostPool,
        slots: int,
        max_tokens: int,
        device: torch.device,
        streams: Streams,
        disk: WriteBehind | None = None,
    ) -> None:
        """Make `slots` slots of `max_tokens` tokens of a layer. Raises DeviceError if there is no memory.

        disk: takes blocks beyond the pool.
        """
        self._pool, self._out, self._compute, self._disk = pool, streams.out, streams.compute, disk
        self._slots = slot_memory(pool, slots, max_tokens, device)
        self._capacity = max_tokens // pool.layout.block_size
        self._empty: list[Ticket | None] = [None] * slots
        """A ticket behind the last copies out of each slot; none while they are being queued."""
        self._slot = 0
        """The slot to use next."""

    def send(self, layer: int, planes: Sequence[Tensor], blocks: Sequence[HostBlockId]) -> None:
        """Send a layer's planes of whole blocks of tokens to these blocks of the host.

        planes: `[tokens, heads, width]` each; a token is one run of bytes.
        """
        layout = self._pool.layout
        tokens, slot = len(blocks) * layout.block_size, self._slots[self._slot]
        lengths = [len(plane) for plane in planes]
        assert set(lengths) == {tokens}, f"planes of {lengths} tokens for {len(blocks)} blocks"
        assert len(blocks) <= self._capacity, f"{len(blocks)} blocks in a slot of {self._capacity}"
        if not blocks:
            return
        self._claim()
        staged = rows_in_slot(slot, layout.placed[layer], self._capacity)
        for one, rows, plane in zip(layout.placed[layer], staged, planes, strict=True):
            if one.rounded:
                to_fp8(plane.view(len(blocks), -1, *plane.shape[1:]), rows[: len(blocks)])
            else:
                into = rows[: len(blocks)].reshape(tokens, -1)
                self._compute.copy_rows(into, plane.view(tokens, -1).view(torch.uint8))
        self._out.wait(self._compute.mark())
        each = runs(blocks, self._pool.blocks)
        far = beyond(each, self._pool.blocks)
        staging = self._disk.claim() if far and self._disk else None
        for run in each:
            for host, device in halves(self._pool, layer, run, staging, staged):
                self._out.copy_rows(host, device)
        if far and self._disk:
            self._disk.write([(layer, run) for run in far])
        self._pass_on()

    def demote(self, block: Tensor, target: HostBlockId) -> None:
        """Send all layers of a block of the device to one of the host. Compute may write it over next.

        block: uint8 `[bytes of a block on the device]`.
        """
        layout, far = self._pool.layout, target - self._pool.blocks
        exact = layout.exact
        assert len(block) == exact.block_bytes, f"{len(block)} bytes for a block of {exact.block_bytes}"
        if far >= 0:
            assert self._disk is not None, "a block beyond the host's pool, and no disk"
            claimed = self._disk.claim()
        for layers in alike(layout, self._slots[0].numel()):
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
        """Return a ticket that is done when all that has been sent and demoted is on the host."""
        return self._out.mark()

    def _claim(self) -> None:
        self._compute.wait(self._empty[self._slot] or self._out.mark())
        self._empty[self._slot] = None

    def _pass_on(self) -> None:
        self._empty[self._slot] = self._out.mark()
        self._slot = (self._slot + 1) % len(self._slots)
