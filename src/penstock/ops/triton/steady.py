"""Kernels by which experts come through the link in one launch for a whole recorded step.

`bring` runs beside all that a step computes. Its programs read experts from host memory, part by part as the
step asks for them, each program its own pieces of each expert, and go on with the next part without a wait
for each other. While nothing is asked for, they read pieces of the expert that is foretold, to a place of its
own; if it is asked for, they copy them from there. `ask_first` asks for the first parts of what `expert_step`
(slots.py) has decided, as many as the ring holds; `await_part` asks for another part, whose places are free
by then, and waits for one. What a fetch of its own for each part costs beside its bytes, 50 to 75 us, is
gone.

Why this is safe. Whoever asks has in front all that has read the places of the part: a kernel waits for those
before it ahead of everything (`in_turn`). All threads have written a list (barrier) when one of them adds to
`asked` (release); a program of `bring` looks at that by an atomic (acquire), which one thread does for all,
so that all take the same way, and reads the list past the cache. The list is written again only by the layer
that is decided next, behind the wait for the last part of this one, which is never empty where any expert
comes. A program adds to its own `came` (release) behind a barrier, when all its threads have written. Who
waits looks at all of these as memory is until the part has come by all programs, and then once more by an
atomic (acquire). What reads the part is launched behind that: `await_part` lets nothing be launched before it
has ended waiting, so what waits for it is not in the way of programs of `bring` that have not begun, either.

What comes ahead is a program's own pieces, in its own count, under the expert that it has read in `told`: if
that was not what is foretold now, the bytes still are of the expert under whose name they are used. Its place
has no other writer while the step runs. Programs end when the step says that it asks for nothing more, behind
the wait for its last part; the step's number is read behind the mark on which `bring` is launched.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.slots import COPIERS, ExpertParts, FetchQueue, Places, SlotArrays
from penstock.ops.triton.pointwise import in_turn

_HEAD = tl.constexpr(FetchQueue.HEAD)
_WORDS, _WARPS = 16384, 16
"""Numbers of 32 bits that each of COPIERS programs copies at a time, and its warps, as in slots.py."""


@triton.jit  # type: ignore[untyped-decorator]
def _copy_piece(source, target, piece, words, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a piece of an expert of so many numbers. source, target: addresses."""
    at = tl.max_contiguous(tl.multiple_of(piece * WORDS + tl.arange(0, WORDS), WORDS), WORDS)
    inside = at < words
    got = tl.load(tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16) + at, mask=inside, other=0)
    tl.store(tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16) + at, got, mask=inside)


