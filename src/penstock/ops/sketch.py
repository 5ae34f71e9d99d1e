"""Keeps a small low-bit copy of each block's keys, from which scores follow to within a known error.

A sketch has the least and the greatest number of each channel in a block (a box; after Tang et al. 2024,
arXiv 2406.10774). With `bits` of 4 or 8 it also has every key, rounded to so many bits a number in equal
steps between those two, and the length of what rounding left of it. Two things bound how far a query's score
with a rounded key can be from its score with the key itself: half a step in every channel, and by Cauchy's
inequality the query's length times that remainder's. The smaller one is taken, key by key.

A box alone says next to nothing about real keys: its corners are far from all of them. Of 64 keys of 64
channels the score of the best corner is often ten above the best key's, and what counts is the exponential.
Four bits leave about two, eight bits an eighth.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.arch.sketches import QUERIES, SketchLayout
from penstock.ops.activation import soft_cap

_ROUNDING = {"highest": 2.0**-23, "high": 2.0**-10, "medium": 2.0**-7}
"""Relative rounding step of float32 products, by torch's setting.

Bounds are widened by the rounding error.
"""
_BLOCKS = 64
"""Blocks sketched at a time, for the same reason as QUERIES."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores are bounds of queries' scores with whole blocks of keys, float32 `[queries, heads, blocks]`.

    upper: no less than the log of the sum of exp(score) over the block's keys.
    likely: that log as far as the sketch knows it; `upper` itself where there are only boxes.
    """

    upper: Tensor
    likely: Tensor


def sketch(keys: Tensor, layout: SketchLayout) -> Tensor:
    """Make the sketches, uint8 `[blocks, bytes]`, of whole blocks of keys.

    keys: `[blocks, block_size, kv_heads, dim]` of the layout's dtype.
    """
    return torch.cat([_sketch(some, layout) for some in torch.split(keys, _BLOCKS)])


def _sketch(keys: Tensor, layout: SketchLayout) -> Tensor:
    blocks, box = len(keys), layout.box_bytes
    # Exact: they are some of the keys' numbers.
    low, high = keys.aminmax(dim=1) if keys.is_cuda else (keys.amin(1), keys.amax(1))
    found = torch.zeros(blocks, layout.bytes, dtype=torch.uint8, device=keys.device)
    found[:, :box] = torch.stack((low, high), dim=1).flatten(1).view(torch.uint8)
    if not layout.bits:
        return found
    low, high = low.float()[:, :, None], high.float()[:, :, None]  # [blocks, kv_heads, 1, dim]
    step = (high - low) / (2**layout.bits - 1)
    exact = keys.transpose(1, 2).float()
    codes = (
        ((exact - low) / step.clamp_min(torch.finfo(torch.float32).tiny))
        .round_()
        .clamp_(0, 2**layout.bits - 1)
    )
    length = (exact - codes * step - low).norm(dim=3)
    # Rounded up, to a float16 or to infinity, behind which there is no claim either.
    lengths = (length * (1 + 2.0**-9) + 2.0**-23).half()
    numbers = codes.to(torch.uint8)
    if layout.bits == 4:
        first, second = numbers.split((layout.columns, layout.dim - layout.columns), dim=3)
        numbers = first | torch.nn.functional.pad(second, (0, layout.columns - second.shape[3])) << 4
    middle = box + 2 * layout.kv_heads * layout.block_size
    found[:, box:middle] = lengths.flatten(1).view(torch.uint8)
    found[:, middle : middle + numbers[0].numel()] = numbers.flatten(1)
    return found


def scores(q: Tensor, sketches: Tensor, layout: SketchLayout, cap: float | None = None) -> Scores:
    """Score queries with the blocks of these sketches.

    q: scaled queries, float32 `[queries, heads, dim]`.
    sketches: uint8 `[blocks, bytes]`.
    cap: soft cap of each score. It rises with the score and nowhere faster, so that a bound of a score,
        capped, bounds the capped score.
    """
    unpacked = _Unpacked(sketches, layout)
    pieces = [_scores(piece, unpacked, layout, cap) for piece in torch.split(q, QUERIES)]
    return Scores(torch.cat([piece.upper for piece in pieces]), torch.cat([piece.likely for piece in pieces]))


class _Unpacked:
    """Holds the numbers of sketches in float32.

    low, high: `[kv_heads, dim, blocks]`.
    lengths: float16 `[blocks, kv_heads, 1, size]`.
    codes: one tensor for each part of the channels, `[blocks, kv_heads, channels, size]`.
    """

    def __init__(self, sketches: Tensor, layout: SketchLayout) -> None:
        blocks, kv_heads, size, box = len(sketches), layout.kv_heads, layout.block_size, layout.box_bytes
        boxes = sketches[:, :box].view(getattr(torch, layout.dtype)).view(blocks, 2, kv_heads, layout.dim)
        self.low, self.high = boxes.float().permute(1, 2, 3, 0)
        self.codes: tuple[Tensor, ...] = ()
        if layout.bits:
            end = box + 2 * kv_heads * size
            self.lengths = sketches[:, box:end].view(torch.float16).view(blocks, kv_heads, 1, size)
            numbers = (
                sketches[:, end : end + kv_heads * size * layout.columns]
                .view(blocks, kv_heads, size, layout.columns)
                .mT
            )
            self.codes = (numbers.float(),)
            if layout.bits == 4:
                self.codes = (
                    (numbers & 15).float(),
                    (numbers >> 4)[:, :, : layout.dim - layout.columns].float(),
                )


def _scores(q: Tensor, keys: _Unpacked, layout: SketchLayout, cap: float | None) -> Scores:
    kv_heads, dim, size, low, high = layout.kv_heads, layout.dim, layout.block_size, keys.low, keys.high
    queries, heads, _ = q.shape
    blocks, group = low.shape[2], heads // kv_heads
    q = q.view(queries, kv_heads, group, dim).permute(1, 0, 2, 3).reshape(kv_heads, queries * group, dim)
    reach, middle, spread = q.abs(), (low + high) / 2, (high - low) / 2
    # [kv_heads, queries * group, blocks] from here on
    rounding = _ROUNDING[torch.get_float32_matmul_precision()]
    swing = reach @ spread
    slack = (
        4 * (dim + 16) * rounding * (reach @ torch.maximum(low.abs(), high.abs())) + (size + 16) * rounding
    )
    if cap is not None:
        slack += 16 * rounding * cap  # Of the caps themselves, here and where keys are read.
    upper = soft_cap(q @ middle + swing, cap) + slack + math.log(size)
    likely = upper
    if keys.codes:
        levels = 2**layout.bits - 1
        steps = (q[..., None] * ((high - low) / levels)[:, None]).permute(
            3, 0, 1, 2
        )  # [blocks, kv_heads, queries * group, dim]
        known = (q @ low).permute(2, 0, 1)[..., None]  # [blocks, kv_heads, queries * group, size]
        for part, codes in zip(
            steps.split([codes.shape[2] for codes in keys.codes], dim=3), keys.codes, strict=True
        ):
            known = known + part @ codes
        half_steps = (swing / levels).permute(2, 0, 1)[..., None]
        length = q.norm(dim=2)[None, :, :, None] * (1 + (dim + 4) * rounding)
        apart = torch.fmin(length * keys.lengths.float(), half_steps)  # 0 times infinity is no number
        highest = soft_cap(apart.add_(known), cap)
        likely = soft_cap(known, cap).logsumexp(3).permute(1, 2, 0)
        upper = torch.minimum(upper, highest.logsumexp(3).permute(1, 2, 0) + slack)

    def by_query(x: Tensor) -> Tensor:
        return x.reshape(kv_heads, queries, group, blocks).permute(1, 0, 2, 3).reshape(queries, heads, blocks)

    return Scores(by_query(upper), by_query(likely))
