"""Conversations of several turns, many at once, with engines that keep prefixes on other tiers, and what each
must be answered.

What is right is what the same model says alone, with all KV in pages that nobody shares. Whatever a ledger
hands out is full of NaN.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from unittest.mock import patch

import torch

import tiny
from far import LIMIT, SETTINGS, Ask, Line, apart, check, expected, layout_of
from penstock import LLM, Completion
from penstock.api.stream import CompletionStream
from penstock.kv.ledger.host import HostLedger
from penstock.kv.movement import carrier
from penstock.kv.movement.sizes import record_bytes
from penstock.kv.store.blocks import BlockStore
from penstock.kv.store.segments import SegmentFile
from penstock.memory.streams import Stream as Queue
from penstock.sched import arrivals
from penstock.sched.rates import TransferRates
from penstock.sched.tiers import Tiers
from penstock.step.plan import Route
from streams import LONG, OURS_AND_LOCKS, cut_short

LENGTH = int(str(SETTINGS["max_length"]))
AT_ONCE = 5
"""Conversations that have an answer under way, at most."""


@dataclass(frozen=True)
class Place:
    """Room on each tier. `pages`, `host`: blocks of 8 tokens; `records`: about so many on disk that outlive
    the engine."""

    pages: int = 22
    host: int = 30
    records: int = 40
    step: int = 24
    sequences: int = 4
    store: str = "eager"


@contextmanager
def opened(
    name: str, place: Place, directory: Path, path: Path | None = None, told: bool = False, **more: object
) -> Iterator[LLM]:
    """An engine of the case `name`, or of a checkpoint of its shape, whose ledgers hand out NaN. told:
    whether it knows how fast things went in the process before; else what it does at first does not depend on
    the machine."""
    layout = layout_of(name, 8, str(more.get("dtype", "float32")))
    swap = max(-(-LENGTH // 8) - place.host, 0) * layout.layers * record_bytes(layout)
    kept = (
        65536 + place.records * 8 // 7 * (layout.block_bytes + 4096)
        if place.records and place.store != "off"
        else 0
    )
    sizes = {
        "kv_blocks": place.pages,
        "block_size": 8,
        "max_step_tokens": place.step,
        "kv_tile": 32,
        "max_sequences": place.sequences,
    }
    others = {"host_kv_memory": place.host * layout.block_bytes, "kv_store": place.store}
    if place.records:
        others |= {"disk_kv_memory": swap + kept, "kv_directory": directory, "cache": directory / "cache"}
    with ExitStack() as stack:
        with nullcontext() if told else patch.object(BlockStore, "noted", lambda _: b""):
            llm = stack.enter_context(
                LLM(path or tiny.checkpoint(name), **{**SETTINGS, **sizes, **others, **more})
            )  # type: ignore[arg-type]
        poison(llm)
        yield llm


def warm(name: str) -> None:
    """Open the engines that say what is right, which stay open."""
    layout_of(name, 8)
    expected(name, Ask((1,), 1))


def poison(llm: LLM) -> None:
    """Fill what is handed out from now on with NaN: who reads it before it is written, or writes it too late,
    shows."""
    engine = llm.booted.engine
    ranks = engine._ranks
    assert ranks is not None
    pages, host = ranks.target.pool, ranks.carrier.pool  # type: ignore[attr-defined,union-attr]

    def spoilt(
        allocate: Callable[..., list[int]], block: Callable[[int], torch.Tensor], blocks: int
    ) -> Callable[..., list[int]]:
        def allocated(*arguments: object) -> list[int]:
            taken = allocate(*arguments)
            for one in taken:
                if one < blocks:
                    block(one).fill_(255)
            return taken

        return allocated

    near, ledger = engine.scheduler.host, engine.scheduler.ledger
    assert isinstance(near, HostLedger)
    ledger.allocate = spoilt(ledger.allocate, pages.block, pages.blocks)  # type: ignore[method-assign,assignment,arg-type]
    near.allocate = spoilt(near.allocate, host.block, host.blocks)  # type: ignore[method-assign,assignment,arg-type]
    near.allocate_near = spoilt(near.allocate_near, host.block, host.blocks)  # type: ignore[method-assign,assignment,arg-type]


def words(rng: random.Random, size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(tiny.VOCAB) for _ in range(size))


@dataclass(eq=False)
class Talk:
    """What was said, and how many times the user has yet to speak."""

    said: tuple[int, ...]
    turns: int
    found: list[Completion] = field(default_factory=list)

    def next(self, rng: random.Random, scored: bool = False) -> Ask | None:
        """None if it is over, as it is when the context's end is near."""
        tokens = rng.choice([2, 7, 12, 24])
        self.said += words(rng, rng.randint(3, 25))
        if not self.turns or len(self.said) + tokens > LENGTH:
            return None
        self.turns -= 1
        return Ask(self.said, tokens, scored=scored)


