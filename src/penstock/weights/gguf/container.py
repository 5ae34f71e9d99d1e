"""Reads the header of a GGUF file and believes nothing in it: every number is checked before it sizes or
places anything.

The format (https://github.com/ggml-org/ggml, docs/gguf.md): magic, version, counts; metadata, which are keys
with typed values; tensor infos of name, extents, type and offset; padding; the tensors' bytes.
"""

import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from penstock.arch.formats.gguf_blocks import TYPES, UNREAD, BlockType
from penstock.base.errors import CheckpointError
from penstock.base.units import format_size
from penstock.memory.disk import DiskFile
from penstock.weights.jsonfile import MAX_SIZE, readable, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20
"""Bytes of one file's header. Vocabularies of 300,000 tokens with their merges take 20 MB."""
MAX_KEYS, MAX_NAME, MAX_STRINGS, MAX_TENSORS = 65_536, 65_535, 4_000_000, 500_000
"""Most keys of a file, bytes of a key or name, strings in all arrays, and tensors."""
MAX_ALIGNMENT = 1 << 20
_FIRST_READ = 1 << 20
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""The types of values are called so by `array`, by their numbers."""
_BOOL = 7
Value: TypeAlias = "int | float | bool | str | list[bytes] | array[int] | array[float]"
"""A value of metadata: arrays of strings stay bytes until somebody wants them."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor info says where a tensor's bytes are, and what they are.

    shape: extents, the one that varies fastest last.
    offset: bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int

    @property
    def stored(self) -> tuple[int, ...]:
        """Return the shape of the tensor's bytes, `[..., bytes of a row]`."""
        return *self.shape[:-1], self.type.row_bytes(self.shape[-1])

    @property
    def size(self) -> int:
        """Return the bytes of the tensor."""
        size = 1
        for extent in self.stored:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file: its metadata, and its tensors in the order in which they are named."""

    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]


def read_header(file: DiskFile, *, whole: bool = True) -> Header:
    """Return the header of an open file. Raises CheckpointError, naming file, key or tensor, for whatever
    breaks the format, and for types of tensors that are not read.

    whole: whether the tensors must be there, too.
    """
    with readable():
        cursor = _Cursor(file)
        if bytes(cursor.take(4, "its magic")) != MAGIC:
            raise CheckpointError(
                f"{file.path} is no GGUF file: it does not begin with GGUF; fetch the file again"
            )
        version = cursor.number("<I", "its version")
        if version not in VERSIONS:
            swapped = version & 0xFFFF == 0
            raise CheckpointError(
                f"{file.path} is {'a big-endian GGUF file' if swapped else f'GGUF version {version}'}; "
                "supported: little-endian versions 2 and 3; convert the model again with a recent llama.cpp"
            )
        tensors, keys = cursor.number("<Q", "its counts"), cursor.number("<Q", "its counts")
        _expect_at_most(file, tensors, MAX_TENSORS, "tensors")
        _expect_at_most(file, keys, MAX_KEYS, "keys of metadata")
        metadata = _metadata(cursor, keys)
        infos = [_info(cursor) for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or not 0 < alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise CheckpointError(
                f"{file.path}: key general.alignment is {shown(alignment)}; it must be a power of two up to "
                f"{MAX_ALIGNMENT}; fetch the file again"
            )
        start = -(-cursor.at // alignment) * alignment
        end = file.size if whole else MAX_SIZE
        return Header(metadata, _placed(file, infos, range(start, end), alignment))


def _expect_at_most(file: DiskFile, count: int, most: int, what: str) -> None:
    if count > most:
        raise CheckpointError(
            f"{file.path} would have {count:,} {what}, and {most:,} are allowed; fetch the file again"
        )


class _Cursor:
    """Reads a header from its beginning, in growing pieces. `at` is the next byte."""

    def __init__(self, file: DiskFile) -> None:
        self.file, self.at, self.strings = file, 0, 0
        self._data = bytearray()

    def fault(self, what: str) -> CheckpointError:
        """Return the error of a file that is malformed."""
        return CheckpointError(f"{self.file.path} is damaged: {what}; fetch the file again")

    def _need(self, count: int, what: str) -> None:
        """Read on until there are `count` more bytes. Raises CheckpointError if the file, or the allowed
        header, ends before."""
        end = self.at + count
        if end <= len(self._data):
            return
        if end > self.file.size:
            raise CheckpointError(
                f"{self.file.path} is cut short or damaged: it has {self.file.size} bytes, and {what} would "
                f"end at {end}; fetch the file again"
            )
        if end > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self.file.path}: its header has more than the {format_size(MAX_HEADER_BYTES)} allowed, at "
                f"{what}; fetch the file again"
            )
        wanted = min(max(end, 2 * len(self._data), _FIRST_READ), self.file.size, MAX_HEADER_BYTES)
        self._data += self.file.read(len(self._data), wanted - len(self._data))

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes."""
        self._need(count, what)
        begin, self.at = self.at, self.at + count
        return bytes(self._data[begin : self.at])

    def number(self, kind: str, what: str) -> int:
        """Return the next whole number."""
        size = struct.calcsize(kind)
        self._need(size, what)
        (value,) = struct.unpack_from(kind, self._data, self.at)
        self.at += size
        return int(value)

    def name(self, what: str) -> str:
        """Return the next string, a key or a tensor's name."""
        length = self.number("<Q", what)
        if length > MAX_NAME:
            raise self.fault(f"{what} would have {length:,} bytes")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise self.fault(f"{what} is not UTF-8") from None

    def value(self, kind: int, key: str) -> Value:
        """Return the next value, of the type with that number."""
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            length = self.number("<Q", f"key {key}")
            return self.take(length, f"key {key}").decode("utf-8", "replace")
        number: int | float | bool = self._numbers(kind, 1, key)[0]
        return bool(number) if kind == _BOOL else number

    def _numbers(self, kind: int, count: int, key: str) -> "array[int] | array[float]":
        if kind not in _SCALARS:
            raise self.fault(f"key {key} has values of type {kind}; types 0 to 12 are known")
        numbers = array(_SCALARS[kind])
        numbers.frombytes(self.take(count * numbers.itemsize, f"key {key}"))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _array(self, key: str) -> Value:
        kind, count = self.number("<I", f"key {key}"), self.number("<Q", f"key {key}")
        if kind == _ARRAY:
            raise self.fault(f"key {key} is an array of arrays, which no model needs")
        return self._strings(count, key) if kind == _STRING else self._numbers(kind, count, key)

    def _strings(self, count: int, key: str) -> list[bytes]:
        self.strings += count
        _expect_at_most(self.file, self.strings, MAX_STRINGS, "strings in arrays")
        found, what, unpack, at = list[bytes](), f"key {key}", struct.Struct("<Q").unpack_from, self.at
        data, there = self._data, len(self._data)
        for _ in range(count):  # Lengths are between the strings: there is no other way to the next one.
            if at + 8 > there:
                self.at = at
                self._need(8, what)
                there = len(data)
            (length,) = unpack(data, at)
            at += 8
            if at + length > there:
                self.at = at
                self._need(length, what)
                there = len(data)
            found.append(bytes(data[at : at + length]))
            at += length
        self.at = at
        return found


