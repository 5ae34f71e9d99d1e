"""The attention kernels, interpreted on the CPU, against float64 arithmetic written out plainly."""

import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if (
    os.environ.get("TRITON_INTERPRET") != "1"
):  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

from paged import (
    TOLERANCE,
    Case,
    attend,
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
from penstock.ops.attention.dense import dense_reference
from penstock.ops.attention.inputs import LayerAttention, QueryRun, Rows
from penstock.ops.runs import run_tokens
from penstock.ops.triton.attention import paged_run, scratch_bytes, write_kv
from penstock.ops.triton.decode import _divided
from penstock.ops.triton.tiles import fits_tile, fold_tile, merge_states
from penstock.ops.triton.tuning import DecodeTuning

TUNINGS = st.builds(
    DecodeTuning,
    tile=st.sampled_from([16, 32]),
    warps=st.just(4),
    depth=st.just(2),
    workers_per_sm=st.integers(1, 6),
    overlap=st.just(False),
    least=st.integers(1, 2),
)
"""Ways to cut the work on runs."""


class TestPagedDecode:
    @pytest.mark.parametrize(
        ("block_size", "dim"), [(1, 16), (4, 128), (16, 8), (16, 64), (32, 16), (64, 8), (64, 64), (64, 128)]
    )
    def test_block_sizes_and_head_dims(self, block_size: int, dim: int) -> None:
        check_decode([5, 70, 1], block_size=block_size, dim=dim)

    @pytest.mark.parametrize(
        ("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (5, 1), (8, 2), (14, 2), (16, 1)]
    )
    def test_group_sizes(self, heads: int, kv_heads: int) -> None:
        check_decode([33, 64], heads=heads, kv_heads=kv_heads)

    @pytest.mark.parametrize("dim", [24, 80])
    def test_head_dims_between_powers_of_two(self, dim: int) -> None:
        check_decode([40, 3], dim=dim)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precisions(self, dtype: torch.dtype) -> None:
        check_decode([100, 17, 64], dtype=dtype, dim=64, block_size=32)

    @pytest.mark.parametrize(
        ("window", "block_size"), [(1, 4), (15, 64), (16, 4), (17, 64), (64, 64), (1000, 4)]
    )
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

    @pytest.mark.parametrize("window", [None, 17])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_sinks(self, dtype: torch.dtype, window: int | None) -> None:
        """Of sequences that one worker finishes, that several do, and of none; heads that are no power of
        two."""
        tuning = DecodeTuning(tile=16, warps=4, depth=2, workers_per_sm=4)
        check_decode([300, 16, 0, 65, 1], heads=6, window=window, dtype=dtype, sinks=True, tuning=tuning)
        check_decode([20, 40], heads=6, window=window, dtype=dtype, sinks=True)

    def test_a_pool_beyond_two_billion_elements(self) -> None:
        """Only the pages that are touched exist: an address computed in 32 bits would fall outside or onto
        other bytes."""
        block_size, dim, stride = 16, 16, 1 << 21
        blocks = 1104
        pool = torch.empty(blocks * stride, dtype=torch.bfloat16)
        k_cache = pool.as_strided((blocks, block_size, 1, dim), (stride, dim, dim, 1))
        v_cache = pool.as_strided((blocks, block_size, 1, dim), (stride, dim, dim, 1), block_size * dim)
        rng = torch.Generator().manual_seed(0)
        table = torch.tensor([[1103, 1030]], dtype=torch.int32)
        k, v = (torch.randn(32, 1, dim, generator=rng).bfloat16() for _ in range(2))
        slots = torch.cat([torch.arange(16) + block * block_size for block in (1103, 1030)])
        write_kv(k, v, k_cache, v_cache, slots)
        q = torch.randn(1, 2, dim, generator=rng).bfloat16()
        rows = Rows(1, table, torch.tensor([32], dtype=torch.int32), 32)
        got, lse = decode(q, (k_cache, v_cache), rows, LayerAttention(0.25))
        check_answer(got[0], lse[0], *attend(q[0], k, v, 0.25, None))

    @settings(max_examples=7, deadline=None)
    @given(
        lengths=st.lists(st.integers(0, 150), min_size=1, max_size=7),
        block_size=st.sampled_from([1, 4, 16, 64]),
        group=st.integers(1, 4),
        kv_heads=st.integers(1, 3),
        window=st.none() | st.integers(1, 200),
        workers=st.integers(1, 6),
        tile=st.sampled_from([16, 32]),
        seed=st.integers(0, 99),
    )
    def test_any_batch_cut_anywhere(
        self,
        lengths: list[int],
        block_size: int,
        group: int,
        kv_heads: int,
        window: int | None,
        workers: int,
        tile: int,
        seed: int,
    ) -> None:
        check_decode(
            lengths,
            heads=group * kv_heads,
            kv_heads=kv_heads,
            block_size=block_size,
            window=window,
            seed=seed,
            tuning=DecodeTuning(tile=tile, warps=4, depth=2, workers_per_sm=workers),
        )


def check_joined(
    lengths: list[int], *, tuning: DecodeTuning | None = None, max_length: int | None = None, seed: int = 0,
    rounds: int = 2, **case: Any,
) -> None:  # fmt: skip
    """Decode in one launch, over and over with the same counters: rows are shifted by one each time, as
    requests come and go. case: fields of `Case`."""
    of, rng = Case(**case), torch.Generator().manual_seed(seed)
    arrivals = torch.zeros(len(lengths) * of.kv_heads + 3, dtype=torch.int32)
    for turn in range(rounds):
        now = lengths[turn:] + lengths[:turn]
        cache = of.cache(now)
        table, keys, values = fill(*cache, now, rng)
        q = torch.randn(len(now), of.heads, of.dim, generator=rng).to(of.dtype)
        out, visible = torch.full_like(q, math.nan), torch.tensor(now, dtype=torch.int32)
        rows = Rows(len(now), table, visible, max_length or max(*now, 1), arrivals=arrivals)
        _, lse = decode(q, cache, rows, replace(of.layer, scale=0.3), out=out, tuning=tuning)
        for seq in range(len(now)):
            check_answer(out[seq], lse[seq], *of.answer(q[seq], keys[seq], values[seq], 0.3))
        assert not arrivals.any()


class TestDecodeInOneLaunch:
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "dim"),
        [(1, 1, 16), (6, 2, 16), (5, 1, 24), (14, 2, 64), (4, 4, 128), (16, 1, 8)],
    )
    def test_groups_and_head_dims(self, heads: int, kv_heads: int, dim: int) -> None:
        check_joined([5, 130, 1], heads=heads, kv_heads=kv_heads, dim=dim)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precisions(self, dtype: torch.dtype) -> None:
        check_joined([200, 17, 64], dtype=dtype, dim=64, block_size=32)

    @pytest.mark.parametrize("window", [None, 17])
    def test_rows_of_padding_answer_zero(self, window: int | None) -> None:
        check_joined([0, 0, 137, 0, 250, 0], window=window)
        check_joined([0, 0], window=window)

    def test_one_long_sequence_uses_every_worker(self) -> None:
        check_joined([1000], tuning=DecodeTuning(tile=16, warps=4, depth=2, workers_per_sm=14))

    @pytest.mark.parametrize("window", [None, 17])
    def test_sinks(self, window: int | None) -> None:
        check_joined([0, 0, 137, 0, 250, 0], heads=6, window=window, sinks=True)
        tuning = DecodeTuning(tile=16, warps=4, depth=2, workers_per_sm=14)
        check_joined([1000, 3], window=window, sinks=True, tuning=tuning)

    @pytest.mark.parametrize("lengths", [[20, 3], [700], [0, 0, 40, 0], [0]])
    def test_a_bound_far_above_the_lengths(self, lengths: list[int]) -> None:
        check_joined(lengths, max_length=1 << 17)
        check_decode(lengths, max_length=1 << 17)

    @settings(max_examples=7, deadline=None)
    @given(
        lengths=st.lists(st.integers(0, 150), min_size=1, max_size=7),
        block_size=st.sampled_from([1, 4, 16, 64]),
        group=st.integers(1, 4),
        kv_heads=st.integers(1, 3),
        window=st.none() | st.integers(1, 200),
        workers=st.integers(1, 6),
        tile=st.sampled_from([16, 32]),
        seed=st.integers(0, 99),
    )
    def test_any_batch_cut_anywhere(
        self,
        lengths: list[int],
        block_size: int,
        group: int,
        kv_heads: int,
        window: int | None,
        workers: int,
        tile: int,
        seed: int,
    ) -> None:
        tuning = DecodeTuning(tile=tile, warps=4, depth=2, workers_per_sm=workers)
        heads = group * kv_heads
        check_joined(
            lengths,
            heads=heads,
            kv_heads=kv_heads,
            block_size=block_size,
            window=window,
            seed=seed,
            tuning=tuning,
            rounds=1,
        )


