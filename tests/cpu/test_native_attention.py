"""The kernel in C that attends with rows to pages on a CPU, against float64, compiled in each way."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from native_ways import WAYS
from penstock.ops.attention.attend import attend
from penstock.ops.attention.inputs import AttentionInputs, LayerAttention, QueryRun, Rows
from penstock.ops.kernels import plain_torch
from penstock.ops.native import attention, few_bits
from penstock.ops.native.compiler import NativeError, load
from penstock.ops.native.few_bits import FewBitsLibrary

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = [(2, 2, 16), (4, 2, 64), (8, 1, 128), (6, 3, 48), (16, 1, 256)]
"""Heads, heads of keys, and numbers of a head."""
LENGTHS = (1, 16, 17, 0, 31, 32, 33, 70, 7, 48)
BLOCK = 16


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@cache
def compiled(kept: Path, way: str) -> FewBitsLibrary:
    return FewBitsLibrary(load(kept, WAYS[way]))


@pytest.fixture(params=WAYS, autouse=True)
def _way(request: pytest.FixtureRequest, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = few_bits._Found()
    try:
        found.library, found.sought = compiled(kept, request.param), True
    except NativeError as fault:
        pytest.skip(str(fault))
    monkeypatch.setattr(few_bits, "_found", found)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Made:
    """Rows over pages that are full of NaN behind each row's end, in a table whose ends lead nowhere."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS
    ) -> None:
        rng = torch.Generator().manual_seed(heads * dim)
        columns = -(-max(lengths) // BLOCK)
        free = iter(torch.randperm(len(lengths) * columns, generator=rng).tolist())
        pages = torch.full((len(lengths) * columns, 2, BLOCK, kv_heads, dim), torch.nan, dtype=dtype)
        table = torch.full((len(lengths), columns), 2**31 - 1, dtype=torch.int32)
        self.keys, self.values = [], []
        for row, length in enumerate(lengths):
            k, v = torch.randn(2, length, kv_heads, dim, generator=rng).to(dtype)
            self.keys.append(k)
            self.values.append(v)
            for column, start in enumerate(range(0, length, BLOCK)):
                block = table[row, column] = next(free)
                count = min(BLOCK, length - start)
                pages[block, 0, :count], pages[block, 1, :count] = (x[start : start + count] for x in (k, v))
        self.cache = pages[:, 0], pages[:, 1]
        self.rows = Rows(len(lengths), table, torch.tensor(lengths, dtype=torch.int32), max(lengths))
        wide = torch.randn(len(lengths), heads + 2 * kv_heads, dim, generator=rng).to(dtype)
        self.q = wide[:, :heads]  # A view of a fused projection.

    def wanted(self, layer: LayerAttention) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp in float64; without keys 0 and -inf."""
        outs, levels = [], []
        for q, k, v in zip(self.q.double(), self.keys, self.values, strict=True):
            first = max(len(k) - (layer.window or len(k)), 0)
            group = len(q) // k.shape[1]
            k, v = (x[first:].double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
            scores = (k @ q[:, :, None])[..., 0] * layer.scale
            outs.append((scores.softmax(-1)[:, None] @ v)[:, 0] if k.shape[1] else torch.zeros_like(q))
            levels.append(scores.logsumexp(-1))
        return torch.stack(outs), torch.stack(levels)

    def found(self, layer: LayerAttention, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        assert attention.suits(self.q, self.cache, layer)
        out = torch.full(self.q.shape, torch.nan, dtype=dtype or self.q.dtype)
        lse = torch.full(self.q.shape[:2], torch.nan)
        attention.paged_decode(self.q, self.cache, self.rows, layer, out=out, lse=lse)
        return out, lse


def test_values_may_lie_otherwise_than_keys() -> None:
    """In pages of their own, with more between blocks, tokens and heads."""
    made, layer = Made(*SHAPES[0], torch.float32), LayerAttention(0.125, lse=True)
    want, _ = made.found(layer)
    k, v = made.cache
    wide = torch.full((len(v), 2 * BLOCK, v.shape[2] + 3, v.shape[3]), torch.nan)
    wide[:, :BLOCK, : v.shape[2]] = v
    made.cache = k, wide[:, :BLOCK, : v.shape[2]]
    assert torch.equal(made.found(layer)[0], want)


@pytest.mark.parametrize("window", [None, 1, 20, 1000])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape: tuple[int, int, int], dtype: torch.dtype, window: int | None) -> None:
    made, layer = Made(*shape, dtype), LayerAttention(shape[2] ** -0.5, window, lse=True)
    out, lse = made.found(layer)
    want, want_lse = made.wanted(layer)
    room = TOLERANCE[dtype] * float(want.abs().max())
    torch.testing.assert_close(out.double(), want, rtol=0, atol=room)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-6, atol=2e-6)
    wide, _ = made.found(layer, torch.float32)
    torch.testing.assert_close(wide.double(), want, rtol=0, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("start", [0, 21])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_runs(dtype: torch.dtype, start: int, window: int | None) -> None:
    """Each query of a run sees the keys up to its own, and none behind it."""
    made, layer = Made(4, 2, 64, dtype, (40,)), LayerAttention(0.125, window, lse=True)
    run = QueryRun(0, 40 - start, start, made.rows.table[0].long())
    assert attention.suits_run(run)
    assert not attention.suits_run(QueryRun(0, 40, 100, run.blocks))
    rng = torch.Generator().manual_seed(1)
    q = torch.randn(run.count, 8, 64, generator=rng).to(dtype)[:, :4]
    (k,), (v,) = made.keys, made.values
    made.keys, made.values = ([x[: start + at + 1] for at in range(run.count)] for x in (k, v))
    made.q = q
    lse = torch.full((run.count, 4), torch.nan)
    out = attention.paged_run(q, made.cache, run, layer, lse=lse)
    want, want_lse = made.wanted(layer)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=TOLERANCE[dtype] * float(want.abs().max()))
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-6, atol=2e-6)


def test_large_scores() -> None:
    """The state is scaled by the largest score so far, whether it rises or falls from tile to tile."""
    made, layer = Made(4, 2, 64, torch.float32), LayerAttention(1.0, lse=True)
    for row, k in enumerate(made.keys):
        k.mul_(torch.linspace(20, 1, len(k)).flip(0 if row % 2 else ())[:, None, None])
        for column, start in enumerate(range(0, len(k), BLOCK)):
            count = min(BLOCK, len(k) - start)
            made.cache[0][made.rows.table[row, column], :count] = k[start : start + count]
    out, lse = made.found(layer)
    want, want_lse = made.wanted(layer)
    assert float(want_lse.max()) > 300
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-4)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_a_nan_stays_in_its_row() -> None:
    """A NaN among a row's keys makes the outputs of that head NaN, as in plain torch, and no other's."""
    made, layer = Made(4, 2, 64, torch.bfloat16), LayerAttention(0.125)
    made.cache[0][made.rows.table[7, 2], 3, 1, 5] = torch.nan
    out, _ = made.found(layer)
    assert out[7, 2:].isnan().all()
    assert not out[7, :2].isnan().any()
    assert not out[[*range(7), 8, 9]].isnan().any()


def test_bits_depend_neither_on_threads_nor_on_other_rows(threads: None) -> None:
    made, layer = Made(4, 2, 64, torch.bfloat16, (300, 5, 170, 299, 64, 1)), LayerAttention(0.125, lse=True)
    torch.set_num_threads(1)
    out, lse = made.found(layer, torch.float32)
    torch.set_num_threads(3)
    for one, other in zip(made.found(layer, torch.float32), (out, lse), strict=True):
        assert torch.equal(one, other)
    whole = made.rows
    for row in range(whole.count):
        length = whole.lengths[row : row + 1]
        made.rows, q = Rows(1, whole.table[row : row + 1], length, int(length)), made.q
        made.q = q[row : row + 1]
        assert torch.equal(made.found(layer, torch.float32)[0][0], out[row])
        made.q = q


def test_what_does_not_suit() -> None:
    """Capped scores, heads of other widths, and pages of another dtype are for plain torch."""
    made, layer = Made(4, 2, 64, torch.bfloat16), LayerAttention(0.125)
    k, v = made.cache
    assert attention.suits(made.q, made.cache, layer)
    assert not attention.suits(made.q, made.cache, LayerAttention(0.125, cap=1.0))
    assert not attention.suits(made.q, (k, v[..., :32]), layer)
    assert not attention.suits(made.q[..., :24], (k[..., :24], v[..., :24]), layer)
    assert not attention.suits(made.q, (k.half(), v.half()), layer)
    assert not attention.suits(made.q.repeat(1, 9, 1), made.cache, layer)
    assert not attention.suits(made.q.mT.contiguous().mT, made.cache, layer)


def test_attend_uses_them_unless_plain_torch_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made, layer, calls = Made(4, 2, 64, torch.float32), LayerAttention(0.125), list[str]()
    real = attention.paged_decode
    monkeypatch.setattr(
        attention, "paged_decode", lambda *given, **more: (calls.append("C"), real(*given, **more))
    )
    nowhere = torch.empty(0, dtype=torch.int64)
    inputs = AttentionInputs(nowhere, nowhere, nowhere, made.rows, ())
    out = attend(made.q, made.q, made.q, made.cache, inputs, layer).out
    torch.testing.assert_close(out.double(), made.wanted(layer)[0], rtol=0, atol=1e-5)
    assert calls == ["C"]
    with plain_torch(), pytest.raises(AssertionError, match="a row is in no group"):
        attend(made.q, made.q, made.q, made.cache, inputs, layer)
