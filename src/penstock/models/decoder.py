"""The decoder: one function of borrowed weights, KV views and a step's inputs, for every family the spec can express."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupKind
from penstock.arch.spec import ModelSpec
from penstock.models.inputs import ColdCache, LayerCaches, StepInputs, Weights
from penstock.models.moe import mixture
from penstock.ops.activation import silu_mul
from penstock.ops.attention import attend
from penstock.ops.linear import linear
from penstock.ops.norm import add_rms_norm, rms_norm
from penstock.ops.rope import rotate

EMBEDDING = GroupId(GroupKind.EMBEDDING)
HEAD = GroupId(GroupKind.HEAD)

_WIDE_ROWS = 8192
"""Tokens that are in the widest part of a feed-forward at a time: a long chunk passes through it in pieces."""


class Decoder:
    """Arithmetic only: it owns no weights and no KV, and keeps nothing between calls."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._scale = spec.head_dim**-0.5

    def forward(
        self,
        weights: Weights,
        caches: LayerCaches,
        inputs: StepInputs,
        layers: range | tuple[int, ...] | None = None,
        cold: ColdCache | None = None,
    ) -> Tensor:
        """Hidden states `[rows, hidden]` of the wanted positions, as `head` wants them; KV of all tokens is written to the caches.

        `layers`: which to run, for measuring; all by default. cold: needed where `inputs` speak of KV beyond the device.
        """
        embedding = weights.take(EMBEDDING)
        residual = torch.nn.functional.embedding(inputs.tokens, embedding["embedding"])
        weights.release(EMBEDDING)
        # Each block hands its output on instead of adding it, so that the sum and the next norm can be one kernel.
        x: Tensor | None = None
        for layer in range(self.spec.layers) if layers is None else layers:
            x = self._attention(layer, x, residual, weights, caches[layer], inputs, cold)
            x = self._feed_forward(layer, x, residual, weights)
        if x is not None:
            residual.add_(x)
        return residual[inputs.wanted]

    @contextmanager
    def head(self, weights: Weights, hidden: Tensor) -> Iterator[Callable[[slice], Tensor]]:
        """Lends the head for `hidden`, which `forward` returned: a function from a slice of its rows to their logits, float32
        `[rows, vocab]`. The end of a pass, and to be entered at most once in it: what streams passes by only once."""
        norm = weights.take(HEAD)
        normed = rms_norm(hidden, norm["norm"], self.spec.norm_eps)
        if self.spec.tied_embeddings:
            weights.release(HEAD)
            group, matrix = EMBEDDING, weights.take(EMBEDDING)["embedding"]
        else:
            group, matrix = HEAD, norm["output"]
        yield lambda rows: linear(normed[rows], matrix).float()
        weights.release(group)

    def _norm(self, x: Tensor | None, residual: Tensor, weight: Tensor) -> Tensor:
        if x is None:
            return rms_norm(residual, weight, self.spec.norm_eps)
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
    ) -> Tensor:
        spec, group = self.spec, GroupId(GroupKind.ATTENTION, layer)
        w = weights.take(group)
        qkv = linear(self._norm(x, residual, w["norm"]), w["qkv"], w.get("qkv_bias"))
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        qk, v = heads[:, : spec.heads + spec.kv_heads], heads[:, spec.heads + spec.kv_heads :]
        if spec.qk_norm:
            q, k = rms_norm(qk[:, : spec.heads], w["q_norm"], spec.norm_eps), rms_norm(qk[:, spec.heads :], w["k_norm"], spec.norm_eps)
            qk = torch.cat((q, k), dim=1)
        qk = rotate(qk, inputs.cos, inputs.sin)
        q, k = qk[:, : spec.heads], qk[:, spec.heads :]
        if cold is not None:
            cold.send(layer, k, v)
        seen = attend(q, k, v, cache, inputs.attention, self._scale, spec.windows[layer], cold)
        out = linear(seen.view(len(seen), -1), w["out"], w.get("out_bias"))
        weights.release(group)
        return out

    def _feed_forward(self, layer: int, x: Tensor, residual: Tensor, weights: Weights) -> Tensor:
        if self.spec.is_moe(layer):
            router = GroupId(GroupKind.ROUTER, layer)
            w = weights.take(router)
            normed = self._norm(x, residual, w["norm"])
            scores = linear(normed, w["router"])
            weights.release(router)
            assert self.spec.moe is not None
            return mixture(normed, scores, self.spec.moe, layer, weights)
        group = GroupId(GroupKind.FFN, layer)
        w = weights.take(group)
        normed = self._norm(x, residual, w["norm"])
        pieces = torch.split(normed, _WIDE_ROWS)
        for piece in pieces:
            inner = silu_mul(linear(piece, w["gate_up"], w.get("gate_up_bias")))
            out = linear(inner, w["down"], w.get("down_bias"))
            if len(pieces) > 1:
                piece.copy_(out)
        out = out if len(pieces) == 1 else normed
        weights.release(group)
        return out
