"""Times single decode steps, or prompts to their first tokens, beside the least time that the machine
allows."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean

from penstock.arch import bounds
from penstock.arch.layout import group_layouts
from penstock.arch.parts import local_spec
from penstock.arch.shards import Shard
from penstock.base.config import Config
from penstock.base.errors import RequestError
from penstock.base.meter import ExpertCounts
from penstock.base.report import JsonLine
from penstock.base.units import counted, format_rate, format_size
from penstock.bench.machine import MachineInfo, machine
from penstock.bench.report import Subject
from penstock.bench.speed import measure
from penstock.bench.speed.baseline import Baseline, transformers
from penstock.bench.speed.bound import Bound
from penstock.bench.speed.measure import BatchWork, Decoded
from penstock.bench.speed.setup import OpenModel, Target, opened
from penstock.bench.speed.streaming import Streaming
from penstock.bench.times import Timings
from penstock.engine.boot import Booted
from penstock.engine.costs import StepCosts
from penstock.engine.forecast import decode_pace
from penstock.engine.machines import Machine, Work
from penstock.engine.placing import Say, host_room
from penstock.engine.settling import choose_limits
from penstock.memory.device import device_name, give_back
from penstock.memory.probe import memory_read
from penstock.weights.streaming.residency import HOST_SLOTS, PIECE, WeightLimits
from penstock.weights.streaming.ring import SKEW, StreamRates

_CONTEXT = 2048
"""Prompt tokens where none were asked for and the model has room for as many."""


class BenchKind(StrEnum):
    """Decides what is timed: decode steps, or prompts to their first tokens."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class LatencyBench:
    """Holds the settings of a benchmark of one batch, which `run` measures.

    context: prompt tokens of each sequence; None is 2,048, or as many as the model has room for.
    output: timed decode steps of each sequence.
    repeat: how often all of it is done, with fresh prompts.
    baseline: measure transformers too.
    window: bytes of a sliding window on the device. Nothing stays anywhere, as in systems without a
        placement.
    costs: finds what steps cost on a device, by its name, in a dtype; None where that is not known.
    """

    kind: BenchKind
    target: Target
    batch: int
    context: int | None
    output: int
    repeat: int
    baseline: bool = False
    window: int | None = None
    costs: Callable[[str, str], StepCosts | None] = lambda device, dtype: None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Holds the times of another system at the same work. `ratio` is how many times its time is the
    engine's."""

    system: str
    ms: Timings
    tokens_per_second: float
    ratio: float


@dataclass(frozen=True, slots=True)
class LatencyReport(JsonLine):
    """Holds the times of one batch, and prints them.

    context: prompt tokens of each sequence.
    output: timed decode steps of each sequence; 1 for a prefill, since its work ends with the first token.
    ms: of one decode step, or from the first step to every prompt's first token.
    of_bound: the bound's time over the median.
    """

    subject: Subject
    batch: int
    context: int
    output: int
    step_tokens: int
    boot_seconds: float
    ms: Timings
    tokens_per_second: float
    bound: Bound
    of_bound: float
    streaming: Streaming | None
    baseline: Comparison | None
    machine: MachineInfo

    def __str__(self) -> str:
        bound, decode = self.bound, self.subject.bench == BenchKind.DECODE
        if decode:
            work = f"decode, batch {self.batch}, {counted(self.context, 'token')} of context"
            least = (
                f"{format_size(bound.weight_bytes)} of weights and {format_size(bound.kv_bytes)} of KV at "
                f"{format_rate(bound.per_second)}"
            )
        else:
            work = f"prefill, {self.batch} x {self.context:,} tokens, at most {self.step_tokens:,} a step"
            least = f"{bound.operations / 1e12:.3g} TFLOP at {bound.per_second / 1e12:.3g} TFLOP/s"
        rows = [
            ("penstock", f"{self.ms}, {self.tokens_per_second:,.1f} tokens/s"),
            ("bound", f"{bound.ms:.3g} ms: {least}"),
            ("of the bound", f"{self.of_bound:.1%}"),
        ]
        if self.streaming:
            rows += self.streaming.rows(self.ms.median)
        elif self.of_bound > 1 and decode:
            rows.append(("", "more than all: some of what is read rests in the processor's caches"))
        if other := self.baseline:
            rows.append(
                (
                    other.system,
                    f"{other.ms}, {other.tokens_per_second:,.1f} tokens/s; penstock is {other.ratio:.2f} "
                    "times as fast",
                )
            )
        return "\n".join([str(self.subject), work, *(f"  {name:<20} {text}" for name, text in rows)])


