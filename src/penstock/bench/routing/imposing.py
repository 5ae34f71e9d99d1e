"""Imposes a routing on a model: a benchmark's tokens take the experts that a recording or a distribution
names, whatever the routers say.

Random weights route unlike trained ones. Scores are replaced, not choices, so everything behind the router is
what it is in use: the choice among the scores, the shares, the order of pairs. A step reads its scores from a
table on the device by a counter on the device, so recorded steps take a new routing each time, too. In a
decode step that is one gather for all layers, of a few microseconds.

A token's experts get scores from 1 downwards, all others `_LEAST`: shares differ as those of a trained router
do, and sum to nearly one also where they are not normalised. Biases that a router adds to choose by must be
smaller than half of that.

What a layer foretells of the next is replaced, too: each expert that a token will take is named as likely as
the recording's own routers named theirs, else some other. By a distribution nothing can be foretold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.arch.spec import ModelSpec, MoeSpec
from penstock.base.errors import ConfigError
from penstock.bench.routing.recording import Recording
from penstock.bench.routing.replay import foretelling
from penstock.ops.matrix import GroupViews

_LEAST = -8.0
"""The score of an expert that is not to be chosen."""
_TABLE_BYTES, _TOKENS = 64 << 20, 4096
"""Most bytes of the table of scores, and most tokens: after so many the routing begins again."""
_SEED = 0


@dataclass(frozen=True)
class ImposedRouting:
    """Names a routing, and makes it for a model of any shape.

    kind: `uniform`, `zipf`, or the path of a recording.
    exponent: of zipf: the expert of rank r is chosen as often as r ** -exponent says. Each layer ranks its
        experts in an order of its own.
    """

    kind: str
    exponent: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "ImposedRouting":
        """Read `uniform`, `zipf`, `zipf:1.2` or a file's name. Raises ConfigError for a file that is no
        recording, and for exponents that are no number from 0 to 10."""
        name, colon, number = text.partition(":")
        if name != "zipf":
            found = cls(text)
            if text != "uniform":
                found._recording  # noqa: B018  # A file that is damaged is refused before anything is built.
            return found
        try:
            exponent = float(number) if colon else 1.0
        except ValueError:
            exponent = -1.0
        if not 0 <= exponent <= 10:
            raise ConfigError(f"cannot read {text!r} as a routing; write zipf, or zipf:1.2 up to zipf:10")
        return cls(name, exponent)

    def __str__(self) -> str:
        return f"zipf:{self.exponent:g}" if self.kind == "zipf" else self.kind

    def chosen(self, moe: MoeSpec, layers: int, tokens: int) -> NDArray[np.int64]:
        """Return the experts of so many tokens, at most, `[tokens, layers, top_k]`: such as the router may
        choose."""
        return within_groups(self._chosen(moe, layers, tokens), moe)

    def _chosen(self, moe: MoeSpec, layers: int, tokens: int) -> NDArray[np.int64]:
        if self.kind in ("uniform", "zipf"):
            rng = np.random.default_rng(_SEED)
            scores = rng.gumbel(size=(tokens, layers, moe.experts))
            if self.kind == "zipf":
                rank = np.argsort(rng.random((layers, moe.experts)), axis=-1) + 1.0
                scores -= self.exponent * np.log(rank)
            return np.argsort(-scores, axis=-1)[..., : moe.top_k]
        return fitted(self._recording, moe, layers, tokens)

    def on(self, spec: ModelSpec, rows: int, device: torch.device, dtype: torch.dtype) -> "RoutingTable":
        """Return the table of a model, with scores of `dtype`. Raises ConfigError for a dense model."""
        moe, layers = spec.moe, [layer for layer in range(spec.layers) if spec.is_moe(layer)]
        if moe is None:
            raise ConfigError(
                f"a routing was given, but {spec.family} of this shape has no experts; leave --routing out, "
                "or name a mixture"
            )
        a_token = 2 * len(layers) * moe.experts * dtype.itemsize
        chosen = self.chosen(moe, len(layers), max(min(_TOKENS, _TABLE_BYTES // a_token), 1))
        table = torch.from_numpy(chosen).to(device)
        return RoutingTable(table, moe.experts, layers, rows, dtype, recall=self._recall)

    @property
    def _recall(self) -> float:
        """Return the share of the next layer's experts that a layer foretells."""
        told = None if self.kind in ("uniform", "zipf") else foretelling(self._recording)
        return 0.0 if told is None else told.recall[0]

    @cached_property
    def _recording(self) -> Recording:
        return Recording.read(Path(self.kind))