def some_talks(rng: random.Random, count: int) -> list[Talk]:
    """Of which many begin alike, and some with more than pages hold."""
    systems = [words(rng, size) for size in (19, 40, 64)]
    papers = [words(rng, size) for size in (120, 190)]
    talks = []
    for _ in range(count):
        begin = rng.choice(systems)
        if rng.random() < 0.25:
            begin += rng.choice(papers)
        talks.append(Talk(begin, rng.randint(1, 4)))
    return talks


@dataclass
class Tally:
    """What has happened, over several engines."""

    moved: Counter[Route] = field(default_factory=Counter)
    lost: Counter[Route] = field(default_factory=Counter)
    given_up: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    recomputed: int = 0
    late: int = 0
    interrupts: int = 0
    left: int = 0
    cleared: int = 0
    turns: int = 0

    def take(self, llm: LLM) -> None:
        """At an engine's end."""
        stats, counts = llm.stats(), llm.booted.engine.scheduler.tiers.counts
        assert stats.tiers is not None
        self.moved += counts.moved
        self.lost += counts.lost
        self.preemptions += stats.preemptions
        self.recomputed += counts.recomputed
        self.late += counts.late
        self.given_up += Counter(
            pages=stats.tiers.given_up_device, host=stats.tiers.given_up_host, disk=stats.tiers.given_up_disk
        )


def converse(
    llm: LLM,
    name: str,
    talks: Iterable[Talk],
    rng: random.Random,
    tally: Tally,
    *,
    leaves: float = 0.0,
    clears: float = 0.0,
    pause: int | None = None,
) -> None:
    """Let them talk, `AT_ONCE` of them, and hold every answer against the right one. leaves, clears: chances
    before each step that someone stops listening to an answer, and asks again, and that everything is
    forgotten. pause: turns after which to stop in between."""
    idle, live = list(talks), dict[Talk, tuple[Ask, CompletionStream]]()
    late, turns = time.monotonic() + 4 * LONG, 0
    while (idle and (pause is None or turns < pause)) or live:
        assert time.monotonic() < late, "conversations do not end"
        try:
            while (
                idle
                and len(live) < AT_ONCE
                and (not live or rng.random() < 0.4)
                and (pause is None or turns < pause)
            ):
                talk = idle.pop(rng.randrange(len(idle)))
                before = talk.said
                ask = talk.next(rng, scored=rng.random() < 0.05)
                if ask is None:
                    talk.said = before
                    continue
                turns += 1
                live[talk] = ask, llm.stream(list(ask.prompt), ask.params)
            if live and rng.random() < leaves:
                talk = rng.choice(list(live))
                ask, stream = live.pop(talk)
                tally.left += 1
                idle.append(talk)
                with suppress(KeyboardInterrupt):
                    stream.close()
                right(name, ask, stream.completion, left=True)
            if rng.random() < clears:
                tally.cleared += 1
                llm.clear_prefix_cache()
            llm.driver.step()
        except KeyboardInterrupt:
            tally.interrupts += 1
        for talk, (ask, stream) in list(live.items()):
            if stream._group.done:
                del live[talk]
                late = time.monotonic() + 4 * LONG
                right(name, ask, stream.completion)
                note(tally, stream.completion)
                talk.said += tuple(stream.completion.tokens)
                idle.append(talk)
    tally.turns += turns


def note(tally: Tally, one: Completion) -> None:
    tally.found += Counter(
        pages=one.cached_tokens - one.cached_host - one.cached_disk,
        host=one.cached_host,
        disk=one.cached_disk,
    )


def right(name: str, ask: Ask, found: Completion, left: bool = False) -> None:
    """That it is what the prompt gives alone, or the beginning of it if it was left; and up to a choice so
    close that rounding may turn it, if one was turned."""
    alone = expected(name, ask)
    assert left or len(found.tokens) == ask.tokens, ask
    alike = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found.tokens, alone.tokens, strict=False))
    )
    if alike == len(found.tokens):
        assert apart(found, alone) < LIMIT, ask
        return
    assert found.logprobs is not None
    assert alone.logprobs is not None
    (_, best), (_, second) = alone.logprobs[alike].top[:2]
    assert best - second < LIMIT, ask
    pairs = zip(found.logprobs[:alike], alone.logprobs[:alike], strict=True)
    assert all(abs(mine.logprob - theirs.logprob) < LIMIT for mine, theirs in pairs), ask


