"""Sends answers: whole or as they come, to clients that may go at any moment."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message as Event
from starlette.types import Receive, Scope, Send

from penstock.api.outputs import Completion, Delta
from penstock.api.sequences import PreparedPrompt
from penstock.base.errors import PenstockError
from penstock.server.answers.completions import AnswerWriter, error
from penstock.server.answers.embeddings import EmbeddingWriter
from penstock.server.answers.scores import ScoreWriter
from penstock.server.broker.broker import RequestBroker
from penstock.server.broker.calls import Call
from penstock.server.http.connection import Connection, connection_of
from penstock.server.monitoring.records import record_of
from penstock.server.wire.embeddings import InputsRequest, PooledRequest
from penstock.server.wire.requests import ChatRequest, CompletionRequest, TokenRequest
from penstock.server.wire.scores import PairsRequest

T = TypeVar("T")
_LOG = logging.getLogger("penstock")
EVENTS = "text/event-stream"
PLACE, EXPECTED = "X-Queue-Position", "X-Expected-First-Token"
"""Tell how many outputs wait before a request, and the seconds until its first token."""
UNKNOWN = "unknown"
"""Stands for these seconds where nothing of the kind has been measured yet."""
_TOLD = 0.25
"""Seconds for which the headers of a stream wait for what a replica forecasts."""
IGNORED = "X-Ignored-Fields"
"""Names fields of a request that were taken and had no effect."""
GONE = 499
"""The status that is noted of a request when its client has gone."""


class AnswerStream(Protocol):
    """Writes one answer as it comes: as events or lines, and in the end as a whole."""

    media_type: str
    """The media type of its stream."""

    @property
    def response(self) -> object:
        """Return the answer, as far as it has come."""

    def events(self, call: Call) -> AsyncGenerator[bytes]:
        """Yield all that is to be streamed; nothing if no stream was asked for. Raises what keeps it from
        being complete."""

    def failure(self, message: str) -> bytes:
        """Return the last event, when something has kept the answer from being complete."""


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with this content as JSON."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def told_ignored(response: Response, names: Sequence[str]) -> Response:
    """Return a response whose headers name the fields of the request that had no effect."""
    if names:
        response.headers[IGNORED] = ", ".join(names)
    return response


async def told_forecast(response: Response, calls: Sequence[Call]) -> Response:
    """Return a response whose headers say what the first of its calls had before it when it came."""
    found = None
    with suppress(asyncio.CancelledError):  # The server ends: then it is answered without.
        found = await calls[0].foretold(_TOLD) if calls else None
    if found is not None:
        response.headers[PLACE] = str(found.place)
        response.headers[EXPECTED] = UNKNOWN if found.seconds is None else f"{found.seconds:.3f}"
    return response


def said(fault: Exception) -> str:
    """Return what a client reads of an error: of one that was not foreseen, not much."""
    return (
        str(fault)
        if isinstance(fault, PenstockError)
        else (
            f"the server has failed with {type(fault).__name__}, a bug of penstock; report it with the "
            "traceback in the server's log"
        )
    )


async def completed(
    request: Request,
    broker: RequestBroker,
    ready: Sequence[PreparedPrompt],
    writer: AnswerWriter,
    asked: ChatRequest | CompletionRequest,
) -> Response:
    """Return the outputs of all prompts, whole or as they come. A client that goes takes its calls with
    it."""
    calls = _submitted(request, broker, ready, asked)
    if asked.streams:
        events = _chunk_events(calls, writer, connection_of(request.scope), tells_usage=asked.tells_usage)
        return Live(events, lambda: leave(calls))

    async def whole() -> object:
        completions = [await call.completion() for call in calls]
        if asked.most_prompt_logprobs is None:
            return writer.whole(completions)
        # Prompts may be long, and those beside wait for the loop.
        return await asyncio.to_thread(writer.whole, completions)

    return await _whole(request, calls, whole())


async def embedded(
    request: Request,
    broker: RequestBroker,
    ready: Sequence[PreparedPrompt],
    writer: EmbeddingWriter,
    asked: InputsRequest,
) -> Response:
    """Return the embeddings of all prompts. A client that goes takes its calls with it."""
    calls = _submitted(request, broker, ready, asked)

    async def whole() -> object:
        return writer.whole([await call.completion() for call in calls])

    return await _whole(request, calls, whole())


async def scored(
    request: Request,
    broker: RequestBroker,
    ready: Sequence[PreparedPrompt],
    writer: ScoreWriter,
    asked: PairsRequest,
) -> Response:
    """Return the scores of what all prompts say, as many at a time as there is room for. A client that goes
    takes its calls with it."""
    calls, record = list[Call](), record_of(request)

    async def whole() -> object:
        completions = list[Completion]()
        with broker.room(len(ready), record.owner) as most:
            for first in range(0, len(ready), most):
                begun = _submitted(request, broker, ready[first : first + most], asked, kept=True)
                calls.extend(begun)
                record.calls = calls
                completions += [await call.completion() for call in begun]
        # There may be many, and those beside wait for the loop.
        return await asyncio.to_thread(writer.whole, completions)

    return await _whole(request, calls, whole())


async def responded(
    request: Request,
    broker: RequestBroker,
    ready: Sequence[PreparedPrompt],
    stream: AnswerStream,
    asked: TokenRequest,
) -> Response:
    """Return the answer to a request of one prompt, whole or as it comes. A client that goes takes its call
    with it."""
    calls = _submitted(request, broker, ready, asked)
    events = stream.events(calls[0])
    if asked.streams:
        return Live(_to_the_end(events, stream), lambda: leave(calls), stream.media_type)

    async def whole() -> object:
        async for _ in events:
            raise AssertionError("events are for streams")
        return stream.response

    return await _whole(request, calls, whole())


def _submitted(
    request: Request,
    broker: RequestBroker,
    ready: Sequence[PreparedPrompt],
    asked: TokenRequest | PooledRequest,
    *,
    kept: bool = False,
) -> Sequence[Call]:
    record = record_of(request)
    record.calls = broker.submit(ready, asked.timeout, record.began, record.owner, kept=kept)
    record.model, record.streams = asked.model, asked.streams
    return record.calls


async def _whole(request: Request, calls: Sequence[Call], work: Coroutine[Any, Any, object]) -> Response:
    """Return the answer that the work makes of calls. They end when the client goes."""
    try:
        answer = await unless_gone(request.scope, request.receive, work)
    finally:
        leave(calls)
    return Response(status_code=GONE) if answer is None else json_response(answer)


async def _to_the_end(events: AsyncGenerator[bytes], stream: AnswerStream) -> AsyncGenerator[bytes]:
    """Yield the events, and a last one that says what has failed, if something has."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except Exception as fault:
        if not isinstance(fault, PenstockError):
            _LOG.error(
                "a stream has failed; the traceback shows a bug of penstock, so report it", exc_info=fault
            )
        yield stream.failure(said(fault))


