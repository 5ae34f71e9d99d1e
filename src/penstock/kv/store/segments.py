"""Segments: files of KV blocks, and how the room that a user allows is divided into them.

A segment is a row of slots of whole pages behind a table of what they hold. The table has entries as in the
journal, from which a lost journal is made anew. A block that goes to the disk is written once, into the next
free slot (`SegmentFile.write`). Its space comes back with the whole segment, when compaction has moved what
is left in it (`upkeep`).
"""

import errno
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from penstock.base.errors import PenstockError
from penstock.base.units import format_size
from penstock.kv.store.journal import (
    SEGMENT_DIGITS,
    Entries,
    Item,
    Kind,
    decoded,
    encoded,
    real_bytes,
)
from penstock.kv.store.sizes import (
    ENTRY_BYTES,
    FIXED_BYTES,
    JOURNAL_BYTES,
    MOST_SLOTS,
    least_cap,
    planned_bytes,
)
from penstock.memory.disk import DirectFile, DiskFile, in_pages
from penstock.memory.writing import open_direct, write_all

SEGMENT_BYTES = 256 << 20
"""Bytes of a segment, at most."""
SEGMENTS = 16
"""A cap is for at least so many, which are smaller if need be."""


class StoreError(PenstockError):
    """StoreError is raised where a store of KV cannot be opened, or a record cannot be written to it."""


class StoreLocked(StoreError):
    """StoreLocked is raised where another process writes to the store."""


class SegmentFile:
    """A SegmentFile is a segment on the disk, which may not be made yet: the first that writes makes it.

    Any number of threads may write and read its slots.
    """

    def __init__(self, path: Path, number: int, slots: int, record_bytes: int, *, made: bool = False) -> None:
        """Describe a segment. made: whether it is there, and is looked at. Raises OSError if it is not."""
        self.path, self.number, self.slots, self.record_bytes = path, number, slots, record_bytes
        self._table = in_pages(slots * ENTRY_BYTES)
        self._slot = in_pages(record_bytes)
        self.disk_bytes = planned_bytes(slots, record_bytes)
        """Bytes of the disk that it takes, at most. Writing slots may cost the file system pages of its
        own."""
        self._made = made
        self._lock = threading.Lock()
        if made:
            self._measure()

    @classmethod
    def new(cls, directory: Path, number: int, slots: int, record_bytes: int) -> "SegmentFile":
        """Return a segment that is to be made, under its name in a store's directory."""
        return cls(directory / f"{number:0{SEGMENT_DIGITS}d}-{slots}.segment", number, slots, record_bytes)

    def write(self, item: Item, payload: memoryview, seed: int) -> None:
        """Write the record of `item`, and then its entry in the table. Raises OSError."""
        self._make()
        with FileIO(os.open(self.path, os.O_WRONLY | os.O_CLOEXEC), "w") as plain:
            with open_direct(self.path) as direct:
                write_all(plain, payload, self.place(item.slot), direct)
            write_all(plain, encoded(Kind.WRITTEN, 0, item, seed), item.slot * ENTRY_BYTES)

    def read(self, slot: int, into: memoryview) -> None:
        """Fill `into` with a slot. Raises ReadError.

        Each read opens the file: none is held open, and a segment may be removed while it is read.
        """
        with DirectFile(self.path) as file:
            file.read_direct(into, self.place(slot))

    def table(self, seed: int) -> Entries:
        """Return the sound entries of the table, of slots within the file. Raises ReadError."""
        with DiskFile(self.path) as file:
            entries, sound = decoded(file.read(0, min(self.slots * ENTRY_BYTES, file.size)), seed)
            there = (file.size - self._table) // self._slot
        sound &= (
            (entries["segment"] == self.number)
            & (entries["slot"] == np.arange(len(entries)))
            & (entries["slot"] < there)
        )
        return entries[sound]

    def shorten(self, slots: int) -> None:
        """Cut off what lies behind the first `slots`. The segment is not written any more. Raises OSError."""
        if os.stat(self.path).st_size > self.place(slots):
            os.truncate(self.path, self.place(slots))
            self._measure()

    def may_hold_such(self) -> bool:
        """Tell whether records of `record_bytes` can have left a file of that length. Raises OSError."""
        length = os.stat(self.path).st_size
        return length <= self.place(self.slots) and max(length - self._table, 0) % self._slot == 0

    def place(self, slot: int) -> int:
        """Return the byte of the file at which a slot begins."""
        return self._table + slot * self._slot

    def _measure(self) -> None:
        there = max(os.stat(self.path).st_size - self._table, 0) // self._slot
        self.disk_bytes = max(planned_bytes(min(there, self.slots), self.record_bytes), real_bytes(self.path))

    def _make(self) -> None:
        with self._lock:
            if self._made:
                return
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with FileIO(os.open(self.path, flags, 0o600), "r+") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, self.place(self.slots))
                    if real_bytes(file.fileno()) > self.disk_bytes:
                        raise OSError(errno.ENOSPC, "a segment takes more of the disk than it should")
                    self._made = True
                except BaseException:
                    with suppress(OSError):
                        os.unlink(self.path)
                    raise


def slots_within(count: int, record_bytes: int) -> int:
    """Return the slots of the largest segment that takes at most `count` bytes."""
    slots = min(count // (in_pages(record_bytes) + ENTRY_BYTES), MOST_SLOTS)
    while slots and planned_bytes(slots, record_bytes) > count:
        slots -= 1
    return slots


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes are what a cap is divided into.

    slots: slots of a segment.
    budget: bytes of all segments.
    capacity: records, few enough for compaction to find an eighth of all slots empty.
    entries: entries of the journal, at most. A new journal beside it has as many as there are slots.
    """

    slots: int
    budget: int
    capacity: int
    entries: int


def sizes(cap_bytes: int, record_bytes: int) -> Sizes:
    """Divide a cap in bytes. Raises StoreError if it is below `least_cap`."""
    slots = min(max(min(SEGMENT_BYTES, cap_bytes // SEGMENTS) // in_pages(record_bytes), 1), MOST_SLOTS)
    segments = (cap_bytes - FIXED_BYTES) // (planned_bytes(slots, record_bytes) + slots * JOURNAL_BYTES)
    if segments < 2:
        least = format_size(least_cap(record_bytes))
        raise StoreError(
            f"{format_size(cap_bytes)} is too little for KV in records of {format_size(record_bytes)}; set "
            f"disk_kv_memory to {least} or more"
        )
    count = segments * slots
    return Sizes(
        slots,
        cap_bytes - FIXED_BYTES - count * JOURNAL_BYTES,
        max((segments - 1) * slots * 7 // 8, 1),
        3 * count + 512,
    )
