"""Receives requests' bodies: as large as they may be, in the time that they may take, and not too many of one
key."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from penstock.server.broker.calls import BusyError
from penstock.server.http.connection import connection_of
from penstock.server.http.threads import FairThreads
from penstock.server.monitoring.records import record_of

T = TypeVar("T")
SMALL = 64 << 10
"""Bytes up to which a request is read beside large ones."""
_BRIEF = 1 << 10
"""Bytes up to which to read a request takes less than to have a thread do it."""
_THREADS = 4
"""Threads that read small requests. Large ones come one by one, or where there are several keys one of each
of two keys."""
_REST, _LONGEST_REST = 3.0, 1.0
"""Seconds of rest for each that the decoding of a large body took, and at most: nobody else computes while it
is decoded."""
_LARGEST = 4
"""Requests of the largest size that may be on their way, or wait to be read. To read one may take ten times
its bytes."""
_MOST = 1024
"""Requests that may be on their way or wait to be read."""
_PATIENCE = 30.0
"""Seconds in which a body must come, and a large one as many more as it takes at this rate:"""
_SLOWEST = 64 << 10
"""Bytes/s."""
_RATE, _BURST = 8 << 20, 16 << 20
"""Bytes/s that are read of one key's large requests where there are several keys, and bytes before that
holds. What reads them is the loop, which all wait for."""


class Uploads:
    """Takes the bodies of one server's requests, on its loop. A request is counted from the first bytes of
    its body until it was read, or is over."""

    def __init__(self, most: int, *, keys: int = 0) -> None:
        """Begin without requests.

        most: bytes of a request.
        keys: of the server. Where there are several, each may have half of what there is room for.
        """
        self._most = most
        self._parts = 2 if keys > 1 else 1
        self._held: dict[Request, int] = {}
        """Their bytes."""
        self._by: dict[bytes, tuple[int, int]] = {}
        """By key, how many requests it has, and of how many bytes."""
        self._lead: dict[bytes, tuple[float, float]] | None = {} if keys > 1 else None
        """By key, bytes that were read faster than at that rate, and when that was."""
        self._small = FairThreads(_THREADS, _THREADS - 1) if keys > 1 else FairThreads(_THREADS, alone=True)
        self._large = FairThreads(2, 1) if keys > 1 else FairThreads(1)

    async def body(self, request: Request) -> bytes:
        """Return a request's body. Raise HTTPException for one that is too large or takes too long, and
        BusyError if there are too many, of all keys or its own."""
        parts, size, waited, loop = [], 0, 0.0, asyncio.get_running_loop()
        begin, owner = loop.time(), record_of(request).owner
        self._hold(request, 0)
        try:
            own = connection_of(request.scope)
            there = own is not None and own.is_whole
            async with asyncio.timeout_at(None if there else begin + _PATIENCE) as late:
                async for part in request.stream():
                    size += len(part)
                    if size > self._most:
                        raise HTTPException(
                            413,
                            f"the request has more than {self._most} bytes, the most that this server "
                            "takes; send less, or start it with a larger --max-body",
                        )
                    if not part:  # The end.
                        continue
                    self._hold(request, size)
                    parts.append(part)
                    if size <= SMALL:
                        continue
                    pause = self._pause(owner, len(part), loop.time())
                    waited += pause
                    late.reschedule(begin + waited + _PATIENCE + size / _SLOWEST)
                    if pause:
                        await asyncio.sleep(pause)  # Meanwhile the connection is not read.
        except TimeoutError as error:
            seconds = loop.time() - begin
            raise HTTPException(
                408, f"of the request's body {size} bytes came in {seconds:.0f} seconds; send it faster"
            ) from error
        return b"".join(parts)

    async def opened(self, request: Request, read: Callable[[], T]) -> T:
        """Return what a large body says, decoded where large ones are read; it still counts as not read."""
        work = read if self._lead is None else partial(_rested, read)
        return await self._large.run(record_of(request).owner, work)

    async def aside(self, request: Request, read: Callable[[], T]) -> T:
        """Read a request on another thread, small requests beside large ones, and keys in turns."""
        lane = self._large if self.is_large(request) else self._small
        found = await lane.run(record_of(request).owner, read)
        self.release(request)
        return found

    def is_large(self, request: Request) -> bool:
        """Tell whether its body is one that is read among large ones."""
        return self._held.get(request, 0) > SMALL

    def is_brief(self, request: Request) -> bool:
        """Tell whether its body may be read on the loop. Where there are several keys, these take turns at
        threads."""
        return self._lead is None and self._held.get(request, 0) <= _BRIEF

    def release(self, request: Request) -> None:
        """Forget a request that is over, if it was not read before."""
        if (size := self._held.pop(request, None)) is None:
            return
        owner = record_of(request).owner
        count, bytes_ = self._by[owner]
        if count == 1:
            del self._by[owner]
        else:
            self._by[owner] = count - 1, bytes_ - size

    def _pause(self, owner: bytes, size: int, now: float) -> float:
        """Return the seconds until more of a key is to be read, which so many more bytes have come of."""
        if self._lead is None:
            return 0.0
        lead, then = self._lead.get(owner, (0.0, now))
        lead = max(lead - (now - then) * _RATE, 0.0) + size
        self._lead[owner] = lead, now
        return max(lead - _BURST, 0.0) / _RATE

    def _hold(self, request: Request, size: int) -> None:
        owner, there = record_of(request).owner, request in self._held
        count, bytes_ = self._by.get(owner, (0, 0))
        count, bytes_ = count + (not there), bytes_ + size - self._held.get(request, 0)
        others = [one for whose, one in self._by.items() if whose != owner]
        for whose, many, much, parts in (
            ("this key", count, bytes_, self._parts),
            ("all clients", count + sum(one[0] for one in others), bytes_ + sum(one[1] for one in others), 1),
        ):
            if many * parts > _MOST or much * parts > _LARGEST * self._most:
                raise BusyError(
                    f"{many} request bodies of {much} bytes from {whose} are being received, more than the "
                    "server takes at once; send the request again in a few seconds",
                    1.0,
                )
        self._held[request], self._by[owner] = size, (count, bytes_)


def _rested(read: Callable[[], T]) -> T:
    """Return what `read` returns, after a rest that leaves most of the time to others."""
    begin = time.thread_time()
    try:
        return read()
    finally:
        time.sleep(min(_REST * (time.thread_time() - begin), _LONGEST_REST))
