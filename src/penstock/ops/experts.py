"""A mixture of experts for a whole step, many experts at a time, where kernels take them by their
addresses."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from penstock.ops.activation import silu_mul
from penstock.ops.kernels import triton_kernels
from penstock.ops.linear import dense_linear


def grouped(device: torch.device) -> bool:
    """Whether experts may be computed many at a time on this device: whether `Grouped` works there."""
    return _kernels(device) is not None


class Grouped:
    """One layer's mixture in a step: which experts its tokens take, then products with all of these, in one
    call or in several.

    The result is the same to the last bit however the experts are divided among calls.
    """

    def __init__(self, x: Tensor, scores: Tensor, top_k: int, inner: int, *, normalise: bool) -> None:
        """x `[tokens, hidden]`; scores `[tokens, experts]`, of which each token takes the top_k highest, of
        equal ones those of the lower experts; inner: rows of gate, and of up. Nothing is waited for."""
        kernels = _kernels(x.device)
        assert kernels is not None, f"no kernels on {x.device}"
        self._kernels, self._x = kernels, x
        tokens, experts = scores.shape
        self._tuning = kernels.expert_tuning(tokens * top_k, experts, x.dtype)
        chosen, self._shares = kernels.choose(scores, top_k, normalise=normalise)
        self._order, self._blocks, self._counts = kernels.arrange(chosen, experts, self._tuning.rows)
        self._h, self._y = x.new_empty(tokens * top_k, inner), x.new_empty(tokens * top_k, x.shape[1])
        self._starts: list[int] | None = None
        """For each expert the blocks before its own, and all of them, once the host knows."""

    def used(self) -> list[int]:
        """The experts that some token takes, in their order. The host waits for them."""
        counts = self._counts.tolist()
        self._starts = [0]
        for count in counts:
            self._starts.append(self._starts[-1] + -(-count // self._tuning.rows))
        return [expert for expert, count in enumerate(counts) if count]

    def compute(self, table: Tensor, experts: range | None = None) -> None:
        """Compute the pairs of those experts that have addresses, and if `experts` are given, after `used`,
        of none but these.

        table: int64 `[experts, 2]` on the device, addresses of gate_up `[2 * inner, hidden]`, gate first, and
        down `[hidden, inner]`, or 0.
        """
        first, stop = 0, self._blocks.shape[1]
        if experts is not None:
            assert self._starts is not None, "which experts are used is not known"
            first, stop = self._starts[experts.start], self._starts[experts.stop]
        self._kernels.products(
            self._x, self._order, self._blocks, table, self._h, self._y, self._tuning, first, stop - first
        )

    def total(self) -> Tensor:
        """The sum of each token's experts by their shares, `[tokens, hidden]`: in fp32, shares rounded to the
        dtype before it. To be asked when all have been computed."""
        result: Tensor = self._kernels.combine(self._y, self._shares)
        return result


def experts_reference(
    x: Tensor, scores: Tensor, top_k: int, weights: Sequence[tuple[Tensor, Tensor]], *, normalise: bool
) -> tuple[Tensor, Tensor]:
    """`Grouped` step by step: what each token takes, int64 `[tokens, top_k]`, and the sum. weights: gate_up
    and down of every expert."""
    shares = scores.float().softmax(-1)
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    shares = shares.gather(1, chosen)
    if normalise:
        shares = shares / shares.sum(-1, keepdim=True)
    y = x.new_zeros(len(x), top_k, x.shape[1])
    for expert, (gate_up, down) in enumerate(weights):
        at = chosen == expert
        if at.any():
            inner = silu_mul(dense_linear(x[at.nonzero()[:, 0]], gate_up))
            y[at] = dense_linear(inner, down)
    return chosen, (shares.to(x.dtype).float().unsqueeze(-1) * y.float()).sum(1).to(x.dtype)


def _kernels(device: torch.device) -> ModuleType | None:
    return triton_kernels("experts") if device.type == "cuda" else None
