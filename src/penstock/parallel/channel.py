"""Sends messages of any size to all other processes on a machine, through shared memory.

Memory is an anonymous file, handed to the readers as an open descriptor: it has no name that could be left
behind. It is cut into a ring of parts. A message takes as many as it needs, and a long one more than there
are, one after the other. Beside it each reader has a pair of sockets. The writer sends a notice for every
part, and the reader answers each. A socket wakes a sleeper, needs no polling, and tells at once when the
other process is gone. A reader sleeps at once: a message and its answer took 29 us so on two cores. They took
from 39 to 548 us where the reader polled for 50 us to 1 ms first, as that kept the core from others.

Why this is safe. Memory is never read to learn whether a part is there. Part `n` lies in place `n` modulo the
ring's length.
1. The writer writes a part before it sends its notice, so a reader that has received the notice sees the
part: sending and receiving order memory between two processors, of every kind, as a lock does.
2. A reader copies a part before it answers, and the writer fills a place again only when all readers have
answered its last part.
3. Notices and answers carry the part's number. One that is not the next ends the channel with an error
instead of a wrong message.
4. A process that dies closes its sockets: a process that waits for it is woken with an error. It can leave no
lock held, as there is none.
A reader has at most as many answers unread as there are places, so that answering never waits. Neither side
can continue a message that was broken off; both are used by a thread that no interrupt reaches.
"""

import mmap
import os
import socket
import struct
from time import monotonic

from penstock.base.errors import DeviceError

PARTS = 8
PART_BYTES = 128 << 10
PATIENCE = 60.0
"""Seconds that the writer waits for a place. A live reader takes parts only between two steps."""
_NOTICE = struct.Struct("<QI?")
"""A part's number, its bytes, and whether it is the message's last."""
_ANSWER = struct.Struct("<Q")


class Closed(DeviceError):
    """The other side of a channel is gone."""


class ChannelWriter:
    """Writes to `readers` other processes.

    ends: the readers' sockets, which are handed to their processes and then closed here by `handed_over`.
    """

    def __init__(
        self, readers: int, parts: int = PARTS, part_bytes: int = PART_BYTES, patience: float = PATIENCE
    ) -> None:
        self._parts, self._part_bytes, self._patience = parts, part_bytes, patience
        self.memory = os.memfd_create("penstock")
        os.ftruncate(self.memory, parts * part_bytes)
        self._bytes = mmap.mmap(self.memory, parts * part_bytes)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(readers)]
        self._sockets, self.ends = [near for near, _ in pairs], [far for _, far in pairs]
        self._sent = 0
        """Number of parts sent."""
        self._taken = [0] * readers
        """Number of parts that each reader has taken."""

    def handed_over(self) -> None:
        """Close the readers' ends here, when their processes have them."""
        for end in self.ends:
            end.close()

    def send(self, message: bytes) -> None:
        """Send a message to all readers. Return when the last part has been sent, not received.

        Raises Closed if a reader is gone, and DeviceError if one does not read.
        """
        size, view = self._part_bytes, memoryview(message)
        for start in range(0, max(len(view), 1), size):
            part = view[start : start + size]
            self._await_place()
            self._fill(part)
            self._notify(len(part), start + size >= len(view))
            self._sent += 1

    def _fill(self, part: memoryview) -> None:
        place = self._sent % self._parts * self._part_bytes
        self._bytes[place : place + len(part)] = part

    def _notify(self, length: int, last: bool) -> None:
        notice = _NOTICE.pack(self._sent, length, last)
        for reader, line in enumerate(self._sockets):
            try:
                line.send(notice)
            except OSError as fault:
                raise Closed(f"reader {reader} of a channel is gone: {fault}") from fault

    def _await_place(self) -> None:
        for reader, line in enumerate(self._sockets):
            late = monotonic() + self._patience
            while self._taken[reader] <= self._sent - self._parts:
                line.settimeout(max(late - monotonic(), 1e-3))
                try:
                    answer = line.recv(_ANSWER.size)
                except TimeoutError:
                    raise DeviceError(
                        f"reader {reader} of a channel between ranks has taken nothing for "
                        f"{self._patience:g} s; look at the logs of the ranks, and restart all of them"
                    ) from None
                except OSError as fault:
                    raise Closed(f"reader {reader} of a channel is gone: {fault}") from fault
                if not answer:
                    raise Closed(f"reader {reader} of a channel is gone")
                _check(_ANSWER.unpack(answer)[0], self._taken[reader])
                self._taken[reader] += 1

    def close(self) -> None:
        """Close the channel. Readers get Closed, perhaps before unread parts. A second call does nothing."""
        for line in (*self._sockets, *self.ends):
            line.close()
        self._bytes.close()
        if self.memory >= 0:
            memory, self.memory = self.memory, -1
            os.close(memory)


class ChannelReader:
    """Reads as one of the readers. It takes over the descriptors of the memory and of the socket."""

    def __init__(
        self, memory: int, line: socket.socket, parts: int = PARTS, part_bytes: int = PART_BYTES
    ) -> None:
        self._line, self._parts, self._part_bytes = line, parts, part_bytes
        self._bytes = mmap.mmap(memory, parts * part_bytes, prot=mmap.PROT_READ)
        os.close(memory)
        self._next = 0

    def receive(self) -> bytes:
        """Return the next message, however long it takes to come. Raises Closed if the writer is gone."""
        parts: list[bytes] = []
        last = False
        while not last:
            number, length, last = _NOTICE.unpack(self._notice())
            _check(number, self._next)
            parts.append(self._copy(length))
            self._answer()
            self._next += 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _notice(self) -> bytes:
        try:
            notice = self._line.recv(_NOTICE.size)
        except OSError as fault:
            raise Closed(f"the writer of a channel is gone: {fault}") from fault
        if not notice:
            raise Closed("the writer of a channel is gone")
        return notice

    def _copy(self, length: int) -> bytes:
        place = self._next % self._parts * self._part_bytes
        return self._bytes[place : place + length]

    def _answer(self) -> None:
        try:
            self._line.send(_ANSWER.pack(self._next))
        except OSError as fault:
            raise Closed(f"the writer of a channel is gone: {fault}") from fault

    def close(self) -> None:
        """Close the memory and the socket."""
        self._line.close()
        self._bytes.close()


def _check(number: int, expected: int) -> None:
    if number != expected:
        raise DeviceError(
            f"a channel between ranks brought part {number} where part {expected} comes next, which is a "
            "bug of penstock; restart all ranks, and report it with this line"
        )
