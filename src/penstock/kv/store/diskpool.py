"""KV blocks on disk: a file of records, one per layer and block, each with a checksum that every read is held
against.

The records of a layer follow one another in the order of blocks, so that a tile of consecutive blocks is one
run of bytes. The file has no name, or one for a moment where the file system wants it so: whatever ends the
process later, nothing is left.

Why this is safe. Writes and reads run on threads, first come, first begun. A write or a read of a layer is
begun when every write of that layer that was asked for before it is done; those stand before it in the queue,
so nobody waits for somebody who waits for him. The sum of a record is taken of the bytes in memory that were
written, and noted after they were; what fails to be written has no sum. A read gives the bytes that were
written last, or it raises. A write is noted before it is put: of one that an interrupt cuts short, what has
begun is waited for, and the rest is called off before anything is put that would wait for it (`settle`).
"""

import errno
import os
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from threading import Lock
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from penstock.arch.layout import KVLayout
from penstock.base.errors import DeviceError, PenstockError
from penstock.base.units import format_size
from penstock.memory.disk import (
    _REFUSALS,
    DIRECT_ALIGNMENT,
    DIRECT_BYTES,
    DirectFile,
    ReadError,
    make_private,
)
from penstock.memory.tasks import Task, Workers, wait

Rows = NDArray[np.uint8]
"""Records in memory, `[blocks, record]`, contiguous and aligned as DirectFile likes it."""

READERS, WRITERS = 16, 4
_NONE = -1
"""In place of the sum of a record that holds nothing."""


class LostKV(PenstockError):
    """KV that does not come back from where it rests as it was written. Whoever needs it computes it
    again."""


class DiskPool:
    """`blocks` blocks of KVLayout's shape in a file of their own."""

    def __init__(self, layout: KVLayout, blocks: int, directory: Path) -> None:
        """Raises DeviceError if the directory cannot hold so much."""
        self.blocks = blocks
        self.record = record_bytes(layout)
        self._content = layout.layer_bytes
        self._file, self._out, self._plain = _opened(directory, layout.layers * blocks * self.record)
        self._sums = np.full((layout.layers, blocks), _NONE, dtype=np.int64)
        self._writes: list[list[Task]] = [[] for _ in range(layout.layers)]
        """By layer: those that may not be done."""
        self._begun: list[Task] = []
        """Of a write that is being put, or that an interrupt has cut short."""
        self.readers = Workers(READERS, "KV reader")
        self._writers = Workers(WRITERS, "KV writer")
        self._counting = Lock()
        self.read_bytes = self.written_bytes = 0
        """That have come and gone, whole records, also where what came was not what had been written."""

    def write(
        self, layer: int, first: int, rows: Rows, ready: Callable[[], object], noted: list[Task]
    ) -> None:
        """Write records of consecutive blocks, after `ready` has returned. `rows` may not change until all
        tasks are done that are added to `noted`, before they are put. What could not be written is lost, as a
        read will say; only that."""
        before = self._pending(layer)
        tasks = [
            Task(partial(self._write, layer, at, part, ready, before)) for at, part in _parts(first, rows)
        ]
        self._begun = tasks
        noted += tasks
        self._writes[layer] += tasks
        for task in tasks:
            self._writers.put(task)
        self._begun = []

    def read(
        self, layer: int, first: int, rows: Rows, ready: Callable[[], object], noted: list[Task]
    ) -> None:
        """Fill `rows` with the records of consecutive blocks, after `ready` has returned: tasks for
        `readers`, which are added to `noted` before they are put, and raise LostKV for what is not as it was
        written."""
        before = self._pending(layer)
        tasks = [
            Task(partial(self._read, layer, at, part, ready, before)) for at, part in _parts(first, rows)
        ]
        noted += tasks
        for task in tasks:
            self.readers.put(task)

    def settle(self) -> None:
        """Call off what of a write an interrupt has kept from beginning, so that nobody waits for it in
        vain."""
        self._writers.call_off(self._begun)
        self._begun = []

    def close(self) -> None:
        """Finish what has begun. To be called again if it was interrupted; else that does nothing."""
        self.readers.close()
        self._writers.close()
        self._file.close()
        out, self._out = self._out, -1
        if out >= 0:
            os.close(out)
        plain, self._plain = self._plain, -1
        if plain >= 0:
            os.close(plain)

    def _pending(self, layer: int) -> list[Task]:
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
        if _write_all(self._out, self._plain, rows.reshape(-1).data, self._place(layer, first)):
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


def record_bytes(layout: KVLayout) -> int:
    """Of a layer of a block: whole pages of the disk."""
    return -(-layout.layer_bytes // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT


def _parts(first: int, rows: Rows) -> list[tuple[int, Rows]]:
    """Whole records, as many as one request to the disk should ask for, and the first's block."""
    count = max(DIRECT_BYTES // rows.shape[1], 1)
    return [(first + at, rows[at : at + count]) for at in range(0, len(rows), count)]


def _opened(directory: Path, size: int) -> tuple[DirectFile, int, int]:
    """A new file without a name and with room for `size` bytes: to be read, and two descriptors to write it,
    the first past the page cache if that can be."""
    plain = -1
    try:
        make_private(directory)
        plain = _nameless(directory)
        os.posix_fallocate(plain, 0, size)
        path = f"/proc/self/fd/{plain}"
        found = DirectFile(Path(path))
        try:
            out = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            out = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        return found, out, plain
    except (OSError, ReadError) as fault:
        if plain >= 0:
            os.close(plain)
        full = isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = (fault.strerror if isinstance(fault, OSError) else None) or str(fault)
        hint = "lower disk_kv_memory, or name another kv_directory" if full else "name another kv_directory"
        raise DeviceError(
            f"{format_size(size)} for KV cannot be reserved in {directory}: {reason}; {hint}"
        ) from fault


def _nameless(directory: Path) -> int:
    """A new file, to be read and written."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # Not every file system has such; if it is something else, this raises it again.
        file, path = tempfile.mkstemp(prefix=".penstock-kv-", dir=directory)
        os.unlink(path)
        return file


def _write_all(out: int, plain: int, data: memoryview, offset: int) -> bool:
    """Whether all could be written: by way of `plain` from where it is refused on `out`, as not every file
    system says at once."""
    done = 0
    try:
        while done < len(data):
            try:
                done += os.pwrite(out, data[done : done + DIRECT_BYTES], offset + done)
            except OSError as fault:
                if out == plain or fault.errno not in _REFUSALS:
                    raise
                out = plain
    except OSError:
        return False
    return True
