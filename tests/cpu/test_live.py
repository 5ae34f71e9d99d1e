"""The line at the bottom of a real pseudo-terminal, seen through a small emulation of what is on the other
side of it.

The proof that text stays whole: a terminal that saw text and line shows in the end what one shows that saw
only the text. It may be forgetful, as tmux and the Linux console are: restoring a cursor that stood behind a
full row puts it on the last column.
"""

import codecs
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event, current_thread, main_thread
from unicodedata import combining, east_asian_width

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forks
from penstock.base.meter import ExpertCounts, KVStats, MeterSample, PromptProgress, WeightStats, pass_seconds
from penstock.bench.speed.streaming import Streaming
from penstock.cli import live as module
from penstock.cli.live import LiveLine, at_edge
from penstock.cli.main import main
from penstock.cli.summaries import (
    bar,
    beside,
    expert_summary,
    fitting,
    kv_forms,
    kv_summary,
    summary,
    weight_forms,
)
from penstock.cli.terminal import PLAIN, Look
from penstock.cli.wrapping import Wrapper
from penstock.engine.engine import Progress

GIB = 1 << 30
STATS = WeightStats(
    device=int(14.1 * GIB),
    host=98 * GIB,
    disk=int(21.3 * GIB),
    device_ring=int(1.6 * GIB),
    host_ring=GIB // 2,
    passes=12,
    copied=int(72e9),
    read=int(24e9),
    stalled_link=0.2,
    stalled_disk=7.1,
    link_rate=53.4e9,
    disk_rate=2.5e9,
    predicted=7.51,
    binding="disk",
)
RESIDENT = replace(STATS, device_ring=0)
"""Of a model of which nothing streams."""
KV = KVStats(host=3 * GIB, disk=0, room=8 * GIB, copied=120 * GIB, sent=3 * GIB)
NEVER = 3600.0
"""A period in which the thread of a line draws nothing: the test does."""

# ---- what is on the other side


