"""Kernels for a mixture of experts: products with all experts at once, wherever they lie.

Pairs of a token and one of its experts come in blocks of one expert each (`routing`). A product's grid covers
as many blocks as there could be, and programs beyond those that there are end at once. So do those of an
expert with address 0, so that some experts may be computed now and others later.

A row's numbers are its own: they depend on the tuning, which is chosen by the step's tokens and the shapes,
and neither on the other rows of its block nor on which experts are computed in the same call.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from penstock.arch.experts import ExpertKind
from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.triton.activation import activated, activation_options
from penstock.ops.triton.expert_row import expert_row, suits
from penstock.ops.triton.pointwise import in_turn
from penstock.ops.triton.tuning import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class ExpertTuning:
    """Shapes the programs of a product. rows: of a block, a power of two from 16. columns: rows of a weight
    matrix for one program (of gate and up together), `depth` elements of each at a time. group: blocks that
    neighbouring programs compute with the same columns."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int


_TUNINGS = {
    2: (
        (4, ExpertTuning(16, 64, 128, warps=4, stages=4, group=1)),
        (16, ExpertTuning(32, 128, 64, warps=4, stages=4, group=1)),
        (64, ExpertTuning(64, 128, 64, warps=4, stages=4, group=4)),
        (None, ExpertTuning(128, 256, 64, warps=8, stages=3, group=8)),
    ),
    4: (
        (4, ExpertTuning(16, 32, 64, warps=4, stages=2, group=1)),
        (None, ExpertTuning(32, 64, 32, warps=4, stages=2, group=8)),
    ),
}
"""Tunings by bytes of the dtype: up to so many pairs for each expert, on average. Rows are few where weights
are what there is to read."""
_PROGRAMS = 3 * 132
"""Programs below which columns are divided further: three for each multiprocessor of an H200."""
_FEW_COLUMNS, _FEW_ROWS, _DEEPEST = 32, 32, 256


def expert_tuning(pairs: int, experts: int, dtype: torch.dtype) -> ExpertTuning:
    """Return the built-in tuning of a step with so many pairs."""
    return next(
        tuning for most, tuning in _TUNINGS[dtype.itemsize] if most is None or pairs <= most * experts
    )


