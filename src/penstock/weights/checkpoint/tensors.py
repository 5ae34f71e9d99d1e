"""Reads elements of a checkpoint's tensors, or of a rank's part of one, rounded to the wanted dtype."""

from dataclasses import dataclass
from math import prod
from typing import Self

import torch

from penstock.arch.formats.format import TensorSlice
from penstock.base.errors import CheckpointError
from penstock.weights.checkpoint.shards import ShardTensor
from penstock.weights.jsonfile import readable

STAGE_BYTES = 1 << 20
"""Bytes of a tensor whose dtype changes that are in passing at once in each thread: within the reach of a
core's cache."""
SERIAL = 32768
"""Elements converted by one call: as many as torch does without waking threads of its own, which would fight
with ours for cores."""
GAP_BYTES = 4096
"""Bytes between lines of a tensor below which they are read along: a smaller gap holds no page that a disk
could leave out."""
ROUNDED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
EXACT = {
    "I8": "int8",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Dtypes that are read only where a storage format asks for them; those above are rounded to each other."""


@dataclass(frozen=True, slots=True)
class Lines:
    """A source takes lines of its tensor, in elements: each of `width`, the first at `start`, then one every
    `pitch`."""

    start: int
    width: int
    pitch: int

    @classmethod
    def of(cls, source: TensorSlice) -> Self:
        """Return the lines that a source takes."""
        row, rows = prod(source.shape[1:]), source.rows or range(source.shape[0])
        start = (source.index or 0) * prod(source.shape) + rows.start * row
        if source.columns is not None:
            return cls(start + source.columns.start, len(source.columns), row * rows.step)
        if rows.step > 1:
            return cls(start, row, row * rows.step)
        return cls(start, prod(source.taken), prod(source.taken))


def stored_dtype(stored: ShardTensor) -> torch.dtype:
    """Return the dtype of a tensor as it is in its file."""
    kind: torch.dtype = getattr(torch, {**ROUNDED, **EXACT}[stored.entry.dtype])
    return kind


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, to be written."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def read_part(stored: ShardTensor, lines: Lines, dtype: str, first: int, into: torch.Tensor) -> None:
    """Fill `into`, flat uint8, with elements of a source as `dtype`, from its element `first`. Any thread
    may. Raises CheckpointError."""
    part = into.view(getattr(torch, dtype))
    line, begun = divmod(first, lines.width)
    at = lines.start + line * lines.pitch
    with readable():
        # The rest of a line that was begun, whole lines, and the beginning of another one.
        head = min(lines.width - begun, len(part)) if begun or lines.width == lines.pitch else 0
        if head:
            _read_run(stored, at + begun, part[:head])
            at += lines.pitch
        whole, tail = divmod(len(part) - head, lines.width)
        if whole:
            _read_lines(stored, lines, at, part[head : len(part) - tail].view(whole, -1))
            at += whole * lines.pitch
        if tail:
            _read_run(stored, at, part[len(part) - tail :])


def _read_lines(stored: ShardTensor, lines: Lines, at: int, into: torch.Tensor) -> None:
    """Fill `into` `[lines, width]` with lines of a stored tensor, the first at element `at`.

    They are read with what is between them if that is little, or else each by itself.
    """
    kind = stored_dtype(stored)
    together = (lines.pitch - lines.width) * kind.itemsize < GAP_BYTES
    if not together and kind is into.dtype:
        _read_each(stored, lines, at, into)
        return
    pitch = lines.pitch if together else lines.width
    stage = torch.empty(min(max(STAGE_BYTES // (pitch * kind.itemsize), 1), len(into)), pitch, dtype=kind)
    for part in torch.split(into, len(stage)):
        read = stage[: len(part)]
        if together:
            _read_run(stored, at, read.view(-1)[: read.numel() - pitch + lines.width])
        else:
            _read_each(stored, lines, at, read)
        _round(stored, read[:, : lines.width], part)
        at += len(part) * lines.pitch


def _read_each(stored: ShardTensor, lines: Lines, at: int, into: torch.Tensor) -> None:
    """Fill `into` `[lines, width]`, of the stored dtype, with one request for each line."""
    data, size = bytes_of(into), into.itemsize
    for number in range(len(into)):
        line = data[number * lines.width * size : (number + 1) * lines.width * size]
        stored.file.read_into(line, stored.entry.offset + (at + number * lines.pitch) * size)


def _read_run(stored: ShardTensor, first: int, into: torch.Tensor) -> None:
    """Fill `into`, flat, with elements of a stored tensor, from its element `first`, rounded to nearest even
    if need be."""
    kind = stored_dtype(stored)
    at = stored.entry.offset + first * kind.itemsize
    if kind is into.dtype:
        stored.file.read_into(bytes_of(into), at)
        return
    stage = torch.empty(min(STAGE_BYTES // kind.itemsize, len(into)), dtype=kind)
    for part in torch.split(into, len(stage)):
        read = stage[: len(part)]
        stored.file.read_into(bytes_of(read), at)
        at += read.nbytes
        _round(stored, read, part)


def _round(stored: ShardTensor, read: torch.Tensor, into: torch.Tensor) -> None:
    """Copy elements, flat or in lines, rounded to nearest even if the dtypes differ."""
    rows = max(SERIAL // prod(read.shape[1:]), 1)
    for block, filled in zip(torch.split(read, rows), torch.split(into, rows), strict=True):
        filled.copy_(block)
        narrowed = filled.dtype is torch.float16 and block.dtype is not torch.float16
        if narrowed and not all(extreme.isfinite() for extreme in torch.aminmax(filled)):
            raise CheckpointError(
                f"{stored.file.path}: tensor {stored.name} has values beyond float16; choose another dtype"
            )
