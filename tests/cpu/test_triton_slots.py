"""The kernels by which a device decides about experts' slots and fetches them, interpreted on the CPU."""

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import bounds
from penstock.arch.layout import GroupId, GroupKind, MixtureLayout
from penstock.bench.routing.policies import Ranked, Room
from penstock.memory.streams import CallerStream
from penstock.ops.slots import COPIERS, ExpertParts, Places, SlotArrays
from penstock.ops.triton import slots as triton_slots
from penstock.ops.triton.slots import expert_step, fetch
from penstock.weights.streaming.experts import Experts
from penstock.weights.streaming.residency import ExpertRoom
from penstock.weights.streaming.slots import SlotRule, SlotTable
from penstock.weights.streaming.slotted import SlotExperts
from penstock.weights.streaming.waits import StreamWaits
from slot_oracle import RULES, Layer, workloads
from streams import Gates, Store, layout

CPU = torch.device("cpu")
SIZE, OFFSETS = 48, torch.tensor([0, 16, 40])


def spans(*arrays: torch.Tensor) -> list[tuple[int, int]]:
    return [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in arrays]


def decided(table: SlotTable, layer: int, asked: list[int], rule: SlotRule) -> list[tuple[int, int]]:
    """Who comes, and to which slot, or -1."""
    experts, slots = table.value.shape[1], table.expert_of.shape[1]
    pairs = torch.bincount(torch.tensor(asked), minlength=experts).int()
    places = Places(0, slots, experts, 1 << 20, 4096, OFFSETS)
    parts = expert_step(table.arrays(layer), pairs, min(len(asked), experts), rule.margin, places, 1)
    return [(one, place if place < slots else -1) for one, place in parts.coming.T.tolist() if one >= 0]


