"""Products with matrices of few bits, interpreted on the CPU, against plain torch."""

import itertools
import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

from penstock.ops.activation import silu_mul
from penstock.ops.matrix import Matrix
from penstock.ops.triton import few_bits as kernels
from penstock.ops.triton import warp_tiles
from penstock.ops.triton.dequantise import look_up
from penstock.ops.triton.few_bits import FewBitsTuning, dequantise, few_bits_tuning, few_rows, suits
from penstock.ops.triton.few_bits_mma import MmaTuning
from penstock.ops.triton.few_bits_row import RowTuning, one_row
from penstock.ops.triton.ptx import E2M1, E4M3, FOUR_BITS, INT4, INT8
from penstock.ops.triton.warp_tiles import reads_rows
from penstock.worker.decode_step import _COUNTERS
from quantised import ALIKE, SCHEMES, matrix_of

READ = [name for name in SCHEMES if "order" not in name and name != "packed_odd"]
UNLIKE = [name for name in READ if name not in ALIKE]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scheme", READ)
def test_product(scheme: str, gated: bool) -> None:
    rng = torch.Generator().manual_seed(len(scheme))
    width = 288 if "mx" in scheme or "nv" in scheme else 320
    weight = torch.randn(48, width, generator=rng) / width**0.5
    few, plain = matrix_of(SCHEMES[scheme], weight)
    assert torch.equal(few.dequantised(plain), plain)
    x = torch.randn(3, width, generator=rng).bfloat16()
    bias = torch.randn(48, generator=rng).bfloat16()
    want = x.float() @ plain.T + bias.float()
    want = silu_mul(want) if gated else want
    for tuning in (FewBitsTuning(16, 64, 1), FewBitsTuning(32, 128, 2)):
        if not suits(x, few):
            pytest.skip("a format that the kernel leaves alone")
        got = few_rows(x, few, bias, gated=gated, tuning=tuning).float()
        assert (got - want).abs().max() < 2e-2 * want.abs().max()


@pytest.mark.parametrize("tuning", [FewBitsTuning(16, 64, 1), FewBitsTuning(32, 128, 2)])
def test_sums_of_operands_that_are_smaller_are_made_as_large_again(tuning: FewBitsTuning) -> None:
    """Compiled kernels make some smaller by a power of two; interpreted ones none."""
    rng = torch.Generator().manual_seed(1)
    few, _ = matrix_of(SCHEMES["mxfp4"], torch.randn(48, 288, generator=rng))
    x = torch.randn(3, 288, generator=rng).bfloat16()
    want = few_rows(x, few, tuning=tuning)
    with patch.object(kernels, "unfolded", lambda *_: 2.0**32):
        assert torch.equal(few_rows(x, few, tuning=tuning), want * 2.0**32)


