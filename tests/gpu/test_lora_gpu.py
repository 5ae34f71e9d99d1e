"""LoRA adapters on a GPU: recorded steps and others say what merged weights say, and an adapter that is
loaded later is replayed in its place."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import adapters
import tiny
from penstock import LLM, SamplingParams
from penstock.step.plan import Plan
from penstock.worker.graphs import DecodeGraphs

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "check": True,
    "max_length": 128,
    "max_step_tokens": 64,
    "block_size": 4,
    "max_sequences": 12,
}
ALL = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=-1)


@pytest.mark.parametrize(
    "more", [{}, {"graphs": False}, {"kernels": False}], ids=["recorded", "launched", "torch"]
)
@pytest.mark.parametrize("name", ["llama_biases", "qwen3"])
def test_each_request_is_answered_as_by_its_own_merged_model(
    name: str, more: dict[str, object], tmp_path: Path
) -> None:
    base = tiny.checkpoint(name)
    some = {
        "a": adapters.write(tmp_path / "a", base, 8, seed=1),
        "b": adapters.write(tmp_path / "b", base, 3, ["q_proj", "up_proj", "o_proj"], seed=2),
        "late": adapters.write(tmp_path / "late", base, 16, seed=3, use_rslora=True),
    }
    prompts, names = tiny.prompts(), ["a", None, "b", "late", "a", None]
    loaded, replayed, run = {one: some[one] for one in ("a", "b")}, [], DecodeGraphs.run

    def noted(self: DecodeGraphs, plan: Plan) -> Any:
        replayed.append(len(plan.shares))
        return run(self, plan)

    with LLM(base, **SETTINGS | more, lora_modules=loaded, max_loras=3) as llm:
        llm.generate(prompts, ALL, lora=["a", "b"] * 3)
        llm.load_lora_adapter("late", some["late"])
        with patch.object(DecodeGraphs, "run", noted):
            found = llm.generate(prompts, ALL, lora=names)
    if not more:
        assert replayed.count(len(prompts)) > 3
    if "graphs" in more:
        assert not replayed
    for completion, one in zip(found, names, strict=True):
        model = tiny.load(base) if one is None else adapters.merged(base, some[one])
        expected = adapters.logprobs(model, completion.prompt_tokens, completion.tokens)
        assert completion.logprobs is not None
        for entry, row in zip(completion.logprobs, expected, strict=True):
            mine = torch.tensor([logprob for _, logprob in sorted(entry.top)], dtype=torch.float64)
            assert (mine - row).abs().max() < 1e-3 * row.abs().max()
