"""Experts are groups that only some tokens need, and that a layer's router names as it goes. Those used most
often stay closest.

Slots are as large as the largest expert, so a tier is a row of equal slots. Most of them are homes; through
the others, the ring, experts come for one use. When one that came is used clearly more often than one that
stays, they change places: the slot it came in becomes its home, and the other's home becomes a slot of the
ring. Tiers stay exclusive: what leaves DEVICE takes the newcomer's home on HOST; what leaves HOST is
forgotten, since the store holds everything. Several may be taken before any is released: a wave, of those
that were expected next.

Why this is safe. All bookkeeping is done by the thread that computes. One stream copies, in order. Its copy
into a slot waits for the mark that the last release of the slot left on the compute stream; arithmetic waits
for the mark behind the copy. A slot on HOST is read into after the mark behind the last copy out of it, and
copied from when the read is over. Slots are given out in the order in which experts will be used, on HOST
(`expert_reads`) as on DEVICE, so the one that is needed first never waits for one that is needed later. An
exchange copies DEVICE to HOST on the same copy stream: behind the copy by which the newcomer came from there,
and before any copy into the slot that it empties. An interrupt in the midst of an exchange leaves it to be
done again, from bytes that are all still there; one anywhere else, slots to be found again, when all reads
are over or called off.

A wave holds at most half of the slots of either ring, and the experts that come with it are next in turn for
a slot: when it is taken nothing else is held, so each of them has a slot or gets one without a release, and
none waits for one that is behind it. The arithmetic waits for the mark behind the copy of each; all their
slots get the mark that is left when all of the wave's arithmetic has been queued, before the first of them is
given back or exchanged. None of them can be the one that leaves in an exchange: that is never an expert of
the layer at hand. An interrupt between two of them leaves the rest to be given back like experts that were
never released.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from penstock.arch.layout import GroupId, GroupLayout
from penstock.base.meter import ExpertCounts, LayerExperts
from penstock.base.tiers import Tier
from penstock.memory.streams import Stream, Ticket
from penstock.memory.tasks import Task
from penstock.weights.streaming.expert_reads import ExpertReads
from penstock.weights.streaming.residency import ExpertRoom, Home, first_homes, padded
from penstock.weights.streaming.source import WeightSource
from penstock.weights.streaming.waits import StreamWaits

WAVES = 2
"""Waves for which a ring has room."""
REVIEW = 16
"""Passes after which it is looked again which experts are used least."""
FADE = 256
"""Passes after which all counts are halved: what was used long ago matters less."""
CLEARLY = 1.25
"""A newcomer must have been used so many times as often, and twice more besides."""


@dataclass(slots=True)
class _Arrival:
    """An expert is on its way and has a slot on DEVICE. `host_slot` and `reads` if it comes from DISK;
    `ready` is behind its copy, once that is queued."""

    slot: int
    home: Home
    ready: Ticket | None = None
    host_slot: int = -1
    reads: Sequence[Task] = ()


class Experts:
    """Keeps experts in slots on DEVICE and HOST, and brings those that are asked for to DEVICE."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        room: ExpertRoom,
        device_slots: Tensor,
        host_slots: Tensor,
        source: WeightSource,
        copies: Stream,
        compute: Stream,
        waits: StreamWaits,
    ) -> None:
        """device_slots, host_slots: uint8 `[slots, size]`, as many as `room` says."""
        self._layouts = {layout.id: layout for layout in layouts}
        self._device, self._host = device_slots, host_slots
        self._copies, self._compute, self._waits = copies, compute, waits
        self.homes = first_homes(list(self._layouts), room)
        self._ring: deque[int] = deque()
        self._sound = False
        """True if the rings are as they should be: every slot that is no expert's home."""
        self._together = max(room.device_ring // WAVES, 1)
        self._from_disk_together = max(room.host_ring // WAVES, 1)
        """Of a wave, at most: experts that come (`_together`), and those of them that come from DISK."""
        self._done: list[Ticket | None] = [None] * len(device_slots)
        self._empty: list[Ticket | None] = [None] * len(host_slots)
        self._queue: deque[GroupId] = deque()
        """Experts that will be used and have no slot on DEVICE yet."""
        self._expected: frozenset[GroupId] = frozenset()
        """Of the layer at hand: none of them may leave DEVICE."""
        self._coming: dict[GroupId, _Arrival] = {}
        self.ahead: Sequence[GroupId] = ()
        """Expected before their wave was asked for."""
        self._used: Counter[GroupId] = Counter()
        self._least: dict[Tier, list[GroupId]] = {Tier.DEVICE: [], Tier.HOST: []}
        """Experts that stay on a tier, the least used last."""
        self._exchange: tuple[GroupId, int, GroupId] | None = None
        self._passes, self._layer = 0, -1
        ring = room.host_ring, self._empty
        self._reads = ExpertReads(layouts, host_slots, *ring, source, waits.trace) if room.on_disk else None
        self.copied_bytes = self.returned_bytes = self.read_bytes = 0
        self.asked = self.missed = self.from_disk = 0
        """Experts that were expected, those of them that were not on DEVICE, and of these those from DISK."""
        self.disk_late = 0.0

    def places(self) -> Iterator[tuple[GroupLayout, Tensor]]:
        """Yield the experts that stay on DEVICE and HOST, and where they are to be loaded."""
        for id, home in self.homes.items():
            if home.tier is not Tier.DISK:
                slot = (self._device if home.tier is Tier.DEVICE else self._host)[home.slot]
                yield self._layouts[id], slot[: padded(self._layouts[id])]

    def expect(self, experts: Sequence[GroupId]) -> None:
        """Note that these will be taken next, in this order, and begin to fetch them."""
        self._mend()
        if experts and experts[0].layer <= self._layer:
            self._next_pass()
        self._layer = experts[0].layer if experts else self._layer
        self._used.update(experts)
        self._expected = frozenset(experts)
        self._sound = False
        missing = [id for id in experts if self.homes[id].tier is not Tier.DEVICE]
        self.asked, self.missed = self.asked + len(experts), self.missed + len(missing)
        self._queue.extend(missing)
        if self._reads is not None:
            from_disk = [id for id in missing if self.homes[id].tier is Tier.DISK]
            self.from_disk += len(from_disk)
            self.read_bytes += len(from_disk) * self._host.shape[1]
            self._reads.expect(from_disk)
        self._fetch()
        self._sound = True

    def counts(self) -> ExpertCounts:
        """Return what was asked for and what came, since the beginning."""
        copied, read = self.copied_bytes, self.read_bytes
        found = ExpertCounts(self.asked, self.asked - self.missed, self.from_disk, copied, read)
        return found if self._reads is None else self._reads.counted(found)

    def foretells(self) -> bool:
        """Tell whether it is of use to `foretell` what a layer will ask for."""
        return self._reads is not None and self._reads.worthwhile()

    def foretell(self, experts: Sequence[GroupId]) -> None:
        """Begin to read those of them that are on DISK, which the next layer will likely ask for, the
        likeliest first. All that was expected comes before them."""
        if self._reads is not None:
            self._sound = False
            self._reads.foretell([id for id in experts if self.homes[id].tier is Tier.DISK])
            self._sound = True

    def expect_ahead(self, experts: Sequence[GroupId]) -> None:
        """Begin to fetch these, which `waves` will be asked for next: all that was expected has been
        released."""
        self.expect(experts)
        self.ahead = experts

    def take(self, id: GroupId) -> Tensor:
        """Return the expert's bytes on DEVICE, ready for what is computed from now on. Raises CheckpointError
        if it cannot be read."""
        if id not in self._coming and self.homes[id].tier is not Tier.DEVICE:
            self.expect([id])
        self.take_wave([id])
        return self.slot(id)

    def release(self, id: GroupId) -> None:
        """Note that the arithmetic that was queued until now was the last to need it."""
        self.release_wave([id])

    def waves(self, experts: Sequence[GroupId]) -> Iterator[Sequence[GroupId]]:
        """Expect these, and divide them: those that are on DEVICE, then as many of those on HOST at a time as
        leave half of the slots to those behind them, and then those from DISK, as they have been read. Each
        wave is to be taken and released before the next is asked for."""
        ordered = experts
        if not self.ahead or self.ahead != experts:
            self._mend()
            ordered = self._in_order(experts)
            self.expect(ordered)
        self.ahead = ()
        here = [id for id in ordered if self.homes[id].tier is Tier.DEVICE]
        if here:
            yield here
        near = [id for id in ordered if self.homes[id].tier is Tier.HOST]
        for first in range(0, len(near), self._together):
            yield near[first : first + self._together]
        far = deque(id for id in ordered if self.homes[id].tier is Tier.DISK)
        most = min(self._together, self._from_disk_together)
        while far:
            wave = [far.popleft()]
            while far and len(wave) < most and self._has_been_read(far[0]):
                wave.append(far.popleft())
            yield sorted(wave, key=lambda id: id.expert)

    def slot(self, id: GroupId) -> Tensor:
        """Return where an expert of the wave at hand is, or will be when it is taken."""
        coming = self._coming.get(id)
        assert coming is not None or self.homes[id].tier is Tier.DEVICE, f"no slot for {id}"
        return self._device[self.homes[id].slot if coming is None else coming.slot]

    def take_wave(self, ids: Sequence[GroupId]) -> None:
        """Make what is computed from now on find these in their slots. Raises CheckpointError for one that
        cannot be read."""
        coming = [(id, one) for id in ids if (one := self._coming.get(id)) is not None]
        if not coming:
            return
        taken = self._compute.mark()
        for id, one in coming:
            if one.ready is None:
                one.ready = self._bring(id, one)
            self._compute.wait(one.ready)
        first, more = coming[0][0], len(coming) - 1
        self._waits.begin(f"{first} and {more} more" if more else str(first), taken, self._compute.mark())

    def release_wave(self, ids: Sequence[GroupId]) -> None:
        """Note that the arithmetic that was queued until now was the last to need these, which were taken
        together."""
        coming = [(id, one) for id in ids if (one := self._coming.get(id)) is not None]
        if not coming:
            return
        mark = self._compute.mark()
        self._waits.end(mark)
        self._sound = False
        for _, one in coming:
            self._done[one.slot] = mark
        for id, one in coming:
            if not self._stay(id, one):
                self._ring.append(one.slot)
            if self._reads is not None and one.host_slot >= 0:
                self._reads.end(id, one.host_slot)
            del self._coming[id]
        self._fetch()
        self._sound = True

    @property
    def compute(self) -> Stream:
        """Return the stream on which experts are computed with."""
        return self._compute

    @property
    def ring_slots(self) -> int:
        """Return how many slots on DEVICE are no expert's home."""
        return len(self._device) - sum(home.tier is Tier.DEVICE for home in self.homes.values())

    def lend_ring(self) -> None:
        """Let what is queued on the compute stream from now on write to the ring on DEVICE, until
        `take_ring_back`. Nothing may be expected or taken meanwhile; what was expected comes anew."""
        self.ahead = ()
        self._compute.wait(self._copies.mark())

    def take_ring_back(self) -> None:
        """Copy to slots of the ring again, behind all that was queued on the compute stream."""
        mark = self._compute.mark()
        self._done = [mark] * len(self._done)

    def use(self) -> list[LayerExperts]:
        """Return how often each expert was expected lately, and where it stays, in their order. Any thread
        may call it, also while a step runs."""
        used, homes = dict.copy(self._used), dict.copy(self.homes)  # Each at once: nothing comes between.
        # Counts are halved after FADE passes, and so is the number of passes that they are of.
        fades, passes = divmod(self._passes, FADE)
        most = passes + 1 + FADE * (1 - 0.5**fades)
        found = dict[int, LayerExperts]()
        for id, home in homes.items():
            layer = found.setdefault(id.layer, LayerExperts(id.layer, [], []))
            layer.rates.append(min(used.get(id, 0) / most, 1.0))
            layer.tiers.append(home.tier)
        return list(found.values())

    def close(self) -> None:
        """Wait for reads in flight. To be called again if it was interrupted; else that does nothing."""
        if self._reads is not None:
            self._reads.close()

    # ---- coming

    def _in_order(self, experts: Sequence[GroupId]) -> Sequence[GroupId]:
        """Return them in the order in which they are used best: from DISK come last those of which least has
        been read."""
        reads = self._reads
        if reads is None:
            return experts
        ranks = {Tier.DEVICE: 0, Tier.HOST: 1, Tier.DISK: 3}
        return sorted(experts, key=lambda id: ranks[self.homes[id].tier] - (reads.of(id) is not None))

    def _has_been_read(self, id: GroupId) -> bool:
        return self._reads is not None and self._reads.ready(id)

    def _fetch(self) -> None:
        """Give out slots, in the order of use, and begin what can be begun."""
        if self._reads is not None:
            self._reads.begin()
        while self._queue and self._ring:
            id = self._queue[0]
            home = self.homes[id]
            coming = _Arrival(self._ring[0], home)
            if home.tier is Tier.DISK:
                assert self._reads is not None
                reading = self._reads.of(id)
                if reading is None:
                    return
                coming.host_slot, coming.reads = reading.slot, reading.tasks
            self._ring.popleft()
            self._coming[id] = coming
            if home.tier is Tier.HOST:
                coming.ready = self._copy(id, coming, self._host[home.slot])
                self._empty[home.slot] = coming.ready
            self._queue.popleft()

    def _bring(self, id: GroupId, coming: _Arrival) -> Ticket:
        """Queue the copy of an expert from DISK, when it has been read."""
        began = perf_counter()
        for read in coming.reads:
            read.result()
        assert self._reads is not None
        self._reads.checked.add(id)
        self.disk_late += perf_counter() - began
        ready = self._copy(id, coming, self._host[coming.host_slot])
        self._empty[coming.host_slot] = ready
        return ready

    def _copy(self, id: GroupId, coming: _Arrival, source: Tensor) -> Ticket:
        done = self._done[coming.slot]
        if done is not None:
            self._copies.wait(done)
        began = self._copies.mark() if self._waits.trace else None
        self._copies.copy(self._device[coming.slot], source)
        self.copied_bytes += len(source)
        ready = self._copies.mark()
        if began is not None:
            self._waits.copied(str(id), len(source), began, ready)
        return ready

    # ---- staying

    def _stay(self, id: GroupId, coming: _Arrival) -> bool:
        """Keep an expert that came where it is if it is used clearly more often than one that stays. Tell
        whether it kept its slot on DEVICE. `host_slot` is then the slot on HOST that is free, if it
        had one."""
        other = self._rival(id, Tier.DEVICE)
        if other is not None:
            self._exchange = (id, coming.slot, other)
            self._finish_exchange()
            return True
        if coming.host_slot >= 0 and (other := self._rival(id, Tier.HOST)) is not None:
            freed = self.homes[other].slot
            self.homes.update({id: Home(Tier.HOST, coming.host_slot), other: Home(Tier.DISK)})
            coming.host_slot = freed
        return False

    def _rival(self, id: GroupId, tier: Tier) -> GroupId | None:
        """Return the least used expert that stays on `tier`, if `id` is used clearly more often."""
        least = self._least[tier]
        while least and (self.homes[least[-1]].tier is not tier or least[-1] in self._expected):
            least.pop()
        if not least or self._used[id] < CLEARLY * self._used[least[-1]] + 2:
            return None
        return least.pop()

    def _finish_exchange(self) -> None:
        """Let `id`, which came to `slot`, stay there; `other` goes where it came from. May be begun anew
        until the last line."""
        assert self._exchange is not None
        id, slot, other = self._exchange
        home, left = self.homes[id], self.homes[other]
        if home.tier is not Tier.DEVICE:
            if home.tier is Tier.HOST:
                self._copies.copy(self._host[home.slot], self._device[left.slot])
                self.returned_bytes += len(self._host[home.slot])
                self._empty[home.slot] = self._copies.mark()
            self._done[left.slot] = self._compute.mark()
            # One call, so that no interrupt can come between the two.
            self.homes.update({id: Home(Tier.DEVICE, slot), other: home})
            self._ring.append(left.slot)
        self._exchange = None

    def _next_pass(self) -> None:
        self._passes += 1
        if self._passes % FADE == 0:
            for id in self._used:
                self._used[id] //= 2
        if self._passes % REVIEW == 0:
            for tier, least in self._least.items():
                least[:] = sorted(
                    (id for id, home in self.homes.items() if home.tier is tier),
                    key=lambda id: -self._used[id],
                )

    def _mend(self) -> None:
        """Give back what was never taken in a pass that was broken off, and find the slots that an interrupt
        lost."""
        if self._exchange is not None:
            self._finish_exchange()
        if self._sound and not self._coming and not self._queue:
            return
        self._sound, self.ahead = False, ()
        mark = self._compute.mark()
        for coming in self._coming.values():
            self._done[coming.slot] = mark
        self._queue.clear()
        self._coming.clear()
        taken = {(home.tier, home.slot) for home in self.homes.values()}
        self._ring = deque(slot for slot in range(len(self._device)) if (Tier.DEVICE, slot) not in taken)
        if self._reads is not None:
            self._reads.mend([slot for slot in range(len(self._host)) if (Tier.HOST, slot) not in taken])
        self._sound = True
