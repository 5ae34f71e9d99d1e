"""Blocks between tiers arrive whole and in time, whatever is late, broken or interrupted; and every wait of
the protocol is needed."""

import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from layouts import kv_of_heads
from penstock.engine.engine import Engine
from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.host import HostLedger
from penstock.kv.movement import transfers as transfers_of_kv
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.pool import KVPool
from penstock.kv.movement.transfers import Transfers
from penstock.kv.store.diskpool import LostKV
from penstock.kv.store.segments import SegmentFile
from penstock.memory.disk import ReadError
from penstock.memory.streams import HostTicket, Pieces, ThreadStream, Ticket
from penstock.sched.rules import Name, Names, PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler, Storage
from penstock.sched.tiers import Tiers
from penstock.step.plan import (
    BlockId,
    HostBlockId,
    Landed,
    Outcome,
    Plan,
    Result,
    Route,
    Transfer,
    TransferId,
)
from stores import (
    CAP,
    PAGE,
    failing,
    finish,
    flip,
    got,
    holds,
    key_of,
    known,
    open_store,
    payload,
    place_of,
    put,
)
from streams import (
    BRIEF,
    LONG,
    OURS_AND_LOCKS,
    Gates,
    cut_short,
    everywhere,
    no_thread_left,
    random_delays,
    within,
)
from worlds import ROOT, sampling

LAYOUT = kv_of_heads(layers=2, block_size=4, kv_heads=2, head_dim=32, dtype="float32")
assert LAYOUT.block_bytes == PAGE
PAGES, HOST = 8, 12
TARGET = {Route.UP: "pages", Route.IN: "host", Route.DOWN: "host", Route.OUT: "disk"}
COPIED = {Route.UP: "up", Route.DOWN: "down", Route.IN: "read", Route.OUT: "write"}
"""Where a transfer may be held."""


class Mark(HostTicket):
    """A ticket that knows its stream; a thread of the store may be blind to it."""

    __slots__ = ("line",)

    def __init__(self, line: "Line") -> None:
        super().__init__()
        self.line = line

    def wait(self) -> None:
        if not self.line.unseen or "KV store" not in threading.current_thread().name:
            super().wait()


class Line(ThreadStream):
    """A stream under test. Places are (name, number of the work); waits for another may be left out."""

    def __init__(self, name: str, gates: Gates) -> None:
        super().__init__(f"{name} under test")
        self.name, self.gates, self.number = name, gates, 0
        self.deaf: set[str] = set()
        """Streams for which it does not wait."""
        self.unseen = False
        """Whether threads of the store do not wait for it."""

    def work(self, work: Callable[[], object]) -> None:
        place, self.number = (self.name, self.number), self.number + 1
        self.run(lambda: self.gates.enter(place))
        self.run(work)
        self.run(lambda: self.gates.leave(place))

    def copy_pieces(self, target: torch.Tensor, source: torch.Tensor, pieces: Pieces) -> None:
        place, self.number = (self.name, self.number), self.number + 1
        self.run(lambda: self.gates.enter(place))
        super().copy_pieces(target, source, pieces)
        self.run(lambda: self.gates.leave(place))

    def wait(self, ticket: Ticket) -> None:
        assert isinstance(ticket, Mark)
        if ticket.line.name not in self.deaf:
            super().wait(ticket)

    def mark(self) -> Ticket:
        ticket = Mark(self)
        self.run(ticket.reach)
        return ticket


