"""An expert of the next layer is foretold and comes ahead, as far as there is time: kernels, interpreted."""

import os
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import bounds
from penstock.ops.slots import COPIERS, Places
from penstock.ops.triton import slots as triton_slots
from penstock.ops.triton.slots import expert_step, fetch, fetch_ahead, foretell
from penstock.weights.streaming.slots import SlotRule, SlotTable

CPU = torch.device("cpu")
EXPERTS, RING, WORDS = 6, 3, 16
SIZE = 4 * WORDS * (2 * COPIERS + 3)
"""Of an expert: some programs copy three pieces of it, others two."""


class Layers:
    """Two layers without slots but for those of experts in `held`."""

    def __init__(self, held: tuple[int, ...] = ()) -> None:
        self.table = SlotTable(2, EXPERTS, max(len(held), 1), CPU, SlotRule(1e9, 1e9))
        for slot, expert in enumerate(held):
            for layer in range(2):
                self.table.slot_of[layer, expert], self.table.expert_of[layer, slot] = slot, expert
        self.host = torch.randint(256, (2 * EXPERTS, SIZE), dtype=torch.uint8)
        self.truth = self.host.clone()
        self.slots = 2 * self.table.expert_of.shape[1]
        self.memory = torch.zeros(self.slots + RING + 1, SIZE, dtype=torch.uint8)
        self.places = Places(0, self.slots, RING, self.memory.data_ptr(), SIZE, torch.tensor([0]))
        self.table.begin()

    def told(self, layer: int) -> int:
        return int(self.table.arrays(layer).told[0])

    def ahead(self, layer: int) -> None:
        with bounds.lent(map(bounds.span, (self.host, self.memory))):
            fetch_ahead(self.table.arrays(layer), self.places, self.host.data_ptr())

    def step(self, layer: int, asked: set[int]) -> int:
        """Decide and fetch; return which expert has come ahead."""
        pairs = torch.tensor([one in asked for one in range(EXPERTS)]).int()
        parts = expert_step(self.table.arrays(layer), pairs, EXPERTS, 1e9, self.places, 2)
        with bounds.lent(map(bounds.span, (self.host, self.memory))):
            for part in range(2):
                fetch(parts, self.places, self.host[layer * EXPERTS].data_ptr(), part)
                start, stop = parts.starts[part : part + 2].tolist()
                for expert, place in parts.coming[:, start:stop].T.tolist():
                    assert torch.equal(self.memory[place], self.truth[layer * EXPERTS + expert])
        return int(parts.starts[-1])


@pytest.fixture(autouse=True)
def _small_pieces() -> Iterator[None]:
    with patch.object(triton_slots, "_WORDS", WORDS):
        yield


def one_hot(*likely: int) -> torch.Tensor:
    scores = torch.zeros(1, EXPERTS)
    for rank, expert in enumerate(likely):
        scores[0, expert] = 9.0 - rank
    return scores


@given(st.data())
@settings(deadline=None, max_examples=15)
def test_what_has_come_ahead_need_not_come_again(data: st.DataObject) -> None:
    """However much had come when the layer decided: those pieces are taken from where they are, the others
    come through the link."""
    layers, told = Layers(), data.draw(st.integers(0, EXPERTS - 1))
    asked = data.draw(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=RING))
    layers.step(0, {0})
    foretell(layers.table.arrays(1), one_hot(told), 1)
    layers.ahead(1)
    assert torch.equal(layers.memory[-1], layers.truth[EXPERTS + told])
    done, pieces = layers.table.arrays(1).done, SIZE // (4 * WORDS)
    assert done.tolist() == [len(range(at, pieces, COPIERS)) for at in range(COPIERS)]
    done.copy_(torch.tensor([data.draw(st.integers(0, count)) for count in done.tolist()]))
    for piece in range(pieces):
        came = piece // COPIERS < done[piece % COPIERS]
        elsewhere = layers.host[EXPERTS + told] if came else layers.memory[-1]
        elsewhere.view(pieces, -1)[piece] = 0
    assert layers.step(1, asked) == (told if told in asked else -1)
    assert layers.table.counts.tolist() == [[1, 0, 0, 0], [len(asked), 0, 1, told in asked]]


def test_nothing_is_fetched_once_the_layer_has_decided() -> None:
    layers = Layers()
    layers.step(0, {0})
    foretell(layers.table.arrays(1), one_hot(4), 1)
    assert layers.step(1, {4}) == 4
    assert not layers.table.arrays(1).done.any()
    layers.ahead(1)
    assert not layers.memory[-1].any()


def test_what_is_foretold_holds_for_the_next_decision_of_that_layer() -> None:
    for between in ([0], [1], [0, 1]):
        layers = Layers()
        layers.step(0, {0})
        foretell(layers.table.arrays(1), one_hot(4), 1)
        layers.ahead(1)
        for layer in between:
            assert layers.step(layer, {0}) == -1
        layers.memory[-1] = 0  # by whoever comes there
        assert layers.step(1, {4}) == -1


def test_the_likeliest_without_a_slot_is_foretold() -> None:
    layers = Layers(held=(2, 3))
    arrays = layers.table.arrays(1)
    for scores, most, padding, expected in [
        (one_hot(1, 0), 1, None, 1),
        (one_hot(2, 1), 2, None, 1),
        (one_hot(2, 1), 1, None, -1),  # What is asked for has a slot.
        (one_hot(2, 3, 5), 3, None, 5),
        (torch.cat((one_hot(1), one_hot(5), one_hot(5))), 3, None, 5),
        (torch.cat((one_hot(1), one_hot(5), one_hot(5))), 3, [False, True, True], 1),
        (one_hot(4).bfloat16(), 1, None, 4),
    ]:
        foretell(arrays, scores, most, None if padding is None else torch.tensor(padding))
        assert layers.told(1) == (EXPERTS + expected if expected >= 0 else -1)


def test_what_does_not_pay_is_dropped_but_tried_again() -> None:
    layers = Layers()
    arrays, rng = layers.table.arrays(1), np.random.default_rng(1)
    told = list[int]()
    for step in range(260):
        layers.table.begin()
        foretell(arrays, one_hot(4), 1)
        told.append(layers.told(1) >= 0)
        right = step >= 200 or rng.random() < 0.05
        pairs = torch.tensor([one == (4 if right else 5) for one in range(EXPERTS)]).int()
        expert_step(arrays, pairs, 1, 1e9, layers.places, 1)
    assert all(told[:64])
    assert not any(told[70:120])
    assert 0 < sum(told[70:200]) <= 3
    asked, _, tries, right = arrays.counts.tolist()
    assert (asked, tries) == (260, sum(told))
    assert right < tries
