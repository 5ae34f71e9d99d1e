"""Prefixes that come from host memory or disk give what they give when they are computed: whoever talks,
whatever is late, lost or broken, and however the process before has ended."""

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("transformers")

import far
import forks
import tiny
from far import SETTINGS, Ask, Line, layout_of, lines
from penstock import LLM
from penstock.engine import measuring
from penstock.kv.movement import carrier
from penstock.kv.store.blocks import BlockStore
from penstock.kv.store.segments import SegmentFile
from penstock.memory import arena
from penstock.sched import arrivals
from penstock.sched.rates import TransferRates
from penstock.step.plan import Route
from stores import failing, flip
from streams import LONG, cut_short, no_thread_left
from talks import (
    Place,
    Tally,
    agree,
    ask_once,
    converse,
    delayed,
    everything_is_free,
    interrupted,
    opened,
    rest,
    some_talks,
    store_of,
    tiers_of,
    warm,
    words,
)

TALKS = int(os.environ.get("PENSTOCK_TALKS", "6"))
"""Conversations of each case."""


@pytest.fixture(autouse=True)
def _dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is full of NaN before anything is written there."""
    warm("llama")
    clean = arena._mapped

    def dirty(*asked: Any) -> tuple[Any, torch.Tensor]:
        mapping, memory = clean(*asked)
        return mapping, memory.fill_(255)

    monkeypatch.setattr(arena, "_mapped", dirty)


UNUSED = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
"""An interrupt where a generator is closed."""


# ---- conversations


@UNUSED
@pytest.mark.timeout(60 + 20 * TALKS)
@pytest.mark.parametrize(
    ("name", "store"),
    [
        *([("llama", "eager"), ("llama", "lazy"), ("llama_dynamic", "eager")] if tiny.THOROUGH else []),
        ("llama", "off"),
        ("qwen2_windows", "eager"),
        ("qwen3_moe", "lazy"),
    ],
)
def test_conversations_are_answered_right(tmp_path: Path, name: str, store: str) -> None:
    rng = random.Random(f"{name} {store}")
    warm(name)
    talks, tally = some_talks(rng, TALKS), Tally()
    some = (
        {"off": [Route.UP]}.get(store, list(Route))
        if TALKS >= 20
        else [Route.UP]
        if store == "off"
        else [Route.DOWN, Route.OUT]
    )

    def enough() -> bool:
        return all(tally.moved[route] for route in some) and tally.given_up["pages"] > 0

    for run in range(12):
        if run >= 3:  # What moves depends on what is late: almost always this is enough.
            if enough():
                break
            talks = some_talks(rng, TALKS)
        place = Place(
            pages=rng.choice([18, 22, 26]),
            host=rng.choice([16, 30]),
            records=rng.choice([24, 50]),
            step=rng.choice([16, 24, 40]),
            store=store,
        )
        with no_thread_left(), lines("some", run), delayed(rng), opened(name, place, tmp_path) as llm:
            with interrupted(llm, rng, 40):
                converse(
                    llm, name, talks, rng, tally, leaves=0.02, clears=0.004, pause=None if run >= 2 else TALKS
                )
            rest(llm)
            everything_is_free(llm)
            tally.take(llm)
    assert enough(), tally
    if TALKS >= 20:
        assert tally.found["pages"] > 0, tally
        assert tally.preemptions > 0, tally
        assert tally.interrupts > 0, tally
        assert tally.late + tally.recomputed > 0, tally
        if (
            store != "off" and name != "llama_dynamic"
        ):  # There only prompts of one length have anything in common.
            assert (
                min(tally.found["host"], tally.found["disk"], tally.given_up["host"], tally.given_up["disk"])
                > 0
            ), tally


@UNUSED
@pytest.mark.timeout(60 + 20 * TALKS)
@pytest.mark.parametrize("name", ["llama_tied", "mixtral"] if tiny.THOROUGH else ["mixtral"])
def test_conversations_are_answered_right_while_weights_stream(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From host memory and from disk, experts one by one. Activations are counted by shape, so that budgets
    are what they were."""
    monkeypatch.setattr(measuring, "peak_of", lambda _, run: 0 * bool(run()))
    rng = random.Random(name)
    warm(name)
    talks, tally, place = some_talks(rng, TALKS), Tally(), Place(host=30)
    with opened(name, place, tmp_path) as llm:
        budget, groups = (
            llm.memory.budget,
            [(layout.id.expert >= 0, layout.size) for layout in llm.booted.weights._layouts.values()],
        )
        converse(llm, name, talks, rng, tally, pause=TALKS)
        rest(llm)
    largest = max(size for expert, size in groups if not expert) + 2 * max(
        (size for expert, size in groups if expert), default=0
    )
    device = budget.activations + budget.kv + max(int(0.45 * budget.weights), largest + 65536)
    host = device + (place.host + 60) * layout_of(name, 8).block_bytes + int(0.4 * budget.weights)
    budgets: dict[str, Any] = {"device_memory": device, "host_memory": host, "cache": tmp_path / "packs"}
    with no_thread_left(), lines("some"), delayed(rng), opened(name, place, tmp_path, **budgets) as llm:
        with interrupted(llm, rng, 40):
            converse(llm, name, talks, rng, tally, leaves=0.02)
        rest(llm)
        everything_is_free(llm)
        moved = llm.memory.weights
        assert moved.copied > budget.weights
        assert sum(tally.found.values()) > 0


