"""State of constant size: a hybrid of attention and a gated recurrence, against float64, however its steps
are cut, whoever had a row before, and wherever KV and weights are."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch

import exact
import tiny
import toys
from exact import BLOCK, SETTINGS, confirms, drawn, host, outputs, prompts
from members import pass_of
from penstock.api.llm import LLM
from penstock.arch import bounds
from penstock.arch.layout import group_layouts, kv_layout, state_layout
from penstock.arch.shards import Shard
from penstock.arch.spec import ModelSpec
from penstock.base.errors import BudgetError, ConfigError, StepMemoryError, UnsupportedModelError
from penstock.cli.main import main
from penstock.engine.budget import Demand, divide, weights_room
from penstock.engine.draft import check_draft
from penstock.kv.movement.sizes import record_bytes
from penstock.server.monitoring.state import TierPart, _on_device
from penstock.step.params import SamplingParams
from penstock.step.plan import BlockId, Plan, Row, Share, ShareKind
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.streaming.residency import padded
from penstock.worker.runner import Runner
from penstock.worker.sizes import run_counts

LONG = {"kv_blocks": 6, "max_step_tokens": 24, "kv_tile": 32}


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with toys.hybrid_known():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.hybrid_checkpoint(tmp_path_factory.mktemp("hybrid") / "model")


def spec_of(path: Path) -> ModelSpec:
    with Checkpoint.open(path) as checkpoint:
        return checkpoint.spec


@pytest.mark.parametrize("tokens", [4, 7, 24, 512])
def test_however_prompts_are_cut(model: Path, tokens: int) -> None:
    """Several sequences beside each other: chunks, and tokens that are decoded."""
    assert confirms(model, outputs(model, max_step_tokens=tokens, max_sequences=4))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_row_that_another_had(model: Path, rows: int) -> None:
    with LLM(model, **SETTINGS | {"max_sequences": rows}) as llm:  # type: ignore[arg-type]
        assert confirms(model, drawn(llm))
        assert confirms(model, drawn(llm))


def test_who_was_preempted_begins_anew(model: Path) -> None:
    few = {"kv_blocks": 25, "max_sequences": 3, "max_step_tokens": 64}
    params = replace(exact.GREEDY, max_tokens=70)
    with LLM(model, **SETTINGS | few) as llm:  # type: ignore[arg-type]
        found = drawn(llm, params)
        assert llm.stats().preemptions > 0
    assert confirms(model, found)


@pytest.mark.parametrize("ahead", [False, True])
def test_many_requests_of_which_some_are_stopped(model: Path, ahead: bool) -> None:
    """Rows change hands, blocks run short, and steps run ahead of each other."""
    rng = Random(4)
    asked = [[rng.randrange(3, 90) for _ in range(rng.choice((1, 2, 9, 30, 70)))] for _ in range(24)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(model, **SETTINGS) as llm:  # type: ignore[arg-type]
        alone = [list(llm.generate([one], params)[0].tokens) for one in asked]
    few = {"max_sequences": 4, "max_step_tokens": 20, "kv_blocks": 14, "max_length": 90}
    with (
        patch.object(Runner, "ahead", ahead),
        LLM(model, **SETTINGS | few) as llm,  # type: ignore[arg-type]
    ):
        streams = [llm.stream(one, params) for one in asked]
        found: list[list[int]] = [[] for _ in asked]
        going = set(range(len(asked)))
        while going:
            at = rng.choice(sorted(going))
            if at % 4 == 3 and len(found[at]) > at % 5:
                streams[at].close()
                going.remove(at)
                continue
            delta = next(streams[at], None)
            if delta is None:
                going.remove(at)
            else:
                found[at] += delta.tokens
        assert llm.stats().preemptions > 0
    for at, (tokens, expected) in enumerate(zip(found, alone, strict=True)):
        assert tokens == (expected[: len(tokens)] if at % 4 == 3 else expected)


def test_steps_that_were_too_large(model: Path) -> None:
    """All begin anew, each in its turn, and perhaps in another row."""
    compute, calls = Runner._compute, count()

    def short(self: Runner, *arguments: Any) -> Any:
        found = compute(self, *arguments)
        if next(calls) in (2, 9, 10):
            raise StepMemoryError("too little memory")
        return found

    with (
        LLM(model, **SETTINGS | {"max_sequences": 3, "max_step_tokens": 24}) as llm,  # type: ignore[arg-type]
        patch.object(Runner, "_compute", short),
    ):
        assert confirms(model, drawn(llm))
        assert next(calls) > 11


def test_who_was_stopped_leaves_nothing(model: Path) -> None:
    with LLM(model, **SETTINGS | {"max_sequences": 1, "max_step_tokens": 16}) as llm:  # type: ignore[arg-type]
        engine, sampling = llm.booted.engine, exact.GREEDY
        for steps in (1, 3, 9):
            request = llm.stream(prompts()[1], sampling)
            for _ in range(steps):
                engine.step()
            request.close()
            assert not engine.scheduler.busy
            assert confirms(model, drawn(llm))


def test_two_ranks(model: Path) -> None:
    """In processes of their own, each with its heads' state, and with KV on the host."""
    long = LONG | {"host_kv_memory": 2 * host(model, 60)}
    assert confirms(model, outputs(model, tensor_parallel=2, max_sequences=2, **long))


