"""Write the PTX that takes codes of few bits apart: pairs of 16-bit numbers for matrix products, and float32
for sums that a thread makes by itself.

Integers are made the mantissa of a number that is taken off again. Floating-point codes are made the leading
bits of a number with a wider exponent, and multiplied by the power of two between the two biases; their
smallest numbers come out right, since those of the wider format are read in the same way.
"""

from dataclasses import dataclass
from functools import lru_cache
from struct import pack, unpack

INT4, INT8, E2M1, E4M3 = range(4)
"""Kinds of codes. Whole numbers come first."""
FOUR_BITS = INT4, E2M1
NUMBERS, EXPONENTS, EIGHTS = range(3)
"""Kinds of scales: floating-point numbers that Triton knows, E8M0, and float8_e4m3fn as bytes."""
FOLDED = {EIGHTS: 16, EXPONENTS: 32}
"""`pairs_of` and `products_of` make products of four-bit floating-point codes smaller by these powers of two,
by kinds of scales. All that float8_e4m3fn scales are multiplied with stays exact. So do products with E8M0
scales from 2 ** -100 to 2 ** 33; with larger ones they are infinite."""
NONE = "0x80008000"
"""-0 twice: what is added where nothing is."""


@dataclass(frozen=True, slots=True)
class _Pairs:
    """_Pairs says how pairs of one 16-bit format are written: its name, one twice, and powers of two that
    E2M1 and E4M3 are multiplied by, with the bits of a code that follow its sign and how far right they go.
    """

    name: str
    one: str
    e2m1: tuple[str, str, int]
    e4m3: tuple[str, str, int]

    def fused(self, into: str, a: str, b: str, c: str) -> str:
        """Return the instruction for a · b + c, and those that put constants in registers x, y and z. Sums
        and products are fused ones, which all devices have."""
        given = dict(zip("xyz", (a, b, c), strict=True))
        constants = {register: one for register, one in given.items() if one.startswith("0x")}
        moves = "".join(f"mov.b32 {register}, {one}; " for register, one in constants.items())
        a, b, c = (register if register in constants else one for register, one in given.items())
        return f"{moves}fma.rn.{self.name}x2 {into}, {a}, {b}, {c};"


_BFLOAT16 = _Pairs("bf16", "0x3f803f80", ("0x7e807e80", "0x01c001c0", 6), ("0x7b807b80", "0x07f007f0", 4))
_FLOAT16 = _Pairs("f16", "0x3c003c00", ("0x74007400", "0x0e000e00", 9), ("0x5c005c00", "0x3f803f80", 1))


