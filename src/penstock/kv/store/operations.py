"""What threads do for a BlockStore: each operation is given to a worker with all that it needs, and says
afterwards what came of it."""

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
from penstock.kv.store.segments import SegmentFile, StoreError, reason
from penstock.kv.store.space import Segment
from penstock.memory.disk import ReadError
from penstock.memory.tasks import Task

FAILURES, RETRY_SECONDS = 8, 60.0
"""After so many failures in a row the disk is left alone for so long."""
_log = logging.getLogger("penstock")


class Outcome(Enum):
    NONE = "not tried, or the caller's own fault"
    RIGHT = "done"
    DAMAGED = "not what was written"
    FAILED = "the disk failed"
    GONE = "its segment is not there any more"


@dataclass(slots=True, eq=False)
class Operation:
    """What a worker is to do, and what came of it: it writes `outcome` and what a kind of operation adds,
    before the task is done. One without a kind is an entry in the journal."""

    segments: tuple[Segment, ...]
    """That are read or written."""
    task: Task = field(init=False)
    outcome: Outcome = field(init=False, default=Outcome.NONE)
    taken: bool = field(init=False, default=False)


@dataclass(slots=True, eq=False)
class Record(Operation):
    """A read or a write. `wanted`: whether it has not been forgotten meanwhile."""

    item: Item
    wanted: bool = True

    @property
    def segment(self) -> Segment:
        return self.segments[0]


@dataclass(slots=True, eq=False)
class Move(Operation):
    """Records that are copied into other slots of `segments[0]`: what is to be moved, what has been, and what
    could not be read."""

    wanted: Sequence[tuple[Segment, Item, int]]
    moved: list[tuple[Segment, Item, int]] = field(default_factory=list)
    damaged: list[tuple[Segment, Item]] = field(default_factory=list)
    unread: list[Segment] = field(default_factory=list)
    stop: bool = False


@dataclass(slots=True, eq=False)
class Removal(Operation):
    """Of a segment."""


@dataclass(slots=True, eq=False)
class Rewriting(Operation):
    """Of the journal."""


@dataclass(slots=True)
class Health:
    """Whether reads, or writes, are worth trying."""

    what: str
    path: Path
    clock: Callable[[], float]
    failures: int = 0
    until: float = 0.0

    @property
    def off(self) -> bool:
        return self.failures >= FAILURES and self.clock() < self.until

    def note(self, fault: BaseException | None) -> None:
        """What came of one that was tried: nothing wrong, or what."""
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


def attempt(operation: Operation, work: Callable[[], object]) -> None:
    try:
        work()
    except (OSError, ReadError) as fault:
        operation.outcome = Outcome.FAILED
        raise StoreError(
            f"KV cannot be kept on disk: {reason(fault)}; free space there, or name another kv_directory"
        ) from fault
    operation.outcome = Outcome.RIGHT


def write_record(
    write: Record, data: memoryview, ready: Callable[[], object], journal: Journal, seal: Seal
) -> None:
    ready()
    write.item = replace(write.item, seal=seal.of(write.item.key, data))
    attempt(write, partial(_publish, write.segment.file, write.item, data, journal, seal.seed))


def _publish(file: SegmentFile, item: Item, data: memoryview, journal: Journal, seed: int) -> None:
    file.write(item, data, seed)
    journal.append(Kind.WRITTEN, [item])


def read_record(read: Record, data: memoryview, ready: Callable[[], object], seal: Seal) -> None:
    ready()
    file, item = read.segment.file, read.item
    try:
        file.read(item.slot, data)
    except ReadError as fault:
        read.outcome = Outcome.FAILED if os.path.lexists(file.path) else Outcome.GONE
        raise LostKV(f"KV block {item.key.hex()}: {fault}") from fault
    if not seal.fits(item.seal, item.key, data):
        read.outcome = Outcome.DAMAGED
        raise LostKV(
            f"KV block {item.key.hex()} in {file.path}, at byte {file.place(item.slot)}, is not what was "
            "written"
        )
    read.outcome = Outcome.RIGHT


def move_records(move: Move, journal: Journal, seal: Seal) -> None:
    """Each record is published where it is now before the next one is read; those that it came from go when
    the caller knows."""
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
            _publish(target, Item(item.key, target.number, slot, item.seal), data, journal, seal.seed)
            move.moved.append((source, item, slot))
