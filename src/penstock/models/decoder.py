"""Computes the decoder: a function of borrowed weights, KV views and a step's inputs, for any `ModelSpec`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupKind
from penstock.arch.parts import held, local_spec
from penstock.arch.shards import WHOLE, Shard
from penstock.arch.spec import LayerSpec, ModelSpec, MoeSpec
from penstock.models.inputs import (
    ColdCache,
    Collectives,
    LayerCaches,
    LoraInputs,
    Routing,
    StepInputs,
    Taps,
    Weights,
)
from penstock.models.mixers import FORWARD, Mixing, attention_at_once
from penstock.models.moe import ask, choose, mixture, router_scores, shared_experts
from penstock.models.residual import Residual
from penstock.ops.activation import soft_cap
from penstock.ops.embedding import look_up
from penstock.ops.kernels import row_kernels
from penstock.ops.linear import add_linear, gated, linear
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.norm import rms_norm
from penstock.ops.route import route

EMBEDDING = GroupId(GroupKind.EMBEDDING)
HEAD = GroupId(GroupKind.HEAD)

_WIDE_ROWS = 8192
"""Tokens in the widest part of a feed-forward at a time.

A long chunk passes in pieces, which are no slower.
"""


@dataclass(frozen=True, slots=True)
class Head:
    """A head computes logits. `Decoder.head` lends it.

    normed: the hidden states behind the last norm, `[rows, hidden]`.
    matrix: `[vocab, hidden]`, this rank's rows of the vocabulary.
    scale, cap: of logits.
    """

    normed: Tensor
    matrix: Matrix
    collectives: Collectives | None
    scale: float
    cap: float | None

    def __call__(self, rows: slice, out: Tensor | None = None) -> Tensor:
        """Return the logits of some rows of the hidden states, `[rows, vocab]`, in `out` if it is given."""
        found = linear(self.normed[rows], self.matrix, out=out if self.collectives is None else None)
        found = soft_cap(found if self.scale == 1.0 else found.mul_(self.scale), self.cap)
        if self.collectives is None:
            return found
        gathered = self.collectives.gather(found)
        return gathered if out is None else out.copy_(gathered)


class Decoder:
    """The decoder is arithmetic only: it owns no weights and no KV, and keeps nothing between calls.

    For a shard it computes one rank's part, with that rank's weights and KV. Hidden states and logits are the
    whole model's on every rank; heads, feed-forwards and vocabulary are divided. A layer has two sums over
    ranks (all-reduce), the embedding one, and rows of logits are gathered. Each rank's part is rounded to the
    activations' dtype before the sum. So bits differ with the number of ranks, by about one more rounding of
    every block's output.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shard: Shard | None = None,
        collectives: Collectives | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Compute with this model. spec: of the whole model. collectives: needed for a shard of several
        ranks. dtype: of activations, needed where the embedding is quantised. Raises ConfigError for too many
        ranks."""
        shard = shard or WHOLE
        assert shard.ranks == 1 or collectives is not None, f"{shard} without collectives"
        self.spec = spec
        self._local, self._vocabulary = local_spec(spec, shard), held(spec, shard).vocabulary
        self._collectives = collectives if shard.ranks > 1 else None
        self._dtype = dtype
        self.routing: Routing | None = None
        """Sees the scores of every router, if a measurement asks for it."""
        self.taps: Taps | None = None
        """Takes hidden states for a draft head, if there is one."""

    def forward(
        self,
        weights: Weights,
        caches: LayerCaches,
        inputs: StepInputs,
        layers: range | tuple[int, ...] | None = None,
        cold: ColdCache | None = None,
        *,
        stay: bool = False,
    ) -> Tensor:
        """Return the hidden states `[rows, hidden]` of the wanted positions, for `head`. KV of all tokens is
        cached.

        layers: the layers to run, for measurements, with all positions in each. All layers by default.
        cold: needed where `inputs` name KV beyond the device.
        stay: whether all weights stay where they are lent, so that a CPU may pass all layers in one call.
        """
        wanted, ends = inputs.wanted, self._ends(inputs) if layers is None else None
        lora, taps, slots = inputs.lora, self.taps if layers is None else None, inputs.attention.slots
        embedding = weights.take(EMBEDDING)
        residual = Residual(
            self._embed(inputs.tokens, embedding.matrices["embedding"]),
            self.spec.norm_eps,
            self._collectives,
        )
        weights.release(EMBEDDING)
        if self.spec.embedding_scale != 1.0:
            residual.x.mul_(self.spec.embedding_scale)
        if layers is None:
            at_once = (
                stay
                and cold is None
                and ends is None
                and inputs.lora is None
                and taps is None
                and self._at_once(weights, caches, inputs, residual)
            )
            layers = range(0 if at_once else self.spec.layers)
        for layer in layers:
            if taps is not None:
                taps.see(layer, residual.peek, slots)
            spec = self._local.stack[layer]
            last = wanted if layer == ends else None
            mixing = Mixing(layer, inputs, cold, last, self.spec.norm_eps, self._collectives)
            self._mix(spec, residual, weights, caches[layer], mixing)
            if last is not None:
                wanted, lora = None, lora and lora.of_wanted
                if not len(last):
                    return residual.x
            self._feed_forward(layer, spec, residual, weights, inputs.padding, lora)
        if taps is not None:
            taps.see(self.spec.layers, residual.peek, slots)
        hidden = residual.sum()
        return hidden if wanted is None else hidden[wanted]

    def _at_once(self, weights: Weights, caches: LayerCaches, inputs: StepInputs, residual: Residual) -> bool:
        """Pass all layers in one call of a CPU's kernels, if they can and the halves of each have been
        described by passes before; tell whether they did."""
        kernels = row_kernels("layers", residual.x)
        if kernels is None:
            return False
        first = weights.take(GroupId(GroupKind.ATTENTION, 0)).matrices["out"].half
        stack = kernels.stack(first, self._ends_of_halves(weights), caches, residual.x)
        if stack is None or not kernels.suits(inputs.attention, caches[0], residual.x):
            return False
        angles, k = (inputs.cos, inputs.sin), caches[0][0]
        return residual.pass_half(lambda x, _: kernels.pass_layers(stack, x, angles, k, inputs.attention))

    def _ends_of_halves(self, weights: Weights) -> Iterator[Matrix]:
        """Yield the last matrix of each half of a layer, as far as halves are attention and feed-forward."""
        for layer, spec in enumerate(self._local.stack):
            if isinstance(spec.feed_forward, MoeSpec):
                return
            yield weights.take(GroupId(GroupKind.ATTENTION, layer)).matrices["out"]
            yield weights.take(GroupId(GroupKind.FFN, layer)).matrices["down"]

    def _ends(self, inputs: StepInputs) -> int | None:
        """Return the last layer, if few positions are wanted: from its mixer on only these are computed.

        The other positions leave only KV there.
        """
        few = inputs.wanted is not None and 2 * len(inputs.wanted) <= len(inputs.tokens)
        few = few and (self.taps is None or self.spec.layers not in self.taps.before)
        return self.spec.layers - 1 if few else None

    @contextmanager
    def head(self, weights: Weights, hidden: Tensor) -> Iterator[Head]:
        """Lend the head for `hidden`, the result of `forward`.

        It is a function from a slice of its rows to their logits `[rows, vocab]`, of the activations' dtype.
        It ends a pass and is entered at most once in it, since streamed weights pass only once.
        """
        norm = weights.take(HEAD)
        normed = rms_norm(hidden, norm.vectors["norm"], self.spec.norm_eps)
        if self.spec.tied_embeddings:
            weights.release(HEAD)
            group, matrix = EMBEDDING, weights.take(EMBEDDING).matrices["embedding"]
        else:
            group, matrix = HEAD, norm.matrices["output"]
        yield Head(normed, matrix, self._collectives, self.spec.logits_scale, self.spec.logits_cap)
        weights.release(group)

    def _embed(self, tokens: Tensor, rows: Matrix) -> Tensor:
        """Return `[tokens, hidden]` of the embedding's rows on this rank; tokens of other ranks' rows get
        zeros."""
        if self._collectives is None:
            return look_up(tokens, rows, self._dtype)
        mine = tokens - self._vocabulary.start
        others = (mine < 0) | (mine >= rows.shape[0])
        found = look_up(mine.masked_fill_(others, 0), rows, self._dtype)
        return found.masked_fill_(others.unsqueeze(1), 0)

    def _mix(
        self,
        spec: LayerSpec,
        residual: Residual,
        weights: Weights,
        cache: tuple[Tensor, ...],
        mixing: Mixing,
    ) -> None:
        group, lora = GroupId(GroupKind.ATTENTION, mixing.layer), mixing.inputs.lora
        w = weights.take(group)
        if lora is None and (kernels := _of_halves(spec, residual.x, w)):
            half = partial(attention_at_once, kernels, spec.mixer, w, cache, mixing)
            if residual.pass_half(half):
                weights.release(group)
                return
        # The input is in no variable here, so a mixer can let go of it.
        seen = FORWARD[type(spec.mixer)](spec.mixer, residual.normed(w.vectors.get("norm")), w, cache, mixing)
        if mixing.wanted is not None:
            residual.keep(mixing.wanted)
            lora = lora and lora.of_wanted
        bias, after = w.vectors.get("out_bias"), w.vectors.get("norm_after")
        if mixing.wanted is None and residual.takes_products(spec.scale, bias, after):
            add_linear(seen, w.matrices["out"], residual.x)
            if lora is not None:
                lora.add((group, "out"), seen, residual.x)
        elif len(seen):
            matrix = w.matrices["out"]
            out = lora.linear((group, "out"), seen, matrix, bias) if lora else linear(seen, matrix, bias)
            residual.add(out, after, spec.scale)
        weights.release(group)

    def _feed_forward(
        self,
        layer: int,
        spec: LayerSpec,
        residual: Residual,
        weights: Weights,
        padding: Tensor | None,
        lora: LoraInputs | None,
    ) -> None:
        if isinstance(spec.feed_forward, MoeSpec):
            self._mixture(layer, spec, spec.feed_forward, residual, weights, padding)
            return
        group = GroupId(GroupKind.FFN, layer)
        w = weights.take(group)
        if w.elsewhere is not None:
            assert lora is None, "adapters where a feed-forward is computed elsewhere"
            x = residual.normed(w.vectors.get("norm"))
            residual.add(w.elsewhere(x), w.vectors.get("norm_after"), spec.scale)
            weights.release(group)
            return
        kernels = _of_halves(spec, residual.x, w) if lora is None else None
        if kernels and residual.pass_half(partial(kernels.feed_forward, w, self.spec.norm_eps)):
            weights.release(group)
            return
        x, after = residual.normed(w.vectors.get("norm")), w.vectors.get("norm_after")
        takes = residual.takes_products(spec.scale, w.vectors.get("down_bias"), after)
        out = _mlp(x, w, residual.x if takes else None, None if lora is None else (lora, group))
        if out is not None:
            residual.add(out, after, spec.scale)
        weights.release(group)

    def _mixture(
        self,
        layer: int,
        spec: LayerSpec,
        moe: MoeSpec,
        residual: Residual,
        weights: Weights,
        padding: Tensor | None,
    ) -> None:
        group = GroupId(GroupKind.ROUTER, layer)
        w = weights.take(group)
        x, after = residual.normed(w.vectors.get("norm")), w.vectors.get("norm_after")
        logits = router_scores(x, moe, w)
        if self.routing is not None:
            logits = self.routing.scores(layer, w, x, logits)
        experts = weights.experts
        assert experts is not None, "a mixture without experts"
        padding = padding if experts.decided else None
        choice = choose(x, logits, moe, experts.mixtures[layer], w.vectors.get("correction"), padding)
        parts = ask(choice, layer, experts)
        foretells = parts is not None or not experts.decided
        if foretells and (following := experts.foretells(layer, moe.top_k * len(x))) is not None:
            foretold = partial(self._foretold, following, residual.x, weights)
            if parts is None:
                experts.foretell_later(following, partial(foretold, chosen=True))
            else:
                experts.foretell(following, foretold(), moe.top_k * len(x), padding)
        shared = None if moe.shared is None else shared_experts(x, w)
        weights.release(group)
        mixed = mixture(x, choice, moe, layer, experts, parts)
        residual.add(mixed if shared is None else mixed.add_(shared), after, spec.scale)

    def _foretold(self, layer: int, x: Tensor, weights: Weights, *, chosen: bool = False) -> Tensor:
        """Return the scores `[tokens, experts]` that the layer's router gives x, the hidden states of the
        layer before; or if `chosen`, the experts that it would choose by them, `[tokens, top_k]`."""
        group, moe = GroupId(GroupKind.ROUTER, layer), self._local.stack[layer].feed_forward
        assert isinstance(moe, MoeSpec), f"layer {layer} has no experts"
        w = weights.take(group)
        norm = w.vectors.get("norm")
        scores = router_scores(x if norm is None else rms_norm(x, norm, self.spec.norm_eps), moe, w)
        if self.routing is not None:
            scores = self.routing.foretold(layer, scores)
        found = route(scores, moe, w.vectors.get("correction"))[1] if chosen else scores
        weights.release(group)
        return found


def _of_halves(spec: LayerSpec, x: Tensor, weights: GroupViews) -> ModuleType | None:
    """Return the kernels that compute half a layer of few rows at once, where its output is added as it
    is."""
    plain = spec.scale == 1.0 and "norm_after" not in weights.vectors
    return row_kernels("layers", x) if plain else None


def _mlp(
    x: Tensor, w: GroupViews, onto: Tensor | None, adapted: tuple[LoraInputs, GroupId] | None
) -> Tensor | None:
    """Compute SwiGLU of x `[tokens, hidden]` in place and return it; None if it has been added to `onto`.

    adapted: the adapters of the rows, and this group.
    """
    gate_up, down = w.matrices["gate_up"], w.matrices["down"]
    gate_up_bias, down_bias = w.vectors.get("gate_up_bias"), w.vectors.get("down_bias")
    into, first = x if onto is None else onto, 0
    for piece, place in zip(torch.split(x, _WIDE_ROWS), torch.split(into, _WIDE_ROWS), strict=True):
        if adapted is None:
            inner = gated(piece, gate_up, gate_up_bias)
        else:
            lora, group = adapted
            inner = lora.gated((group, "gate_up"), piece, gate_up, gate_up_bias, first)
        if onto is not None:
            add_linear(inner, down, place)
            if adapted is not None:
                lora.add((group, "down"), inner, place, first)
        elif adapted is None:
            linear(inner, down, down_bias, out=place)
        else:
            lora.linear((group, "down"), inner, down, down_bias, first, out=place)
        first += len(piece)
    return None if onto is not None else x
