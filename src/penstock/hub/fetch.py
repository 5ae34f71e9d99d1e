"""Fetches files of a commit into the Hugging Face cache: what was begun goes on, and what is wrong is not
kept.

Small files are huggingface_hub's work. It begins large ones anew after an interruption, and does not compare
them with their digest, so their bytes are fetched here. It then gives them their names.

Why this is safe. A file's bytes are appended to one beside its blob, `DIGEST.incomplete`, by one thread of
one process: the one that has the lock on it. Another waits until it is gone, and then finds the blob. A
lock on a file that was renamed meanwhile is no lock on what has its name now, so the two are compared after
locking. The blob appears by a rename, after SHA-256 over every byte was found to be the promised one, also
over those of earlier runs. So a kill at any moment leaves either bytes to go on from or the whole file, and
a lock that the file system does not keep can only lead to a digest that is wrong. Ctrl-C sets `stop`, on
which threads end at their next piece; the file keeps what it has.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from threading import Event, Lock
from typing import BinaryIO

import httpx2

from penstock.hub.cache import PARTIAL, CachedRepository
from penstock.hub.faults import HubError, hub_faults
from penstock.hub.names import ModelName
from penstock.hub.remote import RemoteFile, link, stream

AT_ONCE = 4
"""Files that are fetched at the same time."""
PIECE = 8 << 30
"""Most bytes to ask for at once: networks that deliver files have limits for one answer."""
CHUNK = 1 << 20
TRIES, PAUSE = 5, 1.0
"""Attempts without a single byte after which a file is given up, and the seconds before the second one."""
_POLL = 0.2
Advance = Callable[[int], None]


class FetchStopped(Exception):
    """A thread that fetches ends by this, since it is not waited for any more."""


@dataclass(slots=True)
class Fetch:
    """Fetches files of one commit. `advance` is called with bytes as they come, by one thread at a time; they
    may be less than none."""

    name: ModelName
    commit: str
    advance: Advance = lambda count: None
    stop: Event = field(default_factory=Event)
    _telling: Lock = field(default_factory=Lock)

    @property
    def repository(self) -> CachedRepository:
        """Return where the files go."""
        return CachedRepository.of(self.name.repository)

    def missing(self, files: Sequence[RemoteFile]) -> list[RemoteFile]:
        """Return those of the files that are not in the cache."""
        snapshot = self.repository.snapshot(self.commit)
        return [one for one in files if not (snapshot / one.path).exists()]

    def left(self, files: Sequence[RemoteFile]) -> int:
        """Return the bytes of files that are still to be fetched."""
        blobs = {one.sha256 or one.blob or one.path: one for one in files}
        return sum(self._left(one) for one in blobs.values())

    def _left(self, file: RemoteFile) -> int:
        if not file.sha256:
            return file.size
        if self._blob(file).exists():
            return 0
        with suppress(OSError):
            have = self._partial(file).stat().st_size
            return file.size - have if have <= file.size else file.size
        return file.size

    def run(self, files: Sequence[RemoteFile]) -> None:
        """Fetch files, and give them their names in the cache. Raises HubError; what was fetched stays."""
        with ThreadPoolExecutor(AT_ONCE, "penstock-fetch") as pool:
            try:
                running = [pool.submit(self._fetch, file) for file in files]
                wait(running, return_when=FIRST_EXCEPTION)
                failed = next((one for one in running if one.done() and one.exception()), None)
                if failed is not None:
                    failed.result()
            finally:  # Also on Ctrl-C: no thread goes on by itself.
                self.stop.set()
                pool.shutdown(cancel_futures=True)
        self.stop.clear()

    def _fetch(self, file: RemoteFile) -> None:
        if file.sha256:
            with hub_faults(self.name, file.path):
                self._fetch_large(file)
        path = link(self.name, self.commit, file)
        if not file.sha256:
            self._check_small(file, path)
            self._advanced(file.size)

    def _fetch_large(self, file: RemoteFile) -> None:
        """Fetch the bytes of a file that has a digest."""
        blob = self._blob(file)
        if blob.exists():
            return
        left = self._left(file)
        with _claimed(self._partial(file), self.stop) as out:
            if not blob.exists():  # Another process may have fetched it meanwhile.
                left = 0
                tail = _Tail(out, hashlib.sha256(), self.stop)
                self._append(file, tail, file.size)
                if tail.digest.hexdigest() != file.sha256:
                    self._partial(file).unlink()
                    raise self._wrong(file, "its SHA-256 is another; what was fetched of it is removed")
                os.fsync(out.fileno())
                self._partial(file).rename(blob)
        self._partial(file).unlink(missing_ok=True)  # What locking made for nothing.
        self._advanced(left)

    def beginning(self, file: RemoteFile, count: int) -> Path:
        """Return a file that begins with at least so many bytes of one of the Hub, fetched as far as they
        are not here yet. What is fetched later goes on from there."""
        blob, begun = self._blob(file), self._partial(file)
        if blob.exists():
            return blob
        with hub_faults(self.name, file.path), _claimed(begun, self.stop) as out:
            if not blob.exists():
                self._append(file, _Tail(out), min(count, file.size))
                return begun
        begun.unlink(missing_ok=True)
        return blob

    def _append(self, file: RemoteFile, tail: "_Tail", end: int) -> None:
        """Append bytes until there are `end`."""
        tries = TRIES
        if tail.have > file.size:
            tail.restart()
        while tail.have < end:
            before = tail.have
            try:
                self._append_once(file, tail, end)
            except httpx2.HTTPError as error:
                answer = getattr(error, "response", None)
                refused = answer is not None and answer.status_code < httpx2.codes.INTERNAL_SERVER_ERROR
                if refused or (tail.have <= before and tries <= 1):
                    raise
            tries = TRIES if tail.have > before else tries - 1
            if tries < 1:
                raise self._wrong(file, f"it ends after {tail.have:,} of {file.size:,} bytes")
            if tries < TRIES and self.stop.wait(PAUSE * (TRIES - tries)):
                raise FetchStopped

    def _append_once(self, file: RemoteFile, tail: "_Tail", end: int) -> None:
        """Append what one answer has of the bytes that are asked for."""
        wanted = range(tail.have, min(end, tail.have + PIECE))
        with stream(self.name, self.commit, file, wanted) as answer:
            if answer.status_code == httpx2.codes.OK and tail.have:  # All of it, from its first byte.
                self._advanced(-tail.have)
                tail.restart()
            for chunk in answer.iter_raw():
                self._advanced(tail.write(chunk[: end - tail.have]))
                if self.stop.is_set():
                    raise FetchStopped
                if tail.have >= end:
                    break

    def _check_small(self, file: RemoteFile, path: Path) -> None:
        data = path.read_bytes()
        made = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        if file.blob and made != file.blob:
            target = Path(os.path.realpath(path))
            path.unlink()
            target.unlink(missing_ok=True)
            raise self._wrong(file, "its digest is another; what was fetched of it is removed")

    def _wrong(self, file: RemoteFile, what: str) -> HubError:
        return HubError(f"{file.path} of {self.name} did not come as the Hub promised: {what}; try again")

    def _advanced(self, count: int) -> None:
        with self._telling:
            if count:
                self.advance(count)

    def _blob(self, file: RemoteFile) -> Path:
        return self.repository.blobs / file.sha256

    def _partial(self, file: RemoteFile) -> Path:
        return self.repository.blobs / f"{file.sha256}{PARTIAL}"


class _Tail:
    """The end of a file that grows, and a digest of all of it, if one is asked for."""

    def __init__(
        self, out: BinaryIO, digest: "hashlib._Hash | None" = None, stop: Event | None = None
    ) -> None:
        """stop: ends the reading of what is there, which takes long for large files."""
        self._out, self._digest = out, digest
        out.seek(0)
        while digest is not None and (chunk := out.read(CHUNK)):
            if stop is not None and stop.is_set():
                raise FetchStopped
            digest.update(chunk)
        self.have = out.seek(0, os.SEEK_END)

    @property
    def digest(self) -> "hashlib._Hash":
        """Return the digest of what is there."""
        assert self._digest is not None
        return self._digest

    def write(self, chunk: bytes) -> int:
        """Append bytes at once. Return how many."""
        self._out.write(chunk)
        self._out.flush()
        if self._digest is not None:
            self._digest.update(chunk)
        self.have += len(chunk)
        return len(chunk)

    def restart(self) -> None:
        """Drop all that is there."""
        self._out.truncate(0)
        self.have = 0
        if self._digest is not None:
            self._digest = hashlib.sha256()


@contextmanager
def _claimed(path: Path, stop: Event) -> Iterator[BinaryIO]:
    """Open a file to append to it, which no other process does meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "a+b") as file:
            if _locked(file) and _is_still(file, path):
                yield file
                return
        if stop.wait(_POLL):
            raise FetchStopped


def _locked(file: BinaryIO) -> bool:
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # The file system has no locks: the digest alone guards then.
        return True
    return True


def _is_still(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