@dataclass
class World:
    """Transfers between pages, host blocks and a store, on threads, with what computes and what long requests
    send beside them."""

    directory: Path
    gates: Gates = field(default_factory=Gates)
    capacity: int = CAP
    fails: Callable[[str, int], bool] = lambda kind, number: False
    """Whether a read or write of the disk does."""

    def __post_init__(self) -> None:
        self.compute, self.up, self.down, self.out, self.copies = (
            Line(name, self.gates) for name in ("compute", "up", "down", "out", "copies")
        )
        self.lines = self.compute, self.up, self.down, self.out, self.copies
        self.host, self.pages = (
            HostPool(LAYOUT, HOST, torch.device("cpu")),
            KVPool(LAYOUT, PAGES, torch.device("cpu")),
        )
        for seed, bytes in enumerate((self.host.bytes, self.pages.bytes)):
            bytes.numpy()[:] = np.random.default_rng(seed).integers(0, 256, len(bytes), np.uint8)
        self.store = open_store(self.directory, self.capacity)
        self.transfers = Transfers(self.host, self.up, self.down, self.compute, self.store)
        self.ids, self._operations = 0, Counter[str]()

    # ---- what others do

    def page(self, page: int) -> np.ndarray:
        return self.pages.block(BlockId(page)).numpy()

    def block(self, block: int) -> np.ndarray:
        return self.host.block(HostBlockId(block)).numpy()

    def write(self, page: int, number: int) -> None:
        """A kernel fills a page."""
        self.compute.work(partial(np.copyto, self.page(page), payload(number)))

    def read(self, page: int) -> list[np.ndarray]:
        """A kernel takes down a page."""
        seen: list[np.ndarray] = []
        self.compute.work(lambda: seen.append(self.page(page).copy()))
        return seen

    def send(self, block: int, number: int) -> None:
        """A long request's block goes to the host behind what has been computed."""
        self.out.wait(self.compute.mark())
        self.out.work(partial(np.copyto, self.block(block), payload(number)))

    def tile(self, block: int) -> list[np.ndarray]:
        """A long request's block is read behind what has been sent, and a kernel waits for that."""
        seen: list[np.ndarray] = []
        self.copies.wait(self.out.mark())
        self.copies.work(lambda: seen.append(self.block(block).copy()))
        self.compute.wait(self.copies.mark())
        return seen

    # ---- transfers

    def transfer(
        self, route: Route, pages: Sequence[int] = (), blocks: Sequence[int] = (), numbers: Sequence[int] = ()
    ) -> Transfer:
        self.ids += 1
        ids = tuple(map(BlockId, pages)), tuple(map(HostBlockId, blocks))
        return Transfer(TransferId(self.ids), route, *ids, tuple(map(key_of, numbers)))

    def begin(self, *transfers: Transfer, forget: Sequence[bytes] = ()) -> None:
        self.transfers.begin(transfers, forget, self.pages, self.out.mark)

    def go(
        self, route: Route, pages: Sequence[int] = (), blocks: Sequence[int] = (), numbers: Sequence[int] = ()
    ) -> Landed:
        """Begin one, and wait until it has landed."""
        self.begin(self.transfer(route, pages, blocks, numbers))
        (report,) = self.land()
        return report

    def land(self) -> list[Landed]:
        """All that is under way."""
        reports: list[Landed] = []
        for _ in range(2000):
            reports += self.transfers.landed()
            if not self.transfers.moving:
                return reports
            self.transfers.wait(0.01)
        raise AssertionError("a transfer never lands")

    def settle(self) -> None:
        """All that has been queued, anywhere, is done."""
        for line in (*self.lines, *self.lines):
            line.mark().wait()
        if self.transfers.store is not None:
            finish(self.store)

    def memory(self) -> tuple[np.ndarray, np.ndarray]:
        return self.host.bytes.numpy().copy(), self.pages.bytes.numpy().copy()

    # ----

    @contextmanager
    def _disk(self, kind: str) -> Iterator[None]:
        """Reads or writes of the disk have places, and fail when they should."""
        right = getattr(SegmentFile, kind)

        def call(file: SegmentFile, *arguments: Any) -> None:
            number = self._operations[kind]
            self._operations[kind] += 1
            self.gates.enter((kind, number))
            if self.fails(kind, number):
                raise (
                    ReadError("the disk is broken")
                    if kind == "read"
                    else OSError(errno.EIO, "the disk is broken")
                )
            right(file, *arguments)
            self.gates.leave((kind, number))

        with patch.object(SegmentFile, kind, call):
            yield

    def __enter__(self) -> "World":
        self._stack = ExitStack()
        self._stack.enter_context(self._disk("read"))
        self._stack.enter_context(self._disk("write"))
        return self

    def __exit__(self, *_: object) -> None:
        self.gates.open()
        for line in self.lines:
            line.deaf, line.unseen = set(), False
        assert within(LONG, self.transfers.close)
        self.store.close()
        for line in self.lines:
            line.close()
        self.host.close()
        self._stack.close()


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[..., World]:
    """Makes worlds, each with a disk of its own."""
    made = iter(range(10000))
    return lambda *more, **others: World(tmp_path / str(next(made)), *more, **others)


Fresh = Callable[..., World]


def is_(found: np.ndarray, number: int) -> bool:
    return np.array_equal(found, payload(number))


def kept(world: World, number: int) -> bool:
    """Whether a record is on disk and right."""
    try:
        return is_(got(world.store, number), number)
    except LostKV:
        return False


# ---- there and back


def test_blocks_go_all_ways(fresh: Fresh) -> None:
    with no_thread_left(), fresh() as world:
        for page, number in ((3, 30), (4, 40), (7, 70)):
            world.write(page, number)
        assert world.go(Route.DOWN, [3, 4, 7], [5, 6, 0]).lost == ()
        assert world.go(Route.OUT, (), [6, 0], [40, 70]).lost == ()
        assert known(world.store) == {40, 70}
        assert world.go(Route.IN, (), [10, 2], [70, 40]).lost == ()
        report = world.go(Route.UP, [1, 0, 2], [10, 2, 5])
        assert report.lost == ()
        assert report.seconds >= 0
        for page, number in ((1, 70), (0, 40), (2, 30)):
            assert is_(world.page(page), number)
        world.begin(forget=[key_of(40)])
        finish(world.store)
        assert known(world.store) == {70}


