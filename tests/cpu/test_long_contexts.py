"""Contexts that do not fit the device's pages give what they give when they do: whatever the sizes, whoever
else is there, whatever is late or interrupted. And every wait on the way that a CPU's streams can miss is
needed."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import tiny
from far import (
    LIMIT,
    SETTINGS,
    Ask,
    Caller,
    Line,
    Room,
    answers,
    apart,
    check,
    expected,
    layout_of,
    lines,
    opened,
    resident,
    struck,
)
from penstock import LLM, Completion, SamplingParams
from penstock.base.errors import BudgetError, ConfigError, DeviceError, EngineClosedError, RequestError
from penstock.engine import boot, measuring, placing
from penstock.engine.parts import make_pool
from penstock.engine.settling import Settled
from penstock.kv.movement.carrier import Carrier
from penstock.kv.movement.pool import KVPool
from penstock.kv.movement.tiles import Outbox, TileRing
from penstock.memory import arena
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.runner import Runner
from streams import no_thread_left

MIB = 1 << 20
CARRIER = {Carrier: ["begin", "send", "take", "release"]}
STREAMS = {Line: ["copy_rows", "copy_pieces", "wait", "mark"], Caller: ["copy", "copy_rows", "wait", "mark"]}
"""What may be interrupted: the carrier's calls, and in their midst whatever speaks to a stream."""


