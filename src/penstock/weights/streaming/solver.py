"""Solves where groups of weights stay: the placement with the shortest predicted pass.

A pass uses the groups in a known order, so nothing is cached: a fixed set stays on DEVICE, as much of the
rest as fits stays on HOST, and what streams does so through rings with the same addresses in every pass.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import compress, pairwise

from penstock.arch.layout import ALIGNMENT, GroupKind, GroupLayout
from penstock.base.errors import BudgetError
from penstock.base.tiers import Tier
from penstock.base.units import format_size
from penstock.weights.streaming.residency import (
    HOST_SLOTS,
    PIECE,
    ExpertRoom,
    Placement,
    Use,
    WeightLimits,
    padded,
    pass_order,
    piece_of,
    spread,
)
from penstock.weights.streaming.ring import (
    Prediction,
    RingLayout,
    StreamRates,
    lay_pieces,
    lay_ring,
    simulate,
)

LEVELS = 8
"""Sizes of the resident set are tried in steps of the largest group divided by this."""
SMALL = 64
"""A group this many times smaller than the largest is kept on DEVICE first: a copy of it costs more in calls
than in bytes."""
EXPERT_RING = (8, 4, 2)
"""Slots on DEVICE through which experts come: one is computed with while others are on their way."""
HOST_EXPERT_RING = 8
"""Slots on HOST through which experts come from DISK; twice as many where these are a small part of all on
HOST, so that half of them are there for what is read ahead."""
_SMALL_PART = 8
EFFORT = 5_000
"""Uses simulated before the best placement found so far will do. Models of a few dozen groups end before."""


def solve(
    uses: Iterable[Use],
    limits: WeightLimits,
    rates: StreamRates,
    seconds: Sequence[float] | None = None,
    piece: int = PIECE,
) -> Placement:
    """Return the placement with the shortest predicted pass; of equals, the one that streams least and has
    the smallest ring.

    seconds: of arithmetic for each use; without it, reading the group at `rates.device_read`. What is tried
    does not depend on `limits.device`, only what is allowed does, so more device memory never predicts a
    slower pass (in large models, where EFFORT leaves some untried, by at most about a thousandth). Raises
    BudgetError if the largest group does not fit on the device, a piece does not fit on the host, or the rest
    has no home.
    """
    uses = tuple(uses)
    search = _PlacementSearch(uses, limits, rates, _arithmetic(uses, rates, seconds), piece)
    if search.total <= search.most:
        found = search.weigh([Tier.DEVICE] * len(search.sizes), RingLayout(), 0)
        return search.placement(found)
    search.check_device()
    best: _Candidate | None = None
    effort, tried = 0, set[tuple[int, ...]]()
    for stride, share in (
        (LEVELS // 2, 0.5),
        (1, 1.0),
    ):  # In large steps first, so that every size of ring has its turn.
        for bound, base, level in search.levels(stride):
            if best and (bound >= best.seconds or effort > share * EFFORT):
                break
            resident = search.resident(base, level)
            if resident in tried or sum(search.sizes[group] for group in resident) > search.most:
                continue
            tried.add(resident)
            for candidate in search.candidates(resident, best.seconds if best else float("inf")):
                effort += len(uses)
                if best is None or candidate.seconds < best.seconds:
                    best = candidate
    if best is None:
        raise search.refusal()
    return search.placement(best)


def predict(
    placement: Placement, rates: StreamRates, seconds: Sequence[float] | None = None, piece: int = PIECE
) -> Prediction:
    """Return how long passes take in the steady state when disk, copy stream and arithmetic each work in
    order, held back by the rings alone.

    DISK groups are read in pieces, each into a slot of the host ring when its last occupant has been copied
    on; pieces and HOST groups are copied in the order of the pass, each byte when what it overwrites is done
    with, and arithmetic starts when a group is there.
    """
    homes = [placement.homes[use.id] for use in placement.uses]
    sizes = [use.size for use in placement.uses]
    arithmetic = _arithmetic(placement.uses, rates, seconds)
    return simulate(sizes, homes, placement.device_ring, placement.host_ring.size, rates, arithmetic, piece)


def solve_mixture(
    uses: Iterable[Use],
    size: int,
    experts: int,
    limits: WeightLimits,
    rates: StreamRates,
    seconds: Sequence[float] | None = None,
    piece: int = PIECE,
) -> tuple[Placement, ExpertRoom]:
    """Return a placement for `uses`, the groups that every pass needs, and what is then left for `experts`
    groups of `size` bytes each.

    The former come first on every tier: every pass needs them, but few need an expert. Raises BudgetError.
    """
    uses = tuple(uses)
    dense = sum({use.id: use.size for use in uses}.values())
    if dense + experts * size <= limits.device:
        placement = solve(uses, replace(limits, device=limits.device - experts * size), rates, seconds, piece)
        return placement, ExpertRoom(size, experts, experts, 0)
    copies = limits.copies and experts * size <= limits.host
    rings = limits.rings(EXPERT_RING, (limits.device - dense) // size) if copies else EXPERT_RING
    ring = next((slots for slots in rings if dense + slots * size <= limits.device), rings[-1])
    if limits.device - ring * size <= 0:
        raise BudgetError(
            f"{format_size(limits.device)} of device memory for weights is too small for {ring} experts of "
            f"{format_size(size)} at a time; raise device_memory"
        )
    # Where experts need the disk, some slots on HOST are theirs whatever else wants them.
    beside = limits.host - (2 * size if dense + experts * size > limits.device + limits.host else 0)
    placement = solve(
        uses, replace(limits, device=limits.device - ring * size, host=max(beside, 0)), rates, seconds, piece
    )
    on_device = (limits.device - placement.resting(Tier.DEVICE) - placement.device_ring.size) // size - ring
    if on_device >= experts:
        return placement, ExpertRoom(size, experts, experts, 0)
    free = limits.host - placement.resting(Tier.HOST) - placement.host_ring.size
    if limits.copies and free // size >= experts:
        return placement, ExpertRoom(size, experts, 0, experts, ring, slots=on_device, copies=True)
    on_host, host_ring = min(free // size, experts - on_device), 0
    if on_device + on_host < experts:
        if limits.disk == 0:
            raise BudgetError(
                f"{experts} experts of {format_size(size)} do not fit into {format_size(limits.device)} on "
                f"the device and {format_size(limits.host)} on the host, and there is no disk for the rest; "
                "raise host_memory, or give a disk: `penstock bench` has --scratch for that, `penstock "
                "plan` --disk-rate"
            )
        host_ring = min(HOST_EXPERT_RING, free // size)
        if free // size >= 2 * _SMALL_PART * HOST_EXPERT_RING:
            host_ring *= 2
        if host_ring < 1:
            raise BudgetError(
                f"{format_size(limits.host)} of host memory is too small for one expert of "
                f"{format_size(size)}, through which the others would stream from disk; raise host_memory"
            )
        on_host = free // size - host_ring
    return placement, ExpertRoom(size, experts, on_device, on_host, ring, host_ring)


def solve_model(
    layouts: Sequence[GroupLayout], tied: bool, limits: WeightLimits, rates: StreamRates, disk: bool
) -> tuple[Placement, ExpertRoom | None, bool]:
    """Return a placement for all groups of a model, the room for its experts, and whether the disk is needed.

    It does without the disk (`limits.disk` is not looked at) if that can be, and else uses it, if there is
    one. Raises BudgetError.
    """
    uses = [Use(layout.id, padded(layout)) for layout in pass_order(layouts, tied)]
    experts = [padded(layout) for layout in layouts if layout.id.kind is GroupKind.EXPERT]
    piece = piece_of(layouts)

    def solved(most: int | None) -> tuple[Placement, ExpertRoom | None]:
        if not experts:
            return solve(uses, replace(limits, disk=most), rates, piece=piece), None
        largest = max(experts)  # Slots are of one size, so that any expert may come to any of them.
        most_of = replace(limits, disk=most)
        placement, room = solve_mixture(uses, largest, len(experts), most_of, rates, piece=piece)
        return placement, replace(room, total=0 if min(experts) == largest else sum(experts))

    try:
        return *solved(0), False
    except BudgetError:
        if not disk:
            raise
        return *solved(None), True


def _arithmetic(uses: Sequence[Use], rates: StreamRates, seconds: Sequence[float] | None) -> Sequence[float]:
    assert seconds is None or len(seconds) == len(uses)
    return [use.size / rates.device_read for use in uses] if seconds is None else seconds


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A placement is considered: homes by number of the group, and a host ring that is sized but not laid
    out."""

    homes: Sequence[Tier]
    device_ring: RingLayout
    host_ring: int
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.seconds


