"""Small worlds for experts that come and go: known bytes on three tiers, streams that may be held."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupKind
from penstock.base.tiers import Tier
from penstock.base.trace import Trace
from penstock.memory.streams import Stream
from penstock.weights.streaming.experts import Experts
from penstock.weights.streaming.residency import ExpertRoom
from penstock.weights.streaming.waits import StreamWaits
from streams import UNIT, Compute, Copies, Gates, Store, content, layout

SIZE = 3 * UNIT
WIDE = {
    "host": (0, 12, 4, 0),
    "disk": (0, 0, 6, 4),
    "all tiers": (3, 4, 4, 4),
    "all tiers, few host slots": (3, 4, 6, 2),
}
"""Rooms in which several come in a wave."""
ROOMS = {
    "host": (4, 8, 2, 0),
    "host, ring of one": (0, 12, 1, 0),
    "disk": (0, 0, 3, 2),
    "disk, rings of one": (0, 0, 1, 1),
    "disk, the larger host ring": (2, 0, 1, 4),
    "all tiers": (4, 4, 2, 2),
    "all tiers, the larger host ring": (3, 4, 2, 4),
    "all tiers, rings of one": (4, 4, 1, 1),
}
"""Of 12 experts: how many stay on DEVICE and HOST, and the slots of both rings."""


def expert(layer: int, number: int) -> GroupId:
    return GroupId(GroupKind.EXPERT, layer, number)


@dataclass
class World:
    """Experts of some layers. `room`: as in ROOMS; compute: a stream that does at once what it is given,
    instead of a thread."""

    room: tuple[int, int, int, int]
    gates: Gates = field(default_factory=Gates)
    layers: int = 3
    each: int = 4
    experts_class: type[Experts] = Experts
    compute: Stream | None = None
    trace: Trace | None = None

    def __post_init__(self) -> None:
        on_device, on_host, ring, host_ring = self.room
        self.ids = [expert(layer, number) for layer in range(self.layers) for number in range(self.each)]
        self.device = torch.zeros(on_device + ring, SIZE, dtype=torch.uint8)
        self.host = torch.zeros(on_host + host_ring, SIZE, dtype=torch.uint8)
        self.store, self.copies, self.computing = Store(self.gates), Copies(self.gates), Compute(self.gates)
        self.copies.addresses = {
            slot.data_ptr(): ("device", number) for number, slot in enumerate(self.device)
        }
        self.copies.addresses |= {slot.data_ptr(): ("host", number) for number, slot in enumerate(self.host)}
        self.waits = StreamWaits(self.trace)
        room = ExpertRoom(SIZE, len(self.ids), on_device, on_host, ring, host_ring)
        streams = self.copies, self.compute or self.computing
        layouts = [layout(id, SIZE) for id in self.ids]
        self.experts = self.experts_class(
            layouts, room, self.device, self.host, self.store, *streams, self.waits
        )
        for one, place in self.experts.places():
            place.numpy()[:] = content(one.id, 0, SIZE)
        self.visit = 0
        self.expected: dict[int, GroupId] = {}

    def take(self, id: GroupId) -> Tensor:
        view = self.experts.take(id)
        self.expected[self.visit] = id
        if self.compute is None:
            self.computing.kernel(self.visit, id, view)
        else:
            self.computing.seen[self.visit] = id, view.numpy().copy()
        self.visit += 1
        return view

    def layer(self, ids: Sequence[GroupId]) -> None:
        self.experts.expect(ids)
        for id in ids:
            self.take(id)
            self.experts.release(id)

    def waves(self, ids: Sequence[GroupId], broken_off: Callable[[], bool] = lambda: False) -> None:
        """The same in waves: kernels only when all of a wave have been taken."""
        for wave in self.experts.waves(ids):
            slots = [self.experts.slot(id) for id in wave]
            self.experts.take_wave(wave)
            for id, slot in zip(wave, slots, strict=True):
                if broken_off():
                    return
                self.expected[self.visit] = id
                self.computing.kernel(self.visit, id, slot)
                self.visit += 1
            self.experts.release_wave(wave)

    def every(self) -> None:
        """A pass that needs all of them."""
        for layer in range(self.layers):
            self.layer([id for id in self.ids if id.layer == layer])

    def wrong(self) -> list[int]:
        self.computing.mark().wait()
        assert self.computing.seen.keys() == self.expected.keys()
        return [
            visit
            for visit, (id, bytes) in self.computing.seen.items()
            if not np.array_equal(bytes, content(id, 0, SIZE))
        ]

    def check(self) -> None:
        """Every expert has one home, with its bytes in it, and every slot one use."""
        self.experts.expect([])
        self.computing.mark().wait()
        self.copies.mark().wait()
        experts, (on_device, on_host, ring, host_ring) = self.experts, self.room
        homes = experts.homes
        assert list(homes) == self.ids
        for tier, count, slots, free in (
            (Tier.DEVICE, on_device, self.device, experts._ring),
            (Tier.HOST, on_host, self.host, self.host_ring),
        ):
            taken = {home.slot: id for id, home in homes.items() if home.tier is tier}
            assert len(taken) == sum(home.tier is tier for home in homes.values()) == count
            assert sorted([*taken, *free]) == list(range(len(slots)))
            for slot, id in taken.items():
                assert np.array_equal(slots[slot].numpy(), content(id, 0, SIZE)), f"{id} at home on {tier}"
        assert (len(experts._ring), len(self.host_ring)) == (ring, host_ring)

    @property
    def host_ring(self) -> Sequence[int]:
        reads = self.experts._reads
        return [] if reads is None else list(reads.ring)

    def close(self) -> None:
        self.gates.open()
        self.experts.close()
        self.copies.close()
        self.computing.close()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def every(kind: str) -> Callable[[Hashable], float]:
    return lambda place: 1e-3 if place[0] == kind else 0.0  # type: ignore[index]


def routed(rng: np.random.Generator, layer: int, each: int = 4, skew: float = 0.0) -> list[GroupId]:
    """Some experts of a layer in order, as the arithmetic takes them; with a skew, almost always the first
    two."""
    chance = np.where(np.arange(each) < 2, 0.5 + skew / 2, 0.5 - skew / 2)
    return [expert(layer, int(number)) for number in np.flatnonzero(rng.random(each) < chance)]
