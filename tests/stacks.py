"""Checkpoints of gpt-oss with changed tensors, and with experts in MXFP4."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
from quantised import SCHEMES

LEFT_ALONE = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
Tensors = dict[str, Tensor]


def rewritten(source: Path, path: Path, change: Callable[[Tensors], Tensors], **keys: object) -> Path:
    """A checkpoint with other tensors, and keys of config.json."""
    path.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text()) | keys
    (path / "config.json").write_text(json.dumps(config))
    tensors = change(load_file(source / "model.safetensors"))
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors")
    return path


def in_mxfp4(folder: Path, source: Path | None = None) -> tuple[Path, Path]:
    """A checkpoint whose experts are stacks of MXFP4, and the same model with dense ones."""
    source = source or tiny.write(tiny.CASES["gpt_oss"], folder / "source", intermediate_size=96)
    numbers, seed = Tensors(), torch.Generator().manual_seed(11)

    def few(tensors: Tensors) -> Tensors:
        found = Tensors()
        for name, one in tensors.items():
            if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
                found[name] = one
                continue
            made = [SCHEMES["mxfp4"].make(expert.t(), seed) for expert in one]
            blocks, scales = (
                torch.stack([its[key] for its, _ in made]) for key in ("weight_packed", "weight_scale")
            )
            found[f"{name}_blocks"] = blocks.unflatten(2, (-1, 16))
            found[f"{name}_scales"] = scales
            numbers[name] = torch.stack([matrix.t() for _, matrix in made])
        return found

    config = {"quant_method": "mxfp4", "modules_to_not_convert": LEFT_ALONE}
    path = rewritten(source, folder / "few", few, quantization_config=config)
    return path, rewritten(source, folder / "dense", lambda tensors: tensors | numbers)
