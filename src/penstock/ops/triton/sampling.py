"""The draw of a row's token in three looks at its logits, each by many programs at once, without a sort.

What top-k and top-p leave are the tokens above a threshold, and of those that are at it the first few. The
first look finds the likeliest token and, from what little it notes of every chunk, a bound below which the
threshold cannot be. The second, which only rows with a threshold need, counts the tokens from the bound on
and adds up their likelihood, by how far below the likeliest they are, in a thousand bins; so the bin of the
threshold is known. The third adds up, for each chunk, the likelihood of the tokens in the bins above, and
lists those in that bin, which are few. Among these the threshold itself is searched for. Then it is known in
which chunk the number that decides falls, and that chunk alone is gone through, in the order of the
vocabulary.

Why this is exact. Likelihoods are whole numbers, 2**42 that of the likeliest token, and so are their sums:
none is rounded, and two sums of the same tokens are equal wherever they were made. What would be less than
one counts as impossible: a whole vocabulary of such tokens is 1e-7 of the likeliest one, as little as a
float32 exponential may be wrong. Bounds and bins only say where to look. A bin holds an interval of logits,
and what is in it is compared logit by logit; if that is more than the list can hold (thousands within a
hundredth of a nat, or equal), the row is gone through instead.

Why this is deterministic. Whole numbers may be added in any order, and the order of a list changes nothing
that is made of it. A row's result depends on its own logits and wish alone.

Why this is safe. Each program counts itself in after a barrier behind all that it wrote, by an atomic
addition that releases and acquires; the one that finds the others of its row counted sees what they wrote,
and goes on alone. Nobody waits for anybody. The three looks are launches, which the stream orders.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096
"""Tokens of a program."""
_GROUP = 64
"""Of a chunk, of which the first look notes the likeliest token."""
_BINS = 1024
_LISTED = 4096
"""Tokens of a row that may be listed."""
_PART = 1024
"""Of a list, looked at at a time."""
_REGISTERS = 64
"""Of a thread, at most, of the second and the third look: four programs on a multiprocessor, and nothing
spilt."""
_FIELDS = 6
"""Of a draw: row, temperature, top-k, top-p, min-p and the number that decides."""
_LARGEST = 1 << 20
"""Of vocabularies: were all tokens as likely as the likeliest, their sum would still be an int64 number."""

_UNITS = tl.constexpr(2.0**42)
"""Of likelihood, in that of the likeliest token."""
_REACH = tl.constexpr(29.2)
"""Nats below the likeliest token: from there on it is less than a unit, since 42 * ln 2 is less."""
_NONE = tl.constexpr(-(1 << 31))
"""Below the integers of all numbers."""

# Of a row, in the order of its tally: the integers of its likeliest token and of the bound, and all its
# likelihood; the bin that top-k ends in, the tokens in the bins above it, and their likelihood; the bins that
# top-p may end in, and the likelihood above them; how many tokens are listed, and how many programs have
# ended each look. Behind these each chunk's likelihood, each chunk's tokens that are at the threshold, each
# bin's likelihood and each bin's tokens.
_PEAK, _BOUND, _ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_CUT, _CUT_COUNT, _CUT_MASS = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
_FIRST, _LAST, _FIRST_MASS = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
_COUNT, _ENDED, _SUMS = tl.constexpr(9), tl.constexpr(10), tl.constexpr(13)


@triton.jit  # type: ignore[untyped-decorator]
def _wish(asked, draw, VOCAB, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A draw's row, temperature, top-k (0 where it leaves all) and top-p."""
    of = asked + draw * FIELDS
    most = tl.load(of + 2)
    most = tl.where((most > 0) & (most < VOCAB), most, 0.0).to(tl.int32)
    return tl.load(of).to(tl.int64), tl.load(of + 1).to(tl.float32), most, tl.load(of + 3)


