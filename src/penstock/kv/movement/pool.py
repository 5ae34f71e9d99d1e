"""The device's KV blocks: one allocation, and every layer's view of it."""

import torch
from torch import Tensor

from penstock.arch.layout import KVLayout
from penstock.step.plan import BlockId


class KVPool:
    """`blocks` blocks of KVLayout's shape. Contents mean only what the ledger says; nothing here is cleared
    or checked."""

    def __init__(self, layout: KVLayout, blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.blocks = blocks
        shape = (blocks, layout.layers, 2, layout.block_size, layout.kv_heads, layout.head_dim)
        # On a CPU untouched pages take no memory; they are filled as blocks are first used.
        self._pool = torch.empty(shape, dtype=getattr(torch, layout.dtype), device=device)
        self.bytes = self._pool.view(-1).view(torch.uint8)
        """All of it, uint8 `[blocks * block_bytes]`."""
        self.layers: list[tuple[Tensor, Tensor]] = [
            (self._pool[:, layer, 0], self._pool[:, layer, 1]) for layer in range(layout.layers)
        ]
        """K and V of each layer: strided views `[blocks, block_size, kv_heads, head_dim]`."""

    def block(self, id: BlockId) -> Tensor:
        """All layers of a block: uint8 `[block_bytes]`."""
        return self._pool[id].view(-1).view(torch.uint8)
