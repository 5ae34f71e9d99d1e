"""Computes products of few rows of activations with a matrix of few bits by the matrix products of a warp,
from registers to registers.

A warp takes 16 rows of the matrix, or several times as many, and two runs of each at a time. A thread reads
half a run of two rows of each sixteen, takes the words apart where they are, and has thereby its part of a
product's left operand; it reads its part of the right one from where activations rest. The warps of a program
share a sum. They meet once, at the end, so none waits for another or for shared memory, and a code of four
bits takes two instructions.

Numbers are exact and sums float32; scales are applied as in `few_bits`.

Why it is safe that a product takes registers of 32 lanes: lane i of warp j must have what places i and j of
the first two axes of a tensor say. Triton deals tensors out so, but does not promise it. Each thread compares
its place with the one that the product is given, and a kernel in which they differ stops with an error.

Why it is safe where launches overlap: as in `linear`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.matrix import Matrix
from penstock.ops.triton.codes import (
    COMPILED,
    FOUR_BITS,
    RUN_SCALES,
    WHOLE,
    kind_of,
    paired,
    plain_number,
    scale_of,
)
from penstock.ops.triton.pointwise import silu
from penstock.ops.triton.ptx import less, products_of
from penstock.ops.triton.tuning import multiprocessors

MOST_ROWS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _four(at, inside):  # type: ignore[no-untyped-def]
    """Return the four words at `[LANES, WARPS, TILES, 4]`, `[LANES, WARPS, TILES]` each."""
    words = tl.reshape(tl.load(at, mask=inside[:, :, None, None], other=0), at.shape[:3] + (2, 2))
    even, odd = tl.split(words)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit  # type: ignore[untyped-decorator]
def _beside(  # type: ignore[no-untyped-def]
    at, group, RUN: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, QUARTERS: tl.constexpr
):
    """Return what lies beside the codes of a run, for each quarter of it, `[LANES, WARPS, TILES]`."""
    t0 = tl.load(at + group[:, :, None])
    t1, t2, t3 = t0, t0, t0
    if SCALED and QUARTERS > 1 and GROUP <= RUN // 2:
        t2 = tl.load(at + group[:, :, None] + RUN // 2 // GROUP)
        t3 = t2
        if GROUP <= RUN // 4 and QUARTERS == 4:
            t1 = tl.load(at + group[:, :, None] + RUN // 4 // GROUP)
            t3 = tl.load(at + group[:, :, None] + RUN // 4 * 3 // GROUP)
    return t0, t1, t2, t3


@triton.jit  # type: ignore[untyped-decorator]
def _activations(at, inside):  # type: ignore[no-untyped-def]
    """Return two pairs of activations, `[LANES, WARPS, 1]` each."""
    four = tl.load(at, mask=inside, other=0)
    return four.to(tl.int32)[:, :, None], (four >> 32).to(tl.int32)[:, :, None]


@triton.jit  # type: ignore[untyped-decorator]
def _as_pairs(a, b, c, d, SCALES: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return scales as pairs of 16-bit numbers."""
    a, b = paired(scale_of(a, SCALES), HALF), paired(scale_of(b, SCALES), HALF)
    return a, b, paired(scale_of(c, SCALES), HALF), paired(scale_of(d, SCALES), HALF)


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    c0, c1, c2, c3, second, bias, y_at, there, rows, number, outer, s_y,
    SECOND: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
):
    """Add up what the warps have, and store it: of a row of the matrix and of another, two columns each.

    there: the row of the result that the first column is.
    """
    both = tl.sum(tl.join(tl.join(c0, c1), tl.join(c2, c3)), 1)
    own, other = tl.split(both)
    own, other = _whole(own, number, second, bias, outer, SECOND, BIASED), _whole(
        other, number + (outer if GATED else 8), second, bias, 2 * outer if GATED else outer, SECOND, BIASED
    )
    kind = y_at.dtype.element_ty
    if GATED:
        active = silu(own.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        own = active * other.to(kind).to(tl.float32)
    a, b = tl.split(own)
    tl.store(y_at, a.to(kind), mask=(there < rows) & (number < outer))
    tl.store(y_at + s_y, b.to(kind), mask=(there + 1 < rows) & (number < outer))
    if not GATED:
        a, b = tl.split(other)
        tl.store(y_at + 8, a.to(kind), mask=(there < rows) & (number + 8 < outer))
        tl.store(y_at + 8 + s_y, b.to(kind), mask=(there + 1 < rows) & (number + 8 < outer))


@triton.jit  # type: ignore[untyped-decorator]
def _whole(  # type: ignore[no-untyped-def]
    sums, number, second, bias, outer, SECOND: tl.constexpr, BIASED: tl.constexpr
):
    """Return sums `[LANES, TILES, 2]` with the second scale and the bias of their rows."""
    at = tl.minimum(number, outer - 1)
    if SECOND == 1:
        sums *= tl.load(second + at)[:, :, None]
    if SECOND == 2:
        sums = tl.div_rn(sums, tl.load(second + at)[:, :, None])
    if BIASED:
        sums += tl.load(bias + at).to(tl.float32)[:, :, None]
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _plain_products(  # type: ignore[no-untyped-def]
    given, beside, zeros, KIND: tl.constexpr, PLACES: tl.constexpr, SCALES: tl.constexpr,
    SCALED: tl.constexpr, ZEROS: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
):
    """Return what the PTX of `products_of` does, by plain arithmetic in float32."""
    none = given[1].to(tl.float32) * 0
    c0, c1, c2, c3, c4, c5, c6, c7 = none, none, none, none, none, none, none, none
    for place in tl.static_range(PLACES):
        quarter: tl.constexpr = place * 4 // PLACES
        for word in tl.static_range(4):
            own, other = plain_number(given[1 + word], place, KIND, ZEROS), plain_number(given[5 + word], place, KIND, ZEROS)
            if ZEROS:
                own -= zeros[quarter // 2].to(tl.float32)
                other -= zeros[2 + quarter // 2].to(tl.float32)
            if SCALED:
                own *= scale_of(beside[quarter], SCALES)
                other *= scale_of(beside[4 + quarter], SCALES)
            pair = given[9 + 2 * place * WIDE + word // 2]
            a, b = _by_lanes(own, pair, word % 2, HALF)
            c0, c1 = c0 + a, c1 + b
            a, b = _by_lanes(other, pair, word % 2, HALF)
            c2, c3 = c2 + a, c3 + b
            if WIDE == 2:
                pair = given[9 + 2 * (place * WIDE + 1) + word // 2]
                a, b = _by_lanes(own, pair, word % 2, HALF)
                c4, c5 = c4 + a, c5 + b
                a, b = _by_lanes(other, pair, word % 2, HALF)
                c6, c7 = c6 + a, c7 + b
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit  # type: ignore[untyped-decorator]
def _by_lanes(numbers, pair, which: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the products of numbers of codes with one of each pair of activations, summed over the four
    lanes of a row: for the row of each lane, two columns, which are rows of activations."""
    WARPS: tl.constexpr = numbers.shape[1]
    TILES: tl.constexpr = numbers.shape[2]
    if HALF:
        some = (pair >> 16 * which).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        some = (pair << 16 if which == 0 else pair & -65536).to(tl.float32, bitcast=True)
    left = tl.reshape(numbers, [8, 1, 4, WARPS, TILES])
    right = tl.reshape(some, [1, 8, 4, WARPS, 1])
    both = tl.sum(left * right, 2)
    both = tl.permute(tl.reshape(both, [32, 2, WARPS, TILES]), (0, 2, 3, 1))
    return tl.split(both)


@triton.jit  # type: ignore[untyped-decorator]
def _few_columns(  # type: ignore[no-untyped-def]
    x,
    codes,
    scale,
    zero,
    second,
    bias,
    y,
    rows,
    outer,
    inner,
    down,
    s_x,
    s_w,
    s_s,
    s_y,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    RAW: tl.constexpr,
    ZEROS: tl.constexpr,
    SECOND: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    EARLY: tl.constexpr,
    HALF: tl.constexpr,
    LESS: tl.constexpr,
    PTX: tl.constexpr,
    REGISTERS: tl.constexpr,
) -> None:
    """Compute the numbers of 16 * TILES rows of the matrix; where GATED, of half as many of the gate, each
    with its own of what is gated, `outer` further on. GATED and SECOND: as in `few_bits`.

    Tensors have the axes LANES, WARPS and TILES. A warp takes every WARPS-th step.
    """
    if EARLY:
        gdc_launch_dependents()
    RUN: tl.constexpr = 8 * PLACES
    STEP: tl.constexpr = 2 * RUN
    SCALED: tl.constexpr = GROUP < STEP
    HIGH: tl.constexpr = 8 if GATED else 16
    lane, warp, tile = tl.arange(0, 32), tl.arange(0, WARPS), tl.program_id(0) * TILES + tl.arange(0, TILES)
    row, part = lane // 4, lane % 4
    number = tile[None, :] * HIGH + row[:, None]
    own = tl.minimum(number, outer - 1)[:, None, :]
    other = own + outer if GATED else tl.minimum(number + 8, outer - 1)[:, None, :]
    word = part[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    own_at = codes + own.to(tl.int64)[:, :, :, None] * s_w + word
    other_at = codes + other.to(tl.int64)[:, :, :, None] * s_w + word
    own_beside, other_beside = (own // down).to(tl.int64) * s_s, (other // down).to(tl.int64) * s_s
    # Pairs of pairs of activations of the rows that are a quarter of the lane, and 8 more.
    fours = (part // 2 * (RUN // 4) + part % 2)[:, None]
    x_at = x + tl.minimum(row, rows - 1)[:, None] * s_x + fours
    more_at = x + tl.minimum(row + 8, rows - 1)[:, None] * s_x + fours
    place = (warp * 32)[None, :, None] + lane[:, None, None]
    nothing = tl.zeros([32, WARPS, TILES], tl.float32)
    c0, c1, c2, c3, c4, c5, c6, c7 = nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing
    column = (warp * STEP)[None, :] + (lane * 0)[:, None]
    v0, v1, v2, v3 = _four(own_at + (column // PLACES)[:, :, None, None], column < inner)
    u0, u1, u2, u3 = _four(other_at + (column // PLACES)[:, :, None, None], column < inner)
    EACH: tl.constexpr = RUN if RAW else GROUP
    QUARTERS: tl.constexpr = 1 if RAW else 4
    run = tl.minimum(column, inner - STEP) + (part // 2 * RUN)[:, None]
    s0, s1, s2, s3 = _beside(scale + own_beside, run // EACH, RUN, GROUP, SCALED, QUARTERS)
    t0, t1, t2, t3 = _beside(scale + other_beside, run // EACH, RUN, GROUP, SCALED, QUARTERS)
    z0, z1, y0, y1 = s0, s0, s0, s0
    if ZEROS:
        z0, _, z1, _ = _beside(zero + own_beside, run // GROUP, RUN, GROUP, SCALED, 2)
        y0, _, y1, _ = _beside(zero + other_beside, run // GROUP, RUN, GROUP, SCALED, 2)
    if EARLY:
        gdc_wait()
    for k in tl.range(0, inner, STEP * WARPS):
        column = k + STEP * WARPS + (warp * STEP)[None, :] + (lane * 0)[:, None]
        at = (column // PLACES)[:, :, None, None]
        next_v0, next_v1, next_v2, next_v3 = _four(own_at + at, column < inner)
        next_u0, next_u1, next_u2, next_u3 = _four(other_at + at, column < inner)
        run = tl.minimum(column, inner - STEP) + (part // 2 * RUN)[:, None]
        next_s0, next_s1, next_s2, next_s3 = _beside(
            scale + own_beside, run // EACH, RUN, GROUP, SCALED, QUARTERS
        )
        next_t0, next_t1, next_t2, next_t3 = _beside(
            scale + other_beside, run // EACH, RUN, GROUP, SCALED, QUARTERS
        )
        next_z0, next_z1, next_y0, next_y1 = next_s0, next_s0, next_s0, next_s0
        if ZEROS:
            next_z0, _, next_z1, _ = _beside(zero + own_beside, run // GROUP, RUN, GROUP, SCALED, 2)
            next_y0, _, next_y1, _ = _beside(zero + other_beside, run // GROUP, RUN, GROUP, SCALED, 2)
        four = (k + warp * STEP)[None, :]
        inside, four = (four < inner) & (lane[:, None] >= 0), four // 4
        given = (place, v0, v1, v2, v3, u0, u1, u2, u3)
        for at in tl.static_range(PLACES):
            given = given + _activations(x_at + four + 2 * at, inside)
            if WIDE == 2:
                given = given + _activations(more_at + four + 2 * at, inside)
        if PTX == "":
            beside = (s0, s1, s2, s3, t0, t1, t2, t3)
            d0, d1, d2, d3, d4, d5, d6, d7 = _plain_products(
                given, beside, (z0, z1, y0, y1), KIND, PLACES, SCALES, SCALED, ZEROS, WIDE, HALF
            )
        else:
            if ZEROS:
                m0, m1 = LESS - z0.to(tl.float32), LESS - z1.to(tl.float32)
                n0, n1 = LESS - y0.to(tl.float32), LESS - y1.to(tl.float32)
                given = given + (paired(m0, HALF), paired(m1, HALF), paired(n0, HALF), paired(n1, HALF))
            if RAW:
                given = given + (s0.to(tl.int32), t0.to(tl.int32))
            elif SCALED:
                given = given + _as_pairs(s0, s1, s2, s3, SCALES, HALF) + _as_pairs(t0, t1, t2, t3, SCALES, HALF)
            if WIDE == 1:
                d0, d1, d2, d3 = tl.inline_asm_elementwise(
                    PTX, REGISTERS, given, dtype=(tl.float32,) * 4, is_pure=True, pack=1
                )
                d4, d5, d6, d7 = d0, d1, d2, d3
            else:
                d0, d1, d2, d3, d4, d5, d6, d7 = tl.inline_asm_elementwise(
                    PTX, REGISTERS, given, dtype=(tl.float32,) * 8, is_pure=True, pack=1
                )
        if not SCALED:
            own_scale, other_scale = scale_of(s0, SCALES), scale_of(t0, SCALES)
            d0, d1, d2, d3 = d0 * own_scale, d1 * own_scale, d2 * other_scale, d3 * other_scale
            d4, d5, d6, d7 = d4 * own_scale, d5 * own_scale, d6 * other_scale, d7 * other_scale
        c0, c1, c2, c3 = c0 + d0, c1 + d1, c2 + d2, c3 + d3
        if WIDE == 2:
            c4, c5, c6, c7 = c4 + d4, c5 + d5, c6 + d6, c7 + d7
        v0, v1, v2, v3, u0, u1, u2, u3 = (
            next_v0, next_v1, next_v2, next_v3, next_u0, next_u1, next_u2, next_u3,
        )
        s0, s1, s2, s3, t0, t1, t2, t3 = (
            next_s0, next_s1, next_s2, next_s3, next_t0, next_t1, next_t2, next_t3,
        )
        z0, z1, y0, y1 = next_z0, next_z1, next_y0, next_y1
    y_at = y + part[:, None] * 2 * s_y + number
    there = (tl.zeros([32, TILES], tl.int32) + part[:, None]) * 2
    _finish(
        c0, c1, c2, c3, second, bias, y_at, there, rows, number, outer, s_y, SECOND, GATED, BIASED
    )
    if WIDE == 2:
        _finish(
            c4, c5, c6, c7, second, bias, y_at + 8 * s_y, there + 8, rows, number, outer, s_y, SECOND, GATED, BIASED
        )


@dataclass(frozen=True, slots=True)
class MmaTuning:
    """MmaTuning says how a product is cut.

    tiles: times 16 rows of the matrix that a warp has. warps: of a program, which share the columns.
    """

    tiles: int
    warps: int


def few_columns(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
    tuning: MmaTuning | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`, x `[rows, in]` of at most MOST_ROWS, as `few_bits.few_rows`."""
    kind, parts = kind_of(weight.format), weight.parts
    assert kind is not None, weight.format
    (height, inner), rows = weight.shape, len(x)
    outer = height // 2 if gated else height
    assert 0 < rows <= MOST_ROWS, x.shape
    y = torch.empty(rows, outer, dtype=x.dtype, device=x.device) if out is None else out
    places = 8 if kind.codes in FOUR_BITS else 4
    tuning = tuning or mma_tuning(height, inner, places, multiprocessors(x.device))
    words, scale = parts["codes"].view(torch.int32), parts["scale"]
    scale = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    group, half = WHOLE if kind.group >= inner else kind.group, x.dtype == torch.float16
    each = RUN_SCALES.get((kind.codes, kind.scales, kind.group)) if COMPILED else None
    raw = not half and each is not None and group < 16 * places and scale.shape[1] % each.itemsize == 0
    scale = scale.view(each) if raw and each is not None else scale
    zero, second = parts.get("zero"), parts.get("second")
    wide, early, ptx, registers = 1 + (rows > 8), uses_pdl(), "", ""
    if COMPILED:
        ptx, registers = products_of(
            kind.codes,
            half=half,
            zeros=zero is not None,
            scaled=group < 16 * places,
            raw=kind.scales if raw else 0,
            wide=wide,
        )
    fours = x.view(torch.int64)
    _few_columns[(triton.cdiv(outer, tuning.tiles * (8 if gated else 16)),)](
        fours,
        words,
        scale,
        x if zero is None else zero,
        x if second is None else second,
        x if bias is None else bias,
        y,
        rows,
        outer,
        inner,
        kind.down,
        fours.stride(0),
        words.stride(0),
        scale.stride(0),
        y.stride(0),
        TILES=tuning.tiles,
        WARPS=tuning.warps,
        WIDE=wide,
        GROUP=group,
        KIND=kind.codes,
        PLACES=places,
        SCALES=kind.scales,
        RAW=raw,
        ZEROS=zero is not None,
        SECOND=kind.second,
        GATED=gated,
        BIASED=bias is not None,
        EARLY=early,
        HALF=half,
        LESS=less(kind.codes, half=half),
        PTX=ptx,
        REGISTERS=registers,
        num_warps=tuning.warps,
        **pdl_launch_options(early),
    )
    return y


def suits(x: Tensor, weight: Matrix) -> bool:
    """Tell whether `few_columns` computes a product, of those that `few_bits.suits` names: of whole steps, and
    activations that are read four at a time."""
    kind, inner = kind_of(weight.format), weight.shape[1]
    assert kind is not None, weight.format
    return (
        len(x) <= MOST_ROWS
        and inner % (128 if kind.codes in FOUR_BITS else 64) == 0
        and x.stride(0) % 4 == 0
        and x.data_ptr() % 8 == 0
    )


def mma_tuning(height: int, inner: int, places: int, many: int) -> MmaTuning:
    """Return how a product is cut: the one place for constants."""
    return MmaTuning(2 if height >= 16 * 8 * many else 1, 8)
