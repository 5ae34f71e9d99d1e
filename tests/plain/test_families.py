"""Configs become specs as their families mean them, or are refused with the key; frequencies and layouts
follow from specs alone."""

import math
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arch.bounds import parameters
from penstock.arch.families import FAMILIES, family_of, read_spec
from penstock.arch.layout import ALIGNMENT, GroupKind, GroupLayout, group_layouts, kv_layout, mixture_layouts
from penstock.arch.mixers.attention import Attention
from penstock.arch.reading import MOST
from penstock.arch.rope import attention_scale, inverse_frequencies
from penstock.arch.spec import (
    DTYPE_BYTES,
    Activation,
    LayerSpec,
    Mlp,
    ModelSpec,
    MoeSpec,
    RopeKind,
    RopeSpec,
    Router,
    Scoring,
)
from penstock.base.errors import UnsupportedModelError

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def read(model_type: str = "llama", **keys: object) -> ModelSpec:
    """The spec of a small config with these keys; a key that is `...` is left out."""
    config = {"model_type": model_type, **SMALL, **keys}
    return read_spec({key: value for key, value in config.items() if value is not ...}, "config.json")


def refusal(model_type: str = "llama", **keys: object) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        read(model_type, **keys)
    message = str(caught.value)
    assert message.startswith("config.json")
    assert "\n" not in message
    return message


# ---- what a config means -----------------------------------------------------------------------------------


def test_plain_llama() -> None:
    spec = read(
        rms_norm_eps=1e-5,
        torch_dtype="bfloat16",
        rope_theta=5e5,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )
    assert spec == ModelSpec(
        family="llama",
        vocab_size=96,
        hidden_size=64,
        stack=(
            LayerSpec(
                Attention(heads=8, kv_heads=2, head_dim=16, qkv_bias=True, out_bias=True),
                Mlp(intermediate_size=80, bias=True),
            ),
        )
        * 3,
        norm_eps=1e-5,
        max_length=128,
        rope=RopeSpec(theta=500000.0, dim=16),
        dtype="bfloat16",
        tied_embeddings=True,
    )
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.query_size) == (3, 8, 2, 16, 128)
    assert spec.windows == (None, None, None)


@pytest.mark.parametrize(
    ("family", "qkv_bias", "out_bias", "qk_norm"),
    [
        ("llama", False, False, False),
        ("mistral", False, False, False),
        ("qwen2", True, False, False),
        ("qwen3", False, False, True),
        ("mixtral", False, False, False),
        ("qwen3_moe", False, False, True),
        ("qwen2_moe", True, False, False),
        ("glm4_moe", False, False, False),
        ("minimax_m2", False, False, True),
        ("gpt_oss", True, True, False),
    ],
)
def test_switches_of_each_family(family: str, qkv_bias: bool, out_bias: bool, qk_norm: bool) -> None:
    spec = read(family)
    for layer in spec.stack:
        assert isinstance(layer.mixer, Attention)
        assert (layer.mixer.qkv_bias, layer.mixer.out_bias, layer.mixer.qk_norm) == (
            qkv_bias,
            out_bias,
            qk_norm,
        )
        assert layer.mixer.sinks == (family == "gpt_oss")
        assert layer.feed_forward.bias == (family == "gpt_oss")
    assert spec.tied_embeddings is False
    assert spec.dtype == ("bfloat16" if family == "gpt_oss" else "float32")


def test_keys_left_out_mean_what_the_family_says() -> None:
    left_out = {"num_key_value_heads": ..., "max_position_embeddings": ..., "num_attention_heads": 32}
    assert [read(family, **left_out).max_length for family in FAMILIES] == [
        2048,
        131072,
        32768,
        32768,
        131072,
        32768,
        131072,
        196608,
        32768,
        131072,
    ]
    assert [read(family, **left_out).kv_heads for family in FAMILIES] == [32, 8, 32, 32, 8, 16, 8, 8, 4, 8]
    assert [read(family, num_key_value_heads=None).kv_heads for family in FAMILIES] == [8] * 10
    assert [read(family, head_dim=...).head_dim for family in FAMILIES] == [8, 8, 8, 128, 8, 8, 8, 128, 8, 64]
    assert [read(family).norm_eps for family in FAMILIES] == [
        *[1e-6] * 4,
        1e-5,
        1e-6,
        1e-5,
        *[1e-6] * 2,
        1e-5,
    ]
    assert [read(family).rope.theta for family in FAMILIES] == [*[1e4] * 4, 1e6, 1e4, 1e4, 5e6, 1e4, 15e4]
    assert [read(family).windows[0] for family in FAMILIES] == [None, 4096, *[None] * 7, 128]


