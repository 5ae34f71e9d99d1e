"""Divides a model's heads and rows among ranks (tensor parallelism, arXiv 1909.08053)."""

from dataclasses import dataclass

from penstock.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard is the part of the model that one of `ranks` ranks holds."""

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
UNIT = 64
"""Rows of which kernels for few bits read whole runs, with whole words of scales beside them."""
_FEW = 4
"""Units for each rank from which on it matters less that some have one more than that rows are in units."""


def cut(count: int, shard: Shard) -> range:
    """Return the rank's part of `count` things.

    Parts follow each other in the order of ranks. Their lengths differ by at most one.
    """
    return range(count * shard.rank // shard.ranks, count * (shard.rank + 1) // shard.ranks)


def cut_inner(count: int, shard: Shard) -> range:
    """Return the rank's part of the inner rows of a feed-forward.

    Ranks have the same number of rows where these are whole units. Otherwise they have parts of whole units,
    if there are a few for each rank, and the first ranks have the larger parts.
    """
    if count % (UNIT * shard.ranks) == 0 or count % UNIT or count < _FEW * UNIT * shard.ranks:
        return cut(count, shard)
    first, last = (-(-(count // UNIT) * rank // shard.ranks) for rank in (shard.rank, shard.rank + 1))
    return range(first * UNIT, last * UNIT)


def share_heads(group: int, kv_heads: int, shard: Shard) -> tuple[range, range]:
    """Return the query heads and KV heads of a rank.

    KV heads are divided among ranks, with the query heads of each. With fewer KV heads than ranks, ranks are
        divided among KV heads: several ranks then hold the same KV head, and divide its query heads.

    group: query heads of one KV head.
    """
    if shard.ranks <= kv_heads:
        kv = cut(kv_heads, shard)
        return range(kv.start * group, kv.stop * group), kv
    holders = (cut(shard.ranks, Shard(head, kv_heads)) for head in range(kv_heads))
    head, those = next((head, ranks) for head, ranks in enumerate(holders) if shard.rank in ranks)
    mine = cut(group, Shard(shard.rank - those.start, len(those)))
    return range(head * group + mine.start, head * group + mine.stop), range(head, head + 1)
