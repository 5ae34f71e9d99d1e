"""Mixture of experts: each token through the few experts its router chose (Mixtral, arXiv 2401.04088; Qwen3, arXiv 2505.09388)."""

from functools import lru_cache

import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupKind
from penstock.arch.spec import MoeSpec
from penstock.models.inputs import Weights
from penstock.ops.activation import silu_mul
from penstock.ops.linear import linear


def mixture(x: Tensor, scores: Tensor, moe: MoeSpec, layer: int, weights: Weights) -> Tensor:
    """The weighted sum of the chosen experts' outputs: x and result `[tokens, hidden]`, router scores `[tokens, experts]`.

    Only experts that some token chose are taken, each once for all its tokens.
    """
    shares, chosen = scores.float().softmax(-1).topk(moe.top_k)
    if moe.normalise:
        shares = shares / shares.sum(-1, keepdim=True)
    places = chosen.flatten().argsort(stable=True)
    tokens = places // moe.top_k
    counts = torch.bincount(chosen.flatten(), minlength=moe.experts).tolist()
    used = [(group, count) for group, count in zip(_groups(layer, moe.experts), counts, strict=True) if count]
    weights.expect([group for group, _ in used])
    y = x.new_empty(len(places), x.shape[1])
    start = 0
    for group, count in used:
        w = weights.take(group)
        inner = silu_mul(linear(x[tokens[start : start + count]], w["gate_up"]))
        y.index_copy_(0, places[start : start + count], linear(inner, w["down"]))
        weights.release(group)
        start += count
    return torch.bmm(shares.to(x.dtype).unsqueeze(1), y.view(-1, moe.top_k, x.shape[1])).squeeze(1)


@lru_cache(maxsize=256)
def _groups(layer: int, experts: int) -> tuple[GroupId, ...]:
    return tuple(GroupId(GroupKind.EXPERT, layer, expert) for expert in range(experts))