def test_gpt_oss() -> None:
    """Windows and full attention take turns; `rope_scaling` and `rope_parameters` say the same; what neither
    says is YaRN."""
    spec = read("gpt_oss", num_local_experts=6, num_experts_per_tok=3, num_hidden_layers=4)
    assert spec.windows == (128, None, 128, None)
    assert spec.moe == MoeSpec(
        6,
        3,
        80,
        Router(Scoring.SOFTMAX_OF_CHOSEN, bias=True),
        bias=True,
        activation=Activation(alpha=1.702, shift=1.0, limit=7.0),
    )
    yarn = RopeSpec(150000.0, 16, RopeKind.YARN, 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False)
    assert spec.rope == yarn == read("gpt_oss", rope_scaling=None, rope_parameters=None).rope
    changed = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": True}
    for key in ("rope_scaling", "rope_parameters"):
        assert read("gpt_oss", **{key: changed}).rope == replace(
            yarn, factor=8.0, original_length=64, truncate=True
        )
    other = read("gpt_oss", num_experts=5, swiglu_limit=3.0, swiglu_alpha=1.5, attention_bias=False)
    assert other.moe is not None
    assert (other.moe.experts, other.moe.activation) == (5, Activation(1.5, 1.0, 3.0))
    assert other.stack[0].mixer == replace(spec.stack[0].mixer, qkv_bias=False, out_bias=False)  # type: ignore[call-arg]
    full = read("gpt_oss", sliding_window=None, layer_types=["full_attention"] * 3)
    assert full.windows == (None,) * 3
    assert read("gpt_oss", torch_dtype="float16").dtype == read("gpt_oss", dtype="float16").dtype == "float16"


def test_dtype_in_both_spellings() -> None:
    assert read(dtype="float16", torch_dtype="bfloat16").dtype == "float16"
    assert read(dtype=None, torch_dtype="bfloat16").dtype == "bfloat16"


def test_mixture_of_experts() -> None:
    spec = read("mixtral", num_local_experts=6, num_experts_per_tok=3)
    assert spec.moe == MoeSpec(experts=6, top_k=3, intermediate_size=80, router=Router(normalise=True))
    assert spec.moe_layers == (True, True, True)
    spec = read(
        "qwen3_moe", num_experts=16, num_experts_per_tok=4, moe_intermediate_size=24, norm_topk_prob=True
    )
    assert spec.moe == MoeSpec(experts=16, top_k=4, intermediate_size=24, router=Router(normalise=True))
    spec = read(
        "qwen3_moe", num_local_experts=16, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]
    )
    assert spec.moe == MoeSpec(experts=16, top_k=8, intermediate_size=768)
    assert spec.moe_layers == (False, True, False, False, False, True)
    assert [spec.is_moe(layer) for layer in range(6)] == list(spec.moe_layers)
    assert not read("llama").is_moe(0)


def test_a_mixture_of_qwen2() -> None:
    spec = read("qwen2_moe", mlp_only_layers=[0])
    shared = Mlp(5632)
    assert spec.moe == MoeSpec(60, 4, 1408, Router(), shared=shared, shared_gate=True)
    assert spec.moe_layers == (False, True, True)
    assert read("qwen2_moe", norm_topk_prob=True).moe == replace(spec.moe, router=Router(normalise=True))
    window = {"use_sliding_window": True, "sliding_window": 7}
    assert read("qwen2_moe", **window).windows == (7, None, 7)
    assert read("qwen2_moe", max_window_layers=2, **window).windows == (7, None, None)
    assert read("qwen2_moe", sliding_window=7).windows == (None, None, None)
    mixed = ["full_attention", "sliding_attention", "full_attention"]
    assert read("qwen2_moe", layer_types=mixed, **window).windows == (None, 7, None)


