"""Folds a tile of keys into attention states (an output and a log-sum-exp), and merges two states.

`fold_tile` cuts the keys into equal runs, one for each worker and KV head. The queries are stacked where the
query heads of a group stand, in rows that the tensor cores would otherwise multiply for nothing. So the tile
is read once for all of them. Each worker leaves a partial output and log-sum-exp. A second small kernel folds
all of these into the state, so that nothing is copied or merged separately.

Why this is safe. In `merge_states` a row of a state is read and written by one program. In `fold_tile` a
partial is written by one program and read by the second kernel, which comes after the first in stream order.
A row of the state is read and written by one program of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.inputs import LayerAttention
from penstock.ops.triton.scores import LN_2, scaled, score_factor
from penstock.ops.triton.tuning import DecodeTuning, cdiv, decode_tuning, multiprocessors, next_power_of_2

STACKED = 32
"""Most query heads, over all queries, that share one KV head of a tile.

More take registers from keys in flight.
"""


@triton.jit(do_not_specialize=["keys", "run", "queries"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,
    index,
    k,
    v,
    part_out,
    part_lse,
    scale_log2,
    keys,
    run,
    queries,
    s_q,
    s_q_head,
    s_token,
    s_kv_head,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,
    INDEXED: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
    CAP: tl.constexpr,
) -> None:
    """Attend to keys [worker * run, + run) for one KV head.

    Grid [kv_heads, workers]; every worker has keys.
    """
    kv_head, worker = tl.program_id(0), tl.program_id(1)
    rows, cols, at = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, TILE)
    which, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    row_in = which < queries
    col_in = cols < DIM
    if INDEXED:
        which = tl.load(index + which, mask=row_in, other=0)
    query = tl.load(
        q + (which.to(tl.int64) * s_q + head * s_q_head)[:, None] + cols[None, :],
        mask=row_in[:, None] & col_in[None, :],
        other=0.0,
    )
    if WIDEN:
        query = query.to(tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    first = worker * run
    stop = tl.minimum(first + run, keys)
    base = first.to(tl.int64) * s_token + kv_head * s_kv_head
    inner = at[:, None] * s_token + cols[None, :]
    for start in tl.range(0, stop - first, TILE, num_stages=DEPTH + 1):
        seen = start + at < stop - first
        here = seen[:, None] if COLS == DIM else seen[:, None] & col_in[None, :]
        place = base + start * s_token + inner
        key = tl.load(k + place, mask=here, other=0.0)
        value = tl.load(v + place, mask=here, other=0.0)
        if WIDEN:  # the interpreter cannot multiply bf16; the products are the same
            key, value = key.to(tl.float32), value.to(tl.float32)
        score = scaled(tl.dot(query, tl.trans(key), input_precision="ieee"), scale_log2, CAP)
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        fade = tl.exp2(top - higher)
        weight = weight * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
        top = higher
    part = (worker * tl.num_programs(0) + kv_head) * ROWS + rows
    tl.store(part_out + part[:, None] * COLS + cols[None, :], acc / weight[:, None], mask=row_in[:, None])
    tl.store(part_lse + part, (top + tl.log2(weight)) * LN_2, mask=row_in)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["workers", "s_lse", "s_lse_head"], do_not_specialize_on_alignment=["lse"]
)
def _fold(  # type: ignore[no-untyped-def]
    out,
    lse,
    index,
    part_out,
    part_lse,
    workers,
    kv_heads,
    s_out,
    s_out_head,
    s_lse,
    s_lse_head,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
    INDEXED: tl.constexpr,
) -> None:
    """Fold all partials of one query head into its state. Grid [heads, queries]."""
    head, query = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, COLS)
    col_in = cols < DIM
    row = tl.load(index + query) if INDEXED else query
    row = row.to(tl.int64)
    state, level_at = out + row * s_out + head * s_out_head + cols, lse + row * s_lse + head * s_lse_head
    top = tl.load(level_at)
    # what a side that has seen nothing holds may be anything, also NaN: it is left out, not multiplied by
    # zero
    acc = tl.where(top == float("-inf"), 0.0, tl.load(state, mask=col_in, other=0.0))
    weight = tl.where(top == float("-inf"), 0.0, 1.0)
    mine = head // GROUP * ROWS + query * GROUP + head % GROUP
    for start in tl.range(0, workers, PARTS):
        worker = start + tl.arange(0, PARTS)
        there = worker < workers
        part = worker * kv_heads * ROWS + mine
        level = tl.load(part_lse + part, mask=there, other=float("-inf"))
        piece = tl.load(
            part_out + part[:, None] * COLS + cols[None, :], mask=there[:, None] & col_in[None, :], other=0.0
        )
        higher = tl.maximum(top, tl.max(level, 0))
        share = tl.where(there, tl.exp(level - higher), 0.0)
        fade = tl.where(top == float("-inf"), 0.0, tl.exp(top - higher))
        weight = weight * fade + tl.sum(share, 0)
        acc = acc * fade + tl.sum(share[:, None] * piece, 0)
        top = higher
    tl.debug_barrier()  # all threads have read the state
    tl.store(state, acc / weight, mask=col_in)
    tl.store(level_at, top + tl.log(weight))


def fits_tile(q: Tensor, k: Tensor, v: Tensor, queries: int) -> bool:
    """Tell whether so many of these queries are few enough, and these keys laid out, for `fold_tile`."""
    heads, dim = q.shape[1:]
    few = queries == 1 or next_power_of_2(queries) * heads <= STACKED * k.shape[1]
    return bool(
        few
        and q.stride(2) == k.stride(2) == 1
        and k.stride() == v.stride()
        and dim <= 256
        and k.dtype == v.dtype == q.dtype
    )


def fold_tile(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor | None = None,
    *,
    layer: LayerAttention,
    tuning: DecodeTuning | None = None,
) -> None:
    """Fold the attention of a few queries over all keys of a tile into their state, in place and exactly.

    The tile is read once.

    out, lse: the state, float32 `[rows, heads, dim]` and `[rows, heads]`; the log-sum-exp is natural, of
        scaled scores, and -inf where nothing was seen yet.
    q: `[rows, heads, dim]`.
    k, v: `[keys, kv_heads, dim]`, of the same strides.
    index: int64, the rows that look; all by default.
    layer: its scale and cap of scores.
    """
    heads, dim = q.shape[1:]
    keys, kv_heads, _ = k.shape
    queries = len(q) if index is None else len(index)
    assert keys > 0, k.shape
    assert out.shape == q.shape, (out.shape, q.shape)
    assert lse.shape == q.shape[:2], (lse.shape, q.shape)
    assert out.dtype == lse.dtype == torch.float32
    assert out.stride(2) == q.stride(2) == k.stride(2) == 1, (out.stride(), q.stride(), k.stride())
    assert k.stride() == v.stride(), (k.stride(), v.stride())
    if queries == 0:
        return
    tuning = tuning or decode_tuning(dim, q.element_size(), 1 << 20)
    group, cols = heads // kv_heads, max(16, next_power_of_2(dim))
    # A power of two of queries, so that few kernels are compiled.
    rows = max(16, next_power_of_2(next_power_of_2(queries) * group))
    tiles = cdiv(keys, tuning.tile)
    wanted = max(1, min(multiprocessors(q.device) * tuning.workers_per_sm // kv_heads, tiles))
    run = cdiv(tiles, wanted) * tuning.tile
    workers = cdiv(keys, run)
    part_out = torch.empty(workers, kv_heads, rows, cols, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(workers, kv_heads, rows, dtype=torch.float32, device=q.device)
    named = q if index is None else index
    _attend[(kv_heads, workers)](
        q,
        named,
        k,
        v,
        part_out,
        part_lse,
        score_factor(layer),
        keys,
        run,
        queries,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        GROUP=group,
        ROWS=rows,
        DIM=dim,
        COLS=cols,
        TILE=tuning.tile,
        INDEXED=index is not None,
        DEPTH=tuning.depth,
        WIDEN=q.device.type == "cpu",
        CAP=layer.cap or 0.0,
        num_warps=tuning.warps,
    )
    _fold[(heads, queries)](
        out,
        lse,
        named,
        part_out,
        part_lse,
        workers,
        kv_heads,
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        lse.stride(1),
        GROUP=group,
        ROWS=rows,
        DIM=dim,
        COLS=cols,
        PARTS=32,
        INDEXED=index is not None,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows", "s_la", "s_la_head", "s_lb", "s_lb_head"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    out_a,
    lse_a,
    out_b,
    lse_b,
    rows,
    s_a,
    s_a_head,
    s_b,
    s_b_head,
    s_la,
    s_la_head,
    s_lb,
    s_lb_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Merge ROWS rows of (token, head). Each row is read and written by this program alone."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_in = row < rows
    token, head = row // HEADS, row % HEADS
    cols = tl.arange(0, COLS)
    inside = row_in[:, None] & (cols < DIM)[None, :]
    a_at = out_a + (token * s_a + head * s_a_head)[:, None] + cols[None, :]
    b_at = out_b + (token * s_b + head * s_b_head)[:, None] + cols[None, :]
    la_at = lse_a + token * s_la + head * s_la_head
    la = tl.load(la_at, mask=row_in, other=float("-inf"))
    lb = tl.load(lse_b + token * s_lb + head * s_lb_head, mask=row_in, other=float("-inf"))
    a = tl.load(a_at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_at, mask=inside, other=0.0).to(tl.float32)
    top = tl.maximum(la, lb)
    floor = tl.where(top == float("-inf"), 0.0, top)
    wa, wb = tl.exp(la - floor), tl.exp(lb - floor)
    both = wa + wb
    share = tl.where(both > 0.0, both, 1.0)
    # a side that saw nothing may hold anything, also NaN: it is left out, not multiplied by zero
    mixed = tl.where((wa > 0.0)[:, None], a * (wa / share)[:, None], 0.0) + tl.where(
        (wb > 0.0)[:, None], b * (wb / share)[:, None], 0.0
    )
    tl.debug_barrier()  # several threads read a row's log-sum-exp, and one replaces it
    tl.store(a_at, mixed.to(out_a.dtype.element_ty), mask=inside)
    tl.store(la_at, top + tl.log(share), mask=row_in)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Merge attention over two disjoint sets of keys, in place into a and exactly.

    Where neither side saw a key the answer is 0 and -inf.

    out_a, out_b: `[tokens, heads, dim]`, any float dtype, `dim` contiguous.
    lse_a, lse_b: float32 `[tokens, heads]` of any strides, -inf where a side saw no key: what its output
        holds there does not matter.
    """
    tokens, heads, dim = out_a.shape
    assert out_a.shape == out_b.shape, (out_a.shape, out_b.shape)
    assert lse_a.shape == lse_b.shape == (tokens, heads), (lse_a.shape, lse_b.shape, out_a.shape)
    assert out_a.stride(2) == out_b.stride(2) == 1
    assert lse_a.dtype == lse_b.dtype == torch.float32
    if tokens == 0:
        return
    cols = next_power_of_2(dim)
    rows = max(1, 2048 // cols)
    _merge[(cdiv(tokens * heads, rows),)](
        out_a,
        lse_a,
        out_b,
        lse_b,
        tokens * heads,
        *out_a.stride()[:2],
        *out_b.stride()[:2],
        *lse_a.stride(),
        *lse_b.stride(),
        HEADS=heads,
        DIM=dim,
        COLS=cols,
        ROWS=rows,
        num_warps=4,
    )
