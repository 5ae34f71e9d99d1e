"""Cuts a model for one rank: its rows of feed-forwards and of the vocabulary, and the spec that it computes.

Every rank has every layer, with its own heads and inner rows. Its result is one term of a sum over ranks.
"""

from dataclasses import dataclass, replace

from penstock.arch.shards import Shard, cut, cut_inner
from penstock.arch.spec import Mlp, ModelSpec, MoeSpec
from penstock.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Held:
    """Held says which rows of the whole model a rank has, beside its heads.

    inner: rows of gate and up, columns of down of a dense feed-forward. Empty without one.
    expert_inner: the same of every expert. Empty without experts.
    shared_inner: the same of the shared experts. Empty without any.
    vocabulary: rows of the embedding and of the output matrix.
    """

    inner: range
    expert_inner: range
    shared_inner: range
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
        (spec.shared_size or shard.ranks, "rows in a shared expert"),
        (spec.vocab_size, "tokens in its vocabulary"),
    ):
        if count < shard.ranks:
            raise ConfigError(
                f"tensor_parallel={shard.ranks} is more than {whose} {count} {what}; give a "
                f"tensor_parallel of at most {count}"
            )
    return Held(
        inner=cut_inner(spec.intermediate_size, shard),
        expert_inner=cut_inner(expert_inner, shard),
        shared_inner=cut_inner(spec.shared_size, shard),
        vocabulary=cut(spec.vocab_size, shard),
    )


def local_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """Return the model as a rank computes it, with the rank's heads, intermediate sizes and vocabulary.

    Raises ConfigError, as `held` does.
    """
    if shard.ranks == 1:
        return spec
    mine = held(spec, shard)
    stack = []
    for layer in spec.stack:
        feed_forward = _local(layer.feed_forward, mine)
        stack.append(replace(layer, mixer=layer.mixer.local(shard), feed_forward=feed_forward))
    return replace(spec, stack=tuple(stack), vocab_size=len(mine.vocabulary))


def _local(feed_forward: Mlp | MoeSpec, mine: Held) -> Mlp | MoeSpec:
    if isinstance(feed_forward, Mlp):
        return replace(feed_forward, intermediate_size=len(mine.inner))
    shared = feed_forward.shared and replace(feed_forward.shared, intermediate_size=len(mine.shared_inner))
    return replace(feed_forward, intermediate_size=len(mine.expert_inner), shared=shared)