def test_a_mixture_of_glm() -> None:
    spec = read("glm4_moe", first_k_dense_replace=2, n_shared_experts=2, routed_scaling_factor=2.5)
    router = Router(Scoring.SIGMOID, normalise=True, correction=True, scale=2.5, float32=True)
    assert spec.moe == MoeSpec(128, 8, 1408, router, shared=Mlp(2816))
    assert spec.moe_layers == (False, False, True)
    assert spec.rope == RopeSpec(theta=1e4, dim=8)
    one = read(
        "glm4_moe", n_group=8, topk_group=2, norm_topk_prob=False, use_qk_norm=True, attention_bias=True
    )
    assert one.moe is not None
    assert one.moe.router == replace(router, normalise=False, groups=8, top_groups=2, scale=1.0)
    assert one.stack[0].mixer == Attention(8, 2, 16, qkv_bias=True, qk_norm=True)
    in_rope = {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25}
    assert read("glm4_moe", rope_parameters=in_rope, partial_rotary_factor=1.0).rope.dim == 4
    assert read("glm4_moe", partial_rotary_factor=1.0).rope.dim == 16


def test_a_mixture_of_minimax() -> None:
    spec = read("minimax_m2", rotary_dim=6, head_dim=16, num_local_experts=12, attn_type_list=[1, 1, 1])
    router = Router(Scoring.SIGMOID, normalise=True, correction=True, float32=True)
    assert spec.moe == MoeSpec(12, 8, 80, router)
    assert spec.moe_layers == (True, True, True)
    assert spec.rope.dim == 6
    assert spec.stack[0].mixer == Attention(8, 2, 16, qk_norm=True, normed_together=(128, 32))
    assert read("minimax_m2", head_dim=16).rope.dim == 16
    assert read("minimax_m2", head_dim=16, rotary_dim=8, partial_rotary_factor=0.25).rope.dim == 4


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        *(("glm4_moe", "partial_rotary_factor", value) for value in (0.01, 1.5, 0.4375, "half", 0)),
        ("glm4_moe", "n_group", 3),
        ("glm4_moe", "n_group", 128),
        ("glm4_moe", "topk_group", 2),
        ("glm4_moe", "n_shared_experts", 0),
        ("glm4_moe", "num_experts_per_tok", 129),
        ("glm4_moe", "n_routed_experts", 2**17),
        ("glm4_moe", "hidden_act", "gelu"),
        ("glm4_moe", "use_qk_norm", "yes"),
        ("minimax_m2", "scoring_func", "softmax"),
        ("minimax_m2", "use_routing_bias", False),
        ("minimax_m2", "use_qk_norm", False),
        ("minimax_m2", "qk_norm_type", "per_head"),
        ("minimax_m2", "shared_intermediate_size", 64),
        ("minimax_m2", "sliding_window", 64),
        ("minimax_m2", "attn_type_list", [1, 0, 1]),
        ("minimax_m2", "layernorm_mlp_beta", 0.5),
        ("minimax_m2", "rotary_dim", 200),
        ("minimax_m2", "attention_bias", True),
        ("qwen2_moe", "shared_expert_intermediate_size", 0),
        ("qwen2_moe", "layer_types", ["sliding_attention"] * 3),
        ("qwen2_moe", "num_experts", 0),
        ("qwen2_moe", "partial_rotary_factor", 0.5),
        ("llama", "partial_rotary_factor", 0.5),
    ],
)
def test_a_mixture_that_cannot_be_run_exactly_is_refused(family: str, key: str, value: object) -> None:
    assert f"key '{key}'" in refusal(family, **{key: value})


def test_groups_that_cannot_hold_the_experts_of_a_token_are_refused() -> None:
    few = {"n_group": 8, "topk_group": 1, "n_routed_experts": 32, "num_experts_per_tok": 5}
    assert "key 'topk_group'" in refusal("glm4_moe", **few)
    assert read("glm4_moe", **few | {"topk_group": 2}).moe is not None


def test_windows() -> None:
    assert read("mistral", sliding_window=None).windows == (None, None, None)
    assert read("mistral", sliding_window=7).windows == (7, 7, 7)
    assert read("mixtral", sliding_window=7).windows == (7, 7, 7)
    assert read("llama", sliding_window=7).windows == (None, None, None)
    for family in ("qwen2", "qwen3"):
        assert read(family, sliding_window=7).windows == (None, None, None)
        assert read(family, sliding_window=7, use_sliding_window=True).windows == (None, None, None)
        assert read(family, sliding_window=7, use_sliding_window=True, max_window_layers=1).windows == (
            None,
            7,
            7,
        )
        assert read(family, sliding_window=7, use_sliding_window=True, max_window_layers=0).windows == (
            7,
            7,
            7,
        )
        mixed = ["sliding_attention", "full_attention", "sliding_attention"]
        assert read(family, sliding_window=7, use_sliding_window=True, layer_types=mixed).windows == (
            7,
            None,
            7,
        )
        assert read(family, sliding_window=7, layer_types=["full_attention"] * 3).windows == (
            None,
            None,
            None,
        )
        assert "key 'layer_types'" in refusal(family, sliding_window=7, layer_types=mixed)


