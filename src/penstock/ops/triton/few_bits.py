"""Products of a few rows of activations with a matrix of few bits, read once and dequantised in registers.

A program has COLS rows of the matrix and takes STEP columns at a time: words of 32 bits, in the layout of a
matrix product's left operand. Shifts and masks make eight or four operands of a word's codes, one for each
eight columns of a run; see `arch.formats.codes.packed`. Products are added up in float32.

Scales are applied in one of two ways. Where a step lies within a group, the sum of the step is multiplied, as
exact as float32 is. Where groups are smaller, each code is multiplied before the product and rounded to
bfloat16: exact for four-bit floating-point numbers, and as fine as a weight in bfloat16 for integers.

Why it is safe where launches overlap, and to share a sum: as in `linear`.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import JITFunction

from penstock.arch.formats.floats import E8M0, Float4, Float8
from penstock.arch.formats.format import Format
from penstock.arch.formats.integers import Integers
from penstock.ops.kernels import counters, pdl_launch_options, uses_pdl
from penstock.ops.matrix import Matrix
from penstock.ops.triton.pointwise import silu
from penstock.ops.triton.tuning import multiprocessors

MOST_ROWS = 64
INT4, INT8, E2M1, E4M3 = (tl.constexpr(kind) for kind in range(4))
"""Kinds of codes. Whole numbers come first."""
_FOUR_BITS = INT4.value, E2M1.value
_NUMBERS, _EXPONENTS, _EIGHTS = (tl.constexpr(kind) for kind in range(3))
"""Kinds of scales: floating-point numbers that Triton knows, E8M0, and float8_e4m3fn as bytes."""


@lru_cache(maxsize=32)
def _take_apart(kind: int, *, zeros: bool, scaled: bool, raw: int) -> tuple[str, str]:
    """Return PTX that makes operands in bfloat16 of two words of codes, and its registers: a pair in each.

    Registers: the operands; the two words; with `zeros`, what is added to codes of integers, for the
    first half of the operands and for the second; with `scaled`, scales for each quarter, or with `raw` all
    of them as bytes in one, float8_e4m3fn or E8M0 as `raw` says. What comes behind the words comes twice,
    since it comes with each word. Of integers of eight bits float32 is subtracted; all else are pairs of
    bfloat16.
    """
    four = kind in _FOUR_BITS
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
    lines += ["mov.b32 t, 0x7b807b80;"] if raw == _EIGHTS.value else []
    if four:
        lines += [f"prmt.b32 a, {first}, {second}, 0x5410;", f"prmt.b32 b, {first}, {second}, 0x7632;"]
    for place in range(count):
        half, word, shift = place * 2 // count, "ab"[place // 4], place % 4 * 4
        into = "c" if scaled else f"${place}"
        if raw == _EIGHTS.value and place * 4 % count == 0:  # A byte for each quarter.
            byte = place * 4 // count
            lines += [
                f"prmt.b32 s, ${behind}, 0, 0x{byte}4{byte}4;",
                "shr.b32 s, s, 4;",
                "fma.rn.bf16x2 s, s, t, none;",
            ]
        if raw == _EXPONENTS.value and place % 4 == 0:  # A byte for each half, or for all.
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
def _some(at, column, inner, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return activations `[ROWS, WORDS]`, zeros beyond the last column."""
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(column < inner)[None, :], other=0.0)


COMPILED = isinstance(_some, JITFunction)
"""Whether kernels are compiled, and not interpreted."""
_RAW = {
    (E2M1.value, _EIGHTS.value, 16): torch.int32,
    (E2M1.value, _EXPONENTS.value, 32): torch.int16,
    (E4M3.value, _EXPONENTS.value, 32): torch.uint8,
}
"""Integers that hold all scales of a run, by kinds of codes and scales and the columns of a group."""