class Screen:
    """A terminal of `rows` by `columns`: cells, what has scrolled out at the top, and the sequences that the
    line uses."""

    def __init__(self, rows: int, columns: int, *, forgetful: bool = False) -> None:
        self.rows, self.columns, self.forgetful = rows, columns, forgetful
        self.history: list[list[str]] = []
        self.cells = [[""] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.full = False
        """The cursor is behind the last column: the next character wraps."""
        self.top, self.bottom = 0, rows - 1
        self.saved = (0, 0, False)
        self._decode = codecs.getincrementaldecoder("utf-8")("strict").decode
        self._rest = ""
        self.marks = 0

    @property
    def region(self) -> tuple[int, int]:
        return self.top, self.bottom

    @property
    def last_row(self) -> str:
        return "".join(cell or " " for cell in self.cells[-1]).rstrip()

    def shown(self) -> list[str]:
        """All there is, from the first row that scrolled out to the last that is not empty."""
        rows = ["".join(cell or " " for cell in row).rstrip() for row in (*self.history, *self.cells)]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def resize(self, rows: int, columns: int) -> None:
        """Rows are cut or filled at the right; those below the cursor go first, then the topmost scroll
        out."""
        while len(self.cells) > rows:
            if self.row < len(self.cells) - 1:
                self.cells.pop()
            else:
                self.history.append(self.cells.pop(0))
                self.row -= 1
        self.cells += [[] for _ in range(rows - len(self.cells))]
        self.cells = [(row + [""] * columns)[:columns] for row in self.cells]
        self.rows, self.columns, self.column, self.full = rows, columns, min(self.column, columns - 1), False
        self.top, self.bottom = 0, rows - 1

    def feed(self, data: bytes) -> None:
        text = self._rest + self._decode(data)
        self._rest = ""
        while text:
            if found := re.match(r"\x1b(?:\[([0-9;]*)([A-Za-z])|([78D]))", text):
                self._obey(found[2] or found[3], [int(number or 0) for number in (found[1] or "").split(";")])
            elif re.fullmatch(r"\x1b(\[[0-9;]*)?", text):
                self._rest = text
                return
            else:
                assert text[0] != "\x1b", f"a sequence that is not known, or was cut: {text[:20]!r}"
                found = re.match(".", text, re.DOTALL)
                assert found
                self._type(found[0])
            text = text[found.end() :]

    def _type(self, char: str) -> None:
        match char:
            case "\n":
                self._index()
            case "\r":
                self.column, self.full = 0, False
            case "\t":
                self.column = (
                    self.column if self.full else min(self.column - self.column % 8 + 8, self.columns - 1)
                )
            case "\x05":
                self.marks += 1
            case _ if combining(char):
                at = self.column if self.full else self.column - 1
                self.cells[self.row][max(at, 0)] += char
            case _:
                self._put(char, 2 if east_asian_width(char) in "FW" else 1)

    def _put(self, char: str, cells: int) -> None:
        if self.full or self.column + cells > self.columns:
            self.column = 0
            self._index()
        row = self.cells[self.row]
        row[self.column : self.column + cells] = [char, "\u200b"][:cells]
        self.column += cells
        self.full = self.column == self.columns
        self.column -= self.full

    def _index(self) -> None:
        """A row down, or up with everything else in the region."""
        self.full = False
        if self.row == self.bottom:
            gone = self.cells.pop(self.top)
            if self.top == 0:
                self.history.append(gone)
            self.cells.insert(self.bottom, [""] * self.columns)
        elif self.row < self.rows - 1:
            self.row += 1

    def _obey(self, kind: str, numbers: list[int]) -> None:
        match kind, numbers:
            case "7", _:
                self.saved = self.row, self.column, self.full
            case "8", _:
                self.row, self.column, self.full = self.saved
                self.row, self.full = min(self.row, self.rows - 1), self.full and not self.forgetful
            case "D", _:
                full = self.full
                self._index()
                self.full = full
            case "A", [number]:
                self.row, self.full = max(self.row - max(number, 1), 0), False
            case "H", [row, column]:
                self.row, self.column, self.full = (
                    min(row, self.rows) - 1,
                    min(column, self.columns) - 1,
                    False,
                )
            case "r", [top, bottom]:
                self.top, self.bottom, self.row, self.column, self.full = top - 1, bottom - 1, 0, 0, False
                assert 0 <= self.top < self.bottom < self.rows
            case "r", [0]:
                self.top, self.bottom, self.row, self.column, self.full = 0, self.rows - 1, 0, 0, False
            case "K", [0]:
                self._erase(self.row, self.column)
            case "K", [2]:
                self._erase(self.row, 0)
            case "J", [0]:
                self._erase(self.row, self.column)
                for row in range(self.row + 1, self.rows):
                    self._erase(row, 0)
            case "m", _:
                pass
            case _:
                raise AssertionError(f"a sequence that is not known: {kind} {numbers}")

    def _erase(self, row: int, column: int) -> None:
        self.cells[row][column:] = [""] * (self.columns - column)


class Terminal:
    """A pseudo-terminal with a screen. Whoever writes to it must not wait for more than it takes unread: a
    few thousand bytes."""

    def __init__(self, rows: int = 8, columns: int = 60, *, forgetful: bool = False) -> None:
        self.screen = Screen(rows, columns, forgetful=forgetful)
        self.ours, self.theirs = pty.openpty()
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def until(self, done: Callable[[Screen], bool]) -> None:
        """Read until the screen is as wanted, within a minute."""
        end = time.monotonic() + 60
        while not done(self.screen):
            ready, _, _ = select.select([self.ours], [], [], max(0, end - time.monotonic()))
            assert ready, f"not to be: {self.screen.shown()} {self.screen.region}"
            self.screen.feed(os.read(self.ours, 1024))

    def settle(self) -> Screen:
        """The screen with all that was written until now."""
        marks = self.screen.marks
        os.write(self.theirs, b"\x05")
        self.until(lambda screen: screen.marks > marks)
        return self.screen

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


def only(text: str, *sizes: tuple[int, int]) -> list[str]:
    """What a terminal shows that saw nothing but `text`, to be resized at each form feed in it."""
    (rows, columns), *later = sizes
    screen = Screen(rows, columns)
    first, *parts = text.replace("\n", "\r\n").split("\f")
    screen.feed(first.encode())
    for size, part in zip(later, parts, strict=True):
        screen.resize(*size)
        screen.feed(part.encode())
    return screen.shown()


@contextmanager
def standing_in(terminal: Terminal, term: str | None = "xterm", out: int | None = None) -> Iterator[None]:
    """This process's stdout and stderr are the terminal's; or stdout is the file `out`."""
    with (
        pytest.MonkeyPatch.context() as patch,
        open(terminal.theirs, "w", encoding="utf-8", closefd=False) as stderr,
    ):
        patch.delenv("TERM", raising=False)
        if term is not None:
            patch.setenv("TERM", term)
        with (
            open(terminal.theirs if out is None else out, "w", encoding="utf-8", closefd=False) as stdout,
            redirect_stdout(stdout),
            redirect_stderr(stderr),
        ):
            yield


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


# ---- text and line


def at_rest(columns: int) -> str:
    """The line while STATS stay as they are."""
    return fitting(weight_forms(STATS, STATS.since(STATS).flow(1.0), 0.0), columns - 1).rstrip()


PIECES = st.lists(
    st.text("abcdefgh  \n\té€漢字", min_size=1, max_size=9) | st.sampled_from(["e\u0301", "\n\n", "0" * 45]),
    max_size=25,
)


@settings(max_examples=150)
@given(PIECES, st.integers(4, 7), st.integers(20, 24), st.booleans())
def test_text_is_whole_whatever_is_drawn_in_between(
    pieces: list[str], rows: int, columns: int, forgetful: bool
) -> None:
    text = "".join(pieces)
    terminal = Terminal(rows, columns, forgetful=forgetful)
    with standing_in(terminal), LiveLine(lambda: STATS, period=NEVER) as live:
        for piece in pieces:
            live.write(piece)
            live.redraw()
            assert terminal.settle().region == (0, rows - 2)
            assert terminal.screen.last_row == at_rest(columns)
    assert terminal.settle().region == (0, rows - 1)
    os.write(terminal.theirs, b"\nafterwards")
    assert terminal.settle().shown() == only(f"{text}\nafterwards", (rows, columns))
    terminal.close()


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PATIENCE", seconds)
        yield


@settings(max_examples=100)
@given(PIECES, st.integers(4, 7), st.integers(20, 90), st.booleans(), st.sampled_from([STATS, RESIDENT]))
def test_text_is_whole_whatever_is_computed_in_between(
    pieces: list[str], rows: int, columns: int, forgetful: bool, stats: WeightStats
) -> None:
    """Each piece is taken for the first of an answer: before it there is a bar, unless the cursor is behind a
    full row, and then none."""
    text, terminal, computed = "", Terminal(rows, columns, forgetful=forgetful), count(40)
    line = LiveLine(lambda: stats, progress=lambda: Progress(40, next(computed)), period=NEVER)
    with patience(0.0), standing_in(terminal), line as live:
        for piece in pieces:
            live.compute(100)
            live.redraw()
            edge = at_edge(text.rpartition("\n")[2], columns)
            assert ("40 of 100" in terminal.settle().last_row) is not edge
            live.write(piece)
            text += piece
            assert terminal.settle().region == (0, rows - 2 if stats.streams else rows - 1)
            assert "40 of 100" not in terminal.screen.last_row
    assert terminal.settle().region == (0, rows - 1)
    os.write(terminal.theirs, b"\nafterwards")
    assert terminal.settle().shown() == only(f"{text}\nafterwards", (rows, columns))
    terminal.close()


def test_the_line_shows_what_has_changed_but_not_behind_a_full_row() -> None:
    terminal, stats = Terminal(8, 100), STATS
    with standing_in(terminal), LiveLine(lambda: stats, period=NEVER) as live:
        for text, predicted, shown in (
            ("0" * 99, 1.0, 1.0),
            ("0", 2.0, 1.0),
            ("0", 3.0, 3.0),
            ("\n👍\ufe0f", 4.0, 3.0),
            ("\n", 5.0, 5.0),
        ):
            stats = replace(STATS, disk_rate=0.0, predicted=predicted)
            live.write(text)
            live.redraw()
            assert terminal.settle().last_row.endswith(f"| first pass (decode predicted {shown:.3g})")
    terminal.close()


def test_the_line_tells_a_pass_once_it_has_seen_two_begin(terminal: Terminal) -> None:
    passes = iter([12, 12, 13, 14, 15])
    with (
        standing_in(terminal),
        LiveLine(lambda: replace(STATS, passes=next(passes), disk_rate=0.0), period=NEVER) as live,
    ):
        assert terminal.settle().last_row.endswith("first pass")
        live.redraw()
        assert terminal.settle().last_row.endswith("first pass")
        for _ in range(2):
            live.redraw()
        assert re.search(r"\| pass [\d.e-]+ s$", terminal.settle().last_row)


def test_bold_text_and_control_characters_go_through_as_ever(terminal: Terminal) -> None:
    with standing_in(terminal), LiveLine(lambda: STATS, period=NEVER) as live:
        live.write("\x1b" * 60, bold=True)  # pictures, of which each takes a cell
        live.redraw()
        live.write("x")
    assert terminal.settle().shown() == ["\u241b" * 60, "x"]


def test_thinking_that_is_hidden_is_counted_until_it_ends(terminal: Terminal) -> None:
    with standing_in(terminal), LiveLine(lambda: RESIDENT, period=NEVER) as live:
        live.think(1)
        assert terminal.settle().last_row == "thinking… 1 token"
        live.think(1213)
        live.redraw()
        assert terminal.settle().last_row == "thinking… 1,213 tokens"
        live.think(0)
        assert terminal.settle().last_row == ""
        live.draw([("A ", Look(bold=True)), ("\x1b[2J" + "b" * 57, PLAIN)])
        live.redraw()
        live.draw([("c", PLAIN)])
    assert terminal.settle().shown() == ["A \u241b[2J" + "b" * 54, "bbbc"]


def test_weights_that_fail_leave_the_line_as_it_was(terminal: Terminal) -> None:
    failed = Event()

    def stats() -> WeightStats:
        if current_thread() is main_thread():
            return STATS
        failed.set()
        raise OSError("the disk is gone")

    with standing_in(terminal), LiveLine(stats, period=0.001) as live:
        assert failed.wait(60)
        live.write("text")
        assert terminal.settle().last_row == at_rest(60)
    assert terminal.settle().shown() == ["text"]


@pytest.mark.parametrize(
    ("text", "edge"),
    [
        ("", False),
        ("a" * 19, False),
        ("a" * 20, True),
        ("a" * 21, False),
        ("a" * 400, True),
        ("漢" * 10, True),
        ("a" + "漢" * 10, False),
        ("a" * 19 + "漢" + "a" * 18, True),
        ("e\u0301" * 20, True),
        ("\t\ta", False),
        ("\t" * 9, False),
        ("\t" * 9 + "a", True),
        ("a" * 20 + "\t", True),
        ("a\u200db", True),
        ("🇫🇷", True),
    ],
)
def test_where_the_edge_of_twenty_columns_is(text: str, edge: bool) -> None:
    assert at_edge(text, 20) is edge


# ---- sizes


@pytest.mark.parametrize("size", [(12, 60), (5, 60), (8, 90), (8, 40), (14, 100), (4, 30)])
def test_the_line_moves_with_the_bottom(terminal: Terminal, size: tuple[int, int]) -> None:
    before, after = "\n".join(f"row {number}" for number in range(20)), " goes on\nand on\n"
    with standing_in(terminal), LiveLine(lambda: STATS, period=NEVER) as live:
        live.write(before)
        terminal.settle()
        terminal.resize(*size)
        live.redraw()
        assert terminal.settle().region == (0, size[0] - 2)
        assert terminal.screen.last_row == at_rest(size[1])
        assert [row.startswith("link") for row in terminal.screen.shown()].count(True) == 1
        live.write(after)
        terminal.settle()
    assert terminal.settle().region == (0, size[0] - 1)
    assert terminal.screen.shown() == only(f"{before}\f{after}", (8, 60), size)


@pytest.mark.parametrize("size", [(12, 60), (5, 60), (8, 90)])
def test_the_line_is_gone_also_if_the_size_changed_at_the_very_end(
    terminal: Terminal, size: tuple[int, int]
) -> None:
    with standing_in(terminal), LiveLine(lambda: STATS, period=NEVER) as live:
        live.write("one\ntwo\n")
        terminal.settle()
        terminal.resize(*size)
    assert terminal.settle().region == (0, size[0] - 1)
    assert terminal.screen.shown() == ["one", "two"]


@pytest.mark.parametrize("size", [(3, 60), (8, 19), (0, 0)])
def test_a_terminal_too_small_has_no_line_until_it_grows(size: tuple[int, int]) -> None:
    terminal = Terminal(6, 60)
    with standing_in(terminal), LiveLine(lambda: STATS, period=NEVER) as live:
        live.write("one\n")
        assert terminal.settle().region == (0, 4)
        fcntl.ioctl(terminal.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        live.redraw()
        assert terminal.settle().region == (0, 5)
        assert terminal.screen.shown() == ["one"]
        terminal.resize(6, 60)
        live.redraw()
        assert terminal.settle().region == (0, 4)
    assert terminal.settle().shown() == ["one"]
    terminal.close()


# ---- where there is none


@pytest.mark.parametrize(
    ("stats", "quiet", "term"),
    [
        (STATS, True, "xterm"),
        (STATS, False, "dumb"),
        (STATS, False, None),
        (RESIDENT, False, "xterm"),
    ],
    ids=["quiet", "dumb", "no TERM", "nothing streams"],
)
def test_only_text_is_written_where_no_line_is_wanted(
    terminal: Terminal, stats: WeightStats, quiet: bool, term: str | None
) -> None:
    # A prompt is under way, but of the model of which nothing streams not for long.
    line = LiveLine(lambda: stats, progress=lambda: Progress(40, 40), quiet=quiet, period=0.001)
    with patience(0.0 if stats.streams else NEVER), standing_in(terminal, term), line as live:
        live.compute(100)
        live.redraw()
        live.write("text")
        live.redraw()
    assert terminal.settle().shown() == ["text"]
    assert terminal.screen.saved == (0, 0, False)


def test_a_pipe_may_lead_to_the_same_terminal_and_a_file_cannot(terminal: Terminal, tmp_path: Path) -> None:
    read, write = os.pipe()
    with standing_in(terminal, out=write), LiveLine(lambda: STATS, period=NEVER) as live:
        live.write("into the pipe")
        assert terminal.settle().region == (0, 7)
    assert os.read(read, 100) == b"into the pipe"
    os.close(read)
    os.close(write)
    assert terminal.settle().shown() == []
    file = os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY)
    with standing_in(terminal, out=file), LiveLine(lambda: STATS, period=NEVER) as live:
        live.write("x" * 60)
        assert terminal.settle().last_row.startswith("link")
        assert len(terminal.screen.shown()) == terminal.screen.rows
    os.close(file)
    assert (tmp_path / "out").read_text() == "x" * 60
    assert terminal.settle().shown() == []


def test_nothing_is_written_where_stderr_is_no_terminal(terminal: Terminal, tmp_path: Path) -> None:
    err = (tmp_path / "err").open("w")
    with (
        err,
        patience(0.0),
        standing_in(terminal),
        redirect_stderr(err),
        LiveLine(lambda: STATS, period=0.001) as live,
    ):
        live.compute(100)
        live.redraw()
        live.write("text")
        live.redraw()
    assert terminal.settle().shown() == ["text"]
    assert (tmp_path / "err").read_text() == ""


# ---- other processes: threads at work, and all ways to end

PROLOGUE = """
import os, signal, sys, time
from penstock.base.meter import WeightStats
from penstock.cli.live import LiveLine
stats = lambda: WeightStats(1 << 30, 0, 0, 1 << 20, 0, 1, 10**9, 0, 1.0, 0.0, 1e9, 0.0, 2.0, "link")
"""


@contextmanager
def running(terminal: Terminal, script: str, **more: object) -> Iterator["subprocess.Popen[bytes]"]:
    """A Python of its own, with the three standard streams in the terminal."""
    environment: Mapping[str, str] = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TERM": "xterm",
        "PYTHONIOENCODING": "utf-8",
    }
    streams = {"stdin": terminal.theirs, "stdout": terminal.theirs, "stderr": terminal.theirs} | more
    process = forks.LoadedPopen([sys.executable, "-c", PROLOGUE + script], env=environment, **streams)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def test_a_thread_that_draws_all_the_time_cuts_nothing_and_knows_where_the_cursor_is() -> None:
    terminal = Terminal(forgetful=True)
    script = """
with LiveLine(stats, period=1e-5) as live:
    for number in range(500):
        live.write("a" * 30)
        live.write("é漢" * 10, bold=True)  # up to the edge
    live.write("\\n" + "漢" * 15_000 + "\\n")  # longer than what Python or a terminal takes at once
print("end\5")
"""
    with running(terminal, script) as process:
        terminal.until(lambda screen: screen.last_row.startswith("link"))
        terminal.until(lambda screen: screen.marks == 1)
        assert process.wait() == 0
    row = "a" * 30 + "é漢" * 10
    assert terminal.settle().shown() == only(f"{row * 500}\n{'漢' * 15_000}\nend", (8, 60))
    assert terminal.screen.region == (0, 7)
    terminal.close()


