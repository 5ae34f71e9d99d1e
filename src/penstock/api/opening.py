"""Opens the weights of a model, and boots it with the draft model that its settings name."""

from contextlib import closing
from pathlib import Path
from typing import Any

from penstock.api.text.vocabularies import check_tokens
from penstock.arch.heads import check_head, read_head
from penstock.arch.mtp import no_mtp
from penstock.base.config import Config
from penstock.engine.boot import Booted, boot
from penstock.engine.draft import check_continues
from penstock.hub.models import locate
from penstock.weights.checkpoint.config import read_config
from penstock.weights.checkpoint.heads import HeadCheckpoint, holds_head
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.cache import is_pack
from penstock.weights.pack.reader import Pack


def open_weights(path: Path, cache: Path) -> Checkpoint | Pack:
    """Open the weights of a model. Raises CheckpointError and UnsupportedModelError."""
    return Pack.open(path) if is_pack(path) else Checkpoint.open(path, cache.expanduser())


def find_draft(config: Config, name: str) -> Path:
    """Return where the draft model of this name is, fetched if need be.

    Raises ConfigError if it has other tokens than the model or continues no text, or is a draft head that
    does not run here, CheckpointError for files that are damaged, and what `locate` raises.
    """
    path = locate(name).path
    if holds_head(path):
        return path
    check_continues(path)
    check_tokens(config.model, path)
    return path


def boot_model(config: Config, model: Checkpoint | Pack, **more: Any) -> Booted:
    """Return a running engine, as `boot` does, with the draft model that the settings name, or the model's
    own MTP layer.

    Raises what `find_draft` does, before anything is loaded, and what opening it raises.
    """
    if config.drafts_by_mtp:
        if isinstance(model, Pack):
            raise no_mtp(f"{model.path} is a pack, which has none; name the checkpoint it was made of")
        with closing(HeadCheckpoint.open_mtp(model.path)) as draft:
            return boot(config, model, draft=draft, **more)
    if config.draft_model is None:
        return boot(config, model, **more)
    with closing(_open_draft(find_draft(config, config.draft_model), config.cache, model)) as draft:
        return boot(config, model, draft=draft, **more)


def _open_draft(path: Path, cache: Path, model: Checkpoint | Pack) -> Checkpoint | Pack:
    """Open a draft model, or a draft head. Raises ConfigError for a head that was made for another model."""
    if not holds_head(path):
        return open_weights(path, cache)
    check_head(read_head(read_config(path), str(path / "config.json")), model.spec, str(path))
    return HeadCheckpoint.open_head(path)
