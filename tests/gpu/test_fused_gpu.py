"""A decode step's fused kernels as a GPU compiles them, eagerly and in a CUDA graph that is replayed with
other inputs."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from paged import attend as attend_exactly
from paged import check_answer, decode, fill, pool_views
from penstock.ops.attention.attend import attend
from penstock.ops.attention.inputs import AttentionInputs, LayerAttention, Rows
from penstock.ops.project import HeadNorms, JointNorms, norm_together, project
from penstock.ops.triton.attention import write_kv
from penstock.ops.triton.pointwise import rms_norm, rope_
from penstock.ops.triton.tuning import DecodeTuning

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
STEP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-22}
"""The distance between neighbours of the dtype, relative to the smaller; of float32 with room for another
order of a sum."""
DEVICE = "cuda"


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def by_steps(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    heads: int,
    norms: HeadNorms | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `project` does, by one kernel for each step."""
    kv_heads, dim = cache[0].shape[2:]
    q, k, v = qkv.clone().view(len(qkv), -1, dim).split([heads, kv_heads, kv_heads], 1)
    if norms:
        q, k = rms_norm(q, norms.q, norms.eps)[0], rms_norm(k, norms.k, norms.eps)[0]
    rope_(q, k, cos, sin)
    write_kv(k, v, *cache, slots)
    return q, k, v


def inputs_of(slots: Tensor, rows: Rows | None = None) -> AttentionInputs:
    """With nothing that only a device without kernels reads."""
    nothing = slots[:0]
    return AttentionInputs(nothing, nothing, slots, rows, ())


