"""Kernels in C for feed-forwards of experts that rest on the host, against what their matrices stand for."""

import os
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import native_ways
from penstock.arch.spec import SWIGLU, Activation
from penstock.ops.activation import activate
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.native.experts import ThreadPool, by_dots, takes
from quantised import SCHEMES, gptq, matrix_of

DTYPES = (torch.bfloat16, torch.float16)
STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""What rounding changes a number by, at most, relative to it."""
CLAMPED = Activation(alpha=1.702, shift=1.0, limit=7.0)
DENSE = "dense"
WIDE_GROUPS = {"gptq_128_asymmetric": gptq(4, 128, symmetric=False)}
LAYOUTS = [DENSE, *(name for name in {**SCHEMES, **WIDE_GROUPS} if "order" not in name)]
DOTS = (DENSE, "mxfp4", "gptq_128", *WIDE_GROUPS, "packed_channel", "fp8_128", "fp8_channel", "mxfp8")
"""Layouts that dot products multiply, of widths that are whole runs."""
Expert = tuple[GroupViews, Tensor, Tensor]
"""An expert, and its matrices in float32."""


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native-experts")


@pytest.fixture(params=[*native_ways.WAYS, "tiles"])
def way(request: pytest.FixtureRequest, kept: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels compiled in one of the ways that this processor can run."""
    native_ways.use(request.param, kept, monkeypatch)
    return str(request.param)


@pytest.fixture
def pool(way: str) -> Iterator[ThreadPool]:
    made = ThreadPool(3, tiles=True)
    yield made
    made.close()


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(layout: str, height: int, width: int, seed: int, dtype: torch.dtype) -> tuple[Matrix, Tensor]:
    made = drawn(height, width, seed=seed) / width**0.5
    if layout == DENSE:
        return Matrix.of(made.to(dtype)), made.to(dtype).float()
    return matrix_of({**SCHEMES, **WIDE_GROUPS}[layout], made)


def expert(
    layout: str, shape: tuple[int, int], seed: int, dtype: torch.dtype, biases: bool = False
) -> Expert:
    hidden, inner = shape
    gate_up, both = matrix(layout, 2 * inner, hidden, seed, dtype)
    down, plain = matrix(layout, hidden, inner, seed + 100, dtype)
    sizes = {"gate_up_bias": 2 * inner, "down_bias": hidden} if biases else {}
    vectors = {name: drawn(size, seed=seed + size, dtype=dtype) for name, size in sizes.items()}
    return GroupViews({"gate_up": gate_up, "down": down}, vectors, ()), both, plain


def wanted(x: Tensor, one: Expert, activation: Activation) -> Tensor:
    """The output in float64, but for what is between the products, which is rounded to the dtype."""
    views, both, down = one
    add = {name: bias.double() for name, bias in views.vectors.items()}
    gate_up = x.double() @ both.double().T + add.get("gate_up_bias", 0)
    inner = activate(gate_up, activation).to(x.dtype).double()
    return inner @ down.double().T + add.get("down_bias", 0)


def close(got: Tensor, want: Tensor, inner_size: float = 1.0) -> None:
    """Roundings of the result, and of what is between the products: some of these fall to the other side."""
    step = STEP[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=step * 1.01, atol=step * inner_size)


@lru_cache(maxsize=1)
def unlike(layout: str, shape: tuple[int, int], count: int, dtype: torch.dtype) -> list[Expert]:
    return [expert(layout, shape, seed, dtype) for seed in range(count)]


