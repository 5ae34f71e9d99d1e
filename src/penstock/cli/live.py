"""Show what happens while text is generated: a line at the bottom of the terminal shows how far a long prompt
is computed and how weights and KV stream, and a line for each of these what it came to at the end of a run.

Why the text above stays whole. The bottom row is taken out of the region that scrolls, so text never reaches
it. A thread redraws it: it saves the cursor, draws and restores the cursor in one write, so that no text
comes in between. stdout and stderr are one device, to which a write that is held up, as by Ctrl-S, may still
go in parts; so there is also a lock, held to redraw and by `LiveLine.write` while a piece of text is noted
and written. Noted, because restoring cannot be trusted with a cursor behind a full row: it stays there until
the next character wraps, but tmux, the Linux console and others restore it *to* the last column, and the next
character would replace the last. So the text of the current line is followed, and while it ends at the edge
nothing is drawn.

Why the terminal is always given back. Leaving does it under the same lock, and afterwards the thread draws no
more; if Ctrl-C cuts leaving short, it is done when the process ends. SIGTERM and Ctrl-Z do it before the
process ends or stops. In the background nothing is drawn. A new size is noticed at the next redraw:
everything below the text is cleared and the bottom row reserved anew.
"""

import atexit
import os
import re
import signal
import stat
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from threading import Event, RLock, Thread, current_thread, main_thread
from time import perf_counter
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self
from unicodedata import category, east_asian_width

from penstock.base.config import terminal_kind
from penstock.base.meter import KVStats, MeterSample, PromptProgress, WeightStats, pass_seconds
from penstock.base.units import counted
from penstock.cli import terminal
from penstock.cli.summaries import bar, beside, fitting, kv_forms, weight_forms

if TYPE_CHECKING:  # torch takes 1.2 s
    from penstock.api.llm import LLM
    from penstock.engine.engine import Progress

PERIOD = 0.25
"""Seconds between two redraws."""
WINDOW = 2.0
"""Seconds over which rates are taken; a pass, where that is longer."""
PATIENCE = 0.5
"""Seconds after which a prompt has a bar: what is computed sooner needs none."""

_FEWEST_ROWS, _FEWEST_COLUMNS = 4, 20
_SAVE, _RESTORE, _WHOLE = "\x1b7", "\x1b8", "\x1b[r"
_CLEAR_BELOW = "\x1b[J"
_MAKE_ROOM = "\x1bD\x1b[A"
"""One down, scrolling if need be, and one up: the text is not in the bottom row, its column is kept."""
_ASIDE = (signal.SIGTERM, signal.SIGTSTP)
_DISPUTED = re.compile("[\xad\u200d\ufe0e\ufe0f\U0001f1e6-\U0001f1ff\U0001f3fb-\U0001f3ff]")
"""Characters whose width terminals do not agree about."""
_UNKNOWN = "\u200d"
"""Stands for the text of a line if it is not known how much of it is there."""


