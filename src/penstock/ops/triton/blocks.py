"""Write matrices that rest in the blocks of GGUF as numbers. There is no product of few rows yet.

What bytes of a block stand for is said in penstock.arch.formats.gguf_blocks.
"""

import triton
import triton.language as tl
from torch import Tensor

from penstock.arch.formats.format import WeightFormat
from penstock.arch.formats.gguf import BLOCK_TYPES, Blocks
from penstock.ops.matrix import Matrix

Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS = (tl.constexpr(kind) for kind in range(10))
_EACH = 1024
"""Numbers that a program writes."""


@triton.jit
def _byte(at):  # type: ignore[no-untyped-def]
    return tl.load(at).to(tl.int32)


@triton.jit
def _half(at):  # type: ignore[no-untyped-def]
    """Return the float16 number at a byte, in float32."""
    bits = _byte(at) | (_byte(at + 1) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _level(code):  # type: ignore[no-untyped-def]
    """Return the number of a code of IQ4_NL: `LEVELS` plus 127 are the bytes of four words."""
    low = tl.where(code < 4, 1043076864, 1969839182)
    high = tl.where(code < 12, -1516729216, -254229324)
    word = tl.where(code < 8, low, high)
    return (((word >> (8 * (code & 3))) & 255) - 127).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _simple(at, e, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return numbers `e` of blocks of 32, which have one scale."""
    if TYPE == Q4_1:
        start = 4
    elif TYPE == Q5_0:
        start = 6
    elif TYPE == Q5_1:
        start = 8
    else:
        start = 2
    code = (_byte(at + start + e % 16) >> (e // 16 * 4)) & 15
    if TYPE == Q5_0 or TYPE == Q5_1:  # noqa: SIM109 - Triton knows no `in`.
        code |= ((_byte(at + start - 4 + e // 8) >> (e % 8)) & 1) << 4
    if TYPE == IQ4_NL:
        value = _level(code) * _half(at)
    elif TYPE == Q5_0:
        value = (code - 16).to(tl.float32) * _half(at)
    else:
        value = code.to(tl.float32) * _half(at) + _half(at + 2)
    return value


@triton.jit
def _two_bits(at, e):  # type: ignore[no-untyped-def]
    """Return the lowest two bits of codes: of each 32 bytes the lowest ones first."""
    return (_byte(at + e // 128 * 32 + e % 32) >> (e // 32 % 4 * 2)) & 3


@triton.jit  # type: ignore[untyped-decorator]
def _nested(at, e, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return numbers `e` of blocks of 256. Each group of a block has a scale."""
    if TYPE == Q2_K:
        scale = _byte(at + e // 16)
        code = _two_bits(at + 16, e).to(tl.float32)
        value = code * (_half(at + 80) * (scale & 15).to(tl.float32))
        value -= _half(at + 82) * (scale >> 4).to(tl.float32)
    elif TYPE == Q3_K:
        group = e // 16
        low = (_byte(at + 96 + group % 8) >> (group // 8 * 4)) & 15
        high = (_byte(at + 104 + group % 4) >> (group // 4 * 2)) & 3
        code = _two_bits(at + 32, e) | (((_byte(at + e % 32) >> (e // 32)) & 1) << 2)
        value = (code - 4).to(tl.float32) * (((low | (high << 4)) - 32).to(tl.float32) * _half(at + 108))
    elif TYPE == Q6_K:
        code = (_byte(at + e // 128 * 64 + e % 64) >> (e // 64 % 2 * 4)) & 15
        code |= _two_bits(at + 128, e) << 4
        scale = (_byte(at + 192 + e // 16) ^ 128) - 128
        value = (code - 32).to(tl.float32) * (scale.to(tl.float32) * _half(at + 208))
    elif TYPE == IQ4_XS:
        group = e // 32
        low = (_byte(at + 4 + group // 2) >> (group % 2 * 4)) & 15
        high = (_byte(at + 2 + group // 4) >> (group % 4 * 2)) & 3
        code = (_byte(at + 8 + group * 16 + e % 16) >> (e // 16 % 2 * 4)) & 15
        value = _level(code) * (((low | (high << 4)) - 32).to(tl.float32) * _half(at))
    else:
        start = 48 if TYPE == Q5_K else 16
        group = e // 32
        code = (_byte(at + start + e // 64 * 32 + e % 32) >> (group % 2 * 4)) & 15
        if TYPE == Q5_K:
            code |= ((_byte(at + 16 + e % 32) >> group) & 1) << 4
        first, second = _byte(at + 4 + group % 4), _byte(at + 8 + group % 4)
        rest = _byte(at + 12 + group % 4)
        scale = tl.where(group < 4, first & 63, (rest & 15) | ((first >> 2) & 48))
        least = tl.where(group < 4, second & 63, (rest >> 4) | ((second >> 2) & 48))
        value = code.to(tl.float32) * (scale.to(tl.float32) * _half(at))
        value -= least.to(tl.float32) * _half(at + 2)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _dequantise(  # type: ignore[no-untyped-def]
    blocks,
    y,
    count,
    skip,
    inner,
    s_b,
    s_y,
    TYPE: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    EACH: tl.constexpr,
) -> None:
    """EACH numbers of a row, of `count` blocks, in float32 as the reference has them, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * EACH + tl.arange(0, EACH)
    block, e = place // VALUES, place % VALUES
    at = blocks + row * s_b + tl.minimum(block, count - 1) * SIZE
    value = _simple(at, e, TYPE) if VALUES == 32 else _nested(at, e, TYPE)
    column = place - skip
    inside = (block < count) & (column >= 0) & (column < inner)
    tl.store(y + row * s_y + column, value.to(y.dtype.element_ty), mask=inside)


def dequantise(weight: Matrix, rows: slice, out: Tensor) -> None:
    """Write some rows of a matrix to `out` `[rows, in]`, rounded to its dtype once."""
    format, blocks = weight.format, weight.parts["blocks"][rows]
    assert isinstance(format, Blocks)
    block = format.block
    count = blocks.shape[1] // block.size
    _dequantise[(len(blocks), triton.cdiv(count * block.values, _EACH))](
        blocks, out, count, format.skip, weight.shape[1], blocks.stride(0), out.stride(0),
        TYPE=BLOCK_TYPES[format.type], SIZE=block.size, VALUES=block.values, EACH=_EACH,
        enable_fp_fusion=False,
    )  # fmt: skip


def suits(x: Tensor, weight: Matrix) -> bool:
    """Return False: there is no product of few rows."""
    return False


def reads(format: WeightFormat) -> bool:
    """Tell whether `dequantise` reads a format."""
    return isinstance(format, Blocks)
