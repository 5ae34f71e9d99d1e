"""Launches that a decode step of few tokens saves in a mixture, interpreted on the CPU: each says what the
kernels say that it stands for."""

import os
from unittest.mock import patch

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

from penstock.arch.spec import MoeSpec, Router, Scoring
from penstock.models.residual import Residual
from penstock.ops import experts
from penstock.ops.triton import experts as triton_experts
from penstock.ops.triton import routing as triton_routing
from penstock.ops.triton.experts import combine, combine_rms_norm
from penstock.ops.triton.linear import one_row
from penstock.ops.triton.pointwise import rms_norm
from penstock.ops.triton.router import add_norm_score
from penstock.ops.triton.routing import Routed, route

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16]
ROUTERS = [
    Router(),
    Router(normalise=True),
    Router(Scoring.SOFTMAX_OF_CHOSEN, scale=2.5),
    Router(Scoring.SIGMOID, normalise=True, correction=True),
    Router(Scoring.SIGMOID, correction=True, groups=4, top_groups=2),
]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_two_launches(*given: object) -> Routed:
    with patch.object(triton_routing, "FEW_TOKENS", 0):
        return route(*given)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 8),
    count=st.sampled_from([4, 12, 60, 128]),
    top_k=st.integers(1, 8),
    router=st.sampled_from(ROUTERS),
    spread=st.sampled_from([0, 1, 9]),
    nobody=st.none() | st.integers(1, 255),
    dtype=st.sampled_from(DTYPES),
)
def test_routed_at_once(
    tokens: int, count: int, top_k: int, router: Router, spread: int, nobody: int | None, dtype: torch.dtype
) -> None:
    """With many ties and few, all tokens alike, and tokens that are nobody's; what is not written is seen."""
    moe = MoeSpec(count, min(top_k, count // 2), 8, router)
    logits = ((random(tokens, count + 5, seed=spread) * spread).round()[:, 2:-3] / 2).to(dtype)
    correction = random(count, seed=1) if router.correction else None
    padding = None
    if nobody is not None:
        padding = torch.tensor([False, *(bool(nobody >> at & 1) for at in range(1, tokens))])
    given = logits, moe, correction, padding, 16
    with (
        patch.object(triton_routing, "_choose", None),
        patch.object(triton_routing, "_arrange", None),
        patch.object(torch, "empty", lambda *shape, **how: torch.full(shape, 77, **how)),
    ):
        found = route(*given)
    want = in_two_launches(*given)
    torch.testing.assert_close(found.shares, want.shares, rtol=4 * torch.finfo(dtype).eps, atol=1e-9)
    assert torch.equal(found.order, want.order)
    assert torch.equal(found.counts, want.counts)
    assert torch.equal(found.blocks[0], want.blocks[0])
    there = want.blocks[0] >= 0
    assert torch.equal(found.blocks[:, there], want.blocks[:, there])


@pytest.mark.parametrize(("tokens", "count", "rows"), [(9, 8, 16), (8, 200, 16), (5, 8, 4), (0, 8, 16)])
def test_others_are_routed_by_two_launches(tokens: int, count: int, rows: int) -> None:
    """Many tokens, many scores, and blocks that are too small for all pairs of an expert."""
    given = random(tokens, count, seed=0), MoeSpec(count, 4, 8), None, None, rows
    with patch.object(triton_routing, "_route_few", None):
        found = route(*given)
    want = in_two_launches(*given)
    assert torch.equal(found.order, want.order)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden", "top_k"), [(1, 1500, 4), (5, 48, 3), (3, 1024, 8), (0, 32, 2)])
def test_a_sum_of_experts_that_is_normalised_at_once(
    tokens: int, hidden: int, top_k: int, dtype: torch.dtype
) -> None:
    y, shares = (
        random(tokens * top_k, hidden, seed=0, dtype=dtype),
        random(tokens, top_k, seed=1, dtype=dtype),
    )
    residual, weight = random(tokens, hidden, seed=2, dtype=dtype), random(hidden, seed=3, dtype=dtype)
    stream = residual.clone()
    normed = combine_rms_norm(y, shares, stream, weight, EPS)
    want, total = rms_norm(combine(y, shares), weight, EPS, residual)
    assert torch.equal(stream, total)
    assert torch.equal(normed, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "hidden", "count"), [(1, 1500, 5), (8, 48, 12), (3, 2100, 3)])
def test_a_router_behind_its_norm(
    tokens: int, hidden: int, count: int, biased: bool, dtype: torch.dtype
) -> None:
    part, residual = random(tokens, hidden, seed=0, dtype=dtype), random(tokens, hidden, seed=1, dtype=dtype)
    weight, router = (
        random(hidden, seed=2, dtype=dtype),
        random(count, hidden + 8, seed=3, dtype=dtype)[:, 4:-4],
    )
    bias = random(count, seed=4, dtype=dtype) if biased else None
    before = part.clone(), residual.clone()
    total, normed, scores = add_norm_score(part, residual, weight, EPS, router, bias)
    assert torch.equal(part, before[0])
    assert torch.equal(residual, before[1])
    want, stream = rms_norm(part, weight, EPS, residual.clone())
    assert torch.equal(total, stream)
    assert torch.equal(normed, want)
    for row, mine in zip(scores, normed, strict=True):
        (one,) = one_row(mine[None], router, bias)
        torch.testing.assert_close(row, one, rtol=2e-5 if dtype == torch.float32 else 2e-2, atol=1e-4)


def test_a_token_has_the_same_logits_whoever_is_beside_it() -> None:
    given = random(8, 96, seed=0), random(8, 96, seed=1)
    weights = random(96, seed=2), EPS, random(7, 96, seed=3)
    every = add_norm_score(*given, *weights)
    alone = add_norm_score(given[0][5:6].clone(), given[1][5:6].clone(), *weights)
    assert all(torch.equal(one[5:6], other) for one, other in zip(every, alone, strict=True))


def test_experts_whose_sum_is_wanted_at_once() -> None:
    """A norm behind the experts, a factor, and no weight of the next norm."""
    x, weight = random(2, 16, seed=0), random(16, seed=1)
    outputs = experts.ExpertOutputs(triton_experts, random(6, 16, seed=2), random(2, 3, seed=3))
    total = outputs.total()
    for scale, after, before in ((0.5, None, weight), (1.0, None, None), (1.0, weight, weight)):
        given = [Residual(x.clone(), EPS, None) for _ in range(2)]
        with patch.object(triton_experts, "combine_rms_norm", None):
            given[0].add_experts(outputs, after, scale)
            normed = given[0].normed(before)
        given[1].add(total.clone(), after, scale)
        assert torch.equal(normed, given[1].normed(before))
        assert torch.equal(given[0].sum(), given[1].sum())
