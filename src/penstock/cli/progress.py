"""Progress on stderr, for what is not the live line's: packing, loading, batches. It is a bar on a terminal,
and elsewhere a line now and then."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from penstock.base.config import terminal_kind
from penstock.base.units import format_rate, format_size
from penstock.cli.terminal import is_terminal, say

if TYPE_CHECKING:
    from rich.progress import Progress

LINES_EVERY = 30.0
"""Seconds between two lines where there is no terminal: what is done sooner is told by none."""


@contextmanager
def byte_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how far something is with `total` bytes. Yields what is called with bytes as they are done, on one
    thread."""
    if is_terminal(sys.stderr) and terminal_kind() != "dumb":
        bar = progress_bar(what, total)
        try:
            yield partial(_advance, bar)
        finally:
            bar.stop()
        return
    done, began = 0, perf_counter()
    due = began + LINES_EVERY

    def tell(count: int) -> None:
        nonlocal done, due
        done, now = done + count, perf_counter()
        if now >= due:
            rate = format_rate(done / max(now - began, 1e-3))
            say(f"{what}: {format_size(done)} of {format_size(total)}, {rate}", faint=True)
            due = now + LINES_EVERY

    yield tell


def _advance(bar: "Progress", count: int) -> None:
    """Add to a bar, which appears with the first of it."""
    bar.start()
    bar.advance(bar.task_ids[0], count)


def progress_bar(what: str, total: int | None, *, count: bool = False, transient: bool = False) -> "Progress":
    """Return a bar with one task of `total` bytes, or with `count` of so many things, that is not shown yet.

    transient: the bar is removed at the end.
    """
    from rich.console import Console  # 40 ms, and only a terminal wants it
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    done = (MofNCompleteColumn(),) if count else (DownloadColumn(), TransferSpeedColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *done, TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=transient)
    bar.add_task(what, total=total)
    return bar
