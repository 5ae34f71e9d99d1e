"""Small worlds for streaming weights: stores that hold known bytes, streams whose every step may be delayed
or held, interrupts anywhere.

The compute stream is a thread too, so all that is asynchronous on a GPU is so here: kernels on one thread,
copies on another, readers beside. A kernel takes down the bytes of its group when it ends.
"""

import contextlib
import dis
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from penstock.arch.layout import Field, GroupId, GroupKind, GroupLayout
from penstock.base.tiers import Tier
from penstock.memory.streams import HostTicket, Stream, ThreadStream, Ticket
from penstock.weights.streaming import stream
from penstock.weights.streaming.feeder import Feeder, RingCopy
from penstock.weights.streaming.residency import Placement, Use
from penstock.weights.streaming.ring import Link, Prediction, RingLayout, lay_pieces, lay_ring
from penstock.weights.streaming.source import Sources
from penstock.weights.streaming.stream import WeightStream

UNIT = 256
CPU = torch.device("cpu")
LONG = 30.0
"""Seconds after which what must happen is taken not to. On a machine that does nothing else it happens within
one or two."""
BRIEF = 0.02
"""Seconds given to what must not happen."""


class Gates:
    """Places in threads' work: each may be delayed, or held until `open`; whether it has been passed can be
    waited for."""

    def __init__(
        self, shut: Iterable[Hashable] = (), delay: Callable[[Hashable], float] | None = None
    ) -> None:
        self._shut = {place: threading.Event() for place in shut}
        self._passed: defaultdict[Hashable, threading.Event] = defaultdict(threading.Event)
        self._delay = delay

    def enter(self, place: Hashable) -> None:
        if self._delay is not None:
            time.sleep(self._delay(place))
        if place in self._shut:
            self._shut[place].wait()

    def shut(self, place: Hashable) -> None:
        self._shut[place] = threading.Event()

    def leave(self, place: Hashable) -> None:
        self._passed[place].set()

    def passes(self, place: Hashable, seconds: float = LONG) -> bool:
        return self._passed[place].wait(seconds)

    def open(self) -> None:
        for one in self._shut.values():
            one.set()


def content(group: GroupId, use: int, size: int) -> np.ndarray:
    """What the store gives when a group is read for the `use`th time: different bytes for every group and
    every time."""
    return np.random.default_rng((group.layer, group.expert + 1, use)).integers(0, 256, size, np.uint8)


class Store:
    """A Source. `changing`: whether each read of a piece gives other bytes, so that one turn cannot be taken
    for another."""

    def __init__(self, gates: Gates, changing: bool = False) -> None:
        self.gates, self.changing, self.closed = gates, changing, False
        self.faults: dict[tuple[GroupId, int], BaseException] = {}
        """Raised by reads of (group, start)."""
        self.reads: Counter[tuple[GroupId, int]] = Counter()
        self.unchecked: Counter[tuple[GroupId, int]] = Counter()

    def read(self, layout: GroupLayout, start: int, into: Tensor, check: bool) -> None:
        piece = layout.id, start
        turn, self.reads[piece] = self.reads[piece], self.reads[piece] + 1
        self.unchecked[piece] += not check
        self.gates.enter(("read", str(layout.id), start, turn))
        if piece in self.faults:
            raise self.faults[piece]
        whole = content(layout.id, turn if self.changing else 0, layout.size)
        # In parts, so that a read which comes too early or goes on too long is seen in the midst.
        half = len(into) // 2
        into.numpy()[:half] = whole[start : start + half]
        into.numpy()[half:] = whole[start + half : start + len(into)]
        self.gates.leave(("read", str(layout.id), start, turn))

    def close(self) -> None:
        self.closed = True


class Copies(ThreadStream):
    """The copy stream. Places are ("copy", name, turn), names those of the targets; waits may be left out."""

    def __init__(self, gates: Gates) -> None:
        super().__init__("copies under test")
        self.gates = gates
        self.names: dict[int, Hashable] = {}
        """By the id of a target."""
        self.addresses: dict[int, Hashable] = {}
        """By the address of one that has no name."""
        self.never_waits: Hashable = None
        """The name of the target before whose copies `wait` does nothing."""
        self.blind = False
        """Whether a reader does not wait for marks."""
        self._turns: Counter[Hashable] = Counter()
        self._waits: list[Ticket] = []

    def copy(self, target: Tensor, source: Tensor) -> None:
        name = self.names.get(id(target)) or self.addresses.get(target.data_ptr(), target.data_ptr())
        place = "copy", name, self._turns[name]
        self._turns[name] += 1
        if self.never_waits is not None and name == self.never_waits:
            self._waits.clear()
        self._flush()
        self.run(lambda: self.gates.enter(place))
        super().copy(target, source)
        self.run(lambda: self.gates.leave(place))

    def wait(self, ticket: Ticket) -> None:
        self._waits.append(ticket)

    def mark(self) -> Ticket:
        self._flush()
        ticket = _Blind() if self.blind else HostTicket()
        self.run(ticket.reach)
        return ticket

    def _flush(self) -> None:
        while self._waits:
            super().wait(self._waits.pop(0))


