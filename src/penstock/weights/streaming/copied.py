"""Has the copy engine bring the experts that a recorded step of the device asks for.

Kernels that read through the link by themselves reach some 93 % of its rate, the copy engine all of it. Only
the host can queue copies, so a thread of it looks for what the device asks for (ops/native/copier.c) and the
device for what has come (ops/triton/copies.py).

Why this is safe. What is asked for has come before a recorded step ends. While one runs that waits for
copies, nothing else may keep the driver: a thread that launches where the queue is full, or loads a kernel,
holds a lock until the device gets on, and the thread that queues copies waits for that lock. Such a step is
therefore waited for before anything else is launched (`DecodeGraphs.run`), and steps that are not recorded
keep to kernels. Where it happens all the same, the device stops waiting after `LIMIT_NS`, and `check` says so
before tokens are taken for what they are not. All is closed when no step runs, behind `over`, which lets go
whatever still waits on the device; memory that both see is freed after that.
"""

import ctypes
from contextlib import suppress

import torch
from torch import Tensor

from penstock.base.errors import DeviceError
from penstock.memory.arena import Arena
from penstock.memory.streams import Stream
from penstock.ops.copies import CopyBox, CopyRequests
from penstock.ops.kernels import are_noted
from penstock.ops.native.copier import Copier, CopyCalls
from penstock.ops.native.few_bits import library
from penstock.weights.streaming.cpu_experts import LIMIT_LOOKS, LIMIT_NS
from penstock.weights.streaming.residency import ExpertRoom

LEAST_PAIRS = 16
"""Pairs of a token and an expert in a step whose experts the copy engine brings, at least: such a step takes
so long that the host may wait for its end."""


class CopiedExperts:
    """CopiedExperts come by the copy engine as the device asks for them."""

    def __init__(
        self, host: Tensor, memory: Tensor, experts: int, compute: Stream, calls: CopyCalls | None = None
    ) -> None:
        """Begin. host: uint8 `[experts, size]`, of all layers. memory: uint8 `[places, size]`, of the device.
        experts: of a layer. calls: that queue copies, by default those of the device. Raises MemoryError,
        DeviceError."""
        device = memory.device
        self._compute = compute
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if calls is None:
            calls = CopyCalls() if self._stream is None else driver_calls(self._stream.cuda_stream)
        self._arena = Arena(CopyBox.bytes_of(experts), torch.device("cpu"), pinned_for=device)
        self.requests = CopyRequests(
            CopyBox(self._arena.bytes, experts),
            asked=torch.zeros(2, dtype=torch.int32, device=device),
            came=torch.zeros(1, dtype=torch.int32, device=device),
            limit=LIMIT_NS if device.type == "cuda" else LIMIT_LOOKS,
        )
        self.copier = Copier(self.requests, host, memory, calls)
        self.layers = 0
        """Layers that were recorded so."""

    @property
    def now(self) -> bool:
        """Whether what is launched now is recorded, or only noted."""
        return self._stream is None or are_noted() or torch.cuda.is_current_stream_capturing()

    def check(self) -> None:
        """Raise DeviceError if something that was asked for has not come: tokens then mean nothing."""
        failed = self.copier.failed
        if failed or int(self.requests.box.over[0]):
            raise DeviceError(
                f"experts have not come from host memory ({failed or 'not in time'}); restart penstock"
            )

    def close(self) -> None:
        """Let go what waits on the device, and end the thread. A second call does nothing."""
        self.requests.box.over.fill_(1)
        self.copier.close()

    def free(self) -> None:
        """Free the memory that both sides see, after `close`."""
        self._compute.mark().wait()
        self._arena.close()


def copied_experts(
    room: ExpertRoom, layers: int, memory: Tensor, host: Tensor, compute: Stream
) -> CopiedExperts | None:
    """Return what has the copy engine bring experts, on a device that has one; else kernels do."""
    if memory.device.type != "cuda" or library() is None:
        return None
    with suppress(DeviceError):
        return CopiedExperts(host, memory, room.experts // layers, compute)
    return None


def driver_calls(stream: int) -> CopyCalls:
    """Return the driver's functions that queue copies on a stream of the current device. Raises
    DeviceError."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        if driver.cuCtxGetCurrent(ctypes.byref(context)) or not context.value:
            raise DeviceError("the driver knows of no context for copies")
        names = "cuCtxSetCurrent", "cuMemcpyHtoDAsync_v2", "cuStreamWriteValue32_v2"
        calls = [ctypes.cast(getattr(driver, name), ctypes.c_void_p).value or 0 for name in names]
    except (OSError, AttributeError) as fault:
        raise DeviceError(f"the driver cannot be asked for copies: {fault}") from fault
    enter, copy, write = calls
    return CopyCalls(enter, copy, write, context.value, stream)
