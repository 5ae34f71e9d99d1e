"""Reads tool calls as models write them, format by format.

A call is given out from where its name and the beginning of its arguments are known. Until then, whatever is
not what it began as is plain text again; afterwards it is a call that was broken off.
"""

from collections.abc import Mapping
from typing import Any

from penstock.server.parsing.jsontext import MalformedError, Value, loaded, unquoted, written
from penstock.server.parsing.reading import (
    Arguments,
    Begin,
    Broken,
    Content,
    End,
    FormatReader,
    Part,
    Reading,
)
from penstock.server.parsing.schemas import kinds_of, typed

_ARGUMENTS = ("arguments", "parameters")
_HEADS = '{"name":', '{"type":"function","name":'
"""Begin a call before which no marker stands, without spaces."""
_LONGEST_NAME = 256
Schemas = Mapping[str, Mapping[str, Any]]
"""Schemas of the arguments of each function."""


class Calls:
    """Reads the calls of one answer."""

    def __init__(self, reader: FormatReader, functions: Schemas, *, several: bool = True) -> None:
        """Begin without calls.

        several: whether there may be more than one; what follows one is not read then.
        """
        self.reader, self.functions, self._several = reader, functions, several
        self._next, self._open = 0, False

    @property
    def enough(self) -> bool:
        """Tell whether there may be no more calls."""
        return bool(self._next and not self._open and not self._several)

    def begin(self, name: str) -> Reading[None]:
        """Begin a call of a function."""
        yield Begin(self._next, name)
        self._open = True

    def arguments(self, text: str) -> Part:
        """Return a part of the arguments of the call that has begun."""
        return Arguments(self._next, text)

    def end(self) -> Reading[None]:
        """End the call that has begun."""
        yield End(self._next)
        self._next, self._open = self._next + 1, False
        self.reader.mark()

    def break_off(self, *, bare: bool = False) -> Reading[None]:
        """Give out what takes the place of a call that is malformed: what was read of it, or since the one
        before it. Nothing of a call that a cut has ended is text.

        bare: as of `object`; what was cut off may be no call then.
        """
        text = self.reader.unmark()
        if self.reader.cut is not None and (self._open or not bare or self._may_call(text)):
            self.reader.take(self.reader.left)
            text = ""
        if self._open:
            self._next, self._open = self._next + 1, False
            yield Broken(self._next - 1, text)
        elif text:
            yield Content(text)

    def _may_call(self, text: str) -> bool:
        """Tell whether an object that was cut off has begun as a call of a function that there is, or other
        calls stand before it."""
        said = "".join((text + self.reader.text[self.reader.at :]).split())
        heads = (head + written(name) for name in self.functions for head in _HEADS)
        return self._next > 0 or any(said.startswith(one) or one.startswith(said) for one in heads)

    # ---- JSON

    def value(self, *, given: bool = False) -> Reading[str]:
        """Read a JSON value. given: whether it is given out as arguments, piece by piece."""
        value, pieces = Value(), list[str]()
        while not value.done:
            piece, end = value.take(self.reader.text, self.reader.at)
            if end > self.reader.at:
                self.reader.take(end - self.reader.at)
                pieces.append(piece)
                if given:
                    yield self.arguments(piece)
            else:
                yield from self.reader.need()
        return "".join(pieces)

    def string(self) -> Reading[str]:
        """Read a JSON string. Raise MalformedError."""
        if (yield from self.reader.starts('"')) is None:
            raise MalformedError("a string should come")
        return unquoted((yield from self.value()))

    def object(self, *, bare: bool = False) -> Reading[None]:
        """Read a call that is an object with a name and arguments.

        bare: nothing else says that it is a call, so it has to be one of a function that there is, and have
            nothing that calls do not have.
        """
        name, held, begun = "", None, False
        yield from self.reader.expect("{")
        more = not (yield from self.reader.skip("}", spaced=True))
        while more:
            key = yield from self.string()
            yield from self.reader.space()
            yield from self.reader.expect(":")
            yield from self.reader.space()
            if key == "name" and not name:
                name = yield from self.string()
                if not name or (bare and name not in self.functions):
                    raise MalformedError(f"{name!r} is no function")
            elif key in _ARGUMENTS and held is None and not begun:
                if name and (yield from self.reader.starts("{")):
                    begun = True
                    yield from self.begin(name)
                    yield from self.value(given=True)
                else:
                    held = yield from self.value()
            elif bare and key not in ("type", "id"):
                raise MalformedError(f"a call has no {key!r}")
            else:
                yield from self.value()
            if more := not (yield from self.reader.skip("}", spaced=True)):
                yield from self.reader.expect(",")
                yield from self.reader.space()
        if not begun:
            if not name or (bare and held is None):
                raise MalformedError("the call has no name, or no arguments")
            arguments = _object(held)
            yield from self.begin(name)
            yield self.arguments(arguments)
        yield from self.end()

    def list(self) -> Reading[None]:
        """Read calls that are a list of objects."""
        yield from self.reader.expect("[")
        while not self.enough:
            yield from self.reader.space()
            yield from self.object()
            if (yield from self.reader.skip("]", spaced=True)):
                return
            yield from self.reader.expect(",")

    # ---- formats, each from behind its marker, or from the beginning of an answer where that is ""

    def tagged(self, marker: str) -> Reading[None]:
        """Read <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or with <function=...> within, which
        may also stand alone."""
        if marker == "<tool_call>":
            yield from self.reader.space()
            if (yield from self.reader.starts("{", "<function=")) == "{":
                yield from self.object()
            else:
                yield from self.reader.expect("<function=")
                yield from self._function()
        else:
            yield from self._function()
        yield from self.reader.skip("</tool_call>", spaced=True)

    def _function(self) -> Reading[None]:
        """Read NAME><parameter=KEY>value</parameter>...</function>."""
        name = yield from self.reader.before(">", _LONGEST_NAME)
        if not name:
            raise MalformedError("the function has no name")
        schema = self.functions.get(name, {})
        yield from self.begin(name)
        yield self.arguments("{")
        between = ""
        while True:
            if (yield from self.reader.skip("</function>", spaced=True)):
                break
            yield from self.reader.expect("<parameter=")
            key = yield from self.reader.before(">", _LONGEST_NAME)
            yield self.arguments(f"{between}{written(key)}: ")
            yield from self._parameter(kinds_of(schema, key))
            between = ", "
        yield self.arguments("}")
        yield from self.end()

    def _parameter(self, kinds: frozenset[str]) -> Reading[None]:
        """Read value</parameter>. A line break on each side of it is no part of it."""
        yield from self.reader.skip("\n")
        pieces, is_text = list[str](), kinds == {"string"}
        if is_text:
            yield self.arguments('"')
        part = (lambda text: self.arguments(written(text)[1:-1])) if is_text else pieces.append
        end = yield from self.reader.until(("</parameter>",), part, trim=1)
        if end is None:
            raise MalformedError("the parameter does not end")
        self.reader.behind(end)
        yield self.arguments('"' if is_text else typed("".join(pieces), kinds))

    def llama(self, marker: str) -> Reading[None]:
        """Read {"name": ..., "parameters": {...}}, several with ; between, alone or behind <|python_tag|>."""
        while True:
            yield from self.reader.space()
            yield from self.object(bare=not marker)
            yield from self.reader.space()
            if self.enough or not (yield from self.reader.skip(";")):
                return

    def mistral(self, marker: str) -> Reading[None]:
        """Read [TOOL_CALLS] and a list of objects, or NAME[ARGS]{...}."""
        yield from self.reader.space()
        match (yield from self.reader.ahead()):
            case "[":
                yield from self.list()
            case "{":
                yield from self.object()
            case _:
                yield from self._named()

    def _named(self) -> Reading[None]:
        name = yield from self.reader.word(_LONGEST_NAME)
        if (yield from self.reader.skip("[CALL_ID]")):
            yield from self.reader.word(_LONGEST_NAME)
        yield from self.reader.skip("[ARGS]")
        yield from self.reader.space()
        yield from self.given(name)

    def given(self, name: str) -> Reading[None]:
        """Read the arguments of a call of a function: an object, which comes next. Raise MalformedError."""
        if not name or (yield from self.reader.starts("{")) is None:
            raise MalformedError("a name and an object should come")
        yield from self.begin(name)
        yield from self.value(given=True)
        yield from self.end()


def _object(held: str | None) -> str:
    """Return a call's arguments: there may be none, and some models write the object as a string. Raises
    MalformedError."""
    if held is None or held == "null":
        return "{}"
    if held.startswith('"'):
        held = unquoted(held).strip() or "{}"
    if not isinstance(loaded(held), dict):
        raise MalformedError("arguments are an object")
    return held
