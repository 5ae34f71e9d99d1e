"""Holds the residual stream: hidden states that blocks read normalised, and to which they add."""

from collections.abc import Callable

from torch import Tensor

from penstock.models.inputs import Collectives
from penstock.ops.norm import add_rms_norm, rms_norm

_MANY_ROWS = 512
"""Tokens beyond which a block's last product adds to the residual by itself.

The next norm then reads and writes half as much.
"""


class Residual:
    """The residual is the hidden states `[tokens, hidden]`, the same on every rank.

    A block's output, on a rank its part, is not added at once: the next norm, the sum over ranks and the
    addition are one kernel.
    """

    def __init__(self, x: Tensor, eps: float, collectives: Collectives | None) -> None:
        """Begin with the embedding's output `x`, on a rank its part."""
        self.x, self._eps, self._collectives = x, eps, collectives
        self._part: Tensor | None = None
        """Output of a block that is not added yet."""
        if collectives is not None:
            collectives.all_reduce(x)

    def normed(self, weight: Tensor | None) -> Tensor:
        """Return the input of the next block: the sum so far, normalised if there is a weight."""
        part, self._part = self._part, None
        if weight is None:
            return self._add(part).clone()
        if part is None:
            return rms_norm(self.x, weight, self._eps)
        if self._collectives is not None:
            return self._collectives.add_rms_norm(part, self.x, weight, self._eps)
        return add_rms_norm(part, self.x, weight, self._eps)

    def add(self, part: Tensor, norm_after: Tensor | None = None, scale: float = 1.0) -> None:
        """Take a block's output, a rank's part of it, to be added.

        norm_after: weight by which the whole is normalised first, if there is one.
        scale: factor of what is added.
        """
        if norm_after is None:
            self._part = part if scale == 1.0 else part.mul_(scale)
            return
        if self._collectives is not None:
            self._collectives.all_reduce(part)
        self.x.add_(rms_norm(part, norm_after, self._eps), alpha=scale)

    def pass_half(self, half: Callable[[Tensor, Tensor | None], Tensor | None]) -> bool:
        """Let `half` compute half a layer, if it can; tell whether it did.

        It takes x and a block's output that is not added yet. It adds that to x in place and returns the
        output of its own block, or it returns None and changes nothing.
        """
        if self._collectives is not None or (out := half(self.x, self._part)) is None:
            return False
        self._part = out
        return True

    def takes_products(self, scale: float, *vectors: Tensor | None) -> bool:
        """Tell whether a block's last product is best added to `x` by itself: not where a scale, or a bias or
        a norm, which are `vectors`, comes after it."""
        alone = self._collectives is None and self.x.is_cuda and len(self.x) > _MANY_ROWS
        return alone and scale == 1.0 and all(vector is None for vector in vectors)

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, int64 `[rows]`. No output may be waiting to be added."""
        self.x = self.x[rows]

    def peek(self) -> Tensor:
        """Return a copy of the sum so far. Nothing that is computed later changes by it, but that on GPUs of
        several ranks the squares of the next norm are added up in another order.

        All ranks call it at once: what is not added yet is summed over them here, not in the next norm.
        """
        if self._part is None or self._collectives is not None:
            return self.sum().clone()
        return self.x + self._part

    def sum(self) -> Tensor:
        """Return the hidden states, with the outputs of all blocks."""
        part, self._part = self._part, None
        return self._add(part)

    def _add(self, part: Tensor | None) -> Tensor:
        if part is not None:
            if self._collectives is not None:
                self._collectives.all_reduce(part)
            self.x.add_(part)
        return self.x
