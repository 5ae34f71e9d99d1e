"""Computes the Gumbel noise of tokens on a CPU, by gumbel.c, with the bits of `penstock.ops.gumbel`."""

import torch
from torch import Tensor

from penstock.ops.native.few_bits import library


def suits() -> bool:
    """Tell whether `gumbel` computes here."""
    return library() is not None


def gumbel(keys: Tensor, tokens: Tensor | int) -> Tensor:
    """Compute what `penstock.ops.gumbel.gumbel` says."""
    found = library()
    assert found is not None, "suits() says whether there are kernels"
    ids = None if isinstance(tokens, int) else tokens.contiguous()
    count = tokens if isinstance(tokens, int) else tokens.shape[1]
    noise = torch.empty(len(keys), count)
    for row, (low, high, position) in enumerate(keys.long().tolist()):
        found.gumbel(
            low, high, position & 0xFFFFFFFF, position >> 32,
            None if ids is None else ids[row].data_ptr(), count, noise[row].data_ptr(),
        )  # fmt: skip
    return noise
