"""What decode over pages is asked, on any device: a pool full of NaN, sequences in shuffled blocks, and the
answer in float64."""

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.ops.attention.inputs import LayerAttention, PlacedRun, QueryRun, Rows, RunBatch, RunTree
from penstock.ops.triton.attention import paged_decode, paged_run, paged_runs, placed_run
from penstock.ops.triton.tuning import DecodeTuning
from penstock.step.tree import depths, sights

# Against the largest value of the answer: that of one rounding, and of the probabilities rounded before they
# meet V.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def pool_views(
    blocks: int,
    block_size: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    layer: int = 1,
) -> tuple[Tensor, Tensor]:
    """One layer of a pool `[blocks, layers, 2, block_size, kv_heads, dim]` in which every number is NaN."""
    pool = torch.full((blocks, 3, 2, block_size, kv_heads, dim), math.nan, dtype=dtype, device=device)
    return pool[:, layer, 0], pool[:, layer, 1]


def fill(
    k_cache: Tensor, v_cache: Tensor, lengths: list[int], rng: torch.Generator, spare: int = 2
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Random tokens in shuffled blocks; table entries past a sequence's end are garbage. Returns the table
    and K, V per sequence."""
    blocks, block_size, kv_heads, dim = k_cache.shape
    free = torch.randperm(blocks, generator=rng).to(k_cache.device)
    width = max(-(-n // block_size) for n in lengths) + spare
    table = torch.full((len(lengths), width + 3), 2**31 - 1, dtype=torch.int32, device=k_cache.device)[
        :, :width
    ]  # rows are farther apart
    keys, values, used = [], [], 0
    for seq, length in enumerate(lengths):
        k, v = (torch.randn(length, kv_heads, dim, generator=rng).to(k_cache) for _ in range(2))
        count = -(-length // block_size)
        mine = free[used : used + count]
        used += count
        table[seq, :count] = mine
        at = torch.arange(length, device=k_cache.device)
        k_cache[mine[at // block_size], at % block_size] = k
        v_cache[mine[at // block_size], at % block_size] = v
        keys.append(k)
        values.append(v)
    return table, keys, values


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """One query `[heads, dim]` over all of K and V `[tokens, kv_heads, dim]`, in float64."""
    if window is not None:
        k, v = k[-window:], v[-window:]
    heads, kv_heads = q.shape[0], k.shape[1]
    if len(k) == 0:
        return torch.zeros_like(q, dtype=torch.float64), torch.full(
            (heads,), -math.inf, dtype=torch.float64, device=q.device
        )
    k, v = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    score = torch.einsum("hd,thd->ht", q.double(), k) * scale
    if cap is not None:
        score = cap * torch.tanh(score / cap)
    return torch.einsum("ht,thd->hd", score.softmax(1), v), score.logsumexp(1)


def decode(
    q: Tensor, cache: tuple[Tensor, Tensor], rows: Rows, layer: LayerAttention,
    *, out: Tensor | None = None, tuning: DecodeTuning | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output and log-sum-exp of `paged_decode`."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return paged_decode(q, cache, rows, layer, out=out, lse=lse, tuning=tuning), lse


def check_answer(got: Tensor, lse: Tensor, want: Tensor, want_lse: Tensor) -> None:
    """Output and log-sum-exp of one query against the float64 answer."""
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * float(want.abs().max()))
    loose = 1e-5 if got.dtype == torch.float32 else 1e-4
    torch.testing.assert_close(lse.double(), want_lse, rtol=loose, atol=loose)


@dataclass(frozen=True)
class Case:
    """A case of attention over pages: shapes, and what a query sees."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    sinks: bool = False

    @property
    def layer(self) -> LayerAttention:
        """Return a scale that is not the usual one, the window, and sinks that differ by head."""
        sinks = torch.linspace(-2, 4, self.heads).to(self.device, self.dtype) if self.sinks else None
        return LayerAttention(1.3 / math.sqrt(self.dim), self.window, sinks=sinks)

    def answer(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        """Return what a query is answered, in float64; the log-sum-exp is that of keys alone."""
        layer = self.layer
        out, lse = attend(q, k, v, layer.scale if scale is None else scale, self.window)
        if layer.sinks is not None:
            out = out * torch.sigmoid(lse - layer.sinks.double())[:, None]
        return out, lse

    def cache(self, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Return K and V of a layer with room for sequences of these lengths."""
        blocks = sum(-(-n // self.block_size) for n in lengths) + 2
        return pool_views(blocks, self.block_size, self.kv_heads, self.dim, self.dtype, self.device)

    def queries(self, tokens: int, rng: torch.Generator) -> Tensor:
        """Return random queries `[tokens, heads, dim]`, a view of a fused projection."""
        qkv = torch.randn(tokens, self.heads + 2 * self.kv_heads, self.dim, generator=rng)
        return qkv.to(self.device, self.dtype)[:, : self.heads]


def check_decode(
    lengths: list[int], *, tuning: DecodeTuning | None = None, seed: int = 0, max_length: int | None = None,
    **case: Any,
) -> None:  # fmt: skip
    """Decode one step of sequences of these lengths and compare every row. case: fields of `Case`."""
    of, rng = Case(**case), torch.Generator().manual_seed(seed)
    cache = of.cache(lengths)
    table, keys, values = fill(*cache, lengths, rng)
    q = of.queries(len(lengths), rng)
    out = torch.full(q.shape, math.nan, dtype=of.dtype, device=of.device)
    visible = torch.tensor(lengths, dtype=torch.int32, device=of.device)
    rows = Rows(len(q), table, visible, max_length or max(*lengths, 1))
    got, lse = decode(q, cache, rows, of.layer, out=out, tuning=tuning)
    assert got is out
    assert lse.dtype == torch.float32
    for seq in range(len(lengths)):
        check_answer(got[seq], lse[seq], *of.answer(q[seq], keys[seq], values[seq]))


def check_run(
    tokens: int, start: int, *, tuning: DecodeTuning | None = None, seed: int = 0, **case: Any
) -> None:
    """Attend with the last `tokens` of a sequence, and compare each with the keys up to itself.

    case: fields of `Case`.
    """
    of, rng = Case(**case), torch.Generator().manual_seed(seed)
    cache = of.cache([start + tokens])
    table, [k], [v] = fill(*cache, [start + tokens], rng)
    q = of.queries(tokens, rng)
    out = torch.full((tokens + 1, *q.shape[1:]), math.nan, dtype=of.dtype, device=of.device)
    blocks = table[0, : -(-(start + tokens) // of.block_size)].to(torch.int64)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    run = QueryRun(0, tokens, start, blocks)
    got = paged_run(q, cache, run, of.layer, out=out[:-1], lse=lse, tuning=tuning)
    check_tokens(of, q, k, v, start, (got, lse))
    assert out[-1].isnan().all(), "what is behind the last token was written"


def batch_of(pieces: list[tuple[int, int]], table: Tensor, block_size: int, before: int = 0) -> RunBatch:
    """Runs of so many tokens behind so many others, one a row of a table. before: queries of others."""
    runs = list[QueryRun]()
    for row, (tokens, start) in enumerate(pieces):
        blocks = table[row, : -(-(start + tokens) // block_size)].to(torch.int64)
        runs.append(QueryRun(before, tokens, start, blocks))
        before += tokens
    return RunBatch(runs, range(len(runs)), table, lambda numbers: torch.from_numpy(numbers).to(table.device))


def check_runs(
    pieces: list[tuple[int, int]], *, tuning: DecodeTuning | None = None, seed: int = 0, **case: Any
) -> None:
    """As `check_run`, of several runs together: tokens, and the position of the first, of each.

    case: fields of `Case`.
    """
    of, rng = Case(**case), torch.Generator().manual_seed(seed)
    lengths = [start + tokens for tokens, start in pieces]
    cache = of.cache(lengths)
    table, keys, values = fill(*cache, lengths, rng)
    q = of.queries(sum(tokens for tokens, _ in pieces), rng)
    batch = batch_of(pieces, table, of.block_size, before=3)
    out = torch.full((len(q) + 1, *q.shape[1:]), math.nan, dtype=of.dtype, device=of.device)
    lse = torch.full(q.shape[:2], math.nan, dtype=torch.float32, device=q.device)
    got = paged_runs(q, cache, batch, of.layer, out=out[:-1], lse=lse, tuning=tuning)
    for run, k, v in zip(batch.runs, keys, values, strict=True):
        own = slice(run.first - 3, run.first - 3 + run.count)
        check_tokens(of, q[own], k, v, run.start, (got[own], lse[own]))
    assert out[-1].isnan().all(), "what is behind the last token was written"


def check_tree(
    tokens: int,
    begin: int,
    *,
    earlier: int = 0,
    tuning: DecodeTuning | None = None,
    seed: int = 0,
    **case: Any,
) -> None:
    """Attend with a random tree behind `begin` tokens, or with the last of it behind `earlier` of its tokens.

    case: fields of `Case`.
    """
    of, rng, chance = Case(**case), torch.Generator().manual_seed(seed), random.Random(seed)
    count = earlier + tokens
    parents = [chance.randint(max(0, node - 4), node) for node in range(count - 1)]
    cache = of.cache([begin + count])
    table, [k], [v] = fill(*cache, [begin + count], rng)
    q = of.queries(tokens, rng)
    blocks = table[0, : -(-(begin + count) // of.block_size)].to(torch.int64)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    own = depths(parents)[earlier:]
    limits = torch.tensor([begin + depth + 1 for depth in own], dtype=torch.int32, device=of.device)
    bits = np.array(sights(parents, of.window)[earlier:], dtype=np.uint64).view(np.int64)
    tree = RunTree(begin, tuple(own), limits, {of.window: torch.from_numpy(bits).to(of.device)})
    run = QueryRun(0, tokens, begin + earlier, blocks, tree=tree)
    got = paged_run(q, cache, run, of.layer, lse=lse, tuning=tuning)
    for query, node in enumerate(range(earlier, count)):
        line = [node]
        while line[0]:
            line.insert(0, parents[line[0] - 1])
        places = [*range(begin), *(begin + one for one in line)]
        check_answer(got[query], lse[query], *of.answer(q[query], k[places], v[places]))


def check_tokens(
    case: Case, q: Tensor, k: Tensor, v: Tensor, start: int, answer: tuple[Tensor, Tensor]
) -> None:
    """Compare each token from position `start` on, as far as there are keys, with the keys up to itself."""
    got, lse = answer
    for token in range(len(k) - start):
        seen = start + token + 1
        check_answer(got[token], lse[token], *case.answer(q[token], k[:seen], v[:seen]))


def check_placed_run(
    tokens: int, start: int, padding: int, *, max_length: int | None = None, **case: Any
) -> None:
    """As `check_run`, of a run whose place is read on the device; padding behind it answers zeros.

    case: fields of `Case`.
    """
    of, rng = Case(**case), torch.Generator().manual_seed(tokens)
    cache = of.cache([start + tokens])
    table, [k], [v] = fill(*cache, [start + tokens], rng)
    q = of.queries(tokens + padding, rng)
    where = torch.tensor([start, tokens], dtype=torch.int32, device=of.device)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, device=q.device)
    run = PlacedRun(table[0], where, start + tokens if max_length is None else max_length)
    got = placed_run(q, cache, run, of.layer, out=out, lse=lse)
    check_tokens(of, q, k, v, start, (got, lse))
    assert not got[tokens:].any()
    assert (lse[tokens:] == -math.inf).all()
