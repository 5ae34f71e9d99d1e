"""A rank's part of a model in numbers: rows of feed-forwards and of the vocabulary, and the model as the rank
computes it.

Every rank has every layer, and of each the heads and inner rows that are its own; what it computes with them
is its part of a sum.
"""

from dataclasses import dataclass, replace

from penstock.arch.shards import Shard, cut
from penstock.arch.spec import Mlp, ModelSpec
from penstock.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds beside its heads, as ranges of the whole model's numbers."""

    inner: range
    """Rows of a dense feed-forward: of gate and up, columns of down. May be empty where there is none."""
    expert_inner: range
    """The same of every expert; empty where there is none."""
    vocabulary: range
    """Rows of the embedding and of the output matrix."""


def held(spec: ModelSpec, shard: Shard) -> Held:
    """Return what `shard` is of the model. Raises ConfigError if some rank of as many would have nothing."""
    dense = not all(spec.is_moe(layer) for layer in range(spec.layers))
    expert_inner = spec.moe.intermediate_size if spec.moe else 0
    for count, what in (
        (min(layer.mixer.heads for layer in spec.stack), "query heads"),
        (spec.intermediate_size if dense else shard.ranks, "rows in a feed-forward"),
        (expert_inner if spec.moe else shard.ranks, "rows in an expert"),
        (spec.vocab_size, "tokens in its vocabulary"),
    ):
        if count < shard.ranks:
            raise ConfigError(
                f"tensor_parallel={shard.ranks} is more than the model's {count} {what}; give a "
                f"tensor_parallel of at most {count}"
            )
    return Held(cut(spec.intermediate_size, shard), cut(expert_inner, shard), cut(spec.vocab_size, shard))


def local_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """Return the model as a rank computes it: mixers, intermediate sizes and vocabulary are the rank's.

    Raises ConfigError, as `held` does.
    """
    if shard.ranks == 1:
        return spec
    mine = held(spec, shard)
    stack = []
    for layer in spec.stack:
        inner = mine.inner if isinstance(layer.feed_forward, Mlp) else mine.expert_inner
        feed_forward = replace(layer.feed_forward, intermediate_size=len(inner))
        stack.append(replace(layer, mixer=layer.mixer.local(shard), feed_forward=feed_forward))
    return replace(spec, stack=tuple(stack), vocab_size=len(mine.vocabulary))
