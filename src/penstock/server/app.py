"""The routes of the API: what is asked is read and checked here, and computed at the desk."""

import asyncio
import hmac
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, field
from time import time
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message as Event
from starlette.types import Receive, Scope, Send

from penstock.api.jobs import Ready
from penstock.api.llm import LLM
from penstock.api.outputs import Completion, Delta
from penstock.base.errors import CheckpointError, EngineClosedError, LengthError, PenstockError, RequestError
from penstock.server.answers import Answer, error
from penstock.server.desk import BusyError, Call, Desk
from penstock.server.metrics import CONTENT_TYPE, Metrics
from penstock.server.prompts import Telling, chat_tokens, read
from penstock.server.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FieldError,
    TokenizeRequest,
    blamed,
    decoded,
)

T = TypeVar("T")
_LOG = logging.getLogger("penstock")
_GONE = 499
"""What is noted of a request whose client has gone."""
_LARGE = 1 << 20
"""Bytes of a request from which on it is read when no other such is."""


@dataclass(frozen=True, slots=True)
class Settings:
    """names: by which clients ask for the model, the first is told. keys: one of which a client must send, if there are any.
    most_body: bytes of a request."""

    names: tuple[str, ...]
    keys: tuple[bytes, ...] = ()
    most_body: int = 32 << 20


