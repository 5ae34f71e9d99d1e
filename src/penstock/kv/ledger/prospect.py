"""Prospect evicts the cached KV blocks that gain least by staying, as their kind and age have returned so
far.

It orders the cached blocks of the host and of the disk. What it knows of returns is in `returns`; whether a
simpler order does better is tried in `shadows`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Generic

from penstock.kv.ledger.evict import Key
from penstock.kv.ledger.returns import AFTER, CODES, KNOWN, Returns
from penstock.kv.ledger.shadows import Expert, Shadows, scatter

DEEP = 16384
"""Tokens before a block that stands deep in its prompt."""
_EPOCHS = 32
"""An epoch is so long that one in so many of the tier's blocks is used."""
_SHORTEST = 32
"""Uses of an epoch, at least."""
_LONG_GONE = 1 << 20
"""Bytes for blocks that were forgotten, besides 8 for each block of the tier."""
_MOST_LONG_GONE = 1 << 28
"""Bytes for them at most. A tier of more than 32 million blocks remembers fewer for each of its own."""
_FIRST_USE = 0.75
"""The chance of a return from which on a block that was used once is worth a write."""


class _Block(Generic[Key]):
    """A _Block is what is known of a block that is there.

    kind: how often it was used, and whether it stands deep in its prompt.
    born: how many came before it.
    noted: whether the shadows know of its last use.
    """

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
    """A Prospect is the order of prospects: the block goes that gains least by staying.

    Its gain is that of its kind and age: returns, for the time that they take to come. A block's kind is how
    many requests used it (1, 2, ... 8 or more) and whether it stands `deep` in its prompt; `Returns` learns
    from the traffic how blocks of each kind return. So blocks seen once make way for those of a conversation
    in progress where room is scarce, no block is evicted at the age at which people answer, and where nothing
    is known, or age alone matters, this is LRU. A block that others continue is evicted after them, for
    without it they are worth nothing.

    Where LRU, FIFO or the admission of what is used twice finds so many more that a change pays, blocks are
    evicted as it would have it, until another does (see Shadows).

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
        """Order the cached blocks of a tier that has room for `blocks`.

        deep: blocks before one that stands deep in its prompt.
        remembered: blocks that are gone and not forgotten, at most.
        worthwhile: the chance of a return from which on a block is worth a write.
        mixed: whether a simple order that finds more on a sample of the keys takes the lead.
        """
        assert blocks > 0, f"a tier of {blocks} blocks"
        self._deep, self._worthwhile = deep, worthwhile
        self._remembered = blocks + 16384 if remembered is None else remembered
        self._uses_left = self._uses = max(_SHORTEST, blocks // _EPOCHS)
        """Uses that are left of this epoch; uses of each epoch."""
        self._returns = Returns()
        self._shadows = Shadows[Key](blocks, blocks / self._uses, self._returns.gain) if mixed else None
        self._leader = Expert.PROSPECT
        self._eldest: list[tuple[int, _Block[Key]]] | None = None
        """A heap of blocks that are queued, or were, by birth. It is there only while the order is FIFO."""
        self._births = 0
        places = min(8 * blocks + _LONG_GONE, _MOST_LONG_GONE)
        self._long_gone = bytearray(1 << places.bit_length() - 1)
        """8 bits of the hash of each forgotten block's key, at the place that other bits of it name. Later
        ones overwrite earlier."""
        self._there: dict[Key, _Block[Key]] = {}
        self._gone: OrderedDict[Key, int] = OrderedDict()
        """Kind and epoch of last use as one number, by key, the first gone first."""
        self._idle = 0
        self._queues: dict[tuple[int, int], dict[_Block[Key], None]] = {}
        self._heap: list[tuple[float, int, int]] | None = None
        """Gain, epoch and kind of every queue, and of queues that there were. None: it is to be made anew."""

    def __len__(self) -> int:
        return self._idle

    def added(self, key: Key, parent: Key | None) -> None:
        """Note that a block is there now, and held: see Eviction."""
        assert key not in self._there, f"{key!r} is added but there"
        block = self._there[key] = _Block(key, None if parent is None else self._there.get(parent))
        block.born = self._births = self._births + 1
        gone = self._gone.pop(key, None)
        if gone is None:
            self._count()
            block.kind = int(block.depth >= self._deep)
            at, tag = self._place(key)
            if self._long_gone[at] == tag:
                block.kind += KNOWN
            self._returns.use(block.kind)
            block.since = self._returns.epoch
        else:
            block.since, block.kind = divmod(gone, CODES)
            self._use(block)
        block.noted = False

    def found(self, key: Key) -> None:
        """Note that a request asked for a block that is there."""
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
        """Note that these were asked for.

        Those of a prompt are mostly of one kind and epoch, and are counted together. Shadows are given the
        last first.
        """
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
                    block.kind, block.since = AFTER[kind], epoch
                    self._queue(block)
                else:
                    block.kind, block.since = AFTER[kind], epoch
                block.noted = False
            self._used(kind, since, at - start)
        for block in reversed(blocks):
            if block.idle and not block.noted:
                self._note(block)

    def busy(self, key: Key) -> None:
        """Note that an idle block is held from now on."""
        self.busy_all((key,))

    def busy_all(self, keys: Sequence[Key]) -> None:
        """Do as `busy` for each, in less time."""
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
        """Note that a block has no holder any longer."""
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
        """Evict one of the idle blocks, and return it."""
        return self.victims(1)[0]

    def victims(self, count: int) -> list[Key]:
        """Evict as many blocks as that, one after the other, and return them."""
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
        """Evict as many blocks as that, those first that came first."""
        keys: list[Key] = []
        assert self._eldest is not None
        while len(keys) < count:
            _, block = heappop(self._eldest)
            if block.idle and not block.idle_children and self._there.get(block.key) is block:
                self.busy_all((block.key,))
                self._leave(block)
                keys.append(block.key)
        return keys

    def dropped(self, key: Key) -> None:
        """Note that a block is gone for another reason."""
        block = self._there[key]
        if block.idle:
            self.busy(key)
        self._leave(block)

    def worth(self, key: Key) -> bool:
        """Tell whether a block is likely enough to be asked for again to be written where writes are dear.

        A block that was used once has to be likelier to return.
        """
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
        """Return where in `_long_gone` a key is noted, and how."""
        number = scatter(key)
        return number >> 16 & len(self._long_gone) - 1, number >> 56 | 1

    def _note(self, block: _Block[Key]) -> None:
        """Note a block's last use in the shadows. The end of a request comes first, as when it is
        released."""
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

    def _rank(self, kind: int, since: int) -> float:
        """Return the rank of blocks of a kind and epoch. Those of least rank are evicted first."""
        if self._leader is Expert.PROSPECT:
            return self._returns.gain(kind, since)
        if self._leader is Expert.SECOND_USE and kind < 2:
            return since - 2.0**52
        return since

    def _use(self, block: _Block[Key]) -> None:
        self._count()
        self._used(block.kind, block.since, 1)
        block.kind, block.since = AFTER[block.kind], self._returns.epoch

    def _used(self, kind: int, since: int, blocks: int) -> None:
        """Note that so many blocks of one kind and epoch are used, in this epoch."""
        self._returns.again(kind, since, blocks)
        self._returns.use(AFTER[kind], blocks)

    def _leave(self, block: _Block[Key]) -> None:
        del self._there[block.key]
        block.parent = None
        self._gone[block.key] = block.since * CODES + block.kind
        if len(self._gone) > self._remembered:
            key, gone = self._gone.popitem(last=False)
            since, kind = divmod(gone, CODES)
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
