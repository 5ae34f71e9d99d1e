"""Finds the digests of a checkpoint's files, over every byte, and remembers them, so that a later start need
not read the files for it.

A file's digest is SHA-256 over the SHA-256 of each of its pieces of PIECE_BYTES, in order. It is the same on
every machine.

Why a remembered digest is right. It is found again by the file's mount and its stamp: device, inode, size,
times of modification and of change. A mount has a number that is never given again while the machine runs,
and a boot has one too: after a restart of the machine, or when the file system was mounted again, all is
hashed anew. Without that, two images with the same stamps that are mounted one after the other would be one.
Where the kernel has no such number only files on the device of `/` are remembered: `/` is not mounted over.

Within a mount any write moves the time of change, except in three cases, and none of these is remembered. (1)
A second write within one tick of the file system's clock: a file that was changed less than RECENT_NS before
it was hashed is not remembered. (2) A write through a mapping to a page that is dirty already: what is dirty
is written to the disk before the stamp is taken (`DiskFile.settle`), and the next write moves it. (3) File
systems that move no times for mappings (tmpfs), or have times that may be stale or another program's (FUSE,
9p, CIFS): only those of TRUSTED are believed. A file has no digest if its stamp moves while it is hashed.
What is written past the file system, to the device under it, is not seen."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import psutil

from penstock.base.errors import CheckpointError
from penstock.memory.disk import DiskFile, FileStamp, ReadError, make_private, run_all
from penstock.weights.jsonfile import readable
from penstock.weights.pieces import PIECE_BYTES, join_digests

MEMORY = "digests"
"""The memory's file, in the cache directory."""
STEP_BYTES = 1 << 20
"""Bytes read at once, within the reach of a core's cache. Each of HASHERS threads holds as many."""
HASHERS = 8
"""Most threads that hash: 1.6 GB/s each with the processor's instructions for SHA-256, far more in all than a
disk gives."""
RECENT_NS = 2_000_000_000
"""A file that was changed less than so long ago is not remembered. Clocks of file systems tick every 10 ms or
faster."""
TRUSTED = frozenset(
    (
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "f2fs",
        "bcachefs",
        "overlay",
        "nfs",
        "nfs4",
        "squashfs",
        "erofs",
    )
)
"""Types of file systems on which every write moves the time of change, and opening a file looks at the
newest."""
MOST_REMEMBERED = 4096
_MOST_BYTES = 4 << 20
_PERIOD = 0.1
"""Seconds between two calls that tell how far hashing is."""
_POLL = 0.02
"""Seconds between two looks whether another process has finished hashing."""


class Stopped(Exception):
    """A hashing thread ends by this: the digests are not waited for any more."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Holds the digests of some files, in hex, and what it took to know them."""

    files: tuple[str, ...]
    hashed_bytes: int
    """Bytes that were read and hashed; the others' digests were remembered."""
    seconds: float
    """Time from the first byte to the last."""
    forgettable: str = ""
    """Reason why some digest could not be remembered; empty if all are."""


class Memory:
    """Remembers texts by texts, in a file that several processes may read and replace. Damage is as good as
    absence.

    Each line has a checksum of its own, so a damaged one is lost by itself, and is never taken for another.
    """

    def __init__(self, directory: Path | None) -> None:
        """directory: made when something is remembered; None remembers nothing."""
        self._directory = directory

    @property
    def kept(self) -> bool:
        """Tell whether anything is remembered."""
        return self._directory is not None

    def recall(self) -> dict[str, str]:
        """Return all that is remembered, the newest last."""
        if self._directory is None:
            return {}
        try:
            with DiskFile(self._directory / MEMORY) as file:
                text = file.read(0, min(file.size, _MOST_BYTES)).decode("ascii", "replace")
        except ReadError:
            return {}
        parts = (line.split("\t") for line in text.split("\n"))
        return {
            part[0]: part[1] for part in parts if len(part) == 3 and part[2] == _checksum(part[0], part[1])
        }

    def remember(self, found: Mapping[str, str]) -> bool:
        """Add to what is remembered; the oldest beyond MOST_REMEMBERED goes. Return False if it cannot be
        written, which is no error."""
        if self._directory is None:
            return False
        beside = self._directory / f"{MEMORY}.{os.getpid()}-{threading.get_ident()}.tmp"
        try:
            make_private(self._directory)
            with _alone(self._directory):
                kept = {key: value for key, value in self.recall().items() if key not in found} | dict(found)
                lines = [
                    f"{key}\t{value}\t{_checksum(key, value)}\n"
                    for key, value in list(kept.items())[-MOST_REMEMBERED:]
                ]
                try:
                    with open(
                        os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600),
                        "w",
                        encoding="ascii",
                    ) as file:
                        file.writelines(lines)
                    os.rename(beside, self._directory / MEMORY)
                except BaseException:
                    with suppress(OSError):
                        beside.unlink()
                    raise
        except OSError:
            return False
        return True


