"""Ends a draw: finds the exact threshold among the listed tokens, and the token at the random number.

`sampling` describes the whole algorithm.
"""

import triton
import triton.language as tl

from penstock.ops.triton.bins import (
    ALL,
    COUNT,
    CUT_COUNT,
    CUT_MASS,
    FIRST_MASS,
    NONE,
    SUMS,
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
    least, number = read_least(asked, draw, FIELDS), tl.load(asked + draw * FIELDS + 5)
    of = (row, heat, peak, bound, listed, count, VOCAB)
    edge, few = _edge(of, known, most, nucleus, cut, first, last, BINS, LISTED, PART)
    _add(of, known + SUMS, chunks, least, first, edge, few, CHUNK, BINS, LISTED, PART)
    tl.debug_barrier()  # all threads' additions before they are read
    token = _token(of, known + SUMS, chunks, least, number, edge, few, CHUNK, CHUNKS)
    tl.store(tokens + place, token.to(tl.int64))


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
        left += tl.where(one, with_low, mass + few * mass_of(number_of(edge), peak, 0.0))
    if nucleus < 1:
        left = tl.where(most > 0, left, tl.load(known + ALL))
        goal = goal_of(nucleus, left) - tl.load(known + FIRST_MASS)
        below = tl.where(few > 0, edge - 1, edge)
        low, beyond, mass, with_low, one = _threshold(of, first, last, below, none, goal, BINS, LISTED, PART)
        each = tl.maximum(mass_of(number_of(low), peak, 0.0), 1)
        some = (goal - mass + each - 1) // each
        some = tl.where((low == edge) & (few > 0), tl.minimum(some, few), some)
        edge, few = tl.where(one, low - 1, low), tl.where(one, 0, some)
    return edge, few


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    of,
    sums,
    chunks,
    least,
    first,
    edge,
    few,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    LISTED: tl.constexpr,
    PART: tl.constexpr,
):
    """Add the unsure tokens beyond the threshold to their chunks' likelihoods, and count those at it."""
    _, _, peak, _, _, count, VOCAB = of
    for at in range(0, tl.where(count > LISTED, VOCAB, count), PART):
        ids, warm, order, bins = _unsure(of, at, BINS, LISTED, PART)
        unsure, to = (bins >= first) & (bins < BINS), sums + ids // CHUNK
        tl.atomic_add(
            to, mass_of(warm, peak, least), mask=unsure & (order > edge), sem="relaxed", scope="gpu"
        )
        tl.atomic_add(to + chunks, 1, mask=unsure & (order == edge) & (few > 0), sem="relaxed", scope="gpu")


@triton.jit  # type: ignore[untyped-decorator]
def _token(of, sums, chunks, least, number, edge, few, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the token at which the random number falls, among those that are left."""
    row, heat, peak, _, _, _, VOCAB = of
    each = tl.arange(0, CHUNKS)
    masses = tl.load(sums + each, mask=each < chunks, other=0, cache_modifier=".cg")
    ties = tl.load(sums + chunks + each, mask=each < chunks, other=0, cache_modifier=".cg")
    masses += tl.minimum(tl.maximum(few - tl.cumsum(ties, 0) + ties, 0), ties) * mass_of(
        number_of(edge), peak, least
    )
    total = tl.sum(masses, 0)
    goal = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    chunk = tl.minimum(tl.sum((tl.cumsum(masses, 0) <= goal).to(tl.int32), 0), chunks - 1)
    goal -= tl.sum(tl.where(each < chunk, masses, 0), 0)
    few -= tl.sum(tl.where(each < chunk, ties, 0), 0)

    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    warm = load_warm(row, heat, ids, VOCAB)
    order = order_of(warm)
    left = order > edge
    if few > 0:
        tie = order == edge
        left = left | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= few))
    passed = tl.cumsum(tl.where(left, mass_of(warm, peak, least), 0), 0)
    return tl.minimum(tl.min(tl.where(passed > goal, ids, VOCAB), 0), VOCAB - 1)


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
    return tl.where(inside, order, NONE), tl.where(inside, mass_of(warm, of[2], 0.0), 0)


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
