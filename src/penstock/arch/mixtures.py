"""Reads the configs of families that are mixtures of experts: a function for each."""

from collections.abc import Mapping
from dataclasses import replace

from penstock.arch.formats import mxfp4, recipe
from penstock.arch.formats.dense import DENSE
from penstock.arch.mixers.attention import Attention
from penstock.arch.reading import (
    MOST,
    ConfigReader,
    active_window,
    layers_of,
    spec_of,
    typed_windows,
    window_of,
)
from penstock.arch.spec import Activation, LayerSpec, Mlp, ModelSpec, MoeSpec, RopeKind, Router, Scoring
from penstock.base.errors import UnsupportedModelError


def mixtral(config: ConfigReader) -> ModelSpec:
    """Return the spec of a Mixtral."""
    experts, top_k = config.whole("num_local_experts", 8, high=MOST), config.whole("num_experts_per_tok", 2)
    moe = _moe(config, MoeSpec(experts, top_k, config.whole("intermediate_size"), Router(normalise=True)))
    return spec_of(
        config,
        windows=(window_of(config),) * layers_of(config),
        moe=moe,
        moe_layers=(True,) * layers_of(config),
    )


def qwen2_moe(config: ConfigReader) -> ModelSpec:
    """Return the spec of a Qwen2-MoE: shared experts with a gate beside the mixture."""
    moe = _qwen_moe(config, config.whole("num_experts", 60, high=MOST), top_k=4, size=1408)
    shared = Mlp(config.whole("shared_expert_intermediate_size", 5632))
    layers, window = layers_of(config), active_window(config)
    if config.get("layer_types") is None:
        first = config.whole("max_window_layers", 28, low=0)
        # transformers takes every second of the layers before this one.
        windows = tuple(window if layer < first and layer % 2 == 0 else None for layer in range(layers))
    else:
        windows = typed_windows(config, window)
    return spec_of(
        config,
        qkv_bias=config.flag("qkv_bias", True),
        windows=windows,
        moe=replace(moe, shared=shared, shared_gate=True),
        moe_layers=_qwen_layers(config),
    )


def qwen3_moe(config: ConfigReader) -> ModelSpec:
    """Return the spec of a Qwen3-MoE."""
    layers, bias = layers_of(config), config.flag("attention_bias", False)
    experts = config.whole(
        "num_experts" if config.get("num_experts") is not None else "num_local_experts", 128, high=MOST
    )
    return spec_of(
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        windows=(active_window(config),) * layers,
        moe=_qwen_moe(config, experts, top_k=8, size=768),
        moe_layers=_qwen_layers(config),
    )


def _qwen_moe(config: ConfigReader, experts: int, top_k: int, size: int) -> MoeSpec:
    """Return the mixture of a Qwen model. top_k, size: what missing keys mean."""
    size, router = (
        config.whole("moe_intermediate_size", size),
        Router(normalise=config.flag("norm_topk_prob", False)),
    )
    return _moe(config, MoeSpec(experts, config.whole("num_experts_per_tok", top_k), size, router))


def _qwen_layers(config: ConfigReader) -> tuple[bool, ...]:
    """Tell of each layer of a Qwen model whether it is a mixture."""
    step, dense = config.whole("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise UnsupportedModelError(
            f"{config.where}: key 'mlp_only_layers' is {dense!r}; it must be a list of layer numbers; "
            "correct config.json, or fetch it again"
        )
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers_of(config)))


def glm4_moe(config: ConfigReader) -> ModelSpec:
    """Return the spec of GLM-4.5, 4.5-Air, 4.6 and 4.7: partial rotary, dense first layers, shared experts.

    Tensors of the layer behind the last one predict one token further (MTP): see `arch/mtp.py`.
    """
    layers, norms = layers_of(config), config.flag("use_qk_norm", False)
    config, rotated = _partly_rotated(config, 0.5)
    router = Router(
        Scoring.SIGMOID,
        normalise=config.flag("norm_topk_prob", True),
        correction=True,
        groups=config.whole("n_group", 1),
        top_groups=config.whole("topk_group", 1),
        scale=config.number("routed_scaling_factor", 1.0),
        float32=True,
    )
    experts = config.whole(
        "n_routed_experts" if config.get("n_routed_experts") is not None else "num_local_experts",
        128,
        high=MOST,
    )
    size, shared = config.whole("moe_intermediate_size", 1408), config.whole("n_shared_experts", 1)
    moe = MoeSpec(experts, config.whole("num_experts_per_tok", 8), size, router, shared=Mlp(shared * size))
    dense = config.whole("first_k_dense_replace", 1, low=0)
    spec = spec_of(
        config,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=norms,
        moe=_moe(config, moe),
        moe_layers=tuple(layer >= dense for layer in range(layers)),
    )
    return _rotated(config, spec, rotated)


