"""Computes a mixture of experts: each token through the few experts that its router chose (Mixtral, arXiv
2401.04088; Qwen3, arXiv 2505.09388)."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupKind, MixtureLayout
from penstock.arch.spec import Activation, MoeSpec
from penstock.models.inputs import ExpertWeights
from penstock.ops.activation import activate_into
from penstock.ops.experts import Grouped, few_outputs, few_tokens, grouped
from penstock.ops.linear import gated, linear
from penstock.ops.matrix import GroupViews
from penstock.ops.route import route

_ROWS = 2048
"""Rows of an expert that are computed at a time, at most: no slower than more."""
_WIDE_ROWS = 8192
"""Tokens in the widest part of shared experts at a time, as in a feed-forward."""


Choice = Grouped | tuple[Tensor, Tensor]
"""A choice says which experts each token takes: it is a `Grouped`, or else what `route` returns."""


def choose(
    x: Tensor,
    logits: Tensor,
    moe: MoeSpec,
    layout: MixtureLayout,
    correction: Tensor | None = None,
    padding: Tensor | None = None,
) -> Choice:
    """Return the choice of experts for x `[tokens, hidden]`, for `mixture`. The host waits for nothing.

    logits: of the router, `[tokens, experts]`.
    moe: of the rank; its experts may be narrower than the model's.
    correction: of the router, float32 `[experts]`, if it has one. It is read by what this queues.
    padding: bool `[tokens]`, tokens that take the experts of the first one: what comes of them means nothing.
    """
    if grouped(x.device, layout):
        return Grouped(
            x, logits, moe, correction, formats=layout.formats, biases=layout.biases, padding=padding
        )
    return route(logits, moe, correction)


def router_scores(x: Tensor, moe: MoeSpec, weights: GroupViews) -> Tensor:
    """Return a router's logits `[tokens, experts]` for x `[tokens, hidden]`, normalised."""
    given = x.float() if moe.router.float32 else x
    return linear(given, weights.matrices["router"], weights.vectors.get("router_bias"))


def shared_experts(x: Tensor, weights: GroupViews) -> Tensor:
    """Return the output of the shared experts in a router's group: x and result `[tokens, hidden]`."""
    out, gate = x.new_empty(x.shape), weights.matrices.get("shared_gate")
    for piece, place in zip(torch.split(x, _WIDE_ROWS), torch.split(out, _WIDE_ROWS), strict=True):
        linear(gated(piece, weights.matrices["gate_up"]), weights.matrices["down"], out=place)
    return out if gate is None else out.mul_(linear(x, gate).sigmoid())


def ask(choice: Choice, layer: int, experts: ExpertWeights) -> Iterator[Tensor] | None:
    """Ask for the chosen experts and return their tables, part by part, for `mixture`: None unless the device
    decides which come. What is queued before `mixture` is computed while the first of them come."""
    if not isinstance(choice, Grouped) or experts.table(layer) is not None:
        return None
    return experts.parts(layer, choice.pairs, len(choice.order), choice.rows)