def test_nothing_else_is_touched(fresh: Fresh) -> None:
    with fresh() as world:
        host, pages = world.memory()
        put(world.store, [1])
        world.go(Route.DOWN, [2], [3])
        world.go(Route.IN, (), [5], [1])
        world.go(Route.UP, [6], [5])
        host.reshape(HOST, PAGE)[[3, 5]] = pages.reshape(PAGES, PAGE)[2], payload(1)
        pages.reshape(PAGES, PAGE)[6] = payload(1)
        assert all(map(np.array_equal, (host, pages), world.memory()))


def test_without_a_disk(fresh: Fresh) -> None:
    with fresh() as world:
        world.transfers.store = None
        world.write(2, 9)
        world.go(Route.DOWN, [2], [4])
        assert is_(world.block(4), 9)
        world.transfers.settle()
        world.transfers.store = world.store


# ---- without one of its waits


def both(right: Callable[[bool], bool]) -> None:
    """`right`, given whether to leave the wait out, says whether all bytes are as they should be."""
    assert right(False)
    assert not right(True)


def passes(gates: Gates, place: Hashable, mutant: bool) -> None:
    assert gates.passes(place, LONG if mutant else BRIEF) == mutant


def test_a_page_must_not_be_filled_while_it_is_read(fresh: Fresh) -> None:
    def right(mutant: bool) -> bool:
        gates = Gates([("compute", 1)])
        with fresh(gates) as world:
            world.up.deaf = {"compute"} if mutant else set()
            world.write(3, 1)
            assert gates.passes(("compute", 0))
            seen = world.read(3)
            world.begin(world.transfer(Route.UP, [3], [5]))
            passes(gates, ("up", 0), mutant)
            gates.open()
            world.land()
            world.settle()
            return is_(seen[0], 1)

    both(right)


@pytest.mark.parametrize("route", [Route.UP, Route.OUT])
def test_a_host_block_must_not_be_read_before_a_long_request_has_written_it(
    fresh: Fresh, route: Route
) -> None:
    def right(mutant: bool) -> bool:
        gates = Gates([("out", 0)])
        with fresh(gates) as world:
            world.up.deaf = {"out"} if mutant else set()
            world.out.unseen = mutant
            world.send(5, 1)
            world.begin(
                world.transfer(route, [3], [5]) if route is Route.UP else world.transfer(route, (), [5], [1])
            )
            passes(gates, (COPIED[route], 0), mutant)
            gates.open()
            world.land()
            world.settle()
            return is_(world.page(3), 1) if route is Route.UP else kept(world, 1)

    both(right)


def test_a_page_must_not_be_read_before_it_is_computed(fresh: Fresh) -> None:
    def right(mutant: bool) -> bool:
        gates = Gates([("compute", 0)])
        with fresh(gates) as world:
            world.down.deaf = {"compute"} if mutant else set()
            world.write(3, 1)
            world.begin(world.transfer(Route.DOWN, [3], [5]))
            passes(gates, ("down", 0), mutant)
            gates.open()
            world.land()
            world.settle()
            return is_(world.block(5), 1)

    both(right)


@pytest.mark.parametrize("route", [Route.DOWN, Route.IN])
def test_a_host_block_must_not_be_filled_while_a_tile_of_it_is_read(fresh: Fresh, route: Route) -> None:
    def right(mutant: bool) -> bool:
        gates = Gates([("copies", 0)])
        with fresh(gates) as world:
            put(world.store, [2])
            world.down.deaf = {"compute"} if mutant else set()
            world.compute.unseen = mutant
            world.send(5, 1)
            world.out.mark().wait()
            seen = world.tile(5)
            world.begin(
                world.transfer(route, [3], [5])
                if route is Route.DOWN
                else world.transfer(route, (), [5], [2])
            )
            passes(gates, (COPIED[route], 0), mutant)
            if mutant:
                world.land()
            gates.open()
            world.land()
            world.settle()
            return is_(seen[0], 1)

    both(right)


@pytest.mark.parametrize("route", [Route.DOWN, Route.IN])
def test_a_host_block_must_not_be_filled_before_what_was_sent_there_has_landed(
    fresh: Fresh, route: Route
) -> None:
    """A long request sends a block, and ends, or is broken off: its block is given up for another before it
    has landed."""
    gates = Gates([("out", 0)])
    with fresh(gates) as world:
        put(world.store, [2])
        world.write(3, 2)
        world.send(5, 1)
        world.begin(
            world.transfer(route, [3], [5]) if route is Route.DOWN else world.transfer(route, (), [5], [2])
        )
        gates.passes((COPIED[route], 0), BRIEF)
        gates.open()
        world.land()
        world.settle()
        assert is_(world.block(5), 2)


def set_out(world: World, route: Route) -> tuple[Transfer, Callable[[], Callable[[], bool]]]:
    """A transfer; and what is done at once when it has been reported, which says whether that saw and left
    the right bytes."""
    world.write(3, 1)
    world.send(5, 2)
    put(world.store, [4])
    world.settle()
    if route is Route.UP:

        def computed() -> Callable[[], bool]:
            seen = world.read(6)
            return lambda: is_(seen[0], 2)

        return world.transfer(route, [6], [5]), computed
    if route is Route.DOWN:

        def overwritten() -> Callable[[], bool]:
            world.write(3, 9)
            return lambda: is_(world.block(7), 1)

        return world.transfer(route, [3], [7]), overwritten
    if route is Route.OUT:

        def replaced() -> Callable[[], bool]:
            world.block(5)[:] = payload(9)
            return lambda: kept(world, 2)

        return world.transfer(route, (), [5], [2]), replaced

    def looked_at() -> Callable[[], bool]:
        found = world.block(8).copy()
        return lambda: is_(found, 4)

    return world.transfer(route, (), [8], [4]), looked_at


