"""Reads the header of a safetensors file and believes nothing in it: every number is checked before it sizes
or places anything.

The format (https://github.com/huggingface/safetensors, "Format"): eight bytes with the header's length,
little endian; the header, a JSON object from tensor names to dtype, shape and byte range; the tensors' bytes,
without overlap and without holes.
"""

from dataclasses import dataclass

from penstock.base.errors import CheckpointError
from penstock.memory.disk import DiskFile
from penstock.weights.jsonfile import MAX_SIZE, is_size, parse_object, readable, shown

MAX_HEADER_BYTES = 25_000_000
"""Bytes of one file's header: some 200,000 tensors, which take seconds to parse. The format itself allows
four times as much."""
_DTYPE_BITS = (
    dict.fromkeys(("F64", "I64", "U64", "C64"), 64)
    | dict.fromkeys(("F32", "I32", "U32"), 32)
    | dict.fromkeys(("F16", "BF16", "I16", "U16"), 16)
    | dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "I8", "U8", "BOOL"), 8)
    | {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Says where a tensor's bytes are and what they are; in row-major order, little endian."""

    dtype: str
    """Name of the dtype as the format spells it: F32, BF16, ..."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    size: int
    """Bytes."""


def read_header(file: DiskFile) -> dict[str, TensorEntry]:
    """Return every tensor of the file by name. Raises CheckpointError, naming file and tensor, for whatever
    breaks the format."""
    if file.size < 8:
        raise CheckpointError(
            f"{file.path} is no safetensors file: it has {file.size} bytes, and the length of its header "
            "alone takes 8; fetch the file again"
        )
    with readable():
        length = int.from_bytes(file.read(0, 8), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file.path} is no safetensors file: its header would have {length} bytes, and "
                f"{MAX_HEADER_BYTES} are allowed; fetch the file again"
            )
        if 8 + length > file.size:
            raise CheckpointError(
                f"{file.path} is cut short: it has {file.size} bytes, and its header alone should end at "
                f"{8 + length}; fetch the file again"
            )
        header = file.read(8, length)
    return parse_header(header, file.size, str(file.path))


def parse_header(header: bytes | bytearray, file_size: int, where: str) -> dict[str, TensorEntry]:
    """Return the tensors that the bytes of a header describe, in a file of `file_size` bytes that `where`
    names. Raises CheckpointError."""
    if not header.startswith(b"{"):
        raise CheckpointError(
            f"{where} is no safetensors file: its header does not start with '{{'; fetch the file again"
        )
    entries = parse_object(header, f"{where}: the header")
    metadata = entries.pop("__metadata__", None)
    if metadata is not None and not isinstance(metadata, dict):
        raise CheckpointError(f"{where}: __metadata__ is {shown(metadata)}; it must be an object")
    start = 8 + len(header)
    tensors = {
        name: _entry(value, start, f"{where}: tensor {shown(name)}") for name, value in entries.items()
    }
    _check_cover(tensors, start, file_size, where)
    return tensors


def _entry(value: object, start: int, where: str) -> TensorEntry:
    """Return one tensor, its range checked against its shape but not yet against the file; data begin at byte
    `start`."""
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where} is {shown(value)}; it must be an object of dtype, shape and data_offsets; fetch the "
            "file again"
        )
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise CheckpointError(f"{where} has dtype {shown(dtype)}, which the format does not know")
    if not isinstance(shape, list) or not all(is_size(extent) for extent in shape):
        raise CheckpointError(
            f"{where} has shape {shown(shape)}; it must be a list of whole numbers from 0 to 2**62; fetch "
            "the file again"
        )
    elements = 1
    for extent in shape:
        elements *= extent
        if (
            elements > MAX_SIZE
        ):  # Here, not after the loop: a long list would make a number that takes for ever to multiply.
            raise CheckpointError(
                f"{where} has shape {shown(shape)}, more elements than any file holds; fetch the file again"
            )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_size(offset) for offset in offsets):
        raise CheckpointError(
            f"{where} has data_offsets {shown(offsets)}; they must be two whole numbers from 0 to 2**62; "
            "fetch the file again"
        )
    begin, end = offsets
    bits = elements * _DTYPE_BITS[dtype]
    if (end - begin) * 8 != bits:  # As for a range that is reversed.
        raise CheckpointError(
            f"{where} has data_offsets {shown(offsets)}, but {shown(shape)} of {dtype} takes {bits / 8:g} "
            "bytes; fetch the file again"
        )
    return TensorEntry(dtype, tuple(shape), start + begin, end - begin)


def _check_cover(tensors: dict[str, TensorEntry], start: int, file_size: int, where: str) -> None:
    """Raise CheckpointError unless the tensors cover the file from byte `start` to its end: a gap or an
    overlap means header and data do not belong together."""
    placed = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size))
    promised = max((entry.offset + entry.size for entry in tensors.values()), default=start)
    if promised > file_size:
        last = max(tensors, key=lambda name: tensors[name].offset + tensors[name].size)
        raise CheckpointError(
            f"{where} is cut short or damaged: it has {file_size} bytes, but tensor {shown(last)} ends at "
            f"{promised}; fetch the file again"
        )
    at = start
    for name, entry in placed:
        if entry.offset != at:
            fault = (
                "overlaps the tensor before it"
                if entry.offset < at
                else f"leaves {entry.offset - at} bytes before it unused"
            )
            raise CheckpointError(
                f"{where}: tensor {shown(name)} {fault}, which safetensors forbids; fetch the file again"
            )
        at += entry.size
    if at != file_size:
        raise CheckpointError(
            f"{where} has {file_size} bytes, but its tensors end at {at}; safetensors forbids bytes that "
            "are no tensor's, so fetch the file again"
        )
