"""`penstock bench`: times the engine without anything around it, beside what the machine allows, and ends with one line of JSON."""

from collections.abc import Callable
from functools import reduce
from pathlib import Path

import click

from penstock.base.config import Config
from penstock.base.errors import ConfigError
from penstock.base.units import parse_size
from penstock.bench.shapes import SHAPES
from penstock.cli.command import CONTEXT, Command, debug_option, option
from penstock.cli.options import size
from penstock.cli.terminal import say

WORK, ENGINE, OUTPUT = "Work", "Engine", "Output"
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
_SCRATCH = "Random weights beyond device and host memory are read from a file in DIR."
_SHARED = (
    option(WORK, "--shape", type=click.Choice(list(SHAPES)), help="Random weights in this shape instead of a MODEL."),
    option(WORK, "--batch", type=_COUNT, default=1, metavar="N", help="Sequences at once. [1]"),
    option(WORK, "--context", type=_COUNT, metavar="N", help="Prompt tokens of each. [2048, or what the model has room for]"),
    option(WORK, "--repeat", type=_COUNT, default=3, metavar="N", help="Do it all N times, with fresh prompts. [3]"),
    option(WORK, "--baseline", type=click.Choice(["transformers"]), help="Measure this too, if it is installed."),
    option(ENGINE, "--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:N, or auto: CUDA if there is any. [auto]"),
    option(ENGINE, "--dtype", default="auto", metavar="TYPE", help="auto, float32, float16 or bfloat16. [auto: the model's, if fast here]"),
    option(ENGINE, "--device-memory", callback=size, metavar="SIZE", help="Most to take there: 16GiB, 80%. [CUDA 90%, CPU 50% of free]"),
    option(ENGINE, "--host-memory", callback=size, metavar="SIZE", help="Most to take in host memory. [CUDA 80% of free]"),
    option(ENGINE, "--scratch", type=click.Path(file_okay=False, exists=True, path_type=Path), metavar="DIR", help=_SCRATCH),
    option(ENGINE, "--scratch-size", callback=size, default="16GiB", metavar="SIZE", help="Most to write there; layers share it. [16GiB]"),
    option(ENGINE, "--window", callback=size, metavar="SIZE", help="Compare: a sliding window, through which all weights pass each time."),
    option(ENGINE, "--max-step-tokens", type=_COUNT, metavar="N", help="Most tokens computed in one step. [CUDA 8192, CPU 512]"),
    option(ENGINE, "--threads", type=_COUNT, metavar="N", help="Threads of the CPU to compute with. [one for each core]"),
    option(OUTPUT, "--json", is_flag=True, help="Print nothing but the line of JSON."),
    option(OUTPUT, "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write that line to FILE too."),
    debug_option,
)


def _shared(function: Callable[..., object]) -> Callable[..., object]:
    return reduce(lambda inner, one: one(inner), reversed(_SHARED), function)


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
@_shared
def decode(output: int, **given: object) -> None:
    """Time single decode steps: all prompts are in, each sequence gets a token a step. MODEL is a checkpoint directory, or one with only a
    config.json, whose weights are then random."""
    _measure("decode", output, **given)  # type: ignore[arg-type]  # click's names are the parameters'


@command.command(cls=Command, examples=_PREFILL, short_help="Time prompts to their first tokens.")
@click.argument("model", required=False, type=click.Path(path_type=Path))
@_shared
def prefill(**given: object) -> None:
    """Time prompts from the first step to the first token of each. MODEL is a checkpoint directory, or one with only a config.json, whose
    weights are then random."""
    _measure("prefill", 1, **given)  # type: ignore[arg-type]


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
    if model is not None and shape is not None:
        raise click.UsageError("MODEL and --shape exclude each other; give one of them")
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
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {out}: its directory does not exist")

    import torch  # 1.2 s on two cores, for which whatever could be checked before has been

    from penstock.api.llm import SHIPPED_MODEL
    from penstock.bench.report import Kind
    from penstock.bench.run import Job, run

    if threads is not None:
        torch.set_num_threads(threads)
    source = SHAPES[shape] if shape else model or SHIPPED_MODEL
    name = shape or (str(model) if model else "shipped")
    job = Job(Kind(kind), name, source, config, batch, context, output, repeat, baseline is not None, there, through)
    report = run(job, (lambda _: None) if json else (lambda text: say(text, faint=True)))
    if not json:
        click.echo(f"{report}\n")
    click.echo(report.line())
    if out is not None:
        try:
            out.write_text(report.line() + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}") from error
