"""Computes a draft head: one layer behind a target's hidden states, of EAGLE-3 (Li et al. 2025, arXiv
2503.01840) or in the target's own checkpoint (MTP; DeepSeek-V3, arXiv 2412.19437).

A position of the head has the features of the target's same position and the token behind it, and what it
yields is the token behind that. Features of computed positions are in a plane of the head's pages, which the
target's own passes write (`HiddenTaps`). Behind the newest token there are none: there the head goes on with
its own output, which it keeps of each row.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.arch.heads import HeadSpec
from penstock.arch.layout import GroupId, GroupKind
from penstock.arch.mixers.head import MtpAttention, TapNorms
from penstock.models.decoder import EMBEDDING, HEAD, Decoder, Head
from penstock.models.inputs import ColdCache, LayerCaches, StepInputs, Weights
from penstock.models.mixers import Mixing, attention
from penstock.models.residual import Residual
from penstock.ops.embedding import look_up
from penstock.ops.linear import linear
from penstock.ops.matrix import GroupViews
from penstock.ops.norm import rms_norm

_LAYER = GroupId(GroupKind.ATTENTION, 0)


class HeadDecoder(Decoder):
    """HeadDecoder computes a draft head in the place of a decoder.

    It keeps each row's newest output, and owns nothing else. Its logits are the target's: tokens that it
    cannot draft have none.
    """

    def __init__(self, head: HeadSpec, ids: Sequence[int], rows: int, like: Tensor) -> None:
        """Begin without outputs. ids: the target's token of each that can be drafted. like: has the dtype and
        the device of hidden states."""
        super().__init__(head.spec, dtype=like.dtype)
        self._head = head
        self._ids = torch.tensor(ids, dtype=torch.int64, device=like.device)
        self._newest = like.new_zeros(rows + 1, head.spec.hidden_size)

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
        """Return the outputs `[rows, hidden]` of the wanted positions. KV of all tokens is cached."""
        drafting, spec = inputs.drafting, self.spec
        assert drafting is not None, "a step of a draft head whose rows are not named"
        eps, (keys, values, features) = spec.norm_eps, caches[0]
        embedding = weights.take(EMBEDDING)
        embedded = look_up(inputs.tokens, embedding.matrices["embedding"], self._dtype)
        weights.release(EMBEDDING)
        seen = (
            self._newest[drafting.rows]
            if drafting.goes_on
            else features[_places(inputs.attention.slots, features)][:, 0]
        )
        w, layer = weights.take(_LAYER), self._local.stack[0]
        residual, given = self._begun(embedded, seen, w)
        out = attention(layer.mixer, given, w, (keys, values), Mixing(0, inputs, cold, None, eps))
        residual.add(linear(out, w.matrices["out"], w.vectors.get("out_bias")))
        weights.release(_LAYER)
        self._feed_forward(0, layer, residual, weights, inputs.padding, None)
        found = residual.sum()
        found = found if inputs.wanted is None else found[inputs.wanted]
        rows = drafting.rows
        if len(rows):
            self._newest[rows] = self._passed_on(found[: len(rows)], weights)
        return found

    def _begun(self, embedded: Tensor, seen: Tensor, w: GroupViews) -> tuple[Residual, Tensor]:
        """Return the residual that the layer adds to, and the input of attention, from embedded tokens and
        the features before them."""
        eps, normed = self.spec.norm_eps, rms_norm(seen, w.vectors["hidden_norm"], self.spec.norm_eps)
        if isinstance(self._head.mixer, MtpAttention):
            pairs = torch.cat((rms_norm(embedded, w.vectors["embedding_norm"], eps), normed), -1)
            residual = Residual(linear(pairs, w.matrices["pair"]), eps, None)
            return residual, residual.normed(w.vectors["norm"])
        pairs = torch.cat((rms_norm(embedded, w.vectors["norm"], eps), normed), -1)
        return Residual(normed if self._head.residual_normed else seen, eps, None), pairs

    def _passed_on(self, found: Tensor, weights: Weights) -> Tensor:
        """Return what the next token's features are."""
        if not self._head.output_normed:
            return found
        normed = rms_norm(found, weights.take(HEAD).vectors["norm"], self.spec.norm_eps)
        weights.release(HEAD)
        return normed

    @contextmanager
    def head(self, weights: Weights, hidden: Tensor) -> Iterator[Head]:
        """Lend the head for `hidden`, the result of `forward`: a function to logits of the target's
        tokens."""
        with super().head(weights, hidden) as own:
            parts = own.normed, own.matrix, own.collectives, own.scale, own.cap
            yield _Spread(*parts, own, self._ids, self.spec.vocab_size)


@dataclass(frozen=True, slots=True)
class _Spread(Head):
    """Puts logits of the tokens that can be drafted in the places of the target's tokens.

    own: the head to these. ids: int64, the target's token of each. vocabulary: how many the target has.
    """

    own: Head
    ids: Tensor
    vocabulary: int

    def __call__(self, rows: slice, out: Tensor | None = None) -> Tensor:
        """Return the logits of some rows, `[rows, vocab]`; those of tokens that cannot be drafted are
        -inf."""
        found = self.own(rows)
        shape = len(found), self.vocabulary
        spread = found.new_full(shape, -torch.inf) if out is None else out.fill_(-torch.inf)
        return spread.index_copy_(1, self.ids, found)


class HiddenTaps:
    """HiddenTaps takes hidden states of a target's passes, and writes what a head makes of them to its
    pages."""

    def __init__(self, head: HeadSpec, layers: int, weights: Weights, caches: LayerCaches) -> None:
        """Write to these pages of a head, with its weights, all of which stay where they are. layers: of the
        target."""
        self._before, self._norms, self._eps = head.taps_of(layers), head.mixer.tap_norms, head.spec.norm_eps
        self._weights, self._features = weights, caches[0][2]
        self._seen = list[Tensor]()

    @property
    def before(self) -> Sequence[int]:
        """Return the layers."""
        return self._before

    def see(self, layer: int, hidden: Callable[[], Tensor], slots: Tensor) -> None:
        """Take the hidden states before a layer, as `Taps.see` says, and write features behind the last of
        these. A token without a place is written to the last block of the head's pool, which is nobody's."""
        if not layer:
            self._seen.clear()  # Perhaps the last pass was broken off.
        if layer not in self._before:
            return
        self._seen.append(hidden())
        if len(self._seen) == len(self._before):
            self._features[_places(slots, self._features)] = self._projected().unsqueeze(1)
            self._seen.clear()

    def _projected(self) -> Tensor:
        w, seen = self._weights.take(_LAYER), self._seen
        x = torch.cat(seen, -1)
        if self._norms is TapNorms.TOGETHER:
            x = rms_norm(x, w.vectors["tap_norm"], self._eps)
        elif self._norms is TapNorms.EACH:
            gains = w.vectors["tap_norm"].chunk(len(seen))
            x = torch.cat([rms_norm(one, g, self._eps) for one, g in zip(seen, gains, strict=True)], -1)
        out = linear(x, w.matrices["fc"]) if "fc" in w.matrices else x
        self._weights.release(_LAYER)
        return out


def _places(slots: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
    """Return block and offset of each slot. That of -1 is the last of the last block."""
    size = plane.shape[1]
    return slots.div(size, rounding_mode="floor"), slots.remainder(size)
