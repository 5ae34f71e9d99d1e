"""Checkpoints as their makers publish them, small: their configs, names of tensors, and what else is there.

`quantised` makes the matrices. What is added here is what a quantiser, or a publisher, does beyond.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
from penstock.base.errors import CheckpointError
from quantised import SCHEMES, Scheme, checkpoints, gptq, matrices, same_matrices

Tensors = dict[str, Tensor]


def published(
    model: str, scheme: Scheme, folder: Path, config: Mapping[str, object] | None = None,
    others: Mapping[str, Scheme | None] | None = None, change: Callable[[Tensors], Tensors] = dict,
    files: Mapping[str, object] | None = None,
) -> tuple[Path, Path]:  # fmt: skip
    """A checkpoint and the same model dense.

    config: its `quantization_config`; None for none. change: makes other tensors of those of the file. files:
    JSON beside them.
    """
    few, dense = checkpoints(tiny.checkpoint(model), folder, scheme, others)
    written = json.loads((few / "config.json").read_text()) | {"quantization_config": config}
    (few / "config.json").write_text(json.dumps({k: v for k, v in written.items() if v is not None}))
    weights = few / "model.safetensors"
    save_file(change(load_file(weights)), weights, {"format": "pt"})
    for name, content in (files or {}).items():
        (few / name).write_text(json.dumps(content))
    return few, dense


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
