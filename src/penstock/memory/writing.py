"""Write files so that whatever ends the process leaves the old content or the new one."""

import os
from contextlib import suppress
from io import FileIO
from pathlib import Path

from penstock.memory.disk import DIRECT_BYTES, REFUSALS


def write_all(plain: FileIO, data: bytes | memoryview, offset: int, direct: FileIO | None = None) -> None:
    """Write all of `data` at byte `offset` of an open file. Raises OSError.

    direct: the same file, opened by `open_direct`. Where it refuses, `plain` takes over: not every file
        system says at once that it cannot be passed by.
    """
    view, done, out = memoryview(data), 0, direct or plain
    while done < len(view):
        try:
            done += os.pwrite(out.fileno(), view[done : done + DIRECT_BYTES], offset + done)
        except OSError as fault:
            if out is plain or fault.errno not in REFUSALS:
                raise
            out = plain


def open_direct(path: Path) -> FileIO:
    """Open a file for writing past the page cache, or through it where that is refused. Raises OSError."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        return FileIO(os.open(path, flags | os.O_DIRECT), "w")
    except OSError:
        return FileIO(os.open(path, flags), "w")


def replace_file(path: Path, data: bytes | memoryview) -> FileIO:
    """Put a file with this content in the place of `path`, and return it, open for more. Raises OSError.

    The new content is on the disk before it takes the place of the old one.
    """
    beside = path.with_name(path.name + ".tmp")
    with suppress(FileNotFoundError):
        os.unlink(beside)  # It was left half way, or is a link to a file of another user.
    file = FileIO(os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "r+")
    try:
        write_all(file, data, 0)
        os.fsync(file.fileno())
        os.rename(beside, path)
    except BaseException:
        file.close()
        with suppress(OSError):
            os.unlink(beside)
        raise
    with suppress(OSError):  # A power loss may bring the old file back, which is as good.
        sync_directory(path.parent)
    return file


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk. Raises OSError."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