@pytest.mark.parametrize("route", list(Route))
def test_nothing_must_be_reported_before_it_has_landed(fresh: Fresh, route: Route) -> None:
    """Until then the scheduler gives nobody what a transfer names; from then on it does."""

    def right(mutant: bool) -> bool:
        gates = Gates()
        with fresh(gates) as world:
            transfer, reported = set_out(world, route)
            number = (
                getattr(world, COPIED[route]).number
                if route in (Route.UP, Route.DOWN)
                else world._operations[COPIED[route]]
            )
            place = COPIED[route], number
            gates.shut(place)
            with (
                patch.object(transfers_of_kv._InFlight, "done", property(lambda going: True))
                if mutant
                else ExitStack()
            ):
                world.begin(transfer)
                early = [*world.transfers.landed()] if not mutant else [transfer]
                was_right = reported() if mutant else None
                assert bool(early) == mutant
                world.compute.mark().wait()
                gates.open()
                gates.passes(place)
            world.land()
            was_right = was_right or reported()
            world.settle()
            return was_right()

    both(right)


# ---- anything at any time


MUTANTS: dict[str, tuple[str, Callable[[World], None]]] = {
    "up does not wait for compute": ("compute", lambda world: world.up.deaf.add("compute")),
    "up does not wait for what was sent": ("out", lambda world: world.up.deaf.add("out")),
    "down does not wait for what was sent": ("out", lambda world: world.down.deaf.add("out")),
    "down does not wait for compute": ("compute", lambda world: world.down.deaf.add("compute")),
    "the disk does not wait for what was sent": ("out", lambda world: setattr(world.out, "unseen", True)),
    "reads do not wait for compute": ("copies", lambda world: setattr(world.compute, "unseen", True)),
}
"""Waits of the transfers that are left out, and what is late then."""


class Careless(Tiers):
    """Does not hold what transfers read."""

    def _go(self, route: Route, *more: Any) -> TransferId:
        id = super()._go(route, *more)
        going = self._going[id]
        if route in (Route.UP, Route.OUT):
            self.host.release(going.transfer.blocks)
            going.transfer = replace(going.transfer, blocks=())
        elif route is Route.DOWN:
            self.pages.release(going.transfer.pages)
            going.transfer = replace(going.transfer, pages=())
        return id


def _names(some: Sequence[Name]) -> Names:
    return Names([name.key for name in some], [name.parent for name in some])


