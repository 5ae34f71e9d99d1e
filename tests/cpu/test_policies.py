"""Sparse policies: what they skip is bounded for every query, what they keep is what they say, and sketches
say enough of real keys."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.ops.policies import Choice, Past, Policy, full, topk, vertical_slash, window
from penstock.ops.sketch import Scores, SketchLayout, scores, sketch

SCALE = 0.7
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def sketched(keys: Tensor, block_size: int, bits: int) -> tuple[Tensor, SketchLayout]:
    dtype = str(keys.dtype).removeprefix("torch.")
    layout = SketchLayout(block_size, keys.shape[1], keys.shape[2], dtype, bits)
    return sketch(keys.view(-1, block_size, *keys.shape[1:]), layout), layout


def exact_scores(q: Tensor, keys: Tensor, cap: float | None = None) -> Tensor:
    """In float64 `[queries, heads, keys]`."""
    wide = keys.double().repeat_interleave(q.shape[1] // keys.shape[1], 1)
    found = torch.einsum("qhd,thd->qht", q.double(), wide) * SCALE
    return found if cap is None else cap * torch.tanh(found / cap)


def scored(q: Tensor, keys: Tensor, block_size: int, bits: int, cap: float | None = None) -> Scores:
    return scores(q.float() * SCALE, *sketched(keys, block_size, bits), cap)


def chosen(policy: Policy, q: Tensor, keys: Tensor, block_size: int, bits: int = 4, layer: int = 0) -> Choice:
    """Of queries behind all keys; everything, with nothing skipped, where the policy has nothing to
    choose."""
    blocks = len(keys) // block_size
    past = Past(blocks, block_size, len(keys), len(keys) + len(q), lambda: scored(q, keys, block_size, bits))
    every = Choice(torch.ones(blocks, dtype=torch.bool), torch.full(q.shape[:2], -math.inf))
    return policy(layer, past) or every


def mass_and_bound(
    policy: Policy, q: Tensor, keys: Tensor, block_size: int, bits: int = 4
) -> tuple[Tensor, Tensor, Choice]:
    """The exact share of each query's attention in skipped blocks, and what the policy says it is at most."""
    choice = chosen(policy, q, keys, block_size, bits)
    seen = choice.keep.repeat_interleave(block_size)
    exact = exact_scores(q, keys)
    return (
        exact.softmax(-1)[..., ~seen].sum(-1),
        choice.missed(exact[..., seen].logsumexp(-1).float()),
        choice,
    )


policies = st.one_of(
    st.just(full),
    st.builds(window, st.integers(0, 20), st.integers(0, 40)),
    st.builds(topk, st.integers(0, 8)),
    st.builds(vertical_slash, st.integers(0, 4), st.lists(st.integers(0, 12), max_size=3)),
)


@dataclass(frozen=True)
class Case:
    """Random queries and keys. loud, size: scales of both. alike: whether all keys are equal.
    cap: soft cap of scores."""

    queries: int
    blocks: int
    block_size: int
    group: int
    kv_heads: int
    dim: int
    loud: float
    size: float
    alike: bool
    dtype: torch.dtype
    cap: float | None
    seed: int

    def made(self) -> tuple[Tensor, Tensor]:
        """Return queries `[queries, heads, dim]` and keys `[tokens, kv_heads, dim]`."""
        rng, tokens = torch.Generator().manual_seed(self.seed), self.blocks * self.block_size
        q = torch.randn(self.queries, self.group * self.kv_heads, self.dim, generator=rng) * self.loud
        keys = torch.randn(1 if self.alike else tokens, self.kv_heads, self.dim, generator=rng) * self.size
        return q.to(self.dtype), keys.to(self.dtype).expand(tokens, -1, -1).contiguous()


