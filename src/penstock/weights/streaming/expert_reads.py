"""Reads experts from DISK into slots of the ring on HOST: those that were asked for, and then, while the disk
would idle, those that are foretold of the next layer.

An expert is read in pieces, in the order in which experts will be used, so the first is there long before the
last, and is computed meanwhile. Foretold ones are read by threads of their own, few and behind all pieces of
what was asked for. When the next layer asks, those that were right are gone on with by all threads, and of
the others no more piece begins. So a wrong one delays the right ones by what is in flight, at most.

Why this is safe. The thread that computes does all bookkeeping. A slot is free or of one `Reading`, which is
noted with its pieces before they are put. A piece writes to its slot only behind the copy out of it (`empty`)
and behind all pieces of wrong ones that were begun there: these stay noted (`_left`) until they are over.
What waits was put after what it waits for. Pieces that are foretold wait for those that were asked for before
them, on their own threads; pieces that were asked for wait for wrong ones, which have been begun or called
off by then, and for nothing else that a thread has to do. An interrupt leaves slots to be found again, when
all that was noted is over or called off (`mend`).
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

from torch import Tensor

from penstock.arch.layout import GroupId, GroupLayout
from penstock.base.meter import ExpertCounts
from penstock.base.trace import Trace
from penstock.memory.streams import Ticket
from penstock.memory.tasks import Task, Workers, wait
from penstock.weights.pieces import PIECE_BYTES
from penstock.weights.streaming.residency import padded
from penstock.weights.streaming.source import WeightSource

READERS = 8
AHEAD_READERS = 2
"""Threads that read what is foretold: so many pieces of wrong ones may be in flight."""
READ_BYTES, AHEAD_BYTES = 2 << 20, 1 << 20
"""Bytes of a piece that was asked for, and of one that is foretold; PIECE_BYTES where pieces are checked."""
_LATELY = 64
"""Foretold experts after which older ones count half."""
_DOUBT = 8
"""Layers stop to foretell when so many more were wrong than right."""
_TRIAL = 64
"""Layers of which one foretells where that does not pay, to see whether it would."""


@dataclass(slots=True)
class Reading:
    """An expert that is read, or has been, into a slot on HOST."""

    slot: int
    tasks: Sequence[Task] = ()
    begun: list[int] = field(default_factory=list)
    """The starts of pieces that have begun."""
    wanted: bool = True
    """False: no piece begins any more."""


class BusyTime:
    """Adds up how long at least one of several threads did something, and how many bytes they moved."""

    def __init__(self) -> None:
        self._lock, self._inside, self._since = threading.Lock(), 0, 0.0
        self._seconds, self._bytes = 0.0, 0

    def begin(self) -> None:
        """Note that a thread begins."""
        with self._lock:
            if self._inside == 0:
                self._since = perf_counter()
            self._inside += 1

    def end(self, size: int) -> None:
        """Note that a thread has moved so many bytes."""
        with self._lock:
            self._inside -= 1
            self._bytes += size
            if self._inside == 0:
                self._seconds += perf_counter() - self._since

    def total(self) -> tuple[int, float]:
        """Return the bytes that have been moved, and the seconds until now."""
        with self._lock:
            running = perf_counter() - self._since if self._inside else 0.0
            return self._bytes, self._seconds + running


class ExpertReads:
    """Reads experts of one layer after another. One thread calls everything."""

    def __init__(
        self,
        layouts: Iterable[GroupLayout],
        host: Tensor,
        ring: int,
        empty: Sequence[Ticket | None],
        source: WeightSource,
        trace: Trace | None,
    ) -> None:
        """Start the threads; `mend` gives the slots. ring: how many there are.

        host: uint8 `[slots, size]`. empty: of each slot the mark behind the last copy out of it or into it,
        as of when a read begins to be due.
        """
        self._layouts = {layout.id: layout for layout in layouts}
        self._host, self._empty, self._source, self._trace = host, empty, source, trace
        self.ring: deque[int] = deque()
        """Free slots."""
        self._kept = max(ring // 2, 1)
        """Slots that are not read ahead into, so that those that are asked for find one in their order."""
        self._under_way: dict[GroupId, Reading] = {}
        self._left: dict[int, list[Task]] = {}
        """By slots: pieces of experts that were foretold and not asked for, until they are over."""
        self._unread: deque[GroupId] = deque()
        self._told: deque[GroupId] = deque()
        self.checked: set[GroupId] = set()
        """Experts of which all pieces have been read and checked once."""
        self.foretold = self.right = 0
        """Experts that were begun to be read ahead, and those of them that were then asked for."""
        self._busy = BusyTime()
        """When the disk was read, and how much, wrong ones included."""
        self._lately = self._right_lately = self._layers = 0
        self._readers = Workers(READERS, "expert reader")
        self._ahead = Workers(AHEAD_READERS, "expert reader ahead")

    def expect(self, experts: Sequence[GroupId]) -> None:
        """Begin to read these, of one layer, in the order in which they will be used. What was foretold and
        is not among them is called off."""
        asked = frozenset(experts)
        self._told.clear()
        for id, reading in list(self._under_way.items()):
            self._judge(bool(reading.begun), id in asked)
            if id in asked:
                for task in reading.tasks:
                    if not task.done:
                        self._readers.put(task)
                continue
            reading.wanted = False
            left = self._left.get(reading.slot, [])
            self._left[reading.slot] = [task for task in (*left, *reading.tasks) if not task.done]
            self._readers.call_off(reading.tasks)
            del self._under_way[id]
            self.ring.append(reading.slot)
        self._unread.extend(id for id in experts if id not in self._under_way)
        self.begin()

    def worthwhile(self) -> bool:
        """Tell whether a layer should foretell: whether about half of what was foretold lately was right, or
        more; and now and then anyway."""
        self._layers += 1
        return 2 * self._right_lately + _DOUBT >= self._lately or self._layers % _TRIAL == 0

    def foretell(self, experts: Sequence[GroupId]) -> None:
        """Begin to read these, of the next layer, the likeliest first, behind all that was asked for."""
        self._told = deque(id for id in experts if id not in self._under_way)
        self.begin()

    def begin(self) -> None:
        """Begin what there are slots for."""
        while self._unread and self.ring:
            self._start(self._unread[0], (), self._readers)
            self._unread.popleft()
        if self._unread or not self._told:
            return
        before = [task for reading in self._under_way.values() for task in reading.tasks]
        while self._told and len(self.ring) > self._kept:
            self._start(self._told.popleft(), before, self._ahead)

    def of(self, id: GroupId) -> Reading | None:
        """Return how an expert is read; None if it has no slot yet."""
        return self._under_way.get(id)

    def ready(self, id: GroupId) -> bool:
        """Tell whether all of an expert has been read, or could not be."""
        reading = self._under_way.get(id)
        return reading is not None and all(task.done for task in reading.tasks)

    def end(self, id: GroupId, free: int) -> None:
        """Note that an expert has been used, and that a slot is free: the one in which it came, or that of
        whom it has replaced on HOST."""
        del self._under_way[id]
        self.ring.append(free)

    def mend(self, free: Iterable[int]) -> None:
        """Call off everything, wait for what has begun, and take these slots for free."""
        every = [*self._left.values(), *(reading.tasks for reading in self._under_way.values())]
        for reading in self._under_way.values():
            reading.wanted = False
        for tasks in every:
            self._readers.call_off(tasks)
        for tasks in every:
            wait(tasks)
        self._unread.clear()
        self._told.clear()
        self._under_way.clear()
        self._left.clear()
        self.ring = deque(free)

    def counted(self, counts: ExpertCounts) -> ExpertCounts:
        """Return these counts with what was foretold, and what the disk has given."""
        moved, seconds = self._busy.total()
        told = {"foretold": self.foretold, "right": self.right}
        return replace(counts, disk_bytes=moved, disk_seconds=seconds, **told)

    def close(self) -> None:
        """Wait for reads in flight. To be called again if it was interrupted; else that does nothing."""
        self._readers.close()
        self._ahead.close()

    def _start(self, id: GroupId, behind: Sequence[Task], readers: Workers) -> None:
        reading = Reading(self.ring.popleft())
        layout, check = self._layouts[id], id not in self.checked
        into = self._host[reading.slot][: padded(layout)]
        behind = [*behind, *self._left.get(reading.slot, ())]
        step = PIECE_BYTES if check else READ_BYTES if readers is self._readers else AHEAD_BYTES
        empty = self._empty[reading.slot]

        def piece(start: int) -> None:
            wait(behind)
            if empty is not None:
                empty.wait()
            if not reading.wanted:
                return
            reading.begun.append(start)
            began = perf_counter()
            part = into[start : start + step]
            self._busy.begin()
            try:
                self._source.read(layout, start, part, check)
            finally:
                self._busy.end(len(part))
            if self._trace is not None:
                self._trace.span("disk read", str(id), began, perf_counter(), bytes=len(part))

        reading.tasks = [Task(partial(piece, start)) for start in range(0, len(into), step)]
        self._under_way[id] = reading
        for task in reading.tasks:
            readers.put(task)

    def _judge(self, begun: bool, right: bool) -> None:
        self.foretold, self.right = self.foretold + begun, self.right + (begun and right)
        if self._lately >= _LATELY:
            self._lately, self._right_lately = self._lately // 2, self._right_lately // 2
        self._lately, self._right_lately = self._lately + begun, self._right_lately + (begun and right)
