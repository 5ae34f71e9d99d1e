"""What four ways of giving up blocks would have found, each tried on a sample of the keys; the best of them leads the real cache.

A shadow holds keys alone. Keys are sampled by their hash, and a shadow has room for as large a part of the blocks as is sampled of them, so
that its hit rate is near that of a whole cache (spatial sampling as in SHARDS: Waldspurger et al., FAST 2015).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace
from math import sqrt
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Expert(IntEnum):
    """A way to choose what is given up."""

    PROSPECT = 0
    """What gains least by staying, as learned."""
    LRU = 1
    SECOND_USE = 2
    """What was used once; else the least recently used."""
    FIFO = 3


import os
_SAMPLE = int(os.environ.get('SAMPLE',1024))
"""Blocks of a shadow, at most nearly twice as many."""
_HALF_LIFE = float(os.environ.get('HALF',8))
"""Uses after which one counts half, in rooms: as many uses as the tier has blocks."""
_MARGIN = float(os.environ.get('MARGIN',0.001))
"""Of all uses: what another must find beyond the leader to take over."""
_SURE = float(os.environ.get('SURE',3))
"""Standard deviations of the difference that it must come to as well."""


class Shadow(Protocol[Key]):
    def use(self, key: Key, kind: int, since: int) -> bool:
        """Whether the key was there. It is of this kind and epoch by this use."""
        ...


class _Lru(Generic[Key]):
    def __init__(self, room: int) -> None:
        self._room = room
        self._there: OrderedDict[Key, None] = OrderedDict()

    def use(self, key: Key, kind: int, since: int) -> bool:
        there = self._there
        if key in there:
            there.move_to_end(key)
            return True
        there[key] = None
        if len(there) > self._room:
            there.popitem(last=False)
        return False


class _SecondUse(_Lru[Key]):
    def use(self, key: Key, kind: int, since: int) -> bool:
        return super().use(key, kind, since) if kind > 1 else False


class _Fifo(_Lru[Key]):
    def use(self, key: Key, kind: int, since: int) -> bool:
        return True if key in self._there else super().use(key, kind, since)


class _Ranked(Generic[Key]):
    """Gives up what has the least `gain` of a kind and an epoch."""

    def __init__(self, room: int, gain: Callable[[int, int], float]) -> None:
        self._room, self._gain = room, gain
        self._there: dict[Key, tuple[int, int]] = {}
        self._queues: dict[tuple[int, int], dict[Key, None]] = {}
        self._heap: list[tuple[float, int, int]] = []

    def use(self, key: Key, kind: int, since: int) -> bool:
        at, before = (since, kind), self._there.get(key)
        if before == at:
            return True
        if before is not None:
            queue = self._queues[before]
            del queue[key]
            if not queue:
                del self._queues[before]
        self._there[key] = at
        queue = self._queues.get(at)
        if queue is None:
            self._queues[at] = {key: None}
            heappush(self._heap, (self._gain(kind, since), since, kind))
        else:
            queue[key] = None
        if before is not None:
            return True
        if len(self._there) > self._room:
            self._give_up()
        return False

    def _give_up(self) -> None:
        heap = self._heap
        while True:
            gain, since, kind = heap[0]
            queue = self._queues.get((since, kind))
            if queue is None:
                heappop(heap)
                continue
            now = self._gain(kind, since)
            if now > gain:
                heapreplace(heap, (now, since, kind))
                continue
            del self._there[queue.popitem()[0]]
            if not queue:
                del self._queues[since, kind]
            return

    def renew(self) -> None:
        self._heap = [(self._gain(kind, since), since, kind) for since, kind in self._queues]
        heapify(self._heap)


class Shadows(Generic[Key]):
    """All experts on one sample of the uses of a tier's blocks."""

    def __init__(self, blocks: int, epochs: int, gain: Callable[[int, int], float]) -> None:
        """blocks: what the tier holds. epochs: in which as many blocks are used. gain: by which `Expert.PROSPECT` goes."""
        self._mask = (1 << max(0, (blocks // _SAMPLE).bit_length() - 1)) - 1
        room = max(1, blocks // (self._mask + 1))
        self._ranked = _Ranked[Key](room, gain)
        self._lru, self._second, self._fifo = _Lru[Key](room), _SecondUse[Key](room), _Fifo[Key](room)
        self._counts = [0.0] * 16
        """Uses, by which of the experts would have found the block, as bits."""
        self._fade = 0.5 ** (1 / (_HALF_LIFE * max(epochs, epochs * int(os.environ.get('FLOOR',0))/blocks/_HALF_LIFE)))
        self.leader = Expert.PROSPECT
        self.switches = 0

    def use(self, key: Key, kind: int, since: int) -> None:
        """A block is used, and is of this kind and epoch by that."""
        if hash(key) * 0x9E3779B97F4A7C15 >> 32 & self._mask:
            return
        found = int(self._ranked.use(key, kind, since))
        found |= self._lru.use(key, kind, since) << 1
        found |= self._second.use(key, kind, since) << 2
        found |= self._fifo.use(key, kind, since) << 3
        self._counts[found] += 1

    def tick(self, renew=True) -> bool:
        """An epoch has ended: whether another expert leads from now on."""
        if renew: self._ranked.renew()
        counts = self._counts
        all = sum(counts)
        lead, best = self.leader, 0.0
        for expert in Expert:
            if expert is not self.leader:
                won = sum(count for found, count in enumerate(counts) if found >> expert & 1 > found >> self.leader & 1)
                lost = sum(count for found, count in enumerate(counts) if found >> expert & 1 < found >> self.leader & 1)
                ahead = won - lost
                if ahead > best and ahead > _MARGIN * all + _SURE * sqrt(won + lost):
                    lead, best = expert, ahead
        self._counts = [count * self._fade for count in counts]
        changed = lead is not self.leader
        self.leader = lead
        self.switches += changed
        return changed
