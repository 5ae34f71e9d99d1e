"""Turns a checkpoint's config.json into a `ModelSpec`: one function of switches and tensor names a family.

A value that this engine cannot run exactly is refused, and the message names its key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.arch.mixtures import glm4_moe, gpt_oss, minimax_m2, mixtral, qwen2_moe, qwen3_moe
from penstock.arch.reading import ConfigReader, active_window, layers_of, spec_of, typed_windows, window_of
from penstock.arch.spec import ModelSpec
from penstock.base.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names the tensors of a family's feed-forward. All other tensors have the same names in every family.

    stacked: whether the experts of a layer are stacks of tensors, as `formats/mxfp4.py` describes them. Names
        of single experts are not used then.
    """

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
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

    read: Callable[[ConfigReader], ModelSpec]
    names: TensorNames = TensorNames()
    defaults: Mapping[str, object] = field(default_factory=dict)


def read_spec(config: Mapping[str, object], where: str = "config.json") -> ModelSpec:
    """Return the spec of the model that `config`, a parsed config.json, describes.

    Raises UnsupportedModelError, which names the key, for a family, switch or value that this engine does not
    run.
    """
    family = family_of(config, where)
    return family.read(ConfigReader({**family.defaults, **config}, where))


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


def _windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, from the config of a dense Qwen model.

    Such a config has a list `layer_types`, or a window in all layers from `max_window_layers` on.
    """
    layers, window = layers_of(config), active_window(config)
    if config.get("layer_types") is not None:
        return typed_windows(config, window)
    first = config.whole("max_window_layers", layers, low=0)
    return tuple(window if layer >= first else None for layer in range(layers))


def _llama(config: ConfigReader) -> ModelSpec:
    config.only("pretraining_tp", 1)
    bias = config.flag("attention_bias", False)
    return spec_of(config, qkv_bias=bias, out_bias=bias, mlp_bias=config.flag("mlp_bias", False))


def _mistral(config: ConfigReader) -> ModelSpec:
    return spec_of(config, windows=(window_of(config),) * layers_of(config))


def _qwen2(config: ConfigReader) -> ModelSpec:
    return spec_of(config, qkv_bias=True, windows=_windows(config))


def _qwen3(config: ConfigReader) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    return spec_of(config, qkv_bias=bias, out_bias=bias, qk_norm=True, windows=_windows(config))


_QWEN_WINDOWS = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}

_BLOCK_SPARSE = TensorNames(
    router="block_sparse_moe.gate",
    correction="block_sparse_moe.e_score_correction_bias",
    expert_gate="block_sparse_moe.experts.{expert}.w1",
    expert_up="block_sparse_moe.experts.{expert}.w3",
    expert_down="block_sparse_moe.experts.{expert}.w2",
)

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama),
    "mistral": Family(
        _mistral,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(_qwen2, defaults={"num_key_value_heads": 32, **_QWEN_WINDOWS}),
    "qwen3": Family(_qwen3, defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOWS}),
    "mixtral": Family(
        mixtral,
        _BLOCK_SPARSE,
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen2_moe": Family(
        qwen2_moe,
        TensorNames(shared="mlp.shared_expert"),
        {"num_key_value_heads": 16, **_QWEN_WINDOWS},
    ),
    "glm4_moe": Family(
        glm4_moe,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    ),
    "minimax_m2": Family(
        minimax_m2,
        _BLOCK_SPARSE,
        {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5e6},
    ),
    "qwen3_moe": Family(qwen3_moe, defaults={"num_key_value_heads": 4, **_QWEN_WINDOWS}),
    "gpt_oss": Family(
        gpt_oss,
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
