"""Writes a pack in one pass over a checkpoint, resumable after a kill at any instruction, whole or not there.

Why this is safe. Weights go to `weights.bin.partial`; the journal `manifest.partial` names a group only when
its bytes are on the disk. When the journal names all, the store gets its name, and last of all
`manifest.json` appears by a rename: without it, nothing is a pack. A later run takes up what the journal
names, reading back the last such group. The directory is locked meanwhile.
"""

import hashlib
import json
import os
import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch

from penstock.arch.layout import GroupLayout, group_layouts
from penstock.arch.shards import WHOLE, Shard
from penstock.base.errors import CheckpointError
from penstock.base.units import format_size
from penstock.memory.disk import DirectFile, ReadError
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shards import INDEX, SINGLE
from penstock.weights.pack.directory import (
    BESIDE,
    PackError,
    cut,
    locked,
    opened,
    sync_directory,
    write_all,
    write_file,
)
from penstock.weights.pack.manifest import Manifest, PackedRun, config_checksum, decoded, encoded, place
from penstock.weights.pack.quantising import QuantisedCheckpoint
from penstock.weights.pack.reader import (
    THREADS,
    Pack,
    checksum,
    file_checksum,
    in_order,
    is_block_device,
    read_manifest,
)
from penstock.weights.pieces import JOURNAL, MANIFEST, PIECE_BYTES, STORE, piece_digest

PARTIAL = ".partial"
COMMIT_BYTES = 256 << 20
"""Bytes that may have to be written again after a kill. Waiting for the disk after every expert would take
most of the time."""
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
    "modules.json",
    "*_Pooling/config.json",
)
"""Files that make the pack a model directory of its own."""
_TAKEN = (*_SIDE, "additional_chat_templates", MANIFEST, JOURNAL, SINGLE, INDEX)
"""Names in a pack's directory that no store may have: the pack would write over it, or be taken for a
checkpoint."""
Progress = Callable[[int], None]


def write_pack(
    checkpoint: Checkpoint | QuantisedCheckpoint,
    out: Path,
    dtype: str,
    store: Path | None = None,
    progress: Progress | None = None,
    shard: Shard | None = None,
) -> bool:
    """Write the pack of a checkpoint, or of a shard of it, into directory `out`; return False if it was there
    already, and nothing was done.

    `store`: a file or block device for the weights, if not in `out`. A block device is overwritten.
    `progress` gets bytes as they are written, and at once those that an earlier run wrote. Memory: THREADS
    pieces of PIECE_BYTES and what their conversion takes. Raises CheckpointError for what is wrong with the
    checkpoint or with the pack that is there, PackError for what stands in the way of a new one: what was
    written then stays for the next try. Raises ConfigError for a shard of too many ranks.
    """
    with locked(out):
        return write_locked(checkpoint, out, dtype, store, progress, shard)


def write_locked(
    checkpoint: Checkpoint | QuantisedCheckpoint,
    out: Path,
    dtype: str,
    store: Path | None = None,
    progress: Progress | None = None,
    shard: Shard | None = None,
) -> bool:
    """Do what write_pack does, for whoever has `out` locked."""
    if isinstance(checkpoint, QuantisedCheckpoint) and (shard or WHOLE) != checkpoint.shard:
        assert checkpoint.shard == WHOLE, "a part of a model is packed as another part"
        raise PackError(f"{out}: a model is quantised as a whole, not as {shard}; pack it without ranks")
    layouts = group_layouts(checkpoint.spec, checkpoint.names, dtype, shard)
    checkpoint.verify(group_layouts(checkpoint.spec, checkpoint.names, dtype))
    sides, files, side_bytes = _sides(checkpoint), dict[str, str](), 0
    for name, read in sides.items():
        data = read()
        files[name], side_bytes = checksum(data), side_bytes + len(data)
    where = STORE if store is None else os.path.abspath(store)
    fingerprint, config = checkpoint.fingerprint().hex(), config_checksum(checkpoint.config)
    plan = Manifest(fingerprint, config, dtype, where, files, place(layouts), shard or WHOLE)
    if os.path.lexists(out / MANIFEST):
        _expect_same(out, plan)
        (out / JOURNAL).unlink(missing_ok=True)
        return False
    _expect_store(out, plan.store_path(out))
    _Packing(checkpoint, out, layouts, plan, sides, side_bytes, progress or (lambda count: None)).run()
    return True


def _sides(checkpoint: Checkpoint | QuantisedCheckpoint) -> dict[str, Callable[[], bytes | bytearray]]:
    """Return how each file that is to stand beside the weights is read, by its name: from the checkpoint's
    directory, or from what was made of its header."""
    found: dict[str, Callable[[], bytes | bytearray]] = {}
    for file in (file for pattern in _SIDE for file in sorted(checkpoint.path.glob(pattern))):
        name = file.relative_to(checkpoint.path).as_posix()
        found[name] = partial(checkpoint.side_file, name)
    return found | {name: partial(bytes, data) for name, data in checkpoint.made_files().items()}