@triton.jit
def divide(spans, found, workers, COUNT: tl.constexpr, LEAST: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    numbers = tl.load(spans + tl.arange(0, COUNT))
    run, piece = _divided(numbers, tl.sum(numbers, 0), workers, LEAST)
    tl.store(found, run)
    tl.store(found + 1, piece)


class TestDivision:
    @staticmethod
    def of(spans: list[int], workers: int, least: int = 2) -> tuple[int, int]:
        """Tiles of a run and of a piece."""
        found = torch.zeros(2, dtype=torch.int32)
        numbers = torch.tensor(spans + [0] * (64 - len(spans)), dtype=torch.int32)
        divide[(1,)](numbers, found, workers, COUNT=64, LEAST=least)
        run, piece = found.tolist()
        assert run % piece == 0
        assert run * workers >= sum(-(-span // piece) * piece for span in spans), "tiles that nobody takes"
        return run, piece

    @pytest.mark.parametrize(
        ("sequences", "span", "workers", "run", "piece"),
        [
            (64, 33, 66, 33, 33),
            (64, 33, 33, 66, 33),
            (16, 33, 33, 17, 17),
            (1, 512, 49, 11, 11),
            (64, 1, 66, 2, 2),
            (40, 0, 9, 2, 2),
        ],
    )
    def test_sequences_of_one_length_are_cut_where_they_end(
        self, sequences: int, span: int, workers: int, run: int, piece: int
    ) -> None:
        assert self.of([span] * sequences, workers) == (run, piece)

    def test_or_about_one_length(self) -> None:
        assert self.of([30, 33, 0, 31, 33, 32], 5) == (33, 33)

    @pytest.mark.parametrize("spans", [[1, 40, 7, 22, 90, 13], [20] * 50, [200] + [3] * 40])
    def test_others_are_cut_evenly(self, spans: list[int]) -> None:
        """Also those of one length, of which some workers would have one more than others."""
        assert self.of(spans, 33) == (max(-(-sum(spans) // 33), 2), 1)

    def test_so_are_many_for_each_worker(self) -> None:
        assert self.of([9] * 64, 13) == (45, 1)
        assert self.of([9] * 26, 13) == (18, 9)

    @given(
        spans=st.lists(st.integers(0, 40), min_size=1, max_size=64),
        workers=st.integers(1, 99),
        least=st.integers(1, 2),
    )
    def test_nothing_is_left_out_and_no_run_is_much_longer(
        self, spans: list[int], workers: int, least: int
    ) -> None:
        run, even = self.of(spans, workers, least)[0], max(-(-sum(spans) // workers), least)
        assert even <= run <= even + 2 + even // 16

    @pytest.mark.parametrize(
        ("lengths", "window", "workers"),
        [
            ([100] * 5, None, 3),
            ([100] * 5, 50, 2),
            ([97, 112, 0, 100, 105], None, 5),
            ([97, 112, 0, 100, 105], 50, 1),
            ([112, 33], None, 2),
            ([112, 33], 50, 3),
        ],
    )
    def test_answers(self, lengths: list[int], window: int | None, workers: int) -> None:
        tuning = DecodeTuning(tile=16, warps=4, depth=2, workers_per_sm=workers, least=2)
        check_joined(lengths, window=window, tuning=tuning, rounds=1)
        check_decode(lengths, window=window, tuning=tuning)


class TestRun:
    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (14, 1), (80, 1)])
    def test_group_sizes(self, heads: int, kv_heads: int) -> None:
        check_run(run_tokens(heads // kv_heads, 64) + 1, 25, heads=heads, kv_heads=kv_heads)

    @pytest.mark.parametrize(
        ("tokens", "start", "window"),
        [(1, 0, None), (9, 0, 1), (1, 90, 20), (5, 16, None), (6, 31, 20), (6, 31, 1)],
    )
    def test_where_it_begins(self, tokens: int, start: int, window: int | None) -> None:
        check_run(tokens, start, heads=16, kv_heads=1, window=window)

    @pytest.mark.parametrize(
        ("dtype", "dim", "block_size"),
        [(torch.bfloat16, 64, 32), (torch.float16, 128, 64), (torch.float32, 24, 4)],
    )
    def test_precisions(self, dtype: torch.dtype, dim: int, block_size: int) -> None:
        check_run(9, 50, heads=8, kv_heads=1, dtype=dtype, dim=dim, block_size=block_size)

    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 1, 24), (2, 2, 64)])
    def test_partial_results_take_no_more_than_is_said(
        self, heads: int, kv_heads: int, dim: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What a budget counts, however long the context: the longest here start as many programs as there
        may be."""
        said = scratch_bytes(heads, kv_heads, dim, 4, 16, torch.device("cpu"))
        partial, empty = list[int](), torch.empty

        def noted(*size: object, **options: Any) -> torch.Tensor:
            made = empty(*size, **options)
            if options.get("dtype") is torch.float32 and made.dim() > 2:
                partial.append(made.nbytes)
            return made

        monkeypatch.setattr(torch, "empty", noted)
        for length in (20, 300):
            partial.clear()
            check_run(run_tokens(heads // kv_heads, 4 * dim), length, heads=heads, kv_heads=kv_heads, dim=dim)
            assert 0 < sum(partial) <= said
        most = sum(partial)
        check_decode([300, 290, 280, 270, 260], heads=heads, kv_heads=kv_heads, dim=dim)
        assert sum(partial) - most <= said
        assert most > said / 4, "the bound is far from what is taken"

    @pytest.mark.parametrize(("tokens", "start", "window"), [(9, 0, 4), (5, 90, None), (20, 31, 20)])
    def test_sinks(self, tokens: int, start: int, window: int | None) -> None:
        check_run(tokens, start, heads=16, window=window, sinks=True)
        check_placed_run(tokens, start, 5, heads=16, window=window, sinks=True, max_length=4096)

    @pytest.mark.parametrize("window", [None, 1, 5, 40])
    @pytest.mark.parametrize(
        ("tokens", "begin", "earlier"), [(64, 90, 0), (9, 3, 0), (5, 60, 11), (1, 33, 30), (40, 20, 24)]
    )
    def test_trees(self, tokens: int, begin: int, earlier: int, window: int | None) -> None:
        """Whole, and from their middle on."""
        check_tree(tokens, begin, earlier=earlier, heads=16, kv_heads=2, window=window, seed=begin)
        check_tree(tokens, begin, earlier=earlier, heads=3, kv_heads=3, window=window, sinks=True)

    def test_nothing(self) -> None:
        k_cache, v_cache = pool_views(2, 16, 2, 16, torch.float32)
        run, lse = QueryRun(0, 0, 3, torch.tensor([0])), torch.empty(0, 4)
        out = paged_run(torch.empty(0, 4, 16), (k_cache, v_cache), run, LayerAttention(1.0), lse=lse)
        assert out.shape == (0, 4, 16)

    @pytest.mark.parametrize(
        ("tokens", "start", "padding", "window"), [(1, 0, 0, None), (9, 0, 7, None), (20, 40, 12, 15)]
    )
    def test_placed_on_the_device(self, tokens: int, start: int, padding: int, window: int | None) -> None:
        """Within a bound that is far above the lengths."""
        check_placed_run(tokens, start, padding, heads=16, kv_heads=1, window=window, max_length=4096)

    @pytest.mark.parametrize(
        ("tokens", "start", "padding", "window"), [(1, 0, 0, None), (7, 33, 25, None), (20, 40, 12, 15)]
    )
    def test_placed_where_the_bound_is(
        self, tokens: int, start: int, padding: int, window: int | None
    ) -> None:
        check_placed_run(tokens, start, padding, heads=4, kv_heads=2, window=window)

    def test_nobody_placed_on_the_device(self) -> None:
        check_placed_run(0, 1, 5)

    @settings(max_examples=5, deadline=None)
    @given(
        tokens=st.integers(1, 9),
        start=st.integers(0, 150),
        heads=st.integers(6, 30),
        block_size=st.sampled_from([1, 16, 64]),
        window=st.none() | st.integers(1, 200),
        tuning=TUNINGS,
        seed=st.integers(0, 99),
    )
    def test_cut_anywhere(
        self, tokens: int, start: int, heads: int, block_size: int, window: int | None, tuning: DecodeTuning,
        seed: int,
    ) -> None:  # fmt: skip
        check_run(
            tokens,
            start,
            heads=heads,
            kv_heads=1,
            block_size=block_size,
            window=window,
            tuning=tuning,
            seed=seed,
        )


class TestSeveralRuns:
    """Each against the keys that it sees, in float64."""

    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 2), (14, 1), (80, 1)])
    def test_group_sizes(self, heads: int, kv_heads: int) -> None:
        most = run_tokens(heads // kv_heads, 64)
        check_runs([(most, 0), (most + 1, 25), (1, 40), (2 * most, 3)], heads=heads, kv_heads=kv_heads)

    @pytest.mark.parametrize("window", [None, 1, 20])
    def test_windows_and_sinks(self, window: int | None) -> None:
        pieces = [(9, 0), (1, 90), (6, 31), (20, 16), (5, 0)]
        check_runs(pieces, heads=16, window=window)
        check_runs(pieces, heads=16, window=window, sinks=True)

    @pytest.mark.parametrize(
        ("dtype", "dim", "block_size"),
        [(torch.bfloat16, 64, 32), (torch.float16, 128, 64), (torch.float32, 24, 4)],
    )
    def test_precisions(self, dtype: torch.dtype, dim: int, block_size: int) -> None:
        check_runs([(9, 50), (70, 0), (3, 8)], heads=8, dtype=dtype, dim=dim, block_size=block_size)

    def test_many(self) -> None:
        """More pieces than programs scan at once for rows."""
        check_runs([(2, 3)] * 260, heads=2, kv_heads=1, dim=8)

    @settings(max_examples=5, deadline=None)
    @given(
        pieces=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 90)), min_size=1, max_size=6),
        heads=st.integers(6, 30),
        block_size=st.sampled_from([1, 16, 64]),
        window=st.none() | st.integers(1, 100),
        tuning=TUNINGS,
        seed=st.integers(0, 99),
    )
    def test_cut_anywhere(
        self, pieces: list[tuple[int, int]], heads: int, block_size: int, window: int | None,
        tuning: DecodeTuning, seed: int,
    ) -> None:  # fmt: skip
        check_runs(
            pieces, heads=heads, kv_heads=1, block_size=block_size, window=window, tuning=tuning, seed=seed
        )


class TestFoldTile:
    @staticmethod
    def check(
        queries: int, keys: int, heads: int, kv_heads: int, dim: int, *,
        dtype: torch.dtype = torch.float32, tuning: DecodeTuning | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        """A strided tile with NaN before and behind it."""
        rng = torch.Generator().manual_seed(seed)
        k, v = torch.full((keys + 2, 2, kv_heads, dim), math.nan, dtype=dtype)[1:-1].unbind(1)
        k.copy_(torch.randn(k.shape, generator=rng))
        v.copy_(torch.randn(v.shape, generator=rng))
        q = torch.randn(queries, heads + 3, dim, generator=rng).to(dtype)[:, 1 : heads + 1]
        assert fits_tile(q, k, v, queries)
        # Of twice as many rows every second one looks, some with a state and some that have seen nothing yet;
        # the others stay.
        rows = torch.randn(2 * queries, heads, dim, generator=rng).to(dtype)
        rows[::2] = q
        out, lse = (
            torch.randn(2 * queries, heads, dim, generator=rng),
            torch.randn(heads, 2 * queries, generator=rng).T,
        )
        lse[2::4], out[2::4] = -math.inf, math.nan
        before = out.clone(), lse.clone()
        seen, seen_lse = dense_reference(q.float(), k.float(), v.float(), LayerAttention(0.4), causal=False)
        want_lse = torch.logaddexp(lse[::2], seen_lse)
        old = torch.where(lse[::2] == -math.inf, 0.0, (lse[::2] - want_lse).exp())[..., None]
        want = torch.where(old > 0, out[::2], 0.0) * old + seen * (seen_lse - want_lse).exp()[..., None]
        alone = out[::2].clone(), lse[::2].clone()
        fold_tile(
            out, lse, rows, k, v, torch.arange(0, 2 * queries, 2), layer=LayerAttention(0.4), tuning=tuning
        )
        fold_tile(*alone, q, k, v, layer=LayerAttention(0.4), tuning=tuning)
        for got, got_lse in ((out[::2], lse[::2]), alone):
            torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype] * float(want.abs().max()))
            torch.testing.assert_close(got_lse, want_lse, rtol=1e-4, atol=1e-4)
        assert torch.equal(out[1::2], before[0][1::2])
        assert torch.equal(lse[1::2], before[1][1::2])

    @pytest.mark.parametrize(
        ("queries", "heads", "kv_heads"), [(1, 8, 2), (2, 3, 1), (3, 8, 2), (5, 3, 1), (8, 8, 2), (1, 3, 1)]
    )
    def test_queries_and_groups(self, queries: int, heads: int, kv_heads: int) -> None:
        self.check(queries, 75, heads, kv_heads, 16)

    @pytest.mark.parametrize("dim", [8, 80, 128])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_head_dims(self, dim: int, dtype: torch.dtype) -> None:
        self.check(2, 128, 4, 2, dim, dtype=dtype)

    def test_one_key_head_of_many_query_heads(self) -> None:
        self.check(1, 40, 48, 1, 16)

    @settings(max_examples=6)
    @given(
        queries=st.integers(1, 8),
        keys=st.integers(1, 200),
        workers=st.integers(1, 6),
        tile=st.sampled_from([16, 32]),
        seed=st.integers(0, 99),
    )
    def test_cut_anywhere(self, queries: int, keys: int, workers: int, tile: int, seed: int) -> None:
        self.check(
            queries,
            keys,
            8,
            2,
            16,
            tuning=DecodeTuning(tile=tile, warps=4, depth=2, workers_per_sm=workers),
            seed=seed,
        )

    def test_what_does_not_fit(self) -> None:
        k = torch.zeros(64, 2, 16)
        assert fits_tile(torch.zeros(8, 8, 16), k, k, 8)
        assert not fits_tile(torch.zeros(9, 8, 16), k, k, 9)
        assert not fits_tile(torch.zeros(1, 8, 16), k, torch.zeros(64, 3, 16)[:, :2], 1)
        assert not fits_tile(torch.zeros(1, 8, 16), k.bfloat16(), k.bfloat16(), 1)


def lse_view(tokens: int, heads: int, heads_first: bool, rng: torch.Generator) -> Tensor:
    lse = torch.randn((heads, tokens) if heads_first else (tokens, heads), generator=rng) * 3
    return lse.T if heads_first else lse


class TestMergeStates:
    @pytest.mark.parametrize("heads_first", [False, True])
    @pytest.mark.parametrize(("heads", "dim"), [(3, 16), (4, 80), (1, 128)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_against_float64(self, heads: int, dim: int, dtype: torch.dtype, heads_first: bool) -> None:
        rng = torch.Generator().manual_seed(1)
        tokens = 21
        a, b = (
            torch.randn(tokens, heads + 2, dim, generator=rng).to(dtype)[:, 1 : heads + 1] for _ in range(2)
        )
        la, lb = lse_view(tokens, heads, heads_first, rng), lse_view(tokens, heads, not heads_first, rng)
        lse = torch.logaddexp(la.double(), lb.double())
        want = a.double() * (la - lse).exp()[..., None] + b.double() * (lb - lse).exp()[..., None]
        merge_states(a, la, b, lb)
        torch.testing.assert_close(a.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(la.double(), lse, rtol=1e-6, atol=1e-6)

    def test_a_side_that_saw_nothing_is_left_out_exactly(self) -> None:
        rng = torch.Generator().manual_seed(2)
        a, b = torch.randn(4, 1, 16, generator=rng), torch.randn(4, 1, 16, generator=rng)
        la, lb = (
            torch.tensor([[0.5], [-math.inf], [-math.inf], [700.0]]),
            torch.tensor([[-math.inf], [0.25], [-math.inf], [-700.0]]),
        )
        a[1:3], b[0], b[2] = math.nan, math.nan, math.nan
        want = torch.stack([a[0], b[1], torch.zeros(1, 16), a[3]])
        merge_states(a, la, b, lb)
        assert torch.equal(a, want)
        assert torch.equal(la, torch.tensor([[0.5], [0.25], [-math.inf], [700.0]]))

    def test_halves_of_a_sequence_make_the_whole(self) -> None:
        """Decode over the first and the last pages, merged, is decode over all of them."""
        rng = torch.Generator().manual_seed(3)
        cache = pool_views(12, 4, 2, 16, torch.float32)
        table, keys, values = fill(*cache, [38], rng, spare=0)
        q = torch.randn(1, 6, 16, generator=rng)

        def part(blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
            rows = Rows(1, blocks, torch.tensor([length], dtype=torch.int32), length)
            return decode(q, cache, rows, LayerAttention(0.3))

        (out, lse), (late, late_lse) = part(table[:, :5], 20), part(table[:, 5:], 18)
        merge_states(out, lse, late, late_lse)
        check_answer(out[0], lse[0], *attend(q[0], keys[0], values[0], 0.3, None))


class TestWriteKv:
    @pytest.mark.parametrize(
        ("kv_heads", "dim", "block_size"), [(1, 8, 1), (2, 16, 4), (3, 80, 16), (8, 64, 64)]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_lands_in_its_slots_and_nowhere_else(
        self, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
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
