"""Multiplies a single row of float32 with dense weights on a CPU, by dense.c.

Sums are in an order that depends on the matrix's width alone, not on the number of threads.
"""

import torch
from torch import Tensor

from penstock.ops.native.few_bits import library


def suits_row(x: Tensor, weight: Tensor) -> bool:
    """Tell whether `one_row` multiplies these: a single row, with rows of weights that lie in one piece."""
    return (
        x.shape[0] == 1
        and x.dtype == weight.dtype == torch.float32
        and x.stride(1) == weight.stride(1) == 1
        and library() is not None
    )


def one_row(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T`: x `[1, in]`, weight `[out, in]`, result `[1, out]`."""
    found, (height, inner) = library(), weight.shape
    assert found is not None, "suits_row() says whether there are kernels"
    assert x.shape == (1, inner), (x.shape, weight.shape)
    y = x.new_empty(1, height)
    found.dense_row(
        weight.data_ptr(), height, inner, weight.stride(0), x.data_ptr(), y.data_ptr(),
        torch.get_num_threads(), found.parallel,
    )  # fmt: skip
    return y
