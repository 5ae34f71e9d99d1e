"""Reading files into memory that the caller owns.

Requests are large, nothing is mapped, nothing is copied twice, and every short read is accounted for.
"""

import ctypes
import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from penstock.base.errors import PenstockError

REQUEST_BYTES = 8 << 20
"""Most bytes of one read call: few calls a byte, yet enough pieces for several threads to share a tensor."""
DIRECT_BYTES = 16 << 20
"""Most bytes of one read past the page cache, where large requests make the disk itself faster."""
DIRECT_ALIGNMENT = 4096
"""Bytes to which addresses, offsets and lengths past the page cache are aligned. Many disks would do with
512; none in use wants more than a page."""
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT)
"""Errors of file systems that cannot read past the page cache, or not into memory that a driver has
mapped."""

_AT_EMPTY_PATH, _MNT_ID_UNIQUE = 0x1000, 0x4000
"""Flags of statx: take the file that the descriptor is of; return the mount's number, which is never given
twice."""


def in_pages(count: int) -> int:
    """Return `count` bytes in whole pages of the disk."""
    return -(-count // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT


class ReadError(PenstockError):
    """ReadError says that a file does not give some bytes.

    The caller turns it into what it means there: a bad checkpoint, a lost block.
    """


class FileStamp(NamedTuple):
    """A FileStamp is what the file system says of a file without reading it.

    Two equal stamps of one file mean equal bytes if its clock has moved on between two writes. The time of
    change (ctime) cannot be set by a program.
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Make the stamp of what `os.stat` has returned."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class DiskFile:
    """A DiskFile is a regular file open for reading.

    Any number of threads may read at once; none may while it is closed.
    """

    def __init__(self, path: Path, devices: bool = False) -> None:
        """Open `path`; symbolic links are followed.

        Raises ReadError if it cannot be opened, or is neither a regular file nor, if `devices`, a block
        device.
        """
        self.path = path
        try:
            # Without O_NONBLOCK, opening a pipe would wait for its writer for ever; on regular files the flag
            # does nothing.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise ReadError(
                f"cannot open {path}: {reason(error)}; check that the file exists and that you may read it"
            ) from error
        status = os.fstat(self._fd)
        device = devices and stat.S_ISBLK(status.st_mode)
        if not device and not stat.S_ISREG(status.st_mode):
            self.close()
            raise ReadError(
                f"cannot read {path}: it is not a regular file{' or a block device' if devices else ''}"
            )
        self.size = os.lseek(self._fd, 0, os.SEEK_END) if device else status.st_size
        self.opened = FileStamp.of(status)
        """The stamp when it was opened."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill all of `buffer` (writable bytes) from byte `offset` of the file; other threads run meanwhile.

        Raises ReadError, naming file and offset, when the disk fails or the file ends first; what is in the
        buffer then is undefined.
        """
        assert self._fd >= 0, "read from a closed file"
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done : done + REQUEST_BYTES]], offset + done)
            except OSError as error:
                raise self._failed(offset + done, error) from error
            if count == 0:
                raise ReadError(
                    f"cannot read {self.path} at byte {offset + done}: it ends there, {len(buffer) - done} "
                    "bytes too early; copy or fetch it again"
                )
            done += count

    def requests(self, buffer: memoryview, offset: int) -> list[Callable[[], None]]:
        """Cut what `read_into` does into tasks that several threads can share (see `run_all`)."""
        starts = range(0, len(buffer), REQUEST_BYTES)
        return [
            partial(self.read_into, buffer[start : start + REQUEST_BYTES], offset + start) for start in starts
        ]

    def read(self, offset: int, count: int) -> bytearray:
        """Return a few bytes, for which no buffer is worth having. Raises ReadError."""
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return data

    def stamp(self) -> FileStamp:
        """Return the open file's stamp, now. Raises ReadError."""
        assert self._fd >= 0, "stamp of a closed file"
        try:
            return FileStamp.of(os.fstat(self._fd))
        except OSError as error:
            raise ReadError(
                f"cannot look at {self.path}: {reason(error)}; check that the file still exists"
            ) from error

    def mount(self) -> str:
        """Return a name of the mount that the file was opened through, unique to it on any boot.

        A device's number does not tell a file system from another that was mounted there before. The name is
        empty before Linux 6.8, but for the file system of `/`, and on other systems.
        """
        fields = ctypes.create_string_buffer(256)
        with suppress(OSError, AttributeError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            known = ctypes.CDLL(None).statx(self._fd, b"", _AT_EMPTY_PATH, _MNT_ID_UNIQUE, fields) == 0
            if known and int.from_bytes(fields.raw[:4], sys.byteorder) & _MNT_ID_UNIQUE:
                return f"{boot} {int.from_bytes(fields.raw[144:152], sys.byteorder)}"
            if os.fstat(self._fd).st_dev == os.stat("/").st_dev:
                return f"{boot} /"
        return ""

    def settle(self) -> None:
        """Write what others have changed in memory to the disk, as far as that is possible.

        A write through a mapping moves the stamp only when it is the first to its page since the page was
        written to the disk: from now on every write moves it.
        """
        with suppress(OSError):
            os.fsync(self._fd)

    def file_system(self) -> str:
        """Return the type of the file system, as /proc/self/mountinfo names it; empty if it is not known."""
        with suppress(OSError, ValueError, StopIteration):
            facts = Path(f"/proc/self/fdinfo/{self._fd}").read_text(encoding="ascii").split()
            mount = facts[facts.index("mnt_id:") + 1]
            lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            fields = next(parts for parts in map(str.split, lines) if parts[0] == mount)
            return fields[fields.index("-") + 1]
        return ""

    def claim(self) -> bool:
        """Take the file's advisory lock (flock), and tell whether that was free; `unclaim` gives it back.

        It is also true where the file system has no locks.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def unclaim(self) -> None:
        """Give back the lock that `claim` took."""
        with suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def forget(self, offset: int = 0, count: int = 0) -> None:
        """Drop `count` bytes, or all, from `offset` on from the page cache, so that the disk is read."""
        os.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _failed(self, offset: int, error: OSError) -> ReadError:
        return ReadError(f"cannot read {self.path} at byte {offset}: {reason(error)}; check the disk")


class DirectFile(DiskFile):
    """A DirectFile is a file or block device that is read straight into the caller's memory (O_DIRECT).

    It has two descriptors of one file. Where its file system, the memory or the place refuses to be read
    directly, the other one reads by way of the page cache, which then drops the bytes. Any number of threads
    may read at once: all they share is `direct`, which only ever falls.
    """

    direct: bool
    """True while reads past the page cache are tried. The first one that is refused ends it."""
    _direct = -1

    def __init__(self, path: Path) -> None:
        """Open `path`. Raises ReadError, as DiskFile does."""
        super().__init__(path, devices=True)
        try:
            # Through the descriptor it is the same file, even if the path leads to another one by now.
            self._direct = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            self._direct = -1
        self.direct = self._direct >= 0

    def read_direct(self, buffer: memoryview, offset: int) -> None:
        """Fill all of `buffer` as `read_into` does, and leave nothing of it in the page cache.

        It reads directly if address, offset and length are multiples of DIRECT_ALIGNMENT. That takes a few µs
        more for each call, so it is for large ones. Raises ReadError, as `read_into` does.
        """
        assert self._fd >= 0, "read from a closed file"
        done = self._past_cache(buffer, offset) if self.direct and _aligned(buffer, offset) else 0
        if done < len(buffer):  # This also accounts for a file that ends.
            self.read_into(buffer[done:], offset + done)
            self.forget(offset + done, len(buffer) - done)

    def close(self) -> None:
        """Close both descriptors. A second call does nothing."""
        fd, self._direct = self._direct, -1
        if fd >= 0:
            os.close(fd)
        super().close()

    def _past_cache(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` directly; return how many bytes were, fewer at the file's end or if refused."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._direct, [buffer[done : done + DIRECT_BYTES]], offset + done)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise self._failed(offset + done, error) from error
                self.direct = False
                break
            done += count
            if count == 0 or count % DIRECT_ALIGNMENT:
                break
        return done


def make_private(directory: Path) -> None:
    """Make a directory and what is missing above it, for this user alone, whatever the umask.

    A file in its place is no fault here. Raises OSError.
    """
    for each in reversed([directory, *directory.parents]):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)


def run_all(tasks: Sequence[Callable[[], None]], pool: Executor) -> None:
    """Run all tasks on the pool's threads, in any order; raise what the first failed one raised.

    Why this is safe for tasks that write disjoint memory: none is in flight any more on return, also by an
    error, so the caller may use, free or refill the memory at once.
    """
    if len(tasks) == 1:
        tasks[0]()
        return
    running = [pool.submit(task) for task in tasks]
    wait(running)
    for task in running:
        task.result()


def reason(error: Exception) -> str:
    """Return what an error says, without its number."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _aligned(buffer: memoryview, offset: int) -> bool:
    if not buffer or (len(buffer) | offset) % DIRECT_ALIGNMENT:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % DIRECT_ALIGNMENT == 0
