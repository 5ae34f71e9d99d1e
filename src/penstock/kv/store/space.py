"""The index of a BlockStore: where each KV block is on the disk, and where there is room for more.

`Space.index` maps a block's key to its place. A block that comes gets a place by `claim`, and is held there
once it is written (`hold`). Plain values, which only the thread that calls the store reads and writes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.kv.store.directory import Contents
from penstock.kv.store.journal import Item
from penstock.kv.store.seal import SEAL_BYTES
from penstock.kv.store.segments import SegmentFile, Sizes, slots_within
from penstock.kv.store.sizes import SLOT_BITS, planned_bytes

Place = int
"""A Place is a segment's number, and a slot in the SLOT_BITS below it."""


@dataclass(slots=True, eq=False)
class SegmentState:
    """A SegmentState is what is known of a segment.

    next: slots [0, next) have been given out.
    keys, seals: what is in them: by slot, the seals one behind the other.
    bad: slots that are quarantined.
    troubles: how often moving records out of it, or removing it, has failed.
    """

    file: SegmentFile
    next: int
    keys: list[bytes | None]
    seals: bytearray
    bad: set[int] = field(default_factory=set)
    troubles: int = 0

    @classmethod
    def of(cls, file: SegmentFile) -> "SegmentState":
        """Return the state of a file that counts as full, and holds nothing that is known."""
        return cls(file, file.slots, [None] * file.slots, bytearray(SEAL_BYTES * file.slots))

    @property
    def full(self) -> bool:
        """Tell whether all slots have been given out."""
        return self.next == self.file.slots

    @property
    def live(self) -> int:
        """The number of records in it that can be found."""
        return self.file.slots - self.keys.count(None)

    def hold(self, key: bytes, slot: int, seal: bytes) -> None:
        """Note what is in a slot."""
        self.keys[slot], self.seals[slot * SEAL_BYTES : (slot + 1) * SEAL_BYTES] = key, seal

    def place(self, slot: int) -> Place:
        """Return the place of a slot."""
        return self.file.number << SLOT_BITS | slot

    def item(self, key: bytes, slot: int) -> Item:
        """Return a record of this key in a slot, as the journal names it."""
        return Item(
            key, self.file.number, slot, bytes(self.seals[slot * SEAL_BYTES : (slot + 1) * SEAL_BYTES])
        )


class Space:
    """A Space has the segments of a store. They keep within its budget, with room for one more that
    compaction may need."""

    def __init__(self, path: Path, found: Contents, size: Sizes) -> None:
        self._path, self._record_bytes, self._size = path, found.record_bytes, size
        self._next_segment = found.next_segment
        self._open: list[SegmentState] = []
        """Segments that have slots to be given out."""
        self._version = self._sizes = (-1, -1)
        """A mark of the segments that there were when their sizes were added up; and the sums."""
        self.segments = {number: SegmentState.of(file) for number, file in found.segments.items()}
        keys, numbers, slots, seals = (
            found.live[name].tolist() for name in ("key", "segment", "slot", "seal")
        )
        places = found.live["segment"] << np.uint64(SLOT_BITS) | found.live["slot"]
        self.index = OrderedDict[bytes, Place](zip(keys, places.tolist(), strict=True))
        """The place of each record, by key, the longest unused first."""
        for key, number, slot, seal in zip(keys, numbers, slots, seals, strict=True):
            self.segments[number].hold(key, slot, seal)
        for number, slot in zip(found.bad["segment"].tolist(), found.bad["slot"].tolist(), strict=True):
            self.segments[number].bad.add(slot)

    @property
    def taken(self) -> int:
        """Bytes of the disk that all segments take, at most."""
        return self._measured()[0]

    @property
    def spare(self) -> int:
        """The number of slots that can be given out without another segment."""
        return sum(segment.file.slots - segment.next for segment in self._open)

    @property
    def grows(self) -> bool:
        """Tell whether one more segment fits."""
        usual = planned_bytes(self._size.slots, self._record_bytes)
        taken, largest = self._measured()
        return taken + usual + max(usual, largest) <= self._size.budget

    def find(self, place: Place) -> tuple[SegmentState, int]:
        """Return the segment and the slot of a place."""
        return self.segments[place >> SLOT_BITS], place & (1 << SLOT_BITS) - 1

    def hold(self, key: bytes, segment: SegmentState, slot: int, seal: bytes) -> None:
        """Let a record be found from now on, in this slot."""
        segment.hold(key, slot, seal)
        self.index[key] = segment.place(slot)

    def claim(self) -> tuple[SegmentState, int] | None:
        """Give out a slot that never was, if there is one."""
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
        """Let the slots of a segment be given out from `next` on."""
        self._open.append(segment)
        segment.next = next

    def compaction(
        self, idle: Sequence[SegmentState]
    ) -> tuple[SegmentState, list[SegmentState], list[tuple[SegmentState, Item]]] | None:
        """Choose what to move together: of `idle`, the segments with fewest records for their size.

        Return a new segment, the chosen ones, and their records. The records fit into the first slots of the
        new one, which takes no more of the disk than the chosen ones do. Return None if that does not make
        room.
        """
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
        """Return the bytes of all segments, and of the largest."""
        version = self._next_segment, len(self.segments)
        if version != self._version:
            sizes = [segment.file.disk_bytes for segment in self.segments.values()]
            self._sizes = sum(sizes), max(sizes, default=0)
            self._version = version
        return self._sizes

    def _new(self, slots: int) -> SegmentState:
        """Make a segment that counts as full until `use`, so that an interrupt leaves only what is
        removed."""
        number = self._next_segment
        self._next_segment = number + 1
        segment = SegmentState.of(SegmentFile.new(self._path, number, slots, self._record_bytes))
        self.segments[number] = segment
        return segment
