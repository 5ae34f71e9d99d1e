"""JSON objects from files that may be anything: bounded in size, strict in form, every fault a one-line
CheckpointError."""

import json
import reprlib
from pathlib import Path

from penstock.base.errors import CheckpointError
from penstock.base.units import format_size
from penstock.memory.disk import DiskFile, ReadError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 160
_SHORT.maxlong = 60


def shown(value: object) -> str:
    """`value` as a message may carry it: one line, and short whatever a file holds."""
    return _SHORT.repr(value)


def read_object(path: Path, limit: int) -> dict[str, object]:
    """The JSON object that is the file at `path`, of at most `limit` bytes. Raises CheckpointError."""
    try:
        with DiskFile(path) as file:
            if file.size > limit:
                raise CheckpointError(
                    f"{path} is {format_size(file.size)}, more than the {format_size(limit)} such a file "
                    "may have; fetch the file again"
                )
            data = file.read(0, file.size)
    except ReadError as error:
        raise CheckpointError(str(error)) from error
    return parse_object(data, str(path))


def parse_object(data: bytes | bytearray, where: str) -> dict[str, object]:
    """The JSON object that `data` is, in UTF-8; `where` opens every message.

    A key that comes twice is refused: readers disagree on which one counts. Raises CheckpointError.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(pairs, where))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not JSON in UTF-8: {str(error)[:160]}; fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not a JSON object but {shown(value)}; fetch the file again")
    return value


def _unique(pairs: list[tuple[str, object]], where: str) -> dict[str, object]:
    unique: dict[str, object] = {}
    for key, value in pairs:
        if key in unique:
            raise CheckpointError(
                f"{where}: key {shown(key)} is there twice; correct the file, or fetch it again"
            )
        unique[key] = value
    return unique
