"""Multiply in float32 what rests in half precision, on CPUs without instructions for that."""

import platform
from functools import cache

import torch
from torch import Tensor

_LEAST_ROWS = 8
"""Rows from which converting weights costs less than what it saves. Measured on one core with AVX2 alone, for
a matrix of 4096 x 1024 in bfloat16: 7.0 ms become 3.2 for 8 rows, 53 become 10 for 64, 424 become 57 for 512;
for 4 rows 3.5 stay 3.4."""
_PIECE_BYTES = 2 << 20
"""Bytes of weights that are converted at a time: they stay in a core's cache."""


def widens(x: Tensor) -> bool:
    """Tell whether products of these rows are faster in float32: torch's own run at a seventh of its speed on
    x86 without AVX-512's bfloat16 and AMX, and on Arm without bfloat16."""
    return (
        not x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and len(x) >= _LEAST_ROWS
        and not _has_instructions(x.dtype)
    )


def widened_product(x: Tensor, weight: Tensor, out: Tensor, *, adds: bool = False) -> Tensor:
    """Write `x @ weight.T` to `out`, or add it to that, and return it; each number is rounded once.

    x: `[rows, in]`. weight: `[out, in]`. out: `[rows, out]` of their dtype; rows need not be contiguous.
    """
    height, inner = weight.shape
    each = max(1, min(height, _PIECE_BYTES // (4 * inner)))
    wide, scratch = x.float(), torch.empty(each, inner)
    for first in range(0, height, each):
        some = weight[first : first + each]
        piece = scratch[: len(some)].copy_(some)
        place = out[:, first : first + each]
        place.copy_(torch.addmm(place.float(), wide, piece.t()) if adds else torch.mm(wide, piece.t()))
    return out


@cache
def _has_instructions(dtype: torch.dtype) -> bool:
    """Tell whether this CPU multiplies numbers of a half-precision dtype itself."""
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
