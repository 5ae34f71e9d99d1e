"""Multiplies activations with weights `[out, in]`, in whatever storage format these rest."""

from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.ops.activation import silu_mul
from penstock.ops.kernels import native_kernels, triton_kernels
from penstock.ops.matrix import Matrix
from penstock.ops.widened import widened_product, widens

_FEW_ROWS = 256
"""Rows up to which a float32 product on a CPU is bound by reading the weights."""
SAME_ROWS = 16
"""Rows up to which the number of threads changes no bit of a float32 product on a CPU."""
_SCRATCH_BYTES = 32 << 20, 128 << 20
"""Bytes of a matrix of few bits that are dequantised at a time on a GPU: as many as the activations have, but
so many at least and at most."""
_ALIGNED_ROWS = 128
"""Rows of a matrix in such a piece are a multiple of this: libraries are slow if results begin elsewhere."""
_CPU_SCRATCH_BYTES = 2 << 20
"""The same on a CPU, where it stays in a core's cache, and in memory that the process keeps."""


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, `[tokens, out]`, contiguous.

    x: `[tokens, in]`.
    weight: `[out, in]` in any format.
    bias: `[out]`.
    out: where the result is written, contiguous; it must not overlap an input.
    """
    if weight.dense is not None:
        return dense_linear(x, weight.dense, bias, out=out)
    if kernels := _few_rows_of_format(x, weight):
        product: Tensor = kernels.few_rows(x, weight, bias, out=out)
        return product
    if not weight.joined and _rows_at_a_time(x, weight) == weight.shape[0]:
        ((_, whole),) = _dequantised(x, weight)
        return dense_linear(x, whole, bias, out=out)
    y = x.new_empty(len(x), weight.shape[0]) if out is None else out
    for rows, matrix in _parts(weight):
        linear(x, matrix, out=y[:, rows])
    if not weight.joined:
        for rows, some in _dequantised(x, weight):
            dense_linear(x, some, out=y[:, rows])
    return y if bias is None else y.add_(bias)


def add_linear(x: Tensor, weight: Matrix, onto: Tensor) -> None:
    """Add `x @ weight.T` to `onto` in place. In 16 bits it is rounded once.

    x: `[tokens, in]`.
    weight: `[out, in]`.
    onto: `[tokens, out]`, contiguous.
    """
    if weight.dense is not None:
        add_dense(x, weight.dense, onto)
        return
    if not x.is_cuda and (kernels := _few_rows_of_format(x, weight)):
        kernels.few_rows(x, weight, out=onto, adds=True)
        return
    for rows, matrix in _parts(weight):
        add_linear(x, matrix, onto[:, rows])
    if not weight.joined:
        for rows, some in _dequantised(x, weight):
            add_dense(x, some, onto[:, rows])


def add_dense(x: Tensor, weight: Tensor, onto: Tensor) -> None:
    """Compute `add_linear` with a dense `weight`. Rows of `onto` may be strided."""
    if widens(x):
        widened_product(x, weight, onto, adds=True)
    elif not x.is_cuda and x.dtype == torch.float32 and 1 < len(x) <= SAME_ROWS:
        # addmm gives 5 rows other bits with two threads than with one.
        onto.add_(_few_rows_float32(x, weight))
    else:
        torch.addmm(onto, x, weight.t(), out=onto)


def gated(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Return `silu(gate) * up`, `[tokens, inner]`, of the product with a fused weight.

    x: `[tokens, in]`.
    weight: `[2 * inner, in]`, the gate first.
    """
    if not x.is_cuda:
        return silu_mul(linear(x, weight, bias))
    if weight.dense is None:
        if kernels := _few_rows_of_format(x, weight):
            product: Tensor = kernels.few_rows(x, weight, bias, gated=True)
            return product
    elif kernel := _few_rows_kernel(x, weight.dense):
        return kernel(x, weight.dense, bias, gated=True)
    return silu_mul(linear(x, weight, bias))


def kernel_before_others(x: Tensor, weight: Matrix) -> Callable[..., Tensor] | None:
    """Return the kernel that computes the product of so few rows with a dense matrix in one launch, if there
    is one: it takes `before_others`, see `triton.linear`."""
    return _few_rows_kernel(x, weight.dense) if x.is_cuda and weight.dense is not None else None


def _few_rows_of_format(x: Tensor, weight: Matrix) -> ModuleType | None:
    """Return the kernels of the matrix's format, if they compute this product of few rows."""
    kernels = _format_kernels(x, weight)
    return kernels if kernels is not None and kernels.suits(x, weight) else None


def _format_kernels(x: Tensor, weight: Matrix) -> ModuleType | None:
    """Return the kernels that there are for the matrix's format where x is."""
    format = weight.format
    if x.is_cuda:
        return triton_kernels(format.kernels) if format.kernels else None
    return native_kernels(format.native) if format.native else None


def _parts(weight: Matrix) -> Iterator[tuple[slice, Matrix]]:
    """Yield the matrices that are joined in one, and their rows in it."""
    first = 0
    for matrix in weight.joined:
        yield slice(first, first + matrix.shape[0]), matrix
        first += matrix.shape[0]


def _rows_at_a_time(x: Tensor, weight: Matrix) -> int:
    """Return how many rows of a matrix are dequantised at a time."""
    (height, inner), scratch = weight.shape, _CPU_SCRATCH_BYTES
    if x.is_cuda:
        least, most = _SCRATCH_BYTES
        scratch = max(least, min(most, x.nbytes))
    each = max(1, scratch // (inner * x.itemsize))
    if x.is_cuda and each < height:
        each = max(_ALIGNED_ROWS, each // _ALIGNED_ROWS * _ALIGNED_ROWS)
    return min(height, each)


def _dequantised(x: Tensor, weight: Matrix) -> Iterator[tuple[slice, Tensor]]:
    """Yield runs of rows of the matrix in the dtype of x, one after the other in the same memory if kernels
    dequantise."""
    (height, inner), each = weight.shape, _rows_at_a_time(x, weight)
    kernels = _format_kernels(x, weight)
    if kernels is None or not kernels.reads(weight.format):
        for first in range(0, height, each):
            rows = slice(first, min(first + each, height))
            yield rows, weight.dequantised(x, rows)
        return
    scratch = x.new_empty(each, inner)
    for first in range(0, height, each):
        rows = slice(first, min(first + each, height))
        kernels.dequantise(weight, rows, scratch[: rows.stop - first])
        yield rows, scratch[: rows.stop - first]


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
    if widens(x):
        y = widened_product(x, weight, x.new_empty(len(x), len(weight)) if out is None else out)
        return y if bias is None else y.add_(bias)
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

    Measured on two cores, 768 x 3072: 244 us against 1088 for 2 rows, 1144 against 1765 for 32. A single row
    has a kernel of ours. Where there is none, it is computed with a copy of itself: with several threads
    torch sends it to another routine, which reads at less than half that rate (629 us).
    """
    if x.shape[0] > 1:
        return torch.mm(weight, x.t()).t().contiguous()
    kernels = native_kernels("dense")
    if kernels is not None and kernels.suits_row(x, weight):
        y: Tensor = kernels.one_row(x, weight)
        return y
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
