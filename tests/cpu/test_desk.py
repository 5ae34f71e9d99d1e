"""Between an event loop and the engine: who is served when, who leaves when, and what everybody is told when
it ends."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from penstock import LLM, SamplingParams
from penstock.api.driver import EngineDriver
from penstock.api.outputs import Delta
from penstock.base.errors import EngineClosedError
from penstock.engine.engine import Engine
from penstock.server.broker import backend
from penstock.server.broker.backend import LocalBackend
from penstock.server.broker.broker import RequestBroker
from penstock.server.broker.calls import BusyError, Call, DeadlineError, Update
from penstock.server.broker.metrics import Metrics
from penstock.step.plan import RequestId
from streams import LONG

STEP = 64
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG_ONE, SHORT_ONE = list(range(10, 90)) * 10, [5, 6, 7]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        None,
        device="cpu",
        dtype="float32",
        device_memory="400MiB",
        max_sequences=6,
        max_step_tokens=STEP,
        prefix_cache=False,
    ) as llm:
        yield llm


def at_the_desk(
    llm: LLM, work: Callable[[RequestBroker], Awaitable[None]], queue: int = 8, patience: float = 100.0
) -> None:
    """Nothing is left when it is closed."""

    async def run() -> None:
        broker = RequestBroker(LocalBackend(llm), Metrics(), queue=queue)
        try:
            await work(broker)
        finally:
            await broker.close(patience)
            assert not broker.open
        assert broker.outputs == 0

    asyncio.run(run())
    assert llm.stats().running == llm.stats().waiting == 0
    assert llm.stats().kv_blocks_free == llm.stats().kv_blocks


def test_short_prompts_do_not_wait_for_long_ones_and_these_come_one_by_one(llm: LLM) -> None:
    """Whoever came first among the long ones is first; a short one comes before all of them."""
    expected = {
        name: llm.generate(prompt, PARAMS)[0].tokens
        for name, prompt in (("long", LONG_ONE), ("short", SHORT_ONE))
    }
    order: list[str] = []

    async def work(broker: RequestBroker) -> None:
        async def answer(name: str, call: Call) -> None:
            async for _ in call.pieces():
                if name not in order:
                    order.append(name)
            assert call.so_far().tokens == expected[name.split()[0]]

        prompts = {f"long {number}": LONG_ONE for number in range(3)} | {
            "short 1": SHORT_ONE,
            "short 2": SHORT_ONE,
        }
        calls = {
            name: broker.submit([llm.reader.read(prompt, PARAMS)])[0] for name, prompt in prompts.items()
        }
        await asyncio.gather(*(answer(name, call) for name, call in calls.items()))

    at_the_desk(llm, work)
    assert sorted(order[:2]) == ["short 1", "short 2"]
    assert order[2:] == ["long 0", "long 1", "long 2"]


def test_who_leaves_before_its_turn_is_never_begun(llm: LLM) -> None:
    begun: list[int] = []
    begin = EngineDriver.begin

    async def work(broker: RequestBroker) -> None:
        calls = [broker.submit([llm.reader.read([number, *LONG_ONE], PARAMS)])[0] for number in range(4)]
        calls[1].leave()
        calls[2].leave()
        assert broker.outputs == 2
        await asyncio.gather(calls[0].completion(), calls[3].completion())
        calls[0].leave()
        assert broker.outputs == 0

    with patch.object(
        EngineDriver, "begin", lambda self, ready: (begun.append(ready.tokens[0]), begin(self, ready))[1]
    ):
        at_the_desk(llm, work)
    assert begun == [0, 3]


def test_there_is_room_for_so_many_and_no_more(llm: LLM) -> None:
    async def work(broker: RequestBroker) -> None:
        ready = llm.reader.read(SHORT_ONE, SamplingParams(max_tokens=400, ignore_eos=True, n=4))
        calls = broker.submit([ready, ready])
        with pytest.raises(BusyError, match="8 outputs are running or waiting, and at most 9 may be") as busy:
            broker.submit([ready])
        assert busy.value.seconds >= 1
        with pytest.raises(
            BusyError, match="12 outputs were asked for, but the server computes at most 9"
        ) as never:
            broker.submit([ready] * 3)
        assert never.value.seconds == 0
        calls[0].leave()
        again = broker.submit([ready])
        for call in (*calls, *again):
            call.leave()

    at_the_desk(llm, work, queue=3)


def test_who_has_ended_or_gone_is_before_nobody(llm: LLM) -> None:
    """Also where no step follows that would look again."""

    async def work(broker: RequestBroker) -> None:
        def ahead() -> int:
            assert isinstance(broker._backend, LocalBackend)
            return len(broker._backend.sight.outlook.running)

        ready = llm.reader.read(SHORT_ONE, PARAMS)
        for _ in range(3):
            [call] = broker.submit([ready])
            await call.completion()
            assert call.forecast is not None
            assert call.forecast.place == ahead() == 0
        assert call.forecast.seconds is not None
        [endless] = broker.submit([replace(ready, max_tokens=4000)])
        async for _ in endless.pieces():
            if ahead():
                break
        endless.leave()
        late = time.monotonic() + 0.5  # Sooner than a look at whether the engine is still alive.
        while ahead():
            assert time.monotonic() < late
            await asyncio.sleep(0.01)

    at_the_desk(llm, work)


def test_who_leaves_the_queue_says_nothing_of_how_long_outputs_become(llm: LLM) -> None:
    async def work(broker: RequestBroker) -> None:
        backend = broker._backend
        assert isinstance(backend, LocalBackend)
        ready = replace(llm.reader.read(SHORT_ONE, PARAMS), max_tokens=4000)
        running = [broker.submit([ready])[0] for _ in range(6)]
        await asyncio.gather(*(anext(call.pieces()) for call in running))
        before = llm.driver.outlook().steps.ends
        waiting = [broker.submit([ready])[0] for _ in range(40)]
        while not backend.sight.outlook.waiting:
            await asyncio.sleep(0.01)
        for call in waiting:
            call.leave()
        while backend.sight.outlook.waiting:
            await asyncio.sleep(0.01)
        after = llm.driver.outlook().steps.ends
        assert before is not None
        assert after is not None
        assert after <= before, "no output has ended"
        for call in running:
            call.leave()

    llm.generate(SHORT_ONE, PARAMS)
    at_the_desk(llm, work, queue=64, patience=1.0)


def test_when_patience_is_over_everybody_is_told(llm: LLM) -> None:
    told: list[str] = []

    async def work(broker: RequestBroker) -> None:
        async def answer(call: Call) -> None:
            with pytest.raises(EngineClosedError) as closed:
                await call.completion()
            told.append(str(closed.value))

        endless = SamplingParams(max_tokens=10_000, ignore_eos=True)
        calls = [
            broker.submit([llm.reader.read([number, *prompt], endless)])[0]
            for number, prompt in enumerate([SHORT_ONE, LONG_ONE, LONG_ONE] * 3)
        ]
        waiting = [asyncio.ensure_future(answer(call)) for call in calls]
        while not calls[0].first_token_time:
            await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(broker.close(0.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineClosedError, match="shutting down"):
            broker.submit([llm.reader.read(SHORT_ONE, PARAMS)])
        await closing
        await asyncio.gather(*waiting)

    at_the_desk(llm, work, queue=20)
    assert told == ["the server was shut down before this request was complete; send it again"] * 9


@pytest.mark.parametrize("when", ["at work", "idle"])
def test_when_the_engine_fails_everybody_is_told(
    llm: LLM, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    afterwards = {"afterwards": "tiny is unloaded"} if when == "idle" else {}

    async def run() -> None:
        broker = RequestBroker(LocalBackend(llm), Metrics(), queue=3, **afterwards)
        fault = OSError("the device is gone")
        if when == "idle":
            with patch.object(EngineDriver, "check", side_effect=fault):
                assert await asyncio.wait_for(broker.failure(), 100) is fault
        else:
            with patch.object(EngineDriver, "advance", side_effect=fault):
                calls = [broker.submit([llm.reader.read(SHORT_ONE, PARAMS)])[0] for _ in range(3)]
                for call in calls:
                    with pytest.raises(
                        EngineClosedError, match="the engine has failed: the device is gone; send it again"
                    ):
                        await call.completion()
                assert await broker.failure() is fault
                llm.driver.abandon([call.group for call in calls if call.group is not None])
        assert not broker.open
        with pytest.raises(EngineClosedError, match="it has failed: the device is gone"):
            broker.submit([llm.reader.read(SHORT_ONE, PARAMS)])
        await broker.close(100.0)

    asyncio.run(run())
    follows = afterwards.get("afterwards", "the server stops; restart it")
    assert f"the engine has failed: the device is gone; {follows}" in caplog.text


def test_of_those_that_wait_the_least_number_is_first_long_or_short(llm: LLM) -> None:
    order: list[int] = []

    async def work(broker: RequestBroker) -> None:
        async def answer(number: int, call: Call) -> None:
            await call.completion()
            order.append(number)

        # Five of six rows are taken for long, so the short ones go through the last, one by one, from the
        # engine's queue.
        rows = [
            SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, n=n)
            for most, n in ((5_000, 5), (30, 1))
        ]
        taken = [broker.submit([llm.reader.read(SHORT_ONE, params)])[0] for params in rows]
        for call in taken:
            async for _ in call.pieces():
                break
        # The long ones wait for their turn here.
        for prompt in (SHORT_ONE, LONG_ONE):
            calls = [
                (number, broker.submit([replace(llm.reader.read(prompt, PARAMS), priority=number)])[0])
                for number in (2, 0, 1)
            ]
            await asyncio.gather(*(answer(number, call) for number, call in calls))
            taken[0].leave()

    at_the_desk(llm, work)
    assert order[:3] == [0, 1, 2]
    assert order[3:] in ([0, 1, 2], [2, 0, 1])  # The first to come may have been met alone.


def test_who_may_take_no_longer_is_told_so_and_holds_nothing(llm: LLM) -> None:
    [alone] = llm.generate(LONG_ONE, PARAMS)
    endless = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)

    async def work(broker: RequestBroker) -> None:
        late, later, free = (
            llm.reader.read(prompt, params)
            for prompt, params in ((SHORT_ONE, endless), (LONG_ONE, endless), (LONG_ONE, PARAMS))
        )
        broker.max_seconds = 0.3
        calls = broker.submit([late, later], 1000.0)
        broker.max_seconds = None
        whole = broker.submit([free], 1000.0)[0]
        for call in calls:
            with pytest.raises(
                DeadlineError, match=r"has taken 0\.3 seconds, the most that it may \(timeout\)"
            ):
                await call.completion()
        assert (await whole.completion()).tokens == alone.tokens
        assert whole.timer is not None
        assert whole.timer.cancelled()
        assert broker.outputs == 0
        with pytest.raises(DeadlineError, match=r"0\.001 seconds"):
            await broker.submit([late], 0.001)[0].completion()

    at_the_desk(llm, work)


def test_what_is_taken_at_once_does_not_come_again_and_the_order_stays(llm: LLM) -> None:
    """Taken or not by turns: together it is the answer, in its order, and only what was not taken wakes who
    waits."""
    [alone] = llm.generate(SHORT_ONE, replace(PARAMS, max_tokens=40))
    told: list[int] = []
    turns: list[bool] = []

    def at_once(deltas: Sequence[Delta]) -> bool:
        turns.append(len(turns) % 3 != 2)
        if turns[-1]:
            told.extend(token for delta in deltas for token in delta.tokens)
        return turns[-1]

    async def work(broker: RequestBroker) -> None:
        pieces = 0
        async for deltas in broker.submit([llm.reader.read(SHORT_ONE, replace(PARAMS, max_tokens=40))])[
            0
        ].pieces(at_once):
            told.extend(token for delta in deltas for token in delta.tokens)
            pieces += 1
            await asyncio.sleep(0.02 * (pieces % 2))  # What comes meanwhile comes after this.
        assert turns.count(False) <= pieces < 40

    at_the_desk(llm, work)
    assert tuple(told) == alone.tokens
    assert True in turns


def test_who_fails_while_it_takes_is_told_and_the_others_of_the_step_are_not_held_up(llm: LLM) -> None:
    [alone] = llm.generate(SHORT_ONE, PARAMS)

    def at_once(deltas: Sequence[Delta]) -> bool:
        raise ValueError("cannot be written")

    async def work(broker: RequestBroker) -> None:
        endless = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)
        [bad], [good] = (
            broker.submit([llm.reader.read(SHORT_ONE, endless)]),
            broker.submit([llm.reader.read(SHORT_ONE, PARAMS)]),
        )

        async def fails() -> None:
            with pytest.raises(ValueError, match="cannot be written"):
                async for _ in bad.pieces(at_once):
                    pass
            bad.leave()

        _, completion = await asyncio.gather(fails(), good.completion())
        assert completion.tokens == alone.tokens

    at_the_desk(llm, work)


def test_steps_that_the_loop_was_too_busy_for_are_told_in_one_piece(llm: LLM) -> None:
    params = replace(PARAMS, max_tokens=30)
    [alone] = llm.generate(SHORT_ONE, params)

    async def work(broker: RequestBroker) -> None:
        call = broker.submit([llm.reader.read(SHORT_ONE, params)])[0]
        sizes, tokens = list[int](), list[int]()
        async for deltas in call.pieces():
            sizes.append(len(deltas))
            tokens.extend(token for delta in deltas for token in delta.tokens)
            if len(sizes) == 1:
                late = time.monotonic() + 60
                while not (call.group and call.group.done) and time.monotonic() < late:
                    time.sleep(0.01)  # The loop does nothing else until all of it is there.
        assert sum(sizes) == 30
        assert max(sizes) >= 10
        assert tuple(tokens) == alone.tokens

    at_the_desk(llm, work)


def test_what_is_put_into_the_tray_while_the_loop_has_just_found_it_empty_is_delivered(llm: LLM) -> None:
    """The one moment in which the driver's word to the loop could be lost."""
    late: list[Update] = []

    class Tray(deque[Update]):
        def __len__(self) -> int:
            found = super().__len__()
            if found == 0 and late:
                broker._mailbox.report([late.pop()])
                return 0
            return found

    broker: RequestBroker

    async def work(one: RequestBroker) -> None:
        nonlocal broker
        broker = one
        call = Call(broker.leave, llm.reader.read(SHORT_ONE, PARAMS), room=1)
        broker._calls.add(call)
        broker._count(call.owner, call.room)
        call.first_token_time = 1.0
        broker._mailbox._tray = Tray()
        broker._mailbox.report([(call, [Delta("", (1,))], False, None)])
        late.append((call, [Delta("", (2,))], True, EngineClosedError("over")))
        told: list[int] = []

        async def listen() -> None:
            async for deltas in call.pieces():
                told.extend(token for delta in deltas for token in delta.tokens)

        with pytest.raises(EngineClosedError, match="over"):
            await asyncio.wait_for(listen(), LONG)
        assert told == [1, 2]

    with patch.object(backend, "_GLANCE", 10 * LONG):  # At which it would deliver what lies there.
        at_the_desk(llm, work)


