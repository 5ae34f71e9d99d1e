"""The `penstock` command: finds the subcommand, and turns whatever goes wrong into one line and an exit code.

Exit codes: 0 done; 1 a fault of penstock's own; 2 something asked for that cannot be done; 3 some requests of
a batch could not be served; 130 ended by Ctrl-C; 141 output closed.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from penstock import __version__
from penstock.base.errors import PenstockError
from penstock.base.other_names import absent, command_for, nearest, ours_for, standing
from penstock.cli.command import CONTEXT, Session, config_option, debug_option
from penstock.cli.terminal import one_line, say

# NAME is penstock.cli.commands.NAME.command, imported when it is called or asked for its own help. So
# `penstock --help` takes 0.06 s, half of it click's; torch, which run and chat need once their arguments are
# known to be right, takes 1.2 s on two cores.
COMMANDS = {
    "run": "Continue a prompt, or answer it with --chat.",
    "chat": "Talk with a model in the terminal.",
    "serve": "Serve a model to OpenAI's clients.",
    "batch": "Answer a file of requests.",
    "bench": "Measure this machine's limits and how close a model comes.",
    "eval": "Measure how well a model finds what stands in a long text.",
    "pack": "Lay a model's weights out to be streamed from disk.",
    "pull": "Fetch a model of the Hugging Face Hub.",
    "list": "List the models that were fetched.",
    "show": "Say what a model is.",
    "rm": "Remove models that were fetched.",
    "plan": "Forecast where a model rests on a machine, and how fast it runs.",
    "cache": "Look into, check or clear what prompts have left on disk.",
    "doctor": "Check what this machine has and what limits a model on it.",
    "config": "Check a file of settings.",
    "completion": "Let a shell complete commands and options.",
}
EXAMPLES = """
  penstock run "Once upon a time"           the small model that comes with penstock
  penstock run ./my-model "The sea is"      a Hugging Face checkpoint directory
  penstock run Qwen/Qwen3-8B "The sea is"   a model of the Hugging Face Hub
  penstock chat ./my-model                  a conversation
  penstock COMMAND --help                   the options of a command
"""
INTERRUPTED, PIPE_CLOSED = 130, 141
"""128 and the signal's number, as shells count."""


