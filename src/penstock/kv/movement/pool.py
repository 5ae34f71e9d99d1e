"""KVPool: the bytes of the device's KV blocks, its pages, one allocation; and StatePool, its rows of state.

A KV block is computed here: each layer of a step writes its planes into the pages that the plan names. Which
page holds what is in `ledger.blocks.BlockLedger`.
"""

from collections.abc import Iterator, Sequence
from math import gcd, prod

import torch
from torch import Tensor

from penstock.arch.layout import KVLayout, PlaneLayout, StateLayout
from penstock.memory.arena import drop_pages
from penstock.step.plan import BlockId


class KVPool:
    """A KVPool has `blocks` blocks of KVLayout's shape. Nothing is cleared or checked."""

    def __init__(
        self, layout: KVLayout, blocks: int, device: torch.device, state: "StatePool | None" = None
    ) -> None:
        """Allocate the blocks, and take over the state of the same layers, if there is any."""
        self.layout, self.state = layout, state
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
        """The planes of each layer, strided views `[blocks, block_size, heads, width]`; then its arrays of
        state, strided views `[rows, *shape]`."""
        if state is not None:
            self.layers = [planes + arrays for planes, arrays in zip(self.layers, state.layers, strict=True)]

        self._tokens = list(self._tokens_together())
        """KV by tokens, of planes that lie together: integers `[blocks, planes, block_size, width]`."""

    def _tokens_together(self) -> Iterator[Tensor]:
        """Yield the planes of all layers, as many at a time as follow one another and are of one width."""
        size = self.layout.block_size
        planes = [
            (offset + one.offset, one.size // size)
            for layer, offset in zip(self.layout.placed, self.layout.layer_offsets, strict=True)
            for one in layer
        ]
        first = 0
        for at in range(1, len(planes) + 1):
            begin, width = planes[first]
            if at < len(planes) and planes[at] == (begin + (at - first) * size * width, width):
                continue
            part = self._blocks[:, begin : begin + (at - first) * size * width]
            step = gcd(width, begin, self.layout.block_bytes, 8)
            whole: torch.dtype = getattr(torch, {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}[step])
            yield part.view(whole).view(self.blocks, at - first, size, width // step)
            first = at

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the KV of some tokens, in all layers, from slots to slots, int64 `[tokens]`.

        All of it is read before any is written.
        """
        assert self.layout.rounded_from is None, "tokens of a block in fp8 have a scale together"
        size = self.layout.block_size
        for view in self._tokens:
            view[targets // size, :, targets % size] = view[sources // size, :, sources % size]

    def free(self) -> None:
        """Forget what all blocks hold. In host memory they take none from now on, until they are used."""
        if self.bytes.device.type == "cpu":
            drop_pages(self.bytes)

    def block(self, id: BlockId) -> Tensor:
        """Return all layers of a block, uint8 `[block_bytes]`."""
        return self._blocks[id]


class StatePool:
    """Rows of StateLayout's shape: one for each row of the scheduler, and a last one for padding.

    Why this is safe. A row is its request's from the admission on, and only steps that have a share of that
    request read or write it. Steps are carried out in the order of their plans: what a step writes of a
    request that has ended meanwhile lies before the step that clears the row for the next.
    """

    def __init__(self, layout: StateLayout, sequences: int, device: torch.device) -> None:
        rows = sequences + 1
        self._rows = torch.zeros(rows, layout.row_bytes, dtype=torch.uint8, device=device)
        self.layers: list[tuple[Tensor, ...]] = []
        """The arrays of each layer: strided views `[rows, *shape]`."""
        for placed in layout.placed:
            views = []
            for offset, array in placed:
                kind: torch.dtype = getattr(torch, layout.dtype_of(array))
                size = prod(array.shape) * kind.itemsize
                views.append(self._rows[:, offset : offset + size].view(kind).view(rows, *array.shape))
            self.layers.append(tuple(views))

    def clear(self, rows: Tensor) -> None:
        """Make zeros of rows, int64 `[rows]`: the state of sequences that begin."""
        self._rows.index_fill_(0, rows, 0)


def plane_views(rows: Tensor, placed: Sequence[PlaneLayout], block_size: int) -> Iterator[Tensor]:
    """Yield the planes, `[rows, block_size, heads, width]`, of one layer of blocks.

    rows: uint8 `[rows, bytes]`, in the dtype of the arithmetic.
    """
    for one in placed:
        part = rows[:, one.offset : one.offset + one.size].view(getattr(torch, one.dtype))
        yield part.view(len(rows), block_size, one.plane.heads, one.plane.width)
