"""One benchmark from what was asked to its report: the ceilings first, then the engine, then what it is compared with."""

import gc
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.arch.layout import GroupLayout, group_layouts
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import RequestError
from penstock.bench import bounds, measure
from penstock.bench.baseline import Baseline, transformers
from penstock.bench.machine import machine
from penstock.bench.measure import Work
from penstock.bench.report import Bound, Comparison, Kind, Report, Subject
from penstock.bench.times import Times
from penstock.engine.boot import Booted, Say, boot, choose_dtype, choose_limits
from penstock.memory.device import choose_device, device_name
from penstock.memory.probe import matmul_rate, memory_read
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.shape import Shape

_CONTEXT = 2048
"""Prompt tokens where none were asked for and the model has room for as many."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure. `source`: a parsed config of random weights, or a model directory; `context` None is a usual one."""

    kind: Kind
    name: str
    source: Mapping[str, object] | Path
    config: Config
    batch: int
    context: int | None
    output: int
    repeat: int
    baseline: bool = False


def run(job: Job, say: Say = lambda _: None) -> Report:
    """Measure. `say` is told what the engine decided. Raises PenstockErrors."""
    if job.baseline:
        transformers()  # What is missing should be known before minutes have passed.
    model = _open(job)
    with closing(model) if isinstance(model, Checkpoint) else nullcontext():
        spec, device = model.spec, choose_device(job.config.device)
        dtype = choose_dtype(job.config, spec, device)
        layouts = group_layouts(spec, model.names, dtype)
        work, config = _sized(job, spec, device)
        rate = memory_read(device) if job.kind is Kind.DECODE else matmul_rate(device, getattr(torch, dtype))
        _free(device)
        booted = boot(config, model, say=say)
    subject = Subject(
        bench=job.kind,
        model=job.name,
        weights="checkpoint" if isinstance(model, Checkpoint) else "random",
        parameters=bounds.parameters(layouts),
        dtype=dtype,
        device=device_name(device),
        batch=work.batch,
        context=work.context,
        output=work.output,
        step_tokens=booted.limits.max_step_tokens,
    )
    boot_seconds = booted.seconds
    times, bound = _measure(job.kind, booted, work, layouts, rate)
    booted.engine.close()
    del booted
    _free(device)
    tokens = work.batch * (1 if job.kind is Kind.DECODE else work.context)
    return Report(
        subject=subject,
        boot_seconds=boot_seconds,
        ms=times,
        tokens_per_second=1e3 * tokens / times.median,
        bound=bound,
        of_bound=bound.ms / times.median,
        baseline=_compare(job, subject, work, device, times.median, tokens) if job.baseline else None,
        machine=machine(),
    )


def _open(job: Job) -> Checkpoint | Shape:
    """The model: a directory with nothing but a config.json in it is a shape like those of our own."""
    if not isinstance(job.source, Path):
        return Shape.of(job.source, job.name)
    bare = (job.source / "config.json").exists() and not any(job.source.glob("*.safetensors*"))
    return Shape.open(job.source) if bare else Checkpoint.open(job.source)


def _sized(job: Job, spec: ModelSpec, device: torch.device) -> tuple[Work, Config]:
    """The work with its context filled in, and the config with room for exactly that and no cached prefixes. Raises RequestError."""
    output = job.output if job.kind is Kind.DECODE else 1
    config = replace(job.config, max_sequences=job.batch, prefix_cache=False)
    step_tokens = choose_limits(config, spec, device).max_step_tokens
    work = Work(job.batch, job.context or _CONTEXT, output, job.repeat)
    longest = job.config.max_length or spec.max_length
    if job.context is None:
        fitting = bisect_right(range(1, _CONTEXT + 1), longest, key=lambda context: replace(work, context=context).room(step_tokens))
        work = replace(work, context=max(fitting, 1))
    if work.room(step_tokens) > longest:
        raise RequestError(
            f"measuring {work.output} tokens of {work.batch} sequences after {work.context:,} takes {work.room(step_tokens):,} "
            f"positions, but {job.name} has {longest:,}; lower --context, --batch or --output"
        )
    # One block more than the sequences ever fill: the scheduler admits a request only if those that run can still grow.
    return work, replace(config, max_length=min(longest, work.room(step_tokens) + config.block_size))


def _measure(kind: Kind, booted: Booted, work: Work, layouts: tuple[GroupLayout, ...], rate: float) -> tuple[Times, Bound]:
    spec, dtype = booted.spec, booted.dtype
    if kind is Kind.PREFILL:
        times = measure.prefill(booted, work)
        operations = bounds.prefill_operations(spec, layouts, [work.context] * work.batch)
        return times, Bound(0, 0, operations, rate, 1e3 * operations / rate)
    decoded = measure.decode(booted, work)
    weights = bounds.weight_bytes_read(spec, layouts, work.batch)
    kv = sum(bounds.kv_bytes_read(spec, dtype, length) for length in decoded.lengths)
    return decoded.times, Bound(weights, kv, 0, rate, 1e3 * (weights + kv) / rate)


def _compare(job: Job, subject: Subject, work: Work, device: torch.device, ours: float, tokens: int) -> Comparison:
    other = Baseline(job.source, random=subject.weights == "random", dtype=subject.dtype, device=device)
    times = other.decode(work) if job.kind is Kind.DECODE else other.prefill(work)
    return Comparison(f"transformers {transformers().__version__}", times, 1e3 * tokens / times.median, times.median / ours)


def _free(device: torch.device) -> None:
    """Give back what torch keeps for reuse: what comes next sizes itself by what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
