"""The file in which long contexts have KV on the disk: a record for each layer and block, with a checksum.

It is not the prefix cache (`blocks`): its blocks belong to requests, come from the outbox layer by layer, and
go back to the device as parts of tiles (`movement.staging`). Every read is held against the checksum.

The records of a layer follow one another in the order of blocks, so that a tile of consecutive blocks is one
run of bytes. The file has no name, or one for a moment where the file system wants it so: whatever ends the
process later, nothing is left.

Why this is safe. Writes and reads run on threads, first come, first begun. A write or a read of a layer is
begun when every write of that layer that was asked for before it is done; those stand before it in the queue,
so no two wait for each other. The sum of a record is taken of the bytes in memory that were
written, and noted after they were; what fails to be written has no sum. A read gives the bytes that were
written last, or it raises. A write is noted before it is put: of one that an interrupt cuts short, what has
begun is waited for, and the rest is called off before anything is put that would wait for it (`settle`).
"""

import errno
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from threading import Lock
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from penstock.arch.layout import KVLayout
from penstock.base.errors import DeviceError, PenstockError
from penstock.base.units import format_size
from penstock.memory.disk import (
    DIRECT_BYTES,
    DirectFile,
    ReadError,
    in_pages,
    make_private,
    reason,
)
from penstock.memory.tasks import Task, Workers, wait
from penstock.memory.writing import open_direct, write_all

Rows = NDArray[np.uint8]
"""Rows are records in memory, `[blocks, record]`, contiguous and aligned as DirectFile likes it."""

READERS, WRITERS = 16, 4
_NONE = -1
"""The sum of a record that holds nothing."""


class LostKV(PenstockError):
    """LostKV is raised where KV does not come back as it was written. The request computes it again."""


