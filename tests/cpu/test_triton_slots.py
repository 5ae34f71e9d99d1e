"""The kernel that chooses which experts have slots, interpreted on the CPU, does what plain torch does."""

import os
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

from penstock.ops.slots import SlotArrays, slot_step_reference
from penstock.ops.triton.slots import slot_step
from penstock.weights.streaming.slots import SlotRule, SlotTable


def arrays(experts: int, slots: int, rule: SlotRule) -> SlotArrays:
    return SlotTable(1, experts, slots, experts, torch.device("cpu"), rule)._layers[0]


@pytest.mark.parametrize(
    "rule", [SlotRule(), SlotRule(2.0, 1.0), SlotRule(0.25, 0.0), SlotRule(9.0, 2.5)], ids=str
)
@given(st.integers(1, 70), st.integers(0, 10_000), st.booleans())
@settings(deadline=None, max_examples=10)
def test_the_kernel_does_what_torch_does(rule: SlotRule, experts: int, seed: int, wide: bool) -> None:
    rng = torch.Generator().manual_seed(seed)
    slots = int(torch.randint(1, experts + 1, (1,), generator=rng))
    tokens = 20 if wide else 2
    most = min(tokens * 4, experts)
    one, other = arrays(experts, slots, rule), arrays(experts, slots, rule)
    popular = torch.rand(experts, generator=rng) ** 2 + 1e-3
    for step in range(8):
        for each in (one, other):
            each.now.add_(1)
        dtype = (torch.int32, torch.int64)[step % 2]
        asked = (
            torch.multinomial(popular, tokens * 4, replacement=True, generator=rng).view(tokens, 4).to(dtype)
        )
        found, expected = slot_step(asked, one, most, rule.margin), slot_step_reference(
            asked, other, most, rule.margin
        )  # fmt: skip
        assert torch.equal(found, expected)
        for field in fields(SlotArrays):
            got, right = getattr(one, field.name), getattr(other, field.name)
            if field.name == "slot_of":
                got, right = got[:-1], right[:-1]
            assert torch.equal(got, right), field.name


@pytest.mark.parametrize(
    ("experts", "slots", "tokens"), [(128, 128, 3), (512, 96, 64), (31, 1, 1), (32, 32, 600)]
)
def test_sizes_of_real_mixtures(experts: int, slots: int, tokens: int) -> None:
    rng = torch.Generator().manual_seed(1)
    one, other = arrays(experts, slots, SlotRule(8.0)), arrays(experts, slots, SlotRule(8.0))
    for _ in range(4):
        for each in (one, other):
            each.now.add_(1)
        asked = torch.rand(tokens, experts, generator=rng).topk(min(8, experts)).indices
        most = min(asked.numel(), experts)
        assert torch.equal(slot_step(asked, one, most, 1.0), slot_step_reference(asked, other, most, 1.0))
        assert torch.equal(one.expert_of, other.expert_of)
    assert one.counts.tolist() == other.counts.tolist()
