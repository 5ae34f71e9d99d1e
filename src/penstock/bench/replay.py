"""A recorded workload through the real engine: what is found on which tier, what moves for it, and how soon
first tokens come.

Of a trace (see bench.trace) each hash becomes a block of tokens, always the same and unlike any other's, so
prompts begin alike where they did when the trace was recorded. A block of the trace may be of fewer tokens
here, and outputs are shorter by as much.
"""

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from random import Random
from typing import Self

import numpy as np

from penstock.arch import bounds
from penstock.arch.layout import group_layouts, kv_layout
from penstock.base.config import Config
from penstock.base.errors import ConfigError, RequestError
from penstock.base.meter import Direction
from penstock.base.units import format_rate, format_size
from penstock.bench import measure
from penstock.bench.machine import Machine, machine
from penstock.bench.run import disk_of, open_model
from penstock.bench.trace import Recorded, requests
from penstock.engine.boot import Booted, boot
from penstock.engine.placing import Override, Say
from penstock.engine.settling import choose_dtype
from penstock.kv.store.diskpool import record_bytes
from penstock.memory.device import choose_device, device_name, give_back
from penstock.sched.rules import Limits
from penstock.sched.scheduler import Scheduler
from penstock.step.params import Sampling
from penstock.step.plan import RequestId
from penstock.weights.checkpoint.reader import Checkpoint

TRACE_BLOCK = 512
"""Tokens of a block when the trace was recorded."""
_GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, frozenset(), 0, None, None)
_LANDING = 5.0
"""Seconds that the end of a run waits for blocks on their way."""
_WAYS = {
    "up": "host to device",
    "down": "device to host",
    "inward": "disk to host",
    "outward": "host to disk",
}
"""As TierStats names them."""
_TOLD = 10
"""Times that is said how far a run has come."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to replay. `source`: a parsed config of random weights, or a model directory.

    requests: the first so many of the trace. block_tokens: for one of the trace's blocks; None is as many as
    the model has positions for, a power of two. output: tokens of each answer; None is as many as were
    recorded, in proportion. speed: how many times as fast as they were recorded requests come; None is as
    fast as they are served, config.max_sequences at once. compare: run it again with kv_store off. keep:
    start from what is in kv_directory and leave it there, instead of a directory in it that is gone
    afterwards.
    """

    path: Path
    name: str
    source: Mapping[str, object] | Path
    config: Config
    requests: int
    block_tokens: int | None = None
    output: int | None = None
    speed: float | None = None
    compare: bool = True
    keep: bool = False
    scratch: tuple[Path, int] | None = None
    """See bench.run.Job."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds."""

    p50: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        ranked = sorted(seconds)
        return cls(*(1e3 * ranked[ceil(part * len(ranked)) - 1] for part in (0.5, 0.95, 0.99, 1)))


@dataclass(frozen=True, slots=True)
class Found:
    """Prompt tokens whose KV was found on a tier, and their share of all prompt tokens."""

    tokens: int
    share: float


@dataclass(frozen=True, slots=True)
class Way:
    """What went one way between two tiers. `rate`: bytes/s while anything was under way. `lost`: blocks that
    did not get there."""

    bytes: int
    seconds: float
    rate: float
    lost: int


