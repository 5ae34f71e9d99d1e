"""Kernels that route tokens to experts: which experts each token takes, and its pairs by expert, in blocks.

A pair is a token and one of its experts, numbered token * top_k + rank. Pairs are put in the order of their
experts, and those of an expert cut into blocks of rows, all on the device. Blocks have room for as many as
there could be; those beyond the ones that there are have the expert -1.

Few tokens are routed by one program of `_route_few`; for more, `_choose` and `_arrange` have many programs.
Both choose by the same function, and say the same of the same logits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.arch.spec import MoeSpec
from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.triton.choices import best_of, choice_options
from penstock.ops.triton.pointwise import in_turn

_CHUNK = 8192
"""Pairs that a program arranges at a time."""
FEW_TOKENS, FEW_SCORES = 8, 1024
"""Most tokens that one program routes, and most scores that it has room for; more take longer than two
launches. An expert then has one block at most, which has room for all tokens."""


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Return how many blocks there can be of so many pairs, however they fall on experts."""
    used = min(pairs, experts)
    return used + (pairs - used) // rows


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    logits,
    correction,
    chosen,
    shares,
    tokens,
    s_logits,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
    TOP: tl.constexpr,
    TOP_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    CORRECTION: tl.constexpr,
    SCALE: tl.constexpr,
    TINY: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_COLS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Choose the experts of ROWS tokens."""
    in_turn(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, share = best_of(
        logits, correction, row, tokens, s_logits, EXPERTS, COLS, TOP, TOP_COLS, ROWS, SIGMOID, NORMALISE,
        CORRECTION, SCALE, TINY, GROUPS, GROUP_COLS, TOP_GROUPS,
    )  # fmt: skip
    ranks = tl.arange(0, TOP_COLS)[None, :]
    taken = (ranks < TOP) & (row < tokens)[:, None]
    at = row.to(tl.int64)[:, None] * TOP + ranks
    tl.store(chosen + at, expert, mask=taken)
    tl.store(shares + at, share.to(shares.dtype.element_ty), mask=taken)


def choose(logits: Tensor, moe: MoeSpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each token's shares, of the dtype of logits, and experts int32, both `[tokens, top_k]`, the best
    first.

    Scores and shares are computed in float32, and shares rounded once. Of equal scores the lower expert wins.

    logits: `[tokens, experts]`, with the bias of the router if it has one.
    correction: float32 `[experts]`, of a router with a correction.
    """
    tokens, top_k = len(logits), moe.top_k
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    shares = torch.empty(tokens, top_k, dtype=logits.dtype, device=logits.device)
    if tokens == 0:
        return shares, chosen
    options = choice_options(logits, moe, correction)
    rows = max(1, min(8, 1024 // options["COLS"])) if tokens > 256 else 1
    _choose[(triton.cdiv(tokens, rows),)](
        logits,
        correction if correction is not None else logits,
        chosen,
        shares,
        tokens,
        logits.stride(0),
        **options,
        ROWS=rows,
        EARLY=uses_pdl(),
        num_warps=4 if rows * options["COLS"] >= 512 else 1,
        **pdl_launch_options(uses_pdl()),
    )
    return shares, chosen


@triton.jit(do_not_specialize=["pairs", "bound"])  # type: ignore[untyped-decorator]
def _arrange(  # type: ignore[no-untyped-def]
    chosen,
    order,
    blocks,
    counts,
    pairs,
    bound,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write one expert's pairs, and its blocks. Every program counts all pairs, to know where its own begin;
    the first ends the list."""
    in_turn(EARLY)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    found = tl.zeros([BINS], tl.int32)
    for first in range(0, pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        found += tl.histogram(tl.load(chosen + at, mask=at < pairs, other=EXPERTS), BINS)
    found = tl.where(bins < EXPERTS, found, 0)
    cut = (found + ROWS - 1) // ROWS
    count = tl.sum(tl.where(bins == expert, found, 0))
    start = tl.sum(tl.where(bins < expert, found, 0))
    block = tl.sum(tl.where(bins < expert, cut, 0))
    tl.store(counts + expert, count)
    ahead = tl.arange(0, WIDE)
    for number in range(0, tl.cdiv(count, ROWS), WIDE):
        one = number + ahead
        mine = one < tl.cdiv(count, ROWS)
        tl.store(blocks + block + one, expert + tl.zeros([WIDE], tl.int32), mask=mine)
        tl.store(blocks + bound + block + one, start + one * ROWS, mask=mine)
        tl.store(
            blocks + 2 * bound + block + one, tl.minimum(start + (one + 1) * ROWS, start + count), mask=mine
        )
    if expert == 0:
        for number in range(tl.sum(cut), bound, WIDE):
            tl.store(blocks + number + ahead, tl.full([WIDE], -1, tl.int32), mask=number + ahead < bound)
    if count > 0:
        for first in range(0, pairs, CHUNK):
            at = first + tl.arange(0, CHUNK)
            mine = (tl.load(chosen + at, mask=at < pairs, other=EXPERTS) == expert).to(tl.int32)
            tl.store(order + start + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)
            start += tl.sum(mine)


def arrange(chosen: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs by expert, chosen int32 `[tokens, top_k]` contiguous: their order int32 `[pairs]`,
    blocks int32 `[3, most_blocks]`, and how many each expert has, int32 `[experts]`.

    A block is an expert, -1 behind the last block, and where in the order its pairs begin and end: at most
    `rows`. Experts, and the pairs of each, keep their order.
    """
    pairs, device = chosen.numel(), chosen.device
    assert chosen.dtype == torch.int32, chosen.dtype
    assert chosen.is_contiguous()
    bound = most_blocks(pairs, experts, rows)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    blocks = torch.empty(3, bound, dtype=torch.int32, device=device)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    chunk = min(_CHUNK, max(128, triton.next_power_of_2(pairs)))
    _arrange[(experts,)](
        chosen,
        order,
        blocks,
        counts,
        pairs,
        bound,
        EXPERTS=experts,
        BINS=max(32, triton.next_power_of_2(experts + 1)),
        CHUNK=chunk,
        ROWS=rows,
        WIDE=32,
        EARLY=uses_pdl(),
        num_warps=8 if chunk > 1024 else 4,
        **pdl_launch_options(uses_pdl()),
    )
    return order, blocks, counts


@triton.jit(do_not_specialize=["tokens", "bound"])  # type: ignore[untyped-decorator]
def _route_few(  # type: ignore[no-untyped-def]
    logits,
    correction,
    padding,
    shares,
    order,
    blocks,
    counts,
    tokens,
    bound,
    s_logits,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
    TOP: tl.constexpr,
    TOP_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    CORRECTION: tl.constexpr,
    SCALE: tl.constexpr,
    TINY: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_COLS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    BINS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Choose the experts of all tokens, at most ROWS, and arrange their pairs. An expert has one block."""
    in_turn(EARLY)
    row, ranks = tl.arange(0, ROWS), tl.arange(0, TOP_COLS)[None, :]
    expert, share = best_of(
        logits, correction, row, tokens, s_logits, EXPERTS, COLS, TOP, TOP_COLS, ROWS, SIGMOID, NORMALISE,
        CORRECTION, SCALE, TINY, GROUPS, GROUP_COLS, TOP_GROUPS,
    )  # fmt: skip
    taken = (ranks < TOP) & (row < tokens)[:, None]
    pair = row[:, None] * TOP + ranks
    tl.store(shares + pair, share.to(shares.dtype.element_ty), mask=taken)
    if PADDED:
        nobody = tl.load(padding + row, mask=row < tokens, other=0) != 0
        of_first = tl.sum(tl.where(row[:, None] == 0, expert, 0), 0)[None, :]
        expert = tl.where(nobody[:, None], of_first, expert)
    # Places without a pair have an expert behind all others.
    every = tl.reshape(tl.where(taken, expert, EXPERTS), [ROWS * TOP_COLS])
    number, bins = tl.arange(0, ROWS * TOP_COLS), tl.arange(0, BINS)
    other, one = every[:, None], every[None, :]
    before = (other < one) | ((other == one) & (number[:, None] < number[None, :]))
    place = tl.sum(before.to(tl.int32), 0)
    tl.store(order + place, number // TOP_COLS * TOP + number % TOP_COLS, mask=every < EXPERTS)
    found = tl.sum((other == bins[None, :]).to(tl.int32), 0)
    used = (found > 0) & (bins < EXPERTS)
    # One scan for both: pairs, and blocks above them.
    upto = tl.cumsum(found + (used.to(tl.int32) << 16), 0)
    end, block = upto & 0xFFFF, (upto >> 16) - 1
    tl.store(counts + bins, found, mask=bins < EXPERTS)
    tl.store(blocks + block, bins, mask=used)
    tl.store(blocks + bound + block, end - found, mask=used)
    tl.store(blocks + 2 * bound + block, end, mask=used)
    rest = (number >= tl.sum(used.to(tl.int32))) & (number < bound)
    tl.store(blocks + number, tl.full(number.shape, -1, tl.int32), mask=rest)


@dataclass(frozen=True, slots=True)
class Routed:
    """Routed says which experts a step's tokens take.

    shares: of each token's experts, `[tokens, top_k]`, the best first.
    order: pairs in the order of their experts, int32 `[pairs]`.
    blocks: blocks of pairs, int32 `[3, most_blocks]`, as of `arrange`.
    counts: how many pairs each expert has, int32 `[experts]`.
    """

    shares: Tensor
    order: Tensor
    blocks: Tensor
    counts: Tensor


def route(
    logits: Tensor, moe: MoeSpec, correction: Tensor | None, padding: Tensor | None, rows: int
) -> Routed:
    """Choose each token's experts, as `choose`, and arrange the pairs in blocks of `rows`, as `arrange`.

    padding: bool `[tokens]`, tokens that take what the first one takes, not being padding.
    """
    (tokens, experts), device = logits.shape, logits.device
    options = choice_options(logits, moe, correction) if 0 < tokens <= min(FEW_TOKENS, rows) else None
    padded = FEW_TOKENS if tokens > 1 else 1  # few classes, each with a kernel of its own
    if options is None or padded * options["COLS"] > FEW_SCORES:
        shares, chosen = choose(logits, moe, correction)
        if padding is not None:
            chosen = torch.where(padding.unsqueeze(1), chosen[:1], chosen)
        return Routed(shares, *arrange(chosen, experts, rows))
    pairs = tokens * moe.top_k
    bound = most_blocks(pairs, experts, rows)
    shares = torch.empty(tokens, moe.top_k, dtype=logits.dtype, device=device)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    blocks = torch.empty(3, bound, dtype=torch.int32, device=device)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    _route_few[(1,)](
        logits,
        correction if correction is not None else logits,
        padding if padding is not None else logits,
        shares,
        order,
        blocks,
        counts,
        tokens,
        bound,
        logits.stride(0),
        **options,
        ROWS=padded,
        PADDED=padding is not None,
        BINS=triton.next_power_of_2(experts),
        EARLY=uses_pdl(),
        num_warps=4 if padded * options["COLS"] >= 512 else 1,
        **pdl_launch_options(uses_pdl()),
    )
    return Routed(shares, order, blocks, counts)
