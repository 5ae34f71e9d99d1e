"""The draw of a row's token in one program, without a sort.

What top-k and top-p leave are the tokens above a threshold, and of those that are at it the first few. Each threshold is searched for
among all float32 numbers, in order as integers, by how many tokens, or how much likelihood, there are from a number on: three numbers at
each look at the row, so there are at most sixteen looks, and about half as many where the search can end as soon as it parts two tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
"""Of a vocabulary, looked at at a time."""
_FIELDS = 6
"""Of a draw: row, temperature, top-k, top-p, min-p and the number that decides."""


@triton.jit  # type: ignore[untyped-decorator]
def _look(row, heat, at, VOCAB, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of the vocabulary from `at` on: its ids, its logits by the temperature, and those as integers in the same order, which for
    what is beyond the end is below all others."""
    ids = at + tl.arange(0, BLOCK)
    warm = tl.div_rn(tl.load(row + ids, mask=ids < VOCAB, other=float("-inf")), heat)
    bits = tl.where(warm == 0.0, 0.0, warm).to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return ids, warm, tl.where(ids < VOCAB, order, -(1 << 31))


@triton.jit  # type: ignore[untyped-decorator]
def _from(row, heat, peak, first, second, third, VOCAB, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """From each of three integers on: how many tokens there are, and how much likelihood."""
    n1, n2, n3 = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    m1, m2, m3 = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for at in range(0, VOCAB, BLOCK):
        _, warm, order = _look(row, heat, at, VOCAB, BLOCK)
        likelihood = tl.exp(warm - peak).to(tl.float64)
        n1 += tl.sum((order >= first).to(tl.int32), 0)
        n2 += tl.sum((order >= second).to(tl.int32), 0)
        n3 += tl.sum((order >= third).to(tl.int32), 0)
        m1 += tl.sum(tl.where(order >= first, likelihood, 0.0), 0)
        m2 += tl.sum(tl.where(order >= second, likelihood, 0.0), 0)
        m3 += tl.sum(tl.where(order >= third, likelihood, 0.0), 0)
    return n1, n2, n3, m1, m2, m3


@triton.jit  # type: ignore[untyped-decorator]
def _threshold(row, heat, peak, low, high, most, goal, VOCAB, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the integers in [low, high) the last from which on there are `most` tokens and `goal` of likelihood, as there are from `low` on
    and not from `high` on: itself, how many tokens are beyond it and how much likelihood, and whether all that are at it are wanted."""
    n_low, n_high, m_high = tl.full((), VOCAB, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64)
    # The only token between the two is wanted; then it need not be known where it is.
    while (high - low > 1) & (n_low - n_high != 1):
        width = high - low
        first, second, third = low + tl.maximum(width // 4, 1), low + width // 2, low + tl.maximum(width * 3 // 4, 1)
        n1, n2, n3, m1, m2, m3 = _from(row, heat, peak, first, second, third, VOCAB, BLOCK)
        one, two, three = (n1 >= most) & (m1 >= goal), (n2 >= most) & (m2 >= goal), (n3 >= most) & (m3 >= goal)
        n_high = tl.where(three, n_high, tl.where(two, n3, tl.where(one, n2, n1)))
        m_high = tl.where(three, m_high, tl.where(two, m3, tl.where(one, m2, m1)))
        high = tl.where(three, high, tl.where(two, third, tl.where(one, second, first)))
        n_low = tl.where(three, n3, tl.where(two, n2, tl.where(one, n1, n_low)))
        low = tl.where(three, third, tl.where(two, second, tl.where(one, first, low)))
    return low, n_high, m_high, n_low - n_high == 1


@triton.jit
def _likelihood(order, peak):  # type: ignore[no-untyped-def]
    """Of a token whose logit is this integer."""
    bits = order.to(tl.int32)
    return tl.exp((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True) - peak).to(tl.float64)


@triton.jit  # type: ignore[untyped-decorator]
def _draw(logits, asked, tokens, s_logits, VOCAB, BLOCK: tl.constexpr, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    of = asked + tl.program_id(0) * FIELDS
    place = tl.load(of).to(tl.int64)
    row = logits + place * s_logits
    heat, most = tl.load(of + 1).to(tl.float32), tl.load(of + 2).to(tl.int32)
    nucleus, least, number = tl.load(of + 3), tl.load(of + 4), tl.load(of + 5)
    peak, top = tl.full((), float("-inf"), tl.float32), tl.full((), -(1 << 31), tl.int64)
    for at in range(0, VOCAB, BLOCK):
        _, warm, order = _look(row, heat, at, VOCAB, BLOCK)
        peak, top = tl.maximum(peak, tl.max(warm, 0)), tl.maximum(top, tl.max(order, 0))

    # What is left: beyond `edge`, and at it the first `few`.
    edge, few = tl.full((), -(1 << 31), tl.int64), tl.full((), 0, tl.int32)
    if (most > 0) & (most < VOCAB):
        low, beyond, _, whole = _threshold(row, heat, peak, edge, top + 1, most, float("-inf"), VOCAB, BLOCK)
        edge, few = tl.where(whole, low - 1, low), tl.where(whole, 0, most - beyond)
    if nucleus < 1:
        _, _, _, mass, _, _ = _from(row, heat, peak, edge + 1, edge + 1, edge + 1, VOCAB, BLOCK)
        goal = nucleus * (mass + tl.where(few > 0, few * _likelihood(edge, peak), 0.0))
        low, _, mass, whole = _threshold(row, heat, peak, edge, top + 1, 0, goal, VOCAB, BLOCK)
        each = _likelihood(low, peak)
        some = tl.minimum((goal - mass) / tl.where(each > 0, each, 1.0), VOCAB - 1.0).to(tl.int32)
        some += (mass + some * each < goal).to(tl.int32)
        some = tl.where(low == edge, tl.minimum(some, few), some)
        edge, few = tl.where(whole, low - 1, low), tl.where(whole, 0, some)
    cut = tl.full((), -1, tl.int32)
    """The last of the first `few`."""
    if few > 0:
        ties = tl.full((), 0, tl.int32)
        for at in range(0, VOCAB, BLOCK):
            ids, _, order = _look(row, heat, at, VOCAB, BLOCK)
            tie = (order == edge).to(tl.int32)
            kept = (tie > 0) & (ties + tl.cumsum(tie, 0) <= few)
            cut, ties = tl.maximum(cut, tl.max(tl.where(kept, ids, -1), 0)), ties + tl.sum(tie, 0)

    total = tl.full((), 0.0, tl.float64)
    for at in range(0, VOCAB, BLOCK):
        _, likelihood = _left(row, heat, peak, at, edge, cut, least, VOCAB, BLOCK)
        total += tl.sum(likelihood, 0)
    goal, sums = number * total, tl.full((), 0.0, tl.float64)
    token, last = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    for at in range(0, VOCAB, BLOCK):
        ids, likelihood = _left(row, heat, peak, at, edge, cut, least, VOCAB, BLOCK)
        part = tl.sum(likelihood, 0)
        if (token < 0) & (sums + part > goal):
            found = tl.min(tl.where((sums + tl.cumsum(likelihood, 0) > goal) & (likelihood > 0), ids, VOCAB), 0)
            token = tl.where(found < VOCAB, found, -1)
        sums += part
        last = tl.maximum(last, tl.max(tl.where(likelihood > 0, ids, 0), 0))
    # A sum may come out below the number's share of itself.
    tl.store(tokens + place, tl.where(token < 0, last, token).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _left(row, heat, peak, at, edge, cut, least, VOCAB, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block's ids and, of those that are left, their likelihoods."""
    ids, warm, order = _look(row, heat, at, VOCAB, BLOCK)
    likelihood = tl.exp(warm - peak).to(tl.float64)
    kept = ((order > edge) | ((order == edge) & (ids <= cut))) & (likelihood >= least)
    return ids, tl.where(kept, likelihood, 0.0)


def draw(logits: Tensor, asked: Tensor, tokens: Tensor) -> None:
    """See `penstock.ops.sampling.draw`."""
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    assert asked.dtype == torch.float64, asked.dtype
    assert asked.shape[1] == _FIELDS, asked.shape
    assert asked.is_contiguous()
    assert tokens.dtype == torch.int64, tokens.dtype
    assert tokens.shape == logits.shape[:1], (tokens.shape, logits.shape)
    assert tokens.is_contiguous()
    if len(asked) == 0:
        return
    vocab = logits.shape[1]
    block = min(_BLOCK, max(128, triton.next_power_of_2(vocab)))
    _draw[(len(asked),)](logits, asked, tokens, logits.stride(0), vocab, BLOCK=block, FIELDS=_FIELDS, num_warps=16 if block > 2048 else 4)
