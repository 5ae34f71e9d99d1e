"""Checkpoints as their makers publish them, small: their configs, names of tensors, and what else is there.

`quantised` makes the matrices. What is added here is what a quantiser, or a publisher, does beyond.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
from penstock.api.llm import LLM
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.methods import read_format
from penstock.arch.formats.recipe import name_of
from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.step.params import SamplingParams
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.writer import write_pack
from quantised import SCHEMES, Scheme, awq, checkpoints, fp8, gptq, matrices, same_matrices

Tensors = dict[str, Tensor]


def published(
    model: str | Path, scheme: Scheme, folder: Path, config: Mapping[str, object] | None = None,
    others: Mapping[str, Scheme | None] | None = None, change: Callable[[Tensors], Tensors] = dict,
    files: Mapping[str, object] | None = None,
) -> tuple[Path, Path]:  # fmt: skip
    """A checkpoint and the same model dense.

    config: its `quantization_config`; None for none. change: makes other tensors of those of the file. files:
    JSON beside them.
    """
    source = tiny.checkpoint(model) if isinstance(model, str) else model
    few, dense = checkpoints(source, folder, scheme, others)
    written = json.loads((few / "config.json").read_text()) | {"quantization_config": config}
    (few / "config.json").write_text(json.dumps({k: v for k, v in written.items() if v is not None}))
    weights = few / "model.safetensors"
    save_file(change(load_file(weights)), weights, {"format": "pt"})
    for name, content in (files or {}).items():
        (few / name).write_text(json.dumps(content))
    return few, dense


def outputs(path: Path) -> list[object]:
    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM(path, device="cpu", dtype="float32", max_length=64, kernels=False) as llm:
        return [(one.tokens, one.logprobs) for one in llm.generate(tiny.prompts()[1:4], params)]


AUTO_GPTQ = {
    "bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
    "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model",
}  # fmt: skip


def with_biases(tensors: Tensors) -> Tensors:
    """AutoGPTQ's: float16 zeros for all matrices that have none."""
    modules = {name.removesuffix("qweight"): one for name, one in tensors.items() if name.endswith("qweight")}
    zeros = {
        f"{module}bias": torch.zeros(codes.shape[1], dtype=torch.float16) for module, codes in modules.items()
    }
    return zeros | tensors


@pytest.mark.parametrize("model", ["qwen2", "mixtral"])
def test_biases_of_zeros_beside_codes(model: str, tmp_path: Path) -> None:
    """As in Qwen2.5-7B-Instruct-GPTQ-Int4, and in TheBloke's."""
    files = {"quantize_config.json": AUTO_GPTQ}
    few, dense = published(model, gptq(4, 32), tmp_path, change=with_biases, files=files)
    same_matrices(few, dense, ranks=2)


def test_a_bias_that_is_not_zero_is_refused(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        made = with_biases(tensors)
        made["model.layers.1.mlp.up_proj.bias"][-1] = 2.0**-24
        return made

    few, _ = published("llama", gptq(4, 32), tmp_path, SCHEMES["gptq"].config, change=change)
    with pytest.raises(CheckpointError, match=r"up_proj\.bias', a bias with numbers other than 0"):
        matrices(few)


NO_GATES = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["gate"], "version": "gemm",
    "zero_point": True,
}  # fmt: skip


@pytest.mark.parametrize("gates", ["packed", "dense", "some"])
def test_whether_gates_are_packed_is_in_the_tensors(gates: str, tmp_path: Path) -> None:
    """AutoAWQ leaves all that has `gate` in its name, gate_proj too; others leave routers alone."""
    others = {"packed": {}, "dense": {"gate_proj": None}, "some": {"experts.3.gate_proj": None}}[gates]
    few, dense = published("qwen3_moe", awq(32), tmp_path, NO_GATES, others)
    same_matrices(few, dense, ranks=2)
    with Checkpoint.open(few) as checkpoint:
        kinds = {
            expert: checkpoint.spec.format.of(f"model.layers.1.mlp.experts.{expert}.gate_proj.weight")
            == DENSE
            for expert in (2, 3)
        }
        assert kinds == {2: gates == "dense", 3: gates != "packed"}
        assert name_of(checkpoint.spec.format) == "awq"
        write_pack(checkpoint, tmp_path / "pack", "float32")
    assert outputs(tmp_path / "pack") == outputs(few)


