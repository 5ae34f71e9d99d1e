"""Launches over paged KV: attention of one token a sequence, attention of a chunk, and the write of new KV.

Attention is split-K over all sequences at once; `decode` says how the work is divided. K and V have one width
and one set of strides: `_attended` asserts it.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.kernels import early_options, launches_early
from penstock.ops.runs import run_tokens
from penstock.ops.triton.decode import LOG2_E, decode, join
from penstock.ops.triton.tuning import DecodeTuning, decode_tuning, multiprocessors

_FEW = 4
"""Sequences for which parts are joined by a second launch; also where it may not be early, lest bits depend
on that."""
_ALONE = 3
"""Programs of each multiprocessor that decode so few, at least."""


def _workers(kv_heads: int, batch: int, tiles: int, wanted: int) -> int:
    """Runs per KV head: as many as make `wanted` programs, not one more (it would run alone, last), and no
    more than there can be tiles."""
    return max(1, min(wanted // kv_heads, batch * tiles))


def scratch_bytes(
    heads: int, kv_heads: int, dim: int, element: int, block_size: int, device: torch.device
) -> int:
    """Bytes that partial results take at most, whatever is attended to: of as many programs as are ever
    started, for as many tokens as are taken together. Only long contexts start as many."""
    per_sm = max(decode_tuning(dim, element, block_size).workers_per_sm, _ALONE)
    workers = max(multiprocessors(device) * per_sm // kv_heads, 1)
    cols: int = max(16, triton.next_power_of_2(dim))
    return workers * 2 * heads * run_tokens(heads // kv_heads, dim * element) * (cols + 1) * 4


def _registers(tuning: DecodeTuning) -> int:
    """Registers a thread may have where a launch joins: left alone, the compiler gives it more, and fewer
    programs fit a multiprocessor."""
    return min(max(65536 // (32 * tuning.warps * tuning.workers_per_sm) // 8 * 8, 128), 255)


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None,
    max_length: int,
    out: Tensor | None = None,
    arrivals: Tensor | None = None,
    tuning: DecodeTuning | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one new token per sequence over its paged KV. Synchronises nothing: fit for capture in a
    CUDA graph, whose replays read lengths and table anew; the shapes and `max_length` are all that is fixed.

    q `[batch, heads, head_dim]`; k_cache, v_cache `[blocks, block_size, kv_heads, head_dim]`, the same
    strides for both, `head_dim` contiguous, more than 2**31 elements allowed; block_table int32 `[batch,
    blocks a row]`; lengths int32 `[batch]`, tokens visible including the newest, 0 for a row that is padding,
    of which no table entry is read. With `window`, the last `window` tokens are visible. `max_length` bounds
    lengths and only sizes the grid: work is spread by the lengths themselves, however far below it they are.
    arrivals: int32, at least `[batch * kv_heads]`, zeros, and zeros again afterwards: everything is done in
    one launch. Calls that may run at the same time need their own. Without it there is a second launch.
    Returns out `[batch, heads, head_dim]` in q's dtype and the natural log-sum-exp of the scaled scores, fp32
    `[batch, heads]`; a row of length 0 answers 0 and -inf.
    """
    batch, _, dim = q.shape
    assert lengths.stride(0) == 1
    assert lengths.dtype == block_table.dtype == torch.int32
    assert arrivals is None or (
        arrivals.dtype == torch.int32
        and arrivals.is_contiguous()
        and arrivals.numel() >= batch * k_cache.shape[2]
    )
    if tuning is None:
        if batch <= _FEW:  # A second launch costs less than one program that joins what many have found.
            arrivals = None
        tuning = decode_tuning(dim, q.element_size(), k_cache.shape[1])
        if arrivals is None:
            tuning = replace(tuning, least=1, workers_per_sm=max(tuning.workers_per_sm, _ALONE))
    cut = _Cut(batch, 1, max_length, lengths)
    return _attended(q, k_cache, v_cache, block_table, cut, out, arrivals, tuning, scale=scale, window=window)


