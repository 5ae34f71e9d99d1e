"""BlockStore: the prefix cache's disk tier, whole KV blocks by their keys, which outlive the process.

A KV block comes here from host memory (`movement.transfers`) as a record: `write` seals it and puts it into a
slot of a segment, and it is found once the journal names it, in this order. A later request, perhaps of a
later process, finds its key in the index, and `read` brings it back to host memory.

Its seal (see `seal`) covers the store's identity, its key and its bytes, and every read is held against it: a
read gives what was written under this key, by this model in this layout, or LostKV. A record that is not as
it was written is quarantined: it stays where it is until its segment's room is needed, and is never served
again. One that cannot be read now is kept, and may be read later.

Why this is safe. The engine's thread calls all, and alone has the index: a worker is given a file, a slot and
memory, and leaves what came of it in the operation it was given, where the caller looks when its task is done
(`poll`). An operation is noted before its task is put (`Intake`). What an interrupt has kept from being put
is called off by the next call, and what `poll` was doing it may do again. A slot is given out once, so no
write is ordered against another. A segment is removed when nothing in it is known and no operation that is
under way reads or writes it (`upkeep`). Segments and the journal are made and written by workers: no call but
`open` and `close` waits for the disk.

What ends the process leaves either no entry in the journal, and the slot is never used, or one behind whole
bytes. What ends the machine may lose bytes, entries and files that were written and not yet on the disk, in
any order: an entry without its bytes fails its seal when it is read, one without its segment is not there,
and what was compacted or forgotten may be there again, as it was. None of it is a wrong byte.
"""

import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.kv.ledger.keys import KEY_BYTES
from penstock.kv.store.directory import NOTES, OpenDirectory, StoreIdentity, opened
from penstock.kv.store.diskpool import LostKV
from penstock.kv.store.operations import Fence, Health, Intake, IOStatus, Record, read_record, write_record
from penstock.kv.store.segments import StoreError
from penstock.kv.store.space import Space
from penstock.kv.store.upkeep import Upkeep
from penstock.memory.disk import DiskFile, ReadError
from penstock.memory.tasks import Task, Workers
from penstock.memory.writing import replace_file

Buffer = memoryview | NDArray[np.uint8]
"""A record in memory, contiguous. It goes past the page cache if it is aligned to pages and so is its
size."""
READERS, WRITERS = 8, 2
_MOST_NOTED = 1 << 16
"""Bytes of a note that are read, at most."""


class StoreFull(StoreError):
    """StoreFull is raised for a record for which there is no room now.

    There will be when others are forgotten, as soon as compaction has made room of theirs.
    """


@dataclass(frozen=True, slots=True)
class StoreStats:
    """StoreStats count what a store has now, and what has happened since it was opened.

    real_bytes: bytes of the disk, at most: segments, the journal, and what is being made.
    quarantined: records that are kept and never served.
    """

    records: int
    live_bytes: int
    real_bytes: int
    segments: int
    read_bytes: int
    written_bytes: int
    checksum_failures: int
    io_failures: int
    quarantined: int
    compactions: int
    reads_off: bool
    writes_off: bool


