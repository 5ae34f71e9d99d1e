"""Finds models in the Hugging Face cache of this machine, without asking anybody.

The cache has a directory for each repository: `refs` has a file for each branch with its commit, `snapshots`
a directory for each commit, whose files are links to `blobs`, which are named by what they hold. So a commit
never changes, and a file that two commits share is there once. A model of this cache is whole if all files
that the engine needs are there; a file gets its name only after its last byte, so what is there is whole.
"""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.base.errors import CheckpointError
from penstock.hub.choice import (
    CONFIG,
    INDEX,
    SINGLE,
    TOKENIZER,
    choose_gguf,
    gguf_models,
    is_checkpoint,
    is_whole,
    shards_of,
)
from penstock.hub.faults import HubError
from penstock.hub.names import MAIN, ModelName
from penstock.hub.telling import Found
from penstock.weights.jsonfile import read_object

MAX_INDEX_BYTES = 100_000_000
PARTIAL = ".incomplete"
"""The name of a file ends in this while it is fetched, beside its blob."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BEGINNING = re.compile(r"[0-9a-f]{7,39}")
_MODELS = "models--"


def hub_cache() -> Path:
    """Return the directory of the cache, as HF_HOME and HF_HUB_CACHE say."""
    from huggingface_hub import constants  # 60 ms, and only for names of the Hub

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


@dataclass(frozen=True, slots=True)
class CachedRepository:
    """Stands for a model's directory in the cache, which need not be there."""

    name: str
    path: Path

    @classmethod
    def of(cls, repository: str) -> "CachedRepository":
        """Return that of a repository by its name, owner/name."""
        return cls(repository, hub_cache() / f"{_MODELS}{repository.replace('/', '--')}")

    @classmethod
    def all(cls) -> Iterator["CachedRepository"]:
        """Yield those that are in the cache, by name."""
        home = hub_cache()
        names = sorted(os.listdir(home)) if home.is_dir() else []
        for name in names:
            if name.startswith(_MODELS) and (home / name).is_dir():
                yield cls(name.removeprefix(_MODELS).replace("--", "/"), home / name)

    @property
    def exists(self) -> bool:
        """Tell whether anything of it is in the cache."""
        return self.path.is_dir()

    @property
    def blobs(self) -> Path:
        """Return the directory of what files hold."""
        return self.path / "blobs"

    def snapshot(self, commit: str) -> Path:
        """Return the directory of a commit's files."""
        return self.path / "snapshots" / commit

    def commits(self) -> list[str]:
        """Return the commits of which files are here, sorted."""
        home = self.path / "snapshots"
        return sorted(name for name in os.listdir(home) if (home / name).is_dir()) if home.is_dir() else []

    def refs(self) -> dict[str, str]:
        """Return the commit of each branch and tag that was fetched."""
        home = self.path / "refs"
        found = {}
        for file in sorted(home.rglob("*")) if home.is_dir() else ():
            with suppress(OSError, UnicodeDecodeError):
                if file.is_file():
                    found[file.relative_to(home).as_posix()] = file.read_text().strip()
        return found

    def commit_of(self, revision: str) -> str | None:
        """Return the commit that a revision is here; None if it is not known."""
        there = self.commits()
        if (commit := self.refs().get(revision or MAIN)) in there:
            return commit
        if _COMMIT.fullmatch(revision) and revision in there:
            return revision
        begun = [one for one in there if one.startswith(revision)] if _BEGINNING.fullmatch(revision) else []
        return begun[0] if len(begun) == 1 else None

    def note(self, revision: str, commit: str) -> None:
        """Write down which commit a branch or tag is; a commit needs no note."""
        begins = _BEGINNING.fullmatch(revision) and commit.startswith(revision)
        if begins or _COMMIT.fullmatch(revision):
            return
        file = self.path / "refs" / revision
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path / f".ref-{os.getpid()}-{threading.get_ident()}"
        beside.write_text(commit)
        beside.replace(file)


def cached(name: ModelName, *, lenient: bool = False) -> Found | None:
    """Return the model that a name means if the cache has it whole; None if not, or if it cannot be told.

    lenient: also without a tokenizer, which few models lack, but other programs may not have fetched.
    """
    repository = CachedRepository.of(name.repository)
    commit = repository.commit_of(name.revision)
    return None if commit is None else in_snapshot(repository.snapshot(commit), name, lenient=lenient)


def in_snapshot(snapshot: Path, name: ModelName, *, lenient: bool = False) -> Found | None:
    """Return the model that a name means in a directory of the cache, if it is whole there."""
    paths = present(snapshot)
    if not name.file and is_checkpoint(paths):
        if not (lenient or TOKENIZER in paths or _lacks(snapshot, TOKENIZER).exists()):
            return None
        missing = missing_weights(snapshot)
        return None if missing or missing is None else Found(snapshot, str(name))
    models = gguf_models(paths)
    if not models:
        return None
    try:
        parts = choose_gguf(models, name)
    except HubError:
        return None
    return Found(snapshot / parts[0], str(name)) if is_whole(parts) else None


def note_absence(snapshot: Path, path: str) -> None:
    """Note that a commit has no such file, where huggingface_hub does so, too."""
    mark = _lacks(snapshot, path)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _lacks(snapshot: Path, path: str) -> Path:
    return snapshot.parent.parent / ".no_exist" / snapshot.name / path


def present(snapshot: Path) -> list[str]:
    """Return the files of a directory of the cache that are there with their content, sorted."""
    return sorted(file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file())


def missing_weights(snapshot: Path) -> tuple[str, ...] | None:
    """Return the weight files of a checkpoint that are not there; None if its index cannot be read."""
    if (snapshot / SINGLE).exists():
        return ()
    if not (snapshot / INDEX).exists():
        return (SINGLE,)
    try:
        names = shards_of(read_object(snapshot / INDEX, MAX_INDEX_BYTES))
    except CheckpointError:
        return None
    return tuple(name for name in names if not (snapshot / name).exists()) if names else None


def touch(found: Found) -> None:
    """Note that a model is used now: at its link, since the times of what it leads to tell of changes."""
    file = found.path / CONFIG if found.path.is_dir() else found.path
    if file.is_symlink():
        with suppress(OSError):  # A cache that cannot be written is no fault.
            os.utime(file, follow_symlinks=False)


def last_used(path: Path) -> float:
    """Return when a model of the cache was used, or else fetched, in seconds since 1970."""
    try:
        return (path / CONFIG if path.is_dir() else path).lstat().st_mtime
    except OSError:
        return 0.0
