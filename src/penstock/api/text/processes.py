"""Processes for work that may take too long or too much memory, or that holds the interpreter's lock while
others want it.

Why this is safe: a process has one request at a time. The sender owns the process until the whole
answer is there, and kills it if anything else comes of that, so no answer is ever taken for another
request's. A forked process has none of its parent's.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from time import monotonic

from penstock.base.wanted import expect_wanted

_LENGTH = 8
_GLANCE = 0.1
"""Seconds between two looks at whether an answer is still wanted."""
_READY = b"r"
"""The first that comes of a process, when it has started."""
_CHILD = """
import sys
_, module, function, count, *rest = sys.argv
sys.path[:] = rest[int(count) :]
from importlib import import_module
getattr(import_module(module), function)(*rest[: int(count)])
"""


class Process:
    """Answers requests, one after the other, in a process of its own."""

    def __init__(self, module: str, function: str, given: Sequence[str], *, yields: bool = False) -> None:
        """Start the process.

        function: is called there with what is given, and calls `serve`.
        yields: whether it leaves the processor to whatever else wants it.
        """
        self.yields, self._started = yields, False
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, module, function, str(len(given)), *given, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        if yields:
            self._yield()

    @property
    def alive(self) -> bool:
        """Tell whether the process runs."""
        return self._process.poll() is None

    def ask(self, sent: bytes, patience: float, briefly: float | None = None) -> bytes:
        """Return the answer to what is sent.

        patience: seconds in which there must be one.
        briefly: seconds after which the process yields from then on; its start does not count.

        Raise EOFError if it ends before there is an answer, TimeoutError if there is none in time, and
        OSError if it has ended.
        """
        assert self._process.stdin is not None
        late, pipe = monotonic() + patience, self._process.stdin.fileno()
        if not self._started:
            self._read(len(_READY), late)
            self._started = True
        for part in (len(sent).to_bytes(_LENGTH, "little"), sent):
            left = memoryview(part)
            while left:  # It reads all before it writes.
                _wait(pipe, select.POLLOUT, late)
                left = left[os.write(pipe, left) :]
        if briefly is not None and not self.yields and not _comes(self._answers, select.POLLIN, briefly):
            self._yield()
        size = int.from_bytes(self._read(_LENGTH, late), "little")
        return self._read(size, late)

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    @property
    def _answers(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def _yield(self) -> None:
        self.yields = True
        with contextlib.suppress(OSError):  # It has ended.
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)

    def _read(self, size: int, late: float) -> bytes:
        parts, left, pipe = [], size, self._answers
        while left:
            _wait(pipe, select.POLLIN, late)
            part = os.read(pipe, min(left, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def _wait(pipe: int, event: int, late: float) -> None:
    """Raise TimeoutError, or UnwantedError when nobody waits for it any more."""
    while not _comes(pipe, event, min(late - monotonic(), _GLANCE)):
        expect_wanted()
        if monotonic() >= late:
            raise TimeoutError


def _comes(pipe: int, event: int, seconds: float) -> bool:
    poll = select.poll()  # A server may have more files open than select takes.
    poll.register(pipe, event)
    return bool(poll.poll(1000 * max(seconds, 0.0)))


class Pool:
    """Keeps a few processes that do the same, started when they are wanted. Threads may share it."""

    def __init__(self, most: int, start: Callable[[], Process], briefly: float | None = None) -> None:
        """Start none yet.

        most: processes at a time; others wait.
        start: starts a process.
        briefly: seconds after which one that still works leaves the processor to whatever else wants it, and
            ends with its answer; None is never. Only root can take that back.
        """
        self._most, self._start, self._briefly = most, start, briefly
        self._idle: list[Process] = []
        self._room = threading.BoundedSemaphore(most)
        _pools.add(self)
        weakref.finalize(self, _end, self._idle)

    def ask(self, sent: bytes, patience: float) -> bytes:
        """Return what one of the processes answers. Raise OSError, TimeoutError included, or EOFError if it
        took too long or has ended, and UnwantedError when the answer is not waited for any more."""
        while not self._room.acquire(timeout=_GLANCE):
            expect_wanted()
        try:
            process = self._take()
            try:
                answer = process.ask(sent, patience, self._briefly)
            except BaseException:
                process.kill()
                raise
            if self._briefly is not None and process.yields:
                process.kill()
            else:
                self._idle.append(process)
        finally:
            self._room.release()
        return answer

    def end(self) -> None:
        """End the processes that have nothing to do. Others are started when they are wanted."""
        _end(self._idle)

    def _take(self) -> Process:
        """Return a process that is not in use."""
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return self._start()
            if process.alive:
                return process
            process.kill()

    def _forget(self) -> None:
        self._idle.clear()
        self._room = threading.BoundedSemaphore(self._most)


_pools: "weakref.WeakSet[Pool]" = weakref.WeakSet()


def _forget() -> None:
    """Forget all processes, in a forked process, which shares its parent's pipes."""
    for pool in _pools:
        pool._forget()


def _end(processes: list[Process]) -> None:
    while processes:
        processes.pop().kill()


os.register_at_fork(after_in_child=_forget)


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Answer what is sent, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to every process.
    into, out = sys.stdin.buffer, sys.stdout.buffer
    out.write(_READY)
    out.flush()
    while head := into.read(_LENGTH):
        found = answer(into.read(int.from_bytes(head, "little")))
        out.write(len(found).to_bytes(_LENGTH, "little"))
        out.write(found)
        out.flush()
