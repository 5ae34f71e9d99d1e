"""Draws Markdown while it comes: text goes in by pieces, and pieces for a terminal come out.

Nothing that was drawn is ever changed, so there is nothing to redraw. A line is held until its first word
says what it is, a table until it ends. Within a line, text is held from a mark that may open a span, until
the span closes or `_PATIENCE` characters have come. A mark that closes nothing is drawn as it was written:
no character is lost.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from typing import TYPE_CHECKING

from penstock.cli.terminal import PLAIN, Look, Piece
from penstock.cli.wrapping import Wrapper

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

_PATIENCE = 160
"""Characters after which a mark that has opened nothing yet is text."""
_UNCERTAIN = re.compile(r"[#>*+\-_=`~\d.)(\s]*|\s*(`{3}|~{3}|\|).*", re.DOTALL)
"""The beginning of a line that may still become a heading, an item, a fence, a rule or a row of a table."""
_FENCE = re.compile(r"\s*(`{3,}|~{3,})([^`]*)")
_RULE = re.compile(r" {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*")
_HEADING = re.compile(r" {0,3}(#{1,6})[ \t]+")
_QUOTE = re.compile(r" {0,3}>[ \t]?")
_ITEM = re.compile(r"([ \t]*)(?:([-*+])|(\d{1,9}[.)]))[ \t]+(?=\S)")
_SEPARATOR = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*")
_OPENER = re.compile(r"(?<![\w*])[*]+(?=\S)|(?<=\w)\*+(?=\w)|(?<!\w)_+(?=\S)|`+|~~(?=\S)|!?\[|[*_`~\\]$")
"""Marks that may open a span, as far as what stands around them shows."""
_LOOKS = {
    "strong": Look(bold=True),
    "em": Look(italic=True),
    "s": Look(strikethrough=True),
    "link": Look(underline=True),
}
_CODE, _DIM, _BOLD = Look(colour="cyan"), Look(dim=True), Look(bold=True)
_ESCAPED = "*_`~#"


class MarkdownStream:
    """Draws one answer. columns: tells how many the terminal has now."""

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._wrapper = Wrapper(columns)
        self._line = ""
        """What has come of this line and is not drawn."""
        self._begun = False
        """Whether the line's kind is known, and its head drawn."""
        self._look = PLAIN
        self._tried = 0
        """Characters of `_line` up to which no span was found closed."""
        self._fence = ""
        """The marks that have begun a block of code, while it lasts."""
        self._rows: list[str] = []
        """Lines of the table that is being read."""

    def push(self, text: str) -> list[Piece]:
        """Add text, and return what can be drawn."""
        drawn: list[Piece] = []
        *lines, rest = text.split("\n")
        for line in lines:
            self._line += line
            drawn += self._end_line()
        self._line += rest
        return drawn + (self._go_on() if rest else [])

    def finish(self) -> list[Piece]:
        """Return what is left."""
        drawn: list[Piece] = []
        if self._line or self._begun:
            drawn = self._end_line(last=True)
        return drawn + self._table() + self._wrapper.flush()

    def _go_on(self) -> list[Piece]:
        """Draw what is certain of a line that has not ended."""
        if self._fence:
            return [] if not self._begun and self._may_close() else self._code()
        drawn: list[Piece] = []
        if not self._begun:
            if _UNCERTAIN.fullmatch(self._line):
                return []
            drawn = self._table() + self._head()
        return drawn + self._spans(last=False)

    def _end_line(self, *, last: bool = False) -> list[Piece]:
        """Draw the line to its end. last: no more comes, so no line break either."""
        line, end = self._line, [] if last else [("\n", PLAIN)]
        if not self._begun:
            if drawn := self._whole_line(line, end):
                self._line = ""
                return drawn
            if not self._fence and line.lstrip().startswith("|"):
                self._rows.append(line)
                self._line = ""
                return []
        drawn = []
        if self._fence:
            drawn = [*self._code(), *end]
        else:
            if not self._begun:
                drawn = self._table() + self._head()
            drawn += self._spans(last=True)
            drawn += self._wrapper.flush() if last else self._wrapper.add("\n")
        self._line, self._begun, self._tried = "", False, 0
        return drawn

    def _whole_line(self, line: str, end: Sequence[Piece]) -> list[Piece]:
        """Draw a line that stands for itself: a fence or a rule. Nothing if it is neither."""
        fence = _FENCE.fullmatch(line)
        if self._fence:
            if not fence or not fence[1].startswith(self._fence) or fence[2].strip():
                return []
            self._fence = ""
            return [(line, _DIM), *end]
        if fence:
            before = self._table()
            self._fence = fence[1]
            return [*before, (line, _DIM), *end]
        if _RULE.fullmatch(line):
            return [*self._table(), ("─" * max(min(self._columns() - 1, 40), 3), _DIM), *end]
        return []

    def _may_close(self) -> bool:
        """Tell whether the line so far may end a block of code."""
        return not self._line.strip().strip(self._fence[0])

    def _code(self) -> list[Piece]:
        """Draw code as it is: no row is broken, so that it can be copied."""
        line, self._line, self._begun = self._line, "", True
        return [(line, _CODE)] if line else []

    def _head(self) -> list[Piece]:
        """Draw what stands before a line's text, and take it from the line."""
        self._begun, self._look, self._tried = True, PLAIN, 0
        lead: list[Piece] = []
        indent: list[Piece] = []
        while quote := _QUOTE.match(self._line):
            self._line = self._line[quote.end() :]
            lead.append(("│ ", _DIM))
            indent.append(("│ ", _DIM))
        if heading := _HEADING.match(self._line):
            self._look = Look(bold=True, underline=len(heading[1]) == 1)
            self._line = self._line[heading.end() :]
        elif item := _ITEM.match(self._line):
            space, mark = item[1].expandtabs(4), "•" if item[2] else item[3]
            lead.append((f"{space}{mark} ", PLAIN))
            indent.append((" " * (len(space) + len(mark) + 1), PLAIN))
            self._line = self._line[item.end() :]
        elif space := self._line[: len(self._line) - len(self._line.lstrip(" "))]:
            indent.append((space[: self._columns() // 2], PLAIN))
        return self._wrapper.begin(tuple(lead), tuple(indent))

    # -- spans

    def _spans(self, *, last: bool) -> list[Piece]:
        """Draw the text of the line as far as no span in it is open."""
        drawn: list[Piece] = []
        while self._line:
            opener = _OPENER.search(self._line)
            if last or opener is None:
                return drawn + self._draw(len(self._line))
            if plain := self._line.rfind(" ", 0, opener.start()) + 1:
                drawn += self._draw(plain)
                continue
            if end := self._closed(opener.end()):
                drawn += self._draw(end)
            elif len(self._line) > _PATIENCE:
                drawn += self._add([(self._take(opener.end()), PLAIN)])
            else:
                return drawn
        return drawn

    def _closed(self, begin: int) -> int:
        """Return the end of the words in which the first span opens and all are closed; 0 if none is yet."""
        at, last = max(begin, self._tried), self._line.rfind(" ") + 1
        if last <= at:
            return 0
        first = _inline(self._line[:last])[0]
        if first.type == "text" and first.content.startswith(self._line[:begin]):
            self._tried = last  # The mark is text whatever follows it, so no part has to be looked at.
            return 0
        while (at := self._line.find(" ", at) + 1) > 0:
            self._tried = at
            text = "".join(
                token.content
                for token in _inline(self._line[:at])
                if token.type not in ("code_inline", "image")
            )
            if not _OPENER.search(text):
                return at
        return 0

    def _draw(self, end: int) -> list[Piece]:
        return self._add(_looked(_inline(self._take(end))))

    def _take(self, end: int) -> str:
        text, self._line, self._tried = self._line[:end], self._line[end:], 0
        return text

    def _add(self, pieces: Iterable[Piece]) -> list[Piece]:
        return [one for text, look in pieces for one in self._wrapper.add(text, look | self._look)]

    # -- tables

    def _table(self) -> list[Piece]:
        """Draw the table that has ended. Rows without a head are lines as they are, and so are those of more
        columns than the terminal has room for."""
        rows, self._rows = self._rows, []
        if len(rows) > 1 and _SEPARATOR.fullmatch(rows[1]):
            cells = [_cells(row) for row in (rows[0], *rows[2:])]
            drawn = table(cells, self._columns())
            if not _letters(piece for row in cells for cell in row for piece in _looked(_inline(cell))) - (
                _letters(drawn)
            ):
                return drawn
        return [(f"{row}\n", PLAIN) for row in rows]


def _letters(pieces: Iterable[Piece]) -> Counter[str]:
    """Count what of a text is no space."""
    return Counter("".join("".join(text for text, _ in pieces).split()))


def _cells(row: str) -> list[str]:
    """Return the cells of a row."""
    return [cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


def table(rows: Sequence[Sequence[str]], columns: int) -> list[Piece]:
    """Return a table of spans of Markdown, the first row its head, in so many columns of a terminal."""
    from rich.box import SIMPLE_HEAD  # 40 ms, and few answers have a table
    from rich.console import Console
    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    def text(cell: str, base: Look = PLAIN) -> Text:
        shown = Text()
        for part, look in _looked(_inline(cell)):
            look |= base
            style = Style(
                color=look.colour,
                bold=look.bold,
                italic=look.italic,
                underline=look.underline,
                strike=look.strikethrough,
                dim=look.dim,
            )
            shown.append(part, style)
        return shown

    width = max(map(len, rows))
    drawn = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for cell in [*rows[0], *[""] * (width - len(rows[0]))]:
        drawn.add_column(text(cell, _BOLD), overflow="fold")
    for row in rows[1:]:
        drawn.add_row(*map(text, [*row, *[""] * (width - len(row))]))
    console = Console(
        file=StringIO(), width=max(columns - 1, 20), color_system="standard", force_terminal=True
    )
    pieces: list[Piece] = []
    for line in console.render_lines(drawn, pad=False):
        for segment in line:
            style = segment.style or Style.null()
            pieces.append(
                (
                    segment.text,
                    Look(
                        bool(style.bold),
                        bool(style.dim),
                        bool(style.italic),
                        bool(style.underline),
                        bool(style.strike),
                        _CODE.colour if style.color else None,
                    ),
                )
            )
        pieces.append(("\n", PLAIN))
    return pieces


# -- spans of a line

_parser: "list[MarkdownIt]" = []


def _inline(text: str) -> "list[Token]":
    """Return the spans of a line."""
    if not _parser:
        from markdown_it import MarkdownIt  # 50 ms, and only a terminal wants it

        made = (
            MarkdownIt("commonmark", {"html": False})
            .enable("strikethrough")
            .disable(["html_inline", "newline"])
        )
        made.inline.ruler.at("escape", _escape)
        _parser.append(made)
    return _parser[0].parseInline(text)[0].children or []


def _escape(state: "StateInline", silent: bool) -> bool:
    r"""Read a backslash before a mark of Markdown. Before others it is text, as in formulas: \( and \[."""
    at = state.pos
    if state.src[at] != "\\" or at + 1 >= state.posMax or state.src[at + 1] not in _ESCAPED:
        return False
    if not silent:
        token = state.push("text_special", "", 0)
        token.content, token.markup, token.info = state.src[at + 1], state.src[at : at + 2], "escape"
    state.pos += 2
    return True


def _looked(tokens: "Iterable[Token]") -> list[Piece]:
    """Return spans as pieces."""
    pieces: list[Piece] = []
    open_looks: list[Look] = []
    address, begin = "", 0
    for token in tokens:
        kind, _, edge = token.type.rpartition("_")
        look = PLAIN
        for one in open_looks:
            look |= one
        if edge == "open" and kind in _LOOKS:
            open_looks.append(_LOOKS[kind])
            if kind == "link":
                address, begin = str(token.attrs.get("href", "")), len(pieces)
        elif edge == "close" and kind in _LOOKS:
            open_looks.pop()
            if kind == "link" and address not in "".join(text for text, _ in pieces[begin:]):
                pieces.append((f" ({address})", _DIM))
        elif token.type == "code_inline":
            pieces.append((token.content, look | _CODE))
        elif token.type == "image":
            pieces.append((f"{token.content} ({token.attrs.get('src', '')})", look | _DIM))
        elif token.content:
            pieces.append((token.content, look))
    return pieces
