"""Computes products of few rows with matrices in blocks of GGUF on a CPU, by the kernels in blocks.c.

Sums are float32, in an order that depends on the matrix's width alone, as those of `few_bits` are.
"""

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from penstock.arch.formats.format import WeightFormat
from penstock.arch.formats.gguf import BLOCK_TYPES, Blocks
from penstock.ops.matrix import Matrix
from penstock.ops.native.few_bits import NUMBERS, library

_MOST_ROWS = 16
"""Rows of x up to which a product by these kernels is faster than to dequantise the matrix for torch."""


class _Blocks(ctypes.Structure):
    """Holds what `struct blocks` of blocks.c does."""

    _fields_: ClassVar = [
        ("blocks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("height", "inner", "row_bytes", "high_at", "heads_at")),
        *(
            (name, ctypes.c_int32)
            for name in ("type", "unit", "skip", "code_bytes", "head_bytes", "high_bytes", "paired")
        ),
    ]


def suits(x: Tensor, weight: Matrix) -> bool:
    """Tell whether `few_rows` computes a product."""
    return 0 < x.shape[0] <= _MOST_ROWS and x.stride(1) == 1 and x.dtype in NUMBERS and reads(weight.format)


def reads(format: WeightFormat) -> bool:
    """Tell whether `dequantise` reads a format here."""
    return isinstance(format, Blocks) and library() is not None


def few_rows(
    x: Tensor, weight: Matrix, bias: Tensor | None = None, *, out: Tensor | None = None, adds: bool = False
) -> Tensor:
    """Return `x @ weight.T + bias`, rounded once: x `[rows, in]`, result `[rows, out]`, rows of both strided.

    adds: the product is added to what `out` is. Raises MemoryError.
    """
    found = library()
    assert found is not None, "suits() says whether there are kernels"
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype) if out is None else out
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert (y.dtype, y.stride(1)) == (x.dtype, 1), (y.dtype, y.stride())
    if bias is not None:
        bias = bias.to(x.dtype).contiguous()
    failed = found.blocks_product(
        address(weight), x.data_ptr(), x.stride(0), x.shape[0], NUMBERS[x.dtype], y.data_ptr(), y.stride(0),
        None if bias is None else bias.data_ptr(), adds, torch.get_num_threads(), found.parallel,
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for a product of blocks")
    return y


def dequantise(weight: Matrix, rows: slice, out: Tensor) -> None:
    """Write some rows of a matrix to `out` `[rows, in]`, rounded to its dtype once."""
    found = library()
    assert found is not None, "reads() says whether there are kernels"
    first, stop, _ = rows.indices(weight.shape[0])
    assert (*out.shape, out.stride(1)) == (stop - first, weight.shape[1], 1), (out.shape, out.stride())
    found.blocks_dequantise(
        address(weight), first, stop - first, NUMBERS[out.dtype], out.data_ptr(), out.stride(0),
        torch.get_num_threads(), found.parallel,
    )  # fmt: skip


def address(weight: Matrix) -> int:
    """Return the address of the `struct blocks` of a matrix, made at its first use."""
    if weight.native is None:
        format, blocks = weight.format, weight.parts["repacked"]
        assert isinstance(format, Blocks)
        assert blocks.is_contiguous()
        (height, inner), (codes, high, heads), units = weight.shape, format.parts, format.units
        paired = 2 if format.resting.paired else 1
        weight.native = _Blocks(
            blocks=blocks.data_ptr(), height=height, inner=inner, row_bytes=blocks.shape[1], high_at=codes,
            heads_at=codes + high, type=BLOCK_TYPES[format.type], unit=format.resting.unit, skip=format.skip,
            code_bytes=codes // units, head_bytes=heads // units,
            high_bytes=high // -(-units // paired), paired=paired,
        )  # fmt: skip
    assert isinstance(weight.native, _Blocks)
    return ctypes.addressof(weight.native)
