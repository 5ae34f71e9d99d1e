"""Multiplies one row, or a few, of activations with a matrix.

A decode step reads every weight once, and is bound by that.

Why this is safe where launches overlap. A kernel that begins before the one before it has ended reads only
weights, which are constant, until `gdc_wait` has returned. That returns when all earlier kernels have ended
and their results can be seen. Every kernel of such a chain waits, so the end of one is the end of all before
it. It writes nothing before the wait either. Of `before_others` a kernel lets the next one begin only behind
its wait. All that was launched before it has ended then, so the next one may read that at once.

Why it is safe to share a sum. Each program stores its part, then counts itself among those of its tile. The
count publishes its part and shows those of others. The program that counts last reads all parts, in their
order, and leaves a zero. No other launch counts there meanwhile: launches of a stream wait for each other's
end before they count, and a recorded step has counters of its own (`kernels.counting`).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.kernels import counters, pdl_launch_options, uses_pdl
from penstock.ops.triton.pointwise import silu
from penstock.ops.triton.tuning import cdiv, multiprocessors, next_power_of_2

MOST_ROWS = 64
"""Largest number of rows of `few_rows`."""
_STEP = 128
_LEAST_COLS = 256
_MEASURED = (9, 0)
_ROOM = 226 << 10
"""Bytes of shared memory on a multiprocessor of those."""


@triton.jit(do_not_specialize=["outer"])  # type: ignore[untyped-decorator]
def _one_row(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    y,
    outer,
    s_w,
    INNER: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    EARLY: tl.constexpr,
    BEFORE_OTHERS: tl.constexpr,
) -> None:
    """Compute COLS numbers of y, each from a row of the matrix; if GATED, each from two rows, `outer`
    apart."""
    if EARLY and not BEFORE_OTHERS:
        gdc_launch_dependents()
    cols, inner = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, STEP)
    there = cols < outer
    at = weight + cols.to(tl.int64)[:, None] * s_w + inner[None, :]
    beside = outer.to(tl.int64) * s_w
    # The first stretch of the weights is loading while this still waits for x.
    inside = there[:, None] & (inner < INNER)[None, :]
    w = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    v = w
    if GATED:
        v = tl.load(at + beside, mask=inside, other=0.0, eviction_policy="evict_first")
    if EARLY:
        gdc_wait()
    if EARLY and BEFORE_OTHERS:
        gdc_launch_dependents()
    if INNER <= STEP:
        row = tl.load(x + inner, mask=inner < INNER, other=0.0).to(tl.float32)[None, :]
        total = tl.sum(w.to(tl.float32) * row, 1)
        other = tl.sum(v.to(tl.float32) * row, 1) if GATED else total
    else:
        sums = tl.zeros([COLS, STEP], tl.float32)
        others = tl.zeros([COLS, STEP], tl.float32)
        for start in tl.range(STEP, INNER + STEP, STEP, num_stages=1):
            row = tl.load(x + start - STEP + inner, mask=start - STEP + inner < INNER, other=0.0).to(
                tl.float32
            )[None, :]
            next_inside = there[:, None] & (start + inner < INNER)[None, :]
            next_w = tl.load(at + start, mask=next_inside, other=0.0, eviction_policy="evict_first")
            sums += w.to(tl.float32) * row
            w = next_w
            if GATED:
                next_v = tl.load(
                    at + beside + start, mask=next_inside, other=0.0, eviction_policy="evict_first"
                )
                others += v.to(tl.float32) * row
                v = next_v
        total = tl.sum(sums, 1)
        other = tl.sum(others, 1) if GATED else total
    if BIASED:
        total += tl.load(bias + cols, mask=there, other=0.0).to(tl.float32)
        if GATED:
            other += tl.load(bias + outer + cols, mask=there, other=0.0).to(tl.float32)
    if GATED:
        active = silu(total.to(y.dtype.element_ty).to(tl.float32)).to(y.dtype.element_ty).to(tl.float32)
        total = active * other.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + cols, total.to(y.dtype.element_ty), mask=there)


def one_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
    tuning: tuple[int, int, int] | None = None,
    before_others: bool = False,
) -> Tensor:
    """Return `x @ weight.T + bias` for one row of x, `[1, out]`, added up in float32.

    x: `[1, in]`.
    weight: `[out, in]` (rows strided).
    bias: `[out]`.
    gated: return `silu(gate) * up`, `[1, out / 2]`, where the first half of the result is the gate. It is
        rounded where `silu_mul` rounds.
    out: where the result is written.
    tuning: see `one_row_tuning`.
    before_others: whether the next launch may read, as soon as it begins, all that this one may.
    """
    inner, outer = x.shape[1], len(weight) // (2 if gated else 1)
    assert x.shape[0] == 1, x.shape
    assert weight.shape == (outer * (2 if gated else 1), inner), (weight.shape, x.shape)
    assert x.stride(1) == weight.stride(1) == 1, (x.stride(), weight.stride())
    assert bias is None or (bias.shape == (len(weight),) and bias.stride(0) == 1)
    assert out is None or (out.shape == (1, outer) and out.stride(1) == 1 and out.dtype == x.dtype)
    y = torch.empty(1, outer, dtype=x.dtype, device=x.device) if out is None else out
    cols, step, warps = tuning or one_row_tuning(inner, gated, x.element_size())
    early = uses_pdl()
    _one_row[(cdiv(outer, cols),)](
        x,
        weight,
        bias if bias is not None else x,
        y,
        outer,
        weight.stride(0),
        INNER=inner,
        COLS=cols,
        STEP=min(step, next_power_of_2(inner)),
        GATED=gated,
        BIASED=bias is not None,
        EARLY=early,
        BEFORE_OTHERS=early and before_others,
        num_warps=warps,
        **pdl_launch_options(early),
    )
    return y


def one_row_tuning(inner: int, gated: bool, itemsize: int) -> tuple[int, int, int]:
    """Choose the numbers of a program, its stretch of a row, and its warps: the one place for constants."""
    if itemsize > 2:
        return (2 if gated else 4), 2048, 4
    if inner > 4096:  # A whole row at once, although the stretch may be partly empty: there is no second one.
        return 2, 16384, 8
    if gated:
        return 2, 4096, 4
    return 4, 2048, (8 if inner > 2048 else 4)


@triton.jit
def _fetch(at, size):  # type: ignore[no-untyped-def]
    """Fetch `size` bytes, a multiple of 16, from each address to the L2 cache, without waiting (prefetch)."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [at.to(tl.int64), tl.full(at.shape, 0, tl.int32) + size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows", "splits"])  # type: ignore[untyped-decorator]
