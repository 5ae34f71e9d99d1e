"""Carries calls from the event loop to a backend's thread, and updates of them back, in two queues.

What a backend has for calls it reports after each step, for all calls at once. To give that to many clients
takes the loop as long as a short step takes a GPU, and meanwhile the backend's thread waits for the
interpreter. So behind a delivery that took a while the loop rests, for REST times as long: what comes
meanwhile is added up, and each client gets several tokens at once. First pieces and ends do not wait.

Why this is safe. Each operation on a queue is done or not done. What is reported lies in a tray until the
loop collects it. The loop is woken up unless it was woken up before and has not begun to collect, or rests:
it notes that it begins, or that its rest is over, before it looks, and the backend asks after it has put
something there, so nothing is left lying. What the loop has collected and not delivered is the loop's alone;
what comes later of the same call is added to it, and both are delivered as one. Who needs all that was
reported to be delivered (`flush`, `run_on_loop`, `withdraw`) has it delivered first.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue
from time import monotonic

from penstock.server.broker.calls import Call, Update

_LOG = logging.getLogger("penstock")
REST = 12.0
"""A delivery is followed by a rest of so many times its own seconds."""
_SHORT, _LONGEST = 0.0003, 0.03
"""Seconds of a delivery behind which there is no rest, and of the longest rest."""
_FEW = 8
"""Calls for which there is none either: a delivery to them takes long only where the machine is busy."""


class Mailbox:
    """Carries calls to a backend's thread, and updates of them back to the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Collection[Update]], None]
    ) -> None:
        """deliver: runs on the loop, and is given one update of each call that something has come of."""
        self._loop, self._deliver = loop, deliver
        self._tray: deque[Update] = deque()
        self._held: dict[Call, Update] = {}
        """What was collected and waits for the end of a rest. The loop's."""
        self._woken = False
        """Whether the loop is about to look into the tray."""
        self._rests = False
        """Whether the loop rests, and will look into the tray behind it."""
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self.send = self._calls.put
        """Has the backend begin a call, or end one that was sent before; None ends the backend."""
        self.receive = self._calls.get
        """Returns the next call: one to begin or, when it was received before, to end; None is the end of
        all. As SimpleQueue.get, which raises Empty."""

    # ---- on the loop

    def _look(self) -> None:
        """Deliver what has come; in a rest, only what does not wait."""
        self._woken = False
        self._collect()
        held = self._held
        if not self._rests:
            self._give(held)
        elif now := {call: one for call, one in held.items() if _is_urgent(one)}:
            self._held = {call: one for call, one in held.items() if call not in now}
            self._deliver(now.values())

    def _end_rest(self) -> None:
        self._rests = False
        self._collect()
        self._give(self._held)

    def flush(self) -> None:
        """Deliver all that has been reported. Not from within a delivery."""
        self._collect()
        self._held, updates = {}, self._held
        if updates:
            self._deliver(updates.values())

    def _collect(self) -> None:
        """Take all that lies in the tray, and make one update of what belongs to a call."""
        held = self._held
        while self._tray:
            one = self._tray.popleft()
            before = held.get(one[0])
            held[one[0]] = one if before is None else (one[0], [*before[1], *one[1]], one[2], one[3])

    def _give(self, updates: dict[Call, Update]) -> None:
        """Deliver what is held, and begin a rest if that took a while."""
        if not updates:
            return
        self._held, began = {}, monotonic()
        self._deliver(updates.values())
        if (spent := monotonic() - began) > _SHORT and len(updates) > _FEW:
            self._rests = True
            self._loop.call_later(min(REST * spent, _LONGEST), self._end_rest)

    # ---- on the backend's thread

    def report(self, updates: Sequence[Update]) -> None:
        """Report what a step has added to calls. The last update of a call is its end."""
        self._tray.extend(updates)
        if self._tray and not self._woken and not (self._rests and not any(map(_is_urgent, updates))):
            self._woken = True
            self._call(self._look)

    def run_on_loop(self, work: Callable[..., object], *given: object) -> None:
        """Run this on the loop, behind what was handed over before."""
        self._call(self._run, work, *given)

    def _run(self, work: Callable[..., object], *given: object) -> None:
        try:
            self.flush()
        finally:
            work(*given)

    def _call(self, work: Callable[..., object], *given: object) -> None:
        try:
            self._loop.call_soon_threadsafe(work, *given)
        except RuntimeError:  # The loop has been closed, and waits for nothing.
            _LOG.debug("the loop is closed, and what has come is dropped")

    async def withdraw(self, call: Call) -> bool:
        """Take back, on the loop, the pieces that the call's client was not given. Return False if it has
        taken some. For backends with a loop of their own."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._withdraw(call), self._loop))

    async def _withdraw(self, call: Call) -> bool:
        self.flush()
        return await call.withdraw()


def _is_urgent(update: Update) -> bool:
    """Tell whether a client waits for it: for the first piece of an answer, or its end."""
    call, _, over, _ = update
    return over or not call.first_token_time
