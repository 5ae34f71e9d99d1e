"""Computes the frequencies of RoPE in double precision, with every scaling that the engine knows.

Sources: Su et al. 2021 (default), Chen et al. 2023 (linear), "NTK-aware" interpolation with a length that
    grows (dynamic), the Llama 3.1 model card (llama3), Peng et al. 2023, arXiv 2309.00071 (yarn). The
    formulas are those of Hugging Face's `modeling_rope_utils`.
"""

import math

from penstock.arch.spec import RopeKind, RopeSpec


def inverse_frequencies(rope: RopeSpec, length: int = 0) -> list[float]:
    """Return the radians by which one position turns each of the `dim / 2` pairs.

    length: tokens of the sequence. Only dynamic scaling depends on it.
    """
    theta = rope.theta
    if rope.kind is RopeKind.DYNAMIC and length > rope.original_length:
        stretch = rope.factor * length / rope.original_length - (rope.factor - 1)
        theta *= stretch ** (rope.dim / (rope.dim - 2))
    plain = [theta ** (-pair / rope.dim) for pair in range(0, rope.dim, 2)]
    match rope.kind:
        case RopeKind.LINEAR:
            return [frequency / rope.factor for frequency in plain]
        case RopeKind.LLAMA3:
            return [_llama3(frequency, rope) for frequency in plain]
        case RopeKind.YARN:
            return _yarn(plain, rope)
        case _:
            return plain


def attention_scale(rope: RopeSpec) -> float:
    """Return the factor of cosines and sines.

    It is 1, except for YaRN, which sharpens attention as the context is stretched (arXiv 2309.00071, section
    3.4).
    """
    if rope.kind is not RopeKind.YARN:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _temperature(rope.factor, rope.mscale) / _temperature(rope.factor, rope.mscale_all_dim)
    return _temperature(rope.factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    """Return YaRN's attention factor, `0.1 mscale ln(factor) + 1`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(frequency: float, rope: RopeSpec) -> float:
    """Divide low frequencies by the factor, keep high ones, and blend those between."""
    turns = rope.original_length * frequency / (2 * math.pi)
    if turns > rope.high_freq_factor:
        return frequency
    if turns < rope.low_freq_factor:
        return frequency / rope.factor
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - keep) * frequency / rope.factor + keep * frequency


def _yarn(plain: list[float], rope: RopeSpec) -> list[float]:
    """Keep pairs that turn more than `beta_fast` times over the trained length; divide those below
    `beta_slow` turns."""

    def pair_that_turns(rotations: float) -> float:
        return (
            rope.dim * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    # A short original length or a small theta puts `high` below `low`, and the ramp falls instead of rising.
    # transformers lets it fall, and checkpoints are trained with that code, so it falls here too. Only a
    # width of exactly zero is widened.
    width = high - low or 0.001
    ramp = [min(max((pair - low) / width, 0.0), 1.0) for pair in range(rope.dim // 2)]
    return [
        frequency * (share / rope.factor + 1 - share) for frequency, share in zip(plain, ramp, strict=True)
    ]
