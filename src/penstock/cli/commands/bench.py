"""`penstock bench`: times the engine without anything around it, beside what the machine allows, and ends
with one line of JSON."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from penstock.base.config import Config
from penstock.base.errors import ConfigError
from penstock.base.units import parse_size
from penstock.bench.shapes import SHAPES
from penstock.cli.command import CONTEXT, Command, debug_option, option
from penstock.cli.load import compute_with
from penstock.cli.options import (
    BLOCKS,
    DEVICE,
    ENGINE,
    MAX_STEP_TOKENS,
    OUTPUT,
    THREADS,
    far_kv,
    size,
    with_options,
)
from penstock.cli.terminal import say

if TYPE_CHECKING:  # torch takes 1.2 s
    from penstock.bench.contexts import Report as Contexts
    from penstock.bench.replay import Report as Served
    from penstock.bench.report import Report
    from penstock.bench.serving import Report as Offline
    from penstock.bench.trace import Report as Replay

WORK = "Work"
_COUNT = click.IntRange(min=1)
_DECODE = """
  penstock bench decode                          the small model that comes with penstock
  penstock bench decode --shape 8B --batch 64    random weights in the shape of a model
  penstock bench decode ./my-model --baseline transformers
"""
_PREFILL = """
  penstock bench prefill --shape 8B --context 16384
  penstock bench prefill ./my-model --batch 4 --json
"""
_CONTEXT = """
  penstock bench context --shape 8B                      prompts of 4K, 8K, 16K and so on tokens
  penstock bench context --shape 8B --lengths 128K,1M --host-kv-memory 200GiB
  penstock bench context ./my-model --device-memory 16GiB --json
"""
_SERVE = """
  penstock bench serve-offline --shape 0.6B                256 requests of 100 to 1,024 tokens in and out
  penstock bench serve-offline ./my-model --requests 64 --input 500,2000 --output 50,200 --temperature 0.7
"""
_TRACE = """
  penstock bench trace conversation_trace.jsonl
  penstock bench trace conversation_trace.jsonl --rooms 128GiB,1TiB --policies lru,prospect --part second-half
  penstock bench trace conversation_trace.jsonl --model ./my-model --host-kv-memory 64GiB
