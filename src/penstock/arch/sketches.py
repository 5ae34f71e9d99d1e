"""Lay out a sketch, the small copy of a block's keys by which attention policies choose (`ops.sketch`)."""

from dataclasses import dataclass

from penstock.arch.spec import DTYPE_BYTES

_ALIGNMENT = 16
"""Bytes of a sketch are a multiple of it, so that its parts can be read as numbers of any size."""
QUERIES = 8
"""Queries scored at a time: meanwhile some times so many numbers are held for each key and head."""


@dataclass(frozen=True, slots=True)
class SketchLayout:
    """SketchLayout says how a block's sketch lies in bytes.

    In this order: least and greatest number of each channel, `[kv_heads, dim]` of the keys' dtype; lengths of
    remainders, float16 `[kv_heads, block_size]`; numbers, `[kv_heads, block_size, columns]`, with 4 bits
    those of two channels in a byte.

    block_size: tokens of a block.
    bits: of a number: 4, 8, or 0 for boxes alone.
    """

    block_size: int
    kv_heads: int
    dim: int
    dtype: str
    bits: int = 4

    @property
    def columns(self) -> int:
        """Return the bytes of a key's numbers.

        With 4 bits byte i has channel i in its low half, and channel i + columns in its high one.
        """
        return self.dim if self.bits == 8 else -(-self.dim // 2)

    @property
    def box_bytes(self) -> int:
        """Return the bytes of a block's least and greatest numbers."""
        return 2 * self.kv_heads * self.dim * DTYPE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Return the bytes of a block's sketch."""
        copy = self.kv_heads * self.block_size * (2 + self.columns) if self.bits else 0
        return -(-(self.box_bytes + copy) // _ALIGNMENT) * _ALIGNMENT

    def scratch_bytes(self, blocks: int, heads: int) -> int:
        """Bound the bytes that `scores` takes for so many blocks, beside what it returns."""
        keys = self.block_size * (self.kv_heads * self.dim + 6 * QUERIES * heads) if self.bits else 0
        return 4 * blocks * (keys + 6 * self.kv_heads * self.dim + 2 * QUERIES * heads * self.dim)
