"""The kernels as a GPU compiles them, in every dtype they meet there, against float64 arithmetic written out
plainly."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from paged import (
    TOLERANCE,
    Case,
    attend,
    batch_of,
    check_answer,
    check_decode,
    check_placed_run,
    check_run,
    check_runs,
    check_tree,
    decode,
    fill,
    pool_views,
)
from penstock.ops.attention.attend import attend as attend_step
from penstock.ops.attention.inputs import AttentionInputs, LayerAttention, Rows
from penstock.ops.triton.attention import write_kv
from penstock.ops.triton.pointwise import rms_norm, rope_, silu_mul
from penstock.ops.triton.tiles import merge_states
from penstock.ops.triton.tuning import DecodeTuning

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ULP = {
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
    torch.float32: 2.0**-20,
}  # one step of the dtype, with room for fp32 sums


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def close(got: Tensor, want: Tensor) -> None:
    """Two roundings, the first of which may fall to the other side."""
    torch.testing.assert_close(
        got.double(), want.double(), rtol=1.6 * ULP[got.dtype], atol=ULP[got.dtype] * 1e-2
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 32, 64])
@pytest.mark.parametrize("dim", [64, 128])
def test_decode(dim: int, block_size: int, dtype: torch.dtype) -> None:
    check_decode(
        [1, 2500, 64, 333, 0, 65],
        heads=8,
        kv_heads=2,
        dim=dim,
        block_size=block_size,
        dtype=dtype,
        device="cuda",
    )


@pytest.mark.parametrize(("dim", "block_size"), [(8, 4), (16, 16), (80, 32), (96, 64), (256, 64), (256, 256)])
def test_decode_with_other_head_dims(dim: int, block_size: int) -> None:
    check_decode([300, 64, 1], dim=dim, block_size=block_size, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (9, 3), (5, 1), (14, 2), (16, 1)])
def test_decode_with_other_groups(heads: int, kv_heads: int) -> None:
    check_decode(
        [300, 1025, 7],
        heads=heads,
        kv_heads=kv_heads,
        dim=128,
        block_size=32,
        dtype=torch.bfloat16,
        device="cuda",
    )


@pytest.mark.parametrize("window", [1, 100, 1024])
@pytest.mark.parametrize("block_size", [4, 64])
def test_decode_in_a_window(block_size: int, window: int) -> None:
    check_decode(
        [4000, 0, 1024, 1025, 99, 1],
        window=window,
        dim=64,
        block_size=block_size,
        dtype=torch.bfloat16,
        device="cuda",
    )


@pytest.mark.parametrize("lengths", [[40_000], [17] * 200, [9000, *range(0, 700, 7)], [0] * 3])
def test_decode_over_batches_of_every_shape(lengths: list[int]) -> None:
    check_decode(lengths, heads=8, kv_heads=2, dim=128, block_size=32, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize(
    ("tokens", "start"), [(1, 4000), (2, 100), (63, 32768), (64, 256), (200, 511), (300, 0)]
)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (16, 1, 80), (4, 4, 256)])
@pytest.mark.parametrize("window", [None, 300])
def test_runs(tokens: int, start: int, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    check_run(
        tokens,
        start,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        block_size=64,
        window=window,
        dtype=torch.bfloat16,
        device="cuda",
    )


@pytest.mark.parametrize(
    ("tokens", "begin", "earlier"), [(64, 32768, 0), (64, 100, 0), (12, 4000, 40), (1, 511, 63)]
)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (4, 4, 256)])
@pytest.mark.parametrize("window", [None, 20, 300])
def test_trees(
    tokens: int, begin: int, earlier: int, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    case = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": 64, "window": window}
    for dtype in (torch.bfloat16, torch.float32):
        check_tree(tokens, begin, earlier=earlier, dtype=dtype, device="cuda", **case)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (16, 1, 80), (4, 4, 256)])
@pytest.mark.parametrize("window", [None, 300])
def test_several_runs(heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    pieces = [(16, 0), (1, 4000), (63, 8000), (200, 511), (2, 0), (300, 0), (64, 64), (5, 1)]
    case = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": 64, "window": window}
    for dtype in DTYPES:
        check_runs(pieces, dtype=dtype, device="cuda", **case)
        check_runs(pieces[:5], dtype=dtype, device="cuda", sinks=True, **case)
    check_runs([(40, 7)] * 300, dtype=torch.bfloat16, device="cuda", **case)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("starts", [(0, 0, 0, 0), (0, 90, 0, 2000)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_attend_together_as_each_run_does(
    dtype: torch.dtype, starts: tuple[int, ...], window: int | None, sinks: bool
) -> None:
    """A step of rows and runs, with batches and without: in one launch, and in one a run."""
    of = Case(heads=8, dim=64, block_size=32, window=window, dtype=dtype, device="cuda", sinks=sinks)
    rng = torch.Generator().manual_seed(0)
    pieces = list(zip((30, 1, 200, 17), starts, strict=True))
    decoded = [100, 7]
    lengths = [*decoded, *(sum(piece) for piece in pieces)]
    cache = of.cache(lengths)
    table, keys, values = fill(*cache, lengths, rng)
    visible = torch.tensor(decoded, dtype=torch.int32, device="cuda")
    rows = Rows(2, table[:2], visible, max(decoded))
    batch = batch_of(pieces, table[2:], of.block_size, before=2)
    tokens = 2 + sum(count for count, _ in pieces)
    q, where = of.queries(tokens, rng), torch.zeros(tokens, dtype=torch.int64, device="cuda")
    k, v = (
        torch.cat(
            [
                *(one[-1:] for one in x[:2]),
                *(one[-count:] for one, (count, _) in zip(x[2:], pieces, strict=True)),
            ]
        )
        for x in (keys, values)
    )
    inputs = AttentionInputs(where, where, where, rows, tuple(batch.runs))
    layer = replace(of.layer, lse=True)
    apart = attend_step(q, k, v, cache, inputs, layer)
    together = attend_step(q, k, v, cache, replace(inputs, batches=(batch,)), layer)
    assert apart.lse is not None
    assert together.lse is not None
    within = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(together.out, apart.out, rtol=0, atol=within * float(apart.out.abs().max()))
    torch.testing.assert_close(together.lse, apart.lse, rtol=1e-4, atol=1e-4)
    many = launches(lambda: attend_step(q, k, v, cache, inputs, layer))
    assert launches(lambda: attend_step(q, k, v, cache, replace(inputs, batches=(batch,)), layer)) < many


def launches(work: Callable[[], object]) -> int:
    """Kernels that are launched."""
    on_device = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=on_device, acc_events=True) as noted:
        work()
        torch.cuda.synchronize()
    return sum(event.count for event in noted.key_averages())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_runs_in_other_precisions(dtype: torch.dtype) -> None:
    check_run(70, 1000, heads=8, kv_heads=2, dim=64, block_size=16, dtype=dtype, device="cuda")


@pytest.mark.parametrize("window", [None, 128])
def test_sinks(window: int | None) -> None:
    case = {"heads": 64, "kv_heads": 8, "dim": 64, "block_size": 16, "window": window, "sinks": True}
    for dtype in (torch.bfloat16, torch.float32):
        check_decode([3000, 64, 1, 0, 500], dtype=dtype, device="cuda", **case)
        check_run(300, 1000, dtype=dtype, device="cuda", **case)
        check_placed_run(60, 1000, 4, dtype=dtype, device="cuda", max_length=4096, **case)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "start", "padding"), [(1, 0, 15), (48, 5000, 16), (300, 0, 212), (70, 1000, 58), (0, 3, 16)]
)
def test_runs_placed_on_the_device(
    tokens: int, start: int, padding: int, dtype: torch.dtype, window: int | None
) -> None:
    shape = {"heads": 32, "kv_heads": 8, "dim": 128, "block_size": 64}
    check_placed_run(
        tokens, start, padding, **shape, window=window, dtype=dtype, device="cuda", max_length=40_000
    )


@pytest.mark.parametrize(
    "tuning",
    [
        DecodeTuning(32, 4, 1, 1),
        DecodeTuning(64, 8, 3, 2),
        DecodeTuning(128, 8, 2, 5),
        DecodeTuning(16, 1, 2, 8),
        DecodeTuning(64, 4, 2, 3, overlap=True),
    ],
    ids=str,
)
def test_decode_cut_in_other_ways(tuning: DecodeTuning) -> None:
    check_decode(
        [3000, 500, 0, 129],
        heads=8,
        kv_heads=2,
        dim=128,
        block_size=64,
        dtype=torch.bfloat16,
        device="cuda",
        tuning=tuning,
    )


def test_decode_in_a_graph_follows_its_inputs() -> None:
    """A captured call reads lengths, table and query anew: only the bound on lengths is fixed."""
    rng = torch.Generator().manual_seed(0)
    k_cache, v_cache = pool_views(400, 16, 2, 64, torch.bfloat16, "cuda")
    cases = [[1, 0, 900, 33], [2000, 7, 0, 1], [500, 500, 500, 500], [0, 0, 0, 0]]
    filled = [(lengths, *fill(k_cache, v_cache, lengths, rng)) for lengths in cases]
    q, table = random(4, 8, 64, dtype=torch.bfloat16), torch.zeros(4, 160, dtype=torch.int32, device="cuda")
    lengths_in = torch.zeros(4, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)

    def call() -> Tensor:
        rows = Rows(4, table, lengths_in, 1 << 17)
        return decode(q, (k_cache, v_cache), rows, LayerAttention(0.125), out=out)[1]

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lse = call()
    for turn, (lengths, blocks, keys, values) in enumerate(filled):
        k_cache.fill_(math.nan), v_cache.fill_(math.nan)
        for row, (length, k, v) in enumerate(zip(lengths, keys, values, strict=True)):
            at = torch.arange(length, device="cuda")
            slots = blocks[row][at // 16].long() * 16 + at % 16
            write_kv(k, v, k_cache, v_cache, slots)
        q.copy_(random(4, 8, 64, seed=turn))
        table.fill_(2**31 - 1)[:, : blocks.shape[1]].copy_(blocks)
        lengths_in.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(math.nan)
        graph.replay()
        for row in range(4):
            check_answer(out[row], lse[row], *attend(q[row], keys[row], values[row], 0.125, None))


def test_a_pool_beyond_two_billion_elements() -> None:
    block_size, kv_heads, dim, stride = 32, 2, 128, 1 << 22
    blocks = 640
    pool = torch.empty(blocks * stride, dtype=torch.bfloat16, device="cuda")
    shape, strides = (blocks, block_size, kv_heads, dim), (stride, kv_heads * dim, dim, 1)
    views = [pool.as_strided(shape, strides, start) for start in (0, block_size * kv_heads * dim)]
    k, v = (
        random(64, kv_heads, dim, dtype=torch.bfloat16, seed=1),
        random(64, kv_heads, dim, dtype=torch.bfloat16, seed=2),
    )
    table = torch.tensor([[639, 520]], dtype=torch.int32, device="cuda")
    slots = (table[0].long()[:, None] * block_size + torch.arange(block_size, device="cuda")).flatten()
    write_kv(k, v, *views, slots)
    assert torch.equal(views[0][[639, 520]].flatten(0, 1), k)
    q = random(1, 8, dim, dtype=torch.bfloat16, seed=3)
    for tile in (32, 64):
        rows = Rows(1, table, torch.tensor([64], dtype=torch.int32, device="cuda"), 64)
        tuning = DecodeTuning(tile, 4, 2, 2)
        out, lse = decode(q, (views[0], views[1]), rows, LayerAttention(0.09), tuning=tuning)
        check_answer(out[0], lse[0], *attend(q[0], k, v, 0.09, None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads_first", [False, True])
def test_merge(dtype: torch.dtype, heads_first: bool) -> None:
    tokens, heads, dim = 1000, 6, 128
    a, b = (random(tokens, heads + 1, dim, dtype=dtype, seed=seed)[:, :heads] for seed in (1, 2))
    la, lb = random(heads, tokens, seed=3).T, random(tokens, heads, seed=4)
    if not heads_first:
        la, lb = la.contiguous(), lb.T.contiguous().T
    la[3], lb[4], la[5], lb[5] = -math.inf, -math.inf, -math.inf, -math.inf
    a[3], b[4], a[5] = math.nan, math.nan, math.nan
    lse = torch.logaddexp(la.double(), lb.double())
    shares = [(side - lse).exp().nan_to_num(0.0)[..., None] for side in (la.double(), lb.double())]
    want = sum(x.double().nan_to_num(0.0) * share for x, share in zip((a, b), shares, strict=True))
    exact = [b[3].clone(), a[4].clone()]
    merge_states(a, la, b, lb)
    torch.testing.assert_close(a.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(la.double(), lse, rtol=2e-6, atol=2e-6)
    assert torch.equal(a[3], exact[0])
    assert torch.equal(a[4], exact[1])
    assert not a[5].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "dim", "block_size"), [(8, 128, 64), (1, 80, 1), (3, 256, 16)])
def test_write(kv_heads: int, dim: int, block_size: int, dtype: torch.dtype) -> None:
    tokens, blocks = 700, 1024
    k_cache, v_cache = pool_views(blocks, block_size, kv_heads, dim, dtype, "cuda")
    qkv = random(tokens, 4 * kv_heads, dim, dtype=dtype)
    k, v = qkv[:, 2 * kv_heads : 3 * kv_heads], qkv[:, 3 * kv_heads :]
    slots = torch.randperm(blocks * block_size, device="cuda")[:tokens].clone()
    slots[[2, 600]] = -1
    live = slots >= 0
    want_k, want_v = k_cache.clone(), v_cache.clone()
    for want, new in ((want_k, k), (want_v, v)):
        want[slots[live] // block_size, slots[live] % block_size] = new[live]
    write_kv(k, v, k_cache, v_cache, slots)
    torch.testing.assert_close(k_cache, want_k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v_cache, want_v, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 4096), (300, 1000), (3, 16384)])
def test_rms_norm(tokens: int, dim: int, dtype: torch.dtype) -> None:
    x, residual, weight = (
        random(tokens, dim, dtype=dtype),
        random(tokens, dim, dtype=dtype, seed=1),
        random(dim, dtype=dtype, seed=2),
    )
    total = residual + x

    def reference(x: Tensor) -> Tensor:
        wide = x.double()
        return (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()).to(dtype) * weight

    close(rms_norm(x, weight, 1e-5)[0], reference(x))
    y, stream = rms_norm(x, weight, 1e-5, residual)
    assert stream is residual
    assert torch.equal(residual, total)
    close(y, reference(total))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_per_head(dtype: torch.dtype) -> None:
    heads, weight = random(50, 24, 128, dtype=dtype)[:, 3:19], random(128, dtype=dtype, seed=1)
    wide = heads.double()
    want = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(dtype) * weight
    close(rms_norm(heads, weight, 1e-6)[0], want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (3, 1, 80)])
def test_rope(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    tokens, half = 77, dim // 2
    qkv = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    angle = torch.rand(tokens, half, device="cuda") * 1000
    cos, sin = angle.cos(), angle.sin()
    pair = (
        torch.complex(qkv[..., :half].double(), qkv[..., half:].double())
        * torch.complex(cos.double(), sin.double())[:, None]
    )
    want = torch.cat(
        [torch.cat([pair.real, pair.imag], -1)[:, : heads + kv_heads], qkv[:, heads + kv_heads :].double()], 1
    )
    rope_(qkv[:, :heads], qkv[:, heads : heads + kv_heads], cos, sin)
    torch.testing.assert_close(qkv.double(), want, rtol=ULP[dtype], atol=ULP[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 14336), (200, 1000)])
def test_silu_mul(tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = random(tokens, 2 * width, dtype=dtype) * 3
    gate, up = gate_up.chunk(2, -1)
    want = (gate.double() * gate.double().sigmoid()).to(dtype) * up
    close(silu_mul(gate_up), want)
