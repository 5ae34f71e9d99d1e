"""Generates workloads for prefix caches, in the format of recorded traces: the same name and seed give the
same requests.

The eviction policy is tuned on the recorded trace and on `TUNED`; what is said of it is measured on
`HELD_OUT`. The division was made by taking every second name of the list, before any of them was run.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice
from pathlib import Path
from random import Random

from penstock.base.errors import ConfigError

BLOCK_TOKENS = 512
_GAP_MS = 300.0
"""Mean time between two requests, which come as a Poisson process."""

Path_ = tuple[int, ...]
Keys = list[int]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Holds a request of a trace. A fact that the trace does not say is None.

    keys: the chained hashes of its blocks.
    timestamp: when it came, in milliseconds.
    input_length, output_length: tokens.
    """

    keys: Keys
    timestamp: float | None
    input_length: int | None
    output_length: int | None

    def line(self) -> str:
        """Return the request as a line of a trace file, without its end."""
        return json.dumps(
            {
                "timestamp": self.timestamp,
                "input_length": self.input_length,
                "output_length": self.output_length,
                "hash_ids": self.keys,
            }
        )


class _Tree:
    """Gives blocks their hashes: one stands for a block's content and for all blocks before it."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], int] = {}
        self._fresh = 0

    def keys(self, contents: Sequence[int]) -> Keys:
        parent, keys = -1, []
        for content in contents:
            parent = self._names.setdefault((parent, content), len(self._names))
            keys.append(parent)
        return keys

    def fresh(self, blocks: int) -> Keys:
        """Return contents that have not been used."""
        start = self._fresh
        self._fresh += blocks
        return [-1 - content for content in range(start, self._fresh)]


class _Popular:
    """Draws ranks in [0, items) with a chance in proportion to (rank + 1) ** -slope."""

    def __init__(self, items: int, slope: float) -> None:
        self._sums = list(accumulate((rank + 1) ** -slope for rank in range(items)))
        self._range = range(items)

    def draw(self, rng: Random) -> int:
        return rng.choices(self._range, cum_weights=self._sums)[0]


Contents = Iterator[Sequence[int]]


def _zipf(rng: Random, tree: _Tree) -> Contents:
    """Yield questions about documents of a fixed collection. Their popularity falls as the inverse of their
    rank."""
    documents = [tree.fresh(rng.randint(4, 24)) for _ in range(2000)]
    popular = _Popular(len(documents), 0.9)
    while True:
        yield [*documents[popular.draw(rng)], *tree.fresh(rng.randint(1, 3))]


def _scans(rng: Random, tree: _Tree) -> Contents:
    """Yield requests of a popular collection. Now and then a batch of long prompts goes through that never
    return."""
    documents = [tree.fresh(rng.randint(4, 16)) for _ in range(300)]
    popular = _Popular(len(documents), 0.6)
    while True:
        for _ in range(rng.randint(60, 200)):
            yield [*documents[popular.draw(rng)], *tree.fresh(1)]
        for _ in range(rng.randint(10, 60)):
            yield tree.fresh(rng.randint(20, 80))


def _loops(rng: Random, tree: _Tree) -> Contents:
    """Yield evaluation suites that are run again and again, each a loop over its prompts, one beside the
    other."""
    suites = [[tree.fresh(rng.randint(3, 12)) for _ in range(size)] for size in (60, 240, 700)]
    at = [0] * len(suites)
    while True:
        one = rng.randrange(len(suites))
        yield suites[one][at[one] % len(suites[one])]
        at[one] += 1


def _sessions(rng: Random, tree: _Tree) -> Contents:
    """Yield conversations that grow. Under one of a few system prompts, each turn continues the last; how
    many turns and when varies widely."""
    systems = [tree.fresh(rng.randint(2, 8)) for _ in range(6)]
    due: dict[int, list[list[int]]] = {}
    for now in count(1):
        for talk in due.pop(now, []):
            talk += tree.fresh(rng.randint(1, 4))
            yield list(talk)
            if rng.random() < 0.75:
                due.setdefault(now + 1 + int(rng.expovariate(1 / 60)), []).append(talk)
        talk = [*rng.choice(systems), *tree.fresh(rng.randint(1, 12))]
        yield list(talk)
        if rng.random() < 0.4:
            due.setdefault(now + 1 + int(rng.expovariate(1 / 60)), []).append(talk)


def _bursts(rng: Random, tree: _Tree) -> Contents:
    """Yield documents that are asked about while they are new, at random moments, and then never again."""
    alive: list[tuple[int, list[int]]] = []
    for now in count(1):
        if rng.random() < 0.2:
            alive.append((now + 500, tree.fresh(rng.randint(4, 20))))
            while alive[0][0] < now:
                del alive[0]
        if alive:
            yield [*rng.choice(alive)[1], *tree.fresh(1)]


def _drift(rng: Random, tree: _Tree) -> Contents:
    """Yield requests as `zipf` does, but popularity changes a little with each request: documents sink in
    rank, new ones come in at random ranks."""
    documents = [tree.fresh(rng.randint(4, 24)) for _ in range(1000)]
    popular = _Popular(len(documents), 1.0)
    while True:
        if rng.random() < 0.3:
            del documents[rng.randrange(len(documents))]
            documents.insert(rng.randrange(len(documents)), tree.fresh(rng.randint(4, 24)))
        yield [*documents[popular.draw(rng)], *tree.fresh(rng.randint(1, 2))]


def _mixture(rng: Random, tree: _Tree) -> Contents:
    """Yield popular documents, a loop, conversations and prompts that never return, all at once."""
    parts = [_zipf(rng, tree), _loops(rng, tree), _sessions(rng, tree)]
    while True:
        one = rng.randrange(len(parts) + 1)
        yield next(parts[one]) if one < len(parts) else tree.fresh(rng.randint(5, 40))


def _phases(rng: Random, tree: _Tree) -> Contents:
    """Yield a loop, then popular documents, then conversations, then bursts, one after the other, for some
    hundreds of requests each."""
    parts = [_loops(rng, tree), _zipf(rng, tree), _sessions(rng, tree), _bursts(rng, tree)]
    while True:
        for part in parts:
            yield from islice(part, rng.randint(200, 600))


def _arc(rng: Random, tree: _Tree) -> Contents:
    """Work against a fixed split between recency and frequency: blocks used lately and blocks used often
    return by turns."""
    often = [tree.fresh(rng.randint(4, 12)) for _ in range(250)]
    while True:
        for _ in range(rng.randint(300, 900)):
            yield rng.choice(often) if rng.random() < 0.5 else tree.fresh(rng.randint(4, 30))
        stack = [tree.fresh(rng.randint(4, 12)) for _ in range(10)]
        for _ in range(rng.randint(300, 900)):
            if rng.random() < 0.3:
                stack.append(tree.fresh(rng.randint(4, 12)))
            else:
                stack.append(stack.pop(-1 - min(int(rng.expovariate(1 / 60)), len(stack) - 1)))
            yield stack[-1]


def _lirs(rng: Random, tree: _Tree) -> Contents:
    """Work against recency: two pools are drawn from evenly, by turns, and one is far too large for any cache
    (the two-pool trace of LIRS). A loop over a third comes every so often."""
    small = [tree.fresh(6) for _ in range(120)]
    large = [tree.fresh(6) for _ in range(4000)]
    loop = [tree.fresh(6) for _ in range(200)]
    while True:
        for _ in range(200):
            yield rng.choice(small)
            yield rng.choice(large)
        yield from loop


def _pairs(rng: Random, tree: _Tree) -> Contents:
    """Work against admission on a second use: each prompt is asked exactly twice, the second time soon."""
    due: dict[int, list[list[int]]] = {}
    for now in count(1):
        yield from due.pop(now, [])
        prompt = tree.fresh(rng.randint(4, 20))
        yield prompt
        due.setdefault(now + 1 + min(int(rng.expovariate(1 / 80)), 600), []).append(prompt)


def _agents(rng: Random, tree: _Tree) -> Contents:
    """Yield agents under shared tool prompts. A task forks into branches, which grow by turns in quick
    succession; some tasks are resumed much later."""
    tools = [tree.fresh(rng.randint(6, 20)) for _ in range(4)]
    running: list[list[int]] = []
    ended: list[list[int]] = []
    while True:
        if len(running) < 40:
            if ended and rng.random() < 0.15:
                running.append(ended.pop(rng.randrange(len(ended))))
            else:
                running.append([*rng.choice(tools), *tree.fresh(rng.randint(1, 6))])
        one = rng.randrange(len(running))
        running[one] = [*running[one], *tree.fresh(rng.randint(1, 3))]
        yield running[one]
        if rng.random() < 0.1:
            running.append(running[one])
        if rng.random() < 0.12:
            ended.append(running.pop(one))


def _fads(rng: Random, tree: _Tree) -> Contents:
    """Yield topics that come up, are asked about a great deal, and fade, each at its own pace, beside a few
    that stay."""
    lasting = [tree.fresh(rng.randint(4, 16)) for _ in range(40)]
    topics: list[tuple[float, float, list[int]]] = []
    for now in count(1):
        if rng.random() < 0.08:
            topics.append(
                (
                    1 + rng.expovariate(1 / 4),
                    rng.choice((60.0, 250.0, 1000.0)),
                    [now, *tree.fresh(rng.randint(4, 16))],
                )
            )
        weights = [strength * 0.5 ** ((now - keys[0]) / half) for strength, half, keys in topics]
        topics = [topic for topic, weight in zip(topics, weights, strict=True) if weight > 0.01]
        weights = [weight for weight in weights if weight > 0.01]
        if topics and rng.random() < 0.8:
            yield [*rng.choices(topics, weights)[0][2][1:], *tree.fresh(1)]
        else:
            yield [*rng.choice(lasting), *tree.fresh(1)]


def _batches(rng: Random, tree: _Tree) -> Contents:
    """Yield offline jobs that go over documents of their own three times, beside questions about a fixed
    collection."""
    collection = [tree.fresh(rng.randint(4, 16)) for _ in range(400)]
    popular = _Popular(len(collection), 0.8)
    while True:
        job = [tree.fresh(rng.randint(5, 30)) for _ in range(rng.randint(20, 120))]
        for _ in range(3):
            for document in job:
                yield [*document, *tree.fresh(1)]
                while rng.random() < 0.6:
                    yield [*collection[popular.draw(rng)], *tree.fresh(1)]


def _nights(rng: Random, tree: _Tree) -> Contents:
    """Yield questions about one collection by day and about another by night, with long prompts that never
    return at any time."""
    halves = [[tree.fresh(rng.randint(4, 16)) for _ in range(400)] for _ in range(2)]
    popular = _Popular(400, 0.9)
    while True:
        for collection in halves:
            for _ in range(rng.randint(250, 500)):
                yield (
                    tree.fresh(rng.randint(10, 40))
                    if rng.random() < 0.15
                    else [*collection[popular.draw(rng)], *tree.fresh(1)]
                )


def _topics(rng: Random, tree: _Tree) -> Contents:
    """Yield users who stay with the documents of one topic for a while, then turn to another. Some topics are
    dearer than others."""
    topics = [[tree.fresh(rng.randint(4, 20)) for _ in range(rng.randint(3, 12))] for _ in range(250)]
    popular = _Popular(len(topics), 0.7)
    users = [popular.draw(rng) for _ in range(12)]
    while True:
        user = rng.randrange(len(users))
        if rng.random() < 0.06:
            users[user] = popular.draw(rng)
        yield [*rng.choice(topics[users[user]]), *tree.fresh(rng.randint(1, 2))]


def _retries(rng: Random, tree: _Tree) -> Contents:
    """Yield prompts under shared instructions, most of them asked once. Some fail and are asked again at
    once, and again."""
    instructions = [tree.fresh(rng.randint(2, 10)) for _ in range(30)]
    popular = _Popular(len(instructions), 1.0)
    due: dict[int, list[list[int]]] = {}
    for now in count(1):
        prompts = due.pop(now, [])
        prompts.append([*instructions[popular.draw(rng)], *tree.fresh(rng.randint(2, 20))])
        for prompt in prompts:
            yield prompt
            if rng.random() < 0.35:
                due.setdefault(now + rng.randint(3, 40), []).append(prompt)


def _tenants(rng: Random, tree: _Tree) -> Contents:
    """Yield tenants with a workload each: popular documents, a loop, conversations, fading documents. Their
    shares change by the hour."""
    parts = [_zipf(rng, tree), _loops(rng, tree), _sessions(rng, tree), _bursts(rng, tree)]
    while True:
        shares = [rng.random() ** 2 for _ in parts]
        for _ in range(400):
            yield next(rng.choices(parts, shares)[0])


_WORKLOADS: dict[str, Callable[[Random, _Tree], Contents]] = {
    "zipf": _zipf,
    "scans": _scans,
    "loops": _loops,
    "bursts": _bursts,
    "sessions": _sessions,
    "drift": _drift,
    "mixture": _mixture,
    "phases": _phases,
    "arc": _arc,
    "lirs": _lirs,
    "pairs": _pairs,
    "agents": _agents,
    "fads": _fads,
    "batches": _batches,
    "nights": _nights,
    "topics": _topics,
    "retries": _retries,
    "tenants": _tenants,
}
WORKLOADS = tuple(_WORKLOADS)
TUNED, HELD_OUT = WORKLOADS[::2], WORKLOADS[1::2]


def generate(name: str, seed: int = 0, requests: int = 6000) -> list[TraceRequest]:
    """Generate a workload's first `requests` requests. Raises ConfigError for an unknown name."""
    make = _WORKLOADS.get(name)
    if make is None:
        raise ConfigError(f"the workload {name!r} does not exist; give one of {', '.join(WORKLOADS)}")
    rng, tree, now = Random(f"{name} {seed}"), _Tree(), 0.0
    made = []
    for contents in islice(make(rng, tree), requests):
        keys = tree.keys(contents)
        made.append(
            TraceRequest(
                keys,
                int(now),
                len(keys) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS),
                1 + int(rng.expovariate(1 / 300)),
            )
        )
        now += rng.expovariate(1 / _GAP_MS)
    return made


def write(path: Path, requests: Sequence[TraceRequest]) -> None:
    """Write a trace file. Raises OSError."""
    path.write_text("".join(f"{request.line()}\n" for request in requests), encoding="utf-8")
