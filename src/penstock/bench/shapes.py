"""Models of which nothing but the shape is needed to measure speed: real sizes, random weights."""

from collections.abc import Mapping

_CONTEXT = 131072
"""Positions of every shape: how far its speed may be measured, not what anything was trained for."""


def _shape(kind: str, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], vocab: int, **more: object) -> dict[str, object]:
    """A config.json; `heads`: of queries, of keys and values, and the dimensions of each."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocab,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **more,
    }


SHAPES: Mapping[str, Mapping[str, object]] = {
    "100M": _shape("llama", 768, 2048, 12, (12, 4, 64), 32000, tie_word_embeddings=True),
    "0.6B": _shape("qwen3", 1024, 3072, 28, (16, 8, 128), 151936, tie_word_embeddings=True),
    "8B": _shape("llama", 4096, 14336, 32, (32, 8, 128), 128256),
    "70B": _shape("llama", 8192, 28672, 80, (64, 8, 128), 128256),
    "70B-slice": _shape("llama", 8192, 28672, 4, (64, 8, 128), 128256),
}
"""By the name that `penstock bench --shape` knows; 70B-slice is 4 of the 80 layers."""
