"""Far KV of which a policy chooses what is read: the bounds of every block's keys, and the tiles of the blocks that were chosen.

Bounds rest in host memory, a thirty-second of the KV for blocks of 32 tokens, and come to the device layer by layer, as a layer's queries
ask for them. What is chosen streams through a ring of its own. A choice is made on the device and known to the host before the copies are
queued, so each layer waits for the one before: what that costs, reading less must save.

Why this is safe. The bounds of what was sent are computed on compute, into memory that is kept until `out` has copied it; they are read
behind the same ticket as the blocks themselves (`begin`), and the buffer that they are read into is filled behind the mark that its last
use left on compute. The ring is that of `kv.tiles`.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.arch.layout import KVLayout
from penstock.kv.tiles import Tile, TileRing
from penstock.memory.arena import Arena, pinned_if_possible
from penstock.memory.streams import Stream, Ticket
from penstock.ops.policies import KeyBounds, Policy, QuerySummary
from penstock.step.plan import HostBlockId


@dataclass(frozen=True, slots=True)
class Reader:
    """Queries that a policy looks for: those of a row, or of a run, whose first `len(blocks)` blocks are far; `start` is the first's
    position."""

    blocks: NDArray[np.int32]
    start: int
    run: bool


@dataclass(frozen=True, slots=True)
class Policies:
    """What rows and runs read of far KV, everything if nothing is said. limit: the fraction of attention that may be missed, above which
    the rest is read as well; None for any."""

    rows: Policy | None
    runs: Policy | None
    limit: float | None = None


@dataclass(slots=True)
class Missed:
    """Over all choices so far. `most`: the largest fraction of a query's attention that its bounds let it miss, after what was read again
    because it was too much."""

    choices: int = 0
    fallbacks: int = 0
    """Choices that were not good enough: everything was read."""
    most: float = 0.0
    total: float = 0.0
    """Of all choices, each one's largest."""
    blocks_read: int = 0
    blocks: int = 0


