"""Many requests of random lengths at once, all there from the start: tokens a second, beside the least time
that the machine allows."""

import dataclasses
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.arch import bounds
from penstock.arch.layout import GroupLayout, group_layouts
from penstock.arch.parts import local_spec
from penstock.arch.shards import Shard
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import RequestError
from penstock.base.units import format_rate
from penstock.bench.baseline import Baseline, transformers
from penstock.bench.machine import Machine, machine
from penstock.bench.measure import check_sound
from penstock.bench.run import open_model
from penstock.bench.times import Times
from penstock.engine.boot import Booted, boot
from penstock.engine.placing import Say
from penstock.engine.settling import choose_dtype
from penstock.memory.device import choose_device, device_name, give_back
from penstock.memory.probe import matmul_rate, memory_read
from penstock.step.params import Sampling
from penstock.step.plan import RequestId
from penstock.weights.checkpoint.reader import Checkpoint

_WARM = 8
"""Requests of the shortest kind that are served first and not counted."""


@dataclass(frozen=True, slots=True)
class Job:
    """`source`: a parsed config of random weights, or a model directory. `prompt`, `output`: the least and
    the most tokens of each, drawn evenly by `seed`; every request says so many, whatever they are.
    `temperature`: 0 takes the likeliest."""

    name: str
    source: Mapping[str, object] | Path
    config: Config
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    temperature: float = 0.0
    seed: int = 0
    repeat: int = 1
    baseline: bool = False


@dataclass(frozen=True, slots=True)
class Least:
    """What must be done at least, at the rates measured just before: weights read once for every token of the
    longest answer, KV for every token that is decoded, and the arithmetic of prompts."""

    weight_bytes: float
    kv_bytes: float
    operations: float
    bytes_per_second: float
    operations_per_second: float

    @property
    def seconds(self) -> float:
        return (
            self.weight_bytes + self.kv_bytes
        ) / self.bytes_per_second + self.operations / self.operations_per_second


