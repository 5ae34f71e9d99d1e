"""Follows a client's connection: HTTP as uvicorn reads it, with an end to what a client can make the server
keep or wait for.

Uvicorn reads whatever comes. Here a request's head has a size and a time, its body a least rate, and a
request behind one that has not been answered is not read: the connection ends with that answer, and a client
that goes before it is noticed. Beyond as many connections as there may be open files, a new one is refused.

A request may be answered before all of it has come, such as with a refusal. If the connection were closed
then, what is still on its way would have the client's machine drop the answer. So the connection lingers:
what comes is thrown away for a while, as far as there is room for that.

Each write is a system call, and many small ones take the loop longer than what they say. So what is said of
an answer in one turn of the loop is written as one, and the head of a stream with its first piece, if that
comes soon.
"""

import asyncio
import resource
from asyncio.events import TimerHandle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from penstock.server.answers.completions import error

MOST_HEAD = 64 << 10
"""Bytes of a request's line and headers, and of what follows its body."""
_LONGEST_HEAD = 30.0
"""Seconds that they may take."""
_LOOK = 30.0
"""Seconds over which a body's rate is taken."""
_SLOWEST = 1 << 10
"""Bytes of a body a second, at least."""
_LONGEST_STALL = 300.0
"""Seconds in which a client that has much to read has read hardly anything."""
_LINGER, _LONGEST_LINGER = 2.0, 30.0
"""Seconds that a connection lingers with nothing coming, and at most."""
_MOST_THROWN, _FEW_THROWN = 64 << 20, 256 << 10
"""Bytes that are thrown away behind an answer, and behind a refusal of what is no request."""
_MOST_LINGERING = 64
"""Connections; any more are closed at once."""
_THROWN_RATE = 64 << 20
"""Bytes/s that are thrown away, of all connections."""
_JOINED = 64 << 10
"""Bytes that are held at most: a client that does not read is known by what was written."""
_HEAD_WAIT = 0.02
"""Seconds that the head of a stream waits for its first piece."""
_KEY = "penstock.connection"
_ENOUGH, _OTHERS = 1 << 16, 128
"""Open files: as many as are ever needed, and those that are no connections."""
_REFUSALS = {
    400: (
        "the request is not HTTP; check the port, and use http:// instead of https://, since this server "
        "has no TLS",
        "invalid_request_error",
    ),
    408: (
        f"the request did not come to its end in time: its headers may take {_LONGEST_HEAD:g} s, and its "
        f"body must come at {_SLOWEST:,} bytes a second; send it faster",
        "timeout_error",
    ),
    431: (
        f"the request's line and headers have more than {MOST_HEAD:,} bytes; send fewer or shorter ones",
        "invalid_request_error",
    ),
    503: (
        "the server has as many connections as it may have; try again later, or raise its limit of open "
        "files (ulimit -n)",
        "server_error",
    ),
}
"""Messages and kinds of errors where no route is asked."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits the connections that there may be. most: of all. at_once: of those that come before the first of
    them is looked at; where files run out meanwhile, asyncio says that again and again, and does nothing
    else."""

    most: int
    at_once: int


