"""Which KV block holds what and who uses it: allocation, sharing by content, and giving up of blocks, over
plain integers.

A block is in one of three states, told by two facts, how many requests hold it and whether it has a key:

    free    no holder, no key: its contents mean nothing
    held    one holder or more; with a key its contents are final and others may come to hold it too
    cached  no holder, a key: kept for later requests until room is needed, in the order of an Eviction

Only the scheduler writes here, on one thread.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, groupby, islice, takewhile
from typing import Generic, Protocol, TypeVar, cast

from penstock.kv.ledger.evict import Eviction, Lru, Prospect
from penstock.step.plan import BlockId, HostBlockId

Id = TypeVar("Id", bound=int)


class Free(Protocol[Id]):
    """The free blocks of a pool."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Id]: ...

    def append(self, block: Id, /) -> None: ...


class Ledger(Generic[Id]):
    """The blocks [0, blocks) of one pool. Which of the free ones are used first, a ledger of a tier decides,
    and which cached ones go."""

    _free: Free[Id]

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.reset()

    def reset(self) -> None:
        """All blocks are free, whoever held them and whatever they held."""
        self._holders = [0] * self.blocks
        self._keys: list[bytes | None] = [None] * self.blocks
        self._by_key: dict[bytes, Id] = {}

    given_up = 0
    """Cached blocks, since there is the ledger."""

    def _order(self, block: Id) -> Eviction[bytes]:
        """By which a block that is cached is given up."""
        raise NotImplementedError

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now: free and cached ones."""
        return len(self._free) + self.cached

    @property
    def cached(self) -> int:
        raise NotImplementedError

    def find(self, key: bytes) -> Id | None:
        """The block with this content, if there is one. To use it, `hold` it before anything else happens."""
        return self._by_key.get(key)

    def use(self, keys: Iterable[bytes]) -> None:
        """A request has asked for this content, and found it here or on a tier before this one."""
        by_key, order = self._by_key, self._order
        for of, those in groupby((key for key in keys if key in by_key), lambda key: order(by_key[key])):
            of.found_all(list(those))

    def hold(self, block: Id) -> None:
        """One more holder for a block that `find` gave."""
        key = self._keys[block]
        assert key is not None, f"block {block} has no key and cannot be shared"
        if self._holders[block] == 0:
            self._order(block).busy(key)
        self._holders[block] += 1

    def run_of(self, keys: Iterable[bytes]) -> list[Id]:
        """The blocks with the first of these keys, up to one that there is not."""
        by_key, blocks = self._by_key, list[Id]()
        for key in keys:
            block = by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold_run(self, keys: Iterable[bytes], blocks: Sequence[Id]) -> None:
        """One more holder for each of these blocks, which have the first of these keys, and which are given
        up in one order."""
        holders, unused = self._holders, []
        for key, block in zip(keys, blocks, strict=False):
            if not holders[block]:
                unused.append(key)
            holders[block] += 1
        if unused:
            self._order(blocks[0]).busy_all(unused)

    def is_private(self, block: Id) -> bool:
        """One request holds it and no other can find it: it may be written."""
        return self._holders[block] == 1 and self._keys[block] is None

    def _give_up(self, order: Eviction[bytes]) -> Id:
        block = self._by_key.pop(order.victim())
        self.given_up += 1
        self._keys[block] = None
        return block

    def seal(self, block: Id, key: bytes, parent: bytes | None = None) -> None:
        """The content of a held block is final and has this key, and continues that of `parent`. A second
        block with the same content stays unknown to others."""
        assert self._holders[block] > 0, f"block {block} is sealed but held by nobody"
        assert self._keys[block] is None, f"block {block} is sealed twice"
        if key not in self._by_key:
            self._by_key[key] = block
            self._keys[block] = key
            self._order(block).added(key, parent)

    def unseal(self, block: Id) -> bool:
        """Make a held block writable, so that it has no key any more. Return whether it is: False if it has a
        second holder, who reads it."""
        if self._holders[block] > 1:
            return False
        key = self._keys[block]
        if key is not None:
            self.forget_one(key)
        return True

    def release(self, blocks: Sequence[Id]) -> None:
        """One holder less for each, given in the order of the sequence: its end is given up before its
        beginning."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is released but held by nobody"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            key = self._keys[block]
            if key is None:
                self._free.append(block)
            else:
                self._order(block).idle(key)

    def forget(self) -> int:
        """Drop all cached contents; held blocks stay, but are no longer found. Returns how many blocks were
        given up."""
        dropped = self.cached
        for key, block in self._by_key.items():
            assert self._keys[block] == key
            self._keys[block] = None
            self._order(block).dropped(key)
            if not self._holders[block]:
                self._free.append(block)
        self._by_key.clear()
        return dropped

    def forget_one(self, key: bytes) -> None:
        """The block with this content, if there is one, is no longer found; whoever holds it goes on."""
        block = self._by_key.pop(key, None)
        if block is not None:
            self._keys[block] = None
            self._order(block).dropped(key)
            if not self._holders[block]:
                self._free.append(block)

    def check(self, held: Iterable[Sequence[Id]]) -> None:
        """Prove the invariants against what the requests say they hold. Raises AssertionError with what is
        wrong."""
        counts = Counter(chain.from_iterable(held))
        if not self._agrees(
            counts
        ):  # Engines that check do so after every step: what is wrong is looked for where something is.
            self._explain(counts)

    def _agrees(self, counts: Counter[Id]) -> bool:
        """Whether holders, keys and free blocks are as they must be, without a loop over all blocks."""
        holders, keys, free = self._holders, self._keys, set(self._free)
        shared = sum(keys[block] is not None for block in counts)
        bare, keyed = keys.count(None) - (len(counts) - shared), len(self._by_key)
        return (
            holders.count(0) == self.blocks - len(counts)
            and all(holders[block] == count for block, count in counts.items())
            and len(free) == len(self._free) == bare
            and 0 <= min(free, default=0) <= max(free, default=0) < max(self.blocks, 1)
            and free.isdisjoint(counts)
            and free.isdisjoint(self._by_key.values())
            and keyed == self.blocks - keys.count(None)
            and all(keys[block] == key for key, block in self._by_key.items())
            and keyed - shared == self.cached
        )

    def _explain(self, counts: Counter[Id]) -> None:
        recorded = {cast(Id, block): holders for block, holders in enumerate(self._holders) if holders}
        for block in counts.keys() | recorded.keys() if counts != recorded else ():
            assert counts[block] == recorded.get(block, 0), (
                f"block {block} has {recorded.get(block, 0)} holders on record, {counts[block]} in fact"
            )
        free, idle = set(self._free), 0
        assert len(free) == len(self._free), "a block is free twice"
        bare = {
            cast(Id, block)
            for block, key in enumerate(self._keys)
            if key is None and not self._holders[block]
        }
        assert free == bare, f"blocks {sorted(free ^ bare)} are wrongly on or off the free list"
        for number, key in enumerate(self._keys):
            if key is not None:
                idle += not self._holders[number]
                assert self._by_key.get(key) == number, f"block {number} has a key that finds another block"
        assert idle == self.cached, f"{idle} blocks are cached, {self.cached} are known to be"
        assert len(self._by_key) == sum(key is not None for key in self._keys), (
            "a key finds a block that does not have it"
        )
        raise AssertionError("blocks, keys and holders do not agree")


