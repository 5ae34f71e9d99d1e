"""Adds the products of LoRA adapters for a few rows, each of its own adapter, in two launches.

The first computes `x @ A.T` of each row's own adapter, the second adds `(x @ A.T) @ B` to what the model's
matrix says, and may compute the activation of both. Both know the rows' slots from the device alone. Of slots
that no row has, nothing is read.

Sums of the first launch are cut into parts that the second one adds, so results do not depend on which
program is faster, nor on the adapters of other rows. The second launch has programs for each row, which wait
for memory once: rows of many adapters would wait for one after the other in a program of theirs.

Why this is safe. Where launches may be early (`kernels.pdl_launches`), each reads the rows' slots and the
first of its adapter's numbers before the kernels before this one have ended. A step's first launch here is
not early (`add`), so all that came before it had ended, and with it what writes slots and adapters: no kernel
that comes later in a step does. All else is read, and everything written, behind `gdc_wait`.

Why the first launch may be hidden beside the product of the model's matrix (`product`). That product is
launched just before it, and lets it begin only behind its own wait (`linear`). So all that came before the
product has ended: what wrote x, slots and adapters, and all that had the memory of `low` before. These are
read past the caches of a multiprocessor, which may hold what was there before. Only the product may still
run. It does not know `low`, and has no memory in common with it: `low` is allocated first, while the scratch
of the product can be given away as soon as that is launched. The last that the first launch does is to wait,
in one program, which is enough: its end is now the end of the product too. The second launch waits for it,
and finds both results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.triton.pointwise import silu
from penstock.ops.triton.tuning import cdiv, next_power_of_2

MOST_ROWS = 64
"""Largest number of rows of `add`."""
MOST_PARTS = 3
_NUMBERS, _RANKS, _MOST_SPLITS = 8192, 64, 32
"""Numbers of A that a program reads at a time, rows of A, and parts of sums."""
_COLS, _HELD = 256, 8192
"""Columns of B that a program has, and bytes of them that it holds while it waits: its one warp has registers
for as many of the gate and of up. So programs of a step of 16 rows of rank 16 all wait at once, and none
begins to read when others have ended."""


@triton.jit(do_not_specialize=["rows", "tiles", "slots"])  # type: ignore[untyped-decorator]
def _shrink(  # type: ignore[no-untyped-def]
    x,
    a,
    slot_of,
    low,
    rows,
    tiles,
    slots,
    rank,
    inner,
    s_x,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
    HIDDEN: tl.constexpr,
) -> None:
    """Compute a part of the sums of RANKS rows of A of one slot, for the rows that have it.

    HIDDEN: whether all but the kernel just before this one had ended before this began.
    """
    if EARLY:
        gdc_launch_dependents()
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    block, pair = tile % tiles, tile // tiles  # A pair is a slot of a part.
    row, number = tl.arange(0, ROWS), block * RANKS + tl.arange(0, RANKS)
    slot = tl.load(slot_of + row, mask=row < rows, other=0, cache_modifier=".cg")
    mine = slot == pair % slots + 1
    if tl.max(mine.to(tl.int32), 0) > 0:
        step = tl.arange(0, STEP)
        each = tl.cdiv(tl.cdiv(inner, STEP), SPLITS) * STEP
        begin = split * each
        end = tl.minimum(begin + each, inner)
        x_at = x + row.to(tl.int64)[:, None] * s_x + step[None, :]
        a_at = a + (pair.to(tl.int64) * rank + number)[:, None] * inner + step[None, :]
        known = (number < rank)[:, None]
        inside = known & (begin + step < end)[None, :]
        w = tl.load(a_at + begin, mask=inside, other=0.0, cache_modifier=".cg")
        if EARLY and not HIDDEN:
            gdc_wait()
        acc = tl.zeros([ROWS, RANKS], tl.float32)
        for k in range(begin, end, STEP):
            inside = mine[:, None] & (k + step < end)[None, :]
            some = tl.load(x_at + k, mask=inside, other=0.0, cache_modifier=".cg")
            if WIDEN:  # the interpreter cannot multiply bf16; the products are the same
                acc = tl.dot(some.to(tl.float32), tl.trans(w.to(tl.float32)), acc, input_precision="ieee")
            else:
                acc = tl.dot(some, tl.trans(w), acc, input_precision="ieee")
            inside = known & (k + STEP + step < end)[None, :]
            w = tl.load(a_at + k + STEP, mask=inside, other=0.0, cache_modifier=".cg")
        parts = tl.num_programs(0) // (SPLITS * tiles * slots)
        at = ((split * rows + row).to(tl.int64) * parts + pair // slots) * rank
        tl.store(low + at[:, None] + number[None, :], acc, mask=mine[:, None] & (number < rank)[None, :])
    if EARLY and (not HIDDEN or tl.program_id(0) == 0):
        gdc_wait()  # Whoever waits for this kernel waits for those before it.


@triton.jit  # type: ignore[untyped-decorator]
def _columns(own, begin, rank, height, col, there, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return RANKS rows of B, from `begin` on, in columns that are there."""
    number = begin + tl.arange(0, RANKS)
    at = own + number[:, None] * height + col[None, :]
    return tl.load(at, mask=(number < rank)[:, None] & there[None, :], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _totals(sums, begin, rank, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return RANKS sums of a row, from `begin` on, of which each row of `sums` is a part."""
    number = begin + tl.arange(0, RANKS)
    return tl.sum(tl.load(sums + number[None, :], mask=(number < rank)[None, :], other=0.0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _plus(acc, total, w, sums, own, rank, height, col, there, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return acc and the products of a row's sums with columns of B, whose first RANKS are total and w."""
    for begin in range(RANKS, rank + RANKS, RANKS):
        acc += tl.sum(total[:, None] * w.to(tl.float32), 0)
        w = _columns(own, begin, rank, height, col, there, RANKS)
        total = _totals(sums, begin, rank, RANKS)
    return acc


@triton.jit(do_not_specialize=["rows", "slots"])  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    low,
    b,
    slot_of,
    y,
    rows,
    slots,
    rank,
    first,
    second,
    third,
    s_y,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    COLS: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Add to COLS numbers of a row of y what its adapter adds.

    first, second, third: heights of the parts, of which there are PARTS.
    """
    if EARLY:
        gdc_launch_dependents()
    block, height = tl.program_id(0), first
    part, start = block * 0, block * 0
    if PARTS > 1:
        blocks = tl.cdiv(first, COLS)
        if block >= blocks:
            block, part, start, height = block - blocks, 1, first, second
            if PARTS > 2:
                others = tl.cdiv(second, COLS)
                if block >= others:
                    block, part, start, height = block - others, 2, first + second, third
    row = tl.program_id(1)
    slot = tl.load(slot_of + row, cache_modifier=".cg")
    if slot > 0:
        col, split = block * COLS + tl.arange(0, COLS), tl.arange(0, SPLITS)
        to, there = y + row.to(tl.int64) * s_y + start + col, col < height
        own = b + start.to(tl.int64) * slots * rank + (slot - 1) * rank * height
        sums = low + (split * rows + row).to(tl.int64)[:, None] * (PARTS * rank) + part * rank
        w = _columns(own, 0, rank, height, col, there, RANKS)
        if EARLY:
            gdc_wait()
        acc = tl.load(to, mask=there, other=0.0).to(tl.float32)
        total = _totals(sums, 0, rank, RANKS)
        acc = _plus(acc, total, w, sums, own, rank, height, col, there, RANKS)
        tl.debug_barrier()  # Threads share what is read, and one of them writes.
        tl.store(to, acc.to(y.dtype.element_ty), mask=there)
    elif EARLY:
        gdc_wait()  # Whoever waits for this kernel waits for those before it.


@triton.jit(do_not_specialize=["rows", "slots"])  # type: ignore[untyped-decorator]
def _expand_gated(  # type: ignore[no-untyped-def]
    low,
    b,
    slot_of,
    both,
    y,
    rows,
    slots,
    rank,
    height,
    s_both,
    s_y,
    RANKS: tl.constexpr,
    COLS: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute COLS numbers of a row of `silu(gate) * up`, with what its adapter adds to the gate and to up.

    All is rounded where `_expand` and `silu_mul` round. height: of the gate, and of up, which are `both`.
    """
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(1)
    slot = tl.load(slot_of + row, cache_modifier=".cg")
    col, split = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, SPLITS)
    there = col < height
    kind = y.dtype.element_ty
    known, adds = there & (slot > 0), tl.where(slot > 0, rank, 0)
    own = b + (slot - 1) * rank * height
    beside = own + slots.to(tl.int64) * rank * height
    w = _columns(own, 0, rank, height, col, known, RANKS)
    v = _columns(beside, 0, rank, height, col, known, RANKS)
    if EARLY:
        gdc_wait()
    at = both + row.to(tl.int64) * s_both + col
    sums = low + (split * rows + row).to(tl.int64)[:, None] * (2 * rank)
    gate = tl.load(at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(at + height, mask=there, other=0.0).to(tl.float32)
    total, other = _totals(sums, 0, adds, RANKS), _totals(sums + rank, 0, adds, RANKS)
    gate = _plus(gate, total, w, sums, own, adds, height, col, known, RANKS)
    up = _plus(up, other, v, sums + rank, beside, adds, height, col, known, RANKS)
    active = silu(gate.to(kind).to(tl.float32)).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    tl.store(y + row.to(tl.int64) * s_y + col, active.to(kind), mask=there)


@dataclass(frozen=True, slots=True)
class _SumsCut:
    """A _SumsCut says how the sums of the first launch are cut.

    padded: rows of a program. step: numbers that it reads at a time. ranks: rows of A that it has, of which
    `tiles` are all. splits: parts of each sum.
    """

    padded: int
    step: int
    ranks: int
    tiles: int
    splits: int

    @classmethod
    def of(cls, rows: int, inner: int, rank: int) -> "_SumsCut":
        """Cut the sums of so many rows."""
        ranks = min(_RANKS, max(16, next_power_of_2(rank)))
        padded = max(16, next_power_of_2(rows))
        step = _NUMBERS // max(ranks, padded)
        return cls(padded, step, ranks, cdiv(rank, ranks), splits_of(inner, step))


def _tile(b: Tensor, rank: int) -> dict[str, int]:
    """Return how many numbers of B a program of the second launch has at a time. Both kinds have the same, so
    that they add up in the same order."""
    ranks = min(_RANKS // 2, next_power_of_2(rank))
    return {"RANKS": ranks, "COLS": min(_COLS, _HELD // (ranks * b.itemsize)), "num_warps": 1}


def add(
    x: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    heights: Sequence[int],
    slot_of: Tensor,
    *,
    early: bool = False,
) -> None:
    """Add to each row of y the products of its adapter, rounded once.

    x: `[rows, in]`, y: `[rows, out]` (rows of both strided).
    a: `[parts, slots, rank, in]`. b: of each part `[slots, rank, height]`, one after the other.
    heights: of each part.
    slot_of: int64 `[rows]`, from 1 on; 0 is no adapter.
    early: whether another call was before this one since slots and adapters were written.
    """
    cut, low = _begin(x, a, b, heights, slot_of)
    _launch_shrink(cut, x, a, slot_of, low, early=uses_pdl() and early)
    _launch_expand(cut, low, y, a, b, heights, slot_of)


def product(
    base: Callable[[], Tensor],
    x: Tensor,
    a: Tensor,
    b: Tensor,
    heights: Sequence[int],
    slot_of: Tensor,
    *,
    early: bool | None,
    gated: bool = False,
) -> Tensor:
    """Return what `base` returns, `[rows, out]`, with the products of each row's adapter added as by `add`.

    base: launches the product of x with a matrix of the model.
    early: as for `add`; None where `base` launches one kernel, `before_others`, beside which the first launch
        can be hidden.
    gated: return `silu(gate) * up`, `[rows, out / 2]`, of that, the first of two parts being the gate.
    """
    cut, low = _begin(x, a, b, heights, slot_of)  # Before memory that `base` may still use is free again.
    y = base()
    hidden = uses_pdl() and early is None
    _launch_shrink(cut, x, a, slot_of, low, early=hidden or (uses_pdl() and bool(early)), hidden=hidden)
    if not gated:
        _launch_expand(cut, low, y, a, b, heights, slot_of)
        return y
    _, slots, rank, _ = a.shape
    (height, other), then, tile = heights, uses_pdl(), _tile(b, rank)
    assert height == other, heights
    _check_outputs(y, heights)
    active = torch.empty(len(y), height, dtype=y.dtype, device=y.device)
    _expand_gated[(cdiv(height, tile["COLS"]), len(y))](
        low, b, slot_of, y, active, len(y), slots, rank, height, y.stride(0), active.stride(0),
        SPLITS=cut.splits, EARLY=then, **tile, **pdl_launch_options(then),
    )  # fmt: skip
    return active


def _begin(
    x: Tensor, a: Tensor, b: Tensor, heights: Sequence[int], slot_of: Tensor
) -> tuple[_SumsCut, Tensor]:
    """Check what is given, and return how it is cut, and memory for the sums of the first launch."""
    (rows, inner), (parts, slots, rank, width) = x.shape, a.shape
    assert 0 < rows <= MOST_ROWS, x.shape
    assert width == inner, (a.shape, x.shape)
    assert len(heights) == parts <= MOST_PARTS, (a.shape, heights)
    assert b.numel() == slots * rank * sum(heights), (b.shape, a.shape, heights)
    assert x.stride(1) == slot_of.stride(0) == 1, x.stride()
    assert a.is_contiguous() and b.is_contiguous()  # noqa: PT018
    assert x.dtype == a.dtype == b.dtype
    cut = _SumsCut.of(rows, inner, rank)
    return cut, torch.empty(cut.splits * rows * parts * rank, dtype=torch.float32, device=x.device)


def _launch_shrink(
    cut: _SumsCut, x: Tensor, a: Tensor, slot_of: Tensor, low: Tensor, *, early: bool, hidden: bool = False
) -> None:
    """Compute `low`, parts of `x @ a.T`."""
    parts, slots, rank, inner = a.shape
    _shrink[(parts * slots * cut.tiles * cut.splits,)](
        x, a, slot_of, low, len(x), cut.tiles, slots, rank, inner, x.stride(0),
        ROWS=cut.padded, RANKS=cut.ranks, STEP=cut.step, WIDEN=x.device.type == "cpu", SPLITS=cut.splits,
        EARLY=early, HIDDEN=hidden, num_warps=4, **pdl_launch_options(early),
    )  # fmt: skip


def _launch_expand(
    cut: _SumsCut, low: Tensor, y: Tensor, a: Tensor, b: Tensor, heights: Sequence[int], slot_of: Tensor
) -> None:
    """Add `low @ b` to y."""
    parts, slots, rank, _ = a.shape
    _check_outputs(y, heights)
    several, then, tile = [*heights, 0, 0][:MOST_PARTS], uses_pdl(), _tile(b, rank)
    _expand[(sum(cdiv(height, tile["COLS"]) for height in heights), len(y))](
        low, b, slot_of, y, len(y), slots, rank, *several, y.stride(0),
        PARTS=parts, SPLITS=cut.splits, EARLY=then, **tile, **pdl_launch_options(then),
    )  # fmt: skip


def _check_outputs(y: Tensor, heights: Sequence[int]) -> None:
    assert y.shape[1] == sum(heights), (y.shape, heights)
    assert y.stride(1) == 1, y.stride()


def suits(x: Tensor, a: Tensor) -> bool:
    """Tell whether `add` computes so many rows, and such parts."""
    return len(x) <= MOST_ROWS and len(a) <= MOST_PARTS and x.stride(1) == 1


def splits_of(inner: int, step: int) -> int:
    """Return into how many parts sums of so many numbers are cut: a power of two, for one step in each."""
    return min(_MOST_SPLITS, next_power_of_2(cdiv(inner, step)))
