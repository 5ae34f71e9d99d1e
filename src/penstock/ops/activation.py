"""Compute the activations of feed-forwards, SwiGLU (Shazeer 2020, arXiv 2002.05202) and its kin, and the soft
cap of scores and logits (Gemma Team 2024, arXiv 2408.00118)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.arch.spec import SWIGLU, Activation
from penstock.ops.kernels import row_kernels, triton_kernels


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `[tokens, inner]`, of a fused `[tokens, 2 * inner]` with the gate first."""
    if gate_up.is_cuda and (kernels := triton_kernels("pointwise")):
        result: Tensor = kernels.silu_mul(gate_up)
        return result
    if ours := row_kernels("pointwise", gate_up):
        return ours.silu_mul(gate_up)  # type: ignore[no-any-return]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def activate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return the activation, `[tokens, inner]`, of a fused `[tokens, 2 * inner]` with the gate first.

    `gate_up` may be overwritten.
    """
    if activation == SWIGLU:
        return silu_mul(gate_up)
    return activate_into(gate_up, gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2), activation)


def activate_into(gate_up: Tensor, out: Tensor, activation: Activation) -> Tensor:
    """Write the activation of a fused `[tokens, 2 * inner]`, the gate first, to `out` `[tokens, inner]` and
    return it. `gate_up` is overwritten.

    SwiGLU is rounded before the product with up. Others are computed in float32 and rounded once.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == SWIGLU:
        return torch.mul(F.silu(gate, inplace=True), up, out=out)
    gate, up = gate.float(), up.float()
    if activation.limit is not None:
        gate = gate.clamp_(max=activation.limit)
        up = up.clamp_(-activation.limit, activation.limit)
    share = gate.mul(activation.alpha).sigmoid_()
    return out.copy_(up.add_(activation.shift).mul_(gate.mul_(share)))


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Return `cap * tanh(x / cap)`, between -cap and cap, in the place of x; x itself without a cap."""
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)
