"""Computes products of few rows with matrices of few bits on a CPU, by the kernels in few_bits.c.

Sums are float32, in an order that depends on the matrix's width alone: not on the number of threads, nor on
the other rows of x. Kernels run on torch's own threads, as many as torch would use.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import ClassVar

import torch
from torch import Tensor

from penstock.arch.formats.floats import E8M0, Float4, Float8
from penstock.arch.formats.format import WeightFormat
from penstock.arch.formats.integers import Integers
from penstock.base.config import CACHE
from penstock.ops.matrix import Matrix
from penstock.ops.native.compiler import NativeError, load

_MOST_ROWS = {torch.float32: 256, torch.bfloat16: 16, torch.float16: 16}
"""Rows of x up to which a product by these kernels is faster than to dequantise the matrix for torch.

Measured on one core with AVX-512, 2048 x 8192, int4: 16 rows of bfloat16 3.4 ms against 4.2, 24 rows 5.2
against 4.7; 64 rows of float32 15 ms against 25, 512 rows 145 against 213.
"""
_INT4, _INT8, _E2M1, _E4M3 = range(4)
NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Kinds of numbers that x, results and scales may have, as few_bits.c counts them."""
_EIGHTS, _EXPONENTS = 3, 4
_OPENMP = re.compile(r"\S*/lib(gomp|omp|iomp5)\b[^/\s]*\.so[^/\s]*$")


class MatrixNumbers(ctypes.Structure):
    """Holds what `struct matrix` of few_bits.c does."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "zero", "second", "order", "groups_of")),
        *((name, ctypes.c_int64) for name in ("height", "inner", "row_bytes", "groups", "group", "down")),
        *((name, ctypes.c_int32) for name in ("kind", "scale_kind", "divided", "grain")),
    ]


class _Call(ctypes.Structure):
    """Holds what `struct call` of few_bits.c does."""

    _fields_: ClassVar = [
        ("matrix", ctypes.c_void_p), ("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("rows", ctypes.c_int64),
    ]  # fmt: skip


class FewBitsLibrary:
    """The compiled kernels, and the threads that they run on."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self.product, self.dequantise = library.few_bits_product, library.few_bits_dequantise
        self.products = library.few_bits_products
        self.products.argtypes = [pointer, whole, whole, number, number, whole, pointer]
        self.product.argtypes = [
            pointer, pointer, number, number, whole, pointer, number, pointer, whole, whole, pointer,
        ]  # fmt: skip
        self.dequantise.argtypes = [pointer, number, number, whole, pointer, number, whole, pointer]
        self.blocks_product, self.blocks_dequantise = library.blocks_product, library.blocks_dequantise
        self.blocks_product.argtypes = self.product.argtypes
        self.blocks_dequantise.argtypes = self.dequantise.argtypes
        self.norm, self.gate = library.pointwise_norm, library.pointwise_gate
        self.project = library.pointwise_project
        real = ctypes.c_float
        self.norm.argtypes = [whole, pointer, pointer, pointer, real, number, number, pointer]
        self.gate.argtypes = [whole, pointer, number, number, pointer]
        self.project.argtypes = [whole, *[pointer] * 5, real, *[pointer] * 3, *[number] * 9]
        self.norm.restype = self.gate.restype = self.project.restype = None
        self.layer_feed_forward, self.layer_attention = library.layer_feed_forward, library.layer_attention
        self.layer_feed_forward.argtypes = [pointer, pointer, pointer, number, pointer, whole, pointer]
        self.layer_attention.argtypes = [
            *[pointer] * 3, number, *[pointer] * 5, number, *[pointer] * 3, *[number] * 4, whole, pointer,
        ]  # fmt: skip
        self.layers_pass = library.layers_pass
        self.layers_pass.argtypes = [
            pointer, number, pointer, number, *[pointer] * 5, number, pointer, *[number] * 4, whole, pointer,
        ]  # fmt: skip
        self.dense_row = library.dense_row
        self.dense_row.argtypes = [pointer, number, number, number, pointer, pointer, whole, pointer]
        self.dense_row.restype = None
        self.gumbel = library.gumbel
        self.gumbel.argtypes = [*[ctypes.c_uint32] * 4, pointer, number, pointer]
        self.gumbel.restype = None
        self.gumbel_best = library.gumbel_best
        self.gumbel_best.argtypes = [*[ctypes.c_uint32] * 4, pointer, number, real]
        self.gumbel_best.restype = number
        self.attend_rows = library.attend_rows
        self.attend_rows.argtypes, self.attend_rows.restype = [pointer, whole, pointer], None
        self.pool_open, self.pool_close = library.pool_open, library.pool_close
        self.pool_open.argtypes, self.pool_open.restype = [whole, whole], pointer
        self.pool_close.argtypes, self.pool_close.restype = [pointer], None
        self.experts_feed_forward, self.experts_by_dots = (
            library.experts_feed_forward,
            library.experts_by_dots,
        )
        self.experts_feed_forward.argtypes = [
            pointer, number, whole, pointer, number, pointer, pointer, number, pointer, pointer,
        ]  # fmt: skip
        self.experts_by_dots.argtypes = [pointer, whole]
        self.experts_by_tiles = library.experts_by_tiles
        self.experts_by_tiles.argtypes = [pointer]
        self.service_open, self.service_close = library.service_open, library.service_close
        self.service_open.argtypes, self.service_open.restype = [pointer], pointer
        self.service_close.argtypes, self.service_close.restype = [pointer], None
        self.lanes: int = library.few_bits_lanes()
        self.parallel = _parallel()