def mixture(
    x: Tensor,
    choice: Choice,
    moe: MoeSpec,
    layer: int,
    experts: ExpertWeights,
    parts: Iterator[Tensor] | None = None,
) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs: x and result `[tokens, hidden]`.

    Only experts that some token chose are borrowed, each once for all its tokens. Where all of them are on
    the device, the host does not learn which these are.

    choice: what `choose` returned for x. parts: what `ask` did.
    """
    if isinstance(choice, Grouped):
        return _many_at_a_time(choice, layer, experts, parts)
    shares, chosen = choice
    layout = experts.mixtures[layer]
    pairs = chosen.flatten().argsort(stable=True)
    tokens = pairs // moe.top_k
    counts = torch.bincount(chosen.flatten(), minlength=moe.experts).tolist()
    spans = _spans(layer, counts)
    y = x.new_empty(len(pairs), x.shape[1])
    if few_tokens(x, layout):
        _few_tokens(x, y, pairs, spans, experts, moe.activation)
    else:
        scratch = _Scratch(x, moe)
        for group, weights in experts.each(list(spans)):
            for start in range(spans[group].start, spans[group].stop, scratch.rows):
                part = slice(start, min(start + scratch.rows, spans[group].stop))
                y.index_copy_(0, pairs[part], scratch.expert(x, tokens[part], weights))
    return torch.bmm(shares.to(x.dtype).unsqueeze(1), y.view(-1, moe.top_k, x.shape[1])).squeeze(1)


def _few_tokens(
    x: Tensor,
    y: Tensor,
    pairs: Tensor,
    spans: Mapping[GroupId, slice],
    experts: ExpertWeights,
    activation: Activation,
) -> None:
    """Compute experts of few bits on a CPU, as many at a time as are lent.

    x `[tokens, hidden]`; y `[pairs, hidden]`: outputs by pair; pairs int `[pairs]`: the pairs in the order of
    `spans`, which says where each expert's are.
    """
    for wave in experts.waves_of_views(list(spans)):
        mine = torch.cat([pairs[spans[group]] for group in wave])
        counts = [spans[group].stop - spans[group].start for group in wave]
        rows = x.index_select(0, mine // (len(y) // len(x)))
        y.index_copy_(0, mine, few_outputs(rows, list(wave.values()), counts, activation))


def _many_at_a_time(
    mixed: Grouped, layer: int, experts: ExpertWeights, parts: Iterator[Tensor] | None
) -> Tensor:
    table = experts.table(layer)
    if table is not None:
        mixed.compute(table)
        return mixed.total()
    if parts is not None:
        for table in parts:
            mixed.compute(table, moves=True)
        return mixed.total()
    spans = _spans(layer, mixed.counts())
    for wave, table in experts.waves(list(spans)):
        mixed.compute(table, range(wave[0].expert, wave[-1].expert + 1), moves=True)
    return mixed.total()


class _Scratch:
    """Holds memory for one expert's rows at a time.

    Its size depends on the step's tokens and never on the routing, so the step that was measured takes as
    much as any other.
    """

    def __init__(self, x: Tensor, moe: MoeSpec) -> None:
        self.rows, self._activation = min(len(x), _ROWS), moe.activation
        hidden, inner = x.shape[1], moe.intermediate_size
        self._x, self._out = x.new_empty(self.rows, hidden), x.new_empty(self.rows, hidden)
        self._gate_up, self._inner = x.new_empty(self.rows, 2 * inner), x.new_empty(self.rows, inner)

    def expert(self, x: Tensor, tokens: Tensor, weights: GroupViews) -> Tensor:
        """Return the expert's output `[rows, hidden]` for these rows of x, at most `self.rows`; the next call
        overwrites it."""
        count, matrices, vectors = len(tokens), weights.matrices, weights.vectors
        taken = torch.index_select(x, 0, tokens, out=self._x[:count])
        gate_up = linear(taken, matrices["gate_up"], vectors.get("gate_up_bias"), out=self._gate_up[:count])
        inner = activate_into(gate_up, self._inner[:count], self._activation)
        return linear(inner, matrices["down"], vectors.get("down_bias"), out=self._out[:count])


def _spans(layer: int, counts: Sequence[int]) -> dict[GroupId, slice]:
    """Return where the pairs of each expert that has any begin and end, in the order of experts."""
    spans, start = dict[GroupId, slice](), 0
    for group, count in zip(_groups(layer, len(counts)), counts, strict=True):
        if count:
            spans[group] = slice(start, start + count)
            start += count
    return spans


@lru_cache(maxsize=256)
def _groups(layer: int, experts: int) -> tuple[GroupId, ...]:
    return tuple(GroupId(GroupKind.EXPERT, layer, expert) for expert in range(experts))
