"""What PTX makes of codes of few bits, instruction by instruction, against the plain reference: the
interpreter does not run it."""

from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

pytest.importorskip("triton")

from penstock.arch.formats.codes import E2M1 as FOUR_BIT_NUMBERS
from penstock.arch.formats.codes import NO_EXPONENT, packed, powers_of_two
from penstock.arch.formats.codes import floats_of as numbers_of
from penstock.ops.triton.codes import RUN_SCALES
from penstock.ops.triton.ptx import (
    E2M1,
    E4M3,
    EIGHTS,
    EXPONENTS,
    FOLDED,
    FOUR_BITS,
    INT4,
    INT8,
    NUMBERS,
    floats_of,
    less,
    pairs_of,
    products_of,
    unfolded,
)
from ptx_machine import run_ptx

NAMES = {INT4: "int4", INT8: "int8", E2M1: "e2m1", E4M3: "e4m3"}
FLOAT = torch.empty(0)
KINDS = [pytest.param(kind, id=name) for kind, name in NAMES.items()]
DTYPES = [pytest.param(dtype, id=str(dtype)[6:]) for dtype in (torch.bfloat16, torch.float16)]
WITH_ZEROS = [
    pytest.param(kind, zeros, id=name + "-zeros" * zeros)
    for (kind, name), zeros in product(NAMES.items(), (False, True))
    if kind in (INT4, INT8) or not zeros
]


def bits_of(kind: int) -> int:
    return 4 if kind in FOUR_BITS else 8


