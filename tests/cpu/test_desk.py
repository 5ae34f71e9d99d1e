"""Between an event loop and the engine: who is served when, who leaves when, and what everybody is told when it ends."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import EngineClosedError
from penstock.server.desk import BusyError, Call, DeadlineError, Desk
from penstock.server.metrics import Metrics

STEP = 64
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG_ONE, SHORT_ONE = list(range(10, 90)) * 10, [5, 6, 7]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(None, device="cpu", dtype="float32", device_memory="400MiB", max_sequences=6, max_step_tokens=STEP, prefix_cache=False) as llm:
        yield llm


def at_the_desk(llm: LLM, work: Callable[[Desk], Awaitable[None]], queue: int = 8, patience: float = 100.0) -> None:
    """Nothing is left when it is closed."""

    async def run() -> None:
        desk = Desk(llm, Metrics(), queue=queue)
        try:
            await work(desk)
        finally:
            await desk.close(patience)
            assert not desk.open
        assert desk.outputs == 0

    asyncio.run(run())
    assert llm.stats().running == llm.stats().waiting == 0
    assert llm.stats().kv_blocks_free == llm.stats().kv_blocks


def test_short_prompts_do_not_wait_for_long_ones_and_these_come_one_by_one(llm: LLM) -> None:
    """Whoever came first among the long ones is first; a short one comes before all of them."""
    expected = {name: llm.generate(prompt, PARAMS)[0].tokens for name, prompt in (("long", LONG_ONE), ("short", SHORT_ONE))}
    order: list[str] = []

    async def work(desk: Desk) -> None:
        async def answer(name: str, call: Call) -> None:
            async for _ in call.pieces():
                if name not in order:
                    order.append(name)
            assert call.so_far().tokens == expected[name.split()[0]]

        prompts = {f"long {number}": LONG_ONE for number in range(3)} | {"short 1": SHORT_ONE, "short 2": SHORT_ONE}
        calls = {name: desk.ask([llm.read(prompt, PARAMS)])[0] for name, prompt in prompts.items()}
        await asyncio.gather(*(answer(name, call) for name, call in calls.items()))

    at_the_desk(llm, work)
    assert sorted(order[:2]) == ["short 1", "short 2"]
    assert order[2:] == ["long 0", "long 1", "long 2"]


def test_who_leaves_before_its_turn_is_never_begun(llm: LLM) -> None:
    begun: list[int] = []
    begin = LLM.begin

    async def work(desk: Desk) -> None:
        calls = [desk.ask([llm.read([number, *LONG_ONE], PARAMS)])[0] for number in range(4)]
        calls[1].leave()
        calls[2].leave()
        assert desk.outputs == 2
        await asyncio.gather(calls[0].completion(), calls[3].completion())
        calls[0].leave()
        assert desk.outputs == 0

    with patch.object(LLM, "begin", lambda self, ready: (begun.append(ready.tokens[0]), begin(self, ready))[1]):
        at_the_desk(llm, work)
    assert begun == [0, 3]


def test_there_is_room_for_so_many_and_no_more(llm: LLM) -> None:
    async def work(desk: Desk) -> None:
        ready = llm.read(SHORT_ONE, SamplingParams(max_tokens=400, ignore_eos=True, n=4))
        calls = desk.ask([ready, ready])
        with pytest.raises(BusyError, match="8 outputs are under way or waiting, and 9 can at most") as busy:
            desk.ask([ready])
        assert busy.value.seconds >= 1
        with pytest.raises(BusyError, match="12 outputs were asked for, but there is room for 9") as never:
            desk.ask([ready] * 3)
        assert never.value.seconds == 0
        calls[0].leave()
        again = desk.ask([ready])
        for call in (*calls, *again):
            call.leave()

    at_the_desk(llm, work, queue=3)


def test_when_patience_is_over_everybody_is_told(llm: LLM) -> None:
    told: list[str] = []

    async def work(desk: Desk) -> None:
        async def answer(call: Call) -> None:
            with pytest.raises(EngineClosedError) as closed:
                await call.completion()
            told.append(str(closed.value))

        endless = SamplingParams(max_tokens=10_000, ignore_eos=True)
        calls = [desk.ask([llm.read([number, *prompt], endless)])[0] for number, prompt in enumerate([SHORT_ONE, LONG_ONE, LONG_ONE] * 3)]
        waiting = [asyncio.ensure_future(answer(call)) for call in calls]
        async for _ in calls[0].pieces():
            break
        closing = asyncio.ensure_future(desk.close(0.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineClosedError, match="shutting down"):
            desk.ask([llm.read(SHORT_ONE, PARAMS)])
        await closing
        await asyncio.gather(*waiting)

    at_the_desk(llm, work, queue=20)
    assert told == ["the server was shut down before this request was complete; send it again"] * 9


@pytest.mark.parametrize("when", ["at work", "idle"])
def test_when_the_engine_fails_everybody_is_told(llm: LLM, when: str) -> None:
    async def run() -> None:
        desk = Desk(llm, Metrics(), queue=3)
        fault = OSError("the device is gone")
        if when == "idle":
            with patch.object(LLM, "check", side_effect=fault):
                assert await asyncio.wait_for(desk.failure(), 100) is fault
        else:
            with patch.object(LLM, "advance", side_effect=fault):
                calls = [desk.ask([llm.read(SHORT_ONE, PARAMS)])[0] for _ in range(3)]
                for call in calls:
                    with pytest.raises(EngineClosedError, match="the engine has failed: the device is gone; send it again"):
                        await call.completion()
                assert await desk.failure() is fault
                llm.abandon([call._job for call in calls if call._job is not None])
        assert not desk.open
        with pytest.raises(EngineClosedError, match="it has failed: the device is gone"):
            desk.ask([llm.read(SHORT_ONE, PARAMS)])
        await desk.close(100.0)

    asyncio.run(run())


def test_of_those_that_wait_the_least_number_is_first_long_or_short(llm: LLM) -> None:
    order: list[int] = []

    async def work(desk: Desk) -> None:
        async def answer(number: int, call: Call) -> None:
            await call.completion()
            order.append(number)

        # Five of six rows are taken for long, so the short ones go through the last, one by one, from the engine's queue.
        rows = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, n=n) for most, n in ((5_000, 5), (30, 1))]
        taken = [desk.ask([llm.read(SHORT_ONE, params)])[0] for params in rows]
        for call in taken:
            async for _ in call.pieces():
                break
        # The long ones wait for their turn here.
        for prompt in (SHORT_ONE, LONG_ONE):
            calls = [(number, desk.ask([replace(llm.read(prompt, PARAMS), priority=number)])[0]) for number in (2, 0, 1)]
            await asyncio.gather(*(answer(number, call) for number, call in calls))
            taken[0].leave()

    at_the_desk(llm, work)
    assert order[:3] == [0, 1, 2]
    assert order[3:] in ([0, 1, 2], [2, 0, 1])  # The first to come may have been met alone.


def test_who_may_take_no_longer_is_told_so_and_holds_nothing(llm: LLM) -> None:
    [alone] = llm.generate(LONG_ONE, PARAMS)
    endless = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)

    async def work(desk: Desk) -> None:
        late, later, free = (llm.read(prompt, params) for prompt, params in ((SHORT_ONE, endless), (LONG_ONE, endless), (LONG_ONE, PARAMS)))
        desk.most_seconds = 0.3
        calls = desk.ask([late, later], 1000.0)
        desk.most_seconds = None
        whole = desk.ask([free], 1000.0)[0]
        for call in calls:
            with pytest.raises(DeadlineError, match=r"has taken 0\.3 seconds, which is all it may \(timeout\)"):
                await call.completion()
        assert (await whole.completion()).tokens == alone.tokens
        assert whole._timer is not None
        assert whole._timer.cancelled()
        assert desk.outputs == 0
        with pytest.raises(DeadlineError, match=r"0\.001 seconds"):
            await desk.ask([late], 0.001)[0].completion()

    at_the_desk(llm, work)