class Harbour:
    """Ledgers, tiers, transfers and a store, and requests that are whole in a step: chains of blocks whose
    bytes are a function of their keys. What is found must be right when it is read: by kernels, copies and
    the store's threads, whenever they come to that."""

    def __init__(
        self,
        directory: Path,
        seed: int,
        *,
        records: int = 12,
        store: str = "eager",
        mutant: str | None = None,
        faults: float = 0.0,
    ) -> None:
        rng = random.Random(seed)
        self._stack = ExitStack()
        self.faults = rng.random() < 0.5 and faults

        def fails(kind: str, number: int) -> bool:
            return rng.random() < self.faults

        kinds = (
            [MUTANTS[mutant][0]]
            if mutant in MUTANTS
            else rng.sample(["compute", "up", "down", "out", "copies", "read", "write"], 3)
        )
        delays = random_delays(seed, kinds, 3e-3)
        self.world = self._stack.enter_context(World(directory, Gates(delay=delays), CAP, fails))
        self.pages, self.host, self.disk = BlockLedger(PAGES), HostLedger(HOST), DiskLedger(records)
        kind = Careless if mutant == "what is read is not held" else Tiers
        self.tiers = kind(self.pages, self.host, store=store, disk=self.disk, step_blocks=2)  # type: ignore[arg-type]
        if mutant in MUTANTS:
            MUTANTS[mutant][1](self.world)
        if mutant == "all is reported at once":
            self._stack.enter_context(
                patch.object(transfers_of_kv._InFlight, "done", property(lambda going: True))
            )
        self.seen: list[tuple[list[np.ndarray], int]] = []
        """What was taken down, and which record it should be."""
        self.moved = self.tiers.counts.moved

    def close(self) -> None:
        self.world.gates.open()
        self._stack.close()

    @staticmethod
    def name(number: int) -> Name:
        return Name(key_of(number), key_of(number - 1) if number % 16 else None)

    def step(self, short: Sequence[tuple[int, int]] = (), long: Sequence[tuple[int, int]] = ()) -> None:
        """Chains of so many blocks are used, by short and by long requests."""
        world = self.world
        held, fresh = self._hold_pages(short)
        cold, sent = self._hold_blocks(long)
        transfers, forget = self.tiers.plan()
        world.begin(*transfers, forget=forget)
        for page, number in fresh:
            world.write(page, number)
        known = {page: key for key, page in self.pages._by_key.items()}
        for page in held:
            key = known[page]
            self.seen.append((world.read(page), int.from_bytes(key[:8], "little")))
        self.seen += [(world.tile(block), number) for block, number in cold if (block, number) not in sent]
        for block, number in sent:
            world.send(block, number)
        if not (short or long):
            world.transfers.wait(0.02)
        self._land()
        for _, number in fresh:
            self.tiers.computed(*self.name(number))
        self.pages.release(held)
        for block, number in sent:
            if self.host.find(key_of(number)) is None:
                self.host.seal(block, *self.name(number))
                self.tiers.sealed_on_host(block, *self.name(number))
        self.host.release([block for block, _ in cold])
        self.check()

    def _hold_pages(
        self, chains: Sequence[tuple[int, int]]
    ) -> tuple[list[BlockId], list[tuple[BlockId, int]]]:
        """Return the pages of these chains, as far as there is room, and those of them that are new."""
        held, fresh = list[BlockId](), list[tuple[BlockId, int]]()
        for chain, count in chains:
            self._fetch(chain, count)
            for number in range(16 * chain, 16 * chain + count):
                page = self.pages.find(key_of(number))
                if page is not None:
                    self.pages.hold(page)
                elif self.pages.available:
                    (page,) = self.pages.allocate(1)
                    self.pages.seal(page, *self.name(number))
                    fresh.append((page, number))
                else:
                    break
                held.append(page)
        return held, fresh

    def _hold_blocks(
        self, chains: Sequence[tuple[int, int]]
    ) -> tuple[list[tuple[HostBlockId, int]], list[tuple[HostBlockId, int]]]:
        """Return the host blocks of these chains, as far as there is room, and those of them that are new."""
        held, fresh = list[tuple[HostBlockId, int]](), list[tuple[HostBlockId, int]]()
        for chain, count in chains:
            for number in range(16 * chain, 16 * chain + count):
                block = self.host.find(key_of(number))
                if block is not None:
                    self.host.hold(block)
                elif self.host.available:
                    (block,) = self.host.allocate(1)
                    fresh.append((block, number))
                else:
                    break
                held.append((block, number))
        return held, fresh

    def _land(self) -> None:
        """Take in what has landed, as a scheduler would."""
        for transfer, names, right in self.tiers.landed(self.world.transfers.landed()):
            if transfer.route is Route.UP:
                for page, name in zip(transfer.pages[:right], names, strict=False):
                    self.pages.seal(page, *name)
                self.pages.release(transfer.pages[:right])

    def _fetch(self, chain: int, count: int) -> None:
        names = [self.name(number) for number in range(16 * chain, 16 * chain + count)]
        while names and self.pages.find(names[0].key) is not None:
            del names[0]
        blocks = [self.host.find(name.key) for name in names]
        there = [block for block in blocks[: (*blocks, None).index(None)] if block is not None]
        if there and len(there) <= self.pages.available:
            self.tiers.bring_up(_names(names[: len(there)]), there)
        elif not there:
            on_disk = [
                self.disk.find(name.key) and block is None for name, block in zip(names, blocks, strict=True)
            ]
            if wanted := names[: (*on_disk, False).index(False)]:
                self.tiers.bring_in(_names(wanted))

    def check(self) -> None:
        pages, blocks = self.tiers.held()
        self.pages.check(pages)
        self.host.check(blocks)

    def recover(self) -> None:
        reports: list[Landed] = []
        assert within(LONG, lambda: reports.extend(self.world.transfers.settle()))
        self.tiers.reset(reports)
        self.pages.reset()
        self.host.vacate()
        self.check()

    def forget(self) -> None:
        self.tiers.forget()
        self.pages.forget()
        self.host.forget()

    def damage(self) -> None:
        """A bit of the last record."""
        if numbers := sorted(known(self.world.store)):
            path, byte = place_of(self.world.store, numbers[-1])
            if path.exists():
                flip(path, byte + 77)

    def rest(self) -> None:
        """All lands, and all that is found is what it should be."""
        for _ in range(3000):
            if not (self.tiers.moving or self.tiers.ready):
                break
            self.step()
        else:
            raise AssertionError("it moves for ever")
        self.faults = 0.0
        self.world.settle()
        for found, number in self.seen:
            assert is_(found[0], number), f"record {number} was not right when it was read"
        for key, page in self.pages._by_key.items():
            assert is_(self.world.page(page), int.from_bytes(key[:8], "little")), (
                f"page {page} is found and wrong"
            )
        for key, block in self.host._by_key.items():
            assert is_(self.world.block(block), int.from_bytes(key[:8], "little")), (
                f"host block {block} is found and wrong"
            )
        for number in known(self.world.store):
            holds(self.world.store, number)


