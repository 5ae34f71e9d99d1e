"""Declares what a forward pass reads besides weights and KV, and how it borrows those without knowing where
they rest."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.arch.layout import GroupId, MixtureLayout
from penstock.ops.attention.inputs import AttentionInputs, Tiles
from penstock.ops.handover import StepRows
from penstock.ops.linear import gated, linear
from penstock.ops.lora import LoraMatrix, LoraRows
from penstock.ops.matrix import GroupViews, Matrix


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
class LoraInputs:
    """LoraInputs say which adapters a step's rows have.

    bank: what adapters add to products, by group and matrix.
    rows: of the step's tokens. wanted: of its wanted positions, which alone pass the end of the last layer if
    they are few.
    """

    bank: Mapping[GroupId, Mapping[str, LoraMatrix]]
    rows: LoraRows
    wanted: LoraRows

    @property
    def of_wanted(self) -> "LoraInputs":
        """Return those of a pass of the wanted positions alone."""
        return LoraInputs(self.bank, self.wanted, self.wanted)

    def add(self, at: tuple[GroupId, str], x: Tensor, y: Tensor, first: int = 0) -> None:
        """Add to the product y of x with a matrix what adapters add to it.

        at: the group and the name of the matrix. x: `[rows, in]`. y: `[rows, out]`. first: the first of these
        rows in the pass.
        """
        if (matrix := self._matrix(at)) is not None:
            self.rows.add(x, y, matrix, first)

    def linear(
        self,
        at: tuple[GroupId, str],
        x: Tensor,
        weight: Matrix,
        bias: Tensor | None,
        first: int = 0,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return `linear` of x with a matrix, and what adapters add to it. at, first: as for `add`."""
        if (matrix := self._matrix(at)) is None:
            return linear(x, weight, bias, out=out)
        return self.rows.product(x, weight, bias, matrix, first, out=out)

    def gated(
        self, at: tuple[GroupId, str], x: Tensor, weight: Matrix, bias: Tensor | None, first: int = 0
    ) -> Tensor:
        """Return `gated` of x with a matrix, and what adapters add to its product. at, first: as for
        `add`."""
        if (matrix := self._matrix(at)) is None:
            return gated(x, weight, bias)
        return self.rows.product(x, weight, bias, matrix, first, gated=True)

    def _matrix(self, at: tuple[GroupId, str]) -> LoraMatrix | None:
        group, name = at
        return self.bank.get(group, {}).get(name)


@dataclass(frozen=True, slots=True)
class DraftingInputs:
    """DraftingInputs say what a draft head has to know of a step: whose tokens it draws.

    rows: int64 `[draws]`, the row of each draw. goes_on: whether the step is of tokens that this head has
    drawn in the step before, one of each row, so that its own outputs are their features.
    """

    rows: Tensor
    goes_on: bool


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Holds one step on the device. tokens int64 `[tokens]`; cos, sin float32 `[tokens, dim / 2]`; wanted
    int64 `[rows]`: positions whose hidden state leaves the pass.

    last: what the wanted positions attend to, as rows, all being in pages and each the newest of its
    sequence; for the last layer, where the others are not needed. None where they are not, or are most of the
    step. state: of a model that has any. padding: bool `[tokens]`, tokens that are nobody's, behind those
    that are somebody's; None where there are none. lora: adapters of its tokens; None where none has any.
    drafting: of a draft head alone.
    """

    tokens: Tensor
    cos: Tensor
    sin: Tensor
    attention: AttentionInputs
    wanted: Tensor | None
    last: AttentionInputs | None = None
    state: StateInputs | None = None
    padding: Tensor | None = None
    lora: LoraInputs | None = None
    drafting: DraftingInputs | None = None


class Weights(Protocol):
    """Lends groups of weights to a pass.

    From `take` until `release` a group's fields may be read on the compute stream, and not after.
    """

    @property
    def experts(self) -> "ExpertWeights | None":
        """Return what lends the experts of the model's mixtures, None for a model without any."""

    @property
    def all_stay(self) -> bool:
        """Tell whether each group is lent in the same place in every pass, in memory of its own."""

    def take(self, group: GroupId) -> GroupViews:
        """Lend a group that is no expert. Raises CheckpointError for one that cannot be read."""

    def release(self, group: GroupId) -> None:
        """End the loan: what is queued from now on needs the group no more."""


