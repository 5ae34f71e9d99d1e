"""Runs an engine and its broker in a process of its own, as the only replica of a model: when the process has
ended, all of its memory is back, on the host and on the device.

Processes are forked from one that has imported torch and has computed nothing (multiprocessing's forkserver),
so that a load does not begin with seconds of imports.

Why this is safe. A pipe joins the two processes. On this side one thread reads it and another one writes to
it, so that no loop waits for a process that does not read; each answer has a number, by which what comes is
handed to the loop that asked. On the other side one loop does everything. What was asked ends in one of two
ways: its end comes, or the pipe does. The reader marks the process as gone under the lock that guards the
table of what was asked, and what is asked later is refused under it: so nothing waits for a process that is
not there. A process ends with its server, however that ends: the kernel kills it when the process that it
was forked from is gone (PR_SET_PDEATHSIG), and that one ends when the server's end of a pipe is closed.
Signals of a terminal or a service manager are the server's: here they are blocked.
"""

import asyncio
import ctypes
import gc
import logging
import multiprocessing
import pickle
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

import msgspec
import torch

from penstock.api.llm import LLM
from penstock.base.config import Config
from penstock.base.errors import EngineClosedError, PenstockError
from penstock.engine.hardware import read_hardware
from penstock.engine.rooms import Hardware
from penstock.memory.device import choose_device
from penstock.server.broker.backend import LocalBackend
from penstock.server.broker.broker import RequestBroker
from penstock.server.broker.metrics import Metrics
from penstock.server.fleet import stall
from penstock.server.fleet.requests import RemoteRequest, ReplicaInfo, ReplicaMessage, computed
from penstock.server.monitoring.state import StateMonitor

_LOG = logging.getLogger("penstock")
_GRACE = 20.0
"""Seconds that a process has to end by itself: KV may still be on its way to a disk."""
_STATE = 5.0
"""Seconds in which a process has told its state."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_STOP = pickle.dumps(None)
ANSWER, LEAVE, CLEAR, EXPERTS = "answer", "leave", "clear", "experts"
_ASIDE = (CLEAR, EXPERTS)
"""They may take a while, and are told from a thread."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    info: ReplicaInfo


@dataclass(frozen=True, slots=True)
class _Failed:
    """Tells why there is no engine, or none any more."""

    fault: PenstockError


@dataclass(frozen=True, slots=True)
class _Remark:
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class _Last:
    """Ends what was asked."""

    told: Any = None


Asked = tuple[asyncio.AbstractEventLoop, "asyncio.Queue[Any]"]


