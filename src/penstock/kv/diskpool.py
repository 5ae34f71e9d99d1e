"""KV blocks on disk: a file of records, one per layer and block, each with a checksum that every read is held against.

The records of a layer follow one another in the order of blocks, so that a tile of consecutive blocks is one run of bytes. The file has a
name only while room is made for it: whatever ends the process later, nothing is left.

Why this is safe. Writes and reads run on threads, first come, first begun. A write or a read of a layer is begun when every write of that
layer that was asked for before it is done; those stand before it in the queue, so nobody waits for somebody who waits for him. The sum of
a record is taken of the bytes in memory that were written, and noted after they were; what fails to be written has no sum. A read gives the
bytes that were written last, or it raises. A write is known before it is submitted: one that an interrupt cuts short is waited for as
far as it has begun, and the rest of it never begins.
"""

import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from penstock.arch.layout import KVLayout
from penstock.base.errors import DeviceError, PenstockError
from penstock.base.units import format_size
from penstock.memory.disk import DIRECT_ALIGNMENT, DIRECT_BYTES, DirectFile, ReadError

Rows = NDArray[np.uint8]
"""Records in memory, `[blocks, record]`, contiguous and aligned as DirectFile likes it."""

READERS, WRITERS = 8, 4
_NONE = -1
"""In place of the sum of a record that holds nothing."""


class LostKV(PenstockError):
    """KV that does not come back from where it rests as it was written. Whoever needs it computes it again."""


class DiskPool:
    """`blocks` blocks of KVLayout's shape in a file of their own."""

    def __init__(self, layout: KVLayout, blocks: int, directory: Path) -> None:
        """Raises DeviceError if the directory cannot hold so much."""
        self.blocks = blocks
        self.record = record_bytes(layout)
        self._content = layout.layer_bytes
        self._file, self._out = _opened(directory, layout.layers * blocks * self.record)
        self._sums = np.full((layout.layers, blocks), _NONE, dtype=np.int64)
        self._writes: list[list[Future[None]]] = [[] for _ in range(layout.layers)]
        """By layer: those that may not be done."""
        self._begun: list[Future[None]] = []
        """Of a write that is being submitted, or that an interrupt has cut short: what of it has not begun is called off."""
        self._readers = ThreadPoolExecutor(READERS, "penstock KV reader")
        self._writers = ThreadPoolExecutor(WRITERS, "penstock KV writer")
        self.read_bytes = self.written_bytes = 0

    def write(self, layer: int, first: int, rows: Rows, ready: Callable[[], object]) -> list["Future[None]"]:
        """Write records of consecutive blocks, after `ready` has returned. `rows` may not change until all of these are done, and none
        raises: what could not be written is lost, as a read will say."""
        before, parts = self._pending(layer), _parts(first, rows)
        tasks: list[Future[None]] = [Future() for _ in parts]
        self._begun = tasks
        self._writes[layer] += tasks
        for (at, part), one in zip(parts, tasks, strict=True):
            self._writers.submit(self._write, layer, at, part, ready, before, one)
        self._begun = []
        self.written_bytes += rows.nbytes
        return tasks

    def read(self, layer: int, first: int, rows: Rows, ready: Callable[[], object], done: Sequence["Future[None]"]) -> None:
        """Fill `rows` with the records of consecutive blocks, after `ready` has returned; as many tasks as `tasks_of(rows)` come to be
        done, and raise LostKV for what is not as it was written."""
        before = self._pending(layer)
        self.read_bytes += rows.nbytes
        for (at, part), one in zip(_parts(first, rows), done, strict=True):
            self._readers.submit(self._read, layer, at, part, ready, before, one)

    def close(self) -> None:
        """Finish what has begun. A second call does nothing."""
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown(cancel_futures=True)
        self._file.close()
        out, self._out = self._out, -1
        if out >= 0:
            os.close(out)

    def _pending(self, layer: int) -> list["Future[None]"]:
        for task in self._begun:
            task.cancel()
        self._begun = []
        self._writes[layer] = [write for write in self._writes[layer] if not write.done()]
        return list(self._writes[layer])

    def _place(self, layer: int, first: int) -> int:
        return (layer * self.blocks + first) * self.record

    def _write(
        self, layer: int, first: int, rows: Rows, ready: Callable[[], object], before: Sequence["Future[None]"], done: "Future[None]"
    ) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            sums = self._sums[layer, first : first + len(rows)]
            wait(before)
            sums[:] = _NONE
            ready()
            found = [crc32(row[: self._content]) for row in rows]
            if _write_all(self._out, rows.reshape(-1).data, self._place(layer, first)):
                sums[:] = found
        finally:
            done.set_result(None)

    def _read(
        self, layer: int, first: int, rows: Rows, ready: Callable[[], object], before: Sequence["Future[None]"], done: "Future[None]"
    ) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            wait(before)
            ready()
            try:
                self._file.read_direct(rows.reshape(-1).data, self._place(layer, first))
            except ReadError as fault:
                raise LostKV(f"KV of layer {layer}, blocks {first} to {first + len(rows) - 1} on disk: {fault}") from fault
            for block, row in enumerate(rows, first):
                if crc32(row[: self._content]) != self._sums[layer, block]:
                    at = self._place(layer, block)
                    raise LostKV(f"KV of layer {layer}, block {block} on disk, at byte {at}, is not what was written")
        except BaseException as fault:
            done.set_exception(fault)
        else:
            done.set_result(None)


def record_bytes(layout: KVLayout) -> int:
    """Of a layer of a block: whole pages of the disk."""
    return -(-layout.layer_bytes // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT


def tasks_of(rows: Rows) -> int:
    """In how many tasks these are read."""
    return len(_parts(0, rows))


def _parts(first: int, rows: Rows) -> list[tuple[int, Rows]]:
    """Whole records, as many as one request to the disk should ask for, and the first's block."""
    count = max(DIRECT_BYTES // rows.shape[1], 1)
    return [(first + at, rows[at : at + count]) for at in range(0, len(rows), count)]


def _opened(directory: Path, size: int) -> tuple[DirectFile, int]:
    """A new file without a name and with room for `size` bytes: to be read, and a descriptor to write it, past the page cache if it can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".penstock-kv-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            path = f"/proc/self/fd/{file.fileno()}"
            found = DirectFile(Path(path))
            try:
                out = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError:
                out = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        return found, out
    except (OSError, ReadError) as fault:
        full = isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = (fault.strerror if isinstance(fault, OSError) else None) or str(fault)
        hint = "allow less disk_kv_memory, or another kv_directory" if full else "name another kv_directory"
        raise DeviceError(f"{format_size(size)} for KV cannot be had in {directory}: {reason}; {hint}") from fault


def _write_all(out: int, data: memoryview, offset: int) -> bool:
    """Whether all could be written."""
    done = 0
    try:
        while done < len(data):
            done += os.pwrite(out, data[done : done + DIRECT_BYTES], offset + done)
    except OSError:
        return False
    return True
