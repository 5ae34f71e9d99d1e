"""The formats of GGUF files: blocks become integers or four-bit floats of ours, or stay as they are."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from penstock.arch.formats.dense import DENSE, Dense
from penstock.arch.formats.floats import Float4
from penstock.arch.formats.format import ALL, StoredTensor, TensorSlice, WeightFormat
from penstock.arch.formats.gguf_blocks import QUANTISED, RESTING, BlockType, Resting, fields, half
from penstock.arch.formats.integers import Integers, Packing
from penstock.arch.formats.names import ROUTERS
from penstock.arch.formats.repack import LARGEST, below_each_other, checked_scales, within
from penstock.arch.formats.words import Words
from penstock.base.errors import CheckpointError

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor

METHOD = "gguf"
_EXPERT = re.compile(r"\.experts\.\d{1,9}\.")
_RANDOM = range(8, 32)
"""Random blocks are of such bytes: as float16 numbers they are from 2**-13 to 2**-7."""
_MOST = 128 * 32
"""A scale of any type is multiplied by at most this."""
_UNPACKED_ROWS = 1024
"""Rows that are dequantised at a time where a matrix does not rest in few bits."""
_REPACKED_ROWS = 1024
"""Rows whose blocks are put in another order at a time."""
_CASTS = {"float32": "float", "float16": "half", "bfloat16": "bfloat16"}


def _raw(type: BlockType, source: TensorSlice) -> TensorSlice:
    """Return the bytes of a matrix in a file, uint8 `[out, bytes of a row]`."""
    height, width = source.shape
    return TensorSlice(source.tensor, (height, type.row_bytes(width)), dtypes=("uint8",))


def _blocks(type: BlockType, whole: "Tensor") -> "Tensor":
    """Return the blocks of a matrix, uint8 `[blocks, size]`, of its rows of bytes."""
    return whole.reshape(-1, type.size)


@dataclass(frozen=True)
class BlockPacking(Packing):
    """BlockPacking reads Q4_0 and Q8_0: each block of 32 numbers has a float16 scale of its own."""

    type: BlockType
    may_be_zero: ClassVar[bool] = True
    """Blocks of zeros have a scale of zero."""

    def codes(self, source: TensorSlice, bits: int) -> TensorSlice:
        """Return the tensor itself."""
        return _raw(self.type, source)

    def scales(self, source: TensorSlice, groups: int) -> TensorSlice:
        """Return the tensor itself."""
        return _raw(self.type, source)

    def read_codes(self, whole: "Tensor", shape: tuple[int, ...], bits: int) -> "Tensor":
        """Return the codes, uint8 `[out, in]`."""
        codes = _blocks(self.type, whole)[:, 2:]
        return (codes ^ 128 if bits == 8 else fields(codes, 4, 16)).reshape(shape)

    def read_scales(self, whole: "Tensor", shape: tuple[int, int]) -> "Tensor":
        """Return the scales `[out, groups]`."""
        return half(_blocks(self.type, whole), 0).reshape(shape)


@dataclass(frozen=True)
class BlockFloat4(Float4):
    """BlockFloat4 reads MXFP4 blocks: an exponent, then 16 bytes. Their low halves are the first 16 codes."""

    name: str = METHOD

    def stored(self, dtype: str, sources: Sequence[TensorSlice]) -> tuple[StoredTensor, ...]:
        """Return codes and scales."""
        raw = tuple(_raw(QUANTISED["MXFP4"], source) for source in sources)
        return tuple(
            replace(stored, sources=raw, repack=_Apart(stored.name, stored.repack))
            for stored in super().stored(dtype, sources)
            if stored.repack is not None
        )


@dataclass(frozen=True)
class _Apart:
    """Takes MXFP4 blocks apart into what the repack of one part of `Float4` reads."""

    part: str
    repack: "Callable[[Sequence[Tensor | None]], Tensor]"

    def __call__(self, wholes: "Sequence[Tensor | None]") -> "Tensor":
        return self.repack([None if whole is None else self._read(whole) for whole in wholes])

    def _read(self, whole: "Tensor") -> "Tensor":
        blocks = _blocks(QUANTISED["MXFP4"], whole)
        if self.part == "scale":
            return blocks[:, 0].reshape(len(whole), -1)
        codes = fields(blocks[:, 1:], 4, 16).reshape(len(whole), -1, 2)
        return codes[:, :, 0] | codes[:, :, 1] << 4


@dataclass(frozen=True)
class Blocks(WeightFormat):
    """Blocks rest in the bits of the file, in another order: codes, high bits and scales lie apart.

    There is one part, `repacked`, uint8 `[out, bytes]`, of whole blocks, also where a rank's columns begin or
    end inside of one. `gguf_blocks.Resting` says where its bits lie, and what they stand for. Packs name it,
    and those in which blocks are as in the file call it `blocks`: they are refused. Another order needs
    another name.
    """

    name: str = METHOD
    type: str = ""
    skip: int = 0
    """Columns of the first block that belong to another rank; set by `cut`."""
    width: int = 0
    """Columns of the matrix; set by `cut`."""
    kernels: ClassVar[str] = "blocks"
    native: ClassVar[str] = "blocks"

    @property
    def block(self) -> BlockType:
        """Return the type of the blocks."""
        return QUANTISED[self.type]

    @property
    def resting(self) -> Resting:
        """Return how the blocks rest."""
        return RESTING[self.type]

    @property
    def units(self) -> int:
        """Return the units of a row."""
        return -(-(self.skip + self.width) // self.resting.unit)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Return the bytes of a row's codes, of its high bits and of its heads, which lie in this order."""
        return self.resting.parts(self.units)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row."""
        return self.resting.row_bytes(self.units)

    def cut(self, sources: Sequence[TensorSlice]) -> "Blocks":
        """Return the format with the columns of a rank."""
        columns = sources[0].columns
        skip = 0 if columns is None else columns.start % self.block.values
        return replace(self, skip=skip, width=sources[0].taken[1])

    def stored(self, dtype: str, sources: Sequence[TensorSlice]) -> tuple[StoredTensor, ...]:
        """Return the blocks."""
        height = sum(source.taken[0] for source in sources)
        raw = tuple(_raw(self.block, source) for source in sources)
        repack = _Put(self, dtype, tuple(sources))
        return (StoredTensor("repacked", (height, self.row_bytes), "uint8", raw, repack, _RANDOM),)

    def dequantise(self, parts: "Mapping[str, Tensor]", rows: slice = ALL) -> "Tensor":
        """Return the matrix in float32, `[out, in]`."""
        values = self.resting.take(parts["repacked"][rows], self.units)
        return values[:, self.skip : self.skip + self.width]


@dataclass(frozen=True)
class _Put:
    """Takes a rank's blocks of whole tensors, checks that their scales are numbers, and puts their bits where
    they rest."""

    format: Blocks
    dtype: str
    sources: tuple[TensorSlice, ...]

    def __call__(self, wholes: "Sequence[Tensor | None]") -> "Tensor":
        parts, block = [], self.format.block
        for source, whole in zip(self.sources, wholes, strict=True):
            assert whole is not None
            values, size = block.values, block.size
            rows, columns = source.rows or range(source.shape[0]), source.columns or range(source.shape[1])
            first, last = columns.start // values, -(-columns.stop // values)
            made = whole.new_empty(len(rows), self.format.row_bytes)
            for at in range(0, len(rows), _REPACKED_ROWS):
                some = slice(rows.start + at, min(rows.start + at + _REPACKED_ROWS, rows.stop))
                taken = whole[some, first * size : last * size].reshape(-1, last - first, size)
                halves = (half(taken.flatten(0, 1), place) for place in block.halves)
                scales = [checked_scales(one, source.tensor, zero=True) for one in halves]
                put = made[at : at + len(taken)]
                put[:] = self.format.resting.put(taken, self.format.units)
                if (
                    self.dtype == "float16"
                    and max(float(one.abs().max()) for one in scales) * _MOST > LARGEST
                ):
                    within(self.format.dequantise({"repacked": put}), self.dtype, source.tensor)
            parts.append(made)
        return below_each_other(parts)


@dataclass(frozen=True)
class Unpacked(Dense):
    """An unpacked matrix is quantised in the checkpoint and dense at rest, rounded once to the dtype of
    activations."""

    inner: WeightFormat = DENSE

    def stored(self, dtype: str, sources: Sequence[TensorSlice]) -> tuple[StoredTensor, ...]:
        """Return one tensor, the matrix. Its name is empty."""
        (dense,) = super().stored(dtype, sources)
        raw = tuple(self.inner.cut([source]).stored(dtype, [source])[0].sources[0] for source in sources)
        return (replace(dense, sources=raw, repack=_Unpack(self.inner, dtype, tuple(sources))),)


@dataclass(frozen=True)
class _Unpack:
    """Dequantises whole tensors, some rows at a time."""

    inner: WeightFormat
    dtype: str
    sources: tuple[TensorSlice, ...]

    def __call__(self, wholes: "Sequence[Tensor | None]") -> "Tensor":
        parts = []
        for source, whole in zip(self.sources, wholes, strict=True):
            assert whole is not None
            rows = source.rows or range(source.shape[0])
            made = self._rows(source, whole, rows.start, rows.start + 1).new_empty(len(rows), source.shape[1])
            for at in range(rows.start, rows.stop, _UNPACKED_ROWS):
                some = self._rows(source, whole, at, min(at + _UNPACKED_ROWS, rows.stop))
                made[at - rows.start : at - rows.start + len(some)] = some
            parts.append(made)
        return below_each_other(parts)

    def _rows(self, source: TensorSlice, whole: "Tensor", first: int, last: int) -> "Tensor":
        """Return some rows of a matrix, rounded."""
        part = replace(source, shape=(last - first, source.shape[1]), rows=None)
        format, parts = self.inner.cut([part]), {}
        for stored in format.stored(self.dtype, [part]):
            assert stored.repack is not None
            parts[stored.name] = stored.repack([whole[first:last]] * len(stored.sources))
        values: Tensor = getattr(format.dequantise(parts), _CASTS[self.dtype])()
        if not bool(values.isfinite().all()):
            raise CheckpointError(
                f"tensor {source.tensor} has values beyond {self.dtype}; choose another dtype"
            )
        return values


def _format(type: BlockType) -> WeightFormat:
    match type.name:
        case "Q4_0" | "Q8_0":
            bits = 4 if type.name == "Q4_0" else 8
            return Integers(METHOD, bits, checkpoint_group=type.values, packing=BlockPacking(type))
        case "MXFP4":
            return BlockFloat4()
        case _:
            return Blocks(type=type.name)


FORMATS = {name: _format(type) for name, type in QUANTISED.items()}
"""Matrices of each type rest in these. Q4_0, Q8_0 and MXFP4 are formats of ours in as many bytes. Others
would be rounded or grow: their scales are nested, or a minimum stands where ours have a whole zero point."""
BLOCK_TYPES = {
    name: number
    for number, name in enumerate(name for name, format in FORMATS.items() if isinstance(format, Blocks))
}
"""Types that rest in blocks, as kernels count them."""


@dataclass(frozen=True)
class ByType(WeightFormat):
    """A GGUF file names the type of each tensor.

    types: names of modules for each type; that of an expert's module is without the expert's number.
    """

    name: str = METHOD
    types: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def of(self, tensor: str) -> WeightFormat:
        """Return the format of a weight; dense for types that are not quantised. Routers rest dense."""
        module = tensor.removesuffix(".weight")
        types = _by_module(self.types)
        type = types.get(module) or types.get(_EXPERT.sub(".experts.", module))
        if type is None:
            return DENSE
        return Unpacked(inner=FORMATS[type]) if module.endswith(ROUTERS) else FORMATS[type]


@lru_cache(maxsize=4)
def _by_module(types: tuple[tuple[str, tuple[str, ...]], ...]) -> dict[str, str]:
    return {module: type for type, modules in types for module in modules}


def read(config: Mapping[str, object], where: str, dtype: str) -> WeightFormat:
    """Return the formats of a GGUF file's tensors. Raises UnsupportedModelError, naming the key."""
    words = Words(config, f"{where}: quantization_config")
    listed = words.object("types") or Words({}, "")
    if not set(listed.keys) <= set(QUANTISED):
        words.refuse("types", f"an object of lists of modules for {', '.join(QUANTISED)}")
    return ByType(types=tuple((name, listed.list(name)) for name in listed.keys))
