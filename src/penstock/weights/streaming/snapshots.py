"""Copies what a device counts of experts to the host, without a wait for the device.

Why this is safe. The thread that computes queues the copies between two steps, on the compute stream: they
are behind all that a step has changed, and before all that the next one changes, so they are of one moment.
Each snapshot has memory of its own, which nothing writes to again. `last` may be called by any thread: it
reads references that are replaced as a whole, and memory only when the mark behind its copies is reached.
`exact` is for when no steps run, or for the thread that computes.
"""

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from penstock.memory.streams import Stream, Ticket
from penstock.weights.streaming.slots import SlotTable

EVERY = 1.0
"""Seconds from one snapshot to the next, at least."""


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """Holds arrays of a SlotTable in host memory, with its names and shapes, as they were at a moment.

    when: the moment, in seconds of perf_counter.
    """

    slot_of: Tensor
    value: Tensor
    used: Tensor
    now: Tensor
    counts: Tensor
    computed: Tensor
    when: float

    def rates(self, decay: float) -> Tensor:
        """Return the share of recent steps that asked for each expert, float64 `[layers, experts]`.

        A step counts less the longer ago it was, as in the worth of an expert, which is the sum of its uses.
        It is divided by what it would be if all steps had asked for the expert.

        decay: what a use of one step ago counts.
        """
        steps = max(int(self.now), 1)
        worth = self.value.double() * decay ** (steps - self.used)
        most = (1 - decay**steps) / (1 - decay) if decay < 1 else steps
        return (worth / most).clamp_(max=1.0)


class SlotSnapshots:
    """Takes snapshots of a slot table while steps run, and knows the newest that has come."""

    def __init__(self, table: SlotTable, compute: Stream) -> None:
        """Take none yet. compute: the stream on which the table changes."""
        self._table, self._compute = table, compute
        self._landed: SlotSnapshot | None = None
        self._coming: tuple[SlotSnapshot, Ticket] | None = None
        self._when = 0.0

    def take(self, now: float) -> None:
        """Queue a snapshot, if the last is EVERY seconds old. The thread that computes calls it after each
        step. now: seconds of perf_counter."""
        if now - self._when < EVERY:
            return
        if self._coming is not None:
            if not self._coming[1].done:
                return  # Steps are long: the next one would not come sooner.
            self._landed = self.last()
        self._when = now
        self._coming = self._copied(now), self._compute.mark()

    def last(self) -> SlotSnapshot | None:
        """Return the newest snapshot that has come, or None if none has. Waits for nothing."""
        coming, landed = self._coming, self._landed
        if coming is not None and coming[1].done and (landed is None or coming[0].when > landed.when):
            return coming[0]
        return landed

    def exact(self) -> SlotSnapshot:
        """Return the arrays as they are behind all that is queued. The host waits for it. `last` then returns
        nothing older: what is counted never seems to become less."""
        found, ticket = self._copied(perf_counter()), self._compute.mark()
        ticket.wait()
        self._landed = found
        return found

    def _copied(self, when: float) -> SlotSnapshot:
        table = self._table
        return SlotSnapshot(
            _queued(table.slot_of),
            _queued(table.value),
            _queued(table.used),
            _queued(table.now),
            _queued(table.counts),
            _queued(table.computed),
            when,
        )


def _queued(array: Tensor) -> Tensor:
    """Queue a copy of an array to new host memory, pinned where it comes from a GPU."""
    on_host = torch.empty(array.shape, dtype=array.dtype, pin_memory=array.is_cuda)
    return on_host.copy_(array, non_blocking=True)
