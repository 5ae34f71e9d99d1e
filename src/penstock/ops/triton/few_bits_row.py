"""Computes the product of one row of activations with a matrix of few bits, in float32 throughout.

Threads work apart from each other. Each has the same words of several rows of the matrix, takes them apart,
and adds up products of its own. They meet once, at the end. With one row that is faster than a matrix
product: there threads wait for each other at every step.

Numbers are exact: codes as they are, sums of a group times its scale. A sum of codes less a zero point is the
sum of codes, less the zero point times the sum of the activations.

Why it is safe where launches overlap: as in `linear`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.matrix import Matrix
from penstock.ops.triton.codes import (
    COMPILED,
    E2M1,
    EIGHTS,
    FOUR_BITS,
    INT4,
    INT8,
    WHOLE,
    kind_of,
    plain_number,
    scale_of,
)
from penstock.ops.triton.pointwise import silu
from penstock.ops.triton.ptx import floats_of
from penstock.ops.triton.tuning import cdiv, multiprocessors


@triton.jit  # type: ignore[untyped-decorator]
def _beside(at, k, place, inner, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what lies beside the codes from a place of each run on, `[LANES, WARPS, ROWS]`."""
    return tl.load(at + (tl.minimum(k + place, inner - 1) // GROUP)[:, None, None])


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(  # type: ignore[no-untyped-def]
    part, zero, sums, scale, SCALES: tl.constexpr, ZEROS: tl.constexpr, CONVERTS: tl.constexpr
):
    """Return sums of codes times activations `[LANES, WARPS, ROWS]`, less zero points, times scales."""
    total = tl.sum(part, 3)
    if ZEROS:
        total -= zero.to(tl.float32) * tl.sum(sums, 2)[:, :, None]
    if SCALES == EIGHTS and CONVERTS:
        return total * scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return total * scale_of(scale, SCALES)


@triton.jit  # type: ignore[untyped-decorator]
def _quarter(  # type: ignore[no-untyped-def]
    part,
    sums,
    values,
    more,
    x_at,
    column,
    inner,
    first: tl.constexpr,
    PLACES: tl.constexpr,
    ZEROS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return `part` and the products of a quarter of each run with activations, and `sums` and these
    activations, if there are zero points. values, more: of the one place or the two."""
    at: tl.constexpr = first * 2 * PLACES
    some = _activations(x_at + at, column + at, inner, EVEN)
    part += values * some[:, :, None, :]
    if ZEROS:
        sums += some
    if PLACES == 8:
        some = _activations(x_at + at + 8, column + at + 8, inner, EVEN)
        part += more * some[:, :, None, :]
        if ZEROS:
            sums += some
    return part, sums


@triton.jit  # type: ignore[untyped-decorator]
def _activations(at, column, inner, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return activations in float32, zeros beyond the last column."""
    some = tl.load(at) if EVEN else tl.load(at, mask=column < inner, other=0.0)
    return some.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _one_row(  # type: ignore[no-untyped-def]
    x,
    codes,
    scale,
    zero,
    second,
    bias,
    y,
    outer,
    inner,
    down,
    s_w,
    s_s,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    RUNS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    SECOND: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    EARLY: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """Compute the numbers of ROWS rows of the matrix for each warp; GATED and SECOND: as in `few_bits`.

    Tensors have the axes LANES, WARPS, ROWS and 4: a thread has four words of each of its rows, half a run,
    and a warp has whole lines of them. The compiler deals out axes in this order, but the last first.
    """
    if EARLY:
        gdc_launch_dependents()
    RUN: tl.constexpr = 8 * PLACES
    LANES: tl.constexpr = 2 * RUNS
    STEP: tl.constexpr = RUNS * RUN
    COLS: tl.constexpr = ROWS * WARPS
    WIDE: tl.constexpr = COLS // 2 if GATED else COLS
    tile = tl.program_id(0)
    place = tl.arange(0, WARPS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    own = tl.minimum(tile * WIDE + (place // 2 if GATED else place), outer - 1)
    if GATED:
        own += place % 2 * outer
    lane, four = tl.arange(0, LANES), tl.arange(0, 4)
    word = (lane * 4)[:, None] + four[None, :]
    of_run = lane // 2 * RUN
    column = (of_run + lane % 2 * 4)[:, None, None] + tl.zeros([1, WARPS, 1], tl.int32) + four[None, None, :]
    words_at = codes + own.to(tl.int64)[None, :, :, None] * s_w + word[:, None, None, :]
    rows_at = ((own // down).to(tl.int64) * s_s)[None, :, :]
    last = tl.cdiv(inner, RUN) * 8
    acc = tl.zeros([LANES, WARPS, ROWS], tl.float32)
    words = tl.load(words_at, mask=(word < last)[:, None, None, :], other=0)
    if EARLY:
        gdc_wait()
    for k in tl.range(0, inner, STEP):
        following = k // PLACES + RUNS * 8
        next_words = tl.load(words_at + following, mask=(following + word < last)[:, None, None, :], other=0)
        t0 = _beside(scale + rows_at, k, of_run, inner, GROUP)
        t1, t2, t3 = t0, t0, t0
        if GROUP <= RUN // 2:
            t2 = _beside(scale + rows_at, k + RUN // 2, of_run, inner, GROUP)
            t3 = t2
        if GROUP <= RUN // 4:
            t1 = _beside(scale + rows_at, k + RUN // 4, of_run, inner, GROUP)
            t3 = _beside(scale + rows_at, k + RUN // 4 * 3, of_run, inner, GROUP)
        z0, z1 = t0, t0
        if ZEROS:
            z0 = _beside(zero + rows_at, k, of_run, inner, GROUP)
            z1 = _beside(zero + rows_at, k + RUN // 2, of_run, inner, GROUP) if GROUP <= RUN // 2 else z0
        x_at, at = x + k + column, k + column
        nothing, no = tl.zeros([LANES, WARPS, ROWS, 4], tl.float32), tl.zeros([LANES, WARPS, 4], tl.float32)
        if PTX == "":
            a, b = plain_number(words, 0, KIND, ZEROS), plain_number(words, 1, KIND, ZEROS)
            c, d = plain_number(words, 2, KIND, ZEROS), plain_number(words, 3, KIND, ZEROS)
            e, f, g, h = a, b, c, d
            if PLACES == 8:
                e, f = plain_number(words, 4, KIND, ZEROS), plain_number(words, 5, KIND, ZEROS)
                g, h = plain_number(words, 6, KIND, ZEROS), plain_number(words, 7, KIND, ZEROS)
        elif PLACES == 8:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                PTX, "=f,=f,=f,=f,=f,=f,=f,=f,r", [words], dtype=(tl.float32,) * 8, is_pure=True, pack=1
            )
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                PTX, "=f,=f,=f,=f,r", [words], dtype=(tl.float32,) * 4, is_pure=True, pack=1
            )
            e, f, g, h = a, b, c, d
        if PLACES == 4:
            a, c, e, g = a, b, c, d
        part, sums = _quarter(nothing, no, a, b, x_at, at, inner, 0, PLACES, ZEROS, EVEN)
        if GROUP <= RUN // 4:
            acc += _scaled(part, z0, sums, t0, SCALES, ZEROS, PTX != "")
            part, sums = nothing, no
        part, sums = _quarter(part, sums, c, d, x_at, at, inner, 1, PLACES, ZEROS, EVEN)
        if GROUP <= RUN // 2:
            acc += _scaled(part, z0, sums, t1, SCALES, ZEROS, PTX != "")
            part, sums = nothing, no
        part, sums = _quarter(part, sums, e, f, x_at, at, inner, 2, PLACES, ZEROS, EVEN)
        if GROUP <= RUN // 4:
            acc += _scaled(part, z1, sums, t2, SCALES, ZEROS, PTX != "")
            part, sums = nothing, no
        part, sums = _quarter(part, sums, g, h, x_at, at, inner, 3, PLACES, ZEROS, EVEN)
        acc += _scaled(part, z1, sums, t3, SCALES, ZEROS, PTX != "")
        words = next_words
    total = tl.reshape(tl.sum(acc, 0), [COLS])
    own = tl.reshape(own, [COLS])
    if PTX != "" and KIND == E2M1:
        total *= 64.0
    kind = y.dtype.element_ty
    if SECOND == 1:
        total *= tl.load(second + own)
    if SECOND == 2:
        total = tl.div_rn(total, tl.load(second + own))
    if BIASED:
        total += tl.load(bias + own).to(tl.float32)
    number = tile * WIDE + tl.arange(0, WIDE)
    if GATED:
        gate, up = tl.split(tl.reshape(total, [WIDE, 2]))
        active = silu(gate.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        total = active * up.to(kind).to(tl.float32)
    tl.store(y + number, total.to(kind), mask=number < outer)


def converts(codes: int) -> bool:
    """Tell whether kernels are compiled, for a device that makes float16 of such codes."""
    if not COMPILED:
        return False
    return codes in (INT4.value, INT8.value) or driver.active.get_current_target().arch >= 89


@dataclass(frozen=True, slots=True)
class RowTuning:
    """RowTuning says how a product with one row is cut.

    rows: rows of the matrix that a warp has. runs: runs of 256 bits of each at a time. warps: of a program.
    """

    rows: int
    runs: int
    warps: int = 4


def one_row(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
    tuning: RowTuning | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`, x `[1, in]`, as `few_bits.few_rows`."""
    kind, parts = kind_of(weight.format), weight.parts
    assert kind is not None, weight.format
    height, inner = weight.shape
    outer = height // 2 if gated else height
    assert x.shape == (1, inner), (x.shape, weight.shape)
    assert x.stride(1) == 1, x.stride()
    y = torch.empty(1, outer, dtype=x.dtype, device=x.device) if out is None else out
    tuning = tuning or row_tuning(kind.codes, height, inner, multiprocessors(x.device))
    words, scale = parts["codes"].view(torch.int32), parts["scale"]
    scale = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    zero, second = parts.get("zero"), parts.get("second")
    places, early = 8 if kind.codes in FOUR_BITS else 4, uses_pdl()
    _one_row[(cdiv(outer, tuning.rows * tuning.warps // (2 if gated else 1)),)](
        x,
        words,
        scale,
        x if zero is None else zero,
        x if second is None else second,
        x if bias is None else bias,
        y,
        outer,
        inner,
        kind.down,
        words.stride(0),
        scale.stride(0),
        ROWS=tuning.rows,
        WARPS=tuning.warps,
        RUNS=tuning.runs,
        GROUP=WHOLE if kind.group >= inner else kind.group,
        KIND=kind.codes,
        PLACES=places,
        SCALES=kind.scales,
        ZEROS=zero is not None,
        SECOND=kind.second,
        EVEN=inner % (tuning.runs * 8 * places) == 0,
        GATED=gated,
        BIASED=bias is not None,
        EARLY=early,
        PTX=floats_of(kind.codes, zeros=zero is not None) if converts(kind.codes) else "",
        num_warps=tuning.warps,
        **pdl_launch_options(early),
    )
    return y


def row_tuning(codes: int, height: int, inner: int, many: int) -> RowTuning:
    """Return how a product is cut: the one place for constants.

    More rows of a warp share the activations that it reads, as long as there are warps enough.

    codes: their kind.
    height, inner: shape of the matrix.
    many: multiprocessors.
    """
    if codes == E2M1.value:
        return RowTuning(4, 16 if inner < 8192 else 32, warps=2)
    most, least = (8, 11 * many) if codes == INT4.value else (4, 24 * many)
    rows = most
    while rows > 1 and height < rows * least:
        rows //= 2
    return RowTuning(rows, 16 if rows == most else 32, warps=8 if rows < 3 else 2)
