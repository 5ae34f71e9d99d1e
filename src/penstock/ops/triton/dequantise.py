"""Write matrices of few bits as numbers, for products of many rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.arch.formats.codes import in_steps
from penstock.arch.formats.format import WeightFormat
from penstock.ops.matrix import Matrix
from penstock.ops.triton.codes import (
    FOUR_BITS,
    INT4,
    INT8,
    NUMBERS,
    WHOLE,
    beside,
    decoded,
    kind_of,
    operands,
    scale_of,
)
from penstock.ops.triton.tuning import cdiv


@triton.jit  # type: ignore[untyped-decorator]
def _dequantise(  # type: ignore[no-untyped-def]
    codes,
    scale,
    zero,
    second,
    y,
    chosen,
    first,
    rows,
    inner,
    down,
    s_w,
    s_s,
    s_y,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    SECOND: tl.constexpr,
    CHOSEN: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """ROWS rows of WORDS words of codes as numbers: in float32 as the reference has them, rounded once. These
    rows are those from `first` on, or, where CHOSEN, those that `chosen` names."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    column = word // 8 * (8 * PLACES) + word % 8
    there = row < rows
    own = tl.load(chosen + row, mask=there, other=0).to(tl.int32) if CHOSEN else first + row
    words = tl.load(
        codes + own.to(tl.int64)[:, None] * s_w + word[None, :],
        mask=there[:, None] & (column < inner)[None, :],
        other=0,
    )
    if STEPS:  # Groups are whole quarters of runs: one scale for each, and whole lines of numbers.
        RUNS: tl.constexpr = WORDS // 8
        begin = tl.program_id(1) * (WORDS * PLACES)
        z0, z1, t0, t1, t2, t3 = beside(
            scale,
            zero,
            (own // down).to(tl.int64) * s_s,
            begin,
            inner,
            RUNS,
            8 * PLACES,
            GROUP,
            True,
            False,
            ZEROS,
        )
        t0, t1, t2, t3 = (
            scale_of(t0, SCALES),
            scale_of(t1, SCALES),
            scale_of(t2, SCALES),
            scale_of(t3, SCALES),
        )
        if SECOND == 1:
            by = tl.load(second + own, mask=there, other=1.0)[:, None]
            t0, t1, t2, t3 = t0 * by, t1 * by, t2 * by, t3 * by
        if SECOND == 2:
            by = tl.load(second + own, mask=there, other=1.0)[:, None]
            t0, t1 = tl.div_rn(t0, by), tl.div_rn(t1, by)
            t2, t3 = tl.div_rn(t2, by), tl.div_rn(t3, by)
        whole = operands(
            words,
            z0,
            z1,
            t0,
            t1,
            t2,
            t3,
            ROWS,
            RUNS,
            KIND,
            PLACES,
            NUMBERS,
            True,
            False,
            ZEROS,
            False,
            0.0,
            "",
            "",
        )
        at = begin + tl.arange(0, WORDS * PLACES)
        tl.store(
            y + row.to(tl.int64)[:, None] * s_y + at[None, :],
            whole.to(y.dtype.element_ty),
            mask=there[:, None] & (at < inner)[None, :],
        )
        return
    scales_at = (own // down).to(tl.int64)[:, None] * s_s
    for place in tl.static_range(PLACES):
        at = column + 8 * place
        inside = there[:, None] & (at < inner)[None, :]
        values = decoded(words, place, KIND)
        if ZEROS:
            values -= tl.load(zero + scales_at + (at // GROUP)[None, :], mask=inside, other=0).to(tl.float32)
        elif KIND <= INT8:
            values -= 8.0 if KIND == INT4 else 128.0
        scales = scale_of(tl.load(scale + scales_at + (at // GROUP)[None, :], mask=inside, other=0), SCALES)
        if SECOND == 1:
            scales *= tl.load(second + own, mask=there, other=1.0)[:, None]
        if SECOND == 2:
            scales = tl.div_rn(scales, tl.load(second + own, mask=there, other=1.0)[:, None])
        values *= scales
        tl.store(
            y + row.to(tl.int64)[:, None] * s_y + at[None, :], values.to(y.dtype.element_ty), mask=inside
        )


def dequantise(weight: Matrix, rows: slice, out: Tensor) -> None:
    """Write some rows of a matrix to `out` `[rows, in]`, rounded to its dtype once."""
    _launch(weight, rows.start, None, out)


def look_up(weight: Matrix, rows: Tensor, out: Tensor) -> None:
    """Write the rows of a matrix that `rows`, int64 `[count]`, names to `out` `[count, in]`, rounded to its
    dtype once."""
    _launch(weight, 0, rows, out)


def _launch(weight: Matrix, first: int, chosen: Tensor | None, out: Tensor) -> None:
    kind, parts, inner = kind_of(weight.format), weight.parts, weight.shape[1]
    assert kind is not None, weight.format
    words, zero, second = parts["codes"].view(torch.int32), parts.get("zero"), parts.get("second")
    scale, each = parts["scale"], 64
    scale = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    _dequantise[(cdiv(len(out), 16), cdiv(words.shape[1], each))](
        words,
        scale,
        scale if zero is None else zero,
        scale if second is None else second,
        out,
        words if chosen is None else chosen,
        first,
        len(out),
        inner,
        kind.down,
        words.stride(0),
        scale.stride(0),
        out.stride(0),
        ROWS=16,
        WORDS=each,
        GROUP=WHOLE if kind.group >= inner else kind.group,
        KIND=kind.codes,
        PLACES=8 if kind.codes in FOUR_BITS else 4,
        SCALES=kind.scales,
        ZEROS=zero is not None,
        SECOND=kind.second,
        CHOSEN=chosen is not None,
        STEPS=in_steps(kind.group, inner, 16 if zero is None else 32),
    )


def reads(format: WeightFormat) -> bool:
    """Tell whether `dequantise` reads a format."""
    return kind_of(format) is not None
