"""What all commands share: help that is sorted into sections and ends in examples, and the wish for tracebacks."""

from collections.abc import Callable
from dataclasses import dataclass

import click

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
OTHER = "Other options"


@dataclass(slots=True)
class Session:
    """What was asked of the command line as a whole."""

    debug: bool = False

    def wants_traceback(self) -> bool:
        from penstock.base.config import debug_requested  # only where something failed

        return self.debug or debug_requested()


class Option(click.Option):
    """An option with the section of the help that it belongs to."""

    def __init__(self, *arguments: object, section: str = OTHER, **attributes: object) -> None:
        super().__init__(*arguments, **attributes)  # type: ignore[arg-type]  # click's own, which are many
        self.section = section


class Command(click.Command):
    """A command whose help stands in sections, with `examples` as they are written at its end."""

    def __init__(self, *arguments: object, examples: str = "", **attributes: object) -> None:
        attributes.setdefault("context_settings", CONTEXT)
        super().__init__(*arguments, **attributes)  # type: ignore[arg-type]
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click forgets which command lacked an option's value
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            section = option.section if isinstance(option, Option) else OTHER
            record = option.get_help_record(ctx)
            if isinstance(option, click.Option) and record is not None:
                sections.setdefault(section, []).append(record)
        other = sections.pop(OTHER, [])
        for section, records in [*sections.items(), (OTHER, other)]:
            with formatter.section(section):
                formatter.write_dl(records, col_max=26)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            formatter.write(f"\nExamples:\n{self.examples.strip(chr(10))}\n")


Decorator = Callable[[Callable[..., object]], Callable[..., object]]


def option(section: str, *names: str, **attributes: object) -> Decorator:
    """A click option in a section of the help."""
    return click.option(*names, cls=Option, section=section, **attributes)


def _note_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    session = ctx.find_object(Session)
    if value and session is not None:
        session.debug = True


def debug_option(function: Callable[..., object]) -> Callable[..., object]:
    """--debug, before a command or after it."""
    return option(
        OTHER,
        "--debug",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_note_debug,
        help="Show tracebacks of errors, as PENSTOCK_DEBUG=1 does.",
    )(function)
