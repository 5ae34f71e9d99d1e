"""Opens the weights of a model, and boots it with the draft model that its settings name."""

from functools import partial
from pathlib import Path
from typing import Any

from penstock.api.text.vocabularies import check_tokens
from penstock.base.config import Config
from penstock.engine.boot import Booted, boot
from penstock.hub.models import locate
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.cache import is_pack
from penstock.weights.pack.reader import Pack


def open_weights(path: Path, cache: Path) -> Checkpoint | Pack:
    """Open the weights of a model. Raises CheckpointError and UnsupportedModelError."""
    return Pack.open(path) if is_pack(path) else Checkpoint.open(path, cache.expanduser())


def boot_model(config: Config, model: Checkpoint | Pack, **more: Any) -> Booted:
    """Return a running engine, as `boot` does, with the draft model that the settings name.

    Raises ConfigError if that has other tokens than the model, before anything is loaded, and what opening it
    raises.
    """
    start = partial(boot, config, model, **more)
    if config.draft_model is None:
        return start()
    path = locate(config.draft_model).path
    check_tokens(config.model, path)
    draft = open_weights(path, config.cache)
    try:
        return start(draft=draft)
    finally:
        draft.close()