@triton.jit(do_not_specialize=["host", "base", "ahead"])  # type: ignore[untyped-decorator]
def _bring(  # type: ignore[no-untyped-def]
    asked,
    came,
    ended,
    listed,
    told,
    turn,
    now,
    host,
    base,
    ahead,
    size,
    room,
    COPIERS: tl.constexpr,
    WORDS: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    """Copy what is asked for until nothing more is, in one of COPIERS programs."""
    me = tl.program_id(0)
    step, number = tl.load(now), tl.load(came + me)
    words = size // 4
    pieces = tl.cdiv(words, WORDS)
    place_ahead = base + ahead.to(tl.int64) * size
    early, got = tl.full([], -1, tl.int64), tl.full([], 0, tl.int32)
    runs = tl.full([], 1, tl.int32)
    while runs > 0:
        # One thread looks at a number that changes, and all get what it has seen: they take the same way.
        if tl.atomic_add(asked, 0, sem="acquire") - number > 0:
            part = number - tl.load(listed, cache_modifier=".cg")
            first = tl.load(listed + _HEAD + part - 1, mask=part > 0, other=0, cache_modifier=".cg")
            end = tl.load(listed + _HEAD + part, cache_modifier=".cg")
            for at in range(first, end):
                pair = listed + _HEAD + room + 2 * at
                expert = tl.load(pair, cache_modifier=".cg").to(tl.int64)
                target = base + tl.load(pair + 1, cache_modifier=".cg").to(tl.int64) * size
                here = tl.where(expert == early, got, 0)
                own = ((me + COPIERS - expert % COPIERS) % COPIERS).to(tl.int32)
                for piece in range(own, pieces, COPIERS):
                    source = tl.where((piece - own) // COPIERS < here, place_ahead, host + expert * size)
                    _copy_piece(source, target, piece, words, WORDS)
            tl.debug_barrier()  # all of it is written, by all threads
            tl.atomic_add(came + me, 1, sem="release")
            number += 1
        else:
            if tl.atomic_add(ended, 0, sem="acquire") == step:
                runs = tl.full([], 0, tl.int32)
            if AHEAD:
                decision = tl.atomic_add(turn, 0, sem="relaxed")
                second = tl.atomic_add(told + 3, 0, sem="relaxed") == decision
                row = told + tl.where(second, 2, 0)
                holds = tl.atomic_add(row + 1, 0, sem="relaxed") == decision
                expert = tl.atomic_add(row, 0, sem="relaxed")
                if holds & (expert >= 0):
                    got = tl.where(expert == early, got, 0)
                    early = expert
                    own = ((me + COPIERS - expert % COPIERS) % COPIERS).to(tl.int32)
                    piece = own + got * COPIERS
                    if piece < pieces:
                        _copy_piece(host + expert * size, place_ahead, piece, words, WORDS)
                        got += 1


@triton.jit
def _ask(asked, more):  # type: ignore[no-untyped-def]
    """Let so many parts more come."""
    tl.debug_barrier()  # all is written, by all threads, and what is changed is read
    tl.atomic_add(asked, more, sem="release")


@triton.jit(do_not_specialize=["parts", "at_once", "begin"])  # type: ignore[untyped-decorator]
def _ask_first(  # type: ignore[no-untyped-def]
    coming,
    starts,
    asked,
    listed,
    parts,
    at_once,
    begin,
    room,
    MOST: tl.constexpr,
    COLS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write which experts come to which places in how many parts, and ask for the first, if any comes.

    begin: experts of layers before. room: experts that a list has room for.
    """
    in_turn(EARLY)
    if tl.load(starts + parts) > 0:
        number, one = tl.load(asked), tl.arange(0, COLS)
        end = tl.load(starts + 1 + one, mask=one < parts, other=0)
        expert = tl.load(coming + one, mask=one < MOST, other=-1)
        place = tl.load(coming + MOST + one, mask=one < MOST, other=0)
        tl.debug_barrier()  # all have read what one of them changes
        tl.store(asked + 1, number)
        tl.store(listed, number)
        tl.store(listed + 1, parts)
        tl.store(listed + _HEAD + one, end.to(tl.int32), mask=one < parts)
        pair = listed + _HEAD + room + 2 * one
        tl.store(pair, (begin + expert).to(tl.int32), mask=expert >= 0)
        tl.store(pair + 1, place.to(tl.int32), mask=expert >= 0)
        _ask(asked, at_once)


@triton.jit(do_not_specialize=["part", "parts"])  # type: ignore[untyped-decorator]
def _await_part(  # type: ignore[no-untyped-def]
    starts,
    asked,
    came,
    ended,
    now,
    part,
    parts,
    COPIERS: tl.constexpr,
    ASKS: tl.constexpr,
    ENDS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Ask for another part if ASKS, and wait until one has come, if there is anything in it. ENDS: nothing is
    asked for in this step behind it."""
    if EARLY:
        gdc_wait()
    if tl.load(starts + parts) > 0:
        wanted = tl.load(asked + 1) + part + 1
        if ASKS:
            _ask(asked, 1)
        if tl.load(starts + part + 1) > tl.load(starts + part):
            each = came + tl.arange(0, COPIERS)
            while tl.max(wanted - tl.load(each, volatile=True), 0) > 0:
                pass
            tl.atomic_add(asked, 0, sem="acquire")  # what is read from now on has come
    if ENDS:
        step = tl.load(now)
        tl.debug_barrier()  # the threads that have waited
        tl.atomic_xchg(ended, step, sem="release")
    if EARLY:
        gdc_launch_dependents()


def bring(queue: FetchQueue, arrays: SlotArrays, places: Places, host: int, *, ahead: bool) -> None:
    """Copy what a recorded step asks for, until it asks for nothing more.

    host: address of the first expert of all layers, in memory that the device can read. ahead: whether the
    ring has a place for what is foretold. arrays: of any layer.
    """
    words = min(_WORDS, int(triton.next_power_of_2(places.size // 4)))
    _bring[(COPIERS,)](
        queue.asked,
        queue.came,
        queue.ended,
        queue.list,
        queue.told,
        arrays.turn,
        arrays.now,
        host,
        places.base,
        places.transit + places.ring,
        places.size,
        queue.most,
        COPIERS=COPIERS,
        WORDS=words,
        AHEAD=ahead,
        num_warps=_WARPS,
    )


def ask_first(queue: FetchQueue, parts: ExpertParts, at_once: int, begin: int) -> None:
    """Ask for the first `at_once` parts of a layer. begin: experts of all layers before."""
    most, early = parts.coming.shape[1], uses_pdl()
    assert len(parts.tables) <= most <= queue.most, (parts.tables.shape, most, queue.most)
    _ask_first[(1,)](
        parts.coming, parts.starts, queue.asked, queue.list, len(parts.tables), at_once, begin, queue.most,
        MOST=most, COLS=triton.next_power_of_2(most), EARLY=early, num_warps=4, **pdl_launch_options(early),
    )  # fmt: skip


def await_part(
    queue: FetchQueue, now: Tensor, parts: ExpertParts, part: int, *, asks: bool, ends: bool
) -> None:
    """Wait until a part has come.

    asks: for the next part that was not asked for, before. ends: nothing is asked for in this step behind it.
    now: as of SlotArrays.
    """
    early = uses_pdl()
    _await_part[(1,)](
        parts.starts, queue.asked, queue.came, queue.ended, now, part, len(parts.tables),
        COPIERS=COPIERS, ASKS=asks, ENDS=ends, EARLY=early, num_warps=1, **pdl_launch_options(early),
    )  # fmt: skip
