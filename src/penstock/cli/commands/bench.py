"""`penstock bench`: times the engine without anything around it, beside what the machine allows, and ends
with one line of JSON."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from penstock.arch.formats.recipe import config_in
from penstock.base.config import SHIPPED_MODEL, Config
from penstock.base.errors import ConfigError
from penstock.base.report import JsonLine
from penstock.base.units import parse_size
from penstock.bench.shapes import SHAPES, is_bare
from penstock.cli.bench_options import (
    AT_ONCE,
    BATCH,
    BENCH_ENGINE,
    CACHES,
    CONTEXTS,
    COUNT,
    KV_BELOW,
    MODEL,
    RECORDING,
    REPLAY,
    REPLAY_KV,
    REQUESTS,
    REST,
    ROUTING,
    WINDOW,
    WORK,
)
from penstock.cli.command import CONTEXT, Command, debug_option, option
from penstock.cli.known_costs import costs_of
from penstock.cli.load import compute_with
from penstock.cli.models import located
from penstock.cli.options import BLOCKS, DEVICE, with_options
from penstock.cli.terminal import say
from penstock.weights.checkpoint.config import read_config

if TYPE_CHECKING:  # torch takes 1.2 s
    from penstock.bench.speed.setup import Target

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
_EXPERTS = """
  penstock bench experts ./my-mixture --text book.txt --routing-out book.npz
  penstock bench experts --recorded book.npz --policies slots,lru,ideal --slots 512,1024
"""
_TRACE = """
  penstock bench trace conversation_trace.jsonl
  penstock bench trace conversation_trace.jsonl --rooms 128GiB,1TiB --policies lru,prospect --part second-half
  penstock bench trace conversation_trace.jsonl --model ./my-model --host-kv-memory 64GiB
"""


@click.group(invoke_without_command=True, context_settings=CONTEXT)
@debug_option
@click.pass_context
def command(ctx: click.Context) -> None:
    """Measure this machine's limits and how close a model comes; by itself, `bench decode`."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(decode)


@dataclass(frozen=True, slots=True)
class _Output:
    """Sends a report to the terminal, and to a file if one is given. `json` prints the line of JSON
    alone."""

    json: bool
    file: Path | None

    @classmethod
    def of(cls, given: dict[str, Any]) -> "_Output":
        """Take --json and --out out of a command's options. Raises ConfigError where the file has no
        directory."""
        json, file = given.pop("json"), given.pop("out")
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(
                f"cannot write {file}: its directory does not exist; create it, or name another"
            )
        return cls(json, file)

    def say(self, text: str) -> None:
        """Print a remark while a benchmark runs."""
        if not self.json:
            say(text, faint=True)

    def write(self, report: JsonLine) -> None:
        """Print the report, and write its line to the file. Raises ConfigError."""
        if not self.json:
            click.echo(f"{report}\n")
        click.echo(report.line())
        if self.file is not None:
            try:
                self.file.write_text(report.line() + "\n")
            except OSError as error:
                raise ConfigError(f"cannot write {self.file}: {error.strerror}; name another file") from error


def _prepare(given: dict[str, Any]) -> "tuple[Target, _Output]":
    """Split the options that all benchmarks of an engine have: the model with its settings, and where the
    report goes.

    Those that are not named here are settings of the engine. Torch is loaded after all that can be refused
    has been checked. Raises ConfigError and UsageError.
    """
    model, shape, format = given.pop("model"), given.pop("shape"), given.pop("weight_format")
    if model is not None and shape is not None:
        raise click.UsageError("MODEL and --shape exclude each other; give one of them")
    if format and not shape and not is_bare(model or SHIPPED_MODEL):
        raise click.UsageError(
            "--format is for random weights; give --shape, or a directory with only a config.json, or "
            "quantise the model with `penstock pack --to`"
        )
    output, download = _Output.of(given), given.pop("download")
    scratch, most = given.pop("scratch", None), given.pop("scratch_size", None)
    routing = given.pop("routing", None)
    config = Config(model or Path(), **given)
    if model is not None:
        config, _ = located(config, download=download, quiet=output.json)

    compute_with(config.threads)
    from penstock.bench.routing.imposing import ImposedRouting
    from penstock.bench.speed.setup import Target

    source = SHAPES[shape] if shape else config.model if model else SHIPPED_MODEL
    if format:
        config_file = SHAPES[shape] if shape else read_config(config.model)
        source = config_in(format, config_file, str(model or shape))
    name = shape or (str(model) if model else "shipped")
    disk = (scratch, parse_size(most)) if scratch else None
    return Target(name, source, config, disk, ImposedRouting.parse(routing) if routing else None), output


