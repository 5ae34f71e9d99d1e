"""Two models in one engine on a GPU: with recorded steps, in one budget, each says what it says alone."""

import pytest
import torch

pytest.importorskip("transformers")

import tiny
from pairs import DRAFT, TARGET, opened, ranks_of, say_both, speculate
from penstock.engine.placing import Override
from penstock.weights.streaming.residency import WeightLimits
from penstock.worker.runner import Runner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SETTINGS = {"device": "cuda", "dtype": "float32", "device_memory": "4GiB", "block_size": 16}
FEW = 40
NAMES = {TARGET: "qwen3", DRAFT: "llama"}
PATHS = tuple(tiny.checkpoint(name) for name in NAMES.values())


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_each_says_what_it_says_alone(graphs: bool, ahead: bool, streams: bool) -> None:
    override = None
    if streams:
        with opened(PATHS[0], None, **SETTINGS) as booted:
            whole = booted.weights.bytes
        override = Override(limits=WeightLimits(whole // 2, whole))
    with opened(*PATHS, override=override, graphs=graphs, **SETTINGS) as booted:
        runner, budget = ranks_of(booted), booted.budget
        assert isinstance(runner, Runner)
        assert booted.weights.placement.everything_resident != streams
        for model in runner.models.values():
            assert (model.graphs is not None) == graphs
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            said = say_both(booted, tiny.prompts(), FEW, ahead)
            for role, name in NAMES.items():
                assert said[role] == [one.tokens[:FEW] for one in tiny.references(name)]
            assert speculate(booted, tiny.prompts(), FEW).outputs == said[TARGET]
        assert torch.cuda.max_memory_reserved() <= budget.total
