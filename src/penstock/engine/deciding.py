"""Decides at boot which drafts `--speculate auto` takes, by what this machine has."""

from dataclasses import replace

import torch

from penstock.base.config import Config, launched
from penstock.engine.choosing import choose_drafts
from penstock.engine.costs import costs_file, read_costs
from penstock.engine.draft import DraftModel, copy_or_why, draft_limit
from penstock.engine.hardware import read_hardware
from penstock.engine.machines import BLOCK_SIZE, CONTEXT, PROCESS, TABLES, Machine, Work
from penstock.engine.placing import Model, Say
from penstock.engine.plan import USUAL
from penstock.engine.rooms import device_room, host_room
from penstock.engine.settling import choose_dtype, choose_limits
from penstock.memory.device import choose_device, device_name, give_back
from penstock.memory.probe import copy_rate, file_read, matmul_rate, memory_read
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.reader import Pack
from penstock.weights.streaming.ring import StreamRates

_CONTEXT = 4096
"""Tokens of the sequence that is forecast, as `penstock plan` has them, where requests may be longer."""
_SECONDS = 0.2
"""Seconds for which a link is measured."""
_OPERATIONS = 1e14
"""Operations a second before they are measured."""


def decided(config: Config, model: Model, say: Say) -> Config:
    """Return the settings with what is drafted by: as they are, unless that is to be decided.

    Links are measured only where weights would stream, and a copy could draft. Raises what settings raise
    that do not fit the machine.
    """
    if config.speculate != "auto":
        return config
    device = choose_device(config.device)
    dtype, limits = choose_dtype(config, model, device), choose_limits(config, model.spec, device)
    settings = replace(config, draft_memory=draft_limit(config, read_hardware(device).whole))
    if config.max_loras is None:
        settings = replace(settings, max_loras=len(config.lora_modules))
    work = Work(dtype, 1, min(_CONTEXT, limits.max_length), limits.max_step_tokens, settings=settings)
    copy: DraftModel | str = "the model is a pack, which cannot be put in four bits"
    if config.tensor_parallel > 1 and launched() is not None:
        copy = "torchrun has started the ranks, each of which would decide by itself"
    elif not isinstance(model, Pack):
        copy = copy_or_why(model.spec, model.names, dtype, BLOCK_SIZE, work.shard)
    machine = _machine(config, device)
    choice = choose_drafts(model.spec, model.names, machine, work, copy)
    if choice.by_rates:
        measured = _measured(config, model, device, dtype, machine, disk=choice.by_disk)
        choice = choose_drafts(model.spec, model.names, measured, work, copy)
    say(str(choice))
    return replace(config, speculate=choice.speculate)


def _machine(config: Config, device: torch.device) -> Machine:
    """Return this machine at usual rates."""
    hardware = read_hardware(device)
    room, host = device_room(config, hardware), host_room(config, hardware)
    if hardware.cuda:
        host += PROCESS
        return Machine(room + host // TABLES + CONTEXT, host, USUAL, _OPERATIONS)
    rates = replace(USUAL, disk_to_host=USUAL.host_to_device) if host else USUAL
    return Machine(room, None, rates, _OPERATIONS)


def _measured(
    config: Config, model: Model, device: torch.device, dtype: str, machine: Machine, *, disk: bool
) -> Machine:
    """Return the machine at rates that are measured now. disk: whether that is measured as well."""
    link, read = copy_rate(device, seconds=_SECONDS), memory_read(device, seconds=_SECONDS)
    from_disk = machine.rates.disk_to_host
    if device.type == "cpu" and host_room(config, read_hardware(device)):
        from_disk = link  # Weights that the device lacks are in memory, too.
    elif disk and isinstance(model, Checkpoint):
        files = (
            [one for one in model.path.iterdir() if one.is_file()] if model.path.is_dir() else [model.path]
        )
        from_disk = file_read(max(files, key=lambda one: one.stat().st_size), _SECONDS).read
    operations = matmul_rate(device, getattr(torch, dtype))
    give_back(device)
    known = costs_file(config.cache.expanduser(), device_name(device), dtype)
    costs = read_costs(known) if device.type == "cuda" and known.exists() else None
    return replace(machine, rates=StreamRates(link, from_disk, read), operations=operations, costs=costs)
