"""A kernel that decides which experts of a layer have slots: one program, since all of it depends on all of
it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.slots import SlotArrays

_CHUNK = 512
"""Choices of tokens that are counted at a time."""


@triton.jit(do_not_specialize=["pairs", "last"])  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    asked,
    slot_of,
    expert_of,
    value,
    used,
    now,
    decays,
    counts,
    out,
    pairs,
    last,
    margin,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
    BINS: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Sort those that come and the slots that give way, each by one integer of its worth and its number, and
    let the first change places. Worth is not negative, so its bits have its order."""
    NEVER: tl.constexpr = (1 << 63) - 1
    bins, wide = tl.arange(0, BINS), tl.arange(0, WIDE)
    found = tl.zeros([BINS], tl.int32)
    for first in range(0, pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        found += tl.histogram(tl.load(asked + at, mask=at < pairs, other=EXPERTS).to(tl.int32), BINS)
    there = bins < EXPERTS
    wanted = (found > 0) & there
    time = tl.load(now)
    ago = tl.minimum(time - tl.load(used + bins, mask=there, other=0), last)
    worth = tl.load(value + bins, mask=there, other=0.0) * tl.load(decays + ago, mask=there, other=0.0)
    worth = tl.where(wanted, worth + 1.0, worth)
    tl.store(value + bins, worth, mask=wanted)
    tl.store(used + bins, time + tl.zeros([BINS], tl.int64), mask=wanted)
    missing = wanted & (tl.load(slot_of + bins, mask=there, other=0) < 0)
    bits = worth.to(tl.int32, bitcast=True).to(tl.int64)
    coming = tl.sort(tl.where(missing, ((0x7FFFFFFF - bits) << 32) | bins.to(tl.int64), NEVER))
    none = tl.full([BINS], -1, tl.int64)
    tl.store(out + bins, tl.where(coming < NEVER, coming & 0xFFFFFFFF, none), mask=bins < MOST)
    tl.store(out + MOST + bins, none, mask=bins < MOST)
    tl.store(out + 2 * MOST + bins, none, mask=bins < MOST)
    many = tl.sum(wanted.to(tl.int64))
    tl.store(counts, tl.load(counts) + many)
    tl.store(counts + 1, tl.load(counts + 1) + many - tl.sum(missing.to(tl.int64)))
    tl.debug_barrier()  # What is read from here on, other threads have written.
    held = tl.load(expert_of + wide, mask=wide < SLOTS, other=-1)
    full = held >= 0
    seen = tl.load(used + held, mask=full, other=0)
    decay = tl.load(decays + tl.minimum(time - seen, last), mask=full, other=0.0)
    staying = tl.load(value + held, mask=full, other=0.0) * decay
    bits = staying.to(tl.int32, bitcast=True).to(tl.int64) + 1
    key = (tl.where(full, bits, 0) << 32) | wide.to(tl.int64)
    giving = tl.sort(tl.where((wide < SLOTS) & (seen < time), key, NEVER))
    slot, empty = giving & 0xFFFFFFFF, (giving >> 32) == 0
    least = ((giving >> 32) - 1).to(tl.int32).to(tl.float32, bitcast=True)
    expert = tl.load(out + wide, mask=wide < MOST, other=-1)
    comes = tl.load(value + expert, mask=expert >= 0, other=0.0)
    change = (expert >= 0) & (giving < NEVER) & (empty | (comes >= margin * least))
    before = tl.load(expert_of + slot, mask=change, other=-1)
    tl.debug_barrier()  # What is written from here on, others have read.
    tl.store(expert_of + slot, expert, mask=change)
    tl.store(slot_of + before, tl.full([WIDE], -1, tl.int64), mask=change & (before >= 0))
    tl.store(slot_of + expert, slot, mask=change)
    tl.store(out + MOST + wide, slot, mask=change)
    tl.store(out + 2 * MOST + wide, before, mask=change)


def slot_step(asked: Tensor, arrays: SlotArrays, most: int, margin: float) -> Tensor:
    """Return what `ops.slots.slot_step_reference` does, and change the arrays as it does."""
    experts, slots = len(arrays.value), len(arrays.expert_of)
    assert asked.is_contiguous()
    assert 0 < most <= experts, (most, experts)
    out = torch.empty(3, most, dtype=torch.int64, device=asked.device)
    bins = max(32, triton.next_power_of_2(experts + 1))
    _step[(1,)](
        asked,
        arrays.slot_of,
        arrays.expert_of,
        arrays.value,
        arrays.used,
        arrays.now,
        arrays.decays,
        arrays.counts,
        out,
        asked.numel(),
        len(arrays.decays) - 1,
        margin,
        EXPERTS=experts,
        SLOTS=slots,
        MOST=most,
        BINS=bins,
        WIDE=max(32, triton.next_power_of_2(slots)),
        CHUNK=_CHUNK,
        num_warps=8 if bins > 256 else 4,
        enable_fp_fusion=False,
    )
    return out
