"""The step that boot measures is as large as any that the scheduler may plan, and a mixture takes no more, whatever its routing."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch

from penstock.worker.runner import largest_step

ROOT = Path(__file__).resolve().parents[2]


def test_it_has_as_many_tokens_and_sequences_as_a_step_may_have() -> None:
    """However short the sequences: with few tokens in each, there are several runs."""
    rng = random.Random(0)
    for _ in range(2000):
        sequences = rng.choice((1, 2, 3, 16, 64, 256))
        tokens = sequences + rng.choice((0, 1, 5, 100, 8192))
        length = rng.choice((1, 2, 3, 17, 100, 600, 40960))
        plan = largest_step(
            max_step_tokens=tokens, max_sequences=sequences, max_length=length, block_size=16, past=8192, cold=rng.random() < 0.2
        )
        assert plan.tokens == min(tokens, sequences * length)
        rows = [share.row for share in plan.shares]
        assert rows == list(range(len(rows)))
        assert len(rows) <= sequences
        assert all(share.start >= 0 and share.stop <= length and share.tokens for share in plan.shares)
        assert [len(share.tokens) > 1 for share in plan.shares] == sorted(len(share.tokens) > 1 for share in plan.shares)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process can be reset on Linux alone")
def test_no_routing_takes_more_than_was_counted() -> None:
    spec = importlib.util.spec_from_file_location("routings", ROOT / "benchmarks" / "routings.py")
    assert spec is not None
    assert spec.loader is not None
    routings = importlib.util.module_from_spec(spec)
    sys.modules["routings"] = routings
    spec.loader.exec_module(routings)
    found = routings.measured(routings.ON_CPU[2], 7, torch.device("cpu"))
    assert len(found.routings) == 7
    assert found.within, found
