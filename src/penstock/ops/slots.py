"""Decides which experts of a layer have slots on the device, by tensors of fixed sizes alone: no wait, and no
shape that depends on data. `weights/streaming/slots.py` has the rule in words."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """Holds the arrays of one layer on a device. A step changes all but `now` and `decays`.

    slot_of: int64 `[experts + 1]`: each expert's slot, or -1. The last entry has no meaning.
    expert_of: int64 `[slots]`: each slot's expert, or -1.
    value: float32 `[experts]`: the expert's worth when it was last used.
    used: int64 `[experts]`: the step of that.
    now: int64 `[]`: the step, above 0 and above that of the last call.
    decays: float32 `[steps]`: what a use of so many steps ago counts; the last for all before.
    counts: int64 `[2]`: experts asked for so far, and those of them that were in slots.
    """

    slot_of: Tensor
    expert_of: Tensor
    value: Tensor
    used: Tensor
    now: Tensor
    decays: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """Places say where experts lie: slots of `size` bytes, one behind the other.

    first: the place of the layer's first slot. transit: the first place for those that pass through, of
    `rounds_of`. base: address of place 0. offsets: of an expert's tensors in its slot, int64 `[tensors]`.
    """

    first: int
    transit: int
    rounds_of: int
    base: int
    size: int
    offsets: Tensor


def slot_step(asked: Tensor, arrays: SlotArrays, most: int, margin: float) -> Tensor:
    """Take what the tokens of a layer chose, and return what comes, int64 `[3, most]`: experts, the most
    valuable first, the slot that each takes, and the expert that leaves it; -1 where there is none.

    asked: int32 or int64 of any shape. most: no fewer than the distinct experts among them, or all experts.
    margin: how many times the worth of one that leaves one that comes must be worth.
    """
    slot_of, expert_of, value, used = arrays.slot_of, arrays.expert_of, arrays.value, arrays.used
    wanted = torch.zeros_like(value, dtype=torch.bool).index_fill_(0, asked.flatten().long(), True)
    # What every expert is worth now.
    ago = (arrays.now - used).clamp_(max=len(arrays.decays) - 1)
    worth = value * arrays.decays[ago] + wanted.to(value.dtype)
    value.copy_(torch.where(wanted, worth, value))
    used.copy_(torch.where(wanted, arrays.now, used))
    # Who comes, the most valuable first; and which slots give way, the least valuable first.
    missing = wanted & (slot_of[:-1] < 0)
    coming, experts = torch.where(missing, -worth, torch.inf).sort(stable=True)
    coming, experts = coming[:most], experts[:most]
    held = expert_of.clamp(min=0)
    staying = torch.where(wanted[held], torch.inf, worth[held])
    giving, slots = torch.where(expert_of < 0, -1.0, staying).sort(stable=True)
    pairs = min(most, len(slots))
    giving, slots = giving[:pairs], slots[:pairs]
    # The pairs that change places are the first ones: worth falls on one side and rises on the other.
    enough = (giving < 0) | (-coming[:pairs] >= margin * giving)
    change = (coming[:pairs] < torch.inf) & (giving < torch.inf) & enough
    before = expert_of[slots]
    left = torch.where(change, before, -1)
    expert_of.scatter_(0, slots, torch.where(change, experts[:pairs], before))
    nobody = torch.full_like(left, len(value))
    slot_of.scatter_(0, torch.where(left >= 0, left, nobody), -1)
    slot_of.scatter_(0, torch.where(change, experts[:pairs], nobody), slots)
    arrays.counts.add_(torch.stack((wanted.sum(), (wanted & ~missing).sum())))
    found = torch.full((3, most), -1, dtype=torch.int64, device=value.device)
    found[0] = torch.where(coming < torch.inf, experts, found[0])
    found[1, :pairs] = torch.where(change, slots, -1)
    found[2, :pairs] = left
    return found
