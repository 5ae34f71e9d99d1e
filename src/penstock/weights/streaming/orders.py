"""Turns between orders of groups that pass through one ring: all that stream, or fewer, where the CPU
computes some feed-forwards, the fewer the fewer rows there are.

A change costs a fill of the ring, since what was there is of the other order. Nothing is waited for on the
host: see `feeder` for why that is safe.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.arch.layout import GroupId, GroupKind, GroupLayout
from penstock.memory.streams import Stream, Ticket
from penstock.ops.matrix import GroupViews
from penstock.ops.row_classes import MOST_TOKENS, class_of
from penstock.weights.streaming.feeder import Feeder
from penstock.weights.streaming.residency import Placement, Use
from penstock.weights.streaming.ring import RingLayout, StreamRates
from penstock.weights.streaming.turns import CpuTurns, PassTimes
from penstock.weights.streaming.views import group_views

_MANY = 64
"""Passes of which the times may be unknown; older ones are left out."""


@dataclass(frozen=True, slots=True)
class RingOrder:
    """RingOrder is an order in which groups are lent, pass after pass.

    views: of groups that do not move. in_ring: of each run in the ring. runs_of: the runs of each group that
    moves. sooner: by layer, the last run that is needed when its mixer begins. feeder: brings the runs; None
    before loading, and where none moves.
    """

    views: Mapping[GroupId, GroupViews]
    in_ring: Sequence[GroupViews]
    runs_of: Mapping[GroupId, Sequence[int]]
    sooner: Mapping[int, int]
    feeder: Feeder | None


class PassTurns:
    """Chooses the order of each pass, and measures what passes take."""

    def __init__(
        self, streamed: RingOrder, shared: Sequence[RingOrder], turns: CpuTurns, compute: Stream
    ) -> None:
        """Begin with passes in which all groups stream. shared: the orders of those that the CPU shares, by
        class of rows."""
        self.streamed, self.shared, self._turns, self._compute = streamed, shared, turns, compute
        self.lent: RingOrder | None = streamed
        """The order in which groups are lent; None while it is changed."""
        self._last: RingOrder | None = None
        """The order of the last pass."""
        self._begun: tuple[int, bool, Ticket] | None = None
        """Class of rows, order and beginning of a pass that is measured."""
        self._measured: deque[tuple[int, bool, Ticket, Ticket]] = deque(maxlen=_MANY)
        self.passes = self.passes_shared = 0
        """Passes that have begun, and those of them that the CPU shares."""

    def choose(self, rows: int) -> RingOrder:
        """Return the order of the next pass, of so many decode rows; 0 for any other step."""
        while self._measured and self._measured[0][3].done:
            kind, shared, begun, ended = self._measured.popleft()
            self._turns.note(kind, ended.when() - begun.when(), shared=shared)
        return self.of_rows(rows) if self._turns.choose(_class(rows)) else self.streamed

    def of_rows(self, rows: int) -> RingOrder:
        """Return the order of passes of so many decode rows that the CPU shares."""
        return self.shared[class_of(rows)]

    def change(self, order: RingOrder) -> None:
        """Fill the ring in another order from now on."""
        self.lent = None
        assert order.feeder is not None, "passes turn before load"
        order.feeder.go_on()

    def begin(self, rows: int) -> None:
        """Note that a pass begins in the order that is lent."""
        kind, shared = _class(rows), self.lent is not self.streamed
        self.passes, self.passes_shared = self.passes + 1, self.passes_shared + shared
        measured = kind is not None and self._last is self.lent
        self._last = self.lent
        self._begun = (kind, shared, self._compute.mark()) if measured and kind is not None else None

    @property
    def predicted(self) -> float:
        """Return what a pass of one decode row, of the kind of the last pass, is predicted to take."""
        streamed = self._last is None or self._last is self.streamed
        return (self._turns.streamed if streamed else self._turns.shared).predicted[0]

    def end(self) -> None:
        """Note that all of the pass has been queued."""
        if self._begun is not None:
            self._measured.append((*self._begun, self._compute.mark()))
            self._begun = None


def turns_of(placement: Placement, rates: StreamRates | None) -> CpuTurns:
    """Return what decides about passes, by what is predicted of both kinds."""
    of = placement.cpu
    assert of is not None, "a placement without passes that the CPU shares"
    fills = (min(placement.device_ring.size, placement.streamed), max(one.ring.size for one in of.orders))
    cost = sum(fills) / rates.host_to_device if rates else 0.0
    streamed = [placement.prediction.seconds] * len(of.predictions)
    shared = [one.seconds for one in of.predictions]
    return CpuTurns(cost, PassTimes(streamed), PassTimes(shared), of.always)


def ring_order(
    uses: Sequence[Use],
    ring: RingLayout,
    layouts: Mapping[GroupId, GroupLayout],
    memory: Tensor,
    views: Mapping[GroupId, GroupViews],
    feeder: Feeder | None,
) -> RingOrder:
    """Return the order of passes with a ring. memory: flat uint8, in which it begins. views: of groups that
    do not move in them."""
    ids = [uses[run.use].id for run in ring.runs]
    places = (memory[run.offset :] for run in ring.runs)
    in_ring = [group_views(layouts[id], place) for id, place in zip(ids, places, strict=True)]
    runs_of: dict[GroupId, list[int]] = {}
    for index, id in enumerate(ids):
        runs_of.setdefault(id, []).append(index)
    runs = [run.use for run in ring.runs]
    sooner = {
        use.id.layer: bisect_right(runs, number) - 1
        for number, use in enumerate(uses)
        if use.id.kind is GroupKind.ATTENTION
    }
    return RingOrder(views, in_ring, runs_of, sooner, feeder)


def _class(rows: int) -> int | None:
    return class_of(rows) if 0 < rows <= MOST_TOKENS else None