@triton.jit  # type: ignore[untyped-decorator]
def _scale(raw, SCALES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return scales in float32."""
    if SCALES == _EXPONENTS:
        bits = raw.to(tl.int32)
        value = tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)
    elif SCALES == _EIGHTS:
        bits = raw.to(tl.int32)
        value = ((bits & 0x7F) << 20 | (bits & 0x80) << 24).to(
            tl.float32, bitcast=True
        ) * 1.329227995784916e36
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def _paired(values):  # type: ignore[no-untyped-def]
    """Return float32 numbers as pairs of bfloat16 in int32, each number twice, rounded to nearest even.

    By arithmetic on bits: with a conversion in its way the compiler brings no words to where products want
    them.
    """
    bits = values.to(tl.int32, bitcast=True)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return bits | (bits << 16)


@triton.jit  # type: ignore[untyped-decorator]
def _to_words(values, COLS: tl.constexpr, RUNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `[COLS, RUNS * 8]`: what each run has, for each of its words."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], [COLS, RUNS, 8]), [COLS, RUNS * 8])


@triton.jit  # type: ignore[untyped-decorator]
def _decoded(words, place: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return codes of words in float32 by plain arithmetic, for the interpreter."""
    if KIND == INT4:
        return ((words >> (4 * place)) & 15).to(tl.float32)
    if KIND == INT8:
        return ((words >> (8 * place)) & 255).to(tl.float32)
    if KIND == E2M1:
        code = (words >> (4 * place)) & 15
        size = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        code = (words >> (8 * place)) & 255
        size = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    negative = (code & (8 if KIND == E2M1 else 128)) != 0
    return tl.where(negative, -size, size)


@triton.jit(do_not_specialize=["rows", "splits"])  # type: ignore[untyped-decorator]
def _few_rows(  # type: ignore[no-untyped-def]
    x,
    codes,
    scale,
    zero,
    second,
    bias,
    y,
    parts,
    arrivals,
    rows,
    splits,
    outer,
    inner,
    down,
    s_x,
    s_w,
    s_s,
    s_y,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    RAW: tl.constexpr,
    ZEROS: tl.constexpr,
    SECOND: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    JOINS: tl.constexpr,
    WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
    PTX: tl.constexpr,
    REGISTERS: tl.constexpr,
) -> None:
    """One of `splits` parts of the sums of COLS rows of the matrix; where GATED, these are COLS / 2 of the
    gate, each with its own of what is gated, `outer` further on.

    SECOND: 1 where sums are multiplied by a second scale, 2 where they are divided by it.
    """
    if EARLY:
        gdc_launch_dependents()
    WORDS: tl.constexpr = STEP // PLACES
    RUN: tl.constexpr = 8 * PLACES
    RUNS: tl.constexpr = STEP // RUN
    SCALED: tl.constexpr = GROUP < STEP
    WIDE: tl.constexpr = COLS // 2 if GATED else COLS
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    each = tl.cdiv(tl.cdiv(inner, STEP), splits) * STEP
    begin = split * each
    end = tl.minimum(begin + each, inner)
    place = tl.arange(0, COLS)
    own = tl.minimum(tile * WIDE + (place // 2 if GATED else place), outer - 1)
    if GATED:
        own += place % 2 * outer
    row, word, run = tl.arange(0, ROWS), tl.arange(0, WORDS), tl.arange(0, RUNS)
    column = word // 8 * RUN + word % 8
    words_at = codes + own.to(tl.int64)[:, None] * s_w + word[None, :]
    scales_at = (own // down).to(tl.int64) * s_s
    x_at = x + tl.minimum(row, rows - 1)[:, None] * s_x + column[None, :]
    acc = tl.zeros([COLS, ROWS], tl.float32)
    if EARLY:
        gdc_wait()
    for k in tl.range(begin, end, STEP, num_stages=STAGES):
        if EVEN:
            words = tl.load(words_at + k // PLACES)
        else:
            words = tl.load(words_at + k // PLACES, mask=(k + column < inner)[None, :], other=0)
        # Zero points, for each half of a word, and what these are multiplied by, for each
        # quarter: in float32.
        minus_0, minus_1, times_0, times_1, times_2, times_3 = words, words, words, words, words, words
        if SCALED:
            runs, most = k + run * RUN, inner - 1
            first = (tl.minimum(runs, most) // GROUP)[None, :]
            half = (tl.minimum(runs + RUN // 2, most) // GROUP)[None, :]
            if ZEROS:
                minus_0 = _to_words(tl.load(zero + scales_at[:, None] + first).to(tl.float32), COLS, RUNS)
                minus_1 = _to_words(tl.load(zero + scales_at[:, None] + half).to(tl.float32), COLS, RUNS)
            at = scale + scales_at[:, None]
            if RAW:  # A number has all scales of a run.
                run_at = tl.minimum(runs, most) // RUN
                times_0 = _to_words(tl.load(at + run_at[None, :]).to(tl.int32), COLS, RUNS)
            else:
                times_0 = _to_words(_scale(tl.load(at + first), SCALES), COLS, RUNS)
                times_1, times_2, times_3 = times_0, times_0, times_0
                if GROUP <= RUN // 2:
                    times_2 = _to_words(_scale(tl.load(at + half), SCALES), COLS, RUNS)
                    times_3 = times_2
                if GROUP <= RUN // 4:
                    first = (tl.minimum(runs + RUN // 4, most) // GROUP)[None, :]
                    half = (tl.minimum(runs + RUN // 4 * 3, most) // GROUP)[None, :]
                    times_1 = _to_words(_scale(tl.load(at + first), SCALES), COLS, RUNS)
                    times_3 = _to_words(_scale(tl.load(at + half), SCALES), COLS, RUNS)
        elif ZEROS:
            minus_0 = tl.broadcast_to(
                tl.load(zero + scales_at + k // GROUP).to(tl.float32)[:, None], [COLS, WORDS]
            )
            minus_1 = minus_0
        part = tl.zeros([COLS, ROWS], tl.float32) if not SCALED else acc
        if WIDEN:  # The interpreter knows no PTX, and multiplies float32 alone.
            for at_place in tl.static_range(PLACES):
                quarter: tl.constexpr = at_place * 4 // PLACES
                operand = _decoded(words, at_place, KIND)
                if ZEROS:
                    operand -= minus_0 if quarter < 2 else minus_1
                elif KIND <= INT8:
                    operand -= 8.0 if KIND == INT4 else 128.0
                if SCALED:
                    operand *= (
                        times_0
                        if quarter == 0
                        else times_1
                        if quarter == 1
                        else times_2
                        if quarter == 2
                        else times_3
                    )
                some = _some(x_at + k + 8 * at_place, k + 8 * at_place + column, inner, EVEN).to(tl.float32)
                part = tl.dot(operand, tl.trans(some), part, input_precision="ieee")
        else:
            if ZEROS:
                minus_0 = (
                    (minus_0 + 8388608.0).to(tl.int32, bitcast=True)
                    if KIND == INT8
                    else _paired(-128.0 - minus_0)
                )
                minus_1 = (
                    (minus_1 + 8388608.0).to(tl.int32, bitcast=True)
                    if KIND == INT8
                    else _paired(-128.0 - minus_1)
                )
            if SCALED and not RAW:
                times_0, times_1, times_2, times_3 = (
                    _paired(times_0),
                    _paired(times_1),
                    _paired(times_2),
                    _paired(times_3),
                )
            if RAW:
                given = [words, times_0]
            elif ZEROS and SCALED:
                given = [words, minus_0, minus_1, times_0, times_1, times_2, times_3]
            elif SCALED:
                given = [words, times_0, times_1, times_2, times_3]
            elif ZEROS:
                given = [words, minus_0, minus_1]
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
            part = tl.dot(a, tl.trans(_some(x_at + k, k + column, inner, EVEN)), part)
            part = tl.dot(b, tl.trans(_some(x_at + k + 8, k + 8 + column, inner, EVEN)), part)
            part = tl.dot(c, tl.trans(_some(x_at + k + 16, k + 16 + column, inner, EVEN)), part)
            part = tl.dot(d, tl.trans(_some(x_at + k + 24, k + 24 + column, inner, EVEN)), part)
            if PLACES == 8:
                part = tl.dot(e, tl.trans(_some(x_at + k + 32, k + 32 + column, inner, EVEN)), part)
                part = tl.dot(f, tl.trans(_some(x_at + k + 40, k + 40 + column, inner, EVEN)), part)
                part = tl.dot(g, tl.trans(_some(x_at + k + 48, k + 48 + column, inner, EVEN)), part)
                part = tl.dot(h, tl.trans(_some(x_at + k + 56, k + 56 + column, inner, EVEN)), part)
        if SCALED:
            acc = part
        else:
            acc += part * _scale(tl.load(scale + scales_at + k // GROUP), SCALES)[:, None]
    last = True
    if JOINS:
        base = parts + tile.to(tl.int64) * splits * (ROWS * COLS) + place[:, None] * ROWS + row[None, :]
        tl.store(base + split * (ROWS * COLS), acc)
        tl.debug_barrier()  # all threads' stores before the count of one
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if last:
            acc = tl.zeros_like(acc)
            for one in tl.range(splits):
                acc += tl.load(base + one * (ROWS * COLS), cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
    if last:
        kind = y.dtype.element_ty
        if SECOND == 1:
            acc *= tl.load(second + own)[:, None]
        if SECOND == 2:
            acc /= tl.load(second + own)[:, None]
        total = tl.trans(acc)
        if BIASED:
            total += tl.load(bias + own)[None, :].to(tl.float32)
        number = tile * WIDE + tl.arange(0, WIDE)
        if GATED:
            gate, up = tl.split(tl.reshape(total, [ROWS, WIDE, 2]))
            active = silu(gate.to(kind).to(tl.float32)).to(kind).to(tl.float32)
            total = active * up.to(kind).to(tl.float32)
        tl.store(
            y + row[:, None] * s_y + number[None, :],
            total.to(kind),
            mask=(row < rows)[:, None] & (number < outer)[None, :],
        )


@dataclass(frozen=True, slots=True)
class FewBitsTuning:
    """FewBitsTuning says how a product is cut.

    cols: rows of the matrix a program has. step: columns at a time. splits: programs that share a sum.
    stages: steps under way. warps: of a program.
    """

    cols: int
    step: int
    splits: int
    stages: int = 4
    warps: int = 4


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the kernel has to know of a format."""

    codes: int
    group: int
    scales: int
    down: int = 1
    second: int = 0


@lru_cache(maxsize=256)
def _kind(format: Format) -> _Kind | None:
    """Return what the kernel has to know of a format; None for one that it does not read."""
    if isinstance(format, Integers) and not format.ordered:
        return _Kind(INT4.value if format.bits == 4 else INT8.value, format.group, _NUMBERS.value)
    if isinstance(format, Float8):
        scales = _EXPONENTS if format.scale == E8M0 else _NUMBERS
        return _Kind(E4M3.value, format.across, scales.value, down=format.down)
    if isinstance(format, Float4) and format.group >= 16:
        second = 0 if not format.second else 2 if format.divided else 1
        scales = _EXPONENTS if format.scale == E8M0 else _EIGHTS
        return _Kind(E2M1.value, format.group, scales.value, second=second)
    return None


def few_rows(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
    tuning: FewBitsTuning | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`: x `[rows, in]` of at most MOST_ROWS, rows strided; result `[rows, out]`.

    gated: the result is `silu(gate) * up` `[rows, out / 2]`, of a matrix with the gate's rows first. Sums are
    float32. tuning: see `few_bits_tuning`.
    """
    kind, parts = _kind(weight.format), weight.parts
    assert kind is not None, weight.format
    (height, inner), rows = weight.shape, len(x)
    outer = height // 2 if gated else height
    assert 0 < rows <= MOST_ROWS, x.shape
    assert x.shape[1] == inner, (x.shape, weight.shape)
    assert x.stride(1) == 1, x.stride()
    y = torch.empty(rows, outer, dtype=x.dtype, device=x.device) if out is None else out
    padded = max(16, triton.next_power_of_2(rows))
    tuning = tuning or few_bits_tuning(padded, height, inner, kind.group, multiprocessors(x.device))
    words, scale = parts["codes"].view(torch.int32), parts["scale"]
    scale = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    each = _RAW.get((kind.codes, kind.scales, kind.group)) if COMPILED else None
    raw = each is not None and scale.shape[1] % each.itemsize == 0
    scale = scale.view(each) if raw and each is not None else scale
    group, joins, early = min(kind.group, inner), tuning.splits > 1, uses_pdl()
    whole = group >= inner
    tiles = triton.cdiv(outer, tuning.cols // (2 if gated else 1))
    shared = tiles * tuning.splits * tuning.cols * padded
    zero, second = parts.get("zero"), parts.get("second")
    ptx, registers = _take_apart(
        kind.codes, zeros=zero is not None, scaled=group < tuning.step, raw=kind.scales if raw else 0
    )
    _few_rows[(tiles * tuning.splits,)](
        x,
        words,
        scale,
        x if zero is None else zero,
        x if second is None else second,
        x if bias is None else bias,
        y,
        torch.empty(shared, dtype=torch.float32, device=x.device) if joins else x,
        counters(tiles, x.device) if joins else x,
        rows,
        tuning.splits,
        outer,
        inner,
        kind.down,
        x.stride(0),
        words.stride(0),
        scale.stride(0),
        y.stride(0),
        ROWS=padded,
        COLS=tuning.cols,
        STEP=tuning.step,
        STAGES=tuning.stages,
        GROUP=1 << 30 if whole else group,
        KIND=kind.codes,
        PLACES=8 if kind.codes in _FOUR_BITS else 4,
        SCALES=kind.scales,
        RAW=raw,
        ZEROS=zero is not None,
        SECOND=kind.second,
        EVEN=inner % tuning.step == 0,
        GATED=gated,
        BIASED=bias is not None,
        JOINS=joins,
        WIDEN=not COMPILED,
        EARLY=early,
        PTX=ptx,
        REGISTERS=registers,
        num_warps=tuning.warps,
        **pdl_launch_options(early),
    )
    return y


def reads(format: Format) -> bool:
    """Tell whether `dequantise` reads a format."""
    return _kind(format) is not None


def suits(x: Tensor, weight: Matrix) -> bool:
    """Tell whether `few_rows` computes a product: of few rows in bfloat16, and a format that it reads, with
    steps that lie within a group or hold whole ones."""
    kind = _kind(weight.format)
    if kind is None or len(x) > MOST_ROWS or x.dtype != torch.bfloat16 or x.stride(1) != 1:
        return False
    group = kind.group
    whole = group >= weight.shape[1]
    return whole or (group & (group - 1) == 0 and group >= (32 if "zero" in weight.parts else 16))


def few_bits_tuning(rows: int, outer: int, inner: int, group: int, many: int) -> FewBitsTuning:
    """Return how a product is cut: the one place for constants. rows: 16, 32 or 64; outer: of the matrix,
    `inner`
    columns each; group: columns that share a scale; many: multiprocessors."""
    cols = 128 if outer >= 64 * many else 64
    step = min(256, max(128, group)) if group < inner else 256
    tiles = triton.cdiv(outer, cols)
    splits = max(1, min(8, 2 * many // tiles, inner // (2 * step)))
    return FewBitsTuning(cols, step, splits)


@triton.jit  # type: ignore[untyped-decorator]
def _dequantise(  # type: ignore[no-untyped-def]
    codes,
    scale,
    zero,
    second,
    y,
    first,
    rows,
    inner,
    down,
    s_w,
    s_s,
    s_y,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    SECOND: tl.constexpr,
) -> None:
    """ROWS rows of WORDS words of codes as numbers: in float32 as the reference has them, rounded once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    column = word // 8 * (8 * PLACES) + word % 8
    there = row < rows
    words = tl.load(
        codes + row.to(tl.int64)[:, None] * s_w + word[None, :],
        mask=there[:, None] & (column < inner)[None, :],
        other=0,
    )
    scales_at = ((first + row) // down).to(tl.int64)[:, None] * s_s
    for place in tl.static_range(PLACES):
        at = column + 8 * place
        inside = there[:, None] & (at < inner)[None, :]
        values = _decoded(words, place, KIND)
        if ZEROS:
            values -= tl.load(zero + scales_at + (at // GROUP)[None, :], mask=inside, other=0).to(tl.float32)
        elif KIND <= INT8:
            values -= 8.0 if KIND == INT4 else 128.0
        scales = _scale(tl.load(scale + scales_at + (at // GROUP)[None, :], mask=inside, other=0), SCALES)
        if SECOND == 2:
            scales /= tl.load(second + row, mask=there, other=1.0)[:, None]
        values *= scales
        if SECOND == 1:
            values *= tl.load(second + row, mask=there, other=0.0)[:, None]
        tl.store(
            y + row.to(tl.int64)[:, None] * s_y + at[None, :], values.to(y.dtype.element_ty), mask=inside
        )


def dequantise(weight: Matrix, rows: slice, out: Tensor) -> None:
    """Write some rows of a matrix to `out` `[rows, in]`, rounded to its dtype once."""
    kind, parts, inner = _kind(weight.format), weight.parts, weight.shape[1]
    assert kind is not None, weight.format
    words, zero, second = parts["codes"][rows].view(torch.int32), parts.get("zero"), parts.get("second")
    scale, each = parts["scale"], 64
    scale = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    _dequantise[(triton.cdiv(len(words), 16), triton.cdiv(words.shape[1], each))](
        words,
        scale,
        scale if zero is None else zero,
        scale if second is None else second[rows],
        out,
        rows.start,
        len(words),
        inner,
        kind.down,
        words.stride(0),
        scale.stride(0),
        out.stride(0),
        ROWS=16,
        WORDS=each,
        GROUP=1 << 30 if kind.group >= inner else kind.group,
        KIND=kind.codes,
        PLACES=8 if kind.codes in _FOUR_BITS else 4,
        SCALES=kind.scales,
        ZEROS=zero is not None,
        SECOND=kind.second,
    )
