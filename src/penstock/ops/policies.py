"""Which blocks of far keys a step streams, and how much attention it can have missed by leaving out the rest.

A policy is a pure function of a layer, a summary of the queries and the bounds of every block's keys. What it leaves out it accounts for:
no query's score with a key lies above what the two boxes allow, the query's and the block's (after Tang et al. 2024, arXiv 2406.10774),
so the attention mass of a block that was never read has a bound, and the answer says how far it can be from the exact one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.base.errors import ConfigError

_ROUNDING = 2.0**-23
"""One step of float32: bounds are widened by what its arithmetic may have lost."""


@dataclass(slots=True)
class KeyBounds:
    """Elementwise least and greatest of each block's keys in one layer, for blocks of one sequence in order, filled from the first.

    low, high: float32 `[capacity, kv_heads, dim]`, of which the blocks that hold the first `tokens` tokens count.
    """

    low: Tensor
    high: Tensor
    block_size: int
    tokens: int = 0

    @classmethod
    def empty(cls, capacity: int, kv_heads: int, dim: int, block_size: int, device: torch.device) -> "KeyBounds":
        shape = (capacity, kv_heads, dim)
        low = torch.full(shape, torch.inf, dtype=torch.float32, device=device)
        return cls(low, torch.full_like(low, -torch.inf), block_size)

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.block_size)

    def append(self, keys: Tensor) -> None:
        """The sequence's next keys, `[tokens, kv_heads, dim]`, wherever in a block they begin and end."""
        count = len(keys)
        if not count:
            return
        first, before = divmod(self.tokens, self.block_size)
        after = -(before + count) % self.block_size
        # Keys said again at either end change neither bound and make the blocks whole.
        whole = torch.cat((keys[:1].expand(before, -1, -1), keys, keys[-1:].expand(after, -1, -1)))
        low, high = whole.view(-1, self.block_size, *whole.shape[1:]).float().aminmax(dim=1)
        self.tokens += count
        part = slice(first, self.blocks)
        torch.minimum(self.low[part], low, out=self.low[part])
        torch.maximum(self.high[part], high, out=self.high[part])


@dataclass(frozen=True, slots=True)
class QuerySummary:
    """The box of the queries at positions [start, stop): elementwise least and greatest, scaled, float32 `[heads, dim]`."""

    low: Tensor
    high: Tensor
    start: int
    stop: int

    @classmethod
    def of(cls, q: Tensor, scale: float, start: int) -> "QuerySummary":
        """Of queries `[queries, heads, dim]`, the first at position `start`."""
        low, high = (q.float() * scale).aminmax(dim=0)
        return cls(low, high, start, start + len(q))


@dataclass(frozen=True, slots=True)
class Choice:
    """Blocks to stream, int64 ascending. skipped: float32 `[heads]`, no less than the log of the sum of exp(score) over all other keys
    in sight, whichever of the queries asks; -inf where there are none."""

    blocks: Tensor
    skipped: Tensor

    def missed(self, lse: Tensor) -> Tensor:
        """What fraction of each query's attention lies, at most, in skipped blocks: float32 `[queries, heads]`.

        lse: log-sum-exp of all scores that were seen, of streamed blocks and whatever else, float32 `[queries, heads]`, right to its
        last bits: an error in it is an error of the answer.
        """
        room = 8 * _ROUNDING * (1 + self.skipped.abs() + lse.abs())
        share = torch.sigmoid(self.skipped - lse + room) * (1 + 4 * _ROUNDING)
        share.clamp_(torch.finfo(torch.float32).tiny, 1.0)  # too little to be told is not none
        return share.masked_fill(self.skipped == -torch.inf, 0.0)


class Policy(Protocol):
    def __call__(self, layer: int, query: QuerySummary, bounds: KeyBounds) -> Choice: ...


def full(layer: int, query: QuerySummary, bounds: KeyBounds) -> Choice:
    """Everything: exact."""
    blocks = _in_sight(query, bounds)
    return Choice(torch.arange(blocks, device=query.low.device), torch.full(query.low.shape[:1], -torch.inf, device=query.low.device))


def window(sinks: int, recent: int) -> Policy:
    """The first `sinks` tokens, the `recent` ones before the first query, and all between the queries, as whole blocks."""

    def choose(layer: int, query: QuerySummary, bounds: KeyBounds) -> Choice:
        upper = block_bounds(query, bounds)
        begin = torch.arange(upper.shape[1], device=upper.device) * bounds.block_size
        return _choice((begin < sinks) | (begin + bounds.block_size > query.start - recent), upper)

    return choose


