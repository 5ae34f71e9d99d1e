"""Steps that are planned before the last is over: whatever is asked for, the answers are those of steps that
wait for one another."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import suppress
from unittest.mock import patch

import pytest

import tiny
from penstock import LLM, Completion, SamplingParams
from penstock.step.plan import UNKNOWN
from penstock.worker.runner import Runner
from streams import OURS_AND_LOCKS, cut_short

SETTINGS = {"device": "cpu", "dtype": "float32", "check": True, "max_step_tokens": 24, "block_size": 4}
FEW = {"kv_blocks": 24, "max_sequences": 6, "max_length": 80}
"""Blocks for which requests push each other out."""


@pytest.fixture
def steps() -> Iterator[list[int]]:
    """Steps run ahead. How many rows of each had a token that the plan did not know."""
    seen: list[int] = []
    begin = Runner.begin

    def noted(self: Runner, plan: object) -> object:
        seen.append(sum(UNKNOWN in share.tokens for share in plan.shares))  # type: ignore[attr-defined]
        return begin(self, plan)  # type: ignore[arg-type]

    with patch.object(Runner, "ahead", True), patch.object(Runner, "begin", noted):
        yield seen


def wanted() -> list[tuple[list[int], SamplingParams]]:
    """Prompts, two of them alike, and each with other wishes."""
    prompts = [prompt[:30] for prompt in tiny.prompts()]
    wishes = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=17, logprobs=2),
        SamplingParams(
            temperature=0.7, top_p=0.8, seed=4, max_tokens=25, repetition_penalty=1.3, frequency_penalty=0.2
        ),
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1, logprobs=-1),
        SamplingParams(temperature=1.2, seed=9, max_tokens=30, min_tokens=8),
        SamplingParams(temperature=1.0, seed=6, max_tokens=9, n=3, presence_penalty=0.4),
    ]
    return [(prompts[index % len(prompts)], wish) for index, wish in enumerate([*wishes, *wishes])]


def answers(name: str, **more: object) -> list[Completion]:
    asked = wanted()
    with LLM(tiny.checkpoint(name), **(SETTINGS | more)) as llm:
        return llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])


def alike(found: Sequence[Completion], expected: Sequence[Completion], off: float = 1e-3) -> None:
    """The same tokens, ends and ranks, and log-probabilities that are off by at most so much."""
    for one, other in zip(found, expected, strict=True):
        assert [output.tokens for output in one.outputs] == [output.tokens for output in other.outputs]
        assert [output.finish_reason for output in one.outputs] == [
            output.finish_reason for output in other.outputs
        ]
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert [(a.token, a.rank) for a in mine.logprobs or ()] == [
                (b.token, b.rank) for b in theirs.logprobs or ()
            ]
            assert [a.logprob for a in mine.logprobs or ()] == pytest.approx(
                [b.logprob for b in theirs.logprobs or ()], abs=off
            )
        assert len(one.prompt_logprobs or ()) == len(other.prompt_logprobs or ())


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen2_windows"])
def test_the_answers_are_the_same(name: str, steps: list[int]) -> None:
    found = answers(name)
    assert sum(steps) > len(steps), "hardly a step ran ahead"
    with patch.object(Runner, "ahead", False):
        steps.clear()
        expected = answers(name)
    assert sum(steps) == 0
    alike(found, expected)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_they_are_where_requests_push_each_other_out(name: str, steps: list[int]) -> None:
    asked = wanted()
    with LLM(tiny.checkpoint(name), **(SETTINGS | FEW)) as llm:
        found = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
        assert llm.stats().preemptions > 0
    assert sum(steps) > 0
    with patch.object(Runner, "ahead", False):
        expected = answers(name, **FEW)
    alike(found, expected)


def test_what_is_computed_behind_an_end_is_dropped(steps: list[int]) -> None:
    """Each prompt ends with the token that greedy decoding says some way on; what the next step has computed
    by then is nobody's."""
    references = tiny.references("llama")
    asked = [
        SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(one.tokens[at],))
        for at, one in zip([3, 9, 5, 7, 2, 6], references, strict=True)
    ]
    with LLM(tiny.checkpoint("llama"), **SETTINGS) as llm:
        found = llm.generate([one.prompt for one in references], asked)
        assert not llm.booted.engine.busy
        ledger = llm.booted.engine.scheduler.ledger
        assert ledger.available == ledger.blocks
        again = llm.generate([one.prompt for one in references], asked)
    for one, other, reference, params in zip(found, again, references, asked, strict=True):
        [end] = params.stop_token_ids
        assert one.tokens == other.tokens == tuple(reference.tokens[: reference.tokens.index(end) + 1])
        assert one.finish_reason == "stop"


