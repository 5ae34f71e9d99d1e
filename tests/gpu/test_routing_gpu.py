"""Routings that are imposed within recorded steps on a GPU."""

import pytest

pytest.importorskip("triton")

import tiny
from penstock import LLM, SamplingParams
from penstock.base.config import Config
from penstock.bench.routing.imposing import ImposedRouting, RoutingTable


def test_recorded_steps_take_the_imposed_routing_that_others_take() -> None:
    prompts = [reference.prompt for reference in tiny.references("qwen3_moe")]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = []
    for routing, graphs in (
        (ImposedRouting("zipf"), True), (ImposedRouting("zipf"), False), (ImposedRouting("uniform"), True)
    ):  # fmt: skip
        config = Config(
            tiny.checkpoint("qwen3_moe"), device="cuda", dtype="float32", max_length=128, max_step_tokens=64,
            block_size=4, max_sequences=12, graphs=graphs, prefix_cache=False,
        )  # fmt: skip
        with LLM.from_config(config, progress=False, routing=routing) as llm:
            table = llm.booted.engine._ranks.target.decoder.routing  # type: ignore[union-attr]
            assert isinstance(table, RoutingTable)
            table._at.zero_()  # Recording has gone on, too.
            answers.append([one.tokens for one in llm.generate(prompts, greedy)])
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]