# ---- whatever is late, and whoever interrupts


@dataclass
class Delays:
    """Copies of blocks up and down, and reads and writes of the disk, of which some are late, by up to
    `longest` seconds."""

    rng: random.Random
    chance: float = 0.2
    longest: float = 0.02

    def nap(self) -> float:
        return self.rng.uniform(0, self.longest) if self.rng.random() < self.chance else 0.0

    def streams(self, *_: object) -> tuple[Queue, Queue]:
        return Line("up", self.nap), Line("down", self.nap)


@contextmanager
def delayed(
    rng: random.Random, chance: float = 0.2, longest: float = 0.02, patience: float = 0.01, pays: float = 0.9
) -> Iterator[None]:
    """patience: seconds that a request waits at most for what is late. pays: the chance that to load seems
    faster than to compute."""
    delays = Delays(rng, chance, longest)

    def napping(rule: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object) -> object:
            time.sleep(delays.nap())
            return rule(*arguments)

        return called

    with ExitStack() as patched:
        patched.enter_context(patch.object(carrier, "more_streams", delays.streams))
        for called in ("read", "write"):
            patched.enter_context(patch.object(SegmentFile, called, napping(getattr(SegmentFile, called))))
        patched.enter_context(patch.object(arrivals, "_PATIENCE", patience))
        patched.enter_context(patch.object(TransferRates, "loading_pays", lambda *_: rng.random() < pays))
        yield


@contextmanager
def interrupted(llm: LLM, rng: random.Random, every: int) -> Iterator[None]:
    """About one step in `every` is cut short anywhere, while it is planned or run."""
    engine = llm.booted.engine
    ranks, planner = engine._ranks, engine.scheduler

    def around(rule: Callable[..., object], places: int) -> Callable[..., object]:
        def called(*arguments: object) -> object:
            if rng.randrange(2 * every):
                return rule(*arguments)
            got: list[object] = []
            if cut_short(lambda: got.append(rule(*arguments)), int(places ** rng.random()), OURS_AND_LOCKS):
                raise KeyboardInterrupt
            return got[0]

        return called

    with (
        patch.object(ranks, "begin", around(ranks.begin, 6000)),
        patch.object(planner, "plan", around(planner.plan, 3000)),
    ):  # type: ignore[union-attr]
        yield


# ---- what is where


def tiers_of(llm: LLM) -> Tiers:
    return llm.booted.engine.scheduler.tiers


def store_of(llm: LLM) -> BlockStore:
    ranks = llm.booted.engine._ranks
    assert ranks is not None
    assert ranks.carrier is not None
    assert ranks.carrier.transfers is not None
    assert ranks.carrier.transfers.store is not None
    return ranks.carrier.transfers.store


def rest(llm: LLM) -> None:
    """Until nothing is under way."""
    late = time.monotonic() + LONG
    while tiers_of(llm).ready or tiers_of(llm).moving:
        assert time.monotonic() < late, "transfers do not end"
        llm.booted.engine.step()


def agree(llm: LLM) -> None:
    """That the engine knows of all that is on disk, and only of that, and that nobody holds anything."""
    rest(llm)
    store, planner = store_of(llm), llm.booted.engine.scheduler
    while store._upkeep.chores or store._writes:
        store.poll()
    assert planner.tiers.disk is not None
    assert set(planner.tiers.disk._there) == set(store.keys()), (
        "ledger and disk do not agree on what is there"
    )
    everything_is_free(llm)


def everything_is_free(llm: LLM) -> None:
    planner = llm.booted.engine.scheduler
    assert planner.ledger.available == planner.ledger.blocks
    assert planner.host.available == planner.host.blocks
    planner.check()


def ask_once(llm: LLM, name: str, asks: Sequence[Ask]) -> list[Completion]:
    """All at once, and held against what is right."""
    found = [
        stream.completion
        for stream in _through(llm, [llm.stream(list(ask.prompt), ask.params) for ask in asks])
    ]
    check(name, asks, found)
    return found


def _through(llm: LLM, streams: Sequence[CompletionStream]) -> Sequence[CompletionStream]:
    while not all(stream._group.done for stream in streams):
        llm.driver.step()
    return streams
