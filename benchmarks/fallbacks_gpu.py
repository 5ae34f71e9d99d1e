"""Compare attention of every head size with the reference on a GPU, and the engine without Triton with itself
with it.

python benchmarks/fallbacks_gpu.py
"""

import torch

from penstock import LLM, SamplingParams
from penstock.ops import norm, rope
from penstock.ops.attention import attend, dense
from penstock.ops.attention.inputs import LayerAttention


def head_sizes() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for dim in (8, 16, 64, 72, 128, 192, 256):
            for queries, keys, causal in (
                (300, 300, True),
                (1024, 1024, True),
                (77, 901, False),
                (1024, 8192, False),
            ):
                q = torch.randn(queries, 8, dim, dtype=dtype, device="cuda")
                k, v = (torch.randn(keys, 2, dim, dtype=dtype, device="cuda") for _ in range(2))
                out, lse = dense.dense(q, k, v, LayerAttention(dim**-0.5), causal=causal)
                right, right_lse = dense.dense_reference(
                    q.float(), k.float(), v.float(), LayerAttention(dim**-0.5), causal=causal
                )
                error = ((out.float() - right).norm() / right.norm()).item()
                lse_error = (lse - right_lse).abs().max().item()
                assert error < 1e-2, (dtype, dim, queries, keys, error)
                assert lse_error < 2e-2, (dtype, dim, queries, keys, lse_error)
    print("head sizes 8 to 256: agree with the reference")


def without_triton() -> None:
    prompts = ["Once upon a time", "The little fox had a very long way to go. " * 40, "Hello"]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(device="cuda", dtype="float32") as llm:
        kernels = [one.tokens for one in llm.generate(prompts, params)]
    for module in (attend, dense, norm, rope):
        module.triton_kernels = lambda name: None
    with LLM(device="cuda", dtype="float32") as llm:
        plain = [one.tokens for one in llm.generate(prompts, params)]
    assert plain == kernels, "plain torch and the kernels differ"
    print("without Triton: the same 180 tokens")


if __name__ == "__main__":
    head_sizes()
    without_triton()