def _few_rows(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    y,
    parts,
    arrivals,
    rows,
    splits,
    outer,
    inner,
    s_x,
    s_w,
    s_y,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    FETCHED: tl.constexpr,
    LEFT: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    JOINS: tl.constexpr,
    WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
    BEFORE_OTHERS: tl.constexpr,
) -> None:
    """Compute one of `splits` parts of the sums of COLS rows of the matrix.

    GATED: COLS / 2 of the rows are of the gate, and each has its `up` row, `outer` further on.
    LEFT: whether x is the left operand. The left one has 64 rows for each group of four warps.
    """
    if EARLY and not BEFORE_OTHERS:
        gdc_launch_dependents()
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    WIDE: tl.constexpr = COLS // 2 if GATED else COLS
    each = tl.cdiv(tl.cdiv(inner, STEP), splits) * STEP
    begin = split * each
    end = tl.minimum(begin + each, inner)
    place = tl.arange(0, COLS)
    own = tl.minimum(tile * WIDE + (place // 2 if GATED else place), outer - 1)
    if GATED:
        own += place % 2 * outer
    first = weight + own.to(tl.int64) * s_w
    if FETCHED > 0:  # noqa: SIM102 -- known when it is compiled, the other when it runs
        if begin < end:
            _fetch(first + begin, tl.minimum(FETCHED, (end - begin) * 2))
    if EARLY:
        gdc_wait()
    if EARLY and BEFORE_OTHERS:
        gdc_launch_dependents()
    row, step = tl.arange(0, ROWS), tl.arange(0, STEP)
    at = first[:, None] + step[None, :]
    x_at = x + tl.minimum(row, rows - 1)[:, None] * s_x + step[None, :]
    acc = tl.zeros([ROWS, COLS] if LEFT else [COLS, ROWS], tl.float32)
    for k in tl.range(begin, end, STEP, num_stages=STAGES):
        w = tl.load(at + k)
        some = tl.load(x_at + k)
        if WIDEN:  # the interpreter cannot multiply bf16; the products are the same
            w, some = w.to(tl.float32), some.to(tl.float32)
        acc = (
            tl.dot(some, tl.trans(w), acc, input_precision="ieee")
            if LEFT
            else tl.dot(w, tl.trans(some), acc, input_precision="ieee")
        )
    last = True
    if JOINS:
        inside = row[:, None] * COLS + place[None, :] if LEFT else place[:, None] * ROWS + row[None, :]
        base = parts + tile.to(tl.int64) * splits * (ROWS * COLS) + inside
        tl.store(base + split * (ROWS * COLS), acc)
        tl.debug_barrier()  # all threads' stores before the count of one
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if last:
            acc = tl.zeros_like(acc)
            for part in tl.range(splits):
                acc += tl.load(base + part * (ROWS * COLS), cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
    if last:
        kind = y.dtype.element_ty
        total = acc if LEFT else tl.trans(acc)
        if BIASED:
            total += tl.load(bias + own)[None, :].to(tl.float32)
        number = tile * WIDE + tl.arange(0, WIDE)
        if GATED:
            gate, up = tl.split(tl.reshape(total, [ROWS, WIDE, 2]))
            active = silu(gate.to(kind).to(tl.float32)).to(kind).to(tl.float32)
            total = active * up.to(kind).to(tl.float32)
        tl.store(
            y + row[:, None] * s_y + number[None, :],
            total.to(kind),
            mask=(row < rows)[:, None] & (number < outer)[None, :],
        )


@dataclass(frozen=True, slots=True)
class FewRowsTuning:
    """FewRowsTuning says how a product of a few rows is cut.

    cols: rows of the matrix that a program has.
    step: numbers of each row that are read at a time.
    splits: programs that share the sums of the same rows.
    stages: steps in flight.
    fetched: bytes of each row that are prefetched before x is waited for.
    left: whether x is the left operand.
    """

    cols: int
    step: int
    splits: int
    stages: int
    warps: int = 4
    fetched: int = 512
    left: bool = False


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
    tuning: FewRowsTuning | None = None,
    before_others: bool = False,
) -> Tensor:
    """Compute `one_row` for x `[rows, in]` (rows strided) of at most MOST_ROWS.

    Returns `[rows, out]`, or `[rows, out / 2]` if gated. The order of additions depends on the matrix's shape
    and on the number of rows, not on the values of other rows.
    """
    rows, inner = x.shape
    outer = len(weight) // (2 if gated else 1)
    assert 0 < rows <= MOST_ROWS, x.shape
    assert weight.shape == (outer * (2 if gated else 1), inner), (weight.shape, x.shape)
    assert x.stride(1) == weight.stride(1) == 1, (x.stride(), weight.stride())
    assert bias is None or (bias.shape == (len(weight),) and bias.stride(0) == 1)
    assert out is None or (out.shape == (rows, outer) and out.stride(1) == 1 and out.dtype == x.dtype)
    y = torch.empty(rows, outer, dtype=x.dtype, device=x.device) if out is None else out
    padded = max(16, next_power_of_2(rows))
    tuning = tuning or few_rows_tuning(padded, len(weight), inner, multiprocessors(x.device))
    assert inner % tuning.step == 0, (weight.shape, tuning)
    tiles = cdiv(outer, tuning.cols // (2 if gated else 1))
    joins, early = tuning.splits > 1, uses_pdl()
    parts = (
        torch.empty(tiles * tuning.splits * tuning.cols * padded, dtype=torch.float32, device=x.device)
        if joins
        else x
    )
    _few_rows[(tiles * tuning.splits,)](
        x,
        weight,
        x if bias is None else bias,
        y,
        parts,
        counters(tiles, x.device) if joins else x,
        rows,
        tuning.splits,
        outer,
        inner,
        x.stride(0),
        weight.stride(0),
        y.stride(0),
        ROWS=padded,
        COLS=tuning.cols,
        STEP=tuning.step,
        STAGES=tuning.stages,
        FETCHED=tuning.fetched if early else 0,
        LEFT=tuning.left,
        GATED=gated,
        BIASED=bias is not None,
        JOINS=joins,
        WIDEN=x.device.type == "cpu",
        EARLY=early,
        BEFORE_OTHERS=early and before_others,
        num_warps=tuning.warps,
        **pdl_launch_options(early),
    )
    return y


def suits_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Tell whether `few_rows` should be used.

    It is as fast as the library or faster on the GPUs it was measured on, and its launches overlap with
    others.
    """
    return (
        1 < len(x) <= MOST_ROWS
        and x.dtype.itemsize == 2
        and len(weight) >= _LEAST_COLS
        and x.shape[1] % _STEP == 0
        and x.stride(1) == weight.stride(1) == 1
        and x.stride(0) % 8 == weight.stride(0) % 8 == 0
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        and _capability(x.device) == _MEASURED
    )


@lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def few_rows_tuning(rows: int, outer: int, inner: int, many: int) -> FewRowsTuning:
    """Choose the tuning: the one place for constants.

    More rows of the matrix in a program mean that x is read less often; fewer programs have less in flight.
    Sums are shared where there would be hardly one program for every four multiprocessors, since sharing
    takes a while at the end.

    rows: 16, 32 or 64.
    outer, inner: shape of the matrix.
    many: multiprocessors of the GPU.
    """
    left = rows > 32 and outer <= 32 * many
    cols = 32 if left else 64 if rows <= 32 or outer <= 64 * many else 128
    tiles = cdiv(outer, cols)
    splits = (
        max(1, min(4, inner // 512)) if 4 * tiles <= many or (rows <= 32 and 3 * tiles < 1.2 * many) else 1
    )
    each = (cols + rows) * _STEP * 2
    room = _ROOM // (2 if cols < 128 and tiles * splits > many else 1)
    return FewRowsTuning(cols, _STEP, splits, max(2, min(8, room // each)), left=left)
