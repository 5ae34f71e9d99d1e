"""Decides which experts of a layer have slots on the device, by tensors of fixed sizes alone: no wait, and no
shape that depends on data. `weights/streaming/slots.py` has the rule in words."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """Holds the arrays of one layer on a device. A step changes all but `now` and `decays`.

    number: of the layer, among those that have experts.

    slot_of: int64 `[experts]`: each expert's slot, or -1.
    expert_of: int64 `[slots]`: each slot's expert, or -1.
    value: float32 `[experts]`: the expert's worth when it was last used.
    used: int64 `[experts]`: the step of that.
    now: int64 `[]`: the step, above 0 and above that of the last call.
    decays: float32 `[steps]`: what a use of so many steps ago counts; the last for all before.
    counts: int64 `[4]`: experts asked for so far, those of them that were in slots; experts that were
    foretold, those of them that were then missing.
    turn: int64 `[]`: how often the device has decided, about any layer.
    told: int64 `[2]`: the expert that is foretold, counted through all layers, or -1; and the turn of that,
    since it holds for the next decision alone.
    done: int32 `[COPIERS]`: how many pieces of it each program has fetched.
    """

    number: int
    slot_of: Tensor
    expert_of: Tensor
    value: Tensor
    used: Tensor
    now: Tensor
    decays: Tensor
    counts: Tensor
    turn: Tensor
    told: Tensor
    done: Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """Places say where experts lie: slots of `size` bytes, one behind the other.

    first: the place of the layer's first slot. transit: the first of `ring` places for those that pass
    through, which all layers share; behind them is one for what is fetched ahead. base: address of place 0.
    offsets: of an expert's tensors in its slot, int64 `[tensors]`.
    """

    first: int
    transit: int
    ring: int
    base: int
    size: int
    offsets: Tensor

    def parts(self, most: int) -> tuple[int, int]:
        """Return into how many parts `most` experts are divided at least, so that a part takes up at most
        half of the ring, and how many parts are in the ring at once."""
        half = max(1, self.ring // 2)
        count = max(min(PARTS, most), -(-most // half))
        return count, max(1, self.ring // -(-most // count))


@dataclass(frozen=True, slots=True)
class FetchQueue:
    """A fetch queue has what a recorded step asks for, and how far that has come, on a device.

    asked: int32 `[2]`: the last part that may come; the one before the first of the layer at hand. came:
    int32 `[COPIERS]`: the last part of which each program has brought all that is its own. ended: int64 `[]`:
    the last step in which nothing more is asked for. list: int32 `[HEAD + 3 * most]`: the part before the
    layer's first, and its parts; of each part how many experts come up to its end; of each expert itself,
    counted through all layers, and its place. told: int64 `[2, 2]`: of the layers in turn, as of SlotArrays.
    Numbers of parts go up by one, wrap around, and are compared by their difference.
    """

    asked: Tensor
    came: Tensor
    ended: Tensor
    list: Tensor
    told: Tensor

    HEAD: ClassVar[int] = 2

    @staticmethod
    def of(most: int, told: Tensor) -> "FetchQueue":
        """Return an empty queue for layers of `most` experts."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=told.device)

        return FetchQueue(
            zeros(2), zeros(COPIERS), zeros(dtype=torch.int64), zeros(FetchQueue.HEAD + 3 * most), told
        )

    @property
    def most(self) -> int:
        """Return the experts of a layer."""
        return (len(self.list) - self.HEAD) // 3


COPIERS = 8
"""Programs that fetch at once."""
PARTS = 2
"""Parts in which experts come that have room in half of the ring: what is computed when all have come is the
last part, and each part is a launch of every kernel."""


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """ExpertParts say which experts come to a layer, part by part, and where all that it needs are.

    coming: int64 `[2, most]`: experts and their places, in the order in which they come; behind them those
    that the CPU computes, which have no place; -1 behind the last.
    starts: int64 `[parts + 2]`: part p is those from `starts[p]` to before `starts[p + 1]`. The last is the
    expert that was fetched ahead, as far as `done` says, or -1. Where the CPU computes some, one more says
    how many are missing, with these. tables: int64 `[parts, experts, tensors]`: the addresses of a part's
    experts, 0 for all others. Those that were there before are in the first table. done: as of SlotArrays.
    """

    coming: Tensor
    starts: Tensor
    tables: Tensor
    done: Tensor

    @property
    def shared(self) -> bool:
        """Tell whether the CPU may compute some of the experts."""
        return len(self.starts) > len(self.tables) + 2
