"""Plays policies that choose which experts of a mixture have slots, over recorded routings.

A policy is asked layer by layer which of the asked-for experts are in slots; the others come, and most of
them take the slot of another. None takes the slot of an expert that is asked for in the same step: where all
slots are such, an expert comes for one use and leaves (a bypass). Policies with slots by layer have an equal
part of them for each layer; the others share all slots among all layers.

LRFU is Lee et al., "LRFU: A Spectrum of Policies", IEEE Trans. Computers 50 (2001); ARC Megiddo and Modha,
FAST 2003; S3-FIFO Yang et al., SOSP 2023; SLRU Karedla et al., 1994; the ideal Belady, IBM Systems Journal 5
(1966), with bypasses.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.weights.streaming import experts as streaming
from penstock.weights.streaming.residency import spread
from penstock.weights.streaming.slots import SlotRule

Steps = Sequence[Sequence[NDArray[np.int64]]]
"""The distinct experts that each layer is asked for, step by step."""
_GHOSTS = 1.0
"""Ghosts of S3-FIFO for each slot of its main queue."""


@dataclass(frozen=True, slots=True)
class Room:
    """Says what a policy chooses for: `layers` layers of `experts` experts each, and so many slots in all."""

    layers: int
    experts: int
    slots: int

    @property
    def by_layer(self) -> list[int]:
        """Return the slots of each layer, where layers do not share them."""
        each, more = divmod(self.slots, self.layers)
        return [each + (layer < more) for layer in range(self.layers)]


class SlotPolicy(Protocol):
    """Chooses which experts have slots."""

    def step(self, layer: int, asked: NDArray[np.int64]) -> int:
        """Take the distinct experts that a layer is asked for, and return how many are in slots."""


class Ranked:
    """Keeps experts by a value that each has, in a slot or not: recent and frequent uses, as `SlotRule` says.

    The values of experts without a slot are its ghosts.
    """

    def __init__(self, room: Room, rule: SlotRule, *, shared: bool) -> None:
        """Begin with empty slots. shared: whether layers share them."""
        self._room, self._rule, self._shared = room, rule, shared
        self._free = [room.slots] if shared else room.by_layer
        shape = room.layers, room.experts
        self._value, self._used = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
        self._resident = np.zeros(shape, bool)
        self._now, self._layer = 0, -1

    def step(self, layer: int, asked: NDArray[np.int64]) -> int:
        """Take what is asked for, and return the hits."""
        self._now += layer <= self._layer
        self._layer = layer
        value, used = self._value[layer], self._used[layer]
        value[asked] = value[asked] * self._decay(used[asked]) + np.float32(1)
        used[asked] = self._now
        misses = asked[~self._resident[layer, asked]]
        pool = 0 if self._shared else layer
        free = min(self._free[pool], len(misses))
        misses = misses[np.argsort(-value[misses], kind="stable")]
        self._resident[layer, misses[:free]] = True
        self._free[pool] -= free
        if len(misses) > free:
            self._exchange(layer, asked, misses[free:])
        return len(asked) - len(misses)

    def _decay(self, used: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._rule.table[np.minimum(self._now - used, len(self._rule.table) - 1)]

    def _exchange(self, layer: int, asked: NDArray[np.int64], misses: NDArray[np.int64]) -> None:
        """Let misses, the most valuable first, take the slots of the least valuable residents."""
        part = slice(None) if self._shared else slice(layer, layer + 1)
        worth = np.where(self._resident[part], self._value[part] * self._decay(self._used[part]), np.inf)
        worth[layer if self._shared else 0, asked] = np.inf
        flat = worth.ravel()
        leave = np.argsort(flat, kind="stable")[: len(misses)]
        leave = leave[flat[leave] < np.inf]
        come = self._value[layer, misses[: len(leave)]]
        lower = come >= flat[leave] * np.float32(self._rule.margin)
        self._resident[part].reshape(-1)[leave[lower]] = False
        self._resident[layer, misses[: len(leave)][lower]] = True


class Static:
    """Keeps the same experts for ever."""

    def __init__(self, room: Room, kept: Iterable[int]) -> None:
        """Keep these experts. Their numbers go on from layer to layer: those of layer l begin at
        `l * experts`."""
        self._resident = np.zeros(room.layers * room.experts, bool)
        self._resident[list(kept)] = True
        self._experts = room.experts

    def step(self, layer: int, asked: NDArray[np.int64]) -> int:
        """Take what is asked for, and return the hits."""
        return int(self._resident[asked + layer * self._experts].sum())


class Ideal:
    """Keeps those that are asked for soonest, over all layers: no policy can hit more often."""

    def __init__(self, room: Room, steps: Steps) -> None:
        """Know the future: the steps that it will be asked for."""
        never = len(steps) * room.layers
        after: dict[int, int] = {}
        self._next: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * never
        for at in range(never - 1, -1, -1):
            step, layer = divmod(at, room.layers)
            ids = steps[step][layer] + layer * room.experts
            self._next[at] = np.array([after.get(id, never) for id in ids.tolist()], np.int64)
            after.update(dict.fromkeys(ids.tolist(), at))
        self._room, self._at, self._never = room, 0, never
        self._use = np.full(room.layers * room.experts, -1, np.int64)
        """The next use of each expert that has a slot, else -1."""
        self._free = room.slots

    def step(self, layer: int, asked: NDArray[np.int64]) -> int:
        """Take what is asked for, and return the hits."""
        ids, following = asked + layer * self._room.experts, self._next[self._at]
        self._at += 1
        hit = self._use[ids] >= 0
        self._use[ids[hit]] = following[hit]
        come, uses = ids[~hit], following[~hit]
        self._use[come] = uses
        beyond = len(come) - self._free
        self._free = max(-beyond, 0)
        if beyond > 0:  # The latest of all leave, among them perhaps some that have just come.
            self._use[np.argpartition(-self._use, beyond - 1)[:beyond]] = -1
        return int(hit.sum())


class Today:
    """Plays `weights.streaming.experts.Experts` as it is: counts that fade, a look at the least used now and
    then, and an exchange where one that came is used clearly more often. Layers share the slots."""

    def __init__(self, room: Room) -> None:
        """Begin with homes that are spread evenly."""
        every = room.layers * room.experts
        self._resident = np.array(spread([1] * every, room.slots, every), bool)
        self._used: Counter[int] = Counter()
        self._least: list[int] = []
        self._experts, self._passes, self._layer = room.experts, 0, -1

    def step(self, layer: int, asked: NDArray[np.int64]) -> int:
        """Take what is asked for, and return the hits."""
        if layer <= self._layer:
            self._next_pass()
        self._layer = layer
        ids = (asked + layer * self._experts).tolist()
        self._used.update(ids)
        misses = [id for id in ids if not self._resident[id]]
        for id in misses:
            while self._least and (not self._resident[self._least[-1]] or self._least[-1] in ids):
                self._least.pop()
            rival = self._used[self._least[-1]] if self._least else None
            if rival is not None and self._used[id] >= streaming.CLEARLY * rival + 2:
                self._resident[self._least.pop()] = False
                self._resident[id] = True
        return len(ids) - len(misses)

    def _next_pass(self) -> None:
        self._passes += 1
        if self._passes % streaming.FADE == 0:
            for id in self._used:
                self._used[id] //= 2
        if self._passes % streaming.REVIEW == 0:
            there = np.flatnonzero(self._resident).tolist()
            self._least = sorted(there, key=lambda id: -self._used[id])


class _Queues(Protocol):
    """Orders the experts of one layer."""

    def hit(self, expert: int) -> bool:
        """Tell whether it has a slot, and note the use."""

    def admit(self, expert: int, pinned: frozenset[int]) -> None:
        """Give a slot to an expert that has none; none of `pinned` leaves for it."""


class ByLayer:
    """Has queues of their own for each layer."""

    def __init__(self, room: Room, make: Callable[[int], _Queues]) -> None:
        """make: returns the queues of a layer with so many slots."""
        self._queues = [make(slots) for slots in room.by_layer]

    def step(self, layer: int, asked: NDArray[np.int64]) -> int:
        """Take what is asked for, and return the hits."""
        queues, experts = self._queues[layer], asked.tolist()
        misses = [expert for expert in experts if not queues.hit(expert)]
        pinned = frozenset(experts)
        for expert in misses:
            queues.admit(expert, pinned)
        return len(experts) - len(misses)


def _oldest(queue: Iterable[int], pinned: frozenset[int]) -> int | None:
    return next((expert for expert in queue if expert not in pinned), None)


class LruQueue:
    """Lets the one leave that was used longest ago."""

    def __init__(self, slots: int) -> None:
        """Begin empty."""
        self._slots, self._queue = slots, OrderedDict[int, None]()

    def hit(self, expert: int) -> bool:
        """Tell whether it has a slot, and note the use."""
        if expert not in self._queue:
            return False
        self._queue.move_to_end(expert)
        return True

    def admit(self, expert: int, pinned: frozenset[int]) -> None:
        """Give it the slot of the oldest."""
        if len(self._queue) >= self._slots:
            leaves = _oldest(self._queue, pinned)
            if leaves is None:
                return
            del self._queue[leaves]
        self._queue[expert] = None


class Slru:
    """Keeps a queue of those that were used once, and one of those used again, of half of the slots."""

    def __init__(self, slots: int) -> None:
        """Begin empty."""
        self._slots, self._most = slots, slots // 2
        self._once, self._again = OrderedDict[int, None](), OrderedDict[int, None]()

    def hit(self, expert: int) -> bool:
        """Tell whether it has a slot, and note the use."""
        if expert not in self._once and expert not in self._again:
            return False
        self._once.pop(expert, None)
        self._again[expert] = None
        self._again.move_to_end(expert)
        if len(self._again) > self._most:
            self._once[self._again.popitem(last=False)[0]] = None
        return True

    def admit(self, expert: int, pinned: frozenset[int]) -> None:
        """Give it the slot of the oldest that was used once."""
        if len(self._once) + len(self._again) >= self._slots:
            leaves = _oldest([*self._once, *self._again], pinned)
            if leaves is None:
                return
            self._once.pop(leaves, None)
            self._again.pop(leaves, None)
        self._once[expert] = None


class Arc:
    """Divides the slots between recent and frequent ones as ghosts of both are asked for."""

    def __init__(self, slots: int) -> None:
        """Begin empty."""
        self._slots, self._part = slots, 0.0
        self._recent, self._frequent = OrderedDict[int, None](), OrderedDict[int, None]()
        self._recent_ghosts, self._frequent_ghosts = OrderedDict[int, None](), OrderedDict[int, None]()

    def hit(self, expert: int) -> bool:
        """Tell whether it has a slot, and note the use."""
        if expert not in self._recent and expert not in self._frequent:
            return False
        self._recent.pop(expert, None)
        self._frequent[expert] = None
        self._frequent.move_to_end(expert)
        return True

    def admit(self, expert: int, pinned: frozenset[int]) -> None:
        """Give it a slot; ghosts of one queue make that queue longer."""
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        into = self._recent
        if expert in self._recent_ghosts:
            self._part = min(self._slots, self._part + max(frequent / max(recent, 1), 1))
            into = self._frequent
        elif expert in self._frequent_ghosts:
            self._part = max(0.0, self._part - max(recent / max(frequent, 1), 1))
            into = self._frequent
        self._recent_ghosts.pop(expert, None)
        self._frequent_ghosts.pop(expert, None)
        if len(self._recent) + len(self._frequent) >= self._slots and not self._leave(pinned):
            return
        into[expert] = None

    def _leave(self, pinned: frozenset[int]) -> bool:
        """Let one leave, and remember it. Tell whether any could."""
        from_recent = len(self._recent) > self._part
        pairs = (self._recent, self._recent_ghosts), (self._frequent, self._frequent_ghosts)
        for queue, ghosts in pairs if from_recent else reversed(pairs):
            leaves = _oldest(queue, pinned)
            if leaves is not None:
                del queue[leaves]
                ghosts[leaves] = None
                if len(ghosts) > self._slots:
                    ghosts.popitem(last=False)
                return True
        return False


class S3Fifo:
    """Lets those that were used once leave early: a small queue before the main one, and ghosts."""

    def __init__(self, slots: int) -> None:
        """Begin empty."""
        self._slots, self._few = slots, max(slots // 10, 1)
        self._small, self._main = deque[int](), deque[int]()
        self._ghosts = deque[int](maxlen=max(int(_GHOSTS * slots), 1))
        self._uses: dict[int, int] = {}

    def hit(self, expert: int) -> bool:
        """Tell whether it has a slot, and note the use."""
        if expert not in self._uses:
            return False
        self._uses[expert] = min(self._uses[expert] + 1, 3)
        return True

    def admit(self, expert: int, pinned: frozenset[int]) -> None:
        """Give it a slot: in the main queue if its ghost is there, else in the small one."""
        if len(self._uses) >= self._slots and not self._leave(pinned):
            return
        if expert in self._ghosts:
            self._ghosts.remove(expert)
            self._main.append(expert)
        else:
            self._small.append(expert)
        self._uses[expert] = 0

    def _leave(self, pinned: frozenset[int]) -> bool:
        for _ in range(5 * self._slots + 5):  # A use more makes a round more, of at most three.
            small = len(self._small) >= self._few or not self._main
            queue = self._small if small and self._small else self._main
            expert = queue.popleft()
            if expert in pinned:
                queue.append(expert)
            elif queue is self._small and self._uses[expert] > 0:
                self._main.append(expert)
                self._uses[expert] = 0
            elif queue is self._main and self._uses[expert] > 0:
                self._main.append(expert)
                self._uses[expert] -= 1
            else:
                del self._uses[expert]
                if small:
                    self._ghosts.append(expert)
                return True
        return False


POLICIES: Mapping[str, Callable[[Room], SlotPolicy]] = {
    "lru": lambda room: ByLayer(room, LruQueue),
    "lfu": lambda room: Ranked(room, SlotRule(1e9), shared=False),
    "slru": lambda room: ByLayer(room, Slru),
    "arc": lambda room: ByLayer(room, Arc),
    "s3-fifo": lambda room: ByLayer(room, S3Fifo),
    "today": Today,
    "slots": lambda room: Ranked(room, SlotRule(), shared=False),
    "slots-shared": lambda room: Ranked(room, SlotRule(), shared=True),
}
"""Policies by name that know neither the future nor the whole past."""
