"""Measures the links that bound an engine: memory, copies between host and device, the disk, and products.

Every rate is the best of several passes: what the link can do, not what it did while the machine was busy
with something else. Each function takes about a second and frees what it took.
"""

import itertools
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from penstock.base.errors import DeviceError
from penstock.memory.arena import Arena
from penstock.memory.device import free_memory

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE = 32 << 20
_HOST_BYTES = 256 << 20
_DEVICE_BYTES = 2 << 30
_PINNED_BYTES = 128 << 20
_DISK_REQUEST = 16 << 20
_DISK_THREADS = 8
_PAGE = 4096
_DISK_BYTES = 256 << 20
"""Bytes of a temporary file; an existing one is used from a quarter of this size on."""
_SECONDS = 0.4
"""Seconds for which a measurement is repeated."""


@dataclass(frozen=True, slots=True)
class LinkRates:
    """LinkRates are copies between pinned host memory and a device, bytes/s.

    both: each way, while the other way runs at the same time.
    """

    to_device: float
    from_device: float
    both: float


@dataclass(frozen=True, slots=True)
class DiskRate:
    """DiskRate is how fast one file is read with large requests of several threads.

    read: bytes/s.
    temporary: whether `file` was written for this and is gone again.
    direct: whether the page cache was bypassed. If not, it was asked to drop the file first, and may not
        have.
    """

    read: float
    file: Path
    temporary: bool
    direct: bool


def memory_read(device: torch.device, most: int | None = None, seconds: float = _SECONDS) -> float:
    """Measure the bytes/s at which a sum reads memory of the device, far beyond its caches.

    On a CPU all of torch's threads read.

    most: bytes to take for it.
    seconds: for which it is repeated.
    """
    wanted = _DEVICE_BYTES if device.type == "cuda" else max(_HOST_BYTES, 4 * _cache_bytes())
    wanted = min(wanted, most or wanted)
    source = _buffer(wanted, device).view(torch.float32).view(4096, -1)
    return source.nbytes / _best(lambda: source.sum(1), device, seconds)


