"""Rotates heads by their positions (RoPE; Su et al. 2021, arXiv 2104.09864), half-split as in checkpoints."""

import torch
from torch import Tensor

from penstock.arch.rope import attention_scale, inverse_frequencies
from penstock.arch.spec import RopeKind, RopeSpec
from penstock.ops.kernels import triton_kernels

_KEPT = 64
"""Positions whose angles are kept for sequences that are decoded alone, one token after the other."""


class RotaryAngles:
    """Computes cosines and sines for any positions.

    Angles are taken in float64, so that no position in use is rounded to its neighbour.
    """

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        self._rope = rope
        self._device = device
        self.scale = self._tensor([attention_scale(rope)])
        """Factor of cosines and sines, float64 `[1]`."""
        self.frequencies = self._tensor(inverse_frequencies(rope))
        """Radians of a position, float64 `[dim / 2]`; with dynamic scaling those of short sequences."""
        self._kept: tuple[int, Tensor, Tensor] | None = None
        """The first of `_KEPT` positions, and their tables."""

    def _tensor(self, numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=self._device)

    def of_one(self, position: int) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), float32 `[1, dim / 2]`, for one position, without dynamic scaling."""
        first = position // _KEPT * _KEPT
        if self._kept is None or self._kept[0] != first:
            positions = torch.arange(first, first + _KEPT, device=self._device)
            self._kept = first, *self.tables(positions)
        _, cos, sin = self._kept
        at = slice(position - first, position - first + 1)
        return cos[at], sin[at]

    def tables(self, positions: Tensor, lengths: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), float32 `[tokens, dim / 2]`, for int64 positions `[tokens]`.

        lengths: for dynamic scaling, the length of each token's sequence. Its frequencies depend on it.
        """
        frequencies = self.frequencies
        if self._rope.kind is RopeKind.DYNAMIC and lengths is not None:
            rows = {length: row for row, length in enumerate(dict.fromkeys(lengths))}
            several = self._tensor(
                [frequency for length in rows for frequency in inverse_frequencies(self._rope, length)]
            )
            frequencies = several.view(len(rows), -1)[
                torch.tensor([rows[length] for length in lengths], device=self._device)
            ]
        angles = positions.to(torch.float64)[:, None] * frequencies
        return (angles.cos() * self.scale).float(), (angles.sin() * self.scale).float()


def rotate(qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries and keys `[tokens, heads, dim]` by their positions' angles, perhaps in place.

    The first `turned` dimensions of a head are rotated, the others stay as they are.

    cos, sin: float32 `[tokens, turned / 2]`.
    """
    if qk.is_cuda and (kernels := triton_kernels("pointwise")):
        kernels.rope_(qk, None, cos, sin)
        return qk
    turned = 2 * cos.shape[1]
    first, second = qk[..., :turned].float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qk.dtype)
    return rotated if turned == qk.shape[-1] else torch.cat((rotated, qk[..., turned:]), dim=-1)