def test_windows_of_qwen3_moe_are_in_every_layer() -> None:
    assert read("qwen3_moe", sliding_window=7).windows == (None, None, None)
    assert read("qwen3_moe", sliding_window=7, use_sliding_window=True, max_window_layers=1).windows == (
        7,
        7,
        7,
    )
    assert read("qwen3_moe", sliding_window=None, use_sliding_window=True).windows == (None, None, None)


def test_rope_in_both_spellings() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    expected = RopeSpec(theta=5e5, dim=16, kind=RopeKind.LLAMA3, factor=8.0, original_length=64)
    assert read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3}).rope == expected
    assert read(rope_theta=5e5, rope_scaling={"type": "llama3", **llama3}).rope == expected
    assert read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3}).rope == expected
    assert read(rope_theta=1.5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope.theta == 5e5
    both = read(
        rope_scaling={"type": "linear", "factor": 3},
        rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 7e3},
    )
    assert (both.rope.factor, both.rope.theta) == (3, 1e4)
    assert read(rope_scaling={}, rope_parameters=None).rope == RopeSpec(theta=1e4, dim=16)


def test_trained_length_of_scaled_rope() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert read(rope_scaling=yarn).rope.original_length == 128
    short = yarn | {"original_max_position_embeddings": 32}
    assert read(rope_scaling=short).rope.original_length == 32
    assert read(rope_scaling=short, original_max_position_embeddings=64).rope.original_length == 64
    assert read(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 32}).rope.factor == 4.0
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}
    assert read(rope_scaling=dynamic).rope.original_length == 128


def test_yarn_lengthens_the_context_whether_or_not_the_config_says_so() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read(rope_scaling=yarn).max_length == 512
    assert read(rope_scaling=yarn, max_position_embeddings=512).max_length == 512
    assert read(rope_scaling=yarn, max_position_embeddings=600).max_length == 600
    assert read(rope_scaling={"rope_type": "linear", "factor": 4.0}).max_length == 128


# ---- what is refused ---------------------------------------------------------------------------------------

YARN, LLAMA3 = {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "llama3", "factor": 4.0}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("model_type", value) for value in ("gpt2", None, ..., ["llama"], 3)),
        *(
            (key, value)
            for key in ("vocab_size", "hidden_size")
            for value in (..., None, 0, -1, 1.5, "8", True, 2**41)
        ),
        *(("intermediate_size", value) for value in (..., 0)),
        *(("num_hidden_layers", value) for value in (..., 0, True, MOST + 1)),
        *(("num_attention_heads", value) for value in (..., 0, 3, "8")),
        *(("num_key_value_heads", value) for value in (0, 3, 16)),
        *(("head_dim", value) for value in (0, 15, 16.0)),
        *(("max_position_embeddings", value) for value in (0, 1e6)),
        *(("rms_norm_eps", value) for value in (0, -1e-6, "1e-6", True, math.inf, math.nan, 10**400)),
        *(("rope_theta", value) for value in (0, 1.0, -5, "1e4", 10**400)),
        *(("hidden_act", value) for value in ("gelu", None)),
        ("pretraining_tp", 2),
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        *(("attention_bias", value) for value in (1, "yes")),
        ("mlp_bias", 0),
        ("tie_word_embeddings", 1),
        *(("dtype", value) for value in ("float64", "float8_e4m3fn", ["float32"], {"a": 1}, 16)),
        ("torch_dtype", "int8"),
        ("partial_rotary_factor", 0.5),
        *(("rope_scaling", value) for value in ("yarn", [1], {"full_attention": {"rope_type": "default"}})),
        ("rope_parameters", 7),
    ],
)
def test_refused_with_its_key(key: str, value: object) -> None:
    assert f"key '{key}'" in refusal(**{key: value})


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        *(
            ({"rope_type": name, "factor": 2.0}, "rope_type")
            for name in ("longrope", "su", "mrope", None, ["yarn"])
        ),
        *(({"rope_type": kind}, "factor") for kind in ("linear", "dynamic", "llama3")),
        *(({"rope_type": "linear", "factor": value}, "factor") for value in (0, -1, "2", True, math.nan)),
        ({"rope_theta": 0}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        *(
            (YARN | {key: -1}, key)
            for key in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
        ),
        *((YARN | {"attention_factor": value}, "attention_factor") for value in (0, math.inf)),
        (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        (YARN | {"beta_fast": 1, "beta_slow": 2}, "beta_fast"),
        (YARN | {"truncate": 1}, "truncate"),
        *((LLAMA3 | {"low_freq_factor": low, "high_freq_factor": 4}, "high_freq_factor") for low in (4, 5)),
        (LLAMA3 | {"low_freq_factor": 0}, "low_freq_factor"),
    ],
)
def test_rope_refused_with_its_key(scaling: dict[str, object], key: str) -> None:
    assert f"key '{key}'" in refusal(rope_parameters=scaling)
    assert f"key '{key}'" in refusal(rope_scaling=scaling)


