"""`penstock completion`: what makes a shell complete commands and options."""

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from penstock.base.config import completion_file
from penstock.base.errors import ConfigError
from penstock.cli.command import Command, debug_option, option

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = """
  penstock completion bash --install          for every shell that is started from now on
  source <(penstock completion bash)          for this shell
  penstock completion zsh --install
  penstock completion fish | source
"""


@click.command(cls=Command, examples=EXAMPLES, configurable=False)
@click.argument("shell", type=click.Choice(SHELLS))
@option(
    "Output",
    "--install",
    is_flag=True,
    help="Write it to a file that the shell reads at its start, instead of stdout.",
)
@debug_option
@click.pass_context
def command(ctx: click.Context, /, shell: str, install: bool) -> None:
    """Print the script with which SHELL completes commands and options, or install it."""
    script = _script(ctx.find_root().command, shell)
    if not install:
        click.echo(script)
        return
    file, starts = completion_file(shell)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script + "\n", encoding="utf-8")
        if starts is not None:
            _add(starts, f'source "{file}"')
    except OSError as error:
        raise ConfigError(
            f"{error.filename or file} cannot be written: {error.strerror}; "
            "print the script without --install"
        ) from error
    click.echo(f"written to {file}{'' if starts is None else f', which {starts} reads'}; start a new {shell}")


def _script(root: click.Command, shell: str) -> str:
    """Return the script for a shell."""
    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(root, {}, "penstock", "_PENSTOCK_COMPLETE")
    # Not `source`, which starts bash to see whether it is new enough.
    return (made.source_template % made.source_vars()).strip()


def _add(file: Path, line: str) -> None:
    """Add a line to a file that the user has written, unless it is there."""
    text = file.read_text(encoding="utf-8", errors="surrogateescape") if file.exists() else ""
    if line in text.splitlines():
        return
    before = "" if not text or text.endswith("\n") else os.linesep
    with file.open("a", encoding="utf-8") as opened:
        opened.write(f"{before}{line}\n")