class _PlacementSearch:
    """Searches for a placement: a resident set, a ring on DEVICE, a ring on HOST. Groups are numbers here."""

    def __init__(
        self,
        uses: tuple[Use, ...],
        limits: WeightLimits,
        rates: StreamRates,
        seconds: Sequence[float],
        piece: int,
    ) -> None:
        assert uses
        assert all(use.size > 0 and use.size % ALIGNMENT == 0 for use in uses)
        self.uses, self.limits, self.rates, self.seconds, self.piece = uses, limits, rates, seconds, piece
        self.ids = list(dict.fromkeys(use.id for use in uses))
        number = {id: group for group, id in enumerate(self.ids)}
        self.order = [number[use.id] for use in uses]
        self.flow = [use.size for use in uses]
        self.sizes, self.times = [0] * len(self.ids), [0] * len(self.ids)
        for group, size in zip(self.order, self.flow, strict=True):
            assert self.sizes[group] in (0, size)
            self.sizes[group] = size
            self.times[group] += 1
        self.total, self.largest, self.most_times = sum(self.sizes), max(self.sizes), max(self.times)
        self.step = max(self.largest // LEVELS, 1)
        self.work = sum(seconds)
        self.most = limits.device if limits.resident is None else min(limits.device, limits.resident)
        self.kept = limits.host if limits.kept is None else min(limits.host, limits.kept)
        self.bases = self._bases()

    def _bases(self) -> list[set[int]]:
        """Return what may be kept before all others: groups that one ring would have to be wider for, small
        ones, and those used several times."""
        if first := self.limits.first:
            return [{group for group, id in enumerate(self.ids) if id in first}]
        common = max((size for size, count in Counter(self.sizes).items() if count > 2), default=self.largest)
        small = {group for group, size in enumerate(self.sizes) if size * SMALL <= self.largest}
        several = {group for group, times in enumerate(self.times) if times > 1}
        wide = {group for group, size in enumerate(self.sizes) if size > common}
        return list(
            map(
                set,
                dict.fromkeys(map(frozenset, (small | several | wide, small | several, small, set[int]()))),
            )
        )

    def check_device(self) -> None:
        """Raise BudgetError if the largest group, or the ring that was asked for, does not fit on DEVICE."""
        asked, ring = format_size(self.limits.device), self.limits.device_ring
        largest = max(self.uses, key=lambda use: use.size)
        if self.largest > self.limits.device:
            raise BudgetError(
                f"{asked} of device memory for weights is too small for the largest group, {largest.id} of "
                f"{format_size(self.largest)}; raise device_memory"
            )
        if ring is not None and not self.largest <= ring <= self.limits.device:
            raise BudgetError(
                f"a ring of {format_size(ring)} must hold the largest group, {largest.id} of "
                f"{format_size(self.largest)}, and fit into {asked} of device memory; give a --window "
                "between the two"
            )

    def refusal(self) -> BudgetError:
        """Return the error that says why not even the placement that needs least has a home for
        everything."""
        limits = self.limits
        what = (
            f"weights of {format_size(self.total)} do not fit into {format_size(limits.device)} on the device"
        )
        if limits.disk == 0:
            return BudgetError(
                f"{what} with its ring and {format_size(self.kept)} on the host, and there is no disk for "
                "the rest; raise host_memory, or give a disk: `penstock bench` has --scratch for that, "
                "`penstock plan` --disk-rate"
            )
        if limits.host < self.piece:
            return BudgetError(
                f"{what}, and {format_size(limits.host)} of host memory is too small for a ring of one "
                f"piece of {format_size(self.piece)}, through which the rest would stream from disk; raise "
                "host_memory"
            )
        return BudgetError(
            f"{what}, {format_size(self.kept)} on the host and {format_size(limits.disk or 0)} on disk with "
            "their rings; raise device_memory or host_memory"
        )

    # ---- the resident set

    def levels(self, stride: int) -> Iterator[tuple[float, int, int]]:
        """Yield resident sets, the most promising first: the seconds that none of this level can beat, what
        is kept first, and how much more."""
        return merge(*(self._levels_over(base, stride) for base in range(len(self.bases))))

    def _levels_over(self, base: int, stride: int) -> Iterator[tuple[float, int, int]]:
        kept = self.bases[base]
        first = sum(self.sizes[group] for group in kept)
        streams = sum(size for group, size in zip(self.order, self.flow, strict=True) if group not in kept)
        times = max((times for group, times in enumerate(self.times) if group not in kept), default=1)
        top = min(self.total - first, self.most - first + self.largest // 2) // self.step
        for level in range(top // stride * stride, -1, -stride):
            # A level takes up to half a group more than it says.
            yield self._bound(max(streams - times * (level * self.step + self.largest // 2), 0)), base, level

    def _bound(self, streamed: int, host_ring: int = 0) -> float:
        """Return the seconds that no pass with so many streamed bytes can beat."""
        read = streamed - self.most_times * min(self.kept, self.limits.host - host_ring)
        if read > 0 and self.limits.disk == 0:
            return float("inf")
        return max(
            streamed / self.rates.host_to_device,
            read / self.rates.disk_to_host if read > 0 else 0.0,
            self.work,
        )

    def resident(self, base: int, level: int) -> tuple[int, ...]:
        """Return the numbers of the groups of a resident set: a base, and `level` steps of the others, spread
        evenly."""
        kept = self.bases[base]
        others = [group for group in range(len(self.ids)) if group not in kept]
        sizes = [self.sizes[group] for group in others]
        taken = spread(sizes, level * self.step, sum(sizes))
        return tuple(sorted(kept.union(compress(others, taken))))

    # ---- the rings

    def candidates(self, resident: tuple[int, ...], best: float) -> Iterator[_Candidate]:
        """Yield rings around a resident set, as long as they can beat `best` seconds; larger ones only while
        they gain."""
        room = self.limits.device - sum(self.sizes[group] for group in resident)
        stays = set(resident)
        runs = [
            (use, 0, size)
            for use, (group, size) in enumerate(zip(self.order, self.flow, strict=True))
            if group not in stays
        ]
        streamed = sum(size for _, _, size in runs)
        layouts: list[RingLayout] = []
        for host_ring, homes in self._homes(stays):
            before = float("inf")
            for index, ring in enumerate(self._device_rings([size for _, _, size in runs])):
                if ring > room or self._bound(streamed, host_ring) >= best:
                    break
                if index == len(layouts):
                    layouts.append(lay_ring(runs, ring))
                found = self.weigh(homes, layouts[index], host_ring)
                yield found
                best = min(best, found.seconds)
                if found.seconds >= before:
                    break
                before = found.seconds

    def _device_rings(self, sizes: Sequence[int]) -> list[int]:
        """Return sizes of the ring to try: the largest streamed group alone, where a copy waits for the
        arithmetic before it; it and a neighbour; several of it."""
        if self.limits.device_ring is not None:
            return [self.limits.device_ring]
        largest, total = max(sizes), sum(sizes)
        pair = max(a + b for a, b in pairwise([*sizes, sizes[0]]))
        return sorted(
            {min(ring, total) for ring in (largest, pair, 2 * largest, 3 * largest, 4 * largest, 8 * largest)}
        )

    def _homes(self, stays: set[int]) -> Iterator[tuple[int, list[Tier]]]:
        """Yield homes for all groups, with the size of the host ring that they need; larger ones last."""
        streamed = [group for group in range(len(self.ids)) if group not in stays]
        total = sum(self.sizes[group] for group in streamed)
        if total <= self.kept:
            yield 0, [Tier.DEVICE if group in stays else Tier.HOST for group in range(len(self.ids))]
            return
        fitting, useful = self.limits.host // self.piece, -(-total // self.piece)
        for slots in sorted({min(slots, fitting, useful) for slots in HOST_SLOTS}):
            ring = slots * self.piece
            kept = self._kept(streamed, min(self.kept, self.limits.host - ring))
            disk = total - sum(self.sizes[group] for group in kept)
            if slots and (self.limits.disk is None or disk <= self.limits.disk):
                homes = [
                    Tier.DEVICE if group in stays else Tier.HOST if group in kept else Tier.DISK
                    for group in range(len(self.ids))
                ]
                yield ring, homes

    def _kept(self, streamed: Sequence[int], room: int) -> set[int]:
        """Return the groups that stay on HOST: those used several times first, then evenly among the streamed
        ones, then what still fits."""
        kept = set[int]()

        def keep(groups: Iterable[int]) -> None:
            nonlocal room
            for group in groups:
                if self.sizes[group] <= room:
                    kept.add(group)
                    room -= self.sizes[group]

        keep(
            sorted(
                (group for group in streamed if self.times[group] > 1), key=lambda group: -self.times[group]
            )
        )
        others = [group for group in streamed if group not in kept]
        sizes = [self.sizes[group] for group in others]
        share, total = min(room, sum(sizes)), sum(sizes)
        taken = spread(sizes, share, total)
        while sum(compress(sizes, taken)) > room:
            share = max(share - self.step, 0)
            taken = spread(sizes, share, total)
        keep(compress(others, taken))
        keep(sorted((group for group in others if group not in kept), key=lambda group: -self.sizes[group]))
        return kept

    def weigh(self, homes: Sequence[Tier], ring: RingLayout, host_ring: int) -> _Candidate:
        """Return the candidate with its prediction."""
        by_use = [homes[group] for group in self.order]
        return _Candidate(
            homes,
            ring,
            host_ring,
            simulate(self.flow, by_use, ring, host_ring, self.rates, self.seconds, self.piece),
        )

    def placement(self, chosen: _Candidate) -> Placement:
        """Return the placement that a candidate is, with its host ring laid out."""
        host_ring = RingLayout()
        if chosen.host_ring:
            read = [
                (use, self.flow[use])
                for use, group in enumerate(self.order)
                if chosen.homes[group] is Tier.DISK
            ]
            host_ring = lay_pieces(read, chosen.host_ring, self.piece)
        homes = dict(zip(self.ids, chosen.homes, strict=True))
        return Placement(self.uses, homes, chosen.device_ring, host_ring, chosen.prediction, self.piece)
