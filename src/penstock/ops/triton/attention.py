"""Launches over paged KV: attention of one token a sequence, attention of a chunk, and the write of new KV.

Attention is split-K over all sequences at once; `decode` says how the work is divided. K and V have one width
and one set of strides: `_attended` asserts it.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.inputs import LayerAttention, PlacedRun, QueryRun, Rows, RunBatch, RunTree
from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.runs import run_tokens
from penstock.ops.triton.decode import decode
from penstock.ops.triton.joins import join
from penstock.ops.triton.scores import score_factor
from penstock.ops.triton.tuning import DecodeTuning, cdiv, decode_tuning, multiprocessors, next_power_of_2

_FEW = 4
"""Sequences up to which a second launch joins parts.

It does so also where launches may not be early, lest bits depend on that.
"""
_MANY = 257
"""Pieces of several runs are no fewer for `_batch_class`, so that one kernel is compiled for them."""
_ALONE = 3
"""Programs of each multiprocessor that decode so few sequences, at least."""


def _workers(kv_heads: int, batch: int, tiles: int, wanted: int) -> int:
    """Return the workers of each KV head.

    They are as many as make `wanted` programs, not one more, which would run alone at the end; and no more
    than there can be tiles.
    """
    return max(1, min(wanted // kv_heads, batch * tiles))


def scratch_bytes(
    heads: int, kv_heads: int, dim: int, element: int, block_size: int, device: torch.device
) -> int:
    """Bound the bytes of partial results, whatever is attended to. Only long contexts take as much.

    All programs that are ever started are counted, each for as many tokens as are taken together.

    element: bytes of a number.
    """
    per_sm = max(decode_tuning(dim, element, block_size).workers_per_sm, _ALONE)
    workers = max(multiprocessors(device) * per_sm // kv_heads, 1)
    cols = max(16, next_power_of_2(dim))
    return workers * 2 * heads * run_tokens(heads // kv_heads, dim * element) * (cols + 1) * 4


def _registers(tuning: DecodeTuning) -> int:
    """Return how many registers a thread may have where a launch joins.

    Left alone, the compiler gives it more, and fewer programs fit a multiprocessor.
    """
    return min(max(65536 // (32 * tuning.warps * tuning.workers_per_sm) // 8 * 8, 128), 255)


def paged_decode(
    q: Tensor, cache: tuple[Tensor, Tensor], rows: Rows, layer: LayerAttention, *,
    out: Tensor | None = None, lse: Tensor | None = None, tuning: DecodeTuning | None = None,
) -> Tensor:  # fmt: skip
    """Attend with one new token of each sequence to its paged KV.

    It synchronises nothing and fits a CUDA graph: replays read lengths and table anew, and only shapes and
    `max_length` are fixed. Work is spread by the lengths themselves: `max_length` only sizes the grid,
    however far below it they are. Calls that may run at the same time need `arrivals` of their own.

    q: `[rows, heads, dim]`.
    cache: K and V, `[blocks, block_size, kv_heads, dim]`, of the same strides, `dim` contiguous; they may
        have more than 2**31 elements.
    rows: a row of length 0 is padding. It answers 0 and -inf, and no entry of its table is read.
    out: `[rows, heads, dim]`, which is written and returned; new and of q's dtype by default.
    layer: its sinks weigh on the output, and not on the log-sum-exp.
    lse: float32 `[rows, heads]`, contiguous, which takes the natural log-sum-exp of the scaled scores.
        Without it none is written.
    """
    dim, arrivals, block_size = q.shape[2], rows.arrivals, cache[0].shape[1]
    assert rows.lengths.stride(0) == 1
    assert rows.lengths.dtype == rows.table.dtype == torch.int32
    assert arrivals is None or (
        arrivals.dtype == torch.int32
        and arrivals.is_contiguous()
        and arrivals.numel() >= len(q) * cache[0].shape[2]
    )
    if tuning is None:
        if len(q) <= _FEW:  # A second launch costs less than one program that joins the parts of many.
            arrivals = None
        choose = decode_tuning if arrivals is not None else _alone_tuning
        tuning = choose(dim, q.element_size(), block_size)
    cut = _Cut(rows.table, len(q), 1, rows.max_length, rows.lengths, arrivals=arrivals)
    return _attended(q, cache, cut, layer, tuning, out, lse)


def paged_run(
    q: Tensor, cache: tuple[Tensor, Tensor], run: QueryRun, layer: LayerAttention, *,
    out: Tensor | None = None, lse: Tensor | None = None, tuning: DecodeTuning | None = None,
) -> Tensor:  # fmt: skip
    """Attend with a run, q `[tokens, heads, dim]`, each token to all that comes up to itself.

    It is for few tokens behind many keys, which are read once for every `run_tokens` of them. Of a tree each
    token sees what `run.tree` says. The tokens' own keys and values are in pages. The other arguments, and
    the answer, are those of `paged_decode`.
    """
    assert run.start >= 0, run.start
    tuning = tuning or _run_tuning(q, cache)
    cut = replace(_run_cut(q, cache, run.blocks, run.start + len(q), None, run.start), tree=run.tree)
    return _attended(q, cache, cut, layer, tuning, out, lse)


def placed_run(
    q: Tensor, cache: tuple[Tensor, Tensor], run: PlacedRun, layer: LayerAttention, *,
    out: Tensor, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend as `paged_run` does with a run whose place is read on the device: fit for a CUDA graph.

    Of q's tokens those beyond the run are padding: of them nothing is written to `out` or `lse`.
    `max_length` only sizes the grid.
    """
    assert run.where.dtype == torch.int32
    cut = _run_cut(q, cache, run.blocks, run.max_length, run.where, -1)
    return _attended(q, cache, cut, layer, _run_tuning(q, cache), out, lse)


