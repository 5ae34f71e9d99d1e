"""Prepares the rows of a recorded decode step and finds their likeliest tokens, as kernels.

Where launches may be early (`kernels.pdl_launches`), each kernel waits on the device before it reads or
writes anything.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.steps import LEAST, NO_TOKEN
from penstock.ops.triton.bins import order_of
from penstock.ops.triton.pointwise import in_turn
from penstock.ops.triton.tuning import cdiv, next_power_of_2

_CHUNK = 8192
"""Tokens of the vocabulary that a program looks at."""
_PAGES = 256
"""Blocks of a row's table that are copied at a time."""
_LEAST = tl.constexpr(LEAST)
_NOT_A_NUMBER = tl.constexpr((1 << 63) - 1)
"""Key of a NaN, above those of all numbers."""
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    given,
    table,
    newest,
    frequencies,
    scale,
    pages,
    tokens,
    blocks,
    offsets,
    slots,
    lengths,
    cos,
    sin,
    count,
    s_table,
    SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    HALF: tl.constexpr,
    COLS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Prepare one row of the step. Grid [rows]."""
    in_turn(EARLY)
    mine = tl.program_id(0)
    row, position, token = (
        tl.load(given + mine),
        tl.load(given + count + mine),
        tl.load(given + 2 * count + mine),
    )
    whose, column, page = (
        tl.load(given + 3 * count + mine),
        tl.load(given + 4 * count + mine),
        tl.load(given + 5 * count + mine),
    )
    first = tl.load(given + 6 * count + mine)
    tl.store(table + whose.to(tl.int64) * s_table + column, page)
    at, length = tl.maximum(position, 0), position + 1 - first * SIZE
    for start in range(0, (length + SIZE - 1) // SIZE, PAGES):
        ids = start + tl.arange(0, PAGES)
        there = ids * SIZE < length
        known = tl.load(table + row.to(tl.int64) * s_table + first + ids, mask=there, other=0)
        tl.store(
            pages + mine.to(tl.int64) * s_table + ids,
            tl.where((first + ids == column) & (whose == row), page, known),
            mask=there,
        )
    last = at // SIZE
    block = tl.load(table + row.to(tl.int64) * s_table + last)
    block = tl.where((last == column) & (whose == row), page, block).to(tl.int64)
    offset = (at % SIZE).to(tl.int64)
    tl.store(blocks + mine, block)
    tl.store(offsets + mine, offset)
    tl.store(slots + mine, tl.where(position < 0, -1, block * SIZE + offset))
    tl.store(lengths + mine, length)
    tl.store(tokens + mine, tl.where(token < 0, tl.load(newest + row), token.to(tl.int64)))
    cols, factor = tl.arange(0, COLS), tl.load(scale)
    angle = at.to(tl.float64) * tl.load(frequencies + cols, mask=cols < HALF, other=0.0)
    tl.store(cos + mine * HALF + cols, (tl.cos(angle) * factor).to(tl.float32), mask=cols < HALF)
    tl.store(sin + mine * HALF + cols, (tl.sin(angle) * factor).to(tl.float32), mask=cols < HALF)


def place(
    given: Tensor, table: Tensor, newest: Tensor, frequencies: Tensor, scale: Tensor, block_size: int
) -> tuple[Tensor, ...]:
    """Compute what `penstock.ops.steps.place` says, in one launch."""
    count, half = given.shape[1], len(frequencies)
    assert given.dtype == table.dtype == torch.int32
    assert newest.dtype == torch.int64
    assert frequencies.dtype == scale.dtype == torch.float64
    assert given.is_contiguous()
    assert table.is_contiguous()
    device = given.device
    pages = torch.empty(count, table.shape[1], dtype=torch.int32, device=device)
    tokens, blocks, offsets, slots = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(4))
    lengths = torch.empty(count, dtype=torch.int32, device=device)
    cos, sin = (torch.empty(count, half, dtype=torch.float32, device=device) for _ in range(2))
    early = uses_pdl()
    _place[(count,)](
        given,
        table,
        newest,
        frequencies,
        scale,
        pages,
        tokens,
        blocks,
        offsets,
        slots,
        lengths,
        cos,
        sin,
        count,
        table.shape[1],
        SIZE=block_size,
        PAGES=_PAGES,
        HALF=half,
        COLS=next_power_of_2(half),
        EARLY=early,
        num_warps=4,
        **pdl_launch_options(early),
    )
    return pages, tokens, blocks, offsets, slots, lengths, cos, sin


@triton.jit(do_not_specialize=["vocab"])  # type: ignore[untyped-decorator]
def _find(logits, best, vocab, s_row, CHUNK: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the likeliest token of a chunk of a row. Grid [rows, chunks].

    The key of a token is its logit, as an integer in the same order, above its id; of equal logits the lower
    id has the greater key.
    """
    in_turn(EARLY)
    row = tl.program_id(0)
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row.to(tl.int64) * s_row + ids, mask=ids < vocab, other=float("-inf")).to(
        tl.float32
    )
    order = order_of(value).to(tl.int64)
    key = tl.where(ids < vocab, (order << 32) | (0xFFFFFFFF - ids.to(tl.int64)), _LEAST)
    key = tl.where(value == value, key, _NOT_A_NUMBER)
    tl.atomic_max(best + row, tl.max(key, 0), sem="relaxed")


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _settle(best, rows, newest, tokens, count, ROWS: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the tokens of ROWS rows to their places, and reset `best` for the next step."""
    in_turn(EARLY)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = at < count
    key = tl.load(best + at, mask=there, other=0)
    token = tl.where(key == _NOT_A_NUMBER, _NO_TOKEN, 0xFFFFFFFF - (key & 0xFFFFFFFF))
    tl.store(tokens + at, token, mask=there)
    tl.store(newest + tl.load(rows + at, mask=there, other=0), tl.maximum(token, 0), mask=there)
    tl.store(best + at, tl.full([ROWS], _LEAST, tl.int64), mask=there)


def likeliest(logits: Tensor, rows: Tensor, newest: Tensor, tokens: Tensor, best: Tensor) -> None:
    """Compute what `penstock.ops.steps.likeliest` says, in two launches."""
    count, vocab = logits.shape
    assert logits.stride(1) == rows.stride(0) == 1
    assert tokens.dtype == newest.dtype == best.dtype == torch.int64
    assert rows.dtype == torch.int32
    assert len(best) >= count
    assert tokens.shape == rows.shape == (count,)
    early = uses_pdl()
    chunk = min(_CHUNK, next_power_of_2(vocab))
    _find[(count, cdiv(vocab, chunk))](
        logits,
        best,
        vocab,
        logits.stride(0),
        CHUNK=chunk,
        EARLY=early,
        num_warps=8,
        **pdl_launch_options(early),
    )
    _settle[(cdiv(count, 128),)](
        best, rows, newest, tokens, count, ROWS=128, EARLY=early, num_warps=4, **pdl_launch_options(early)
    )
