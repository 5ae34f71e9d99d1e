"""Rotary frequencies at far positions: each kind written out again from its source, in 50 digits.

What counts is the angle, position times frequency: at a position of tens of millions a frequency must be
right to its last bits.
"""

import struct
from decimal import Decimal, localcontext

import pytest

from penstock.arch.rope import inverse_frequencies
from penstock.arch.spec import RopeKind, RopeSpec

FARTHEST = 2**26
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
ROPES = {
    "default": RopeSpec(theta=500000.0, dim=128),
    "small theta": RopeSpec(theta=10000.0, dim=64),
    "large theta": RopeSpec(theta=1e7, dim=128),
    "linear": RopeSpec(theta=10000.0, dim=128, kind=RopeKind.LINEAR, factor=3.7),
    "llama3": RopeSpec(theta=500000.0, dim=128, kind=RopeKind.LLAMA3, factor=8.0, original_length=8192),
    "yarn": RopeSpec(theta=1e6, dim=128, kind=RopeKind.YARN, factor=4.0, original_length=32768),
    "yarn untruncated": RopeSpec(
        theta=1e4, dim=64, kind=RopeKind.YARN, factor=40.0, original_length=4096, truncate=False
    ),
}


def exact_frequencies(rope: RopeSpec) -> list[Decimal]:
    """In 50 digits, whatever precision the caller works in."""
    with localcontext(prec=50):
        theta, factor, original = Decimal(rope.theta), Decimal(rope.factor), Decimal(rope.original_length)
        plain = [(theta.ln() * Decimal(-2 * pair) / rope.dim).exp() for pair in range(rope.dim // 2)]
        if rope.kind is RopeKind.LINEAR:
            return [frequency / factor for frequency in plain]
        if rope.kind is RopeKind.LLAMA3:
            longest, shortest = (
                original / Decimal(rope.low_freq_factor),
                original / Decimal(rope.high_freq_factor),
            )
            scaled = []
            for frequency in plain:
                wave = 2 * PI / frequency
                smooth = (original / wave - Decimal(rope.low_freq_factor)) / Decimal(
                    rope.high_freq_factor - rope.low_freq_factor
                )
                blended = (1 - smooth) * frequency / factor + smooth * frequency
                scaled.append(
                    frequency if wave < shortest else frequency / factor if wave > longest else blended
                )
            return scaled
        if rope.kind is RopeKind.YARN:
            edges = [
                rope.dim * (original / (Decimal(beta) * 2 * PI)).ln() / (2 * theta.ln())
                for beta in (rope.beta_fast, rope.beta_slow)
            ]
            if rope.truncate:
                edges = [
                    edges[0].to_integral_value("ROUND_FLOOR"),
                    edges[1].to_integral_value("ROUND_CEILING"),
                ]
            low, high = max(edges[0], Decimal(0)), min(edges[1], Decimal(rope.dim - 1))
            ramp = [
                min(max((pair - low) / (high - low), Decimal(0)), Decimal(1)) for pair in range(rope.dim // 2)
            ]
            return [
                frequency / factor * share + frequency * (1 - share)
                for frequency, share in zip(plain, ramp, strict=True)
            ]
        return plain


@pytest.mark.parametrize("name", ROPES)
def test_angles_at_the_farthest_position(name: str) -> None:
    rope = ROPES[name]
    for frequency, exact in zip(inverse_frequencies(rope), exact_frequencies(rope), strict=True):
        assert abs(Decimal(frequency) - exact) * FARTHEST < Decimal("1e-7")


def test_single_precision_would_not_do() -> None:
    """The limit above tells: the same frequencies rounded to float32 err by a tenth of a radian and more."""
    exact = exact_frequencies(ROPES["default"])
    rounded = struct.unpack("64f", struct.pack("64f", *exact))
    assert max(abs(Decimal(a) - b) for a, b in zip(rounded, exact, strict=True)) * FARTHEST > Decimal("0.1")
