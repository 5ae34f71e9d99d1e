"""What a decoder is: every number and switch the arithmetic needs, read once from a config and never
changed."""

from dataclasses import dataclass
from enum import StrEnum

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import STORED_BYTES, Format


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
class ModelSpec:
    """One decoder-only transformer, expressed through switches.

    Shapes: hidden states are `[tokens, hidden_size]`, queries `[tokens, heads, head_dim]`, keys and values
    `[tokens, kv_heads, head_dim]`. Weight matrices are `[out, in]` as in the checkpoints.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_length: int
    """Positions the model was trained for, scaling included."""
    rope: RopeSpec
    dtype: str
    """Of the checkpoint: float32, float16 or bfloat16."""
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Per layer: how many tokens a query sees, itself included; None sees all."""
    moe: MoeSpec | None = None
    moe_layers: tuple[bool, ...] = ()
    format: Format = DENSE
    """Of the matrices of attention, feed-forwards and experts; embedding, routers and head are dense."""

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and self.moe_layers[layer]


DTYPE_BYTES = {name: STORED_BYTES[name] for name in ("float32", "float16", "bfloat16")}
"""Bytes of one element of each dtype that weights and KV may have."""
