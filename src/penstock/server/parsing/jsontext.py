"""Checks JSON that comes in pieces: how much of it is certain."""

import json
import re
from typing import NoReturn


class MalformedError(ValueError):
    """Says that a text is not what it began as."""


_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_LONGEST_WORD = 400
"""Characters of a number: more than any that a reader of JSON has room for."""
SPACE = " \t\r\n"
_ENDS = {"{": "}", "[": "]"}


class Value:
    """Checks one value as it comes. Numbers, literals and escapes are read when they are whole; strings as
    far as they go.

    Control characters within strings, which JSON does not allow and models write all the same, become
    escapes.
    """

    def __init__(self) -> None:
        self.done = False
        self._open: list[str] = []
        """Objects and lists around the next character."""
        self._quoted = False
        self._wants = "value"
        """Outside of strings: value, value or end, key, key or end, colon, comma or end."""

    def take(self, text: str, at: int) -> tuple[str, int]:
        """Return what is certain of the value in text[at:], as JSON, and where that ends. Raise
        MalformedError if nothing is nor will be."""
        pieces: list[str] = []
        start = at
        while at < len(text) and not self.done:
            try:
                end = self._in_string(text, at, pieces) if self._quoted else self._between(text, at, pieces)
            except MalformedError:
                if at == start:
                    raise
                break
            if end == at:
                break
            at = end
        return "".join(pieces), at

    def _in_string(self, text: str, at: int, pieces: list[str]) -> int:
        """Return where the next piece of a string ends: at its beginning if it may go on."""
        if run := _RUN.match(text, at)[0]:  # type: ignore[index]  # It matches nothing, too.
            pieces.append(run)
            return at + len(run)
        if text[at] == '"':
            self._quoted = False
            pieces.append('"')
            if self._wants == "colon":
                return at + 1
            return self._after(at + 1)
        if text[at] != "\\":
            pieces.append(json.dumps(text[at])[1:-1])
            return at + 1
        if escape := _ESCAPE.match(text, at):
            pieces.append(escape[0])
            return escape.end()
        begun = _BEGUN_ESCAPE.match(text, at)
        if begun is None or begun.end() < len(text):
            _refuse(text, at)
        return at

    def _between(self, text: str, at: int, pieces: list[str]) -> int:
        """Return where the next piece outside of strings ends: at its beginning if it may go on."""
        here, wants = text[at], self._wants
        if here in SPACE:
            pieces.append(here)
            return at + 1
        end = at + 1
        if "or end" in wants and self._open and here == _ENDS[self._open[-1]]:
            self._open.pop()
            self._after(end)
        elif here == '"' and (wants.startswith("value") or wants.startswith("key")):
            self._quoted = True
            self._wants = "colon" if wants.startswith("key") else wants
        elif here in _ENDS and wants.startswith("value"):
            self._open.append(here)
            self._wants = "key or end" if here == "{" else "value or end"
        elif here == "," and wants == "comma or end":
            self._wants = "key" if self._open[-1] == "{" else "value"
        elif here == ":" and wants == "colon":
            self._wants = "value"
        elif wants.startswith("value"):
            word = _WORD.match(text, at)[0]  # type: ignore[index]
            end = at + len(word)
            if not word or len(word) > _LONGEST_WORD:
                _refuse(text, at)
            if end == len(text):
                return at
            if not _SCALAR.fullmatch(word):
                _refuse(text, at)
            self._after(end)
        else:
            _refuse(text, at)
        pieces.append(text[at:end])
        return end

    def _after(self, end: int) -> int:
        """Note that a value has ended there, and return that place."""
        self._wants, self.done = "comma or end", not self._open
        return end


def _refuse(text: str, at: int) -> NoReturn:
    raise MalformedError(f"{text[at : at + 20]!r} is not what JSON goes on with")


def loaded(text: str) -> object:
    """Return what a JSON text says. Raise MalformedError for what is no JSON; NaN and infinities are none."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedError(str(error)) from error


def unquoted(text: str) -> str:
    """Return what a JSON string says. Raise MalformedError for what is none, and for half a character, which
    cannot be sent."""
    said = loaded(text)
    if not isinstance(said, str):
        raise MalformedError("it is no string")
    try:
        said.encode()
    except UnicodeEncodeError as error:
        raise MalformedError(str(error)) from error
    return said


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedError(f"{name} is no JSON")


def written(value: object) -> str:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False)