def test_refused_in_some_families() -> None:
    assert "key 'head_dim' is missing" in refusal("qwen2", head_dim=None, hidden_size=68)
    assert read("qwen2", head_dim=16, hidden_size=68).head_dim == 16
    assert "key 'vocab_size' is missing" in refusal(vocab_size=...)
    assert "key 'head_dim'" in refusal(head_dim=2, rope_scaling={"rope_type": "dynamic", "factor": 2})
    assert read(head_dim=2, rope_scaling={"rope_type": "linear", "factor": 2}).rope.dim == 2
    assert "key 'sliding_window'" in refusal("mistral", sliding_window=0)
    assert "key 'sliding_window'" in refusal("qwen3", sliding_window="all", use_sliding_window=True)
    assert "key 'use_sliding_window'" in refusal("qwen2", use_sliding_window="yes")
    assert "key 'max_window_layers'" in refusal("qwen2", max_window_layers=-1)
    for types in (
        ["full_attention"] * 2,
        ["full_attention"] * 2 + ["chunked"],
        "full_attention",
        7,
        ["full_attention"] * 2 + [[]],
    ):
        assert "key 'layer_types'" in refusal("qwen3", layer_types=types)
        assert "key 'layer_types'" in refusal("gpt_oss", layer_types=types)
    assert "key 'layer_types'" in refusal("gpt_oss", sliding_window=None)
    assert "key 'swiglu_limit'" in refusal("gpt_oss", swiglu_limit=0)
    assert "key 'swiglu_alpha'" in refusal("gpt_oss", swiglu_alpha="1.7")
    assert "key 'attention_bias'" in refusal("gpt_oss", attention_bias=1)
    few = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True}
    said = refusal("gpt_oss", quantization_config=few)
    assert "key 'quantization_config'" in said
    assert "'gptq'; supported for gpt_oss: mxfp4" in said
    for family in ("mixtral", "qwen3_moe", "gpt_oss"):
        assert "key 'num_experts_per_tok'" in refusal(family, num_local_experts=4, num_experts_per_tok=5)
        assert "key 'num_local_experts'" in refusal(family, num_local_experts=MOST + 1)
    assert "key 'num_experts'" in refusal("qwen3_moe", num_experts=0)
    assert "key 'moe_intermediate_size'" in refusal("qwen3_moe", moe_intermediate_size=0)
    assert "key 'decoder_sparse_step'" in refusal("qwen3_moe", decoder_sparse_step=0)
    assert "key 'norm_topk_prob'" in refusal("qwen3_moe", norm_topk_prob="yes")
    for wrong in ({"0": True}, ["0"], [None], [[1]], [True]):
        assert "key 'mlp_only_layers'" in refusal("qwen3_moe", mlp_only_layers=wrong)


ANY = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(0, 130),
        st.floats(),
        st.text(max_size=5),
        st.just(10**400),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)
