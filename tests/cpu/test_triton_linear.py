"""The product of a few rows, interpreted on the CPU, against plain torch; and how it is cut for real
shapes."""

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

if (
    os.environ.get("TRITON_INTERPRET") != "1"
):  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import tiny
from penstock.ops.activation import silu_mul
from penstock.ops.kernels import counters, counting
from penstock.ops.triton.linear import MOST_ROWS, FewRowsTuning, few_rows, few_rows_tuning

TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 2.5e-2,
    torch.float16: 3e-3,
}  # the interpreter truncates to bf16 where a GPU rounds
CPU = torch.device("cpu")
WIDE = FewRowsTuning(64, 64, 1, 2)
SHARED = replace(WIDE, splits=3)
TUNINGS = [
    WIDE,
    SHARED,
    replace(WIDE, cols=32, left=True),
    replace(SHARED, cols=32, left=True),
    replace(WIDE, splits=8),
    None,
]


def given(
    rows: int, inner: int, outer: int, dtype: torch.dtype, biased: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows of x and of the matrix stand apart."""
    rng = torch.Generator().manual_seed(rows + inner + outer)
    x, weight = (
        torch.randn(rows, inner + 8, generator=rng),
        torch.randn(outer, inner + 16, generator=rng) / inner**0.5,
    )
    bias = torch.randn(outer, generator=rng).to(dtype) if biased else None
    return x.to(dtype)[:, :inner], weight.to(dtype)[:, :inner], bias


ROWS = [(2, 100, torch.float32), (17, 64, torch.bfloat16), (33, 200, torch.float16)]
EVERY = [
    (*case, tuning, biased)
    for row, case in enumerate(ROWS)
    for turn, tuning in enumerate(TUNINGS)
    for biased in ((False, True) if tiny.THOROUGH else [(row + turn) % 2 == 0])
]
"""Each tuning with each case of rows, by turns with and without a bias."""


@pytest.mark.parametrize(("rows", "outer", "dtype", "tuning", "biased"), EVERY)
class TestFewRows:
    def test_product(
        self, rows: int, outer: int, dtype: torch.dtype, tuning: FewRowsTuning | None, biased: bool
    ) -> None:
        x, weight, bias = given(rows, 256, outer, dtype, biased)
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        out = torch.full((rows, outer + 8), torch.nan, dtype=dtype)[:, :outer]
        assert few_rows(x, weight, bias, out=out, tuning=tuning) is out
        for got in (out, few_rows(x, weight, bias, tuning=tuning)):
            torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    def test_with_its_gate(
        self, rows: int, outer: int, dtype: torch.dtype, tuning: FewRowsTuning | None, biased: bool
    ) -> None:
        x, weight, bias = given(rows, 256, 2 * outer, dtype, biased)
        want = silu_mul(x.double() @ weight.double().T + (0 if bias is None else bias.double()))
        got = few_rows(x, weight, bias, gated=True, tuning=tuning)
        assert got.shape == (rows, outer)
        torch.testing.assert_close(got.double(), want, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def test_counters_are_left_as_they_were() -> None:
    """Whether they are shared or not: the next product counts from zero again."""
    x, weight, _ = given(5, 512, 300, torch.float32, False)
    shared, want = torch.zeros(8, dtype=torch.int32), x @ weight.T
    with counting(shared):
        assert counters(8, CPU) is shared
        assert counters(9, CPU) is not shared
        for _ in range(3):
            torch.testing.assert_close(few_rows(x, weight, tuning=SHARED), want, rtol=1e-5, atol=1e-5)
            assert not shared.any()
    assert counters(8, CPU) is not shared


@pytest.mark.parametrize("inner", [128, 1024, 3072, 4096, 14336])
@pytest.mark.parametrize("outer", [256, 1024, 1280, 3072, 4096, 6144, 28672, 128256, 151936])
@pytest.mark.parametrize("many", [78, 132])
def test_every_shape_is_cut_so_that_it_fits(inner: int, outer: int, many: int) -> None:
    for rows in (16, 32, MOST_ROWS):
        tuning = few_rows_tuning(rows, outer, inner, many)
        assert inner % tuning.step == 0
        assert tuning.stages >= 2
        assert tuning.stages * tuning.step * (tuning.cols + rows) * 2 <= 227 << 10
        assert (tuning.splits - 1) * -(
            -inner // tuning.step // tuning.splits
        ) * tuning.step < inner  # nobody has nothing
        assert tuning.left or tuning.cols >= 64  # what is on the left has 64 rows
        assert not tuning.left or rows == MOST_ROWS