def _metadata(cursor: _Cursor, keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for number in range(keys):
        key = cursor.name(f"key {number} of its metadata")
        if key in metadata:
            raise cursor.fault(f"key {shown(key)} is there twice")
        metadata[key] = cursor.value(cursor.number("<I", f"key {shown(key)}"), shown(key))
    return metadata


def _info(cursor: _Cursor) -> TensorInfo:
    """Return one tensor's info, its offset still from the start of the data."""
    name = cursor.name("the name of a tensor")
    what = f"tensor {shown(name)}"
    dimensions = cursor.number("<I", what)
    if not 1 <= dimensions <= 4:
        raise cursor.fault(f"{what} has {dimensions} extents; 1 to 4 are allowed")
    extents = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, what))
    number, offset = cursor.number("<I", what), cursor.number("<Q", what)
    type = TYPES.get(number)
    if type is None:
        named = f" ({UNREAD[number]})" if number in UNREAD else ""
        known = ", ".join(one.name for one in TYPES.values())
        raise CheckpointError(
            f"{cursor.file.path}: {what} has type {number}{named}, which is not supported; supported: "
            f"{known}; use a file of the same model in one of these"
        )
    elements = 1
    for extent in extents:
        elements *= extent
        if not 0 < extent <= MAX_SIZE or elements > MAX_SIZE:
            raise cursor.fault(f"{what} has extents {list(extents)}, which no file holds")
    if extents[0] % type.values:
        raise cursor.fault(
            f"{what} has rows of {extents[0]} numbers; blocks of {type.name} have {type.values} each"
        )
    return TensorInfo(name, extents[::-1], type, offset)


def _placed(file: DiskFile, infos: list[TensorInfo], room: range, alignment: int) -> tuple[TensorInfo, ...]:
    """Return the tensors with their places in `room`, bytes of the file. Raises CheckpointError for those
    that are not aligned, overlap, come twice or end after it."""
    placed = tuple(TensorInfo(one.name, one.shape, one.type, room.start + one.offset) for one in infos)
    if len({one.name for one in placed}) < len(placed):
        names = sorted(one.name for one in placed)
        twice = next(name for name, other in pairwise(names) if name == other)
        raise CheckpointError(
            f"{file.path} is damaged: tensor {shown(twice)} is there twice; fetch the file again"
        )
    at = room.start
    for one in sorted(placed, key=lambda one: one.offset):
        what = f"tensor {shown(one.name)}"
        if one.offset % alignment:
            raise CheckpointError(
                f"{file.path} is damaged: {what} begins at byte {one.offset}, no multiple of {alignment}; "
                "fetch the file again"
            )
        if one.offset < at:
            raise CheckpointError(
                f"{file.path} is damaged: {what} overlaps the one before it; fetch the file again"
            )
        at = one.offset + one.size
        if at > room.stop:
            raise CheckpointError(
                f"{file.path} is cut short or damaged: it has {file.size} bytes, but {what} ends at {at}; "
                "fetch the file again"
            )
    return placed
