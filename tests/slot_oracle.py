"""Slots of one layer by plain Python, as the rule of `weights.streaming.slots` says it in words."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from penstock.weights.streaming.slots import SlotRule


@dataclass
class Layer:
    """Experts in slots, and what each expert is worth."""

    experts: int
    slots: int
    rule: SlotRule
    in_slot: dict[int, int] = field(default_factory=dict)
    """The expert of each slot that has one."""
    uses: dict[int, tuple[np.float32, int]] = field(default_factory=dict)
    """The worth at the last use, and when that was."""

    def worth(self, expert: int, now: int) -> np.float32:
        value, used = self.uses.get(expert, (np.float32(0), 0))
        table = self.rule.table
        return np.float32(value * table[min(now - used, len(table) - 1)])

    def step(self, now: int, asked: set[int]) -> list[tuple[int, int, int]]:
        """Who comes, to which slot or -1, and who leaves it or -1; in order."""
        for expert in asked:
            self.uses[expert] = (np.float32(self.worth(expert, now) + np.float32(1)), now)
        there = set(self.in_slot.values())
        coming = sorted(asked - there, key=lambda one: (-self.worth(one, now), one))
        empty = [slot for slot in range(self.slots) if slot not in self.in_slot]
        full = [slot for slot, one in self.in_slot.items() if one not in asked]
        full.sort(key=lambda slot: (self.worth(self.in_slot[slot], now), slot))
        found = []
        for expert in coming:
            slot, left = -1, -1
            if empty:
                slot = empty.pop(0)
            elif full:
                least = self.worth(self.in_slot[full[0]], now)
                if self.worth(expert, now) >= np.float32(self.rule.margin) * least:
                    slot = full.pop(0)
                    left = self.in_slot[slot]
            if slot >= 0:
                self.in_slot[slot] = expert
            found.append((expert, slot, left))
        return found


RULES = [SlotRule(), SlotRule(2.0, 1.0), SlotRule(0.25, 0.0), SlotRule(1e9, 2.5)]


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int, int, int, list[list[list[int]]]]:
    """Experts, slots, tokens of a step times top_k, and what two layers are asked for, step by step."""
    experts = draw(st.integers(1, 12))
    slots, most = draw(st.integers(0, experts)), draw(st.integers(1, 10))
    some = st.lists(st.integers(0, experts - 1), min_size=1, max_size=most)
    return experts, slots, most, draw(st.lists(st.lists(some, min_size=2, max_size=2), max_size=30))