class Hashing:
    """Finds the digests of some open files, on threads of its own from when it is made. The files must stay
    open until `close`.

    What was read of the files since they were opened is what was hashed, unless `expect_unchanged` raises
    afterwards.
    """

    def __init__(self, files: Sequence[DiskFile], memory: Memory) -> None:
        """Begin to hash what is not remembered. Raises CheckpointError."""
        self._files, self._memory = files, memory
        self._stop = threading.Event()
        self._counting, self._hashed_bytes = threading.Lock(), 0
        self._looks = ThreadPoolExecutor(1, thread_name_prefix="penstock identity")
        try:
            known = memory.recall()
            self._stamps = tuple(map(_stamp, files))
            if not all(key in known for key in map(_key, files, self._stamps)):
                for file in files:
                    file.settle()
                self._stamps = tuple(map(_stamp, files))
            for file, stamp in zip(files, self._stamps, strict=True):
                if stamp != file.opened:  # Its header may be another's.
                    raise _changed(file)
            self.todo_bytes = sum(
                stamp.size
                for file, stamp in zip(files, self._stamps, strict=True)
                if _key(file, stamp) not in known
            )
            """Bytes to be hashed, unless another process has done so first."""
            self._found = self._looks.submit(self._find)
        except BaseException:
            self.close()
            raise

    def result(self, progress: Callable[[int], None] | None = None) -> Digests:
        """Wait for them. Raises CheckpointError for a file that cannot be read, or that changes meanwhile.

        progress: called now and then with bytes that were hashed since, on the thread that waits.
        """
        told, done = 0, False
        while progress is not None and not done:
            done = bool(wait([self._found], timeout=_PERIOD).done)
            told, before = self._hashed_bytes, told
            progress(told - before)
        return self._found.result()

    def _note(self, count: int) -> None:
        """Note that so many bytes were hashed. Any thread may."""
        with self._counting:
            self._hashed_bytes += count

    def expect_unchanged(self) -> None:
        """Raise CheckpointError for a file that, by its stamp, is no longer the one that was hashed."""
        for file, stamp in zip(self._files, self._stamps, strict=True):
            if _stamp(file) != stamp:
                raise _changed(file)

    def close(self) -> None:
        """End the threads, which takes a moment. A second call does nothing."""
        self._stop.set()
        self._looks.shutdown()

    def _find(self) -> Digests:
        keys = list(map(_key, self._files, self._stamps))
        known = self._memory.recall()
        if all(key in known for key in keys):
            return Digests(tuple(known[key] for key in keys), 0, 0.0)
        # Processes that start at once, such as ranks and replicas: the first one hashes, the others find what
        # it has remembered.
        now = time.time_ns()
        shared = self._memory.kept and not any(
            _why_untrusted(*each, now) for each in zip(self._files, self._stamps, strict=True)
        )
        while shared and not self._files[0].claim():
            if self._stop.wait(_POLL):
                raise Stopped
        try:
            known = self._memory.recall()
            todo = [
                (file, stamp)
                for file, stamp, key in zip(self._files, self._stamps, keys, strict=True)
                if key not in known
            ]
            began, began_ns = time.perf_counter(), time.time_ns()
            hashed = _hashed([file for file, _ in todo], self._stop, self._note)
            seconds = time.perf_counter() - began
            for file, stamp in zip(self._files, self._stamps, strict=True):
                if _stamp(file) != stamp:
                    raise _changed(file)
            fresh = {_key(*each): digest for each, digest in zip(todo, hashed, strict=True)}
            why = [_why_untrusted(file, stamp, began_ns) for file, stamp in todo]
            lasting = {
                key: digest for (key, digest), reason in zip(fresh.items(), why, strict=True) if not reason
            }
            if not self._memory.kept:
                why.append("no cache directory was named")
            elif lasting and not self._memory.remember(lasting):
                why.append("the cache directory cannot be written")
            known |= fresh
            total = sum(stamp.size for _, stamp in todo)
            return Digests(tuple(known[key] for key in keys), total, seconds, next(filter(None, why), ""))
        finally:
            if shared:
                self._files[0].unclaim()


def hashers() -> int:
    """Return how many threads hash here."""
    return max(1, min(HASHERS, len(os.sched_getaffinity(0))))


