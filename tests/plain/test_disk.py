"""Reading files: every byte, past short reads and request borders, and what a disk or a file that fails looks
like."""

import ctypes
import mmap
import os
import random
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.memory import disk
from penstock.memory.disk import (
    DIRECT_ALIGNMENT,
    REQUEST_BYTES,
    DirectFile,
    DiskFile,
    ReadError,
    make_private,
    run_all,
)


@pytest.fixture
def content(tmp_path: Path) -> tuple[Path, bytes]:
    """A file of two requests and a bit."""
    data = random.Random(5).randbytes(2 * REQUEST_BYTES + 4321)
    (tmp_path / "data").write_bytes(data)
    return tmp_path / "data", data


@pytest.mark.parametrize(
    ("start", "count"),
    [(0, 2 * REQUEST_BYTES + 4321), (4000, REQUEST_BYTES + 1), (17, 0), (2 * REQUEST_BYTES, 4321)],
)
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
    with (
        DiskFile(path) as file,
        pytest.raises(ReadError, match=f"data at byte {len(data)}: it ends there, 10 bytes too early"),
    ):
        file.read(len(data) - 90, 100)


def test_failing_read_names_file_and_offset() -> None:
    """Page 0 of a process is never mapped, so its memory file answers with a true input/output error."""
    with (
        DiskFile(Path("/proc/self/mem")) as file,
        pytest.raises(ReadError, match="/proc/self/mem at byte 16: Input/output error"),
    ):
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
    for path, fault in (
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "none", "No such file"),
    ):
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


# ---- past the page cache -----------------------------------------------------------------------------------

PAGE = DIRECT_ALIGNMENT


def pages(count: int) -> memoryview:
    """Memory that starts at a page."""
    return memoryview(mmap.mmap(-1, count))


def cached(path: Path) -> int:
    """Pages of a file that the page cache holds."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        seen = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        try:
            assert (
                ctypes.CDLL(None).mincore(
                    ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), seen
                )
                == 0
            )
        finally:
            del first  # the map cannot be closed before
        return sum(page & 1 for page in seen)


def let_go(path: Path) -> None:
    """Bring a file to the disk and out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def reads_directly(path: Path) -> bool:
    """Whether the kernel itself reads this file past the page cache."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.preadv(file, [pages(PAGE)], 0) == PAGE
    except OSError:
        return False
    finally:
        os.close(file)


@pytest.fixture(params=["disk", "/dev/shm"])
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, bytes]]:
    """A file of whole pages, here and in memory."""
    if request.param != "disk" and not os.access(request.param, os.W_OK):
        pytest.skip(f"needs {request.param}")
    data = random.Random(6).randbytes(40 * PAGE)
    with tempfile.TemporaryDirectory(dir=tmp_path if request.param == "disk" else request.param) as folder:
        (Path(folder) / "whole").write_bytes(data)
        yield Path(folder) / "whole", data


@pytest.mark.parametrize("start", [0, 3 * PAGE, 39 * PAGE])
@pytest.mark.parametrize("request_bytes", [PAGE, 7 * PAGE, disk.DIRECT_BYTES])
def test_direct_reads_are_the_files_bytes(
    whole: tuple[Path, bytes], start: int, request_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = whole
    monkeypatch.setattr(disk, "DIRECT_BYTES", request_bytes)
    with DirectFile(path) as file:
        buffer = pages(len(data) - start)
        file.read_direct(buffer, start)
        assert file.direct == reads_directly(path)
        assert buffer == data[start:]
        file.read_into(buffer, start)
        assert buffer == data[start:]


@pytest.mark.parametrize(
    ("shift", "start", "count"),
    [(1, 0, PAGE), (0, 1, PAGE), (0, 0, PAGE + 1), (0, 5 * PAGE, 0), (512, 512, 512)],
)
def test_what_is_not_aligned_is_read_through_the_cache(
    whole: tuple[Path, bytes], shift: int, start: int, count: int
) -> None:
    path, data = whole
    memory = pages(3 * PAGE)
    memory[:] = b"\xee" * len(memory)
    with DirectFile(path) as file:
        before = file.direct
        file.read_direct(memory[shift : shift + count], start)
        assert file.direct == before  # as it was: nothing was refused
    assert memory == b"\xee" * shift + data[start : start + count] + b"\xee" * (len(memory) - shift - count)


@pytest.mark.parametrize("way", ["direct", "unaligned", "refused"])
def test_nothing_read_so_stays_in_the_page_cache(tmp_path: Path, way: str) -> None:
    path, data = tmp_path / "data", random.Random(7).randbytes(64 * PAGE)
    path.write_bytes(data)
    let_go(path)
    if cached(path):
        pytest.skip("needs a file system that lets its cache be emptied")
    memory = pages(len(data) + PAGE)
    buffer = memory[100:][: len(data)] if way == "unaligned" else memory[: len(data)]
    with DirectFile(path) as file:
        file.direct = file.direct and way != "refused"
        file.read_direct(buffer, 0)
        assert cached(path) == 0
        file.read_into(buffer, 0)
        assert cached(path)  # so this test would see them
        file.forget()
        assert cached(path) == 0
    assert buffer == data


def test_files_that_refuse_at_open() -> None:
    """No file that the kernel makes up has anything past the page cache."""
    path = Path("/proc/version")
    with pytest.raises(OSError, match="Invalid argument"):
        os.open(path, os.O_RDONLY | os.O_DIRECT)
    memory, expected = pages(PAGE), path.read_bytes()
    with DirectFile(path) as file:
        assert not file.direct
        with pytest.raises(ReadError, match=f"/proc/version at byte {len(expected)}: it ends there"):
            file.read_direct(memory, 0)
    assert memory[: len(expected)] == expected


def test_files_that_refuse_at_the_first_read(
    whole: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here because a read is tried that no disk takes."""
    path, data = whole
    if not reads_directly(path):
        pytest.skip("needs a file system that reads past the page cache")
    monkeypatch.setattr(disk, "DIRECT_ALIGNMENT", 1)
    memory = pages(2 * PAGE)
    with DirectFile(path) as file:
        assert file.direct
        file.read_direct(memory[1:-1], 3)
        assert memory[1:-1] == data[3 : 2 * PAGE + 1]
        try:
            taken = os.preadv(file._direct, [memory[1:-1]], 3) > 0  # as some file systems do
        except OSError:
            taken = False
        assert file.direct == taken
        file.read_direct(memory[1:-1], 5)
        assert memory[1:-1] == data[5 : 2 * PAGE + 3]


