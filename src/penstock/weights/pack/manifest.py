"""Reads and writes what a pack says of itself: where each group rests, and what its bytes must be. Nothing in
it is believed before it is checked.

A pack's store is a run of bytes for each group, in the order of a pass, each filled up with zeros to whole
pages. The manifest is JSON, a line for each group, and sealed: its last key is the checksum of the text
itself without that line's value. Each piece of a run has its own digest there, so that whoever streams a
group can check the pieces as they come, in any order and on any thread.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from penstock.arch.formats.format import STORED_BYTES
from penstock.arch.layout import ALIGNMENT, GroupLayout
from penstock.arch.shards import WHOLE, Shard
from penstock.arch.spec import DTYPE_BYTES
from penstock.base.errors import CheckpointError
from penstock.weights.jsonfile import MAX_SIZE, is_size, parse_object, shown
from penstock.weights.pieces import (
    DIGEST_BYTES,
    PAGE,
    PIECE_BYTES,
    STORE,
)

VERSION = 3
"""Version 1 had the fingerprint of samples of the checkpoint; in version 2 all fields were of one dtype."""
MAX_MANIFEST_BYTES = 100_000_000
_FORMAT = "penstock pack"
_KEYS = ("format", "version", "fingerprint", "config", "dtype", "store", "files", "groups")
_SHARD = "shard"
"""A key before the groups, `[rank, ranks]`, where a pack holds what one of several ranks does."""
_FILE = re.compile(r"\w[\w.-]{0,200}(/\w[\w.-]{0,200})?", re.ASCII)
_HEX = re.compile(r"[0-9a-f]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class FieldPlace:
    """A field lies in a group."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the group's start."""