"""
_POLICIES = "fifo,lru,second-use,prospect,adaptive,clairvoyant"
_SCRATCH = "Random weights beyond device and host memory are read from a file in DIR."
_MODEL = (
    option(
        WORK,
        "--shape",
        type=click.Choice(list(SHAPES)),
        help="Random weights in this shape instead of a MODEL.",
    ),
)
_BATCH = (
    option(WORK, "--batch", type=_COUNT, default=1, metavar="N", help="Sequences at once. [1]"),
    option(
        WORK,
        "--context",
        type=_COUNT,
        metavar="N",
        help="Prompt tokens of each. [2048, or what the model has room for]",
    ),
    option(
        WORK,
        "--repeat",
        type=_COUNT,
        default=3,
        metavar="N",
        help="Do it all N times, with fresh prompts. [3]",
    ),
    option(
        WORK, "--baseline", type=click.Choice(["transformers"]), help="Measure this too, if it is installed."
    ),
)
_ENGINE = (
    *DEVICE,
    option(
        ENGINE,
        "--scratch",
        type=click.Path(file_okay=False, exists=True, path_type=Path),
        metavar="DIR",
        help=_SCRATCH,
    ),
    option(
        ENGINE,
        "--scratch-size",
        callback=size,
        default="16GiB",
        metavar="SIZE",
        help="Most to write there; layers share it. [16GiB]",
    ),
)
_WINDOW = (
    option(
        ENGINE,
        "--window",
        callback=size,
        metavar="SIZE",
        help="Compare: a window, through which all weights pass each time.",
    ),
)
_LONG = far_kv(
    "what the device has no room for; 0: none", "Host memory for KV; given a size, all contexts rest there."
)
_REST = (
    MAX_STEP_TOKENS,
    THREADS,
    option(OUTPUT, "--json", is_flag=True, help="Print nothing but the line of JSON."),
    option(
        OUTPUT,
        "--out",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Write that line to FILE too.",
    ),
    debug_option,
)


def _lengths(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    try:
        return None if value is None else tuple(parse_size(part) for part in value.split(","))
    except ConfigError as error:
        raise click.BadParameter(
            f"{value!r} is not a list of token counts, like 4096,32K,1M", ctx, parameter
        ) from error


def _span(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    try:
        least, most = (parse_size(part) for part in value.split(","))
    except (ConfigError, ValueError) as error:
        raise click.BadParameter(f"{value!r} is not two token counts, like 100,1K", ctx, parameter) from error
    if not 1 <= least <= most:
        raise click.BadParameter(f"{value!r} is not a least and a most, from 1 on", ctx, parameter)
    return least, most


def _rooms(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(parse_size(part) for part in value.split(","))
    except ConfigError as error:
        raise click.BadParameter(
            f"{value!r} is not a list of sizes, like 128GiB,1TiB", ctx, parameter
        ) from error


def _policies(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    if unknown := [name for name in value.split(",") if name not in _POLICIES.split(",")]:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {_POLICIES}", ctx, parameter)
    return tuple(value.split(","))


HASHES, SERVED = "Without a model", "With a model"
_AT_ONCE = 16
_FAR = "Host memory for KV that the device does not hold, also of later requests; 0: none."
_HASHES = (
    option(
        HASHES,
        "--rooms",
        callback=_rooms,
        default="128GiB,256GiB,512GiB,1TiB,2TiB,4TiB",
        metavar="SIZE,...",
        help="Caches. [128GiB to 4TiB]",
    ),
    option(
        HASHES,
        "--block-bytes",
        callback=size,
        default="64MiB",
        metavar="SIZE",
        help="Of a block. [64MiB: 512 tokens of an 8B model]",
    ),
    option(
        HASHES,
        "--policies",
        callback=_policies,
        default=_POLICIES,
        metavar="NAME,...",
        help=f"What to compare. [{_POLICIES}]",
    ),
    option(
        HASHES,
        "--part",
        type=click.Choice(["whole", "second-half"]),
        default="whole",
        help="Requests that count. [whole]",
    ),
    option(
        HASHES,
        "--cost",
        type=click.IntRange(min=0),
        default=1_000_000,
        metavar="N",
        help="Blocks to cost `adaptive` with. [1000000]",
    ),
    option(HASHES, "--seed", type=int, default=0, metavar="N", help="Of a generated workload. [0]"),
)
_SERVED = (
    option(
        SERVED,
        "--model",
        type=click.Path(path_type=Path),
        metavar="MODEL",
        help="A checkpoint directory, or one with a config.json.",
    ),
    option(SERVED, "--shape", type=click.Choice(list(SHAPES)), help="Random weights in this shape instead."),
    option(
        SERVED, "--requests", type=_COUNT, default=100, metavar="N", help="The first N of the trace. [100]"
    ),
    option(
        SERVED,
        "--block-tokens",
        type=_COUNT,
        metavar="N",
        help="For 512 of the trace. [512, or what the model has room for]",
    ),
    option(
        SERVED,
        "--output",
        type=_COUNT,
        metavar="N",
        help="Tokens of each answer. [as recorded, in proportion]",
    ),
    option(
        SERVED,
        "--speed",
        type=click.FloatRange(min=0, min_open=True),
        metavar="X",
        help="Requests come X times as fast as recorded. [as they are served]",
    ),
    option(SERVED, "--max-sequences", type=_COUNT, metavar="N", help=f"Most requests at once. [{_AT_ONCE}]"),
    option(SERVED, "--compare/--no-compare", default=True, help="Again with --kv-store off. [yes]"),
    option(SERVED, "--check-output", is_flag=True, help="Exit with 1 if any answer differs in that."),
    option(SERVED, "--keep", is_flag=True, help="Start from what --kv-directory has, and leave it there."),
)


@click.group(invoke_without_command=True, context_settings=CONTEXT)
@debug_option
@click.pass_context
def command(ctx: click.Context) -> None:
    """Measure this machine's limits and how close a model comes; by itself, `bench decode`."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(decode)


