"""Products of LoRA adapters for a few rows, interpreted on the CPU, against plain torch; and how their sums
are cut for real shapes."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if (
    os.environ.get("TRITON_INTERPRET") != "1"
):  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )


from penstock.ops.activation import silu_mul
from penstock.ops.lora import LoraMatrix, StackedRows
from penstock.ops.triton import lora
from penstock.ops.triton.linear import FewRowsTuning, few_rows


def bank(heights: list[int], width: int, slots: int, rank: int, dtype: torch.dtype) -> LoraMatrix:
    """Adapters of several ranks; the last slot is empty."""
    rng = torch.Generator().manual_seed(width)
    matrix = LoraMatrix(heights, width, slots=slots, rank=rank, like=torch.empty(0, dtype=dtype))
    for slot in range(1, slots):
        own = max(1, rank - slot + 1)
        for part, height in enumerate(heights):
            a = torch.randn(own, width, generator=rng) / width**0.5
            matrix.put(slot, part, a.to(dtype), torch.randn(own, height, generator=rng).to(dtype))
    return matrix


def added(x: Tensor, y: Tensor, matrix: LoraMatrix, slots: Tensor) -> Tensor:
    found = y.clone()
    lora.add(x, found, matrix.a, matrix._every, matrix._heights, slots)
    return found


@pytest.mark.parametrize(
    ("rows", "heights", "width", "slots", "rank", "dtype"),
    [
        (1, [70], 100, 2, 1, torch.float32),
        (7, [300, 65, 257], 900, 4, 5, torch.float32),
        (16, [64, 64], 600, 3, 16, torch.bfloat16),
        (37, [300], 300, 3, 70, torch.float16),
    ],
)
def test_each_row_gets_the_products_of_its_own_adapter(
    rows: int, heights: list[int], width: int, slots: int, rank: int, dtype: torch.dtype
) -> None:
    matrix, rng = bank(heights, width, slots, rank, dtype), torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width + 8, generator=rng).to(dtype)[:, :width]
    y = torch.randn(rows, sum(heights) + 3, generator=rng).to(dtype)[:, : sum(heights)]
    slot_of = torch.randint(0, slots + 1, (rows,), generator=rng)
    slot_of[-1] = 1
    found, right = added(x, y, matrix, slot_of), y.double()
    for row, slot in enumerate(slot_of.tolist()):
        if slot == 0:
            assert torch.equal(found[row], y[row])
            continue
        each = [
            x[row].double() @ matrix.a[part, slot - 1].double().T @ matrix.b[part][slot - 1].double()
            for part in range(len(heights))
        ]
        right[row] += torch.cat(each)
    limit = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    assert (found.double() - right).abs().max() < limit * right.abs().max()
    torch_alone = y.clone()
    StackedRows(slot_of, slots).add(x, torch_alone, matrix)
    assert (torch_alone.double() - right).abs().max() < limit * right.abs().max()


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_other_rows_change_no_bit() -> None:
    """Nor do numbers that overflow in another row's slot."""
    matrix, rng = bank([70, 260], 700, 4, 8, torch.float32), torch.Generator().manual_seed(1)
    matrix.put(4, 0, torch.full((1, 700), 3e38), torch.full((1, 70), 3e38))
    x, y = torch.randn(9, 700, generator=rng), torch.randn(9, 330, generator=rng)
    mixed = torch.tensor([1, 4, 2, 0, 3, 1, 4, 2, 0])
    found = added(x, y, matrix, mixed)
    for slot in (1, 2, 3):
        alone = added(x, y, matrix, torch.full((9,), slot))
        assert torch.equal(found[mixed == slot], alone[mixed == slot])
    assert torch.equal(found[mixed == 0], y[mixed == 0])


def product(x: Tensor, weight: Tensor, matrix: LoraMatrix, slots: Tensor, **how: Any) -> Tensor:
    adapters = lora.AdaptedRows(matrix.a, matrix._every, matrix._heights, slots)
    return few_rows(x, weight, adapters=adapters, **how)


@pytest.mark.parametrize(
    ("rows", "heights", "slots", "rank", "how"),
    [
        (1, [300, 72, 44], 4, 5, {}),
        (7, [80, 80], 8, 16, {"gated": True}),
        (5, [130], 3, 70, {"tuning": FewRowsTuning(32, 128, 2, 2, left=True)}),
        (20, [40, 40], 9, 33, {"gated": True, "tuning": FewRowsTuning(32, 128, 2, 2)}),
    ],
)
def test_a_product_takes_those_of_adapters(
    rows: int, heights: list[int], slots: int, rank: int, how: dict[str, Any]
) -> None:
    """With tiles that belong to several parts, sums that are shared, and slots that are empty or nobody's."""
    matrix, rng = bank(heights, 256, slots, rank, torch.float32), torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 256, generator=rng), torch.randn(sum(heights), 256, generator=rng) / 16
    bias, slot_of = torch.randn(sum(heights), generator=rng), torch.randint(0, slots, (rows,), generator=rng)
    slot_of[-1] = 1
    right = x @ weight.T + bias
    StackedRows(slot_of, slots).add(x, right, matrix)
    right = silu_mul(right) if "gated" in how else right
    found = product(x, weight, matrix, slot_of, bias=bias, **how)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))
    plain = few_rows(x, weight, bias, **how)
    assert torch.equal(found[slot_of == 0], plain[slot_of == 0])
    for slot in slot_of.unique():
        alone = product(x, weight, matrix, torch.full((rows,), int(slot)), bias=bias, **how)
        assert torch.equal(found[slot_of == slot], alone[slot_of == slot])


def test_a_program_reads_all_its_numbers_at_once() -> None:
    """As far as sums of so many parts are read quickly by what adds them."""
    assert [lora.splits_of(inner, 512) for inner in (4096, 14336, 64, 600)] == [8, 32, 1, 2]
    assert lora.splits_of(14336, 128) == 32
