"""Computes products of few rows of activations with a matrix of few bits by the matrix products of a warp;
see `warp_tiles`.

Why it is safe where launches overlap: as in `linear`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.matrix import Matrix
from penstock.ops.triton.codes import E2M1, RUN_SCALES, kind_of
from penstock.ops.triton.tuning import cdiv
from penstock.ops.triton.warp_tiles import codes_options, reads_rows, tiles_of_products

MOST_ROWS = 16


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _few_columns(  # type: ignore[no-untyped-def]
    x,
    codes,
    scale,
    zero,
    second,
    bias,
    y,
    rows,
    outer,
    inner,
    down,
    s_x,
    s_w,
    s_s,
    s_y,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    RAW: tl.constexpr,
    ZEROS: tl.constexpr,
    SECOND: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    EARLY: tl.constexpr,
    HALF: tl.constexpr,
    LESS: tl.constexpr,
    PTX: tl.constexpr,
    REGISTERS: tl.constexpr,
    FOLDED: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """Compute the numbers of TILES tiles; see `tiles_of_products`."""
    if EARLY:
        gdc_launch_dependents()
    lane = tl.arange(0, 32)[:, None]
    row, of = lane // 4, lane % 4 * 2
    rows_at = x + tl.minimum(row, rows - 1) * s_x, x + tl.minimum(row + 8, rows - 1) * s_x
    tiles_of_products(
        rows_at,
        (y + of * s_y, y + (of + 1) * s_y, y + (of + 8) * s_y, y + (of + 9) * s_y),
        (of < rows, of + 1 < rows, of + 8 < rows, of + 9 < rows),
        codes,
        scale,
        zero,
        second,
        bias,
        tl.program_id(0) * TILES,
        outer,
        inner,
        down,
        s_w,
        s_s,
        TILES,
        WARPS,
        WIDE,
        GROUP,
        KIND,
        PLACES,
        SCALES,
        RAW,
        ZEROS,
        SECOND,
        GATED,
        BIASED,
        EARLY,
        HALF,
        LESS,
        PTX,
        REGISTERS,
        FOLDED,
        1.0,
        0.0,
        0.0,
        EVEN,
    )


@dataclass(frozen=True, slots=True)
class MmaTuning:
    """MmaTuning says how a product is cut.

    tiles: times 16 rows of the matrix that a warp has. warps: of a program, which share the columns.
    """

    tiles: int
    warps: int


def few_columns(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
    tuning: MmaTuning,
) -> Tensor:
    """Return `x @ weight.T + bias`, x `[rows, in]` of at most MOST_ROWS, which `reads_rows` takes, as
    `few_bits.few_rows`."""
    kind, parts = kind_of(weight.format), weight.parts
    assert kind is not None, weight.format
    (height, inner), rows = weight.shape, len(x)
    outer = height // 2 if gated else height
    assert 0 < rows <= MOST_ROWS, x.shape
    assert reads_rows(x), (x.shape, x.stride(), x.dtype)
    y = torch.empty(rows, outer, dtype=x.dtype, device=x.device) if out is None else out
    words, scale = parts["codes"].view(torch.int32), parts["scale"]
    scale = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    codes = codes_options(kind, inner, x.dtype, scale.shape[1], wide=1 + (rows > 8))
    scale = scale.view(RUN_SCALES[kind.codes, kind.scales, kind.group]) if codes["RAW"] else scale
    zero, second, early = parts.get("zero"), parts.get("second"), uses_pdl()
    fours = x.view(torch.int64)
    _few_columns[(cdiv(outer, tuning.tiles * (8 if gated else 16)),)](
        fours,
        words,
        scale,
        x if zero is None else zero,
        x if second is None else second,
        x if bias is None else bias,
        y,
        rows,
        outer,
        inner,
        kind.down,
        fours.stride(0),
        words.stride(0),
        scale.stride(0),
        y.stride(0),
        TILES=tuning.tiles,
        WARPS=tuning.warps,
        ZEROS=zero is not None,
        SECOND=kind.second,
        GATED=gated,
        BIASED=bias is not None,
        EARLY=early,
        **codes,
        num_warps=tuning.warps,
        **pdl_launch_options(early),
    )
    return y


def mma_tuning(rows: int, codes: int, height: int, inner: int, many: int) -> MmaTuning | None:
    """Return how a product is cut, the one place for constants; None where other kernels are as fast.

    A program has few rows of the matrix, so it needs many of them, and not so many columns that its warps
    would be at work for long. Four-bit floating-point codes take other kernels more instructions.

    codes: their kind.
    height, inner: shape of the matrix.
    many: multiprocessors.
    """
    if rows > 8 or codes != E2M1.value or height < 128 * many or inner > 8192:
        return None
    return MmaTuning(1 if rows == 1 else 2, 2)
