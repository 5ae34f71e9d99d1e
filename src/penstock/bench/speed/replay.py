"""Serves a recorded workload by the real engine: what is found on which tier, what moves for it, and how soon
first tokens come."""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from random import Random
from typing import Self

from penstock.arch.layout import kv_layout
from penstock.base.config import Config
from penstock.base.errors import ConfigError, RequestError
from penstock.base.meter import Direction
from penstock.base.report import JsonLine
from penstock.base.units import counted, format_rate, format_size
from penstock.bench.machine import MachineInfo, machine
from penstock.bench.report import Subject, table
from penstock.bench.speed import measure
from penstock.bench.speed.recorded import TRACE_BLOCK, ReplayRequest, ReplayScale, Workload
from penstock.bench.speed.setup import Target, opened
from penstock.bench.traces.simulation import requests
from penstock.engine.boot import Booted
from penstock.engine.placing import Say
from penstock.kv.movement.sizes import record_bytes
from penstock.memory.device import give_back
from penstock.sched.rules import SchedulerLimits
from penstock.sched.scheduler import Scheduler
from penstock.step.plan import RequestId

_LANDING = 5.0
"""Seconds that the end of a run waits for blocks on their way."""
_WAYS = {
    "up": "host to device",
    "down": "device to host",
    "inward": "disk to host",
    "outward": "host to disk",
}
"""Titles by the names that TierStats gives."""
_PROGRESS_LINES = 10
"""Lines that a run prints of its progress."""


@dataclass(frozen=True, slots=True)
class ReplayBench:
    """Holds the settings of a replay, which `replay` measures.

    scale: the trace, and what becomes of it.
    requests: how many of the trace, from its first on.
    compare: run it again with kv_store off.
    keep: start from what is in kv_directory and leave it there. Otherwise KV goes to a directory in it that
        is deleted afterwards.
    """

    target: Target
    scale: ReplayScale
    requests: int
    compare: bool = True
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Holds percentiles of times, in milliseconds."""

    p50: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Return the percentiles of `seconds`."""
        ranked = sorted(seconds)
        return cls(*(1e3 * ranked[ceil(part * len(ranked)) - 1] for part in (0.5, 0.95, 0.99, 1)))


