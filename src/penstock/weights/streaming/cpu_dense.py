"""Has the CPU compute feed-forwards where they rest in host memory, in passes of few rows, while other groups
come through the link.

A feed-forward is computed as an expert is that every row takes (`cpu_experts`): the device writes its rows to
a box, a thread of the CPU computes, the device waits and reads the outputs. Norms of these groups, which the
device computes, have copies there.

Why this is safe. What `cpu_experts` says holds, since one group is asked for at a time: `compute` queues the
question and the wait for the answer, so nothing else is asked in between. Where an interrupt comes between
the two, the next call queues the wait first. The service reads groups that rest on HOST, which nothing writes
to after loading.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from penstock.arch.layout import GroupId
from penstock.arch.spec import SWIGLU
from penstock.memory.streams import Stream
from penstock.ops.handover import StepRows
from penstock.ops.matrix import GroupViews
from penstock.ops.row_classes import MOST_TOKENS
from penstock.ops.slots import ExpertParts
from penstock.weights.streaming.cpu_experts import CpuService
from penstock.weights.streaming.residency import CpuPass, CpuWork

_BY_DEVICE = ("norm", "norm_after")
"""Vectors of a feed-forward that the device reads."""


class CpuFeedForwards(CpuService):
    """Lends feed-forwards that the CPU computes."""

    what = "feed-forwards"

    def __init__(
        self,
        of: CpuPass,
        groups: Mapping[GroupId, GroupViews],
        device: torch.device,
        compute: Stream,
        threads: int = 0,
    ) -> None:
        """Begin to serve. groups: in host memory, in the order of a pass; they may be loaded later. Raises as
        CpuService does."""
        work = CpuWork((SWIGLU,) * len(groups), 1, of.hidden, of.dtype, of.always)
        super().__init__(work, tuple(groups.values()), 1, 0, device, compute, threads)
        self._groups = groups
        self.bytes = sum(
            part.nbytes
            for group in groups.values()
            for matrix in group.matrices.values()
            for part in matrix.parts.values()
        )
        """Bytes of all matrices."""
        # Of one expert, which every row takes, and which is not on the device.
        self._order = torch.arange(MOST_TOKENS, dtype=torch.int32, device=device)
        self._rows = torch.arange(1, MOST_TOKENS + 1, dtype=torch.int32, device=device)
        self._parts = ExpertParts(
            coming=torch.zeros(2, 1, dtype=torch.int64, device=device),
            starts=torch.tensor([0, 0, -1, 1], device=device),
            tables=torch.zeros(1, 1, 2, dtype=torch.int64, device=device),
            done=torch.zeros(1, dtype=torch.int32, device=device),
        )
        self._asking = False
        """Whether something may have been asked for that has not been waited for."""

    def views(self) -> dict[GroupId, GroupViews]:
        """Return what is lent of each group, after loading: norms on the device, and what computes it. An
        order takes from it the groups that the CPU computes there."""
        return {
            id: GroupViews(
                {},
                {name: host.vectors[name].to(self._device) for name in _BY_DEVICE if name in host.vectors},
                (),
                partial(self.compute, number),
            )
            for number, (id, host) in enumerate(self._groups.items())
        }

    def compute(self, number: int, x: Tensor) -> Tensor:
        """Return the outputs of a group, by its number, for rows x `[tokens, hidden]`."""
        if self._asking:
            self.settle(self._parts)
        tokens = len(x)
        rows = StepRows(x, self._order[:tokens], torch.empty_like(x))
        self._asking = True
        self.give(rows, self._rows[tokens - 1 : tokens], number, self._parts)
        self.take(rows, self._parts)
        self._asking = False
        return rows.y