class _Blind(HostTicket):
    def wait(self) -> None:
        if (
            "reader" not in threading.current_thread().name
            and "loader" not in threading.current_thread().name
        ):
            super().wait()


class Compute(ThreadStream):
    """The compute stream: kernels that take down what they see. Places are ("kernel", visit)."""

    def __init__(self, gates: Gates) -> None:
        super().__init__("compute under test")
        self.gates = gates
        self.never_waits: int | None = None
        """Which of the waits does nothing, counted from 0."""
        self._waits = 0
        self.seen: dict[int, tuple[GroupId, np.ndarray]] = {}

    def kernel(self, visit: int, group: GroupId, view: Tensor) -> None:
        def work() -> None:
            self.gates.enter(("kernel", visit))
            self.seen[visit] = group, view.numpy().copy()
            self.gates.leave(("kernel", visit))

        self.run(work)

    def wait(self, ticket: Ticket) -> None:
        if self._waits != self.never_waits:
            super().wait(ticket)
        self._waits += 1


@dataclass(frozen=True)
class Shape:
    """Groups of so many units in the order of a pass, homes as letters (d: DEVICE, h: HOST, s: DISK), and the
    sizes of both rings."""

    sizes: tuple[int, ...]
    homes: str
    ring: int
    piece: int = 4
    slots: int = 3
    again: tuple[int, ...] = ()
    """Groups that are used once more at the end of a pass."""
    solved: Placement | None = None
    """Instead of what the rest says."""

    def __str__(self) -> str:
        return f"{self.homes}-{self.ring}-{self.piece}x{self.slots}"

    @property
    def ids(self) -> list[GroupId]:
        return [GroupId(GroupKind.FFN, layer) for layer in range(len(self.sizes))]

    @property
    def order(self) -> list[GroupId]:
        return [*self.ids, *(self.ids[group] for group in self.again)]

    def layouts(self) -> list[GroupLayout]:
        return [layout(id, size * UNIT) for id, size in zip(self.ids, self.sizes, strict=True)]

    def placement(self) -> Placement:
        if self.solved is not None:
            return self.solved
        tiers = {"d": Tier.DEVICE, "h": Tier.HOST, "s": Tier.DISK}
        homes = {id: tiers[letter] for id, letter in zip(self.ids, self.homes, strict=True)}
        sizes = dict(zip(self.ids, (size * UNIT for size in self.sizes), strict=True))
        uses = tuple(Use(id, sizes[id]) for id in self.order)
        runs = [(number, 0, use.size) for number, use in enumerate(uses) if homes[use.id] is not Tier.DEVICE]
        read = [(number, use.size) for number, use in enumerate(uses) if homes[use.id] is Tier.DISK]
        host = lay_pieces(read, self.slots * self.piece * UNIT, self.piece * UNIT) if read else RingLayout()
        none = Prediction(1.0, dict.fromkeys(Link, 0.0))
        return Placement(uses, homes, lay_ring(runs, self.ring * UNIT), host, none, self.piece * UNIT)


def layout(id: GroupId, size: int) -> GroupLayout:
    return GroupLayout(id, (Field("bytes", (size,), 0, (), "uint8"),), size)


Doctor = Callable[[list[list[RingCopy]]], list[list[RingCopy]]]


