"""Matrices that are read by one product, each in a format of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.arch.formats.format import ALL, StoredTensor, TensorSlice, WeightFormat
from penstock.arch.formats.repack import below_each_other

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor


@dataclass(frozen=True)
class Joined(WeightFormat):
    """Joined matrices lie one below the other. The parts of the first are called `0.codes` and so on."""

    name: str = "several"
    formats: tuple[WeightFormat, ...] = ()
    heights: tuple[int, ...] = ()
    """Rows of each matrix; set by `cut`."""

    def cut(self, sources: Sequence[TensorSlice]) -> "Joined":
        """Return each format as its own source has it."""
        formats = (format.cut([source]) for format, source in zip(self.formats, sources, strict=True))
        return replace(self, formats=tuple(formats), heights=tuple(source.taken[0] for source in sources))

    def stored(self, dtype: str, sources: Sequence[TensorSlice]) -> tuple[StoredTensor, ...]:
        """Return the tensors of each matrix, one matrix behind the other."""
        return tuple(
            replace(stored, name=f"{at}.{stored.name}")
            for at, (format, source) in enumerate(zip(self.formats, sources, strict=True))
            for stored in format.stored(dtype, [source])
        )

    def apart(self, parts: "Mapping[str, Tensor]") -> "list[tuple[WeightFormat, int, dict[str, Tensor]]]":
        """Return each matrix: its format, its rows, and its parts by the names that its format has for
        them."""
        return [
            (
                format,
                height,
                {name[len(f"{at}.") :]: part for name, part in parts.items() if name.startswith(f"{at}.")},
            )
            for at, (format, height) in enumerate(zip(self.formats, self.heights, strict=True))
        ]

    def dequantise(self, parts: "Mapping[str, Tensor]", rows: slice = ALL) -> "Tensor":
        """Return the matrices in float32, one below the other, or some rows of the whole."""
        whole = [format.dequantise(one) for format, _, one in self.apart(parts)]
        return below_each_other([one.float() for one in whole])[rows]
