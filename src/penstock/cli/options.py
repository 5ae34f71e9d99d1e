"""The flags that several commands share, and what is made of them: a Config and SamplingParams.

Flags of the engine come from the fields of Config (see base.setting). All values are checked before torch is
imported, which takes 1.2 s.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial, reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click

from penstock.arch.formats.recipe import SHAPE_FORMATS, Recipe
from penstock.base import setting
from penstock.base.config import Config
from penstock.base.errors import ConfigError, RequestError
from penstock.base.setting import MOST, UNKNOWN_WHOLE, SettingField, Size, settings_of
from penstock.base.units import parse_memory, parse_size
from penstock.cli.command import Decorator, TokenRange, debug_option, option
from penstock.cli.models import download_option
from penstock.cli.terminal import say
from penstock.step.params import SamplingParams
from penstock.step.structure import Structure

T = TypeVar("T")
Made = TypeVar("Made")
PROMPT, SAMPLING, OUTPUT, ENGINE = "Prompt", "Sampling", "Output", "Engine"


def checked(check: Callable[[Any], object], ctx: click.Context, parameter: click.Parameter, value: T) -> T:
    """Return a flag's value if `check` has nothing against it. Raises click.BadParameter."""
    try:
        if value is not None:
            check(value)
    except ConfigError as error:
        said = str(error).removeprefix(f"{parameter.name}: ")
        raise click.BadParameter(said, ctx, parameter) from error
    return value


size = partial(checked, lambda text: parse_memory(text, whole=UNKNOWN_WHOLE))
rate = partial(checked, lambda text: parse_size(text, whole=UNKNOWN_WHOLE))
"""The callbacks of flags that take a size of memory, or bytes a second, and are no settings of the engine."""


