"""The kernel that draws tokens, interpreted on the CPU, against the steps one by one."""

import os
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip("kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True)

from penstock.ops import triton_sampling
from penstock.ops.sampling import draw_reference

NEAR = 1e-6
"""By how much sums of float32 exponentials may differ, of a whole."""


def asked(*rows: tuple[float, ...]) -> Tensor:
    """Of each draw: row, temperature, top-k, top-p, min-p, number."""
    return torch.tensor(rows, dtype=torch.float64).view(-1, 6)


def drawn(logits: Tensor, wishes: Tensor, block: int = 64) -> list[int]:
    """One for each wish. Rows that nobody asked for stay as they are, and so do logits."""
    before, tokens = logits.clone(), torch.full((len(logits),), -7)
    with patch.object(triton_sampling, "_BLOCK", block):
        triton_sampling.draw(logits, wishes, tokens)
    assert torch.equal(logits, before)
    rows = wishes[:, 0].long().tolist()
    assert all(token == -7 for row, token in enumerate(tokens.tolist()) if row not in rows)
    return [int(tokens[row]) for row in rows]


def possible(logits: Tensor, wish: Tensor) -> set[int]:
    """What the reference draws for this number and nucleus, or ones as good as equal to them."""
    found = set()
    for nucleus in (-NEAR, 0.0, NEAR):
        for number in (-NEAR, 0.0, NEAR):
            near = wish.clone()
            near[3] = near[3] + nucleus if near[3] < 1 else near[3]
            near[5] = (near[5] + number).clamp(0, 1 - 2.0**-52)
            found.add(int(draw_reference(logits[int(wish[0])][None], near[None])[0]))
    return found


@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(1, 150),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 149, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.05, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.9, 1.0]),
    heat=st.sampled_from([1.0, 0.3, 2.5, 1e-3]),
    steps=st.sampled_from([None, None, 2.0, 0.5, 8.0]),
    scale=st.sampled_from([1.0, 10.0, 1e-4, 1e4]),
)
@settings(max_examples=60, deadline=None)
def test_what_is_drawn(
    seed: int, vocab: int, top_k: int, top_p: float, min_p: float, heat: float, steps: float | None, scale: float
) -> None:
    """Whatever the settings. `steps`: logits are rounded, so that many are equal."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab + 5, generator=rng)[:, :vocab] * scale
    if steps is not None:
        logits = (logits / scale * steps).round() / steps
    logits[torch.rand(3, vocab, generator=rng) < 0.2] = -torch.inf
    logits[:, seed % vocab] = 0.0
    if seed % 3 == 0:
        logits[:, 0] = -0.0
    numbers = torch.rand(2, generator=rng, dtype=torch.float64).tolist()
    wishes = asked((2, heat, top_k, top_p, min_p, numbers[0]), (0, heat, top_k, top_p, min_p, numbers[1]))
    for wish, token in zip(wishes, drawn(logits, wishes), strict=True):
        assert token in possible(logits, wish)


@pytest.mark.parametrize("most", [1, 3, 65, 199])
def test_of_tokens_that_are_equally_likely_the_first_are_left(most: int) -> None:
    """In blocks of the vocabulary, too: 200 of them, of which every other one is banned."""
    logits = torch.full((1, 400), -torch.inf)
    logits[0, ::2] = 3.0
    for top_k, top_p in ((most, 1.0), (0, (most - 0.5) / 200), (most, 0.9999)):
        for nth in {0, most // 2, most - 1}:
            assert drawn(logits, asked((0, 1.0, top_k, top_p, 0.0, (nth + 0.5) / most)), block=128) == [2 * nth]


def test_the_first_and_the_last_number_there_is() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf, 1.5, -torch.inf]]).repeat(1, 40)
    for settings_ in ((0, 1.0, 0.0), (100, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.5)):
        ends = [drawn(logits, asked((0, 1.0, *settings_, number)))[0] for number in (0.0, 1 - 2.0**-52)]
        for number, token in zip((0.0, 1 - 2.0**-52), ends, strict=True):
            assert token in possible(logits, asked((0, 1.0, *settings_, number))[0])
        assert ends[0] < 6
        assert logits[0, ends[1]] > -torch.inf


def test_one_token_of_likelihood_among_many_that_have_none() -> None:
    logits = torch.full((2, 1000), -1e30)
    logits[1, 777] = 5.0
    for top_k, top_p in ((0, 1.0), (0, 0.5), (50, 0.5), (999, 1.0)):
        assert drawn(logits, asked((1, 0.7, top_k, top_p, 0.0, 0.999)), block=128) == [777]


def test_nothing_is_asked() -> None:
    assert drawn(torch.zeros(3, 10), asked()) == []
