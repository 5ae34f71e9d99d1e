"""The prefix cache's disk tier: whole KV blocks by their keys, which outlive the process.

A record is there when its bytes are in a segment and the journal names it, in this order. Its seal (see
`seal`) covers the store's identity, its key and its bytes, and every read is held against it: a read gives
what was written under this key, by this model in this layout, or LostKV. A record that is not as it was
written is quarantined: kept where it is until its segment's room is needed, and never served again. One that
cannot be read now is kept, and may be read later.

Why this is safe. The engine's thread calls all, and alone has the index: a worker is given a file, a slot and
memory, and leaves what came of it in the operation it was given, where the caller looks when its task is done
(`poll`). An operation is noted before its task is put; what an interrupt has kept from being put is called
off by the next call, and what `poll` was doing it may do again. A slot is given out once, so no write is
ordered against another; a segment is removed when nothing in it is known and no operation that is under way
reads or writes it. Segments and the journal are made and written by workers: no call but `open` and `close`
waits for the disk.

What ends the process leaves either no entry in the journal, and the slot is never used, or one behind whole
bytes. What ends the machine may lose bytes, entries and files that were written and not yet on the disk, in
any order: an entry without its bytes fails its seal when it is read, one without its segment is not there,
and what was compacted or forgotten may be there again, as it was. None of it is a wrong byte.
"""

import logging
import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.kv.ledger.keys import KEY_BYTES
from penstock.kv.store.diskpool import LostKV
from penstock.kv.store.journal import Item, Journal, Kind, replace_file
from penstock.kv.store.operations import (
    Health,
    Move,
    Operation,
    Outcome,
    Record,
    Removal,
    Rewriting,
    attempt,
    move_records,
    read_record,
    write_record,
)
from penstock.kv.store.seal import Seal, key_id, sealed_identity
from penstock.kv.store.segments import (
    JOURNAL,
    NOTES,
    Contents,
    Sizes,
    StoreError,
    contents,
    describe,
    directory_of,
    expect_own,
    expect_size,
    locked,
    reason,
    sizes,
    trim,
)
from penstock.kv.store.space import Segment, Space
from penstock.memory.disk import DiskFile, ReadError
from penstock.memory.tasks import Task, Workers

Buffer = memoryview | NDArray[np.uint8]
"""A record in memory, contiguous. Past the page cache if it is aligned to pages and so is its size."""
Ready = Callable[[], object]

READERS, WRITERS = 8, 2
_MOST_NOTED = 1 << 16
"""Bytes."""
_STALE = 256
"""Entries of the journal beyond twice its records, before it is worth writing anew."""
_log = logging.getLogger("penstock")


