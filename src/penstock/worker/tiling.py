"""Cuts the KV of a step's long requests into tiles, and its runs into batches. Requests that share blocks
share tiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.ops.runs import suits_run

if TYPE_CHECKING:
    from penstock.ops.attention.inputs import QueryRun

_LONG_RUN = 1024
"""Tokens from which a run keeps a device busy by itself."""
Table = NDArray[np.int32]
"""A request's host blocks, in order."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch is blocks [first, first + len(blocks)) of its members' tables, where these agree.

    members: indices of tables, ascending.
    """

    first: int
    blocks: Table
    members: tuple[int, ...]


def stretches(tables: Sequence[Table], most: int) -> list[Stretch]:
    """Return all blocks of all tables, each table's in order, in stretches of at most `most` blocks.

    Tables with the same beginning share stretches up to the block where they differ. Only there, and at a
    table's end, is a stretch shorter.
    """
    found: list[Stretch] = []
    # Depth first, so that no table's stretches come out of order.
    open_groups = [(0, tuple(index for index, table in enumerate(tables) if len(table)))]
    while open_groups:
        first, members = open_groups.pop()
        by_block: dict[int, list[int]] = {}
        for member in members:
            if first < len(tables[member]):
                by_block.setdefault(int(tables[member][first]), []).append(member)
        if len(by_block) > 1:
            open_groups += [(first, tuple(group)) for group in reversed(by_block.values())]
            continue
        for group in by_block.values():
            stop = min(first + most, *(len(tables[member]) for member in group))
            blocks = tables[group[0]][first:stop]
            for member in group[1:]:
                apart = np.flatnonzero(tables[member][first : first + len(blocks)] != blocks)
                if len(apart):
                    blocks = blocks[: apart[0]]
            found.append(Stretch(first, blocks, tuple(group)))
            open_groups.append((first + len(blocks), tuple(group)))
    return found


def in_one(rows: Sequence[Table]) -> tuple[NDArray[np.int64], list[slice]]:
    """Return all rows in one array, which is sent to a device at once, and where each is. Each begins at a
    multiple of 16 bytes, which kernels are compiled for."""
    begins = np.cumsum([0, *(len(row) + len(row) % 2 for row in rows)])
    flat = np.zeros(begins[-1], np.int64)
    places = [slice(int(begin), int(begin) + len(row)) for begin, row in zip(begins[:-1], rows, strict=True)]
    for place, row in zip(places, rows, strict=True):
        flat[place] = row
    return flat, places


def batches(runs: "Sequence[QueryRun]") -> list[range]:
    """Return which runs may be attended to together: short ones in pages, two or more one behind the
    other."""
    found, begin = [], 0
    for end in range(len(runs) + 1):
        if end < len(runs) and runs[end].paged and runs[end].tree is None and _is_short(runs[end]):
            continue
        if end - begin > 1:
            found.append(range(begin, end))
        begin = end + 1
    return found


def _is_short(run: "QueryRun") -> bool:
    """Tell whether a run leaves the device waiting for its launch, and reads no more than a kernel over pages
    may, whatever the heads."""
    return run.count < _LONG_RUN and (not run.start or suits_run(run.count, run.start + run.count, 64, 1))
