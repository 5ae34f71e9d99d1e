"""Adds the products of LoRA adapters for a few rows, each of its own adapter, in two launches.

The first computes `x @ A.T` of each row's own adapter, the second adds `(x @ A.T) @ B` to what the model's
matrix says. Both know the rows' slots from the device alone. Of slots that no row has, nothing is read.

Sums of the first launch are cut into parts that the second one adds, so results do not depend on which
program is faster, nor on the adapters of other rows. The second launch has programs for each row, which wait
for memory once: rows of many adapters would wait for one after the other in a program of theirs.

Why this is safe. Where launches may be early (`kernels.pdl_launches`), each reads the rows' slots and the
first of its adapter's numbers before the kernels before this one have ended. A step's first launch here is
not early (`add`), so all that came before it had ended, and with it what writes slots and adapters: no kernel
that comes later in a step does. All else is read, and everything written, behind `gdc_wait`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.kernels import pdl_launch_options, uses_pdl

MOST_ROWS = 64
"""Largest number of rows of `add`."""
MOST_PARTS = 3
_NUMBERS, _COLS, _RANKS, _MOST_SPLITS = 8192, 256, 64, 32
"""Numbers of A that a program reads at a time, columns of B, rows of A, and parts of sums."""
_KEYS = 128
"""Rows of B, of all slots together, that `of_adapters` multiplies at a time."""
NO_ADAPTERS = {"PARTS": 0, "RANKS": 1, "KEYS": 1, "LOW_SPLITS": 1}
"""Constants of a product without them."""


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
) -> None:
    """Compute a part of the sums of RANKS rows of A of one slot, for the rows that have it."""
    if EARLY:
        gdc_launch_dependents()
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    block, pair = tile % tiles, tile // tiles  # A pair is a slot of a part.
    row, number = tl.arange(0, ROWS), block * RANKS + tl.arange(0, RANKS)
    slot = tl.load(slot_of + row, mask=row < rows, other=0)
    mine = slot == pair % slots + 1
    if tl.max(mine.to(tl.int32), 0) > 0:
        step = tl.arange(0, STEP)
        each = tl.cdiv(tl.cdiv(inner, STEP), SPLITS) * STEP
        begin = split * each
        end = tl.minimum(begin + each, inner)
        x_at = x + row.to(tl.int64)[:, None] * s_x + step[None, :]
        a_at = a + (pair.to(tl.int64) * rank + number)[:, None] * inner + step[None, :]
        known = (number < rank)[:, None]
        w = tl.load(a_at + begin, mask=known & (begin + step < end)[None, :], other=0.0)
        if EARLY:
            gdc_wait()
        acc = tl.zeros([ROWS, RANKS], tl.float32)
        for k in range(begin, end, STEP):
            some = tl.load(x_at + k, mask=mine[:, None] & (k + step < end)[None, :], other=0.0)
            if WIDEN:  # the interpreter cannot multiply bf16; the products are the same
                acc = tl.dot(some.to(tl.float32), tl.trans(w.to(tl.float32)), acc, input_precision="ieee")
            else:
                acc = tl.dot(some, tl.trans(w), acc, input_precision="ieee")
            w = tl.load(a_at + k + STEP, mask=known & (k + STEP + step < end)[None, :], other=0.0)
        parts = tl.num_programs(0) // (SPLITS * tiles * slots)
        at = ((split * rows + row).to(tl.int64) * parts + pair // slots) * rank
        tl.store(low + at[:, None] + number[None, :], acc, mask=mine[:, None] & (number < rank)[None, :])
    elif EARLY:
        gdc_wait()  # Whoever waits for this kernel waits for those before it.


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
    slot = tl.load(slot_of + row)
    if slot > 0:
        col, split = block * COLS + tl.arange(0, COLS), tl.arange(0, SPLITS)
        to, there = y + row.to(tl.int64) * s_y + start + col, (col < height)[None, :]
        own = b + start.to(tl.int64) * slots * rank + (slot - 1) * rank * height
        sums = low + (split * rows + row).to(tl.int64)[:, None] * (PARTS * rank) + part * rank
        number = tl.arange(0, RANKS)
        w_at = own + number[:, None] * height + col[None, :]
        w = tl.load(w_at, mask=(number < rank)[:, None] & there, other=0.0)
        if EARLY:
            gdc_wait()
        acc = tl.load(to, mask=col < height, other=0.0).to(tl.float32)
        for begin in range(0, rank, RANKS):
            known = begin + number < rank
            total = tl.sum(tl.load(sums + begin + number[None, :], mask=known[None, :], other=0.0), 0)
            acc += tl.sum(total[:, None] * w.to(tl.float32), 0)
            after = begin + RANKS
            w = tl.load(w_at + after * height, mask=(after + number < rank)[:, None] & there, other=0.0)
        tl.debug_barrier()  # Threads share what is read, and one of them writes.
        tl.store(to, acc.to(y.dtype.element_ty), mask=col < height)
    elif EARLY:
        gdc_wait()  # Whoever waits for this kernel waits for those before it.


@triton.jit  # type: ignore[untyped-decorator]
def of_adapters(  # type: ignore[no-untyped-def]
    low,
    b,
    slot,
    row,
    rows,
    slots,
    rank,
    part,
    parts,
    height,
    col,
    there,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    RANKS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Return what the adapters of rows add to numbers of their products, [ROWS, WIDE] in float32.

    A row's sums stand at its own slot, and zeros at others: one product has all slots, and waits for memory
    once. Of slots that no row has, nothing is read. low: of all rows, [SPLITS, rows, parts, rank]. b: of this
    part, [slots, rank, height]. slot: of each row, 0 for none. col: numbers of the part, if `there`. RANKS: a
    power of two, no less than rank. KEYS: numbers of slots that are multiplied at a time.
    """
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    for base in range(0, slots * RANKS, KEYS):
        key = base + tl.arange(0, KEYS)
        number = key % RANKS
        mine = (slot[:, None] == (key // RANKS + 1)[None, :]) & (number < rank)[None, :]
        wanted = tl.max(mine.to(tl.int32), 0)
        if tl.max(wanted, 0) > 0:
            at = b + (key // RANKS * rank + number).to(tl.int64)[:, None] * height + col[None, :]
            w = tl.load(at, mask=(wanted > 0)[:, None] & there[None, :], other=0.0)
            sums = low + (row * parts + part)[:, None] * rank + number[None, :]
            total = tl.zeros([ROWS, KEYS], tl.float32)
            for split in tl.static_range(SPLITS):
                total += tl.load(sums + split * rows * parts * rank, mask=mine, other=0.0)
            acc = tl.dot(total, w.to(tl.float32), acc, input_precision="tf32x3")
    return acc


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """AdaptedRows are the LoRA adapters of the rows of a product that adds theirs to its own.

    a: `[parts, slots, rank, in]`. b: of each part `[slots, rank, height]`, one after the other.
    heights: of each part.
    slot_of: int64 `[rows]`, from 1 on; 0 is no adapter.
    early: whether another product was before this one since slots and adapters were written.
    """

    a: Tensor
    b: Tensor
    heights: Sequence[int]
    slot_of: Tensor
    early: bool = False

    def begun(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, int, int, int], dict[str, int]]:
        """Launch what computes `x @ A.T`, and return what the product's kernel is given: tensors, numbers,
        and constants."""
        parts, slots, rank, _ = self.a.shape
        low, ranks = shrunk(x, self.a, self.slot_of, early=self.early), int(triton.next_power_of_2(rank))
        keys = min(_KEYS, max(16, int(triton.next_power_of_2(slots * ranks))))
        _, second, third = (*self.heights, 0, 0)[:MOST_PARTS]
        cut = {"PARTS": parts, "RANKS": ranks, "KEYS": keys, "LOW_SPLITS": len(low)}
        return low, self.b, self.slot_of, (slots, rank, second, third), cut


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
    (rows, inner), (parts, slots, rank, width) = x.shape, a.shape
    assert 0 < rows <= MOST_ROWS, x.shape
    assert width == inner, (a.shape, x.shape)
    assert len(heights) == parts <= MOST_PARTS, (a.shape, heights)
    assert y.shape == (rows, sum(heights)), (y.shape, heights)
    assert b.numel() == slots * rank * sum(heights), (b.shape, a.shape, heights)
    assert y.stride(1) == slot_of.stride(0) == 1, y.stride()
    assert b.is_contiguous()
    assert x.dtype == y.dtype == a.dtype == b.dtype
    low, then = shrunk(x, a, slot_of, early=early), uses_pdl()
    several = [*heights, 0, 0][:MOST_PARTS]
    _expand[(sum(triton.cdiv(height, _COLS) for height in heights), rows)](
        low, b, slot_of, y, rows, slots, rank, *several, y.stride(0),
        PARTS=parts, RANKS=min(_RANKS // 2, triton.next_power_of_2(rank)), COLS=_COLS,
        SPLITS=len(low), EARLY=then, num_warps=4, **pdl_launch_options(then),
    )  # fmt: skip


def shrunk(x: Tensor, a: Tensor, slot_of: Tensor, *, early: bool) -> Tensor:
    """Return `x @ A.T` of each row's adapter in parts of sums, float32 `[splits, rows, parts, rank]`; what is
    of rows without an adapter is not written. See `add`."""
    (rows, inner), (parts, slots, rank, _) = x.shape, a.shape
    assert x.stride(1) == 1, x.stride()
    assert a.is_contiguous()
    ranks, padded, step = _cut(rows, rank)
    tiles, splits = triton.cdiv(rank, ranks), splits_of(inner, step)
    low = torch.empty(splits, rows, parts, rank, dtype=torch.float32, device=x.device)
    may = early and uses_pdl()
    _shrink[(parts * slots * tiles * splits,)](
        x, a, slot_of, low, rows, tiles, slots, rank, inner, x.stride(0),
        ROWS=padded, RANKS=ranks, STEP=step, WIDEN=x.device.type == "cpu",
        SPLITS=splits, EARLY=may, num_warps=4, **pdl_launch_options(may),
    )  # fmt: skip
    return low


def _cut(rows: int, rank: int) -> tuple[int, int, int]:
    """Return how many rows of A, rows of x, and numbers of both a program multiplies at a time."""
    ranks = min(_RANKS, max(16, int(triton.next_power_of_2(rank))))
    padded = max(16, int(triton.next_power_of_2(rows)))
    return ranks, padded, _NUMBERS // max(ranks, padded)


def suits(x: Tensor, a: Tensor) -> bool:
    """Tell whether `add` computes so many rows, and such parts."""
    return len(x) <= MOST_ROWS and len(a) <= MOST_PARTS and x.stride(1) == 1


def splits_of(inner: int, step: int) -> int:
    """Return into how many parts sums of so many numbers are cut: a power of two, for one step in each."""
    return min(_MOST_SPLITS, int(triton.next_power_of_2(triton.cdiv(inner, step))))
