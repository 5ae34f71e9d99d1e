"""Loads the model of a command, and shows on stderr what was decided about it, and how far loading is."""

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING

from penstock.base.config import Config, terminal_kind
from penstock.base.garbage import no_collection
from penstock.base.trace import Trace
from penstock.cli.options import as_flags
from penstock.cli.progress import progress_bar
from penstock.cli.terminal import is_terminal, say, say_beside, undisturbed

if TYPE_CHECKING:
    from rich.progress import Progress

    from penstock.api.llm import LLM

PATIENCE = 0.5
"""Seconds after which a bar appears: what is done sooner needs none."""
PERIOD = 0.1
"""Seconds between two updates."""
Loading = Callable[[str, int, int], None]
"""Called from any thread with the work under way, bytes done and bytes in all."""
_WRITTEN = "a trace, to be opened in ui.perfetto.dev"
_EMPTY = "a trace with nothing in it: all weights are on the device, nothing streamed"


def compute_with(threads: int | None = None) -> None:
    """Load torch. That takes 1.2 s on two cores, so what can be checked before should be.

    threads: of the CPU, if not all.
    """
    with undisturbed():
        import torch

    if threads is not None:
        torch.set_num_threads(threads)


class _Remarks(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say_beside(as_flags(self.format(record)))


@contextmanager
def boot_log(quiet: bool) -> Iterator[None]:
    """Print on stderr what boot decides, unless `quiet`: device, dtype, memory sizing."""
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
    """Load a model, which the caller closes. Raises PenstockErrors."""
    first = "penstock.api.llm" not in sys.modules
    with no_collection():
        compute_with(config.threads)
        from penstock.api.llm import LLM

        if first:
            gc.freeze()  # What is imported stays. Loading collects garbage twice, which took 0.3 s each time.
    with loading_bar(quiet) as loading:
        return LLM.from_config(config, progress=False, trace=trace, loading=loading)


@contextmanager
def loaded(config: Config, *, quiet: bool, trace: Path | None = None) -> Iterator["LLM"]:
    """Load a model for a `with` block. Raises PenstockErrors.

    quiet: do not print what boot decides. trace: a file that is written after the model has been used,
    also if an error or Ctrl-C ended that.
    """
    if trace is not None:
        Trace.check(trace)
    spans = None if trace is None else Trace()
    with boot_log(quiet):
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
    """Show on a terminal how far loading and packing are. Yields None where nothing is to be shown."""
    if quiet or not is_terminal(sys.stderr) or terminal_kind() == "dumb":
        yield None
        return
    bar = _Bar()
    try:
        yield bar.tell
    finally:
        bar.end()


class _Bar:
    """A bar that is shown while something takes long, and then again for the next."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._what, self._done, self._due = "", 0, 0.0
        self._bar: Progress | None = None

    def tell(self, what: str, done: int, total: int) -> None:
        """Note what is done. Of several threads, one may come late with less than another."""
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
                    self._bar = progress_bar(what, total, transient=True)
                    self._bar.start()
                self._bar.update(self._bar.task_ids[0], completed=self._done)

    def end(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()