class ExpertWeights(Protocol):
    """Lends the experts of mixtures, groups that a layer's router names as the pass goes.

    A step borrows a layer's experts in one of five ways: all of them by `table`; those that its tokens chose
    by `parts`, of which the host does not learn; by `waves`, several at a time, or as views by
    `waves_of_views`; or by `each`, one at a time.
    """

    @property
    def mixtures(self) -> Mapping[int, MixtureLayout]:
        """Return how many experts each layer has, and their formats."""

    def table(self, layer: int) -> Tensor | None:
        """Return the addresses of all tensors of a layer's experts, int64 `[experts, tensors]` on the device.

        None if some of the experts come and go: then `waves` lends them.
        """

    @property
    def decided(self) -> bool:
        """Tell whether the device may decide which experts come: tokens that are nobody's then ask for
        none."""

    def parts(
        self, layer: int, pairs: Tensor, most: int, rows: StepRows | None = None
    ) -> Iterator[Tensor] | None:
        """Return tables as `table` has them, one after another, of those of a layer's experts that tokens
        chose, each in one of them: the device finds out which and brings them. None where the host has to.

        They begin to come at once. Work with a table is queued before the next is asked for.
        pairs: int32 `[experts]` on the device, how many pairs of a token and an expert each has.
        most: of all together, which the host knows.
        rows: of the step, for experts that are computed elsewhere: their outputs are in `rows.y` when no more
            table comes.
        """

    def foretells(self, layer: int, most: int) -> int | None:
        """Return the layer for which an expert is to be foretold while the experts of this one come, if it is
        of use; else None. most: as of `parts`."""

    def foretell(self, layer: int, scores: Tensor, most: int, padding: Tensor | None) -> None:
        """Let an expert of a layer come early, by the scores that its router gives hidden states of the layer
        before, `[tokens, experts]`. To be called behind `parts` of that one, before its first table.

        most: experts that will be asked for, at most. padding: bool `[tokens]`, tokens that are nobody's.
        """

    def foretell_later(self, layer: int, chosen: Callable[[], Tensor]) -> None:
        """Let experts of a layer come early, where the host decides: those that `chosen` then returns.

        It is called when the experts of the layer before are on their way, so it delays none of these.
        chosen: returns the experts that each token will likely take, `[tokens, top_k]`, the likeliest first.
        """

    def waves(self, experts: Sequence[GroupId]) -> Iterator[tuple[Sequence[GroupId], Tensor]]:
        """Yield these experts of one layer in waves: some of them, and a table as `table` has it, with 0 for
        all others.

        Work with a wave is queued before the next wave is asked for, which ends the loan. Raises
        CheckpointError.
        """

    def waves_of_views(self, experts: Sequence[GroupId]) -> Iterator[Mapping[GroupId, GroupViews]]:
        """Yield these experts of one layer in waves, as views of some of them; asking for the next ends the
        loan. Raises CheckpointError."""

    def each(self, experts: Sequence[GroupId]) -> Iterator[tuple[GroupId, GroupViews]]:
        """Yield these experts of one layer in their order, one at a time; asking for the next ends the loan.
        Raises CheckpointError."""


class Routing(Protocol):
    """Watches or replaces what the routers of mixtures say, for measurements."""

    def scores(self, layer: int, router: GroupViews, x: Tensor, scores: Tensor) -> Tensor:
        """Return the scores to choose experts by, `[tokens, experts]`: these ones, or others.

        router: the views of the layer's router, norm included. x: its input, normalised, `[tokens, hidden]`.
        Called once for each mixture of a pass, in the order of layers. The host may not wait where steps are
        recorded.
        """

    def foretold(self, layer: int, scores: Tensor) -> Tensor:
        """Return the scores to foretell an expert of a layer by, `[tokens, experts]`: these ones, which its
        router gives hidden states of the layer before, or others."""


class Taps(Protocol):
    """Takes hidden states of whole passes, for a draft head.

    before: the layers whose input is taken, ascending; the number of layers is behind the last.
    """

    @property
    def before(self) -> Sequence[int]:
        """Return the layers."""

    def see(self, layer: int, hidden: Callable[[], Tensor], slots: Tensor) -> None:
        """Take the hidden states before a layer, if it is one of these. Called for every layer of a pass, and
        once behind the last.

        hidden: returns a copy of them, `[tokens, hidden]`. slots: each token's place in pages, int64
            `[tokens]`, or -1.
        """


class Collectives(Protocol):
    """Exchanges rows between the ranks of a model in a pass, on the compute stream. All call the same in the
    same order, with as many rows.

    Each gets the same bits as the others: from what it was sent a rank also decides, as which experts to
    compute.
    """

    def all_reduce(self, x: Tensor) -> None:
        """Put the sum over all ranks in the place of `x`, contiguous, added up in its dtype or a wider
        one."""

    def all_reduce_few(self, x: Tensor) -> None:
        """Put the sum over all ranks in the place of `x` `[rows, width]`, contiguous: a few numbers a row, of
        any dtype."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of `x` over all ranks to `residual` in place, both `[rows, hidden]`, and return the
        norm of that, as `norm.add_rms_norm`. `x` then holds anything."""

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' `[rows, width]` beside each other in the order of ranks; widths may differ."""


class ColdCache(Tiles, Protocol):
    """Holds KV beyond the device: lends each layer's tiles, and takes what is to rest there."""

    def send(self, layer: int, planes: Sequence[Tensor]) -> None:
        """Take the step's planes of a layer, `[tokens, heads, width]`, before it attends."""


LayerCaches = Sequence[tuple[Tensor, ...]]
"""The planes of every layer, each a strided view `[blocks, block_size, heads, width]`, and behind them its
arrays of state, each a strided view `[rows, *shape]`."""