class LiveLine:
    """The line at the bottom for the time of a `with` block, to be begun where the cursor is at the beginning
    of a row.

    weights, kv, progress: called from a thread of this object, and while a step runs, so they must not wait
    for the step. There is no line, and `write` only writes, where `quiet`, where stderr is no terminal or a
    dumb one, where stdout goes into a pipe (its reader may use the terminal too), and while nothing streams
    and no prompt takes long.
    """

    def __init__(
        self,
        weights: Callable[[], WeightStats],
        kv: Callable[[], KVStats | None] = lambda: None,
        progress: "Callable[[], Progress] | None" = None,
        *,
        quiet: bool = False,
        period: float = PERIOD,
    ) -> None:
        self._weights, self._kv, self._progress, self._quiet, self._period = (
            weights,
            kv,
            progress,
            quiet,
            period,
        )
        self._lock = RLock()
        self._fd = -1
        """File descriptor of the terminal while there may be a line."""
        self._reserved: os.terminal_size | None = None
        """The size for which the bottom row is taken."""
        self._text = ""
        """Text of the line that the cursor is in."""
        self._writing = False
        self._prompt: PromptProgress | None = None
        self._thought = 0
        """Tokens of reasoning that is not shown, while the model reasons."""
        self._begun: KVStats | None = None
        self._seen = deque[MeterSample]()
        self._before: dict[signal.Signals, object] = {}
        self._end = Event()
        self._thread: Thread | None = None

    @classmethod
    def of(cls, llm: "LLM", *, quiet: bool) -> Self:
        """Return the line for a model."""
        return cls(lambda: llm.memory.weights, lambda: llm.memory.kv, lambda: llm.progress, quiet=quiet)

    def __enter__(self) -> Self:
        if self._quiet or not _usable():
            return self
        first = self._count()
        self._begun = first.kv
        self._seen.append(first)
        self._fd = sys.stderr.fileno()
        atexit.register(self._close)
        try:
            if current_thread() is main_thread():
                for number in _ASIDE:
                    if signal.getsignal(number) is signal.SIG_DFL:
                        self._before[number] = signal.signal(number, self._step_aside)
            self.redraw()
            self._thread = Thread(target=self._keep, name="penstock live line", daemon=True)
            self._thread.start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def compute(self, length: int) -> None:
        """Show how far a prompt of `length` tokens is, until the next text is written."""
        if self._progress is not None:
            with self._lock:
                self._prompt = PromptProgress(length, perf_counter(), self._progress().computed)

    def think(self, tokens: int) -> None:
        """Show how many tokens of reasoning there are by now that are not written; 0 once it has ended."""
        with self._lock:
            begins = tokens and not self._thought
            self._thought = tokens
            if begins or (not tokens and self._reserved is not None):
                self.redraw()

    def write(self, text: str, *, bold: bool = False) -> None:
        """Write text to stdout as terminal.write does; all text within the block goes this way, or by
        `draw`."""
        self._put_text(text, lambda: terminal.write(text, bold=bold))

    def draw(self, pieces: Sequence[terminal.Piece]) -> None:
        """Write pieces to a terminal as terminal.draw does, in the order of `write`."""
        if pieces:
            self._put_text("".join(text for text, _ in pieces), lambda: terminal.draw(pieces))

    def _put_text(self, text: str, put: Callable[[], None]) -> None:
        with self._lock:
            if self._prompt is not None:
                self._prompt = None
                if self._reserved is not None:
                    self.redraw()
            self._writing = True
            if self._fd >= 0 and terminal.is_terminal(sys.stdout):
                self._text = (self._text + text).rpartition("\n")[2]
            put()
            self._writing = False

    def redraw(self) -> None:
        """Bring the line up to date, unless the cursor is behind a full row or the terminal is another's
        now."""
        counts = self._count()
        with self._lock:
            if self._fd < 0 or not _in_foreground(self._fd):
                return
            size = _size(self._fd)
            if size.lines < _FEWEST_ROWS or size.columns < _FEWEST_COLUMNS:
                self._leave()
            elif not at_edge(self._text, size.columns):
                shown = self._shown(counts, size.columns - 1)
                if not shown:
                    self._leave()
                    return
                begin = _SAVE
                if size != self._reserved:
                    begin = (
                        f"{_SAVE}{_WHOLE}{_RESTORE}{_MAKE_ROOM}{_CLEAR_BELOW}{_SAVE}\x1b[1;{size.lines - 1}r"
                    )
                self._reserved = size
                self._put(f"{begin}\x1b[{size.lines};1H\x1b[0;2m{shown}\x1b[0m\x1b[K{_RESTORE}")

    def _count(self) -> MeterSample:
        weights, kv = self._weights(), self._kv()
        return MeterSample(perf_counter(), weights, kv)

    def _shown(self, now: MeterSample, width: int) -> str:
        """Return the line now, empty if there is nothing to show.

        Samples are kept for a WINDOW, and for a pass of weights that stream.
        """
        seen = self._seen
        seen.append(now)
        while (
            len(seen) > 2
            and now.when - seen[1].when >= WINDOW
            and (pass_seconds(islice(seen, 1, None)) or not now.weights.streams)
        ):
            seen.popleft()
        forms = []
        if now.weights.streams:
            flow = now.weights.since(seen[0].weights).flow(now.when - seen[0].when)
            forms = weight_forms(now.weights, flow, pass_seconds(seen))
        if now.kv is not None and self._begun is not None and (moved := now.kv.since(self._begun)).streams:
            forms = beside(forms, kv_forms(moved, _kv_rate(seen)))
        if self._thought:
            forms = beside([f"thinking… {counted(self._thought, 'token')}"], forms)
        elif (prompt := self._prompt) is not None and self._progress is not None:
            progress = self._progress()
            prompt.see(now.when, progress.reached, progress.computed)
            if now.when - prompt.begin >= PATIENCE:
                shown = bar(prompt, now.when, width)
                forms = [*(f"{shown} | {form}" for form in forms), shown]
        return fitting(forms, width)

    def _keep(self) -> None:
        with suppress(Exception):  # What is wrong with the weights is for the step that meets it to say.
            while not self._end.wait(self._period):
                self.redraw()

    def _leave(self) -> None:
        """Give the bottom row back. The next redraw takes it again."""
        with self._lock:
            if self._reserved is None:
                return
            size = _size(self._fd)
            if size == self._reserved:
                self._put(f"{_SAVE}{_WHOLE}\x1b[{size.lines};1H\x1b[2K{_RESTORE}")
            else:  # The line is somewhere below the text.
                self._put(
                    f"{_SAVE}{_WHOLE}{_RESTORE}" + ("" if at_edge(self._text, size.columns) else _CLEAR_BELOW)
                )
            self._reserved = None

    def _close(self) -> None:
        with self._lock:
            self._leave()
            self._fd = -1
        self._end.set()
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]  # SIG_DFL
        self._before.clear()
        atexit.unregister(self._close)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _step_aside(self, number: int, frame: FrameType | None) -> None:
        """Give the row back before the process ends or stops.

        Continued, it goes on here, at the beginning of a row, and the thread draws again.
        """
        with self._lock:
            self._leave()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            signal.signal(number, self._step_aside)
            self._text = _UNKNOWN if self._writing else ""

    def _put(self, sequence: str) -> None:
        data = sequence.encode(sys.stderr.encoding, "replace")
        with suppress(OSError):  # The terminal is gone.
            while data:
                data = data[os.write(self._fd, data) :]


