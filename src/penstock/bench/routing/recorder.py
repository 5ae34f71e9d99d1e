"""Records what routers choose while an engine computes prompts."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.arch.spec import ModelSpec, MoeSpec
from penstock.bench.routing.recording import least_dtype
from penstock.ops.linear import linear
from penstock.ops.matrix import GroupViews
from penstock.ops.route import route


class Recorder:
    """Sees the scores of every router of a decoder, and keeps what was chosen within its context.

    There prompts are to be computed one at a time and with all of their positions wanted: then the rows of a
    pass are the next tokens of one sequence in every layer.
    """

    def __init__(self) -> None:
        """Record nothing yet."""
        self.layers: tuple[int, ...] = ()
        """Those that are mixtures, once the model is known."""
        self._moe: MoeSpec | None = None
        self._recording = False
        self._chosen: dict[int, list[Tensor]] = {}
        self._foretold: dict[int, list[Tensor]] = {}
        self._before: tuple[int, Tensor] | None = None
        """The layer before, and its hidden states before their norm, but for a factor of each row."""

    def on(self, spec: ModelSpec, rows: int, device: torch.device, dtype: torch.dtype) -> "Recorder":
        """Return this recorder, for that model."""
        if spec.moe is not None:
            self._moe = spec.moe
            self.layers = tuple(layer for layer in range(spec.layers) if spec.is_moe(layer))
            self._chosen = {layer: [] for layer in self.layers}
            self._foretold = {layer: [] for layer in self.layers[:-1]}
        return self

    def __enter__(self) -> None:
        self._recording = True

    def __exit__(self, *fault: object) -> None:
        self._recording = False

    def scores(self, layer: int, router: GroupViews, x: Tensor, scores: Tensor) -> Tensor:
        """Return the scores as they are."""
        if self._recording:
            assert self._moe is not None, "a router of a dense model"
            top_k = self._moe.top_k
            correction = router.vectors.get("correction")
            self._chosen[layer].append(route(scores, self._moe, correction, _highest)[1])
            norm = router.vectors.get("norm")
            if self._before is not None:
                before, hidden = self._before
                given = hidden if norm is None else hidden * norm.float()
                bias = router.vectors.get("router_bias")
                told = linear(given.to(scores.dtype), router.matrices["router"], bias)
                wider = replace(self._moe, top_k=min(2 * top_k, self._moe.experts))
                self._foretold[before].append(route(told, wider, correction, _highest)[1])
            last = layer == self.layers[-1]
            self._before = None if last else (layer, x.float() if norm is None else _unscaled(x, norm))
        return scores

    def foretold(self, layer: int, scores: Tensor) -> Tensor:
        """Return the scores as they are."""
        return scores

    def taken(self) -> tuple[NDArray[np.uint8 | np.uint16], NDArray[np.uint8 | np.uint16]]:
        """Return what was chosen, `[tokens, layers, top_k]`, and what was foretold,
        `[tokens, layers - 1, 2 * top_k]`, since the last call."""
        assert self._moe is not None, "a dense model has no routers"
        dtype, top_k = least_dtype(self._moe.experts), self._moe.top_k
        wide = min(2 * top_k, self._moe.experts)

        def joined(parts: dict[int, list[Tensor]], width: int) -> NDArray[np.uint8 | np.uint16]:
            if not parts or not all(parts.values()):
                return np.empty((0, len(parts), width), dtype)
            layers = [torch.cat(some).cpu().numpy() for some in parts.values()]
            for some in parts.values():
                some.clear()
            return np.stack(layers, 1).astype(dtype)

        return joined(self._chosen, top_k), joined(self._foretold, wide)


def _highest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the highest scores and their experts, `[..., count]`; of equal ones the lower expert."""
    values, indices = scores.float().sort(dim=-1, descending=True, stable=True)
    return values[..., :count], indices[..., :count]


def _unscaled(x: Tensor, norm: Tensor) -> Tensor:
    """Return x without the weights of its norm; a weight of zero leaves nothing to find."""
    weight = norm.float()
    return torch.where(weight == 0, 0.0, x.float() / weight)
