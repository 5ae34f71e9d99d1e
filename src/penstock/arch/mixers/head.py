"""Declares the mixers of draft heads: of EAGLE-3 (Li et al. 2025, arXiv 2503.01840), and of a layer that
predicts a further token (MTP; DeepSeek-V3, arXiv 2412.19437)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from penstock.arch.formats.format import TensorSlice, matrix, vector
from penstock.arch.mixers.attention import Attention
from penstock.arch.mixers.mixer import Plane
from penstock.arch.shards import Shard


class TapNorms(Enum):
    """Says which of the target's hidden states are normalised (RMS) before the head projects them."""

    NONE = "none"
    TOGETHER = "together"
    """All of a token have one norm."""
    EACH = "each"
    """Each has its own (EAGLE-3.1)."""


@dataclass(frozen=True)
class HeadAttention(Attention):
    """HeadAttention is attention over pairs of a token and what the target made of the tokens before it.

    Queries, keys and values are projected from the token's embedding and the features of the position before,
    normalised apart and put beside each other. Features are one projection of several hidden states of the
    target, its taps. A plane keeps them, so that they are found wherever the target's KV is.

    hidden: width of the head. target_hidden: width of the target's hidden states. taps: how many of a
    position there are.
    """

    hidden: int = 0
    target_hidden: int = 0
    taps: int = 3
    tap_norms: TapNorms = TapNorms.NONE

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Return the planes of keys and values, and that of the target's features."""
        return *super().planes, Plane("features", 1, self.hidden)

    def weights(self, at: str, hidden: int, shard: Shard) -> dict[str, Sequence[TensorSlice]]:
        """Return those of attention with twice as wide an input, the norm of features, and the projection of
        taps, with its norms if there are any."""
        tensors = super().weights(at, hidden, shard)
        tensors["qkv"] = [replace(one, shape=(one.shape[0], 2 * hidden)) for one in tensors["qkv"]]
        tensors["hidden_norm"] = [vector(f"{at}.hidden_norm.weight", hidden)]
        tensors["fc"] = [matrix("fc.weight", hidden, self.taps * self.target_hidden)]
        if self.tap_norms is TapNorms.TOGETHER:
            tensors["tap_norm"] = [vector("input_norm.weight", self.taps * self.target_hidden)]
        elif self.tap_norms is TapNorms.EACH:
            tensors["tap_norm"] = [
                vector(f"fc_norm.{tap}.weight", self.target_hidden) for tap in range(self.taps)
            ]
        return tensors


class MtpAttention(HeadAttention):
    """MtpAttention is attention of a usual layer, whose input is projected from such pairs.

    Its one tap is the target's hidden state behind the last layer, and the features are that behind the
    target's last norm.
    """

    def weights(self, at: str, hidden: int, shard: Shard) -> dict[str, Sequence[TensorSlice]]:
        """Return those of attention, the norms of both halves of a pair, their projection, and the target's
        last norm."""
        return Attention.weights(self, at, hidden, shard) | {
            "embedding_norm": [vector(f"{at}.enorm.weight", hidden)],
            "hidden_norm": [vector(f"{at}.hnorm.weight", hidden)],
            "pair": [matrix(f"{at}.eh_proj.weight", hidden, 2 * hidden)],
            "tap_norm": [vector("model.norm.weight", hidden)],
        }