class StoreFull(StoreError):
    """A record for which there is no room now. When others are forgotten, there will be, as soon as
    compaction has made it of theirs."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """`real_bytes`: of the disk, at most: segments, the journal, and what is being made. `quarantined`:
    records kept so now."""

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
    """Records of `record_bytes` by keys of KEY_BYTES, on disk. All is called by one thread."""

    def __init__(
        self,
        path: Path,
        seal: Seal,
        found: Contents,
        size: Sizes,
        writing: tuple[Journal, FileIO] | None,
        threads: tuple[int, int],
        clock: Callable[[], float],
    ) -> None:
        """To be had from `open`. `writing`: the journal and the lock, unless it is only read."""
        self.path, self.record_bytes = path, found.record_bytes
        self.capacity = size.capacity
        """Records that it holds. While there are so many, with those being written, writes are refused until
        some are forgotten."""
        self._seal, self._usual_slots = seal, size.slots
        self._journal = writing[0] if writing else None
        self._lock = writing[1] if writing else None
        self._space = Space(path, found, size)
        self._index = self._space.index
        self._touched: dict[bytes, None] = {}
        """In the order of use, which is later than that of all others in the index."""
        self._suspects: set[Segment] = set()
        """In which nothing may be left."""
        self._stirred = True
        """Whether there may be something for compaction that was not when it was last looked for."""
        self._rewrite_at = 0
        self._reading, self._writing = Health("reading", path, clock), Health("writing", path, clock)
        self._writes: dict[bytes, Record] = {}
        self._reads: list[Record] = []
        self._chores: list[Operation] = []
        self._putting: Task | None = None
        """One that is noted and may not be put."""
        self._last: Task | None = None
        self._closed = False
        self._read_bytes = self._written_bytes = self._checksum_failures = self._io_failures = (
            self._compactions
        ) = 0
        with ExitStack() as started:
            self._readers, self._writers, self._keeper = (
                started.enter_context(closing(Workers(count, f"KV store {name}")))
                for count, name in ((threads[0], "reader"), (threads[1], "writer"), (1, "keeper"))
            )
            started.pop_all()

    @classmethod
    def open(
        cls,
        directory: Path,
        identity: bytes,
        record_bytes: int,
        cap_bytes: int,
        *,
        secret: bytes,
        readers: int = READERS,
        writers: int = WRITERS,
        read_only: bool = False,
        about: Mapping[str, object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> "BlockStore":
        """The store of this identity under `directory`, which is made if it is not there.

        identity: a digest of all that the meaning of a record's bytes depends on and its key does not:
        weights, dtype, rope, layout. cap_bytes: most of the disk that it takes, its journal and room for
        compaction included. What is there beyond goes, longest unused
            first.
        secret: with which its records are sealed (see `seal`). With another one this is another store.
        read_only: what its journal names now, beside a process that writes; what is compacted there meanwhile
        is lost here. about: for people, in store.json.

        Raises StoreLocked if another process writes to it, StoreError if it cannot be read or written, or the
        cap is too small.
        """
        assert 0 < len(identity) <= 64, f"a digest of {len(identity)} bytes"
        identity = sealed_identity(identity, secret)
        path, seal = directory_of(directory, identity), Seal(identity, secret)
        size = sizes(cap_bytes, record_bytes)
        if read_only:
            expect_own(path)
            found = contents(path, seal.seed, record_bytes)
            expect_size(path, found, record_bytes)
            return cls(path, seal, found, size, None, (readers, writers), clock)
        lock = locked(path, make=True)
        journal = Journal(path / JOURNAL, seal.seed, record_bytes, size.entries)
        try:
            found = contents(path, seal.seed, record_bytes)
            expect_size(path, found, record_bytes)
            try:
                describe(
                    path,
                    {
                        "identity": identity.hex(),
                        "record_bytes": record_bytes,
                        "sealed_with": key_id(secret),
                        **(about or {}),
                    },
                )
                if found.replay:
                    journal.resume(found.replay)
                else:
                    journal.begin([found.live], 0, found.next_segment)
                trim(found, size)
            except (OSError, ReadError) as fault:
                raise StoreError(
                    f"{path} cannot be written: {reason(fault)}; free space or change its permissions, or "
                    "name another kv_directory"
                ) from fault
            return cls(path, seal, found, size, (journal, lock), (readers, writers), clock)
        except BaseException:
            journal.close()
            lock.close()
            raise

    # ---- what is there

    @property
    def read_only(self) -> bool:
        return self._journal is None

    def note(self, text: bytes) -> None:
        """Kept beside the records for whoever opens the store next, unless it is only read; lost without a
        word if that fails."""
        if not self.read_only:
            with suppress(OSError):
                replace_file(self.path / NOTES, text).close()

    def noted(self) -> bytes:
        """What was noted last; nothing if there is none, or it cannot be read."""
        with suppress(ReadError), DiskFile(self.path / NOTES) as file:
            return bytes(file.read(0, min(file.size, _MOST_NOTED)))
        return b""

    def __contains__(self, key: bytes) -> bool:
        return key in self._index and not self._reading.off

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those that it does not have, within reach or not."""
        return [key for key in keys if key not in self._index]

    def __len__(self) -> int:
        return len(self._index)

    def keys(self) -> list[bytes]:
        """Those that were not used for longest first."""
        return [
            *(key for key in self._index if key not in self._touched),
            *(key for key in self._touched if key in self._index),
        ]

    @property
    def stats(self) -> StoreStats:
        segments = self._space.segments.values()
        return StoreStats(
            records=len(self),
            live_bytes=len(self) * self.record_bytes,
            real_bytes=self._space.taken + (self._journal.real_bytes if self._journal else 0) + mmap.PAGESIZE,
            segments=len(segments),
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            checksum_failures=self._checksum_failures,
            io_failures=self._io_failures,
            quarantined=sum(len(segment.bad) for segment in segments),
            compactions=self._compactions,
            reads_off=self._reading.off,
            writes_off=self._writing.off,
        )

    # ---- what is asked of it

    def write(self, key: bytes, payload: Buffer, ready: Ready, noted: list[Task] | None = None) -> Task:
        """Write a record, after `ready` has returned on a worker. `payload` may not change until the task is
        done; its result raises StoreError if it could not be written, or what `ready` has raised. When it is
        done, and taken in by `poll`, its key is found.

        noted: is given the task before it is put, for a caller that an interrupt keeps from being told it.
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
            return _over(
                StoreError(
                    f"{self.path} is {'closed' if self._closed else 'off, since writing to it has failed'}"
                )
            )
        room = len(self) + len(self._writes) < self.capacity
        claimed = self._space.claim() if room else None
        if claimed is None:
            return _over(
                StoreFull(
                    f"{self.path} has {len(self)} records of {self.capacity}; raise disk_kv_memory, or wait "
                    "for compaction"
                )
            )
        segment, slot = claimed
        write = Record((segment,), segment.item(key, slot))
        write.task = Task(partial(write_record, write, data, ready, journal, self._seal))
        self._putting = write.task
        if noted is not None:
            noted.append(write.task)
        self._writes[key] = write
        self._writers.put(write.task)
        self._putting = None
        return write.task

    def read(self, key: bytes, into: Buffer, ready: Ready, noted: list[Task] | None = None) -> Task:
        """Fill `into` with a record, after `ready` has returned on a worker. The task's result raises LostKV
        if it is not to be had, or what `ready` has raised; what is in `into` then means nothing. Until the
        task is done `into` may be written, whoever waits or not.

        noted: as for `write`.
        """
        data = self._checked(into)
        self._settle()
        place = self._index.get(key)
        if place is None or self._closed or self._reading.off:
            why = (
                "is not there"
                if place is None
                else "is out of reach: its store is closed, or off as reading has failed"
            )
            return _over(LostKV(f"KV block {key.hex()} in {self.path} {why}"))
        segment, slot = self._space.find(place)
        read = Record((segment,), segment.item(key, slot))
        read.task = Task(partial(read_record, read, data, ready, self._seal))
        self.touch((key,))
        self._putting = read.task
        if noted is not None:
            noted.append(read.task)
        self._reads.append(read)
        self._readers.put(read.task)
        self._putting = None
        return read.task

    def give_up(self, tasks: Sequence[Task]) -> None:
        """What has not begun never will. What has goes on; memory is its caller's again when a task is done,
        not before."""
        self._keeper.call_off(tasks)

    def touch(self, keys: Iterable[bytes]) -> None:
        """They have been used. Kept when the journal is written anew, as it is at the end."""
        for key in keys:
            if key in self._index:
                self._touched.pop(key, None)
                self._touched[key] = None

    def forget(self, keys: Iterable[bytes]) -> None:
        """They are not found any more, nor is what is being written, and their room is for others."""
        self.poll()
        gone = []
        for key in keys:
            self._touched.pop(key, None)
            if (write := self._writes.get(key)) is not None:
                write.wanted = False
            if (place := self._index.get(key)) is not None:
                segment, slot = self._space.find(place)
                gone.append(segment.item(key, slot))
                self._suspects.add(segment)
                del self._index[key]
                segment.keys[slot] = None
        self._forgotten(gone)
        self._tend()

    def poll(self) -> None:
        """Take in what has been done. To be called once in a while; it waits for nothing."""
        self._settle()
        for write in list(self._writes.values()):
            if write.task.done:
                self._take_write(write)
        for read in self._reads:
            if read.task.done and not read.taken:
                self._take_read(read)
        self._reads = [read for read in self._reads if not read.taken]
        for chore in self._chores:
            if chore.task.done and not chore.taken:
                self._take_chore(chore)
        self._chores = [chore for chore in self._chores if not chore.taken]
        self._tend()

    def close(self) -> None:
        """Finish what has begun, note the order of use, let go. To be called again if it was interrupted;
        else that does nothing."""
        self._closed = True
        self._settle()
        for chore in self._chores:
            if isinstance(chore, Move):
                chore.stop = True
        self._readers.close()
        self._writers.close()
        if self._last is None and self._journal is not None and self._touched and not self._writing.off:
            self._putting = last = Task(partial(self._journal.rewrite, self.keys()))
            self._last = last
            self._keeper.put(last)
            self._putting = None
        for chore in self._chores:  # What is forgotten should not be there again.
            chore.task.wait()
        if self._last is not None:
            self._last.wait()
        self._keeper.close()
        self.poll()
        if self._journal is not None:
            self._journal.close()
        if self._lock is not None:
            self._lock.close()

    def _checked(self, buffer: Buffer) -> memoryview:
        data = (buffer.data if isinstance(buffer, np.ndarray) else buffer).cast("B")
        assert len(data) == self.record_bytes, f"{len(data)} bytes for a record of {self.record_bytes}"
        return data

    # ---- what has been done

    def _settle(self) -> None:
        """Call off what an interrupt has kept from being put, so that it comes to be done either way."""
        if self._putting is not None:
            self._keeper.call_off([self._putting])
            self._putting = None

    def _take_write(self, write: Record) -> None:
        segment, item = write.segment, write.item
        if write.outcome is Outcome.RIGHT and write.wanted:
            self._space.hold(item.key, segment, item.slot, item.seal)
            self.touch((item.key,))
        self._suspects.add(segment)
        self._writes.pop(item.key, None)
        if write.outcome is Outcome.RIGHT:
            self._written_bytes += self.record_bytes
            self._writing.note(None)
            if not write.wanted:
                self._forgotten([item])
        elif write.outcome is Outcome.FAILED:
            segment.next = segment.file.slots  # It may not even be there: another one is made.
            self._fail(self._writing, write.task)

    def _take_read(self, read: Record) -> None:
        if read.outcome is Outcome.GONE and self.read_only:
            self._index.pop(read.item.key, None)
        elif read.outcome in (Outcome.FAILED, Outcome.GONE):
            self._fail(self._reading, read.task)
        elif read.outcome is not Outcome.NONE:
            self._reading.note(None)
            self._read_bytes += self.record_bytes
        if read.outcome is Outcome.DAMAGED:
            self._quarantine(read.segment, read.item)
        read.taken = True

    def _take_chore(self, chore: Operation) -> None:
        right = chore.outcome is Outcome.RIGHT
        if isinstance(chore, Move):
            self._take_move(chore)
            if right:
                self._writing.note(None)
            elif chore.outcome is Outcome.FAILED:
                self._writing.note(chore.task.fault)
        elif isinstance(chore, Removal) and right:
            self._space.segments.pop(chore.segments[0].file.number, None)
            self._stirred = True
        elif isinstance(chore, Rewriting):
            self._rewrite_at = 0 if right or self._journal is None else self._journal.count + _STALE
        if chore.outcome is Outcome.FAILED:
            self._io_failures += 1
            for segment in chore.segments:
                segment.troubles += 1
        chore.taken = True

    def _take_move(self, move: Move) -> None:
        target, unwanted = move.segments[0], []
        for source, item, slot in move.moved:
            old, new = source.place(item.slot), target.place(slot)
            if self._index.get(item.key) in (old, new):
                self._space.hold(item.key, target, slot, item.seal)
                source.keys[item.slot] = None
            else:
                unwanted.append(Item(item.key, target.file.number, slot, item.seal))
        for source, item in move.damaged:
            self._quarantine(source, item)
        for source in move.unread:
            source.troubles += 1
        self._forgotten(unwanted)
        self._io_failures += len(move.unread)
        self._compactions += 1
        self._suspects.update(move.segments)
        self._stirred = True

    def _quarantine(self, segment: Segment, item: Item) -> None:
        if item.slot not in segment.bad:
            self._checksum_failures += 1
            line = "KV block %s in %s, slot %d, is not what was written; it is kept, and not used again"
            _log.warning(line, item.key.hex(), segment.file.path, item.slot)
        segment.bad.add(item.slot)
        if self._index.get(item.key) == segment.place(item.slot):
            del self._index[item.key]
        segment.keys[item.slot] = None
        self._stirred = True
        self._note(Kind.QUARANTINED, [item])

    def _fail(self, health: Health, task: Task) -> None:
        self._io_failures += 1
        health.note(task.fault)

    # ---- room

    def _tend(self) -> None:
        """Begin what makes room, where it is needed, and a new journal where the old one is mostly stale."""
        if self._journal is None or self._closed or self._writing.off:
            return
        stale = self._journal.count > max(2 * len(self) + _STALE, self._rewrite_at)
        if stale and not any(isinstance(chore, Rewriting) for chore in self._chores):
            self._chore(Rewriting(()), partial(self._journal.rewrite, self.keys()))
        if any(isinstance(chore, Move | Removal) for chore in self._chores):
            return
        for segment in self._idle(self._suspects):
            if not segment.bad and segment.live == 0:
                self._remove(segment)
            self._suspects.discard(segment)
        if self._stirred and self._space.spare < self._usual_slots // 2 and not self._space.grows:
            self._make_room(self._journal)

    def _idle(self, segments: Iterable[Segment]) -> list[Segment]:
        """Those that are full, and that no operation reads or writes."""
        operations = (*self._writes.values(), *self._reads, *self._chores)
        busy = {segment for operation in operations for segment in operation.segments}
        return [segment for segment in segments if segment.full and segment not in busy]

    def _make_room(self, journal: Journal) -> None:
        """Remove a segment that has nothing but what is quarantined; or else move records out of segments."""
        idle = self._idle(self._space.segments.values())
        for segment in idle:
            if segment.live == 0 and segment.troubles == 0:
                return self._remove(segment)
        found = self._space.compaction(idle)
        self._stirred = found is not None or len(idle) < len(
            self._space.segments
        )  # There may be more when all are idle.
        if found is None:
            return None
        target, sources, records = found
        move = Move((target, *sources), [(source, item, slot) for slot, (source, item) in enumerate(records)])
        self._chore(move, partial(move_records, move, journal, self._seal))
        self._space.use(target, len(records))
        return None

    def _remove(self, segment: Segment) -> None:
        self._chore(Removal((segment,)), partial(segment.file.path.unlink, missing_ok=True))

    def _forgotten(self, items: Sequence[Item]) -> None:
        if items:
            self._stirred = True
            self._note(Kind.FORGOTTEN, items)

    def _note(self, kind: Kind, items: Sequence[Item]) -> None:
        if self._journal is not None and not self._closed:
            self._chore(Operation(()), partial(self._journal.append, kind, items))

    def _chore(self, chore: Operation, work: Callable[[], object]) -> None:
        chore.task = Task(partial(attempt, chore, work))
        self._putting = chore.task
        self._chores.append(chore)
        self._keeper.put(chore.task)
        self._putting = None


def _over(fault: Exception | None) -> Task:
    """A task that is done."""
    task = Task(lambda: None)
    task.fault = fault
    task.reach()
    return task
