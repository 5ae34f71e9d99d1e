"""Reduces a sum over the GPUs of one machine (all-reduce) in one launch, perhaps with residual sum and norm.

It goes through memory that all of them see. A program has one row. It sends the row to the same program of
every other rank, as words of 64 bits: 32 bits of the row, and the number of the sum, by which the receiver
knows that the word has come. So no flag is sent or waited for, and a row crosses in the time of one write.

Why this is safe. A word of 64 bits is written and read at once, so that a number never stands beside another
sum's bits; no order between words is needed. For each row and sender there are two slots, taken in turns. A
program writes in the slot of sum n + 2 when its launch of sum n + 1 has ended, thus after the receiver's
number n + 1 came. The receiver sent that in a launch after the one that had read sum n. A launch that begins
before the one before it has ended waits for that end first (`in_turn`). All ranks compute the same sums, of
the same rows, in the same order, and each row counts its own: numbers agree. They wrap around, and are
compared for equality only; a slot holds the number of two sums ago.

Every program waits for others' programs, so all of a launch must be on the device at once. `most_rows`, one
for each multiprocessor, are, whatever else runs there, if it ends by itself. A waiting program looks now and
then at a word in host memory, `over`, which ends all waiting, with meaningless results. After `limit`
nanoseconds it writes a 1 there.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.triton.pointwise import in_turn
from penstock.ops.triton.tuning import multiprocessors, next_power_of_2

_MOST = 256
_LOOKS = tl.constexpr(256)
"""Polls between two looks at the host's word, which are slow."""
_TIMED = not triton.knobs.runtime.interpret
"""The interpreter has no clock."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Shared holds the addresses by which ranks reach each other's memory.

    addresses: int64 `[1 + ranks]` on the device: of `over`, int32, and of each rank's window as this rank
        sees it, zeros of `window_bytes`.
    turns: int32 `[rows]` on the device, zeros.
    limit: nanoseconds after which waiting ends.
    """

    rank: int
    ranks: int
    addresses: Tensor
    turns: Tensor
    limit: int


def most_rows(device: torch.device) -> int:
    """Return how many rows a launch may have."""
    return min(multiprocessors(device), _MOST)