# ---- a block that the disk has given up by the time it is asked for


ONE = Ask(words(random.Random(1), 60), 6)


def test_what_the_disk_does_not_have_is_computed(tmp_path: Path) -> None:
    """The engine believes that the disk has it."""
    with opened("llama", Place(), tmp_path) as llm:
        ask_once(llm, "llama", [ONE])
        rest(llm)
    with opened("llama", Place(), tmp_path) as llm:
        store_of(llm).forget(store_of(llm).keys())
        [found] = ask_once(llm, "llama", [ONE])
        assert found.cached_tokens == 0


@contextmanager
def patient() -> Iterator[None]:
    """Whatever is on another tier is waited for, however fast this machine computes just now."""
    with (
        patch.object(arrivals, "_LEAST_PATIENCE", LONG),
        patch.object(TransferRates, "loading_pays", lambda *_: True),
    ):
        yield


def kept(directory: Path, asks: Sequence[Ask] = (ONE,), name: str = "llama") -> None:
    """These are on disk."""
    with opened(name, Place(), directory) as llm:
        for ask in asks:
            ask_once(llm, name, [ask])
        rest(llm)
        assert len(store_of(llm)) >= 7


def test_how_fast_things_went_is_kept_for_the_next_process(tmp_path: Path) -> None:
    """Beside the blocks. What cannot be read, or was of another device, is not known; nothing else comes of
    it."""
    kept(tmp_path)
    [notes] = tmp_path.rglob("rates.json")
    text = notes.read_text()

    def found(said: str) -> tuple[bool, bool]:
        notes.write_text(said)
        with opened("llama", Place(), tmp_path, told=True) as llm:
            rates = tiers_of(llm).rates
            known = rates.token is not None, Route.IN in rates.block
            ask_once(llm, "llama", [ONE])
        assert json.loads(notes.read_text())["rates"]["steps"]
        return known

    assert found(text) == (True, True)
    assert found(text.replace('"computed_by": "', '"computed_by": "8 x ')) == (False, True)
    for damaged in ("", text[: len(text) // 2], "[]", "\x00" * 100, "[" * 50_000, '{"rates": 5}'):
        assert found(damaged) == (False, False)
    with opened("llama", Place(), tmp_path) as llm:
        notes.unlink()
        with opened("llama", Place(), tmp_path) as reader:
            ask_once(reader, "llama", [ONE])
            assert store_of(reader).read_only
        assert not notes.exists()
        notes.mkdir()
        ask_once(llm, "llama", [ONE])
    assert list(notes.parent.glob("rates.json*")) == [notes]
    # Whatever befalls that, the device is freed.
    with opened("llama", Place(), tmp_path) as llm:
        runner = llm.booted.engine._ranks
        with (
            patch.object(BlockStore, "note", side_effect=RuntimeError("no")),
            pytest.raises(RuntimeError, match="no"),
        ):
            llm.close()
        assert runner.target.weights is None  # type: ignore[union-attr]


def test_what_a_long_request_has_sent_lands_before_anything_else_does_in_its_place(tmp_path: Path) -> None:
    """It is left when its first chunk has been computed and nothing of it has landed; its blocks are all
    there are."""
    short = Ask(words(random.Random(8), 41), 8)
    place = Place(pages=12, host=12, records=0, step=96)
    with (
        patch.object(carrier, "STAGING", 6),
        patch.object(far, "_HELD", 0.3),
        lines() as made,
        patient(),
        opened("llama", place, tmp_path) as llm,
    ):
        made.out.open.clear()
        stream = llm.stream(list(words(random.Random(9), 96)), Ask((1,), 8).params)
        llm.driver.step()
        stream.close()
        asked = llm.stream(list(short.prompt), short.params)
        for _ in range(8):
            llm.driver.step()
        made.out.open.set()
        while not asked._group.done:
            llm.driver.step()
        rest(llm)
        assert tiers_of(llm).counts.moved[Route.DOWN] >= 5
        llm.booted.engine.scheduler.ledger.forget()
        [found] = ask_once(llm, "llama", [short])
        assert found.cached_host == 40


# ---- what breaks


@pytest.mark.parametrize("damage", ["flip", "cut", "journal", "gone"])
def test_a_damaged_store_is_misses(tmp_path: Path, damage: str) -> None:
    kept(tmp_path)
    segments = sorted(tmp_path.rglob("*.segment"))
    for path in segments:
        if damage == "flip":
            for byte in range(4096 + 100, path.stat().st_size, 4096):
                flip(path, byte)
        elif damage == "cut":
            os.truncate(path, 4096 + 100)
        elif damage == "gone":
            path.unlink()
    if damage == "journal":
        (segments[0].parent / "journal").unlink()
    with opened("llama", Place(), tmp_path) as llm:
        [found] = ask_once(llm, "llama", [ONE])
        stats = llm.stats().tiers
        assert stats is not None
        assert (stats.quarantined > 0) == (damage == "flip")
        assert (found.cached_disk > 0) == (damage == "journal")
        rest(llm)
    with opened("llama", Place(), tmp_path) as llm:
        [again] = ask_once(llm, "llama", [ONE])
        assert again.cached_disk > 0 or damage == "cut"


def test_bits_that_flip_while_it_runs_are_misses(tmp_path: Path) -> None:
    kept(tmp_path)
    with opened("llama", Place(), tmp_path) as llm:
        for path in tmp_path.rglob("*.segment"):
            flip(path, path.stat().st_size - 50)
            for byte in range(4096 + 100, path.stat().st_size, 4096):
                flip(path, byte)
        [found] = ask_once(llm, "llama", [ONE])
        assert found.cached_tokens == 0


def test_another_models_store_is_never_read(tmp_path: Path) -> None:
    """Of the same shape, but with other weights, or another rope."""
    kept(tmp_path)
    for number, changed in enumerate(({"seed": 9}, {"config": tiny.CASES["llama_linear"].config})):
        path = tiny.write(replace(tiny.CASES["llama"], **changed), tmp_path / f"other{number}")  # type: ignore[arg-type]
        with LLM(path, **SETTINGS, prefix_cache=False) as alone:  # type: ignore[arg-type]
            [right] = alone.generate([list(ONE.prompt)], ONE.params)
        with opened("llama", Place(), tmp_path, path=path) as llm:
            [found] = llm.generate([list(ONE.prompt)], ONE.params)
            assert found.tokens == right.tokens
            assert found.cached_tokens == 0


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("pwrite", errno.ENOSPC),
        ("pwrite", errno.EIO),
        ("posix_fallocate", errno.ENOSPC),
        ("preadv", errno.EIO),
        ("open", errno.EMFILE),
        ("open", errno.ENOSPC),
    ],
)
def test_a_disk_that_fails_is_done_without(tmp_path: Path, call: str, fault: int) -> None:
    if call == "preadv":
        kept(tmp_path)

    def on_disk(first: object, *more: object) -> bool:
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)  # type: ignore[call-overload]
        return str(path).endswith(".segment")

    with opened("llama", Place(), tmp_path) as llm:
        with failing(call, fault, on_disk) as failed:
            for turn in range(2):
                [found] = ask_once(llm, "llama", [ONE])
                assert found.cached_disk == 0
                assert found.cached_tokens == (56 if turn else 0)
                rest(llm)
            assert failed[0] > 0
        ask_once(llm, "llama", [Ask(words(random.Random(2), 50), 4)])
        rest(llm)


