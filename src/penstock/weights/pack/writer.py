"""Writing a pack: one pass over a checkpoint, resumable after a kill at any instruction, whole or not there.

Why this is safe. Weights go to `weights.bin.partial`; the journal `manifest.partial` names a group only when
its bytes are on the disk. When the journal names all, the store gets its name, and last of all
`manifest.json` appears by a rename: without it, nothing is a pack. A later run takes up what the journal
names, reading back the last such group. The directory is locked meanwhile.
"""

import errno
import fcntl
import hashlib
import json
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch

from penstock.arch.layout import GroupLayout, group_layouts
from penstock.arch.shards import WHOLE, Shard
from penstock.base.errors import CheckpointError, PenstockError
from penstock.base.units import format_size
from penstock.memory.disk import DirectFile, DiskFile, ReadError
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shards import INDEX, SINGLE
from penstock.weights.pack.manifest import Manifest, Run, config_checksum, decoded, encoded, place
from penstock.weights.pack.reader import (
    THREADS,
    Pack,
    file_checksum,
    in_order,
    is_block_device,
    read_manifest,
)
from penstock.weights.pieces import MANIFEST, PIECE_BYTES, STORE, piece_digest

JOURNAL = "manifest.partial"
PARTIAL = ".partial"
COMMIT_BYTES = 256 << 20
"""So much may have to be written again after a kill. Waiting for the disk after every expert would take most
of the time."""
SPARE_BYTES = 1 << 20
_SIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""What makes the pack a model directory of its own."""
_TAKEN = (*_SIDE, "additional_chat_templates", MANIFEST, JOURNAL, SINGLE, INDEX)
"""Names in a pack's directory that no store may have: the pack would write over it, or be taken for a
checkpoint."""
_BESIDE = ".tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PackError(PenstockError):
    """A pack that cannot be written where it was asked for."""


Progress = Callable[[int], None]


def write_pack(
    checkpoint: Checkpoint,
    out: Path,
    dtype: str,
    store: Path | None = None,
    progress: Progress | None = None,
    shard: Shard | None = None,
) -> bool:
    """Write the pack of a checkpoint, or of a shard of it, into directory `out`; False if it was there
    already, and nothing was done.

    `store`: a file or block device for the weights, if not in `out`. A block device is overwritten.
    `progress` is told of bytes as they are written, and at once of those that an earlier run wrote. Memory:
    THREADS pieces of PIECE_BYTES and what their conversion takes. Raises CheckpointError for what is wrong
    with the checkpoint or with the pack that is there, PackError for what stands in the way of a new one:
    what was written then stays for the next try. Raises ConfigError for a shard of too many ranks.
    """
    with locked(out):
        return write_locked(checkpoint, out, dtype, store, progress, shard)


def write_locked(
    checkpoint: Checkpoint,
    out: Path,
    dtype: str,
    store: Path | None = None,
    progress: Progress | None = None,
    shard: Shard | None = None,
) -> bool:
    """What write_pack does, for whoever has `out` locked."""
    layouts = group_layouts(checkpoint.spec, checkpoint.names, dtype, shard)
    checkpoint.verify(group_layouts(checkpoint.spec, checkpoint.names, dtype))
    sides = [file for pattern in _SIDE for file in sorted(checkpoint.path.glob(pattern))]
    files = {file.relative_to(checkpoint.path).as_posix(): file_checksum(file) for file in sides}
    where = STORE if store is None else os.path.abspath(store)
    fingerprint, config = checkpoint.fingerprint().hex(), config_checksum(checkpoint.config)
    plan = Manifest(fingerprint, config, dtype, where, files, place(layouts), shard or WHOLE)
    if os.path.lexists(out / MANIFEST):
        _expect_same(out, plan)
        (out / JOURNAL).unlink(missing_ok=True)
        return False
    _expect_store(out, plan.store_path(out))
    _Packing(checkpoint, out, layouts, plan, progress or (lambda count: None)).run()
    return True


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
    """The locked directory, as a descriptor to be closed. `made` is told the directories that are new,
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


def _expect_store(out: Path, whole: Path) -> None:
    """Raises PackError for a store in no directory, or where a file of the pack belongs."""
    if not os.path.isdir(whole.parent):
        raise PackError(
            f"the store {whole} cannot be made: there is no directory {whole.parent}; make it, or give "
            "another --store"
        )
    for path in (whole, whole.with_name(whole.name + PARTIAL)):
        name = os.path.relpath(os.path.realpath(path), os.path.realpath(out))
        if any(fnmatchcase(name.removesuffix(_BESIDE), taken) for taken in _TAKEN):
            raise PackError(
                f"the store {whole} cannot have that name, since {out} has another file {name}; give "
                "another --store"
            )


