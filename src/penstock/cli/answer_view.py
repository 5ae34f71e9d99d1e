"""Writes one answer while it comes: on a terminal wrapped at words and with its Markdown drawn, reasoning
faint; elsewhere the answer's own bytes."""

import os
import shutil
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.base.config import terminal_kind
from penstock.cli.conversation import AnswerReader
from penstock.cli.live import LiveLine
from penstock.cli.markdown import MarkdownStream
from penstock.cli.terminal import Look, Piece, is_terminal
from penstock.cli.thinking import Think
from penstock.cli.wrapping import Wrapper
from penstock.server.parsing.reading import Reasoning

if TYPE_CHECKING:
    from penstock.api.outputs import Delta

_FAINT = Look(dim=True)


def can_draw() -> bool:
    """Tell whether stdout is a terminal that can show how text looks."""
    return is_terminal(sys.stdout) and terminal_kind() != "dumb"


def columns() -> int:
    """Return how many columns the terminal has now."""
    with suppress(OSError, ValueError, AttributeError):
        if (size := os.get_terminal_size(sys.stdout.fileno())).columns:
            return size.columns
    return shutil.get_terminal_size().columns


class AnswerView:
    """Writes the pieces of one output, through the line at the bottom of the terminal."""

    def __init__(
        self,
        live: LiveLine,
        reader: AnswerReader,
        *,
        markdown: bool = True,
        wrap: bool = True,
        think: Think | None = None,
    ) -> None:
        """markdown, wrap: what a terminal that can draw does with the answer. think: whether reasoning is
        shown, on a terminal; elsewhere it never is."""
        self._live, self._reader = live, reader
        draws = can_draw()
        self._markdown = MarkdownStream(columns) if draws and markdown else None
        self._wrapper = Wrapper(columns) if draws and wrap else None
        self._aloud = draws and think in (None, Think.ON)
        self._thoughts = Wrapper(columns)
        self._thinking = False
        self._hidden = 0
        """Tokens of reasoning that was not shown."""
        self._last = "\n"
        """The last character that was written."""

    def show(self, delta: "Delta") -> None:
        """Write a piece of the output."""
        parts = self._reader.parts(delta)
        self._hidden += len(delta.tokens) if not self._aloud else 0
        for part in parts:
            if isinstance(part, Reasoning):
                self._reason(part.text)
            else:
                self._answer(part.text)
        if self._thinking and not self._aloud:
            self._live.think(self._hidden)

    def end(self) -> None:
        """Write what is held, and end the last line."""
        self._end_reasoning()
        if self._markdown is not None:
            self._draw(self._markdown.finish())
        elif self._wrapper is not None:
            self._draw(self._wrapper.flush())
        if self._last != "\n":
            self._write("\n")

    def _reason(self, text: str) -> None:
        self._thinking = True
        if self._aloud:
            self._draw(self._thoughts.add(text, _FAINT))

    def _answer(self, text: str) -> None:
        self._end_reasoning()
        if self._markdown is not None:
            self._draw(self._markdown.push(text))
        elif self._wrapper is not None:
            self._draw(self._wrapper.add(text))
        else:
            self._write(text)

    def _end_reasoning(self) -> None:
        """Put an empty line between reasoning and the answer."""
        if not self._thinking:
            return
        self._thinking = False
        if self._aloud:
            self._draw(self._thoughts.flush())
            self._write("\n\n" if self._last != "\n" else "\n")
        else:
            self._live.think(0)

    def _draw(self, pieces: list[Piece]) -> None:
        self._live.draw(pieces)
        self._note("".join(text for text, _ in pieces))

    def _write(self, text: str) -> None:
        self._live.write(text)
        self._note(text)

    def _note(self, text: str) -> None:
        self._last = text[-1:] or self._last
