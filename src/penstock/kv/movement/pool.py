"""KVPool: the bytes of the device's KV blocks, its pages, one allocation.

A KV block is computed here: each layer of a step writes its planes into the pages that the plan names. Which
page holds what is in `ledger.blocks.BlockLedger`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock.arch.layout import KVLayout, PlaneLayout
from penstock.step.plan import BlockId


class KVPool:
    """A KVPool has `blocks` blocks of KVLayout's shape. Nothing is cleared or checked."""

    def __init__(self, layout: KVLayout, blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.blocks = blocks
        # On a CPU untouched pages take no memory; they are filled as blocks are first used.
        self.bytes = torch.empty(blocks * layout.block_bytes, dtype=torch.uint8, device=device)
        """The bytes of all blocks, uint8 `[blocks * block_bytes]`."""
        self._blocks = self.bytes.view(blocks, layout.block_bytes)
        self.layers: list[tuple[Tensor, ...]] = [
            tuple(plane_views(self._blocks[:, offset : offset + size], placed, layout.block_size))
            for placed, offset, size in zip(
                layout.placed, layout.layer_offsets, layout.layer_sizes, strict=True
            )
        ]
        """The planes of each layer: strided views `[blocks, block_size, heads, width]`."""

    def block(self, id: BlockId) -> Tensor:
        """Return all layers of a block, uint8 `[block_bytes]`."""
        return self._blocks[id]


def plane_views(rows: Tensor, placed: Sequence[PlaneLayout], block_size: int) -> Iterator[Tensor]:
    """Yield the planes, `[rows, block_size, heads, width]`, of one layer of blocks.

    rows: uint8 `[rows, bytes]`, in the dtype of the arithmetic.
    """
    for one in placed:
        part = rows[:, one.offset : one.offset + one.size].view(getattr(torch, one.dtype))
        yield part.view(len(rows), block_size, one.plane.heads, one.plane.width)
