"""Blocks of GGUF in Triton kernels: numbers bit for bit those of the reference, and products against it."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import gguf_files
from penstock.arch.formats.format import matrix
from penstock.arch.formats.gguf import FORMATS
from penstock.arch.formats.gguf_blocks import LEVELS
from penstock.ops import embedding
from penstock.ops.activation import silu_mul
from penstock.ops.matrix import Matrix
from penstock.ops.triton import blocks
from penstock.ops.triton.block_codes import kind_of, take_apart
from penstock.ops.triton.blocks import BlocksTuning, dequantise, few_rows, reads, suits
from ptx_machine import run_ptx

READ = [name for name, format in FORMATS.items() if reads(format)]


def resting(kind: str, height: int, width: int, cut: range | None = None) -> Matrix:
    drawn = torch.from_numpy(gguf_files.draw(kind, height, width, 0.1, np.random.default_rng(2)))
    sources = [matrix("model.layers.0.mlp.down_proj.weight", height, width, columns=cut)]
    format = FORMATS[kind].cut(sources)
    (stored,) = format.stored("float32", sources)
    assert stored.repack is not None
    blocks = stored.repack([drawn]).contiguous()
    return Matrix(format, (height, width if cut is None else len(cut)), {"repacked": blocks})


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("cut", [None, range(300, 900)])
def test_dequantised(kind: str, cut: range | None) -> None:
    weight = resting(kind, 40, 1280, cut)
    for rows, dtype in ((slice(0, 40), torch.float32), (slice(7, 30), torch.float16)):
        out = torch.full((rows.stop - rows.start, weight.shape[1]), torch.nan, dtype=dtype)
        dequantise(weight, rows, out)
        assert torch.equal(out, weight.format.dequantise(weight.parts, rows).to(dtype))


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize(("cut", "gated"), [(None, False), (range(300, 900), True)])
def test_product(kind: str, cut: range | None, gated: bool) -> None:
    weight, rng = resting(kind, 40, 1024, cut), torch.Generator().manual_seed(len(kind))
    plain = weight.dequantised(torch.empty(0))
    # The interpreter cuts bits of bfloat16 off where a device rounds.
    ways = (torch.bfloat16, 2**-7, BlocksTuning(16, 1)), (torch.float16, 2**-11, BlocksTuning(32, 2))
    for dtype, rounding, tuning in ways:
        x = torch.randn(3, plain.shape[1], generator=rng).to(dtype)
        bias = torch.randn(40, generator=rng).to(dtype)
        assert suits(x, weight)
        want = x.float() @ plain.T + bias.float()
        want = silu_mul(want) if gated else want
        got = few_rows(x, weight, bias, gated=gated, tuning=tuning).float()
        allowed = 6 * rounding * want.abs().max() if gated else rounding * (want.abs() + 1e-2)
        assert ((got - want).abs() <= allowed).all()


def test_rows_do_not_depend_on_each_other() -> None:
    """However many there are, and if the last program is not full."""
    weight, x = resting("Q4_K", 40, 512), torch.randn(20, 512).bfloat16()
    whole = few_rows(x, weight, tuning=BlocksTuning(32, 2))
    for some in (slice(0, 1), slice(3, 12), slice(4, 20)):
        assert torch.equal(few_rows(x[some], weight, tuning=BlocksTuning(32, 2)), whole[some])


def test_what_suits() -> None:
    weight = resting("Q6_K", 16, 256)
    assert suits(torch.zeros(64, 256).half(), weight)
    assert not suits(torch.zeros(65, 256).half(), weight)
    assert not suits(torch.zeros(1, 256), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", READ)
def test_what_is_compiled_makes_the_operands(kind: str, dtype: torch.dtype) -> None:
    """The interpreter takes codes apart by arithmetic; a device runs these instructions."""
    of, rng = kind_of(kind), np.random.default_rng(1)
    pieces, registers = take_apart(of, dtype)
    places, outputs = 32 // of.bits, registers.count("=")
    assert len(pieces) * outputs == (2 * places if of.paired else places)
    words = list(rng.integers(0, 2**32, (2, 40)))
    above = list(rng.integers(0, 1 << 16, (2, 40))) if of.high else []
    made = np.stack([one for text in pieces for one in run_ptx(text, words + above, outputs)])
    got = torch.from_numpy(made.view(np.uint16)).view(dtype).unflatten(1, (-1, 2)).float()
    for number in range(len(got)):
        place = number % places
        for side in range(2):
            code = words[side] >> place * of.bits & (1 << of.bits) - 1
            if of.high:
                code |= (above[side] >> number * of.high & (1 << of.high) - 1) << of.bits
            want = np.asarray(LEVELS)[code] if of.levels else code + (1 << of.bits + of.high)
            assert torch.equal(got[number, :, side], torch.from_numpy(want).float())


@pytest.mark.parametrize("kind", READ)
def test_rows_of_an_embedding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By these kernels, as on a GPU."""
    weight = resting(kind, 40, 512)
    monkeypatch.setattr(embedding, "native_kernels", lambda _: blocks)
    tokens = torch.tensor([39, 0, 7, 7])
    found = embedding.look_up(tokens, weight, torch.float16)
    assert torch.equal(found, weight.format.dequantise(weight.parts)[tokens].half())


def test_every_type_is_read() -> None:
    assert [name for name, format in FORMATS.items() if format.native == "blocks"] == READ
