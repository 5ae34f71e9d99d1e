"""Routers: plain torch against transformers, and kernels against plain torch."""

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

import tiny
from members import Rank, pass_of, steps
from penstock.api.llm import LLM
from penstock.arch.layout import GroupId, GroupKind, group_layouts
from penstock.arch.spec import MoeSpec, Router, Scoring
from penstock.base.errors import CheckpointError
from penstock.models import decoder
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.route import route
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.streaming.stream import WeightStream

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are interpreted where there is no GPU"
)
TOKENS, HIDDEN = 40, 24
SIGMOID = Router(Scoring.SIGMOID, normalise=True, correction=True)
GROUPS = Router(Scoring.SIGMOID, normalise=True, correction=True, groups=4, top_groups=2, scale=2.5)


def glm(moe: MoeSpec, weight: Tensor, correction: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    router = moe.router
    made = Glm4MoeTopkRouter(
        SimpleNamespace(
            num_experts_per_tok=moe.top_k,
            num_local_experts=moe.experts,
            hidden_size=HIDDEN,
            routed_scaling_factor=router.scale,
            n_group=router.groups,
            topk_group=router.top_groups,
            norm_topk_prob=router.normalise,
        )
    )
    made.weight.data, made.e_score_correction_bias = weight, correction
    return made


def minimax(moe: MoeSpec, weight: Tensor, correction: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    made = MiniMaxM2TopKRouter(
        SimpleNamespace(num_experts_per_tok=moe.top_k, num_local_experts=moe.experts, hidden_size=HIDDEN)
    )
    made.weight.data = weight
    return lambda x: made(x, correction)


def qwen(moe: MoeSpec, weight: Tensor, correction: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    made = Qwen2MoeTopKRouter(
        SimpleNamespace(
            num_experts_per_tok=moe.top_k,
            num_experts=moe.experts,
            hidden_size=HIDDEN,
            norm_topk_prob=moe.router.normalise,
        )
    )
    made.weight.data = weight
    return made


def mixtral(moe: MoeSpec, weight: Tensor, correction: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    made = MixtralTopKRouter(
        SimpleNamespace(
            num_experts_per_tok=moe.top_k,
            num_local_experts=moe.experts,
            hidden_size=HIDDEN,
            router_jitter_noise=0,
        )
    )
    made.weight.data = weight
    return made


def given(experts: int, *, equal: bool = False) -> tuple[Tensor, Tensor]:
    """Return a weight and a correction. equal: rows that repeat, so that scores are equal."""
    rng = torch.Generator().manual_seed(experts)
    weight = torch.randn(experts, HIDDEN, generator=rng) / 4
    correction = torch.randn(experts, generator=rng) / 8
    if equal:
        weight, correction = weight[torch.arange(experts) // 3], torch.zeros(experts)
    return weight, correction


@pytest.mark.parametrize("equal", [False, True], ids=["distinct", "equal"])
@pytest.mark.parametrize(
    ("oracle", "moe"),
    [
        (glm, MoeSpec(16, 4, 1, SIGMOID)),
        (glm, MoeSpec(24, 5, 1, GROUPS)),
        (glm, MoeSpec(128, 8, 1, Router(Scoring.SIGMOID, correction=True, groups=8, top_groups=3))),
        (glm, MoeSpec(256, 8, 1, GROUPS)),
        (minimax, MoeSpec(32, 3, 1, SIGMOID)),
        (qwen, MoeSpec(60, 4, 1, Router())),
        (qwen, MoeSpec(60, 4, 1, Router(normalise=True))),
        (mixtral, MoeSpec(8, 2, 1, Router(normalise=True))),
    ],
)
def test_as_transformers_do(
    oracle: Callable[[MoeSpec, Tensor, Tensor], Callable[[Tensor], tuple[Tensor, ...]]],
    moe: MoeSpec,
    equal: bool,
) -> None:
    weight, correction = given(moe.experts, equal=equal)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    logits, shares, chosen = oracle(moe, weight, correction)(x)
    found, mine = route(logits, moe, correction if moe.router.correction else None)
    by_expert = torch.zeros(2, TOKENS, moe.experts)
    by_expert[0].scatter_(1, chosen, shares)
    by_expert[1].scatter_(1, mine, found)
    assert torch.equal(chosen.sort(-1).values, mine.sort(-1).values)
    torch.testing.assert_close(by_expert[1], by_expert[0], rtol=1e-6, atol=0)


def test_a_softmax_over_the_chosen_is_that_of_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    made = GptOssTopKRouter(SimpleNamespace(num_experts_per_tok=4, num_local_experts=32, hidden_size=HIDDEN))
    made.weight.data, _ = given(32)
    made.bias.data = torch.linspace(-1, 1, 32)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    logits, shares, chosen = made(x)
    found, mine = route(logits, MoeSpec(32, 4, 1, Router(Scoring.SOFTMAX_OF_CHOSEN, bias=True)))
    assert torch.equal(mine, chosen)
    torch.testing.assert_close(found, shares, rtol=1e-6, atol=0)


def test_scores_that_are_all_nothing_are_shared_as_nothing() -> None:
    shares, _ = route(torch.full((1, 8), -1e4), MoeSpec(8, 2, 1, SIGMOID), torch.zeros(8))
    assert shares.tolist() == [[0.0, 0.0]]


ROUTERS = {
    "softmax": Router(),
    "softmax, normalised and scaled": Router(normalise=True, scale=0.5),
    "softmax, corrected": Router(correction=True),
    "softmax, groups": Router(normalise=True, groups=3, top_groups=1),
    "softmax of the chosen": Router(Scoring.SOFTMAX_OF_CHOSEN),
    "sigmoid": Router(Scoring.SIGMOID),
    "sigmoid, normalised": Router(Scoring.SIGMOID, normalise=True),
    "sigmoid, corrected": SIGMOID,
    "sigmoid, corrected, groups": Router(
        Scoring.SIGMOID, normalise=True, correction=True, groups=3, top_groups=2, scale=2.5
    ),
    "sigmoid, groups, all of them": Router(Scoring.SIGMOID, groups=3, top_groups=3),
}


@interpreted
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 12, 3), (9, 60, 8), (300, 24, 5), (0, 12, 2)])
def test_kernels_route_as_plain_torch_does(router: Router, tokens: int, experts: int, top_k: int) -> None:
    """Rows stand apart; some logits are equal, of which the lower expert wins."""
    from penstock.ops.experts import lower_first
    from penstock.ops.triton.routing import choose

    moe = MoeSpec(experts, min(top_k, experts // router.groups * router.top_groups), 1, router)
    rng = torch.Generator().manual_seed(tokens + experts)
    logits = (torch.randn(tokens, experts + 5, generator=rng) * 8).round()[:, 2:-3] / 4
    # Corrections on a grid keep equal scores equal and others apart.
    correction = (torch.randn(experts, generator=rng) * 4).round() / 8 if router.correction else None
    shares, chosen = choose(logits, moe, correction)
    want, best = route(logits, moe, correction, lower_first)
    assert torch.equal(chosen.long(), best)
    torch.testing.assert_close(shares, want, rtol=3e-6, atol=1e-9)


@interpreted
def test_kernels_choose_by_a_score_that_no_logit_spoils() -> None:
    """Scores of 0 and 1 exactly, NaN, and infinities: experts exist and differ, and nothing warns."""
    from penstock.ops.triton.routing import choose

    rows = [[-1e4] * 6, [1e4] * 6, [float("inf"), -float("inf"), 0.0, 1.0, 2.0, 3.0], [float("nan")] * 6]
    with np.errstate(invalid="ignore"):
        shares, chosen = choose(torch.tensor(rows), MoeSpec(6, 3, 1, SIGMOID), torch.zeros(6))
    assert chosen[:3].tolist() == [[0, 1, 2], [0, 1, 2], [0, 5, 4]]
    assert shares[0].tolist() == [0.0] * 3
    assert all(len(set(row)) == 3 and set(row) <= set(range(6)) for row in chosen.tolist())


class Poisoned:
    """Lends copies of groups, which hold NaN from their release on."""

    def __init__(self, weights: WeightStream) -> None:
        self._weights, self._lent = weights, dict[GroupId, list[Tensor]]()
        self.experts = weights.experts

    def take(self, group: GroupId) -> GroupViews:
        views = self._weights.take(group)
        vectors = {name: vector.clone() for name, vector in views.vectors.items()}
        matrices = {name: Matrix.of(matrix.tensor.clone()) for name, matrix in views.matrices.items()}
        self._lent[group] = [*vectors.values(), *(matrix.tensor for matrix in matrices.values())]
        return GroupViews(matrices, vectors, views.addresses)

    def release(self, group: GroupId) -> None:
        self._weights.release(group)
        for tensor in self._lent.pop(group):
            tensor.fill_(torch.nan)

    def turn(self, rows: int) -> bool:
        return self._weights.turn(rows)

    def end_pass(self) -> None:
        self._weights.end_pass()


@pytest.mark.parametrize("name", ["qwen2_moe", "glm4_moe", "minimax_m2"])
def test_nothing_of_a_group_is_read_after_its_release(name: str) -> None:
    with Checkpoint.open(tiny.checkpoint(name)) as model:
        rank = Rank(model)
        with closing(rank.weights):
            rank.load()
            want = rank.run(steps())
            rank.weights = Poisoned(rank.weights)  # type: ignore[assignment]
            assert all(map(torch.equal, rank.run(steps()), want))


@pytest.mark.parametrize("name", ["glm4_moe", "minimax_m2"])
def test_what_decides_the_choice_is_float32_whatever_the_model_is(name: str) -> None:
    """The router's matrix and its correction are not rounded; all else of its group is."""
    with Checkpoint.open(tiny.checkpoint(name)) as model:
        layouts = group_layouts(model.spec, model.names, "bfloat16")
        group = next(one for one in layouts if one.id.kind is GroupKind.ROUTER)
        dtypes = {field.name: field.dtype for field in group.fields}
        assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {"router", "correction"}
        assert set(dtypes.values()) == {"float32", "bfloat16"}
    seen = list[torch.dtype]()
    choose = decoder.choose

    def noting(x: Tensor, logits: Tensor, *rest: Any) -> object:
        seen.append(logits.dtype)
        return choose(x, logits, *rest)

    with patch.object(decoder, "choose", noting):
        pass_of(tiny.checkpoint(name), 0, dtype="bfloat16")
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["glm4_moe", "minimax_m2"])
def test_corrections_that_are_no_numbers_are_refused(name: str, wrong: float, tmp_path: Path) -> None:
    """Others would be chosen in silence: shares come of scores without them."""
    path = shutil.copytree(tiny.checkpoint(name), tmp_path / "model")
    [file] = [
        (file, key)
        for file in path.glob("*.safetensors")
        for key in load_file(file)
        if key.endswith("e_score_correction_bias")
    ][-1:]
    tensors = load_file(file[0])
    tensors[file[1]][3] = wrong
    save_file(tensors, file[0], {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"e_score_correction_bias.*not finite"):
        LLM(path, device="cpu", dtype="float32", cache=tmp_path, max_length=64)
    tensors[file[1]][3] = -2.0
    save_file(tensors, file[0], {"format": "pt"})
    LLM(path, device="cpu", dtype="float32", cache=tmp_path, max_length=64).close()
