"""Mixture of experts: each token through the few experts its router chose (Mixtral, arXiv 2401.04088; Qwen3, arXiv 2505.09388)."""

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
    shares = shares.to(x.dtype)
    out = torch.zeros_like(x)
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=moe.experts).tolist()
    groups = [GroupId(GroupKind.EXPERT, layer, expert) for expert in range(moe.experts)]
    weights.expect([group for group, count in zip(groups, counts, strict=True) if count])
    for group, places in zip(groups, torch.split(order, counts), strict=True):
        if not len(places):
            continue
        w = weights.take(group)
        tokens = places // moe.top_k
        y = linear(silu_mul(linear(x[tokens], w["gate_up"])), w["down"])
        weights.release(group)
        out.index_add_(0, tokens, y * shares.flatten()[places, None])
    return out
