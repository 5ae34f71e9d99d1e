"""Lets streams share a link: large copies are cut, so that others have their turn between the parts.

A GPU has one engine for the copies of each direction, and no priorities. It takes the stream that became
ready first, and whatever that has ready, to its end. Measured on an H100: a tile of KV (64 MiB, 1.25 ms)
that is needed now begins 26.8 ms late behind a layer's weights (1.4 GB), as one copy or as many of one
stream. A result of a few bytes comes as late behind KV on its way to the host. Behind a prefix that is
loaded (10 GB) all waits 0.2 s.

So what is large is cut into lumps, which take two streams, the lanes, in turn. A lump waits for the one
before, on the other lane. When one ends, the next becomes ready only then, behind whatever has become ready
meanwhile: others wait for a lump, not for all of them. The tile begins 1.3 ms late. This gains nothing
where the link alone says how long a step takes, so weights are cut only in steps of prompts that read
tiles.

Why this is safe. To everybody else the lanes are one stream, the first. The other has work only within a
large copy. The first lump is on the first lane, behind what was queued before. Behind each lump the other
lane is made to wait for it, so the next one comes after it, and what is queued on the first lane afterwards
comes after all of them. An interrupt in the midst of a copy may leave a lump for which the first lane does
not wait yet. That is noted before the first lump (`_apart`); the next call finds it, and the first lane
waits for the other. Lanes wait only for what was queued before, so there is no circle.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.memory.streams import CallerStream, CudaStream, Pieces, Stream, ThreadStream, Ticket

LUMP = 64 << 20
"""Bytes that are copied at a time, in 1.25 ms at 54 GB/s. They cost 1 % of an H100's link, 32 MiB cost 3."""


class LumpStream:
    """A LumpStream is a stream of lanes. Its large copies let copies of other streams come between."""

    def __init__(self, lanes: tuple[Stream, Stream], lump: int = LUMP, *, shared: bool = True) -> None:
        """Take over two lanes, on which nothing else may be queued.

        lump: bytes copied at a time.
        shared: whether others need the link. Large copies are cut only then.
        """
        self._lanes, self._lump, self.shared = lanes, lump, shared
        self._apart = False
        """Whether the second lane may have work for which the first does not wait."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue what `Stream.copy` says."""
        if not self._cuts(len(source)):
            return self._first().copy(target, source)
        parts = [slice(at, at + self._lump) for at in range(0, len(source), self._lump)]
        self._in_turn([partial(_copy, target[part], source[part]) for part in parts])

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        """Queue what `Stream.copy_rows` says, uncut."""
        self._first().copy_rows(target, source)

    def copy_pieces(self, target: Tensor, source: Tensor, pieces: Pieces) -> None:
        """Queue what `Stream.copy_pieces` says."""
        if not self._cuts(pieces[:, 2].sum()):
            return self._first().copy_pieces(target, source, pieces)
        self._in_turn([partial(_copy_pieces, target, source, lump) for lump in lumps(pieces, self._lump)])

    def run(self, work: Callable[[], object]) -> None:
        """Queue what `Stream.run` says."""
        self._first().run(work)

    def wait(self, ticket: Ticket) -> None:
        """Start what is queued from now on after `ticket`."""
        self._first().wait(ticket)

    def follow(self, other: Stream) -> None:
        """Start what is queued from now on after all that `other` has been given."""
        self._first().follow(other)

    def mark(self) -> Ticket:
        """Return a ticket that is done when all that has been queued is."""
        return self._first().mark()

    def close(self) -> None:
        """Finish what is queued and end."""
        for lane in self._lanes:
            lane.close()

    def _cuts(self, size: int) -> bool:
        return self.shared and size >= 2 * self._lump

    def _first(self) -> Stream:
        """Return the first lane, behind all that the other was given."""
        first, other = self._lanes
        if self._apart:
            first.follow(other)
            self._apart = False
        return first

    def _in_turn(self, copies: Sequence[Callable[[Stream], None]]) -> None:
        """Queue copies on the lanes in turn, each behind the one before."""
        lane, other = self._first(), self._lanes[1]
        self._apart = True
        for copy in copies:
            copy(lane)
            other.follow(lane)
            lane, other = other, lane
        self._apart = False


def lumps(pieces: Pieces, size: int) -> list[Pieces]:
    """Return the same bytes in the same order, in parts of about `size` bytes each and less than twice as
    many. None of their pieces is larger than `size`."""
    counts = -(-pieces[:, 2] // size)
    which = np.repeat(np.arange(len(pieces)), counts)
    offsets = (np.arange(len(which)) - np.repeat(counts.cumsum() - counts, counts)) * size
    cut = pieces[which]
    cut[:, :2] += offsets[:, None]
    cut[:, 2] = np.minimum(cut[:, 2] - offsets, size)
    ends = cut[:, 2].cumsum()
    return np.split(cut, np.flatnonzero(np.diff((ends - 1) // size)) + 1)


def _copy(target: Tensor, source: Tensor, lane: Stream) -> None:
    lane.copy(target, source)


def _copy_pieces(target: Tensor, source: Tensor, pieces: Pieces, lane: Stream) -> None:
    lane.copy_pieces(target, source, pieces)


def streams_of(device: torch.device) -> tuple[Stream, Stream]:
    """Return the copy stream and the compute stream of a device. Nothing else is said to need the link."""
    if device.type == "cpu":
        return ThreadStream("copies"), CallerStream()
    compute = CudaStream(device, current=True)
    return _lanes(device, compute, shared=False), compute


def more_streams(device: torch.device, copies: Stream) -> tuple[Stream, Stream]:
    """Return two more streams, for copies to a device and from it, with the clock of `copies`."""
    if isinstance(copies, CudaStream):
        return _lanes(device, copies, shared=True), _lanes(device, copies, shared=True)
    return ThreadStream("blocks up"), ThreadStream("blocks down")


def _lanes(device: torch.device, other: CudaStream, *, shared: bool) -> LumpStream:
    """Return a stream for large copies, with the clock of another."""
    lanes = CudaStream(device, clock=other.clock), CudaStream(device, clock=other.clock)
    return LumpStream(lanes, shared=shared)
