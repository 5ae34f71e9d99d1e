"""The routes of the API: what is asked is read and checked here, and computed at the desk."""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, time
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.api.jobs import Ready
from penstock.api.llm import LLM
from penstock.base.errors import CheckpointError, EngineClosedError, LengthError, PenstockError, RequestError
from penstock.server.answers import Answer, error
from penstock.server.desk import BusyError, DeadlineError, Desk, overdue
from penstock.server.doors import Doors, is_json
from penstock.server.fleet.desk import Fleet
from penstock.server.kept import Kept, NotKeptError
from penstock.server.metrics import CONTENT_TYPE, Metrics
from penstock.server.openapi import described
from penstock.server.page import FILES, told
from penstock.server.parsing.dialects import AUTO, Dialect, dialect_of
from penstock.server.prompts import Telling, chat_tokens, read
from penstock.server.responses import Told, read_response
from penstock.server.sending import GONE, completed, json_response, responded, said, unless_gone
from penstock.server.tenants import NOBODY, Key, Refusals, owner_of, salt_of
from penstock.server.uploads import SMALL, Uploads
from penstock.server.watching.accounts import Accounts, Teller, account_of
from penstock.server.watching.logs import note_request
from penstock.server.watching.state import Watch
from penstock.server.wire.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FieldError,
    TokenizeRequest,
    blamed,
    decoded,
    expect_few_values,
)
from penstock.server.wire.responses import ResponsesRequest

T = TypeVar("T")
U = TypeVar("U")
_LOG = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Settings:
    """names: by which clients ask for the model, the first is told. keys: one of which a client must send, if
    there are any. most_body: bytes of a request. tool_parser, reasoning_parser: as `dialect_of` takes them.
    most_kept: bytes of responses that clients may come back to. allow_hosts: names by which this machine is
    asked, if there are no keys; see Doors."""

    names: tuple[str, ...]
    keys: tuple[Key, ...] = ()
    most_body: int = 32 << 20
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO
    most_kept: int = 64 << 20
    allow_hosts: tuple[str, ...] = ()
    share_prefixes: bool = False
    """Whether prefixes that one key has sent are found by others too, who can tell by the time that it
    takes."""


@dataclass(slots=True)
class House:
    """What the routes work with. There is no model while it is being loaded."""

    settings: Settings
    llm: LLM | None = None
    desk: Desk | None = None
    watch: Watch | None = None
    fleet: Fleet | None = None
    """The desk, if replicas carry out its calls."""
    loaded: int = 0
    """When, in seconds since 1970."""
    metrics: Metrics = field(default_factory=Metrics)
    tellers: Sequence[Teller] = ()
    """Who is told of requests that are over, before the log is."""
    dialect: Dialect | None = None
    refusals: Refusals = field(default_factory=Refusals)
    kept: Kept = field(init=False)
    uploads: Uploads = field(init=False)

    def __post_init__(self) -> None:
        self.kept = Kept(self.settings.most_kept)
        self.uploads = Uploads(self.settings.most_body, keys=len(self.settings.keys))

    def open(self, llm: LLM, desk: Desk) -> None:
        self.llm, self.desk, self.loaded = llm, desk, int(time())
        if llm.has_tokenizer:
            llm.tokenizer.cut_aside()
            templates = llm.tokenizer.templates
            self.dialect = dialect_of(templates, self.settings.tool_parser, self.settings.reasoning_parser)
            if (
                self.dialect.calls is None
                and self.settings.tool_parser == AUTO
                and any("tools" in source for source in templates.values())
            ):
                _LOG.warning(
                    "the model takes tools, but how it calls them is not known: calls will be text; "
                    "--tool-parser may say more"
                )
        if isinstance(desk, Fleet):
            self.fleet = desk
            return
        self.watch = Watch(llm, desk, self.settings.names[0])
        self.metrics.watch(llm, desk)

    def model(self) -> tuple[LLM, Desk]:
        if self.llm is None or self.desk is None:
            raise EngineClosedError("the model is being loaded; ask /ready until it is there")
        return self.llm, self.desk


