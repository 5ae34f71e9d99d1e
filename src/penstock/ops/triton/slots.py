"""Kernels by which the device decides which experts of a layer have slots, and fetches those that come.

`expert_step` is the rule of `weights.streaming.slots` in one program of many threads: arrays of a layer fit
in a block. `fetch` copies experts from host memory, which the device reads through the link by itself. Both
are launched like any other kernel, so a recorded step holds them, and the host waits for nothing.

Experts come in rounds of as many as have slots of their own or pass through one of `transit`. A round's table
names those that are there then: the first one also those that were there before. What passes through a slot
of `transit` is computed with before the next round, on the same stream, so nothing is overwritten that is
still needed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.slots import Places, SlotArrays

_CHUNK = 64
"""Experts whose worth is compared with all others' at a time."""
_WORDS = 4096
"""Numbers of 32 bits that a program copies at a time."""
_COPIERS = 132
"""Programs that fetch at once: enough reads under way for any link."""


@triton.jit(do_not_specialize=["base", "first", "transit"])  # type: ignore[untyped-decorator]
def _expert_step(  # type: ignore[no-untyped-def]
    pairs,
    slot_of,
    expert_of,
    value,
    used,
    counts,
    now,
    decays,
    worths,
    order,
    coming,
    tables,
    offsets,
    base,
    first,
    transit,
    size,
    last,
    margin,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
    EACH: tl.constexpr,
    ROUNDS: tl.constexpr,
    TENSORS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
    PLACES: tl.constexpr,
    TENSOR_COLS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Decide, and write who comes to which place, `coming` `[2, MOST]`, and the table of each round.

    worths: float32 `[2, COLS]`, order: int64 `[2, COLS]`, to write in. EACH: experts of a round.
    """
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
    tl.debug_barrier()  # threads have the same numbers, and one of them changes each
    tl.store(value + one, worth, mask=wanted)
    tl.store(used + one, tl.zeros_like(when) + time, mask=wanted)
    missing = wanted & (slot < 0)
    tl.store(worths + one, tl.where(missing, -worth, float("inf")))
    tl.store(worths + COLS + one, tl.where(wanted, float("inf"), worth))
    asked, hits = tl.sum(wanted.to(tl.int64), 0), tl.sum((wanted & (slot >= 0)).to(tl.int64), 0)
    tl.store(counts, all_asked + asked)
    tl.store(counts + 1, all_hits + hits)
    for number in tl.static_range(ROUNDS):
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
    comes = rank < tl.sum(missing.to(tl.int32), 0)
    expert = tl.load(order + rank, mask=comes, other=0)
    where_to = (transit + rank % EACH).to(tl.int64)
    if SLOTS == 0:
        tl.debug_barrier()
    else:
        paired = comes & (rank < SLOTS)
        slot = tl.load(order + COLS + rank, mask=paired, other=0)
        gives = tl.load(worths + 2 * COLS + slot, mask=paired, other=float("inf"))
        mine = -tl.load(worths + expert, mask=paired, other=0.0)
        some = gives < float("inf")
        change = paired & some & ((gives < 0) | (mine >= margin * tl.where(some, gives, 0.0)))
        left = tl.load(expert_of + slot, mask=change, other=-1)
        tl.debug_barrier()  # all have read who was there
        tl.store(slot_of + left, tl.zeros_like(left) - 1, mask=change & (left >= 0))
        tl.store(expert_of + slot, expert, mask=change)
        tl.store(slot_of + expert, slot, mask=change)
        where_to = tl.where(change, first + slot, where_to)
    tl.store(coming + rank, tl.where(comes, expert, -1), mask=rank < MOST)
    tl.store(coming + MOST + rank, where_to, mask=rank < MOST)
    table = (
        tables + (rank // EACH).to(tl.int64)[:, None] * (EXPERTS * TENSORS) + expert[:, None] * TENSORS + at
    )
    address = base + where_to[:, None] * size + offset
    tl.store(table, address, mask=(comes & (rank < MOST))[:, None] & (at < TENSORS))


@triton.jit(do_not_specialize=["host", "base", "begin"])  # type: ignore[untyped-decorator]
def _fetch(  # type: ignore[no-untyped-def]
    coming, host, base, begin, most, size, PARTS: tl.constexpr, WORDS: tl.constexpr
) -> None:
    """Copy a part of one expert, `size` bytes long, from its place on the host to its place on the device."""
    number, part = begin + tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    expert = tl.load(coming + number)
    if expert < 0:
        return
    source = (host + expert * size).to(tl.pointer_type(tl.int32))
    target = (base + tl.load(coming + most + number) * size).to(tl.pointer_type(tl.int32))
    word = tl.arange(0, WORDS)
    words = size // 4
    for start in range(part * WORDS, words, PARTS * WORDS):
        at = tl.max_contiguous(tl.multiple_of(start + word, WORDS), WORDS)
        inside = at < words
        got = tl.load(tl.multiple_of(source, 16) + at, mask=inside, other=0)
        tl.store(tl.multiple_of(target, 16) + at, got, mask=inside)


def expert_step(
    arrays: SlotArrays, pairs: Tensor, most: int, margin: float, places: Places
) -> tuple[Tensor, Tensor]:
    """Decide for a layer, and return who comes to which place, int64 `[2, most]`, the most valuable first and
    -1 behind the last, and the tables of rounds, int64 `[rounds, experts, tensors]`: addresses, or 0.

    pairs: int32 `[experts]`, how many pairs each expert has in this step.
    """
    experts, slots, device = len(pairs), len(arrays.expert_of), pairs.device
    tensors, rounds = len(places.offsets), -(-most // places.rounds_of)
    cols, wide = max(_CHUNK, triton.next_power_of_2(experts)), max(16, triton.next_power_of_2(max(slots, 1)))
    worths = torch.empty(2 * cols + wide, dtype=torch.float32, device=device)
    order = torch.empty(cols + wide, dtype=torch.int64, device=device)
    coming = torch.empty(2, most, dtype=torch.int64, device=device)
    tables = torch.empty(rounds, experts, tensors, dtype=torch.int64, device=device)
    _expert_step[(1,)](
        pairs,
        arrays.slot_of,
        arrays.expert_of,
        arrays.value,
        arrays.used,
        arrays.counts,
        arrays.now,
        arrays.decays,
        worths,
        order,
        coming,
        tables,
        places.offsets,
        places.base,
        places.first,
        places.transit,
        places.size,
        len(arrays.decays) - 1,
        margin,
        EXPERTS=experts,
        SLOTS=slots,
        MOST=most,
        EACH=places.rounds_of,
        ROUNDS=rounds,
        TENSORS=tensors,
        COLS=cols,
        WIDE=wide,
        PLACES=triton.next_power_of_2(most),
        TENSOR_COLS=triton.next_power_of_2(tensors),
        CHUNK=_CHUNK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return coming, tables


def fetch(coming: Tensor, number: int, places: Places, host: int) -> None:
    """Copy the experts of one round to their places.

    coming: as `expert_step` returns it. host: address of the layer's first expert; they lie one behind the
    other. It must be memory that the device can read.
    """
    most = coming.shape[1]
    begin = number * places.rounds_of
    count = min(places.rounds_of, most - begin)
    parts = max(1, min(_COPIERS // count, -(-places.size // (4 * _WORDS))))
    _fetch[(count * parts,)](
        coming, host, places.base, begin, most, places.size, PARTS=parts, WORDS=_WORDS, num_warps=8
    )