def _numbers(
    what: str, ctx: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Return the numbers of a flag that takes several, with commas between. Raises click.BadParameter."""
    try:
        return None if value is None else tuple(map(parse_size, value.split(",")))
    except ConfigError as error:
        raise click.BadParameter(f"{value!r} is not a list of {what}", ctx, parameter) from error


token_counts = partial(_numbers, "token counts; write one like 4096,32K,1M")
sizes = partial(_numbers, "sizes; write one like 128GiB,1TiB")
"""The callbacks of flags that take several token counts, or several sizes."""


def names_of(
    what: str, known: Sequence[str], ctx: click.Context, parameter: click.Parameter, value: str
) -> tuple[str, ...]:
    """Return the names of a flag that takes several of the known ones, with commas between.

    Raises click.BadParameter.
    """
    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    if unknown := [name for name in names if name not in known]:
        said = f"{unknown[0]!r} is no {what}; give some of {','.join(known)}"
        raise click.BadParameter(said, ctx, parameter)
    return names


def flag(one: SettingField, section: str = ENGINE, **instead: object) -> Decorator:
    """Return the flag of a declared setting.

    instead: `help` and `usual` of a command for which the setting means something else, and attributes of the
    click option in place of those that follow from the declaration.
    """
    dashed, switch = one.name.replace("_", "-"), one.kind is bool
    usual, said = instead.pop("usual", one.shown_default), instead.pop("help", one.sentence)
    silent = switch and not one.default
    attributes: dict[str, object] = {
        "default": one.default,
        "type": _click_type(one),
        "is_flag": switch,
        "multiple": one.kind is tuple,
        "callback": partial(checked, one.checked),
        "metavar": _METAVARS.get(one.kind, one.name.rpartition("_")[2].upper()),
        "help": as_flags(f"{said}" if silent else f"{said} [{usual}]"),
        "rare": ENGINE_SETTINGS.get(one.name) is one and one.name not in COMMON,
    }
    name = f"--{dashed}/--no-{dashed}" if switch and one.default else f"--{dashed}"
    return option(section, name, **attributes | instead)


def _click_type(one: SettingField) -> object:
    least, most = one.limits
    highest = most if most < MOST else None
    whole = TokenRange if one.unit == "tokens" else click.IntRange
    types = {
        Path: click.Path(path_type=Path),
        int: click.INT if one.choices else whole(int(least), None if highest is None else int(most)),
        float: click.FloatRange(least, highest),
    }
    return types.get(one.kind)


def as_flags(text: str, more: Collection[str] = ()) -> str:
    """Return a text in which settings of the engine, and `more`, are written as flags: max_length as
    --max-length."""
    return setting.as_flags(text, {*ENGINE_SETTINGS, *more})


def weight_format(section: str) -> Decorator:
    """Return the flag --format, of the weights of a model of which only the shape is there."""
    return option(
        section,
        "--format",
        "weight_format",
        callback=partial(checked, Recipe.parse),
        metavar="NAME",
        help=f"Format of weights: {', '.join(SHAPE_FORMATS)}; int4:128 for groups of 128. [the model's]",
    )


_METAVARS = {bool: None, Size: "SIZE", Path: "DIR", int: "N", float: "X", tuple: "NAME=PATH"}
COMMON = frozenset(
    (
        "device",
        "dtype",
        "device_memory",
        "host_memory",
        "disk_kv_memory",
        "max_length",
        "beyond_trained",
        "max_sequences",
        "lora_modules",
        "tensor_parallel",
        "cpu_compute",
        "speculate",
    )
)
"""The settings of the engine that --help shows; --help-all shows the others, too."""
ENGINE_SETTINGS = {one.name: one for one in settings_of(Config) if one.name != "model"}
"""The settings that are flags, by name; the model is an argument of most commands."""


def engine_flags(*names: str) -> tuple[Decorator, ...]:
    """Return the flags of some settings of the engine."""
    return tuple(flag(ENGINE_SETTINGS[name]) for name in names)


def settings_from(kind: type[Made], params: Mapping[str, object], **more: object) -> Made:
    """Return the settings that a command's flags give, with `more` that are no flags. Raises ConfigError."""
    flags = {one.name: params[one.name] for one in settings_of(kind) if one.name in params}
    return kind(**flags | more)


def _biases(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise click.BadParameter(
                f"{value!r} is not a token id and a number; write them like 42=-1.5", ctx, parameter
            ) from error
    return biases


def check_temperature(value: float) -> None:
    """Raise ConfigError for a temperature that SamplingParams refuse, in their words."""
    try:
        SamplingParams(temperature=value)
    except RequestError as error:
        raise ConfigError(str(error)) from error


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FEW = 64
"""Sequences up to which KV is allocated for just so many; for more the engine's own measure holds."""

_LORA = option(
    PROMPT, "--lora", metavar="NAME", help="LoRA adapter to answer with, one of --lora-modules. [none]"
)
_SAMPLING = (
    option(
        SAMPLING,
        "--temperature",
        type=float,
        callback=partial(checked, check_temperature),
        metavar="T",
        help="Divide logits by T; 0 always takes the likeliest token. [the model's, or 1]",
    ),
    option(
        SAMPLING,
        "--top-k",
        type=int,
        metavar="K",
        help="Sample from the K likeliest tokens; 0 for all. [the model's, or 0]",
    ),
    option(
        SAMPLING,
        "--top-p",
        type=float,
        metavar="P",
        help="Sample from the likeliest tokens that reach probability P. [the model's, or 1]",
    ),
    option(
        SAMPLING,
        "--min-p",
        type=float,
        metavar="P",
        rare=True,
        help="Drop tokens less likely than P times the likeliest. [the model's, or 0]",
    ),
    option(
        SAMPLING,
        "--seed",
        type=int,
        metavar="N",
        help="Seed for sampling; the same seed gives the same text. [a new one each time]",
    ),
    option(
        SAMPLING,
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="Above 1, tokens of prompt and output are less likely. [the model's, or 1]",
    ),
    option(
        SAMPLING,
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="R",
        rare=True,
        help="Subtract R from the logits of tokens in the output. [0]",
    ),
    option(
        SAMPLING,
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="R",
        rare=True,
        help="Subtract R from a token's logit each time it is in the output. [0]",
    ),
    option(
        SAMPLING,
        "--logit-bias",
        callback=_biases,
        multiple=True,
        metavar="ID=B",
        rare=True,
        help="Add B to the logit of token ID; may be repeated.",
    ),
    option(SAMPLING, "--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated."),
    option(SAMPLING, "--include-stop", is_flag=True, rare=True, help="Keep the stop text in the output."),
    option(
        SAMPLING,
        "--stop-token",
        "stop_token_ids",
        type=int,
        multiple=True,
        metavar="ID",
        rare=True,
        help="End at this token; may be repeated.",
    ),
    option(SAMPLING, "--ignore-eos", is_flag=True, rare=True, help="Go on after the model's end token."),
    option(
        SAMPLING,
        "--min-tokens",
        type=TokenRange(),
        default=0,
        metavar="N",
        rare=True,
        help="Sample no end token before N tokens. [0]",
    ),
    option(
        SAMPLING,
        "--json-schema",
        type=_FILE,
        metavar="FILE",
        help="Hold the output to JSON of the schema in this file.",
    ),
    option(SAMPLING, "--regex", metavar="TEXT", help="Hold the whole output to this regular expression."),
    option(
        SAMPLING,
        "--choice",
        multiple=True,
        metavar="TEXT",
        rare=True,
        help="Hold the output to one of these texts; may be repeated.",
    ),
    option(
        SAMPLING,
        "--grammar",
        type=_FILE,
        metavar="FILE",
        rare=True,
        help="Hold the output to the Lark grammar in this file.",
    ),
)
_REPORT = (
    option(
        OUTPUT,
        "--logprobs",
        type=int,
        metavar="K",
        rare=True,
        help="With --json: log-probabilities of each token and of the K likeliest; -1 for all.",
    ),
    option(
        OUTPUT,
        "--trace",
        type=click.Path(path_type=Path),
        metavar="FILE",
        rare=True,
        help="Write a Chrome trace of reads, copies and waits, for ui.perfetto.dev.",
    ),
    option(OUTPUT, "--quiet", "-q", is_flag=True, help="Do not print device, memory sizing and statistics."),
    option(
        OUTPUT, "--verbose", "-v", is_flag=True, help="Print statistics also where stderr is not a terminal."
    ),
)
DEVICE = engine_flags("device", "dtype", "device_memory", "host_memory")
[MAX_STEP_TOKENS, CPU_COMPUTE, THREADS] = engine_flags("max_step_tokens", "cpu_compute", "threads")
BLOCKS = engine_flags("block_size", "kv_blocks")


def far_kv(usual: str, host: str = ENGINE_SETTINGS["host_kv_memory"].help) -> tuple[Decorator, ...]:
    """Return the flags for KV beyond the device.

    usual: how much of host memory it gets by default. host: the help of --host-kv-memory.
    """
    return (
        flag(ENGINE_SETTINGS["host_kv_memory"], usual=usual, help=host),
        *engine_flags("disk_kv_memory", "kv_directory", "host_kv_dtype", "kv_store", "kv_tile"),
        *engine_flags("attention_policy", "prefill_policy", "sketch_bits", "missed_limit"),
    )


def beyond_trained(lengths: str) -> Decorator:
    """Return the flag --beyond-trained of a command that takes lengths by a flag of its own."""
    said = f"Allow {lengths} beyond the positions that the model was trained for."
    return flag(ENGINE_SETTINGS["beyond_trained"], help=said)


_ENGINE = engine_flags(*ENGINE_SETTINGS)


def with_options(*options: Decorator) -> Decorator:
    """Return a decorator that adds options, in this order in the help."""
    return lambda function: reduce(
        lambda inner, one: one(inner), reversed(options), function
    )  # click lists the last applied first


engine_options = with_options(*_ENGINE, download_option, debug_option)
"""Adds the flags of a command that keeps a model for a while, and has no sampling of its own."""
common_options = with_options(_LORA, *_SAMPLING, *_REPORT, *_ENGINE, download_option, debug_option)
"""Adds everything that `run` and `chat` take alike; it stands below their own options."""


def sampling_params(ctx: click.Context) -> SamplingParams:
    """Return the SamplingParams of a command's flags. Raises RequestError."""
    values = {
        field.name: ctx.params[field.name] for field in fields(SamplingParams) if field.name in ctx.params
    }
    if ctx.params["quiet"] and ctx.params["verbose"]:
        raise click.UsageError("--quiet and --verbose exclude each other; give one of them")
    reported = [name for name in ("logprobs", "prompt_logprobs") if ctx.params.get(name) is not None]
    if reported and not ctx.params["json"]:
        raise click.UsageError(f"--{reported[0].replace('_', '-')} is only written with --json; add --json")
    structure = _structure(ctx)
    try:
        return SamplingParams(**values, structure=structure)
    except RequestError as error:
        raise RequestError(as_flags(str(error), values)) from error


def _structure(ctx: click.Context) -> Structure | None:
    """Return what the command's flags ask of the output as a whole. Raises RequestError."""
    made: dict[str, Callable[[Any], Structure]] = {
        "json_schema": lambda file: Structure.json_schema(_text(file)),
        "regex": Structure.regex,
        "choice": Structure.choice,
        "grammar": lambda file: Structure.lark(_text(file)),
    }
    given = [name for name in made if ctx.params[name] not in (None, ())]
    if len(given) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{flags} exclude each other; give one of them")
    if given and find_spec("llguidance") is None:
        raise RequestError(
            f"--{given[0].replace('_', '-')} needs llguidance, which is not installed; pip install "
            "'penstock[grammar]'"
        )
    return made[given[0]](ctx.params[given[0]]) if given else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{file} cannot be read: {error.strerror if isinstance(error, OSError) else 'not UTF-8'}; give "
            "a text file in UTF-8"
        ) from error


def engine_config(ctx: click.Context, model: Path | None, sequences: int | None) -> Config:
    """Return the Config of a command's engine flags. Raises ConfigError.

    sequences: how many there will ever be at once, if that is known. It bounds the KV that is useful.
    """
    asked = ctx.params
    most = asked["max_sequences"]
    if sequences is not None and most is None:
        few = min(sequences, asked["max_step_tokens"] or sequences)
        most = few if few <= _FEW else None
    config = settings_from(Config, asked, model=model, max_sequences=most)
    there = [text.partition("=")[0] for text in config.lora_modules]
    if (name := asked.get("lora")) and name not in there:
        raise ConfigError(
            f"the LoRA adapter {name!r} is not loaded; there is {', '.join(there) or 'none'}; name it and "
            "its directory by --lora-modules NAME=PATH"
        )
    if there and "lora" in asked and not name and not asked["quiet"]:
        say(f"answered without LoRA adapters; --lora takes one of: {', '.join(there)}", faint=True)
    return config