ROPE_VALUES = st.one_of(
    st.floats(1e-30, 1e30), st.floats(0.5, 100), st.integers(1, 4096), st.booleans(), st.none(), ANY
)
ROPE_KEYS = (
    *(
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
    ),
    *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
)
ROPES = st.fixed_dictionaries(
    {"rope_type": st.one_of(st.sampled_from([kind.value for kind in RopeKind]), ANY)},
    optional=dict.fromkeys(ROPE_KEYS, ROPE_VALUES),
)
KEYS = (
    *SMALL,
    *(
        "hidden_act",
        "rms_norm_eps",
        "rope_theta",
        "dtype",
        "torch_dtype",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
    ),
    *(
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "partial_rotary_factor",
        "pretraining_tp",
    ),
    *(
        "mlp_only_layers",
        "decoder_sparse_step",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "norm_topk_prob",
    ),
    "quantization_config",
)


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(KEYS), ANY, max_size=2))
def test_any_config_is_read_or_refused(family: str, keys: dict[str, object]) -> None:
    try:
        spec = read(family, **keys)
    except UnsupportedModelError:
        return
    assert len(spec.windows) == spec.layers


@given(ROPES, st.sampled_from(["rope_scaling", "rope_parameters"]), st.integers(0, 2**40))
def test_any_rope_is_refused_or_gives_frequencies(rope: dict[str, object], key: str, length: int) -> None:
    try:
        found = read(**{key: rope}).rope
    except UnsupportedModelError:
        return
    frequencies = inverse_frequencies(found, length)
    assert len(frequencies) == 8
    assert all(math.isfinite(frequency) and frequency >= 0 for frequency in frequencies)
    assert attention_scale(found) > 0


# ---- frequencies -------------------------------------------------------------------------------------------


def test_frequencies_by_hand() -> None:
    plain = [1.0, 0.1, 0.01, 0.001]
    assert inverse_frequencies(RopeSpec(theta=1e4, dim=8)) == pytest.approx(plain, rel=1e-14)
    linear = RopeSpec(theta=1e4, dim=8, kind=RopeKind.LINEAR, factor=4.0)
    assert inverse_frequencies(linear, 10**6) == pytest.approx([0.25, 0.025, 0.0025, 0.00025], rel=1e-14)


def test_dynamic_grows_with_the_length_alone() -> None:
    rope = RopeSpec(theta=1e4, dim=8, kind=RopeKind.DYNAMIC, factor=2.0, original_length=100)
    for length in (0, 1, 100):
        assert inverse_frequencies(rope, length) == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-14)
    # Twice the length: theta is stretched by (2 * 2 - 1) ** (8 / 6), so the slowest pair turns three times
    # slower.
    assert inverse_frequencies(rope, 200) == pytest.approx(
        [1.0, 0.1 / 3 ** (1 / 3), 0.01 / 3 ** (2 / 3), 0.001 / 3], rel=1e-12
    )


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    rope = RopeSpec(theta=1e4, dim=8, kind=RopeKind.LLAMA3, factor=8.0, original_length=1000)
    turns = [1000 * frequency / (2 * math.pi) for frequency in (1.0, 0.1, 0.01, 0.001)]
    assert turns[1] > 4 > turns[2] > 1 > turns[3]
    keep = (turns[2] - 1) / 3
    expected = [1.0, 0.1, 0.01 * (keep + (1 - keep) / 8), 0.001 / 8]
    assert inverse_frequencies(rope) == pytest.approx(expected, rel=1e-12)


def test_yarn_keeps_short_waves_and_stretches_long_ones() -> None:
    rope = RopeSpec(theta=1e4, dim=64, kind=RopeKind.YARN, factor=8.0, original_length=4096)
    plain, found = inverse_frequencies(RopeSpec(theta=1e4, dim=64)), inverse_frequencies(rope)
    shares = [one / other for one, other in zip(found, plain, strict=True)]
    assert shares == sorted(shares, reverse=True)
    assert shares[:8] == [1.0] * 8
    assert shares[-1] == pytest.approx(1 / 8)
    assert 1 / 8 < shares[15] < 1


def test_attention_is_sharpened_by_yarn_alone() -> None:
    for kind in RopeKind:
        scale = attention_scale(RopeSpec(theta=1e4, dim=8, kind=kind, factor=math.e, original_length=64))
        assert scale == pytest.approx(1.1 if kind is RopeKind.YARN else 1.0)
    yarn = {"theta": 1e4, "dim": 8, "kind": RopeKind.YARN, "original_length": 64}
    assert attention_scale(RopeSpec(**yarn, factor=math.e, mscale=2.0, mscale_all_dim=5.0)) == pytest.approx(
        1.2 / 1.5
    )
    assert attention_scale(RopeSpec(**yarn, factor=math.e, mscale=2.0)) == pytest.approx(1.1)
    assert attention_scale(RopeSpec(**yarn, factor=math.e, mscale_all_dim=2.0)) == pytest.approx(1.1)
    assert (
        attention_scale(RopeSpec(**yarn, factor=math.e, mscale=2.0, mscale_all_dim=5.0, attention_factor=0.7))
        == 0.7
    )
    assert attention_scale(RopeSpec(**yarn, factor=0.5)) == 1.0