def test_direct_reads_of_a_file_that_ends_early(whole: tuple[Path, bytes]) -> None:
    path, data = whole
    with DirectFile(path) as file:
        before = file.direct
        for end in (10 * PAGE + 700, 10 * PAGE, 0):
            os.truncate(path, end)
            buffer = pages(20 * PAGE)
            with pytest.raises(
                ReadError, match=f"{path} at byte {end}: it ends there, {20 * PAGE - end} bytes too early"
            ):
                file.read_direct(buffer, 0)
            assert buffer[:end] == data[:end]
            with pytest.raises(
                ReadError, match=f"{path} at byte {30 * PAGE}: it ends there, {20 * PAGE} bytes too early"
            ):
                file.read_direct(buffer, 30 * PAGE)
        assert file.direct == before


def test_a_disk_that_fails_is_not_asked_another_way(whole: tuple[Path, bytes]) -> None:
    """Behind the descriptor is another file, whose byte 4096 gives a true input/output error."""
    path, _ = whole
    with DirectFile(path) as file:
        if not file.direct:
            pytest.skip("needs a file system that reads past the page cache")
        broken = os.open("/proc/self/mem", os.O_RDONLY)
        os.dup2(broken, file._direct)
        os.close(broken)
        with pytest.raises(ReadError, match=f"cannot read {path} at byte 4096: Input/output error"):
            file.read_direct(pages(PAGE), PAGE)
        assert file.direct


def test_many_threads_read_directly(whole: tuple[Path, bytes]) -> None:
    path, data = whole
    rng = random.Random(8)
    spans = [sorted(rng.sample(range(41), 2)) for _ in range(300)]

    def right(span: list[int]) -> bool:
        first, last = (PAGE * page for page in span)
        buffer = pages(last - first)
        file.read_direct(buffer, first)
        return buffer == data[first:last]

    with DirectFile(path) as file, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, spans))


def test_a_direct_file_is_given_back(whole: tuple[Path, bytes], tmp_path: Path) -> None:
    path, data = whole
    before = len(os.listdir("/proc/self/fd"))
    with DirectFile(path) as file:
        assert len(os.listdir("/proc/self/fd")) == before + 1 + file.direct
        path.rename(path.with_name("other"))  # one file from beginning to end, whatever becomes of its name
        buffer = pages(len(data))
        file.read_direct(buffer, 0)
        assert buffer == data
    file.close()
    for fault in (tmp_path, tmp_path / "none", Path("/dev/null")):
        with pytest.raises(ReadError, match=r"not a regular file or a block device|No such file"):
            DirectFile(fault)
    assert len(os.listdir("/proc/self/fd")) == before


def test_block_devices_are_read_where_they_are_welcome(whole: tuple[Path, bytes]) -> None:
    path, data = whole
    try:
        made = subprocess.run(["losetup", "-f", "--show", path], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to set up a loop device")
    device = Path(made.stdout.strip())
    try:
        with pytest.raises(ReadError, match=r"it is not a regular file$"):
            DiskFile(device)
        with DirectFile(device) as file:
            assert (file.size, file.direct) == (len(data), True)
            buffer = pages(len(data))
            file.read_direct(buffer, 0)
            assert buffer == data
    finally:
        subprocess.run(["losetup", "-d", device], check=True)


def test_what_is_made_is_its_owner_s_alone_whatever_the_umask(tmp_path: Path) -> None:
    """What is missing above it too."""
    before = os.umask(0)
    try:
        make_private(tmp_path / "one" / "two" / "three")
    finally:
        os.umask(before)
    for path in (tmp_path / "one").rglob("*"):
        assert path.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o700
    make_private(tmp_path / "one" / "two")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_private(tmp_path / "file" / "inside")
