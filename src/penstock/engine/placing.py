"""Places weights: makes the plan of a boot, and measures what that needs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.tiers import Tier
from penstock.base.trace import Trace
from penstock.base.units import format_rate, format_size
from penstock.engine import rooms
from penstock.engine.contexts import LongRoom
from penstock.engine.cpu import cpu_blocker, refusal
from penstock.engine.cpu_rates import cpu_read
from penstock.engine.hardware import read_hardware
from penstock.engine.plan import BootPlan, Measured, Outline, plan_boot
from penstock.memory.device import give_back
from penstock.memory.probe import copy_rate, file_read, memory_read
from penstock.models.inputs import Routing
from penstock.ops.native.few_bits import find_library
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.pack.cache import cached_pack
from penstock.weights.pack.reader import Pack
from penstock.weights.streaming.loading import Loading, counted
from penstock.weights.streaming.residency import ExpertRoom, WeightLimits, padded
from penstock.weights.streaming.ring import SKEW, StreamRates
from penstock.weights.streaming.source import (
    CheckpointSource,
    PackSource,
    RandomSource,
    Sources,
    WeightSource,
)
from penstock.worker.structures import Guide

Model = Checkpoint | Pack | Shape
Say = Callable[[str], None]
_LINK_SECONDS, _DISK_SECONDS = 0.4, 2.0
"""Seconds for which links and the disk are measured. Some disks take a while to reach their rate."""
_MEASURED = 4 << 30
"""Bytes of weights for which a second of measuring is spent, if that is shorter."""
_ROUNDED = "the CPU computes {}: its sums are rounded otherwise than the device's, so tokens may differ"
_LEAST_READ = 16 << 20
"""Least bytes of memory to measure its rate with, however small the budget."""


class RoutingSource(Protocol):
    """Makes a routing for each rank of an engine; it is sent to them."""

    def on(self, spec: ModelSpec, rows: int, device: torch.device, dtype: torch.dtype) -> Routing:
        """Return the routing of a model, for decode steps of up to `rows` rows, with scores of `dtype`."""


@dataclass(frozen=True, slots=True)
class Override:
    """Replaces what a boot would find, for measurements and tests.

    limits: bytes for weights, instead of what the budgets leave. The disk is used if it must be.
    disk: reader of the weights that stay on disk, instead of the model's own source, and the file or device
        that it reads.
    routing: makes what replaces the scores of routers.
    """

    limits: WeightLimits | None = None
    disk: tuple[WeightSource, Path] | None = None
    routing: RoutingSource | None = None


@dataclass(frozen=True, slots=True)
class BootContext:
    """Holds what a boot is given beside its config and its model.

    say: is told what was decided. trace: takes spans of waits. loading: takes the progress of loading. guide:
    keeps outputs to a structure; without one they have none. draft: a second model, smaller and with the same
    vocabulary.
    """

    say: Say = lambda _: None
    trace: Trace | None = None
    override: Override = field(default_factory=Override)
    loading: Loading | None = None
    guide: Guide | None = None
    draft: Model | None = None


@dataclass(frozen=True, slots=True)
class PlacedWeights:
    """Holds a plan, the sources of weights, and the rates that were measured for it.

    disk: source of the weights that stay on disk.
    rates: None if nothing streams.
    """

    plan: BootPlan[LongRoom]
    sources: Sources
    rates: StreamRates | None


def host_room(config: Config, device: torch.device) -> int:
    """Return the bytes that weights may take in host memory now. Raises BudgetError."""
    return rooms.host_room(config, read_hardware(device))


def place(
    outline: Outline[LongRoom], activations: int, model: Model, device: torch.device, context: BootContext
) -> PlacedWeights:
    """Return the plan of a boot. Links and the disk are measured where weights stream.

    If the disk is needed and the model is no pack, a pack is made in the cache.

    activations: bytes of the device for all but weights and KV.

    Raises BudgetError and CheckpointError.
    """
    config, layouts, override, say = outline.settings, outline.layouts, context.override, context.say
    source = source_of(model, outline.dtype)
    disk, store = override.disk or (source, None)
    there = not isinstance(model, Shape) or store is not None
    measured = Measured(activations, read_hardware(device), there)
    found = plan_boot(outline, measured, override.limits)
    if not found.streams:
        return PlacedWeights(found, Sources(source, disk), None)
    total = sum(map(padded, layouts))
    if found.needs_disk and store is None:
        if isinstance(model, Checkpoint):
            progress, cache = counted("packing", total, context.loading), config.cache.expanduser()
            source = disk = PackSource(cached_pack(model, outline.dtype, cache, progress, say, outline.shard))
        assert isinstance(source, PackSource)
        store = source.pack.store.path
    say(
        "measuring the rates of the link to the device and of the disk"
        if found.needs_disk
        else ("measuring the rate of the link to the device")
    )
    # What is small is as fast as it is: measuring must not take longer than it can be worth.
    longest, most = total / _MEASURED, max(found.limits.device // 2, _LEAST_READ)
    rates = StreamRates(
        host_to_device=copy_rate(device, most // 2, min(longest, _LINK_SECONDS)),
        disk_to_host=file_read(store, min(longest, _DISK_SECONDS)).read
        if found.needs_disk and store
        else 0.0,
        device_read=memory_read(device, most, min(longest, _LINK_SECONDS)),
        skew=SKEW if outline.shard.ranks > 1 and device.type == "cuda" else 0.0,
    )
    if wants_cpu_rates(found, say):
        rates = replace(rates, cpu_read=cpu_read(found, device, rates))
    give_back(device)
    read = f", disk {format_rate(rates.disk_to_host)}" if found.needs_disk else ""
    say(
        f"measured: link {format_rate(rates.host_to_device)}{read}, device memory "
        f"{format_rate(rates.device_read)}"
    )
    found = plan_boot(outline, replace(measured, rates=rates), override.limits)
    found = replace(found, experts=_with_compiled(found, say))
    placement, experts = found.placement, found.experts
    if placement.cpu is not None:
        say(_ROUNDED.format("feed-forwards"))
    elif rates.cpu_read:
        say("the CPU computes no feed-forwards, since the link is predicted to be as fast")
    if experts is None:
        say(f"weights: {placement}")
    else:
        stays = (
            f"all {format_size(placement.resting(Tier.DEVICE))} stay on the device"
            if placement.everything_resident
            else str(placement)
        )
        say(f"weights: of what every token needs, {stays}; {experts}")
    return PlacedWeights(found, Sources(source, disk), rates)


def _with_compiled(plan: BootPlan[LongRoom], say: Say) -> ExpertRoom | None:
    """Return the experts' room of a plan: without the CPU, where no C compiler is. Raises ConfigError if the
    CPU must compute."""
    experts, config = plan.experts, plan.outline.settings
    if experts is None or config.cpu_compute == "off":
        return experts
    why = cpu_blocker(plan.outline, plan.placement, experts) or find_library(config.cache.expanduser(), say)
    if not why:
        say(_ROUNDED.format("experts"))
        return experts
    if config.cpu_compute == "on":
        raise refusal(why)
    say(f"the CPU computes no experts, since {why}")
    return replace(experts, cpu=None)


def wants_cpu_rates(plan: BootPlan[LongRoom], say: Say) -> bool:
    """Tell whether the CPU's rate is to be measured, since it may compute feed-forwards; say why not, where
    that was asked. Raises ConfigError if the CPU must compute."""
    config, outline = plan.outline.settings, plan.outline
    if config.cpu_compute == "off" or plan.experts is not None:
        return False
    why = cpu_blocker(outline, plan.placement, None) or find_library(config.cache.expanduser(), say)
    if not why:
        return True
    if config.cpu_compute == "on":
        raise refusal(why)
    say(f"the CPU computes no feed-forwards, since {why}")
    return False


def source_of(model: Model, dtype: str) -> WeightSource:
    """Return what reads a model's weights."""
    if isinstance(model, Checkpoint):
        return CheckpointSource(model)
    return PackSource(model) if isinstance(model, Pack) else RandomSource(dtype)
