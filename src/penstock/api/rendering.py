"""Chat templates are rendered in processes of their own: one that takes too long, or too much memory, ends with its process.

A template is a program that came with the checkpoint. The sandbox keeps it from the system; what it computes it can make as large as it
likes, in one operation that no count of steps sees and no thread can break off.

Why this is safe: a process has one request at a time. Whoever sends it owns the process until the whole answer is there, and kills it if
anything else comes of that, so no answer is ever taken for another request's. A forked process has none of its parent's.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from time import monotonic
from typing import Any

from penstock.base.errors import RequestError

PROCESSES = 4
"""At a time: one that takes long does not hold up the others."""
SECONDS = 5.0
"""Of a processor, for one rendering."""
MEMORY = 1 << 30
"""Bytes of addresses that a process may have: its own, some 60 MiB, included."""
_PATIENCE = 60.0
"""Seconds by the clock, on a machine with much else to do."""
_LENGTH = 8
_CHILD = """
import sys
sys.path[:] = sys.argv[3:]
from penstock.api.rendering import serve
serve(float(sys.argv[1]), int(sys.argv[2]))
"""


class Template:
    """A chat template by its source. Threads may share it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._variables: frozenset[str] | None = None

    @property
    def variables(self) -> frozenset[str]:
        """Of those that it is given, the ones that it reads; there may be others in it. Raises RequestError if it cannot be compiled."""
        if self._variables is None:
            self._variables = frozenset(_answer({"source": self._source}))
        return self._variables

    def render(self, variables: Mapping[str, object]) -> str:
        """Raises RequestError for whatever goes wrong in the template, and for what JSON cannot hold."""
        return str(_answer({"source": self._source, "variables": variables}))


def _answer(asked: Mapping[str, object]) -> Any:
    try:
        sent = json.dumps(asked).encode()
    except (TypeError, ValueError, RecursionError) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise RequestError(f"messages, tools and template variables must be what JSON can hold: {what}") from error
    with _room:
        process = _take()
        try:
            answer = json.loads(process.ask(sent))
        except BaseException as error:
            process.kill()
            if not isinstance(error, EOFError | OSError):
                raise
            raise RequestError(
                f"the model's chat template does not take these messages: it took more than {SECONDS:g} seconds or {MEMORY >> 20} MiB; "
                f"repair it or use plain prompts"
            ) from error
        _idle.append(process)
    if "fault" in answer:
        raise RequestError(answer["fault"])
    return answer["found"]


class _Process:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(SECONDS), str(MEMORY), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, sent: bytes) -> bytes:
        """Raises EOFError if it ends before there is an answer, TimeoutError if there is none for long, OSError if it has ended."""
        assert self._process.stdin is not None
        late, pipe = monotonic() + _PATIENCE, self._process.stdin.fileno()
        left = memoryview(len(sent).to_bytes(_LENGTH, "little") + sent)
        while left:  # It reads all before it writes.
            _wait(pipe, select.POLLOUT, late)
            left = left[os.write(pipe, left) :]
        size = int.from_bytes(self._read(_LENGTH, late), "little")
        return self._read(size, late)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read(self, size: int, late: float) -> bytes:
        assert self._process.stdout is not None
        parts, left, pipe = [], size, self._process.stdout.fileno()
        while left:
            _wait(pipe, select.POLLIN, late)
            part = os.read(pipe, min(left, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def _wait(pipe: int, event: int, late: float) -> None:
    """Raises TimeoutError."""
    poll = select.poll()  # A server may have more files open than select takes.
    poll.register(pipe, event)
    if not poll.poll(1000 * max(late - monotonic(), 0.0)):
        raise TimeoutError


_idle: list[_Process] = []
_room = threading.BoundedSemaphore(PROCESSES)


def _take() -> _Process:
    """One that nobody else has."""
    while True:
        try:
            process = _idle.pop()
        except IndexError:
            return _Process()
        if process.alive:
            return process
        process.kill()


def _forget() -> None:
    """In a forked process, which shares its parent's pipes."""
    global _room
    _idle.clear()
    _room = threading.BoundedSemaphore(PROCESSES)


def _end() -> None:
    while _idle:
        _idle.pop().kill()


os.register_at_fork(after_in_child=_forget)
atexit.register(_end)


def serve(seconds: float, memory: int) -> None:
    """All that such a process does, until nobody writes to it any more. seconds: of each rendering. memory: bytes."""
    from penstock.api.chat_template import ChatTemplate

    _limit(memory)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to every process.
    compiled: dict[str, ChatTemplate] = {}
    into, out = sys.stdin.buffer, sys.stdout.buffer
    while head := into.read(_LENGTH):
        asked = json.loads(into.read(int.from_bytes(head, "little")))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # Ends the process, whatever it does.
        try:
            source = asked["source"]
            if source not in compiled:
                compiled[source] = ChatTemplate(source)
            template = compiled[source]
            found: object = template.render(asked["variables"]) if "variables" in asked else sorted(template.variables)
            answer: Mapping[str, object] = {"found": found}
        except RequestError as fault:
            if isinstance(fault.__cause__, MemoryError):
                return  # As where the system ends it.
            answer = {"fault": str(fault)}
        text = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(len(text).to_bytes(_LENGTH, "little") + text)
        out.flush()


def _limit(memory: int) -> None:
    """Memory, and what it leaves where it is ended."""
    import resource

    for which, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(OSError, ValueError):  # Some systems have no such limit.
            resource.setrlimit(which, (most, most))
