"""Reads JSON objects from files that may be anything: bounded in size, strict in form, every fault a one-line
CheckpointError."""

import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

from penstock.base.errors import CheckpointError
from penstock.base.units import format_size
from penstock.memory.disk import DiskFile, ReadError

MAX_CONFIG_BYTES = 10_000_000
MAX_SIZE = 2**62
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 160
_SHORT.maxlong = 60


@contextmanager
def readable() -> Iterator[None]:
    """Raise CheckpointError, of the same message, for a file that cannot be read."""
    try:
        yield
    except ReadError as error:
        raise CheckpointError(str(error)) from error


def is_size(value: object) -> TypeGuard[int]:
    """Tell whether a value is a whole number from 0 to 2**62, as sizes and places in files are."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE


def shown(value: object) -> str:
    """Return `value` as a message may carry it: one line, and short whatever a file holds."""
    return _SHORT.repr(value)


def read_object(path: Path, limit: int) -> dict[str, object]:
    """Return the JSON object that is the file at `path`, of at most `limit` bytes. Raises CheckpointError."""
    return parse_object(_read(path, limit), str(path))


def read_objects(path: Path, limit: int) -> list[dict[str, object]]:
    """Return the JSON array of objects that is the file at `path`, as `read_object` does."""
    value = _parse(_read(path, limit), str(path))
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise CheckpointError(f"{path} is not a JSON array of objects; fetch the file again")
    return value


def _read(path: Path, limit: int) -> bytes | bytearray:
    with readable(), DiskFile(path) as file:
        if file.size > limit:
            raise CheckpointError(
                f"{path} is {format_size(file.size)}, more than the {format_size(limit)} such a file may have"
            )
        return file.read(0, file.size)


def parse_object(data: bytes | bytearray, where: str) -> dict[str, object]:
    """Return the JSON object that `data` is, in UTF-8; `where` opens every message.

    A key that comes twice is refused: readers disagree on which one counts. Raises CheckpointError.
    """
    value = _parse(data, where)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not a JSON object but {shown(value)}; fetch the file again")
    return value


def _parse(data: bytes | bytearray, where: str) -> object:
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(pairs, where))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not JSON in UTF-8: {str(error)[:160]}; fetch the file again"
        ) from error


def _unique(pairs: list[tuple[str, object]], where: str) -> dict[str, object]:
    unique: dict[str, object] = {}
    for key, value in pairs:
        if key in unique:
            raise CheckpointError(
                f"{where}: key {shown(key)} is there twice; correct the file, or fetch it again"
            )
        unique[key] = value
    return unique