class EngineProcess:
    """Reaches an engine in a process of its own; see ReplicaPool."""

    def __init__(self, name: str, config: Config, ended: Callable[[str], object] = lambda _: None) -> None:
        """Begin without a process.

        name: of the model, and of the replica. ended: is called on any thread when the process has ended
        without having been asked to, with the reason.
        """
        self._name, self._config, self._ended = name, config, ended
        self._lock = threading.Lock()
        self._orders = SimpleQueue[bytes]()
        """What is to be written, in order."""
        self._asked: dict[int, Asked] = {}
        self._number = 0
        self._gone = ""
        """Why nothing can be asked."""
        self._stopping = False
        self._line: Connection | None = None
        self._process: BaseProcess | None = None
        self._reader: threading.Thread | None = None
        self._writer = threading.Thread(target=self._write, name="penstock engine writer", daemon=True)

    # ---- its life, on any thread

    def start(self) -> ReplicaInfo:
        """Start the process, and wait until its model is loaded. Raises what has kept it from that, and
        EngineClosedError if it does not get on."""
        self._process, self._line = _started(_run_engine, self._config, self._name)
        self._writer.start()
        if self._stopping:
            self._process.kill()
        try:
            while True:
                match self._told_while_loading(self._line):
                    case _Loaded(info):
                        break
                    case _Failed(fault):
                        raise fault
                    case _Remark(level, text):
                        self._note(level, text)
        except (EOFError, OSError) as lost:
            how = self._how()
            self.stop()
            raise EngineClosedError(
                f"the process that loaded {self._name} {how}; see the log above for what it said"
            ) from lost
        except BaseException:
            self.stop()
            raise
        self._reader = threading.Thread(target=self._read, name="penstock engine reader", daemon=True)
        self._reader.start()
        return info

    def _told_while_loading(self, line: Connection) -> object:
        assert self._process is not None
        assert self._process.pid is not None
        watch = stall.StallWatch(self._process.pid)
        while not line.poll(stall.LOOK):
            if (seconds := watch.seconds()) >= stall.STALL:
                self._process.kill()
                raise EngineClosedError(
                    f"loading {self._name} has neither computed nor read anything for {seconds:.0f} s; look "
                    "at the disk or the mount of its files, and ask again"
                )
        return line.recv()

    def kill(self) -> None:
        """End the process at once, also while it loads."""
        self._stopping = True
        if (process := self._process) is not None:
            process.kill()

    def stop(self) -> None:
        """End the process, and wait until it is gone, and its memory with it."""
        self._stopping = True
        process, line = self._process, self._line
        if process is None or line is None:
            return
        self._send(None)
        process.join(_GRACE)
        if process.is_alive():
            process.kill()
            process.join()
        if self._reader is not None:
            self._reader.join()
        self._writer.join()
        self._process = None
        process.close()
        line.close()

    def _how(self) -> str:
        assert self._process is not None
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return "does not answer any more"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    # ---- what is asked, on any loop

    async def answer(self, keys: Sequence[bytes], request: RemoteRequest) -> AsyncGenerator[ReplicaMessage]:
        """Give out what is computed for a request. Raises EngineClosedError when the process ends before."""
        async with aclosing(self._messages(ANSWER, request)) as messages:
            async for message in messages:
                if isinstance(message, _Last):
                    return
                yield message

    async def broadcast(self, what: str) -> Mapping[str, Any]:
        """Return what the process says of its `state`, `experts` or `metrics`, or of `clear` how many blocks
        it has forgotten, by its name; nothing if it does not answer."""
        with suppress(EngineClosedError, TimeoutError):
            async with asyncio.timeout(_STATE), aclosing(self._messages(what, None)) as messages:
                async for message in messages:
                    return {self._name: message.told}
        return {}

    async def _messages(self, what: str, given: object) -> AsyncGenerator[Any]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        with self._lock:
            if self._gone:
                raise EngineClosedError(self._gone)
            self._number += 1
            number = self._number
            self._asked[number] = asyncio.get_running_loop(), queue
        over = False
        try:
            self._send((number, what, given))
            while not over:
                if isinstance(message := await queue.get(), EngineClosedError):
                    over = True
                    raise message
                over = isinstance(message, _Last)
                yield message
        finally:
            with self._lock:
                self._asked.pop(number, None)
            if not over:
                self._send((number, LEAVE, None))

    def _send(self, message: object) -> None:
        """Have a message written, behind those before it; None is the last."""
        self._orders.put(pickle.dumps(message))

    # ---- the threads that write and read

    def _write(self) -> None:
        assert self._line is not None
        with suppress(OSError):  # The reader sees that it is gone, and says why.
            while (order := self._orders.get()) != _STOP:
                self._line.send_bytes(order)
            self._line.send_bytes(order)

    def _read(self) -> None:
        assert self._line is not None
        assert self._process is not None
        try:
            while True:
                match self._line.recv():
                    case _Remark(level, text):
                        self._note(level, text)
                    case _Failed(fault):  # Whether it can end by itself is not waited for.
                        self._over(str(fault))
                    case number, message:
                        with self._lock:
                            asked = self._asked.get(number)
                        if asked is not None:
                            _hand(asked, message)
        except (EOFError, OSError):
            self._over(f"its process {self._how()}")
        except Exception as fault:
            _LOG.error("what an engine says cannot be read, a bug of penstock; report it", exc_info=fault)
            self._process.kill()
            self._over(f"what it says cannot be read: {fault}")

    def _over(self, why: str) -> None:
        """Tell all that wait that there is no engine any more."""
        with self._lock:
            if self._gone:
                return
            self._gone = f"the engine of {self._name} has ended: {why}; send the request again"
            left = list(self._asked.values())
        for asked in left:
            _hand(asked, EngineClosedError(self._gone))
        if not self._stopping:
            self._ended(why)

    def _note(self, level: int, text: str) -> None:
        _LOG.log(level, "%s: %s", self._name, text)


def _hand(asked: Asked, message: object) -> None:
    loop, queue = asked
    with suppress(RuntimeError):  # The loop has been closed, and waits for nothing.
        loop.call_soon_threadsafe(queue.put_nowait, message)


def hardware_of(device: str) -> Hardware:
    """Return the machine with this device, as a process of its own sees it: this one takes nothing of a GPU.
    Raises PenstockErrors."""
    process, line = _started(_tell_hardware, device)
    try:
        found = line.recv()
    except EOFError as lost:
        raise EngineClosedError("the process that looked at the machine has ended; see the log") from lost
    finally:
        process.join(_GRACE)
        line.close()
    if isinstance(found, PenstockError):
        raise found
    assert isinstance(found, Hardware)
    return found


