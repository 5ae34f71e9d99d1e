"""`penstock rm`: remove models from the Hugging Face cache."""

import sys

import click

from penstock.base.units import format_size
from penstock.cli.command import Command, debug_option, option
from penstock.cli.commands.pull import named
from penstock.cli.terminal import is_terminal, say

REMOVE = "Remove"
EXAMPLES = """
  penstock rm Qwen/Qwen3-8B                     all revisions of it
  penstock rm Qwen/Qwen3-8B@1a2b3c4             one of them, by branch, tag or commit
  penstock rm --yes Qwen/Qwen3-8B-GGUF:Q4_K_M   a GGUF file
"""


@click.command(cls=Command, examples=EXAMPLES, configurable=False)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@option(REMOVE, "--yes", is_flag=True, help="Remove without asking.")
@debug_option
def command(names: tuple[str, ...], yes: bool) -> None:
    """Remove models from the Hugging Face cache, also those that other programs fetched. Files that another
    revision shares are kept for it."""
    models = [named(text) for text in names]
    from penstock.hub.inventory import CacheRemoval

    removals = [CacheRemoval.of(name) for name in models]
    sizes = [format_size(removal.frees) for removal in removals]
    what = ", ".join(f"{name} ({size})" for name, size in zip(models, sizes, strict=True))
    if not yes:
        if not is_terminal(sys.stdin):
            raise click.UsageError(
                f"cannot ask whether to remove {what}, since stdin is no terminal; add --yes to remove it"
            )
        if not click.confirm(f"Remove {what}?", err=True):
            say("nothing was removed")
            return
    for name, size, removal in zip(models, sizes, removals, strict=True):
        removal.run()
        click.echo(f"{name}: removed, {size} freed")