# ---- layouts -----------------------------------------------------------------------------------------------


def layouts(family: str, dtype: str = "bfloat16", **keys: object) -> tuple[GroupLayout, ...]:
    spec = read(family, **keys)
    return group_layouts(spec, family_of({"model_type": family}).names, dtype)


MOE_KEYS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
    "attention_bias": True,
}


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize(
    ("family", "keys"),
    [("llama", {"mlp_bias": True, "vocab_size": 97}), ("qwen2", {}), ("qwen3_moe", MOE_KEYS)],
)
def test_fields_are_aligned_apart_and_as_long_as_their_sources(
    family: str, keys: dict[str, object], dtype: str
) -> None:
    for group in layouts(family, dtype, **keys):
        end = 0
        for field in group.fields:
            assert field.offset % ALIGNMENT == 0
            assert end <= field.offset < end + ALIGNMENT
            end = field.offset + prod(field.shape) * DTYPE_BYTES[dtype]
            assert prod(field.shape) == sum(prod(source.shape) for source in field.sources)
            assert {source.shape[1:] for source in field.sources} == {field.shape[1:]}
        assert end <= group.size < end + ALIGNMENT
        assert group.size % ALIGNMENT == 0


def test_groups_of_a_dense_model_in_the_order_of_a_pass() -> None:
    found = layouts("llama", attention_bias=True)
    assert [str(group.id) for group in found] == [
        *("embedding", "attention.0", "ffn.0", "attention.1", "ffn.1", "attention.2", "ffn.2", "head"),
    ]
    attention, ffn, head = found[3], found[4], found[-1]
    assert {field.name: field.shape for field in attention.fields} == {
        "norm": (64,),
        "qkv": (128 + 32 + 32, 64),
        "qkv_bias": (192,),
        "out": (64, 128),
        "out_bias": (64,),
    }
    assert [source.tensor for source in attention.fields[1].sources] == [
        f"model.layers.1.self_attn.{name}_proj.weight" for name in ("q", "k", "v")
    ]
    assert {field.name: field.shape for field in ffn.fields} == {
        "norm": (64,),
        "gate_up": (160, 64),
        "down": (64, 80),
    }
    assert [source.tensor for source in ffn.fields[1].sources] == [
        f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")
    ]
    assert {field.name: field.shape for field in head.fields} == {"norm": (64,), "output": (96, 64)}
    tied = layouts("llama", tie_word_embeddings=True)
    assert [field.name for field in tied[-1].fields] == ["norm"]


@pytest.mark.parametrize(
    ("family", "keys", "attention", "ffn"),
    [
        ("llama", {}, "norm qkv out", "norm gate_up down"),
        ("llama", {"attention_bias": True}, "norm qkv qkv_bias out out_bias", "norm gate_up down"),
        ("llama", {"mlp_bias": True}, "norm qkv out", "norm gate_up down gate_up_bias down_bias"),
        ("qwen2", {}, "norm qkv qkv_bias out", "norm gate_up down"),
        ("qwen3", {}, "norm qkv q_norm k_norm out", "norm gate_up down"),
        (
            "qwen3",
            {"attention_bias": True},
            "norm qkv qkv_bias q_norm k_norm out out_bias",
            "norm gate_up down",
        ),
    ],
)
def test_fields_that_switches_add(family: str, keys: dict[str, object], attention: str, ffn: str) -> None:
    found = layouts(family, **keys)
    assert [field.name for field in found[1].fields] == attention.split()
    assert [field.name for field in found[2].fields] == ffn.split()


