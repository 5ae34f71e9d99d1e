"""Shadows try four orders of eviction on a sample of the keys; the best of them leads the real cache.

A shadow holds keys alone. Those of a large tier are sampled by their hash, and a shadow has room for as large
a part of the blocks as is sampled of them, so that its hit rate is near that of a whole cache (spatial
sampling as in SHARDS: Waldspurger et al., FAST 2015).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace
from math import sqrt
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Expert(IntEnum):
    """An Expert is an order of eviction.

    PROSPECT evicts what gains least by staying, as learned. SECOND_USE evicts what was used once, and else
    the least recently used.
    """

    PROSPECT = 0
    LRU = 1
    SECOND_USE = 2
    FIFO = 3


_SAMPLE = 8192
"""Blocks that a shadow has room for: up to twice as many, or all if the tier has fewer."""
_ROOMS, _USES = 8, 4096
"""Uses after which one counts half: as many as this many rooms have blocks, and at least so many."""
_MARGIN = 0.3
"""Blocks that another expert must find beyond the leader to take over, for each block of its room: the real
cache does not hold what the other holds, so a change costs up to one miss for each."""
_SURE = 1.0
"""Standard deviations of the difference that it must be ahead by as well."""
_MIX = 0x9E3779B97F4A7C15
"""An odd number: the upper bits of a product with it depend on all bits of the other factor."""


def scatter(key: Hashable) -> int:
    """Return 64 bits by which keys are spread evenly, the same in each process for bytes and for whole
    numbers."""
    number = int.from_bytes(key[:8], "little") if isinstance(key, bytes) else hash(key)
    return number * _MIX & 0xFFFFFFFFFFFFFFFF


class _Lru(Generic[Key]):
    """Evicts what was used longest ago."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._there: OrderedDict[Key, None] = OrderedDict()

    def use(self, key: Key, again: bool) -> bool:
        """Return whether the key was there. From now on it is, if it is admitted.

        again: whether it was ever used before.
        """
        there = self._there
        if key in there:
            there.move_to_end(key)
            return True
        there[key] = None
        if len(there) > self._room:
            there.popitem(last=False)
        return False


class _SecondUse(_Lru[Key]):
    """Admits what was used before."""

    def use(self, key: Key, again: bool) -> bool:
        return again and super().use(key, again)


class _Fifo(_Lru[Key]):
    """Evicts what came first."""

    def use(self, key: Key, again: bool) -> bool:
        return key in self._there or super().use(key, again)


class _Ranked(Generic[Key]):
    """Evicts what has the least `gain` of a kind and an epoch."""

    def __init__(self, room: int, gain: Callable[[int, int], float]) -> None:
        self._room, self._gain = room, gain
        self._there: dict[Key, tuple[int, int]] = {}
        self._queues: dict[tuple[int, int], dict[Key, None]] = {}
        self._heap: list[tuple[float, int, int]] = []

    def use(self, key: Key, kind: int, since: int) -> bool:
        """Return whether the key was there. It is now, and of this kind and epoch."""
        at, before = (since, kind), self._there.get(key)
        if before == at:
            return True
        if before is not None:
            queue = self._queues[before]
            del queue[key]
            if not queue:
                del self._queues[before]
        self._there[key] = at
        if at in self._queues:
            self._queues[at][key] = None
        else:
            self._queues[at] = {key: None}
            heappush(self._heap, (self._gain(kind, since), since, kind))
        if before is not None:
            return True
        if len(self._there) > self._room:
            self._evict()
        return False

    def _evict(self) -> None:
        heap = self._heap
        while True:
            gain, since, kind = heap[0]
            queue = self._queues.get((since, kind))
            if queue is None:
                heappop(heap)
                continue
            now = self._gain(kind, since)
            if now > gain:  # It has risen since the heap was made.
                heapreplace(heap, (now, since, kind))
                continue
            del self._there[queue.popitem()[0]]
            if not queue:
                del self._queues[since, kind]
            return

    def renew(self) -> None:
        """Take note of gains that fell."""
        self._heap = [(self._gain(kind, since), since, kind) for since, kind in self._queues]
        heapify(self._heap)


class Shadows(Generic[Key]):
    """Shadows have all experts on one sample of the uses of a tier's blocks, and say which of them leads.

    Counted is how many more blocks than the leader each expert found of the same uses, epoch by epoch, older
    ones less. Another takes the lead when it is ahead by more than chance explains and by a good part of what
    the change costs; then the count begins anew. A use costs O(1) for each expert, and O(log epochs) for a
    victim.
    """

    def __init__(self, blocks: int, epochs: float, gain: Callable[[int, int], float]) -> None:
        """Begin with `Expert.PROSPECT` in the lead.

        blocks: those that the tier has room for.
        epochs: the time in which as many blocks are used.
        gain: returns what a block of a kind and an epoch gains by staying, by which `Expert.PROSPECT` goes.
        """
        halvings = max(0, (blocks // _SAMPLE).bit_length() - 1)
        self._mask = (1 << halvings) - 1
        room = max(1, blocks >> halvings)
        self._ranked = _Ranked[Key](room, gain)
        self._lru, self._second, self._fifo = _Lru[Key](room), _SecondUse[Key](room), _Fifo[Key](room)
        self._counts = [0] * (1 << len(Expert))
        """Numbers of uses in this epoch, by the set of experts that found the block, as bits."""
        self._margin = _MARGIN * room
        self._fade = 0.5 ** (blocks / epochs / max(_ROOMS * blocks, _USES))
        self._forget()
        self.leader = Expert.PROSPECT

    def use(self, key: Key, kind: int, since: int) -> None:
        """Note that a block is used, and by that is of this kind and epoch.

        Blocks of a request come from its last to its first. A block of a kind below 2 was never used before.
        """
        if self._mask and scatter(key) >> 32 & self._mask:
            return
        again = kind > 1
        found = self._ranked.use(key, kind, since) << Expert.PROSPECT
        found |= self._lru.use(key, again) << Expert.LRU
        found |= self._second.use(key, again) << Expert.SECOND_USE
        found |= self._fifo.use(key, again) << Expert.FIFO
        self._counts[found] += 1

    def tick(self) -> bool:
        """Note that an epoch has ended. Return whether another expert leads from now on."""
        self._ranked.renew()
        hits = [
            sum(count for found, count in enumerate(self._counts) if found >> expert & 1) for expert in Expert
        ]
        self._counts = [0] * len(self._counts)
        before, best = self.leader, 0.0
        for expert in Expert:
            apart = hits[expert] - hits[before]
            self._ahead[expert] = self._ahead[expert] * self._fade + apart
            self._squares[expert] = self._squares[expert] * self._fade**2 + apart**2
            beyond = self._ahead[expert] - self._margin - _SURE * sqrt(self._squares[expert])
            if beyond > best:
                self.leader, best = expert, beyond
        if self.leader is before:
            return False
        self._forget()
        return True

    def _forget(self) -> None:
        """Let all experts be even. Another takes over only by what it finds from now on."""
        self._ahead = [0.0] * len(Expert)
        """The number of blocks that each found beyond the leader; older ones count less."""
        self._squares = [0.0] * len(Expert)
        """The sum of squares of what each was ahead by in an epoch. Hits come by the request, so epochs are
        independent of each other and uses are not."""
