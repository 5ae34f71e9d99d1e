"""The stores of KV under a directory, for people: list them, verify their records, remove them.

To look takes no lock. Damaged records are marked, and stores are removed, only while no other process writes
there.
"""

import json
import mmap
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from penstock.kv.store.directory import (
    ABOUT,
    JOURNAL,
    LOCK,
    NOTES,
    PREFIX,
    Contents,
    contents,
    locked,
    refused,
)
from penstock.kv.store.journal import Item, Journal, Kind, real_bytes
from penstock.kv.store.seal import Seal, key_id
from penstock.kv.store.segments import StoreError, StoreLocked
from penstock.memory.disk import DiskFile, ReadError

_NAME = re.compile(rf"{PREFIX}((?:[0-9a-f]{{2}})+)")
_OURS = re.compile(
    rf"{JOURNAL}|{LOCK}|{ABOUT}|{NOTES}|({JOURNAL}|{ABOUT}|{NOTES})\.tmp|\d+-\d+\.segment", re.ASCII
)
_ABOUT_LIMIT = 64 << 10
_RECORD_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A StoreInfo describes a store.

    about: what store.json says, if it can be read.
    live_bytes, real_bytes: bytes of its records, and of the disk that it takes.
    last_used: seconds since 1970.
    sound: whether the journal is there.
    """

    path: Path
    identity: bytes
    about: dict[str, object]
    records: int
    live_bytes: int
    real_bytes: int
    segments: int
    quarantined: int
    last_used: float
    sound: bool


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings are what `verify` found: numbers of records.

    marked: whether those that are damaged are in quarantine now.
    busy: whether another process writes there.
    """

    records: int
    damaged: int
    unreadable: int
    marked: bool
    busy: bool


def store_paths(directory: Path) -> list[Path]:
    """Return the paths of all stores under a directory, or of the one that it is. Raises StoreError."""
    if _NAME.fullmatch(directory.resolve().name):
        return [directory]
    with refused(directory, "cannot be read", "give a kv_directory that you may read"):
        # A link is to what is another's, or to the same twice.
        entries = (entry for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False))
        names = sorted(entry.name for entry in entries if _NAME.fullmatch(entry.name))
    return [directory / name for name in names]


def survey(path: Path) -> StoreInfo:
    """Describe a store. Raises StoreError if it cannot be read."""
    identity, about = _identity(path), _about(path)
    found = _contents(path, about)
    with refused(path, "cannot be read", "check its permissions and the disk"):
        files = [entry.path for entry in os.scandir(path)]
        last_used = os.stat(path / JOURNAL if found.replay else path).st_mtime
        real = sum(_real(Path(file)) for file in files)
    records = len(found.live)
    sizes = records * found.record_bytes, real, len(found.segments)
    return StoreInfo(
        path, identity, about, records, *sizes, len(found.bad), last_used, found.replay is not None
    )


def verify(path: Path, secret: bytes, progress: Callable[[int], object] = lambda count: None) -> Findings:
    """Read every record, and put into quarantine what is not as it was written. Raises StoreError.

    Nothing is marked while another process writes there, or where the journal is lost: what a record should
    be is then known by hearsay. What cannot be read is left as it is.

    secret: the key that they were sealed with.
    progress: is called with the bytes of each record.
    """
    seal, about = Seal(_identity(path), secret), _about(path)
    if about.get("sealed_with") not in (None, key_id(secret)):
        raise StoreError(
            f"{path} was sealed with another key; name the cache directory that has it (--cache)"
        )
    with ExitStack() as held:
        lock = None
        with suppress(StoreLocked):
            lock = held.enter_context(closing(locked(path, make=False)))
        found = _contents(path, about)
        damaged: list[Item] = []
        unreadable = 0
        memory = held.enter_context(closing(mmap.mmap(-1, found.record_bytes)))
        data = held.enter_context(memoryview(memory))
        fields = (found.live[name].tolist() for name in ("key", "segment", "slot", "seal"))
        for item in map(Item, *fields):
            try:
                found.segments[item.segment].read(item.slot, data)
                if not seal.fits(item.seal, item.key, data):
                    damaged.append(item)
            except ReadError:
                unreadable += 1
            progress(found.record_bytes)
        if len(damaged) == len(found.live) and damaged and "sealed_with" not in about:
            raise StoreError(
                f"{path} does not say which key sealed it, and no record fits the key in this cache "
                "directory; nothing was changed: name the cache directory that has the key (--cache), or "
                "remove the store with `penstock cache clear`"
            )
        replay = found.replay if lock is not None else None
        if damaged and lock is not None and replay is not None:
            hint = "make the directory writable, or remove it"
            with refused(path, "has damaged records that cannot be marked", hint):
                journal = Journal(path / JOURNAL, seal.seed, replay.record_bytes, 1 << 62, lock)
                held.enter_context(closing(journal))
                journal.resume(replay)
                journal.append(Kind.QUARANTINED, damaged)
    return Findings(len(found.live), len(damaged), unreadable, replay is not None, lock is None)


def clear(paths: Sequence[Path]) -> None:
    """Remove stores. Raises StoreLocked if another process writes to one of them, and then all are left."""
    with ExitStack() as held:
        for path in paths:
            held.enter_context(closing(locked(path, make=False)))
        for path in paths:
            with refused(path, "cannot be removed", "remove it by hand"):
                names = [name for name in os.listdir(path) if _OURS.fullmatch(name)]
                # The lock is last: until it is gone, no process takes what is left for a store of its own.
                for name in sorted(names, key=lambda name: (name == LOCK, name != JOURNAL)):
                    os.unlink(path / name)
                path.rmdir()


def _identity(path: Path) -> bytes:
    match = _NAME.fullmatch(path.resolve().name)
    if match is None:
        raise StoreError(
            f"{path} is no store of KV, since its name does not begin with {PREFIX}; name a directory that "
            "`penstock cache` lists"
        )
    return bytes.fromhex(match[1])


def _about(path: Path) -> dict[str, object]:
    """Return what store.json says; nothing if it cannot be read, since it is only for people."""
    with suppress(ReadError, ValueError, RecursionError), DiskFile(path / ABOUT) as file:
        value = json.loads(file.read(0, min(file.size, _ABOUT_LIMIT)))
        if isinstance(value, dict):
            return value
    return {}


def _contents(path: Path, about: dict[str, object]) -> Contents:
    said = about.get("record_bytes")
    size = said if isinstance(said, int) and not isinstance(said, bool) and 0 < said < _RECORD_LIMIT else None
    found = contents(path, crc32(_identity(path)), size or 1)
    if found.replay is None and found.segments:
        with refused(path, "cannot be read", "check its permissions and the disk"):
            likely = size is not None and all(segment.may_hold_such() for segment in found.segments.values())
        if not likely:
            raise StoreError(
                f"{path} has lost its journal, and {ABOUT} does not have the size of its records; start the "
                "model that it belongs to, which restores the journal, or remove the directory"
            )
    return found


def _real(path: Path) -> int:
    try:
        return real_bytes(path)
    except FileNotFoundError:  # The process that writes here has removed it.
        return 0