class Chosen:
    """Owned by the Carrier. One thread."""

    def __init__(
        self,
        layout: KVLayout,
        blocks: int,
        most_blocks: int,
        tile_blocks: int,
        policies: Policies,
        ring: TileRing,
        device: torch.device,
        copies: Stream,
        out: Stream,
        compute: Stream,
    ) -> None:
        """blocks: that there are, near and far. most_blocks: of a sequence.

        Raises DeviceError if host or device have not as much memory.
        """
        self._layout, self._policies, self._ring, self._tile = layout, policies, ring, tile_blocks
        self._copies, self._out, self._compute = copies, out, compute
        self._size = bounds_bytes(layout)
        self._arena = pinned_if_possible(layout.layers * blocks * self._size, device)
        self._store = self._arena.bytes.view(layout.layers, blocks, self._size)
        self._buffer = Arena(most_blocks * self._size, device).bytes.view(most_blocks, self._size)
        self._read: Ticket | None = None
        """Behind the last use of the buffer."""
        self._kept: deque[tuple[Ticket, Tensor]] = deque()
        """Bounds on their way to the host."""
        self._readers: Sequence[Reader] = ()
        self.missed = Missed()

    def begin(self, readers: Sequence[Reader], after: Ticket) -> None:
        """A step with these readers, whose bounds and blocks have landed behind `after`."""
        self._readers = readers
        self._copies.wait(after)

    def note(self, layer: int, k: Tensor, blocks: Sequence[HostBlockId]) -> None:
        """The keys of whole blocks, `[tokens, kv_heads, head_dim]`, that are sent to the host."""
        bounds = self._bounds(k.view(len(blocks), self._layout.block_size, *k.shape[1:]))
        self._out.wait(self._compute.mark())
        start = 0
        for first, count in _runs(blocks):
            self._out.copy_rows(self._store[layer, first : first + count], bounds[start : start + count])
            start += count
        self._keep(bounds)

    def note_block(self, block: Tensor, target: HostBlockId) -> None:
        """All layers of a block of the device, uint8 `[block_bytes]`, that is demoted."""
        layout = self._layout
        kind: torch.dtype = getattr(torch, layout.dtype)
        keys = block.view(kind).view(layout.layers, 2, layout.block_size, layout.kv_heads, layout.head_dim)[:, 0]
        bounds = self._bounds(keys)
        self._out.wait(self._compute.mark())
        self._out.copy_rows(self._store[:, target], bounds)
        self._keep(bounds)

    def choose(self, layer: int, reader: int, q: Tensor, lse: Tensor, scale: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Lends tile after tile, K and V `[keys, kv_heads, head_dim]`, each until the next is asked for.

        q: the reader's queries `[queries, heads, dim]`. lse: of all that they have seen, `[queries, heads]`, kept up to date by the caller.
        """
        who = self._readers[reader]
        count, missed = len(who.blocks), self.missed
        bounds = self._load(layer, who.blocks)
        policy = self._policies.runs if who.run else self._policies.rows
        assert policy is not None, "a reader without a policy"
        choice = policy(layer, QuerySummary.of(q, scale, who.start), bounds)
        chosen = choice.blocks.cpu().numpy()
        yield from self._tiles(layer, who.blocks[chosen])
        missed.choices += 1
        missed.blocks += count
        missed.blocks_read += len(chosen)
        if len(chosen) == count:
            return
        share = float(choice.missed(lse).max())
        if self._policies.limit is not None and share > self._policies.limit:
            missed.fallbacks += 1
            missed.blocks_read += count - len(chosen)
            yield from self._tiles(layer, np.delete(who.blocks, chosen))
            return
        missed.total += share
        missed.most = max(missed.most, share)

    @property
    def copied_bytes(self) -> int:
        return self._ring.copied_bytes

    def close(self) -> None:
        """Unpin. No copy may be in flight. A second call does nothing."""
        self._arena.close()

    def _tiles(self, layer: int, blocks: NDArray[np.int32]) -> Iterator[tuple[Tensor, Tensor]]:
        size = self._layout.block_size
        parts = [blocks[at : at + self._tile].tolist() for at in range(0, len(blocks), self._tile)]
        self._ring.begin([Tile(tuple(HostBlockId(block) for block in part), len(part) * size) for part in parts], [layer])
        for _ in parts:
            yield self._ring.take()
            self._ring.release()

    def _bounds(self, keys: Tensor) -> Tensor:
        """Of keys `[blocks, block_size, kv_heads, head_dim]`: uint8 `[blocks, bytes]`. Exact, since they are some of the keys' numbers."""
        low, high = keys.aminmax(dim=1) if keys.is_cuda else (keys.amin(1), keys.amax(1))
        return torch.stack((low, high), dim=1).flatten(1).view(torch.uint8)

    def _load(self, layer: int, blocks: NDArray[np.int32]) -> KeyBounds:
        layout, start = self._layout, 0
        self._copies.wait(self._read or self._compute.mark())
        self._read = None
        for first, count in _runs(blocks):
            self._copies.copy_rows(self._buffer[start : start + count], self._store[layer, first : first + count])
            start += count
        self._compute.wait(self._copies.mark())
        kind: torch.dtype = getattr(torch, layout.dtype)
        whole = self._buffer[: len(blocks)].view(kind).view(-1, 2, layout.kv_heads, layout.head_dim).float()
        self._read = self._compute.mark()
        low, high = whole.unbind(1)
        return KeyBounds(low, high, layout.block_size, len(blocks) * layout.block_size)

    def _keep(self, bounds: Tensor) -> None:
        self._kept.append((self._out.mark(), bounds))
        while self._kept and self._kept[0][0].done:
            self._kept.popleft()


def bounds_bytes(layout: KVLayout) -> int:
    """Of a layer of a block: its keys' least and greatest."""
    return layout.layer_bytes // layout.block_size


def _runs(blocks: Sequence[int] | NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Consecutive blocks: the first, and how many."""
    ids = np.asarray(blocks)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 2) != 1)
    yield from zip(ids[starts].tolist(), np.diff(starts, append=len(ids)).tolist(), strict=True)
