"""Reads text that comes in pieces, from its front by generators, which give out the parts of an answer.

A generator of this kind gives out parts as they become certain, and None where it can say no more before
there is more text. So a format is written down as it reads, and what it makes of a text does not depend on
how that was cut.
"""

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.server.parsing.jsontext import SPACE, MalformedError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Adds a piece of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Adds a piece of content."""

    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Begins a tool call: its number in the answer, from 0, and the function."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Adds a piece of a call's arguments. All pieces together are a JSON object, once the call has ended."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """Ends a call."""

    index: int


@dataclass(frozen=True, slots=True)
class Broken:
    """Ends a call that is none, or was cut short. `text` is all that was read of it."""

    index: int
    text: str


_KNOWN = 4
"""Characters by which a marker is known that was cut off: fewer may be text."""
BREAK = "\n"
_RUNS = {characters: re.compile(f"[{characters}]*") for characters in (SPACE, BREAK)}
_WORD = re.compile(r"[\w.-]*")
Part = Reasoning | Content | Begin | Arguments | End | Broken
Reading = Generator[Part | None, None, T]


class FormatReader:
    """Reads a text that comes in pieces. What was not read yet of `text` begins `at`."""

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self.ended = False
        """Whether all has come."""
        self.cut: str | None = None
        """What the text was cut off before, if it is not as the model would have ended it: a stop string, or
        nothing that is known."""
        self._marked: list[str] | None = None
        """What was read since the mark, if there is one."""
        self.breaks = 0
        """Line breaks that were left out before the marker which `until` has come to."""

    def push(self, text: str) -> None:
        """Add a piece of text."""
        self.text, self.at = self.text[self.at :] + text, 0

    @property
    def left(self) -> int:
        """Count the characters that were not read yet."""
        return len(self.text) - self.at

    def mark(self, before: str = "") -> None:
        """Keep what is read from here on too, behind `before`."""
        self._marked = [before]

    def unmark(self) -> str:
        """Return what was read since the mark."""
        text, self._marked = "".join(self._marked or ()), None
        return text

    def back(self) -> None:
        """Go back to the mark: what was read since is still to be read."""
        self.text, self.at = self.unmark() + self.text[self.at :], 0

    def take(self, count: int) -> str:
        """Read so many characters."""
        text = self.text[self.at : self.at + count]
        self.at += count
        if self._marked is not None:
            self._marked.append(text)
        return text

    def more(self) -> Reading[bool]:
        """Wait for more text. False if no more comes."""
        if not self.ended:
            yield None
        return not self.ended

    def need(self) -> Reading[None]:
        """Wait for more text where it cannot end. Raise MalformedError if no more comes."""
        if not (yield from self.more()):
            raise MalformedError("the text ends too early")

    def run(self, characters: str, room: int = 0) -> int:
        """Count how many of these come next, behind so many characters, as far as there is text."""
        found = _RUNS[characters].match(self.text, self.at + room)
        assert found is not None
        return found.end() - found.start()

    def ahead(self) -> Reading[str]:
        """Return the next character that is no space; it is empty at the end."""
        room = 0
        while (room := room + self.run(SPACE, room)) == self.left:
            if not (yield from self.more()):
                return ""
        return self.text[self.at + room]

    def space(self, characters: str = SPACE) -> Reading[None]:
        """Read all of these that come next."""
        while self.take(self.run(characters)) or not self.left:
            if not self.left and not (yield from self.more()):
                return

    def starts(self, *literals: str, room: int = 0) -> Reading[str | None]:
        """Return the literal that comes next, behind so many characters; None if none does. It is not read
        yet."""
        while True:
            at = self.at + room
            if found := next((one for one in literals if self.text.startswith(one, at)), None):
                return found
            begun = any(len(one) > self.left - room and one.startswith(self.text[at:]) for one in literals)
            if not begun or not (yield from self.more()):
                return None

    def skip(self, literal: str, *, spaced: bool = False) -> Reading[bool]:
        """Read a literal if it comes next. Return whether it did. What a cut has left of it is read, too.

        spaced: whether spaces before it are read, in any case.
        """
        if spaced:
            yield from self.space()
        found = yield from self.starts(literal)
        if found:
            self.take(len(literal))
        elif self.cut is not None and literal.startswith(self.text[self.at :]):
            self.take(self.left)
        return found is not None

    def expect(self, literal: str) -> Reading[None]:
        """Read a literal. Raise MalformedError if something else comes."""
        if not (yield from self.skip(literal)):
            raise MalformedError(f"{self.text[self.at : self.at + 20]!r} comes where {literal!r} should")

    def word(self, most: int) -> Reading[str]:
        """Read the letters, digits, underscores, dots and hyphens that come next, at most so many."""
        while True:
            found = _WORD.match(self.text, self.at)
            assert found is not None
            size = len(found[0])
            if size < self.left or size >= most or not (yield from self.more()):
                return self.take(min(size, most))

    def before(self, literal: str, most: int) -> Reading[str]:
        """Read up to a literal and past it, and return what stands before it, without spaces around. Raise
        MalformedError if that has more than so many characters."""
        end = most + len(literal)
        while (at := self.text.find(literal, self.at, self.at + end)) < 0:
            if self.left >= end:
                raise MalformedError(f"{literal!r} does not come")
            yield from self.need()
        return self.take(at - self.at + len(literal))[: -len(literal)].strip()

    def until(
        self, markers: Sequence[str], part: Callable[[str], Part | None], trim: int | None = None
    ) -> Reading[str | None]:
        """Read up to one of the markers, whichever comes first, but for line breaks before it: so many, or
        all of them. What `part` makes of each piece is given out, unless that is nothing. Returns the marker,
        to be read with `behind`; None at the end of the text. What a cut has left of a marker is read and
        not given out."""
        any_of = re.compile("|".join(map(re.escape, markers)))
        firsts, longest = {one[0] for one in markers}, max(map(len, markers), default=1)
        held = (
            0  # Line breaks at the end of what was read, which are counted, as there may be no end of them.
        )
        while True:
            found = any_of.search(self.text, self.at) if markers else None
            rest = self.text[self.at : found.start()] if found else self.text[self.at :]
            certain = bool(found) or self.ended or firsts.isdisjoint(rest[-longest:])
            if self.cut is not None and not found:
                piece = self.take(len(rest) - _begun(rest, markers, self.cut, _KNOWN))
                self.take(self.left)
            else:
                piece = self.take(len(rest) - (0 if certain else _begun(rest, markers)))
            if body := piece.rstrip(BREAK):
                body, held = BREAK * held + body, 0
            held += len(piece) - len(piece.rstrip(BREAK))
            kept = (
                0 if not markers or (self.ended and not found) else held if trim is None else min(held, trim)
            )
            body, held = body + BREAK * (held - kept), kept
            if body and (read := part(body)) is not None:
                yield read
            if found:
                self.breaks = held
                return found[0]
            if not (yield from self.more()) and not self.left and not held:
                return None

    def behind(self, marker: str) -> None:
        """Read up to the end of a marker that has come."""
        self.take(self.text.index(marker, self.at) + len(marker) - self.at)


def _begun(text: str, markers: Sequence[str], stop: str = "", least: int = 1) -> int:
    """Return how many characters at the end of a text may be a marker's beginning.

    stop: what would come next. least: characters that have to be a marker's, with these.
    """
    return max(
        (
            size
            for one in markers
            for size in range(1, len(one))
            if text.endswith(one[:size])
            and len(said := one[:size] + stop) >= least
            and (one.startswith(said) or said.startswith(one))
        ),
        default=0,
    )