def topk(count: int, *, dense_layers: int = 0) -> Policy:
    """The `count` blocks whose bounds allow the most attention, all heads together; everything in the first `dense_layers` layers."""

    def choose(layer: int, query: QuerySummary, bounds: KeyBounds) -> Choice:
        if layer < dense_layers or count >= _in_sight(query, bounds):
            return full(layer, query, bounds)
        upper = block_bounds(query, bounds)
        return _choice(_best(upper, count), upper)

    return choose


def vertical_slash(columns: int, slashes: Sequence[int]) -> Policy:
    """For prefill: the `columns` best blocks, and those that lie `slashes` blocks before one that holds a query (0: its own).

    The two patterns of block-sparse prefill (after Jiang et al. 2024, arXiv 2407.02490); one choice is one row of `block_mask`.
    """

    def choose(layer: int, query: QuerySummary, bounds: KeyBounds) -> Choice:
        upper = block_bounds(query, bounds)
        keep = _best(upper, columns)
        for distance in slashes:
            first, last = query.start // bounds.block_size - distance, (query.stop - 1) // bounds.block_size - distance
            keep[max(first, 0) : max(last + 1, 0)] = True
        return _choice(keep, upper)

    return choose


def policy_of(text: str) -> Policy | None:
    """`full` (None: there is nothing to choose), `window:SINKS,RECENT`, `topk:BLOCKS` or `topk:BLOCKS,DENSE_LAYERS`, and
    `vertical_slash:COLUMNS,SLASH,...`. Raises ConfigError."""
    name, _, numbers = text.partition(":")
    if text == "full":
        return None
    made: dict[str, tuple[range, Callable[..., Policy]]] = {
        "window": (range(2, 3), window),
        "topk": (range(1, 3), lambda count, dense_layers=0: topk(count, dense_layers=dense_layers)),
        "vertical_slash": (range(1, 65), lambda columns, *slashes: vertical_slash(columns, slashes)),
    }
    values = [int(number) if number.isdecimal() else -1 for number in numbers.split(",")]
    if name not in made or len(values) not in made[name][0] or min(values) < 0:
        raise ConfigError(
            f"attention policy {text!r} is not known; write full, window:SINKS,RECENT, topk:BLOCKS[,DENSE_LAYERS] or "
            f"vertical_slash:COLUMNS[,SLASH...], in whole numbers"
        )
    return made[name][1](*values)


def block_mask(policy: Policy, layer: int, queries: Sequence[QuerySummary], bounds: KeyBounds) -> Tensor:
    """Which blocks each piece of a chunk attends to under a policy: bool `[pieces, blocks]`."""
    mask = torch.zeros(len(queries), bounds.blocks, dtype=torch.bool, device=bounds.low.device)
    for row, query in zip(mask, queries, strict=True):
        row[policy(layer, query, bounds).blocks] = True
    return mask


def block_bounds(query: QuerySummary, bounds: KeyBounds) -> Tensor:
    """No less than the log of the sum of exp(score) over each block's keys, for any of the queries: float32 `[heads, blocks in sight]`.

    Boxes as centre and radius: (c + a)(m + b) <= cm + |c|s + r|m| + rs for |a| <= r, |b| <= s; for a single query, r = 0, it is reached.
    """
    blocks = _in_sight(query, bounds)
    kv_heads, dim = bounds.low.shape[1:]
    low, high = (x[:blocks].transpose(0, 1) for x in (bounds.low, bounds.high))
    middle, spread = (low + high) / 2, (high - low) / 2
    centre, radius = ((x / 2).view(kv_heads, -1, dim) for x in (query.low + query.high, query.high - query.low))
    reach = centre.abs() + radius
    upper = centre @ middle.mT + reach @ spread.mT + radius @ middle.abs().mT
    upper += (dim + 8) * _ROUNDING * (reach @ (middle.abs() + spread).mT)  # what float32 may have lost
    upper += math.log(bounds.block_size)
    if blocks == bounds.blocks and blocks:
        upper[..., -1] += math.log((bounds.tokens - 1) % bounds.block_size + 1) - math.log(bounds.block_size)
    return upper.reshape(-1, blocks)


def _in_sight(query: QuerySummary, bounds: KeyBounds) -> int:
    """Blocks that begin no later than the last query."""
    return min(bounds.blocks, -(-query.stop // bounds.block_size))


def _best(upper: Tensor, count: int) -> Tensor:
    """The blocks with the largest shares, summed over heads, of what the bounds allow: bool `[blocks]`."""
    keep = torch.zeros(upper.shape[1], dtype=torch.bool, device=upper.device)
    keep[upper.softmax(1).sum(0).topk(min(count, upper.shape[1])).indices] = True
    return keep


def _choice(keep: Tensor, upper: Tensor) -> Choice:
    return Choice(keep.nonzero()[:, 0], upper.masked_fill(keep, -torch.inf).logsumexp(1))
