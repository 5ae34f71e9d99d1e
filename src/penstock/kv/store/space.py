"""Where the records of a BlockStore are, and where there is room for more: plain books, of the thread that
calls the store."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.kv.store.journal import SLOT_BITS, Item
from penstock.kv.store.seal import SEAL_BYTES
from penstock.kv.store.segments import Contents, SegmentFile, Sizes, planned_bytes, slots_within

Place = int
"""A segment's number, and a slot in the SLOT_BITS below it."""


@dataclass(slots=True, eq=False)
class SegmentState:
    """What is known of a segment. Slots [0, next) have been given out; `keys` and `seals` say what is in
    them, `bad` what is quarantined. troubles: how often moving records out of it, or removing it, has
    failed."""

    file: SegmentFile
    next: int
    keys: list[bytes | None]
    seals: bytearray
    bad: set[int] = field(default_factory=set)
    troubles: int = 0

    @classmethod
    def of(cls, file: SegmentFile) -> "SegmentState":
        """As if it was full, and nothing known of what it holds."""
        return cls(file, file.slots, [None] * file.slots, bytearray(SEAL_BYTES * file.slots))

    @property
    def full(self) -> bool:
        return self.next == self.file.slots

    @property
    def live(self) -> int:
        return self.file.slots - self.keys.count(None)

    def hold(self, key: bytes, slot: int, seal: bytes) -> None:
        self.keys[slot], self.seals[slot * SEAL_BYTES : (slot + 1) * SEAL_BYTES] = key, seal

    def place(self, slot: int) -> Place:
        return self.file.number << SLOT_BITS | slot

    def item(self, key: bytes, slot: int) -> Item:
        return Item(
            key, self.file.number, slot, bytes(self.seals[slot * SEAL_BYTES : (slot + 1) * SEAL_BYTES])
        )


class Space:
    """The segments of a store, within its budget: what is there, and one more that compaction may need."""

    def __init__(self, path: Path, found: Contents, size: Sizes) -> None:
        self._path, self._record_bytes, self._size = path, found.record_bytes, size
        self._next_segment = found.next_segment
        self._open: list[SegmentState] = []
        """With slots to be given out."""
        self._version = self._sizes = (-1, -1)
        """What segments there were when their sizes were added up, and the sums."""
        self.segments = {number: SegmentState.of(file) for number, file in found.segments.items()}
        keys, numbers, slots, seals = (
            found.live[name].tolist() for name in ("key", "segment", "slot", "seal")
        )
        places = found.live["segment"] << np.uint64(SLOT_BITS) | found.live["slot"]
        self.index: dict[bytes, Place] = dict(zip(keys, places.tolist(), strict=True))
        for key, number, slot, seal in zip(keys, numbers, slots, seals, strict=True):
            self.segments[number].hold(key, slot, seal)
        for number, slot in zip(found.bad["segment"].tolist(), found.bad["slot"].tolist(), strict=True):
            self.segments[number].bad.add(slot)

    @property
    def taken(self) -> int:
        """Bytes of the disk, at most."""
        return self._measured()[0]

    @property
    def spare(self) -> int:
        """Slots that can be given out without another segment."""
        return sum(segment.file.slots - segment.next for segment in self._open)

    @property
    def grows(self) -> bool:
        """Whether one more segment fits."""
        usual = planned_bytes(self._size.slots, self._record_bytes)
        taken, largest = self._measured()
        return taken + usual + max(usual, largest) <= self._size.budget

    def find(self, place: Place) -> tuple[SegmentState, int]:
        return self.segments[place >> SLOT_BITS], place & (1 << SLOT_BITS) - 1

    def hold(self, key: bytes, segment: SegmentState, slot: int, seal: bytes) -> None:
        segment.hold(key, slot, seal)
        self.index[key] = segment.place(slot)

    def claim(self) -> tuple[SegmentState, int] | None:
        """A slot that has never been given out, if there is one."""
        while self._open:
            segment = self._open[0]
            if not segment.full:
                slot = segment.next
                segment.next = slot + 1
                return segment, slot
            del self._open[:1]
        if not self.grows:
            return None
        segment = self._new(self._size.slots)
        self.use(segment, 1)
        return segment, 0

    def use(self, segment: SegmentState, next: int) -> None:
        """The slots from `next` on may be given out."""
        self._open.append(segment)
        segment.next = next

    def compaction(
        self, idle: Sequence[SegmentState]
    ) -> tuple[SegmentState, list[SegmentState], list[tuple[SegmentState, Item]]] | None:
        """Of `idle`, the segments with fewest records for their size; these records; and for them, to be put
        into its first slots, a new segment no larger than those are. None if that does not make room."""
        lives = sorted(
            ((segment, segment.live) for segment in idle),
            key=lambda pair: (pair[0].troubles, pair[1] / max(pair[0].file.disk_bytes, 1)),
        )
        most = max(self._size.slots, lives[0][1]) if lives else 0
        most = min(most, slots_within(self._size.budget - self.taken, self._record_bytes))
        chosen: list[SegmentState] = []
        moved = freed = 0
        for segment, live in lives:
            if moved + live <= most:
                chosen.append(segment)
                moved, freed = moved + live, freed + segment.file.disk_bytes
        slots = min(slots_within(freed, self._record_bytes), most)
        if slots < moved or (slots == moved and planned_bytes(slots, self._record_bytes) >= freed):
            return None
        records = [
            (source, source.item(key, slot))
            for source in chosen
            for slot, key in enumerate(source.keys)
            if key is not None
        ]
        return self._new(slots), chosen, records

    def _measured(self) -> tuple[int, int]:
        """Bytes of all segments, and of the largest."""
        version = self._next_segment, len(self.segments)
        if version != self._version:
            sizes = [segment.file.disk_bytes for segment in self.segments.values()]
            self._sizes = sum(sizes), max(sizes, default=0)
            self._version = version
        return self._sizes

    def _new(self, slots: int) -> SegmentState:
        """Full, until somebody knows of it: then an interrupt leaves only something to be removed."""
        number = self._next_segment
        self._next_segment = number + 1
        segment = SegmentState.of(SegmentFile.new(self._path, number, slots, self._record_bytes))
        self.segments[number] = segment
        return segment
