"""Safetensors files made by hand, sound or as broken as a test wants them; without torch."""

import json
from collections.abc import Mapping
from pathlib import Path


def sealed(header: bytes, data: bytes = b"") -> bytes:
    """The file of these header bytes and these data."""
    return len(header).to_bytes(8, "little") + header + data


def entry(dtype: object, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]]) -> None:
    """A sound file of `tensors`: dtype as the format spells it, shape, bytes."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = entry(dtype, shape, len(data), len(data) + len(content))
        data += content
    path.write_bytes(sealed(json.dumps(header).encode(), data))


def flip(file: Path, at: int, bit: int = 0) -> None:
    """Turn one bit of byte `at` of a file around."""
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))
