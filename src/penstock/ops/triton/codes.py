"""Take codes of few bits apart, as numbers for products: by PTX where kernels are compiled, and by plain
arithmetic."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction

from penstock.arch.formats.floats import E8M0, Float4, Float8
from penstock.arch.formats.format import WeightFormat
from penstock.arch.formats.integers import Integers

INT4, INT8, E2M1, E4M3 = (tl.constexpr(kind) for kind in range(4))
"""Kinds of codes. Whole numbers come first."""
FOUR_BITS = INT4.value, E2M1.value
NUMBERS, EXPONENTS, EIGHTS = (tl.constexpr(kind) for kind in range(3))
"""Kinds of scales: floating-point numbers that Triton knows, E8M0, and float8_e4m3fn as bytes."""


@lru_cache(maxsize=32)
def take_apart(kind: int, *, zeros: bool, scaled: bool, raw: int) -> tuple[str, str]:
    """Return PTX that makes operands in bfloat16 of two words of codes, and its registers: a pair in each.

    Registers: the operands; the two words; with `zeros`, what is added to codes of integers, for the
    first half of the operands and for the second; with `scaled`, scales for each quarter, or with `raw` all
    of them as bytes in one, float8_e4m3fn or E8M0 as `raw` says. What comes behind the words comes twice,
    since it comes with each word. Of integers of eight bits float32 is subtracted; all else are pairs of
    bfloat16.
    """
    four = kind in FOUR_BITS
    count = 8 if four else 4
    first, second, behind = f"${count}", f"${count + 1}", count + 2
    lines = ["{", ".reg .b32 a, b, c, d, e, f, s, t, one, none;", ".reg .f32 g, h, m;"]
    # Sums and products of pairs are fused ones, which devices have from 8.0 on: with one, and with -0.
    lines += ["mov.b32 one, 0x3f803f80;", "mov.b32 none, 0x80008000;"]
    minus = ["e", "e"]
    if kind in (INT4.value, INT8.value) and not zeros:
        lines.append(f"mov.b32 e, {'0xc308c308' if four else '0x4b000080'};")  # -136 twice; 2 ** 23 + 128
    if zeros:
        minus, behind = [f"${behind}", f"${behind + 2}"], behind + 4
    times = ["s"] * 4 if raw else [f"${behind + 2 * quarter}" for quarter in range(4)]
    # Exponents that bring codes, as bits of a bfloat16, to their size; and 2 ** 23.
    size = {E2M1.value: "0x7e807e80", E4M3.value: "0x7b807b80", INT8.value: "0x4b000000"}
    lines += [f"mov.b32 f, {size[kind]};"] if kind in size else []
    lines += ["mov.b32 t, 0x7b807b80;"] if raw == EIGHTS.value else []
    if four:
        lines += [f"prmt.b32 a, {first}, {second}, 0x5410;", f"prmt.b32 b, {first}, {second}, 0x7632;"]
    for place in range(count):
        half, word, shift = place * 2 // count, "ab"[place // 4], place % 4 * 4
        into = "c" if scaled else f"${place}"
        if raw == EIGHTS.value and place * 4 % count == 0:  # A byte for each quarter.
            byte = place * 4 // count
            lines += [
                f"prmt.b32 s, ${behind}, 0, 0x{byte}4{byte}4;",
                "shr.b32 s, s, 4;",
                "fma.rn.bf16x2 s, s, t, none;",
            ]
        if raw == EXPONENTS.value and place % 4 == 0:  # A byte for each half, or for all.
            lines += [f"prmt.b32 s, ${behind}, 0, 0x{half}4{half}4;", "shr.b32 s, s, 1;"]
        if kind == INT4.value:
            lines += [f"shr.b32 {word}, {word}, 4;"] if shift else []
            lines += [f"lop3.b32 c, {word}, 0x000f000f, 0x43004300, 0xea;"]
            lines += [f"fma.rn.bf16x2 {into}, c, one, {minus[half]};"]
        elif kind == E2M1.value:
            lines += [f"shl.b32 c, {word}, {12 - shift};", "and.b32 c, c, 0x80008000;"]
            lines += [
                f"shl.b32 d, {word}, {6 - shift};" if shift <= 6 else f"shr.b32 d, {word}, {shift - 6};"
            ]
            lines += ["lop3.b32 c, d, 0x01c001c0, c, 0xea;", f"fma.rn.bf16x2 {into}, c, f, none;"]
        elif kind == E4M3.value:
            lines += [f"prmt.b32 a, {first}, {second}, 0x{4 + place}{place}{place}{place};"]
            lines += ["and.b32 c, a, 0x80008000;", "shr.b32 d, a, 4;"]
            lines += ["lop3.b32 c, d, 0x07f007f0, c, 0xea;", f"fma.rn.bf16x2 {into}, c, f, none;"]
        else:
            lines += [f"prmt.b32 a, {first}, f, 0x765{place};", f"prmt.b32 b, {second}, f, 0x765{place};"]
            lines += ["mov.b32 g, a;", "mov.b32 h, b;", f"mov.b32 m, {minus[half]};"]
            lines += ["sub.rn.f32 g, g, m;", "sub.rn.f32 h, h, m;", f"cvt.rn.bf16x2.f32 {into}, h, g;"]
        lines += [f"fma.rn.bf16x2 ${place}, c, {times[place * 4 // count]}, none;"] if scaled else []
    registers = ["=r"] * count + ["r"] * (2 + 4 * zeros + (2 if raw else 8 * scaled))
    return "\n".join([*lines, "}"]), ",".join(registers)


@triton.jit  # type: ignore[untyped-decorator]
def activations(at, column, inner, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return activations `[ROWS, WORDS]`, zeros beyond the last column."""
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(column < inner)[None, :], other=0.0)