def _expect_store(out: Path, whole: Path) -> None:
    """Raise PackError for a store in no directory, or where a file of the pack belongs."""
    if not os.path.isdir(whole.parent):
        raise PackError(
            f"the store {whole} cannot be made: there is no directory {whole.parent}; make it, or give "
            "another --store"
        )
    for path in (whole, whole.with_name(whole.name + PARTIAL)):
        name = os.path.relpath(os.path.realpath(path), os.path.realpath(out))
        if any(fnmatchcase(name.removesuffix(BESIDE), taken) for taken in _TAKEN):
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
    """Return what they are not of the same of; empty if it is all the same."""
    for name, what in (
        ("fingerprint", "model or format"),
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
    """Writes one pack, for whoever has its directory locked."""

    checkpoint: Checkpoint | QuantisedCheckpoint
    out: Path
    layouts: Sequence[GroupLayout]
    plan: Manifest
    sides: Mapping[str, Callable[[], bytes | bytearray]]
    side_bytes: int
    progress: Progress

    def run(self) -> None:
        """Write what is missing of it. Raises CheckpointError, PackError, OSError."""
        whole = self.plan.store_path(self.out)
        device = is_block_device(whole)
        target = whole if device else whole.with_name(whole.name + PARTIAL)
        digests = _resume(self.out, self.plan, whole, target)
        self._expect_room(target, device)
        digests = self._recheck(target, digests)
        with opened(
            self.out / JOURNAL, os.O_CREAT
        ) as journal:  # before the store, so that what is there is known to be a pack's
            cut(journal, [_head(self.plan), *(map(_entry, self.plan.runs, digests))])
            sync_directory(self.out)
            self._copy_sides()
            with opened(
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
            sync_directory(whole.parent)
        runs = tuple(replace(run, digests=each) for run, each in zip(self.plan.runs, digests, strict=True))
        write_file(self.out / MANIFEST, replace(self.plan, runs=runs).text())
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
        needed += SPARE_BYTES + self.side_bytes
        disk = os.statvfs(target.parent)
        free = disk.f_bavail * disk.f_frsize
        if needed > free:
            raise PackError(
                f"the disk of {target.parent} has {format_size(free)} free; the pack takes "
                f"{format_size(needed)} more; free some space, or give another --out or --store"
            )

    def _recheck(self, target: Path, digests: list[bytes]) -> list[bytes]:
        """Return the digests of groups that are there; the last was written last, and is read back."""
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
        for name, promised in self.plan.files.items():
            data = self.sides[name]()
            (self.out / name).parent.mkdir(exist_ok=True)
            write_file(self.out / name, data)
            if file_checksum(self.out / name) != promised:
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
                    write_all(journal, b"".join(fresh))
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
        run: PackedRun,
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


def _looks(path: Path) -> str:
    """Say what a file looks like by how it begins: it may be somebody's model."""
    try:
        if not path.is_file():  # A pipe would never end.
            return "a directory" if path.is_dir() else "which is no regular file"
        with open(path, "rb") as file:
            begin = file.read(9)
    except OSError as error:
        return f"which cannot be read ({error.strerror})"
    if begin[8:] == b"{":
        return "which looks like a checkpoint in safetensors"
    kinds = (b"GGUF", "a GGUF file"), (b"PK\3\4", "a checkpoint of PyTorch, or another zip file")
    kind = next((kind for start, kind in kinds if begin.startswith(start)), "")
    return f"which looks like {kind}" if kind else f"a file of {format_size(path.stat().st_size)}"


def _resume(out: Path, plan: Manifest, whole: Path, target: Path) -> list[bytes]:
    """Return the digests of the groups that an earlier run finished, in order. Raises PackError when `out` is
    not for this pack to take."""
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
                f"{whole} exists already, {_looks(whole)}, and {out} has no pack that it belongs to; name "
                "another path with --store"
            )
        return []
    if lines[0] != _head(plan):
        raise PackError(
            f"{out} holds an unfinished pack of another model, format, dtype, shard or store; remove it or "
            "choose another directory"
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
    """Return the journal's first line: what is being packed, and how."""
    values = [plan.fingerprint, plan.config, plan.dtype, plan.store, hashlib.sha256(plan.text()).hexdigest()]
    return json.dumps(["penstock journal", *values]).encode() + b"\n"


def _entry(run: PackedRun, digests: bytes) -> bytes:
    return f"{run.id} {encoded(digests)}\n".encode()


def _digests_of(store: DirectFile, run: PackedRun) -> bytes:
    """Return the digests of the bytes that are there; empty if they are not."""
    try:
        return b"".join(
            piece_digest(store.read(run.offset + start, run.piece_length(start))) for start in run.pieces
        )
    except ReadError:
        return b""
