"""Describes the machine as a boot finds it, and how much of its memory an engine may take."""

from dataclasses import dataclass

from penstock.base.config import Config
from penstock.base.errors import BudgetError
from penstock.base.units import format_size, parse_size
from penstock.engine.budget import GROWTH

HOST_SHARE = 0.8
"""Part of the host's free memory for weights, if no budget was given."""


@dataclass(frozen=True, slots=True)
class StepDefaults:
    """Holds the default step of a device.

    tokens: as many as keep it busy.
    sequences: that share a pass over the weights.
    memory_share: part of the free memory, if no budget was given.
    """

    tokens: int
    sequences: int
    memory_share: float


STEP = {"cpu": StepDefaults(512, 64, 0.5), "cuda": StepDefaults(8192, 256, 0.9)}


@dataclass(frozen=True, slots=True)
class Hardware:
    """Describes a machine as a boot finds it.

    cuda: whether the device is a GPU; otherwise it is the CPU.
    free, whole: bytes of the device's memory, free and in all.
    host_free, host_whole: the same of host memory.
    process: bytes of host memory that this process takes.
    halves: whether the device multiplies bfloat16 in hardware.
    kernels: whether our kernels run there.
    pdl: whether the device has programmatic dependent launch.
    """

    cuda: bool
    free: int
    whole: int
    host_free: int
    host_whole: int
    process: int = 0
    halves: bool = True
    kernels: bool = False
    pdl: bool = False


def device_room(config: Config, hardware: Hardware) -> int:
    """Return the bytes that the engine may take on the device: as asked, or a share of the free memory.

    Raises BudgetError if fewer are free.
    """
    free, whole, usual = hardware.free, hardware.whole, STEP["cuda" if hardware.cuda else "cpu"]
    asked = [config.device_memory] + ([] if hardware.cuda else [config.host_memory])
    sizes = [parse_size(size, whole=whole) for size in asked if size is not None]
    if config.host_memory is not None:
        parse_size(config.host_memory, whole=hardware.host_whole)
    total = min(sizes, default=int(free * usual.memory_share))
    if total > free:
        raise BudgetError(
            f"{format_size(total)} of device memory were asked for, but only {format_size(free)} are free; "
            "lower device_memory, or close what uses it"
        )
    return total


def host_room(config: Config, hardware: Hardware) -> int:
    """Return the bytes that weights may take in host memory; on a CPU, host_memory beyond device_memory.

    Raises BudgetError if fewer are free than were asked for.
    """
    whole, free = hardware.host_whole, hardware.host_free
    if not hardware.cuda:
        if config.host_memory is None or config.device_memory is None:
            return 0
        both, own = (parse_size(size, whole=whole) for size in (config.host_memory, config.device_memory))
        return max(both - own, 0)
    if config.host_memory is None:
        return int(free * HOST_SHARE)
    asked_for = parse_size(config.host_memory, whole=whole)
    if asked_for - hardware.process > free:
        raise BudgetError(
            f"{format_size(asked_for)} of host memory were asked for, but only {format_size(free)} are "
            "free; lower host_memory, or close what uses it"
        )
    return max(asked_for - hardware.process - GROWTH, 0)