@pytest.fixture(autouse=True)
def _dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is full of NaN before anything is written there."""
    clean = arena._mapped

    def dirty(*asked: Any) -> tuple[Any, torch.Tensor]:
        mapping, memory = clean(*asked)
        return mapping, memory.fill_(255)

    monkeypatch.setattr(arena, "_mapped", dirty)


EVERY = (
    tiny.SOME
    if tiny.THOROUGH
    else [
        name
        for name, case in tiny.CASES.items()
        if "window" in name or case.dynamic or name in ("mistral", "glm4_moe", "minimax_m2")
    ]
)
"""One of each family, with windows if it can have them: what is beyond the device is nothing to the rest."""


def turns(number: int) -> tuple[bool, ...]:
    """Whether steps begin ahead, as `_ahead` says: both in all tests, or else each in every other one."""
    return (False, True) if tiny.THOROUGH else (bool(number % 2),)


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def _ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """Steps wait for each other, or the next begins before the last has been committed."""
    with patch.object(Runner, "ahead", request.param):
        yield


# ---- whatever the sizes


def words(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(tiny.VOCAB) for _ in range(size)]


def some_room(rng: random.Random) -> Room:
    block = rng.choice([1, 2, 4, 8, 16])
    step = rng.randint(max(2, block), max(3 * block, rng.choice([8, 40, 80])))
    host = rng.randint(3, max(4, rng.choice([60, 160]) // block))
    disk = rng.choice([0, 0, rng.randint(1, host - 1)])
    return Room(
        pages=rng.randint(4, 10),
        block=block,
        step=step,
        tile=rng.choice([1, block, 3 * block, rng.randint(1, 200)]),
        host=host - disk,
        disk=disk,
        sequences=rng.randint(1, min(step, 6)),
        ring=rng.randint(1, 4),
        staging=rng.randint(1, 4),
        sharing=rng.random() < 0.7,
    )


def some_asks(rng: random.Random, longest: int) -> list[Ask]:
    """Of all lengths up to the longest; many begin alike, some come late, some leave."""
    common, asks = words(rng, longest), []
    for _ in range(rng.randint(2, 7)):
        tokens = rng.randint(1, min(rng.choice([6, 20]), longest - 1))
        length = longest - tokens if rng.random() < 0.3 else rng.randint(1, longest - tokens)
        alike = rng.choice([0, length, rng.randint(0, length)])
        prompt = (*common[:alike], *words(rng, length - alike))
        at, leave = rng.choice([0, 0, rng.randint(0, 30)]), rng.choice([None, None, None, rng.randint(1, 20)])
        asks.append(Ask(prompt, tokens, at, leave, scored=rng.random() < 0.3, sampled=rng.random() < 0.2))
    return asks


def longest(llm: LLM) -> int:
    return llm.limits.max_model_len


@pytest.mark.parametrize("name", EVERY)
def test_every_family_gives_what_it_gives_from_pages(name: str) -> None:
    rng = random.Random(name)
    common = words(rng, 70)
    room = Room(
        pages=rng.randint(5, 8),
        block=rng.choice([4, 8]),
        step=rng.choice([9, 16, 30]),
        tile=rng.choice([4, 20, 200]),
        ring=rng.randint(1, 4),
        staging=rng.randint(1, 4),
        sequences=5,
    )
    asks = [
        Ask((*common, *words(rng, 40)), 7, scored=True),
        Ask((*common, *words(rng, 9)), 4, at=9),
        Ask(tuple(common[:50]), 4, at=2),
        Ask((5, 6, 7), 14, at=1),
        Ask(tuple(words(rng, 1)), 3, at=12, scored=True),
    ]
    with opened(name, room) as llm:
        found = answers(llm, asks)
        assert brought(llm) > 0
    check(name, asks, found)


def brought(llm: LLM) -> int:
    """Bytes that have come from the host."""
    stats = llm.stats().kv
    assert stats is not None
    return stats.copied


@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize(
    ("_ahead", "seed"),
    [(ahead, seed) for seed in range(100 if tiny.THOROUGH else 10) for ahead in turns(seed)],
    indirect=["_ahead"],
)
def test_whatever_the_sizes_and_whoever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    name, room = (
        rng.choice(["llama", "mistral", "qwen2_windows", "llama_dynamic", "qwen3_moe_window"]),
        some_room(rng),
    )
    with lines("some", seed), opened(name, room) as llm:
        asks = some_asks(rng, min(longest(llm), 120))
        found = answers(llm, asks)
        everything_is_free(llm)
    check(name, asks, found)


def everything_is_free(llm: LLM) -> None:
    scheduler = llm.booted.engine.scheduler
    assert scheduler.host.available == scheduler.host.blocks
    assert scheduler.ledger.available == scheduler.ledger.blocks


@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize(("_ahead", "sharing"), [(True, True), (False, False)], indirect=["_ahead"])
def test_requests_that_are_sent_back_lose_nothing(sharing: bool) -> None:
    """Five grow side by side, with host blocks for three of them at the end."""
    rng = random.Random(1)
    common = words(rng, 20)
    room = Room(pages=20, block=4, step=18, tile=12, host=40, sequences=5, sharing=sharing)
    asks = [Ask((*common, *words(rng, 8 + index)), 56, at=index, scored=index == 1) for index in range(5)]
    with opened("llama", room) as llm:
        found = answers(llm, asks)
        assert llm.stats().preemptions > 2
        everything_is_free(llm)
    check("llama", asks, found)


@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize(
    ("_ahead", "name"), [(False, "llama_dynamic"), (True, "qwen3_windows")], indirect=["_ahead"]
)
def test_an_output_that_nobody_has_measured_grows_out_of_the_pages(name: str) -> None:
    rng = random.Random(name)
    short = tuple(words(rng, 11))
    asks = [
        Ask(short, 100, leave=85, endless=True),
        Ask(short, 5, at=3),
        Ask((*short, *words(rng, 60)), 8, at=60),
        Ask((*short, 7), 90, at=86, leave=75, endless=True),
    ]
    with opened(name, Room(pages=12, block=4, step=10, tile=8, host=60)) as llm:
        found = answers(llm, asks)
        assert brought(llm) > 0
        everything_is_free(llm)
    assert min(len(found[0].tokens), len(found[3].tokens)) > 50
    check(name, asks, found)


def test_several_outputs_and_several_threads() -> None:
    rng = random.Random(3)
    asks = [Ask(tuple(words(rng, size)), 8) for size in (90, 12, 75)]
    room = Room(sequences=6)
    found: dict[int, list[Completion]] = {}

    def ask(index: int) -> None:
        params = replace(asks[index].params, n=3)
        found[index] = llm.generate([list(asks[index].prompt)] * 2, params)

    with opened("qwen3", room) as llm:
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        everything_is_free(llm)
    for index, completions in found.items():
        alone = expected("qwen3", asks[index])
        assert all(
            output.tokens == alone.tokens for completion in completions for output in completion.outputs
        )
        assert max(apart(completion, alone) for completion in completions) < LIMIT
    assert len(found) == 3


def test_a_context_that_has_come_once_is_found_again() -> None:
    """Without a copy of it being computed: all but its last token, whole blocks."""
    rng = random.Random(4)
    ask = Ask(tuple(words(rng, 93)), 4)
    with opened("mistral", Room()) as llm:
        first = answers(llm, [ask, replace(ask, at=30)])
        computed = llm.stats().computed_tokens
        again = answers(llm, [ask])
        assert llm.stats().computed_tokens - computed == 93 - 88 + 3
    check("mistral", [ask, ask, ask], [*first, *again])
    assert [completion.cached_tokens for completion in (*first, *again)] == [0, 88, 88]


def test_contexts_of_one_length_that_follow_each_other_are_not_mistaken() -> None:
    """Each of them is there but for its last token, and gets one step in the same row."""
    rng = random.Random(5)
    asks = [Ask(tuple(words(rng, 65)), 1) for _ in range(3)]
    with opened("llama", Room()) as llm:
        for turn, ask in enumerate(asks * 3):
            [found] = answers(llm, [ask])
            check("llama", [ask], [found])
            assert found.cached_tokens == (64 if turn >= 3 else 0)


@pytest.mark.parametrize("name", ["mistral", "qwen2_windows", "qwen3_windows"])
def test_a_tile_is_there_for_all_who_share_it_however_far_apart_they_are(name: str) -> None:
    """A window hides it from the one that is far ahead, and not from those that have just read it: a chunk,
    and a row."""
    rng = random.Random(name)
    common = words(rng, 64)
    asks = [
        Ask((*common, *words(rng, 46)), 20),
        Ask((*common, *words(rng, 19)), 6, 9),
        Ask((*common, *words(rng, 1)), 6, 10),
    ]
    with opened(name, Room(pages=14, block=4, step=40, tile=16)) as llm:
        found = answers(llm, asks)
    check(name, asks, found)
    assert [completion.cached_tokens for completion in found] == [0, 64, 64]


@pytest.mark.parametrize("name", ["llama", "qwen2_windows", "mixtral"])
def test_in_half_precision_the_error_is_that_of_half_precision(name: str) -> None:
    """Against float32, and at a typical position: experts chosen otherwise by a hair do not count."""
    rng = random.Random(name)
    asks = [Ask(tuple(words(rng, size)), 1, scored=True) for size in (200, 120, 80)]
    with opened(name, Room(tile=24), dtype="bfloat16") as llm:
        found = answers(llm, asks)
        assert brought(llm) > 0
    exact, half, streamed = (
        scores(some)
        for some in ([expected(name, a) for a in asks], [expected(name, a, "bfloat16") for a in asks], found)
    )
    error = float((half - exact).abs().median())
    assert 0 < float((streamed - exact).abs().median()) < 1.3 * error
    assert float((streamed - half).abs().median()) < error


def scores(completions: list[Completion]) -> Tensor:
    """Log-probabilities of their prompts' tokens."""
    return torch.tensor(
        [entry.logprob for one in completions for entry in (one.prompt_logprobs or ())[1:] if entry]
    )