def test_a_read_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path)
    monkeypatch.setattr(arrivals, "_PATIENCE", 0.1)
    go, read = threading.Event(), SegmentFile.read

    def hangs(file: SegmentFile, slot: int, into: memoryview) -> None:
        assert go.wait(LONG)
        read(file, slot, into)

    monkeypatch.setattr(SegmentFile, "read", hangs)
    with no_thread_left():
        with opened("llama", Place(), tmp_path) as llm:
            found = ask_once(llm, "llama", [ONE, Ask(words(random.Random(2), 30), 6)])
            assert found[0].cached_tokens == 0
            assert tiers_of(llm).counts.late > 0
            assert tiers_of(llm).moving
            go.set()
        assert not tiers_of(llm).moving


@pytest.mark.parametrize("enough", [True, False])
def test_more_than_the_disk_has_is_said(
    tmp_path: Path, enough: bool, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 40 if enough else 1000)
    with (
        patch("shutil.disk_usage", lambda _: usage),
        caplog.at_level(logging.INFO, "penstock"),
        opened("llama", Place(), tmp_path) as llm,
    ):
        ask_once(llm, "llama", [ONE])
    said = [
        record.getMessage()
        for record in caplog.records
        if "free, less than disk_kv_memory allows" in record.getMessage()
    ]
    assert bool(said) != enough
    assert enough or "1000 B free" in said[0]


