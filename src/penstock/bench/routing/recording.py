"""Keeps what routers chose: which experts each token took in each layer, in a file.

The file is a NumPy archive (.npz, compressed, no pickles) with these arrays:

    header     uint8 `[bytes]`: a JSON object with the fields of `RoutedModel`, `version` and `sha256`, the
               digest of all other arrays
    layers     int32 `[layers]`: numbers of the layers that are mixtures
    lengths    int32 `[sequences]`: tokens of each sequence, prompt and continuation
    prompts    int32 `[sequences]`: tokens of the prompt alone
    chosen     uint8 or uint16 `[tokens, layers, top_k]`: experts of each token, the highest score first;
               tokens of all sequences, one after another
    foretold   the same dtype, `[tokens, layers - 1, 2 * top_k]`: experts that the router of layer i + 1
               scores highest when it is given the input of layer i's router, the highest first
"""

import hashlib
import json
import zipfile
import zlib
from dataclasses import asdict, dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import ConfigError

VERSION = 1
MOST_BYTES = 1 << 29
"""Bytes that a recording may have in memory."""
MOST_EXPERTS = 1 << 16
_FAULTS = (
    OSError, EOFError, ValueError, KeyError, RuntimeError, MemoryError, OverflowError, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip
"""Readers of archives raise these at damage."""
_ARRAYS = ("layers", "lengths", "prompts", "chosen", "foretold")


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """Identifies the model whose routers were recorded.

    name: as it was given. family: its architecture. fingerprint: of its weights, in hexadecimal digits.
    experts: of a layer. top_k: of these, experts that a token takes. text: the name of what it read.
    """

    name: str
    family: str
    fingerprint: str
    experts: int
    top_k: int
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Holds what the routers of a model chose, as the file has it; see the module."""

    model: RoutedModel
    layers: NDArray[np.int32]
    lengths: NDArray[np.int32]
    prompts: NDArray[np.int32]
    chosen: NDArray[np.uint16] | NDArray[np.uint8]
    foretold: NDArray[np.uint16] | NDArray[np.uint8]

    @property
    def tokens(self) -> int:
        """Return how many tokens were routed."""
        return len(self.chosen)

    def write(self, path: Path) -> None:
        """Write the recording. Raises ConfigError where the file cannot be written."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        header = asdict(self.model) | {"version": VERSION, "sha256": _digest(arrays)}
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        file = BytesIO()
        np.savez_compressed(file, header=text, **arrays)
        try:
            path.write_bytes(file.getvalue())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from error

    @classmethod
    def read(cls, path: Path) -> "Recording":
        """Return a recording. Raises ConfigError for a file that is none, or is damaged."""
        try:
            with zipfile.ZipFile(path) as archive:
                size = sum(one.file_size for one in archive.infolist())
                if size > MOST_BYTES:
                    _refuse(path, f"it would take {size:,} bytes of memory, of at most {MOST_BYTES:,}")
                there = set(archive.namelist())
                if missing := [name for name in ("header", *_ARRAYS) if f"{name}.npy" not in there]:
                    _refuse(path, f"it lacks {', '.join(missing)}")
                # What is read whole has its checksum compared before NumPy looks at it.
                header, *found = (
                    np.load(BytesIO(archive.read(f"{name}.npy")), allow_pickle=False)
                    for name in ("header", *_ARRAYS)
                )
            about, arrays = json.loads(bytes(header)), dict(zip(_ARRAYS, found, strict=True))
        except FileNotFoundError as error:
            raise ConfigError(f"{path} does not exist; name a file of `penstock bench experts`") from error
        except _FAULTS as error:
            _refuse(path, str(error).splitlines()[0] if str(error) else type(error).__name__)
        recording = cls(_model(path, about, arrays), **arrays)
        if fault := _fault(recording):
            _refuse(path, fault)
        return recording


def least_dtype(experts: int) -> type[np.uint8] | type[np.uint16]:
    """Return the dtype that holds the numbers of so many experts."""
    return np.uint8 if experts <= 256 else np.uint16


def _digest(arrays: dict[str, NDArray[Any]]) -> str:
    """Return the SHA-256 of the arrays' dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in _ARRAYS:
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _model(path: Path, header: object, arrays: dict[str, NDArray[Any]]) -> RoutedModel:
    """Return the identity of a header. Raises ConfigError if it is not of these arrays."""
    if not isinstance(header, dict):
        _refuse(path, "its header is not a JSON object")
    if header.get("version") != VERSION:
        _refuse(path, f"its version is {header.get('version')!r}, and {VERSION} is read")
    given: dict[str, Any] = {field.name: header.get(field.name) for field in fields(RoutedModel)}
    for (name, value), field in zip(given.items(), fields(RoutedModel), strict=True):
        if type(value) is not field.type or (type(value) is str and not value.isprintable()):
            _refuse(path, f"{name} of its header is {value!r}")
    if header.get("sha256") != _digest(arrays):
        _refuse(path, "its arrays do not match their checksum")
    return RoutedModel(**given)


def _fault(it: Recording) -> str:
    """Return what is wrong with the arrays of a recording, or nothing."""
    experts, top_k = it.model.experts, it.model.top_k
    if not 0 < top_k <= experts <= MOST_EXPERTS:
        return f"{top_k} of {experts} experts are chosen"
    for name in ("layers", "lengths", "prompts"):
        array = getattr(it, name)
        if array.ndim != 1 or array.dtype != np.int32:
            return f"{name} is {array.dtype} of {array.ndim} dimensions"
    layers, tokens = len(it.layers), int(it.lengths.sum(dtype=np.int64))
    if not layers or (it.layers < 0).any() or (np.diff(it.layers) <= 0).any():
        return "the numbers of its layers do not rise"
    if not tokens or len(it.prompts) != len(it.lengths) or (it.lengths <= 0).any():
        return "it has no tokens, or a sequence without any"
    if (it.prompts < 0).any() or (it.prompts > it.lengths).any():
        return "a prompt is longer than its sequence"
    for name, shape in (
        ("chosen", (tokens, layers, top_k)),
        ("foretold", (tokens, layers - 1, min(2 * top_k, experts))),
    ):
        array = getattr(it, name)
        if array.shape != shape or array.dtype != least_dtype(experts):
            return f"{name} is {array.dtype} {list(array.shape)}, and {list(shape)} is expected"
        if array.size and int(array.max()) >= experts:
            return f"{name} has expert {int(array.max())} of {experts}"
        ordered = np.sort(array, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            return f"{name} has one expert twice"
    return ""


def _refuse(path: Path, why: str) -> NoReturn:
    raise ConfigError(
        f"{path} is no recorded routing, or is damaged: {why}; record it again with `penstock bench experts`"
    )
