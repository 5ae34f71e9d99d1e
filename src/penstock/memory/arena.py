"""An arena is one allocation on a tier, made at start and cut up by its owner."""

import ctypes
import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from penstock.base.errors import DeviceError
from penstock.base.units import format_size

PAGE = 4096
"""Bytes to which whatever a disk reads into is aligned."""
_STAYS = hasattr(mmap, "MADV_DONTFORK")
"""True where memory can stay with the process that mapped it; else it is shared with forked ones."""
_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK, which `mmap` does not name."""
_LOG = logging.getLogger("penstock")
_HUGE = 2 << 20
_TOUCH = 64 << 20
"""Bytes that a thread touches at a time."""


class PinningError(DeviceError):
    """PinningError says that host memory is there but cannot be pinned."""


class Arena:
    """An Arena is `bytes`, one flat uint8 tensor aligned to PAGE, on a device or in host memory.

    Host memory beside a CUDA device is pinned: registered with the driver, which takes a tenth of the time of
    a pinned allocation and exactly as much memory as was asked for.
    """

    def __init__(self, size: int, device: torch.device, *, pinned_for: torch.device | None = None) -> None:
        """Allocate `size` bytes.

        Raises DeviceError if there are not as many, PinningError if they cannot be pinned for the CUDA device
        `pinned_for`.
        """
        self.size, self._process = size, os.getpid()
        self._mapping: mmap.mmap | None = None
        self.bytes: Tensor
        try:
            pinned = pinned_for is not None and pinned_for.type == "cuda"
            if device.type == "cpu" and size:
                self._mapping, self.bytes = _mapped(size, _Mapping if pinned else mmap.mmap)
            else:
                self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        except (OSError, torch.OutOfMemoryError) as error:
            raise DeviceError(
                f"{format_size(size)} of {device} memory were asked for, but are not free; lower "
                "device_memory or host_memory, or close what uses the memory"
            ) from error
        if isinstance(self._mapping, _Mapping) and pinned_for is not None:
            self._register(self._mapping, pinned_for)

    def close(self) -> None:
        """Unpin and free the memory. A second call does nothing.

        No view may be used any more: host memory reads as zeros from now on, and a device's is gone. No copy
        may be in flight. If this is never called, memory is unpinned and freed with the last view of it. In a
        forked process the call does nothing: pinned memory stays with the process that made it.
        """
        if os.getpid() != self._process:
            return
        if self._mapping is None:
            self.bytes.untyped_storage().resize_(0)
            return
        if isinstance(self._mapping, _Mapping):
            self._mapping.unpin()
        # Of shared memory MADV_DONTNEED frees nothing. If this fails, the memory is freed with its last view.
        shared = isinstance(self._mapping, _Mapping) and not _STAYS
        advice = "MADV_REMOVE" if shared else "MADV_DONTNEED"
        if hasattr(mmap, advice):
            with suppress(OSError):
                self._mapping.madvise(getattr(mmap, advice))

    def _register(self, mapping: "_Mapping", device: torch.device) -> None:
        with torch.cuda.device(device):
            fault = int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.size, 0))  # type: ignore[no-untyped-call]
        if fault:
            raise PinningError(
                f"cannot pin {format_size(self.size)} of host memory for {device} (CUDA error {fault}); "
                f"allow less host memory, or raise the limit of locked memory (ulimit -l)"
            )
        mapping.pinned = self.bytes.data_ptr()


class _Mapping(mmap.mmap):
    """Maps memory that is to be pinned, and unpins it before it is unmapped, also if `unpin` was never
    called.

    While the driver still takes addresses for pinned, it refuses to pin new memory there.
    """

    pinned = 0
    """The address that was registered with the driver; 0 if none is."""

    def unpin(self) -> None:
        pinned, self.pinned = self.pinned, 0
        if pinned:
            _unregister(pinned)

    def __del__(self) -> None:
        self.unpin()


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # torch's


def pinned_if_possible(size: int, device: torch.device) -> Arena:
    """Allocate host memory for copies to and from `device`, pinned if possible.

    If that is refused it is plain, with a warning. Raises DeviceError.
    """
    try:
        return Arena(size, torch.device("cpu"), pinned_for=device)
    except PinningError as error:
        _LOG.warning("%s; copies will be several times slower until then", error)
        return Arena(size, torch.device("cpu"))


def drop_pages(data: Tensor) -> None:
    """Give the whole pages of a tensor in host memory back. They take none until they are written again, and
    read as zeros."""
    start = -(-data.data_ptr() // PAGE) * PAGE
    size = (data.data_ptr() + data.nbytes) // PAGE * PAGE - start
    if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
        with suppress(OSError, AttributeError):  # Without such a call the memory stays, which is no fault.
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_DONTNEED)
            )


def _keep_from_forks(mapping: mmap.mmap) -> None:
    """Let forked processes have zeros there, and copy nothing. They may write to it and unmap it; if nothing
    were there, something of their own could come to lie there, and be unmapped with it."""
    try:
        mapping.madvise(_WIPE_ON_FORK)
    except OSError:  # Kernels before 4.14 do not have it.
        mapping.madvise(mmap.MADV_DONTFORK)


def _mapped(size: int, kind: type[mmap.mmap]) -> tuple[mmap.mmap, Tensor]:
    """Map anonymous memory and touch all of its pages by several threads, many times faster than by one."""
    # The part begins at a multiple of a huge page, so that the kernel can use huge pages from there on.
    # It gives them to memory of one process, and a disk reads into them up to three times as fast. What is
    # pinned stays with its process: a fork must not copy its pages.
    pinned = kind is _Mapping
    shared = mmap.MAP_SHARED if pinned and not _STAYS else mmap.MAP_PRIVATE
    mapping = kind(-1, size + _HUGE, flags=shared | mmap.MAP_ANONYMOUS)
    if pinned and _STAYS:
        _keep_from_forks(mapping)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % _HUGE
    part = whole[start : start + size]

    def touch(at: int) -> None:
        part[at : at + _TOUCH : PAGE] = 0

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(touch, range(0, size, _TOUCH)))
    return mapping, torch.from_numpy(part)
