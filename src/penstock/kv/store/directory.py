"""A store's directory: who may have it, what it is called, and what is in it when it is opened.

    <kv_directory>/kv2-<identity>/  store.json           what this is, for people
                                    lock                 held by the process that writes
                                    journal              which record is where, and its seal
                                    <number>-<slots>.segment
                                    rates.json           what a process tells the next

A block that an earlier process has written comes back to life here: `opened` replays the journal into the
entries of all records (`Contents`), from which `space.Space` makes the index that a key is looked up in.
"""

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import numpy as np

from penstock.base.units import format_size
from penstock.kv.store.journal import (
    DTYPE,
    Entries,
    Journal,
    Replay,
    replayed,
    segment_numbers,
    surviving,
)
from penstock.kv.store.seal import Seal, key_id, sealed_identity
from penstock.kv.store.segments import SegmentFile, Sizes, StoreError, StoreLocked, sizes
from penstock.kv.store.sizes import planned_bytes
from penstock.memory.disk import DiskFile, ReadError, make_private, reason
from penstock.memory.writing import replace_file

FORMAT = 2
"""The version of all this, in the directory's name: what another version has written is not touched."""
PREFIX, JOURNAL, LOCK, ABOUT = f"kv{FORMAT}-", "journal", "lock", "store.json"
NOTES = "rates.json"
"""The file in which a process tells the next how long steps and transfers took."""
_READ_HINT = "change its permissions, or name another kv_directory"
_WRITE_HINT = "free space or change its permissions, or name another kv_directory"


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """A StoreIdentity says what KV a store has. Stores of unlike identities have directories of their own.

    digest: 1 to 64 bytes, a digest of all that the meaning of a record's bytes depends on and its key does
        not: weights, dtype, rope, layout.
    record_bytes: bytes of a record: a KV block of all layers.
    secret: the key that records are sealed with (see `seal`). With another one this is another store.
    about: facts for people, written to store.json.
    """

    digest: bytes
    record_bytes: int
    secret: bytes
    about: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Contents:
    """Contents are what a store's directory holds.

    live, bad: entries of the records that are there, and of the quarantined ones; both in order of use.
    replay: what the journal says; None if it is lost, and all this is from the segments' tables.
    """

    record_bytes: int
    segments: dict[int, SegmentFile]
    live: Entries
    bad: Entries
    replay: Replay | None
    next_segment: int


@dataclass(frozen=True, slots=True)
class OpenDirectory:
    """An OpenDirectory is a store's directory that was opened and read.

    journal: holds the store's lock; None if the store is only read.
    """

    path: Path
    seal: Seal
    size: Sizes
    found: Contents
    journal: Journal | None


@contextmanager
def opened(
    directory: Path, identity: StoreIdentity, cap_bytes: int, *, read_only: bool
) -> Iterator[OpenDirectory]:
    """Open the directory of a store below `directory`; it is closed again if the block raises.

    Unless it is only read, it is made if it is not there, and trimmed to the cap. Raises what
    `BlockStore.open` does.
    """
    assert 0 < len(identity.digest) <= 64, f"a digest of {len(identity.digest)} bytes"
    name, record_bytes = sealed_identity(identity.digest, identity.secret), identity.record_bytes
    path, seal = directory_of(directory, name), Seal(name, identity.secret)
    size, journal = sizes(cap_bytes, record_bytes), None
    with ExitStack() as undo:
        if read_only:
            expect_own(path)
        else:
            lock = locked(path, make=True)
            journal = Journal(path / JOURNAL, seal.seed, record_bytes, size.entries, lock)
            undo.callback(journal.close)
        found = contents(path, seal.seed, record_bytes)
        if found.record_bytes != record_bytes:
            there = f"{format_size(found.record_bytes)}, not {format_size(record_bytes)}"
            raise StoreError(
                f"{path} holds KV in records of {there}, although it names the same model and settings; "
                "remove it"
            )
        if journal is not None:
            sealed_with = key_id(identity.secret)
            about = {"identity": name.hex(), "record_bytes": record_bytes, "sealed_with": sealed_with}
            with refused(path, "cannot be written", _WRITE_HINT):
                describe(path, about | dict(identity.about))
                if found.replay:
                    journal.resume(found.replay)
                else:
                    journal.begin([found.live], 0, found.next_segment)
                trim(found, size)
        yield OpenDirectory(path, seal, size, found, journal)
        undo.pop_all()


