"""Opens a model's GGUF files: one, or the first of several that it was split into."""

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.base.errors import CheckpointError
from penstock.memory.disk import DiskFile
from penstock.weights.gguf.container import MAGIC, MAX_TENSORS, TensorInfo, Value, read_header
from penstock.weights.jsonfile import readable, shown

_SHARED = ".huggingface-shared-blobs"
_SPLIT = re.compile(r"(.*-)([0-9]{5})(-of-[0-9]{5}\.gguf)")


def is_gguf(path: Path) -> bool:
    """Tell whether a path is that of a GGUF file: by its name, or by how the file begins."""
    if path.suffix.lower() == ".gguf":
        return not os.path.isdir(path)
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor is in a file."""

    file: DiskFile
    info: TensorInfo


class GGUFFiles:
    """Holds the GGUF files of a model open: metadata, and tensors by their names. Weights are not read."""

    def __init__(self, path: Path, *, whole: bool = True) -> None:
        """Open the file at `path`, and those that it was split into beside it.

        whole: whether the tensors must be there, beside the headers.

        Raises CheckpointError, naming the file, for what is missing or damaged.
        """
        self.path = path
        self.tensors: dict[str, GGUFTensor] = {}
        with ExitStack() as opened:
            self._opened = opened
            self.files = [self._open(path)]
            header = read_header(self.files[0], whole=whole)
            self.metadata: Mapping[str, Value] = header.metadata
            self._add(self.files[0], header.tensors)
            self._open_others(header.metadata, whole)
            self._opened = opened.pop_all()

    @property
    def architecture(self) -> str:
        """Return the name of the model's architecture; empty if there is none."""
        name = self.metadata.get("general.architecture")
        return name if isinstance(name, str) else ""

    def _open(self, path: Path) -> DiskFile:
        with readable():
            return self._opened.enter_context(DiskFile(path))

    def _open_others(self, metadata: Mapping[str, Value], whole: bool) -> None:
        count, number = (_whole(metadata, key, self.path) for key in ("split.count", "split.no"))
        if count <= 1:
            return
        name = _SPLIT.fullmatch(self.path.name)
        if name is None or int(name[3][4:9]) != count:
            raise CheckpointError(
                f"{self.path} is one of {count} files; name them NAME-00001-of-{count:05}.gguf and so on"
            )
        if number != 0:
            raise CheckpointError(
                f"{self.path} is file {number + 1} of {count}; give the first, {name[1]}00001{name[3]}"
            )
        home = _home(self.path)
        for other in range(1, count):
            path = self.path.with_name(f"{name[1]}{other + 1:05}{name[3]}")
            if not os.path.lexists(path):
                raise CheckpointError(f"{path} does not exist; fetch all {count} files of the model")
            if _home(path) != home:
                raise CheckpointError(
                    f"{path} is a link to {os.path.realpath(path)}, outside of the model's directory; "
                    "put the file itself there"
                )
            self.files.append(self._open(path))
            header = read_header(self.files[-1], whole=whole)
            if (_whole(header.metadata, "split.no", path), _whole(header.metadata, "split.count", path)) != (
                other, count,
            ):  # fmt: skip
                raise CheckpointError(f"{path} is not file {other + 1} of {count} of a model; fetch it again")
            self._add(self.files[-1], header.tensors)
        promised = _whole(metadata, "split.tensors.count", self.path) or len(self.tensors)
        if promised != len(self.tensors):
            raise CheckpointError(
                f"{self.path} says that its {count} files have {promised} tensors, but they have "
                f"{len(self.tensors)}; fetch them again"
            )

    def _add(self, file: DiskFile, infos: tuple[TensorInfo, ...]) -> None:
        for info in infos:
            if info.name in self.tensors:
                raise CheckpointError(
                    f"tensor {shown(info.name)} is in both {self.tensors[info.name].file.path} and "
                    f"{file.path.name}; fetch the files of one model"
                )
            self.tensors[info.name] = GGUFTensor(file, info)
        if len(self.tensors) > MAX_TENSORS:
            raise CheckpointError(
                f"{self.path} and the files beside it have more than {MAX_TENSORS:,} tensors; "
                "fetch them again"
            )

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _home(path: Path) -> Path:
    """Return the directory that a file really lies in. The store that the repositories of a Hugging Face
    cache have in common is one, though it has a directory for each two digits."""
    real = Path(os.path.realpath(path))
    return real.parent.parent if (real.parent.parent / _SHARED).is_file() else real.parent


def _whole(metadata: Mapping[str, Value], key: str, path: Path) -> int:
    """Return the number at a key that says how files were split; 0 for none."""
    value = metadata.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 100_000_000:
        raise CheckpointError(
            f"{path}: key {key} is {shown(value)}; it must be a whole number; fetch the file again"
        )
    return value