class Tides(RuleBasedStateMachine):
    """A harbour in which anything happens between two steps."""

    @initialize(
        seed=st.integers(0, 1 << 30),
        records=st.sampled_from([3, 12, 60]),
        store=st.sampled_from(["eager", "eager", "lazy"]),
    )
    def begin(self, seed: int, records: int, store: str) -> None:
        self.directory = TemporaryDirectory()
        self.harbour = Harbour(Path(self.directory.name), seed, records=records, store=store, faults=0.2)

    chains = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=2)

    @rule(
        short=chains,
        long=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=1),
        again=st.integers(1, 3),
    )
    def step(self, short: list[tuple[int, int]], long: list[tuple[int, int]], again: int) -> None:
        for _ in range(again):
            self.harbour.step(short, long)

    @rule(pages=st.booleans())
    def drop(self, pages: bool) -> None:
        """What is cached on a tier goes, while that is used."""
        if pages:
            self.harbour.pages.forget()
        else:
            self.harbour.host.forget()

    @rule()
    def forget(self) -> None:
        self.harbour.forget()

    @rule()
    def recover(self) -> None:
        self.harbour.recover()

    @rule()
    def damage(self) -> None:
        self.harbour.damage()

    def teardown(self) -> None:
        if hasattr(self, "harbour"):
            try:
                self.harbour.rest()
            finally:
                self.harbour.close()
                self.directory.cleanup()


TestTides = Tides.TestCase
TestTides.settings = settings(max_examples=40, stateful_step_count=20, derandomize=True, deadline=None)


def sail(directory: Path, seed: int, mutant: str | None = None) -> Counter[Route]:
    """Steps in a harbour. Raises AssertionError if anything was wrong."""
    rng = random.Random(seed)
    harbour = Harbour(directory, seed, mutant=mutant, records=rng.choice([6, 40]))
    try:
        for _ in range(40):
            chance = rng.random()
            if chance < 0.15:
                harbour.pages.forget()
            if 0.05 < chance < 0.2:
                harbour.host.forget()
            if chance > 0.98:
                harbour.recover()
            else:
                short = [(rng.randrange(4), rng.randint(1, 4)) for _ in range(rng.randrange(3))]
                harbour.step(short, [(rng.randrange(4), rng.randint(1, 4))] if rng.random() < 0.4 else [])
        harbour.rest()
    finally:
        harbour.close()
    return harbour.moved


def test_whatever_is_late_what_is_found_is_right(tmp_path: Path) -> None:
    moved = Counter[Route]()
    for seed in range(12):
        moved += sail(tmp_path / str(seed), seed)
    assert min(moved[route] for route in Route) > 20, "too little moves to prove anything"


@pytest.mark.parametrize("mutant", [*MUTANTS, "all is reported at once", "what is read is not held"])
def test_a_harbour_without_one_of_its_waits_is_found_out(tmp_path: Path, mutant: str) -> None:
    for seed in range(100):
        try:
            sail(tmp_path / str(seed), seed, mutant)
        except AssertionError:
            return
    raise AssertionError("nobody noticed")


# ---- faults


def test_what_is_not_as_it_was_written_is_lost_and_nothing_else(fresh: Fresh) -> None:
    with fresh() as world:
        put(world.store, [1, 2, 3])
        path, byte = place_of(world.store, 2)
        flip(path, byte + 9)
        assert world.go(Route.IN, (), [4, 5, 6], [1, 2, 3]).lost == (1,)
        assert is_(world.block(4), 1)
        assert is_(world.block(6), 3)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_what_the_disk_refuses_is_lost_and_nothing_else(fresh: Fresh, kind: str, lost: int) -> None:
    route = Route.IN if kind == "read" else Route.OUT
    with fresh() as world:
        for number, block in ((1, 4), (2, 5), (3, 6)):
            world.send(block, number)
        world.out.mark().wait()
        if route is Route.IN:
            put(world.store, [1, 2, 3])
        first = world._operations[kind]
        world.fails = lambda what, number: (what, number) == (kind, first + lost)
        reports = [world.go(route, (), [3 + number], [number]) for number in (1, 2, 3)]
        assert [report.lost for report in reports] == [(0,) if index == lost else () for index in range(3)]
        if route is Route.OUT:
            assert known(world.store) == {1, 2, 3} - {1 + lost}
        else:
            assert all(is_(world.block(3 + number), number) for number in (1, 2, 3) if number != 1 + lost)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_what_is_not_on_disk_is_lost(fresh: Fresh, missing: int) -> None:
    with fresh() as world:
        put(world.store, {1, 2, 3} - {missing + 1})
        assert world.go(Route.IN, (), [4, 5, 6], [1, 2, 3]).lost == (missing,)


def test_what_is_forgotten_in_its_step_is_lost(fresh: Fresh) -> None:
    with fresh() as world:
        put(world.store, [1, 2])
        world.begin(world.transfer(Route.IN, (), [4, 5], [1, 2]), forget=[key_of(1)])
        (report,) = world.land()
        assert report.lost == (0,)


