"""Attention with tiles from elsewhere is attention: any mixture of long and short sequences, cut anywhere,
against float64 arithmetic."""

import math
import os
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

import penstock.ops.attention.attend
import penstock.ops.attention.dense
import tiny
from paged import TOLERANCE, pool_views
from paged import attend as attend_exactly
from penstock.ops.attention.attend import attend, write
from penstock.ops.attention.inputs import (
    AttentionInputs,
    ColdInputs,
    ColdTile,
    LayerAttention,
    QueryRun,
    RowGroup,
    Rows,
    Scratch,
)
from penstock.ops.kernels import plain_torch, triton_kernels
from penstock.step.plan import BlockId, HostBlockId, Plan, Row, Share, ShareKind
from penstock.weights.checkpoint.shape import Shape
from penstock.worker.inputs import InputBuilder
from penstock.worker.tables import BlockTables

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_each = pytest.mark.parametrize(
    "kernels",
    [
        "",
        "C",
        pytest.param(
            "Triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
        ),
    ],
)
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 4


@dataclass
class Sequence:
    """Tokens [0, cold) in tiles, [cold, first) in pages; this step computes [first, first + count)."""

    k: Tensor
    v: Tensor
    cold: int
    first: int
    count: int
    long: bool
    blocks: list[int] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.first + self.count


class Slot:
    """A ring of one slot, larger than any tile: what is not lent is NaN."""

    def __init__(self, tiles: list[tuple[Tensor, Tensor]], tokens: int, dtype: torch.dtype) -> None:
        self._tiles = iter(tiles)
        self._slot = torch.full((2, tokens, KV_HEADS, DIM), math.nan, dtype=dtype)
        self._lent = False

    def take(self) -> tuple[Tensor, Tensor]:
        assert not self._lent
        self._lent = True
        k, v = next(self._tiles)
        self._slot[0, : len(k)], self._slot[1, : len(v)] = k, v
        return self._slot[0], self._slot[1]

    def release(self) -> None:
        assert self._lent
        self._lent = False
        self._slot.fill_(math.nan)

    @property
    def empty(self) -> bool:
        return not self._lent and next(self._tiles, None) is None


def sequences(
    families: list[tuple[int, list[tuple[int, int, int]]]], rng: torch.Generator, dtype: torch.dtype
) -> list[list[Sequence]]:
    """Families: how many cold blocks all share; of each member: its own cold blocks, its tokens in pages, how
    many it computes."""
    made = []
    for shared, members in families:
        common = torch.randn(2, shared * BLOCK, KV_HEADS, DIM, generator=rng).to(dtype)
        family = []
        for own, paged, count in members:
            cold = (shared + own) * BLOCK
            rest = torch.randn(2, cold + paged + count - shared * BLOCK, KV_HEADS, DIM, generator=rng).to(
                dtype
            )
            k, v = torch.cat((common, rest), 1)
            family.append(Sequence(k, v, cold, cold + paged, count, long=bool(cold)))
        made.append(family)
    return made