@dataclass(frozen=True, slots=True)
class Run:
    """One replay. `seconds`: from the first request to the last token; what moved and was given up also in
    the seconds after that."""

    kv_store: str
    boot_seconds: float
    seconds: float
    kv_blocks: int
    """On the device."""
    host_blocks: int
    records_before: int
    """On disk, when it began."""
    computed_tokens: int
    preemptions: int
    found: Mapping[str, Found]
    """By tier."""
    ways: Mapping[str, Way]
    """As TierStats names them; empty without host blocks."""
    given_up: Mapping[str, int]
    """Blocks that made room for others, by tier."""
    recomputed: int
    late: int
    """See TierStats."""
    ttft_ms: Percentiles
    """From when a request came."""
    prompt_tokens_per_second: float
    """Found ones too."""
    output_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Report:
    """`settings`: those that were asked for. `without`: the same with kv_store off, and in how many answers
    it said the same."""

    bench: str
    trace: str
    model: str
    weights: str
    parameters: int
    dtype: str
    device: str
    settings: Mapping[str, object]
    requests: int
    block_tokens: int
    """For a block of `trace_block` tokens of the trace."""
    trace_block: int
    block_size: int
    prompt_tokens: int
    known_tokens: int
    """Of prompts that begin as an earlier one did: what could be found at most."""
    output_tokens: int
    longest: int
    """Tokens of the longest request, prompt and output."""
    speed: float | None
    max_sequences: int
    step_tokens: int
    kept: bool
    run: Run
    without: Run | None
    equal_outputs: int | None
    machine: Machine

    def line(self) -> str:
        """Everything, as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        whole = self.block_tokens % self.block_size == 0
        cut = (
            ""
            if whole
            else f", which the engine's of {self.block_size} do not divide: less is found than could be"
        )
        pace = (
            "as fast as they are served"
            if self.speed is None
            else f"{self.speed:g} times as fast as they were recorded"
        )
        head = (
            f"{self.model}: {self.parameters / 1e6:,.4g}M parameters, {self.dtype}, {self.weights} weights, "
            f"{self.device}",
            f"{self.trace}: {self.requests:,} requests of up to {self.longest:,} tokens, "
            f"{self.prompt_tokens:,} of prompts and "
            f"{self.output_tokens:,} of output in all; {pace}, at most {self.max_sequences} at once",
            f"a block of {self.trace_block} tokens in the trace is {self.block_tokens} here{cut}; "
            f"{self.known_tokens / self.prompt_tokens:.1%} of prompts are beginnings of earlier ones",
        )
        runs = [self.run] if self.without is None else [self.run, self.without]
        columns = [_cells(run) for run in runs]
        table = [("", *(f"kv_store {run.kv_store}" for run in runs))]
        table += [(label, *(column[label] for column in columns)) for label in columns[0]]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
            for cells in table
        ]
        if self.equal_outputs is not None:
            lines.append(f"{self.equal_outputs:,} of {self.requests:,} answers are the same in both")
        return "\n".join([*head, *(f"  {line}" for line in lines)])


def replay(job: Job, say: Say = lambda _: None) -> Report:
    """Serve the trace. `say` is told what the engine decided, and how far it has come. Raises
    PenstockErrors."""
    recorded = [request for request in requests(job.path) if request.keys][: job.requests]
    with ExitStack() as opened:
        model = open_model(job.source, job.name, job.config)
        opened.enter_context(closing(model) if isinstance(model, Checkpoint) else nullcontext())
        spec, device = model.spec, choose_device(job.config.device)
        work = Workload.of(job, recorded, job.config.max_length or spec.max_length, spec.vocab_size)
        config = replace(job.config, max_length=work.longest)
        if config.disk_kv_memory is not None and not job.keep:
            config = replace(
                config, kv_directory=opened.enter_context(_fresh(config.kv_directory.expanduser()))
            )
        dtype = choose_dtype(config, model, device)
        layouts = group_layouts(spec, model.names, dtype)

        def once(config: Config) -> _Result:
            with disk_of(job.scratch, model, layouts, dtype) as disk:
                booted = boot(config, model, say=say, override=Override(disk=disk))
            with closing(booted.engine):
                return _run(job, config, booted, work, say)

        found, other = once(config), None
        give_back(device)
        if job.compare and found.without is not None:
            other = once(found.without)
            give_back(device)
    return Report(
        bench="replay",
        trace=str(job.path),
        model=job.name,
        weights="checkpoint" if isinstance(model, Checkpoint) else "random",
        parameters=bounds.parameters(layouts),
        dtype=dtype,
        device=device_name(device),
        settings=job.config.changed(),
        requests=len(work.asks),
        block_tokens=work.block_tokens,
        trace_block=TRACE_BLOCK,
        block_size=found.limits.block_size,
        prompt_tokens=work.prompt_tokens,
        known_tokens=work.known_tokens,
        output_tokens=sum(ask.output for ask in work.asks),
        longest=work.longest,
        speed=job.speed,
        max_sequences=found.limits.max_sequences,
        step_tokens=found.limits.max_step_tokens,
        kept=job.keep,
        run=found.run,
        without=other.run if other else None,
        equal_outputs=sum(map(list.__eq__, found.outputs, other.outputs)) if other else None,
        machine=machine(),
    )


# ---- from hashes to prompts


@dataclass(frozen=True, slots=True)
class Ask:
    """Tokens of prompt and output. `at`: seconds after the first request."""

    keys: Sequence[int]
    prompt: int
    output: int
    at: float

    @classmethod
    def of(cls, request: Recorded, block: int, output: int | None, start: float) -> Self:
        """Scaled to so many tokens for a block of the trace, a part of one rounded up."""
        blocks = len(request.keys)
        length = blocks * TRACE_BLOCK if request.input_length is None else request.input_length
        last = length - (blocks - 1) * TRACE_BLOCK
        answered = output or ceil((request.output_length or 1) * block / TRACE_BLOCK)
        return cls(
            request.keys,
            (blocks - 1) * block + ceil(last * block / TRACE_BLOCK),
            answered,
            ((request.timestamp or 0.0) - start) / 1e3,
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Of which prompts are made when they are needed, since all at once can be more than memory holds."""

    asks: Sequence[Ask]
    block_tokens: int
    vocab: int
    ordinals: Mapping[int, int]
    """Of a hash, in order of first use."""
    digits: int
    """Tokens of a block that tell it from all others: its ordinal to the base of the vocabulary."""

    @classmethod
    def of(cls, job: Job, recorded: Sequence[Recorded], longest: int, vocab: int) -> Self:
        """Raises ConfigError where the trace lacks what is needed, RequestError where a request is longer
        than `longest`."""
        for number, request in enumerate(recorded, 1):
            _complete(job, request, number)
        start, sizes = (
            recorded[0].timestamp or 0.0,
            [2**power for power in reversed(range(TRACE_BLOCK.bit_length()))],
        )
        for block in [job.block_tokens] if job.block_tokens else sizes:
            asks = [Ask.of(request, block, job.output, start) for request in recorded]
            needed = max(ask.prompt + ask.output for ask in asks)
            if needed <= longest:
                break
        else:
            raise RequestError(
                f"with {block} tokens for a block of the trace the longest of {len(asks):,} requests has "
                f"{needed:,} tokens of prompt and "
                f"output, but {job.name} has {longest:,} positions; take fewer requests, shorter outputs, "
                "or fewer tokens a block"
            )
        ordinals = {
            key: number for number, key in enumerate(dict.fromkeys(key for ask in asks for key in ask.keys))
        }
        digits = 1
        while vocab**digits < len(ordinals):
            digits += 1
        if digits > block:
            raise ConfigError(
                f"{len(ordinals):,} blocks cannot all differ with {block} tokens of a vocabulary of "
                f"{vocab:,} each; take more tokens a "
                f"block, or fewer requests"
            )
        return cls(asks, block, vocab, ordinals, digits)

    @property
    def longest(self) -> int:
        return max(ask.prompt + ask.output for ask in self.asks)

    @property
    def prompt_tokens(self) -> int:
        return sum(ask.prompt for ask in self.asks)

    @property
    def known_tokens(self) -> int:
        seen, known = set[int](), 0
        for ask in self.asks:
            depth = next((depth for depth, key in enumerate(ask.keys) if key not in seen), len(ask.keys))
            known += min(depth * self.block_tokens, ask.prompt)
            seen.update(ask.keys)
        return known

    def prompt(self, ask: Ask) -> list[int]:
        return [token for key in ask.keys for token in self._block(key)][: ask.prompt]

    def _block(self, key: int) -> list[int]:
        number = self.ordinals[key]
        drawn = np.frombuffer(Random(number).randbytes(4 * self.block_tokens), "<u4")
        tokens: list[int] = (drawn % self.vocab).tolist()
        for place in range(self.digits):
            number, tokens[place] = divmod(number, self.vocab)
        return tokens