# ---- weights that stream as well


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are counted by shape, and links are not measured: what streams, and where, is the same."""

    class Rate:
        read = 3e9

    monkeypatch.setattr(measuring, "peak_of", lambda device, run: 0 * run_once(run))
    monkeypatch.setattr(placing, "copy_rate", lambda *_: 25e9)
    monkeypatch.setattr(placing, "file_read", lambda *_: Rate)
    monkeypatch.setattr(placing, "memory_read", lambda *_: 40e9)


def run_once(run: Callable[[], object]) -> int:
    run()
    return 0


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("name", ["llama_tied", "mixtral"])
def test_weights_may_stream_at_the_same_time(name: str, tmp_path: Path) -> None:
    """From host memory and from disk, through what else the two budgets hold: bit for bit what the same steps
    give with weights that stay. Interrupts lose nothing then either."""
    rng = random.Random(name)
    room, asks = (
        Room(),
        [Ask(tuple(words(rng, size)), 6, at, scored=size == 99) for at, size in enumerate((99, 80, 10))],
    )
    with opened(name, room) as llm:
        stays = answers(llm, asks)
        budget, groups = (
            llm.memory.budget,
            {layout.id: layout.size for layout in llm.booted.weights._layouts.values()},
        )
    largest = max(size for id, size in groups.items() if id.expert < 0) + 2 * max(
        (size for id, size in groups.items() if id.expert >= 0), default=0
    )
    device = budget.activations + budget.kv + max(int(0.45 * budget.weights), largest + 65536)
    host = device + room.host * layout_of(name, room.block).block_bytes + int(0.4 * budget.weights)
    with lines("some"), opened(name, room, device_memory=device, host_memory=host, cache=tmp_path) as llm:
        found = answers(llm, asks)
        moved = llm.memory.weights
        assert brought(llm) > 0
        with struck(CARRIER, iter([1, 30, 4, 90])) as strikes:
            again = answers(llm, asks)
        assert strikes() == 4
    assert min(moved.copied, moved.read) > budget.weights
    assert found == stays
    check(name, asks, found)
    check(name, asks, again)


@pytest.mark.usefixtures("links")
def test_a_length_that_needs_the_host_gets_it_unasked(tmp_path: Path) -> None:
    """Beside two budgets, of which the first holds no such context."""
    ask = Ask(tuple(words(random.Random(0), 1500)), 4)
    settings = {
        **SETTINGS,
        "max_length": 4160,
        "block_size": 16,
        "max_step_tokens": 128,
        "max_sequences": 2,
        "cache": tmp_path,
    }
    with LLM(tiny.checkpoint("llama"), **settings, kv_blocks=260) as llm:  # type: ignore[arg-type]
        [alone] = answers(llm, [ask])
        fixed = llm.memory.budget.weights + llm.booted.budget.activations
    budgets = {"device_memory": fixed + MIB, "host_memory": fixed + 8 * MIB}
    with LLM(tiny.checkpoint("llama"), **settings, **budgets) as llm:  # type: ignore[arg-type]
        assert llm.booted.engine.scheduler.host.blocks == 260
        assert llm.memory.budget.blocks < 130
        [found] = answers(llm, [ask])
    assert found.tokens == alone.tokens
    assert apart(found, alone) < LIMIT


# ---- whatever is late


@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize(
    ("_ahead", "name", "late"),
    [
        (ahead, name, late)
        for each, late in enumerate(["in", "out", "compute", "some"])
        for number, name in enumerate(["llama", "qwen2_windows"])
        for ahead in turns(each + number)
    ],
    indirect=["_ahead"],
)
def test_whatever_is_late(name: str, late: str) -> None:
    """Of what is late with each name, and of each way, some have little room for what moves."""
    rng = random.Random(late)
    common = words(rng, 60)
    asks = [
        Ask((*common, *words(rng, size)), 7, at, scored=at == 2) for size, at in ((50, 0), (33, 2), (4, 9))
    ] + [Ask((1, 2, 3), 14)]
    ring, staging, block = (1, 1, 8) if Runner.ahead == (late in ("in", "some")) else (3, 2, 4)
    with lines(late), opened(name, Room(block=block, ring=ring, staging=staging)) as llm:
        found = answers(llm, asks)
    check(name, asks, found)


# ---- without one of the waits that kv.tiles lists
#
# Of 3, and of the mark in 2, a CPU has no need: its arithmetic is done when it is queued. 6 is no wait, but
# follows from 1 and 3.

LONG = Ask(tuple(words(random.Random(9), 100)), 6)


def right(found: list[Completion]) -> bool:
    alone = expected("llama", LONG)
    return found[0].tokens == alone.tokens and apart(found[0], alone) < LIMIT


@pytest.mark.parametrize("mutant", [False, True])
def test_arithmetic_must_wait_for_its_tile(mutant: bool) -> None:
    """1. Copies begin when all is over; or `take` waits for them."""
    with lines() as made, opened("llama", Room()) as llm:
        if mutant:
            made.compute.deaf = "in"
            made.into.open.clear()
        found = answers(llm, [LONG])
        made.into.open.set()
        assert right(found) != mutant


@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize("mutant", [False, True])
def test_a_slot_must_not_be_filled_before_its_tile_was_read(
    mutant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2. A tile is released when it is taken, and the next copied to its slot before it is read."""
    with lines() as made, opened("llama", Room(ring=1)) as llm:
        if mutant:
            take, release = TileRing.take, TileRing.release

            def hasty(ring: TileRing) -> tuple[Tensor, Tensor]:
                lent = take(ring)
                release(ring)
                made.into.mark().wait()
                return lent

            monkeypatch.setattr(TileRing, "take", hasty)
            monkeypatch.setattr(TileRing, "release", lambda ring: None)
        assert right(answers(llm, [LONG])) != mutant