HELD = """
with LiveLine(stats, period=0.001) as live:
    live.write("one\\ntwo\\nhalf a row")
    print(end="\\5", flush=True)
    {}
print("after")
"""


@pytest.mark.parametrize(
    ("does", "sent", "code"),
    [
        ("time.sleep(60)", signal.SIGINT, -signal.SIGINT),
        ("time.sleep(60)", signal.SIGTERM, -signal.SIGTERM),
        ("input(); raise RuntimeError('gone wrong')", None, 1),
        ("input(); sys.exit(7)", None, 7),
        ("input(); live.write('\\n')", None, 0),
    ],
)
def test_the_terminal_is_given_back_at_every_end(
    terminal: Terminal, does: str, sent: signal.Signals | None, code: int
) -> None:
    with running(terminal, HELD.format(does), stdin=subprocess.PIPE) as process:
        terminal.until(
            lambda screen: screen.region == (0, 6) and screen.shown()[:3] == ["one", "two", "half a row"]
        )
        terminal.until(lambda screen: screen.last_row.startswith("link"))
        if sent is None:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        else:
            process.send_signal(sent)
        terminal.until(lambda screen: screen.region == (0, 7))
        assert process.wait() == code
    shown = terminal.settle().shown()
    assert shown[:2] == ["one", "two"]
    assert "link" not in "".join(shown)
    if code == 0:
        assert shown[2:] == ["half a row", "after"]