COMPILED = isinstance(activations, JITFunction)
"""True where kernels are compiled, and not interpreted."""
RUN_SCALES = {
    (E2M1.value, EIGHTS.value, 16): torch.int32,
    (E2M1.value, EXPONENTS.value, 32): torch.int16,
    (E4M3.value, EXPONENTS.value, 32): torch.uint8,
}
"""Integers that hold all scales of a run, by kinds of codes and scales and the columns of a group."""


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(raw, SCALES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return scales in float32."""
    if SCALES == EXPONENTS:
        bits = raw.to(tl.int32)
        value = tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)
    elif SCALES == EIGHTS:
        bits = raw.to(tl.int32)
        value = ((bits & 0x7F) << 20 | (bits & 0x80) << 24).to(
            tl.float32, bitcast=True
        ) * 1.329227995784916e36
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def paired(values):  # type: ignore[no-untyped-def]
    """Return float32 numbers as pairs of bfloat16 in int32, each number twice, rounded to nearest even.

    By arithmetic on bits: with a conversion in its way the compiler brings no words to where products want
    them.
    """
    bits = values.to(tl.int32, bitcast=True)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return bits | (bits << 16)


@triton.jit  # type: ignore[untyped-decorator]
def to_words(values, COLS: tl.constexpr, RUNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `[COLS, RUNS * 8]`: what each run has, for each of its words."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], [COLS, RUNS, 8]), [COLS, RUNS * 8])


@triton.jit  # type: ignore[untyped-decorator]
def decoded(words, place: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return codes of words in float32 by plain arithmetic, for the interpreter."""
    if KIND == INT4:
        values = ((words >> (4 * place)) & 15).to(tl.float32)
    elif KIND == INT8:
        values = ((words >> (8 * place)) & 255).to(tl.float32)
    elif KIND == E2M1:
        code = (words >> (4 * place)) & 15
        size = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
        values = tl.where((code & 8) != 0, -size, size)
    else:
        code = (words >> (8 * place)) & 255
        size = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        values = tl.where((code & 128) != 0, -size, size)
    return values


@dataclass(frozen=True, slots=True)
class CodeKind:
    """A CodeKind is what kernels have to know of a format."""

    codes: int
    group: int
    scales: int
    down: int = 1
    second: int = 0
    zeros: bool = False
    scale_dtype: str = "uint8"

    @property
    def tensors(self) -> int:
        """Return how many tensors such a matrix rests in: codes, scales, and what else there is."""
        return 2 + self.zeros + (self.second > 0)


@lru_cache(maxsize=256)
def kind_of(format: WeightFormat) -> CodeKind | None:
    """Return what the kernel has to know of a format; None for one that it does not read."""
    if isinstance(format, Integers) and not format.ordered:
        codes = INT4.value if format.bits == 4 else INT8.value
        return CodeKind(codes, format.group, NUMBERS.value, zeros=format.zeros, scale_dtype=format.scale)
    if isinstance(format, Float8):
        scales = EXPONENTS if format.scale == E8M0 else NUMBERS
        kept = "uint8" if format.scale == E8M0 else format.scale
        return CodeKind(E4M3.value, format.across, scales.value, format.down, scale_dtype=kept)
    if isinstance(format, Float4) and format.group >= 16:
        second = 0 if not format.second else 2 if format.divided else 1
        scales = EXPONENTS if format.scale == E8M0 else EIGHTS
        return CodeKind(E2M1.value, format.group, scales.value, second=second)
    return None
