"""Chooses each token's experts and their shares, for the kernels of `routing`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.arch.spec import MoeSpec, Scoring
from penstock.ops.route import TINY


@triton.jit  # type: ignore[untyped-decorator]
def _ranked(score, low, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return keys that have the order of scores, and of equal scores the order of `low`, all different.

    Keys have 64 bits. NARROW: they have 32, the largest of which a warp finds by one instruction; scores have
    the precision of bfloat16, and `low` has 16 bits.
    """
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # one zero, not two
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if NARROW:
        return (order >> 16 << 16) | low
    else:
        return (order.to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _score_of(key, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the score of a key."""
    order = key if NARROW else (key >> 32).to(tl.int32)
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    if NARROW:
        bits = bits >> 16 << 16
    return bits.to(tl.float32, bitcast=True)


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
    left = tl.where(
        group < GROUPS,
        _ranked(_score_of(first, False) + _score_of(second, False), GROUPS - group, False),
        LEAST,
    )
    best = tl.zeros([ROWS, GROUP_COLS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        highest = tl.max(left, 1)[:, None]
        best = tl.where(left == highest, 1, best)
        left = tl.where(left == highest, LEAST, left)
    return tl.reshape(tl.where(best[:, :, None] == 1, each, LEAST), [ROWS, COLS])


@triton.jit  # type: ignore[untyped-decorator]
def best_of(  # type: ignore[no-untyped-def]
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
    NARROW: tl.constexpr = BY_LOGITS and logits.dtype.element_ty == tl.bfloat16 and EXPERTS < 1 << 16
    LEAST: tl.constexpr = -(1 << 31) if NARROW else -(1 << 63)
    choice = score
    if CORRECTION:
        choice += tl.load(correction + cols, mask=inside, other=0.0)
    key = tl.where(inside, _ranked(choice, EXPERTS - cols, NARROW), LEAST)
    if TOP_GROUPS < GROUPS:
        key = _of_best_groups(key, ROWS, COLS, GROUPS, GROUP_COLS, TOP_GROUPS, LEAST)
    best = tl.full([ROWS, TOP_COLS], LEAST, key.dtype)
    value = tl.zeros([ROWS, TOP_COLS], tl.float32)
    for rank in tl.static_range(TOP):
        highest = tl.max(key, 1)[:, None]
        best = tl.where(ranks == rank, highest, best)
        if CORRECTION:
            value = tl.where(ranks == rank, tl.sum(tl.where(key == highest, score, 0.0), 1)[:, None], value)
        key = tl.where(key == highest, LEAST, key)
    if not CORRECTION:
        value = _score_of(best, NARROW)
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
    return EXPERTS - (best & (0xFFFF if NARROW else 0xFFFFFFFF)).to(tl.int32), share


def choice_options(logits: Tensor, moe: MoeSpec, correction: Tensor | None) -> dict[str, Any]:
    """Return the constants of `best_of` but ROWS."""
    experts, top_k, router = logits.shape[1], moe.top_k, moe.router
    assert 0 < top_k <= experts == moe.experts, (top_k, experts, moe)
    assert logits.stride(1) == 1, logits.stride()
    assert correction is None or (correction.dtype == torch.float32 and correction.is_contiguous())
    assert router.scoring is not Scoring.SOFTMAX_OF_CHOSEN or not (router.correction or router.grouped), (
        router
    )
    groups = router.groups if router.grouped else 1
    group_cols = triton.next_power_of_2(groups)
    return {
        "EXPERTS": experts,
        "COLS": group_cols * triton.next_power_of_2(experts // groups),
        "TOP": top_k,
        "TOP_COLS": triton.next_power_of_2(top_k),
        "SIGMOID": router.scoring is Scoring.SIGMOID,
        "NORMALISE": router.normalise or router.scoring is Scoring.SOFTMAX_OF_CHOSEN,
        "CORRECTION": correction is not None,
        "SCALE": router.scale,
        "TINY": TINY if router.scoring is Scoring.SIGMOID else 0.0,
        "GROUPS": groups,
        "GROUP_COLS": group_cols,
        "TOP_GROUPS": router.top_groups if groups > 1 else 1,
    }
