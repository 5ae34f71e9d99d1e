"""Integer codes of four or eight bits: each group of columns of a row has a scale, perhaps a zero point."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import TYPE_CHECKING, ClassVar

from penstock.arch.formats.codes import (
    EXPERT_KERNELS,
    in_steps,
    packed,
    packed_bytes,
    spread,
    unpacked,
)
from penstock.arch.formats.format import ALL, StoredTensor, TensorSlice, WeightFormat
from penstock.arch.formats.repack import below_each_other, checked_scales, exactly, places, within
from penstock.base.errors import CheckpointError

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor


SCALES = "stored_scales"
"""A key of our own in `quantization_config`: the dtype in which all scales rest."""


class Packing:
    """A packing says where a checkpoint has the numbers of a matrix. Two are equal if their fields are.

    may_be_zero: whether scales of zero are allowed, which most quantisers never write.
    """

    may_be_zero: ClassVar[bool] = False

    def codes(self, source: TensorSlice, bits: int) -> TensorSlice:
        """Return the tensor with the codes."""
        raise NotImplementedError

    def scales(self, source: TensorSlice, groups: int) -> TensorSlice:
        """Return the tensor with the scales."""
        raise NotImplementedError

    def zeros(self, source: TensorSlice, groups: int, bits: int) -> TensorSlice | None:
        """Return the tensor with the zero points, where there may be one."""
        return None

    def order(self, source: TensorSlice) -> TensorSlice | None:
        """Return the tensor with the group of each column, int32 `[in]`, where there may be one."""
        return None

    def extent(self, source: TensorSlice) -> TensorSlice | None:
        """Return the tensor with the numbers of rows and columns, `[2]`, where there may be one."""
        return None

    def read_codes(self, whole: "Tensor", shape: tuple[int, ...], bits: int) -> "Tensor":
        """Return the codes, uint8 `[out, in]`."""
        raise NotImplementedError

    def read_scales(self, whole: "Tensor", shape: tuple[int, int]) -> "Tensor":
        """Return the scales `[out, groups]`, which is `shape`."""
        raise NotImplementedError

    def read_zeros(self, whole: "Tensor", shape: tuple[int, ...], bits: int) -> "Tensor":
        """Return the zero points as codes, uint8 `[out, groups]`; shape: of the result."""
        raise NotImplementedError


@dataclass(frozen=True)
class Integers(WeightFormat):
    """A number is `(code - zero) * scale`.

    Parts, at rest on every tier:

    - `codes`, uint8, see `codes.packed`.
    - `scale` `[out, groups]`; column c is in group `c // group`.
    - `zero`, uint8 `[out, groups]`, if zero points differ from `2 ** (bits - 1)`.
    - `order`, int32 `[in]`, if groups are not runs of columns: codes lie by group, and the code at c is
      that of column `order[c]`. Activations are taken in this order.
    - `groups`, int32 `[in]`, the group of each code where a rank's columns cut groups unevenly.
    """

    name: str = "int4"
    bits: int = 4
    group: int = 0
    """Columns that share a scale at rest; set by `cut`."""
    scale: str = "float16"
    """The dtype of scales."""
    zeros: bool = False
    ordered: bool = False
    uneven: bool = False
    """True if the parts have `groups`."""
    checkpoint_group: int = 0
    """Columns that share a scale in the checkpoint; 0 is all. `group` divides it."""
    width: int = 0
    """Columns of the matrix; set by `cut`."""
    packing: Packing = field(default_factory=Packing)
    kernels: ClassVar[str] = "few_bits"
    native: ClassVar[str] = "few_bits"

    @property
    def middle(self) -> int:
        """The zero point where none is stored."""
        return 1 << (self.bits - 1)

    @property
    def fuses(self) -> bool:
        """Tell whether matrices that read the same activations can be one: not if each has its own order."""
        return not self.ordered

    @property
    def expert_kernels(self) -> str:
        """Return the module for experts of few bits, if it reads these: not in another order."""
        reads = not self.ordered and in_steps(self.group, self.width, 32 if self.zeros else 16)
        return EXPERT_KERNELS if reads else ""

    def cut(self, sources: Sequence[TensorSlice]) -> "Integers":
        """Return the format with groups that divide at the columns where a rank's part begins."""
        width, columns = sources[0].taken[1], sources[0].columns
        group = self.checkpoint_group or sources[0].shape[1]
        if columns is None:
            return replace(self, group=group, width=width)
        if self.ordered:
            return replace(self, group=group, width=width, uneven=True)
        return replace(self, group=gcd(group, columns.start), width=width)

    def stored(self, dtype: str, sources: Sequence[TensorSlice]) -> tuple[StoredTensor, ...]:
        """Return codes, scales, and what else the format has; see the class."""
        height, columns = sum(source.taken[0] for source in sources), self.width
        groups = -(-(sources[0].shape[1] if self.uneven else columns) // self.group)
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "codes": ((height, packed_bytes(columns, self.bits)), "uint8"),
            "scale": ((height, groups), self.scale),
        }
        shapes |= {"zero": ((height, groups), "uint8")} if self.zeros else {}
        shapes |= {"order": ((columns,), "int32")} if self.ordered else {}
        shapes |= {"groups": ((columns,), "int32")} if self.uneven else {}
        parts = []
        for name, (shape, kept) in shapes.items():
            repack = _Repack(name, self, dtype, tuple(sources))
            random = {"zero": range(self.middle, self.middle + 1), "order": range(1), "groups": range(1)}
            parts.append(StoredTensor(name, shape, kept, repack.reads, repack, random.get(name)))
        return tuple(parts)

    def dequantise(self, parts: "Mapping[str, Tensor]", rows: slice = ALL) -> "Tensor":
        """Return the matrix in float32, `[out, in]`: exact products of codes and scales."""
        codes = unpacked(parts["codes"][rows], self.bits, self.width).float()
        zero, groups, order = parts.get("zero"), parts.get("groups"), parts.get("order")

        def wide(values: "Tensor") -> "Tensor":
            return spread(values, self.group, self.width) if groups is None else values[:, groups]

        codes -= self.middle if zero is None else wide(zero[rows].float())
        codes *= wide(parts["scale"][rows].float())
        if order is None:
            return codes
        put_back = codes.new_zeros(codes.shape)
        put_back[:, order] = codes
        return put_back

    def look_up(self, parts: "Mapping[str, Tensor]", rows: "Tensor") -> "Tensor":
        """Return some rows of the matrix in float32; all rows share one order of columns."""
        shared = ("order", "groups")
        return self.dequantise({name: part if name in shared else part[rows] for name, part in parts.items()})


