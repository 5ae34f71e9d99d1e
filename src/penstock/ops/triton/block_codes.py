"""Take the blocks of GGUF apart as they rest: operands of products of words of codes, and scales of heads.

Operands are made by PTX where kernels are compiled, and by plain arithmetic otherwise. Where the bits of a
code and of its scale lie is said in penstock.arch.formats.gguf_blocks.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from penstock.arch.formats.gguf import BLOCK_TYPES
from penstock.arch.formats.gguf_blocks import LEVELS, RESTING

Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS = (tl.constexpr(kind) for kind in range(10))
_BYTE = tl.constexpr("prmt.b32 $0, $1, 0x47000000, 0x76")
MIDDLES = {"Q5_0": 16, "Q3_K": 4, "Q6_K": 32}
"""Say what is taken away from codes of types without minima, by their names; nothing is from `LEVELS`."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A BlockKind is what kernels have to know of a type of blocks.

    type: its number in `BLOCK_TYPES`.
    unit, words, bits, high, paired, group: as in `Resting`.
    head: words of the heads of a unit.
    leasts: whether groups have minima.
    middle: what is taken away from codes.
    levels: whether codes are those of `LEVELS`.
    """

    type: int
    unit: int
    words: int
    bits: int
    high: int
    paired: bool
    group: int
    head: int
    leasts: bool
    middle: int
    levels: bool


@lru_cache(maxsize=16)
def kind_of(name: str) -> BlockKind:
    """Return what kernels have to know of a type, by its name."""
    rest, levels = RESTING[name], name.startswith("IQ4")
    head = rest.unit // rest.values * rest.head // 4
    leasts = not levels and name not in MIDDLES
    return BlockKind(
        BLOCK_TYPES[name], rest.unit, rest.words, rest.bits, rest.high, rest.paired, rest.group, head, leasts,
        MIDDLES.get(name, 0), levels,
    )  # fmt: skip


@lru_cache(maxsize=64)
def take_apart(kind: BlockKind, dtype: torch.dtype) -> tuple[tuple[str, ...], str]:
    """Return PTX that makes operands in bfloat16 or float16 of two words of codes, and its registers: a pair
    in each. There is one piece for each place, or for each four of codes of `LEVELS`. Where high bits are of
    two runs, the pieces of the second follow.

    Registers: the operands; the two words; the high bits of each, if there are any. A code of n bits becomes
    the highest bits of the mantissa of 2 ** n, so an operand is the code plus 2 ** n. Of codes of `LEVELS` it
    is the level.
    """
    if kind.levels:
        return (_levels(0, dtype), _levels(1, dtype)), ",".join(["=r"] * 4 + ["r"] * 2)
    count, width = 32 // kind.bits, kind.bits + kind.high
    mantissa, one = (10, 15 << 10) if dtype == torch.float16 else (7, 127 << 7)
    low, base = mantissa - width, _twice(one + (width << mantissa))
    pieces = []
    for number in range(count * (2 if kind.paired else 1)):
        place = number % count
        half, at = ("0x5410", "0x7632")[place * 2 // count], place % (count // 2) * kind.bits
        lines = ["{", ".reg .b32 c, d;", f"prmt.b32 c, $1, $2, {half};", _shifted(at - low)]
        lines += [_or("d" if kind.high else "$0", kind.bits, low, base)]
        if kind.high:
            lines += ["prmt.b32 c, $3, $4, 0x5410;", _shifted(number * kind.high - low - kind.bits)]
            lines += [_or("$0", kind.high, low + kind.bits, "d")]
        pieces.append("\n".join([*lines, "}"]))
    return tuple(pieces), ",".join(["=r"] + ["r"] * (4 if kind.high else 2))


def _twice(bits: int) -> str:
    """Return a register that holds 16 bits twice."""
    return f"0x{(bits & 0xFFFF) * 0x10001:08x}"


def _shifted(right: int) -> str:
    return f"shr.b32 c, c, {right};" if right > 0 else f"shl.b32 c, c, {-right};"


def _or(into: str, bits: int, at: int, rest: str) -> str:
    """Return `into = c & mask | rest`."""
    return f"lop3.b32 {into}, c, {_twice(((1 << bits) - 1) << at)}, {rest}, 0xea;"


def _levels(half: int, dtype: torch.dtype) -> str:
    """Return PTX that looks up four codes of each of two words, the low and high bytes of four at once."""
    bytes_of = torch.tensor(LEVELS, dtype=torch.float32).to(dtype).view(torch.uint8).view(16, 2).t()
    tables = bytes_of.contiguous().view(torch.int32).tolist()
    low, high = ([f"0x{word & 0xFFFFFFFF:08x}" for word in table] for table in tables)
    lines = ["{", ".reg .b32 a, b, c, d, p, s, u, v, x, y;"]
    for word, made in (("$4", "ab"), ("$5", "cd")):
        # The lowest three bits choose a byte of eight, the fourth which eight.
        lines += [f"and.b32 s, {word}, 0x77777777;", f"shr.b32 p, {word}, 1;"]
        lines += ["lop3.b32 p, p, 0x44444444, 0x32103210, 0xea;"]
        lines += ["shr.b32 s, s, 16;", "shr.b32 p, p, 16;"] if half else []
        for into, of in (("u", low), ("v", high)):
            lines += [f"mov.b32 {name}, {word};" for name, word in zip(("x", "y"), of[:2], strict=True)]
            lines += ["prmt.b32 x, x, y, s;", f"mov.b32 y, {of[2]};", f"mov.b32 {into}, {of[3]};"]
            lines += [f"prmt.b32 y, y, {into}, s;", f"prmt.b32 {into}, x, y, p;"]
        lines += [f"prmt.b32 {made[0]}, u, v, 0x5140;", f"prmt.b32 {made[1]}, u, v, 0x7362;"]
    lines += ["prmt.b32 $0, a, c, 0x5410;", "prmt.b32 $1, a, c, 0x7632;"]
    return "\n".join([*lines, "prmt.b32 $2, b, d, 0x5410;", "prmt.b32 $3, b, d, 0x7632;", "}"])


@triton.jit
def level(code):  # type: ignore[no-untyped-def]
    """Return the number of a code of IQ4_NL: `LEVELS` plus 127 are the bytes of four words."""
    low = tl.where(code < 4, 1043076864, 1969839182)
    high = tl.where(code < 12, -1516729216, -254229324)
    word = tl.where(code < 8, low, high)
    return (((word >> (8 * (code & 3))) & 255) - 127).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def decoded(words, high, place: tl.constexpr, number: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes at a place of words, int32, by plain arithmetic."""
    code = (words >> (place * BITS)) & ((1 << BITS) - 1)
    if HIGH:
        code |= ((high >> (number * HIGH)) & ((1 << HIGH) - 1)) << BITS
    return code