class BlockStore:
    """A BlockStore has records of `record_bytes` by keys of KEY_BYTES, on disk. One thread calls all."""

    def __init__(
        self, there: OpenDirectory, threads: tuple[int, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take over a directory that `open` has opened."""
        self.path, self.record_bytes = there.path, there.found.record_bytes
        self.capacity = there.size.capacity
        """Records that it holds. While there are so many, with those being written, writes are refused until
        some are forgotten."""
        self._seal, self._journal = there.seal, there.journal
        self._space = Space(there.path, there.found, there.size)
        self._index = self._space.index
        self._touched = False
        """Whether the order of use has changed since it was opened."""
        self._reading, self._writing = (Health(what, there.path, clock) for what in ("reading", "writing"))
        self._writes: dict[bytes, Record] = {}
        self._reads: list[Record] = []
        self._closed = False
        self._read_bytes = self._written_bytes = 0
        with ExitStack() as started:
            self._readers, self._writers, self._keeper = (
                started.enter_context(closing(Workers(count, f"KV store {name}")))
                for count, name in ((threads[0], "reader"), (threads[1], "writer"), (1, "keeper"))
            )
            started.pop_all()
        self._intake = Intake(self._keeper)
        self._upkeep = Upkeep(there, self._space, self._writing, self._intake, self._keeper)

    @classmethod
    def open(
        cls,
        directory: Path,
        identity: StoreIdentity,
        cap_bytes: int,
        *,
        read_only: bool = False,
        threads: tuple[int, int] = (READERS, WRITERS),
        clock: Callable[[], float] = time.monotonic,
    ) -> "BlockStore":
        """Open the store of this identity under `directory`; it is made if it is not there.

        cap_bytes: bytes of the disk that it takes, at most, its journal and room for compaction included.
            What is there beyond goes, longest unused first.
        read_only: whether to read only what its journal names now, beside a process that writes. What that
            process compacts meanwhile is lost here.
        threads: how many read, and how many write.

        Raises StoreLocked if another process writes to it, StoreError if it cannot be read or written, or the
        cap is too small.
        """
        with opened(directory, identity, cap_bytes, read_only=read_only) as there:
            return cls(there, threads, clock)

    # ---- what is there

    @property
    def read_only(self) -> bool:
        """Tell whether nothing can be written."""
        return self._journal is None

    def note(self, text: bytes) -> None:
        """Keep a text beside the records for the next process, unless the store is only read.

        It is lost without a word if that fails.
        """
        if not self.read_only:
            with suppress(OSError):
                replace_file(self.path / NOTES, text).close()

    def noted(self) -> bytes:
        """Return what was noted last; nothing if there is none, or it cannot be read."""
        with suppress(ReadError), DiskFile(self.path / NOTES) as file:
            return bytes(file.read(0, min(file.size, _MOST_NOTED)))
        return b""

    def __contains__(self, key: bytes) -> bool:
        return key in self._index and not self._reading.off

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those that it does not have, within reach or not."""
        return [key for key in keys if key not in self._index]

    def __len__(self) -> int:
        return len(self._index)

    def keys(self) -> list[bytes]:
        """Return the keys of all records, the longest unused first."""
        return list(self._index)

    @property
    def stats(self) -> StoreStats:
        """Return the counts now."""
        segments = self._space.segments.values()
        return StoreStats(
            records=len(self),
            live_bytes=len(self) * self.record_bytes,
            real_bytes=self._space.taken + (self._journal.real_bytes if self._journal else 0) + mmap.PAGESIZE,
            segments=len(segments),
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            checksum_failures=self._upkeep.checksum_failures,
            io_failures=self._upkeep.io_failures,
            quarantined=sum(len(segment.bad) for segment in segments),
            compactions=self._upkeep.compactions,
            reads_off=self._reading.off,
            writes_off=self._writing.off,
        )

    # ---- what is asked of it

    def write(self, key: bytes, payload: Buffer, ready: Fence, noted: list[Task] | None = None) -> Task:
        """Write a record, after `ready` has returned on a worker. Its key is found when it is done and `poll`
        has taken it in.

        payload: may not change until the task is done.
        noted: is given the task before it is put, for a caller that an interrupt keeps from getting it.

        The task's result raises StoreError if the record could not be written, or what `ready` has raised.
        """
        journal = self._journal
        assert journal is not None, "a record for a store that is only read"
        assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
        data = self._checked(payload)
        self.poll()
        if (same := self._writes.get(key)) is not None:
            same.wanted = True
            return same.task
        if key in self._index:
            self.touch((key,))
            return _over(None)
        if self._closed or self._writing.off:
            why = "closed" if self._closed else "off, since writing to it has failed"
            return _over(StoreError(f"{self.path} is {why}"))
        room = len(self) + len(self._writes) < self.capacity
        claimed = self._space.claim() if room else None
        if claimed is None:
            have = f"{len(self)} records of {self.capacity}"
            return _over(StoreFull(f"{self.path} has {have}; raise disk_kv_memory, or wait for compaction"))
        segment, slot = claimed
        write = Record((segment,), segment.item(key, slot))
        work = partial(write_record, write, data, ready, journal, self._seal)
        note = partial(self._writes.__setitem__, key, write)
        return self._intake.put(self._writers, write, work, note, noted)

    def read(self, key: bytes, into: Buffer, ready: Fence, noted: list[Task] | None = None) -> Task:
        """Fill `into` with a record, after `ready` has returned on a worker.

        into: may be written until the task is done, even if it is not waited for.
        noted: as for `write`.

        The task's result raises LostKV if the record is not to be had, or what `ready` has raised; what is in
        `into` then means nothing.
        """
        data = self._checked(into)
        self._intake.settle()
        place = self._index.get(key)
        if place is None or self._closed or self._reading.off:
            beyond = "is out of reach: its store is closed, or off as reading has failed"
            why = "is not there" if place is None else beyond
            return _over(LostKV(f"KV block {key.hex()} in {self.path} {why}"))
        segment, slot = self._space.find(place)
        read = Record((segment,), segment.item(key, slot))
        self.touch((key,))
        work = partial(read_record, read, data, ready, self._seal)
        return self._intake.put(self._readers, read, work, partial(self._reads.append, read), noted)

    def call_off(self, tasks: Sequence[Task]) -> None:
        """Keep tasks from beginning that have not begun.

        Those that have go on: memory is its caller's again when a task is done, not before.
        """
        self._keeper.call_off(tasks)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that these have been used. The journal keeps the order when it is written anew, as at the
        end."""
        for key in keys:
            if key in self._index:
                self._index.move_to_end(key)
                self._touched = True

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let these be found no more, those being written included, and give their room to others."""
        self.poll()
        gone = []
        for key in keys:
            if (write := self._writes.get(key)) is not None:
                write.wanted = False
            if (place := self._index.get(key)) is not None:
                segment, slot = self._space.find(place)
                gone.append(segment.item(key, slot))
                self._upkeep.suspects.add(segment)
                del self._index[key]
                segment.keys[slot] = None
        self._upkeep.forgotten(gone)
        self._upkeep.tend((*self._writes.values(), *self._reads))

    def poll(self) -> None:
        """Take in what has been done. Call it once in a while; it waits for nothing."""
        self._intake.settle()
        for write in list(self._writes.values()):
            if write.task.done:
                self._take_write(write)
        for read in self._reads:
            if read.task.done and not read.taken:
                self._take_read(read)
        self._reads = [read for read in self._reads if not read.taken]
        self._upkeep.take()
        self._upkeep.tend((*self._writes.values(), *self._reads))

    def close(self) -> None:
        """Finish what has begun, note the order of use, and let go.

        Call it again if it was interrupted; else that does nothing.
        """
        self._closed = True
        self._intake.settle()
        self._upkeep.stop()
        self._readers.close()
        self._writers.close()
        self.poll()
        if self._journal is not None and self._touched and not self._writing.off:
            self._touched = False
            self._upkeep.rewrite(self._journal)
        self._upkeep.close()
        self.poll()
        if self._journal is not None:
            self._journal.close()

    def _checked(self, buffer: Buffer) -> memoryview:
        data = (buffer.data if isinstance(buffer, np.ndarray) else buffer).cast("B")
        assert len(data) == self.record_bytes, f"{len(data)} bytes for a record of {self.record_bytes}"
        return data

    # ---- what has been done

    def _take_write(self, write: Record) -> None:
        (segment,), item = write.segments, write.item
        if write.outcome is IOStatus.RIGHT and write.wanted:
            self._space.hold(item.key, segment, item.slot, item.seal)
            self.touch((item.key,))
        self._upkeep.suspects.add(segment)
        self._writes.pop(item.key, None)
        if write.outcome is IOStatus.RIGHT:
            self._written_bytes += self.record_bytes
            self._writing.note(None)
            if not write.wanted:
                self._upkeep.forgotten([item])
        elif write.outcome is IOStatus.FAILED:
            segment.next = segment.file.slots  # It may not even be there: another one is made.
            self._fail(self._writing, write.task)

    def _take_read(self, read: Record) -> None:
        if read.outcome is IOStatus.GONE and self.read_only:
            self._index.pop(read.item.key, None)
        elif read.outcome in (IOStatus.FAILED, IOStatus.GONE):
            self._fail(self._reading, read.task)
        elif read.outcome is not IOStatus.NONE:
            self._reading.note(None)
            self._read_bytes += self.record_bytes
        if read.outcome is IOStatus.DAMAGED:
            self._upkeep.quarantine(read.segments[0], read.item)
        read.taken = True

    def _fail(self, health: Health, task: Task) -> None:
        self._upkeep.io_failures += 1
        health.note(task.fault)


def _over(fault: Exception | None) -> Task:
    """Return a task that is done."""
    task = Task(lambda: None)
    task.fault = fault
    task.reach()
    return task