def _parallel() -> int | None:
    """Return the address of GOMP_parallel in the OpenMP library that torch has loaded: what runs there shares
    torch's threads. None where torch has no such library: kernels then run on the calling thread alone."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return None
    found = {match[0] for line in maps.splitlines() if (match := _OPENMP.search(line))}
    for name in sorted(found, key=lambda name: ("/torch/" not in name, name)):
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


class _Found:
    """Holds the library once it has been looked for, or why there is none."""

    def __init__(self) -> None:
        self.library: FewBitsLibrary | None = None
        self.why = ""
        self.sought = False
        self.lock = Lock()


_found = _Found()


def find_library(cache: Path | None = None, say: Callable[[str], object] = lambda line: None) -> str:
    """Compile or load the kernels, once in a process. Return why there are none; empty if there are.

    cache: the cache directory, by default the user's.
    say: is given a line if they must be compiled.
    """
    with _found.lock:
        if not _found.sought:
            try:
                _found.library = FewBitsLibrary(load(CACHE.expanduser() if cache is None else cache, say=say))
            except NativeError as fault:
                _found.why = str(fault)
            _found.sought = True
        return _found.why


def library() -> FewBitsLibrary | None:
    """Return the kernels, or None where plain torch computes."""
    if not _found.sought:
        find_library()
    return _found.library


def suits(x: Tensor, weight: Matrix) -> bool:
    """Tell whether `few_rows` computes a product."""
    return (
        0 < x.shape[0] <= _MOST_ROWS.get(x.dtype, 0)
        and x.stride(1) == 1
        and (weight.native is not None or reads(weight.format))
    )


def takes_each(x: Tensor, formats: Sequence[WeightFormat]) -> bool:
    """Tell whether `few_rows_each` multiplies any rows of x with matrices in these formats."""
    return 0 < x.shape[0] <= _MOST_ROWS.get(x.dtype, 0) and all(map(reads, formats))


def reads(format: WeightFormat) -> bool:
    """Tell whether `dequantise` reads a format here."""
    return isinstance(format, Integers | Float8 | Float4) and library() is not None


def few_rows(
    x: Tensor, weight: Matrix, bias: Tensor | None = None, *, out: Tensor | None = None, adds: bool = False
) -> Tensor:
    """Return `x @ weight.T + bias`, rounded once: x `[rows, in]`, result `[rows, out]`, rows of both strided.

    adds: the product is added to what `out` is. Raises MemoryError.
    """
    found = library()
    assert found is not None, "suits() says whether there are kernels"
    rows, kind = x.shape[0], NUMBERS[x.dtype]
    y = torch.empty(rows, weight.shape[0], dtype=x.dtype) if out is None else out
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert (y.dtype, y.stride(1)) == (x.dtype, 1), (y.dtype, y.stride())
    if bias is not None:
        bias = bias.to(x.dtype).contiguous()
    failed = found.product(
        address(weight), x.data_ptr(), x.stride(0), rows, kind, y.data_ptr(), y.stride(0),
        None if bias is None else bias.data_ptr(), adds, torch.get_num_threads(), found.parallel,
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for a product of few bits")
    return y


def few_rows_each(x: Tensor, weights: Sequence[Matrix], counts: Sequence[int], out: Tensor) -> None:
    """Write products of rows of x, the next `counts` of them with each of as many matrices, to `out`: as
    `few_rows` finds them one by one, but in one call.

    x `[rows, in]`, out `[rows, height]`, rows of both strided. Raises MemoryError.
    """
    found = library()
    assert found is not None, "reads() says whether there are kernels"
    assert x.dtype == out.dtype, (x.dtype, out.dtype)
    assert x.stride(1) == out.stride(1) == 1, (x.stride(), out.stride())
    assert len(x) == len(out) == sum(counts), (x.shape, out.shape, counts)
    calls, size = (_Call * len(weights))(), x.itemsize
    x_at, y_at, x_stride, y_stride = x.data_ptr(), out.data_ptr(), x.stride(0), out.stride(0)
    for call, weight, count in zip(calls, weights, counts, strict=True):
        assert weight.shape == (out.shape[1], x.shape[1]), (weight.shape, x.shape, out.shape)
        call.matrix, call.x, call.y, call.rows = address(weight), x_at, y_at, count
        x_at += count * x_stride * size
        y_at += count * y_stride * size
    if found.products(
        calls, len(calls), NUMBERS[x.dtype], x_stride, y_stride, torch.get_num_threads(), found.parallel
    ):
        raise MemoryError("no memory for products of few bits")


def dequantise(weight: Matrix, rows: slice, out: Tensor) -> None:
    """Write some rows of a matrix to `out` `[rows, in]`, rounded to its dtype once. Raises MemoryError."""
    found = library()
    assert found is not None, "reads() says whether there are kernels"
    first, stop, _ = rows.indices(weight.shape[0])
    assert (*out.shape, out.stride(1)) == (stop - first, weight.shape[1], 1), (out.shape, out.stride())
    failed = found.dequantise(
        address(weight), first, stop - first, NUMBERS[out.dtype], out.data_ptr(), out.stride(0),
        torch.get_num_threads(), found.parallel,
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory to dequantise a matrix")


def address(weight: Matrix) -> int:
    """Return the address of the `struct matrix` of a matrix, made at its first use."""
    if weight.native is None:
        weight.native = _numbers(weight)
    assert isinstance(weight.native, MatrixNumbers)
    return ctypes.addressof(weight.native)


def _numbers(weight: Matrix) -> MatrixNumbers:
    format, parts, (height, inner) = weight.format, weight.parts, weight.shape
    codes, scale = parts["codes"], parts["scale"]
    assert all(part.is_contiguous() for part in parts.values())
    made = MatrixNumbers(
        codes=codes.data_ptr(), scale=scale.data_ptr(), height=height, inner=inner, row_bytes=codes.shape[1],
        groups=scale.shape[1], down=1,
    )  # fmt: skip
    for name, part in (("zero", "zero"), ("second", "second"), ("order", "order"), ("groups_of", "groups")):
        setattr(made, name, parts[part].data_ptr() if part in parts else None)
    if isinstance(format, Integers):
        made.kind, made.group = _INT4 if format.bits == 4 else _INT8, format.group
        made.scale_kind = NUMBERS[scale.dtype]
    elif isinstance(format, Float8):
        made.kind, made.group, made.down = _E4M3, format.across, format.down
        made.scale_kind = _EXPONENTS if format.scale == E8M0 else NUMBERS[scale.dtype]
    else:
        assert isinstance(format, Float4), format
        made.kind, made.group, made.divided = _E2M1, format.group, format.divided
        made.scale_kind = _EXPONENTS if format.scale == E8M0 else _EIGHTS
    run = 64 if made.kind in (_INT4, _E2M1) else 32
    alone = made.groups == 1 and made.groups_of is None
    grains = [grain for grain in (4, 2, 1) if 16 * grain <= run]
    fits = (grain for grain in grains if alone or made.group % (16 * grain) == 0)
    made.grain = 0 if made.groups_of is not None else next(fits, 0)
    return made
