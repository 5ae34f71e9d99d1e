"""A mixer says what a layer mixes tokens with: its weights, the planes of its KV page, its state, its cost,
and its part on one of several ranks.

A mixer is a frozen value without torch. What it computes is in `penstock.models.mixers`, by its type.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.arch.formats.format import TensorSlice
from penstock.arch.shards import Shard


@dataclass(frozen=True, slots=True)
class Plane:
    """A plane is one array of a layer's KV: `[block_size, heads, width]` in a block.

    Rounded to fp8, each head of a block has a scale of its own.

    dtype: None is the dtype of the arithmetic. Only such planes are rounded to fp8.
    scored: whether queries are scored with it. Attention policies keep sketches of such planes.
    """

    name: str
    heads: int
    width: int
    dtype: str | None = None
    scored: bool = False

    @property
    def numbers(self) -> int:
        """Return how many numbers one token has."""
        return self.heads * self.width


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of a layer's state: numbers of `shape` for a sequence, however long it is, such as the matrix
    of a gated delta net or the tail of a short convolution. It is zeros where a sequence begins."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    """The dtype is the arithmetic's if none is named."""


@dataclass(frozen=True)
class Mixer:
    """A mixer says how the tokens of a layer see each other.

    Queries are `[tokens, heads, head_dim]`. `heads // kv_heads` query heads share one KV head.

    window: how many tokens a query sees, itself included. None sees all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def query_size(self) -> int:
        """Return how many numbers the queries of a token are."""
        return self.heads * self.head_dim

    @property
    def output_size(self) -> int:
        """Return how many numbers of a token the output projection reads."""
        raise NotImplementedError

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Return the arrays that are kept of every token, in the order in which they lie in a page."""
        raise NotImplementedError

    @property
    def state(self) -> tuple[StateArray, ...]:
        """The layer keeps this of every sequence, whatever its length; nothing by default."""
        return ()

    @property
    def projected_size(self) -> int:
        """Return how many numbers of a token lie between the projections: its queries and its planes."""
        return self.query_size + sum(plane.numbers for plane in self.planes)

    @property
    def pair_operations(self) -> float:
        """Return the floating-point operations for each pair of a query token and a token that it sees."""
        return 2 * (self.query_size + self.output_size)

    @property
    def state_operations(self) -> float:
        """Floating-point operations of each token with its sequence's state; none by default."""
        return 0.0

    def kept_operations(self, hidden: int) -> float:
        """Return the floating-point operations that compute only the planes of one token, from its hidden
        state."""
        return 2 * hidden * sum(plane.numbers for plane in self.planes)

    def seen(self, length: float) -> float:
        """Return how many tokens the last one of a sequence of `length` sees, itself included."""
        return length if self.window is None else min(length, self.window)

    def weights(self, at: str, hidden: int, shard: Shard) -> dict[str, Sequence[TensorSlice]]:
        """Return the tensors of a rank's part, by their names in the group, in the order in which they lie.

        Tensors that are added to a sum over ranks belong to rank 0 alone.

        at: prefix of the layer's tensors in a checkpoint.
        hidden: width of the hidden states.

        Raises ConfigError for more ranks than there are heads.
        """
        raise NotImplementedError

    def local(self, shard: Shard) -> "Mixer":
        """Return the mixer of one rank, with its part of the heads."""
        raise NotImplementedError
