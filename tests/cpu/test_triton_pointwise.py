"""The small fused kernels, interpreted on the CPU, against float64 arithmetic written out plainly."""

import math
import os

import pytest
import torch
from torch import Tensor

if (
    os.environ.get("TRITON_INTERPRET") != "1"
):  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

from penstock.ops.triton.pointwise import rms_norm, rope_, silu_mul

TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 2.5e-2,
    torch.float16: 3e-3,
}  # the interpreter truncates to bf16 where a GPU rounds
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def close(got: Tensor, want: Tensor) -> None:
    assert want.dtype == torch.float64
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype])


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


class TestRmsNorm:
    @pytest.mark.parametrize("dim", [16, 96, 1500])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_without_residual(self, dim: int, dtype: torch.dtype) -> None:
        rng = torch.Generator().manual_seed(0)
        x, weight = (
            torch.randn(9, dim + 8, generator=rng).to(dtype)[:, :dim],
            torch.randn(dim, generator=rng).to(dtype),
        )
        before = x.clone()
        y, stream = rms_norm(x, weight, 1e-5)
        assert stream is x
        assert torch.equal(x, before)
        close(y, normed(x, weight, 1e-5))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_residual_takes_the_sum_and_the_sum_is_normalised(self, dtype: torch.dtype) -> None:
        rng = torch.Generator().manual_seed(1)
        x, residual = (
            torch.randn(5, 80, generator=rng).to(dtype),
            torch.randn(5, 160, generator=rng).to(dtype)[:, 40:120],
        )
        weight, before, total = (
            torch.randn(80, generator=rng).to(dtype),
            x.clone(),
            x.double() + residual.double(),
        )
        y, stream = rms_norm(x, weight, 1e-6, residual)
        assert stream is residual
        assert torch.equal(x, before)
        close(residual, total)
        close(y, normed(residual, weight, 1e-6))

    def test_per_head_over_a_view_of_a_fused_projection(self) -> None:
        rng = torch.Generator().manual_seed(2)
        heads = torch.randn(7, 10, 16, generator=rng)[:, 2:5]
        weight = torch.randn(16, generator=rng)
        y, _ = rms_norm(heads, weight, 1e-6)
        assert y.is_contiguous()
        close(y, normed(heads, weight, 1e-6))

    def test_epsilon_counts_and_zero_stays_zero(self) -> None:
        x = torch.stack([torch.zeros(32), torch.full((32,), 1e-3)])
        y, _ = rms_norm(x, torch.ones(32), 1e-6)
        assert torch.equal(y[0], torch.zeros(32))
        close(y[1], torch.full((32,), 1e-3 / math.sqrt(2e-6), dtype=torch.float64))


class TestRope:
    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 8), (6, 2, 16), (5, 1, 80), (4, 4, 64)])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rotates_views_in_place_and_nothing_beside_them(
        self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
    ) -> None:
        rng = torch.Generator().manual_seed(3)
        tokens, half = 6, dim // 2
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=rng).to(dtype)
        angle = torch.rand(tokens, half + 3, generator=rng)[:, :half] * 300
        cos, sin = angle.cos(), angle.sin()
        pair = (
            torch.complex(qkv[..., :half].double(), qkv[..., half:].double())
            * torch.complex(cos.double(), sin.double())[:, None]
        )
        turned = torch.cat([pair.real, pair.imag], -1)
        values = qkv[:, heads + kv_heads :].clone()
        rope_(qkv[:, :heads], qkv[:, heads : heads + kv_heads], cos, sin)
        close(qkv[:, : heads + kv_heads], turned[:, : heads + kv_heads])
        assert torch.equal(qkv[:, heads + kv_heads :], values)

    def test_queries_and_keys_as_one_view(self) -> None:
        rng = torch.Generator().manual_seed(5)
        qkv = torch.randn(3, 7, 16, generator=rng)
        cos, sin = torch.randn(3, 8, generator=rng), torch.randn(3, 8, generator=rng)
        apart = qkv.clone()
        rope_(apart[:, :4], apart[:, 4:6], cos, sin)
        rope_(qkv[:, :6], None, cos, sin)
        assert torch.equal(qkv, apart)


class TestSiluMul:
    @pytest.mark.parametrize("width", [8, 100, 1500])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_against_float64(self, width: int, dtype: torch.dtype) -> None:
        rng = torch.Generator().manual_seed(4)
        gate_up = (torch.randn(5, 2 * width + 8, generator=rng) * 3).to(dtype)[:, : 2 * width]
        gate, up = gate_up.double().chunk(2, -1)
        close(silu_mul(gate_up), gate * gate.sigmoid() * up)

    def test_far_ends(self) -> None:
        gate_up = torch.tensor([[-200.0, 200.0, 0.0, 1.0, 1.0, 1.0]])
        assert torch.equal(silu_mul(gate_up), torch.tensor([[0.0, 200.0, 0.0]]))


def test_no_tokens() -> None:
    x = torch.empty(0, 16)
    assert rms_norm(x, torch.ones(16), 1e-6)[0].shape == (0, 16)
    assert silu_mul(x).shape == (0, 8)
    rope_(torch.empty(0, 2, 8), torch.empty(0, 1, 8), torch.empty(0, 4), torch.empty(0, 4))