@contextmanager
def refused(path: Path, what: str, hint: str) -> Iterator[None]:
    """Raise StoreError where the block raises OSError or ReadError: "<path> <what>: <reason>; <hint>"."""
    try:
        yield
    except (OSError, ReadError) as fault:
        raise StoreError(f"{path} {what}: {reason(fault)}; {hint}") from fault


def contents(path: Path, seed: int, record_bytes: int) -> Contents:
    """Read what a store's directory holds, and change nothing.

    seed: the checksum of its identity.
    record_bytes: bytes of a record, unless the journal knows.

    Raises StoreError if it cannot be read, which says nothing of what is there.
    """
    with refused(path, "cannot be read", _READ_HINT):
        replay = replayed(path / JOURNAL, seed)
        record_bytes = replay.record_bytes if replay else record_bytes
        segments = {}
        for number, (file, slots) in sorted(segment_numbers(path).items()):
            with suppress(FileNotFoundError):  # Another process writes here, and has compacted it.
                segments[number] = SegmentFile(file, number, slots, record_bytes, made=True)
        tables = () if replay else (segment.table(seed) for segment in segments.values())
        entries = replay.entries if replay else np.concatenate([np.zeros(0, DTYPE), *tables])
    live, bad = surviving(entries, segments)
    numbers = np.array(sorted(segments), np.uint64)
    counts = np.array([segments[number].slots for number in numbers.tolist()], np.uint32)
    live, bad = (
        kept[kept["slot"] < counts[np.searchsorted(numbers, kept["segment"])]] for kept in (live, bad)
    )
    next_segment = max([replay.next_segment if replay else 0, *(at + 1 for at in segments)])
    return Contents(record_bytes, segments, live, bad, replay, next_segment)


def trim(found: Contents, size: Sizes) -> None:
    """Bring what was found within the budget. Raises OSError.

    Segments without known records go, and slots behind the last that was used. If that is not enough,
    the segments go that were not used for longest, until there is room for compaction, too.
    """
    numbers = np.array(sorted(found.segments), np.uint64)
    used, last = np.zeros(len(numbers), np.int64), np.full(len(numbers), -1)
    for entries in (found.bad, found.live):
        which = np.searchsorted(numbers, entries["segment"])
        np.maximum.at(used, which, entries["slot"].astype(np.int64) + 1)
    np.maximum.at(last, which, np.arange(len(found.live)))
    for number, slots in zip(numbers.tolist(), used.tolist(), strict=True):
        if slots:
            found.segments[number].shorten(slots)
        else:
            found.segments.pop(number).path.unlink()
    files = [segment.disk_bytes for segment in found.segments.values()]
    taken, largest = sum(files), max([planned_bytes(size.slots, found.record_bytes), *files])
    if taken > size.budget:
        for number in numbers[np.argsort(last, kind="stable")].tolist():
            if number in found.segments and taken + largest > size.budget:
                taken -= found.segments[number].disk_bytes
                found.segments.pop(number).path.unlink()
    kept = np.fromiter(found.segments, np.uint64)
    found.live, found.bad = (
        entries[np.isin(entries["segment"], kept)] for entries in (found.live, found.bad)
    )


def directory_of(directory: Path, identity: bytes) -> Path:
    """Return the directory of the store of a sealed identity."""
    return directory / f"{PREFIX}{identity.hex()}"


def expect_own(path: Path) -> None:
    """Raise StoreError where another user owns or may write a store's directory, or the one that it is in.

    What another user puts there would be served. A directory that is not there is no fault.
    """
    for each in (path, path.parent):
        with refused(each, "cannot be read", _READ_HINT):
            try:
                there = os.stat(each)
            except FileNotFoundError:
                continue
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
    """Take the lock of a store's directory, which is held until the returned file is closed.

    make: whether to make the directory.

    Raises StoreLocked if another process has it, StoreError if it cannot be had.
    """
    with refused(path, "cannot be written", _WRITE_HINT):
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
                lock.close()  # The process that had it has removed it.
        except BlockingIOError as fault:
            raise StoreLocked(
                f"another process writes KV to {path}; wait until it ends, or name another kv_directory"
            ) from fault


def describe(path: Path, about: Mapping[str, object]) -> None:
    """Write store.json, unless it is there with this content. Raises OSError."""
    text = json.dumps(about, indent=1).encode() + b"\n"
    with suppress(ReadError), DiskFile(path / ABOUT) as file:
        if file.size == len(text) and file.read(0, len(text)) == text:
            return
    replace_file(path / ABOUT, text).close()
