"""The kernels that draw tokens, interpreted on the CPU, against the steps one by one."""

import os
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if (
    os.environ.get("TRITON_INTERPRET") != "1"
):  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import triton
import triton.language as tl
from triton.runtime import interpreter

from penstock.ops.gumbel import gumbel
from penstock.ops.sampling import draw_reference
from penstock.ops.triton import sampling as triton_sampling
from penstock.ops.triton import threshold


@triton.jit  # type: ignore[untyped-decorator]
def _no_words(first, key, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """As if all tokens had the same."""
    return tl.zeros([SIZE], tl.uint32) + 7


@triton.jit
def _none(ids, key):  # type: ignore[no-untyped-def]
    return (ids * 0 + 7).to(tl.uint32)


NEAR = 1e-6
"""By how much sums of float32 exponentials may differ, of a whole."""


KEY = (0x8BADF00D, 0xFEEDFACE)


def asked(*rows: tuple[float, ...]) -> Tensor:
    """Of each draw: row, temperature, top-k, top-p, min-p, position."""
    table = torch.tensor([(*row[:5], *KEY, *row[5:]) for row in rows], dtype=torch.float64)
    return table.view(-1, 8)


def where(wins: int, among: list[int]) -> int:
    """The first position at which this token has the highest noise of these."""
    keys = torch.tensor([(*KEY, position) for position in range(3000)])
    best = gumbel(keys, max(among) + 1)[:, among].argmax(-1)
    return int((torch.tensor(among)[best] == wins).nonzero()[0, 0])


def drawn(
    logits: Tensor,
    wishes: Tensor,
    chunk: int = 64,
    group: int = 8,
    bins: int = 16,
    listed: int = 64,
    part: int = 32,
) -> list[int]:
    """One for each wish. Rows that nobody asked for stay as they are, and so do logits."""
    before, tokens = logits.clone(), torch.full((len(logits),), -7)
    with patch.multiple(triton_sampling, _CHUNK=chunk, _GROUP=group, _BINS=bins, _LISTED=listed, _PART=part):
        triton_sampling.draw(logits, wishes, tokens)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    rows = wishes[:, 0].long().tolist()
    assert all(token == -7 for row, token in enumerate(tokens.tolist()) if row not in rows)
    return [int(tokens[row]) for row in rows]


def possible(logits: Tensor, wish: Tensor) -> set[int]:
    """What the reference draws for this nucleus, or ones as good as equal to it.

    Noise and sums with it have the same bits in both, so the race is the same wherever what is left is.
    """
    found = set()
    for nucleus in (-NEAR, 0.0, NEAR):
        near = wish.clone()
        near[3] = near[3] + nucleus if near[3] < 1 else near[3]
        found.add(int(draw_reference(logits[int(wish[0])][None], near[None])[0]))
    return found


@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(1, 150),
    truncation=st.tuples(
        st.sampled_from([0, 0, 1, 2, 5, 40, 149, 1000, 2**62]),
        st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.05, 1e-9]),
        st.sampled_from([0.0, 0.0, 0.05, 0.9, 0.999]),
    ),
    heat=st.sampled_from([1.0, 0.3, 2.5, 1e-3, 1e3]),
    steps=st.sampled_from([None, None, 2.0, 0.5, 8.0]),
    scale=st.sampled_from([1.0, 10.0, 1e-4, 1e4]),
    listed=st.sampled_from([4, 64]),
)
@settings(max_examples=12, deadline=None)
def test_what_is_drawn(
    seed: int,
    vocab: int,
    truncation: tuple[int, float, float],
    heat: float,
    steps: float | None,
    scale: float,
    listed: int,
) -> None:
    """Draw what the reference draws, whatever the settings.

    truncation: top-k, top-p and min-p.
    steps: logits are rounded to steps of 1 / steps, so that many are equal.
    listed: size of the list, which may be too small.
    """
    (top_k, top_p, min_p), rng = truncation, torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab + 5, generator=rng)[:, :vocab] * scale
    if steps is not None:
        logits = (logits / scale * steps).round() / steps
    logits[torch.rand(3, vocab, generator=rng) < 0.2] = -torch.inf
    logits[:, seed % vocab] = 0.0
    if seed % 3 == 0:
        logits[:, 0] = -0.0
    positions = torch.randint(2**50, (2,), generator=rng).tolist()
    wishes = asked(
        (2, heat, top_k, top_p, min_p, positions[0]),
        (0, heat, top_k, 1.0 if seed % 2 else top_p, min_p, positions[1]),
    )
    for wish, token in zip(wishes, drawn(logits, wishes, listed=listed), strict=True):
        assert token in possible(logits, wish)


