"""Blocks of GGUF that Triton kernels write as numbers, bit for bit those of the reference."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import gguf_files
from penstock.arch.formats.format import matrix
from penstock.arch.formats.gguf import FORMATS
from penstock.ops import embedding
from penstock.ops.matrix import Matrix
from penstock.ops.triton import blocks
from penstock.ops.triton.blocks import dequantise, reads, suits

READ = [name for name, format in FORMATS.items() if reads(format)]


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("cut", [None, range(300, 900)])
def test_dequantised(kind: str, cut: range | None) -> None:
    drawn = torch.from_numpy(gguf_files.draw(kind, 40, 1280, 0.1, np.random.default_rng(2)))
    sources = [matrix("model.layers.0.mlp.down_proj.weight", 40, 1280, columns=cut)]
    format = FORMATS[kind].cut(sources)
    (stored,) = format.stored("float32", sources)
    assert stored.repack is not None
    width = 1280 if cut is None else len(cut)
    weight = Matrix(format, (40, width), {"blocks": stored.repack([drawn]).contiguous()})
    for rows in (slice(0, 40), slice(7, 30)):
        for dtype in (torch.float32, torch.float16):
            out = torch.full((rows.stop - rows.start, width), torch.nan, dtype=dtype)
            dequantise(weight, rows, out)
            assert torch.equal(out, weight.format.dequantise(weight.parts, rows).to(dtype))
    assert not suits(torch.zeros(1, width), weight)


@pytest.mark.parametrize("kind", READ)
def test_rows_of_an_embedding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By these kernels, as on a GPU."""
    drawn = torch.from_numpy(gguf_files.draw(kind, 40, 512, 0.1, np.random.default_rng(2)))
    sources = [matrix("model.embed_tokens.weight", 40, 512)]
    (stored,) = FORMATS[kind].cut(sources).stored("float32", sources)
    assert stored.repack is not None
    weight = Matrix(FORMATS[kind].cut(sources), (40, 512), {"blocks": stored.repack([drawn]).contiguous()})
    monkeypatch.setattr(embedding, "native_kernels", lambda _: blocks)
    tokens = torch.tensor([39, 0, 7, 7])
    found = embedding.look_up(tokens, weight, torch.float16)
    assert torch.equal(found, weight.format.dequantise(weight.parts)[tokens].half())


def test_every_type_is_read() -> None:
    assert [name for name, format in FORMATS.items() if format.native == "blocks"] == READ