def minimax_m2(config: ConfigReader) -> ModelSpec:
    """Return the spec of a MiniMax-M2: partial rotary, and norms over all heads of queries, and of keys.

    Released configs repeat keys of MiniMax-Text-01, a family with linear attention and shared experts. They
    may not ask for any of that.
    """
    layers = layers_of(config)
    config.only("scoring_func", "sigmoid")
    config.only("use_routing_bias", True)
    config.only("use_qk_norm", True)
    config.only("qk_norm_type", "per_layer")
    config.only("shared_intermediate_size", 0, None)
    config.only("sliding_window", None)
    config.only("attn_type_list", None, [1] * layers)
    config.only("attention_bias", False)
    for part in ("full_attention", "linear_attention", "mlp"):
        config.only(f"layernorm_{part}_beta", 1.0)
    head_dim = config.whole("head_dim")
    turned = config.whole("rotary_dim", head_dim, high=head_dim)
    config, rotated = _partly_rotated(config, turned / head_dim)
    router = Router(Scoring.SIGMOID, normalise=True, correction=True, float32=True)
    experts = config.whole(
        "num_local_experts" if config.get("num_local_experts") is not None else "num_experts", 256, high=MOST
    )
    moe = MoeSpec(experts, config.whole("num_experts_per_tok", 8), config.whole("intermediate_size"), router)
    spec = spec_of(config, qk_norm=True, moe=_moe(config, moe), moe_layers=(True,) * layers)
    stack = []
    for layer in spec.stack:
        assert isinstance(layer.mixer, Attention)
        sizes = layer.mixer.heads * head_dim, layer.mixer.kv_heads * head_dim
        stack.append(replace(layer, mixer=replace(layer.mixer, normed_together=sizes)))
    return _rotated(config, replace(spec, stack=tuple(stack)), rotated)


def _partly_rotated(config: ConfigReader, default: float) -> tuple[ConfigReader, float]:
    """Return the config as if heads were rotated as a whole, and the share of them that is.

    As in transformers, the value among RoPE's parameters comes before that beside them.
    """
    given, share = dict(config.config), config.number("partial_rotary_factor", default)
    given.pop("partial_rotary_factor", None)
    key = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
    scaling = given.get(key)
    if isinstance(scaling, Mapping):
        share = ConfigReader(scaling, f"{config.where}, {key}").number("partial_rotary_factor", share)
        given[key] = {name: value for name, value in scaling.items() if name != "partial_rotary_factor"}
    return ConfigReader(given, config.where), share


def _rotated(config: ConfigReader, spec: ModelSpec, share: float) -> ModelSpec:
    """Return the spec with a share of each head rotated: `int(head_dim * share)` dimensions of it."""
    dim = int(spec.head_dim * share)
    if not 0 < dim <= spec.head_dim or dim % 2 or (spec.rope.kind is RopeKind.DYNAMIC and dim < 4):
        raise UnsupportedModelError(
            f"{config.where}: key 'partial_rotary_factor' is {share!r}, which rotates {dim} of "
            f"{spec.head_dim} dimensions of a head; it must be an even number of them, for dynamic rope at "
            "least 4; correct config.json, or fetch it again"
        )
    return replace(spec, rope=replace(spec.rope, dim=dim))


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(config: ConfigReader) -> ModelSpec:
    """Return the spec of a gpt-oss: sinks, biases everywhere, and experts with a clamped activation."""
    layers, bias = layers_of(config), config.flag("attention_bias", True)
    if config.get("layer_types") is None:
        pair = ["sliding_attention", "full_attention"]
        config = ConfigReader({**config.config, "layer_types": (pair * layers)[:layers]}, config.where)
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        config = ConfigReader({**config.config, "rope_parameters": _GPT_OSS_ROPE}, config.where)
    key = "num_local_experts" if config.get("num_local_experts") is not None else "num_experts"
    activation = Activation(
        alpha=config.number("swiglu_alpha", 1.702), shift=1.0, limit=config.number("swiglu_limit", 7.0)
    )
    moe = MoeSpec(
        config.whole(key, 128, high=MOST),
        config.whole("num_experts_per_tok", 4),
        config.whole("intermediate_size"),
        Router(Scoring.SOFTMAX_OF_CHOSEN, bias=True),
        bias=True,
        activation=activation,
    )
    spec = spec_of(
        config,
        qkv_bias=bias,
        out_bias=bias,
        windows=typed_windows(config, window_of(config)),
        moe=_moe(config, moe),
        moe_layers=(True,) * layers,
    )
    if spec.format != DENSE and spec.format.name not in (mxfp4.METHOD, recipe.METHOD):
        raise UnsupportedModelError(
            f"{config.where}: key 'quantization_config' is set to quant_method {spec.format.name!r}; "
            f"supported for gpt_oss: {mxfp4.METHOD}, or none; use the model as it was published"
        )
    return replace(spec, stack=tuple(map(_with_sinks, spec.stack)))


def _with_sinks(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.mixer, Attention)
    return replace(layer, mixer=replace(layer.mixer, sinks=True))


def _moe(config: ConfigReader, moe: MoeSpec) -> MoeSpec:
    """Return the mixture. Raises UnsupportedModelError for numbers that contradict each other."""
    router = moe.router
    if moe.top_k > moe.experts:
        raise UnsupportedModelError(
            f"{config.where}: key 'num_experts_per_tok' is {moe.top_k}, but there are only {moe.experts} "
            "experts; correct config.json, or fetch it again"
        )
    if moe.experts % router.groups or (router.groups > 1 and moe.experts < 2 * router.groups):
        raise UnsupportedModelError(
            f"{config.where}: key 'n_group' is {router.groups}, which does not divide {moe.experts} experts "
            "into groups of one size, at least 2; correct config.json, or fetch it again"
        )
    chosen_from = moe.experts // router.groups * router.top_groups
    if router.top_groups > router.groups or moe.top_k > chosen_from:
        raise UnsupportedModelError(
            f"{config.where}: key 'topk_group' is {router.top_groups}; it must be at most n_group, "
            f"{router.groups}, and so many groups must hold the {moe.top_k} experts of a token; correct "
            "config.json, or fetch it again"
        )
    return moe
