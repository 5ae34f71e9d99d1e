"""Experts that the device decides about, as a GPU does it: with recorded steps and without, whatever is late,
the tokens of experts that all rest."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import tiny
from penstock import LLM, SamplingParams
from penstock.ops.slots import Places
from penstock.ops.triton.slots import expert_step, fetch
from penstock.weights.streaming import snapshots
from penstock.weights.streaming.slots import SlotRule, SlotTable
from penstock.weights.streaming.slotted import SlotExperts
from slot_oracle import Layer

DEVICE = torch.device("cuda")
OFFSETS = (0, 512, 4096)


@pytest.mark.parametrize(
    ("experts", "slots", "each", "size"), [(8, 3, 2, 8192), (128, 34, 8, 1 << 20), (512, 100, 64, 4096)]
)
def test_the_kernels_do_what_plain_python_does(experts: int, slots: int, each: int, size: int) -> None:
    """And bring the bytes, from memory of the host."""
    rng = torch.Generator().manual_seed(experts)
    rule, most = SlotRule(16.0, 1.0), min(experts, 64)
    table, layer = SlotTable(1, experts, slots, DEVICE, rule), Layer(experts, slots, rule)
    host = torch.randint(256, (experts, size), dtype=torch.uint8, generator=rng).pin_memory()
    memory = torch.zeros(slots + each, size, dtype=torch.uint8, device=DEVICE)
    places = Places(0, slots, each, memory.data_ptr(), size, torch.tensor(OFFSETS, device=DEVICE))
    for now in range(1, 40):
        table.begin()
        asked = (torch.rand(most, generator=rng) ** 3 * experts).long()
        pairs = torch.bincount(asked, minlength=experts).int().to(DEVICE)
        coming, tables = expert_step(table.arrays(0), pairs, most, rule.margin, places)
        want = layer.step(now, set(asked.tolist()))
        assert coming[0].tolist() == [one for one, *_ in want] + [-1] * (most - len(want))
        seen = set[int]()
        for turn, addresses in enumerate(tables):
            fetch(coming, turn, places, host.data_ptr())
            for expert in addresses[:, 0].nonzero()[:, 0].tolist():
                place, rest = divmod(int(addresses[expert, 0]) - memory.data_ptr(), size)
                assert rest == 0
                assert addresses[expert].tolist() == [memory[place].data_ptr() + at for at in OFFSETS]
                assert torch.equal(memory[place].cpu(), host[expert])
                seen.add(expert)
        assert seen == set(asked.tolist())
        assert table.expert_of[0].tolist() == [layer.in_slot.get(slot, -1) for slot in range(slots)]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("share", [0.35, 0.6, 0.85])
def test_tokens_are_those_of_experts_that_rest(share: float, graphs: bool, tmp_path: Path) -> None:
    """In batches that are padded, behind prompts about which the host decides."""
    path = tiny.checkpoint("qwen3_moe")
    prompts = [one.prompt for one in tiny.references("qwen3_moe")]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    settings = {
        "dtype": "bfloat16",
        "max_length": 256,
        "kv_blocks": 200,
        "cache": tmp_path,
        "max_sequences": 12,
    }
    with LLM(path, graphs=graphs, **settings) as llm:  # type: ignore[arg-type]
        want = [one.tokens for one in llm.generate(prompts, params)]
        budget = llm.memory.budget
    room = budget.activations + budget.kv + int(share * budget.weights) + (64 << 20)
    with LLM(path, graphs=graphs, device_memory=room, **settings) as llm:  # type: ignore[arg-type]
        experts = llm.booted.weights.experts
        if not isinstance(experts, SlotExperts):
            pytest.skip("all experts have room on the device")
        assert [one.tokens for one in llm.generate(prompts, params)] == want
        assert [one.tokens for one in llm.generate(prompts[:1], params)] == want[:1]
        asked = experts.counts(exact=True).asked
        assert asked > 0
        assert llm.memory.weights.copied > 0


def test_what_the_device_counts_is_seen_while_steps_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to the host are of one moment each, come without a wait, and lag behind by little."""
    monkeypatch.setattr(snapshots, "EVERY", 0.0)
    path = tiny.checkpoint("qwen3_moe")
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    settings = {"dtype": "bfloat16", "max_length": 256, "kv_blocks": 40, "cache": tmp_path}
    with LLM(path, **settings) as llm:  # type: ignore[arg-type]
        budget = llm.memory.budget
    room = budget.activations + budget.kv + budget.weights // 2 + (64 << 20)
    with LLM(path, device_memory=room, **settings) as llm:  # type: ignore[arg-type]
        experts = llm.booted.weights.experts
        if not isinstance(experts, SlotExperts):
            pytest.skip("all experts have room on the device")
        asked = list[int]()
        for _ in llm.stream([5, 6, 7], params):
            counts = experts.counts(exact=False)
            asked.append(counts.asked)
            assert 0 <= counts.hit <= counts.asked
            assert 0 <= counts.age < 5
            for layer in experts.use(exact=False).layers:
                assert all(0 <= rate <= 1 for rate in layer.rates)
        assert asked == sorted(asked)
        assert len(set(asked)) > 20, "it goes on while steps run"
        exact = llm.memory.weights.experts
        assert asked[-1] <= exact.asked
        assert exact.age < 0.1
        # A token asks each layer for its experts.
        assert exact.asked >= 150 * len(experts.mixtures)
