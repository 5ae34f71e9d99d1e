"""A stream of lanes is one stream to everybody else, whatever is late, wherever it is interrupted; and each
of its waits is needed for that."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.memory.device import choose_device
from penstock.memory.link import LumpStream, lumps
from penstock.memory.streams import ThreadStream, Ticket
from streams import Gates, cut_short, random_delays

LUMP = 64


class Lane(ThreadStream):
    """A lane whose copies may be late or held. Its places are ("copy", lane, number)."""

    def __init__(self, number: int, gates: Gates) -> None:
        super().__init__(f"lane {number} under test")
        self.number, self.gates = number, gates
        self.copies = self.waits = 0
        self.deaf: int | None = None
        """Which of its waits does nothing, counted from 0."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        place, self.copies = ("copy", self.number, self.copies), self.copies + 1
        self.run(lambda: self.gates.enter(place))
        super().copy(target, source)

    def wait(self, ticket: Ticket) -> None:
        if self.waits != self.deaf:
            super().wait(ticket)
        self.waits += 1


@contextmanager
def lanes(gates: Gates) -> Iterator[tuple[LumpStream, list[Lane]]]:
    each = [Lane(number, gates) for number in range(2)]
    stream = LumpStream((each[0], each[1]), LUMP)
    yield stream, each
    gates.open()
    stream.close()


def numbers(size: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8))


def pieces_of(size: int, seed: int) -> np.ndarray:
    """Pieces of a tensor in another order, of some bytes up to some lumps each."""
    rng = np.random.default_rng(seed)
    bounds = np.unique(np.concatenate(([0, size], rng.integers(1, size, 6))))
    at, sizes = bounds[:-1], np.diff(bounds)
    order = rng.permutation(len(at))
    to = np.zeros(len(at), np.int64)
    to[order] = np.cumsum(sizes[order]) - sizes[order]
    return np.stack((to, at, sizes), 1)[order]


@pytest.mark.parametrize("seed", range(20))
def test_lumps_are_the_same_bytes_in_their_order(seed: int) -> None:
    pieces = pieces_of(1000 + seed, seed)
    cut = lumps(pieces, LUMP)
    bytes_of = [(to + n, at + n) for to, at, size in pieces.tolist() for n in range(size)]
    assert [
        (to + n, at + n) for to, at, size in np.concatenate(cut).tolist() for n in range(size)
    ] == bytes_of
    assert all(0 < size <= LUMP for size in np.concatenate(cut)[:, 2])
    assert all(part[:, 2].sum() < 2 * LUMP for part in cut)
    assert len(cut) <= len(bytes_of) // LUMP + 1


def play(stream: LumpStream, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Copy to one tensor again and again, large and small, as a whole and in pieces, and take it down each
    time. Return what was taken down, and what should have been."""
    target, expected = (torch.zeros(max(sizes), dtype=torch.uint8) for _ in range(2))
    taken = list[tuple[Tensor, Tensor]]()
    for turn, size in enumerate(sizes):
        source = numbers(size, turn)
        if turn % 2:
            pieces = pieces_of(size, turn)
            stream.copy_pieces(target[:size], source, pieces)
            for to, at, count in pieces.tolist():
                expected[to : to + count] = source[at : at + count]
        else:
            stream.copy(target[:size], source)
            expected[:size] = source
        taken.append((torch.zeros_like(target), expected.clone()))
        stream.copy_rows(taken[-1][0].view(1, -1), target.view(1, -1))
    stream.mark().wait()
    return taken


SIZES = [1000, 64, 700, 1000, 130, 20, 999]


@pytest.mark.parametrize("seed", range(6))
def test_what_is_queued_behind_a_copy_comes_behind_all_of_it(seed: int) -> None:
    with lanes(Gates(delay=random_delays(seed))) as (stream, _):
        assert all(torch.equal(seen, expected) for seen, expected in play(stream, SIZES))


def test_copies_are_cut_only_where_others_need_the_link() -> None:
    with lanes(Gates()) as (stream, each):
        source, target = numbers(8 * LUMP, 0), torch.zeros(8 * LUMP, dtype=torch.uint8)
        for shared, copies in ((False, [1, 0]), (True, [5, 4])):
            stream.shared = shared
            stream.copy(target, source)
            assert [lane.copies for lane in each] == copies
        stream.mark().wait()
        assert torch.equal(target, source)


def test_a_lump_comes_after_the_one_before_it() -> None:
    gates = Gates(shut=[("copy", 1, 1)])
    with lanes(gates) as (stream, _):
        source, target = numbers(8 * LUMP, 0), torch.zeros(8 * LUMP, dtype=torch.uint8)
        stream.copy(target, source)
        gates.passes(("never",), 0.05)
        there = (target.view(8, LUMP) == source.view(8, LUMP)).all(1).tolist()
        assert there == [True] * 3 + [False] * 5, "lump 3 is held"
        gates.open()
        stream.mark().wait()
        assert torch.equal(target, source)


def test_the_second_lane_needs_to_wait_for_what_was_queued_before() -> None:
    gates = Gates(shut=[("copy", 0, 0)])
    with lanes(gates) as (stream, each):
        first, then = numbers(LUMP, 1), numbers(4 * LUMP, 2)
        target = torch.zeros(4 * LUMP, dtype=torch.uint8)
        stream.copy(target[LUMP : 2 * LUMP], first)  # It is held, and is to be written over.
        each[1].deaf = 0
        stream.copy(target, then)
        gates.passes(("never",), 0.05)
        gates.open()
        stream.mark().wait()
        assert not torch.equal(target, then)


def test_the_first_lane_needs_to_wait_for_the_second() -> None:
    gates = Gates(shut=[("copy", 1, 0)])
    with lanes(gates) as (stream, each):
        source, target = numbers(2 * LUMP, 1), torch.zeros(2 * LUMP, dtype=torch.uint8)
        each[0].deaf = 0
        stream.copy(target, source)
        out = torch.zeros(LUMP, dtype=torch.uint8)
        stream.copy(out, target[LUMP:])
        stream.mark().wait()
        gates.open()
        each[1].mark().wait()
        assert not torch.equal(out, source[LUMP:])


def test_an_interrupted_copy_is_in_front_of_what_comes_next() -> None:
    struck = 0
    for places in range(0, 1000, 4):
        gates = Gates(delay=lambda place: 1e-3 if place[1] else 0.0)  # type: ignore[index]
        with lanes(gates) as (stream, each):
            old, new = numbers(4 * LUMP, 1), numbers(4 * LUMP, 2)
            target = torch.zeros(4 * LUMP, dtype=torch.uint8)
            if not cut_short(partial(stream.copy, target, old), places):
                break
            struck += 1
            for at in range(0, 4 * LUMP, LUMP):  # These are small, and so on the first lane.
                stream.copy(target[at : at + LUMP], new[at : at + LUMP])
            for one in (stream, *each):
                one.mark().wait()
            assert torch.equal(target, new), "a lump of the interrupted copy came later"
    assert struck > 9


def test_cuda_is_asked_for_all_connections_unless_somebody_asks_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, "4")
    choose_device("cpu")
    assert os.environ[name] == "4"
    monkeypatch.delenv(name)
    choose_device("cpu")
    assert os.environ[name] == "32"
