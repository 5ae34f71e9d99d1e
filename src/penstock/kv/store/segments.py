"""What a BlockStore has on disk beside its journal: segments, files of records of one size, and how they and
the journal are found.

A segment is a row of slots of whole pages behind a table of what they hold: entries as in the journal, from
which a lost journal is made anew. A slot is written once; its space comes back with the whole segment.

    <kv_directory>/kv2-<identity>/  store.json           what this is, for people
                                    lock                 held by the process that writes
                                    journal              which record is where, and its seal
                                    <number>-<slots>.segment
"""

import errno
import fcntl
import json
import os
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from penstock.base.errors import PenstockError
from penstock.base.units import format_size
from penstock.kv.store.journal import (
    _DTYPE,
    ENTRY_BYTES,
    MOST_SLOTS,
    SEGMENT_DIGITS,
    Entries,
    Item,
    Kind,
    Replay,
    decoded,
    encoded,
    real_bytes,
    replace_file,
    replayed,
    segment_numbers,
    surviving,
    write_all,
)
from penstock.memory.disk import DIRECT_ALIGNMENT, DirectFile, DiskFile, ReadError, make_private

FORMAT = 2
"""In the directory's name: what another version of all this has written is not touched."""
PREFIX, JOURNAL, LOCK, ABOUT = f"kv{FORMAT}-", "journal", "lock", "store.json"
NOTES = "rates.json"
"""What a process tells the next about how fast things went."""
SEGMENT_BYTES = 256 << 20
SEGMENTS = 16
"""A cap is for at least so many, which are smaller if need be."""
_FIXED = 64 << 10
"""Of the cap, for all that does not grow with it."""


class StoreError(PenstockError):
    """A store of KV that cannot be opened, or a record that cannot be written to it."""


class StoreLocked(StoreError):
    """A store that another process writes."""


