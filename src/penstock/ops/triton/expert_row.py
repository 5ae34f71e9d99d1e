"""Computes a mixture's single token with dense experts: sums of rows, with no more than one token's
activations, so that nothing but reading the matrices takes time.

A program computes a few numbers of one of the token's experts, as `linear.one_row` does. Sums are float32.
Launches are not early: programs that wait beside others that read made a token 2 % slower (Qwen3-30B-A3B).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.arch.spec import SWIGLU, Activation
from penstock.ops.triton.activation import activated, activation_options
from penstock.ops.triton.linear import one_row_tuning
from penstock.ops.triton.tuning import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["first", "bound"])  # type: ignore[untyped-decorator]
def _expert_row(  # type: ignore[no-untyped-def]
    x,
    table,
    order,
    blocks,
    y,
    first,
    bound,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    TENSORS: tl.constexpr,
    AT: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """Compute COLS numbers of an expert: where GATED, of the activation, from two rows of the matrix each,
    to the pair's row in `order`; else of the output, to its pair. AT, TENSORS, BIAS: as in `experts`."""
    PARTS: tl.constexpr = (OUTER + COLS - 1) // COLS
    block, part = first + tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    expert = tl.load(blocks + block)
    if expert < 0:
        return
    address = tl.load(table + TENSORS * expert + AT)
    if address == 0:
        return
    row = tl.load(blocks + bound + block).to(tl.int64)
    cols, inner = part * COLS + tl.arange(0, COLS), tl.arange(0, STEP)
    # Columns beyond the last are the last again, and are not stored.
    own = tl.minimum(cols, OUTER - 1)
    at = address.to(tl.pointer_type(x.dtype.element_ty)) + own.to(tl.int64)[:, None] * INNER + inner[None, :]
    if INNER % 8 == 0:  # Of an address from memory the compiler does not know that it is a multiple of 16.
        at = tl.multiple_of(at, [16, 16])
    inside = (inner < INNER)[None, :]
    w = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    v = w
    if GATED:
        v = tl.load(at + OUTER * INNER, mask=inside, other=0.0, eviction_policy="evict_first")
        given = x
    else:
        given = x + row * INNER
    sums, others = tl.zeros([COLS, STEP], tl.float32), tl.zeros([COLS, STEP], tl.float32)
    for start in tl.static_range(0, INNER, STEP):
        some = tl.load(given + start + inner, mask=start + inner < INNER, other=0.0).to(tl.float32)[None, :]
        sums += w.to(tl.float32) * some
        if GATED:
            others += v.to(tl.float32) * some
        if start + STEP < INNER:
            inside = (start + STEP + inner < INNER)[None, :]
            w = tl.load(at + start + STEP, mask=inside, other=0.0, eviction_policy="evict_first")
            if GATED:
                v = tl.load(
                    at + OUTER * INNER + start + STEP, mask=inside, other=0.0, eviction_policy="evict_first"
                )
    total, other = tl.sum(sums, 1), tl.sum(others, 1)
    kind: tl.constexpr = y.dtype.element_ty
    if BIAS:
        bias = tl.load(table + TENSORS * expert + BIAS).to(tl.pointer_type(kind)) + own
        total += tl.load(bias).to(tl.float32)
        if GATED:
            other += tl.load(bias + OUTER).to(tl.float32)
    if GATED:
        gate, up = total.to(kind).to(tl.float32), other.to(kind).to(tl.float32)
        total = activated(gate, up, kind, ALPHA, SHIFT, LIMIT)
        to = row
    else:
        to = tl.load(order + row).to(tl.int64)
    tl.store(y + to * OUTER + cols, total.to(kind), mask=cols < OUTER)


def expert_row(
    x: Tensor,
    step: tuple[Tensor, Tensor, Tensor, range],
    y: Tensor,
    at: tuple[int, int],
    activation: Activation | None,
) -> None:
    """Compute one product of blocks of one row: y `[pairs, outer]` of x `[rows, inner]`, both contiguous.

    step: table, order and blocks, and which of the blocks, as `experts.products` has them.
    at: the address of the matrix in a row of the table, and that of its bias, or 0.
    activation: of a matrix of gate and up, for which x has one row; None for down.
    """
    outer, inner, gated = y.shape[1], x.shape[1], activation is not None
    table, order, blocks, part = step
    cols, stretch, warps = one_row_tuning(inner, gated, x.element_size())
    _expert_row[(len(part) * cdiv(outer, cols),)](
        x,
        table,
        order,
        blocks,
        y,
        part.start,
        blocks.shape[1],
        OUTER=outer,
        INNER=inner,
        COLS=cols,
        STEP=min(stretch, next_power_of_2(inner)),
        TENSORS=table.shape[1],
        AT=at[0],
        BIAS=at[1],
        GATED=gated,
        **activation_options(activation or SWIGLU),
        num_warps=warps,
    )


def suits(x: Tensor) -> bool:
    """Tell whether this is a single token whose experts' matrices are read row by row."""
    return len(x) == 1 and x.dtype in (torch.bfloat16, torch.float16)
