"""Shards: what one of several ranks holds of a model that they compute together (tensor parallelism, arXiv
1909.08053)."""

from dataclasses import dataclass

from penstock.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """What one of `ranks` holds of a model that they compute together."""

    rank: int
    ranks: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(
                f"rank {self.rank} of {self.ranks} does not exist: ranks are 0 to {self.ranks - 1}; check "
                "RANK and WORLD_SIZE"
            )

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}" if self.ranks > 1 else "the whole model"


WHOLE = Shard(0, 1)


def cut(count: int, shard: Shard) -> range:
    """The rank's part of `count` things: parts follow each other in the order of ranks, and their lengths
    differ by at most one."""
    return range(count * shard.rank // shard.ranks, count * (shard.rank + 1) // shard.ranks)


def share_heads(group: int, kv_heads: int, shard: Shard) -> tuple[range, range]:
    """Return the query heads and KV heads of a rank, `group` of the former for each of the latter.

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
