"""How experts are used, as it is shown while steps run: snapshots of what a device counts, and what the host
counts itself."""

from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from penstock.api.llm import LLM
from penstock.arch.layout import GroupId, GroupKind
from penstock.base.meter import ExpertCounts, WeightStats
from penstock.base.tiers import Tier
from penstock.memory.streams import CallerStream, HostTicket
from penstock.step.params import SamplingParams
from penstock.weights.streaming.experts import FADE, Experts
from penstock.weights.streaming.residency import ExpertRoom
from penstock.weights.streaming.slots import SlotRule, SlotTable
from penstock.weights.streaming.snapshots import EVERY, SlotSnapshots
from penstock.weights.streaming.stream import WeightStream
from penstock.weights.streaming.waits import StreamWaits
from penstock.worker.runner import Runner
from streams import Gates, Store, layout

CPU = torch.device("cpu")
SIZE = 48


class Held(CallerStream):
    """Marks that are reached when the test says so."""

    def __init__(self) -> None:
        self.marks: list[HostTicket] = []

    def mark(self) -> HostTicket:
        self.marks.append(HostTicket())
        return self.marks[-1]


def use(table: SlotTable, layer: int, asked: Iterable[int], half_life: float) -> None:
    """What the kernel does to worth, uses and counts."""
    arrays, now = table.arrays(layer), int(table.now)
    for one in asked:
        old = float(arrays.value[one]) * 0.5 ** ((now - int(arrays.used[one])) / half_life)
        arrays.value[one], arrays.used[one] = old + 1, now
        arrays.counts[0] += 1


def test_a_snapshot_is_shown_when_it_has_come_and_changes_no_more() -> None:
    table, stream = SlotTable(1, 4, 2, CPU), Held()
    seen = SlotSnapshots(table, stream)
    table.counts[0] = torch.tensor([5, 3, 2, 1])
    table.slot_of[0, 2] = 1
    seen.take(10.0)
    table.counts[0] = torch.tensor([8, 4, 3, 1])
    assert seen.last() is None, "it has not come"
    stream.marks[0].reach()
    for _ in range(2):
        found = seen.last()
        assert found is not None
        assert (found.counts.tolist(), found.slot_of.tolist(), found.when) == (
            [[5, 3, 2, 1]],
            [[-1, -1, 1, -1]],
            10.0,
        )
        seen.take(10.0 + EVERY / 2)
    assert len(stream.marks) == 1, "it is not taken with every step"
    seen.take(10.0 + EVERY)
    table.counts[0] = torch.tensor([9, 9, 3, 1])
    assert seen.last() is found, "the next has not come"
    seen.take(10.0 + 3 * EVERY)
    assert len(stream.marks) == 2, "one at a time is on its way"
    stream.marks[1].reach()
    newest = seen.last()
    assert newest is not None
    assert (newest.counts.tolist(), newest.when) == ([[8, 4, 3, 1]], 10.0 + EVERY)
    assert found.counts.tolist() == [[5, 3, 2, 1]]


def test_what_was_seen_does_not_become_less() -> None:
    """Between requests the counts are exact; what was copied before is older, and not shown any more."""
    table, stream = SlotTable(1, 4, 2, CPU), Held()
    seen, now = SlotSnapshots(table, stream), perf_counter()
    table.counts[0] = torch.tensor([5, 3, 2, 1])
    seen.take(now)
    stream.marks[0].reach()
    table.counts[0] = torch.tensor([7, 4, 2, 1])
    with patch.object(stream, "mark", CallerStream().mark):
        assert seen.exact().counts.tolist() == [[7, 4, 2, 1]]
    for _ in range(2):
        found = seen.last()
        assert found is not None
        assert found.counts.tolist() == [[7, 4, 2, 1]]
        table.counts[0] = torch.tensor([9, 5, 2, 1])
        seen.take(now + EVERY + 10)
    assert len(stream.marks) == 2
    stream.marks[1].reach()
    newest = seen.last()
    assert newest is not None
    assert newest.counts.tolist() == [[9, 5, 2, 1]]


