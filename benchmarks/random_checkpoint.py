"""Write a checkpoint of random weights in a shape, for benchmarks that need files."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock.api.llm import SHIPPED_MODEL
from penstock.arch.layout import group_layouts
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.source import RandomSource


def write_checkpoint(folder: Path, config: Mapping[str, object]) -> None:
    """A model of that config.json, of random weights in bfloat16, a file for each group, and with a text for
    each token."""
    folder.mkdir()
    model, numbers = Shape.of(config), RandomSource("bfloat16")
    (folder / "config.json").write_text(json.dumps(dict(config)))
    places = dict[str, str]()
    for number, layout in enumerate(group_layouts(model.spec, model.names, "bfloat16"), start=1):
        group, tensors = torch.empty(layout.size, dtype=torch.uint8), dict[str, torch.Tensor]()
        numbers.read(layout, 0, group, False)
        for field in layout.fields:
            whole = group[field.offset :].view(torch.bfloat16)[: math.prod(field.shape)].view(field.shape)
            parts = whole.split_with_sizes([source.shape[0] for source in field.sources])
            tensors |= {source.tensor: part for source, part in zip(field.sources, parts, strict=True)}
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    tokenizer = json.loads((SHIPPED_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    words |= {
        f"\u0120word{token}": token for token in range(len(words), model.spec.vocab_size)
    }  # That letter is a space there.
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_bytes((SHIPPED_MODEL / "tokenizer_config.json").read_bytes())
