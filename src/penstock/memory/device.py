"""The machine's memory: which device, how much there is, and how much a piece of work takes at its peak."""

import ctypes
import gc
import mmap
import os
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate, chain
from operator import methodcaller
from pathlib import Path

import psutil
import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd import _disable_profiler_legacy, _enable_profiler_legacy  # type: ignore[attr-defined]

from penstock.base.errors import DeviceError
from penstock.base.units import counted, format_size

_MOST_OUTSIDE = 1 << 30
"""Most bytes that a CUDA context takes. What is missing beyond that belongs to other processes."""
_TABLES = 512
"""Bytes of host memory for each byte of the device's page tables: 8 bytes map a page of 4096."""
_SHORT = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Texts of torch's errors when memory runs out, where it has no error type for that."""
_PACKED = 5 << 20
"""Bytes that MKL takes for each thread, measured: 4.7 MiB for products in float32; oneDNN takes 0.4 for those
in bfloat16."""
_MODULES = 256 << 20
"""Bytes of kernels that are loaded later."""
_EARLY = (9, 0)
"""Compute capability of the first GPUs whose kernels can wait for each other on the device."""
_CONNECTIONS = "32"
"""The most that there can be. Streams on one H100 held up every fourth other with 8, and none with 32."""
_SMALL = 1 << 20
"""Bytes up to which torch allocates tensors from segments for small ones."""
_SEGMENTS = 22 << 20
"""Bytes that torch takes from CUDA at a time: 20 MiB for tensors of 1 to 10 MiB, and 2 MiB for smaller
ones."""


