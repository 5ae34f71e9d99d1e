"""What ranks do in tests: sums over all of them, and on demand whatever may befall a process. Followers
import this too."""

import contextlib
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch

import forks
from penstock.base.errors import CheckpointError, ConfigError, DeviceError
from penstock.parallel.group import Group
from penstock.parallel.launch import Crew, launch
from penstock.parallel.seat import Seat
from penstock.step.adapter import LoadedAdapter
from penstock.step.plan import Landed, Outcome, Plan, Result
from penstock.worker.rank import Leader, serve
from streams import LONG

CPU = torch.device("cpu")
NOTHING = Plan((), ())


def order(what: str, rank: int) -> Plan:
    """A plan in whose midst something befalls a rank."""
    return Plan((), (), forget=(f"{what}:{rank}".encode(),))


class Sums:
    """A rank's part: every plan sums, over the ranks, how many plans each has begun before, and ones, and how
    often each has given back the memory of KV, and is at its end as many behind as it was begun behind. A
    transfer lands on rank r in the r-th step behind its own, in r seconds, and without its r-th block. On
    demand a device says of a sum that it is incomplete: when a step begins or ends, or an adapter is
    loaded."""

    carrier = None
    ahead = True

    def __init__(self, group: Group) -> None:
        self.group, self.ran, self.ended, self.closed, self.freed = group, 0, 0, 0, 0
        self._going: dict[int, tuple[int, Landed]] = {}

    def begin(self, plan: Plan) -> "Sum":
        rank, incomplete = self.group.rank, False
        for transfer in plan.transfers:
            lost = (rank,) if rank < len(transfer.blocks) else ()
            self._going[transfer.id] = (
                self.ran + rank,
                Landed(transfer.id, float(rank), lost, tuple(b"%d" % one for one in lost)),
            )
        for text in plan.forget:
            what, _, whom = text.decode().partition(":")
            if int(whom) == rank and what == "incomplete":
                self.group.over.fill_(1)
            elif int(whom) == rank and what == "incomplete at its end":
                incomplete = True
            elif int(whom) == rank:
                befall(what)
        total = torch.tensor([self.ran, 1, self.freed])
        self.group.all_reduce(total)
        self.ran += 1
        return Sum(self, self.ran, total, incomplete)

    def settle(self) -> tuple[Landed, ...]:
        self.ended = self.ran
        landed = tuple(one for _, one in self._going.values())
        self._going.clear()
        return landed

    def read_adapter(self, loaded: LoadedAdapter) -> Any:
        if loaded.path == f"damaged on {self.group.rank}":
            raise CheckpointError("an adapter of the test's is damaged")
        return loaded

    def load_adapter(self, loaded: LoadedAdapter, adapter: Any) -> None:
        assert adapter.path == loaded.path
        if loaded.path == f"incomplete on {self.group.rank}":
            self.group.over.fill_(1)

    def free_kv(self) -> None:
        self.freed += 1

    def close(self) -> None:
        self.closed += 1


@dataclass
class Sum:
    """A step of a rank's, its arithmetic given to the device. They end in their order."""

    part: Sums
    number: int
    total: torch.Tensor
    incomplete: bool

    def outcome(self) -> Outcome:
        part = self.part
        part.ended += 1
        assert part.ended == self.number, "another step than the first that has not ended"
        if self.incomplete:
            part.group.over.fill_(1)
        landed = [one for when, one in part._going.values() if when < part.ended]
        for one in landed:
            del part._going[one.id]
        return Outcome(tuple(Result((int(one),)) for one in self.total), tuple(landed))


class _Held:
    """Lives as long as the fault that is raised where it is, as the group does: a follower that lets go of it
    before it ends says one thing more."""

    def __str__(self) -> str:
        return "own"

    def __del__(self) -> None:
        if sys.stderr is not None:
            print("freed too early", file=sys.stderr, flush=True)


