"""Settles what a Config leaves open, by the model and the machine: device, dtype, limits, bytes, and whether
KV goes to host memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from penstock.arch.layout import GroupLayout, KVLayout, group_layouts, kv_layout
from penstock.arch.shards import WHOLE, Shard
from penstock.arch.spec import ModelSpec, RopeKind
from penstock.base.config import Config
from penstock.base.errors import BudgetError, ConfigError
from penstock.base.units import format_size, parse_size
from penstock.engine.budget import on_heap, usual_activations
from penstock.engine.contexts import LongRoom, long_room, measured_chunk
from penstock.engine.placing import Model, Say, host_room
from penstock.memory.device import (
    cap_memory,
    device_name,
    free_memory,
    give_back,
    library_buffers,
    native_half,
    stuck_memory,
    total_memory,
)
from penstock.sched.rules import Limits
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.reader import Pack
from penstock.weights.streaming.residency import padded


@dataclass(frozen=True, slots=True)
class StepDefaults:
    """The usual step of a device: how many tokens keep it busy, and how many sequences share a pass over the
    weights."""

    tokens: int
    sequences: int
    memory_share: float
    """Of the memory that is free, when no budget was given."""


_STEP = {"cpu": StepDefaults(512, 64, 0.5), "cuda": StepDefaults(8192, 256, 0.9)}
_ROOMY = 64 << 30
"""Bytes of a device from which on a step is usually twice as long: less of attention is merged from parts."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What is known of an engine before anything of it is constructed."""

    spec: ModelSpec
    """Of the whole model."""
    shard: Shard
    """The part of it that is this rank's, of which all that follows speaks."""
    device: torch.device
    one_memory: bool
    """Whether host memory is no more than the device: on a CPU, unless host_memory allows more."""
    dtype: str
    limits: Limits
    total: int
    """Bytes on the device, without what long contexts take of them as host memory."""
    layouts: Sequence[GroupLayout]
    kv: KVLayout
    far: LongRoom | None

    @property
    def may_rest(self) -> bool:
        """Whether all weights would fit on the device if nothing else were there."""
        return sum(map(padded, self.layouts)) <= self.total

    @property
    def blocks_per_row(self) -> int:
        """KV blocks of the longest sequence."""
        return -(-self.limits.max_length // self.limits.block_size)


def settle(config: Config, model: Model, device: torch.device, say: Say, shard: Shard = WHOLE) -> Settled:
    """All that is known before the first part is there. The memory of a CUDA device is capped if a size was
    asked for.

    shard: the part of the model that is this rank's. Raises ConfigError, BudgetError, and CheckpointError if
    the model lacks a tensor.
    """
    spec = model.spec
    dtype = choose_dtype(config, model, device)
    limits = choose_limits(config, spec, device)
    give_back(device)
    total = device_budget(config, device)
    if device.type == "cpu":
        total //= shard.ranks  # One memory for all.
    if device.type == "cuda" and config.device_memory is not None:
        total = capped(device, total, host_room(config, device))
    if isinstance(model, Checkpoint):
        model.verify(group_layouts(spec, model.names, dtype))
    layouts = group_layouts(spec, model.names, dtype, shard)
    say(f"{spec.family}, {spec.layers} layers, {dtype} on {device_name(device)}")
    kv = kv_layout(spec, dtype, config.block_size, shard)
    activations = usual_activations(spec, dtype, limits.max_step_tokens, limits.max_sequences)
    resident = sum(map(padded, layouts))
    resident += on_heap(activations, library_buffers(device)) if device.type == "cpu" else activations
    far = long_room(config, spec, limits, kv, device, total, resident)
    if far and device.type == "cuda" and config.max_step_tokens is None:
        chunk = measured_chunk(config, spec, dtype, limits, device, total)
        limits = replace(limits, max_step_tokens=max(chunk, limits.max_sequences, config.block_size))
        far = long_room(config, spec, limits, kv, device, total, resident)
        give_back(device)
    one_memory = device.type == "cpu" and host_room(config, device) == 0
    if far and one_memory:
        total -= far.host_bytes
    return Settled(spec, shard, device, one_memory, dtype, limits, total, layouts, kv, far)


def choose_dtype(config: Config, model: Model, device: torch.device) -> str:
    """`auto` is the checkpoint's dtype, but float32 on processors that multiply halves in software, many
    times slower; a pack has one.

    Raises ConfigError if a pack of another dtype was asked for.
    """
    if isinstance(model, Pack):
        if config.dtype not in ("auto", model.dtype):
            raise ConfigError(
                f"dtype {config.dtype} was asked for, but {model.path} is packed in {model.dtype}; pack the "
                "model again"
            )
        return model.dtype
    if config.dtype != "auto":
        return config.dtype
    return model.spec.dtype if native_half(device) else "float32"


def choose_limits(config: Config, spec: ModelSpec, device: torch.device) -> Limits:
    """What was asked for, and the device's usual where nothing was. Raises ConfigError."""
    usual = _STEP[device.type]
    beyond = (
        config.max_length is not None
        and config.max_length > spec.max_length
        and spec.rope.kind is not RopeKind.DYNAMIC
    )
    if beyond and not config.beyond_trained:
        assert config.max_length is not None
        raise ConfigError(
            f"max_length {config.max_length} is more than the {spec.max_length} positions the model was "
            "trained for; lower it, give "
            f"the checkpoint a rope scaling by {ceil(100 * config.max_length / spec.max_length) / 100:g}, "
            "or allow it with beyond_trained"
        )
    tokens = config.max_step_tokens or usual.tokens * (2 if _is_roomy(config, device) else 1)
    sequences = config.max_sequences or min(usual.sequences, tokens)
    if sequences > tokens:
        raise ConfigError(
            f"max_sequences {sequences} is more than max_step_tokens {tokens}; every sequence needs a token "
            "a step"
        )
    if config.block_size & (config.block_size - 1) or config.block_size > 256:
        raise ConfigError(f"block_size {config.block_size} must be a power of two, at most 256")
    return Limits(config.block_size, tokens, sequences, config.max_length or spec.max_length)


def _is_roomy(config: Config, device: torch.device) -> bool:
    """By what does not change while the machine is used. Several devices need not be alike, and must
    agree."""
    if device.type != "cuda" or config.tensor_parallel > 1:
        return False
    whole = total_memory(device)
    return (
        whole if config.device_memory is None else parse_size(config.device_memory, whole=whole)
    ) >= _ROOMY


def device_budget(config: Config, device: torch.device) -> int:
    """Bytes the engine may take on the device: as asked, or a share of what is free."""
    free, whole = free_memory(device) - stuck_memory(device), total_memory(device)
    asked = [config.device_memory] + ([config.host_memory] if device.type == "cpu" else [])
    sizes = [parse_size(size, whole=whole) for size in asked if size is not None]
    if config.host_memory is not None:
        parse_size(config.host_memory, whole=total_memory(torch.device("cpu")))
    total = min(sizes, default=int(free * _STEP[device.type].memory_share))
    if total > free:
        raise BudgetError(
            f"{format_size(total)} of device memory were asked for, but only {format_size(free)} are free; "
            "ask for less"
        )
    return total


def capped(device: torch.device, size: int, pinned: int) -> int:
    """Bytes of a CUDA device that are left to the engine where the process is to stay below `size`, as it
    will from now on; see cap_memory.

    Raises BudgetError if nothing is left.
    """
    left = cap_memory(device, size, pinned)
    if left <= 0:
        raise BudgetError(
            f"{format_size(size)} of device memory were asked for, but this process has "
            f"{format_size(size - left)} of it already, its "
            f"driver's part included; ask for more, or close what takes it"
        )
    return left
