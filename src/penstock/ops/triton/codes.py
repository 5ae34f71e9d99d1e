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
from penstock.ops.triton import ptx
from penstock.ops.triton.ptx import FOUR_BITS as FOUR_BITS

INT4, INT8, E2M1, E4M3 = (tl.constexpr(kind) for kind in (ptx.INT4, ptx.INT8, ptx.E2M1, ptx.E4M3))
NUMBERS, EXPONENTS, EIGHTS = (tl.constexpr(kind) for kind in (ptx.NUMBERS, ptx.EXPONENTS, ptx.EIGHTS))
"""Kinds of codes and of scales, for kernels; see `ptx`."""
WHOLE = 1 << 30
"""The columns of a group that is a whole row."""
RUN_SCALES = {
    (ptx.E2M1, ptx.EIGHTS, 16): torch.int32,
    (ptx.E2M1, ptx.EXPONENTS, 32): torch.int16,
    (ptx.E4M3, ptx.EXPONENTS, 32): torch.uint8,
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


COMPILED = isinstance(scale_of, JITFunction)
"""True where kernels are compiled, and not interpreted."""


@triton.jit  # type: ignore[untyped-decorator]
def paired(values, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return float32 numbers as pairs in int32, each number twice: of float16 (HALF), or bfloat16."""
    into: tl.constexpr = "cvt.rn.f16x2.f32 $0, $1, $1;" if HALF else "cvt.rn.bf16x2.f32 $0, $1, $1;"
    return tl.inline_asm_elementwise(into, "=r,f", [values], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def to_words(values, COLS: tl.constexpr, RUNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `[COLS, RUNS * 8]`: what each run has, for each of its words."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], [COLS, RUNS, 8]), [COLS, RUNS * 8])


@triton.jit  # type: ignore[untyped-decorator]
def decoded(words, place: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return codes of words in float32 by plain arithmetic."""
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


@triton.jit  # type: ignore[untyped-decorator]
def beside(  # type: ignore[no-untyped-def]
    scale,
    zero,
    rows_at,
    k,
    inner,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    RAW: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Return what lies beside the codes of a step from column k on, as it rests: zero points for each half of
    a run, and scales for each quarter.

    Where steps lie within groups, all are those of the step, `[COLS]`. Otherwise (SCALED) they are `[COLS,
    RUNS]`; with RAW a number has all scales of a run.
    """
    most = inner - 1
    if SCALED:
        runs = k + tl.arange(0, RUNS) * RUN
        at, each = rows_at[:, None], RUN if RAW else GROUP
        first = at + (tl.minimum(runs, most) // each)[None, :]
        half = at + (tl.minimum(runs + RUN // 2, most) // each)[None, :]
        halves: tl.constexpr = GROUP <= RUN // 2 and not RAW
    else:
        first = rows_at + tl.minimum(k, most) // GROUP
        half, halves = first, False
    t0 = tl.load(scale + first)
    t2 = tl.load(scale + half) if halves else t0
    t1, t3 = t0, t2
    if SCALED and GROUP <= RUN // 4 and not RAW:
        t1 = tl.load(scale + at + (tl.minimum(runs + RUN // 4, most) // GROUP)[None, :])
        t3 = tl.load(scale + at + (tl.minimum(runs + RUN // 4 * 3, most) // GROUP)[None, :])
    z0, z1 = t0, t0
    if ZEROS and SCALED:
        z0 = tl.load(zero + first)
        z1 = tl.load(zero + half) if halves else z0
    elif ZEROS:
        z0 = tl.load(zero + first[:, None] + tl.arange(0, RUNS)[None, :] * 0)
        z1 = z0
    return z0, z1, t0, t1, t2, t3


@triton.jit  # type: ignore[untyped-decorator]
def operands(  # type: ignore[no-untyped-def]
    words,
    z0,
    z1,
    t0,
    t1,
    t2,
    t3,
    COLS: tl.constexpr,
    RUNS: tl.constexpr,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALED: tl.constexpr,
    RAW: tl.constexpr,
    ZEROS: tl.constexpr,
    HALF: tl.constexpr,
    LESS: tl.constexpr,
    PTX: tl.constexpr,
    REGISTERS: tl.constexpr,
):
    """Return `[COLS, RUNS * 8 * PLACES]`: the numbers of words of codes `[COLS, RUNS * 8]`, in the order of
    columns, less their zero points and, where SCALED, times their scales.

    They stay in the threads that have the words: of a run, a thread has the words that are its columns of
    each eight in a product. What lies beside them: see `beside`. PTX: what makes 16-bit numbers of them; if
    empty, plain arithmetic makes float32. LESS: see `ptx.less`.
    """
    if ZEROS:
        z0, z1 = z0.to(tl.float32), z1.to(tl.float32)
        if PTX != "":
            z0, z1 = paired(LESS - z0, HALF), paired(LESS - z1, HALF)
        z0, z1 = to_words(z0, COLS, RUNS), to_words(z1, COLS, RUNS)
    if RAW:
        t0 = to_words(t0.to(tl.int32), COLS, RUNS)
    elif SCALED:
        t0, t1, t2, t3 = (
            scale_of(t0, SCALES),
            scale_of(t1, SCALES),
            scale_of(t2, SCALES),
            scale_of(t3, SCALES),
        )
        if PTX != "":
            t0, t1, t2, t3 = paired(t0, HALF), paired(t1, HALF), paired(t2, HALF), paired(t3, HALF)
        t0, t1 = to_words(t0, COLS, RUNS), to_words(t1, COLS, RUNS)
        t2, t3 = to_words(t2, COLS, RUNS), to_words(t3, COLS, RUNS)
    if PTX == "":
        a = number(words, z0, t0, 0, KIND, ZEROS, SCALED)
        if PLACES == 8:
            b = number(words, z0, t0, 1, KIND, ZEROS, SCALED)
            c = number(words, z0, t1, 2, KIND, ZEROS, SCALED)
            d = number(words, z0, t1, 3, KIND, ZEROS, SCALED)
            e = number(words, z1, t2, 4, KIND, ZEROS, SCALED)
            f = number(words, z1, t2, 5, KIND, ZEROS, SCALED)
            g = number(words, z1, t3, 6, KIND, ZEROS, SCALED)
            h = number(words, z1, t3, 7, KIND, ZEROS, SCALED)
        else:
            b = number(words, z0, t1, 1, KIND, ZEROS, SCALED)
            c = number(words, z1, t2, 2, KIND, ZEROS, SCALED)
            d = number(words, z1, t3, 3, KIND, ZEROS, SCALED)
            e, f, g, h = a, b, c, d
    else:
        if RAW:
            given = [words, t0]
        elif ZEROS and SCALED:
            given = [words, z0, z1, t0, t1, t2, t3]
        elif SCALED:
            given = [words, t0, t1, t2, t3]
        elif ZEROS:
            given = [words, z0, z1]
        else:
            given = [words]
        if PLACES == 8:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                PTX, REGISTERS, given, dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
            )
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                PTX, REGISTERS, given, dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
            )
            e, f, g, h = a, b, c, d
    result = in_order(a, b, c, d, e, f, g, h, COLS, RUNS, PLACES)
    return result.to(tl.float16, bitcast=True) if HALF and PTX != "" else result


@triton.jit  # type: ignore[untyped-decorator]
def settled(sums, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return sums in float32 when the products that were added to them are complete.

    On capability 9.0 a product is under way while a program goes on, and reads its left operand from the
    registers that it rests in. Where sums only go from product to product, Triton 3.6 waits for all but the
    last few of these, and gives their registers to what the next step makes: then operands are written over
    before they are read, now and then. Who looks at sums waits for all. PTX: empty where nothing is compiled.
    """
    if PTX == "":
        return sums
    return tl.inline_asm_elementwise("", "=f,0", [sums], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def number(  # type: ignore[no-untyped-def]
    words, zero, scale, place: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, SCALED: tl.constexpr
):
    """Return the numbers that are the codes of one place, by plain arithmetic in float32."""
    values = plain_number(words, place, KIND, ZEROS)
    if ZEROS:
        values -= zero
    return values * scale if SCALED else values


@triton.jit  # type: ignore[untyped-decorator]
def plain_number(  # type: ignore[no-untyped-def]
    words, place: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr
):
    """Return codes of one place in float32 by plain arithmetic. Zero points of integers are taken off unless
    they are apart (ZEROS)."""
    values = decoded(words, place, KIND)
    if KIND <= INT8 and not ZEROS:
        values -= 8.0 if KIND == INT4 else 128.0
    return values


@triton.jit  # type: ignore[untyped-decorator]
def in_order(  # type: ignore[no-untyped-def]
    a, b, c, d, e, f, g, h, COLS: tl.constexpr, RUNS: tl.constexpr, PLACES: tl.constexpr
):
    """Return `[COLS, RUNS * 8 * PLACES]`, in the order of columns: the numbers that words `[COLS, RUNS * 8]`
    have at each of their 8 places, or of their first 4."""
    first = tl.join(tl.join(a, b), tl.join(c, d))
    if PLACES == 8:
        first = tl.join(first, tl.join(tl.join(e, f), tl.join(g, h)))
        first = tl.permute(tl.reshape(first, [COLS, RUNS, 8, 2, 2, 2]), (0, 1, 5, 4, 3, 2))
    else:
        first = tl.permute(tl.reshape(first, [COLS, RUNS, 8, 2, 2]), (0, 1, 4, 3, 2))
    return tl.reshape(first, [COLS, RUNS * 8 * PLACES])


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
        codes = ptx.INT4 if format.bits == 4 else ptx.INT8
        return CodeKind(codes, format.group, ptx.NUMBERS, zeros=format.zeros, scale_dtype=format.scale)
    if isinstance(format, Float8):
        scales = ptx.EXPONENTS if format.scale == E8M0 else ptx.NUMBERS
        kept = "uint8" if format.scale == E8M0 else format.scale
        return CodeKind(ptx.E4M3, format.across, scales, format.down, scale_dtype=kept)
    if isinstance(format, Float4) and format.group >= 16:
        second = 0 if not format.second else 2 if format.divided else 1
        scales = ptx.EXPONENTS if format.scale == E8M0 else ptx.EIGHTS
        return CodeKind(ptx.E2M1, format.group, scales, second=second)
    return None
