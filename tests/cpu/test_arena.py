"""Pinned memory is unpinned before it is unmapped, also where nobody closes it. The driver is a list here."""

import gc
import mmap
import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from penstock.memory import arena
from penstock.memory.arena import Arena

CPU = torch.device("cpu")
SIZE = 3 << 20


def is_mapped(address: int) -> bool:
    spans = (
        line.split(maxsplit=1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(first, 16) <= address < int(end, 16) for first, end in spans)


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The addresses that were unpinned, and whether they were mapped then."""
    found: list[tuple[int, bool]] = []
    monkeypatch.setattr(arena, "_unregister", lambda address: found.append((address, is_mapped(address))))
    return found


def pinned() -> Arena:
    with patch.object(Arena, "_register"):
        made = Arena(SIZE, CPU, pinned_for=torch.device("cuda"))
    assert made._mapping is not None
    made._mapping.pinned = made.bytes.data_ptr()
    return made


def test_what_is_closed_is_unpinned_once(unpinned: list[tuple[int, bool]]) -> None:
    made = pinned()
    address = made.bytes.data_ptr()
    made.close()
    made.close()
    del made
    gc.collect()
    assert unpinned == [(address, True)]
    assert not is_mapped(address)


def test_what_is_dropped_is_unpinned_while_it_is_mapped_and_when_its_last_view_goes(
    unpinned: list[tuple[int, bool]],
) -> None:
    made = pinned()
    address, view = made.bytes.data_ptr(), made.bytes[4096:8192]
    del made
    gc.collect()
    assert unpinned == []
    assert view.fill_(7).sum() == 7 * 4096
    del view
    gc.collect()
    assert unpinned == [(address, True)]
    assert not is_mapped(address)


def test_an_arena_of_nothing_is_closed_like_any_other() -> None:
    made = Arena(0, CPU)
    made.close()
    assert made.bytes.shape == (0,)


def test_a_forked_process_frees_nothing_of_its_parents(unpinned: list[tuple[int, bool]]) -> None:
    """Its own finalizers close what it has inherited, and what is pinned is shared."""
    for make in (pinned, lambda: Arena(SIZE, CPU)):
        made = make()
        made.bytes.fill_(7)
        if not (child := os.fork()):
            made.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert bool((made.bytes == 7).all())
        assert unpinned == []
        made.close()
        unpinned.clear()


def flags_of(address: int) -> set[str]:
    """What the kernel says of the mapping that an address is in: hg may be huge pages, wf is zeros in
    forked processes, sh is shared."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return set(rest)
    return set()


def test_what_is_pinned_may_be_huge_pages_and_stays_with_its_process(
    unpinned: list[tuple[int, bool]],
) -> None:
    """A disk reads several times as slowly into small pages, of which shared memory is."""
    made = pinned()
    address = made.bytes.data_ptr()
    found = flags_of(address)
    assert "sh" not in found
    assert {"hg", "wf"} <= found
    made.bytes.fill_(7)
    if not (child := os.fork()):
        os._exit(bool(made.bytes.any()))
    assert os.waitpid(child, 0)[1] == 0
    assert bool((made.bytes == 7).all())
    made.close()


def test_a_forked_process_may_drop_what_it_inherits_without_losing_its_own(
    unpinned: list[tuple[int, bool]],
) -> None:
    """Were nothing mapped there, its own memory would come to lie there, and be unmapped with the arena."""
    made = pinned()
    if not (child := os.fork()):
        own = [torch.from_numpy(np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)) for _ in range(4)]
        made.bytes.fill_(1)
        del made
        gc.collect()
        for one in own:
            one.fill_(2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    made.close()
