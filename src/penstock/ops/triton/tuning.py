"""Chooses how attention kernels are cut for a device: keys a tile, warps a program, and programs."""

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """DecodeTuning says how decode attention is cut for a device.

    tile: keys of a tile.
    warps: warps of a program.
    depth: tiles in flight in a program.
    workers_per_sm: programs of a multiprocessor.
    overlap: whether the join is launched while decode still runs, and waits on the device.
    least: least number of tiles of a run. A run of one tile is over before it is under way, and makes one
        more part to join.
    """

    tile: int
    warps: int
    depth: int
    workers_per_sm: int
    overlap: bool = False
    least: int = 1


def cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up. Triton's own takes a host twenty times as long, for every launch."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below n, or 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


@lru_cache(maxsize=64)
def decode_tuning(head_dim: int, itemsize: int, block_size: int) -> DecodeTuning:
    """Choose the tuning for heads of `head_dim` numbers of `itemsize` bytes: the one place for constants.

    32 KiB of K and V a tile keep enough bytes in flight. A tile inside one block needs one table entry.
    """
    row = max(16, next_power_of_2(head_dim)) * itemsize
    tile = min(64, max(16, 16384 // row))
    if itemsize > 2:  # exact fp32 products go through plain registers
        tile = min(tile, 32)
    if block_size >= 32:
        tile = min(tile, block_size)
    whole = tile * row >= 16384
    return DecodeTuning(
        tile=tile, warps=4, depth=2 if whole else 3, workers_per_sm=2 if whole else 4, least=2
    )


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; on the CPU, where kernels are interpreted, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
