"""The attention kernels, interpreted on the CPU, against float64 arithmetic written out plainly."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # must be set before triton is first imported, so this file runs itself again
if INTERPRETED:
    from penstock.ops.triton_attention import DecodeTuning, merge_states, paged_decode, write_kv
else:

    def test_in_a_process_that_interprets_kernels() -> None:
        env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__],
                             env=env, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def pool_views(blocks: int, block_size: int, kv_heads: int, dim: int, dtype: torch.dtype, layer: int = 1) -> tuple[Tensor, Tensor]:
    """One layer of a pool `[blocks, layers, 2, block_size, kv_heads, dim]` in which every byte is NaN."""
    pool = torch.full((blocks, 3, 2, block_size, kv_heads, dim), math.nan, dtype=dtype)
    return pool[:, layer, 0], pool[:, layer, 1]


def fill(k_cache: Tensor, v_cache: Tensor, lengths: list[int], rng: torch.Generator, spare: int = 2) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Random tokens in shuffled blocks; table entries past a sequence's end are garbage. Returns the table and K, V per sequence."""
    blocks, block_size, kv_heads, dim = k_cache.shape
    free = torch.randperm(blocks, generator=rng).tolist()
    width = max(-(-n // block_size) for n in lengths) + spare
    table = torch.full((len(lengths), width + 3), 2**31 - 1, dtype=torch.int32)[:, :width]  # the row stride is not the width
    keys, values = [], []
    for seq, length in enumerate(lengths):
        k = torch.randn(length, kv_heads, dim, generator=rng).to(k_cache.dtype)
        v = torch.randn(length, kv_heads, dim, generator=rng).to(k_cache.dtype)
        for at in range(0, length, block_size):
            block = free.pop()
            table[seq, at // block_size] = block
            k_cache[block, : length - at] = k[at : at + block_size]
            v_cache[block, : length - at] = v[at : at + block_size]
        keys.append(k)
        values.append(v)
    return table, keys, values


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """One query `[heads, dim]` over all of K and V `[tokens, kv_heads, dim]`, in float64."""
    if window is not None:
        k, v = k[-window:], v[-window:]
    heads, kv_heads = q.shape[0], k.shape[1]
    if len(k) == 0:
        return torch.zeros_like(q, dtype=torch.float64), torch.full((heads,), -math.inf, dtype=torch.float64)
    k, v = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    score = torch.einsum("hd,thd->ht", q.double(), k) * scale
    return torch.einsum("ht,thd->hd", score.softmax(1), v), score.logsumexp(1)


def check_decode(
    lengths: list[int], *, heads: int = 4, kv_heads: int = 2, dim: int = 16, block_size: int = 16, window: int | None = None,
    dtype: torch.dtype = torch.float32, tuning: "DecodeTuning | None" = None, seed: int = 0, max_length: int | None = None,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    blocks = sum(-(-n // block_size) for n in lengths) + 2
    k_cache, v_cache = pool_views(blocks, block_size, kv_heads, dim, dtype)
    table, keys, values = fill(k_cache, v_cache, lengths, rng)
    qkv = torch.randn(len(lengths), heads + 2 * kv_heads, dim, generator=rng).to(dtype)
    q = qkv[:, :heads]  # a view of a fused projection
    out = torch.full((len(lengths), heads, dim), math.nan, dtype=dtype)
    scale = 1.3 / math.sqrt(dim)
    got, lse = paged_decode(q, k_cache, v_cache, table, torch.tensor(lengths, dtype=torch.int32), scale=scale, window=window,
                            max_length=max_length or max(*lengths, 1), out=out, tuning=tuning)
    assert got is out
    assert lse.dtype == torch.float32
    for seq in range(len(lengths)):
        want, want_lse = attend(q[seq], keys[seq], values[seq], scale, window)
        torch.testing.assert_close(got[seq].double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(lse[seq].double(), want_lse, rtol=1e-5, atol=1e-5)


class TestPagedDecode:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64])
    @pytest.mark.parametrize("dim", [8, 16, 64, 128])
    def test_block_sizes_and_head_dims(self, block_size: int, dim: int) -> None:
        check_decode([5, 70, 1], block_size=block_size, dim=dim)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (5, 1), (8, 2), (14, 2), (16, 1)])
    def test_group_sizes(self, heads: int, kv_heads: int) -> None:
        check_decode([33, 64], heads=heads, kv_heads=kv_heads)

    @pytest.mark.parametrize("dim", [24, 80])
    def test_head_dims_between_powers_of_two(self, dim: int) -> None:
        check_decode([40, 3], dim=dim)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precisions(self, dtype: torch.dtype) -> None:
        check_decode([100, 17, 64], dtype=dtype, dim=64, block_size=32)

    @pytest.mark.parametrize("window", [1, 15, 16, 17, 64, 1000])
    @pytest.mark.parametrize("block_size", [4, 64])
    def test_windows(self, window: int, block_size: int) -> None:
        check_decode([100, 16, 1, 0, 65], window=window, block_size=block_size)

    @pytest.mark.parametrize("window", [None, 8])
    def test_rows_of_padding_answer_zero(self, window: int | None) -> None:
        check_decode([0, 0, 37, 0, 50, 0], window=window)
        check_decode([0, 0], window=window)

    def test_one_long_sequence_uses_every_worker(self) -> None:
        check_decode([1000], tuning=DecodeTuning(tile=16, warps=4, depth=2, workers_per_sm=8))

    def test_a_bound_far_above_the_lengths(self) -> None:
        check_decode([20, 3], max_length=1 << 20)

    def test_a_pool_beyond_two_billion_elements(self) -> None:
        """Only the pages that are touched exist: an address computed in 32 bits would fall outside or onto other bytes."""
        block_size, dim, stride = 16, 16, 1 << 21
        blocks = 2048
        pool = torch.empty(blocks * stride, dtype=torch.bfloat16)
        k_cache = pool.as_strided((blocks, block_size, 1, dim), (stride, dim, dim, 1))
        v_cache = pool.as_strided((blocks, block_size, 1, dim), (stride, dim, dim, 1), block_size * dim)
        rng = torch.Generator().manual_seed(0)
        table = torch.tensor([[2047, 1100]], dtype=torch.int32)
        k, v = (torch.randn(32, 1, dim, generator=rng).bfloat16() for _ in range(2))
        slots = torch.cat([torch.arange(16) + block * block_size for block in (2047, 1100)])
        write_kv(k, v, k_cache, v_cache, slots)
        q = torch.randn(1, 2, dim, generator=rng).bfloat16()
        got, lse = paged_decode(q, k_cache, v_cache, table, torch.tensor([32], dtype=torch.int32), scale=0.25, window=None, max_length=32)
        want, want_lse = attend(q[0], k, v, 0.25, None)
        torch.testing.assert_close(got[0].double(), want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[0].double(), want_lse, rtol=1e-5, atol=1e-5)

    @settings(max_examples=25, deadline=None)
    @given(
        lengths=st.lists(st.integers(0, 150), min_size=1, max_size=7), block_size=st.sampled_from([1, 4, 16, 64]), group=st.integers(1, 4),
        kv_heads=st.integers(1, 3), window=st.none() | st.integers(1, 200), workers=st.integers(1, 6), tile=st.sampled_from([16, 32]),
        seed=st.integers(0, 99),
    )
    def test_any_batch_cut_anywhere(
        self, lengths: list[int], block_size: int, group: int, kv_heads: int, window: int | None, workers: int, tile: int, seed: int
    ) -> None:
        check_decode(lengths, heads=group * kv_heads, kv_heads=kv_heads, block_size=block_size, window=window, seed=seed,
                     tuning=DecodeTuning(tile=tile, warps=4, depth=2, workers_per_sm=workers))


def lse_view(tokens: int, heads: int, heads_first: bool, rng: torch.Generator) -> Tensor:
    lse = torch.randn((heads, tokens) if heads_first else (tokens, heads), generator=rng) * 3
    return lse.T if heads_first else lse


class TestMergeStates:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("heads_first", [False, True])
    @pytest.mark.parametrize(("heads", "dim"), [(3, 16), (4, 80), (1, 128)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_against_float64(self, heads: int, dim: int, dtype: torch.dtype, heads_first: bool) -> None:
        rng = torch.Generator().manual_seed(1)
        tokens = 21
        a, b = (torch.randn(tokens, heads + 2, dim, generator=rng).to(dtype)[:, 1 : heads + 1] for _ in range(2))
        la, lb = lse_view(tokens, heads, heads_first, rng), lse_view(tokens, heads, not heads_first, rng)
        lse = torch.logaddexp(la.double(), lb.double())
        want = a.double() * (la - lse).exp()[..., None] + b.double() * (lb - lse).exp()[..., None]
        merge_states(a, la, b, lb)
        torch.testing.assert_close(a.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(la.double(), lse, rtol=1e-6, atol=1e-6)

    def test_a_side_that_saw_nothing_is_left_out_exactly(self) -> None:
        rng = torch.Generator().manual_seed(2)
        a, b = torch.randn(4, 1, 16, generator=rng), torch.randn(4, 1, 16, generator=rng)
        la, lb = torch.tensor([[0.5], [-math.inf], [-math.inf], [700.0]]), torch.tensor([[-math.inf], [0.25], [-math.inf], [-700.0]])
        a[1:3], b[0], b[2] = math.nan, math.nan, math.nan
        want = torch.stack([a[0], b[1], torch.zeros(1, 16), a[3]])
        merge_states(a, la, b, lb)
        assert torch.equal(a, want)
        assert torch.equal(la, torch.tensor([[0.5], [0.25], [-math.inf], [700.0]]))

    def test_halves_of_a_sequence_make_the_whole(self) -> None:
        """Decode over the first and the last pages, merged, is decode over all of them."""
        rng = torch.Generator().manual_seed(3)
        k_cache, v_cache = pool_views(12, 4, 2, 16, torch.float32)
        table, keys, values = fill(k_cache, v_cache, [38], rng, spare=0)
        q = torch.randn(1, 6, 16, generator=rng)

        def part(blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
            return paged_decode(q, k_cache, v_cache, blocks, torch.tensor([length], dtype=torch.int32), scale=0.3, window=None, max_length=length)

        (out, lse), (late, late_lse) = part(table[:, :5], 20), part(table[:, 5:], 18)
        merge_states(out, lse, late, late_lse)
        want, want_lse = attend(q[0], keys[0], values[0], 0.3, None)
        torch.testing.assert_close(out[0].double(), want, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(lse[0].double(), want_lse, rtol=1e-6, atol=1e-6)


class TestWriteKv:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(("kv_heads", "dim", "block_size"), [(1, 8, 1), (2, 16, 4), (3, 80, 16), (8, 64, 64)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_lands_in_its_slots_and_nowhere_else(self, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype) -> None:
        rng = torch.Generator().manual_seed(4)
        tokens, blocks = 19, 40
        k_cache, v_cache = pool_views(blocks, block_size, kv_heads, dim, dtype)
        qkv = torch.randn(tokens, 4 * kv_heads, dim, generator=rng).to(dtype)
        k, v = qkv[:, 2 * kv_heads : 3 * kv_heads], qkv[:, 3 * kv_heads :]
        slots = torch.randperm(blocks * block_size, generator=rng)[:tokens].clone()
        slots[[2, 11]] = -1
        want_k, want_v = k_cache.clone(), v_cache.clone()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                want_k[slot // block_size, slot % block_size] = k[token]
                want_v[slot // block_size, slot % block_size] = v[token]
        write_kv(k, v, k_cache, v_cache, slots)
        torch.testing.assert_close(k_cache, want_k, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(v_cache, want_v, rtol=0, atol=0, equal_nan=True)
