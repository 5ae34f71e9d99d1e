"""Stores of KV whose records are a function of their keys, and ways to look at them and to break the disk
beneath."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from penstock.kv.store import directory as store_directory
from penstock.kv.store.blocks import BlockStore
from penstock.kv.store.directory import JOURNAL, StoreIdentity
from penstock.kv.store.diskpool import LostKV
from penstock.kv.store.seal import sealed_identity
from streams import LONG, no_thread_left, within

IDENTITY = bytes(range(16))
SECRET = bytes(range(100, 132))
"""With which their records are sealed."""
PAGE = 4096
CAP = 512 << 10
"""Of stores whose segments have eight slots of a page."""


def nothing() -> None: ...


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "little") * 2


def name_of(identity: bytes) -> str:
    return sealed_identity(identity, SECRET).hex()


def directory_of(directory: Path, identity: bytes = IDENTITY) -> Path:
    return store_directory.directory_of(directory, sealed_identity(identity, SECRET))


def number_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


def memory(size: int = PAGE) -> NDArray[np.uint8]:
    """Aligned to a page, and not zero."""
    room = np.full(size + PAGE, 0xEE, np.uint8)
    first = -room.ctypes.data % PAGE
    return room[first : first + size]


def payload(number: int, size: int = PAGE, salt: int = 0) -> NDArray[np.uint8]:
    """What the record has whose key is `key_of(number)`."""
    data = memory(size)
    data[:] = np.random.default_rng((number, salt)).integers(0, 256, size, np.uint8)
    return data


def open_store(
    directory: Path, cap: int = CAP, size: int = PAGE, identity: bytes = IDENTITY, **more: object
) -> BlockStore:
    secret, about = more.pop("secret", SECRET), more.pop("about", None) or {}
    named = StoreIdentity(identity, size, secret, about)  # type: ignore[arg-type]
    return BlockStore.open(directory, named, cap, **{"threads": (2, 1)} | more)  # type: ignore[arg-type]


@contextmanager
def opened(
    directory: Path, cap: int = CAP, size: int = PAGE, identity: bytes = IDENTITY, **more: object
) -> Iterator[BlockStore]:
    with no_thread_left():
        store = open_store(directory, cap, size, identity, **more)
        try:
            yield store
        finally:
            assert within(LONG, store.close)


def finish(store: BlockStore) -> None:
    """Until nothing is under way."""
    late = time.monotonic() + LONG
    store.poll()
    while store._writes or store._reads or store._upkeep.chores:
        assert time.monotonic() < late, "something never ends"
        time.sleep(1e-4)
        store.poll()


def put(store: BlockStore, numbers: Iterable[int], salt: int = 0) -> None:
    """Raises what a write does."""
    for number in numbers:
        assert within(
            LONG, store.write(key_of(number), payload(number, store.record_bytes, salt), nothing).result
        )
    finish(store)


def got(store: BlockStore, number: int) -> NDArray[np.uint8]:
    """Raises LostKV."""
    into = memory(store.record_bytes)
    task = store.read(key_of(number), into, nothing)
    assert within(LONG, task.wait)
    store.poll()
    task.result()
    return into


def holds(store: BlockStore, number: int, salt: int = 0) -> bool:
    """Whether it is there. What is there is right."""
    try:
        found = got(store, number)
    except LostKV:
        return False
    assert np.array_equal(found, payload(number, store.record_bytes, salt)), f"record {number} is another one"
    return True


def held(store: BlockStore, numbers: Iterable[int]) -> set[int]:
    return {number for number in numbers if holds(store, number)}


def sound(store: BlockStore) -> bool:
    """Whether all that is there is right, read as it is on the disk."""
    into = memory(store.record_bytes)
    for key, place in store._index.items():
        segment, slot = store._space.find(place)
        segment.file.read(slot, into.data)
        if not np.array_equal(into, payload(number_of(key), store.record_bytes)):
            return False
    return True


def known(store: BlockStore) -> set[int]:
    return set(map(number_of, store.keys()))


def files(directory: Path, identity: bytes = IDENTITY) -> list[Path]:
    """The segments, oldest first."""
    return sorted(directory_of(directory, identity).glob("*.segment"))


def journal(directory: Path) -> Path:
    return directory_of(directory, IDENTITY) / JOURNAL


def real(path: Path) -> int:
    """Bytes of the disk, of all that is in a directory."""
    total = 0
    for entry in os.scandir(path):
        with suppress(FileNotFoundError):
            total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def flip(path: Path, byte: int, bit: int = 3) -> None:
    with open(path, "r+b", buffering=0) as file:
        (old,) = os.pread(file.fileno(), 1, byte)
        os.pwrite(file.fileno(), bytes([old ^ 1 << bit]), byte)


def place_of(store: BlockStore, number: int) -> tuple[Path, int]:
    """The file that a record is in, and its first byte there."""
    segment, slot = store._space.find(store._index[key_of(number)])
    return segment.file.path, segment.file.place(slot)


def filled(directory: Path, numbers: Iterable[int], **more: object) -> None:
    """A store with these records, closed."""
    with opened(directory, **more) as store:  # type: ignore[arg-type]
        put(store, numbers)


@contextmanager
def failing(
    name: str, fault: int, when: Callable[..., bool] = lambda *arguments: True, at: int = 0
) -> Iterator[list[int]]:
    """Calls of a function of `os` fail with this errno, from number `at` on of those for which `when` holds.
    Yields how many have."""
    right, count = getattr(os, name), [0]

    def wrong(*arguments: object, **more: object) -> object:
        if when(*arguments):
            count[0] += 1
            if count[0] > at:
                raise OSError(fault, os.strerror(fault), "somewhere")
        return right(*arguments, **more)

    with patch.object(os, name, wrong):
        yield count
