"""What requests share passes by once, and each finds its own blocks in order: stretches, against the
definition."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.worker.tiling import Stretch, in_one, stretches

Ids = tuple[int, ...]


def tables_of(tables: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(table, dtype=np.int32) for table in tables]


def found(tables: Sequence[Sequence[int]], most: int) -> list[tuple[int, Ids, Ids]]:
    return [
        (one.first, tuple(one.blocks.tolist()), one.members) for one in stretches(tables_of(tables), most)
    ]


def check(tables: Sequence[Sequence[int]], most: int) -> list[Stretch]:
    """All that is promised of them."""
    given, kept = tables_of(tables), tables_of(tables)
    made = stretches(given, most)
    assert all(np.array_equal(one, other) for one, other in zip(given, kept, strict=True)), (
        "a table was changed"
    )
    walked: list[list[int]] = [[] for _ in tables]
    for one in made:
        assert 1 <= len(one.blocks) <= most
        assert one.blocks.dtype == np.int32
        assert list(one.members) == sorted(set(one.members))
        for member in one.members:
            assert one.first == len(walked[member]), f"table {member} is out of order"
            walked[member] += one.blocks.tolist()
    assert walked == [list(table) for table in tables]
    assert sum(len(one.blocks) for one in made) == beginnings(tables), (
        "what is shared passes by more than once"
    )
    for one in made:
        stop = one.first + len(one.blocks)
        ends = {tuple(tables[member][stop : stop + 1]) for member in one.members}
        assert len(one.blocks) == most or len(ends) > 1 or () in ends, f"{one} is cut short for nothing"
    return made


def beginnings(tables: Sequence[Sequence[int]]) -> int:
    """How many different ones there are that are not empty: the nodes of a trie."""
    nodes: dict[tuple[int, int], int] = {}
    for table in tables:
        node = -1
        for block in table:
            node = nodes.setdefault((node, block), len(nodes))
    return len(nodes)


@st.composite
def alike(draw: st.DrawFn) -> list[list[int]]:
    """Tables that continue one another's beginnings, with blocks of few or of many kinds."""
    kinds = draw(st.sampled_from([1, 2, 3, 1000]))
    block = st.integers(0, kinds - 1)
    tables: list[list[int]] = [draw(st.lists(block, max_size=30))]
    for _ in range(draw(st.integers(0, 7))):
        other = tables[draw(st.integers(0, len(tables) - 1))]
        tables.append(other[: draw(st.integers(0, len(other)))] + draw(st.lists(block, max_size=12)))
    return tables


@given(alike(), st.sampled_from([1, 2, 3, 4, 7, 16, 1000]))
def test_every_table_is_walked_and_every_beginning_passes_once(tables: list[list[int]], most: int) -> None:
    check(tables, most)


@given(alike(), st.integers(1, 9), st.randoms(use_true_random=False))
def test_the_order_of_the_tables_matters_to_nobody(
    tables: list[list[int]], most: int, rng: random.Random
) -> None:
    """Which of two that have parted comes first may change, but what passes, and for whom, does not."""
    order = rng.sample(range(len(tables)), len(tables))

    def passing(
        tables: Sequence[Sequence[int]], names: Sequence[int]
    ) -> set[tuple[int, Ids, frozenset[int]]]:
        return {
            (first, blocks, frozenset(names[member] for member in members))
            for first, blocks, members in found(tables, most)
        }

    assert passing([tables[at] for at in order], order) == passing(tables, range(len(tables)))


@pytest.mark.parametrize(
    ("tables", "most", "expected"),
    [
        ([], 3, []),
        ([[], []], 3, []),
        ([[], [7], []], 3, [(0, (7,), (1,))]),
        ([[4, 5, 6, 7, 8]], 2, [(0, (4, 5), (0,)), (2, (6, 7), (0,)), (4, (8,), (0,))]),
        ([[4, 5], [4, 5]], 8, [(0, (4, 5), (0, 1))]),
        # One ends where the other goes on.
        ([[4, 5, 6], [4]], 8, [(0, (4,), (0, 1)), (1, (5, 6), (0,))]),
        # They part, and what follows is never again shared, though it has the same numbers.
        ([[4, 5, 9], [4, 6, 9]], 8, [(0, (4,), (0, 1)), (1, (5, 9), (0,)), (1, (6, 9), (1,))]),
        ([[1, 2], [2, 1]], 8, [(0, (1, 2), (0,)), (0, (2, 1), (1,))]),
        # Two of three go on together.
        (
            [[1, 2, 3], [1, 7, 3], [1, 2, 4]],
            8,
            [(0, (1,), (0, 1, 2)), (1, (2,), (0, 2)), (2, (3,), (0,)), (2, (4,), (2,)), (1, (7, 3), (1,))],
        ),
        # Where they part in the midst of what one could be.
        (
            [[1, 2, 3, 4], [1, 2, 3, 5]],
            2,
            [(0, (1, 2), (0, 1)), (2, (3,), (0, 1)), (3, (4,), (0,)), (3, (5,), (1,))],
        ),
    ],
)
def test_by_hand(tables: list[list[int]], most: int, expected: list[tuple[int, Ids, Ids]]) -> None:
    assert found(tables, most) == expected
    check(tables, most)


def test_views_of_one_table_are_as_good_as_copies() -> None:
    """Rows of a larger array, as the worker cuts them."""
    rows = np.arange(60, dtype=np.int32).reshape(4, 15)
    rows[1, :9] = rows[0, :9]
    lengths = (15, 12, 0, 7)
    cut = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    assert [(one.first, one.blocks.tolist(), one.members) for one in stretches(cut, 4)] == [
        (first, list(blocks), members) for first, blocks, members in found([one.tolist() for one in cut], 4)
    ]


def test_long_tables_that_part_late_and_many_that_part_everywhere() -> None:
    common = list(range(50_000))
    made = check([[*common, 60_000 + member] for member in range(8)], 1024)
    assert len(made) == -(-len(common) // 1024) + 8
    # Each leaves the first at another block: one stretch for what is common up to there, one for what is its
    # own.
    many = [[*common[:at], 100_000 + at] for at in range(1, 400)]
    assert len(check([common[:400], *many], 1024)) == 2 * 399 + 1


def test_rows_in_one_array_begin_where_kernels_expect_it() -> None:
    rows = [np.array(row, np.int32) for row in ([5], [], [7, 8, 9], [1, 2], [4])]
    flat, places = in_one(rows)
    assert [flat[place].tolist() for place in places] == [row.tolist() for row in rows]
    assert all(place.start * flat.itemsize % 16 == 0 for place in places)
    assert in_one([])[1] == []