def run(bench: LatencyBench, say: Say = lambda _: None) -> LatencyReport:
    """Measure. `say` is called with what the engine decides. Raises PenstockErrors."""
    if bench.baseline:
        transformers()  # What is missing should be known before minutes have passed.
    decode = bench.kind is BenchKind.DECODE
    with opened(bench.target) as model:
        work, config = _sized(bench, model)
        rate = memory_read(model.device) if decode else model.matmul_rate()
        booted = model.boot(config, say, _window(bench, config, model))
    before, step_tokens, boot_seconds = booted.weights.stats(), booted.limits.max_step_tokens, booted.seconds
    times, bound, decoded = (_decode if decode else _prefill)(booted, work, model, rate)
    moved = (decoded.copied, decoded.read) if decoded is not None else None
    streaming = Streaming.of(booted, before, moved) if booted.weights.stats().streams else None
    if streaming is not None and decoded is not None and streaming.experts_per_pass is not None:
        costs = bench.costs(device_name(model.device), model.dtype)
        streaming = replace(
            streaming,
            expert_hits=decoded.experts.hit_rate,
            disk_rate=decoded.experts.disk_rate,
            experts_by_cpu=decoded.experts.cpu_share,
            cpu_rate=_cpu_rate(booted, decoded.experts),
        )
        predicted = _mixture_ms(booted, model, streaming, decoded.lengths, rate, costs)
        streaming = replace(streaming, predicted_ms=predicted)
    if streaming is not None:
        bound = streaming.bound(bound, 1 if decode else -(-work.batch * work.context // step_tokens))
    booted.engine.close()
    del booted
    give_back(model.device)
    tokens = work.batch * (1 if decode else work.context)
    return LatencyReport(
        subject=model.subject(bench.kind),
        batch=work.batch,
        context=work.context,
        output=work.output,
        step_tokens=step_tokens,
        boot_seconds=boot_seconds,
        ms=times,
        tokens_per_second=1e3 * tokens / times.median,
        bound=bound,
        of_bound=bound.ms / times.median,
        streaming=streaming,
        baseline=_compare(bench, model, work, times.median, tokens) if bench.baseline else None,
        machine=machine(),
    )


def _cpu_rate(booted: Booted, experts: ExpertCounts) -> float:
    """Return the bytes a second of experts that the CPU computed with, while it did; 0 where it did not."""
    room = booted.weights.room
    return experts.computed * room.mean / experts.worked if room is not None and experts.worked else 0.0


def _sized(bench: LatencyBench, model: OpenModel) -> tuple[BatchWork, Config]:
    """Return the work with its context filled in, and the config with room for exactly that and no cached
    prefixes. Raises RequestError."""
    output, spec = bench.output if bench.kind is BenchKind.DECODE else 1, model.spec
    config = replace(bench.target.config, max_sequences=bench.batch, prefix_cache=False)
    step_tokens = choose_limits(config, spec, model.device).max_step_tokens
    work = BatchWork(bench.batch, bench.context or _CONTEXT, output, bench.repeat)
    longest = config.max_length or spec.max_length
    if bench.context is None:
        fitting = bisect_right(
            range(1, _CONTEXT + 1),
            longest,
            key=lambda context: replace(work, context=context).room(step_tokens),
        )
        work = replace(work, context=max(fitting, 1))
    if work.room(step_tokens) > longest:
        raise RequestError(
            f"measuring {counted(work.output, 'token')} of {counted(work.batch, 'sequence')} after "
            f"{work.context:,} takes {work.room(step_tokens):,} positions, but {bench.target.name} has "
            f"{longest:,}; lower --context, --batch or --output"
        )
    # One block more than the sequences ever fill: the scheduler admits a request only if those that run can
    # still grow.
    return work, replace(config, max_length=min(longest, work.room(step_tokens) + config.block_size))


def _mixture_ms(
    booted: Booted,
    model: OpenModel,
    streaming: Streaming,
    lengths: Sequence[int],
    rate: float,
    costs: StepCosts | None,
) -> float:
    """Return the milliseconds of a timed decode step as `penstock plan` forecasts it where weights rest as
    they do, from the experts that came and the rates that were measured here, of the disk while it was read.
    Without costs the device only reads, at `rate`."""
    weights, shard = booted.weights, Shard(0, model.target.config.tensor_parallel)
    assert streaming.experts_per_pass is not None
    assert weights.room is not None
    on_cpu = model.device.type == "cpu"
    apart = SKEW if shard.ranks > 1 and not on_cpu else 0.0
    rates = StreamRates(
        streaming.link_ceiling, streaming.disk_rate or streaming.disk_ceiling, rate, skew=apart
    )
    there = Machine(0, None if on_cpu else 0, rates, math.inf, costs)
    work = Work(
        model.dtype,
        len(lengths),
        round(fmean(lengths)),
        experts_fetched=streaming.experts_per_pass,
        experts_read=(streaming.read_per_pass - weights.placement.read) / weights.room.mean,
    )
    layouts = group_layouts(model.spec, model.model.names, model.dtype, shard)
    spec = local_spec(model.spec, shard)
    return 1e3 * decode_pace(spec, layouts, there, weights.placement, weights.room, work).seconds


def _decode(booted: Booted, work: BatchWork, model: OpenModel, rate: float) -> tuple[Timings, Bound, Decoded]:
    """Time decode steps. Return the times, their bound, and all that was counted. Each rank reads its part of
    the model at `rate`, which is one device's."""
    decoded = measure.decode(booted, work)
    shard = Shard(0, model.target.config.tensor_parallel)
    weights = bounds.weight_bytes_read(model.spec, model.layouts, work.batch) / shard.ranks
    part = local_spec(model.spec, shard)
    kv = sum(bounds.kv_bytes_read(part, booted.dtype, length) for length in decoded.lengths)
    bound = Bound(weights, kv, 0, rate, 1e3 * (weights + kv) / rate)
    return decoded.times, bound, decoded


def _prefill(booted: Booted, work: BatchWork, model: OpenModel, rate: float) -> tuple[Timings, Bound, None]:
    """Time prompts. Return the times and their bound. Each rank computes its part at `rate`."""
    times = measure.prefill(booted, work)
    operations = bounds.prefill_operations(model.spec, model.layouts, [work.context] * work.batch)
    operations /= model.target.config.tensor_parallel
    return times, Bound(0, 0, operations, rate, 1e3 * operations / rate), None


def _compare(bench: LatencyBench, model: OpenModel, work: BatchWork, ours: float, tokens: int) -> Comparison:
    other = Baseline(bench.target.source, random=model.random, dtype=model.dtype, device=model.device)
    times = other.decode(work) if bench.kind is BenchKind.DECODE else other.prefill(work)
    return Comparison(
        f"transformers {transformers().__version__}", times, 1e3 * tokens / times.median, times.median / ours
    )


def _window(bench: LatencyBench, config: Config, model: OpenModel) -> WeightLimits | None:
    """Return limits with a ring of the window's size; everything else rests on disk or, beyond the least ring
    there, on the host."""
    if bench.window is None:
        return None
    host = max(host_room(config, model.device), HOST_SLOTS[-1] * PIECE)
    return WeightLimits(bench.window, host, resident=0, kept=0, device_ring=bench.window)
