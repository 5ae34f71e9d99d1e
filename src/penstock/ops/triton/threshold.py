"""Ends a draw: finds the exact threshold among the listed tokens, and races those that it leaves.

`sampling` describes the whole algorithm.
"""

import triton
import triton.language as tl

from penstock.ops.triton.bins import (
    ALL,
    BEST,
    COUNT,
    CUT_COUNT,
    CUT_MASS,
    FIRST_MASS,
    NONE,
    TIES,
    below_of,
    bin_of,
    goal_of,
    load_warm,
    mass_of,
    number_of,
    order_of,
    read_ends,
    read_least,
    read_wish,
    tally_of,
)
from penstock.ops.triton.gumbel import race, read_key, token_of, token_words


@triton.jit  # type: ignore[untyped-decorator]
def draw_tokens(  # type: ignore[no-untyped-def]
    logits,
    asked,
    tally,
    listed,
    tokens,
    s_logits,
    VOCAB,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
    LISTED: tl.constexpr,
    PART: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """Draw the tokens. Grid [draws]."""
    draw, chunks = tl.program_id(0), (VOCAB + CHUNK - 1) // CHUNK
    known = tally_of(tally, draw, chunks, BINS)
    place, heat, most, nucleus = read_wish(asked, draw, VOCAB, FIELDS)
    peak, bound, cut, first, last = read_ends(known, most, nucleus, BINS)
    row, listed, count = (
        logits + place * s_logits,
        listed + draw * LISTED,
        tl.load(known + COUNT).to(tl.int32),
    )
    of = (row, heat, peak, bound, listed, count, VOCAB)
    edge, few = _edge(of, known, most, nucleus, cut, first, last, BINS, LISTED, PART)
    end = VOCAB
    if few > 0:
        _count_ties(of, known + TIES, first, edge, CHUNK, BINS, LISTED, PART)
        tl.debug_barrier()  # all threads' additions before they are read
        end = _last_tie(of, known + TIES, chunks, edge, few, CHUNK, CHUNKS)
    key, least, best = read_key(asked, draw, FIELDS), read_least(asked, draw, FIELDS), tl.load(known + BEST)
    for at in range(0, tl.where(count > LISTED, VOCAB, count), PART):
        ids, warm, order, bins = _unsure(of, at, BINS, LISTED, PART)
        below = below_of(warm, peak)
        left = (bins >= first) & (bins < BINS) & (tl.exp(below) >= least)
        left = left & ((order > edge) | ((order == edge) & (few > 0) & (ids <= end)))
        below = tl.where(left, below, float("-inf"))
        if tl.max(below, 0) > float("-inf"):
            best = tl.maximum(best, race(ids, below, token_words(ids, key)))
    tl.store(tokens + place, token_of(best, VOCAB))


@triton.jit  # type: ignore[untyped-decorator]
def _edge(  # type: ignore[no-untyped-def]
    of, known, most, nucleus, cut, first, last, BINS: tl.constexpr, LISTED: tl.constexpr, PART: tl.constexpr
):
    """Return the threshold, as an integer, and how many of the tokens at it are left.

    All tokens with greater integers are left.
    """
    _, _, peak, bound, _, _, _ = of
    edge, few, none = bound.to(tl.int64) - 1, tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    left = tl.load(known + CUT_MASS)
    if cut < BINS:
        wanted = most - tl.load(known + CUT_COUNT)
        low, beyond, mass, with_low, one = _threshold(of, cut, cut, edge, wanted, none, BINS, LISTED, PART)
        edge, few = tl.where(one, low - 1, low), tl.where(one, 0, wanted - beyond)
        left += tl.where(one, with_low, mass + few * mass_of(number_of(edge), peak))
    if nucleus < 1:
        left = tl.where(most > 0, left, tl.load(known + ALL))
        goal = goal_of(nucleus, left) - tl.load(known + FIRST_MASS)
        below = tl.where(few > 0, edge - 1, edge)
        low, beyond, mass, with_low, one = _threshold(of, first, last, below, none, goal, BINS, LISTED, PART)
        each = tl.maximum(mass_of(number_of(low), peak), 1)
        some = (goal - mass + each - 1) // each
        some = tl.where((low == edge) & (few > 0), tl.minimum(some, few), some)
        edge, few = tl.where(one, low - 1, low), tl.where(one, 0, some)
    return edge, few


@triton.jit  # type: ignore[untyped-decorator]
def _count_ties(  # type: ignore[no-untyped-def]
    of,
    ties,
    first,
    edge,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    LISTED: tl.constexpr,
    PART: tl.constexpr,
):
    """Count each chunk's tokens at the threshold."""
    _, _, _, _, _, count, VOCAB = of
    for at in range(0, tl.where(count > LISTED, VOCAB, count), PART):
        ids, _warm, order, bins = _unsure(of, at, BINS, LISTED, PART)
        tie = (bins >= first) & (bins < BINS) & (order == edge)
        tl.atomic_add(ties + ids // CHUNK, 1, mask=tie, sem="relaxed", scope="gpu")


@triton.jit  # type: ignore[untyped-decorator]
def _last_tie(of, ties, chunks, edge, few, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the last of the first `few` tokens at the threshold, in the order of the vocabulary."""
    row, heat, _, _, _, _, VOCAB = of
    each = tl.arange(0, CHUNKS)
    count = tl.load(ties + each, mask=each < chunks, other=0, cache_modifier=".cg")
    chunk = tl.minimum(tl.sum((tl.cumsum(count, 0) < few).to(tl.int32), 0), chunks - 1)
    few -= tl.sum(tl.where(each < chunk, count, 0), 0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    tie = order_of(load_warm(row, heat, ids, VOCAB)) == edge
    return tl.max(tl.where(tie & (tl.cumsum(tie.to(tl.int32), 0) <= few), ids, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _unsure(of, at, BINS: tl.constexpr, LISTED: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return PART of the listed tokens from `at` on, or of all tokens if the list could not hold them.

    Returns ids, logits by the temperature, these as integers, and bins. Beyond the end bins are BINS.
    """
    row, heat, peak, bound, listed, count, VOCAB = of
    places = at + tl.arange(0, PART)
    ids = tl.load(listed + places, mask=(places < count) & (count <= LISTED), other=VOCAB)
    ids = tl.where(count > LISTED, tl.minimum(places, VOCAB), ids)
    warm = load_warm(row, heat, ids, VOCAB)
    order = order_of(warm)
    return ids, warm, order, tl.where(ids < VOCAB, bin_of(warm, order, peak, bound, BINS), BINS)


@triton.jit  # type: ignore[untyped-decorator]
def _concerned(of, first, last, below, at, BINS: tl.constexpr, LISTED: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return those of PART tokens in bins [first, last] and beyond `below`: integers and likelihood.

    The others are NONE and 0.
    """
    _, warm, order, bins = _unsure(of, at, BINS, LISTED, PART)
    inside = (bins >= first) & (bins <= last) & (bins < BINS) & (order > below)
    return tl.where(inside, order, NONE), tl.where(inside, mass_of(warm, of[2]), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _threshold(  # type: ignore[no-untyped-def]
    of, first, last, below, most, goal, BINS: tl.constexpr, LISTED: tl.constexpr, PART: tl.constexpr
):
    """Find the last integer beyond `below` from which on are `most` tokens and `goal` of likelihood.

    They are counted in bins [first, last]. Returns the integer, the tokens beyond it, their likelihood, that
    with all that are at it, and whether this is but one token; then that may also be anywhere between the
    integer and the next token.
    """
    _, _, _, _, _, count, VOCAB = of
    stop = tl.where(count > LISTED, VOCAB, count)
    highest, lowest = tl.full([PART], NONE, tl.int32), tl.full([PART], 0x7FFFFFFF, tl.int32)
    n, m = tl.zeros([PART], tl.int32), tl.zeros([PART], tl.int64)
    for at in range(0, stop, PART):
        order, mass = _concerned(of, first, last, below, at, BINS, LISTED, PART)
        inside = order > NONE
        highest, lowest = tl.maximum(highest, order), tl.minimum(lowest, tl.where(inside, order, 0x7FFFFFFF))
        n, m = n + inside.to(tl.int32), m + mass
    low, high = tl.min(lowest, 0).to(tl.int64), tl.max(highest, 0).to(tl.int64) + 1
    n_low, n_high, m_low, m_high = (
        tl.sum(n, 0),
        tl.full((), 0, tl.int32),
        tl.sum(m, 0),
        tl.full((), 0, tl.int64),
    )
    while (high - low > 1) & (n_low - n_high != 1):
        width = high - low
        one, two, three = (
            low + tl.maximum(width // 4, 1),
            low + width // 2,
            low + tl.maximum(width * 3 // 4, 1),
        )
        n1, n2, n3 = tl.zeros([PART], tl.int32), tl.zeros([PART], tl.int32), tl.zeros([PART], tl.int32)
        m1, m2, m3 = tl.zeros([PART], tl.int64), tl.zeros([PART], tl.int64), tl.zeros([PART], tl.int64)
        for at in range(0, stop, PART):
            order, mass = _concerned(of, first, last, below, at, BINS, LISTED, PART)
            in1, in2, in3 = order >= one.to(tl.int32), order >= two.to(tl.int32), order >= three.to(tl.int32)
            n1, n2, n3 = n1 + in1.to(tl.int32), n2 + in2.to(tl.int32), n3 + in3.to(tl.int32)
            m1, m2, m3 = m1 + tl.where(in1, mass, 0), m2 + tl.where(in2, mass, 0), m3 + tl.where(in3, mass, 0)
        c1, c2, c3, s1, s2, s3 = (
            tl.sum(n1, 0),
            tl.sum(n2, 0),
            tl.sum(n3, 0),
            tl.sum(m1, 0),
            tl.sum(m2, 0),
            tl.sum(m3, 0),
        )
        is1, is2, is3 = (c1 >= most) & (s1 >= goal), (c2 >= most) & (s2 >= goal), (c3 >= most) & (s3 >= goal)
        n_high = tl.where(is3, n_high, tl.where(is2, c3, tl.where(is1, c2, c1)))
        m_high = tl.where(is3, m_high, tl.where(is2, s3, tl.where(is1, s2, s1)))
        high = tl.where(is3, high, tl.where(is2, three, tl.where(is1, two, one)))
        n_low = tl.where(is3, c3, tl.where(is2, c2, tl.where(is1, c1, n_low)))
        m_low = tl.where(is3, s3, tl.where(is2, s2, tl.where(is1, s1, m_low)))
        low = tl.where(is3, three, tl.where(is2, two, tl.where(is1, one, low)))
    return low, n_high, m_high, m_low, n_low - n_high == 1
