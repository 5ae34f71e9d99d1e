"""Reads requests on threads, where their texts are cut into tokens; the turn goes round among keys.

Why this is safe. All but the work itself happens on the loop. Whoever takes a thread, or is given one by its
turn's future, has it until its work has ended, and is counted by its key until then. Work that is not waited
for any more ends where it next asks whether it is wanted, since no thread can be stopped; its thread is free
only then.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from penstock.base.wanted import Waiter, while_wanted

T = TypeVar("T")


class FairThreads:
    """Runs work on a few threads, for which the requests of keys wait."""

    def __init__(self, threads: int, each: int | None = None, *, alone: bool = False) -> None:
        """Begin with idle threads.

        each: threads that one key may have at a time, so that another's requests find one; None is all.
        alone: there is one key, and no turns: what comes waits at the threads, which then go on to the next
            without a word from the loop.
        """
        self._pool = ThreadPoolExecutor(threads, "penstock reading")
        self._alone, self._free, self._each = alone, threads, each or threads
        self._busy: Counter[bytes] = Counter()
        """Threads that each key has."""
        self._waiting: dict[bytes, deque[asyncio.Future[None]]] = {}
        """By key, the next one's first."""

    async def run(self, owner: bytes, work: Callable[[], T]) -> T:
        """Return or raise what the work does, when it is that key's turn. Whoever is cancelled before leaves
        its place."""
        if not self._alone:
            await self._turn(owner)
        waiter, loop = Waiter(), asyncio.get_running_loop()
        future = self._pool.submit(partial(while_wanted, waiter, work))

        def ended(_: "Future[T]") -> None:
            with suppress(RuntimeError):  # The loop has been closed, and waits for nothing.
                loop.call_soon_threadsafe(self._leave, owner)

        if not self._alone:
            future.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            waiter.gone = True
            raise

    async def _turn(self, owner: bytes) -> None:
        """Take a thread when it is the key's turn."""
        if self._free and self._busy[owner] < self._each:
            self._take(owner)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # It has just been given.
                self._leave(owner)
            raise

    def _take(self, owner: bytes) -> None:
        self._free -= 1
        self._busy[owner] += 1

    def _leave(self, owner: bytes) -> None:
        """Note that a key has a thread less, and give it to the next that may have it."""
        self._free += 1
        self._busy[owner] -= 1
        if not self._busy[owner]:
            del self._busy[owner]
        while (
            self._free
            and (following := next((one for one in self._waiting if self._busy[one] < self._each), None))
            is not None
        ):
            turns = self._waiting.pop(following)
            turn = turns.popleft()
            if turns:
                self._waiting[following] = turns  # Behind all others.
            if not turn.done():
                self._take(following)
                turn.set_result(None)
