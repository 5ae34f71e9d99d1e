"""Which cached KV block is given up for another: the least recently used, or the one that gains least by
staying. Over keys alone.

Time is counted in uses of blocks, never in seconds: the same calls give the same victims.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

from penstock.kv.ledger.shadows import Expert, Shadows, scatter

Key = TypeVar("Key", bound=Hashable)


class Eviction(Protocol[Key]):
    """The order in which one tier gives up blocks. The tier's owner tells what becomes of each block that has
    a key.

    A block is there from `added` until `victim` or `dropped`; meanwhile it is held, as it is at first, or
    idle. `added` and `found` are its uses, one for each request.
    """

    def __len__(self) -> int:
        """Idle blocks."""
        ...

    def added(self, key: Key, parent: Key | None) -> None:
        """A block is there now, and held. It continues `parent`, if that is still there."""
        ...

    def found(self, key: Key) -> None:
        """A request asked for a block that is there, held or idle."""
        ...

    def found_all(self, keys: Sequence[Key]) -> None:
        """As `found` for each, in less time."""
        ...

    def busy(self, key: Key) -> None:
        """An idle block is held from now on."""
        ...

    def busy_all(self, keys: Sequence[Key]) -> None:
        """As `busy` for each, in less time."""
        ...

    def idle(self, key: Key) -> None:
        """Nobody holds a block any longer. Those of a request are told from its last to its first."""
        ...

    def victim(self) -> Key:
        """Gives up one of the idle blocks, of which there must be one; it is there no longer."""
        ...

    def dropped(self, key: Key) -> None:
        """A block, held or idle, is gone for another reason."""
        ...


class Lru(Generic[Key]):
    """Gives up what has been idle for longest."""

    def __init__(self) -> None:
        self._idle: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[Key]:
        """Idle blocks, the next victim first."""
        return iter(self._idle)

    def added(self, key: Key, parent: Key | None) -> None:
        pass

    def found(self, key: Key) -> None:
        if key in self._idle:
            self._idle.move_to_end(key)

    def found_all(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.found(key)

    def busy(self, key: Key) -> None:
        del self._idle[key]

    def busy_all(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del self._idle[key]

    def idle(self, key: Key) -> None:
        self._idle[key] = None

    def first(self, key: Key) -> None:
        """An idle block is the next victim."""
        self._idle.move_to_end(key, last=False)

    def victim(self) -> Key:
        return self._idle.popitem(last=False)[0]

    def victims(self, count: int) -> list[Key]:
        """As many as that, one after the other."""
        return [self._idle.popitem(last=False)[0] for _ in range(count)]

    def dropped(self, key: Key) -> None:
        self._idle.pop(key, None)


_MANY = 8
"""Uses from which on it does not matter how many there were."""
_KINDS = 2 * _MANY
_KNOWN = _KINDS
"""Added to the kind of a block that was seen before, longer ago than is remembered in detail. It is learned
of as of a new one."""
_CODES = 2 * _KINDS
_AFTER = tuple(min(kind % _KINDS + 2, _KINDS - 2 + kind % 2) for kind in range(_KINDS + 2))
"""What a block of a kind is after one more use."""
_EPOCHS = 32
"""In an epoch, one in so many of the tier's blocks is used."""
_SHORTEST = 32
"""Uses of an epoch, at least."""
_AGES = (0, 1, 2, 3, *(width << power for power in range(1, 11) for width in (2, 3)), 4096)
"""In epochs: where the spans of age begin, each half as long again as it is old. The last has no end."""
_SPANS = len(_AGES)
_WIDTHS = (0.5, *(stop - start for start, stop in pairwise(_AGES[1:])), _AGES[-1])
_SPAN = tuple(span for span in range(_SPANS - 1) for _ in range(_AGES[span + 1] - _AGES[span]))
"""Of an age before the last span."""
_LEARN = 32
"""Epochs from one estimate to the next."""
_FADE = 8192
"""Epochs after which all that was counted counts half."""
_LONG_GONE = 1 << 20
"""Bytes for blocks that were forgotten, besides 8 for each block of the tier."""
_DOUBT = 256.0
"""Blocks that must have come to an age before they outweigh what is assumed of it."""
_FIRST_USE = 0.75
"""The chance of a return from which on a block that was used once is worth a write."""
_ASSUMED = 0.1
"""Chance of a return within one span where nothing has been seen: the longer unused, the lower the rate, as
LRU has it."""