MIXED = ((0, 1.0, 0.0), (20, 0.95, 0.0), (0, 0.9, 0.1), (7, 1.0, 0.05), (100, 0.6, 0.0))
"""Of rows of a batch: top-k, top-p, min-p. One needs no threshold, two need both."""


def batch() -> tuple[Tensor, Tensor]:
    """Rounded logits, so that there are ties, and a wish for all but one of the rows, out of order."""
    rng = torch.Generator().manual_seed(5)
    logits = (torch.randn(6, 140, generator=rng) * 12).round() / 4
    positions = torch.randint(2**50, (5,), generator=rng).tolist()
    rows = zip((5, 0, 2, 1, 3), MIXED, positions, strict=True)
    return logits, asked(*((row, 0.5 + row / 4, *of, position) for row, of, position in rows))


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, wishes = batch()
    together = drawn(logits, wishes)
    assert together == [drawn(logits, wish[None])[0] for wish in wishes]
    assert together == draw_reference(logits[wishes[:, 0].long()], wishes).tolist()


def test_the_order_of_the_programs_changes_nothing() -> None:
    """Each may be the last of its row, and the first of a list."""
    logits, wishes = batch()
    builder = interpreter.interpreter_builder
    forwards = builder.set_grid_idx

    def backwards(x: int, y: int, z: int) -> None:
        forwards(builder.grid_dim[0] - 1 - x, builder.grid_dim[1] - 1 - y, z)

    before = drawn(logits, wishes[1:], bins=8)
    with patch.object(builder, "set_grid_idx", backwards):
        assert drawn(logits, wishes[1:], bins=8) == before


@pytest.mark.parametrize(
    "sizes", [(32, 4, 64, 64, 8), (256, 8, 4, 8, 64), (128, 64, 1, 256, 256), (64, 2, 1024, 1, 16)]
)
def test_sizes_change_nothing(sizes: tuple[int, int, int, int, int]) -> None:
    """Of chunks, groups, bins, lists and their parts: sums are the same however a row is cut."""
    logits, wishes = batch()
    assert drawn(logits, wishes, *sizes) == draw_reference(logits[wishes[:, 0].long()], wishes).tolist()


def test_a_vocabulary_of_several_chunks_of_full_size() -> None:
    """A peaked distribution, a broad one, and one in which all tokens are nearly as likely."""
    logits = torch.randn(3, 9001, generator=torch.Generator().manual_seed(1)) * 3
    chosen = [(0, 0.7, 20, 0.95, 0.0, 6), (1, 2.0, 0, 0.95, 0.0, 7), (2, 1e3, 0, 0.6, 0.0, 8)]
    found = torch.full((3,), -7)
    triton_sampling.draw(logits, asked(*chosen), found)
    for wish, token in zip(asked(*chosen), found.tolist(), strict=True):
        assert token in possible(logits, wish)


