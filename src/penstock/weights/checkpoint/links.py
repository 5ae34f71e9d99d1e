"""Keeps the files of a model's directory from leading anywhere else. Those of the Hugging Face cache are
links to its blobs."""

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from penstock.base.errors import CheckpointError

_READ = ("*.json", "*.safetensors", "*.jinja", "*.bin", "additional_chat_templates")
"""Names of what is read of a model."""
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
_SHARED = ".huggingface-shared-blobs"


def expect_inside(path: Path) -> None:
    """Raise CheckpointError for a link in the model's directory `path` that leads out of it.

    Whoever made the directory may have meant some file of this machine. The directory itself may be a link,
    as the cache's snapshots may be anywhere.
    """
    home = Path(os.path.realpath(path))
    allowed = [home]
    if (
        home.parent.name == _SNAPSHOTS
    ):  # <repository>/snapshots/<commit>/<file> is a link to <repository>/blobs/<digest>.
        allowed.append(home.parent.parent / _BLOBS)
        # What several repositories have in common is once in <cache>/blobs/<xx>/<digest>.
        if (shared := home.parent.parent.parent / _BLOBS).joinpath(_SHARED).is_file():
            allowed.append(shared)
    for file in _links(home):
        target = Path(os.path.realpath(file))
        if not any(target.is_relative_to(one) for one in allowed):
            raise CheckpointError(
                f"{path / file.name} is a link to {target}, outside of the model's directory; put the file "
                "itself there"
            )


def _links(home: Path) -> Iterable[Path]:
    try:
        names = os.listdir(home)
    except OSError:  # Whoever opens the first file says so.
        return
    for name in sorted(names):
        file = home / name
        if any(fnmatchcase(name, pattern) for pattern in _READ):
            if file.is_symlink():
                yield file
            elif file.is_dir():
                yield from (inner for inner in sorted(file.iterdir()) if inner.is_symlink())
