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
from penstock.ops.triton.codes import COMPILED, E2M1, FOUR_BITS, RUN_SCALES, WHOLE, CodeKind, scale_of
from penstock.ops.triton.fragments import warp_products
from penstock.ops.triton.ptx import FOLDED, less, products_of

DEALT = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
"""Whether the compiler deals out the first axis of a tensor to lanes and the second to warps. Triton 3.7
begins with the last; other kernels then compute what these would."""


@triton.jit  # type: ignore[untyped-decorator]
def _words(own_at, other_at, column, run, inner, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the four words of each of two rows from a column on, `[THREADS]` each."""
    at, inside = (column // PLACES)[:, None], (column + run < inner)[:, None]
    # Of an address from memory the compiler does not know that it is a multiple of 16.
    a, b, c, d = _apart(tl.load(tl.multiple_of(own_at + at, [16, 16]), mask=inside, other=0))
    e, f, g, h = _apart(tl.load(tl.multiple_of(other_at + at, [16, 16]), mask=inside, other=0))
    return a, b, c, d, e, f, g, h


@triton.jit
def _apart(words):  # type: ignore[no-untyped-def]
    """Return four words `[THREADS]` each, of `[THREADS, 4]`."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit  # type: ignore[untyped-decorator]
def _beside(  # type: ignore[no-untyped-def]
    own_at, other_at, group, EACH: tl.constexpr, APART: tl.constexpr
):
    """Return what lies beside the codes of a run: for each quarter of it, of one row, then of another.

    EACH: quarters of a number. APART: whether there is more than one number in a run.
    """
    a, e = tl.load(own_at + group), tl.load(other_at + group)
    b, c, d, f, g, h = a, a, a, e, e, e
    if APART and EACH == 2:
        c, g = tl.load(own_at + group + 1), tl.load(other_at + group + 1)
        d, h = c, g
    if APART and EACH == 1:
        b, f = tl.load(own_at + group + 1), tl.load(other_at + group + 1)
        c, g = tl.load(own_at + group + 2), tl.load(other_at + group + 2)
        d, h = tl.load(own_at + group + 3), tl.load(other_at + group + 3)
    return a, b, c, d, e, f, g, h


@triton.jit
def _activations(at, inside):  # type: ignore[no-untyped-def]
    """Return two pairs of activations, `[THREADS]` each."""
    four = tl.load(at, mask=inside, other=0)
    return four.to(tl.int32), (four >> 32).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _fetched(  # type: ignore[no-untyped-def]
    own_at,
    other_at,
    besides,
    column,
    run,
    inner,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    RAW: tl.constexpr,
    ZEROS: tl.constexpr,
    EACH: tl.constexpr,
    APART: tl.constexpr,
):
    """Return words, scales and zero points of the step from a column on, eight of each.

    Scales are read where columns end, too, so that they are numbers.
    """
    RUN: tl.constexpr = 8 * PLACES
    words = _words(own_at, other_at, column, run, inner, PLACES)
    at = tl.minimum(column + run, inner - RUN)
    scales = _beside(besides[0], besides[1], at // (RUN if RAW else GROUP), EACH, APART and not RAW)
    zeros = scales
    if ZEROS:
        zeros = _beside(besides[2], besides[3], at // GROUP, EACH, APART)
    return words, scales, zeros


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
) -> None:
    """Compute the numbers of TILES tiles from `first` on, of 16 rows of the matrix each; where GATED, of half
    as many of the gate, each with its own of what is gated, `outer` further on.

    rows_at: where a thread's rows of activations begin, as fours, the first eight's and the next, `[THREADS]`.
    to, stored: where its numbers go and whether they do, for rows 2 * (lane % 4), the next one, and those
    eight further on, `[32]`.
    GATED and SECOND: as in `few_bits`. WIDE: eights of rows of activations.

    Tensors have one axis, of threads, which no compiler deals out in two ways; there is one for each tile. A
    warp takes every WARPS-th step of two runs.
    """
    RUN: tl.constexpr = 8 * PLACES
    STEP: tl.constexpr = 2 * RUN
    SCALED: tl.constexpr = GROUP < STEP
    APART: tl.constexpr = GROUP < RUN
    EACH: tl.constexpr = 4 * GROUP // RUN
    LOWER: tl.constexpr = 8 if GATED else 16
    THREADS: tl.constexpr = 32 * WARPS
    place = tl.arange(0, THREADS)
    lane, warp = place % 32, place // 32
    row, part = lane // 4, lane % 4
    word = part[:, None] * 4 + tl.arange(0, 4)[None, :]
    # Activations are read by fours. A lane has those of the row that is its quarter, and of eight more.
    fours, column, run = part // 2 * (RUN // 4) + part % 2, warp * STEP, part // 2 * RUN
    nothing = tl.zeros([THREADS], tl.float32)
    sums = (nothing, nothing, nothing, nothing) * (TILES * WIDE)
    own_at, other_at, besides = _places(
        first * LOWER + row, word, codes, scale, zero, outer, down, s_w, s_s, GATED
    )
    words, scales, zeros = _fetched(
        own_at[0], other_at[0], besides, column, run, inner, GROUP, PLACES, RAW, ZEROS, EACH, APART
    )
    for tile in tl.static_range(1, TILES):
        more = _places((first + tile) * LOWER + row, word, codes, scale, zero, outer, down, s_w, s_s, GATED)
        own_at, other_at, besides = own_at + more[0], other_at + more[1], besides + more[2]
        begun = _fetched(
            own_at[tile],
            other_at[tile],
            more[2],
            column,
            run,
            inner,
            GROUP,
            PLACES,
            RAW,
            ZEROS,
            EACH,
            APART,
        )
        words, scales, zeros = words + begun[0], scales + begun[1], zeros + begun[2]
    if EARLY:
        gdc_wait()
    for _ in tl.range(0, inner, STEP * WARPS):
        # What the next step needs of the matrix is asked for before this one begins.
        following = column + STEP * WARPS
        next_words, next_scales, next_zeros = _fetched(
            own_at[0],
            other_at[0],
            besides[0:4],
            following,
            run,
            inner,
            GROUP,
            PLACES,
            RAW,
            ZEROS,
            EACH,
            APART,
        )
        for tile in tl.static_range(1, TILES):
            coming = _fetched(
                own_at[tile],
                other_at[tile],
                besides[4 * tile : 4 * tile + 4],
                following,
                run,
                inner,
                GROUP,
                PLACES,
                RAW,
                ZEROS,
                EACH,
                APART,
            )
            next_words, next_scales = next_words + coming[0], next_scales + coming[1]
            next_zeros = next_zeros + coming[2]
        if PTX != "":
            asked_for(tl.program_id(0))
        at, inside = column // 4 + fours, column + run < inner
        some = _activations(rows_at[0] + at, inside)
        if WIDE == 2:
            some = some + _activations(rows_at[1] + at, inside)
        for each in tl.static_range(1, PLACES):
            some = some + _activations(rows_at[0] + (at + 2 * each), inside)
            if WIDE == 2:
                some = some + _activations(rows_at[1] + (at + 2 * each), inside)
        for tile in tl.static_range(TILES):
            found = warp_products(
                place,
                words[8 * tile : 8 * tile + 8] + some,
                scales[8 * tile : 8 * tile + 8],
                zeros[8 * tile : 8 * tile + 8],
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
                found = _scaled(
                    found, scale_of(scales[8 * tile], SCALES), scale_of(scales[8 * tile + 4], SCALES), WIDE
                )
            for which in tl.static_range(4 * WIDE):
                one = sums[4 * WIDE * tile + which] + found[which]
                sums = sums[: 4 * WIDE * tile + which] + (one,) + sums[4 * WIDE * tile + which + 1 :]
        words, scales, zeros, column = next_words, next_scales, next_zeros, following
    for tile in tl.static_range(TILES):
        number = (first + tile) * LOWER + tl.arange(0, 32) // 4
        for eight in tl.static_range(WIDE):
            _finish(
                sums[4 * (WIDE * tile + eight) : 4 * (WIDE * tile + eight) + 4],
                number,
                to[2 * eight : 2 * eight + 2],
                stored[2 * eight : 2 * eight + 2],
                second,
                bias,
                outer,
                WARPS,
                FOLDED,
                SECOND,
                GATED,
                BIASED,
                ALPHA,
                SHIFT,
                LIMIT,
            )


@triton.jit
def _places(  # type: ignore[no-untyped-def]
    number, word, codes, scale, zero, outer, down, s_w, s_s, GATED: tl.constexpr
):
    """Return where the words of a thread's rows of a tile are, and what lies beside them. It has one row, and
    one that is eight rows lower or the gated one."""
    own = tl.minimum(number, outer - 1)
    other = own + outer if GATED else tl.minimum(number + 8, outer - 1)
    own_at = codes + own.to(tl.int64)[:, None] * s_w + word
    other_at = codes + other.to(tl.int64)[:, None] * s_w + word
    own_beside, other_beside = (own // down).to(tl.int64) * s_s, (other // down).to(tl.int64) * s_s
    besides = (scale + own_beside, scale + other_beside, zero + own_beside, zero + other_beside)
    return (own_at,), (other_at,), besides


@triton.jit
def asked_for(one):  # type: ignore[no-untyped-def]
    """Keep the compiler from moving loads that come before behind what comes after: no load of a warp passes
    a barrier of it."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [one], dtype=tl.int32, is_pure=False, pack=1
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
    WARPS: tl.constexpr,
    FOLDED: tl.constexpr,
    SECOND: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Add up what the warps have, and store it.

    sums: two of one row of the matrix, and two of another, `[THREADS]`. number: the one row, `[32]`.
    """
    a, b = _of_warps(sums[0], WARPS), _of_warps(sums[1], WARPS)
    c, d = _of_warps(sums[2], WARPS), _of_warps(sums[3], WARPS)
    if FOLDED != 1.0:
        a, b, c, d = a * FOLDED, b * FOLDED, c * FOLDED, d * FOLDED
    at = tl.minimum(number, outer - 1)
    a, b = _whole(a, b, at, second, bias, SECOND, BIASED)
    lower = at + outer if GATED else tl.minimum(number + 8, outer - 1)
    c, d = _whole(c, d, lower, second, bias, SECOND, BIASED)
    kind: tl.constexpr = to[0].dtype.element_ty
    if GATED:
        a = activated(a.to(kind).to(tl.float32), c.to(kind).to(tl.float32), kind, ALPHA, SHIFT, LIMIT)
        b = activated(b.to(kind).to(tl.float32), d.to(kind).to(tl.float32), kind, ALPHA, SHIFT, LIMIT)
    tl.store(to[0] + number, a.to(kind), mask=stored[0] & (number < outer))
    tl.store(to[1] + number, b.to(kind), mask=stored[1] & (number < outer))
    if not GATED:
        tl.store(to[0] + number + 8, c.to(kind), mask=stored[0] & (number + 8 < outer))
        tl.store(to[1] + number + 8, d.to(kind), mask=stored[1] & (number + 8 < outer))


@triton.jit
def _of_warps(sums, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sums of all warps, `[32]`."""
    return tl.sum(tl.reshape(sums, (WARPS, 32)), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _whole(  # type: ignore[no-untyped-def]
    one, other, at, second, bias, SECOND: tl.constexpr, BIASED: tl.constexpr
):
    """Return two sums `[32]` of a row with its second scale and bias."""
    if SECOND > 0:
        scale = tl.load(second + at)
        if SECOND == 1:
            one, other = one * scale, other * scale
        else:
            one, other = tl.div_rn(one, scale), tl.div_rn(other, scale)
    if BIASED:
        more = tl.load(bias + at).to(tl.float32)
        one, other = one + more, other + more
    return one, other


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
        "FOLDED": 2.0 ** FOLDED[kind.scales] if raw and kind.codes == E2M1.value else 1.0,
    }


def reads_rows(x: Tensor, codes: int) -> bool:
    """Tell whether rows of activations can be read by fours, of whole runs of codes of a kind, on a device
    whose warps have these products, from compute capability 8.0 on, and by a compiler that deals tensors out
    as they need."""
    return (
        x.dtype.itemsize == 2
        and x.shape[1] % (64 if codes in FOUR_BITS else 32) == 0
        and x.stride(0) % 4 == 0
        and x.data_ptr() % 8 == 0
        and (not COMPILED or (DEALT and driver.active.get_current_target().arch >= 80))
    )
