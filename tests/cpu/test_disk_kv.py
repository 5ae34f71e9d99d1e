"""KV on disk comes back as it was written or not at all, whatever is late, dropped, damaged or broken off;
and each wait is needed."""

import contextlib
import errno
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from io import FileIO
from itertools import pairwise, product
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from layouts import heads_of, kv_of_heads
from penstock import LLM, Completion, SamplingParams
from penstock.arch.layout import KVLayout
from penstock.base.errors import DeviceError, EngineClosedError
from penstock.engine.engine import Step
from penstock.kv.movement import staging
from penstock.kv.movement.carrier import Carrier, CarrierRoom
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.rows import Run
from penstock.kv.movement.sizes import Disk, record_bytes
from penstock.kv.movement.staging import ReadAhead, Slots, WriteBehind
from penstock.kv.movement.tiles import Outbox, Streams, Tile, TileRing
from penstock.kv.store import diskpool
from penstock.kv.store.diskpool import READERS, DiskPool, LostKV, Rows
from penstock.memory import writing
from penstock.memory.disk import DirectFile
from penstock.memory.streams import CallerStream, HostTicket, Stream, ThreadStream, Ticket, streams_both_ways
from penstock.memory.tasks import Task, wait
from penstock.step.plan import HostBlockId, Plan
from streams import (
    BRIEF,
    CPU,
    LONG,
    OURS_AND_LOCKS,
    Gates,
    cut_short,
    everywhere,
    no_thread_left,
    random_delays,
    within,
)

LAYOUT = kv_of_heads(layers=3, block_size=4, kv_heads=2, head_dim=2, dtype="float16")
BLOCKS = 24
PAGE = 4096
"""Bytes of a record."""


def nothing() -> None: ...


def memory(disk: DiskPool, count: int, seed: int | None = None) -> Rows:
    """Records, with bytes that look like no others."""
    rows = Slots(disk, 1, count, CPU).rows[0]
    if seed is not None:
        rows[:] = np.random.default_rng((seed, *rows.shape)).integers(0, 256, rows.shape, np.uint8)
    return rows


@contextmanager
def opened(directory: Path, layout: KVLayout = LAYOUT, blocks: int = BLOCKS) -> Iterator[DiskPool]:
    with no_thread_left():
        disk = DiskPool(layout, blocks, directory)
        try:
            yield disk
        finally:
            assert within(LONG, disk.close)


def written(
    disk: DiskPool, layer: int, first: int, rows: Rows, ready: Callable[[], object] = nothing
) -> list[Task]:
    tasks: list[Task] = []
    disk.write(layer, first, rows, ready, tasks)
    return tasks


def asked(disk: DiskPool, layer: int, first: int, rows: Rows) -> list[Task]:
    tasks: list[Task] = []
    disk.read(layer, first, rows, nothing, tasks)
    return tasks


def done(tasks: Sequence[Task], seconds: float = LONG) -> bool:
    return within(seconds, partial(wait, tasks))


def put(disk: DiskPool, layer: int, first: int, rows: Rows) -> None:
    assert done(written(disk, layer, first, rows))


def got(disk: DiskPool, layer: int, first: int, count: int) -> Rows:
    """What is read. Raises LostKV."""
    rows = memory(disk, count)
    for one in asked(disk, layer, first, rows):
        assert within(LONG, one.result)
    return rows


def same(disk: DiskPool, found: Rows, expected: Rows) -> bool:
    return np.array_equal(found[:, : disk._content], expected[:, : disk._content])


def holds(disk: DiskPool, layer: int, first: int, expected: Rows) -> bool:
    try:
        return same(disk, got(disk, layer, first, len(expected)), expected)
    except LostKV:
        return False


def place(layer: int, block: int) -> int:
    """Byte of the record of LAYOUT."""
    return (layer * BLOCKS + block) * PAGE


def flip(disk: DiskPool, byte: int, bit: int = 0) -> None:
    with open(f"/proc/self/fd/{disk._out.fileno()}", "r+b", buffering=0) as file:
        (old,) = os.pread(file.fileno(), 1, byte)
        os.pwrite(file.fileno(), bytes([old ^ 1 << bit]), byte)


def descriptors(directory: Path) -> list[str]:
    """What this process has open there."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # That by which the folder was listed.
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(f"{directory}/")]


def broken_writes(disk: DiskPool) -> None:
    """From now on the device is full."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, disk._out.fileno())
    os.close(full)


@contextmanager
def slow_disk(gates: Gates) -> Iterator[None]:
    """Reads and writes are places: ("read", byte) and ("write", byte)."""
    write, read = diskpool.write_all, DirectFile.read_direct

    def late_write(plain: FileIO, data: memoryview, offset: int, direct: FileIO) -> None:
        gates.enter(("write", offset))
        write(plain, data, offset, direct)
        gates.leave(("write", offset))

    def late_read(file: DirectFile, buffer: memoryview, offset: int) -> None:
        gates.enter(("read", offset))
        read(file, buffer, offset)
        gates.leave(("read", offset))

    with patch.object(diskpool, "write_all", late_write), patch.object(DirectFile, "read_direct", late_read):
        yield


def without(
    mutant: bool, owner: object, name: str, instead: Callable[..., object]
) -> AbstractContextManager[object]:
    return patch.object(owner, name, instead) if mutant else nullcontext()


def both(right: Callable[[bool], bool]) -> None:
    """`right`, given whether to leave the wait out, says whether all bytes were right."""
    assert right(False)
    assert not right(True)


def passes(gates: Gates, where: Hashable, mutant: bool) -> None:
    """A place that is passed without the wait, and not with it."""
    assert gates.passes(where, LONG if mutant else BRIEF) == mutant