@dataclass(frozen=True, slots=True)
class Report:
    """`ms`: from the first step to the last token of all. `of_bound`: the least seconds' share of those.
    `first_ms`: to each request's first token, all requests of all rounds. `baseline`: the seconds of
    transformers, one request after another in padded batches."""

    bench: str
    model: str
    weights: str
    parameters: int
    dtype: str
    device: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    temperature: float
    max_sequences: int
    step_tokens: int
    boot_seconds: float
    steps: int
    preemptions: int
    ms: Times
    first_ms: Times
    output_tokens_per_second: float
    bound: Least
    of_bound: float
    baseline: float | None
    machine: Machine

    def line(self) -> str:
        """Everything, as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        seconds = self.ms.median / 1e3
        rows = [
            f"{self.model}: {self.parameters / 1e6:,.4g}M parameters, {self.dtype}, {self.weights} weights, "
            f"{self.device}",
            f"{self.requests} requests at once: {self.prompt_tokens:,} tokens of prompts, "
            f"{self.output_tokens:,} of output, at most "
            f"{self.max_sequences} run together",
            f"  penstock             {seconds:.3g} s, {self.output_tokens_per_second:,.0f} output tokens/s, "
            f"{self.steps:,} steps; "
            f"first tokens after {self.first_ms.median / 1e3:.3g} s",
            f"  bound                {self.bound.seconds:.3g} s: {format_rate(self.bound.bytes_per_second)}, "
            f"{self.bound.operations_per_second / 1e12:.3g} TFLOP/s",
            f"  of the bound         {self.of_bound:.1%}",
        ]
        if self.baseline is not None:
            rows.append(
                f"  transformers         {self.baseline:.3g} s, {self.baseline / seconds:.3g} times as long"
            )
        return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: list[int]
    output: int


def asks(job: Job, vocab: int) -> list[Ask]:
    """The requests, the same for the same job."""
    rng = random.Random(job.seed)
    lengths = [(rng.randint(*job.prompt), rng.randint(*job.output)) for _ in range(job.requests)]
    return [Ask([rng.randrange(vocab) for _ in range(prompt)], output) for prompt, output in lengths]


def serve(job: Job, say: Say = lambda _: None) -> Report:
    """Measure. `say` is told what the engine decided. Raises PenstockErrors."""
    if job.baseline:
        transformers()  # What is missing should be known before minutes have passed.
    model = open_model(job.source, job.name, job.config)
    with closing(model) if isinstance(model, Checkpoint) else nullcontext():
        spec, device = model.spec, choose_device(job.config.device)
        dtype = choose_dtype(job.config, model, device)
        layouts = group_layouts(spec, model.names, dtype)
        longest = job.prompt[1] + job.output[1]
        if longest > spec.max_length:
            raise RequestError(
                f"requests of up to {longest:,} tokens were asked for, but {job.name} has "
                f"{spec.max_length:,} positions; "
                "lower --input or --output"
            )
        bytes_rate, operations = memory_read(device), matmul_rate(device, getattr(torch, dtype))
        give_back(device)
        config = replace(
            job.config, max_length=min(spec.max_length, longest + job.config.block_size), prefix_cache=False
        )
        booted = boot(config, model, say=say)
    work = asks(job, spec.vocab_size)
    with closing(booted.engine):
        _round(booted, [Ask(ask.prompt[: job.prompt[0]], 4) for ask in work[:_WARM]], job.temperature)
        before = booted.engine.stats()
        rounds = [_round(booted, work, job.temperature) for _ in range(job.repeat)]
        stats = booted.engine.stats()
    limits, boot_seconds = booted.limits, booted.seconds
    del booted
    give_back(device)
    seconds = Times.of([one for one, _ in rounds])
    tokens = sum(ask.output for ask in work)
    least = _least(spec, Shard(0, job.config.tensor_parallel), layouts, dtype, work, bytes_rate, operations)
    random_weights = not isinstance(model, Checkpoint)
    return Report(
        bench="serve-offline",
        model=job.name,
        weights="random" if random_weights else "checkpoint",
        parameters=bounds.parameters(layouts),
        dtype=dtype,
        device=device_name(device),
        requests=job.requests,
        prompt_tokens=sum(len(ask.prompt) for ask in work),
        output_tokens=tokens,
        temperature=job.temperature,
        max_sequences=limits.max_sequences,
        step_tokens=limits.max_step_tokens,
        boot_seconds=boot_seconds,
        steps=(stats.steps - before.steps) // job.repeat,
        preemptions=stats.preemptions - before.preemptions,
        ms=seconds,
        first_ms=Times.of([first for _, firsts in rounds for first in firsts]),
        output_tokens_per_second=1e3 * tokens / seconds.median,
        bound=least,
        of_bound=1e3 * least.seconds / seconds.median,
        baseline=_compare(job, work, dtype, device, random_weights) if job.baseline else None,
        machine=machine(),
    )


def _round(booted: Booted, work: Sequence[Ask], temperature: float) -> tuple[float, list[float]]:
    """Seconds until all are served, and until each has its first token."""
    engine, firsts = booted.engine, dict[RequestId, float]()
    begin = time.perf_counter()
    for number, ask in enumerate(work):
        engine.submit(ask.prompt, _sampling(temperature, number), ask.output)
    while engine.busy:
        events = engine.step()
        now = time.perf_counter() - begin
        for event in events:
            firsts.setdefault(event.request, now)
            check_sound(event)
    return time.perf_counter() - begin, list(firsts.values())


def _sampling(temperature: float, seed: int) -> Sampling:
    return Sampling(temperature, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), seed, frozenset(), 0, None, None)


def _least(
    spec: ModelSpec,
    shard: Shard,
    layouts: Sequence[GroupLayout],
    dtype: str,
    work: Sequence[Ask],
    bytes_rate: float,
    operations: float,
) -> Least:
    """layouts: of the whole model, of which each rank reads and computes its part."""
    part = local_spec(spec, shard)
    kv = sum(
        bounds.kv_bytes_read(part, dtype, len(ask.prompt) + made)
        for ask in work
        for made in range(1, ask.output)
    )
    steps = max(ask.output for ask in work)
    return Least(
        weight_bytes=steps * bounds.weight_bytes_read(spec, layouts, 1) / shard.ranks,
        kv_bytes=kv,
        operations=bounds.prefill_operations(spec, layouts, [len(ask.prompt) for ask in work]) / shard.ranks,
        bytes_per_second=bytes_rate,
        operations_per_second=operations,
    )


def _compare(job: Job, work: Sequence[Ask], dtype: str, device: torch.device, random_weights: bool) -> float:
    other = Baseline(job.source, random=random_weights, dtype=dtype, device=device)
    return other.serve([(ask.prompt, ask.output) for ask in work])
