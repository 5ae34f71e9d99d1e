"""Decides where weights rest: how much memory there is on each tier, what the links are worth, and which
placement follows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from penstock.arch.layout import GroupLayout
from penstock.arch.shards import WHOLE, Shard
from penstock.base.config import Config
from penstock.base.errors import BudgetError
from penstock.base.tiers import Tier
from penstock.base.units import format_rate, format_size, parse_size
from penstock.engine.budget import GROWTH, cpu_ring
from penstock.memory.device import free_memory, give_back, total_memory
from penstock.memory.probe import copy_rate, file_read, memory_read
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.pack.cache import cached_pack
from penstock.weights.pack.reader import Pack
from penstock.weights.streaming.loading import Progress
from penstock.weights.streaming.residency import (
    ExpertRoom,
    Limits,
    Placement,
    Use,
    padded,
    solve,
    solve_model,
)
from penstock.weights.streaming.ring import Rates
from penstock.weights.streaming.source import CheckpointSource, PackSource, RandomSource, Source

Model = Checkpoint | Pack | Shape
Say = Callable[[str], None]
_USUAL = Rates(host_to_device=25e9, disk_to_host=3e9, device_read=1e12)
"""What is asked of them before anything was measured is only whether there is a placement at all."""
_LINK_SECONDS, _DISK_SECONDS = 0.4, 2.0
"""How long links are measured. Some disks take their time to reach their rate."""
_MEASURED = 4 << 30
"""Bytes of weights for which they are measured a second, if not that long."""
_LEAST_READ = 16 << 20
"""Bytes of memory to measure its rate with, at least, however small the budget."""
_HOST_SHARE = 0.8
"""Of the host's free memory, when no budget was given."""


@dataclass(frozen=True, slots=True)
class Override:
    """What measurements and tests want otherwise.

    limits: for weights, instead of what the budgets leave (but disk, which is used if it must be). disk: what
    reads the weights that stay on disk, instead of the model's own source, and the file or device that it
    reads.
    """

    limits: Limits | None = None
    disk: tuple[Source, Path] | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement, where its bytes come from, and what was measured for it: nothing, if nothing streams."""

    placement: Placement
    experts: ExpertRoom | None
    source: Source
    disk: Source
    """The same, for what stays on disk."""
    rates: Rates | None
    beside: int = 0
    """Bytes of the device's room that the host's part of weights takes: on a CPU, where both are one
    memory."""

    def close(self) -> None:
        """For when nobody takes it over."""
        for source in {self.source, self.disk}:
            source.close()


def host_room(config: Config, device: torch.device) -> int:
    """Bytes that weights may take in host memory. On a CPU, what host_memory allows beyond device_memory.
    Raises BudgetError."""
    host = torch.device("cpu")
    whole, free = total_memory(host), free_memory(host)
    if device.type == "cpu":
        both = config.host_memory is not None and config.device_memory is not None
        asked = [
            parse_size(size, whole=whole)
            for size in (config.host_memory, config.device_memory)
            if size is not None
        ]
        return max(asked[0] - asked[1], 0) if both else 0
    if config.host_memory is None:
        return int(free * _HOST_SHARE)
    asked_for, taken = parse_size(config.host_memory, whole=whole), int(psutil.Process().memory_info().rss)
    if asked_for - taken > free:
        raise BudgetError(
            f"{format_size(asked_for)} of host memory were asked for, but only {format_size(free)} are "
            "free; ask for less"
        )
    return max(asked_for - taken - GROWTH, 0)


def place(
    config: Config,
    model: Model,
    layouts: Sequence[GroupLayout],
    dtype: str,
    device: torch.device,
    room: int,
    *,
    taken: int = 0,
    say: Say,
    progress: Progress | None = None,
    override: Override | None = None,
    shard: Shard = WHOLE,
) -> Placed:
    """Where each group rests, with `room` bytes of the device for weights and rings, and what host memory has
    beside `taken` bytes.

    Where the disk is needed and the model is no pack, one is made in the cache. Raises BudgetError,
    CheckpointError.
    """
    override = override or Override()
    everything = [Use(layout.id, padded(layout)) for layout in layouts]
    total = sum(use.size for use in everything)
    source = _source(model, dtype)
    disk, store = override.disk or (source, None)
    if total <= (override.limits.device if override.limits else room):
        return Placed(solve(everything, Limits(total, 0, 0), _USUAL), None, source, disk, None)
    beside = 0
    if override.limits:
        limits = override.limits
    else:
        host = max(host_room(config, device) - taken, 0)
        if device.type == "cpu" and host == 0:
            host = beside = cpu_ring(room, layouts)
        limits = Limits(max(room - beside, 0), host)
    tied = model.spec.tied_embeddings
    disk_there = not isinstance(model, Shape) or store is not None
    _, _, needs_disk = solve_model(layouts, tied, limits, _USUAL, disk_there)
    if needs_disk and store is None:
        if isinstance(model, Checkpoint):
            source = disk = PackSource(
                cached_pack(model, dtype, config.cache.expanduser(), progress, say, shard)
            )
        assert isinstance(source, PackSource)
        store = source.pack.store.path
    say("measuring what links and disk can do" if needs_disk else "measuring what the link can do")
    # What is small is as fast as it is: measuring must not take longer than it can be worth.
    longest, most = total / _MEASURED, max(limits.device // 2, _LEAST_READ)
    rates = Rates(
        host_to_device=copy_rate(device, most // 2, min(longest, _LINK_SECONDS)),
        disk_to_host=file_read(store, min(longest, _DISK_SECONDS)).read if needs_disk and store else 0.0,
        device_read=memory_read(device, most, min(longest, _LINK_SECONDS)),
    )
    give_back(device)
    read = f", disk {format_rate(rates.disk_to_host)}" if needs_disk else ""
    say(
        f"measured: link {format_rate(rates.host_to_device)}{read}, device memory "
        f"{format_rate(rates.device_read)}"
    )
    placement, experts, _ = solve_model(layouts, tied, limits, rates, needs_disk)
    if experts is None:
        say(f"weights: {placement}")
    else:
        stays = (
            f"all {format_size(placement.resting(Tier.DEVICE))} stay on the device"
            if placement.everything_resident
            else str(placement)
        )
        say(f"weights: of what every token needs, {stays}; {experts}")
    return Placed(placement, experts, source, disk, rates, beside)


def _source(model: Model, dtype: str) -> Source:
    if isinstance(model, Checkpoint):
        return CheckpointSource(model)
    return PackSource(model) if isinstance(model, Pack) else RandomSource(dtype)
