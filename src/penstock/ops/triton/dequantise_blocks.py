"""Write matrices that rest in the blocks of GGUF as numbers, for products of many rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.arch.formats.format import WeightFormat
from penstock.arch.formats.gguf import Blocks
from penstock.ops.matrix import Matrix
from penstock.ops.triton.block_codes import (
    IQ4_NL,
    IQ4_XS,
    Q2_K,
    Q3_K,
    Q4_1,
    Q5_0,
    Q5_1,
    Q6_K,
    decoded,
    kind_of,
    level,
)
from penstock.ops.triton.tuning import cdiv


@triton.jit
def _byte(at, mask):  # type: ignore[no-untyped-def]
    return tl.load(at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _half(at, mask):  # type: ignore[no-untyped-def]
    """Return the float16 number at a byte, in float32."""
    bits = _byte(at, mask) | (_byte(at + 1, mask) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _number(code, at, g, mask, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the numbers of codes in group `g` of a unit that has its heads at `at`: in float32 as the
    reference has them."""
    if TYPE == Q4_1 or TYPE == Q5_1:  # noqa: SIM109 - Triton knows no `in`.
        value = code.to(tl.float32) * _half(at + 4 * g, mask) + _half(at + 4 * g + 2, mask)
    elif TYPE == Q5_0:
        value = (code - 16).to(tl.float32) * _half(at + 2 * g, mask)
    elif TYPE == IQ4_NL:
        value = level(code) * _half(at + 2 * g, mask)
    elif TYPE == Q2_K:
        scale = _byte(at + g, mask)
        value = code.to(tl.float32) * (_half(at + 16, mask) * (scale & 15).to(tl.float32))
        value -= _half(at + 18, mask) * (scale >> 4).to(tl.float32)
    elif TYPE == Q3_K:
        low = (_byte(at + g % 8, mask) >> (g // 8 * 4)) & 15
        high = (_byte(at + 8 + g % 4, mask) >> (g // 4 * 2)) & 3
        scale = ((low | (high << 4)) - 32).to(tl.float32) * _half(at + 12, mask)
        value = (code - 4).to(tl.float32) * scale
    elif TYPE == Q6_K:
        scale = (_byte(at + g, mask) ^ 128) - 128
        value = (code - 32).to(tl.float32) * (scale.to(tl.float32) * _half(at + 16, mask))
    elif TYPE == IQ4_XS:
        low = (_byte(at + 4 + g // 2, mask) >> (g % 2 * 4)) & 15
        high = (_byte(at + 2 + g // 4, mask) >> (g % 4 * 2)) & 3
        value = level(code) * (((low | (high << 4)) - 32).to(tl.float32) * _half(at, mask))
    else:
        first, second = _byte(at + 4 + g % 4, mask), _byte(at + 8 + g % 4, mask)
        rest = _byte(at + 12 + g % 4, mask)
        scale = tl.where(g < 4, first & 63, (rest & 15) | ((first >> 2) & 48))
        least = tl.where(g < 4, second & 63, (rest >> 4) | ((second >> 2) & 48))
        value = code.to(tl.float32) * (scale.to(tl.float32) * _half(at, mask))
        value -= least.to(tl.float32) * _half(at + 2, mask)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _dequantise(  # type: ignore[no-untyped-def]
    codes,
    high,
    heads,
    y,
    rows,
    skip,
    inner,
    s_w,
    s_y,
    ROWS: tl.constexpr,
    EACH: tl.constexpr,
    TYPE: tl.constexpr,
    UNIT: tl.constexpr,
    WORDS: tl.constexpr,
    BITS: tl.constexpr,
    HIGH: tl.constexpr,
    PAIRED: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
) -> None:
    """ROWS rows of EACH words of codes as numbers: in float32 as the reference has them, rounded once.

    s_w: 16 bytes of a row.
    """
    PLACES: tl.constexpr = 32 // BITS
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    word = (tl.program_id(1) * EACH + tl.arange(0, EACH))[None, :]
    first = word // WORDS * (WORDS * PLACES) + word % WORDS
    mask = (row < rows) & (first < skip + inner)
    words = tl.load(codes + row * s_w * 4 + word, mask=mask, other=0)
    above = words
    if HIGH:
        unit = word // WORDS
        high_at = (unit // 2 * WORDS + word % WORDS) if PAIRED else word
        above = tl.load(high + row * s_w * 8 + high_at, mask=mask, other=0).to(tl.int32)
        if PAIRED:
            above >>= unit % 2 * 8
    for place in tl.static_range(PLACES):
        at = first + place * WORDS
        column = at - skip
        inside = (row < rows) & (column >= 0) & (column < inner)
        head_at = heads + row * s_w * 16 + at // UNIT * (4 * HEAD)
        value = _number(
            decoded(words, above, place, place, BITS, HIGH), head_at, at % UNIT // GROUP, inside, TYPE
        )
        tl.store(y + row * s_y + column, value.to(y.dtype.element_ty), mask=inside)


def resting_parts(weight: Matrix, rows: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
    """Return the words of a matrix's codes, int32, its high bits, int16, and its heads, int32: each
    `[rows, ...]`, and a part of the rows."""
    format, blocks = weight.format, weight.parts["repacked"]
    assert isinstance(format, Blocks)
    end, high, _ = format.parts
    words, heads = blocks[rows].view(torch.int32), blocks[rows, end + high :].view(torch.int32)
    return words, blocks[rows, end:].view(torch.int16), heads


def dequantise(weight: Matrix, rows: slice, out: Tensor) -> None:
    """Write some rows of a matrix to `out` `[rows, in]`, rounded to its dtype once."""
    format, each = weight.format, 64
    assert isinstance(format, Blocks)
    kind = kind_of(format.type)
    codes, high, heads = resting_parts(weight, rows)
    many = format.units * (kind.unit * kind.bits // 32)
    _dequantise[(cdiv(len(out), 16), cdiv(many, each))](
        codes, high, heads.view(torch.uint8), out, len(out), format.skip, weight.shape[1],
        codes.stride(0) // 4, out.stride(0), ROWS=16, EACH=each, TYPE=kind.type, UNIT=kind.unit,
        WORDS=kind.words, BITS=kind.bits, HIGH=kind.high, PAIRED=kind.paired, GROUP=kind.group,
        HEAD=kind.head, enable_fp_fusion=False,
    )  # fmt: skip


def reads(format: WeightFormat) -> bool:
    """Tell whether `dequantise` reads a format."""
    return isinstance(format, Blocks)
