"""Small arrays on their way to a device: each arrives as it was, and none is written over before that."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from penstock.memory import sending
from penstock.memory.sending import SendBuffer, StagingTurns, read_into, seen_by, send

CPU = torch.device("cpu")
PARTS, SIZE = 4, 256


class Late:
    """A stream whose kernels run when they are let; what an SendBuffer asks of a stream."""

    def __init__(self) -> None:
        self.queued, self.done = 0, 0

    def record_event(self) -> "Reached":
        return Reached(self, self.queued)


class Reached:
    def __init__(self, stream: Late, at: int) -> None:
        self._stream, self._at = stream, at

    def query(self) -> bool:
        return self._stream.done >= self._at


class World:
    """An SendBuffer whose kernels read late: what they find is noted when they run."""

    def __init__(self, streams: int = 1) -> None:
        self.host = torch.zeros(PARTS * SIZE, dtype=torch.uint8)
        self.streams = [Late() for _ in range(streams)]
        self.current = self.streams[0]
        self.waiting: dict[Late, deque[tuple[slice, bytes]]] = {one: deque() for one in self.streams}
        self.buffer = SendBuffer(self.host, self.host.view(torch.int64), PARTS, lambda: self.current)  # type: ignore[arg-type, return-value]

    def send(self, values: np.ndarray) -> bool:
        """Send it; False if there was no room. It is read, as it should be now, when `run` says."""
        sent = self.buffer.send(values)
        if sent is None:
            return False
        assert sent.tolist() == values.tolist()
        at = int((self.host.numpy().tobytes()).find(values.tobytes()))
        self.current.queued += 1
        self.waiting[self.current].append((slice(at, at + values.nbytes), values.tobytes()))
        return True

    def run(self, stream: Late, count: int = 1) -> None:
        """Run kernels of a stream: each must find what was sent."""
        for _ in range(count):
            place, want = self.waiting[stream].popleft()
            assert self.host.numpy()[place].tobytes() == want, "written over before it was read"
            stream.done += 1


@pytest.mark.parametrize(
    "values",
    [
        np.arange(7, dtype=np.int64).reshape(7, 1),
        np.arange(5, dtype=np.int32),
        np.array(3, dtype=np.int64),
        np.array([True, False, True]),
        np.array([[-0.0, 1.5], [np.inf, 2.0]], dtype=np.float32),
        np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2],
        np.arange(12, dtype=np.uint8).reshape(3, 4).T,
    ],
)
def test_an_array_arrives_as_it_was(values: np.ndarray) -> None:
    want = torch.from_numpy(values.copy())
    for sent in (World().buffer.send(values), send(values, CPU)):
        assert sent is not None
        assert sent.dtype == want.dtype
        assert sent.shape == want.shape
        assert sent.contiguous().numpy().tobytes() == want.contiguous().numpy().tobytes()


def test_what_is_sent_is_another_tensor() -> None:
    """The memory is written to again, and the tensor stays as it is."""
    world = World()
    first = world.buffer.send(np.arange(8))
    world.host.fill_(255)
    assert first is not None
    assert first.tolist() == list(range(8))


@pytest.mark.parametrize("behind", [0, 3, 30])
def test_nothing_is_written_over_before_it_is_read(behind: int) -> None:
    """Kernels run `behind` arrays late, or as late as there is room."""
    world, rng = World(), np.random.default_rng(behind)
    (stream,) = world.streams
    refused = 0
    for _ in range(300):
        values = rng.integers(1 << 60, size=rng.integers(1, 12))
        while not world.send(values):
            refused += 1
            world.run(stream, len(world.waiting[stream]))
        if len(world.waiting[stream]) > behind:
            world.run(stream)
    assert (refused > 0) == (behind > 12)


def test_each_stream_that_reads_a_part_is_asked() -> None:
    world = World(2)
    early, late = world.streams
    full = SIZE // 8
    for part in range(PARTS):
        world.current = late
        assert world.send(np.arange(full // 2) + 1000 * part + 1)
        world.current = early
        assert world.send(np.arange(full // 2) + 1000 * part + 501)
        world.run(early)
    assert not world.send(np.arange(full) + 7777), "the first part is still read by the late stream"
    world.run(late)
    assert world.send(np.arange(full) + 7777)
    assert not world.send(np.arange(full) + 8888)


def test_too_much_for_a_part_is_refused() -> None:
    world = World()
    assert not world.send(np.arange(SIZE // 8 + 1))
    assert world.send(np.arange(SIZE // 8) + 1)


@contextmanager
def interrupted(world: World) -> Iterator[None]:
    class Broken(Exception):
        pass

    def fail() -> Late:
        raise Broken

    before, world.buffer._stream = world.buffer._stream, fail  # type: ignore[assignment]
    with pytest.raises(Broken):
        world.buffer.send(np.arange(8))
    world.buffer._stream = before
    yield


def test_an_interrupt_leaves_it_usable() -> None:
    world = World()
    for number in range(20):
        with interrupted(world):
            assert world.send(np.arange(8) + 1000 * number + 1)
            world.run(world.streams[0])


class LateDevice:
    """Reads what it is given when it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue = deque[tuple[torch.Tensor, torch.Tensor]]()
        self.read, self.number = list[list[int]](), 0
        device = self

        class Event:
            at = 0

            def record(self) -> None:
                self.at = device.number

            def synchronize(self) -> None:
                device.run(self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(sending, "read_into", self.later)

    def later(self, target: torch.Tensor, seen: torch.Tensor, pinned: torch.Tensor) -> None:
        self.queue.append((target, pinned))
        self.number += 1

    def run(self, upto: int) -> None:
        while len(self.read) < upto:
            target, pinned = self.queue.popleft()
            target.copy_(pinned)
            self.read.append(target.tolist())


@pytest.mark.parametrize("turns", [1, 2, 8])
def test_however_many_steps_are_under_way_each_reads_its_own_numbers(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, target = LateDevice(monkeypatch), torch.zeros(4, dtype=torch.int32)
    staging = StagingTurns(4, CPU, turns)
    staging._marked = True
    given = [[step, step + 1, step + 2, step + 3][: 1 + step % 4] for step in range(30)]
    for numbers in given:
        staging.lend(len(numbers)).numpy()[:] = numbers
        staging.read_into(target[: len(numbers)])
    assert len(device.read) == 30 - turns, "as many as there are buffers wait for the device"
    device.run(30)
    assert device.read == given


def test_integers_are_read_into_a_tensor() -> None:
    given = torch.arange(9, dtype=torch.int32)
    target = torch.zeros(9, dtype=torch.int32)
    for seen in (seen_by(CPU, given), None):
        target.zero_()
        read_into(target, seen, given)
        assert target.tolist() == given.tolist()
