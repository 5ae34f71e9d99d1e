"""The slot table of a mixture does what its rule says, on the device's arrays, whatever is asked for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from penstock.bench.routing.policies import Ranked, Room
from penstock.weights.streaming.slots import SlotRule, SlotTable
from slot_oracle import RULES, Layer, workloads

CPU = torch.device("cpu")


@pytest.mark.parametrize("rule", RULES, ids=str)
@given(workloads())
@settings(deadline=None, max_examples=60)
def test_the_arrays_do_what_plain_python_does(
    rule: SlotRule, work: tuple[int, int, int, list[list[list[int]]]]
) -> None:
    experts, slots, most, steps = work
    table = SlotTable(2, experts, slots, most, CPU, rule)
    layers = [Layer(experts, slots, rule) for _ in range(2)]
    for now, step in enumerate(steps, 1):
        table.begin()
        for number, (layer, asked) in enumerate(zip(layers, step, strict=True)):
            before = dict(layer.in_slot)
            found = table.step(number, torch.tensor(asked).view(1, -1))
            came = [
                tuple(one) for one in zip(*(array.tolist() for array in found), strict=True) if one[0] >= 0
            ]
            assert came == layer.step(now, set(asked))
            assert not {left for _, _, left in came} & set(asked), "asked for, and gone"
            # Both tables say the same, and no expert is in two slots.
            expert_of, slot_of = table.expert_of[number].tolist(), table.slot_of[number, :experts].tolist()
            there = {slot: one for slot, one in enumerate(expert_of) if one >= 0}
            assert there == layer.in_slot
            assert {one: slot for slot, one in there.items()} == {
                one: slot for one, slot in enumerate(slot_of) if slot >= 0
            }
            for expert, slot, left in came:
                assert slot < 0 or before.get(slot, -1) == left
                assert slot_of[expert] == slot
            # Who is asked for and has neither a slot nor a bypass was there before.
            assert set(asked) - {one for one, *_ in came} <= set(before.values())


def test_slots_are_empty_first_and_the_least_valuable_leaves() -> None:
    table = SlotTable(1, 4, 2, 4, CPU, SlotRule(1e9, 1.0))
    for asked, came in [
        ([0, 0, 0], [(0, 0, -1)]),
        ([0, 1], [(1, 1, -1)]),
        ([2], [(2, 1, 1)]),  # Both were used once, and one of them now.
        ([1], [(1, 1, 2)]),  # It comes back at its old rank: twice used by now.
        ([0], []),
        ([2, 3], [(2, 1, 1), (3, -1, -1)]),  # 0 was used three times, and 3 once: it passes by.
    ]:
        table.begin()
        found = zip(*(array.tolist() for array in table.step(0, torch.tensor(asked))), strict=True)
        assert [one for one in found if one[0] >= 0] == came
    assert table.hits() == [2 / 8]


@pytest.mark.parametrize("rule", [SlotRule(), SlotRule(11.0, 1.0), SlotRule(37.0, 2.5)], ids=str)
def test_the_replay_on_the_host_hits_as_often(rule: SlotRule) -> None:
    rng = np.random.default_rng(3)
    layers, experts, slots = 3, 16, 5
    table, ranked = SlotTable(layers, experts, slots, 12, CPU, rule), Ranked(
        Room(layers, experts, layers * slots), rule, shared=False
    )  # fmt: skip
    hits = np.zeros(layers, int)
    for _ in range(200):
        table.begin()
        for layer in range(layers):
            asked = (rng.zipf(1.4, size=rng.integers(1, 12)) * (layer + 1)) % experts
            table.step(layer, torch.from_numpy(asked))
            hits[layer] += ranked.step(layer, np.unique(asked))
    assert table.counts[:, 1].tolist() == hits.tolist()
    assert hits.sum() > 0


def test_a_step_asks_the_host_for_nothing() -> None:
    """What depends on values of tensors cannot run on a device without any."""
    table = SlotTable(1, 8, 3, 4, torch.device("meta"))
    table.begin()
    assert [len(array) for array in table.step(0, torch.empty(2, 2, dtype=torch.int64, device="meta"))] == [
        4, 4, 4
    ]  # fmt: skip
