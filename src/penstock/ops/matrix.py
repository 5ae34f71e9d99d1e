"""Holds a weight matrix as it rests in memory: the tensors that its storage format keeps of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import ALL, WeightFormat
from penstock.arch.formats.joined import Joined


class Matrix:
    """A matrix is `[out, in]` in some storage format.

    `dense` is the matrix itself, or None where only `format` can read `parts`. `joined` are the matrices that
    it consists of, one below the other, if their formats differ.
    """

    __slots__ = ("dense", "format", "half", "joined", "native", "parts", "shape")

    def __init__(self, format: WeightFormat, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> None:
        self.format, self.shape, self.parts = format, shape, parts
        self.dense = parts.get("")
        self.joined: tuple[Matrix, ...] = ()
        self.native: object = None
        """The description of this matrix that kernels for a CPU have made, and keep here."""
        self.half: object = None
        """The same of the half of a layer that ends with this matrix."""
        if isinstance(format, Joined):
            self.joined = tuple(
                Matrix(one, (height, shape[1]), its) for one, height, its in format.apart(parts)
            )

    @classmethod
    def of(cls, tensor: Tensor) -> "Matrix":
        """Return a dense matrix of a tensor `[out, in]`."""
        return cls(DENSE, (tensor.shape[0], tensor.shape[1]), {"": tensor})

    @property
    def tensor(self) -> Tensor:
        """Return the matrix itself. It must be dense."""
        assert self.dense is not None, f"a matrix in format {self.format.name} has no dense tensor"
        return self.dense

    def dequantised(self, like: Tensor, rows: slice = ALL) -> Tensor:
        """Return the matrix, or some of its rows, in the dtype of `like`. It is computed anew unless it is
        dense."""
        if self.dense is not None:
            return self.dense[rows]
        return self.format.dequantise(self.parts, rows).to(like.dtype)


@dataclass(frozen=True, slots=True)
class GroupViews:
    """A group of weights as `take` lends it: matrices, and norms and biases (`vectors`), have names.

    addresses: where each tensor of the group begins, in the order of its layout. elsewhere: computes the
    group, a feed-forward, where it rests: it takes normalised rows `[tokens, hidden]` and returns outputs.
    There are no matrices then.
    """

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Tensor]
    addresses: tuple[int, ...]
    elsewhere: Callable[[Tensor], Tensor] | None = None
