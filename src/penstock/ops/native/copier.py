"""Has a copy engine bring what a device asks for: a thread of copier.c queues the copies, and no Python."""

import ctypes
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import ClassVar

import numpy as np
from torch import Tensor

from penstock.ops.copies import CopyRequests
from penstock.ops.native.few_bits import library

_CALLS = "enter", "copy", "write"


@dataclass(frozen=True, slots=True)
class CopyCalls:
    """CopyCalls are addresses of functions that copier.c calls to queue copies, and what it gives to them.

    enter: makes a context the thread's. copy: from host memory. write: a number of 32 bits. All are zero for
    a CPU.
    """

    enter: int = 0
    copy: int = 0
    write: int = 0
    context: int = 0
    stream: int = 0


class _Copier(ctypes.Structure):
    """Holds what `struct copier` of copier.c does."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("asked", "list", "over", "failed", "came", "host", "base")),
        *((name, ctypes.c_int64) for name in ("experts", "places", "size", "most")),
        *((name, ctypes.c_void_p) for name in (*_CALLS, "context", "stream")),
        *((name, ctypes.c_int32) for name in ("stop", "seen")),
        ("id", ctypes.c_void_p),
    ]


class Copier:
    """A copier brings experts that are asked for, from when it is made until it is closed, or not referenced
    any more."""

    def __init__(self, requests: CopyRequests, host: Tensor, memory: Tensor, calls: CopyCalls) -> None:
        """Begin.

        host: uint8 `[experts, size]`, of all layers. memory: uint8 `[places, size]`, of the device. Raises
        MemoryError.
        """
        found, box = library(), requests.box
        assert found is not None, "the caller asks for the library first"
        assert host.is_contiguous() and memory.is_contiguous()  # noqa: PT018
        assert host.shape[1] == memory.shape[1], (host.shape, memory.shape)
        self._lock, self._kept = Lock(), (requests, host, memory)
        self._failed = np.zeros(1, np.int32)
        given = _Copier(
            **{name: getattr(box, name).data_ptr() for name in ("asked", "list", "over")},
            **{name: getattr(calls, name) or None for name in (*_CALLS, "context", "stream")},
            failed=self._failed.ctypes.data, came=requests.came.data_ptr(), host=host.data_ptr(),
            base=memory.data_ptr(), experts=len(host), places=len(memory), size=memory.shape[1],
            most=box.most,
        )  # fmt: skip
        copier: int | None = found.copier_open(ctypes.byref(given))
        if not copier:
            raise MemoryError("no memory for a thread that copies experts")
        # Also where nobody closes it: the thread must not look at memory that is gone.
        self._end = weakref.finalize(self, _end, found.copier_close, copier, os.getpid())

    @property
    def failed(self) -> str:
        """Say why something did not come; empty if all did."""
        return ("", "a copy was refused", "what was asked for is not there")[int(self._failed[0])]

    def close(self) -> None:
        """End the thread, behind what it is at. A second call does nothing, nor does one in a forked
        process, which has no such thread."""
        with self._lock:
            self._end()


def _end(close: Callable[[int], None], copier: int, process: int) -> None:
    if os.getpid() == process:
        close(copier)
