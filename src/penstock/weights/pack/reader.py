"""Reads a pack: a model directory whose weights rest as one aligned run for each group, in the order of a
pass."""

import hashlib
import json
import os
import stat
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch

from penstock.arch.families import TensorNames, family_of, read_spec
from penstock.arch.layout import GroupId, GroupLayout, group_layouts
from penstock.arch.shards import WHOLE, Shard
from penstock.arch.spec import ModelSpec
from penstock.base.errors import CheckpointError
from penstock.memory.disk import DirectFile, DiskFile, ReadError
from penstock.weights.checkpoint.generation import GenerationDefaults, open_generation
from penstock.weights.checkpoint.links import expect_inside
from penstock.weights.checkpoint.reader import FINGERPRINT_BYTES
from penstock.weights.jsonfile import MAX_CONFIG_BYTES, read_object, readable
from penstock.weights.pack.manifest import MAX_MANIFEST_BYTES, Manifest, PackedRun, config_checksum, parse
from penstock.weights.pieces import JOURNAL, MANIFEST, PAGE, PIECE_BYTES, join_digests, piece_digest

THREADS = max(4, min(8, os.cpu_count() or 1))
"""Threads that check or convert pieces; each holds one."""
_T = TypeVar("_T")


class Pack:
    """Holds a pack open. Opening reads config and manifest only; groups are read into memory of the caller's,
    from any thread."""

    def __init__(
        self, path: Path, config: Mapping[str, object], generation: GenerationDefaults, manifest: Manifest
    ) -> None:
        """Open the store; `open` has checked everything but its size. Raises CheckpointError."""
        self.path = path
        self.config = config
        self.generation = generation
        self.manifest = manifest
        self.dtype = manifest.dtype
        self.shard = manifest.shard
        self.names: TensorNames = family_of(config).names
        self.spec: ModelSpec = replace(read_spec(config), dtype=manifest.dtype)
        self.layouts: tuple[GroupLayout, ...] = _layouts(
            self.spec, self.names, manifest, str(path / MANIFEST)
        )
        self._runs = {layout.id: run for layout, run in zip(self.layouts, manifest.runs, strict=True)}
        with readable():
            self.store = DirectFile(manifest.store_path(path))
        self._device = is_block_device(self.store.path)
        if self.store.size < manifest.size or (self.store.size > manifest.size and not self._device):
            fault = (
                self._fault(self.store.size) if self.store.size < manifest.size else "it is not of this pack"
            )
            self.store.close()
            raise CheckpointError(
                f"{self.store.path} has {self.store.size} bytes instead of {manifest.size}: {fault}; remove "
                "the pack, and pack the model again"
            )

    @classmethod
    def open(cls, path: Path, shard: Shard | None = None) -> Self:
        """Open the pack in directory `path`, of this shard of a model; of a whole one if none is named.

        Raises CheckpointError for one that is missing, unfinished, damaged, of another shard, or not of its
        config.json.
        """
        expect_inside(path)
        manifest = read_manifest(path)
        if manifest.shard != (shard or WHOLE):
            raise CheckpointError(
                f"{path} is a pack of {manifest.shard}, not of {shard or WHOLE}; pack the model again, into "
                "another directory"
            )
        config = read_object(path / "config.json", MAX_CONFIG_BYTES)
        if config_checksum(config) != manifest.config:
            raise CheckpointError(
                f"{path / 'config.json'} is not that of the model that was packed; restore it, or pack the "
                "model again"
            )
        spec = read_spec(config, str(path / "config.json"))
        generation = open_generation(path, config, spec.vocab_size)
        return cls(path, config, generation, manifest)

    @property
    def changed(self) -> bool:
        """Tell whether the store may have been written since it was opened. Of a block device that is not
        known, and this is false."""
        return not self._device and self.store.stamp() != self.store.opened

    def read_piece(self, group: GroupId, start: int, into: torch.Tensor, check: bool = False) -> None:
        """Fill `into`, flat uint8 on the CPU, from byte `start` of the group's run, padding included. Any
        number of threads may at once.

        Past the page cache where the store allows it and `into` starts at a page, else through it, and it
        forgets. `start` and the length are multiples of PAGE. `check`: whether to compare with the digests of
        what was packed; `start` is then a multiple of PIECE_BYTES, and the end is the run's or one too.
        Raises CheckpointError naming store, group and byte of the store; `into` then holds anything.
        """
        run, end = self._runs[group], start + len(into)
        assert (into.dtype, into.dim(), into.device.type) == (torch.uint8, 1, "cpu")
        assert 0 <= start < end <= run.length, f"bytes {start} to {end} of {run.length}"
        assert (start | end) % PAGE == 0, f"bytes {start} to {end} are no whole pages"
        buffer = into.numpy().data
        self._read(self.store.read_direct, run, start, buffer)
        if not check:
            return
        assert start % PIECE_BYTES == 0 == end % PIECE_BYTES * (run.length - end), (
            f"bytes {start} to {end} are no whole pieces"
        )
        for at in range(start, end, PIECE_BYTES):
            self._compare(run, at, piece_digest(buffer[at - start : at - start + PIECE_BYTES]))

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read every byte and compare it with the checksums; `progress` gets the bytes of each piece.

        Raises CheckpointError, naming the first file, or the first group and its offset, that is not as it
        was packed.
        """
        for name, checksum in self.manifest.files.items():
            if file_checksum(self.path / name) != checksum:
                raise CheckpointError(
                    f"{self.path / name} has changed since the model was packed; copy it again from the model"
                )
        self.store.forget()
        pieces = [(run, start) for run in self.manifest.runs for start in run.pieces]
        with closing(
            in_order((partial(self._digest, run, start) for run, start in pieces), THREADS)
        ) as found:
            for (run, start), digest in zip(pieces, found, strict=True):
                self._compare(run, start, digest)
                if progress:
                    progress(run.piece_length(start))

    def fingerprint(self) -> bytes:
        """Return 16 bytes that are the same for packs with the same weights and spec, wherever they are, and
        differ for others.

        Made of the manifest's digests of every piece, which what is read is held against, and of the spec.
        What the manifest says of the checkpoint it was made from proves nothing and is no part of it: so it
        is not that checkpoint's fingerprint.
        """
        what = [self.manifest.identity(), repr(self.spec)]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).digest()[:FINGERPRINT_BYTES]

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _digest(self, run: PackedRun, start: int) -> bytes:
        piece = bytearray(run.piece_length(start))
        self._read(self.store.read_into, run, start, memoryview(piece))
        return piece_digest(piece)

    def _read(
        self, read: Callable[[memoryview, int], None], run: PackedRun, start: int, buffer: memoryview
    ) -> None:
        try:
            read(buffer, run.offset + start)
        except ReadError as error:
            raise CheckpointError(f"group {run.id} at byte {run.offset}: {error}") from error

    def _compare(self, run: PackedRun, start: int, digest: bytes) -> None:
        if digest != run.digest(start):
            where = f"{self.store.path}: group {run.id}, {run.size} bytes at byte {run.offset}"
            fault = (
                f"the {run.piece_length(start)} bytes at byte {run.offset + start} are not those that were "
                "packed"
            )
            raise CheckpointError(f"{where}, is damaged: {fault}; remove the pack and pack the model again")

    def _fault(self, size: int) -> str:
        first = next(run for run in self.manifest.runs if run.end > size)
        return f"it is cut short within group {first.id} at byte {first.offset}"


def read_manifest(path: Path) -> Manifest:
    """Return what the pack in directory `path` says of itself. Raises CheckpointError for one that is
    missing, unfinished or damaged."""
    if not os.path.lexists(path / MANIFEST):
        if os.path.lexists(path / JOURNAL):
            raise CheckpointError(
                f"{path} is an unfinished pack; `penstock pack MODEL --out {path}` goes on with it"
            )
        raise CheckpointError(
            f"{path} is no pack, since it has no {MANIFEST}; name the directory given to `penstock pack` "
            "with --out"
        )
    with readable(), DiskFile(path / MANIFEST) as file:
        if file.size > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{file.path} has {file.size} bytes; a manifest has at most {MAX_MANIFEST_BYTES}; remove "
                "the pack, and pack the model again"
            )
        return parse(file.read(0, file.size), str(file.path))


def in_order(tasks: Iterable[Callable[[], _T]], threads: int) -> Generator[_T, None, None]:
    """Yield what the tasks return, in their order; `threads` run at once, and no more than twice as many are
    started ahead.

    Why this is safe for tasks that write: when the generator ends or is closed, also by an error, none is in
    flight any more.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="pack")
    running: deque[Future[_T]] = deque()
    try:
        for task in tasks:
            running.append(pool.submit(task))
            if len(running) >= 2 * threads:
                yield running[0].result()
                running.popleft()
        for future in running:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def file_checksum(path: Path) -> str:
    """Return the checksum of a whole file, in hex. Raises CheckpointError."""
    with readable(), DiskFile(path) as file:
        starts = range(0, file.size, PIECE_BYTES)
        return join_digests(
            piece_digest(file.read(start, min(PIECE_BYTES, file.size - start))) for start in starts
        )


def data_checksum(data: bytes | bytearray) -> str:
    """Return the checksum, in hex, of a file that holds `data`."""
    starts = range(0, len(data), PIECE_BYTES)
    return join_digests(piece_digest(data[start : start + PIECE_BYTES]) for start in starts)


def is_block_device(path: Path) -> bool:
    """Tell whether a path is a block device; not, if it cannot be looked at."""
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _layouts(spec: ModelSpec, names: TensorNames, manifest: Manifest, where: str) -> tuple[GroupLayout, ...]:
    """Return the layouts of `spec`, once it is known that there are not far more of them than the manifest
    has groups."""
    experts = spec.moe.experts if spec.moe else 0
    count = 2 + sum(2 + experts if spec.is_moe(layer) else 2 for layer in range(spec.layers))
    if count != len(manifest.runs):
        raise CheckpointError(
            f"{where} has {len(manifest.runs)} groups; config.json calls for {count}; pack the model again"
        )
    layouts = group_layouts(spec, names, manifest.dtype, manifest.shard)
    manifest.check(layouts, where)
    return layouts