async def _chunk_events(
    calls: Sequence[Call], writer: AnswerWriter, connection: Connection | None, *, tells_usage: bool
) -> AsyncGenerator[bytes]:
    """Yield events, as pieces come of any of the calls. Those of a single one go to the connection without
    this being woken up for them."""

    def events(number: int, deltas: Sequence[Delta]) -> bytes:
        return b"".join(
            [
                _event(chunk | {"usage": None} if tells_usage else chunk)
                for chunk in writer.pieces(number, deltas)
            ]
        )

    def pushed(deltas: Sequence[Delta]) -> bool:
        if connection is None or not connection.pushes:
            return False
        connection.push(events(0, deltas))
        return True

    try:
        if len(calls) == 1:
            async for deltas in calls[0].pieces(pushed):
                yield events(0, deltas)
        else:
            async with aclosing(_merged(calls)) as merged:
                async for number, deltas in merged:
                    yield events(number, deltas)
        if tells_usage:
            yield _event(writer.last([call.so_far() for call in calls]))
    except Exception as fault:
        # The status has been sent: that is all that can still be said.
        if not isinstance(fault, PenstockError):
            _LOG.error(
                "a stream has failed; the traceback shows a bug of penstock, so report it", exc_info=fault
            )
        yield _event(error(said(fault), "server_error"))
        return
    yield b"data: [DONE]\n\n"


async def _merged(calls: Sequence[Call]) -> AsyncGenerator[tuple[int, Sequence[Delta]]]:
    news: asyncio.Queue[tuple[int, Sequence[Delta] | BaseException | None]] = asyncio.Queue()

    async def listen(number: int, call: Call) -> None:
        try:
            async for deltas in call.pieces():
                news.put_nowait((number, deltas))
            news.put_nowait((number, None))
        except PenstockError as fault:
            news.put_nowait((number, fault))

    listening = [asyncio.ensure_future(listen(number, call)) for number, call in enumerate(calls)]
    try:
        left = len(calls)
        while left:
            number, come = await news.get()
            if isinstance(come, BaseException):
                raise come
            if come is None:
                left -= 1
            else:
                yield number, come
    finally:
        for task in listening:
            task.cancel()


def _event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def leave(calls: Sequence[Call]) -> None:
    """End calls that their client wants no more."""
    for call in calls:
        call.leave()


class Live(StreamingResponse):
    """Streams events, and ends when the client goes, also while there is nothing to send."""

    def __init__(
        self, events: AsyncGenerator[bytes], over: Callable[[], None], media_type: str = EVENTS
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type=media_type)
        self._events, self._over = events, over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes."""
        try:
            with suppress(OSError):  # The client has gone.
                await unless_gone(scope, receive, self.stream_response(send))
        except asyncio.CancelledError:
            _LOG.info("a client has not read its answer to the end")
        finally:
            self._over()
            await self._events.aclose()


async def unless_gone(
    scope: Scope, receive: Callable[[], Awaitable[Event]], work: Coroutine[Any, Any, T]
) -> T | None:
    """Return what comes of the work; None if the client goes before it is done, which ends it."""
    working, left = asyncio.ensure_future(work), False

    def leave() -> None:
        nonlocal left
        left = True
        working.cancel()

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    connection = connection_of(scope)
    waiting = None if connection is not None else asyncio.ensure_future(gone())
    if connection is not None:
        connection.watch(leave)
    try:
        return await working
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if left and not (task is not None and task.cancelling()):
            return None
        raise
    finally:
        if connection is not None:
            connection.watch(None)
        if waiting is not None:
            waiting.cancel()