@command.command(cls=Command, examples=_DECODE, short_help="Time single decode steps.")
@click.argument("model", required=False, type=click.Path(path_type=Path))
@option(WORK, "--output", type=COUNT, default=64, metavar="N", help="Decode steps to time. [64]")
@with_options(*MODEL, *ROUTING, *BATCH, *BENCH_ENGINE, *WINDOW, *REST)
def decode(output: int, **given: Any) -> None:
    """Time single decode steps: all prompts are in, each sequence gets a token a step. MODEL is a checkpoint
    directory, one with only a config.json, whose weights are then random, or one of the Hugging Face Hub."""
    _latency("decode", output, **given)


@command.command(cls=Command, examples=_PREFILL, short_help="Time prompts to their first tokens.")
@click.argument("model", required=False, type=click.Path(path_type=Path))
@with_options(*MODEL, *ROUTING, *BATCH, *BENCH_ENGINE, *WINDOW, *REST)
def prefill(**given: Any) -> None:
    """Time prompts from the first step to the first token of each. MODEL is a checkpoint directory, or one
    with only a config.json; its weights are then random."""
    _latency("prefill", 1, **given)


def _latency(
    kind: str,
    output: int,
    *,
    batch: int,
    context: int | None,
    repeat: int,
    baseline: str | None,
    window: str | None,
    link_rate: str | None,
    **given: Any,
) -> None:
    target, to = _prepare(given)
    from penstock.bench.speed.held import held_link
    from penstock.bench.speed.latency import BenchKind, LatencyBench, run

    through = parse_size(window) if window else None
    bench = LatencyBench(
        BenchKind(kind),
        target,
        batch,
        context,
        output,
        repeat,
        baseline is not None,
        through,
        partial(costs_of, target.config.cache.expanduser()),
    )
    with held_link(target.config.device, parse_size(link_rate) if link_rate else None):
        to.write(run(bench, to.say))


@command.command(cls=Command, examples=_CONTEXT, short_help="Memory and speed by the length of the context.")
@click.argument("model", required=False, type=click.Path(path_type=Path))
@with_options(*CONTEXTS, *MODEL, *BENCH_ENGINE, *KV_BELOW, *REST)
def context(*, lengths: tuple[int, ...] | None, output: int, repeat: int, **given: Any) -> None:
    """Measure contexts of growing length, one sequence at a time: the memory that one takes, how fast its
    prompt is computed, how fast it then decodes, and what that streams. KV that the device has no room for
    rests in host memory. MODEL is a checkpoint directory, or one with only a config.json; its weights are
    then random, and lengths may be any."""
    target, to = _prepare(given)
    source, config = target.source, target.config
    if lengths and isinstance(source, Path) and not (is_bare(source) or config.beyond_trained):
        from penstock.cli.shape import expect_trained  # 0.1 s, with what knows all families of models

        expect_trained(source, max(lengths), f"--lengths {max(lengths)}")
    from penstock.bench.speed.contexts import ContextBench, sweep

    to.write(sweep(ContextBench(target, lengths, output, repeat), to.say))


@command.command(
    "serve-offline", cls=Command, examples=_SERVE, short_help="Time many requests of random lengths at once."
)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@with_options(*REQUESTS, *MODEL, *ROUTING, *DEVICE, *REST)
def serve_offline(
    *,
    requests: int,
    prompt: tuple[int, int],
    output: tuple[int, int],
    temperature: float,
    seed: int,
    repeat: int,
    baseline: str | None,
    **given: Any,
) -> None:
    """Time many requests of random lengths, all there from the start: tokens a second over all of them. MODEL
    is a checkpoint directory, or one with only a config.json; its weights are then random."""
    target, to = _prepare(given)
    from penstock.bench.speed.throughput import RandomLengths, ThroughputBench, serve

    lengths = RandomLengths(requests, prompt, output, seed)
    to.write(serve(ThroughputBench(target, lengths, temperature, repeat, baseline is not None), to.say))


