"""Show an editor for messages in a terminal, by prompt_toolkit."""

import os
from collections.abc import Iterable
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.data_structures import Size
from prompt_toolkit.document import Document
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output

from penstock.base.config import terminal_kind
from penstock.cli.editor import MORE, PROMPT, goes_on, unquoted
from penstock.cli.history import ChatHistory


class LineEditor:
    """Reads messages with an editor on `screen`, and keeps them in a history."""

    def __init__(
        self,
        screen: TextIO,
        history: ChatHistory,
        commands: Iterable[str],
        files: Iterable[str],
        *,
        keep: bool,
    ) -> None:
        self._past = _Past(history, keep)
        # A terminal is not asked where its cursor is: it might answer late, into the next message.
        output = Vt100_Output(
            screen,
            lambda: _size(screen),
            term=terminal_kind(),
            default_color_depth=ColorDepth.DEPTH_1_BIT,
            enable_cpr=False,
        )
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=MORE,
            history=self._past,
            key_bindings=_keys(),
            completer=_Commands(commands, files),
            complete_while_typing=False,
            enable_history_search=True,
            enable_suspend=True,
            enable_open_in_editor=True,
            reserve_space_for_menu=0,
            output=output,
        )

    @property
    def keeps(self) -> bool:
        """Tell whether messages are kept for later chats."""
        return self._past.keep

    @keeps.setter
    def keeps(self, keep: bool) -> None:
        self._past.keep = keep

    def read(self) -> str:
        """Return the next message. Raise EOFError and KeyboardInterrupt."""
        text: str = self._session.prompt()
        return unquoted(text)

    def ask(self, question: str) -> str:
        """Return the answer to a question, which is not kept. Raise EOFError and KeyboardInterrupt."""
        answer: str = PromptSession(question, output=self._session.output).prompt()
        return answer


class _Past(History):
    """The history as prompt_toolkit asks for it."""

    def __init__(self, history: ChatHistory, keep: bool) -> None:
        super().__init__()
        self._history, self.keep = history, keep

    def load_history_strings(self) -> Iterable[str]:
        """Return the entries, the newest first."""
        return reversed(self._history.read() if self.keep else [])

    def store_string(self, string: str) -> None:
        """Keep an entry."""
        if self.keep:
            self._history.append(string)


class _Commands(Completer):
    """Completes commands, and names of files behind those that take one."""

    def __init__(self, commands: Iterable[str], files: Iterable[str]) -> None:
        self._commands, self._files = sorted(commands), frozenset(files)
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Return what may stand at the cursor."""
        text = document.text_before_cursor
        command, space, rest = text.partition(" ")
        if space and command in self._files:
            yield from self._paths.get_completions(Document(rest, len(rest)), complete_event)
        elif text.startswith("/") and not space and "\n" not in text:
            yield from (Completion(one, -len(text)) for one in self._commands if one.startswith(text))


def _size(screen: TextIO) -> Size:
    """Return the rows and columns of a terminal, and usual ones where it does not know or is gone."""
    try:
        columns, rows = os.get_terminal_size(screen.fileno())
    except OSError:
        columns = rows = 0
    return Size(rows or 24, columns or 80)


def _keys() -> KeyBindings:
    """Return the keys that differ from prompt_toolkit's own."""
    keys = KeyBindings()

    @keys.add("enter")
    @keys.add("c-j")  # What was typed while an answer was written has line feeds.
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        document = buffer.document
        if goes_on(buffer.text):
            buffer.insert_text("\n")
        elif document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
