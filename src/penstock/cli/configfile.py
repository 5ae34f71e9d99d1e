"""Read settings from a file: the flags of commands, by their names.

At the top of the file they are for every command that has such a flag, in a table named after a command for
that one. A value is taken as if it were typed behind its flag, so it is checked and refused as that is.
"""

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from penstock.base.errors import ConfigError

MODEL = "model"
"""The argument of most commands that may be set all the same."""
_MOST = 1 << 20
"""Bytes of such a file."""
_OWN = ("help", "help-all", "config", "version", "yes")
"""Flags that are not settings: what is asked for once, and what is agreed to."""
_RUN = "run"
"""The command with two arguments: a model, which may be set, and a prompt."""
_PROMPTS = {
    _RUN: '; type the prompt behind the command, or set file = "PATH" to a text file that has it',
    "chat": "; what you say comes once chat has begun",
}
"""Says where a prompt goes that stands in the table of a command."""
_FEW = 12
"""Names that a message may list."""
Commands = Mapping[str, tuple[click.Command, ...]]
"""The commands that may have a table, each with what runs by its name: itself, or its own commands."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A setting as the file has it.

    table: the table that it stands in, empty at the top. key: with - for _.
    """

    table: str
    key: str
    value: object

    def __str__(self) -> str:
        return f"{self.key} in [{self.table}]" if self.table else self.key


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file of settings, as it was read."""

    path: Path
    entries: tuple[Entry, ...]
    tables: tuple[str, ...]

    def faults(self, commands: Commands) -> Iterator[str]:
        """Yield what is wrong with tables and keys."""
        for table in self.tables:
            if table not in commands:
                yield f"there is no command for [{table}]{_nearest(table, commands, '[{}]')}"
        seen = set[tuple[str, str]]()
        for entry in self.entries:
            if entry.table and entry.table not in commands:
                continue
            known = _known(entry.table, commands)
            if entry.key not in known:
                way = _typed_behind(entry, commands) or _nearest(entry.key, known, "{}")
                yield f"there is no setting {entry}{way}"
            elif (entry.table, entry.key) in seen:
                yield f"{entry} is set twice, with - and with _; leave one of them out"
            seen.add((entry.table, entry.key))

    def of(self, name: str, command: click.Command) -> dict[str, Entry]:
        """Return the settings of the command `name`, by the names of its parameters.

        What stands in the command's own table wins over what stands at the top.
        """
        known = settable(name, command)
        found = [
            entry
            for table in ("", name)
            for entry in self.entries
            if entry.table == table and entry.key in known
        ]
        return {known[entry.key].name or "": entry for entry in found}

    def defaults(self, name: str, context: click.Context) -> dict[str, object]:
        """Return the settings of a command for click's default_map.

        Raises click.UsageError for a value that its flag would refuse.
        """
        return {
            parameter: self.value(entry, name, context)
            for parameter, entry in self.of(name, context.command).items()
        }

    def value(self, entry: Entry, name: str, context: click.Context) -> object:
        """Return an entry's value as click has it from the command line. Raises click.UsageError."""
        parameter = settable(name, context.command)[entry.key]
        try:
            typed = _typed(parameter, entry.value)
            parameter.process_value(context, typed)
        except click.BadParameter as error:
            error.param = parameter
            said = error.format_message()
            raise click.UsageError(f"{self.path}: {entry}: {said[:1].lower()}{said[1:]}", context) from error
        return typed


def read(path: Path) -> ConfigFile:
    """Read a file of settings. Raises ConfigError if it cannot be read as TOML."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST + 1)
        if len(data) > _MOST:
            raise ConfigError(
                f"{path} has more than {_MOST} bytes, too many for a file of settings; name the right one "
                "with --config"
            )
        content = tomllib.loads(data.decode())
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as fault:  # TOMLDecodeError, UnicodeDecodeError, and a path that none can have
        why, way = str(fault), "write them as TOML, such as port = 8000"
        if isinstance(fault, OSError):
            why, way = fault.strerror or why, "name a file that can be read"
        raise ConfigError(f"the settings in {path} cannot be read: {why}; {way}") from fault
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    entries = [("", key, value) for key, value in content.items() if key not in tables]
    entries += [(table, key, value) for table, inner in tables.items() for key, value in inner.items()]
    return ConfigFile(
        path,
        tuple(Entry(table, key.replace("_", "-"), value) for table, key, value in entries),
        tuple(tables),
    )


def settable(name: str, command: click.Command) -> dict[str, click.Parameter]:
    """Return what a file may set for the command `name`, by its keys.

    A flag's key is its long name, or the only one it has.
    """
    found: dict[str, click.Parameter] = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            names = [name.removeprefix("--") for name in parameter.opts if name.startswith("--")] or [
                parameter.opts[0].lstrip("-")
            ]
            found |= {name: parameter for name in names if name not in _OWN}
        elif parameter.name == MODEL and not parameter.required:
            found[MODEL] = parameter
    if name == _RUN:
        found[MODEL] = click.Argument([MODEL], required=False)
    return found


def all_commands(root: click.Group, context: click.Context) -> Commands:
    """Return every command that may have a table, by its name."""
    found = {}
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        assert command is not None
        found[name] = tuple(command.commands.values()) if isinstance(command, click.Group) else (command,)
    return found


def _known(table: str, commands: Commands) -> list[str]:
    """Return the keys that a table may have."""
    of = {table: commands[table]} if table else commands
    return list(
        dict.fromkeys(key for name, some in of.items() for command in some for key in settable(name, command))
    )


def _typed_behind(entry: Entry, commands: Commands) -> str:
    """Return what to do about a key that stands for an argument of its table's command; empty for others."""
    if entry.key == "prompt" and entry.table in _PROMPTS:
        return _PROMPTS[entry.table]
    arguments = (
        one
        for command in commands.get(entry.table, ())
        for one in command.params
        if isinstance(one, click.Argument)
    )
    name = entry.key.replace("-", "_")
    return "; type it behind the command" if any(one.name == name for one in arguments) else ""


def _nearest(name: str, known: Iterable[str], form: str) -> str:
    known = list(known)
    if found := difflib.get_close_matches(name, known, 1, 0.5):
        return f"; did you mean {form.format(found[0])}?"
    return (
        f"; there are {', '.join(known)}"
        if len(known) <= _FEW
        else "; see the command's --help for what there is"
    )


def _typed(parameter: click.Parameter, value: object) -> object:
    """Return a value as click has it from the command line.

    Raises click.BadParameter for what cannot be typed there.
    """
    if isinstance(parameter, click.Option) and parameter.is_flag:
        if not isinstance(value, bool):
            raise click.BadParameter("write true or false, without quotes")
        return value
    if getattr(parameter, "multiple", False) or parameter.nargs == -1:
        return [_text(parameter, one) for one in (value if isinstance(value, list) else [value])]
    return _text(parameter, value)


def _text(parameter: click.Parameter, value: object) -> str:
    """Return a value as text. Errors do not show it: it may be a key, written in place of its file."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kinds = {bool: "true or false", list: "a list", dict: "a table"}
        raise click.BadParameter(
            f"write a text or a number, not {kinds.get(type(value), 'a date or a time')}"
        )
    if (
        isinstance(value, str)
        and value.startswith("~")
        and (isinstance(parameter.type, click.Path) or parameter.name == MODEL)
    ):
        return str(Path(value).expanduser())  # As a shell would have done.
    return str(value)
