"""Reads the tensors of GGUF files as those of a checkpoint: under its names, experts one by one, rows in its
order."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.arch.formats.gguf_blocks import PLAIN
from penstock.base.errors import CheckpointError
from penstock.memory.disk import DiskFile
from penstock.weights.checkpoint.safetensors import TensorEntry
from penstock.weights.checkpoint.shards import ShardTensor, TensorBytes
from penstock.weights.gguf.files import GGUFFiles, GGUFTensor
from penstock.weights.gguf.names import ROPE_FACTORS, Naming, Part
from penstock.weights.jsonfile import shown

_IGNORED = (ROPE_FACTORS,)
"""Tensors that the config has already been made from."""


class HeadRows:
    """Reads rows of queries or keys in the order of Hugging Face's checkpoints, half-split pairs.

    llama.cpp has the rows of a head of `dim` interleaved: rows i and i + dim / 2 of the head are its rows 2i
    and 2i + 1. Any number of threads may read at once.

    begin: bytes from the file's start to the first row.
    row: bytes of a row.
    """

    def __init__(self, file: DiskFile, begin: int, row: int, dim: int) -> None:
        self._file, self._begin, self._row, self._dim = file, begin, row, dim

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return self._file.path

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill all of `buffer` from byte `offset`, as if the file had the rows in order. Raises ReadError."""
        head_bytes, at, done = self._dim * self._row, offset - self._begin, 0
        while done < len(buffer):
            head, inside = divmod(at, head_bytes)
            stored = np.frombuffer(self._file.read(self._begin + head * head_bytes, head_bytes), np.uint8)
            ordered = stored.reshape(self._dim // 2, 2, self._row).swapaxes(0, 1).reshape(-1)
            count = min(head_bytes - inside, len(buffer) - done)
            buffer[done : done + count] = ordered[inside : inside + count].data
            at, done = at + count, done + count


@dataclass(frozen=True, slots=True)
class _Shaped:
    """Makes the tensors of a checkpoint of those of GGUF files."""

    naming: Naming
    head_dim: int

    def tensor(self, stored: GGUFTensor, part: Part) -> ShardTensor:
        """Return one part of a GGUF tensor. Quantised numbers are bytes, `[out, bytes of a row]`.

        Raises CheckpointError for quantised vectors, and for heads that are not whole.
        """
        info, what = stored.info, f"{stored.file.path}: tensor {shown(stored.info.name)}"
        plain = info.type.name in PLAIN
        if not plain and len(part.shape) != 2:
            raise CheckpointError(
                f"{what} is {list(info.shape)} of {info.type.name}; supported: {', '.join(PLAIN)} for all "
                "that is no matrix"
            )
        row = info.type.row_bytes(part.shape[-1])  # Of a vector: all of it.
        row = row if len(part.shape) > 1 else info.type.size
        offset = info.offset + part.first * row
        shape = part.shape if plain else (part.shape[0], row)
        entry = TensorEntry(info.type.name if plain else "U8", shape, offset, part.shape[0] * row)
        file: TensorBytes = stored.file
        if part.turned:
            if part.shape[0] % self.head_dim or self.head_dim % 2:
                raise CheckpointError(
                    f"{what} has {part.shape[0]} rows, which are no heads of {self.head_dim}; fetch the file "
                    "again"
                )
            file = HeadRows(stored.file, offset, row, self.head_dim)
        return ShardTensor(info.name, file, entry)


class GGUFWeights:
    """Holds GGUF files open, and their tensors by the names that checkpoints have for them."""

    described = "its metadata"

    def __init__(self, files: GGUFFiles, naming: Naming, head_dim: int) -> None:
        """Take over open files. Raises CheckpointError for tensors that cannot be read as a checkpoint's."""
        self._files, self._naming, self.files = files, naming, files.files
        shaped, self.tensors = _Shaped(naming, head_dim), dict[str, ShardTensor]()
        for name, stored in files.tensors.items():
            if name in _IGNORED:
                continue
            parts = list(naming.parts(stored.info))
            if not parts:  # Whoever knows what tensors there must be says that this one is not among them.
                info = stored.info
                entry = TensorEntry(info.type.name, info.shape, info.offset, info.size)
                self.tensors[name] = ShardTensor(name, stored.file, entry)
            for part in parts:
                self.tensors[part.name] = shaped.tensor(stored, part)

    def spelled(self, tensor: str) -> str:
        """Return the name of a tensor in these files."""
        return self._naming.spelled(tensor)

    def close(self) -> None:
        """Close the files."""
        self._files.close()