class Returns:
    """How blocks of each kind return by their age, that is epochs since their last use: counted as it
    happens.

    Of each kind and span of age are counted the blocks that came to it unused and those of them that were
    used in it; their ratio is the chance of a return within the span (the product-limit estimate of survival:
    Kaplan and Meier, 1958). A block that is still in a span counts by the part of it that has passed (as a
    withdrawal does in an actuary's life table). Blocks that were given up are counted like others for as long
    as they are remembered, so what is learned does not depend on what was given up. The fewer blocks came to
    an age, the more is assumed that the kind behaves there as all kinds together do, in proportion to the
    span before.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._unused: dict[int, list[int]] = {0: [0] * _KINDS}
        """By epoch and kind: blocks last used then."""
        self._came = [[0.0] * _SPANS for _ in range(_KINDS)]
        self._used = [[0.0] * _SPANS for _ in range(_KINDS)]
        self._inside = [[0] * _SPANS for _ in range(_KINDS)]
        """Blocks whose age is in a span now."""
        self._entered = [[0] * _SPANS for _ in range(_KINDS)]
        """Sum of the epochs in which they came to it."""
        self._estimate()

    def use(self, kind: int, blocks: int = 1) -> None:
        """So many blocks are of this kind by a use just now."""
        kind %= _KINDS
        self._unused[self.epoch][kind] += blocks
        self._came[kind][0] += blocks
        self._inside[kind][0] += blocks
        self._entered[kind][0] += blocks * self.epoch

    def again(self, kind: int, since: int, blocks: int = 1) -> None:
        """So many blocks that were of this kind by their use in epoch `since` are used again."""
        self._used[kind % _KINDS][self._span(since)] += blocks
        self.forget(kind, since, blocks)

    def forget(self, kind: int, since: int, blocks: int = 1) -> None:
        if since in self._unused:
            self._unused[since][kind % _KINDS] -= blocks
            self._out(kind % _KINDS, self._span(since), since, blocks)

    def _out(self, kind: int, span: int, since: int, blocks: int) -> None:
        self._inside[kind][span] -= blocks
        self._entered[kind][span] -= blocks * (since + _AGES[span])

    def tick(self) -> None:
        """The next epoch begins. O(1)."""
        self.epoch += 1
        self._unused[self.epoch] = [0] * _KINDS
        for span, age in enumerate(_AGES[1:], 1):
            for kind, blocks in enumerate(self._unused.get(self.epoch - age, ())):
                if blocks:
                    self._came[kind][span] += blocks
                    self._inside[kind][span] += blocks
                    self._entered[kind][span] += blocks * self.epoch
                    self._out(kind, span - 1, self.epoch - age, blocks)
        self._unused.pop(self.epoch - _AGES[-1], None)
        if self.epoch % _FADE == 0:
            for counts in (*self._came, *self._used):
                counts[:] = [count / 2 for count in counts]
        if self.epoch % _LEARN == 0:
            self._estimate()

    def gain(self, kind: int, since: int) -> float:
        """Returns for each epoch of staying, if such a block stays for as long as that is worth most (its
        Gittins index)."""
        return self._gains[kind % _KINDS][self._span(since)]

    def chance(self, kind: int, since: int) -> float:
        """That such a block returns at an age of which enough was seen; 1 where too little was."""
        return self._chances[kind % _KINDS][self._span(since)]

    def _span(self, since: int) -> int:
        age = self.epoch - since
        return _SPAN[age] if age < _AGES[-1] else _SPANS - 1

    def _seen(self, kind: int) -> list[float]:
        """Blocks that came to each span, less what is still ahead of those that are in it now. Were these
        counted whole, ages that only few have passed would look as if nothing returned at them, and what is
        large would be learned last."""
        seen = list(self._came[kind])
        for span, (inside, entered, used) in enumerate(
            zip(self._inside[kind], self._entered[kind], self._used[kind], strict=True)
        ):
            if inside and 0 < span < _SPANS - 1:
                ahead = inside - (inside * self.epoch - entered) / _WIDTHS[span]
                seen[span] = max(used, seen[span] - ahead)
        return seen

    def _estimate(self) -> None:
        seen = [self._seen(kind) for kind in range(_KINDS)]
        usual, chance = [], _ASSUMED
        for span in range(_SPANS):
            used, came = sum(counts[span] for counts in self._used), sum(counts[span] for counts in seen)
            chance = (used + _DOUBT * chance) / (came + _DOUBT)
            usual.append(chance)
        self._gains: list[list[float]] = []
        self._chances: list[list[float]] = []
        for used_in, came_to in zip(self._used, seen, strict=True):
            chances, factor = [], 1.0
            for used, came, common in zip(used_in, came_to, usual, strict=True):
                chances.append(min(1.0, (used + _DOUBT * min(1.0, factor * common)) / (came + _DOUBT)))
                factor = chances[-1] / common
            self._gains.append([_most(chances, span) for span in range(_SPANS)])
            left, later = 1.0, []
            for chance, came in zip(reversed(chances), reversed(came_to), strict=True):
                if came >= _DOUBT:
                    left *= 1 - chance
                later.append(1 - left if came >= _DOUBT else 1.0)
            self._chances.append(later[::-1])


def _most(chances: list[float], span: int) -> float:
    """The most returns for an epoch of staying from this span on, over all times to stop at."""
    there, returns, stayed, most = 1.0, 0.0, 0.0, 0.0
    for chance, width in zip(chances[span:], _WIDTHS[span:], strict=True):
        returns += there * chance
        stayed += there * (1 - chance / 2) * width
        there *= 1 - chance
        most = max(most, returns / stayed)
    return most


class _Block(Generic[Key]):
    """What is known of a block that is there. `kind`: how often it was used, and whether it stands deep in
    its prompt. `born`: how many came before it. `noted`: whether the shadows know of its last use."""

    __slots__ = ("born", "depth", "idle", "idle_children", "key", "kind", "noted", "parent", "since")

    def __init__(self, key: Key, parent: "_Block[Key] | None") -> None:
        self.key = key
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.kind = 0
        self.since = 0
        self.born = 0
        self.noted = True
        self.idle = False
        self.idle_children = 0


class Prospect(Generic[Key]):
    """Gives up the block that gains least by staying: of its kind and age, the fewest returns for the time
    that they take to come.

    A block's kind is how many requests used it (1, 2, ... 8 or more) and whether it stands `deep` in its
    prompt; `Returns` learns from the traffic how blocks of each kind return. So blocks seen once make way for
    those of a conversation in progress where room is scarce, no block is given up at the age at which people
    answer, and where nothing is known, or age alone matters, this is LRU. A block that others continue is
    given up after them, for without it they are worth nothing.

    Where LRU, FIFO or the admission of what is used twice finds so many more that a change pays, blocks are
    given up as it would have it, until another does (see Shadows).

    Blocks that are gone are remembered, as many as the tier has and some, so that a return is known as one.

    Idle blocks without idle children lie in queues by kind and epoch of last use, and the queues in a heap by
    gain: O(log queues) for a victim, O(1) for all else, counting what each epoch costs on the uses in it.
    """

    def __init__(
        self,
        blocks: int,
        *,
        deep: int = 32,
        remembered: int | None = None,
        worthwhile: float = 0.125,
        mixed: bool = True,
    ) -> None:
        """blocks: what the tier holds. deep: blocks before one that stands deep, of some 16,384 tokens.
        remembered: of those that are gone. worthwhile: the chance of a return from which on a block is worth
        a write. mixed: whether a simple policy that finds more on a sample of the keys takes the lead."""
        assert blocks > 0, f"a tier of {blocks} blocks"
        self._deep, self._worthwhile = deep, worthwhile
        self._remembered = blocks + 16384 if remembered is None else remembered
        self._uses_left = self._uses = max(_SHORTEST, blocks // _EPOCHS)
        """Of this epoch; of each."""
        self._returns = Returns()
        self._shadows = Shadows[Key](blocks, blocks / self._uses, self._returns_gain) if mixed else None
        self._leader = Expert.PROSPECT
        self._eldest: list[tuple[int, _Block[Key]]] | None = None
        """A heap of all that is queued, and of what was, by birth; only while the first to come is the first
        to go."""
        self._births = 0
        self._long_gone = bytearray(1 << (8 * blocks + _LONG_GONE).bit_length() - 1)
        """Of blocks that are forgotten, 8 bits of the key's hash, at the place that others of it name. Later
        ones overwrite earlier."""
        self._there: dict[Key, _Block[Key]] = {}
        self._gone: OrderedDict[Key, int] = OrderedDict()
        """Kind and epoch of last use as one number, the first gone first."""
        self._idle = 0
        self._queues: dict[tuple[int, int], dict[_Block[Key], None]] = {}
        self._heap: list[tuple[float, int, int]] | None = None
        """Gain, epoch, kind: of every queue, and of queues that there were. None: it is to be made anew."""

    def __len__(self) -> int:
        return self._idle

    @property
    def remembered(self) -> int:
        """Blocks that are gone but not forgotten."""
        return len(self._gone)

    def added(self, key: Key, parent: Key | None) -> None:
        assert key not in self._there, f"{key!r} is added but there"
        block = self._there[key] = _Block(key, None if parent is None else self._there.get(parent))
        block.born = self._births = self._births + 1
        gone = self._gone.pop(key, None)
        if gone is None:
            self._count()
            block.kind = int(block.depth >= self._deep)
            at, tag = self._place(key)
            if self._long_gone[at] == tag:
                block.kind += _KNOWN
            self._returns.use(block.kind)
            block.since = self._returns.epoch
        else:
            block.since, block.kind = divmod(gone, _CODES)
            self._use(block)
        block.noted = False

    def found(self, key: Key) -> None:
        block = self._there[key]
        queued = block.idle and not block.idle_children
        if queued:
            self._unqueue(block)
        self._use(block)
        block.noted = False
        if block.idle:
            self._note(block)
        if queued:
            self._queue(block)

    def found_all(self, keys: Sequence[Key]) -> None:
        """Those of a prompt are mostly of one kind and epoch, and are counted together. Shadows are told of
        the last first."""
        blocks = list(map(self._there.__getitem__, keys))
        at = 0
        while at < len(blocks):
            count = min(len(blocks) - at, self._uses_left - 1)
            if count <= 0:  # The next use begins an epoch.
                self.found(keys[at])
                at += 1
                continue
            self._uses_left -= count
            epoch, start = self._returns.epoch, at
            kind, since = blocks[at].kind, blocks[at].since
            for block in blocks[at : at + count]:
                if block.kind != kind or block.since != since:
                    self._used(kind, since, at - start)
                    kind, since, start = block.kind, block.since, at
                at += 1
                if block.idle and not block.idle_children:
                    self._unqueue(block)
                    block.kind, block.since = _AFTER[kind], epoch
                    self._queue(block)
                else:
                    block.kind, block.since = _AFTER[kind], epoch
                block.noted = False
            self._used(kind, since, at - start)
        for block in reversed(blocks):
            if block.idle and not block.noted:
                self._note(block)

    def busy(self, key: Key) -> None:
        block = self._there[key]
        assert block.idle, f"{key!r} is held but was not idle"
        if not block.idle_children:
            self._unqueue(block)
        self._rouse(block)

    def busy_all(self, keys: Sequence[Key]) -> None:
        there = self._there
        for key in keys:
            block = there[key]
            assert block.idle, f"{key!r} is held but was not idle"
            if not block.idle_children:
                self._unqueue(block)
            block.idle = False
            parent = block.parent
            if parent is not None:
                parent.idle_children -= 1
                if parent.idle and not parent.idle_children:
                    self._queue(parent)
        self._idle -= len(keys)

    def idle(self, key: Key) -> None:
        block = self._there[key]
        assert not block.idle, f"{key!r} is idle twice"
        block.idle = True
        if not block.noted:
            self._note(block)
        self._idle += 1
        if not block.idle_children:
            self._queue(block)
        parent = block.parent
        if parent is not None:
            if parent.idle and not parent.idle_children:
                self._unqueue(parent)
            parent.idle_children += 1

    def victim(self) -> Key:
        return self.victims(1)[0]

    def victims(self, count: int) -> list[Key]:
        """As many as that, one after the other."""
        assert count <= self._idle, "a victim is wanted where no block is idle"
        keys = self._first_come(count) if self._eldest is not None else []
        while len(keys) < count:
            if self._heap is None:
                self._heap = [(self._rank(kind, since), since, kind) for since, kind in self._queues]
                heapify(self._heap)
            while (queue := self._queues.get(at := self._heap[0][1:])) is None:
                heappop(self._heap)
            block, _ = queue.popitem()
            while True:
                # What it continues, if nothing else does any longer and it is of its kind, is the last in the
                # queue: the one that follows.
                parent, follows = block.parent, False
                block.idle = False
                self._idle -= 1
                if parent is not None:
                    parent.idle_children -= 1
                    if parent.idle and not parent.idle_children:
                        follows = len(keys) + 1 < count and (parent.since, parent.kind) == at
                        if not follows:
                            self._queue(parent)
                self._leave(block)
                keys.append(block.key)
                if not follows or parent is None:
                    break
                block = parent
            if not queue:
                del self._queues[at]
        return keys

    def _first_come(self, count: int) -> list[Key]:
        keys: list[Key] = []
        assert self._eldest is not None
        while len(keys) < count:
            _, block = heappop(self._eldest)
            if block.idle and not block.idle_children and self._there.get(block.key) is block:
                self._unqueue(block)
                self._rouse(block)
                self._leave(block)
                keys.append(block.key)
        return keys

    def dropped(self, key: Key) -> None:
        block = self._there[key]
        if block.idle:
            self.busy(key)
        self._leave(block)

    def worth(self, key: Key) -> bool:
        """Whether a block that is there will likely enough be asked for again to be written where writes are
        dear. What was used once has to be likelier to return: it mostly does so, if at all, while it is still
        here."""
        block = self._there[key]
        least = self._worthwhile if block.kind > 1 else max(_FIRST_USE, self._worthwhile)
        return self._returns.chance(block.kind, block.since) >= least

    def _count(self) -> None:
        self._uses_left -= 1
        if not self._uses_left:
            self._uses_left = self._uses
            self._returns.tick()
            if self._shadows is not None and self._shadows.tick():
                self._lead(self._shadows.leader)
            if self._leader is Expert.PROSPECT:
                self._heap = None

    def _place(self, key: Key) -> tuple[int, int]:
        """Where in `_long_gone` a key is noted, and how."""
        number = scatter(key)
        return number >> 16 & len(self._long_gone) - 1, number >> 56 | 1

    def _note(self, block: _Block[Key]) -> None:
        """Tells the shadows of a block's last use. The end of a request comes first, as it does when the
        request lets go."""
        block.noted = True
        if self._shadows is not None:
            self._shadows.use(block.key, block.kind, block.since)

    def _lead(self, leader: Expert) -> None:
        self._leader, self._heap, self._eldest = leader, None, None
        if leader is Expert.FIFO:
            self._eldest = [
                (block.born, block)
                for block in self._there.values()
                if block.idle and not block.idle_children
            ]
            heapify(self._eldest)

    def _returns_gain(self, kind: int, since: int) -> float:
        return self._returns.gain(kind, since)

    def _rank(self, kind: int, since: int) -> float:
        """Blocks of least rank are given up first."""
        if self._leader is Expert.PROSPECT:
            return self._returns.gain(kind, since)
        if self._leader is Expert.SECOND_USE and kind < 2:
            return since - 2.0**52
        return since

    def _use(self, block: _Block[Key]) -> None:
        self._count()
        self._used(block.kind, block.since, 1)
        block.kind, block.since = _AFTER[block.kind], self._returns.epoch

    def _used(self, kind: int, since: int, blocks: int) -> None:
        """So many blocks of one kind and epoch are used, in this epoch."""
        self._returns.again(kind, since, blocks)
        self._returns.use(_AFTER[kind], blocks)

    def _rouse(self, block: _Block[Key]) -> None:
        """Of an idle block that is in no queue."""
        block.idle = False
        self._idle -= 1
        parent = block.parent
        if parent is not None:
            parent.idle_children -= 1
            if parent.idle and not parent.idle_children:
                self._queue(parent)

    def _leave(self, block: _Block[Key]) -> None:
        del self._there[block.key]
        block.parent = None
        self._gone[block.key] = block.since * _CODES + block.kind
        if len(self._gone) > self._remembered:
            key, gone = self._gone.popitem(last=False)
            since, kind = divmod(gone, _CODES)
            at, tag = self._place(key)
            self._long_gone[at] = tag
            self._returns.forget(kind, since)

    def _queue(self, block: _Block[Key]) -> None:
        at = block.since, block.kind
        if self._eldest is not None:
            heappush(self._eldest, (block.born, block))
            if len(self._eldest) > 2 * self._idle + 64:
                self._lead(Expert.FIFO)
        queue = self._queues.get(at)
        if queue is not None:
            queue[block] = None
            return
        self._queues[at] = {block: None}
        if self._heap is not None and len(self._heap) <= 2 * len(self._queues) + 64:
            heappush(self._heap, (self._rank(block.kind, block.since), *at))
        else:
            self._heap = None

    def _unqueue(self, block: _Block[Key]) -> None:
        at = block.since, block.kind
        queue = self._queues[at]
        del queue[block]
        if not queue:
            del self._queues[at]
