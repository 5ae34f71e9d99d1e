"""Computes a step over inputs at fixed addresses, as it is recorded."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.arch.spec import DTYPE_BYTES
from penstock.kv.movement.pool import KVPool
from penstock.memory.sending import StagingTurns
from penstock.models.decoder import Decoder
from penstock.models.inputs import StateInputs, StepInputs, Weights
from penstock.ops.attention.inputs import (
    AttentionInputs,
    ColdInputs,
    LaterTiles,
    PlacedRun,
    Rows,
    Scratch,
    Tiles,
)
from penstock.ops.rope import RotaryAngles
from penstock.ops.runs import suits_run
from penstock.ops.steps import FIELDS, LEAST, Placed, likeliest, place
from penstock.step.plan import Share
from penstock.worker.adapters import RowAdapters
from penstock.worker.sizes import cold_counts, mixed_counts, row_counts, run_counts

_COUNTERS = 1024
"""Most tiles of a product that programs may share."""
_WHERE = 4
"""Numbers of a step's inputs before those of its rows: a run's first position and its tokens, and padding."""


class DecodeStep:
    """Computes a step over inputs at fixed addresses: decode rows, or the tokens of a run.

    rows, tokens: the most that there may be.
    """

    def __init__(
        self,
        decoder: Decoder,
        angles: RotaryAngles,
        pool: KVPool,
        table: Tensor,
        newest: Tensor,
        *,
        rows: int,
        tokens: int,
        max_length: int,
    ) -> None:
        """Allocate inputs and outputs.

        table: int32 `[rows + 1, blocks]`, the pages of each row. The last row is for padding.
        newest: int64 `[rows + 1]`, each row's newest token.
        rows, tokens: the most that a step may have.
        """
        self.adapters: RowAdapters | None = None
        """Of its rows, if these may have any."""
        self._decoder, self._angles, self._pool, self._table, self._newest = (
            decoder,
            angles,
            pool,
            table,
            newest,
        )
        self._max_length, self.spec, self._rows = max_length, decoder.spec, rows
        self.mixed = mixed_counts(decoder.spec, pool.layout.dtype, tokens, table.shape[1])
        """Numbers of tokens of steps of rows and short runs, the largest first."""
        most = max(rows, *self.mixed, 0)
        self._nobody = len(table) - 1
        device = table.device
        size = _WHERE + FIELDS * max(most, *run_counts(decoder.spec, tokens), 0) + 2 * rows
        self._given = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = StagingTurns(size, device)
        self._arrivals = torch.zeros(
            most * max(plane.heads for layer in set(pool.layout.planes) for plane in layer),
            dtype=torch.int32,
            device=device,
        )
        self._scratch = Scratch()
        self.counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        self._best = torch.full((rows,), LEAST, dtype=torch.int64, device=device)
        self.logits = torch.zeros(
            rows, decoder.spec.vocab_size, dtype=getattr(torch, pool.layout.dtype), device=device
        )
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    def give(self, shares: Sequence[Share], count: int) -> None:
        """Send the inputs of a step of `count` rows. Each share may have one new page at most; where any has
        several tokens, all new pages must be in the table."""
        staging = self._staging.lend(_WHERE + FIELDS * count)
        self._fill(staging, shares, count)
        self._staging.read_into(self._given[: len(staging)])

    def give_mixed(self, shares: Sequence[Share], count: int) -> None:
        """Send the inputs of a step of rows and runs, of `count` tokens, each of which is a row. All new
        pages must be in the table."""
        staging = self._staging.lend(_WHERE + FIELDS * count + 2 * self._drawn(count))
        self._fill(staging, shares, count)
        wanted, rows = staging.numpy()[_WHERE + FIELDS * count :].reshape(2, -1)
        used = len(shares)
        wanted[:used] = np.cumsum([len(share.tokens) for share in shares]) - 1
        rows[:used] = [share.row for share in shares]
        wanted[used:], rows[used:] = 0, self._nobody
        self._staging.read_into(self._given[: len(staging)])

    def _fill(self, staging: Tensor, shares: Sequence[Share], count: int) -> None:
        fields = _fields(staging, count)
        used = sum([len(share.tokens) for share in shares])
        fields[0, :used] = [share.row for share in shares for _ in share.tokens]
        fields[1, :used] = [at for share in shares for at, _ in enumerate(share.tokens, share.start)]
        fields[2, :used] = [token for share in shares for token in share.tokens]
        fields[:3, used:] = [[self._nobody], [-1], [0]]
        fields[3:] = [[self._nobody], [0], [0], [0]]
        size = self._pool.layout.block_size
        for index, share in enumerate(shares):
            if share.new_blocks:
                fields[3:6, index] = share.row, share.first_new_block, share.new_blocks[0]
            if share.cold_start:  # Of one token, as all others are then.
                fields[6, index] = share.cold_start // size

    def give_run(self, share: Share | None, count: int) -> None:
        """Send the inputs of a run of `count` tokens.

        Its new pages must be in the table. None is all padding.
        """
        staging = self._staging.lend(_WHERE + FIELDS * count)
        fields, used = _fields(staging, count), len(share.tokens) if share else 0
        staging.numpy()[:_WHERE] = share.start if share else 0, used, 0, 0
        if share:
            fields[0, :used] = share.row
            fields[1, :used] = np.arange(share.start, share.stop)
            fields[2, :used] = share.tokens
        fields[:3, used:] = [[self._nobody], [-1], [0]]
        fields[3:] = [[self._nobody], [0], [0], [0]]
        self._staging.read_into(self._given[: len(staging)])

    def suits(self, share: Share) -> bool:
        """Tell whether a run is attended to in pages. The answer is the same on all ranks."""
        spec = self.spec
        head_bytes = spec.head_dim * DTYPE_BYTES[self._pool.layout.dtype]
        return suits_run(len(share.tokens), share.stop, spec.heads // spec.kv_heads, head_bytes)

    def compute(
        self,
        count: int,
        weights: Weights,
        *,
        adapted: bool = False,
        later: Callable[[Callable[[ColdInputs, Tiles], None]], None] | None = None,
    ) -> None:
        """Compute the step of `count` rows: their logits and likeliest tokens, which become their newest.

        adapted: whether rows may have adapters. later: takes what folds tiles, where rows may have KV beyond
            the device.
        """
        given, placed = self._place(count)
        rows = Rows(count, placed.table, placed.lengths, self._max_length, (), self._arrivals)
        tiles = None if later is None else LaterTiles(later, self._scratch)
        attention = AttentionInputs(placed.blocks, placed.offsets, placed.slots, rows, (), later=tiles)
        state = StateInputs(given[0].long(), ()) if self._pool.state is not None else None
        padding = given[0] == self._nobody if self.spec.moe is not None else None
        lora = self.adapters.of_rows(given[0]) if adapted and self.adapters else None
        inputs = StepInputs(
            placed.tokens, placed.cos, placed.sin, attention, None, state=state, padding=padding, lora=lora
        )
        self._finish(self._decoder.forward(weights, self._pool.layers, inputs), given[0], weights)

    def computations(self, rows: int, tokens: int, *, cold: bool = False) -> list[Callable[[Weights], None]]:
        """Return what would be recorded, without adapters. rows, tokens: as for the step. cold: whether rows
        may have KV beyond the device."""
        found: list[Callable[[Weights], None]] = [partial(self.compute, count) for count in row_counts(rows)]
        nothing: Callable[[object], None] = lambda fold: None  # noqa: E731
        found += [partial(self.compute, count, later=nothing) for count in cold_counts(rows) if cold]
        found += [partial(self.compute_run, count) for count in run_counts(self.spec, tokens)]
        return found + [partial(self.compute_mixed, count) for count in self.mixed]

    def _drawn(self, count: int) -> int:
        """Return the most that may be drawn in a step of rows and runs."""
        return min(self._rows, count)

    def compute_mixed(self, count: int, weights: Weights) -> None:
        """Compute the step of rows and runs of `count` tokens: logits and likeliest tokens behind the last
        token of each share, which become the newest of its row."""
        _, placed = self._place(count)
        begin = _WHERE + FIELDS * count
        wanted, of = self._given[begin : begin + 2 * self._drawn(count)].view(2, -1)
        rows = Rows(count, placed.table, placed.lengths, self._max_length, (), self._arrivals)
        attention = AttentionInputs(placed.blocks, placed.offsets, placed.slots, rows, ())
        inputs = StepInputs(placed.tokens, placed.cos, placed.sin, attention, wanted.long())
        self._finish(self._decoder.forward(weights, self._pool.layers, inputs), of, weights)

    def compute_run(self, count: int, weights: Weights, *, adapted: bool = False) -> None:
        """Compute the run of `count` tokens: its last one's logits and likeliest token, in the first row."""
        given, placed = self._place(count)
        where, pages = (
            self._given[:2],
            self._table.index_select(0, given[0, :1])[0],
        )  # Those of `placed` end where each token does.
        run = PlacedRun(pages, where, self._max_length)
        attention = AttentionInputs(placed.blocks, placed.offsets, placed.slots, None, (), placed=run)
        last = (where[1:] - 1).clamp(min=0).long()
        newest = Rows(1, pages.unsqueeze(0), where.sum(0, keepdim=True, dtype=torch.int32), self._max_length)
        inputs = StepInputs(
            placed.tokens,
            placed.cos,
            placed.sin,
            attention,
            last,
            replace(attention, rows=newest, placed=None),
            lora=self.adapters.of_run(given[0]) if adapted and self.adapters else None,
        )
        self._finish(self._decoder.forward(weights, self._pool.layers, inputs), given[0, :1], weights)

    def _place(self, count: int) -> tuple[Tensor, Placed]:
        given = self._given[_WHERE : _WHERE + FIELDS * count].view(FIELDS, count)
        return given, place(given, self._table, self._newest, self._angles, self._pool.layout.block_size)

    def _finish(self, hidden: Tensor, rows: Tensor, weights: Weights) -> None:
        count = len(hidden)
        logits = self.logits[:count]
        with self._decoder.head(weights, hidden) as logits_of:
            logits_of(slice(count), logits)
        likeliest(logits, rows, self._newest, self.tokens[:count], self._best)


def _fields(staging: Tensor, count: int) -> NDArray[np.int32]:
    """Return a view of the fields of so many rows."""
    return staging.numpy()[_WHERE : _WHERE + FIELDS * count].reshape(FIELDS, count)