def _complete(job: Job, request: Recorded, number: int) -> None:
    where, blocks, length = f"request {number} of {job.path}", len(request.keys), request.input_length
    if length is not None and not 0 <= blocks * TRACE_BLOCK - length < TRACE_BLOCK:
        raise ConfigError(
            f"{where} has {length:,} tokens of prompt in {blocks:,} blocks, which are not blocks of "
            f"{TRACE_BLOCK}"
        )
    if job.output is None and request.output_length is None:
        raise ConfigError(f"{where} has no output_length; say how many tokens to answer with")
    if job.speed is not None and request.timestamp is None:
        raise ConfigError(f"{where} has no timestamp; let requests come as fast as they are served")


# ---- running


@contextmanager
def _fresh(parent: Path) -> Iterator[Path]:
    """A directory that is gone afterwards. Raises ConfigError."""
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
    """`without`: a config with the same room for long requests on host and disk, and nothing kept there; None
    if nothing was."""

    run: Run
    outputs: list[list[int]]
    limits: Limits
    without: Config | None


@dataclass(slots=True)
class _Answer:
    """`came`, `ttft`: seconds. `cached`: tokens of the prompt that were found on any tier, on the host, and
    on disk."""

    came: float
    ttft: float = 0.0
    tokens: list[int] = field(default_factory=list)
    cached: tuple[int, int, int] = (0, 0, 0)


