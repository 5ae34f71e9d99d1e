"""The host's KV blocks: one pinned allocation, and views of its bytes."""

import torch
from torch import Tensor

from penstock.arch.layout import KVLayout
from penstock.memory.arena import pinned_if_possible
from penstock.step.plan import HostBlockId


class HostPool:
    """`blocks` blocks of KVLayout's shape, pinned for `device`. Contents mean only what the ledger says;
    nothing is cleared or checked."""

    def __init__(self, layout: KVLayout, blocks: int, device: torch.device) -> None:
        """Raises DeviceError if the host has not as much memory."""
        self.layout = layout
        self.blocks = blocks
        self._arena = pinned_if_possible(blocks * layout.block_bytes, device)
        self.bytes = self._arena.bytes
        """All of it, uint8 `[blocks * block_bytes]`."""
        self._bytes = self.bytes.view(blocks, layout.block_bytes)

    def layer_rows(self, layer: int, first: int, count: int) -> Tensor:
        """Return one layer of blocks [first, first + count): uint8 `[count, bytes of the layer]`, rows a
        block apart."""
        begin = self.layout.layer_offsets[layer]
        return self._bytes[first : first + count, begin : begin + self.layout.layer_sizes[layer]]

    def block(self, id: HostBlockId) -> Tensor:
        """All layers of a block: uint8 `[block_bytes]`."""
        return self._bytes[id]

    def close(self) -> None:
        """Unpin. No copy may be in flight. A second call does nothing."""
        self._arena.close()
