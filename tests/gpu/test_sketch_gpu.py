"""Attention policies on CUDA: sketches bound what they stand for there, too, and a limit of nothing reads
everything."""

import pytest
import torch

pytest.importorskip("transformers")

import tiny
from penstock import LLM, SamplingParams
from penstock.ops.sketch import SketchLayout, scores, sketch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SETTINGS = {
    "device": "cuda",
    "dtype": "float32",
    "max_length": 400,
    "beyond_trained": True,
    "device_memory": "2GiB",
    "check": True,
}
FAR = {
    "kv_blocks": 8,
    "block_size": 8,
    "host_kv_memory": "4MiB",
    "kv_tile": 32,
    "max_sequences": 4,
    "max_step_tokens": 48,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("dim", [64, 128])
def test_bounds_hold(dtype: torch.dtype, bits: int, dim: int) -> None:
    """Of 300 blocks, for one query and for several."""
    rng = torch.Generator("cuda").manual_seed(bits)
    keys = torch.randn(300 * 64, 2, dim, generator=rng, device="cuda").to(dtype)
    layout = SketchLayout(64, 2, dim, str(dtype).removeprefix("torch."), bits)
    sketches = sketch(keys.view(300, 64, 2, dim), layout)
    for queries in (1, 19):
        q = torch.randn(queries, 8, dim, generator=rng, device="cuda") * 0.3
        exact = (
            torch.einsum("qhd,thd->qht", q.double(), keys.double().repeat_interleave(4, 1))
            .view(queries, 8, 300, 64)
            .logsumexp(3)
        )
        found = scores(q, sketches, layout)
        assert (found.upper >= exact).all()
        if bits:
            assert (found.likely - exact).abs().max() < (2.0 if bits == 4 else 0.1)


def test_an_engine_with_policies() -> None:
    prompts = [[token % 90 for token in range(3, 200)], [token * 7 % 90 for token in range(120)], [5, 6, 7]]
    greedy, found = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), []
    for policy in (
        {},
        {"attention_policy": "topk:3", "prefill_policy": "vertical_slash:2,1", "missed_limit": 0.0},
        {"attention_policy": "topk:3"},
    ):
        with LLM(tiny.checkpoint("llama"), **(SETTINGS | FAR | policy)) as llm:  # type: ignore[arg-type]
            answers = [completion.tokens for completion in llm.generate(prompts, greedy)]
            found.append((answers, llm.stats().missed))
    assert found[1][0] == found[0][0]
    assert found[0][1].most == found[1][1].most == 0
    assert found[1][1].fallbacks == found[1][1].choices > 0
    assert 0 < found[2][1].mean <= found[2][1].worst <= found[2][1].most <= 1