@pytest.mark.parametrize("listed", [16, 256])
@pytest.mark.parametrize("most", [1, 150])
def test_of_tokens_that_are_equally_likely_the_first_are_left(most: int, listed: int) -> None:
    """In chunks of the vocabulary, too: 200 of them, of which every other one is banned. The list may be too
    short for them. The last that is left wins where it has the highest noise, and the first that is not does
    not where it has."""
    logits = torch.full((6, 400), -torch.inf)
    logits[:, ::2] = 3.0
    left = list(range(0, 2 * most, 2))
    ends = (most, 1.0), (0, (most - 0.5) / 200), (most, 0.9999)
    last, beyond = where(left[-1], left), where(2 * most, [*left, 2 * most])
    wishes = asked(
        *((row, 1.0, *ends[row % 3], 0.0, last if row < 3 else beyond) for row in range(6)),
    )
    found = drawn(logits, wishes, chunk=128, listed=listed)
    assert found[:3] == [left[-1]] * 3
    keys = torch.tensor([(*KEY, beyond)])
    assert found[3:] == [left[int(gumbel(keys, 400)[0, left].argmax())]] * 3


def test_of_those_at_both_thresholds_top_p_leaves_no_more_than_top_k() -> None:
    """One token is likelier than the other 99; top-k takes nine of these, and top-p of all ten what it asks
    for."""
    logits = torch.zeros(8, 100)
    logits[:, 60] = 1.0
    few = list(range(9))
    positions = [where(8, few), where(9, [*few, 9]), where(4, few), where(2, few)] * 2
    wishes = asked(
        *(
            (row, 1.0, 10, (0.2, 0.5, 0.9, 0.9999)[(row + row // 4) % 4], 0.0, position)
            for row, position in enumerate(positions)
        )
    )
    found = drawn(logits, wishes)
    assert found == draw_reference(logits, wishes).tolist()
    assert len(set(found)) > 2


def test_top_p_goes_by_the_likelihood_of_all_tokens() -> None:
    """Also of those that cannot be near its threshold: 100 tokens, and 300 that have a tenth of their
    likelihood."""
    logits = torch.full((1, 400), 0.1).log()
    logits[0, ::4] = 0.0
    left = list(range(0, 4 * 66, 4))
    last, beyond = where(left[-1], left), where(4 * 66, [*left, 4 * 66])
    for position, wins in ((last, True), (beyond, False)):
        wish = asked((0, 1.0, 0, 0.503, 0.0, position))
        found = drawn(logits, wish, chunk=256)
        assert found == draw_reference(logits, wish).tolist()
        assert (found == [left[-1]]) == wins
        assert found != [4 * 66]


def test_min_p_is_not_rounded() -> None:
    """To float32, as likelihoods are."""
    likelihood = float(np.exp(np.float32(-1)))
    position = next(at for at in range(99) if float(gumbel(torch.tensor([(*KEY, at)]), 2).diff()) > 1)
    wishes = asked(
        (0, 1.0, 0, 1.0, likelihood, position), (1, 1.0, 0, 1.0, likelihood * (1 + 1e-9), position)
    )
    assert drawn(torch.tensor([[0.0, -1.0]]).repeat(2, 1), wishes) == [1, 0]


def test_impossible_tokens_are_drawn_nowhere() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf, 1.5, -torch.inf]]).repeat(12, 40)
    each = ((0, 1.0, 0.0), (100, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.5)) * 3
    wishes = asked(*((row, 1.0, *one, row) for row, one in enumerate(each)))
    found = drawn(logits, wishes, chunk=128)
    for row, (wish, token) in enumerate(zip(wishes, found, strict=True)):
        assert token in possible(logits, wish)
        assert logits[row, token] > -torch.inf
    assert len(set(found)) > 6