@dataclass
class World:
    """A WeightStream on threads. `doctor` changes what its feeder is told, `feeder_class` is its class.
    compute: a stream that does at once what it is given, instead of a thread."""

    shape: Shape
    gates: Gates = field(default_factory=Gates)
    changing: bool = False
    doctor: Doctor = lambda segments: segments
    feeder_class: type[Feeder] = Feeder
    compute: Stream | None = None

    def __post_init__(self) -> None:
        self.store = Store(self.gates, self.changing)
        self.copies = Copies(self.gates)
        self.computing = Compute(self.gates)
        self.placement = self.shape.placement()
        streams = self.copies, self.compute or self.computing
        sources = Sources(self.store, self.store)
        self.weights = WeightStream(self.placement, self.shape.layouts(), sources, CPU, streams=streams)
        self.visit = 0
        self._used: Counter[GroupId] = Counter()
        self.expected: dict[int, tuple[GroupId, np.ndarray]] = {}

    def load(self) -> "World":
        with patch.object(stream, "Feeder", self._feeder):
            self.weights.load()
        return self

    def _feeder(
        self, runs: Sequence[str], segments: list[list[RingCopy]], *more: Any, **others: Any
    ) -> Feeder:
        for run, own in enumerate(segments):
            for index, segment in enumerate(own):
                self.copies.names[id(segment.target)] = run, index
        return self.feeder_class(runs, self.doctor(segments), *more, **others)

    @property
    def feeder(self) -> Feeder:
        assert self.weights._feeder is not None
        return self.weights._feeder

    def take(self, group: GroupId) -> Tensor:
        """Take a group and queue a kernel on it."""
        view = self.weights.take(group).vectors["bytes"]
        turn = self._used[group] if self.changing and self.placement.homes[group] is Tier.DISK else 0
        self._used[group] += 1
        self.expected[self.visit] = group, content(group, turn, len(view))
        if self.compute is None:
            self.computing.kernel(self.visit, group, view)
        else:
            self.computing.seen[self.visit] = group, view.numpy().copy()
        self.visit += 1
        return view

    def use(self, group: GroupId) -> None:
        self.take(group)
        self.weights.release(group)

    def passes(self, count: int) -> None:
        for _ in range(count):
            for group in self.shape.order:
                self.use(group)

    def wrong(self) -> list[int]:
        """Visits whose kernels have not seen their group's bytes, once all are done."""
        self.computing.mark().wait()
        assert self.computing.seen.keys() == self.expected.keys()
        return self.wrong_so_far()

    def wrong_so_far(self) -> list[int]:
        return [
            visit
            for visit, (_, bytes) in self.computing.seen.items()
            if not np.array_equal(bytes, self.expected[visit][1])
        ]

    def close(self) -> None:
        self.gates.open()
        self.weights.close()
        self.computing.close()

    def __enter__(self) -> "World":
        return self.load()

    def __exit__(self, *_: object) -> None:
        self.close()


def random_delays(
    seed: int, kinds: Sequence[str] = ("copy", "kernel", "read"), longest: float = 2e-3
) -> Callable[[Hashable], float]:
    """A third of all places of these kinds are delayed, by up to `longest` seconds."""
    rng = np.random.default_rng(seed)
    delays = rng.uniform(-2 * longest, longest, 4096).clip(0).tolist()
    return lambda place: delays[crc32(repr(place).encode()) % 4096] if place[0] in kinds else 0.0  # type: ignore[index]


@contextlib.contextmanager
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    late = time.monotonic() + LONG
    while left := [thread for thread in threading.enumerate() if thread not in before]:
        assert time.monotonic() < late, f"threads are left: {left}"
        time.sleep(1e-3)


def within(seconds: float, call: Callable[[], object]) -> bool:
    """Whether the call, on a thread of its own, ends in time. Its error is raised here."""
    faults: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if faults:
        raise faults[0]
    return not thread.is_alive()


# ---- interrupts

_CALLS = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW") if name in dis.opmap}
_JUMPS = {
    dis.opmap[name]
    for name in ("JUMP_BACKWARD", "POP_JUMP_BACKWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_FALSE")
    if name in dis.opmap
}


OURS_AND_LOCKS = ("penstock", "concurrent", "threading")
"""Modules in whose midst an interrupt could leave a lock held."""


def cut_short(call: Callable[[], object], places: int, modules: Sequence[str] = ("penstock",)) -> bool:
    """Calls, and interrupts at the `places`th place where CPython may: when a function begins, behind a call,
    behind a jump backward. False if the call ended by itself."""
    left, before, last = places, sys.gettrace(), dict[FrameType, int]()

    def strike() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if event == "call":
            if frame.f_globals.get("__name__", "").split(".")[0] not in modules:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            strike()
        elif event == "opcode":
            if last.get(frame) in _CALLS or last.get(frame) in _JUMPS:
                strike()
            last[frame] = frame.f_code.co_code[frame.f_lasti]
        elif event == "return":
            last.pop(frame, None)
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


STRIDE = 1 if os.environ.get("PENSTOCK_THOROUGH") else 11
"""From one place that is struck to the next: all of them would take minutes."""


def everywhere(strike: Callable[[int], bool]) -> int:
    """Strike at every STRIDEth place there is; how many there are. Some are missed: where a generator is
    closed unused, nothing can be raised."""
    where = missed = 0
    while missed < 4:
        missed = 0 if strike(where) else missed + 1
        where += STRIDE
    return where
