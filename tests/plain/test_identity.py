"""Digests of files: over every byte, remembered only where that is safe, and never another file's."""

import hashlib
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.base.errors import CheckpointError
from penstock.memory.disk import DiskFile, FileStamp
from penstock.weights.checkpoint import identity
from penstock.weights.checkpoint.identity import MEMORY, STEP_BYTES, Digests, Hashing, Memory
from penstock.weights.pieces import PIECE_BYTES
from safetensor_files import flip


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files count as changed long ago, on a file system that can be trusted, whatever this one is."""
    monkeypatch.setattr(identity, "RECENT_NS", -(10**18))
    (tmp_path / "probe").touch()
    with DiskFile(tmp_path / "probe") as file:
        monkeypatch.setattr(identity, "TRUSTED", {file.file_system()})


@contextmanager
def hashing(memory: Path | None, *paths: Path) -> Iterator[Hashing]:
    with ExitStack() as opened:
        found = Hashing([opened.enter_context(DiskFile(path)) for path in paths], Memory(memory))
        opened.callback(found.close)
        yield found


def digests(memory: Path | None, *paths: Path) -> Digests:
    with hashing(memory, *paths) as found:
        return found.result()


def reference(path: Path) -> str:
    data = path.read_bytes()
    pieces = [hashlib.sha256(data[at : at + PIECE_BYTES]).digest() for at in range(0, len(data), PIECE_BYTES)]
    return hashlib.sha256(b"".join(pieces)).hexdigest()


def files(folder: Path, *sizes: int) -> list[Path]:
    rng, paths = random.Random(7), []
    for number, size in enumerate(sizes):
        paths.append(folder / f"file{number}")
        paths[-1].write_bytes(rng.randbytes(size))
    return paths


def test_digests_are_of_every_byte(tmp_path: Path) -> None:
    sizes = (0, 1, STEP_BYTES, STEP_BYTES + 1, PIECE_BYTES, PIECE_BYTES + STEP_BYTES + 5)
    paths = files(tmp_path, *sizes)
    found = digests(None, *paths)
    assert found.files == tuple(map(reference, paths))
    assert found.hashed_bytes == sum(sizes)
    assert len(set(found.files)) == len(sizes)


def test_what_does_not_fit_memory_has_the_same_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [path] = files(tmp_path, PIECE_BYTES + 4096)
    forgotten: list[int] = []
    monkeypatch.setattr(DiskFile, "forget", lambda self, offset, count: forgotten.append(offset))
    assert digests(None, path).files == (reference(path),)
    assert not forgotten
    monkeypatch.setattr(identity.psutil, "virtual_memory", lambda: type("Little", (), {"available": 4096}))
    assert digests(None, path).files == (reference(path),)
    assert sorted(forgotten) == [0, PIECE_BYTES]


@pytest.mark.usefixtures("old")
def test_a_second_time_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, cache = files(tmp_path, 100, 5000, 70_000), tmp_path / "new" / "cache"
    first = digests(cache, *paths)
    assert (first.hashed_bytes, first.forgettable) == (75_100, "")
    assert (cache / MEMORY).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in cache.iterdir()] == [MEMORY]
    assert digests(cache, *paths) == Digests(first.files, 0, 0.0)
    flip(paths[1], 4999)
    again = digests(cache, *paths)
    assert (again.files, again.hashed_bytes) == (
        tuple(map(reference, paths)),
        5000,
    )  # The others are still remembered.
    monkeypatch.setattr(identity, "_hashed", lambda *_: pytest.fail("bytes were hashed"))
    assert digests(cache, *paths).files == again.files


def rewrite_keeping_times(path: Path) -> None:
    before = path.stat()
    flip(path, 17)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def replace_keeping_times(path: Path) -> None:
    before, beside = path.stat(), path.with_name("beside")
    beside.write_bytes(path.read_bytes())
    flip(beside, 17)
    os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
    beside.rename(path)


def write_through_a_mapping(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[17] ^= 1


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    "change", [rewrite_keeping_times, replace_keeping_times, write_through_a_mapping, lengthen]
)
def test_what_has_changed_is_not_remembered(tmp_path: Path, change: Callable[[Path], None]) -> None:
    [path] = files(tmp_path, 5000)
    before = digests(tmp_path / "cache", path)
    time.sleep(0.02)  # A tick of the file system's clock, which the real RECENT_NS is there for.
    change(path)
    after = digests(tmp_path / "cache", path)
    assert after.files == (reference(path),) != before.files
    assert after.hashed_bytes == path.stat().st_size


@pytest.mark.usefixtures("old")
def test_a_page_that_was_dirty_in_a_mapping_before(tmp_path: Path) -> None:
    """Its next write would not move the file's times, had it not been written to the disk before it was
    hashed."""
    [path] = files(tmp_path, 5000)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped, DiskFile(path) as probe:
        if probe.file_system() == "tmpfs":
            pytest.skip("tmpfs moves no times for mappings, and is not trusted")
        mapped[17] ^= 1
        digests(tmp_path / "cache", path)
        time.sleep(0.02)
        mapped[18] ^= 1
        after = digests(tmp_path / "cache", path)
        assert after.hashed_bytes == 5000
        assert after.files == (reference(path),)


def test_what_may_still_change_unseen_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [path] = files(tmp_path, 5000)
    with DiskFile(path) as file:
        monkeypatch.setattr(identity, "TRUSTED", {file.file_system()})
    for _ in range(2):
        found = digests(tmp_path / "cache", path)
        assert (found.hashed_bytes, found.forgettable) == (5000, "file0 was changed a moment before")
    monkeypatch.setattr(identity, "RECENT_NS", -(10**18))
    monkeypatch.setattr(identity, "TRUSTED", {"none"})
    for _ in range(2):
        found = digests(tmp_path / "cache", path)
        assert found.hashed_bytes == 5000
        assert "do not tell of every change" in found.forgettable
    assert not (tmp_path / "cache").exists()
    assert not {"tmpfs", "fuse", "fuseblk", "9p", "virtiofs", "cifs", "vfat", ""} & set(
        identity.TRUSTED - {"none"}
    )


@pytest.mark.usefixtures("old")
def test_a_damaged_memory_is_no_memory(tmp_path: Path) -> None:
    paths, cache = files(tmp_path, 100, 200), tmp_path / "cache"
    expected = digests(cache, *paths).files
    text = (cache / MEMORY).read_bytes()
    for at in range(len(text)):
        (cache / MEMORY).write_bytes(text[:at] + bytes([text[at] ^ 1 << at % 8]) + text[at + 1 :])
        found = Memory(cache).recall()
        assert set(found.values()) <= set(expected), at
        assert len(found) < 2, at
    for damage in (b"", text[: len(text) // 3], b"\0" * 5000, b"\xff\t\xff\t\xff\n" * 50, text + text[:50]):
        (cache / MEMORY).write_bytes(damage)
        assert digests(cache, *paths).files == expected
    (cache / MEMORY).unlink()
    (cache / MEMORY).mkdir()
    found = digests(cache, *paths)
    assert (found.files, found.hashed_bytes, found.forgettable) == (
        expected,
        300,
        "the cache directory cannot be written",
    )
    found = digests(paths[0] / "cache", *paths)
    assert (found.files, found.forgettable) == (expected, "the cache directory cannot be written")


@pytest.mark.usefixtures("old")
def test_the_memory_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "MOST_REMEMBERED", 3)
    memory = Memory(tmp_path)
    for number in range(6):
        assert memory.remember({f"key{number}": "value", "always": "value"})
    assert list(memory.recall()) == ["key4", "key5", "always"]


@pytest.mark.usefixtures("old")
def test_a_file_that_changes_while_it_is_hashed_has_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [path] = files(tmp_path, 3 * STEP_BYTES)
    real, lock, changed = DiskFile.read_into, threading.Lock(), list[int]()

    def read_into(self: DiskFile, buffer: memoryview, offset: int) -> None:
        real(self, buffer, offset)
        with lock:
            if not changed and self.path == path:
                time.sleep(0.02)
                flip(path, 2 * STEP_BYTES)
                changed.append(offset)

    monkeypatch.setattr(DiskFile, "read_into", read_into)
    with pytest.raises(
        CheckpointError,
        match="file0 changed while it was read; wait until nothing writes there, and start again",
    ):
        digests(tmp_path / "cache", path)
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("old")
def test_a_change_since_opening_or_after_hashing_is_seen(tmp_path: Path) -> None:
    [path] = files(tmp_path, 5000)
    time.sleep(0.02)
    with DiskFile(path) as file:
        flip(path, 0)
        with pytest.raises(CheckpointError, match="file0 changed while it was read"):
            Hashing([file], Memory(None))
    for memory in (None, tmp_path / "cache", tmp_path / "cache"):  # The last time it is remembered.
        time.sleep(0.02)
        with hashing(memory, path) as found:
            found.result()
            found.expect_unchanged()
            if memory is None:
                flip(path, 1)
                with pytest.raises(CheckpointError, match="file0 changed while it was read"):
                    found.expect_unchanged()


@pytest.mark.usefixtures("old")
def test_another_mount_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two images that are mounted at one place, one after the other, may have the same numbers in all
    else."""
    [path] = files(tmp_path, 1000)
    with DiskFile(path) as file, DiskFile(path) as again:
        assert file.mount() == again.mount() != ""
    assert digests(tmp_path / "cache", path).hashed_bytes == 1000
    assert digests(tmp_path / "cache", path).hashed_bytes == 0
    monkeypatch.setattr(DiskFile, "mount", lambda _: "another")
    assert digests(tmp_path / "cache", path).hashed_bytes == 1000
    monkeypatch.setattr(DiskFile, "mount", lambda _: "")
    for _ in range(2):
        found = digests(tmp_path / "cache", path)
        assert found.hashed_bytes == 1000
        assert "cannot tell its file system" in found.forgettable


