"""Adds the products of LoRA adapters to those of a model's matrices, for rows of several adapters at once.

The model's matrices stay as they are, in whatever format and wherever they rest. A row of an adapter gets
`(x @ A.T) @ B` added, with A `[rank, in]`, and B `[rank, out]` already scaled. All adapters lie in slots of
one bank, whose addresses never change. Slot 0 is no adapter.

There are three ways to compute a step. `GroupedRows` computes each adapter with its own rows and its own
rank: for long steps, and for a few adapters. `StackedRows` needs nothing from the host: for few rows of many
adapters, and for recorded steps. Few rows have kernels on a GPU, which read what rows need. Elsewhere it
computes all slots for all rows in one product, and clears what is of other slots. That reads each matrix of
the bank once, where gathering matrices for each row would read and write them for every row. `RunRows` is for
recorded prompts, whose rows have one adapter, so that other slots cost nothing however many there are.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from penstock.ops.kernels import triton_kernels
from penstock.ops.linear import add_dense, dense_linear
from penstock.ops.matrix import Matrix

_RUN = 32
"""Rows of one adapter behind each other, from which they are computed where they are."""
Ints = NDArray[np.int64]


class LoraMatrix:
    """Holds the adapters' pairs of matrices for one of the model's, which may be several that are fused.

    a: `[parts, slots, rank, in]`. b: of each part `[slots, rank, out]`. What is beyond an adapter's own rank
    is zero.
    """

    def __init__(self, heights: Sequence[int], width: int, *, slots: int, rank: int, like: Tensor) -> None:
        """Begin with empty slots. heights: rows of each part. like: has the device and the dtype."""
        self.a, ends = like.new_zeros(len(heights), slots, rank, width), np.cumsum(heights).tolist()
        self._every = like.new_zeros(slots * rank * ends[-1])
        """All of b, part by part."""
        each = torch.split(self._every, [slots * rank * height for height in heights])
        self.b = tuple(one.view(slots, rank, -1) for one in each)
        self._ranks = np.zeros((slots, len(heights)), dtype=np.int64)
        self._heights = tuple(heights)
        self._columns = [slice(end - height, end) for end, height in zip(ends, heights, strict=True)]

    def clear(self, slot: int) -> None:
        """Empty a slot, behind all steps that were begun."""
        self.a[:, slot - 1].zero_()
        for b in self.b:
            b[slot - 1].zero_()
        self._ranks[slot - 1] = 0

    def put(self, slot: int, part: int, a: Tensor, b: Tensor) -> None:
        """Put an adapter's pair into an empty slot, behind all steps that were begun. b: `[rank, out]`."""
        rank = len(a)
        self.a[part, slot - 1, :rank].copy_(a)
        self.b[part][slot - 1, :rank].copy_(b)
        self._ranks[slot - 1, part] = rank

    def add_one(self, x: Tensor, y: Tensor, slot: int) -> None:
        """Add the products of one adapter to y `[rows, out]`, for x `[rows, in]`."""
        for part, rank in enumerate(self._ranks[slot - 1].tolist()):
            if rank:
                a, b = self.a[part, slot - 1, :rank], self.b[part][slot - 1, :rank]
                add_dense(_low(x, a), b.t(), y[:, self._columns[part]])

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, slot_of: Tensor, *, early: bool, **how: Any
    ) -> Tensor | None:
        """Return the product of x with the model's `weight` and what adapters add to it, rounded once; None
        where no kernel computes both.

        slot_of, early: see `add_by_kernels`; after this, others are early too. how: `gated` and `out` of
        `few_rows`.
        """
        kernels = triton_kernels("linear") if x.is_cuda else None
        if kernels is None or not kernels.suits_adapters(x, weight, self.a):
            return None
        adapters = kernels.AdaptedRows(self.a, self._every, self._heights, slot_of, early)
        made: Tensor = kernels.few_rows(x, weight, bias, adapters=adapters, **how)
        return made

    def add_by_kernels(self, x: Tensor, y: Tensor, slot_of: Tensor, *, early: bool) -> bool:
        """Add to each row of y the products of its adapter, if there are kernels for so few rows. Tell
        whether that is done.

        slot_of: int64 `[rows]`, the slot of each. early: whether this was done before in the same step.
        """
        kernels = triton_kernels("lora") if x.is_cuda else None
        if kernels is None or not kernels.suits(x, self.a):
            return False
        kernels.add(x, y, self.a, self._every, self._heights, slot_of, early=early)
        return True

    def add_all(self, x: Tensor, y: Tensor, others: Tensor) -> None:
        """Add to each row of y the products of its adapter. others: bool `[rows, slots]`, the slots that are
        not the row's."""
        parts, slots, rank, width = self.a.shape
        low = _low(x, self.a.view(-1, width)).view(len(x), parts, slots, rank)
        # Cleared and not multiplied with zero: what is too large in another slot would become a NaN.
        low.masked_fill_(others[:, None, :, None], 0)
        for of_part, b, columns in zip(low.flatten(2).unbind(1), self.b, self._columns, strict=True):
            add_dense(of_part, b.view(slots * rank, -1).t(), y[:, columns])

    def add_at(self, x: Tensor, y: Tensor, slot: Tensor) -> None:
        """Add to all rows of y the products of one adapter. slot: int64 `[1]`, its slot."""
        parts, _, rank, width = self.a.shape
        index = slot - 1
        low = _low(x, self.a.index_select(1, index).view(-1, width)).view(len(x), parts, rank)
        for of_part, b, columns in zip(low.unbind(1), self.b, self._columns, strict=True):
            add_dense(of_part, b.index_select(0, index)[0].t(), y[:, columns])


