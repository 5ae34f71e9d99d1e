"""Answers the routes of the API: a request is read and checked here, and submitted to the broker."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.api.reader import PromptReader
from penstock.api.sequences import PreparedPrompt
from penstock.base.errors import EngineClosedError
from penstock.server.answers.completions import Answer
from penstock.server.answers.prompts import chat_tokens, read
from penstock.server.answers.responses import read_response
from penstock.server.broker.calls import overdue
from penstock.server.broker.metrics import CONTENT_TYPE
from penstock.server.http.errors import error_response, no_route
from penstock.server.http.keys import NO_OWNER, owner_of, salt_of
from penstock.server.http.openapi import described
from penstock.server.http.origins import OriginGuard, is_json
from penstock.server.http.page import FILES, page_file
from penstock.server.http.sending import GONE, completed, json_response, responded, unless_gone
from penstock.server.http.state import ServerSettings, ServerState
from penstock.server.http.uploads import SMALL
from penstock.server.monitoring.logs import note_request
from penstock.server.monitoring.records import RecordMiddleware, RequestRecord, record_of
from penstock.server.parsing.dialects import Dialect
from penstock.server.wire.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FieldError,
    TokenizeRequest,
    decoded,
    expect_few_values,
)
from penstock.server.wire.responses import ResponsesRequest

T = TypeVar("T")
U = TypeVar("U")
G = TypeVar("G", bound=ChatRequest | CompletionRequest | ResponsesRequest)
"""A request for tokens."""


def application(server: ServerState) -> ASGIApp:
    """Return the ASGI application of a server: routes, and what stands around them."""
    asked: list[tuple[str, str, Handler]] = [
        ("GET", "/health", _health),
        ("GET", "/ready", _ready),
        ("GET", "/openapi.json", _openapi),
        ("GET", "/metrics", _metrics),
        ("GET", "/state", _state),
        ("GET", "/experts", _experts),
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{name:path}", _model),
        ("POST", "/v1/chat/completions", partial(_generate, kind=ChatRequest)),
        ("POST", "/v1/completions", partial(_generate, kind=CompletionRequest)),
        ("POST", "/v1/responses", _respond),
        ("GET", "/v1/responses/{name}", _response),
        ("DELETE", "/v1/responses/{name}", _drop),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
        *[("GET", path, page_file) for path in FILES],
    ]
    found: dict[str, dict[str, Handler]] = {}
    for method, path, handler in asked:
        found.setdefault(path, {})[method] = handler
    # One route a path: what it does not take is refused with all that it does.
    routes = [
        Route(path, _route(server, path, handlers), methods=list(handlers))
        for path, handlers in found.items()
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: no_route})
    app.router.redirect_slashes = False  # It would send clients to whatever their Host header says.
    doors = OriginGuard(app, server.settings.allow_hosts, keys=bool(server.settings.keys))
    return RecordMiddleware(doors, (*server.sinks, note_request))


# ---- what stands around every route

_OPEN = ("/health", "/ready", "/openapi.json", *FILES)
"""Asked by what has no key."""
Handler = Callable[[ServerState, Request], Awaitable[Response]]


def _route(
    server: ServerState, path: str, handlers: Mapping[str, Handler]
) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of a path: its handlers behind the check of keys, and errors as clients know them."""

    async def route(request: Request) -> Response:
        record = record_of(request)
        record.route = path
        response = await answered(request, record)
        if len(server.settings.keys) > 1 and 400 <= response.status_code < 500:
            with suppress(asyncio.CancelledError):  # The server ends: then it is answered at once.
                await server.refusals.turn(record.owner)
        server.metrics.answered(path, response.status_code)
        return response

    async def answered(request: Request, record: RequestRecord) -> Response:
        try:
            # Not request.url, in which the client's Host header may have a part.
            if request.scope["path"] not in _OPEN:
                record.owner = _owner(server.settings, request)
            return await handlers["GET" if request.method == "HEAD" else request.method](server, request)
        except asyncio.CancelledError:
            # The end of the server has not waited for this, such as for a body that does not come.
            closed = "the server is shutting down; send the request to another server, or again later"
            return error_response(EngineClosedError(closed))
        except ClientDisconnect:
            return Response(status_code=GONE)
        except Exception as fault:
            record.fault = (
                str(fault.status_code) if isinstance(fault, HTTPException) else type(fault).__name__
            )
            return error_response(fault)
        finally:
            server.uploads.release(request)

    return route