@triton.jit  # type: ignore[untyped-decorator]
def place_of(first, count, PARTS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return this program's block and its part of the columns: GROUP blocks have the same part one after
    another, while it is in the cache."""
    program = tl.program_id(0)
    group = program // (GROUP * PARTS)
    size = tl.minimum(count - group * GROUP, GROUP)
    within = program % (GROUP * PARTS)
    return first + group * GROUP + within % size, within // size


@triton.jit(do_not_specialize=["first", "count", "bound"])  # type: ignore[untyped-decorator]
def _gate_up(  # type: ignore[no-untyped-def]
    x,
    table,
    order,
    blocks,
    h,
    first,
    count,
    bound,
    s_x,
    TOP: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
    TENSORS: tl.constexpr,
    BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute COLS columns of the activation of one block's pairs, `silu(gate) * up` or another.

    TENSORS: addresses of an expert. BIAS: which of them is that of gate_up's bias; 0 for none.
    """
    in_turn(EARLY)
    block, part = place_of(first, count, tl.cdiv(INNER, COLS), GROUP)
    expert = tl.load(blocks + block)
    if expert < 0:
        return
    address = tl.load(table + TENSORS * expert)
    if address == 0:
        return
    row = tl.load(blocks + bound + block) + tl.arange(0, ROWS)
    there = row < tl.load(blocks + 2 * bound + block)
    token = (tl.load(order + row, mask=there, other=0) // TOP).to(tl.int64)
    col = part * COLS + tl.arange(0, COLS)
    deep = tl.arange(0, DEPTH)
    matrix = address.to(tl.pointer_type(x.dtype.element_ty))
    # Columns beyond the last are the last again, and are not stored.
    at = matrix + tl.minimum(col, INNER - 1).to(tl.int64)[:, None] * HIDDEN + deep[None, :]
    if HIDDEN % 8 == 0:  # Of an address from memory the compiler does not know that it is a multiple of 16.
        at = tl.multiple_of(at, [16, 16])
    x_at = x + token[:, None] * s_x + deep[None, :]
    gate, up = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    for begin in tl.range(0, HIDDEN, DEPTH, num_stages=STAGES):
        if HIDDEN % DEPTH == 0:
            a = tl.load(x_at + begin, mask=there[:, None], other=0.0)
            g = tl.load(at + begin)
            u = tl.load(at + INNER * HIDDEN + begin)
        else:
            left = (begin + deep < HIDDEN)[None, :]
            a = tl.load(x_at + begin, mask=there[:, None] & left, other=0.0)
            g = tl.load(at + begin, mask=left, other=0.0)
            u = tl.load(at + INNER * HIDDEN + begin, mask=left, other=0.0)
        if WIDEN:  # the interpreter cannot multiply bf16; the products are the same
            a, g, u = a.to(tl.float32), g.to(tl.float32), u.to(tl.float32)
        gate = tl.dot(a, g.T, gate, input_precision="ieee")
        up = tl.dot(a, u.T, up, input_precision="ieee")
    dtype: tl.constexpr = h.dtype.element_ty
    if BIAS:
        bias = tl.load(table + TENSORS * expert + BIAS).to(tl.pointer_type(dtype)) + tl.minimum(
            col, INNER - 1
        )
        gate, up = gate + tl.load(bias).to(tl.float32), up + tl.load(bias + INNER).to(tl.float32)
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    active = activated(gate, up, dtype, ALPHA, SHIFT, LIMIT)
    to = h + row.to(tl.int64)[:, None] * INNER + col[None, :]
    tl.store(to, active.to(dtype), mask=there[:, None] & (col < INNER)[None, :])


@triton.jit(do_not_specialize=["first", "count", "bound"])  # type: ignore[untyped-decorator]
def _down(  # type: ignore[no-untyped-def]
    h,
    table,
    order,
    blocks,
    y,
    first,
    count,
    bound,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
    TENSORS: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute COLS columns of one block's outputs, each to its pair's row. BIAS: see `_gate_up`."""
    in_turn(EARLY)
    block, part = place_of(first, count, tl.cdiv(HIDDEN, COLS), GROUP)
    expert = tl.load(blocks + block)
    if expert < 0:
        return
    address = tl.load(table + TENSORS * expert + 1)
    if address == 0:
        return
    row = tl.load(blocks + bound + block) + tl.arange(0, ROWS)
    there = row < tl.load(blocks + 2 * bound + block)
    pair = tl.load(order + row, mask=there, other=0).to(tl.int64)
    col = part * COLS + tl.arange(0, COLS)
    deep = tl.arange(0, DEPTH)
    matrix = address.to(tl.pointer_type(h.dtype.element_ty))
    at = matrix + tl.minimum(col, HIDDEN - 1).to(tl.int64)[:, None] * INNER + deep[None, :]
    if INNER % 8 == 0:
        at = tl.multiple_of(at, [16, 16])
    h_at = h + row.to(tl.int64)[:, None] * INNER + deep[None, :]
    out = tl.zeros([ROWS, COLS], tl.float32)
    for begin in tl.range(0, INNER, DEPTH, num_stages=STAGES):
        if INNER % DEPTH == 0:
            a = tl.load(h_at + begin, mask=there[:, None], other=0.0)
            w = tl.load(at + begin)
        else:
            left = (begin + deep < INNER)[None, :]
            a = tl.load(h_at + begin, mask=there[:, None] & left, other=0.0)
            w = tl.load(at + begin, mask=left, other=0.0)
        if WIDEN:
            a, w = a.to(tl.float32), w.to(tl.float32)
        out = tl.dot(a, w.T, out, input_precision="ieee")
    if BIAS:
        bias = tl.load(table + TENSORS * expert + BIAS).to(tl.pointer_type(h.dtype.element_ty))
        out += tl.load(bias + tl.minimum(col, HIDDEN - 1)).to(tl.float32)
    to = y + pair[:, None] * HIDDEN + col[None, :]
    tl.store(to, out.to(y.dtype.element_ty), mask=there[:, None] & (col < HIDDEN)[None, :])


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
    """Compute the blocks `part` through those of their experts that have an address: their pairs' rows of y
    are written, no others.

    x `[tokens, hidden]` (rows strided); arranged: order and blocks from `arrange`; table int64
    `[experts, 2 + biases]`, addresses of gate_up `[2 * inner, hidden]`, gate first, down `[hidden, inner]`,
    and biases, contiguous, of x's dtype, at multiples of 16, 0 for an expert that is not there; h
    `[pairs, inner]`, overwritten; y `[pairs, hidden]`.
    Products are summed up in fp32, biases too. Rounded are gate and up, silu, its product with up, and the
    output. kind: of dense experts.
    """
    (pairs, inner), (tokens, hidden), (order, blocks) = h.shape, x.shape, arranged
    first, count = part.start, len(part)
    bound, likely = blocks.shape[1], max(min(pairs, len(table)), pairs // tuning.rows)
    assert len(order) == pairs, (order.shape, h.shape)
    assert y.shape == (pairs, hidden), (y.shape, h.shape, x.shape)
    assert table.shape == (len(table), 2 + kind.biases), (table.shape, kind)
    assert table.dtype == torch.int64, table.dtype
    assert x.dtype == h.dtype == y.dtype, (x.dtype, h.dtype, y.dtype)
    assert x.stride(1) == 1, x.stride()
    assert all(one.is_contiguous() for one in (order, blocks, table, h, y))
    assert 0 <= first <= first + count <= bound, (first, count, bound)
    if count == 0:
        return
    if suits(x):
        step = table, order, blocks, part
        expert_row(x, step, h, (0, 2 if kind.biases > 0 else 0), kind.activation)
        expert_row(h, step, y, (1, 3 if kind.biases > 1 else 0), None)
        return
    more = {
        "ROWS": tuning.rows,
        "GROUP": tuning.group,
        "WIDEN": x.device.type == "cpu",
        "TENSORS": table.shape[1],
        "EARLY": uses_pdl(),
        "num_warps": tuning.warps,
        **pdl_launch_options(uses_pdl()),
    }
    columns, depth, stages = _divided(tuning, 2 * inner, likely, x)
    _gate_up[(count * cdiv(inner, columns // 2),)](
        x,
        table,
        order,
        blocks,
        h,
        first,
        count,
        bound,
        x.stride(0),
        TOP=pairs // tokens,
        HIDDEN=hidden,
        INNER=inner,
        COLS=columns // 2,
        DEPTH=depth,
        STAGES=stages,
        BIAS=2 if kind.biases > 0 else 0,
        **activation_options(kind.activation),
        **more,
    )
    columns, depth, stages = _divided(tuning, hidden, likely, x)
    _down[(count * cdiv(hidden, columns),)](
        h,
        table,
        order,
        blocks,
        y,
        first,
        count,
        bound,
        HIDDEN=hidden,
        INNER=inner,
        COLS=columns,
        DEPTH=depth,
        STAGES=stages,
        BIAS=3 if kind.biases > 1 else 0,
        **more,
    )


def _divided(tuning: ExpertTuning, width: int, blocks: int, x: Tensor) -> tuple[int, int, int]:
    """Return columns, depth and stages where a matrix has `width` rows: of few blocks fewer columns each, and
    more of these at a time. As many stages as the device's shared memory holds."""
    columns, depth = tuning.columns, tuning.depth
    while columns > _FEW_COLUMNS and blocks * cdiv(width, columns) < _PROGRAMS:
        columns //= 2
        if tuning.rows <= _FEW_ROWS and 2 * depth <= _DEEPEST:
            depth *= 2
    stage = (tuning.rows + columns) * depth * x.element_size()
    return columns, depth, max(1, min(tuning.stages, shared_memory(x.device) // stage))


@lru_cache(maxsize=16)
def shared_memory(device: torch.device) -> int:
    """Return the bytes that a program may have."""
    return (
        1 << 30
        if device.type == "cpu"
        else int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
    )


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    y,
    shares,
    out,
    HIDDEN: tl.constexpr,
    TOP: tl.constexpr,
    COLS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Sum up COLS columns of one token."""
    in_turn(EARLY)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = cols < HIDDEN
    total = tl.zeros([COLS], tl.float32)
    for rank in tl.static_range(TOP):
        share = tl.load(shares + token * TOP + rank).to(tl.float32)
        total += share * tl.load(y + (token * TOP + rank) * HIDDEN + cols, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out + token * HIDDEN + cols, total.to(out.dtype.element_ty), mask=inside)


def combine(y: Tensor, shares: Tensor) -> Tensor:
    """Return the sum of each token's y `[tokens * top_k, hidden]` by its shares `[tokens, top_k]`, in fp32,
    rounded once: `[tokens, hidden]`."""
    (tokens, top_k), hidden = shares.shape, y.shape[1]
    assert len(y) == tokens * top_k, (y.shape, shares.shape)
    assert y.is_contiguous()
    assert shares.is_contiguous()
    out = torch.empty(tokens, hidden, dtype=y.dtype, device=y.device)
    if tokens:
        cols = min(512, next_power_of_2(hidden))
        _combine[(tokens, cdiv(hidden, cols))](
            y,
            shares,
            out,
            HIDDEN=hidden,
            TOP=top_k,
            COLS=cols,
            EARLY=uses_pdl(),
            num_warps=2,
            **pdl_launch_options(uses_pdl()),
        )
    return out