def test_groups_of_a_mixture_of_experts() -> None:
    found = layouts("qwen3_moe", **MOE_KEYS)
    names = [str(group.id) for group in found]
    assert names[:7] == [
        "embedding",
        "attention.0",
        "router.0",
        *(f"expert.0.{expert}" for expert in range(4)),
    ]
    assert names[7:10] == ["attention.1", "ffn.1", "attention.2"]
    assert {field.name: field.shape for field in found[2].fields} == {"norm": (64,), "router": (4, 64)}
    assert {field.name: field.shape for field in found[3].fields} == {"gate_up": (48, 64), "down": (64, 24)}
    assert found[8].fields[1].shape == (160, 64)
    names = [
        source.tensor for group in layouts("mixtral") for field in group.fields for source in field.sources
    ]
    at = "model.layers.2.block_sparse_moe"
    assert {
        f"{at}.gate.weight",
        f"{at}.experts.7.w1.weight",
        f"{at}.experts.7.w2.weight",
        f"{at}.experts.7.w3.weight",
    } <= set(names)
    expert = next(
        group for group in layouts("mixtral") if group.id.kind is GroupKind.EXPERT and group.id.expert == 3
    )
    assert [source.tensor.split(".")[-2] for source in expert.fields[0].sources] == ["w1", "w3"]


def test_experts_that_differ_are_computed_one_by_one() -> None:
    """Of layer 0 one expert has more bits; of layer 2 gate and up rest unlike; layer 1 is dense."""

    def kernels(**dynamic: object) -> list[str]:
        config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "dynamic": dynamic}
        return [one.kernels for one in mixture_layouts(layouts("qwen3_moe", **keys(config))).values()]

    def keys(config: dict[str, object]) -> dict[str, object]:
        return MOE_KEYS | {"quantization_config": config}

    few = "few_bits_experts"
    assert kernels() == [few, few]
    assert kernels(**{"-:.*experts": {}}) == ["experts", "experts"]
    assert kernels(**{".*layers.0.mlp.experts.2": {"bits": 8}}) == ["", few]
    assert kernels(**{".*layers.2.mlp.experts.*gate_proj": {"bits": 8}}) == [few, ""]
    assert kernels(**{".*layers.2.mlp.experts.*down_proj": {"bits": 8}}) == [few, few]
    assert kernels(**{"-:.*layers.2.mlp.experts.*down_proj": {}}) == [few, ""]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_is_laid_out_twice(family: str) -> None:
    names = [
        (source.tensor, source.index, source.rows)
        for group in layouts(family)
        for field in group.fields
        for source in field.sources
    ]
    assert len(set(names)) == len(names)


def test_groups_of_stacked_experts() -> None:
    """Biases lie behind the matrices of their expert."""
    found = layouts("gpt_oss", num_local_experts=4)
    assert [str(group.id) for group in found][2:6] == ["router.0", "expert.0.0", "expert.0.1", "expert.0.2"]
    assert {field.name: field.shape for field in found[2].fields} == {
        "norm": (64,),
        "router": (4, 64),
        "router_bias": (4,),
    }
    expert = found[4]
    assert [(field.name, field.shape) for field in expert.fields] == [
        ("gate_up", (160, 64)),
        ("down", (64, 80)),
        ("gate_up_bias", (160,)),
        ("down_bias", (64,)),
    ]
    assert {source.index for field in expert.fields for source in field.sources} == {1}
    assert [field.name for field in found[1].fields] == [
        "norm",
        "qkv",
        "qkv_bias",
        "sinks",
        "out",
        "out_bias",
    ]
    assert [one.biases for one in mixture_layouts(found).values()] == [2] * 3


def test_bytes_of_a_kv_block() -> None:
    layout = kv_layout(read(), "float16", 32)
    assert layout.layer_bytes == 2 * 32 * 2 * 16 * 2
    assert layout.block_bytes == 3 * layout.layer_bytes


GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 151552,
}
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def test_configs_as_they_are_published() -> None:
    """All their keys are read, or left alone; sizes are those of the models' cards."""
    spec, names = read_spec(GLM), family_of(GLM).names
    layouts = group_layouts(spec, names, "bfloat16")
    assert 352e9 < parameters(layouts) < 354e9  # and an MTP layer of 3.8 billion
    assert (spec.rope.dim, spec.rope.theta, spec.max_length) == (64, 1e6, 202752)
    assert spec.moe_layers == (False,) * 3 + (True,) * 89
    spec, names = read_spec(MINIMAX), family_of(MINIMAX).names
    layouts = group_layouts(spec, names, "bfloat16")
    assert 228e9 < parameters(layouts) < 230e9
    formats = {str(one.id): {m.name: m.format.name for m in one.matrices} for one in layouts}
    assert formats["attention.3"] == {"qkv": "fp8", "out": "fp8"}
    assert formats["router.3"] == {"router": "dense"}
    assert formats["expert.3.7"] == {"gate_up": "fp8", "down": "fp8"}
    assert formats["head"] == {"output": "dense"}
