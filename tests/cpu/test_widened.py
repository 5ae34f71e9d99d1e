"""Products in half precision, through float32 where the CPU has no instructions for them."""

import pytest
import torch

from penstock.ops import linear as products
from penstock.ops import widened
from penstock.ops.widened import widened_product, widens

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def made(rows: int, inner: int, height: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, inner).to(dtype), torch.randn(height, inner).to(dtype)


def rounded(x: torch.Tensor, weight: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
    exact = x.double() @ weight.double().t()
    return exact if onto is None else exact + onto.double()


def near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Each number is the nearest of its dtype, or beside it where float32's own rounding decides."""
    error = (found.double() - exact).abs()
    return bool((error <= exact.abs() * torch.finfo(found.dtype).eps * 0.51 + 1e-4).all())


@DTYPES
@pytest.mark.parametrize(
    ("rows", "inner", "height"), [(8, 96, 40), (33, 64, 7), (9, 4096, 300), (300, 48, 20_000)]
)
def test_a_product_is_rounded_once(dtype: torch.dtype, rows: int, inner: int, height: int) -> None:
    x, weight = made(rows, inner, height, dtype)
    found = widened_product(x, weight, x.new_empty(rows, height))
    assert near(found, rounded(x, weight))
    wide = torch.randn(rows, 2 * height).to(dtype)
    before, part = wide.clone(), wide[:, height:]
    assert widened_product(x, weight, part, adds=True).data_ptr() == part.data_ptr()
    assert near(part, rounded(x, weight, before[:, height:]))
    assert torch.equal(wide[:, :height], before[:, :height])


@DTYPES
def test_linear_and_its_kin_take_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """From so many rows on, where the CPU lacks the instructions; a CPU that has them goes on as before."""
    for has in (False, True):
        monkeypatch.setattr(widened, "_has_instructions", lambda _, has=has: has)
        taken = list[int]()

        def product(x: torch.Tensor, *given: torch.Tensor, **how: bool) -> torch.Tensor:
            taken.append(len(x))  # noqa: B023
            return widened_product(x, *given, **how)

        monkeypatch.setattr(products, "widened_product", product)
        for rows in (1, 7, 8, 300):
            x, weight = made(rows, 64, 80, dtype)
            bias, onto = torch.randn(80).to(dtype), torch.randn(rows, 80).to(dtype)
            plain = products.dense_linear(x, weight)
            biased = products.dense_linear(x, weight, bias, out=x.new_empty(rows, 80))
            exact = rounded(x, weight)
            assert torch.allclose(plain.double(), exact, rtol=0.02, atol=0.1)
            assert torch.allclose(biased.double(), exact + bias.double(), rtol=0.03, atol=0.2)
            added = onto.clone()
            products.add_dense(x, weight, added)
            assert torch.allclose(added.double(), rounded(x, weight, onto), rtol=0.02, atol=0.1)
        assert taken == ([] if has else [8] * 3 + [300] * 3)


def test_which_products_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "_has_instructions", lambda dtype: dtype == torch.float16)
    assert widens(torch.empty(8, 4, dtype=torch.bfloat16))
    assert not widens(torch.empty(7, 4, dtype=torch.bfloat16))
    assert not widens(torch.empty(8, 4, dtype=torch.float16))
    assert not widens(torch.empty(8, 4))
