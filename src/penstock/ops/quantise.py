"""Quantises matrices without data: finds the codes, scales and zero points that lose least.

Integers follow half-quadratic quantisation (Badri and Shaji, HQQ, 2023): in turn, codes are rounded for a
scale and a zero point, and these are solved for in closed form with the codes as they are. Unlike there the
norm is of the numbers' squares, since that is what a product of unknown activations loses on average, and
zero points are whole numbers. Several first ranges are tried; the best that was seen counts.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from penstock.arch.formats.codes import packed, spread
from penstock.arch.formats.floats import Float8
from penstock.arch.formats.format import WeightFormat
from penstock.arch.formats.integers import Integers

RANGES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""First ranges of a group's numbers, of the whole, from which codes and scales are improved."""
ROUNDS = 3
"""Times that scale and zero point are solved for from each range."""
_STEPS = 8
"""Scales of a block of float8 that are tried, evenly spaced within a factor of two."""
_LEAST, _MOST = 2.0**-24, 65504.0
"""Sizes of float16 numbers but 0."""
_MOST_FLOAT8 = 448.0


def quantise(matrix: Tensor, format: WeightFormat) -> tuple[Mapping[str, Tensor], Tensor]:
    """Return the parts of a matrix in a format, or of some of its rows, and the matrix that they stand for.

    matrix: float32 `[rows, in]`; rows are whole blocks of the format.
    format: Integers without an order, or Float8, as `cut` returned it.
    """
    if isinstance(format, Integers):
        return _integers(matrix, format)
    assert isinstance(format, Float8), format
    return _floats(matrix, format)


def _integers(matrix: Tensor, format: Integers) -> tuple[Mapping[str, Tensor], Tensor]:
    height, width = matrix.shape
    groups = matrix.view(height, -1, format.group)
    scale, zero = _best(groups, format)
    codes = _codes(groups, scale, zero, (1 << format.bits) - 1)
    made = ((codes - zero) * scale).view(height, width)
    parts = {"codes": packed(codes.byte().view(height, width), format.bits), "scale": scale[:, :, 0].half()}
    return (parts | {"zero": zero[:, :, 0].byte()} if format.zeros else parts), made


def _best(groups: Tensor, format: Integers) -> tuple[Tensor, Tensor]:
    """Return the scale and zero point of each group, `[rows, groups, 1]`, with the least squared error."""
    most = (1 << format.bits) - 1
    scale = zero = least = groups.new_zeros(())
    for number, (step, point) in enumerate(_tried(groups, format)):
        codes = _codes(groups, step, point, most)
        error = (groups - (codes - point) * step).square().sum(-1, keepdim=True)
        better = error < least if number else torch.ones_like(error, dtype=torch.bool)
        scale, zero = torch.where(better, step, scale), torch.where(better, point, zero)
        least = torch.where(better, error, least)
    return scale, zero


def _tried(groups: Tensor, format: Integers) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales and zero points: first ranges, each followed by what its codes lead to."""
    most, middle = (1 << format.bits) - 1, float(format.middle)
    low, high = groups.amin(-1, True).clamp(max=0), groups.amax(-1, True).clamp(min=0)
    for part in RANGES:
        if format.zeros:
            scale = _kept((high - low) * (part / most))
            zero = (-low * part / scale).round_().clamp_(0, most)
        else:
            # The larger end has the code that the other end lacks: the scale is negative if that is above.
            end = torch.where(high > -low, high, low)
            scale, zero = _kept(end * (-part / middle)), torch.full_like(low, middle)
        yield scale, zero
        for _ in range(ROUNDS):
            codes = _codes(groups, scale, zero, most)
            away = codes - zero
            scale = _kept((groups * away).sum(-1, True) / away.square().sum(-1, True).clamp_(min=1))
            if format.zeros:
                zero = (codes - groups / scale).mean(-1, True).round_().clamp_(0, most)
            yield scale, zero


def _codes(groups: Tensor, scale: Tensor, zero: Tensor, most: int) -> Tensor:
    return (groups / scale).round_().add_(zero).clamp_(0, most)


def _kept(scale: Tensor) -> Tensor:
    """Return scales as float16 keeps them, in float32, none of them 0."""
    sign = torch.where(scale < 0, -1.0, 1.0)
    return (sign * scale.abs().clamp(_LEAST, _MOST)).half().float()


def _floats(matrix: Tensor, format: Float8) -> tuple[Mapping[str, Tensor], Tensor]:
    """Round to float8 times the scale that loses least, of some between one where the largest number fits
    and half of what float8 holds."""
    height, width = matrix.shape
    down, across = format.down, format.across
    largest = _blocks(matrix.abs(), down, across).amax((1, 3)) / _MOST_FLOAT8
    largest = torch.where(largest > 0, largest, 1.0)
    scale = least = largest
    for step in range(_STEPS):
        tried = largest * 2 ** (step / _STEPS)
        wide = _wide(tried, format, height, width)
        made = (matrix / wide).clamp_(-_MOST_FLOAT8, _MOST_FLOAT8).to(torch.float8_e4m3fn).float() * wide
        error = _blocks((matrix - made).square_(), down, across).sum((1, 3))
        better = error < least if step else torch.ones_like(error, dtype=torch.bool)
        scale, least = torch.where(better, tried, scale), torch.where(better, error, least)
    wide = _wide(scale, format, height, width)
    values = (matrix / wide).clamp_(-_MOST_FLOAT8, _MOST_FLOAT8).to(torch.float8_e4m3fn)
    return {"codes": packed(values.view(torch.uint8), 8), "scale": scale}, values.float() * wide


def _wide(scale: Tensor, format: Float8, height: int, width: int) -> Tensor:
    """Return the scale of each number, `[rows, in]`."""
    return spread(scale, format.across, width).repeat_interleave(format.down, 0)[:height]


def _blocks(values: Tensor, down: int, across: int) -> Tensor:
    """Return blocks `[above, down, beside, across]`, those at the edges filled up with zeros."""
    height, width = values.shape
    whole = torch.nn.functional.pad(values, (0, -width % across, 0, -height % down))
    return whole.view(-1, down, whole.shape[1] // across, across)
