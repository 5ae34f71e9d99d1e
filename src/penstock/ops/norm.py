"""Normalises by the root mean square (RMSNorm; Zhang and Sennrich 2019, arXiv 1910.07467)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.ops.kernels import row_kernels, triton_kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    It is computed in float32 and rounded to x's dtype before the weight is applied.
    """
    if x.is_cuda and (kernels := triton_kernels("pointwise")):
        normed: Tensor = kernels.rms_norm(x, weight, eps)[0]
        return normed
    if x.dim() == 2 and (ours := row_kernels("pointwise", x)):
        return ours.rms_norm(x, weight, eps)  # type: ignore[no-any-return]
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to `residual` in place, and return the normalised sum; both are `[tokens, hidden]`."""
    if x.is_cuda and (kernels := triton_kernels("pointwise")):
        normed: Tensor = kernels.rms_norm(x, weight, eps, residual)[0]
        return normed
    if ours := row_kernels("pointwise", x):
        return ours.rms_norm(x, weight, eps, residual)  # type: ignore[no-any-return]
    residual.add_(x)
    return rms_norm(residual, weight, eps)