class BlockLedger(Ledger[BlockId]):
    """The blocks of the device. The last freed is the first used again: its memory is warm, and memory never
    used stays untouched. Of the cached ones the longest unused goes first."""

    _free: list[BlockId]

    def reset(self) -> None:
        super().reset()
        self._free = [BlockId(block) for block in reversed(range(self.blocks))]
        self._cached = Lru[bytes]()

    def _order(self, block: BlockId) -> Eviction[bytes]:
        return self._cached

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def free(self) -> int:
        return len(self._free)

    def release_first(self, pages: Iterable[BlockId]) -> None:
        """One holder less for each; those that are cached then are given up before all others, in this
        order."""
        pages = list(pages)
        self.release(pages)
        for page in reversed(pages):
            key = self._keys[page]
            if key is not None and not self._holders[page]:
                self._cached.first(key)

    def next_given_up(self, count: int) -> list[tuple[BlockId, bytes]]:
        """The cached blocks that will be given up first, and their keys."""
        return [(self._by_key[key], key) for key in islice(self._cached, count)]

    def allocate(self, count: int) -> list[BlockId]:
        """`count` blocks with one holder each and no content; cached blocks are given up for it.

        The caller has seen that `available` is enough.
        """
        assert 0 <= count <= self.available, f"{count} blocks asked for, {self.available} available"
        free, keys = self._free, self._keys
        taken = [free.pop() for _ in range(min(count, len(free)))]
        for key in self._cached.victims(count - len(taken)):
            block = self._by_key.pop(key)
            keys[block] = None
            taken.append(block)
            self.given_up += 1
        for block in taken:
            self._holders[block] = 1
        return taken


