"""Reads LoRA adapters from directories as PEFT writes them: adapter_config.json and
adapter_model.safetensors.

An adapter's digest is of both files' bytes, and of the very bytes that were read. Two adapters of one digest
are one.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.arch.lora import TARGETS, LoraPlace, lora_places, read_lora_config
from penstock.arch.shards import WHOLE
from penstock.arch.spec import ModelSpec
from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.base.units import format_size
from penstock.memory.disk import DiskFile
from penstock.weights.checkpoint.safetensors import MAX_HEADER_BYTES, TensorEntry, parse_header
from penstock.weights.jsonfile import MAX_CONFIG_BYTES, parse_object, readable, shown

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MOST_BYTES = 16 << 30
"""Bytes of an adapter: rank 64 of the largest models takes a few GB."""
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class LowRank(NamedTuple):
    """Holds the two matrices of a module: A `[rank, in]`, and B `[rank, out]`, turned and scaled."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """Holds an adapter that has been read and suits the model.

    path: its directory. digest: of its files. rank: the largest of any module.
    modules: by their names in the model's checkpoint.
    """

    path: Path
    digest: bytes
    rank: int
    modules: Mapping[str, LowRank]

    @classmethod
    def read(cls, path: Path, spec: ModelSpec, dtype: str) -> "Adapter":
        """Read the adapter in a directory for a model, in the dtype of its activations.

        Raises CheckpointError for files that are missing, damaged or another model's, and
        UnsupportedModelError for what adapters may be and this engine does not run.
        """
        config_bytes, data = _bytes_of(path, CONFIG), _bytes_of(path, TENSORS)
        where = str(path / CONFIG)
        config = read_lora_config(parse_object(config_bytes, where), where)
        parts = [hashlib.sha256(one).digest() for one in (config_bytes, data)]
        digest = hashlib.sha256(b"".join(parts)).digest()
        entries, places = _entries(data, path / TENSORS), lora_places(spec, WHOLE)
        names = sorted({_module(name, places, path / TENSORS) for name in entries})
        if not names:
            raise CheckpointError(f"{path / TENSORS} has no tensors; give the directory of a trained adapter")
        modules = {}
        for name in names:
            a, b = _low_rank(name, entries, data, places[name], config.rank_of(name), path)
            kind: torch.dtype = getattr(torch, dtype)
            pair = LowRank(a.to(kind), (b.t().float() * config.scaling_of(name)).to(kind))
            if not all(bool(one.isfinite().all()) for one in pair):
                raise UnsupportedModelError(
                    f"{path / TENSORS}: module {shown(name)} has numbers that are none, or too large for "
                    f"{dtype}; try bfloat16 or float32, or fetch the file again"
                )
            modules[name] = pair
        return cls(path, digest, max(len(one.a) for one in modules.values()), modules)


def config_rank(path: Path) -> int:
    """Return the largest rank that the adapter in a directory may have, by its config. Raises as
    `Adapter.read`."""
    where = str(path / CONFIG)
    return read_lora_config(parse_object(_bytes_of(path, CONFIG), where), where).most


def _bytes_of(path: Path, name: str) -> bytearray:
    file, limit = path / name, MAX_CONFIG_BYTES if name == CONFIG else MOST_BYTES
    try:
        there = file.is_file()
    except OSError:  # Opening it says why.
        there = True
    if not there:
        raise CheckpointError(
            f"{path} is no LoRA adapter: it has no {name}; give a directory that PEFT's save_pretrained has "
            "written"
        )
    with readable(), DiskFile(file) as opened:
        if opened.size > limit:
            raise CheckpointError(
                f"{file} is {format_size(opened.size)}, more than the {format_size(limit)} it may have"
            )
        return opened.read(0, opened.size)


def _entries(data: bytearray, file: Path) -> dict[str, TensorEntry]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f"{file} is no safetensors file, or is cut short; fetch it again")
    return parse_header(data[8 : 8 + length], len(data), str(file))


def _module(tensor: str, places: Mapping[str, LoraPlace], file: Path) -> str:
    """Return the module that a tensor belongs to. Raise UnsupportedModelError for what belongs to none."""
    module = tensor.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
    if tensor not in (f"{_PREFIX}{module}{end}" for end in (_A, _B)):
        raise UnsupportedModelError(
            f"{file}: tensor {shown(tensor)} is no matrix of LoRA; supported are {_A[1:]} and {_B[1:]} of "
            "modules"
        )
    if module not in places:
        raise UnsupportedModelError(
            f"{file}: module {shown(module)} is changed, which is not supported or not in this model; "
            f"supported are {', '.join(TARGETS)} of its layers, but not within experts"
        )
    return module


def _low_rank(
    module: str,
    entries: Mapping[str, TensorEntry],
    data: bytearray,
    place: LoraPlace,
    rank: int,
    path: Path,
) -> tuple[Tensor, Tensor]:
    """Return A and B of a module, as they are in the file. Raise CheckpointError unless both are there, suit
    the weight and have the rank that the config promises."""
    height, width = place.source.shape
    found = list[Tensor]()
    for end, shape in ((_A, (rank, width)), (_B, (height, rank))):
        name = f"{_PREFIX}{module}{end}"
        entry = entries.get(name)
        if entry is None:
            raise CheckpointError(f"{path / TENSORS} has no tensor {shown(name)}; fetch the file again")
        if entry.shape != shape or entry.dtype not in _DTYPES:
            raise CheckpointError(
                f"{path / TENSORS}: tensor {shown(name)} is {list(entry.shape)} of {entry.dtype}, but the "
                f"model and the rank {rank} of {CONFIG} need {list(shape)} of {', '.join(_DTYPES)}; give an "
                "adapter of this base model"
            )
        own = data[entry.offset : entry.offset + entry.size]  # A copy, which is aligned.
        found.append(torch.frombuffer(own, dtype=_DTYPES[entry.dtype]).view(shape))
    a, b = found
    return a, b