@pytest.mark.parametrize("half_life", [3.0, 128.0, 1e9])
def test_rates_are_the_share_of_recent_steps(half_life: float) -> None:
    rng, experts = np.random.default_rng(2), 6
    table = SlotTable(2, experts, 2, CPU, SlotRule(half_life))
    seen = SlotSnapshots(table, CallerStream())
    assert not seen.exact().rates(0.5 ** (1 / half_life)).any(), "before any step"
    asked = np.zeros((40, 2, experts), bool)
    for step in range(40):
        table.begin()
        for layer in range(2):
            those = np.unique(rng.zipf(1.5, 3) % experts)
            asked[step, layer, those] = True
            use(table, layer, those.tolist(), half_life)
    weight = 0.5 ** (np.arange(40)[::-1] / half_life)
    want = (weight[:, None, None] * asked).sum(0) / weight.sum()
    found = seen.exact().rates(0.5 ** (1 / half_life))
    assert 0.05 < want.mean() < 0.95
    torch.testing.assert_close(found, torch.from_numpy(want), atol=2e-4, rtol=0)


def host_decided(on_device: int, on_host: int, ring: int = 2) -> tuple[Experts, list[GroupId]]:
    ids = [GroupId(GroupKind.EXPERT, layer, at) for layer in (0, 2) for at in range(3)]
    room, stream = ExpertRoom(SIZE, 6, on_device, on_host, ring, ring), CallerStream()
    memory: list[Tensor] = [
        torch.zeros(slots + ring, SIZE, dtype=torch.uint8) for slots in (on_device, on_host)
    ]
    layouts = [layout(id, SIZE) for id in ids]
    return Experts(layouts, room, *memory, Store(Gates()), stream, stream, StreamWaits(None)), ids


def test_the_host_counts_what_it_brings_and_from_where() -> None:
    experts, ids = host_decided(2, 2)
    tiers = {id: home.tier for id, home in experts.homes.items()}
    assert sorted(tiers.values()) == [Tier.DEVICE] * 2 + [Tier.DISK] * 2 + [Tier.HOST] * 2
    for layer in (ids[:3], ids[3:]):
        for wave in experts.waves(layer):
            experts.take_wave(wave)
            experts.release_wave(wave)
    assert (experts.asked, experts.missed) == (6, 4)
    assert (experts.copied_bytes, experts.read_bytes) == (4 * SIZE, 2 * SIZE)
    found = {layer.layer: layer for layer in experts.use()}
    assert [*found] == [0, 2]
    for id, tier in tiers.items():
        assert found[id.layer].tiers[id.expert] is tier
    experts.close()


@pytest.mark.parametrize("passes", [1, 7, FADE - 1, FADE, FADE + 1, 3 * FADE + 5])
def test_what_each_pass_asks_for_has_a_rate_of_one_and_half_of_them_half(passes: int) -> None:
    experts, ids = host_decided(3, 3)
    for at in range(passes):
        for layer in (ids[:2], ids[3:5]):
            wave = layer if at % 2 == 0 else layer[:1]
            experts.expect(wave)
            for id in wave:
                experts.take(id)
                experts.release(id)
    for layer in experts.use():
        assert layer.rates[0] == pytest.approx(1.0, abs=0.01)
        assert layer.rates[1] == pytest.approx(0.5 if passes > 1 else 1.0, abs=0.08)
        assert layer.rates[2] == 0
    experts.close()


def test_a_runner_takes_snapshots_after_its_steps_and_memory_does_not_wait(tmp_path: Path) -> None:
    taken, asked = list[float](), list[bool]()
    path, stats = tiny.checkpoint("qwen3_moe"), WeightStream.stats

    def noted(self: WeightStream, *, exact: bool = True) -> WeightStats:
        asked.append(exact)
        return stats(self, exact=exact)

    def take(now: float) -> None:
        taken.append(now)
        assert computed, "the step has been queued"

    compute, computed = Runner._compute, list[bool]()

    def noting(self: Runner, *arguments: Any) -> Any:
        computed.append(True)
        return compute(self, *arguments)

    snapshots = Mock(take=take)
    with (
        patch.object(WeightStream, "snapshots", snapshots),
        patch.object(WeightStream, "stats", noted),
        patch.object(Runner, "_compute", noting),
        LLM(path, device="cpu", dtype="float32", cache=tmp_path, max_length=64) as llm,
    ):
        taken.clear()
        computed.clear()
        begun = perf_counter()
        stream = llm.stream([5, 6, 7], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        next(stream)
        asked.clear()
        assert llm.memory.weights.experts == ExpertCounts(), "all rest"
        assert asked == [False], "a request is under way"
        assert [*stream]
        assert llm.memory.weights is not None
        assert asked == [False, True]
        assert begun <= taken[0] < taken[-1] <= perf_counter()
        assert len(taken) == llm.stats().steps == 4
