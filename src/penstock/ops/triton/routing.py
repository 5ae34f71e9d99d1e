"""Kernels that route tokens to experts: which experts each token takes, and its pairs by expert, in blocks.

A pair is a token and one of its experts, numbered token * top_k + rank. Pairs are put in the order of their
experts, and those of an expert cut into blocks of rows, all on the device. Blocks have room for as many as
there could be; those beyond the ones that there are have the expert -1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 8192
"""Pairs that a program arranges at a time."""


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Return how many blocks there can be of so many pairs, however they fall on experts."""
    used = min(pairs, experts)
    return used + (pairs - used) // rows


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    scores,
    chosen,
    shares,
    tokens,
    s_scores,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
    TOP: tl.constexpr,
    TOP_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    NORMALISE: tl.constexpr,
) -> None:
    """Choose the experts of ROWS tokens. Scores are compared as integers of the same order, with the expert
    below: no two are alike."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols, ranks = tl.arange(0, COLS)[None, :], tl.arange(0, TOP_COLS)[None, :]
    there, inside = (row < tokens)[:, None], cols < EXPERTS
    score = tl.load(scores + row.to(tl.int64)[:, None] * s_scores + cols, mask=there & inside, other=0.0).to(
        tl.float32
    )
    score = tl.where(score == 0.0, 0.0, score)  # one zero, not two
    bits = score.to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    LEAST: tl.constexpr = -(1 << 63)
    key = tl.where(inside, (order << 32) | (EXPERTS - cols).to(tl.int64), LEAST)
    best = tl.full([ROWS, TOP_COLS], LEAST, tl.int64)
    for rank in tl.static_range(TOP):
        highest = tl.max(key, 1)[:, None]
        best = tl.where(ranks == rank, highest, best)
        key = tl.where(key == highest, LEAST, key)
    order = (best >> 32).to(tl.int32)
    value = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    taken = (ranks < TOP) & there
    most = tl.max(tl.where(inside, score, float("-inf")), 1)[:, None]
    weight = tl.where(ranks < TOP, tl.exp(value - most), 0.0)
    total = tl.sum(weight if NORMALISE else tl.where(inside, tl.exp(score - most), 0.0), 1)[:, None]
    at = row.to(tl.int64)[:, None] * TOP + ranks
    tl.store(chosen + at, EXPERTS - (best & 0xFFFFFFFF).to(tl.int32), mask=taken)
    tl.store(shares + at, (weight / total).to(shares.dtype.element_ty), mask=taken)


def choose(scores: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Return the top_k experts of each token by scores `[tokens, experts]`, the best first: int32 and their
    shares, both `[tokens, top_k]`.

    Shares are probabilities, in fp32 and rounded once to the dtype of scores; normalised, they sum to one. Of
    equal scores the lower expert wins.
    """
    tokens, experts = scores.shape
    assert 0 < top_k <= experts, (top_k, experts)
    assert scores.stride(1) == 1, scores.stride()
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=scores.device)
    shares = torch.empty(tokens, top_k, dtype=scores.dtype, device=scores.device)
    if tokens == 0:
        return chosen, shares
    cols = triton.next_power_of_2(experts)
    rows = max(1, min(8, 1024 // cols)) if tokens > 256 else 1
    _choose[(triton.cdiv(tokens, rows),)](
        scores,
        chosen,
        shares,
        tokens,
        scores.stride(0),
        EXPERTS=experts,
        COLS=cols,
        TOP=top_k,
        TOP_COLS=triton.next_power_of_2(top_k),
        ROWS=rows,
        NORMALISE=normalise,
        num_warps=4 if rows * cols >= 512 else 1,
    )
    return chosen, shares


@triton.jit(do_not_specialize=["pairs", "bound"])  # type: ignore[untyped-decorator]
def _arrange(  # type: ignore[no-untyped-def]
    chosen,
    order,
    blocks,
    counts,
    pairs,
    bound,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Write one expert's pairs, and its blocks. Every program counts all pairs, to know where its own begin;
    the first ends the list."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    found = tl.zeros([BINS], tl.int32)
    for first in range(0, pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        found += tl.histogram(tl.load(chosen + at, mask=at < pairs, other=EXPERTS), BINS)
    found = tl.where(bins < EXPERTS, found, 0)
    cut = (found + ROWS - 1) // ROWS
    count = tl.sum(tl.where(bins == expert, found, 0))
    start = tl.sum(tl.where(bins < expert, found, 0))
    block = tl.sum(tl.where(bins < expert, cut, 0))
    tl.store(counts + expert, count)
    ahead = tl.arange(0, WIDE)
    for number in range(0, tl.cdiv(count, ROWS), WIDE):
        one = number + ahead
        mine = one < tl.cdiv(count, ROWS)
        tl.store(blocks + block + one, expert + tl.zeros([WIDE], tl.int32), mask=mine)
        tl.store(blocks + bound + block + one, start + one * ROWS, mask=mine)
        tl.store(
            blocks + 2 * bound + block + one, tl.minimum(start + (one + 1) * ROWS, start + count), mask=mine
        )
    if expert == 0:
        for number in range(tl.sum(cut), bound, WIDE):
            tl.store(blocks + number + ahead, tl.full([WIDE], -1, tl.int32), mask=number + ahead < bound)
    if count > 0:
        for first in range(0, pairs, CHUNK):
            at = first + tl.arange(0, CHUNK)
            mine = (tl.load(chosen + at, mask=at < pairs, other=EXPERTS) == expert).to(tl.int32)
            tl.store(order + start + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)
            start += tl.sum(mine)


def arrange(chosen: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs by expert, chosen int32 `[tokens, top_k]` contiguous: their order int32 `[pairs]`,
    blocks int32 `[3, most_blocks]`, and how many each expert has, int32 `[experts]`.

    A block is an expert, -1 behind the last block, and where in the order its pairs begin and end: at most
    `rows`. Experts, and the pairs of each, keep their order.
    """
    pairs, device = chosen.numel(), chosen.device
    assert chosen.dtype == torch.int32, chosen.dtype
    assert chosen.is_contiguous()
    bound = most_blocks(pairs, experts, rows)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    blocks = torch.empty(3, bound, dtype=torch.int32, device=device)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    chunk = min(_CHUNK, max(128, triton.next_power_of_2(pairs)))
    _arrange[(experts,)](
        chosen,
        order,
        blocks,
        counts,
        pairs,
        bound,
        EXPERTS=experts,
        BINS=max(32, triton.next_power_of_2(experts + 1)),
        CHUNK=chunk,
        ROWS=rows,
        WIDE=32,
        num_warps=8 if chunk > 1024 else 4,
    )
    return order, blocks, counts