@cache
def asked(
    layout: str, dtype: torch.dtype, shape: tuple[int, int], counts: tuple[int, ...]
) -> tuple[Tensor, Tensor, list[GroupViews], Tensor]:
    """What feed-forwards are given, and what they have to be, which is the same for all kernels."""
    # Of all layouts but one, both dtypes have the same matrices.
    some = unlike(layout, shape, len(counts), dtype if layout == DENSE else DTYPES[0])
    x, tokens = (
        drawn(7, shape[0] + 3, seed=9, dtype=dtype)[:, : shape[0]],
        torch.arange(33, dtype=torch.int32) * 5 % 7,
    )
    rows = x[tokens.long()].split(counts)
    want = torch.cat([wanted(part, one, SWIGLU) for part, one in zip(rows, some, strict=True)])
    return x, tokens, [one[0] for one in some], want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layout", "shape"), [*((name, (352, 96)) for name in LAYOUTS), *((name, (256, 128)) for name in DOTS)]
)
def test_feed_forwards(layout: str, dtype: torch.dtype, shape: tuple[int, int], pool: ThreadPool) -> None:
    """Each expert has rows of its own, any number of them, wherever they are in x."""
    counts = (1, 16, 2, 0, 9, 5)
    x, tokens, some, want = asked(layout, dtype, shape, counts)
    assert takes(x, some[0])
    whole = torch.full((35, shape[0] + 2), torch.nan, dtype=dtype)
    out = whole[1:-1, 1:-1]
    pool.feed_forward(x, some, counts, SWIGLU, out, tokens)
    close(out, want)
    assert whole.isnan().sum() == whole.numel() - want.numel(), "written beside the result"


@pytest.mark.parametrize("way", [*native_ways.WAYS, *native_ways.TILES], indirect=True)
@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED])
@pytest.mark.parametrize("layout", [DENSE, "mxfp4", "packed_asymmetric"])
def test_biases_and_activations(layout: str, activation: Activation, pool: ThreadPool) -> None:
    one = expert(layout, (320, 192), 3, torch.bfloat16, biases=True)
    x = drawn(5, 320, seed=4, dtype=torch.bfloat16) * 4
    out = torch.empty_like(x)
    pool.feed_forward(x, [one[0]], [5], activation, out)
    close(out, wanted(x, one, activation), 8)


@cache
def wide(layout: str) -> list[GroupViews]:
    """Two experts whose matrices are wider than one panel."""
    return [expert(layout, (1280, 640), seed, torch.bfloat16)[0] for seed in range(2)]


def outputs(pool: ThreadPool, x: Tensor, some: Sequence[GroupViews], rows: int) -> Tensor:
    out = x.new_empty(rows * len(some), x.shape[1])
    tokens = torch.arange(rows, dtype=torch.int32).repeat(len(some))
    pool.feed_forward(x, some, [rows] * len(some), SWIGLU, out, tokens)
    return out.view(len(some), rows, -1)


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        (layout, way)
        for turn, layout in enumerate([*DOTS, "gptq", "nvfp4", "packed_8"])
        for other, way in enumerate([*native_ways.WAYS, "tiles"])
        if way == "best" or "PENSTOCK_THOROUGH" in os.environ or turn % 3 == other % 3
    ],
    indirect=["way"],
)
def test_a_row_depends_on_nothing_else(layout: str, way: str) -> None:
    """Not on other rows, other experts, or the number of threads; widths are more than one panel."""
    some = wide(layout)
    x = drawn(17, 1280, seed=5, dtype=torch.bfloat16)
    found = list[Tensor]()
    more = ((2, (1, 5)), (4, range(1, 17))) if way == "best" else ((3, (2, 3, 5)),)
    for threads, counts in ((1, (1, 8)), *more):
        pool = ThreadPool(threads)
        found.append(outputs(pool, x, some, 17))
        for rows in counts:
            assert torch.equal(outputs(pool, x, some, rows), found[0][:, :rows]), (threads, rows)
        assert torch.equal(outputs(pool, x, some[1:], 3), found[0][1:, :3])
        pool.close()
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("layout", DOTS)
def test_dot_products(layout: str, way: str) -> None:
    """Where the processor has them, these formats are multiplied by them, and only for bfloat16."""
    flags = Path("/proc/cpuinfo").read_text()
    views, _, _ = expert(layout, (256, 128), 1, torch.bfloat16)
    for weight in views.matrices.values():
        assert by_dots(torch.empty(1, 1, dtype=torch.bfloat16), weight) == (
            way in ("best", *native_ways.TILES) and "avx512_bf16" in flags
        )
        assert not by_dots(torch.empty(1, 1, dtype=torch.float16), weight)


