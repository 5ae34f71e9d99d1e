"""A worker's KV in host memory and on disk: blocks, and the ring and outbox by which a step reads and writes them."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.arch.layout import KVLayout
from penstock.kv.diskpool import DiskPool, record_bytes
from penstock.kv.hostpool import HostPool
from penstock.kv.pool import KVPool
from penstock.kv.staging import ReadAhead, Slots, WriteBehind
from penstock.kv.tiles import Outbox, Tile, TileRing, Waits, ring_bytes
from penstock.memory.streams import Stream, Ticket
from penstock.step.plan import HostBlockId, Order

RING, STAGING = 3, 2
"""Slots: one is read while two are filled; one is filled while one is emptied."""
AHEAD, BEHIND = 4, 3
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
    """Carries out a plan's orders, lends a step its tiles and sends its new KV to the host. What it does when is told in `kv.tiles`."""

    def __init__(
        self,
        layout: KVLayout,
        blocks: int,
        tile_tokens: int,
        chunk_tokens: int,
        device: torch.device,
        streams: Streams,
        waits: Waits | None,
        disk: Disk | None = None,
    ) -> None:
        """blocks: of the host. tile_tokens, chunk_tokens: at most in a tile, and in a step; whole blocks.

        Raises DeviceError if host, device or disk have not as much room.
        """
        self._sends: Sequence[Send] = ()
        self._closing = ExitStack()
        try:
            self.pool = HostPool(layout, blocks, device)
            self._closing.callback(self.pool.close)
            ahead = behind = None
            if disk is not None:
                self.disk = DiskPool(layout, disk.blocks, disk.directory)
                read = Slots(self.disk, AHEAD, tile_tokens // layout.block_size, device)
                self._closing.callback(read.close)
                written = Slots(self.disk, BEHIND, _behind_rows(layout, chunk_tokens), device)
                self._closing.callback(written.close)
                ahead, behind = ReadAhead(self.disk, read, streams.copies), WriteBehind(self.disk, written, streams.out)
            # Last in, first out: tasks on threads end before the streams that they wait for, and copies before their memory goes.
            self._closing.callback(streams.out.close)
            self._closing.callback(streams.copies.close)
            if disk is not None:
                self._closing.callback(self.disk.close)
            self.ring = TileRing(self.pool, RING, tile_tokens, device, streams.copies, streams.compute, waits, ahead)
            self.outbox = Outbox(self.pool, STAGING, chunk_tokens, device, streams.out, streams.compute, behind)
        except BaseException:
            self.close()
            raise

    def begin(
        self,
        orders: Sequence[Order],
        pages: KVPool,
        sends: Sequence[Send],
        tiles: Sequence[Tile],
        layers: Sequence[int],
        seen: Sequence[Sequence[int]],
    ) -> None:
        """A step begins: its orders first, and then the tiles that each of `layers` sees set out."""
        for order in orders:
            self.outbox.demote(pages.block(order.source), order.target)
        self._sends = sends
        landed: Ticket | None = self.outbox.landed() if tiles else None
        self.ring.begin(tiles, layers, landed, seen)

    def send(self, layer: int, k: Tensor, v: Tensor) -> None:
        """The step's K and V of a layer, `[tokens, kv_heads, head_dim]`, of which each token is one run: what goes to the host sets out."""
        for send in self._sends:
            part = slice(send.first, send.first + len(send.blocks) * self.pool.layout.block_size)
            self.outbox.send(layer, k[part], v[part], send.blocks)

    def take(self) -> tuple[Tensor, Tensor]:
        """K and V of the next tile."""
        return self.ring.take()

    def release(self) -> None:
        self.ring.release()

    def close(self) -> None:
        """Finish what is under way and unpin. A second call does nothing."""
        self._closing.close()


def carrier_bytes(layout: KVLayout, tile_tokens: int, chunk_tokens: int) -> int:
    """Device memory of a carrier."""
    return ring_bytes(layout, RING, tile_tokens) + ring_bytes(layout, STAGING, chunk_tokens)


def staging_bytes(layout: KVLayout, tile_tokens: int, chunk_tokens: int) -> int:
    """Host memory of a carrier with a disk, beside its blocks."""
    return record_bytes(layout) * (AHEAD * (tile_tokens // layout.block_size) + BEHIND * _behind_rows(layout, chunk_tokens))


def _behind_rows(layout: KVLayout, chunk_tokens: int) -> int:
    """Records of a slot that goes to disk: a layer of a chunk, or all layers of a block."""
    return max(chunk_tokens // layout.block_size, layout.layers)
