"""How weights stream, seen while text is generated: a line at the bottom of the terminal, and one line at the end of a run.

Why the text above stays whole. The bottom row is taken out of the region that scrolls, so text never reaches it. A thread redraws it:
it saves the cursor, draws and restores the cursor in one write, so that no text comes in between. stdout and stderr are one device, to
which a write that is held up, as by Ctrl-S, may still go in parts; so there is also a lock, held to redraw and by `LiveLine.write` while
a piece of text is noted and written. Noted, because restoring cannot be trusted with a cursor behind a full row: it stays there until
the next character wraps, but tmux, the Linux console and others restore it *to* the last column, and the next character would replace
the last. So the text of the current line is followed, and while it ends at the edge nothing is drawn.

Why the terminal is always given back. Leaving does it under the same lock, and afterwards the thread draws no more; if Ctrl-C cuts
leaving short, it is done when the process ends. SIGTERM and Ctrl-Z do it before the process ends or stops. In the background nothing is
drawn. A new size is noticed at the next redraw: everything below the text is cleared and the bottom row reserved anew.
"""

import atexit
import os
import re
import signal
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice, pairwise
from threading import Event, RLock, Thread, current_thread, main_thread
from time import perf_counter
from types import FrameType, TracebackType
from typing import Self
from unicodedata import category, east_asian_width

from penstock.base.config import terminal_kind
from penstock.base.meter import Flow, WeightStats
from penstock.base.units import format_rate, format_size
from penstock.cli import terminal

PERIOD = 0.25
"""Seconds between two redraws."""
WINDOW = 2.0
"""Seconds over which rates are taken; a pass, where that is longer."""

_FEWEST_ROWS, _FEWEST_COLUMNS = 4, 20
_SAVE, _RESTORE, _WHOLE = "\x1b7", "\x1b8", "\x1b[r"
_CLEAR_BELOW = "\x1b[J"
_MAKE_ROOM = "\x1bD\x1b[A"
"""One down, scrolling if need be, and one up: the text is not in the bottom row, its column is kept."""
_ASIDE = (signal.SIGTERM, signal.SIGTSTP)
_DISPUTED = re.compile("[\xad\u200d\ufe0e\ufe0f\U0001f1e6-\U0001f1ff\U0001f3fb-\U0001f3ff]")
"""Characters whose width terminals do not agree about."""
_UNKNOWN = "\u200d"
"""Stands for the text of a line of which nobody can tell how much is there."""


class LiveLine:
    """The line at the bottom for the time of a `with` block, to be begun where the cursor is at the beginning of a row.

    stats: called from a thread of this object, and while a step runs, so it must not wait for the step; None has nothing to show.
    There is no line, and `write` only writes, where `quiet`, where stderr is no terminal or a dumb one, where stdout goes into a pipe
    (whose reader may use the terminal too), and where nothing streams.
    """

    def __init__(self, stats: Callable[[], WeightStats | None], *, quiet: bool = False, period: float = PERIOD) -> None:
        self._stats, self._quiet, self._period = stats, quiet, period
        self._lock = RLock()
        self._fd = -1
        """Of the terminal while there may be a line."""
        self._reserved: os.terminal_size | None = None
        """The size for which the bottom row is taken."""
        self._text = ""
        """Of the line that the cursor is in."""
        self._writing = False
        self._seen = deque[tuple[float, WeightStats]]()
        self._before: dict[signal.Signals, object] = {}
        self._end = Event()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        stats = None if self._quiet or not _usable() else self._stats()
        if stats is None or not stats.streams:
            return self
        self._fd = sys.stderr.fileno()
        self._seen.append((perf_counter(), stats))
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def write(self, text: str, *, bold: bool = False) -> None:
        """terminal.write, for all text to stdout within the block."""
        with self._lock:
            self._writing = True
            if self._fd >= 0 and terminal.is_terminal(sys.stdout):
                self._text = (self._text + text).rpartition("\n")[2]
            terminal.write(text, bold=bold)
            self._writing = False

    def redraw(self) -> None:
        """Bring the line up to date, unless the cursor is behind a full row or the terminal is another's just now."""
        stats = self._stats()
        with self._lock:
            if stats is None or self._fd < 0 or not _in_foreground(self._fd):
                return
            size = _size(self._fd)
            if size.lines < _FEWEST_ROWS or size.columns < _FEWEST_COLUMNS:
                self._leave()
            elif not at_edge(self._text, size.columns):
                shown = self._shown(stats, size.columns - 1)
                begin = _SAVE
                if size != self._reserved:
                    begin = f"{_SAVE}{_WHOLE}{_RESTORE}{_MAKE_ROOM}{_CLEAR_BELOW}{_SAVE}\x1b[1;{size.lines - 1}r"
                self._reserved = size
                self._put(f"{begin}\x1b[{size.lines};1H\x1b[0;2m{shown}\x1b[0m\x1b[K{_RESTORE}")

    def _shown(self, stats: WeightStats, width: int) -> str:
        """The line for `stats` now. What was seen is kept for as long as it takes to tell what happens in a WINDOW and in a pass."""
        now, seen = perf_counter(), self._seen
        seen.append((now, stats))
        while len(seen) > 2 and now - seen[1][0] >= WINDOW and pass_seconds(islice(seen, 1, None)):
            seen.popleft()
        begin, before = seen[0]
        return line(stats, stats.since(before).flow(now - begin), pass_seconds(seen), width)

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
                self._put(f"{_SAVE}{_WHOLE}{_RESTORE}" + ("" if at_edge(self._text, size.columns) else _CLEAR_BELOW))
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
        """Before the process ends or stops. Continued, it goes on here, at the beginning of a row, and the thread draws again."""
        with self._lock:
            self._leave()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            signal.signal(number, self._step_aside)
            self._text = _UNKNOWN if self._writing else ""

    def _put(self, sequence: str) -> None:
        data = sequence.encode(sys.stderr.encoding, "replace")
        with suppress(OSError):  # The terminal is gone, and with it whoever would look.
            while data:
                data = data[os.write(self._fd, data) :]


