"""Attention kernels for short queries: paged decode with balanced split-K, the log-sum-exp merge, and the
write of new keys and values.

How decode divides its work. The visible keys of all sequences are cut into tiles, the tiles of the whole
batch are laid in one row, and that row is cut into equal runs, one per worker and KV head. So one sequence of
a million tokens and a batch of ragged ones keep every multiprocessor busy for the same time, the grid depends
on no length, and nothing but a tensor of lengths changes between two steps. Where that is nearly as even,
cuts are moved to where sequences end, since each sequence that a worker begins costs it some tiles' time. A
sequence inside one run is finished by its worker. One that crosses runs leaves a partial output and
log-sum-exp per run, which a second small kernel joins, or, where the caller lends counters, the last of its
workers to arrive: that saves the launch.

Why this is safe. A worker has at most two unfinished sequences, the one it continues and the one that goes on
after it: partial 0 of a worker is the sequence that its run opens with, partial 1 one that begins inside.
Each is written by one program; the join reads only those that the same arithmetic over the same lengths says
were written. The second kernel comes after the first in stream order. Within a launch each worker counts
itself in after a barrier behind its partial, by an atomic addition that releases and acquires; the one that
finds all others counted sees what they wrote, is alone, and sets the counter back. Nobody waits for anybody.
Where launches may be early (`kernels.early_launches`), lengths are read before what came before this has
ended: they are of the step, and the last launch that was not early came after them. All else is read, and
everything written, behind `gdc_wait`.

A short piece of one sequence is divided the same way: every few of its tokens are a sequence that ends with
the last of them, their query heads stand where one token's do, and each sees what comes up to its own place.
All have one row of the table.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.kernels import early_options, launches_early
from penstock.ops.runs import run_tokens

_FEW = 4
"""Sequences for which parts are joined by a second launch; also where it may not be early, lest bits depend
on that."""
_ALONE = 3
"""Programs of each multiprocessor that decode so few, at least."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """How decode attention is cut: keys a tile, warps a program, tiles in flight per program, programs per
    multiprocessor."""

    tile: int
    warps: int
    depth: int
    workers_per_sm: int
    overlap: bool = False
    """Launch the join while decode still runs; it waits on the device."""
    least: int = 1
    """Tiles of a run, at least: a run of one is over before it is under way, and makes one more part to
    join."""


def decode_tuning(head_dim: int, itemsize: int, block_size: int) -> DecodeTuning:
    """The one place for constants. 32 KiB of K and V a tile keeps enough bytes in flight; a tile inside one
    block needs one table entry."""
    row = max(16, triton.next_power_of_2(head_dim)) * itemsize
    tile = min(64, max(16, 16384 // row))
    if itemsize > 2:  # exact fp32 products go through plain registers
        tile = min(tile, 32)
    if block_size >= 32:
        tile = min(tile, block_size)
    whole = tile * row >= 16384
    return DecodeTuning(
        tile=tile, warps=4, depth=2 if whole else 3, workers_per_sm=2 if whole else 4, least=2
    )


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; on the CPU, where kernels are interpreted, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit  # type: ignore[untyped-decorator]
def _first_tile(length, window, TILE: tl.constexpr, WINDOWED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tile of the oldest visible key."""
    return tl.maximum(length - window, 0) // TILE if WINDOWED else length * 0


