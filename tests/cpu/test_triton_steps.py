"""The kernels around a decode step and the product of one row, interpreted on the CPU, against plain
torch."""

import os

import pytest
import torch
from torch import Tensor

if (
    os.environ.get("TRITON_INTERPRET") != "1"
):  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import tiny
from penstock.arch.spec import RopeKind, RopeSpec
from penstock.ops import steps
from penstock.ops.activation import silu_mul
from penstock.ops.rope import RotaryAngles
from penstock.ops.triton.linear import one_row
from penstock.ops.triton.steps import likeliest, place

TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 2.5e-2,
    torch.float16: 3e-3,
}  # the interpreter truncates to bf16 where a GPU rounds


SIZES = [(64, 20, None), (100, 7, (4, 32, 4)), (96, 16, (8, 128, 4)), (2100, 5, (2, 512, 4))]
EVERY = [
    (*sizes, dtype, biased)
    for row, sizes in enumerate(SIZES)
    for turn, dtype in enumerate(TOLERANCE)
    for biased in ((False, True) if tiny.THOROUGH else [(row + turn) % 2 == 0])
]
"""All sizes in all precisions, by turns with and without a bias."""


@pytest.mark.parametrize(("inner", "outer", "tuning", "dtype", "biased"), EVERY)
class TestOneRow:
    def given(
        self, inner: int, outer: int, dtype: torch.dtype, biased: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        rng = torch.Generator().manual_seed(inner + outer)
        wide = torch.randn(outer, inner + 8, generator=rng) / inner**0.5
        bias = torch.randn(outer, generator=rng).to(dtype) if biased else None
        return torch.randn(1, inner, generator=rng).to(dtype), wide.to(dtype)[:, :inner], bias

    def test_product(
        self, inner: int, outer: int, tuning: tuple[int, int, int] | None, dtype: torch.dtype, biased: bool
    ) -> None:
        x, weight, bias = self.given(inner, outer, dtype, biased)
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        out = torch.full((1, outer), torch.nan, dtype=dtype)
        assert one_row(x, weight, bias, out=out, tuning=tuning) is out
        for got in (out, one_row(x, weight, bias, tuning=tuning)):
            torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    def test_with_its_gate(
        self, inner: int, outer: int, tuning: tuple[int, int, int] | None, dtype: torch.dtype, biased: bool
    ) -> None:
        x, weight, bias = self.given(inner, 2 * outer, dtype, biased)
        want = silu_mul(x.double() @ weight.double().T + (0 if bias is None else bias.double()))
        got = one_row(x, weight, bias, gated=True, tuning=tuning)
        assert got.shape == (1, outer)
        torch.testing.assert_close(got.double(), want, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


class TestPlace:
    @pytest.mark.parametrize("seed", range(4))
    def test_as_step_by_step(self, seed: int) -> None:
        """Rows in any order, some of nobody, some with a new page, which may be the one that they write to,
        and some with a table that does not begin with their first column."""
        rng = torch.Generator().manual_seed(seed)
        everyone, pages, size, count = 7, 300, 4, 5
        rope = (
            RopeSpec(10000.0, 16, RopeKind.YARN, 4.0, 64, attention_factor=1.3)
            if seed % 2
            else RopeSpec(10000.0, 24)
        )
        angles = RotaryAngles(rope, torch.device("cpu"))
        table = torch.randint(0, 50, (everyone + 1, pages), generator=rng, dtype=torch.int32)
        newest = torch.randint(0, 90, (everyone + 1,), generator=rng)
        rows = torch.randperm(everyone, generator=rng)[:count].int()
        positions = torch.tensor([0, 3, 4, 1190, 257], dtype=torch.int32)
        given = torch.zeros(steps.FIELDS, count + 2, dtype=torch.int32)
        given[0], given[3], given[1] = everyone, everyone, -1
        given[0, :count], given[1, :count] = rows, positions
        given[2, :count] = torch.tensor([-1, 5, -1, 7, 0])
        given[3, 0], given[4, 0], given[5, 0] = rows[0], 0, 99
        given[3, 2], given[4, 2], given[5, 2] = rows[2], 1, 98
        given[3, 4], given[4, 4], given[5, 4] = rows[4], 65, 97
        given[6, 3], given[6, 4] = 250, 60
        wanted_table, got_table = table.clone(), table.clone()
        want = steps.place(given, wanted_table, newest, angles, size)
        got = steps.Placed(*place(given, got_table, newest, angles.frequencies, angles.scale, size))
        assert torch.equal(got_table[:everyone], wanted_table[:everyone])
        for row, position in enumerate(given[1].tolist()):
            held = position // size + 1 - int(given[6, row]) if position >= 0 else 0
            assert torch.equal(got.table[row, :held], want.table[row, :held])
        real = given[1] >= 0
        assert torch.equal(got.tokens[real], want.tokens[real])
        for name in ("blocks", "offsets"):
            assert torch.equal(getattr(got, name)[real], getattr(want, name)[real]), name
        assert torch.equal(got.slots, want.slots)
        assert torch.equal(got.lengths, want.lengths)
        torch.testing.assert_close(got.cos, want.cos, rtol=0, atol=1e-7)
        torch.testing.assert_close(got.sin, want.sin, rtol=0, atol=1e-7)


class TestLikeliest:
    @pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
    @pytest.mark.parametrize("vocab", [1, 100, 8192, 20001])
    def test_of_equal_ones_the_first(self, vocab: int, dtype: torch.dtype) -> None:
        rng = torch.Generator().manual_seed(vocab)
        logits = torch.randint(-9, 3, (6, vocab + 3), generator=rng).to(dtype)[:, :vocab]  # Full of ties.
        logits[1] = -torch.inf
        logits[2] = -0.0
        logits[2, -1] = 0.0
        rows = torch.tensor([4, 0, 9, 2, 7, 1], dtype=torch.int32)
        newest, tokens = torch.full((10,), -5), torch.full((6,), -5)
        best = torch.full((8,), steps.LEAST)
        for _ in range(2):
            likeliest(logits, rows, newest, tokens, best)
            want = torch.tensor([int((row == row.max()).nonzero()[0, 0]) for row in logits])
            assert torch.equal(tokens, want)
            assert torch.equal(newest[rows.long()], want)
            assert newest[[3, 5, 6, 8]].tolist() == [-5] * 4
            assert (best == steps.LEAST).all()
            logits = logits.flip(1)

    @pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
    @pytest.mark.parametrize("vocab", [1, 100, 20001])
    def test_of_what_is_not_a_number_there_is_none(self, vocab: int, dtype: torch.dtype) -> None:
        """Wherever in a row it is; an infinite one is likelier than all others, and not likelier than it."""
        numbers = torch.randn(10, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
        middle, last = vocab // 2, vocab - 1
        logits = numbers.clone()
        logits[1], logits[2] = torch.nan, -torch.nan
        logits[3, 0], logits[4, middle], logits[5, last] = torch.nan, -torch.nan, -torch.nan
        logits[7, middle], logits[8] = torch.inf, -torch.inf
        logits[9, 0], logits[9, last] = torch.inf, torch.nan
        wrong = {1, 2, 3, 4, 5, 9}
        rows = torch.tensor([12, 0, 9, 2, 7, 1, 4, 3, 11, 5], dtype=torch.int32)
        newest, tokens, best = torch.full((13,), -5), torch.full((10,), -5), torch.full((11,), steps.LEAST)
        for given in (logits, numbers, logits):
            likeliest(given, rows, newest, tokens, best)
            first = [
                int((row == row.amax()).nonzero()[0, 0]) if not row.isnan().any() else steps.NO_TOKEN
                for row in given
            ]
            assert [row for row, token in enumerate(first) if token == steps.NO_TOKEN] == (
                sorted(wrong) if given is logits else []
            )
            assert tokens.tolist() == first
            assert newest[rows.long()].tolist() == [max(token, 0) for token in first]
            assert newest[[6, 8, 10]].tolist() == [-5] * 3
            assert (best == steps.LEAST).all()
            plain, plain_newest = torch.full((10,), -5), torch.full((13,), -5)
            steps.likeliest(given, rows, plain_newest, plain, best)
            assert torch.equal(plain, tokens)
            assert torch.equal(plain_newest, newest)
