"""Computes attention of single queries to keys and values in pages, on a CPU, by attention.c."""

import torch
from torch import Tensor

from penstock.ops.attention.inputs import LayerAttention, Rows
from penstock.ops.native.few_bits import NUMBERS, library
from penstock.ops.native.pointwise import suits_pages


def suits(q: Tensor, cache: tuple[Tensor, Tensor], layer: LayerAttention) -> bool:
    """Tell whether `paged_decode` attends with rows: heads of whole vectors, without cap or log-sum-exp."""
    return (
        q.shape[2] % 64 == 0
        and (q.stride(1), q.stride(2)) == (q.shape[2], 1)
        and layer.cap is None
        and not layer.lse
        and suits_pages(cache, q.dtype)
        and library() is not None
    )


def paged_decode(
    q: Tensor, cache: tuple[Tensor, Tensor], rows: Rows, layer: LayerAttention, *, out: Tensor
) -> None:
    """Attend with one new token of each sequence to its paged KV; a row of length 0 answers 0.

    q: `[rows, heads, dim]`.
    cache: K and V, `[blocks, block_size, kv_heads, dim]`, of the same strides.
    out: `[rows, heads, dim]`, contiguous, of q's dtype, which is written.

    Raises MemoryError.
    """
    found, (k, v), (count, heads, dim) = library(), cache, q.shape
    assert found is not None, "suits() says whether there is a kernel"
    assert count == rows.count == len(rows.lengths), (count, rows.count)
    assert rows.table.dtype == rows.lengths.dtype == torch.int32
    assert (rows.table.stride(1), rows.lengths.stride(0)) == (1, 1)
    assert out.is_contiguous()
    assert (out.shape, out.dtype) == (q.shape, q.dtype), (out.shape, q.shape, out.dtype)
    if found.attend(
        NUMBERS[q.dtype], q.data_ptr(), q.stride(0), k.data_ptr(), v.data_ptr(), k.shape[1], *k.stride()[:3],
        rows.table.data_ptr(), rows.table.stride(0), rows.lengths.data_ptr(), count, heads, k.shape[2], dim,
        layer.scale, layer.window or 0, out.data_ptr(), torch.get_num_threads(), found.parallel,
    ):  # fmt: skip
        raise MemoryError("no memory for attention to pages")