def test_ranks_and_weights_that_stream(model: Path) -> None:
    alone = pass_of(model, 0)
    for one, other in zip(pass_of(model, 0, part=0.5), alone, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(pass_of(model, 2), alone, strict=True):
        assert tiny.distance(one, other) < 1e-5


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_contexts_longer_than_the_device(model: Path, dtype: str) -> None:
    """Only layers that keep KV have any elsewhere."""
    long = LONG | {"host_kv_memory": host(model, 60)}
    with LLM(model, **SETTINGS | long | {"host_kv_dtype": dtype}) as llm:  # type: ignore[arg-type]
        found = drawn(llm)
        stats = llm.booted.engine.kv_stats()
    assert stats is not None
    assert stats.sent > 0
    assert confirms(model, found) == (dtype == "auto")
    assert [len(tokens) for tokens, _ in found] == [8, 8, 8]


def test_contexts_on_disk(model: Path, tmp_path: Path) -> None:
    layout = kv_layout(spec_of(model), "float32", BLOCK)
    disk = 40 * layout.layers * record_bytes(layout)
    long = LONG | {"host_kv_memory": host(model, 4), "disk_kv_memory": disk, "kv_directory": tmp_path}
    assert confirms(model, outputs(model, **long))


def test_prefixes_are_not_shared(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """KV of a prefix says nothing of the state behind it: it is neither found nor kept, and the log says
    why."""
    kept = {
        "host_kv_memory": "8MiB",
        "disk_kv_memory": "32MiB",
        "kv_directory": tmp_path / "kv",
        "block_size": 16,
    }
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        with LLM(model, **SETTINGS | kept) as llm:  # type: ignore[arg-type]
            both = [llm.generate(prompts(), params) for _ in range(2)]
            assert not llm.limits.prefix_cache
            tiers = llm.booted.engine.tier_stats()
        assert [one.tokens for one in both[1]] == [one.tokens for one in both[0]]
        assert {(one.cached_tokens, one.cached_disk) for part in both for one in part} == {(0, 0)}
        assert tiers is None or tiers.down.bytes == tiers.outward.bytes == 0
    assert "prefixes are not shared, since a layer keeps state of a sequence" in caplog.text


def test_what_a_plan_says(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of(model)
    matrices, tail = 4 * spec.heads * spec.head_dim * 20, 4 * 2 * spec.heads * 20
    row = 2 * sum(-(-size // 256) * 256 for size in (matrices, tail))
    layout = state_layout(spec, "float32")
    assert layout.row_bytes == row
    assert layout.bytes(4) == 5 * row
    halves = [state_layout(spec, "float32", Shard(rank, 2)).row_bytes for rank in range(2)]
    assert row <= sum(halves) <= row + 4 * 256
    with LLM(model, **SETTINGS | {"max_sequences": 4}) as llm:  # type: ignore[arg-type]
        budget = llm.booted.budget
        assert budget.state == 5 * row
        assert "state of sequences" in str(budget)
        shown = _on_device(llm.stats(), llm.memory)
        assert TierPart("recurrent", 5 * row) in shown.parts
    kept = kv_layout(spec, "float32", BLOCK)
    assert [size > 0 for size in kept.layer_sizes] == [False, True, False]
    assert main(["plan", str(model), "--machine", "cpu", "--dtype", "float32", "--context", "64"]) == 0
    shown = capsys.readouterr().out
    assert "Prefixes are not shared, since a layer keeps state of a sequence" in shown
    assert " state " in shown
    assert bounds.state_bytes_moved(spec, "float32", 0) == 2 * (matrices + tail)
    assert bounds.state_bytes_moved(spec, "float32", 1) == 0
    assert run_counts(spec, 512) == ()


def test_state_has_its_part_of_the_memory(model: Path) -> None:
    """It is taken from weights and KV, and nothing runs without room for it."""
    with Checkpoint.open(model) as checkpoint:
        layouts = group_layouts(checkpoint.spec, checkpoint.names, "float32")
    weights = sum(map(padded, layouts))
    demand = Demand(activations=100, block_bytes=10, block_size=8, useful_blocks=50, length=8, state=60)
    assert divide(300, 100, demand).blocks == 4
    with pytest.raises(BudgetError, match="the largest step and the state of sequences 160 B"):
        divide(269, 100, demand)
    assert weights_room(weights + 170, layouts, demand, host_is_device=False) == weights
    assert weights_room(weights + 169, layouts, demand, host_is_device=False) < weights


def test_what_is_refused(model: Path) -> None:
    spec = spec_of(model)
    with pytest.raises(UnsupportedModelError, match="no layer of hybrid keeps KV"):
        kv_layout(replace(spec, stack=spec.stack[:1]), "float32", BLOCK)
    chosen = LONG | {"host_kv_memory": host(model, 60), "attention_policy": "topk:4"}
    with pytest.raises(ConfigError, match="layers do not all keep the same KV"):
        outputs(model, **chosen)
    draft = Share(Row(0), 4, (1, 2), 0, (BlockId(0),), True, 4, ShareKind.VERIFY)
    with pytest.raises(AssertionError, match="could not be taken back"):
        pass_of(model, 0, plans=[Plan((), (draft,))])


def test_no_drafts_beside_state(model: Path) -> None:
    with Checkpoint.open(model) as checkpoint, Checkpoint.open(tiny.checkpoint("llama")) as plain:
        for target, draft in ((checkpoint.spec, plain.spec), (plain.spec, checkpoint.spec)):
            with pytest.raises(ConfigError, match="cannot forget"):
                check_draft(target, replace(draft, vocab_size=target.vocab_size))