def window_bytes(ranks: int, rows: int, dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a rank's window, for rows of `dim` numbers."""
    return ranks * 2 * rows * _words(dim, dtype) * 8


def suits(dim: int, dtype: torch.dtype) -> bool:
    """Tell whether rows of `dim` numbers are whole words."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16) and dim * dtype.itemsize % 4 == 0


def _words(dim: int, dtype: torch.dtype) -> int:
    return dim * dtype.itemsize // 4


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(words, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the numbers in words, in float32: the lower halves and the upper ones.

    In float32 both are the words themselves.
    """
    if tl.float32 == KIND:
        low = words.to(tl.float32, bitcast=True)
        high = low
    else:
        low = words.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(low, high, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the words of those numbers, rounded to KIND."""
    if tl.float32 == KIND:
        words = low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = lower | (high.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return words


@triton.jit
def _slot(turn):  # type: ignore[no-untyped-def]
    return turn & 1


@triton.jit
def _look(at, there, absent, turn):  # type: ignore[no-untyped-def]
    """Return a row's words with their numbers, and whether any has not come."""
    got = tl.load(at, mask=there, other=absent, volatile=True)
    return got, tl.max(((got >> 32).to(tl.int32) != turn).to(tl.int32), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    y,
    addresses,
    turns,
    limit,
    eps,
    s_x,
    s_r,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    MOST: tl.constexpr,
    WORDS: tl.constexpr,
    COLS: tl.constexpr,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    TIMED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Sum one row over all ranks, as WORDS words of numbers of KIND. Grid [rows].

    MOST: rows that windows have room for.
    NORMS: whether the sum is added to the residual and normalised.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, COLS)
    there = cols < WORDS
    in_turn(EARLY)
    turn = tl.load(turns + row) + 1
    slot = (_slot(turn) * MOST + row) * WORDS + cols
    own = tl.load(x + row * s_x + cols, mask=there, other=0)
    sent = (turn.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    for other in tl.static_range(RANKS):
        if other != RANK:
            theirs = tl.load(addresses + 1 + other).to(tl.pointer_type(tl.int64))
            tl.store(theirs + RANK * 2 * MOST * WORDS + slot, sent, mask=there)
    if NORMS:  # On their way while the others' are.
        before = tl.load(residual + row * s_r + cols, mask=there, other=0)
        gain = tl.load(weight + cols, mask=there, other=0)
    over = tl.load(addresses).to(tl.pointer_type(tl.int32))
    mine = tl.load(addresses + 1 + RANK).to(tl.pointer_type(tl.int64))
    absent = turn.to(tl.int64) << 32
    begun = tl.full([], 0, tl.int64)
    if TIMED:
        begun = globaltimer()
    low = tl.zeros([COLS], tl.float32)
    high = tl.zeros([COLS], tl.float32)
    for other in tl.static_range(RANKS):
        words = own
        if other != RANK:
            at = mine + other * 2 * MOST * WORDS + slot
            got, late = _look(at, there, absent, turn)
            looks = 0
            while late > 0:
                got, late = _look(at, there, absent, turn)
                looks += 1
                if looks % _LOOKS == 0:
                    if TIMED:  # noqa: SIM102 -- no clock where this is interpreted
                        if globaltimer() - begun > limit:
                            tl.store(over, 1)
                    if tl.load(over, volatile=True) != 0:
                        late = 0
            words = got.to(tl.int32)
        more_low, more_high = _numbers(words, KIND)
        low += more_low
        high += more_high
    if NORMS:
        # Rounded where a sum, what adds it to the residual, and a norm would round, one after the other.
        low, high = _numbers(_rounded(low, high, KIND), KIND)
        before_low, before_high = _numbers(before, KIND)
        total = _rounded(low + before_low, high + before_high, KIND)
        tl.debug_barrier()  # several threads may have read one number, where these are few
        tl.store(residual + row * s_r + cols, total, mask=there)
        low, high = _numbers(total, KIND)
        if tl.float32 == KIND:
            scale = tl.rsqrt(tl.sum(low * low, 0) / WORDS + eps)
        else:
            scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * WORDS) + eps)
        low, high = _numbers(_rounded(low * scale, high * scale, KIND), KIND)
        gain_low, gain_high = _numbers(gain, KIND)
        tl.store(y + row * WORDS + cols, _rounded(low * gain_low, high * gain_high, KIND), mask=there)
    else:
        tl.store(x + row * s_x + cols, _rounded(low, high, KIND), mask=there)
    tl.debug_barrier()  # All threads have read it.
    tl.store(turns + row, turn)


def all_reduce(x: Tensor, shared: Shared) -> None:
    """Put the sum over all ranks in the place of x `[rows, dim]` (rows strided).

    It is added up in float32 in the order of ranks.
    """
    _launch(x, shared)


def sum_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, shared: Shared) -> Tensor:
    """Add the sum of x over all ranks to `residual`, in place, and return the norm of that, contiguous.

    That is what `all_reduce` and `add_rms_norm` make of it, each rounded, but that squares are added up
    in another order. x is left as it was.

    x, residual: `[rows, dim]` (rows strided).
    weight: `[dim]`.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert residual.shape == x.shape, (residual.shape, x.shape)
    assert residual.stride(1) == weight.stride(0) == 1, (residual.stride(), weight.stride())
    assert weight.shape == x.shape[1:], (weight.shape, x.shape)
    assert x.dtype == residual.dtype == weight.dtype, (x.dtype, residual.dtype, weight.dtype)
    _launch(x, shared, residual, weight, y, eps)
    return y


def _launch(
    x: Tensor,
    shared: Shared,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    y: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    rows, dim = x.shape
    assert suits(dim, x.dtype), (x.shape, x.dtype)
    assert rows <= len(shared.turns), (x.shape, shared.turns.shape)
    assert x.stride(1) == 1, x.stride()
    if not rows:
        return
    words = _words(dim, x.dtype)
    each = x.view(torch.int32)
    stream = each if residual is None else residual.view(torch.int32)
    cols, early = next_power_of_2(words), uses_pdl()
    warps = min(16, max(4, cols // 256))
    _sum[(rows,)](
        each,
        stream,
        each if weight is None else weight.view(torch.int32),
        each if y is None else y.view(torch.int32),
        shared.addresses,
        shared.turns,
        shared.limit,
        eps,
        each.stride(0),
        stream.stride(0),
        RANK=shared.rank,
        RANKS=shared.ranks,
        MOST=len(shared.turns),
        WORDS=words,
        COLS=cols,
        KIND=_KINDS[x.dtype],
        NORMS=residual is not None,
        TIMED=_TIMED,
        EARLY=early,
        num_warps=warps,
        **pdl_launch_options(early),
    )


_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
