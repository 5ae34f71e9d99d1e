"""Reads config.json of a model's directory. Nothing here imports torch: `penstock plan` does without."""

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.base.errors import CheckpointError
from penstock.weights.gguf.config import read_gguf_config
from penstock.weights.gguf.files import GGUFFiles, is_gguf
from penstock.weights.jsonfile import MAX_CONFIG_BYTES, read_object

_BESIDE = {"quantize_config.json": "gptq", "hf_quant_config.json": "modelopt"}
"""Files in which quantisers write their settings if not in config.json, and the methods that these are of."""


def read_config(path: Path) -> Mapping[str, object]:
    """Return config.json of a model's directory, with what a quantiser has written beside it, or what stands
    for it in a GGUF file. Raises CheckpointError, and UnsupportedModelError for a GGUF file."""
    if is_gguf(path):
        with GGUFFiles(path, whole=False) as files:
            return read_gguf_config(files)
    if not os.path.lexists(path / "config.json") and (loose := sorted(path.glob("*.gguf"))):
        raise CheckpointError(f"{path} has no config.json; to load a GGUF file, give it by name: {loose[0]}")
    config = read_object(path / "config.json", MAX_CONFIG_BYTES)
    if config.get("quantization_config") is not None:
        return config
    for name, method in _BESIDE.items():
        if os.path.lexists(path / name):
            settings = read_object(path / name, MAX_CONFIG_BYTES)
            return config | {"quantization_config": {"quant_method": method} | settings}
    return config