def test_what_was_never_left_is_left_when_the_process_ends(terminal: Terminal) -> None:
    with running(
        terminal, "live = LiveLine(stats, period=0.001).__enter__(); live.write('text\\n'); time.sleep(0.01)"
    ) as process:
        assert process.wait() == 0
    assert terminal.settle().shown() == ["text"]
    assert terminal.screen.saved != (0, 0, False)  # there was a line
    assert terminal.screen.region == (0, 7)


def test_a_stopped_process_leaves_the_terminal_to_others_and_takes_it_again() -> None:
    terminal = Terminal(forgetful=True)
    does = "sys.stdin.readline(); live.write('x' * 60); live.redraw(); live.write('y\\n')"
    with running(terminal, HELD.format(does), stdin=subprocess.PIPE, process_group=0) as process:
        terminal.until(lambda screen: screen.region == (0, 6) and screen.marks == 1)
        process.send_signal(signal.SIGTSTP)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert os.WSTOPSIG(status) == signal.SIGTSTP
        assert terminal.settle().region == (0, 7)
        assert terminal.screen.shown() == ["one", "two", "half a row"]
        os.write(terminal.theirs, b"\n$ fg\n")
        process.send_signal(signal.SIGCONT)
        terminal.until(lambda screen: screen.region == (0, 6) and screen.last_row.startswith("link"))
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait() == 0
    assert terminal.settle().shown() == ["one", "two", "half a row", "$ fg", "x" * 60, "y", "after"]
    assert terminal.screen.region == (0, 7)
    terminal.close()


