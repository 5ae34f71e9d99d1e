"""Find the prompt, on the command line, in a file or on stdin, and its model. Nothing here needs the
model."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from penstock.base.config import SHIPPED_MODEL as SHIPPED_MODEL
from penstock.base.errors import CheckpointError, RequestError
from penstock.cli.model_names import hub_name
from penstock.cli.terminal import is_terminal, say
from penstock.hub.names import ModelName, looks_like_model
from penstock.weights.gguf.files import is_gguf


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as it was given."""

    text: str
    typed: bool
    """The text stands on the command line, and was not read from a file or from stdin."""


def model_and_prompt(arguments: tuple[str, ...], file: str | None) -> tuple[Path, PromptText]:
    """Return what `run [MODEL] PROMPT` means.

    file: the prompt's, if it is not an argument. Raises click.UsageError, CheckpointError and RequestError.
    """
    if len(arguments) > 2:
        raise click.UsageError(
            f"there are {len(arguments)} arguments, but run takes a model and a prompt; put the prompt in "
            "quotes"
        )
    if file is not None:
        if len(arguments) > 1:
            raise click.UsageError(
                f"a prompt was given as an argument and with --file {file}; give one of them"
            )
        return model_path(arguments[0] if arguments else None), _checked(_read_file(file), typed=False)
    if len(arguments) == 2:
        return model_path(arguments[0]), _prompt(arguments[1])
    if arguments and not _is_model(arguments[0]):
        return SHIPPED_MODEL, _prompt(arguments[0])
    name = arguments[0] if arguments else None
    model = model_path(name, f"; as a prompt, one word goes through a pipe: echo {name} | penstock run")
    if sys.stdin is None or is_terminal(sys.stdin):
        where = f" after the model {name}" if name else ""
        raise click.UsageError(
            f"the prompt is missing{where}; give it in quotes, with --file, or through a pipe, or talk with "
            f"the model: penstock chat{f' {name}' if name else ''}"
        )
    return model, _prompt("-")


def _is_model(argument: str) -> bool:
    """Tell whether a lone argument is a model, and not the prompt. What looks like one is one."""
    return (
        looks_like_model(argument)
        or os.path.exists(os.path.join(argument, "config.json"))
        or (os.path.isfile(argument) and is_gguf(Path(argument)))
    )


def model_path(argument: str | None, hint: str | None = None) -> Path:
    """Return the model's directory or file, or its name on the Hub; whether it holds a model is found out on
    loading.

    hint: what else to try where it is none; None for what is usual.

    Raises CheckpointError if it can be none of these.
    """
    if argument is None:
        return SHIPPED_MODEL
    # Nothing is there also for a name that no file can have, perhaps a prompt.
    if not os.path.exists(argument) and ModelName.parse(argument) is None:
        if hint is None:
            hint = "; put the prompt in quotes" if " " not in argument and "/" not in argument else ""
        refuse_other_name(argument)
        raise CheckpointError(
            f"model {argument[:200]!r} does not exist; give a directory with a config.json, or a model of "
            f"the Hugging Face Hub as owner/name{hint}"
        )
    return Path(argument)


def refuse_other_name(model: str) -> None:
    """Raise CheckpointError, with the name on the Hugging Face Hub, for a model that is named as ollama names
    it, unless such a file is there."""
    if (ours := hub_name(model)) is not None and not os.path.exists(model):
        raise CheckpointError(f"model {model!r} does not exist; on the Hugging Face Hub it is {ours}")


def _prompt(argument: str) -> PromptText:
    if argument != "-":
        return _checked(argument, typed=True)
    if sys.stdin is None:
        raise RequestError("the prompt is missing, and stdin is closed; give it in quotes, or with --file")
    if is_terminal(sys.stdin):
        say("penstock: reading the prompt from the terminal; end it with Ctrl-D on an empty line")
    return _checked(_text(sys.stdin.buffer.read(), "the prompt on stdin"), typed=False)


def _read_file(name: str) -> str:
    if name == "-":
        return _prompt("-").text
    try:
        data = Path(name).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(f"the prompt cannot be read from {name}: {reason}; name a text file") from error
    return _text(data, f"the prompt in {name}")


def decode(data: bytes, what: str) -> str:
    """Return bytes as text. Raises RequestError, which says where, for what is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        bad = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise RequestError(
            f"{what} is not valid UTF-8: {bad}; convert it, for example with iconv -f latin1 -t utf-8"
        ) from error


def _text(data: bytes, what: str) -> str:
    """Return the text without the newline that editors and echo put at the end."""
    text = decode(data, what)
    return text[:-1].removesuffix("\r") if text.endswith("\n") else text


def _checked(text: str, *, typed: bool) -> PromptText:
    decode(
        text.encode(errors="surrogateescape"), "the prompt"
    )  # bytes that are no UTF-8 arrive as lone surrogates
    if not text:
        raise RequestError("the prompt is empty; give at least one character")
    return PromptText(text, typed)