def paged_run(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks: Tensor,
    start: int,
    *,
    scale: float,
    window: int | None,
    out: Tensor | None = None,
    tuning: DecodeTuning | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of consecutive tokens of one sequence, q `[tokens, heads, head_dim]` at positions [start,
    start + tokens), each over all that comes up to itself: for few tokens behind many keys, which are read
    once for every `run_tokens` of them.

    k_cache and v_cache as in `paged_decode`, with the tokens' own keys and values in them; blocks int32 or
    int64, the sequence's in order. Returns what `paged_decode` does.
    """
    tokens, heads, dim = q.shape
    assert start >= 0, start
    if tuning is None:
        tuning = replace(decode_tuning(dim, q.element_size(), k_cache.shape[1]), workers_per_sm=2, least=1)
    together = run_tokens(heads // k_cache.shape[2], dim * q.element_size())
    cut = _Cut(triton.cdiv(tokens, together), together, start + tokens, None, start)
    return _attended(
        q,
        k_cache,
        v_cache,
        blocks[None].expand(cut.count, -1),
        cut,
        out,
        None,
        tuning,
        scale=scale,
        window=window,
    )


def placed_run(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks: Tensor,
    where: Tensor,
    *,
    scale: float,
    window: int | None,
    max_length: int,
) -> tuple[Tensor, Tensor]:
    """`paged_run` of a run whose place is read on the device: fit for capture in a CUDA graph.

    where: int32 `[2]`, the position of the first token and how many there are, at most q's; the others are
    padding and answer 0. `max_length` bounds where the run may end, and only sizes the grid.
    """
    tokens, heads, dim = q.shape
    assert where.dtype == torch.int32
    tuning = replace(decode_tuning(dim, q.element_size(), k_cache.shape[1]), workers_per_sm=2, least=1)
    together = run_tokens(heads // k_cache.shape[2], dim * q.element_size())
    cut = _Cut(triton.cdiv(tokens, together), together, max_length, where, -1)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    return _attended(
        q,
        k_cache,
        v_cache,
        blocks[None].expand(cut.count, -1),
        cut,
        out,
        None,
        tuning,
        scale=scale,
        window=window,
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """What is attended to as sequences of their own, and their lengths, as a tensor or by where the tokens
    begin."""

    count: int
    tokens: int
    """Of each; of the last perhaps fewer."""
    longest: int
    lengths: Tensor | None
    """Or where the run is, if `start` is -1."""
    start: int = 0


def _attended(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    cut: _Cut,
    out: Tensor | None,
    arrivals: Tensor | None,
    tuning: DecodeTuning,
    *,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    queries, heads, dim = q.shape
    kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    assert heads % kv_heads == 0, (q.shape, k_cache.shape)
    assert block_size & (block_size - 1) == 0, block_size
    assert 1 <= dim <= 256, dim
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    assert q.stride(2) == k_cache.stride(3) == table.stride(1) == 1
    assert q.dtype == k_cache.dtype == v_cache.dtype
    group = heads // kv_heads
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    if queries == 0:
        return out, lse
    early = launches_early()
    seen = cut.longest if window is None else min(cut.longest, window + cut.tokens - 1 + tuning.tile)
    wanted = multiprocessors(q.device) * tuning.workers_per_sm
    workers = _workers(kv_heads, cut.count, triton.cdiv(max(seen, 1), tuning.tile), wanted)
    cols = max(16, triton.next_power_of_2(dim))
    part_out = torch.empty(workers, 2, heads * cut.tokens, cols, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(workers, 2, heads * cut.tokens, dtype=torch.float32, device=q.device)
    ends = torch.empty(cut.count + 1 if arrivals is None else 0, dtype=torch.int32, device=q.device)
    join_rows = triton.next_power_of_2(group)
    overlap = (tuning.overlap or early) and arrivals is None
    run = 1 if cut.lengths is None else 2 if cut.start < 0 else 0
    decode[(kv_heads, workers)](
        q,
        k_cache,
        v_cache,
        table,
        ends if cut.lengths is None else cut.lengths,
        out,
        lse,
        part_out,
        part_lse,
        ends,
        ends if arrivals is None else arrivals,
        scale * LOG2_E.value,
        window or 0,
        cut.count,
        workers,
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        table.stride(0),
        out.stride(0),
        out.stride(1),
        cut.start,
        queries,
        HEADS=heads,
        GROUP=group,
        TOKENS=cut.tokens,
        RUN=run,
        ROWS=max(16, triton.next_power_of_2(group * cut.tokens)),
        DIM=dim,
        COLS=cols,
        BLOCK=block_size,
        TILE=tuning.tile,
        BATCH=_batch_class(cut.count),
        WINDOWED=window is not None,
        DEPTH=tuning.depth,
        WIDEN=q.device.type == "cpu",
        LEAST=tuning.least,
        OVERLAP=overlap,
        EARLY=early,
        JOINS=arrivals is not None,
        JOIN_ROWS=join_rows,
        JOIN_PARTS=max(1, min(8, 4096 // (join_rows * cols))),
        num_warps=tuning.warps,
        **early_options(early),
        **({"maxnreg": _registers(tuning)} if arrivals is not None and q.is_cuda else {}),
    )
    if arrivals is not None:
        return out, lse
    wide = heads * cut.tokens
    rows, parts = (1, 64) if cut.count * wide <= 1024 else (min(4, triton.next_power_of_2(wide)), 4)
    join[(triton.cdiv(wide, rows), cut.count)](
        out,
        lse,
        part_out,
        part_lse,
        ends,
        ends if cut.lengths is None else cut.lengths,
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
        num_warps=8 if parts > 4 else 4,
        **early_options(overlap),
    )
    return out, lse


def _batch_class(batch: int) -> int:
    """Rows of lengths a program scans: few classes, so that few kernels are compiled. To scan 256 takes
    hardly longer than 16."""
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
    """K and V of one token to its slot."""
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
    """Write new keys and values `[tokens, kv_heads, head_dim]` (strided views) into pages, in one kernel.

    k_cache, v_cache `[blocks, block_size, kv_heads, head_dim]`; slots int64 `[tokens]`, block * block_size +
    offset, -1 writes nothing.
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
        ROWS=triton.next_power_of_2(heads),
        COLS=triton.next_power_of_2(dim),
        BLOCK=k_cache.shape[1],
        num_warps=4,
    )