def choose_device(asked: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:N`. Raises DeviceError if it is not there.

    To be called before anything else of CUDA: it asks for as many connections to the device as there may be.
    A stream that waits holds up those on its connection, of which there are 8 by default.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _CONNECTIONS)
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    _, _, index = asked.partition(":")
    number = int(index or 0)
    if number >= count:
        there = (
            f"the last there is cuda:{count - 1}; try one up to that"
            if count
            else "torch sees no CUDA device; try a CUDA build of torch"
        )
        raise DeviceError(f"device {asked!r} was asked for, but {there}, or the device cpu")
    return torch.device("cuda", number)


def device_name(device: torch.device, threads: int | None = None) -> str:
    """Return the name of a GPU, or how many threads the CPU computes with: torch's, if not so many."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads() if threads is None else threads
    return f"CPU, {counted(count, 'thread')}"


def begins_early(device: torch.device) -> bool:
    """Tell whether kernels can begin early and wait on the device (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _EARLY


def native_half(device: torch.device) -> bool:
    """Tell whether the device multiplies bfloat16 matrices in hardware."""
    if device.type == "cuda":
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory that the device has in all."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return min(int(psutil.virtual_memory().total), _cgroup_limit())


def free_memory(device: torch.device) -> int:
    """Return the bytes that could be allocated now, with those that torch holds on to for reuse."""
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    return min(int(psutil.virtual_memory().available), _cgroup_limit() - _cgroup_usage())


def cap_memory(device: torch.device, size: int, pinned: int) -> int:
    """Make torch refuse to allocate more on a CUDA device than keeps the process below `size` bytes.

    Returns the bytes of `size` that may be allocated. The others are the driver's, its modules', its page
    tables' for `pinned` bytes of host memory, and what torch has of the device already. Call it after
    `give_back`.
    """
    free, whole = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    outside = min(whole - free - reserved, _MOST_OUTSIDE) + _MODULES + pinned // _TABLES
    torch.cuda.set_per_process_memory_fraction(min(max(size - outside, 0) / whole, 1.0), device)
    return size - outside - reserved


def stuck_memory(device: torch.device) -> int:
    """Return the bytes that torch keeps for reuse and cannot give back, after `give_back`.

    They are parts of segments of which others are in use. There may be much of it if a process has used torch
    before: a gigabyte, if a library's workspace lies in what a large tensor left.
    """
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def give_back(device: torch.device) -> None:
    """Return what torch keeps for reuse to the device: what comes next is sized to the last byte.

    On a CPU the C library's heap keeps it, which has a call for that on Linux.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


class Heap:
    """Heap returns the holes in a CPU process's heap to the system, if they outgrow what a step uses again.

    glibc takes tensors of up to 32 MiB from its heap, where those of many sizes leave holes between them:
    steps of 27 MiB were seen to hold 107. Pages of their own for large tensors, or a trim after each step,
    would bound that too, but then every step pays for new pages: 7 % of a prompt's time with the 0.6B shape.
    """

    def __init__(self, kept: int) -> None:
        """Take the heap as it is. kept: bytes that may stay for reuse."""
        self._kept, self._floor = kept, 0
        self._pages: int | None = None
        with suppress(OSError, AttributeError):
            self._trim = ctypes.CDLL(None).malloc_trim
            self._pages = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._pages)
            self._trim(0)
            self._floor = self._private()

    def tidy(self) -> bool:
        """Trim the heap if the process has grown by more than may stay; tell whether it was trimmed.

        If not, it takes some microseconds.
        """
        if self._pages is None:
            return False
        taken = self._private()
        self._floor = min(self._floor, taken)
        if taken <= self._floor + self._kept:
            return False
        self._trim(0)
        # The rest is in use, such as pages of KV that were written for the first time.
        self._floor = self._private()
        return True

    def _private(self) -> int:
        """Return the resident bytes of the process that are in no file."""
        assert self._pages is not None
        _, resident, shared, *_ = os.pread(self._pages, 128, 0).split()
        return (int(resident) - int(shared)) * mmap.PAGESIZE


def lift_cap(device: torch.device) -> None:
    """Undo cap_memory."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def shortage(fault: BaseException, device: torch.device) -> str:
    """Return a sentence on how a step has run out of the device's memory; empty if the fault is another.

    fault: of torch or numpy.
    """
    text = str(fault)
    if isinstance(fault, torch.OutOfMemoryError | MemoryError):
        pass
    elif not isinstance(fault, RuntimeError) or not any(sign in text for sign in _SHORT):
        return ""
    asked = re.search(r"allocate ([\d.]+ [KMGT]?i?[Bb]\w*)", text)
    there = (
        f", of which {format_size(free_memory(device))} are free"
        if device.type == "cpu"
        else _allowed(text, device)
    )
    return (
        f"{device} has too little memory for a "
        f"step{f', which asked for {asked[1]} more' if asked else ''}{there}; raise device_memory, or lower "
        "max_step_tokens or max_sequences"
    )


def _allowed(text: str, device: torch.device) -> str:
    cap = re.search(r"([\d.]+ [KMGT]iB) allowed", text)
    taken = f"{format_size(torch.cuda.memory_reserved(device))} are taken"
    return f"; {taken}" + (f" of {cap[1]} allowed" if cap else "")


def _cgroup_limit() -> int:
    """Return a container's memory limit, which psutil does not know."""
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return 2**62


def _cgroup_usage() -> int:
    """Return the bytes that the container's processes take, without the file cache."""
    try:
        cached = sum(
            int(line.split()[1])
            for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
            if line.startswith(("inactive_file ", "active_file "))
        )
        return max(int(Path("/sys/fs/cgroup/memory.current").read_text()) - cached, 0)
    except (OSError, ValueError):
        return 0


def peak_of(device: torch.device, work: Callable[[], object]) -> int:
    """Return the bytes of device memory that `work` took at its peak, beyond what was taken before it.

    On CUDA they include what was lost between allocations, and somewhat more: work of another shape loses it
    in other places, and may need one more of each of the allocator's segments.

    On a CPU they are the bytes of tensors alone, which are the same each time. What the process gains in
    pages is not: it depends on what was freed before and is used again, and on whether libraries have their
    buffers already (see `library_buffers`).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        give_back(device)
        with _no_stuck_memory(device):
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_reserved(device)
            work()
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_reserved(device) - before
        return peak + max(peak // 8, _SEGMENTS)
    return _tensors_at_peak(work)


def left_by(device: torch.device, work: Callable[[], object]) -> int:
    """Call `work`, and return the bytes of a CUDA device that stay taken: workspaces of libraries.

    Call it after `give_back`.
    """
    if device.type != "cuda":
        work()
        return 0
    before = torch.cuda.memory_reserved(device)
    # The library allocates its workspace here, so that it takes no part of a large tensor's segment later.
    torch.ones(1, 1, device=device).mm(torch.ones(1, 1, device=device))
    work()
    torch.cuda.synchronize(device)
    give_back(device)
    return max(torch.cuda.memory_reserved(device) - before, 0)


@contextmanager
def _no_stuck_memory(device: torch.device) -> Iterator[None]:
    """Hold the memory that torch cannot give back (see `stuck_memory`), so that nothing is allocated from it.

    Such an allocation would not be counted.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    segments = [
        segment
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # torch's
        if (segment["device"], segment["stream"], segment["segment_type"]) == (device.index, stream, "large")
        and segment.get("segment_pool_id", (0, 0)) == (0, 0)  # Others belong to CUDA graphs.
    ]
    free = (
        block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"
    )
    # The largest first: each then fits only its own block. Smaller tensors are allocated elsewhere.
    held = [
        torch.empty(size, dtype=torch.uint8, device=device)
        for size in sorted(free, reverse=True)
        if size > _SMALL
    ]
    try:
        yield
    finally:
        held.clear()


def library_buffers(device: torch.device) -> int:
    """Return the bytes that a CPU's library of products takes when it is first called, and keeps.

    `peak_of` does not count them.
    """
    return _PACKED * torch.get_num_threads() if device.type == "cpu" else 0


def _tensors_at_peak(work: Callable[[], object]) -> int:
    """Return the most bytes that torch's CPU allocator gave this thread and had not got back.

    torch reports each allocation to a profiler alone. This one is older than torch.profiler; that takes two
    seconds and 150 MiB to load.
    """
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(config)
    try:
        work()
    finally:
        threads = _disable_profiler_legacy()
    # Negative where memory is freed, 0 for other events, of which there are thousands.
    changes: Iterator[int] = map(methodcaller("cpu_memory_usage"), chain.from_iterable(threads))
    return max(accumulate(changes, initial=0))
