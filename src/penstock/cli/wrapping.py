"""Breaks text that comes in pieces into rows, at words, before it is written.

A word is held until it is whole. So what is written is never taken back, and no cursor is moved.
"""

import re
from collections.abc import Callable

from wcwidth import iter_graphemes, wcswidth

from penstock.cli.terminal import PLAIN, Look, Piece

_TOKEN = re.compile(r"[ \t]+|\n|[^ \t\n]+")
_WIDE = re.compile(
    "[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\uffe0-\uffe6]"
)
"""Letters of scripts that put no spaces between words: a row may end behind each."""
_CLOSING = re.compile(
    "[\u3001\u3002\u3009\u300b\u300d\u300f\u3011\uff01\uff09\uff0c\uff0e\uff1a\uff1b\uff1f]"
)
"""Marks of such scripts that begin no row."""
_FEWEST = 10
"""Columns that a row has behind an indent, however narrow the terminal is."""


def cells(text: str) -> int:
    """Count the columns that a text takes; control characters are shown as pictures of one."""
    if text.isascii() and text.isprintable():
        return len(text)
    width: int = wcswidth(text)
    return width if width >= 0 else sum(max(wcswidth(part), 1) for part in iter_graphemes(text))


class Wrapper:
    """Breaks the text of an answer into rows.

    columns: tells how many the terminal has now. A row leaves the last one empty: terminals do not agree
    where the cursor is behind a full row.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0
        self._indent: tuple[Piece, ...] = ()
        self._room = 0
        """Columns of the indent."""
        self._space: list[Piece] = []
        self._word: list[Piece] = []
        self._fresh = True
        """Nothing of this line's text was written yet, so spaces before it are its own."""
        self._long = False
        """The word that comes is longer than a row, and its beginning was written: the rest fills rows."""

    def begin(self, lead: tuple[Piece, ...], indent: tuple[Piece, ...]) -> list[Piece]:
        """Return what begins a line: `lead` at its head, and `indent` before each row that follows."""
        self._indent, self._room = indent, sum(cells(text) for text, _ in indent)
        self._column += sum(cells(text) for text, _ in lead)
        return list(lead)

    def add(self, text: str, look: Look = PLAIN) -> list[Piece]:
        """Add text, and return what can be written."""
        written: list[Piece] = []
        for token in _TOKEN.findall(text):
            self._long &= token[0] not in " \t\n"
            if token == "\n":
                written += self._place()
                written.append(("\n", PLAIN))
                self._column, self._space, self._indent, self._room, self._fresh = 0, [], (), 0, True
            elif token[0] in " \t":
                written += self._place()
                self._space.append((token, look))
            else:
                written += self._lengthen(token, look)
        return written

    def flush(self) -> list[Piece]:
        """Return what is held."""
        return self._place()

    def _lengthen(self, token: str, look: Look) -> list[Piece]:
        """Add letters to the word. It is placed once no row holds it, and where a row may end within it."""
        written: list[Piece] = []
        for part in _syllables(token):
            if _WIDE.match(part) and not _CLOSING.match(part):
                written += self._place()
                self._long = False
            self._word.append((part, look))
            if self._long or sum(cells(text) for text, _ in self._word) >= self._width():
                written += self._place()
                self._long = True
        return written

    def _width(self) -> int:
        return max(self._columns() - 1 - self._room, _FEWEST)

    def _place(self) -> list[Piece]:
        """Return the word behind the space before it, on this row or on the next."""
        if not self._word:
            return []
        space, word = _spread(self._space, self._column), self._word
        self._space, self._word = [], []
        gap, long = (sum(cells(text) for text, _ in pieces) for pieces in (space, word))
        end = self._room + self._width()
        written: list[Piece] = []
        if self._column + gap + long <= end or (self._fresh and self._column + gap < end):
            written += space
            self._column += gap
        elif self._column > self._room and not self._long:
            written += self._break()
        self._fresh = False
        for text, look in word:
            for part in [text] if self._column + cells(text) <= end else iter_graphemes(text):
                if self._column + cells(part) > end and self._column > self._room:
                    written += self._break()
                written.append((part, look))
                self._column += cells(part)
        return _joined(written)

    def _break(self) -> list[Piece]:
        self._column = self._room
        return [("\n", PLAIN), *self._indent]


def _syllables(token: str) -> list[str]:
    """Return a word cut where a row may end."""
    return re.findall(f"{_WIDE.pattern}|(?:(?!{_WIDE.pattern}).)+", token) if _WIDE.search(token) else [token]


def _spread(space: list[Piece], column: int) -> list[Piece]:
    """Return spaces with each tab as so many of them."""
    spread: list[Piece] = []
    for text, look in space:
        out = ""
        for character in text:
            out += " " * (8 - (column + len(out)) % 8) if character == "\t" else character
        spread.append((out, look))
        column += len(out)
    return spread


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join neighbours that look alike."""
    joined: list[Piece] = []
    for text, look in pieces:
        if joined and joined[-1][1] == look:
            joined[-1] = joined[-1][0] + text, look
        else:
            joined.append((text, look))
    return joined