def paged_runs(
    q: Tensor, cache: tuple[Tensor, Tensor], batch: RunBatch, layer: LayerAttention, *,
    out: Tensor | None = None, lse: Tensor | None = None, tuning: DecodeTuning | None = None,
) -> Tensor:  # fmt: skip
    """Attend with several runs, q `[tokens, heads, dim]` of all of them, each as `paged_run` does with one.

    The other arguments, and the answer, are those of `paged_decode`.
    """
    together = run_tokens(q.shape[1] // cache[0].shape[2], q.shape[2] * q.element_size())
    pieces = batch.pieces(together)
    cut = _Cut(batch.table, pieces.shape[1], together, batch.stop, pieces, several=True)
    return _attended(q, cache, cut, layer, tuning or _run_tuning(q, cache), out, lse)


@dataclass(frozen=True, slots=True)
class _Cut:
    """_Cut says what is attended to as sequences of their own.

    table: block table, int32 or int64 `[count, blocks]`.
    count: sequences.
    tokens: queries of each; of the last perhaps fewer.
    longest: bound of their lengths.
    lengths: their lengths; or the place of the run, if `start` is -1; or None, if `start` is its place.
    arrivals: counters, for a join in the same launch.
    tree: what the queries of a run see, if they are a tree.
    several: whether these are pieces of several runs, as RunBatch has them, which are then `lengths`.
    """

    table: Tensor
    count: int
    tokens: int
    longest: int
    lengths: Tensor | None
    start: int = 0
    arrivals: Tensor | None = None
    tree: RunTree | None = None
    several: bool = False


@lru_cache(maxsize=64)
def _alone_tuning(head_dim: int, itemsize: int, block_size: int) -> DecodeTuning:
    """Choose as `decode_tuning`, where a second launch joins."""
    tuning = decode_tuning(head_dim, itemsize, block_size)
    return replace(tuning, least=1, workers_per_sm=max(tuning.workers_per_sm, _ALONE))


def _run_tuning(q: Tensor, cache: tuple[Tensor, Tensor]) -> DecodeTuning:
    return _tuning_of_runs(q.shape[2], q.element_size(), cache[0].shape[1])


@lru_cache(maxsize=64)
def _tuning_of_runs(head_dim: int, itemsize: int, block_size: int) -> DecodeTuning:
    return replace(decode_tuning(head_dim, itemsize, block_size), workers_per_sm=2, least=1)


def _run_cut(
    q: Tensor, cache: tuple[Tensor, Tensor], blocks: Tensor, longest: int, where: Tensor | None, start: int
) -> _Cut:
    tokens, heads, dim = q.shape
    together = run_tokens(heads // cache[0].shape[2], dim * q.element_size())
    count = cdiv(tokens, together)
    return _Cut(blocks[None].expand(count, -1), count, together, longest, where, start)


def _attended(
    q: Tensor, cache: tuple[Tensor, Tensor], cut: _Cut, layer: LayerAttention, tuning: DecodeTuning,
    out: Tensor | None, lse: Tensor | None,
) -> Tensor:  # fmt: skip
    (queries, heads, dim), (k_cache, v_cache), arrivals, sinks = q.shape, cache, cut.arrivals, layer.sinks
    kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    assert heads % kv_heads == 0, (q.shape, k_cache.shape)
    assert block_size & (block_size - 1) == 0, block_size
    assert 1 <= dim <= 256, dim
    assert k_cache.shape == v_cache.shape, (k_cache.shape, v_cache.shape)
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    assert q.stride(2) == k_cache.stride(3) == cut.table.stride(1) == 1
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert lse is None or (lse.dtype == torch.float32 and lse.is_contiguous()), lse
    assert sinks is None or (sinks.shape == (heads,) and sinks.is_contiguous()), sinks
    group = heads // kv_heads
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if queries == 0:
        return out
    early = uses_pdl() and not cut.several  # Pieces come from the host among the step's launches.
    window, tree = layer.window, cut.tree
    seen = cut.longest if window is None else min(cut.longest, window + cut.tokens - 1 + tuning.tile)
    wanted = multiprocessors(q.device) * tuning.workers_per_sm
    workers = _workers(kv_heads, cut.count, cdiv(max(seen, 1), tuning.tile), wanted)
    cols = max(16, next_power_of_2(dim))
    part_out = torch.empty(workers, 2, heads * cut.tokens, cols, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(workers, 2, heads * cut.tokens, dtype=torch.float32, device=q.device)
    ends = torch.empty(cut.count + 1 if arrivals is None else 0, dtype=torch.int32, device=q.device)
    join_rows = next_power_of_2(group)
    overlap = (tuning.overlap or early) and arrivals is None
    run = 3 if cut.several else 1 if cut.lengths is None else 2 if cut.start < 0 else 0
    decode[(kv_heads, workers)](
        q,
        k_cache,
        v_cache,
        cut.table,
        ends if cut.lengths is None else cut.lengths,
        out,
        part_lse if lse is None else lse,
        part_out,
        part_lse,
        ends,
        ends if arrivals is None else arrivals,
        part_lse if sinks is None else sinks,
        ends if tree is None else tree.limits,
        ends if tree is None else tree.bits[window],
        score_factor(layer),
        window or 0,
        cut.count,
        workers,
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        cut.table.stride(0),
        out.stride(0),
        out.stride(1),
        cut.start,
        queries,
        0 if tree is None else tree.begin,
        HEADS=heads,
        GROUP=group,
        TOKENS=cut.tokens,
        RUN=run,
        TREE=tree is not None,
        ROWS=max(16, next_power_of_2(group * cut.tokens)),
        DIM=dim,
        COLS=cols,
        BLOCK=block_size,
        TILE=tuning.tile,
        BATCH=_batch_class(max(cut.count, _MANY) if cut.several else cut.count),
        WINDOWED=window is not None,
        DEPTH=tuning.depth,
        WIDEN=q.device.type == "cpu",
        LEAST=tuning.least,
        OVERLAP=overlap,
        EARLY=early,
        JOINS=arrivals is not None,
        JOIN_ROWS=join_rows,
        JOIN_PARTS=max(1, min(8, 4096 // (join_rows * cols))),
        LSE=lse is not None,
        SINKS=sinks is not None,
        CAP=layer.cap or 0.0,
        num_warps=tuning.warps,
        **pdl_launch_options(early),
        **({"maxnreg": _registers(tuning)} if arrivals is not None and q.is_cuda else {}),
    )
    if arrivals is not None:
        return out
    wide = heads * cut.tokens
    # Batches of runs, small or large, have one kernel, so that none is compiled when a large one comes.
    few = cut.count * wide <= 1024 and not cut.several
    rows, parts = (1, 64) if few else (min(4, next_power_of_2(wide)), 4)
    join[(cdiv(wide, rows), cut.count)](
        out,
        part_lse if lse is None else lse,
        part_out,
        part_lse,
        ends,
        ends if cut.lengths is None else cut.lengths,
        part_lse if sinks is None else sinks,
        cut.count,
        out.stride(0),
        out.stride(1),
        queries,
        HEADS=heads,
        TOKENS=cut.tokens,
        RUN=run,
        DIM=dim,
        COLS=cols,
        ROWS=rows,
        PARTS=parts,
        WAITS=overlap,
        LSE=lse is not None,
        SINKS=sinks is not None,
        num_warps=8 if parts > 4 else 4,
        **pdl_launch_options(overlap),
    )
    return out


def _batch_class(batch: int) -> int:
    """Return how many rows of lengths a program scans: few classes, so that few kernels are compiled.

    To scan 256 takes hardly longer than 16.
    """
    size = 256
    while size < batch:
        size *= 16
    return size


@triton.jit(do_not_specialize_on_alignment=["slots"])  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    k,
    v,
    k_cache,
    v_cache,
    slots,
    s_k,
    s_k_head,
    s_v,
    s_v_head,
    s_kc_block,
    s_kc,
    s_kc_head,
    s_vc_block,
    s_vc,
    s_vc_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write K and V of one token to its slot. Grid [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        block, offset = slot // BLOCK, slot % BLOCK
        heads, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
        inside = (heads < HEADS) & (cols < DIM)
        new_k = tl.load(k + token * s_k + heads * s_k_head + cols, mask=inside)
        new_v = tl.load(v + token * s_v + heads * s_v_head + cols, mask=inside)
        k_at = k_cache + block * s_kc_block + offset * s_kc + heads * s_kc_head + cols
        v_at = v_cache + block * s_vc_block + offset * s_vc + heads * s_vc_head + cols
        tl.store(k_at, new_k.to(k_cache.dtype.element_ty), mask=inside)
        tl.store(v_at, new_v.to(v_cache.dtype.element_ty), mask=inside)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write new K and V `[tokens, kv_heads, dim]`, strided views of one shape, to pages, in one kernel.

    k_cache, v_cache: `[blocks, block_size, kv_heads, dim]`.
    slots: the slot mapping, int64 `[tokens]`: block * block_size + offset; -1 writes nothing.
    """
    tokens, heads, dim = k.shape
    assert k.shape == v.shape, (k.shape, v.shape)
    assert k_cache.shape[2:] == v_cache.shape[2:] == (heads, dim), (k.shape, k_cache.shape)
    assert k.stride(2) == v.stride(2) == k_cache.stride(3) == v_cache.stride(3) == slots.stride(0) == 1
    assert slots.dtype == torch.int64, slots.dtype
    if tokens == 0:
        return
    _write[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        HEADS=heads,
        DIM=dim,
        ROWS=next_power_of_2(heads),
        COLS=next_power_of_2(dim),
        BLOCK=k_cache.shape[1],
        num_warps=4,
    )