def pass_seconds(seen: Iterable[tuple[float, WeightStats]]) -> float:
    """Of a pass, from the first beginning of one that is noticed in `seen` to the last; 0 if there are not two. `seen`: when, and what."""
    begun = [later for earlier, later in pairwise(seen) if later[1].passes > earlier[1].passes]
    if len(begun) < 2:
        return 0.0
    (first, then), (last, now) = begun[0], begun[-1]
    return (last - first) / (now.passes - then.passes)


def line(stats: WeightStats, flow: Flow, seconds: float, width: int) -> str:
    """Where weights are and how they flow, in the longest form that fits into `width`, else cut. `seconds`: of a pass, 0 if not known."""
    took = f"pass {seconds:.3g} s" if seconds else "first pass"
    flows = " | ".join([*_flows(stats, flow), f"{took} (predicted {stats.predicted:.3g})"])
    brief = [f"link {format_rate(flow.copied)} {flow.copied_share:.0%}", took]
    if stats.disk_rate:
        brief.insert(1, f"disk {format_rate(flow.read)} {flow.read_share:.0%}")
        brief.insert(2, f"waits disk {flow.waited_disk:.0%} link {flow.waited_link:.0%}")
    else:
        brief.insert(1, f"waits {flow.waited_link:.0%}")
    forms = [f"{_homes(stats)} | {flows}", flows, " | ".join(brief)]
    return next((form for form in forms if len(form) <= width), forms[-1][:width])


def summary(stats: WeightStats, seconds: float) -> str:
    """One line for the end of a run in which something streamed: what was counted in its `seconds`."""
    passes = f"{stats.passes:,} {'pass' if stats.passes == 1 else 'passes'} in {seconds:.3g} s"
    took = f"{seconds / stats.passes:.3g} s each" if stats.passes else "none begun"
    predicted = f"{took} (predicted {stats.predicted:.3g}, bound by {stats.binding})"
    return " | ".join([f"weights: {_homes(stats)}", passes, *_flows(stats, stats.flow(seconds)), predicted])


def at_edge(text: str, columns: int) -> bool:
    """Whether a line of `text`, written from the first column on, leaves the cursor behind a full row; also if nobody can tell."""
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


def _homes(stats: WeightStats) -> str:
    homes = [f"device {format_size(stats.device)} + ring {format_size(stats.device_ring)}"]
    if stats.host or stats.host_ring:
        homes.append(f"host {format_size(stats.host)}" + (f" + ring {format_size(stats.host_ring)}" if stats.host_ring else ""))
    if stats.disk:
        homes.append(f"disk {format_size(stats.disk)}")
    return " · ".join(homes)


def _flows(stats: WeightStats, flow: Flow) -> list[str]:
    """What each link carries, and for how much of the time arithmetic waited."""
    link, waits = f"link {_of(flow.copied, stats.link_rate, flow.copied_share)}", f"link {flow.waited_link:.0%}"
    if not stats.disk_rate:
        return [link, f"waits: {waits}"]
    return [link, f"disk {_of(flow.read, stats.disk_rate, flow.read_share)}", f"waits: disk {flow.waited_disk:.0%}, {waits}"]


def _of(rate: float, ceiling: float, share: float) -> str:
    """`7.20 of 53.4 GB/s (13%)`."""
    now, most = format_rate(rate), format_rate(ceiling)
    if not ceiling:
        return now
    number, unit = now.split()
    return f"{number if most.endswith(f' {unit}') else now} of {most} ({share:.0%})"


def _usable() -> bool:
    """Whether the terminal behind stderr can have a line that nobody else draws over."""
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
    """Whether a shell would let the process have the terminal. One that is not the process's own, or not known here, has no such shell."""
    try:
        return os.tcgetpgrp(fd) in (0, os.getpgrp())
    except OSError:
        return True
