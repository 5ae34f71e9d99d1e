"""A ledger says which KV block of a tier holds what, and who uses it: a block manager over plain integers.

A block is in one of three states, by two facts: how many requests hold it, and whether it has a key.

    free    no holder, no key: its contents mean nothing
    held    one holder or more; with a key its contents are final and others may come to hold it too
    cached  no holder, a key: kept for later requests until room is needed, in the order of an Eviction

This is where a KV block's walk begins. `allocate` gives a request a page of the device, which its steps fill
(`movement.pool`). `seal` gives the full page its key (`keys`), and from then on `run_of` finds it for others.
`release` leaves it cached. While it is, the scheduler may have it copied to the host, which has a ledger
too (`host`), and from there to the disk (`disk`). A ledger moves no bytes; `movement` does.

Only the scheduler writes here, on one thread.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from typing import Generic, Protocol, TypeVar, cast

from penstock.kv.ledger.evict import Eviction, Lru
from penstock.step.plan import BlockId

Id = TypeVar("Id", bound=int)


class Free(Protocol[Id]):
    """A Free collects the free blocks of a pool."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Id]: ...

    def append(self, block: Id, /) -> None:
        """Add a free block."""
        ...


class Ledger(Generic[Id]):
    """A Ledger keeps the blocks [0, blocks) of one pool.

    A subclass for a tier decides which free blocks are used first, and which cached ones are evicted.
    """

    _free: Free[Id]

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.reset()

    def reset(self) -> None:
        """Free all blocks, held ones and cached ones too."""
        self._holders = [0] * self.blocks
        self._keys: list[bytes | None] = [None] * self.blocks
        self._by_key: dict[bytes, Id] = {}

    evicted = 0
    """Cached blocks that were evicted since the ledger was made."""

    def _order(self, block: Id) -> Eviction[bytes]:
        """Return the order in which a block is evicted when it is cached."""
        raise NotImplementedError

    @property
    def available(self) -> int:
        """Return the number of blocks that `allocate` could hand out now: free and cached ones."""
        return len(self._free) + self.cached

    @property
    def cached(self) -> int:
        """Return the number of blocks with a key and without a holder."""
        raise NotImplementedError

    def find(self, key: bytes) -> Id | None:
        """Return the block with this content, or None. To use it, `hold` it before anything else happens."""
        return self._by_key.get(key)

    def use(self, keys: Iterable[bytes]) -> None:
        """Note that a request has asked for this content, and found it here or on a tier before this one."""
        by_key, order = self._by_key, self._order
        for of, those in groupby((key for key in keys if key in by_key), lambda key: order(by_key[key])):
            of.found_all(list(those))

    def hold(self, block: Id) -> None:
        """Add a holder to a block that `find` gave."""
        key = self._keys[block]
        assert key is not None, f"block {block} has no key and cannot be shared"
        if self._holders[block] == 0:
            self._order(block).busy(key)
        self._holders[block] += 1

    def run_of(self, keys: Iterable[bytes]) -> list[Id]:
        """Return the blocks with the first of these keys, up to one that there is not."""
        by_key, blocks = self._by_key, list[Id]()
        for key in keys:
            block = by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold_run(self, keys: Iterable[bytes], blocks: Sequence[Id]) -> None:
        """Add a holder to each of these blocks. They have the first of these keys, and one order of
        eviction."""
        holders, unused = self._holders, []
        for key, block in zip(keys, blocks, strict=False):
            if not holders[block]:
                unused.append(key)
            holders[block] += 1
        if unused:
            self._order(blocks[0]).busy_all(unused)

    def is_private(self, block: Id) -> bool:
        """Tell whether a block may be written: one request holds it and no other can find it."""
        return self._holders[block] == 1 and self._keys[block] is None

    def _evict(self, victims: Sequence[bytes]) -> list[Id]:
        """Take their keys from the blocks that an order of eviction gave, and return the blocks."""
        blocks = [self._by_key.pop(key) for key in victims]
        for block in blocks:
            self._keys[block] = None
        self.evicted += len(blocks)
        return blocks

    def seal(self, block: Id, key: bytes, parent: bytes | None = None) -> None:
        """Give a held block its key: the content is final, and continues that of `parent`.

        A second block with the same content stays unknown to others.
        """
        assert self._holders[block] > 0, f"block {block} is sealed and has no holder"
        assert self._keys[block] is None, f"block {block} is sealed twice"
        if key not in self._by_key:
            self._by_key[key] = block
            self._keys[block] = key
            self._order(block).added(key, parent)

    def unseal(self, block: Id) -> bool:
        """Take the key from a held block, so that it may be written. Return whether it may be.

        It may not if it has a second holder, who reads it.
        """
        if self._holders[block] > 1:
            return False
        key = self._keys[block]
        if key is not None:
            self.forget_one(key)
        return True

    def release(self, blocks: Sequence[Id]) -> None:
        """Take a holder from each of these blocks, given in the order of the sequence.

        The end of a sequence is evicted before its beginning.
        """
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is released and has no holder"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            key = self._keys[block]
            if key is None:
                self._free.append(block)
            else:
                self._order(block).idle(key)

    def forget(self) -> int:
        """Drop all cached contents, and return how many blocks had any.

        Held blocks stay, but are no longer found.
        """
        dropped = self.cached
        for key in list(self._by_key):
            self.forget_one(key)
        return dropped

    def forget_one(self, key: bytes) -> None:
        """Let the block with this content, if there is one, no longer be found. Its holders keep it."""
        block = self._by_key.pop(key, None)
        if block is not None:
            self._keys[block] = None
            self._order(block).dropped(key)
            if not self._holders[block]:
                self._free.append(block)

    def check(self, held: Iterable[Sequence[Id]]) -> None:
        """Prove the invariants against what the requests say they hold.

        Raises AssertionError with what is wrong. It is looked for only where something is, since engines that
        check do so after every step.
        """
        counts = Counter(chain.from_iterable(held))
        if not self._agrees(counts):
            self._explain(counts)

    def _agrees(self, counts: Counter[Id]) -> bool:
        """Tell whether holders, keys and free blocks are right, without a loop over all blocks."""
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
    """A BlockLedger keeps the pages of the device.

    The last freed is the first used again: its memory is warm, and memory never used stays untouched. Cached
    pages are evicted least recently used first.
    """

    _free: list[BlockId]
    brought: set[BlockId]
    """Blocks whose KV came from another tier, so that no pass has computed it in its place."""

    def reset(self) -> None:
        """Free all blocks, the first of them to be used first."""
        super().reset()
        self._free = [BlockId(block) for block in reversed(range(self.blocks))]
        self._cached = Lru[bytes]()
        self.brought = set()

    def _order(self, block: BlockId) -> Eviction[bytes]:
        return self._cached

    @property
    def cached(self) -> int:
        """Return the number of blocks with a key and without a holder."""
        return len(self._cached)

    @property
    def free(self) -> int:
        """Return the number of blocks without a holder and without a key."""
        return len(self._free)

    def release_first(self, pages: Iterable[BlockId]) -> None:
        """Take a holder from each of these. Those that are cached then are the next to be evicted, in this
        order."""
        pages = list(pages)
        self.release(pages)
        for page in reversed(pages):
            key = self._keys[page]
            if key is not None and not self._holders[page]:
                self._cached.first(key)

    def next_evicted(self, count: int) -> list[tuple[BlockId, bytes]]:
        """Return the cached blocks that will be evicted first, and their keys."""
        return [(self._by_key[key], key) for key in islice(self._cached, count)]

    def allocate(self, count: int) -> list[BlockId]:
        """Return `count` blocks with one holder each and no content. Cached blocks are evicted for it.

        The caller has seen that `available` is enough.
        """
        assert 0 <= count <= self.available, f"{count} blocks asked for, {self.available} available"
        free = self._free
        taken = [free.pop() for _ in range(min(count, len(free)))]
        if len(taken) < count:
            taken += self._evict(self._cached.victims(count - len(taken)))
        for block in taken:
            self._holders[block] = 1
        self.brought.difference_update(taken)
        return taken
