"""Storage formats of weight matrices: the tensors a format keeps of a matrix, how they are read, and what a
product costs.

A format is one file in this folder. Nothing here imports torch: a format is known before any tensor is. What
computes with tensors, `repack` and `dequantise`, uses their own methods alone, and kernels are named and
found by `ops`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor

STORED_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "int32": 4,
    "int64": 8,
    "float8_e8m0fnu": 1,
}
"""Bytes of one element of each dtype in which a tensor of a group may rest."""


WORDS, NUMBERS = ("int32",), ("float32", "float16", "bfloat16")
"""Dtypes of packed codes in checkpoints, and of scales."""
ALL = slice(None)
"""All rows of a matrix."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor, or a rank's rows or columns of it, that fills a run of rows of a field."""

    tensor: str
    shape: tuple[int, ...]
    """Of the whole tensor in the checkpoint."""
    rows: range | None = None
    columns: range | None = None
    """Which of them are taken; None is all."""
    also: tuple[str, ...] = ()
    """Other names that the tensor may have."""
    optional: bool = False
    """Whether it may be missing; `repack` is then given None."""
    loose: bool = False
    """Whether `shape` is checked by `repack`, since several are right."""
    dtypes: tuple[str, ...] = ()
    """What `repack` takes; nothing said is anything that is read."""

    @property
    def taken(self) -> tuple[int, ...]:
        """The shape of what is taken."""
        if self.rows is None and self.columns is None:
            return self.shape
        cuts = (self.rows, self.columns)[: len(self.shape)]
        return tuple(
            extent if part is None else len(part) for extent, part in zip(self.shape, cuts, strict=True)
        )


def matrix(
    tensor: str, height: int, width: int, *, rows: range | None = None, columns: range | None = None
) -> Source:
    """Return the source that is a matrix, or some of its rows or columns."""
    return Source(tensor, (height, width), _part(rows, height), _part(columns, width))


def vector(tensor: str, length: int, rows: range | None = None) -> Source:
    """Return the source that is a vector, or a part of it."""
    return Source(tensor, (length,), _part(rows, length))


def beside(source: Source, name: str) -> str:
    """Return the name of a tensor that belongs to the same module as a source's weight."""
    return f"{source.tensor.removesuffix('weight')}{name}"


def _part(taken: range | None, of: int) -> range | None:
    """Return None for all, however it is said: whole tensors are read in one run."""
    return None if taken == range(of) else taken


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor that a format keeps of a matrix: what it is called there, its shape, its dtype, and where it
    comes from.

    sources: one below the other. Tensors of a checkpoint that are floating-point numbers are rounded to a
    floating-point `dtype`; any other dtype must be the checkpoint's. repack: makes the tensor, of `shape` and
    `dtype`, of whole sources as they are in the checkpoint; without it they are taken as they lie. It raises
    CheckpointError, naming the tensor, for values that the format cannot have. It can be hashed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[Source, ...]
    repack: "Callable[[Sequence[Tensor | None]], Tensor] | None" = None
    random: range | None = None
    """Whole numbers from which to draw where weights do not matter; None is numbers of a usual size, or
    any."""


def stacked(name: str, dtype: str, sources: Sequence[Source]) -> Stored:
    """Return the tensor whose rows are those of `sources`, one below the other."""
    return Stored(
        name, (sum(source.taken[0] for source in sources), *sources[0].taken[1:]), dtype, tuple(sources)
    )


@dataclass(frozen=True)
class Format:
    """How a matrix `[out, in]` rests in memory. Two formats are equal if their fields are."""

    name: str
    """As a checkpoint's `quantization_config.quant_method` has it, or `dense`."""
    kernels: ClassVar[str] = ""
    """The module of `penstock.ops.triton` that computes products from the parts; empty where the reference
    does."""

    @property
    def fuses(self) -> bool:
        """Tell whether matrices in this format that read the same activations can be one matrix."""
        return True

    def of(self, tensor: str) -> "Format":
        """Return the format of the checkpoint's weight `tensor`, which may be excepted from this one."""
        return self

    def cut(self, sources: Sequence[Source]) -> "Format":
        """Return the format as these sources have it: where a cut or a join divides a group of numbers that
        share a scale, the groups become smaller.

        Raises ConfigError for a cut that the format does not allow.
        """
        return self

    def ignores(self, tensor: str) -> bool:
        """Tell whether checkpoints in this format may hold `tensor`, which no product of ours reads."""
        return False

    def stored(self, dtype: str, sources: Sequence[Source]) -> tuple[Stored, ...]:
        """Return the tensors that are kept of a matrix, in the order in which they lie in a group.

        dtype: of activations. sources: as for a dense matrix, each `[rows, in]`, cut for a rank; one below
        the other, the same as `cut` was given.
        """
        raise NotImplementedError

    def dequantise(self, parts: "Mapping[str, Tensor]", rows: slice = ALL) -> "Tensor":
        """Return the matrix `[out, in]` that `parts`, by their names in `stored`, stand for, or some of its
        rows one behind the other: the reference of all kernels."""
        raise NotImplementedError

    def operations(self, shape: tuple[int, ...], tokens: float) -> float:
        """Return the floating-point operations of a product of the matrix with so many tokens."""
        return 2 * prod(shape) * tokens
