"""Sizes say how much memory the ways of far KV take: plain arithmetic, to build them by and to plan by."""

from penstock.arch.layout import KVLayout

RING, STAGING = 3, 2
"""Slots on the device: one is read while two are filled; one is filled while one is emptied."""
TILE = 64 << 20
"""Bytes of a tile: a copy of about a millisecond, in which the host has time to queue the next, and keys
enough for a kernel's rate."""
TILE_TOKENS = {"cuda": 32768, "cpu": 2048}
"""Tokens of a tile, at most. A CPU copies at the rate at which it reads, so there a tile should still be in
its caches when it is read."""
_RING_PART = 16
"""Tiles take at most one part in so many of the device's memory."""


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
