"""Looks rows of the embedding up, in whatever storage format it rests."""

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.arch.formats.gguf import Blocks
from penstock.ops.kernels import native_kernels, triton_kernels
from penstock.ops.matrix import Matrix

_FEW = 8
"""Tokens up to which a CPU's kernels look up row by row."""


def look_up(tokens: Tensor, weight: Matrix, dtype: torch.dtype | None) -> Tensor:
    """Return the rows of an embedding `[vocabulary, hidden]` that tokens, int64 `[tokens]`, name.

    dtype: of the result, where the embedding is not dense; rows are rounded to it once.
    """
    if weight.dense is not None:
        return F.embedding(tokens, weight.dense)
    assert dtype is not None, f"an embedding in format {weight.format.name} has no dtype of activations"
    kernels = triton_kernels("dequantise") if tokens.is_cuda else None
    if kernels is not None and kernels.reads(weight.format):
        out = torch.empty(len(tokens), weight.shape[1], dtype=dtype, device=tokens.device)
        kernels.look_up(weight, tokens, out)
        return out
    native = None
    if not tokens.is_cuda and len(tokens) <= _FEW and weight.format.native:
        native = native_kernels(weight.format.native)
    if native is not None and native.reads(weight.format):
        out = torch.empty(len(tokens), weight.shape[1], dtype=dtype)
        for place, token in enumerate(tokens.tolist()):
            native.dequantise(weight, slice(token, token + 1), out[place : place + 1])
        return out
    blocks = None
    if isinstance(weight.format, Blocks):
        blocks = triton_kernels(Blocks.kernels) if tokens.is_cuda else native_kernels(Blocks.native)
    if blocks is not None and blocks.reads(weight.format):
        # Each row has its own blocks: those of the tokens are taken together first.
        chosen = Matrix(
            weight.format,
            (len(tokens), weight.shape[1]),
            {name: part[tokens] for name, part in weight.parts.items()},
        )
        out = torch.empty(chosen.shape, dtype=dtype, device=tokens.device)
        blocks.dequantise(chosen, slice(0, len(tokens)), out)
        return out
    return weight.format.look_up(weight.parts, tokens).to(dtype)
