"""Tensor parallelism in numbers: which heads, rows of feed-forwards and rows of the vocabulary each rank
holds (arXiv 1909.08053).

Every rank has every layer, and of each the heads and inner rows that are its own; what it computes with them
is its part of a sum.
"""

from dataclasses import dataclass, replace

from penstock.arch.spec import ModelSpec
from penstock.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """What one of `ranks` holds of a model that they compute together."""

    rank: int
    ranks: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"there is no rank {self.rank} of {self.ranks}; ranks are counted from 0")

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}" if self.ranks > 1 else "the whole model"


WHOLE = Shard(0, 1)


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds, as ranges of the whole model's numbers. Only KV heads may be held by several ranks;
    nothing is held by none."""

    heads: range
    kv_heads: range
    inner: range
    """Rows of a dense feed-forward: of gate and up, columns of down. May be empty where there is none."""
    expert_inner: range
    """The same of every expert; empty where there is none."""
    vocabulary: range
    """Rows of the embedding and of the output matrix."""


def cut(count: int, shard: Shard) -> range:
    """The rank's part of `count` things: parts follow each other in the order of ranks, and their lengths
    differ by at most one."""
    return range(count * shard.rank // shard.ranks, count * (shard.rank + 1) // shard.ranks)


def held(spec: ModelSpec, shard: Shard) -> Held:
    """What `shard` is of the model. Raises ConfigError if some rank of as many would have nothing."""
    dense = not all(spec.is_moe(layer) for layer in range(spec.layers))
    expert_inner = spec.moe.intermediate_size if spec.moe else 0
    for count, what in (
        (spec.heads, "query heads"),
        (spec.intermediate_size if dense else shard.ranks, "rows in a feed-forward"),
        (expert_inner if spec.moe else shard.ranks, "rows in an expert"),
        (spec.vocab_size, "tokens in its vocabulary"),
    ):
        if count < shard.ranks:
            raise ConfigError(
                f"{shard.ranks} ranks were asked for, but the model has {count} {what} to share; ask for at "
                f"most {count}"
            )
    heads, kv_heads = _heads(spec.heads // spec.kv_heads, spec.kv_heads, shard)
    return Held(
        heads,
        kv_heads,
        cut(spec.intermediate_size, shard),
        cut(expert_inner, shard),
        cut(spec.vocab_size, shard),
    )


def local_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The model as a rank computes it, for its arithmetic and its KV: heads, KV heads, intermediate sizes and
    vocabulary are the rank's.

    Raises ConfigError, as `held` does.
    """
    if shard.ranks == 1:
        return spec
    mine = held(spec, shard)
    return replace(
        spec,
        heads=len(mine.heads),
        kv_heads=len(mine.kv_heads),
        intermediate_size=len(mine.inner),
        vocab_size=len(mine.vocabulary),
        moe=replace(spec.moe, intermediate_size=len(mine.expert_inner)) if spec.moe else None,
    )


def _heads(group: int, kv_heads: int, shard: Shard) -> tuple[range, range]:
    """Query heads and KV heads of a rank: as many of the former for each of the latter, for which attention
    knows no other.

    KV heads are cut, and `group` query heads follow each. With fewer KV heads than ranks, ranks are cut
    instead: each KV head is on several, among which its query heads are.
    """
    if shard.ranks <= kv_heads:
        kv = cut(kv_heads, shard)
        return range(kv.start * group, kv.stop * group), kv
    holders = (cut(shard.ranks, Shard(head, kv_heads)) for head in range(kv_heads))
    head, those = next((head, ranks) for head, ranks in enumerate(holders) if shard.rank in ranks)
    mine = cut(group, Shard(shard.rank - those.start, len(those)))
    return range(head * group + mine.start, head * group + mine.stop), range(head, head + 1)
