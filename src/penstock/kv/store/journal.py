"""The journal of a BlockStore: an append-only file of entries of 64 bytes that says which record is where.

A KV block on the disk exists once the journal names it: its bytes are written into a segment first
(`segments`), and its entry here second (`operations.write_record`). At the next start the entries are
replayed (`replayed`, `surviving`).

Entry i of a journal carries the sequence number of entry 0 plus i, and a checksum that begins with the
store's identity. So what is torn, damaged, of another store or left over from another journal is no entry,
and nothing else is lost with it. Entry 0 is the head. No entry undoes another by its order, as a slot is
written once: a record is there if it is written, and neither forgotten nor quarantined.

Why this is safe. One process holds the store's lock. In it `append` and `rewrite` run on worker threads, one
at a time, by a lock that no interrupt can strike. An entry that could be written in part only is written over
by the next, as `count` has not grown. A new journal appears by a rename, when it is on the disk.
"""

import errno
import os
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from io import FileIO
from pathlib import Path
from struct import Struct
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from penstock.kv.ledger.keys import KEY_BYTES
from penstock.kv.store.seal import SEAL_BYTES
from penstock.kv.store.sizes import ENTRY_BYTES, MOST_SLOTS, SLOT_BITS
from penstock.memory.disk import DiskFile
from penstock.memory.writing import replace_file, write_all

SEGMENT_DIGITS = 12
"""Digits of a segment's number. A store never uses a number twice."""
_NUMBERS = 10**SEGMENT_DIGITS - 10**9
"""Segments that are named beyond this number are not ours. As many numbers are left as can be used up."""
_SEGMENT = re.compile(rf"(\d{{{SEGMENT_DIGITS}}})-(\d+)\.segment", re.ASCII)
_STRETCH = ENTRY_BYTES << 18
"""Bytes of a journal that are read at a time."""
_ENTRY = Struct(f"<IQ{KEY_BYTES}sQI{SEAL_BYTES}s")
_SUM = Struct("<I")
_FIELDS = "kind sequence key segment slot seal check", f"<u4 <u8 V{KEY_BYTES} <u8 <u4 V{SEAL_BYTES} <u4"
DTYPE = np.dtype(list(zip(*map(str.split, _FIELDS), strict=True)))
_COVERED = ENTRY_BYTES - _SUM.size

Entries = NDArray[np.void]
"""Entries are an array of DTYPE, `[entries]`."""


class Kind(IntEnum):
    """A Kind says what an entry notes. HEAD has the next segment's number as its segment, and a record's
    bytes as its slot."""

    HEAD = 1
    WRITTEN = 2
    FORGOTTEN = 3
    QUARANTINED = 4


@dataclass(frozen=True, slots=True)
class Item:
    """An Item is a record as an entry names it: its key, where it is, and its seal."""

    key: bytes
    segment: int
    slot: int
    seal: bytes


def encoded(kind: Kind, sequence: int, item: Item, seed: int) -> bytes:
    """Return an entry's ENTRY_BYTES. seed: the checksum of the store's identity."""
    data = _ENTRY.pack(kind, sequence, item.key, item.segment, item.slot, item.seal)
    return data + _SUM.pack(crc32(data, seed))


def decoded(data: bytes | bytearray, seed: int) -> tuple[Entries, NDArray[np.bool_]]:
    """Return the whole entries in `data`, and of each whether it is sound."""
    count = len(data) // ENTRY_BYTES
    view = memoryview(data)
    starts = range(0, count * ENTRY_BYTES, ENTRY_BYTES)
    sums = np.fromiter((crc32(view[at : at + _COVERED], seed) for at in starts), np.uint32, count)
    entries = np.frombuffer(data, DTYPE, count)
    return entries, entries["check"] == sums


@dataclass(frozen=True, slots=True)
class Replay:
    """A Replay is what a journal says.

    entries: the sound ones behind the head, in order.
    first: the sequence number of the head.
    count: entries up to the last sound one, the head and damaged ones included. A torn tail follows.
    """

    entries: Entries
    first: int
    count: int
    next_segment: int
    record_bytes: int


def replayed(path: Path, seed: int) -> Replay | None:
    """Read a journal. Return None if there is none, or none of this identity.

    Raises ReadError if it cannot be read.
    """
    if not os.path.lexists(path):
        return None
    parts = []
    with DiskFile(path) as file:
        for start in range(0, file.size, _STRETCH):
            parts.append(decoded(file.read(start, min(_STRETCH, file.size - start)), seed))
            if not parts[-1][1].any():
                break  # The tail was never written, however long the file says that it is.
    entries, sound = map(np.concatenate, zip(*parts, strict=True)) if parts else decoded(b"", seed)
    if not len(entries) or not sound[0] or entries[0]["kind"] != Kind.HEAD:
        return None
    head = entries[0]
    first = int(head["sequence"])
    sound &= entries["sequence"] == first + np.arange(len(entries), dtype=np.uint64)
    good = entries[sound][1:]
    count = int(good[-1]["sequence"]) - first + 1 if len(good) else 1
    newest = int(good["segment"].max()) + 1 if len(good) else 0
    return Replay(good, first, count, max(int(head["segment"]), newest), int(head["slot"]))