def _owner(settings: ServerSettings, request: Request) -> bytes:
    """Return what stands for the key that was sent. Raise HTTPException for a key that is not one of the
    server's, if that has any."""
    if not settings.keys:
        return NO_OWNER
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip().encode("latin-1")  # As Starlette has read it; the bytes are the client's.
    # Each is compared, in a time that tells nothing of how much of it was right.
    right = [hmac.compare_digest(sent, key.secret) for key in settings.keys]
    if scheme.lower() != "bearer" or not sent or not any(right):
        raise HTTPException(
            401, "the API key is missing or not one of this server's; send it as 'Authorization: Bearer KEY'"
        )
    record_of(request).least_priority = (
        settings.keys[right.index(True)].priority if len(settings.keys) > 1 else None
    )
    return owner_of(sent)


async def _body(server: ServerState, request: Request, kind: type[T], check: Callable[[T], object]) -> T:
    """Return what a body says, after `check` of that.

    A large body is decoded and checked on a thread, where large ones are read. Raise FieldError,
    HTTPException for a body that is not declared as JSON, and what `Uploads.body` and `check` do.
    """
    if not is_json(request.scope):
        raise HTTPException(415, "the body must be declared as JSON; send 'Content-Type: application/json'")
    body = await server.uploads.body(request)
    opened = partial(_opened, body, kind, check)
    if len(body) <= SMALL:
        return opened()
    return await _in_time(server, request, server.uploads.opened(request, opened))


def _opened(body: bytes, kind: type[T], check: Callable[[T], object]) -> T:
    if len(body) > SMALL:
        expect_few_values(body)
    asked = decoded(body, kind)
    check(asked)
    return asked


async def _in_time(
    server: ServerState, request: Request, work: Coroutine[Any, Any, T], timeout: float | None = None
) -> T:
    """Return the result of the work that reads a request, which ends with its time.

    timeout: seconds that the request may take, which run since it has come. Raise DeadlineError when they are
    over, and ClientDisconnect when the client of a large request goes before.
    """
    seconds = None if server.broker is None else server.broker.allowed_seconds(timeout)
    late = None if seconds is None else seconds - (monotonic() - record_of(request).began)
    try:
        async with asyncio.timeout(late):
            if not server.uploads.is_large(request):
                return await work
            if (found := await unless_gone(request.receive, work)) is None:
                raise ClientDisconnect
            return found
    except TimeoutError as error:
        assert seconds is not None
        raise overdue(seconds) from error


def _check_model(server: ServerState, name: str) -> None:
    if name not in server.settings.names:
        raise HTTPException(
            404, f"the model {name[:200]!r} does not exist here; there is {', '.join(server.settings.names)}"
        )


# ---- routes


async def _health(server: ServerState, request: Request) -> Response:
    return json_response({"status": "alive"})


async def _ready(server: ServerState, request: Request) -> Response:
    if server.broker is None:
        status = "loading"
    elif server.fleet is not None and not server.fleet.replicas:
        status = "waiting for a replica"
    else:
        status = "ready" if server.broker.open else "closing"
    return json_response({"status": status}, 200 if status == "ready" else 503)


async def _models(server: ServerState, request: Request) -> Response:
    return json_response(
        {"object": "list", "data": [_described(server, name) for name in server.settings.names]}
    )


async def _model(server: ServerState, request: Request) -> Response:
    name = request.path_params["name"]
    _check_model(server, name)
    return json_response(_described(server, name))


def _described(server: ServerState, name: str) -> Answer:
    reader, _ = server.model()
    return {
        "id": name,
        "object": "model",
        "created": server.loaded,
        "owned_by": "penstock",
        "max_model_len": reader.limits.max_model_len,
    }


async def _generate(
    server: ServerState, request: Request, kind: type[ChatRequest] | type[CompletionRequest]
) -> Response:
    asked = await _asked(server, request, kind)
    ready, writer = await _prepared(server, request, asked, read)
    return await completed(request, server.model()[1], ready, writer, asked)


