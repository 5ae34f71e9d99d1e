"""What a piece of work takes of a CPU's memory at its peak."""

import mmap
from pathlib import Path

import torch

from penstock.memory.device import peak_of

_CPU = torch.device("cpu")
_SIZE = 96 << 20


def test_the_peak_is_what_was_taken_meanwhile() -> None:
    peak = peak_of(_CPU, lambda: torch.ones(_SIZE // 4).sum().item())
    assert _SIZE * 15 // 16 <= peak <= _SIZE * 3 // 2


def test_pages_of_files_are_none_of_the_peak(tmp_path: Path) -> None:
    """As those of a library are that is called for the first time."""
    path = tmp_path / "file"
    path.write_bytes(bytes(_SIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert peak_of(_CPU, lambda: sum(pages[:: mmap.PAGESIZE])) <= _SIZE // 4
