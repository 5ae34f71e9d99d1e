"""One benchmark from what was asked to its report: the ceilings first, then the engine, then what it is
compared with."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
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
from penstock.bench import measure
from penstock.bench.baseline import Baseline, transformers
from penstock.bench.bound import Bound
from penstock.bench.machine import machine
from penstock.bench.measure import Work
from penstock.bench.report import Comparison, Kind, Report, Subject
from penstock.bench.streaming import Streaming, scratch
from penstock.bench.times import Times
from penstock.engine.boot import Booted, boot
from penstock.engine.placing import Override, Say, host_room
from penstock.engine.settling import choose_dtype, choose_limits
from penstock.memory.device import choose_device, device_name, give_back
from penstock.memory.probe import matmul_rate, memory_read
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.residency import HOST_SLOTS, PIECE, Limits
from penstock.weights.streaming.source import Source

_CONTEXT = 2048
"""Prompt tokens where none were asked for and the model has room for as many."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure. `source`: a parsed config of random weights, or a model directory; `context` None is a
    usual one."""

    kind: Kind
    name: str
    source: Mapping[str, object] | Path
    config: Config
    batch: int
    context: int | None
    output: int
    repeat: int
    baseline: bool = False
    scratch: tuple[Path, int] | None = None
    """Where random weights that do not fit into memory are read from: a directory, and the most bytes to
    write there."""
    window: int | None = None
    """Bytes of a sliding window on the device: nothing stays anywhere, as in systems without a placement."""


def run(job: Job, say: Say = lambda _: None) -> Report:
    """Measure. `say` is told what the engine decided. Raises PenstockErrors."""
    if job.baseline:
        transformers()  # What is missing should be known before minutes have passed.
    model = open_model(job.source, job.name, job.config)
    with closing(model) if isinstance(model, Checkpoint) else nullcontext():
        spec, device = model.spec, choose_device(job.config.device)
        dtype = choose_dtype(job.config, model, device)
        layouts = group_layouts(spec, model.names, dtype)
        work, config = _sized(job, spec, device)
        rate = memory_read(device) if job.kind is Kind.DECODE else matmul_rate(device, getattr(torch, dtype))
        give_back(device)
        with disk_of(job.scratch, model, layouts, dtype) as disk:
            booted = boot(config, model, say=say, override=Override(_window(job, config, device), disk))
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
    before = booted.weights.stats()
    times, bound, moved = _measure(
        job.kind, booted, work, layouts, rate, Shard(0, job.config.tensor_parallel)
    )
    streaming = Streaming.of(booted, before, moved) if booted.weights.stats().streams else None
    if streaming is not None:
        passes = (
            1 if job.kind is Kind.DECODE else -(-work.batch * work.context // booted.limits.max_step_tokens)
        )
        bound = streaming.bound(bound, passes)
    booted.engine.close()
    del booted
    give_back(device)
    tokens = work.batch * (1 if job.kind is Kind.DECODE else work.context)
    return Report(
        subject=subject,
        boot_seconds=boot_seconds,
        ms=times,
        tokens_per_second=1e3 * tokens / times.median,
        bound=bound,
        of_bound=bound.ms / times.median,
        streaming=streaming,
        baseline=_compare(job, subject, work, device, times.median, tokens) if job.baseline else None,
        machine=machine(),
    )


def open_model(source: Mapping[str, object] | Path, name: str, config: Config) -> Checkpoint | Shape:
    """The model of a job with this config: a directory with nothing but a config.json in it is a shape like
    those of our own."""
    if not isinstance(source, Path):
        return Shape.of(source, name)
    bare = (source / "config.json").exists() and not any(source.glob("*.safetensors*"))
    return Shape.open(source) if bare else Checkpoint.open(source, config.cache.expanduser())


def _sized(job: Job, spec: ModelSpec, device: torch.device) -> tuple[Work, Config]:
    """The work with its context filled in, and the config with room for exactly that and no cached prefixes.
    Raises RequestError."""
    output = job.output if job.kind is Kind.DECODE else 1
    config = replace(job.config, max_sequences=job.batch, prefix_cache=False)
    step_tokens = choose_limits(config, spec, device).max_step_tokens
    work = Work(job.batch, job.context or _CONTEXT, output, job.repeat)
    longest = job.config.max_length or spec.max_length
    if job.context is None:
        fitting = bisect_right(
            range(1, _CONTEXT + 1),
            longest,
            key=lambda context: replace(work, context=context).room(step_tokens),
        )
        work = replace(work, context=max(fitting, 1))
    if work.room(step_tokens) > longest:
        raise RequestError(
            f"measuring {work.output} tokens of {work.batch} sequences after {work.context:,} takes "
            f"{work.room(step_tokens):,} "
            f"positions, but {job.name} has {longest:,}; lower --context, --batch or --output"
        )
    # One block more than the sequences ever fill: the scheduler admits a request only if those that run can
    # still grow.
    return work, replace(config, max_length=min(longest, work.room(step_tokens) + config.block_size))


def _measure(
    kind: Kind, booted: Booted, work: Work, layouts: tuple[GroupLayout, ...], rate: float, shard: Shard
) -> tuple[Times, Bound, tuple[float, float] | None]:
    """The times, what bounds them, and bytes of weights that came to the device and from the disk in a timed
    decode step.

    layouts: of the whole model; each rank reads and computes its part of it at `rate`, which is one
    device's."""
    spec, dtype = booted.spec, booted.dtype
    if kind is Kind.PREFILL:
        times = measure.prefill(booted, work)
        operations = bounds.prefill_operations(spec, layouts, [work.context] * work.batch) / shard.ranks
        return times, Bound(0, 0, operations, rate, 1e3 * operations / rate), None
    decoded = measure.decode(booted, work)
    weights = bounds.weight_bytes_read(spec, layouts, work.batch) / shard.ranks
    kv = sum(bounds.kv_bytes_read(local_spec(spec, shard), dtype, length) for length in decoded.lengths)
    return (
        decoded.times,
        Bound(weights, kv, 0, rate, 1e3 * (weights + kv) / rate),
        (decoded.copied, decoded.read),
    )


def _compare(
    job: Job, subject: Subject, work: Work, device: torch.device, ours: float, tokens: int
) -> Comparison:
    other = Baseline(job.source, random=subject.weights == "random", dtype=subject.dtype, device=device)
    times = other.decode(work) if job.kind is Kind.DECODE else other.prefill(work)
    return Comparison(
        f"transformers {transformers().__version__}", times, 1e3 * tokens / times.median, times.median / ours
    )


@contextmanager
def disk_of(
    there: tuple[Path, int] | None, model: Checkpoint | Shape, layouts: Sequence[GroupLayout], dtype: str
) -> Iterator[tuple[Source, Path] | None]:
    """What random weights are read from that do not fit into memory, if there is a directory for it; see
    Job.scratch."""
    if there is None or isinstance(model, Checkpoint):
        yield None
        return
    with scratch(*there, layouts, dtype) as disk:
        yield disk


def _window(job: Job, config: Config, device: torch.device) -> Limits | None:
    """A ring of the window's size, and everything else on disk or, beyond the least ring there, on the
    host."""
    if job.window is None:
        return None
    return Limits(
        job.window,
        max(host_room(config, device), HOST_SLOTS[-1] * PIECE),
        resident=0,
        kept=0,
        device_ring=job.window,
    )