def test_what_a_full_store_has_no_room_for_is_lost(fresh: Fresh) -> None:
    with fresh() as world:
        put(world.store, range(100, 99 + world.store.capacity))
        assert world.go(Route.OUT, (), [4, 5, 6], [1, 2, 3]).lost == (1, 2)


def test_what_a_store_that_is_off_does_not_take_is_lost(fresh: Fresh) -> None:
    with (
        fresh() as world,
        failing("pwrite", errno.EIO),
        failing("open", errno.EIO, lambda path, *_: str(path).endswith("segment")),
    ):
        for number in range(12):
            world.go(Route.OUT, (), [4], [number])
        assert world.store.stats.writes_off
        assert world.go(Route.OUT, (), [4, 5], [21, 22]).lost == (0, 1)


def test_a_block_that_is_on_disk_already_is_not_counted_as_another(fresh: Fresh) -> None:
    with fresh(fails=lambda kind, number: kind == "write" and number == 1) as world:
        put(world.store, [1])
        assert world.go(Route.OUT, (), [4, 5], [1, 2]).lost == (1,)


def test_a_host_block_that_nothing_was_read_into_is_not_found(fresh: Fresh) -> None:
    """A ledger that takes for granted what the store has lost."""
    with fresh() as world:
        pages, host, disk = BlockLedger(PAGES), HostLedger(HOST), DiskLedger(9, [key_of(0)])
        tiers = Tiers(pages, host, store="eager", disk=disk)
        assert tiers.bring_in(_names([Harbour.name(0)])) is not None
        world.begin(*tiers.plan()[0])
        list(tiers.landed(world.land()))
        block = host.find(key_of(0))
        assert block is None or is_(world.block(block), 0)


# ---- the end


def prepared(world: World) -> Callable[[], None]:
    """What begins something on every route."""
    put(world.store, [1, 2, 3])
    for page in (0, 1):
        world.write(page, 10 + page)
    world.send(4, 14)
    return partial(
        world.begin,
        world.transfer(Route.UP, [2, 3], [0, 4]),
        world.transfer(Route.DOWN, [0, 1], [5, 6]),
        world.transfer(Route.IN, (), [7, 8, 9], [1, 2, 3]),
        world.transfer(Route.OUT, (), [1, 2], [21, 22]),
    )


def under_way(world: World) -> None:
    prepared(world)()


def late(place: int) -> Callable[[Hashable], float]:
    return random_delays(place, ("compute", "up", "down", "out", "read", "write"), 5e-4)


@pytest.mark.parametrize("place", [("up", 0), ("down", 0), ("read", 0), ("write", 3)], ids=str)
def test_settling_waits_for_what_has_begun_and_leaves_nothing_under_way(
    fresh: Fresh, place: tuple[str, int]
) -> None:
    gates = Gates([place])
    with fresh(gates) as world:
        under_way(world)
        while place[0] in ("read", "write") and world._operations[place[0]] <= place[1]:
            time.sleep(1e-4)  # What has not begun is called off.
        settling = threading.Thread(target=world.transfers.settle, daemon=True)
        settling.start()
        settling.join(BRIEF)
        assert settling.is_alive()
        gates.open()
        settling.join(LONG)
        assert not settling.is_alive()
        assert not world.transfers.moving
        assert world.transfers.landed() == ()
        before = world.memory()
        world.settle()
        assert all(map(np.array_equal, before, world.memory()))


UNUSED = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
"""Of a generator that an interrupt has left unfinished."""


@UNUSED
@pytest.mark.parametrize("name", ["begin", "landed", "wait", "settle"])
def test_an_interrupt_anywhere_leaves_nothing_under_way_behind_settle(fresh: Fresh, name: str) -> None:
    with fresh(Gates(delay=late(1))) as world:

        def strike(where: int) -> bool:
            world.begin(forget=[key_of(number) for number in (21, 22, 50)])
            begin = prepared(world)
            if name != "begin":
                begin()
            calls: dict[str, Callable[[], object]] = {
                "begin": begin,
                "landed": world.transfers.landed,
                "wait": partial(world.transfers.wait, 1e-3),
                "settle": world.transfers.settle,
            }
            struck: bool = cut_short(calls[name], where, OURS_AND_LOCKS)
            assert within(LONG, world.transfers.settle)
            assert not world.transfers.moving
            for line in (world.compute, world.out):
                line.mark().wait()
            before = world.memory()
            world.settle()
            assert all(map(np.array_equal, before, world.memory())), (
                "memory is written when all has been settled"
            )
            world.write(0, 50)
            assert world.go(Route.DOWN, [0], [11]).lost == world.go(Route.OUT, (), [11], [50]).lost == ()
            assert is_(world.block(11), 50)
            assert kept(world, 50)
            return struck

        assert everywhere(strike) > 4


