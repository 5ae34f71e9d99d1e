"""GGUF files on a GPU: the tokens of the same model dense, and products of few rows."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf_files
import tiny
from gguf_files import Writing, source
from penstock.api.llm import LLM
from penstock.arch.formats.format import matrix
from penstock.arch.formats.gguf import FORMATS
from penstock.ops.kernels import pdl_launches
from penstock.ops.matrix import Matrix
from penstock.ops.triton.blocks import BlocksTuning, dequantise, few_rows, reads, suits
from penstock.step.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def tokens(path: Path, **settings: object) -> list[tuple[int, ...]]:
    with LLM(path, device="cuda", dtype="float32", max_length=64, **settings) as llm:  # type: ignore[arg-type]
        return [one.tokens for one in llm.generate(tiny.prompts()[1:4], GREEDY)]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_XS", "Q4_1", "Q8_0", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe_normalised"])
def test_tokens(kind: str, name: str, tmp_path: Path) -> None:
    made = gguf_files.write(source(name), tmp_path, Writing(kind))
    same = tokens(made.dense)
    assert tokens(made.file) == same
    assert tokens(made.file, kernels=False) == same


@pytest.mark.parametrize("cut", [None, range(300, 1000)])
@pytest.mark.parametrize("kind", [name for name, format in FORMATS.items() if reads(format)])
def test_products_of_few_rows(kind: str, cut: range | None) -> None:
    """By every way to cut one; and rows do not depend on how many there are."""
    drawn = torch.from_numpy(gguf_files.draw(kind, 1056, 1280, 0.1, np.random.default_rng(2)))
    sources = [matrix("model.layers.0.mlp.down_proj.weight", 1056, 1280, columns=cut)]
    format = FORMATS[kind].cut(sources)
    (stored,) = format.stored("bfloat16", sources)
    assert stored.repack is not None
    blocks = stored.repack([drawn]).cuda()
    weight = Matrix(format, (1056, format.width), {"repacked": blocks})
    plain = weight.dequantised(torch.empty(0)).double()
    made = torch.empty(1056, format.width, device="cuda")
    dequantise(weight, slice(0, 1056), made)
    assert torch.equal(made.double(), plain)
    rng = torch.Generator("cuda").manual_seed(1)
    for dtype, rounding in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        x = torch.randn(64, format.width, generator=rng, device="cuda").to(dtype)
        bias = torch.randn(1056, generator=rng, device="cuda").to(dtype)
        want = x.double() @ plain.T
        ways = [None, *(BlocksTuning(*way) for way in ((32, 1), (64, 2, 2, 2), (32, 4, 4), (16, 2, 3)))]
        for rows, tuning in ((rows, way) for rows in (1, 3, 8, 9, 16, 64) for way in ways):
            assert suits(x[:rows], weight)
            got = few_rows(x[:rows], weight, tuning=tuning)
            error = (got.double() - want[:rows]).abs()
            assert (error <= rounding * (want[:rows].abs() + 1e-2)).all(), (rows, tuning, float(error.max()))
            with pdl_launches():
                assert torch.equal(few_rows(x[:rows], weight, tuning=tuning), got)
        alone = few_rows(x[:1], weight)
        assert torch.equal(few_rows(x[:8], weight)[:1], alone)
        assert torch.equal(few_rows(x[:16], weight)[:1], alone)
        both = few_rows(x[:5], weight, bias, gated=True).double()
        gate, up = (want[:5] + bias.double()).chunk(2, 1)
        gated = torch.nn.functional.silu(gate) * up
        assert (both - gated).abs().max() <= 4 * rounding * gated.abs().max()
