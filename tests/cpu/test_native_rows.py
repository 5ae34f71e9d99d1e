"""Kernels in C for what a decoder computes between products of few rows on a CPU, and for halves of layers,
against plain torch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import native_ways
from penstock.arch.formats.joined import Joined
from penstock.ops.activation import silu_mul
from penstock.ops.attention.attend import attend
from penstock.ops.attention.inputs import AttentionInputs, LayerAttention, Rows
from penstock.ops.kernels import between_products, row_kernels
from penstock.ops.linear import linear
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.native import layers, pointwise
from penstock.ops.norm import add_rms_norm, rms_norm
from penstock.ops.project import HeadNorms, project, project_reference
from quantised import SCHEMES, matrix_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEP = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""A unit in the last place of a dtype, and less than two."""


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native-rows")


@pytest.fixture(params=native_ways.WAYS)
def way(request: pytest.FixtureRequest, kept: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels compiled in one of the ways that this processor can run."""
    native_ways.use(request.param, kept, monkeypatch)
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


@pytest.mark.parametrize("turned", [64, 32, 10])
@pytest.mark.parametrize("dtype", DTYPES)
def test_projections(dtype: torch.dtype, turned: int, way: str) -> None:
    heads, kv_heads, dim = 6, 2, 64
    qkv, angles = drawn(4, (heads + 2 * kv_heads) * dim, dtype=dtype), drawn(4, turned // 2, seed=1)
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


def below(first: Matrix, second: Matrix) -> Matrix:
    """Two matrices of several formats that one product reads."""
    format = Joined(formats=(first.format, second.format), heights=(first.shape[0], second.shape[0]))
    both = enumerate((first, second))
    parts = {f"{at}.{name}": part for at, one in both for name, part in one.parts.items()}
    return Matrix(format, (first.shape[0] + second.shape[0], first.shape[1]), parts)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("window", "turned"), [(None, 64), (20, 64), (None, 32)])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_half_a_layer_is_its_calls_one_by_one(
    dtype: torch.dtype, rows: int, window: int | None, turned: int, several: bool, way: str
) -> None:
    """A product with matrices of several formats is rounded before its bias is added, but here once."""
    if several and dtype != torch.float32:
        pytest.skip("rounded once instead of twice")
    heads, kv_heads, dim, hidden, eps = 6, 2, 64, 320, 1e-5
    height, lengths = (heads + 2 * kv_heads) * dim, torch.tensor([37, 1, 64], dtype=torch.int32)[:rows]
    qkv, _ = matrix_of(SCHEMES["packed"], drawn(height, hidden) / 17)
    if several:
        q, _ = matrix_of(SCHEMES["packed"], drawn(heads * dim, hidden) / 17)
        qkv = below(q, matrix_of(SCHEMES["packed_8"], drawn(2 * kv_heads * dim, hidden, seed=8) / 17)[0])
    out, _ = matrix_of(SCHEMES["packed"], drawn(hidden, heads * dim, seed=5) / 17)
    vectors = {
        name: drawn(size, seed=seed, dtype=dtype)
        for seed, (name, size) in enumerate(
            {"norm": hidden, "qkv_bias": height, "q_norm": dim, "k_norm": dim, "out_bias": hidden}.items(), 9
        )
    }
    views = GroupViews({"qkv": qkv, "out": out}, vectors, ())
    pages = drawn(16, 2, 16, kv_heads, dim, seed=6, dtype=dtype)
    table = torch.randperm(16, generator=torch.Generator().manual_seed(1)).int().view(4, 4)[:rows]
    at = lengths.long() - 1
    blocks = table.gather(1, at.unsqueeze(1) // 16).squeeze(1).long()
    inputs = AttentionInputs(blocks, at % 16, blocks * 16 + at % 16, Rows(rows, table, lengths, 64), ())
    angles, layer = drawn(rows, turned // 2, seed=7), LayerAttention(0.1, window)
    cos, sin = angles.cos(), angles.sin()
    x, part = drawn(rows, hidden, dtype=dtype), drawn(rows, hidden, seed=4, dtype=dtype)
    half = layers.Half(views, ("qkv", "out"), dtype, eps)
    half.attend(views, (heads, kv_heads, dim), layer, eps, turned)
    for before in (None, part):
        residual, other, mine, theirs = x.clone(), x.clone(), pages.clone(), pages.clone()
        cache = mine[:, 0], mine[:, 1]
        assert layers.suits(inputs, cache, residual)
        got = layers.attention(
            half, residual, None if before is None else before.clone(), (cos, sin), cache, inputs
        )
        with between_products(True):
            cache, norm = (theirs[:, 0], theirs[:, 1]), vectors["norm"]
            normed = rms_norm(other, norm, eps) if before is None else add_rms_norm(before, other, norm, eps)
            projected = linear(normed, qkv, vectors["qkv_bias"])
            norms = HeadNorms(vectors["q_norm"], vectors["k_norm"], eps)
            q, k, v = project(projected, cos, sin, cache, inputs, heads=heads, norms=norms)
            seen = attend(q, k, v, cache, inputs, layer).out.view(rows, heads * dim)
            want = linear(seen, out, vectors["out_bias"])
        assert got is not None
        assert torch.equal(got, want)
        assert torch.equal(residual, other)
        assert torch.equal(mine, theirs)
