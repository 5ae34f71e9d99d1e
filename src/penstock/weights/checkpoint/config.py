"""Reads config.json of a model's directory. Nothing here imports torch: `penstock plan` does without."""

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.weights.jsonfile import MAX_CONFIG_BYTES, read_object

_BESIDE = {"quantize_config.json": "gptq", "hf_quant_config.json": "modelopt"}
"""Files in which quantisers write their settings if not in config.json, and the methods that these are of."""


def read_config(path: Path) -> Mapping[str, object]:
    """Return config.json of a model's directory, with what a quantiser has written beside it. Raises
    CheckpointError."""
    config = read_object(path / "config.json", MAX_CONFIG_BYTES)
    if config.get("quantization_config") is not None:
        return config
    for name, method in _BESIDE.items():
        if os.path.lexists(path / name):
            settings = read_object(path / name, MAX_CONFIG_BYTES)
            return config | {"quantization_config": {"quant_method": method} | settings}
    return config
