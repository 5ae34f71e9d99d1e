"""Computes tiles of a product of few rows of activations with a matrix of few bits, within a kernel, by the
matrix products of a warp, from registers to registers.

A warp takes 16 rows of the matrix, or several times as many, and two runs of each at a time. A thread reads
half a run of two rows of each sixteen, takes the words apart where they are, and has thereby its part of a
product's left operand; it reads its part of the right one from where activations rest. The warps of a program
share a sum. They meet once, at the end, so none waits for another or for shared memory, and a code of four
bits takes two instructions.

Numbers are exact and sums float32; scales are applied as in `few_bits`.

Why it is safe that a product takes registers of 32 lanes: lane i of warp j must have what places i and j of
the first two axes of a tensor say. Triton deals tensors out so before 3.7, and does not promise it: from then
on these kernels are not used (DEALT). Each thread compares its place with the one that the product is given,
and a kernel in which they differ stops with an error.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait
from triton.runtime import driver

from penstock.ops.triton.activation import activated
from penstock.ops.triton.codes import COMPILED, FOUR_BITS, RUN_SCALES, WHOLE, CodeKind, scale_of
from penstock.ops.triton.fragments import warp_products
from penstock.ops.triton.ptx import less, products_of, unfolded

DEALT = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
"""The compiler deals out the first axis of a tensor to lanes and the second to warps before Triton 3.7, which
begins with the last. From then on other kernels compute what these would."""


@triton.jit  # type: ignore[untyped-decorator]
def _words(own_at, other_at, column, run, inner, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the four words of each of two rows from a column on, `[LANES, WARPS, TILES]` each."""
    at, inside = (column // PLACES)[:, :, None, None], (column + run < inner)[:, :, None, None]
    # Of an address from memory the compiler does not know that it is a multiple of 16.
    a, b, c, d = _apart(tl.load(tl.multiple_of(own_at + at, [16, 16, 16, 16]), mask=inside, other=0))
    e, f, g, h = _apart(tl.load(tl.multiple_of(other_at + at, [16, 16, 16, 16]), mask=inside, other=0))
    return a, b, c, d, e, f, g, h


@triton.jit
def _apart(words):  # type: ignore[no-untyped-def]
    """Return four words `[LANES, WARPS, TILES]` each, of `[LANES, WARPS, TILES, 4]`."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], words.shape[1], words.shape[2], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit  # type: ignore[untyped-decorator]
def _beside(  # type: ignore[no-untyped-def]
    own_at, other_at, group, last, EACH: tl.constexpr, APART: tl.constexpr
):
    """Return what lies beside the codes of a run: for each quarter of it, of one row, then of another.

    last: group of the last column. EACH: quarters of a number. APART: whether there is more than one number
    in a run.
    """
    a, e = tl.load(own_at + group[:, :, None]), tl.load(other_at + group[:, :, None])
    b, c, d, f, g, h = a, a, a, e, e, e
    if APART and EACH == 2:
        c, g = _next(own_at, other_at, group, last, 1)
        d, h = c, g
    if APART and EACH == 1:
        b, f = _next(own_at, other_at, group, last, 1)
        c, g = _next(own_at, other_at, group, last, 2)
        d, h = _next(own_at, other_at, group, last, 3)
    return a, b, c, d, e, f, g, h


@triton.jit  # type: ignore[untyped-decorator]
def _next(own_at, other_at, group, last, more: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what lies beside the codes of the group that is `more` further on, or of the last one."""
    at = tl.minimum(group + more, last)[:, :, None]
    return tl.load(own_at + at), tl.load(other_at + at)


@triton.jit
def _activations(at, inside):  # type: ignore[no-untyped-def]
    """Return two pairs of activations, `[LANES, WARPS, 1]` each."""
    four = tl.load(at, mask=inside, other=0)
    return four.to(tl.int32)[:, :, None], (four >> 32).to(tl.int32)[:, :, None]


@triton.jit  # type: ignore[untyped-decorator]
def tiles_of_products(  # type: ignore[no-untyped-def]
    rows_at,
    to,
    stored,
    codes,
    scale,
    zero,
    second,
    bias,
    first,
    outer,
    inner,
    down,
    s_w,
    s_s,
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
    FOLDED: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """Compute the numbers of TILES tiles from `first` on, of 16 rows of the matrix each; where GATED, of half
    as many of the gate, each with its own of what is gated, `outer` further on.

    rows_at: where a lane's rows of activations begin, as fours, the first eight's and the next, `[LANES, 1]`.
    to, stored: where its numbers go and whether they do, for rows 2 * (lane % 4), the next one, and those
    eight further on, `[LANES, 1]`.
    GATED and SECOND: as in `few_bits`. WIDE: eights of rows of activations. EVEN: whether columns are whole
    runs.

    Tensors have the axes LANES, WARPS and TILES. A warp takes every WARPS-th step of two runs.
    """
    RUN: tl.constexpr = 8 * PLACES
    STEP: tl.constexpr = 2 * RUN
    SCALED: tl.constexpr = GROUP < STEP
    APART: tl.constexpr = GROUP < RUN
    EACH: tl.constexpr = 4 * GROUP // RUN
    LOWER: tl.constexpr = 8 if GATED else 16
    lane, warp, tile = tl.arange(0, 32), tl.arange(0, WARPS), first + tl.arange(0, TILES)
    row, part = lane // 4, lane % 4
    place = (warp * 32)[None, :, None] + lane[:, None, None]
    # A thread has one row of each tile, and one that is eight rows lower or the gated one.
    number = tile[None, :] * LOWER + row[:, None]
    own = tl.minimum(number, outer - 1)[:, None, :]
    other = own + outer if GATED else tl.minimum(number + 8, outer - 1)[:, None, :]
    word = part[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    own_at = codes + own.to(tl.int64)[:, :, :, None] * s_w + word
    other_at = codes + other.to(tl.int64)[:, :, :, None] * s_w + word
    own_beside, other_beside = (own // down).to(tl.int64) * s_s, (other // down).to(tl.int64) * s_s
    # Activations are read by fours. A lane has those of the row that is its quarter, and of eight more.
    fours = (part // 2 * (RUN // 4) + part % 2)[:, None]
    column = (warp * STEP)[None, :] + tl.zeros([32, 1], tl.int32)
    run = (part // 2 * RUN)[:, None]
    words = _words(own_at, other_at, column, run, inner, PLACES)
    # Scales are read where columns end, too, so that they are numbers.
    last_run = (inner - 1) // RUN * RUN
    end = (inner - 1) // GROUP
    at = tl.minimum(column + run, last_run)
    scales = _beside(
        scale + own_beside,
        scale + other_beside,
        at // (RUN if RAW else GROUP),
        end,
        EACH,
        APART and not RAW,
    )
    zeros = scales
    if ZEROS:
        zeros = _beside(zero + own_beside, zero + other_beside, at // GROUP, end, EACH, APART)
    nothing = tl.zeros([32, WARPS, TILES], tl.float32)
    sums = (nothing, nothing, nothing, nothing)
    more = sums
    if EARLY:
        gdc_wait()
    for _ in tl.range(0, inner, STEP * WARPS):
        # What the next step needs of the matrix is asked for before this one begins.
        following = column + STEP * WARPS
        next_words = _words(own_at, other_at, following, run, inner, PLACES)
        at = tl.minimum(following + run, last_run)
        next_scales = _beside(
            scale + own_beside,
            scale + other_beside,
            at // (RUN if RAW else GROUP),
            end,
            EACH,
            APART and not RAW,
        )
        next_zeros = next_scales
        if ZEROS:
            next_zeros = _beside(zero + own_beside, zero + other_beside, at // GROUP, end, EACH, APART)
        given, four, inside = words, column // 4 + fours, column + run < inner
        for each in tl.static_range(PLACES):
            if not EVEN:
                inside = 4 * (four + 2 * each) < inner
            given = given + _activations(rows_at[0] + (four + 2 * each), inside)
            if WIDE == 2:
                given = given + _activations(rows_at[1] + (four + 2 * each), inside)
        found = warp_products(
            place,
            given,
            scales,
            zeros,
            KIND,
            PLACES,
            SCALES,
            SCALED,
            RAW,
            ZEROS,
            WIDE,
            HALF,
            LESS,
            PTX,
            REGISTERS,
        )
        if not SCALED:
            found = _scaled(found, scale_of(scales[0], SCALES), scale_of(scales[4], SCALES), WIDE)
        sums = (sums[0] + found[0], sums[1] + found[1], sums[2] + found[2], sums[3] + found[3])
        if WIDE == 2:
            more = (more[0] + found[4], more[1] + found[5], more[2] + found[6], more[3] + found[7])
        words, scales, zeros, column = next_words, next_scales, next_zeros, following
    _finish(
        sums,
        number,
        to[0:2],
        stored[0:2],
        second,
        bias,
        outer,
        FOLDED,
        SECOND,
        GATED,
        BIASED,
        ALPHA,
        SHIFT,
        LIMIT,
    )
    if WIDE == 2:
        _finish(
            more,
            number,
            to[2:4],
            stored[2:4],
            second,
            bias,
            outer,
            FOLDED,
            SECOND,
            GATED,
            BIASED,
            ALPHA,
            SHIFT,
            LIMIT,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(found, own, other, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return sums of one row and of another, two each, times the scale of theirs."""
    if WIDE == 2:
        return (
            found[0] * own,
            found[1] * own,
            found[2] * other,
            found[3] * other,
            found[4] * own,
            found[5] * own,
            found[6] * other,
            found[7] * other,
        )
    else:
        return found[0] * own, found[1] * own, found[2] * other, found[3] * other


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    sums,
    number,
    to,
    stored,
    second,
    bias,
    outer,
    FOLDED: tl.constexpr,
    SECOND: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Add up what the warps have, and store it.

    sums: two of one row of the matrix, and two of another. number: the one row, `[LANES, TILES]`.
    """
    both = tl.sum(tl.join(tl.join(sums[0], sums[1]), tl.join(sums[2], sums[3])), 1)
    if FOLDED != 1.0:
        both *= FOLDED
    own, other = tl.split(both)
    own = _whole(own, tl.minimum(number, outer - 1), second, bias, SECOND, BIASED)
    lower = tl.minimum(number, outer - 1) + outer if GATED else tl.minimum(number + 8, outer - 1)
    other = _whole(other, lower, second, bias, SECOND, BIASED)
    kind: tl.constexpr = to[0].dtype.element_ty
    if GATED:
        own, other = own.to(kind).to(tl.float32), other.to(kind).to(tl.float32)
        own = activated(own, other, kind, ALPHA, SHIFT, LIMIT)
    a, b = tl.split(own)
    tl.store(to[0] + number, a.to(kind), mask=stored[0] & (number < outer))
    tl.store(to[1] + number, b.to(kind), mask=stored[1] & (number < outer))
    if not GATED:
        a, b = tl.split(other)
        tl.store(to[0] + number + 8, a.to(kind), mask=stored[0] & (number + 8 < outer))
        tl.store(to[1] + number + 8, b.to(kind), mask=stored[1] & (number + 8 < outer))


@triton.jit  # type: ignore[untyped-decorator]
def _whole(  # type: ignore[no-untyped-def]
    sums, at, second, bias, SECOND: tl.constexpr, BIASED: tl.constexpr
):
    """Return sums `[LANES, TILES, 2]` with the second scale and the bias of their rows."""
    if SECOND == 1:
        sums *= tl.load(second + at)[:, :, None]
    if SECOND == 2:
        sums = tl.div_rn(sums, tl.load(second + at)[:, :, None])
    if BIASED:
        sums += tl.load(bias + at).to(tl.float32)[:, :, None]
    return sums


def codes_options(
    kind: CodeKind, inner: int, dtype: torch.dtype, scales: int, *, wide: int
) -> dict[str, int | float | str | bool]:
    """Return arguments of `tiles_of_products` for codes of a kind: rows of `inner` columns with so many
    scales, and `wide` eights of rows of activations of a dtype."""
    places, half = 8 if kind.codes in FOUR_BITS else 4, dtype == torch.float16
    group = WHOLE if kind.group >= inner else kind.group
    each = RUN_SCALES.get((kind.codes, kind.scales, kind.group)) if COMPILED else None
    raw = not half and each is not None and group < 16 * places and scales % each.itemsize == 0
    ptx, registers = "", ""
    if COMPILED:
        ptx, registers = products_of(
            kind.codes,
            half=half,
            zeros=kind.zeros,
            scaled=group < 16 * places,
            raw=kind.scales if raw else 0,
            wide=wide,
        )
    return {
        "WIDE": wide,
        "GROUP": group,
        "KIND": kind.codes,
        "PLACES": places,
        "SCALES": kind.scales,
        "RAW": raw,
        "HALF": half,
        "LESS": less(kind.codes, half=half),
        "PTX": ptx,
        "REGISTERS": registers,
        "EVEN": inner % (8 * places) == 0,
        "FOLDED": unfolded(kind.codes, kind.scales if raw else 0),
    }


def reads_rows(x: Tensor) -> bool:
    """Tell whether rows of activations can be read by fours, on a device whose warps have these products,
    from compute capability 8.0 on, and by a compiler that deals tensors out as they need."""
    return (
        x.dtype.itemsize == 2
        and x.shape[1] % 4 == 0
        and x.stride(0) % 4 == 0
        and x.data_ptr() % 8 == 0
        and (not COMPILED or (DEALT and driver.active.get_current_target().arch >= 80))
    )
