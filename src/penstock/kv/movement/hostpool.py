"""HostPool: the bytes of the host's KV blocks, one pinned allocation.

A block comes here whole (`transfers`) or layer by layer (`tiles`). Which block holds what is in
`ledger.host.HostLedger`.
"""

import torch
from torch import Tensor

from penstock.arch.layout import KVLayout
from penstock.memory.arena import pinned_if_possible
from penstock.step.plan import HostBlockId


class HostPool:
    """A HostPool has `blocks` blocks of KVLayout's shape. Nothing is cleared or checked."""

    def __init__(self, layout: KVLayout, blocks: int, device: torch.device) -> None:
        """Allocate them, pinned for `device`. Raises DeviceError if the host has not as much memory."""
        self.layout = layout
        self.blocks = blocks
        self._arena = pinned_if_possible(blocks * layout.block_bytes, device)
        self.bytes = self._arena.bytes
        """The bytes of all blocks, uint8 `[blocks * block_bytes]`."""
        self._bytes = self.bytes.view(blocks, layout.block_bytes)

    def layer_rows(self, layer: int, first: int, count: int) -> Tensor:
        """Return one layer of blocks [first, first + count), uint8 `[count, bytes of the layer]`.

        Its rows are a block apart.
        """
        begin = self.layout.layer_offsets[layer]
        return self._bytes[first : first + count, begin : begin + self.layout.layer_sizes[layer]]

    def block(self, id: HostBlockId) -> Tensor:
        """Return all layers of a block, uint8 `[block_bytes]`."""
        return self._bytes[id]

    def close(self) -> None:
        """Unpin. No copy may be in flight. A second call does nothing."""
        self._arena.close()
