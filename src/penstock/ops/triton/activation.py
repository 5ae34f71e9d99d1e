"""Compute activations of feed-forwards within kernels of products."""

import triton
import triton.language as tl

from penstock.arch.spec import Activation
from penstock.ops.triton.pointwise import silu


@triton.jit  # type: ignore[untyped-decorator]
def activated(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the activation (`spec.Activation`) of float32 gate and up in float32.

    KIND: dtype to which silu is rounded before the product. All else is rounded by the caller, once.
    LIMIT: 0 for none.
    """
    if LIMIT > 0.0:  # A comparison with NaN is false, so NaN stays.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if (ALPHA == 1.0) & (SHIFT == 0.0) & (LIMIT == 0.0):
        active = silu(gate).to(KIND).to(tl.float32) * up
    else:
        tail = tl.exp(-tl.abs(ALPHA * gate))
        active = (up + SHIFT) * (gate * (tl.where(gate * ALPHA >= 0.0, 1.0, tail) / (1.0 + tail)))
    return active


def activation_options(activation: Activation) -> dict[str, float]:
    """Return the arguments by which kernels give an activation to `activated`."""
    return {"ALPHA": activation.alpha, "SHIFT": activation.shift, "LIMIT": activation.limit or 0.0}