class RoutingTable:
    """Replaces the scores of every router by the next ones of a table."""

    def __init__(
        self,
        chosen: Tensor,
        experts: int,
        layers: Sequence[int],
        rows: int,
        dtype: torch.dtype,
        *,
        recall: float = 0.0,
    ) -> None:
        """Begin at the table's first token.

        chosen: int64 `[tokens, layers, top_k]`. layers: those that are mixtures. rows: of the largest decode
        step; each row goes through a part of the table of its own. A step of more tokens is a prompt, which
        goes through it token by token. recall: the share of them that is foretold.
        """
        tokens, count, top_k = chosen.shape
        ranks = 1 - torch.arange(top_k, dtype=dtype, device=chosen.device) / top_k
        scores = torch.full((tokens, count, experts), _LEAST, dtype=dtype, device=chosen.device)
        scores.scatter_(2, chosen, ranks.expand(tokens, count, top_k))
        rng = np.random.default_rng(_SEED + 1)
        right = torch.from_numpy(rng.random(chosen.shape) < recall).to(chosen.device)
        other = torch.from_numpy(rng.integers(0, experts, chosen.shape)).to(chosen.device)
        told = torch.where(right, chosen, other)
        likely = torch.full_like(scores, _LEAST).scatter_(2, told, ranks.expand(told.shape))
        self._likely = likely.view(tokens, -1)
        """Scores by which experts are foretold."""
        self._scores, self._experts, self._rows = scores.view(tokens, -1), experts, rows
        self._place = {layer: slice(at * experts, (at + 1) * experts) for at, layer in enumerate(layers)}
        self._first, self._last = layers[0], layers[-1]
        self._at = torch.zeros((), dtype=torch.int64, device=chosen.device)
        self._apart = torch.arange(rows, device=chosen.device) * max(tokens // rows, 1)
        self._tokens = self._apart
        """The table's tokens that a step takes."""
        self._decoded: tuple[Tensor, Tensor] | None = None
        """Scores of all layers of a decode step, and those by which they are foretold: both are found in its
        first layer, so that no other has work that is the benchmark's alone."""

    def scores(self, layer: int, router: GroupViews, x: Tensor, scores: Tensor) -> Tensor:
        """Return the table's scores instead of these, `[tokens, experts]`."""
        tokens, place = len(scores), self._place[layer]
        if layer == self._first:
            self._begin(tokens)
        if self._decoded is None:
            found = self._scores[:, place].index_select(0, self._tokens[:tokens])
        else:
            found = self._decoded[0][:tokens, place]
        if layer == self._last:
            self._decoded = None
        return found.to(scores.dtype)

    def foretold(self, layer: int, scores: Tensor) -> Tensor:
        """Return scores of the experts that are foretold instead of these, `[tokens, experts]`."""
        place, tokens = self._place[layer], len(scores)
        if self._decoded is None:
            return self._likely[:, place].index_select(0, self._tokens[:tokens]).to(scores.dtype)
        return self._decoded[1][:tokens, place].to(scores.dtype)

    def _begin(self, tokens: int) -> None:
        """Find the table's tokens of a step, and go on."""
        decodes = tokens <= self._rows
        ahead = self._apart[:tokens] if decodes else torch.arange(tokens, device=self._at.device)
        self._tokens = (self._at + ahead) % len(self._scores)
        self._at += 1 if decodes else tokens
        self._decoded = None
        if decodes:
            self._decoded = (
                self._scores.index_select(0, self._tokens),
                self._likely.index_select(0, self._tokens),
            )


def fitted(recording: Recording, moe: MoeSpec, layers: int, tokens: int) -> NDArray[np.int64]:
    """Return a recording's choices, as far as it goes, for a mixture of any shape: `[tokens, layers, top_k]`.

    Layers are taken in turn. Where a layer has `m` times as many experts, each of the recorded ones stands
    for m, of which the token's next one decides; where it has no multiple, numbers go round. Where a token
    takes more of them, it takes those of the tokens that lie a part of the recording behind it.
    """
    chosen = recording.chosen.astype(np.int64)
    tokens = min(tokens, len(chosen))
    if (recording.model.experts, recording.model.top_k) == (moe.experts, moe.top_k):
        return chosen[:tokens, np.arange(layers) % chosen.shape[1]]
    many = max(moe.experts // recording.model.experts, 1)
    every = (chosen * many + np.roll(chosen, 1, axis=-1) % many) % moe.experts
    ways = -(-2 * moe.top_k // every.shape[2])
    found = np.empty((tokens, layers, moe.top_k), np.int64)
    for layer in range(layers):
        of_layer = every[:, layer % every.shape[1]]
        behind = [np.roll(of_layer, -way * len(of_layer) // ways, axis=0)[:tokens] for way in range(ways)]
        candidates = np.concatenate(behind, axis=1)
        for token, some in enumerate(candidates.tolist()):
            found[token, layer] = _distinct([*some, *range(moe.experts)], moe.top_k)
    return found


def within_groups(chosen: NDArray[np.int64], moe: MoeSpec) -> NDArray[np.int64]:
    """Return choices `[tokens, layers, top_k]` without experts of more groups than a router chooses from.

    A token's first experts name its groups. An expert of another group gives its place to the one that has
    the same place in one of these, or where the token has that, to the next that it has not.
    """
    router, size = moe.router, moe.experts // moe.router.groups
    if not router.grouped:
        return chosen
    found = np.empty_like(chosen)
    for place in np.ndindex(chosen.shape[:2]):
        experts = chosen[place].tolist()
        groups = _distinct(
            [*(expert // size for expert in experts), *range(router.groups)], router.top_groups
        )
        moved = [
            expert
            if expert // size in groups
            else groups[expert // size % len(groups)] * size + expert % size
            for expert in experts
        ]
        every = (group * size + at for group in groups for at in range(size))
        found[place] = _distinct([*moved, *every], moe.top_k)
    return found


def _distinct(experts: Sequence[int], count: int) -> list[int]:
    """Return the first `count` experts without those that were there before."""
    return list(dict.fromkeys(experts))[:count]
