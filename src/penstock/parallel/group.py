"""Lets ranks work together: sums and gathers of tensors, and agreement on plain numbers."""

import logging
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    Work,
)

from penstock.base.errors import DeviceError
from penstock.parallel.store import SharedStore

_LOG = logging.getLogger("penstock")
TIMEOUT = 120.0
"""Seconds that a rank waits for the others in a collective.

It is far more than ranks differ by in a layer.
"""
_ENDING = 10.0
"""Seconds that closing waits for the device's collectives to end."""
_EVER = timedelta(days=1000)
_SHORT = 1024
"""Bytes that ranks exchange in one round, the length included."""


class Group:
    """Holds the ranks of one engine. This process is one of them.

    All call the same methods in the same order, each from one thread at a time. A rank that does not come, or
    is gone, raises DeviceError within `timeout` seconds. Tensors on a CUDA device go by NCCL, in the order of
    the device's current stream, without waiting on the host; those on a CPU by gloo. Plain values go by gloo
    on both. On one machine (`near`) all of that stays on its loopback.

    over: int32 `[1]` in host memory that a CUDA device reads and writes. It is for kernels that wait for
        other ranks by themselves: they stop when it is not 0, and write a 1 when they have waited for `limit`
        seconds.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        device: torch.device,
        *,
        near: bool = True,
        timeout: float = TIMEOUT,
        shared: SharedStore | None = None,
    ) -> None:
        """Meet the other ranks, and return when all have come.

        store: by which they find each other.
        shared: the store's owner, which is closed with the group.
        """
        self._shared = shared
        self.rank, self.ranks, self.device, self.near, self.limit = rank, ranks, device, near, timeout
        self._nccl: ProcessGroup | None = None
        """The NCCL backend, until its end begins."""
        self._ending: threading.Thread | None = None
        self._first_to_end = threading.Lock()
        if device.type == "cuda":  # Otherwise pinned memory would create a context on the first device.
            torch.zeros(1, device=device)
        self.over = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        limit = timedelta(seconds=timeout)
        self._sum, self._least, self._every = AllreduceOptions(), AllreduceOptions(), AllgatherOptions()
        self._least.reduceOp = cast(ReduceOp, ReduceOp.MIN)
        self._first = BroadcastOptions()
        # Collectives run on the current stream itself, without a second one and events between.
        self._sum.asyncOp = self._every.asyncOp = self._first.asyncOp = False
        with _LibraryErrors(self, "meeting"):
            named = PrefixStore("gloo", store)
            if near:
                gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                gloo._devices, gloo._timeout = [ProcessGroupGloo.create_device(hostname="127.0.0.1")], limit
                plain = ProcessGroupGloo(named, rank, ranks, gloo)
            else:
                plain = ProcessGroupGloo(named, rank, ranks, limit)
        # The backend itself, which has a group's methods. The process's default group is left to others.
        self._plain: ProcessGroup | None = cast(ProcessGroup, plain)
        self._tensors: ProcessGroup | None = self._plain
        if device.type == "cuda":
            self.barrier()  # Unlike NCCL's meeting, this fails if a rank is gone.
            if near:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            # A late rank is an error that `check` finds, not an abort().
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = limit
            if shared is not None:
                shared.asking = True
            with _LibraryErrors(self, "meeting"):
                nccl = c10d.ProcessGroupNCCL(PrefixStore("nccl", store), rank, ranks, options)
                nccl.eager_connect_single_device(device)
            self._tensors = self._nccl = cast(ProcessGroup, nccl)
            self.all_reduce(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)

    def all_reduce(self, x: Tensor) -> None:
        """Replace `x` by its sum over all ranks, with the same bits on each.

        `x` is contiguous, and of one shape and dtype on all ranks.
        """
        assert x.is_contiguous(), "a sum in place needs a contiguous tensor"
        with _LibraryErrors(self, "a sum"):
            _wait(_open(self._tensors).allreduce([x], self._sum))

    def follow(self, x: Tensor) -> None:
        """Replace `x` by rank 0's tensor, on all ranks.

        `x` is contiguous, and of one shape and dtype on all ranks.
        """
        assert x.is_contiguous(), "a copy in place needs a contiguous tensor"
        with _LibraryErrors(self, "a copy"):
            _wait(_open(self._tensors).broadcast([x], self._first))

    def gather(self, x: Tensor, widths: Sequence[int] | None = None) -> Tensor:
        """Return all ranks' `[..., width]` side by side, in order of rank, on every rank: `[..., sum of
        widths]`.

        Without `widths` the ranks exchange them first, which the host waits for.
        """
        if widths is None:
            widths = [
                int.from_bytes(one, "little") for one in self.exchange(x.shape[-1].to_bytes(8, "little"))
            ]
        assert widths[self.rank] == x.shape[-1], "a width other than was said"
        rows, widest = x.shape[:-1], max(widths)
        mine = x.contiguous()
        if x.shape[-1] < widest:
            mine = x.new_zeros(*rows, widest)
            mine[..., : x.shape[-1]] = x
        every = x.new_empty(self.ranks, *rows, widest)
        with _LibraryErrors(self, "a gather"):
            _wait(_open(self._tensors)._allgather_base(every.view(-1), mine.view(-1), self._every))
        return torch.cat([part[..., :width] for part, width in zip(every, widths, strict=True)], dim=-1)

    def barrier(self) -> None:
        """Wait until all ranks' hosts have come; what their devices have been given may still run."""
        self.least(0)

    def least(self, value: int) -> int:
        """Return the smallest of all ranks' values, of 64 bits."""
        cell = torch.tensor([value])
        with _LibraryErrors(self, "an agreement"):
            _wait(_open(self._plain).allreduce([cell], self._least))
        return int(cell)

    def exchange(self, message: bytes) -> list[bytes]:
        """Return all ranks' messages, in order of rank. Short ones take one round."""
        size, room = len(message), _SHORT
        with _LibraryErrors(self, "an exchange"):
            while True:
                every, own = (
                    torch.empty(self.ranks, room, dtype=torch.uint8),
                    torch.zeros(room, dtype=torch.uint8),
                )
                own[: min(size + 8, room)] = _tensor(size.to_bytes(8, "little") + message)[:room]
                _wait(_open(self._plain)._allgather_base(every.view(-1), own))
                parts = [part.numpy().tobytes() for part in every]
                sizes = [int.from_bytes(part[:8], "little") for part in parts]
                if max(sizes) + 8 <= room:
                    return [part[8 : 8 + one] for part, one in zip(parts, sizes, strict=True)]
                room = max(sizes) + 8

    def broadcast(self, message: bytes | None = None) -> bytes:
        """Return rank 0's message, on all ranks.

        The others wait as long as it takes, or until rank 0 is gone.
        """
        size = torch.tensor([len(message or b"")])
        with _LibraryErrors(self, "a broadcast"):
            _wait(_open(self._plain).broadcast(size, 0, _EVER))
            bytes_ = _tensor(message) if message else torch.empty(int(size), dtype=torch.uint8)
            if len(bytes_):
                _wait(_open(self._plain).broadcast(bytes_, 0))
        return bytes_.numpy().tobytes()

    def check(self) -> None:
        """Raise DeviceError if a collective on the device has failed. Its results are meaningless."""
        if self.over.numpy()[0]:
            raise DeviceError(
                f"an all-reduce of rank {self.rank} is incomplete: one of {self.ranks - 1} others is gone, "
                f"or has not come within {self.limit:g} s; look at the logs of the other ranks, and restart "
                "all"
            )
        if self.device.type == "cuda":
            error = cast(c10d.Backend, _open(self._tensors)).get_error()
            if error.name != "SUCCESS":
                raise DeviceError(
                    f"a collective of rank {self.rank} with {self.ranks - 1} others failed: {error.name}; "
                    "restart all ranks with NCCL_DEBUG=INFO to see why"
                )

    def abort(self) -> None:
        """End all waits for other ranks on the device, from any thread, with meaningless results.

        Waits on the host end when the other ranks are gone.
        """
        self.over.numpy()[0] = 1
        self._end(abort=True)

    def close(self) -> None:
        """End threads and sockets. A second call does nothing."""
        ending = self._end(abort=False)
        self._tensors = self._plain = None
        if ending is not None:
            ending.join(_ENDING)
            if ending.is_alive():
                _LOG.warning("collectives of rank %d do not end; the process ends without them", self.rank)
                return
        if self._shared is not None:
            self._shared.asking = False
            self._shared.close()

    def _end(self, *, abort: bool) -> threading.Thread | None:
        """Return the thread that ends the device's collectives. The first call starts it.

        NCCL ends only when no CUDA graph is left that has recorded any, and the caller may release them
        afterwards.
        """
        with self._first_to_end:
            nccl, self._nccl = self._nccl, None
            if nccl is not None:
                self._ending = threading.Thread(
                    target=nccl.abort if abort else nccl.shutdown, name="penstock NCCL's end", daemon=True
                )
                self._ending.start()
            return self._ending


class _LibraryErrors:
    """Raises errors of the library as ours."""

    def __init__(self, group: Group, what: str) -> None:
        self._group, self._what = group, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        if isinstance(fault, RuntimeError) and not isinstance(fault, torch.OutOfMemoryError):
            why = str(fault).strip().splitlines()
            raise DeviceError(
                f"{self._what} of rank {self._group.rank} with {self._group.ranks - 1} others failed: "
                f"{why[0] if why else fault!r}"
            ) from fault


def _open(backend: ProcessGroup | None) -> ProcessGroup:
    if backend is None:
        raise DeviceError(
            "the ranks are closed, so they compute no more; create a new LLM, or restart the server"
        )
    return backend


def _wait(work: Work | None) -> None:
    try:
        if work is not None:
            work.wait()
    finally:
        del work  # An error's traceback holds this frame, and the work holds sockets.


def _tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