@triton.jit  # type: ignore[untyped-decorator]
def _least(asked, draw, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Its min-p: the first float32 number that is not below."""
    wish = tl.load(asked + draw * FIELDS + 4)
    least = wish.to(tl.float32)
    return tl.where(least.to(tl.float64) < wish, _number(_order(least) + 1), least)


@triton.jit  # type: ignore[untyped-decorator]
def _tally_of(tally, draw, chunks, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tally + draw.to(tl.int64) * (_SUMS + 2 * chunks + 2 * BINS)


@triton.jit  # type: ignore[untyped-decorator]
def _notes_of(notes, draw, chunks, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each chunk its likeliest logit, its least likely, its likelihood relative to the likeliest; then the
    likeliest of EACH groups."""
    return notes + draw.to(tl.int64) * chunks * (3 + EACH)


@triton.jit
def _is_last(counter, programs):  # type: ignore[no-untyped-def]
    """Whether all other programs of the row have been here before."""
    tl.debug_barrier()  # all threads' stores before the count of one
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1


@triton.jit
def _logits(row, ids, VOCAB):  # type: ignore[no-untyped-def]
    """What is not a number is impossible: its place among numbers, and so its bin, would be anywhere."""
    each = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf"))
    return tl.where(each == each, each, float("-inf"))


@triton.jit
def _warm(row, heat, ids, VOCAB):  # type: ignore[no-untyped-def]
    """Logits by the temperature."""
    return tl.div_rn(_logits(row, ids, VOCAB), heat)


@triton.jit
def _order(warm):  # type: ignore[no-untyped-def]
    """Float32 numbers as integers in the same order; the two zeros are one."""
    bits = tl.where(warm == 0.0, 0.0, warm).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(order):  # type: ignore[no-untyped-def]
    """The number whose integer this is."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(warm, peak, least):  # type: ignore[no-untyped-def]
    """Likelihoods in units; nothing where they are below `least`."""
    likelihood = tl.where(warm == peak, 1.0, tl.exp(warm - peak))  # The likeliest may be infinite.
    return tl.where(likelihood >= least, likelihood * _UNITS, 0.0).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _bin(warm, order, peak, bound, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """In which of the equal parts of what is between the likeliest token and the bound; BINS if beyond."""
    width = peak - _number(bound)
    scale = tl.div_rn(
        tl.full((), BINS - 0.5, tl.float32), tl.maximum(width, 1e-30)
    )  # The last is half as wide, lest there be one more.
    place = tl.minimum(peak - warm, width) * scale
    place = tl.where(
        place > 0.0, place, 0.0
    )  # What is infinitely below an infinite one is in the first bin too, not in none.
    return tl.where(order >= bound, place.to(tl.int32), BINS)


@triton.jit
def _goal(nucleus, mass):  # type: ignore[no-untyped-def]
    """The likelihood, in units, that top-p asks for at least."""
    return tl.maximum(tl.minimum(tl.ceil(nucleus * mass.to(tl.float64)).to(tl.int64), mass), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _peaks(  # type: ignore[no-untyped-def]
    logits,
    asked,
    tally,
    notes,
    s_logits,
    VOCAB,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    BINS: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """The first look."""
    chunk, draw, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    EACH: tl.constexpr = CHUNK // GROUP
    known, own = _tally_of(tally, draw, chunks, BINS), _notes_of(notes, draw, chunks, EACH)
    place, heat, most, nucleus = _wish(asked, draw, VOCAB, FIELDS)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    each = _logits(logits + place * s_logits, ids, VOCAB)
    top = tl.max(each, 0)
    tl.store(own + chunk, top)
    if (most > 0) | (nucleus < 1):
        tl.store(own + chunks + chunk, tl.min(tl.where(each > float("-inf"), each, float("inf")), 0))
    if most > 0:
        groups = chunk * EACH + tl.arange(0, EACH)
        tl.store(own + 3 * chunks + groups, tl.max(tl.reshape(each, [EACH, GROUP]), 1))
    elif nucleus < 1:
        shares = tl.where(
            each == top, 1.0, tl.exp((each - tl.where(top > float("-inf"), top, 0.0)) * (1 / heat))
        )
        tl.store(own + 2 * chunks + chunk, tl.sum(shares, 0))
    if _is_last(known + _ENDED, chunks):
        peak, bound = _bound(own, chunks, heat, most, nucleus, VOCAB, CHUNKS, EACH)
        tl.store(known + _PEAK, _order(peak).to(tl.int64))
        tl.store(known + _BOUND, _order(bound).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _bound(own, chunks, heat, most, nucleus, VOCAB, CHUNKS: tl.constexpr, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The likeliest token by the temperature, and a number below which neither top-k nor top-p ends, unless
    where likelihood does."""
    each = tl.arange(0, CHUNKS)
    tops = tl.div_rn(tl.load(own + each, mask=each < chunks, other=float("-inf"), cache_modifier=".cg"), heat)
    peak = tl.max(tops, 0)
    bound = peak - _REACH
    if (most > 0) | (nucleus < 1):
        floors = tl.load(own + chunks + each, mask=each < chunks, other=float("inf"), cache_modifier=".cg")
        bound = tl.maximum(bound, tl.div_rn(tl.min(floors, 0), heat))
    if most > 0:
        # If the likeliest of as many groups are from it on, so are as many tokens. How many steps down that
        # is, bit by bit.
        BITS: tl.constexpr = 10
        groups = tl.arange(0, CHUNKS * EACH)
        highs = tl.load(
            own + 3 * chunks + groups, mask=groups < chunks * EACH, other=float("-inf"), cache_modifier=".cg"
        )
        highs = tl.div_rn(highs, heat)
        below = tl.where(highs == peak, 0.0, peak - highs)
        steps = (tl.minimum(below, 2 * _REACH) * ((1 << BITS) / _REACH)).to(tl.int32)
        step = tl.full((), 0, tl.int32)
        for bit in tl.static_range(BITS):
            further = step + (1 << (BITS - 1 - bit))
            step = tl.where(tl.sum((steps < further).to(tl.int32), 0) < most, further, step)
        near = steps <= step
        enough = tl.sum(near.to(tl.int32), 0) >= most
        bound = tl.where(enough, tl.maximum(bound, tl.min(tl.where(near, highs, peak), 0)), bound)
    elif nucleus < 1:
        # Were all tokens just below it, they would not have as much as top-p leaves out. A hundredth for what
        # is rounded.
        shares = tl.load(own + 2 * chunks + each, mask=each < chunks, other=0.0, cache_modifier=".cg")
        mean = tl.sum(shares * tl.where(tops == peak, 1.0, tl.exp(tops - peak)), 0) / VOCAB
        bound = tl.maximum(bound, peak + tl.minimum(tl.log((1 - nucleus).to(tl.float32) * mean), 0.0) - 0.01)
    return peak, bound


# Where the compiler knows nothing of a row's alignment, neighbouring threads have neighbouring tokens, as
# atomic additions and scattered stores want them; else it would first exchange all of them between threads.
@triton.jit(do_not_specialize=["s_logits"])  # type: ignore[untyped-decorator]
def _bins(  # type: ignore[no-untyped-def]
    logits,
    asked,
    tally,
    notes,
    s_logits,
    VOCAB,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BINS: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """The second look."""
    chunk, draw, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    place, heat, most, nucleus = _wish(asked, draw, VOCAB, FIELDS)
    if (most > 0) | (nucleus < 1):
        known, own = _tally_of(tally, draw, chunks, BINS), _notes_of(notes, draw, chunks, CHUNK // GROUP)
        masses = known + _SUMS + 2 * chunks
        counts = masses + BINS
        peak, bound = _number(tl.load(known + _PEAK)), tl.load(known + _BOUND).to(tl.int32)
        # Top-p alone goes by the likelihood of all tokens.
        if (most == 0) | (_order(tl.div_rn(tl.load(own + chunk), heat)) >= bound):
            warm = _warm(logits + place * s_logits, heat, chunk * CHUNK + tl.arange(0, CHUNK), VOCAB)
            bins = _bin(warm, _order(warm), peak, bound, BINS)
            if most > 0:
                tl.atomic_add(counts + bins, 1, mask=bins < BINS, sem="relaxed", scope="gpu")
            if nucleus < 1:
                mass = _mass(warm, peak, 0.0)
                tl.atomic_add(masses + bins, mass, mask=bins < BINS, sem="relaxed", scope="gpu")
                if most == 0:
                    tl.atomic_add(known + _ALL, tl.sum(mass, 0), sem="relaxed", scope="gpu")
        if _is_last(known + _ENDED + 1, chunks):
            _choose(known, masses, counts, most, nucleus, BINS)


@triton.jit  # type: ignore[untyped-decorator]
def _choose(known, masses, counts, most, nucleus, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bin that top-k ends in, BINS if there is none, and those that top-p may end in, since that depends
    on how many of the tokens in that bin top-k leaves. Without top-p they are the same."""
    bins = tl.arange(0, BINS)
    cut, above = tl.full((), BINS, tl.int32), tl.full((), 0, tl.int64)
    if most > 0:
        count = tl.load(counts + bins, cache_modifier=".cg")
        cut = tl.sum((tl.cumsum(count, 0) < most).to(tl.int32), 0)
        above = tl.sum(tl.where(bins < cut, count, 0), 0)
    first, last, least, before = cut, cut, tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if nucleus < 1:
        mass = tl.load(masses + bins, cache_modifier=".cg")
        passed = tl.cumsum(mass, 0)
        least = tl.sum(tl.where(bins < cut, mass, 0), 0)
        every = tl.load(known + _ALL, cache_modifier=".cg")
        low, high = (
            tl.where(most > 0, least, every),
            tl.where(most > 0, tl.sum(tl.where(bins <= cut, mass, 0), 0), every),
        )
        end = tl.minimum(cut, BINS - 1)
        first = tl.minimum(tl.sum((passed < _goal(nucleus, low)).to(tl.int32), 0), end)
        last = tl.minimum(tl.sum((passed < _goal(nucleus, high)).to(tl.int32), 0), end)
        before = tl.sum(tl.where(bins < first, mass, 0), 0)
    tl.store(known + _CUT, cut.to(tl.int64))
    tl.store(known + _CUT_COUNT, above)
    tl.store(known + _CUT_MASS, least)
    tl.store(known + _FIRST, first.to(tl.int64))
    tl.store(known + _LAST, last.to(tl.int64))
    tl.store(known + _FIRST_MASS, before)


@triton.jit(do_not_specialize=["s_logits"])  # type: ignore[untyped-decorator]  # as in the second
def _sums(  # type: ignore[no-untyped-def]
    logits,
    asked,
    tally,
    notes,
    listed,
    s_logits,
    VOCAB,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BINS: tl.constexpr,
    LISTED: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """The third look."""
    chunk, draw, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    known, own = _tally_of(tally, draw, chunks, BINS), _notes_of(notes, draw, chunks, CHUNK // GROUP)
    place, heat, most, nucleus = _wish(asked, draw, VOCAB, FIELDS)
    least = _least(asked, draw, FIELDS)
    peak, bound, cut, first, last = _places(known, most, nucleus, BINS)
    if _order(tl.div_rn(tl.load(own + chunk), heat)) >= bound:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        warm = _warm(logits + place * s_logits, heat, ids, VOCAB)
        bins = _bin(warm, _order(warm), peak, bound, BINS)
        tl.store(known + _SUMS + chunk, tl.sum(tl.where(bins < first, _mass(warm, peak, least), 0), 0))
        unsure = ((((bins >= first) & (bins <= last)) | (bins == cut)) & (bins < BINS)).to(tl.int32)
        here = tl.sum(unsure, 0)
        if here > 0:
            at = (
                tl.atomic_add(known + _COUNT, here, sem="relaxed", scope="gpu").to(tl.int32)
                + tl.cumsum(unsure, 0)
                - 1
            )
            tl.store(listed + draw * LISTED + at, ids, mask=(unsure > 0) & (at < LISTED))


@triton.jit  # type: ignore[untyped-decorator]
def _places(known, most, nucleus, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is known of a row before the third look: the likeliest token by the temperature, the integer of
    the bound, the bin that top-k ends in and those that top-p may end in."""
    ends = (most > 0) | (nucleus < 1)
    cut = tl.load(known + _CUT, mask=ends, other=BINS).to(tl.int32)
    first = tl.load(known + _FIRST, mask=ends, other=BINS).to(tl.int32)
    last = tl.load(known + _LAST, mask=ends, other=BINS).to(tl.int32)
    return _number(tl.load(known + _PEAK)), tl.load(known + _BOUND).to(tl.int32), cut, first, last


@triton.jit  # type: ignore[untyped-decorator]
def _tokens(  # type: ignore[no-untyped-def]
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
    """The draw. Grid [draws]."""
    draw, chunks = tl.program_id(0), (VOCAB + CHUNK - 1) // CHUNK
    known = _tally_of(tally, draw, chunks, BINS)
    place, heat, most, nucleus = _wish(asked, draw, VOCAB, FIELDS)
    peak, bound, cut, first, last = _places(known, most, nucleus, BINS)
    row, listed, count = (
        logits + place * s_logits,
        listed + draw * LISTED,
        tl.load(known + _COUNT).to(tl.int32),
    )
    least, number = _least(asked, draw, FIELDS), tl.load(asked + draw * FIELDS + 5)
    of = (row, heat, peak, bound, listed, count, VOCAB)
    edge, few = _edge(of, known, most, nucleus, cut, first, last, BINS, LISTED, PART)
    _add(of, known + _SUMS, chunks, least, first, edge, few, CHUNK, BINS, LISTED, PART)
    tl.debug_barrier()  # all threads' additions before they are read
    token = _token(of, known + _SUMS, chunks, least, number, edge, few, CHUNK, CHUNKS)
    tl.store(tokens + place, token.to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _edge(  # type: ignore[no-untyped-def]
    of, known, most, nucleus, cut, first, last, BINS: tl.constexpr, LISTED: tl.constexpr, PART: tl.constexpr
):
    """What is left: all beyond the first of two integers, and at it as many tokens as the second says."""
    _, _, peak, bound, _, _, _ = of
    edge, few, none = bound.to(tl.int64) - 1, tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    left = tl.load(known + _CUT_MASS)
    if cut < BINS:
        wanted = most - tl.load(known + _CUT_COUNT)
        low, beyond, mass, with_low, one = _threshold(of, cut, cut, edge, wanted, none, BINS, LISTED, PART)
        edge, few = tl.where(one, low - 1, low), tl.where(one, 0, wanted - beyond)
        left += tl.where(one, with_low, mass + few * _mass(_number(edge), peak, 0.0))
    if nucleus < 1:
        left = tl.where(most > 0, left, tl.load(known + _ALL))
        goal = _goal(nucleus, left) - tl.load(known + _FIRST_MASS)
        below = tl.where(few > 0, edge - 1, edge)
        low, beyond, mass, with_low, one = _threshold(of, first, last, below, none, goal, BINS, LISTED, PART)
        each = tl.maximum(_mass(_number(low), peak, 0.0), 1)
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
    """To each chunk's likelihood that of its tokens that were unsure and are beyond the edge, and to its ties
    those that are at it."""
    _, _, peak, _, _, count, VOCAB = of
    for at in range(0, tl.where(count > LISTED, VOCAB, count), PART):
        ids, warm, order, bins = _unsure(of, at, BINS, LISTED, PART)
        unsure, to = (bins >= first) & (bins < BINS), sums + ids // CHUNK
        tl.atomic_add(to, _mass(warm, peak, least), mask=unsure & (order > edge), sem="relaxed", scope="gpu")
        tl.atomic_add(to + chunks, 1, mask=unsure & (order == edge) & (few > 0), sem="relaxed", scope="gpu")


@triton.jit  # type: ignore[untyped-decorator]
def _token(of, sums, chunks, least, number, edge, few, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of what is left the token at which the number falls."""
    row, heat, peak, _, _, _, VOCAB = of
    each = tl.arange(0, CHUNKS)
    masses = tl.load(sums + each, mask=each < chunks, other=0, cache_modifier=".cg")
    ties = tl.load(sums + chunks + each, mask=each < chunks, other=0, cache_modifier=".cg")
    masses += tl.minimum(tl.maximum(few - tl.cumsum(ties, 0) + ties, 0), ties) * _mass(
        _number(edge), peak, least
    )
    total = tl.sum(masses, 0)
    goal = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    chunk = tl.minimum(tl.sum((tl.cumsum(masses, 0) <= goal).to(tl.int32), 0), chunks - 1)
    goal -= tl.sum(tl.where(each < chunk, masses, 0), 0)
    few -= tl.sum(tl.where(each < chunk, ties, 0), 0)

    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    warm = _warm(row, heat, ids, VOCAB)
    order = _order(warm)
    left = order > edge
    if few > 0:
        tie = order == edge
        left = left | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= few))
    passed = tl.cumsum(tl.where(left, _mass(warm, peak, least), 0), 0)
    return tl.minimum(tl.min(tl.where(passed > goal, ids, VOCAB), 0), VOCAB - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _unsure(of, at, BINS: tl.constexpr, LISTED: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """PART of the tokens that are listed, from `at` on, or of all if the list could not hold them: ids,
    logits by the temperature, these as integers, and bins, which beyond the end are BINS."""
    row, heat, peak, bound, listed, count, VOCAB = of
    places = at + tl.arange(0, PART)
    ids = tl.load(listed + places, mask=(places < count) & (count <= LISTED), other=VOCAB)
    ids = tl.where(count > LISTED, tl.minimum(places, VOCAB), ids)
    warm = _warm(row, heat, ids, VOCAB)
    order = _order(warm)
    return ids, warm, order, tl.where(ids < VOCAB, _bin(warm, order, peak, bound, BINS), BINS)


@triton.jit  # type: ignore[untyped-decorator]
def _concerned(of, first, last, below, at, BINS: tl.constexpr, LISTED: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of these, those in bins [first, last] and beyond `below`: as integers, and in units of likelihood; the
    others _NONE and nothing."""
    _, warm, order, bins = _unsure(of, at, BINS, LISTED, PART)
    inside = (bins >= first) & (bins <= last) & (bins < BINS) & (order > below)
    return tl.where(inside, order, _NONE), tl.where(inside, _mass(warm, of[2], 0.0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _threshold(  # type: ignore[no-untyped-def]
    of, first, last, below, most, goal, BINS: tl.constexpr, LISTED: tl.constexpr, PART: tl.constexpr
):
    """Of the integers beyond `below` the last from which on there are `most` tokens and `goal` of likelihood
    in bins [first, last]: itself, the tokens beyond it, their likelihood, that with all that are at it, and
    whether this is but one token; then that may also be anywhere between the integer and the next token."""
    _, _, _, _, _, count, VOCAB = of
    stop = tl.where(count > LISTED, VOCAB, count)
    highest, lowest = tl.full([PART], _NONE, tl.int32), tl.full([PART], 0x7FFFFFFF, tl.int32)
    n, m = tl.zeros([PART], tl.int32), tl.zeros([PART], tl.int64)
    for at in range(0, stop, PART):
        order, mass = _concerned(of, first, last, below, at, BINS, LISTED, PART)
        inside = order > _NONE
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


def draw(logits: Tensor, asked: Tensor, tokens: Tensor) -> None:
    """See `penstock.ops.sampling.draw`. Four launches, and memory for `_BINS` pairs of int64 numbers and a
    list of each draw."""
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    assert logits.shape[1] <= _LARGEST, logits.shape
    assert asked.dtype == torch.float64, asked.dtype
    assert asked.shape[1] == _FIELDS, asked.shape
    assert asked.is_contiguous()
    assert tokens.dtype == torch.int64, tokens.dtype
    assert tokens.shape == logits.shape[:1], (tokens.shape, logits.shape)
    assert tokens.is_contiguous()
    draws, vocab, device = len(asked), logits.shape[1], logits.device
    if draws == 0:
        return
    chunk = min(_CHUNK, max(2 * _GROUP, triton.next_power_of_2(vocab)))
    chunks = triton.cdiv(vocab, chunk)
    tally = torch.zeros(draws, _SUMS.value + 2 * chunks + 2 * _BINS, dtype=torch.int64, device=device)
    notes = torch.empty(draws, chunks * (3 + chunk // _GROUP), dtype=torch.float32, device=device)
    listed = torch.empty(draws, _LISTED, dtype=torch.int32, device=device)
    sizes = {"CHUNK": chunk, "BINS": _BINS, "FIELDS": _FIELDS, "num_warps": 8 if chunk > 1024 else 4}
    padded, stride = triton.next_power_of_2(chunks), logits.stride(0)
    _peaks[(chunks, draws)](logits, asked, tally, notes, stride, vocab, CHUNKS=padded, GROUP=_GROUP, **sizes)
    _bins[(chunks, draws)](
        logits, asked, tally, notes, stride, vocab, GROUP=_GROUP, maxnreg=_REGISTERS, **sizes
    )
    _sums[(chunks, draws)](
        logits,
        asked,
        tally,
        notes,
        listed,
        stride,
        vocab,
        GROUP=_GROUP,
        LISTED=_LISTED,
        maxnreg=_REGISTERS,
        **sizes,
    )
    _tokens[(draws,)](
        logits,
        asked,
        tally,
        listed,
        tokens,
        stride,
        vocab,
        CHUNKS=padded,
        LISTED=_LISTED,
        PART=_PART,
        **sizes,
    )
