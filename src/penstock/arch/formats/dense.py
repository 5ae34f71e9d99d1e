"""Dense matrices: every number in the dtype of the activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.arch.formats.format import ALL, Format, Source, Stored, stacked

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor


@dataclass(frozen=True)
class Dense(Format):
    """The matrix itself, which any product takes as it is."""

    name: str = "dense"

    def stored(self, dtype: str, sources: Sequence[Source]) -> tuple[Stored, ...]:
        """Return one tensor, the matrix, which has no name of its own."""
        return (stacked("", dtype, sources),)

    def dequantise(self, parts: "Mapping[str, Tensor]", rows: slice = ALL) -> "Tensor":
        """Return the matrix, or some of its rows."""
        return parts[""][rows]


DENSE = Dense()
