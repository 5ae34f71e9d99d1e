"""Operations: what a BlockStore's threads do, each of them one step of a KV block's way to the disk and back.

`write_record` puts a block's bytes into a slot and names it in the journal; `read_record` brings them back
and checks their seal; `move_records` is compaction. A worker is given all that it needs, and leaves what came
of it in the operation, where the engine's thread looks when its task is done.
"""

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path

from penstock.kv.store.diskpool import LostKV
from penstock.kv.store.journal import Item, Journal, Kind
from penstock.kv.store.seal import Seal
from penstock.kv.store.segments import SegmentFile, StoreError
from penstock.kv.store.space import SegmentState
from penstock.memory.disk import ReadError, reason
from penstock.memory.tasks import Task, Workers

FAILURES, RETRY_SECONDS = 8, 60.0
"""The disk is left alone for so many seconds after so many failures in a row."""
_log = logging.getLogger("penstock")
Fence = Callable[[], object]
"""A function that a worker calls first. It returns when the memory of an operation may be read or written."""


class IOStatus(Enum):
    """An IOStatus says what came of an operation."""

    NONE = "not tried, or the caller's own fault"
    RIGHT = "done"
    DAMAGED = "not what was written"
    FAILED = "the disk failed"
    GONE = "its segment is not there any more"


@dataclass(slots=True, eq=False)
class Operation:
    """An Operation is what a worker is to do, and what came of it.

    The worker writes `outcome`, and what a kind of operation adds, before the task is done. An operation
    without a kind appends to the journal.

    segments: those that are read or written.
    taken: whether the engine's thread has taken in what came of it.
    """

    segments: tuple[SegmentState, ...]
    task: Task = field(init=False)
    outcome: IOStatus = field(init=False, default=IOStatus.NONE)
    taken: bool = field(init=False, default=False)


@dataclass(slots=True, eq=False)
class Record(Operation):
    """A Record is read or written, in the one segment of `segments`.

    wanted: whether it has not been forgotten meanwhile.
    """

    item: Item
    wanted: bool = True


@dataclass(slots=True, eq=False)
class Move(Operation):
    """A Move copies records into other slots of `segments[0]`.

    wanted: the records, and the slot for each.
    moved: those that have been copied.
    damaged, unread: those that could not be, and the segments that could not be read.
    stop: whether to end early.
    """

    wanted: Sequence[tuple[SegmentState, Item, int]]
    moved: list[tuple[SegmentState, Item, int]] = field(default_factory=list)
    damaged: list[tuple[SegmentState, Item]] = field(default_factory=list)
    unread: list[SegmentState] = field(default_factory=list)
    stop: bool = False


@dataclass(slots=True, eq=False)
class Removal(Operation):
    """A Removal deletes the file of a segment."""


@dataclass(slots=True, eq=False)
class Rewriting(Operation):
    """A Rewriting writes the journal anew."""


@dataclass(slots=True)
class Health:
    """A Health says whether reading, or writing, is worth trying: not for a while after many failures.

    what: "reading" or "writing", for the log.
    """

    what: str
    path: Path
    clock: Callable[[], float]
    failures: int = 0
    until: float = 0.0

    @property
    def off(self) -> bool:
        """Tell whether the disk is left alone now."""
        return self.failures >= FAILURES and self.clock() < self.until

    def note(self, fault: BaseException | None) -> None:
        """Note that an operation was tried, and what it has raised, if it has."""
        if fault is None:
            if self.failures >= FAILURES:
                _log.warning("%s KV in %s works again", self.what, self.path)
            self.failures = 0
            return
        self.failures += 1
        if self.failures >= FAILURES:
            if not self.off:
                line = (
                    "%s KV in %s has failed %d times in a row (%s); it is off for %.0f s, and such KV is "
                    "computed again: check that disk"
                )
                _log.warning(line, self.what, self.path, self.failures, fault, RETRY_SECONDS)
            self.until = self.clock() + RETRY_SECONDS


class Intake:
    """An Intake gives operations to workers, and loses none when an interrupt strikes."""

    def __init__(self, keeper: Workers) -> None:
        """keeper: the workers by which a task is called off."""
        self._keeper = keeper
        self._putting: Task | None = None
        """The task that is noted and may not be put."""

    def put(
        self,
        workers: Workers,
        operation: Operation,
        work: Callable[[], object],
        note: Callable[[], object],
        noted: list[Task] | None = None,
    ) -> Task:
        """Make the operation's task, note it by `note` and in `noted`, then put it, and return it."""
        operation.task = self._putting = Task(work)
        if noted is not None:
            noted.append(operation.task)
        note()
        workers.put(operation.task)
        self._putting = None
        return operation.task

    def settle(self) -> None:
        """Call off what an interrupt has kept from being put, so that it comes to be done either way."""
        if self._putting is not None:
            self._keeper.call_off([self._putting])
            self._putting = None


def attempt(operation: Operation, work: Callable[[], object]) -> None:
    """Do the work of an operation, and note what came of it. Raises StoreError if the disk failed."""
    try:
        work()
    except (OSError, ReadError) as fault:
        operation.outcome = IOStatus.FAILED
        raise StoreError(
            f"KV cannot be kept on disk: {reason(fault)}; free space there, or name another kv_directory"
        ) from fault
    operation.outcome = IOStatus.RIGHT


def write_record(write: Record, data: memoryview, ready: Fence, journal: Journal, seal: Seal) -> None:
    """Seal and write a record, once `ready` has returned. Raises StoreError, or what `ready` does."""
    ready()
    write.item = replace(write.item, seal=seal.of(write.item.key, data))
    attempt(write, partial(_publish, write.segments[0].file, write.item, data, journal, seal.seed))


def _publish(file: SegmentFile, item: Item, data: memoryview, journal: Journal, seed: int) -> None:
    file.write(item, data, seed)
    journal.append(Kind.WRITTEN, [item])


def read_record(read: Record, data: memoryview, ready: Fence, seal: Seal) -> None:
    """Fill `data` with a record, once `ready` has returned. Raises LostKV, or what `ready` does."""
    ready()
    file, item = read.segments[0].file, read.item
    try:
        file.read(item.slot, data)
    except ReadError as fault:
        read.outcome = IOStatus.FAILED if os.path.lexists(file.path) else IOStatus.GONE
        raise LostKV(f"KV block {item.key.hex()}: {fault}") from fault
    if not seal.fits(item.seal, item.key, data):
        read.outcome = IOStatus.DAMAGED
        raise LostKV(
            f"KV block {item.key.hex()} in {file.path}, at byte {file.place(item.slot)}, is not what was "
            "written"
        )
    read.outcome = IOStatus.RIGHT


def move_records(move: Move, journal: Journal, seal: Seal) -> None:
    """Copy records into their new slots, and name them in the journal, one after the other.

    The slots that they came from go when the caller knows. Raises OSError.
    """
    target = move.segments[0].file
    with mmap.mmap(-1, target.record_bytes) as memory, memoryview(memory) as data:
        for source, item, slot in move.wanted:
            if move.stop:
                break
            try:
                source.file.read(item.slot, data)
            except ReadError:
                move.unread.append(source)
                continue
            if not seal.fits(item.seal, item.key, data):
                move.damaged.append((source, item))
                continue
            _publish(target, replace(item, segment=target.number, slot=slot), data, journal, seal.seed)
            move.moved.append((source, item, slot))
