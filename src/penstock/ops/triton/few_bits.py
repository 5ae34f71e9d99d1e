"""Products of a few rows of activations with a matrix of few bits, read once and dequantised in registers.

A program has COLS rows of the matrix and takes STEP columns at a time: words of 32 bits, in the layout of a
matrix product's left operand. Shifts and masks make eight or four operands of a word's codes, one for each
eight columns of a run; see `arch.formats.codes.packed`. Products are added up in float32.

Scales are applied in one of two ways. Where a step lies within a group, the sum of the step is multiplied, as
exact as float32 is. Where groups are smaller, each code is multiplied before the product and rounded to
bfloat16: exact for four-bit floating-point numbers, and as fine as a weight in bfloat16 for integers.

Why it is safe where launches overlap, and to share a sum: as in `linear`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.kernels import counters, pdl_launch_options, uses_pdl
from penstock.ops.matrix import Matrix
from penstock.ops.triton.codes import (
    COMPILED,
    FOUR_BITS,
    INT4,
    INT8,
    RUN_SCALES,
    activations,
    decoded,
    kind_of,
    paired,
    scale_of,
    take_apart,
    to_words,
)
from penstock.ops.triton.dequantise import dequantise as dequantise
from penstock.ops.triton.dequantise import reads as reads
from penstock.ops.triton.pointwise import silu
from penstock.ops.triton.tuning import multiprocessors

MOST_ROWS = 64


@triton.jit(do_not_specialize=["rows", "splits"])  # type: ignore[untyped-decorator]
def _few_rows(  # type: ignore[no-untyped-def]
    x,
    codes,
    scale,
    zero,
    second,
    bias,
    y,
    parts,
    arrivals,
    rows,
    splits,
    outer,
    inner,
    down,
    s_x,
    s_w,
    s_s,
    s_y,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    RAW: tl.constexpr,
    ZEROS: tl.constexpr,
    SECOND: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    JOINS: tl.constexpr,
    WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
    PTX: tl.constexpr,
    REGISTERS: tl.constexpr,
) -> None:
    """One of `splits` parts of the sums of COLS rows of the matrix; where GATED, these are COLS / 2 of the
    gate, each with its own of what is gated, `outer` further on.

    SECOND: 1 where sums are multiplied by a second scale, 2 where they are divided by it.
    """
    if EARLY:
        gdc_launch_dependents()
    WORDS: tl.constexpr = STEP // PLACES
    RUN: tl.constexpr = 8 * PLACES
    RUNS: tl.constexpr = STEP // RUN
    SCALED: tl.constexpr = GROUP < STEP
    WIDE: tl.constexpr = COLS // 2 if GATED else COLS
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    each = tl.cdiv(tl.cdiv(inner, STEP), splits) * STEP
    begin = split * each
    end = tl.minimum(begin + each, inner)
    place = tl.arange(0, COLS)
    own = tl.minimum(tile * WIDE + (place // 2 if GATED else place), outer - 1)
    if GATED:
        own += place % 2 * outer
    row, word, run = tl.arange(0, ROWS), tl.arange(0, WORDS), tl.arange(0, RUNS)
    column = word // 8 * RUN + word % 8
    words_at = codes + own.to(tl.int64)[:, None] * s_w + word[None, :]
    scales_at = (own // down).to(tl.int64) * s_s
    x_at = x + tl.minimum(row, rows - 1)[:, None] * s_x + column[None, :]
    acc = tl.zeros([COLS, ROWS], tl.float32)
    if EARLY:
        gdc_wait()
    for k in tl.range(begin, end, STEP, num_stages=STAGES):
        if EVEN:
            words = tl.load(words_at + k // PLACES)
        else:
            words = tl.load(words_at + k // PLACES, mask=(k + column < inner)[None, :], other=0)
        # Zero points, for each half of a word, and what these are multiplied by, for each
        # quarter: in float32.
        minus_0, minus_1, times_0, times_1, times_2, times_3 = words, words, words, words, words, words
        if SCALED:
            runs, most = k + run * RUN, inner - 1
            first = (tl.minimum(runs, most) // GROUP)[None, :]
            half = (tl.minimum(runs + RUN // 2, most) // GROUP)[None, :]
            if ZEROS:
                minus_0 = to_words(tl.load(zero + scales_at[:, None] + first).to(tl.float32), COLS, RUNS)
                minus_1 = to_words(tl.load(zero + scales_at[:, None] + half).to(tl.float32), COLS, RUNS)
            at = scale + scales_at[:, None]
            if RAW:  # A number has all scales of a run.
                run_at = tl.minimum(runs, most) // RUN
                times_0 = to_words(tl.load(at + run_at[None, :]).to(tl.int32), COLS, RUNS)
            else:
                times_0 = to_words(scale_of(tl.load(at + first), SCALES), COLS, RUNS)
                times_1, times_2, times_3 = times_0, times_0, times_0
                if GROUP <= RUN // 2:
                    times_2 = to_words(scale_of(tl.load(at + half), SCALES), COLS, RUNS)
                    times_3 = times_2
                if GROUP <= RUN // 4:
                    first = (tl.minimum(runs + RUN // 4, most) // GROUP)[None, :]
                    half = (tl.minimum(runs + RUN // 4 * 3, most) // GROUP)[None, :]
                    times_1 = to_words(scale_of(tl.load(at + first), SCALES), COLS, RUNS)
                    times_3 = to_words(scale_of(tl.load(at + half), SCALES), COLS, RUNS)
        elif ZEROS:
            minus_0 = tl.broadcast_to(
                tl.load(zero + scales_at + k // GROUP).to(tl.float32)[:, None], [COLS, WORDS]
            )
            minus_1 = minus_0
        part = tl.zeros([COLS, ROWS], tl.float32) if not SCALED else acc
        if WIDEN:  # The interpreter knows no PTX, and multiplies float32 alone.
            for at_place in tl.static_range(PLACES):
                quarter: tl.constexpr = at_place * 4 // PLACES
                operand = decoded(words, at_place, KIND)
                if ZEROS:
                    operand -= minus_0 if quarter < 2 else minus_1
                elif KIND <= INT8:
                    operand -= 8.0 if KIND == INT4 else 128.0
                if SCALED:
                    operand *= (
                        times_0
                        if quarter == 0
                        else times_1
                        if quarter == 1
                        else times_2
                        if quarter == 2
                        else times_3
                    )
                some = activations(x_at + k + 8 * at_place, k + 8 * at_place + column, inner, EVEN).to(
                    tl.float32
                )
                part = tl.dot(operand, tl.trans(some), part, input_precision="ieee")
        else:
            if ZEROS:
                minus_0 = (
                    (minus_0 + 8388608.0).to(tl.int32, bitcast=True)
                    if KIND == INT8
                    else paired(-128.0 - minus_0)
                )
                minus_1 = (
                    (minus_1 + 8388608.0).to(tl.int32, bitcast=True)
                    if KIND == INT8
                    else paired(-128.0 - minus_1)
                )
            if SCALED and not RAW:
                times_0, times_1, times_2, times_3 = (
                    paired(times_0),
                    paired(times_1),
                    paired(times_2),
                    paired(times_3),
                )
            if RAW:
                given = [words, times_0]
            elif ZEROS and SCALED:
                given = [words, minus_0, minus_1, times_0, times_1, times_2, times_3]
            elif SCALED:
                given = [words, times_0, times_1, times_2, times_3]
            elif ZEROS:
                given = [words, minus_0, minus_1]
            else:
                given = [words]
            if PLACES == 8:
                a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                    PTX, REGISTERS, given, dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
                )
            else:
                a, b, c, d = tl.inline_asm_elementwise(
                    PTX, REGISTERS, given, dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
                )
            part = tl.dot(a, tl.trans(activations(x_at + k, k + column, inner, EVEN)), part)
            part = tl.dot(b, tl.trans(activations(x_at + k + 8, k + 8 + column, inner, EVEN)), part)
            part = tl.dot(c, tl.trans(activations(x_at + k + 16, k + 16 + column, inner, EVEN)), part)
            part = tl.dot(d, tl.trans(activations(x_at + k + 24, k + 24 + column, inner, EVEN)), part)
            if PLACES == 8:
                part = tl.dot(e, tl.trans(activations(x_at + k + 32, k + 32 + column, inner, EVEN)), part)
                part = tl.dot(f, tl.trans(activations(x_at + k + 40, k + 40 + column, inner, EVEN)), part)
                part = tl.dot(g, tl.trans(activations(x_at + k + 48, k + 48 + column, inner, EVEN)), part)
                part = tl.dot(h, tl.trans(activations(x_at + k + 56, k + 56 + column, inner, EVEN)), part)
        if SCALED:
            acc = part
        else:
            acc += part * scale_of(tl.load(scale + scales_at + k // GROUP), SCALES)[:, None]
    last = True
    if JOINS:
        base = parts + tile.to(tl.int64) * splits * (ROWS * COLS) + place[:, None] * ROWS + row[None, :]
        tl.store(base + split * (ROWS * COLS), acc)
        tl.debug_barrier()  # all threads' stores before the count of one
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if last:
            acc = tl.zeros_like(acc)
            for one in tl.range(splits):
                acc += tl.load(base + one * (ROWS * COLS), cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
    if last:
        kind = y.dtype.element_ty
        if SECOND == 1:
            acc *= tl.load(second + own)[:, None]
        if SECOND == 2:
            acc /= tl.load(second + own)[:, None]
        total = tl.trans(acc)
        if BIASED:
            total += tl.load(bias + own)[None, :].to(tl.float32)
        number = tile * WIDE + tl.arange(0, WIDE)
        if GATED:
            gate, up = tl.split(tl.reshape(total, [ROWS, WIDE, 2]))
            active = silu(gate.to(kind).to(tl.float32)).to(kind).to(tl.float32)
            total = active * up.to(kind).to(tl.float32)
        tl.store(
            y + row[:, None] * s_y + number[None, :],
            total.to(kind),
            mask=(row < rows)[:, None] & (number < outer)[None, :],
        )


@dataclass(frozen=True, slots=True)
class FewBitsTuning:
    """FewBitsTuning says how a product is cut.

    cols: rows of the matrix a program has. step: columns at a time. splits: programs that share a sum.
    stages: steps under way. warps: of a program.
    """

    cols: int
    step: int
    splits: int
    stages: int = 4
    warps: int = 4


def few_rows(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
    tuning: FewBitsTuning | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`: x `[rows, in]` of at most MOST_ROWS, rows strided; result `[rows, out]`.

    gated: the result is `silu(gate) * up` `[rows, out / 2]`, of a matrix with the gate's rows first. Sums are
    float32. tuning: see `few_bits_tuning`.
    """
    kind, parts = kind_of(weight.format), weight.parts
    assert kind is not None, weight.format
    (height, inner), rows = weight.shape, len(x)
    outer = height // 2 if gated else height
    assert 0 < rows <= MOST_ROWS, x.shape
    assert x.shape[1] == inner, (x.shape, weight.shape)
    assert x.stride(1) == 1, x.stride()
    y = torch.empty(rows, outer, dtype=x.dtype, device=x.device) if out is None else out
    padded = max(16, triton.next_power_of_2(rows))
    tuning = tuning or few_bits_tuning(padded, height, inner, kind.group, multiprocessors(x.device))
    words, scale = parts["codes"].view(torch.int32), parts["scale"]
    scale = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    each = RUN_SCALES.get((kind.codes, kind.scales, kind.group)) if COMPILED else None
    raw = each is not None and scale.shape[1] % each.itemsize == 0
    scale = scale.view(each) if raw and each is not None else scale
    group, joins, early = min(kind.group, inner), tuning.splits > 1, uses_pdl()
    whole = group >= inner
    tiles = triton.cdiv(outer, tuning.cols // (2 if gated else 1))
    shared = tiles * tuning.splits * tuning.cols * padded
    zero, second = parts.get("zero"), parts.get("second")
    ptx, registers = take_apart(
        kind.codes, zeros=zero is not None, scaled=group < tuning.step, raw=kind.scales if raw else 0
    )
    _few_rows[(tiles * tuning.splits,)](
        x,
        words,
        scale,
        x if zero is None else zero,
        x if second is None else second,
        x if bias is None else bias,
        y,
        torch.empty(shared, dtype=torch.float32, device=x.device) if joins else x,
        counters(tiles, x.device) if joins else x,
        rows,
        tuning.splits,
        outer,
        inner,
        kind.down,
        x.stride(0),
        words.stride(0),
        scale.stride(0),
        y.stride(0),
        ROWS=padded,
        COLS=tuning.cols,
        STEP=tuning.step,
        STAGES=tuning.stages,
        GROUP=1 << 30 if whole else group,
        KIND=kind.codes,
        PLACES=8 if kind.codes in FOUR_BITS else 4,
        SCALES=kind.scales,
        RAW=raw,
        ZEROS=zero is not None,
        SECOND=kind.second,
        EVEN=inner % tuning.step == 0,
        GATED=gated,
        BIASED=bias is not None,
        JOINS=joins,
        WIDEN=not COMPILED,
        EARLY=early,
        PTX=ptx,
        REGISTERS=registers,
        num_warps=tuning.warps,
        **pdl_launch_options(early),
    )
    return y


def suits(x: Tensor, weight: Matrix) -> bool:
    """Tell whether `few_rows` computes a product: of few rows in bfloat16, and a format that it reads, with
    steps that lie within a group or hold whole ones."""
    kind = kind_of(weight.format)
    if kind is None or len(x) > MOST_ROWS or x.dtype != torch.bfloat16 or x.stride(1) != 1:
        return False
    group = kind.group
    whole = group >= weight.shape[1]
    return whole or (group & (group - 1) == 0 and group >= (32 if "zero" in weight.parts else 16))


def few_bits_tuning(rows: int, outer: int, inner: int, group: int, many: int) -> FewBitsTuning:
    """Return how a product is cut: the one place for constants.

    rows: 16, 32 or 64.
    outer: rows of the matrix, of `inner` columns each.
    group: columns that share a scale.
    many: multiprocessors.
    """
    cols = 128 if outer >= 64 * many else 64
    step = min(256, max(128, group)) if group < inner else 256
    tiles = triton.cdiv(outer, cols)
    splits = max(1, min(8, 2 * many // tiles, inner // (2 * step)))
    return FewBitsTuning(cols, step, splits)
