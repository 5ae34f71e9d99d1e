"""Answers the routes of the API: a request is read and checked here, and submitted to the broker."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock import __version__
from penstock.api.reader import PromptReader
from penstock.base.errors import EngineClosedError
from penstock.server.answers.completions import Answer
from penstock.server.answers.messages import count_message, read_message
from penstock.server.answers.prompts import chat_tokens, read
from penstock.server.answers.protocols import MESSAGES, Protocol, protocol_of
from penstock.server.answers.responses import read_response
from penstock.server.broker.metrics import CONTENT_TYPE
from penstock.server.http import ollama
from penstock.server.http.adapters import load_adapter, unload_adapter
from penstock.server.http.asking import adapter_of, asked_of, body_of, in_time, lent, prepared_for
from penstock.server.http.embedding import embed, score
from penstock.server.http.errors import error_response, no_route
from penstock.server.http.keys import NO_OWNER, owner_of
from penstock.server.http.on_demand import metrics_of_all, state_of_all
from penstock.server.http.openapi import described
from penstock.server.http.origins import OriginGuard, shared_with
from penstock.server.http.page import FILES, page_file
from penstock.server.http.sending import (
    GONE,
    completed,
    json_response,
    responded,
    told_forecast,
    told_ignored,
)
from penstock.server.http.sleeping import is_sleeping, sleep, wake_up
from penstock.server.http.state import ServerSettings, ServerState
from penstock.server.monitoring.logs import note_request
from penstock.server.monitoring.records import RecordMiddleware, RequestRecord, record_of
from penstock.server.wire.decoding import FieldError
from penstock.server.wire.embeddings import EmbeddingsRequest
from penstock.server.wire.messages import CountTokensRequest, MessagesRequest
from penstock.server.wire.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from penstock.server.wire.responses import ResponsesRequest
from penstock.server.wire.scores import RERANK_PATHS, SCORE_PATHS, RerankRequest, ScoreRequest


def application(server: ServerState) -> ASGIApp:
    """Return the ASGI application of a server: routes, and what stands around them."""
    asked: list[tuple[str, str, Handler]] = [
        ("GET", "/health", _health),
        ("GET", "/ready", _ready),
        ("GET", "/openapi.json", _openapi),
        ("GET", "/version", _version),
        ("POST", "/reset_prefix_cache", _reset_prefix_cache),
        ("POST", "/sleep", sleep),
        ("POST", "/wake_up", wake_up),
        ("GET", "/is_sleeping", is_sleeping),
        ("GET", "/metrics", _metrics),
        ("GET", "/state", _state),
        ("GET", "/experts", _experts),
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{name:path}", _model),
        ("POST", "/v1/load_lora_adapter", load_adapter),
        ("POST", "/v1/unload_lora_adapter", unload_adapter),
        ("POST", "/v1/chat/completions", partial(_generate, kind=ChatRequest)),
        ("POST", "/v1/completions", partial(_generate, kind=CompletionRequest)),
        ("POST", "/v1/embeddings", partial(embed, kind=EmbeddingsRequest)),
        *[("POST", path, partial(score, kind=ScoreRequest)) for path in SCORE_PATHS],
        *[("POST", path, partial(score, kind=RerankRequest)) for path in RERANK_PATHS],
        ("POST", "/v1/responses", _respond),
        ("GET", "/v1/responses/{name}", _response),
        ("DELETE", "/v1/responses/{name}", _drop),
        ("POST", MESSAGES, _message),
        ("POST", f"{MESSAGES}/count_tokens", _count_tokens),
        *ollama.ROUTES,
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
        *[("GET", path, page_file) for path in FILES],
    ]
    found: dict[str, dict[str, Handler]] = {}
    for method, path, handler in asked:
        found.setdefault(path, {})[method] = handler
    # One route a path: what it does not take is refused with all that it does.
    routed = {path: _route(server, path, handlers) for path, handlers in found.items()}
    routes = [Route(path, routed[path], methods=list(handlers)) for path, handlers in found.items()]
    app = Starlette(routes=routes, exception_handlers={HTTPException: no_route})
    app.router.redirect_slashes = False  # It would send clients to whatever their Host header says.
    direct = _DirectRoutes(
        app, {(method, path): routed[path] for method, path, _ in asked if "{" not in path}
    )
    allowed = server.settings.allow_origins
    inner = shared_with(direct, allowed) if allowed else direct
    doors = OriginGuard(inner, server.settings.allow_hosts, allowed, keys=bool(server.settings.keys))
    return RecordMiddleware(doors, (*server.sinks, note_request))


# ---- what stands around every route


class _DirectRoutes:
    """Takes a shorter way to routes than Starlette's, which costs a fifth of what a request takes of the
    loop. Routes raise nothing that Starlette would have to answer."""

    def __init__(
        self, app: ASGIApp, routes: Mapping[tuple[str, str], Callable[[Request], Awaitable[Response]]]
    ) -> None:
        """Wrap an application, which answers all that is not among the routes by method and path."""
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        response = await route(Request(scope, receive, send))
        await response(scope, receive, send)


_OPEN = ("/health", "/ready", "/version", "/openapi.json", *FILES)
"""Asked by what has no key."""
Handler = Callable[[ServerState, Request], Awaitable[Response]]


def _route(
    server: ServerState, path: str, handlers: Mapping[str, Handler]
) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of a path: its handlers behind the check of keys, and errors as clients know them."""

    async def route(request: Request) -> Response:
        record = record_of(request)
        record.route = path
        response = await told_forecast(await answered(request, record), record.calls)
        if len(server.settings.keys) > 1 and 400 <= response.status_code < 500:
            with suppress(asyncio.CancelledError):  # The server ends: then it is answered at once.
                await server.refusals.turn(record.owner)
        server.metrics.answered(path, response.status_code)
        if protocol_of(path) is Protocol.ANTHROPIC:
            response.headers["request-id"] = record.id  # Where its clients look.
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
            return error_response(EngineClosedError(closed), path, record.id)
        except ClientDisconnect:
            return Response(status_code=GONE)
        except Exception as fault:
            record.fault = (
                str(fault.status_code) if isinstance(fault, HTTPException) else type(fault).__name__
            )
            return error_response(fault, path, record.id)
        finally:
            server.uploads.release(request)

    return route


