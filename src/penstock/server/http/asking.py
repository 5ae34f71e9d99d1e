"""Reads requests: what a body says, whether this server takes it, and its prompts."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from penstock.api.reader import PromptReader
from penstock.api.sequences import PreparedPrompt
from penstock.engine.adapters import adapter_named
from penstock.server.answers.protocols import Protocol, protocol_of
from penstock.server.broker.calls import DeadlineError, overdue
from penstock.server.http.keys import salt_of
from penstock.server.http.origins import is_json, is_of_browser
from penstock.server.http.sending import unless_gone
from penstock.server.http.state import ServerState
from penstock.server.http.uploads import SMALL
from penstock.server.monitoring.records import record_of
from penstock.server.parsing.dialects import Dialect
from penstock.server.wire.decoding import FieldError, decoded, expect_few_values
from penstock.server.wire.embeddings import EmbedRequest, PooledRequest
from penstock.server.wire.messages import CountTokensRequest
from penstock.server.wire.ollama import OllamaRequest
from penstock.server.wire.requests import ChatRequest, CompletionRequest
from penstock.server.wire.responses import ResponsesRequest

T = TypeVar("T")
U = TypeVar("U")
_FEW = 8
"""Outputs up to which a brief request is read on the loop."""
G = TypeVar(
    "G",
    bound=ChatRequest
    | CompletionRequest
    | ResponsesRequest
    | CountTokensRequest
    | OllamaRequest
    | PooledRequest,
)
"""A request for tokens, for embeddings or for scores."""


async def body_of(server: ServerState, request: Request, kind: type[T], check: Callable[[T], object]) -> T:
    """Return what a body says, after `check` of that.

    A large body is decoded and checked on a thread, where large ones are read. Raise FieldError,
    HTTPException for a body that is not declared as JSON, and what `Uploads.body` and `check` do.
    """
    undeclared = protocol_of(request.scope["path"]) is Protocol.OLLAMA and not is_of_browser(request.scope)
    if not (undeclared or is_json(request.scope)):
        raise HTTPException(415, "the body must be declared as JSON; send 'Content-Type: application/json'")
    body = await server.uploads.body(request)
    opened = partial(_opened, body, kind, check)
    if len(body) <= SMALL:
        return opened()
    return await in_time(server, request, server.uploads.opened(request, opened))


def _opened(body: bytes, kind: type[T], check: Callable[[T], object]) -> T:
    if len(body) > SMALL:
        expect_few_values(body)
    asked = decoded(body, kind)
    check(asked)
    return asked


async def in_time(
    server: ServerState, request: Request, work: Coroutine[Any, Any, T], timeout: float | None = None
) -> T:
    """Return the result of the work that reads a request, which ends with its time.

    timeout: seconds that the request may take, which run since it has come. Raise DeadlineError when they are
    over, and ClientDisconnect when the client of a large request goes before.
    """
    seconds, late = _seconds_left(server, request, timeout)
    try:
        async with asyncio.timeout(late):
            if not server.uploads.is_large(request):
                return await work
            if (found := await unless_gone(request.scope, request.receive, work)) is None:
                raise ClientDisconnect
            return found
    except TimeoutError as error:
        assert seconds is not None
        raise overdue(seconds) from error


def _seconds_left(
    server: ServerState, request: Request, timeout: float | None
) -> tuple[float | None, float | None]:
    """Return the seconds that a request may take, which wants so many, and those that are left of them; None
    is any."""
    seconds = server.allowed_seconds(timeout)
    return seconds, None if seconds is None else seconds - (monotonic() - record_of(request).began)


def adapter_of(server: ServerState, *names: str) -> str:
    """Return the LoRA adapter that a model's name means, by its own name or as `model:adapter`: empty for the
    model itself. Raise HTTPException for a name of neither. names: all stand for the same."""
    models, adapters, lost = server.settings.names, server.adapters, server.lost_adapters
    if (found := adapter_named(names, models, adapters)) is not None:
        return found
    if gone := adapter_named(names, models, lost):
        raise HTTPException(404, lost[gone])
    there = ", ".join([*models, *adapters])
    raise HTTPException(404, f"the model {names[0][:200]!r} does not exist here; there is {there}")


async def lent(
    server: ServerState,
    request: Request,
    names: Sequence[str],
    *,
    outputs: int = 1,
    timeout: float | None = None,
    keep: float | None = None,
) -> ServerState:
    """Return the state of the model of one of these names, which is loaded first if need be and stays until
    the request is over. Where there is one model it is the server's.

    timeout: seconds that the request may take, which run since it has come. outputs, keep: see
    OnDemandModels.lend. Raise what that does, DeadlineError when the time is over before the model is there,
    and ClientDisconnect when the client goes before.
    """
    if (models := server.models) is None:
        return server
    model, record = next(models.models[name] for name in names if name in models.models), record_of(request)
    seconds, left = _seconds_left(server, request, timeout)

    async def borrow() -> ServerState:
        lease = await models.lend(model, outputs, keep, record.owner)
        record.leases.append(lease)  # Before anything can break this off: its end gives it back.
        return lease.there.state

    try:
        async with asyncio.timeout(left):
            if (found := await unless_gone(request.scope, request.receive, borrow())) is None:
                raise ClientDisconnect
            return found
    except TimeoutError as error:
        wait = models.expected_wait(model)
        raise DeadlineError(
            f"the request has taken {seconds:g} seconds, the most that it may (timeout), and {model.name} is "
            f"still being loaded; it will be there in about {wait:.1f} s, so send the request again then",
            max(wait, 1.0),
        ) from error


async def asked_of(server: ServerState, request: Request, kind: type[G]) -> tuple[ServerState, G]:
    """Return a request for tokens that its key may send, and the state of its model, which has room for its
    outputs; of one that only has its model unloaded the server's. Raise what `body_of`, `lent` and
    `RequestBroker.check_room` do."""

    def outputs(asked: G) -> int:
        adapter_of(server, *asked.names)
        asked.check()
        return asked.outputs

    asked = await body_of(server, request, kind, outputs)
    record = record_of(request)
    least = record.least_priority
    if least is not None and asked.priority < least:
        raise FieldError(
            f"priority {asked.priority} is not allowed for this key; send {least} or more, or leave priority "
            "out",
            "priority",
        )
    if server.models is not None:
        if isinstance(asked, OllamaRequest) and asked.unloads:
            return server, asked
        keep = asked.kept if isinstance(asked, OllamaRequest | EmbedRequest) else None
        server = await lent(
            server, request, asked.names, outputs=asked.outputs, timeout=asked.timeout, keep=keep
        )
    server.model()[1].check_room(asked.outputs, record.owner)
    return server, asked


async def prepared_for(
    server: ServerState,
    request: Request,
    asked: G,
    read: Callable[[PromptReader, G, Dialect | None], tuple[list[PreparedPrompt], U]],
) -> tuple[list[PreparedPrompt], U]:
    """Return a request's prompts, and what `read` makes beside them. Raise what `in_time` and `read` do."""
    (reader, _), lora = server.model(), adapter_of(server, *asked.names)
    salt = salt_of(record_of(request).owner, asked.cache_salt, share=server.settings.share_prefixes)

    def prepared() -> tuple[list[PreparedPrompt], U]:
        ready, writer = read(reader, asked, server.dialect)
        return [one.salted(salt).adapted(lora) for one in ready], writer

    uploads = server.uploads
    brief = isinstance(asked, CompletionRequest) and asked.outputs <= _FEW and asked.params.structure is None
    if brief and uploads.is_brief(request):
        found = prepared()
        uploads.release(request)
        return found
    return await in_time(server, request, uploads.aside(request, prepared), asked.timeout)
