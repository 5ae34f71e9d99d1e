"""Replays a recorded workload through prefix caches: how many of its blocks would have been found, by the
cache's size and by its eviction policy. No model is needed.

A trace is a file of JSON lines, one for each request in order of arrival. Its `hash_ids` are read: the
chained hashes of the request's blocks, as in the traces of Mooncake (https://github.com/kvcache-ai/Mooncake;
Qin et al., FAST 2025; 512 tokens a block).
"""

import json
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Generic, Protocol

from penstock.base.errors import ConfigError
from penstock.base.report import JsonLine
from penstock.base.units import counted, format_size
from penstock.bench.report import table
from penstock.bench.traces.workloads import WORKLOADS, TraceRequest, generate
from penstock.kv.ledger.evict import Eviction, Key, Lru
from penstock.kv.ledger.prospect import Prospect

BLOCK_BYTES = 64 << 20
"""512 tokens of Llama 3.1 8B in 16 bits."""
CAPACITIES = tuple(size << 30 for size in (128, 256, 512, 1024, 2048, 4096))
_CHAIN = 32
"""Blocks of each request that the cost of the policy is measured with."""


class TracePart(StrEnum):
    """Decides which requests of a trace count; all are replayed."""

    WHOLE = "whole"
    SECOND_HALF = "second-half"


class Offered(Eviction[Key], Protocol[Key]):
    """An eviction policy may also refuse a block: then it has an admission too."""

    def admits(self, key: Key) -> bool:
        """Tell whether a block may enter the cache. Called once for each block that a request computed and
        that is not there."""
        ...


class _Open(Generic[Key]):
    def admits(self, key: Key) -> bool:
        return True


class LeastRecent(_Open[Key], Lru[Key]):
    """Evicts (LRU) the block that was used longest ago."""


class Learned(_Open[Key], Prospect[Key]):
    """Runs the engine's own policy, and admits every block."""


class Fifo(LeastRecent[Key]):
    """Evicts (FIFO) the block that came first, however often it was used since."""

    def __init__(self) -> None:
        super().__init__()
        self._arrivals = 0
        self._came: dict[Key, int] = {}
        self._queue: list[tuple[int, Key]] = []

    def added(self, key: Key, parent: Key | None) -> None:
        """Note a block that has entered the cache."""
        self._arrivals += 1
        self._came[key] = self._arrivals

    def idle(self, key: Key) -> None:
        """Let a block go: it may be evicted from now on."""
        super().idle(key)
        heappush(self._queue, (self._came[key], key))

    def victim(self) -> Key:
        """Take out the block to evict."""
        while True:
            came, key = heappop(self._queue)
            if key in self._idle and self._came[key] == came:
                del self._idle[key], self._came[key]
                return key