def test_the_best_is_found_in_whichever_chunk_it_is() -> None:
    """With and without a threshold, which it may be at."""
    logits = torch.zeros(8, 256)
    positions = [where(token, list(range(256))) for token in (3, 100, 190, 255)] * 2
    wishes = asked(*((row, 1.0, 200 * (row // 4), 1.0, 0.0, at) for row, at in enumerate(positions)))
    assert drawn(logits, wishes)[:7] == [3, 100, 190, 255, 3, 100, 190]
    assert drawn(logits, wishes) == draw_reference(logits, wishes).tolist()


def test_equal_sums_take_the_lower_token() -> None:
    """As if all had the same noise: in two chunks, at a threshold, and infinite."""
    logits = torch.zeros(4, 200)
    logits[:2, [90, 150]] = torch.inf
    wishes = asked(*((row, 1.0, 150 * (row % 2), 1.0, 0.0, row // 2) for row in range(4)))
    with (
        patch.object(triton_sampling, "run_words", _no_words),
        patch.object(threshold, "token_words", _none),
        np.errstate(invalid="ignore"),
    ):
        assert drawn(logits, wishes) == [90, 90, 0, 0]


def test_one_token_of_likelihood_among_many_that_have_none() -> None:
    logits = torch.full((5, 500), -1e30)
    logits[1:, 377] = 5.0
    settings_ = ((0, 1.0), (0, 0.5), (50, 0.5), (499, 1.0))
    wishes = asked(*((row, 0.7, *end, 0.0, row) for row, end in enumerate(settings_, 1)))
    assert drawn(logits, wishes, chunk=128) == [377] * 4


@pytest.mark.parametrize("heat", [1e-30, 1e-3, 1e30])
def test_extreme_temperatures(heat: float) -> None:
    """The likeliest token at one end, any at the other."""
    logits = torch.tensor([[1.0, 3.0, -2.0, 2.9999, -torch.inf, 0.0]]).repeat(3, 1)
    found = []
    for position in range(5):
        wishes = asked(
            *((row, heat, *of, 0.0, position) for row, of in enumerate(((0, 1.0), (3, 1.0), (0, 0.5))))
        )
        found += drawn(logits, wishes)
        assert found[-3:] == draw_reference(logits, wishes).tolist()
    assert (set(found) == {1}) == (heat < 1e-4)


def test_a_vocabulary_of_one_token() -> None:
    assert drawn(
        torch.tensor([[3.0], [-1e4]]), asked((1, 1.0, 5, 0.5, 0.1, 3), (0, 0.1, 0, 1.0, 0.0, 2**53 - 1))
    ) == [0, 0]


def test_nothing_is_asked() -> None:
    assert drawn(torch.zeros(3, 10), asked()) == []


def odd() -> tuple[Tensor, int]:
    """Rows of logits some of which are not numbers, or infinite. In so many of the first nothing can be
    drawn; the last is like any."""
    logits = torch.randn(14, 150, generator=torch.Generator().manual_seed(3)) * 3
    nan, inf = torch.nan, torch.inf
    logits[0], logits[1], logits[2], logits[3] = nan, -nan, -inf, -inf
    logits[3, 10:80] = nan
    logits[4, 70], logits[5, logits[5].argmax()] = nan, -nan
    logits[6, ::2], logits[6, 1::4] = nan, -inf
    logits[7], logits[7, 77] = -nan, -5.0
    logits[8, 64:128] = nan  # A chunk.
    logits[9], logits[9, [3, 100, 149]] = logits[4], inf
    logits[10, ::3], logits[10, 1::3], logits[10, [5, 140]] = -nan, -inf, inf
    logits[11], logits[12], logits[12, 77] = inf, nan, inf
    return logits, 4


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "listed"),
    [(0, 1.0, 0.0, 64), (5, 1.0, 0.1, 4), (0, 0.9, 0.0, 4), (5, 0.9, 0.0, 64), (120, 0.9, 0.05, 4)],
)
def test_what_is_not_a_number_is_impossible(top_k: int, top_p: float, min_p: float, listed: int) -> None:
    """And where there is nothing else, whatever is drawn is a token, and nothing is reached that is not the
    row's."""
    logits, nothing = odd()
    wishes = asked(*((row, 0.8, top_k, top_p, min_p, row) for row in range(len(logits))))
    with np.errstate(invalid="ignore"):
        found = drawn(logits, wishes, listed=listed)
    assert all(0 <= token < 150 for token in found)
    for wish, row, token in list(zip(wishes, logits, found, strict=True))[nothing:]:
        assert token in possible(logits, wish)
        assert row[token] > -torch.inf
        assert row[token] == torch.inf or not (row == torch.inf).any()