class Drawn:
    """Words of codes, and of each place the code: every code beside every number of something else, in an
    order that is another at every place, so that neighbours are all there are.

    beside: how many numbers that something has. Of words, `number` is what stands beside a place's codes.
    """

    def __init__(self, kind: int, beside: int = 1, seed: int = 0) -> None:
        self.bits, self.beside = bits_of(kind), beside
        self._rng = np.random.default_rng(seed)
        self.number = np.arange(beside).repeat(1 << self.bits)

    def codes(self) -> NDArray[np.int64]:
        """Codes of a word `[places, words]`."""
        return np.stack([self.shuffled(1 << self.bits, self.beside) for _ in range(32 // self.bits)])

    def shuffled(self, count: int, times: int) -> NDArray[np.int64]:
        whole = np.arange(count).repeat(times).reshape(count, times).T
        return self._rng.permuted(whole, axis=1).reshape(-1)

    def word(self, codes: NDArray[np.int64]) -> NDArray[np.uint32]:
        return sum(code << place * self.bits for place, code in enumerate(codes)).astype(np.uint32)

    def others(self) -> NDArray[np.int64]:
        """Numbers of 0..beside for each word, with no order that is that of `number`."""
        return self._rng.permutation(self.number)


def plain(kind: int, codes: NDArray[np.int64]) -> Tensor:
    """Numbers that codes are, in float32; of integers without their zero point."""
    given = torch.from_numpy(codes)
    if kind == E2M1:
        return torch.tensor(FOUR_BIT_NUMBERS)[given]
    return numbers_of(given.byte(), FLOAT) if kind == E4M3 else given.float()


def twice(numbers: Tensor) -> NDArray[np.uint32]:
    """Pairs of numbers of 16 bits, each twice."""
    return numbers.view(torch.uint16).numpy().astype(np.uint32) * 0x10001


def halves(words: list[NDArray[np.uint32]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first and the second of pairs, `[places, words]` each."""
    pairs = torch.from_numpy(np.stack(words).view(np.uint16)).view(dtype).unflatten(1, (-1, 2))
    return pairs[:, :, 0], pairs[:, :, 1]


def same(got: Tensor, want: Tensor) -> bool:
    """Whether they are bit for bit the same."""
    return got.dtype == want.dtype and torch.equal(got.view(torch.int16), want.view(torch.int16))


def finite(dtype: torch.dtype, count: int) -> Tensor:
    """Numbers: the smallest and largest of either sign, normal and subnormal, and others of all sizes."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    info = torch.finfo(dtype)
    edges = torch.tensor([0, info.tiny, info.tiny * info.eps, info.tiny * (1 - info.eps), info.max, 1])
    edges = torch.cat((edges, -edges)).to(dtype)
    rest = torch.randperm(len(every), generator=torch.Generator().manual_seed(3))[: count - len(edges)]
    return torch.cat((edges, every[rest]))


@pytest.mark.parametrize("scaled", [False, True], ids=["whole", "scaled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "zeros"), WITH_ZEROS)
def test_pairs(kind: int, zeros: bool, dtype: torch.dtype, scaled: bool) -> None:
    half, integers = dtype == torch.float16, kind in (INT4, INT8)
    text, registers = pairs_of(kind, half=half, zeros=zeros, scaled=scaled, raw=NUMBERS)
    outputs, levels = registers.count("="), 1 << bits_of(kind)
    drawn = Drawn(kind, levels if zeros else 64 if scaled else 2)
    codes = drawn.codes(), drawn.codes()
    given = [drawn.word(one) for one in codes]
    taken = np.full((2, 1), levels // 2 if integers else 0)
    if zeros:
        taken = np.stack([drawn.number, drawn.others()])  # of each half
        minus = (less(kind, half=half) - torch.from_numpy(taken).float()).to(dtype)
        given += [twice(minus[at]) for at in (0, 0, 1, 1)]
    scales = torch.ones(4, 1, dtype=dtype)
    if scaled:
        numbers = finite(dtype, 64)
        scales = torch.stack([numbers[drawn.others() % 64] for _ in range(4)])  # of each quarter
        given += [twice(scales[at]) for at in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert len(given) == registers.count("r") - outputs
    assert outputs == 32 // bits_of(kind)
    made = halves(run_ptx(text, given, outputs), dtype)
    places = torch.arange(outputs)
    zero, scale = torch.from_numpy(taken)[places * 2 // outputs], scales[places * 4 // outputs]
    for got, code in zip(made, codes, strict=True):
        exact = plain(kind, code)
        exact = exact - zero.float() if integers else exact
        assert torch.equal(exact, exact.to(dtype).float())
        assert same(got, ((exact * scale.float()) if scaled else exact).to(dtype).contiguous())


@pytest.mark.parametrize(
    ("kind", "raw", "group", "kept"),
    [pytest.param(*of, kept, id=f"{NAMES[of[0]]}-{of[1]}-{of[2]}") for of, kept in RUN_SCALES.items()],
)
def test_scales_of_a_run_in_one_register(kind: int, raw: int, group: int, kept: torch.dtype) -> None:
    """Each is the byte of the group that the columns of a place are of."""
    text, registers = pairs_of(kind, half=False, zeros=False, scaled=True, raw=raw)
    outputs, drawn = registers.count("="), Drawn(kind, NO_EXPONENT if raw == EXPONENTS else 256)
    codes = drawn.codes(), drawn.codes()
    assert kept.itemsize * group == 8 * outputs
    scales = torch.from_numpy(np.stack([drawn.number] + [drawn.others() for _ in range(kept.itemsize - 1)]))
    if kind == E2M1 and raw == EXPONENTS:  # From 2 ** -100 to 2 ** 33.
        scales = 27 + scales % 134
    scales = scales.byte()
    together = scales.t().contiguous().view(kept)[:, 0].int().numpy().view(np.uint32)
    made = run_ptx(text, [*map(drawn.word, codes), together, together], outputs)
    assert registers.count("r") - outputs == 4
    of_place = scales[torch.arange(outputs) * 8 // group]
    factors = powers_of_two(of_place) if raw == EXPONENTS else numbers_of(of_place, FLOAT)
    for got, code in zip(halves(made, torch.bfloat16), codes, strict=True):
        want = plain(kind, code) * factors / unfolded(kind, raw)
        assert same(got, want.bfloat16())
        if kind == E2M1:
            assert torch.equal(want.bfloat16().float(), want)  # exact
            assert unfolded(kind, raw) > 1


WARPS = 3


@pytest.mark.parametrize("wide", [1, 2])
@pytest.mark.parametrize("scales", ["whole", "scaled", "bytes", "exponents"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "zeros"), WITH_ZEROS)
def test_products(kind: int, zeros: bool, dtype: torch.dtype, scales: str, wide: int) -> None:
    """Of 16 rows of two runs, as they rest, and 8 rows of activations or 16. Whole numbers, so that sums are
    exact in every order."""
    raw = {"bytes": EIGHTS, "exponents": EXPONENTS}.get(scales, NUMBERS)
    if raw and (dtype == torch.float16 or kind not in {EIGHTS: (E2M1,), EXPONENTS: (E2M1, E4M3)}[raw]):
        pytest.skip("scales of such codes are no bytes")
    half, places, integers = dtype == torch.float16, 32 // bits_of(kind), kind in (INT4, INT8)
    text, registers = products_of(kind, half=half, zeros=zeros, scaled=scales != "whole", raw=raw, wide=wide)
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 1 << bits_of(kind), (WARPS, 16, 2, 8 * places))
    if kind == E4M3:
        codes = codes % 4 * 8 + 48 + codes // 128 * 128  # 0.25 to 2
    zero = rng.integers(0, 1 << bits_of(kind), (WARPS, 16, 2, 2)) if zeros else np.full((1, 1, 1, 2), 0)
    zero = zero + (0 if zeros or not integers else (1 << bits_of(kind)) // 2)
    exponent = rng.integers(-2, 3, (WARPS, 16, 2, 4)) if scales != "whole" else np.zeros((WARPS, 16, 2, 4))
    each = {EIGHTS: 1, EXPONENTS: 2 if kind == E2M1 else 4}.get(raw, 1)
    exponent = exponent[..., ::each].repeat(each, -1)
    x = rng.integers(-4, 5, (WARPS, 8 * wide, 2, 8 * places)).astype(np.float64)
    place = np.arange(8 * places) // 8
    weight = plain(kind, codes).double().numpy()
    weight = weight - (zero[..., place * 2 // places] if integers else 0)
    weight = weight * 2.0 ** exponent[..., place * 4 // places]
    want = np.einsum("wrsc,wnsc->wrn", weight, x)

    lane = np.arange(32)
    group, run, first = lane // 4, lane % 4 // 2, lane % 2 * 4
    resting = packed(torch.from_numpy(codes.reshape(-1, 16 * places)).byte(), bits_of(kind))
    words = resting.view(torch.int32).numpy().view(np.uint32).reshape(WARPS, 16, 2, 8)
    given: list[NDArray[np.uint32]] = [np.broadcast_to(lane, (WARPS, 32))]
    given += [words[:, group + row, run, first + at] for row in (0, 8) for at in range(4)]
    pairs = torch.from_numpy(x).to(dtype).view(torch.int32).numpy().view(np.uint32)
    for at in range(places):
        for row in range(0, 8 * wide, 8):
            given += [pairs[:, group + row, run, 4 * at + first // 2 + more] for more in (0, 1)]
    if zeros:
        minus = twice((less(kind, half=half) - torch.from_numpy(zero).float()).to(dtype).reshape(-1, 2))
        minus = minus.reshape(WARPS, 16, 2, 2)
        given += [minus[:, group + row, run, which] for row in (0, 8) for which in (0, 1)]
    if scales == "scaled":
        factors = twice(torch.from_numpy(2.0**exponent).to(dtype).reshape(-1, 4)).reshape(WARPS, 16, 2, 4)
        given += [factors[:, group + row, run, which] for row in (0, 8) for which in range(4)]
    elif raw:
        scale = (exponent + 127 if raw == EXPONENTS else (exponent + 7) * 8).astype(np.uint32)[..., ::each]
        together = sum(scale[..., at] << 8 * at for at in range(4 // each))
        given += [together[:, group + row, run] for row in (0, 8)]
    if raw and kind == E2M1:
        want = want * 2.0 ** -FOLDED[raw]
    assert len(given) == registers.count("r")
    outputs = registers.count("=")
    made = np.stack(run_ptx(text, given, outputs)).view(np.float32).reshape(wide, 2, 2, WARPS, 32)
    for at, row, column in product(range(wide), (0, 1), (0, 1)):
        assert np.array_equal(made[at, row, column], want[:, group + 8 * row, 8 * at + lane % 4 * 2 + column])


def test_products_stop_where_lanes_are_others() -> None:
    text, registers = products_of(INT4, half=False, zeros=False, scaled=False, raw=0, wide=1)
    given = [np.zeros(32, np.uint32) for _ in range(registers.count("r"))]
    with pytest.raises(AssertionError, match="stopped"):
        run_ptx(text, given, 4)


@pytest.mark.parametrize(("kind", "zeros"), WITH_ZEROS)
def test_floats(kind: int, zeros: bool) -> None:
    """Those of four bits are 64 times smaller, and two codes of eight are no numbers."""
    drawn, places = Drawn(kind, 4), 32 // bits_of(kind)
    codes = drawn.codes()
    made = run_ptx(floats_of(kind, zeros=zeros), [drawn.word(codes)], places)
    want = plain(kind, codes) / (64 if kind == E2M1 else 1)
    if kind in (INT4, INT8) and not zeros:
        want = want - (8 if kind == INT4 else 128)
    if kind == E4M3:
        want = want.where(torch.from_numpy(codes % 128 != 127), torch.nan)
    got = torch.from_numpy(np.stack(made)).view(torch.float32)
    assert torch.equal(got.isnan(), want.isnan())
    got, want = (one.nan_to_num().view(torch.int32) for one in (got, want))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "text",
    [
        "fma.rn.f16x2 $0, $1, 0x3c003c00, $1;",
        "add.u64 $0, $1, 1;",
        "shl.u32 $0, $1, 1;",
        "lop3.b32 $0, $1, $1;",
        "lop3.b32 $0, $1, $1, $1, 0x3c;",
        "sub.rn.f32 $0, $1, 1;",
        "and.b32 $0, $1, 0f3f800000;",
        "mov.b32 a, $1; mov.b32 $0, a;",
        "{ .reg .b32 a; mov.b32 $0, a; }",
        "{ .reg .b16 a, b; mov.b32 {a, b}, $1; mov.b32 $0, a; }",
        "mov.b32 $1, 0; mov.b32 $0, $1;",
        "mov.b32 $0, $1",
        "and.b32 $1, $1, 1;",
        "shr.b32 $0, $1, 32;",
    ],
)
def test_the_machine_refuses(text: str) -> None:
    with pytest.raises(AssertionError):
        run_ptx(text, [np.zeros(1, np.uint32)], 1)


@pytest.mark.parametrize(
    ("kind", "a", "b", "c", "made"),
    [
        ("bf16", 0x3F80, 0x3F80, 0x3B80, 0x3F80),  # 1 + 2 ** -8: to even
        ("bf16", 0x3F81, 0x3F80, 0x3B80, 0x3F82),
        ("bf16", 0x3B80, 0x3F80, 0x3F80, 0x3F80),
        ("bf16", 0x3B81, 0x3F80, 0x3F80, 0x3F81),  # the sum is above the middle
        ("bf16", 0x0001, 0x0001, 0x0000, 0x0000),
        ("bf16", 0x0003, 0x3F00, 0x0000, 0x0002),  # 1.5 of the smallest
        ("bf16", 0x7F7F, 0x4000, 0x8000, 0x7F80),
        # 2.5 and 5.5 units behind 2, where 2 ** -120 decides.
        ("bf16", 0x3FC0, 0x3FAE, 0x0000, 0x4002),
        ("bf16", 0x3FC0, 0x3FAE, 0x0380, 0x4003),
        ("bf16", 0x3FC0, 0x3FB2, 0x0000, 0x4006),
        ("bf16", 0x3FC0, 0x3FB2, 0x8380, 0x4005),
        ("f16", 0x3C01, 0x3C01, 0x0000, 0x3C02),  # 1 + 2 ** -9 + 2 ** -20
        ("f16", 0x1000, 0x3C00, 0x3C00, 0x3C00),  # 1 + 2 ** -11: to even
        ("f16", 0x1000, 0x3C01, 0x3C00, 0x3C01),
        ("f16", 0x0001, 0x3800, 0x0001, 0x0002),  # 1.5 of the smallest: to even
        ("f16", 0x0000, 0xBC00, 0x8000, 0x8000),
    ],
)
def test_the_machine_rounds_once(kind: str, a: int, b: int, c: int, made: int) -> None:
    for half in (0, 16):
        words = [np.asarray([one << half], np.uint32) for one in (a, b, c)]
        [got] = run_ptx(f"fma.rn.{kind}x2 $0, $1, $2, $3;", words, 1)
        assert got[0] >> half & 0xFFFF == made
