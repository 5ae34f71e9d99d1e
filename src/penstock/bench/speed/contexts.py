"""Measures contexts of growing length, one sequence at a time: the memory that one takes, how fast its prompt
is computed, and how fast it then decodes."""

import random
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from penstock.arch import bounds
from penstock.arch.layout import kv_layout
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import RequestError
from penstock.base.report import JsonLine
from penstock.base.setting import MOST
from penstock.base.units import format_duration, format_rate, format_size, parse_size
from penstock.bench.machine import MachineInfo, machine
from penstock.bench.report import Subject, table
from penstock.bench.speed import measure
from penstock.bench.speed.setup import OpenModel, Target, opened
from penstock.bench.times import Timings
from penstock.engine.boot import Booted
from penstock.engine.budget import KV_PART, usual_activations
from penstock.engine.placing import Say, host_room
from penstock.engine.settling import choose_limits, device_budget
from penstock.kv.movement.sizes import record_bytes
from penstock.memory.device import give_back, total_memory
from penstock.memory.probe import copy_rate
from penstock.weights.streaming.residency import padded

_SHORTEST = 4096
"""Tokens of the first of the usual contexts; each further one is twice as long."""
_SURE = 0.75
"""The share of the estimated memory for KV that is there in fact."""
_BLOCKS = 8
"""KV blocks on the device where host memory was asked for: a long context needs no more, and nothing that is
measured then fits there."""


@dataclass(frozen=True, slots=True)
class ContextBench:
    """Holds the settings of a benchmark by the length of the context, which `sweep` measures.

    With `host_kv_memory` in the target's config, as much of it as the longest context needs is taken, and KV
    of all contexts rests there or on disk.

    lengths: prompt tokens; None is the usual ones that fit.
    output: decode steps that are timed after each prompt.
    repeat: how often all of it is done, with fresh prompts.
    """

    target: Target
    lengths: tuple[int, ...] | None
    output: int
    repeat: int


@dataclass(frozen=True, slots=True)
class ContextRow:
    """Holds the times and bytes of one length.

    device: bytes on the device beside weights, at the peak, without KV blocks in which there was nothing. On
        a CPU it is the largest step as measured when the engine was built, and KV blocks.
    host_kv, disk_kv: bytes of KV in host memory and on disk.
    bound_ms: the least time of the prompt's arithmetic.
    decode_ms: of a step, which yields a token.
    kv_per_step, weights_per_step: bytes that came to the device over the link.
    of_link: the rate of these, as a share of the link's ceiling.
    """

    context: int
    device: int
    host_kv: int
    disk_kv: int
    prefill_ms: Timings
    prefill_tokens_per_second: float
    bound_ms: float
    of_bound: float
    decode_ms: Timings
    kv_per_step: float
    weights_per_step: float
    of_link: float

    def cells(self) -> tuple[str, ...]:
        """Return the row of the printed table, without units that its titles name."""
        streamed, disk = self.kv_per_step + self.weights_per_step, self.disk_kv
        lower = [format_size(self.host_kv)] * (self.host_kv > 0) + [f"{format_size(disk)} on disk"] * (
            disk > 0
        )
        return (
            f"{self.context:,}",
            format_size(self.device),
            " + ".join(lower) or "-",
            f"{self.prefill_tokens_per_second:,.0f} tokens/s",
            f"{self.of_bound:.1%}",
            f"{format_duration(self.decode_ms.median / 1e3)} a token",
            f"{format_size(streamed)} a step" if streamed else "-",
            f"{self.of_link:.1%}" if streamed else "-",
        )


_TITLES = (
    "context",
    "device, beside weights",
    "KV in host",
    "prefill",
    "of bound",
    "decode",
    "streamed",
    "of link",
)


@dataclass(frozen=True, slots=True)
class ContextReport(JsonLine):
    """Holds the rows of all lengths, and prints them.

    settings: those that were asked for.
    link_ceiling: bytes/s of copies to the device.
    operations_per_second: the rate of a matrix product, which `bound_ms` is computed with. It counts all
        attention, also where a policy leaves some out.
    """

    subject: Subject
    settings: Mapping[str, object]
    output: int
    repeat: int
    step_tokens: int
    block_size: int
    boot_seconds: float
    link_ceiling: float
    operations_per_second: float
    contexts: tuple[ContextRow, ...]
    machine: MachineInfo

    def __str__(self) -> str:
        about = (
            f"one sequence by its context, prompts in steps of at most {self.step_tokens:,} tokens; "
            f"bounds: link {format_rate(self.link_ceiling)}, arithmetic "
            f"{self.operations_per_second / 1e12:.3g} TFLOP/s"
        )
        rows = [_TITLES, *(row.cells() for row in self.contexts)]
        return "\n".join([str(self.subject), about, *table(rows)])