def _kv_rate(seen: Sequence[MeterSample]) -> float:
    """Return bytes of KV a second to DEVICE."""
    first, last = seen[0], seen[-1]
    moved = last.kv.copied - first.kv.copied if last.kv and first.kv else 0
    return moved / (last.when - first.when) if last.when > first.when else 0.0


def at_edge(text: str, columns: int) -> bool:
    """Tell whether a line of `text` leaves the cursor behind a full row; also if that is not known.

    The line begins in the first column.
    """
    if text.isascii() and "\t" not in text:
        return bool(text) and len(text) % columns == 0
    if _DISPUTED.search(text):
        return True
    column = 0
    for char in text:
        if char == "\t":
            column = max(column, min(column - column % 8 + 8, columns - 1))
            continue
        cells = 0 if category(char) in ("Mn", "Me", "Cf") else 2 if east_asian_width(char) in "FW" else 1
        column = cells if column + cells > columns else column + cells
    return column == columns


def _usable() -> bool:
    """Tell whether the terminal behind stderr can have a line that nothing else draws over."""
    if not terminal.is_terminal(sys.stderr) or terminal_kind() == "dumb":
        return False
    if sys.stdout is None or terminal.is_terminal(sys.stdout):
        return True
    mode = os.fstat(sys.stdout.fileno()).st_mode
    return not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))


def _size(fd: int) -> os.terminal_size:
    try:
        return os.get_terminal_size(fd)
    except OSError:  # it is gone
        return os.terminal_size((0, 0))


def _in_foreground(fd: int) -> bool:
    """Tell whether a shell would let the process have the terminal.

    A terminal that is not the process's own, or is not known here, has no such shell.
    """
    try:
        return os.tcgetpgrp(fd) in (0, os.getpgrp())
    except OSError:
        return True
