"""Builds an engine from a Config: finds out what there is, sizes everything, constructs the parts. It decides no policy of its own."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import torch

from penstock.arch.layout import GroupLayout, KVLayout, group_layouts, kv_layout
from penstock.arch.spec import ModelSpec, RopeKind
from penstock.base.config import Config
from penstock.base.errors import BudgetError, ConfigError
from penstock.base.trace import Trace
from penstock.base.units import format_size, parse_size
from penstock.engine.budget import Budget, Demand, divide, least_activations, usual_activations, weights_room
from penstock.engine.contexts import LongRoom, long_room, measured_chunk
from penstock.engine.engine import Engine
from penstock.engine.placing import Model, Override, Say, host_room, place
from penstock.kv.carrier import Carrier, Streams
from penstock.kv.keys import root_key
from penstock.kv.ledger import BlockLedger, HostLedger
from penstock.kv.pool import KVPool
from penstock.memory.device import cap_memory, choose_device, device_name, free_memory, give_back, native_half, peak_of, total_memory
from penstock.memory.streams import streams_both_ways
from penstock.models.decoder import Decoder
from penstock.ops.attention import PAST_TILE
from penstock.sched.scheduler import Limits, PrefixRule, Scheduler
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.loading import Loading, counted
from penstock.weights.pack import Pack
from penstock.weights.residency import padded
from penstock.weights.stream import Blank, WeightStream
from penstock.weights.waits import Waits
from penstock.worker.inputs import InputBuilder
from penstock.worker.runner import Runner, largest_step
from penstock.worker.sampler import Sampler


@dataclass(frozen=True, slots=True)
class StepDefaults:
    """The usual step of a device: how many tokens keep it busy, and how many sequences share a pass over the weights."""

    tokens: int
    sequences: int
    memory_share: float
    """Of the memory that is free, when no budget was given."""


_STEP = {"cpu": StepDefaults(512, 64, 0.5), "cuda": StepDefaults(8192, 256, 0.9)}


@dataclass(frozen=True, slots=True)
class Booted:
    """An engine and the facts that were found or derived on the way."""

    engine: Engine
    spec: ModelSpec
    device: torch.device
    dtype: str
    budget: Budget
    limits: Limits
    weights: WeightStream
    seconds: float


def boot(
    config: Config,
    model: Model,
    *,
    say: Say = lambda _: None,
    trace: Trace | None = None,
    override: Override | None = None,
    loading: Loading | None = None,
) -> Booted:
    """Everything from a frozen Config and an open checkpoint or pack to a running engine. `say` is told what was decided.

    Of a Shape the weights are random. config.model is not looked at: the model has been found by now. A pack is closed with the engine.
    Raises PenstockErrors: DeviceError, ConfigError, BudgetError, CheckpointError.
    """
    begin = time.perf_counter()
    spec = model.spec
    device = choose_device(config.device)
    dtype = choose_dtype(config, model, device)
    limits = choose_limits(config, spec, device)
    total = device_budget(config, device)
    give_back(device)
    if device.type == "cuda" and config.device_memory is not None:
        total = cap_memory(device, total, host_room(config, device))
    layouts = group_layouts(spec, model.names, dtype)
    if isinstance(model, Checkpoint):
        model.verify(layouts)
    say(f"{spec.family}, {spec.layers} layers, {dtype} on {device_name(device)}")
    layout = kv_layout(spec, dtype, config.block_size)
    resident = sum(map(padded, layouts)) + usual_activations(spec, dtype, limits.max_step_tokens, limits.max_sequences)
    far = long_room(config, spec, limits, layout, device, total, resident)
    if far and device.type == "cuda" and config.max_step_tokens is None:
        chunk = measured_chunk(config, spec, dtype, limits, device, total)
        limits = replace(limits, max_step_tokens=max(chunk, limits.max_sequences, config.block_size))
        far = long_room(config, spec, limits, layout, device, total, resident)
        give_back(device)
    if far and device.type == "cpu" and host_room(config, device) == 0:
        total -= far.host_bytes
    blocks_per_row = -(-limits.max_length // config.block_size)
    inputs = InputBuilder(
        spec,
        device,
        rows=limits.max_sequences,
        blocks_per_row=blocks_per_row,
        block_size=config.block_size,
        tile_tokens=far.tile_tokens if far else PAST_TILE,
        choosing=(bool(far and far.policies and far.policies.rows), bool(far and far.policies and far.policies.runs)),
    )
    runner = Runner(Decoder(spec), inputs, Sampler(spec.vocab_size, device), device)
    demand = Demand(
        activations=_activation_peak(runner, spec, layouts, dtype, limits, layout, far, device),
        block_bytes=layout.block_bytes,
        block_size=config.block_size,
        useful_blocks=limits.max_sequences * blocks_per_row,
        fixed_blocks=config.kv_blocks,
        length=None if far else config.max_length,
    )
    one_memory = device.type == "cpu" and host_room(config, device) == 0
    room = 0 if override and override.limits else weights_room(total, layouts, demand, host_is_device=one_memory)
    packing = counted("packing", sum(map(padded, layouts)), loading)
    placed = place(
        config, model, layouts, dtype, device, room, say=say, progress=packing, override=override, taken=far.host_bytes if far else 0
    )
    carrier: Carrier | None = None
    try:
        weights = WeightStream(
            placed.placement,
            layouts,
            dtype,
            placed.source,
            device,
            disk=placed.disk,
            experts=placed.experts,
            rates=placed.rates,
            trace=trace,
        )
    except BaseException:
        placed.close()
        raise
    try:
        budget = divide(total, weights.bytes + placed.beside, demand)
        weights.load(loading)
        carrier = _carrier(far, device, trace) if far else None
        runner.attach(weights, KVPool(layout, budget.blocks, device), carrier)
    except BaseException:
        weights.close()
        if carrier is not None:
            carrier.close()
        raise
    ledger, host = BlockLedger(budget.blocks), HostLedger(far.blocks + far.on_disk, far.on_disk) if far else None
    scheduler = Scheduler(ledger, limits, _prefix_rule(config, model, dtype), host=host, check=config.check)
    say(f"memory {budget}")
    if far:
        say(f"long contexts: {far}")
    if scheduler.longest < limits.max_length:
        say(f"the longest request is {scheduler.longest:,} tokens, less than the context of {limits.max_length:,}: KV has no room for more")
    return Booted(Engine(scheduler, runner), spec, device, dtype, budget, limits, weights, time.perf_counter() - begin)


def choose_dtype(config: Config, model: Model, device: torch.device) -> str:
    """`auto` is the checkpoint's dtype, but float32 on processors that multiply halves in software, many times slower; a pack has one.

    Raises ConfigError if a pack of another dtype was asked for.
    """
    if isinstance(model, Pack):
        if config.dtype not in ("auto", model.dtype):
            raise ConfigError(f"dtype {config.dtype} was asked for, but {model.path} is packed in {model.dtype}; pack the model again")
        return model.dtype
    if config.dtype != "auto":
        return config.dtype
    return model.spec.dtype if native_half(device) else "float32"


def choose_limits(config: Config, spec: ModelSpec, device: torch.device) -> Limits:
    """What was asked for, and the device's usual where nothing was. Raises ConfigError."""
    usual = _STEP[device.type]
    beyond = config.max_length is not None and config.max_length > spec.max_length and spec.rope.kind is not RopeKind.DYNAMIC
    if beyond and not config.beyond_trained:
        assert config.max_length is not None
        raise ConfigError(
            f"max_length {config.max_length} is more than the {spec.max_length} positions the model was trained for; lower it, give "
            f"the checkpoint a rope scaling by {ceil(100 * config.max_length / spec.max_length) / 100:g}, or allow it with beyond_trained"
        )
    tokens = config.max_step_tokens or usual.tokens
    sequences = config.max_sequences or min(usual.sequences, tokens)
    if sequences > tokens:
        raise ConfigError(f"max_sequences {sequences} is more than max_step_tokens {tokens}; every sequence needs a token a step")
    if config.block_size & (config.block_size - 1) or config.block_size > 256:
        raise ConfigError(f"block_size {config.block_size} must be a power of two, at most 256")
    return Limits(config.block_size, tokens, sequences, config.max_length or spec.max_length)


