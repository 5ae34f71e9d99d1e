"""Products of a few rows with matrices of few bits, as a GPU compiles them: against plain numbers, one after
another where launches overlap, and in a graph."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.ops.activation import silu_mul
from penstock.ops.kernels import pdl_launches
from penstock.ops.matrix import Matrix
from penstock.ops.triton.few_bits import dequantise, few_rows, suits
from penstock.ops.triton.few_bits_mma import MmaTuning
from quantised import SCHEMES, matrix_of

DEVICE = "cuda"
READ = [name for name in SCHEMES if "order" not in name and name != "packed_odd"]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 4e-3}
"""Of the largest number: results are rounded once; integers in small groups are rounded as the dtype is."""


def made(scheme: str, height: int, width: int) -> tuple[Matrix, Tensor]:
    rng = torch.Generator().manual_seed(width)
    few, plain = matrix_of(SCHEMES[scheme], torch.randn(height, width, generator=rng) / width**0.5)
    parts = {name: part.to(DEVICE) for name, part in few.parts.items()}
    return Matrix(few.format, few.shape, parts), plain.to(DEVICE)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scheme", READ)
def test_product(scheme: str, dtype: torch.dtype) -> None:
    """Sizes that are no whole steps or tiles, and every class of rows."""
    for (height, width), *classes in (
        ((48, 96), (1, False), (3, True)),
        ((272, 1312), (1, True), (17, False)),
        ((1040, 4096), (1, False), (16, True), (64, False)),
    ):
        few, plain = made(scheme, height, width)
        rng = torch.Generator(DEVICE).manual_seed(height)
        bias = torch.empty(height, device=DEVICE).normal_(generator=rng).to(dtype)
        for rows, gated in classes:
            x = torch.empty(rows, width, device=DEVICE).normal_(generator=rng).to(dtype)
            if not suits(x, few):
                pytest.skip("a format that the kernel leaves alone")
            want = x.float() @ plain.T + bias.float()
            want = silu_mul(want) if gated else want
            got = few_rows(x, few, bias, gated=gated).float()
            assert (got - want).abs().max() <= TOLERANCE[dtype] * (2 if gated else 1) * want.abs().max()
            assert torch.equal(few_rows(x, few, bias, gated=gated).float(), got)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scheme", READ)
def test_product_by_warps(scheme: str, dtype: torch.dtype) -> None:
    """Some warps have no columns at last, and tiles no rows. That a kernel runs says that lanes are where it
    takes them to be."""
    for (height, width), tuning, *classes in (
        ((40, 384), MmaTuning(4, 2), (1, False), (3, True)),
        ((272, 1280), MmaTuning(1, 8), (8, True), (16, False)),
        ((1040, 4096), MmaTuning(2, 8), (1, False), (1, True), (9, True)),
    ):
        few, plain = made(scheme, height, width)
        rng = torch.Generator(DEVICE).manual_seed(height)
        bias = torch.empty(height, device=DEVICE).normal_(generator=rng).to(dtype)
        for rows, gated in classes:
            x = torch.empty(rows, width, device=DEVICE).normal_(generator=rng).to(dtype)
            if not suits(x, few):
                pytest.skip("a format that the kernel leaves alone")
            want = x.float() @ plain.T + bias.float()
            want = silu_mul(want) if gated else want
            got = few_rows(x, few, bias, gated=gated, tuning=tuning).float()
            assert (got - want).abs().max() <= TOLERANCE[dtype] * (2 if gated else 1) * want.abs().max()
            assert torch.equal(few_rows(x, few, bias, gated=gated, tuning=tuning).float(), got)


@pytest.mark.parametrize("scheme", ["gptq_128", "awq", "fp8_128", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("tuning", [None, MmaTuning(2, 8)], ids=["usual", "by warps"])
def test_overlapping_launches_compute_the_same(scheme: str, rows: int, tuning: MmaTuning | None) -> None:
    """A chain in which each product needs the one before, in a graph that is replayed."""
    few, _ = made(scheme, 1024, 1024)
    x = torch.randn(rows, 1024, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).bfloat16()

    def chain() -> Tensor:
        y = x
        for _ in range(12):
            y = few_rows(y, few, tuning=tuning)
        return y

    want = chain()
    early = torch.cuda.get_device_capability() >= (9, 0)
    with pdl_launches(early):
        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain()
    for _ in range(20):
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)


@pytest.mark.parametrize("scheme", READ)
def test_dequantised(scheme: str) -> None:
    few, plain = made(scheme, 272, 1312)
    out = torch.full((200, 1312), torch.nan, device=DEVICE)
    if not suits(out[:1].bfloat16(), few):
        pytest.skip("a format that the kernel leaves alone")
    dequantise(few, slice(30, 230), out)
    assert torch.equal(out, plain[30:230])
