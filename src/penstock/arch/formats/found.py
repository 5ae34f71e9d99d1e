"""Tells which modules are packed by the tensors of a checkpoint, where its quantiser's list says otherwise.

Quantisers read their lists of exceptions in several ways: AutoAWQ takes `gate` for a part of `gate_proj`,
too, and others that write its format do not. The tensors tell: `qweight` is packed, and so is a `weight` of
codes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.arch.formats.dense import DENSE, Dense
from penstock.arch.formats.format import FileTensor, StoredTensor, TensorSlice, WeightFormat
from penstock.arch.formats.names import ROUTERS, Listed, Rule, together
from penstock.arch.formats.words import Words

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor

PACKED, UNPACKED = "packed_modules", "unpacked_modules"
"""Keys of our own in `quantization_config`: lists of modules, as `Listed` reads them."""
_CODES, _WEIGHT = ".qweight", ".weight"


def exceptions(
    format: WeightFormat, tensors: Mapping[str, FileTensor], codes: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    """Return the modules, by the keys above, that are otherwise than a format has them.

    codes: dtypes of a `weight` that is packed.
    """
    kinds = dict[str, str]()
    for name, tensor in tensors.items():
        if name.endswith(_CODES):
            module, kind = name.removesuffix(_CODES), PACKED
        elif name.endswith(_WEIGHT) and len(tensor.shape) == 2:
            module, kind = name.removesuffix(_WEIGHT), PACKED if tensor.dtype in codes else UNPACKED
        else:
            continue
        if name.endswith(_CODES) or module + _CODES not in tensors:
            said = UNPACKED if format.of(module + _WEIGHT) == DENSE else PACKED
            kinds[module] = "" if kind == said else kind
    listed = together(kinds)
    found = {key: [name for name, kind in listed.items() if kind == key] for key in (PACKED, UNPACKED)}
    return {key: names for key, names in found.items() if names}


def rules(words: Words, format: WeightFormat) -> tuple[Rule, ...]:
    """Return the rules for the modules that a `quantization_config` names so. format: of what is packed.

    Packed routers rest dense.
    """
    packed, unpacked = frozenset(words.list(PACKED)), frozenset(words.list(UNPACKED))
    routers = frozenset(name for name in packed if name.endswith(ROUTERS))
    made: dict[frozenset[str], WeightFormat] = {unpacked: DENSE, routers: Dequantised(inner=format)}
    made |= {packed - routers: format}
    return tuple((Listed(names), its) for names, its in made.items() if names)


@dataclass(frozen=True)
class Dequantised(Dense):
    """A dequantised matrix is packed in the checkpoint and dense at rest, rounded once."""

    inner: WeightFormat = DENSE

    def stored(self, dtype: str, sources: Sequence[TensorSlice]) -> tuple[StoredTensor, ...]:
        """Return one tensor, the matrix. Its name is empty."""
        (dense,) = super().stored(dtype, sources)
        inner = self.inner.cut(sources)
        parts = inner.stored(dtype, sources)
        reads = tuple(read for part in parts for read in part.sources)
        return (replace(dense, sources=reads, repack=_Dequantise(inner, dtype, parts)),)


@dataclass(frozen=True)
class _Dequantise:
    """Makes a dense matrix of the tensors of all parts of a packed one."""

    inner: WeightFormat
    dtype: str
    parts: tuple[StoredTensor, ...]

    def __call__(self, wholes: "Sequence[Tensor | None]") -> "Tensor":
        made, at = dict[str, "Tensor"](), 0
        for part in self.parts:
            assert part.repack is not None
            made[part.name] = part.repack(wholes[at : at + len(part.sources)])
            at += len(part.sources)
        whole = self.inner.dequantise(made)
        casts = {"float32": whole.float, "float16": whole.half, "bfloat16": whole.bfloat16}
        return casts[self.dtype]()
