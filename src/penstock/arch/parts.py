"""Cuts a model for one rank: its rows of feed-forwards and of the vocabulary, and the spec that it computes.

Every rank has every layer, with its own heads and inner rows. Its result is one term of a sum over ranks.
"""

from dataclasses import dataclass, replace

from penstock.arch.shards import Shard, cut
from penstock.arch.spec import Mlp, ModelSpec
from penstock.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Held:
    """Held says which rows of the whole model a rank has, beside its heads.

    inner: rows of gate and up, columns of down of a dense feed-forward. Empty without one.
    expert_inner: the same of every expert. Empty without experts.
    vocabulary: rows of the embedding and of the output matrix.
    """

    inner: range
    expert_inner: range
    vocabulary: range


def held(spec: ModelSpec, shard: Shard, whose: str = "the model's") -> Held:
    """Return the rows that a rank has. Raises ConfigError if one of the ranks would have none; `whose` rows
    they are is said there."""
    dense = not all(spec.moe_layers)
    expert_inner = spec.moe.intermediate_size if spec.moe else 0
    for count, what in (
        (min(layer.mixer.heads for layer in spec.stack), "query heads"),
        (spec.intermediate_size if dense else shard.ranks, "rows in a feed-forward"),
        (expert_inner if spec.moe else shard.ranks, "rows in an expert"),
        (spec.vocab_size, "tokens in its vocabulary"),
    ):
        if count < shard.ranks:
            raise ConfigError(
                f"tensor_parallel={shard.ranks} is more than {whose} {count} {what}; give a "
                f"tensor_parallel of at most {count}"
            )
    return Held(cut(spec.intermediate_size, shard), cut(expert_inner, shard), cut(spec.vocab_size, shard))


def local_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """Return the model as a rank computes it, with the rank's heads, intermediate sizes and vocabulary.

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
