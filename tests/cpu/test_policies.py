"""Sparse policies: what they skip is bounded for every query, what they keep is what they say, and all of it is exact."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.ops.policies import Choice, KeyBounds, Policy, QuerySummary, block_bounds, block_mask, full, topk, vertical_slash, window

SCALE = 0.7


def bounds_of(keys: Tensor, block_size: int) -> KeyBounds:
    bounds = KeyBounds.empty(-(-len(keys) // block_size) + 2, keys.shape[1], keys.shape[2], block_size, keys.device)
    bounds.append(keys)
    return bounds


def scores(q: Tensor, keys: Tensor) -> Tensor:
    """In float64 `[queries, heads, keys]`."""
    return torch.einsum("qhd,thd->qht", q.double(), keys.double().repeat_interleave(q.shape[1] // keys.shape[1], 1)) * SCALE


def held(choice: Choice, tokens: int, block_size: int) -> Tensor:
    """Which tokens lie in the chosen blocks, bool `[tokens]`."""
    return torch.isin(torch.arange(tokens) // block_size, choice.blocks)


def mass_and_bound(policy: Policy, q: Tensor, keys: Tensor, block_size: int, layer: int = 0) -> tuple[Tensor, Tensor, Choice]:
    """Of queries behind all keys: the exact share of each query's attention in skipped blocks, what the policy says it is at most."""
    choice = policy(layer, QuerySummary.of(q, SCALE, len(keys)), bounds_of(keys, block_size))
    seen = held(choice, len(keys), block_size)
    exact = scores(q, keys)
    return exact.softmax(-1)[..., ~seen].sum(-1), choice.missed(exact[..., seen].logsumexp(-1).float()), choice


policies = st.one_of(
    st.just(full),
    st.builds(window, st.integers(0, 20), st.integers(0, 40)),
    st.builds(topk, st.integers(0, 8)),
    st.builds(vertical_slash, st.integers(0, 4), st.lists(st.integers(0, 12), max_size=3)),
)


