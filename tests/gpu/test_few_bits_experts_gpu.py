"""A mixture of experts of few bits by kernels as a GPU compiles them: against the same experts dense, in
waves, and in a graph."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.arch.layout import MixtureLayout
from penstock.arch.spec import Activation, MoeSpec, Router
from penstock.ops.experts import Grouped, experts_reference
from penstock.ops.matrix import Matrix
from quantised import SCHEMES, matrix_of

DEVICE, EXPERTS, TOP = "cuda", 8, 2
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
"""Of the largest number; integers in small groups are rounded to the dtype of activations."""
READ = ("gptq_128", "gptq", "gptq_8", "awq", "packed_bfloat16", "signed", "fp8", "fp8_128", "mxfp8", "mxfp4")
READ += ("nvfp4", "modelopt_nvfp4")


class Layer:
    """Experts of few bits of these sizes, and the same in float32."""

    def __init__(self, scheme: str, hidden: int, inner: int) -> None:
        rng = torch.Generator().manual_seed(hidden)
        self.hidden, self.inner = hidden, inner
        self.moe = MoeSpec(EXPERTS, TOP, inner, Router(normalise=True))

        def made(height: int, width: int, seed: int) -> tuple[Matrix, Tensor]:
            weight = torch.randn(height, width, generator=rng) / width**0.5
            few, plain = matrix_of(SCHEMES[scheme], weight, seed)
            parts = {name: part.to(DEVICE) for name, part in few.parts.items()}
            return Matrix(few.format, few.shape, parts), plain.to(DEVICE)

        self.experts = [
            (made(2 * inner, hidden, 2 * at), made(hidden, inner, 2 * at + 1)) for at in range(EXPERTS)
        ]
        self.formats = tuple(matrix.format for matrix, _ in self.experts[0])
        assert MixtureLayout(EXPERTS, self.formats).kernels == "few_bits_experts"
        self.table = torch.tensor(
            [[part.data_ptr() for few, _ in one for part in few.parts.values()] for one in self.experts],
            device=DEVICE,
        )

    def step(self, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rng = torch.Generator(DEVICE).manual_seed(tokens)
        x = torch.empty(tokens, self.hidden, device=DEVICE).normal_(generator=rng).to(dtype)
        return x, torch.empty(tokens, EXPERTS, device=DEVICE).normal_(generator=rng).to(dtype)

    def grouped(self, x: Tensor, scores: Tensor) -> Grouped:
        return Grouped(x, scores, self.moe, formats=self.formats)

    def whole(self, x: Tensor, scores: Tensor) -> Tensor:
        mixed = self.grouped(x, scores)
        mixed.compute(self.table)
        return mixed.total()

    def want(self, x: Tensor, scores: Tensor) -> Tensor:
        plain = [(gate_up[1], down[1]) for gate_up, down in self.experts]
        return experts_reference(x.float(), scores, self.moe, plain)[1]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scheme", READ)
def test_against_dense(scheme: str, dtype: torch.dtype) -> None:
    """One number of tokens for each tuning, and sizes that are no whole steps."""
    for hidden, inner, *classes in ((512, 256, 1, 40, 200, 900), (320, 96, 5, 900)):
        layer = Layer(scheme, hidden, inner)
        for tokens in classes:
            x, scores = layer.step(tokens, dtype)
            want = layer.want(x, scores)
            got = layer.whole(x, scores)
            torch.testing.assert_close(
                got.float(), want, rtol=0, atol=TOLERANCE[dtype] * float(want.abs().amax())
            )


@pytest.mark.parametrize("tokens", [1, 40, 900])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_biases_and_a_clamped_activation(tokens: int, dtype: torch.dtype) -> None:
    """As gpt-oss has them."""
    layer = Layer("mxfp4", 320, 96)
    moe = replace(layer.moe, bias=True, activation=Activation(alpha=1.702, shift=1.0, limit=0.7))
    x, scores = layer.step(tokens, dtype)
    biases = [[torch.randn(size, device=DEVICE).to(dtype) for size in (192, 320)] for _ in layer.experts]
    added = torch.tensor([[bias.data_ptr() for bias in one] for one in biases], device=DEVICE)
    mixed = Grouped(x, scores, moe, formats=layer.formats, biases=2)
    mixed.compute(torch.cat((layer.table, added), 1))
    plain = [
        (gate_up[1], down[1], *(bias.float() for bias in its))
        for (gate_up, down), its in zip(layer.experts, biases, strict=True)
    ]
    want = experts_reference(x.float(), scores, moe, plain)[1]
    torch.testing.assert_close(
        mixed.total().float(), want, rtol=0, atol=TOLERANCE[dtype] * float(want.abs().amax())
    )


@pytest.mark.parametrize("scheme", ["gptq_128", "awq", "fp8", "nvfp4"])
@pytest.mark.parametrize("tokens", [3, 300])
def test_waves_and_graphs_compute_the_same(scheme: str, tokens: int) -> None:
    """To the last bit."""
    layer = Layer(scheme, 512, 256)
    x, scores = layer.step(tokens, torch.bfloat16)
    want = layer.whole(x, scores)
    mixed = layer.grouped(x, scores)
    mixed.counts()
    for wave in (range(3), range(3, EXPERTS)):
        table = torch.zeros_like(layer.table)
        table[wave.start : wave.stop] = layer.table[wave.start : wave.stop]
        mixed.compute(table, wave)
    assert torch.equal(mixed.total(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer.whole(x, scores)
    graph.replay()
    assert torch.equal(found, want)
