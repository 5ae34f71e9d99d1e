"""Keeps a matrix as it is, in the dtype of the activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.arch.formats.format import ALL, StoredTensor, TensorSlice, WeightFormat, stacked

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
        return (stacked("", dtype, sources),)

    def dequantise(self, parts: "Mapping[str, Tensor]", rows: slice = ALL) -> "Tensor":
        """Return the matrix, or some of its rows."""
        return parts[""][rows]


DENSE = Dense()