@dataclass(slots=True)
class House:
    """What the routes work with. There is no model while it is being loaded."""

    settings: Settings
    llm: LLM | None = None
    desk: Desk | None = None
    loaded: int = 0
    """When, in seconds since 1970."""
    metrics: Metrics = field(default_factory=Metrics)
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Held while a large request is read."""

    def open(self, llm: LLM, desk: Desk) -> None:
        self.llm, self.desk, self.loaded = llm, desk, int(time())
        self.metrics.watch(llm, desk)

    def model(self) -> tuple[LLM, Desk]:
        if self.llm is None or self.desk is None:
            raise EngineClosedError("the model is being loaded; ask /ready until it is there")
        return self.llm, self.desk


def application(house: House) -> Starlette:
    asked = [
        ("GET", "/health", _health),
        ("GET", "/ready", _ready),
        ("GET", "/metrics", _metrics),
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{name:path}", _model),
        ("POST", "/v1/chat/completions", _chat),
        ("POST", "/v1/completions", _complete),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
    ]
    routes = [Route(path, _told(house, path, handler), methods=[method]) for method, path, handler in asked]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


# ---- what stands around every route

_OPEN = ("/health", "/ready")
"""Asked by what has no key."""
Handler = Callable[[House, Request], Awaitable[Response]]


def _told(house: House, path: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """The handler behind the check of keys, its errors as clients know them."""

    async def route(request: Request) -> Response:
        response = await answered(request)
        house.metrics.answered(path, response.status_code)
        return response

    async def answered(request: Request) -> Response:
        try:
            # Not request.url, in which the client's Host header may have a part.
            if request.scope["path"] not in _OPEN:
                _check_key(house.settings, request)
            return await handler(house, request)
        except asyncio.CancelledError:  # The end of the server has not waited for this, such as for a body that does not come.
            return _refusal(EngineClosedError("the server is shutting down; send the request again, to another one or later"))
        except ClientDisconnect:
            return Response(status_code=_GONE)
        except Exception as fault:
            return _refusal(fault)

    return route


def _check_key(settings: Settings, request: Request) -> None:
    if not settings.keys:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip().encode("latin-1")  # As Starlette has read it; the bytes are the client's.
    # Each is compared, in a time that tells nothing of how much of it was right.
    right = [hmac.compare_digest(sent, key) for key in settings.keys]
    if scheme.lower() != "bearer" or not any(right):
        raise HTTPException(401, "the API key is missing or not one of this server's; send it as 'Authorization: Bearer KEY'")


def _refusal(fault: Exception) -> Response:
    """The error as an answer."""
    match fault:
        case FieldError():
            return _json(error(str(fault), "invalid_request_error", fault.param), 400)
        case LengthError():
            return _json(error(str(fault), "invalid_request_error", code="context_length_exceeded"), 400)
        case RequestError():
            return _json(error(str(fault), "invalid_request_error", blamed(fault)), 400)
        case CheckpointError():  # It lacks a tokenizer; token ids would do.
            return _json(error(str(fault), "invalid_request_error"), 400)
        case BusyError() if not fault.seconds:
            return _json(error(str(fault), "invalid_request_error", "n"), 400)
        case BusyError():
            return _json(error(str(fault), "rate_limit_error", code="queue_full"), 429, {"Retry-After": str(round(fault.seconds))})
        case EngineClosedError():
            return _json(error(str(fault), "server_error", code="unavailable"), 503, {"Retry-After": "5"})
        case HTTPException():
            invalid = "invalid_request_error"
            kinds = {401: ("authentication_error", None, "invalid_api_key"), 404: (invalid, "model", "model_not_found")}
            return _json(error(str(fault.detail), *kinds.get(fault.status_code, (invalid, None, None))), fault.status_code)
        case PenstockError():
            return _json(error(str(fault), "server_error"), 500)
    _LOG.error("a request has failed", exc_info=fault)
    return _json(error(_said(fault), "server_error"), 500)


def _said(fault: Exception) -> str:
    """What a client is told of it: of what was not foreseen, not much."""
    return str(fault) if isinstance(fault, PenstockError) else f"the server has failed with {type(fault).__name__}; its log says more"


def _no_route(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, HTTPException)
    path = request.scope["path"][:200]
    message = f"{path} does not take {request.method}" if fault.status_code == 405 else f"there is nothing at {path}"
    return _json(error(message, "invalid_request_error"), fault.status_code, fault.headers)


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


async def _body(house: House, request: Request, kind: type[T]) -> T:
    """Raises FieldError, or HTTPException for one that is too large."""
    most, parts, size = house.settings.most_body, [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise HTTPException(413, f"the request has more than {most} bytes, which is all this server reads of one; send less")
        parts.append(part)
    request.state.size = size
    return decoded(b"".join(parts), kind)


async def _aside(house: House, request: Request, read: Callable[[], T]) -> T:
    """Done on another thread. Large requests, which may take ten seconds and gigabytes, come one by one: small ones find a thread."""
    async with house.large if request.state.size > _LARGE else nullcontext():
        return await asyncio.to_thread(read)


def _check_model(house: House, name: str) -> None:
    if name not in house.settings.names:
        raise HTTPException(404, f"the model {name[:200]!r} does not exist here; there is {', '.join(house.settings.names)}")


# ---- routes


async def _health(house: House, request: Request) -> Response:
    return _json({"status": "alive"})


async def _ready(house: House, request: Request) -> Response:
    if house.desk is None:
        return _json({"status": "loading"}, 503)
    return _json({"status": "ready"}) if house.desk.open else _json({"status": "closing"}, 503)


async def _models(house: House, request: Request) -> Response:
    return _json({"object": "list", "data": [_described(house, name) for name in house.settings.names]})


async def _model(house: House, request: Request) -> Response:
    name = request.path_params["name"]
    _check_model(house, name)
    return _json(_described(house, name))


def _described(house: House, name: str) -> Answer:
    llm, _ = house.model()
    longest = llm.booted.engine.scheduler.longest
    return {"id": name, "object": "model", "created": house.loaded, "owned_by": "penstock", "max_model_len": longest}


async def _chat(house: House, request: Request) -> Response:
    return await _generate(house, request, ChatRequest)


async def _complete(house: House, request: Request) -> Response:
    return await _generate(house, request, CompletionRequest)


async def _generate(house: House, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
    asked = await _body(house, request, kind)
    _check_model(house, asked.model)
    asked.check()
    llm, desk = house.model()
    desk.check_room(asked.outputs)
    ready, telling = await _aside(house, request, lambda: read(llm, asked))
    return await _answered(request, desk, ready, telling, asked)


async def _metrics(house: House, request: Request) -> Response:
    return Response(house.metrics.text(), media_type=CONTENT_TYPE)


async def _tokenize(house: House, request: Request) -> Response:
    asked = await _body(house, request, TokenizeRequest)
    asked.check()
    llm, _ = house.model()
    _check_model(house, asked.model or house.settings.names[0])

    def tokenized() -> Answer:
        if asked.messages is not None:
            tokens = chat_tokens(llm, asked.messages, asked)
        else:
            tokens = llm.tokenizer.encode(asked.prompt or "", special=asked.add_special_tokens)
        answer: Answer = {"count": len(tokens), "max_model_len": llm.booted.engine.scheduler.longest, "tokens": tokens}
        if asked.return_token_strs:
            answer["token_strs"] = [llm.tokenizer.token_text(token) for token in tokens]
        return answer

    return _json(await _aside(house, request, tokenized))


async def _detokenize(house: House, request: Request) -> Response:
    asked = await _body(house, request, DetokenizeRequest)
    llm, _ = house.model()
    _check_model(house, asked.model or house.settings.names[0])
    return _json({"prompt": await _aside(house, request, lambda: llm.decode(asked.tokens))})


# ---- answers


async def _answered(
    request: Request, desk: Desk, ready: Sequence[Ready], telling: Telling, asked: ChatRequest | CompletionRequest
) -> Response:
    """The outputs of all prompts, whole or as they come. A client that goes takes its calls with it."""
    calls = desk.ask(ready)
    if asked.streams:
        return _Live(_told_live(calls, telling, tells_usage=asked.tells_usage), lambda: _leave(calls))
    try:
        completions = await _unless_gone(request.receive, _all(calls))
    finally:
        _leave(calls)
    if completions is None:
        return Response(status_code=_GONE)
    return _json(telling.whole(completions))


async def _all(calls: Sequence[Call]) -> list[Completion]:
    return [await call.completion() for call in calls]


async def _told_live(calls: Sequence[Call], telling: Telling, *, tells_usage: bool) -> AsyncGenerator[bytes]:
    """Events, as pieces come of any of the calls."""
    try:
        async with aclosing(_merged(calls)) as merged:
            async for number, deltas in merged:
                for chunk in telling.pieces(number, deltas):
                    yield _event(chunk | {"usage": None} if tells_usage else chunk)
        if tells_usage:
            yield _event(telling.last([call.so_far() for call in calls]))
    except Exception as fault:
        # The status has been sent: that is all that can still be said.
        if not isinstance(fault, PenstockError):
            _LOG.error("a stream has failed", exc_info=fault)
        yield _event(error(_said(fault), "server_error"))
        return
    yield b"data: [DONE]\n\n"


async def _merged(calls: Sequence[Call]) -> AsyncGenerator[tuple[int, Sequence[Delta]]]:
    if len(calls) == 1:
        async for deltas in calls[0].pieces():
            yield 0, deltas
        return
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


def _leave(calls: Sequence[Call]) -> None:
    for call in calls:
        call.leave()


class _Live(Response):
    """A stream of events, which ends when the client goes, also while there is nothing to send."""

    def __init__(self, events: AsyncGenerator[bytes], over: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._over = events, over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_gone(receive, self._send(send))
        except asyncio.CancelledError:
            _LOG.info("a client has not read its answer to the end")
        finally:
            self._over()
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        with suppress(OSError):  # The client has gone.
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless_gone(receive: Callable[[], Awaitable[Event]], work: Coroutine[Any, Any, T]) -> T | None:
    """What comes of the work; None if the client goes before it is done, which ends it."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, waiting):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
