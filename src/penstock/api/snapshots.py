"""Say, in frozen values, where the bytes of a loaded model rest at a moment."""

from dataclasses import dataclass
from typing import Self

from penstock.base.meter import KVStats, WeightStats
from penstock.engine.boot import Booted
from penstock.engine.budget import Budget
from penstock.step.plan import Route


@dataclass(frozen=True, slots=True)
class PrefixCounts:
    """Counts the work of the prefix cache since the engine started.

    prompt_tokens: tokens of all prompts.
    device, host, disk: those of them whose KV was found on a tier.
    loaded_blocks: KV blocks that were copied to the device.
    evicted_blocks: KV blocks of the device that made room for others.
    """

    prompt_tokens: int
    device: int
    host: int
    disk: int
    loaded_blocks: int
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Describes the memory of a loaded model at a moment: its budget, and where weights and KV rest.

    budget: bytes of the device.
    weights: bytes of weights on each tier, and those that have moved.
    kv: KV of long contexts; None where there is no room for any.
    host_blocks, disk_blocks: KV blocks that host memory and the disk have room for.
    copied_per_pass: bytes of weights that a forward pass copies to the device.
    read_per_pass: bytes of weights that a forward pass reads from disk.
    prefixes: counts of the prefix cache.
    """

    budget: Budget
    weights: WeightStats
    kv: KVStats | None
    host_blocks: int
    disk_blocks: int
    copied_per_pass: int
    read_per_pass: int
    prefixes: PrefixCounts

    @classmethod
    def of(cls, booted: Booted) -> Self:
        """Return the memory of a booted engine. May be called from any thread, also while a step runs, for
        which it does not wait."""
        scheduler, placement = booted.engine.scheduler, booted.weights.placement
        host, tiers, counts = scheduler.host, scheduler.tiers, scheduler.tiers.counts
        kept = tiers.disk.capacity if tiers.disk is not None else 0
        return cls(
            budget=booted.budget,
            weights=booted.weights.stats(exact=not booted.engine.busy),
            kv=booted.engine.kv_stats(),
            host_blocks=host.near,
            disk_blocks=host.blocks - host.near + kept,
            copied_per_pass=placement.streamed,
            read_per_pass=placement.read,
            prefixes=PrefixCounts(
                counts.prompts,
                counts.found,
                counts.found_host,
                counts.found_disk,
                counts.moved[Route.UP],
                tiers.pages.evicted,
            ),
        )
