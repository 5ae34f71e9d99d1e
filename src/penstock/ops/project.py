"""Prepares queries, keys and values between a layer's fused projection and its attention.

Heads are normalised and rotated by their positions, and keys and values are written to pages.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.attention.attend import write
from penstock.ops.attention.inputs import AttentionInputs
from penstock.ops.kernels import row_kernels, triton_kernels
from penstock.ops.norm import rms_norm
from penstock.ops.rope import rotate


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """HeadNorms are the RMS norms of each query and key head: weights `[dim]`."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class JointNorms:
    """JointNorms are an RMS norm of all heads of queries together, and one of all heads of keys.

    q, k: weights of the heads that a rank has, `[heads * dim]` and `[kv_heads * dim]`.
    sizes: how many numbers of a token's queries, and of its keys, the whole model has.
    """

    q: Tensor
    k: Tensor
    eps: float
    sizes: tuple[int, int]


def norm_together(qkv: Tensor, norms: JointNorms, over_ranks: Callable[[Tensor], None] | None = None) -> None:
    """Normalise all queries of a token together, and all its keys, in place, rounded as by `rms_norm`.

    qkv: `[tokens, (heads + 2 * kv_heads) * dim]`, rows strided.
    over_ranks: puts the sum over all ranks in the place of sums of squares, float32 `[tokens, 2]`, of the
        queries and the keys of this one. None where a rank has all heads.
    """
    gains, sizes = (norms.q, norms.k), norms.sizes
    if qkv.is_cuda and (kernels := triton_kernels("norms")):
        squares = None
        if over_ranks is not None:
            squares = kernels.sums_of_squares(qkv, len(norms.q), len(norms.k))
            over_ranks(squares)
        kernels.norm_together(qkv, gains, sizes, norms.eps, squares)
        return
    queries, keys = len(norms.q), len(norms.k)
    parts = qkv[:, :queries], qkv[:, queries : queries + keys]
    squares = torch.stack([part.float().square().sum(-1) for part in parts], 1)
    if over_ranks is not None:
        over_ranks(squares)
    for part, gain, size, total in zip(parts, gains, sizes, squares.unbind(1), strict=True):
        scale = torch.rsqrt(total / size + norms.eps).unsqueeze(1)
        part.copy_((part.float() * scale).to(part.dtype) * gain)


def project(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: tuple[Tensor, Tensor],
    inputs: AttentionInputs,
    *,
    heads: int,
    norms: HeadNorms | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries `[tokens, heads, dim]`, keys and values `[tokens, kv_heads, dim]`, ready for `attend`.

    Keys and values are also written to pages. `qkv` may be overwritten, and results may be views of it.

    qkv: `[tokens, (heads + 2 * kv_heads) * dim]`.
    cos, sin: float32 `[tokens, turned / 2]`; the first `turned` dimensions of a head are rotated.
    cache: the layer's K and V, `[blocks, block_size, kv_heads, dim]`.
    norms: of the heads, if the model has them.
    """
    kernels = triton_kernels("pointwise") if qkv.is_cuda else row_kernels("pointwise", qkv)
    if kernels is not None and (qkv.is_cuda or kernels.suits_pages(cache, qkv.dtype)):
        gains, eps = (None, 0.0) if norms is None else ((norms.q, norms.k), norms.eps)
        views: tuple[Tensor, Tensor, Tensor] = kernels.project(
            qkv, cos, sin, cache, inputs.slots, heads=heads, gains=gains, eps=eps
        )
        return views
    q, k, v = project_reference(qkv, cos, sin, heads=heads, kv_heads=cache[0].shape[2], norms=norms)
    write(k, v, cache, inputs)
    return q, k, v


def project_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, heads: int, kv_heads: int, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `project` step by step, without the write."""
    every = heads + 2 * kv_heads
    split = qkv.view(len(qkv), every, qkv.shape[1] // every)
    qk, v = split[:, : heads + kv_heads], split[:, heads + kv_heads :]
    if norms is not None:
        q, k = rms_norm(qk[:, :heads], norms.q, norms.eps), rms_norm(qk[:, heads:], norms.k, norms.eps)
        qk = torch.cat((q, k), dim=1)
    qk = rotate(qk, cos, sin)
    return qk[:, :heads], qk[:, heads:], v
