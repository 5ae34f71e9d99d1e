"""Policies choose which blocks of far keys a step reads, and bound how much attention lies in the rest.

A policy is a pure function of a layer and of the queries' scores with every block, as the blocks' sketches
bound them (`ops.sketch`). What it leaves out is accounted for: the share of a query's attention in blocks
that were not read is at most the bound of their scores, divided by that bound plus what was read, which is
known exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from penstock.base.config import policy_numbers
from penstock.ops.sketch import Scores

_ROUNDING = 2.0**-23


class Past:
    """Past is the `blocks` whole blocks of keys before queries at positions [start, stop).

    They are scored when `scores` is first read.

    score: returns the scores.
    sum_ranks: puts the sum over all ranks in the place of a tensor, where there are several. A rank scores
        with its own heads, and all choose the same blocks.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        start: int,
        stop: int,
        score: Callable[[], Scores],
        sum_ranks: Callable[[Tensor], object] | None = None,
    ) -> None:
        self.blocks, self.block_size, self.start, self.stop = blocks, block_size, start, stop
        self._score, self._sum_ranks = score, sum_ranks

    @cached_property
    def scores(self) -> Scores:
        """Return the queries' scores with every block, computed once."""
        return self._score()

    def best(self, count: int) -> Tensor:
        """Return the blocks with the largest likely shares of attention, summed over queries and the heads of
        all ranks: bool `[blocks]`."""
        likely = self.scores.likely
        shares = likely.softmax(2).sum((0, 1))
        if self._sum_ranks is not None:
            self._sum_ranks(shares)
        keep = torch.zeros(len(shares), dtype=torch.bool, device=likely.device)
        keep[shares.topk(min(count, len(keep))).indices] = True
        return keep


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice says which blocks to read, and bounds the rest. None in its place reads everything.

    keep: the blocks to read, bool `[blocks]`.
    skipped: float32 `[queries, heads]`, no less than the log of the sum of exp(score) over all keys that are
        not read; -inf where there are none.
    """

    keep: Tensor
    skipped: Tensor

    def missed(self, lse: Tensor) -> Tensor:
        """Bound what fraction of each query's attention lies in skipped blocks: float32 `[queries, heads]`.

        lse: log-sum-exp of all scores that were seen, of blocks that were read and whatever else, float32
            `[queries, heads]`, right to its last bits: an error in it is an error of the answer.
        """
        room = _ROUNDING * (64 + 8 * (self.skipped.abs() + lse.abs()))
        share = torch.sigmoid(self.skipped - lse + room) * (1 + 4 * _ROUNDING)
        share = share.nan_to_num_(1.0)  # nothing is known
        share.clamp_(torch.finfo(torch.float32).tiny, 1.0)  # too little for a float32 is not none
        return share.masked_fill(self.skipped == -torch.inf, 0.0)


class Policy(Protocol):
    """A policy is called for each layer and chooses the blocks to read."""

    def __call__(self, layer: int, past: Past) -> Choice | None:
        """Choose blocks of the past for a layer's queries. None reads everything."""


def full(layer: int, past: Past) -> None:
    """Read everything: exact."""


def window(sinks: int, recent: int) -> Policy:
    """Read the first `sinks` tokens and the `recent` ones before the first query, as whole blocks."""

    def choose(layer: int, past: Past) -> Choice | None:
        begins = range(0, past.blocks * past.block_size, past.block_size)
        kept = [begin < sinks or begin + past.block_size > past.start - recent for begin in begins]
        if all(kept):
            return None
        scores = past.scores
        return _choice(torch.tensor(kept, device=scores.upper.device), scores)

    return choose


def topk(count: int, *, dense_layers: int = 0) -> Policy:
    """Read the `count` blocks that are likely to have the most attention, all heads together.

    dense_layers: in the first so many layers everything is read.
    """

    def choose(layer: int, past: Past) -> Choice | None:
        if layer < dense_layers or count >= past.blocks:
            return None
        return _choice(past.best(count), past.scores)

    return choose


def vertical_slash(columns: int, slashes: Sequence[int]) -> Policy:
    """Read the `columns` best blocks, and those that lie `slashes` blocks before one that holds a query.

    For prefill: these are the two patterns of block-sparse prefill (after Jiang et al. 2024, arXiv
    2407.02490).
    """

    def choose(layer: int, past: Past) -> Choice | None:
        keep = past.best(columns)
        for distance in slashes:
            first, last = (
                past.start // past.block_size - distance,
                (past.stop - 1) // past.block_size - distance,
            )
            keep[max(first, 0) : max(last + 1, 0)] = True
        return _choice(keep, past.scores)

    return choose


def policy_of(text: str) -> Policy | None:
    """Make the attention policy that `text` names (see base.config); None for `full`.

    Raises ConfigError.
    """
    name, values = policy_numbers(text)
    made: dict[str, Callable[..., Policy]] = {
        "window": window,
        "topk": lambda count, dense_layers=0: topk(count, dense_layers=dense_layers),
        "vertical_slash": lambda columns, *slashes: vertical_slash(columns, slashes),
    }
    return None if name == "full" else made[name](*values)


def _choice(keep: Tensor, scores: Scores) -> Choice:
    """Return the choice of the blocks in `keep`, with the bound of what is skipped."""
    return Choice(keep, scores.upper.masked_fill(keep, -torch.inf).logsumexp(2))
