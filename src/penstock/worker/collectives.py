"""Sums and gathers tensors over the ranks of a model, in every layer.

Few rows are summed by one launch of ours, where GPUs reach each other's memory. All else goes by the group's
library.
"""

import logging
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.arch.shards import Shard, cut
from penstock.arch.spec import ModelSpec
from penstock.base.config import peers_disabled
from penstock.base.errors import DeviceError
from penstock.memory.windows import Window
from penstock.ops.kernels import triton_kernels
from penstock.ops.norm import add_rms_norm

if TYPE_CHECKING:  # Needed by several ranks alone.
    from penstock.parallel.group import Group

_LOG = logging.getLogger("penstock")
_TRIAL = 30_000_000_000
"""Nanoseconds that ranks wait for each other's first sum, which each may have to compile."""


class RankCollectives:
    """Provides the decoder's collectives over ranks.

    They go through the group. Where GPUs reach each other, sums of few rows take one launch, through windows
    (`ops.triton.sums`).
    """

    def __init__(self, group: "Group", spec: ModelSpec, dtype: torch.dtype) -> None:
        self._group, self._hidden, self._dtype = group, spec.hidden_size, dtype
        self.widths = [len(cut(spec.vocab_size, Shard(rank, group.ranks))) for rank in range(group.ranks)]
        """Width of each rank's part of the logits."""
        self.rows = 0
        """Sums of up to so many rows take one launch."""
        self.bytes = 0
        """Bytes of the device that windows take."""
        self._window: Window | None = None

    def open(self) -> None:
        """Open windows, if GPUs reach each other. All ranks call it at once."""
        group = self._group
        kernels = _kernels(group.device) if group.near else None
        if kernels is None or not kernels.suits(self._hidden, self._dtype):
            return
        rows = group.least(kernels.most_rows(group.device))
        size = kernels.window_bytes(group.ranks, rows, self._hidden, self._dtype)
        if not (addresses := self._addresses(size)):
            return
        turns = torch.zeros(rows, dtype=torch.int32, device=group.device)
        where = torch.tensor([group.over.data_ptr(), *addresses], device=group.device)
        self._kernels, self._shared = kernels, kernels.Shared(group.rank, group.ranks, where, turns, _TRIAL)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        group.barrier()
        if self._tried(rows):
            self._shared = replace(self._shared, limit=int(group.limit * 1e9))
            self.rows, self.bytes = rows, size
        else:
            self._use_nccl("what one GPU wrote did not come to another; set NCCL_P2P_DISABLE=1")

    def all_reduce(self, x: Tensor) -> None:
        """Replace `x` `[rows, hidden]`, contiguous, by its sum over all ranks."""
        if 0 < len(x) <= self.rows:
            self._kernels.all_reduce(x, self._shared)
        else:
            self._group.all_reduce(x)

    def all_reduce_few(self, x: Tensor) -> None:
        """Replace `x` `[rows, width]`, contiguous, by its sum over all ranks.

        It goes by the group's library: windows are for rows of one width and dtype.
        """
        self._group.all_reduce(x)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of `x` over all ranks to `residual` in place, and return its norm: all `[rows,
        hidden]`."""
        if 0 < len(x) <= self.rows:
            normed: Tensor = self._kernels.sum_rms_norm(x, residual, weight, eps, self._shared)
            return normed
        self._group.all_reduce(x)
        return add_rms_norm(x, residual, weight, eps)

    def gather(self, x: Tensor) -> Tensor:
        """Return the logits of all ranks side by side, `[rows, vocab]`."""
        return self._group.gather(x, self.widths)

    def close(self) -> None:
        """Close windows when no other rank is left. It waits for none, as freeing would wait for kernels."""
        if self._window is not None:
            self._group.abort()
            self._window.close()

    def _addresses(self, size: int) -> list[int]:
        """Return the addresses of all ranks' windows on this device; none if two GPUs do not reach each
        other."""
        group, addresses, why = self._group, list[int](), ""
        if peers_disabled():
            why = "NCCL_P2P_DISABLE is set"
        else:
            try:
                self._window = Window(group.device, size)
            except DeviceError as fault:
                why = str(fault)
        handles = group.exchange(self._window.handle if self._window else b"")
        if self._window and all(handles):
            try:
                own = self._window
                addresses = [
                    own.address if rank == group.rank else own.see(handle)
                    for rank, handle in enumerate(handles)
                ]
            except DeviceError as fault:
                why = str(fault)
        if group.least(len(addresses)):
            return addresses
        self._use_nccl(why or "another rank cannot")
        return []

    def _tried(self, rows: int) -> bool:
        """Tell whether the largest sum is right on all ranks. The time limit allows for compiling it."""
        group = self._group
        x = torch.arange(rows, device=group.device).remainder(7).to(self._dtype)[:, None].repeat(
            1, self._hidden
        ) * (group.rank + 1)
        want = x.clone()
        group.all_reduce(want)
        self._kernels.all_reduce(x, self._shared)
        right = bool(torch.equal(x, want)) and not int(group.over)
        everywhere = group.least(right) > 0
        group.over.zero_()
        return everywhere

    def _use_nccl(self, why: str) -> None:
        """Do without windows, on all ranks."""
        _LOG.info("all-reduces go by NCCL: %s", why)
        window, self._window = self._window, None
        if window is not None:
            window.look_away()
        self._group.barrier()
        if window is not None:
            window.close()


class Unsummed:
    """Launches the kernels of `RankCollectives` without other ranks, in a pass with meaningless results."""

    def __init__(self, collectives: RankCollectives) -> None:
        self._collectives = collectives

    def all_reduce(self, x: Tensor) -> None:
        """Launch the sum, if it has few enough rows for one launch."""
        if len(x) <= self._collectives.rows:
            self._collectives.all_reduce(x)

    def all_reduce_few(self, x: Tensor) -> None:
        """Leave `x` as it is: the group's library has no kernels to compile."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Launch addition and norm of `[rows, hidden]`, and return a result of that shape."""
        few = len(x) <= self._collectives.rows
        return (self._collectives.add_rms_norm if few else add_rms_norm)(x, residual, weight, eps)

    def gather(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of all ranks' `[rows, width]` side by side."""
        return x.new_empty(len(x), sum(self._collectives.widths))


def _kernels(device: torch.device) -> ModuleType | None:
    return triton_kernels("sums") if device.type == "cuda" else None