def sweep(bench: ContextBench, say: Say = lambda _: None) -> ContextReport:
    """Measure one length after another in one engine. `say` is called with what the engine decides, and with
    each length. Raises PenstockErrors."""
    with opened(bench.target) as model:
        lengths = sorted(set(bench.lengths)) if bench.lengths else _usual(bench, model)
        operations, link = model.matmul_rate(), copy_rate(model.device)
        booted = model.boot(_sized(bench, model, lengths[-1]), say)
    with closing(booted.engine):
        longest = booted.engine.scheduler.longest
        fitting = [length for length in lengths if measure.context_room(length, bench.output) <= longest]
        if not fitting or (bench.lengths and fitting != lengths):
            lacking = lengths[len(fitting)]
            raise RequestError(
                f"measuring {bench.output} tokens after {lacking:,} takes "
                f"{measure.context_room(lacking, bench.output):,} positions, but KV has room for "
                f"{longest:,}; lower --lengths or --output, or raise --device-memory or --host-kv-memory"
            )
        measure.context(booted, min(fitting[0], 2 * booted.limits.max_step_tokens), 1, random.Random(0))
        rows = []
        for length in fitting:
            rows.append(_row(booted, bench, model, length, operations, link))
            say(
                f"{length:,} tokens: prompt in {format_duration(rows[-1].prefill_ms.median / 1e3)}, "
                f"{format_duration(rows[-1].decode_ms.median / 1e3)} a token"
            )
        report = ContextReport(
            subject=model.subject("context"),
            settings=bench.target.config.changed(),
            output=bench.output,
            repeat=bench.repeat,
            step_tokens=booted.limits.max_step_tokens,
            block_size=booted.limits.block_size,
            boot_seconds=booted.seconds,
            link_ceiling=link,
            operations_per_second=operations,
            contexts=tuple(rows),
            machine=machine(),
        )
    del booted
    give_back(model.device)
    return report


def _usual(bench: ContextBench, model: OpenModel) -> list[int]:
    """Return the powers of two that model and memory have room for, by an estimate. Raises RequestError if
    there is none."""
    config, spec, dtype, device = bench.target.config, model.spec, model.dtype, model.device
    limits, total = choose_limits(config, spec, device), device_budget(config, device)
    beside = sum(map(padded, model.layouts)) + usual_activations(spec, dtype, limits.max_step_tokens, 1)
    asked, size = _asked(config), config.block_size
    on_device = (
        0 if asked else max(total - beside, total // KV_PART) // kv_layout(spec, dtype, size).block_bytes
    )
    block, record = _lower_tier_bytes(config, spec, dtype)
    disk = parse_size(config.disk_kv_memory) // record if config.disk_kv_memory is not None else 0
    below = (host_room(config, device) if asked is None else asked) // block + disk
    room, lengths = int(max(on_device, below) * _SURE) * size, [_SHORTEST]
    while 2 * lengths[-1] <= spec.max_length and measure.context_room(2 * lengths[-1], bench.output) <= room:
        lengths.append(2 * lengths[-1])
    if measure.context_room(_SHORTEST, bench.output) > room or spec.max_length < _SHORTEST:
        raise RequestError(
            f"the usual contexts begin at {_SHORTEST:,} tokens, but {bench.target.name} has "
            f"{spec.max_length:,} positions, and memory room for about {room:,}; give --lengths"
        )
    return lengths


def _sized(bench: ContextBench, model: OpenModel, longest: int) -> Config:
    """Return the config with room for exactly one sequence of the longest context, and no cached prefixes."""
    config, size = bench.target.config, bench.target.config.block_size
    # One block more than the sequence ever fills, which the scheduler keeps in reserve.
    length = min(measure.context_room(longest, bench.output) + size, MOST)
    config = replace(config, max_sequences=1, prefix_cache=False, beyond_trained=True, max_length=length)
    blocks, (block, record) = -(-length // size), _lower_tier_bytes(config, model.spec, model.dtype)
    if config.disk_kv_memory is not None:
        config = replace(config, disk_kv_memory=min(parse_size(config.disk_kv_memory), blocks * record))
    if not (asked := _asked(config)):
        return config
    return replace(config, host_kv_memory=min(asked, blocks * block), kv_blocks=config.kv_blocks or _BLOCKS)


def _lower_tier_bytes(config: Config, spec: ModelSpec, dtype: str) -> tuple[int, int]:
    """Return the bytes of a KV block in host memory, and on disk."""
    layout = kv_layout(spec, dtype, config.block_size)
    layout = layout.in_fp8 if config.host_kv_dtype == "fp8" else layout
    return layout.block_bytes, layout.layers * record_bytes(layout)


def _asked(config: Config) -> int | None:
    """Return the bytes of host memory for KV, or None where the config says nothing about them."""
    asked = config.host_kv_memory
    if asked is None or asked in (0, "0"):
        return None if asked is None else 0
    return parse_size(asked, whole=total_memory(torch.device("cpu")))


def _row(
    booted: Booted, bench: ContextBench, model: OpenModel, length: int, operations: float, link: float
) -> ContextRow:
    """Measure one length. operations, link: the device's rates."""
    device, budget, rng = booted.device, booted.budget, random.Random(length)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found = [measure.context(booted, length, bench.output, rng) for _ in range(bench.repeat)]
    blocks = max(one.blocks for one in found)
    if device.type == "cuda":
        memory = (
            torch.cuda.max_memory_allocated(device)
            - booted.weights.bytes
            - (budget.blocks - blocks) * budget.block_bytes
        )
    else:
        memory = budget.activations + blocks * budget.block_bytes
    prefill, decode = (
        Timings.of([one.prefill for one in found]),
        Timings.of([second for one in found for second in one.steps]),
    )
    least = bounds.prefill_operations(booted.spec, model.layouts, [length])
    bound = 1e3 * least / (bench.target.config.tensor_parallel * operations)
    kv, weights = fmean(one.kv_copied for one in found), fmean(one.weights_copied for one in found)
    return ContextRow(
        context=length,
        device=memory,
        host_kv=max(one.host for one in found),
        disk_kv=max(one.disk for one in found),
        prefill_ms=prefill,
        prefill_tokens_per_second=1e3 * length / prefill.median,
        bound_ms=bound,
        of_bound=bound / prefill.median,
        decode_ms=decode,
        kv_per_step=kv,
        weights_per_step=weights,
        of_link=(kv + weights) / fmean(second for one in found for second in one.steps) / link,
    )
