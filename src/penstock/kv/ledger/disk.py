"""Which blocks are on disk, by their keys."""

from collections.abc import Iterable, Sequence

from penstock.kv.ledger.evict import DEEP
from penstock.kv.ledger.prospect import Prospect


class DiskLedger:
    """The keys that are on disk, and which of them go when there are too many. Where they are there, the
    disk's own index knows."""

    def __init__(self, capacity: int, keys: Iterable[bytes] = (), block_size: int = 64) -> None:
        """capacity: of records. keys: that are there, the longest unused first."""
        self.capacity = capacity
        self.evicted = 0
        self.leaving: list[bytes] = []
        """That are found no more, and that the disk's own index may still have. Whoever has told it takes
        them away, the first first."""
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
        """Give up as many as must go for `count` more."""
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
        """Note that these are being read: they do not go."""
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
        """Note that this content is not on disk, as has been found out."""
        self._held.discard(key)
        if key in self._there:
            del self._there[key]
            self._cached.dropped(key)

    def evict(self, key: bytes) -> None:
        """Let this content, if it is there, be found no more."""
        if key in self._there:
            self.leaving.append(key)
            self.drop(key)

    def clear(self) -> int:
        """Give up everything. Return how many there were."""
        gone = list(self._there)
        self.leaving += gone
        for key in gone:
            self.drop(key)
        return len(gone)

    def vacate(self) -> None:
        """Note that nothing is being read any more. To be called also when an interrupt has left things half
        done; what was learned of how blocks return is lost."""
        for key in self.leaving:
            self._there.pop(key, None)
        self._held = set[bytes]()
        self._cached = Prospect[bytes](max(self.capacity, 1), deep=self._deep)
        for key in self._there:
            self._cached.added(key, None)
            self._cached.idle(key)
