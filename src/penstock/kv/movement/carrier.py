"""A Carrier has a worker's KV below the device, and all that moves it.

A plan's orders and transfers come in here, and go to the part that carries them out: blocks of short requests
to `transfers`, which moves them whole between pages, host memory and the store; those of long requests to the
outbox and the ring (`tiles`), by way of the disk's slots (`staging`) where host memory is too small.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.arch.layout import KVLayout
from penstock.kv.movement.chosen import Chosen, Reader
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.pool import KVPool
from penstock.kv.movement.sizes import AHEAD, BEHIND, RING, STAGING, Disk, Policies, behind_rows
from penstock.kv.movement.staging import ReadAhead, Slots, WriteBehind
from penstock.kv.movement.tiles import Outbox, StallMeter, Streams, Tile, TileRing
from penstock.kv.movement.transfers import Transfers
from penstock.kv.store.blocks import BlockStore
from penstock.kv.store.diskpool import DiskPool
from penstock.memory.link import more_streams
from penstock.memory.streams import Ticket
from penstock.ops.attention.inputs import LayerAttention
from penstock.step.plan import HostBlockId, Order


@dataclass(frozen=True, slots=True)
class CarrierRoom:
    """A CarrierRoom says how much KV a carrier holds below the device, and moves at a time.

    blocks: blocks of `layout` in host memory.
    tile_tokens, chunk_tokens: tokens of a tile, and of a step, at most; whole blocks.
    disk: room for more blocks of long requests.
    policies: choose what is read of far KV; None reads everything.
    """

    layout: KVLayout
    blocks: int
    tile_tokens: int
    chunk_tokens: int
    disk: Disk | None = None
    policies: Policies | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """A Send is whole blocks among a step's tokens, from token `first` on, and the host's blocks for them."""

    first: int
    blocks: tuple[HostBlockId, ...]


class Carrier:
    """A Carrier carries out a plan's orders, lends a step its tiles and sends its new KV to the host.

    `tiles` says in which order copies and arithmetic wait for each other.
    """

    def __init__(
        self,
        room: CarrierRoom,
        device: torch.device,
        streams: Streams,
        waits: StallMeter | None = None,
        store: BlockStore | None = None,
    ) -> None:
        """Make the room, and take over streams and store.

        waits: notes the copies and uses of tiles.

        Raises DeviceError if host, device or disk have not as much room.
        """
        layout, disk = room.layout, room.disk
        self._sends: Sequence[Send] = ()
        self._layer = -1
        self.disk: DiskPool | None = None
        """The blocks of long requests behind the pool."""
        self.chosen: Chosen | None = None
        self.transfers: Transfers | None = None
        """Moves whole blocks; none where those on the host are in fp8 and there is no store."""
        self._closing = ExitStack()
        own = self._closing.enter_context
        try:
            self.pool = own(closing(HostPool(layout, room.blocks, device)))
            if waits is not None:
                self._closing.callback(waits.stalled)  # notes what was still on its way
            ahead = behind = None
            if disk is not None:
                rests = self.disk = own(closing(DiskPool(layout, disk.blocks, disk.directory)))
                ahead = self._read_ahead(room, rests, device, streams)
                rows = behind_rows(layout, room.chunk_tokens)
                written = own(closing(Slots(rests, BEHIND, rows, device)))
                behind = WriteBehind(rests, written, streams.out)
            if room.policies is not None:
                self.chosen = self._choosing(room, room.policies, device, streams)
            # Last in, first out: tasks on threads end before the streams that they wait for, and copies
            # before their memory goes.
            self._closing.callback(streams.out.close)
            self._closing.callback(streams.copies.close)
            if self.disk is not None:
                self._closing.callback(self.disk.close)
            self.ring = TileRing(self.pool, RING, room.tile_tokens, device, streams, waits, ahead)
            self.outbox = Outbox(self.pool, STAGING, room.chunk_tokens, device, streams, behind)
            if layout.rounded_from is None or store is not None:
                self.transfers = Transfers(
                    self.pool, *more_streams(device, streams.copies), streams.compute, store
                )
                self._closing.callback(self.transfers.close)
        except BaseException:
            self.close()
            streams.out.close()
            streams.copies.close()
            raise

    def _read_ahead(
        self, room: CarrierRoom, rests: DiskPool, device: torch.device, streams: Streams
    ) -> ReadAhead:
        slots = Slots(rests, AHEAD, room.tile_tokens // room.layout.block_size, device)
        return ReadAhead(rests, self._closing.enter_context(closing(slots)), streams.copies)

    def _choosing(
        self, room: CarrierRoom, policies: Policies, device: torch.device, streams: Streams
    ) -> Chosen:
        blocks, ahead = room.blocks, None
        if self.disk is not None:
            ahead = self._read_ahead(room, self.disk, device, streams)
            blocks += self.disk.blocks
        ring = TileRing(self.pool, RING, room.tile_tokens, device, streams, disk=ahead)
        tile = room.tile_tokens // room.layout.block_size
        chosen = Chosen(room.layout, blocks, tile, policies, ring, device, streams)
        return self._closing.enter_context(closing(chosen))

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
        """Begin a step: carry out its orders, and let the tiles set out that each of `layers` sees."""
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
        """Let what goes to the host of a layer set out.

        planes: the step's, `[tokens, heads, width]` each; a token is one run of bytes.
        """
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
        """Give the tile back that was taken last."""
        self.ring.release()

    def choose(
        self, reader: int, q: Tensor, lse: Tensor, layer: LayerAttention
    ) -> Iterator[tuple[Tensor, ...]]:
        """Lend what a policy chooses for a reader of the layer that was sent last, tile after tile."""
        assert self.chosen is not None, "a reader, and no policy"
        return self.chosen.choose(self._layer, reader, q, lse, layer)

    @property
    def copied_bytes(self) -> int:
        """Return the bytes of tiles and sketches that have come to the device."""
        return self.ring.copied_bytes + (self.chosen.copied_bytes if self.chosen is not None else 0)

    def close(self) -> None:
        """Finish what is under way and unpin. A second call does nothing."""
        self._closing.close()
