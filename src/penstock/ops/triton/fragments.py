"""Computes the products of a warp with codes of few bits: by PTX where kernels are compiled, and by plain
arithmetic where they are interpreted."""

import triton
import triton.language as tl

from penstock.ops.triton.codes import paired, plain_number, scale_of


@triton.jit  # type: ignore[untyped-decorator]
def warp_products(  # type: ignore[no-untyped-def]
    place,
    given,
    scales,
    zeros,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALED: tl.constexpr,
    RAW: tl.constexpr,
    ZEROS: tl.constexpr,
    WIDE: tl.constexpr,
    HALF: tl.constexpr,
    LESS: tl.constexpr,
    PTX: tl.constexpr,
    REGISTERS: tl.constexpr,
):
    """Return four sums for each of WIDE; see `ptx.products_of`.

    place: of each thread in its program. given: words, and activations. scales, zeros: as `_beside` has them.
    """
    if PTX == "":
        return _plain_products(given, scales, zeros, KIND, PLACES, SCALES, SCALED, ZEROS, WIDE, HALF)
    if ZEROS:
        given = given + _twice(LESS - zeros[0].to(tl.float32), LESS - zeros[2].to(tl.float32), HALF)
        given = given + _twice(LESS - zeros[4].to(tl.float32), LESS - zeros[6].to(tl.float32), HALF)
    if RAW:
        both = (scales[0].to(tl.int32), scales[4].to(tl.int32))
        given = given + both
    elif SCALED:
        for two in tl.static_range(0, 8, 2):
            one, other = scale_of(scales[two], SCALES), scale_of(scales[two + 1], SCALES)
            given = given + _twice(one, other, HALF)
    place = (place,)
    return tl.inline_asm_elementwise(
        PTX, REGISTERS, place + given, dtype=(tl.float32,) * (4 * WIDE), is_pure=True, pack=1
    )


@triton.jit  # type: ignore[untyped-decorator]
def _twice(one, other, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pairs of the one number twice, and of the other."""
    return paired(one, HALF), paired(other, HALF)


@triton.jit  # type: ignore[untyped-decorator]
def _plain_products(  # type: ignore[no-untyped-def]
    given,
    scales,
    zeros,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALED: tl.constexpr,
    ZEROS: tl.constexpr,
    WIDE: tl.constexpr,
    HALF: tl.constexpr,
):
    """Return what the PTX makes, by plain arithmetic in float32: of all words at once, since the interpreter
    takes its time for each operation. After that of threads there are axes of the two halves of a row's
    words, of the words of a half, and of the two rows."""
    THREADS: tl.constexpr = given[0].shape[0]
    words = tl.join(_four(given[0:4]), _four(given[4:8]))
    none = tl.zeros((THREADS,), tl.float32)
    sums = (none, none, none, none)
    more = sums
    for place in tl.static_range(PLACES):
        quarter: tl.constexpr = place * 4 // PLACES
        numbers = plain_number(words, place, KIND, ZEROS)
        if ZEROS:
            both = tl.join(zeros[quarter], zeros[4 + quarter]).to(tl.float32)
            numbers -= tl.reshape(both, (THREADS, 1, 1, 2))
        if SCALED:
            both = tl.join(scale_of(scales[quarter], SCALES), scale_of(scales[4 + quarter], SCALES))
            numbers *= tl.reshape(both, (THREADS, 1, 1, 2))
        left = tl.reshape(numbers, (THREADS // 32, 8, 1, 4, 4, 2))
        found = _by_lanes(left, given[8 + 2 * place * WIDE : 10 + 2 * place * WIDE], HALF)
        sums = (sums[0] + found[0], sums[1] + found[1], sums[2] + found[2], sums[3] + found[3])
        if WIDE == 2:
            found = _by_lanes(left, given[10 + 2 * place * WIDE : 12 + 2 * place * WIDE], HALF)
            more = (more[0] + found[0], more[1] + found[1], more[2] + found[2], more[3] + found[3])
    return sums + more


@triton.jit
def _four(words):  # type: ignore[no-untyped-def]
    """Return the words of a row, with an axis of the halves and one of what is in each."""
    return tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))


@triton.jit  # type: ignore[untyped-decorator]
def _by_lanes(left, pairs, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the products of numbers of codes with pairs of activations, one for each half of the words,
    summed over these and over the four lanes of a row: for the row of a lane, two numbers, which are of two
    rows of activations, and for the other row two more."""
    WARPS: tl.constexpr = left.shape[0]
    pair = tl.join(pairs[0], pairs[1])
    if HALF:
        low = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (pair << 16).to(tl.float32, bitcast=True)
        high = (pair & -65536).to(tl.float32, bitcast=True)
    right = tl.reshape(tl.join(low, high), (WARPS, 1, 8, 4, 4, 1))
    both = tl.reshape(tl.sum(tl.sum(left * right, 4), 3), (32 * WARPS, 2, 2))
    one, other = tl.split(both)
    a, b = tl.split(one)
    c, d = tl.split(other)
    return a, b, c, d
