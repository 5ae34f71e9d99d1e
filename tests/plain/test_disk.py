"""Reading files: every byte, past short reads and request borders, and what a disk or a file that fails looks like."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.memory import disk
from penstock.memory.disk import REQUEST_BYTES, DiskFile, ReadError, run_all


@pytest.fixture
def content(tmp_path: Path) -> tuple[Path, bytes]:
    """A file of two requests and a bit."""
    data = random.Random(5).randbytes(2 * REQUEST_BYTES + 4321)
    (tmp_path / "data").write_bytes(data)
    return tmp_path / "data", data


@pytest.mark.parametrize(("start", "count"), [(0, 2 * REQUEST_BYTES + 4321), (4000, REQUEST_BYTES + 1), (17, 0), (2 * REQUEST_BYTES, 4321)])
def test_reads_just_what_was_asked(content: tuple[Path, bytes], start: int, count: int) -> None:
    path, data = content
    buffer = bytearray(b"\xee" * (count + 2))
    with DiskFile(path) as file:
        assert file.size == len(data)
        file.read_into(memoryview(buffer)[1:-1], start)
    assert buffer == b"\xee" + data[start : start + count] + b"\xee"


def test_requests_shared_by_threads_fill_the_same_bytes(content: tuple[Path, bytes]) -> None:
    path, data = content
    buffer = bytearray(len(data) - 7)
    with DiskFile(path) as file, ThreadPoolExecutor(3) as pool:
        requests = file.requests(memoryview(buffer), 7)
        run_all(requests, pool)
    assert len(requests) == 3
    assert buffer == data[7:]


def test_goes_on_after_short_reads() -> None:
    """A kernel table comes in pieces however much is asked for."""
    path = Path("/proc/kallsyms")
    if not path.exists() or len(data := path.read_bytes()) < 20000:
        pytest.skip("needs /proc/kallsyms, which gives short reads")
    with DiskFile(path) as file:
        assert len(os.pread(file._fd, 20000, 0)) < 20000
        assert file.read(0, 20000) == data[:20000]


def test_end_of_file_names_file_and_offset(content: tuple[Path, bytes]) -> None:
    path, data = content
    with DiskFile(path) as file, pytest.raises(ReadError, match=f"data at byte {len(data)}: it ends there, 10 bytes too early"):
        file.read(len(data) - 90, 100)


def test_failing_read_names_file_and_offset() -> None:
    """Page 0 of a process is never mapped, so its memory file answers with a true input/output error."""
    with DiskFile(Path("/proc/self/mem")) as file, pytest.raises(ReadError, match="/proc/self/mem at byte 16: Input/output error"):
        file.read(16, 8)


def test_no_other_read_is_in_flight_when_one_failed(content: tuple[Path, bytes]) -> None:
    path, _ = content
    release, done = threading.Event(), threading.Event()

    def slow() -> None:
        release.wait(20)
        done.set()

    with DiskFile(path) as file, ThreadPoolExecutor(2) as pool:
        fail = file.requests(memoryview(bytearray(1)), file.size)
        threading.Timer(0.1, release.set).start()
        with pytest.raises(ReadError):
            run_all([slow, *fail], pool)
        assert done.is_set()


@pytest.mark.timeout(20)
def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, fault in ((tmp_path, "not a regular file"), (tmp_path / "pipe", "not a regular file"), (tmp_path / "none", "No such file")):
        with pytest.raises(ReadError, match=fault):
            DiskFile(path)
    with pytest.raises(ReadError, match="null"):
        DiskFile(tmp_path / "a\0b")


def test_links_are_followed_and_files_are_given_back(content: tuple[Path, bytes], tmp_path: Path) -> None:
    path, data = content
    (tmp_path / "link").symlink_to(path.name)
    before = len(os.listdir("/proc/self/fd"))
    with DiskFile(tmp_path / "link") as file:
        assert file.read(5, 10) == data[5:15]
        assert len(os.listdir("/proc/self/fd")) == before + 1
    with pytest.raises(ReadError):
        DiskFile(tmp_path)
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_requests_are_bounded(content: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny requests, a read is many of them and still whole."""
    path, data = content
    monkeypatch.setattr(disk, "REQUEST_BYTES", 1000)
    with DiskFile(path) as file:
        buffer = bytearray(5500)
        assert len(file.requests(memoryview(buffer), 3)) == 6
        file.read_into(memoryview(buffer), 3)
    assert buffer == data[3:5503]
