"""Where requests wait to be read: their texts are cut into tokens on threads, and whose turn it is goes round among keys.

Why this is safe. All but the work itself happens on the loop. A thread that is free is taken by whoever comes while nobody waits, and is
handed on, when its work has ended, to the next who still waits; a turn is given once, by its future. Work that nobody waits for any more
goes on to its end, since no thread can be stopped, and its thread is free only then.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Lane:
    """A few threads, and the keys whose requests wait for one."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "penstock reading")
        self._free = threads
        self._waiting: dict[bytes, deque[asyncio.Future[None]]] = {}
        """By key, the next one's first."""

    async def run(self, owner: bytes, work: Callable[[], T]) -> T:
        """What the work returns or raises, when it is that key's turn. Whoever is cancelled before leaves its place."""
        loop = asyncio.get_running_loop()
        if self._free:
            self._free -= 1
        else:
            turn = loop.create_future()
            self._waiting.setdefault(owner, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # It has just been given.
                    self._hand_on()
                raise
        future = self._pool.submit(work)

        def ended(_: "Future[T]") -> None:
            with suppress(RuntimeError):  # The loop has been closed, and nobody waits.
                loop.call_soon_threadsafe(self._hand_on)

        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def _hand_on(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # Behind all others.
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
