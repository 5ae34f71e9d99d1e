"""Computes the Gumbel noise of tokens on a CPU, by gumbel.c, with the bits of `penstock.ops.gumbel`."""

import torch
from torch import Tensor

from penstock.ops.native.few_bits import library


def suits() -> bool:
    """Tell whether these compute here."""
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


def best(logits: Tensor, heats: Tensor, keys: Tensor) -> Tensor:
    """Return each row's token whose logit by the temperature, plus its noise, is highest, int64 `[draws]`.

    Of equal ones the lower id is returned. NaN logits are impossible tokens.

    logits: float32 `[draws, vocab]`.
    heats: `[draws]`: temperatures.
    keys: as of `gumbel`.
    """
    found = library()
    assert found is not None, "suits() says whether there are kernels"
    assert logits.dtype == torch.float32, logits.dtype
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    each = zip(logits, heats.tolist(), keys.long().tolist(), strict=True)
    return torch.tensor(
        [
            found.gumbel_best(
                low, high, position & 0xFFFFFFFF, position >> 32, row.data_ptr(), len(row), heat
            )
            for row, heat, (low, high, position) in each
        ],
        dtype=torch.int64,
    )  # fmt: skip