async def _respond(server: ServerState, request: Request) -> Response:
    asked = await _asked(server, request, ResponsesRequest)
    name, owner = asked.previous_response_id, record_of(request).owner
    before = b"" if name is None else server.responses.conversation(name, owner, "previous_response_id")
    ready, response = await _prepared(server, request, asked, partial(read_response, before=before))
    return await responded(request, server.model()[1], ready, response, server.responses, asked)


async def _asked(server: ServerState, request: Request, kind: type[G]) -> G:
    """Return a request for tokens that its key may send, and for whose outputs there is room. Raise what
    `_body` and `RequestBroker.check_room` do."""

    def outputs(asked: G) -> int:
        _check_model(server, asked.model)
        asked.check()
        return asked.outputs

    asked = await _body(server, request, kind, outputs)
    record, (_, broker) = record_of(request), server.model()
    least = record.least_priority
    if least is not None and asked.priority < least:
        raise FieldError(
            f"priority {asked.priority} is not allowed for this key; send {least} or more, or leave priority "
            "out",
            "priority",
        )
    broker.check_room(asked.outputs, record.owner)
    return asked


async def _prepared(
    server: ServerState,
    request: Request,
    asked: G,
    read: Callable[[PromptReader, G, Dialect | None], tuple[list[PreparedPrompt], U]],
) -> tuple[list[PreparedPrompt], U]:
    """Return a request's prompts, and what `read` makes beside them. Raise what `_in_time` and `read` do."""
    reader, _ = server.model()
    salt = salt_of(record_of(request).owner, asked.cache_salt, share=server.settings.share_prefixes)

    def prepared() -> tuple[list[PreparedPrompt], U]:
        ready, writer = read(reader, asked, server.dialect)
        return [one.salted(salt) for one in ready], writer

    return await _in_time(server, request, server.uploads.aside(request, prepared), asked.timeout)


async def _response(server: ServerState, request: Request) -> Response:
    if request.query_params.get("stream", "false") != "false":
        raise FieldError("a stored response cannot be streamed; leave stream out", "stream")
    return Response(
        server.responses.answer(request.path_params["name"], record_of(request).owner),
        media_type="application/json",
    )


async def _drop(server: ServerState, request: Request) -> Response:
    name = request.path_params["name"]
    server.responses.drop(name, record_of(request).owner)
    return json_response({"id": name, "object": "response", "deleted": True})


async def _openapi(server: ServerState, request: Request) -> Response:
    return Response(described(keys=bool(server.settings.keys)), media_type="application/json")


async def _metrics(server: ServerState, request: Request) -> Response:
    own = server.metrics.text()
    return Response(own if server.fleet is None else await server.fleet.metrics(own), media_type=CONTENT_TYPE)


async def _state(server: ServerState, request: Request) -> Response:
    _, broker = server.model()
    if server.fleet is not None:
        found: object = await server.fleet.state(broker)
    else:
        assert server.monitor is not None
        found = server.monitor.look()
    return json_response(found, headers={"Cache-Control": "no-store"})


async def _experts(server: ServerState, request: Request) -> Response:
    server.model()
    if server.fleet is not None:
        found: object = await server.fleet.experts()
    else:
        assert server.monitor is not None
        found = await asyncio.to_thread(server.monitor.experts)
    return json_response(found, headers={"Cache-Control": "no-store"})


async def _tokenize(server: ServerState, request: Request) -> Response:
    asked = await _body(server, request, TokenizeRequest, TokenizeRequest.check)
    reader, _ = server.model()
    _check_model(server, asked.model or server.settings.names[0])

    def tokenized() -> Answer:
        tokens = (
            reader.encode(asked.prompt or "", special=asked.add_special_tokens)
            if asked.messages is None
            else chat_tokens(reader, asked, server.dialect)
        )
        answer: Answer = {
            "count": len(tokens),
            "max_model_len": reader.limits.max_model_len,
            "tokens": tokens,
        }
        if asked.return_token_strs:
            answer["token_strs"] = [reader.tokenizer.token_text(token) for token in tokens]
        return answer

    return json_response(await _in_time(server, request, server.uploads.aside(request, tokenized)))


async def _detokenize(server: ServerState, request: Request) -> Response:
    asked = await _body(server, request, DetokenizeRequest, lambda _: None)
    reader, _ = server.model()
    _check_model(server, asked.model or server.settings.names[0])
    text = server.uploads.aside(request, lambda: reader.decode(asked.tokens))
    return json_response({"prompt": await _in_time(server, request, text)})