@dataclass(frozen=True)
class _Repack:
    """Makes one part of a matrix of checkpoint tensors."""

    part: str
    format: Integers
    dtype: str
    sources: tuple[TensorSlice, ...]

    @property
    def reads(self) -> tuple[TensorSlice, ...]:
        """Return the tensors that the part is made of: as many of each source as of the others."""
        return tuple(read for source in self.sources for read in self._reads(source))

    def _reads(self, source: TensorSlice) -> tuple[TensorSlice, ...]:
        packing, bits = self.format.packing, self.format.bits
        groups = self._grid(source)[1]
        order = packing.order(source)
        if order is not None and not self.format.ordered:
            order = replace(order, optional=True)
        zeros = packing.zeros(source, groups, bits)
        if zeros is not None and self.format.zeros:
            zeros = replace(zeros, optional=False)
        reads: dict[str, tuple[TensorSlice | None, ...]] = {
            "codes": (packing.codes(source, bits), order, packing.extent(source)),
            "zero": (zeros,),
            "scale": (packing.scales(source, groups), zeros),
        }
        return tuple(one for one in reads.get(self.part, (order,)) if one is not None)

    def _group(self, source: TensorSlice) -> int:
        """Return how many columns of the whole matrix share a scale in the checkpoint."""
        return self.format.checkpoint_group or source.shape[1]

    def __call__(self, wholes: "Sequence[Tensor | None]") -> "Tensor":
        each = len(wholes) // len(self.sources)
        make = getattr(self, f"_{self.part}")
        made = [make(source, *wholes[at * each :][:each]) for at, source in enumerate(self.sources)]
        return below_each_other(made)

    def _codes(
        self,
        source: TensorSlice,
        codes: "Tensor",
        order: "Tensor | None" = None,
        extent: "Tensor | None" = None,
    ) -> "Tensor":
        packing, bits = self.format.packing, self.format.bits
        if extent is not None and tuple(extent.tolist()) != source.shape:
            said = _named(packing.extent(source))
            raise CheckpointError(
                f"tensor {said} says {extent.tolist()}; config.json calls for {list(source.shape)}"
            )
        single = packing.read_codes(codes, source.shape, bits)[_part(source.rows)]
        if order is not None and not self.format.ordered:
            self._expect_runs(source, order)
        if self.format.ordered:
            assert order is not None
            return packed(single[:, _part(source.columns)][:, self._by_group(source, order)], bits)
        return packed(single[:, _part(source.columns)], bits)

    def _scale(self, source: TensorSlice, scales: "Tensor", zeros: "Tensor | None" = None) -> "Tensor":
        packing, name = self.format.packing, _named(self.format.packing.scales(source, 1))
        if not self.format.zeros and zeros is not None:
            self._expect_middle(source, zeros)
        self._expect_grid(source, packing.scales(source, 1), scales)
        scales = self._taken(source, packing.read_scales(scales, self._grid(source)))
        scales = checked_scales(scales, name, zero=packing.may_be_zero)
        most = (1 << self.format.bits) - 1 if self.format.zeros else self.format.middle
        within(scales, self.dtype, name, most)
        return exactly(scales, self.format.scale, name)

    def _zero(self, source: TensorSlice, zeros: "Tensor") -> "Tensor":
        return self._taken(source, self._read_zeros(source, zeros))

    def _read_zeros(self, source: TensorSlice, zeros: "Tensor") -> "Tensor":
        packing, bits = self.format.packing, self.format.bits
        self._expect_grid(source, packing.zeros(source, 1, bits), zeros)
        return packing.read_zeros(zeros, self._grid(source), bits)

    def _expect_grid(self, source: TensorSlice, read: TensorSlice | None, values: "Tensor") -> None:
        """Raise CheckpointError unless there are values for each row and group, for each row, or one; where
        the reader has not looked at the shape."""
        if read is None or not read.loose:
            return
        shape, grid = tuple(values.shape), self._grid(source)
        column = (*shape, 1, 1)[: max(2, len(shape))]
        if len(shape) > 2 or any(have not in (1, want) for have, want in zip(column, grid, strict=True)):
            raise CheckpointError(
                f"tensor {read.tensor} has shape {list(shape)}; config.json calls for {list(grid)}"
            )

    def _grid(self, source: TensorSlice) -> tuple[int, int]:
        """Return how many scales the checkpoint has of a matrix, down and across."""
        return source.shape[0], -(-source.shape[1] // self._group(source))

    def _expect_middle(self, source: TensorSlice, zeros: "Tensor") -> None:
        middle = self.format.middle
        other = self._read_zeros(source, zeros)
        other = other[other != middle]
        if len(other):
            name = _named(self.format.packing.zeros(source, 1, self.format.bits))
            raise CheckpointError(
                f"tensor {name} has a zero point of {int(other[0])}, but config.json says that weights are "
                f"symmetric, which is {middle}; set sym to false if the zero points are right"
            )

    def _taken(self, source: TensorSlice, values: "Tensor") -> "Tensor":
        """Return the rows that a rank takes of values of groups, and the groups of its columns."""
        values = values[_part(source.rows)]
        if source.columns is None or self.format.uneven:
            return values
        return values[:, places(values, source.columns, self.format.group, self._group(source))]

    def _order(self, source: TensorSlice, order: "Tensor") -> "Tensor":
        return self._by_group(source, order).to(order.dtype)

    def _groups(self, source: TensorSlice, order: "Tensor") -> "Tensor":
        return order[_part(source.columns)].sort(stable=True).values

    def _by_group(self, source: TensorSlice, order: "Tensor") -> "Tensor":
        """Return the columns that a rank takes, by their groups: int64."""
        self._expect_groups(source, order)
        return order[_part(source.columns)].argsort(stable=True)

    def _expect_groups(self, source: TensorSlice, order: "Tensor") -> None:
        """Raise CheckpointError unless every column has a group, and groups are of equal size."""
        group, width, name = self._group(source), source.shape[1], _named(self.format.packing.order(source))
        groups = -(-width // group)
        least, most = int(order.min()), int(order.max())
        if least < 0 or most >= groups:
            raise CheckpointError(
                f"tensor {name} names group {least if least < 0 else most}; {width} columns in groups of "
                f"{group} have groups 0 to {groups - 1}"
            )
        if not bool((order.sort().values == _runs(order, group)).all()):
            raise CheckpointError(
                f"tensor {name} has groups of uneven sizes; groups of {group} columns are read"
            )

    def _expect_runs(self, source: TensorSlice, order: "Tensor") -> None:
        """Raise CheckpointError unless groups are runs of columns."""
        if not bool((order == _runs(order, self._group(source))).all()):
            name = _named(self.format.packing.order(source))
            raise CheckpointError(
                f"tensor {name} has columns in another order, which config.json does not announce; set "
                "desc_act to true (actorder to group) if the tensor is right"
            )


def _runs(like: "Tensor", group: int) -> "Tensor":
    """Return the groups of columns that lie in runs, as long as `like`."""
    return (like.new_ones(len(like)).cumsum(0) - 1) // group


def _named(source: TensorSlice | None) -> str:
    return "" if source is None else source.tensor


def _part(taken: range | None) -> slice:
    return slice(None) if taken is None else slice(taken.start, taken.stop)
