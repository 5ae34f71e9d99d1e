"""Mixture of experts: each token through the few experts its router chose (Mixtral, arXiv 2401.04088; Qwen3,
arXiv 2505.09388)."""

from functools import lru_cache

import torch
from torch import Tensor

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import WeightFormat
from penstock.arch.layout import GroupId, GroupKind
from penstock.arch.spec import MoeSpec
from penstock.models.inputs import Weights
from penstock.ops.activation import silu_mul_into
from penstock.ops.experts import Grouped, grouped
from penstock.ops.linear import linear
from penstock.ops.matrix import GroupViews

_ROWS = 2048
"""Rows of an expert that are computed at a time, at most: no slower than more."""


def mixture(
    x: Tensor, scores: Tensor, moe: MoeSpec, layer: int, weights: Weights, format: WeightFormat = DENSE
) -> Tensor:
    """The weighted sum of the chosen experts' outputs: x and result `[tokens, hidden]`, router scores
    `[tokens, experts]`.

    moe: of the rank, whose experts may be narrower than the model's. Only experts that some token chose are
    taken, each once for all its tokens; where all are at hand the host does not learn which these are.
    """
    if format == DENSE and grouped(x.device):
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
    scratch, start = _Scratch(x, moe.intermediate_size), 0
    for group, count in used:
        w = weights.take(group)
        for first in range(start, start + count, scratch.rows):
            part = slice(first, min(first + scratch.rows, start + count))
            y.index_copy_(0, places[part], scratch.expert(x, tokens[part], w))
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


class _Scratch:
    """Memory for one expert's rows at a time. Its size depends on the step's tokens and never on the routing,
    so that the step that was measured takes as much as any other."""

    def __init__(self, x: Tensor, inner: int) -> None:
        self.rows = min(len(x), _ROWS)
        hidden = x.shape[1]
        self._x, self._out = x.new_empty(self.rows, hidden), x.new_empty(self.rows, hidden)
        self._gate_up, self._inner = x.new_empty(self.rows, 2 * inner), x.new_empty(self.rows, inner)

    def expert(self, x: Tensor, tokens: Tensor, weights: GroupViews) -> Tensor:
        """The expert's output `[rows, hidden]` for these rows of x, at most `self.rows`; overwritten by the
        next call."""
        count = len(tokens)
        taken = torch.index_select(x, 0, tokens, out=self._x[:count])
        inner = silu_mul_into(
            linear(taken, weights.matrices["gate_up"], out=self._gate_up[:count]), self._inner[:count]
        )
        return linear(inner, weights.matrices["down"], out=self._out[:count])


@lru_cache(maxsize=256)
def _groups(layer: int, experts: int) -> tuple[GroupId, ...]:
    return tuple(GroupId(GroupKind.EXPERT, layer, expert) for expert in range(experts))
