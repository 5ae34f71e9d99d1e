"""Products of a few rows of activations with a matrix in GGUF's blocks, read once, dequantised in registers.

A program has COLS rows of the matrix and takes a unit of columns at a time. Words of codes come in the layout
of a product's left operand, and PTX makes an operand of each place of the words: columns that share a scale,
or half of them. Operands are whole numbers and so exact: codes plus a power of two. What they are too large
by is a product of a constant with the activations, which all rows of the matrix share. The sums of a group
are multiplied by its scale in float32. Where groups have minima, the sum of the activations is multiplied by
all that is to be taken away.

Programs have one or two warps: more would take the products of four warps, and wait after each.

Why it is safe where launches overlap, and to share a sum: as in `linear`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.arch.formats.gguf import Blocks
from penstock.ops.kernels import counters, pdl_launch_options, uses_pdl
from penstock.ops.matrix import Matrix
from penstock.ops.triton.block_codes import BlockKind, decoded, kind_of, level, scale_of, take_apart
from penstock.ops.triton.codes import COMPILED
from penstock.ops.triton.dequantise_blocks import dequantise as dequantise
from penstock.ops.triton.dequantise_blocks import reads as reads
from penstock.ops.triton.dequantise_blocks import resting_parts
from penstock.ops.triton.pointwise import silu
from penstock.ops.triton.tuning import cdiv, multiprocessors, next_power_of_2

MOST_ROWS = 64


@triton.jit  # type: ignore[untyped-decorator]
def _activations(  # type: ignore[no-untyped-def]
    x_at, there, column, inner, EVEN: tl.constexpr, WIDEN: tl.constexpr
):
    """Return activations `[WORDS, ROWS]`, zeros before the first column, beyond the last and in rows that are
    not there."""
    if EVEN:
        some = tl.load(x_at, mask=there, other=0.0)
    else:
        some = tl.load(x_at, mask=there & ((column >= 0) & (column < inner))[None, :], other=0.0)
    return tl.trans(some.to(tl.float32) if WIDEN else some)


@triton.jit(do_not_specialize=["rows", "splits"])  # type: ignore[untyped-decorator]
def _few_rows(  # type: ignore[no-untyped-def]
    x,
    codes,
    high,
    heads,
    bias,
    y,
    parts,
    arrivals,
    rows,
    splits,
    outer,
    inner,
    units,
    skip,
    s_x,
    s_w,
    s_y,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    TYPE: tl.constexpr,
    UNIT: tl.constexpr,
    WORDS: tl.constexpr,
    BITS: tl.constexpr,
    HIGH: tl.constexpr,
    UNITS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    LEASTS: tl.constexpr,
    MIDDLE: tl.constexpr,
    LEVELS: tl.constexpr,
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
    gate, each with its own of what is gated, `outer` further on. s_w: 16 bytes of a row."""
    PLACES: tl.constexpr = 32 // BITS
    RUN: tl.constexpr = WORDS * PLACES
    EACH: tl.constexpr = GROUP // WORDS
    HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    ABOVE: tl.constexpr = 0 if LEVELS else 1 << (BITS + HIGH)  # is added to codes in operands
    WIDE: tl.constexpr = COLS // 2 if GATED else COLS
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    each = tl.cdiv(tl.cdiv(units, UNITS), splits)
    begin = split * each
    end = tl.minimum(begin + each, tl.cdiv(units, UNITS))
    place = tl.arange(0, COLS)
    own = tl.minimum(tile * WIDE + (place // 2 if GATED else place), outer - 1)
    if GATED:
        own += place % 2 * outer
    row, word = tl.arange(0, ROWS), tl.arange(0, WORDS)
    line = own.to(tl.int64) * s_w * 4
    words_at = codes + line[:, None] + word[None, :]
    high_at = high + line[:, None] * 2 + word[None, :]
    heads_at = heads + line
    x_at, of_row = x + row[:, None] * s_x + word[None, :], (row < rows)[:, None]
    if not EVEN:
        x_at -= skip
    acc = tl.zeros([COLS, ROWS], tl.float32)
    KIND: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty
    ones, less = tl.full([COLS, WORDS], 1.0, KIND), tl.full([COLS, WORDS], -1.0 * (ABOVE + MIDDLE), KIND)
    if EARLY:
        gdc_wait()
    for step in tl.range(begin, end, num_stages=STAGES):
        if UNITS == 2:
            both = tl.load(high_at + step * WORDS).to(tl.int32)
        for unit in tl.static_range(UNITS):
            u, there = step, True
            if UNITS == 2:  # The last step may lack one.
                u, there = 2 * step + unit, 2 * step + unit < units
            h0, h1 = tl.load(heads_at + u * HEAD, there, 0), tl.load(heads_at + u * HEAD + 1, there, 0)
            h2, h3, h4 = h0, h0, h0
            if HEAD >= 4:
                h2 = tl.load(heads_at + u * HEAD + 2, there, 0)
                h3 = tl.load(heads_at + u * HEAD + 3, there, 0)
            if HEAD == 5:
                h4 = tl.load(heads_at + u * HEAD + 4, there, 0)
            for run in tl.static_range(UNIT // RUN):
                words = tl.load(words_at + u * (UNIT // RUN * WORDS) + run * WORDS, there, 0)
                above = words
                if UNITS == 2:
                    above = both
                elif HIGH:
                    above = tl.load(high_at + u * (UNIT // RUN * WORDS) + run * WORDS).to(tl.int32)
                for g in tl.static_range(PLACES // EACH):
                    part = tl.zeros([COLS, ROWS], tl.float32)
                    total = tl.zeros([COLS, ROWS], tl.float32)
                    for at in tl.static_range(g * EACH, g * EACH + EACH):
                        column = u * UNIT + run * RUN + at * WORDS
                        some = _activations(x_at + column, of_row, column + word - skip, inner, EVEN, WIDEN)
                        if WIDEN:  # The interpreter knows no PTX, and multiplies float32 alone.
                            code = decoded(words, above, at, unit * PLACES + at, BITS, HIGH)
                            operand = level(code) if LEVELS else code.to(tl.float32) + ABOVE
                        else:
                            given = [words, above] if HIGH else [words]
                            if not LEVELS:
                                operand = tl.inline_asm_elementwise(
                                    PTX[unit * PLACES + at],
                                    REGISTERS,
                                    given,
                                    tl.float16 if HALF else tl.bfloat16,
                                    True,
                                    2,
                                )
                            elif at % 4 == 0 and HALF:  # Four places at once.
                                four = tl.inline_asm_elementwise(
                                    PTX[(unit * PLACES + at) // 4],
                                    REGISTERS,
                                    given,
                                    (tl.float16,) * 4,
                                    True,
                                    2,
                                )
                            elif at % 4 == 0:
                                four = tl.inline_asm_elementwise(
                                    PTX[(unit * PLACES + at) // 4],
                                    REGISTERS,
                                    given,
                                    (tl.bfloat16,) * 4,
                                    True,
                                    2,
                                )
                            if LEVELS:
                                operand = four[at % 4]
                        if not LEVELS and not LEASTS:
                            part = tl.dot(less, some, part, input_precision="ieee")
                        part = tl.dot(operand, some, part, input_precision="ieee")
                        if LEASTS:
                            total = tl.dot(ones, some, total, input_precision="ieee")
                    scale, least = scale_of(h0, h1, h2, h3, h4, run * (PLACES // EACH) + g, TYPE, WIDEN)
                    acc += part * scale[:, None]
                    if LEASTS:
                        acc -= total * (scale * ABOVE + least)[:, None]
    if EARLY:
        gdc_launch_dependents()
    last = True
    if JOINS:
        base = parts + tile.to(tl.int64) * splits * (ROWS * COLS) + row[None, :] * COLS + place[:, None]
        there = (row < rows)[None, :]
        tl.store(base + split * (ROWS * COLS), acc, mask=there)
        tl.debug_barrier()  # all threads' stores before the count of one
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if last:
            acc = tl.zeros_like(acc)
            for one in tl.range(splits):
                acc += tl.load(base + one * (ROWS * COLS), mask=there, other=0.0, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
    if last:
        kind = y.dtype.element_ty
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
class BlocksTuning:
    """BlocksTuning says how a product is cut.

    cols: rows of the matrix a program has. splits: programs that share a sum. stages: units under way.
    warps: of a program.
    """

    cols: int
    splits: int
    stages: int = 3
    warps: int = 1


def few_rows(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
    tuning: BlocksTuning | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`: x `[rows, in]` of at most MOST_ROWS, rows strided; result `[rows, out]`.

    gated: the result is `silu(gate) * up` `[rows, out / 2]`, of a matrix with the gate's rows first. Sums are
    float32. tuning: see `blocks_tuning`.
    """
    format = weight.format
    assert isinstance(format, Blocks)
    (height, inner), rows, kind, units = weight.shape, len(x), kind_of(format.type), format.units
    outer = height // 2 if gated else height
    assert 0 < rows <= MOST_ROWS, x.shape
    assert x.shape[1] == inner, (x.shape, weight.shape)
    assert x.stride(1) == 1, x.stride()
    y = torch.empty(rows, outer, dtype=x.dtype, device=x.device) if out is None else out
    each = 2 if kind.paired else 1
    steps = cdiv(units, each)
    padded = max(8, next_power_of_2(rows))
    tuning = tuning or blocks_tuning(padded, (height, steps), kind, multiprocessors(x.device))
    codes, high, heads = resting_parts(weight)
    joins, early = tuning.splits > 1, uses_pdl()
    tiles = cdiv(outer, tuning.cols // (2 if gated else 1))
    shared = tiles * tuning.splits * tuning.cols * padded
    ptx, registers = take_apart(kind, x.dtype)
    _few_rows[(tiles * tuning.splits,)](
        x,
        codes,
        high,
        heads,
        x if bias is None else bias,
        y,
        torch.empty(shared, dtype=torch.float32, device=x.device) if joins else x,
        counters(tiles, x.device) if joins else x,
        rows,
        tuning.splits,
        outer,
        inner,
        units,
        format.skip,
        x.stride(0),
        codes.stride(0) // 4,
        y.stride(0),
        ROWS=padded,
        COLS=tuning.cols,
        STAGES=tuning.stages,
        TYPE=kind.type,
        UNIT=kind.unit,
        WORDS=kind.words,
        BITS=kind.bits,
        HIGH=kind.high,
        UNITS=each,
        GROUP=kind.group,
        HEAD=kind.head,
        LEASTS=kind.leasts,
        MIDDLE=kind.middle,
        LEVELS=kind.levels,
        EVEN=format.skip == 0 and inner == steps * each * kind.unit,
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
    """Tell whether `few_rows` computes a product: of few rows, in bfloat16 or float16."""
    halves = x.dtype in (torch.bfloat16, torch.float16)
    return halves and 0 < len(x) <= MOST_ROWS and x.stride(1) == 1 and reads(weight.format)


def blocks_tuning(rows: int, shape: tuple[int, int], kind: BlockKind, many: int) -> BlocksTuning:
    """Return how a product is cut: the one place for constants.

    rows: 8, 16, 32 or 64.
    shape: rows of the matrix, and steps of each.
    kind: of the blocks.
    many: multiprocessors.
    """
    outer, steps = shape
    each = max(2, cdiv(steps, max(1, 10 * many // cdiv(outer, 32))))
    splits = cdiv(steps, each)
    if rows <= 16:
        return BlocksTuning(32, splits, warps=2 if kind.paired and rows == 16 else 1)
    # Two units of more rows are more than registers hold, and their activations than some devices share.
    return BlocksTuning(32, splits, 2, 2) if kind.paired else BlocksTuning(64, splits, warps=2)