@command.command(cls=Command, examples=_DECODE, short_help="Time single decode steps.")
@click.argument("model", required=False, type=click.Path(path_type=Path))
@option(WORK, "--output", type=_COUNT, default=64, metavar="N", help="Decode steps to time. [64]")
@with_options(*_MODEL, *_BATCH, *_ENGINE, *_WINDOW, *_REST)
def decode(output: int, **given: object) -> None:
    """Time single decode steps: all prompts are in, each sequence gets a token a step. MODEL is a checkpoint
    directory, or one with only a config.json, whose weights are then random."""
    _measure("decode", output, **given)  # type: ignore[arg-type]  # click's names are the parameters'


@command.command(cls=Command, examples=_PREFILL, short_help="Time prompts to their first tokens.")
@click.argument("model", required=False, type=click.Path(path_type=Path))
@with_options(*_MODEL, *_BATCH, *_ENGINE, *_WINDOW, *_REST)
def prefill(**given: object) -> None:
    """Time prompts from the first step to the first token of each. MODEL is a checkpoint directory, or one
    with only a config.json, whose weights are then random."""
    _measure("prefill", 1, **given)  # type: ignore[arg-type]


@command.command(cls=Command, examples=_CONTEXT, short_help="Memory and speed by the length of the context.")
@click.argument("model", required=False, type=click.Path(path_type=Path))
@option(
    WORK,
    "--lengths",
    callback=_lengths,
    metavar="N,N,...",
    help="Prompt tokens: 4096,32K,1M. [4K, 8K, 16K and so on, as there is room]",
)
@option(WORK, "--output", type=_COUNT, default=8, metavar="N", help="Decode steps to time after each. [8]")
@option(
    WORK, "--repeat", type=_COUNT, default=1, metavar="N", help="Do it all N times, with fresh prompts. [1]"
)
@with_options(*_MODEL, *_ENGINE, *_LONG, *_REST)
def context(
    *,
    model: Path | None,
    shape: str | None,
    lengths: tuple[int, ...] | None,
    output: int,
    repeat: int,
    scratch: Path | None,
    scratch_size: str,
    threads: int | None,
    json: bool,
    out: Path | None,
    **settings: object,
) -> None:
    """Measure contexts of growing length, one sequence at a time: the memory that one takes, how fast its
    prompt is computed, how fast it then decodes, and what that streams. KV that the device has no room for
    rests in host memory. Lengths may be beyond what the model was trained for: this is about speed. MODEL is
    a checkpoint directory, or one with only a config.json, whose weights are then random."""
    _one_model(model, shape)
    config = Config(model or Path(), **settings)  # type: ignore[arg-type]
    there = (scratch, parse_size(scratch_size)) if scratch else None
    _writable(out)

    compute_with(threads)
    from penstock.api.llm import SHIPPED_MODEL
    from penstock.bench.contexts import Job, sweep

    source = SHAPES[shape] if shape else model or SHIPPED_MODEL
    job = Job(_name(model, shape), source, config, lengths, output, repeat, there)
    _tell(sweep(job, _saying(json)), json, out)