def test_a_second_engine_reads_what_the_first_has_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened("llama", Place(), tmp_path) as first:
        ask_once(first, "llama", [ONE])
        rest(first)
        with caplog.at_level(logging.INFO, "penstock"), opened("llama", Place(), tmp_path) as second:
            assert any("another process writes to" in record.getMessage() for record in caplog.records)
            [found] = ask_once(second, "llama", [ONE])
            assert found.cached_disk == 56
            other = Ask(words(random.Random(3), 40), 4)
            ask_once(second, "llama", [other])
            rest(second)
            assert tiers_of(second).counts.moved[Route.OUT] == 0
        ask_once(first, "llama", [other])
        rest(first)
        agree(first)


# ---- what the engine believes of the disk


def test_what_was_cleared_is_gone_though_an_interrupt_strikes(tmp_path: Path) -> None:
    with opened("llama", Place(), tmp_path) as llm:
        ask_once(llm, "llama", [ONE])
        rest(llm)
        ranks = llm.booted.engine._ranks
        with patch.object(ranks, "begin", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            llm.clear_prefix_cache()
        rest(llm)
    with opened("llama", Place(), tmp_path) as llm:
        [found] = ask_once(llm, "llama", [ONE])
        assert found.cached_tokens == 0


def test_ledger_and_disk_agree_after_a_fault_that_passes(tmp_path: Path) -> None:
    kept(tmp_path)
    with opened("llama", Place(), tmp_path) as llm:
        with failing("preadv", errno.EIO):
            ask_once(llm, "llama", [replace(ONE, prompt=ONE.prompt[:30])])
        agree(llm)


def test_what_comes_up_while_all_is_forgotten_is_not_found(tmp_path: Path) -> None:
    ways: dict[str, Line] = {}

    def streams(*_: object) -> tuple[Line, Line]:
        ways.update((name, Line(name, lambda: 0.0)) for name in ("up", "down"))
        return ways["up"], ways["down"]

    with patch.object(carrier, "more_streams", streams), patient(), opened("llama", Place(), tmp_path) as llm:
        ask_once(llm, "llama", [ONE])
        rest(llm)
        llm.booted.engine.scheduler.ledger.forget()
        ways["up"].open.clear()
        stream = llm.stream(list(ONE.prompt), ONE.params)
        llm.driver.step()
        assert tiers_of(llm).moving
        stream.close()
        llm.clear_prefix_cache()
        ways["up"].open.set()
        rest(llm)
        assert llm.booted.engine.scheduler.ledger.cached == 0


def test_ledger_and_disk_agree_after_an_interrupt(tmp_path: Path) -> None:
    """Which strikes while blocks are being written."""
    struck, write = threading.Event(), SegmentFile.write

    def late(file: SegmentFile, *arguments: Any) -> None:
        assert struck.wait(LONG)
        write(file, *arguments)

    def strike(_: object) -> None:
        struck.set()
        raise KeyboardInterrupt

    with patch.object(SegmentFile, "write", late), opened("llama", Place(), tmp_path) as llm:
        ask_once(llm, "llama", [ONE])
        while tiers_of(llm).counts.moved[Route.DOWN] < 7:
            llm.booted.engine.step()
        llm.booted.engine.step()
        assert tiers_of(llm).moving
        with patch.object(llm.booted.engine._ranks, "begin", strike), pytest.raises(KeyboardInterrupt):
            llm.booted.engine.step()
        agree(llm)


def test_no_more_is_counted_as_found_than_was(tmp_path: Path) -> None:
    """An interrupt strikes when the blocks have come and the request has not had a share yet."""
    with opened("llama", Place(), tmp_path) as llm:
        ask_once(llm, "llama", [ONE])
        rest(llm)
        llm.booted.engine.scheduler.ledger.forget()
        stream = llm.stream(list(ONE.prompt), ONE.params)
        engine = llm.booted.engine
        while not engine.scheduler.tiers.counts.moved[Route.UP]:
            llm.driver.step()
        with (
            patch.object(engine._ranks, "begin", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            llm.driver.step()
        while not stream._group.done:
            llm.driver.step()
        found = stream.completion
        assert found.cached_host + found.cached_disk <= found.cached_tokens


# ---- killed

KILLS = int(os.environ.get("PENSTOCK_KILLS", "3"))
PROMPTS = [
    words(random.Random(number % 4), 24) + words(random.Random(100 + number), 8 + 3 * number)
    for number in range(24)
]
KILLED = """
import json, os, random, sys
from penstock import LLM, SamplingParams

prompts, path, settings = json.loads(sys.stdin.readline())
params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)

def child(seed):
    rng = random.Random(seed)
    with LLM(path, **settings) as llm:
        while True:
            llm.generate(rng.sample(prompts, 3), params)
            if rng.random() < 0.03:
                llm.clear_prefix_cache()

for line in sys.stdin:
    process = os.fork()
    if not process:
        try:
            child(line)
        finally:
            os._exit(1)
    print(process, flush=True)
    sys.stdin.readline()
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@pytest.mark.timeout(60 + 5 * KILLS)
def test_killed_at_any_time_no_wrong_token_comes_of_it(tmp_path: Path) -> None:
    """A process that talks is killed again and again; whoever comes next finds some of what it has kept, and
    nothing that is wrong."""
    rng, place, found = random.Random(1), Place(records=60), 0
    layout = layout_of("llama", 8)
    settings = {
        **SETTINGS,
        "kv_blocks": place.pages,
        "block_size": 8,
        "max_step_tokens": place.step,
        "max_sequences": place.sequences,
    }
    settings |= {
        "host_kv_memory": place.host * layout.block_bytes,
        "disk_kv_memory": "1400KiB",
        "kv_directory": str(tmp_path),
    }
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with forks.Popen([sys.executable, "-c", KILLED], env=environment, **pipes) as zygote:  # type: ignore[call-overload]
        print(json.dumps([PROMPTS, str(tiny.checkpoint("llama")), settings]), file=zygote.stdin, flush=True)
        for kill in range(KILLS):
            print(kill, file=zygote.stdin, flush=True)
            process = int(zygote.stdout.readline())
            time.sleep(rng.uniform(0.2, 1.2))
            os.kill(process, signal.SIGKILL)
            print(file=zygote.stdin, flush=True)
            assert int(zygote.stdout.readline()) == -signal.SIGKILL
            with patient(), opened("llama", place, tmp_path) as llm:
                for prompt in rng.sample(PROMPTS, 4):
                    found += ask_once(llm, "llama", [Ask(prompt, 9)])[0].cached_disk
                stats = llm.stats().tiers
                assert stats is not None
                assert not stats.checksum_failures
                agree(llm)
        zygote.stdin.close()
    assert found > 8 * KILLS


@UNUSED
def test_an_interrupt_anywhere_in_a_use_breaks_nothing(tmp_path: Path) -> None:
    with opened("llama", Place(), tmp_path) as llm:
        ask_once(llm, "llama", [ONE])
        rest(llm)
        disk = tiers_of(llm).disk
        assert disk is not None
        use, strikes = disk.use, 0
        for where in range(40):

            def struck(keys: Sequence[bytes], where: int = where) -> None:
                nonlocal strikes
                disk.use = use  # type: ignore[method-assign]
                if cut_short(lambda: use(keys), where):
                    strikes += 1
                    raise KeyboardInterrupt

            disk.use = struck  # type: ignore[method-assign]
            stream = llm.stream(list(ONE.prompt), replace(ONE, tokens=1).params)
            while not stream._group.done:
                with suppress(KeyboardInterrupt):
                    llm.driver.step()
        assert strikes > 10
        rest(llm)
        there = len(disk)
        disk.make_room(disk.capacity)
        assert not len(disk)
        assert there > 0


@UNUSED
def test_an_interrupt_anywhere_while_the_disk_makes_room_breaks_nothing(tmp_path: Path) -> None:
    with opened("llama", Place(records=24), tmp_path) as llm:
        disk = tiers_of(llm).disk
        assert disk is not None
        make_room, strikes = disk.make_room, 0
        for turn in range(120):
            where = turn - 40  # At first the disk fills.

            def struck(count: int, where: int = where) -> None:
                nonlocal strikes
                disk.make_room = make_room  # type: ignore[method-assign]
                if where < 0:
                    make_room(count)
                elif cut_short(lambda: make_room(count), where % 40):
                    strikes += 1
                    raise KeyboardInterrupt

            stream = llm.stream(list(words(random.Random(turn), 20)), Ask((), 1).params)
            disk.make_room = struck  # type: ignore[method-assign]
            while not stream._group.done or tiers_of(llm).ready or tiers_of(llm).moving:
                with suppress(KeyboardInterrupt):
                    llm.driver.step()
        assert strikes > 20
        agree(llm)
        there = len(disk)
        disk.make_room(disk.capacity)
        assert not len(disk)
        assert there > 0