def _pages(count: int) -> int:
    return -(-count // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT


class SegmentFile:
    """A segment. Any number of threads may write and read its slots; it is made by the first that writes."""

    def __init__(self, path: Path, number: int, slots: int, record_bytes: int) -> None:
        self.path, self.number, self.slots, self.record_bytes = path, number, slots, record_bytes
        self._table = _pages(slots * ENTRY_BYTES)
        self._slot = _pages(record_bytes)
        self.disk_bytes = planned_bytes(slots, record_bytes)
        """What it takes, at most: also when its slots are written, which may cost the file system more pages
        to say what has been."""
        self._made = False
        self._lock = threading.Lock()

    @classmethod
    def new(cls, directory: Path, number: int, slots: int, record_bytes: int) -> "SegmentFile":
        return cls(directory / f"{number:0{SEGMENT_DIGITS}d}-{slots}.segment", number, slots, record_bytes)

    @classmethod
    def found(cls, path: Path, number: int, slots: int, record_bytes: int) -> "SegmentFile":
        """Raises OSError."""
        segment = cls(path, number, slots, record_bytes)
        segment._made = True
        segment._measure()
        return segment

    def write(self, item: Item, payload: memoryview, seed: int) -> None:
        """First the record, then its entry in the table. Raises OSError."""
        self._make()
        plain = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            try:
                direct = os.open(self.path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError:
                direct = -1
            try:
                write_all(plain, payload, self.place(item.slot), direct)
            finally:
                if direct >= 0:
                    os.close(direct)
            write_all(plain, encoded(Kind.WRITTEN, 0, item, seed), item.slot * ENTRY_BYTES)
        finally:
            os.close(plain)

    def read(self, slot: int, into: memoryview) -> None:
        """Raises ReadError. A descriptor for each read: none is held, and a segment may be removed while it
        is read."""
        with DirectFile(self.path) as file:
            file.read_direct(into, self.place(slot))

    def table(self, seed: int) -> Entries:
        """The sound entries of the table, of slots within the file. Raises ReadError."""
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
        """Give back what lies behind the first `slots`, of a segment that nobody writes any more. Raises
        OSError."""
        if os.stat(self.path).st_size > self.place(slots):
            os.truncate(self.path, self.place(slots))
            self._measure()

    def may_hold_such(self) -> bool:
        """Whether records of that size can have left a file of that length. Raises OSError."""
        length = os.stat(self.path).st_size
        return length <= self.place(self.slots) and max(length - self._table, 0) % self._slot == 0

    def place(self, slot: int) -> int:
        """Byte of the file."""
        return self._table + slot * self._slot

    def _measure(self) -> None:
        there = max(os.stat(self.path).st_size - self._table, 0) // self._slot
        self.disk_bytes = max(planned_bytes(min(there, self.slots), self.record_bytes), real_bytes(self.path))

    def _make(self) -> None:
        with self._lock:
            if self._made:
                return
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, self.place(self.slots))
                if real_bytes(file) > self.disk_bytes:
                    raise OSError(errno.ENOSPC, "a segment takes more of the disk than it should")
                self._made = True
            except BaseException:
                with suppress(OSError):
                    os.unlink(self.path)
                raise
            finally:
                os.close(file)


def planned_bytes(slots: int, record_bytes: int) -> int:
    """What a segment may take of the disk. A file system says in so many bytes for a page where it is, if it
    has to for each."""
    size = _pages(slots * ENTRY_BYTES) + slots * _pages(record_bytes)
    return size + _pages(size // 256) + DIRECT_ALIGNMENT


def slots_within(count: int, record_bytes: int) -> int:
    """Of the largest segment that takes at most `count` bytes."""
    slots = min(count // (_pages(record_bytes) + ENTRY_BYTES), MOST_SLOTS)
    while slots and planned_bytes(slots, record_bytes) > count:
        slots -= 1
    return slots


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a cap is cut into. `slots`: of a segment. `budget`: bytes of all segments. `capacity`: records,
    few enough for compaction to find an eighth of all slots empty. `entries`: most in the journal; as many
    again as there are slots are in a new one beside it."""

    slots: int
    budget: int
    capacity: int
    entries: int


_JOURNAL = 4 * ENTRY_BYTES
"""Bytes of the journal for a slot: three entries, and one in a new journal beside it."""


def least_cap(record_bytes: int) -> int:
    """The smallest cap in bytes that `sizes` accepts: two segments of one record, and what does not grow."""
    return _FIXED + 2 * (planned_bytes(1, record_bytes) + _JOURNAL)


def sizes(cap_bytes: int, record_bytes: int) -> Sizes:
    """How the cap is cut up. Raises StoreError if it is below `least_cap`."""
    slots = min(max(min(SEGMENT_BYTES, cap_bytes // SEGMENTS) // _pages(record_bytes), 1), MOST_SLOTS)
    segments = (cap_bytes - _FIXED) // (planned_bytes(slots, record_bytes) + slots * _JOURNAL)
    if segments < 2:
        least = format_size(least_cap(record_bytes))
        raise StoreError(
            f"{format_size(cap_bytes)} is too little for KV in records of {format_size(record_bytes)}; set "
            f"disk_kv_memory to {least} or more"
        )
    count = segments * slots
    return Sizes(
        slots, cap_bytes - _FIXED - count * _JOURNAL, max((segments - 1) * slots * 7 // 8, 1), 3 * count + 512
    )


@dataclass(slots=True)
class Contents:
    """What a store holds. `live`, `bad`: entries of records that are there, and of quarantined ones.
    `replay`: none if the journal is lost, and this is from the segments' tables."""

    record_bytes: int
    segments: dict[int, SegmentFile]
    live: Entries
    bad: Entries
    replay: Replay | None
    next_segment: int


def contents(path: Path, seed: int, record_bytes: int) -> Contents:
    """Only read. `record_bytes`: unless the journal knows. Raises StoreError if it cannot be read, which says
    nothing of what is there."""
    try:
        replay = replayed(path / JOURNAL, seed)
        record_bytes = replay.record_bytes if replay else record_bytes
        segments = {}
        for number, (file, slots) in sorted(segment_numbers(path).items()):
            with suppress(FileNotFoundError):  # Another process writes here, and has compacted it.
                segments[number] = SegmentFile.found(file, number, slots, record_bytes)
        if replay:
            entries = replay.entries
        else:
            entries = np.concatenate(
                [np.zeros(0, _DTYPE), *(segment.table(seed) for segment in segments.values())]
            )
    except (OSError, ReadError) as fault:
        raise StoreError(
            f"{path} cannot be read: {reason(fault)}; change its permissions, or name another kv_directory"
        ) from fault
    live, bad = surviving(entries, segments)
    numbers = np.array(sorted(segments), np.uint64)
    counts = np.array([segments[number].slots for number in numbers.tolist()], np.uint32)
    live, bad = (
        kept[kept["slot"] < counts[np.searchsorted(numbers, kept["segment"])]] for kept in (live, bad)
    )
    return Contents(
        record_bytes,
        segments,
        live,
        bad,
        replay,
        max([replay.next_segment if replay else 0, *(at + 1 for at in segments)]),
    )


def expect_size(path: Path, found: Contents, record_bytes: int) -> None:
    """Raises StoreError."""
    if found.record_bytes != record_bytes:
        sizes = f"{format_size(found.record_bytes)}, not {format_size(record_bytes)}"
        raise StoreError(
            f"{path} holds KV in records of {sizes}, although it names the same model and settings; remove it"
        )


def trim(found: Contents, size: Sizes) -> None:
    """Remove segments of which nothing is known, and cut off slots that were not used. If the rest is more
    than the budget, remove those that were not used for longest until there is room for compaction, too.
    Raises OSError."""
    used, last = dict.fromkeys(found.segments, 0), dict.fromkeys(found.segments, -1)
    for entries in (found.bad, found.live):
        numbers, which = np.unique(entries["segment"], return_inverse=True)
        behind, latest = np.zeros(len(numbers), np.int64), np.full(len(numbers), -1)
        np.maximum.at(behind, which, entries["slot"].astype(np.int64) + 1)
        np.maximum.at(latest, which, np.arange(len(entries)))
        for number, slots, at in zip(numbers.tolist(), behind.tolist(), latest.tolist(), strict=True):
            used[number], last[number] = max(used[number], slots), at if entries is found.live else -1
    for number, slots in used.items():
        if slots:
            found.segments[number].shorten(slots)
        else:
            found.segments.pop(number).path.unlink()
    taken = sum(segment.disk_bytes for segment in found.segments.values())
    if taken > size.budget:
        largest = max(
            planned_bytes(size.slots, found.record_bytes),
            *(segment.disk_bytes for segment in found.segments.values()),
        )
        for number in sorted(found.segments, key=lambda number: last[number]):
            if taken + largest > size.budget:
                taken -= found.segments[number].disk_bytes
                found.segments.pop(number).path.unlink()
    kept = np.fromiter(found.segments, np.uint64)
    found.live, found.bad = (
        entries[np.isin(entries["segment"], kept)] for entries in (found.live, found.bad)
    )


def directory_of(directory: Path, identity: bytes) -> Path:
    return directory / f"{PREFIX}{identity.hex()}"


def expect_own(path: Path) -> None:
    """Raises StoreError for a store's directory, or one that it is in, which somebody else owns or may write
    to: what they put there would be served. One that is not there is no fault."""
    for each in (path, path.parent):
        try:
            there = os.stat(each)
        except FileNotFoundError:
            continue
        except OSError as fault:
            raise StoreError(
                f"{each} cannot be read: {reason(fault)}; change its permissions, or name another "
                "kv_directory"
            ) from fault
        if there.st_uid != os.geteuid():
            raise StoreError(
                f"{each} belongs to user {there.st_uid}, who could put any KV there; name a directory of "
                "your own"
            )
        if there.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StoreError(
                f"others may write to {each}, and could put any KV there; chmod go-w it, or name another "
                "directory"
            )


def locked(path: Path, make: bool) -> FileIO:
    """The lock of a store's directory, held until it is closed. Raises StoreLocked, or StoreError if it
    cannot be had."""
    try:
        while True:
            if make:
                make_private(path)
                expect_own(path)
            lock = FileIO(os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock.fileno()), os.stat(path / LOCK)):
                        return lock
            except BaseException:
                lock.close()
                raise
            lock.close()  # Whoever had it has removed it.
    except BlockingIOError as fault:
        raise StoreLocked(
            f"another process writes KV to {path}; wait until it ends, or name another kv_directory"
        ) from fault
    except OSError as fault:
        raise StoreError(
            f"{path} cannot be written: {reason(fault)}; free space or change its permissions, or name "
            "another kv_directory"
        ) from fault


def describe(path: Path, about: Mapping[str, object]) -> None:
    """Write store.json, unless it is there. Raises OSError."""
    text = json.dumps(about, indent=1).encode() + b"\n"
    with suppress(ReadError), DiskFile(path / ABOUT) as file:
        if file.size == len(text) and file.read(0, len(text)) == text:
            return
    replace_file(path / ABOUT, text).close()


def reason(fault: OSError | ReadError) -> str:
    return (fault.strerror if isinstance(fault, OSError) else None) or str(fault)
