"""Two models in one engine: each says what it says alone, in the same blocks of the same rows; and a target
says what it says alone when it verifies what a draft model proposes."""

import functools
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

import tiny
from pairs import DRAFT, GREEDY, SETTINGS, TARGET, near, opened, ranks_of, say_both, speculate
from penstock import LLM, SamplingParams
from penstock.base.errors import BudgetError, CheckpointError, ConfigError, PenstockError
from penstock.engine.boot import boot
from penstock.engine.placing import Override
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.writer import write_pack
from penstock.weights.streaming.residency import WeightLimits
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.runner import Runner

FEW = 24
QWEN, LLAMA = tiny.checkpoint("qwen3"), tiny.checkpoint("llama")
PAIRS = [("qwen3", "llama"), ("qwen2_windows", "llama_tied"), ("mixtral", "llama_biases")]


@functools.cache
def alone(name: str) -> list[list[int]]:
    """What a model says in an engine of its own."""
    with LLM(tiny.checkpoint(name), **SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=FEW, ignore_eos=True)
        found = [list(one.tokens) for one in llm.generate(tiny.prompts(), params)]
    assert found == [one.tokens[:FEW] for one in tiny.references(name)]
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_each_says_what_it_says_alone(target: str, draft: str, ahead: bool) -> None:
    with opened(tiny.checkpoint(target), tiny.checkpoint(draft)) as booted:
        found: list[int] = []
        for _ in range(2):
            said = say_both(booted, tiny.prompts(), FEW, ahead, found=found)
            assert said == {TARGET: alone(target), DRAFT: alone(draft)}
        count = len(tiny.prompts())
        assert not any(found[:count])
        assert sum(found[count:]) > 80, "the same prompts again: blocks that are found hold KV of both"


@pytest.mark.parametrize(
    ("target", "draft", "least", "most"),
    [("qwen3", "llama", 0.0, 0.3), ("llama", "llama", 1.0, 1.0), ("llama", "", 0.1, 0.95)],
    ids=["bad drafts", "the same model", "a good draft"],
)
def test_a_target_that_verifies_drafts_says_what_it_says_alone(
    target: str, draft: str, least: float, most: float
) -> None:
    path = tiny.checkpoint(draft) if draft else near(target, 0.1)
    with opened(tiny.checkpoint(target), path) as booted:
        spoken = speculate(booted, tiny.prompts(), FEW)
    assert spoken.outputs == alone(target)
    assert least <= spoken.held / spoken.proposed <= most


@pytest.mark.parametrize("length", [64, 128])
def test_a_draft_model_of_fewer_positions_is_warned_of(length: int, tmp_path: Path) -> None:
    """It is told once, at boot; outputs stay the target's."""
    short = tiny.write(tiny.CASES["llama"], tmp_path / "short", max_position_embeddings=64)
    said = list[str]()
    with opened(tiny.checkpoint("llama"), short, max_length=length, say=said.append) as booted:
        assert speculate(booted, tiny.prompts()[:2], FEW).outputs == alone("llama")[:2]
    warnings = [line for line in said if line.startswith("warning: the draft model was trained for 64 ")]
    assert len(warnings) == (length > 64)


def test_the_memory_of_all_ranks_is_told() -> None:
    """In a line for each: one of them has the biases of sums."""
    said = list[str]()
    with opened(tiny.checkpoint("llama_biases"), None, tensor_parallel=2, say=said.append) as booted:
        mine = str(booted.budget)
    first, second = (line for line in said if line.startswith("memory "))
    assert first == f"memory of rank 0 {mine}"
    assert second.startswith("memory of rank 1 ")
    assert second != f"memory of rank 1 {mine}"


@pytest.mark.parametrize("target", ["llama", "qwen3"])
def test_two_ranks_do_the_same(target: str) -> None:
    """Plans say on all of them which model they are for."""
    path = near(target, 0.1) if target == "llama" else LLAMA
    with opened(tiny.checkpoint(target), path, tensor_parallel=2) as booted:
        said = say_both(booted, tiny.prompts(), FEW)
        assert said[TARGET] == alone(target)
        if path == LLAMA:
            assert said[DRAFT] == alone("llama")
        assert speculate(booted, tiny.prompts(), FEW).outputs == alone(target)


