"""Kernels that route tokens to experts: which experts each token takes, and its pairs by expert, in blocks.

A pair is a token and one of its experts, numbered token * top_k + rank. Pairs are put in the order of their
experts, and those of an expert cut into blocks of rows, all on the device. Blocks have room for as many as
there could be; those beyond the ones that there are have the expert -1.

A single token is routed in one launch, others in two. All choose by `_best_of`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.arch.spec import MoeSpec, Scoring
from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.route import TINY
from penstock.ops.triton.pointwise import in_turn
from penstock.ops.triton.tuning import cdiv, next_power_of_2

_CHUNK = 8192
"""Pairs that a program arranges at a time."""


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Return how many blocks there can be of so many pairs, however they fall on experts."""
    used = min(pairs, experts)
    return used + (pairs - used) // rows


@triton.jit
def _ranked(score, low):  # type: ignore[no-untyped-def]
    """Return int64 keys that have the order of scores, and of equal scores the order of `low`, 32 bits."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # one zero, not two
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def _score_of(key):  # type: ignore[no-untyped-def]
    """Return the score of a key."""
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _of_best_groups(  # type: ignore[no-untyped-def]
    key,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_COLS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Return the keys `[ROWS, COLS]` with LEAST for those of all but the best groups, by the sums of the two
    best scores of each."""
    each = tl.reshape(key, [ROWS, GROUP_COLS, COLS // GROUP_COLS])
    first = tl.max(each, 2)
    second = tl.max(tl.where(each == first[:, :, None], LEAST, each), 2)
    group = tl.arange(0, GROUP_COLS)[None, :]
    left = tl.where(group < GROUPS, _ranked(_score_of(first) + _score_of(second), GROUPS - group), LEAST)
    best = tl.zeros([ROWS, GROUP_COLS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        highest = tl.max(left, 1)[:, None]
        best = tl.where(left == highest, 1, best)
        left = tl.where(left == highest, LEAST, left)
    return tl.reshape(tl.where(best[:, :, None] == 1, each, LEAST), [ROWS, COLS])


@triton.jit  # type: ignore[untyped-decorator]
def _best_of(  # type: ignore[no-untyped-def]
    logits,
    correction,
    row,
    tokens,
    s_logits,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
    TOP: tl.constexpr,
    TOP_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    CORRECTION: tl.constexpr,
    SCALE: tl.constexpr,
    TINY: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_COLS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
    """Return the experts of ROWS tokens, int32, and their shares, float32, both `[ROWS, TOP_COLS]`.

    Scores are compared as integers of the same order, with the expert below: no two are alike. Each group of
    experts begins at a power of two.
    """
    cols, ranks = tl.arange(0, COLS)[None, :], tl.arange(0, TOP_COLS)[None, :]
    there = (row < tokens)[:, None]
    if TOP_GROUPS < GROUPS:
        SIZE: tl.constexpr = COLS // GROUP_COLS
        inside = (cols % SIZE < EXPERTS // GROUPS) & (cols // SIZE < GROUPS)
        cols = cols // SIZE * (EXPERTS // GROUPS) + cols % SIZE
    else:
        inside = cols < EXPERTS
    logit = tl.load(logits + row.to(tl.int64)[:, None] * s_logits + cols, mask=there & inside, other=0.0).to(
        tl.float32
    )
    most = tl.max(tl.where(inside, logit, float("-inf")), 1)[:, None]
    # Probabilities of a softmax have the order of logits, which are compared if nothing is added to them.
    BY_LOGITS: tl.constexpr = not (SIGMOID or CORRECTION or TOP_GROUPS < GROUPS)
    if BY_LOGITS:
        score = logit
    elif SIGMOID:
        tail = tl.exp(-tl.abs(logit))  # at most 1: no overflow on either side
        score = tl.where(logit >= 0.0, 1.0, tail) / (1.0 + tail)
    else:
        weight = tl.where(inside, tl.exp(logit - most), 0.0)
        score = weight / tl.sum(weight, 1)[:, None]
    LEAST: tl.constexpr = -(1 << 63)
    choice = score
    if CORRECTION:
        choice += tl.load(correction + cols, mask=inside, other=0.0)
    key = tl.where(inside, _ranked(choice, EXPERTS - cols), LEAST)
    if TOP_GROUPS < GROUPS:
        key = _of_best_groups(key, ROWS, COLS, GROUPS, GROUP_COLS, TOP_GROUPS, LEAST)
    best = tl.full([ROWS, TOP_COLS], LEAST, tl.int64)
    value = tl.zeros([ROWS, TOP_COLS], tl.float32)
    for rank in tl.static_range(TOP):
        highest = tl.max(key, 1)[:, None]
        best = tl.where(ranks == rank, highest, best)
        if CORRECTION:
            value = tl.where(ranks == rank, tl.sum(tl.where(key == highest, score, 0.0), 1)[:, None], value)
        key = tl.where(key == highest, LEAST, key)
    if not CORRECTION:
        value = _score_of(best)
    if BY_LOGITS:
        weight = tl.where(ranks < TOP, tl.exp(value - most), 0.0)
        total = tl.sum(weight if NORMALISE else tl.where(inside, tl.exp(logit - most), 0.0), 1)[:, None]
        share = weight / total
    else:
        share = tl.where(ranks < TOP, value, 0.0)
        if NORMALISE:
            share = share / (tl.sum(share, 1)[:, None] + TINY)
    if SCALE != 1.0:
        share *= SCALE
    return EXPERTS - (best & 0xFFFFFFFF).to(tl.int32), share


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    logits,
    correction,
    chosen,
    shares,
    tokens,
    s_logits,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
    TOP: tl.constexpr,
    TOP_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    CORRECTION: tl.constexpr,
    SCALE: tl.constexpr,
    TINY: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_COLS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Choose the experts of ROWS tokens."""
    in_turn(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, share = _best_of(
        logits, correction, row, tokens, s_logits, EXPERTS, COLS, TOP, TOP_COLS, ROWS, SIGMOID, NORMALISE,
        CORRECTION, SCALE, TINY, GROUPS, GROUP_COLS, TOP_GROUPS,
    )  # fmt: skip
    ranks = tl.arange(0, TOP_COLS)[None, :]
    taken = (ranks < TOP) & (row < tokens)[:, None]
    at = row.to(tl.int64)[:, None] * TOP + ranks
    tl.store(chosen + at, expert, mask=taken)
    tl.store(shares + at, share.to(shares.dtype.element_ty), mask=taken)


def choose(logits: Tensor, moe: MoeSpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each token's shares, of the dtype of logits, and experts int32, both `[tokens, top_k]`, the best
    first.

    Scores and shares are computed in float32, and shares rounded once. Of equal scores the lower expert wins.

    logits: `[tokens, experts]`, with the bias of the router if it has one.
    correction: float32 `[experts]`, of a router with a correction.
    """
    tokens, options = len(logits), _choice_options(logits, moe, correction)
    chosen = torch.empty(tokens, moe.top_k, dtype=torch.int32, device=logits.device)
    shares = torch.empty(tokens, moe.top_k, dtype=logits.dtype, device=logits.device)
    if tokens == 0:
        return shares, chosen
    rows = max(1, min(8, 1024 // options["COLS"])) if tokens > 256 else 1
    _choose[(cdiv(tokens, rows),)](
        logits,
        correction if correction is not None else logits,
        chosen,
        shares,
        tokens,
        logits.stride(0),
        **options,
        ROWS=rows,
        EARLY=uses_pdl(),
        num_warps=4 if rows * options["COLS"] >= 512 else 1,
        **pdl_launch_options(uses_pdl()),
    )
    return shares, chosen


def _choice_options(logits: Tensor, moe: MoeSpec, correction: Tensor | None) -> dict[str, Any]:
    """Return the constants of `_best_of` but ROWS."""
    experts, top_k, router = logits.shape[1], moe.top_k, moe.router
    assert 0 < top_k <= experts == moe.experts, (top_k, experts, moe)
    assert logits.stride(1) == 1, logits.stride()
    assert correction is None or (correction.dtype == torch.float32 and correction.is_contiguous())
    assert router.scoring is not Scoring.SOFTMAX_OF_CHOSEN or not (router.correction or router.grouped), (
        router
    )
    groups = router.groups if router.grouped else 1
    group_cols = next_power_of_2(groups)
    return {
        "EXPERTS": experts,
        "COLS": group_cols * next_power_of_2(experts // groups),
        "TOP": top_k,
        "TOP_COLS": next_power_of_2(top_k),
        "SIGMOID": router.scoring is Scoring.SIGMOID,
        "NORMALISE": router.normalise or router.scoring is Scoring.SOFTMAX_OF_CHOSEN,
        "CORRECTION": correction is not None,
        "SCALE": router.scale,
        "TINY": TINY if router.scoring is Scoring.SIGMOID else 0.0,
        "GROUPS": groups,
        "GROUP_COLS": group_cols,
        "TOP_GROUPS": router.top_groups if groups > 1 else 1,
    }


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
    EARLY: tl.constexpr,
) -> None:
    """Write one expert's pairs, and its blocks. Every program counts all pairs, to know where its own begin;
    the first ends the list."""
    in_turn(EARLY)
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
    chunk = min(_CHUNK, max(128, next_power_of_2(pairs)))
    _arrange[(experts,)](
        chosen,
        order,
        blocks,
        counts,
        pairs,
        bound,
        EXPERTS=experts,
        BINS=max(32, next_power_of_2(experts + 1)),
        CHUNK=chunk,
        ROWS=rows,
        WIDE=32,
        EARLY=uses_pdl(),
        num_warps=8 if chunk > 1024 else 4,
        **pdl_launch_options(uses_pdl()),
    )
    return order, blocks, counts


@triton.jit  # type: ignore[untyped-decorator]
def _route_one(  # type: ignore[no-untyped-def]
    logits,
    correction,
    shares,
    order,
    blocks,
    counts,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
    TOP: tl.constexpr,
    TOP_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    CORRECTION: tl.constexpr,
    SCALE: tl.constexpr,
    TINY: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_COLS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BINS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Choose the experts of a single token, ROWS being 1, and arrange its pairs: TOP blocks of one pair."""
    in_turn(EARLY)
    row, ranks, bins = tl.arange(0, ROWS), tl.arange(0, TOP_COLS), tl.arange(0, BINS)
    expert, share = _best_of(
        logits, correction, row, 1, 0, EXPERTS, COLS, TOP, TOP_COLS, ROWS, SIGMOID, NORMALISE,
        CORRECTION, SCALE, TINY, GROUPS, GROUP_COLS, TOP_GROUPS,
    )  # fmt: skip
    taken = ranks < TOP
    tl.store(shares + ranks, tl.reshape(share, [TOP_COLS]).to(shares.dtype.element_ty), mask=taken)
    # Places without a pair have an expert behind all others.
    every = tl.where(taken, tl.reshape(expert, [TOP_COLS]), EXPERTS)
    place = tl.sum((every[:, None] < every[None, :]).to(tl.int32), 0)
    tl.store(order + place, ranks, mask=taken)
    tl.store(blocks + place, every, mask=taken)
    tl.store(blocks + TOP + place, place, mask=taken)
    tl.store(blocks + 2 * TOP + place, place + 1, mask=taken)
    count = tl.sum((every[:, None] == bins[None, :]).to(tl.int32), 0)
    tl.store(counts + bins, count, mask=bins < EXPERTS)


def route(
    logits: Tensor, moe: MoeSpec, correction: Tensor | None, padding: Tensor | None, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each token's shares, as `choose`, and the pairs of its experts, as `arrange`: their order, their
    blocks of at most `rows`, and how many each expert has.

    padding: bool `[tokens]`, tokens that take what the first one takes, not being padding.
    """
    (tokens, experts), top_k = logits.shape, moe.top_k
    if tokens != 1:
        shares, chosen = choose(logits, moe, correction)
        if padding is not None:
            chosen = torch.where(padding.unsqueeze(1), chosen[:1], chosen)
        return shares, *arrange(chosen, experts, rows)
    options = _choice_options(logits, moe, correction)
    shares = torch.empty(1, top_k, dtype=logits.dtype, device=logits.device)
    order = torch.empty(top_k, dtype=torch.int32, device=logits.device)
    blocks = torch.empty(3, top_k, dtype=torch.int32, device=logits.device)
    counts = torch.empty(experts, dtype=torch.int32, device=logits.device)
    _route_one[(1,)](
        logits,
        correction if correction is not None else logits,
        shares,
        order,
        blocks,
        counts,
        **options,
        ROWS=1,
        BINS=next_power_of_2(experts),
        EARLY=uses_pdl(),
        num_warps=4 if options["COLS"] >= 512 else 1,
        **pdl_launch_options(uses_pdl()),
    )
    return shares, order, blocks, counts
