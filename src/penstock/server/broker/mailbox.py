"""Carries calls from the event loop to a backend's thread, and updates of them back, in two queues.

Why this is safe. Each operation on a queue is done or not done. What a backend has for calls it reports after
each step, for all calls at once. That lies in a tray until the loop collects it. The loop is woken up unless
it was woken up before and has not begun to collect: it notes that it begins before it looks, and the backend
asks after it has put something there, so nothing is left lying.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue

from penstock.server.broker.calls import Call, Update

_LOG = logging.getLogger("penstock")


class Mailbox:
    """Carries calls to a backend's thread, and updates of them back to the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """wake: runs on the loop when there are updates to collect."""
        self._loop, self._wake = loop, wake
        self._tray: deque[Update] = deque()
        self._woken = False
        """Whether the loop is about to look into the tray."""
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self.send = self._calls.put
        """Has the backend begin a call, or end one that was sent before; None ends the backend."""
        self.receive = self._calls.get
        """Returns the next call: one to begin or, when it was received before, to end; None is the end of
        all. As SimpleQueue.get, which raises Empty."""

    # ---- on the loop

    def collect(self) -> Collection[Update]:
        """Return all that lies in the tray, one update for each call: of several steps, where the loop had
        other things to do, what was added is one piece."""
        self._woken = False
        updates: dict[Call, Update] = {}
        while self._tray:
            one = self._tray.popleft()
            before = updates.get(one[0])
            updates[one[0]] = one if before is None else (one[0], [*before[1], *one[1]], one[2], one[3])
        return updates.values()

    # ---- on the backend's thread

    def report(self, updates: Sequence[Update]) -> None:
        """Report what a step has added to calls. The last update of a call is its end."""
        self._tray.extend(updates)
        if self._tray and not self._woken:
            self._woken = True
            self.run_on_loop(self._wake)

    def run_on_loop(self, work: Callable[..., object], *given: object) -> None:
        """Run this on the loop, behind what was handed over before."""
        try:
            self._loop.call_soon_threadsafe(work, *given)
        except RuntimeError:  # The loop has been closed, and waits for nothing.
            _LOG.debug("the loop is closed, and what has come is dropped")

    async def withdraw(self, call: Call) -> bool:
        """Take back, on the loop, the pieces that the call's client was not given. Return False if it has
        taken some. For backends with a loop of their own."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call.withdraw(), self._loop))