class DiskPool:
    """A DiskPool has `blocks` blocks of KVLayout's shape in a file of their own."""

    def __init__(self, layout: KVLayout, blocks: int, directory: Path) -> None:
        """Make the file. Raises DeviceError if the directory cannot hold so much."""
        self.blocks = blocks
        self.record = in_pages(layout.layer_bytes)
        self._content = layout.layer_bytes
        self._file, self._out, self._plain = _opened(directory, layout.layers * blocks * self.record)
        self._sums = np.full((layout.layers, blocks), _NONE, dtype=np.int64)
        self._writes: list[list[Task]] = [[] for _ in range(layout.layers)]
        """The writes of each layer that may not be done."""
        self._begun: list[Task] = []
        """The tasks of a write that is being put, or that an interrupt has cut short."""
        self.readers = Workers(READERS, "KV reader")
        self._writers = Workers(WRITERS, "KV writer")
        self._counting = Lock()
        self.read_bytes = self.written_bytes = 0
        """Bytes of all records that were read and written, those that were not right included."""

    def write(
        self, layer: int, first: int, rows: Rows, ready: Callable[[], object], noted: list[Task]
    ) -> None:
        """Write records of consecutive blocks, after `ready` has returned.

        rows: may not change until all tasks are done that are added to `noted`, before they are put.

        What could not be written is lost, as a read will say, and nothing else is.
        """
        tasks = self._tasks(self._write, layer, first, rows, ready)
        self._begun = tasks
        noted += tasks
        self._writes[layer] += tasks
        for task in tasks:
            self._writers.put(task)
        self._begun = []

    def read(
        self, layer: int, first: int, rows: Rows, ready: Callable[[], object], noted: list[Task]
    ) -> None:
        """Fill `rows` with the records of consecutive blocks, after `ready` has returned.

        noted: is given the tasks before they are put. They raise LostKV for what is not as it was written.
        """
        tasks = self._tasks(self._read, layer, first, rows, ready)
        noted += tasks
        for task in tasks:
            self.readers.put(task)

    def settle(self) -> None:
        """Call off what of a write an interrupt has kept from beginning, since others would wait for it."""
        self._writers.call_off(self._begun)
        self._begun = []

    def close(self) -> None:
        """Finish what has begun. Call it again if it was interrupted; else that does nothing."""
        self.readers.close()
        self._writers.close()
        for file in (self._file, self._out, self._plain):
            file.close()

    def _tasks(
        self,
        work: Callable[..., None],
        layer: int,
        first: int,
        rows: Rows,
        ready: Callable[[], object],
    ) -> list[Task]:
        """Return tasks that write or read, each as much as one request to the disk should ask for."""
        before, count = self._pending(layer), max(DIRECT_BYTES // rows.shape[1], 1)
        return [
            Task(partial(work, layer, first + at, rows[at : at + count], ready, before))
            for at in range(0, len(rows), count)
        ]

    def _pending(self, layer: int) -> list[Task]:
        """Return the writes of a layer that may not be done. What is asked for now waits for them."""
        self.settle()
        self._writes[layer] = [write for write in self._writes[layer] if not write.done]
        return list(self._writes[layer])

    def _place(self, layer: int, first: int) -> int:
        return (layer * self.blocks + first) * self.record

    def _write(
        self, layer: int, first: int, rows: Rows, ready: Callable[[], object], before: Iterable[Task]
    ) -> None:
        sums = self._sums[layer, first : first + len(rows)]
        wait(before)
        sums[:] = _NONE
        ready()
        found = [crc32(row[: self._content]) for row in rows]
        with suppress(OSError):
            place = self._place(layer, first)
            write_all(self._plain, rows.reshape(-1).data, place, self._out)
            sums[:] = found
            with self._counting:
                self.written_bytes += rows.nbytes

    def _read(
        self, layer: int, first: int, rows: Rows, ready: Callable[[], object], before: Iterable[Task]
    ) -> None:
        wait(before)
        ready()
        try:
            self._file.read_direct(rows.reshape(-1).data, self._place(layer, first))
        except ReadError as fault:
            raise LostKV(
                f"KV of layer {layer}, blocks {first} to {first + len(rows) - 1} on disk: {fault}"
            ) from fault
        with self._counting:
            self.read_bytes += rows.nbytes
        for block, row in enumerate(rows, first):
            if crc32(row[: self._content]) != self._sums[layer, block]:
                at = self._place(layer, block)
                raise LostKV(
                    f"KV of layer {layer}, block {block} on disk, at byte {at}, is not what was written"
                )


def _opened(directory: Path, size: int) -> tuple[DirectFile, FileIO, FileIO]:
    """Return a new file without a name and with room for `size` bytes, opened three times.

    The first is to be read; the others are to be written, the second past the page cache if that can be.
    """
    with ExitStack() as undo:
        try:
            make_private(directory)
            plain = undo.enter_context(FileIO(_nameless(directory), "r+"))
            os.posix_fallocate(plain.fileno(), 0, size)
            path = Path(f"/proc/self/fd/{plain.fileno()}")
            found = DirectFile(path)
            out = open_direct(path)
        except (OSError, ReadError) as fault:
            raise _refusal(directory, size, fault) from fault
        undo.pop_all()
    return found, out, plain


def check_directory(directory: Path, size: int) -> None:
    """Raise DeviceError if no file can be made in a directory for `size` bytes of KV: before several ranks
    start, of which each would find that out by itself."""
    try:
        make_private(directory)
        os.close(_nameless(directory))
    except OSError as fault:
        raise _refusal(directory, size, fault) from fault


def _refusal(directory: Path, size: int, fault: OSError | ReadError) -> DeviceError:
    full = isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint = "lower disk_kv_memory, or name another kv_directory" if full else "name another kv_directory"
    return DeviceError(
        f"{format_size(size)} for KV cannot be reserved in {directory}: {reason(fault)}; {hint}"
    )


def _nameless(directory: Path) -> int:
    """Return the descriptor of a new file without a name, to be read and written. Raises OSError."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # Not every file system has such; if it is something else, this raises it again.
        file, path = tempfile.mkstemp(prefix=".penstock-kv-", dir=directory)
        os.unlink(path)
        return file