def application(house: House) -> ASGIApp:
    asked = [
        ("GET", "/health", _health),
        ("GET", "/ready", _ready),
        ("GET", "/openapi.json", _openapi),
        ("GET", "/metrics", _metrics),
        ("GET", "/state", _state),
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{name:path}", _model),
        ("POST", "/v1/chat/completions", _chat),
        ("POST", "/v1/completions", _complete),
        ("POST", "/v1/responses", _respond),
        ("GET", "/v1/responses/{name}", _response),
        ("DELETE", "/v1/responses/{name}", _drop),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
        *[("GET", path, _page) for path in FILES],
    ]
    found: dict[str, dict[str, Handler]] = {}
    for method, path, handler in asked:
        found.setdefault(path, {})[method] = handler
    # One route a path: what it does not take is refused with all that it does.
    routes = [
        Route(path, _told(house, path, handlers), methods=list(handlers)) for path, handlers in found.items()
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
    app.router.redirect_slashes = False  # It would send clients to whatever their Host header says.
    doors = Doors(app, house.settings.allow_hosts, keys=bool(house.settings.keys))
    return Accounts(doors, (*house.tellers, note_request))


# ---- what stands around every route

_OPEN = ("/health", "/ready", "/openapi.json", *FILES)
"""Asked by what has no key."""
Handler = Callable[[House, Request], Awaitable[Response]]


def _told(
    house: House, path: str, handlers: Mapping[str, Handler]
) -> Callable[[Request], Awaitable[Response]]:
    """The handler of the request's method, behind the check of keys, its errors as clients know them."""

    async def route(request: Request) -> Response:
        account_of(request).route = path
        response = await answered(request)
        if len(house.settings.keys) > 1 and 400 <= response.status_code < 500:
            with suppress(asyncio.CancelledError):  # The server ends: then it is told at once.
                await house.refusals.turn(account_of(request).owner)
        house.metrics.answered(path, response.status_code)
        return response

    async def answered(request: Request) -> Response:
        try:
            # Not request.url, in which the client's Host header may have a part.
            if request.scope["path"] not in _OPEN:
                account_of(request).owner = _owner(house.settings, request)
            return await handlers["GET" if request.method == "HEAD" else request.method](house, request)
        except (
            asyncio.CancelledError
        ):  # The end of the server has not waited for this, such as for a body that does not come.
            return _refusal(
                EngineClosedError(
                    "the server is shutting down; send the request again, to another one or later"
                )
            )
        except ClientDisconnect:
            return Response(status_code=GONE)
        except Exception as fault:
            account_of(request).fault = (
                str(fault.status_code) if isinstance(fault, HTTPException) else type(fault).__name__
            )
            return _refusal(fault)
        finally:
            house.uploads.release(request)

    return route


def _owner(settings: Settings, request: Request) -> bytes:
    """Who has sent it. Raises HTTPException for a key that is not one of the server's, if that has any."""
    if not settings.keys:
        return NOBODY
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip().encode("latin-1")  # As Starlette has read it; the bytes are the client's.
    # Each is compared, in a time that tells nothing of how much of it was right.
    right = [hmac.compare_digest(sent, key.secret) for key in settings.keys]
    if scheme.lower() != "bearer" or not sent or not any(right):
        raise HTTPException(
            401, "the API key is missing or not one of this server's; send it as 'Authorization: Bearer KEY'"
        )
    account_of(request).least_priority = (
        settings.keys[right.index(True)].priority if len(settings.keys) > 1 else None
    )
    return owner_of(sent)


def _check_priority(request: Request, asked: int) -> None:
    """Raises FieldError for one that its key may not ask for."""
    least = account_of(request).least_priority
    if least is not None and asked < least:
        raise FieldError(
            f"priority {asked} was asked for, but this key may ask for {least} at the least; raise it or "
            "leave it out",
            "priority",
        )


def _salt(house: House, request: Request, given: str | None) -> bytes:
    return salt_of(account_of(request).owner, given, share=house.settings.share_prefixes)


def _refusal(fault: Exception) -> Response:
    """The error as an answer."""
    match fault:
        case NotKeptError():
            return json_response(
                error(str(fault), "invalid_request_error", fault.param, "response_not_found"), 404
            )
        case FieldError():
            return json_response(error(str(fault), "invalid_request_error", fault.param), 400)
        case LengthError():
            return json_response(
                error(str(fault), "invalid_request_error", code="context_length_exceeded"), 400
            )
        case RequestError():
            return json_response(error(str(fault), "invalid_request_error", blamed(fault)), 400)
        case CheckpointError():  # It lacks a tokenizer; token ids would do.
            return json_response(error(str(fault), "invalid_request_error"), 400)
        case BusyError() if not fault.seconds:
            return json_response(error(str(fault), "invalid_request_error", "n"), 400)
        case BusyError():
            return json_response(
                error(str(fault), "rate_limit_error", code="queue_full"),
                429,
                {"Retry-After": str(round(fault.seconds))},
            )
        case DeadlineError():
            return json_response(error(str(fault), "timeout_error", "timeout", "deadline_exceeded"), 504)
        case EngineClosedError():
            return json_response(
                error(str(fault), "server_error", code="unavailable"), 503, {"Retry-After": "5"}
            )
        case HTTPException():
            invalid = "invalid_request_error"
            kinds = {
                401: ("authentication_error", None, "invalid_api_key"),
                404: (invalid, "model", "model_not_found"),
            }
            return json_response(
                error(str(fault.detail), *kinds.get(fault.status_code, (invalid, None, None))),
                fault.status_code,
            )
        case PenstockError():
            return json_response(error(str(fault), "server_error"), 500)
    _LOG.error("a request has failed", exc_info=fault)
    return json_response(error(said(fault), "server_error"), 500)


def _no_route(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, HTTPException)
    path = request.scope["path"][:200]
    message = (
        f"{path} does not take {request.method}"
        if fault.status_code == 405
        else f"there is nothing at {path}"
    )
    return json_response(error(message, "invalid_request_error"), fault.status_code, fault.headers)


async def _body(house: House, request: Request, kind: type[T], check: Callable[[T], U]) -> tuple[T, U]:
    """Return what a body says, and what `check` returns of that.

    A large body is decoded and checked on a thread, where large ones are read. Raises FieldError,
    HTTPException for a body that is not declared as JSON, and what `Uploads.body` and `check` do.
    """
    if not is_json(request.scope):
        raise HTTPException(415, "the body must be declared as JSON; send 'Content-Type: application/json'")
    body = await house.uploads.body(request)
    if len(body) <= SMALL:
        return _opened(body, kind, check)
    opened = house.uploads.opened(request, partial(_opened, body, kind, check))
    return await _in_time(house, request, _unless_left(request, opened))


def _opened(body: bytes, kind: type[T], check: Callable[[T], U]) -> tuple[T, U]:
    if len(body) > SMALL:
        expect_few_values(body)
    asked = decoded(body, kind)
    return asked, check(asked)


async def _aside(house: House, request: Request, read: Callable[[], T], timeout: float | None = None) -> T:
    """Return what `read` returns, on a thread. Raises what `_in_time` does."""
    work = house.uploads.aside(request, read)
    if house.uploads.is_large(request):
        work = _unless_left(request, work)
    return await _in_time(house, request, work, timeout)


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work does. Raises ClientDisconnect when the client goes before, which ends the work."""
    found = await unless_gone(request.receive, work)
    if found is None:
        raise ClientDisconnect
    return found


async def _in_time(
    house: House, request: Request, work: Coroutine[Any, Any, T], timeout: float | None = None
) -> T:
    """Return what the work does. timeout: seconds that the request may take, which run since it has come.
    Raises DeadlineError, and ends the work then."""
    seconds = None if house.desk is None else house.desk.seconds(timeout)
    late = None if seconds is None else seconds - (monotonic() - account_of(request).began)
    try:
        async with asyncio.timeout(late):
            return await work
    except TimeoutError as error:
        assert seconds is not None
        raise overdue(seconds) from error


def _check_model(house: House, name: str) -> None:
    if name not in house.settings.names:
        raise HTTPException(
            404, f"the model {name[:200]!r} does not exist here; there is {', '.join(house.settings.names)}"
        )


# ---- routes


async def _health(house: House, request: Request) -> Response:
    return json_response({"status": "alive"})


async def _ready(house: House, request: Request) -> Response:
    if house.desk is None:
        return json_response({"status": "loading"}, 503)
    if house.fleet is not None and not house.fleet.replicas:
        return json_response({"status": "waiting for a replica"}, 503)
    return (
        json_response({"status": "ready"}) if house.desk.open else json_response({"status": "closing"}, 503)
    )


async def _models(house: House, request: Request) -> Response:
    return json_response(
        {"object": "list", "data": [_described(house, name) for name in house.settings.names]}
    )


async def _model(house: House, request: Request) -> Response:
    name = request.path_params["name"]
    _check_model(house, name)
    return json_response(_described(house, name))


def _described(house: House, name: str) -> Answer:
    llm, _ = house.model()
    longest = llm.booted.engine.scheduler.longest
    return {
        "id": name,
        "object": "model",
        "created": house.loaded,
        "owned_by": "penstock",
        "max_model_len": longest,
    }


async def _chat(house: House, request: Request) -> Response:
    return await _generate(house, request, ChatRequest)


async def _complete(house: House, request: Request) -> Response:
    return await _generate(house, request, CompletionRequest)


async def _generate(
    house: House, request: Request, kind: type[ChatRequest] | type[CompletionRequest]
) -> Response:
    def checked(asked: ChatRequest | CompletionRequest) -> int:
        _check_model(house, asked.model)
        asked.check()
        return asked.outputs

    asked, outputs = await _body(house, request, kind, checked)
    _check_priority(request, asked.priority)
    llm, desk = house.model()
    desk.check_room(outputs, account_of(request).owner)
    salt = _salt(house, request, asked.cache_salt)

    def prepared() -> tuple[list[Ready], Telling]:
        ready, telling = read(llm, asked, house.dialect)
        return [one.salted(salt) for one in ready], telling

    ready, telling = await _aside(house, request, prepared, asked.timeout)
    return await completed(request, desk, ready, telling, asked)


async def _respond(house: House, request: Request) -> Response:
    def checked(asked: ResponsesRequest) -> None:
        _check_model(house, asked.model)
        asked.check()

    asked, _ = await _body(house, request, ResponsesRequest, checked)
    _check_priority(request, asked.priority)
    llm, desk = house.model()
    desk.check_room(1, account_of(request).owner)
    name, owner = asked.previous_response_id, account_of(request).owner
    before = b"" if name is None else house.kept.conversation(name, owner, "previous_response_id")
    salt = _salt(house, request, asked.cache_salt)

    def prepared() -> tuple[Ready, Told]:
        ready, told = read_response(llm, asked, before, house.dialect)
        return ready.salted(salt), told

    ready, response = await _aside(house, request, prepared, asked.timeout)
    return await responded(request, desk, ready, response, house.kept, asked)


async def _response(house: House, request: Request) -> Response:
    if request.query_params.get("stream", "false") != "false":
        raise FieldError(
            "a stream was asked for, but a response that is kept is whole; leave stream out", "stream"
        )
    return Response(
        house.kept.answer(request.path_params["name"], account_of(request).owner),
        media_type="application/json",
    )


async def _drop(house: House, request: Request) -> Response:
    name = request.path_params["name"]
    house.kept.drop(name, account_of(request).owner)
    return json_response({"id": name, "object": "response", "deleted": True})


async def _openapi(house: House, request: Request) -> Response:
    return Response(described(keys=bool(house.settings.keys)), media_type="application/json")


async def _metrics(house: House, request: Request) -> Response:
    own = house.metrics.text()
    return Response(own if house.fleet is None else await house.fleet.metrics(own), media_type=CONTENT_TYPE)


async def _state(house: House, request: Request) -> Response:
    house.model()
    if house.fleet is not None:
        found: object = await house.fleet.state()
    else:
        assert house.watch is not None
        found = house.watch.look()
    return json_response(found, headers={"Cache-Control": "no-store"})


async def _page(house: House, request: Request) -> Response:
    return told(request)


async def _tokenize(house: House, request: Request) -> Response:
    asked, _ = await _body(house, request, TokenizeRequest, TokenizeRequest.check)
    llm, _ = house.model()
    _check_model(house, asked.model or house.settings.names[0])

    def tokenized() -> Answer:
        if asked.messages is not None:
            tokens = chat_tokens(llm, asked, house.dialect)
        else:
            tokens = llm.prompt_tokens(asked.prompt or "", special=asked.add_special_tokens)
        answer: Answer = {
            "count": len(tokens),
            "max_model_len": llm.booted.engine.scheduler.longest,
            "tokens": tokens,
        }
        if asked.return_token_strs:
            answer["token_strs"] = [llm.tokenizer.token_text(token) for token in tokens]
        return answer

    return json_response(await _aside(house, request, tokenized))


async def _detokenize(house: House, request: Request) -> Response:
    asked, _ = await _body(house, request, DetokenizeRequest, lambda _: None)
    llm, _ = house.model()
    _check_model(house, asked.model or house.settings.names[0])
    return json_response({"prompt": await _aside(house, request, lambda: llm.decode(asked.tokens))})
