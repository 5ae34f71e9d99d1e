"""`penstock batch`: a file of requests in, a file of answers out."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.base.errors import ConfigError
from penstock.base.units import counted
from penstock.cli.command import Command, option
from penstock.cli.load import loaded
from penstock.cli.models import check_names, located, taken
from penstock.cli.options import OUTPUT, engine_config, engine_options
from penstock.cli.progress import progress_bar
from penstock.cli.terminal import is_terminal, say
from penstock.engine.adapters import module_paths

if TYPE_CHECKING:
    from penstock.server.batch import Tally

FAILED = 3
"""The exit code where some lines could not be served."""
EXAMPLES = """
  penstock batch requests.jsonl answers.jsonl                    with the model that comes with penstock
  penstock batch requests.jsonl answers.jsonl --model ./my-model
  penstock batch requests.jsonl answers.jsonl                    once more: goes on where it was ended
  penstock batch requests.jsonl - | jq .response.body.usage
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("requests", type=click.Path(path_type=Path))
@click.argument("answers", type=click.Path(path_type=Path))
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="MODEL",
    help="The model, as for penstock run. [the small model that comes with penstock]",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="Name of the model in requests; may be repeated. [its directory's, or its name on the Hub]",
)
@option(OUTPUT, "--quiet", "-q", is_flag=True, help="Do not print device, memory sizing and progress.")
@engine_options
@click.pass_context
def command(ctx: click.Context, /, **settings: object) -> None:
    """Answer the requests in the file REQUESTS, and write the answers to the file ANSWERS.

    REQUESTS is in OpenAI's batch format: a JSON object on each line. Each answer becomes a line of ANSWERS as
    soon as it is done. Requests are taken in the order in which they share most of their prompts, not in that
    of the file. What ANSWERS has already is not asked again, unless it was refused for a name that the model
    has now. ANSWERS of - go to stdout, and all is asked. The exit code is 3 if some requests could not be
    served; their lines say why.
    """
    asked = ctx.params
    _expect_files(asked["requests"], asked["answers"])
    try:
        from penstock.server.batch import STDOUT, Batch
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"a batch needs {missing.name}, which is not installed; pip install 'penstock[serve]'"
        ) from missing
    config, names = engine_config(ctx, asked["model"], None), asked["names"]
    adapters = tuple(module_paths(config))
    check_names(names, adapters)
    batch = Batch(asked["requests"], asked["answers"])
    tally = batch.left(names or None, adapters)
    if tally is None:
        config, name = located(config, **taken(asked))
        names = names or (name,)
        check_names(names, adapters)
        tally = batch.left(names, adapters)
        if tally is None:
            with loaded(config, quiet=asked["quiet"]) as llm, _bar(asked["quiet"]) as show:
                tally = batch.run(llm, names, show)
    if not asked["quiet"]:
        say(
            f"{counted(tally.lines, 'request')}, {tally.answered - tally.failed} answered, "
            f"{tally.failed} refused: {'stdout' if asked['answers'] == STDOUT else asked['answers']}",
            faint=True,
        )
    if tally.failed:
        ctx.exit(FAILED)


def _expect_files(requests: Path, answers: Path) -> None:
    """Check both files before a model is loaded, which may take minutes. Raises ConfigError."""
    if not requests.exists() or requests.is_dir():
        what = "is a directory" if requests.is_dir() else "does not exist"
        raise ConfigError(
            f"{requests} cannot be read: it {what}; give a file with one JSON request on each line"
        )
    if answers == Path("-"):
        return
    if answers.is_dir() or not answers.parent.is_dir() or not os.access(answers.parent, os.W_OK):
        what = (
            "it is a directory"
            if answers.is_dir()
            else f"{answers.parent} is no directory that can be written"
        )
        raise ConfigError(f"{answers} cannot be written: {what}; name another file")


@contextmanager
def _bar(quiet: bool) -> "Iterator[Callable[[Tally], None]]":
    if quiet or not is_terminal(sys.stderr):
        yield lambda tally: None
        return
    with progress_bar("requests", None, count=True, transient=True) as bar:
        [task] = bar.task_ids
        yield lambda tally: bar.update(task, completed=tally.answered, total=tally.lines)
