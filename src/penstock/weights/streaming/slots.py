"""Decides which experts of a mixture have slots on the device, as a program over arrays of fixed sizes.

A step of a layer is told which experts its tokens chose, and says which of them are in slots, which come, and
which slot each of these takes. One kernel does that (`ops/triton/slots.py`), without a wait and without a
shape that depends on data, so it may run within a recorded step. `bench.routing.policies.Ranked` plays the
same rule on the host.

The rule. An expert is worth its uses, each of which counts half after `half_life` steps (LRFU: Lee et al.,
IEEE Trans. Computers 50, 2001; a short half-life is LRU, an endless one LFU). Worth is kept for every expert,
in a slot or not, so what has left is remembered (a ghost) and comes back at its old rank. Of those that come,
the one of most worth takes the slot of least worth, and so on, as long as it is worth `margin` times as much;
an expert that finds no such slot comes for one use (a bypass). Slots are those of one layer: layers do not
compete, and the arrays of a layer fit in a block of threads.

Three things hold after every step: an expert is in one slot at most; `slot_of` and `expert_of` are inverse to
each other; an expert that is asked for in a step does not leave in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.ops.slots import COPIERS, SlotArrays

_FORGOTTEN = 20
"""Half-lives after which no more is forgotten."""
_LONGEST = 1 << 15
"""Most entries of the table of decays."""


@dataclass(frozen=True)
class SlotRule:
    """Holds the two numbers of the rule; `benchmarks/expert_slots.py` has measured them.

    half_life: steps after which a use counts half.
    margin: how many times the worth of one that stays one that comes must be worth; 0 lets all stay.
    """

    half_life: float = 128.0
    margin: float = 1.0

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """Return what a use of so many steps ago counts, float32 `[steps]`; the last for all before."""
        steps = min(int(_FORGOTTEN * self.half_life) + 2, _LONGEST)
        return np.exp2(-np.arange(steps) / self.half_life).astype(np.float32)


class SlotTable:
    """Holds the arrays of all layers on a device, at addresses that never change.

    Their first dimension is the layer; `ops.slots.SlotArrays` has the others. now: int64 `[]`, the step.
    computed: int64 `[]`, experts that the CPU computed instead of their coming.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        slots: int,
        device: torch.device,
        rule: SlotRule = SlotRule(),
        *,
        fuller: int = 0,
    ) -> None:
        """Begin with empty slots. slots: of each layer. fuller: layers that have one more, the first ones."""
        assert 0 <= slots + (fuller > 0) <= experts, f"{slots} slots for {experts} experts"
        self.slot_of = torch.full((layers, experts), -1, dtype=torch.int64, device=device)
        self.expert_of = torch.full((layers, slots + (fuller > 0)), -1, dtype=torch.int64, device=device)
        self.value = torch.zeros(layers, experts, device=device)
        self.used = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        self.now = torch.zeros((), dtype=torch.int64, device=device)
        self.counts = torch.zeros(layers, 4, dtype=torch.int64, device=device)
        self.computed = torch.zeros((), dtype=torch.int64, device=device)
        self.turn = torch.zeros((), dtype=torch.int64, device=device)
        # What is foretold for a layer is written while that of the layer before is still read.
        self.told = told = torch.full((2, 2), -1, dtype=torch.int64, device=device)
        done = torch.zeros(2, COPIERS, dtype=torch.int32, device=device)
        decays = torch.from_numpy(rule.table.copy()).to(device)
        held = [row[: slots + (layer < fuller)] for layer, row in enumerate(self.expert_of)]
        rows = zip(self.slot_of, held, self.value, self.used, self.counts, strict=True)
        self._layers = [
            SlotArrays(layer, *row[:4], self.now, decays, row[4], self.turn, told[layer % 2], done[layer % 2])
            for layer, row in enumerate(rows)
        ]

    def begin(self) -> None:
        """Begin a step: time goes on."""
        self.now += 1

    def arrays(self, layer: int) -> SlotArrays:
        """Return the arrays of one layer, for the kernel that plays the rule."""
        return self._layers[layer]

    def empty(self, layer: int) -> None:
        """Forget who is in the slots of a layer; what its experts are worth stays known."""
        self.slot_of[layer].fill_(-1)
        self.expert_of[layer].fill_(-1)

    def hits(self) -> Sequence[float]:
        """Return the share of asked-for experts that were in slots, layer by layer. The host waits for it."""
        return [hit / max(asked, 1) for asked, hit, *_ in self.counts.tolist()]
