"""Attends over pages by split-K: the kernel `decode` attends, `joins.join` merges partial results.

The visible keys of all sequences are cut into tiles. The tiles of the whole batch are laid in one row, and
that row is cut into equal runs, one for each worker and KV head. So one sequence of a million tokens and a
batch of ragged ones keep every multiprocessor busy for the same time. The grid depends on no length: between
two steps only a tensor of lengths changes. Cuts are moved to the ends of sequences if that is nearly as even,
since each sequence that a worker begins costs it the time of some tiles. A sequence inside one run is
finished by its worker. A sequence that crosses runs leaves a partial output and log-sum-exp in each. `join`
merges these. Where the caller lends counters, the last worker to arrive does, which saves a launch.

Why this is safe. A worker has at most two unfinished sequences: the one that it continues, and the one that
goes on after it. Partial 0 of a worker is the sequence that its run opens with, partial 1 one that begins
inside. Each is written by one program. The join computes from the same lengths which partials were written,
and reads only those. The second kernel comes after the first in stream order. Within a launch each worker
counts itself in after a barrier behind its partial, by an atomic addition that releases and acquires. The one
that finds all others counted sees what they wrote, is alone, and resets the counter. No program waits for
another. Where launches may be early (`kernels.pdl_launches`), lengths are read before the kernels before this
one have ended: they belong to the step, and the last launch that was not early came after them. All else is
read, and everything written, behind `gdc_wait`.

A chunk of one sequence is divided the same way. Every few of its tokens are a sequence that ends with the
last of them. Their query heads stand where one token's do, and each sees the keys up to its own position. All
share one row of the table. Pieces of several chunks are sequences too, and each names its row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.triton.joins import joined
from penstock.ops.triton.scores import LN_2, scaled, with_sinks


@triton.jit  # type: ignore[untyped-decorator]
def _first_tile(length, window, TILE: tl.constexpr, WINDOWED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the tile of the oldest visible key."""
    return tl.maximum(length - window, 0) // TILE if WINDOWED else length * 0