def _expect_same(out: Path, plan: Manifest) -> None:
    with Pack.open(out, read_manifest(out).shard) as found:
        other = _difference(found.manifest, plan)
    if other:
        raise PackError(f"{out} holds a pack of another {other}; remove it or choose another directory")


def _difference(one: Manifest, other: Manifest) -> str:
    """What they are not of the same of; empty if it is all the same."""
    for name, what in (
        ("fingerprint", "model"),
        ("config", "config.json"),
        ("dtype", "dtype"),
        ("shard", "shard"),
        ("store", "store"),
    ):
        if getattr(one, name) != getattr(other, name):
            return f"{what} ({getattr(one, name)})" if name == what else what
    names = sorted({*one.files, *other.files} - {"config.json"})  # Of which only what it says matters.
    return next((name for name in names if one.files.get(name) != other.files.get(name)), "")


@dataclass
class _Packing:
    checkpoint: Checkpoint
    out: Path
    layouts: Sequence[GroupLayout]
    plan: Manifest
    progress: Progress

    def run(self) -> None:
        whole = self.plan.store_path(self.out)
        device = is_block_device(whole)
        target = whole if device else whole.with_name(whole.name + PARTIAL)
        digests = _resume(self.out, self.plan, whole, target)
        self._expect_room(target, device)
        digests = self._recheck(target, digests)
        with _opened(
            self.out / JOURNAL, os.O_CREAT
        ) as journal:  # before the store, so that what is there is known to be a pack's
            _cut(journal, [_head(self.plan), *(map(_entry, self.plan.runs, digests))])
            _sync_directory(self.out)
            self._copy_sides()
            with _opened(
                target, os.O_EXCL if device else os.O_CREAT
            ) as store:  # on a device: not while it is mounted
                digests += self._write(target, store, journal, len(digests))
                if not device:
                    os.ftruncate(store, self.plan.size)
                os.fsync(store)
        try:
            self.checkpoint.expect_unchanged()
        except CheckpointError as error:
            where = f"{self.checkpoint.path} changed while it was packed"
            raise CheckpointError(f"{where}; remove {self.out} and run the same command again") from error
        if not device:
            os.rename(target, whole)
            _sync_directory(whole.parent)
        runs = tuple(replace(run, digests=each) for run, each in zip(self.plan.runs, digests, strict=True))
        _write_file(self.out / MANIFEST, replace(self.plan, runs=runs).text())
        (self.out / JOURNAL).unlink()

    def _expect_room(self, target: Path, device: bool) -> None:
        needed = self.plan.size
        if device:
            with DirectFile(target) as there:
                if there.size < needed:
                    raise PackError(
                        f"{target} has {format_size(there.size)}, but the pack takes {format_size(needed)}; "
                        "give another --store"
                    )
            return
        with suppress(FileNotFoundError):
            needed -= min(os.stat(target).st_blocks * 512, needed)
        needed += SPARE_BYTES + sum(os.stat(self.checkpoint.path / name).st_size for name in self.plan.files)
        disk = os.statvfs(target.parent)
        free = disk.f_bavail * disk.f_frsize
        if needed > free:
            raise PackError(
                f"the disk of {target.parent} has {format_size(free)} free; the pack takes "
                f"{format_size(needed)} more; free some space, or give another --out or --store"
            )

    def _recheck(self, target: Path, digests: list[bytes]) -> list[bytes]:
        """The digests of groups that are there; the last was written last, and is read back."""
        if not digests:
            return []
        with DirectFile(target) as there:
            there.forget()
            while digests and _digests_of(there, self.plan.runs[len(digests) - 1]) != digests[-1]:
                digests = digests[:-1]
        if digests:
            self.progress(self.plan.runs[len(digests) - 1].end)
        return digests

    def _copy_sides(self) -> None:
        for name, checksum in self.plan.files.items():
            try:
                with DiskFile(self.checkpoint.path / name) as file:
                    data = file.read(0, file.size)
            except ReadError as error:
                raise CheckpointError(str(error)) from error
            (self.out / name).parent.mkdir(exist_ok=True)
            _write_file(self.out / name, data)
            if file_checksum(self.out / name) != checksum:
                raise CheckpointError(
                    f"{self.checkpoint.path / name} changed while it was packed; run the same command again"
                )

    def _write(self, target: Path, store: int, journal: int, done: int) -> list[bytes]:
        """Write all groups after the first `done`. Returns their digests."""
        buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(THREADS):
            buffers.put(torch.empty(PIECE_BYTES, dtype=torch.uint8))
        groups = list(zip(self.layouts, self.plan.runs, strict=True))[done:]
        pieces = [(layout, run, start) for layout, run in groups for start in run.pieces]
        tasks = (partial(self._write_piece, target, store, buffers, *piece) for piece in pieces)
        digests: list[bytes] = []
        begun: list[bytes] = []
        fresh: list[bytes] = []
        first = groups[0][1].offset if groups else 0
        with closing(in_order(tasks, THREADS)) as written:
            for (_, run, start), digest in zip(pieces, written, strict=True):
                begun.append(digest)
                self.progress(run.piece_length(start))
                if len(begun) < len(run.pieces):
                    continue
                digests.append(b"".join(begun))
                begun.clear()
                fresh.append(_entry(run, digests[-1]))
                if run.end - first >= COMMIT_BYTES or run.end == self.plan.size:
                    os.fdatasync(store)
                    os.posix_fadvise(
                        store, first, run.end - first, os.POSIX_FADV_DONTNEED
                    )  # they would push out what others need
                    _write_all(journal, b"".join(fresh))
                    os.fsync(journal)
                    fresh.clear()
                    first = run.end
        return digests

    def _write_piece(
        self,
        target: Path,
        store: int,
        buffers: queue.SimpleQueue[torch.Tensor],
        layout: GroupLayout,
        run: Run,
        start: int,
    ) -> bytes:
        """Write a piece of a group. Returns its digest. Any thread may: pieces are disjoint."""
        buffer = buffers.get()
        try:
            piece = buffer[: run.piece_length(start)]
            self.checkpoint.read_piece(layout, start, piece)
            data = piece.numpy().data
            at = 0
            while at < len(data):
                at += os.pwrite(store, data[at:], run.offset + start + at)
            return piece_digest(data)
        except OSError as error:
            error.filename = f"{target}, group {run.id} at byte {run.offset}"
            raise
        finally:
            buffers.put(buffer)


