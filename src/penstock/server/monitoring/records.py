"""Records what is known of a request beside its answer: its id, who asked for what, when what happened. Never
any text of a prompt or an output.

Every response tells the request's id: the client's own, if it has sent one that may be written anywhere, or a
new one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, time_ns
from typing import Protocol

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.answers.completions import new_id
from penstock.server.broker.calls import Call

_HEADER = b"x-request-id"
_SANE = re.compile(rb"[!-~]{1,128}")
"""Printable ASCII without spaces."""
_KEY = "penstock.record"
_WAITED, _FORECAST = "X-Model-Wait", "X-Model-Wait-Forecast"
"""Headers: seconds for which a request has waited for its model, and that it was expected to."""


class ModelLease(Protocol):
    """Lends a model to a request, which has waited for it."""

    waited: float
    forecast: float

    def close(self) -> None:
        """Give the model back."""


@dataclass(slots=True)
class RequestRecord:
    """Records a request, until its response has been sent. Written on the loop, by the middleware and by the
    route."""

    id: str
    method: str
    headers: Mapping[bytes, bytes]
    """Headers as the client has sent them; of several of a name the last."""
    began: float = field(default_factory=monotonic)
    ended: float = 0.0
    """Seconds of monotonic()."""
    began_ns: int = field(default_factory=time_ns)
    """The same since 1970."""
    owner: bytes = b""
    """Stands for the key that was sent, if the server has any."""
    least_priority: int | None = None
    """The least priority that it may ask for; None is any."""
    route: str = "unknown"
    """The path as the API names it, so without what clients put into it."""
    status: int | None = None
    """The status of the response; None if the client had gone."""
    model: str | None = None
    """Set, as is what follows, when the request has been read and checked."""
    streams: bool = False
    calls: Sequence[Call] = ()
    fault: str | None = None
    """The kind of what the request was refused with, or what has kept it from being complete."""
    trace: str | None = None
    """The id of the trace that it is a part of, where there are any."""
    leases: list[ModelLease] = field(default_factory=list)
    """Models that it was lent. They are given back when it is over."""

    @property
    def wait(self) -> tuple[float, float] | None:
        """Return the seconds for which it has waited for a model, and that it was expected to; None if the
        model was there."""
        waits = [(one.waited, one.forecast) for one in self.leases if one.waited or one.forecast]
        return waits[0] if waits else None

    @property
    def prompt_tokens(self) -> int:
        """Count the tokens of its prompts."""
        return sum(len(call.prompt.tokens) for call in self.calls)

    @property
    def output_tokens(self) -> int:
        """Count the tokens of its outputs, so far."""
        return sum(call.counts[0] for call in self.calls)

    @property
    def cached_tokens(self) -> int:
        """Count the tokens of its prompts whose KV was found."""
        return sum(call.counts[1] for call in self.calls)

    @property
    def reasons(self) -> list[str]:
        """Return the finish reasons of its outputs."""
        return [reason for call in self.calls for reason in call.reasons]

    @property
    def scheduled_time(self) -> float:
        """Return when the first of its calls left the engine's queue, by monotonic(); 0 if none did."""
        return min((call.scheduled_time for call in self.calls if call.scheduled_time), default=0.0)

    @property
    def first_token_time(self) -> float:
        """Return when there was a first piece of any call; 0 if there was none."""
        return min((call.first_token_time for call in self.calls if call.first_token_time), default=0.0)

    @property
    def last_token_time(self) -> float:
        """Return when there was a last piece of any call; 0 if there was none."""
        return max((call.last_token_time for call in self.calls), default=0.0)


RecordSink = Callable[[RequestRecord], None]


def record_of(request: Request) -> RequestRecord:
    """Return the record of a request."""
    record = request.scope[_KEY]
    assert isinstance(record, RequestRecord)
    return record


class RecordMiddleware:
    """Keeps a record of each request around an application, and gives it to sinks when the request is
    over."""

    def __init__(self, app: ASGIApp, tell: Sequence[RecordSink]) -> None:
        self._app, self._tell = app, tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, and record it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(_HEADER, b"")
        record = RequestRecord(
            given.decode() if _SANE.fullmatch(given) else new_id("req-"), scope["method"], headers
        )
        scope[_KEY] = record

        async def sent(event: Message) -> None:
            if event["type"] == "http.response.start":
                record.status = event["status"]
                event["headers"] = [*event.get("headers", ()), (_HEADER, record.id.encode())]
                if (wait := record.wait) is not None:
                    names = zip((_WAITED, _FORECAST), wait, strict=True)
                    event["headers"] += [
                        (name.lower().encode(), b"%.3f" % seconds) for name, seconds in names
                    ]
            await send(event)

        try:
            await self._app(scope, receive, sent)
        finally:
            record.ended = monotonic()
            self._settle(record)

    def _settle(self, record: RequestRecord) -> None:
        for lease in record.leases:
            lease.close()
        fault = next((call.fault for call in record.calls if call.fault is not None), None)
        if fault is not None:
            record.fault = type(fault).__name__
        for tell in self._tell:
            tell(record)
