"""The ledger of KV blocks in host memory, and in the file that long requests use behind it.

Two kinds of blocks are here. A cached prefix block came down from a page of the device by a transfer, waits
to be asked for again, and goes on to the disk or is evicted. A block of a long request stays until its end,
and is read tile by tile (`movement.tiles`). Free blocks that follow one another are taken together, since
they stream in one copy.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, takewhile
from typing import cast

from penstock.kv.ledger.blocks import Ledger
from penstock.kv.ledger.evict import Eviction, Lru
from penstock.kv.ledger.prospect import DEEP, Prospect
from penstock.step.plan import HostBlockId


class HostLedger(Ledger[HostBlockId]):
    """A HostLedger keeps the blocks [0, near) of host memory and, behind them, those in a file.

    The blocks of a request follow one another wherever they can. Those in the file are used when the host has
    none that is free or cached. Cached blocks of the host are evicted by their prospects.
    """

    _free: "_Near"

    def __init__(self, blocks: int, on_disk: int = 0, block_size: int = 64) -> None:
        """Make a ledger of `blocks` free blocks in all. The last `on_disk` of them are in the file.

        block_size: tokens of each.
        """
        self.near = blocks - on_disk
        self._deep = max(DEEP // block_size, 1)
        super().__init__(blocks)

    def reset(self) -> None:
        """Free all blocks, those of the file too."""
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
        """Return the number of blocks with a key and without a holder, those of the file included."""
        return len(self._cached) + len(self._cached_far)

    @property
    def available_near(self) -> int:
        """Return the number of blocks that `allocate_near` could hand out now."""
        return len(self._free.near) + len(self._cached)

    def is_near(self, block: HostBlockId) -> bool:
        """Tell whether a block is in host memory, and not in the file."""
        return block < self.near

    def run_of(self, keys: Iterable[bytes]) -> list[HostBlockId]:
        """Return the blocks of host memory with the first of these keys, up to one that there is not."""
        return list(takewhile(self.is_near, super().run_of(keys)))

    def worth(self, key: bytes) -> bool:
        """Tell whether a cached block is likely enough to be asked for again to be written to the disk."""
        return isinstance(self._cached, Prospect) and self._cached.worth(key)

    def vacate(self) -> None:
        """Take all holders from all blocks. Blocks of host memory that have a key stay cached.

        It may be called when an interrupt has left things half done. What was learned of how blocks return is
        lost.
        """
        kept = {
            key: block
            for key, block in self._by_key.items()
            if self.is_near(block) and self._keys[block] == key
        }
        self.reset()
        self._free.keep(set(kept.values()))
        for key, block in kept.items():
            self._keys[block] = key
            self._order(block).added(key, None)
            self._order(block).idle(key)
        self._by_key = kept

    def allocate(self, count: int, after: HostBlockId | None = None, expected: int = 0) -> list[HostBlockId]:
        """Return `count` blocks with one holder each and no content, in few runs. Cached ones are evicted for
        it.

        after: the block that they continue.
        expected: how many will be asked for before long, these included.

        The caller has seen that `available` is enough. O(count log blocks).
        """
        assert 0 <= count <= self.available, f"{count} blocks asked for, {self.available} available"
        most = min(count - len(self._free.near), len(self._cached))
        self._free.near.extend(self._evict(self._cached.victims(max(most, 0))))
        for block in self._evict(self._cached_far.victims(max(count - len(self._free), 0))):
            self._free.append(block)
        taken: list[HostBlockId] = []
        while len(taken) < count:
            start, length = self._free.take(count - len(taken), after, expected - len(taken))
            taken.extend(HostBlockId(block) for block in range(start, start + length))
            after = taken[-1]
        for block in taken:
            self._holders[block] = 1
        return taken

    def allocate_near(self, count: int) -> list[HostBlockId]:
        """Return blocks of host memory, as `allocate` does. The caller has seen `available_near`."""
        assert 0 <= count <= self.available_near, f"{count} blocks asked for, {self.available_near} available"
        return self.allocate(count)


class FreeRuns:
    """A FreeRuns keeps free blocks as runs of consecutive ones. Whatever lies side by side is one run."""

    def __init__(self, blocks: int, first: int = 0) -> None:
        """Let all of [first, first + blocks) be free."""
        self._blocks = 0
        self._lengths: dict[int, int] = {}
        """The length of the run that starts at a block."""
        self._starts: dict[int, int] = {}
        """The start of the run that stops before a block."""
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
        """Add `length` blocks from this one on."""
        start, stop = int(block), block + length
        if start in self._starts:
            start = self._starts[start]
            self._cut(start)
        if stop in self._lengths:
            stop += self._cut(stop)
        self._put(start, stop - start)

    def extend(self, blocks: Sequence[HostBlockId]) -> None:
        """Add these blocks, in less time than one by one where many lie side by side."""
        begin, ordered = 0, sorted(blocks)
        for end in range(1, len(ordered) + 1):
            if end == len(ordered) or ordered[end] != ordered[end - 1] + 1:
                self.append(ordered[begin], end - begin)
                begin = end

    def take(self, most: int, after: HostBlockId | None, expected: int) -> tuple[int, int]:
        """Take a run of 1 to `most` blocks, and return its start and length.

        It follows `after` if that is free, and else is out of the longest run: from the middle, so that the
        new run can grow as well as the one that ends before, or from further to the front where `expected`
        blocks need the room.
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
    """A _Near has the free blocks of host memory, the first `near`, and of the file; it takes the first
    first."""

    def __init__(self, near: int, blocks: int) -> None:
        self._border = near
        self.near, self._far = FreeRuns(near), FreeRuns(blocks - near, near)

    def __len__(self) -> int:
        return len(self.near) + len(self._far)

    def __iter__(self) -> Iterator[HostBlockId]:
        return chain(self.near, self._far)

    def append(self, block: HostBlockId, /) -> None:
        (self.near if block < self._border else self._far).append(block)

    def keep(self, blocks: set[HostBlockId]) -> None:
        """Let all blocks of host memory be free but these."""
        self.near = FreeRuns(0)
        self.near.extend([block for block in map(HostBlockId, range(self._border)) if block not in blocks])

    def take(self, most: int, after: HostBlockId | None, expected: int) -> tuple[int, int]:
        return (self.near if len(self.near) else self._far).take(most, after, expected)
