"""Reads what all families share of a checkpoint's config.json.

`ConfigReader` checks the type of every value that it returns. A value that this engine cannot run exactly is
refused, and the message names its key.
"""

from collections.abc import Mapping
from dataclasses import replace

from penstock.arch.formats.methods import read_format
from penstock.arch.mixers.attention import Attention
from penstock.arch.spec import DTYPE_BYTES, LayerSpec, Mlp, ModelSpec, MoeSpec, RopeKind, RopeSpec
from penstock.base.errors import UnsupportedModelError

MOST = 2**16
"""Largest number of layers, and of experts of a layer, that is accepted. It is far beyond any model."""


class ConfigReader:
    """Reads values of a config.json and checks their types.

    All methods raise UnsupportedModelError, which names the key.
    """

    def __init__(self, config: Mapping[str, object], where: str) -> None:
        self.config = config
        self.where = where

    def get(self, key: str) -> object:
        """Return the value of a key as it is, None if it is missing."""
        return self.config.get(key)

    def whole(self, key: str, default: int | None = None, *, low: int = 1, high: int = 2**40) -> int:
        """Return a whole number from `low` to `high`. None and a missing key count as the default."""
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise UnsupportedModelError(
                f"{self.where}: key '{key}' is missing, which must be a whole number; fetch config.json again"
            )
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise UnsupportedModelError(
                f"{self.where}: key '{key}' is {value!r}; it must be a whole number from {low} to {high}; "
                "correct config.json, or fetch it again"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number. None and a missing key count as the default."""
        value = self.config.get(key)
        value = default if value is None else value
        # Within these bounds no formula of a model, rope's powers included, leaves the range of a double.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 <= value <= 1e30:
            raise UnsupportedModelError(
                f"{self.where}: key '{key}' is {value!r}; it must be a number from 1e-30 to 1e30; correct "
                "config.json, or fetch it again"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false. None and a missing key count as the default."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise UnsupportedModelError(
                f"{self.where}: key '{key}' is {value!r}; it must be true or false; correct config.json, or "
                "fetch it again"
            )
        return value

    def only(self, key: str, *supported: object) -> None:
        """Refuse any value but the supported ones. A missing key counts as the first of them."""
        value = self.config.get(key, supported[0])
        if value not in supported:
            raise UnsupportedModelError(
                f"{self.where}: key '{key}' is {value!r}; supported: {', '.join(map(repr, supported))}; use "
                "another checkpoint"
            )


def spec_of(
    config: ConfigReader,
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
    layers, hidden = layers_of(config), config.whole("hidden_size")
    heads = config.whole("num_attention_heads")
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


def layers_of(config: ConfigReader) -> int:
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


def _dtype(config: ConfigReader) -> str:
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(key) or "float32"
    if not isinstance(value, str) or value not in DTYPE_BYTES:
        raise UnsupportedModelError(
            f"{config.where}: key '{key}' is {value!r}; supported: {', '.join(DTYPE_BYTES)}; use a "
            "checkpoint in one of these"
        )
    return value


def _rope(config: ConfigReader, head_dim: int, max_length: int) -> RopeSpec:
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
    reader = ConfigReader(scaling, f"{config.where}, {key}")
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
    reader = ConfigReader({**scaling, **zero_is_absent}, reader.where)
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


def window_of(config: ConfigReader) -> int | None:
    """Return the sliding window, or None without one."""
    return None if config.get("sliding_window") is None else config.whole("sliding_window")


def active_window(config: ConfigReader) -> int | None:
    """Return the sliding window, or None where `use_sliding_window` is off.

    Qwen configs have a window even then.
    """
    return window_of(config) if config.flag("use_sliding_window", False) else None


def typed_windows(config: ConfigReader, window: int | None) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, by the list `layer_types`."""
    layers, types = layers_of(config), config.get("layer_types")
    supported = ["full_attention"] if window is None else ["full_attention", "sliding_attention"]
    if not isinstance(types, list) or len(types) != layers or any(kind not in supported for kind in types):
        raise UnsupportedModelError(
            f"{config.where}: key 'layer_types' is {types!r}; supported: a list of {layers} of {supported}; "
            "use another checkpoint"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
