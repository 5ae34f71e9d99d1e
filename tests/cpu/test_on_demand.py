"""Several models of one server, each loaded at its first use: the protocol in a world of three models whose
loads a test ends. The real command is in test_on_demand_served.py.

In that world memory is a number: a load that begins before others have given theirs back is found at once.
"""

import asyncio
import multiprocessing
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from penstock import LLM
from penstock.base.config import Config
from penstock.base.errors import BudgetError, EngineClosedError
from penstock.engine.rooms import Hardware
from penstock.server import hosting
from penstock.server.broker.calls import BusyError
from penstock.server.fleet import process, stall
from penstock.server.hosting import Hosting
from penstock.server.on_demand.costs import LoadForecast, MemoryShare, cheapest, expected_cost
from penstock.server.on_demand.model import LoadError, ModelPhase, OnDemandModel
from penstock.server.on_demand.models import OnDemandModels
from penstock.server.on_demand.shares import grown
from penstock.server.settings import OnDemandSettings

ROOM = 10
SIZES = {"a": 4, "b": 5, "c": 6}


class Engine:
    """What a load makes: it knows whether it is there."""

    def __init__(self, world: "World", name: str) -> None:
        self._world, self.name, self.there = world, name, True

    async def close(self) -> None:
        assert self.there
        assert not self._world.using[self.name], "it is closed while a request uses it"
        self.there = False
        await self._world.pause()
        self._world.taken -= SIZES[self.name]
        self._world.closed.append(self.name)


