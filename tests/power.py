"""A disk that loses its power: of what was written in a directory and not synced, some is there afterwards
and some is not.

What POSIX promises and no more: bytes are on the disk after fsync or fdatasync of their file, names after
fsync of their directory. Before that each write may have reached the disk or not, whatever came before or
after it; a write that did not leaves zeros, or what was there. Changes of names reach it in their order.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

CALLS = ("open", "pwrite", "write", "ftruncate", "fsync", "fdatasync", "rename", "unlink")


class PowerCut(BaseException):
    """Nothing is done from now on."""


@dataclass(eq=False)
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes, by where they begin, and cuts to a length, without bytes."""

    def settle(self, keep: Callable[[int], bool] = lambda _: True) -> None:
        """The pending changes reach the disk, or only those that are to be kept, by their numbers."""
        for number, (at, data) in enumerate(self.pending):
            if data is None:
                del self.durable[at:]
                self.durable.extend(bytes(at - len(self.durable)))
            elif keep(number):
                self.durable.extend(bytes(max(at + len(data) - len(self.durable), 0)))
                self.durable[at : at + len(data)] = data
        self.pending.clear()


class Disk:
    """Directories on it, without folders in them, written by calls of `os` while `powered`."""

    def __init__(self, *roots: Path) -> None:
        self.calls = 0
        self._lock = threading.RLock()
        self._names: dict[Path, _File] = {}
        self._durable: dict[Path, _File] = {}
        self._changes: dict[Path, list[tuple[Path, _File | None]]] = {root: [] for root in roots}
        """By directory."""
        self._opened: dict[int, _File | Path] = {}
        """By descriptor: a file, or one of the directories."""
        for path in (path for root in roots for path in root.iterdir()):
            self._names[path] = self._durable[path] = _File(bytearray(path.read_bytes()))

    @contextmanager
    def powered(self, until: int = 0) -> Iterator[None]:
        """Keep account of what is done, up to the call of that number, which raises PowerCut, as do all after
        it."""
        self.calls = 0
        real = {name: getattr(os, name) for name in CALLS}

        def wrap(name: str) -> Callable[..., Any]:
            def call(*given: Any, **more: Any) -> Any:
                with self._lock:
                    if not self._concerns(name, given):
                        return real[name](*given, **more)
                    self.calls += 1
                    if until and self.calls >= until:
                        raise PowerCut
                    synced = name in (
                        "fsync",
                        "fdatasync",
                    )  # The real disk is not waited for: its power stays on.
                    result = None if synced else real[name](*given, **more)
                    self._account(name, result, given)
                    return result

            return call

        with patch.multiple(os, **{name: wrap(name) for name in CALLS}):
            yield

    def restart(self, rng: random.Random) -> None:
        """Leave in the directory what the disk has."""
        for root, changes in self._changes.items():
            for name, file in changes[: rng.randint(0, len(changes))]:
                self._apply(name, file)
            for path in root.iterdir():
                path.unlink()
        for file in {*self._durable.values()}:
            # Often a single write is lost, which whoever looks at the last one alone does not see.
            lost = rng.randrange(len(file.pending)) if file.pending else 0
            one = rng.random() < 0.6
            file.settle(lambda number, lost=lost, one=one: number != lost if one else rng.random() < 0.5)  # type: ignore[misc]
        for name, file in self._durable.items():
            name.write_bytes(file.durable)

    def _apply(self, name: Path, file: _File | None) -> None:
        if file is None:
            self._durable.pop(name, None)
        else:
            self._durable[name] = file

    def _concerns(self, name: str, given: tuple[Any, ...]) -> bool:
        if name == "open":
            path, flags = Path(given[0]), given[1]
            return path in self._changes or (
                path.parent in self._changes and bool(flags & (os.O_WRONLY | os.O_RDWR))
            )
        if name in ("rename", "unlink"):
            return Path(given[0]).parent in self._changes
        held = Path(f"/proc/self/fd/{given[0]}").readlink()
        return given[0] in self._opened and (held in self._changes or held.parent in self._changes)

    def _account(self, call: str, result: Any, given: tuple[Any, ...]) -> None:
        """What a call has done."""
        match call:
            case "open":
                path, flags = Path(given[0]), given[1]
                if path in self._changes:
                    self._opened[result] = path
                    return
                if path not in self._names:
                    self._name(path, _File())
                self._opened[result] = file = self._names[path]
                if flags & os.O_TRUNC:
                    file.pending.append((0, None))
            case "rename":
                assert Path(given[0]).parent == Path(given[1]).parent
                self._name(Path(given[1]), self._names[Path(given[0])])
                self._name(Path(given[0]), None)
            case "unlink":
                self._name(Path(given[0]), None)
            case "fsync" | "fdatasync" if isinstance(root := self._opened[given[0]], Path):
                for change in self._changes[root]:
                    self._apply(*change)
                self._changes[root].clear()
            case _:
                file = self._opened[given[0]]  # type: ignore[assignment]
                assert isinstance(file, _File)
                if call in ("fsync", "fdatasync"):
                    file.settle()
                elif call == "ftruncate":
                    file.pending.append((given[1], None))
                else:
                    at = given[2] if call == "pwrite" else os.lseek(given[0], 0, os.SEEK_CUR) - result
                    file.pending.append((at, bytes(given[1][:result])))

    def _name(self, name: Path, file: _File | None) -> None:
        self._changes[name.parent].append((name, file))
        if file is None:
            del self._names[name]
        else:
            self._names[name] = file