def _started(work: Callable[..., None], *given: object) -> tuple[BaseProcess, Connection]:
    """Start a process that does this work with the other end of a pipe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    resource_tracker.ensure_running()  # It unblocks signals when it starts its process.
    near, far = context.Pipe()
    with far:
        process = context.Process(target=work, args=(far, *given), name="penstock engine", daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process, near


# ---- in the other process


def _tell_hardware(line: Connection, device: str) -> None:
    try:
        line.send(read_hardware(choose_device(device)))
    except PenstockError as fault:
        line.send(fault)


def _run_engine(line: Connection, config: Config, name: str) -> None:
    """Load a model, and compute what is asked until the pipe says that it is enough, or ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sending = threading.Lock()

    def send(message: object) -> None:
        with sending, suppress(OSError):  # Who is gone is told nothing.
            line.send(message)

    with _remarks(send):
        try:
            if config.threads is not None:
                torch.set_num_threads(config.threads)
            gc.freeze()  # What is imported stays, and loading collects garbage twice.
            llm = LLM.from_config(config, progress=False)
        except PenstockError as fault:
            send(_Failed(fault))
            return
        gc.collect()
        gc.freeze()
        asyncio.run(_Served(line, send, llm, name).run())
        llm.close()


@contextmanager
def _remarks(send: Callable[[object], None]) -> Iterator[None]:
    """Send what is logged to the server, which decides what of it is shown."""

    class Sent(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            send(_Remark(record.levelno, self.format(record)))

    log, handler = logging.getLogger("penstock"), Sent(logging.INFO)
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Served:
    """Computes what comes through the pipe. All is done by one loop, but for the thread that reads."""

    def __init__(self, line: Connection, send: Callable[[object], None], llm: LLM, name: str) -> None:
        self._line, self._send, self._llm, self._name = line, send, llm, name
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        loop, orders = asyncio.get_running_loop(), asyncio.Queue[Any]()
        metrics, backend = Metrics(), LocalBackend(self._llm)
        # Those who wait are counted in front.
        self._broker = broker = RequestBroker(
            backend, metrics, queue=sys.maxsize, afterwards="this process of the server ends"
        )
        metrics.watch(backend, lambda: broker.outputs)
        monitor = StateMonitor(backend, broker, self._name)
        self._told: Mapping[str, Callable[[], Any]] = {
            "state": lambda: msgspec.to_builtins(monitor.look()),
            EXPERTS: lambda: msgspec.to_builtins(monitor.experts()),
            "metrics": lambda: metrics.text().decode(),
            CLEAR: self._llm.clear_prefix_cache,
        }

        def read() -> None:
            with suppress(EOFError, OSError):
                while (order := self._line.recv()) is not None:
                    loop.call_soon_threadsafe(orders.put_nowait, order)
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(orders.put_nowait, None)

        self._send(_Loaded(ReplicaInfo.of(self._llm)))
        threading.Thread(target=read, name="penstock orders", daemon=True).start()
        failing = asyncio.ensure_future(broker.failure())
        failing.add_done_callback(lambda _: orders.put_nowait(None))
        while (order := await orders.get()) is not None:
            number, what, given = order
            if what == LEAVE:
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
                continue
            work = self._answer(number, given) if what == ANSWER else self._tell(number, what)
            self._tasks[number] = task = asyncio.ensure_future(work)
            task.add_done_callback(partial(self._over, number))
        if failing.done() and (fault := failing.result()) is not None:
            self._send(_Failed(EngineClosedError(str(fault))))
        await broker.close(0)
        await failing

    def _over(self, number: int, task: "asyncio.Task[None]") -> None:
        del self._tasks[number]
        if not task.cancelled() and (fault := task.exception()) is not None:
            _LOG.error("a request has failed; the traceback shows a bug of penstock, so report it: %r", fault)
            self._send((number, EngineClosedError(f"the request has failed: {fault}; see the server's log")))

    async def _answer(self, number: int, request: RemoteRequest) -> None:
        async with aclosing(computed(self._llm.reader, self._broker, self._name, request)) as messages:
            async for message in messages:
                self._send((number, message))
        if self._broker.open:  # Else it may not be whole: the end of the pipe is the end of it.
            self._send((number, _Last()))

    async def _tell(self, number: int, what: str) -> None:
        told = self._told[what]
        found = await asyncio.to_thread(told) if what in _ASIDE else told()
        self._send((number, _Last(found)))