@pytest.mark.usefixtures("old")
def test_of_several_that_start_at_once_one_hashes(tmp_path: Path) -> None:
    paths = files(tmp_path, 5_000_000, 100)
    with ExitStack() as opened:
        together = [opened.enter_context(hashing(tmp_path / "cache", *paths)) for _ in range(4)]
        found = [each.result() for each in together]
    assert sorted(each.hashed_bytes for each in found) == [0, 0, 0, 5_000_100]
    assert len({each.files for each in found}) == 1


@pytest.mark.usefixtures("old")
def test_it_can_be_left_at_any_time(tmp_path: Path) -> None:
    paths = files(tmp_path, 3_000_000)
    before = set(threading.enumerate())
    with DiskFile(paths[0]) as holder:
        assert holder.claim()
        with hashing(tmp_path / "cache", *paths):
            pass  # Which waits for the holder.
        holder.unclaim()
    for _ in range(20):
        with hashing(tmp_path / "cache", *paths):
            pass
    assert set(threading.enumerate()) == before
    assert digests(tmp_path / "cache", *paths).files == (reference(paths[0]),)


def test_every_part_of_a_stamp_counts() -> None:
    """Leave one out, and two files of one size, made at one time, or a file and what it was before, are the
    same."""
    names = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
    told = dict.fromkeys(names, 7)
    stamps = [FileStamp.of(SimpleNamespace(**told | {name: 8})) for name in names]  # type: ignore[arg-type]
    stamps.append(FileStamp.of(SimpleNamespace(**told)))  # type: ignore[arg-type]
    here = SimpleNamespace(mount=lambda: "here")
    assert len({identity._key(here, stamp) for stamp in stamps}) == len(names) + 1  # type: ignore[arg-type]
