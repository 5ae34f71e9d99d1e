"""From the fused projection to pages in one kernel, interpreted on the CPU, against the steps one by one."""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if (
    os.environ.get("TRITON_INTERPRET") != "1"
):  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import tiny
from paged import pool_views
from penstock.ops.attention.attend import attend, write
from penstock.ops.attention.inputs import AttentionInputs, LayerAttention, QueryRun
from penstock.ops.linear import dense_linear as linear
from penstock.ops.project import HeadNorms, project, project_reference
from penstock.ops.triton import pointwise as triton_pointwise
from penstock.ops.triton.attention import write_kv
from penstock.ops.triton.pointwise import rms_norm, rope_

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""The distance between neighbours of the dtype, relative to the smaller; of float32 with room for another
order of a sum."""


class Case:
    """A fused projection with bias, rows far apart, and what turns it. A pool of NaN; two tokens of five have
    no slot."""

    def __init__(
        self,
        tokens: int,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        *,
        norms: bool,
        block_size: int = 4,
        turned: int | None = None,
    ) -> None:
        turned = dim if turned is None else turned
        rng = torch.Generator().manual_seed(tokens * 1000 + heads * 100 + dim)
        width = (heads + 2 * kv_heads) * dim
        x, weight, bias = (
            torch.randn(shape, generator=rng).to(dtype) for shape in ((tokens, 8), (width, 8), (width,))
        )
        self.qkv = torch.full((tokens, width + 16), math.nan, dtype=dtype)[:, 8 : width + 8]
        self.qkv.copy_(linear(x, weight, bias))
        angle = torch.rand(tokens, turned // 2 + 3, generator=rng)[:, : turned // 2] * 300
        self.cos, self.sin = angle.cos(), angle.sin()
        self.heads, self.kv_heads = heads, kv_heads
        gains = [torch.randn(dim, generator=rng).to(dtype) for _ in range(2)]
        self.norms = HeadNorms(*gains, 1e-6) if norms else None
        blocks = tokens // block_size + 3
        self.cache = pool_views(blocks, block_size, kv_heads, dim, dtype)
        self.slots = torch.randperm(blocks * block_size, generator=rng)[:tokens].clone()
        self.slots[torch.arange(tokens) % 5 > 2] = -1

    def fused(self) -> tuple[Tensor, ...]:
        """q, k, v and both caches, all of them copies of what was made in place."""
        qkv, cache = self.qkv.clone(memory_format=torch.preserve_format), tuple(x.clone() for x in self.cache)
        around = torch.full((len(qkv), qkv.shape[1] + 16), math.nan, dtype=qkv.dtype)
        view = around[:, 8:-8].copy_(qkv)
        gains, eps = ((self.norms.q, self.norms.k), self.norms.eps) if self.norms else (None, 0.0)
        views = triton_pointwise.project(
            view, self.cos, self.sin, cache, self.slots, heads=self.heads, gains=gains, eps=eps
        )
        assert all(
            x.untyped_storage().data_ptr() == around.untyped_storage().data_ptr() for x in views if x.numel()
        )
        assert around[:, :8].isnan().all()
        assert around[:, -8:].isnan().all()
        return *views, *cache

    def reference(self) -> tuple[Tensor, ...]:
        """The same, by what runs without kernels."""
        live = (self.slots >= 0).nonzero()[:, 0]
        q, k, v = project_reference(
            self.qkv.clone(), self.cos, self.sin, heads=self.heads, kv_heads=self.kv_heads, norms=self.norms
        )
        cache = tuple(x.clone() for x in self.cache)
        size = cache[0].shape[1]
        write(
            k[live],
            v[live],
            (cache[0], cache[1]),
            positions(self.slots[live] // size, self.slots[live] % size),
        )
        return q, k, v, *cache

    def kernels(self) -> tuple[Tensor, ...]:
        """The same, by one kernel for each step."""
        heads = self.qkv.clone().view(len(self.qkv), -1, self.cache[0].shape[3])
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.norms:
            q, k = rms_norm(q, self.norms.q, self.norms.eps)[0], rms_norm(k, self.norms.k, self.norms.eps)[0]
        rope_(q, k, self.cos, self.sin)
        cache = tuple(x.clone() for x in self.cache)
        write_kv(k, v, *cache, self.slots)
        return q, k, v, *cache


def positions(blocks: Tensor, offsets: Tensor, runs: tuple[QueryRun, ...] = ()) -> AttentionInputs:
    return AttentionInputs(blocks, offsets, torch.empty(0, dtype=torch.int64), None, runs)


def equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], steps: float) -> None:
    """Of q and k by so many steps of the largest number that was turned; values, and where there are none,
    exactly."""
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        if index in (2, 4):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            room = steps * STEP[one.dtype] * float(other.nan_to_num().abs().amax()) if other.numel() else 0.0
            torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=room, equal_nan=True)


SHAPES = [(4, 2, 64), (5, 5, 80), (3, 1, 96), (14, 2, 128), (9, 3, 8), (2, 1, 256)]
EVERY = [
    (*shape, dtype)
    for turn, shape in enumerate(SHAPES)
    for dtype in DTYPES
    if tiny.THOROUGH or dtype != DTYPES[1 + turn % 2]
]
"""All shapes in float32, and by turns in one of the others."""


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dtype"), EVERY)
class TestAgainstTheSteps:
    def test_without_norms(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        case = Case(7, heads, kv_heads, dim, dtype, norms=False)
        got = case.fused()
        equal(got, case.kernels())
        if dtype == torch.bfloat16:  # the interpreter truncates where everything else rounds
            close(got, case.reference(), 1)
        else:
            equal(got, case.reference())

    def test_with_norms(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        case = Case(7, heads, kv_heads, dim, dtype, norms=True)
        got = case.fused()
        close(got, case.kernels(), 2)
        close(got, case.reference(), 4 if dtype == torch.bfloat16 else 2)


@pytest.mark.parametrize(("dim", "turned"), [(128, 64), (64, 32), (80, 20), (96, 92), (24, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
class TestOfWhichPartIsRotated:
    def test_without_norms(self, dim: int, turned: int, dtype: torch.dtype) -> None:
        case = Case(7, 6, 2, dim, dtype, norms=False, turned=turned)
        got = case.fused()
        equal(got, case.kernels())
        if dtype == torch.bfloat16:
            close(got, case.reference(), 1)
        else:
            equal(got, case.reference())
        before = case.qkv.view(7, -1, dim)[:, :8, turned:]
        assert torch.equal(torch.cat((got[0], got[1]), 1)[..., turned:], before)

    def test_with_norms(self, dim: int, turned: int, dtype: torch.dtype) -> None:
        case = Case(7, 6, 2, dim, dtype, norms=True, turned=turned)
        got = case.fused()
        close(got, case.kernels(), 2)
        close(got, case.reference(), 4 if dtype == torch.bfloat16 else 2)


@settings(max_examples=30)
@given(
    tokens=st.integers(0, 6),
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 5),
    half=st.integers(1, 40),
    rest=st.sampled_from([0, 0, 1, 6, 30]),
    norms=st.booleans(),
    block_size=st.sampled_from([1, 2, 16]),
)
def test_any_shape(
    tokens: int, group: int, kv_heads: int, half: int, rest: int, norms: bool, block_size: int
) -> None:
    case = Case(
        tokens,
        group * kv_heads,
        kv_heads,
        2 * half + rest,
        torch.float32,
        norms=norms,
        block_size=block_size,
        turned=2 * half,
    )
    (close if norms else equal)(case.fused(), case.reference(), *([4] if norms else []))


def test_many_heads_take_several_programs_a_token() -> None:
    case = Case(3, 40, 20, 128, torch.float32, norms=True)
    close(case.fused(), case.reference(), 4)


def test_a_pool_beyond_two_billion_elements() -> None:
    """Only the pages that are touched exist: an address computed in 32 bits would fall outside or onto other
    bytes."""
    dim, stride = 16, 1 << 21
    pool = torch.empty(1104 * stride, dtype=torch.bfloat16)
    k_cache, v_cache = (
        pool.as_strided((1104, 16, 1, dim), (stride, dim, dim, 1), start) for start in (0, 16 * dim)
    )
    qkv, zero = torch.randn(1, 4 * dim).bfloat16(), torch.zeros(1, dim // 2)
    slots = torch.tensor([1103 * 16 + 5])
    _, k, v = triton_pointwise.project(qkv, zero + 1, zero, (k_cache, v_cache), slots, heads=2)
    assert torch.equal(k_cache[1103, 5], k[0])
    assert torch.equal(v_cache[1103, 5], v[0])


class TestWithoutKernels:
    @pytest.mark.parametrize("norms", [False, True])
    def test_writes_what_attention_would_have_written(self, norms: bool) -> None:
        case = Case(6, 4, 2, 16, torch.float32, norms=norms)
        blocks = torch.tensor([1, 0])
        at = torch.arange(6)
        inputs = positions(blocks[at // 4], at % 4, (QueryRun(0, 6, 0, blocks),))
        cache = tuple(x.clone() for x in case.cache)
        q, k, v = project(
            case.qkv.clone(), case.cos, case.sin, (cache[0], cache[1]), inputs, heads=4, norms=case.norms
        )
        seen = attend(q, k, v, (cache[0], cache[1]), inputs, LayerAttention(0.25)).out
        write(k, v, case.cache, inputs)
        want = attend(q, k, v, case.cache, inputs, LayerAttention(0.25)).out
        assert torch.equal(seen, want)
        equal(cache, case.cache)
        assert torch.equal(cache[1][blocks].flatten(0, 1)[:6], v)