@triton.jit  # type: ignore[untyped-decorator]
def _half(word, high: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the float16 number in the low or the high half of words, in float32."""
    bits = ((word >> 16) if high else word) & 0xFFFF
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _times(word, at: tl.constexpr, less: tl.constexpr, factor, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a byte of words, less a constant, times a float16 number in float32, rounded once.

    Compiled, the byte becomes bits of the mantissa of 2 ** 15, since devices convert integers slowly. So both
    products of the sum that is rounded are exact.
    """
    if WIDEN:
        made = (((word >> (8 * at)) & 255).to(tl.float32) - less) * factor
    else:
        if at == 0:
            bits = tl.inline_asm_elementwise(_BYTE + "05;", "=r,r", [word], tl.int32, True, 1)
        elif at == 1:
            bits = tl.inline_asm_elementwise(_BYTE + "15;", "=r,r", [word], tl.int32, True, 1)
        elif at == 2:
            bits = tl.inline_asm_elementwise(_BYTE + "25;", "=r,r", [word], tl.int32, True, 1)
        else:
            bits = tl.inline_asm_elementwise(_BYTE + "35;", "=r,r", [word], tl.int32, True, 1)
        wide = bits.to(tl.float32, bitcast=True)
        made = tl.fma(wide, factor, factor * (-32768.0 - less))
    return made


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(h0, h1, h2, h3, h4, g: tl.constexpr, TYPE: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scale and the minimum of group `g` of a unit in float32, of the words of its heads. Of types
    without minima the second is of no meaning."""
    least = h0
    word = h0 if g // 4 % 4 == 0 else h1 if g // 4 % 4 == 1 else h2 if g // 4 % 4 == 2 else h3
    if TYPE == Q4_1 or TYPE == Q5_1:  # noqa: SIM109 - Triton knows no `in`.
        word = h0 if g == 0 else h1 if g == 1 else h2 if g == 2 else h3
        scale, least = _half(word, False), -_half(word, True)
    elif TYPE == Q5_0 or TYPE == IQ4_NL:  # noqa: SIM109
        scale = _half(h0 if g < 2 else h1, g % 2 == 1)
    elif TYPE == Q2_K:
        scale = _times(word & 0x0F0F0F0F, g % 4, 0, _half(h4, False), WIDEN)
        least = _times((word >> 4) & 0x0F0F0F0F, g % 4, 0, _half(h4, True), WIDEN)
    elif TYPE == Q3_K:
        low = ((h0 if g // 4 % 2 == 0 else h1) >> (g // 8 * 4)) & 0x0F0F0F0F
        high = (h2 >> (g // 4 * 2)) & 0x03030303
        scale = _times(low | (high << 4), g % 4, 32, _half(h3, False), WIDEN)
    elif TYPE == Q6_K:
        scale = _times(word ^ -2139062144, g % 4, 128, _half(h4, False), WIDEN)
    elif TYPE == IQ4_XS:
        bits = ((h1 >> (4 * g)) & 15) | (((h0 >> (16 + 2 * g)) & 3) << 4)
        scale = _times(bits, 0, 32, _half(h0, False), WIDEN)
    else:
        if g < 4:
            scales, leasts = h1 & 0x3F3F3F3F, h2 & 0x3F3F3F3F
        else:
            scales = (h3 & 0x0F0F0F0F) | ((h1 >> 2) & 0x30303030)
            leasts = ((h3 >> 4) & 0x0F0F0F0F) | ((h2 >> 2) & 0x30303030)
        scale = _times(scales, g % 4, 0, _half(h0, False), WIDEN)
        least = _times(leasts, g % 4, 0, _half(h0, True), WIDEN)
    return scale, least
