"""Eviction: the order in which cached KV blocks make room for others. Over keys alone.

A block that no request holds is idle here, until a request holds it again or it is the victim. `Lru` is the
order of pages; `prospect.Prospect` that of the host and the disk, where a block has to gain by staying.

Time is counted in uses of blocks, never in seconds: the same calls give the same victims.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Eviction(Protocol[Key]):
    """An Eviction is the order in which one tier evicts blocks. Its ledger says what becomes of each block
    that has a key.

    A block is there from `added` until `victim` or `dropped`; meanwhile it is held, as it is at first, or
    idle. `added` and `found` are its uses, one for each request.
    """

    def __len__(self) -> int:
        """Return the number of idle blocks."""
        ...

    def added(self, key: Key, parent: Key | None) -> None:
        """Note that a block is there now, and held. It continues `parent`, if that is still there."""
        ...

    def found(self, key: Key) -> None:
        """Note that a request asked for a block that is there, held or idle."""
        ...

    def found_all(self, keys: Sequence[Key]) -> None:
        """Do as `found` for each, in less time."""
        ...

    def busy(self, key: Key) -> None:
        """Note that an idle block is held from now on."""
        ...

    def busy_all(self, keys: Sequence[Key]) -> None:
        """Do as `busy` for each, in less time."""
        ...

    def idle(self, key: Key) -> None:
        """Note that a block has no holder any longer. Blocks of a request come from its last to its first."""
        ...

    def victim(self) -> Key:
        """Evict one of the idle blocks, and return it. There must be one."""
        ...

    def dropped(self, key: Key) -> None:
        """Note that a block, held or idle, is gone for another reason."""
        ...


class Lru(Generic[Key]):
    """An Lru is the order of use: what has been idle for longest goes first."""

    def __init__(self) -> None:
        self._idle: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[Key]:
        """Yield idle blocks, the next victim first."""
        return iter(self._idle)

    def added(self, key: Key, parent: Key | None) -> None:
        """Note that a block is there now, and held: see Eviction."""

    def found(self, key: Key) -> None:
        """Note that a request asked for a block that is there."""
        if key in self._idle:
            self._idle.move_to_end(key)

    def found_all(self, keys: Sequence[Key]) -> None:
        """Do as `found` for each, in less time."""
        for key in keys:
            self.found(key)

    def busy(self, key: Key) -> None:
        """Note that an idle block is held from now on."""
        del self._idle[key]

    def busy_all(self, keys: Sequence[Key]) -> None:
        """Do as `busy` for each, in less time."""
        for key in keys:
            del self._idle[key]

    def idle(self, key: Key) -> None:
        """Note that a block has no holder any longer."""
        self._idle[key] = None

    def first(self, key: Key) -> None:
        """Make an idle block the next victim."""
        self._idle.move_to_end(key, last=False)

    def victim(self) -> Key:
        """Evict one of the idle blocks, and return it."""
        return self.victims(1)[0]

    def victims(self, count: int) -> list[Key]:
        """Evict as many blocks as that, one after the other, and return them."""
        return [self._idle.popitem(last=False)[0] for _ in range(count)]

    def dropped(self, key: Key) -> None:
        """Note that a block is gone for another reason."""
        self._idle.pop(key, None)
