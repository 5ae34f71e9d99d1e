"""Keeps a matrix as it is, in the dtype of the activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.arch.formats.format import ALL, NUMBERS, StoredTensor, TensorSlice, WeightFormat, stacked
from penstock.arch.formats.repack import below_each_other, within

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor


@dataclass(frozen=True)
class Dense(WeightFormat):
    """The dense format keeps the matrix itself, unquantised."""

    name: str = "dense"

    @property
    def expert_kernels(self) -> str:
        """Return the module for dense experts."""
        return "experts"

    def stored(self, dtype: str, sources: Sequence[TensorSlice]) -> tuple[StoredTensor, ...]:
        """Return one tensor, the matrix. Its name is empty."""
        whole = stacked("", dtype, sources)
        if not sources[0].transposed:
            return (whole,)
        numbers = tuple(replace(one, dtypes=NUMBERS) for one in sources)
        return (replace(whole, sources=numbers, repack=_Taken(numbers, dtype)),)

    def dequantise(self, parts: "Mapping[str, Tensor]", rows: slice = ALL) -> "Tensor":
        """Return the matrix, or some of its rows."""
        return parts[""][rows]


@dataclass(frozen=True)
class _Taken:
    """Makes a matrix of rows and columns of whole ones."""

    sources: tuple[TensorSlice, ...]
    dtype: str

    def __call__(self, wholes: "Sequence[Tensor | None]") -> "Tensor":
        parts = []
        for source, whole in zip(self.sources, wholes, strict=True):
            assert whole is not None
            rows, columns = source.rows or range(source.shape[0]), source.columns or range(source.shape[1])
            part = whole[rows.start : rows.stop : rows.step, columns.start : columns.stop]
            within(part, self.dtype, source.tensor)
            parts.append(part)
        joined = below_each_other(parts)
        return {"float32": joined.float, "float16": joined.half, "bfloat16": joined.bfloat16}[self.dtype]()


DENSE = Dense()
