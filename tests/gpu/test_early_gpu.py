"""Kernels whose launches overlap: products of one row and of few, what stands around a recorded step, and a
chain of all of them, which comes out the same as one after the other, and does not as soon as a wait on the
device is left out."""

import types

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

from penstock.arch.spec import RopeSpec
from penstock.ops import steps
from penstock.ops.attention.inputs import LayerAttention, Rows
from penstock.ops.kernels import counting, pdl_launches
from penstock.ops.rope import RotaryAngles
from penstock.ops.triton import attention as triton_attention
from penstock.ops.triton import linear as triton_linear
from penstock.ops.triton import pointwise as triton_pointwise
from penstock.ops.triton.attention import paged_decode
from penstock.ops.triton.linear import few_rows, one_row, suits_few_rows
from penstock.ops.triton.pointwise import project, rms_norm
from penstock.ops.triton.steps import likeliest, place

DEVICE = torch.device("cuda")

if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("kernels cannot wait for each other on this device", allow_module_level=True)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("inner", "outer"),
    [(64, 100), (1000, 24), (1024, 3072), (4096, 4096), (14336, 520), (20000, 8), (28672, 16)],
)
def test_product_of_one_row(inner: int, outer: int, dtype: torch.dtype, early: bool) -> None:
    x, bias = random(1, inner, dtype=dtype), random(outer, dtype=dtype, seed=2)
    weight = (random(outer, inner + 8, dtype=dtype, seed=1) / inner**0.5)[:, :inner]
    tolerance = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    with pdl_launches(early):
        for some in (None, bias):
            want = x.double() @ weight.double().T + (0 if some is None else some.double())
            got = one_row(x, weight, some)
            assert float((got.double() - want).abs().max() / want.abs().max()) < tolerance
            apart = torch.nn.functional.silu(want[:, : outer // 2].to(dtype).double()) * want[:, outer // 2 :]
            gated = one_row(x, weight, some, gated=True)
            assert float((gated.double() - apart).abs().max() / apart.abs().max()) < 2 * tolerance


few = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="products of few rows are the library's on this device",
)


@few
@pytest.mark.parametrize(("early", "dtype"), [(False, torch.bfloat16), (True, torch.float16)], ids=str)
@pytest.mark.parametrize("rows", [2, 17, 64])
@pytest.mark.parametrize(
    ("inner", "outer"), [(128, 256), (1024, 4096), (3072, 1000), (4096, 6144), (1024, 20000)]
)
def test_product_of_few_rows(inner: int, outer: int, rows: int, early: bool, dtype: torch.dtype) -> None:
    x, bias = random(rows, inner + 8, dtype=dtype)[:, :inner], random(outer, dtype=dtype, seed=2)
    weight = (random(outer, inner + 8, dtype=dtype, seed=1) / inner**0.5)[:, :inner]
    tolerance = {torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    shared = torch.zeros(256, dtype=torch.int32, device=DEVICE)
    assert suits_few_rows(x, weight)
    with pdl_launches(early), counting(shared):
        for some in (None, bias):
            want = x.double() @ weight.double().T + (0 if some is None else some.double())
            got = few_rows(x, weight, some)
            assert float((got.double() - want).abs().max() / want.abs().max()) < tolerance
            assert torch.equal(
                got[:1], few_rows(torch.cat((x[:1], x[1:].flip(0))), weight, some)[:1]
            )  # whatever the others hold
            apart = torch.nn.functional.silu(want[:, : outer // 2].to(dtype).double()) * want[:, outer // 2 :]
            gated = few_rows(x, weight, some, gated=True)
            assert float((gated.double() - apart).abs().max() / apart.abs().max()) < 2 * tolerance
    assert not shared.any()


def test_likeliest_tokens() -> None:
    for vocab, rows in ((151936, 64), (100, 3), (8193, 256)):
        logits = (random(rows, vocab, seed=vocab) * 4).round()  # Full of ties.
        whose = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).int().to(DEVICE)
        newest, tokens = (
            torch.zeros(rows + 1, dtype=torch.int64, device=DEVICE),
            torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        )
        best = torch.full((rows,), steps.LEAST, dtype=torch.int64, device=DEVICE)
        for _ in range(2):
            likeliest(logits, whose, newest, tokens, best)
            want = torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits])
            assert torch.equal(tokens, want)
            assert torch.equal(newest[whose.long()], want)
            logits = logits.flip(1)


def test_places_of_rows() -> None:
    angles = RotaryAngles(RopeSpec(500000.0, 128), DEVICE)
    everyone, count = 300, 256
    rng = torch.Generator().manual_seed(0)
    table = torch.randint(0, 9999, (everyone + 1, 2000), generator=rng, dtype=torch.int32).to(DEVICE)
    newest = torch.randint(0, 99999, (everyone + 1,), generator=rng).to(DEVICE)
    given = torch.empty(steps.FIELDS, count, dtype=torch.int32)
    given[0] = torch.randperm(everyone, generator=rng)[:count]
    given[1] = torch.randint(-1, 64 * 2000, (count,), generator=rng)
    given[2] = torch.randint(-1, 3, (count,), generator=rng)
    given[3], given[4] = given[0], given[1].clamp(min=0) // 64
    given[5] = torch.randint(0, 9999, (count,), generator=rng)
    other = table.clone()
    want = steps.place(
        given.clone(),
        other.cpu(),
        newest.cpu(),
        RotaryAngles(RopeSpec(500000.0, 128), torch.device("cpu")),
        64,
    )
    got = steps.Placed(*place(given.to(DEVICE), table, newest, angles.frequencies, angles.scale, 64))
    for name in ("tokens", "slots", "lengths", "blocks", "offsets"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
    for row, length in enumerate(want.lengths.tolist()):
        assert torch.equal(got.table[row, : -(-length // 64)].cpu(), want.table[row, : -(-length // 64)])
    torch.testing.assert_close(got.cos.cpu(), want.cos, rtol=0, atol=1e-7)
    torch.testing.assert_close(got.sin.cpu(), want.sin, rtol=0, atol=1e-7)


class Chain:
    """Some layers as a decode step of so many rows computes them, over buffers that each time hold NaN before
    they are written."""

    HEADS, KV_HEADS, DIM, HIDDEN, INNER, LAYERS, SIZE = 32, 8, 128, 4096, 14336, 3, 64

    def __init__(self, rows: int = 1) -> None:
        self.rows, self.product = rows, one_row if rows == 1 else few_rows
        self.counters = torch.zeros(256, dtype=torch.int32, device=DEVICE)
        wide = (self.HEADS + 2 * self.KV_HEADS) * self.DIM
        shapes = [
            (wide, self.HIDDEN),
            (self.HIDDEN, self.HEADS * self.DIM),
            (2 * self.INNER, self.HIDDEN),
            (self.HIDDEN, self.INNER),
        ]
        self.layers = [
            [random(*shape, seed=7 * layer + index) / shape[1] ** 0.5 for index, shape in enumerate(shapes)]
            for layer in range(self.LAYERS)
        ]
        self.gain = torch.ones(self.HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        self.pool = random(self.LAYERS, 2, 40 * rows, self.SIZE, self.KV_HEADS, self.DIM, seed=99)
        self.table = (
            torch.randperm(40 * rows, generator=torch.Generator().manual_seed(5))
            .int()
            .view(rows, 40)
            .to(DEVICE)
        )
        self.lengths = torch.full((rows,), 2001, dtype=torch.int32, device=DEVICE)
        self.slots = self.table[:, 2000 // self.SIZE].long() * self.SIZE + 2000 % self.SIZE
        self.start = random(rows, self.HIDDEN, seed=3)
        angle = torch.rand(rows, self.DIM // 2, device=DEVICE)
        self.cos, self.sin = angle.cos(), angle.sin()

    def __call__(self) -> Tensor:
        product, residual, x = self.product, self.start.clone(), torch.zeros_like(self.start)
        for (qkv, out, gate_up, down), (k_cache, v_cache) in zip(self.layers, self.pool, strict=True):
            made = product(rms_norm(x, self.gain, 1e-5, residual)[0], qkv)
            q, _, _ = project(made, self.cos, self.sin, (k_cache, v_cache), self.slots, heads=self.HEADS)
            rows = Rows(self.rows, self.table, self.lengths, 4096)
            seen = paged_decode(q, (k_cache, v_cache), rows, LayerAttention(self.DIM**-0.5))
            x = product(seen.view(self.rows, -1), out)
            x = product(product(rms_norm(x, self.gain, 1e-5, residual)[0], gate_up, gated=True), down)
        return residual + x


class Narrow(Chain):
    """Whose products of few rows are shared by programs."""

    HEADS, KV_HEADS, HIDDEN, INNER = 8, 2, 1024, 3072


def recorded(chain: Chain) -> list[Tensor]:
    """What five replays of it say, the memory that they pass through spoiled before each."""
    spoil, pool = torch.empty(1 << 25, dtype=torch.uint8, device=DEVICE), torch.cuda.graph_pool_handle()
    with pdl_launches(), counting(chain.counters):
        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            said = chain()
    found = []
    for turn in range(5):
        chain.start.copy_(random(chain.rows, chain.HIDDEN, seed=50 + turn))
        spoil.fill_(255)
        graph.replay()
        torch.cuda.synchronize()
        found.append(said.clone())
    return found


def one_by_one(chain: Chain) -> list[Tensor]:
    found = []
    for turn in range(5):
        chain.start.copy_(random(chain.rows, chain.HIDDEN, seed=50 + turn))
        found.append(chain())
        torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("kind", [Chain, Narrow])
@pytest.mark.parametrize("rows", [1, pytest.param(9, marks=few), pytest.param(40, marks=few)])
def test_a_chain_comes_out_as_one_after_the_other(kind: type[Chain], rows: int) -> None:
    chain = kind(rows)
    for got, want in zip(recorded(chain), one_by_one(chain), strict=True):
        # Parts of attention are joined by another launch, in another order.
        assert float((got.float() - want.float()).abs().max() / want.float().abs().max()) < 2e-2
    first, second = recorded(chain), recorded(chain)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@triton.jit
def _never() -> None:
    pass


HASTY = {
    "_one_row": triton_linear,
    "_few_rows": triton_linear,
    "_rms_norm": triton_pointwise,
    "_project": triton_pointwise,
    "decode": triton_attention,
    "join": triton_attention,
}


@pytest.mark.parametrize(
    "kernel", [pytest.param(one, marks=few) if one == "_few_rows" else one for one in HASTY]
)
def test_without_its_wait_it_is_wrong(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = HASTY[kernel]
    chain = Chain(9 if kernel == "_few_rows" else 1)
    want = recorded(chain)
    plain = getattr(module, kernel)

    def copied(one: object, **other: object) -> types.FunctionType:
        fn = one.fn  # type: ignore[attr-defined]
        again = types.FunctionType(fn.__code__, {**fn.__globals__, **other}, fn.__name__)
        again.__annotations__ = fn.__annotations__
        return again

    swapped = {"gdc_wait": _never}
    if module is triton_pointwise:
        swapped = {"in_turn": triton.jit(copied(triton_pointwise.in_turn, gdc_wait=_never))}
    hasty = triton.jit(
        copied(plain, **swapped), do_not_specialize=["outer", "rows", "window", "batch", "workers", "s_table"]
    )
    monkeypatch.setattr(module, kernel, hasty)
    assert any(not torch.equal(one, other) for one, other in zip(recorded(chain), want, strict=True))
