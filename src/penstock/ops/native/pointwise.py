"""Computes norms, gates, and heads rotated and written to pages, of few rows on a CPU, by pointwise.c."""

import torch
from torch import Tensor

from penstock.ops.native.few_bits import NUMBERS, library

_MOST_ROWS = 16
"""Rows up to which one call of ours costs less than several of torch's, which share work between threads."""


def suits(x: Tensor) -> bool:
    """Tell whether these kernels compute rows of x."""
    return 0 < x.shape[0] <= _MOST_ROWS and x.dtype in NUMBERS and x.is_contiguous() and library() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Return the norm of x `[rows, size]`, rounded as that in plain torch. Its squares are added in another
    order, so that a number may come out one step of the dtype beside.

    residual: x is added to it in place, and the sum is normalised; contiguous.
    """
    found, y = library(), torch.empty_like(x)
    assert found is not None, "suits() says whether there are kernels"
    assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
    assert residual is None or (residual.is_contiguous() and residual.dtype == x.dtype)
    found.norm(
        NUMBERS[x.dtype], x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(),
        eps, x.shape[0], x.shape[1], y.data_ptr(),
    )  # fmt: skip
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `[rows, inner]`, of a fused `[rows, 2 * inner]` with the gate first."""
    found, (rows, both) = library(), gate_up.shape
    assert found is not None, "suits() says whether there are kernels"
    y = gate_up.new_empty(rows, both // 2)
    found.gate(NUMBERS[gate_up.dtype], gate_up.data_ptr(), rows, both // 2, y.data_ptr())
    return y


def project(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    *,
    heads: int,
    gains: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate q and k, and write k and v to pages, in one call.

    Return q `[tokens, heads, dim]`, k and v `[tokens, kv_heads, dim]`: views of qkv, which is changed in
    place. The arguments are those of the kernel for GPUs; K and V have the same strides.
    """
    turned = 2 * cos.shape[1]
    found, (k, v) = library(), cache
    assert found is not None, "suits() says whether there are kernels"
    (_, block_size, kv_heads, dim), (of_block, of_token, of_head, one) = k.shape, k.stride()
    assert (v.shape, v.stride(), one) == (k.shape, k.stride(), 1), (k.shape, v.shape, k.stride(), v.stride())
    assert qkv.shape == (len(slots), (heads + 2 * kv_heads) * dim), (qkv.shape, slots.shape, heads, k.shape)
    assert slots.dtype == torch.int64
    assert cos.is_contiguous() and sin.is_contiguous() and slots.is_contiguous()  # noqa: PT018
    assert len(cos) == len(slots) and turned <= dim, (cos.shape, dim)  # noqa: PT018
    q_gain, k_gain = (None, None) if gains is None else (gains[0].data_ptr(), gains[1].data_ptr())
    found.project(
        NUMBERS[qkv.dtype], qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), q_gain, k_gain, eps,
        slots.data_ptr(), k.data_ptr(), v.data_ptr(), block_size, of_block,
        of_token, of_head, len(slots), heads, kv_heads, dim, turned,
    )  # fmt: skip
    split = qkv.view(len(slots), heads + 2 * kv_heads, dim)
    return split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]


def suits_pages(cache: tuple[Tensor, Tensor], dtype: torch.dtype) -> bool:
    """Tell whether these kernels read and write such pages."""
    k, v = cache
    return (
        k.dtype == v.dtype == dtype and k.shape == v.shape and k.stride() == v.stride() and k.stride(3) == 1
    )