def _run(job: Job, config: Config, booted: Booted, work: Workload, say: Say) -> _Result:
    engine, scheduler = booted.engine, booted.engine.scheduler
    if work.longest > scheduler.longest:
        raise RequestError(
            f"the longest of {len(work.asks):,} requests has {work.longest:,} tokens of prompt and output, "
            "but KV has room for "
            f"{scheduler.longest:,}; take fewer tokens a block, fewer requests, or allow more memory"
        )
    at_first = engine.tier_stats()
    _warm(booted, work, keep=job.keep)
    before, tiers, given_up = engine.stats(), engine.tier_stats(), _given_up(scheduler)
    begin = time.perf_counter()
    answers = _serve(job, booted, work, begin, say)
    seconds = time.perf_counter() - begin
    engine.tend(_LANDING)
    after, tiers_after, given_up_after = engine.stats(), engine.tier_stats(), _given_up(scheduler)
    everywhere, host, disk = (
        sum(counts) for counts in zip(*(answer.cached for answer in answers), strict=True)
    )
    found = {"device": everywhere - host - disk, "host": host, "disk": disk}
    outputs = [answer.tokens for answer in answers]
    run = Run(
        kv_store=scheduler.tiers.store,
        boot_seconds=booted.seconds,
        seconds=seconds,
        kv_blocks=booted.budget.blocks,
        host_blocks=scheduler.host.near,
        records_before=at_first.cached_disk if at_first else 0,
        computed_tokens=after.computed_tokens - before.computed_tokens,
        preemptions=after.preemptions - before.preemptions,
        found={tier: Found(tokens, tokens / work.prompt_tokens) for tier, tokens in found.items()},
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
    """The first steps also pay for what is set up once. keep: leave what is on disk there, and with it what
    these steps leave."""
    scheduler = booted.engine.scheduler
    context = min(2 * booted.limits.max_step_tokens, scheduler.longest - measure.context_room(0, 1))
    if context > 0:
        measure.context(booted, context, 1, Random(0))
        booted.engine.tend(_LANDING)
    if not keep:
        scheduler.forget()
        booted.engine.tend()


def _serve(job: Job, booted: Booted, work: Workload, begin: float, say: Say) -> list[_Answer]:
    engine, asks, speed = booted.engine, work.asks, job.speed
    answers, live, told = list[_Answer](), dict[RequestId, _Answer](), 0

    def is_due(ask: Ask) -> bool:
        return (
            len(live) < booted.limits.max_sequences
            if speed is None
            else begin + ask.at / speed <= time.perf_counter()
        )

    while live or len(answers) < len(asks):
        while len(answers) < len(asks) and is_due(ask := asks[len(answers)]):
            prompt = work.prompt(ask)
            answers.append(_Answer(time.perf_counter() if speed is None else begin + ask.at / speed))
            live[engine.submit(prompt, _GREEDY, ask.output)] = answers[-1]
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
        if ended * _TOLD // len(asks) > told:
            told = ended * _TOLD // len(asks)
            say(
                f"kv_store {engine.scheduler.tiers.store}: {ended:,} of {len(asks):,} in "
                f"{time.perf_counter() - begin:.3g} s"
            )
    return answers


def _given_up(scheduler: Scheduler) -> dict[str, int]:
    disk = scheduler.tiers.disk
    return {
        "device": scheduler.ledger.given_up,
        "host": scheduler.host.given_up,
        "disk": disk.given_up if disk is not None else 0,
    }


def _way(before: Direction, after: Direction) -> Way:
    moved = Direction(after.bytes - before.bytes, after.seconds - before.seconds, after.lost - before.lost)
    return Way(moved.bytes, moved.seconds, moved.rate, moved.lost)


def _without(config: Config, booted: Booted) -> Config | None:
    host = booted.engine.scheduler.host
    if booted.engine.scheduler.tiers.store == "off":
        return None
    layout = kv_layout(booted.spec, booted.dtype, config.block_size)
    on_disk = (host.blocks - host.near) * layout.layers * record_bytes(layout)
    return replace(
        config, kv_store="off", host_kv_memory=host.near * layout.block_bytes, disk_kv_memory=on_disk or None
    )


def _cells(run: Run) -> dict[str, str]:
    everywhere, ttft = sum(found.share for found in run.found.values()), run.ttft_ms
    rows = {"found of prompts": f"{everywhere:.1%}"}
    rows |= {
        f"  on {tier}": f"{found.share:.1%}, {found.tokens:,} tokens" for tier, found in run.found.items()
    }
    for name, label in _WAYS.items():
        if name in run.ways and (way := run.ways[name]).bytes:
            lost = f", {way.lost:,} blocks lost" if way.lost else ""
            rows[label] = f"{format_size(way.bytes)} at {format_rate(way.rate)}{lost}"
        else:
            rows[label] = "-"
    given_up = ", ".join(f"{count:,} on {tier}" for tier, count in run.given_up.items())
    return rows | {
        "blocks given up": given_up,
        "blocks there, computed": f"{run.recomputed:,} as that is faster, {run.late:,} late",
        "TTFT p50, p95, p99": f"{ttft.p50:,.1f}, {ttft.p95:,.1f}, {ttft.p99:,.1f} ms",
        "tokens": f"{run.prompt_tokens_per_second:,.1f}/s of prompts, {run.output_tokens_per_second:,.1f}/s "
        "of output",
    }
