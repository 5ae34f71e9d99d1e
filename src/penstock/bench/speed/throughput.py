"""Times many requests of random lengths, all there from the start: tokens a second, beside the least time
that the machine allows."""

import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from penstock.arch import bounds
from penstock.arch.parts import local_spec
from penstock.arch.shards import Shard
from penstock.base.errors import RequestError
from penstock.base.report import JsonLine
from penstock.base.units import counted, format_duration, format_rate
from penstock.bench.machine import MachineInfo, machine
from penstock.bench.report import Subject
from penstock.bench.speed.baseline import Baseline, transformers
from penstock.bench.speed.bound import ServingBound
from penstock.bench.speed.measure import check_sound, sampling
from penstock.bench.speed.setup import OpenModel, Target, opened
from penstock.bench.times import Timings
from penstock.engine.boot import Booted
from penstock.engine.placing import Say
from penstock.memory.device import give_back
from penstock.memory.probe import memory_read
from penstock.step.plan import RequestId

_WARM = 8
"""Requests of the shortest kind that are served first and not counted."""


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Draws the lengths of requests evenly, by `seed`.

    prompt, output: the least and the most tokens. Every request says as many as were drawn, whatever they
        are.
    """

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    seed: int = 0

    def draw(self, vocab: int) -> "list[OfflineRequest]":
        """Return the requests, the same for the same lengths and vocabulary."""
        rng = random.Random(self.seed)
        lengths = [(rng.randint(*self.prompt), rng.randint(*self.output)) for _ in range(self.requests)]
        return [
            OfflineRequest([rng.randrange(vocab) for _ in range(prompt)], output)
            for prompt, output in lengths
        ]


@dataclass(frozen=True, slots=True)
class ThroughputBench:
    """Holds the settings of a benchmark of many requests, which `serve` measures.

    temperature: 0 takes the likeliest tokens.
    repeat: how often all requests are served.
    baseline: measure transformers too.
    """

    target: Target
    lengths: RandomLengths
    temperature: float = 0.0
    repeat: int = 1
    baseline: bool = False


@dataclass(frozen=True, slots=True)
class ThroughputReport(JsonLine):
    """Holds the times of many requests, and prints them.

    ms: from the first step to the last token of all.
    first_ms: from the first step to each request's first token; all requests of all rounds.
    of_bound: the bound's seconds over the median.
    baseline: seconds of transformers, in padded batches one after another.
    """

    subject: Subject
    requests: int
    prompt_tokens: int
    output_tokens: int
    temperature: float
    max_sequences: int
    step_tokens: int
    boot_seconds: float
    steps: int
    preemptions: int
    ms: Timings
    first_ms: Timings
    output_tokens_per_second: float
    bound: ServingBound
    of_bound: float
    baseline: float | None
    machine: MachineInfo

    def __str__(self) -> str:
        seconds, bound = self.ms.median / 1e3, self.bound
        rows = [
            str(self.subject),
            f"{counted(self.requests, 'request')} at once: {self.prompt_tokens:,} tokens of prompts, "
            f"{self.output_tokens:,} of output, at most {self.max_sequences} run together",
            f"  penstock             {format_duration(seconds)}, "
            f"{self.output_tokens_per_second:,.0f} output tokens/s, "
            f"{self.steps:,} steps; first tokens after {format_duration(self.first_ms.median / 1e3)}",
            f"  bound                {format_duration(bound.seconds)}: "
            f"{format_rate(bound.bytes_per_second)}, "
            f"{bound.operations_per_second / 1e12:.3g} TFLOP/s",
            f"  of the bound         {self.of_bound:.1%}",
        ]
        if self.baseline is not None:
            rows.append(
                f"  transformers         {format_duration(self.baseline)}, "
                f"{self.baseline / seconds:.3g} times as long"
            )
        return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """Holds a prompt, and how many tokens are made after it."""

    prompt: list[int]
    output: int


def serve(bench: ThroughputBench, say: Say = lambda _: None) -> ThroughputReport:
    """Measure. `say` is called with what the engine decides. Raises PenstockErrors."""
    if bench.baseline:
        transformers()  # What is missing should be known before minutes have passed.
    with opened(bench.target) as model:
        spec, config, lengths = model.spec, bench.target.config, bench.lengths
        longest = lengths.prompt[1] + lengths.output[1]
        if longest > spec.max_length:
            raise RequestError(
                f"requests of up to {longest:,} tokens were asked for, but {bench.target.name} has "
                f"{spec.max_length:,} positions; lower --input or --output"
            )
        rates = memory_read(model.device), model.matmul_rate()
        longest = min(spec.max_length, longest + config.block_size)
        booted = model.boot(replace(config, max_length=longest, prefix_cache=False), say)
    work = lengths.draw(spec.vocab_size)
    with closing(booted.engine):
        short = [OfflineRequest(one.prompt[: lengths.prompt[0]], 4) for one in work[:_WARM]]
        _round(booted, short, bench.temperature)
        before = booted.engine.stats()
        rounds = [_round(booted, work, bench.temperature) for _ in range(bench.repeat)]
        stats = booted.engine.stats()
    limits, boot_seconds = booted.limits, booted.seconds
    del booted
    give_back(model.device)
    times, tokens = Timings.of([one for one, _ in rounds]), sum(one.output for one in work)
    bound = _bound(model, work, *rates)
    return ThroughputReport(
        subject=model.subject("serve-offline"),
        requests=lengths.requests,
        prompt_tokens=sum(len(one.prompt) for one in work),
        output_tokens=tokens,
        temperature=bench.temperature,
        max_sequences=limits.max_sequences,
        step_tokens=limits.max_step_tokens,
        boot_seconds=boot_seconds,
        steps=(stats.steps - before.steps) // bench.repeat,
        preemptions=stats.preemptions - before.preemptions,
        ms=times,
        first_ms=Timings.of([first for _, firsts in rounds for first in firsts]),
        output_tokens_per_second=1e3 * tokens / times.median,
        bound=bound,
        of_bound=1e3 * bound.seconds / times.median,
        baseline=_compare(model, work) if bench.baseline else None,
        machine=machine(),
    )


def _round(booted: Booted, work: Sequence[OfflineRequest], temperature: float) -> tuple[float, list[float]]:
    """Return the seconds until all are served, and until each has its first token."""
    engine, firsts = booted.engine, dict[RequestId, float]()
    begin = time.perf_counter()
    for number, request in enumerate(work):
        engine.submit(request.prompt, sampling(temperature, number), request.output)
    while engine.busy:
        events = engine.step()
        now = time.perf_counter() - begin
        for event in events:
            firsts.setdefault(event.request, now)
            check_sound(event)
    return time.perf_counter() - begin, list(firsts.values())


def _bound(
    model: OpenModel, work: Sequence[OfflineRequest], bytes_rate: float, operations: float
) -> ServingBound:
    """Return the least work of all requests, for each rank: it reads and computes its part."""
    spec, shard = model.spec, Shard(0, model.target.config.tensor_parallel)
    part, steps = local_spec(spec, shard), max(one.output for one in work)
    prompts = [len(one.prompt) for one in work]
    return ServingBound(
        weight_bytes=steps * bounds.weight_bytes_read(spec, model.layouts, 1) / shard.ranks,
        kv_bytes=sum(
            bounds.kv_bytes_read(part, model.dtype, len(one.prompt) + made)
            for one in work
            for made in range(1, one.output)
        ),
        operations=bounds.prefill_operations(spec, model.layouts, prompts) / shard.ranks,
        bytes_per_second=bytes_rate,
        operations_per_second=operations,
    )


def _compare(model: OpenModel, work: Sequence[OfflineRequest]) -> float:
    other = Baseline(model.target.source, random=model.random, dtype=model.dtype, device=model.device)
    return other.serve([(one.prompt, one.output) for one in work])
