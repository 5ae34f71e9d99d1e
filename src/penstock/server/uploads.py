"""Requests' bodies: as large as they may be, and not too many large ones at a time."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from penstock.server.desk import BusyError

T = TypeVar("T")
_LARGE = 1 << 20
"""Bytes from which on a request is read when no other such is."""
_AT_ONCE = 4
"""How many of the largest may be on their way, or wait to be read. To read one may take ten times its bytes."""


class Uploads:
    """Of one server, on its loop. A large request is counted from when it is known to be one until it was read, or is over."""

    def __init__(self, most: int) -> None:
        """most: bytes of a request."""
        self._most = most
        self._held: dict[Request, int] = {}
        """Bytes of large ones."""
        self._one = asyncio.Semaphore(1)
        """Held while a large one is read."""

    async def body(self, request: Request) -> bytes:
        """Raises HTTPException for one that is too large, BusyError if there are too many large ones."""
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._most:
                raise HTTPException(413, f"the request has more than {self._most} bytes, which is all this server reads of one; send less")
            if size > _LARGE:
                self._hold(request, size)
            parts.append(part)
        return b"".join(parts)

    async def aside(self, request: Request, read: Callable[[], T]) -> T:
        """Done on another thread. Large requests, which may take ten seconds and gigabytes, come one by one: small ones find a thread."""
        async with self._one if request in self._held else nullcontext():
            found = await asyncio.to_thread(read)
        self.release(request)
        return found

    def release(self, request: Request) -> None:
        """It is over, if it was not read before."""
        self._held.pop(request, None)

    def _hold(self, request: Request, size: int) -> None:
        held = sum(self._held.values())
        if held + size - self._held.get(request, 0) > _AT_ONCE * self._most:
            raise BusyError(f"large requests of {held} bytes wait to be read, which is all there is room for; try again later", 1.0)
        self._held[request] = size
