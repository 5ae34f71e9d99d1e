"""`penstock doctor`: what this machine has, how fast its links are, and what limits a model on it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from penstock.base.config import Config
from penstock.cli.command import Command, debug_option, option
from penstock.cli.options import DEVICE, ENGINE_SETTINGS, OUTPUT, flag, settings_from, with_options
from penstock.cli.terminal import say
from penstock.hub.models import shape_of

_EXAMPLES = """
  penstock doctor                    this machine, and the small model that comes with penstock
  penstock doctor ./my-model         a model that need not be there yet: its config.json is enough
  penstock doctor Qwen/Qwen3-8B      one of the Hugging Face Hub, of which only that is fetched
  penstock doctor --quick --json
"""


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@with_options(
    *DEVICE[:3],
    flag(ENGINE_SETTINGS["cache"], help="Directory for costs of steps, and compiled CPU kernels."),
)
@option(OUTPUT, "--quick", is_flag=True, help="Skip the disk and the costs of steps.")
@option(OUTPUT, "--again", is_flag=True, help="Measure the costs of steps anew, though they are kept.")
@option(OUTPUT, "--json", is_flag=True, help="Print one line of JSON instead.")
@debug_option
def command(**asked: Any) -> None:
    """Check what this machine has and what limits MODEL on it: sizes, whether it fits, and the pace that no
    engine can exceed, from rates measured here and now. MODEL is a directory of which only config.json is
    looked at, or a model of the Hugging Face Hub, of which only that is fetched.

    It also measures, once, what a step costs beyond the bytes that it moves. `penstock plan` then forecasts
    with that."""
    if asked["quick"] and asked["again"]:
        raise click.UsageError(
            "--again measures the cost of steps, which --quick leaves out; give one of them"
        )
    config = settings_from(Config, asked, model=asked["model"])

    from penstock.bench.doctor.checkup import (  # torch: 1.2 s, after what could be checked before
        checkup,
        describe,
    )

    with shape_of(str(config.model)) as shape:
        found = checkup(
            replace(config, model=shape.path),
            quick=asked["quick"],
            again=asked["again"],
            say=lambda text: say(text, faint=True),
        )
    click.echo(found.line() if asked["json"] else describe(found))
