"""Lets a dense checkpoint be packed in a format of few bits: groups are quantised as they are asked for.

A matrix is read and quantised by runs of rows, so that memory holds a group of few bits and some of these,
however large the model is. The same rows give the same bytes, in whatever order groups are asked for.

Why this is safe with several threads: a group is made under a lock of its own by whoever asks for a piece of
it first. Its bytes go when all its pieces have been taken.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd, prod
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from penstock.arch.families import TensorNames, read_spec
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.floats import Float8
from penstock.arch.formats.format import WeightFormat
from penstock.arch.formats.integers import Integers
from penstock.arch.formats.joined import Joined
from penstock.arch.formats.recipe import GROUPS, METHOD, Recipe
from penstock.arch.layout import ALIGNMENT, Field, GroupId, GroupLayout, MatrixLayout, group_layouts
from penstock.arch.shards import WHOLE, Shard
from penstock.arch.spec import ModelSpec
from penstock.base.errors import CheckpointError, ConfigError
from penstock.ops.quantise import quantise
from penstock.weights.checkpoint.config import read_config
from penstock.weights.checkpoint.generation import GenerationDefaults
from penstock.weights.checkpoint.reader import FINGERPRINT_BYTES, Checkpoint
from penstock.weights.pack.reader import in_order
from penstock.weights.pieces import PAGE

_CPU_NUMBERS, _GPU_NUMBERS = 1 << 20, 1 << 25
"""Numbers of a matrix that are quantised at a time."""
_READERS = 4
"""Threads that read such runs of rows; twice as many are read ahead."""


@dataclass
class _Making:
    """Holds a group that is being taken. left: bytes that have not been taken yet."""

    left: int
    bytes: Tensor | None = None
    lock: Lock = field(default_factory=Lock)


class QuantisedCheckpoint:
    """Stands where a Checkpoint does for `write_pack`, and reads its weights in a format of few bits."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        dtype: str,
        device: torch.device,
        shard: Shard = WHOLE,
    ) -> None:
        """Read nothing yet. dtype: of all that stays dense. device: where numbers are computed. shard: the
        rank's part of the model that is read.

        Raises ConfigError for a checkpoint that is quantised already, for groups that do not divide the width
        of a matrix, and for names of modules that no matrix has.
        """
        if checkpoint.spec.format != DENSE:
            raise ConfigError(
                f"{checkpoint.path} is quantised already; give the checkpoint in bfloat16, float16 or "
                "float32 that it was made from"
            )
        self.path: Path = checkpoint.path
        self.config: Mapping[str, object] = {**checkpoint.config, "quantization_config": recipe.config()}
        self.spec: ModelSpec = replace(
            read_spec(self.config, str(checkpoint.path / "config.json")), dtype=checkpoint.spec.dtype
        )
        self.names: TensorNames = checkpoint.names
        self.recipe, self.shard = recipe, shard
        self._checkpoint, self._device, self._dtype = checkpoint, device, dtype
        self._dense = {one.id: one for one in group_layouts(checkpoint.spec, checkpoint.names, dtype, shard)}
        layouts = group_layouts(self.spec, self.names, dtype, shard)
        _expect_groups(layouts, recipe)
        _expect_modules(layouts, recipe)
        self.bits = _bits(layouts)
        """The mean bits of a weight that is quantised, with scales and zero points."""
        self._making = dict[GroupId, _Making]()
        self._lock, self._computing = Lock(), Lock()
        self._lost = self._whole = 0.0

    @property
    def dense_bytes(self) -> int:
        """Return the bytes of the weights as they are in the checkpoint's format."""
        return sum(layout.size for layout in self._dense.values())

    @property
    def error(self) -> float:
        """Return the mean relative error of the matrices that were quantised here: the root of the sum of
        squares of all differences over that of all numbers. It is 0 where none was."""
        return (self._lost / self._whole) ** 0.5 if self._whole else 0.0

    def verify(self, layouts: Sequence[GroupLayout]) -> None:
        """Check the dense checkpoint as `Checkpoint.verify` does; `layouts` are not looked at."""
        # A rank may lack some tensors of others.
        self._checkpoint.verify(group_layouts(self._checkpoint.spec, self.names, self._dtype))

    @property
    def generation(self) -> GenerationDefaults:
        """Return what `Checkpoint.generation` does."""
        return self._checkpoint.generation

    def identify(self) -> int:
        """Return what `Checkpoint.identify` does."""
        return self._checkpoint.identify()

    def fingerprint(self) -> bytes:
        """Return FINGERPRINT_BYTES, a digest of the checkpoint's fingerprint and of the recipe. Raises
        CheckpointError."""
        what = [self._checkpoint.fingerprint().hex(), self.recipe.config()]
        return hashlib.sha256(json.dumps(what).encode()).digest()[:FINGERPRINT_BYTES]

    def side_file(self, name: str) -> bytes:
        """Return a file beside the weights, config.json with the recipe. Raises CheckpointError."""
        if name == "config.json":
            return json.dumps(self.config, indent=2).encode() + b"\n"
        return self._checkpoint.side_file(name)

    def made_files(self) -> Mapping[str, bytes]:
        """Return what `Checkpoint.made_files` does, config.json with the recipe. Raises what that raises."""
        made = self._checkpoint.made_files()
        return {**made, "config.json": self.side_file("config.json")} if made else made

    def expect_unchanged(self) -> None:
        """Raise CheckpointError where `Checkpoint.expect_unchanged` does."""
        self._checkpoint.expect_unchanged()

    def read_piece(self, layout: GroupLayout, start: int, into: Tensor) -> None:
        """Fill `into`, flat uint8 on the CPU, with a part of a group, as `Checkpoint.read_piece` does. Any
        thread may; each piece of a group is asked for once, or once again after an error.

        Raises CheckpointError for a matrix with numbers that are none.
        """
        dense = self._dense[layout.id]
        if all(matrix.format == DENSE for matrix in layout.matrices):
            self._checkpoint.read_piece(dense, start, into)
            return
        with self._lock:
            made = self._making.setdefault(layout.id, _Making(-(-layout.size // PAGE) * PAGE))
        with made.lock:
            if made.bytes is None:
                made.bytes = self._group(layout, dense)
            part = made.bytes[start : start + len(into)]
            into[: len(part)] = part
            into[len(part) :].zero_()
            made.left -= len(into)
        if made.left <= 0:
            with self._lock:
                self._making.pop(layout.id, None)

    def _group(self, layout: GroupLayout, dense: GroupLayout) -> Tensor:
        """Return the bytes of a group, flat uint8."""
        place = torch.zeros(layout.size, dtype=torch.uint8)
        fields = {field.name: field for field in dense.fields}
        kept = {
            **{vector.name: vector for vector in layout.vectors},
            **{matrix.name: matrix.parts[0][1] for matrix in layout.matrices if matrix.format == DENSE},
        }
        for name, to in kept.items():
            self._checkpoint.read_piece(dense, fields[name].offset, place[to.offset : to.offset + to.size])
        for matrix in layout.matrices:
            if matrix.format != DENSE:
                self._matrix(matrix, dense, fields[matrix.name], place)
        return place

    def _matrix(self, matrix: MatrixLayout, dense: GroupLayout, source: Field, place: Tensor) -> None:
        """Quantise a matrix into its place in a group."""
        parts = {
            name: place[field.offset : field.offset + field.size]
            .view(getattr(torch, field.dtype))
            .view(field.shape)
            for name, field in matrix.parts
        }
        of_each = [(matrix.format, matrix.shape[0], parts)]
        if isinstance(matrix.format, Joined):
            of_each = matrix.format.apart(parts)
        first = 0
        for format, height, its in of_each:
            runs = _runs(format, height, matrix.shape[1], self._device)
            reading = (partial(self._rows, dense, source, first + run.start, len(run)) for run in runs)
            with closing(in_order(reading, _READERS)) as read:
                for run, rows in zip(runs, read, strict=True):
                    if not self._quantise(rows, format, run, its):
                        tensors = ", ".join(one.tensor for one in source.sources)
                        raise CheckpointError(
                            f"{self.path}: {tensors} has numbers that are infinite or none; download it again"
                        )
            first += height

    def _quantise(self, rows: Tensor, format: WeightFormat, run: range, parts: Mapping[str, Tensor]) -> bool:
        """Quantise rows of a matrix, and write them where they belong in its parts. Return False if not all
        of them are numbers."""
        with self._computing:  # A CPU has no more threads than one of these takes, and a GPU not the memory.
            wide = rows.to(self._device).float()
            if not bool(wide.isfinite().all()):
                return False
            made, stands = quantise(wide, format)
            for name, part in made.items():
                above = format.down if isinstance(format, Float8) and name == "scale" else 1
                begin = run.start // above
                parts[name][begin : begin + len(part)].copy_(part)
            self._lost += float((wide - stands).square_().sum(dtype=torch.float64))
            self._whole += float(wide.square().sum(dtype=torch.float64))
        return True

    def _rows(self, dense: GroupLayout, source: Field, first: int, count: int) -> Tensor:
        """Return `count` rows of a dense matrix, in its dtype."""
        width, kind = source.shape[1], getattr(torch, source.dtype)
        begin = source.offset + first * width * kind.itemsize
        before = begin % ALIGNMENT
        read = torch.empty(before + count * width * kind.itemsize, dtype=torch.uint8)
        self._checkpoint.read_piece(dense, begin - before, read)
        return read[before:].view(kind).view(count, width)


def _runs(format: WeightFormat, height: int, width: int, device: torch.device) -> list[range]:
    """Return the rows of a matrix that are quantised at a time: whole blocks of the format."""
    numbers = _CPU_NUMBERS if device.type == "cpu" else _GPU_NUMBERS
    down = format.down if isinstance(format, Float8) else 1
    each = max(numbers // width // down, 1) * down
    return [range(first, min(first + each, height)) for first in range(0, height, each)]


def recipe_in(folder: Path) -> Recipe | None:
    """Return the recipe of the pack in a directory, finished or not; None for anything else."""
    try:
        config = read_config(folder)
    except CheckpointError:
        return None
    asked = config.get("quantization_config")
    if not isinstance(asked, dict) or asked.get("quant_method") != METHOD:
        return None
    return Recipe.read(asked, str(folder / "config.json"))


def _expect_groups(layouts: Sequence[GroupLayout], recipe: Recipe) -> None:
    """Raise ConfigError unless groups divide the rows of every matrix."""
    widths = dict[int, str]()
    for layout in layouts:
        for matrix in layout.matrices:
            formats = matrix.format.formats if isinstance(matrix.format, Joined) else (matrix.format,)
            if any(isinstance(one, Integers) for one in formats):
                widths.setdefault(matrix.shape[1], f"{layout.id} {matrix.name}")
    common = gcd(*widths)
    other = f"--group a divisor of {common}, or --to fp8" if common in GROUPS else "--to fp8"
    for width, name in widths.items():
        if width % recipe.group:
            raise ConfigError(
                f"groups of {recipe.group} do not divide the {width} columns of {name}; give {other}"
            )


def _bits(layouts: Iterable[GroupLayout]) -> float:
    few = [matrix for layout in layouts for matrix in layout.matrices if matrix.format != DENSE]
    size = sum(field.size for matrix in few for _, field in matrix.parts)
    return 8 * size / sum(prod(matrix.shape) for matrix in few)


def _expect_modules(layouts: Iterable[GroupLayout], recipe: Recipe) -> None:
    """Raise ConfigError for a name of modules to keep in eight bits that is no part of the name of any matrix
    that is quantised."""
    matrices = (matrix for layout in layouts for matrix in layout.matrices if matrix.format != DENSE)
    names = {one.tensor for matrix in matrices for _, field in matrix.parts for one in field.sources}
    for part in recipe.int8:
        if not any(part in name for name in names):
            raise ConfigError(f"no module that is quantised has {part!r} in its name; give --int8 another")
