"""Computes attention of rows over paged KV on a CPU, by the kernel in attention.c.

Sums are float32, in the order of positions: they depend neither on the number of threads nor on the other
rows. Kernels run on torch's own threads, as many as torch would use.
"""

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from penstock.ops.attention.inputs import LayerAttention, QueryRun, Rows, RunTree
from penstock.ops.native.few_bits import NUMBERS, library

_WIDEST, _SHARING = 256, 16
"""Numbers of a head, and query heads that share a head of keys, at most: as attention.c has room for."""
_LANES = 16
"""Numbers of a head come in multiples of this, the most lanes of a vector."""
_MOST_PAIRS = 64 * 64
"""Pairs of a query and a key, seen or not, up to which a run is faster here than in torch.

Measured on one core with AVX-512, bfloat16, four heads of 64: 20 tokens 18 us against 32, 64 tokens 65
against 90, but 20 behind 500 others 253 against 237.
"""
Cache = tuple[Tensor, Tensor]


class _Rows(ctypes.Structure):
    """Holds what `struct rows` of attention.c does."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse", "table", "lengths")),
        *((name, ctypes.c_int64) for name in ("rows", "kv_heads", "group", "dim", "columns", "block_size")),
        *((name, ctypes.c_int64) for name in ("window", "q_row", "q_head", "k_block", "k_token", "k_head")),
        *((name, ctypes.c_int64) for name in ("v_block", "v_token", "v_head")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("kind", "out_kind")),
        ("bits", ctypes.c_void_p),
        ("begin", ctypes.c_int64),
    ]


def suits_heads(heads: int, kv_heads: int, dim: int) -> bool:
    """Tell whether the kernel has room for so many heads of queries and keys, of `dim` numbers each."""
    return dim <= _WIDEST and dim % _LANES == 0 and heads <= _SHARING * kv_heads


def suits(q: Tensor, cache: Cache, layer: LayerAttention) -> bool:
    """Tell whether `paged_decode` attends with q `[rows, heads, dim]` in a layer."""
    (k, v), dim = cache, q.shape[2]
    return (
        layer.cap is None
        and q.dtype in NUMBERS
        and q.dtype == k.dtype == v.dtype
        and dim == v.shape[3]
        and suits_heads(q.shape[1], k.shape[2], dim)
        and q.stride(2) == k.stride(3) == v.stride(3) == 1
        and library() is not None
    )


def paged_decode(
    q: Tensor, cache: Cache, rows: Rows, layer: LayerAttention, *, out: Tensor, lse: Tensor | None
) -> None:
    """Attend with each row to its keys in pages.

    q: `[rows, heads, dim]`.
    cache: K and V, `[blocks, block_size, kv_heads, dim]`.
    out: contiguous `[rows, heads, dim]` of any dtype that q may have, which is written.
    lse: contiguous float32 `[rows, heads]`, which is written if it is given.
    """
    _attend(q, cache, rows.table.contiguous(), rows.lengths.contiguous(), layer, out, lse)


def suits_run(run: QueryRun) -> bool:
    """Tell whether `paged_run` is faster than torch: each query reads its keys by itself."""
    return run.count * (run.start + run.count) <= _MOST_PAIRS


def paged_run(q: Tensor, cache: Cache, run: QueryRun, layer: LayerAttention, *, lse: Tensor | None) -> Tensor:
    """Attend with a run whose past is in pages, as its own keys are: each query is a row of the same blocks.

    Return the output, `[queries, heads, dim]`; see `paged_decode`.
    """
    out = torch.empty(q.shape, dtype=q.dtype)
    if run.tree is not None:
        lengths = run.tree.limits
    else:
        lengths = torch.arange(run.start + 1, run.start + run.count + 1, dtype=torch.int32)
    _attend(q, cache, run.blocks.int().expand(1, -1), lengths, layer, out, lse, run.tree)
    return out


def _attend(
    q: Tensor, cache: Cache, table: Tensor, lengths: Tensor, layer: LayerAttention, out: Tensor,
    lse: Tensor | None, tree: RunTree | None = None,
) -> None:  # fmt: skip
    """Attend with rows; a table of one row is that of all. tree: the rows are its queries."""
    found, (k, v) = library(), cache
    bits = None if tree is None else tree.bits[layer.window].contiguous()
    assert found is not None, "suits() says whether there are kernels"
    assert out.is_contiguous(), out.stride()
    assert lse is None or lse.is_contiguous(), lse.stride()
    assert table.dtype == lengths.dtype == torch.int32, (table.dtype, lengths.dtype)
    about = _Rows(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), None if lse is None else lse.data_ptr(),
        table.data_ptr(), lengths.data_ptr(), len(q), k.shape[2], q.shape[1] // k.shape[2], q.shape[2],
        table.shape[1] if len(table) > 1 else 0, k.shape[1], layer.window or 0,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
        layer.scale, NUMBERS[q.dtype], NUMBERS[out.dtype],
        None if bits is None else bits.data_ptr(), 0 if tree is None else tree.begin,
    )  # fmt: skip
    found.attend_rows(ctypes.byref(about), torch.get_num_threads(), found.parallel)
