"""Matrices that are read by one product, each in a format of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.arch.formats.format import Format, Source, Stored
from penstock.arch.formats.repack import below_each_other

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor


@dataclass(frozen=True)
class Joined(Format):
    """One matrix below the other. The parts of the first are called `0.codes` and so on."""

    name: str = "several"
    formats: tuple[Format, ...] = ()

    def cut(self, sources: Sequence[Source]) -> "Joined":
        """Return each format as its own source has it."""
        pairs = zip(self.formats, sources, strict=True)
        return replace(self, formats=tuple(format.cut([source]) for format, source in pairs))

    def stored(self, dtype: str, sources: Sequence[Source]) -> tuple[Stored, ...]:
        """Return the tensors of each matrix, one matrix behind the other."""
        return tuple(
            replace(stored, name=f"{at}.{stored.name}")
            for at, (format, source) in enumerate(zip(self.formats, sources, strict=True))
            for stored in format.stored(dtype, [source])
        )

    def parts_of(self, at: int, parts: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        """Return the parts of one of the matrices, by the names that its format has for them."""
        prefix = f"{at}."
        return {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}

    def dequantise(self, parts: "Mapping[str, Tensor]") -> "Tensor":
        """Return the matrices in float32, one below the other."""
        whole = [format.dequantise(self.parts_of(at, parts)) for at, format in enumerate(self.formats)]
        return below_each_other([one.float() for one in whole])
