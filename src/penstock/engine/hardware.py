"""Reads what a plan needs to know of the machine."""

import psutil
import torch

from penstock.engine.rooms import Hardware
from penstock.memory.device import begins_early, free_memory, native_half, stuck_memory, total_memory
from penstock.ops.attention.attend import reads_pages


def read_hardware(device: torch.device) -> Hardware:
    """Return the machine as it is now, with this device."""
    host = torch.device("cpu")
    return Hardware(
        cuda=device.type == "cuda",
        free=free_memory(device) - stuck_memory(device),
        whole=total_memory(device),
        host_free=free_memory(host),
        host_whole=total_memory(host),
        process=int(psutil.Process().memory_info().rss),
        halves=native_half(device),
        kernels=reads_pages(device),
        pdl=begins_early(device),
    )
