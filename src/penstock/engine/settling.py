"""Settles the outline of a plan (`engine.plan`) from the model and the machine."""

from dataclasses import replace

import torch

from penstock.arch.heads import check_head
from penstock.arch.layout import group_layouts, kv_layout, state_layout
from penstock.arch.lora import LEAST_RANK, LoraRoom
from penstock.arch.parts import local_spec
from penstock.arch.shards import WHOLE, Shard
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import BudgetError, ConfigError
from penstock.base.units import counted, format_size
from penstock.engine.adapters import module_paths
from penstock.engine.budget import on_heap, usual_activations
from penstock.engine.contexts import LongRoom, long_room, usual_chunk
from penstock.engine.draft import DraftModel, beyond_trained, check_draft
from penstock.engine.hardware import read_hardware
from penstock.engine.limits import dtype_of, limits_of
from penstock.engine.placing import Model, Say
from penstock.engine.plan import Outline
from penstock.engine.rooms import device_room, host_room
from penstock.memory.device import (
    cap_memory,
    device_name,
    give_back,
    library_buffers,
)
from penstock.memory.probe import copy_rate, matmul_rate
from penstock.sched.rules import SchedulerLimits
from penstock.weights.checkpoint.heads import HeadCheckpoint
from penstock.weights.checkpoint.lora import config_rank
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.reader import Pack
from penstock.weights.streaming.residency import padded

Settled = Outline[LongRoom]
_MEASURE = 0.2
"""Seconds for which the link is measured."""


def settle(
    config: Config,
    model: Model,
    device: torch.device,
    say: Say,
    shard: Shard = WHOLE,
    draft_model: Model | None = None,
) -> Settled:
    """Return the outline of an engine. The memory of a CUDA device is capped if a size was asked for.

    shard: the part of the models that is this rank's. draft_model: a second model, if there is to be one.
    Raises ConfigError, also where the two have other tokens, BudgetError, and CheckpointError if a model
    lacks a tensor.
    """
    spec = model.spec
    draft = None if draft_model is None else _draft(config, model, draft_model, device, shard)
    dtype = choose_dtype(config, model, device)
    limits = choose_limits(config, spec, device)
    give_back(device)
    hardware = read_hardware(device)
    total = device_room(config, hardware)
    if not hardware.cuda:
        total //= shard.ranks  # One memory for all.
    elif config.device_memory is not None:
        total = capped(device, total, host_room(config, hardware))
    if isinstance(model, Checkpoint):
        model.verify(group_layouts(spec, model.names, dtype))
    layouts = group_layouts(spec, model.names, dtype, shard)
    say(f"{spec.family}, {counted(spec.layers, 'layer')}, {dtype} on {device_name(device)}")
    if isinstance(model, Checkpoint) and (left := model.left_for_drafts):
        say(f"left for drafts: {counted(len(left), 'tensor')} behind the last layer, from {left[0]} on")
    if draft:
        kind, layers = "head" if draft.head else "model", counted(draft.spec.layers, "layer")
        say(
            f"draft {kind}: {draft.spec.family}, {layers}, {draft.dtype}; its "
            f"{format_size(draft.weights)} of weights stay on the device"
        )
        if warning := beyond_trained(draft.spec, limits.max_length):
            say(warning)
    kv = kv_layout(spec, dtype, config.block_size, shard)
    activations = usual_activations(spec, dtype, limits.max_step_tokens, limits.max_sequences)
    resident = sum(map(padded, layouts)) + state_layout(spec, dtype, shard).bytes(limits.max_sequences)
    resident += activations if hardware.cuda else on_heap(activations, library_buffers(device))
    lora = lora_room(config)
    if lora:
        bank = lora.bytes(spec, shard, dtype)
        resident += bank
        say(f"LoRA adapters: room for {lora.slots} of up to rank {lora.rank}, {format_size(bank)}")
    if draft:
        resident += draft.weights + -(-limits.max_length // limits.block_size) * draft.block_bytes
    mine = local_spec(spec, shard)
    far = long_room(config, mine, limits, kv, hardware, total, resident)
    if far and hardware.cuda and config.max_step_tokens is None:
        rates = {
            "link": copy_rate(device, seconds=_MEASURE),
            "arithmetic": matmul_rate(device, getattr(torch, dtype)),
        }
        chunk = usual_chunk(config, spec, dtype, limits, total, **rates)
        limits = replace(limits, max_step_tokens=max(chunk, limits.max_sequences, config.block_size))
        far = long_room(config, mine, limits, kv, hardware, total, resident)
        give_back(device)
    one_memory = not hardware.cuda and host_room(config, hardware) == 0
    if far and one_memory:
        total -= far.host_bytes
    return Outline(
        config, hardware, spec, shard, dtype, limits, one_memory, total, layouts, kv, far, draft, lora
    )


def _draft(config: Config, target: Model, model: Model, device: torch.device, shard: Shard) -> DraftModel:
    if isinstance(model, HeadCheckpoint):
        return _head(config, target, model, device)
    check_draft(target.spec, model.spec)
    spec, dtype = model.spec, choose_dtype(config, model, device)
    if isinstance(model, Checkpoint):
        model.verify(group_layouts(spec, model.names, dtype))
    draft = DraftModel.of(spec, model.names, dtype, config.block_size, shard)
    assert not config.drafts_itself or draft.kv == kv_layout(target.spec, dtype, config.block_size, shard)
    return replace(draft, shares_kv=config.drafts_itself)


def _head(config: Config, target: Model, model: HeadCheckpoint, device: torch.device) -> DraftModel:
    """Return what is to be known of a draft head. It computes in the target's dtype, since it reads the
    target's hidden states."""
    check_head(model.head, target.spec, str(model.path))
    dtype = choose_dtype(config, target, device)
    embedding = None if model.embeds else group_layouts(target.spec, target.names, dtype)[0]
    draft = DraftModel.of_head(model.head, dtype, config.block_size, model.ids, embedding)
    model.verify(draft.layouts)
    return draft


def choose_dtype(config: Config, model: Model, device: torch.device) -> str:
    """Return the dtype of `dtype_of` on the machine as it is now."""
    pack = model.path if isinstance(model, Pack) else None
    return dtype_of(
        config, model.dtype if isinstance(model, Pack) else model.spec.dtype, pack, read_hardware(device)
    )


def choose_limits(config: Config, spec: ModelSpec, device: torch.device) -> SchedulerLimits:
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
            f"{format_size(size)} of device memory were asked for, but this process already uses "
            f"{format_size(size - left)}, with what the CUDA driver takes; raise device_memory"
        )
    return left


def lora_room(config: Config) -> LoraRoom | None:
    """Return the room for adapters that the settings ask for, or None for none.

    Raises ConfigError where that is too little for those that are loaded at the start, and what reading an
    adapter's config raises.
    """
    paths = module_paths(config)
    slots = len(paths) if config.max_loras is None else config.max_loras
    if len(paths) > slots:
        raise ConfigError(
            f"lora_modules names {len(paths)} adapters, but max_loras is {slots}; raise max_loras, or leave "
            "some out"
        )
    ranks = [config_rank(path) for path in paths.values()]  # What is none is said before weights are loaded.
    if not slots:
        return None
    return LoraRoom(slots, config.max_lora_rank or max(LEAST_RANK, *ranks, 0))
