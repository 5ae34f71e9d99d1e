"""Settles the outline of a plan (`engine.plan`) from the model and the machine."""

from dataclasses import replace

import torch

from penstock.arch.layout import group_layouts, kv_layout
from penstock.arch.shards import WHOLE, Shard
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import BudgetError
from penstock.base.units import format_size
from penstock.engine.budget import on_heap, usual_activations
from penstock.engine.contexts import LongRoom, long_room, measured_chunk
from penstock.engine.hardware import read_hardware
from penstock.engine.placing import Model, Say
from penstock.engine.plan import Outline, device_room, dtype_of, host_room, limits_of
from penstock.memory.device import (
    cap_memory,
    device_name,
    give_back,
    library_buffers,
)
from penstock.sched.rules import Limits
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.reader import Pack
from penstock.weights.streaming.residency import padded

Settled = Outline[LongRoom]


def settle(config: Config, model: Model, device: torch.device, say: Say, shard: Shard = WHOLE) -> Settled:
    """Return the outline of an engine. It caps the memory of a CUDA device if a size was asked for.

    shard: this rank's part of the model.

    Raises ConfigError, BudgetError, and CheckpointError if the model lacks a tensor.
    """
    spec = model.spec
    dtype = choose_dtype(config, model, device)
    limits = choose_limits(config, spec, device)
    give_back(device)
    hardware = read_hardware(device)
    total = device_room(config, hardware)
    if not hardware.cuda:
        total //= shard.ranks  # All ranks share one memory.
    elif config.device_memory is not None:
        total = capped(device, total, host_room(config, hardware))
    if isinstance(model, Checkpoint):
        model.verify(group_layouts(spec, model.names, dtype))
    layouts = group_layouts(spec, model.names, dtype, shard)
    say(f"{spec.family}, {spec.layers} layers, {dtype} on {device_name(device)}")
    kv = kv_layout(spec, dtype, config.block_size, shard)
    activations = usual_activations(spec, dtype, limits.max_step_tokens, limits.max_sequences)
    resident = sum(map(padded, layouts))
    resident += activations if hardware.cuda else on_heap(activations, library_buffers(device))
    far = long_room(config, spec, limits, kv, hardware, total, resident)
    if far and hardware.cuda and config.max_step_tokens is None:
        chunk = measured_chunk(config, spec, dtype, limits, device, total)
        limits = replace(limits, max_step_tokens=max(chunk, limits.max_sequences, config.block_size))
        far = long_room(config, spec, limits, kv, hardware, total, resident)
        give_back(device)
    one_memory = not hardware.cuda and host_room(config, hardware) == 0
    if far and one_memory:
        total -= far.host_bytes
    return Outline(config, hardware, spec, shard, dtype, limits, one_memory, total, layouts, kv, far)


def choose_dtype(config: Config, model: Model, device: torch.device) -> str:
    """Return the dtype of `dtype_of` on the machine as it is now."""
    pack = model.path if isinstance(model, Pack) else None
    return dtype_of(
        config, model.dtype if isinstance(model, Pack) else model.spec.dtype, pack, read_hardware(device)
    )


def choose_limits(config: Config, spec: ModelSpec, device: torch.device) -> Limits:
    """Return the limits of `limits_of` on the machine as it is now."""
    return limits_of(config, spec, read_hardware(device))


def device_budget(config: Config, device: torch.device) -> int:
    """Return the bytes of `device_room` on the machine as it is now."""
    return device_room(config, read_hardware(device))


def capped(device: torch.device, size: int, pinned: int) -> int:
    """Cap the process's memory on a CUDA device at `size` bytes, and return how many are left to the engine.

    See cap_memory. Raises BudgetError if nothing is left.
    """
    left = cap_memory(device, size, pinned)
    if left <= 0:
        raise BudgetError(
            f"{format_size(size)} of device memory were asked for, but this process has "
            f"{format_size(size - left)} of it already, its "
            f"driver's part included; ask for more, or close what takes it"
        )
    return left
