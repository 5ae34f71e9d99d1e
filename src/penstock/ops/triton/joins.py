"""Merges what `decode` has left of sequences that crossed the runs of several workers."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.triton.scores import with_sinks


@triton.jit  # type: ignore[untyped-decorator]
def joined(  # type: ignore[no-untyped-def]
    part_out,
    part_lse,
    first,
    last,
    opens,
    heads,
    head_in,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    BLIND: tl.constexpr = False,
):
    """Merge a sequence's partials of workers [first, last], of ROWS heads, PARTS at a time.

    Returns their output and log-sum-exp.

    opens: 1 if the sequence begins inside the first worker's run.
    STAGES: one more than the loads in flight.
    BLIND: whether there may be partials without keys, with a log-sum-exp of -inf.
    """
    cols = tl.arange(0, COLS)
    inside = head_in[None, :, None] & (cols < DIM)[None, None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in tl.range(first, last + 1, PARTS, num_stages=STAGES):
        worker = start + tl.arange(0, PARTS)
        there = worker <= last
        slot = tl.where(worker == first, opens, 0)
        part = ((worker * 2 + slot) * HEADS)[:, None] + heads[None, :]
        level = tl.load(
            part_lse + part, mask=there[:, None] & head_in[None, :], other=float("-inf"), cache_modifier=".cg"
        )
        level = tl.where(head_in[None, :], level, 0.0)
        at = part_out + part[:, :, None] * COLS + cols[None, None, :]
        piece = tl.load(at, mask=there[:, None, None] & inside, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(level, 0))
        floor = tl.where(higher == float("-inf"), 0.0, higher) if BLIND else higher
        share = tl.where(there[:, None], tl.exp(level - floor[None, :]), 0.0)
        fade = tl.where(top == float("-inf"), 0.0, tl.exp(top - floor))
        weight = weight * fade + tl.sum(share, 0)
        acc = acc * fade[:, None] + tl.sum(share[:, :, None] * piece, 0)
        top = higher
    return acc / weight[:, None], top + tl.log(weight)


@triton.jit(do_not_specialize=["batch", "queries"])  # type: ignore[untyped-decorator]
def join(  # type: ignore[no-untyped-def]
    out,
    lse,
    part_out,
    part_lse,
    ends,
    lengths,
    sinks,
    batch,
    s_out,
    s_out_head,
    queries,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    RUN: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    WAITS: tl.constexpr,
    LSE: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Join the partials of one sequence for ROWS heads; an empty sequence gets its empty answer.

    Grid [heads / ROWS, batch]. Where sequences end with several tokens there are so many times the heads, one
    token's behind another's.
    """
    heads = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    seq = tl.program_id(1)
    cols = tl.arange(0, COLS)
    if WAITS:
        gdc_launch_dependents()
        gdc_wait()
    if RUN == 2:
        queries = tl.load(lengths + 1)
    begin = tl.load(ends + seq - 1, mask=seq > 0, other=0)
    end = tl.load(ends + seq)
    run = tl.load(ends + batch)
    first = begin // run
    last = (end - 1) // run
    if (end == begin) | (first < last):
        token = heads // HEADS
        query = seq.to(tl.int64) * TOKENS + token
        if RUN == 3:
            there = token < tl.load(lengths + batch + seq)
            query = tl.load(lengths + 2 * batch + seq).to(tl.int64) + token
        else:
            there = query < queries
        head_in = (heads < HEADS * TOKENS) & there
        top = tl.full([ROWS], float("-inf"), tl.float32)
        acc = tl.zeros([ROWS, COLS], tl.float32)
        if end > begin:
            opens = (begin > first * run).to(tl.int32)
            wide: tl.constexpr = HEADS * TOKENS
            acc, top = joined(
                part_out,
                part_lse,
                first,
                last,
                opens,
                heads,
                head_in,
                wide,
                DIM,
                COLS,
                ROWS,
                PARTS,
                1,
                TOKENS > 1,
            )
        acc = with_sinks(acc, top, sinks, heads - token * HEADS, head_in, SINKS)
        where = out + (query * s_out + (heads - token * HEADS) * s_out_head)[:, None] + cols[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=head_in[:, None] & (cols < DIM)[None, :])
        if LSE:
            tl.store(lse + query * HEADS + heads - token * HEADS, top, mask=head_in)
