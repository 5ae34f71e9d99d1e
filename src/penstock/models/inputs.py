"""What a forward pass reads besides weights and KV, and how it reaches those without knowing where they
rest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.arch.layout import GroupId
from penstock.ops.attention.inputs import AttentionInputs, Tiles
from penstock.ops.matrix import GroupViews


@dataclass(frozen=True, slots=True)
class StateRun:
    """A StateRun is a chunk: tokens [first, first + count) of a step, of the sequence with its state in
    `row`."""

    first: int
    count: int
    row: int


@dataclass(frozen=True, slots=True)
class StateInputs:
    """StateInputs say which rows hold the states of a step's sequences. Each row is there once, to be read
    and written once a layer.

    singles: int64 `[singles]`, rows of the step's first tokens, each the next of another sequence.
    runs: the tokens behind them.
    """

    singles: Tensor
    runs: tuple[StateRun, ...]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step on the device. tokens int64 `[tokens]`; cos, sin float32 `[tokens, dim / 2]`; wanted int64
    `[rows]`: positions whose hidden state leaves the pass.

    last: what the wanted positions attend to, as rows, all being in pages and each the newest of its
    sequence; for the last layer, of which nobody reads the others. None where they are not, or are most of
    the step. state: of a model that has any.
    """

    tokens: Tensor
    cos: Tensor
    sin: Tensor
    attention: AttentionInputs
    wanted: Tensor | None
    last: AttentionInputs | None = None
    state: StateInputs | None = None


class Weights(Protocol):
    """Borrowed weights: between `take` and `release` the group's fields may be read on the compute stream,
    and not after.

    `expect` tells which experts will be taken next, in this order, as soon as it is known.
    """

    def expect(self, experts: Sequence[GroupId]) -> None: ...

    def take(self, group: GroupId) -> GroupViews: ...

    def release(self, group: GroupId) -> None: ...

    def table(self, layer: int) -> Tensor | None:
        """Return the addresses of all tensors of a layer's experts, int64 `[experts, tensors]` on the device.

        None if some of them come and go: then `waves` lends them."""

    def waves(self, experts: Sequence[GroupId]) -> Iterator[tuple[Sequence[GroupId], Tensor]]:
        """Lend these experts of one layer, in its order, several at a time: those, and the layer's table,
        with 0 for all others. What is to be computed with a wave is queued before the next is asked for;
        those not asked for are lent no more."""


class Collectives(Protocol):
    """What the ranks of a model exchange in a pass, on the compute stream. All call the same in the same
    order, with as many rows.

    Each gets the same bits as the others: from what it was sent a rank also decides, as which experts to
    compute.
    """

    def all_reduce(self, x: Tensor) -> None:
        """Put the sum over all ranks in the place of `x`, contiguous, added up in its dtype or a wider
        one."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of `x` over all ranks to `residual` in place, both `[rows, hidden]`, and return the
        norm of that, as `norm.add_rms_norm`. What becomes of `x` is not said."""

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' `[rows, width]` beside each other in the order of ranks; widths may differ."""


class ColdCache(Tiles, Protocol):
    """KV beyond the device: lends each layer's tiles, and is sent what is to rest there."""

    def send(self, layer: int, planes: Sequence[Tensor]) -> None:
        """Take the step's planes of a layer, `[tokens, heads, width]`, before it attends."""


LayerCaches = Sequence[tuple[Tensor, ...]]
"""The planes of every layer, each a strided view `[blocks, block_size, heads, width]`, and behind them its
arrays of state, each a strided view `[rows, *shape]`."""
