"""What a process has of memory, as Linux tells it."""

import mmap
from pathlib import Path

STATM = Path("/proc/self/statm")


def resident_pages() -> int:
    """Bytes of this process that are resident."""
    return int(STATM.read_text().split()[1]) * mmap.PAGESIZE


def private_pages() -> int:
    """Bytes of this process that are resident and in no file."""
    _, resident, shared, *_ = STATM.read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE
