"""Attends over contiguous keys, and merges parts of attention exactly by log-sum-exp.

Attention over disjoint sets of keys merges exactly: outputs are weighed by the exponentials of their
log-sum-exp (flash-decoding; Dao et al. 2023). So every function here returns both, or folds both into a
state. V may be wider or narrower than K, except in our own kernels.
"""

from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.ops.activation import soft_cap
from penstock.ops.attention.inputs import LayerAttention
from penstock.ops.kernels import triton_kernels

WINDOW_TILE = 512
"""Queries of a run that share one mask, or one triangle, in layers with a sliding window."""

_SCORES = 1 << 26
"""Scores that plain torch holds at a time, at most, if one query has no more."""

_CUDNN_QUERIES = (1024, 2048, 4096, 8192, 16384)
"""Numbers of queries for which cuDNN is used: those where it is fastest.

It plans once a shape, which takes 45 ms.
"""
_CUDNN_KEYS = (8192, 16384, 32768)
"""Numbers of keys for which cuDNN is used, beside as many as there are queries."""

Part = tuple[Tensor, Tensor]
"""Attention over some of the keys: an output and a log-sum-exp.

The output is `[queries, heads, dim_v]`, the natural log-sum-exp of the scaled scores is float32 `[queries,
heads]`. As a state, into which more is folded, the output is float32.
"""


def _tile_kernels(x: Tensor) -> ModuleType | None:
    """Return the kernels of states for tensors where `x` is, or None."""
    return triton_kernels("tiles") if x.is_cuda else None


def dense(q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, *, causal: bool) -> Part:
    """Attend with every query to every key, or causally to as many keys as there are queries.

    It takes the fastest call that torch has for the device, dtype and shape and that returns a log-sum-exp.
    None of these caps scores.

    q: `[queries, heads, dim]`.
    k, v: `[keys, kv_heads, dim]` and `[keys, kv_heads, dim_v]`.
    layer: its scale and cap; windows are the caller's.
    """
    if layer.cap is not None:
        return dense_reference(q, k, v, layer, causal=causal)
    scale = layer.scale
    if not q.is_cuda:
        out, lse = _on_cpu(*(x.transpose(0, 1)[None] for x in (q, k, v)), scale=scale, causal=causal)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    if not _suits_flash(q, v):
        return dense_reference(q, k, v, layer, causal=causal)
    if q.shape[0] in _CUDNN_QUERIES and k.shape[0] in (q.shape[0], *_CUDNN_KEYS) and q.shape[2] in (64, 128):
        batched = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *batched, None, True, is_causal=causal, scale=scale
        )
        return out[0].transpose(0, 1), lse.view(q.shape[1], -1).transpose(0, 1)
    ends = _ends(q.shape[0], q.device), _ends(k.shape[0], k.device)
    return _flash(q, k, v, ends, (q.shape[0], k.shape[0]), scale, causal=causal)


def attend_fresh(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, layer: LayerAttention
) -> Part | None:
    """Attend causally from each of several runs to itself, in one launch. Return None where none suits.

    Shapes are those of `dense`, of all runs one behind the other.

    ends: where each run ends, behind a zero, int32 `[runs + 1]`.
    longest: tokens of the longest run.
    """
    if not _is_on_gpu(q) or layer.cap is not None or not _suits_flash(q, v):
        return None
    return _flash(q, k, v, (ends, ends), (longest, longest), layer.scale, causal=True)


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _suits_flash(q: Tensor, v: Tensor) -> bool:
    wide = q.shape[2]
    return q.dtype != torch.float32 and wide % 8 == 0 and wide <= 256 and v.shape[2] == wide


def _flash(
    q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int], scale: float, *,
    causal: bool,
) -> Part:  # fmt: skip
    flash = torch.ops.aten._flash_attention_forward
    out, lse, *_ = flash(q, k, v, *ends, *longest, 0.0, causal, False, scale=scale)
    return out, lse.transpose(0, 1)


@lru_cache(maxsize=256)
def _ends(length: int, device: torch.device) -> Tensor:
    """Return the cumulative lengths `[0, length]` of a lone sequence, int32; length is not 0.

    They are cached.
    """
    return torch.arange(
        0, length + 1, length, dtype=torch.int32, device=device
    )  # Made there: what is sent is waited for.


