"""A worker's KV in host memory: blocks, and the ring and outbox by which a step reads and writes them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.arch.layout import KVLayout
from penstock.kv.hostpool import HostPool
from penstock.kv.pool import KVPool
from penstock.kv.tiles import Outbox, Tile, TileRing, Waits, ring_bytes
from penstock.memory.streams import Stream, Ticket
from penstock.step.plan import HostBlockId, Order

RING, STAGING = 3, 2
"""Slots: one is read while two are filled; one is filled while one is emptied."""


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
    ) -> None:
        """blocks: of the host. tile_tokens, chunk_tokens: at most in a tile, and in a step; whole blocks.

        Raises DeviceError if host or device have not as much memory."""
        self.pool = HostPool(layout, blocks, device)
        self._streams = streams
        self._sends: Sequence[Send] = ()
        self._closed = False
        try:
            self.ring = TileRing(self.pool, RING, tile_tokens, device, streams.copies, streams.compute, waits)
            self.outbox = Outbox(self.pool, STAGING, chunk_tokens, device, streams.out, streams.compute)
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
        if self._closed:
            return
        self._closed = True
        self._streams.copies.close()
        self._streams.out.close()
        self.pool.close()


def carrier_bytes(layout: KVLayout, tile_tokens: int, chunk_tokens: int) -> int:
    """Device memory of a carrier."""
    return ring_bytes(layout, RING, tile_tokens) + ring_bytes(layout, STAGING, chunk_tokens)