@dataclass(frozen=True, slots=True)
class PackedRun:
    """A group lies in the store."""

    id: str
    offset: int
    """Bytes from the store's start."""
    size: int
    """Bytes of the group; the run is longer by what is missing to a whole page."""
    fields: tuple[FieldPlace, ...]
    digests: bytes = b""
    """One for each piece, of DIGEST_BYTES, in order."""

    @property
    def length(self) -> int:
        """Return its bytes in the store: whole pages."""
        return -(-self.size // PAGE) * PAGE

    @property
    def end(self) -> int:
        """Return the byte of the store behind its last."""
        return self.offset + self.length

    @property
    def pieces(self) -> range:
        """Return where each piece starts, in bytes from the run's start."""
        return range(0, self.length, PIECE_BYTES)

    def piece_length(self, start: int) -> int:
        """Return the bytes of the piece at byte `start` of the run."""
        return min(PIECE_BYTES, self.length - start)

    def digest(self, start: int) -> bytes:
        """Return the digest that the piece at byte `start` of the run must have."""
        return self.digests[start // PIECE_BYTES * DIGEST_BYTES :][:DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes a pack."""

    fingerprint: str
    """Fingerprint of the checkpoint that was packed, over every byte of it: 16 bytes in hex."""
    config: str
    """Checksum of what config.json says."""
    dtype: str
    store: str
    """The file in the pack's directory, or an absolute path to a file or a block device elsewhere."""
    files: Mapping[str, str]
    """Checksums of the files beside the weights, by name."""
    runs: tuple[PackedRun, ...]
    shard: Shard = WHOLE
    """Part of the model that the store holds."""

    @property
    def size(self) -> int:
        """Return the bytes that the store holds."""
        return self.runs[-1].end if self.runs else 0

    def store_path(self, directory: Path) -> Path:
        """Return the store's path, of a pack in this directory."""
        return directory / self.store

    def text(self) -> bytes:
        """Return the file's content."""
        groups = [
            {
                "id": run.id,
                "offset": run.offset,
                "size": run.size,
                "digests": encoded(run.digests),
                "fields": [_field(field) for field in run.fields],
            }
            for run in self.runs
        ]
        values = (_FORMAT, VERSION, self.fingerprint, self.config, self.dtype, self.store, dict(self.files))
        shard = {} if self.shard == WHOLE else {_SHARD: [self.shard.rank, self.shard.ranks]}
        return seal({**dict(zip(_KEYS[:-1], values, strict=True)), **shard, _KEYS[-1]: groups})

    def identity(self) -> str:
        """Return a digest, in hex, of all bytes of the weights, by their digests here, and of what they are.

        Neither the checkpoint that the pack says it was made from nor the store's place is part of it.
        """
        groups = [
            [run.id, run.size, encoded(run.digests), [_field(field) for field in run.fields]]
            for run in self.runs
        ]
        what = [_FORMAT, VERSION, self.dtype, [self.shard.rank, self.shard.ranks], groups]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def check(self, layouts: Sequence[GroupLayout], where: str) -> None:
        """Raise CheckpointError unless the groups are exactly those of `layouts`."""
        for run, wanted in zip(self.runs, place(layouts), strict=False):
            if (run.id, run.offset, run.size, run.fields) != (
                wanted.id,
                wanted.offset,
                wanted.size,
                wanted.fields,
            ):
                raise CheckpointError(
                    f"{where}: group {shown(run.id)} is not group {wanted.id} that config.json calls for; "
                    "remove the pack, and pack the model again"
                )
        if len(self.runs) != len(layouts):
            raise CheckpointError(
                f"{where} has {len(self.runs)} groups; config.json calls for {len(layouts)}; pack the model "
                "again"
            )


def place(layouts: Iterable[GroupLayout]) -> tuple[PackedRun, ...]:
    """Return where the groups of a model go; without digests, which are not known yet."""
    runs: list[PackedRun] = []
    for layout in layouts:
        fields = tuple(
            FieldPlace(field.name, field.dtype, field.shape, field.offset) for field in layout.fields
        )
        runs.append(PackedRun(str(layout.id), runs[-1].end if runs else 0, layout.size, fields))
    return tuple(runs)


def encoded(digests: bytes) -> str:
    """Return digests as text, in base64."""
    return base64.b64encode(digests).decode("ascii")


def decoded(text: str, count: int) -> bytes | None:
    """Return the digests of `count` pieces that were encoded as `text`, or None if it is no such text."""
    if len(text) != -(-count * DIGEST_BYTES // 3) * 4:  # known before anything is made of it
        return None
    try:
        digests = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None
    return digests if encoded(digests) == text and len(digests) == count * DIGEST_BYTES else None


def config_checksum(config: Mapping[str, object]) -> str:
    """Return a digest of what a config.json says, however it is spaced and ordered."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def seal(body: Mapping[str, object]) -> bytes:
    """Return the text of a manifest with these keys, `groups` the last, and its checksum."""
    *head, last = [
        f"{json.dumps(key)}: {_lines(value) if key == 'groups' else json.dumps(value)}"
        for key, value in body.items()
    ]
    text = "{\n" + "".join(f"{line},\n" for line in head) + last
    return f'{text},\n"checksum": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'.encode()


def parse(data: bytes | bytearray, where: str) -> Manifest:
    """Return the manifest that `data` is; `where` opens every message. Raises CheckpointError for whatever is
    not as it must be."""
    body = parse_object(data, where)
    if body.get("format") != _FORMAT:
        raise CheckpointError(
            f"{where} is no pack's manifest: its format is {shown(body.get('format'))}, not {_FORMAT!r}; "
            "remove the pack, and pack the model again"
        )
    if body.get("version") != VERSION or isinstance(body["version"], bool):
        version = body.get("version")
        fault = f"has version {shown(version)}; this penstock reads {VERSION}"
        newer = type(version) is int and version > VERSION
        ways = "install the newer penstock that made it, or " if newer else ""
        raise CheckpointError(f"{where} {fault}; {ways}remove the pack, and pack the model again")
    if tuple(body) not in ((*_KEYS, "checksum"), (*_KEYS[:-1], _SHARD, _KEYS[-1], "checksum")):
        raise CheckpointError(
            f"{where} is damaged: it has the keys {shown(list(body))}, not {', '.join(_KEYS)} and checksum; "
            "remove the pack, and pack the model again"
        )
    del body["checksum"]
    try:
        sound = seal(body) == data
    except RecursionError:
        sound = False
    if not sound:
        raise CheckpointError(
            f"{where} is damaged: its checksum is not that of its text; pack the model again"
        )
    return _manifest(body, where)


def _manifest(body: Mapping[str, object], where: str) -> Manifest:
    dtype, store, files, groups = body["dtype"], body["store"], body["files"], body["groups"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"{where} has dtype {shown(dtype)}; supported: {', '.join(DTYPE_BYTES)}; remove the pack, and "
            "pack the model again"
        )
    if not isinstance(store, str) or not (store == STORE or store.startswith("/")) or "\0" in store:
        raise CheckpointError(
            f"{where} names the store {shown(store)}; it must be {STORE} or an absolute path; remove the "
            "pack, and pack the model again"
        )
    if not isinstance(files, dict) or not all(_FILE.fullmatch(name) for name in files):
        raise CheckpointError(
            f"{where} names the files {shown(files)}; they must be plain names with checksums; remove the "
            "pack, and pack the model again"
        )
    checked = {name: _hex(value, 64, f"{where}: the checksum of {name}") for name, value in files.items()}
    if not isinstance(groups, list) or not groups:
        raise CheckpointError(
            f"{where} has the groups {shown(groups)}; they must be a list that is not empty; remove the "
            "pack, and pack the model again"
        )
    fingerprint, config = (
        _hex(body["fingerprint"], 32, f"{where}: the fingerprint"),
        _hex(body["config"], 64, f"{where}: config"),
    )
    shard = _parse_shard(body[_SHARD], where) if _SHARD in body else WHOLE
    runs, seen, end = [], set(), 0
    for number, value in enumerate(groups):
        run = _run(value, f"{where}: group {number}")
        name = f"{where}: group {shown(run.id)}"
        if run.id in seen:
            raise CheckpointError(f"{name} is there twice; remove the pack, and pack the model again")
        if run.offset % PAGE:
            raise CheckpointError(
                f"{name} starts at byte {run.offset}, which is no multiple of {PAGE}; remove the pack, and "
                "pack the model again"
            )
        if run.offset != end:
            fault = (
                "overlaps the group before it"
                if run.offset < end
                else f"leaves {run.offset - end} bytes before it unused"
            )
            raise CheckpointError(
                f"{name} at byte {run.offset} {fault}; remove the pack, and pack the model again"
            )
        seen.add(run.id)
        runs.append(run)
        end = run.end
    return Manifest(fingerprint, config, dtype, store, checked, tuple(runs), shard)


def _parse_shard(value: object, where: str) -> Shard:
    rank, ranks = value if isinstance(value, list) and len(value) == 2 else (None, None)
    if not is_size(rank) or not is_size(ranks) or not rank < ranks or ranks < 2:
        raise CheckpointError(
            f"{where} is of the shard {shown(value)}; it must be a rank and a larger number of ranks, at "
            "least 2; remove the pack, and pack the model again"
        )
    return Shard(rank, ranks)


def _run(value: object, where: str) -> PackedRun:
    """Return one group, itself sound; whether it lies where it may is not yet checked."""
    if not isinstance(value, dict) or tuple(value) != ("id", "offset", "size", "digests", "fields"):
        raise CheckpointError(
            f"{where} is {shown(value)}; it must be an object of id, offset, size, digests and fields; "
            "remove the pack, and pack the model again"
        )
    id, offset, size, text, fields = value.values()
    if not isinstance(id, str) or not 0 < len(id) <= 64:
        raise CheckpointError(
            f"{where} has id {shown(id)}; it must be a short text; remove the pack, and pack the model again"
        )
    where = f"{where} ({shown(id)})"
    if not is_size(offset):
        raise CheckpointError(
            f"{where} has offset {shown(offset)}; it must be a whole number from 0 to 2**62; remove the "
            "pack, and pack the model again"
        )
    if not is_size(size) or size == 0 or size % ALIGNMENT:
        raise CheckpointError(
            f"{where} has size {shown(size)}; it must be a multiple of {ALIGNMENT} up to 2**62; remove the "
            "pack, and pack the model again"
        )
    if not isinstance(fields, list) or not fields:
        raise CheckpointError(
            f"{where} has fields {shown(fields)}; they must be a list that is not empty; remove the pack, "
            "and pack the model again"
        )
    places, end = [], 0
    for one in fields:
        field = _parse_field(one, where)
        if field.offset % ALIGNMENT or field.offset < end:
            raise CheckpointError(
                f"{where}: field {shown(field.name)} at byte {field.offset} overlaps the one before it or "
                "is not aligned; remove the pack, and pack the model again"
            )
        end = field.offset + prod(field.shape) * STORED_BYTES[field.dtype]
        places.append(field)
    if end > size:
        raise CheckpointError(
            f"{where}: field {shown(places[-1].name)} ends at byte {end} of {size}; remove the pack, and "
            "pack the model again"
        )
    run = PackedRun(id, offset, size, tuple(places))
    digests = decoded(text, len(run.pieces)) if isinstance(text, str) else None
    if digests is None:
        raise CheckpointError(
            f"{where} has digests {shown(text)}; it must be those of {len(run.pieces)} pieces in base64; "
            "remove the pack, and pack the model again"
        )
    return replace(run, digests=digests)


def _parse_field(value: object, where: str) -> FieldPlace:
    if not isinstance(value, dict) or tuple(value) != ("name", "dtype", "shape", "offset"):
        raise CheckpointError(
            f"{where} has the field {shown(value)}; it must be an object of name, dtype, shape and offset; "
            "remove the pack, and pack the model again"
        )
    name, dtype, shape, offset = value["name"], value["dtype"], value["shape"], value["offset"]
    if not isinstance(dtype, str) or dtype not in STORED_BYTES:
        known = ", ".join(STORED_BYTES)
        raise CheckpointError(
            f"{where}: field {shown(name)} has dtype {shown(dtype)}; supported: {known}; remove the pack, "
            "and pack the model again"
        )
    if (
        not isinstance(name, str)
        or not is_size(offset)
        or not isinstance(shape, list)
        or not 0 < len(shape) <= 4
    ):
        raise CheckpointError(
            f"{where} has the field {shown(value)}; it must have a name, a shape of 1 to 4 extents and an "
            "offset; remove the pack, and pack the model again"
        )
    if not all(is_size(extent) for extent in shape) or prod(shape) > MAX_SIZE:
        raise CheckpointError(
            f"{where}: field {shown(name)} has shape {shown(shape)}, more elements than any file holds; "
            "remove the pack, and pack the model again"
        )
    return FieldPlace(name, dtype, tuple(shape), offset)


def _field(field: FieldPlace) -> dict[str, object]:
    return {"name": field.name, "dtype": field.dtype, "shape": list(field.shape), "offset": field.offset}


def _lines(value: object) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(one) for one in value) + "\n]"


def _hex(value: object, digits: int, where: str) -> str:
    if not isinstance(value, str) or len(value) != digits or not _HEX.fullmatch(value):
        raise CheckpointError(
            f"{where} is {shown(value)}; it must be {digits} hexadecimal digits; remove the pack, and pack "
            "the model again"
        )
    return value
