"""Computes a mixture's tokens with all of its experts at once, from matrices that rest in few bits.

A program has the pairs of one block, all of one expert (`routing`), and COLS rows of that expert's matrix,
STEP columns of it at a time. Codes become operands in registers, as in `few_bits`: its docstring says how
scales are applied. So a matrix is read once for each block of rows, and never written as numbers.

A row's numbers are its own: they depend on the tuning, which is chosen by the step's tokens and the shapes,
and neither on the other rows of its block nor on which experts are computed in the same call.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.arch.experts import ExpertKind
from penstock.arch.formats.codes import packed_bytes
from penstock.arch.spec import Activation
from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.triton.activation import activated, activation_options
from penstock.ops.triton.codes import (
    COMPILED,
    FOUR_BITS,
    RUN_SCALES,
    WHOLE,
    CodeKind,
    beside,
    kind_of,
    operands,
    scale_of,
    settled,
)
from penstock.ops.triton.expert_columns import (
    FEW_TOKENS,
    NUMBERS,
    RAW_TYPES,
    SCALE_TYPES,
    expert_columns,
)
from penstock.ops.triton.experts import ExpertTuning, place_of, shared_memory
from penstock.ops.triton.few_bits_mma import MmaTuning
from penstock.ops.triton.pointwise import in_turn
from penstock.ops.triton.ptx import less, pairs_of, unfolded
from penstock.ops.triton.tuning import cdiv
from penstock.ops.triton.warp_tiles import reads_rows

BLOCK = 16
"""Rows of a block where pairs are few."""
_TUNINGS = (
    (16, ExpertTuning(BLOCK, 128, 128, warps=4, stages=3, group=1)),
    (64, ExpertTuning(64, 128, 128, warps=4, stages=3, group=4)),
    (None, ExpertTuning(128, 128, 128, warps=8, stages=3, group=8)),
)
"""Tunings up to so many pairs for each expert, on average: one place for constants. `depth` is the most
columns at a time."""
_MANY_ROWS = 2048
"""Rows of a gate from which on its product keeps a GPU busy by two warps for each of their tiles."""
_SHALLOW = 128
"""Most columns at a time where a group has no more, so that a step may lie within a group."""


def expert_tuning(pairs: int, experts: int, dtype: torch.dtype) -> ExpertTuning:
    """Return the tuning of a step with so many pairs."""
    return next(tuning for most, tuning in _TUNINGS if most is None or pairs <= most * experts)


def by_warps(outer: int, tokens: int, *, gated: bool) -> MmaTuning:
    """Return how a product of few tokens is cut, the other place for constants: with gate and up, or with
    down. Where little is read at a time, more warps share a row.

    outer: numbers of a row of the product.
    """
    more = outer < _MANY_ROWS if gated else tokens == 1
    return MmaTuning(1, 4 if more else 2)


@triton.jit(do_not_specialize=["first", "count", "bound"])  # type: ignore[untyped-decorator]
def _expert_products(  # type: ignore[no-untyped-def]
    x,
    table,
    order,
    blocks,
    y,
    first,
    count,
    bound,
    s_x,
    TOP: tl.constexpr,
    TENSORS: tl.constexpr,
    AT: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    DOWN: tl.constexpr,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    RAW: tl.constexpr,
    ZEROS: tl.constexpr,
    SECOND: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
    OPERAND: tl.constexpr,
    HALF: tl.constexpr,
    LESS: tl.constexpr,
    PTX: tl.constexpr,
    REGISTERS: tl.constexpr,
    FOLDED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute COLS rows of a matrix for the pairs of one block: where GATED, COLS / 2 numbers of the
    activation of each pair's token, to the pair's row in `order`; else of each such row, to its pair.

    TENSORS: addresses of an expert. AT: the first of them that is this matrix's. BIAS: which of them is that
    of its bias; 0 for none. SECOND: as in `few_bits`.
    OPERAND: dtype of operands. PTX: what makes them; if empty, plain arithmetic.
    """
    WORDS: tl.constexpr = STEP // PLACES
    RUN: tl.constexpr = 8 * PLACES
    RUNS: tl.constexpr = STEP // RUN
    SCALED: tl.constexpr = GROUP < STEP
    WIDE: tl.constexpr = COLS // 2 if GATED else COLS
    EVEN: tl.constexpr = INNER % STEP == 0
    in_turn(EARLY)
    block, part = place_of(first, count, tl.cdiv(OUTER, WIDE), NEIGHBOURS)
    expert = tl.load(blocks + block)
    if expert < 0:
        return
    entry = table + expert * TENSORS + AT
    address = tl.load(entry)
    if address == 0:
        return
    codes = address.to(tl.pointer_type(tl.int32))
    scale = tl.load(entry + 1).to(tl.pointer_type(SCALE_TYPE))
    start = tl.load(blocks + bound + block)
    row = start + tl.arange(0, ROWS)
    there = row < tl.load(blocks + 2 * bound + block)
    pair = tl.load(order + row, mask=there, other=0).to(tl.int64)
    # In place of those beyond the block its first is read: others may not be computed yet.
    from_row = pair // TOP if GATED else tl.where(there, row, start).to(tl.int64)
    place = tl.arange(0, COLS)
    # Rows beyond the last are the last again, and are not stored.
    own = tl.minimum(part * WIDE + (place // 2 if GATED else place), OUTER - 1)
    if GATED:
        own += place % 2 * OUTER
    word, column = tl.arange(0, WORDS), tl.arange(0, STEP)
    # Of an address from memory the compiler does not know that it is a multiple of 16.
    words_at = tl.multiple_of(codes + own.to(tl.int64)[:, None] * ROW_WORDS + word[None, :], [16, 16])
    scales_at = (own // DOWN).to(tl.int64) * ROW_SCALES
    zero = tl.load(entry + 2).to(tl.pointer_type(tl.uint8)) if ZEROS else scale
    x_at = x + from_row[:, None] * s_x + column[None, :]
    sums = tl.zeros([COLS, ROWS], tl.float32)
    # What lies beside the codes of a step is read a step ahead.
    z0, z1, t0, t1, t2, t3 = beside(scale, zero, scales_at, 0, INNER, RUNS, RUN, GROUP, SCALED, RAW, ZEROS)
    for k in tl.range(0, INNER, STEP, num_stages=STAGES):
        next_z0, next_z1, next_t0, next_t1, next_t2, next_t3 = beside(
            scale, zero, scales_at, k + STEP, INNER, RUNS, RUN, GROUP, SCALED, RAW, ZEROS
        )
        if EVEN:
            words, some = tl.load(words_at + k // PLACES), tl.load(x_at + k)
        else:
            words = tl.load(words_at + k // PLACES, mask=(k // PLACES + word < ROW_WORDS)[None, :], other=0)
            some = tl.load(x_at + k, mask=(k + column < INNER)[None, :], other=0.0)
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
        ).to(OPERAND)
        some = tl.dot(operand, tl.trans(some.to(OPERAND)), input_precision="ieee")
        if SCALED:
            sums = settled(sums + some, PTX)
        else:
            sums += some * scale_of(t0, SCALES)[:, None]
        z0, z1, t0, t1, t2, t3 = next_z0, next_z1, next_t0, next_t1, next_t2, next_t3
    if FOLDED != 1.0:
        sums *= FOLDED
    if SECOND:
        more = tl.load(tl.load(entry + 2).to(tl.pointer_type(tl.float32)) + own)[:, None]
        sums = sums * more if SECOND == 1 else tl.div_rn(sums, more)
    kind: tl.constexpr = y.dtype.element_ty
    if BIAS:
        bias = tl.load(table + expert * TENSORS + BIAS).to(tl.pointer_type(kind))
        sums += tl.load(bias + own).to(tl.float32)[:, None]
    total = tl.trans(sums)
    number = part * WIDE + tl.arange(0, WIDE)
    if GATED:
        gate, up = tl.split(tl.reshape(total, [ROWS, WIDE, 2]))
        gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
        total = activated(gate, up, kind, ALPHA, SHIFT, LIMIT)
    to_row = row.to(tl.int64) if GATED else pair
    tl.store(
        y + to_row[:, None] * OUTER + number[None, :],
        total.to(kind),
        mask=there[:, None] & (number < OUTER)[None, :],
    )


def products(
    x: Tensor,
    arranged: tuple[Tensor, Tensor],
    table: Tensor,
    h: Tensor,
    y: Tensor,
    tuning: ExpertTuning,
    part: range,
    kind: ExpertKind,
) -> None:
    """Compute the blocks `part` through those of their experts that have an address, as `experts.products`.

    table: int64 `[experts, tensors]`, addresses of the tensors that the formats of gate_up and down store, in
    their order, and of biases, at multiples of 16; 0 for an expert that is not there.
    """
    pairs, (tokens, hidden), (order, blocks) = len(h), x.shape, arranged
    gate_up, down = map(kind_of, kind.formats)
    assert gate_up is not None, kind
    assert down is not None, kind
    matrices = gate_up.tensors + down.tensors
    assert len(order) == pairs, (order.shape, h.shape)
    assert y.shape == (pairs, hidden), (y.shape, h.shape, x.shape)
    assert table.shape[1] == matrices + kind.biases, (table.shape, kind)
    assert table.dtype == torch.int64, table.dtype
    assert x.dtype == h.dtype == y.dtype, (x.dtype, h.dtype, y.dtype)
    assert x.stride(1) == 1, x.stride()
    assert all(one.is_contiguous() for one in (order, blocks, table, h, y))
    assert 0 <= part.start <= part.stop <= blocks.shape[1], (part, blocks.shape)
    if not part:
        return
    few = tuning.rows == BLOCK and tokens <= FEW_TOKENS
    few = few and reads_rows(x) and reads_rows(h)
    step = _MixtureStep(table, order, blocks, pairs // tokens, tuning, part, kind.activation, few, kind.moves)
    _product(x, h, gate_up, step, (0, matrices if kind.biases > 0 else 0), gated=True)
    _product(h, y, down, step, (gate_up.tensors, matrices + 1 if kind.biases > 1 else 0), gated=False)


@dataclass(frozen=True, slots=True)
class _MixtureStep:
    """Holds what both products of a step share.

    top: experts of a token. few: whether tokens are few enough for products that a warp makes by itself.
    moves: the field of ExpertKind.
    """

    table: Tensor
    order: Tensor
    blocks: Tensor
    top: int
    tuning: ExpertTuning
    part: range
    activation: Activation
    few: bool
    moves: bool


def _product(
    x: Tensor, y: Tensor, kind: CodeKind, step: _MixtureStep, at: tuple[int, int], *, gated: bool
) -> None:
    """Launch one product: y `[pairs, outer]` of x `[rows, inner]`. at: the first address of the matrix in a
    row of the table, and that of its bias, or 0. gated: see the kernel."""
    tuning, outer, inner = step.tuning, y.shape[1], x.shape[1]
    if step.few:
        expert_columns(
            x,
            (step.table, step.order, step.blocks, step.part, step.moves),
            y,
            kind,
            at,
            top=step.top,
            activation=step.activation if gated else None,
            tuning=by_warps(outer, len(y) // step.top, gated=gated),
        )
        return
    four, group = kind.codes in FOUR_BITS, WHOLE if kind.group >= inner else kind.group
    depth = tuning.depth if group > _SHALLOW else min(tuning.depth, _SHALLOW)
    depth = max(depth, 128 if four else 64)  # An operand has at least 16 words of each row.
    scales, scale_type = cdiv(inner, group), SCALE_TYPES[kind.scale_dtype]
    each = RUN_SCALES.get((kind.codes, kind.scales, kind.group)) if COMPILED else None
    half = x.dtype == torch.float16
    raw = each is not None and group < depth and scales % each.itemsize == 0 and x.dtype == torch.bfloat16
    if raw and each is not None:
        scales, scale_type = scales // each.itemsize, RAW_TYPES[each]
    ptx, registers = "", ""
    if COMPILED and x.dtype.itemsize == 2:
        ptx, registers = pairs_of(
            kind.codes, half=half, zeros=kind.zeros, scaled=group < depth, raw=kind.scales if raw else 0
        )
    stage = depth * (tuning.rows * x.element_size() + tuning.columns * (4 if four else 8) // 8)
    wide = tuning.columns // 2 if gated else tuning.columns
    _expert_products[(len(step.part) * cdiv(outer, wide),)](
        x,
        step.table,
        step.order,
        step.blocks,
        y,
        step.part.start,
        len(step.part),
        step.blocks.shape[1],
        x.stride(0),
        TOP=step.top,
        TENSORS=step.table.shape[1],
        AT=at[0],
        OUTER=outer,
        INNER=inner,
        ROW_WORDS=packed_bytes(inner, 4 if four else 8) // 4,
        ROW_SCALES=scales,
        ROWS=tuning.rows,
        COLS=tuning.columns,
        STEP=depth,
        NEIGHBOURS=tuning.group,
        STAGES=max(1, min(tuning.stages, shared_memory(x.device) // stage)),
        GROUP=group,
        DOWN=kind.down,
        KIND=kind.codes,
        PLACES=8 if four else 4,
        SCALES=kind.scales,
        SCALE_TYPE=scale_type,
        RAW=raw,
        ZEROS=kind.zeros,
        SECOND=kind.second,
        BIAS=at[1],
        GATED=gated,
        **activation_options(step.activation),
        OPERAND=NUMBERS[x.dtype] if COMPILED else tl.float32,
        HALF=half,
        LESS=less(kind.codes, half=half),
        PTX=ptx,
        REGISTERS=registers,
        FOLDED=unfolded(kind.codes, kind.scales if raw and ptx else 0),
        EARLY=uses_pdl(),
        num_warps=tuning.warps,
        **pdl_launch_options(uses_pdl()),
    )
