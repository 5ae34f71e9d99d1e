"""Flags that several commands share, in tables, and the settings that come of them. All values are checked
before torch is imported."""

from collections.abc import Callable
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any

import click

from penstock.base.config import CACHE, Config
from penstock.base.errors import ConfigError, RequestError
from penstock.base.units import parse_size
from penstock.cli.command import Decorator, debug_option, option
from penstock.step.params import SamplingParams
from penstock.step.structure import Structure

PROMPT, SAMPLING, OUTPUT, ENGINE = "Prompt", "Sampling", "Output", "Engine"


def size(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        if value is not None:
            parse_size(value, whole=2**50)  # of which machine a share is meant is known later
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, parameter) from error
    return value


def size_or_nothing(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    return value if value == "0" else size(ctx, parameter, value)


def _biases(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise click.BadParameter(
                f"{value!r} is not a token id and a number, like 42=-1.5", ctx, parameter
            ) from error
    return biases


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FEW = 64
"""Sequences up to which KV is allocated for just so many; for more the engine's own measure holds."""

_SAMPLING = (
    option(
        SAMPLING,
        "--temperature",
        type=float,
        metavar="T",
        help="0: always the likeliest token; 0.7 is usual. [the model's, or 1]",
    ),
    option(
        SAMPLING,
        "--top-k",
        type=int,
        metavar="K",
        help="Choose among the K likeliest tokens; 0: all. [the model's, or 0]",
    ),
    option(
        SAMPLING,
        "--top-p",
        type=float,
        metavar="P",
        help="Choose among the likeliest that reach P together. [the model's, or 1]",
    ),
    option(
        SAMPLING,
        "--min-p",
        type=float,
        metavar="P",
        help="Drop tokens less likely than P times the likeliest. [the model's, or 0]",
    ),
    option(
        SAMPLING,
        "--seed",
        type=int,
        metavar="N",
        help="The same seed gives the same text. [a new one each time]",
    ),
    option(
        SAMPLING,
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="Above 1: avoid tokens that were there. [the model's, or 1]",
    ),
    option(
        SAMPLING,
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="R",
        help="Above 0: avoid tokens of the output. [0]",
    ),
    option(
        SAMPLING,
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="R",
        help="The same, for each time it is there. [0]",
    ),
    option(
        SAMPLING,
        "--logit-bias",
        callback=_biases,
        multiple=True,
        metavar="ID=B",
        help="Add B to the logit of ID; may be repeated.",
    ),
    option(SAMPLING, "--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated."),
    option(SAMPLING, "--include-stop", is_flag=True, help="Keep the stop text in the output."),
    option(
        SAMPLING,
        "--stop-token",
        "stop_token_ids",
        type=int,
        multiple=True,
        metavar="ID",
        help="End at this token; may be repeated.",
    ),
    option(SAMPLING, "--ignore-eos", is_flag=True, help="Go on after the model's end token."),
    option(
        SAMPLING, "--min-tokens", type=int, default=0, metavar="N", help="No end token before N tokens. [0]"
    ),
    option(
        SAMPLING,
        "--json-schema",
        type=_FILE,
        metavar="FILE",
        help="The output is JSON of the schema in this file.",
    ),
    option(
        SAMPLING, "--regex", metavar="TEXT", help="The output as a whole matches this regular expression."
    ),
    option(
        SAMPLING,
        "--choice",
        multiple=True,
        metavar="TEXT",
        help="The output is this, or another such text; may be repeated.",
    ),
    option(
        SAMPLING,
        "--grammar",
        type=_FILE,
        metavar="FILE",
        help="The output follows the Lark grammar in this file.",
    ),
)
_REPORT = (
    option(
        OUTPUT,
        "--logprobs",
        type=int,
        metavar="K",
        help="With --json: log-probability of each token and of the K likeliest; -1: all.",
    ),
    option(
        OUTPUT,
        "--trace",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write what streamed when: a Chrome trace for ui.perfetto.dev.",
    ),
    option(OUTPUT, "--quiet", "-q", is_flag=True, help="Do not print device, memory sizing and statistics."),
    option(
        OUTPUT, "--verbose", "-v", is_flag=True, help="Print statistics also where stderr is not a terminal."
    ),
)
_COUNT = click.IntRange(min=1)
DEVICE = (
    option(
        ENGINE,
        "--device",
        default="auto",
        metavar="NAME",
        help="cpu, cuda, cuda:N, or auto: CUDA if there is any. [auto]",
    ),
    option(
        ENGINE,
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="auto, float32, float16 or bfloat16. [auto: the model's, if fast here]",
    ),
    option(
        ENGINE,
        "--device-memory",
        callback=size,
        metavar="SIZE",
        help="Most to take there: 16GiB, 80%. [CUDA 90%, CPU 50% of free]",
    ),
    option(
        ENGINE,
        "--host-memory",
        callback=size,
        metavar="SIZE",
        help="Most to take in host memory. [CUDA 80% of free]",
    ),
)
BEYOND_TRAINED = option(
    ENGINE,
    "--beyond-trained",
    is_flag=True,
    help="Allow contexts beyond the positions that the model was trained for.",
)
MAX_STEP_TOKENS = option(
    ENGINE,
    "--max-step-tokens",
    type=_COUNT,
    metavar="N",
    help="Most tokens computed in one step. [CUDA 8192, 16384 from 64 GiB; CPU 512]",
)
BLOCKS = (
    option(
        ENGINE,
        "--block-size",
        type=_COUNT,
        default=64,
        metavar="N",
        help="Tokens in a KV block, a power of two. [64]",
    ),
    option(
        ENGINE,
        "--kv-blocks",
        type=_COUNT,
        metavar="N",
        help="KV blocks on the device. [as many as are useful and fit]",
    ),
)
THREADS = option(
    ENGINE,
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Threads of the CPU to compute with. [one for each core]",
)
_POLICY = "What new tokens read of KV beyond the device: full, window:SINKS,RECENT or topk:BLOCKS. [full]"
_STORE = "When KV blocks are kept there for later requests: eager, lazy, off. [eager]"
_PREFILL = "What prompts read of it: also vertical_slash:COLUMNS,SLASH. [full]"
_SKETCH = "Bits of the keys' copy by which policies choose and bound what they miss: 0, 4, 8. [4]"
_MISSED = "Read everything where a policy might miss more than this fraction."


def far_kv(
    usual: str, host: str = "Host memory for KV of contexts longer than the device holds; 0: none."
) -> tuple[Decorator, ...]:
    """The flags for KV beyond the device. `usual`: how much of host memory it gets where none of `host` is
    asked for."""
    return (
        option(
            ENGINE, "--host-kv-memory", callback=size_or_nothing, metavar="SIZE", help=f"{host} [{usual}]"
        ),
        option(
            ENGINE,
            "--disk-kv-memory",
            callback=size,
            metavar="SIZE",
            help="Disk for KV that host memory does not hold, also of later runs. [none]",
        ),
        option(
            ENGINE,
            "--kv-directory",
            type=click.Path(path_type=Path),
            default=CACHE,
            metavar="DIR",
            help=f"Where that is. [{CACHE}]",
        ),
        option(
            ENGINE,
            "--host-kv-dtype",
            default="auto",
            metavar="TYPE",
            help="Of KV that rests there: auto, as on the device; fp8. [auto]",
        ),
        option(ENGINE, "--kv-store", default="eager", metavar="HOW", help=_STORE),
        option(
            ENGINE,
            "--kv-tile",
            type=_COUNT,
            metavar="N",
            help="Tokens of such a context that are on the device at a time. [64 MiB's]",
        ),
        option(ENGINE, "--attention-policy", default="full", metavar="P", help=_POLICY),
        option(ENGINE, "--prefill-policy", default="full", metavar="P", help=_PREFILL),
        option(ENGINE, "--sketch-bits", type=int, default=4, metavar="N", help=_SKETCH),
        option(ENGINE, "--missed-limit", type=float, metavar="F", help=_MISSED),
    )


_ENGINE = (
    *DEVICE,
    *far_kv("what --max-length needs"),
    option(
        ENGINE,
        "--max-length",
        type=int,
        metavar="N",
        help="Most tokens of prompt and output together. [the model's]",
    ),
    BEYOND_TRAINED,
    MAX_STEP_TOKENS,
    option(
        ENGINE,
        "--max-sequences",
        type=int,
        metavar="N",
        help="Most sequences in one step. [run: its outputs; else 64, on a GPU 256]",
    ),
    *BLOCKS,
    option(
        ENGINE,
        "--prefix-cache/--no-prefix-cache",
        default=True,
        help="Reuse the KV of equal beginnings. [on]",
    ),
    option(
        ENGINE,
        "--tensor-parallel",
        type=click.IntRange(min=1),
        default=1,
        metavar="N",
        help="Divide the model among N devices. [1]",
    ),
    option(
        ENGINE,
        "--graphs/--no-graphs",
        default=True,
        help="Replay decode steps as CUDA graphs, on a GPU. [on]",
    ),
    option(
        ENGINE,
        "--kernels/--no-kernels",
        default=True,
        help="Compute by kernels of our own, on a GPU; else by plain torch. [on]",
    ),
    option(
        ENGINE,
        "--cache",
        type=click.Path(path_type=Path),
        default=CACHE,
        metavar="DIR",
        help=f"Where packs and digests of weights are kept. [{CACHE}]",
    ),
    option(ENGINE, "--check", is_flag=True, help="Prove the KV ledger's invariants at every step (slow)."),
)


def engine_options(function: Callable[..., object]) -> Callable[..., object]:
    """What a command takes that keeps a model for a while, without any sampling of its own."""
    return with_options(*_ENGINE, debug_option)(function)


def with_options(*options: Decorator) -> Decorator:
    """All of them, in this order in the help."""
    return lambda function: reduce(
        lambda inner, one: one(inner), reversed(options), function
    )  # click lists the last applied first


def common_options(function: Callable[..., object]) -> Callable[..., object]:
    """Everything that `run` and `chat` take alike; to stand below their own options."""
    return with_options(*_SAMPLING, *_REPORT, *_ENGINE, debug_option)(function)


def sampling_params(ctx: click.Context) -> SamplingParams:
    """The command's sampling flags. Raises RequestError."""
    values = {
        field.name: ctx.params[field.name] for field in fields(SamplingParams) if field.name in ctx.params
    }
    if ctx.params["quiet"] and ctx.params["verbose"]:
        raise click.UsageError("--quiet and --verbose exclude each other; give one of them")
    reported = [name for name in ("logprobs", "prompt_logprobs") if ctx.params.get(name) is not None]
    if reported and not ctx.params["json"]:
        raise click.UsageError(f"--{reported[0].replace('_', '-')} are only written with --json; add it")
    return SamplingParams(**values, structure=_structure(ctx))


def _structure(ctx: click.Context) -> Structure | None:
    """What the command's flags say of the output as a whole. Raises RequestError."""
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
    return made[given[0]](ctx.params[given[0]]) if given else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{file} cannot be read: {error.strerror if isinstance(error, OSError) else 'not UTF-8'}"
        ) from error


def engine_config(ctx: click.Context, model: Path, sequences: int | None) -> Config:
    """The command's engine flags. `sequences`: how many there will ever be at once, if that is known, which
    bounds the useful KV.

    Raises ConfigError."""
    values = {field.name: ctx.params[field.name] for field in fields(Config) if field.name in ctx.params}
    if sequences is not None and values["max_sequences"] is None:
        few = min(sequences, values["max_step_tokens"] or sequences)
        values["max_sequences"] = few if few <= _FEW else None
    return Config(**values | {"model": model})
