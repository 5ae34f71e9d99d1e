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
    """Return what the PTX makes, by plain arithmetic in float32."""
    none = tl.zeros(given[0].shape, tl.float32)
    sums = (none, none, none, none)
    more = sums
    for place in tl.static_range(PLACES):
        quarter: tl.constexpr = place * 4 // PLACES
        for word in tl.static_range(4):
            own = plain_number(given[word], place, KIND, ZEROS)
            other = plain_number(given[4 + word], place, KIND, ZEROS)
            if ZEROS:
                own -= zeros[quarter].to(tl.float32)
                other -= zeros[4 + quarter].to(tl.float32)
            if SCALED:
                own *= scale_of(scales[quarter], SCALES)
                other *= scale_of(scales[4 + quarter], SCALES)
            pair = given[8 + 2 * place * WIDE + word // 2]
            a, b = _by_lanes(own, pair, word % 2, HALF)
            c, d = _by_lanes(other, pair, word % 2, HALF)
            sums = (sums[0] + a, sums[1] + b, sums[2] + c, sums[3] + d)
            if WIDE == 2:
                pair = given[8 + 2 * (place * WIDE + 1) + word // 2]
                a, b = _by_lanes(own, pair, word % 2, HALF)
                c, d = _by_lanes(other, pair, word % 2, HALF)
                more = (more[0] + a, more[1] + b, more[2] + c, more[3] + d)
    return sums + more


@triton.jit  # type: ignore[untyped-decorator]
def _by_lanes(numbers, pair, which: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the products of numbers of codes with one of each pair of activations, summed over the four
    lanes of a row: for the row of a lane, two numbers, which are of two rows of activations."""
    WARPS: tl.constexpr = numbers.shape[1]
    TILES: tl.constexpr = numbers.shape[2]
    if HALF:
        some = (pair >> 16 * which).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        some = (pair << 16 if which == 0 else pair & -65536).to(tl.float32, bitcast=True)
    left = tl.reshape(numbers, (8, 1, 4, WARPS, TILES))
    right = tl.reshape(some, (1, 8, 4, WARPS, 1))
    both = tl.reshape(tl.sum(left * right, 2), (32, 2, WARPS, TILES))
    return tl.split(tl.permute(both, (0, 2, 3, 1)))
