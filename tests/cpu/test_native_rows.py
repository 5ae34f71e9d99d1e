"""Kernels in C for what a decoder computes between products of few rows on a CPU, and for halves of layers,
against plain torch."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.ops.activation import silu_mul
from penstock.ops.attention.inputs import AttentionInputs, LayerAttention, Rows
from penstock.ops.kernels import between_products, row_kernels
from penstock.ops.linear import linear
from penstock.ops.matrix import GroupViews
from penstock.ops.native import attention, few_bits, layers, pointwise
from penstock.ops.native.compiler import NativeError, load
from penstock.ops.norm import add_rms_norm, rms_norm
from penstock.ops.project import project, project_reference
from quantised import SCHEMES, matrix_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEP = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""A unit in the last place of a dtype, and less than two."""


WAYS = {"best": (), "no_avx512": ("-mno-avx512f",), "portable": ("-mno-avx512f", "-mno-avx2")}
"""Flags that leave out instructions which this processor may have."""


@cache
def compiled(kept: Path, way: str) -> few_bits.FewBitsLibrary:
    return few_bits.FewBitsLibrary(load(kept, WAYS[way]))


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native-rows")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, kept: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels compiled in one of the ways that this processor can run."""
    try:
        library = compiled(kept, request.param)
    except NativeError as fault:
        pytest.skip(str(fault))
    found = few_bits._Found()
    found.library, found.sought = library, True
    monkeypatch.setattr(few_bits, "_found", found)
    return str(request.param)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=STEP[want.dtype] / 8, rtol=STEP[want.dtype])


@pytest.mark.parametrize("size", [64, 100, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_gates(dtype: torch.dtype, size: int, way: str) -> None:
    x, weight, residual = (
        drawn(5, size, dtype=dtype),
        drawn(size, seed=1, dtype=dtype),
        drawn(5, size, seed=2, dtype=dtype),
    )
    sums = residual + x
    with between_products(True):
        assert row_kernels("pointwise", x) is pointwise
        assert row_kernels("pointwise", drawn(17, size, dtype=dtype)) is None
        norm, gate = rms_norm(x, weight, 1e-5), silu_mul(torch.cat((x * 9, residual), 1))
        added, onto = residual.clone(), residual.clone()
        both = add_rms_norm(x, added, weight, 1e-5)
        one = add_rms_norm(x[3:4].clone(), onto[3:4], weight, 1e-5)
    close(norm, rms_norm(x, weight, 1e-5))
    close(gate, silu_mul(torch.cat((x * 9, residual), 1)))
    assert torch.equal(added, sums)
    close(both, rms_norm(sums, weight, 1e-5))
    assert torch.equal(one, both[3:4]), "a row depends on others"


def test_gates_of_what_is_large_or_no_number(way: str) -> None:
    gate = torch.tensor([[-200.0, -90, -30, 0, 30, 90, 200, torch.inf, torch.nan, 1]])
    got = pointwise.silu_mul(torch.cat((gate, torch.ones_like(gate)), 1))
    torch.testing.assert_close(got, torch.nn.functional.silu(gate), equal_nan=True, atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_projections(dtype: torch.dtype, way: str) -> None:
    heads, kv_heads, dim = 6, 2, 64
    qkv, angles = drawn(4, (heads + 2 * kv_heads) * dim, dtype=dtype), drawn(4, dim // 2, seed=1)
    pages = torch.zeros(5, 2, 16, kv_heads, dim, dtype=dtype)
    cache, slots = (pages[:, 0], pages[:, 1]), torch.tensor([17, -1, 79, 3])
    inputs = AttentionInputs(slots // 16, slots % 16, slots, None, ())
    want = project_reference(
        qkv.clone(), angles.cos(), angles.sin(), heads=heads, kv_heads=kv_heads, norms=None
    )
    with between_products(True):
        got = project(qkv, angles.cos(), angles.sin(), cache, inputs, heads=heads, norms=None)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(cache[0][slot // 16, slot % 16], want[1][token])
            assert torch.equal(cache[1][slot // 16, slot % 16], want[2][token])
    assert int((cache[0] != 0).any(-1).any(-1).sum()) == 3, "a token without a slot was written"


@pytest.mark.parametrize("group", [1, 3, 6])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype: torch.dtype, window: int | None, group: int, way: str) -> None:
    kv_heads, dim, lengths = 2, 128, [37, 1, 0, 64]
    pages = drawn(16, 2, 16, kv_heads, dim, dtype=dtype)
    table = torch.randperm(16, generator=torch.Generator().manual_seed(1)).view(4, 4).int()
    q = drawn(4, kv_heads * group, dim, seed=2, dtype=dtype)
    rows = Rows(4, table, torch.tensor(lengths, dtype=torch.int32), 64)
    layer, cache = LayerAttention(0.1, window), (pages[:, 0], pages[:, 1])
    assert attention.suits(q, cache, layer)
    out = torch.full_like(q, torch.nan)
    attention.paged_decode(q, cache, rows, layer, out=out)
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(length - window, 0)
        k, v = (x[table[row].long()].flatten(0, 1)[first:length].double() for x in cache)
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        weights = (torch.einsum("hd,khd->hk", q[row].double(), k) * 0.1).softmax(-1)
        want = torch.einsum("hk,khd->hd", weights, v).to(dtype)
        # Sums of up to 64 terms of about 1, each rounded in float32.
        torch.testing.assert_close(out[row], want, atol=max(STEP[dtype] / 8, 2e-6), rtol=STEP[dtype])
    alone = torch.empty_like(q[3:])
    attention.paged_decode(q[3:], cache, Rows(1, table[3:], rows.lengths[3:], 64), layer, out=alone)
    assert torch.equal(alone[0], out[3]), "a row depends on others"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_half_a_layer_is_its_calls_one_by_one(dtype: torch.dtype, rows: int, way: str) -> None:
    gate_up, _ = matrix_of(SCHEMES["packed"], drawn(512, 320) / 17)
    down, _ = matrix_of(SCHEMES["packed"], drawn(320, 256, seed=5) / 17)
    norm = drawn(320, seed=3, dtype=dtype)
    views = GroupViews({"gate_up": gate_up, "down": down}, {"norm": norm}, ())
    x, part = drawn(rows, 320, dtype=dtype), drawn(rows, 320, seed=4, dtype=dtype)
    for before in (None, part):
        residual, other = x.clone(), x.clone()
        got = layers.feed_forward(views, 1e-5, residual, None if before is None else before.clone())
        with between_products(True):
            normed = (
                rms_norm(other, norm, 1e-5) if before is None else add_rms_norm(before, other, norm, 1e-5)
            )
            want = linear(silu_mul(linear(normed, gate_up)), down)
        assert got is not None
        assert torch.equal(got, want)
        assert torch.equal(residual, other)
