"""Shows on a terminal how far prompts have come that run together."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from penstock.api.sequences import SequenceGroup

_BAR_FROM = 2
"""Prompts from which there is a progress bar on a terminal."""


@contextmanager
def progress_bar(
    groups: Sequence[SequenceGroup], made: Callable[[], int], *, shown: bool | None
) -> Iterator[Callable[[], None]]:
    """Show a bar, and yield what is to be called whenever something may have come.

    made: counts the tokens that were made since the engine started.
    shown: whether there is a bar; None is for several prompts on a terminal.
    """
    if shown is None:
        shown = len(groups) >= _BAR_FROM and sys.stderr.isatty()
    if not shown:
        yield lambda: None
        return
    from rich.console import Console  # 40 ms, and only a terminal wants it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task, before = bar.add_task("", total=len(groups), rate="-"), made()

        def advance() -> None:
            elapsed = bar.tasks[0].elapsed or 0
            rate = f"{(made() - before) / elapsed:,.0f}" if elapsed else "-"
            bar.update(task, completed=sum(group.done for group in groups), rate=rate)

        yield advance
