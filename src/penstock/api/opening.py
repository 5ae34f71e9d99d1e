"""Opens the weights of a model, and boots it with the draft model that its settings name."""

from functools import partial
from pathlib import Path
from typing import Any

from penstock.api.text.tokenizer import Tokenizer
from penstock.base.config import Config
from penstock.base.errors import ConfigError
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
    _check_tokens(config.model, path)
    draft = open_weights(path, config.cache)
    try:
        return start(draft=draft)
    finally:
        draft.close()


def _check_tokens(target: Path, draft: Path) -> None:
    mine, theirs = Tokenizer.from_model(target), Tokenizer.from_model(draft)
    if mine is None or theirs is None:
        return  # Vocabularies of another size are refused behind this; whoever has no text has only numbers.
    if (token := mine.differing(theirs)) is not None:
        raise ConfigError(
            f"the draft model {draft} has other tokens than {target}: {token!r} is "
            f"{theirs.token_to_id(token)} there and {mine.token_to_id(token)} here; give a draft model with "
            "the same tokenizer, or speculate suffix"
        )
