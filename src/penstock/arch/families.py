"""Turns a checkpoint's config.json into a `ModelSpec`: one function of switches and tensor names a family.

`ConfigReader` checks the type of every value that it returns. A value that this engine cannot run exactly is
refused, and the message names its key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from penstock.arch.formats import mxfp4, recipe
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.methods import read_format
from penstock.arch.mixers.attention import Attention
from penstock.arch.reading import ConfigReader as _Reader
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

MOST = 2**16
"""Largest number of layers, and of experts of a layer, that is accepted. It is far beyond any model."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names the tensors of a family's feed-forward. All other tensors have the same names in every family.

    stacked: whether the experts of a layer are stacks of tensors, as `formats/mxfp4.py` describes them. Names
        of single experts are not used then.
    """

    router: str = "mlp.gate"
    expert_gate: str = "mlp.experts.{expert}.gate_proj"
    expert_up: str = "mlp.experts.{expert}.up_proj"
    expert_down: str = "mlp.experts.{expert}.down_proj"
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A family says how one `model_type` differs from Llama.

    read: makes the spec of a config.
    names: of the feed-forward's tensors.
    defaults: values of keys that config.json may leave out.
    """

    read: Callable[["_Reader"], ModelSpec]
    names: TensorNames = TensorNames()
    defaults: Mapping[str, object] = field(default_factory=dict)


def read_spec(config: Mapping[str, object], where: str = "config.json") -> ModelSpec:
    """Return the spec of the model that `config`, a parsed config.json, describes.

    Raises UnsupportedModelError, which names the key, for a family, switch or value that this engine does not
    run.
    """
    family = family_of(config, where)
    return family.read(_Reader({**family.defaults, **config}, where))


def family_of(config: Mapping[str, object], where: str = "config.json") -> Family:
    """Return the family of a parsed config.json. Raises UnsupportedModelError for an unknown `model_type`."""
    name = config.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise UnsupportedModelError(
            f"{where}: key 'model_type' is {name!r}; supported: {', '.join(sorted(FAMILIES))}; use a "
            "checkpoint of one of these, or see docs/adding-a-model.md"
        )
    return family