@pytest.mark.parametrize("ring", [1, 3, 64])
@pytest.mark.parametrize("rule", RULES, ids=str)
@given(workloads())
@settings(deadline=None, max_examples=8)
def test_the_kernels_do_what_plain_python_does(
    rule: SlotRule, ring: int, work: tuple[int, int, int, list[list[list[int]]]]
) -> None:
    """Each expert that is asked for is in the table of one part, whose address then holds its bytes; parts
    are nearly equal, and what a part writes to is left alone by those that are in the ring with it."""
    experts, slots, most, steps = work
    most = min(most, experts)
    table = SlotTable(2, experts, slots, CPU, rule)
    layers = [Layer(experts, slots, rule) for _ in range(2)]
    host = torch.randint(256, (2, experts, SIZE), dtype=torch.uint8)
    device = torch.zeros(2 * slots + ring, SIZE, dtype=torch.uint8)
    for now, step in enumerate(steps[:12], 1):
        table.begin()
        for number, (layer, asked) in enumerate(zip(layers, step, strict=True)):
            pairs = torch.bincount(torch.tensor(asked), minlength=experts).int()
            places = Places(number * slots, 2 * slots, ring, device.data_ptr(), SIZE, OFFSETS)
            count, at_once = places.parts(most)
            parts = expert_step(table.arrays(number), pairs, most, rule.margin, places, count)
            want, coming, starts = layer.step(now, set(asked)), parts.coming, parts.starts[:-1].tolist()
            assert parts.starts[-1] == -1
            assert parts.tables.shape == (count, experts, 3)
            assert starts == [part * len(want) // count for part in range(count + 1)]
            assert coming[0].tolist() == [one for one, *_ in want] + [-1] * (most - len(want))
            for at, (_, slot, _) in enumerate(want):
                assert coming[1, at] == (number * slots + slot if slot >= 0 else 2 * slots + at % ring)
            for part in range(count):
                together = coming[1, starts[max(part + 1 - at_once, 0)] : starts[part + 1]].tolist()
                assert len(together) == len(set(together))
            held = {slot: one for slot, one in enumerate(table.expert_of[number].tolist()) if one >= 0}
            assert held == layer.in_slot
            assert table.slot_of[number, :experts].tolist() == [
                {one: slot for slot, one in held.items()}.get(expert, -1) for expert in range(experts)
            ]
            seen = list[int]()
            for part, addresses in enumerate(parts.tables):
                with bounds.lent(spans(host, device)):
                    fetch(parts, places, host[number].data_ptr(), part)
                here = set(coming[0, starts[part] : starts[part + 1]].tolist())
                here |= set(asked) - {one for one, *_ in want} if part == 0 else set()
                assert here == set(addresses[:, 0].nonzero()[:, 0].tolist())
                for expert, row in enumerate(addresses.tolist()):
                    if row[0] == 0:
                        assert row == [0, 0, 0]
                        continue
                    seen.append(expert)
                    place, rest = divmod(row[0] - device.data_ptr(), SIZE)
                    assert rest == 0
                    assert row == [row[0] + at for at in OFFSETS.tolist()]
                    assert torch.equal(device[place], host[number, expert])
            assert sorted(seen) == sorted(set(asked))


def test_a_large_expert_is_copied_by_many() -> None:
    size = 4 * triton_slots._WORDS * (COPIERS + 1) + 4096
    host, device = torch.randint(256, (5, size), dtype=torch.uint8), torch.zeros(4, size, dtype=torch.uint8)
    coming, starts = torch.tensor([[4, 1, 3], [2, 0, 1]]), torch.tensor([0, 2, 3, -1])
    parts = ExpertParts(coming, starts, torch.zeros(2, 5, 3, dtype=torch.int64), torch.ones(COPIERS).int())
    places = Places(0, 3, 3, device.data_ptr(), size, OFFSETS)
    with bounds.lent(spans(host, device)):
        fetch(parts, places, host.data_ptr(), 0)
    assert torch.equal(device[[2, 0]], host[[4, 1]])
    assert not device[1].any()
    with bounds.lent(spans(host, device)):
        fetch(parts, places, host.data_ptr(), 1)
    assert torch.equal(device[:3], host[[1, 3, 4]])
    assert not device[3].any()


def test_many_experts_and_slots() -> None:
    """More than are compared at a time, and ties."""
    rng = np.random.default_rng(1)
    rule, experts, slots = SlotRule(4.0, 1.0), 200, 90
    table, layer = SlotTable(1, experts, slots, CPU, rule), Layer(experts, slots, rule)
    places = Places(0, slots, 8, 1 << 20, 4096, OFFSETS)
    for now in range(1, 30):
        table.begin()
        asked = rng.zipf(1.2, size=rng.integers(1, 128)) % experts
        pairs = torch.from_numpy(np.bincount(asked, minlength=experts).astype(np.int32))
        coming = expert_step(table.arrays(0), pairs, 128, rule.margin, places, 32).coming
        want = layer.step(now, set(asked.tolist()))
        assert coming[0, : len(want)].tolist() == [one for one, *_ in want]
        assert {
            slot: one for slot, one in enumerate(table.expert_of[0].tolist()) if one >= 0
        } == layer.in_slot
    assert table.hits()[0] > 0.3


def test_the_host_uses_what_is_in_slots_now() -> None:
    """The device and the host decide in turns; each table leads to the bytes of its experts."""
    layouts = [
        layout(GroupId(GroupKind.EXPERT, layer, expert), SIZE) for layer in (1, 3) for expert in range(4)
    ]
    mixtures = {layer: MixtureLayout(4, None) for layer in (1, 3)}
    host = torch.randint(256, (8, SIZE), dtype=torch.uint8)
    memory = torch.zeros(2 * 1 + 2, SIZE, dtype=torch.uint8)
    stream, room = CallerStream(), ExpertRoom(SIZE, 8, 0, 8, 2, slots=2, copies=True)
    ring = Experts(layouts, room, memory[2:], host, Store(Gates()), stream, stream, StreamWaits(None))
    experts = SlotExperts(layouts, mixtures, ring, memory, host, (stream, stream), SlotRule(1.0, 0.0))

    def held(table: torch.Tensor, layer: int, expected: set[int]) -> None:
        there = {expert for expert, (address, *_) in enumerate(table.tolist()) if address}
        assert there == expected
        for expert in there:
            place, rest = divmod(int(table[expert, 0]) - memory.data_ptr(), SIZE)
            assert rest == 0
            assert torch.equal(memory[place], host[4 * (layer == 3) + expert])

    def computed(layer: int, chosen: set[int], most: int) -> list[set[int]]:
        found, pairs = [], torch.tensor([one in chosen for one in range(4)]).int()
        with bounds.lent(spans(host, memory)):
            parts = experts.parts(layer, pairs, most)
            assert parts is not None
            for table in parts:
                found.append({expert for expert, (address, *_) in enumerate(table.tolist()) if address})
                held(table, layer, found[-1])
        return found

    for chosen in (0, 2, 1):
        for layer in (1, 3):
            assert computed(layer, {chosen}, 1) == [{chosen}]
        for layer in (1, 3):
            ids = [GroupId(GroupKind.EXPERT, layer, expert) for expert in range(4)]
            waves = [
                [id.expert for id in wave]
                for wave, table in experts.waves(ids)
                if held(table, layer, {id.expert for id in wave}) is None
            ]
            assert waves[0] == [chosen]
            assert sorted(one for wave in waves for one in wave) == [0, 1, 2, 3]
    assert experts.counts(exact=False).asked == 24, "nothing was copied to the host yet"
    assert experts.snapshots.exact().counts.sum(0).tolist() == [6, 0, 0, 0]
    counts = experts.counts(exact=True)
    # The host was asked for four of each of six layers, one of which was in its slot.
    assert (counts.asked, counts.hit) == (6 + 24, 6)
    assert (counts.copied, counts.read) == (24 * SIZE, 0)
    assert experts.counts(exact=False).asked == 6 + 24, "as exact as what was seen"
    # Many tokens: all come, and those of the next layer ahead, each once. What came ahead is computed first.
    before = ring.copied_bytes
    assert computed(1, {0}, 17) == [{1}, {0}, {2}, {3}]
    assert computed(3, {0}, 17) == [{0}, {2}, {1}, {3}]
    assert ring.copied_bytes - before == 6 * SIZE
    # The ring is given back with what was on its way; what was there is computed first.
    assert computed(1, {0, 1, 2}, 3) == [{1}, {2}, {0}]
    computed(1, {0}, 17)
    assert computed(1, {3}, 1) == [{3}]
    assert sorted(one for some in computed(1, {0}, 17) for one in some) == [0, 1, 2, 3]
    ring.close()


def _of_one_layer() -> tuple[SlotExperts, Experts, torch.Tensor, torch.Tensor, list[GroupId]]:
    """Two slots, filled with experts 0 and 1 of six, and two through which others pass."""
    ids = [GroupId(GroupKind.EXPERT, 0, at) for at in range(6)]
    layouts = [layout(id, SIZE) for id in ids]
    host, memory = torch.randint(256, (6, SIZE), dtype=torch.uint8), torch.zeros(4, SIZE, dtype=torch.uint8)
    room, stream = ExpertRoom(SIZE, 6, 0, 6, 2, slots=2, copies=True), CallerStream()
    ring = Experts(layouts, room, memory[2:], host, Store(Gates()), stream, stream, StreamWaits(None))
    mixtures, rule = {0: MixtureLayout(6, None)}, SlotRule(1.0, 0.0)
    experts = SlotExperts(layouts, mixtures, ring, memory, host, (stream, stream), rule)
    experts.fill()
    return experts, ring, host, memory, ids


def _asked(experts: SlotExperts, chosen: set[int]) -> Iterator[torch.Tensor]:
    pairs = torch.tensor([one in chosen for one in range(6)]).int()
    parts = experts.parts(0, pairs, len(chosen))
    assert parts is not None
    return parts


def _right(table: torch.Tensor, host: torch.Tensor, memory: torch.Tensor) -> set[int]:
    there = {expert for expert, (address, *_) in enumerate(table.tolist()) if address}
    for expert in there:
        at = (int(table[expert, 0]) - memory.data_ptr()) // SIZE
        assert torch.equal(memory[at], host[expert]), expert
    return there


@pytest.mark.parametrize("fetched", [0, 1, 2])
@pytest.mark.parametrize("host_decides", [False, True])
def test_what_was_decided_and_not_fetched_is_in_no_slot(host_decides: bool, fetched: int) -> None:
    """A pass is broken off behind a decision, before or between what fetches: 4 and 5 came to slots of 0 and
    1, and 2 and 3 pass by."""
    experts, ring, host, memory, ids = _of_one_layer()
    done = list[int]()

    def broken_off(parts: ExpertParts, places: Places, first: int, part: int) -> None:
        if len(done) == fetched:
            raise KeyboardInterrupt
        done.append(part)
        fetch(parts, places, first, part)

    with (
        bounds.lent(spans(host, memory)),
        patch.object(triton_slots, "fetch", broken_off),
        pytest.raises(KeyboardInterrupt),
    ):
        list(_asked(experts, {2, 3, 4, 5}))
    if host_decides:
        seen = [_right(table, host, memory) for _, table in experts.waves(ids)]
        assert sorted(one for some in seen for one in some) == [*range(6)]
    with bounds.lent(spans(host, memory)):
        for _ in range(2):
            seen = [_right(table, host, memory) for table in _asked(experts, {2, 3, 4, 5})]
            assert sorted(one for some in seen for one in some) == [2, 3, 4, 5]
    ring.close()


def test_an_interrupt_of_who_asks_for_slots_leaves_nothing_old() -> None:
    """Whoever waits for the device is interrupted before it knows: it asks again."""
    experts, ring, host, memory, ids = _of_one_layer()
    for _, table in experts.waves(ids):
        _right(table, host, memory)
    with bounds.lent(spans(host, memory)):
        list(_asked(experts, {4}))
    slot_of = experts._slot_table.slot_of
    experts._slot_table.slot_of = MagicMock(tolist=MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(experts.waves(ids))
    experts._slot_table.slot_of = slot_of
    seen = [_right(table, host, memory) for _, table in experts.waves(ids)]
    assert 4 in seen[0]
    ring.close()


def test_what_was_expected_comes_anew_when_the_ring_was_lent() -> None:
    experts, ring, host, memory, ids = _of_one_layer()
    ring.expect_ahead(ids[2:])
    experts.device_decides()
    memory[2:].fill_(0)  # by the device
    for _, table in experts.waves(ids):
        _right(table, host, memory)
    ring.close()


def test_kernels_are_compiled_for_few_bounds() -> None:
    experts, ring, host, memory, _ = _of_one_layer()
    bounds_of, step = set[int](), triton_slots.expert_step

    def noted(arrays: SlotArrays, pairs: torch.Tensor, most: int, *rest: Any) -> Any:
        bounds_of.add(most)
        return step(arrays, pairs, most, *rest)

    with bounds.lent(spans(host, memory)), patch.object(triton_slots, "expert_step", noted):
        for count in range(1, 7):
            tables = [_right(table, host, memory) for table in _asked(experts, set(range(count)))]
            assert len(tables) == count
            assert set[int]().union(*tables) == set(range(count))
    assert bounds_of == {1, 2, 4, 6}
    ring.close()


def test_slots_are_filled_at_the_beginning() -> None:
    """Where they cannot be divided evenly the first layers have one more."""
    host, memory = torch.randint(256, (8, SIZE), dtype=torch.uint8), torch.zeros(7, SIZE, dtype=torch.uint8)
    layouts = [layout(GroupId(GroupKind.EXPERT, at // 4, at % 4), SIZE) for at in range(8)]
    room, stream = ExpertRoom(SIZE, 8, 0, 8, 2, slots=5, copies=True), CallerStream()
    ring = Experts(layouts, room, memory[5:], host, Store(Gates()), stream, stream, StreamWaits(None))
    experts = SlotExperts(
        layouts, {at: MixtureLayout(4, None) for at in (0, 1)}, ring, memory, host, (stream, stream)
    )
    experts.fill()
    assert torch.equal(memory[:5], host[[0, 1, 2, 4, 5]])
    for layer in (0, 1):
        places = {
            wave[0].expert: len(wave)
            for wave, _ in experts.waves([GroupId(GroupKind.EXPERT, layer, at) for at in range(4)])
        }
        assert places == ({0: 3, 3: 1} if layer == 0 else {0: 2, 2: 1, 3: 1})
    with bounds.lent(spans(host, memory)):
        for layer, chosen in ((0, 3), (1, 2), (1, 3), (0, 0), (1, 1), (0, 1)):
            parts = experts.parts(layer, torch.tensor([one == chosen for one in range(4)]).int(), 1)
            assert parts is not None
            for table in parts:
                place, rest = divmod(int(table[chosen, 0]) - memory.data_ptr(), SIZE)
                assert rest == 0
                assert torch.equal(memory[place], host[4 * layer + chosen])
    ring.close()


def test_slots_are_empty_first_and_the_least_valuable_leaves() -> None:
    table = SlotTable(1, 4, 2, CPU, SlotRule(1e9, 1.0))
    for asked, came in [
        ([0, 0, 0], [(0, 0)]),
        ([0, 1], [(1, 1)]),
        ([2], [(2, 1)]),  # Both were used once, and one of them now.
        ([1], [(1, 1)]),  # It comes back at its old rank: twice used by now.
        ([0], []),
        ([2, 3], [(2, 1), (3, -1)]),  # 0 was used three times, and 3 once: it passes by.
    ]:
        table.begin()
        assert decided(table, 0, asked, SlotRule(1e9, 1.0)) == came
    assert table.hits() == [2 / 8]


@pytest.mark.parametrize("rule", [SlotRule(), SlotRule(11.0, 1.0), SlotRule(37.0, 2.5)], ids=str)
def test_the_replay_on_the_host_hits_as_often(rule: SlotRule) -> None:
    rng = np.random.default_rng(3)
    layers, experts, slots = 2, 16, 5
    table, ranked = SlotTable(layers, experts, slots, CPU, rule), Ranked(
        Room(layers, experts, layers * slots), rule, shared=False
    )  # fmt: skip
    hits = np.zeros(layers, int)
    for _ in range(36):
        table.begin()
        for layer in range(layers):
            asked = (rng.zipf(1.4, size=rng.integers(1, 12)) * (layer + 1)) % experts
            decided(table, layer, asked.tolist(), rule)
            hits[layer] += ranked.step(layer, np.unique(asked))
    assert table.counts[:, 1].tolist() == hits.tolist()
    assert hits.sum() > 0


def test_who_is_asked_for_does_not_leave() -> None:
    """Even where whoever comes may take any other slot."""
    rule = SlotRule(1e9, 0.0)
    table = SlotTable(1, 3, 1, CPU, rule)
    for asked, came in (([0], [(0, 0)]), ([0, 1], [(1, -1)]), ([2], [(2, 0)])):
        table.begin()
        assert decided(table, 0, asked, rule) == came
