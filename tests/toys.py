"""A storage format that penstock does not have, and checkpoints in it: int8 numbers with a scale for each
row.

In a checkpoint the scales of a matrix lie in one row, `[1, out]`, in float32 and inverted, so that they have
to be repacked.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
from penstock.arch.formats import methods
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import Format, Source, Stored, stacked

METHOD = "toy_int8"
SUFFIX = "_inverse_scale"


@dataclass(frozen=True)
class Rows:
    """Makes the scales of the rows that a rank takes of each matrix, one below the other."""

    taken: tuple[range | None, ...]

    def __call__(self, wholes: Sequence[Tensor]) -> Tensor:
        parts = [
            whole[0] if rows is None else whole[0, rows.start : rows.stop]
            for whole, rows in zip(wholes, self.taken, strict=True)
        ]
        return torch.cat(parts).reciprocal()


@dataclass(frozen=True)
class Int8(Format):
    """Numbers int8 `[out, in]` and scales float32 `[out]`, by which the rows are multiplied."""

    name: str = METHOD
    dense: tuple[str, ...] = ()
    """Parts of the names of matrices that rest dense."""

    def of(self, tensor: str) -> Format:
        return DENSE if any(part in tensor for part in self.dense) else self

    def stored(self, dtype: str, sources: Sequence[Source]) -> tuple[Stored, ...]:
        values = stacked("values", "int8", sources)
        scales = [Source(source.tensor + SUFFIX, (1, source.shape[0])) for source in sources]
        rows = Rows(tuple(source.rows for source in sources))
        return values, Stored("scale", (values.shape[0],), "float32", tuple(scales), rows)

    def dequantise(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["values"].float() * parts["scale"][:, None]


@contextmanager
def known() -> Iterator[None]:
    """Penstock reads checkpoints in this format."""
    with patch.dict(
        methods.FORMATS, {METHOD: lambda config, where: Int8(dense=tuple(config.get("dense", ())))}
    ):
        yield


def checkpoints(name: str, folder: Path, dense: Sequence[str] = ()) -> tuple[Path, Path]:
    """A tiny checkpoint in this format, and a dense one, float32, that is the same model."""
    source = tiny.checkpoint(name)
    few, same = folder / "few", folder / "dense"
    numbers, plain = dict[str, Tensor](), dict[str, Tensor]()
    for file in source.glob("*.safetensors"):
        for tensor, value in load_file(file).items():
            inside = (
                ".layers." in tensor
                and value.dim() == 2
                and not tensor.endswith(("mlp.gate.weight", "sparse_moe.gate.weight"))
            )
            if not inside or any(part in tensor for part in dense):
                numbers[tensor] = plain[tensor] = value
                continue
            inverse = 127 / value.float().abs().amax(1)
            int8 = (value.float() * inverse[:, None]).round().to(torch.int8)
            numbers[tensor], numbers[tensor + SUFFIX] = int8, inverse[None].clone()
            plain[tensor] = int8.float() * inverse.reciprocal()[:, None]
    for path, tensors in ((few, numbers), (same, plain)):
        path.mkdir()
        for file in source.glob("*.json"):
            if "safetensors" not in file.name:
                shutil.copy(file, path)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        if path is few:
            config["quantization_config"] = {"quant_method": METHOD, "dense": list(dense)}
        (path / "config.json").write_text(json.dumps(config))
    return few, same
