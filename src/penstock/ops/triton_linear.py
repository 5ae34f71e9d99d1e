"""Products of one row of activations with a matrix: a decode step of a single sequence reads every weight once, and is bound by that.

Why this is safe where launches overlap. A kernel that begins before the one before it has ended reads nothing but weights, which nobody
writes meanwhile, until `gdc_wait` has returned; that returns when all that came before has ended and can be seen. Every kernel of such a
chain waits, so the end of one is the end of all before it. It writes nothing before the wait either.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.kernels import early_options, launches_early
from penstock.ops.triton_pointwise import silu


@triton.jit(do_not_specialize=["outer"])  # type: ignore[untyped-decorator]
def _one_row(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    y,
    outer,
    s_w,
    INNER: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """COLS numbers of y, each a row of the matrix; where GATED, each from two rows, `outer` apart."""
    if EARLY:
        gdc_launch_dependents()
    cols, inner = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, STEP)
    there = cols < outer
    at = weight + cols.to(tl.int64)[:, None] * s_w + inner[None, :]
    beside = outer.to(tl.int64) * s_w
    # The first stretch of the weights is on its way while this still waits for x.
    inside = there[:, None] & (inner < INNER)[None, :]
    w = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    v = w
    if GATED:
        v = tl.load(at + beside, mask=inside, other=0.0, eviction_policy="evict_first")
    if EARLY:
        gdc_wait()
    if INNER <= STEP:
        row = tl.load(x + inner, mask=inner < INNER, other=0.0).to(tl.float32)[None, :]
        total = tl.sum(w.to(tl.float32) * row, 1)
        other = tl.sum(v.to(tl.float32) * row, 1) if GATED else total
    else:
        sums = tl.zeros([COLS, STEP], tl.float32)
        others = tl.zeros([COLS, STEP], tl.float32)
        for start in tl.range(STEP, INNER + STEP, STEP, num_stages=1):
            row = tl.load(x + start - STEP + inner, mask=start - STEP + inner < INNER, other=0.0).to(tl.float32)[None, :]
            next_inside = there[:, None] & (start + inner < INNER)[None, :]
            next_w = tl.load(at + start, mask=next_inside, other=0.0, eviction_policy="evict_first")
            sums += w.to(tl.float32) * row
            w = next_w
            if GATED:
                next_v = tl.load(at + beside + start, mask=next_inside, other=0.0, eviction_policy="evict_first")
                others += v.to(tl.float32) * row
                v = next_v
        total = tl.sum(sums, 1)
        other = tl.sum(others, 1) if GATED else total
    if BIASED:
        total += tl.load(bias + cols, mask=there, other=0.0).to(tl.float32)
        if GATED:
            other += tl.load(bias + outer + cols, mask=there, other=0.0).to(tl.float32)
    if GATED:
        active = silu(total.to(y.dtype.element_ty).to(tl.float32)).to(y.dtype.element_ty).to(tl.float32)
        total = active * other.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + cols, total.to(y.dtype.element_ty), mask=there)


def one_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
    tuning: tuple[int, int, int] | None = None,
) -> Tensor:
    """`x @ weight.T + bias` of one row: x `[1, in]`, weight `[out, in]` (rows strided), bias `[out]`, result `[1, out]`, in `out` if that
    is given.

    gated: `silu(gate) * up` of a result whose first half is the gate: `[1, out / 2]`, rounded where `silu_mul` rounds.
    Sums are float32 numbers, whatever the dtype. tuning: see `one_row_tuning`.
    """
    inner, outer = x.shape[1], len(weight) // (2 if gated else 1)
    assert x.shape[0] == 1, x.shape
    assert weight.shape == (outer * (2 if gated else 1), inner), (weight.shape, x.shape)
    assert x.stride(1) == weight.stride(1) == 1, (x.stride(), weight.stride())
    assert bias is None or (bias.shape == (len(weight),) and bias.stride(0) == 1)
    assert out is None or (out.shape == (1, outer) and out.stride(1) == 1 and out.dtype == x.dtype)
    y = torch.empty(1, outer, dtype=x.dtype, device=x.device) if out is None else out
    cols, step, warps = tuning or one_row_tuning(inner, gated, x.element_size())
    early = launches_early()
    _one_row[(triton.cdiv(outer, cols),)](
        x,
        weight,
        bias if bias is not None else x,
        y,
        outer,
        weight.stride(0),
        INNER=inner,
        COLS=cols,
        STEP=min(step, triton.next_power_of_2(inner)),
        GATED=gated,
        BIASED=bias is not None,
        EARLY=early,
        num_warps=warps,
        **early_options(early),
    )
    return y


def one_row_tuning(inner: int, gated: bool, itemsize: int) -> tuple[int, int, int]:
    """The one place for constants: numbers of a program, its stretch of a row of weights, its warps."""
    if itemsize > 2:
        return (2 if gated else 4), 2048, 4
    if inner > 4096:  # All of a row at once, although some of the stretch may be empty: nothing waits for a second.
        return 2, 16384, 8
    if gated:
        return 2, 4096, 4
    return 4, 2048, (8 if inner > 2048 else 4)
