"""Sends small arrays to a device past its copy engine.

A copy engine takes copies in the order in which they become ready, whatever streams they are on. An array
that is needed at once would wait there for all weights that were queued for later. A kernel reads it from
pinned memory instead, and shares the link with the copies.

Why this is safe. Pinned memory is divided into parts, which are filled one after another. When a part is
left, a mark is made behind all kernels that read it, on each of their streams. It is written to again only
when all of its marks are reached. If they are not, the array goes by the copy engine, from memory of its own.
An interrupt leaves a part as it was, or with bytes that no one reads.
"""

from collections.abc import Callable
from functools import cache, partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PARTS = 16
_PART = 256 << 10
"""Bytes of a part, and of the largest array that a kernel reads."""
_ALIGNED = 16


def send(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device, in the order of its current stream; wait for nothing."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    if 0 < values.nbytes <= _PART and (buffer := _buffer_of(device)) is not None:
        sent = buffer.send(values)
        if sent is not None:
            return sent
    # The allocator reuses pinned memory only when it has been read.
    return tensor.pin_memory().to(device, non_blocking=True)


def seen_by(device: torch.device, pinned: Tensor) -> Tensor | None:
    """Return pinned host memory, a flat tensor, as a tensor on the device: kernels read it through the link.

    The caller keeps `pinned`. On a CPU it is returned itself. None where torch would make a copy: of memory
    that was pinned for another device.
    """
    if device.type == "cpu":
        return pinned
    seen = torch.as_tensor(_Memory(pinned), device=device)
    return seen if seen.data_ptr() == pinned.data_ptr() else None


def read_into(target: Tensor, seen: Tensor | None, pinned: Tensor) -> None:
    """Copy integers from pinned memory to a tensor of their shape and dtype: by a kernel, if the device has
    `seen` them (`seen_by`)."""
    if seen is None:
        target.copy_(pinned, non_blocking=True)
    else:
        torch.bitwise_or(seen[: len(pinned)], 0, out=target)


class StagingTurns:
    """Lends pinned memory for a step's numbers, which go to a place that never changes.

    Why this is safe. Buffers are lent in turns. A mark is made behind what reads one, and waited for before
    it is lent again: however many steps are under way, none reads what a later one is given.
    """

    def __init__(self, size: int, device: torch.device, turns: int = 8) -> None:
        """size: int32 numbers of a step. turns: buffers, so many steps may wait for the device before the
        host does."""
        pinned = device.type == "cuda"
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(turns)]
        self._seen = [seen_by(device, buffer) for buffer in self._buffers]
        self._marks: list[torch.cuda.Event | None] = [None] * turns
        self._marked, self._turn = pinned, 0

    def lend(self, count: int) -> Tensor:
        """Lend a buffer of so many numbers, when the device has read it."""
        self._turn = (self._turn + 1) % len(self._buffers)
        if (mark := self._marks[self._turn]) is not None:
            mark.synchronize()
        return self._buffers[self._turn][:count]

    def read_into(self, target: Tensor) -> None:
        """Copy what was lent last, from its beginning, to a tensor on the device."""
        read_into(target, self._seen[self._turn], self._buffers[self._turn][: len(target)])
        if self._marked:
            mark = self._marks[self._turn]
            if mark is None:
                mark = self._marks[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record()


class SendBuffer:
    """Holds arrays in pinned memory until kernels have read them. Any thread may call it."""

    def __init__(
        self, host: Tensor, seen: Tensor, parts: int, stream: Callable[[], torch.cuda.Stream]
    ) -> None:
        """Begin with empty parts. host: pinned, uint8, a multiple of `parts` times 16 bytes. seen: the same
        for the device, int64. stream: returns the current stream."""
        self._host, self._seen, self._stream = host.numpy(), seen, stream
        self._size = len(host) // parts
        self._part, self._used = 0, [0] * parts
        self._streams: list[set[torch.cuda.Stream]] = [set() for _ in range(parts)]
        self._read: list[list[torch.cuda.Event]] = [[] for _ in range(parts)]
        self._lock = Lock()

    def send(self, values: NDArray[Any]) -> Tensor | None:
        """Copy an array to the device, in the order of its current stream. None if no part has room for it
        now."""
        with self._lock:
            size = -(-values.nbytes // _ALIGNED) * _ALIGNED
            if self._used[self._part] + size > self._size and not self._turn(size):
                return None
            start = self._part * self._size + self._used[self._part]
            self._used[self._part] += size
            self._streams[self._part].add(self._stream())
            self._host[start : start + values.nbytes] = (
                np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            )
            sent = torch.bitwise_or(self._seen[start // 8 : (start + size) // 8], 0)
        dtype = torch.from_numpy(values.reshape(-1)[:0]).dtype
        return sent.view(dtype)[: values.size].view(values.shape)

    def _turn(self, size: int) -> bool:
        """Begin the next part, if all that read it is done and an array of so many bytes fits."""
        following = (self._part + 1) % len(self._used)
        if size > self._size or not all(mark.query() for mark in self._read[following]):  # type: ignore[no-untyped-call]
            return False
        self._read[self._part] = [stream.record_event() for stream in self._streams[self._part]]
        self._used[following], self._streams[following] = 0, set()
        self._part = following
        return True


class _Memory:
    """Says where memory is, as CUDA libraries ask each other."""

    def __init__(self, pinned: Tensor) -> None:
        kind = pinned.numpy().dtype.str
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": kind,
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }


@cache
def _buffer_of(device: torch.device) -> SendBuffer | None:
    host = torch.zeros(_PARTS * _PART, dtype=torch.uint8, pin_memory=True)
    current, seen = partial(torch.cuda.current_stream, device), seen_by(device, host.view(torch.int64))
    return None if seen is None else SendBuffer(host, seen, _PARTS, current)
