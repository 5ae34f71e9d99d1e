"""What a piece of work takes of a CPU's memory at its peak."""

import mmap
from pathlib import Path

import pytest
import torch

from pages import STATM, private_pages, resident_pages
from penstock import LLM
from penstock.base.config import Config
from penstock.base.errors import BudgetError
from penstock.engine import hardware, settling
from penstock.memory.device import Heap, peak_of

_CPU = torch.device("cpu")
_SIZE = 96 << 20


def test_the_peak_is_what_was_taken_meanwhile() -> None:
    def work() -> None:
        first = torch.ones(_SIZE // 8)
        del first
        torch.ones(_SIZE // 4).sum().item()

    assert _SIZE <= peak_of(_CPU, work) <= _SIZE + 4096


def test_the_peak_is_the_same_whatever_was_freed_before() -> None:
    """Of pages that the process has already it would gain none, and in a heap full of holes it may need
    more."""
    sizes = range(100, 200_000, 1000)
    found = set()
    for _ in range(3):
        found.add(peak_of(_CPU, lambda: [torch.ones(size) for size in sizes]))
        holes = [torch.ones(size // 3) for size in sizes for _ in range(3)]
        del holes[::2]
        found.add(peak_of(_CPU, lambda: [torch.ones(size) for size in sizes]))
    [peak] = found
    assert peak >= 4 * sum(sizes)


def test_what_was_there_before_is_no_part_of_it() -> None:
    before = [torch.ones(_SIZE // 4)]
    assert peak_of(_CPU, lambda: [before.clear(), torch.ones(1000)]) <= 2 * 4096


def test_pages_of_files_are_none_of_the_peak(tmp_path: Path) -> None:
    """As those of a library are that is called for the first time."""
    path = tmp_path / "file"
    path.write_bytes(bytes(_SIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert peak_of(_CPU, lambda: sum(pages[:: mmap.PAGESIZE])) <= _SIZE // 4


@pytest.mark.skipif(not STATM.exists(), reason="Linux tells a process's pages")
def test_a_heap_keeps_no_more_holes_than_it_may() -> None:
    heap = Heap(4 << 20)
    blocks = [torch.ones(25_000) for _ in range(400)]
    there = private_pages()
    del blocks[::2]
    assert private_pages() > there - (4 << 20), (
        "what should stay in the heap went back by itself: there is nothing to test"
    )
    assert heap.tidy()
    assert private_pages() < there - (12 << 20)
    assert not heap.tidy()
    blocks = []
    assert not heap.tidy(), "it trims where there is no more than it may keep"


@pytest.mark.skipif(not STATM.exists(), reason="Linux tells a process's pages")
def test_a_closed_model_has_given_its_memory_back_though_it_is_still_known() -> None:
    with LLM(device="cpu", device_memory="256MiB", max_length=256) as llm:
        weights = llm.booted.weights.bytes
        there = resident_pages()
    assert llm.memory.weights.device == weights, "what it was is still told"
    assert resident_pages() < there - weights * 9 // 10


@pytest.mark.skipif(not STATM.exists(), reason="Linux tells a process's pages")
def test_what_is_in_use_is_trimmed_for_once() -> None:
    heap = Heap(4 << 20)
    kept = torch.ones(4 << 20)
    assert heap.tidy()
    assert not heap.tidy()
    assert kept.sum() == 4 << 20


def test_what_torch_cannot_give_back_is_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(Path(), device="cpu")
    monkeypatch.setattr(hardware, "free_memory", lambda device: 8 << 30)
    whole = settling.device_budget(config, _CPU)
    monkeypatch.setattr(hardware, "stuck_memory", lambda device: 2 << 30)
    assert settling.device_budget(config, _CPU) == whole * 3 // 4
    with pytest.raises(BudgetError, match=r"7\.00 GiB .* only 6\.00 GiB are free"):
        settling.device_budget(Config(Path(), device="cpu", device_memory="7GiB"), _CPU)


def test_a_cap_that_leaves_nothing_says_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "cap_memory", lambda device, size, pinned: size - (3 << 30))
    assert settling.capped(_CPU, 4 << 30, 0) == 1 << 30
    with pytest.raises(BudgetError, match=r"2\.00 GiB .* already uses 3\.00 GiB"):
        settling.capped(_CPU, 2 << 30, 0)