@command.command(
    "serve-offline", cls=Command, examples=_SERVE, short_help="Time many requests of random lengths at once."
)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@option(
    WORK,
    "--requests",
    type=click.IntRange(1, 1_000_000),
    default=256,
    metavar="N",
    help="All there from the start. [256]",
)
@option(
    WORK,
    "--input",
    "prompt",
    callback=_span,
    metavar="N,N",
    default="100,1024",
    help="Least and most prompt tokens. [100,1024]",
)
@option(
    WORK,
    "--output",
    callback=_span,
    metavar="N,N",
    default="100,1024",
    help="Least and most output tokens. [100,1024]",
)
@option(
    WORK,
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="T",
    help="0: the likeliest tokens. [0]",
)
@option(WORK, "--seed", type=int, default=0, metavar="N", help="Of lengths and prompts. [0]")
@option(WORK, "--repeat", type=_COUNT, default=1, metavar="N", help="Do it all N times. [1]")
@option(WORK, "--baseline", type=click.Choice(["transformers"]), help="Measure this too, if it is installed.")
@option(
    ENGINE, "--max-sequences", type=_COUNT, metavar="N", help="Most requests at once. [the device's usual]"
)
@option(
    ENGINE, "--graphs/--no-graphs", default=True, help="Replay decode steps as CUDA graphs, on a GPU. [on]"
)
@option(
    ENGINE,
    "--kernels/--no-kernels",
    default=True,
    help="Compute by kernels of our own, on a GPU; else by plain torch. [on]",
)
@with_options(*_MODEL, *DEVICE, *_REST)
def serve_offline(
    *,
    model: Path | None,
    shape: str | None,
    requests: int,
    prompt: tuple[int, int],
    output: tuple[int, int],
    temperature: float,
    seed: int,
    repeat: int,
    baseline: str | None,
    threads: int | None,
    json: bool,
    out: Path | None,
    **settings: object,
) -> None:
    """Time many requests of random lengths, all there from the start: tokens a second over all of them. MODEL
    is a checkpoint directory, or one with only a config.json, whose weights are then random."""
    _one_model(model, shape)
    config = Config(model or Path(), **settings)  # type: ignore[arg-type]
    _writable(out)

    compute_with(threads)
    from penstock.api.llm import SHIPPED_MODEL
    from penstock.bench.serving import Job, serve

    source = SHAPES[shape] if shape else model or SHIPPED_MODEL
    job = Job(
        _name(model, shape),
        source,
        config,
        requests,
        prompt,
        output,
        temperature,
        seed,
        repeat,
        baseline is not None,
    )
    _tell(serve(job, _saying(json)), json, out)


@command.command(cls=Command, examples=_TRACE, short_help="Replay a recorded workload through prefix caches.")
@click.argument("file", type=click.Path(path_type=Path))
@with_options(*_HASHES, *_SERVED, *_ENGINE, *far_kv("what the longest request needs", _FAR), *BLOCKS, *_REST)
@click.pass_context
def trace(
    ctx: click.Context,
    /,
    *,
    file: Path,
    rooms: tuple[int, ...],
    block_bytes: str,
    policies: tuple[str, ...],
    part: str,
    cost: int,
    seed: int,
    model: Path | None,
    shape: str | None,
    json: bool,
    out: Path | None,
    **given: object,
) -> int:
    """Replay a recorded or generated workload through prefix caches of growing size: what share of its blocks
    each way to give up blocks would have had there. No model is needed. FILE has a line of JSON for each
    request, of which the hash_ids are read: the chained hashes of its blocks. Or it names a generated
    workload: zipf, scans, loops, bursts, sessions, drift, mixture, phases, arc, lirs, pairs, agents.
    `second-use` admits what is seen twice and remembers all it ever saw; `adaptive` is what the engine does,
    `prospect` the same without mixing; `clairvoyant` knows the future: no policy can do better.

    With a model, the requests are served by the engine: each hash is a block of tokens, so prompts begin
    alike where they did in FILE. What was found on the device, on the host and on disk is told, what moved
    for it, and what the same requests take where nothing is kept beyond the device. KV goes to a directory in
    --kv-directory that is gone afterwards.
    """
    _one_model(model, shape)
    hashes = "rooms", "block_bytes", "policies", "part", "cost", "seed"
    served = model is not None or shape is not None
    for name in hashes if served else given:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(one for one in ctx.command.params if one.name == name).opts[0]
            raise click.UsageError(
                f"{option} goes {'without' if served else 'with'} a model; "
                f"{'leave it' if served else 'give --model or --shape'}"
            )
    _writable(out)
    if served:
        return _replay(file, model, shape, json, out, **given)  # type: ignore[arg-type]

    from penstock.bench.trace import Job, Part, measure

    job = Job(file, rooms, parse_size(block_bytes), policies, Part(part), cost, seed)
    _tell(measure(job, _saying(json)), json, out)
    return 0


