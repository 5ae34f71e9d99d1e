"""The ledger of KV blocks on the disk: their keys alone.

A cached block of the host that is worth it is written to the disk, and noted here when it has landed (`add`).
It is read back when a request's prefix is found here. The bytes, and the place of each, are in the
`store.blocks.BlockStore` of every rank.
"""

from collections.abc import Iterable, Sequence

from penstock.kv.ledger.prospect import DEEP, Prospect


class DiskLedger:
    """A DiskLedger has the keys that are on the disk, and evicts some when there are too many."""

    def __init__(self, capacity: int, keys: Iterable[bytes] = (), block_size: int = 64) -> None:
        """Make the ledger of a disk that has room for `capacity` blocks.

        keys: those that are there, the longest unused first.
        block_size: tokens of a block.
        """
        self.capacity = capacity
        self.evicted = 0
        self.leaving: list[bytes] = []
        """Keys that are not found here any more, and that the disk's own index may still have. The scheduler
        sends them to it with a plan, and then takes them away from the front."""
        self._deep = max(DEEP // block_size, 1)
        self._there = dict.fromkeys(keys)
        self.vacate()

    def __len__(self) -> int:
        return len(self._there)

    def find(self, key: bytes) -> bool:
        """Tell whether the disk has this content."""
        return key in self._there

    def use(self, keys: Iterable[bytes]) -> None:
        """Note that a request has asked for this content, and found it here or on a tier before this one."""
        self._cached.found_all([key for key in keys if key in self._there])

    def make_room(self, count: int) -> None:
        """Evict as many as must go for `count` more."""
        while len(self._cached) and len(self._there) + count > self.capacity:
            key = self._cached.victim()
            self.leaving.append(key)
            del self._there[key]
            self.evicted += 1

    def add(self, key: bytes, parent: bytes | None) -> None:
        """Note that this content is on disk from now on."""
        if key not in self._there:
            self._there[key] = None
            self._cached.added(key, parent)
            self._cached.idle(key)

    def hold(self, keys: Iterable[bytes]) -> None:
        """Note that these are being read, and are not evicted."""
        some = list(keys)
        self._cached.busy_all(some)
        self._held.update(some)

    def let_go(self, keys: Sequence[bytes]) -> None:
        """Note that these are read no longer, the last of a chain first."""
        for key in reversed(keys):
            if key in self._held:
                self._held.remove(key)
                self._cached.idle(key)

    def drop(self, key: bytes) -> None:
        """Let this content, if it is there, be found no more. The disk of some rank may not have it."""
        self._held.discard(key)
        if key in self._there:
            self.leaving.append(key)
            del self._there[key]
            self._cached.dropped(key)

    def clear(self) -> int:
        """Evict everything, and return how many blocks there were."""
        gone = list(self._there)
        for key in gone:
            self.drop(key)
        return len(gone)

    def vacate(self) -> None:
        """Note that nothing is being read any more.

        It may be called when an interrupt has left things half done. What was learned of how blocks return is
        lost.
        """
        for key in self.leaving:
            self._there.pop(key, None)
        self._held = set[bytes]()
        self._cached = Prospect[bytes](max(self.capacity, 1), deep=self._deep)
        for key in self._there:
            self._cached.added(key, None)
            self._cached.idle(key)
