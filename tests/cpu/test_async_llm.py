"""AsyncLLM: the tokens of LLM, to many tasks at once; what is left ends, and what ends frees."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import LLM, AsyncLLM, PenstockError, SamplingParams
from penstock.api.driver import EngineDriver
from penstock.api.sequences import OutputSequence, PreparedPrompt, SequenceGroup
from penstock.api.stepping import AsyncRequest, StepThread
from penstock.base.config import SHIPPED_MODEL
from penstock.base.errors import CheckpointError, EngineClosedError, RequestError
from penstock.sched.event import Event
from penstock.step.request import FinishReason

PROMPTS = ["Once upon a time", "The little fox", "One rainy morning there was a bear", "A"]
SHORT = SamplingParams(max_tokens=6, seed=3)
LONG = SamplingParams(max_tokens=2000, ignore_eos=True, seed=3)
SETTINGS = {"device": "cpu", "device_memory": "300MiB", "max_length": 4096}


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(**SETTINGS)  # type: ignore[arg-type]
    yield llm
    asyncio.run(llm.close())


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    with LLM(**SETTINGS) as llm:  # type: ignore[arg-type]
        return [one.tokens for one in llm.generate(PROMPTS, SHORT)]


async def idle(llm: AsyncLLM) -> None:
    """Wait until nothing runs, and nothing is held."""
    for _ in range(400):
        stats = await llm.stats()
        if not (stats.running or stats.waiting):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"something still runs: {stats}")


def test_tasks_get_the_tokens_of_llm(llm: AsyncLLM, expected: list[tuple[int, ...]]) -> None:
    async def streamed(prompt: str) -> tuple[int, ...]:
        stream = llm.stream(prompt, SHORT)
        pieces = [piece async for piece in stream]
        assert "".join(piece.text for piece in pieces) == stream.completion.text
        assert pieces[-1].finish_reason is FinishReason.LENGTH
        return tuple(token for piece in pieces for token in piece.tokens)

    async def main() -> None:
        whole, *parts = await asyncio.gather(llm.generate(PROMPTS, SHORT), *map(streamed, PROMPTS))
        assert [one.tokens for one in whole] == parts == expected
        several = await llm.generate(PROMPTS[0], replace(SHORT, n=3))
        assert len({output.tokens for output in several[0].outputs}) == 3
        chat = await llm.chat([{"role": "user", "content": "Hi"}], SHORT)
        assert len(chat.tokens) in range(1, 7)
        assert (await llm.limits()).max_model_len == 4096
        await idle(llm)

    asyncio.run(main())


def test_the_loop_goes_on_while_a_model_loads(expected: list[tuple[int, ...]]) -> None:
    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        async with AsyncLLM(**SETTINGS) as llm:  # type: ignore[arg-type]
            assert ticks > 3
            ticks = 0
            assert [one.tokens for one in await llm.generate(PROMPTS, SHORT)] == expected
            assert ticks > 0
        ticking.cancel()
        with pytest.raises(EngineClosedError, match="was closed"):
            await llm.generate("A", SHORT)

    asyncio.run(main())


@pytest.mark.parametrize("way", ["break", "cancel", "drop", "with"])
def test_what_a_task_leaves_ends(llm: AsyncLLM, way: str, expected: list[tuple[int, ...]]) -> None:
    async def main() -> None:
        before = (await llm.stats()).kv_blocks_free + (await llm.stats()).kv_blocks_cached
        stream = llm.stream("A", LONG)
        assert (await anext(stream)).tokens
        if way == "cancel":
            task = asyncio.create_task(anext(llm.stream("B", LONG)))  # type: ignore[arg-type]
            other = asyncio.create_task(llm.generate(PROMPTS, LONG))
            await asyncio.sleep(0.05)
            task.cancel()
            other.cancel()
            with pytest.raises(asyncio.CancelledError):
                await other
            await asyncio.gather(task, return_exceptions=True)
        if way == "drop":
            del stream
            gc.collect()
        elif way == "with":
            async with stream:
                await anext(stream)
            assert [piece async for piece in stream] == []
            assert stream.completion.finish_reason is FinishReason.ABORT
        else:
            async for _ in stream:
                break
            await stream.aclose()
        await idle(llm)
        stats = await llm.stats()
        assert stats.kv_blocks_free + stats.kv_blocks_cached == before
        assert [one.tokens for one in await llm.generate(PROMPTS, SHORT)] == expected

    asyncio.run(main())


def test_mistakes_are_raised_where_they_are_awaited(llm: AsyncLLM, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(RequestError, match="100000 of output"):
            await llm.generate(["A", "B"], [SHORT, replace(SHORT, max_tokens=100_000)])
        with pytest.raises(RequestError, match="of type float"):
            await anext(llm.stream(1.5, SHORT))  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="1 SamplingParams for 2 prompts"):
            await llm.generate(["A", "B"], [SHORT])
        await idle(llm)
        missing = AsyncLLM(tmp_path / "none")
        with pytest.raises(EngineClosedError, match="has not begun"):
            _ = missing.stream("A").completion
        both = await asyncio.gather(missing.generate("A"), missing.stats(), return_exceptions=True)
        assert all(isinstance(one, PenstockError) for one in both)
        with pytest.raises(PenstockError):
            await missing.generate("A")  # It is tried again.
        await missing.close()

    asyncio.run(main())


def test_a_model_that_could_not_be_loaded_is_tried_again(tmp_path: Path, expected: list[object]) -> None:
    async def main() -> None:
        folder = tmp_path / "later"
        late = AsyncLLM(folder, **SETTINGS)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError):
            await late.limits()
        folder.symlink_to(SHIPPED_MODEL)
        async with late:
            assert [one.tokens for one in await late.generate(PROMPTS, SHORT)] == expected

    asyncio.run(main())


def test_closing_aborts_what_runs() -> None:
    before = threading.active_count()

    async def main() -> None:
        llm = AsyncLLM(**SETTINGS)  # type: ignore[arg-type]
        stream = llm.stream("A", LONG)
        await anext(stream)
        running = asyncio.create_task(llm.generate("B", LONG))
        await asyncio.sleep(0.02)
        await llm.close()
        assert (await running)[0].finish_reason is FinishReason.ABORT
        assert [piece async for piece in stream][-1].finish_reason is FinishReason.ABORT
        with pytest.raises(EngineClosedError):
            await anext(llm.stream("A", SHORT))
        await llm.close()

    asyncio.run(main())
    assert threading.active_count() <= before


def test_a_loop_that_ends_takes_only_its_own_requests(llm: AsyncLLM, expected: list[tuple[int, ...]]) -> None:
    """Two loops share a model; one is closed with requests under way, as when its program crashes."""
    found: list[object] = []

    def other() -> None:
        loop = asyncio.new_event_loop()
        stream = llm.stream("A", LONG)
        loop.run_until_complete(anext(stream))  # type: ignore[arg-type]
        loop.close()
        found.append(stream)

    async def main() -> None:
        before = (await llm.stats()).output_tokens
        whole = asyncio.create_task(llm.generate(PROMPTS, SHORT))
        await asyncio.to_thread(other)
        assert [one.tokens for one in await whole] == expected
        await idle(llm)
        assert (await llm.stats()).output_tokens - before < LONG.max_tokens // 2

    asyncio.run(main())
    assert found


def test_a_model_that_is_dropped_ends_its_thread() -> None:
    async def main() -> None:
        llm = AsyncLLM(**SETTINGS)  # type: ignore[arg-type]
        assert (await llm.generate("A", SHORT))[0].tokens

    before = threading.active_count()
    asyncio.run(main())
    gc.collect()
    assert threading.active_count() <= before


def test_a_task_that_leaves_while_its_request_begins(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves when the engine has the request, and the task does not know it yet."""
    begin = EngineDriver.begin
    leaving = list[Callable[[], None]]()

    def begin_and_leave(driver: EngineDriver, ready: PreparedPrompt, **how: bool) -> SequenceGroup:
        group = begin(driver, ready, **how)
        for leave in leaving:
            leave()
        return group

    async def main() -> None:
        await idle(llm)
        monkeypatch.setattr(EngineDriver, "begin", begin_and_leave)
        follow = StepThread.follow

        def follow_and_note(steps: StepThread, request: AsyncRequest) -> None:
            leaving.append(lambda: steps.leave(request))
            follow(steps, request)

        monkeypatch.setattr(StepThread, "follow", follow_and_note)
        waiting = asyncio.create_task(llm.generate("A", LONG))
        completion = (await waiting)[0]
        assert completion.finish_reason is FinishReason.ABORT
        assert len(completion.tokens) < 3

    asyncio.run(main())