def _owner(settings: ServerSettings, request: Request) -> bytes:
    """Return what stands for the key that was sent. Raise HTTPException for a key that is not one of the
    server's, if that has any."""
    if not settings.keys:
        return NO_OWNER
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":  # Anthropic's clients send it so.
        given = request.headers.get("x-api-key", "")
    sent = given.strip().encode("latin-1")  # As Starlette has read it; the bytes are the client's.
    # Each is compared, in a time that tells nothing of how much of it was right.
    right = [hmac.compare_digest(sent, key.secret) for key in settings.keys]
    if not sent or not any(right):
        raise HTTPException(
            401,
            "the API key is missing or not one of this server's; send it as 'Authorization: Bearer KEY' or "
            "'x-api-key: KEY'",
        )
    record_of(request).least_priority = (
        settings.keys[right.index(True)].priority if len(settings.keys) > 1 else None
    )
    return owner_of(sent)


# ---- routes


async def _health(server: ServerState, request: Request) -> Response:
    return json_response({"status": "alive"})


async def _ready(server: ServerState, request: Request) -> Response:
    if server.models is not None:
        status = "closing" if server.models.closing else "ready"
    elif server.broker is None:
        status = "loading"
    elif server.fleet is not None and not server.fleet.replicas:
        status = "waiting for a replica"
    elif server.broker.paused:
        status = "asleep"
    else:
        status = "ready" if server.broker.open else "closing"
    return json_response({"status": status}, 200 if status == "ready" else 503)


async def _version(server: ServerState, request: Request) -> Response:
    return json_response({"version": __version__})


async def _reset_prefix_cache(server: ServerState, request: Request) -> Response:
    if server.models is None:
        server.model()
    if len(server.settings.keys) > 1:
        raise HTTPException(
            403,
            "the prefix cache holds what all keys have sent, so none of several may clear it; restart the "
            "server",
        )
    if server.models is not None:
        cleared = [await one.fleet.clear() for one in server.hosted if one.fleet is not None]
        return json_response({"cleared_blocks": sum(cleared)})
    if server.clear_prefixes is None:
        raise HTTPException(501, "replicas clear no caches; restart the server to begin with empty ones")
    return json_response({"cleared_blocks": await asyncio.to_thread(server.clear_prefixes)})


async def _models(server: ServerState, request: Request) -> Response:
    names = [*server.settings.names, *server.adapters]
    return json_response({"object": "list", "data": [_described(server, name) for name in names]})


async def _model(server: ServerState, request: Request) -> Response:
    name = request.path_params["name"]
    adapter_of(server, name)
    return json_response(_described(server, name))