def test_nothing_is_taken_at_once_before_what_came_before_it_was_dealt_with(llm: LLM) -> None:
    """Neither while somebody is being woken up for that, nor while he sends it."""
    refusals, told = [True], list[str]()

    def at_once(deltas: Sequence[Delta]) -> bool:
        if refusals:
            refusals.pop()
            return False
        told.extend(f"{delta.tokens[0]} at once" for delta in deltas)
        return True

    async def work(broker: RequestBroker) -> None:
        call = Call(broker.leave, llm.reader.read(SHORT_ONE, PARAMS))

        async def listen() -> None:
            async for deltas in call.pieces(at_once):
                for _ in range(4):
                    await asyncio.sleep(0)
                told.extend(f"{delta.tokens[0]} sent" for delta in deltas)

        listening = asyncio.ensure_future(listen())
        await asyncio.sleep(0)
        call.deliver([Delta("", (1,))], False, None)
        call.deliver([Delta("", (2,))], False, None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.deliver([Delta("", (3,))], False, None)
        await asyncio.sleep(0.1)
        call.deliver([Delta("", (4,))], False, None)
        call.deliver([Delta("", (5,))], True, None)
        await asyncio.wait_for(listening, LONG)

    at_the_desk(llm, work)
    # The last is sent with the end, for which he is woken up.
    assert told == ["1 sent", "2 sent", "3 sent", "4 at once", "5 sent"]


def test_who_leaves_while_another_long_one_is_read_is_never_begun(llm: LLM) -> None:
    begun: list[int] = []
    begin = EngineDriver.begin

    async def work(broker: RequestBroker) -> None:
        calls = [broker.submit([llm.reader.read([number, *LONG_ONE], PARAMS)])[0] for number in range(3)]
        while calls[0].group is None or not broker._mailbox._calls.empty():
            await asyncio.sleep(0)
        calls[1].leave()
        await asyncio.gather(calls[0].completion(), calls[2].completion())

    with patch.object(
        EngineDriver, "begin", lambda self, ready: (begun.append(ready.tokens[0]), begin(self, ready))[1]
    ):
        at_the_desk(llm, work)
    assert begun == [0, 2]


def test_what_was_begun_in_part_is_ended(llm: LLM) -> None:
    """Of three outputs the engine takes one."""
    ready, submit = (
        llm.reader.read(SHORT_ONE, SamplingParams(max_tokens=400, ignore_eos=True, n=3)),
        Engine.submit,
    )

    def refusing(engine: Engine, *given: Any) -> RequestId:
        if engine.busy:
            raise EngineClosedError("no more")
        return submit(engine, *given)

    with patch.object(Engine, "submit", refusing), pytest.raises(EngineClosedError, match="no more"):
        llm.driver.begin(ready)
    assert llm.stats().running == llm.stats().waiting == 0
    assert not llm.driver._live


def test_what_was_computed_in_time_is_given_out_before_the_time_is_over(llm: LLM) -> None:
    """Also what waits for the end of a rest between deliveries."""

    async def work(broker: RequestBroker) -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        [call] = broker.submit([llm.reader.read(SHORT_ONE, params)])
        pieces = call.pieces()
        await anext(pieces)
        last = Delta("the last", (7,))
        broker._mailbox._rests = True
        broker._mailbox._held[call] = call, [last], False, None
        broker._expire(call, 1.0)
        come = list[Delta]()

        async def to_the_end() -> None:
            async for some in pieces:
                come.extend(some)

        with pytest.raises(DeadlineError):
            await to_the_end()
        assert last in come
        broker._mailbox._rests = False

    at_the_desk(llm, work)
