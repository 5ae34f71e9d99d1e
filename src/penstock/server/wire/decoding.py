"""Decodes the bodies of requests, and says of what is not valid which field is at fault."""

import re
from typing import TypeVar

import msgspec

from penstock.base.errors import PenstockError

T = TypeVar("T")
MOST_MARKS = {b"[{:": 250_000, b",": 1_000_000}
"""Characters of a large body, those in its texts included. The first begin an object, a list or a field,
which take 0.3 us each to decode, the last stand between scalars, which take 0.04 us; nobody else computes
meanwhile."""
_SLICE = 1 << 20
_LONGEST_SAID = 300
_OTHER_PART = re.compile(
    r"(?:Invalid enum value '|Object contains unknown field `)(image_url|video_url|input_audio|file)['`]"
    r" - at `\$\.(messages\[[^`]*\]\.content\[[^`]*\])(?:\.type)?`"
)
"""It finds what msgspec says of a part of a message that is no text."""


class FieldError(PenstockError):
    """Says that a request is not what it must be. `param`: the field, if it is one's fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def expect_few_values(body: bytes) -> None:
    """Raise FieldError for a body that takes too long to decode, by its marks. Other threads go on between
    slices."""
    for marks, most in MOST_MARKS.items():
        found = sum(body.count(mark, at, at + _SLICE) for at in range(0, len(body), _SLICE) for mark in marks)
        if found > most:
            raise FieldError(
                f"the request has {found:,} of the characters {marks.decode()!r}, those in texts included, "
                f"but a request of more than 64 KiB may have {most:,}; send several smaller ones"
            )


def decoded(body: bytes, kind: type[T]) -> T:
    """Return what a request's body says. Raise FieldError that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        if part := _OTHER_PART.fullmatch(text):
            raise FieldError(
                f"{part[2]} is of type {part[1]}, but the model reads text alone; leave it out", "messages"
            ) from error
        unknown = re.search(r"unknown field `([^`]*)`", text)
        place = re.search(r"at `\$\.?([^`\[.]*)", text)
        name = unknown[1] if unknown else place[1] if place and place[1] else None
        if missing := re.search(r"missing required field `([^`]*)`", text):
            name = missing[1]
        raise FieldError(f"the request is not valid: {_invalid(error)}", name) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FieldError(f"the request's body is not JSON: {error}; send a JSON object") from error


def converted(value: object, kind: type[T], where: str, param: str) -> T:
    """Return a part of a request, read as a type. where: what it is called. param: its field. Raise
    FieldError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FieldError(f"{where} is not valid: {_invalid(error)}", param) from error


def _invalid(error: msgspec.ValidationError) -> str:
    """Return what is not as it must be, in words that go on from others."""
    text = str(error)
    return text[:1].lower() + (text[1:] if len(text) <= _LONGEST_SAID else f"{text[1:_LONGEST_SAID]}...")
