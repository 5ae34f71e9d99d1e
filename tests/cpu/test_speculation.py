"""Speculative decoding changes no token, whatever is drafted: by the real engine, for every family."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import pytest

import tiny
from drafters import Adversary
from penstock import LLM, Completion, SamplingParams
from penstock.base.errors import ConfigError
from penstock.sched.speculation import Speculation
from penstock.worker.runner import Runner


SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "check": True,
    "max_step_tokens": 64,
    "block_size": 4,
    "max_length": 80,
}
FAMILIES = ["llama", "llama_dynamic", "qwen2_windows", "qwen3", "qwen3_moe", "gpt_oss", "glm4_moe"]


def wanted() -> list[tuple[list[int], SamplingParams]]:
    """Prompts, some of them alike, and each with other wishes."""
    prompts = [prompt[:30] for prompt in tiny.prompts()]
    wishes = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.6, seed=3, max_tokens=17, logprobs=2),
        SamplingParams(
            temperature=0.6, top_p=0.8, seed=4, max_tokens=25, repetition_penalty=1.3, frequency_penalty=0.2
        ),
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1, logprobs=-1),
        SamplingParams(temperature=1.0, seed=9, max_tokens=30, min_tokens=8, logit_bias={5: 2.0, 7: -100.0}),
        SamplingParams(temperature=1.0, seed=6, max_tokens=9, n=3, presence_penalty=0.4, min_p=0.02),
        SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[3, 11, 40], min_tokens=3),
        SamplingParams(temperature=1.0, top_k=20, seed=1, max_tokens=40, ignore_eos=True),
    ]
    return [(prompts[index % len(prompts)], wish) for index, wish in enumerate(wishes)]


@contextmanager
def always(drafter: Adversary | None) -> Iterator[None]:
    """Every draft of this drafter is verified as far as there is room."""

    def best(self: Speculation, survival: Sequence[Sequence[float]], tokens: int, spare: int) -> list[int]:
        counts = []
        for some in survival:
            counts.append(min(len(some), spare))
            spare -= counts[-1]
        return counts

    make = Speculation.__init__
    with (
        patch.object(Speculation, "__init__", lambda self, own: make(self, drafter or own)),
        patch.object(Speculation, "_best", best),
    ):
        yield


def answers(name: str, asked: Sequence[tuple[list[int], SamplingParams]], **more: object) -> list[Completion]:
    with LLM(tiny.checkpoint(name), **(SETTINGS | more)) as llm:
        return llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])


def alike(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert mine.tokens == theirs.tokens
            assert mine.finish_reason == theirs.finish_reason
            assert [(a.token, a.rank) for a in mine.logprobs or ()] == [
                (b.token, b.rank) for b in theirs.logprobs or ()
            ]
            assert [a.logprob for a in mine.logprobs or ()] == pytest.approx(
                [b.logprob for b in theirs.logprobs or ()], abs=1e-4
            )
        assert len(one.prompt_logprobs or ()) == len(other.prompt_logprobs or ())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_token_is_another_whatever_is_drafted(name: str, ahead: bool) -> None:
    asked = wanted()
    plain = answers(name, asked)
    truth: dict[tuple[int, ...], list[Sequence[int]]] = {}
    for (prompt, _), completion in zip(asked, plain, strict=True):
        truth.setdefault(tuple(prompt), []).extend(output.tokens for output in completion.outputs)
    drafter = Adversary(truth, tiny.VOCAB, ends=[3, 0, 1, 2], seed=len(name))
    with patch.object(Runner, "ahead", ahead), always(drafter):
        alike(answers(name, asked, speculate="suffix"), plain)
    assert drafter.proposed > 100
