"""Chooses which feed-forwards a CPU computes where they rest on HOST, in passes of few rows, while the link
brings other groups: so many that both are busy all the time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import compress

from penstock.arch.layout import GroupId, GroupKind
from penstock.base.errors import BudgetError
from penstock.base.tiers import Tier
from penstock.weights.streaming.residency import CpuPass, Placement, WeightLimits, spread
from penstock.weights.streaming.ring import Prediction, RingLayout, StreamRates, lay_ring, simulate
from penstock.weights.streaming.solver import solve

HAND_OVER = 30e-6
"""Seconds from a device's question to the CPU's work and back."""
GAIN = 1.03
"""Streaming must take at least so many times as long as passes that the CPU shares."""
LOSS = 1.005
"""Passes that the CPU does not share may take at most so many times as long as without it."""


@dataclass(frozen=True, slots=True)
class RowSpec:
    """RowSpec says what a CPU gets: rows of `hidden` numbers of `dtype`. always: whether it must compute."""

    hidden: int
    dtype: str
    always: bool


def share_passes(placement: Placement, limits: WeightLimits, rates: StreamRates, rows: RowSpec) -> Placement:
    """Return a placement with the passes that a CPU shares, where its rates are known and they are faster.

    The feed-forwards are spread evenly among those on HOST; there are as many as are best for one row. One
    group streams at least. Where there is room, all groups but feed-forwards stay on the device: a group that
    streams is then on its way while the CPU is at those before it, however small the ring is. Other passes
    take as long as with `placement`, or at most LOSS times as long.
    """
    if not rates.cpu_read or placement.everything_resident or placement.read:
        return placement
    found = [_shared(one, rates, rows) for one in (placement, *_others_first(placement, limits, rates))]
    best = min((one for one in found if one.cpu), key=_shared_seconds, default=placement)
    faster = rows.always or GAIN * _shared_seconds(best) < placement.prediction.seconds
    return best if faster else placement


def _others_first(placement: Placement, limits: WeightLimits, rates: StreamRates) -> Iterator[Placement]:
    """Yield the placement in which what is no feed-forward stays on the device, if there is one."""
    others = frozenset(use.id for use in placement.uses if use.id.kind is not GroupKind.FFN)
    try:
        found = solve(placement.uses, replace(limits, disk=0, first=others), rates, piece=placement.piece)
    except BudgetError:
        return
    if found.prediction.seconds <= LOSS * placement.prediction.seconds:
        yield found


def _shared_seconds(placement: Placement) -> float:
    return placement.cpu.predictions[0].seconds if placement.cpu else float("inf")


def _shared(placement: Placement, rates: StreamRates, rows: RowSpec) -> Placement:
    """Return a placement with the shared passes that are best with its homes; without any if none can be."""
    homes = placement.homes
    on_host = [
        use.id for use in placement.uses if use.id.kind is GroupKind.FFN and homes[use.id] is Tier.HOST
    ]
    streamed = len({use.id for use in placement.uses if homes[use.id] is Tier.HOST})
    found: tuple[Prediction, frozenset[GroupId], RingLayout] | None = None
    for count in range(1, min(len(on_host), streamed - 1) + 1):
        groups = frozenset(compress(on_host, spread([1] * len(on_host), count, len(on_host))))
        ring = _ring_without(placement, groups)
        prediction = _predict(placement, groups, ring, rates, 0)
        if found is None or prediction.seconds < found[0].seconds:
            found = prediction, groups, ring
    if found is None:
        return placement
    _, groups, ring = found
    predictions = tuple(_predict(placement, groups, ring, rates, kind) for kind in range(len(rates.cpu_read)))
    chosen = tuple(id for id in on_host if id in groups)
    return replace(placement, cpu=CpuPass(chosen, ring, predictions, rows.always, rows.hidden, rows.dtype))


def _ring_without(placement: Placement, groups: frozenset[GroupId]) -> RingLayout:
    """Return the ring, in the same memory, of a pass in which these groups do not stream."""
    runs = [
        (run.use, run.start, run.size)
        for run in placement.device_ring.runs
        if placement.uses[run.use].id not in groups
    ]
    return lay_ring(runs, placement.device_ring.size)


def _predict(
    placement: Placement, groups: frozenset[GroupId], ring: RingLayout, rates: StreamRates, kind: int
) -> Prediction:
    """Return how long passes of a class of rows take. What the CPU does counts as arithmetic: the device
    waits for it."""
    seconds = [
        use.size / rates.cpu_read[kind] + HAND_OVER if use.id in groups else use.size / rates.device_read
        for use in placement.uses
    ]
    sizes = [use.size for use in placement.uses]
    homes = [placement.homes[use.id] for use in placement.uses]
    return simulate(sizes, homes, ring, 0, rates, seconds, placement.piece)
