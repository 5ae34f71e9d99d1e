"""Write to a terminal: text without control characters, remarks on stderr; and take Ctrl-C as a wish."""

import signal
import sys
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Self, TextIO

import click

from penstock.base.config import terminal_kind
from penstock.base.errors import RequestError

# Shown as the pictures Unicode has for them: a model's output must not move the cursor or rename the window.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | dict.fromkeys(
    range(0x7F, 0xA0), 0xFFFD
)


@dataclass(frozen=True, slots=True)
class Look:
    """Says how a piece of text looks on a terminal. `colour` is a name that click knows."""

    bold: bool = False
    dim: bool = False
    italic: bool = False
    underline: bool = False
    strikethrough: bool = False
    colour: str | None = None

    def __or__(self, other: "Look") -> "Look":
        """Return what has all that either has."""
        return Look(
            self.bold or other.bold,
            self.dim or other.dim,
            self.italic or other.italic,
            self.underline or other.underline,
            self.strikethrough or other.strikethrough,
            other.colour or self.colour,
        )


PLAIN = Look()
Piece = tuple[str, Look]
"""A text, and how it looks."""


def styled(pieces: Iterable[Piece]) -> str:
    """Return pieces for a terminal: the only escape sequences are those of their looks."""
    return "".join(
        text
        if look == PLAIN or not text.strip()
        else click.style(
            text,
            fg=look.colour,
            bold=look.bold or None,
            dim=look.dim or None,
            italic=look.italic or None,
            underline=look.underline or None,
            strikethrough=look.strikethrough or None,
        )
        for text, look in ((text.translate(_PICTURES), look) for text, look in pieces)
    )


def one_line(text: str) -> str:
    """Return `text` as a single line without control characters."""
    return " ".join(text.split()).translate(_PICTURES)


def say(text: str, *, faint: bool = False) -> None:
    """Print lines on stderr, if stderr can be written to, without control characters."""
    text = text.translate(_PICTURES)
    with suppress(OSError):
        click.echo(
            click.style(text, dim=True) if faint else text, err=True
        )  # without colours where it is no terminal


_held: list[str] | None = None
"""Remarks that wait for the end of a text; None while there is none."""


def say_beside(text: str) -> None:
    """Print a remark on stderr that may come at any time: behind the text that is being written, if there is
    one."""
    if _held is not None:
        _held.append(text)
    else:
        say(text, faint=True)


@contextmanager
def text_alone() -> Iterator[None]:
    """Hold remarks back until the end of this `with` block where they would come in the midst of its text: on
    a terminal that shows both."""
    global _held
    if _held is not None or not (is_terminal(sys.stdout) and is_terminal(sys.stderr)):
        yield
        return
    held = _held = []
    try:
        yield
    finally:
        _held = None
        for text in held:
            say(text, faint=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether a person is at the other end.

    A standard stream can be None: closed before the process began.
    """
    return stream is not None and stream.isatty()


def write(text: str, *, bold: bool = False) -> None:
    """Write text to stdout at once; on a terminal without control characters."""
    if is_terminal(sys.stdout):
        text = text.translate(_PICTURES)
        text = click.style(text, bold=True) if text and bold else text
    if text:
        if sys.stdout is None:
            raise RequestError(
                "stdout is closed, so there is nowhere to write; leave it open, or add > /dev/null"
            )
        sys.stdout.write(text)
        sys.stdout.flush()


def draw(pieces: Iterable[Piece]) -> None:
    """Write pieces to stdout, which is a terminal, at once."""
    if text := styled(pieces):
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def without_echo() -> Iterator[None]:
    """Keep what is typed during this `with` block out of the text on the terminal, if there is any. An editor
    reads it afterwards, Ctrl-D and Backspace too: the terminal would have taken them for itself."""
    shown = is_terminal(sys.stdout) or is_terminal(sys.stderr)
    if not is_terminal(sys.stdin) or not shown or terminal_kind() == "dumb":
        yield
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    silent = [*before]
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    try:
        termios.tcsetattr(number, termios.TCSANOW, silent)
        yield
    finally:
        with suppress(termios.error):  # The terminal is gone.
            termios.tcsetattr(number, termios.TCSANOW, before)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold Ctrl-C back until the end of this `with` block, for what is not made to be interrupted."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Interrupt:
    """A `with` block in which the first Ctrl-C is only noted in `asked`, and the second raises
    KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)
