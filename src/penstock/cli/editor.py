"""Reads messages that are typed in a terminal: edited, of several lines, with a history.

Enter sends. A line break comes into a message by Alt-Enter, by pasting, behind a backslash at the end of a
line, and anywhere between two marks of three double quotes.
"""

import re
import sys
from collections.abc import Iterable
from typing import Protocol

import click

from penstock.base.config import state_directory, terminal_kind
from penstock.cli.history import ChatHistory
from penstock.cli.terminal import is_terminal

PROMPT, MORE, QUOTES = "> ", "... ", '"""'
_QUOTED = re.compile(r'\s*(/\w+\s+(?:system\s+)?)?"""')
"""The beginning of a message in quotes, or of a command with a text in quotes."""


class Editor(Protocol):
    """Reads one message after the other from a person."""

    keeps: bool
    """Tells whether messages are kept for later chats."""

    def read(self) -> str:
        """Return the next message. Raise EOFError, KeyboardInterrupt and UnicodeDecodeError."""

    def ask(self, question: str) -> str:
        """Return the answer to a question. Raise EOFError and KeyboardInterrupt."""


def editor(commands: Iterable[str], files: Iterable[str], *, keep: bool) -> Editor:
    """Return the editor for the terminal of this process.

    commands: what can be completed at the beginning of a line. files: those of them that take a file's name.
    keep: whether messages are kept for later chats.
    """
    screen = next((one for one in (sys.stdout, sys.stderr) if is_terminal(one)), None)
    if screen is None or terminal_kind() == "dumb":
        return PlainEditor()
    from penstock.cli.line_editor import LineEditor  # 0.2 s, and only a terminal wants it

    return LineEditor(screen, ChatHistory(state_directory() / "chat_history"), commands, files, keep=keep)


class PlainEditor:
    """Reads lines where no editor can be shown: the terminal is dumb, or output goes elsewhere."""

    keeps = False

    def read(self) -> str:
        """Return the next line."""
        return self.ask(PROMPT)

    def ask(self, question: str) -> str:
        """Return the next line."""
        if is_terminal(sys.stdout):
            return input(question)
        click.echo(question, nl=False, err=True)  # input() would write it among the answers.
        return input()


def goes_on(text: str) -> bool:
    """Tell whether a message that has begun with quotes has yet to end with them."""
    begun = _QUOTED.match(text)
    return begun is not None and not text[begun.end() :].rstrip().endswith(QUOTES)


def unquoted(text: str) -> str:
    """Return a message without the quotes around it. What they hold is no command, whatever it begins
    with."""
    begun = _QUOTED.match(text)
    if begun is None or goes_on(text):
        return text
    inner = text[begun.end() :].rstrip().removesuffix(QUOTES).strip("\n")
    command = begun[1] or ""
    return f"{command}{inner}" if command or not inner.startswith("/") else f"/{inner}"
