"""Lists the shapes that speed is measured with: real sizes, random weights."""

from collections.abc import Mapping
from pathlib import Path

_CONTEXT = 131072
"""Positions of every shape: how far its speed may be measured, not what anything was trained for."""


def _shape(
    kind: str, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], vocab: int, **more: object
) -> dict[str, object]:
    """Return a config.json. heads: how many of queries, how many of keys and values, and the dimensions of
    each."""
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


def _gpt_oss(layers: int, experts: int) -> dict[str, object]:
    """Return a config.json of gpt-oss, whose experts rest in MXFP4."""
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    left_alone = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return _shape(
        "gpt_oss",
        2880,
        2880,
        layers,
        (64, 8, 64),
        201088,
        num_local_experts=experts,
        num_experts_per_tok=4,
        rope_theta=150000.0,
        rope_scaling=rope,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": left_alone},
    )


_QWEN_MOE = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
_GLM_AIR = {
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "attention_bias": True,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "n_group": 1,
    "topk_group": 1,
}
_MINIMAX = {"num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64}

SHAPES: Mapping[str, Mapping[str, object]] = {
    "100M": _shape("llama", 768, 2048, 12, (12, 4, 64), 32000, tie_word_embeddings=True),
    "0.6B": _shape("qwen3", 1024, 3072, 28, (16, 8, 128), 151936, tie_word_embeddings=True),
    "8B": _shape("llama", 4096, 14336, 32, (32, 8, 128), 128256),
    "70B": _shape("llama", 8192, 28672, 80, (64, 8, 128), 128256),
    "70B-slice": _shape("llama", 8192, 28672, 4, (64, 8, 128), 128256),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "glm-4.5-air": _shape("glm4_moe", 4096, 10944, 46, (96, 8, 128), 151552, **_GLM_AIR),
    "minimax-m2": _shape("minimax_m2", 3072, 1536, 62, (48, 8, 128), 200064, **_MINIMAX),
    "qwen3-235b-a22b": _shape(
        "qwen3_moe", 4096, 12288, 94, (64, 4, 128), 151936, **_QWEN_MOE, moe_intermediate_size=1536
    ),
}
"""Configs by the names that `penstock bench --shape` knows. 70B-slice is 4 of the 80 layers."""

LAYERS_OF: Mapping[str, tuple[Mapping[str, object], tuple[int, int]]] = {
    "0.6B": (SHAPES["0.6B"], (4, 28)),
    "1B": (_shape("llama", 2048, 8192, 16, (32, 8, 64), 128256, tie_word_embeddings=True), (4, 16)),
    "8B": (SHAPES["8B"], (2, 12)),
    "70B": (SHAPES["70B"], (2, 5)),
    "30B-A3B": (
        _shape("qwen3_moe", 2048, 6144, 48, (32, 4, 128), 151936, **_QWEN_MOE, moe_intermediate_size=768),
        (4, 12),
    ),
    "8x7B": (
        _shape("mixtral", 4096, 14336, 32, (32, 8, 128), 32000, num_local_experts=8, num_experts_per_tok=2),
        (2, 5),
    ),
}
"""Widths that real models have, and two numbers of layers of each: what steps are measured with, to tell what
a layer takes."""

HOST_LAYERS_OF: Mapping[str, tuple[Mapping[str, object], tuple[int, int]]] = {
    "7M": (_shape("llama", 256, 704, 8, (8, 4, 32), 4096, tie_word_embeddings=True), (2, 8)),
    "100M": (SHAPES["100M"], (2, 12)),
    "0.6B": ({**SHAPES["0.6B"], "vocab_size": 32000}, (2, 8)),
    "mixture": (
        _shape("qwen3_moe", 512, 1024, 4, (8, 4, 64), 8192, **_QWEN_MOE, moe_intermediate_size=256)
        | {"num_experts": 16, "num_experts_per_tok": 4},
        (1, 4),
    ),
}
"""The same for steps on a CPU."""


def is_bare(path: Path) -> bool:
    """Tell whether `path` is a model's directory with a config.json and no weights."""
    return (path / "config.json").exists() and not any(path.glob("*.safetensors*"))
