"""Products of LoRA adapters for a few rows, interpreted on the CPU, against plain torch; and how their sums
are cut for real shapes."""

import os
import weakref
from collections.abc import Callable
from functools import partial
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


from penstock.ops.kernels import pdl_launches
from penstock.ops.lora import LoraMatrix, StackedRows
from penstock.ops.triton import linear, lora, pointwise


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


def test_a_program_reads_all_its_numbers_at_once() -> None:
    """As far as sums of so many parts are read quickly by what adds them."""
    assert [lora.splits_of(inner, 512) for inner in (4096, 14336, 64, 600)] == [8, 32, 1, 2]
    assert lora.splits_of(14336, 128) == 32


@pytest.mark.parametrize(("rows", "rank", "dtype"), [(5, 5, torch.float32), (16, 40, torch.bfloat16)])
def test_activations_are_those_of_what_is_added(rows: int, rank: int, dtype: torch.dtype) -> None:
    """Bit by bit, also of rows without an adapter."""
    height, rng = 150, torch.Generator().manual_seed(rows)
    matrix = bank([height, height], 300, 3, rank, dtype)
    x, y = torch.randn(rows, 300, generator=rng).to(dtype), torch.randn(rows, 2 * height, generator=rng)
    y, slots = y.to(dtype), torch.arange(rows) % 4
    before = y.clone()
    found = lora.product(lambda: y, *of(matrix, x, slots), early=True, gated=True)
    assert torch.equal(y, before)
    assert torch.equal(found, pointwise.silu_mul(added(x, y, matrix, slots)))


def of(matrix: LoraMatrix, x: Tensor, slots: Tensor) -> tuple[Any, ...]:
    return x, matrix.a, matrix._every, matrix._heights, slots


class Arena:
    """torch, as a GPU's allocator makes it: what nobody names any more is given away at once, though a kernel
    may still use it. All is NaN at first."""

    def __init__(self) -> None:
        self._memory = torch.zeros(1 << 20, dtype=torch.uint8)
        self._live: list[tuple[int, int, weakref.ref[Tensor]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = -(-torch.Size(shape).numel() * dtype.itemsize // 512) * 512
        self._live = sorted(
            (one for one in self._live if one[2]() is not None), key=lambda one: (one[0], one[1])
        )
        begin = 0
        for first, end, _ in self._live:
            if begin + size <= first:
                break
            begin = end
        memory = self._memory[begin : begin + size].fill_(255).view(dtype)
        found = memory[: torch.Size(shape).numel()].view(shape)
        self._live.append((begin, begin + size, weakref.ref(found)))
        return found


class Overlapping:
    """Runs a product of the model, `kernel` of `linear`, as late as it may: behind all that the next launch
    does, and only if a program of that waits for it. Its variant for others must let them begin when it has
    waited, and no sooner."""

    def __init__(self, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kernel, self._shrink, arena = getattr(linear, kernel), lora._shrink, Arena()
        self._late: Callable[[], object] | None = None
        self._said: list[str] = []
        monkeypatch.setattr(linear, kernel, Launched(self._take))
        monkeypatch.setattr(lora, "_shrink", Launched(self._run_first))
        for module in (linear, lora):
            monkeypatch.setattr(module, "torch", arena)
            monkeypatch.setattr(module, "gdc_wait", lambda: self._said.append("wait"))
            monkeypatch.setattr(module, "gdc_launch_dependents", lambda: self._said.append("launch"))
            monkeypatch.setattr(module, "pdl_launch_options", lambda early: {})

    def _take(self, grid: tuple[int, ...], *given: object, **options: object) -> None:
        alias = [one.detach() if isinstance(one, Tensor) else one for one in given]  # No claim to memory.
        self._late = partial(self._kernel[grid], *alias, **options)

    def _run_first(self, grid: tuple[int, ...], *given: object, **options: object) -> None:
        self._said.clear()
        self._shrink[grid](*given, **options)
        waited = "wait" in self._said
        self._said.clear()
        if waited and self._late is not None:
            self._late()
            assert self._said == ["wait", "launch"] * (len(self._said) // 2)


class Launched:
    """A kernel, as far as it is launched."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_hidden_beside_the_models_product_it_is_what_it_is_behind_it(
    rows: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though that has not begun when the first launch ends but for a wait, and its scratch is free."""
    matrix, rng = bank([96, 96], 640, 3, 7, torch.bfloat16), torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 640, generator=rng).bfloat16(), torch.randn(192, 640, generator=rng)
    slots = torch.arange(1, rows + 1) % 4
    shared = linear.FewRowsTuning(64, 128, 2, 2, fetched=0)
    base = (
        partial(linear.one_row, x, weight.bfloat16())
        if rows == 1
        else partial(linear.few_rows, x, weight.bfloat16(), tuning=shared)
    )
    behind = lora.product(base, *of(matrix, x, slots), early=True, gated=gated)
    Overlapping("_one_row" if rows == 1 else "_few_rows", monkeypatch)
    with pdl_launches():
        hidden = lora.product(
            partial(base, before_others=True), *of(matrix, x, slots), early=None, gated=gated
        )
    assert torch.equal(behind, hidden)
