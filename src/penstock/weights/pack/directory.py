"""Keeps a pack's directory to one process, and lets its files appear whole, whenever that is killed."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from penstock.base.errors import PenstockError
from penstock.weights.pieces import JOURNAL

BESIDE = ".tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PackError(PenstockError):
    """A pack cannot be written where it was asked for."""


@contextmanager
def locked(out: Path, busy: Callable[[], None] | None = None, mode: int = 0o777) -> Iterator[None]:
    """Make the directory and keep others from packing into it; if nothing comes of it, it goes again, and
    what was made above it.

    Directories are made with `mode`, as far as the umask lets it. If another process has it, `busy` is
    called, and then waits for that one to end, whether by a kill or in time; without `busy`, that is a
    PackError. So is what the system refuses in the meantime.
    """
    made: list[Path] = []
    try:
        directory = _lock(out, busy, mode, made)
        try:
            yield
        except BaseException:
            _remove_empty(made)
            raise
        finally:
            os.close(directory)
    except OSError as error:
        raise PackError(_explain(error, out)) from error


def _lock(out: Path, busy: Callable[[], None] | None, mode: int, made: list[Path]) -> int:
    """Return the locked directory, as a descriptor to be closed. `made` gets the directories that are new,
    outermost first."""
    while True:
        made += _make(out, mode)
        directory = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if busy is None:
                    raise PackError(
                        f"another process is packing into {out}; wait for it, or choose another directory"
                    ) from error
                busy()
                fcntl.flock(directory, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(directory), os.stat(out)):
                    return directory
        except BaseException:
            os.close(directory)
            raise
        os.close(directory)  # whoever had it has removed it


def _make(path: Path, mode: int) -> list[Path]:
    """Make a directory and what is missing above it. Returns those that are new, outermost first; an error
    leaves none of them."""
    made: list[Path] = []
    try:
        for folder in reversed([path, *takewhile(lambda above: not os.path.isdir(above), path.parents)]):
            try:
                folder.mkdir(mode)
                made.append(folder)
            except OSError:
                if not os.path.isdir(folder):
                    raise
    except BaseException:
        _remove_empty(made)
        raise
    return made


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove those directories, given outermost first, that hold nothing."""
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file for reading and writing, and close it at the end of the context. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
    try:
        yield file
    finally:
        os.close(file)


def cut(journal: int, lines: Sequence[bytes]) -> None:
    """Let the journal hold these lines, which it begins with, and no more."""
    text = b"".join(lines)
    os.ftruncate(journal, min(os.fstat(journal).st_size, len(text)))
    os.lseek(journal, 0, os.SEEK_SET)
    write_all(journal, text)
    os.fsync(journal)


def write_file(path: Path, data: bytes | bytearray) -> None:
    """Let `data` appear under a name, whole and on the disk."""
    beside = path.with_name(path.name + BESIDE)
    with opened(beside, os.O_CREAT | os.O_TRUNC) as file:
        write_all(file, data)
        os.fsync(file)
    os.rename(beside, path)
    sync_directory(path.parent)


def write_all(file: int, data: bytes | bytearray) -> None:
    """Write all of `data` at the file's position. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk. Raises OSError."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _explain(error: OSError, out: Path) -> str:
    """Return what to tell a user of an error, and what to do."""
    begun, groups = os.path.lexists(out / JOURNAL), 0
    with suppress(OSError):
        groups = (out / JOURNAL).read_bytes().count(b"\n") - 1
    kept = "what is packed is kept: " if groups > 0 else ""
    where = error.filename or out
    fault = (
        "it exists and is no directory"
        if isinstance(error, FileExistsError)
        else error.strerror or str(error)
    )
    if error.errno in _FULL:
        return (
            f"no room for {where}: {fault}; {kept}free some space and run the same command "
            f"again{f', or remove {out}' if begun else ''}"
        )
    hint = (
        f"{kept}the same command goes on with it"
        if kept
        else f"give another --out or --store{f' and remove {out}' if begun else ''}"
    )
    return f"cannot write {where}: {fault}; {hint}"
