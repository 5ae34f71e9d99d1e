"""A worker's KV in host memory and on disk: blocks, and the ring and outbox by which a step reads and writes
them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.arch.layout import KVLayout
from penstock.kv.movement.chosen import SAMPLE, Chosen, Policies, Reader, piece_blocks, sketch_layout
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.pool import KVPool
from penstock.kv.movement.sizes import RING, STAGING, ring_bytes, scratch_bytes
from penstock.kv.movement.staging import ReadAhead, Slots, WriteBehind
from penstock.kv.movement.tiles import Outbox, StallMeter, Tile, TileRing
from penstock.kv.movement.transfers import Transfers
from penstock.kv.store.blocks import BlockStore
from penstock.kv.store.diskpool import DiskPool, record_bytes
from penstock.memory.streams import Stream, Ticket, more_streams
from penstock.step.plan import HostBlockId, Order

AHEAD, BEHIND = 6, 3
"""Pinned slots for tiles that are read from disk ahead of use, and for what is written there."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Room for KV on disk: so many blocks in a file in this directory."""

    blocks: int
    directory: Path


@dataclass(frozen=True, slots=True)
class Streams:
    """Host to device, device to host, and what computes."""

    copies: Stream
    out: Stream
    compute: Stream


@dataclass(frozen=True, slots=True)
class Send:
    """Whole blocks among a step's tokens, from token `first` on, that go to these blocks of the host."""

    first: int
    blocks: tuple[HostBlockId, ...]