def dense_reference(q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, *, causal: bool) -> Part:
    """Compute `dense` in plain torch, scores, softmax and product, in float32 whatever the inputs are."""
    parts = []
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    step = max(min(1024, _SCORES // (q.shape[1] * k.shape[0])), 1)
    for first in range(0, q.shape[0], step):
        piece = q[first : first + step].float().transpose(0, 1)
        scores = soft_cap(piece @ wide_k.mT * layer.scale, layer.cap)
        if causal:
            later = (
                torch.arange(k.shape[0], device=q.device)
                > torch.arange(first, first + piece.shape[1], device=q.device)[:, None]
            )
            scores.masked_fill_(later, -torch.inf)
        parts.append(
            ((scores.softmax(-1) @ wide_v).transpose(0, 1).to(q.dtype), scores.logsumexp(-1).transpose(0, 1))
        )
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def masked(
    q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, *, mask: Tensor | None, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend where `mask` is true: output `[batch, heads, queries, dim_v]`, log-sum-exp without the last dim.

    q: `[batch, heads, queries, dim]`.
    k, v: `[batch, kv_heads, keys, dim]` and `[batch, kv_heads, keys, dim_v]`.
    layer: its scale and cap; its window is in the mask.
    mask: bool, `[queries, keys]` or with the dims of scores, where 1 is any; None sees all.
    lse: whether the log-sum-exp is needed; else it may be None.
    """
    group, scale, capped = q.shape[1] // k.shape[1], layer.scale, layer.cap is not None
    if not q.is_cuda and (lse or group > 1) and not capped:
        return _on_cpu(q, k, v, scale=scale, mask=mask)
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    if not lse and not capped:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale), None
    scores = soft_cap(q.float() @ k.float().mT * scale, layer.cap)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def _on_cpu(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> Part:
    """Call torch's flash attention for CPUs; shapes are those of `masked`."""
    bias = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    dim, dim_v = q.shape[3], v.shape[3]
    if dim != dim_v:  # It wants one width. Zeros add nothing to a score, nor to the part of V that is kept.
        wide = max(dim, dim_v)
        q, k, v = (F.pad(x, (0, wide - x.shape[3])) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=causal, attn_mask=bias, scale=scale
    )
    return out[..., :dim_v] if dim_v < out.shape[3] else out, lse


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Fold attention over other keys into `out` (float32) and `lse`, in place and exactly.

    Shapes are those of `Part`.
    """
    if kernels := _tile_kernels(out):
        kernels.merge_states(out, lse, other_out, other_lse)
        return
    share = torch.sigmoid(other_lse - lse)[..., None]
    out.add_(share * (other_out.float() - out))
    torch.logaddexp(lse, other_lse, out=lse)


def fold(
    state: Part, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, index: Tensor | None = None
) -> None:
    """Fold into `state` what every query sees of all keys.

    A few queries go to a kernel that spreads the keys over the whole device.

    index: int64, the queries that look, if not all do.
    """
    few = len(q if index is None else index)
    if (kernels := _tile_kernels(q)) and kernels.fits_tile(q, k, v, few):
        kernels.fold_tile(*state, q, k, v, index, layer=layer)
    elif index is None:
        merge(*state, *dense(q, k, v, layer, causal=False))
    else:
        out, lse = state[0][index], state[1][index]
        merge(out, lse, *dense(q[index], k, v, layer, causal=False))
        state[0][index], state[1][index] = out, lse


def fold_past(state: Part, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, distance: int) -> None:
    """Fold into `state` the attention of consecutive queries over keys that all come before them.

    With a window, query i sees the keys from i + shift on. That is a triangle, which is causal when queries
    and keys are reversed, and a rectangle behind it. So no mask is needed, and each part has its log-sum-exp.

    distance: position of the first query less that of the first key.
    """
    count, keys, window = len(q), len(k), layer.window
    if window is None or distance + count <= window:
        fold(state, q, k, v, layer)
        return
    shift = distance - window + 1
    whole, stop = min(max(1 - shift, 0), count), min(count, keys - shift)
    if not whole and stop <= 0:
        return

    def fold_part(begin: int, end: int, oldest: int, newest: int, triangle: bool = False) -> None:
        parts = q[begin:end], k[oldest:newest], v[oldest:newest]
        some = state[0][begin:end], state[1][begin:end]
        if not triangle:
            fold(some, *parts, layer)
            return
        mirrored_q, mirrored_k, mirrored_v = (x.flip(0) for x in parts)
        merge(*some, *(x.flip(0) for x in dense(mirrored_q, mirrored_k, mirrored_v, layer, causal=True)))

    if whole:
        fold_part(0, whole, 0, keys)
    for begin in range(whole, stop, WINDOW_TILE):
        end = min(begin + WINDOW_TILE, stop)
        if end - begin == 1:
            fold_part(begin, end, begin + shift, keys)
            continue
        fold_part(begin, end, begin + shift, end + shift, triangle=True)
        if end + shift < keys:
            fold_part(begin, end, end + shift, keys)


def attend_itself(q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention) -> Part:
    """Attend causally from a run to itself; shapes are those of `dense`, with a key for each query."""
    window = layer.window
    if window is None or len(q) <= window:
        return dense(q, k, v, layer, causal=True)
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    piece = min(WINDOW_TILE, window)
    for first in range(0, len(q), piece):
        part = slice(first, first + piece)
        out[part], lse[part] = dense(q[part], k[part], v[part], layer, causal=True)
        if first:
            fold_past((out[part], lse[part]), q[part], k[:first], v[:first], layer, first)
    return out, lse