def test_the_last_piece_is_never_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output has ended, and its last piece is not there yet, while another thread's step goes on."""
    half, go, take = threading.Event(), threading.Event(), OutputSequence.take

    def slowly(sequence: OutputSequence, event: Event) -> bool:
        sequence.finish = event.finish
        half.set()
        assert go.wait(20)
        return take(sequence, event)

    monkeypatch.setattr(OutputSequence, "take", slowly)
    with LLM(**SETTINGS) as llm, ThreadPoolExecutor(2) as threads:  # type: ignore[arg-type]
        group = llm.driver.begin(llm.reader.read("A", replace(SHORT, max_tokens=1)))
        step = threads.submit(llm.driver.step)
        assert half.wait(20)
        taken = threads.submit(llm.driver.take_deltas, group)
        with suppress(TimeoutError):
            taken.result(0.2)
        go.set()
        pieces, over = taken.result(20)
        step.result(20)
        assert over
        assert [piece.finish_reason for piece in pieces] == [FinishReason.LENGTH]


def test_faults_are_raised_where_they_are_awaited_and_others_go_on(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, expected: list[tuple[int, ...]]
) -> None:
    """One that strikes where a request begins, within a step, and again as the step's requests end."""

    def fault(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    async def main() -> None:
        for names in (["begin"], ["_hand_out"], ["_hand_out", "abandon"]):
            with monkeypatch.context() as patched:
                for name in names:
                    patched.setattr(EngineDriver, name, fault)
                with pytest.raises(MemoryError, match="no room"):
                    await asyncio.wait_for(llm.generate("A", SHORT), 5)
        assert [one.tokens for one in await asyncio.wait_for(llm.generate(PROMPTS, SHORT), 20)] == expected
        await idle(llm)

    asyncio.run(main())
