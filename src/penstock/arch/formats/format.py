"""Declares what a storage format of weight matrices (a quantisation method) is.

A format says which tensors it keeps of a matrix, how they are read and repacked, and what a product costs.
Each format is one file in this folder. Nothing here imports torch, since formats are needed before tensors
are: `repack` and `dequantise` call methods of the tensors that they get. Kernels are found by `ops`.
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
"""Bytes of one element, by dtype: the dtypes that a tensor of a group may have."""


WORDS, NUMBERS = ("int32",), ("float32", "float16", "bfloat16")
"""Dtypes of packed codes in checkpoints, and of scales."""
ALL = slice(None)
"""All rows of a matrix."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A slice is a checkpoint tensor, or a rank's rows or columns of it. It fills a run of rows of a field.

    tensor: name in the checkpoint.
    shape: shape of the whole tensor there.
    rows, columns: the part that is taken. None takes all. Rows may lie apart, at equal distances.
    index: which tensor of a stack is meant, such as one expert's; `shape` is then that of one tensor.
    transposed: whether the checkpoint has the matrix as `[in, out]`. Shape, rows and columns are those of
        `[out, in]`, and so are those of the tensor that `repack` gets. Such a slice needs a `repack`.
    """

    tensor: str
    shape: tuple[int, ...]
    rows: range | None = None
    columns: range | None = None
    also: tuple[str, ...] = ()
    optional: bool = False
    loose: bool = False
    dtypes: tuple[str, ...] = ()
    index: int | None = None
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor in the checkpoint, of one of a stack."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def taken(self) -> tuple[int, ...]:
        """Return the shape of the part that is taken."""
        if self.rows is None and self.columns is None:
            return self.shape
        cuts = (self.rows, self.columns)[: len(self.shape)]
        return tuple(
            extent if part is None else len(part) for extent, part in zip(self.shape, cuts, strict=True)
        )


def matrix(
    tensor: str, height: int, width: int, *, rows: range | None = None, columns: range | None = None
) -> TensorSlice:
    """Return the slice that is a matrix `[height, width]`, or some of its rows or columns."""
    return TensorSlice(tensor, (height, width), _part(rows, height), _part(columns, width))


def vector(tensor: str, length: int, rows: range | None = None) -> TensorSlice:
    """Return the slice that is a vector `[length]`, or a part of it."""
    return TensorSlice(tensor, (length,), _part(rows, length))


def beside(source: TensorSlice, name: str) -> str:
    """Return the name of a tensor that belongs to the same module as a source's weight."""
    return f"{source.tensor.removesuffix('weight')}{name}"


def _part(taken: range | None, of: int) -> range | None:
    """Return None if all of an extent is taken: a whole tensor is read in one run."""
    return None if taken == range(of) else taken


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor is in a file of a checkpoint: the file's path, and dtype and shape there."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A stored tensor is one of those that a format keeps of a matrix.

    name: unique within the matrix.
    shape, dtype: of the tensor as it is kept.
    sources: slices of the checkpoint, one below the other. Floating-point numbers are rounded to a
        floating-point `dtype`. Any other dtype must be the checkpoint's.
    repack: makes the tensor of the whole sources as the checkpoint has them, and can be hashed. It raises
        CheckpointError, naming the tensor, for values that the format cannot have. Without it sources are
        only joined.
    random: whole numbers from which to draw where weights do not matter. None draws numbers of a usual size,
        or any.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[TensorSlice, ...]
    repack: "Callable[[Sequence[Tensor | None]], Tensor] | None" = None
    random: range | None = None


def stacked(name: str, dtype: str, sources: Sequence[TensorSlice]) -> StoredTensor:
    """Return the tensor that joins the rows of `sources`, one below the other."""
    return StoredTensor(
        name, (sum(source.taken[0] for source in sources), *sources[0].taken[1:]), dtype, tuple(sources)
    )


@dataclass(frozen=True)
class WeightFormat:
    """A format (quantisation method) says how a matrix `[out, in]` rests in memory.

    Two formats are equal if their fields are.
    """

    name: str
    """The `quantization_config.quant_method` of a checkpoint, or "dense"."""
    kernels: ClassVar[str] = ""
    """Module of `penstock.ops.triton` that computes products. If empty, products dequantise."""
    native: ClassVar[str] = ""
    """Module of `penstock.ops.native` that computes products on a CPU. If empty, products dequantise."""

    @property
    def fuses(self) -> bool:
        """Tell whether matrices in this format that read the same activations can be one matrix."""
        return True

    @property
    def expert_kernels(self) -> str:
        """Return the module of `penstock.ops.triton` whose `products` computes many experts at once. If
        empty, a GPU computes one expert after another.

        Its table has the addresses of all tensors of an expert, in the order of the expert's group.
        """
        return ""

    def of(self, tensor: str) -> "WeightFormat":
        """Return the format of one weight of the checkpoint. A format may exclude weights by name."""
        return self

    def cut(self, sources: Sequence[TensorSlice]) -> "WeightFormat":
        """Return the format as these slices have it.

        Where a cut or a join divides a group of numbers that share a scale, the groups become smaller. Raises
        ConfigError for a cut that the format does not allow.
        """
        return self

    def ignores(self, tensor: str) -> bool:
        """Tell whether checkpoints in this format may hold `tensor`, which no product of ours reads."""
        return False

    def stored(self, dtype: str, sources: Sequence[TensorSlice]) -> tuple[StoredTensor, ...]:
        """Return the tensors that are kept of a matrix, in the order in which they lie in a group.

        dtype: dtype of activations.
        sources: the slices of a dense matrix, each `[rows, in]`, cut for a rank; one below the other, the
            same as `cut` was given.
        """
        raise NotImplementedError

    def dequantise(self, parts: "Mapping[str, Tensor]", rows: slice = ALL) -> "Tensor":
        """Compute the matrix `[out, in]`, or some of its rows, in plain torch. Kernels are compared with it.

        parts: the tensors of `stored`, by name.
        """
        raise NotImplementedError

    def look_up(self, parts: "Mapping[str, Tensor]", rows: "Tensor") -> "Tensor":
        """Compute some rows of the matrix in plain torch, as `dequantise` does: `[count, in]`.

        rows: int64 `[count]`, in any order. A format that keeps no row of its own of a part for each row of
        the matrix says here how they are found.
        """
        return self.dequantise({name: part[rows] for name, part in parts.items()})

    def operations(self, shape: tuple[int, ...], tokens: float) -> float:
        """Return the floating-point operations of multiplying a matrix of `shape` by so many tokens."""
        return 2 * prod(shape) * tokens