@triton.jit  # type: ignore[untyped-decorator]
def _tiles(length, window, TILE: tl.constexpr, WINDOWED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return how many tiles hold at least one visible key."""
    return (length + TILE - 1) // TILE - _first_tile(length, window, TILE, WINDOWED)


@triton.jit  # type: ignore[untyped-decorator]
def _divided(spans, total, workers, LEAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the tiles of a run, and of a piece.

    All tiles are laid in a row so that every sequence takes whole pieces, the last of which may lack some
    tiles. Runs are whole pieces. Sequences of about one length, one or two for a worker, get pieces that fill
    the workers nearly as well as equal runs do: then no run holds the end of one and the beginning of
    another. Otherwise a piece is a tile. With many sequences for each worker, all would begin one at the same
    moments, and none would read meanwhile.
    """
    run = tl.maximum((total + workers - 1) // workers, LEAST)
    there = tl.maximum(tl.sum((spans > 0).to(tl.int32), 0), 1)
    each = tl.maximum(workers // there, 1)  # Workers for a sequence.
    piece = tl.maximum((tl.max(spans, 0) + each - 1) // each, LEAST)
    pieces = tl.sum((spans + piece - 1) // piece, 0)
    even = piece * tl.maximum((pieces + workers - 1) // workers, 1)
    aligned = (even <= run + 2 + run // 16) & (even <= 2 * piece)
    return tl.where(aligned, even, run), tl.where(aligned, piece, 1)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["window", "batch", "workers", "s_table", "begins", "queries", "root"],
    do_not_specialize_on_alignment=["table", "lengths", "arrivals", "limits", "bits"],
)
def decode(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    table,
    lengths,
    out,
    lse,
    part_out,
    part_lse,
    ends,
    arrivals,
    sinks,
    limits,
    bits,
    scale_log2,
    window,
    batch,
    workers,
    s_q,
    s_q_head,
    s_block,
    s_token,
    s_kv_head,
    s_table,
    s_out,
    s_out_head,
    begins,
    queries,
    root,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    RUN: tl.constexpr,
    TREE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BATCH: tl.constexpr,
    WINDOWED: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
    LEAST: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
    JOINS: tl.constexpr,
    JOIN_ROWS: tl.constexpr,
    JOIN_PARTS: tl.constexpr,
    LSE: tl.constexpr,
    SINKS: tl.constexpr,
    CAP: tl.constexpr,
) -> None:
    """Attend with one worker's run of tiles for one KV head. Grid [kv_heads, workers].

    Neighbours read neighbouring bytes of the same blocks.

    RUN: the sequences are one, cut at every TOKENS of its last `queries` tokens, which begin at `begins`; no
        lengths are read then. If it is 2, both numbers are read where lengths would be. If it is 3, the
        sequences are pieces of several, and `lengths` are `[4, batch]`, as RunBatch.pieces has them.
    TREE: whether the tokens of a run are a tree, whose keys begin at `root`. Each sees the keys before, and
        of those from there on the ones of its `bits`. `limits` have the position behind each, from which
        windows count.
    LSE: whether the log-sum-exp is written.
    SINKS: whether sinks weigh on the output: `sinks` are `[heads]`.
    CAP: soft cap of scores, 0 for none.
    """
    if OVERLAP or EARLY:
        gdc_launch_dependents()
    kv_head, worker = tl.program_id(0), tl.program_id(1)
    rows, cols, keys = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, TILE)
    col_in = cols < DIM
    token = rows // GROUP  # Of a sequence that ends with several tokens: which of them.
    row_in = rows < GROUP * TOKENS
    heads = kv_head * GROUP + rows - token * GROUP
    part_heads = heads + token * HEADS
    inside = row_in[:, None] & col_in[None, :]
    seqs = tl.arange(0, BATCH)
    SWEEPS: tl.constexpr = 2 if RUN and not WINDOWED else 1
    reach = window + TOKENS - 1
    if TREE:  # A token far behind in memory may be near.
        reach = window + begins + queries - root - 1
    if RUN:
        if RUN == 2:
            begins, queries = tl.load(lengths), tl.load(lengths + 1)
        if RUN == 3:
            spans = _tiles(tl.load(lengths + seqs, mask=seqs < batch, other=0), reach, TILE, WINDOWED)
        else:
            spans = _tiles(begins + tl.minimum((seqs + 1) * TOKENS, queries), reach, TILE, WINDOWED)
            spans = tl.where((seqs < batch) & (seqs * TOKENS < queries), spans, 0)
    else:
        spans = _tiles(
            tl.maximum(tl.load(lengths + seqs, mask=seqs < batch, other=0), 0), window, TILE, WINDOWED
        )
    run, piece = _divided(spans, tl.sum(spans, 0), workers, LEAST)
    places = (spans + piece - 1) // piece * piece
    stops = tl.cumsum(places, 0)
    total = tl.sum(places, 0)
    at = tl.minimum(worker * run, total)
    stop = tl.minimum(at + run, total)
    seq = tl.sum((stops <= at).to(tl.int32), 0)
    count = tl.sum((stops < stop).to(tl.int32), 0) - seq + 1
    begin = tl.sum(tl.where(stops <= at, places, 0), 0)  # Start of this sequence in the row of all tiles.
    if EARLY:
        gdc_wait()
    if JOINS:
        if tl.sum(((spans == 0) & (seqs < batch)).to(tl.int32), 0) > 0:
            for turn in tl.range(0, (batch - worker + workers - 1) // workers):
                empty = worker + turn * workers
                if tl.load(lengths + empty) <= 0:
                    blank = out + empty.to(tl.int64) * s_out + heads[:, None] * s_out_head + cols[None, :]
                    tl.store(blank, tl.zeros([ROWS, COLS], out.dtype.element_ty), mask=inside)
                    if LSE:
                        nothing = tl.full([ROWS], float("-inf"), tl.float32)
                        tl.store(lse + empty * HEADS + heads, nothing, mask=row_in)
    elif (kv_head == 0) & (worker == 0):
        tl.store(ends + seqs, stops, mask=seqs < batch)
        tl.store(ends + batch, run)
    opened_at = at
    if at < stop:
        k_base = k_cache + kv_head * s_kv_head
        v_base = v_cache + kv_head * s_kv_head
        inner = keys[:, None] * s_token + cols[None, :]
        for _ in tl.range(0, count, num_stages=1):
            first_seq = seq.to(tl.int64) * TOKENS  # Its first query's place among all.
            row = table + seq.to(tl.int64) * s_table
            if RUN:
                if RUN == 3:
                    length, own = tl.load(lengths + seq), tl.load(lengths + batch + seq)
                    first_seq = tl.load(lengths + 2 * batch + seq).to(tl.int64)
                    row = table + tl.load(lengths + 3 * batch + seq).to(tl.int64) * s_table
                else:
                    length = begins + tl.minimum((seq + 1) * TOKENS, queries)
                    own = tl.minimum(TOKENS, queries - seq * TOKENS)
                row_in = rows < GROUP * own
                limit = length - own + 1 + token
            else:
                length = tl.maximum(tl.load(lengths + seq), 0)
            span = _tiles(length, reach, TILE, WINDOWED)
            end = begin + (span + piece - 1) // piece * piece
            upto = tl.minimum(begin + span, stop)
            if upto > at:  # an empty sequence between two others has no tiles
                oldest = tl.maximum(length - window, 0) if WINDOWED else 0
                shift = _first_tile(length, reach, TILE, WINDOWED) - begin
                query = tl.load(
                    q + first_seq * s_q + (heads * s_q_head + token * s_q)[:, None] + cols[None, :],
                    mask=row_in[:, None] & col_in[None, :],
                    other=0.0,
                )
                if WIDEN:
                    query = query.to(tl.float32)
                if TREE:
                    limit = tl.load(limits + first_seq + token, mask=row_in, other=0)
                    sight = tl.load(bits + first_seq + token, mask=row_in, other=0)
                top = tl.full([ROWS], float("-inf"), tl.float32)
                weight = tl.zeros([ROWS], tl.float32)
                acc = tl.zeros([ROWS, COLS], tl.float32)
                first, last = at + shift, upto + shift
                # Tiles of which every token of a run sees all come first, and need no mask.
                for sweep in tl.static_range(SWEEPS):
                    until = last
                    if sweep + 1 < SWEEPS:
                        clear = (root if TREE else length - own + 1) // TILE
                        until = tl.minimum(tl.maximum(clear, first), last)
                    # a table entry must arrive before the address of its keys is known: the compiler gives
                    # each of the two loads DEPTH stages
                    for tile in tl.range(first, until, num_stages=2 * DEPTH + 1):
                        pos = tile * TILE + keys
                        seen = pos < length
                        if TILE > BLOCK:  # a tile of several blocks: one table entry per key
                            block = tl.load(row + pos // BLOCK, mask=seen, other=0).to(tl.int64)
                            place = (block * s_block + (pos % BLOCK) * s_token)[:, None] + cols[None, :]
                            k_at, v_at = k_base + place, v_base + place
                        else:  # a tile inside one block: one address, and offsets that do not change
                            block = tl.load(row + tile * TILE // BLOCK).to(tl.int64)
                            start = block * s_block + tile * TILE % BLOCK * s_token
                            k_at, v_at = k_base + start + inner, v_base + start + inner
                        here = seen[:, None] if COLS == DIM else seen[:, None] & col_in[None, :]
                        k, v = tl.load(k_at, mask=here, other=0.0), tl.load(v_at, mask=here, other=0.0)
                        if WIDEN:  # the interpreter cannot multiply bf16; the products are the same
                            k, v = k.to(tl.float32), v.to(tl.float32)
                        score = scaled(tl.dot(query, tl.trans(k), input_precision="ieee"), scale_log2, CAP)
                        if sweep + 1 == SWEEPS:
                            if TREE:
                                behind = tl.minimum(tl.maximum(pos - root, 0), 63).to(tl.int64)
                                among = ((sight[:, None] >> behind[None, :]) & 1) != 0
                                before = pos[None, :] < root
                                if WINDOWED:
                                    before = before & (pos[None, :] >= (limit - window)[:, None])
                                visible = before | (among & (pos >= root)[None, :] & seen[None, :])
                            elif RUN:
                                visible = pos[None, :] < limit[:, None]
                                if WINDOWED:
                                    visible = visible & (pos[None, :] >= (limit - window)[:, None])
                            else:
                                visible = (seen & (pos >= oldest) if WINDOWED else seen)[None, :]
                            score = tl.where(visible, score, float("-inf"))
                        higher = tl.maximum(top, tl.max(score, 1))
                        floor = higher
                        if RUN and sweep + 1 == SWEEPS:  # A tile may lie beyond some of the tokens.
                            floor = tl.where(higher == float("-inf"), 0.0, higher)
                        p = tl.exp2(score - floor[:, None])
                        fade = tl.exp2(top - floor)
                        weight = weight * fade + tl.sum(p, 1)
                        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
                        top = higher
                    first = until
                if RUN:
                    weight = tl.where(weight > 0.0, weight, 1.0)
                acc = acc / weight[:, None]
                level = (top + tl.log2(weight)) * LN_2
                inside = row_in[:, None] & col_in[None, :]
                if (at == begin) & (upto == begin + span):
                    answer = (
                        out
                        + first_seq * s_out
                        + (heads * s_out_head + token * s_out)[:, None]
                        + cols[None, :]
                    )
                    acc = with_sinks(acc, level, sinks, heads, row_in, SINKS)
                    tl.store(answer, acc.to(out.dtype.element_ty), mask=inside)
                    if LSE:
                        tl.store(lse + first_seq * HEADS + part_heads, level, mask=row_in)
                else:
                    part = (worker * 2 + (at > opened_at).to(tl.int32)) * (HEADS * TOKENS) + part_heads
                    tl.store(part_out + part[:, None] * COLS + cols[None, :], acc, mask=inside)
                    tl.store(part_lse + part, level, mask=row_in)
                    if JOINS:
                        first, last = begin // run, (end - 1) // run
                        counter = arrivals + seq * tl.num_programs(0) + kv_head
                        tl.debug_barrier()  # all threads' stores before the count of one
                        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last - first:
                            few = tl.arange(0, JOIN_ROWS)
                            some = kv_head * GROUP + few
                            opens = (begin > first * run).to(tl.int32)
                            whole, peak = joined(
                                part_out,
                                part_lse,
                                first,
                                last,
                                opens,
                                some,
                                few < GROUP,
                                HEADS,
                                DIM,
                                COLS,
                                JOIN_ROWS,
                                JOIN_PARTS,
                                4,
                            )
                            whole = with_sinks(whole, peak, sinks, some, few < GROUP, SINKS)
                            target = (
                                out + seq.to(tl.int64) * s_out + some[:, None] * s_out_head + cols[None, :]
                            )
                            tl.store(
                                target,
                                whole.to(out.dtype.element_ty),
                                mask=(few < GROUP)[:, None] & col_in[None, :],
                            )
                            if LSE:
                                tl.store(lse + seq * HEADS + some, peak, mask=few < GROUP)
                            tl.store(counter, 0)
            at = tl.minimum(end, stop)
            begin = end
            seq += 1
