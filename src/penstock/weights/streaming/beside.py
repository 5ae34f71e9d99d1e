"""Chooses which feed-forwards a CPU computes where they rest on HOST, in passes of few rows, while the link
brings other groups: so many that both are busy all the time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from penstock.arch.layout import GroupId, GroupKind
from penstock.base.errors import BudgetError
from penstock.base.tiers import Tier
from penstock.weights.streaming.residency import CpuOrder, CpuPass, Placement, WeightLimits, spread
from penstock.weights.streaming.ring import Prediction, RingLayout, StreamRates, lay_ring, simulate
from penstock.weights.streaming.solver import solve

HAND_OVER = 30e-6
"""Seconds from a device's question to the CPU's work and back."""
GAIN = 1.03
"""Streaming must take at least so many times as long as passes that the CPU shares."""
_TRIED = 12
"""Numbers of feed-forwards that are tried first for a class of more rows, evenly spaced."""
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

    The feed-forwards are spread evenly among those on HOST; there are as many as are best for so many rows.
    One group streams at least. Where there is room, all groups but feed-forwards stay on the device: a group
    that streams is then on its way while the CPU is at those before it, however small the ring is. Other
    passes take as long as with `placement`, or at most LOSS times as long.
    """
    if not rates.cpu_read or placement.everything_resident or placement.read:
        return placement
    found = [_shared(one, rates, rows) for one in (placement, *_others_first(placement, limits, rates))]
    best = min((one for one in found if one.cpu), key=_shared_seconds, default=placement)
    faster = rows.always or GAIN * _shared_seconds(best) < placement.prediction.seconds
    return best if faster else placement


def predict_shared(
    placement: Placement, rates: StreamRates, kind: int, seconds: Sequence[float]
) -> Prediction:
    """Return how long passes of a class of rows that the CPU shares take. seconds: of the device's arithmetic
    for each use, as if it computed all."""
    assert placement.cpu is not None, "a placement without passes that the CPU shares"
    return _predict(placement, placement.cpu.orders[kind], rates, kind, seconds)


def cpu_seconds(placement: Placement, rates: StreamRates, kind: int) -> float:
    """Return for how long the CPU computes in a pass of a class of rows that it shares."""
    assert placement.cpu is not None, "a placement without passes that the CPU shares"
    sizes = {use.id: use.size for use in placement.uses}
    return sum(sizes[id] / rates.cpu_read[kind] + HAND_OVER for id in placement.cpu.orders[kind].groups)


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
    """Return a placement with the shared passes that are best with its homes; without any if none can be.

    A class of more rows has an order of its own where that gains more than twice a fill of the ring: so it
    pays even where steps of two classes take turns.
    """
    search = _OrderSearch(placement, rates)
    if not search.most:
        return placement
    count, found = search.best(0, range(1, search.most + 1))
    orders, predictions = [search.order(count)], [found]
    for kind in range(1, len(rates.cpu_read)):
        fewer, found = search.best(kind, search.fewer(kind, count))
        before = _predict(placement, orders[-1], rates, kind)
        if before.seconds - found.seconds > 2 * placement.device_ring.size / rates.host_to_device:
            count = fewer
        else:
            found = before
        orders.append(search.order(count))
        predictions.append(found)
    of = CpuPass(tuple(orders), tuple(predictions), rows.always, rows.hidden, rows.dtype)
    return replace(placement, cpu=of)


class _OrderSearch:
    """Searches for the feed-forwards that the CPU computes, by their number."""

    def __init__(self, placement: Placement, rates: StreamRates) -> None:
        homes = placement.homes
        self._placement, self._rates = placement, rates
        self._on_host = [
            use.id for use in placement.uses if use.id.kind is GroupKind.FFN and homes[use.id] is Tier.HOST
        ]
        streamed = len({use.id for use in placement.uses if homes[use.id] is Tier.HOST})
        self.most = min(len(self._on_host), streamed - 1)
        """As many as the CPU computes at most."""
        self._orders = dict[int, CpuOrder]()

    def order(self, count: int) -> CpuOrder:
        """Return the order in which the CPU computes so many."""
        if count not in self._orders:
            taken = spread([1] * len(self._on_host), count, len(self._on_host))
            groups = tuple(compress(self._on_host, taken))
            self._orders[count] = CpuOrder(groups, _ring_without(self._placement, frozenset(groups)))
        return self._orders[count]

    def best(self, kind: int, counts: Iterable[int]) -> tuple[int, Prediction]:
        """Return the number with which passes of a class of rows are shortest."""
        found = {count: _predict(self._placement, self.order(count), self._rates, kind) for count in counts}
        count = min(found, key=lambda count: found[count].seconds)
        return count, found[count]

    def fewer(self, kind: int, most: int) -> Iterable[int]:
        """Return numbers up to `most` that are worth a trial: those around the best of every few."""
        step = max(most // _TRIED, 1)
        around, _ = self.best(kind, range(most, 0, -step))
        return range(max(around - step + 1, 1), min(around + step, most + 1))


def _ring_without(placement: Placement, groups: frozenset[GroupId]) -> RingLayout:
    """Return the ring, in the same memory, of a pass in which these groups do not stream."""
    runs = [
        (run.use, run.start, run.size)
        for run in placement.device_ring.runs
        if placement.uses[run.use].id not in groups
    ]
    return lay_ring(runs, placement.device_ring.size)


def _predict(
    placement: Placement,
    order: CpuOrder,
    rates: StreamRates,
    kind: int,
    by_device: Sequence[float] | None = None,
) -> Prediction:
    """Return how long passes of a class of rows take. What the CPU does counts as arithmetic: the device
    waits for it. by_device: seconds for each use there; without it, of reading the group."""
    groups = frozenset(order.groups)
    device = by_device or [use.size / rates.device_read for use in placement.uses]
    seconds = [
        use.size / rates.cpu_read[kind] + HAND_OVER if use.id in groups else its
        for use, its in zip(placement.uses, device, strict=True)
    ]
    sizes = [use.size for use in placement.uses]
    homes = [placement.homes[use.id] for use in placement.uses]
    return simulate(sizes, homes, order.ring, 0, rates, seconds, placement.piece)