@pytest.mark.parametrize("layout", ["mxfp4", "fp8_channel", *WIDE_GROUPS])
def test_all_codes_and_scales(layout: str, pool: ThreadPool) -> None:
    """Every code at every place of a run, and scales from the least to the largest that a file may have."""
    one = expert(layout, (256, 256), 1, torch.bfloat16)
    parts = one[0].matrices["down"].parts
    rng = torch.Generator().manual_seed(6)
    codes = torch.randint(256, parts["codes"].shape, generator=rng, dtype=torch.uint8)
    if layout == "fp8_channel":
        codes[codes & 0x7F == 0x7F] = 0x01
    parts["codes"].copy_(codes)
    if layout == "mxfp4":
        exponents = torch.tensor([0, 1, 2, 20, 127, 140, 200, 252], dtype=torch.uint8)
        parts["scale"].copy_(exponents[torch.arange(256) % 8][:, None].expand_as(parts["scale"]))
    plain = one[0].matrices["down"].dequantised(torch.empty(0))
    x = drawn(3, 256, seed=8, dtype=torch.bfloat16) / 32
    want, size = wanted(x, (one[0], one[1], plain), SWIGLU), plain.double().abs().sum(1)
    for rows in (1, 3):
        out = torch.empty_like(x[:rows])
        pool.feed_forward(x[:rows], [one[0]], [rows], SWIGLU, out)
        wrong = (out.double() - want[:rows]).abs()
        assert (wrong <= 2**-8 * want[:rows].abs() + 2**-14 * size + 2**-120).all()


def test_what_is_not_taken(way: str) -> None:
    x = torch.empty(1, 256, dtype=torch.bfloat16)
    for layout in ("gptq_order", "packed_order"):
        assert not takes(x, expert(layout, (256, 128), 1, torch.bfloat16)[0])
    assert not takes(x, expert(DENSE, (256, 100), 1, torch.bfloat16)[0])
    assert not takes(x, expert(DENSE, (256, 128), 1, torch.float16)[0])
    assert not takes(x.float(), expert("mxfp4", (256, 128), 1, torch.bfloat16)[0])


@pytest.mark.parametrize("way", ["best", "tiles"], indirect=True)
@pytest.mark.parametrize("layout", [*DOTS, "gptq", "packed_8"])
def test_rows_by_tiles_depend_on_nothing_else(layout: str, way: str) -> None:
    """Nor on how many rows an expert has, if it has enough of them for tiles."""
    some = wide(layout)
    x = drawn(17, 1280, seed=5, dtype=torch.bfloat16)
    plain, pools = ThreadPool(2), [ThreadPool(threads, tiles=True) for threads in (1, 4)]
    few, many = outputs(plain, x, some, 2), outputs(pools[0], x, some, 17)
    assert pools[0].by_tiles or torch.equal(many[:, :2], few)
    for pool in pools:
        assert torch.equal(outputs(pool, x, some, 2), few)
        for rows in (3, 4, 5, 8, 9, 16, 17):
            assert torch.equal(outputs(pool, x, some, rows), many[:, :rows]), rows
        tokens = torch.cat([torch.arange(3), torch.arange(16)]).int()
        mixed = x.new_empty(19, 1280)
        pool.feed_forward(x, some, (3, 16), SWIGLU, mixed, tokens)
        assert torch.equal(mixed, torch.cat([many[0, :3], many[1, :16]]))
    for pool in (plain, *pools):
        pool.close()


@pytest.mark.parametrize("way", [*native_ways.WAYS, *native_ways.TILES], indirect=True)
def test_tiles(way: str) -> None:
    """They are used where there are any and the system allows it, and only by pools that may."""
    with_tiles = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    dots = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    for allowed in (False, True):
        pool = ThreadPool(1, allowed)
        assert pool.by_tiles == (allowed and ((way == "tiles" and dots) or (way == "best" and with_tiles)))
        pool.close()
        with pytest.raises(AssertionError, match="closed"):
            _ = pool.by_tiles
