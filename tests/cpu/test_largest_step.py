"""The step that boot measures is as large as any that the scheduler may plan, and a mixture takes no more,
whatever its routing."""

import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pages import STATM, private_pages
from penstock.base.config import Config
from penstock.base.errors import BudgetError
from penstock.engine.boot import boot
from penstock.engine.budget import Budget
from penstock.step.params import Sampling
from penstock.weights.checkpoint.shape import Shape
from penstock.worker.sizes import StepSizes
from penstock.worker.warmup import largest_step

ROOT = Path(__file__).resolve().parents[2]
MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "dtype": "float32",
}


def budget(**changes: object) -> Budget:
    """What a boot has decided, and closed again."""
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "device_memory": "64MiB",
        "max_step_tokens": 96,
        "max_sequences": 4,
        "kv_blocks": 4,
    }
    booted = boot(Config(Path(), **(settings | changes)), Shape.of(MIXTURE))  # type: ignore[arg-type]
    booted.engine.close()
    return booted.budget


def test_the_same_memory_always_boots_or_never() -> None:
    """Whatever this process has allocated and freed before: as much as the first boot counted is enough for
    any, and less for none."""
    far = {"max_length": 1024, "host_kv_memory": "8MiB"}
    first, long = budget(), budget(**far)
    least = first.weights + first.activations + first.kv
    for turn in range(3):
        holes = [torch.ones(size * (turn + 1)) for size in range(1, 4000, 3)]
        del holes[::2]
        assert budget(device_memory=least) == replace(first, total=least)
        with pytest.raises(BudgetError):
            budget(device_memory=least - 1)
        assert budget(**far) == long


def test_it_has_as_many_tokens_and_sequences_as_a_step_may_have() -> None:
    """However short the sequences: with few tokens in each, there are several runs."""
    rng = random.Random(0)
    for _ in range(2000):
        sequences = rng.choice((1, 2, 3, 16, 64, 256))
        tokens = sequences + rng.choice((0, 1, 5, 100, 8192))
        length = rng.choice((1, 2, 3, 17, 100, 600, 40960))
        plan = largest_step(StepSizes(tokens, sequences, length, 16), past=8192, cold=rng.random() < 0.2)
        assert plan.tokens == min(tokens, sequences * length)
        rows = [share.row for share in plan.shares]
        assert rows == list(range(len(rows)))
        assert len(rows) <= sequences
        assert all(share.start >= 0 and share.stop <= length and share.tokens for share in plan.shares)
        assert [len(share.tokens) > 1 for share in plan.shares] == sorted(
            len(share.tokens) > 1 for share in plan.shares
        )


@pytest.mark.skipif(not STATM.exists(), reason="Linux tells a process's pages")
def test_holes_that_steps_leave_go_back_before_they_outgrow_the_count() -> None:
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "device_memory": "64MiB",
        "max_step_tokens": 96,
        "max_sequences": 4,
        "kv_blocks": 4,
    }
    booted = boot(Config(Path(), **settings), Shape.of(MIXTURE))  # type: ignore[arg-type]
    try:
        blocks = [torch.ones(25_000) for _ in range(4 * booted.budget.activations // 100_000)]
        there = private_pages()
        del blocks[::2]
        booted.engine.submit(
            [1, 2, 3], Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, frozenset(), 0, None, None)
        )
        booted.engine.step()
        assert private_pages() < there - booted.budget.activations
    finally:
        booted.engine.close()


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process can be reset on Linux alone"
)
def test_no_routing_takes_more_than_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("routings", ROOT / "benchmarks" / "routings.py")
    assert spec is not None
    assert spec.loader is not None
    routings = importlib.util.module_from_spec(spec)
    sys.modules["routings"] = routings
    spec.loader.exec_module(routings)
    found = routings.measured(routings.ON_CPU[2], 7, torch.device("cpu"))
    assert len(found.routings) == 7
    assert found.within, found
