"""Loads the model of a command, and shows on stderr what was decided about it, and how far loading is."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING

from penstock.base.config import Config, terminal_kind
from penstock.base.trace import Trace
from penstock.cli.terminal import is_terminal, say, undisturbed

if TYPE_CHECKING:
    from rich.progress import Progress

    from penstock.api.llm import LLM

PATIENCE = 0.5
"""Seconds after which a bar appears: what is done sooner needs none."""
PERIOD = 0.1
"""Seconds between two updates."""
Loading = Callable[[str, int, int], None]
"""What is being done, bytes done and bytes in all; called from any thread."""
_WRITTEN = "a trace, to be opened in ui.perfetto.dev"
_EMPTY = "a trace with nothing in it: all weights are on the device, nothing streamed"


def compute_with(threads: int | None = None) -> None:
    """Load torch, which takes 1.2 s on two cores, so that whatever can be checked before should be.
    `threads`: of the CPU, if not all."""
    with undisturbed():
        import torch

    if threads is not None:
        torch.set_num_threads(threads)


class _Remarks(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record), faint=True)


@contextmanager
def told(quiet: bool) -> Iterator[None]:
    """Unless `quiet`, what is decided goes to stderr: device, dtype, memory sizing."""
    log, remarks = logging.getLogger("penstock"), _Remarks(logging.INFO)
    before = log.level
    if not quiet:
        log.addHandler(remarks)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(remarks)
        log.setLevel(before)


def load(config: Config, *, quiet: bool, trace: Trace | None = None) -> "LLM":
    """The model, to be closed by the caller. Raises PenstockErrors."""
    compute_with()
    from penstock.api.llm import LLM

    settings = {field.name: getattr(config, field.name) for field in fields(Config)}
    with loading_bar(quiet) as loading:
        return LLM(**settings, progress=False, trace=trace, loading=loading)


@contextmanager
def loaded(config: Config, *, quiet: bool, trace: Path | None = None) -> Iterator["LLM"]:
    """The model, closed at the end. Unless `quiet`, device, dtype and memory sizing go to stderr. Raises
    PenstockErrors.

    `trace`: a file that is written after the model has been used, also if an error or Ctrl-C ended that.
    """
    if trace is not None:
        Trace.check(trace)
    spans = None if trace is None else Trace()
    with told(quiet):
        llm = load(config, quiet=quiet, trace=spans)
        try:
            with llm:
                yield llm
        finally:
            if trace is not None and spans is not None:
                _ = llm.memory  # notes what was still on its way, and ended with the model
                spans.write(trace)
                if not quiet:
                    say(f"{trace}: {_EMPTY if spans.empty else _WRITTEN}", faint=True)


@contextmanager
def loading_bar(quiet: bool) -> Iterator[Loading | None]:
    """Shows on a terminal how far loading and packing are. None where nobody wants to see it."""
    if quiet or not is_terminal(sys.stderr) or terminal_kind() == "dumb":
        yield None
        return
    bar = _Bar()
    try:
        yield bar.tell
    finally:
        bar.end()


class _Bar:
    """A bar for as long as something takes long, then for the next."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._what, self._done, self._due = "", 0, 0.0
        self._bar: Progress | None = None

    def tell(self, what: str, done: int, total: int) -> None:
        """Of several threads, one may be told late of less than another."""
        with self._lock:
            now = perf_counter()
            if what != self._what:
                self.end()
                self._what, self._done, self._due = what, 0, now + PATIENCE
            self._done = max(self._done, done)
            if self._done >= total:
                self.end()
            elif now >= self._due:
                self._due = now + PERIOD
                if self._bar is None:
                    self._bar = _shown(what, self._done, total)
                self._bar.update(self._bar.task_ids[0], completed=self._done)

    def end(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


def _shown(what: str, done: int, total: int) -> "Progress":
    from rich.console import Console  # 40 ms, and only a terminal wants it
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(what, total=total, completed=done)
    bar.start()
    return bar
