"""Holds the attention metadata of a step: where its tokens are written, and what each query sees."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """LayerAttention says what a layer does with its scores, the same for every step.

    scale: factor of each score.
    window: tokens that a query sees, itself included; None is all of them.
    lse: whether the caller needs the log-sum-exp, as where other keys are merged to the output.
    cap: soft cap c of scaled scores s, which become c * tanh(s / c) before the softmax; None is no cap.
    sinks: `[heads]`, a score of each head that adds to the sum of its softmax and has no value; None is no
        such score. Parts of attention are merged without it. The log-sum-exp is always that of keys alone.
    """

    scale: float
    window: int | None = None
    lse: bool = False
    cap: float | None = None
    sinks: Tensor | None = None


class Scratch:
    """Scratch is memory into which one layer after the other gathers K and V, kept from step to step.

    Memory that is new to the process costs more to touch than to fill. Only one step at a time may use it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def of(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Lend an uninitialized tensor of this shape and of `like`'s dtype and device.

        It is the same memory as was last lent by that name, if that is large enough.
        """
        size = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size or kept.dtype != like.dtype or kept.device != like.device:
            kept = self._kept[name] = torch.empty(size * 5 // 4, dtype=like.dtype, device=like.device)
        return kept[:size].view(shape)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A RowGroup holds rows of similar length, padded to one, for devices without a paged kernel.

    A row longer than PAST_TILE is alone in its group, without masks.

    rows: int64 indices of the rows.
    blocks: int64 `[rows, blocks]`.
    keys: tokens that are gathered for each row.
    masks: by window, bool `[rows, 1, 1, keys]`, or None if none is needed.
    shortest: tokens of the shortest row.
    beyond: bool `[rows, keys - shortest, 1, 1]`, which keys from the shortest row's end on lie behind their
        row's end; or None.
    cold: whether this is one row, alone and without masks, that also attends to tiles. `keys` then counts its
        tail, perhaps 0.
    """

    rows: Tensor
    blocks: Tensor
    keys: int
    masks: Mapping[int | None, Tensor | None]
    shortest: int
    beyond: Tensor | None
    cold: bool = False


class LaterGroups(Sequence[RowGroup]):
    """LaterGroups are the groups of a step's rows, made when the first layer asks for them.

    Where a kernel reads pages for every layer, none does.
    """

    def __init__(self, make: Callable[[], Sequence[RowGroup]]) -> None:
        """Take what makes the groups. It is called at most once."""
        self._make = make

    @cached_property
    def _made(self) -> Sequence[RowGroup]:
        return self._make()

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> RowGroup: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RowGroup]: ...
    def __getitem__(self, index: int | slice) -> RowGroup | Sequence[RowGroup]:
        return self._made[index]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows are the first `count` queries of a step: each is the newest token of another sequence.

    For a row that also attends to tiles, table and length speak of its tail alone: the table begins with the
    tail's first block, and the length, which may be 0, counts the tail's tokens. A row of length 0 that
    attends to nothing answers 0, with a log-sum-exp of -inf.

    table: block table, int32 `[count, blocks]`.
    lengths: int32 `[count]`, the newest token included.
    max_length: bound of all lengths.
    groups: the rows for devices without a paged kernel.
    arrivals: int32 zeros, at least `[count * kv_heads]`, in which the paged kernel counts and leaves zeros.
        Without them it needs a second launch. One step at a time may use them.
    scratch: memory into which groups are gathered.
    """

    count: int
    table: Tensor
    lengths: Tensor
    max_length: int
    groups: Sequence[RowGroup] = ()
    arrivals: Tensor | None = None
    scratch: Scratch = field(default_factory=Scratch)


@dataclass(frozen=True, slots=True)
class RunTree:
    """A RunTree says what the tokens of a run see that are a tree: all before it, and of it those on their
    own line.

    begin: where the tree's keys begin, at most `start` of the run; and the position of its first token.
    depths: how many tokens each query is behind the first one: its position less `begin`.
    limits: the position behind each query, int32 `[queries]`.
    bits: by window, int64 `[queries]`: bit n says whether a query sees the n-th key of the tree.
    """

    begin: int
    depths: tuple[int, ...]
    limits: Tensor
    bits: Mapping[int | None, Tensor]

    def seen(self, window: int | None, keys: int) -> Tensor:
        """Return which of the tree's first keys each query sees, bool `[queries, keys]`."""
        bits = self.bits[window]
        return (bits[:, None] >> torch.arange(keys, device=bits.device) & 1).bool()


@dataclass(frozen=True, slots=True)
class QueryRun:
    """A QueryRun is a prefill chunk: queries [first, first + count) of a step, consecutive in one sequence.

    start: position of the first query.
    blocks: int64, the sequence's blocks.
    paged: whether all of its past is in pages. If not, only the positions from `near` on are, in these
        blocks. The run then sees these, the tiles that name it, and itself, by k and v, not by pages.
    near: position of the first token in `blocks`.
    tree: what its queries see, if they are a tree. `start` is then the place of the first one's key.
    """

    first: int
    count: int
    start: int
    blocks: Tensor
    paged: bool = True
    near: int = 0
    tree: RunTree | None = None

    @property
    def queries(self) -> slice:
        """Return which of the step's queries the run's are."""
        return slice(self.first, self.first + self.count)


