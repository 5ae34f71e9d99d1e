"""Floating-point numbers of eight and four bits. Each block of a matrix has a scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, ClassVar

from penstock.arch.formats.codes import (
    E2M1,
    EXPERT_KERNELS,
    NO_EXPONENT,
    as_bytes,
    floats_of,
    in_steps,
    in_words,
    packed,
    packed_bytes,
    powers_of_two,
    spread,
    unpacked,
)
from penstock.arch.formats.format import ALL, NUMBERS, StoredTensor, TensorSlice, WeightFormat, beside
from penstock.arch.formats.repack import below_each_other, checked_scales, exactly, places, within
from penstock.base.errors import CheckpointError

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor

E4M3, E8M0 = "float8_e4m3fn", "e8m0"
_BYTES = "uint8", "float8_e8m0fnu"
"""Dtypes of E8M0 exponents in checkpoints."""
_MOST_E4M3 = 448
"""The largest number float8_e4m3fn."""
_NUMBERS, _EXPONENTS, _ONE = range(0x10, 0x38), range(119, 122), range(1, 2)
"""Random weights are drawn from these: codes of eight bits near one, exponents of small numbers, and one."""


@dataclass(frozen=True)
class Float8(WeightFormat):
    """A number is a float8_e4m3fn times its scale.

    Parts, at rest on every tier: `codes`, uint8, see `codes.packed`; and `scale` `[blocks down, blocks
    across]`, that of row r and column c at `r // down`, `c // across`. Scales are float32, or E8M0 exponents
    in uint8.
    """

    name: str = "fp8"
    block: tuple[int, int] = (0, 0)
    """Rows and columns that share a scale in the checkpoint; 0 is all."""
    scale: str = "float32"
    """`float32` or `e8m0`."""
    scales: tuple[str, ...] = ("weight_scale",)
    """Names that the tensor of scales may have beside the weight's."""
    down: int = 0
    across: int = 0
    """Rows and columns that share a scale at rest; set by `cut`."""
    width: int = 0
    """Columns of the matrix; set by `cut`."""
    kernels: ClassVar[str] = "few_bits"
    native: ClassVar[str] = "few_bits"

    @property
    def expert_kernels(self) -> str:
        """Return the module for experts of few bits, if it reads blocks of this width."""
        return EXPERT_KERNELS if in_steps(self.across, self.width) else ""

    def cut(self, sources: Sequence[TensorSlice]) -> "Float8":
        """Return the format with blocks that divide where parts begin, and where they are joined."""
        (whole_height, whole), columns = sources[0].shape, sources[0].columns
        across, width = self.block[1] or whole, sources[0].taken[1]
        across = gcd(across, columns.start) if columns is not None else across
        alone = len(sources) == 1 and sources[0].rows is None
        if self.block[0] == 0:
            # One scale for all: each row has its own, which costs little and joins with anything.
            return replace(self, down=whole_height if alone else 1, across=across, width=width)
        down = self.block[0]
        if not alone:
            starts = [source.rows.start for source in sources if source.rows is not None]
            down = gcd(down, *starts, *(source.taken[0] for source in sources[:-1]))
        return replace(self, down=down, across=across, width=width)

    def stored(self, dtype: str, sources: Sequence[TensorSlice]) -> tuple[StoredTensor, ...]:
        """Return codes and scales."""
        height = sum(source.taken[0] for source in sources)
        values = tuple(
            TensorSlice(beside(one, "weight"), one.shape, dtypes=(E4M3, "uint8")) for one in sources
        )
        codes = StoredTensor(
            "codes",
            (height, packed_bytes(self.width, 8)),
            "uint8",
            values,
            _Codes(tuple(sources), 8),
            _NUMBERS,
        )
        shape = -(-height // self.down), -(-self.width // self.across)
        scales = [
            TensorSlice(
                beside(one, self.scales[0]),
                (),
                also=tuple(beside(one, name) for name in self.scales[1:]),
                loose=True,
                dtypes=(*NUMBERS, *_BYTES),
            )
            for one in sources
        ]
        kept = "uint8" if self.scale == E8M0 else self.scale
        return codes, StoredTensor(
            "scale", shape, kept, tuple(scales), _BlockScales(self, dtype, tuple(sources)), self._random
        )

    @property
    def _random(self) -> range | None:
        return _EXPONENTS if self.scale == E8M0 else None

    def dequantise(self, parts: "Mapping[str, Tensor]", rows: slice = ALL) -> "Tensor":
        """Return the matrix in float32, `[out, in]`."""
        codes, scale = parts["codes"], parts["scale"]
        first, stop, _ = rows.indices(len(codes))
        above = first // self.down
        scale = scale[above : -(-stop // self.down)]
        scale = powers_of_two(scale) if self.scale == E8M0 else scale
        values = floats_of(unpacked(codes[rows], 8, self.width), scale)
        scale = spread(scale, self.across, self.width)
        if self.down > 1:
            scale = scale.repeat_interleave(self.down, 0)[first - above * self.down :][: stop - first]
        return values.mul_(scale)

    def look_up(self, parts: "Mapping[str, Tensor]", rows: "Tensor") -> "Tensor":
        """Return some rows of the matrix in float32, each with the scales of its block."""
        codes, scale = parts["codes"][rows], parts["scale"][rows // self.down]
        return replace(self, down=1).dequantise({"codes": codes, "scale": scale})


@dataclass(frozen=True)
class _BlockScales:
    """Makes the scales of a matrix of eight-bit floating-point numbers."""

    format: Float8
    dtype: str
    sources: tuple[TensorSlice, ...]

    def __call__(self, wholes: "Sequence[Tensor | None]") -> "Tensor":
        parts = []
        for source, whole in zip(self.sources, wholes, strict=True):
            assert whole is not None
            parts.append(self._of(source, whole))
        return below_each_other(parts)

    def _of(self, source: TensorSlice, whole: "Tensor") -> "Tensor":
        format, name = self.format, beside(source, self.format.scales[0])
        (height, width), blocks = source.shape, format.block
        down, across = blocks[0] or height, blocks[1] or width
        grid = -(-height // down), -(-width // across)
        if whole.dim() < 2 and whole.numel() in (1, height):
            whole = whole.reshape(-1, 1)
        if whole.dim() == 4 and whole.shape[1] == whole.shape[3] == 1:  # ModelOpt keeps the blocks' extents.
            whole = whole[:, 0, :, 0]
        fits = whole.dim() == 2 and all(
            have in (1, want) for have, want in zip(whole.shape, grid, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"tensor {name} has shape {list(whole.shape)}; weights of {height} x {width} in blocks of "
                f"{down} x {across}, as config.json has them, need {list(grid)}"
            )
        kept = (
            _exponents(whole, name)
            if format.scale == E8M0
            else exactly(_floats(whole, name), format.scale, name)
        )
        scales = powers_of_two(kept) if format.scale == E8M0 else kept
        within(scales, self.dtype, name, _MOST_E4M3)
        kept = kept.expand(*grid)
        rows, columns = source.rows or range(height), source.columns or range(width)
        kept = kept[places(kept, rows, format.down, down)]
        return kept[:, places(kept, columns, format.across, across)].contiguous()


def _floats(scales: "Tensor", name: str) -> "Tensor":
    """Return scales as numbers, of floating-point numbers or of E8M0 exponents."""
    if scales.element_size() == 1:
        return powers_of_two(_exponents(scales, name))
    return checked_scales(scales, name)


def _exponents(scales: "Tensor", name: str) -> "Tensor":
    """Return E8M0 exponents, uint8, of such or of powers of two, which some write for them. Raises
    CheckpointError for other scales, and for those that are no numbers."""
    if scales.element_size() != 1:
        halves, exponents = scales.float().frexp()
        exponents = exponents + (NO_EXPONENT // 2 - 1)  # frexp has numbers from a half on.
        if bool(((halves != 0.5) | (exponents < 0) | (exponents >= NO_EXPONENT)).any()):
            raise CheckpointError(
                f"tensor {name} has scales of {scales.dtype} that are no powers of two; config.json calls "
                "for exponents in uint8, or powers of two"
            )
        return exponents.byte()
    exponents = as_bytes(scales)
    if bool((exponents == NO_EXPONENT).any()):
        raise CheckpointError(f"tensor {name} has scales that are no numbers; download it again")
    return exponents


@dataclass(frozen=True)
class Float4(WeightFormat):
    """A number is `E2M1[code] * scale`. The scale of NVFP4 is first multiplied or divided by a second one, of
    the whole tensor.

    Parts, at rest on every tier: `codes`, uint8, see `codes.packed`; `scale` `[out, in / group]`, E8M0
    exponents in uint8 or float8_e4m3fn; and `second`, float32 `[out]`, for NVFP4.
    """

    name: str = "mxfp4"
    checkpoint_group: int = 32
    """Columns that share a scale in the checkpoint."""
    scale: str = E8M0
    codes: str = "weight_packed"
    scales: str = "weight_scale"
    """The names of the tensors of codes and scales beside the weight's."""
    second: str = ""
    """The name of the second scale's tensor; empty where there is none."""
    divided: bool = False
    """True divides the first scale by the second, as compressed-tensors has it; False multiplies."""
    group: int = 0
    """Columns that share a scale at rest; set by `cut`."""
    width: int = 0
    """Columns of the matrix; set by `cut`."""
    kernels: ClassVar[str] = "few_bits"
    native: ClassVar[str] = "few_bits"

    @property
    def expert_kernels(self) -> str:
        """Return the module for experts of few bits, if it reads groups of this size."""
        return EXPERT_KERNELS if self.group >= 16 and in_steps(self.group, self.width) else ""

    def cut(self, sources: Sequence[TensorSlice]) -> "Float4":
        """Return the format with groups that divide where a rank's part begins."""
        columns = sources[0].columns
        group = self.checkpoint_group if columns is None else gcd(self.checkpoint_group, columns.start)
        return replace(self, group=group, width=sources[0].taken[1])

    def stored(self, dtype: str, sources: Sequence[TensorSlice]) -> tuple[StoredTensor, ...]:
        """Return codes and scales."""
        height, width = sum(one.taken[0] for one in sources), sources[0].taken[1]
        halved = tuple(map(self.codes_of, sources))
        codes = StoredTensor(
            "codes", (height, packed_bytes(width, 4)), "uint8", halved, _Codes(tuple(sources), 4)
        )
        kept = "uint8" if self.scale == E8M0 else E4M3
        whole = tuple(
            TensorSlice(beside(one, self.scales), (one.shape[0], self.groups_of(one)), index=one.index)
            for one in sources
        )
        scales = _GroupScales(self, dtype, tuple(sources))
        random = _EXPONENTS if self.scale == E8M0 else _ONE
        parts = [codes, StoredTensor("scale", (height, -(-width // self.group)), kept, whole, scales, random)]
        if self.second:
            seconds = tuple(TensorSlice(beside(one, self.second), (), loose=True) for one in sources)
            heights = tuple(one.taken[0] for one in sources)
            parts.append(
                StoredTensor(
                    "second",
                    (height,),
                    "float32",
                    seconds,
                    _Seconds(heights, seconds, dtype, self.divided),
                    _ONE,
                )
            )
        return tuple(parts)

    def groups_of(self, source: TensorSlice) -> int:
        """Return how many scales a row of the whole matrix has in the checkpoint."""
        return -(-source.shape[1] // self.checkpoint_group)

    def codes_of(self, source: TensorSlice) -> TensorSlice:
        """Return the tensor with the codes of a matrix, two of them a byte."""
        height, width = source.shape
        return TensorSlice(beside(source, self.codes), (height, -(-width // 2)), index=source.index)

    def dequantise(self, parts: "Mapping[str, Tensor]", rows: slice = ALL) -> "Tensor":
        """Return the matrix in float32, `[out, in]`."""
        codes, scale, second = parts["codes"][rows], parts["scale"][rows], parts.get("second")
        scales = powers_of_two(scale) if self.scale == E8M0 else scale.float()
        if second is not None:  # The scales come first, as in both libraries that write such files.
            wide = second[rows][:, None]
            scales = scales / wide if self.divided else scales * wide
        values = scales.new_tensor(E2M1)[unpacked(codes, 4, self.width).int()]
        return values.mul_(spread(scales, self.group, self.width))


@dataclass(frozen=True)
class _Codes:
    """Makes the codes of floating-point numbers, of bytes with the first of two in the low bits or of one."""

    sources: tuple[TensorSlice, ...]
    bits: int

    def __call__(self, wholes: "Sequence[Tensor | None]") -> "Tensor":
        parts = []
        for source, whole in zip(self.sources, wholes, strict=True):
            assert whole is not None
            if whole.element_size() != 1:
                raise CheckpointError(
                    f"tensor {source.tensor} has codes of {whole.dtype}; config.json calls for bytes; "
                    "fetch the weights again"
                )
            rows, columns = source.rows or range(source.shape[0]), source.columns or range(source.shape[1])
            taken = as_bytes(whole[rows.start : rows.stop : rows.step]).flatten(1)
            single = in_words(taken, self.bits, source.shape[1])
            single = single[:, columns.start : columns.stop]
            if self.bits == 8 and bool(((single & 0x7F) == 0x7F).any()):
                raise CheckpointError(
                    f"tensor {source.tensor} has weights that are no numbers; download it again"
                )
            parts.append(packed(single, self.bits))
        return below_each_other(parts)


@dataclass(frozen=True)
class _GroupScales:
    """Makes the scales of groups of four-bit floating-point numbers."""

    format: Float4
    dtype: str
    sources: tuple[TensorSlice, ...]

    def __call__(self, wholes: "Sequence[Tensor | None]") -> "Tensor":
        parts = []
        for source, whole in zip(self.sources, wholes, strict=True):
            assert whole is not None
            whole, (height, width) = self._checked(source, whole), source.shape
            rows, columns = source.rows or range(height), source.columns or range(width)
            kept = whole[rows.start : rows.stop : rows.step]
            parts.append(kept[:, places(kept, columns, self.format.group, self.format.checkpoint_group)])
        return below_each_other(parts)

    def _checked(self, source: TensorSlice, scales: "Tensor") -> "Tensor":
        name = beside(source, self.format.scales)
        if self.format.scale == E8M0:
            exponents = _exponents(scales, name)
            within(powers_of_two(exponents), self.dtype, name, E2M1[7])
            return exponents
        if not scales.is_floating_point() or scales.element_size() != 1:
            raise CheckpointError(f"tensor {name} has scales of {scales.dtype}; float8_e4m3fn is read")
        return checked_scales(scales, name, zero=True)


@dataclass(frozen=True)
class _Seconds:
    """Makes the second scale of each row, of one for each tensor."""

    heights: tuple[int, ...]
    sources: tuple[TensorSlice, ...]
    dtype: str
    divided: bool

    def __call__(self, wholes: "Sequence[Tensor | None]") -> "Tensor":
        parts = []
        for height, source, whole in zip(self.heights, self.sources, wholes, strict=True):
            assert whole is not None
            if whole.numel() != 1:
                raise CheckpointError(
                    f"tensor {source.tensor} has shape {list(whole.shape)}; one number is read"
                )
            scale = exactly(checked_scales(whole, source.tensor), "float32", source.tensor)
            within(1 / scale if self.divided else scale, self.dtype, source.tensor, E2M1[7] * _MOST_E4M3)
            parts.append(scale.reshape(1).expand(height))
        return below_each_other(parts)
