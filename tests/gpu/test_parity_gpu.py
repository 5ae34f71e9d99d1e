"""Every family on the GPU against transformers on the same GPU: exact in float32, as close as transformers in
half precision."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers")

import tiny
from parity import GREEDY, WITH_PROMPT, measure, prompt_error
from penstock import LLM

WIDE_PROMPTS = 6  # all but the longest, whose reference takes gigabytes


@pytest.fixture(autouse=True, scope="module")
def full_float32() -> Iterator[None]:
    """No TF32 in the reference either."""
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.mark.parametrize("name", tiny.CASES)
def test_float32(name: str) -> None:
    prompts, path = tiny.prompts(), tiny.checkpoint(name)
    model = tiny.load(path, "cuda")
    references = [tiny.decode(model, prompt) for prompt in prompts]
    with LLM(path, device="cuda", dtype="float32", max_length=128, block_size=32, check=True) as llm:
        assert measure(llm.generate(prompts, WITH_PROMPT), references).exact
        again = llm.generate(prompts, GREEDY)
        assert measure(again, references).exact
        assert sum(completion.cached_tokens for completion in again) >= 64
    few = {"block_size": 4, "kv_blocks": 30, "max_step_tokens": 7, "max_sequences": 5}
    with LLM(path, device="cuda", dtype="float32", max_length=128, check=True, **few) as llm:
        assert measure(llm.generate(prompts, GREEDY), references).exact
        assert llm.stats().preemptions > 0


@pytest.mark.parametrize("name", tiny.WIDE)
def test_long_prompts(name: str) -> None:
    prompts, path = (
        tiny.long_prompts()[:WIDE_PROMPTS],
        tiny.write(tiny.WIDE[name], tiny.folder() / f"wide_{name}"),
    )
    model = tiny.load(path, "cuda")
    tiny.turn_exactly(model)
    references = [tiny.decode(model, prompt) for prompt in prompts]
    settings = {"device": "cuda", "max_length": 2500, "check": True}
    with LLM(path, dtype="float32", max_step_tokens=1024, **settings) as llm:
        assert measure(llm.generate(prompts, WITH_PROMPT), references).exact
    for dtype in ("bfloat16", "float16"):
        half = tiny.load(path, "cuda", getattr(torch, dtype))
        theirs = prompt_error([tiny.decode(half, prompt, steps=1) for prompt in prompts], references)
        for tokens in (1024, 8192):
            with LLM(path, dtype=dtype, max_step_tokens=tokens, **settings) as llm:
                assert measure(llm.generate(prompts, WITH_PROMPT), references).typical < 1.5 * theirs
