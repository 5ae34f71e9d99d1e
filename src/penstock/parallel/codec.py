"""Encodes values of frozen dataclasses as bytes, and decodes them: how a Plan gets to other processes.

Nothing is executed or imported. The annotations are the schema. So a new field travels as soon as it exists,
and a field of an unknown type is refused when the codec is made. Values are written by columns: all `start`s
of all shares, then all their tokens, and so on. Each column of integers is one array of the smallest width
that holds it. So a step of hundreds of rows takes tens of calls, not thousands.

Every value takes at least one byte, and no list is made before the message is known to be that long. So a
length cannot ask for more memory than the message takes itself, up to a constant factor.
"""

import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import accumulate, chain, repeat
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Generic, NoReturn, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints
from zlib import crc32

from penstock.base.errors import DeviceError

T = TypeVar("T")

_HEAD = struct.Struct("<4sIQI")
"""The header: a name, a digest of the schema, the length of the body, and its checksum."""
_NAME = b"pst1"
_WIDTHS = {1: "b", 2: "h", 4: "i", 8: "q"}
"""Array codes of integers, by their width in bytes."""
_LIMITS = [(width, -(1 << 8 * width - 1), (1 << 8 * width - 1) - 1) for width in _WIDTHS]
_ANY = 0
"""A width of 0 stands for integers beyond 64 bits, each with a length of its own."""
_SWAP = sys.byteorder == "big"


class Codec(Generic[T]):
    """Encodes and decodes one frozen dataclass. Raises TypeError if a field's type cannot travel."""

    def __init__(self, kind: type[T]) -> None:
        self._column = _column(kind, kind.__name__)
        self._digest = crc32(str(self._column).encode())

    def encode(self, value: T) -> bytes:
        """Return a value as a message."""
        parts: list[bytes] = [b""]
        self._column.write([value], parts)
        body = b"".join(parts)
        return _HEAD.pack(_NAME, self._digest, len(body), crc32(body)) + body

    def decode(self, message: bytes) -> T:
        """Return the value of a message.

        Raises DeviceError if it is not exactly what an encoder of the same schema makes.
        """
        if len(message) < _HEAD.size:
            _refuse(f"has {len(message)} bytes, fewer than its head")
        name, digest, length, checksum = _HEAD.unpack_from(message)
        if (name, digest) != (_NAME, self._digest):
            _refuse("is of another kind or version; run the same penstock in all processes")
        if length != len(message) - _HEAD.size:
            _refuse(f"has {len(message) - _HEAD.size} bytes where its head says {length}")
        body = memoryview(message)[_HEAD.size :]
        if checksum != crc32(body):
            _refuse("does not have its checksum")
        source = _Source(body)
        (value,) = self._column.read(source, 1)
        if source.left:
            _refuse(f"has {source.left} bytes too many")
        result: T = value
        return result


def _refuse(why: str) -> NoReturn:
    raise DeviceError(
        f"a message between ranks {why}; restart all ranks, and report this line if it comes again"
    )


class _Source:
    """Reads a message from front to back."""

    def __init__(self, body: memoryview) -> None:
        self._body, self._at = body, 0

    @property
    def left(self) -> int:
        return len(self._body) - self._at

    def take(self, size: int) -> memoryview:
        if size > self.left:
            _refuse(f"ends early: {size} bytes are to come, {self.left} are left")
        self._at += size
        return self._body[self._at - size : self._at]


class _Column(Protocol):
    """A column encodes values of one type. `str` of it names everything that its bytes depend on."""

    def write(self, values: Sequence[Any], parts: list[bytes]) -> None: ...

    def read(self, source: _Source, count: int) -> list[Any]: ...


class _Whole:
    """Encodes int."""

    def write(self, values: Sequence[Any], parts: list[bytes]) -> None:
        low, high = (min(values), max(values)) if values else (0, 0)
        for width, least, most in _LIMITS:
            if least <= low and high <= most:
                run = array(_WIDTHS[width], values)
                if _SWAP:
                    run.byteswap()
                parts += bytes((width,)), run.tobytes()
                return
        many = [value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True) for value in values]
        parts.append(bytes((_ANY,)))
        _RAW.write(many, parts)

    def read(self, source: _Source, count: int) -> list[Any]:
        width = source.take(1)[0]
        if width == _ANY:
            return [int.from_bytes(value, "little", signed=True) for value in _RAW.read(source, count)]
        if width not in _WIDTHS:
            _refuse(f"has numbers of {width} bytes")
        run = array(_WIDTHS[width])
        run.frombytes(source.take(count * width))
        if _SWAP:
            run.byteswap()
        return run.tolist()

    def __str__(self) -> str:
        return "int"


class _Real:
    """Encodes float, to the bit."""

    def write(self, values: Sequence[Any], parts: list[bytes]) -> None:
        parts.append(struct.pack(f"<{len(values)}d", *values))

    def read(self, source: _Source, count: int) -> list[Any]:
        return list(struct.unpack(f"<{count}d", source.take(8 * count)))

    def __str__(self) -> str:
        return "float"


class _Choice:
    """Encodes bool, or a member of an Enum, by its index."""

    def __init__(self, members: Sequence[object], name: str) -> None:
        self._members, self._name = list(members), name
        # By identity, since hashing an Enum's member takes longer than everything else here.
        self._places = {id(member): place for place, member in enumerate(members)}
        assert len(members) < 256

    def write(self, values: Sequence[Any], parts: list[bytes]) -> None:
        if values and values.count(values[0]) == len(values):  # True in most steps.
            parts.append(bytes((self._places[id(values[0])],)) * len(values))
        else:
            parts.append(bytes(map(self._places.__getitem__, map(id, values))))

    def read(self, source: _Source, count: int) -> list[Any]:
        places = source.take(count)
        if count and max(places) >= len(self._members):
            _refuse(f"has no {self._name}")
        return list(map(self._members.__getitem__, places))

    def __str__(self) -> str:
        return f"{self._name}{self._members}"