def befall(what: str) -> None:
    match what:
        case "raise":
            held = _Held()
            raise ValueError(f"a fault of the test's {held}")
        case "refuse":
            raise ConfigError("a setting that does not suit; choose another")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "interrupt":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.1)
        case "sleep":
            time.sleep(1000)
        case _:
            raise AssertionError(what)


def work(seat: Seat, first: str = "") -> None:
    """A follower. `first` befalls rank 1 before it meets the others."""
    if first and seat.rank == 1:
        befall(first)
    group = seat.group(CPU)
    serve(seat.receive, Sums(group), group)


def tell_end(seat: Seat, path: str) -> None:
    """A follower that tells, in a file, how it stands when it has served: how often its part was closed,
    which takes a while, and whether the group is open."""
    group = seat.group(CPU)
    part = Sums(group)
    with patch.object(part, "close", lambda: (time.sleep(0.3), Sums.close(part))):
        serve(seat.receive, part, group)
    Path(path).write_text(f"{part.closed} {group._plain is not None}")


def absent(seat: Seat) -> None:
    """A follower that is gone when it has said that it has come."""
    with patch("penstock.parallel.seat.Group", lambda *_, **__: befall("kill")):
        seat.group(CPU)


class Gone:
    """In place of a library: who looks for anything in it is gone."""

    def __getattr__(self, name: str) -> None:
        befall("kill")


def lost(seat: Seat) -> None:
    """A follower that is gone when those on devices begin to meet, after those on hosts have met."""
    with patch("penstock.parallel.group.c10d", Gone()):
        seat.group(torch.device("cuda", 0))


def led(ranks: int, *, patience: float = LONG, timeout: float = 60.0) -> tuple[Leader, Crew]:
    """Rank 0 here, and the others."""
    crew = launch(ranks, work, patience=patience, timeout=timeout)
    try:
        group = crew.group(CPU)
        return Leader(Sums(group), crew, group), crew
    except BaseException:
        crew.close()
        raise


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No process, thread, descriptor, port or name is there that was not there before."""
    forks.ready()
    before = _there()
    yield
    late = time.monotonic() + LONG
    while left := {kind: more for kind, there in _there().items() if (more := there - before[kind])}:
        assert time.monotonic() < late, f"left behind: {left}"
        time.sleep(1e-2)


def _there() -> dict[str, set[object]]:
    me = psutil.Process()
    targets = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            targets.add((path.name, os.readlink(path)))
    return {
        "processes": set(children()),
        "descriptors": {one for one in targets if not one[1].startswith(("/proc", "/dev/null"))},
        "ports": {(one.laddr, one.status) for one in me.net_connections()},
        "names": set(os.listdir("/dev/shm")),
        "threads": {thread.id for thread in me.threads()},
    }


Cases = Mapping[str, Callable[[Group], None]]


@contextlib.contextmanager
def all_ranks(ranks: int, path: str, cases: Cases, device: str = "cpu") -> Iterator[Callable[[str], None]]:
    """What has so many ranks do one of the cases of a test's file, by its name. The same is asserted on each:
    one that fails ends, and its error is raised here."""
    crew = launch(ranks, follow_cases, path, device)
    try:
        group = crew.group(_place(device, 0))

        def do(name: str) -> None:
            crew.send(name.encode())
            try:
                cases[name](group)
                group.barrier()
            except DeviceError as fault:
                raise crew.verdict(fault) from fault
            assert crew.failure is None

        yield do
        crew.send(b"")
        group.close()
    finally:
        crew.close(10.0)


def _place(device: str, local: int) -> torch.device:
    return CPU if device == "cpu" else torch.device(device, local)


def follow_cases(seat: Seat, path: str, device: str) -> None:
    """A follower that does the cases of a test's file, by their names."""
    cases = runpy.run_path(path)["CASES"]
    place = _place(device, seat.local)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    group = seat.group(place)
    while name := seat.receive().decode():
        cases[name](group)
        group.barrier()
    group.close()