@pytest.mark.parametrize(("model", "key"), [("qwen3_moe", "num_experts"), ("glm4_moe", "n_routed_experts")])
def test_routers_that_are_packed_rest_dense(model: str, key: str, tmp_path: Path) -> None:
    """AutoRound packs them, where nothing says that it shall not."""
    source = tiny.write(tiny.CASES[model], tmp_path / "source", **{key: 8})
    tensors = load_file(source / "model.safetensors")
    routers = tuple(name for name in tensors if name.endswith("mlp.gate.weight"))
    few, dense = checkpoints(source, tmp_path, gptq(4, 32, symmetric=False), also=routers)
    assert routers
    same_matrices(few, dense, ranks=2)
    with Checkpoint.open(few) as checkpoint:
        assert name_of(checkpoint.spec.format) == "gptq"
    assert outputs(few) == outputs(dense)


EXTRA = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq",
}  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "other"),
    [
        (".*self_attn\\.o_proj.*", {"bits": 8}),
        ("layers\\.\\d+\\.self_attn\\.o_", {"bits": 8, "group_size": 16}),
        (".*(q|o)_proj", {"bits": 16, "data_type": "float"}),
    ],
)
def test_a_pattern_names_modules_of_their_own(pattern: str, other: dict[str, object], tmp_path: Path) -> None:
    """AutoRound's `extra_config`, as vLLM reads it: a name, or else a pattern that is looked for in names."""
    bits, group = int(str(other["bits"])), int(str(other.get("group_size", 32)))
    scheme = None if bits == 16 else gptq(bits, group)
    others = dict.fromkeys(("o_proj", "q_proj") if "(" in pattern else ("o_proj",), scheme)
    few, dense = published("qwen3", gptq(4, 32), tmp_path, EXTRA | {"extra_config": {pattern: other}}, others)
    same_matrices(few, dense)


@pytest.mark.parametrize("key", ["extra_config", "modules_to_not_convert"])
def test_a_pattern_that_cannot_be_looked_for_is_refused(key: str) -> None:
    config: dict[str, object] = {**EXTRA} if key == "extra_config" else {"quant_method": "fp8"}
    pattern = "(?i).*O_PROJ"
    config = config | {key: {pattern: {"bits": 16}} if key == "extra_config" else [pattern]}
    with pytest.raises(UnsupportedModelError, match=key):
        read_format({"quantization_config": config}, "config.json", "float32")


@pytest.mark.parametrize(
    ("backend", "plus_one"),
    [("auto_round:gptq:exllamav2", True), ("gptq:exllamav2", True), ("auto_round:gptqmodel", False)],
)
def test_the_layout_of_old_autoround(backend: str, plus_one: bool, tmp_path: Path) -> None:
    """Intel's first repositories name a kernel, and themselves with their owner."""
    config = EXTRA | {"quant_method": "intel/auto-round", "backend": backend, "sym": False}
    del config["packing_format"]
    scheme = gptq(4, 32, symmetric=False, version=1 if plus_one else 2)
    few, dense = published("qwen3", scheme, tmp_path, config)
    same_matrices(few, dense)


def test_a_kernel_of_unknown_layout_is_refused() -> None:
    config = EXTRA | {"backend": "auto_round:exllamav2", "packing_format": None}
    with pytest.raises(
        UnsupportedModelError, match=r"key 'backend' is auto_round:exllamav2; supported: .*gptq"
    ):
        read_format({"quantization_config": config}, "config.json", "float32")