def test_a_process_in_the_background_draws_nothing(terminal: Terminal) -> None:
    script = """
os.open(os.ttyname(2), os.O_RDWR)  # now the terminal is this session's
if child := os.fork():
    sys.stdin.readline()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(2, child)
    os.waitpid(child, 0)
    sys.exit()
os.setpgid(0, 0)
with LiveLine(stats, period=0.001) as live:
    for number in range(5):
        live.write(f"text {number}\\n")
        live.redraw()
    live.write("ready\\n")
    while True:
        time.sleep(0.01)
"""
    with running(terminal, script, stdin=subprocess.PIPE, start_new_session=True) as process:
        terminal.until(lambda screen: "ready" in screen.shown())
        assert terminal.settle().shown() == [*(f"text {number}" for number in range(5)), "ready"]
        assert terminal.screen.saved == (0, 0, False)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        terminal.until(lambda screen: screen.last_row.startswith("link") and screen.region == (0, 6))
        os.write(terminal.ours, b"\x03")  # Ctrl-C, which the terminal sends to its foreground
        assert process.wait() == 0
        terminal.until(lambda screen: screen.region == (0, 7))


# ---- what it says

BEFORE = replace(STATS, copied=0, read=0, stalled_link=0.0, stalled_disk=0.0)
FLOW = STATS.since(BEFORE).flow(10.0)
LINKS = "link 7.20 of 53.4 GB/s (13%) | disk 2.40 of 2.50 GB/s (96%) | waits: disk 71%, link 2%"
HOMES = "device 14.1 GiB + ring 1.60 GiB · host 98.0 GiB + ring 512 MiB · disk 21.3 GiB"
LONG = f"{HOMES} | {LINKS} | pass 7.61 s (decode predicted 7.51)"
SHORT = "link 7.20 GB/s 13% | disk 2.40 GB/s 96% | waits disk 71% link 2% | pass 7.61 s"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (len(LONG), LONG),
        (len(LONG) - 1, f"{LINKS} | pass 7.61 s (decode predicted 7.51)"),
        (79, SHORT),
        (40, SHORT[:40]),
    ],
)
def test_a_line_has_the_longest_form_that_fits(width: int, shown: str) -> None:
    assert fitting(weight_forms(STATS, FLOW, 7.61), width) == shown


