"""Multiplies activations with weights `[out, in]`, in whatever storage format these rest."""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.ops.activation import silu_mul
from penstock.ops.kernels import triton_kernels
from penstock.ops.matrix import Matrix

_FEW_ROWS = 256
"""Rows up to which a float32 product on a CPU is bound by reading the weights."""


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, `[tokens, out]`, contiguous.

    x: `[tokens, in]`.
    weight: `[out, in]` in any format.
    bias: `[out]`.
    out: where the result is written, contiguous; it must not overlap an input.
    """
    if weight.dense is not None:
        return dense_linear(x, weight.dense, bias, out=out)
    if kernels := _format_kernels(x, weight):
        product: Tensor = kernels.linear(x, weight.parts, bias, out=out)
        return product
    return dense_linear(x, weight.dequantised(x), bias, out=out)


def add_linear(x: Tensor, weight: Matrix, onto: Tensor) -> None:
    """Add `x @ weight.T` to `onto` in place, rounded once.

    x: `[tokens, in]`.
    weight: `[out, in]`.
    onto: `[tokens, out]`, contiguous.
    """
    torch.addmm(onto, x, weight.dequantised(x).t(), out=onto)


def gated(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Return `silu(gate) * up`, `[tokens, inner]`, of the product with a fused weight.

    x: `[tokens, in]`.
    weight: `[2 * inner, in]`, the gate first.
    """
    if weight.dense is not None and x.is_cuda and (kernel := _few_rows_kernel(x, weight.dense)):
        return kernel(x, weight.dense, bias, gated=True)
    return silu_mul(linear(x, weight, bias))


def _format_kernels(x: Tensor, weight: Matrix) -> ModuleType | None:
    """Return the kernels of the matrix's format, if they suit this product."""
    kernels = triton_kernels(weight.format.kernels) if x.is_cuda and weight.format.kernels else None
    return kernels if kernels is not None and kernels.suits(x, weight.parts) else None


def dense_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Compute `linear` with a dense `weight`."""
    if x.is_cuda:
        if kernel := _few_rows_kernel(x, weight):
            return kernel(x, weight, bias, out=out)
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
    if x.shape[0] > _FEW_ROWS:
        if out is not None and bias is None:
            return torch.mm(x, weight.t(), out=out)
        y = F.linear(x, weight, bias)
    else:
        y = _few_rows_float32(x, weight) if x.dtype == torch.float32 else _few_rows_half(x, weight)
        y = y if bias is None else y.add_(bias)
    return y if out is None else out.copy_(y)


def _few_rows_kernel(x: Tensor, weight: Tensor) -> Callable[..., Tensor] | None:
    """Return our kernel for so few rows, if there is one that is faster than the library."""
    kernels = triton_kernels("linear") if len(x) <= _FEW_ROWS else None
    if kernels is None:
        return None
    if len(x) == 1:
        return kernels.one_row  # type: ignore[no-any-return]
    return kernels.few_rows if kernels.suits_few_rows(x, weight) else None


def _few_rows_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply with the weights on the left, which streams them once instead of packing them first.

    Measured on two cores, 768 x 3072: 244 us against 1088 for 2 rows, 1144 against 1765 for 32. With several
    threads torch sends a single row to another routine, which reads at less than half that rate (629 us). So
    a single row is computed with a copy of itself.
    """
    if x.shape[0] > 1:
        return torch.mm(weight, x.t()).t().contiguous()
    if torch.get_num_threads() == 1:
        return F.linear(x, weight)
    return torch.mm(weight, x.expand(2, -1).contiguous().t())[:, 0].contiguous().unsqueeze(0)


def _few_rows_half(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply bfloat16 or float16 rows; a single row goes through torch's own vector product, not oneDNN.

    One row takes 122 us so, and 292 through oneDNN. oneDNN is switched off for the call by the bare switch:
    the documented one sets other flags too, at several times the cost of the product. Meanwhile other threads
    may get the other of two correct routines. None of them can leave it switched off.
    """
    if x.shape[0] > 1 or not torch._C._get_mkldnn_enabled():
        return F.linear(x, weight)
    torch._C._set_mkldnn_enabled(False)
    try:
        return F.linear(x, weight)
    finally:
        torch._C._set_mkldnn_enabled(True)
