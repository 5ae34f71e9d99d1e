"""Chosen lends the far KV that an attention policy chooses to read.

Every KV block that goes to the host leaves a sketch of its keys here (`Chosen.note`). Later queries are
scored against the sketches, and only the blocks that the policy chooses come back, as tiles
(`Chosen.choose`).

Sketches rest in host memory: with 4 bits a seventh of the KV, with 0 a sixty-fourth for blocks of 64 tokens.
They pass through the device piece by piece, layer by layer, as a layer's queries ask for them. What is chosen
streams through a ring of its own. A choice is made on the device and known to the host before the copies are
queued, so each layer waits for the one before: what that costs, reading less must save.

Where blocks rest in fp8, sketches are of the keys as they rest, since those are what would be read.

Why this is safe. The sketches of what was sent are computed on compute, into memory that is kept until `out`
has copied it; they are read behind the same ticket as the blocks themselves (`begin`). A half of the buffer
that they are read into is filled behind the mark that its last use left on compute. The ring is that of
`kv.tiles`.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.arch.layout import KVLayout
from penstock.base.meter import SHARES, MissedStats
from penstock.kv.movement.fp8 import as_rested
from penstock.kv.movement.pool import plane_views
from penstock.kv.movement.rows import runs
from penstock.kv.movement.sizes import SAMPLE, Policies, piece_blocks, scored_plane, sketch_layout
from penstock.kv.movement.tiles import Streams, Tile, TileRing
from penstock.memory.arena import Arena, pinned_if_possible
from penstock.memory.streams import Ticket
from penstock.ops.attention.inputs import LayerAttention
from penstock.ops.policies import Past, policy_of
from penstock.ops.sketch import Scores, scores, sketch
from penstock.step.plan import HostBlockId


@dataclass(frozen=True, slots=True)
class Reader:
    """A Reader has queries that a policy chooses for: those of a row, or of a run.

    blocks: the far blocks, which are the first of its sequence.
    start: the position of the first query.
    """

    blocks: NDArray[np.int32]
    start: int
    run: bool


class Chosen:
    """A Chosen has the sketches of far blocks, and lends the tiles that policies choose. One thread calls
    all."""

    def __init__(
        self,
        layout: KVLayout,
        blocks: int,
        tile_blocks: int,
        policies: Policies,
        ring: TileRing,
        device: torch.device,
        streams: Streams,
    ) -> None:
        """Make room for the sketches of `blocks` blocks, in host memory and on disk.

        ring: brings the tiles that are chosen.

        Raises DeviceError if host or device have not as much memory.
        """
        self._layout, self._limit, self._ring, self._tile = layout, policies.limit, ring, tile_blocks
        self._copies, self._out, self._compute = streams.copies, streams.out, streams.compute
        self._rows, self._runs = policy_of(policies.rows or "full"), policy_of(policies.runs or "full")
        self._sketch = sketch_layout(layout, policies.bits)
        self._scored = scored_plane(layout)
        size, self._piece = self._sketch.bytes, piece_blocks(tile_blocks)
        self._arena = pinned_if_possible(layout.layers * blocks * size, device)
        self._store = self._arena.bytes.view(layout.layers, blocks, size)
        self._buffer = Arena(2 * self._piece * size, device).bytes.view(2, self._piece, size)
        self._read: list[Ticket | None] = [None, None]
        """A ticket behind the last use of each half of the buffer; none while it is used."""
        self._kept: deque[tuple[Ticket, Tensor]] = deque()
        """Sketches on their way to the host."""
        self._readers: Sequence[Reader] = ()
        self.sum_ranks: Callable[[Tensor], object] | None = None
        """Puts the sum over all ranks in the place of a tensor, where there are several: all choose the same
        blocks, and read the rest where one of them misses too much."""
        self.missed = Missed()
        self.sketched_bytes = 0
        """Bytes of sketches that have come to the device."""

    def begin(self, readers: Sequence[Reader], after: Ticket) -> None:
        """Begin a step with these readers. Their sketches and blocks have landed behind `after`."""
        self._readers = readers
        self._copies.wait(after)

    def note(self, layer: int, planes: Sequence[Tensor], blocks: Sequence[HostBlockId]) -> None:
        """Keep sketches of whole blocks, planes `[tokens, heads, width]`, that are sent to the host."""
        k = planes[self._scored]
        sketches = self._sketches(k.view(len(blocks), self._layout.block_size, *k.shape[1:]))
        self._out.wait(self._compute.mark())
        for at, first, count in runs(blocks):
            self._out.copy_rows(self._store[layer, first : first + count], sketches[at : at + count])
        self._keep(sketches)

    def note_block(self, block: Tensor, target: HostBlockId) -> None:
        """Keep sketches of all layers of a block of the device, uint8 `[block_bytes]`, that is demoted."""
        exact = self._layout.exact
        rows = block.view(exact.layers, -1)
        keys = next(islice(plane_views(rows, exact.placed[0], exact.block_size), self._scored, None))
        sketches = self._sketches(keys)
        self._out.wait(self._compute.mark())
        self._out.copy_rows(self._store[:, target], sketches)
        self._keep(sketches)

    def choose(
        self, layer: int, reader: int, q: Tensor, lse: Tensor, attention: LayerAttention
    ) -> Iterator[tuple[Tensor, ...]]:
        """Lend tile after tile, K and V `[keys, kv_heads, head_dim]`, each until the next is asked for.

        q: the reader's queries `[queries, heads, dim]`. lse: of all that they have seen, `[queries, heads]`,
        kept up to date by the caller. attention: the scale and the cap of scores.
        """
        who, limit = self._readers[reader], self._limit
        count, missed = len(who.blocks), self.missed
        policy = self._runs if who.run else self._rows
        assert policy is not None, "a reader without a policy"
        some = (
            slice(None) if len(q) <= SAMPLE else torch.linspace(0, len(q) - 1, SAMPLE, device=q.device).long()
        )
        asked = q[some].float() * attention.scale
        past = Past(
            count,
            self._layout.block_size,
            who.start,
            who.start + len(q),
            lambda: self._scores(layer, who.blocks, asked, attention.cap),
            self.sum_ranks,
        )
        choice = policy(layer, past)
        chosen = np.arange(count) if choice is None else choice.keep.cpu().numpy().nonzero()[0]
        yield from self._tiles(layer, who.blocks[chosen])
        missed.choices += 1
        missed.blocks += count
        missed.blocks_read += len(chosen)
        if choice is None or len(chosen) == count:
            missed.note(0.0, 0.0)
            return
        if limit is not None and len(asked) < len(q):
            some, choice = (
                slice(None),
                replace(choice, skipped=self._skipped(layer, who.blocks, q, attention, choice.keep)),
            )
        shares = choice.missed(lse[some])
        most, mean = torch.stack((shares.max(), shares.mean())).tolist()
        if limit is not None and self._anywhere(most > limit):
            missed.fallbacks += 1
            missed.blocks_read += count - len(chosen)
            yield from self._tiles(layer, np.delete(who.blocks, chosen))
            missed.note(0.0, 0.0)
            return
        missed.note(most, mean)

    @property
    def copied_bytes(self) -> int:
        """Return the bytes of tiles and sketches that have come to the device."""
        return self._ring.copied_bytes + self.sketched_bytes

    def close(self) -> None:
        """Unpin. No copy may be in flight. A second call does nothing."""
        self._arena.close()

    def _anywhere(self, here: bool) -> bool:
        """Return whether something is so on any rank."""
        if self.sum_ranks is None:
            return here
        ranks = torch.tensor([float(here)], device=self._buffer.device)
        self.sum_ranks(ranks)
        return bool(ranks)

    def _tiles(self, layer: int, blocks: NDArray[np.int32]) -> Iterator[tuple[Tensor, ...]]:
        size = self._layout.block_size
        parts = [blocks[at : at + self._tile].tolist() for at in range(0, len(blocks), self._tile)]
        self._ring.begin(
            [Tile(tuple(HostBlockId(block) for block in part), len(part) * size) for part in parts], [layer]
        )
        for _ in parts:
            yield self._ring.take()
            self._ring.release()

    def _sketches(self, keys: Tensor) -> Tensor:
        """Return sketches, uint8 `[blocks, bytes]`, of keys `[blocks, block_size, kv_heads, head_dim]`."""
        return sketch(as_rested(keys) if self._layout.rounded_from else keys, self._sketch)

    def _scores(self, layer: int, blocks: NDArray[np.int32], q: Tensor, cap: float | None) -> Scores:
        """Return the scores of scaled queries, float32 `[queries, heads, dim]`, with all blocks."""
        found = [scores(q, sketches, self._sketch, cap) for _, sketches in self._pieces(layer, blocks)]
        return Scores(torch.cat([one.upper for one in found], 2), torch.cat([one.likely for one in found], 2))

    def _skipped(
        self, layer: int, blocks: NDArray[np.int32], q: Tensor, attention: LayerAttention, keep: Tensor
    ) -> Tensor:
        """Return what `Choice.skipped` is, of all queries of a run.

        It is computed piece by piece, since their scores with all blocks are too many to be held.
        """
        skipped = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        for part, sketches in self._pieces(layer, blocks):
            for first in range(0, len(q), SAMPLE):
                some = slice(first, first + SAMPLE)
                asked = q[some].float() * attention.scale
                found = scores(asked, sketches, self._sketch, attention.cap)
                upper = found.upper.masked_fill_(keep[part], -torch.inf)
                skipped[some] = torch.logaddexp(skipped[some], upper.logsumexp(2))
        return skipped

    def _pieces(self, layer: int, blocks: NDArray[np.int32]) -> Iterator[tuple[slice, Tensor]]:
        """Yield which of the blocks, and their sketches, uint8 `[blocks, bytes]`, lent until the next are."""
        for number, start in enumerate(range(0, len(blocks), self._piece)):
            half, part = number % 2, slice(start, start + self._piece)
            self._copies.wait(self._read[half] or self._compute.mark())
            self._read[half] = None
            some = blocks[part].tolist()
            for at, first, count in runs(some):
                self._copies.copy_rows(
                    self._buffer[half, at : at + count], self._store[layer, first : first + count]
                )
            self._compute.wait(self._copies.mark())
            self.sketched_bytes += len(some) * self._sketch.bytes
            yield part, self._buffer[half, : len(some)]
            self._read[half] = self._compute.mark()

    def _keep(self, sketches: Tensor) -> None:
        self._kept.append((self._out.mark(), sketches))
        while self._kept and self._kept[0][0].done:
            self._kept.popleft()


class Missed:
    """A Missed counts what choices have left out, for MissedStats."""

    def __init__(self) -> None:
        self.choices = self.fallbacks = self.blocks = self.blocks_read = 0
        self.most = self._worst = self._mean = 0.0
        self._worst_buckets, self._mean_buckets = ([0] * (len(SHARES) + 1) for _ in range(2))

    def note(self, most: float, mean: float) -> None:
        """Note a choice: the largest of the bounds over queries and heads, and their mean."""
        self.most = max(self.most, most)
        self._worst += most
        self._mean += mean
        self._worst_buckets[bisect_left(SHARES, most)] += 1
        self._mean_buckets[bisect_left(SHARES, mean)] += 1

    @property
    def stats(self) -> MissedStats:
        """Return the counts now."""
        return MissedStats(
            self.choices,
            self.fallbacks,
            self.blocks_read,
            self.blocks,
            self.most,
            self._worst,
            self._mean,
            tuple(self._worst_buckets),
            tuple(self._mean_buckets),
        )
