"""Lists the models of the Hugging Face cache, and removes them."""

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.hub.about import About
from penstock.hub.cache import PARTIAL, CachedRepository, hub_cache, last_used, missing_weights, present
from penstock.hub.choice import CONFIG, choose_gguf, gguf_models, is_whole, quant_or_file
from penstock.hub.faults import HubError
from penstock.hub.names import ModelName

WHOLE, BROKEN = "whole", "partial"
_KEY = re.compile(r"key '([\w.]+)' is (.+?); ")
_TYPES = ("model_type", "general.architecture")
_SHORT = 7


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model is in the cache, perhaps only in part.

    name: as `penstock run` takes it, without a revision. revisions: branches and tags that lead to it.
    commit: empty where no file of a model is whole. size: bytes on disk, also those that other commits share.
    about: None for a model that does not run here. state: whole, partial, or why it does not run.
    """

    name: str
    revisions: tuple[str, ...]
    commit: str
    size: int
    used: float
    state: str
    about: About | None
    path: Path

    @property
    def revision(self) -> str:
        """Return what leads to the model, in short."""
        return ", ".join((*self.revisions, self.commit[:_SHORT])) if self.commit else "-"


def cached_models() -> Iterator[CachedModel]:
    """Yield the models of the cache, by name."""
    for repository in CachedRepository.all():
        yield from models_of(repository)


def models_of(repository: CachedRepository) -> list[CachedModel]:
    """Return the models of a repository that the cache has, commit by commit."""
    refs, found = repository.refs(), list[CachedModel]()
    for commit in repository.commits():
        branches = tuple(name for name, one in refs.items() if one == commit)
        found += _in_commit(repository, commit, branches)
    begun = sum(_size(file) for file in repository.blobs.glob(f"*{PARTIAL}"))
    if begun and not any(one.state == BROKEN for one in found):
        found.append(CachedModel(repository.name, (), "", begun, 0.0, BROKEN, None, repository.path))
    return found


def _in_commit(repository: CachedRepository, commit: str, branches: tuple[str, ...]) -> Iterator[CachedModel]:
    snapshot = repository.snapshot(commit)
    paths = present(snapshot)
    models = gguf_models(paths)
    for first, parts in models.items():
        name = f"{repository.name}:{quant_or_file(first, models)}"
        yield _described(name, branches, commit, snapshot, parts, whole=is_whole(parts))
    if CONFIG in paths or not models:
        rest = [path for path in paths if not any(path in parts for parts in models.values())]
        whole = missing_weights(snapshot) == ()
        yield _described(repository.name, branches, commit, snapshot, rest, whole=whole)


def _described(
    name: str,
    branches: tuple[str, ...],
    commit: str,
    snapshot: Path,
    paths: Iterable[str],
    *,
    whole: bool,
) -> CachedModel:
    files = {Path(os.path.realpath(snapshot / path)) for path in paths}
    path = snapshot / next(iter(paths)) if ":" in name else snapshot
    about, state = None, WHOLE if whole else BROKEN
    try:
        about = About.of(path)
    except UnsupportedModelError as error:
        state = f"not runnable: {_why(error)}"
    except CheckpointError:
        shapeless = path == snapshot and not (snapshot / CONFIG).exists()
        state = "not runnable: no config.json" if shapeless else BROKEN
    return CachedModel(name, branches, commit, sum(map(_size, files)), last_used(path), state, about, path)


def _why(error: UnsupportedModelError) -> str:
    """Return what of a model is not run, in few words."""
    found = _KEY.search(str(error))
    if found is None:
        return str(error).partition("; ")[0].rpartition(": ")[2]
    key, value = found[1], found[2].strip("'\"")
    return f"architecture {value}" if key in _TYPES else f"{key} {value}"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class CacheRemoval:
    """Stands for what `penstock rm` would remove: `commits` of a repository, or `files` of one, or all."""

    repository: CachedRepository
    commits: tuple[str, ...]
    files: tuple[Path, ...]
    everything: bool

    @classmethod
    def of(cls, name: ModelName) -> "CacheRemoval":
        """Return what a name means in the cache. Raises HubError if that is nothing."""
        repository = CachedRepository.of(name.repository)
        if not repository.exists:
            raise HubError(
                f"{name.repository} is not in the cache {hub_cache()}; `penstock list` says what is there"
            )
        there = repository.commits()
        commit = repository.commit_of(name.revision)
        if (name.revision or name.file) and commit is None:
            raise HubError(
                f"{name.repository} is in the cache, but not its revision {name.sort!r}; `penstock list` "
                "says which are"
            )
        if not name.file:
            commits = (commit,) if name.revision and commit else tuple(there)
            return cls(repository, commits, (), everything=set(commits) == set(there))
        assert commit is not None
        snapshot = repository.snapshot(commit)
        models = gguf_models(present(snapshot))
        if not models:
            raise HubError(f"{name} is not in the cache; `penstock list` says what is there")
        parts = choose_gguf(models, name)
        alone = there == [commit] and len(present(snapshot)) == len(parts)
        return cls(repository, (commit,), tuple(snapshot / part for part in parts), everything=alone)

    @property
    def frees(self) -> int:
        """Return the bytes that the disk gets back: those that no other revision uses."""
        if self.everything:
            return sum(_size(file) for file in self.repository.blobs.glob("*") if not file.is_symlink())
        gone, kept = set[Path](), set[Path]()
        for commit in self.repository.commits():
            snapshot = self.repository.snapshot(commit)
            for path in present(snapshot):
                file = snapshot / path
                goes = commit in self.commits and (not self.files or file in self.files)
                (gone if goes else kept).add(Path(os.path.realpath(file)))
        return sum(_size(file) for file in gone - kept)

    def run(self) -> None:
        """Remove it. Raises HubError for what cannot be removed."""
        from huggingface_hub import scan_cache_dir  # 0.3 s
        from huggingface_hub.errors import CacheNotFound

        try:
            with suppress(CacheNotFound):
                cache = scan_cache_dir(hub_cache())
                known = next((one for one in cache.repos if one.repo_path == self.repository.path), None)
                if known is not None and self.files and not self.everything:
                    files = [
                        file
                        for revision in known.revisions
                        for file in revision.files
                        if file.file_path in self.files
                    ]
                    cache.delete_files(*files).execute()
                elif known is not None:
                    cache.delete_revisions(*self.commits).execute()
            if self.everything and self.repository.exists:  # What was begun, or is damaged.
                shutil.rmtree(self.repository.path)
        except OSError as error:
            raise HubError(
                f"{self.repository.name} cannot be removed: {error.strerror}: {error.filename}; see that "
                "the cache can be written"
            ) from error
        if any(path.exists() for path in self._paths()):
            raise HubError(
                f"{self.repository.name} is still in the cache {hub_cache()}; see that it can be written"
            )

    def _paths(self) -> Iterable[Path]:
        if self.everything:
            return (self.repository.path,)
        return self.files or [self.repository.snapshot(commit) for commit in self.commits]