def test_who_leaves_in_the_midst_of_a_step_disturbs_nobody(steps: list[int]) -> None:
    references = tiny.references("llama")
    greedy = SamplingParams(temperature=0, max_tokens=tiny.OUTPUT, ignore_eos=True)
    with LLM(tiny.checkpoint("llama"), **SETTINGS) as llm:
        for leave in range(1, 8):
            stays, leaves = (llm.stream(references[which].prompt, greedy) for which in (3, 4))
            for _ in range(leave):
                llm.driver.step()
            leaves.close()
            list(stays)
            assert list(stays.completion.tokens) == references[3].tokens
        assert not llm.booted.engine.scheduler.busy


def test_an_interrupt_anywhere_loses_no_token(steps: list[int]) -> None:
    references = tiny.references("llama")
    few = 12
    greedy = SamplingParams(temperature=0, max_tokens=few, ignore_eos=True)
    with LLM(tiny.checkpoint("llama"), **SETTINGS, prefix_cache=False) as llm:
        strikes = 0
        for where in range(0, 2700, 135):
            streams = [llm.stream(reference.prompt, greedy) for reference in references]
            for _ in range(4):
                llm.driver.step()
            strikes += cut_short(llm.driver.step, where)
            while not all(stream._group.done for stream in streams):
                with suppress(KeyboardInterrupt):
                    llm.driver.step()
            for stream, reference in zip(streams, references, strict=True):
                list(stream)
                assert list(stream.completion.tokens) == reference.tokens[:few]
        assert strikes > 5


def test_no_garbage_is_collected_in_a_step(steps: list[int]) -> None:
    collected, kept = list[bool](), list[object]()
    within = False
    begin = Runner.begin

    def noted(self: Runner, plan: object) -> object:
        nonlocal within
        within = True
        kept.append([[] for _ in range(5000)])  # Enough that something is due.
        begun = begin(self, plan)  # type: ignore[arg-type]
        within = False
        return begun

    def told(phase: str, info: object) -> None:
        collected.append(within)

    with LLM(tiny.checkpoint("llama"), **SETTINGS) as llm, patch.object(Runner, "begin", noted):
        gc.callbacks.append(told)
        try:
            llm.generate(tiny.prompts(), SamplingParams(temperature=0, max_tokens=20))
        finally:
            gc.callbacks.remove(told)
    assert collected, "nothing was ever collected"
    assert not any(collected)
    assert gc.isenabled()


def test_prefixes_are_found_and_weights_may_stream(steps: list[int]) -> None:
    references = tiny.references("llama")
    greedy = SamplingParams(temperature=0, max_tokens=tiny.OUTPUT, ignore_eos=True)
    prompts = [one.prompt for one in references]
    with LLM(tiny.checkpoint("llama"), **SETTINGS) as llm:
        first = llm.generate(prompts, greedy)
        again = llm.generate([[*one.prompt_tokens, *one.tokens, 5] for one in first], greedy)
    for reference, one, other in zip(references, first, again, strict=True):
        assert list(one.tokens) == reference.tokens
        assert other.cached_tokens == (len(reference.prompt) + len(reference.tokens) - 1) // 4 * 4
    with patch.object(Runner, "ahead", False), LLM(tiny.checkpoint("llama"), **SETTINGS) as llm:
        expected = llm.generate([[*one.prompt_tokens, *one.tokens, 5] for one in first], greedy)
    assert [one.tokens for one in again] == [one.tokens for one in expected]


def test_several_ranks_draw_the_tokens_that_a_plan_does_not_know(steps: list[int]) -> None:
    """Requests push each other out, too, and one is cut short in the midst."""
    found = answers("qwen3", tensor_parallel=2, **FEW)
    assert sum(steps) > len(steps), "hardly a step ran ahead"
    with patch.object(Runner, "ahead", False):
        alike(found, answers("qwen3", **FEW))
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True)
    with LLM(tiny.checkpoint("qwen3"), **(SETTINGS | FEW), tensor_parallel=2) as llm:
        expected = llm.generate(tiny.prompts()[:3], params)
        for place in (40, 400, 1500):
            cut_short(lambda: llm.generate(tiny.prompts()[:3], params), place, OURS_AND_LOCKS)
            alike(llm.generate(tiny.prompts()[:3], params), expected)
