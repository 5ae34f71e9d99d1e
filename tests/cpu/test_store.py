"""KV that outlives the process comes back as it was written or not at all, whatever ends the process, damages
its files or fails."""

import errno
import fcntl
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import forks
from penstock.kv.store.blocks import BlockStore, StoreFull
from penstock.kv.store.directory import ABOUT, JOURNAL, LOCK, NOTES
from penstock.kv.store.diskpool import LostKV
from penstock.kv.store.journal import Item, Journal, Kind
from penstock.kv.store.operations import FAILURES, RETRY_SECONDS, Move
from penstock.kv.store.seal import Seal
from penstock.kv.store.segments import SegmentFile, StoreError, StoreLocked, sizes
from penstock.kv.store.sizes import ENTRY_BYTES
from penstock.memory.disk import DirectFile
from penstock.memory.tasks import CalledOff, Task
from stores import (
    CAP,
    IDENTITY,
    PAGE,
    SECRET,
    directory_of,
    failing,
    files,
    filled,
    finish,
    flip,
    got,
    held,
    holds,
    journal,
    key_of,
    known,
    memory,
    nothing,
    number_of,
    open_store,
    opened,
    payload,
    place_of,
    put,
    real,
    sound,
)
from streams import LONG, cut_short, no_thread_left, within

LOGGER = "penstock"


# ---- what is written is found


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("size", [PAGE, 3 * PAGE, 5000, 100])
def test_what_is_written_comes_back_also_to_another_process(
    tmp_path: Path, size: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file, cap = os.open, 80 * (size + 3 * PAGE)

    def without_direct(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT and not direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, *more)

    monkeypatch.setattr(os, "open", without_direct)
    with opened(tmp_path, cap, size) as store:
        count = min(store.capacity, 30)
        assert count > 20
        assert not holds(store, 0)
        for number in range(count):
            task = store.write(key_of(number), payload(number, size), nothing)
            task.result()
            assert key_of(number) not in store
            store.poll()
            assert key_of(number) in store
        assert held(store, range(count + 3)) == set(range(count))
        stats = store.stats
        assert (stats.records, stats.live_bytes) == (len(store), count * size) == (count, count * size)
        assert stats.written_bytes == stats.read_bytes == count * size
        assert real(store.path) <= stats.real_bytes <= cap
        assert not any(
            (stats.checksum_failures, stats.io_failures, stats.quarantined, stats.reads_off, stats.writes_off)
        )
    with opened(tmp_path, cap, size) as store:
        assert held(store, range(count + 3)) == set(range(count))
        assert real(store.path) <= store.stats.real_bytes <= cap


def test_work_waits_for_bytes_and_runs_beside(tmp_path: Path) -> None:
    """`ready` is called by the thread that works, which waits; the others go on, and what it raises is the
    task's."""
    there, caller = threading.Event(), threading.get_ident()
    data, into = memory(), memory()

    def filled_in() -> None:
        assert threading.get_ident() != caller
        assert there.wait(LONG)
        data[:] = payload(1)

    def broken() -> None:
        raise ZeroDivisionError

    with opened(tmp_path, threads=(2, 2)) as store:
        first = store.write(key_of(1), data, filled_in)
        second = store.write(key_of(2), payload(2), nothing)
        assert within(LONG, second.result)
        assert not first.done
        assert store.write(key_of(1), payload(1), nothing) is first
        there.set()
        first.result()
        store.poll()
        assert held(store, (1, 2)) == {1, 2}
        into[:] = 7
        for task in (store.read(key_of(1), into, broken), store.write(key_of(3), payload(3), broken)):
            with pytest.raises(ZeroDivisionError):
                task.result()
        assert (into == 7).all()
        finish(store)
        assert known(store) == {1, 2}
        assert not store.stats.io_failures
        again = store.write(key_of(1), payload(1, salt=5), nothing)
        again.result()
        assert holds(store, 1)


def test_the_order_of_use_is_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(8))
        assert list(map(number_of, store.keys())) == list(range(8))
        assert holds(store, 2)
        store.touch(map(key_of, (5, 0, 77)))
        store.forget([key_of(4)])
        assert list(map(number_of, store.keys())) == [1, 3, 6, 7, 2, 5, 0]
    for _ in range(2):
        with opened(tmp_path) as store:
            assert list(map(number_of, store.keys())) == [1, 3, 6, 7, 2, 5, 0]


def test_what_is_forgotten_is_gone(tmp_path: Path) -> None:
    """Also what is being written while it is, and also later."""
    gate = threading.Event()
    with opened(tmp_path) as store:
        put(store, range(6))
        task = store.write(key_of(6), payload(6), gate.wait)
        store.forget(map(key_of, (1, 4, 6, 9)))
        gate.set()
        task.result()
        finish(store)
        assert known(store) == held(store, range(10)) == {0, 2, 3, 5}
        put(store, [4])
    with opened(tmp_path) as store:
        assert known(store) == held(store, range(10)) == {0, 2, 3, 4, 5}
        store.forget(store.keys())
    with opened(tmp_path) as store:
        assert not store.keys()
        assert not files(tmp_path)


def test_what_is_forgotten_last_of_all_is_gone_too(tmp_path: Path) -> None:
    """Though the journal is slow."""
    gate, right = threading.Event(), Journal.append

    def slow(self: Journal, kind: Kind, items: Sequence[Item]) -> None:
        if kind is Kind.FORGOTTEN:
            assert gate.wait(LONG)
        right(self, kind, items)

    filled(tmp_path, range(6))
    with opened(tmp_path) as store, patch.object(Journal, "append", slow):
        for number in (1, 3, 5):
            store.forget([key_of(number)])
        threading.Timer(0.05, gate.set).start()
        store.close()
    with opened(tmp_path) as store:
        assert known(store) == {0, 2, 4}


# ---- room


