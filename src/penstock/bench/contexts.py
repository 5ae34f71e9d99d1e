"""How a model fares by the length of its context: what memory it takes, how fast its prompt is computed, how
fast it then decodes."""

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch

from penstock.arch import bounds
from penstock.arch.layout import GroupLayout, group_layouts, kv_layout
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import RequestError
from penstock.base.units import format_rate, format_size, parse_size
from penstock.bench import measure
from penstock.bench.machine import Machine, machine
from penstock.bench.run import disk_of, open_model
from penstock.bench.times import Times
from penstock.engine.boot import Booted, boot
from penstock.engine.budget import KV_PART, usual_activations
from penstock.engine.placing import Override, Say, host_room
from penstock.engine.settling import choose_dtype, choose_limits, device_budget
from penstock.kv.store.diskpool import record_bytes
from penstock.memory.device import choose_device, device_name, give_back, total_memory
from penstock.memory.probe import copy_rate, matmul_rate
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.streaming.residency import padded

_SHORTEST = 4096
"""Tokens of the first of the usual contexts; each further one is twice as long."""
_SURE = 0.75
"""Of the memory that is left to KV by an estimate, so much is there in fact."""
_BLOCKS = 8
"""Of KV on the device where host memory was asked for: a long context needs no more, and nothing that is
measured then fits there."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure. `source`: a parsed config of random weights, or a model directory; `lengths` None: the
    usual ones that fit.

    With `host_kv_memory` in the config, as much of it as the longest context needs is taken, and KV of all
    contexts rests there or on disk.
    """

    name: str
    source: Mapping[str, object] | Path
    config: Config
    lengths: tuple[int, ...] | None
    output: int
    repeat: int
    scratch: tuple[Path, int] | None = None
    """See bench.run.Job."""


@dataclass(frozen=True, slots=True)
class Row:
    """One length. Bytes."""

    context: int
    device: int
    """Beside weights, at the peak, without KV blocks in which there was nothing. On a CPU the largest step as
    measured when the engine was built, and KV blocks."""
    host_kv: int
    disk_kv: int
    prefill_ms: Times
    prefill_tokens_per_second: float
    bound_ms: float
    """Of the prompt's arithmetic."""
    of_bound: float
    decode_ms: Times
    """Of a step, which yields a token."""
    kv_per_step: float
    weights_per_step: float
    """Came to the device over the link."""
    of_link: float
    """Their rate as a share of the ceiling."""


