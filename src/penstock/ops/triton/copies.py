"""Kernels by which a device has its copy engine bring experts: what is asked for, and the wait.

`ask_first` asks for the first parts of what `expert_step` (slots.py) has decided, as many as the ring holds;
`await_part` asks for another part, whose places are free now, and waits for one. A thread of the host queues
the copies (ops/native/copier.c). All of this is on the stream that computes: no other one is needed.

Why this is safe. Whoever asks has read all of the places that the part takes: a part is asked for behind what
was computed with the one whose places it takes, since a kernel waits for those before it (`in_turn`). All
threads have written a list (barrier) when one of them fences by an atomic of the whole system, and then
writes the number for which the host looks. Who waits reads the number of what has come as memory is, not as a
cache has it, until it is right; then a thread fences in the same way. What is computed next begins, or goes
on, behind the end of this kernel. The next list is written behind the wait for the last part, which is never
empty. Numbers wrap around, and are compared by their difference.

The wait ends in any case, as it does for what the CPU computes (handover.py): `over` then says that tokens
mean nothing.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from penstock.ops.copies import HEAD, CopyRequests
from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.slots import ExpertParts
from penstock.ops.triton.handover import TIMED
from penstock.ops.triton.pointwise import in_turn

_HEAD = tl.constexpr(HEAD)
_LOOKS = tl.constexpr(64)
"""Looks between two at the word that ends all waiting."""


@triton.jit
def _ask(asked, flag, number):  # type: ignore[no-untyped-def]
    """Tell the host that it may bring all parts up to this one."""
    tl.debug_barrier()  # all is written, by all threads, and the numbers are read
    tl.store(asked, number)
    tl.atomic_add(asked, 0, sem="acq_rel", scope="sys")
    tl.store(flag, number)


@triton.jit(do_not_specialize=["parts", "at_once", "begin"])  # type: ignore[untyped-decorator]
def _ask_first(  # type: ignore[no-untyped-def]
    coming,
    starts,
    asked,
    flag,
    listed,
    parts,
    at_once,
    begin,
    ROOM: tl.constexpr,
    MOST: tl.constexpr,
    COLS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write which experts come to which places in how many parts, and ask for the first, if any comes.

    begin: experts of layers before. ROOM: experts that a list has room for.
    """
    in_turn(EARLY)
    if tl.load(starts + parts) > 0:
        number, one = tl.load(asked), tl.arange(0, COLS)
        end = tl.load(starts + 1 + one, mask=one < parts, other=0)
        expert = tl.load(coming + one, mask=one < MOST, other=-1)
        place = tl.load(coming + MOST + one, mask=one < MOST, other=0)
        tl.store(asked + 1, number)
        tl.store(listed, number)
        tl.store(listed + 1, parts)
        tl.store(listed + _HEAD + one, end.to(tl.int32), mask=one < parts)
        pairs = listed + _HEAD + ROOM + 2 * one
        tl.store(pairs, (begin + expert).to(tl.int32), mask=expert >= 0)
        tl.store(pairs + 1, place.to(tl.int32), mask=expert >= 0)
        _ask(asked, flag, number + at_once)


@triton.jit(do_not_specialize=["part", "parts", "limit"])  # type: ignore[untyped-decorator]
def _await_part(  # type: ignore[no-untyped-def]
    starts,
    asked,
    came,
    flag,
    over,
    part,
    parts,
    limit,
    ASKS: tl.constexpr,
    TIMED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Ask for another part if ASKS, and wait until one has come, if there is anything in it."""
    in_turn(EARLY)
    if tl.load(starts + parts) > 0:
        number, before = tl.load(asked), tl.load(asked + 1)
        if ASKS:
            _ask(asked, flag, number + 1)
        if tl.load(starts + part + 1) > tl.load(starts + part):
            wanted = before + part + 1
            late, looks = (tl.load(came, volatile=True) - wanted < 0).to(tl.int32), tl.full([], 0, tl.int32)
            since = looks.to(tl.int64)
            if TIMED:
                since = globaltimer()
            while late > 0:
                late = (tl.load(came, volatile=True) - wanted < 0).to(tl.int32)
                looks += 1
                if looks % _LOOKS == 0:
                    waits = looks.to(tl.int64)
                    if TIMED:
                        waits = globaltimer() - since
                    if waits > limit:
                        tl.store(over, 1)
                    if tl.load(over, volatile=True) != 0:
                        late = 0
            tl.atomic_add(asked, 0, sem="acq_rel", scope="sys")  # what is read from now on has come


def ask_first(requests: CopyRequests, parts: ExpertParts, at_once: int, begin: int) -> None:
    """Ask for the first `at_once` parts of a layer. begin: experts of all layers before."""
    most, early = parts.coming.shape[1], uses_pdl()
    assert len(parts.tables) <= most <= requests.box.most, (parts.tables.shape, most, requests.box.most)
    _ask_first[(1,)](
        parts.coming,
        parts.starts,
        requests.asked,
        requests.box.asked,
        requests.box.list,
        len(parts.tables),
        at_once,
        begin,
        ROOM=requests.box.most,
        MOST=most,
        COLS=triton.next_power_of_2(most),
        EARLY=early,
        num_warps=4,
        **pdl_launch_options(early),
    )


def await_part(requests: CopyRequests, parts: ExpertParts, part: int, *, asks: bool) -> None:
    """Wait until a part has come. asks: for the next part that was not asked for, before."""
    early = uses_pdl()
    _await_part[(1,)](
        parts.starts,
        requests.asked,
        requests.came,
        requests.box.asked,
        requests.box.over,
        part,
        len(parts.tables),
        requests.limit,
        ASKS=asks,
        TIMED=TIMED,
        EARLY=early,
        num_warps=1,
        **pdl_launch_options(early),
    )