@dataclass(frozen=True, slots=True)
class TierHits:
    """Counts the hits of a tier: the prompt tokens that it had KV of, and their share of all prompt
    tokens."""

    tokens: int
    share: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts the bytes that moved from one tier to another. `rate` is in bytes/s while anything was under
    way. `lost` counts blocks that did not arrive."""

    bytes: int
    seconds: float
    rate: float
    lost: int


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """Holds the result of one replay.

    seconds: from the first request to the last token. Moves and evictions are counted in the seconds after
        that too.
    kv_blocks: on the device. records_before: on disk, when it began.
    found: hits by tier.
    ways: traffic by the name that TierStats gives it; empty without host blocks.
    given_up: blocks that were evicted, by tier.
    recomputed, late: see TierStats.
    ttft_ms: from when a request came to its first token.
    prompt_tokens_per_second: tokens that were found count too.
    """

    kv_store: str
    boot_seconds: float
    seconds: float
    kv_blocks: int
    host_blocks: int
    records_before: int
    computed_tokens: int
    preemptions: int
    found: Mapping[str, TierHits]
    ways: Mapping[str, Traffic]
    given_up: Mapping[str, int]
    recomputed: int
    late: int
    ttft_ms: Percentiles
    prompt_tokens_per_second: float
    output_tokens_per_second: float

    def cells(self) -> dict[str, str]:
        """Return the column of the printed table: a text by the title of each row."""
        everywhere, ttft = sum(found.share for found in self.found.values()), self.ttft_ms
        rows = {"found of prompts": f"{everywhere:.1%}"}
        for tier, found in self.found.items():
            rows[f"  on {tier}"] = f"{found.share:.1%}, {found.tokens:,} tokens"
        for name, label in _WAYS.items():
            rows[label] = "-"
            if name in self.ways and (way := self.ways[name]).bytes:
                lost = f", {way.lost:,} blocks lost" if way.lost else ""
                rows[label] = f"{format_size(way.bytes)} at {format_rate(way.rate)}{lost}"
        return rows | {
            "blocks given up": ", ".join(f"{count:,} on {tier}" for tier, count in self.given_up.items()),
            "blocks there, computed": f"{self.recomputed:,} as that is faster, {self.late:,} late",
            "TTFT p50, p95, p99": f"{ttft.p50:,.1f}, {ttft.p95:,.1f}, {ttft.p99:,.1f} ms",
            "tokens": f"{self.prompt_tokens_per_second:,.1f}/s of prompts, "
            f"{self.output_tokens_per_second:,.1f}/s of output",
        }


@dataclass(frozen=True, slots=True)
class ReplayReport(JsonLine):
    """Holds the runs of a replay, and prints them.

    settings: those that were asked for.
    block_tokens: for a block of `trace_block` tokens of the trace.
    known_tokens: of prompts that begin as an earlier one did. A cache can have so many at most.
    longest: tokens of the longest request, prompt and output.
    without: the same with kv_store off. equal_outputs: in how many answers it said the same.
    """

    subject: Subject
    trace: str
    settings: Mapping[str, object]
    requests: int
    block_tokens: int
    trace_block: int
    block_size: int
    prompt_tokens: int
    known_tokens: int
    output_tokens: int
    longest: int
    speed: float | None
    max_sequences: int
    step_tokens: int
    kept: bool
    run: ReplayRun
    without: ReplayRun | None
    equal_outputs: int | None
    machine: MachineInfo

    def __str__(self) -> str:
        cut, pace = "", "as fast as they are served"
        if self.block_tokens % self.block_size:
            cut = f", which the engine's of {self.block_size} do not divide: less is found than could be"
        if self.speed is not None:
            pace = f"{self.speed:g} times as fast as they were recorded"
        runs = [self.run] if self.without is None else [self.run, self.without]
        columns = [run.cells() for run in runs]
        lines = [
            str(self.subject),
            f"{self.trace}: {counted(self.requests, 'request')} of up to {self.longest:,} tokens, "
            f"{self.prompt_tokens:,} of prompts and {self.output_tokens:,} of output in all; {pace}, at most "
            f"{self.max_sequences} at once",
            f"a block of {self.trace_block} tokens in the trace is {self.block_tokens} here{cut}; "
            f"{self.known_tokens / self.prompt_tokens:.1%} of prompts are beginnings of earlier ones",
            *table(
                [
                    ("", *(f"kv_store {run.kv_store}" for run in runs)),
                    *((label, *(column[label] for column in columns)) for label in columns[0]),
                ],
                left=True,
            ),
        ]
        if self.equal_outputs is not None:
            lines.append(f"  {self.equal_outputs:,} of {self.requests:,} answers are the same in both")
        return "\n".join(lines)


def replay(bench: ReplayBench, say: Say = lambda _: None) -> ReplayReport:
    """Serve the trace. `say` is called with what the engine decides, and with how far it has come. Raises
    PenstockErrors."""
    scale, asked = bench.scale, bench.target.config
    recorded = [request for request in requests(scale.path) if request.keys][: bench.requests]
    with ExitStack() as stack:
        model = stack.enter_context(opened(bench.target))
        spec = model.spec
        work = Workload.of(
            scale, recorded, asked.max_length or spec.max_length, spec.vocab_size, bench.target.name
        )
        config = replace(asked, max_length=work.longest)
        if config.disk_kv_memory is not None and not bench.keep:
            directory = stack.enter_context(_fresh(config.kv_directory.expanduser()))
            config = replace(config, kv_directory=directory)

        def once(config: Config) -> _Result:
            booted = model.boot(config, say)
            with closing(booted.engine):
                return _run(bench, config, booted, work, say)

        found, other = once(config), None
        if bench.compare and found.without is not None:
            give_back(model.device)
            other = once(found.without)
        give_back(model.device)
    return ReplayReport(
        subject=model.subject("replay"),
        trace=str(scale.path),
        settings=asked.changed(),
        requests=len(work.requests),
        block_tokens=work.block_tokens,
        trace_block=TRACE_BLOCK,
        block_size=found.limits.block_size,
        prompt_tokens=work.prompt_tokens,
        known_tokens=work.known_tokens,
        output_tokens=sum(request.output for request in work.requests),
        longest=work.longest,
        speed=scale.speed,
        max_sequences=found.limits.max_sequences,
        step_tokens=found.limits.max_step_tokens,
        kept=bench.keep,
        run=found.run,
        without=other.run if other else None,
        equal_outputs=sum(map(list.__eq__, found.outputs, other.outputs)) if other else None,
        machine=machine(),
    )


# ---- running


@contextmanager
def _fresh(parent: Path) -> Iterator[Path]:
    """Yield a directory that is deleted afterwards. Raises ConfigError."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="replay-", dir=parent)
    except OSError as error:
        raise ConfigError(
            f"cannot write into {parent}: {error.strerror}; name another kv_directory"
        ) from error
    with made as name:
        yield Path(name)


@dataclass(frozen=True, slots=True)
class _Result:
    """Holds one replay and the tokens of its answers.

    without: a config with the same room for long requests on host and disk, which keeps nothing there; None
        if nothing was kept.
    """

    run: ReplayRun
    outputs: list[list[int]]
    limits: SchedulerLimits
    without: Config | None


@dataclass(slots=True)
class _Answer:
    """Holds an answer under way. came, ttft: in seconds. cached: tokens of the prompt that were found on any
    tier, on the host, and on disk."""

    came: float
    ttft: float = 0.0
    tokens: list[int] = field(default_factory=list)
    cached: tuple[int, int, int] = (0, 0, 0)


