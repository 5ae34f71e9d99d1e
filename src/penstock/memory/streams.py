"""Streams do their work in order, each beside the others; a ticket is a point in one to wait for.

On CUDA these are the device's streams and events. On a CPU copies have a thread of their own, and arithmetic
is its caller's.
"""

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from queue import SimpleQueue
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.base.errors import DeviceError
from penstock.memory.runtime import cuda_function

Pieces = NDArray[np.int64]
"""int64 `[pieces, 3]`: offset in the target, offset in the source, and bytes of each piece. None overlap in
the target."""


class Ticket(Protocol):
    """A Ticket is a point in a stream's work, for which the host or another stream can wait."""

    @property
    def done(self) -> bool:
        """Tell whether the point is reached."""

    def wait(self) -> None:
        """Block the calling thread until the point is reached."""

    def when(self) -> float:
        """Return when it was reached, in seconds of perf_counter. It must be done."""


class Stream(Protocol):
    """A Stream does what is queued in order. Any thread may queue work, one at a time."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between flat uint8 tensors of one size.

        Neither may be touched until a later mark is done.
        """

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between uint8 tensors `[rows, bytes]` of one shape, in which rows may stand apart.
        Host memory should be pinned.

        As for `copy`, neither may be touched until a later mark is done. Raises DeviceError if the device
        refuses.
        """

    def copy_pieces(self, target: Tensor, source: Tensor, pieces: "Pieces") -> None:
        """Queue copies of pieces between flat uint8 tensors, all of them in one call. Host memory should be
        pinned.

        As for `copy`, neither may be touched until a later mark is done. Raises DeviceError if the device
        refuses.
        """

    def run(self, work: Callable[[], object]) -> None:
        """Queue what `work` does, or what it launches on a device. It must not raise on a thread."""

    def wait(self, ticket: Ticket) -> None:
        """Start what is queued from now on after `ticket`."""

    def follow(self, other: "Stream") -> None:
        """Start what is queued from now on after all that `other`, of the same kind, has been given."""

    def mark(self) -> Ticket:
        """Return a ticket that is done when all that has been queued is."""

    def close(self) -> None:
        """Finish what is queued and end."""


class HostTicket:
    """A HostTicket is reached when a thread says so, once.

    It is a lock that is held until then: an interrupt of who waits leaves nothing behind, as it would within
    a threading.Event.
    """

    __slots__ = ("_closed", "_when")

    def __init__(self) -> None:
        self._closed = threading.Lock()
        self._closed.acquire()
        self._when: float | None = None

    def reach(self) -> None:
        """Say that the point is reached."""
        self._when = perf_counter()
        self._closed.release()

    @property
    def done(self) -> bool:
        """Tell whether the point is reached."""
        return self._when is not None

    def wait(self) -> None:
        """Block the calling thread until the point is reached."""
        if self._when is None:
            with self._closed:
                pass

    def when(self) -> float:
        """Return when it was reached, in seconds of perf_counter. It must be done."""
        assert self._when is not None
        return self._when


class _HostStream(ABC):
    """Copies host memory. `run` says when the work is done."""

    @abstractmethod
    def run(self, work: Callable[[], object]) -> None:
        """Do any work, or queue it. It must not raise."""

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        """Copy as `Stream.copy_rows` says."""
        _check_rows(target, source)
        self.run(lambda: np.copyto(target.numpy(), source.numpy()))

    def copy_pieces(self, target: Tensor, source: Tensor, pieces: Pieces) -> None:
        """Copy as `Stream.copy_pieces` says."""
        _check_pieces(target, source, pieces)
        self.run(lambda: _copy_pieces(target, source, pieces))

    def wait(self, ticket: Ticket) -> None:
        """Start what is queued from now on after `ticket`."""
        self.run(ticket.wait)

    def follow(self, other: Stream) -> None:
        """Start what is queued from now on after all that `other` has been given."""
        self.wait(other.mark())

    def mark(self) -> Ticket:
        """Return a ticket that is done when all that has been queued is."""
        ticket = HostTicket()
        self.run(ticket.reach)
        return ticket


class ThreadStream(_HostStream):
    """A ThreadStream is a thread that does what is queued, in order."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._work,), name=f"penstock {name}", daemon=True
        )
        self._thread.start()

    def run(self, work: Callable[[], object]) -> None:
        """Queue any work. It must not raise."""
        self._work.put(work)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue what `Stream.copy` says."""
        # This is one core's memcpy. torch would use its threads, which the arithmetic needs.
        self.run(lambda: np.copyto(target.numpy(), source.numpy()))

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._work.put(None)
        self._thread.join()


def _serve(work: "SimpleQueue[Callable[[], object] | None]") -> None:
    while (one := work.get()) is not None:
        one()


class CallerStream(_HostStream):
    """A CallerStream does everything at once, on the caller's thread: arithmetic on a CPU."""

    def run(self, work: Callable[[], object]) -> None:
        """Do any work."""
        work()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy as `Stream.copy` says."""
        target.copy_(source)

    def close(self) -> None:
        """Do nothing: all is done."""
        pass


class _Clock:
    """Relates the times of a device's events to perf_counter."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        self._event.record(torch.cuda.current_stream(device))
        self._event.synchronize()
        self._when = perf_counter()

    def when(self, event: torch.cuda.Event) -> float:
        return self._when + float(self._event.elapsed_time(event)) / 1e3