OUTPUT_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class Root(click.Group):
    """The group of commands; a command is imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands' names."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"penstock.cli.commands.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is asked for. Raise click.UsageError with one of a name like it."""
        if args[0] == "help":
            args = [*args[1:2], "--help"]
            if len(args) == 1:
                click.echo(ctx.get_help())
                ctx.exit()
        if args[0] == "uninstall":
            from penstock.base.config import CACHE, state_directory  # 20 ms, and only where it is asked

            raise click.UsageError(
                "no such command 'uninstall'; penstock rm removes models of the Hub, pip uninstall penstock "
                f"the program, and what is left is in {CACHE} and {state_directory()}",
                ctx,
            )
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            if ours := command_for(args[0]):
                raise click.UsageError(f"no such command {args[0]!r}; here it is penstock {ours}", ctx)
            from difflib import get_close_matches  # 5 ms, and only where there is none of that name

            if close := get_close_matches(args[0], COMMANDS, 3):
                # A letter is missed more often than one is left over: of `run` and `rm`, `rum` means run.
                nearest = min(close, key=lambda name: abs(len(name) - len(args[0])))
                raise click.UsageError(f"no such command {args[0]!r}; did you mean {nearest}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, each with its purpose."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        formatter.write(f"\nExamples:{EXAMPLES}")

    def invoke(self, ctx: click.Context) -> object:
        """Run the command, and return its exit code where click would take the wrong one."""
        try:
            result: object = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:  # click would exit with 1, as for a fault
            _silence()
            return PIPE_CLOSED
        except EOFError as error:
            # click would take it for Ctrl-C; compiled modules that a full disk has cut short raise it, too
            session = ctx.find_object(Session) or Session()
            return _internal(session, error)
        return result


def _silence() -> None:
    """Send stdout nowhere: Python flushes once more when it ends, and would complain."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=Root, invoke_without_command=True, context_settings=CONTEXT)
@config_option
@debug_option
@click.version_option(__version__, "--version", prog_name="penstock", message="%(prog)s %(version)s")
@click.pass_context
def root(ctx: click.Context) -> None:
    """Run language models, also those larger than the GPU."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments`, by default the process's own. Returns the exit code."""
    session = Session()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may say what the terminal's encoding cannot
        sys.stdout.reconfigure(errors="replace")
    try:
        code = root.main(arguments, "penstock", standalone_mode=False, obj=session)
        return code if isinstance(code, int) else 0
    except click.Abort:
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:  # A group of commands, and none was named.
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return _report(session, _usage(error), error.exit_code)
    except PenstockError as error:
        from penstock.cli.options import as_flags  # the command has imported it

        return _report(session, as_flags(f"error: {error}"), 2)
    except MemoryError:
        return _report(
            session,
            "error: the machine refused more memory; lower --device-memory, or close what uses memory",
            2,
        )
    except ModuleNotFoundError as error:
        package = (error.name or "penstock").partition(".")[0]
        if package == "penstock":
            return _internal(session, error)
        missing = f"{package}, which penstock needs, is not installed; pip install {package}"
        return _report(session, f"error: {missing}", 2)
    except Exception as error:
        if not isinstance(error, OSError) or error.errno not in OUTPUT_FAULTS or error.filename is not None:
            return _internal(session, error)
        _silence()
        return _report(
            session,
            f"error: the output cannot be written: {error.strerror}; free some space, or redirect it to "
            "another disk",
            2,
        )


def _internal(session: Session, error: Exception) -> int:
    """Report an error that is a bug of penstock, while it is handled, and return the exit code."""
    return _report(
        session,
        f"internal error: {type(error).__name__}: {error}; run with --debug, and report the traceback",
        1,
    )


def _arguments(context: click.Context) -> list[str]:
    """Return the names of what stands in a command without an option."""
    names = [param.name or "" for param in context.command.params if isinstance(param, click.Argument)]
    return [*names, "model", "prompt"] if "arguments" in names else names


def _usage(error: click.ClickException) -> str:
    """Return what click found wrong, worded like errors of our own, which say what to try."""
    if isinstance(error, click.NoSuchOption):
        params = error.ctx.command.params if error.ctx else ()
        known = [name for param in params for name in (*param.opts, *param.secondary_opts)]
        if ours := ours_for(error.option_name, known):
            return f"error: no such option {error.option_name!r}; here it is {ours}"
        if why := absent(error.option_name, known):
            return f"error: no such option {error.option_name!r}; {why}"
        standing_ones = _arguments(error.ctx) if error.ctx else []
        if error.ctx and standing(error.option_name, standing_ones):
            usage = " ".join([error.ctx.command_path, *error.ctx.command.collect_usage_pieces(error.ctx)[1:]])
            return f"error: no such option {error.option_name!r}; it stands without one: {usage}"
        if near := nearest(error.option_name, [name for name in known if name.startswith("-")]):
            return f"error: no such option {error.option_name!r}; did you mean {near}?"
        text = f"no such option {error.option_name!r}"  # The nearest that click knows may be far away.
    else:
        text = error.format_message().rstrip(".")
    if not text[1:2].isupper():
        text = f"{text[:1].lower()}{text[1:]}"
    text = f"error: {text}"
    if ";" in text:
        return text
    context = error.ctx if isinstance(error, click.UsageError) else None
    return (
        f"{text}{' ' if text.endswith('?') else '; '}see {context.command_path if context else 'penstock'} "
        "--help"
    )


def _report(session: Session, text: str, code: int) -> int:
    """Print an error while its exception is handled, and return the exit code."""
    trace = None
    if session.wants_traceback():
        import traceback  # 5 ms, for those who asked

        trace = traceback.format_exc()
    line = f"penstock: {one_line(text)}"
    if session.report is not None:
        session.report(line, trace)
        return code
    if trace is not None:
        say(trace.rstrip("\n"))
    say(line)
    return code
