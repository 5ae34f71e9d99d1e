"""Reads config.json of a model's directory. Nothing here imports torch: `penstock plan` does without."""

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.base.errors import CheckpointError
from penstock.weights.gguf.config import read_gguf_config
from penstock.weights.gguf.files import GGUFFiles, is_gguf
from penstock.weights.jsonfile import MAX_CONFIG_BYTES, read_object

_BESIDE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files in which quantisers write their settings if not in config.json, and the methods that these are of."""


def expect_directory(path: Path) -> None:
    """Raise CheckpointError for what is no directory."""
    if not os.path.isdir(path):  # Unlike Path.is_dir, an answer also for a path that cannot be looked at.
        fault = (
            "is a file, and not of GGUF; name the directory it is in"
            if os.path.exists(path)
            else "does not exist; give a directory with a config.json, or a model of the Hugging Face Hub as "
            "owner/name"
        )
        raise CheckpointError(f"checkpoint {path} {fault}")


def read_config(path: Path) -> Mapping[str, object]:
    """Return config.json of a model's directory, with what a quantiser has written beside it, or what stands
    for it in a GGUF file. Raises CheckpointError, and UnsupportedModelError for a GGUF file."""
    if is_gguf(path):
        with GGUFFiles(path, whole=False) as files:
            return read_gguf_config(files)
    expect_directory(path)
    if not os.path.lexists(path / "config.json") and os.access(path, os.X_OK):
        raise CheckpointError(f"{path} has no config.json; {_hint(path)}")
    config = read_object(path / "config.json", MAX_CONFIG_BYTES)
    if config.get("quantization_config") is not None:
        return config
    for name, method in _BESIDE.items():
        if os.path.lexists(path / name):
            settings = read_object(path / name, MAX_CONFIG_BYTES)
            return config | {"quantization_config": {"quant_method": method} | settings}
    return config


def _hint(path: Path) -> str:
    """Return what to try with a directory that has no config.json."""
    if loose := sorted(path.glob("*.gguf")):
        return f"to load a GGUF file, give it by name: {loose[0]}"
    if os.path.lexists(path / "adapter_config.json"):
        return (
            "it holds a LoRA adapter: give the model that it was made for, and this directory as its adapter"
        )
    if os.path.lexists(path / "params.json"):
        return (
            "it is in the layout of the model's maker (params.json): give the same model in that of Hugging "
            "Face, with config.json and model.safetensors"
        )
    return "give a model's directory"
