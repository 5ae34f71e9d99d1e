"""Staging: pinned slots between the device's streams and a DiskPool.

KV of a long request that does not fit into host memory goes to the disk by way of a slot (`WriteBehind`), and
comes back by way of one before the tile that needs it (`ReadAhead`).

Why this is safe. All is called by the thread that computes; tasks on the pool's threads touch nothing but
their slot.
1. A slot is read into when what it held has been copied: the tasks wait for the mark behind the last copy out
   of it, and for whatever an earlier step still reads into it. Tasks that have not begun are called off with
   their step.
2. A slot is copied from when all its tasks are done: `wait` before the copy is queued.
3. A slot is written to disk when it is full: the tasks wait for the mark behind the copies into it.
4. A slot is filled anew when it has been written: `claim` waits, and with it the host, which is how a slow
   disk holds a prompt back.

Tasks are noted before they are put, and a slot is marked as used before it is: an interrupt leaves nothing
under way that is not waited for. What it has kept from being put is called off before it is waited for: a
step's reads by the next `begin`, a write by the next `claim`. Thus what a task waits for has been put before
it, as `memory.tasks` demands.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.kv.movement.rows import Run
from penstock.kv.store.diskpool import DiskPool, Rows
from penstock.memory.arena import pinned_if_possible
from penstock.memory.streams import Stream, Ticket
from penstock.memory.tasks import Task, wait


class Slots:
    """Slots are pinned memory for records."""

    def __init__(self, disk: DiskPool, slots: int, rows: int, device: torch.device) -> None:
        """Make `slots` of `rows` records each. Raises DeviceError if the host has not as much memory."""
        self._arena = pinned_if_possible(slots * rows * disk.record, device)
        self.bytes: list[Tensor] = list(self._arena.bytes.view(slots, rows, disk.record))
        """Each uint8 `[rows, record]`."""
        self.rows: list[Rows] = [slot.numpy() for slot in self.bytes]

    def close(self) -> None:
        """Unpin. No copy may be in flight. A second call does nothing."""
        self._arena.close()


@dataclass(slots=True)
class _Reading:
    """A _Reading is what a step wants of the disk, in order: layers, and runs of blocks.

    first: the slot of the first.
    asked, copied: how many have their reads put, and the copies out of their slots queued.
    """

    first: int
    wanted: Sequence[tuple[int, Sequence[Run]]]
    tasks: list[list[Task]] = field(default_factory=list)
    asked: int = 0
    copied: int = 0


class ReadAhead:
    """A ReadAhead reads what a step's tiles have on disk, in the order of use, as far ahead as it has
    slots."""

    def __init__(self, disk: DiskPool, slots: Slots, copies: Stream) -> None:
        self._disk, self._slots, self._copies = disk, slots, copies
        self._tasks: list[list[Task]] = [[] for _ in slots.rows]
        """The tasks that may still read into each slot."""
        self._emptied: list[Ticket | None] = [None] * len(slots.rows)
        """A ticket behind the last copy out of each slot; none while one is being queued."""
        self._step = _Reading(0, ())

    def begin(self, wanted: Sequence[tuple[int, Sequence[Run]]]) -> None:
        """Begin a step, and drop what an earlier one has not used.

        wanted: the layer and the runs of each visit with blocks on disk.
        """
        for tasks in self._tasks:
            self._disk.readers.call_off(tasks)
        self._step = _Reading((self._step.first + self._step.asked) % len(self._tasks), wanted)
        self._ask()

    def there(self, number: int) -> bool:
        """Tell whether the visit has been read, or has failed to be."""
        step = self._step
        return number < step.asked and all(task.done for task in step.tasks[number])

    def wait(self, number: int) -> Tensor:
        """Wait for the next visit, and return its slot, uint8 `[rows, record]`. Raises LostKV."""
        step = self._step
        assert number == step.copied < step.asked, f"wait for {number} after {step.copied} of {step.asked}"
        for task in step.tasks[number]:
            task.result()
        slot = self._slot_of(number)
        self._emptied[slot] = None
        return self._slots.bytes[slot]

    def copied(self, number: int, ready: Ticket) -> None:
        """Note that the copies out of the visit's slot are queued before `ready`."""
        self._emptied[self._slot_of(number)] = ready
        self._step.copied = number + 1
        self._ask()

    def _slot_of(self, number: int) -> int:
        return (self._step.first + number) % len(self._tasks)

    def _ask(self) -> None:
        step = self._step
        while step.asked < min(step.copied + len(self._tasks), len(step.wanted)):
            slot = self._slot_of(step.asked)
            layer, runs = step.wanted[step.asked]
            emptied = self._emptied[slot] or self._copies.mark()
            earlier = [task for task in self._tasks[slot] if not task.done]
            tasks = list(earlier)
            self._tasks[slot] = tasks

            def ready(emptied: Ticket = emptied, earlier: Sequence[Task] = earlier) -> None:
                wait(earlier)
                emptied.wait()

            for at, first, count in runs:
                self._disk.read(layer, first, self._slots.rows[slot][at : at + count], ready, tasks)
            step.tasks[step.asked :] = [tasks[len(earlier) :]]
            step.asked += 1


class WriteBehind:
    """A WriteBehind writes slots to disk when they are full, one after another."""

    def __init__(self, disk: DiskPool, slots: Slots, out: Stream) -> None:
        self._disk, self._slots, self._out = disk, slots, out
        self._tasks: list[list[Task]] = [[] for _ in slots.rows]
        self._next = 0

    def claim(self) -> Tensor:
        """Wait for the next slot, and return it, uint8 `[rows, record]`, for copies on `out`."""
        self._disk.settle()
        wait(self._tasks[self._next])
        return self._slots.bytes[self._next]

    def write(self, parts: Sequence[tuple[int, Run]]) -> None:
        """Write runs of the slot that was claimed last, each of a layer, when what `out` was given is
        done."""
        full, slot = self._out.mark(), self._next
        self._tasks[slot] = []
        for layer, (at, first, count) in parts:
            self._disk.write(
                layer, first, self._slots.rows[slot][at : at + count], full.wait, self._tasks[slot]
            )
        self._next = (slot + 1) % len(self._tasks)