class Carrier:
    """Carries out a plan's orders, lends a step its tiles and sends its new KV to the host. What it does when
    is told in `kv.tiles`."""

    def __init__(
        self,
        layout: KVLayout,
        blocks: int,
        tile_tokens: int,
        chunk_tokens: int,
        device: torch.device,
        streams: Streams,
        waits: StallMeter | None,
        disk: Disk | None = None,
        policies: Policies | None = None,
        store: BlockStore | None = None,
    ) -> None:
        """blocks: of the host. tile_tokens, chunk_tokens: at most in a tile, and in a step; whole blocks.

        policies: for what is chosen instead of all being read. store: taken over.
        Raises DeviceError if host, device or disk have not as much room.
        """
        self._sends: Sequence[Send] = ()
        self._layer = -1
        self.disk: DiskPool | None = None
        """Of long contexts, behind the pool."""
        self.chosen: Chosen | None = None
        self.transfers: Transfers | None = None
        """Of whole blocks; none where blocks on the host are not what they are on the device."""
        self._closing = ExitStack()
        try:
            self.pool = HostPool(layout, blocks, device)
            self._closing.callback(self.pool.close)
            if waits is not None:
                self._closing.callback(waits.stalled)  # notes what was still on its way
            ahead = behind = None
            if disk is not None:
                rests = self.disk = DiskPool(layout, disk.blocks, disk.directory)
                self._closing.callback(rests.close)
                read = Slots(rests, AHEAD, tile_tokens // layout.block_size, device)
                self._closing.callback(read.close)
                written = Slots(rests, BEHIND, _behind_rows(layout, chunk_tokens), device)
                self._closing.callback(written.close)
                ahead, behind = (
                    ReadAhead(rests, read, streams.copies),
                    WriteBehind(rests, written, streams.out),
                )
            if policies is not None:
                self.chosen = self._choosing(layout, blocks, tile_tokens, device, streams, disk, policies)
            # Last in, first out: tasks on threads end before the streams that they wait for, and copies
            # before their memory goes.
            self._closing.callback(streams.out.close)
            self._closing.callback(streams.copies.close)
            if self.disk is not None:
                self._closing.callback(self.disk.close)
            self.ring = TileRing(
                self.pool, RING, tile_tokens, device, streams.copies, streams.compute, waits, ahead
            )
            self.outbox = Outbox(
                self.pool, STAGING, chunk_tokens, device, streams.out, streams.compute, behind
            )
            if layout.rounded_from is None:
                self.transfers = Transfers(
                    self.pool, *more_streams(device, streams.copies), streams.compute, store
                )
                self._closing.callback(self.transfers.close)
        except BaseException:
            self.close()
            streams.out.close()
            streams.copies.close()
            raise

    def _choosing(
        self,
        layout: KVLayout,
        blocks: int,
        tile_tokens: int,
        device: torch.device,
        streams: Streams,
        disk: Disk | None,
        policies: Policies,
    ) -> Chosen:
        tile, ahead = tile_tokens // layout.block_size, None
        if disk is not None and self.disk is not None:
            read = Slots(self.disk, AHEAD, tile, device)
            self._closing.callback(read.close)
            ahead = ReadAhead(self.disk, read, streams.copies)
            blocks += disk.blocks
        ring = TileRing(self.pool, RING, tile_tokens, device, streams.copies, streams.compute, None, ahead)
        chosen = Chosen(
            layout, blocks, tile, policies, ring, device, streams.copies, streams.out, streams.compute
        )
        self._closing.callback(chosen.close)
        return chosen

    def begin(
        self,
        orders: Sequence[Order],
        pages: KVPool,
        sends: Sequence[Send],
        tiles: Sequence[Tile],
        layers: Sequence[int],
        seen: Sequence[Sequence[int]],
        readers: Sequence[Reader] = (),
    ) -> None:
        """A step begins: its orders first, and then the tiles that each of `layers` sees set out."""
        for order in orders:
            block = pages.block(order.source)
            self.outbox.demote(block, order.target)
            if self.chosen is not None:
                self.chosen.note_block(block, order.target)
        self._sends = sends
        landed: Ticket | None = self.outbox.landed() if tiles or readers else None
        self.ring.begin(tiles, layers, landed, seen)
        if self.chosen is not None and landed is not None:
            self.chosen.begin(readers, landed)

    def send(self, layer: int, planes: Sequence[Tensor]) -> None:
        """Take the step's planes of a layer, `[tokens, heads, width]`, of which each token is one run: what
        goes to the host sets out."""
        for send in self._sends:
            part = slice(send.first, send.first + len(send.blocks) * self.pool.layout.block_size)
            parts = [plane[part] for plane in planes]
            self.outbox.send(layer, parts, send.blocks)
            if self.chosen is not None:
                self.chosen.note(layer, parts, send.blocks)
        self._layer = layer

    def take(self) -> tuple[Tensor, ...]:
        """Lend the planes of the next tile."""
        return self.ring.take()

    def release(self) -> None:
        self.ring.release()

    def choose(self, reader: int, q: Tensor, lse: Tensor, scale: float) -> Iterator[tuple[Tensor, ...]]:
        """What a policy chooses for a reader of the layer that was sent last, tile after tile."""
        assert self.chosen is not None, "a reader, and no policy"
        return self.chosen.choose(self._layer, reader, q, lse, scale)

    @property
    def copied_bytes(self) -> int:
        """Of tiles, to the device."""
        return self.ring.copied_bytes + (self.chosen.copied_bytes if self.chosen is not None else 0)

    def close(self) -> None:
        """Finish what is under way and unpin. A second call does nothing."""
        self._closing.close()


def chosen_bytes(layout: KVLayout, tile_tokens: int, most_blocks: int, policies: Policies) -> int:
    """Device memory of what policies need: a ring, sketches as they pass, what is computed of them, and the
    scores of all blocks, which are there as pieces, as a whole and while they are looked at."""
    sketches, piece = sketch_layout(layout, policies.bits), piece_blocks(tile_tokens // layout.block_size)
    passing = 2 * piece * sketches.bytes + sketches.scratch_bytes(min(piece, most_blocks), policies.heads)
    scores = 4 * 6 * most_blocks * policies.heads * (SAMPLE if policies.runs else 1)
    return ring_bytes(layout, RING, tile_tokens) + scratch_bytes(layout, tile_tokens) + passing + scores


def staging_bytes(layout: KVLayout, tile_tokens: int, chunk_tokens: int) -> int:
    """Host memory of a carrier with a disk, beside its blocks."""
    return record_bytes(layout) * (
        AHEAD * (tile_tokens // layout.block_size) + BEHIND * _behind_rows(layout, chunk_tokens)
    )


def _behind_rows(layout: KVLayout, chunk_tokens: int) -> int:
    """Records of a slot that goes to disk: a layer of a chunk, or all layers of a block."""
    return max(chunk_tokens // layout.block_size, layout.layers)
