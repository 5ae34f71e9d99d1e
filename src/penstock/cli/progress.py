"""Progress bars on stderr, for what is not the live line's: packing, loading, batches."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


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