def _run(bench: ReplayBench, config: Config, booted: Booted, work: Workload, say: Say) -> _Result:
    engine, scheduler = booted.engine, booted.engine.scheduler
    if work.longest > scheduler.longest:
        raise RequestError(
            f"the longest of {len(work.requests):,} requests has {work.longest:,} tokens of prompt and "
            f"output, but KV has room for {scheduler.longest:,}; lower --block-tokens or --requests, or "
            "raise --host-kv-memory"
        )
    at_first = engine.tier_stats()
    _warm(booted, work, keep=bench.keep)
    before, tiers, given_up = engine.stats(), engine.tier_stats(), _given_up(scheduler)
    begin = time.perf_counter()
    answers = _serve(bench.scale.speed, booted, work, begin, say)
    seconds = time.perf_counter() - begin
    engine.tend(_LANDING)
    after, tiers_after, given_up_after = engine.stats(), engine.tier_stats(), _given_up(scheduler)
    everywhere, host, disk = (
        sum(counts) for counts in zip(*(answer.cached for answer in answers), strict=True)
    )
    found = {"device": everywhere - host - disk, "host": host, "disk": disk}
    outputs = [answer.tokens for answer in answers]
    run = ReplayRun(
        kv_store=scheduler.tiers.store,
        boot_seconds=booted.seconds,
        seconds=seconds,
        kv_blocks=booted.budget.blocks,
        host_blocks=scheduler.host.near,
        records_before=at_first.cached_disk if at_first else 0,
        computed_tokens=after.computed_tokens - before.computed_tokens,
        preemptions=after.preemptions - before.preemptions,
        found={tier: TierHits(tokens, tokens / work.prompt_tokens) for tier, tokens in found.items()},
        ways={name: _way(getattr(tiers, name), getattr(tiers_after, name)) for name in _WAYS}
        if tiers
        else {},
        given_up={tier: count - given_up[tier] for tier, count in given_up_after.items()},
        recomputed=tiers_after.recomputed - tiers.recomputed if tiers and tiers_after else 0,
        late=tiers_after.late - tiers.late if tiers and tiers_after else 0,
        ttft_ms=Percentiles.of([answer.ttft for answer in answers]),
        prompt_tokens_per_second=work.prompt_tokens / seconds,
        output_tokens_per_second=sum(map(len, outputs)) / seconds,
    )
    return _Result(run, outputs, booted.limits, _without(config, booted))


def _warm(booted: Booted, work: Workload, *, keep: bool) -> None:
    """Run the first steps, which also pay for what is set up once. `keep` leaves on disk what is there, and
    with it what these steps leave."""
    scheduler = booted.engine.scheduler
    context = min(2 * booted.limits.max_step_tokens, scheduler.longest - measure.context_room(0, 1))
    if context > 0:
        measure.context(booted, context, 1, Random(0))
        booted.engine.tend(_LANDING)
    if not keep:
        scheduler.forget()
        booted.engine.tend()


def _serve(speed: float | None, booted: Booted, work: Workload, begin: float, say: Say) -> list[_Answer]:
    engine, asks = booted.engine, work.requests
    answers, live, told = list[_Answer](), dict[RequestId, _Answer](), 0

    def is_due(ask: ReplayRequest) -> bool:
        return (
            len(live) < booted.limits.max_sequences
            if speed is None
            else begin + ask.at / speed <= time.perf_counter()
        )

    while live or len(answers) < len(asks):
        while len(answers) < len(asks) and is_due(ask := asks[len(answers)]):
            prompt = work.prompt(ask)
            answers.append(_Answer(time.perf_counter() if speed is None else begin + ask.at / speed))
            live[engine.submit(prompt, measure.sampling(), ask.output)] = answers[-1]
        if not live and speed is not None:
            due = begin + asks[len(answers)].at / speed
            engine.tend(due - time.perf_counter())
            time.sleep(max(due - time.perf_counter(), 0.0))
        for event in engine.step() if live else ():
            answer = live[event.request]
            if event.token is not None:
                if not answer.tokens:
                    answer.ttft = time.perf_counter() - answer.came
                    answer.cached = event.cached, event.cached_host, event.cached_disk
                answer.tokens.append(event.token)
            if event.finish is not None:
                del live[event.request]
        ended = len(answers) - len(live)
        if ended * _PROGRESS_LINES // len(asks) > told:
            told = ended * _PROGRESS_LINES // len(asks)
            say(
                f"kv_store {engine.scheduler.tiers.store}: {ended:,} of {len(asks):,} in "
                f"{time.perf_counter() - begin:.3g} s"
            )
    return answers


def _given_up(scheduler: Scheduler) -> dict[str, int]:
    disk = scheduler.tiers.disk
    return {
        "device": scheduler.ledger.evicted,
        "host": scheduler.host.evicted,
        "disk": disk.evicted if disk is not None else 0,
    }


def _way(before: Direction, after: Direction) -> Traffic:
    moved = Direction(after.bytes - before.bytes, after.seconds - before.seconds, after.lost - before.lost)
    return Traffic(moved.bytes, moved.seconds, moved.rate, moved.lost)


def _without(config: Config, booted: Booted) -> Config | None:
    host = booted.engine.scheduler.host
    if booted.engine.scheduler.tiers.store == "off":
        return None
    layout = kv_layout(booted.spec, booted.dtype, config.block_size)
    on_disk = (host.blocks - host.near) * layout.layers * record_bytes(layout)
    return replace(
        config, kv_store="off", host_kv_memory=host.near * layout.block_bytes, disk_kv_memory=on_disk or None
    )