def test_closing_finishes_what_has_begun(fresh: Fresh) -> None:
    with no_thread_left(), fresh(Gates(delay=late(1))) as world:
        under_way(world)
        assert within(LONG, world.transfers.close)
        before = world.memory()
        for line in (world.compute, world.out):
            line.mark().wait()
        assert all(map(np.array_equal, before, world.memory()))
        assert within(LONG, world.transfers.close)
        assert is_(world.block(5), 10)
        assert is_(world.page(3), 14)


@UNUSED
def test_an_interrupt_anywhere_in_closing_leaves_it_to_be_done_again(fresh: Fresh) -> None:
    def strike(where: int) -> bool:
        with fresh(Gates(delay=late(where))) as world:
            store = world.store
            under_way(world)
            struck: bool = cut_short(world.transfers.close, where, OURS_AND_LOCKS)
            assert within(LONG, world.transfers.close)
            before = world.memory()
            assert not any(
                thread.is_alive()
                for workers in (store._readers, store._writers)
                for thread in workers._threads
            )
            for line in (world.compute, world.out):
                line.mark().wait()
            assert all(map(np.array_equal, before, world.memory()))
        return struck

    assert everywhere(strike) > 10


class Impatient:
    """Computes; whoever waits for a transfer loses patience."""

    carrier = None
    ahead = closed = False

    def begin(self, plan: Plan) -> "Impatient":
        self._plan = plan
        return self

    def outcome(self) -> Outcome:
        if not self._plan.shares:
            raise KeyboardInterrupt
        return Outcome(tuple(Result((0,) if share.sample else ()) for share in self._plan.shares))

    def settle(self) -> tuple[Landed, ...]:
        return ()

    def close(self) -> None:
        self.closed = True


def test_an_engine_whose_end_is_interrupted_is_closed_all_the_same() -> None:
    ranks = Impatient()
    engine = Engine(
        Scheduler(
            BlockLedger(8),
            SchedulerLimits(4, 16, 4, 100),
            PrefixRule(ROOT),
            Storage(HostLedger(8), store="eager"),
        ),
        ranks,
    )
    engine.submit([1] * 9, sampling(), 1)
    assert engine.step()[0].finish is not None
    with pytest.raises(KeyboardInterrupt):
        engine.finish()
    assert ranks.closed


def test_what_an_interrupt_keeps_from_being_begun_has_not_landed(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fresh() as world:
        write = world.store.write

        def interrupted(key: bytes, *more: Any) -> object:
            if key == key_of(1):
                raise KeyboardInterrupt
            return write(key, *more)

        monkeypatch.setattr(world.store, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.begin(world.transfer(Route.OUT, blocks=[0, 1, 2], numbers=[0, 1, 2]))
        [landed] = world.transfers.settle()
        assert {1, 2} <= set(landed.lost)


def test_what_a_disk_has_no_more_is_told_apart_from_what_it_has(fresh: Fresh) -> None:
    with fresh() as world:
        assert not world.go(Route.OUT, blocks=[0], numbers=[0]).lost
        landed = world.go(Route.IN, blocks=[1, 2], numbers=[0, 9])
        assert (landed.lost, landed.gone) == ((1,), (key_of(9),))


class InTurn:
    """Computes ahead, and notes whose outcomes are asked for."""

    carrier, ahead = None, True

    def __init__(self) -> None:
        self.begun: list[Plan] = []
        self.ended: list[Plan] = []
        self.interrupts = False
        """Whether somebody does who waits for an outcome."""

    def begin(self, plan: Plan) -> "Promised":
        self.begun.append(plan)
        return Promised(self, plan)

    def settle(self) -> tuple[Landed, ...]:
        return ()

    def check(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Promised:
    ranks: InTurn
    plan: Plan

    def outcome(self) -> Outcome:
        if self.ranks.interrupts:
            raise KeyboardInterrupt
        self.ranks.ended.append(self.plan)
        return Outcome(tuple(Result((0,) if share.sample else ()) for share in self.plan.shares))


def test_steps_end_in_the_order_in_which_they_began() -> None:
    """Also one that only moves blocks, behind one that computes."""
    ranks = InTurn()
    engine = Engine(
        Scheduler(
            BlockLedger(8),
            SchedulerLimits(4, 16, 4, 100),
            PrefixRule(ROOT),
            Storage(HostLedger(8), store="eager"),
        ),
        ranks,
    )
    engine.submit([1] * 9, sampling(), 2)
    for _ in range(3):
        engine.step()
    assert [(bool(plan.shares), bool(plan.transfers)) for plan in ranks.begun] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert ranks.ended == ranks.begun


def test_a_step_that_was_begun_behind_one_that_was_cut_short_is_forgotten() -> None:
    ranks = InTurn()
    engine = Engine(
        Scheduler(BlockLedger(8), SchedulerLimits(4, 16, 4, 100), PrefixRule(ROOT), check=True), ranks
    )
    engine.submit([1] * 9, sampling(), 3)
    engine.step()
    ranks.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    ranks.interrupts, lost = False, len(ranks.begun)
    tokens = [event.token for _ in range(8) if engine.busy for event in engine.step()]
    assert lost == 2
    assert tokens == [0, 0, 0]
    assert ranks.ended == ranks.begun[lost:]
