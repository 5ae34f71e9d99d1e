"""Draws a row's token in three looks at its logits, each by many programs at once, without a sort.

Top-k and top-p leave the tokens above a threshold, and of those at it the first few. The first look finds the
likeliest token and, from a few notes of every chunk, a bound below which the threshold cannot be. The second,
which only rows with a threshold need, counts the tokens from the bound on and adds up their likelihood, by
their distance below the likeliest, in a thousand bins. So the bin of the threshold is known. In the third,
tokens in the bins above race: the one whose logit with noise added is highest is the best. The third also
lists the tokens in the threshold's bin, which are few. Among these the threshold itself is searched for, and
those that it leaves race with the best.

Why this is exact. Noise and sums with it have the same bits everywhere, so a race may be run in any parts.
Likelihoods are integers, 2**42 for the likeliest token, and so are their sums. None is rounded, and two sums
of the same tokens are equal wherever they were made. A likelihood below one counts as impossible: a whole
vocabulary of such tokens is 1e-7 of the likeliest one, as little as a float32 exponential may be wrong; and
with the highest noise it loses to the likeliest one with the lowest. Bounds and bins only say where to look.
A bin holds an interval of logits, and its tokens are compared logit by logit. If they are more than the list
can hold (thousands within a hundredth of a nat, or equal), the whole row is gone through instead.

Why this is deterministic. Integers may be added in any order, and the greatest of them may be looked for in
any; the order of the list does not matter. A row's result depends on its own logits and settings alone.

Why this is safe. Each program counts itself in after a barrier behind all its writes, by an atomic addition
that releases and acquires. The one that finds the others of its row counted sees what they wrote, and goes on
alone. No program waits for another. The three looks are launches, which the stream orders.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.sampling import DRAW_FIELDS
from penstock.ops.triton.bins import (
    ALL,
    BEST,
    BOUND,
    COUNT,
    CUT,
    CUT_COUNT,
    CUT_MASS,
    ENDED,
    FIRST,
    FIRST_MASS,
    LAST,
    PEAK,
    REACH,
    TIES,
    below_of,
    bin_of,
    goal_of,
    is_last,
    load_logits,
    load_warm,
    mass_of,
    notes_of,
    number_of,
    order_of,
    read_ends,
    read_least,
    read_wish,
    tally_of,
)
from penstock.ops.triton.gumbel import LARGEST, race, read_key, run_words
from penstock.ops.triton.threshold import draw_tokens
from penstock.ops.triton.tuning import cdiv, next_power_of_2

_CHUNK = 4096
"""Tokens of a program."""
_GROUP = 64
"""Tokens of a group, of which the first look notes the likeliest."""
_BINS = 1024
_LISTED = 4096
"""Tokens of a row that may be listed."""
_PART = 1024
"""Tokens of a list that are looked at at a time."""
_REGISTERS = 64, 80
"""Most registers of a thread in the second look and the third: four and three programs fit a multiprocessor,
without spilling."""


@triton.jit  # type: ignore[untyped-decorator]
def _peaks(  # type: ignore[no-untyped-def]
    logits,
    asked,
    tally,
    notes,
    s_logits,
    VOCAB,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    BINS: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """Run the first look: find the likeliest token and a bound of the threshold. Grid [chunks, draws]."""
    chunk, draw, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    EACH: tl.constexpr = CHUNK // GROUP
    known, own = tally_of(tally, draw, chunks, BINS), notes_of(notes, draw, chunks, EACH)
    place, heat, most, nucleus = read_wish(asked, draw, VOCAB, FIELDS)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    each = load_logits(logits + place * s_logits, ids, VOCAB)
    top = tl.max(each, 0)
    tl.store(own + chunk, top)
    if (most > 0) | (nucleus < 1):
        tl.store(own + chunks + chunk, tl.min(tl.where(each > float("-inf"), each, float("inf")), 0))
    if most > 0:
        groups = chunk * EACH + tl.arange(0, EACH)
        tl.store(own + 3 * chunks + groups, tl.max(tl.reshape(each, [EACH, GROUP]), 1))
    elif nucleus < 1:
        shares = tl.where(
            each == top, 1.0, tl.exp((each - tl.where(top > float("-inf"), top, 0.0)) * (1 / heat))
        )
        tl.store(own + 2 * chunks + chunk, tl.sum(shares, 0))
    if is_last(known + ENDED, chunks):
        peak, bound = _bound(own, chunks, heat, most, nucleus, VOCAB, CHUNKS, EACH)
        tl.store(known + PEAK, order_of(peak).to(tl.int64))
        tl.store(known + BOUND, order_of(bound).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _bound(own, chunks, heat, most, nucleus, VOCAB, CHUNKS: tl.constexpr, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the highest logit by the temperature, and a logit below which neither top-k nor top-p ends.

    A row without either goes on to where likelihoods end.
    """
    each = tl.arange(0, CHUNKS)
    tops = tl.div_rn(tl.load(own + each, mask=each < chunks, other=float("-inf"), cache_modifier=".cg"), heat)
    peak = tl.max(tops, 0)
    bound = peak - REACH
    if (most > 0) | (nucleus < 1):
        floors = tl.load(own + chunks + each, mask=each < chunks, other=float("inf"), cache_modifier=".cg")
        bound = tl.maximum(bound, tl.div_rn(tl.min(floors, 0), heat))
    if most > 0:
        # If the highest logits of `most` groups are at or above a bound, so are at least `most` tokens. The
        # bound is searched bit by bit, as steps below the peak.
        BITS: tl.constexpr = 10
        groups = tl.arange(0, CHUNKS * EACH)
        highs = tl.load(
            own + 3 * chunks + groups, mask=groups < chunks * EACH, other=float("-inf"), cache_modifier=".cg"
        )
        highs = tl.div_rn(highs, heat)
        below = tl.where(highs == peak, 0.0, peak - highs)
        steps = (tl.minimum(below, 2 * REACH) * ((1 << BITS) / REACH)).to(tl.int32)
        step = tl.full((), 0, tl.int32)
        for bit in tl.static_range(BITS):
            further = step + (1 << (BITS - 1 - bit))
            step = tl.where(tl.sum((steps < further).to(tl.int32), 0) < most, further, step)
        near = steps <= step
        enough = tl.sum(near.to(tl.int32), 0) >= most
        bound = tl.where(enough, tl.maximum(bound, tl.min(tl.where(near, highs, peak), 0)), bound)
    elif nucleus < 1:
        # If all tokens were just below the bound, they would have less likelihood than top-p leaves out. The
        # 0.01 covers rounding.
        shares = tl.load(own + 2 * chunks + each, mask=each < chunks, other=0.0, cache_modifier=".cg")
        mean = tl.sum(shares * tl.where(tops == peak, 1.0, tl.exp(tops - peak)), 0) / VOCAB
        bound = tl.maximum(bound, peak + tl.minimum(tl.log((1 - nucleus).to(tl.float32) * mean), 0.0) - 0.01)
    return peak, bound