def test_scales_of_kv_are_not_read(tmp_path: Path) -> None:
    """As in Mixtral-8x7B-Instruct-v0.1-FP8: one for keys and values."""
    config: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "static"}
    config |= {"kv_cache_scheme": "static"}
    config |= {"ignored_layers": ["re:.*lm_head", "re:.*gate"]}

    def change(tensors: Tensors) -> Tensors:
        names = ("model.layers.0.self_attn.kv_scale", "model.layers.0.self_attn.q_proj.input_scale")
        return tensors | {name: torch.ones(1) for name in names}

    few, dense = published("mixtral", SCHEMES["fp8_tensor"], tmp_path, config, change=change)
    same_matrices(few, dense)


def test_old_settings_of_autoawq_beside_a_config(tmp_path: Path) -> None:
    """As in TheBloke's first ones."""
    files = {"quant_config.json": {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}}
    few, dense = published("llama", awq(32), tmp_path, files=files)
    same_matrices(few, dense)


MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
_NVIDIA: dict[str, tuple[dict[str, object], Scheme]] = {
    "W4A16_NVFP4": ({"group_size": 16}, SCHEMES["modelopt_nvfp4"]),
    "FP8_PER_CHANNEL_PER_TOKEN": ({}, fp8((1, 0), name="weight_scale", flat=True)),
    "FP8_PB_WO": ({}, fp8((128, 128), name="weight_scale")),
    "fp8_pb_wo": ({}, fp8((128, 128))),
}


@pytest.mark.parametrize("algorithm", _NVIDIA)
def test_algorithms_of_modelopt(algorithm: str, tmp_path: Path) -> None:
    """Scales of blocks have four extents, or are named and shaped as DeepSeek's."""
    more, scheme = _NVIDIA[algorithm]

    def change(tensors: Tensors) -> Tensors:
        square = algorithm == "FP8_PB_WO"
        return {
            name: one[:, None, :, None] if square and name.endswith("weight_scale") else one
            for name, one in tensors.items()
        }

    source = tiny.write(tiny.CASES["llama"], tmp_path / "source", hidden_size=256, intermediate_size=320)
    few, dense = published(
        source, scheme, tmp_path, MODELOPT | more | {"quant_algo": algorithm}, change=change
    )
    same_matrices(few, dense, ranks=2)


@pytest.mark.parametrize("experts", ["one by one", "together"])
def test_modelopt_of_several_algorithms(experts: str, tmp_path: Path) -> None:
    """A layer's experts may be named together; what is not named is dense."""
    wide = {"quant_algo": "FP8"}
    narrow = {"quant_algo": "NVFP4", "group_size": 16}
    layers: dict[str, object] = {}
    for layer in range(3):
        at = f"model.layers.{layer}"
        layers |= {f"{at}.self_attn.{one}_proj": wide for one in "qkv"}
        if experts == "together":
            layers[f"{at}.mlp.experts"] = narrow
            continue
        names = [f"{at}.mlp.experts.{number}" for number in range(6)]
        layers |= {f"{one}.{part}_proj": narrow for one in names for part in ("gate", "up", "down")}
    config = MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    others = {"o_proj": None, "self_attn": SCHEMES["modelopt_fp8"]}
    few, dense = published("qwen3_moe", SCHEMES["modelopt_nvfp4"], tmp_path, config, others)
    same_matrices(few, dense, ranks=2)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"quant_algo": "W4A16_AWQ"},
            "is W4A16_AWQ; supported: NVFP4, .*MIXED_PRECISION; use a checkpoint of the model",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}},
            "quantized_layers.a: key 'quant_algo' is W4A8_AWQ",
        ),
    ],
)
def test_other_algorithms_of_modelopt_are_refused(config: dict[str, object], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        read_format({"quantization_config": MODELOPT | config}, "config.json", "float32")


def test_weights_with_holes_are_refused() -> None:
    """2:4 sparsity, whose zeros are left out of the file: before anything is fetched or planned."""
    config = dict(SCHEMES["packed"].config)
    sparse = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]}
    for found in ({}, {"format": "dense"}):
        read_format({"quantization_config": config | {"sparsity_config": found}}, "config.json", "float32")
    with pytest.raises(UnsupportedModelError, match=r"sparsity_config: key 'format' is sparse-24-bitmask"):
        read_format({"quantization_config": config | {"sparsity_config": sparse}}, "config.json", "float32")


