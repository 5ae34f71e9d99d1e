"""Answers requests that put the model to sleep and wake it up."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.base.errors import EngineClosedError, PenstockError
from penstock.server.broker.bed import Bed
from penstock.server.http.sending import json_response
from penstock.server.http.state import ServerState
from penstock.server.wire.decoding import FieldError

_MODES = ("wait", "abort")


async def sleep(server: ServerState, request: Request) -> Response:
    """Put the model to sleep: the level and the mode are in the query."""
    bed, query = _bed_of(server), request.query_params
    level, mode = query.get("level", "1"), query.get("mode", _MODES[0])
    if level not in ("1", "2"):
        raise FieldError(
            f"level {level[:20]!r} is none: 1 frees KV and the device, and keeps weights in host memory; 2 "
            "frees everything, and weights are read from disk again",
            "level",
        )
    if mode not in _MODES:
        raise FieldError(
            f"mode {mode[:20]!r} is none: wait lets requests end that are running, abort ends them", "mode"
        )
    slept = await bed.sleep(int(level), aborts=mode == "abort")
    return json_response({"is_sleeping": True, "level": slept.level, "weights": slept.weights})


async def wake_up(server: ServerState, request: Request) -> Response:
    """Wake the model up."""
    bed = _bed_of(server)
    try:
        await bed.wake_up()
    except EngineClosedError:
        raise
    except PenstockError as fault:  # Whatever it is, it is not the request's.
        raise PenstockError(f"the model sleeps on, since it cannot be started again: {fault}") from fault
    return json_response({"is_sleeping": bed.is_sleeping})


async def is_sleeping(server: ServerState, request: Request) -> Response:
    """Tell whether the model sleeps."""
    if server.models is None:
        server.model()
    return json_response({"is_sleeping": server.bed is not None and server.bed.is_sleeping})


def _bed_of(server: ServerState) -> Bed:
    """Return what puts the model to sleep. Raise HTTPException where nobody may do so."""
    if server.models is not None:
        raise HTTPException(
            501,
            "models that are loaded on demand do not sleep; one is unloaded by POST /api/generate with "
            "keep_alive 0 and no prompt",
        )
    server.model()
    if len(server.settings.keys) > 1:
        raise HTTPException(
            403,
            "the model answers all keys, so none of several may put it to sleep or wake it up; restart the "
            "server with one key",
        )
    if server.bed is None:
        raise HTTPException(501, "replicas do not sleep; stop those that are not needed")
    return server.bed
