"""Slots that are chosen, and routings that are imposed, within recorded steps on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

import tiny
from penstock import LLM, SamplingParams
from penstock.base.config import Config
from penstock.bench.routing.imposing import ImposedRouting, RoutingTable
from penstock.weights.streaming.slots import SlotRule, SlotTable

LAYERS, EXPERTS, SLOTS, TOP_K = 3, 128, 40, 8


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_recorded_slot_table_does_what_the_cpu_does(tokens: int) -> None:
    device, rng = torch.device("cuda"), torch.Generator().manual_seed(tokens)
    on_gpu, on_cpu = (
        SlotTable(LAYERS, EXPERTS, SLOTS, tokens * TOP_K, torch.device(kind), SlotRule(16.0))
        for kind in ("cuda", "cpu")
    )
    asked = torch.zeros(LAYERS, tokens, TOP_K, dtype=torch.int64, device=device)

    def step(table: SlotTable, chosen: torch.Tensor) -> list[torch.Tensor]:
        table.begin()
        return [array for layer in range(LAYERS) for array in table.step(layer, chosen[layer])]

    step(on_gpu, asked)
    step(on_cpu, asked.cpu())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(on_gpu, asked)
    for _ in range(60):
        popular = torch.rand(LAYERS, tokens, EXPERTS, generator=rng) + torch.linspace(0, 0.7, EXPERTS)
        chosen = popular.topk(TOP_K).indices
        asked.copy_(chosen)
        graph.replay()
        for got, expected in zip(found, step(on_cpu, chosen), strict=True):
            assert torch.equal(got.cpu(), expected)
        assert torch.equal(on_gpu.expert_of.cpu(), on_cpu.expert_of)
    assert on_gpu.hits() == on_cpu.hits()


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
