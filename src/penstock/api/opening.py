"""Opens the weights of a model, and boots it with the draft model that its settings name."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.api.text.vocabularies import check_tokens
from penstock.arch.formats.recipe import COPY_GROUPS, Recipe, copy_recipe
from penstock.arch.heads import check_head, read_head
from penstock.base.config import Config
from penstock.base.errors import ConfigError
from penstock.engine.boot import Booted, boot
from penstock.engine.draft import check_continues, check_one_rank, check_undivided
from penstock.engine.settling import choose_dtype
from penstock.hub.models import locate
from penstock.memory.device import choose_device
from penstock.weights.checkpoint.config import read_config
from penstock.weights.checkpoint.heads import HeadCheckpoint, holds_head
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.cache import cached_pack, is_pack
from penstock.weights.pack.quantising import QuantisedCheckpoint
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
        check_one_rank(name, config.tensor_parallel)
        return path
    check_continues(path)
    check_tokens(config.model, path)
    return path


def boot_model(config: Config, model: Checkpoint | Pack, **more: Any) -> Booted:
    """Return a running engine, as `boot` does, with the draft model that the settings name, or with a copy of
    the model in few bits.

    Raises what `find_draft` does, before anything is loaded, and what opening it raises.
    """
    start = partial(boot, config, model, **more)
    if config.drafts_itself:
        draft: Checkpoint | Pack = copy_in_few_bits(config, model, more.get("say", lambda _: None))
    elif config.draft_model is not None:
        draft = _open_draft(find_draft(config, config.draft_model), config.cache, model)
    else:
        return start()
    try:
        return start(draft=draft)
    finally:
        draft.close()


def _open_draft(path: Path, cache: Path, model: Checkpoint | Pack) -> Checkpoint | Pack:
    """Open a draft model, or a draft head. Raises ConfigError for a head that was made for another model."""
    if not holds_head(path):
        return open_weights(path, cache)
    check_head(read_head(read_config(path), str(path / "config.json")), model.spec, str(path))
    return HeadCheckpoint.open_head(path)


def copy_in_few_bits(config: Config, model: Checkpoint | Pack, say: Callable[[str], None]) -> Pack:
    """Return the model's weights in four bits, from the cache, where they are put first if need be.

    Embedding and head have eight. Raises ConfigError where the model has few bits already, is a pack, or is
    divided among ranks, and what packing raises.
    """
    check_undivided(config.tensor_parallel)
    if isinstance(model, Pack):
        raise ConfigError(
            f"speculate self drafts with a copy of a checkpoint in four bits, but {config.model} is a pack; "
            "name the checkpoint it was made of, or a draft model"
        )
    device = choose_device(config.device)
    dtype = choose_dtype(config, model, device)
    recipe = partial(copy_recipe, model.spec.format, f"{config.model} has")
    few = _quantised(model, recipe, dtype, device)
    why = "and four bits are to make drafts"
    return cached_pack(few, dtype, config.cache.expanduser(), None, say, why=why)


def _quantised(
    model: Checkpoint, recipe: Callable[[int], Recipe], dtype: str, device: torch.device
) -> QuantisedCheckpoint:
    """Return the checkpoint in four bits, with the largest groups that divide the rows of every matrix."""
    *larger, least = COPY_GROUPS
    for group in larger:
        with suppress(ConfigError):
            return QuantisedCheckpoint(model, recipe(group), dtype, device)
    return QuantisedCheckpoint(model, recipe(least), dtype, device)
