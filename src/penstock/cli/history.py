"""Keeps the lines that were typed into chats, in one file for all of them.

Why two chats at once lose nothing. An entry is a line of JSON, appended in one write, under a lock on the
file. A file that has grown too long is replaced by one with its newest entries, under the same lock: whoever
waited for the lock may then hold a file that no name leads to any more, so it looks at the name again, and
opens the new one. A process that is killed leaves at most half a line, which is no JSON and is skipped; a
line break is put before the next entry.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOST_ENTRIES = 1000
"""Entries that are kept. The file is cut to so many once it has twice as many bytes as they need."""
MOST_BYTES = 1 << 20
_LONGEST = 1 << 16
"""Characters of an entry; a longer one, a pasted file, is not kept."""


class ChatHistory:
    """Reads and appends to a file of entries, the oldest first. Nobody else may read it.

    Where it can not be read or written, there is no history, and no error.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> list[str]:
        """Return the newest entries."""
        with suppress(OSError):
            return _entries(self.file.read_bytes())[-MOST_ENTRIES:]
        return []

    def append(self, entry: str) -> None:
        """Add an entry."""
        if len(entry) > _LONGEST:
            return
        line = json.dumps(entry).encode() + b"\n"
        with suppress(OSError):
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked() as descriptor:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line
                os.write(descriptor, line)
                if size + len(line) > MOST_BYTES:
                    self._cut(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Open the file that the name leads to, and hold its lock."""
        while True:
            descriptor = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if self._named(descriptor):
                    os.fchmod(descriptor, 0o600)
                    yield descriptor
                    return
            finally:
                os.close(descriptor)

    def _named(self, descriptor: int) -> bool:
        """Tell whether the name still leads to this file."""
        try:
            return os.path.samestat(os.fstat(descriptor), self.file.stat())
        except FileNotFoundError:
            return False

    def _cut(self, descriptor: int) -> None:
        """Replace the file by one with its newest entries, of at most half the bytes."""
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        lines = [json.dumps(entry).encode() + b"\n" for entry in _entries(data)[-MOST_ENTRIES:]]
        while sum(map(len, lines)) > MOST_BYTES // 2:
            lines = lines[len(lines) // 2 + 1 :]
        new = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        try:
            with open(
                os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb"
            ) as file:
                file.writelines(lines)
            os.replace(new, self.file)
        finally:
            new.unlink(missing_ok=True)


def _entries(data: bytes) -> list[str]:
    """Return what is whole of a file's entries."""
    found = []
    for line in data.splitlines():
        with suppress(ValueError):
            if isinstance(entry := json.loads(line), str):
                found.append(entry)
    return found
