"""Without our kernels a GPU answers the same, by plain torch, and records nothing."""

import pytest
import torch

pytest.importorskip("transformers")

import tiny
from penstock import LLM, Completion, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GREEDY = SamplingParams(temperature=0, max_tokens=tiny.OUTPUT, ignore_eos=True, logprobs=1)
SETTINGS = {
    "device": "cuda",
    "dtype": "float32",
    "max_length": 400,
    "beyond_trained": True,
    "device_memory": "2GiB",
}
FAR = {
    "kv_blocks": 8,
    "block_size": 8,
    "host_kv_memory": "4MiB",
    "kv_tile": 32,
    "max_sequences": 4,
    "max_step_tokens": 48,
}


def answer(name: str, prompts: list[list[int]], *, kernels: bool, **more: object) -> list[Completion]:
    with LLM(tiny.checkpoint(name), kernels=kernels, **(SETTINGS | more)) as llm:  # type: ignore[arg-type]
        runner = llm.booted.engine._ranks
        assert runner is not None
        assert (runner.target.graphs is not None) == kernels  # type: ignore[attr-defined]
        return llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("more", [{}, FAR], ids=["near", "far"])
def test_tokens_are_the_same(name: str, more: dict[str, object]) -> None:
    """Prompts that differ in length, together in steps; also with contexts that rest in host memory."""
    prompts = tiny.prompts()
    ours, plain = (answer(name, prompts, kernels=kernels, **more) for kernels in (True, False))
    for one, other in zip(ours, plain, strict=True):
        assert one.tokens == other.tokens
        pairs = zip(one.logprobs or (), other.logprobs or (), strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-3


def test_draws_are_the_same() -> None:
    """Drawn from the same logits by the same numbers, with and without an order of the vocabulary."""
    sampled = SamplingParams(temperature=0.9, top_p=0.9, top_k=20, seed=5, max_tokens=16, ignore_eos=True)
    found = []
    for kernels in (True, False):
        with LLM(tiny.checkpoint("llama"), kernels=kernels, **SETTINGS) as llm:  # type: ignore[arg-type]
            found.append([completion.tokens for completion in llm.generate([[5, 6, 7], [9, 8]], sampled)])
    assert found[0] == found[1]
