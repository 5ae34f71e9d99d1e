"""A model that was asleep computes what it did before, has given its memory back meanwhile, and says of
requests that come then what to do."""

import asyncio
import os
from pathlib import Path
from unittest.mock import patch

import pytest

import tiny
from penstock import LLM, AsyncLLM, SamplingParams
from penstock.base.errors import CheckpointError, EngineClosedError, RequestError
from penstock.engine.boot import Booted
from penstock.sched.rates import TransferRates

SETTINGS = {"device": "cpu", "dtype": "float32", "device_memory": "300MiB", "max_length": 512}
PROMPTS = [[5], list(range(3, 90)), [*range(3, 90), 1, 2], list(range(60, 2, -1))]
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def resident() -> int:
    """The bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [one.tokens for one in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("more", [{}, {"tensor_parallel": 2}, {"host_kv_memory": "4MiB"}], ids=str)
def test_answers_are_the_same_before_and_after(level: int, more: dict[str, object]) -> None:
    if more.get("tensor_parallel") and level == 2 and not tiny.THOROUGH:
        pytest.skip("processes of ranks are started anew, which takes seconds")
    with LLM(tiny.checkpoint("qwen3"), **SETTINGS | more) as llm:  # type: ignore[arg-type]
        before = answers(llm)
        for _ in range(2):
            slept = llm.sleep(level)
            assert (slept.level, slept.weights) == (level, "host memory" if level == 1 else "disk")
            assert llm.is_sleeping
            assert llm.sleep(3 - level) == slept
            with pytest.raises(EngineClosedError, match=r"is asleep; wake it up \(LLM.wake_up, POST /wake"):
                llm.generate([5], PARAMS)
            assert llm.stats().kv_blocks_cached == 0 or level == 2
            assert llm.memory.weights
            llm.wake_up()
            llm.wake_up()
            assert not llm.is_sleeping
            assert answers(llm) == before


def test_another_engine_finds_what_it_has_itself() -> None:
    """Not what the one before it had."""
    with LLM(tiny.checkpoint("qwen3"), **SETTINGS) as llm:  # type: ignore[arg-type]
        llm.generate(PROMPTS, PARAMS)
        assert llm.driver.found_now(llm.reader.read(PROMPTS[1])) == 64
        for _ in range(2):
            llm.sleep(2)
            llm.wake_up()
            assert llm.driver.found_now(llm.reader.read(PROMPTS[1])) == 0
            llm.generate(PROMPTS, PARAMS)
            assert llm.driver.found_now(llm.reader.read(PROMPTS[1])) == 64


def test_the_memory_of_kv_is_given_back(tmp_path: Path) -> None:
    settings = SETTINGS | {"max_length": 4096}
    model = tiny.write(tiny.CASES["qwen3"], tmp_path, max_position_embeddings=4096)
    with LLM(model, **settings) as llm:  # type: ignore[arg-type]
        long = [3 + at % 90 for at in range(4000)]
        before = llm.generate(long, PARAMS)[0].tokens
        held = resident()
        llm.sleep()
        freed = held - resident()
        assert freed > 4000 * 3 * 2 * 2 * 32 * 4 * 0.9
        llm.wake_up()
        again = llm.generate(long, PARAMS)[0]
        assert (again.tokens, again.cached_tokens) == (before, 0)


@patch.object(TransferRates, "loading_pays", lambda *_: True)
@patch.object(TransferRates, "computed_first", lambda *_: 0)
def test_prefixes_on_lower_tiers_are_found_again(tmp_path: Path) -> None:
    host = {"host_kv_memory": "8MiB", "kv_store": "eager", "block_size": 16}
    prompt = PROMPTS[1]
    with LLM(tiny.checkpoint("qwen3"), **SETTINGS | host) as llm:  # type: ignore[arg-type]
        before = llm.generate(prompt, PARAMS)[0].tokens
        while llm.driver.moving:  # On a busy machine blocks may be on their way to the host.
            llm.driver.advance()
        llm.sleep()
        llm.wake_up()
        again = llm.generate(prompt, PARAMS)[0]
        assert (again.tokens, again.cached_tokens, again.cached_host) == (before, 80, 80)
        assert llm.clear_prefix_cache()
        llm.sleep(2)
        llm.wake_up()
        assert llm.generate(prompt, PARAMS)[0].cached_tokens == 0


@patch.object(TransferRates, "loading_pays", lambda *_: True)
@patch.object(TransferRates, "computed_first", lambda *_: 0)
def test_prefixes_on_disk_are_found_by_the_next_engine(tmp_path: Path) -> None:
    disk = {"disk_kv_memory": "8MiB", "host_kv_memory": "8MiB", "kv_directory": tmp_path}
    with LLM(tiny.checkpoint("qwen3"), **SETTINGS, **disk, kv_store="eager", block_size=16) as llm:  # type: ignore[arg-type]
        before = llm.generate(PROMPTS[1], PARAMS)[0].tokens
        llm.sleep(2)
        llm.wake_up()
        again = llm.generate(PROMPTS[1], PARAMS)[0]
        assert (again.tokens, again.cached_disk) == (before, 80)


def test_a_stream_of_an_engine_that_is_gone_ends_no_other() -> None:
    with LLM(tiny.checkpoint("llama"), **SETTINGS) as llm:  # type: ignore[arg-type]
        old = llm.stream([5], PARAMS)
        before = [delta.tokens for delta in old]
        llm.sleep(2)
        llm.wake_up()
        new = llm.stream([5], PARAMS)
        old.close()
        assert llm.driver._live
        assert [delta.tokens for delta in new] == before


def test_what_is_closed_does_not_wake_up() -> None:
    llm = LLM(tiny.checkpoint("llama"), **SETTINGS)  # type: ignore[arg-type]
    llm.sleep(2)
    started = list[Booted]()

    def closed_meanwhile() -> Booted:
        started.append(llm._start_again())
        llm.close()
        return started[0]

    with pytest.raises(EngineClosedError, match="was closed; create a new LLM"):
        llm._sleeper.wake(closed_meanwhile)
    with pytest.raises(EngineClosedError, match="is closed"):
        started[0].engine.check()
    for later in (llm.wake_up, lambda: llm.generate([5], PARAMS)):
        with pytest.raises(EngineClosedError, match=r"closed.*create a new LLM"):
            later()
    other = LLM(tiny.checkpoint("llama"), **SETTINGS)  # type: ignore[arg-type]
    other.close()
    with pytest.raises(EngineClosedError, match="was closed"):
        other.sleep(2)
    assert not other.is_sleeping


def test_only_an_idle_model_sleeps_and_only_by_known_levels(tmp_path: Path) -> None:
    with LLM(tiny.checkpoint("llama"), **SETTINGS) as llm:  # type: ignore[arg-type]
        stream = llm.stream([5], PARAMS)
        next(stream)
        with pytest.raises(RequestError, match="cannot sleep, since it makes 1 output now"):
            llm.sleep()
        assert not llm.is_sleeping
        assert len(list(stream)) == PARAMS.max_tokens - 1  # type: ignore[operator]
        for level in (0, 3, True, "1"):
            with pytest.raises(RequestError, match="is none: 1 frees KV"):
                llm.sleep(level)  # type: ignore[arg-type]
        llm.sleep()
    assert llm.is_sleeping


def test_what_cannot_be_started_again_sleeps_on(tmp_path: Path) -> None:
    model = tiny.write(tiny.CASES["llama"], tmp_path / "model")
    with LLM(model, **SETTINGS) as llm:  # type: ignore[arg-type]
        before = answers(llm)
        llm.sleep(2)
        model.rename(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="does not exist"):
            llm.wake_up()
        assert llm.is_sleeping
        with pytest.raises(EngineClosedError, match="is asleep"):
            llm.generate([5], PARAMS)
        (tmp_path / "elsewhere").rename(model)
        llm.wake_up()
        assert answers(llm) == before


def test_tasks_sleep_and_wake() -> None:
    async def main() -> None:
        async with AsyncLLM(tiny.checkpoint("llama"), **SETTINGS) as llm:  # type: ignore[arg-type]
            before = await llm.generate(PROMPTS, PARAMS)
            assert (await llm.sleep()).weights == "host memory"
            assert await llm.is_sleeping()
            with pytest.raises(EngineClosedError, match="is asleep"):
                await llm.generate([5], PARAMS)
            await llm.wake_up()
            after = await llm.generate(PROMPTS, PARAMS)
            assert [one.tokens for one in after] == [one.tokens for one in before]

    asyncio.run(main())
