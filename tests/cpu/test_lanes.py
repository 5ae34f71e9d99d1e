"""Threads that read requests: keys in turns, whoever goes leaves its place, and a thread is free only when
its work has ended."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from penstock.server.http.threads import FairThreads
from streams import LONG


def run(work: Callable[[], object]) -> None:
    asyncio.run(asyncio.wait_for(work(), LONG / 4))  # type: ignore[arg-type]


def test_keys_come_in_turns_and_each_in_its_order() -> None:
    order: list[str] = []

    async def all_of_them() -> None:
        lane, gate = FairThreads(1), threading.Event()
        first = asyncio.ensure_future(lane.run(b"a", gate.wait))
        await asyncio.sleep(0)
        asked = [(b"a", "a0"), (b"a", "a1"), (b"a", "a2"), (b"b", "b0"), (b"c", "c0"), (b"b", "b1")]
        rest = [
            asyncio.ensure_future(lane.run(owner, lambda name=name: order.append(name)))
            for owner, name in asked
        ]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, *rest)

    run(all_of_them)
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2"]


def test_whoever_goes_leaves_its_place() -> None:
    order: list[str] = []

    async def all_of_them() -> None:
        lane, gate = FairThreads(1), threading.Event()
        first = asyncio.ensure_future(lane.run(b"a", gate.wait))
        await asyncio.sleep(0)
        gone, stays = (
            asyncio.ensure_future(lane.run(b"a", lambda name=name: order.append(name)))
            for name in ("gone", "stays")
        )
        await asyncio.sleep(0)
        gone.cancel()
        gate.set()
        await asyncio.gather(first, stays)
        assert await lane.run(b"b", lambda: "free") == "free"

    run(all_of_them)
    assert order == ["stays"]


def test_a_thread_is_free_when_its_work_has_ended() -> None:
    """Whoever waits for that work, or no longer does."""

    async def all_of_them() -> None:
        lane, begun, gate, at_once, most = FairThreads(2), threading.Semaphore(0), threading.Event(), 0, 0
        lock = threading.Lock()

        def work() -> None:
            nonlocal at_once, most
            with lock:
                at_once += 1
                most = max(most, at_once)
            begun.release()
            gate.wait(LONG)
            with lock:
                at_once -= 1

        both = [asyncio.ensure_future(lane.run(b"a", work)) for _ in range(2)]
        await asyncio.to_thread(lambda: [begun.acquire() for _ in range(2)])
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        third = asyncio.ensure_future(lane.run(b"b", work))
        await asyncio.sleep(0.05)
        assert at_once == 2
        assert not third.done()
        gate.set()
        await third
        assert most == 2
        async with asyncio.timeout(LONG):
            while lane._free < 2:  # The first two may end after the third.
                await asyncio.sleep(0.001)
        assert lane._free == 2

    run(all_of_them)


def test_a_key_has_not_all_threads() -> None:
    """However much of it waits; what it may have beyond its share is another's."""

    async def all_of_them() -> None:
        lane, gate = FairThreads(2, 1), threading.Event()
        held = [asyncio.ensure_future(lane.run(b"a", gate.wait)) for _ in range(4)]
        await asyncio.sleep(0)
        assert await lane.run(b"b", lambda: "free") == "free"
        assert lane._busy == {b"a": 1}
        gate.set()
        await asyncio.gather(*held)
        assert (lane._free, lane._busy, lane._waiting) == (2, {}, {})

    run(all_of_them)


def test_two_keys_at_their_bounds_go_on_when_theirs_ends() -> None:
    async def all_of_them() -> None:
        lane, gates = FairThreads(3, 1), {name: threading.Event() for name in (b"a", b"b")}
        held = [asyncio.ensure_future(lane.run(name, gate.wait)) for name, gate in gates.items()]
        behind = {name: asyncio.ensure_future(lane.run(name, lambda: None)) for name in gates}
        await asyncio.sleep(0.02)
        assert not any(one.done() for one in behind.values())
        gates[b"b"].set()
        await behind[b"b"]
        assert not behind[b"a"].done()
        gates[b"a"].set()
        await asyncio.gather(*held, behind[b"a"])

    run(all_of_them)


def test_a_turn_that_was_just_given_to_who_goes_is_handed_on() -> None:
    async def all_of_them() -> None:
        lane = FairThreads(1)
        lane._free, lane._busy = 0, Counter({b"a": 1})
        gone = asyncio.ensure_future(lane.run(b"a", lambda: None))
        stays = asyncio.ensure_future(lane.run(b"a", lambda: "done"))
        await asyncio.sleep(0)
        lane._leave(b"a")
        gone.cancel()
        assert await stays == "done"

    run(all_of_them)


def test_what_the_work_raises_is_raised() -> None:
    async def all_of_them() -> None:
        lane = FairThreads(1)
        with pytest.raises(ZeroDivisionError):
            await lane.run(b"", lambda: 1 // 0)
        assert await lane.run(b"", lambda: 3) == 3

    run(all_of_them)


def test_alone_all_wait_at_the_threads() -> None:
    """Nobody takes turns, so a thread goes on to the next without a word from the loop, which may be busy;
    who is cancelled is left out."""
    order: list[int] = []
    done = threading.Event()

    async def all_of_them() -> None:
        lane, gate = FairThreads(1, alone=True), threading.Event()
        first = asyncio.ensure_future(lane.run(b"a", gate.wait))
        await asyncio.sleep(0)

        def work(number: int) -> None:
            order.append(number)
            if number == 4:
                done.set()

        rest = [
            asyncio.ensure_future(lane.run(b"a", lambda number=number: work(number))) for number in range(5)
        ]
        await asyncio.sleep(0)
        rest[2].cancel()
        await asyncio.sleep(0)
        gate.set()
        assert done.wait(LONG / 8)  # The loop does nothing meanwhile.
        await asyncio.gather(first, *rest, return_exceptions=True)

    run(all_of_them)
    assert order == [0, 1, 3, 4]
