"""Runs an engine's steps on a thread, for tasks of event loops that wait for what comes of them."""

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from penstock.api.driver import EngineDriver
from penstock.api.outputs import Completion, Delta, Output
from penstock.api.sequences import PreparedPrompt, SequenceGroup
from penstock.base.errors import EngineClosedError
from penstock.step.request import FinishReason

_LOG = logging.getLogger("penstock")
_NAP = 0.02
"""Seconds between two looks at blocks that move between tiers while there are no requests."""
_PATIENCE = 30.0
"""Seconds that the end of the process waits for a step to end."""


class AsyncRequest:
    """Holds a request of a task, and what has come of it.

    Its loop alone touches it, but for two fields: the thread sets `group`, before it reports anything, and
    reads `left`, which is set once.
    """

    def __init__(self, prompt: PreparedPrompt) -> None:
        """Belong to the running loop."""
        self.prompt, self.loop = prompt, asyncio.get_running_loop()
        self.group: SequenceGroup | None = None
        self.left = False
        """Whether the task wants no more of it."""
        self._pieces: deque[Delta] = deque()
        self._over = False
        self._fault: BaseException | None = None
        self._wakes = asyncio.Event()

    async def next_delta(self) -> Delta | None:
        """Return the next piece, and None behind the last. Raise what has kept the outputs from being
        complete."""
        while not self._pieces and not self._over:
            self._wakes.clear()
            await self._wakes.wait()
        if self._pieces:
            return self._pieces.popleft()
        if self._fault is not None:
            raise self._fault
        return None

    def deliver(self, pieces: Sequence[Delta], over: bool, fault: BaseException | None) -> None:
        """Add what has come. over: whether that was the last. fault: why outputs are not complete."""
        self._pieces.extend(pieces)
        self._over, self._fault = self._over or over, self._fault or fault
        self._wakes.set()

    def completion(self) -> Completion:
        """Return the outputs up to now. Those that have not ended by themselves count as aborted."""
        if self.group is not None:
            return self.group.completion()
        outputs = (Output(index, "", (), FinishReason.ABORT) for index in range(len(self.prompt.samplings)))
        return Completion(self.prompt.prompt, self.prompt.tokens, tuple(outputs))


_Update = tuple[AsyncRequest, Sequence[Delta], bool, BaseException | None]


class StepThread:
    """Runs the steps of an engine while requests of tasks are under way.

    Why this is safe. Requests come through a queue, and what comes of them goes to their loops by
    `call_soon_threadsafe`; the engine is reached through its driver alone, whose lock other threads may hold
    for steps of their own. A request is put into the queue only while the thread has not been told to end,
    under the same lock as that word: so it lies before the word, and is met. A task that leaves sets `left`
    and notes the group with the driver, which ends it at its next step; a request that was left before the
    thread met it is never begun. Nothing waits on a loop.
    """

    def __init__(self, driver: EngineDriver) -> None:
        self._driver = driver
        self._queue: SimpleQueue[AsyncRequest | None] = SimpleQueue()
        self._lock = threading.RLock()  # The garbage collector may call `stop` within `follow`.
        self._ending = False
        self._live: list[AsyncRequest] = []
        self._thread = threading.Thread(target=self._run, name="penstock steps", daemon=True)
        self._thread.start()

    def follow(self, request: AsyncRequest) -> None:
        """Begin a request; its pieces are delivered on its loop. Raise EngineClosedError at the end."""
        self._driver.check_process()
        with self._lock:
            if self._ending:
                raise EngineClosedError("the model was closed; open it again")
            self._queue.put(request)

    def leave(self, request: AsyncRequest) -> None:
        """End a request whose task wants no more of it. One that has ended is not disturbed."""
        request.left = True
        if request.group is not None:
            self._driver.drop(request.group)

    def stop(self) -> None:
        """End all requests as aborted, close the engine, and wait for the step that runs."""
        with self._lock:
            if not self._ending:
                self._ending = True
                self._queue.put(None)
        if self._thread is not threading.current_thread() and not self._driver.forked:
            self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while self._meet():
            fault: BaseException | None = None
            try:
                self._driver.advance()
            except BaseException as error:  # It is told to every task that waits; the thread goes on.
                fault = error
            self._report(fault)
        try:
            self._driver.close()
        except BaseException as error:
            _LOG.error("the engine could not be closed: %s", error)
        self._report(EngineClosedError("the model was closed before this request was complete"))

    def _meet(self) -> bool:
        """Begin what was asked for, and wait for it if there is nothing else to do. Return False at the
        end."""
        while True:
            timeout = _NAP if self._driver.moving else None
            try:
                request = self._queue.get(block=not self._live, timeout=timeout)
            except Empty:
                return True
            if request is None:
                return False
            self._begin(request)

    def _begin(self, request: AsyncRequest) -> None:
        if request.left:
            return
        try:
            request.group = self._driver.begin(request.prompt)
        except BaseException as fault:  # It is told to the task that waits; the thread goes on.
            self._post([(request, (), True, fault)])
            return
        self._live.append(request)
        if request.left:  # It was set before `group` was there to be dropped.
            self._driver.drop(request.group)

    def _report(self, fault: BaseException | None) -> None:
        """Deliver what the last step has added. fault: what has kept it from that, and ends all requests."""
        updates, going = list[_Update](), list[AsyncRequest]()
        for request in self._live:
            assert request.group is not None
            pieces, done = self._driver.take_deltas(request.group)
            over = done or fault is not None
            if pieces or over:
                updates.append((request, pieces, over, None if done else fault))
            if not over:
                going.append(request)
        ended, self._live = self._live, going
        self._post(updates)
        if fault is not None:
            try:
                self._driver.abandon([request.group for request in ended if request.group is not None])
            except BaseException as error:
                _LOG.error("requests could not be ended: %s", error)

    def _post(self, updates: Sequence[_Update]) -> None:
        """Deliver updates on their loops, those of one loop at once."""
        loops = defaultdict[asyncio.AbstractEventLoop, list[_Update]](list)
        for update in updates:
            loops[update[0].loop].append(update)
        for loop, its in loops.items():
            try:
                loop.call_soon_threadsafe(_deliver, its)
            except RuntimeError:  # The loop was closed, and its tasks with it.
                for request, *_ in its:
                    self.leave(request)


def _deliver(updates: Sequence[_Update]) -> None:
    for request, pieces, over, fault in updates:
        request.deliver(pieces, over, fault)