def _described(server: ServerState, name: str) -> Answer:
    more: Answer = {}
    if server.models is not None:
        model = server.models.models[name]
        there = model.there.state.reader if model.there is not None else None
        longest = server.listed[name].max_model_len if there is None else there.limits.max_model_len
        more = {"state": str(model.phase)}
        if model.fault:
            more["fault"] = model.fault
    else:
        longest = server.model()[0].limits.max_model_len
        if name not in (names := server.settings.names):
            more = {"parent": names[0]}
    return {
        "id": name,
        "object": "model",
        "created": server.loaded,
        "owned_by": "penstock",
        "max_model_len": longest,
        **more,
    }


async def _generate(
    server: ServerState, request: Request, kind: type[ChatRequest] | type[CompletionRequest]
) -> Response:
    server, asked = await asked_of(server, request, kind)
    ready, writer = await prepared_for(server, request, asked, read)
    return told_ignored(await completed(request, server.model()[1], ready, writer, asked), asked.ignored)


async def _respond(server: ServerState, request: Request) -> Response:
    server, asked = await asked_of(server, request, ResponsesRequest)
    name, owner = asked.previous_response_id, record_of(request).owner
    before = b"" if name is None else server.responses.conversation(name, owner, "previous_response_id")
    ready, response = await prepared_for(server, request, asked, partial(read_response, before=before))
    if asked.stores:
        response.keep = partial(server.responses.put, owner)
    return told_ignored(await responded(request, server.model()[1], ready, response, asked), asked.ignored)


async def _message(server: ServerState, request: Request) -> Response:
    server, asked = await asked_of(server, request, MessagesRequest)
    ready, message = await prepared_for(server, request, asked, read_message)
    return told_ignored(await responded(request, server.model()[1], ready, message, asked), asked.ignored)


async def _count_tokens(server: ServerState, request: Request) -> Response:
    def checked(asked: CountTokensRequest) -> None:
        adapter_of(server, *asked.names)
        asked.check()

    asked = await body_of(server, request, CountTokensRequest, checked)
    server = await lent(server, request, asked.names)
    reader, _ = server.model()
    count = server.uploads.aside(request, lambda: count_message(reader, asked, server.dialect))
    return json_response({"input_tokens": await in_time(server, request, count)})


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
    if server.models is not None:
        return Response(await metrics_of_all(server, own), media_type=CONTENT_TYPE)
    return Response(own if server.fleet is None else await server.fleet.metrics(own), media_type=CONTENT_TYPE)


async def _state(server: ServerState, request: Request) -> Response:
    if server.models is not None:
        found: object = await state_of_all(server)
        return json_response(found, headers={"Cache-Control": "no-store"})
    _, broker = server.model()
    if server.fleet is not None:
        found = await server.fleet.state(broker)
    else:
        assert server.monitor is not None
        found = server.monitor.look()
    return json_response(found, headers={"Cache-Control": "no-store"})


async def _experts(server: ServerState, request: Request) -> Response:
    if server.models is not None:
        if not server.hosted:
            raise EngineClosedError("no model is loaded; a request for one loads it")
        server = server.hosted[0]
    server.model()
    if server.fleet is not None:
        found: object = await server.fleet.experts()
    else:
        assert server.monitor is not None
        found = await asyncio.to_thread(server.monitor.experts)
    return json_response(found, headers={"Cache-Control": "no-store"})


async def _reader_of(
    server: ServerState, request: Request, name: str | None
) -> tuple[ServerState, PromptReader]:
    """Return the state of a model, the first if none is named, and what reads its prompts."""
    if server.models is None:
        server.model()
    name = name or server.settings.names[0]
    adapter_of(server, name)
    server = await lent(server, request, (name,))
    return server, server.model()[0]


async def _tokenize(server: ServerState, request: Request) -> Response:
    asked = await body_of(server, request, TokenizeRequest, TokenizeRequest.check)
    server, reader = await _reader_of(server, request, asked.model)

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

    return json_response(await in_time(server, request, server.uploads.aside(request, tokenized)))


async def _detokenize(server: ServerState, request: Request) -> Response:
    asked = await body_of(server, request, DetokenizeRequest, lambda _: None)
    server, reader = await _reader_of(server, request, asked.model)
    text = server.uploads.aside(request, lambda: reader.decode(asked.tokens))
    return json_response({"prompt": await in_time(server, request, text)})
