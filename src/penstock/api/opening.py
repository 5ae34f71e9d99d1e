"""Opens the weights of a model, and boots it with the draft model that its settings name."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.api.text.vocabularies import check_tokens
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.recipe import Recipe
from penstock.base.config import Config
from penstock.base.errors import ConfigError
from penstock.engine.boot import Booted, boot
from penstock.engine.settling import choose_dtype
from penstock.hub.models import locate
from penstock.memory.device import choose_device
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.cache import cached_pack, is_pack
from penstock.weights.pack.quantising import QuantisedCheckpoint
from penstock.weights.pack.reader import Pack


def open_weights(path: Path, cache: Path) -> Checkpoint | Pack:
    """Open the weights of a model. Raises CheckpointError and UnsupportedModelError."""
    return Pack.open(path) if is_pack(path) else Checkpoint.open(path, cache.expanduser())


def boot_model(config: Config, model: Checkpoint | Pack, **more: Any) -> Booted:
    """Return a running engine, as `boot` does, with the draft model that the settings name, or with a copy of
    the model in few bits.

    Raises ConfigError if that has other tokens than the model, before anything is loaded, and what opening it
    raises.
    """
    start = partial(boot, config, model, **more)
    if config.drafts_itself:
        draft: Checkpoint | Pack = copy_in_few_bits(config, model, more.get("say", lambda _: None))
    elif config.draft_model is not None:
        path = locate(config.draft_model).path
        check_tokens(config.model, path)
        draft = open_weights(path, config.cache)
    else:
        return start()
    try:
        return start(draft=draft)
    finally:
        draft.close()


def copy_in_few_bits(config: Config, model: Checkpoint | Pack, say: Callable[[str], None]) -> Pack:
    """Return the model's weights in four bits, from the cache, where they are put first if need be.

    Embedding and head have eight. Raises ConfigError where the model has few bits already, is a pack, or is
    divided among ranks, and what packing raises.
    """
    if config.tensor_parallel > 1:
        raise ConfigError(
            "speculate self does not work with tensor_parallel: a pack of few bits cannot be divided; give "
            "speculate suffix, or name a draft model"
        )
    if isinstance(model, Pack) or model.spec.format != DENSE:
        what = "is a pack" if isinstance(model, Pack) else "has weights of few bits already"
        raise ConfigError(
            f"speculate self drafts with a copy of a checkpoint in four bits, but {config.model} {what}; "
            "give speculate suffix, or name a smaller model as the draft model"
        )
    device = choose_device(config.device)
    dtype = choose_dtype(config, model, device)
    few = _quantised(model, dtype, device)
    why = "and four bits are to make drafts"
    return cached_pack(few, dtype, config.cache.expanduser(), None, say, why=why)


def _quantised(model: Checkpoint, dtype: str, device: torch.device) -> QuantisedCheckpoint:
    """Return the checkpoint in four bits, with the largest groups that divide the rows of every matrix."""
    *larger, least = (128, 64, 32, 16, 8)
    for group in larger:
        with suppress(ConfigError):
            return QuantisedCheckpoint(model, Recipe("int4", group, ends=True), dtype, device)
    return QuantisedCheckpoint(model, Recipe("int4", least, ends=True), dtype, device)