def memory_copy(device: torch.device) -> float:
    """Measure the bytes/s of a copy within the device's memory; each byte counts twice, read and written."""
    source = _buffer(_DEVICE_BYTES // 2 if device.type == "cuda" else _HOST_BYTES // 2, device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the floating-point operations a second of a square matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / _best(lambda: torch.mm(left, right, out=out), device)


def link_rates(device: torch.device) -> LinkRates:
    """Measure the link between pinned host memory and a CUDA device, each way and both at once."""
    assert device.type == "cuda", "there is no link between the host and itself"
    sent, received = (torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    target, source = (torch.empty(_PINNED_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    down, up = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's

    def send() -> None:
        with torch.cuda.stream(down):
            target.copy_(sent, non_blocking=True)

    def receive() -> None:
        with torch.cuda.stream(up):
            received.copy_(source, non_blocking=True)

    def both() -> None:
        for _ in range(4):  # Long enough that starting one before the other does not matter.
            send()
            receive()

    ways = _best(send, device), _best(receive, device)
    return LinkRates(
        _PINNED_BYTES / ways[0], _PINNED_BYTES / ways[1], 4 * _PINNED_BYTES / _best(both, device)
    )


def copy_rate(device: torch.device, most: int | None = None, seconds: float = _SECONDS) -> float:
    """Measure the bytes/s of the one stream that brings weights to the device.

    It copies from pinned memory over the link, or, on a CPU, by one thread.

    most: bytes to copy at most, on a CPU.
    seconds: for which it is repeated.
    """
    if device.type == "cuda":
        sent = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device=device)
        return _PINNED_BYTES / _best(lambda: target.copy_(sent, non_blocking=True), device, seconds)
    source = _buffer(min(_HOST_BYTES // 2, most or _HOST_BYTES), device).numpy()
    copy = np.empty_like(source)
    return source.nbytes / _best(lambda: np.copyto(copy, source), device, seconds)


def file_read(file: Path, seconds: float = 2 * _SECONDS) -> DiskRate:
    """Measure how fast a file or a block device is read, in large requests, past the page cache if possible.

    Raises DeviceError if it cannot be read.
    """
    try:
        return _read_file(file, temporary=False, seconds=seconds)
    except OSError as error:
        raise DeviceError(
            f"cannot measure the disk by {file}: {error.strerror or error}; name a file that can be read, "
            "or leave the disk out"
        ) from error


def disk_read(directory: Path) -> DiskRate:
    """Measure how fast files of `directory` are read.

    It takes the largest, if that is large enough, or one that is written and dropped again. Raises
    DeviceError if there is none and none can be written.
    """
    try:
        files = [
            (entry.stat().st_size, Path(entry.path)) for entry in os.scandir(directory) if entry.is_file()
        ]
        size, file = max(files, default=(0, directory))
        if size >= _DISK_BYTES // 4:
            return _read_file(file, temporary=False)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".penstock-probe-") as written:
            block = os.urandom(_DISK_REQUEST)
            for _ in range(_DISK_BYTES // _DISK_REQUEST):
                written.write(block)
            written.flush()
            os.fsync(written.fileno())
            return _read_file(Path(written.name), temporary=True)
    except OSError as error:
        raise DeviceError(
            f"cannot measure the disk of {directory}: {error.strerror or error}; name a directory that can "
            "be read"
        ) from error


def _read_file(file: Path, *, temporary: bool, seconds: float = 2 * _SECONDS) -> DiskRate:
    direct = hasattr(os, "O_DIRECT") and _allows_direct(file)
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return DiskRate(_read_rate(fd, once=not direct, seconds=seconds), file, temporary, direct)
    finally:
        os.close(fd)


def _allows_direct(file: Path) -> bool:
    """Tell whether a file can be read with O_DIRECT.

    Some file systems refuse it at open, some at the first read.
    """
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.preadv(fd, [mmap.mmap(-1, _PAGE)], 0) > 0
    except OSError:
        return False
    finally:
        os.close(fd)


def _read_rate(fd: int, *, once: bool, seconds: float) -> float:
    """Measure the bytes/s of threads that read whole requests of the file, over and over, or once through.

    It is memory such as an engine reads into: into others, in small pages, the same disk may be several times
    slower.

    Why this is safe: each thread reads into memory of its own, and takes its next request from a counter
    under a lock.
    """
    size = os.lseek(fd, 0, os.SEEK_END)  # Also of a block device.
    starts = range(0, max(size - _DISK_REQUEST, 0) + 1, _DISK_REQUEST)
    numbers = iter(starts) if once else itertools.cycle(starts)
    lock = threading.Lock()
    begin = time.perf_counter()
    end = begin + seconds

    def read() -> int:
        buffer, done = Arena(_DISK_REQUEST, torch.device("cpu")).bytes.numpy().data, 0
        while not done or time.perf_counter() < end:
            with lock:
                start = next(numbers, None)
            if start is None:
                break
            done += os.preadv(fd, [buffer], start)
        return done

    with ThreadPoolExecutor(_DISK_THREADS, "probe") as pool:
        total = sum(task.result() for task in [pool.submit(read) for _ in range(_DISK_THREADS)])
    return total / (time.perf_counter() - begin)


def _buffer(wanted: int, device: torch.device) -> torch.Tensor:
    """Return written bytes on the device: as many as wanted, but at most an eighth of what is free."""
    size = min(wanted, free_memory(device) // 8) >> 20 << 20
    if size == 0:
        raise DeviceError(
            f"{device} has too little free memory to measure it; close what uses it, and run again"
        )
    return torch.ones(size, dtype=torch.uint8, device=device)


def _cache_bytes() -> int:
    """Return the bytes of the processor's largest cache."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    try:
        sizes = [file.read_text().strip() for file in _CACHES.glob("index*/size")]
        return max(int(size[:-1]) * units[size[-1]] for size in sizes)
    except (OSError, ValueError, KeyError, IndexError):
        return _USUAL_CACHE


def _best(work: Callable[[], object], device: torch.device, seconds: float = _SECONDS) -> float:
    """Return the seconds of the fastest of several runs of `work`.

    The first is not counted: it sets things up.
    """
    work()
    _wait(device)
    best, end, runs = float("inf"), time.perf_counter() + seconds, 0
    while runs < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        _wait(device)
        best = min(best, time.perf_counter() - begin)
        runs += 1
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