def test_a_target_that_streams_and_packs(tmp_path: Path) -> None:
    """The target's weights stream, the draft's rest; either is a pack."""
    packs = []
    for name in ("qwen3", "llama"):
        with Checkpoint.open(tiny.checkpoint(name)) as checkpoint:
            write_pack(checkpoint, tmp_path / name, "float32")
        packs.append(tmp_path / name)
    with opened(QWEN, None) as booted:
        whole = booted.weights.bytes
    for target, draft in (packs, (QWEN, packs[1]), (packs[0], LLAMA)):
        some = Override(limits=WeightLimits(whole // 2, whole))
        with opened(target, draft, override=some) as booted:
            assert booted.weights.bytes < whole
            assert not booted.weights.placement.everything_resident
            assert say_both(booted, tiny.prompts(), FEW) == {TARGET: alone("qwen3"), DRAFT: alone("llama")}


# ---- what is drawn


def test_drafts_are_drawn_as_their_rows_ask_and_count_for_nothing() -> None:
    """With the same settings and numbers: two models that are the same say the same. What a draft says does
    not change what the target is penalised for."""
    choosy = replace(GREEDY, temperature=0.9, seed=5, top_p=0.9)
    with opened(LLAMA, LLAMA) as booted:
        said = say_both(booted, tiny.prompts(), FEW, settings=choosy)
        assert said[TARGET] == said[DRAFT] != alone("llama")
    params = SamplingParams(temperature=0, max_tokens=FEW, ignore_eos=True, frequency_penalty=1.5)
    with LLM(QWEN, **SETTINGS) as llm:
        wanted = [list(one.tokens) for one in llm.generate(tiny.prompts(), params)]
    assert wanted != alone("qwen3")
    with opened(QWEN, LLAMA) as booted:
        said = say_both(booted, tiny.prompts(), FEW, settings=replace(GREEDY, frequency_penalty=1.5))
        assert said[TARGET] == wanted


@pytest.mark.parametrize("more", [{}, {"kv_blocks": 24, "host_kv_memory": "2MiB"}], ids=["near", "far"])
def test_requests_are_answered_as_without_a_draft_model(more: dict[str, object]) -> None:
    """The scheduler asks nothing of it, and its KV does not leave the device."""
    params = SamplingParams(temperature=0, max_tokens=FEW, ignore_eos=True)
    with (
        Checkpoint.open(LLAMA) as draft,
        patch("penstock.api.opening.boot", partial(boot, draft=draft)),
        LLM(QWEN, **(SETTINGS | more)) as llm,
    ):
        for _ in range(2):
            found = [list(one.tokens) for one in llm.generate(tiny.prompts(), params)]
            assert found == alone("qwen3")
        models = ranks_of(llm.booted).models  # type: ignore[attr-defined]
        assert models[DRAFT].carrier is None
        assert (models[TARGET].carrier is not None) == bool(more)


# ---- memory


def refused(error: type[PenstockError], match: str, draft: Path, **more: object) -> None:
    with pytest.raises(error, match=match), opened(QWEN, draft, **more):
        pass


@pytest.mark.parametrize("kv_blocks", [None, 40])
def test_one_budget_holds_both(kv_blocks: int | None) -> None:
    with opened(QWEN, LLAMA, kv_blocks=kv_blocks) as booted:
        runner, budget = ranks_of(booted), booted.budget
        assert isinstance(runner, Runner)
        models = runner.models.values()
        assert budget.weights == sum(model.weights.bytes for model in models)  # type: ignore[union-attr]
        assert budget.kv == sum(model.pool.bytes.numel() for model in models)  # type: ignore[union-attr]
        assert {model.pool.blocks for model in models} == {budget.blocks}  # type: ignore[union-attr]
        assert booted.engine.scheduler._pools.pages.blocks == budget.blocks
        assert budget.weights + budget.activations + budget.kv <= budget.total
    with opened(QWEN, None, kv_blocks=kv_blocks) as booted:
        assert booted.budget.block_bytes < budget.block_bytes
        assert booted.budget.weights < budget.weights


def test_the_larger_step_of_the_two_is_what_steps_take() -> None:
    wide = tiny.folder() / "wide"
    if not wide.exists():
        tiny.write(tiny.CASES["llama"], wide, intermediate_size=4000)
    steps = []
    for target, draft in ((LLAMA, None), (wide, None), (wide, LLAMA), (LLAMA, wide)):
        with opened(target, draft) as booted:
            steps.append(booted.budget.activations)
    assert steps[0] < steps[1] == steps[2] == steps[3]


def test_what_does_not_fit_beside_a_draft_model_is_refused_and_says_so() -> None:
    with opened(QWEN, None) as booted:
        budget = booted.budget
    exact = f"{budget.weights + budget.activations + budget.kv}B"
    with opened(QWEN, None, device_memory=exact):
        pass
    refused(BudgetError, r"for the draft model; .*do without the draft model", LLAMA, device_memory=exact)


def test_other_tokens_are_refused() -> None:
    other = tiny.folder() / "other"
    if not other.exists():
        tiny.write(tiny.CASES["llama"], other, vocab_size=101)
    refused(ConfigError, r"101 tokens was asked for, but the model has 97", other)


def test_more_ranks_than_heads_of_the_draft_are_refused() -> None:
    narrow = tiny.folder() / "narrow"
    if not narrow.exists():
        tiny.write(tiny.CASES["llama"], narrow, num_attention_heads=2, num_key_value_heads=1)
    refused(ConfigError, "more than the draft model's 2 query heads", narrow, tensor_parallel=4)


def test_several_ranks_take_no_pack_as_a_draft(tmp_path: Path) -> None:
    with Checkpoint.open(LLAMA) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", "float32")
    refused(ConfigError, "is a pack", tmp_path / "pack", tensor_parallel=2)


# ---- the end


def test_both_end_with_the_engine_and_the_draft_model_first() -> None:
    closed, close = [], WeightStream.close

    def noted(self: WeightStream) -> None:
        closed.append(self)
        close(self)

    with patch.object(WeightStream, "close", noted), opened(QWEN, LLAMA) as booted:
        runner = ranks_of(booted)
        assert isinstance(runner, Runner)
        weights = [runner.models[role].weights for role in (DRAFT, TARGET)]
    assert closed == weights
    assert all(model.weights is model.pool is model.graphs is None for model in runner.models.values())


def test_a_draft_model_that_cannot_be_loaded_ends_the_boot_with_nothing_left() -> None:
    closed, close = [], WeightStream.close

    def noted(self: WeightStream) -> None:
        closed.append(self)
        close(self)

    def fail(self: WeightStream, loading: object = None) -> None:
        if len(loaded) == 1:
            raise CheckpointError("gone")
        loaded.append(self)
        load(self, loading)  # type: ignore[arg-type]

    loaded, load = list[WeightStream](), WeightStream.load
    with patch.object(WeightStream, "close", noted), patch.object(WeightStream, "load", fail):
        refused(CheckpointError, "gone", LLAMA)
    assert len(closed) == 2
    assert closed[1] is loaded[0]
