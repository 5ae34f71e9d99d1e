"""KV blocks in fp8, e4m3: half the bytes in host memory and on the disk, for blocks of long contexts.

Numbers have a scale for each head of a block's plane. It is a power of two, so that scaling is exact and only
rounding loses anything: a sixteenth of a number at most, or 2^-17 of its head's largest. Blocks are rounded
on their way to the host (`tiles.Outbox`), and expanded when a tile of them is taken (`tiles.TileRing`).
"""

from math import frexp, ldexp

import torch
from torch import Tensor

from penstock.arch.layout import PlaneLayout


def round_into(plane: Tensor, placed: PlaneLayout, rows: Tensor) -> None:
    """Put a plane of blocks, `[blocks, block_size, heads, width]`, into rows as it rests.

    rows: uint8 `[blocks, bytes]`.
    """
    if placed.rounded:
        to_fp8(plane, rows)
    else:
        rows.copy_(plane.flatten(1).view(torch.uint8))


def expand(rows: Tensor, placed: PlaneLayout, plane: Tensor) -> None:
    """Do the reverse of `round_into`."""
    if placed.rounded:
        from_fp8(rows, plane)
    else:
        plane.flatten(1).view(torch.uint8).copy_(rows)


def to_fp8(blocks: Tensor, rows: Tensor) -> None:
    """Round a plane of blocks, `[..., block_size, heads, width]` of any strides.

    rows: the result, uint8 `[..., bytes of a block's plane]`.

    A head's scale is the least power of two by which its numbers come to e4m3's largest, 448, or below: found
    in the bits of a float32, as logarithms are not exact. What would be rounded up to infinity is rounded
    down.
    """
    values, scales = _fp8_parts(rows, blocks.shape[-3:])
    most = ldexp(15 / 16, frexp(torch.finfo(blocks.dtype).max)[1])  # of four significant bits
    largest = torch.linalg.vector_norm(blocks, torch.inf, (-3, -1), keepdim=True, dtype=torch.float32).clamp_(
        max=most
    )
    # Of 448, or 1.75 * 2^8, a fraction above 1.75 carries into the exponent. No float32 is scaled by less
    # than the least normal one.
    exponent = ((largest.view(torch.int32) + 0x1FFFFF) >> 23).sub_(8).clamp_(min=1)
    scale = torch.where(largest > 0, (exponent << 23).view(torch.float32), 1.0)
    values.copy_((blocks / scale).clamp_(-most / scale, most / scale))
    scales.copy_(scale)


def from_fp8(rows: Tensor, blocks: Tensor) -> None:
    """Expand what `to_fp8` has made into blocks of any floating dtype."""
    values, scales = _fp8_parts(rows, blocks.shape[-3:])
    blocks.copy_(values)
    blocks.mul_(scales)


def as_rested(blocks: Tensor) -> Tensor:
    """Return a plane of blocks, `[blocks, block_size, heads, width]`, as it comes back from fp8."""
    shape = blocks.shape[-3:]
    rows = torch.empty(len(blocks), shape.numel() + shape[1] * 4, dtype=torch.uint8, device=blocks.device)
    to_fp8(blocks, rows)
    back = torch.empty(blocks.shape, dtype=blocks.dtype, device=blocks.device)
    from_fp8(rows, back)
    return back


def _fp8_parts(rows: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return of each row the numbers, e4m3 of this shape `[block_size, heads, width]`, and their scales,
    float32 `[1, heads, 1]`."""
    values, scales = rows.tensor_split([shape.numel()], -1)
    values = values.view(torch.float8_e4m3fn).view(*rows.shape[:-1], *shape)
    return values, scales.view(torch.float32)[..., None, :, None]
