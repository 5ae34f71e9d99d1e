"""Describes a decoder: every number and switch of its arithmetic, read once from a config and never
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
    """A RopeKind names a way of scaling RoPE to longer contexts, as config.json spells it."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A RopeSpec holds the parameters of rotary position embeddings.

    They turn `dim` dimensions of a head in half-split pairs (i, i + dim/2). Parameters have the names of
    config.json; `arch/rope.py` has the formulas.

    original_length: trained positions before scaling. Kinds default and linear do not use it.
    """

    theta: float
    dim: int
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class Scoring(StrEnum):
    """A Scoring names the function that turns a token's router logits into scores of experts."""

    SOFTMAX = "softmax"
    """Softmax over all experts. The best of them are chosen."""
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """Softmax over the chosen experts. They are chosen by their logits."""
    SIGMOID = "sigmoid"
    """Sigmoid of each logit by itself (DeepSeek-V3, arXiv 2412.19437)."""


@dataclass(frozen=True, slots=True)
class Router:
    """A router says how a mixture chooses experts for a token, and how their scores become shares.

    normalise: whether the shares of the chosen experts are divided by their sum.
    bias: whether the projection to logits has a bias.
    correction: whether a vector of the router is added to the scores for the choice. Shares come from the
        scores without it (`e_score_correction_bias` of checkpoints).
    groups: how many groups of neighbouring experts there are, all of one size.
    top_groups: how many groups experts are chosen from: those with the largest sums of their two best scores.
    scale: factor of shares, after all else (`routed_scaling_factor`).
    float32: whether logits are computed in float32, whatever the dtype of activations.
    """

    scoring: Scoring = Scoring.SOFTMAX
    normalise: bool = False
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    float32: bool = False

    @property
    def grouped(self) -> bool:
        """Tell whether some groups are left out of the choice."""
        return self.top_groups < self.groups


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation makes the inner numbers of a feed-forward: `(up + shift) * gate * sigmoid(alpha * gate)`.

    By default that is SwiGLU, `up * silu(gate)`.

    limit: gate is clipped from above at it, and up on both sides. None clips nothing.
    """

    alpha: float = 1.0
    shift: float = 0.0
    limit: float | None = None


SWIGLU = Activation()
"""The activation of Shazeer 2020, arXiv 2002.05202."""


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture-of-experts feed-forward runs `top_k` of its `experts` for each token.

    bias: whether an expert's projections have biases.
    shared: what every token passes besides, added to the sum of its experts.
    shared_gate: whether the output of that is multiplied with the sigmoid of a number that the router's group
        computes of each token.
    """

    experts: int
    top_k: int
    intermediate_size: int
    router: Router = Router()
    shared: "Mlp | None" = None
    shared_gate: bool = False
    bias: bool = False
    activation: Activation = SWIGLU


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense feed-forward is SwiGLU with `intermediate_size` inner numbers."""

    intermediate_size: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Norms:
    """Names the weights of a block's RMS norms.

    before: norm of its input.
    after: norm of its output, before it is added to the residual.
    """

    before: str | None
    after: str | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer has a mixer and a feed-forward. Each is a block that reads the residual and is added to it."""

    mixer: Mixer
    feed_forward: Mlp | MoeSpec
    mixer_norms: Norms = Norms("input_layernorm")
    feed_forward_norms: Norms = Norms("post_attention_layernorm")
    scale: float = 1.0
    """The output of each of its blocks, normalised, is multiplied with it before it is added."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A ModelSpec is one decoder-only transformer: a stack of layers between an embedding and a head.

    Hidden states are `[tokens, hidden_size]`. Weight matrices are `[out, in]` as in checkpoints.

    stack: the layers, in order.
    max_length: positions that the model was trained for, scaling included.
    dtype: dtype of the checkpoint: float32, float16 or bfloat16.
    format: storage format of all matrices; it says of each by name whether it rests otherwise.
    """

    family: str
    vocab_size: int
    hidden_size: int
    stack: tuple[LayerSpec, ...]
    norm_eps: float
    max_length: int
    rope: RopeSpec
    dtype: str
    tied_embeddings: bool
    format: WeightFormat = DENSE
    embedding_scale: float = 1.0
    """Rows of the embedding are multiplied with it."""
    logits_scale: float = 1.0
    """Logits are multiplied with it."""
    logits_cap: float | None = None
    """Soft cap c of scaled logits x, which become c * tanh(x / c); None is no cap."""

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return len(self.stack)

    def reaches(self, length: int) -> bool:
        """Tell whether the model was trained for so many positions, or scales its rotations by the length."""
        return length <= self.max_length or self.rope.kind is RopeKind.DYNAMIC

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return each layer's sliding window: how many tokens a query sees, itself included.

        None sees all.
        """
        return tuple(layer.mixer.window for layer in self.stack)

    @property
    def has_state(self) -> bool:
        """Tell whether a layer keeps state of a sequence, which KV blocks do not hold."""
        return any(layer.mixer.state for layer in self.stack)

    @property
    def heads(self) -> int:
        """Return the query heads of the layer that has most."""
        return max(layer.mixer.heads for layer in self.stack)

    @property
    def kv_heads(self) -> int:
        """Return the KV heads of the layer that has most."""
        return max(layer.mixer.kv_heads for layer in self.stack)

    @property
    def head_dim(self) -> int:
        """Return the width of the widest query head."""
        return max(layer.mixer.head_dim for layer in self.stack)

    @property
    def query_size(self) -> int:
        """Return how many numbers the queries of a token are, in the layer that has most."""
        return max(layer.mixer.query_size for layer in self.stack)

    @property
    def projected_size(self) -> int:
        """Return how many numbers a mixer projects a token to (q, k and v), in the layer that has most."""
        return max(layer.mixer.projected_size for layer in self.stack)

    @property
    def intermediate_size(self) -> int:
        """Return the inner size of the widest dense feed-forward, or 0 without one."""
        return max((one.intermediate_size for one in self._feed_forwards(Mlp)), default=0)

    @property
    def shared_size(self) -> int:
        """Return the inner size of the shared experts, or 0 without any."""
        moe = self.moe
        return 0 if moe is None or moe.shared is None else moe.shared.intermediate_size

    @property
    def moe(self) -> MoeSpec | None:
        """Return the mixture of experts, which is the same in all layers that have one."""
        return next(self._feed_forwards(MoeSpec), None)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Tell of each layer whether it has a mixture of experts."""
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