def _low(x: Tensor, a: Tensor) -> Tensor:
    """Return `x @ a.T`, `[rows, rank]`."""
    return F.linear(x, a) if x.is_cuda else dense_linear(x, a)


class LoraRows:
    """Knows the adapter of each row of a step."""

    def add(self, x: Tensor, y: Tensor, matrix: LoraMatrix, first: int = 0) -> None:
        """Add to y `[rows, out]` the products of x with the adapters of rows from `first` on."""
        raise NotImplementedError

    def product(
        self, x: Tensor, weight: Matrix, bias: Tensor | None, matrix: LoraMatrix, first: int, **how: Any
    ) -> Tensor | None:
        """Return the product of x with the model's `weight` and what `add` adds to it, or None where that is
        not computed at once; see LoraMatrix.product."""
        return None


class FewRows(LoraRows):
    """Knows the slot of each row from the device alone, int64 `[rows]`."""

    def __init__(self, slots: Tensor) -> None:
        """Know these slots."""
        self.slots, self._early = slots, False

    def product(
        self, x: Tensor, weight: Matrix, bias: Tensor | None, matrix: LoraMatrix, first: int, **how: Any
    ) -> Tensor | None:
        """Return the product of x with the model's `weight` and those of adapters, if a kernel has both."""
        if weight.dense is None:
            return None
        slot_of = self.slots[first : first + len(x)]
        made = matrix.product(x, weight.dense, bias, slot_of, early=self._early, **how)
        self._early = self._early or made is not None
        return made

    def add_by_kernels(self, x: Tensor, y: Tensor, matrix: LoraMatrix, first: int) -> bool:
        """Do what `add` does, if there are kernels for so few rows. Tell whether that is done."""
        slot_of = self.slots[first : first + len(x)]
        done = matrix.add_by_kernels(x, y, slot_of, early=self._early)
        self._early = self._early or done
        return done


class GroupedRows(LoraRows):
    """Computes each adapter's rows together. The host knows which these are."""

    def __init__(self, slots: Ints, send: Callable[[Ints], Tensor]) -> None:
        """Know the slot of each row, `[rows]`. send: copies an array to the device."""
        self._slots, self._send = slots, send
        self._groups: dict[tuple[int, int], list[tuple[int, slice | Tensor]]] = {}

    def add(self, x: Tensor, y: Tensor, matrix: LoraMatrix, first: int = 0) -> None:
        """Add to y the products of x with the adapters of rows from `first` on."""
        key = first, len(x)
        if key not in self._groups:
            self._groups[key] = list(self._grouped(self._slots[first : first + len(x)]))
        for slot, rows in self._groups[key]:
            if isinstance(rows, slice):
                matrix.add_one(x[rows], y[rows], slot)
                continue
            some = y.index_select(0, rows)
            matrix.add_one(x.index_select(0, rows), some, slot)
            y.index_copy_(0, rows, some)

    def _grouped(self, slots: Ints) -> Iterator[tuple[int, slice | Tensor]]:
        """Yield each adapter with its rows: long runs of them by themselves, the others together."""
        for slot in np.unique(slots[slots > 0]).tolist():
            rows = np.flatnonzero(slots == slot)
            runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
            alone = [run for run in runs if len(run) >= _RUN or len(runs) == 1]
            yield from ((slot, slice(int(run[0]), int(run[-1]) + 1)) for run in alone)
            if len(alone) < len(runs):
                yield slot, self._send(np.concatenate([run for run in runs if len(run) < _RUN]))


class StackedRows(FewRows):
    """Computes each row with its own adapter, which the device alone knows."""

    def __init__(self, slots: Tensor, count: int) -> None:
        """Know the slot of each row, int64 `[rows]`. count: how many slots there are."""
        super().__init__(slots)
        self._count = count
        self._others: Tensor | None = None

    def add(self, x: Tensor, y: Tensor, matrix: LoraMatrix, first: int = 0) -> None:
        """Add to y the products of x with the adapters of rows from `first` on."""
        if self.add_by_kernels(x, y, matrix, first):
            return
        if self._others is None:
            every = torch.arange(1, self._count + 1, device=self.slots.device)
            self._others = self.slots[:, None] != every
        matrix.add_all(x, y, self._others[first : first + len(x)])


class RunRows(FewRows):
    """Computes all rows with one adapter, which the device alone knows: those of a prompt. What is behind
    the prompt is nobody's, and may get whatever there is."""

    def add(self, x: Tensor, y: Tensor, matrix: LoraMatrix, first: int = 0) -> None:
        """Add to y the products of x with the adapter of rows from `first` on. The first of all rows has one,
        but where a step is only recorded."""
        if not self.add_by_kernels(x, y, matrix, first):
            matrix.add_at(x, y, self.slots[:1].clamp(min=1))