def test_a_line_leaves_out_what_is_not_used_and_what_is_not_yet() -> None:
    stats = replace(STATS, host_ring=0, disk=0, disk_rate=0.0, read=0, copied=int(8e6))
    flow = stats.since(BEFORE).flow(10.0)
    links = "link 800 KB/s of 53.4 GB/s (0%) | waits: link 2%"
    homes = "device 14.1 GiB + ring 1.60 GiB · host 98.0 GiB"
    assert (
        fitting(weight_forms(stats, flow, 0.0), 200)
        == f"{homes} | {links} | first pass (decode predicted 7.51)"
    )
    assert fitting(weight_forms(stats, flow, 0.0), 60) == "link 800 KB/s 0% | waits 2% | first pass"
    bare = replace(stats, host=0, link_rate=0.0)
    assert fitting(weight_forms(bare, bare.flow(10.0), 0.0), 200).startswith(
        f"{homes[:31]} | link 800 KB/s | waits"
    )
    assert fitting([], 200) == ""


GB = 10**9
EXPERTS = ExpertCounts(asked=5184, hit=3162, from_disk=22, copied=27 * GB, read=3 * GB)


def test_experts_that_were_asked_for_have_a_line_and_a_part_of_the_live_line() -> None:
    stats = replace(STATS, passes=18, experts=EXPERTS)
    line = "experts: 61.0% of 5,184 asked were on the device | 25.1 GiB over the link"
    assert expert_summary(stats) == f"{line}, 2.79 GiB of it from disk | 1.40 GiB a pass"
    near = replace(stats, passes=0, experts=replace(EXPERTS, read=0, copied=GB))
    assert expert_summary(near).endswith("| 954 MiB over the link | 954 MiB a pass")
    assert "| experts 61.0% on the device | pass" in weight_forms(stats, FLOW, 7.61)[0]
    assert EXPERTS.found == {"device": 3162, "host": 2000, "disk": 22}
    assert (ExpertCounts().hit_rate, sum(ExpertCounts().found.values())) == (0.0, 0)


def test_what_the_cpu_computed_of_experts_is_said() -> None:
    experts = replace(EXPERTS, computed=1011)
    stats = replace(STATS, passes=18, experts=experts)
    assert " were on the device | 1,011 computed by the CPU | 25.1 GiB over the link" in expert_summary(stats)
    assert "on the device | CPU 50.0% of the others | pass" in weight_forms(stats, FLOW, 7.61)[0]
    made = Streaming(
        *(1 << 30,) * 7, 50e9, 0.0, 0.0, 0.0, 0.0, None, 40.0, experts_by_cpu=0.25, cpu_rate=80e9
    )
    text = "25.0% of the experts that the device lacked, at 80.0 GB/s while it computed"
    assert dict(made.rows(10.0))["computed by the CPU"].startswith(text)
    assert experts.by_place == {"cpu": 1011, "device": 1011}


