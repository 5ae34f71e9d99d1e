"""Makes Gumbel noise in kernels, and races tokens, with the bits of `penstock.ops.gumbel`.

Kernels that call these have to be launched with `enable_fp_fusion=False`: a product and a sum that are
rounded as one have other bits.
"""

import triton
import triton.language as tl

from penstock.ops.gumbel import HALF, LN_2, LOG
from penstock.ops.triton.bins import order_of

_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7 = map(tl.constexpr, LOG)
_LN_2, _HALF = tl.constexpr(LN_2), tl.constexpr(HALF)
LARGEST = tl.constexpr(1 << 20)
"""Largest vocabulary: a token's id is less."""


@triton.jit  # type: ignore[untyped-decorator]
def read_key(asked, draw, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what a draw's noise is made of: its key, and the two words of its position."""
    of = asked + draw * FIELDS
    key = tl.load(of + 5).to(tl.int64) | (tl.load(of + 6).to(tl.int64) << 32)
    position = tl.load(of + 7).to(tl.int64)
    return key, (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)


@triton.jit
def words_of(blocks, key):  # type: ignore[no-untyped-def]
    """Return the four words of each block of four tokens, by Philox4x32-10."""
    key, low, high = key
    # Triton's own has the counter and the words in the order of the paper.
    return tl.philox(key, blocks.to(tl.uint32), low * 0, low, high)


@triton.jit  # type: ignore[untyped-decorator]
def run_words(first, key, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the words of SIZE tokens from `first` on, which a block begins with."""
    one, two, three, four = words_of(first // 4 + tl.arange(0, SIZE // 4), key)
    return tl.interleave(tl.interleave(one, three), tl.interleave(two, four))


@triton.jit
def token_words(ids, key):  # type: ignore[no-untyped-def]
    """Return the words of any tokens."""
    one, two, three, four = words_of(ids // 4, key)
    place = ids % 4
    return tl.where(place < 2, tl.where(place == 0, one, two), tl.where(place == 2, three, four))


@triton.jit
def _log(x, near):  # type: ignore[no-untyped-def]
    """Return logarithms. near: x - 1 where x is beside 1, which may have more digits than x."""
    bits = x.to(tl.int32, bitcast=True)
    power = (bits - _HALF) >> 23
    f = tl.where(power == 0, near, (bits - (power << 23)).to(tl.float32, bitcast=True) - 1.0)
    total = _C0 * f + _C1
    total = total * f + _C2
    total = total * f + _C3
    total = total * f + _C4
    total = total * f + _C5
    total = total * f + _C6
    total = total * f + _C7
    return power.to(tl.float32) * _LN_2 + (f * f * total + f)


@triton.jit
def noise_of(word):  # type: ignore[no-untyped-def]
    """Return the noise that words stand for."""
    below = (word.to(tl.float32) + 0.5) * 2.0**-32
    above = ((word ^ 0xFFFFFFFF).to(tl.uint32).to(tl.float32) + 0.5) * 2.0**-32
    waits = -_log(above, -below)
    return -_log(waits, waits - 1.0)


@triton.jit
def race(ids, below, word):  # type: ignore[no-untyped-def]
    """Return the best of some tokens, as an integer above 0: the greater one is the better.

    Of equally good tokens the lower id is the better.

    below: how far logits are from the likeliest token's, -inf for a token that takes no part.
    """
    place = order_of(below + noise_of(word)).to(tl.int64) + (1 << 31)
    return tl.max(place * LARGEST + (ids ^ (LARGEST - 1)), 0)


@triton.jit
def token_of(best, VOCAB):  # type: ignore[no-untyped-def]
    """Return the token that `race` found."""
    return tl.minimum((best % LARGEST) ^ (LARGEST - 1), VOCAB - 1)