@dataclass(frozen=True, slots=True)
class Report:
    """`settings`: those that were asked for. `link_ceiling`: bytes/s of copies to the device.
    `operations_per_second`: of a matrix product, by which `bound_ms` is reckoned: that of all attention, also
    where a policy leaves some out."""

    bench: str
    model: str
    weights: str
    parameters: int
    dtype: str
    device: str
    settings: Mapping[str, object]
    output: int
    repeat: int
    step_tokens: int
    block_size: int
    boot_seconds: float
    link_ceiling: float
    operations_per_second: float
    contexts: tuple[Row, ...]
    machine: Machine

    def line(self) -> str:
        """Everything, as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        head = (
            f"{self.model}: {self.parameters / 1e6:,.4g}M parameters, {self.dtype}, {self.weights} weights, "
            f"{self.device}"
        )
        about = (
            f"one sequence by its context, prompts in steps of at most {self.step_tokens:,} tokens; "
            f"bounds: link {format_rate(self.link_ceiling)}, arithmetic "
            f"{self.operations_per_second / 1e12:.3g} TFLOP/s"
        )
        titles = (
            "context",
            "device, beside weights",
            "KV in host",
            "prefill",
            "of bound",
            "decode",
            "streamed",
            "of link",
        )
        table = [titles, *(_cells(row) for row in self.contexts)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = (
            "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table
        )
        return "\n".join([head, about, *(f"  {line}" for line in lines)])


def sweep(job: Job, say: Say = lambda _: None) -> Report:
    """Measure, one length after another in one engine. `say` is told what that decided, and each length.
    Raises PenstockErrors."""
    model = open_model(job.source, job.name, job.config)
    with closing(model) if isinstance(model, Checkpoint) else nullcontext():
        spec, device = model.spec, choose_device(job.config.device)
        dtype = choose_dtype(job.config, model, device)
        layouts = group_layouts(spec, model.names, dtype)
        lengths = sorted(set(job.lengths)) if job.lengths else _usual(job, spec, layouts, dtype, device)
        operations, link = matmul_rate(device, getattr(torch, dtype)), copy_rate(device)
        give_back(device)
        with disk_of(job.scratch, model, layouts, dtype) as disk:
            booted = boot(_sized(job, spec, dtype, lengths[-1]), model, say=say, override=Override(disk=disk))
    with closing(booted.engine):
        longest = booted.engine.scheduler.longest
        fitting = [length for length in lengths if measure.context_room(length, job.output) <= longest]
        if not fitting or (job.lengths and fitting != lengths):
            lacking = lengths[len(fitting)]
            raise RequestError(
                f"measuring {job.output} tokens after {lacking:,} takes "
                f"{measure.context_room(lacking, job.output):,} positions, but KV "
                f"has room for {longest:,}; lower --lengths or --output, or allow more memory, on the host "
                "by --host-kv-memory"
            )
        measure.context(booted, min(fitting[0], 2 * booted.limits.max_step_tokens), 1, random.Random(0))
        rows = []
        for length in fitting:
            rows.append(_row(booted, job, layouts, length, operations, link))
            say(
                f"{length:,} tokens: prompt in {rows[-1].prefill_ms.median / 1e3:.3g} s, "
                f"{rows[-1].decode_ms.median / 1e3:.3g} s a token"
            )
        report = Report(
            bench="context",
            model=job.name,
            weights="checkpoint" if isinstance(model, Checkpoint) else "random",
            parameters=bounds.parameters(layouts),
            dtype=dtype,
            device=device_name(device),
            settings=job.config.changed(),
            output=job.output,
            repeat=job.repeat,
            step_tokens=booted.limits.max_step_tokens,
            block_size=booted.limits.block_size,
            boot_seconds=booted.seconds,
            link_ceiling=link,
            operations_per_second=operations,
            contexts=tuple(rows),
            machine=machine(),
        )
    del booted
    give_back(device)
    return report


def _usual(
    job: Job, spec: ModelSpec, layouts: Sequence[GroupLayout], dtype: str, device: torch.device
) -> list[int]:
    """The powers of two that model and memory have room for, by an estimate. Raises RequestError if there is
    none."""
    config = job.config
    limits, total = choose_limits(config, spec, device), device_budget(config, device)
    beside = sum(map(padded, layouts)) + usual_activations(spec, dtype, limits.max_step_tokens, 1)
    asked, size = _asked(config), config.block_size
    near = 0 if asked else max(total - beside, total // KV_PART) // kv_layout(spec, dtype, size).block_bytes
    block, record = _far_bytes(config, spec, dtype)
    disk = parse_size(config.disk_kv_memory) // record if config.disk_kv_memory is not None else 0
    far = (host_room(config, device) if asked is None else asked) // block + disk
    room, lengths = int(max(near, far) * _SURE) * size, [_SHORTEST]
    while 2 * lengths[-1] <= spec.max_length and measure.context_room(2 * lengths[-1], job.output) <= room:
        lengths.append(2 * lengths[-1])
    if measure.context_room(_SHORTEST, job.output) > room or spec.max_length < _SHORTEST:
        raise RequestError(
            f"the usual contexts begin at {_SHORTEST:,} tokens, but {job.name} has {spec.max_length:,} "
            "positions, and memory room for "
            f"about {room:,}; give --lengths"
        )
    return lengths


def _sized(job: Job, spec: ModelSpec, dtype: str, longest: int) -> Config:
    """The config with room for exactly one sequence of the longest context, and no cached prefixes."""
    size = job.config.block_size
    # One block more than the sequence ever fills, which the scheduler keeps in reserve.
    length = measure.context_room(longest, job.output) + size
    config = replace(job.config, max_sequences=1, prefix_cache=False, beyond_trained=True, max_length=length)
    blocks, (block, record) = -(-length // size), _far_bytes(config, spec, dtype)
    if config.disk_kv_memory is not None:
        config = replace(config, disk_kv_memory=min(parse_size(config.disk_kv_memory), blocks * record))
    if not (asked := _asked(config)):
        return config
    return replace(config, host_kv_memory=min(asked, blocks * block), kv_blocks=config.kv_blocks or _BLOCKS)


def _far_bytes(config: Config, spec: ModelSpec, dtype: str) -> tuple[int, int]:
    """Of a KV block in host memory, and on disk."""
    layout = kv_layout(spec, dtype, config.block_size)
    layout = layout.in_fp8 if config.host_kv_dtype == "fp8" else layout
    return layout.block_bytes, layout.layers * record_bytes(layout)


def _asked(config: Config) -> int | None:
    """Bytes of host memory for KV, if anything was said about them."""
    asked = config.host_kv_memory
    if asked is None or asked in (0, "0"):
        return None if asked is None else 0
    return parse_size(asked, whole=total_memory(torch.device("cpu")))


def _row(
    booted: Booted, job: Job, layouts: Sequence[GroupLayout], length: int, operations: float, link: float
) -> Row:
    device, budget, rng = booted.device, booted.budget, random.Random(length)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found = [measure.context(booted, length, job.output, rng) for _ in range(job.repeat)]
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
        Times.of([one.prefill for one in found]),
        Times.of([second for one in found for second in one.steps]),
    )
    bound = (
        1e3
        * bounds.prefill_operations(booted.spec, layouts, [length])
        / (job.config.tensor_parallel * operations)
    )
    kv, weights = fmean(one.kv_copied for one in found), fmean(one.weights_copied for one in found)
    return Row(
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


def _cells(row: Row) -> tuple[str, ...]:
    streamed = row.kv_per_step + row.weights_per_step
    far = [format_size(row.host_kv)] * (row.host_kv > 0) + [f"{format_size(row.disk_kv)} on disk"] * (
        row.disk_kv > 0
    )
    return (
        f"{row.context:,}",
        format_size(row.device),
        " + ".join(far) or "-",
        f"{row.prefill_tokens_per_second:,.0f} tokens/s",
        f"{row.of_bound:.1%}",
        f"{row.decode_ms.median / 1e3:.3g} s a token",
        f"{format_size(streamed)} a step" if streamed else "-",
        f"{row.of_link:.1%}" if streamed else "-",
    )