@pytest.mark.parametrize("codes", [INT4, INT8, E2M1, E4M3])
@pytest.mark.parametrize("fine", [False, True])
def test_a_product_is_cut_into_what_a_device_has_room_for(codes: int, fine: bool) -> None:
    """Of shapes of 0.6B to 405B: parts of a sum are worth a launch, and have shared counters."""
    shapes = [(6144, 1024), (1024, 3072), (6144, 4096), (28672, 4096), (4096, 14336), (106496, 16384)]
    for many, shared, rows, (outer, inner) in itertools.product(
        (46, 132, 148), (101_376, 232_448), (16, 32, 64), shapes
    ):
        cut = few_bits_tuning(rows, outer, inner, many, codes, shared, fine=fine)
        tiles, bits = -(-outer // cut.cols), 4 if codes in FOUR_BITS else 8
        assert cut.splits * 512 <= inner
        assert cut.splits == 1 or tiles <= _COUNTERS
        assert cut.stages * cut.step * (2 * rows + cut.cols * bits // 8) <= shared
        # Most of the device has work, if there are rows enough.
        assert 2 * tiles * cut.splits >= min(many, 2 * outer // 64)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scheme", UNLIKE)
def test_product_of_one_row(scheme: str, gated: bool) -> None:
    """Closer than a product of more rows: nothing is rounded within. Some steps lie within the row,
    the last beyond its end, and there are warps without rows. Each shape has the one tuning with a gate and
    the other without."""
    rng, tunings = torch.Generator().manual_seed(len(scheme)), [RowTuning(4, 4), RowTuning(2, 8, 2)]
    for height, width in ((48, 96), (40, 832)):
        weight = torch.randn(height, width, generator=rng) / width**0.5
        few, plain = matrix_of(SCHEMES[scheme], weight)
        x = torch.randn(1, width, generator=rng).bfloat16()
        if not suits(x, few):
            pytest.skip("a format that the kernel leaves alone")
        bias = torch.randn(height, generator=rng)
        want = x.float() @ plain.T + bias
        want = silu_mul(want) if gated else want
        got = one_row(x.float(), few, bias, gated=gated, tuning=tunings[gated == (width == 96)])
        assert (got - want).abs().max() < 1e-5 * want.abs().max()
        assert torch.equal(few_rows(x, few, bias, gated=gated), one_row(x, few, bias, gated=gated))


def fenced(made: tuple[Matrix, Tensor]) -> tuple[Matrix, Tensor]:
    """The same, with no number behind the last scale."""
    few, plain = made
    scale = few.parts["scale"]
    end = torch.full((64,), 255, dtype=torch.uint8)
    behind = torch.cat((scale.contiguous().view(torch.uint8).flatten(), end)).view(scale.dtype)
    parts = few.parts | {"scale": behind[: scale.numel()].view(scale.shape)}
    return Matrix(few.format, few.shape, parts), plain


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scheme", UNLIKE)
def test_product_by_warps(scheme: str, gated: bool) -> None:
    """In float32 here, so close. Some warps have no columns at last, some tiles no rows, columns end within a
    run, behind which there is no number, and rows of activations end in the first eight or in the second."""
    rng = torch.Generator().manual_seed(len(scheme))
    for height, width, rows, tuning in (
        (48, 384, 3, MmaTuning(1, 2)),
        (40, 320, 11, MmaTuning(2, 4)),
        (24, 336, 9, MmaTuning(1, 2)),
        (24, 352, 2, MmaTuning(1, 1)),
    ):
        weight = torch.randn(height, width, generator=rng) / width**0.5
        few, plain = fenced(matrix_of(SCHEMES[scheme], weight))
        x = torch.full((rows, 2 * width + 64), torch.nan).bfloat16()[:, width : 2 * width]
        x.copy_(torch.randn(rows, width, generator=rng))
        if not suits(x, few):
            pytest.skip("a format that the kernel leaves alone")
        bias = torch.randn(height, generator=rng)
        want = x.float() @ plain.T + bias
        out = torch.full((rows + 1, len(bias) // (2 if gated else 1) + 1), torch.nan)[:rows, :-1]
        got = few_rows(x, few, bias, gated=gated, out=out, tuning=tuning)
        want = silu_mul(want) if gated else want
        assert got is out
        assert (got - want).abs().max() < 1e-5 * want.abs().max()
        assert out._base is not None
        assert out._base[rows].isnan().all()
        assert out._base[:, -1].isnan().all()


def test_products_by_warps_take_whole_steps_of_activations_that_lie_right() -> None:
    x = torch.zeros(16, 260).bfloat16()
    assert reads_rows(x[:, :256])
    assert reads_rows(x[:, 4:196])
    assert not reads_rows(x[:, 1:257])
    assert not reads_rows(torch.zeros(16, 258).bfloat16()[:, :256])
    assert not reads_rows(torch.zeros(16, 256)), "float32"
    assert reads_rows(torch.zeros(1, 356).bfloat16())
    assert not reads_rows(torch.zeros(1, 358).bfloat16())


def test_four_bit_floats_of_few_rows_are_computed_by_warps_where_rows_of_the_matrix_are_many() -> None:
    """Activations that lie otherwise take the other kernels."""
    rng = torch.Generator().manual_seed(1)
    few, plain = matrix_of(SCHEMES["mxfp4"], torch.randn(512, 128, generator=rng) / 11)
    small, _ = matrix_of(SCHEMES["mxfp4"], torch.randn(496, 128, generator=rng))
    x = torch.randn(9, 132, generator=rng).bfloat16()
    for rows, first, matrix, times in ((1, 0, few, 1), (8, 3, few, 0), (1, 1, few, 0), (1, 0, small, 0)):
        given = x[:rows, first : first + 128]
        with patch.object(kernels, "few_columns", wraps=kernels.few_columns) as by_warps:
            got = kernels.few_rows(given, matrix)
        assert by_warps.call_count == times
        if matrix is few:
            want = given.float() @ plain.T
            assert (got.float() - want).abs().max() < 1e-2 * want.abs().max()


@pytest.mark.parametrize("scheme", READ)
def test_dequantised(scheme: str) -> None:
    rng = torch.Generator().manual_seed(len(scheme))
    few, plain = matrix_of(SCHEMES[scheme], torch.randn(64, 304, generator=rng) / 17)
    for rows in (slice(0, 64), slice(32, 48), slice(7, 30)):
        out = torch.full((rows.stop - rows.start, 304), torch.nan)
        dequantise(few, rows, out)
        assert torch.equal(out, plain[rows])
        assert torch.equal(few.dequantised(plain, rows), plain[rows])


@pytest.mark.parametrize("scheme", READ)
def test_rows_looked_up(scheme: str) -> None:
    """Any rows, in any order, some of them twice."""
    rng = torch.Generator().manual_seed(len(scheme))
    few, plain = matrix_of(SCHEMES[scheme], torch.randn(64, 304, generator=rng) / 17)
    rows = torch.tensor([63, 0, 17, 17, 5, *range(20, 40), 1])
    out = torch.full((len(rows), 304), torch.nan)
    look_up(few, rows, out)
    assert torch.equal(out, plain[rows])
    assert torch.equal(few.format.look_up(few.parts, rows), plain[rows])


@pytest.mark.parametrize("dealt", [True, False])
def test_products_of_a_warp_need_a_compiler_that_deals_tensors_out_as_they_do(
    dealt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=90)))
    monkeypatch.setattr(warp_tiles, "COMPILED", True)
    monkeypatch.setattr(warp_tiles, "driver", target)
    monkeypatch.setattr(warp_tiles, "DEALT", dealt)
    assert warp_tiles.reads_rows(torch.zeros(1, 128, dtype=torch.bfloat16)) == dealt
