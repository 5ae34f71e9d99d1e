"""Transfers: whole KV blocks between tiers, the worker's side.

A block goes DOWN from its page to host memory, and OUT from there to the disk. When a later request has its
prefix, it comes IN to host memory, and UP to a page. The scheduler decides (`sched.tiers`). What a plan's
Transfer says is begun at once (`Transfers.begin`), and reported when it has landed (`Transfers.landed`).

Why this is safe. All is called by the thread that computes. Nothing else uses the pages and host blocks that
a transfer names until it is reported: the scheduler holds them. What is left to order are streams and
threads. 1. UP fills pages when what computed before has read them: `up` waits for a mark on compute. 2. UP
and OUT read host blocks that have landed: those that came by a transfer have been reported; those that a long
request has written stand behind `landed`, for which `up`, or the thread that writes, waits. 3. DOWN reads
pages when they have been written: `down` waits for a mark on compute. 4. DOWN and IN fill host blocks when
nothing reads or writes them any more: tiles of earlier steps were read behind copies for which compute has
waited, so a mark on compute is behind these too; and what a long request had sent there, before it ended,
stands behind `landed`. `down`, or the thread that reads, waits for both. 5. What comes UP is read by kernels
that are queued after it was reported, so after its ticket was done.

A transfer is noted before anything of it is queued. When a step was broken off, `settle` waits for all that
may have been begun.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.pool import KVPool
from penstock.kv.store.blocks import BlockStore
from penstock.memory.streams import Stream, Ticket, joined
from penstock.memory.tasks import Task, wait
from penstock.step.plan import Landed, Route, Transfer, TransferId

_LOG = logging.getLogger("penstock")
_NAP = 2e-4
"""Seconds between two looks at what is under way."""


@dataclass(slots=True)
class _InFlight:
    """An _InFlight is a transfer under way.

    first, last: tickets before and behind its copies.
    tasks: tasks of the store, one for each block.
    """

    transfer: Transfer
    begun: float
    first: Ticket | None = None
    last: Ticket | None = None
    tasks: list[Task] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return all(task.done for task in self.tasks) and (self.last is None or self.last.done)

    def report(self, store: BlockStore | None) -> Landed:
        if self.first is not None and self.last is not None:
            return Landed(self.transfer.id, self.last.when() - self.first.when())
        ended = max((task.when() for task in self.tasks), default=self.begun)
        # A transfer may not have begun everything if its step was broken off.
        keys = self.transfer.keys
        lost = tuple(
            index
            for index in range(len(keys))
            if index >= len(self.tasks) or self.tasks[index].fault is not None
        )
        missing = (
            store.missing(keys[index] for index in lost)
            if store is not None and self.transfer.route is Route.IN
            else ()
        )
        return Landed(self.transfer.id, max(ended - self.begun, 0.0), lost, tuple(missing))


class Transfers:
    """Transfers moves blocks between one device's pages, the host's blocks and, if there is one, a store."""

    def __init__(
        self, host: HostPool, up: Stream, down: Stream, compute: Stream, store: BlockStore | None = None
    ) -> None:
        """Take over the streams `up` and `down`, and the store."""
        self._host, self._up, self._down, self._compute, self.store = host, up, down, compute, store
        self._going: dict[TransferId, _InFlight] = {}

    @property
    def moving(self) -> bool:
        """Tell whether a transfer is under way."""
        return bool(self._going)

    def begin(
        self,
        transfers: Sequence[Transfer],
        forget: Sequence[bytes],
        pages: KVPool,
        landed: Callable[[], Ticket],
    ) -> None:
        """Begin a plan's transfers.

        forget: keys that the store drops.
        landed: makes a ticket behind all that was sent to host blocks by other ways.
        """
        if self.store is not None:
            self.store.poll()
            if forget:
                self.store.forget(forget)
        for transfer in transfers:
            going = _InFlight(transfer, time.perf_counter())
            self._going[transfer.id] = going
            if transfer.route in (Route.UP, Route.DOWN):
                self._copy(going, pages, landed)
            else:
                self._hand_over(going, landed)

    def landed(self) -> tuple[Landed, ...]:
        """Return reports of what has landed since the last call."""
        if self.store is not None:
            self.store.poll()
        done = [going for going in self._going.values() if going.done]
        reports = tuple(going.report(self.store) for going in done)
        for going in done:
            del self._going[going.transfer.id]
        return reports

    def wait(self, seconds: float) -> None:
        """Wait until something has landed, or for so long."""
        until = time.perf_counter() + seconds
        while (
            self._going
            and not any(going.done for going in self._going.values())
            and time.perf_counter() < until
        ):
            time.sleep(_NAP)

    def settle(self) -> tuple[Landed, ...]:
        """Wait for all that is under way, and report it. What has not begun on disk never will."""
        for going in self._going.values():
            if self.store is not None:
                self.store.call_off(going.tasks)
            wait(going.tasks)
        self._up.mark().wait()
        self._down.mark().wait()
        if self.store is not None:
            self.store.poll()
        reports = tuple(going.report(self.store) for going in self._going.values())
        self._going.clear()
        return reports

    def close(self) -> None:
        """Finish what is under way, and end streams and threads.

        Call it again if it was interrupted; else that does nothing.
        """
        if self.store is not None:
            self.store.close()
        self._up.close()
        self._down.close()
        self._going.clear()

    def _copy(self, going: _InFlight, pages: KVPool, landed: Callable[[], Ticket]) -> None:
        transfer, size = going.transfer, pages.layout.block_bytes
        device, host = (pages.bytes, transfer.pages), (self._host.bytes, transfer.blocks)
        is_up = transfer.route is Route.UP
        (target, to), (source, of) = (device, host) if is_up else (host, device)
        pieces = np.array((to, of, [1] * len(to)), dtype=np.int64).T * size
        stream = self._up if is_up else self._down
        stream.wait(self._compute.mark())
        stream.wait(landed())
        going.first = stream.mark()
        stream.copy_pieces(target, source, joined(pieces))
        going.last = stream.mark()

    def _hand_over(self, going: _InFlight, landed: Callable[[], Ticket]) -> None:
        store, transfer = self.store, going.transfer
        assert store is not None, "a transfer to or from a disk that is not there"
        is_in = transfer.route is Route.IN
        if is_in:
            store.touch(transfer.keys)
        behind = (landed(), self._compute.mark()) if is_in else (landed(),)

        def ready() -> None:
            for ticket in behind:
                ticket.wait()

        for index, (key, block) in enumerate(zip(transfer.keys, transfer.blocks, strict=True)):
            task = (store.read if is_in else store.write)(
                key, self._host.block(block).numpy(), ready, going.tasks
            )
            if len(going.tasks) == index:  # Refused at once, and so not noted.
                going.tasks.append(task)
