"""Norms of all heads of a token together, by kernels that are interpreted on the CPU, against plain torch."""

import math
import os

import pytest
import torch
from torch import Tensor

if (
    os.environ.get("TRITON_INTERPRET") != "1"
):  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip("kernels are interpreted where there is no GPU", allow_module_level=True)

from penstock.ops.norm import rms_norm
from penstock.ops.project import JointNorms
from penstock.ops.project import norm_together as plain
from penstock.ops.triton.norms import norm_together, sums_of_squares

STEP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Of the largest number: an order of sums, and a step of the dtype; the interpreter truncates to bf16."""


def given(tokens: int, queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, JointNorms]:
    """Return a projection whose rows stand apart among NaN, and norms."""
    rng = torch.Generator().manual_seed(queries + tokens)
    width = queries + 2 * keys
    around = torch.full((tokens, width + 16), math.nan, dtype=dtype)
    qkv = around[:, 8 : width + 8]
    qkv.copy_(torch.randn(tokens, width, generator=rng) * 3)
    q, k = (torch.rand(size, generator=rng).to(dtype) + 0.5 for size in (queries, keys))
    return qkv, JointNorms(q, k, 1e-5, (queries, keys))


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize(("tokens", "queries", "keys"), [(1, 96, 32), (5, 130, 130), (3, 768, 24), (0, 8, 8)])
def test_as_plain_torch(tokens: int, queries: int, keys: int, dtype: torch.dtype) -> None:
    qkv, norms = given(tokens, queries, keys, dtype)
    want, before = qkv.clone(), qkv.clone()
    plain(want, norms)
    norm_together(qkv, (norms.q, norms.k), norms.sizes, norms.eps)
    room = STEP[dtype] * float(want.abs().amax()) if tokens else 0.0
    torch.testing.assert_close(qkv, want, rtol=0, atol=room)
    assert torch.equal(qkv[:, queries + keys :], before[:, queries + keys :]), "values are not normalised"
    for part, weight in ((slice(queries), norms.q), (slice(queries, queries + keys), norms.k)):
        torch.testing.assert_close(
            want[:, part], rms_norm(before[:, part].contiguous(), weight, 1e-5), rtol=0, atol=room
        )


@pytest.mark.parametrize("tokens", [1, 4])
def test_ranks_add_up_their_squares(tokens: int) -> None:
    """Two of 96 query heads' numbers and 32 of keys have what the whole has."""
    qkv, norms = given(tokens, 96, 32, torch.float32)
    whole = qkv.clone()
    norm_together(whole, (norms.q, norms.k), norms.sizes, norms.eps)
    cuts = [(slice(40), slice(20)), (slice(40, 96), slice(20, 32))]
    queries, keys, values = qkv.split([96, 32, 32], 1)
    parts = [torch.cat((queries[:, q], keys[:, k], values[:, k]), 1) for q, k in cuts]
    sizes = [(part.stop - (part.start or 0), k.stop - (k.start or 0)) for part, k in cuts]
    squares = [sums_of_squares(part, *size) for part, size in zip(parts, sizes, strict=True)]
    want = torch.stack((queries.square().sum(1), keys.square().sum(1)), 1)
    torch.testing.assert_close(squares[0] + squares[1], want)
    for part, (q, k), size in zip(parts, cuts, sizes, strict=True):
        norm_together(part, (norms.q[q], norms.k[k]), norms.sizes, norms.eps, squares[0] + squares[1])
        torch.testing.assert_close(part[:, : size[0]], whole[:, :96][:, q])
        torch.testing.assert_close(part[:, size[0] : sum(size)], whole[:, 96:128][:, k])


def test_plain_torch_adds_up_over_ranks() -> None:
    """Squares of both ranks are the whole's, where the other has the same."""
    qkv, norms = given(3, 64, 16, torch.float32)
    half = JointNorms(norms.q, norms.k, norms.eps, (128, 32))
    want = qkv.clone()
    plain(want, norms)
    plain(qkv, half, lambda squares: squares.mul_(2))
    torch.testing.assert_close(qkv, want)


def test_nothing_to_add_up() -> None:
    assert sums_of_squares(torch.empty(0, 24), 8, 8).shape == (0, 2)
