"""Describes the arrays by which a device decides which experts have slots, and where experts lie."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """SlotArrays holds the arrays of one layer, as `SlotTable` has them.

    slot_of int64 `[experts + 1]`, expert_of int64 `[slots]`, value float32 `[experts]`, used int64
    `[experts]`, counts int64 `[2]`; of all layers: now int64 `[]`, decays float32 `[steps]`.
    """

    slot_of: Tensor
    expert_of: Tensor
    value: Tensor
    used: Tensor
    counts: Tensor
    now: Tensor
    decays: Tensor


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
