"""Decides which experts of a layer have slots on the device, by tensors of fixed sizes alone: no wait, and no
shape that depends on data. `weights/streaming/slots.py` has the rule in words."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """Holds the arrays of one layer on a device. A step changes all but `now` and `decays`.

    slot_of: int64 `[experts]`: each expert's slot, or -1.
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