def surviving(entries: Entries, segments: Iterable[int]) -> tuple[Entries, Entries]:
    """Return the entries of the records that are there in these segments, and of the quarantined ones.

    Both are in the order of the journal. Of several records of a key the newest is there.
    """
    entries = entries[np.isin(entries["segment"], np.fromiter(segments, np.uint64))]
    places = entries["segment"] << np.uint64(SLOT_BITS) | entries["slot"]
    written = entries["kind"] == Kind.WRITTEN
    bad = entries["kind"] == Kind.QUARANTINED
    live = entries[written & ~np.isin(places, places[~written])]
    newest = {key: at for at, key in enumerate(live["key"].tolist())}
    return live[sorted(newest.values())], entries[bad]


class Journal:
    """A Journal appends to the file. It holds the store's lock, and gives it back when it is closed."""

    def __init__(self, path: Path, seed: int, record_bytes: int, limit: int, lock: FileIO) -> None:
        """Describe a journal that `resume` or `begin` opens.

        limit: entries, at most.
        lock: the store's lock (see `directory.locked`).
        """
        self._held = lock
        self.path, self._seed, self._record_bytes, self._limit = path, seed, record_bytes, limit
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._first = 0
        self.count = 0
        """Entries, with the head."""
        self.real_bytes = 0
        """Bytes of the disk that the file takes."""

    def resume(self, replay: Replay) -> None:
        """Go on behind what was replayed, and cut its torn tail off. Raises OSError."""
        self._file = FileIO(os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+")
        os.ftruncate(self._file.fileno(), replay.count * ENTRY_BYTES)
        self._first, self.count = replay.first, replay.count
        self._measure()

    def begin(self, entries: Sequence[Entries], first: int, next_segment: int) -> None:
        """Write a new journal of these entries in the place of the one that is there.

        The entries get sequence numbers from `first` on. Raises OSError, and then nothing has changed.
        """
        rows = np.concatenate([np.zeros(1, DTYPE), *entries])
        rows[0] = (Kind.HEAD, 0, bytes(KEY_BYTES), next_segment, self._record_bytes, bytes(SEAL_BYTES), 0)
        rows["sequence"] = first + np.arange(len(rows), dtype=np.uint64)
        data = rows.view(np.uint8).reshape(-1, ENTRY_BYTES)
        rows["check"] = np.fromiter(
            (crc32(row[:_COVERED].data, self._seed) for row in data), np.uint32, len(rows)
        )
        self._file, old = replace_file(self.path, data.reshape(-1).data), self._file
        self._first, self.count = first, len(rows)
        self._measure()
        if old is not None:
            old.close()

    def append(self, kind: Kind, items: Sequence[Item]) -> None:
        """Append an entry for each item; any thread may. Raises OSError, and then none of them is there."""
        with self._lock:
            assert self._file is not None
            if self.count + len(items) > self._limit:
                raise OSError(errno.ENOSPC, "the journal is as long as it may become")
            entries = (
                encoded(kind, self._first + self.count + at, item, self._seed)
                for at, item in enumerate(items)
            )
            write_all(self._file, b"".join(entries), self.count * ENTRY_BYTES)
            self.count += len(items)
            self._measure()

    def rewrite(self, order: Sequence[bytes]) -> None:
        """Write the journal anew, without what no longer matters; any thread may.

        Records are in the order of their keys in `order`, and then those that it lacks. Raises OSError or
        ReadError, and then nothing has changed.
        """
        with self._lock:
            replay = replayed(self.path, self._seed)
            if replay is None:
                raise OSError(errno.EIO, "the journal has lost its head")
            live, bad = surviving(replay.entries, segment_numbers(self.path.parent))
            rank = {key: at for at, key in enumerate(order)}
            ranks = [rank.get(key, len(rank)) for key in live["key"].tolist()]
            self.begin(
                [bad, live[np.argsort(np.array(ranks, np.int64), kind="stable")]],
                self._first + self.count,
                replay.next_segment,
            )

    def close(self) -> None:
        """Close the file, and give the store's lock back. A second call does nothing."""
        if self._file is not None:
            self._file.close()
        self._held.close()

    def _measure(self) -> None:
        assert self._file is not None
        self.real_bytes = real_bytes(self._file.fileno())


def segment_numbers(directory: Path) -> dict[int, tuple[Path, int]]:
    """Return the segments in a store's directory: of each its file, and the slots that it was made with.

    Raises OSError.
    """
    found = {}
    for entry in os.scandir(directory):
        name = _SEGMENT.fullmatch(entry.name)
        if name is not None and entry.is_file(follow_symlinks=False):
            number, slots = map(int, name.groups())
            if number < _NUMBERS and 0 < slots <= MOST_SLOTS:
                found[number] = Path(entry.path), slots
    return found


def real_bytes(file: int | Path) -> int:
    """Return the bytes of the disk that a file takes, as the file system counts them."""
    return os.stat(file).st_blocks * 512
