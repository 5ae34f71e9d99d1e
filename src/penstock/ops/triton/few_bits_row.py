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
from penstock.ops.triton.tuning import multiprocessors
from penstock.ops.triton.warp_tiles import asked_for


@triton.jit  # type: ignore[untyped-decorator]
def _beside(at, k, place, inner, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what lies beside the codes of a row from a place of each run on, `[THREADS]`."""
    return tl.load(at + tl.minimum(k + place, inner - 1) // GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(  # type: ignore[no-untyped-def]
    part, zero, sums, scale, SCALES: tl.constexpr, ZEROS: tl.constexpr, CONVERTS: tl.constexpr
):
    """Return sums of codes times activations `[THREADS]`, less zero points, times scales."""
    total = tl.sum(part, 1)
    if ZEROS:
        total -= zero.to(tl.float32) * tl.sum(sums, 1)
    if SCALES == EIGHTS and CONVERTS:
        return total * scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return total * scale_of(scale, SCALES)


@triton.jit  # type: ignore[untyped-decorator]
def _activations(at, column, inner, PLACES: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return activations of each place of half a run in float32, `[THREADS, 4]`, zeros beyond the last
    column."""
    some = (_four(at, column, inner, EVEN),)
    for place in tl.static_range(1, PLACES):
        some = some + (_four(at + 8 * place, column + 8 * place, inner, EVEN),)
    return some


@triton.jit  # type: ignore[untyped-decorator]
def _four(at, column, inner, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    some = tl.load(at) if EVEN else tl.load(at, mask=column < inner, other=0.0)
    return some.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _of_a_row(  # type: ignore[no-untyped-def]
    words,
    some,
    scale_at,
    zero_at,
    k,
    of_run,
    inner,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Return the sums of half a run of a row, of its words `[THREADS, 4]`, with activations."""
    RUN: tl.constexpr = 8 * PLACES
    PARTS: tl.constexpr = 4 if GROUP <= RUN // 4 else 2 if GROUP <= RUN // 2 else 1
    if PTX == "":
        values = (plain_number(words, 0, KIND, ZEROS),)
        for place in tl.static_range(1, PLACES):
            values = values + (plain_number(words, place, KIND, ZEROS),)
    elif PLACES == 8:
        values = tl.inline_asm_elementwise(
            PTX, "=f,=f,=f,=f,=f,=f,=f,=f,r", [words], dtype=(tl.float32,) * 8, is_pure=True, pack=1
        )
    else:
        values = tl.inline_asm_elementwise(
            PTX, "=f,=f,=f,=f,r", [words], dtype=(tl.float32,) * 4, is_pure=True, pack=1
        )
    total = tl.zeros([words.shape[0]], tl.float32)
    for first in tl.static_range(0, PLACES, PLACES // PARTS):
        at = 8 * first
        products, sums = values[first] * some[first], some[first]
        for place in tl.static_range(first + 1, first + PLACES // PARTS):
            products += values[place] * some[place]
            if ZEROS:
                sums += some[place]
        scale = _beside(scale_at, k + at, of_run, inner, GROUP)
        zero = _beside(zero_at, k + at, of_run, inner, GROUP) if ZEROS else scale
        total += _scaled(products, zero, sums, scale, SCALES, ZEROS, PTX != "")
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _in_order(sums, ROWS: tl.constexpr, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sums of all rows, `[WARPS * ROWS]`, of one `[THREADS]` for each row of a warp."""
    if ROWS == 8:
        found = tl.join(_joined_four(sums, 0, 2, WARPS), _joined_four(sums, 1, 2, WARPS))
    elif ROWS == 4:
        found = _joined_four(sums, 0, 1, WARPS)
    elif ROWS == 2:
        found = tl.join(_of_warps(sums[0], WARPS), _of_warps(sums[1], WARPS))
    else:
        found = _of_warps(sums[0], WARPS)
    return tl.reshape(found, [WARPS * ROWS])


@triton.jit
def _joined_four(sums, first: tl.constexpr, step: tl.constexpr, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sums of four rows, `[WARPS, 2, 2]`."""
    a, b = _of_warps(sums[first], WARPS), _of_warps(sums[first + step], WARPS)
    c, d = _of_warps(sums[first + 2 * step], WARPS), _of_warps(sums[first + 3 * step], WARPS)
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _of_warps(sums, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum of each warp, `[WARPS]`."""
    return tl.sum(tl.reshape(sums, (WARPS, 32)), 1)


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

    Tensors have an axis of threads, which every compiler deals out alike, and one of four words, half a run:
    those of a thread. There is one tensor for each row of a warp, and each 32 halves of runs.
    """
    if EARLY:
        gdc_launch_dependents()
    RUN: tl.constexpr = 8 * PLACES
    HALVES: tl.constexpr = RUNS // 16
    STEP: tl.constexpr = RUNS * RUN
    COLS: tl.constexpr = ROWS * WARPS
    WIDE: tl.constexpr = COLS // 2 if GATED else COLS
    tile, place, four = tl.program_id(0), tl.arange(0, 32 * WARPS), tl.arange(0, 4)
    lane, number = place % 32, place // 32 * ROWS
    word = (lane * 4)[:, None] + four[None, :]
    of_run = lane // 2 * RUN
    column = (of_run + lane % 2 * 4)[:, None] + four[None, :]
    last = tl.cdiv(inner, RUN) * 8
    nothing = tl.zeros([32 * WARPS], tl.float32)
    acc = (nothing,) * ROWS
    own = _own(tile * WIDE, number, outer, GATED)
    words_at = (codes + own.to(tl.int64)[:, None] * s_w + word,)
    rows_at = ((own // down).to(tl.int64) * s_s,)
    for row in tl.static_range(1, ROWS):
        own = _own(tile * WIDE, number + row, outer, GATED)
        words_at = words_at + (codes + own.to(tl.int64)[:, None] * s_w + word,)
        rows_at = rows_at + ((own // down).to(tl.int64) * s_s,)
    words = _words(words_at, word, 0, last, ROWS, HALVES)
    if EARLY:
        gdc_wait()
    for k in tl.range(0, inner, STEP):
        next_words = _words(words_at, word, k // PLACES + RUNS * 8, last, ROWS, HALVES)
        if PTX != "":
            asked_for(tile)
        for half in tl.static_range(HALVES):
            begin = k + 16 * RUN * half
            some = _activations(x + begin + column, begin + column, inner, PLACES, EVEN)
            for row in tl.static_range(ROWS):
                more = _of_a_row(
                    words[ROWS * half + row],
                    some,
                    scale + rows_at[row],
                    zero + rows_at[row],
                    begin,
                    of_run,
                    inner,
                    GROUP,
                    KIND,
                    PLACES,
                    SCALES,
                    ZEROS,
                    PTX,
                )
                acc = acc[:row] + (acc[row] + more,) + acc[row + 1 :]
        words = next_words
    total = _in_order(acc, ROWS, WARPS)
    own = _own(tile * WIDE, tl.arange(0, COLS), outer, GATED)
    if PTX != "" and KIND == E2M1:
        total *= 64.0
    kind = y.dtype.element_ty
    if SECOND == 1:
        total *= tl.load(second + own)
    if SECOND == 2:
        total = tl.div_rn(total, tl.load(second + own))
    if BIASED:
        total += tl.load(bias + own).to(tl.float32)
    at = tile * WIDE + tl.arange(0, WIDE)
    if GATED:
        gate, up = tl.split(tl.reshape(total, [WIDE, 2]))
        active = silu(gate.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        total = active * up.to(kind).to(tl.float32)
    tl.store(y + at, total.to(kind), mask=at < outer)


@triton.jit
def _own(first, number, outer, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows of the matrix of which these numbers are."""
    if GATED:
        return tl.minimum(first + number // 2, outer - 1) + number % 2 * outer
    return tl.minimum(first + number, outer - 1)


@triton.jit
def _words(at, word, following, last, ROWS: tl.constexpr, HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the words of each row from a place on, and again 32 halves of runs further on."""
    found = (tl.load(at[0] + following, mask=following + word < last, other=0),)
    for row in tl.static_range(1, ROWS):
        found = found + (tl.load(at[row] + following, mask=following + word < last, other=0),)
    if HALVES == 2:
        for row in tl.static_range(ROWS):
            found = found + (
                tl.load(at[row] + (following + 128), mask=following + 128 + word < last, other=0),
            )
    return found


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
    _one_row[(triton.cdiv(outer, tuning.rows * tuning.warps // (2 if gated else 1)),)](
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
