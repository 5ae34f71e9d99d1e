"""Describes where groups of weights rest: their sizes, a placement on tiers and in rings, the experts' room.

Tiers are exclusive: a group has one home. `solver` decides which.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.arch.layout import GroupId, GroupKind, GroupLayout
from penstock.arch.spec import Activation
from penstock.base.tiers import Tier
from penstock.base.units import format_size
from penstock.weights.pieces import PAGE
from penstock.weights.streaming.ring import (
    Prediction,
    RingLayout,
)

PIECE = 16 << 20
"""Bytes of one read and one copy, and of one slot of the host ring: both links are at their best, and a byte
of ring is not a home."""
HOST_SLOTS = (16, 32, 64)
"""Sizes of the host ring worth trying: reads in flight, and reads ahead while the copy stream serves groups
that rest on HOST."""


def padded(layout: GroupLayout) -> int:
    """Return the bytes of a group as it rests on any tier: whole pages, so that a disk may read into it
    directly."""
    return -(-layout.size // PAGE) * PAGE


def pass_order(layouts: Sequence[GroupLayout], tied: bool) -> tuple[GroupLayout, ...]:
    """Return the groups that every pass uses, in order: tied embeddings again at its end, experts not at
    all."""
    every = tuple(layout for layout in layouts if layout.id.kind is not GroupKind.EXPERT)
    return (*every, every[0]) if tied else every


def piece_of(layouts: Sequence[GroupLayout]) -> int:
    """Return the bytes of a slot of the host ring: PIECE, or less where no group is as large."""
    return min(PIECE, max(map(padded, layouts)))


@dataclass(frozen=True, slots=True)
class Use:
    """A pass needs group `id`, of `size` bytes. A group that is used twice in a pass (tied embeddings) has
    two uses."""

    id: GroupId
    size: int


@dataclass(frozen=True, slots=True)
class WeightLimits:
    """Holds the bytes that weights may take, rings included.

    disk: what may rest on DISK; 0 where there is none, None for as much as it takes. resident, kept: most
    bytes with a home on DEVICE and on HOST; 0 and 0 is a sliding window, which re-reads everything in every
    pass. device_ring: size of the ring on DEVICE instead of the best one.
    """

    device: int
    host: int
    disk: int | None = None
    resident: int | None = None
    kept: int | None = None
    device_ring: int | None = None
    copies: bool = False
    """The device decides which experts it has copies of, where HOST has room for all of them."""
    asked: int = 0
    """Experts that a decode step asks a layer for, at most."""
    first: frozenset[GroupId] = frozenset()
    """Groups that stay on DEVICE before all others; none: those with which a pass is shortest."""

    def rings(self, usual: tuple[int, ...], places: int) -> tuple[int, ...]:
        """Return how many of so many places experts may come through where the device decides, best first.

        The link rests 50 to 75 µs behind each part of half a ring (an H100), so all that a step asks for
        comes in 8 parts, unless the ring would then take more than one place of 32. One is for what comes
        ahead.
        """
        wide = min(2 * self.asked // 8, places // 32)
        return (max(wide, usual[0]) + 1, *usual)


@dataclass(frozen=True, slots=True)
class CpuOrder:
    """CpuOrder says what a CPU computes in a pass, and what streams.

    groups: the feed-forwards that the CPU computes, in the order of a pass. ring: through which the other
    groups stream, in the memory of the ring of passes that the CPU does not share.
    """

    groups: tuple[GroupId, ...]
    ring: RingLayout


@dataclass(frozen=True, slots=True)
class CpuPass:
    """CpuPass describes passes of few decode rows in which a CPU computes some feed-forwards where they rest
    on HOST.

    orders: what it computes and what streams, by class of rows; classes may have the same. predictions: of
    such a pass, by class of rows. always: whether all steps of few decode rows are such passes; else
    measurements say which. hidden: numbers of a row. dtype: of rows.
    """

    orders: tuple[CpuOrder, ...]
    predictions: tuple[Prediction, ...]
    always: bool
    hidden: int
    dtype: str

    @property
    def groups(self) -> tuple[GroupId, ...]:
        """Return the feed-forwards that the CPU computes in any of the orders, in the order of a pass."""
        return tuple(sorted({id for order in self.orders for id in order.groups}, key=lambda id: id.layer))


@dataclass(frozen=True, slots=True)
class Placement:
    """Says where the groups that every pass uses rest, how the rings are laid out, and how long a pass
    takes."""

    uses: tuple[Use, ...]
    homes: Mapping[GroupId, Tier]
    device_ring: RingLayout
    host_ring: RingLayout
    prediction: Prediction
    piece: int = PIECE
    """Bytes of a slot of the host ring."""
    cpu: CpuPass | None = None
    """Passes in which a CPU computes some of the groups, beside those of which the rest speaks."""

    @property
    def everything_resident(self) -> bool:
        """Tell whether nothing streams."""
        return not self.device_ring.runs

    @property
    def streamed(self) -> int:
        """Return the bytes copied to DEVICE in a pass."""
        return sum(run.size for run in self.device_ring.runs)

    @property
    def read(self) -> int:
        """Return the bytes read from DISK in a pass."""
        return sum(run.size for run in self.host_ring.runs)

    def resting(self, tier: Tier) -> int:
        """Return the bytes with their home on `tier`, rings not counted."""
        sizes = {use.id: use.size for use in self.uses}
        return sum(sizes[id] for id, home in self.homes.items() if home is tier)

    def __str__(self) -> str:
        if self.everything_resident:
            return (
                f"all {format_size(self.resting(Tier.DEVICE))} of weights stay on the device; nothing streams"
            )
        device, host, disk = (format_size(self.resting(tier)) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))
        busy, seconds = self.prediction.busy, self.prediction.seconds
        by_cpu = ""
        if self.cpu is not None:
            its, groups = self.cpu.predictions[0].seconds, self.cpu.orders[0].groups
            by_cpu = (
                f"; a pass of one decode row takes {its:.3g} s where the CPU computes "
                f"{len(groups)} feed-forwards{'' if self.cpu.always else ', if it is faster'}"
            )
        return (
            f"device {device} + ring {format_size(self.device_ring.size)}, "
            f"host {host} + ring {format_size(self.host_ring.size)}, disk {disk}; "
            f"a pass copies {format_size(self.streamed)} and reads {format_size(self.read)} in "
            f"{seconds:.3g} s, "
            f"bound by {self.prediction.binding} ({busy[self.prediction.binding] / seconds:.1%} busy){by_cpu}"
        )


@dataclass(frozen=True, slots=True)
class CpuWork:
    """CpuWork is what a CPU has to know to compute experts of a model where they rest.

    activations: of each layer with experts. top_k: experts of a token. hidden: numbers of a row. dtype: of
    rows. always: whether the CPU takes some of any number of missing experts; else measurements say so.
    """

    activations: Sequence[Activation]
    top_k: int
    hidden: int
    dtype: str
    always: bool


@dataclass(frozen=True, slots=True)
class ExpertRoom:
    """Holds slots of `size` bytes for `experts` groups that only some tokens need; a pass knows the next ones
    only as it goes.

    on_device, on_host: experts that stay there; the others are on DISK. device_ring, host_ring: slots through
    which they come. slots: on DEVICE, for copies of experts that stay on HOST. total: bytes of all experts
    where some are smaller than their slots; 0 where none is.
    """

    size: int
    experts: int
    on_device: int
    on_host: int
    device_ring: int = 0
    host_ring: int = 0
    total: int = 0
    slots: int = 0
    copies: bool = False
    """The device decides which experts have slots, of which there may be none."""
    cpu: CpuWork | None = None
    """The CPU computes some of those that the device lacks."""

    @property
    def near(self) -> int:
        """Return how many experts are on DEVICE when a step begins."""
        return self.on_device + self.slots

    @property
    def mean(self) -> float:
        """Return the mean bytes of an expert."""
        return self.total / self.experts if self.total else self.size

    def resting(self, tier: Tier) -> int:
        """Return the bytes of the experts with their home on a tier. Which they are is not known: each counts
        with the mean of all."""
        first, second = self.on_device, self.on_device + self.on_host
        start, stop = {
            Tier.DEVICE: (0, first),
            Tier.HOST: (first, second),
            Tier.DISK: (second, self.experts),
        }[tier]
        total = self.total or self.experts * self.size
        return total * stop // self.experts - total * start // self.experts

    def beside(self, tier: Tier) -> int:
        """Return the bytes of a tier's slots in which no expert rests: others come through them, or smaller
        experts leave them."""
        slots = {Tier.DEVICE: self.device, Tier.HOST: self.host}.get(tier)
        return 0 if slots is None else slots - self.resting(tier)

    @property
    def device(self) -> int:
        """Return the bytes of its slots on DEVICE."""
        return (self.near + self.device_ring) * self.size

    @property
    def host(self) -> int:
        """Return the bytes of its slots on HOST."""
        return (self.on_host + self.host_ring) * self.size

    @property
    def on_disk(self) -> int:
        """Return how many experts stay on DISK."""
        return self.experts - self.on_device - self.on_host

    def __str__(self) -> str:
        places = [(self.on_device, "on the device"), (self.on_host, "on the host"), (self.on_disk, "on disk")]
        copies = f", with slots for copies of {self.slots:,} on the device" if self.copies else ""
        if self.cpu is not None:
            copies += f"; the CPU computes some of the others{'' if self.cpu.always else ' if it is faster'}"
        size = f"{'up to ' if self.total else ''}{format_size(self.size)}"
        return (
            f"of {self.experts:,} experts of {size}, "
            + ", ".join(f"{count:,} {where}" for count, where in places if count or not self.copies)
            + copies
        )


def spread(sizes: Sequence[int], share: int, whole: int) -> list[bool]:
    """Space residents evenly: return which groups of a sequence to take so that of every prefix of it `share
    / whole` of the bytes are taken, give or take half a group."""
    owed, taken = 0, []
    for size in sizes:
        owed += share * size
        take = 2 * owed >= whole * size
        owed -= whole * size if take else 0
        taken.append(take)
    return taken


@dataclass(frozen=True, slots=True)
class Home:
    """Says where an expert stays: its tier, and its slot there; none on DISK."""

    tier: Tier
    slot: int = -1


def first_homes(ids: Sequence[GroupId], room: ExpertRoom) -> dict[GroupId, Home]:
    """Return homes for experts before any was used: those of all layers share each tier evenly."""
    on_device = spread([1] * len(ids), room.on_device, len(ids))
    rest = [id for id, there in zip(ids, on_device, strict=True) if not there]
    on_host = dict(zip(rest, spread([1] * len(rest), room.on_host, max(len(rest), 1)), strict=True))
    homes, slots = dict[GroupId, Home](), Counter[Tier]()
    for id, there in zip(ids, on_device, strict=True):
        tier = Tier.DEVICE if there else Tier.HOST if on_host[id] else Tier.DISK
        homes[id] = Home(tier) if tier is Tier.DISK else Home(tier, slots[tier])
        slots[tier] += 1
    return homes
