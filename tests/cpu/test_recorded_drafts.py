"""Drafts that are lines are verified by recorded decode steps: computed here as a graph would replay them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import tiny
from cpu.test_ahead_hostile import played
from cpu.test_graphs import spec_of
from cpu.test_run_ahead import alike
from cpu.test_speculation import SETTINGS, always, answers, truth_of, wanted
from drafters import Adversary
from pairs import near
from penstock import LLM, Completion
from penstock.ops.runs import suits_rows
from penstock.step.plan import MOST_DRAFTED, Admission, ModelRole, Plan, Row, Share, ShareKind
from penstock.worker.graphs import DecodeGraphs
from penstock.worker.runner import Runner
from penstock.worker.sampler import Sampler
from penstock.worker.sizes import StepSizes, row_counts
from worlds import sampling


@contextmanager
def replayed() -> Iterator[dict[str, int]]:
    """How many steps with drafts are replayed meanwhile, and how many drafts the largest of them has."""
    counts, run = {"steps": 0, "drafts": 0, "beside": 0}, DecodeGraphs.run

    def noted(self: DecodeGraphs, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        drafts = [share for share in plan.shares if share.kind is ShareKind.VERIFY]
        counts["steps"] += bool(drafts)
        counts["drafts"] = max(counts["drafts"], len(drafts))
        counts["beside"] += bool(drafts) and len(drafts) < len(plan.shares)
        return run(self, plan)

    with (
        patch.object(Runner, "ahead", True),
        patch.object(DecodeGraphs, "record", played),
        patch.object(DecodeGraphs, "run", noted),
    ):
        yield counts


def recorded(speculate: str, **more: object) -> list[Completion]:
    """Answers of an engine whose decode steps are recorded, for as many rows as its plan says."""
    asked = wanted()
    with LLM(tiny.checkpoint("llama"), **(SETTINGS | more), speculate=speculate) as llm:
        runner, limits = llm.booted.engine._ranks, llm.booted.limits
        assert isinstance(runner, Runner)
        sizes = StepSizes(
            limits.max_step_tokens, limits.max_sequences, limits.max_length, limits.block_size, MOST_DRAFTED
        )
        for role, model in runner.models.items():
            rows = sizes.rows(llm.booted.spec) if role is ModelRole.TARGET else limits.max_sequences
            assert model.weights is not None
            runner.record(rows, 0, limits.max_length, record_runs=False, role=role)
        return llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])


@pytest.mark.parametrize(
    "more",
    [{}, {"max_sequences": 1}, {"kv_blocks": 24, "max_sequences": 6}, {"max_sequences": 3, "block_size": 2}],
    ids=["many", "alone", "preempted", "small pages"],
)
def test_no_token_is_another_whatever_is_drafted(more: dict[str, object]) -> None:
    plain = answers("llama", wanted())
    for restless, kinds in ((None, "tbedgn"), (1, "tg")):
        drafter = Adversary(truth_of(plain), tiny.VOCAB, ends=[3, 0, 1, 2], kinds=kinds, seed=len(kinds))
        with always(drafter, restless), replayed() as counts:
            found = recorded("suffix", **more)
        alike(found, plain, 1e-4)
        assert counts["steps"] > (2 if restless else 6)
        if more.get("max_sequences") != 1 and not restless:
            assert counts["drafts"] > 1
            assert counts["beside"]
        assert sum(one.accepted_tokens for one in found) > 20


def test_a_draft_model_changes_no_token() -> None:
    plain = answers("llama", wanted())
    with always(Adversary({}, tiny.VOCAB, kinds="n"), 1), replayed() as counts:
        found = recorded(str(near("llama", 0.05)), max_sequences=4)
    alike(found, plain, 1e-4)
    assert counts["steps"] > 10
    assert sum(one.accepted_tokens for one in found) > 20


def test_steps_are_recorded_for_drafts_of_a_few_requests() -> None:
    """Also where there is one sequence at a time, but not beyond a step's tokens, nor of a mixture."""
    llama, mixture = spec_of("llama"), spec_of("qwen3_moe")
    for sizes, rows in (((512, 1), 33), ((512, 2), 64), ((512, 96), 96), ((8, 4), 8), ((16, 16), 16)):
        assert StepSizes(*sizes, 80, 16, MOST_DRAFTED).rows(llama) == rows
        assert StepSizes(*sizes, 80, 16).rows(llama) == sizes[1]
        assert StepSizes(*sizes, 80, 16, MOST_DRAFTED).rows(mixture) == sizes[1]
    assert row_counts(33)[0] == 33


def test_the_newest_token_of_a_row_is_the_last_that_was_accepted() -> None:
    """Where the likeliest tokens are known already, too."""
    sampler = Sampler(9, 3, torch.device("cpu"))
    for row in range(3):
        sampler.admit(Admission(Row(row), sampling(), (0,), ()))
    one = Share(Row(2), 5, (4,), 0, (), True, 3)
    some = [
        replace(one, row=Row(row), tokens=(4, *draft), kind=ShareKind.VERIFY)
        for row, draft in ((0, (5, 6)), (1, (7,)))
    ]
    drawn = sampler.choose(torch.zeros(6, 9), torch.tensor([3, 5, 1, 8, 2, 0]), [one, *some])
    assert drawn.read()[0] == [3, 5, 1, 8, 2, 0]
    assert sampler.newest.tolist() == [1, 2, 3, 0]


def test_what_would_read_its_past_too_often_is_not_computed_by_rows() -> None:
    assert suits_rows(17, 3000)
    assert not suits_rows(17, 30000)
    assert suits_rows(2, 30000)
