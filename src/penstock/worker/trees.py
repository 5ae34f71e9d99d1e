"""Says what the tokens of drafted trees see, and moves the KV of those that were accepted."""

from collections.abc import Sequence

import numpy as np
import torch

from penstock.kv.movement.pool import KVPool
from penstock.memory.sending import send
from penstock.ops.attention.inputs import RunTree
from penstock.step.plan import Row, Share
from penstock.step.tree import depths, sights
from penstock.worker.tables import BlockTables

Move = tuple[Row, int, int]
"""A row, and places in its sequence: from where, and to where."""


def run_tree(share: Share, windows: Sequence[int | None], device: torch.device) -> RunTree | None:
    """Return what the tokens of a share see if they are a tree."""
    if not share.parents:
        return None
    count = len(share.tokens)
    own = tuple(depths(share.parents)[-count:])
    bits = {window: np.array(sights(share.parents, window)[-count:], dtype=np.uint64) for window in windows}
    return RunTree(
        share.begin,
        own,
        send(np.array(own, dtype=np.int32) + np.int32(share.begin + 1), device),
        {window: send(words.view(np.int64), device) for window, words in bits.items()},
    )


def moves_of(share: Share, nodes: Sequence[int]) -> list[Move]:
    """Return how the KV of a tree's accepted nodes gets to the places of consecutive tokens."""
    return [(share.row, share.start + node, share.start + at) for at, node in enumerate(nodes) if node > at]


def compact(moves: Sequence[Move], tables: BlockTables, pool: KVPool) -> None:
    """Move the KV of tokens to other places of their sequences, behind all work so far.

    Why this is safe. No step is planned while one that verifies is under way, so the tables are those of that
    step, and all that reads these places comes behind. They are behind the newest token that was known, in
    pages of the row's alone, which have no name yet.
    """
    rows, sources, targets = np.array(moves, dtype=np.int64).T
    size = pool.layout.block_size
    slots = [tables.pages[rows, at // size].astype(np.int64) * size + at % size for at in (sources, targets)]
    pool.move(*send(np.array(slots), pool.bytes.device))
