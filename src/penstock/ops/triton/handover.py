"""Kernels by which a device has the CPU compute experts in host memory: what is asked for, the wait, the
outputs.

`expert_step` (slots.py) says which of a layer's missing experts the CPU takes. `give` writes the step's rows
and the lists of these experts to a box in host memory, and then a number, behind a fence; a thread of the CPU
looks at that number (ops/native/service.c). `take` waits for the CPU's number and writes the outputs where
those of pairs belong. All are launched like any other kernel, so a recorded step holds them.

Why this is safe. Both kernels are on one stream, so the device has one question at a time, and what it
writes to the box is behind the wait for the answer to the one before. In `give` all threads have written
(barrier) when one of them fences by an atomic of the whole system, and then writes the number. In `take`
each program reads the CPU's number, as memory is and not as a cache has it, until it is right; then one of
its threads fences in the same way, and behind a barrier all of them read outputs, also as memory is. Numbers
wrap around, and are compared for equality only.

The wait ends in any case: with the answer, or with `over`, a word in host memory that the host writes when it
closes, and the device after `limit` nanoseconds. Outputs then mean nothing, `over` stays, nothing waits any
more, and the host finds `over` before it takes tokens for what they are not.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from penstock.ops.handover import LISTED, Handover, StepRows
from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.row_classes import class_of
from penstock.ops.slots import ExpertParts
from penstock.ops.triton.pointwise import in_turn
from penstock.ops.triton.tuning import next_power_of_2

_LISTED = tl.constexpr(LISTED)
_LOOKS = tl.constexpr(64)
"""Looks between two at the word that ends all waiting."""
_ODD = tl.constexpr(200_000_000)
"""Nanoseconds that no layer takes."""
TIMED = not triton.knobs.runtime.interpret
"""The interpreter has no clock."""
_COLS, _ROW = 1024, 4096
"""Numbers of a row that are given, and taken, at a time: a program takes a row in one trip over the link."""
_TAKERS = 16
"""Programs that take outputs, at most; each looks at the CPU's number."""
_TOKENS = 8
"""Rows that are written at a time, at most."""


