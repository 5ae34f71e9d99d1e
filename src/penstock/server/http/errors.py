"""Writes errors as clients know them."""

import logging

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.base.errors import CheckpointError, EngineClosedError, LengthError, PenstockError, RequestError
from penstock.server.answers.completions import error
from penstock.server.answers.store import NotKeptError
from penstock.server.broker.calls import BusyError, DeadlineError
from penstock.server.http.sending import json_response, said
from penstock.server.wire.requests import FieldError, blamed

_LOG = logging.getLogger("penstock")


def error_response(fault: Exception) -> Response:
    """Return an error as clients know it: its status, kind, parameter and code."""
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
    _LOG.error("a request has failed; the traceback shows a bug of penstock, so report it", exc_info=fault)
    return json_response(error(said(fault), "server_error"), 500)


def no_route(request: Request, fault: Exception) -> Response:
    """Return the error for a path or a method that no route takes."""
    assert isinstance(fault, HTTPException)
    path = request.scope["path"][:200]
    message = (
        f"{path} does not take {request.method}"
        if fault.status_code == 405
        else f"there is nothing at {path}"
    )
    return json_response(error(message, "invalid_request_error"), fault.status_code, fault.headers)
