"""Products of a few rows of activations with a matrix of few bits, read once and dequantised in registers.

A program has COLS rows of the matrix and takes STEP columns at a time: words of 32 bits, in the layout of a
matrix product's left operand, for which `arch.formats.codes.packed` is made. Shifts and masks make operands
of them where they are. Products are added up in float32. One row has a kernel of its own, `few_bits_row`.

Scales are applied in one of two ways. Where a step lies within a group, the sum of the step is multiplied, as
exact as float32 is. Where groups are smaller, each code is multiplied before the product and rounded to the
dtype of activations: exact for four-bit floating-point numbers in bfloat16, and as fine as a weight in that
dtype for integers.

Why it is safe where launches overlap, and to share a sum: as in `linear`. The next launch may begin when all
programs have left their loops. From the start on it would take room from programs that still read.
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
    RUN_SCALES,
    WHOLE,
    beside,
    kind_of,
    operands,
    scale_of,
    settled,
)
from penstock.ops.triton.dequantise import dequantise as dequantise
from penstock.ops.triton.dequantise import reads as reads
from penstock.ops.triton.experts import shared_memory
from penstock.ops.triton.few_bits_mma import MmaTuning, few_columns, mma_tuning
from penstock.ops.triton.few_bits_row import RowTuning, one_row
from penstock.ops.triton.pointwise import silu
from penstock.ops.triton.ptx import INT4, less, pairs_of, unfolded
from penstock.ops.triton.tuning import cdiv, multiprocessors, next_power_of_2
from penstock.ops.triton.warp_tiles import reads_rows

MOST_ROWS = 64
_STEP = 128
"""Columns at a time."""
_LONG = 8192
"""Columns of long rows."""


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
    EARLY: tl.constexpr,
    HALF: tl.constexpr,
    LESS: tl.constexpr,
    PTX: tl.constexpr,
    REGISTERS: tl.constexpr,
    FOLDED: tl.constexpr,
) -> None:
    """One of `splits` parts of the sums of COLS rows of the matrix; where GATED, these are COLS / 2 of the
    gate, each with its own of what is gated, `outer` further on.

    SECOND: 1 where sums are multiplied by a second scale, 2 where they are divided by it.
    """
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
    row, word, column = tl.arange(0, ROWS), tl.arange(0, WORDS), tl.arange(0, STEP)
    words_at = codes + own.to(tl.int64)[:, None] * s_w + word[None, :]
    scales_at = (own // down).to(tl.int64) * s_s
    x_at = x + row[:, None] * s_x + column[None, :]
    there = (row < rows)[:, None]
    acc = tl.zeros([COLS, ROWS], tl.float32)
    # What lies beside the codes of a step is read a step ahead.
    z0, z1, t0, t1, t2, t3 = beside(
        scale, zero, scales_at, begin, inner, RUNS, RUN, GROUP, SCALED, RAW, ZEROS
    )
    if EARLY:
        gdc_wait()
    for k in tl.range(begin, end, STEP, num_stages=STAGES):
        next_z0, next_z1, next_t0, next_t1, next_t2, next_t3 = beside(
            scale, zero, scales_at, k + STEP, inner, RUNS, RUN, GROUP, SCALED, RAW, ZEROS
        )
        if EVEN:
            words = tl.load(words_at + k // PLACES)
            some = tl.load(x_at + k, mask=there, other=0.0)
        else:
            inside = (k // PLACES + word < tl.cdiv(inner, RUN) * 8)[None, :]
            words = tl.load(words_at + k // PLACES, mask=inside, other=0)
            some = tl.load(x_at + k, mask=there & (k + column < inner)[None, :], other=0.0)
        operand = operands(
            words,
            z0,
            z1,
            t0,
            t1,
            t2,
            t3,
            COLS,
            RUNS,
            KIND,
            PLACES,
            SCALES,
            SCALED,
            RAW,
            ZEROS,
            HALF,
            LESS,
            PTX,
            REGISTERS,
        )
        part = tl.dot(operand, tl.trans(some.to(operand.dtype)), input_precision="ieee")
        if SCALED:
            acc = settled(acc + part, PTX)
        else:
            acc += part * scale_of(t0, SCALES)[:, None]
        z0, z1, t0, t1, t2, t3 = next_z0, next_z1, next_t0, next_t1, next_t2, next_t3
    if EARLY:
        gdc_launch_dependents()
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
        if FOLDED != 1.0:
            acc *= FOLDED
        kind = y.dtype.element_ty
        if SECOND == 1:
            acc *= tl.load(second + own)[:, None]
        if SECOND == 2:
            acc = tl.div_rn(acc, tl.load(second + own)[:, None])
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
    tuning: FewBitsTuning | RowTuning | MmaTuning | None = None,
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
    if tuning is None and reads_rows(x):
        tuning = mma_tuning(rows, kind.codes, height, inner, multiprocessors(x.device))
    if isinstance(tuning, MmaTuning):
        return few_columns(x, weight, bias, gated=gated, out=out, tuning=tuning)
    if isinstance(tuning, RowTuning) or (rows == 1 and tuning is None):
        return one_row(x, weight, bias, gated=gated, out=out, tuning=tuning)
    y = torch.empty(rows, outer, dtype=x.dtype, device=x.device) if out is None else out
    padded = max(16, next_power_of_2(rows))
    tuning = tuning or few_bits_tuning(
        padded, height, inner, multiprocessors(x.device), kind.codes, shared_memory(x.device),
        fine=kind.group < min(_STEP, inner),
    )  # fmt: skip
    words, scale = parts["codes"].view(torch.int32), parts["scale"]
    scale = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    each = RUN_SCALES.get((kind.codes, kind.scales, kind.group)) if COMPILED else None
    group = WHOLE if kind.group >= inner else kind.group
    half = x.dtype == torch.float16
    raw = not half and each is not None and group < tuning.step and scale.shape[1] % each.itemsize == 0
    scale = scale.view(each) if raw and each is not None else scale
    joins, early = tuning.splits > 1, uses_pdl()
    tiles = cdiv(outer, tuning.cols // (2 if gated else 1))
    shared = tiles * tuning.splits * tuning.cols * padded
    zero, second = parts.get("zero"), parts.get("second")
    ptx, registers = "", ""
    if COMPILED:  # The interpreter knows no PTX, and multiplies float32 alone.
        ptx, registers = pairs_of(
            kind.codes,
            half=half,
            zeros=zero is not None,
            scaled=group < tuning.step,
            raw=kind.scales if raw else 0,
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
        GROUP=group,
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
        EARLY=early,
        HALF=half,
        LESS=less(kind.codes, half=half),
        PTX=ptx,
        REGISTERS=registers,
        FOLDED=unfolded(kind.codes, kind.scales if raw and ptx else 0),
        num_warps=tuning.warps,
        **pdl_launch_options(early),
    )
    return y


def suits(x: Tensor, weight: Matrix) -> bool:
    """Tell whether `few_rows` computes a product: of few rows in a 16-bit dtype, and a format that it reads,
    with steps that lie within a group or hold whole ones."""
    kind = kind_of(weight.format)
    if kind is None or len(x) > MOST_ROWS or x.dtype.itemsize != 2 or x.stride(1) != 1:
        return False
    group = kind.group
    whole = group >= weight.shape[1]
    return whole or (group & (group - 1) == 0 and group >= (32 if "zero" in weight.parts else 16))


def few_bits_tuning(
    rows: int, outer: int, inner: int, many: int, codes: int, shared: int, *, fine: bool
) -> FewBitsTuning:
    """Return how a product is cut: the one place for constants.

    rows: 16, 32 or 64.
    outer: rows of the matrix, of `inner` columns each.
    many: multiprocessors.
    codes: the kind of codes.
    shared: bytes of shared memory that a program may have.
    fine: whether groups have fewer columns than a step.
    """
    bits, covers = 4 if codes in FOUR_BITS else 8, outer >= 64 * many
    long, some = inner >= _LONG, inner >= _LONG // 2
    if fine and bits == 4 and some and (rows == 16 or (long and (rows == 32 or not covers))):
        return _fine_tuning(rows, outer, inner, many, codes)
    cols = 128 if rows > 16 and covers else 64
    tiles, parts = cdiv(outer, cols), inner // 1024
    # Long rows pay for parts of few sums.
    splits = max(1, min(8, many * (4 if rows == 16 and long else 2) // tiles, parts))
    if cols == 64 and 4 * tiles <= 3 * many:
        splits = max(splits, min(4, parts))
    each = _STEP * (2 * rows + cols * bits // 8)
    two = fine and codes == INT4 and rows == 64 and cols == 128 and not long
    most = 4 if rows == 16 else 2 if two else 3
    return FewBitsTuning(cols, _STEP, splits, max(2, min(most, shared * 4 // 5 // each)))


def _fine_tuning(rows: int, outer: int, inner: int, many: int, codes: int) -> FewBitsTuning:
    """Return how a product is cut whose four-bit codes are multiplied by their scales one by one: by more
    programs, of fewer steps under way."""
    cols, least = (64, 1024) if codes == INT4 and rows == 16 else (128, 512)
    most = max(1, min(8, 7 * many // cdiv(outer, cols), inner // least))
    splits = 1 << (most.bit_length() - 1)
    return FewBitsTuning(cols, _STEP, splits, 2 if rows == 64 else 3, 8 if rows > 16 else 4)