def test_the_cap_is_kept_whatever_happens(tmp_path: Path) -> None:
    """The disk is measured before and after all that changes it. Under a load in no order, half of which is
    forgotten again and again."""
    worst, path = [0], directory_of(tmp_path, IDENTITY)

    def measured(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **more: object) -> object:
            try:
                return call(*arguments, **more)
            finally:
                worst[0] = max(worst[0], real(path))

        return wrapped

    rng = random.Random(1)
    with opened(tmp_path) as store:
        with patch.multiple(
            os,
            **{
                name: measured(getattr(os, name))
                for name in ("pwrite", "posix_fallocate", "rename", "unlink")
            },
        ):
            for number in range(700):
                if len(store) >= store.capacity:
                    store.forget(rng.sample(store.keys(), rng.choice((1, 1, 1, 12, store.capacity // 2))))
                while True:
                    task = store.write(key_of(number), payload(number), nothing)
                    task.wait()
                    if not isinstance(task.fault, StoreFull):
                        break
                    finish(store)
                task.result()
                finish(store)
        stats = store.stats
        assert stats.compactions > 20
        assert worst[0] <= stats.real_bytes + CAP // 4
        assert CAP // 2 < worst[0] <= CAP
        assert held(store, range(700)) == known(store)
        assert len(store) > store.capacity // 3
        assert journal(tmp_path).stat().st_size < ENTRY_BYTES * (2 * store.capacity + 400)
    with opened(tmp_path) as again:
        assert held(again, range(700)) == known(store)


def test_a_full_store_says_so(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(store.capacity))
        with pytest.raises(
            StoreFull, match=f"has {store.capacity} records of {store.capacity}; raise disk_kv_memory"
        ):
            put(store, [1000])
        store.forget([key_of(3)])
        finish(store)
        put(store, [1000])
        assert holds(store, 1000)
        assert not store.stats.io_failures


def test_a_smaller_cap_drops_what_was_not_used_for_longest(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        count = store.capacity
        put(store, range(count))
        store.touch(map(key_of, range(8)))  # A whole segment.
    for cap in (CAP * 3 // 4, CAP // 2):
        with opened(tmp_path, cap) as store:
            left = known(store)
            assert held(store, range(count)) == left
            assert set(range(8)) < left
            assert max(left) == count - 1
            assert len(left) * PAGE < cap
            assert real(store.path) <= store.stats.real_bytes <= cap
            if len(store) < store.capacity:
                put(store, [5000])
                store.forget([key_of(5000)])
                finish(store)
            assert real(store.path) <= cap
            store.touch(map(key_of, range(8)))
    assert len(left) < count


def test_a_cap_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError,
        match=r"100 KiB is too little for KV in records of 64.0 KiB; set disk_kv_memory to 2\d\d KiB or more",
    ) as caught:
        open_store(tmp_path, 100 << 10, 64 << 10)
    assert not os.listdir(tmp_path)
    least = int(str(caught.value).split("memory to ")[1].split()[0]) + 1 << 10
    with opened(tmp_path, least, 64 << 10) as store:
        assert store.capacity == 1
        for number in range(5):
            put(store, [number])
            assert holds(store, number)
            assert real(store.path) <= least
            store.forget([key_of(number)])
            finish(store)


def test_the_journal_is_written_anew_when_it_is_mostly_stale(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(10))
        for _ in range(40):
            put(store, range(10, 20))
            store.forget(map(key_of, range(10, 20)))
        finish(store)
        assert journal(tmp_path).stat().st_size < ENTRY_BYTES * 320
        assert known(store) == set(range(10))
    with opened(tmp_path) as store:
        assert held(store, range(30)) == set(range(10))


# ---- damage


def test_a_flipped_bit_in_a_record_is_a_miss_and_stays_one(tmp_path: Path) -> None:
    """It is kept and known as damaged; the others are read."""
    filled(tmp_path, range(12))
    for count, (number, byte) in enumerate([(0, 0), (5, 100), (8, PAGE - 1), (11, 2048)], start=1):
        with opened(tmp_path) as store:
            path, start = place_of(store, number)
            flip(path, start + byte)
            damaged = path.read_bytes()[start : start + PAGE]
            with pytest.raises(LostKV, match=f"{key_of(number).hex()} in .* is not what was written"):
                got(store, number)
            assert key_of(number) not in store
            stats = store.stats
            assert (stats.checksum_failures, stats.quarantined, stats.io_failures) == (1, count, 0)
            flip(path, start + byte)
        with opened(tmp_path) as store:
            assert store.stats.quarantined == count
            assert held(store, range(12)) == known(store) == set(range(12)) - set([0, 5, 8, 11][:count])
            assert path.read_bytes()[start : start + PAGE] != damaged
    with opened(tmp_path) as store:
        put(store, [5])  # It may be written again.
        assert holds(store, 5)


def put_when_there_is_room(store: BlockStore, number: int) -> None:
    """Room that was forgotten is there once compaction has made it."""
    late = time.monotonic() + LONG
    while isinstance((task := store.write(key_of(number), payload(number), nothing)).fault, StoreFull):
        assert time.monotonic() < late
        finish(store)
    task.result()
    store.poll()


def test_what_is_in_quarantine_goes_when_its_room_is_needed(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(16))
        flip(*place_of(store, 3))
        assert not holds(store, 3)
        store.forget(map(key_of, range(8)))
        finish(store)
        assert store.stats.quarantined == 1
        assert len(files(tmp_path)) == 2
        for number in range(100, 100 + store.capacity - 8):
            put_when_there_is_room(store, number)
        store.forget([key_of(100)])
        put_when_there_is_room(store, 900)
        assert store.stats.quarantined == 0
        assert held(store, range(8, 16)) == set(range(8, 16))


def test_no_flipped_bit_in_the_journal_does_more_than_lose_an_entry(tmp_path: Path) -> None:
    """Of the head it loses nothing: then the tables of the segments say what there is."""
    filled(tmp_path / "right", range(5))
    size = journal(tmp_path / "right").stat().st_size
    assert size == 6 * ENTRY_BYTES
    for byte in (*range(2 * ENTRY_BYTES), *range(2 * ENTRY_BYTES, size, 5)):
        copy = tmp_path / str(byte)
        shutil.copytree(tmp_path / "right", copy)
        flip(journal(copy), byte, byte % 8)
        with opened(copy) as store:
            entry = byte // ENTRY_BYTES
            expected = set(range(5)) - ({entry - 1} if entry else set())
            assert known(store) == expected
            if byte % 16 == 0:
                assert held(store, range(5)) == expected
                put(store, [9])
            assert not store.stats.checksum_failures
        if byte % 16 == 0:
            with opened(copy) as store:
                assert known(store) == {*expected, 9}
        shutil.rmtree(copy)


def test_no_flipped_bit_in_a_table_matters_unless_the_journal_is_lost(tmp_path: Path) -> None:
    filled(tmp_path / "right", range(4))
    for lost in (False, True):
        for byte in range(0, 4 * ENTRY_BYTES, 3):
            copy = tmp_path / f"{byte}-{lost}"
            shutil.copytree(tmp_path / "right", copy)
            flip(files(copy)[0], byte, byte % 8)
            if lost:
                journal(copy).unlink()
            with opened(copy) as store:
                assert known(store) == (set(range(4)) - {byte // ENTRY_BYTES} if lost else set(range(4)))
            shutil.rmtree(copy)


@pytest.mark.parametrize("change", ["flip", "remove", "empty", "other"])
def test_what_is_for_people_matters_to_nobody_else(tmp_path: Path, change: str) -> None:
    filled(tmp_path, range(4), about={"model": "tiny"})
    path = directory_of(tmp_path, IDENTITY) / ABOUT
    right = path.read_bytes()
    if change == "flip":
        flip(path, len(right) // 2, 7)
    elif change == "remove":
        path.unlink()
    else:
        path.write_text("" if change == "empty" else "[" * 100_000)
    with opened(tmp_path, about={"model": "tiny"}) as store:
        assert held(store, range(4)) == set(range(4))
    assert path.read_bytes() == right


def test_a_lost_journal_is_made_anew(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(20))
        store.forget(map(key_of, range(0, 20, 5)))
    for content in (None, b"", bytes(1000), b"x" * 63):
        journal(tmp_path).unlink()
        if content is not None:
            journal(tmp_path).write_bytes(content)
        with opened(tmp_path) as store:
            assert set(range(20)) - set(range(0, 20, 5)) <= known(store)
            assert held(store, range(20)) == known(store)
            assert not store.stats.checksum_failures
    with opened(tmp_path) as store:
        put(store, [50])
    with opened(tmp_path) as store:
        assert held(store, range(60)) == known(store) >= {1, 50}


@pytest.mark.parametrize("name", [JOURNAL, ABOUT, NOTES])
def test_what_lies_in_the_way_of_a_new_file_is_not_written_to(tmp_path: Path, name: str) -> None:
    """A link, behind which may be anybody's file."""
    with opened(tmp_path) as store:
        put(store, range(5))
    (tmp_path / "precious").write_text("precious")
    beside = directory_of(tmp_path, IDENTITY) / f"{name}.tmp"
    beside.symlink_to(tmp_path / "precious")
    for one in (JOURNAL, ABOUT):  # They are made anew.
        (directory_of(tmp_path, IDENTITY) / one).unlink()
    with opened(tmp_path) as store:
        store.note(b"noted")
        assert len(held(store, range(5))) == 5
    assert (tmp_path / "precious").read_text() == "precious"
    assert not os.path.lexists(beside)
    assert not (directory_of(tmp_path, IDENTITY) / name).is_symlink()


def test_a_journal_that_is_a_link_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(5))
    journal(tmp_path).rename(tmp_path / "elsewhere")
    journal(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot be written"):
        open_store(tmp_path)


def test_notes_that_are_no_file_are_none(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.note(b"noted")
        assert store.noted() == b"noted"
    notes = directory_of(tmp_path, IDENTITY) / NOTES
    notes.unlink()
    os.mkfifo(notes)
    with opened(tmp_path) as store:
        assert within(LONG, lambda: store.noted() == b"")


def test_a_tail_without_end_is_not_read(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(5))
    os.truncate(journal(tmp_path), 1 << 43)
    with opened(tmp_path) as store:
        assert len(held(store, range(5))) == 5
        put(store, range(5, 8))
    assert journal(tmp_path).stat().st_size < 1 << 20
    with opened(tmp_path) as store:
        assert len(held(store, range(8))) == 8


def test_a_journal_of_many_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        put(store, range(20))
    monkeypatch.setattr("penstock.kv.store.journal._STRETCH", 3 * ENTRY_BYTES)
    flip(journal(tmp_path), 7 * ENTRY_BYTES + 30)
    with opened(tmp_path) as store:
        assert len(held(store, range(20))) == 19


def test_a_number_at_the_end_of_numbers_is_not_ours(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(5))
    (directory_of(tmp_path, IDENTITY) / "999999999999-112.segment").touch()
    with opened(tmp_path) as store:
        put(store, range(5, 20))
    with opened(tmp_path) as store:
        assert len(held(store, range(20))) == 20


def test_every_prefix_of_the_journal_is_a_journal(tmp_path: Path) -> None:
    """What it names is there, and it can be gone on with."""
    with opened(tmp_path / "right") as store:
        put(store, range(6))
    whole = journal(tmp_path / "right").read_bytes()
    for length in range(0, len(whole) + 1, 5):
        copy = tmp_path / str(length)
        shutil.copytree(tmp_path / "right", copy)
        torn = bytearray(whole[:length]) + bytes(whole[ENTRY_BYTES : ENTRY_BYTES + 50] if length % 2 else b"")
        journal(copy).write_bytes(torn)
        with opened(copy) as store:
            expected = set(range(length // ENTRY_BYTES - 1 if length >= ENTRY_BYTES else 6))
            assert known(store) == expected
            assert journal(copy).stat().st_size == ENTRY_BYTES * (len(expected) + 1)
            put(store, [7])
        with opened(copy) as store:
            assert held(store, range(8)) == {*expected, 7}
        shutil.rmtree(copy)


def test_a_torn_tail_is_not_taken_for_entries_later(tmp_path: Path) -> None:
    """What lies behind a torn tail, as a power loss may leave it, is not named again when the journal has
    grown to it."""
    filled(tmp_path, range(6))
    whole = journal(tmp_path).read_bytes()
    flip(journal(tmp_path), 5 * ENTRY_BYTES)
    flip(journal(tmp_path), 6 * ENTRY_BYTES)
    with opened(tmp_path) as store:
        assert known(store) == set(range(4))
        assert journal(tmp_path).stat().st_size == len(whole) - 2 * ENTRY_BYTES
        put(store, [8])
    with opened(tmp_path) as store:
        assert held(store, range(9)) == {0, 1, 2, 3, 8}


def test_an_entry_of_an_older_journal_is_none(tmp_path: Path) -> None:
    """Though it is sound: as in a file that was given the older one's place on the disk, and lost power
    before its tail was written."""
    with opened(tmp_path) as store:
        put(store, range(6))
        store.forget([key_of(2)])
        finish(store)
        entry = journal(tmp_path).read_bytes()[3 * ENTRY_BYTES : 4 * ENTRY_BYTES]
    with opened(tmp_path) as store:
        assert known(store) == {0, 1, 3, 4, 5}
    size = journal(tmp_path).stat().st_size
    assert size == 6 * ENTRY_BYTES
    with open(journal(tmp_path), "ab") as file:
        file.write(entry)
    with opened(tmp_path) as store:
        assert known(store) == {0, 1, 3, 4, 5}
        assert journal(tmp_path).stat().st_size == size


def test_a_new_journal_is_on_the_disk_before_it_takes_the_place_of_the_old(tmp_path: Path) -> None:
    """And so is the directory's entry for it."""
    calls: list[str] = []

    def noted(name: str) -> Callable[..., object]:
        right = getattr(os, name)

        def wrapped(*arguments: object) -> object:
            what = (
                os.readlink(f"/proc/self/fd/{arguments[0]}")
                if isinstance(arguments[0], int)
                else str(arguments[0])
            )
            calls.append(f"{name} {Path(what).name}")
            return right(*arguments)

        return wrapped

    with opened(tmp_path) as store:
        put(store, range(6))
        with patch.multiple(os, fsync=noted("fsync"), rename=noted("rename")):
            store.close()
        assert calls == [f"fsync {JOURNAL}.tmp", f"rename {JOURNAL}.tmp", f"fsync {store.path.name}"]


def test_a_segment_cut_short_is_a_miss_without_blame(tmp_path: Path) -> None:
    """Of what is behind the cut. It is back when the bytes are, as after a passing fault."""
    filled(tmp_path, range(8))
    with opened(tmp_path) as store:
        path, start = place_of(store, 4)
        whole = path.read_bytes()
        os.truncate(path, start + 100)
        assert held(store, range(8)) == {0, 1, 2, 3}
        assert store.stats.io_failures == 4
        assert not store.stats.quarantined
        path.write_bytes(whole)
        assert held(store, range(8)) == set(range(8))
        path.unlink()
        assert held(store, range(8)) == set()
    with opened(tmp_path) as store:
        assert not store.keys()
        put(store, [1])
        assert holds(store, 1)


# ---- whose records they are


def test_records_of_another_identity_are_never_served(tmp_path: Path) -> None:
    other = bytes(16)
    filled(tmp_path, range(8))
    with opened(tmp_path, identity=other) as store:
        put(store, range(8), salt=1)
        assert directory_of(tmp_path, other) == store.path != directory_of(tmp_path, IDENTITY)
    ours, theirs = directory_of(tmp_path, IDENTITY), directory_of(tmp_path, other)
    for names, quarantined in (
        ([path.name for path in files(tmp_path)], 8),
        ([path.name for path in files(tmp_path)] + [JOURNAL], 0),
    ):
        copy = tmp_path / f"copy-{quarantined}"
        shutil.copytree(ours, directory_of(copy, IDENTITY))
        for name in names:
            shutil.copy(theirs / name, directory_of(copy, IDENTITY) / name)
        with opened(copy) as store:
            assert held(store, range(8)) == set()
            assert store.stats.quarantined == store.stats.checksum_failures == quarantined
    shutil.rmtree(theirs)
    shutil.copytree(ours, theirs)
    (theirs / JOURNAL).unlink()
    with opened(tmp_path, identity=other) as store:
        assert not store.keys()


def test_a_record_in_the_place_of_another_is_not_served(tmp_path: Path) -> None:
    filled(tmp_path, range(3))
    with opened(tmp_path) as store:
        (path, one), (_, other) = place_of(store, 0), place_of(store, 1)
        data = bytearray(path.read_bytes())
        data[one : one + PAGE], data[other : other + PAGE] = (
            data[other : other + PAGE],
            data[one : one + PAGE],
        )
        path.write_bytes(data)
        assert held(store, range(3)) == {2}
        assert store.stats.quarantined == 2


def test_a_seal_is_of_a_record_of_this_identity_and_key(tmp_path: Path) -> None:
    """Even where an entry of the journal vouches for the bytes, if they were written under another key or by
    another model."""
    filled(tmp_path, range(3))
    with opened(tmp_path) as store:
        assert store._journal is not None
        data = payload(1).data
        segment, _ = store._space.find(store._index[key_of(1)])
        first, second = (segment.item(key_of(number), number) for number in (0, 1))
        assert store._seal.fits(second.seal, second.key, data)
        foreign = Seal(bytes(16), SECRET).of(second.key, data)
        store._journal.append(Kind.WRITTEN, [replace(first, key=key_of(8)), replace(second, seal=foreign)])
    with opened(tmp_path) as store:
        assert known(store) == {0, 1, 2, 8}
        assert held(store, (0, 1, 2, 8)) == {0, 2}


def test_another_size_of_records_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, range(3))
    with pytest.raises(StoreError, match=r"holds KV in records of 4.00 KiB, not 8.00 KiB"):
        open_store(tmp_path, size=2 * PAGE)
    with opened(tmp_path) as store:
        assert held(store, range(3)) == set(range(3))


def test_one_process_writes_and_others_read(tmp_path: Path) -> None:
    """What the journal named when they opened it, as long as it is there; and they change nothing."""
    with opened(tmp_path) as store:
        put(store, range(16))
        with pytest.raises(
            StoreLocked,
            match=r"another process writes KV to .*; wait until it ends, or name another",
        ):
            open_store(tmp_path)
        with opened(tmp_path, read_only=True) as reader:
            assert reader.read_only
            put(store, [20])
            assert held(reader, range(30)) == set(range(16))
            assert 20 in held(store, [20])
            store.forget(map(key_of, range(8)))
            finish(store)
            assert held(reader, range(30)) == set(range(8, 16))
            flip(*place_of(store, 9))
            assert not holds(reader, 9)
            assert (reader.stats.checksum_failures, reader.stats.quarantined) == (1, 1)
            reader.forget([key_of(10)])
        flip(*place_of(store, 9))
        assert held(store, range(8, 21)) == {*range(8, 16), 20}
    with pytest.raises(StoreError, match="cannot be read: No such file or directory"):
        open_store(tmp_path / "nowhere", read_only=True)


def test_the_lock_of_a_removed_directory_is_no_lock(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        shutil.rmtree(store.path)
        with opened(tmp_path) as other:
            put(other, range(3))
            with pytest.raises(StoreLocked):
                open_store(tmp_path)
    with opened(tmp_path) as store:
        assert held(store, range(3)) == set(range(3))


def test_a_directory_that_goes_while_it_is_being_locked_is_made_again(tmp_path: Path) -> None:
    filled(tmp_path, range(3))
    right, calls = fcntl.flock, [0]

    def late(file: int, how: int) -> None:
        calls[0] += 1
        if calls[0] == 1:
            shutil.rmtree(directory_of(tmp_path, IDENTITY))
            filled(tmp_path, range(5, 7))
        right(file, how)

    with patch.object(fcntl, "flock", late), opened(tmp_path) as store:
        assert held(store, range(7)) == {5, 6}
        with pytest.raises(StoreLocked):
            open_store(tmp_path)


# ---- a disk that fails

FULL = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG]


@pytest.mark.parametrize("fault", FULL)
@pytest.mark.parametrize("where", ["segment", "record", "table", "journal"])
def test_a_write_that_fails_leaves_nothing_and_spoils_nothing(tmp_path: Path, where: str, fault: int) -> None:
    """Wherever it fails, also in the midst. The others are there, also later; and when the disk works again,
    so does the store."""

    def there(file: int, data: object, offset: int) -> bool:
        if where == "segment":
            return True
        name = os.path.basename(os.readlink(f"/proc/self/fd/{file}"))
        assert isinstance(data, bytes | memoryview)
        return where == ("journal" if name == JOURNAL else "table" if len(data) == ENTRY_BYTES else "record")

    with opened(tmp_path) as store:
        put(store, range(8))
        with failing("posix_fallocate" if where == "segment" else "pwrite", fault, there) as count:
            for number in range(8, 12):
                task = store.write(key_of(number), payload(number), nothing)
                with pytest.raises(StoreError, match=os.strerror(fault)):
                    task.result()
                finish(store)
            assert count[0] >= 4
            assert store.stats.io_failures >= 4
            assert held(store, range(12)) == set(range(8))
        put(store, range(10, 14))
        assert held(store, range(14)) == known(store) == {*range(8), *range(10, 14)}
        assert real(store.path) <= store.stats.real_bytes
        assert not store.stats.checksum_failures
    with opened(tmp_path) as store:
        assert held(store, range(14)) == known(store) == {*range(8), *range(10, 14)}


def test_a_segment_that_could_not_be_made_nor_removed_is_not_tried_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        with (
            failing("posix_fallocate", errno.ENOSPC),
            failing("unlink", errno.EIO),
            pytest.raises(StoreError, match="No space"),
        ):
            put(store, [1])
        finish(store)
        put(store, range(3))
        assert held(store, range(3)) == {0, 1, 2}


def test_an_entry_that_could_be_written_in_part_only_is_written_over(tmp_path: Path) -> None:
    right = os.pwrite

    def half(file: int, data: memoryview, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith(JOURNAL):
            if len(data) < ENTRY_BYTES:
                raise OSError(errno.ENOSPC, "No space left on device")
            data = memoryview(data)[:30]
        return right(file, data, offset)

    with opened(tmp_path) as store:
        put(store, range(3))
        with patch.object(os, "pwrite", half), pytest.raises(StoreError):
            put(store, [3])
        finish(store)
        put(store, [4])
    with opened(tmp_path) as store:
        assert held(store, range(6)) == {0, 1, 2, 4}


@pytest.mark.parametrize("fault", [errno.EIO, errno.EMFILE, errno.ENOMEM])
def test_a_read_that_fails_is_a_miss_and_the_record_remains(tmp_path: Path, fault: int) -> None:
    filled(tmp_path, range(4))
    with opened(tmp_path) as store:
        call = "open" if fault == errno.EMFILE else "preadv"
        with failing(call, fault), pytest.raises(LostKV, match=os.strerror(fault)):
            got(store, 2)
        stats = store.stats
        assert (stats.io_failures, stats.checksum_failures, stats.quarantined) == (1, 0, 0)
        assert held(store, range(4)) == set(range(4))


def test_a_read_that_hangs_holds_up_nobody_else(tmp_path: Path) -> None:
    """Its memory is in use until it ends, whoever has given up on it; what had not begun never does."""
    filled(tmp_path, range(8))
    gate, hanging = threading.Event(), threading.Event()
    right = DirectFile.read_direct

    def read(file: DirectFile, buffer: memoryview, offset: int) -> None:
        if offset == stuck:
            hanging.set()
            assert gate.wait(LONG)
        right(file, buffer, offset)

    with opened(tmp_path) as store:
        _, stuck = place_of(store, 3)
        with patch.object(DirectFile, "read_direct", read):
            into, unused = memory(), memory()
            unused[:] = 9
            slow = store.read(key_of(3), into, nothing)
            assert hanging.wait(LONG)
            for number in (0, 1, 2, 4):  # By the other thread.
                data = memory()
                assert within(LONG, store.read(key_of(number), data, nothing).result)
                assert np.array_equal(data, payload(number))
            also = store.read(key_of(3), memory(), nothing)
            queued = store.read(key_of(5), unused, nothing)
            store.call_off([slow, queued])
            assert within(LONG, queued.wait)
            with pytest.raises(CalledOff):
                queued.result()
            assert not slow.done
            store.poll()
            store.forget([key_of(3)])
            assert known(store) == {0, 1, 2, 4, 5, 6, 7}
            writing = store.write(key_of(9), payload(9), nothing)
            assert within(LONG, writing.result)
            gate.set()
            slow.result()
            also.result()
            assert np.array_equal(into, payload(3))
            assert (unused == 9).all()
            finish(store)
        assert not store.stats.io_failures


def test_a_segment_goes_only_when_nobody_reads_it(tmp_path: Path) -> None:
    gate = threading.Event()
    with opened(tmp_path) as store:
        put(store, range(9))
        into = memory()
        task = store.read(key_of(3), into, gate.wait)
        store.forget(map(key_of, range(8)))
        late = time.monotonic() + LONG
        while len(store._upkeep.chores) and time.monotonic() < late:
            store.poll()
        assert len(files(tmp_path)) == 2
        gate.set()
        task.result()
        assert np.array_equal(into, payload(3))
        finish(store)
        assert len(files(tmp_path)) == 1


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_disk_that_fails_to_be_read_is_left_alone_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, range(4))
    clock = Clock()
    with opened(tmp_path, clock=clock) as store, caplog.at_level(logging.WARNING, LOGGER):
        with failing("preadv", errno.EIO) as count:
            for tried in range(FAILURES):
                assert not store.stats.reads_off
                assert key_of(1) in store
                assert not holds(store, 1)
                assert store.stats.io_failures == tried + 1
            assert store.stats.reads_off
            assert not store.stats.writes_off
            assert "reading KV in" in caplog.text
            assert "off for 60 s" in caplog.text
            before = count[0]
            assert not holds(store, 1)
            assert key_of(1) not in store
            assert count[0] == before
            put(store, [7])
            clock.now += RETRY_SECONDS
            assert not holds(store, 1)  # Tried once, and off again.
            assert count[0] == before + 1
            assert store.stats.reads_off
        clock.now += RETRY_SECONDS
        assert held(store, range(8)) == {0, 1, 2, 3, 7}
        assert "works again" in caplog.text
        assert len(caplog.records) == 3


def test_a_disk_that_fails_to_be_written_is_left_alone_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as store, caplog.at_level(logging.WARNING, LOGGER):
        put(store, range(4))
        with failing("pwrite", errno.ENOSPC) as count:
            for number in range(10, 10 + FAILURES):
                assert not store.stats.writes_off
                with pytest.raises(StoreError, match="No space left"):
                    put(store, [number])
                finish(store)
            assert store.stats.writes_off
            assert "writing KV in" in caplog.text
            before = count[0]
            with pytest.raises(StoreError, match="off, since writing to it has failed"):
                put(store, [30])
            assert count[0] == before
        assert held(store, range(4)) == set(range(4))
        clock.now += RETRY_SECONDS
        put(store, [31])
        assert held(store, range(32)) == {0, 1, 2, 3, 31}


def test_a_directory_that_vanishes_is_misses_and_failed_writes(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(8))
        store.path.rename(tmp_path / "away")
        assert held(store, range(8)) == set()
        with pytest.raises(StoreError, match="No such file"):
            put(store, [9])
        finish(store)
        (tmp_path / "away").rename(store.path)
        put(store, [10])
        assert held(store, range(11)) == {*range(8), 10} if not store.stats.reads_off else True
    with opened(tmp_path) as store:
        assert held(store, range(11)) >= {*range(8)}


def test_directories_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    """With what to do; nothing of what is there is touched."""
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StoreError,
        match="cannot be written: Not a directory; free space or change its permissions, or name another "
        "kv_directory",
    ):
        open_store(tmp_path / "file")
    filled(tmp_path, range(8))
    for call, fault in (
        ("open", errno.EACCES),
        ("open", errno.EMFILE),
        ("ftruncate", errno.EROFS),
        ("preadv", errno.EIO),
        ("scandir", errno.EIO),
    ):
        with failing(call, fault), pytest.raises(StoreError, match=os.strerror(fault)), no_thread_left():
            open_store(tmp_path)
    of_journal = lambda file, *_: os.readlink(f"/proc/self/fd/{file}").endswith(JOURNAL)  # noqa: E731
    with failing("preadv", errno.EIO, of_journal), pytest.raises(StoreError, match="Input/output error"):
        open_store(tmp_path)
    with opened(tmp_path) as store:
        assert held(store, range(8)) == set(range(8))


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    """KV says what was asked."""
    filled(tmp_path, range(3))
    path = directory_of(tmp_path, IDENTITY)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.name.split("-")[-1] for file in path.iterdir()} == {JOURNAL, LOCK, ABOUT, "8.segment"}
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}


# ---- compaction


def checkered(store: BlockStore) -> set[int]:
    """A full store, of which three of four records are forgotten: what is left."""
    put(store, range(store.capacity))
    left = {number for number in range(store.capacity) if number % 4 == 0}
    store.forget(key_of(number) for number in range(store.capacity) if number not in left)
    return left


def refill(store: BlockStore, first: int, count: int) -> set[int]:
    """Until there are so many records, whatever a write says meanwhile."""
    late, numbers = time.monotonic() + LONG, range(first, first + count)
    for number in numbers:
        while isinstance((task := store.write(key_of(number), payload(number), nothing)).fault, StoreFull):
            assert time.monotonic() < late, "no room comes of compaction"
            finish(store)
        task.result()
        store.poll()
    finish(store)
    return set(numbers)


def test_compaction_moves_what_is_left_and_makes_room(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        left = checkered(store)
        new = refill(store, 1000, store.capacity - len(left))
        assert store.stats.compactions > 1
        assert held(store, range(1100)) == known(store) == left | new
        assert not store.stats.checksum_failures
    with opened(tmp_path) as store:
        assert held(store, range(1100)) == known(store) == left | new


def test_what_is_forgotten_or_damaged_while_it_is_moved(tmp_path: Path) -> None:
    """The one does not come back; the other is found out and not moved on."""
    gate, begun = threading.Event(), threading.Event()
    right = SegmentFile.read

    def slow(file: SegmentFile, slot: int, into: memoryview) -> None:
        if threading.current_thread().name.endswith("keeper"):
            begun.set()
            assert gate.wait(LONG)
        right(file, slot, into)

    with opened(tmp_path) as store:
        left = sorted(checkered(store))
        with patch.object(SegmentFile, "read", slow):
            number = 1000
            while not (moves := [chore for chore in store._upkeep.chores if isinstance(chore, Move)]):
                store.write(key_of(number), payload(number), nothing).result()
                store.poll()
                number += 1
            assert begun.wait(LONG)
            [move] = moves
            moving = [number_of(item.key) for _, item, _ in move.wanted]
            assert len(moving) > 3
            assert held(store, left) == set(left)
            store.forget([key_of(moving[0]), key_of(moving[1])])
            store.write(key_of(moving[1]), payload(moving[1]), nothing).result()
            flip(*place_of(store, moving[2]))
            gate.set()
            finish(store)
        expected = set(left) - {moving[0], moving[2]}
        assert known(store) & set(left) | {moving[1]} == expected
        assert held(store, expected - {moving[1]}) == expected - {moving[1]}
        assert store.stats.checksum_failures == 1
    with opened(tmp_path) as store:
        assert known(store) & set(left) | {moving[1]} == expected
        assert held(store, expected - {moving[1]}) == expected - {moving[1]}


def test_what_cannot_be_read_now_is_not_compacted_away(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        left = checkered(store)
        with failing("preadv", errno.EIO):
            with suppress(StoreFull):
                put(store, range(1000, 1000 + store.capacity))
            finish(store)  # Compaction may not have begun when there is no room any more.
        assert left <= known(store)
        assert held(store, left) == left
        assert store.stats.io_failures
        assert not store.stats.quarantined


def test_compaction_on_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        left = checkered(store)
        with failing("posix_fallocate", errno.ENOSPC):
            for number in range(1000, 1100):
                store.write(key_of(number), payload(number), nothing).wait()
                finish(store)
        assert held(store, left) == left
        assert store.stats.writes_off
    with opened(tmp_path) as store:
        assert left <= held(store, range(1100)) == known(store)
        assert real(store.path) <= CAP


# ---- any order of anything


class Life(RuleBasedStateMachine):
    """A store beside a dictionary, under everything that may happen to it. A read gives the right bytes or
    none, and none only for a reason: `must` are the records for which there is no such reason."""

    @initialize()
    def begin(self) -> None:
        self.folder = TemporaryDirectory()
        self.lives, self.now, self.resting = 0, 0.0, False
        self.must: set[int] = set()
        self.may: set[int] = set()
        self.pending: dict[int, Task] = {}
        self.damaged: set[int] = set()
        self.fault: tuple[str, int] | None = None
        self.open()

    @property
    def directory(self) -> Path:
        return Path(self.folder.name) / str(self.lives)

    def clock(self) -> float:
        """So fast that nothing stays off, but for a rest: a disk that fails is tried again and again, and
        there would be none."""
        self.now += 0 if self.resting else 2 * RETRY_SECONDS
        return self.now

    def open(self) -> None:
        self.store = open_store(self.directory, 360 << 10, clock=self.clock)
        self.take_in()

    @contextmanager
    def faulty(self) -> Iterator[None]:
        if self.fault is None:
            yield
        else:
            with failing(*self.fault):
                yield
                store = self.store
                for operation in (*store._writes.values(), *store._reads, *store._upkeep.chores):
                    operation.task.wait()

    def take_in(self) -> None:
        for number, task in list(self.pending.items()):
            if task.done:
                del self.pending[number]
                if task.fault is None:
                    self.must.add(number)
        self.store.poll()

    @rule(numbers=st.sets(st.integers(0, 60), min_size=1, max_size=9), wait=st.booleans())
    def write(self, numbers: set[int], wait: bool) -> None:
        with self.faulty():
            for number in numbers:
                was = key_of(number) in self.store
                task = self.store.write(key_of(number), payload(number), nothing)
                self.may.add(number)
                if not was and not (task.done and task.fault):
                    self.pending[number] = task
                    self.damaged.discard(number)
                if wait:
                    task.wait()
        self.take_in()

    @rule(number=st.integers(0, 60))
    def read(self, number: int) -> None:
        self.take_in()
        with self.faulty():
            found = holds(self.store, number)
        assert found <= (number in self.may)
        if number in self.must and self.fault is None:
            assert found == (number not in self.damaged)
        if number in self.damaged:
            assert not found
            if key_of(number) not in self.store:
                self.must.discard(number)

    @rule(numbers=st.sets(st.integers(0, 60), min_size=1, max_size=20))
    def forget(self, numbers: set[int]) -> None:
        for number in numbers:
            self.pending.pop(number, None)
        self.must -= numbers
        with self.faulty():
            self.store.forget(map(key_of, numbers))
        assert not numbers & known(self.store)

    @rule()
    def rest(self) -> None:
        self.resting = True
        with self.faulty():
            finish(self.store)
        self.resting = False
        self.take_in()

    @rule(pick=st.integers(0, 60), byte=st.integers(0, PAGE - 1))
    def damage(self, pick: int, byte: int) -> None:
        finish(self.store)
        self.take_in()
        if (number := pick) in known(self.store) - self.damaged:
            flip(*((path := place_of(self.store, number))[0], path[1] + byte))
            self.damaged.add(number)

    @rule(
        fault=st.sampled_from(
            [
                None,
                None,
                ("pwrite", errno.ENOSPC),
                ("preadv", errno.EIO),
                ("open", errno.EMFILE),
                ("unlink", errno.EPERM),
                ("posix_fallocate", errno.EDQUOT),
                ("rename", errno.EIO),
                ("fsync", errno.EIO),
            ]
        )
    )
    def change_disk(self, fault: tuple[str, int] | None) -> None:
        self.fault = fault

    @rule()
    def reopen(self) -> None:
        with self.faulty():
            self.store.close()
        self.fault = None
        self.take_in()
        self.open()

    @rule()
    def crash(self) -> None:
        """The directory as it is in the midst of what is going on."""
        due = {number for number, task in self.pending.items() if task.done and task.fault is None}
        old, self.lives = self.directory, self.lives + 1
        for _ in range(50):
            with suppress(
                shutil.Error, FileNotFoundError
            ):  # A file that went while it was being listed: no moment at all.
                shutil.copytree(old, self.directory)
                break
            shutil.rmtree(self.directory)
        self.store.close()
        self.pending, self.fault = {}, None
        self.must |= due
        shutil.rmtree(old)
        self.open()

    @invariant()
    def is_within_bounds(self) -> None:
        assert known(self.store) >= self.must - self.damaged
        assert known(self.store) <= self.may
        assert len(self.store) <= self.store.capacity
        assert real(self.store.path) <= 360 << 10

    def teardown(self) -> None:
        if hasattr(self, "store"):
            assert within(LONG, self.store.close)
            with opened(self.directory, 360 << 10) as store:
                assert known(store) >= self.must - self.damaged
                assert held(store, range(61)) >= self.must - self.damaged
            self.folder.cleanup()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=int(os.environ.get("PENSTOCK_LIVES", "25")), stateful_step_count=40, deadline=None
)


# ---- interrupts


def calm(store: BlockStore, noted: list[Task]) -> None:
    """After an interrupt: whatever was noted comes to an end."""
    store.poll()
    for task in noted:
        assert within(LONG, task.wait)
    finish(store)


def test_an_interrupt_of_a_write_leaves_nothing_behind(tmp_path: Path) -> None:
    """At any place. What was there is there; the record is whole or not there, and may be written; what it
    was written from is free."""
    filled(tmp_path / "right", range(5))
    early = late = 0
    for place in range(1000):
        noted: list[Task] = []
        copy = tmp_path / str(place)
        shutil.copytree(tmp_path / "right", copy)
        with opened(copy) as store:
            cut = cut_short(partial(store.write, key_of(9), payload(9), nothing, noted), place)
            early, late = early + (cut and not noted), late + (cut and bool(noted))
            calm(store, noted)
            assert (9 in known(store)) <= bool(noted)
            assert holds(store, 9) == (9 in known(store))
            if not cut:
                break
            put(store, [9])
            assert held(store, range(10)) == {*range(5), 9}
            assert not store.stats.checksum_failures
        shutil.rmtree(copy)
    assert 9 in known(store)
    assert early > 40
    assert late > 2


def test_an_interrupt_of_a_read_leaves_nothing_behind(tmp_path: Path) -> None:
    """What it was to be read into is known to be in use, and comes to be free."""
    late = 0
    with opened(tmp_path) as store:
        put(store, range(5))
        for place in range(1000):
            noted: list[Task] = []
            into = memory()
            cut = cut_short(partial(store.read, key_of(3), into, nothing, noted), place)
            late += cut and bool(noted)
            calm(store, noted)
            if not noted:
                assert (into == 0xEE).all()
            elif noted[0].fault is None:
                assert np.array_equal(into, payload(3))
            else:
                assert isinstance(noted[0].fault, CalledOff)
            assert held(store, range(5)) == set(range(5))
            if not cut:
                break
        assert place > 30
        assert late > 2
        assert noted[0].fault is None


def test_an_interrupt_of_forgetting_leaves_nothing_behind(tmp_path: Path) -> None:
    """Others are where they were, though compaction was about to begin; what was to be forgotten can be."""
    with opened(tmp_path / "right", CAP // 2) as store:
        count = store.capacity
        put(store, range(count))
    gone = set(range(0, count, 2))
    for place in range(0, 5000, 7):
        copy = tmp_path / str(place)
        shutil.copytree(tmp_path / "right", copy)
        with opened(copy, CAP // 2) as store:
            cut = cut_short(partial(store.forget, map(key_of, gone)), place)
            calm(store, [])
            left = set(range(count)) - gone
            assert left <= known(store)
            assert held(store, left) == left
            store.forget(map(key_of, gone))
            assert known(store) == left
            assert refill(store, 1000, len(gone)) <= known(store)
            assert sound(store)
            assert real(store.path) <= CAP // 2
        shutil.rmtree(copy)
        if not cut:
            break
    assert place > 200


def test_an_interrupt_of_taking_in_leaves_nothing_behind(tmp_path: Path) -> None:
    """Of what has been written, moved and found to be damaged."""
    with opened(tmp_path) as store:
        left = checkered(store)
        ends = 0
        for place in range(0, 6000, 11):
            if len(store) >= store.capacity - 2:
                store.forget(key_of(number) for number in sorted(known(store) - left)[::2])
            for number in (1000 + 2 * place, 1001 + 2 * place):
                store.write(key_of(number), payload(number), nothing).wait()
            for chore in store._upkeep.chores:
                chore.task.wait()
            ends += not cut_short(store.poll, place)
            assert left <= known(store)
            if ends > 10 and store.stats.compactions > 10:
                break
        finish(store)
        assert held(store, left) == left
        assert sound(store)
        assert store.stats.compactions
        assert not store.stats.checksum_failures
    with opened(tmp_path) as store:
        assert left <= known(store)
        assert sound(store)


def test_an_interrupt_of_closing_is_made_up_for(tmp_path: Path) -> None:
    """A second call ends what the first has begun: threads, files, the lock. What was published is there."""
    for place in range(0, 2000, 3):
        with no_thread_left():
            store = open_store(tmp_path)
            put(store, range(4))
            store.touch([key_of(1)])
            store.write(key_of(50 + place), payload(50 + place), nothing)
            cut = cut_short(store.close, place)
            assert within(LONG, store.close)
            store.close()
        with opened(tmp_path) as store:
            assert set(range(4)) <= known(store)
            assert sound(store)
            store.forget(map(key_of, known(store) - set(range(4))))
        if not cut:
            break
    assert place > 50


# ---- crashes


class Recorder:
    """Before and in the midst of all that changes the disk, a copy of the directory, as a kill would leave it
    then."""

    CALLS = ("pwrite", "posix_fallocate", "rename", "unlink", "ftruncate", "truncate", "fsync")

    def __init__(self, path: Path, copies: Path, due: Callable[[], set[int]]) -> None:
        self.path, self.copies, self._due = path, copies, due
        self.taken: list[tuple[Path, set[int]]] = []
        self._lock = threading.Lock()

    def _take(self, what: str) -> None:
        due = self._due()
        copy = self.copies / f"{len(self.taken)}-{what}"
        shutil.copytree(self.path, directory_of(copy, IDENTITY))
        self.taken.append((copy, due))

    def _wrap(self, name: str) -> Callable[..., object]:
        right = getattr(os, name)

        def wrapped(*arguments: object, **more: object) -> object:
            with self._lock:
                self._take(name)
                if name == "pwrite":
                    file, data, offset = arguments
                    assert isinstance(data, bytes | memoryview)
                    assert isinstance(file, int)
                    plain = os.open(f"/proc/self/fd/{file}", os.O_WRONLY)  # Half of it would not be aligned.
                    right(plain, data[: len(data) // 2], offset)
                    os.close(plain)
                    self._take("half")
                return right(*arguments, **more)

        return wrapped

    def __enter__(self) -> "Recorder":
        self._patch = patch.multiple(os, **{name: self._wrap(name) for name in self.CALLS})
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def test_a_kill_between_any_two_calls_loses_nothing_that_was_published(tmp_path: Path) -> None:
    """All that a store does, with a copy of its directory at every call and within every write. In each there
    is what had been published and not forgotten, whole; nothing else is wrong either, and the store goes
    on."""
    cap, compactions = 300 << 10, 0
    tasks: dict[int, Task] = {}
    forgotten: set[int] = set()

    def due() -> set[int]:
        return {
            number for number, task in list(tasks.items()) if task.done and task.fault is None
        } - forgotten

    def forget(store: BlockStore, numbers: Iterable[int]) -> None:
        forgotten.update(numbers)
        store.forget(map(key_of, numbers))

    filled(tmp_path / "first", [999], cap=cap)
    with Recorder(directory_of(tmp_path / "first", IDENTITY), tmp_path, due) as recorder:
        for first, count in ((0, 24), (100, 10)):
            with opened(tmp_path / "first", cap) as store:
                for number in range(first, first + count):
                    while isinstance(
                        (task := store.write(key_of(number), payload(number), nothing)).fault, StoreFull
                    ):
                        forget(store, sorted(known(store))[:9:3])
                        finish(store)
                    tasks[number] = task
                    task.wait()
                    store.poll()
                    assert holds(store, number)
                compactions += store.stats.compactions
                forget(store, sorted(known(store))[:2])
    assert compactions
    assert len(recorder.taken) > 200
    assert {copy.name.split("-")[1] for copy, _ in recorder.taken} == {*Recorder.CALLS, "half"}
    seen = 0
    for copy, must in recorder.taken:
        with opened(copy, cap, threads=(1, 1)) as store:
            assert sound(store), copy.name
            assert must <= known(store) <= {*tasks, 999}, copy.name
            assert real(store.path) <= cap
            seen += len(must)
            if seen % 10 == 0:
                assert held(store, known(store)) == known(store)
                assert not store.stats.checksum_failures
            if int(copy.name.split("-")[0]) % 8 == 0:
                refilled(store, 2000, 24, sizes(cap, PAGE).budget)
                assert real(store.path) <= cap
                assert sound(store)
        shutil.rmtree(copy)
    assert seen > 1000


def refilled(store: BlockStore, first: int, count: int, budget: int) -> None:
    """Records that are written while the oldest are forgotten, whenever there is no room: within the budget,
    though a kill in the midst of compaction may have left it without room of its own."""
    late, numbers = time.monotonic() + LONG, range(first, first + count)
    for number in numbers:
        while isinstance((task := store.write(key_of(number), payload(number), nothing)).fault, StoreFull):
            assert time.monotonic() < late, "no room comes of forgetting"
            store.forget(store.keys()[:2])
            assert store._space.taken <= budget
            finish(store)
        task.result()
        store.poll()
        assert store._space.taken <= budget
    finish(store)
    assert set(numbers[-store.capacity // 2 :]) <= known(store)


KILLS = """
import os, random, sys, time
from pathlib import Path
import numpy as np
import stores as ts
from penstock.kv.store.blocks import StoreFull

def child(folder, seed):
    rng = random.Random(seed)
    store = ts.open_store(folder, ts.CAP, threads=(2, 2))
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    first = int(seed) * 100_000
    under_way, compacted, full = {}, 0, False
    for number in range(first, first + 100_000):
        if len(store) + 8 > store.capacity or (full and store.keys()):
            full = False
            gone = rng.sample(store.keys(), min(len(store), rng.choice((1, 5, 20))))
            os.write(log, b"".join(b"f%d\\n" % ts.number_of(key) for key in gone))
            store.forget(gone)
        under_way[number] = store.write(ts.key_of(number), ts.payload(number), lambda: None)
        if store.stats.compactions > compacted:
            compacted += 1
            os.write(log, b"c0\\n")
        for one, task in list(under_way.items()):
            if task.done or len(under_way) > 6:
                task.wait()
                if task.fault is None:
                    os.write(log, b"w%d\\n" % one)
                elif isinstance(task.fault, StoreFull):
                    full = True
                else:
                    os.write(log, b"!%r\\n" % task.fault)
                del under_way[one]

print("ready", flush=True)
for line in sys.stdin:
    folder, seed = line.split()
    process = os.fork()
    if not process:
        try:
            child(Path(folder), seed)
        finally:
            os._exit(1)
    print(process, flush=True)
    sys.stdin.readline()
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def test_killed_at_any_time_it_is_whole(tmp_path: Path) -> None:
    """A process that writes, forgets and compacts is killed again and again, and each finds what the ones
    before have left."""
    assert not files(tmp_path)
    kills = int(os.environ.get("PENSTOCK_KILLS", "12"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    rng = random.Random(2)
    compactions = total = 0
    must: set[int] = set()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with forks.Popen([sys.executable, "-c", KILLS], env=environment, **pipes) as zygote:  # type: ignore[call-overload]
        assert zygote.stdout.readline() == "ready\n"
        for seed in range(kills):
            print(tmp_path, seed, file=zygote.stdin, flush=True)
            child = int(zygote.stdout.readline())
            log, path, lines, late = (
                tmp_path / "log",
                directory_of(tmp_path, IDENTITY),
                rng.randrange(300),
                time.monotonic() + LONG,
            )
            while lines and (not log.exists() or len(log.read_bytes().splitlines()) < lines):
                assert time.monotonic() < late, "a child does nothing"
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            print(file=zygote.stdin, flush=True)
            assert int(zygote.stdout.readline()) == -signal.SIGKILL
            for line in log.read_text().splitlines() if log.exists() else ():
                kind, number = line[0], int(line[1:])  # Or an error, in words.
                compactions += kind == "c"
                if kind == "w":
                    must.add(number)
                elif kind == "f":
                    must.discard(number)
            log.unlink(missing_ok=True)
            assert not path.exists() or real(path) <= CAP
            with opened(tmp_path, threads=(1, 1)) as store:
                found = held(store, known(store))
                assert found == known(store)
                assert must <= found
                assert not store.stats.checksum_failures
                must, total = found, total + len(found)
        zygote.stdin.close()
    assert total > kills * 5
    assert compactions > kills // 4


def test_what_is_forgotten_while_it_is_written_may_be_written_again(tmp_path: Path) -> None:
    """The same write serves, and its record is found after all."""
    gate = threading.Event()
    with opened(tmp_path) as store:
        first = store.write(key_of(1), payload(1), gate.wait)
        store.forget([key_of(1)])
        assert store.write(key_of(1), payload(1), nothing) is first
        gate.set()
        first.result()
        finish(store)
        assert known(store) == held(store, [1]) == {1}
    with opened(tmp_path) as store:
        assert known(store) == held(store, [1]) == {1}


@pytest.mark.parametrize("inner", [False, True], ids=["the directory", "the store's own"])
@pytest.mark.parametrize("mode", [0o770, 0o707], ids=["group", "anybody"])
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, inner: bool, mode: int) -> None:
    directory = tmp_path / "kv"
    open_store(directory).close()
    open_to_all = directory_of(directory, IDENTITY) if inner else directory
    open_to_all.chmod(mode)
    for read_only in (False, True):
        with pytest.raises(StoreError, match=re.escape(f"others may write to {open_to_all}")):
            open_store(directory, read_only=read_only)
    open_to_all.chmod(0o755)
    open_store(directory).close()


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(tmp_path / "kv").close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for read_only in (False, True):
        with pytest.raises(StoreError, match=f"belongs to user {os.getuid()}"):
            open_store(tmp_path / "kv", read_only=read_only)


def test_what_it_makes_nobody_else_may_write_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        open_store(tmp_path / "new" / "kv").close()
    finally:
        os.umask(before)
    open_store(tmp_path / "new" / "kv").close()
    for path in (tmp_path / "new" / "kv").rglob("*"):
        assert not path.stat().st_mode & 0o022, path


def test_forged_records_are_not_served(tmp_path: Path) -> None:
    """By somebody who may write all files and knows all that is in them and how it is laid out, but for the
    key."""
    filled(tmp_path, range(20))
    forger = Seal(bytes.fromhex(directory_of(tmp_path).name.partition("-")[2]), bytes(32))
    with opened(tmp_path) as store:
        assert store._journal is not None
        places = {number: place_of(store, number) for number in range(18)}
        items = []
        for number, (path, at) in places.items():
            data = payload(number, salt=1)
            with path.open("r+b") as file:
                file.seek(at)
                file.write(data)
            segment, slot = store._space.find(store._index[key_of(number)])
            items.append(
                replace(segment.item(key_of(number), slot), seal=forger.of(key_of(number), data.data))
            )
        store._journal.append(Kind.WRITTEN, items)
    with opened(tmp_path) as store:
        assert held(store, range(20)) == {18, 19}
        assert store.stats.quarantined == 18
