"""How much memory the ways of far KV take: plain arithmetic, for those who build them and for those who
forecast."""

from penstock.arch.layout import KVLayout

RING, STAGING = 3, 2
"""Slots on the device: one is read while two are filled; one is filled while one is emptied."""
TILE = 64 << 20
"""Bytes of a tile: a copy of about a millisecond, in which the host has time to queue the next, and keys
enough for a kernel's rate."""
TILE_TOKENS = {"cuda": 32768, "cpu": 2048}
"""At most. A CPU copies at the rate at which it reads, so there what is copied had better be still in its
caches when it is read."""
_RING_PART = 16
"""Of the device's memory, at most one part in so many is for tiles."""


def ring_bytes(layout: KVLayout, slots: int, tokens: int) -> int:
    """Device memory of the slots of a ring, or of an outbox."""
    return slots * (tokens // layout.block_size) * layout.layer_bytes


def scratch_bytes(layout: KVLayout, tile_tokens: int) -> int:
    """Device memory that a ring has beside its slots."""
    return ring_bytes(layout.exact, 1, tile_tokens) if layout.rounded_from else 0


def carrier_bytes(layout: KVLayout, tile_tokens: int, chunk_tokens: int) -> int:
    """Device memory of a carrier."""
    slots = ring_bytes(layout, RING, tile_tokens) + ring_bytes(layout, STAGING, chunk_tokens)
    return slots + scratch_bytes(layout, tile_tokens)


def usual_tile(layout: KVLayout, total: int, most_tokens: int, kind: str) -> int:
    """Tokens of a tile, on a device of this kind with `total` bytes, for sequences of at most so many."""
    tile = min(TILE_TOKENS[kind], most_tokens)
    while tile > layout.block_size and (
        tile // layout.block_size * layout.layer_bytes > TILE
        or carrier_bytes(layout, tile, layout.block_size) > total // _RING_PART
    ):
        tile //= 2
    return max(tile // layout.block_size, 1) * layout.block_size
