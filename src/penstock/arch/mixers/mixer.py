"""What a layer mixes tokens with: its weights, the planes of its KV page, its cost, and its part on one of
several ranks.

A mixer is a frozen value without torch. What it computes is in `penstock.models.mixers`, by its type.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.arch.formats.format import TensorSlice
from penstock.arch.shards import Shard


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a layer's KV: `heads` heads of `width` numbers for every token, `[block_size, heads,
    width]` in a block. Rounded to fp8, each head of a block has a scale of its own."""

    name: str
    heads: int
    width: int
    dtype: str | None = None
    """As the arithmetic's if none is named; such planes alone are rounded to fp8."""
    scored: bool = False
    """Whether queries are scored with it: what an attention policy keeps sketches of."""

    @property
    def numbers(self) -> int:
        """Numbers of one token."""
        return self.heads * self.width


@dataclass(frozen=True)
class Mixer:
    """How the tokens of a layer see each other. Queries are `[tokens, heads, head_dim]`; `heads // kv_heads`
    of them share what is kept of a token."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """How many tokens a query sees, itself included; None sees all."""

    @property
    def query_size(self) -> int:
        """Numbers of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def output_size(self) -> int:
        """Numbers of a token that the output projection reads."""
        raise NotImplementedError

    @property
    def planes(self) -> tuple[Plane, ...]:
        """What is kept of every token, in the order in which it lies in a page."""
        raise NotImplementedError

    @property
    def projected_size(self) -> int:
        """Numbers of a token that are there between the projections: its queries, and what is kept of it."""
        return self.query_size + sum(plane.numbers for plane in self.planes)

    @property
    def pair_operations(self) -> float:
        """Floating-point operations for each pair of a query token and a token that it sees."""
        return 2 * (self.query_size + self.output_size)

    def kept_operations(self, hidden: int) -> float:
        """Return the operations that make the planes of one token of its hidden state, and nothing else."""
        return 2 * hidden * sum(plane.numbers for plane in self.planes)

    def seen(self, length: float) -> float:
        """Return how many tokens the last one of a sequence of `length` sees, itself included."""
        return length if self.window is None else min(length, self.window)

    def weights(self, at: str, hidden: int, shard: Shard) -> dict[str, Sequence[TensorSlice]]:
        """Return the tensors of a rank's part by their names in the group, in the order in which they lie.

        at: what the names of the layer's tensors in a checkpoint begin with. What is added to a sum over
        ranks only rank 0 has. Raises ConfigError for more ranks than there are heads.
        """
        raise NotImplementedError

    def local(self, shard: Shard) -> "Mixer":
        """Return the rank's part, as the arithmetic and the KV of that rank see it."""
        raise NotImplementedError
