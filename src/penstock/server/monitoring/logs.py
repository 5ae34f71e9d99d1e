"""Writes the log: a line for each event, for people or for machines."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime

from penstock.server.monitoring.records import RequestRecord

_LOG = logging.getLogger("penstock")
_POLLED = ("/health", "/ready", "/metrics", "/state", "/experts")
"""Asked again and again by what watches the server."""
_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")
"""Printable ASCII without spaces, quotes, equals signs and backslashes."""
Value = str | int | float | bool | None


def note(event: str, level: int = logging.INFO, /, **fields: Value) -> None:
    """Log an event: its name and fields, None left out. Seconds are written to the microsecond."""
    if _LOG.isEnabledFor(level):
        known = {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in fields.items()
            if value is not None
        }
        _LOG.log(level, event, extra={"fields": known})


def note_request(record: RequestRecord) -> None:
    """Log a request that is over."""
    level, calls = _level(record), record.calls
    if not _LOG.isEnabledFor(level):
        return
    note(
        "request",
        level,
        request_id=record.id,
        method=record.method,
        route=record.route,
        status=record.status,
        model=record.model,
        stream=record.streams if calls else None,
        prompt_tokens=record.prompt_tokens if calls else None,
        output_tokens=record.output_tokens if calls else None,
        cached_tokens=record.cached_tokens if calls else None,
        queue_seconds=record.scheduled_time - calls[0].arrival_time if record.scheduled_time else None,
        first_token_seconds=record.first_token_time - record.began if record.first_token_time else None,
        seconds=record.ended - record.began,
        finish_reason=",".join(dict.fromkeys(record.reasons)) if calls else None,
        error=record.fault,
        trace_id=record.trace,
    )


def _level(record: RequestRecord) -> int:
    status = record.status or 0
    if record.route in _POLLED:
        return logging.DEBUG
    if status == 500 or (status == 200 and record.fault is not None):
        return logging.ERROR
    return logging.WARNING if status > 500 else logging.INFO


class TextLines(logging.Formatter):
    """Formats events with their time and fields, and remarks as they are."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a line of text."""
        fields: Mapping[str, Value] | None = getattr(record, "fields", None)
        if fields is None:
            return super().format(record)
        shown = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        return f"{_time(record)} {record.levelname.lower()} {record.getMessage()} {shown}".rstrip()


class JsonLines(logging.Formatter):
    """Formats events as JSON, an object a line: time, level and event, and the event's own fields. Of a
    remark the event is "remark", and its text the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a JSON object, in one line."""
        fields: Mapping[str, Value] | None = getattr(record, "fields", None)
        head: dict[str, Value] = {"time": _time(record), "level": record.levelname.lower()}
        if fields is not None:
            return json.dumps(head | {"event": record.getMessage()} | dict(fields))
        said: dict[str, Value] = {"event": "remark", "message": record.getMessage()}
        if record.name != _LOG.name:
            said["logger"] = record.name
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(head | said)


class _LineHandler(logging.Handler):
    def __init__(self, write: Callable[[str], None], level: int, formatter: logging.Formatter) -> None:
        super().__init__(level)
        self._write = write
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record))


@contextmanager
def logged(write: Callable[[str], None], kind: str, level: str) -> Iterator[None]:
    """Write all that is logged to `write`, line by line: from penstock what has the level, from libraries
    warnings and what is worse.

    kind: "text" or "json". level: as logging names it, in any case.
    """
    least = logging.getLevelNamesMapping()[level.upper()]
    handler = _LineHandler(write, least, JsonLines() if kind == "json" else TextLines())
    root, before = logging.getLogger(), _LOG.level
    root.addHandler(handler)
    _LOG.setLevel(least)
    logging.captureWarnings(kind == "json")
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        _LOG.setLevel(before)


def last_line(text: str, traceback: str | None) -> str:
    """Return what has ended the server, as JSON."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = {"time": now, "level": "error", "event": "ended", "message": text}
    return json.dumps(line | ({"traceback": traceback} if traceback is not None else {}))


def _time(record: logging.LogRecord) -> str:
    """Return the time of an event by RFC 3339, in UTC."""
    return (
        datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def _shown(value: Value) -> str:
    """Return a value as text on one line, in quotes where it might be taken for more than one."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