@command.command(
    cls=Command, examples=_EXPERTS, short_help="How a mixture routes a text, and what slots hit."
)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@with_options(*RECORDING, *DEVICE, *REST)
def experts(
    *,
    model: Path | None,
    text: Path | None,
    recorded: Path | None,
    slots: tuple[int, ...] | None,
    policies: tuple[str, ...],
    routing_out: Path | None,
    **given: Any,
) -> None:
    """Record which experts the routers of MODEL, a mixture, choose for a text and for continuations of it,
    and replay that against numbers of slots: how many of the experts that a step asks for would be on the
    device. `slots` is the policy that runs there, with slots by layer, `slots-shared` the same over all
    layers, `today` the one that the host decides by. `static` keeps what the first half asked for most,
    `ideal` knows the future. Hits are those of the second half. A file that --routing-out writes is read by
    --recorded, by --routing of other benchmarks, and by `penstock plan`."""
    if (model is None) == (recorded is None) or (model is not None) != (text is not None):
        raise click.UsageError("give a MODEL and --text, or --recorded without them")
    output, download = _Output.of(given), given.pop("download")
    sequences, prompt, answer = (given.pop(name) for name in ("sequences", "prompt", "output"))
    for file in (text, recorded):
        if file is not None and not file.exists():
            raise ConfigError(f"{file} does not exist; give another file")
    if routing_out is not None and not routing_out.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {routing_out}: its directory does not exist; create it")
    length = prompt + answer + 1
    config = Config(model or Path(), prefix_cache=False, max_length=length, **given)
    name = ""
    if model is not None:
        config, name = located(config, download=download, quiet=output.json)

    compute_with(config.threads)
    from penstock.bench.routing.experts import ReplayWork, RoutingWork, record, replay
    from penstock.bench.routing.recording import Recording
    from penstock.evals.prompts import text_of

    if recorded is not None:
        found = Recording.read(recorded)
    else:
        assert model is not None
        assert text is not None
        work = RoutingWork(text_of(text), text.name, sequences, prompt, answer)
        found = record(config, work, name, output.say)
        if routing_out is not None:
            found.write(routing_out)
    output.write(replay(found, ReplayWork(slots, policies), output.say))


@command.command(cls=Command, examples=_TRACE, short_help="Replay a recorded workload through prefix caches.")
@click.argument("file", type=click.Path(path_type=Path))
@with_options(*CACHES, *REPLAY, *BENCH_ENGINE, *REPLAY_KV, *BLOCKS, *REST)
@click.pass_context
def trace(ctx: click.Context, /, *, file: Path, **given: Any) -> int:
    """Replay a recorded or generated workload through prefix caches of growing size, and print the hit rate
    of each eviction policy. No model is needed. FILE has a line of JSON for each request. Its hash_ids are
    read: the chained hashes of the request's blocks. FILE may also name a generated workload: zipf, scans,
    loops, bursts, sessions, drift, mixture, phases, arc, lirs, pairs, agents. `second-use` admits a block
    that is seen twice, and remembers all it ever saw. `adaptive` is the engine's policy, `prospect` the same
    without mixing. `clairvoyant` knows the future: no policy can do better.

    With a model, the engine serves the requests. Each hash is a block of tokens, so prompts begin alike where
    they did in FILE. The report has the hits on the device, on the host and on disk, the bytes that moved for
    them, and the time of the same requests with nothing kept beyond the device. KV goes to a directory in
    --kv-directory that is deleted afterwards.
    """
    of_caches = "rooms", "block_bytes", "policies", "part", "cost", "seed"
    caches = {name: given.pop(name) for name in of_caches}
    served = given["model"] is not None or given["shape"] is not None
    shared = "model", "shape", "json", "out"
    for name in caches if served else given:
        if name not in shared and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(one for one in ctx.command.params if one.name == name).opts[0]
            raise click.UsageError(
                f"{option} goes {'without' if served else 'with'} a model; "
                f"{'leave it' if served else 'give --model or --shape'}"
            )
    if served:
        return _replay(file, **given)

    to = _Output.of(given)
    from penstock.bench.traces.simulation import CacheBench, TracePart, measure

    caches |= {"block_bytes": parse_size(caches["block_bytes"]), "part": TracePart(caches["part"])}
    to.write(measure(CacheBench(file, capacities=caches.pop("rooms"), **caches), to.say))
    return 0


def _replay(
    file: Path,
    *,
    requests: int,
    block_tokens: int | None,
    output: int | None,
    speed: float | None,
    compare: bool,
    check_output: bool,
    keep: bool,
    **given: Any,
) -> int:
    if check_output and not compare:
        raise click.UsageError("--check-output needs a run to compare with; leave --no-compare")
    given["max_sequences"] = given["max_sequences"] or min(AT_ONCE, given["max_step_tokens"] or AT_ONCE)
    target, to = _prepare(given)
    from penstock.bench.speed.recorded import ReplayScale
    from penstock.bench.speed.replay import ReplayBench, replay

    scale = ReplayScale(file, block_tokens, output, speed)
    report = replay(ReplayBench(target, scale, requests, compare, keep), to.say)
    to.write(report)
    if check_output and report.equal_outputs is None:
        raise ConfigError(
            "--check-output compares answers with and without KV kept below the device, but none is kept "
            "there; raise --host-kv-memory"
        )
    return int(check_output and report.equal_outputs != report.requests)