def test_what_a_device_counts_has_a_rate_by_the_time_of_its_counts() -> None:
    """Counts that are looked at every two seconds, of 0.9 s and of 0.1 s ago, are 2.8 s apart."""
    own = ExpertCounts(fetched=20 * GB, copied=21 * GB, age=0.9)
    before = replace(STATS, copied=50 * GB, experts=own)
    more = ExpertCounts(fetched=48 * GB, copied=51 * GB, age=0.1)
    after = replace(STATS, copied=84 * GB, experts=more)
    # 28 GB in 2.8 s, and 6 GB in 2 s that the host counts.
    assert after.since(before).flow(2.0).copied == pytest.approx(10e9 + 3e9)
    same = replace(STATS, copied=56 * GB, experts=replace(own, copied=27 * GB, age=2.9))
    assert same.since(before).flow(2.0).copied == pytest.approx(3e9), "nothing new was seen"


KV_LONG, KV_SHORT = "KV host 3.00 GiB of 8.00 GiB, 120 GiB streamed, 21.0 GB/s", "KV 3.00 GiB 21.0 GB/s"


def test_kv_stands_beside_weights_where_there_is_room_for_both() -> None:
    weights, kv = weight_forms(STATS, FLOW, 7.61), kv_forms(KV, 21e9)
    forms = beside(weights, kv)
    assert fitting(forms, 300) == f"{LONG} | {KV_LONG}"
    assert fitting(forms, len(SHORT) + len(KV_SHORT) + 3) == f"{SHORT} | {KV_SHORT}"
    assert beside([], kv) == kv == [KV_LONG, KV_SHORT]
    assert beside(weights, []) == weights
    assert kv_forms(replace(KV, disk=GIB), 21e9)[0].startswith(
        "KV host 3.00 GiB of 8.00 GiB · disk 1.00 GiB, "
    )


def test_the_line_of_kv_counts_from_where_it_began() -> None:
    kv = KV
    terminal = Terminal(8, 80)
    with standing_in(terminal), LiveLine(lambda: RESIDENT, lambda: kv, period=NEVER) as live:
        kv = replace(KV, copied=KV.copied + 2 * GIB)
        live.redraw()
        assert terminal.settle().last_row.startswith("KV host 3.00 GiB of 8.00 GiB, 2.00 GiB streamed, ")
    assert terminal.settle().region == (0, 7)
    terminal.close()


def test_a_bar_tells_how_far_a_prompt_is_and_how_long_it_still_takes() -> None:
    prompt = PromptProgress(65_536, begin=10.0, computed=500)
    prompt.see(11.0, reached=30_000, computed=500)  # of a prompt that was given up
    assert bar(prompt, 11.0, 79) == f"prompt {'─' * 30} 0 of 65,536 tokens"
    prompt.see(14.0, reached=24_576, computed=500 + 8192)  # 16,384 were found
    assert prompt.rate == 2048.0
    assert (
        bar(prompt, 14.0, 99)
        == f"prompt {'━' * 11}{'─' * 19} 24,576 of 65,536 tokens, 2,048 tokens/s, 0:20 left"
    )
    assert bar(prompt, 19.0, 99).endswith("0:15 left")
    assert bar(prompt, 60.0, 99).endswith("0:00 left")
    assert bar(prompt, 14.0, 66).startswith("prompt ━━━───── 24,576")
    assert bar(prompt, 14.0, 40) == "prompt 24,576 of 65,536 tokens, 2,048 to"
    prompt.see(15.0, reached=0, computed=500 + 8192 + 1)  # the last step of it is done
    assert prompt.reached == 24_576
    slow = PromptProgress(10**6, begin=0.0, computed=0)
    slow.see(3600.0, 10**5, 10**5)
    assert bar(slow, 3600.0, 99).endswith(" 28 tokens/s, 9:00:00 left")


def test_a_summary_has_the_whole_run_in_a_line() -> None:
    for passes, told, each in (
        (12, "12 passes", "0.833 s each"),
        (1, "1 pass", "10 s each"),
        (0, "0 passes", "none begun"),
    ):
        whole = summary(replace(STATS, passes=passes), 10.0)
        assert (
            whole
            == f"weights: {HOMES} | {told} in 10 s | {LINKS} | {each} (decode predicted 7.51, bound by disk)"
        )
    told = (
        "KV: host 3.00 GiB of 8.00 GiB | to the device 120 GiB in 10 s (12.9 GB/s) | from the device 3.00 GiB"
    )
    assert kv_summary(KV, 10.0) == told


def seen(*passes: int) -> list[MeterSample]:
    """What is seen every second, of so many passes begun."""
    return [
        MeterSample(float(second), replace(STATS, passes=count), None) for second, count in enumerate(passes)
    ]


def test_a_pass_takes_from_one_beginning_to_another() -> None:
    assert pass_seconds(seen(3, 3, 4, 4, 4, 5, 5)) == 3.0
    assert pass_seconds(seen(0, 5, 12, 20)) == 2 / 15
    assert pass_seconds(seen(3, 3, 4, 4)) == 0.0
    assert pass_seconds(seen(3)) == 0.0


# ---- with a model behind it

COMMAND = """
from penstock.cli.main import main
LiveLine.__init__.__kwdefaults__["period"] = 0.001
from penstock.memory import probe
best = probe._best
probe._best = lambda work, device, seconds=0: best(work, device, 0.02)
probe._HOST_BYTES, probe._cache_bytes = 16 << 20, lambda: 0
sys.exit(main({!r}))
"""


