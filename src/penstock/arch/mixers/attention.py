"""Declares grouped-query attention with RoPE (GQA: Ainslie et al. 2023, arXiv 2305.13245)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.arch.formats.format import TensorSlice, matrix, vector
from penstock.arch.mixers.mixer import Mixer, Plane
from penstock.arch.shards import Shard, share_heads


@dataclass(frozen=True)
class Attention(Mixer):
    """Attention is softmax attention over keys and values `[tokens, kv_heads, head_dim]`.

    qk_norm: whether each head of queries and keys is normalised (RMS) before RoPE.
    normed_together: with `qk_norm`, how many numbers of queries and of keys have one norm: those of all heads
        of the whole model. None if each head has its own.
    counts_keys: whether the rank's keys are part of sums over ranks. Of ranks that hold the same keys one
        counts them.
    scale: factor of scores. None is `head_dim ** -0.5`.
    sinks: whether each head's softmax has one more score, learned, that adds to its sum and has no value
        (gpt-oss; Xiao et al. 2023, arXiv 2309.17453).
    """

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    scale: float | None = None
    cap: float | None = None
    """Soft cap c of scaled scores s, which become c * tanh(s / c); None is no cap."""
    sinks: bool = False
    normed_together: tuple[int, int] | None = None
    counts_keys: bool = True

    @property
    def output_size(self) -> int:
        """Return how many numbers of a token the output projection reads: as many as its queries are."""
        return self.query_size

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Return the planes of keys and values. Queries are scored with the keys."""
        return Plane("k", self.kv_heads, self.head_dim, scored=True), Plane("v", self.kv_heads, self.head_dim)

    def weights(self, at: str, hidden: int, shard: Shard) -> dict[str, Sequence[TensorSlice]]:
        """Return the fused `qkv` and `out`, with biases, norms and sinks where the model has them."""
        at, dim = f"{at}.self_attn", self.head_dim
        heads, kv_heads = share_heads(self.heads // self.kv_heads, self.kv_heads, shard)
        queries, keys = (range(part.start * dim, part.stop * dim) for part in (heads, kv_heads))
        kept = (self.kv_heads * dim, keys)
        parts = {"q": (self.query_size, queries), "k": kept, "v": kept}
        tensors: dict[str, Sequence[TensorSlice]] = {
            "qkv": [
                matrix(f"{at}.{name}_proj.weight", size, hidden, rows=rows)
                for name, (size, rows) in parts.items()
            ]
        }
        if self.qkv_bias:
            tensors["qkv_bias"] = [
                vector(f"{at}.{name}_proj.bias", size, rows) for name, (size, rows) in parts.items()
            ]
        if self.normed_together is not None:
            tensors["q_norm"] = [vector(f"{at}.q_norm.weight", *parts["q"])]
            tensors["k_norm"] = [vector(f"{at}.k_norm.weight", *parts["k"])]
        elif self.qk_norm:
            tensors["q_norm"] = [vector(f"{at}.q_norm.weight", dim)]
            tensors["k_norm"] = [vector(f"{at}.k_norm.weight", dim)]
        if self.sinks:
            tensors["sinks"] = [vector(f"{at}.sinks", self.heads, heads)]
        tensors["out"] = [matrix(f"{at}.o_proj.weight", hidden, self.query_size, columns=queries)]
        if self.out_bias and shard.rank == 0:
            tensors["out_bias"] = [vector(f"{at}.o_proj.bias", hidden)]
        return tensors

    def local(self, shard: Shard) -> "Attention":
        """Return the attention with the rank's heads and KV heads."""
        heads, kv_heads = share_heads(self.heads // self.kv_heads, self.kv_heads, shard)
        first = heads.start % (self.heads // self.kv_heads) == 0
        return replace(self, heads=len(heads), kv_heads=len(kv_heads), counts_keys=first)