# Without a known alignment of rows, the compiler gives neighbouring threads neighbouring tokens, which suits
# atomic additions and scattered stores. Otherwise it would first exchange tokens between threads.
@triton.jit(do_not_specialize=["s_logits"])  # type: ignore[untyped-decorator]
def _bins(  # type: ignore[no-untyped-def]
    logits,
    asked,
    tally,
    notes,
    s_logits,
    VOCAB,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BINS: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """Run the second look: count tokens and add up likelihoods by bin. Grid [chunks, draws]."""
    chunk, draw, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    place, heat, most, nucleus = read_wish(asked, draw, VOCAB, FIELDS)
    if (most > 0) | (nucleus < 1):
        known, own = tally_of(tally, draw, chunks, BINS), notes_of(notes, draw, chunks, CHUNK // GROUP)
        masses = known + TIES + chunks
        counts = masses + BINS
        peak, bound = number_of(tl.load(known + PEAK)), tl.load(known + BOUND).to(tl.int32)
        # Top-p alone goes by the likelihood of all tokens.
        if (most == 0) | (order_of(tl.div_rn(tl.load(own + chunk), heat)) >= bound):
            warm = load_warm(logits + place * s_logits, heat, chunk * CHUNK + tl.arange(0, CHUNK), VOCAB)
            bins = bin_of(warm, order_of(warm), peak, bound, BINS)
            if most > 0:
                tl.atomic_add(counts + bins, 1, mask=bins < BINS, sem="relaxed", scope="gpu")
            if nucleus < 1:
                mass = mass_of(warm, peak)
                tl.atomic_add(masses + bins, mass, mask=bins < BINS, sem="relaxed", scope="gpu")
                if most == 0:
                    tl.atomic_add(known + ALL, tl.sum(mass, 0), sem="relaxed", scope="gpu")
        if is_last(known + ENDED + 1, chunks):
            _choose(known, masses, counts, most, nucleus, BINS)


@triton.jit  # type: ignore[untyped-decorator]
def _choose(known, masses, counts, most, nucleus, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the bin that top-k ends in, BINS without top-k, and the first and last bin that top-p may end in.

    The latter depends on how many tokens of that bin top-k leaves. Without top-p they are the same bin.
    """
    bins = tl.arange(0, BINS)
    cut, above = tl.full((), BINS, tl.int32), tl.full((), 0, tl.int64)
    if most > 0:
        count = tl.load(counts + bins, cache_modifier=".cg")
        cut = tl.sum((tl.cumsum(count, 0) < most).to(tl.int32), 0)
        above = tl.sum(tl.where(bins < cut, count, 0), 0)
    first, last, least, before = cut, cut, tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if nucleus < 1:
        mass = tl.load(masses + bins, cache_modifier=".cg")
        passed = tl.cumsum(mass, 0)
        least = tl.sum(tl.where(bins < cut, mass, 0), 0)
        every = tl.load(known + ALL, cache_modifier=".cg")
        low, high = (
            tl.where(most > 0, least, every),
            tl.where(most > 0, tl.sum(tl.where(bins <= cut, mass, 0), 0), every),
        )
        end = tl.minimum(cut, BINS - 1)
        first = tl.minimum(tl.sum((passed < goal_of(nucleus, low)).to(tl.int32), 0), end)
        last = tl.minimum(tl.sum((passed < goal_of(nucleus, high)).to(tl.int32), 0), end)
        before = tl.sum(tl.where(bins < first, mass, 0), 0)
    tl.store(known + CUT, cut.to(tl.int64))
    tl.store(known + CUT_COUNT, above)
    tl.store(known + CUT_MASS, least)
    tl.store(known + FIRST, first.to(tl.int64))
    tl.store(known + LAST, last.to(tl.int64))
    tl.store(known + FIRST_MASS, before)


@triton.jit(do_not_specialize=["s_logits"])  # type: ignore[untyped-decorator]  # as in the second
def _race(  # type: ignore[no-untyped-def]
    logits,
    asked,
    tally,
    notes,
    listed,
    s_logits,
    VOCAB,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BINS: tl.constexpr,
    LISTED: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """Run the third look: race what is above the bin of the threshold, and list its tokens.

    Grid [chunks, draws].
    """
    chunk, draw, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    known, own = tally_of(tally, draw, chunks, BINS), notes_of(notes, draw, chunks, CHUNK // GROUP)
    place, heat, most, nucleus = read_wish(asked, draw, VOCAB, FIELDS)
    least = read_least(asked, draw, FIELDS)
    peak, bound, cut, first, last = read_ends(known, most, nucleus, BINS)
    if order_of(tl.div_rn(tl.load(own + chunk), heat)) >= bound:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        warm = load_warm(logits + place * s_logits, heat, ids, VOCAB)
        bins = bin_of(warm, order_of(warm), peak, bound, BINS)
        unsure = ((((bins >= first) & (bins <= last)) | (bins == cut)) & (bins < BINS)).to(tl.int32)
        here = tl.sum(unsure, 0)
        if here > 0:
            at = (
                tl.atomic_add(known + COUNT, here, sem="relaxed", scope="gpu").to(tl.int32)
                + tl.cumsum(unsure, 0)
                - 1
            )
            tl.store(listed + draw * LISTED + at, ids, mask=(unsure > 0) & (at < LISTED))
        below = below_of(warm, peak)
        below = tl.where((bins < first) & (tl.exp(below) >= least), below, float("-inf"))
        if tl.max(below, 0) > float("-inf"):
            best = race(ids, below, run_words(chunk * CHUNK, read_key(asked, draw, FIELDS), CHUNK))
            tl.atomic_max(known + BEST, best, sem="relaxed", scope="gpu")


def draw(logits: Tensor, asked: Tensor, tokens: Tensor) -> None:
    """Draw tokens as `penstock.ops.sampling.draw` says, in four launches.

    They take memory for `_BINS` pairs of int64 numbers and a list for each draw.
    """
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    assert logits.shape[1] <= LARGEST.value, logits.shape
    assert asked.dtype == torch.float64, asked.dtype
    assert asked.shape[1] == DRAW_FIELDS, asked.shape
    assert asked.is_contiguous()
    assert tokens.dtype == torch.int64, tokens.dtype
    assert tokens.shape == logits.shape[:1], (tokens.shape, logits.shape)
    assert tokens.is_contiguous()
    draws, vocab, device = len(asked), logits.shape[1], logits.device
    if draws == 0:
        return
    chunk = min(_CHUNK, max(2 * _GROUP, next_power_of_2(vocab)))
    chunks = cdiv(vocab, chunk)
    tally = torch.zeros(draws, TIES.value + chunks + 2 * _BINS, dtype=torch.int64, device=device)
    notes = torch.empty(draws, chunks * (3 + chunk // _GROUP), dtype=torch.float32, device=device)
    listed = torch.empty(draws, _LISTED, dtype=torch.int32, device=device)
    sizes = {
        "CHUNK": chunk, "BINS": _BINS, "FIELDS": DRAW_FIELDS, "num_warps": 8 if chunk > 1024 else 4,
        "enable_fp_fusion": False,
    }  # fmt: skip
    padded, stride = next_power_of_2(chunks), logits.stride(0)
    _peaks[(chunks, draws)](logits, asked, tally, notes, stride, vocab, CHUNKS=padded, GROUP=_GROUP, **sizes)
    _bins[(chunks, draws)](
        logits, asked, tally, notes, stride, vocab, GROUP=_GROUP, maxnreg=_REGISTERS[0], **sizes
    )
    _race[(chunks, draws)](
        logits,
        asked,
        tally,
        notes,
        listed,
        stride,
        vocab,
        GROUP=_GROUP,
        LISTED=_LISTED,
        maxnreg=_REGISTERS[1],
        **sizes,
    )
    draw_tokens[(draws,)](
        logits,
        asked,
        tally,
        listed,
        tokens,
        stride,
        vocab,
        CHUNKS=padded,
        LISTED=_LISTED,
        PART=_PART,
        **sizes,
    )