def check(
    families: list[tuple[int, list[tuple[int, int, int]]]],
    *,
    window: int | None = None,
    tile_blocks: int = 2,
    kernels: str = "",
    dtype: torch.dtype = torch.float32,
    tail_demoted: bool = False,
    seed: int = 0,
) -> None:
    """One layer of one step over these sequences; every query against its sequence's keys in float64.

    kernels: the language of those that are used; none in plain torch.
    """
    rng = torch.Generator().manual_seed(seed)
    made = sequences(families, rng, dtype)
    everyone = [one for family in made for one in family]
    order = sorted(
        torch.randperm(len(everyone), generator=rng).tolist(), key=lambda at: everyone[at].count > 1
    )
    step = [everyone[at] for at in order]
    if tail_demoted:  # A row whose own token, too, is met in a tile: its tail is empty.
        for one in step:
            if one.long and one.count == 1 and one.stop % BLOCK == 0:
                one.cold = one.stop
    k_cache, v_cache = pool_views(80, BLOCK, KV_HEADS, DIM, dtype)
    free = torch.randperm(80, generator=rng).tolist()
    slots: list[int] = []
    for one in step:
        tail = one.stop - one.cold if one.count == 1 or not one.long else 0
        one.blocks = [free.pop() for _ in range(-(-tail // BLOCK))]
        where = [one.blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(tail)]
        for at, slot in enumerate(where[: one.first - one.cold]):
            k_cache[slot // BLOCK, slot % BLOCK], v_cache[slot // BLOCK, slot % BLOCK] = (
                one.k[one.cold + at],
                one.v[one.cold + at],
            )
        slots += where[max(one.first - one.cold, 0) :] or [-1] * one.count
    placed = torch.tensor([at for at, slot in enumerate(slots) if slot >= 0], dtype=torch.int64)
    where = torch.tensor(slots, dtype=torch.int64)

    rows = [one for one in step if one.count == 1]
    first, runs = len(rows), []
    for one in step[len(rows) :]:
        runs.append(
            QueryRun(
                first, one.count, one.first, torch.tensor(one.blocks, dtype=torch.int64), paged=not one.long
            )
        )
        first += one.count
    tiles, contents = [], []
    for (shared, _), family in zip(families, made, strict=True):
        spans = [(start, min(start + tile_blocks, shared), family) for start in range(0, shared, tile_blocks)]
        for one in family:
            last = one.cold // BLOCK
            spans += [
                (start, min(start + tile_blocks, last), [one]) for start in range(shared, last, tile_blocks)
            ]
        for start, stop, members in spans:
            named = [at for at, one in enumerate(step) if any(one is member for member in members)]
            tile_rows = tuple(at for at in named if at < len(rows))
            tile_runs = tuple(at - len(rows) for at in named if at >= len(rows))
            tiles.append(
                ColdTile(
                    start * BLOCK,
                    (stop - start) * BLOCK,
                    tile_rows,
                    torch.tensor(tile_rows, dtype=torch.int64),
                    tile_runs,
                )
            )
            contents.append(
                (members[0].k[start * BLOCK : stop * BLOCK], members[0].v[start * BLOCK : stop * BLOCK])
            )
    cold = ColdInputs(
        tuple(tiles), tuple(one.first for one in rows), None if len(placed) == len(slots) else placed
    )
    inputs = AttentionInputs(
        where[placed] // BLOCK, where[placed] % BLOCK, where, row_inputs(rows, window), tuple(runs), cold
    )

    heads = torch.randn(len(slots), HEADS + 2 * KV_HEADS, DIM, generator=rng).to(
        dtype
    )  # views of a fused projection
    q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
    k.copy_(torch.cat([one.k[one.first : one.stop] for one in step]))
    v.copy_(torch.cat([one.v[one.first : one.stop] for one in step]))
    ring = Slot(contents, (tile_blocks + 1) * BLOCK, dtype)
    with pytest.MonkeyPatch.context() as patch, plain_torch(not kernels):
        if kernels == "Triton":
            patch.setattr(penstock.ops.attention.attend, "_kernels", lambda x: triton_kernels("attention"))
            patch.setattr(penstock.ops.attention.dense, "_tile_kernels", lambda x: triton_kernels("tiles"))
        patch.setattr(penstock.ops.attention.dense, "WINDOW_TILE", 3)
        write(k, v, (k_cache, v_cache), inputs)
        got, lse = attend(q, k, v, (k_cache, v_cache), inputs, LayerAttention(0.3, window, lse=True), ring)
        assert ring.empty
        ring = Slot(contents, (tile_blocks + 1) * BLOCK, dtype)
        alone = attend(q, k, v, (k_cache, v_cache), inputs, LayerAttention(0.3, window), ring)
    assert ring.empty
    assert alone.lse is None
    assert lse is not None
    wanted = [
        attend_exactly(q[at], one.k[: position + 1], one.v[: position + 1], 0.3, window)
        for at, (one, position) in enumerate(
            (one, position) for one in step for position in range(one.first, one.stop)
        )
    ]
    want, want_lse = (torch.stack(each) for each in zip(*wanted, strict=True))
    for out in (got, alone.out):
        torch.testing.assert_close(
            out.double(), want, rtol=0, atol=TOLERANCE[dtype] * float(want.abs().max())
        )
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


def row_inputs(rows: list[Sequence], window: int | None) -> Rows | None:
    """Each row a group of its own, for the path without kernels; a table and lengths, for the one with."""
    if not rows:
        return None
    lengths = [one.stop - one.cold for one in rows]
    table = torch.full((len(rows), max(len(one.blocks) for one in rows) + 1), 2**31 - 1, dtype=torch.int32)
    groups = []
    for at, (one, length) in enumerate(zip(rows, lengths, strict=True)):
        table[at, : len(one.blocks)] = torch.tensor(one.blocks, dtype=torch.int32)
        mask = (
            None
            if window is None or one.long
            else (torch.arange(length) >= length - window)[None, None, None]
        )
        blocks = torch.tensor([one.blocks], dtype=torch.int64)
        groups.append(
            RowGroup(torch.tensor([at]), blocks, length, {window: mask}, length, None, cold=one.long)
        )
    return Rows(len(rows), table, torch.tensor(lengths, dtype=torch.int32), max(lengths), tuple(groups))


EVERY_SORT = [
    (3, [(0, 2, 1), (4, 0, 1), (1, 0, 9), (0, 0, 6)]),  # rows and runs that share their first tiles
    (0, [(2, 3, 1)]),
    (0, [(0, 7, 1)]),  # short: all in pages
    (0, [(0, 5, 6)]),
    (0, [(5, 0, 7)]),
]


@on_each
@pytest.mark.parametrize("window", [None, 1, 5, 12, 100])
def test_every_sort_of_sequence_in_one_step(window: int | None, kernels: str) -> None:
    check(EVERY_SORT, window=window, kernels=kernels)


@on_each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions(dtype: torch.dtype, kernels: str) -> None:
    check(EVERY_SORT, dtype=dtype, kernels=kernels)


@on_each
@pytest.mark.parametrize("window", [None, 6])
def test_rows_with_nothing_in_pages(window: int | None, kernels: str) -> None:
    check([(2, [(1, 3, 1), (0, 3, 1)]), (0, [(0, 4, 1)])], tail_demoted=True, window=window, kernels=kernels)


@pytest.mark.parametrize("seed", range(4))
def test_every_window_over_rows_that_stand_apart(seed: int) -> None:
    """Short rows between those that share tiles; windows that end on, before and behind every edge of a
    tile."""
    for window in (*range(1, 18), None):
        check(
            [(2, [(0, 1, 1), (0, 2, 1), (1, 1, 1)]), (0, [(0, 7, 1), (0, 2, 1), (0, 3, 1)])],
            window=window,
            seed=seed,
        )


def test_a_long_prompts_first_chunk_sees_itself_and_touches_no_page() -> None:
    """No tile yet; its keys have no place in pages, which are full of NaN."""
    rng = torch.Generator().manual_seed(5)
    k_cache, v_cache = pool_views(4, BLOCK, KV_HEADS, DIM, torch.float32)
    q, k, v = torch.randn(9, HEADS + 2 * KV_HEADS, DIM, generator=rng).split((HEADS, KV_HEADS, KV_HEADS), 1)
    none = torch.empty(0, dtype=torch.int64)
    inputs = AttentionInputs(
        none,
        none,
        torch.full((9,), -1),
        None,
        (QueryRun(0, 9, 0, none, paged=False),),
        ColdInputs((), (), none),
    )
    for window in (None, 4):
        write(k, v, (k_cache, v_cache), inputs)
        got = attend(q, k, v, (k_cache, v_cache), inputs, LayerAttention(0.3, window)).out
        want = torch.stack(
            [attend_exactly(q[at], k[: at + 1], v[: at + 1], 0.3, window)[0] for at in range(9)]
        )
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    assert k_cache.isnan().all()
    assert v_cache.isnan().all()


members = st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 8)).map(
    lambda m: m if m[2] == 1 else (m[0], 0, m[2])
)


any_step = given(
    families=st.lists(
        st.tuples(st.integers(0, 4), st.lists(members, min_size=1, max_size=3)), min_size=1, max_size=3
    ),
    window=st.none() | st.integers(1, 30),
    tile_blocks=st.integers(1, 4),
    tail_demoted=st.booleans(),
    seed=st.integers(0, 99),
)


@pytest.mark.parametrize("kernels", ["", "C"])
@settings(max_examples=25)
@any_step
def test_any_step(
    families: list[tuple[int, list[tuple[int, int, int]]]],
    window: int | None,
    tile_blocks: int,
    tail_demoted: bool,
    seed: int,
    kernels: str,
) -> None:
    check(
        families,
        window=window,
        tile_blocks=tile_blocks,
        tail_demoted=tail_demoted,
        seed=seed,
        kernels=kernels,
    )


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@settings(max_examples=25 if tiny.THOROUGH else 7)
@any_step
def test_any_step_with_kernels(
    families: list[tuple[int, list[tuple[int, int, int]]]],
    window: int | None,
    tile_blocks: int,
    tail_demoted: bool,
    seed: int,
) -> None:
    check(
        families,
        window=window,
        tile_blocks=tile_blocks,
        tail_demoted=tail_demoted,
        kernels="Triton",
        seed=seed,
    )


def test_scratch_is_the_same_memory_where_that_is_enough() -> None:
    scratch, like = Scratch(), torch.empty(0)
    first = scratch.of("k", (4, 8), like)
    assert scratch.of("v", (4, 8), like).data_ptr() != first.data_ptr()
    for shape in ((4, 8), (3, 5), (40,)):
        again = scratch.of("k", shape, like)
        assert again.shape == shape
        assert again.data_ptr() == first.data_ptr()
    assert scratch.of("k", (9, 9), like).shape == (9, 9)
    assert scratch.of("k", (2, 2), like.half()).dtype == torch.float16


def test_what_goes_to_host_blocks_alone_has_no_place_in_pages() -> None:
    """By either way of writing: with kernels by `slots`, -1 where nothing is written, and else by `blocks`
    and `offsets`."""
    spec = Shape.open(tiny.checkpoint("llama")).spec
    inputs = InputBuilder(spec, torch.device("cpu"), BlockTables(2, 8, torch.device("cpu")), block_size=BLOCK)
    pages, beyond = (BlockId(5), BlockId(3)), tuple(map(HostBlockId, range(4)))
    long = Share(
        Row(1),
        0,
        tuple(range(18)),
        3,
        pages,
        False,
        18,
        ShareKind.CHUNK,
        cold_stop=16,
        near=12,
        new_cold=beyond,
    )
    token = Share(Row(0), 2, (7,), 0, (BlockId(6),), True, 2)
    attention = inputs.build(Plan((), (token, long), ()), torch.zeros(3, dtype=torch.int64)).inputs.attention
    own = [6 * BLOCK + 2]
    assert attention.slots.tolist() == own + [-1] * 12 + [5 * BLOCK + at for at in range(BLOCK)] + [
        3 * BLOCK,
        3 * BLOCK + 1,
    ]
    assert (attention.blocks * BLOCK + attention.offsets).tolist() == [
        slot for slot in attention.slots.tolist() if slot >= 0
    ]
    assert attention.cold is not None
    assert attention.cold.paged is not None
    assert attention.cold.paged.tolist() == [
        at for at, slot in enumerate(attention.slots.tolist()) if slot >= 0
    ]
