"""The stores of KV under a directory, for people: what there is, whether it is sound, and away with it.

Whoever only looks takes no lock. What is damaged is marked as such, and what is removed goes, only while no
other process writes there.
"""

import json
import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from penstock.kv.store.journal import Item, Journal, Kind, Replay, real_bytes
from penstock.kv.store.seal import Seal, key_id
from penstock.kv.store.segments import (
    ABOUT,
    JOURNAL,
    LOCK,
    NOTES,
    PREFIX,
    Contents,
    StoreError,
    StoreLocked,
    contents,
    locked,
    reason,
)
from penstock.memory.disk import DiskFile, ReadError

_NAME = re.compile(rf"{PREFIX}((?:[0-9a-f]{{2}})+)")
_OURS = re.compile(
    rf"{JOURNAL}|{LOCK}|{ABOUT}|{NOTES}|({JOURNAL}|{ABOUT}|{NOTES})\.tmp|\d+-\d+\.segment", re.ASCII
)
_ABOUT_LIMIT = 64 << 10
_RECORD_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """`about`: what store.json says, if it can be read. `real_bytes`: of the disk. `last_used`: seconds since
    1970. `sound`: whether the journal is there."""

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
    """Of a store's records. `marked`: whether those that are damaged are in quarantine now. `busy`: whether
    another process writes there."""

    records: int
    damaged: int
    unreadable: int
    marked: bool
    busy: bool


def store_paths(directory: Path) -> list[Path]:
    """Of all stores under a directory, or of the one that it is. Raises StoreError."""
    if _NAME.fullmatch(directory.resolve().name):
        return [directory]
    try:
        # A link is to what is another's, or to the same twice.
        entries = (entry for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False))
        names = sorted(entry.name for entry in entries if _NAME.fullmatch(entry.name))
    except OSError as fault:
        raise StoreError(
            f"{directory} cannot be read: {reason(fault)}; give a kv_directory that you may read"
        ) from fault
    return [directory / name for name in names]


def survey(path: Path) -> StoreInfo:
    """Raises StoreError if it cannot be read."""
    identity, about = _identity(path), _about(path)
    found = _contents(path, about)
    try:
        files = [entry.path for entry in os.scandir(path)]
        last_used = os.stat(path / JOURNAL).st_mtime if found.replay else os.stat(path).st_mtime
        real = sum(_real(Path(file)) for file in files)
    except OSError as fault:
        raise StoreError(
            f"{path} cannot be read: {reason(fault)}; check its permissions and the disk"
        ) from fault
    records = len(found.live)
    sizes = records * found.record_bytes, real, len(found.segments)
    return StoreInfo(
        path, identity, about, records, *sizes, len(found.bad), last_used, found.replay is not None
    )


def verify(path: Path, secret: bytes, progress: Callable[[int], object] = lambda count: None) -> Findings:
    """Read every record, telling `progress` of each one's bytes, and put into quarantine what is not as it
    was written, unless another process writes there or the journal is lost: what a record is like is then
    known by hearsay. What cannot be read is left as it is. secret: with which they were sealed. Raises
    StoreError."""
    seal, about = Seal(_identity(path), secret), _about(path)
    if about.get("sealed_with") not in (None, key_id(secret)):
        raise StoreError(
            f"{path} was sealed with another key; name the cache directory that has it (--cache)"
        )
    with ExitStack() as held:
        try:
            held.enter_context(closing(locked(path, make=False)))
            writing = True
        except StoreLocked:
            writing = False
        found = _contents(path, about)
        damaged: list[Item] = []
        unreadable = 0
        memory = held.enter_context(closing(mmap.mmap(-1, found.record_bytes)))
        data = held.enter_context(memoryview(memory))
        for item in _items(found):
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
        replay = found.replay if writing else None
        if damaged and replay is not None:
            _quarantine(path, seal.seed, replay, damaged)
    return Findings(len(found.live), len(damaged), unreadable, replay is not None, not writing)


def clear(paths: Sequence[Path]) -> None:
    """Remove stores. Raises StoreLocked if another process writes to one of them, and then all are left."""
    with ExitStack() as held:
        for path in paths:
            held.enter_context(closing(locked(path, make=False)))
        for path in paths:
            try:
                names = [name for name in os.listdir(path) if _OURS.fullmatch(name)]
                # The lock is last: until it is gone, nobody else takes what is left for a store of his.
                for name in sorted(names, key=lambda name: (name == LOCK, name != JOURNAL)):
                    os.unlink(path / name)
                path.rmdir()
            except OSError as fault:
                raise StoreError(f"{path} cannot be removed: {reason(fault)}; remove it by hand") from fault


def _quarantine(path: Path, seed: int, replay: Replay, damaged: Sequence[Item]) -> None:
    try:
        with closing(Journal(path / JOURNAL, seed, replay.record_bytes, 1 << 62)) as journal:
            journal.resume(replay)
            journal.append(Kind.QUARANTINED, damaged)
    except OSError as fault:
        raise StoreError(
            f"damaged records in {path} cannot be marked: {reason(fault)}; make the directory writable, or "
            "remove it"
        ) from fault


def _items(found: Contents) -> Iterator[Item]:
    fields = (found.live[name].tolist() for name in ("key", "segment", "slot", "seal"))
    return map(Item, *fields)


def _identity(path: Path) -> bytes:
    match = _NAME.fullmatch(path.resolve().name)
    if match is None:
        raise StoreError(
            f"{path} is no store of KV, since its name does not begin with {PREFIX}; name a directory that "
            "`penstock cache` lists"
        )
    return bytes.fromhex(match[1])


def _about(path: Path) -> dict[str, object]:
    """Empty if it cannot be read: it is only for people."""
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
        try:
            likely = size is not None and all(segment.may_hold_such() for segment in found.segments.values())
        except OSError as fault:
            raise StoreError(
                f"{path} cannot be read: {reason(fault)}; check its permissions and the disk"
            ) from fault
        if not likely:
            raise StoreError(
                f"{path} has lost its journal, and {ABOUT} does not have the size of its records; start the "
                "model that it belongs to, which restores the journal, or remove the directory"
            )
    return found


def _real(path: Path) -> int:
    try:
        return real_bytes(path)
    except FileNotFoundError:  # Whoever writes here has removed it.
        return 0
