"""Which KV block holds what and who uses it: allocation, sharing by content, and giving up of blocks, over plain integers.

A block is in one of three states, told by two facts, how many requests hold it and whether it has a key:

    free    no holder, no key: its contents mean nothing
    held    one holder or more; with a key its contents are final and others may come to hold it too
    cached  no holder, a key: kept for later requests until room is needed, longest unused first

Only the scheduler writes here, on one thread.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from penstock.step.plan import BlockId


class BlockLedger:
    """The blocks [0, blocks) of one pool."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.reset()

    def reset(self) -> None:
        """All blocks are free, whoever held them and whatever they held."""
        self._holders = [0] * self.blocks
        self._keys: list[bytes | None] = [None] * self.blocks
        self._by_key: dict[bytes, BlockId] = {}
        # The last freed is the first used again: its memory is warm, and memory never used stays untouched.
        self._free = [BlockId(block) for block in reversed(range(self.blocks))]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def find(self, key: bytes) -> BlockId | None:
        """The block with this content, if there is one. To use it, `hold` it before anything else happens."""
        return self._by_key.get(key)

    def hold(self, block: BlockId) -> None:
        """One more holder for a block that `find` gave."""
        assert self._keys[block] is not None, f"block {block} has no key and cannot be shared"
        if self._holders[block] == 0:
            del self._cached[block]
        self._holders[block] += 1

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

    def _give_up(self) -> BlockId:
        block, _ = self._cached.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._by_key[key]
        self._keys[block] = None
        return block

    def seal(self, block: BlockId, key: bytes) -> None:
        """The content of a held block is final and has this key. A second block with the same content stays unknown to others."""
        assert self._holders[block] > 0, f"block {block} is sealed but held by nobody"
        assert self._keys[block] is None, f"block {block} is sealed twice"
        if key not in self._by_key:
            self._by_key[key] = block
            self._keys[block] = key

    def release(self, blocks: Sequence[BlockId]) -> None:
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

    def check(self, held: Iterable[Sequence[BlockId]]) -> None:
        """Prove the invariants against what the requests say they hold. Raises AssertionError with what is wrong."""
        counts = Counter(block for blocks in held for block in blocks)
        for block in range(self.blocks):
            assert counts[BlockId(block)] == self._holders[block], (
                f"block {block} has {self._holders[block]} holders on record, {counts[BlockId(block)]} in fact"
            )
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        for block in map(BlockId, range(self.blocks)):
            key = self._keys[block]
            unused = self._holders[block] == 0
            assert (block in free) == (unused and key is None), f"block {block} is wrongly on or off the free list"
            assert (block in cached) == (unused and key is not None), f"block {block} is wrongly in or out of the cache"
            assert key is None or self._by_key.get(key) == block, f"block {block} has a key that finds another block"
        assert len(self._by_key) == sum(key is not None for key in self._keys), "a key finds a block that does not have it"
