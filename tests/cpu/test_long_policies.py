"""Policies in a whole engine: what may not be missed is read after all, and what was missed is told."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import tiny
from penstock import LLM, Completion, SamplingParams
from penstock.base.errors import ConfigError
from penstock.kv.chosen import Missed

SETTINGS = {"device": "cpu", "dtype": "float32", "max_length": 300, "beyond_trained": True, "max_step_tokens": 48, "block_size": 8}
FAR = {"kv_blocks": 8, "host_kv_memory": "4MiB", "kv_tile": 32, "max_sequences": 4, "check": True}
PROMPTS = [[token % 90 for token in range(3, 200)], [token * 7 % 90 for token in range(120)], [5, 6, 7]]
WANTED = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)


def answer(name: str, **settings: object) -> tuple[list[Completion], Missed | None]:
    with LLM(tiny.checkpoint(name), **SETTINGS, **settings) as llm:
        found = llm.generate(PROMPTS, WANTED)
        carrier = llm.booted.engine._ranks.carrier
        return found, carrier.chosen.missed if carrier and carrier.chosen else None


def apart(one: list[Completion], other: list[Completion]) -> float:
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a.logprobs, b.logprobs, strict=True)]
    return max(abs(a.logprob - b.logprob) for a, b in pairs)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_everything_is_exact(name: str, tmp_path: Path) -> None:
    """By a policy that takes all blocks, or by falling back to all: rows, runs, and both with blocks on disk."""
    exact, nothing = answer(name)
    assert nothing is None
    disk = {"disk_kv_memory": "2MiB", "kv_store": "off", "kv_directory": tmp_path, "host_kv_memory": "13KiB"}
    for number, chosen in enumerate(
        (
            {"attention_policy": "topk:1000"},
            {"attention_policy": "topk:3", "missed_limit": 0.0},
            {"attention_policy": "window:8,16", "missed_limit": 0.0},
            {"prefill_policy": "vertical_slash:2,1", "missed_limit": 0.0},
            {"attention_policy": "topk:3", "prefill_policy": "vertical_slash:2,1", "missed_limit": 0.0, **disk},
        )
    ):
        if name != "llama" and number % 4:
            continue  # Another family has nothing new in the midst of them.
        found, missed = answer(name, **(FAR | chosen))
        assert missed is not None
        assert [one.tokens for one in found] == [one.tokens for one in exact], chosen
        assert apart(found, exact) < 5e-5, chosen
        assert missed.most == 0
        assert missed.blocks_read == missed.blocks > 0
        assert missed.fallbacks == (0 if "1000" in str(chosen) else missed.choices)


def test_what_is_missed_is_told() -> None:
    exact, _ = answer("llama")
    found, missed = answer("llama", **FAR, attention_policy="topk:3")
    assert missed is not None
    assert apart(found, exact) > 1e-3, "a policy that changes nothing was not asked"
    assert 0 < missed.most <= 1
    assert 0 < missed.blocks_read <= 3 * missed.choices < missed.blocks
    assert missed.fallbacks == 0
    assert found[2].tokens == exact[2].tokens, "who has no far KV misses none"


def test_a_limit_reads_the_rest_only_where_it_must() -> None:
    _, free = answer("llama", **FAR, attention_policy="topk:14")
    assert free is not None
    assert free.total > 0
    limit = free.total / free.choices
    _, bound = answer("llama", **FAR, attention_policy="topk:14", missed_limit=limit)
    assert bound is not None
    assert 0 < bound.fallbacks < bound.choices
    assert bound.most <= limit


def test_dense_layers_read_everything() -> None:
    _, missed = answer("llama", **FAR, attention_policy="topk:3,1")
    assert missed is not None
    assert 3 * missed.choices < missed.blocks_read < missed.blocks


@pytest.mark.parametrize(
    "text", ["", "top", "topk", "topk:", "topk:-1", "topk:1,2,3", "window:1", "window:a,b", "vertical_slash", "full:1"]
)
def test_policies_nobody_knows(text: str) -> None:
    with pytest.raises(ConfigError, match="is not known; write full"):
        answer("llama", **FAR, attention_policy=text)


def test_windows_have_a_policy_of_their_own() -> None:
    with pytest.raises(ConfigError, match="without sliding windows"):
        answer("mistral", **FAR, attention_policy="topk:3")