def device_budget(config: Config, device: torch.device) -> int:
    """Bytes the engine may take on the device: as asked, or a share of what is free."""
    free, whole = free_memory(device), total_memory(device)
    asked = [config.device_memory] + ([config.host_memory] if device.type == "cpu" else [])
    sizes = [parse_size(size, whole=whole) for size in asked if size is not None]
    if config.host_memory is not None:
        parse_size(config.host_memory, whole=total_memory(torch.device("cpu")))
    total = min(sizes, default=int(free * _STEP[device.type].memory_share))
    if total > free:
        raise BudgetError(f"{format_size(total)} of device memory were asked for, but only {format_size(free)} are free; ask for less")
    return total


def _activation_peak(
    runner: Runner,
    spec: ModelSpec,
    layouts: Sequence[GroupLayout],
    dtype: str,
    limits: Limits,
    layout: KVLayout,
    far: LongRoom | None,
    device: torch.device,
) -> int:
    """Bytes the largest step takes, measured by running it through one layer of each kind: the others take the same again. With the ways
    of KV to host memory and back."""
    kinds = {(spec.windows[layer], spec.is_moe(layer)): layer for layer in reversed(range(spec.layers))}
    layers = tuple(sorted(kinds.values()))
    # In a process that has freed memory before, a CPU's peak can hide in it: never count less than what is plainly there.
    peak = least_activations(spec, dtype, limits.max_step_tokens, limits.max_sequences)
    for cold in (False, True) if far else (False,):
        carrier = _carrier(replace(far, blocks=1, disk=None), device, None) if far and cold else None
        try:
            runner.attach(Blank(layouts, dtype, device), KVPool(layout, 1, device), carrier)
            plan = largest_step(
                max_step_tokens=limits.max_step_tokens,
                max_sequences=limits.max_sequences,
                max_length=limits.max_length,
                block_size=limits.block_size,
                past=far.tile_tokens if far and cold else PAST_TILE,
                cold=cold,
            )
            # The first run also pays for what is allocated once and stays: libraries' workspaces, compiled kernels.
            peak = max(peak, peak_of(device, partial(runner.run, plan, layers)))
        finally:
            runner.detach()
            if carrier is not None:
                carrier.close()
        del carrier
        give_back(device)
    return peak + (far.device_bytes if far else 0)


def _carrier(far: LongRoom, device: torch.device, trace: Trace | None) -> Carrier:
    streams = Streams(*streams_both_ways(device))
    return Carrier(
        far.layout,
        far.blocks,
        far.tile_tokens,
        far.chunk_tokens,
        device,
        streams,
        Waits(trace) if trace else None,
        far.disk,
        far.policies,
        far.most_blocks,
    )


def _prefix_rule(config: Config, model: Model, dtype: str) -> PrefixRule:
    rope = model.spec.rope
    root = root_key(model.fingerprint() if config.prefix_cache else b"", dtype, config.block_size, config.host_kv_dtype)
    return PrefixRule(root, config.prefix_cache, rope.original_length if rope.kind is RopeKind.DYNAMIC else None)
