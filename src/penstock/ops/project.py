"""Between the fused projection of a layer and its attention: norms of queries and keys, positions, the write
of keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.attention.attend import write
from penstock.ops.attention.inputs import AttentionInputs
from penstock.ops.kernels import pointwise_kernels
from penstock.ops.norm import rms_norm
from penstock.ops.rope import rotate


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each query and key head: weights `[dim]`."""

    q: Tensor
    k: Tensor
    eps: float


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
    """Queries `[tokens, heads, dim]`, keys and values `[tokens, kv_heads, dim]`, as `attend` wants
    them.

    qkv `[tokens, (heads + 2 * kv_heads) * dim]`, perhaps overwritten, and what is returned perhaps views of
    it; cos, sin float32 `[tokens, dim / 2]`; cache: K and V of the layer, `[blocks, block_size, kv_heads,
    dim]`, to which keys and values are written.
    """
    if qkv.is_cuda and (kernels := pointwise_kernels()):
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
    """`project` step by step, but for the write."""
    split = qkv.view(len(qkv), heads + 2 * kv_heads, 2 * cos.shape[1])
    qk, v = split[:, : heads + kv_heads], split[:, heads + kv_heads :]
    if norms is not None:
        q, k = rms_norm(qk[:, :heads], norms.q, norms.eps), rms_norm(qk[:, heads:], norms.k, norms.eps)
        qk = torch.cat((q, k), dim=1)
    qk = rotate(qk, cos, sin)
    return qk[:, :heads], qk[:, heads:], v