cases = st.builds(
    Case,
    queries=st.sampled_from([1, 2, 9]),
    blocks=st.integers(1, 12),
    block_size=st.sampled_from([1, 4, 16]),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([1, 7, 8, 64]),
    loud=st.sampled_from([0.0, 0.1, 1.0, 5.0, 40.0]),
    size=st.sampled_from([1e-6, 1.0, 1e3]),
    alike=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    cap=st.sampled_from([None, None, 0.5, 5.0, 50.0]),
    seed=st.integers(0, 9999),
)


class TestBound:
    @given(policy=policies, case=cases, bits=st.sampled_from([0, 4, 8]))
    def test_holds_for_every_query(self, policy: Policy, case: Case, bits: int) -> None:
        """Of each block, whatever is chosen, and of what is skipped, with keys of any size, rounded or
        equal."""
        (q, keys), size = case.made(), case.block_size
        exact = exact_scores(q, keys, case.cap).view(*q.shape[:2], case.blocks, size).logsumexp(-1)
        found = scored(q, keys, size, bits, case.cap)
        assert (found.upper >= exact).all(), (exact - found.upper).max()
        missed, bound, _ = mass_and_bound(policy, q, keys, size, bits)
        assert (missed * (1 - 1e-12) <= bound).all(), (missed - bound).max()
        assert (bound <= 1).all()

    @pytest.mark.parametrize("seed", range(5))
    def test_is_reached_by_one_query_over_single_keys(self, seed: int) -> None:
        """A box of one key, asked by one query, hides nothing."""
        rng = torch.Generator().manual_seed(seed)
        q, keys = torch.randn(1, 4, 16, generator=rng), torch.randn(50, 2, 16, generator=rng)
        exact, bound, _ = mass_and_bound(topk(12), q, keys, 1, bits=0)
        assert exact.min() > 0.01
        torch.testing.assert_close(bound.double(), exact, rtol=1e-3, atol=0)

    def test_says_something_where_boxes_say_nothing(self) -> None:
        """64 keys of 64 channels in a block, one block in four read: by boxes all may be missed, by 8 bits
        little more than is."""
        rng = torch.Generator().manual_seed(7)
        q, keys = (
            torch.randn(1, 4, 64, generator=rng) * 0.36,
            torch.randn(2048, 2, 64, generator=rng).bfloat16(),
        )
        exact, box, _ = mass_and_bound(topk(8), q, keys, 64, bits=0)
        assert box.min() > 0.99
        exact, four, _ = mass_and_bound(topk(8), q, keys, 64, bits=4)
        assert exact.max() < 0.75
        assert (four < exact + 0.4).all(), (exact, four)
        exact, eight, _ = mass_and_bound(topk(8), q, keys, 64, bits=8)
        assert (eight < exact + 0.03).all(), (exact, eight)

    def test_tells_a_found_needle_from_a_missed_one(self) -> None:
        rng = torch.Generator().manual_seed(1)
        q, keys = torch.randn(1, 2, 16, generator=rng), torch.randn(160, 1, 16, generator=rng) * 0.05
        keys[77] = q[0].mean(0) * 3
        _, bound, choice = mass_and_bound(topk(1), q, keys, 8)
        assert choice.keep.nonzero().tolist() == [[77 // 8]]
        assert bound.max() < 0.3
        missed, bound, choice = mass_and_bound(window(8, 8), q, keys, 8)
        assert not choice.keep[77 // 8]
        assert (bound >= missed).all()
        assert missed.min() > 0.5

    def test_with_nothing_seen_all_may_be_missed(self) -> None:
        choice = chosen(topk(0), torch.randn(1, 1, 4), torch.randn(8, 1, 4), 4)
        assert choice.missed(torch.full((1, 1), -math.inf)).tolist() == [[1.0]]

    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("bits", [0, 4, 8])
    def test_what_is_no_number_may_have_been_all(self, number: float, bits: int) -> None:
        """A limit reads everything then."""
        keys = torch.randn(32, 1, 8, generator=torch.Generator().manual_seed(8))
        keys[5, 0, 3] = number
        choice = chosen(window(0, 4), torch.ones(1, 1, 8), keys, 8, bits)
        assert choice.missed(torch.zeros(1, 1)).tolist() == [[1.0]]


class TestChoices:
    keys = torch.randn(72, 2, 8, generator=torch.Generator().manual_seed(3))
    q = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(4))

    def kept(self, policy: Policy, layer: int = 0) -> list[int]:
        return chosen(policy, self.q, self.keys, 8, layer=layer).keep.nonzero()[:, 0].tolist()

    @pytest.mark.parametrize(
        "policy", [full, topk(9), topk(100), topk(0, dense_layers=1), window(72, 0), window(0, 72)]
    )
    def test_everything_is_full_and_misses_nothing(self, policy: Policy) -> None:
        """And is not even scored."""

        def never() -> Scores:
            raise AssertionError

        assert policy(0, Past(9, 8, 72, 74, never)) is None

    def test_dense_layers_end(self) -> None:
        assert len(self.kept(topk(3, dense_layers=2), layer=1)) == 9
        assert len(self.kept(topk(3, dense_layers=2), layer=2)) == 3

    def test_windows_keep_whole_blocks(self) -> None:
        assert self.kept(window(1, 1)) == [0, 8]
        assert self.kept(window(8, 8)) == [0, 8]
        assert self.kept(window(9, 9)) == [0, 1, 7, 8]
        assert self.kept(window(0, 0)) == []

    def test_slashes_keep_what_lies_before_any_query(self) -> None:
        """Queries at 72 and 73, in block 9: 3 blocks before are 6, 9 before are 0."""
        assert self.kept(vertical_slash(0, (3, 9, 20))) == [0, 6]
        assert set(self.kept(vertical_slash(2, (3,)))) == {6, *self.kept(topk(2))}

    @given(count=st.integers(0, 9))
    def test_more_blocks_miss_no_more(self, count: int) -> None:
        """The best n + 1 blocks hold the best n."""
        fewer, more = (chosen(topk(n), self.q, self.keys, 8) for n in (count, count + 1))
        assert not (fewer.keep & ~more.keep).any()
        assert (more.skipped <= fewer.skipped).all()

    def test_the_best_by_4_bits_are_nearly_the_best_there_are(self) -> None:
        """Of 32 blocks of 64 keys, 8 hold at most what the 8 best hold; boxes find fewer of these."""
        rng = torch.Generator().manual_seed(9)
        q, keys = torch.randn(1, 4, 64, generator=rng) * 0.36, torch.randn(2048, 2, 64, generator=rng)
        shares = exact_scores(q, keys).softmax(-1).view(1, 4, 32, 64).sum((0, 1, 3))
        best = shares.topk(8).values.sum()
        boxes, four = (shares[chosen(topk(8), q, keys, 64, bits).keep].sum() for bits in (0, 4))
        assert boxes < 0.97 * best
        assert four > 0.99 * best


class TestSketch:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("bits", "most"), [(0, 1 / 32), (4, 0.3), (8, 0.55)])
    def test_is_as_small_as_it_says(self, dtype: torch.dtype, bits: int, most: float) -> None:
        """Beside the keys, of blocks of 64 tokens, in bfloat16."""
        layout = SketchLayout(64, 2, 64, "bfloat16", bits)
        assert layout.bytes <= most * 64 * 2 * 64 * 2
        keys = torch.randn(128, 2, 64).to(dtype)
        found, layout = sketched(keys, 64, bits)
        assert found.shape == (2, layout.bytes)

    def test_of_any_number_of_queries_is_the_same(self) -> None:
        rng = torch.Generator().manual_seed(2)
        q, keys = torch.randn(21, 4, 8, generator=rng), torch.randn(64, 2, 8, generator=rng)
        together = scored(q, keys, 8, 4)
        for at in range(21):
            alone = scored(q[at : at + 1], keys, 8, 4)
            torch.testing.assert_close(alone.upper[0], together.upper[at])
            torch.testing.assert_close(alone.likely[0], together.likely[at])
