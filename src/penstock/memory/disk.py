"""Reading files into memory that the caller owns: large requests, nothing mapped, nothing copied twice, every short read accounted for."""

import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.base.errors import PenstockError

REQUEST_BYTES = 8 << 20
"""Most bytes asked of the kernel at once: few calls per byte, yet enough pieces for several threads to share a tensor."""


class ReadError(PenstockError):
    """Bytes that a file does not give. Whoever asked for them turns this into what it means there: a bad checkpoint, a lost block."""


class DiskFile:
    """A regular file open for reading. Any number of threads may read at once; none may while it is closed."""

    def __init__(self, path: Path) -> None:
        """Raises ReadError when `path` cannot be opened or is not a regular file (symbolic links are followed)."""
        self.path = path
        try:
            # Without O_NONBLOCK, opening a pipe would wait for its writer for ever; on regular files the flag does nothing.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise ReadError(f"cannot open {path}: {_reason(error)}") from error
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise ReadError(f"cannot read {path}: it is not a regular file")
        self.size = status.st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill all of `buffer` (writable bytes) from byte `offset` of the file; other threads run meanwhile.

        Raises ReadError, naming file and offset, when the disk fails or the file ends first; what is in the buffer then is undefined.
        """
        assert self._fd >= 0, "read from a closed file"
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done : done + REQUEST_BYTES]], offset + done)
            except OSError as error:
                raise ReadError(f"cannot read {self.path} at byte {offset + done}: {_reason(error)}") from error
            if count == 0:
                raise ReadError(f"cannot read {self.path} at byte {offset + done}: it ends there, {len(buffer) - done} bytes too early")
            done += count

    def requests(self, buffer: memoryview, offset: int) -> list[Callable[[], None]]:
        """What read_into does, cut into tasks that several threads can share (see run_all)."""
        starts = range(0, len(buffer), REQUEST_BYTES)
        return [partial(self.read_into, buffer[start : start + REQUEST_BYTES], offset + start) for start in starts]

    def read(self, offset: int, count: int) -> bytearray:
        """A few bytes, where no buffer is worth having. Raises ReadError."""
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return data

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def run_all(tasks: Sequence[Callable[[], None]], pool: Executor) -> None:
    """Run all tasks on the pool's threads, in any order; raises what the first failed one raised.

    Why this is safe for tasks that write disjoint memory: none is in flight any more on return, also by an error, so the caller may use,
    free or refill the memory at once.
    """
    if len(tasks) == 1:
        tasks[0]()
        return
    running = [pool.submit(task) for task in tasks]
    wait(running)
    for task in running:
        task.result()


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
