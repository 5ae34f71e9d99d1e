"""Finds the model of a command, here or on the Hugging Face Hub; says what a download would take, asks on a
terminal, and shows how far it is."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from penstock.base.config import Config, terminal_kind
from penstock.base.errors import BudgetError, CheckpointError, ConfigError, PenstockError
from penstock.base.units import format_rate, format_size
from penstock.cli.command import OTHER, option
from penstock.cli.progress import progress_bar
from penstock.cli.prompt import refuse_other_name
from penstock.cli.terminal import is_terminal, say
from penstock.engine.adapters import means_model
from penstock.hub.names import ModelName
from penstock.hub.telling import Found, Offer, Telling

if TYPE_CHECKING:
    from rich.progress import Progress

TENTH, _CONTEXT, _EXACT = 10, 4096, 10
_PERIOD = 10.0
"""Least seconds between two lines on how far a download is, where no bar is shown."""
download_option = option(
    OTHER,
    "--download/--no-download",
    "download",
    default=None,
    help="Fetch a MODEL of the Hugging Face Hub unasked, or never. [on a terminal ask, else fetch]",
)
"""Adds the flag that says whether a model which is not here is fetched."""


def located(
    config: Config, *, download: bool | None, quiet: bool = False, log: bool = False
) -> tuple[Config, str]:
    """Return the settings with the model's directory or file, and what the model is called. It is fetched if
    need be. Raises PenstockErrors.

    download: without a question, or never; None asks on a terminal. quiet: say nothing on stderr but that.
    log: write to the log instead, and ask nothing.
    """
    from penstock.hub.models import locate  # 0.1 s, with what knows all families of models

    text = str(config.model)
    refuse_other_name(text)
    with Fetching(download, quiet=quiet) as shown:
        found = locate(text, Telling() if log else shown, fetch=download is not False)
    if not (quiet or log):
        _note_both(text, found)
    return replace(config, model=found.path), found.name


def expect_tokenizer(model: Path) -> None:
    """Raise CheckpointError, before weights are loaded, for a model's directory that has no tokenizer."""
    if (model / "config.json").exists() and not (model / "tokenizer.json").exists():
        raise CheckpointError(
            f"{model} has no tokenizer.json, which text needs; add the file, or give prompts as token ids, "
            "from Python or to penstock serve"
        )


def taken(asked: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Return the arguments of `located` from those of a command. more: its flags that leave remarks out."""
    return {"download": asked["download"], "quiet": any(asked.get(flag) for flag in ("quiet", *more))}


def _note_both(text: str, found: Found) -> None:
    """Say which model is meant where the cache has one of the same name."""
    from penstock.hub.cache import CachedRepository

    name = ModelName.parse(text) if found.path == Path(text) else None
    if name is not None and CachedRepository.of(name.repository).exists:
        say(f"{text} is the one in this directory; hf.co/{text} is the one of the Hub", faint=True)


class Fetching(Telling):
    """Shows a download on stderr: a bar on a terminal, lines elsewhere."""

    def __init__(self, download: bool | None, *, quiet: bool = False) -> None:
        self._ask, self._quiet = download is None, quiet
        self._bar: Progress | None = None
        self._what, self._total, self._done = "", 0, 0
        self._began = self._told = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds since the download began; 0 if there was none."""
        return time.perf_counter() - self._began if self._began else 0.0

    @property
    def fetched(self) -> int:
        """Return the bytes that came."""
        return self._done

    def agree(self, offer: Offer) -> None:
        """Say what would be fetched, and ask whether it shall be. Raises CheckpointError if not."""
        self._what, self._total = str(offer.name), offer.size
        takes = f"{offer.name}: {format_size(offer.size)} to fetch, {format_size(offer.free)} free"
        if self._ask and is_terminal(sys.stdin) and is_terminal(sys.stderr):
            say(f"{takes}; {_forecast(offer)}")
            if not click.confirm("Fetch it from the Hugging Face Hub?", default=True, err=True):
                raise CheckpointError(f"{offer.name} is not here, and was not fetched; name another model")
        elif not self._quiet:
            say(f"{takes}; {_forecast(offer)}", faint=True)
        self._began = self._told = time.perf_counter()
        if not self._quiet and is_terminal(sys.stderr) and terminal_kind() != "dumb":
            self._bar = progress_bar("fetching", self._total, transient=True)
            self._bar.start()

    def advance(self, count: int) -> None:
        """Show that so many bytes came."""
        before, self._done = self._done, self._done + count
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=max(self._done, 0))
            return
        now, tenth = time.perf_counter(), max(self._total // TENTH, 1)
        if not self._quiet and self._done // tenth > before // tenth and now - self._told >= _PERIOD:
            self._told = now
            say(f"{self._what}: {format_size(self._done)} of {format_size(self._total)}", faint=True)

    def end(self, found: Found) -> None:
        """Say how long it took."""
        self.__exit__(None, None, None)
        if not self._quiet:
            rate = format_rate(self._done / max(self.seconds, 1e-9))
            say(f"{self._what}: fetched in {self.seconds:,.1f} s ({rate})", faint=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()
        if isinstance(error, KeyboardInterrupt) and self._began:
            say("the same command goes on where this download stopped", faint=True)


def _forecast(offer: Offer) -> str:
    """Return what the model is, and how fast it would be here, as far as that can be told."""
    from penstock.cli.figures import format_count

    about = offer.about
    what = f"{about.family}, {format_count(about.parameters)} parameters in {about.format}"
    try:
        return f"{what}, {pace_here(offer.shape)}"
    except BudgetError:
        return f"{what}, more than this machine has memory for"
    except PenstockError:  # What else there is to say about it, loading says.
        return what


def pace_here(shape: Path) -> str:
    """Return the pace that is forecast for a model on this machine. Raises PenstockErrors if it does not fit.

    shape: what `penstock plan` takes.
    """
    from penstock.arch.formats.recipe import name_of
    from penstock.cli.commands.plan import dtype_there, kept_costs, machine_of, settle
    from penstock.cli.shape import open_model
    from penstock.engine.forecast import forecast
    from penstock.engine.machines import Work

    _, spec, names = open_model(str(shape))
    dtype = dtype_there(None, spec.dtype)
    kept = kept_costs(None, Config().cache.expanduser(), dtype, name_of(spec.format))
    setting, step = settle(None, {}, kept)
    work = Work(dtype, context=min(_CONTEXT, spec.max_length), step_tokens=step)
    found = forecast(spec, names, machine_of(setting), work)
    rate = found.decode.tokens_per_second
    pace = f"about {rate:,.0f} tokens/s here" if rate >= _EXACT else f"about {rate:.2g} tokens/s here"
    return pace if found.everything_resident else f"{pace}, streaming"


def check_names(models: Sequence[str], adapters: Sequence[str]) -> None:
    """Raise ConfigError for a LoRA adapter whose name means the model, or another adapter, in requests."""
    if same := [name for name in adapters if means_model(name, models)]:
        raise ConfigError(
            f"the LoRA adapter {same[0]!r} has a name of the model's, or begins with one and a colon; give "
            "another name by --lora-modules, or by --name"
        )
