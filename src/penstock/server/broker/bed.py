"""Puts the model of a server to sleep and wakes it up."""

import asyncio

from penstock.api.llm import LLM
from penstock.api.sleeping import Sleep
from penstock.base.errors import RequestError
from penstock.server.broker.broker import RequestBroker

_GLANCE = 0.01


class Bed:
    """Lets the model in this process sleep, for the clients of one loop.

    Why this is safe. From its first word on, the broker takes no calls. Those that it has taken end, or are
    ended; only when it has none, and the backend's thread has met all that it was told of them, so that the
    driver has nothing left to compute, is the model put to sleep, on a thread. What fails on the way lets the
    broker take calls again. A lock lets one change follow the other. While one waits for calls to end,
    another one does not wait behind it in vain: to abort ends these calls, and to wake up calls the sleep
    off.
    """

    def __init__(self, llm: LLM, broker: RequestBroker) -> None:
        """Begin awake."""
        self._llm, self._broker = llm, broker
        self._one = asyncio.Lock()
        self._called_off = False

    async def sleep(self, level: int, *, aborts: bool) -> Sleep:
        """Put the model to sleep, and return how it sleeps. aborts: whether calls are ended; else they are
        waited for. Raise what `LLM.sleep` does, and RequestError if it was called off."""
        if aborts and self._broker.paused:  # Another one may wait for them.
            self._broker.abort()
        async with self._one:
            self._called_off = False
            self._broker.pause()
            try:
                if aborts:
                    self._broker.abort()
                while self._broker.outputs or not await asyncio.to_thread(self._is_idle):
                    if self._called_off:
                        raise RequestError("the model was woken up before it slept; put it to sleep again")
                    await asyncio.sleep(_GLANCE)
                return await asyncio.to_thread(self._llm.sleep, level)
            except BaseException:
                self._end_unless_asleep()
                raise

    async def wake_up(self) -> None:
        """Wake the model up, or let it stay awake where it waits to sleep. Raise what `LLM.wake_up` does."""
        self._called_off = True
        async with self._one:
            await asyncio.to_thread(self._llm.wake_up)
            self._end_unless_asleep()

    @property
    def is_sleeping(self) -> bool:
        """Tell whether the model sleeps."""
        return self._llm.is_sleeping

    def _is_idle(self) -> bool:
        return self._llm.driver.idle

    def _end_unless_asleep(self) -> None:
        if not self._llm.is_sleeping:
            self._broker.go_on()