class CudaTicket:
    """A CudaTicket is an event of the device."""

    __slots__ = ("_clock", "event")

    def __init__(self, event: torch.cuda.Event, clock: _Clock) -> None:
        self.event = event
        self._clock = clock

    @property
    def done(self) -> bool:
        """Tell whether the event has come."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block the calling thread until the event has come."""
        self.event.synchronize()

    def when(self) -> float:
        """Return when it came, in seconds of perf_counter. It must be done."""
        return self._clock.when(self.event)


class CudaStream:
    """A CudaStream is a stream of the device: a new one, or the calling thread's current one.

    current: whether it is the latter, for arithmetic.
    clock: another stream's, so that times are comparable. first: its kernels begin before those of other
    streams that have not begun, recorded ones too.
    """

    def __init__(
        self, device: torch.device, *, current: bool = False, clock: _Clock | None = None, first: bool = False
    ) -> None:
        self._device = device
        self._stream = None if current else torch.cuda.Stream(device, -int(first))  # type: ignore[no-untyped-call]  # torch's
        self.clock = clock or _Clock(device)

    def run(self, work: Callable[[], object]) -> None:
        """Queue what `work` launches."""
        with torch.cuda.stream(self._queue()):
            work()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue what `Stream.copy` says."""
        with torch.cuda.stream(self._queue()):
            target.copy_(source, non_blocking=True)

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        """Queue what `Stream.copy_rows` says. Raises DeviceError."""
        # torch copies strided host memory through a buffer, on the host, and waits for it.
        _check_rows(target, source)
        (rows, width), kind = target.shape, 2 * source.is_cuda + target.is_cuda
        # A lone row may have any stride, but the runtime needs a pitch of at least the width.
        pitches = [max(x.stride(0), width) for x in (target, source)]
        with torch.cuda.device(self._device):
            stream = self._queue().cuda_stream
            fault = _memcpy_2d()(
                target.data_ptr(), pitches[0], source.data_ptr(), pitches[1], width, rows, kind, stream
            )
        if fault:
            raise DeviceError(
                f"cannot copy {rows} rows of {width} bytes to {target.device} from {source.device} (CUDA "
                f"error {fault}); restart penstock, and look at the device with nvidia-smi if it fails again"
            )

    def copy_pieces(self, target: Tensor, source: Tensor, pieces: Pieces) -> None:
        """Queue what `Stream.copy_pieces` says. Raises DeviceError."""
        _check_pieces(target, source, pieces)
        if len(pieces):
            with torch.cuda.device(self._device):
                fault = _memcpy_batch()(
                    target.data_ptr(), source.data_ptr(), pieces, self._queue().cuda_stream
                )
            if fault:
                raise DeviceError(
                    f"cannot copy {len(pieces)} pieces to {target.device} from {source.device} (CUDA error "
                    f"{fault}); restart penstock, and look at the device with nvidia-smi if it fails again"
                )

    def wait(self, ticket: Ticket) -> None:
        """Start what is queued from now on after `ticket`."""
        assert isinstance(ticket, CudaTicket)
        self._queue().wait_event(ticket.event)

    def follow(self, other: Stream) -> None:
        """Start what is queued from now on after all that `other` has been given."""
        assert isinstance(other, CudaStream)
        # Its event takes no time down, which a mark's does in 15 microseconds.
        self._queue().wait_stream(other._queue())

    def mark(self) -> Ticket:
        """Return a ticket that is done when all that has been queued is."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._queue())
        return CudaTicket(event, self.clock)

    def close(self) -> None:
        """Wait until all that is queued is done."""
        self._queue().synchronize()

    def _queue(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream(self._device)


def _check_rows(target: Tensor, source: Tensor) -> None:
    assert target.shape == source.shape, f"rows of unlike shapes: {target.shape}, {source.shape}"
    for rows in (target, source):
        count, width = rows.shape
        assert rows.dtype == torch.uint8, f"rows are bytes, not {rows.dtype}"
        assert width <= 1 or rows.stride(1) == 1, "the bytes of a row stand apart"
        assert count <= 1 or rows.stride(0) >= width, "rows lie over each other"


def joined(pieces: Pieces) -> Pieces:
    """Return the same bytes in as few pieces: those that follow one another on both sides become one."""
    if len(pieces) < 2:
        return pieces
    follows = (pieces[1:, :2] == pieces[:-1, :2] + pieces[:-1, 2:]).all(1)
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    found = pieces[starts].copy()
    found[:, 2] = np.add.reduceat(pieces[:, 2], starts)
    return found


def _check_pieces(target: Tensor, source: Tensor, pieces: Pieces) -> None:
    assert pieces.dtype == np.int64, f"pieces of {pieces.dtype}"
    assert pieces.shape[1:] == (3,), f"pieces {pieces.shape}"
    for at, flat in enumerate((target, source)):
        assert flat.dtype == torch.uint8, f"pieces of {flat.dtype}"
        assert flat.dim() == 1, f"pieces of a tensor {tuple(flat.shape)}"
        assert flat.is_contiguous(), "the bytes of a tensor with pieces stand apart"
        starts, sizes = pieces[:, at], pieces[:, 2]
        within = not len(pieces) or (
            starts.min() >= 0 and sizes.min() > 0 and (starts + sizes).max() <= len(flat)
        )
        assert within, f"a piece beyond the {len(flat)} bytes of a tensor"


def _copy_pieces(target: Tensor, source: Tensor, pieces: Pieces) -> None:
    to, of = target.numpy(), source.numpy()
    for at, start, size in pieces.tolist():
        to[at : at + size] = of[start : start + size]


class _CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes: in which order the source is read, hints for managed memory, flags."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_IN_STREAM_ORDER = 1


@lru_cache(maxsize=1)
def _memcpy_batch() -> Callable[[int, int, Pieces, int], int]:
    """Return a function that copies pieces: cudaMemcpyBatchAsync, or single copies before runtime 12.8."""
    version = ctypes.c_int()
    cuda_function("cudaRuntimeGetVersion", ctypes.c_void_p)(ctypes.byref(version))
    if version.value < 12080:
        single = cuda_function(
            "cudaMemcpyAsync",
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
        )

        def one_by_one(target: int, source: int, pieces: Pieces, stream: int) -> int:
            # 4 is cudaMemcpyDefault: the runtime finds out which way to copy.
            faults = (
                single(target + at, source + start, size, 4, stream) for at, start, size in pieces.tolist()
            )
            return next((fault for fault in faults if fault), 0)

        return one_by_one
    # Before 13 one more argument takes the index of the copy that failed.
    failed = [ctypes.c_void_p] if version.value < 13000 else []
    pointers = [ctypes.c_void_p] * 3
    batch = cuda_function(
        "cudaMemcpyBatchAsync",
        *pointers,
        ctypes.c_size_t,
        *pointers[:2],
        ctypes.c_size_t,
        *failed,
        ctypes.c_void_p,
    )
    attributes = _CopyAttributes(_IN_STREAM_ORDER)
    first = ctypes.c_size_t(0)

    def at_once(target: int, source: int, pieces: Pieces, stream: int) -> int:
        lists = np.ascontiguousarray(pieces.T)
        lists[0] += target
        lists[1] += source
        which = [ctypes.byref(ctypes.c_size_t())] if failed else []
        return batch(
            *(row.ctypes.data for row in lists),
            len(pieces),
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            *which,
            stream,
        )

    return at_once


@lru_cache(maxsize=1)
def _memcpy_2d() -> Callable[..., int]:
    """Return cudaMemcpy2DAsync: target, its pitch, source, its pitch, width, rows, kind, stream."""
    size = ctypes.c_size_t
    return cuda_function(
        "cudaMemcpy2DAsync",
        ctypes.c_void_p,
        size,
        ctypes.c_void_p,
        size,
        size,
        size,
        ctypes.c_int,
        ctypes.c_void_p,
    )


def streams_both_ways(device: torch.device) -> tuple[Stream, Stream, Stream]:
    """Return a stream for copies to a device, one for copies from it, and its compute stream."""
    if device.type == "cpu":
        return ThreadStream("copies in"), ThreadStream("copies out"), CallerStream()
    copies = CudaStream(device)
    return (
        copies,
        CudaStream(device, clock=copies.clock),
        CudaStream(device, current=True, clock=copies.clock),
    )
