"""Chooses the replica that computes a prompt: the one that holds the longest beginning of it, unless that one
has far more to do than another.

What a replica holds is not asked: it is remembered, as the keys of the blocks of prompts that went there and
of what came of them. A replica's oldest keys are forgotten when there are more than it has blocks for, as it
gives up its oldest blocks itself. A key chains those before it, so that the first key that is missing ends
the beginning that is held.

Why this is safe: a router on a thread of its own asks and notes, and so does the thread that follows the
answers. Each method holds the lock for all it does, and waits for nothing meanwhile. A mistake in what is
remembered costs a prompt's computing and never changes an answer.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock


class _Replica:
    def __init__(self) -> None:
        self.keys: OrderedDict[bytes, None] = OrderedDict()
        """Of its blocks; the last is the newest."""
        self.load = 0
        """Requests under way."""
        self.doubted = False
        """Whether it was lost in the midst of an answer, and has not been heard of since."""

    def held(self, keys: Sequence[bytes]) -> int:
        """Count a prompt's blocks that it holds, from the prompt's beginning on."""
        for count, key in enumerate(keys):
            if key not in self.keys:
                return count
        return len(keys)


class Affinity:
    """Ranks replicas for prompts: it knows which there are, what each of them holds, and how busy it is."""

    def __init__(self, slack: int, kept: int) -> None:
        """Begin without replicas.

        slack: requests that a replica may have under way beyond the idlest's, and still be chosen for what it
            holds.
        kept: blocks that are remembered of each; the oldest are forgotten first.
        """
        self.slack, self.kept = slack, kept
        self._replicas: dict[str, _Replica] = {}
        self._lock = Lock()

    @property
    def replicas(self) -> tuple[str, ...]:
        """Return the names of the replicas."""
        with self._lock:
            return tuple(self._replicas)

    @property
    def loads(self) -> dict[str, int]:
        """Return the requests under way, by replica."""
        with self._lock:
            return {name: replica.load for name, replica in self._replicas.items()}

    def keep(self, names: Iterable[str]) -> None:
        """Set which replicas there are: new ones hold nothing, others are forgotten."""
        with self._lock:
            self._replicas = {name: self._replicas.get(name) or _Replica() for name in names}

    def ranked(self, keys: Sequence[bytes]) -> list[str]:
        """Return all replicas, the best for a prompt with these keys first."""
        with self._lock:
            idlest = min(
                (replica.load for replica in self._replicas.values() if not replica.doubted), default=0
            )

            def place(name: str) -> tuple[bool, int, int, int]:
                replica = self._replicas[name]
                held = replica.held(keys) if replica.load <= idlest + self.slack else 0
                return replica.doubted, -held, replica.load, len(replica.keys)

            return sorted(self._replicas, key=place)

    def note(self, name: str, keys: Sequence[bytes]) -> None:
        """Note that a replica computes, or has computed, the blocks of these keys."""
        with self._lent(name) as replica:
            # The beginning is used whenever any of the rest is: it becomes the newest, and goes last.
            for key in reversed(keys[: self.kept]):
                replica.keys[key] = None
                replica.keys.move_to_end(key)
            while len(replica.keys) > self.kept:
                replica.keys.popitem(last=False)

    def sent(self, name: str) -> None:
        """Count one more request under way."""
        with self._lent(name) as replica:
            replica.load += 1

    def ended(self, name: str) -> None:
        """Count one less."""
        with self._lent(name) as replica:
            replica.load = max(replica.load - 1, 0)

    def doubt(self, name: str) -> None:
        """Note that a replica was lost in the midst of an answer: it is the last choice until it is heard of,
        and holds nothing."""
        with self._lent(name) as replica:
            replica.doubted = True
            replica.keys.clear()

    def trust(self, name: str) -> None:
        """Note that a replica has been heard of."""
        with self._lent(name) as replica:
            replica.doubted = False

    @contextmanager
    def _lent(self, name: str) -> Iterator[_Replica]:
        """Lend a replica, under the lock; for one that is not there, another that is forgotten at once."""
        with self._lock:
            yield self._replicas.get(name) or _Replica()


class PromptRoute:
    """Carries the keys of a prompt's blocks. They are for who chooses a replica and stay in that process: the
    replica gets none."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self.keys = keys

    def __reduce__(self) -> tuple[type["PromptRoute"], tuple[()]]:
        return PromptRoute, ()


SHARED: dict[str, Affinity] = {}
"""Affinities by the name of an application, which routers in this process find with `affinity_of`."""


def affinity_of(name: str) -> Affinity:
    """Return what was shared by that name. Raise KeyError if nothing is."""
    return SHARED[name]
