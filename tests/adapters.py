"""LoRA adapters of random numbers, written as PEFT writes them, and the models that they make of a base
model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def write(
    path: Path,
    base: Path,
    rank: int = 8,
    targets: Sequence[str] = EVERY,
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> Path:
    """An adapter of a checkpoint whose weights are in files. `config` changes what it says of itself."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for file in sorted(base.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            module = name.removesuffix(".weight")
            if weight.ndim == 2 and module.endswith(tuple(targets)) and ".experts." not in module:
                height, width = weight.shape
                a = torch.randn(rank, width, generator=generator) / width**0.5
                b = torch.randn(height, rank, generator=generator) * 0.3
                tensors[f"{PREFIX}{module}.lora_A.weight"] = a.to(dtype)
                tensors[f"{PREFIX}{module}.lora_B.weight"] = b.to(dtype)
    path.mkdir()
    save_file(tensors, path / TENSORS)
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(targets)}
    (path / CONFIG).write_text(json.dumps(said | config))
    return path


def change(path: Path, tensors: Mapping[str, Tensor | None] | None = None, **config: object) -> Path:
    """Change an adapter's tensors, None to remove one, and what it says of itself."""
    if tensors is not None:
        kept = load_file(path / TENSORS) | dict(tensors)
        save_file({name: one for name, one in kept.items() if one is not None}, path / TENSORS)
    said = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(said | config))
    return path


def merged(base: Path, adapter: Path) -> transformers.PreTrainedModel:
    """The base model in float32, as transformers runs it, with the adapter added to its weights."""
    model, config = tiny.load(base), json.loads((adapter / CONFIG).read_text())
    tensors = load_file(adapter / TENSORS)
    root = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            at = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
            if f"{at}A.weight" in tensors:
                a, b = (tensors[f"{at}{side}.weight"].double() for side in "AB")
                weight.add_((config["lora_alpha"] / root * (b @ a)).float())
    return model


@torch.inference_mode()
def logprobs(model: torch.nn.Module, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """What a model in transformers draws each token of an output from, `[output, vocab]` in float64."""
    logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
    return logits.double().log_softmax(-1)
