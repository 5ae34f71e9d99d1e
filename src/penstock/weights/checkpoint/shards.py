"""Opens the weight files of a checkpoint directory: which there are, and in which of them each tensor is."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.base.errors import CheckpointError
from penstock.memory.disk import DiskFile
from penstock.weights.checkpoint.safetensors import TensorEntry, read_header
from penstock.weights.jsonfile import read_object, readable, shown
from penstock.weights.pieces import MANIFEST, STORE

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MODEL = "model."
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_PLAIN_NAME = re.compile(r"[^/\\\0\ud800-\udfff]+\.safetensors")
"""Names of a shard, beside its index: nothing that could lead out of the directory or that is no file name at
all."""

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
MAX_TENSORS = 500_000
"""Tensors that a checkpoint may have. The largest mixtures of experts have some 100,000."""


class TensorBytes(Protocol):
    """Gives the bytes of tensors: a file, or a view of one in which they lie in another order."""

    @property
    def path(self) -> Path:
        """Return the path of the file."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill all of `buffer` from byte `offset`. Raises ReadError."""


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """A tensor is in a file, under the name that the file has for it."""

    name: str
    file: TensorBytes
    entry: TensorEntry


class WeightFiles(Protocol):
    """Holds the weight files of a model open, and their tensors by the names that config.json leads to.

    described: what messages call the description that tensors must fit.
    """

    described: str

    @property
    def files(self) -> Sequence[DiskFile]:
        """Return the files."""

    @property
    def tensors(self) -> Mapping[str, ShardTensor]:
        """Return the tensors."""

    def spelled(self, tensor: str) -> str:
        """Return the name of a tensor in these files."""

    def close(self) -> None:
        """Close the files."""


class Shards:
    """Holds the weight files of a directory open, and their tensors by name. Headers are read, weights are
    not."""

    described = "config.json"

    def __init__(self, path: Path) -> None:
        """Open the files. Raises CheckpointError, naming the file, when weights are missing, damaged,
        ambiguous or in a format that is not read."""
        self.tensors: dict[str, ShardTensor] = {}
        self._alone = False
        """Whether the decoder was saved alone, so that names lack their first word."""
        weight_map = _weight_map(path)
        with ExitStack() as opened:
            self.files = [
                opened.enter_context(_open(path, name))
                for name in sorted(set(weight_map.values()) or {SINGLE})
            ]
            for file in self.files:
                self._add(file)
            for tensor, name in weight_map.items():
                if tensor not in self.tensors or self.tensors[tensor].file.path.name != name:
                    raise CheckpointError(
                        f"{path / INDEX} says that tensor {shown(tensor)} is in {name}, which does not hold "
                        "it; fetch both files again"
                    )
            self._name_as_whole()
            self._opened = opened.pop_all()

    def _name_as_whole(self) -> None:
        """Give the tensors of a decoder that was saved alone the names that they have in a whole model.

        Checkpoints that make embeddings are saved so.
        """
        if EMBEDDING in self.tensors or EMBEDDING.removeprefix(_MODEL) not in self.tensors:
            return
        self._alone = True
        self.tensors = {
            name if name == HEAD else _MODEL + name: tensor for name, tensor in self.tensors.items()
        }

    def _add(self, file: DiskFile) -> None:
        found = read_header(file)
        if len(self.tensors) + len(found) > MAX_TENSORS:
            raise CheckpointError(
                f"{file.path} and the files before it have more than {MAX_TENSORS:,} tensors, more than any "
                "model has; leave only the model's own .safetensors files in its directory"
            )
        for name, entry in found.items():
            if name in self.tensors:
                raise CheckpointError(
                    f"tensor {shown(name)} is in both {self.tensors[name].file.path} and {file.path.name}; "
                    "remove the file that is not of this model"
                )
            self.tensors[name] = ShardTensor(name, file, entry)

    @property
    def headless(self) -> bool:
        """Tell whether a decoder was saved alone, without its head."""
        return self._alone and HEAD not in self.tensors

    def spelled(self, tensor: str) -> str:
        """Return the same name, to which config.json leads; that of a decoder alone, where it is one."""
        return tensor.removeprefix(_MODEL) if self._alone else tensor

    def close(self) -> None:
        """Close the files."""
        self._opened.close()


def _open(path: Path, name: str) -> DiskFile:
    with readable():
        return DiskFile(path / name)


def _weight_map(path: Path) -> Mapping[str, str]:
    """Return which shard the index says each tensor is in; empty for a checkpoint of a single file, which
    comes first if both are there."""
    if os.path.lexists(path / SINGLE):  # Also a link to nowhere, which is a fault of its own.
        return {}
    if not os.path.lexists(path / INDEX):
        raise CheckpointError(_no_weights(path))
    weight_map = read_object(path / INDEX, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path / INDEX}: key 'weight_map' is {shown(weight_map)}; it must be an object from tensors to "
            "files; fetch the file again"
        )
    for name in weight_map.values():
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise CheckpointError(
                f"{path / INDEX} names the file {shown(name)}; it must be a .safetensors file of the same "
                "directory; fetch the file again"
            )
    return weight_map


def _no_weights(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        return f"cannot list {path}: {error.strerror}"
    tried = f"{path} has neither {SINGLE} nor {INDEX}"
    if STORE in names:
        return (
            f"{tried}; {STORE} is of a pack whose {MANIFEST} is not there any more; remove the directory, "
            "and pack the model again"
        )
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        return (
            f"{tried}, only pickle files ({shown(pickles[0])}), which are not read since they can run code; "
            "convert them to safetensors"
        )
    loose = [name for name in names if name.endswith(".safetensors")]
    if loose and all(name.startswith("consolidated") for name in loose):
        return (
            f"{tried}, though it has {shown(loose[0])}, whose tensors have the names of the model's maker; "
            "give the same model in the layout of Hugging Face"
        )
    if len(loose) == 1 and not _SHARD.search(loose[0]):
        return f"{tried}; rename {shown(loose[0])} to {SINGLE} if it is the whole model"
    if loose:
        return f"{tried}, though it has {shown(loose[0])}; the download may not be complete"
    return f"{tried}; it holds no weights that can be read"