def same_bytes_remembered(
    one: DiskFile, at: int, other: DiskFile, begin: int, count: int, memory: Memory
) -> bool:
    """Return what `same_bytes` does; that they are the same is remembered. Raises CheckpointError."""
    key = f"same {count}"

    def named() -> str:
        return f"{key} {at}@{_key(one, _stamp(one))} {begin}@{_key(other, _stamp(other))}"

    if named() in memory.recall():
        return True
    for file in (one, other):
        file.settle()
    began, began_ns = named(), time.time_ns()
    with readable():
        same = same_bytes(one, at, other, begin, count)
    if (
        same
        and named() == began
        and not any(_why_untrusted(file, _stamp(file), began_ns) for file in (one, other))
    ):
        memory.remember({began: "yes"})
    return same


def same_bytes(one: DiskFile, at: int, other: DiskFile, begin: int, count: int) -> bool:
    """Tell whether `count` bytes of a file from byte `at` on are those of another from `begin` on. Raises
    ReadError."""
    buffers: SimpleQueue[tuple[bytearray, bytearray]] = SimpleQueue()
    threads = hashers()
    for _ in range(threads):
        buffers.put((bytearray(STEP_BYTES), bytearray(STEP_BYTES)))
    differ = threading.Event()

    def compare(start: int) -> None:
        if differ.is_set():
            return
        pair = buffers.get()
        try:
            size = min(STEP_BYTES, count - start)
            left, right = (memoryview(buffer)[:size] for buffer in pair)
            one.read_into(left, at + start)
            other.read_into(right, begin + start)
            if pair[0][:size] != pair[1][:size]:
                differ.set()
        finally:
            buffers.put(pair)

    with ThreadPoolExecutor(threads, thread_name_prefix="penstock compare") as pool:
        run_all([partial(compare, start) for start in range(0, count, STEP_BYTES)], pool)
    return not differ.is_set()


def _hashed(files: Sequence[DiskFile], stop: threading.Event, note: Callable[[int], None]) -> list[str]:
    """Return the digests of whole files. Raises CheckpointError, and Stopped once `stop` is set.

    note: called from any thread with bytes as they are hashed.
    """
    threads = hashers()
    buffers: SimpleQueue[bytearray] = SimpleQueue()
    for _ in range(threads):
        buffers.put(bytearray(STEP_BYTES))

    # What does not fit the page cache would only push out what others need, and be gone before it is read
    # again.
    keep = sum(file.size for file in files) <= psutil.virtual_memory().available // 2

    def piece(file: DiskFile, start: int) -> bytes:
        buffer, digest = buffers.get(), hashlib.sha256()
        try:
            view = memoryview(buffer)
            for at in range(start, min(start + PIECE_BYTES, file.size), STEP_BYTES):
                if stop.is_set():
                    raise Stopped
                step = view[: min(STEP_BYTES, start + PIECE_BYTES - at, file.size - at)]
                file.read_into(step, at)
                digest.update(step)
                note(len(step))
            if not keep:
                file.forget(start, PIECE_BYTES)
        except ReadError as error:
            raise CheckpointError(str(error)) from error
        finally:
            buffers.put(buffer)
        return digest.digest()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="penstock hash")
    try:
        running = [
            [pool.submit(piece, file, start) for start in range(0, file.size, PIECE_BYTES)] for file in files
        ]
        return [join_digests(each.result() for each in pieces) for pieces in running]
    finally:
        pool.shutdown(cancel_futures=True)


def _stamp(file: DiskFile) -> FileStamp:
    with readable():
        return file.stamp()


def _changed(file: DiskFile) -> CheckpointError:
    return CheckpointError(
        f"{file.path} changed while it was read; wait until nothing writes there, and start again"
    )


def _key(file: DiskFile, stamp: FileStamp) -> str:
    return f"sha256 {file.mount()} " + "-".join(map(str, stamp))


def _why_untrusted(file: DiskFile, stamp: FileStamp, began_ns: int) -> str:
    """Return why what was found from that time on, in nanoseconds since 1970, may not be remembered under the
    stamp; empty if it may."""
    if began_ns - stamp.changed_ns < RECENT_NS:
        return f"{file.path.name} was changed a moment before"
    if not file.mount():
        return "this system cannot tell its file system from one that is mounted there later"
    kind = file.file_system()
    return (
        ""
        if kind in TRUSTED
        else f"the file times of {kind or 'an unknown file system'} do not tell of every change"
    )


def _checksum(key: str, value: str) -> str:
    return hashlib.sha256(f"{key}\t{value}".encode()).hexdigest()[:16]


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keep other processes from replacing the memory; where the file system has no locks, the last one
    wins."""
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            flock(held, LOCK_EX)
        yield
    finally:
        os.close(held)
