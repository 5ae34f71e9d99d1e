"""Normalise all heads of a token together in place: its queries, and its keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.triton.pointwise import in_turn
from penstock.ops.triton.tuning import next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["squares"])  # type: ignore[untyped-decorator]
def _norm_together(  # type: ignore[no-untyped-def]
    qkv,
    q_gain,
    k_gain,
    squares,
    eps,
    s_row,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    Q_SIZE: tl.constexpr,
    K_SIZE: tl.constexpr,
    COLS: tl.constexpr,
    SUMS: tl.constexpr,
    GIVEN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Normalise the QUERIES numbers of a token's queries, or the KEYS of its keys. Grid [tokens, 2].

    SUMS: only write the sum of their squares.
    GIVEN: read that sum, over all ranks, instead of computing it.
    """
    in_turn(EARLY)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, COLS)
    inside = cols < tl.where(part == 0, QUERIES, KEYS)
    at = qkv + token * s_row + part * QUERIES + cols
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(squares + token * 2 + part) if GIVEN else tl.sum(value * value, 0)
    if SUMS:
        tl.store(squares + token * 2 + part, total)
    else:
        gain = tl.load(q_gain + cols, mask=inside & (part == 0), other=0.0).to(tl.float32)
        gain += tl.load(k_gain + cols, mask=inside & (part == 1), other=0.0).to(tl.float32)
        size = tl.where(part == 0, Q_SIZE, K_SIZE).to(tl.float32)
        unit = (value * tl.rsqrt(total / size + eps)).to(qkv.dtype.element_ty).to(tl.float32)
        tl.debug_barrier()  # several threads may have read one number, where these are few
        tl.store(at, (unit * gain).to(qkv.dtype.element_ty), mask=inside)


def norm_together(
    qkv: Tensor,
    gains: tuple[Tensor, Tensor],
    sizes: tuple[int, int],
    eps: float,
    squares: Tensor | None = None,
) -> None:
    """Normalise all queries of each token together, and all its keys, in place. It rounds as `rms_norm` does.

    qkv: `[tokens, queries + 2 * keys]` (rows strided): numbers of all heads of a rank.
    gains: of queries `[queries]` and of keys `[keys]`.
    sizes: how many numbers of each the whole model has.
    squares: float32 `[tokens, 2]`, sums of the squares of these, if the rank has not all heads.
    """
    q_gain, k_gain = gains
    assert q_gain.stride(0) == k_gain.stride(0) == 1
    _launch(qkv, gains, (len(q_gain), len(k_gain)), squares, sizes=sizes, eps=eps, sums=False)


def sums_of_squares(qkv: Tensor, queries: int, keys: int) -> Tensor:
    """Return the sums of the squares of each token's queries and of its keys, float32 `[tokens, 2]`.

    qkv: `[tokens, queries + 2 * keys]` (rows strided).
    """
    squares = torch.empty(len(qkv), 2, dtype=torch.float32, device=qkv.device)
    _launch(qkv, (qkv, qkv), (queries, keys), squares, sizes=(1, 1), eps=0.0, sums=True)
    return squares


def _launch(
    qkv: Tensor,
    gains: tuple[Tensor, Tensor],
    widths: tuple[int, int],
    squares: Tensor | None,
    *,
    sizes: tuple[int, int],
    eps: float,
    sums: bool,
) -> None:
    queries, keys = widths
    assert qkv.shape[1] == queries + 2 * keys, (qkv.shape, widths)
    assert qkv.stride(1) == 1, qkv.stride()
    assert squares is None or (squares.shape == (len(qkv), 2) and squares.is_contiguous())
    if not len(qkv):
        return
    cols, early = next_power_of_2(max(widths)), uses_pdl()
    _norm_together[(len(qkv), 2)](
        qkv,
        *gains,
        qkv if squares is None else squares,
        eps,
        qkv.stride(0),
        QUERIES=queries,
        KEYS=keys,
        Q_SIZE=sizes[0],
        K_SIZE=sizes[1],
        COLS=cols,
        SUMS=sums,
        GIVEN=squares is not None and not sums,
        EARLY=early,
        num_warps=min(16, max(4, cols // 512)),
        **pdl_launch_options(early),
    )
