"""Sizes say how much memory and disk the ways of far KV take, and what of it may be left unread: plain
values, to build them by and to plan by."""

from dataclasses import dataclass
from pathlib import Path

from penstock.arch.layout import KVLayout
from penstock.arch.sketches import SketchLayout
from penstock.memory.disk import in_pages

RING, STAGING = 3, 2
"""Slots on the device: one is read while two are filled; one is filled while one is emptied."""
AHEAD, BEHIND = 6, 3
"""Pinned slots for tiles that are read from disk ahead of use, and for what is written there."""
SAMPLE = 16
"""Queries of a run, evenly spread, for which blocks are chosen and what is missed is bounded, where no limit
asks for all of them."""
TILE = 64 << 20
"""Bytes of a tile: a copy of about a millisecond, in which the host has time to queue the next, and keys
enough for a kernel's rate."""
TILE_TOKENS = {"cuda": 32768, "cpu": 2048}
"""Tokens of a tile, at most. A CPU copies at the rate at which it reads, so there a tile should still be in
its caches when it is read."""
_RING_PART = 16
"""Tiles take at most one part in so many of the device's memory."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Room for KV on disk: so many blocks in a file in this directory."""

    blocks: int
    directory: Path


@dataclass(frozen=True, slots=True)
class Policies:
    """Policies say what rows and runs read of far KV.

    rows, runs: texts as `ops.policies.policy_of` reads them; None reads everything.
    limit: the fraction of attention that may be missed, above which the rest is read as well; None for any.
    bits: of a number in the sketches of keys (see `ops.sketch`).
    heads: how many the queries of a layer have, on this rank.
    """

    rows: str | None
    runs: str | None
    limit: float | None = None
    bits: int = 4
    heads: int = 1


def ring_bytes(layout: KVLayout, slots: int, tokens: int) -> int:
    """Return the device memory of the slots of a ring, or of an outbox."""
    return slots * (tokens // layout.block_size) * layout.layer_bytes


def scratch_bytes(layout: KVLayout, tile_tokens: int) -> int:
    """Return the device memory that a ring has beside its slots."""
    return ring_bytes(layout.exact, 1, tile_tokens) if layout.rounded_from else 0


def carrier_bytes(layout: KVLayout, tile_tokens: int, chunk_tokens: int) -> int:
    """Return the device memory of a carrier."""
    slots = ring_bytes(layout, RING, tile_tokens) + ring_bytes(layout, STAGING, chunk_tokens)
    return slots + scratch_bytes(layout, tile_tokens)


def usual_tile(layout: KVLayout, total: int, most_tokens: int, kind: str) -> int:
    """Return the tokens of a tile on a device of this kind.

    total: bytes of the device.
    most_tokens: tokens of the longest sequence.
    """
    tile = min(TILE_TOKENS[kind], most_tokens)
    while tile > layout.block_size and (
        tile // layout.block_size * layout.layer_bytes > TILE
        or carrier_bytes(layout, tile, layout.block_size) > total // _RING_PART
    ):
        tile //= 2
    return max(tile // layout.block_size, 1) * layout.block_size


def record_bytes(layout: KVLayout) -> int:
    """Return the bytes that a layer of a block takes in a file of long contexts: whole pages of the disk."""
    return in_pages(layout.layer_bytes)


def staging_bytes(layout: KVLayout, tile_tokens: int, chunk_tokens: int) -> int:
    """Return the host memory that a carrier with a disk takes, beside its blocks."""
    tile = tile_tokens // layout.block_size
    return record_bytes(layout) * (AHEAD * tile + BEHIND * behind_rows(layout, chunk_tokens))


def behind_rows(layout: KVLayout, chunk_tokens: int) -> int:
    """Return the records of a slot that goes to disk: a layer of a chunk, or all layers of a block."""
    return max(chunk_tokens // layout.block_size, layout.layers)


def chosen_bytes(layout: KVLayout, tile_tokens: int, most_blocks: int, policies: Policies) -> int:
    """Return the device memory that policies need: a ring, sketches as they pass, what is computed of them,
    and the scores of all blocks, which are there as pieces, as a whole and while they are looked at."""
    sketches, piece = sketch_layout(layout, policies.bits), piece_blocks(tile_tokens // layout.block_size)
    passing = 2 * piece * sketches.bytes + sketches.scratch_bytes(min(piece, most_blocks), policies.heads)
    scores = 4 * 6 * most_blocks * policies.heads * (SAMPLE if policies.runs else 1)
    return ring_bytes(layout, RING, tile_tokens) + scratch_bytes(layout, tile_tokens) + passing + scores


def sketch_layout(layout: KVLayout, bits: int) -> SketchLayout:
    """Return the layout of the sketches of the plane that queries are scored with, of a block in a layer."""
    exact, plane = layout.exact, layout.planes[0][scored_plane(layout)]
    return SketchLayout(exact.block_size, plane.heads, plane.width, exact.dtype, bits)


def scored_plane(layout: KVLayout) -> int:
    """Return which of a layer's planes queries are scored with; policies need it to be the same in all
    layers."""
    assert len(set(layout.planes)) == 1, "layers whose KV differs, and a policy"
    return next(index for index, plane in enumerate(layout.planes[0]) if plane.scored)


def piece_blocks(tile_blocks: int) -> int:
    """Return the blocks whose sketches are on the device at a time, twice over."""
    return max(tile_blocks // 2, 1)