@triton.jit  # type: ignore[untyped-decorator]
def _tiles(length, window, TILE: tl.constexpr, WINDOWED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tiles that hold at least one visible key."""
    return (length + TILE - 1) // TILE - _first_tile(length, window, TILE, WINDOWED)


@triton.jit  # type: ignore[untyped-decorator]
def _divided(spans, total, workers, LEAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tiles of a run, and of a piece. All tiles are laid in a row so that every sequence takes whole pieces,
    the last of which may lack some tiles, and runs are whole pieces.

    Sequences of about one length, one or two for a worker, are in pieces that fill the workers nearly as well
    as equal runs do: then no run holds the end of one and the beginning of another. Else a piece is a tile:
    with many sequences for each worker, all would begin one at the same moments, and none read meanwhile.
    """
    run = tl.maximum((total + workers - 1) // workers, LEAST)
    there = tl.maximum(tl.sum((spans > 0).to(tl.int32), 0), 1)
    each = tl.maximum(workers // there, 1)  # Workers for a sequence.
    piece = tl.maximum((tl.max(spans, 0) + each - 1) // each, LEAST)
    pieces = tl.sum((spans + piece - 1) // piece, 0)
    even = piece * tl.maximum((pieces + workers - 1) // workers, 1)
    aligned = (even <= run + 2 + run // 16) & (even <= 2 * piece)
    return tl.where(aligned, even, run), tl.where(aligned, piece, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _joined(  # type: ignore[no-untyped-def]
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
    """A sequence's partials of workers [first, last], of ROWS heads, PARTS at a time: their output and
    log-sum-exp.

    opens: 1 if the sequence begins inside the first worker's run. With STAGES above 1 that many less one are
    on their way at a time. BLIND: whether there may be partials of no key, whose log-sum-exp is -inf.
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


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["window", "batch", "workers", "s_table", "begins", "queries"],
    do_not_specialize_on_alignment=["table", "lengths", "arrivals"],
)
def _decode(  # type: ignore[no-untyped-def]
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
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    RUN: tl.constexpr,
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
) -> None:
    """One worker's run of tiles for one KV head. Grid [kv_heads, workers]: neighbours read neighbouring bytes
    of the same blocks.

    RUN: the sequences are one, cut at every TOKENS of its last `queries` tokens, which begin at `begins`; no
    lengths are read then. If it is 2, both numbers are read where lengths would be.
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
    reach = window + TOKENS - 1
    if RUN:
        if RUN == 2:
            begins, queries = tl.load(lengths), tl.load(lengths + 1)
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
    begin = tl.sum(
        tl.where(stops <= at, places, 0), 0
    )  # where the sequence at hand starts in the row of all tiles
    if EARLY:
        gdc_wait()
    if JOINS:
        if tl.sum(((spans == 0) & (seqs < batch)).to(tl.int32), 0) > 0:
            for turn in tl.range(0, (batch - worker + workers - 1) // workers):
                empty = worker + turn * workers
                if tl.load(lengths + empty) <= 0:
                    blank = out + empty.to(tl.int64) * s_out + heads[:, None] * s_out_head + cols[None, :]
                    tl.store(blank, tl.zeros([ROWS, COLS], out.dtype.element_ty), mask=inside)
                    tl.store(
                        lse + empty * HEADS + heads, tl.full([ROWS], float("-inf"), tl.float32), mask=row_in
                    )
    elif (kv_head == 0) & (worker == 0):
        tl.store(ends + seqs, stops, mask=seqs < batch)
        tl.store(ends + batch, run)
    opened_at = at
    if at < stop:
        k_base = k_cache + kv_head * s_kv_head
        v_base = v_cache + kv_head * s_kv_head
        inner = keys[:, None] * s_token + cols[None, :]
        for _ in tl.range(0, count, num_stages=1):
            if RUN:
                length = begins + tl.minimum((seq + 1) * TOKENS, queries)
                own = tl.minimum(TOKENS, queries - seq * TOKENS)
                row_in = rows < GROUP * own
                limit = length - own + 1 + token
            else:
                length = tl.maximum(tl.load(lengths + seq), 0)
            first_seq = seq.to(tl.int64) * TOKENS  # Its first query's place among all.
            span = _tiles(length, reach, TILE, WINDOWED)
            end = begin + (span + piece - 1) // piece * piece
            upto = tl.minimum(begin + span, stop)
            if upto > at:  # an empty sequence between two others has no tiles
                oldest = tl.maximum(length - window, 0) if WINDOWED else 0
                shift = _first_tile(length, reach, TILE, WINDOWED) - begin
                row = table + seq.to(tl.int64) * s_table
                query = tl.load(
                    q + first_seq * s_q + (heads * s_q_head + token * s_q)[:, None] + cols[None, :],
                    mask=row_in[:, None] & col_in[None, :],
                    other=0.0,
                )
                if WIDEN:
                    query = query.to(tl.float32)
                top = tl.full([ROWS], float("-inf"), tl.float32)
                weight = tl.zeros([ROWS], tl.float32)
                acc = tl.zeros([ROWS, COLS], tl.float32)
                # a table entry must arrive before the address of its keys is known: the compiler gives each
                # of the two loads DEPTH stages
                for tile in tl.range(at + shift, upto + shift, num_stages=2 * DEPTH + 1):
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
                    k = tl.load(k_at, mask=here, other=0.0)
                    v = tl.load(v_at, mask=here, other=0.0)
                    if WIDEN:  # the interpreter cannot multiply bf16; the products are the same
                        k, v = k.to(tl.float32), v.to(tl.float32)
                    score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale_log2
                    if RUN:
                        visible = pos[None, :] < limit[:, None]
                        if WINDOWED:
                            visible = visible & (pos[None, :] >= (limit - window)[:, None])
                        score = tl.where(visible, score, float("-inf"))
                        higher = tl.maximum(top, tl.max(score, 1))
                        floor = tl.where(
                            higher == float("-inf"), 0.0, higher
                        )  # A tile may lie beyond some of the tokens.
                    else:
                        if WINDOWED:
                            seen = seen & (pos >= oldest)
                        score = tl.where(seen[None, :], score, float("-inf"))
                        higher = tl.maximum(top, tl.max(score, 1))
                        floor = higher
                    p = tl.exp2(score - floor[:, None])
                    fade = tl.exp2(top - floor)
                    weight = weight * fade + tl.sum(p, 1)
                    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
                    top = higher
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
                    tl.store(answer, acc.to(out.dtype.element_ty), mask=inside)
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
                            whole, peak = _joined(
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
                            target = (
                                out + seq.to(tl.int64) * s_out + some[:, None] * s_out_head + cols[None, :]
                            )
                            tl.store(
                                target,
                                whole.to(out.dtype.element_ty),
                                mask=(few < GROUP)[:, None] & col_in[None, :],
                            )
                            tl.store(lse + seq * HEADS + some, peak, mask=few < GROUP)
                            tl.store(counter, 0)
            at = tl.minimum(end, stop)
            begin = end
            seq += 1


@triton.jit(do_not_specialize=["batch", "queries"])  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    out,
    lse,
    part_out,
    part_lse,
    ends,
    lengths,
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
) -> None:
    """Join the partials of one sequence for ROWS heads, and write the empty answer of an empty sequence. Grid
    [heads / ROWS, batch]; where sequences end with several tokens there are so many times the heads, one
    token's behind another's."""
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
        head_in = (heads < HEADS * TOKENS) & (seq * TOKENS + token < queries)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        acc = tl.zeros([ROWS, COLS], tl.float32)
        if end > begin:
            opens = (begin > first * run).to(tl.int32)
            wide: tl.constexpr = HEADS * TOKENS
            acc, top = _joined(
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
        query = seq.to(tl.int64) * TOKENS + token
        where = out + (query * s_out + (heads - token * HEADS) * s_out_head)[:, None] + cols[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=head_in[:, None] & (cols < DIM)[None, :])
        tl.store(lse + query * HEADS + heads - token * HEADS, top, mask=head_in)


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
    _decode[(kv_heads, workers)](
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
    _join[(triton.cdiv(wide, rows), cut.count)](
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
    """ROWS rows of (token, head), each read and written by this program alone."""
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
    tl.store(a_at, mixed.to(out_a.dtype.element_ty), mask=inside)
    tl.store(la_at, top + tl.log(share), mask=row_in)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Merge attention over two disjoint sets of keys, in place into a: exactly what attention over both would
    have said.

    out `[tokens, heads, head_dim]`, any float dtype, `head_dim` contiguous; lse fp32 `[tokens, heads]` of any
    strides, -inf where a side saw no key: what its out holds there does not matter. Where neither saw one the
    answer is 0 and -inf.
    """
    tokens, heads, dim = out_a.shape
    assert out_a.shape == out_b.shape, (out_a.shape, out_b.shape)
    assert lse_a.shape == lse_b.shape == (tokens, heads), (lse_a.shape, lse_b.shape, out_a.shape)
    assert out_a.stride(2) == out_b.stride(2) == 1
    assert lse_a.dtype == lse_b.dtype == torch.float32
    if tokens == 0:
        return
    cols = triton.next_power_of_2(dim)
    rows = max(1, 2048 // cols)
    _merge[(triton.cdiv(tokens * heads, rows),)](
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
