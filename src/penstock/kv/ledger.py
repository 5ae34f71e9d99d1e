"""Which KV block holds what and who uses it: allocation, sharing by content, and giving up of blocks, over plain integers.

A block is in one of three states, told by two facts, how many requests hold it and whether it has a key:

    free    no holder, no key: its contents mean nothing
    held    one holder or more; with a key its contents are final and others may come to hold it too
    cached  no holder, a key: kept for later requests until room is needed, longest unused first

Only the scheduler writes here, on one thread.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Generic, Protocol, TypeVar, cast

from penstock.step.plan import BlockId, HostBlockId

Id = TypeVar("Id", bound=int)


class Free(Protocol[Id]):
    """The free blocks of a pool."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Id]: ...

    def append(self, block: Id, /) -> None: ...


class Ledger(Generic[Id]):
    """The blocks [0, blocks) of one pool. Which of the free ones are used first, a ledger of a tier decides."""

    _free: Free[Id]

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.reset()

    def reset(self) -> None:
        """All blocks are free, whoever held them and whatever they held."""
        self._holders = [0] * self.blocks
        self._keys: list[bytes | None] = [None] * self.blocks
        self._by_key: dict[bytes, Id] = {}
        self._cached: OrderedDict[Id, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def find(self, key: bytes) -> Id | None:
        """The block with this content, if there is one. To use it, `hold` it before anything else happens."""
        return self._by_key.get(key)

    def hold(self, block: Id) -> None:
        """One more holder for a block that `find` gave."""
        assert self._keys[block] is not None, f"block {block} has no key and cannot be shared"
        if self._holders[block] == 0:
            del self._cached[block]
        self._holders[block] += 1

    def is_private(self, block: Id) -> bool:
        """One request holds it and no other can find it: it may be written."""
        return self._holders[block] == 1 and self._keys[block] is None

    def _give_up(self, block: Id | None = None) -> Id:
        if block is None:
            block = next(iter(self._cached))
        del self._cached[block]
        key = self._keys[block]
        assert key is not None
        del self._by_key[key]
        self._keys[block] = None
        return block

    def seal(self, block: Id, key: bytes) -> None:
        """The content of a held block is final and has this key. A second block with the same content stays unknown to others."""
        assert self._holders[block] > 0, f"block {block} is sealed but held by nobody"
        assert self._keys[block] is None, f"block {block} is sealed twice"
        if key not in self._by_key:
            self._by_key[key] = block
            self._keys[block] = key

    def release(self, blocks: Sequence[Id]) -> None:
        """One holder less for each, given in the order of the sequence: its end is given up before its beginning."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is released but held by nobody"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def forget(self) -> int:
        """Drop all cached contents; held blocks stay, but are no longer found. Returns how many blocks were given up."""
        dropped = len(self._cached)
        while self._cached:
            self._free.append(self._give_up())
        for key, block in self._by_key.items():
            assert self._keys[block] == key
            self._keys[block] = None
        self._by_key.clear()
        return dropped

    def check(self, held: Iterable[Sequence[Id]]) -> None:
        """Prove the invariants against what the requests say they hold. Raises AssertionError with what is wrong."""
        counts = Counter(block for blocks in held for block in blocks)
        pool = cast(list[Id], list(range(self.blocks)))
        for block in pool:
            assert counts[block] == self._holders[block], (
                f"block {block} has {self._holders[block]} holders on record, {counts[block]} in fact"
            )
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        for block in pool:
            key = self._keys[block]
            unused = self._holders[block] == 0
            assert (block in free) == (unused and key is None), f"block {block} is wrongly on or off the free list"
            assert (block in cached) == (unused and key is not None), f"block {block} is wrongly in or out of the cache"
            assert key is None or self._by_key.get(key) == block, f"block {block} has a key that finds another block"
        assert len(self._by_key) == sum(key is not None for key in self._keys), "a key finds a block that does not have it"


class BlockLedger(Ledger[BlockId]):
    """The blocks of the device. The last freed is the first used again: its memory is warm, and memory never used stays untouched."""

    _free: list[BlockId]

    def reset(self) -> None:
        super().reset()
        self._free = [BlockId(block) for block in reversed(range(self.blocks))]

    def allocate(self, count: int) -> list[BlockId]:
        """`count` blocks with one holder each and no content; cached blocks are given up for it, longest unused first.

        The caller has seen that `available` is enough.
        """
        assert 0 <= count <= self.available, f"{count} blocks asked for, {self.available} available"
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._give_up()
            self._holders[block] = 1
            taken.append(block)
        return taken


class HostLedger(Ledger[HostBlockId]):
    """The blocks of the host, and behind them those on disk. A request's follow one another wherever they can: what is consecutive
    streams in one copy. Those on disk are used when the host has no block that is free or cached."""

    _free: "_Near"

    def __init__(self, blocks: int, on_disk: int = 0) -> None:
        """blocks: in all. on_disk: how many of them, the last, are on disk."""
        self._near = blocks - on_disk
        super().__init__(blocks)

    def reset(self) -> None:
        super().reset()
        self._free = _Near(self._near, self.blocks)

    def allocate(self, count: int, after: HostBlockId | None = None, expected: int = 0) -> list[HostBlockId]:
        """`count` blocks with one holder each and no content, in few runs; cached blocks are given up for it, longest unused first.

        after: the block that they continue. expected: how many will be asked for before long, these included.
        The caller has seen that `available` is enough. O(count log blocks).
        """
        assert 0 <= count <= self.available, f"{count} blocks asked for, {self.available} available"
        while len(self._free) < count:
            self._free.append(self._give_up())
        while len(self._free.near) < count and (near := next((block for block in self._cached if block < self._near), None)) is not None:
            self._free.append(self._give_up(near))
        taken: list[HostBlockId] = []
        while len(taken) < count:
            start, length = self._free.take(count - len(taken), after, expected - len(taken))
            taken.extend(HostBlockId(block) for block in range(start, start + length))
            after = taken[-1]
        for block in taken:
            self._holders[block] = 1
        return taken


class FreeRuns:
    """Free blocks as runs of consecutive ones; whatever lies side by side is one run."""

    def __init__(self, blocks: int, first: int = 0) -> None:
        """All of [first, first + blocks) are free."""
        self._blocks = 0
        self._lengths: dict[int, int] = {}
        """Of the run that starts at a block."""
        self._starts: dict[int, int] = {}
        """Of the run that stops before a block."""
        self._longest: list[tuple[int, int]] = []
        """A heap of (-length, start): every run, and runs that there were."""
        if blocks:
            self._put(first, blocks)

    def __len__(self) -> int:
        return self._blocks

    def __iter__(self) -> Iterator[HostBlockId]:
        return (HostBlockId(block) for start, length in self._lengths.items() for block in range(start, start + length))

    def append(self, block: HostBlockId, /) -> None:
        start, stop = int(block), block + 1
        if start in self._starts:
            start = self._starts[start]
            self._cut(start)
        if stop in self._lengths:
            stop += self._cut(stop)
        self._put(start, stop - start)

    def take(self, most: int, after: HostBlockId | None, expected: int) -> tuple[int, int]:
        """Takes a run of 1 to `most` blocks: the one that follows `after` if that is free, else out of the longest. Its start and length.

        Out of the longest it takes from the middle, so that the new run can grow as well as the one that ends before; from further to
        the front where `expected` blocks need the room.
        """
        start = -1 if after is None else after + 1
        if start in self._lengths:
            at, length = start, self._cut(start)
        else:
            while self._lengths.get(self._longest[0][1]) != -self._longest[0][0]:
                heappop(self._longest)
            start = self._longest[0][1]
            length = self._cut(start)
            at = start + max(0, min(length // 2, length - max(most, expected)))
        taken = min(most, start + length - at)
        if at > start:
            self._put(start, at - start)
        if at + taken < start + length:
            self._put(at + taken, start + length - at - taken)
        return at, taken

    def _put(self, start: int, length: int) -> None:
        self._blocks += length
        self._lengths[start] = length
        self._starts[start + length] = start
        heappush(self._longest, (-length, start))
        if len(self._longest) > 2 * len(self._lengths) + 64:
            self._longest = [(-length, start) for start, length in self._lengths.items()]
            heapify(self._longest)

    def _cut(self, start: int) -> int:
        length = self._lengths.pop(start)
        del self._starts[start + length]
        self._blocks -= length
        return length


class _Near:
    """Free blocks of two tiers, the first `near` of which are taken first."""

    def __init__(self, near: int, blocks: int) -> None:
        self._border = near
        self.near, self._far = FreeRuns(near), FreeRuns(blocks - near, near)

    def __len__(self) -> int:
        return len(self.near) + len(self._far)

    def __iter__(self) -> Iterator[HostBlockId]:
        return chain(self.near, self._far)

    def append(self, block: HostBlockId, /) -> None:
        (self.near if block < self._border else self._far).append(block)

    def take(self, most: int, after: HostBlockId | None, expected: int) -> tuple[int, int]:
        return (self.near if len(self.near) else self._far).take(most, after, expected)
