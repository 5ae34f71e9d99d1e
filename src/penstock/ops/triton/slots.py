"""Kernels by which the device decides which experts of a layer have slots, and fetches those that come.

`expert_step` is the rule of `weights.streaming.slots` in one program of many threads: arrays of a layer fit
in a block. `fetch` copies experts from host memory, which the device reads through the link by itself. Both
are launched like any other kernel, so a recorded step holds them, and the host waits for nothing.

Experts come in parts of nearly equal numbers, the later parts being the larger ones. Each part is fetched by
one launch, and has a table of its own, so that it may be computed while the next one comes. Those that were
there before are in the first table: where a single expert comes, it is in the last part, and they are
computed meanwhile. What comes at rank r without a slot of its own passes through place r modulo `ring` of
`transit`. A part has at most half as many experts as the ring, so what a part writes to was last used some
parts before it (`Places.parts`).

While the link would be idle, from a layer's last part to the next layer's decision, the expert that is
foretold for that layer comes to a place of its own, piece by piece, until the layer has decided: `turn` is
then another. Where it was right, the layer's fetch copies those pieces from there instead of reading them
through the link. All else is as if nothing had been foretold.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.slots import COPIERS, ExpertParts, Places, SlotArrays
from penstock.ops.triton.pointwise import in_turn
from penstock.ops.triton.tuning import next_power_of_2

_CHUNK = 64
"""Experts whose worth is compared with all others' at a time."""
_WORDS, _WARPS = 16384, 16
"""Numbers of 32 bits that each of COPIERS programs copies at a time, and its warps: as fast as any other way
of reading through the link, and nearly all multiprocessors are left to what computes."""
_AGAIN, _TRIES, _PAYS = 64, 64, 8
"""A layer foretells only one step in so many if of so many tries less than one in so many was right."""


