"""Lays out the rings through which weights pass: at which addresses, what a copy must wait for, and how long
a pass takes.

Why a ring is safe: one stream copies, in order, and one computes, in order. Before byte `at` of a run is
overwritten the copy waits for the last run that still uses what lies there; whatever was used before that is
then done too, and so is what an earlier copy waited for. The waits are therefore few, and each of them is
needed.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.base.tiers import Tier

PASSES = 12
SKEW = 0.0008
"""Seconds by which ranks are apart when a copy waits for arithmetic that they do together: 0.3, 0.8 and 1.5
ms on three pairs of H200."""
GRAINS, FEW = 8, 1024
"""A prediction follows more than FEW pieces in a pass not one by one, but in grains of as many as give the
host ring GRAINS slots."""


class Link(StrEnum):
    """Names what a pass may wait for: reads, copies or arithmetic."""

    DISK = "disk"
    LINK = "link"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class StreamRates:
    """Holds measured bytes per second: pinned HOST to DEVICE, DISK to HOST (0 without a disk), what
    arithmetic reads from DEVICE memory, and what a CPU that computes feed-forwards reads of them on HOST, by
    class of rows (empty where none does). And seconds that a copy waits longer for arithmetic than this takes
    by itself, where several ranks do it together."""

    host_to_device: float
    disk_to_host: float
    device_read: float
    cpu_read: tuple[float, ...] = ()
    skew: float = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    """A copy waits: before the bytes of its run from `at` on are written, run `run` must be done with.

    That is this pass's run if it comes before the writer in the pass, else the previous pass's (in the first
    pass there is none).
    """

    run: int
    at: int


@dataclass(frozen=True, slots=True)
class RingRun:
    """Bytes `[start, start + size)` of the group of use `use` pass through the ring at `[offset, offset +
    size)`, in every pass."""

    use: int
    start: int
    size: int
    offset: int
    waits: tuple[Wait, ...]


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Holds all that passes through one allocation in a pass, in order: on DEVICE a run for each use, on HOST
    one for each piece."""

    size: int = 0
    runs: tuple[RingRun, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicts a pass in the steady state: its seconds, and for how many of them each link was busy."""

    seconds: float
    busy: Mapping[Link, float]

    @property
    def stalled(self) -> Mapping[Link, float]:
        """Return for how many of the seconds each link was idle."""
        return {link: max(self.seconds - busy, 0.0) for link, busy in self.busy.items()}

    @property
    def binding(self) -> Link:
        """Return the link that everything else waits for."""
        return max(Link, key=lambda link: self.busy[link])


def lay_ring(runs: Sequence[tuple[int, int, int]], room: int) -> RingLayout:
    """Walk `runs`, each a use, a start and a size, around a ring of at most `room` bytes; none is split, and
    a pass begins at offset 0."""
    offsets, at = [], 0
    for _, _, size in runs:
        at = 0 if at + size > room else at
        offsets.append(at)
        at += size
    ends = [offset + size for offset, (_, _, size) in zip(offsets, runs, strict=True)]
    waits = _waits(offsets, ends)
    return RingLayout(
        max(ends),
        tuple(RingRun(*run, offset, wait) for run, offset, wait in zip(runs, offsets, waits, strict=True)),
    )


def _waits(offsets: Sequence[int], ends: Sequence[int]) -> list[tuple[Wait, ...]]:
    """Return what each run must wait for, once the ring has been filled: the waits of a second pass.

    The ring is kept as spans that do not overlap, in order: where each begins, where it ends, and which visit
    wrote it, counting on through both passes. A visit that the copy stream has waited for, and all visits
    before it, need not be waited for again.
    """
    count, waited = len(offsets), -1
    begins, spans = list[int](), list[tuple[int, int, int]]()
    found: list[tuple[Wait, ...]] = []
    for visit in range(2 * count):
        begin, end = offsets[visit % count], ends[visit % count]
        first = max(bisect_right(begins, begin) - 1, 0)
        if first < len(spans) and spans[first][1] <= begin:
            first += 1
        last, waits = first, []
        while last < len(spans) and spans[last][0] < end:
            lower, _, writer = spans[last]
            if writer > waited:
                waits.append(Wait(writer % count, max(lower - begin, 0)))
                waited = writer
            last += 1
        # What else these visits wrote has been waited for with them.
        spans[first:last] = [(begin, end, visit)]
        begins[first:last] = [begin]
        if visit >= count:
            found.append(tuple(waits))
    return found


def lay_pieces(runs: Sequence[tuple[int, int]], room: int, piece: int) -> RingLayout:
    """Cut `runs`, each a use and a size, into pieces that take the equal slots of a ring of `room` bytes in
    turn."""
    pieces = [(use, start, min(piece, size - start)) for use, size in runs for start in range(0, size, piece)]
    count = len(pieces)
    slots = _slots(count, room // piece)
    laid, waited = list[RingRun](), -1
    for index, (use, start, size) in enumerate(pieces):
        # The slot's occupant before: of this pass, or else the last one of the pass before, counted from that
        # pass's first.
        writer = index - slots + count if index >= slots else (count - 1 - index) // slots * slots + index
        waits = (Wait(writer % count, 0),) if writer > waited else ()
        waited = max(waited, writer)
        laid.append(RingRun(use, start, size, index % slots * piece, waits))
    return RingLayout(room, tuple(laid))


def _slots(pieces: int, fitting: int) -> int:
    """Return how many slots to take in turn, so that a pass that begins at the first again leaves as many
    reads ahead there as elsewhere."""
    most = min(pieces, fitting)
    return max(range(max(most * 3 // 4, 1), most + 1), key=lambda slots: (pieces % slots or slots, slots))


def simulate(
    sizes: Sequence[int],
    homes: Sequence[Tier],
    ring: RingLayout,
    host_ring: int,
    rates: StreamRates,
    seconds: Sequence[float],
    piece: int,
) -> Prediction:
    """Simulate passes from empty rings until one takes as long as the one before.

    Every part works in order, so one walk over the uses suffices.
    """
    read = [run.size for run in ring.runs if homes[run.use] is Tier.DISK]
    grain = piece if sum(read) <= FEW * piece else max(host_ring // piece // GRAINS, 1) * piece
    grains = sum(-(-size // grain) for size in read)
    course = _Course(rates, grain, piece, _slots(grains, host_ring // grain) if grains else 0, len(ring.runs))
    steps, free = list[tuple[RingRun, bool, float, float]](), 0.0
    for run in ring.runs:
        before = steps[-1][0].use + 1 if steps else 0
        free = sum(seconds[before : run.use])
        steps.append((run, homes[run.use] is Tier.DISK, free, seconds[run.use]))
    after = sum(seconds[steps[-1][0].use + 1 if steps else 0 :])
    ends = [0.0]
    while len(ends) <= PASSES:
        course.slot = 0
        for position, (run, disk, free, work) in enumerate(steps):
            there = course.read_and_copy(run) if disk else course.copy(run)
            course.compute = max(course.compute + free, there) + work
            course.done[position] = course.compute + rates.skew
        course.compute += after
        ends.append(course.compute)
        if len(ends) > 3 and abs(ends[-1] - 2 * ends[-2] + ends[-3]) <= 1e-7 * (ends[-1] - ends[-2]):
            break
    # Rhythms that repeat only after several passes are averaged over the later half.
    since = len(ends) - 2 if len(ends) <= PASSES else len(ends) // 2
    streamed = sum(run.size for run in ring.runs)
    busy = {
        Link.DISK: sum(read) / rates.disk_to_host if read else 0.0,
        Link.LINK: streamed / rates.host_to_device if streamed else 0.0,
        Link.COMPUTE: sum(seconds),
    }
    return Prediction((ends[-1] - ends[since]) / (len(ends) - 1 - since), busy)


class _Course:
    """Holds when each part of the machine is next free, in a walk over the runs of passes one after
    another."""

    def __init__(self, rates: StreamRates, grain: int, piece: int, slots: int, runs: int) -> None:
        self.rates, self.grain, self.piece = rates, grain, piece
        self.reader = self.copier = self.compute = 0.0
        self.copied_on = [0.0] * slots
        """By slot of the host ring: when its last occupant had been copied to DEVICE."""
        self.slot = 0
        self.done = [0.0] * runs

    def copy(self, run: RingRun) -> float:
        at, now, rate = 0, self.copier, self.rates.host_to_device
        for wait in run.waits:
            now = max(now + (wait.at - at) / rate, self.done[wait.run])
            at = wait.at
        self.copier = now + (run.size - at) / rate
        return self.copier

    def read_and_copy(self, run: RingRun) -> float:
        """A grain is copied while it is read, a piece behind."""
        link, disk, slots = self.rates.host_to_device, self.rates.disk_to_host, len(self.copied_on)
        waits, start = list(run.waits), 0
        while start < run.size:
            end = min(start + self.grain, run.size)
            piece = min(self.piece, end - start)
            first = max(self.reader, self.copied_on[self.slot]) + piece / disk
            keeps_up = self.copier <= first and disk <= link
            self.reader = first + (end - start - piece) / disk
            now, at = max(self.copier, first), start
            while waits and (waits[0].at < end or self.done[waits[0].run] <= now):
                wait = waits.pop(0)
                reached = max(wait.at, at)
                now, at = (
                    (max(now + (reached - at) / link, self.done[wait.run]), reached)
                    if reached < end
                    else (now, at)
                )
            self.copier = max(now + (end - at) / link, self.reader + piece / link)
            self._copied()
            start = end
            ahead = (run.size - start) // self.grain - slots
            if (
                keeps_up
                and not waits
                and ahead > 0
                and slots > 1
                and self.copier == self.reader + piece / link
            ):
                # Nothing holds the disk back: what follows, but for the last grains of which a slot
                # remembers, is read in one go.
                self.reader += ahead * self.grain / disk
                self.slot = (self.slot + ahead) % slots
                self.copier = self.reader + piece / link
                start += ahead * self.grain
        return self.copier

    def _copied(self) -> None:
        self.copied_on[self.slot] = self.copier
        self.slot = (self.slot + 1) % len(self.copied_on)
