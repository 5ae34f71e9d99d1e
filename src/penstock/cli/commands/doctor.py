"""`penstock doctor`: what this machine has, how fast its links are, and what limits a model on it."""

from pathlib import Path

import click

from penstock.base.config import CACHE, Config
from penstock.base.units import parse_size
from penstock.cli.command import Command, debug_option, option
from penstock.cli.terminal import say

ENGINE, OUTPUT = "Engine", "Output"
_EXAMPLES = """
  penstock doctor                    this machine, and the small model that comes with penstock
  penstock doctor ./my-model         a model that need not be there yet: its config.json is enough
  penstock doctor --quick --json
"""


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@option(
    ENGINE,
    "--device",
    default="auto",
    metavar="NAME",
    help="cpu, cuda, cuda:N, or auto: CUDA if there is any. [auto]",
)
@option(
    ENGINE,
    "--dtype",
    default="auto",
    metavar="TYPE",
    help="auto, float32, float16 or bfloat16. [auto: the model's, if fast here]",
)
@option(
    ENGINE,
    "--device-memory",
    metavar="SIZE",
    help="Most to take there: 16GiB, 80%. [CUDA 90%, CPU 50% of free]",
)
@option(
    ENGINE,
    "--cache",
    type=click.Path(path_type=Path),
    default=CACHE,
    metavar="DIR",
    help=f"Where costs of steps are kept. [{CACHE}]",
)
@option(OUTPUT, "--quick", is_flag=True, help="Leave out the disk, and what steps cost.")
@option(OUTPUT, "--again", is_flag=True, help="Measure what steps cost though it is kept.")
@option(OUTPUT, "--json", is_flag=True, help="Print one line of JSON instead.")
@debug_option
def command(
    model: Path | None,
    device: str,
    dtype: str,
    device_memory: str | None,
    cache: Path,
    quick: bool,
    again: bool,
    json: bool,
) -> None:
    """Check what this machine has and what limits MODEL on it: sizes, whether it fits, and the pace that no
    engine can exceed, from rates measured here and now. MODEL is a directory of which only config.json is
    looked at.

    On a GPU it also measures, once, what a step costs beyond the bytes that it moves. `penstock plan` then
    forecasts with that."""
    if quick and again:
        raise click.UsageError("--quick leaves out what --again asks for; give one of them")
    config = Config(model or Path(), device=device, dtype=dtype, device_memory=device_memory, cache=cache)
    if device_memory is not None:
        parse_size(
            device_memory, whole=2**50
        )  # only whether it can be read; of what a share is meant is known later

    from dataclasses import replace

    from penstock.api.llm import (
        SHIPPED_MODEL,
    )  # torch: 1.2 s on two cores; whatever could be checked before has been
    from penstock.bench.doctor.checkup import checkup, describe

    found = checkup(
        config if model else replace(config, model=SHIPPED_MODEL),
        quick=quick,
        again=again,
        say=lambda text: say(text, faint=True),
    )
    click.echo(found.line() if json else describe(found))
