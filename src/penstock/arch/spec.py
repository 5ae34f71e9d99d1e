"""What a decoder is: every number and switch the arithmetic needs, read once from a config and never
changed."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import STORED_BYTES, WeightFormat
from penstock.arch.mixers.mixer import Mixer

_Kind = TypeVar("_Kind", "Mlp", "MoeSpec")


class RopeKind(StrEnum):
    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding over `dim` dimensions of a head, half-split pairs (i, i + dim/2)."""

    theta: float
    dim: int
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_length: int = 0
    """Trained positions before scaling; used by every kind but default and linear."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture-of-experts feed-forward: `top_k` of `experts` are run for each token."""

    experts: int
    top_k: int
    intermediate_size: int
    normalise: bool
    """Whether the chosen experts' probabilities are scaled to sum to one."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense feed-forward, SwiGLU."""

    intermediate_size: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Norms:
    """Where a block is normalised (RMS), by what a checkpoint calls the weights: its input, and its output
    before it is added to the residual."""

    before: str | None
    after: str | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: a mixer and a feed-forward, each a block that reads the residual and is added to it."""

    mixer: Mixer
    feed_forward: Mlp | MoeSpec
    mixer_norms: Norms = Norms("input_layernorm")
    feed_forward_norms: Norms = Norms("post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only transformer: a stack of layers between an embedding and a head.

    Hidden states are `[tokens, hidden_size]`. Weight matrices are `[out, in]` as in the checkpoints.
    """

    family: str
    vocab_size: int
    hidden_size: int
    stack: tuple[LayerSpec, ...]
    norm_eps: float
    max_length: int
    """Positions the model was trained for, scaling included."""
    rope: RopeSpec
    dtype: str
    """Of the checkpoint: float32, float16 or bfloat16."""
    tied_embeddings: bool
    format: WeightFormat = DENSE
    """Of the matrices of mixers, feed-forwards and experts; embedding, routers and head are dense."""

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.stack)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many tokens a query sees in each layer, itself included; None sees all."""
        return tuple(layer.mixer.window for layer in self.stack)

    @property
    def heads(self) -> int:
        """Query heads of the layer that has most."""
        return max(layer.mixer.heads for layer in self.stack)

    @property
    def kv_heads(self) -> int:
        """KV heads of the layer that has most."""
        return max(layer.mixer.kv_heads for layer in self.stack)

    @property
    def head_dim(self) -> int:
        """Numbers of a query head, of the widest."""
        return max(layer.mixer.head_dim for layer in self.stack)

    @property
    def query_size(self) -> int:
        """Numbers of all queries of a token in the layer that has most."""
        return max(layer.mixer.query_size for layer in self.stack)

    @property
    def projected_size(self) -> int:
        """Numbers of a token that a mixer projects its input to, in the layer that has most."""
        return max(layer.mixer.projected_size for layer in self.stack)

    @property
    def intermediate_size(self) -> int:
        """Numbers of a token within a dense feed-forward, of the widest; 0 where there is none."""
        return max((one.intermediate_size for one in self._feed_forwards(Mlp)), default=0)

    @property
    def moe(self) -> MoeSpec | None:
        """The mixture of experts, the same in all layers that have one."""
        return next(self._feed_forwards(MoeSpec), None)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Which layers have a mixture of experts."""
        return tuple(isinstance(layer.feed_forward, MoeSpec) for layer in self.stack)

    def is_moe(self, layer: int) -> bool:
        """Tell whether a layer has a mixture of experts."""
        return isinstance(self.stack[layer].feed_forward, MoeSpec)

    def _feed_forwards(self, kind: type[_Kind]) -> Iterator[_Kind]:
        for layer in self.stack:
            if isinstance(layer.feed_forward, kind):
                yield layer.feed_forward


DTYPE_BYTES = {name: STORED_BYTES[name] for name in ("float32", "float16", "bfloat16")}
"""Bytes of one element of each dtype that weights and KV may have."""
