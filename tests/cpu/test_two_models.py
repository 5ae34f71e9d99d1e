"""Two models in one engine: each says what it says alone, in the same blocks of the same rows; and a target says
what it says alone when it verifies what a draft model proposes."""

import functools

import pytest

import tiny
from pairs import DRAFT, SETTINGS, TARGET, near, opened, say_both, speculate
from penstock import LLM, SamplingParams

FEW = 24
PAIRS = [("qwen3", "llama"), ("qwen2_windows", "llama_tied"), ("mixtral", "llama_biases")]


@functools.cache
def alone(name: str) -> list[list[int]]:
    """What a model says in an engine of its own."""
    with LLM(tiny.checkpoint(name), **SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=FEW, ignore_eos=True)
        found = [list(one.tokens) for one in llm.generate(tiny.prompts(), params)]
    assert found == [one.tokens[:FEW] for one in tiny.references(name)]
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_each_says_what_it_says_alone(target: str, draft: str, ahead: bool) -> None:
    with opened(tiny.checkpoint(target), tiny.checkpoint(draft)) as booted:
        for _ in range(2):
            said = say_both(booted, tiny.prompts(), FEW, ahead)
            assert said == {TARGET: alone(target), DRAFT: alone(draft)}


@pytest.mark.parametrize(
    ("target", "draft", "least", "most"),
    [("qwen3", "llama", 0.0, 0.3), ("llama", "llama", 1.0, 1.0), ("llama", "", 0.1, 0.95)],
    ids=["bad drafts", "the same model", "a good draft"],
)
def test_a_target_that_verifies_drafts_says_what_it_says_alone(
    target: str, draft: str, least: float, most: float
) -> None:
    path = tiny.checkpoint(draft) if draft else near(target, 0.1)
    with opened(tiny.checkpoint(target), path) as booted:
        spoken = speculate(booted, tiny.prompts(), FEW)
    assert spoken.outputs == alone(target)
    assert least <= spoken.held / spoken.proposed <= most
