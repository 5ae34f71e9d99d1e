"""Every path of attention answers output and log-sum-exp, against float64; without kernels also where V is
wider or narrower than K, and on both, where there is an interpreter, by the kernels."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import penstock.ops.attention.attend
import penstock.ops.attention.dense
import penstock.ops.attention.gathered
from paged import TOLERANCE
from paged import attend as attend_exactly
from penstock.ops.attention.attend import Attended, attend, write
from penstock.ops.attention.dense import dense_reference, masked, merge
from penstock.ops.attention.inputs import (
    AttentionInputs,
    ColdInputs,
    ColdTile,
    LayerAttention,
    PlacedRun,
    QueryRun,
    RowGroup,
    Rows,
    RunBatch,
    RunTree,
)
from penstock.ops.kernels import plain_torch, triton_kernels
from penstock.step.tree import depths, sights

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HEADS, KV_HEADS, DIM, BLOCK, SCALE = 4, 2, 16, 4, 0.3
WIDTHS = [DIM, 24, 8]
"""Of V."""
CAPS = [None, 1.0]
"""Of scores, which go to about five."""
APART = 1, 2, 6
"""Which of PATHS have a window alone and a cap alone where kernels are interpreted."""


@dataclass
class Step:
    """One step of one layer: its queries, a cache that is full of NaN elsewhere, and what each query sees."""

    inputs: AttentionInputs
    q: Tensor
    k: Tensor
    v: Tensor
    cache: tuple[Tensor, Tensor]
    seen: list[tuple[Tensor, Tensor]]
    """K and V of all that comes up to each query, itself included."""
    tiles: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    chosen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def attend(self, layer: LayerAttention) -> Attended:
        write(self.k, self.v, self.cache, self.inputs)
        return attend(self.q, self.k, self.v, self.cache, self.inputs, layer, self)

    def take(self) -> tuple[Tensor, Tensor]:
        return self.tiles[0]

    def release(self) -> None:
        pass

    def choose(
        self, reader: int, q: Tensor, lse: Tensor, layer: LayerAttention
    ) -> Iterator[tuple[Tensor, Tensor]]:
        assert reader == 0
        yield from self.chosen


def step(
    sequences: list[tuple[int, int, int]], dim_v: int, dtype: torch.dtype = torch.float32
) -> tuple[Step, list[list[int]]]:
    """Each sequence has so many cold tokens, so many in pages, and so many that are computed; in pages unless
    it has cold ones. Also the blocks of each, which hold all behind the cold ones."""
    rng = torch.Generator().manual_seed(1)
    k_cache = torch.full((64, BLOCK, KV_HEADS, DIM), math.nan, dtype=dtype)
    v_cache = torch.full((64, BLOCK, KV_HEADS, dim_v), math.nan, dtype=dtype)
    free = torch.randperm(64, generator=rng).tolist()
    slots, seen, new, blocks, qs = list[int](), [], [], [], []
    for cold, paged, count in sequences:
        stop = cold + paged + count
        k = torch.randn(stop, KV_HEADS, DIM, generator=rng).to(dtype)
        v = torch.randn(stop, KV_HEADS, dim_v, generator=rng).to(dtype)
        mine = [free.pop() for _ in range(-(-(paged + count) // BLOCK))]
        where = [mine[at // BLOCK] * BLOCK + at % BLOCK for at in range(paged + count)]
        for at, slot in enumerate(where[:paged]):
            k_cache[slot // BLOCK, slot % BLOCK] = k[cold + at]
            v_cache[slot // BLOCK, slot % BLOCK] = v[cold + at]
        slots += where[paged:]
        seen += [(k[: at + 1], v[: at + 1]) for at in range(stop - count, stop)]
        new.append((k[stop - count :], v[stop - count :]))
        blocks.append(mine)
        qs.append(torch.randn(count, HEADS, DIM, generator=rng).to(dtype))
    at = torch.tensor(slots)
    k, v = (torch.cat(each) for each in zip(*new, strict=True))
    inputs = AttentionInputs(at // BLOCK, at % BLOCK, at, None, ())
    return Step(inputs, torch.cat(qs), k, v, (k_cache, v_cache), seen), blocks


def changed(made: Step, **inputs: object) -> Step:
    return replace(made, inputs=replace(made.inputs, **inputs))  # type: ignore[arg-type]


def rows_of(blocks: list[list[int]], lengths: list[int], window: int | None, *, cold: bool = False) -> Rows:
    """One group of all rows, padded, or, if cold, one of each."""
    longest = max(lengths)
    table = torch.tensor([one + [0] * (longest - len(one)) for one in blocks])[:, : -(-longest // BLOCK)]
    visible = torch.tensor(lengths, dtype=torch.int32)
    if cold:
        groups = tuple(
            RowGroup(torch.tensor([at]), table[at : at + 1], length, {}, length, None, cold=True)
            for at, length in enumerate(lengths)
        )
    else:
        at, shortest = torch.arange(longest), min(lengths)
        mask = at < visible[:, None]
        if window is not None:
            mask &= at >= visible[:, None] - window
        beyond = ~(at < visible[:, None])[:, shortest:, None, None]
        groups = (
            RowGroup(
                torch.arange(len(blocks)), table, longest, {window: mask[:, None, None]}, shortest, beyond
            ),
        )
    return Rows(len(blocks), table.int(), visible, longest, groups)


def rows(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    made, blocks = step([(0, 9, 1), (0, 4, 1), (0, 17, 1)], dim_v, dtype)
    return changed(made, rows=rows_of(blocks, [10, 5, 18], window))


def long_rows(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    """Each alone, in parts of PAST_TILE."""
    made, blocks = step([(0, 29, 1), (0, 48, 1)], dim_v, dtype)
    return changed(made, rows=rows_of(blocks, [30, 49], window, cold=True))


def chunk(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    """Over itself alone."""
    made, [blocks] = step([(0, 0, 11)], dim_v, dtype)
    return changed(made, runs=(QueryRun(0, 11, 0, torch.tensor(blocks)),))


def chunk_with_past(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    made, [blocks] = step([(0, 50, 7)], dim_v, dtype)
    return changed(made, runs=(QueryRun(0, 7, 50, torch.tensor(blocks)),))


def mixed(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    """A row, and two chunks."""
    made, (one, two, three) = step([(0, 6, 1), (0, 0, 5), (0, 29, 4)], dim_v, dtype)
    runs = QueryRun(1, 5, 0, torch.tensor(two)), QueryRun(6, 4, 29, torch.tensor(three))
    return changed(made, rows=rows_of([one], [7], window), runs=runs)


def together(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    """A row, and runs that are attended to together: what begins a sequence, and what does not."""
    return batched([(0, 6, 1), (0, 0, 5), (0, 29, 4), (0, 3, 2), (0, 0, 9)], dim_v, dtype, window)


def fresh(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    """A row, and runs that begin their sequences."""
    return batched([(0, 6, 1), (0, 0, 5), (0, 0, 3), (0, 0, 1)], dim_v, dtype, window)


def batched(
    sequences: list[tuple[int, int, int]], dim_v: int, dtype: torch.dtype, window: int | None
) -> Step:
    made, (one, *others) = step(sequences, dim_v, dtype)
    runs, at = list[QueryRun](), 1
    for blocks, (_, start, count) in zip(others, sequences[1:], strict=True):
        runs.append(QueryRun(at, count, start, torch.tensor(blocks)))
        at += count
    width = max(map(len, others))
    table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in others], dtype=torch.int32)
    batch = RunBatch(runs, range(len(runs)), table, torch.from_numpy)
    return changed(made, rows=rows_of([one], [7], window), runs=tuple(runs), batches=(batch,))


def tiles(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    """A chunk behind a cold tile and tokens in pages."""
    made, [blocks] = step([(8, 4, 5)], dim_v, dtype)
    k, v = made.seen[0]
    made.tiles = [(k[:8], v[:8])]
    tile = ColdTile(0, 8, (), torch.empty(0, dtype=torch.int64), (0,))
    run = QueryRun(0, 5, 12, torch.tensor(blocks[:1]), paged=False, near=8)
    return changed(made, runs=(run,), cold=ColdInputs((tile,), ()))


def rows_with_tiles(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    """A row with a tile between two without."""
    made, blocks = step([(0, 6, 1), (8, 2, 1), (0, 3, 1)], dim_v, dtype)
    k, v = made.seen[1]
    made.tiles = [(k[:8], v[:8])]
    tile = ColdTile(0, 8, (1,), torch.tensor([1]), ())
    given = rows_of(blocks, [7, 3, 4], window, cold=True)
    return changed(made, rows=given, cold=ColdInputs((tile,), (6, 10, 3)))


def chosen(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    """Everything, in two parts."""
    made, [blocks] = step([(12, 0, 5)], dim_v, dtype)
    k, v = made.seen[0]
    made.chosen = [(k[:4], v[:4]), (k[4:12], v[4:12])]
    run = QueryRun(0, 5, 12, torch.tensor(blocks[:0], dtype=torch.int64), paged=False, near=12)
    return changed(made, runs=(run,), cold=ColdInputs((), (), choosing_runs=(0,)))


def placed(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    made, [blocks] = step([(0, 10, 7)], dim_v, dtype)
    where = torch.tensor([10, 7], dtype=torch.int32)
    return changed(made, placed=PlacedRun(torch.tensor(blocks, dtype=torch.int32), where, 40))


PARENTS = [0, 1, 2, 0, 4, 2, 4, 7, 7, 3]
"""Of a tree behind its first token: the longest line is neither first nor last, and two tokens are equal."""


def as_tree(made: Step, run: int, parents: list[int], window: int | None) -> Step:
    """Make a step whose run is the end of a tree of its last tokens, as far as it has so many."""
    one = made.inputs.runs[run]
    count, begin = one.count, one.start + one.count - 1 - len(parents)
    own, above = depths(parents)[-count:], [[0]]
    for node, parent in enumerate(parents, 1):
        above.append([*above[parent], node])
    for query, line in zip(range(one.first, one.first + count), above[-count:], strict=True):
        places = [*range(begin), *(begin + node for node in line)]
        last = made.seen[one.first + count - 1]
        made.seen[query] = last[0][places], last[1][places]
    bits = torch.from_numpy(np.array(sights(parents, window)[-count:], dtype=np.uint64).view(np.int64))
    limits = torch.tensor([begin + depth + 1 for depth in own], dtype=torch.int32)
    runs = list(made.inputs.runs)
    runs[run] = replace(one, tree=RunTree(begin, tuple(own), limits, {window: bits}))
    return changed(made, runs=tuple(runs))


def tree(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    made, [blocks] = step([(0, 50, 11)], dim_v, dtype)
    run = QueryRun(0, 11, 50, torch.tensor(blocks))
    return as_tree(changed(made, runs=(run,)), 0, PARENTS, window)


def tree_from_its_middle(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    """Its last tokens; the first are in pages."""
    made, [blocks] = step([(0, 27, 4)], dim_v, dtype)
    run = QueryRun(0, 4, 27, torch.tensor(blocks))
    return as_tree(changed(made, runs=(run,)), 0, PARENTS, window)


def whole_tree(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    """Of as many tokens as there may be, beside a row and a chunk."""
    made, (one, two, three) = step([(0, 6, 1), (0, 3, 5), (0, 20, 64)], dim_v, dtype)
    runs = QueryRun(1, 5, 3, torch.tensor(two)), QueryRun(6, 64, 20, torch.tensor(three))
    parents = [*PARENTS, *range(10, 40), *(node * 7 % 40 for node in range(40, 63))]
    made = changed(made, rows=rows_of([one], [7], window), runs=runs)
    return as_tree(made, 1, parents, window)


def tree_with_tiles(dim_v: int, window: int | None, dtype: torch.dtype) -> Step:
    """Behind a cold tile."""
    made, [blocks] = step([(8, 0, 11)], dim_v, dtype)
    k, v = made.seen[0]
    made.tiles = [(k[:8], v[:8])]
    tile = ColdTile(0, 8, (), torch.empty(0, dtype=torch.int64), (0,))
    run = QueryRun(0, 11, 8, torch.tensor(blocks[:0], dtype=torch.int64), paged=False, near=8)
    made = changed(made, runs=(run,), cold=ColdInputs((tile,), ()))
    return as_tree(made, 0, PARENTS, window)


Path = Callable[[int, int | None, torch.dtype], Step]
TREES: list[Path] = [tree, tree_from_its_middle, whole_tree, tree_with_tiles]
PATHS: list[Path] = [rows, long_rows, chunk, chunk_with_past, mixed, tiles, rows_with_tiles, chosen, *TREES]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.ops.attention.dense, "WINDOW_TILE", 3)
    monkeypatch.setattr(penstock.ops.attention.gathered, "PAST_TILE", 20)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if not INTERPRETED:
        pytest.skip("kernels are interpreted where there is no GPU")
    monkeypatch.setattr(penstock.ops.attention.attend, "_kernels", lambda x: triton_kernels("attention"))
    monkeypatch.setattr(penstock.ops.attention.dense, "_tile_kernels", lambda x: triton_kernels("tiles"))


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In the place of the library's attention for GPUs: so many runs were given to it at a time."""
    given = list[int]()

    def attended(
        q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int], scale: float,
        *, causal: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        borders = ends[0].tolist()
        assert (ends[1].tolist(), longest) == (borders, (max(np.diff(borders)),) * 2)
        given.append(len(borders) - 1)
        parts = [
            dense_reference(q[a:b], k[a:b], v[a:b], LayerAttention(scale), causal=causal)
            for a, b in pairwise(borders)
        ]
        out, lse = (torch.cat(some) for some in zip(*parts, strict=True))
        return out, lse

    monkeypatch.setattr(penstock.ops.attention.dense, "_flash", attended)
    monkeypatch.setattr(penstock.ops.attention.dense, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(penstock.ops.attention.dense, "_suits_flash", lambda q, v: True)
    return given


def exact(made: Step, window: int | None, cap: float | None) -> tuple[Tensor, Tensor]:
    wanted = [
        attend_exactly(q, k, v, SCALE, window, cap) for q, (k, v) in zip(made.q, made.seen, strict=True)
    ]
    want, want_lse = zip(*wanted, strict=True)
    return torch.stack(want), torch.stack(want_lse)


def check(
    path: Path,
    dim_v: int,
    window: int | None,
    dtype: torch.dtype = torch.float32,
    cap: float | None = None,
) -> None:
    """Output and log-sum-exp; the same output where no log-sum-exp is asked for, to rounding; and with sinks
    (one more logit a head, of no value), merged to it or given, what a softmax over one more logit gives."""
    made = path(dim_v, window, dtype)
    want, want_lse = exact(made, window, cap)
    room = TOLERANCE[dtype] * float(want.abs().max())
    out, lse = made.attend(LayerAttention(SCALE, window, lse=True, cap=cap))
    alone = made.attend(LayerAttention(SCALE, window, cap=cap))
    assert alone.lse is None
    assert lse is not None
    assert (lse.dtype, lse.shape, out.dtype) == (torch.float32, made.q.shape[:2], dtype)
    for one in (out, alone.out):
        torch.testing.assert_close(one.double(), want, rtol=0, atol=room)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    sinks = torch.linspace(-1, 2, HEADS).to(dtype)
    share = torch.sigmoid(want_lse - sinks.double())[..., None]
    wide, level = out.float(), lse.clone()
    merge(wide, level, torch.zeros_like(wide), sinks.float().expand_as(lse).contiguous())
    sunk = made.attend(LayerAttention(SCALE, window, lse=True, cap=cap, sinks=sinks))
    also = made.attend(LayerAttention(SCALE, window, cap=cap, sinks=sinks))
    for one in (wide, sunk.out, also.out):
        torch.testing.assert_close(one.double(), want * share, rtol=0, atol=room)
    assert sunk.lse is not None
    assert also.lse is None
    torch.testing.assert_close(sunk.lse.double(), want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("dim_v", WIDTHS)
@pytest.mark.parametrize("path", PATHS)
def test_every_path_without_kernels(path: Path, dim_v: int, window: int | None, cap: float | None) -> None:
    if path is chosen and window is not None:
        pytest.skip("a policy chooses where there is no window")
    with plain_torch():
        check(path, dim_v, window, cap=cap)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("path", PATHS)
def test_every_path_with_native_kernels(path: Path, window: int | None, dtype: torch.dtype) -> None:
    if path is chosen and window is not None:
        pytest.skip("a policy chooses where there is no window")
    check(path, DIM, window, dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("path", "window", "cap", "at_once"),
    [
        (fresh, None, None, True),
        (fresh, 5, None, True),
        (fresh, 4, None, False),
        (fresh, None, 1.0, False),
        (together, None, None, False),
        (together, 100, None, False),
    ],
)
def test_whole_runs_are_given_to_the_library_together(
    path: Path, window: int | None, cap: float | None, at_once: bool, flash: list[int]
) -> None:
    """Where no window cuts them, no cap changes scores and nothing comes before them. With sinks too."""
    check(path, DIM, window, cap=cap)
    assert set(flash) == ({3} if at_once else set())


@pytest.mark.usefixtures("kernels")
def test_runs_that_are_too_many_or_read_too_much_are_attended_to_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = triton_kernels("attention")
    assert module is not None
    runs, given = module.paged_runs, list[int]()

    def noted(q: Tensor, *args: object, **more: object) -> Tensor:
        given.append(len(q))
        return runs(q, *args, **more)  # type: ignore[no-any-return]

    monkeypatch.setattr(module, "paged_runs", noted)
    check(together, DIM, None)
    assert set(given) == {20}
    for name, least in (("MOST_PIECES", 3), ("suits_run", lambda tokens, stop, *_: stop < 33)):
        given.clear()
        with monkeypatch.context() as patched:
            patched.setattr(penstock.ops.attention.attend, name, least)
            check(together, DIM, None)
        assert not given


@pytest.mark.usefixtures("kernels")
def test_pieces_that_come_from_the_host_are_not_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that begins before others have ended would read them before they have come."""
    module = triton_kernels("attention")
    early, launch = list[bool](), module.decode  # type: ignore[union-attr]

    class Noted:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            def launched(*args: object, **more: Any) -> None:
                early.append(more["EARLY"])
                launch[grid](*args, **(more | {"EARLY": False, "OVERLAP": False}))

            return launched

    monkeypatch.setattr(module, "uses_pdl", lambda: True)
    monkeypatch.setattr(module, "pdl_launch_options", lambda early: {})
    monkeypatch.setattr(module, "decode", Noted())
    made = together(DIM, None, torch.float32)
    write(made.k, made.v, made.cache, made.inputs)
    with monkeypatch.context() as patched:
        patched.setattr(module, "join", Nothing())
        attend(made.q, made.k, made.v, made.cache, made.inputs, LayerAttention(SCALE), made)
    assert early == [True, False], "rows, then pieces"


class Nothing:
    """A kernel that is launched and does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **more: None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("path", "window", "cap"),
    [
        (path, window, cap)
        for number, path in enumerate((*PATHS, placed, together, fresh))
        for window in (None, 6)
        for cap in CAPS
        if not (path is chosen and window is not None)  # A policy chooses where there is none.
        and (path is chosen or ((window is None) == (cap is None)) == (number not in APART))
    ],
)
def test_every_path_with_kernels(path: Path, window: int | None, cap: float | None) -> None:
    """Each with a window and a cap at once and with neither, or with the one and with the other."""
    check(path, DIM, window, cap=cap)


@pytest.mark.usefixtures("kernels")
def test_scores_far_beyond_a_cap_are_the_cap() -> None:
    """Neither an exponential of them overflows, nor is the cap left out."""
    made = rows(DIM, None, torch.float32)
    made.q *= 1e4
    want, want_lse = exact(made, None, 2.0)
    out, lse = made.attend(LayerAttention(SCALE, lse=True, cap=2.0))
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    assert lse is not None
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("path", [rows, chunk_with_past, tiles])
def test_half_precision(path: Path, cap: float | None) -> None:
    check(path, 24, None, torch.bfloat16, cap)


@pytest.mark.usefixtures("kernels")
def test_kernels_say_that_they_read_one_width() -> None:
    made = rows(24, None, torch.float32)
    with pytest.raises(AssertionError, match="V as wide as K, not 24 beside 16"):
        attend(made.q, made.k, made.v, made.cache, made.inputs, LayerAttention(SCALE))


@pytest.mark.parametrize("dim_v", WIDTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_dense_is_its_reference(dim_v: int, causal: bool) -> None:
    rng = torch.Generator().manual_seed(2)
    q, k = torch.randn(9, HEADS, DIM, generator=rng), torch.randn(9, KV_HEADS, DIM, generator=rng)
    v = torch.randn(9, KV_HEADS, dim_v, generator=rng)
    found = penstock.ops.attention.dense.dense(q, k, v, LayerAttention(SCALE), causal=causal)
    for one, other in zip(found, dense_reference(q, k, v, LayerAttention(SCALE), causal=causal), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [2, 4])
def test_the_output_is_the_same_bits_with_and_without_log_sum_exp(heads: int) -> None:
    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(3, each, 37, DIM, generator=rng) for each in (heads, 2, 2))
    mask = torch.rand(3, 1, 1, 37, generator=rng) > 0.3
    for seen in (None, mask):
        out, lse = masked(q, k, v, LayerAttention(SCALE), mask=seen, lse=True)
        assert torch.equal(masked(q, k, v, LayerAttention(SCALE), mask=seen, lse=False)[0], out)
        assert lse is not None
        assert lse.shape == q.shape[:3]
