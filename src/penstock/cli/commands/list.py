"""`penstock list`: the models in the Hugging Face cache, and which of them run here."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from penstock.base.units import format_size
from penstock.cli.command import Command, debug_option, option
from penstock.cli.options import OUTPUT
from penstock.cli.terminal import one_line

if TYPE_CHECKING:
    from penstock.hub.inventory import CachedModel

EXAMPLES = """
  penstock list
  penstock list --json | jq -r 'select(.state == "whole").name'
"""


@click.command(cls=Command, examples=EXAMPLES, configurable=False)
@option(OUTPUT, "--json", is_flag=True, help="Print a JSON object on a line for each model.")
@debug_option
def command(json: bool) -> None:
    """List the models in the Hugging Face cache: name, revision, size on disk, format, when penstock used it
    last, and whether it is whole or does not run here."""
    from penstock.hub.cache import hub_cache
    from penstock.hub.inventory import cached_models

    models = list(cached_models())
    if json:
        for one in models:
            click.echo(_line(one))
        return
    if not models:
        click.echo(f"{hub_cache()}: no models are there; penstock pull fetches one")
        return
    rows = [("NAME", "REVISION", "SIZE", "FORMAT", "LAST USED", "STATE")]
    for one in models:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used)) if one.used else "-"
        made = one.about.format if one.about else "-"
        rows.append((one.name, one.revision, format_size(one.size), made, used, one_line(one.state)[:60]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _line(one: "CachedModel") -> str:
    import json

    return json.dumps(asdict(one) | {"path": str(one.path)})
