"""Computes feed-forwards of many experts for few rows each, on a CPU, by the kernels in experts.c.

The threads of a pool share the bytes of all experts evenly, since reading them is what takes time.
Activations in bfloat16 are multiplied by dot products where the processor has them, and by tiles of them
where a pool may use these. Weights are exact and sums are float32. So results are those of kernels for GPUs
but for the order of sums, and what that rounds.
"""

import ctypes
from collections.abc import Sequence
from threading import Lock
from typing import ClassVar

import torch
from torch import Tensor

from penstock.arch.formats.dense import DENSE
from penstock.arch.spec import Activation
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.native.few_bits import NUMBERS, MatrixNumbers, address, library, reads

_DENSE = 4
_COLUMNS = 32
"""Columns of dense matrices come in so many."""


class _Expert(ctypes.Structure):
    """Holds what `struct expert` of experts.c does."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, ctypes.c_int64) for name in ("rows", "first")),
    ]


class ActivationNumbers(ctypes.Structure):
    """Holds what `struct activation` of experts.c does."""

    _fields_: ClassVar = [(name, ctypes.c_float) for name in ("alpha", "shift", "limit")]

    @classmethod
    def of(cls, activation: Activation) -> "ActivationNumbers":
        """Return the numbers of an activation."""
        limit = float("inf") if activation.limit is None else activation.limit
        return cls(activation.alpha, activation.shift, limit)


class ThreadPool:
    """A pool has threads that compute feed-forwards together with the caller, one call at a time."""

    def __init__(self, threads: int, tiles: bool = False) -> None:
        """Start the threads. They sleep while there is nothing to do. Raises MemoryError.

        tiles: whether experts of several rows may be multiplied by tiles (AMX), which are faster, but sum in
            another order: a row's output then depends on how many rows its expert has.
        """
        found = library()
        assert found is not None, "takes() says whether there are kernels"
        self._library, self._lock = found, Lock()
        self._pool: int | None = found.pool_open(threads, tiles)
        if not self._pool:
            raise MemoryError("no memory for a pool of threads")

    @property
    def by_tiles(self) -> bool:
        """Tell whether this processor and this process have tiles, and the pool uses them."""
        assert self._pool is not None, "the pool is closed"
        return bool(self._library.experts_by_tiles(self._pool))

    def close(self) -> None:
        """End the threads. Nothing is computed from now on."""
        with self._lock:
            if self._pool:
                self._library.pool_close(self._pool)
                self._pool = None

    def feed_forward(
        self,
        x: Tensor,
        experts: Sequence[GroupViews],
        counts: Sequence[int],
        activation: Activation,
        out: Tensor,
        tokens: Tensor | None = None,
    ) -> None:
        """Write outputs of experts, the next `counts` rows through each of them, to out `[rows, hidden]`.

        x: `[tokens, hidden]`, in the dtype of `out`, rows of both strided.
        experts: which `takes` has approved for x, all of one shape.
        tokens: int32 `[rows]`, the row of x that each row is; by default the same.
        Raises MemoryError.
        """
        assert x.dtype == out.dtype, (x.dtype, out.dtype)
        assert x.stride(1) == out.stride(1) == 1, (x.stride(), out.stride())
        assert x.shape[1] == out.shape[1], (x.shape, out.shape)
        assert len(out) == sum(counts) == len(x if tokens is None else tokens), (x.shape, out.shape, counts)
        assert tokens is None or (tokens.dtype == torch.int32 and tokens.is_contiguous())
        described, first = (_Expert * len(experts))(), 0
        for one, expert, count in zip(described, experts, counts, strict=True):
            gate_up, down = expert.matrices["gate_up"], expert.matrices["down"]
            assert gate_up.shape[1] == down.shape[0] == x.shape[1], (gate_up.shape, down.shape, x.shape)
            assert gate_up.shape[0] == 2 * down.shape[1], (gate_up.shape, down.shape)
            one.gate_up, one.down, one.rows, one.first = (
                matrix_address(gate_up),
                matrix_address(down),
                count,
                first,
            )
            for name in ("gate_up_bias", "down_bias"):
                bias = expert.vectors.get(name)
                setattr(one, name, None if bias is None else bias.data_ptr())
            first += count
        by = ActivationNumbers.of(activation)
        with self._lock:
            assert self._pool is not None, "the pool is closed"
            failed = self._library.experts_feed_forward(
                described, len(described), NUMBERS[x.dtype], x.data_ptr(), x.stride(0),
                None if tokens is None else tokens.data_ptr(), out.data_ptr(), out.stride(0),
                ctypes.byref(by), self._pool,
            )  # fmt: skip
        if failed:
            raise MemoryError("no memory for feed-forwards of experts")


def takes(x: Tensor, expert: GroupViews) -> bool:
    """Tell whether pools compute this expert, and those like it, for rows of x: in 16 bits, on the CPU."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and not x.is_cuda
        and library() is not None
        and all(_reads(matrix, x.dtype) for matrix in expert.matrices.values())
        and all(vector.dtype == x.dtype and vector.is_contiguous() for vector in expert.vectors.values())
    )


def by_dots(x: Tensor, weight: Matrix) -> bool:
    """Tell whether rows of x are multiplied with a matrix by dot products of bfloat16."""
    found = library()
    return found is not None and bool(found.experts_by_dots(matrix_address(weight), NUMBERS[x.dtype]))


def _reads(weight: Matrix, dtype: torch.dtype) -> bool:
    dense = weight.dense
    if dense is not None:
        return dense.dtype == dtype and dense.stride(1) == 1 and dense.shape[1] % _COLUMNS == 0
    return reads(weight.format) and "order" not in weight.parts


def matrix_address(weight: Matrix) -> int:
    """Return the address of the `struct matrix` of a matrix, dense or not, made at its first use."""
    if weight.native is None and weight.format is DENSE:
        dense = weight.tensor
        weight.native = MatrixNumbers(
            codes=dense.data_ptr(), height=len(dense), inner=dense.shape[1], groups=0, down=1,
            row_bytes=dense.stride(0) * dense.itemsize, kind=_DENSE, scale_kind=NUMBERS[dense.dtype],
        )  # fmt: skip
    return address(weight)
