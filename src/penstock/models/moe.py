"""Mixture of experts: each token through the few experts its router chose (Mixtral, arXiv 2401.04088; Qwen3, arXiv 2505.09388)."""

from functools import lru_cache

import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupKind
from penstock.arch.spec import MoeSpec
from penstock.models.inputs import Weights
from penstock.ops.activation import silu_mul
from penstock.ops.experts import Grouped, grouped
from penstock.ops.linear import linear


def mixture(x: Tensor, scores: Tensor, moe: MoeSpec, layer: int, weights: Weights) -> Tensor:
    """The weighted sum of the chosen experts' outputs: x and result `[tokens, hidden]`, router scores `[tokens, experts]`.

    moe: of the rank, whose experts may be narrower than the model's. Only experts that some token chose are taken, each once for all its
    tokens; where all are at hand the host does not learn which these are.
    """
    if grouped(x.device):
        return _many_at_a_time(x, scores, moe, layer, weights)
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


def _many_at_a_time(x: Tensor, scores: Tensor, moe: MoeSpec, layer: int, weights: Weights) -> Tensor:
    mixed = Grouped(x, scores, moe.top_k, moe.intermediate_size, normalise=moe.normalise)
    table = weights.table(layer)
    if table is not None:
        mixed.compute(table)
        return mixed.total()
    groups = _groups(layer, moe.experts)
    for wave, table in weights.waves([groups[expert] for expert in mixed.used()]):
        mixed.compute(table, range(wave[0].expert, wave[-1].expert + 1))
    return mixed.total()


@lru_cache(maxsize=256)
def _groups(layer: int, experts: int) -> tuple[GroupId, ...]:
    return tuple(GroupId(GroupKind.EXPERT, layer, expert) for expert in range(experts))
