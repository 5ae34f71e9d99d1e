"""The decoder: one function of borrowed weights, KV views and a step's inputs, for every family the spec can
express."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupKind
from penstock.arch.shards import WHOLE, Shard, held, local_spec
from penstock.arch.spec import ModelSpec
from penstock.models.inputs import ColdCache, Collectives, LayerCaches, StepInputs, Weights
from penstock.models.moe import mixture
from penstock.ops.attention.attend import attend
from penstock.ops.attention.inputs import LayerAttention
from penstock.ops.linear import add_linear, gated, linear
from penstock.ops.norm import add_rms_norm, rms_norm
from penstock.ops.project import HeadNorms, project

EMBEDDING = GroupId(GroupKind.EMBEDDING)
HEAD = GroupId(GroupKind.HEAD)

_WIDE_ROWS = 8192
"""Tokens that are in the widest part of a feed-forward at a time: a long chunk passes through it in pieces,
which are no slower."""

_MANY_ROWS = 512
"""With more tokens a block's last product adds to the residual itself: the norm that comes next reads and
writes half as much."""


class Head(Protocol):
    """What `Decoder.head` lends."""

    def __call__(self, rows: slice, out: Tensor | None = None) -> Tensor: ...


class Decoder:
    """Arithmetic only: it owns no weights and no KV, and keeps nothing between calls.

    Of a shard it is one rank's part, with that rank's weights and KV: hidden states and logits are the whole
    model's on every rank, and of heads, feed-forwards and vocabulary each computes its own. Two sums over
    ranks in a layer, one for the embedding; a row of logits is gathered. Sums are of the activations' dtype,
    so each rank's part is rounded to it before they are added up: the model is the same, but bits differ with
    the number of ranks, by about what one more rounding of every block's output makes.
    """

    def __init__(
        self, spec: ModelSpec, shard: Shard | None = None, collectives: Collectives | None = None
    ) -> None:
        """spec: of the whole model. collectives: needed for a shard of several ranks. Raises ConfigError for
        too many of them."""
        shard = shard or WHOLE
        assert shard.ranks == 1 or collectives is not None, f"{shard} without collectives"
        self.spec = spec
        self._local, self._vocabulary = local_spec(spec, shard), held(spec, shard).vocabulary
        self._collectives = collectives if shard.ranks > 1 else None
        self._attention_of = [LayerAttention(spec.head_dim**-0.5, window) for window in spec.windows]

    def forward(
        self,
        weights: Weights,
        caches: LayerCaches,
        inputs: StepInputs,
        layers: range | tuple[int, ...] | None = None,
        cold: ColdCache | None = None,
    ) -> Tensor:
        """Hidden states `[rows, hidden]` of the wanted positions, as `head` wants them; KV of all tokens is
        written to the caches.

        What the last layer makes of the others is read by nobody: from its KV on it computes the wanted ones
        alone, if these are few, and goes no further if there are none. `layers`: which to run, for measuring,
        all positions in each; all by default. cold: needed where `inputs` speak of KV beyond the device.
        """
        wanted = inputs.wanted
        ends = (
            self.spec.layers - 1
            if layers is None and wanted is not None and 2 * len(wanted) <= len(inputs.tokens)
            else None
        )
        embedding = weights.take(EMBEDDING)
        residual = self._embed(inputs.tokens, embedding["embedding"])
        weights.release(EMBEDDING)
        self._sum(residual)
        # A block hands its output on, a rank's part of it, instead of adding it: sums and the next norm can
        # be one kernel.
        x: Tensor | None = None
        for layer in range(self.spec.layers) if layers is None else layers:
            x = self._attention(
                layer, x, residual, weights, caches[layer], inputs, cold, wanted if layer == ends else None
            )
            if layer == ends and wanted is not None:
                residual, wanted = residual[wanted], None
                if not len(residual):
                    return residual
            x = self._feed_forward(layer, x, residual, weights)
        if x is not None:
            self._sum(x)
            residual.add_(x)
        return residual if wanted is None else residual[wanted]

    @contextmanager
    def head(self, weights: Weights, hidden: Tensor) -> Iterator["Head"]:
        """Lends the head for `hidden`, from `forward`: a function from a slice of its rows to their logits
        `[rows, vocab]`, of the activations' dtype, in `out` if given. The end of a pass, and to be entered at
        most once in it: what streams passes by only once."""
        norm = weights.take(HEAD)
        normed = rms_norm(hidden, norm["norm"], self.spec.norm_eps)
        if self.spec.tied_embeddings:
            weights.release(HEAD)
            group, matrix = EMBEDDING, weights.take(EMBEDDING)["embedding"]
        else:
            group, matrix = HEAD, norm["output"]
        collectives = self._collectives

        def logits(rows: slice, out: Tensor | None = None) -> Tensor:
            if collectives is None:
                return linear(normed[rows], matrix, out=out)
            gathered = collectives.gather(linear(normed[rows], matrix))
            return gathered if out is None else out.copy_(gathered)

        yield logits
        weights.release(group)

    def _sum(self, x: Tensor) -> None:
        """Add up, in place, what the ranks computed of `x`."""
        if self._collectives is not None:
            self._collectives.all_reduce(x)

    def _embed(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """`[tokens, hidden]` of the embedding's rows on this rank: zeros for tokens whose row is
        another's."""
        if self._collectives is None:
            return torch.nn.functional.embedding(tokens, rows)
        mine = tokens - self._vocabulary.start
        others = (mine < 0) | (mine >= len(rows))
        return torch.nn.functional.embedding(mine.masked_fill_(others, 0), rows).masked_fill_(
            others.unsqueeze(1), 0
        )

    def _norm(self, x: Tensor | None, residual: Tensor, weight: Tensor) -> Tensor:
        if x is None:
            return rms_norm(residual, weight, self.spec.norm_eps)
        if self._collectives is not None:
            return self._collectives.add_rms_norm(x, residual, weight, self.spec.norm_eps)
        return add_rms_norm(x, residual, weight, self.spec.norm_eps)

    def _attention(
        self,
        layer: int,
        x: Tensor | None,
        residual: Tensor,
        weights: Weights,
        cache: tuple[Tensor, Tensor],
        inputs: StepInputs,
        cold: ColdCache | None,
        wanted: Tensor | None,
    ) -> Tensor | None:
        """wanted: the positions whose output is returned, if not all of them. None: it has been added to
        `residual`."""
        spec, group = self._local, GroupId(GroupKind.ATTENTION, layer)
        w = weights.take(group)
        qkv = linear(self._norm(x, residual, w["norm"]), w["qkv"], w.get("qkv_bias"))
        norms = HeadNorms(w["q_norm"], w["k_norm"], spec.norm_eps) if spec.qk_norm else None
        q, k, v = project(qkv, inputs.cos, inputs.sin, cache, inputs.attention, heads=spec.heads, norms=norms)
        if cold is not None:
            cold.send(layer, k, v)
        adds, attention = wanted is None and self._adds(residual, w.get("out_bias")), inputs.attention
        if wanted is not None and inputs.last is not None:
            q, wanted, attention = (
                q[wanted],
                None,
                inputs.last,
            )  # They are rows, which see no keys but those in pages.
        seen = attend(q, k, v, cache, attention, self._attention_of[layer], cold).out
        seen = seen if wanted is None else seen[wanted]
        out: Tensor | None = None
        if adds:
            add_linear(seen.view(len(seen), -1), w["out"], residual)
        elif len(seen):
            out = linear(seen.view(len(seen), -1), w["out"], w.get("out_bias"))
        weights.release(group)
        return out

    def _adds(self, residual: Tensor, bias: Tensor | None) -> bool:
        """Whether a block adds its output to the residual, by itself."""
        return self._collectives is None and bias is None and residual.is_cuda and len(residual) > _MANY_ROWS

    def _feed_forward(
        self, layer: int, x: Tensor | None, residual: Tensor, weights: Weights
    ) -> Tensor | None:
        """None: the output has been added to `residual`."""
        if self.spec.is_moe(layer):
            router = GroupId(GroupKind.ROUTER, layer)
            w = weights.take(router)
            normed = self._norm(x, residual, w["norm"])
            scores = linear(normed, w["router"])
            weights.release(router)
            assert self._local.moe is not None
            return mixture(normed, scores, self._local.moe, layer, weights)
        group = GroupId(GroupKind.FFN, layer)
        w = weights.take(group)
        normed = self._norm(x, residual, w["norm"])
        adds = self._adds(residual, w.get("down_bias"))
        for piece, onto in zip(
            torch.split(normed, _WIDE_ROWS), torch.split(residual, _WIDE_ROWS), strict=True
        ):
            inner = gated(piece, w["gate_up"], w.get("gate_up_bias"))
            if adds:
                add_linear(inner, w["down"], onto)
            else:  # Its output takes its place.
                linear(inner, w["down"], w.get("down_bias"), out=piece)
        weights.release(group)
        return None if adds else normed