def _resume(out: Path, plan: Manifest, whole: Path, target: Path) -> list[bytes]:
    """Digests of the groups that an earlier run finished, in order. Raises PackError when `out` is not for
    this pack to take."""
    try:
        lines = (out / JOURNAL).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        lines = None
        if strangers := sorted({entry.name for entry in out.iterdir()} - {"lost+found"}):
            raise PackError(
                f"{out} holds other files ({strangers[0]}) and no pack; name a new directory with --out"
            ) from None
    if not lines or not lines[0].endswith(
        b"\n"
    ):  # killed before the first line was whole: nothing was written yet
        if whole != target and os.path.lexists(whole):
            raise PackError(
                f"{whole} exists already, and {out} has no pack that it belongs to; remove it, or give "
                "another --store"
            )
        return []
    if lines[0] != _head(plan):
        raise PackError(
            f"{out} holds an unfinished pack of another model, dtype, shard or store; remove it or choose "
            "another directory"
        )
    found: list[bytes] = []
    for run, line in zip(plan.runs, lines[1:], strict=False):
        digests = (
            decoded(line.split()[-1].decode("ascii", "replace"), len(run.pieces)) if line.split() else None
        )
        if digests is None or line != _entry(run, digests):  # the last one may be cut
            break
        found.append(digests)
    if target != whole and not target.exists():
        if whole.exists() and len(found) == len(plan.runs):  # killed between the two last renames
            os.rename(whole, target)
        elif os.path.lexists(whole):
            raise PackError(
                f"{whole} exists already, but the unfinished pack in {out} has not written to it yet; "
                "remove one of them"
            )
        else:
            return []
    return found


def _head(plan: Manifest) -> bytes:
    """The journal's first line: what is being packed, and how."""
    values = [plan.fingerprint, plan.config, plan.dtype, plan.store, hashlib.sha256(plan.text()).hexdigest()]
    return json.dumps(["penstock journal", *values]).encode() + b"\n"


def _entry(run: Run, digests: bytes) -> bytes:
    return f"{run.id} {encoded(digests)}\n".encode()


def _digests_of(store: DirectFile, run: Run) -> bytes:
    """Of the bytes that are there; empty if they are not."""
    try:
        return b"".join(
            piece_digest(store.read(run.offset + start, run.piece_length(start))) for start in run.pieces
        )
    except ReadError:
        return b""


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
    try:
        yield file
    finally:
        os.close(file)


def _cut(journal: int, lines: Sequence[bytes]) -> None:
    """Let the journal hold these lines, which it begins with, and no more."""
    text = b"".join(lines)
    os.ftruncate(journal, min(os.fstat(journal).st_size, len(text)))
    os.lseek(journal, 0, os.SEEK_SET)
    _write_all(journal, text)
    os.fsync(journal)


def _write_file(path: Path, data: bytes | bytearray) -> None:
    """Let `data` appear under a name, whole and on the disk."""
    beside = path.with_name(path.name + _BESIDE)
    with _opened(beside, os.O_CREAT | os.O_TRUNC) as file:
        _write_all(file, data)
        os.fsync(file)
    os.rename(beside, path)
    _sync_directory(path.parent)


def _write_all(file: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _explain(error: OSError, out: Path) -> str:
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
