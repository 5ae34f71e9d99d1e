"""Makes the copy of a model in few bits that drafts for it, or a rank's part of that."""

from collections.abc import Callable

import torch

from penstock.arch.shards import WHOLE, Shard
from penstock.base.config import Config
from penstock.engine.draft import no_copy_of_pack, recipe_of_copy
from penstock.engine.placing import Model
from penstock.engine.settling import choose_dtype
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.cache import cached_pack
from penstock.weights.pack.quantising import QuantisedCheckpoint
from penstock.weights.pack.reader import Pack


def check_copy(config: Config, model: Model) -> None:
    """Raise ConfigError where a model can have no copy in few bits: it is a pack, or has few bits already."""
    if isinstance(model, Pack):
        raise no_copy_of_pack(config.model)
    recipe_of_copy(model.spec, model.names, "bfloat16", config.tensor_parallel, f"{config.model} has")


def copy_in_few_bits(
    config: Config, model: Model, device: torch.device, say: Callable[[str], None], shard: Shard = WHOLE
) -> Pack:
    """Return a rank's part of the model's weights in four bits, from the cache, where they are put first if
    need be.

    Embedding and head have eight. Raises what `check_copy` does, and what packing raises.
    """
    check_copy(config, model)
    assert isinstance(model, Checkpoint)
    dtype = choose_dtype(config, model, device)
    recipe = recipe_of_copy(model.spec, model.names, dtype, shard.ranks, f"{config.model} has")
    few = QuantisedCheckpoint(model, recipe, dtype, device, shard)
    why = "and four bits are to make drafts"
    return cached_pack(few, dtype, config.cache.expanduser(), None, say, shard, why=why)
