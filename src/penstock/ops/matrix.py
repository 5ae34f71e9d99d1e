"""Holds a weight matrix as it rests in memory: the tensors that its storage format keeps of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import WeightFormat


class Matrix:
    """A matrix is `[out, in]` in some storage format.

    `dense` is the matrix itself, or None where only `format` can read `parts`.
    """

    __slots__ = ("dense", "format", "parts", "shape")

    def __init__(self, format: WeightFormat, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> None:
        self.format, self.shape, self.parts = format, shape, parts
        self.dense = parts.get("")

    @classmethod
    def of(cls, tensor: Tensor) -> "Matrix":
        """Return a dense matrix of a tensor `[out, in]`."""
        return cls(DENSE, (tensor.shape[0], tensor.shape[1]), {"": tensor})

    @property
    def tensor(self) -> Tensor:
        """Return the matrix itself. It must be dense."""
        assert self.dense is not None, f"a matrix in format {self.format.name} has no dense tensor"
        return self.dense

    def dequantised(self, like: Tensor) -> Tensor:
        """Return the matrix in the dtype of `like`. It is computed anew unless it is dense."""
        return self.format.dequantise(self.parts).to(like.dtype) if self.dense is None else self.dense


@dataclass(frozen=True, slots=True)
class GroupViews:
    """A group of weights as `take` lends it: matrices, and norms and biases (`vectors`), have names.

    addresses: where each tensor of the group begins, in the order of its layout.
    """

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Tensor]
    addresses: tuple[int, ...]
