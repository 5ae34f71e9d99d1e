"""Finds the model that a text means: a directory or file of this machine, or a model of the Hugging Face Hub,
which is fetched if the cache does not have it whole."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.base.units import format_size
from penstock.hub.about import About
from penstock.hub.cache import (
    MAX_INDEX_BYTES,
    CachedRepository,
    cached,
    hub_cache,
    in_snapshot,
    note_absence,
    touch,
)
from penstock.hub.choice import (
    CONFIG,
    INDEX,
    SHAPE,
    SINGLE,
    TOKENIZER,
    choose_gguf,
    gguf_models,
    is_checkpoint,
    is_whole,
    nothing_to_run,
    shards_of,
    side_files,
)
from penstock.hub.faults import HubError, UnreachableError, hub_faults
from penstock.hub.names import ModelName, must_be_hub
from penstock.hub.telling import Found, Offer, Telling
from penstock.memory.disk import DiskFile
from penstock.weights.gguf.container import MAX_HEADER_BYTES, read_header
from penstock.weights.jsonfile import read_object

if TYPE_CHECKING:
    from penstock.hub.fetch import Fetch
    from penstock.hub.remote import HubContents, RemoteFile

_FIRST_HEADER = 1 << 20


def local(text: str) -> Found | None:
    """Return the directory or file of this machine that a text names, if there is one."""
    if must_be_hub(text) and ModelName.parse(text):
        return None
    if not os.path.exists(text):  # False also for a name that no file can have.
        return None
    return Found(Path(text), Path(text).resolve().name)


def locate(text: str, telling: Telling | None = None, *, refresh: bool = False, fetch: bool = True) -> Found:
    """Return the model that a text means, fetched if need be.

    What is here goes first, and what the cache has whole is taken without a question to the Hub. A text that
    cannot be a name of the Hub is returned as a path, which whoever opens it finds missing.
    refresh: ask the Hub all the same, for what its revision is now. fetch: whether the Hub may be asked at
    all. Raises HubError, and UnsupportedModelError before anything large is fetched.
    """
    here = local(text)
    name = ModelName.parse(text) if here is None else None
    if name is None:
        return here or Found(Path(text), Path(text).name)
    if not refresh and (found := cached(name)):
        touch(found)
        return found
    if not fetch:
        if found := cached(name, lenient=True):
            return found
        raise HubError(f"{name} is neither here nor whole in the cache {hub_cache()}; fetch it first")
    try:
        contents = ask(name)
    except UnreachableError:
        if not refresh and (found := cached(name, lenient=True)):
            return found
        raise
    found = _fetched(name, contents, telling or Telling())
    touch(found)
    return found


@contextmanager
def shape_of(text: str) -> Iterator[Found]:
    """Give the model that a text means for a `with` block in which only its shape is looked at: config.json,
    or the header of its GGUF file. Of a model that is not here no more than that is fetched.

    Raises HubError.
    """
    here = local(text)
    name = ModelName.parse(text) if here is None else None
    found = here or (cached(name, lenient=True) or _kept_config(name) if name else Found(Path(text), text))
    if found is not None or name is None:
        assert found is not None
        yield found
        return
    with shape_in(name, ask(name)) as path:
        yield Found(path, str(name))


def _kept_config(name: ModelName) -> Found | None:
    """Return a directory of the cache that has the config.json of a checkpoint, if not its weights."""
    repository = CachedRepository.of(name.repository)
    commit = None if name.file else repository.commit_of(name.revision)
    snapshot = repository.snapshot(commit) if commit else None
    return Found(snapshot, str(name)) if snapshot and (snapshot / CONFIG).exists() else None


def ask(name: ModelName) -> "HubContents":
    """Return what a revision holds now, as the Hub says. Raises HubError."""
    from penstock.hub.remote import contents_of  # 0.6 s

    return contents_of(name)


def _fetch(name: ModelName, contents: "HubContents", telling: Telling | None = None) -> "Fetch":
    from penstock.hub.fetch import Fetch

    return Fetch(name, contents.commit, (telling or Telling()).advance)


@contextmanager
def shape_in(name: ModelName, contents: "HubContents", *more: str) -> Iterator[Path]:
    """Give what describes a model of the Hub: a directory with its config.json, or the beginnings of its GGUF
    files.

    more: small files of a checkpoint that are fetched, too, if there are such.
    """
    fetch = _fetch(name, contents)
    if not name.file and is_checkpoint(contents.files):
        small = [contents.files[path] for path in (*SHAPE, INDEX, *more) if path in contents.files]
        fetch.run(fetch.missing(small))
        if fetch.repository.commit_of(name.revision) is None:
            with hub_faults(name):
                fetch.repository.note(name.sort, contents.commit)
        yield fetch.repository.snapshot(contents.commit)
        return
    with hub_faults(name):
        fetch.repository.path.mkdir(parents=True, exist_ok=True)
        beginnings = tempfile.TemporaryDirectory(prefix=".penstock-", dir=fetch.repository.path)
    with beginnings as directory:
        parts = _gguf_files(name, contents)
        for part in parts:
            named = Path(directory) / Path(part.path).name
            named.symlink_to(_with_header(fetch, part))
        yield Path(directory) / Path(parts[0].path).name


def _with_header(fetch: "Fetch", file: "RemoteFile") -> Path:
    """Return a file that begins like a GGUF file of the Hub, with all of its header."""
    count = _FIRST_HEADER
    while True:
        path = fetch.beginning(file, count) if file.sha256 else _whole_file(fetch, file)
        try:
            with DiskFile(path) as opened:
                read_header(opened, whole=False)
            return path
        except CheckpointError:
            if count >= min(file.size, MAX_HEADER_BYTES):
                raise
        count *= 4


def _whole_file(fetch: "Fetch", file: "RemoteFile") -> Path:
    """Fetch a file that is too small to have a digest of its own."""
    fetch.run(fetch.missing([file]))
    return fetch.repository.snapshot(fetch.commit) / file.path


def _gguf_files(name: ModelName, contents: "HubContents") -> list["RemoteFile"]:
    models = gguf_models(contents.files)
    if not models:
        raise nothing_to_run(contents.files, name)
    parts = choose_gguf(models, name)
    if not is_whole(parts):
        raise HubError(
            f"{name} has only {len(parts)} of the files that {parts[0]} was split into; name another one"
        )
    return [contents.files[part] for part in parts]


def _fetched(name: ModelName, contents: "HubContents", telling: Telling) -> Found:
    """Return a model of a commit, after what is missing was fetched. The branch is noted last, so that it
    means the earlier commit until this one is whole."""
    fetch = _fetch(name, contents, telling)
    before = fetch.repository.refs().get(name.sort)
    with shape_in(name, contents) as shape:
        wanted = wanted_of(name, contents, shape)
        missing = fetch.missing(wanted)
        if missing:
            offer = Offer(name, fetch.left(missing), _free(), _about(name, shape), shape)
            _expect_room(offer)
            telling.agree(offer)
    small = [one for one in missing if not one.sha256]
    for some in (small, [one for one in missing if one.sha256]):  # What has all weights has all else.
        fetch.run(some)
    snapshot = fetch.repository.snapshot(contents.commit)
    found = in_snapshot(snapshot, name, lenient=True)
    if found is None:
        raise HubError(f"{name} was fetched, but is not whole in {snapshot}; remove that, and try again")
    with hub_faults(name):
        if TOKENIZER not in contents.files:
            note_absence(snapshot, TOKENIZER)
        if before != contents.commit:
            fetch.repository.note(name.sort, contents.commit)
    if missing:
        telling.end(found)
    return found


def _about(name: ModelName, shape: Path) -> About:
    """Describe a model that is not here yet. Raises UnsupportedModelError, by its name."""
    try:
        return About.of(shape)
    except UnsupportedModelError as error:
        said = str(error).replace(f"{shape}/", "").replace(str(shape), shape.name)
        raise UnsupportedModelError(f"{name} was not fetched, since it does not run: {said}") from error


def wanted_of(name: ModelName, contents: "HubContents", shape: Path) -> Sequence["RemoteFile"]:
    """Return the files of a model: the small ones first."""
    if name.file or not is_checkpoint(contents.files):
        return _gguf_files(name, contents)
    weights: tuple[str, ...] = (SINGLE,)
    if SINGLE not in contents.files:
        weights = shards_of(read_object(shape / INDEX, MAX_INDEX_BYTES))
    if lost := [one for one in weights if one not in contents.files]:
        raise HubError(f"{name} lacks {lost[0]}, which its {INDEX} names; look for another revision of it")
    return [contents.files[one] for one in (*side_files(contents.files), *weights)]


def _free() -> int:
    """Return the bytes that the cache's disk has."""
    directory = hub_cache()
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _expect_room(offer: Offer) -> None:
    if offer.size > offer.free:
        raise HubError(
            f"{offer.name} takes {format_size(offer.size)} more, and the disk of {hub_cache()} has "
            f"{format_size(offer.free)} free; free some space, or set HF_HOME to a directory of another disk"
        )
