"""`penstock config`: whether a file of settings is right, and what comes of it."""

import json
from collections.abc import Iterator
from pathlib import Path

import click

from penstock.base.errors import PenstockError
from penstock.cli.command import USUAL_CONFIG, Command, Session, debug_option, option
from penstock.cli.commands.serve import KEYS, api_keys, keys_in_environment
from penstock.cli.configfile import Commands, ConfigFile, all_commands, read, settable
from penstock.cli.options import sampling_params
from penstock.cli.terminal import one_line, say

_SHOWN = "Output"
_USUAL = "serve"
_WRONG = 2
_EXAMPLES = """
  penstock config check                        ./penstock.toml, and what `penstock serve` makes of it
  penstock config check /etc/penstock.toml
  penstock config check --command run
"""


@click.command(cls=Command, examples=_EXAMPLES, configurable=False)
@click.argument("action", type=click.Choice(["check"]), metavar="check")
@click.argument("file", required=False, type=click.Path(path_type=Path), metavar="[FILE]")
@option(
    _SHOWN,
    "--command",
    "shown",
    metavar="NAME",
    default=_USUAL,
    help=f"Command to print the settings of. [{_USUAL}]",
)
@debug_option
@click.pass_context
def command(ctx: click.Context, /, action: str, file: Path | None, shown: str) -> int:
    """Check every key and every value in FILE, for all commands, without loading a model, and print the
    settings of one of them and where each comes from. FILE is penstock.toml where it is left out.

    What is printed is such a file again. The exit code is 2 if anything is wrong.
    """
    session, root = ctx.find_object(Session) or Session(), ctx.find_root()
    assert isinstance(root.command, click.Group)
    commands = all_commands(root.command, root)
    if shown not in commands:
        raise click.UsageError(f"{shown!r} is no command of penstock; give one of {', '.join(commands)}")
    given = read(file or session.config or USUAL_CONFIG)
    faults, made = list(_faults(given, root, commands)), dict[str, list[click.Context]]()
    if not faults:
        session.config = given.path
        made = {name: [_made(name, one, root) for one in some] for name, some in commands.items()}
        for name, some in made.items():
            faults += [f"{given.path}: {fault}" for one in some for fault in _joint(name, one)]
    if faults:
        for fault in dict.fromkeys(faults):
            say(f"penstock: error: {one_line(fault)}")
        return _WRONG
    for one in made[shown]:
        click.echo(f"# {one.command_path}")
        for line in _lines(given, shown, one):
            click.echo(line)
    return 0


def _faults(given: ConfigFile, root: click.Context, commands: Commands) -> Iterator[str]:
    """Yield what is wrong with keys, and with each value for each command that it is for."""
    for fault in given.faults(commands):
        yield f"{given.path}: {fault}"
    for name, some in commands.items():
        for one in some:
            context = click.Context(one, parent=root, info_name=name)
            for entry in given.of(name, one).values():
                try:
                    given.value(entry, name, context)
                except click.UsageError as error:
                    yield error.format_message().rstrip(".")


def _made(name: str, one: click.Command, root: click.Context) -> click.Context:
    """Parse the command as if it were called with nothing but the arguments that it needs."""
    arguments = [
        parameter for parameter in one.params if isinstance(parameter, click.Argument) and parameter.required
    ]
    needed = [
        str(next(iter(each.type.choices))) if isinstance(each.type, click.Choice) else "-"
        for each in arguments
    ]
    assert isinstance(root.command, click.Group)
    group = root.command.get_command(root, name)
    if isinstance(group, click.Group):
        return one.make_context(one.name, needed, parent=click.Context(group, parent=root, info_name=name))
    return one.make_context(name, needed, parent=root)


def _joint(name: str, made: click.Context) -> Iterator[str]:
    """Yield what is wrong with values that their flags alone do not refuse."""
    try:
        if "temperature" in made.params and "verbose" in made.params:
            sampling_params(made)
        if name == _USUAL:
            api_keys(made)
    except click.UsageError as error:
        yield error.format_message()
    except PenstockError as error:
        yield str(error)


def _lines(given: ConfigFile, name: str, made: click.Context) -> Iterator[str]:
    """Yield each setting as a line of TOML, with its source."""
    found = given.of(name, made.command)
    rows = dict[str, tuple[str, str]]()
    for key, parameter in settable(name, made.command).items():
        known = parameter.name or ""
        if name == _USUAL and known == "api_keys" and (keys := keys_in_environment()):
            rows[known] = "", f"{len(keys)} in {KEYS}"
        elif known in found:
            table = found[known].table
            rows[known] = (
                _toml(key, found[known].value),
                f"[{table}] in {given.path}" if table else str(given.path),
            )
        elif known not in rows and known in made.params:
            shown = _toml(key, made.params[known])
            rows[known] = shown, "default" if shown else "not set"
        if known in rows and not rows[known][0]:
            rows[known] = f"# {key}", rows[known][1]
    width = max((len(left) for left, _ in rows.values()), default=0)
    yield from (f"{left:<{width}}  # {right}" for left, right in rows.values())


def _toml(key: str, value: object) -> str:
    """Return a setting as it stands in a file; empty if there is none."""
    if value is None or isinstance(value, dict):
        return ""
    return f"{key} = {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value if isinstance(value, bool | int | float) else str(value), ensure_ascii=False)