@cache
def room() -> ConnectionLimits:
    """Return as many connections as open files allow, after raising that limit as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _ENOUGH
    if resource.RLIM_INFINITY not in (soft, hard):
        files = max(soft, min(hard, _ENOUGH))
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    at_once = min(2048, files // 4)
    return ConnectionLimits(max(files - at_once - _OTHERS, at_once), at_once)


class _EarlyError(Exception):
    """A request has come before the answer to the one before."""


def connection_of(scope: Scope) -> "Connection | None":
    """Return the connection that a request has come by; None if it is not one of ours."""
    found: Connection | None = scope.get(_KEY)
    return found


class _AnswerWriter:
    """Writes answers to a connection, which lingers where it would be closed. What is held goes out in order
    and before all else: `write` adds to it, and whoever writes or closes otherwise, where something may be
    held, asks for `flush` first."""

    def __init__(self, connection: "Connection", transport: asyncio.Transport) -> None:
        self._connection, self._transport = connection, transport
        self.is_closing, self.close = transport.is_closing, connection.part
        self._held: list[bytes] = []
        self._size = 0
        """Bytes that are held."""
        self._timer: asyncio.Handle | None = None
        """Writes what is held."""
        self.begins = False
        """Whether nothing was said yet in reply to the request."""

    def write(self, data: bytes) -> None:
        """Write at the end of this turn of the loop. The head of a stream waits for its first piece."""
        cycle, loop = self._connection.cycle, self._connection.loop
        begins, self.begins = self.begins and cycle.response_started, False
        # Before the answer there is 100 Continue.
        if self._size + len(data) > _JOINED or not cycle.response_started:
            self.flush()
            self._transport.write(data)
            return
        self._held.append(data)
        self._size += len(data)
        if begins and cycle.chunked_encoding:
            self._timer = loop.call_later(_HEAD_WAIT, self.flush)
        elif self._timer is None or isinstance(self._timer, TimerHandle):
            self._cancel()
            self._timer = loop.call_soon(self.flush)

    def flush(self, more: bytes = b"") -> None:
        """Write what is held, and this behind it."""
        self._cancel()
        if self._held:
            more = b"".join([*self._held, more])
            self._held.clear()
            self._size = 0
        if more:
            self._transport.write(more)

    def drop(self) -> None:
        """Forget what is held: nobody is there."""
        self._cancel()
        self._held.clear()
        self._size = 0

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_lingering: "set[Connection]" = set()


class Connection(HttpToolsProtocol):
    """Follows one client's connection: it refuses what is too large, too slow or not HTTP."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._head = 0
        """Bytes since a message began, or since its body went on."""
        self._body = 0
        """Bytes since the last look."""
        self._deaf = False
        """Whether what comes is thrown away."""
        self._thrown = 0
        """Bytes that may still be thrown away."""
        self._heard = False
        """Whether any were since the last look."""
        self._linger_end = 0.0
        self._gone: Callable[[], object] | None = None
        """Is called when the client goes before its answer is whole."""
        self._timer: TimerHandle | None = None
        self._stall: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, or refuse the connection if there are too many."""
        super().connection_made(transport)
        self._writer = _AnswerWriter(self, transport)
        self._wait(_LONGEST_HEAD, self._late)
        if len(self.connections) > room().most:
            self._refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, forget what is held and tell who watches."""
        self._wait()
        self._writer.drop()
        _lingering.discard(self)
        self.resume_writing()
        super().connection_lost(exc)
        self._tell_gone()

    def data_received(self, data: bytes) -> None:
        """Parse what has come, up to the largest head."""
        if self._deaf:
            if self in _lingering:
                self._throw(len(data))
            return
        self._head += len(data)
        super().data_received(data)
        if self._head > MOST_HEAD and not self._deaf:
            self._refuse(431)

    def push(self, piece: bytes) -> None:
        """Send a piece of an answer that has begun: now, or when there is room. Ask `pushes` first."""
        if piece:  # What is empty would be the end.
            chunked = self.cycle.chunked_encoding
            self._writer.flush(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)

    @property
    def is_whole(self) -> bool:
        """Tell whether all of the request has come."""
        return not self.cycle.more_body

    def watch(self, gone: Callable[[], object] | None) -> None:
        """Call this when the client goes before its answer is whole, now if it has gone; None ends that."""
        self._gone = gone
        if gone is not None:
            self.flow.resume_reading()  # That of a large body was paused, and no end would be seen.
        if self.cycle.disconnected:
            self._tell_gone()

    def _tell_gone(self) -> None:
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()

    @property
    def pushes(self) -> bool:
        """Tell whether the client is there, and takes what there is of the answer."""
        return not (self.cycle.disconnected or self.flow.write_paused)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        if not self._deaf:
            self._refuse(400)

    # ---- what the parser has found

    def on_message_begin(self) -> None:
        """Begin a request, or close the connection if it comes before the last answer was sent."""
        if self._answers:
            self.cycle.keep_alive = False
            self._deaf = True
            raise _EarlyError
        if self._timer is None:
            self._wait(_LONGEST_HEAD, self._late)
        super().on_message_begin()
        cast(dict[str, object], self.scope)[_KEY] = self

    def on_headers_complete(self) -> None:
        """Begin to watch how fast the body comes."""
        self._body = 0
        self._wait(_LOOK, self._look)
        super().on_headers_complete()
        self._writer.begins = True
        self.cycle.transport = cast(Any, self._writer)

    def on_body(self, body: bytes) -> None:
        """Count a part of the body."""
        self._head = 0
        self._body += len(body)
        if self in _lingering:
            self._throw(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop waiting for the body."""
        self._head = 0
        self._wait()
        _lingering.discard(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Write what is held, and linger if the rest of the body still comes."""
        self._writer.flush()
        super().on_response_complete()
        if self.cycle.more_body and self not in _lingering and not self.transport.is_closing():
            self._linger(_MOST_THROWN)

    # ---- the end of a connection on which something still comes

    def part(self) -> None:
        """End it behind an answer."""
        self._writer.flush()
        if self.cycle.more_body and not self.transport.is_closing():
            self._part_from(_MOST_THROWN)
        else:
            self.transport.close()

    def _part_from(self, most: int) -> None:
        """Say no more, and throw away as many bytes of what comes."""
        self._deaf = True
        if self._linger(most):
            self.transport.write_eof()

    def _linger(self, most: int) -> bool:
        """Throw away as many bytes of what comes. Return False, with the connection closed, if there is no
        room."""
        if len(_lingering) >= _MOST_LINGERING:
            self.transport.close()
            return False
        _lingering.add(self)
        self._thrown, self._linger_end = most, self.loop.time() + _LONGEST_LINGER
        self.flow.resume_reading()
        self._wait(_LINGER, self._look_at_lingering)
        return True

    def _throw(self, size: int) -> None:
        """Count what has come, and read no more for as long as all that linger may take for it."""
        self._heard = True
        self._thrown -= size
        if self._thrown < 0:
            self.transport.close()
            return
        self.flow.pause_reading()
        self.loop.call_later(size * len(_lingering) / _THROWN_RATE, self.flow.resume_reading)

    def _look_at_lingering(self) -> None:
        if not self._heard or self.loop.time() > self._linger_end:
            self.transport.close()
            return
        self._heard = False
        self._wait(_LINGER, self._look_at_lingering)

    # ---- time

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(_LONGEST_STALL, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting for the client, which reads again."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def _wait(self, seconds: float = 0.0, then: Any = None) -> None:
        """Set the only timer; without arguments none is left."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if then is None else self.loop.call_later(seconds, then)

    def _look(self) -> None:
        if self._body < _SLOWEST * _LOOK and not self.flow.read_paused:
            self._late()
            return
        self._body = 0
        self._wait(_LOOK, self._look)

    def _late(self) -> None:
        self._timer = None
        if self._head or self._answers:
            self._refuse(408)
        else:
            self.transport.close()

    @property
    def _answers(self) -> bool:
        """Tell whether an answer is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int) -> None:
        """Answer with an error where no route is asked, and read no more requests."""
        self._deaf = True
        if self._answers and (self.cycle.response_started or not self.cycle.more_body):
            self.transport.abort()
        else:
            if self._answers:  # The route waits for the rest of the body, and is told that the client went.
                self.cycle.disconnected = True
                self.cycle.message_event.set()
                self._tell_gone()
            body = msgspec.json.encode(error(*_REFUSALS[status]))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
                body
            )
            self.transport.write(STATUS_LINE[status] + head + body)
            if status == 503:
                self.transport.close()
            else:
                self._part_from(_FEW_THROWN)