def angles(tokens: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    angle = random(tokens, dim // 2, seed=seed) * 300
    return angle.cos(), angle.sin()


def check_close(got: Tensor, want: Tensor, steps: float) -> None:
    """By so many steps of the largest number; where it is 0, exactly."""
    room = steps * STEP[got.dtype] * float(want.nan_to_num().abs().amax())
    torch.testing.assert_close(got, want, rtol=0, atol=room, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "turned"),
    [
        (1, 32, 8, 128, 128),
        (64, 16, 8, 128, 128),
        (700, 5, 5, 64, 64),
        (9, 9, 3, 80, 80),
        (33, 14, 2, 96, 96),
        (5, 64, 4, 256, 256),
        (3, 40, 20, 128, 128),
        (1, 96, 8, 128, 64),
        (700, 48, 8, 128, 64),
        (9, 6, 2, 80, 20),
        (33, 4, 4, 24, 22),
    ],
)
def test_projection(
    tokens: int, heads: int, kv_heads: int, dim: int, turned: int, norms: bool, dtype: torch.dtype
) -> None:
    around = random(tokens, (heads + 2 * kv_heads) * dim + 32, dtype=dtype)
    qkv = around[:, 16:-16]
    gains = (
        HeadNorms(random(dim, dtype=dtype, seed=1), random(dim, dtype=dtype, seed=2), 1e-6) if norms else None
    )
    cos, sin = angles(tokens, turned)
    caches = [pool_views(tokens // 16 + 3, 16, kv_heads, dim, dtype, DEVICE) for _ in range(2)]
    slots = torch.randperm((tokens // 16 + 3) * 16, generator=torch.Generator().manual_seed(1))[:tokens].to(
        DEVICE
    )
    slots[2::5] = -1
    beside = around[:, :16].clone(), around[:, -16:].clone()
    want = by_steps(qkv, cos, sin, caches[0], slots, heads, gains)
    got = project(qkv, cos, sin, caches[1], inputs_of(slots), heads=heads, norms=gains)
    for one, other in zip((*got, *caches[1]), (*want, *caches[0]), strict=True):
        check_close(one, other, 2 if norms else 1)
    torch.testing.assert_close(got[2], want[2], rtol=0, atol=0)
    torch.testing.assert_close(caches[1][1], caches[0][1], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(around[:, :16], beside[0])
    assert torch.equal(around[:, -16:], beside[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "queries", "keys"), [(1, 6144, 1024), (64, 6144, 1024), (700, 96, 32), (3, 40, 40)]
)
def test_norms_of_all_heads(tokens: int, queries: int, keys: int, dtype: torch.dtype) -> None:
    """As MiniMax-M2 has them: alone, and on two ranks that have the same numbers."""
    qkv = random(tokens, queries + 2 * keys + 32, dtype=dtype)[:, 16:-16]
    norms = JointNorms(
        random(queries, dtype=dtype, seed=1), random(keys, dtype=dtype, seed=2), 1e-6, (queries, keys)
    )
    q, k, v = qkv.clone().split([queries, keys, keys], 1)
    want = rms_norm(q, norms.q, 1e-6)[0], rms_norm(k, norms.k, 1e-6)[0]
    for ranks in (1, 2):
        got = qkv.clone()
        its = replace(norms, sizes=(ranks * queries, ranks * keys))
        norm_together(got, its, (lambda squares: squares.mul_(2)) if ranks == 2 else None)
        for one, other in zip(got.split([queries, keys, keys], 1), (*want, v), strict=True):
            check_close(one, other, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(32, 8, 128, 64), (16, 8, 128, 16), (8, 8, 64, 32), (14, 2, 80, 64), (16, 1, 96, 1), (16, 2, 256, 64)],
)
def test_decode_in_one_launch(
    heads: int, kv_heads: int, dim: int, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    arrivals = torch.zeros(7 * kv_heads, dtype=torch.int32, device=DEVICE)
    rng = torch.Generator().manual_seed(0)
    for lengths in ([1, 2500, 64, 333, 0, 65], [0] * 7, [9000], [700] * 7, [0, 5, 0, 3000]):
        k_cache, v_cache = pool_views(
            sum(-(-n // block_size) for n in lengths) + 2, block_size, kv_heads, dim, dtype, DEVICE
        )
        table, keys, values = fill(k_cache, v_cache, lengths, rng)
        q, scale = torch.randn(len(lengths), heads, dim, generator=rng).to(k_cache), 1 / math.sqrt(dim)
        for bound in (max(*lengths, 1), 1 << 17):
            out = torch.full_like(q, math.nan)
            visible = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
            rows = Rows(len(lengths), table, visible, bound, arrivals=arrivals)
            _, lse = decode(q, (k_cache, v_cache), rows, LayerAttention(scale, window), out=out)
            for row in range(len(lengths)):
                check_answer(
                    out[row], lse[row], *attend_exactly(q[row], keys[row], values[row], scale, window)
                )
            assert not arrivals.any()


@pytest.mark.parametrize(
    "lengths",
    [[2048], [40_000], [2000] * 64, [17, 9000, 0, 300] * 30],
    ids=["2K", "40K", "64 x 2K", "ragged"],
)
@pytest.mark.parametrize(
    "tuning", [None, DecodeTuning(64, 4, 2, 4), DecodeTuning(16, 4, 2, 8), DecodeTuning(32, 2, 3, 6)], ids=str
)
def test_who_arrives_last_does_not_matter(lengths: list[int], tuning: DecodeTuning | None) -> None:
    """Partials are joined in their order, whoever joins them: a thousand launches answer alike to the last
    bit, and as two launches do."""
    rng = torch.Generator().manual_seed(0)
    k_cache, v_cache = pool_views(sum(-(-n // 64) for n in lengths) + 2, 64, 2, 128, torch.bfloat16, DEVICE)
    table, _, _ = fill(k_cache, v_cache, lengths, rng)
    q = torch.randn(len(lengths), 8, 128, generator=rng).to(k_cache)
    visible = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    arrivals = torch.zeros(len(lengths) * 2, dtype=torch.int32, device=DEVICE)

    def call(counters: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = Rows(len(lengths), table, visible, 1 << 16, arrivals=counters)
        return decode(q, (k_cache, v_cache), rows, LayerAttention(0.09), tuning=tuning)

    first, first_lse = call(arrivals)
    apart, apart_lse = call(None)
    torch.testing.assert_close(first, apart, rtol=0, atol=STEP[torch.bfloat16] * float(apart.abs().amax()))
    torch.testing.assert_close(first_lse, apart_lse, rtol=1e-5, atol=1e-5)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(1000):
        out, lse = call(arrivals)
        different += (out != first).sum() + (lse != first_lse).sum()
    assert int(different) == 0
    assert not arrivals.any()


def captured(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A replay of `work`, and what it returns, which every replay writes anew."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph.replay, result


@pytest.mark.parametrize(("heads", "kv_heads", "norms"), [(8, 2, False), (4, 2, True)])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("one_launch", [False, True])
def test_a_step_in_a_graph_follows_its_inputs(
    heads: int, kv_heads: int, norms: bool, window: int | None, one_launch: bool
) -> None:
    """Projection and attention over other tokens, slots, lengths and tables than at capture; rows without a
    request are padding."""
    dim, size, dtype, rows, rng = 128, 16, torch.bfloat16, 4, torch.Generator().manual_seed(0)
    cache = pool_views(400, size, kv_heads, dim, dtype, DEVICE)
    gains = (
        HeadNorms(random(dim, dtype=dtype, seed=1), random(dim, dtype=dtype, seed=2), 1e-6) if norms else None
    )
    fresh = torch.zeros(rows, (heads + 2 * kv_heads) * dim, dtype=dtype, device=DEVICE)
    cos, sin = (torch.zeros(rows, dim // 2, device=DEVICE) for _ in range(2))
    slots = torch.full((rows,), -1, dtype=torch.int64, device=DEVICE)
    table = torch.full((rows, 160), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    arrivals = torch.zeros(rows * kv_heads, dtype=torch.int32, device=DEVICE) if one_launch else None
    step = inputs_of(slots, Rows(rows, table, lengths, 1 << 17, (), arrivals))

    def work() -> Tensor:
        q, k, v = project(fresh.clone(), cos, sin, cache, step, heads=heads, norms=gains)
        return attend(q, k, v, cache, step, LayerAttention(0.09, window)).out

    replay, out = captured(work)
    for turn, now in enumerate(
        ([1, 0, 900, 33], [2000, 7, 0, 1], [500, 500, 500, 500], [0, 0, 0, 0], [3, 2500, 16, 17])
    ):
        for pages in cache:
            pages.fill_(math.nan)
        blocks, keys, values = fill(*cache, now, rng)
        fresh.copy_(random(*fresh.shape, seed=turn))
        for kept, new in zip((cos, sin), angles(rows, dim, seed=turn), strict=True):
            kept.copy_(new)
        table.fill_(2**31 - 1)[:, : blocks.shape[1]].copy_(blocks)
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        newest = [
            int(blocks[row, (n - 1) // size]) * size + (n - 1) % size if n else -1
            for row, n in enumerate(now)
        ]
        slots.copy_(torch.tensor(newest))
        before = tuple(pages.clone() for pages in cache)
        q, _, v = by_steps(fresh, cos, sin, before, slots, heads, gains)
        out.fill_(math.nan)
        replay()
        for pages, want in zip(cache, before, strict=True):
            check_close(pages, want, 2)
        for row, n in enumerate(now):
            if n:
                at = newest[row]
                keys[row][-1], values[row][-1] = cache[0][at // size, at % size], v[row]
            want, _ = attend_exactly(q[row], keys[row], values[row], 0.09, window)
            # a key that came out one step beside moves the answer a little
            torch.testing.assert_close(
                out[row].double(), want, rtol=0, atol=(4e-2 if norms else 1.6e-2) * float(want.abs().max())
            )
        assert arrivals is None or not arrivals.any()