class RunBatch:
    """A RunBatch holds short runs in pages, one behind the other, which a kernel attends to together.

    Launched one by one, many short prompts take the host longer than the device.

    runs: of them none is a tree.
    index: which of the step's runs they are.
    fresh: whether all of them begin their sequences.
    longest: tokens of the longest.
    """

    def __init__(
        self,
        runs: Sequence[QueryRun],
        index: range,
        table: Tensor,
        send: Callable[[NDArray[np.int32]], Tensor],
    ) -> None:
        """Take the runs, and a block table of them, int32 `[runs, blocks]`.

        send: has numbers come to the device.
        """
        self.runs, self.index, self.table, self._send = runs, index, table, send
        self.fresh = not any(run.start for run in runs)
        self.longest = max(run.count for run in runs)
        self._pieces: dict[int, Tensor] = {}

    @property
    def queries(self) -> slice:
        """Return which of the step's queries theirs are."""
        last = self.runs[-1]
        return slice(self.runs[0].first, last.first + last.count)

    @property
    def stop(self) -> int:
        """Return a bound of the positions at which they end."""
        return max(run.start + run.count for run in self.runs)

    @cached_property
    def ends(self) -> Tensor:
        """Return where each ends among the queries, behind a zero, int32 `[runs + 1]`."""
        counts = [run.count for run in self.runs]
        return self._send(np.cumsum([0, *counts]).astype(np.int32))

    def pieces(self, tokens: int) -> Tensor:
        """Return the runs in pieces of so many tokens, of which the last of each may have fewer.

        int32 `[4, pieces]`: the position behind a piece, its tokens, its first query among theirs, and its
        row of the table.
        """
        if tokens not in self._pieces:
            self._pieces[tokens] = self._send(_pieces(self.runs, tokens))
        return self._pieces[tokens]


def _pieces(runs: Sequence[QueryRun], tokens: int) -> NDArray[np.int32]:
    found = [
        (run.start + end, end - begin, run.first - runs[0].first + begin, row)
        for row, run in enumerate(runs)
        for begin in range(0, run.count, tokens)
        for end in (min(begin + tokens, run.count),)
    ]
    return np.array(found, dtype=np.int32).T.copy()


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """A PlacedRun is a run in pages that is all of its step; its place is read on the device.

    blocks: int32 `[blocks]`, the sequence's.
    where: int32 `[2]`, the position of the first token and the number of tokens. The step's other tokens are
        padding.
    max_length: bound of where the run ends.
    """

    blocks: Tensor
    where: Tensor
    max_length: int


@dataclass(frozen=True, slots=True)
class ColdTile:
    """A ColdTile is keys at positions [start, start + keys) of all sequences that share them.

    rows: indices of the step's rows that attend to it, ascending.
    index: the same as int64 on the device.
    runs: indices of the step's runs that attend to it. They are not paged and begin at or after its end.
    """

    start: int
    keys: int
    rows: tuple[int, ...]
    index: Tensor
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ColdInputs:
    """ColdInputs say which KV outside the pages a step attends to, the same for all layers.

    tiles: in the order in which layers take them.
    positions: position of each of the step's rows, whether it attends to tiles or not.
    paged: int64, which of the step's tokens have a place in pages; None if all do. The `blocks` and `offsets`
        of AttentionInputs are then those tokens' alone, while `slots` keeps one entry a token, -1 for others.
    seen: by window, the indices of the tiles that a layer with that window takes, ascending. A window that is
        not here takes all.
    choosing_rows: indices of rows that attend to what a policy chooses instead of to tiles; only without
        windows.
    choosing_runs: indices of such runs.
    """

    tiles: tuple[ColdTile, ...]
    positions: tuple[int, ...]
    paged: Tensor | None = None
    seen: Mapping[int | None, tuple[int, ...]] = field(default_factory=dict)
    choosing_rows: tuple[int, ...] = ()
    choosing_runs: tuple[int, ...] = ()

    def of(self, window: int | None) -> tuple[ColdTile, ...]:
        """Return the tiles that a layer with this window takes."""
        seen = self.seen.get(window)
        return self.tiles if seen is None else tuple(self.tiles[index] for index in seen)


class Tiles(Protocol):
    """Tiles lend a layer its tiles in the order of ColdInputs, to be read on the compute stream until
    `release`.

    K `[keys, kv_heads, dim]` and V have the same strides. There may be more keys than are valid.
    """

    def take(self) -> tuple[Tensor, ...]:
        """Lend the next tile."""

    def release(self) -> None:
        """Give the lent tile back."""

    def choose(
        self, reader: int, q: Tensor, lse: Tensor, layer: LayerAttention
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield the blocks that a policy chooses for these queries, tile after tile. Each is lent until the
        next one.

        reader: number of the reader: `choosing_rows` first, then `choosing_runs`.
        q: `[queries, heads, dim]`.
        lse: log-sum-exp of all that they have seen, float32 `[queries, heads]`. The caller keeps it up to
            date.
        """


@dataclass(frozen=True, slots=True)
class LaterTiles:
    """LaterTiles take what folds a layer's tiles into the rows of a step that is recorded: which tiles there
    are is known when it is replayed.

    fold: takes it, layer by layer.
    scratch: where queries and states of rows lie until that is done, the same for all layers.
    """

    fold: Callable[[Callable[[ColdInputs, Tiles], None]], None]
    scratch: Scratch


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """AttentionInputs say where a step's tokens are written and what they see.

    blocks, offsets: int64 `[tokens]`, block and offset in it of each token's KV.
    slots: the slot mapping, int64 `[tokens]`: block * block_size + offset.
    rows: sequences of one new token, if any.
    runs: chunks of sequences.
    cold: KV outside the pages, if the step reads any.
    placed: one run instead of rows and runs.
    batches: those of the runs that may be attended to together.
    later: takes what a recorded step does about KV outside the pages.
    """

    blocks: Tensor
    offsets: Tensor
    slots: Tensor
    rows: Rows | None
    runs: tuple[QueryRun, ...]
    cold: ColdInputs | None = None
    placed: PlacedRun | None = None
    batches: tuple[RunBatch, ...] = ()
    later: LaterTiles | None = None