@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize("mutant", [False, True])
def test_staging_must_not_be_filled_before_it_was_emptied(
    mutant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4. What a step sends is copied out when all of it has gone through the same slot; or compute waits each
    time."""
    with lines() as made, opened("llama", Room(staging=1)) as llm:
        if mutant:
            begin = Carrier.begin

            def late(*arguments: object) -> None:
                made.out.open.set()
                begin(*arguments)  # type: ignore[arg-type]
                made.out.mark().wait()
                made.out.open.clear()

            made.compute.deaf = "out"
            monkeypatch.setattr(Carrier, "begin", late)
        found = answers(llm, [LONG])
        made.out.open.set()
        assert right(found) != mutant


@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize("mutant", [False, True])
def test_a_block_must_not_be_read_before_it_has_landed(mutant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """5. What one step sends lands when the next has copied its first tiles; or copies wait for it."""
    with lines() as made, opened("llama", Room(staging=3)) as llm:
        if mutant:
            begin, steps = Carrier.begin, count()

            def early(*arguments: object) -> None:
                begin(*arguments)  # type: ignore[arg-type]
                made.into.mark().wait()
                made.out.open.set()
                made.out.mark().wait()
                # In the first step compute waits for all that is on its way out: it does not know yet when
                # each slot was emptied.
                if next(steps):
                    made.out.open.clear()

            monkeypatch.setattr(Outbox, "landed", lambda outbox: None)
            monkeypatch.setattr(Carrier, "begin", early)
        found = answers(llm, [LONG])
        made.out.open.set()
        assert right(found) != mutant


def test_copies_wait_for_what_lands_late() -> None:
    """5 without a mutant: what a step sends is on its way for longer than the next one takes until it brings
    it back."""
    with lines() as made, opened("llama", Room(staging=3)) as llm:
        made.out.late = lambda: 0.02
        assert right(answers(llm, [LONG]))


# ---- one after another, and interrupted


@pytest.mark.parametrize(
    ("name", "sharing"), [("llama_dynamic", True), ("qwen3_moe_window", True), ("qwen3_moe_window", False)]
)
def test_nothing_of_a_request_is_left_for_the_next(name: str, sharing: bool) -> None:
    """Blocks of all tiers are used again and again; some requests are left in the midst."""
    rng = random.Random(name)
    common = words(rng, 200)
    with opened(name, Room(pages=6, block=4, step=14, tile=20, host=20, disk=18, sharing=sharing)) as llm:
        for turn in range(10):
            alike = rng.choice([0, 30, 100])
            prompt = (*common[:alike], *words(rng, rng.randint(1, 40)))
            ask = Ask(
                prompt,
                rng.randint(1, 9),
                leave=rng.choice([None, None, 6]),
                scored=turn % 4 == 0,
                sampled=turn % 5 == 0,
            )
            check(name, [ask], answers(llm, [ask]))
            everything_is_free(llm)


@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize(
    ("_ahead", "calls", "seed"),
    [
        (ahead, calls, seed)
        for seed in range(16 if tiny.THOROUGH else 2)
        for ahead in (False, True)
        for calls in (CARRIER, STREAMS)
        if tiny.THOROUGH or (seed + ahead) % 2 == (calls is STREAMS)
    ],
    indirect=["_ahead"],
)
def test_interrupts_lose_nothing(calls: dict[type, list[str]], seed: int) -> None:
    rng = random.Random(seed)
    name, common = rng.choice(["llama", "qwen2_windows", "mixtral"]), words(rng, 60)
    room = Room(
        pages=rng.randint(6, 9),
        block=4,
        step=20,
        tile=rng.choice([8, 100]),
        host=70,
        ring=rng.randint(1, 3),
        staging=rng.randint(1, 2),
    )
    asks = [
        Ask((*common, *words(rng, 30)), 8, scored=True),
        Ask((*common, *words(rng, 9)), 12, 3, sampled=True),
        Ask((7, 8), 20, 1),
    ]
    asks.append(Ask(tuple(words(rng, 50)), 9, 2, leave=7))
    gaps = [rng.choice([rng.randint(1, 9), rng.randint(1, 120)]) for _ in range(12)]
    with lines("some", seed), opened(name, room) as llm:
        with struck(calls, iter(gaps)) as strikes:
            found = answers(llm, asks)
        assert strikes() == 12
        again = answers(llm, [replace(ask, at=0, leave=None) for ask in asks])
        everything_is_free(llm)
    check(name, asks, found)
    check(name, [replace(ask, leave=None) for ask in asks], again)


@pytest.mark.parametrize("method", ["begin", "send", "take", "release"])
def test_who_interrupts_a_call_ends_it_and_may_call_again(method: str) -> None:
    ask = Ask(tuple(words(random.Random(2), 90)), 5)
    alone = expected("llama", ask)
    with opened("llama", Room()) as llm:
        for number in (1, 2, 9):
            with struck({Carrier: [method]}, iter([number])), pytest.raises(KeyboardInterrupt):
                llm.generate([list(ask.prompt), [5, 6, 7]], ask.params)
            assert llm.stats().running == llm.stats().waiting == 0
            everything_is_free(llm)
        [found] = llm.generate([list(ask.prompt)], ask.params)
    assert found.tokens == alone.tokens
    assert apart(found, alone) < LIMIT


# ---- what cannot be


def boots(**settings: object) -> LLM:
    return LLM(tiny.checkpoint("llama"), **{**SETTINGS, "block_size": 8, "max_step_tokens": 24, **settings})  # type: ignore[arg-type]


def test_more_host_memory_than_there_is_is_refused() -> None:
    with pytest.raises(
        BudgetError,
        match=r"^100 TiB of host memory were asked for KV, but half of the budget is [\d.]+ [GM]iB; lower "
        r"host_kv_memory$",
    ):
        boots(host_kv_memory="100TiB")
    with pytest.raises(
        BudgetError,
        match=r"65\.0 MiB of host memory were asked for KV, but there are 64\.0 MiB; lower host_kv_memory",
    ):
        boots(host_kv_memory="65MiB", device_memory="64MiB", host_memory="128MiB")
    boots(host_kv_memory="30MiB", device_memory="64MiB", host_memory="128MiB").close()


def test_less_host_memory_than_a_block_is_refused() -> None:
    block = layout_of("llama", 8).block_bytes
    with pytest.raises(
        BudgetError, match=r"6\.00 KiB of host memory for KV are less than a block of 8 tokens, 6\.00 KiB"
    ):
        boots(host_kv_memory=block - 1)
    with boots(host_kv_memory=block, kv_blocks=4) as llm:
        assert llm.booted.engine.scheduler.host.blocks == 1


@pytest.mark.parametrize("none", ["0", 0, None])
def test_without_host_memory_a_prompt_must_fit_the_pages(none: object) -> None:
    with boots(host_kv_memory=none, kv_blocks=8) as llm:
        assert llm.booted.engine.scheduler.host.blocks == 0
        assert longest(llm) == 65
        with pytest.raises(
            RequestError,
            match=r"the request has 90 tokens of prompt and 4 of output, but the KV blocks hold 65 in all; ",
        ):
            llm.generate([[1] * 90], SamplingParams(max_tokens=4))
        with pytest.raises(RequestError, match=r"90 tokens of prompt, but the KV blocks hold 65"):
            llm.generate([[1] * 90])
        ask = Ask(tuple(words(random.Random(0), 61)), 4)
        check("llama", [ask], answers(llm, [ask]))


def test_a_request_that_host_memory_does_not_hold_is_told_what_would_hold_it() -> None:
    block = layout_of("llama", 8).block_bytes
    ask = Ask(tuple(words(random.Random(0), 130)), 6)
    said = (
        r"130 tokens of prompt and 6 of output, but KV has room for 88 in all; .* host memory .*for 128 "
        r"tokens of KV \(80 now\)$"
    )
    with boots(host_kv_memory=10 * block, kv_blocks=4) as llm, pytest.raises(RequestError, match=said):
        llm.generate([list(ask.prompt)], ask.params)
    with boots(host_kv_memory=16 * block, kv_blocks=4) as llm:
        check("llama", [ask], answers(llm, [ask]))
    with (
        boots(host_kv_memory=16 * block, kv_blocks=3) as llm,
        pytest.raises(RequestError, match=r"allow 4 KV blocks on the device \(3 now\)"),
    ):
        llm.generate([list(ask.prompt)], ask.params)


def test_a_length_beyond_the_models_positions_must_be_allowed() -> None:
    said = (
        r"max_length 1280 is more than the 512 positions the model was trained for; .* rope scaling by 2\.5, "
        r"or allow it with beyond_"
    )
    with pytest.raises(ConfigError, match=said):
        boots(max_length=1280, beyond_trained=False, host_kv_memory="2MiB")
    boots(max_length=512, beyond_trained=False, host_kv_memory="2MiB").close()
    ask = Ask(tuple(words(random.Random(0), 700)), 4)
    with boots(max_length=1280, max_step_tokens=700, kv_blocks=100) as llm:
        [alone] = answers(llm, [ask])
    with boots(max_length=1280, max_step_tokens=128, kv_blocks=8, host_kv_memory="2MiB") as llm:
        assert longest(llm) == 1280
        [found] = answers(llm, [ask])
    assert found.tokens == alone.tokens
    assert apart(found, alone) < LIMIT


def test_dynamic_rope_has_no_end_to_go_beyond() -> None:
    settings = {
        **SETTINGS,
        "max_length": 300,
        "beyond_trained": False,
        "block_size": 8,
        "host_kv_memory": "2MiB",
    }
    with LLM(tiny.checkpoint("llama_dynamic"), **settings, kv_blocks=8, max_step_tokens=24) as llm:  # type: ignore[arg-type]
        ask = Ask(tuple(words(random.Random(0), 290)), 10)
        check("llama_dynamic", [ask], answers(llm, [ask]))


def test_a_step_must_hold_a_block() -> None:
    with pytest.raises(
        ConfigError,
        match=r"max_step_tokens 7 must be at least a block, 8 tokens, for contexts in host memory",
    ):
        boots(max_step_tokens=7, host_kv_memory="2MiB")
    ask = Ask(tuple(words(random.Random(0), 90)), 4)
    with boots(max_step_tokens=8, kv_blocks=4, host_kv_memory="2MiB") as llm:
        check("llama", [ask], answers(llm, [ask]))


# ---- the end


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("end", ["used", "in the midst", "unused", "failed"])
def test_nothing_is_left_behind(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread; and every pinned piece of memory is let go, once no copy is under way."""
    pinned: list[arena.Arena] = []
    make, close = arena.Arena.__init__, arena.Arena.close

    def made(
        self: arena.Arena, size: int, device: torch.device, *, pinned_for: torch.device | None = None
    ) -> None:
        make(self, size, device, pinned_for=pinned_for)
        if pinned_for is not None and size:
            pinned.append(self)

    def closed(self: arena.Arena) -> None:
        close(self)
        if self in pinned:
            assert not any("under test" in name for name in threads()), (
                "unpinned while copies may be under way"
            )
            pinned.remove(self)

    monkeypatch.setattr(arena.Arena, "__init__", made)
    monkeypatch.setattr(arena.Arena, "close", closed)
    prompt, params = [words(random.Random(1), 90)], SamplingParams(temperature=0, max_tokens=9)
    resident("llama")  # Stays open, whichever test is the first to ask for it.
    with no_thread_left(), lines("in"), opened("llama", Room(disk=10)) as llm:
        assert any("under test" in name for name in threads())
        assert pinned
        if end == "used":
            llm.generate(prompt, params)
        elif end == "in the midst":
            for _ in range(3):
                llm.stream(prompt[0], params)
                llm.driver.step()
        elif end == "failed":
            monkeypatch.setattr(Carrier, "take", fail)
            with pytest.raises(ZeroDivisionError):
                llm.generate(prompt, params)
            assert not pinned
            with pytest.raises(EngineClosedError, match="a step failed with ZeroDivisionError"):
                llm.generate(prompt, params)
    assert not pinned


def fail(_: Carrier) -> tuple[Tensor, Tensor]:
    raise ZeroDivisionError


def test_an_engine_that_cannot_be_made_leaves_nothing_behind() -> None:
    with no_thread_left(), pytest.raises(BudgetError):
        boots(host_kv_memory="8MiB", kv_blocks=10**9)


def test_pages_that_cannot_be_had_leave_nothing_of_what_was_made_before() -> None:
    def none(outline: Settled, blocks: int, device: torch.device) -> KVPool:
        if blocks > 1:
            raise DeviceError("not as much")
        return make_pool(outline, blocks, device)

    with (
        no_thread_left(),
        patch.object(boot, "make_pool", none),
        pytest.raises(DeviceError, match="not as much"),
    ):
        boots(host_kv_memory="8MiB")


def test_host_memory_is_given_back() -> None:
    size, process = 200 * MIB, psutil.Process()
    boots(host_kv_memory="1MiB", kv_blocks=8).close()
    before = process.memory_info().rss
    for _ in range(2):
        with boots(host_kv_memory=size, kv_blocks=8) as llm:
            llm.generate([words(random.Random(1), 90)], SamplingParams(temperature=0, max_tokens=4))
            assert process.memory_info().rss - before > 0.9 * size
        assert process.memory_info().rss - before < 0.2 * size


# -- what was found once
# -----------------------------------------------------------------------------------------------------


def test_the_prefix_cache_is_cleared_beyond_the_device_too() -> None:
    few = SamplingParams(temperature=0, max_tokens=4)
    with opened("llama", Room()) as llm:
        llm.generate([list(range(90))], few)
        assert llm.clear_prefix_cache() > 0
        assert llm.generate([list(range(90))], few)[0].cached_tokens == 0
        assert llm.generate([list(range(90))], few)[0].cached_tokens > 0


def test_no_thread_is_left_by_a_directory_that_cannot_be_used() -> None:
    with no_thread_left(), pytest.raises(DeviceError, match="name another kv_directory"):
        boots(host_kv_memory="8MiB", disk_kv_memory="1MiB", kv_directory="/proc", kv_store="off")


def test_the_scaling_that_is_named_is_enough() -> None:
    with pytest.raises(ConfigError, match=r"scaling by 1\.01,"):
        boots(max_length=513, beyond_trained=False)


def test_a_tile_is_no_longer_than_the_context() -> None:
    boots(kv_tile=10**9, host_kv_memory="2MiB", device_memory="64MiB").close()


def test_a_step_needs_two_tokens() -> None:
    with pytest.raises(ConfigError, match="must be at least 2 tokens"):
        boots(block_size=1, max_step_tokens=1, host_kv_memory="2MiB")


def test_weights_are_cut_in_steps_of_a_prompt_that_reads_tiles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[bool]()
    monkeypatch.setattr(WeightStream, "share_link", lambda _, shared: said.append(shared))
    room, ask = Room(pages=6, step=24, host=40), Ask(tuple(range(1, 90)), 4)
    with opened("llama", room) as llm:
        said.clear()
        answers(llm, [ask])
    chunks = -(-len(ask.prompt) // room.step)
    assert said == [False] + [True] * (chunks - 1) + [False] * (ask.tokens - 1), "the first reads no tile"