class SecondUse(LeastRecent[Key]):
    """Admits a block when it is seen for the second time, and remembers all that it ever saw; then it is
    LRU."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[Key] = set()

    def admits(self, key: Key) -> bool:
        """Tell whether the block was seen before."""
        if key in self._seen:
            return True
        self._seen.add(key)
        return False


class Clairvoyant(_Open[Key]):
    """Evicts (Belady) the block that is asked for again last, of a request its end first.

    This is optimal (Belady, 1966): no block is asked for without those before it, so it never gives up one of
    them earlier, and its hits, which are the most there can be, all lie at the beginning of their requests.
    """

    def __init__(self, requests: Sequence[Sequence[Key]]) -> None:
        self._uses: dict[Key, deque[int]] = {}
        for at, keys in enumerate(requests):
            for key in keys:
                self._uses.setdefault(key, deque()).append(at)
        self._never = len(requests)
        self._order: dict[Key, tuple[int, int]] = {}
        """Of what is idle: the next use, and the more the deeper in its request, both negative as a heap has
        the least first."""
        self._heap: list[tuple[int, int, Key]] = []
        self._told = 0
        self._idle = 0

    def __len__(self) -> int:
        return self._idle

    def added(self, key: Key, parent: Key | None) -> None:
        """Note a block that has entered the cache."""
        self.found(key)

    def found(self, key: Key) -> None:
        """Note a request for a block that is there."""
        self._uses[key].popleft()

    def found_all(self, keys: Sequence[Key]) -> None:
        """Note a request for blocks that are there."""
        for key in keys:
            self.found(key)

    def busy(self, key: Key) -> None:
        """Hold a block, which cannot be evicted until `idle`."""
        del self._order[key]
        self._idle -= 1

    def busy_all(self, keys: Sequence[Key]) -> None:
        """Hold blocks."""
        for key in keys:
            self.busy(key)

    def idle(self, key: Key) -> None:
        """Let a block go: it may be evicted from now on."""
        self._told += 1
        self._idle += 1
        uses = self._uses[key]
        self._order[key] = -(uses[0] if uses else self._never), self._told
        heappush(self._heap, (*self._order[key], key))
        if len(self._heap) > 2 * self._idle + 64:
            self._heap = [(*order, key) for key, order in self._order.items()]
            heapify(self._heap)

    def victim(self) -> Key:
        """Take out the block to evict."""
        while True:
            *order, key = heappop(self._heap)
            if self._order.get(key) == tuple(order):
                self.busy(key)
                return key

    def dropped(self, key: Key) -> None:
        """Forget a block that has left the cache otherwise."""
        if key in self._order:
            self.busy(key)


Trace = Sequence[Sequence[int]]
"""The hashes of the blocks of each request."""
_Make = Callable[[Trace, int], Offered[int]]
POLICIES: dict[str, _Make] = {
    "fifo": lambda trace, blocks: Fifo(),
    "lru": lambda trace, blocks: LeastRecent(),
    "second-use": lambda trace, blocks: SecondUse(),
    "prospect": lambda trace, blocks: Learned(blocks, mixed=False),
    "adaptive": lambda trace, blocks: Learned(blocks),
    "clairvoyant": lambda trace, blocks: Clairvoyant(trace),
}
"""The policies by name. `second-use` remembers all blocks ever seen. `clairvoyant` knows the trace, so it is
a bound and no policy."""


@dataclass(frozen=True, slots=True)
class CacheBench:
    """Holds the settings of a replay through caches, which `measure` runs.

    path: a trace, or the name of a generated workload, which `seed` is for.
    capacities: sizes of caches, in bytes.
    cost: how many blocks the cost of the engine's policy is measured with; 0: it is not measured.
    """

    path: Path
    capacities: tuple[int, ...] = CAPACITIES
    block_bytes: int = BLOCK_BYTES
    policies: tuple[str, ...] = tuple(POLICIES)
    part: TracePart = TracePart.WHOLE
    cost: int = 1_000_000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CacheRow:
    """Holds the hit rates of one cache.

    capacity: its bytes. None is a cache that never evicts.
    hits: by policy, blocks that were found over blocks that were asked for.
    """

    capacity: int | None
    blocks: int
    hits: dict[str, float]


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """Holds the cost of the engine's policy with `blocks` that are there and as many that are gone. A third
    of the blocks that are asked for are there.

    bytes_per_block: what the policy keeps for each block that is there, keys not counted.
    microseconds, lru_microseconds: of a replay for each block asked for, with the policy and with LRU.
    """

    blocks: int
    bytes_per_block: float
    microseconds: float
    lru_microseconds: float


@dataclass(frozen=True, slots=True)
class CacheReport(JsonLine):
    """Holds the hit rates of all caches, and prints them.

    asked: blocks, by all requests. distinct: different ones among them.
    """

    bench: str
    trace: str
    requests: int
    asked: int
    distinct: int
    part: TracePart
    block_bytes: int
    rows: tuple[CacheRow, ...]
    cost: PolicyCost | None

    def __str__(self) -> str:
        counts = (
            "all requests count" if self.part is TracePart.WHOLE else "the second half of the requests counts"
        )
        rows = [("room", "blocks", *self.rows[0].hits)]
        for row in self.rows:
            room = "unlimited" if row.capacity is None else format_size(row.capacity)
            rows.append((room, f"{row.blocks:,}", *(f"{rate:.1%}" for rate in row.hits.values())))
        lines = [
            f"{self.trace}: {counted(self.requests, 'request')} for {counted(self.asked, 'block')}, "
            f"{self.distinct:,} distinct",
            f"blocks found of those asked for, by room in blocks of {format_size(self.block_bytes)}; "
            f"{counts}",
            *table(rows),
        ]
        if cost := self.cost:
            lines.append(
                f"  of {cost.blocks:,} blocks, adaptive keeps {cost.bytes_per_block:.0f} B each; a replay "
                f"takes {cost.microseconds:.3g} us for a block, {cost.lru_microseconds:.3g} us with lru"
            )
        return "\n".join(lines)


def measure(bench: CacheBench, say: Callable[[str], None] = lambda _: None) -> CacheReport:
    """Replay a trace through every cache. `say` is called with each capacity. Raises ConfigError."""
    named = str(bench.path) in WORKLOADS and not bench.path.exists()
    trace = [request.keys for request in generate(str(bench.path), bench.seed)] if named else read(bench.path)
    distinct = len({key for keys in trace for key in keys})
    first = len(trace) // 2 if bench.part is TracePart.SECOND_HALF else 0
    rows = []
    for capacity in (*sorted(set(bench.capacities)), None):
        blocks = distinct if capacity is None else capacity // bench.block_bytes
        if not blocks:
            raise ConfigError(
                f"a room of {format_size(capacity or 0)} holds no block of {format_size(bench.block_bytes)}; "
                "give larger --rooms, or smaller --block-bytes"
            )
        hits = {name: replay(trace, POLICIES[name](trace, blocks), blocks, first) for name in bench.policies}
        rows.append(CacheRow(capacity, blocks, hits))
        say(f"{blocks:,} blocks: " + ", ".join(f"{name} {rate:.1%}" for name, rate in hits.items()))
    return CacheReport(
        bench="trace",
        trace=str(bench.path),
        requests=len(trace),
        asked=sum(map(len, trace)),
        distinct=distinct,
        part=bench.part,
        block_bytes=bench.block_bytes,
        rows=tuple(rows),
        cost=_cost(bench.cost) if bench.cost else None,
    )


def read(path: Path) -> list[list[int]]:
    """Return the hashes of each request's blocks. Raises ConfigError for a file that cannot be read or is no
    trace."""
    return [request.keys for request in requests(path)]


def requests(path: Path) -> list[TraceRequest]:
    """Return all requests of a trace, in order. Raises ConfigError for a file that cannot be read or is no
    trace."""
    trace = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    trace.append(_request(line, f"line {number} of {path}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}; name a file of JSON lines") from error
    if not any(request.keys for request in trace):
        raise ConfigError(f"the trace {path} asks for no block; each of its lines must be JSON with hash_ids")
    return trace


def _request(line: str, where: str) -> TraceRequest:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where} is not JSON; give a trace with one request, a JSON object, on each line"
        ) from error
    keys = request.get("hash_ids") if isinstance(request, dict) else None
    if not isinstance(keys, list) or not all(type(key) is int for key in keys):
        raise ConfigError(
            f"{where} has no hash_ids, a list of whole numbers; give a trace that has them on each line"
        )
    if len(set(keys)) < len(keys):
        raise ConfigError(
            f"{where} names a block twice, which hashes that cover all earlier blocks never do; give a "
            "trace with such chained hash_ids"
        )
    came, tokens = request.get("timestamp"), (request.get("input_length"), request.get("output_length"))
    read, answered = (count if type(count) is int else None for count in tokens)
    return TraceRequest(
        keys, float(came) if type(came) in (int, float) and 0 <= came < 2**53 else None, read, answered
    )


def replay(trace: Iterable[Sequence[Key]], policy: Offered[Key], blocks: int, first: int = 0) -> float:
    """Return the hit rate of a cache of so many blocks: the share that is found, of the blocks that requests
    from `first` on ask for.

    A request takes no time: it finds the blocks at its beginning that are all there, computes the others,
    holds all, offers what it computed, and lets go; then blocks are given up until the cache has no more than
    it has room for.
    """
    there: set[Key] = set()
    hits = asked = 0
    for at, keys in enumerate(trace):
        found = next((depth for depth, key in enumerate(keys) if key not in there), len(keys))
        if at >= first:
            hits += found
            asked += len(keys)
        held = []
        parent = None
        for key in keys:
            if key in there:
                policy.found(key)
                policy.busy(key)
                held.append(key)
            elif policy.admits(key):
                policy.added(key, parent)
                there.add(key)
                held.append(key)
            parent = key
        for key in reversed(held):
            policy.idle(key)
        while len(there) > blocks:
            there.remove(policy.victim())
    return hits / asked if asked else 0.0


def _cost(blocks: int) -> PolicyCost:
    """Measure what the engine's policy keeps and takes for so many blocks."""
    keys = [number.to_bytes(16, "little") for number in range(2 * blocks)]
    chains = [keys[start : start + _CHAIN] for start in range(0, len(keys), _CHAIN)]
    tracemalloc.start()
    policy: Prospect[bytes] = Prospect(blocks)
    for chain in chains:
        for parent, key in zip((None, *chain), chain, strict=False):
            policy.added(key, parent)
        for key in reversed(chain):
            policy.idle(key)
        while len(policy) > blocks:
            policy.victim()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    half = len(chains) // 2
    work = [chain for pair in zip(chains[:half], chains[half:], strict=False) for chain in pair]
    work = chains[:half] + work
    return PolicyCost(
        blocks, size / blocks, _each(work, Learned(blocks), blocks), _each(work, LeastRecent(), blocks)
    )


def _each(work: Sequence[Sequence[bytes]], policy: Offered[bytes], blocks: int) -> float:
    """Return the microseconds of a replay for each block asked for."""
    began = time.perf_counter()
    replay(work, policy, blocks)
    return 1e6 * (time.perf_counter() - began) / sum(map(len, work))
