"""Shares, among the kernels that draw tokens, their notes of a row, and likelihoods as integers and bins.

`sampling` describes the whole algorithm.
"""

import triton
import triton.language as tl

UNITS = tl.constexpr(2.0**42)
"""Likelihood of the likeliest token, in units."""
REACH = tl.constexpr(29.2)
"""Nats below the likeliest token at which a likelihood falls below one unit: 42 * ln 2 is less."""
NONE = tl.constexpr(-(1 << 31))
"""An integer below those of all numbers."""

# A row's tally has, in this order: the integers of its likeliest token and of the bound, and the sum of all
# likelihoods; the bin that top-k ends in, the tokens in the bins above it, and their likelihood; the first
# and last bin that top-p may end in, and the likelihood above them; the listed tokens; the best of the race
# as yet; and the programs that have ended each look. Behind these are each chunk's tokens at the threshold,
# each bin's likelihood and each bin's tokens.
PEAK, BOUND, ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
CUT, CUT_COUNT, CUT_MASS = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
FIRST, LAST, FIRST_MASS = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
COUNT, BEST, ENDED, TIES = tl.constexpr(9), tl.constexpr(10), tl.constexpr(11), tl.constexpr(13)


@triton.jit  # type: ignore[untyped-decorator]
def read_wish(asked, draw, VOCAB, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a draw's row, temperature, top-k (0 where it leaves all) and top-p."""
    of = asked + draw * FIELDS
    most = tl.load(of + 2)
    most = tl.where((most > 0) & (most < VOCAB), most, 0.0).to(tl.int32)
    return tl.load(of).to(tl.int64), tl.load(of + 1).to(tl.float32), most, tl.load(of + 3)


@triton.jit  # type: ignore[untyped-decorator]
def read_least(asked, draw, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a draw's min-p: the first float32 number that is not below it."""
    wish = tl.load(asked + draw * FIELDS + 4)
    least = wish.to(tl.float32)
    return tl.where(least.to(tl.float64) < wish, number_of(order_of(least) + 1), least)


@triton.jit  # type: ignore[untyped-decorator]
def tally_of(tally, draw, chunks, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where a draw's tally begins."""
    return tally + draw.to(tl.int64) * (TIES + chunks + 2 * BINS)


@triton.jit  # type: ignore[untyped-decorator]
def notes_of(notes, draw, chunks, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where a draw's notes begin.

    They are, for each chunk, its highest logit, its lowest, and its likelihood relative to the highest; then
    the highest logits of EACH groups.
    """
    return notes + draw.to(tl.int64) * chunks * (3 + EACH)


@triton.jit
def is_last(counter, programs):  # type: ignore[no-untyped-def]
    """Tell whether all other programs of the row have counted themselves in."""
    tl.debug_barrier()  # all threads' stores before the count of one
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1


@triton.jit
def load_logits(row, ids, VOCAB):  # type: ignore[no-untyped-def]
    """Load logits. NaN becomes -inf, an impossible token, since its bin would be anywhere."""
    each = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf"))
    return tl.where(each == each, each, float("-inf"))


@triton.jit
def load_warm(row, heat, ids, VOCAB):  # type: ignore[no-untyped-def]
    """Load logits divided by the temperature."""
    return tl.div_rn(load_logits(row, ids, VOCAB), heat)


@triton.jit
def order_of(warm):  # type: ignore[no-untyped-def]
    """Return float32 numbers as integers in the same order; the two zeros are one."""
    bits = tl.where(warm == 0.0, 0.0, warm).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_of(order):  # type: ignore[no-untyped-def]
    """Return the number that `order_of` makes this integer of."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def below_of(warm, peak):  # type: ignore[no-untyped-def]
    """Return how far logits are from the likeliest token's, which may be infinite: 0 or less."""
    return tl.where(warm == peak, 0.0, warm - peak)


@triton.jit
def mass_of(warm, peak):  # type: ignore[no-untyped-def]
    """Return likelihoods in units."""
    return (tl.exp(below_of(warm, peak)) * UNITS).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def bin_of(warm, order, peak, bound, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return each logit's bin, of BINS equal ones between the likeliest token and the bound; BINS if
    beyond."""
    width = peak - number_of(bound)
    # The last bin is half as wide, so that rounding makes no further one.
    scale = tl.div_rn(tl.full((), BINS - 0.5, tl.float32), tl.maximum(width, 1e-30))
    place = tl.minimum(peak - warm, width) * scale
    # Infinity less infinity is NaN, which belongs to the first bin.
    place = tl.where(place > 0.0, place, 0.0)
    return tl.where(order >= bound, place.to(tl.int32), BINS)


@triton.jit
def goal_of(nucleus, mass):  # type: ignore[no-untyped-def]
    """Return the likelihood, in units, that top-p asks for at least."""
    return tl.maximum(tl.minimum(tl.ceil(nucleus * mass.to(tl.float64)).to(tl.int64), mass), 1)


@triton.jit  # type: ignore[untyped-decorator]
def read_ends(known, most, nucleus, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the results of the first two looks at a row.

    They are the likeliest token's logit by the temperature, the integer of the bound, the bin that top-k ends
    in, and the first and last bin that top-p may end in.
    """
    ends = (most > 0) | (nucleus < 1)
    cut = tl.load(known + CUT, mask=ends, other=BINS).to(tl.int32)
    first = tl.load(known + FIRST, mask=ends, other=BINS).to(tl.int32)
    last = tl.load(known + LAST, mask=ends, other=BINS).to(tl.int32)
    return number_of(tl.load(known + PEAK)), tl.load(known + BOUND).to(tl.int32), cut, first, last
