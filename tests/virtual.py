"""A device in virtual time: streams that only note what they are given, and a machine that says when all of
it would be done.

The real feeders, rings and transfers queue here, so what is timed is the order in which they do. The host is
taken to queue at once, ahead of everything.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.memory.streams import Pieces, Ticket


@dataclass
class Mark:
    """A place in a stream's work. `at`: when it is reached, in seconds; none before the machine has run."""

    at: float | None = None
    done = True

    def wait(self) -> None:
        """The host waits for nothing."""

    def when(self) -> float:
        assert self.at is not None
        return self.at


@dataclass
class VirtualStream:
    """Notes copies (bytes), kernels (seconds), waits and marks. lane: the copy engine of its copies; none
    where they are within the device and take no time."""

    lane: str | None
    work: list[Mark | float | tuple[int, str] | list[Ticket]] = field(default_factory=list)
    clock = None

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert len(target) == len(source)
        self._note(len(source))

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        self._note(source.numel())

    def copy_pieces(self, target: Tensor, source: Tensor, pieces: Pieces) -> None:
        for size in pieces[:, 2].tolist():
            self._note(size)

    def run(self, work: Callable[[], object]) -> None:
        """Of work nothing is known; see `kernel`."""

    def kernel(self, seconds: float) -> None:
        self.work.append(seconds)

    def wait(self, ticket: Ticket) -> None:
        self.work.append([ticket])

    def follow(self, other: "VirtualStream") -> None:
        self.wait(other.mark())

    def mark(self) -> Mark:
        self.work.append(mark := Mark())
        return mark

    def close(self) -> None:
        """Nothing is under way."""

    def _note(self, size: int) -> None:
        if self.lane is not None:
            self.work.append((size, self.lane))


@dataclass
class _Head:
    """Where a stream is: its next piece of work, since when it has been free for it, and since when it has
    had copies ready."""

    stream: VirtualStream
    next: int = 0
    free: float = 0.0
    ready: float = 0.0

    def advance(self) -> bool:
        """Do all up to the next copy, or what is not known to be done. Tell whether anything was."""
        began, work = self.next, self.stream.work
        while self.next < len(work):
            one = work[self.next]
            if isinstance(one, tuple):
                break
            if isinstance(one, list):
                (ticket,) = one
                assert isinstance(ticket, Mark)
                if ticket.at is None:
                    break
                if ticket.at > self.free:
                    self.free = self.ready = ticket.at
            elif isinstance(one, Mark):
                one.at = self.free
            else:
                self.free += one
            self.next += 1
        return self.next > began

    def copy(self, lane: str) -> int | None:
        """Return the bytes of the copy that comes next, if it is for this engine."""
        if self.next < len(self.stream.work):
            one = self.stream.work[self.next]
            if isinstance(one, tuple) and one[1] == lane:
                return one[0]
        return None


def elapse(streams: Sequence[VirtualStream], rates: Mapping[str, float]) -> dict[str, float]:
    """Let all that is noted happen, and return for how long each copy engine was busy.

    rates: bytes/s of each engine. It takes the stream that became ready first, to the end of what that has
    ready, as one of an H100 does. Raises AssertionError if streams wait for each other for ever.
    """
    heads = [_Head(stream) for stream in streams]
    engine, busy = dict.fromkeys(rates, 0.0), dict.fromkeys(rates, 0.0)
    while True:
        while any([head.advance() for head in heads]):  # noqa: C419  # Each of them, every time.
            pass
        # Of all engines the copy that begins first: nothing that is not known yet can come before it.
        begins = [
            (max(engine[lane], head.free), lane)
            for lane in rates
            for head in heads
            if head.copy(lane) is not None
        ]
        if not begins:
            stuck = [head.stream for head in heads if head.next < len(head.stream.work)]
            assert not stuck, f"{len(stuck)} streams wait for each other"
            return busy
        now, lane = min(begins)
        ready = [head for head in heads if head.copy(lane) is not None and head.free <= now]
        chosen = min(ready, key=lambda head: head.ready)
        size = chosen.copy(lane)
        assert size is not None
        engine[lane] = chosen.free = now + size / rates[lane]
        busy[lane] += size / rates[lane]
        chosen.next += 1