class TestBound:
    @given(
        policy=policies,
        queries=st.integers(1, 4),
        tokens=st.integers(1, 80),
        block_size=st.sampled_from([1, 4, 16]),
        group=st.integers(1, 3),
        kv_heads=st.integers(1, 2),
        dim=st.sampled_from([1, 8, 64]),
        loud=st.sampled_from([0.0, 0.1, 1.0, 5.0, 40.0]),
        alike=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        seed=st.integers(0, 9999),
    )
    def test_holds_for_every_query(
        self,
        policy: Policy, queries: int, tokens: int, block_size: int, group: int, kv_heads: int, dim: int,
        loud: float, alike: bool, dtype: torch.dtype, seed: int,
    ) -> None:  # fmt: skip
        rng = torch.Generator().manual_seed(seed)
        q = (torch.randn(queries, group * kv_heads, dim, generator=rng) * loud).to(dtype)
        keys = torch.randn(1 if alike else tokens, kv_heads, dim, generator=rng).to(dtype).expand(tokens, -1, -1)
        exact, bound, _ = mass_and_bound(policy, q, keys, block_size)
        assert (exact * (1 - 1e-12) <= bound).all(), (exact - bound).max()
        assert (bound <= 1).all()

    @pytest.mark.parametrize("seed", range(5))
    def test_is_reached_by_one_query_over_single_keys(self, seed: int) -> None:
        """A box of one key, asked by a box of one query, hides nothing."""
        rng = torch.Generator().manual_seed(seed)
        q, keys = torch.randn(1, 4, 16, generator=rng), torch.randn(50, 2, 16, generator=rng)
        exact, bound, _ = mass_and_bound(topk(12), q, keys, 1)
        assert exact.min() > 0.01
        torch.testing.assert_close(bound.double(), exact, rtol=1e-3, atol=0)

    def test_tells_a_found_needle_from_a_missed_one(self) -> None:
        rng = torch.Generator().manual_seed(1)
        q, keys = torch.randn(1, 2, 16, generator=rng), torch.randn(160, 1, 16, generator=rng) * 0.05
        keys[77] = q[0].mean(0) * 3
        _, bound, choice = mass_and_bound(topk(1), q, keys, 8)
        assert choice.blocks.tolist() == [77 // 8]
        assert bound.max() < 0.5
        missed, bound, choice = mass_and_bound(window(8, 8), q, keys, 8)
        assert 77 // 8 not in choice.blocks.tolist()
        assert (bound >= missed).all()
        assert missed.min() > 0.5

    def test_with_nothing_seen_all_may_be_missed(self) -> None:
        keys = torch.randn(8, 1, 4)
        choice = topk(0)(0, QuerySummary.of(torch.randn(1, 1, 4), SCALE, 8), bounds_of(keys, 4))
        assert choice.missed(torch.full((1, 1), -math.inf)).tolist() == [[1.0]]

    def test_more_queries_widen_it_and_never_narrow_it(self) -> None:
        rng = torch.Generator().manual_seed(2)
        q, bounds = torch.randn(6, 4, 8, generator=rng), bounds_of(torch.randn(64, 2, 8, generator=rng), 8)
        together = block_bounds(QuerySummary.of(q, SCALE, 64), bounds)
        for one in q.split(1):
            assert (block_bounds(QuerySummary.of(one, SCALE, 64), bounds) <= together).all()


class TestChoices:
    keys = torch.randn(70, 2, 8, generator=torch.Generator().manual_seed(3))
    q = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(4))

    @pytest.mark.parametrize("policy", [full, topk(9), topk(100), topk(0, dense_layers=1), window(70, 0), window(0, 70)])
    def test_everything_is_full_and_misses_nothing(self, policy: Policy) -> None:
        exact, bound, choice = mass_and_bound(policy, self.q, self.keys, 8)
        assert choice.blocks.tolist() == list(range(9))
        assert not bound.any()
        assert not exact.any()

    def test_dense_layers_end(self) -> None:
        assert len(mass_and_bound(topk(3, dense_layers=2), self.q, self.keys, 8, layer=1)[2].blocks) == 9
        assert len(mass_and_bound(topk(3, dense_layers=2), self.q, self.keys, 8, layer=2)[2].blocks) == 3

    def test_windows_keep_whole_blocks(self) -> None:
        def kept(sinks: int, recent: int) -> list[int]:
            return mass_and_bound(window(sinks, recent), self.q, self.keys, 8)[2].blocks.tolist()

        assert kept(1, 1) == [0, 8]  # tokens 64 to 69 are the last block's
        assert kept(8, 6) == [0, 8]
        assert kept(9, 7) == [0, 1, 7, 8]
        assert kept(0, 0) == [8]  # a block that reaches up to the queries

    @given(count=st.integers(0, 9))
    def test_more_blocks_miss_no_more(self, count: int) -> None:
        """The best n + 1 blocks hold the best n."""
        fewer, more = (mass_and_bound(topk(n), self.q, self.keys, 8)[2] for n in (count, count + 1))
        assert set(fewer.blocks.tolist()) <= set(more.blocks.tolist())
        assert (more.skipped <= fewer.skipped).all()

    def test_a_chunk_over_its_own_keys(self) -> None:
        """Pieces of 16 queries over 96 keys: no block behind a piece is kept, and none counts as missed."""
        rng = torch.Generator().manual_seed(5)
        keys, q = torch.randn(96, 2, 8, generator=rng), torch.randn(96, 4, 8, generator=rng)
        bounds = bounds_of(keys, 8)
        pieces = [QuerySummary.of(q[at : at + 16], SCALE, at) for at in range(0, 96, 16)]
        block = torch.arange(12)
        piece = torch.arange(6)[:, None]
        causal = block * 8 < (piece + 1) * 16
        assert torch.equal(block_mask(full, 0, pieces, bounds), causal)
        slashes = block_mask(vertical_slash(0, (0, 3)), 0, pieces, bounds)
        assert torch.equal(slashes, causal & ((block // 2 == piece) | ((block + 3) // 2 == piece)))
        mask = block_mask(vertical_slash(2, (0,)), 0, pieces, bounds)
        assert not (mask & ~causal).any()
        for row, query in zip(mask, pieces, strict=True):
            kept = row.nonzero()[:, 0].tolist()
            own = {query.start // 8, query.start // 8 + 1}
            assert own | set(topk(2)(0, query, bounds).blocks.tolist()) == set(kept)
        last = vertical_slash(2, (0,))(0, pieces[0], bounds)
        assert last.skipped.tolist() == [-math.inf] * 4

    def test_causal_mass_of_a_sparse_chunk_is_bounded(self) -> None:
        rng = torch.Generator().manual_seed(6)
        keys, q = torch.randn(96, 2, 8, generator=rng), torch.randn(96, 4, 8, generator=rng)
        bounds = bounds_of(keys, 8)
        visible = torch.arange(96) <= torch.arange(96)[:, None]
        exact = scores(q, keys).masked_fill(~visible[:, None], -math.inf)
        for at in range(0, 96, 16):
            choice = vertical_slash(1, (0, 1))(0, QuerySummary.of(q[at : at + 16], SCALE, at), bounds)
            seen, piece = held(choice, 96, 8), exact[at : at + 16]
            lse = piece[..., seen].logsumexp(-1).float()
            assert (piece.softmax(-1)[..., ~seen].sum(-1) <= choice.missed(lse)).all()


class TestKeyBounds:
    @given(cuts=st.lists(st.integers(0, 13), max_size=8), block_size=st.sampled_from([1, 4, 7, 16]), seed=st.integers(0, 99))
    def test_grow_by_any_pieces(self, cuts: list[int], block_size: int, seed: int) -> None:
        keys = torch.randn(sum(cuts), 2, 3, generator=torch.Generator().manual_seed(seed)).bfloat16()
        bounds = KeyBounds.empty(-(-len(keys) // block_size) + 1, 2, 3, block_size, keys.device)
        for piece in keys.split(cuts) if cuts else []:
            bounds.append(piece)
        assert bounds.tokens == len(keys)
        assert bounds.blocks == -(-len(keys) // block_size)
        for block, part in enumerate(keys.float().split(block_size) if len(keys) else []):
            assert torch.equal(bounds.low[block], part.amin(0))
            assert torch.equal(bounds.high[block], part.amax(0))
        assert (bounds.low[bounds.blocks :] == math.inf).all()