@lru_cache(maxsize=32)
def pairs_of(kind: int, *, half: bool, zeros: bool, scaled: bool, raw: int) -> tuple[str, str]:
    """Return PTX that makes operands of two words of codes, a pair of each place, and its registers.

    Registers: the operands; the two words; with `zeros`, what is added to codes of integers, for the first
    half of the operands and for the second (see `less`); with `scaled`, scales for each quarter, or with
    `raw` all of them as bytes in one, float8_e4m3fn or E8M0 as `raw` says. What comes behind the words comes
    twice, since it comes with each word. All are pairs.

    half: operands are float16, else bfloat16. Those of four-bit floating-point codes with `raw` are smaller
    by the power of two in FOLDED.
    """
    pairs, four = _FLOAT16 if half else _BFLOAT16, kind in FOUR_BITS
    folds = scaled and raw in FOLDED and kind == E2M1
    count = 8 if four else 4
    words, behind = (f"${count}", f"${count + 1}"), count + 2
    minus = [f"${behind}", f"${behind + 2}"] if zeros else ["", ""]
    behind += 4 * zeros
    lines = ["{", ".reg .b32 a, b, c, d, e, s, u, x, y, z;"]
    if four:
        lines += [
            f"prmt.b32 a, {words[0]}, {words[1]}, 0x5410;",
            f"prmt.b32 b, {words[0]}, {words[1]}, 0x7632;",
        ]
    for place in range(count):
        quarter, into = place * 4 // count, "c" if scaled and not folds else f"${place}"
        if scaled and raw and place * 4 % count == 0:
            lines += _raw_scale(f"${behind}", quarter, raw, four, "s", folds, "u")
        lines += _code(
            pairs, kind, place, into, minus[place * 2 // count], ("a", "b") if four else words,
            "s" if folds else "",
        )  # fmt: skip
        if scaled and not folds:
            by = "s" if raw else f"${behind + 2 * quarter}"
            lines.append(pairs.fused(f"${place}", "c", by, NONE))
    registers = ["=r"] * count + ["r"] * (2 + 4 * zeros + (2 if raw else 8 * scaled))
    return "\n".join([*lines, "}"]), ",".join(registers)


def unfolded(kind: int, raw: int) -> float:
    """Return what sums of products are multiplied by, if scales come as `raw` says; see FOLDED."""
    return 2.0 ** FOLDED[raw] if kind == E2M1 and raw in FOLDED else 1.0


def less(kind: int, *, half: bool) -> float:
    """Return what a zero point is subtracted from to be what `pairs_of` adds to codes."""
    return -1024.0 if half else 128.0 if kind == INT8 else -128.0


def _code(
    pairs: _Pairs, kind: int, place: int, into: str, minus: str, words: tuple[str, str], by: str = ""
) -> list[str]:
    """Return what makes a pair of numbers of the codes of one place of two words.

    words: the registers that they are in; of four bits, the lower halves of both, and the upper ones. Those
    of four-bit integers are shifted in place, so places are to be asked for in their order.
    by: a register with what four-bit floating-point codes are multiplied by, in place of the power of two
    that makes numbers of them.
    """
    if kind == INT4:
        return _int4(pairs, place, into, minus, words)
    if kind == INT8:
        return _int8(pairs, place, into, minus, words)
    return _e2m1(pairs, place, into, words, by) if kind == E2M1 else _e4m3(pairs, place, into, words)


def _int4(pairs: _Pairs, place: int, into: str, minus: str, words: tuple[str, str]) -> list[str]:
    word, at = words[place // 4], place % 4
    if pairs is _BFLOAT16:  # A mantissa of seven bits has room for one code.
        shift = [f"shr.b32 {word}, {word}, 4;"] if at else []
        code = f"lop3.b32 c, {word}, 0x000f000f, 0x43004300, 0xea;"
        return [*shift, code, pairs.fused(into, "c", pairs.one, minus or "0xc308c308")]  # -136
    shift = [f"shr.b32 {word}, {word}, 8;"] if at == 2 else []
    if at % 2 == 0:
        code = f"lop3.b32 c, {word}, 0x000f000f, 0x64006400, 0xea;"
        return [*shift, code, pairs.fused(into, "c", pairs.one, minus or "0xe408e408")]  # -1032
    code = f"lop3.b32 c, {word}, 0x00f000f0, 0x64006400, 0xea;"  # 1024 + 16 · code
    taken = [pairs.fused("e", minus, pairs.one, "0x63806380")] if minus else []  # 960
    return [code, *taken, pairs.fused(into, "c", "0x2c002c00", "e" if minus else "0xd480d480")]  # 1 / 16, -72


def _int8(pairs: _Pairs, place: int, into: str, minus: str, words: tuple[str, str]) -> list[str]:
    code = f"prmt.b32 a, {words[0]}, {words[1]}, 0x{4 + place}{4 + place}{place}{place};"
    if pairs is _FLOAT16:
        lines = [code, "lop3.b32 c, a, 0x00ff00ff, 0x64006400, 0xea;"]
        return [*lines, pairs.fused(into, "c", pairs.one, minus or "0xe480e480")]  # -1152
    # A bfloat16 has room for seven bits: 128 + these, less 128 or 256.
    lines = [code, "lop3.b32 c, a, 0x007f007f, 0x43004300, 0xea;"]
    lines += ["lop3.b32 d, a, 0x00800080, 0xc380c380, 0x6a;"]
    lines += [pairs.fused("c" if minus else into, "c", pairs.one, "d")]
    return [*lines, pairs.fused(into, "c", pairs.one, minus)] if minus else lines


def _e2m1(pairs: _Pairs, place: int, into: str, words: tuple[str, str], by: str) -> list[str]:
    (size, bits, low), word, at = pairs.e2m1, words[place // 4], place % 4 * 4
    shift = f"shl.b32 d, {word}, {low - at};" if at <= low else f"shr.b32 d, {word}, {at - low};"
    lines = [f"shl.b32 c, {word}, {12 - at};", "and.b32 c, c, 0x80008000;", shift]
    return [*lines, f"lop3.b32 c, d, {bits}, c, 0xea;", pairs.fused(into, "c", by or size, NONE)]


def _e4m3(pairs: _Pairs, place: int, into: str, words: tuple[str, str]) -> list[str]:
    size, bits, right = pairs.e4m3
    lines = [f"prmt.b32 a, {words[0]}, {words[1]}, 0x{4 + place}{place}{place}{place};"]
    lines += ["and.b32 c, a, 0x80008000;", f"shr.b32 d, a, {right};"]
    return [*lines, f"lop3.b32 c, d, {bits}, c, 0xea;", pairs.fused(into, "c", size, NONE)]


def _raw_scale(
    scales: str, quarter: int, raw: int, four: bool, into: str, folds: bool, two: str
) -> list[str]:
    """Return what makes a bfloat16, twice, of the scale of a quarter that is one of four bytes.

    folds: it is made 2 ** 126 times as large, less FOLDED: what four-bit codes are multiplied by that are the
    leading bits of a number. two: a register for each two scales float8_e4m3fn, which are made together.
    """
    if raw == EXPONENTS:
        byte = quarter // 2 if four else 0
        lines = [f"prmt.b32 s, {scales}, 0, 0x{byte}4{byte}4;", "shr.b32 s, s, 1;"]
        if folds:
            return [*lines, "add.u32 s, s, 0x2f002f00;", f"min.u32 {into}, s, 0x7f807f80;"]
        # The smallest, 2 ** -127, is a subnormal number.
        return [*lines, f"max.u32 {into}, s, 0x00400040;"]
    if quarter % 2:
        return [f"prmt.b32 {into}, {two}, 0, 0x3232;"]
    size, bits, right = _BFLOAT16.e4m3
    lines = [f"prmt.b32 s, {scales}, 0, 0x{quarter + 1}4{quarter}4;", "and.b32 e, s, 0x80008000;"]
    lines += [f"shr.b32 s, s, {right};", f"lop3.b32 s, s, {bits}, e, 0xea;"]
    lines.append(_BFLOAT16.fused(two, "s", size, NONE))
    if folds:
        lines.append(_BFLOAT16.fused(two, two, "0x76807680", NONE))  # 2 ** 110
    return [*lines, f"prmt.b32 {into}, {two}, 0, 0x1010;"]


@lru_cache(maxsize=64)
def products_of(kind: int, *, half: bool, zeros: bool, scaled: bool, raw: int, wide: int) -> tuple[str, str]:
    """Return PTX by which a warp multiplies 16 rows of codes with `8 * wide` rows of activations, and its
    registers.

    A thread has parts of rows g and g + 8 of the left operand, g being a quarter of its lane, and of row g of
    the right one (PTX ISA, matrix fragments of mma.m16n8k16). Registers: four sums, float32, for each of
    `wide`; the place of the thread in its program, without which it stops; four words of row g and four of
    row g + 8; pairs of activations, two for each of `wide`, of each place of the words; with `zeros`, what is
    added to codes of integers (see `less`), for the first half of the places and the second, of row g and of
    row g + 8; with `scaled`, scales for each quarter of the places, of row g and of row g + 8, or with `raw`
    all of them as bytes in one, of either row.

    half: operands are float16, else bfloat16. Sums of four-bit floating-point codes with `raw` are smaller by
    the power of two in FOLDED.
    """
    pairs, four = _FLOAT16 if half else _BFLOAT16, kind in FOUR_BITS
    places, quarters, sums = 8 if four else 4, 1 if raw else 4, 4 * wide
    folds = scaled and raw in FOLDED and kind == E2M1
    first = sums + 1
    activations = first + 8
    minus = activations + 2 * places * wide
    scales = minus + 4 * zeros
    given = scales + 2 * quarters * scaled - sums
    lines = [
        "{",
        ".reg .b32 a, c, d, e, s, x, y, z, p0, p1, p2, p3, l0, l1, l2, l3, h0, h1, h2, h3, s0, s1, u0, u1;",
    ]
    lines += [".reg .pred off;", "mov.u32 a, %tid.x;", f"setp.ne.u32 off, ${sums}, a;", "@off trap;"]
    # Of each two words of row g and of row g + 8 a register of the left operand is made, in this order.
    couples = [(f"${at}", f"${at + 1}") for at in (first, first + 4, first + 2, first + 6)]
    if four:
        for at, (one, other) in enumerate(couples):
            lines += [f"prmt.b32 l{at}, {one}, {other}, 0x5410;", f"prmt.b32 h{at}, {one}, {other}, 0x7632;"]
            couples[at] = f"l{at}", f"h{at}"
    for place in range(places):
        quarter, new = place * 4 // places, place * 4 % places == 0
        for at, words in enumerate(couples):
            row = at % 2
            if scaled and raw and at < 2 and new:
                lines += _raw_scale(f"${scales + row}", quarter, raw, four, f"s{row}", folds, f"u{row}")
            taken = f"${minus + 2 * row + place * 2 // places}" if zeros else ""
            if folds:
                lines += _code(pairs, kind, place, f"p{at}", taken, words, f"s{row}")
                continue
            lines += _code(pairs, kind, place, "c" if scaled else f"p{at}", taken, words)
            if scaled:
                by = f"s{row}" if raw else f"${scales + 4 * row + quarter}"
                lines.append(pairs.fused(f"p{at}", "c", by, NONE))
        for eight in range(wide):
            into = ", ".join(f"${4 * eight + at}" for at in range(4))
            before = into if place else "0f00000000, 0f00000000, 0f00000000, 0f00000000"
            x = activations + 2 * (place * wide + eight)
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{pairs.name}.{pairs.name}.f32 "
                f"{{{into}}}, {{p0, p1, p2, p3}}, {{${x}, ${x + 1}}}, {{{before}}};"
            )
    return "\n".join([*lines, "}"]), ",".join(["=&f"] * sums + ["r"] * given)


@lru_cache(maxsize=16)
def floats_of(kind: int, *, zeros: bool) -> str:
    """Return PTX that makes float32 of a word of codes: registers of the numbers, in the order of places,
    then the word. Zero points of integers are taken off unless they are apart (zeros).

    Floating-point codes go through float16, which holds them all (PTX ISA: cvt, from 8.9 on). Those of four
    bits are made codes of eight first: these are 64 times smaller.
    """
    word = "$8" if kind in FOUR_BITS else "$4"
    lines = ["{", ".reg .b32 a, b, t;", ".reg .b16 low, high, c, d;"]
    if kind == INT4:
        lines.append(f"shr.u32 b, {word}, 20;")
        for place in range(8):
            low = place % 5 * 4
            size, taken = 150 - low << 23, 2 ** (23 - low) + (0 if zeros else 8)
            lines.append(f"lop3.b32 t, {'b' if place > 4 else word}, {15 << low:#x}, {size:#x}, 0xea;")
            lines.append(f"sub.rn.f32 ${place}, t, 0f{unpack('>I', pack('>f', taken))[0]:08x};")
    elif kind == INT8:
        lines.append("mov.b32 a, 0x4b000000;")
        for place in range(4):
            lines.append(f"prmt.b32 t, {word}, a, 0x765{place};")
            lines.append(f"sub.rn.f32 ${place}, t, {'0f4b000000' if zeros else '0f4b000080'};")
    elif kind == E4M3:
        lines += _through_half(word, range(4))
    else:
        lines += [f"shl.b32 a, {word}, 4;", "and.b32 a, a, 0x80808080;", f"shl.b32 b, {word}, 2;"]
        lines += ["lop3.b32 a, b, 0x1c1c1c1c, a, 0xea;", *_through_half("a", range(0, 8, 2))]
        lines += [f"and.b32 a, {word}, 0x80808080;", f"shr.u32 b, {word}, 2;"]
        lines += ["lop3.b32 a, b, 0x1c1c1c1c, a, 0xea;", *_through_half("a", range(1, 8, 2))]
    return "\n".join([*lines, "}"])


def _through_half(word: str, places: range) -> list[str]:
    """Return what makes float32 of four bytes float8_e4m3fn."""
    lines = [f"mov.b32 {{low, high}}, {word};"]
    for half, two in (("low", places[:2]), ("high", places[2:])):
        lines += [f"cvt.rn.f16x2.e4m3x2 t, {half};", "mov.b32 {c, d}, t;"]
        lines += [f"cvt.f32.f16 ${place}, {one};" for place, one in zip(two, "cd", strict=True)]
    return lines