@pytest.mark.parametrize("also", [{}, {"quantization_config": {"group_size": 64, "bits": 4}}])
def test_weights_of_mlx_are_refused(also: dict[str, object]) -> None:
    """Which say so in a key of their own."""
    config = {"quantization": {"group_size": 64, "bits": 4}}
    with pytest.raises(UnsupportedModelError, match=r"key 'quantization' is MLX's.*GGUF"):
        read_format(config | also, "config.json", "bfloat16")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("adapter_config.json", "adapter_model.safetensors"), "no config.json; it holds a LoRA adapter"),
        (("params.json", "consolidated.safetensors"), r"no config.json; .*\(params.json\).* of Hugging Face"),
        (
            ("config.json", "consolidated.safetensors"),
            "consolidated.safetensors', whose tensors have the names",
        ),
        (("config.json", "gptq_model-4bit-128g.safetensors"), "rename 'gptq.*' to model.safetensors"),
        (("config.json", "model-00001-of-00002.safetensors"), "the download may not be complete"),
    ],
)
def test_directories_in_other_layouts(names: tuple[str, ...], said: str, tmp_path: Path) -> None:
    config = (tiny.checkpoint("llama") / "config.json").read_text()
    for name in names:
        (tmp_path / name).write_text(config)
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("patterns", [
    ["re:.*q_proj", "re:.*(k|v)_proj", "re:(?i).*O_PROJ"],
    ["re:(.*)(up)_proj", r"re:.*(.)\1_proj", "re:(?P<part>.*)down_proj"],
    ["re:a|.*gate_proj", "re:.*q_proj$", "re:(?P<part>.*)k_proj"],
])  # fmt: skip
def test_patterns_mean_together_what_each_means(patterns: list[str]) -> None:
    """Some are compiled as one; those with groups and flags of their own are not."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    config: dict[str, object] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config |= {"ignore": patterns, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    format = read_format({"quantization_config": config}, "config.json", "float32")
    for module in ("q", "k", "v", "o", "gate", "up", "down", "xx"):
        name = f"model.layers.0.{module}_proj"
        wanted = any(re.match(one.removeprefix("re:"), name) for one in patterns)
        assert (format.of(f"{name}.weight") == DENSE) == wanted, module


FEW_FLOATS: dict[str, tuple[dict[str, object], str]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, "modules_to_not_convert"),
    "modelopt_fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "ignore"),
    "modelopt_nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "exclude_modules"),
}


@pytest.mark.parametrize("scheme", FEW_FLOATS)
@pytest.mark.parametrize("listed", [[], ["lm_head", "model.layers.1"]])
def test_what_is_fp8_is_in_the_tensors(scheme: str, listed: list[str], tmp_path: Path) -> None:
    """A list that leaves modules out, or has some that are of few bits all the same."""
    config, key = FEW_FLOATS[scheme]
    named = listed if scheme == "fp8" else [f"{one}*" for one in listed]
    dense_too = {"o_proj": None, "layers.0.mlp.down_proj": None}
    config = config | {key: named}
    if key == "exclude_modules":  # As hf_quant_config.json has it.
        config = {"quant_method": "modelopt", "quantization": config}
    few, dense = published("llama", SCHEMES[scheme], tmp_path, config, dense_too)
    same_matrices(few, dense, ranks=2)