_DEEP = 16384
"""Tokens before a block that stands deep in its prompt (see Prospect)."""


class HostLedger(Ledger[HostBlockId]):
    """The blocks of the host, the near ones, and behind them those in a file that long requests use as more
    of the same. A request's follow one another wherever they can: what is consecutive streams in one copy.
    Those in the file are used when the host has no block that is free or cached. What is cached on the host
    is given up by its prospects."""

    _free: "_Near"

    def __init__(self, blocks: int, on_disk: int = 0, block_size: int = 64) -> None:
        """blocks: in all. on_disk: how many of them, the last, are on disk. block_size: tokens of each."""
        self.near = blocks - on_disk
        self._deep = max(_DEEP // block_size, 1)
        super().__init__(blocks)

    def reset(self) -> None:
        super().reset()
        self._free = _Near(self.near, self.blocks)
        self._cached: Lru[bytes] | Prospect[bytes] = (
            Prospect(self.near, deep=self._deep) if self.near else Lru()
        )
        self._cached_far = Lru[bytes]()

    def _order(self, block: HostBlockId) -> Eviction[bytes]:
        return self._cached if block < self.near else self._cached_far

    @property
    def cached(self) -> int:
        return len(self._cached) + len(self._cached_far)

    @property
    def available_near(self) -> int:
        """Blocks that `allocate_near` could hand out now."""
        return len(self._free.near) + len(self._cached)

    def is_near(self, block: HostBlockId) -> bool:
        return block < self.near

    def run_of(self, keys: Iterable[bytes]) -> list[HostBlockId]:
        """Of the near blocks."""
        return list(takewhile(self.is_near, super().run_of(keys)))

    def worth(self, key: bytes) -> bool:
        """Whether what is cached here will likely enough be asked for again to be written to a disk."""
        return isinstance(self._cached, Prospect) and self._cached.worth(key)

    def vacate(self) -> None:
        """Nobody holds anything any more. What has a key stays, but what is in the file. To be called also
        when an interrupt has left things half done; what was learned of how blocks return is lost."""
        kept = {
            key: block
            for key, block in self._by_key.items()
            if self.is_near(block) and self._keys[block] == key
        }
        self.reset()
        self._free.remove(kept.values())
        for key, block in kept.items():
            self._keys[block] = key
            self._order(block).added(key, None)
            self._order(block).idle(key)
        self._by_key = kept

    def allocate(self, count: int, after: HostBlockId | None = None, expected: int = 0) -> list[HostBlockId]:
        """`count` blocks with one holder each and no content, in few runs; cached blocks are given up for it.

        after: the block that they continue. expected: how many will be asked for before long, these included.
        The caller has seen that `available` is enough. O(count log blocks).
        """
        assert 0 <= count <= self.available, f"{count} blocks asked for, {self.available} available"
        self._free_near(count)
        while len(self._free) < count:
            self._free.append(self._give_up(self._cached_far))
        return self._take(count, after, expected)

    def allocate_near(self, count: int) -> list[HostBlockId]:
        """As `allocate`, of the near ones. The caller has seen that `available_near` is enough."""
        assert 0 <= count <= self.available_near, f"{count} blocks asked for, {self.available_near} available"
        self._free_near(count)
        return self._take(count, None, 0)

    def _free_near(self, count: int) -> None:
        most = min(count - len(self._free.near), len(self._cached))
        if most > 0:
            blocks = [self._by_key.pop(key) for key in self._cached.victims(most)]
            for block in blocks:
                self._keys[block] = None
            self.given_up += most
            self._free.near.extend(blocks)

    def _take(self, count: int, after: HostBlockId | None, expected: int) -> list[HostBlockId]:
        taken: list[HostBlockId] = []
        while len(taken) < count:
            start, length = self._free.take(count - len(taken), after, expected - len(taken))
            taken.extend(HostBlockId(block) for block in range(start, start + length))
            after = taken[-1]
        for block in taken:
            self._holders[block] = 1
        return taken


class DiskLedger:
    """Which keys are on disk, and which of them go when there are too many. Where they are there, the disk's
    own index knows."""

    def __init__(self, capacity: int, keys: Iterable[bytes] = (), block_size: int = 64) -> None:
        """capacity: of records. keys: that are there, the longest unused first."""
        self.capacity = capacity
        self.given_up = 0
        self.leaving: list[bytes] = []
        """That are found no more, and that the disk's own index may still have. Whoever has told it takes
        them away, the first first."""
        self._deep = max(_DEEP // block_size, 1)
        self._there = dict.fromkeys(keys)
        self.vacate()

    def __len__(self) -> int:
        return len(self._there)

    def find(self, key: bytes) -> bool:
        return key in self._there

    def use(self, keys: Iterable[bytes]) -> None:
        """A request has asked for this content, and found it here or on a tier before this one."""
        self._cached.found_all([key for key in keys if key in self._there])

    def make_room(self, count: int) -> None:
        """Gives up as many as must go for `count` more."""
        while len(self._cached) and len(self._there) + count > self.capacity:
            key = self._cached.victim()
            self.leaving.append(key)
            del self._there[key]
            self.given_up += 1

    def add(self, key: bytes, parent: bytes | None) -> None:
        """It is there from now on."""
        if key not in self._there:
            self._there[key] = None
            self._cached.added(key, parent)
            self._cached.idle(key)

    def hold(self, keys: Iterable[bytes]) -> None:
        """These are being read: they do not go."""
        some = list(keys)
        self._cached.busy_all(some)
        self._held.update(some)

    def let_go(self, keys: Sequence[bytes]) -> None:
        """They are no longer, the last of a chain first."""
        for key in reversed(keys):
            if key in self._held:
                self._held.remove(key)
                self._cached.idle(key)

    def drop(self, key: bytes) -> None:
        """It is not there, as has been found out."""
        self._held.discard(key)
        if key in self._there:
            del self._there[key]
            self._cached.dropped(key)

    def give_up(self, key: bytes) -> None:
        """It is not to be found any more, if it is there."""
        if key in self._there:
            self.leaving.append(key)
            self.drop(key)

    def clear(self) -> int:
        """Gives up all. How many."""
        gone = list(self._there)
        self.leaving += gone
        for key in gone:
            self.drop(key)
        return len(gone)

    def vacate(self) -> None:
        """Nothing is being read any more. To be called also when an interrupt has left things half done; what
        was learned of how blocks return is lost."""
        for key in self.leaving:
            self._there.pop(key, None)
        self._held = set[bytes]()
        self._cached = Prospect[bytes](max(self.capacity, 1), deep=self._deep)
        for key in self._there:
            self._cached.added(key, None)
            self._cached.idle(key)


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
        runs = chain.from_iterable(range(start, start + length) for start, length in self._lengths.items())
        return cast(Iterator[HostBlockId], runs)

    def append(self, block: HostBlockId, /, length: int = 1) -> None:
        """This one, or so many from it on."""
        start, stop = int(block), block + length
        if start in self._starts:
            start = self._starts[start]
            self._cut(start)
        if stop in self._lengths:
            stop += self._cut(stop)
        self._put(start, stop - start)

    def extend(self, blocks: Sequence[HostBlockId]) -> None:
        """As `append` for each, in less time where many lie side by side."""
        begin, ordered = 0, sorted(blocks)
        for end in range(1, len(ordered) + 1):
            if end == len(ordered) or ordered[end] != ordered[end - 1] + 1:
                self.append(ordered[begin], end - begin)
                begin = end

    def remove(self, blocks: Iterable[HostBlockId]) -> None:
        """These are free no longer."""
        left = set(self).difference(blocks)
        self._blocks = 0
        self._lengths.clear()
        self._starts.clear()
        self._longest.clear()
        for block in sorted(left):
            self.append(block)

    def take(self, most: int, after: HostBlockId | None, expected: int) -> tuple[int, int]:
        """Takes a run of 1 to `most` blocks: the one that follows `after` if that is free, else out of the
        longest. Its start and length.

        Out of the longest it takes from the middle, so that the new run can grow as well as the one that ends
        before; from further to the front where `expected` blocks need the room.
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

    def remove(self, blocks: Iterable[HostBlockId]) -> None:
        """These, of the first tier, are free no longer."""
        self.near.remove(blocks)

    def take(self, most: int, after: HostBlockId | None, expected: int) -> tuple[int, int]:
        return (self.near if len(self.near) else self._far).take(most, after, expected)
