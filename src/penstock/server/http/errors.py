"""Writes errors as clients know them."""

import logging
from collections.abc import Mapping
from math import ceil

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.base.config import Config
from penstock.base.errors import (
    AdapterError,
    CheckpointError,
    EngineClosedError,
    LengthError,
    PenstockError,
    RequestError,
)
from penstock.base.setting import as_flags, settings_of
from penstock.server.answers.completions import Answer, error
from penstock.server.answers.protocols import ABSENT, refusal, told
from penstock.server.answers.store import NotKeptError
from penstock.server.broker.calls import BusyError, DeadlineError
from penstock.server.http.sending import json_response, said
from penstock.server.on_demand.model import LoadError
from penstock.server.wire.decoding import FieldError
from penstock.server.wire.requests import blamed

_SETTINGS = frozenset(one.name for one in settings_of(Config))
"""An operator knows these as the server's flags."""
_LOG = logging.getLogger("penstock")


def error_response(fault: Exception, path: str = "", request: str | None = None) -> Response:
    """Return an error as the clients of a path know it: its status, kind, parameter and code. request: its
    id."""
    status, body, headers = _told(fault)
    return json_response(told(path, status, body, request), status, headers)


def _for_client(fault: LengthError) -> str:
    """Return why a request is too long: what the client can do by its own fields, and what the operator can
    by the server's flags."""
    text = as_flags(str(fault), _SETTINGS)
    return text.replace(
        "; shorten it, or ", "; shorten the prompt or lower max_tokens, or let the server's operator "
    )


def _told(fault: Exception) -> tuple[int, Answer, Mapping[str, str] | None]:
    """Return the status, the body in OpenAI's form, and headers of an error."""
    invalid, failed = "invalid_request_error", "server_error"
    match fault:
        case NotKeptError():
            return 404, error(str(fault), invalid, fault.param, "response_not_found"), None
        case FieldError():
            return 400, error(str(fault), invalid, fault.param), None
        case LengthError():
            return 400, error(_for_client(fault), invalid, code="context_length_exceeded"), None
        case AdapterError():
            return 404, error(str(fault), invalid, "model", "model_not_found"), None
        case RequestError():
            return 400, error(str(fault), invalid, blamed(fault)), None
        case CheckpointError():  # It lacks a tokenizer; token ids would do.
            return 400, error(str(fault), invalid), None
        case BusyError() if not fault.seconds:
            return 400, error(str(fault), invalid, "n"), None
        case BusyError():
            seconds = {"Retry-After": str(round(fault.seconds))}
            return 429, error(str(fault), "rate_limit_error", code="queue_full"), seconds
        case DeadlineError():
            later = {"Retry-After": str(ceil(fault.seconds))} if fault.seconds else None
            return 504, error(str(fault), "timeout_error", "timeout", "deadline_exceeded"), later
        case LoadError():
            return (
                503,
                error(str(fault), failed, "model", "model_not_loaded"),
                {"Retry-After": str(ceil(fault.seconds))},
            )
        case EngineClosedError():
            return 503, error(str(fault), failed, code="unavailable"), {"Retry-After": "5"}
        case HTTPException():
            kinds = {
                401: ("authentication_error", None, "invalid_api_key"),
                404: (invalid, "model", "model_not_found"),
            }
            kind = kinds.get(fault.status_code, (invalid, None, None))
            return fault.status_code, error(str(fault.detail), *kind), None
        case PenstockError():
            return 500, error(str(fault), failed), None
    _LOG.error("a request has failed; the traceback shows a bug of penstock, so report it", exc_info=fault)
    return 500, error(said(fault), failed), None


def no_route(request: Request, fault: Exception) -> Response:
    """Return the error for a path or a method that no route takes."""
    assert isinstance(fault, HTTPException)
    path, status = request.scope["path"], fault.status_code
    if (instead := ABSENT.get(path)) is not None:
        return json_response(refusal(path, 501, f"{path} is not supported: {instead}"), 501)
    there = {getattr(route, "path", None) for route in request.app.routes}
    instead = f"did you mean /v1{path}?" if f"/v1{path}" in there else "/openapi.json lists what there is"
    message = (
        f"{path[:200]} does not take {request.method}"
        if status == 405
        else f"there is nothing at {path[:200]}; {instead}"
    )
    return json_response(refusal(path, status, message), status, fault.headers)
