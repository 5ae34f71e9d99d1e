"""Describes one model, here or on the Hub, for whoever wants to know what it is before it runs."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.hub.about import About
from penstock.hub.cache import CachedRepository, cached
from penstock.hub.faults import HubError
from penstock.hub.inventory import BROKEN, WHOLE
from penstock.hub.models import ask, local, shape_in, wanted_of
from penstock.hub.names import ModelName
from penstock.weights.gguf.files import GGUFFiles, is_gguf
from penstock.weights.pieces import STORE

_CARD, _TEMPLATES = "README.md", ("chat_template.jinja", "chat_template.json")
_LICENCE = re.compile(r"^license:[ \t]*([\w.+-]+)[ \t]*$", re.MULTILINE)
_HEAD = 1 << 16


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """Describes a model. size: bytes of the files that the engine reads. path: None if it is not here. state:
    whole, partial or no."""

    name: str
    about: About
    size: int
    licence: str
    revision: str
    state: str
    path: Path | None


def details(text: str) -> ModelDetails:
    """Describe the model that a text means. Raises HubError, CheckpointError and UnsupportedModelError."""
    here = local(text)
    name = ModelName.parse(text) if here is None else None
    found = here or (cached(name, lenient=True) if name else None)
    if found is not None:
        about = About.of(found.path)
        licence, revision = about.licence or _card_licence(found.path), ""
        if name is not None:
            commit = CachedRepository.of(name.repository).commit_of(name.revision) or ""
            revision = f"{name.sort}, {commit[:7]}"
            if not licence:
                with suppress(HubError):  # Nobody needs the network for what is here.
                    licence = ask(name).licence
        size = sum(os.path.getsize(file) for file in _files(found.path))
        return ModelDetails(found.name, about, size, licence, revision, WHOLE, found.path)
    assert name is not None
    contents = ask(name)
    with shape_in(name, contents, "tokenizer_config.json") as shape:
        about = About.of(shape)
        wanted = wanted_of(name, contents, shape)
    template = about.template or any(one in contents.files for one in _TEMPLATES)
    snapshot = CachedRepository.of(name.repository).snapshot(contents.commit)
    have = any((snapshot / one.path).exists() for one in wanted if one.sha256)
    return ModelDetails(
        str(name),
        replace(about, template=template),
        sum(one.size for one in wanted),
        about.licence or contents.licence,
        f"{name.sort}, {contents.commit[:7]}",
        BROKEN if have else "not here",
        None,
    )


def _files(path: Path) -> list[Path]:
    """Return the files of a model that is here."""
    if not is_gguf(path):
        suffixes = (".safetensors", ".json", ".jinja")
        return [file for file in path.iterdir() if file.suffix in suffixes or file.name == STORE]
    with GGUFFiles(path, whole=False) as files:
        return [one.path for one in files.files]


def _card_licence(path: Path) -> str:
    """Return the licence that a model's card names, if somebody fetched that."""
    card = (path if path.is_dir() else path.parent) / _CARD
    try:
        with open(card, encoding="utf-8", errors="replace") as file:
            found = _LICENCE.search(file.read(_HEAD))
    except OSError:
        return ""
    return found[1] if found else ""