class World:
    """Three models, of which the room holds two."""

    def __init__(self, *, idle: float = inf, queue: int = 100, keys: int = 0, steps: int = 3) -> None:
        self.taken, self.steps = 0, steps
        self.now, self.takes = 0.0, 1.0
        """Seconds that a load takes, beside those that pass meanwhile."""
        self.using = dict.fromkeys(SIZES, 0)
        self.begun, self.closed = list[str](), list[str]()
        self.fault: Exception | None = None
        self.gate: asyncio.Event | None = None
        """A load that has begun waits for it."""
        self.named = {
            name: OnDemandModel[Engine](name, size, MemoryShare(size)) for name, size in SIZES.items()
        }
        costs = LoadForecast(dict.fromkeys(SIZES, inf))
        self.models = OnDemandModels(
            list(self.named.values()), MemoryShare(ROOM), self.load, costs, idle=idle, queue=queue,
            keys=keys, clock=lambda: self.now,
        )  # fmt: skip

    async def pause(self) -> None:
        for _ in range(self.steps):
            await asyncio.sleep(0)

    async def load(self, model: OnDemandModel[Engine]) -> Engine:
        self.begun.append(model.name)
        self.taken += SIZES[model.name]
        assert self.taken <= ROOM, "a load has begun before there was room"
        try:
            await self.pause()
            if self.gate is not None:
                await self.gate.wait()
            if self.fault is not None:
                raise self.fault
            self.now += self.takes
        except BaseException:
            self.taken -= SIZES[model.name]
            raise
        return Engine(self, model.name)

    async def use(self, name: str, hold: Callable[[], Awaitable[object]], **how: object) -> None:
        lease = await self.models.lend(self.named[name], **how)  # type: ignore[arg-type]
        self.using[name] += 1
        try:
            assert lease.there.there, "what was lent is gone"
            assert lease.there.name == name
            await hold()
            assert lease.there.there, "it went while it was used"
        finally:
            self.using[name] -= 1
            lease.close()

    async def settled(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    def phases(self) -> dict[str, str]:
        return {name: str(one.phase) for name, one in self.named.items()}


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(5):
            await work()

    asyncio.run(limited())


def test_each_is_loaded_once_and_the_cheapest_goes() -> None:
    async def work() -> None:
        world = World()
        await asyncio.gather(*(world.use(name, world.pause) for name in "aabba"))
        assert world.begun == ["a", "b"]
        assert world.phases() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        world.now = 100.0
        await world.use("a", world.pause)  # b has been idle for longer.
        await world.use("c", world.pause)
        assert (world.begun, world.closed) == (["a", "b", "c"], ["b"])
        await world.models.close()
        assert world.taken == 0

    run(work)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_when_there_is_room_and_nothing_is_cut(seed: int) -> None:
    """Requests come, stay, leave while they wait and while they are lent; loads fail at random."""

    async def work() -> None:
        draw, world = random.Random(seed), World(idle=3.0, steps=1 + seed % 4)
        outcomes = list[str]()

        async def ask(name: str) -> None:
            async def hold() -> None:
                for _ in range(draw.randrange(12)):
                    await asyncio.sleep(0)

            try:
                await world.use(name, hold, keep=draw.choice([inf, 0.0, 2.0]))
                outcomes.append("answered")
            except LoadError as fault:
                outcomes.append(str(fault))

        tasks = list[asyncio.Task[None]]()
        for _ in range(300):
            tasks.append(asyncio.ensure_future(ask(draw.choice("abc"))))
            world.fault = BudgetError("not enough") if draw.random() < 0.1 else None
            world.now += draw.random()
            if draw.random() < 0.3:
                draw.choice(tasks).cancel()
            for _ in range(draw.randrange(8)):
                await asyncio.sleep(0)
        world.fault = None
        while not all(task.done() for task in tasks):
            world.now += 10.0
            world.models.models["a"].changed()
            await asyncio.sleep(0)
        for task in tasks:
            with suppress(asyncio.CancelledError):
                task.result()
        assert outcomes.count("answered") > 100
        assert {one for one in outcomes if one != "answered"} <= {
            f"the model {name} cannot be loaded: not enough" for name in "abc"
        }
        assert not any(one.uses or one.waiters for one in world.named.values())
        await world.models.close()
        assert world.taken == 0
        assert len(world.closed) > 3

    run(work)


def test_a_model_in_use_is_waited_for_and_lent_no_more_meanwhile() -> None:
    """Else those who ask for it again and again would keep others out for ever."""

    async def work() -> None:
        world, end = World(), asyncio.Event()
        long = asyncio.ensure_future(world.use("b", end.wait))
        await world.use("a", world.pause)
        await world.settled()
        busy = asyncio.ensure_future(world.use("a", end.wait))
        other = asyncio.ensure_future(world.use("c", world.pause))
        await world.settled()
        assert world.phases()["c"] == "unloaded", "both are used"
        again = asyncio.ensure_future(world.use("b", world.pause))
        await world.settled()
        assert again.done(), "b has been there for less time than a load takes: nothing has to go for c yet"
        world.now = 60.0
        world.named["c"].changed()
        await world.settled()
        late = [asyncio.ensure_future(world.use(name, world.pause)) for name in "ab"]
        await world.settled()
        assert [one.done() for one in (other, *late)] == [False, True, False], "b alone makes room for c"
        assert world.models.expected_wait(world.named["b"]) == pytest.approx(2.6), "two loads, two unloads"
        other.cancel()
        await world.settled()
        assert late[1].done(), "nobody waits for c any more"
        other = asyncio.ensure_future(world.use("c", world.pause))
        await world.settled()
        late.append(asyncio.ensure_future(world.use("b", world.pause)))
        await world.settled()
        end.set()
        await asyncio.gather(long, busy, other, *late)
        assert world.begun == ["a", "b", "c", "b"]
        await world.models.close()

    run(work)


def test_those_who_waited_for_a_load_that_fails_are_told_why_and_others_go_on() -> None:
    async def work() -> None:
        world, end = World(), asyncio.Event()
        used = asyncio.ensure_future(world.use("a", end.wait))
        await world.settled()
        world.fault = BudgetError("3 GiB do not fit")
        for fault in await asyncio.gather(
            *(world.use("b", world.pause) for _ in range(3)), return_exceptions=True
        ):
            assert isinstance(fault, LoadError)
            assert str(fault) == "the model b cannot be loaded: 3 GiB do not fit"
        assert (world.phases()["a"], world.taken) == ("loaded", SIZES["a"])
        begun = len(world.begun)
        with pytest.raises(LoadError, match="do not fit"):
            await world.use("b", world.pause)
        assert len(world.begun) == begun, "it is not tried again at once"
        world.fault, world.now = None, 6.0
        await world.use("b", world.pause)
        end.set()
        await used
        await world.models.close()

    run(work)


def test_a_client_that_goes_as_the_load_ends_gives_the_model_back() -> None:
    async def work() -> None:
        world = World()
        waiting = asyncio.ensure_future(world.use("a", world.pause))
        model = world.named["a"]
        while not model.uses:  # It is lent, and who waits for it has not run since.
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert waiting.cancelled()
        assert not model.uses
        await world.use("b", world.pause)
        await world.use("c", world.pause)
        await world.models.close()

    run(work)


def test_idle_models_go_and_keep_alive_says_when() -> None:
    async def work() -> None:
        world = World(idle=5.0)

        async def later(seconds: float) -> None:
            world.now += seconds
            world.named["a"].changed()
            await world.settled()

        await world.use("a", world.pause)
        await world.use("b", world.pause, keep=inf)
        await later(3.9)  # The load of b took 1.
        assert world.phases()["a"] == "loaded"
        assert world.models.expires_in(world.named["a"]) == pytest.approx(0.1)
        assert world.models.expires_in(world.named["b"]) is None
        await later(0.2)
        assert world.phases() == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
        world.models.unload_soon(world.named["b"])
        await world.settled()
        assert world.taken == 0
        await world.use("a", world.pause, keep=0.0)
        await world.settled()
        assert world.taken == 0
        await world.models.close()

    run(work)


def test_an_engine_that_fails_is_unloaded_and_loaded_again() -> None:
    async def work() -> None:
        world = World()
        lease = await world.models.lend(world.named["a"])
        world.models.failed(world.named["a"], "killed")
        await world.settled()
        assert world.phases()["a"] == "unloaded"
        assert "killed" in world.named["a"].fault
        lease.close()
        await world.use("a", world.pause)
        assert world.begun == ["a", "a"]
        assert not world.named["a"].fault
        await world.models.close()

    run(work)


def test_waiting_is_bounded_and_told() -> None:
    async def work() -> None:
        world = World(queue=2)
        world.gate = asyncio.Event()
        first = asyncio.ensure_future(world.use("a", world.pause))
        await world.settled()
        world.now = 0.5
        assert world.models.expected_wait(world.named["a"]) == pytest.approx(1.0)
        second = asyncio.ensure_future(world.use("b", world.pause))
        await world.settled()
        assert world.models.expected_wait(world.named["b"]) == pytest.approx(2.5), "behind the first"
        with pytest.raises(BusyError, match=r"c will be there in about 4\.\d s") as refused:
            await world.use("c", world.pause)
        assert refused.value.seconds == pytest.approx(4.3)
        world.models.stop_lending()
        world.gate.set()
        for one in (first, second):
            with pytest.raises(EngineClosedError, match="shut down"):
                await one
        with pytest.raises(EngineClosedError, match="shutting down"):
            await world.use("a", world.pause)
        await world.models.close()
        assert world.taken == 0

    run(work)


def test_one_request_may_always_wait_and_a_key_has_half_of_the_room() -> None:
    async def work() -> None:
        world = World(queue=0)
        await world.use("a", world.pause, outputs=3)  # Else nothing would ever be loaded.
        await world.models.close()
        world = World(queue=4, keys=2)
        world.gate = asyncio.Event()
        first = asyncio.ensure_future(world.use("a", world.pause, outputs=2, owner=b"one"))
        await world.settled()
        with pytest.raises(BusyError, match=r"2 outputs of this key wait .* at most 2 may"):
            await world.use("b", world.pause, owner=b"one")
        other = asyncio.ensure_future(world.use("b", world.pause, outputs=2, owner=b"two"))
        await world.settled()
        world.gate.set()
        await asyncio.gather(first, other)
        await world.models.close()

    run(work)


def test_clients_of_two_models_take_turns_and_not_each_request_a_load() -> None:
    """Each asks again 0.1 s after its answer, which takes 0.1 s; a load takes 1 s, and an unload. In each of
    the short pauses the other's model could be loaded, and no answer would come without a load."""

    async def work() -> None:
        world, count = World(steps=100), 30
        world.takes = 0.0
        over = list[str]()

        async def passed(seconds: float) -> None:
            late = world.now + seconds
            while world.now < late:
                await asyncio.sleep(0)

        async def client(name: str) -> None:
            for _ in range(count):
                await world.use(name, lambda: passed(0.1))
                over.append(name)
                await passed(0.1)

        async def done(*tasks: asyncio.Future[None]) -> float:
            began = world.now
            while not all(one.done() for one in tasks):
                world.now += 0.01
                world.named["a"].changed()
                await asyncio.sleep(0)
            for one in tasks:
                one.result()
            return world.now - began

        await done(*(asyncio.ensure_future(client(name)) for name in "bc"))
        assert len(world.begun) < count
        assert min(over[:count].count(name) for name in "bc") > count // 4, "one keeps the other out"
        # Who asks no more is waited for no longer than it usually pauses.
        for name in "bc":
            waited = await done(asyncio.ensure_future(world.use(name, lambda: passed(0.0))))
        assert waited < 2.5, "two pauses, an unload and a load at most"
        await world.models.close()

    run(work)


# ---- an engine that is not well


FORK = multiprocessing.get_context("fork")


def play(monkeypatch: pytest.MonkeyPatch, engine: Callable[[Connection], None]) -> None:
    """Let the next process that is started be a fork that plays an engine."""
    near, far = FORK.Pipe()

    def started(*_: object) -> tuple[Any, Connection]:
        child = FORK.Process(target=engine, args=(far,), daemon=True)
        child.start()
        far.close()
        return child, near

    monkeypatch.setattr(process, "_started", started)


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (process._Failed(EngineClosedError("the device is lost")), "the device is lost"),
        ((1, BusyError("cannot be read again: it has two arguments", 1.0)), "what it says cannot be read"),
    ],
)
def test_what_waits_for_an_engine_is_told_also_if_its_process_does_not_end(
    last: object, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stubborn(line: Connection) -> None:
        line.send(process._Loaded(None))  # type: ignore[arg-type]
        line.recv()
        line.send(last)
        time.sleep(60)

    play(monkeypatch, stubborn)
    ended = list[str]()
    engine = process.EngineProcess("a", Config(), ended.append)
    engine.start()

    async def work() -> None:
        request: Any = "a request"
        for _ in range(2):
            with pytest.raises(EngineClosedError, match=f"the engine of a has ended: {why}"):
                await anext(engine.answer((), request))
        while not ended:  # It is told last.
            await asyncio.sleep(0.001)

    try:
        run(work)
    finally:
        engine.kill()
        engine.stop()
    assert [one.startswith(why) for one in ended] == [True]


@pytest.mark.parametrize("busy", [False, True])
def test_a_load_that_does_not_get_on_is_given_up(monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    """One that computes or reads is waited for, however long it takes."""

    def load(line: Connection) -> None:
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            if busy:
                Path("/proc/self/stat").read_bytes()
            time.sleep(0.05)
        line.send(process._Loaded(None))  # type: ignore[arg-type]
        line.recv()

    play(monkeypatch, load)
    monkeypatch.setattr(stall, "STALL", 2.0)
    monkeypatch.setattr(stall, "LOOK", 0.1)
    monkeypatch.setattr(stall, "_IDLE", 0.2)  # The machine may be busy, and a look late.
    engine = process.EngineProcess("a", Config())
    if busy:
        engine.start()
        engine.stop()
        return
    with pytest.raises(EngineClosedError, match=r"loading a has neither computed nor read anything for 2 s"):
        engine.start()


def test_what_only_waits_does_not_get_on() -> None:
    used = iter([(1.0, 5), (1.01, 5), (1.03, 5), (1.03, 6), (2.0, 6), (2.0, 6), None, (2.0, 6), (2.0, 6)])
    at = iter(range(20))
    with patch.object(stall.StallWatch, "_used", lambda _: next(used)):
        watch = stall.StallWatch(1, lambda: float(next(at)))
        assert [watch.seconds() for _ in range(8)] == [1, 0, 0, 0, 1, 0, 0, 1]


def test_no_loop_waits_for_a_process_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is larger than a pipe takes, and its engine reads once the loop has gone on."""
    goes_on = FORK.Event()

    def busy(line: Connection) -> None:
        line.send(process._Loaded(None))  # type: ignore[arg-type]
        if goes_on.wait(10):
            number, _, given = line.recv()
            line.send((number, len(given)))
            line.send((number, process._Last()))
            line.recv()

    play(monkeypatch, busy)
    engine = process.EngineProcess("a", Config())
    engine.start()
    request: Any = "x" * (1 << 20)

    async def work() -> None:
        asking = asyncio.ensure_future(anext(engine.answer((), request)))
        await asyncio.sleep(0.01)
        goes_on.set()
        assert await asking == len(request)

    try:
        run(work)
    finally:
        engine.stop()


# ---- what it costs


class Sized:
    def __init__(self, device: int, host: int = 0) -> None:
        self.share = MemoryShare(device, host)


def test_what_costs_least_to_do_without_goes() -> None:
    small, large, other = Sized(1), Sized(10), Sized(4, 9)
    priced = [(1.0, small), (2.0, large), (3.0, other)]
    assert cheapest(priced, MemoryShare(0)) == []
    assert cheapest(priced, MemoryShare(1)) == [small]
    assert cheapest(priced, MemoryShare(5)) == [large], "the small one is not needed beside it"
    assert cheapest(priced, MemoryShare(1, 9)) == [other]
    assert cheapest(priced, MemoryShare(16)) is None
    assert cheapest(priced, MemoryShare(1, 10)) is None
    # One that takes long to load stays, though it was used longer ago.
    assert expected_cost(60.0, gap=10.0, idle=50.0) > expected_cost(2.0, gap=10.0, idle=5.0)
    # One that is asked for often stays, and goes when it is asked for no more.
    assert expected_cost(2.0, gap=1.0, idle=0.5) > expected_cost(2.0, gap=30.0, idle=0.1)
    assert expected_cost(2.0, gap=1.0, idle=90.0) < expected_cost(2.0, gap=30.0, idle=0.1)


@pytest.mark.parametrize(
    ("room", "wanted", "right"),
    [
        (20, {"a": (4, 9), "b": (2, 3)}, [9, 3]),
        (10, {"a": (4, 9), "b": (2, 3)}, [7, 3]),
        (6, {"a": (4, 9), "b": (2, 3)}, [4, 2]),
        (5, {"a": (4, 9), "b": (2, 3)}, [5, 3]),
        (6, {"a": (4, 9), "b": (4, 9), "c": (2, 3)}, [4, 4, 2]),
        (9, {"a": (4, 4), "b": (2, 2)}, [4, 2]),
        (30, {"a": (4, 9)}, [9]),
        (6, {"a": (4, 9)}, [6]),
    ],
)
def test_what_all_models_leave_is_for_long_contexts(
    room: int, wanted: dict[str, tuple[int, int]], right: list[int]
) -> None:
    """Models that fit together still do. One that fits beside no other has all there is."""
    shares = {name: (MemoryShare(least, 1), MemoryShare(most, 1)) for name, (least, most) in wanted.items()}
    assert grown(shares, MemoryShare(room, 5)) == {
        name: MemoryShare(size, 1) for name, size in zip(wanted, right, strict=True)
    }


def test_a_model_has_room_for_its_whole_context_where_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Hardware(False, 4 << 30, 4 << 30, 4 << 30, 4 << 30)
    monkeypatch.setattr(hosting, "hardware_of", lambda _: free)
    config = Config(device="cpu", dtype="float32", max_sequences=4)
    host = Hosting({"a": config, "b": config}, {"b": "120MiB"}, OnDemandSettings())
    host.prepare()
    assert host._prepared is not None
    shares = {model.name: model.share.device for model in host._prepared.models}
    assert shares["b"] == 120 << 20
    with LLM(config.model, device="cpu", dtype="float32", max_sequences=4, device_memory=shares["a"]) as llm:
        assert llm.limits.max_model_len == llm.spec.max_length


def test_loads_teach_what_loads_take() -> None:
    costs = LoadForecast({"a": 100.0, "b": 50.0})
    assert costs.seconds("a", 200) == pytest.approx(3.5)
    costs.loaded("a", 200, 6.0)  # 4 s beside reading
    assert costs.seconds("a", 200) == 6.0
    assert costs.seconds("b", 200) == pytest.approx(8.0)
    costs.loaded("a", 200, 4.0)
    assert costs.seconds("a", 200) == 5.0
    assert costs.seconds("b", 200) == pytest.approx(7.0)


def test_phases_are_told_by_their_names() -> None:
    assert [str(phase) for phase in ModelPhase] == ["unloaded", "loading", "loaded", "unloading"]