def _replay(
    file: Path,
    model: Path | None,
    shape: str | None,
    json: bool,
    out: Path | None,
    *,
    requests: int,
    block_tokens: int | None,
    output: int | None,
    speed: float | None,
    compare: bool,
    check_output: bool,
    keep: bool,
    scratch: Path | None,
    scratch_size: str,
    threads: int | None,
    max_sequences: int | None,
    max_step_tokens: int | None,
    **settings: object,
) -> int:
    if check_output and not compare:
        raise click.UsageError("--check-output needs a run to compare with; leave --no-compare")
    at_once = max_sequences or min(_AT_ONCE, max_step_tokens or _AT_ONCE)
    config = Config(model or Path(), max_sequences=at_once, max_step_tokens=max_step_tokens, **settings)  # type: ignore[arg-type]
    there = (scratch, parse_size(scratch_size)) if scratch else None

    compute_with(threads)
    from penstock.bench.replay import Job, replay

    source = SHAPES[shape] if shape else model or Path()
    job = Job(
        file, _name(model, shape), source, config, requests, block_tokens, output, speed, compare, keep, there
    )
    report = replay(job, _saying(json))
    _tell(report, json, out)
    if check_output and report.equal_outputs is None:
        raise ConfigError(
            "there is nothing to compare answers with, since nothing is kept beyond the device; allow "
            "--host-kv-memory"
        )
    return int(check_output and report.equal_outputs != report.requests)


def _measure(
    kind: str,
    output: int,
    *,
    model: Path | None,
    shape: str | None,
    batch: int,
    context: int | None,
    repeat: int,
    baseline: str | None,
    threads: int | None,
    json: bool,
    out: Path | None,
    device: str,
    dtype: str,
    device_memory: str | None,
    host_memory: str | None,
    scratch: Path | None,
    scratch_size: str,
    window: str | None,
    max_step_tokens: int | None,
) -> None:
    _one_model(model, shape)
    config = Config(
        model or Path(),
        device=device,
        dtype=dtype,
        device_memory=device_memory,
        host_memory=host_memory,
        max_step_tokens=max_step_tokens,
    )
    there = (scratch, parse_size(scratch_size)) if scratch else None
    through = parse_size(window) if window else None
    _writable(out)

    compute_with(threads)
    from penstock.api.llm import SHIPPED_MODEL
    from penstock.bench.report import Kind
    from penstock.bench.run import Job, run

    source = SHAPES[shape] if shape else model or SHIPPED_MODEL
    job = Job(
        Kind(kind),
        _name(model, shape),
        source,
        config,
        batch,
        context,
        output,
        repeat,
        baseline is not None,
        there,
        through,
    )
    _tell(run(job, _saying(json)), json, out)


def _one_model(model: Path | None, shape: str | None) -> None:
    if model is not None and shape is not None:
        raise click.UsageError("MODEL and --shape exclude each other; give one of them")


def _writable(out: Path | None) -> None:
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {out}: its directory does not exist")


def _name(model: Path | None, shape: str | None) -> str:
    return shape or (str(model) if model else "shipped")


def _saying(json: bool) -> Callable[[str], None]:
    return (lambda _: None) if json else (lambda text: say(text, faint=True))


def _tell(report: "Report | Contexts | Replay | Served | Offline", json: bool, out: Path | None) -> None:
    if not json:
        click.echo(f"{report}\n")
    click.echo(report.line())
    if out is not None:
        try:
            out.write_text(report.line() + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}") from error