@triton.jit(do_not_specialize=["layer", "tokens", "parts"])  # type: ignore[untyped-decorator]
def _give(  # type: ignore[no-untyped-def]
    x,
    order,
    pairs,
    coming,
    starts,
    asked,
    mine,
    computed,
    begun,
    flag,
    listed,
    rows,
    layer,
    tokens,
    parts,
    hidden,
    s_x,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_COLS: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
    TIMED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write what the CPU is to compute for a layer, if it is to: lists, rows of x, and then the number."""
    in_turn(EARLY)
    if TIMED:
        tl.store(begun, globaltimer())
    one, row = tl.arange(0, EXPERT_COLS), tl.arange(0, ROWS)
    of_expert = tl.load(pairs + one, mask=one < EXPERTS, other=0)
    before = tl.cumsum(of_expert, 0) - of_expert
    first = tl.load(starts + parts)
    count = (tl.load(starts + parts + 2) - first).to(tl.int32)
    at = 0
    for number in range(count):
        expert = tl.load(coming + first + number).to(tl.int32)
        its = tl.sum(tl.where(one == expert, of_expert, 0), 0)
        start = tl.sum(tl.where(one == expert, before, 0), 0)
        pair = tl.load(order + start + row, mask=row < its, other=0)
        tl.store(mine + 1 + at + row, pair, mask=row < its)
        tl.store(listed + _LISTED + 2 * MOST + at + row, pair // TOP_K, mask=row < its)
        tl.store(listed + _LISTED + number, expert)
        tl.store(listed + _LISTED + MOST + number, its)
        at += its
    tl.store(mine, at)
    if count > 0:
        tl.store(listed, layer)
        tl.store(listed + 1, count)
        tl.store(listed + 2, at)
        tl.store(listed + 3, tokens)
        col, some = tl.arange(0, COLS)[None, :], tl.arange(0, TOKENS)[:, None]
        for token in range(0, tokens, TOKENS):
            for start in range(0, hidden, COLS):
                inside = (start + col < hidden) & (token + some < tokens)
                got = tl.load(x + (token + some) * s_x + start + col, mask=inside, other=0)
                tl.store(rows + (token + some) * hidden + start + col, got, mask=inside)
        so_far = tl.load(computed)
        tl.debug_barrier()  # all is written, by all threads
        number = tl.atomic_add(asked, 1, sem="acq_rel", scope="sys") + 1
        tl.store(flag, number)
        tl.store(computed, so_far + count)


@triton.jit
def _count(times, at, since, now):  # type: ignore[no-untyped-def]
    """Count one more that took so long, if no kernel was compiled meanwhile, or the like."""
    if now - since < _ODD:
        tl.store(times + 2 * at, tl.load(times + 2 * at) + 1)
        tl.store(times + 2 * at + 1, tl.load(times + 2 * at + 1) + now - since)


@triton.jit(do_not_specialize=["limit", "parts"])  # type: ignore[untyped-decorator]
def _take(  # type: ignore[no-untyped-def]
    asked,
    begun,
    done,
    spent,
    over,
    starts,
    times,
    mine,
    outputs,
    y,
    hidden,
    limit,
    parts,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
    TIMED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Wait until the CPU has done what was asked of it, and count how long that and the rest took. Write
    rows of its outputs, of so many numbers, to those of pairs, every program some of them.

    Where nothing was asked, nothing is read through the link, where it might wait behind experts that come.
    """
    in_turn(EARLY)
    came = tl.load(starts + parts)
    count = tl.load(starts + parts + 2) - came
    decided = tl.load(begun)
    arrived = decided
    if TIMED:
        arrived = globaltimer()
    waited = tl.full([], 0, tl.int32)
    if count > 0:
        number = tl.load(asked)
        late = (tl.load(done, volatile=True) != number).to(tl.int32)
        waited, looks = late, tl.full([], 0, tl.int32)
        while late > 0:
            late = (tl.load(done, volatile=True) != number).to(tl.int32)
            looks += 1
            if looks % _LOOKS == 0:
                waits = looks.to(tl.int64)
                if TIMED:
                    waits = globaltimer() - arrived
                if waits > limit:
                    tl.store(over, 1)
                if tl.load(over, volatile=True) != 0:
                    late = 0
    if TIMED:
        now, counts = globaltimer(), tl.program_id(0) == 0
        if counts & (count > 0):
            _count(times, EXPERTS + 1 + came + count, decided, now)
            _count(times, 2 * (EXPERTS + 1) + came, decided, arrived)
        if counts & (waited > 0):
            _count(times, 3 * (EXPERTS + 1) + count, decided, now - tl.load(spent, volatile=True))
        if counts & (count == 0):
            _count(times, came, decided, now)
    if count > 0:
        tl.atomic_add(asked, 0, sem="acq_rel", scope="sys")  # what is read from now on is of the answer
        tl.debug_barrier()  # for all threads
        col = tl.arange(0, COLS)
        for row in range(tl.program_id(0), tl.load(mine), tl.num_programs(0)):
            pair = tl.load(mine + 1 + row).to(tl.int64)
            for start in range(0, hidden, COLS):
                inside = start + col < hidden
                got = tl.load(outputs + row * hidden + start + col, mask=inside, other=0, volatile=True)
                tl.store(y + pair * hidden + start + col, got, mask=inside)


def give(with_cpu: Handover, rows: StepRows, pairs: torch.Tensor, layer: int, parts: ExpertParts) -> None:
    """Ask the CPU for those of a layer's experts that are to be computed there.

    pairs: int32 `[experts]`, how many pairs each expert has. layer: its number among those with experts.
    """
    box, x, experts, early = with_cpu.box, rows.x, len(pairs), uses_pdl()
    tokens, hidden = x.shape
    assert x.stride(1) == 1, x.stride()
    assert tokens <= len(box.x), (x.shape, box.x.shape)
    assert x.dtype == box.x.dtype, (x.dtype, box.x.dtype)
    _give[(1,)](
        x,
        rows.order,
        pairs,
        parts.coming,
        parts.starts,
        with_cpu.asked,
        with_cpu.mine,
        with_cpu.computed,
        with_cpu.begun,
        box.asked,
        box.list,
        box.x,
        layer,
        tokens,
        len(parts.tables),
        hidden,
        x.stride(0),
        TOP_K=len(rows.order) // tokens,
        EXPERTS=experts,
        EXPERT_COLS=max(16, next_power_of_2(experts)),
        MOST=box.most,
        ROWS=len(box.x),
        TOKENS=min(next_power_of_2(tokens), _TOKENS),
        COLS=_COLS,
        TIMED=TIMED,
        EARLY=early,
        num_warps=8,
        **pdl_launch_options(early),
    )


def take(with_cpu: Handover, rows: StepRows, parts: ExpertParts) -> None:
    """Wait for what the CPU was asked for, and write its outputs to `rows.y`."""
    _launch_take(with_cpu, parts, with_cpu.times[class_of(len(rows.x))], rows)


def wait(with_cpu: Handover, parts: ExpertParts, times: torch.Tensor) -> None:
    """Wait for what the CPU was asked for, and count in `times` of a class of tokens."""
    _launch_take(with_cpu, parts, times, None)


def _launch_take(with_cpu: Handover, parts: ExpertParts, times: torch.Tensor, rows: StepRows | None) -> None:
    box, early = with_cpu.box, uses_pdl()
    hidden = box.y.shape[1] if rows is not None else 0
    _take[(1 if rows is None else min(len(rows.order), _TAKERS),)](
        with_cpu.asked,
        with_cpu.begun,
        box.done,
        box.spent,
        box.over,
        parts.starts,
        times,
        with_cpu.mine,
        box.y,
        box.y if rows is None else rows.y,
        hidden,
        with_cpu.limit,
        len(parts.tables),
        EXPERTS=times.shape[1] - 1,
        COLS=min(next_power_of_2(box.y.shape[1]), _ROW),
        TIMED=TIMED,
        EARLY=early,
        num_warps=1,
        **pdl_launch_options(early),
    )
