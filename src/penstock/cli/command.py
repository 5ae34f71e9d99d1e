"""Give all commands what they share: help in sections that ends in examples, settings from a file, and
--debug."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from penstock.base.other_names import is_foreign
from penstock.base.units import parse_tokens
from penstock.cli.terminal import say

USUAL_CONFIG = Path("penstock.toml")
"""The file of settings that is read if it is there and no other is named."""
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
OTHER = "Other options"
_NAMED = "NAME=PATH"
"""The metavar of options with several values."""
_ANOTHER = re.compile(r"[^\s=-][^\s=]*=")


@dataclass(slots=True)
class Session:
    """Holds the options of the command line as a whole."""

    debug: bool = False
    config: Path | None = None
    """The file of settings that was named before the command."""
    read: Path | None = None
    """The file that settings come from."""
    report: Callable[[str, str | None], None] | None = None
    """Takes the error that ends the command, and the traceback if one is wanted, where stderr is not for a
    person to read."""

    def wants_traceback(self) -> bool:
        """Tell whether errors are shown with a traceback."""
        from penstock.base.config import debug_requested  # only where something failed

        return self.debug or debug_requested()


class Option(click.Option):
    """Knows its section of the help, besides what a click option knows. rare: only --help-all shows it."""

    def __init__(
        self, *arguments: object, section: str = OTHER, rare: bool = False, **attributes: object
    ) -> None:
        super().__init__(*arguments, **attributes)  # type: ignore[arg-type]  # click's own, which are many
        self.section, self.rare = section, rare


class Command(click.Command):
    """A click command with sections in its help and examples at its end. --help shows the options that many
    need, --help-all all of them.

    examples: lines as they are printed. configurable: whether a file of settings may set its flags.
    """

    def __init__(
        self, *arguments: object, examples: str = "", configurable: bool = True, **attributes: object
    ) -> None:
        attributes.setdefault("context_settings", CONTEXT)
        super().__init__(*arguments, **attributes)  # type: ignore[arg-type]
        self.examples = examples
        if configurable:
            self.params.insert(
                0, Option(["--config"], is_eager=True, callback=_configure, **_CONFIG)
            )  # Before what it gives values to.
        if any(isinstance(one, Option) and one.rare for one in self.params):
            self.params.append(Option(["--help-all"], callback=_help_all, **_HELP_ALL))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments as click does, and name this command in errors.

        What is repeated may be written once with several values: `--lora-modules a=DIR b=DIR`.
        """
        try:
            self._expect_ours(args, ctx)
            return super().parse_args(ctx, self._repeated(args))
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click forgets which command lacked an option's value
            raise

    def _expect_ours(self, args: list[str], ctx: click.Context) -> None:
        """Raise click.NoSuchOption for an option of another engine such as -ngl, which click would read as
        several of ours, or as one with a value."""
        taking = {
            opt
            for one in self.params
            if isinstance(one, click.Option) and not one.is_flag
            for opt in one.opts
        }
        for before, argument in zip(["", *args], args, strict=False):
            if argument == "--":
                return
            if before not in taking and is_foreign(argument):
                raise click.NoSuchOption(argument, ctx=ctx)

    def _repeated(self, args: list[str]) -> list[str]:
        """Return the arguments with the flag before each of several values NAME=PATH.

        A name has no spaces there: "Solve x=3" is a prompt.
        """
        found, flag = list[str](), ""
        flags = {opt for one in self.params if one.metavar == _NAMED for opt in one.opts}
        for argument in args:
            if flag and _ANOTHER.match(argument) and found[-1] != flag:
                found.append(flag)
            elif argument not in flags and (not found or found[-1] != flag):
                flag = ""
            found.append(argument)
            flag = argument if argument in flags else flag
        return found

    def invoke(self, ctx: click.Context) -> object:
        """Run the command, and say on stderr which file its settings come from."""
        session = ctx.find_object(Session)
        if session is not None and session.read is not None and ctx.params.get("log_format") != "json":
            say(f"settings from {session.read}", faint=True)
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, in sections."""
        sections: dict[str, list[tuple[str, str]]] = {}
        hidden = 0
        for option in self.get_params(ctx):
            section = option.section if isinstance(option, Option) else OTHER
            if isinstance(option, Option) and option.rare and not ctx.meta.get(_ALL):
                hidden += 1
                continue
            record = option.get_help_record(ctx)
            if isinstance(option, click.Option) and record is not None:
                sections.setdefault(section, []).append(record)
        other = sections.pop(OTHER, [])
        for section, records in [*sections.items(), (OTHER, other)]:
            with formatter.section(section):
                formatter.write_dl(records, col_max=26)
        if hidden:
            formatter.write(f"\n{hidden} more options: {ctx.command_path} --help-all\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        if self.examples:
            formatter.write(f"\nExamples:\n{self.examples.strip(chr(10))}\n")


_ALL = "penstock.help_all"
"""Names in a context what --help-all notes there."""


def _help_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print the help with all options, and end."""
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


_HELP_ALL: dict[str, Any] = {
    "is_flag": True,
    "is_eager": True,
    "expose_value": False,
    "help": "Show all options and exit.",
}


class TokenRange(click.IntRange):
    """Reads a number of tokens, also with a K or an M behind it, which are 1,024 and 1,048,576."""

    name = "number of tokens; write it like 4096 or 32K"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number. Raise click.BadParameter."""
        counted = parse_tokens(value) if isinstance(value, str) else None
        return super().convert(value if counted is None else counted, param, ctx)


TOKENS = TokenRange(min=1)


def files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the name of a file or directory."""
    return [CompletionItem(incomplete, type="file")]


Decorator = Callable[[Callable[..., object]], Callable[..., object]]


def option(section: str, *names: str, **attributes: object) -> Decorator:
    """Return a click option in a section of the help."""
    return click.option(*names, cls=Option, section=section, **attributes)


def _note_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    ctx.ensure_object(Session).debug |= value


debug_option = option(
    OTHER,
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_note_debug,
    help="Show tracebacks of errors, as PENSTOCK_DEBUG=1 does.",
)
"""Adds --debug, which may stand before a command or after it."""


def _configure(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    """Take settings that are neither typed nor in the environment from the file, if there is one."""
    session = ctx.find_object(Session) or Session()
    named = value or session.config
    if ctx.resilient_parsing or (named is None and not USUAL_CONFIG.is_file()):
        return
    from penstock.cli.configfile import all_commands, read  # 20 ms, and only where there is such a file

    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    file = read(named or USUAL_CONFIG)
    for fault in file.faults(all_commands(root.command, root)):
        raise click.UsageError(f"{file.path}: {fault}", ctx)
    outermost = ctx
    while outermost.parent is not None and outermost.parent.parent is not None:
        outermost = outermost.parent
    ctx.default_map = file.defaults(outermost.info_name or "", ctx)
    session.read = file.path


def _note_config(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    ctx.ensure_object(Session).config = value


_CONFIG: dict[str, Any] = {
    "type": click.Path(path_type=Path),
    "expose_value": False,
    "metavar": "FILE",
    "help": f"Read settings from FILE, by the names of flags. [{USUAL_CONFIG}, if it is there]",
}


config_option = option(OTHER, "--config", callback=_note_config, **_CONFIG)
"""Adds --config before a command; every command has its own, too."""