# ---- the pool


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize(
    ("layout", "record"),
    [
        (LAYOUT, PAGE),
        (kv_of_heads(layers=2, block_size=16, kv_heads=4, head_dim=16, dtype="float16"), PAGE),
        (kv_of_heads(layers=2, block_size=8, kv_heads=3, head_dim=32, dtype="float32"), 2 * PAGE),
    ],
    ids=["less than a page", "a page", "more than a page"],
)
def test_what_is_written_comes_back(
    tmp_path: Path, layout: KVLayout, record: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In runs of any length, in any order, in tasks of three records at most, whether or not the page cache
    can be passed by."""
    open_file = os.open

    def without_direct(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT and not direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, *more)

    monkeypatch.setattr(os, "open", without_direct)
    monkeypatch.setattr(diskpool, "DIRECT_BYTES", 3 * record)
    rng = np.random.default_rng(record)

    def runs() -> Iterator[tuple[int, int, int]]:
        """Each record of each layer once: a layer, the first block, the one behind the last."""
        found = []
        for layer in range(layout.layers):
            cuts = sorted({0, BLOCKS, *rng.integers(1, BLOCKS, 5).tolist()})
            found += [(layer, start, stop) for start, stop in pairwise(cuts)]
        return (found[at] for at in rng.permutation(len(found)))

    with opened(tmp_path, layout) as disk:
        assert disk.record == record_bytes(layout) == record
        whole = memory(disk, layout.layers * BLOCKS, 1).reshape(layout.layers, BLOCKS, record)
        for layer, start, stop in runs():
            written(disk, layer, start, whole[layer, start:stop])
        for layer, start, stop in runs():
            assert same(disk, got(disk, layer, start, stop - start), whole[layer, start:stop])
        rests = np.fromfile(f"/proc/self/fd/{disk._out.fileno()}", np.uint8).reshape(whole.shape)
        assert np.array_equal(rests[..., : layout.layer_bytes], whole[..., : layout.layer_bytes])
        assert os.fstat(disk._out.fileno()).st_blocks * 512 >= whole.size, "room that may be taken by others"


def test_a_later_write_of_a_record_wins(tmp_path: Path) -> None:
    def right(mutant: bool) -> bool:
        slow = threading.Event()
        with opened(tmp_path) as disk, without(mutant, DiskPool, "_pending", lambda disk, layer: []):
            old, new, other = (memory(disk, 4, seed) for seed in range(3))
            first = written(disk, 1, 3, old, partial(slow.wait, LONG))
            second = written(disk, 1, 5, new)
            put(disk, 2, 5, other)
            assert done(second, LONG if mutant else BRIEF) == mutant
            slow.set()
            assert done([*first, *second])
            assert holds(disk, 2, 5, other)
            return holds(disk, 1, 3, np.concatenate((old[:2], new)))

    both(right)


def test_a_read_sees_what_was_written_before_it_was_asked(tmp_path: Path) -> None:
    def right(mutant: bool) -> bool:
        slow = threading.Event()
        with opened(tmp_path) as disk, without(mutant, DiskPool, "_pending", lambda disk, layer: []):
            old, new, found = memory(disk, 3, 1), memory(disk, 3, 2), memory(disk, 3)
            put(disk, 1, 4, old)
            write = written(disk, 1, 4, new, partial(slow.wait, LONG))
            read = asked(disk, 1, 4, found)
            assert done(read, LONG if mutant else BRIEF) == mutant
            slow.set()
            assert done([*write, *read])
            return read[0].fault is None and same(disk, found, new)

    both(right)


def test_what_was_never_written_is_lost(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        put(disk, 1, 3, memory(disk, 2, 1))
        for first, count, lost in ((5, 1, 5), (2, 2, 2), (4, 2, 5)):
            with pytest.raises(
                LostKV,
                match=f"layer 1, block {lost} on disk, at byte {place(1, lost)}, is not what was written",
            ):
                got(disk, 1, first, count)
        with pytest.raises(LostKV, match="layer 0, block 3 "):
            got(disk, 0, 3, 1)


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("byte", [0, LAYOUT.layer_bytes // 2, LAYOUT.layer_bytes - 1])
def test_a_bit_that_turns_is_noticed(tmp_path: Path, byte: int, bit: int) -> None:
    with opened(tmp_path) as disk:
        rows = memory(disk, 4, 1)
        put(disk, 2, 6, rows)
        flip(disk, place(2, 8) + byte, bit)
        for first, count in ((8, 1), (6, 4)):
            with pytest.raises(
                LostKV, match=f"layer 2, block 8 on disk, at byte {place(2, 8)}, is not what was written"
            ):
                got(disk, 2, first, count)
        assert holds(disk, 2, 6, rows[:2])
        assert holds(disk, 2, 9, rows[3:])
        put(disk, 2, 8, rows[:1])
        assert holds(disk, 2, 8, rows[:1])


def test_a_file_that_is_cut_short_loses_what_lay_behind(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        rows = memory(disk, 4, 1)
        put(disk, 1, 3, rows)
        os.ftruncate(disk._out.fileno(), place(1, 5) + 8)
        with pytest.raises(
            LostKV, match=f"layer 1, blocks 3 to 6 on disk: .*at byte {place(1, 5) + 8}: it ends there"
        ):
            got(disk, 1, 3, 4)
        assert holds(disk, 1, 3, rows[:2])


@pytest.mark.parametrize("how", ["full", "not for writing"])
def test_what_could_not_be_written_is_lost(tmp_path: Path, how: str) -> None:
    """And what was there before is not taken for it. When the disk has recovered, so have those who write."""
    with opened(tmp_path) as disk:
        old, new = memory(disk, 2, 1), memory(disk, 2, 2)
        put(disk, 1, 3, old)
        out = os.dup(disk._out.fileno())
        if how == "full":
            broken_writes(disk)
        else:
            os.dup2(disk._file._fd, disk._out.fileno())
        put(disk, 1, 4, new)
        assert holds(disk, 1, 3, old[:1])
        for block in (4, 5):
            with pytest.raises(LostKV, match=f"layer 1, block {block} on disk, at byte {place(1, block)}"):
                got(disk, 1, block, 1)
        os.dup2(out, disk._out.fileno())
        os.close(out)
        put(disk, 1, 4, new)
        assert holds(disk, 1, 4, new)


@pytest.mark.parametrize(
    ("fault", "there"),
    [(errno.EINVAL, True), (errno.EOPNOTSUPP, True), (errno.EFAULT, True), (errno.EIO, False)],
    ids=lambda one: str(one),
)
def test_what_cannot_be_written_past_the_page_cache_is_written_through_it(
    tmp_path: Path, fault: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second request on. A disk that fails is another matter."""
    write = os.pwrite
    with opened(tmp_path) as disk:

        def refused(file: int, data: memoryview, offset: int) -> int:
            if file == disk._out.fileno() and offset != place(1, 3):
                raise OSError(fault, os.strerror(fault))
            return write(file, data, offset)

        monkeypatch.setattr(os, "pwrite", refused)
        monkeypatch.setattr(diskpool, "DIRECT_BYTES", PAGE)
        monkeypatch.setattr(writing, "DIRECT_BYTES", PAGE)
        rows = memory(disk, 3, 1)
        with nullcontext() if there else pytest.raises(OSError, match=os.strerror(fault)):
            diskpool.write_all(disk._plain, rows.reshape(-1).data, place(1, 3), disk._out)
        put(disk, 1, 3, rows)
        assert holds(disk, 1, 3, rows) == there
        assert holds(disk, 1, 3, rows[:1])


def test_memory_from_which_no_disk_is_written_directly_is_written_all_the_same(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        rows = np.random.default_rng(0).integers(0, 256, 2 * PAGE + 1, np.uint8)[1:].reshape(2, PAGE)
        put(disk, 1, 3, rows)
        assert holds(disk, 1, 3, rows)


def test_who_cannot_have_room_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with no_thread_left():
        for directory, blocks, message in (
            (file, BLOCKS, f"288 KiB for KV cannot be reserved in {file}: .*; name another kv_directory"),
            (Path("/proc/nowhere"), BLOCKS, "in /proc/nowhere: .*; name another kv_directory"),
            (tmp_path, 1 << 40, f"in {tmp_path}: File too large; lower disk_kv_memory"),
        ):
            with pytest.raises(DeviceError, match=message):
                DiskPool(LAYOUT, blocks, directory)
    assert os.listdir(tmp_path) == ["file"]
    assert not descriptors(tmp_path)


@pytest.mark.parametrize("nameless", [True, False])
def test_room_is_made_in_a_file_without_a_name(
    tmp_path: Path, nameless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the file system can make such: a process that is killed meanwhile leaves nothing."""
    open_file, make_room, names = os.open, os.posix_fallocate, []

    def without_nameless(path: str | Path, flags: int, *more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return open_file(path, flags, *more)

    def watched(file: int, start: int, size: int) -> None:
        names.append(os.listdir(tmp_path))
        make_room(file, start, size)

    def never(**_: object) -> None:
        pytest.fail("a name, where there need be none")

    if nameless:
        try:
            os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR))
        except OSError as fault:
            pytest.skip(f"{tmp_path}: {fault}")
        monkeypatch.setattr(tempfile, "mkstemp", never)
    else:
        monkeypatch.setattr(os, "open", without_nameless)
    monkeypatch.setattr(os, "posix_fallocate", watched)
    with opened(tmp_path) as disk:
        assert names == [[]]
        rows = memory(disk, BLOCKS, 1)
        put(disk, 1, 0, rows)
        assert holds(disk, 1, 0, rows)
    assert not descriptors(tmp_path)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """No name in the directory even while it is in use, and no room taken afterwards."""
    directory = tmp_path / "to be" / "made"
    with opened(directory) as disk:
        put(disk, 0, 0, memory(disk, BLOCKS, 1))
        assert os.listdir(directory) == []
        assert len(descriptors(directory)) == 4
        disk.close()
        assert not descriptors(directory)
    assert os.listdir(directory) == []


@pytest.mark.parametrize("seed", range(4))
def test_close_at_any_moment(tmp_path: Path, seed: int) -> None:
    """With more under way than there are threads, and with writes that wait for others."""
    with slow_disk(Gates(delay=random_delays(seed, ("read", "write"), 3e-3))), opened(tmp_path) as disk:
        rows, into = memory(disk, 4, 1), memory(disk, 4)
        for number in range(10 * seed):
            written(disk, number % 2, number, rows[:2])
            asked(disk, number % 3, number, into)
        assert within(LONG, disk.close)
        assert not descriptors(tmp_path)


# ---- slots


class Line(ThreadStream):
    """A stream under test: places are (name, number of the copy). deaf: it does not wait; blind: nobody waits
    for it."""

    def __init__(self, name: str, gates: Gates) -> None:
        super().__init__(f"{name} under test")
        self.name, self.gates = name, gates
        self.deaf = self.blind = False
        self.copies = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.at_place(self.copies, partial(np.copyto, target.numpy(), source.numpy()))
        self.copies += 1

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        self.copy(target, source)

    def at_place(self, number: int, work: Callable[[], object], name: str | None = None) -> None:
        where = name or self.name, number
        self.run(lambda: self.gates.enter(where))
        self.run(work)
        self.run(lambda: self.gates.leave(where))

    def wait(self, ticket: Ticket) -> None:
        if not self.deaf:
            super().wait(ticket)

    def mark(self) -> Ticket:
        if self.blind:
            ticket = HostTicket()
            ticket.reach()
            return ticket
        return super().mark()


Wanted = Sequence[tuple[int, Sequence[Run]]]


@dataclass
class Reading:
    """A ReadAhead over a layer's blocks that hold known bytes, and what was copied out of its slots."""

    directory: Path
    slots: int = 1
    rows: int = 4
    gates: Gates = field(default_factory=Gates)
    kind: type[ReadAhead] = ReadAhead

    def __enter__(self) -> "Reading":
        self._slow = slow_disk(self.gates)
        self._slow.__enter__()
        self.disk = DiskPool(LAYOUT, BLOCKS, self.directory)
        self.whole = memory(self.disk, LAYOUT.layers * BLOCKS, 1).reshape(LAYOUT.layers, BLOCKS, PAGE)
        for layer, rows in enumerate(self.whole):
            put(self.disk, layer, 0, rows)
        self.copies = Line("copies", self.gates)
        self.ahead = self.kind(self.disk, Slots(self.disk, self.slots, self.rows, CPU), self.copies)
        self.seen: list[tuple[Tensor, Rows]] = []
        return self

    def __exit__(self, *_: object) -> None:
        self.gates.open()
        assert within(LONG, self.disk.close)
        self.copies.close()
        self._slow.__exit__(None, None, None)

    def copy(self, number: int, visit: tuple[int, Sequence[Run]]) -> None:
        layer, runs = visit
        slot = self.ahead.wait(number)
        for at, first, count in runs:
            target = torch.zeros(count, PAGE, dtype=torch.uint8)
            self.copies.copy(target, slot[at : at + count])
            self.seen.append((target, self.whole[layer, first : first + count]))

    def visit(self, number: int, visit: tuple[int, Sequence[Run]]) -> None:
        self.copy(number, visit)
        self.ahead.copied(number, self.copies.mark())

    def step(self, wanted: Wanted) -> None:
        self.ahead.begin(wanted)
        for number, visit in enumerate(wanted):
            self.visit(number, visit)

    def right(self) -> bool:
        ThreadStream.mark(self.copies).wait()
        return all(same(self.disk, found.numpy(), expected) for found, expected in self.seen)


def random_wanted(rng: np.random.Generator, rows: int = 4) -> list[tuple[int, list[Run]]]:
    wanted = []
    for _ in range(rng.integers(0, 9)):
        runs, at = [], int(rng.integers(0, 2))
        while at < rows:
            count = int(rng.integers(1, rows - at + 1))
            runs.append((at, int(rng.integers(0, BLOCKS - count + 1)), count))
            at += count + int(rng.integers(0, 3))
        wanted.append((int(rng.integers(LAYOUT.layers)), runs))
    return wanted


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("late", ["nothing", "read", "copies", 1, 2])
def test_tiles_are_read_ahead_whatever_is_late(tmp_path: Path, slots: int, late: str | int) -> None:
    """Steps may be dropped at any visit, before or after it has been copied, and reads come in several
    tasks."""
    delay = (
        random_delays(late, ("read", "copies"), 1e-3)
        if isinstance(late, int)
        else lambda where: 3e-4 * (where[0] == late)
    )
    rng = np.random.default_rng((slots, len(str(late))))
    with (
        no_thread_left(),
        patch.object(diskpool, "DIRECT_BYTES", 2 * PAGE),
        Reading(tmp_path, slots, gates=Gates(delay=delay)) as reading,
    ):
        for _ in range(12):
            wanted = random_wanted(rng)
            reading.ahead.begin(wanted)
            left = int(rng.integers(len(wanted) + 1))
            for number, visit in enumerate(wanted[:left]):
                reading.visit(number, visit)
            if left < len(wanted) and rng.random() < 0.5:
                reading.copy(left, wanted[left])
        assert reading.right()
        assert reading.seen


@pytest.mark.parametrize("slots", [1, 3])
def test_reads_begin_as_far_ahead_as_there_are_slots(tmp_path: Path, slots: int) -> None:
    wanted = [(0, [(0, block, 1)]) for block in range(6)]
    with Reading(tmp_path, slots, gates=Gates([("copies", 0)])) as reading:
        reading.ahead.begin(wanted)
        for ahead in range(slots):
            assert reading.gates.passes(("read", place(0, ahead)))
        assert not reading.gates.passes(("read", place(0, slots)), BRIEF)
        reading.visit(0, wanted[0])
        assert not reading.gates.passes(("read", place(0, slots)), BRIEF)
        reading.gates.open()
        assert reading.gates.passes(("read", place(0, slots)))
        assert not reading.gates.passes(("read", place(0, slots + 1)), BRIEF)


def test_reads_that_have_not_begun_are_called_off_with_their_step(tmp_path: Path) -> None:
    wanted = [(0, [(0, block, 1)]) for block in range(READERS + 3)]
    gates = Gates([("read", place(0, block)) for block in range(READERS)])
    with Reading(tmp_path, len(wanted), gates=gates) as reading:
        reading.ahead.begin(wanted)
        limit = time.monotonic() + LONG
        while any(
            task._work for tasks in reading.ahead._tasks[:READERS] for task in tasks
        ):  # Or whoever wakes late is free too soon.
            assert time.monotonic() < limit
        reading.ahead.begin([(0, [(0, 20, 1)])])
        gates.open()
        reading.visit(0, (0, [(0, 20, 1)]))
        assert reading.right()
        assert not any(gates.passes(("read", place(0, block)), 0) for block in range(READERS, len(wanted)))


@pytest.mark.parametrize("broken_off", [False, True])
def test_a_slot_must_not_be_read_into_before_it_has_been_copied(tmp_path: Path, broken_off: bool) -> None:
    """Neither by the step that goes on, nor by one that begins when it has been broken off behind the
    copy."""

    def right(mutant: bool) -> bool:
        gates, wanted = Gates([("copies", 0)]), [(0, [(0, 1, 2)]), (0, [(0, 5, 2)])]
        with Reading(tmp_path, gates=gates) as reading:
            reading.copies.blind = mutant
            reading.ahead.begin(wanted)
            if broken_off:
                reading.copy(0, wanted[0])
                reading.ahead.begin(wanted[1:])
            else:
                reading.visit(0, wanted[0])
            passes(gates, ("read", place(0, 5)), mutant)
            gates.open()
            reading.visit(0 if broken_off else 1, wanted[1])
            return reading.right()

    both(right)


def test_a_slot_must_not_be_read_into_while_an_earlier_step_still_does(tmp_path: Path) -> None:
    def right(mutant: bool) -> bool:
        gates, late = Gates([("read", place(0, 1))]), (0, [(0, 1, 2)])
        with Reading(tmp_path, gates=gates) as reading, without(mutant, staging, "wait", lambda tasks: None):
            reading.ahead.begin([late])
            limit = time.monotonic() + LONG
            while reading.ahead._tasks[0][0]._work:
                assert time.monotonic() < limit
            reading.ahead.begin([(0, [(0, 5, 2)])])
            passes(gates, ("read", place(0, 5)), mutant)
            gates.open()
            assert gates.passes(("read", place(0, 1)))
            reading.visit(0, (0, [(0, 5, 2)]))
            return reading.right()

    both(right)


def test_a_slot_must_not_be_copied_before_all_of_it_has_been_read(tmp_path: Path) -> None:
    class Hasty(ReadAhead):
        def wait(self, number: int) -> Tensor:
            self._step.tasks[number] = []
            return super().wait(number)

    def right(mutant: bool) -> bool:
        gates, visit = Gates([("read", place(0, 7))]), (0, [(0, 2, 1), (1, 5, 3)])
        kind = Hasty if mutant else ReadAhead
        with (
            patch.object(diskpool, "DIRECT_BYTES", PAGE),
            Reading(tmp_path, gates=gates, kind=kind) as reading,
        ):
            reading.ahead.begin([visit])
            assert gates.passes(("read", place(0, 6)))
            host = threading.Thread(target=reading.visit, args=(0, visit))
            host.start()
            passes(gates, ("copies", 1), mutant)
            gates.open()
            host.join()
            return reading.right()

    both(right)


@dataclass
class Writing:
    """A WriteBehind, and a stream that fills its slots."""

    directory: Path
    slots: int = 1
    gates: Gates = field(default_factory=Gates)

    def __enter__(self) -> "Writing":
        self._slow = slow_disk(self.gates)
        self._slow.__enter__()
        self.disk = DiskPool(LAYOUT, BLOCKS, self.directory)
        self.out = Line("out", self.gates)
        self.behind = WriteBehind(self.disk, Slots(self.disk, self.slots, 4, CPU), self.out)
        self.sent: dict[int, Rows] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self.gates.open()
        assert within(LONG, self.disk.close)
        self.out.close()
        self._slow.__exit__(None, None, None)

    def send(self, block: int, count: int = 1, at: int = 0) -> None:
        """To layers 0 and 1, which get the same."""
        rows = torch.from_numpy(memory(self.disk, count, len(self.sent)))
        self.out.copy(self.behind.claim()[at : at + count], rows)
        self.behind.write([(layer, (at, block, count)) for layer in range(2)])
        self.sent[block] = rows.numpy()

    def right(self) -> bool:
        return all(
            holds(self.disk, layer, block, rows) for block, rows in self.sent.items() for layer in range(2)
        )


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("late", ["out", "write", 1, 2])
def test_slots_are_written_behind_whatever_is_late(tmp_path: Path, slots: int, late: str | int) -> None:
    delay = (
        random_delays(late, ("write", "out"), 1e-3)
        if isinstance(late, int)
        else lambda where: 3e-4 * (where[0] == late)
    )
    rng = np.random.default_rng((slots, len(str(late))))
    with no_thread_left(), Writing(tmp_path, slots, Gates(delay=delay)) as writing:
        for _ in range(3):
            for block in range(0, BLOCKS, 4):
                at = int(rng.integers(4))
                writing.send(block, int(rng.integers(1, 5 - at)), at)
        assert writing.right()


def test_a_slot_must_not_be_written_before_it_is_full(tmp_path: Path) -> None:
    def right(mutant: bool) -> bool:
        gates = Gates([("out", 0)])
        with Writing(tmp_path, gates=gates) as writing:
            writing.out.blind = mutant
            writing.send(3, 2)
            for layer in range(2):
                passes(gates, ("write", place(layer, 3)), mutant)
            gates.open()
            return writing.right()

    both(right)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_slot_must_not_be_filled_before_it_has_been_written(tmp_path: Path, slots: int) -> None:
    def right(mutant: bool) -> bool:
        gates = Gates([("write", place(1, 0))])
        with Writing(tmp_path, slots, gates) as writing, without(mutant, staging, "wait", lambda tasks: None):

            def send() -> None:
                for block in range(slots + 1):
                    writing.send(block)

            host = threading.Thread(target=send)
            host.start()
            passes(gates, ("out", slots), mutant)
            gates.open()
            host.join()
            return writing.right()

    both(right)


# ---- tiles

TILE = 4
"""Blocks in a slot."""
TOKENS = TILE * LAYOUT.block_size
NEAR = 6
"""Blocks in host memory; those behind are on disk."""
HALF = LAYOUT.layer_bytes // 2
Found = list[np.ndarray]


@dataclass
class World:
    """A pool, a disk, a ring and an outbox on threads, and what each block holds that was sent. slots: of the
    ring and the outbox, of what is read ahead, of what is written behind. at_once: the compute stream does
    what it is given while it is given it."""

    directory: Path
    slots: tuple[int, int, int] = (2, 2, 2)
    gates: Gates = field(default_factory=Gates)
    at_once: bool = False

    def __enter__(self) -> "World":
        self._slow = slow_disk(self.gates)
        self._slow.__enter__()
        self.copies, self.out, self.computing = (
            Line(name, self.gates) for name in ("copies", "out", "compute")
        )
        self.compute: Stream = CallerStream() if self.at_once else self.computing
        self.pool, self.disk = HostPool(LAYOUT, NEAR, CPU), DiskPool(LAYOUT, BLOCKS - NEAR, self.directory)
        ring, ahead, behind = self.slots
        reads = ReadAhead(self.disk, Slots(self.disk, ahead, TILE, CPU), self.copies)
        writes = WriteBehind(self.disk, Slots(self.disk, behind, max(TILE, LAYOUT.layers), CPU), self.out)
        streams = Streams(self.copies, self.out, self.compute)
        self.ring = TileRing(self.pool, ring, TOKENS, CPU, streams, None, reads)
        self.outbox = Outbox(self.pool, ring, TOKENS, CPU, streams, writes)
        self.known: dict[tuple[int, int], Found] = {}
        """By layer and block: bytes of K and V."""
        self.seen: list[tuple[Found, Found]] = []
        """What kernels found, and what they should have."""
        self.rng = np.random.default_rng(0)
        return self

    def __exit__(self, *_: object) -> None:
        self.gates.open()
        assert within(LONG, self.disk.close)
        for stream in (self.computing, self.copies, self.out):
            stream.close()
        self.pool.close()
        self._slow.__exit__(None, None, None)

    def byte(self, layer: int, block: int) -> int:
        """Of a block on disk."""
        return (layer * self.disk.blocks + block - NEAR) * PAGE

    def send(self, layer: int, blocks: Sequence[int]) -> None:
        rows = self.rng.integers(0, 256, (2, len(blocks), HALF), np.uint8)
        shape = len(blocks) * LAYOUT.block_size, *heads_of(LAYOUT)
        k, v = (torch.from_numpy(half).view(torch.float16).view(shape) for half in rows)
        self.outbox.send(layer, (k, v), ids(blocks))
        self.known |= {(layer, block): [rows[0, at], rows[1, at]] for at, block in enumerate(blocks)}

    def demote(self, block: int) -> None:
        whole = self.rng.integers(0, 256, (LAYOUT.layers, 2, HALF), np.uint8)
        self.outbox.demote(torch.from_numpy(whole.reshape(-1)), HostBlockId(block))
        self.known |= {(layer, block): list(rows) for layer, rows in enumerate(whole)}

    def fill(self) -> None:
        """Every block of every layer."""
        for layer in range(LAYOUT.layers):
            for first in range(0, BLOCKS, TILE):
                self.send(layer, range(first, first + TILE))

    def take(self, layer: int, tile: Tile) -> None:
        """Queue a kernel that takes down what it sees."""
        parts = [self.known[layer, block] for block in tile.blocks]
        expected = [
            np.concatenate([part[half] for part in parts])[: tile.keys * HALF // LAYOUT.block_size]
            for half in range(2)
        ]
        arrays = [x.flatten().view(torch.uint8).numpy() for x in self.ring.take()]
        found: Found = []

        def kernel() -> None:
            found.extend(array.copy() for array in arrays)

        if self.at_once:
            kernel()
        else:
            self.computing.at_place(len(self.seen), kernel, "kernel")
        self.seen.append((found, expected))

    def use(self, layer: int, tile: Tile) -> None:
        self.take(layer, tile)
        self.ring.release()

    def step(self, tiles: Sequence[Tile], layers: Sequence[int]) -> None:
        self.ring.begin(tiles, layers, self.outbox.landed())
        self.use_all(tiles, layers)

    def use_all(self, tiles: Sequence[Tile], layers: Sequence[int]) -> None:
        for layer in layers:
            for tile in tiles:
                self.use(layer, tile)

    def right(self) -> bool:
        for stream in (self.computing, self.copies, self.out):
            stream.mark().wait()
        return all(
            np.array_equal(one, other)
            for found, expected in self.seen
            for one, other in zip(found, expected, strict=True)
        )


def ids(blocks: Sequence[int]) -> tuple[HostBlockId, ...]:
    return tuple(HostBlockId(int(block)) for block in blocks)


def tile(*blocks: int, short: int = 0) -> Tile:
    return Tile(ids(blocks), len(blocks) * LAYOUT.block_size - short)


def random_tiles(rng: np.random.Generator, blocks: Sequence[int]) -> list[Tile]:
    """Runs that cross from host to disk, and blocks in any order."""
    tiles = []
    for _ in range(rng.integers(0, 5)):
        count = int(rng.integers(1, min(TILE, len(blocks)) + 1))
        start = int(rng.integers(len(blocks) - count + 1))
        some = (
            blocks[start : start + count] if rng.random() < 0.5 else rng.permutation(blocks)[:count].tolist()
        )
        tiles.append(tile(*some, short=int(rng.integers(LAYOUT.block_size))))
    return tiles


@pytest.mark.parametrize(
    ("late", "slots"),
    [
        (late, slots)
        for turn, late in enumerate(["copies", "out", "kernel", "read", "write", 1, 2, 3])
        for other, slots in enumerate([(1, 1, 1), (2, 4, 3), (3, 2, 2)])
        if tiny.THOROUGH or (turn + other) % 2
    ],
    ids=str,
)
def test_what_is_sent_comes_back(tmp_path: Path, slots: tuple[int, int, int], late: str | int) -> None:
    """Blocks of both tiers, sent layer by layer and demoted whole, written again in any order, in steps that
    may be broken off anywhere."""
    kinds = ("copies", "out", "kernel", "read", "write")
    delay = (
        random_delays(late, kinds, 1e-3) if isinstance(late, int) else lambda where: 3e-4 * (where[0] == late)
    )
    rng = np.random.default_rng((*slots, len(str(late))))
    with no_thread_left(), World(tmp_path, slots, Gates(delay=delay)) as world:
        world.fill()
        for _ in range(12):
            order = [int(block) for block in rng.permutation(BLOCKS)]
            written, demoted, rest = sorted(order[:TILE]), order[TILE : TILE + 2], sorted(order[TILE + 2 :])
            for block in demoted:
                world.demote(block)
            tiles = random_tiles(rng, [*rest, *demoted])
            world.ring.begin(tiles, range(LAYOUT.layers), world.outbox.landed())
            breaks = int(rng.integers(1, 2 * LAYOUT.layers * max(len(tiles), 1)))
            for number, (layer, at) in enumerate(
                (layer, at) for layer in range(LAYOUT.layers) for at in range(-1, len(tiles))
            ):
                if number == breaks:
                    break
                if at < 0:
                    world.send(layer, written)
                else:
                    world.use(layer, tiles[at])
        assert world.right()
        assert world.disk.read_bytes > 0


def test_tiles_that_are_late_hold_up_nobody_but_who_takes_them(tmp_path: Path) -> None:
    with World(tmp_path, (3, 2, 2)) as world:
        world.fill()
        world.step([tile(0, 20)], [0])
        world.gates.shut(("read", world.byte(0, 9)))
        tiles = [tile(1, 2), tile(3, 9, 10), tile(4, 5)]
        world.ring.begin(tiles, [0], world.outbox.landed())
        world.use(0, tiles[0])
        late = threading.Thread(target=world.use, args=(0, tiles[1]))
        late.start()
        late.join(BRIEF)
        assert late.is_alive()
        world.gates.open()
        late.join(LONG)
        assert not late.is_alive()
        world.use(0, tiles[2])
        assert world.right()


def test_what_is_lost_is_told_to_who_takes_it_and_to_nobody_else(tmp_path: Path) -> None:
    tiles = [tile(1, 2), tile(9, 10, 11), tile(20)]
    with World(tmp_path, (1, 2, 2)) as world:
        world.fill()
        world.step(tiles, [0, 1])
        flip(world.disk, world.byte(1, 10))
        world.step(tiles, [0])
        for _ in range(3):
            world.ring.begin(tiles, [0, 1], world.outbox.landed())
            with pytest.raises(LostKV, match=f"layer 1, block {10 - NEAR} on disk"):
                world.use_all(tiles, [0, 1])
            world.step([tiles[2], tile(9)], [0, 1])
        world.send(1, [10])
        world.step(tiles, [1])
        assert world.right()


# ---- interrupts


UNUSED = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


@UNUSED
@pytest.mark.timeout(60)
@pytest.mark.parametrize("slots", [1, 2])
def test_an_interrupt_anywhere_in_reading_ahead_does_no_harm(tmp_path: Path, slots: int) -> None:
    """Of one and the same ReadAhead, again and again: what an interrupt leaves behind is there for the
    next."""
    wanted = [(0, [(0, 3, 2), (3, 9, 1)]), (1, [(1, 0, 3)]), (2, [(0, 20, 1)])]
    delay = random_delays(slots, ("read", "copies"), 5e-4)
    with (
        no_thread_left(),
        patch.object(diskpool, "DIRECT_BYTES", 2 * PAGE),
        Reading(tmp_path, slots, gates=Gates(delay=delay)) as reading,
    ):

        def strike(where: int) -> bool:
            struck: bool = cut_short(partial(reading.step, wanted), where, OURS_AND_LOCKS)
            assert within(LONG, partial(reading.step, wanted[where % 3 :] + wanted[:1]))
            return struck

        assert everywhere(strike) > 100
        assert reading.right()


@UNUSED
@pytest.mark.timeout(60)
@pytest.mark.parametrize("slots", [1, 2])
def test_an_interrupt_anywhere_in_writing_behind_does_no_harm(tmp_path: Path, slots: int) -> None:
    """In `claim` and in `write`, while an earlier write is late. What was interrupted has been written, or
    lost, or it never was: nothing that came to its slot later is taken for it. And what comes later is
    written."""
    delay = random_delays(slots, ("write", "out"), 1e-3)
    with (
        no_thread_left(),
        patch.object(diskpool, "DIRECT_BYTES", PAGE),
        Writing(tmp_path, slots, Gates(delay=delay)) as writing,
    ):
        disk = writing.disk

        def strike(where: int) -> bool:
            before = [[got_or_lost(disk, layer, block) for block in (10, 11)] for layer in range(2)]
            for block in range(slots):
                writing.send(block)
            rows = torch.from_numpy(memory(disk, 2, 1000 + where))

            def send() -> None:
                writing.out.copy(writing.behind.claim()[:2], rows)
                writing.behind.write([(layer, (0, 10, 2)) for layer in range(2)])

            struck: bool = cut_short(send, where, OURS_AND_LOCKS)
            for block in range(14, 14 + 2 * slots, 2):
                assert within(LONG, partial(writing.send, block, 2))
            for layer, at in product(range(2), range(2)):
                found = got_or_lost(disk, layer, 10 + at)
                assert found in (None, before[layer][at], bytes(rows.numpy()[at, : LAYOUT.layer_bytes])), (
                    f"block {10 + at}"
                )
            return struck

        assert everywhere(strike) > 50
        assert within(LONG, partial(writing.send, 10, 2))
        assert writing.right()


def got_or_lost(disk: DiskPool, layer: int, block: int) -> bytes | None:
    try:
        return bytes(got(disk, layer, block, 1)[0, : LAYOUT.layer_bytes])
    except LostKV:
        return None


@UNUSED
@pytest.mark.timeout(60)
def test_an_interrupt_while_a_slot_is_waited_for_leaves_nothing_held(tmp_path: Path) -> None:
    """At every place of a `claim` that waits for the disk."""

    def strike(where: int) -> bool:
        slow = threading.Event()
        with no_thread_left(), Writing(tmp_path) as writing:
            row = writing.behind.claim().numpy()
            writing.behind._tasks[0] = written(writing.disk, 0, 0, row[:1], partial(slow.wait, LONG))
            timer = threading.Timer(BRIEF, slow.set)
            timer.start()
            struck: bool = cut_short(writing.behind.claim, where, OURS_AND_LOCKS)
            slow.set()
            timer.join()
            assert within(LONG, writing.behind.claim)
        return struck

    assert everywhere(strike) > 5


@UNUSED
@pytest.mark.timeout(60)
@pytest.mark.parametrize("slots", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["send", "demote"])
def test_an_interrupt_anywhere_in_sending_does_no_harm(
    tmp_path: Path, name: str, slots: tuple[int, int, int]
) -> None:
    """To blocks of which some are on disk, or to one that is. They are sent again, as after a step that was
    broken off."""
    delay, blocks = random_delays(len(name), ("write", "out", "kernel"), 1e-3), range(4, 8)
    with no_thread_left(), World(tmp_path, slots, Gates(delay=delay)) as world:
        world.fill()

        def again() -> None:
            if name == "demote":
                world.demote(6)
            else:
                world.send(1, blocks)
            world.step([tile(*blocks), tile(8, 2)], [0, 1])

        def strike(where: int) -> bool:
            call = partial(world.demote, 6) if name == "demote" else partial(world.send, 1, blocks)
            struck: bool = cut_short(call, where, OURS_AND_LOCKS)
            assert within(LONG, again)
            return struck

        assert everywhere(strike) > 80
        assert world.right()


@UNUSED
@pytest.mark.timeout(60)
def test_an_interrupt_anywhere_in_closing_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more under way than there are threads. Closing again ends what is left."""
    monkeypatch.setattr(diskpool, "READERS", 2)
    monkeypatch.setattr(diskpool, "WRITERS", 2)

    def strike(where: int) -> bool:
        with slow_disk(Gates(delay=random_delays(where, ("read", "write"), 5e-4))), no_thread_left():
            disk = DiskPool(LAYOUT, BLOCKS, tmp_path)
            rows, into = memory(disk, 2, 1), memory(disk, 2)
            for number in range(5):
                written(disk, number % 3, number, rows)
                asked(disk, number % 3, number, into)
            struck: bool = cut_short(disk.close, where, OURS_AND_LOCKS)
            assert within(LONG, disk.close)
            assert not descriptors(tmp_path)
        return struck

    assert everywhere(strike) > 50


TILES = [tile(3, 8, 9), tile(10, short=2), tile(1, 0)]


def ready(world: World) -> None:
    """The first tile is released."""
    world.ring.begin(TILES, [0, 1], world.outbox.landed())
    world.use(0, TILES[0])


def used(world: World) -> None:
    """And the second in use."""
    ready(world)
    world.take(0, TILES[1])


RING_CALLS: dict[str, tuple[Callable[[World], None], Callable[[World], Callable[[], object]]]] = {
    "begin": (used, lambda world: partial(world.ring.begin, TILES[::-1], [2])),
    "take": (ready, lambda world: world.ring.take),
    "release": (used, lambda world: world.ring.release),
    "end": (used, lambda world: partial(world.ring.begin, (), ())),
}
"""By name: what is done before, and what is interrupted."""


@UNUSED
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", RING_CALLS)
@pytest.mark.parametrize("at_once", [False, True], ids=["threads", "at_once"])
def test_an_interrupt_anywhere_in_the_ring_does_no_harm(tmp_path: Path, name: str, at_once: bool) -> None:
    before, called = RING_CALLS[name]
    delay = random_delays(len(name), ("read", "copies", "kernel"), 3e-4)
    with no_thread_left(), World(tmp_path, gates=Gates(delay=delay), at_once=at_once) as world:
        world.fill()

        def strike(where: int) -> bool:
            before(world)
            struck: bool = cut_short(called(world), where, OURS_AND_LOCKS)
            assert within(LONG, partial(world.step, TILES[where % 3 :] + TILES[:1], [1]))
            return struck

        assert everywhere(strike) > 10
        assert world.right()


# ---- the engine

MODELS = ["llama", "qwen2_windows", "qwen3_moe"]
SETTINGS: dict[str, object] = {
    "device": "cpu",
    "dtype": "float32",
    "kv_blocks": 8,
    "kv_tile": 32,
    "block_size": 8,
    "max_step_tokens": 24,
    "max_length": 400,
    "beyond_trained": True,
    "max_sequences": 4,
    "check": True,
}
PARAMS = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=2)
LIMIT = 5e-5
"""How far log-probabilities in float32 may lie apart where some of the context was computed in other
pieces."""


def prompts() -> list[list[int]]:
    """Two that do not fit the pages, with the first half in common, and one that does."""
    one, other, short = tiny.prompts()[-1] * 4, tiny.prompts()[-2] * 2, tiny.prompts()[1]
    return [one, one[:80] + other, short]


@contextmanager
def engine(name: str, directory: Path) -> Iterator[LLM]:
    """An engine with one block in host memory, two in the model with experts, and the others on disk."""
    room = {"host_kv_memory": "13KiB", "disk_kv_memory": "4MiB", "kv_directory": directory, "kv_store": "off"}
    with no_thread_left():
        with LLM(tiny.checkpoint(name), **SETTINGS, **room) as llm:  # type: ignore[arg-type]
            yield llm
        assert not descriptors(directory)
        assert os.listdir(directory) == []


@cache
def expected(name: str) -> list[Completion]:
    """With all of it in host memory."""
    with LLM(tiny.checkpoint(name), **SETTINGS, host_kv_memory="8MiB") as llm:  # type: ignore[arg-type]
        return llm.generate(prompts(), PARAMS)


def carrier(llm: LLM) -> Carrier:
    ranks = llm.booted.engine._ranks
    assert ranks is not None
    assert ranks.carrier is not None
    return ranks.carrier


def answers(llm: LLM, between: Callable[[int], None] = lambda step: None) -> tuple[list[Completion], int]:
    """In steps that may be interrupted, and how many were. `between` is called before each."""
    streams, step, interrupts = [llm.stream(prompt, PARAMS) for prompt in prompts()], 0, 0
    while llm.booted.engine.busy:
        between(step)
        try:
            llm.driver.step()
        except KeyboardInterrupt:
            interrupts += 1
        step += 1
        assert step < 1000, "steps that do nothing"
    return [stream.completion for stream in streams], interrupts


def check(name: str, found: Sequence[Completion]) -> None:
    for mine, theirs in zip(found, expected(name), strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.logprobs is not None
        assert theirs.logprobs is not None
        assert all(
            abs(one.logprob - other.logprob) < LIMIT
            for one, other in zip(mine.logprobs, theirs.logprobs, strict=True)
        )


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_says_the_same_with_its_kv_on_disk(tmp_path: Path, name: str) -> None:
    """Bit for bit. The second time the prompts' first blocks are found where they rest."""
    with engine(name, tmp_path) as llm:
        disk, near = carrier(llm).disk, carrier(llm).pool.blocks
        assert disk is not None
        assert near in (1, 2)
        found = llm.generate(prompts(), PARAMS)
        assert os.listdir(tmp_path) == []
        assert disk.read_bytes > disk.written_bytes > 20 * LAYOUT.layers * PAGE
        check(name, llm.generate(prompts(), PARAMS))
    for mine, theirs in zip(found, expected(name), strict=True):
        assert (mine.tokens, mine.logprobs) == (theirs.tokens, theirs.logprobs)


def test_metrics_count_what_was_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters of links and of far KV, as `/metrics` has them, against the bytes that the system's calls
    have moved."""
    pytest.importorskip("prometheus_client")
    from penstock.server.broker.backend import LocalBackend
    from penstock.server.broker.metrics import Metrics
    from penstock.server.monitoring.state import StateMonitor

    moved = {"read": 0, "written": 0}
    counting, reading, writing = Lock(), DirectFile.read_direct, os.pwrite

    def read_direct(self: DirectFile, into: Any, offset: int) -> None:
        reading(self, into, offset)
        with counting:
            moved["read"] += into.nbytes

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        count = writing(descriptor, data, offset)
        with counting:
            moved["written"] += count
        return count

    monkeypatch.setattr(DirectFile, "read_direct", read_direct)
    monkeypatch.setattr(os, "pwrite", pwrite)
    with engine("llama", tmp_path) as llm:
        broker = SimpleNamespace(outputs=0, reading=None, open=True, paused=False, queue=lambda most: [])
        backend = LocalBackend(llm)
        metrics, watch = Metrics(), StateMonitor(backend, cast("Any", broker), "llama")
        metrics.watch(backend, lambda: 0)
        watch.look()
        llm.generate(prompts(), PARAMS)
        disk = carrier(llm).disk
        assert disk is not None
        disk.readers.close()  # Reads ahead of the last step may be under way.
        disk.close()
        backend.stats = llm.stats()
        found = dict(
            re.findall(r"^penstock:(\S+(?: \S+ \S+)?) (\S+)$", metrics.text().decode(), re.MULTILINE)
        )
        state = watch.look()
        links, plan = {link.link: link for link in state.links}, state.plan
    assert 0 < moved["written"] < moved["read"]
    told = {name: float(value) for name, value in found.items()}
    assert told['link_bytes_total{link="disk to host"}'] == told["far_kv_read_bytes_total"] == moved["read"]
    assert (
        told['link_bytes_total{link="host to disk"}']
        == told["far_kv_written_bytes_total"]
        == moved["written"]
    )
    assert links["disk to host"].kv > 0
    passes = backend.stats.passes
    assert told['passes_total{kind="decode"}'] == passes.decode > 0
    assert told['passes_total{kind="prefill"}'] == passes.prefill == backend.stats.steps - passes.decode > 0
    assert passes.decode_seconds > 0
    assert told['pass_seconds_total{kind="decode"}'] == pytest.approx(passes.decode_seconds)
    assert told['pass_predicted_seconds{kind="decode"}'] == 0, "nothing streams, and nothing was predicted"
    assert {name for name in told if name.startswith("pass_predicted_seconds")} == {
        'pass_predicted_seconds{kind="decode"}'
    }
    assert (plan.decode_seconds, plan.prefill_seconds) == pytest.approx(
        (passes.decode_seconds / passes.decode, passes.prefill_seconds / passes.prefill)
    )
    assert told["attention_missed_share_max"] == told['attention_missed_share_count{heads="worst"}'] == 0


@pytest.mark.parametrize("name", MODELS)
def test_what_the_disk_loses_is_computed_again(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """While a prompt is taken in, and while all are answered."""
    with engine(name, tmp_path) as llm, caplog.at_level(logging.WARNING, "penstock"):
        disk, near, damaged = carrier(llm).disk, carrier(llm).pool.blocks, []

        def damage(step: int) -> None:
            if step not in (3, 16):
                return
            held = llm.booted.engine.scheduler._queues.running[0].kv.host
            block = max(held) - near
            assert block >= 0
            for one in list(disk._writes):
                assert done(one)
            flip(disk, (1 * disk.blocks + block) * disk.record + 5)
            damaged.append(f"KV of layer 1, block {block} on disk")

        found, _ = answers(llm, damage)
    check(name, found)
    lost = [record.getMessage() for record in caplog.records if "is computed again" in record.getMessage()]
    assert len(lost) == len(damaged) == 2
    assert all(one.startswith(other) for one, other in zip(lost, damaged, strict=True))


def test_a_disk_that_goes_on_losing_ends_with_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine("llama", tmp_path) as llm, caplog.at_level(logging.WARNING, "penstock"):
        broken_writes(carrier(llm).disk)
        with pytest.raises(
            LostKV, match=r"KV of layer 0, block \d+ on disk, at byte \d+, is not what was written"
        ):
            llm.generate(prompts(), PARAMS)
        with pytest.raises(EngineClosedError, match="a step failed with LostKV: KV of layer 0"):
            llm.generate(prompts(), PARAMS)
    assert 0 < len([record for record in caplog.records if "is computed again" in record.getMessage()]) < 20


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("owner", "called"),
    [
        (ReadAhead, "begin"),
        (ReadAhead, "wait"),
        (ReadAhead, "copied"),
        (TileRing, "release"),
        (WriteBehind, "claim"),
    ],
)
def test_an_engine_that_is_interrupted_goes_on(tmp_path: Path, owner: type, called: str) -> None:
    """Where a call begins, and where it is over."""
    calls, rule = 0, getattr(owner, called)

    def struck(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls in (3, 24, 40):
            raise KeyboardInterrupt
        result = rule(*arguments)
        if calls in (10, 25, 60):
            raise KeyboardInterrupt
        return result

    with engine("llama", tmp_path) as llm, patch.object(owner, called, struck):
        found, interrupts = answers(llm)
        assert interrupts > 3
        check("llama", found)


@UNUSED
@pytest.mark.timeout(60)
@pytest.mark.parametrize("first", [0, 300])
def test_an_engine_that_is_interrupted_at_any_place_goes_on(tmp_path: Path, first: int) -> None:
    """In every second step, ever further on, until a step is over before."""
    with engine("qwen3_moe", tmp_path) as llm:
        ranks = llm.booted.engine._ranks
        assert ranks is not None
        begin, step, where = ranks.begin, 0, first

        def struck(plan: Plan) -> Step:
            nonlocal step, where
            step += 1
            begun: list[Step] = []
            if step % 2 or where > 10000:
                return begin(plan)
            where += 600
            if cut_short(lambda: begun.append(begin(plan)), where, OURS_AND_LOCKS):
                raise KeyboardInterrupt
            where = 10001
            return begun[0]

        with patch.object(ranks, "begin", struck):
            found, interrupts = answers(llm)
        check("qwen3_moe", found)
        assert interrupts > 2


# -- what was found once
# -----------------------------------------------------------------------------------------------------


def test_a_write_that_was_interrupted_never_lands_after_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt strikes when the write has been handed to a thread and nobody has been told."""
    layout = kv_of_heads(1, 4, 2, 2, "float16")
    disk, going, slow = DiskPool(layout, 4, tmp_path), threading.Event(), threading.Event()
    write, hand_out = diskpool.write_all, disk._writers.put

    landed = threading.Event()

    def late(plain: FileIO, data: memoryview, offset: int, direct: FileIO) -> None:
        if going.is_set():
            write(plain, data, offset, direct)
            return
        going.set()
        slow.wait(10)
        write(plain, data, offset, direct)
        landed.set()

    def struck(task: Task) -> None:
        hand_out(task)
        raise KeyboardInterrupt

    old, new, found = (Slots(disk, 1, 1, CPU).rows[0] for _ in range(3))
    old[:], new[:] = 1, 2
    monkeypatch.setattr(diskpool, "write_all", late)
    with patch.object(disk._writers, "put", struck), pytest.raises(KeyboardInterrupt):
        written(disk, 0, 3, old)
    assert going.wait(10)
    tasks = written(disk, 0, 3, new)
    done(tasks, 0.3)  # It would be by now, if it did not wait for the other.
    slow.set()
    assert landed.wait(10)
    assert done(tasks)
    (read,) = asked(disk, 0, 3, found)
    assert within(LONG, read.result)
    assert found[0, 0] == 2
    disk.close()


def test_an_interrupt_while_a_loss_is_told_is_recovered_from(tmp_path: Path) -> None:
    class Strike(logging.Handler):
        struck = False

        def emit(self, record: logging.LogRecord) -> None:
            if "computed again" in record.getMessage() and not self.struck:
                self.struck = True
                raise KeyboardInterrupt

    handler = Strike()
    settings = {
        "kv_blocks": 8,
        "kv_tile": 32,
        "block_size": 8,
        "max_step_tokens": 24,
        "max_length": 400,
        "max_sequences": 4,
    }
    places = {
        "host_kv_memory": "13KiB",
        "disk_kv_memory": "4MiB",
        "kv_directory": tmp_path,
        "kv_store": "off",
    }
    places |= {"device": "cpu", "dtype": "float32"}
    logging.getLogger("penstock").addHandler(handler)
    try:
        with LLM(tiny.checkpoint("llama"), **settings, **places, beyond_trained=True, check=True) as llm:  # type: ignore[arg-type]
            llm.stream(tiny.prompts()[-1] * 5, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
            engine = llm.booted.engine
            for number in range(200):
                if number == 12:
                    carrier(llm).disk._sums[:] ^= 1
                with suppress(KeyboardInterrupt):
                    engine.step()
            assert handler.struck
            assert not engine.busy
    finally:
        logging.getLogger("penstock").removeHandler(handler)


def test_a_carrier_that_cannot_be_made_gives_the_disk_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DeviceError("no memory")

    monkeypatch.setattr("penstock.kv.movement.carrier.Slots", full)
    with pytest.raises(DeviceError, match="no memory"):
        Carrier(
            CarrierRoom(kv_of_heads(1, 4, 2, 2, "float16"), 2, 8, 8, Disk(4, tmp_path)),
            CPU,
            Streams(*streams_both_ways(CPU)),
        )
    links = [
        os.readlink(file)
        for file in Path("/proc/self/fd").iterdir()
        if file.is_symlink() and os.path.lexists(file)
    ]
    assert not [link for link in links if str(tmp_path) in link]
