"""The kernels that bring a recorded step's experts in one launch, interpreted on the CPU: one program after the
other, as each would go by itself."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from unittest.mock import patch

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import bounds
from penstock.arch.layout import GroupId, GroupKind, MixtureLayout
from penstock.memory.streams import CallerStream
from penstock.ops.slots import COPIERS, ExpertParts, FetchQueue
from penstock.ops.triton import steady as triton_steady
from penstock.weights.streaming import slotted
from penstock.weights.streaming.experts import Experts
from penstock.weights.streaming.residency import ExpertRoom
from penstock.weights.streaming.slots import SlotRule
from penstock.weights.streaming.slotted import SlotExperts
from penstock.weights.streaming.waits import StreamWaits
from streams import Gates, Store, layout

SIZE, LAYERS, EXPERTS = 720, 3, 8
PIECE = 64
"""Bytes; the programs of `bring` take so many at a time here."""


class World:
    """Layers of experts, some in slots; what is computed compares their bytes. Its programs run when something
    is waited for, until all that is asked for has come."""

    def __init__(self, slots: int, ring: int) -> None:
        self.ids = [GroupId(GroupKind.EXPERT, at // EXPERTS, at % EXPERTS) for at in range(LAYERS * EXPERTS)]
        layouts = [layout(id, SIZE) for id in self.ids]
        rng = np.random.default_rng(1)
        self.host = torch.from_numpy(rng.integers(0, 256, (len(self.ids), SIZE), np.uint8))
        self.memory = torch.zeros(slots + ring, SIZE, dtype=torch.uint8)
        compute = CallerStream()
        room = ExpertRoom(SIZE, len(self.ids), 0, len(self.ids), ring, slots=slots, copies=True)
        self.ring = Experts(
            layouts, room, self.memory[slots:], self.host, Store(Gates()), compute, compute, StreamWaits(None)
        )
        self.experts = SlotExperts(
            layouts, dict.fromkeys(range(LAYERS), MixtureLayout(EXPERTS, None)), self.ring, self.memory,
            self.host, (compute, compute), SlotRule(1.0, 0.0),
        )  # fmt: skip
        self.experts.look_ahead()
        self.queue, self.bring, self.launched = self.experts._queue, triton_steady.bring, 0
        self.kept: Callable[[], None] = lambda: None

    def launch(self, *given: object, **more: object) -> None:
        """In place of the launch: the interpreter has one thread."""
        self.launched += 1

        def go() -> None:
            self.queue.ended.fill_(int(self.experts._slot_table.now))
            self.bring(*given, **more)
            self.queue.ended.fill_(0)

        self.kept = go

    def wait(self, *given: object, ends: bool, **more: object) -> None:
        """In place of the wait, which would last for ever: first all comes that was asked for before."""
        self.kept()  # What is asked for in the wait itself comes with the next, as late as may be.
        triton_steady_await(*given, ends=ends, **more)

    def layer(self, layer: int, chosen: set[int]) -> None:
        pairs = torch.tensor([one in chosen for one in range(EXPERTS)]).int()
        parts = self.experts.recorded().parts(layer, pairs, len(chosen))
        assert parts is not None
        seen = set[int]()
        for table in parts:
            seen |= self.right(layer, table)
        assert seen == chosen

    def right(self, layer: int, table: torch.Tensor) -> set[int]:
        there = {expert for expert, (address, *_) in enumerate(table.tolist()) if address}
        for expert in there:
            place = (int(table[expert, 0]) - self.memory.data_ptr()) // SIZE
            assert torch.equal(self.memory[place], self.host[layer * EXPERTS + expert]), (layer, expert)
        return there


triton_steady_await = triton_steady.await_part


@contextmanager
def world(slots: int, ring: int) -> Iterator[World]:
    made = World(slots, ring)
    with (
        patch.object(slotted, "are_noted", lambda: True),
        patch.object(triton_steady, "bring", made.launch),
        patch.object(triton_steady, "await_part", made.wait),
        patch.object(triton_steady, "_WORDS", PIECE // 4),
        bounds.lent(map(bounds.span, (made.host, made.memory))),
    ):
        yield made
    made.ring.close()


@pytest.mark.parametrize(("slots", "ring"), [(0, 2), (5, 2), (7, 3), (6, 4), (24, 8)])
def test_what_is_asked_for_has_come(slots: int, ring: int) -> None:
    """Few and many of a layer, by parts whose places are used again, and all that are in slots."""
    rng = np.random.default_rng(slots + ring)
    with world(slots, ring) as made:
        for _ in range(5):
            for layer in range(LAYERS):
                made.layer(layer, set(rng.permutation(EXPERTS)[: rng.integers(1, EXPERTS + 1)].tolist()))
        assert made.launched == 5
        asked, came = int(made.queue.asked[0]), made.queue.came.tolist()
        assert asked > 0
        assert came == [asked] * COPIERS
        for _ in range(2):
            asked = int(made.queue.asked[0])
            for layer in range(LAYERS):
                made.layer(layer, {3})
        assert (int(made.queue.asked[0]) == asked) == (slots > 0)  # nothing is asked for


def test_numbers_wrap_around() -> None:
    with world(4, 4) as made:
        for one in (made.queue.asked, made.queue.came):
            one.fill_(2**31 - 3)
        for layer in range(LAYERS):
            made.layer(layer, {layer, layer + 2, layer + 4})
        assert int(made.queue.asked[0]) < 0


class Alone:
    """One program, on a thread; the test plays the step that asks for experts."""

    def __init__(self, queue: FetchQueue, made: World) -> None:
        self.queue, self.made = queue, made
        self.table = made.experts._slot_table
        self.table.now += 1
        places, arrays = made.experts._places[0], self.table.arrays(0)
        with patch.object(triton_steady, "COPIERS", 1):
            launch = made.bring
            self.thread = Thread(
                target=lambda: launch(queue, arrays, places, made.host.data_ptr(), ahead=True)
            )
            self.thread.start()
            time.sleep(0.2)

    def end(self) -> None:
        self.queue.ended.fill_(int(self.table.now))
        self.thread.join(20)
        assert not self.thread.is_alive()


def test_what_is_foretold_comes_ahead_and_is_used() -> None:
    """What came ahead is taken from there; the rest, and what was foretold wrongly, from the host."""
    with world(0, 6) as made:
        queue, ahead = made.queue, made.memory[-1]
        queue.told[1] = torch.tensor([EXPERTS + 5, 0])
        alone = Alone(queue, made)
        _until(lambda: torch.equal(ahead, made.host[EXPERTS + 5]))
        ahead[:100] = 7  # what is used from there shows it
        made.experts._slot_table.turn += 1
        queue.list[:3] = torch.tensor([0, 1, 2])
        queue.list[2 + EXPERTS : 6 + EXPERTS] = torch.tensor([EXPERTS + 5, 1, EXPERTS + 2, 3])
        queue.asked[0] = 1
        _until(lambda: int(queue.came[0]) == 1)
        assert made.memory[1][:100].tolist() == [7] * 100
        assert torch.equal(made.memory[1][100:], made.host[EXPERTS + 5][100:])
        assert torch.equal(made.memory[3], made.host[EXPERTS + 2])
        # Foretold for a decision that has been made: not begun.
        queue.told[0] = torch.tensor([2 * EXPERTS + 1, 0])
        time.sleep(0.2)
        assert not torch.equal(ahead[100:], made.host[2 * EXPERTS + 1][100:])
        # For the next one: what was there before is not taken for it.
        queue.told[0] = torch.tensor([2 * EXPERTS + 1, 1])
        _until(lambda: torch.equal(ahead, made.host[2 * EXPERTS + 1]))
        queue.list[:3] = torch.tensor([1, 1, 1])
        queue.list[2 + EXPERTS : 4 + EXPERTS] = torch.tensor([EXPERTS + 5, 0])
        made.experts._slot_table.turn += 1
        queue.asked[0] = 2
        _until(lambda: int(queue.came[0]) == 2)
        assert torch.equal(made.memory[0], made.host[EXPERTS + 5])
        alone.end()


def test_a_program_goes_on_without_the_others() -> None:
    """And ends only with the step that it was launched for."""
    with world(0, 6) as made:
        queue = made.queue
        queue.ended.fill_(3)
        made.experts._slot_table.now.fill_(6)
        alone = Alone(queue, made)
        for number in range(3):
            queue.list[:3] = torch.tensor([number, 1, 1])
            queue.list[2 + EXPERTS : 4 + EXPERTS] = torch.tensor([number + 9, number])
            queue.asked[0] = number + 1
            _until(lambda number=number: int(queue.came[0]) == number + 1)
            assert torch.equal(made.memory[number], made.host[number + 9])
        assert queue.came[1:].tolist() == [0] * (COPIERS - 1)
        alone.end()


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.002)
