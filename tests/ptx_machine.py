"""A machine that runs PTX, as inline assembly has it, on many words at once.

It knows the instructions that take codes of few bits apart and multiply them, and refuses what an assembler
or a device would: an instruction or an operand of another kind, a register that is not declared, or is read
before it is written. Sums and products are rounded once, to nearest even, and keep subnormal numbers. Source
of what instructions do: the PTX ISA, chapter 9.7.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Numbers = NDArray[np.float64]
_FORMATS = {"f16": (11, -14), "bf16": (8, -126)}
"""Digits of numbers, with the one before the point, and the least exponent of those that have them all."""


def run_ptx(text: str, given: Sequence[NDArray[Any]], outputs: int) -> list[Words]:
    """Return what the registers for results hold behind instructions on words, which have one shape or are
    broadcast to it. The registers of results come first, those that are given follow."""
    machine = _Machine(outputs, given)
    body = text.strip()
    if body.startswith("{"):
        assert body.endswith("}"), text
        body = body[1:-1]
    *statements, rest = body.split(";")
    assert not rest.strip(), f"no ; behind {rest}"
    for statement in statements:
        machine.run(statement.strip())
    shape = np.broadcast_shapes(*(np.shape(one) for one in given))
    return [np.broadcast_to(machine.word(f"${place}"), shape) for place in range(outputs)]


class _Machine:
    """Registers, and what they hold."""

    def __init__(self, outputs: int, given: Sequence[NDArray[Any]]) -> None:
        self._bits = {f"${place}": 32 for place in range(outputs)}
        self._held: dict[str, Words] = {
            f"${outputs + place}": np.asarray(word).astype(np.uint32) for place, word in enumerate(given)
        }

    def run(self, statement: str) -> None:
        """Run one instruction, or declare registers."""
        operation, *rest = statement.split(None, 1)
        if operation.startswith("@"):
            assert rest == ["trap"], statement
            assert not self._register(operation[1:], 1).any(), f"{statement}: a thread has stopped"
            return
        [operands] = rest
        into, *names = (one.strip() for one in re.split(r",(?![^{]*\})", operands))
        match operation.split("."):
            case ["", "reg"]:
                kind, first = into.split()
                self._bits |= dict.fromkeys((first, *names), {".pred": 1, ".b16": 16, ".b32": 32}[kind])
            case ["mov", "u32"] if names == ["%tid.x"]:
                self._write(into, np.arange(32))
            case ["setp", "ne", "u32"]:
                a, b = (self._register(one) for one in names)
                self._write(into, a != b, 1)
            case [
                "mma",
                "sync",
                "aligned",
                "m16n8k16",
                "row",
                "col",
                "f32",
                "f16" | "bf16" as kind,
                same,
                "f32",
            ]:
                assert same == kind, statement
                a, b, c = (one.strip("{}").split(", ") for one in names)
                for name, made in zip(
                    into.strip("{}").split(", "), self._product(a, b, c, kind), strict=True
                ):
                    self._write(name, made)
            case ["mov", "b32"] if into.startswith("{"):
                [source] = names
                low, high = _pair(into)
                word = self._register(source)
                self._write(low, word & 0xFFFF, 16)
                self._write(high, word >> 16, 16)
            case ["mov", "b32"] if names[0].startswith("{"):
                [source] = names
                low, high = (self._register(one, 16) for one in _pair(source))
                self._write(into, low | high << 16)
            case ["cvt", "rn", "f16x2", "e4m3x2"]:
                [source] = names
                two = self._register(source, 16)
                self._write(into, _e4m3()[two & 0xFF] | _e4m3()[two >> 8] << 16)
            case ["cvt", "f32", "f16"]:
                [source] = names
                half = self._register(source, 16).astype(np.uint16).view(np.float16)
                self._write(into, half.astype(np.float32).view(np.uint32))
            case ["cvt", "rn", "f16x2" | "bf16x2" as kind, "f32"]:
                high, low = (_bits(_single(self._register(one)), kind[:-2]) for one in names)
                self._write(into, low | high << 16)
            case ["fma", "rn", "f16x2" | "bf16x2" as kind]:
                a, b, c = (self._register(one) for one in names)
                low = _fused(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF, kind[:-2])
                high = _fused(a >> 16, b >> 16, c >> 16, kind[:-2])
                self._write(into, low | high << 16)
            case ["sub", "rn", "f32"]:
                a, b = (self._float(one).view(np.float32) for one in names)
                self._write(into, np.subtract(a, b).view(np.uint32))
            case _:
                self._write(into, _logical(operation, [self.word(one) for one in names]))

    def _product(self, a: Sequence[str], b: Sequence[str], c: Sequence[str], kind: str) -> list[Words]:
        """Return the four registers of `a · b + c`, of matrices that 32 lanes have parts of, which are the
        last axis (PTX ISA, matrix fragments for mma.m16n8k16 with floating point types)."""
        assert (len(a), len(b), len(c)) == (4, 2, 4)
        lanes = np.arange(32)
        group, thread = lanes // 4, lanes % 4

        def matrix(names: Sequence[str], shape: tuple[int, int], rows: Any, columns: Any) -> Numbers:
            words = [np.broadcast_to(self._register(name), (*self._lanes(), 32)) for name in names]
            whole = np.full((*self._lanes(), *shape), np.nan)
            for at, word in enumerate(words):
                for half in (0, 1):
                    number = _numbers(word >> 16 * half & 0xFFFF, kind)
                    whole[..., rows(at), columns(at) + half] = number
            return whole

        left = matrix(a, (16, 16), lambda at: group + 8 * (at % 2), lambda at: 2 * thread + 8 * (at // 2))
        right = matrix(b, (8, 16), lambda at: group, lambda at: 2 * thread + 8 * at)
        assert not np.isnan(left).all()
        total = left @ np.swapaxes(right, -1, -2)
        made = []
        for at, name in enumerate(c):
            before = self._float(name).view(np.float32).astype(np.float64)
            part = total[..., group + 8 * (at // 2), 2 * thread + at % 2]
            made.append((part + before).astype(np.float32).view(np.uint32))
        return made

    def _lanes(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(np.shape(one) for one in self._held.values()))[:-1]

    def word(self, name: str) -> Words:
        """Return what a register holds, or a whole number."""
        if re.fullmatch(r"0x[0-9a-f]+|[0-9]+", name):
            return np.asarray(int(name, 0), np.uint32)
        return self._register(name)

    def _float(self, name: str) -> Words:
        if re.fullmatch(r"0f[0-9a-f]{8}", name):
            return np.asarray(int(name[2:], 16), np.uint32)
        return self._register(name)

    def _register(self, name: str, bits: int = 32) -> Words:
        assert name in self._held, f"{name} holds nothing, or is no register"
        assert self._bits.get(name, 32) == bits, f"{name} has not {bits} bits"
        return self._held[name]

    def _write(self, name: str, made: NDArray[Any], bits: int = 32) -> None:
        assert self._bits.get(name) == bits, f"{name} is no register of {bits} bits that may be written"
        self._held[name] = made.astype(np.uint32)


def _pair(braced: str) -> list[str]:
    low, high = (one.strip() for one in braced.strip("{}").split(","))
    return [low, high]


def _logical(operation: str, operands: Sequence[Words]) -> NDArray[Any]:
    """Return what an instruction makes that takes words for bits alone."""
    match operation, *operands:
        case "mov.b32", a:
            return a
        case "and.b32", a, b:
            return a & b
        case "shl.b32" | "shr.b32" | "shr.u32" as shift, a, b:
            assert (b < 32).all(), f"{shift} by {b}"
            return a << b if shift == "shl.b32" else a >> b
        case "add.u32", a, b:
            return a + b
        case "max.u32" | "min.u32" as which, a, b:
            return np.maximum(a, b) if which == "max.u32" else np.minimum(a, b)
        case "lop3.b32", a, b, c, table if table == 0xEA:
            return a & b | c
        case "lop3.b32", a, b, c, table if table == 0x6A:
            return a & b ^ c
        case "prmt.b32", a, b, selector:
            return _permuted(a, b, selector)
    raise AssertionError(f"no such instruction: {operation} of {len(operands)}")


def _permuted(a: Words, b: Words, selector: Words) -> NDArray[Any]:
    """Return four bytes of eight, each chosen by three bits of four; with the fourth its sign is repeated."""
    among, made = a.astype(np.uint64) | b.astype(np.uint64) << 32, np.zeros((), np.uint64)
    for place in range(4):
        pick = (selector >> 4 * place & 15).astype(np.uint64)
        byte = among >> (pick & 7) * 8 & 255
        byte = np.where(pick > 7, (byte >> 7) * 255, byte)
        made = made | byte << 8 * place
    return made


@cache
def _e4m3() -> Words:
    """Return the bits of float16 that float8_e4m3fn numbers are, by their code."""
    wide = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half().numpy().view(np.uint16)
    wide[[0x7F, 0xFF]] = 0x7FFF
    return wide.astype(np.uint32)


def _single(word: Words) -> Numbers:
    return word.view(np.float32).astype(np.float64)


def _numbers(bits: Words, kind: str) -> Numbers:
    if kind == "bf16":
        return _single(bits << 16)
    return bits.astype(np.uint16).view(np.float16).astype(np.float64)


def _bits(numbers: Numbers, kind: str) -> Words:
    """Return the bits of numbers, rounded to nearest even."""
    digits, least = _FORMATS[kind]
    with np.errstate(over="ignore", invalid="ignore"):
        exponents = np.maximum(np.frexp(numbers)[1] - 1, least) - (digits - 1)
        fits = np.ldexp(np.rint(np.ldexp(numbers, -exponents)), exponents)
        if kind == "bf16":
            return fits.astype(np.float32).view(np.uint32) >> 16
        return fits.astype(np.float16).view(np.uint16).astype(np.uint32)


def _fused(a: Words, b: Words, c: Words, kind: str) -> Words:
    """Return the bits of a · b + c, rounded once.

    The product is exact in float64. A sum that is not is made the odd one of its two neighbours, which no
    rounding to fewer digits takes for the middle (Boldo and Melquiond, Emulation of FMA and correctly rounded
    sums, 2008).
    """
    with np.errstate(invalid="ignore"):
        product, more = _numbers(a, kind) * _numbers(b, kind), _numbers(c, kind)
        total = product + more
        virtual = total - product
        lost = (product - (total - virtual)) + (more - virtual)
        even = total.view(np.int64) % 2 == 0
        odd = np.nextafter(total, np.copysign(np.inf, lost))
    return _bits(np.where(np.isfinite(lost) & (lost != 0) & even, odd, total), kind)
