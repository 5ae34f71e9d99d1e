"""Runs a server: it listens at once, loads its model, serves, and lets what is under way end before it
does."""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from typing import TypeVar

import uvicorn

from penstock.base.errors import ConfigError
from penstock.server.broker.backend import Backend
from penstock.server.broker.broker import RequestBroker
from penstock.server.hosting import Hosting
from penstock.server.http.app import application
from penstock.server.http.connection import Connection, room
from penstock.server.http.origins import CLOSED
from penstock.server.http.state import ServerSettings, ServerState
from penstock.server.monitoring.logs import note
from penstock.server.monitoring.records import RecordSink
from penstock.server.settings import Listening

T = TypeVar("T")
_LOG = logging.getLogger("penstock")
_LAST = 5
"""Seconds in which the last answers must have been read, at the end."""


def serve(
    load: Callable[[], Backend] | Hosting,
    settings: ServerSettings,
    listening: Listening,
    *,
    ready: Callable[[str], object] = lambda _: None,
    sinks: Sequence[RecordSink] = (),
    cancel_load: Callable[[], object] = lambda: None,
) -> None:
    """Serve until a signal says that it is enough: one lets requests end, a second one does not, a third one
    waits for nothing.

    load: loads what computes; or several models, each at its first use.
    ready: is called with the address when the model is there.
    sinks: are given the record of each request that is over.
    cancel_load: is called at the first signal, to break off loading that can be.

    Raises ConfigError if the address is not to be had, and whatever has ended the server besides a signal:
    what loading or the engine has raised.
    """
    bound = _bind(listening)
    with bound:
        state = ServerState(settings, sinks=sinks)
        asyncio.run(_Life(load, state, listening, ready, cancel_load).run(bound))
    note("stopped")


class _Life:
    def __init__(
        self,
        load: Callable[[], Backend] | Hosting,
        state: ServerState,
        listening: Listening,
        ready: Callable[[str], object],
        cancel_load: Callable[[], object],
    ) -> None:
        self._load, self._state, self._listening = load, state, listening
        self._ready, self._cancel_load = ready, cancel_load
        self._enough = asyncio.Event()
        self._signals = 0
        config = uvicorn.Config(
            application(self._state),
            log_config=None,
            access_log=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            http=Connection,
            headers=[*CLOSED],
            backlog=room().at_once,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_LAST,
        )
        self._server = _Server(config)

    async def run(self, bound: socket.socket) -> None:
        server = self._server
        loop = asyncio.get_running_loop()
        self._listen()
        serving = asyncio.ensure_future(server.serve([bound]))
        try:
            load = self._load
            async with self._hosted(load) if isinstance(load, Hosting) else self._opened(load) as failed:
                if self._state.is_open and not self._enough.is_set():
                    host, port = bound.getsockname()[:2]
                    self._ready(f"http://{'[' + host + ']' if ':' in host else host}:{port}")
                enough = asyncio.ensure_future(self._enough.wait())
                await asyncio.wait((enough, failed, serving), return_when=asyncio.FIRST_COMPLETED)
                enough.cancel()
        finally:
            server.should_exit = True
            await serving
            for one in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(one)
        if failed.done() and (fault := failed.result()) is not None:
            raise fault

    @asynccontextmanager
    async def _hosted(self, hosting: Hosting) -> AsyncIterator["asyncio.Future[BaseException | None]"]:
        """Take requests for several models, each of which is loaded at its first use. Gives a task that ends
        when nothing can be loaded any more."""
        state, listening = self._state, self._listening
        await self._done(hosting.prepare)
        models = hosting.open(state, listening)

        async def failure() -> BaseException | None:
            await asyncio.wait((models.keeper,))
            return None if models.keeper.cancelled() else models.keeper.exception()

        failed = asyncio.ensure_future(failure())
        try:
            yield failed
        finally:
            models.stop_lending()
            hosting.cancel_load()  # Nobody waits for it any more.
            late = monotonic() + listening.patience
            while models.used and monotonic() < late and self._signals < 2:
                await asyncio.sleep(0.01)
            await models.close()
            await failed

    async def _done(self, load: Callable[[], T]) -> T:
        """Load on a thread, and return what that returns."""
        loading = asyncio.ensure_future(asyncio.to_thread(load))
        enough = asyncio.ensure_future(self._enough.wait())
        while not (loading.done() or enough.done()):
            await asyncio.wait((loading, enough), timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            self._listen()  # What is being loaded may take the signals for itself, as Ray does.
        enough.cancel()
        return await loading

    @asynccontextmanager
    async def _opened(
        self, load: Callable[[], Backend]
    ) -> AsyncIterator["asyncio.Future[BaseException | None]"]:
        """Load the model, and take requests for it. Gives a task that ends when the broker has failed."""
        # What is there for good is not looked at again and again by the garbage collector, which holds
        # everybody up: neither what was imported, while a model is loaded, nor that.
        gc.freeze()
        backend = await self._done(load)
        try:
            gc.collect()
            gc.freeze()
            state, listening = self._state, self._listening
            keys = len(state.settings.keys)
            broker = RequestBroker(backend, state.metrics, queue=listening.queue, keys=keys)
            broker.max_seconds = listening.request_timeout
            failed = asyncio.ensure_future(broker.failure())
            try:
                if not self._enough.is_set():
                    state.open(backend, broker)
                yield failed
            finally:
                await broker.close(listening.patience, hurry=lambda: self._signals > 1)
                await failed
        finally:
            gc.unfreeze()
            await asyncio.to_thread(backend.close)

    def _listen(self) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(one, self._enough_of_it)

    def _enough_of_it(self) -> None:
        self._signals += 1
        note(
            "stopping", signals=self._signals, outputs=self._state.outputs, patience=self._listening.patience
        )
        self._enough.set()
        self._cancel_load()
        self._server.force_exit = self._signals > 1
        if self._signals > 1 and not self._state.is_open:
            _LOG.warning("stopped by a signal while the model was loading")
            os._exit(1)  # Weights that are being loaded cannot be broken off, and there is nothing to save.
        if self._signals > 2:
            _LOG.warning("stopped by a signal during a step")
            os._exit(1)  # It may be one that never ends.


class _Server(uvicorn.Server):
    """Serves without taking signals, which _Life takes."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _bind(listening: Listening) -> socket.socket:
    family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
    # Said to be TCP, asyncio lets no piece of an answer wait until the client has acknowledged the one
    # before, for 40 ms often.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((listening.host, listening.port))
        bound.listen()  # Until then, another process might.
    except (OSError, OverflowError, UnicodeError) as fault:
        bound.close()
        raise ConfigError(
            f"{listening.host}:{listening.port} cannot be listened on: {fault}; give another --host or --port"
        ) from fault
    return bound