class _Raw:
    """Encodes bytes."""

    def write(self, values: Sequence[Any], parts: list[bytes]) -> None:
        _WHOLE.write(list(map(len, values)), parts)
        parts.extend(values)

    def read(self, source: _Source, count: int) -> list[Any]:
        return [bytes(source.take(length)) for length in _lengths(source, count)]

    def __str__(self) -> str:
        return "bytes"


class _Text:
    """Encodes str."""

    def write(self, values: Sequence[Any], parts: list[bytes]) -> None:
        _RAW.write([value.encode() for value in values], parts)

    def read(self, source: _Source, count: int) -> list[Any]:
        try:
            return [value.decode() for value in _RAW.read(source, count)]
        except UnicodeDecodeError:
            _refuse("has text that is not UTF-8")

    def __str__(self) -> str:
        return "str"


class _Optional:
    """Encodes a value or None."""

    def __init__(self, of: _Column) -> None:
        self._of = of

    def write(self, values: Sequence[Any], parts: list[bytes]) -> None:
        there = [value is not None for value in values]
        _BOOL.write(there, parts)
        self._of.write([value for value in values if value is not None], parts)

    def read(self, source: _Source, count: int) -> list[Any]:
        there = _BOOL.read(source, count)
        values = iter(self._of.read(source, sum(there)))
        return [next(values) if one else None for one in there]

    def __str__(self) -> str:
        return f"{self._of}?"


class _Many:
    """Encodes tuple[T, ...] or frozenset[T]: the length of each, then all values in one column."""

    def __init__(self, of: _Column, make: Callable[[Iterable[Any]], Any]) -> None:
        self._of, self._make = of, make

    def write(self, values: Sequence[Any], parts: list[bytes]) -> None:
        _WHOLE.write(list(map(len, values)), parts)
        self._of.write(list(chain.from_iterable(values)), parts)

    def read(self, source: _Source, count: int) -> list[Any]:
        lengths = _lengths(source, count)
        values = self._of.read(source, sum(lengths))
        if not values:
            return list(repeat(self._make(()), count))
        make = self._make
        return [
            make(values[stop - length : stop])
            for stop, length in zip(accumulate(lengths), lengths, strict=True)
        ]

    def __str__(self) -> str:
        return f"{self._make.__name__}[{self._of}]"


class _Fixed:
    """Encodes tuple[A, B]."""

    def __init__(self, of: Sequence[_Column]) -> None:
        self._of = of

    def write(self, values: Sequence[Any], parts: list[bytes]) -> None:
        for place, column in enumerate(self._of):
            column.write([value[place] for value in values], parts)

    def read(self, source: _Source, count: int) -> list[Any]:
        return list(zip(*(column.read(source, count) for column in self._of), strict=True))

    def __str__(self) -> str:
        return f"({', '.join(map(str, self._of))})"


class _Record:
    """Encodes a frozen dataclass with slots, field by field.

    Decoding fills the fields without a call of `__init__` for each value, which took most of the time.
    """

    def __init__(self, kind: type, of: dict[str, _Column]) -> None:
        self._kind, self._of = kind, of
        self._set = [getattr(kind, name).__set__ for name in of]

    def write(self, values: Sequence[Any], parts: list[bytes]) -> None:
        for name, column in self._of.items():
            column.write(list(map(attrgetter(name), values)), parts)

    def read(self, source: _Source, count: int) -> list[Any]:
        columns = [column.read(source, count) for column in self._of.values()]
        made: list[Any] = list(map(object.__new__, repeat(self._kind, count)))
        for fill, column in zip(self._set, columns, strict=True):
            deque(map(fill, made, column), maxlen=0)
        return made

    def __str__(self) -> str:
        return f"{self._kind.__name__}({', '.join(f'{name}: {column}' for name, column in self._of.items())})"


_WHOLE, _RAW, _BOOL = _Whole(), _Raw(), _Choice((False, True), "bool")
_SIMPLE: dict[object, _Column] = {int: _WHOLE, float: _Real(), bool: _BOOL, bytes: _RAW, str: _Text()}


def _lengths(source: _Source, count: int) -> list[int]:
    lengths = _WHOLE.read(source, count)
    if count and min(lengths) < 0:
        _refuse("has a length below zero")
    return lengths


def _column(kind: Any, where: str) -> _Column:
    """Return the column for values of a type. where: names the field in an error."""
    while (real := getattr(kind, "__supertype__", None)) is not None:  # A NewType.
        kind = real
    origin, of = get_origin(kind), get_args(kind)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if origin in (Union, UnionType) and len(of) == 2 and of[1] is NoneType:
        return _Optional(_column(of[0], where))
    if (origin is tuple and len(of) == 2 and of[1] is Ellipsis) or origin is frozenset:
        return _Many(_column(of[0], where), origin)
    if origin is tuple and of:
        return _Fixed([_column(one, where) for one in of])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _Choice(list(kind), kind.__name__)
    if (
        isinstance(kind, type)
        and is_dataclass(kind)
        and "__slots__" in vars(kind)
        and not hasattr(kind, "__post_init__")
        and fields(kind)
    ):
        hints = get_type_hints(kind)
        return _Record(
            kind, {field.name: _column(hints[field.name], f"{where}.{field.name}") for field in fields(kind)}
        )
    raise TypeError(f"{where} is of type {kind}, which no message can carry")