def test_a_run_that_streams_writes_the_text_of_one_that_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        "run",
        "Once upon a time",
        "--temperature",
        "0",
        "--max-tokens",
        "60",
        "--dtype",
        "float32",
        "--max-step-tokens",
        "16",
    ]
    arguments += ["--max-length", "128"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # Each thread takes memory of its own.
    assert main([*arguments, "--quiet"]) == 0
    text = capsys.readouterr().out
    large = Terminal(16, 60)
    with running(
        large, COMMAND.format([*arguments, "--device-memory", "26MB", "--host-memory", "80MB"])
    ) as process:
        large.until(lambda screen: screen.region == (0, 14) and screen.last_row.startswith("link"))
        large.until(lambda screen: screen.region == (0, 15) and "bound by" in "".join(screen.shown()))
        assert process.wait() == 0
    shown = large.settle().shown()
    wrapped = Wrapper(lambda: 60).add(f"Once upon a time{text}")
    lines = only("".join(piece for piece, _ in wrapped), (16, 60))
    begin = shown.index(lines[0])
    assert shown[begin : begin + len(lines)] == lines
    assert shown[begin + len(lines)].startswith("prompt 5 tokens (0 cached)")
    assert "weights: device" in "".join(shown)
    large.close()


LONG_PROMPT = ["--temperature", "0", "--max-tokens", "40", "--dtype", "float32", "--max-step-tokens", "16"]
BAR = r"prompt ━+─* [\d,]+ of \d+ tokens, [\d,]+ tokens/s, \d+:\d\d left$"
BESIDE = ["--host-kv-memory", "64MiB", "--kv-blocks", "8", "--kv-tile", "64", "--block-size", "16"]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a few hundred tokens, more than fit into eight blocks."""
    file = tmp_path_factory.mktemp("story") / "story.txt"
    file.write_text("Once upon a time there was a little fox who lived in a wood and had many friends. " * 14)
    return file


def test_a_long_prompt_has_a_bar_until_the_first_text(
    story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--file", str(story), *LONG_PROMPT]
    assert main([*arguments, "--quiet"]) == 0
    text = capsys.readouterr().out
    assert main([*arguments, *BESIDE, "--verbose"]) == 0
    piped = capsys.readouterr()
    assert piped.out == text
    assert "\x1b" not in piped.err
    assert "━" not in piped.err
    assert re.search(
        r"^KV: host \S+ MiB of 64\.0 MiB \| to the device \S+ MiB in .* \| from the device \S+ MiB$",
        piped.err,
        re.MULTILINE,
    )
    large = Terminal(24, 90)
    script = f"from penstock.cli import live; live.PATIENCE = 0.0{COMMAND.format([*arguments, *BESIDE])}"
    with running(large, script) as process:
        large.until(lambda screen: re.match(BAR, screen.last_row) is not None)
        large.until(lambda screen: screen.last_row.startswith("KV host "))
        large.until(lambda screen: screen.region == (0, 23) and "from the device" in "".join(screen.shown()))
        assert process.wait() == 0
    shown = large.settle().shown()
    lines = only("".join(piece for piece, _ in Wrapper(lambda: 90).add(text)), (24, 90))
    begin = shown.index(lines[0])
    assert shown[begin : begin + len(lines)] == lines
    assert "━" not in "".join(shown)
    large.close()


def test_chat_has_it_too(story: Path) -> None:
    large = Terminal(24, 90)
    arguments = ["chat", "--raw", *LONG_PROMPT, *BESIDE]
    with running(
        large,
        f"from penstock.cli import live; live.PATIENCE = 0.0{COMMAND.format(arguments)}",
        stdin=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(story.read_bytes() + b"\n")
        process.stdin.close()
        large.until(lambda screen: screen.last_row.startswith("prompt ━"))
        large.until(lambda screen: screen.last_row.startswith("KV host "))
        large.until(lambda screen: screen.region == (0, 23))
        assert process.wait() == 0
    assert "━" not in "".join(large.settle().shown())
    large.close()


def test_json_has_what_moved(story: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step reads all blocks that are full and not in pages: exactly so much comes to the device, and
    each goes to the host once."""
    assert main(["run", "--file", str(story), *LONG_PROMPT, "--json", "--max-tokens", "1", *BESIDE]) == 0
    found = json.loads(capsys.readouterr().out)
    prompt, block = found["usage"]["prompt_tokens"], found["budget"]["block_bytes"]
    # of eight pages, those that a tail may not need: the last full blocks are there as well, for the steps
    # that follow
    near = 4
    assert found["kv"] == {
        "host": prompt // 16 * block,
        "disk": 0,
        "room": 64 << 20,
        "copied": (sum(range(0, prompt, 16)) // 16 - near * (near + 1) // 2) * block,
        "sent": prompt // 16 * block,
        "read": 0,
        "written": 0,
    }
    assert main(["run", "--file", str(story), *LONG_PROMPT, "--json", "--max-tokens", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["kv"] is None
