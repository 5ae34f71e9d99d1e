"""Has the CPU compute some of the experts that a device lacks, where they rest in host memory, beside those
that come through the link.

The device gives and takes by kernels (ops/triton/handover.py), a thread of the CPU computes
(ops/native/service.c), and no Python is between them. What is decided here is only of how many missing
experts the CPU takes how many: by what both were seen to take (`CpuShares`), looked at anew every `REVIEW`
passes, in an array of the device that recorded steps read.

Why this is safe. `give` and `take` of all layers, and what changes the shares, are queued on the compute
stream: a layer has its outputs before the next one gives, and a step's shares are of one moment. Measured
times are copied to host memory behind all that counted them, and read when the mark behind the copy is
reached. The service reads experts of `host`, which nothing writes to after loading. It is closed when no step
runs, behind `over`, which lets go whatever still waits on the device; memory that both see is freed after
that.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.arch.layout import GroupLayout
from penstock.base.errors import ConfigError, DeviceError
from penstock.memory.arena import Arena
from penstock.memory.sending import send
from penstock.memory.streams import Stream, Ticket
from penstock.ops.handover import Handover, HandoverBox, StepRows
from penstock.ops.kernels import triton_kernels
from penstock.ops.matrix import GroupViews
from penstock.ops.native.experts import takes
from penstock.ops.native.service import ExpertService
from penstock.ops.row_classes import CLASSES, MOST_TOKENS, class_of
from penstock.ops.slots import ExpertParts
from penstock.weights.streaming.residency import CpuWork, ExpertRoom
from penstock.weights.streaming.shares import CpuShares, Times
from penstock.weights.streaming.views import group_views

REVIEW = 4
"""Passes between two looks at what was measured."""
LIMIT_NS = 10_000_000_000
"""Nanoseconds for which the device waits for the CPU at most."""
LIMIT_LOOKS = 4_000
"""The same where the device has no clock: the interpreter looks every 10 us or so."""


class CpuService:
    """A CpuService has the CPU compute groups where they rest, as kernels of the device ask for them."""

    what = "experts"
    """The groups, for messages."""

    def __init__(
        self,
        work: CpuWork,
        firsts: Sequence[GroupViews],
        experts: int,
        size: int,
        device: torch.device,
        compute: Stream,
        threads: int = 0,
    ) -> None:
        """Begin to serve. firsts: the first expert of each layer, in host memory; the others of the layer lie
        behind it, `size` bytes each. threads: that compute; by default one less than torch has, for Python.
        Raises ConfigError for experts that kernels do not take, DeviceError and MemoryError."""
        self._most, rows = min(experts, MOST_TOKENS * work.top_k), MOST_TOKENS * work.top_k
        self._compute, self._device = compute, device
        self._arena = Arena(
            HandoverBox.bytes_of(self._most, rows, work.hidden), torch.device("cpu"), pinned_for=device
        )
        box = HandoverBox(self._arena.bytes, self._most, rows, work.hidden, getattr(torch, work.dtype))

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        word = torch.int32
        self.handover = Handover(
            box,
            asked=zeros(1, dtype=word),
            mine=zeros(1 + rows, dtype=word),
            computed=zeros(),
            begun=zeros(1),
            shares=zeros(CLASSES, experts + 1, dtype=word),
            times=zeros(CLASSES + 1, len(Times), experts + 1, 2),  # The last are of no step that ended.
            limit=LIMIT_NS if device.type == "cuda" else LIMIT_LOOKS,
        )
        if not all(takes(box.x, first) for first in firsts):
            raise ConfigError(
                f"cpu_compute is not off, but {self.what} are not laid out as kernels for a CPU read them; "
                "leave cpu_compute out"
            )
        layers = list(zip(firsts, work.activations, strict=True))
        self.service = ExpertService(
            box, layers, experts, size, threads or max(torch.get_num_threads() - 1, 1)
        )

    def give(self, rows: StepRows, pairs: Tensor, layer: int, parts: ExpertParts) -> None:
        """Queue what asks the CPU for its experts of a layer."""
        kernels = triton_kernels("handover")
        assert kernels is not None, "parts() says whether there are kernels"
        kernels.give(self.handover, rows, pairs, layer, parts)

    def take(self, rows: StepRows, parts: ExpertParts) -> None:
        """Queue the wait for what the CPU was asked for, and what writes its outputs to `rows.y`."""
        kernels = triton_kernels("handover")
        assert kernels is not None, "parts() says whether there are kernels"
        kernels.take(self.handover, rows, parts)

    def settle(self, parts: ExpertParts) -> None:
        """Queue the wait for what may have been asked in a step that was broken off."""
        kernels = triton_kernels("handover")
        assert kernels is not None, "parts() says whether there are kernels"
        kernels.wait(self.handover, parts, self.handover.times[CLASSES])

    @property
    def worked(self) -> float:
        """Return the seconds in which the CPU has computed."""
        return float(self.service.took[..., 1].sum()) / 1e9

    def check(self) -> None:
        """Raise DeviceError if the CPU has not computed what it was asked for: tokens then mean nothing."""
        failed = self.service.failed
        if failed or int(self.handover.box.over[0]):
            why = failed or "it did not answer in time"
            raise DeviceError(
                f"the CPU has not computed its share of {self.what} ({why}); restart penstock, with "
                "cpu_compute=off if it happens again"
            )

    def close(self) -> None:
        """Let go what waits on the device, and end the thread. A second call does nothing."""
        self.handover.box.over.fill_(1)
        self.service.close()

    def free(self) -> None:
        """Free the memory that both sides see, after `close`."""
        self._compute.mark().wait()
        self._arena.close()


class CpuExperts(CpuService):
    """Gives experts to the CPU, and takes their outputs."""

    def __init__(
        self,
        work: CpuWork,
        firsts: Sequence[GroupViews],
        experts: int,
        size: int,
        device: torch.device,
        compute: Stream,
        threads: int = 0,
    ) -> None:
        """Begin to serve, as of CpuService, with shares that are measured."""
        super().__init__(work, firsts, experts, size, device, compute, threads)
        self._shares = [CpuShares(experts, self._most, work.always) for _ in range(CLASSES)]
        self._passes = 0
        self._coming: tuple[Tensor, Ticket] | None = None
        """Times on their way to the host."""
        self._seen = np.zeros(self.handover.times.shape, np.int64), np.zeros_like(self.service.took)
        """Times of device and CPU at the last review."""
        self._send()

    def takes(self, rows: StepRows | None) -> bool:
        """Tell whether the CPU may compute experts of such a step."""
        return rows is not None and len(rows.x) <= MOST_TOKENS

    def shares(self, tokens: int) -> Tensor:
        """Return of so many missing experts how many the CPU takes, int32 `[experts + 1]` on the device, in
        steps of so many tokens: the same tensor for all recorded steps."""
        return self.handover.shares[class_of(tokens)]

    def begin_pass(self) -> None:
        """Note that a pass begins, and now and then correct the shares. The host waits for nothing."""
        self._passes += 1
        if self._coming is not None:
            if self._coming[1].done:
                self._review(self._coming[0])
                self._coming = None
        elif self._passes == REVIEW:  # Until now kernels were compiled and loaded.
            self.handover.times.zero_()
            self._seen[1][:] = self.service.took
        elif self._passes % REVIEW == 0:
            times = self.handover.times
            on_host = torch.empty(times.shape, dtype=times.dtype, pin_memory=times.is_cuda)
            self._coming = on_host.copy_(times, non_blocking=True), self._compute.mark()

    def impose(self, shares: Sequence[int]) -> None:
        """Let the CPU take so many of 0, 1, 2, ... missing experts from now on, whatever is measured."""
        for one in self._shares:
            one.shares = list(shares)
        self._send()

    def known_shares(self, tokens: int) -> Sequence[int]:
        """Return the shares of steps of so many tokens, as the host knows them."""
        return self._shares[class_of(tokens)].shares

    def _review(self, times: Tensor) -> None:
        now, took = times.numpy(), self.service.took.copy()
        before, took_before = self._seen
        for number, one in enumerate(self._shares):
            one.review(now[number] - before[number], took[number] - took_before[number])
        self._seen = now, took
        self._send()

    def _send(self) -> None:
        """Queue a copy of the shares to the device."""
        shares = np.array([one.shares for one in self._shares], np.int32)
        self.handover.shares.copy_(send(shares, self._device))


def cpu_experts(
    room: ExpertRoom, layouts: Sequence[GroupLayout], host: Tensor, device: torch.device, compute: Stream
) -> CpuExperts | None:
    """Return what has the CPU compute some experts, if it may. host: of all of them."""
    if room.cpu is None:
        return None
    experts = room.experts // len(room.cpu.activations)
    firsts = [group_views(layouts[at], host[at]) for at in range(0, room.experts, experts)]
    return CpuExperts(room.cpu, firsts, experts, room.size, device, compute)
