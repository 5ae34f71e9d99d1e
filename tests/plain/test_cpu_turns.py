"""Which feed-forwards a CPU computes, and in which passes, against machines of which it is known what each
way takes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, repeat

import numpy as np
import pytest

from penstock.arch.layout import GroupId, GroupKind
from penstock.base.tiers import Tier
from penstock.engine.cpu_share import FALL
from penstock.weights.streaming.beside import GAIN, HAND_OVER, LOSS, RowSpec, predict_shared, share_passes
from penstock.weights.streaming.residency import Placement, Use, WeightLimits
from penstock.weights.streaming.ring import StreamRates
from penstock.weights.streaming.solver import solve
from penstock.weights.streaming.turns import AGAIN, CpuTurns, PassTimes

GB = 1 << 30
MIXER, FEED_FORWARD, ENDS = 80 << 20, 370 << 20, 1 << 30
"""Bytes of groups of a 70B model in int4, nearly."""
ROWS = RowSpec(8192, "bfloat16", always=False)
BY_CLASS = 80e9, 60e9, 45e9, 30e9, 18e9
RATES = StreamRates(25e9, 0.0, 3e12, BY_CLASS)


def uses(layers: int) -> list[Use]:
    found = [Use(GroupId(GroupKind.EMBEDDING), ENDS)]
    for layer in range(layers):
        found += [
            Use(GroupId(GroupKind.ATTENTION, layer), MIXER),
            Use(GroupId(GroupKind.FFN, layer), FEED_FORWARD),
        ]
    return [*found, Use(GroupId(GroupKind.HEAD), ENDS)]


def placed(device: int, rates: StreamRates = RATES, layers: int = 80, rows: RowSpec = ROWS) -> Placement:
    limits = WeightLimits(device, 100 * GB, 0)
    return share_passes(solve(uses(layers), limits, rates), limits, rates, rows)


# ---- which feed-forwards


@pytest.mark.parametrize(("cpu", "least"), [(35e9, 2.0), (40e9, 2.25), (80e9, 3.8), (110e9, 4.8)])
def test_a_70b_in_24_gib_is_twice_as_fast_and_more(cpu: float, least: float) -> None:
    """At 25 GB/s of the link: both are busy nearly always, whatever the CPU takes."""
    placement = placed(22 * GB, replace(RATES, cpu_read=(cpu, *BY_CLASS[1:])))
    assert placement.cpu is not None
    alone, shared = placement.prediction, placement.cpu.predictions[0]
    assert alone.seconds / shared.seconds > least
    whole = placement.streamed / (RATES.host_to_device + cpu)
    device = sum(use.size for use in placement.uses) / RATES.device_read
    assert shared.seconds < 1.15 * (whole + device)


def test_more_rows_take_longer() -> None:
    placement = placed(22 * GB)
    assert placement.cpu is not None
    times = [one.seconds for one in placement.cpu.predictions]
    assert times == sorted(times), "more rows take longer"


@pytest.mark.parametrize(("device", "link"), [(8, 50e9), (12, 13e9), (22, 25e9), (22, 50e9)])
@pytest.mark.parametrize("cpu", [40e9, 60e9])
def test_of_more_rows_the_cpu_computes_fewer_where_that_pays(device: int, link: float, cpu: float) -> None:
    """More than two fills of the ring: then it pays even if steps of two orders take turns."""
    rates = StreamRates(link, 0.0, 3e12, tuple(cpu * part for part in FALL))
    one = placed(device * GB, replace(rates, cpu_read=(cpu,)), rows=replace(ROWS, always=True))
    own = placed(device * GB, rates, rows=replace(ROWS, always=True))
    assert one.cpu is not None
    assert own.cpu is not None
    assert own.cpu.orders[0] == one.cpu.orders[0]
    counts = [len(order.groups) for order in own.cpu.orders]
    assert counts == sorted(counts, reverse=True)
    fill = own.device_ring.size / link
    arithmetic = [use.size / rates.device_read for use in own.uses]
    for kind in range(1, 5):
        kept = replace(own.cpu, orders=(own.cpu.orders[kind - 1],) * 5)
        before = predict_shared(replace(own, cpu=kept), rates, kind, arithmetic).seconds
        found = own.cpu.predictions[kind].seconds
        assert found == pytest.approx(predict_shared(own, rates, kind, arithmetic).seconds)
        assert (before - found > 2 * fill) == (counts[kind] != counts[kind - 1])
    many = replace(own.cpu, orders=(own.cpu.orders[0],) * 5)
    alone = predict_shared(replace(own, cpu=many), rates, 3, arithmetic).seconds
    if (device, link) == (22, 25e9):
        assert alone / own.cpu.predictions[3].seconds > 1.13


def test_feed_forwards_that_the_cpu_computes_are_far_apart() -> None:
    """So what streams has the time to come."""
    placement = placed(12 * GB, replace(RATES, cpu_read=(25e9,) * 5))
    assert placement.cpu is not None
    layers = [id.layer for id in placement.cpu.orders[0].groups]
    on_host = [
        use.id.layer
        for use in placement.uses
        if use.id.kind is GroupKind.FFN and placement.homes[use.id] is Tier.HOST
    ]
    left = [layer for layer in on_host if layer not in layers]
    assert layers == sorted(layers)
    assert len(left) > 8
    gaps = np.diff([on_host.index(layer) for layer in left])
    assert gaps.max() - gaps.min() <= 1, "spread evenly"


@pytest.mark.parametrize("device", [4, 12, 22, 30, 36])
@pytest.mark.parametrize("link", [6e9, 25e9, 55e9])
@pytest.mark.parametrize("cpu", [2e9, 20e9, 120e9])
def test_passes_are_shared_where_that_is_faster(device: int, link: float, cpu: float) -> None:
    """Whatever the rates: the same homes and the same memory, each group once, in order."""
    rates = replace(RATES, host_to_device=link, cpu_read=(cpu,) * 5)
    limits = WeightLimits(device * GB, 100 * GB, 0)
    without = solve(uses(40), limits, rates)
    for rows in (ROWS, replace(ROWS, always=True)):
        alone = share_passes(without, limits, rates, rows)
        of = alone.cpu
        if of is None:
            assert alone == without
            assert alone.everything_resident or (not rows.always and cpu < link)
            continue
        assert alone.prediction.seconds <= LOSS * without.prediction.seconds
        assert alone.resting(Tier.DEVICE) + alone.device_ring.size <= limits.device
        assert rows.always or GAIN * of.predictions[0].seconds < alone.prediction.seconds
        before = [alone.uses[run.use].id for run in alone.device_ring.runs]
        for order in of.orders:
            assert order.ring.size <= alone.device_ring.size
            passing = [alone.uses[run.use].id for run in order.ring.runs]
            assert passing == [id for id in before if id not in order.groups]
            assert passing
        assert all(id.kind is GroupKind.FFN and alone.homes[id] is Tier.HOST for id in of.groups)
        assert of.predictions[0].seconds >= len(of.orders[0].groups) * (FEED_FORWARD / cpu + HAND_OVER)


@pytest.mark.parametrize(("device", "link"), [(8, 25e9), (10, 6e9)])
def test_other_passes_hardly_suffer(device: int, link: float) -> None:
    """With all but feed-forwards on the device shared passes would be faster here, others 3 to 9 % slower."""
    rates, limits = replace(RATES, host_to_device=link), WeightLimits(device * GB, 100 * GB, 0)
    without = solve(uses(24), limits, rates)
    others = frozenset(use.id for use in without.uses if use.id.kind is not GroupKind.FFN)
    first = solve(without.uses, replace(limits, first=others), rates)
    assert first.prediction.seconds > 1.02 * without.prediction.seconds
    found = share_passes(without, limits, rates, ROWS)
    assert found.cpu is not None
    assert found.prediction.seconds <= 1.005 * without.prediction.seconds


def test_of_what_the_cpu_s_rate_is_not_known_it_computes_nothing() -> None:
    assert placed(22 * GB, replace(RATES, cpu_read=())).cpu is None


def test_what_comes_from_disk_is_left_to_the_link() -> None:
    rates = replace(RATES, disk_to_host=3e9)
    limits = WeightLimits(12 * GB, 6 * GB)
    found = solve(uses(80), limits, rates)
    assert found.read
    assert share_passes(found, limits, rates, replace(ROWS, always=True)) == found


# ---- in which passes


@dataclass
class Machine:
    """Seconds of a decode pass by class of rows, streamed and shared; of another pass; of a fill of the
    ring. slows: how many times as long as predicted shared passes take."""

    streamed: Sequence[float] = (0.64, 0.64, 0.64, 0.65, 0.66)
    shared: Sequence[float] = (0.15, 0.18, 0.25, 0.4, 0.6)
    other: float = 1.0
    fill: float = 0.04
    slows: float = 1.0

    def turns(self, *, always: bool = False) -> CpuTurns:
        return CpuTurns(2 * self.fill, PassTimes(self.streamed), PassTimes(self.shared), always)

    def run(self, turns: CpuTurns, steps: Iterable[int | None]) -> tuple[float, float, int]:
        """What steps took, what they would have without the CPU, and how many of them it shared. Each is a
        class of rows, or None."""
        took, alone, shared, last = 0.0, 0.0, 0, False
        for kind in steps:
            own = turns.choose(kind)
            assert not (own and kind is None), "only decode rows"
            streamed = self.other if kind is None else self.streamed[kind]
            seconds = streamed if not own or kind is None else self.shared[kind] * self.slows
            if kind is not None and own == last:
                turns.note(kind, seconds, shared=own)
            took += seconds + self.fill * (own != last)
            alone, shared, last = alone + streamed, shared + own, own
        return took, alone, shared


def test_long_answers_are_shared_nearly_from_the_beginning() -> None:
    took, alone, shared = Machine().run(turns := Machine().turns(), [None, *repeat(0, 300)])
    assert shared > 290
    assert alone / took > 3.8
    assert Machine().run(turns, [None, *repeat(0, 20)])[2] >= 19, "what it costs is known to pay"
    slow = Machine(fill=1.5)
    slow.run(turns := slow.turns(), [None, *repeat(0, 300)])
    assert slow.run(turns, [None, *repeat(0, 20)])[2] >= 19, "also where it costs much"


@pytest.mark.parametrize("answer", [1, 2, 3, 5, 8, 20])
@pytest.mark.parametrize("fill", [0.04, 0.3, 1.5])
def test_prompts_between_short_answers_cost_next_to_nothing(answer: int, fill: float) -> None:
    """However often both kinds of steps change, all together takes at most 3 % longer than streaming."""
    machine = Machine(fill=fill)
    steps = list(islice(cycle([None, *repeat(0, answer)]), 1200))
    took, alone, _ = machine.run(machine.turns(), steps)
    assert took < 1.03 * alone


def test_answers_as_long_as_what_was_waited_for_cost_little() -> None:
    """The worst that can come: as soon as passes are shared, a prompt comes."""
    machine = Machine(shared=(0.6,) * 5, fill=0.3)
    turns, took, alone, last = machine.turns(), 0.0, 0.0, False
    for _ in range(3000):
        kind = None if last else 0
        own = turns.choose(kind)
        seconds = machine.other if kind is None else (machine.shared if own else machine.streamed)[0]
        if kind is not None and own == last:
            turns.note(0, seconds, shared=own)
        took += seconds + machine.fill * (own != last)
        alone += machine.other if kind is None else machine.streamed[0]
        last = own
    assert took < 1.03 * alone


@pytest.mark.parametrize("slows", [1.0, 4.2, 4.4, 8.0, 40.0])
def test_a_cpu_that_is_slower_than_predicted_is_left_for_a_while(slows: float) -> None:
    machine = Machine(slows=slows)
    turns = machine.turns()
    took, alone, shared = machine.run(turns, repeat(0, 3000))
    assert took < 1.03 * alone
    assert (shared > 1500) == (slows < 4.3)
    assert shared > 0, "it was tried"


def test_a_cpu_that_is_fast_again_is_found() -> None:
    machine, turns = Machine(slows=8.0), Machine().turns()
    machine.run(turns, repeat(0, 300))
    assert Machine().run(turns, repeat(0, 40 * AGAIN))[2] > 20 * AGAIN


def test_classes_of_rows_are_judged_apart() -> None:
    """Sixteen rows are faster by the link, one is not; and both come by turns."""
    machine = Machine(shared=(0.15, 0.18, 0.25, 0.4, 0.9))
    assert machine.run(machine.turns(), repeat(4, 200))[2] == 0
    steps = list(islice(cycle([*repeat(0, 100), *repeat(4, 100)]), 2000))
    took, alone, shared = machine.run(machine.turns(), steps)
    assert 900 < shared < 1000
    assert took < 0.65 * alone
    rng = np.random.default_rng(0)
    took, alone, _ = machine.run(machine.turns(), rng.choice([0, 4], 2000).tolist())
    assert took < 1.03 * alone


def test_where_the_cpu_must_it_takes_all_steps_of_few_rows() -> None:
    machine = Machine(slows=40.0)
    assert machine.run(machine.turns(always=True), [None, 0, 1, None, 4, 4, *repeat(0, 50)])[2] == 54