@triton.jit(do_not_specialize=["base", "first", "transit", "ring", "parts", "begin"])  # type: ignore[untyped-decorator]
def _expert_step(  # type: ignore[no-untyped-def]
    pairs,
    slot_of,
    expert_of,
    value,
    used,
    counts,
    now,
    turn,
    told,
    decays,
    worths,
    order,
    coming,
    starts,
    tables,
    offsets,
    shares,
    base,
    first,
    transit,
    ring,
    parts,
    begin,
    size,
    last,
    margin,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
    TENSORS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
    PLACES: tl.constexpr,
    TENSOR_COLS: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Decide, and write who comes to which place, `coming` `[2, MOST]`, where each part begins, `starts`, and
    the table of each part. If SHARED, `shares` says of how many missing experts the CPU takes how many.

    worths: float32 `[2, COLS]`, order: int64 `[2, COLS]`, to write in. begin: experts of layers before.
    """
    in_turn(EARLY)
    one = tl.arange(0, COLS)
    there = one < EXPERTS
    time = tl.load(now)
    wanted = (tl.load(pairs + one, mask=there, other=0) > 0) & there
    slot = tl.load(slot_of + one, mask=there, other=0)
    before, when = tl.load(value + one, mask=there, other=0.0), tl.load(used + one, mask=there, other=0)
    worth = before * tl.load(decays + tl.minimum(time - when, last)) + wanted.to(tl.float32)
    at = tl.arange(0, TENSOR_COLS)[None, :]
    offset = tl.load(offsets + at, mask=at < TENSORS, other=0)
    all_asked, all_hits = tl.load(counts), tl.load(counts + 1)
    all_told, all_right = tl.load(counts + 2), tl.load(counts + 3)
    turns, foretold = tl.load(turn), tl.load(told) - begin
    holds = (tl.load(told + 1) == turns) & (foretold >= 0) & (foretold < EXPERTS)
    tl.debug_barrier()  # threads have the same numbers, and one of them changes each
    tl.store(value + one, worth, mask=wanted)
    tl.store(used + one, tl.zeros_like(when) + time, mask=wanted)
    missing = wanted & (slot < 0)
    told_right = missing & holds & (one == foretold)
    key = -worth
    if SHARED:  # What has come ahead is not for the CPU.
        key = tl.where(told_right, float("-inf"), key)
    tl.store(worths + one, tl.where(missing, key, float("inf")))
    tl.store(worths + COLS + one, tl.where(wanted, float("inf"), worth))
    asked, hits = tl.sum(wanted.to(tl.int64), 0), tl.sum((wanted & (slot >= 0)).to(tl.int64), 0)
    tl.store(counts, all_asked + asked)
    tl.store(counts + 1, all_hits + hits)
    right = tl.sum(told_right.to(tl.int64), 0)
    tl.store(counts + 2, all_told + holds.to(tl.int64))
    tl.store(counts + 3, all_right + right)
    tl.store(turn, turns + 1)
    tl.store(starts + parts + 1, tl.where(right > 0, foretold, -1))
    for number in range(parts):
        found = (wanted & (slot >= 0) & (number == 0))[:, None]
        address = base + (first + slot)[:, None] * size + offset
        inside = there[:, None] & (at < TENSORS)
        table = tables + number * EXPERTS * TENSORS
        tl.store(table + one[:, None] * TENSORS + at, tl.where(found, address, 0), mask=inside)
    tl.debug_barrier()  # all worths before any is compared, and all zeros before addresses
    # The number of those that come before an expert is its place among them.
    key = tl.load(worths + one)
    ahead = tl.zeros([COLS], tl.int32)
    for start in range(0, COLS, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(worths + other)
        less = (theirs[None, :] < key[:, None]) | (
            (theirs[None, :] == key[:, None]) & (other[None, :] < one[:, None])
        )
        ahead += tl.sum(less.to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(order + ahead, one.to(tl.int64), mask=missing)
    if SLOTS > 0:
        place = tl.arange(0, WIDE)
        inside = place < SLOTS
        held = tl.load(expert_of + place, mask=inside, other=0)
        giving = tl.where(held < 0, -1.0, tl.load(worths + COLS + tl.maximum(held, 0)))
        giving = tl.where(inside, giving, float("inf"))
        tl.debug_barrier()
        tl.store(worths + 2 * COLS + place, giving)
        tl.debug_barrier()
        before_it = tl.zeros([WIDE], tl.int32)
        for start in range(0, WIDE, CHUNK):
            other = start + tl.arange(0, CHUNK)
            theirs = tl.load(worths + 2 * COLS + other, mask=other < WIDE, other=float("inf"))
            less = (theirs[None, :] < giving[:, None]) | (
                (theirs[None, :] == giving[:, None]) & (other[None, :] < place[:, None])
            )
            before_it += tl.sum(less.to(tl.int32), 1)
        tl.debug_barrier()
        tl.store(order + COLS + before_it, place.to(tl.int64), mask=inside)
    tl.debug_barrier()
    rank = tl.arange(0, PLACES)
    every = tl.sum(missing.to(tl.int32), 0)
    count = every
    if SHARED:
        count -= tl.load(shares + every)
        if SLOTS > 0:  # What is worth a slot gets one, also where the CPU could take all.
            least = tl.load(worths + 2 * COLS + tl.load(order + COLS))
            best = tl.load(value + tl.load(order, mask=every > 0, other=0))
            fits = (least < float("inf")) & ((least < 0) | (best >= margin * least))
            count = tl.where((count == 0) & (every > 0) & fits, 1, count)
    comes = rank < count
    expert = tl.load(order + rank, mask=rank < every, other=0)
    where_to = (transit + rank % ring).to(tl.int64)
    if SLOTS == 0:
        tl.debug_barrier()
    else:
        paired = comes & (rank < SLOTS)
        slot = tl.load(order + COLS + rank, mask=paired, other=0)
        gives = tl.load(worths + 2 * COLS + slot, mask=paired, other=float("inf"))
        mine = tl.load(value + expert, mask=paired, other=0.0)
        some = gives < float("inf")
        change = paired & some & ((gives < 0) | (mine >= margin * tl.where(some, gives, 0.0)))
        left = tl.load(expert_of + slot, mask=change, other=-1)
        tl.debug_barrier()  # all have read who was there
        tl.store(slot_of + left, tl.zeros_like(left) - 1, mask=change & (left >= 0))
        tl.store(expert_of + slot, expert, mask=change)
        tl.store(slot_of + expert, slot, mask=change)
        where_to = tl.where(change, first + slot, where_to)
    tl.store(coming + rank, tl.where(rank < every, expert, -1), mask=rank < MOST)
    tl.store(coming + MOST + rank, where_to, mask=rank < MOST)
    tl.store(starts + rank, (count * rank // parts).to(tl.int64), mask=rank < parts)
    tl.store(starts + parts, count.to(tl.int64))
    if SHARED:
        tl.store(starts + parts + 2, every.to(tl.int64))
    part = ((rank + 1) * parts - 1) // tl.maximum(count, 1)
    table = tables + part.to(tl.int64)[:, None] * (EXPERTS * TENSORS) + expert[:, None] * TENSORS + at
    address = base + where_to[:, None] * size + offset
    tl.store(table, address, mask=(comes & (rank < MOST))[:, None] & (at < TENSORS))


@triton.jit(do_not_specialize=["host", "base", "part", "parts", "ahead"])  # type: ignore[untyped-decorator]
def _fetch(  # type: ignore[no-untyped-def]
    coming,
    starts,
    done,
    host,
    base,
    part,
    parts,
    ahead,
    most,
    size,
    COPIERS: tl.constexpr,
    WORDS: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    """Copy the experts of one part, `size` bytes each, from their places on the host to those on the device:
    one expert after the other, every program some pieces of each. ahead: the place where pieces of one of
    them are already, fetched by AHEAD programs."""
    begin, early = tl.load(starts + part), tl.load(starts + parts + 1)
    words = size // 4
    pieces = tl.cdiv(words, WORDS)
    word = tl.arange(0, WORDS)
    all_pieces = (tl.load(starts + part + 1) - begin).to(tl.int32) * pieces
    for each in range(tl.program_id(0), all_pieces, COPIERS):
        number, piece = begin + each // pieces, each % pieces
        expert = tl.load(coming + number)
        here = (expert == early) & (piece // AHEAD < tl.load(done + piece % AHEAD))
        first = tl.where(here, base + ahead.to(tl.int64) * size, host + expert * size)
        source = first.to(tl.pointer_type(tl.int32))
        target = (base + tl.load(coming + most + number) * size).to(tl.pointer_type(tl.int32))
        at = tl.max_contiguous(tl.multiple_of(piece * WORDS + word, WORDS), WORDS)
        inside = at < words
        got = tl.load(tl.multiple_of(source, 16) + at, mask=inside, other=0)
        tl.store(tl.multiple_of(target, 16) + at, got, mask=inside)


@triton.jit(do_not_specialize=["host", "base", "ahead"])  # type: ignore[untyped-decorator]
def _fetch_ahead(  # type: ignore[no-untyped-def]
    told, turn, done, host, base, ahead, size, COPIERS: tl.constexpr, WORDS: tl.constexpr
) -> None:
    """Copy pieces of the expert that is foretold, of `size` bytes, to the place `ahead` until all have come
    or the device has decided, and write how many this program has copied. host: of the first expert of
    all."""
    expert, when = tl.load(told), tl.load(told + 1)
    if expert < 0:
        return
    source = (host + expert * size).to(tl.pointer_type(tl.int32))
    target = (base + ahead.to(tl.int64) * size).to(tl.pointer_type(tl.int32))
    words = size // 4
    word = tl.arange(0, WORDS)
    start, count = tl.program_id(0) * WORDS, 0
    # All threads must end with the same piece: what an atomic finds is one thread's, and all get it.
    while (start < words) & (tl.atomic_add(turn, 0, sem="relaxed") == when):
        at = tl.max_contiguous(tl.multiple_of(start + word, WORDS), WORDS)
        inside = at < words
        got = tl.load(tl.multiple_of(source, 16) + at, mask=inside, other=0)
        tl.store(tl.multiple_of(target, 16) + at, got, mask=inside)
        start += COPIERS * WORDS
        count += 1
    tl.store(done + tl.program_id(0), count)


@triton.jit(do_not_specialize=["tokens", "most", "begin"])  # type: ignore[untyped-decorator]
def _foretell(  # type: ignore[no-untyped-def]
    scores,
    padding,
    slot_of,
    counts,
    now,
    turn,
    told,
    done,
    tokens,
    most,
    begin,
    s_scores,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
    PADDED: tl.constexpr,
    COPIERS: tl.constexpr,
    TRIES: tl.constexpr,
    PAYS: tl.constexpr,
    AGAIN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write which expert without a slot is likeliest, if it is one of the `most` likeliest of all: by the sum
    of what a softmax of each token's scores says."""
    in_turn(EARLY)
    one = tl.arange(0, COLS)
    there = one < EXPERTS
    likely = tl.zeros([COLS], tl.float32)
    for token in range(tokens):
        score = tl.load(scores + token * s_scores + one, mask=there, other=float("-inf")).to(tl.float32)
        share = tl.exp(score - tl.max(score, 0))
        share = share / tl.sum(share, 0)
        if PADDED:
            share = tl.where(tl.load(padding + token) != 0, 0.0, share)
        likely += share
    slot = tl.load(slot_of + one, mask=there, other=0)
    without = tl.where(there & (slot < 0), likely, -1.0)
    best = tl.max(without, 0)
    expert = tl.min(tl.where(without == best, one, COLS), 0)
    rank = tl.sum((there & (likely > best)).to(tl.int32), 0)
    tries, right = tl.load(counts + 2), tl.load(counts + 3)
    worthwhile = (tries < TRIES) | (right * PAYS >= tries) | (tl.load(now) % AGAIN == 0)
    fetched = (best > 0) & (rank < most) & worthwhile
    tl.store(told, tl.where(fetched, expert + begin, -1).to(tl.int64))
    tl.store(told + 1, tl.load(turn))
    tl.store(done + tl.arange(0, COPIERS), tl.zeros([COPIERS], tl.int32))


def expert_step(
    arrays: SlotArrays,
    pairs: Tensor,
    most: int,
    margin: float,
    places: Places,
    parts: int,
    shares: Tensor | None = None,
) -> ExpertParts:
    """Decide for a layer, and return who comes to which place, the most valuable first, in how many parts.

    pairs: int32 `[experts]`, how many pairs each expert has in this step; at most `most` have any. parts: at
    most `most`. shares: int32 `[experts + 1]`, of so many missing experts how many the CPU takes, the least
    valuable ones; they do not come. But one that is worth a slot always does.
    """
    experts, slots, device = len(pairs), len(arrays.expert_of), pairs.device
    tensors = len(places.offsets)
    cols, wide = max(_CHUNK, next_power_of_2(experts)), max(16, next_power_of_2(max(slots, 1)))
    early = uses_pdl()
    worths = torch.empty(2 * cols + wide, dtype=torch.float32, device=device)
    order = torch.empty(cols + wide, dtype=torch.int64, device=device)
    coming = torch.empty(2, most, dtype=torch.int64, device=device)
    starts = torch.empty(parts + 2 + (shares is not None), dtype=torch.int64, device=device)
    tables = torch.empty(parts, experts, tensors, dtype=torch.int64, device=device)
    _expert_step[(1,)](
        pairs,
        arrays.slot_of,
        arrays.expert_of,
        arrays.value,
        arrays.used,
        arrays.counts,
        arrays.now,
        arrays.turn,
        arrays.told,
        arrays.decays,
        worths,
        order,
        coming,
        starts,
        tables,
        places.offsets,
        starts if shares is None else shares,
        places.base,
        places.first,
        places.transit,
        places.ring,
        parts,
        arrays.number * experts,
        places.size,
        len(arrays.decays) - 1,
        margin,
        EXPERTS=experts,
        SHARED=shares is not None,
        SLOTS=slots,
        MOST=most,
        TENSORS=tensors,
        COLS=cols,
        WIDE=wide,
        PLACES=next_power_of_2(most),
        TENSOR_COLS=next_power_of_2(tensors),
        CHUNK=_CHUNK,
        EARLY=early,
        num_warps=8,
        enable_fp_fusion=False,
        **pdl_launch_options(early),
    )
    return ExpertParts(coming, starts, tables, arrays.done)


def fetch(parts: ExpertParts, places: Places, host: int, part: int) -> None:
    """Copy the experts of one part to their places.

    host: address of the layer's first expert; they lie one behind the other. It must be memory that the
    device can read.
    """
    most, count, words = parts.coming.shape[1], len(parts.tables), _words(places)
    copiers = min(COPIERS, -(-most // count) * -(-places.size // (4 * words)))
    _fetch[(copiers,)](
        parts.coming,
        parts.starts,
        parts.done,
        host,
        places.base,
        part,
        count,
        places.transit + places.ring,
        most,
        places.size,
        COPIERS=copiers,
        WORDS=words,
        AHEAD=COPIERS,
        num_warps=_WARPS,
    )


def foretell(arrays: SlotArrays, scores: Tensor, most: int, padding: Tensor | None = None) -> None:
    """Note which expert is likely to be asked for by the layer that decides next, which has these arrays.

    scores: `[tokens, experts]`, of its router for hidden states of the layer before. most: experts that will
    be asked for, at most. padding: bool `[tokens]`, tokens that are nobody's.
    """
    tokens, experts = scores.shape
    early = uses_pdl()
    assert scores.stride(1) == 1, scores.stride()
    _foretell[(1,)](
        scores, scores if padding is None else padding, arrays.slot_of, arrays.counts, arrays.now,
        arrays.turn, arrays.told, arrays.done, tokens, most, arrays.number * experts, scores.stride(0),
        EXPERTS=experts,
        COLS=next_power_of_2(experts),
        PADDED=padding is not None,
        COPIERS=COPIERS,
        TRIES=_TRIES,
        PAYS=_PAYS,
        AGAIN=_AGAIN,
        EARLY=early,
        num_warps=4,
        **pdl_launch_options(early),
    )  # fmt: skip


def fetch_ahead(arrays: SlotArrays, places: Places, host: int) -> None:
    """Fetch what is foretold until the layer that has these arrays has decided. host: address of the first
    expert of all layers."""
    _fetch_ahead[(COPIERS,)](
        arrays.told,
        arrays.turn,
        arrays.done,
        host,
        places.base,
        places.transit + places.ring,
        places.size,
        COPIERS=COPIERS,
        WORDS=_words(places),
        num_warps=_WARPS,
    )


def piece_of(places: Places) -> int:
    """Return the bytes of a piece, by which programs count what they fetch ahead."""
    return 4 * _words(places)


def _words(places: Places) -> int:
    return min(_WORDS, next_power_of_2(places.size // 4))
