"""Keeps a ring on DEVICE filled ahead of the arithmetic: threads read DISK into slots on HOST, one stream
copies to the ring.

`ring` has computed what passes through the rings, where, and what must be waited for; here it happens. A
*visit* is a run's turn in a pass, counted on from pass to pass. No one decides when to fetch: the rings alone
hold work back, and it goes on across the end of a pass into the next.

Why this is safe. All state below is read and written under one lock, and only by: the thread that computes
(`take`, `release`), and the threads that read. Whichever of them makes a copy possible queues it, in the
order of the visits, on the one copy stream. Each byte is protected five times:
1. The arithmetic of a visit starts after its copy: `take` returns once the copies are queued and makes the
   compute stream wait for the mark behind the last of them.
2. A copy overwrites a run of the ring only when that run's last user is done: not queued before the user's
   `release`, and behind the mark that the release left on the compute stream. Which users: RingLayout's
   waits, and each of these is needed.
3. A copy from a slot is queued only when the slot's piece has landed.
4. A slot is read into only when every copy out of it has been made: the reader waits for the mark behind the
   last.
5. Pieces are claimed and copied in one order, so what a copy needs was claimed before whatever waits for that
   copy: there are no circles of waits. When nothing is late, only the streams wait for each other.
Visits that are not taken (a pass was broken off) count as released; what of them has not been moved yet stays
where it is, but its waits are kept, since those of later copies build on them.

Feeders that read nothing from DISK may share a ring, each with an order of its own. Such a feeder copies only
when the thread that computes takes and releases, so those that are not taken from do nothing. The one whose
turn comes begins anew, with the first run of its order, and its first copy is behind a mark on the compute
stream: so who used what another one brought is done. Copies of others that are under way are in front of it
on the same copy stream.

An interrupt can strike the thread that computes between any two instructions, so progress is committed by
single assignments (`_place`, `_cursor`, `_released`), after everything that they promise. What is done again
for being interrupted before them does no harm.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor

from penstock.memory.streams import HostTicket, Stream, Ticket
from penstock.weights.streaming.waits import StreamWaits

READERS = 8
"""Threads that read, each one piece at a time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece is read from DISK into slot `slot` of the host ring, at once. `read` fills the tensor; `check`
    asks it to make sure that they are the right bytes."""

    name: str
    slot: int
    into: Tensor
    read: Callable[[Tensor, bool], None]


@dataclass(frozen=True, slots=True)
class RingCopy:
    """Bytes of a run are copied at once, when `wait`, another run, is done with and `piece` has landed."""

    target: Tensor
    source: Tensor
    wait: int | None
    piece: int | None
    empties: bool
    """True if nothing of the piece is left to be copied then."""


class Feeder:
    """Moves all that streams through a ring on DEVICE, pass after pass."""

    def __init__(
        self,
        runs: Sequence[str],
        segments: Sequence[Sequence[RingCopy]],
        pieces: Sequence[Piece],
        copies: Stream,
        compute: Stream,
        waits: StreamWaits,
        device: torch.device,
        *,
        begins: bool = True,
    ) -> None:
        """Start to fill the ring, unless that is left for `go_on`. runs: the names of what passes through the
        ring in a pass, in order; segments: for each run, how it is brought there."""
        self._runs, self._segments, self._pieces = runs, segments, pieces
        self._copies, self._compute, self._waits = copies, compute, waits
        self._lock = threading.RLock()
        self._change = threading.Condition(self._lock)
        self._fault: BaseException | None = None
        self._closed = False
        # The arithmetic's place.
        self._cursor = 0
        """The visit that is taken next; the one before it, if it has not been released, is being used."""
        self._released = 0
        self._done: list[Ticket | None] = [None] * len(runs)
        self._place = (0, 0)
        """The copy stream's: so many visits are queued whole, and so many segments of the next."""
        self._last: Ticket | None = None
        """Behind the last copies that were queued."""
        self._ready: list[Ticket | None] = [None] * len(runs)
        self._news: HostTicket | None = None
        """What the arithmetic waits for when the disk is late: whatever a reader has done next."""
        # The readers' place.
        self._claimed = 0
        """Pieces handed to readers, counted on through all passes."""
        self._landed = [-1] * len(pieces)
        """By piece: the last pass it has landed in."""
        slots = 1 + max((piece.slot for piece in pieces), default=-1)
        self._owner = [-1] * slots
        """By slot: the piece it was last claimed for, counted on."""
        self._empty: list[Ticket | None] = [None] * slots
        """By slot: behind the last copy out of it."""
        self._sound = [False] * len(pieces)
        """By piece: whether it has been checked."""
        self._end = [(0, 0)] * len(pieces)
        """By piece: the run, and the segment of it, whose copy is the last out of it."""
        for run, own in enumerate(segments):
            for index, segment in enumerate(own):
                if segment.empties and segment.piece is not None:
                    self._end[segment.piece] = run, index
        # Counts.
        self.copied_bytes = self.read_bytes = 0
        self.disk_late = 0.0
        """Seconds for which the copy stream had nothing to do because a piece had not landed."""
        self._late_since: float | None = None
        self._threads = [
            threading.Thread(
                target=self._serve, args=(device, lane), name=f"penstock reader {lane}", daemon=True
            )
            for lane in range(min(READERS, slots))
        ]
        if begins:
            with self._lock:
                self._advance()
        for thread in self._threads:
            thread.start()

    # ---- the thread that computes

    def go_on(self) -> None:
        """Fill the ring from the first run on, behind all that the compute stream was given until now.

        Another feeder may have had the ring. What is in use is given up.
        """
        assert not self._pieces, "what reads from disk has a ring of its own"
        with self._lock:
            count, queued = len(self._runs), self._place[0] + (self._place[1] > 0)
            begin = -(-max(self._cursor, self._released, queued) // count) * count
            self._copies.wait(self._compute.mark())
            self._pass_over(begin)
            self._advance()

    def take(self, run: int) -> None:
        """Let what the compute stream does from now on find the run in the ring, until it is released. Raises
        what a reader has met."""
        count = len(self._runs)
        with self._lock:
            # An interrupt may have come when visits were passed over, but before the cursor was set behind
            # them.
            first = max(self._cursor, self._released)
            self._pass_over(first + (run - first) % count)
            visit = self._cursor
            taken = self._compute.mark()
            self._advance()
            self._change.notify_all()
        while (news := self._queued(visit)) is not None:
            news.wait()
        ready = self._ready[run]
        assert ready is not None
        self._compute.wait(ready)
        begun = self._compute.mark()
        self._waits.begin(self._runs[run], taken, begun)
        with self._lock:
            self._cursor = visit + 1

    def _queued(self, visit: int) -> Ticket | None:
        """Return None when a visit's copies are queued, before that a ticket that is reached with the next
        news. Raises what a reader has met."""
        with self._lock:
            if self._fault is not None:
                raise self._fault
            assert not self._closed, "take after close"
            if self._place[0] > visit:
                return None
            self._news = HostTicket()
            return self._news

    def _tell(self) -> None:
        """Wake whoever waits for what may have happened."""
        self._change.notify_all()
        news, self._news = self._news, None
        if news is not None:
            news.reach()

    def release(self, run: int) -> None:
        """Note that the arithmetic that was queued until now was the last to need the run."""
        with self._lock:
            assert self._cursor % len(self._runs) == (run + 1) % len(self._runs), (
                "release of a run that is not the one in use"
            )
            self._release_to(self._cursor)

    def _pass_over(self, visit: int) -> None:
        """Give up what is in use, if a pass was broken off, and the visits before `visit`."""
        self._release_to(visit)
        self._cursor = visit

    def _release_to(self, end: int) -> None:
        if self._released >= end:
            return
        mark = self._compute.mark()
        for visit in range(max(self._released, end - len(self._runs)), end):
            self._done[visit % len(self._runs)] = mark
        self._waits.end(mark)
        self._released = end
        if self._advance():
            self._change.notify_all()

    def queued_for(self, run: int) -> Ticket | None:
        """Return a ticket behind the copies of the run's next visit. Where these are not queued yet, it is
        behind the last run that is: that is needed sooner. None if nothing is queued."""
        with self._lock:
            first = max(self._cursor, self._released)
            visit = first + (run - first) % len(self._runs)
            return self._ready[run] if self._place[0] > visit else self._last

    # ---- whoever makes a copy possible

    def _advance(self) -> bool:
        """Queue every copy that is now possible. Return whether someone may have waited for it."""
        count, news = len(self._runs), False
        while not self._closed:
            visit, index = self._place
            run, turn = visit % count, visit // count
            segment = self._segments[run][index]
            if segment.wait is not None:
                user = turn * count + segment.wait - (0 if segment.wait < run else count)
                if user >= self._released:
                    return news
            if segment.piece is not None and self._landed[segment.piece] < turn:
                self._late_since = self._late_since or perf_counter()
                return news
            if segment.wait is not None and user >= 0:
                done = self._done[segment.wait]
                assert done is not None
                self._copies.wait(done)
            self._note_late()
            if visit >= self._released:
                began = self._copies.mark() if self._waits.trace else None
                self._copies.copy(segment.target, segment.source)
                self.copied_bytes += len(segment.source)
                if began:
                    self._waits.copied(self._runs[run], len(segment.source), began, self._copies.mark())
            whole = index + 1 == len(self._segments[run])
            if whole or segment.empties:
                self._last = self._copies.mark()
                news = True
            if segment.empties and segment.piece is not None:
                self._empty[self._pieces[segment.piece].slot] = self._last
            if whole:
                self._ready[run] = self._last
            self._place = (visit + 1, 0) if whole else (visit, index + 1)
        return news

    def _note_late(self) -> None:
        """Count the time for which the copy stream had nothing to do because a piece had not landed."""
        if self._late_since is None:
            return
        if self._last is None or self._last.done:
            self.disk_late += perf_counter() - max(self._late_since, self._last.when() if self._last else 0.0)
        self._late_since = None

    # ---- the threads that read

    def _serve(self, device: torch.device, lane: int) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while (claimed := self._claim()) is not None:
            number, wanted, empty = claimed
            index, turn = number % len(self._pieces), number // len(self._pieces)
            piece = self._pieces[index]
            try:
                if empty is not None:
                    empty.wait()
                if wanted:
                    began = perf_counter()
                    piece.read(piece.into, not self._sound[index])
                    self._sound[index] = True
                    if self._waits.trace is not None:
                        self._waits.trace.span(
                            f"disk read {lane + 1}", piece.name, began, perf_counter(), bytes=len(piece.into)
                        )
            except BaseException as fault:
                self._fail(fault)
                return
            with self._lock:
                self.read_bytes += len(piece.into) if wanted else 0
                self._landed[index] = turn
                try:
                    self._advance()
                except BaseException as fault:
                    self._fault = fault
                self._tell()

    def _claim(self) -> tuple[int, bool, Ticket | None] | None:
        """Return the next piece to read, counted on, whether anybody still wants it, and what its slot must
        be waited for; None: the end."""
        with self._lock:
            while not self._closed and self._fault is None:
                number = self._claimed
                index, turn = number % len(self._pieces), number // len(self._pieces)
                slot = self._pieces[index].slot
                owner = self._owner[slot]
                if owner < 0 or self._after(owner) <= self._place:
                    self._claimed, self._owner[slot] = number + 1, number
                    return (
                        number,
                        turn * len(self._runs) + self._end[index][0] >= self._released,
                        self._empty[slot],
                    )
                self._change.wait()
            return None

    def _after(self, number: int) -> tuple[int, int]:
        """Return the copy stream's place behind the last copy of a piece, counted on."""
        run, index = self._end[number % len(self._pieces)]
        visit = number // len(self._pieces) * len(self._runs) + run
        return (visit + 1, 0) if index + 1 == len(self._segments[run]) else (visit, index + 1)

    def _fail(self, fault: BaseException) -> None:
        with self._lock:
            self._fault = self._fault or fault
            self._tell()

    def close(self) -> None:
        """End the threads and wait for what they and the streams are doing. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._tell()
        for thread in self._threads:
            thread.join()


def spans(size: int, cuts: "Sequence[int] | Mapping[int, int]") -> list[tuple[int, int]]:
    """Return the parts between `cuts`, those of them that lie within `size` bytes."""
    bounds = sorted({0, size, *(cut for cut in cuts if 0 < cut < size)})
    return list(pairwise(bounds))