def _spec(
    config: _Reader,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: tuple[int | None, ...] = (),
    moe: MoeSpec | None = None,
    moe_layers: tuple[bool, ...] = (),
) -> ModelSpec:
    """Return the spec of what all families share; the arguments are the switches in which they differ."""
    config.only("hidden_act", "silu")
    layers, heads, hidden = _layers(config), config.whole("num_attention_heads"), config.whole("hidden_size")
    kv_heads = config.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"{config.where}: key 'num_attention_heads' is {heads}; it must be a multiple of key "
            f"'num_key_value_heads', {kv_heads}; correct config.json, or fetch it again"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise UnsupportedModelError(
            f"{config.where}: key 'head_dim' is missing, and hidden_size {hidden} is no multiple of {heads} "
            "heads; add head_dim, or fetch config.json again"
        )
    head_dim = config.whole("head_dim", hidden // heads)
    if head_dim % 2:
        raise UnsupportedModelError(
            f"{config.where}: key 'head_dim' is {head_dim}; rotary embeddings need an even number; correct "
            "config.json, or fetch it again"
        )
    positions = config.whole("max_position_embeddings", 2048)
    rope = _rope(config, head_dim, positions)
    windows = windows or (None,) * layers
    mlp = Mlp(config.whole("intermediate_size"), mlp_bias)
    mixer = Attention(heads, kv_heads, head_dim, None, qkv_bias, out_bias, qk_norm)
    sparse, dtype = moe_layers or (False,) * layers, _dtype(config)
    return ModelSpec(
        family=str(config.get("model_type")),
        vocab_size=config.whole("vocab_size"),
        hidden_size=hidden,
        stack=tuple(
            LayerSpec(replace(mixer, window=window), moe if moe is not None and many else mlp)
            for window, many in zip(windows, sparse, strict=True)
        ),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        max_length=_max_length(rope, positions),
        rope=rope,
        dtype=dtype,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        format=read_format(config.config, config.where, dtype),
    )


def _layers(config: _Reader) -> int:
    """Return the number of layers. It is bounded: lists of that size are made before any file is read."""
    return config.whole("num_hidden_layers", high=MOST)


def _max_length(rope: RopeSpec, positions: int) -> int:
    """Return the positions the model was trained for.

    YaRN extends them to its factor times the original length, also where max_position_embeddings was not
    raised.
    """
    return (
        max(positions, int(rope.original_length * rope.factor)) if rope.kind is RopeKind.YARN else positions
    )


def _dtype(config: _Reader) -> str:
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(key) or "float32"
    if not isinstance(value, str) or value not in DTYPE_BYTES:
        raise UnsupportedModelError(
            f"{config.where}: key '{key}' is {value!r}; supported: {', '.join(DTYPE_BYTES)}; use a "
            "checkpoint in one of these"
        )
    return value


def _rope(config: _Reader, head_dim: int, max_length: int) -> RopeSpec:
    """Return the RoPE of the config, in either spelling.

    Older configs have `rope_theta` beside `rope_scaling`, newer ones have `rope_parameters`. `rope_scaling`
    wins. Zeros and nulls are read as Hugging Face's `modeling_rope_utils` reads them.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(key) or {}
    if not isinstance(scaling, Mapping):
        raise UnsupportedModelError(
            f"{config.where}: key '{key}' is {scaling!r}; it must be an object; correct config.json, or "
            "fetch it again"
        )
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModelError(
            f"{config.where}: key '{key}' differs by layer; supported: one set for all layers; use another "
            "checkpoint"
        )
    reader = _Reader(scaling, f"{config.where}, {key}")
    name = scaling.get("rope_type", scaling.get("type", "default"))
    if name not in list(RopeKind):
        raise UnsupportedModelError(
            f"{config.where}: key 'rope_type' is {name!r}; supported: {', '.join(RopeKind)}; use another "
            "checkpoint"
        )
    kind = RopeKind(str(name))
    for partial in (config.get("partial_rotary_factor"), scaling.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            raise UnsupportedModelError(
                f"{config.where}: key 'partial_rotary_factor' is {partial!r}; supported: 1.0; use another "
                "checkpoint"
            )
    theta = reader.number("rope_theta", config.number("rope_theta", 10000.0))
    if theta <= 1:
        raise UnsupportedModelError(
            f"{config.where}: key 'rope_theta' is {theta}; it must be above 1; correct config.json, or "
            "fetch it again"
        )
    if kind is RopeKind.DEFAULT:
        return RopeSpec(theta=theta, dim=head_dim)
    original = config.whole(
        "original_max_position_embeddings", reader.whole("original_max_position_embeddings", max_length)
    )
    # transformers ignores yarn's optional numbers where they are zero, except for the attention factor.
    zero_is_absent = {
        key: None for key in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow") if scaling.get(key) == 0
    }
    reader = _Reader({**scaling, **zero_is_absent}, reader.where)
    optional = {
        key: reader.number(key)
        for key in ("attention_factor", "mscale", "mscale_all_dim")
        if reader.get(key) is not None
    }
    if kind is RopeKind.DYNAMIC and head_dim < 4:
        raise UnsupportedModelError(
            f"{config.where}: key 'head_dim' is {head_dim}; dynamic rope needs at least 4; correct "
            "config.json, or fetch it again"
        )
    rope = RopeSpec(
        theta=theta,
        dim=head_dim,
        kind=kind,
        factor=reader.number("factor", max_length / original if kind is RopeKind.YARN else None),
        # Dynamic scaling starts at the end of the configured positions, whatever the key says.
        original_length=max_length if kind is RopeKind.DYNAMIC else original,
        low_freq_factor=reader.number("low_freq_factor", 1.0),
        high_freq_factor=reader.number("high_freq_factor", 4.0),
        beta_fast=reader.number("beta_fast", 32.0),
        beta_slow=reader.number("beta_slow", 1.0),
        # transformers takes an explicit null for false.
        truncate=scaling.get("truncate", True) is not None and reader.flag("truncate", True),
        **optional,
    )
    if kind is RopeKind.LLAMA3 and rope.high_freq_factor <= rope.low_freq_factor:
        raise UnsupportedModelError(
            f"{reader.where}: key 'high_freq_factor' is {rope.high_freq_factor}; it must be above "
            "low_freq_factor; correct config.json, or fetch it again"
        )
    if kind is RopeKind.YARN and rope.beta_fast < rope.beta_slow:
        raise UnsupportedModelError(
            f"{reader.where}: key 'beta_fast' is {rope.beta_fast}; it must be at least beta_slow; correct "
            "config.json, or fetch it again"
        )
    return rope


def _window(config: _Reader) -> int | None:
    return None if config.get("sliding_window") is None else config.whole("sliding_window")


def _active_window(config: _Reader) -> int | None:
    """Return the sliding window, or None where `use_sliding_window` is off.

    Qwen configs have a window even then.
    """
    return _window(config) if config.flag("use_sliding_window", False) else None


def _windows(config: _Reader) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, from the config of a dense Qwen model.

    Such a config has a list `layer_types`, or a window in all layers from `max_window_layers` on.
    """
    layers, window = _layers(config), _active_window(config)
    if config.get("layer_types") is None:
        first = config.whole("max_window_layers", layers, low=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    return _typed_windows(config, window)


def _typed_windows(config: _Reader, window: int | None) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, by the list `layer_types`."""
    layers, types = _layers(config), config.get("layer_types")
    supported = ["full_attention"] if window is None else ["full_attention", "sliding_attention"]
    if not isinstance(types, list) or len(types) != layers or any(kind not in supported for kind in types):
        raise UnsupportedModelError(
            f"{config.where}: key 'layer_types' is {types!r}; supported: a list of {layers} of {supported}; "
            "use another checkpoint"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _llama(config: _Reader) -> ModelSpec:
    config.only("pretraining_tp", 1)
    bias = config.flag("attention_bias", False)
    return _spec(config, qkv_bias=bias, out_bias=bias, mlp_bias=config.flag("mlp_bias", False))


def _mistral(config: _Reader) -> ModelSpec:
    return _spec(config, windows=(_window(config),) * _layers(config))


def _qwen2(config: _Reader) -> ModelSpec:
    return _spec(config, qkv_bias=True, windows=_windows(config))


def _qwen3(config: _Reader) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    return _spec(config, qkv_bias=bias, out_bias=bias, qk_norm=True, windows=_windows(config))


def _mixtral(config: _Reader) -> ModelSpec:
    experts, top_k = config.whole("num_local_experts", 8, high=MOST), config.whole("num_experts_per_tok", 2)
    moe = _moe(config, MoeSpec(experts, top_k, config.whole("intermediate_size"), Router(normalise=True)))
    return _spec(
        config, windows=(_window(config),) * _layers(config), moe=moe, moe_layers=(True,) * _layers(config)
    )


def _qwen3_moe(config: _Reader) -> ModelSpec:
    layers, bias = _layers(config), config.flag("attention_bias", False)
    experts = config.whole(
        "num_experts" if config.get("num_experts") is not None else "num_local_experts", 128, high=MOST
    )
    size, router = (
        config.whole("moe_intermediate_size", 768),
        Router(normalise=config.flag("norm_topk_prob", False)),
    )
    moe = _moe(config, MoeSpec(experts, config.whole("num_experts_per_tok", 8), size, router))
    step, dense = config.whole("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise UnsupportedModelError(
            f"{config.where}: key 'mlp_only_layers' is {dense!r}; it must be a list of layer numbers; "
            "correct config.json, or fetch it again"
        )
    return _spec(
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        windows=(_active_window(config),) * layers,
        moe=moe,
        moe_layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    )


def _gpt_oss(config: _Reader) -> ModelSpec:
    layers, bias = _layers(config), config.flag("attention_bias", True)
    if config.get("layer_types") is None:
        pair = ["sliding_attention", "full_attention"]
        config = _Reader({**config.config, "layer_types": (pair * layers)[:layers]}, config.where)
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        config = _Reader({**config.config, "rope_parameters": _GPT_OSS_ROPE}, config.where)
    experts = config.whole(
        "num_local_experts" if config.get("num_local_experts") is not None else "num_experts", 128, high=MOST
    )
    activation = Activation(
        alpha=config.number("swiglu_alpha", 1.702), shift=1.0, limit=config.number("swiglu_limit", 7.0)
    )
    moe = MoeSpec(
        experts,
        config.whole("num_experts_per_tok", 4),
        config.whole("intermediate_size"),
        Router(Scoring.SOFTMAX_OF_CHOSEN, bias=True),
        bias=True,
        activation=activation,
    )
    spec = _spec(
        config,
        qkv_bias=bias,
        out_bias=bias,
        windows=_typed_windows(config, _window(config)),
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


def _moe(config: _Reader, moe: MoeSpec) -> MoeSpec:
    if moe.top_k > moe.experts:
        raise UnsupportedModelError(
            f"{config.where}: key 'num_experts_per_tok' is {moe.top_k}, but there are only {moe.experts} "
            "experts; correct config.json, or fetch it again"
        )
    return moe


_QWEN_WINDOWS = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama),
    "mistral": Family(
        _mistral,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(_qwen2, defaults={"num_key_value_heads": 32, **_QWEN_WINDOWS}),
    "qwen3": Family(_qwen3, defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOWS}),
    "mixtral": Family(
        _mixtral,
        TensorNames(
            router="block_sparse_moe.gate",
            expert_gate="block_sparse_moe.experts.{expert}.w1",
            expert_up="block_sparse_moe.experts.{expert}.w3",
            expert_down="block_sparse_moe.experts.{expert}.w2",
        ),
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen3_moe": Family(_qwen3_moe, defaults={"num_key_value_heads": 4, **_QWEN_WINDOWS}),
    "gpt_oss": Family(
        _gpt_oss,
        TensorNames(router="mlp.router", stacked=True),
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "rope_theta": 150000.0,
            "rms_norm_eps": 1e-5,
            "torch_dtype": "bfloat16",
        },
    ),
}
