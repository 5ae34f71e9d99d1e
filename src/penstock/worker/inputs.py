"""Turns a Plan into the tensors of a model's step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.arch.mixers.head import HeadAttention
from penstock.arch.spec import ModelSpec, RopeKind
from penstock.kv.movement.carrier import Send
from penstock.kv.movement.chosen import Reader
from penstock.kv.movement.tiles import Tile
from penstock.memory.sending import send
from penstock.models.inputs import DraftingInputs, StateInputs, StateRun, StepInputs
from penstock.ops.attention.attend import reads_pages
from penstock.ops.attention.gathered import PAST_TILE
from penstock.ops.attention.inputs import (
    AttentionInputs,
    ColdInputs,
    ColdTile,
    LaterGroups,
    QueryRun,
    RowGroup,
    Rows,
    RunBatch,
    Scratch,
)
from penstock.ops.rope import RotaryAngles
from penstock.step.plan import UNKNOWN, HostBlockId, Plan, Share, ShareKind
from penstock.worker.tables import BlockTables
from penstock.worker.tensors import Moves, StepTensors
from penstock.worker.tiling import Stretch, Table, batches, in_one, stretches
from penstock.worker.trees import run_tree

Ints = NDArray[np.int64]

_PADDING = 1.3
"""Largest ratio of a group's longest row to its shortest, since rows are padded to the longest."""

ROW_KEYS = PAST_TILE // 2
"""Most keys that a group of rows gathers, padding included. It bounds the scratch memory."""


class InputBuilder:
    """Makes the tensors of a model's steps.

    tables: the blocks of each row, which other models of the runner may read too.
    tile_tokens: of host memory's KV that is attended to at a time, whole blocks.
    choosing: whether policies choose what of it rows read, and runs.
    scratch: memory that steps on a device without a paged kernel gather in; None for some of its own.
    """

    def __init__(
        self, spec: ModelSpec, device: torch.device, tables: BlockTables, *, block_size: int,
        tile_tokens: int = PAST_TILE, choosing: tuple[bool, bool] = (False, False),
        scratch: Scratch | None = None,
    ) -> None:  # fmt: skip
        self._device = device
        self._block_size = block_size
        self._angles = RotaryAngles(spec.rope, device)
        self._dynamic = spec.rope.kind is RopeKind.DYNAMIC
        self._windows = tuple(dict.fromkeys(spec.windows))
        self._has_state, self._reads_pages = spec.has_state, reads_pages(device)
        self._is_head = isinstance(spec.stack[0].mixer, HeadAttention)
        self.tables = tables
        self._table, self._cold = tables.pages, tables.cold
        self._tile_blocks = max(tile_tokens // block_size, 1)
        self._choosing = choosing
        self.scratch = scratch or Scratch()
        self._tiling: tuple[object, _Tiling] | None = None
        """The tiles of the last step, and the shares that they are for.

        They stay valid until blocks change.
        """

    def build(self, plan: Plan, newest: Tensor) -> StepTensors:
        """Return the tensors of a step.

        newest: each row's newest token, int64 `[rows]`, for tokens that are UNKNOWN to the plan.
        """
        self.tables.note(plan)
        self.tables.note_on_device(plan)
        shares = plan.shares
        if not plan.runs and all(map(_plain, shares)):
            return self._plain_rows(shares, newest)
        counts = np.array([len(share.tokens) for share in shares], dtype=np.int64)
        starts = np.array([share.start for share in shares], dtype=np.int64)
        first = np.cumsum(counts) - counts
        total = int(counts.sum())
        places = np.arange(total) - np.repeat(first - starts, counts)
        positions = _positions(places, shares, first)
        blocks = self._table[
            np.repeat([share.row for share in shares], counts), places // self._block_size
        ].astype(np.int64)
        offsets = places % self._block_size
        wanted = [
            place
            for at, count, share in zip(first, counts, shares, strict=True)
            for place in range(int(at + count) - share.draws, int(at + count))
        ]
        samples = len(wanted)
        for at, share in zip(first, shares, strict=True):
            wanted.extend(range(int(at), int(at) + len(share.next_prompt_tokens)))
        # What goes to host blocks alone has no place in pages.
        is_cold = places < np.repeat([share.near for share in shares], counts)
        slots = np.where(is_cold, -1, blocks * self._block_size + offsets)
        sends = tuple(self._sends(shares, first))
        tiling = self._tile(shares)
        choosing = [index for index, share in enumerate(shares) if share.cold_start and self._chooses(share)]
        readers = tuple(
            Reader(
                self._cold_table(shares[at]).copy(), shares[at].start, shares[at].kind is not ShareKind.DECODE
            )
            for at in choosing
        )
        singles = shares[: len(shares) - len(plan.runs)]
        assert all(share.kind is ShareKind.DECODE for share in singles), "a plan's decode shares come first"
        where = self._send(positions)
        cos, sin = self._angles.tables(where, self._rope_lengths(shares) if self._dynamic else None)
        cold = None
        if tiling.tiles or sends or readers:
            paged = self._send(np.flatnonzero(~is_cold)) if sends else None
            cold = ColdInputs(
                tiling.cold,
                tuple(share.start for share in singles),
                paged,
                self._seen(tiling, shares),
                tuple(index for index in choosing if index < len(singles)),
                tuple(index - len(singles) for index in choosing if index >= len(singles)),
            )
            blocks, offsets = blocks[~is_cold], offsets[~is_cold]
        attention = AttentionInputs(
            blocks=self._send(blocks),
            offsets=self._send(offsets),
            slots=self._send(slots),
            rows=self._rows(singles),
            runs=(runs := self._runs(shares, first)),
            cold=cold,
            batches=tuple(self._batches(runs, shares[len(singles) :])) if self._reads_pages else (),
        )
        tokens = np.fromiter(
            chain.from_iterable(share.tokens for share in shares), dtype=np.int64, count=total
        )
        reported = tuple(len(share.next_prompt_tokens) for share in shares)
        verifies = shares[-1].kind is ShareKind.VERIFY
        last = None if cold or any(reported) or verifies or 2 * samples > total else self._last(shares)
        inputs = StepInputs(
            self._tokens(tokens, shares, first, newest),
            cos,
            sin,
            attention,
            self._send(np.array(wanted, dtype=np.int64)),
            last,
            self._state(shares, first, len(singles)) if self._has_state else None,
            drafting=self._drafting(shares) if self._is_head else None,
        )
        return StepTensors(inputs, samples, reported, Moves(cold, tiling.tiles, sends, readers))

    def _plain_rows(self, shares: Sequence[Share], newest: Tensor) -> StepTensors:
        """Return the tensors of a step of rows that each see nothing but pages, and of which each samples.

        There are too few numbers for arrays to pay.
        """
        size, rows = self._block_size, [share.row for share in shares]
        positions = [share.start for share in shares]
        longest = max(positions) + 1
        table = self._table[rows, : -(-longest // size)]
        blocks = [table.item(row, position // size) for row, position in enumerate(positions)]
        slots = [block * size + position % size for block, position in zip(blocks, positions, strict=True)]
        offsets, tokens = [slot % size for slot in slots], [share.tokens[0] for share in shares]
        sent = self._send(np.array([positions, blocks, offsets, slots, tokens], dtype=np.int64))
        where, in_blocks, at_offsets, in_slots, known = sent.unbind(0)
        if UNKNOWN in tokens:
            known = torch.where(known == UNKNOWN, newest[self._send(np.array(rows, dtype=np.int64))], known)
        cos, sin = (
            self._angles.of_one(positions[0])
            if len(rows) == 1 and not self._dynamic
            else self._angles.tables(where, self._rope_lengths(shares) if self._dynamic else None)
        )
        lengths = np.array([position + 1 for position in positions], dtype=np.int32)
        attending = self._rows_of(table, lengths, longest)
        inputs = StepInputs(
            known,
            cos,
            sin,
            AttentionInputs(in_blocks, at_offsets, in_slots, attending, ()),
            None,
            state=self._state(shares, np.arange(len(rows)), len(rows)) if self._has_state else None,
            drafting=self._drafting(shares) if self._is_head else None,
        )
        return StepTensors(inputs, len(rows), (0,) * len(rows))

    @property
    def angles(self) -> RotaryAngles:
        """Return the rotary angles of the model."""
        return self._angles

    def _tokens(self, tokens: Ints, shares: Sequence[Share], first: Ints, newest: Tensor) -> Tensor:
        sent = self._send(tokens)
        unknown = [index for index, share in enumerate(shares) if share.tokens[-1] == UNKNOWN]
        if unknown:
            rows = np.array([shares[index].row for index in unknown], dtype=np.int64)
            sent[self._send(first[unknown])] = newest[self._send(rows)]
        return sent

    def _state(self, shares: Sequence[Share], first: Ints, singles: int) -> StateInputs:
        """A sequence's state is in its row."""
        assert all(share.kind is not ShareKind.VERIFY for share in shares), (
            "a draft for a model with state: what is rejected of it could not be taken back"
        )
        runs = tuple(
            StateRun(int(at), len(share.tokens), share.row)
            for at, share in zip(first[singles:], shares[singles:], strict=True)
        )
        return StateInputs(
            self._send(np.array([share.row for share in shares[:singles]], dtype=np.int64)), runs
        )

    def _drafting(self, shares: Sequence[Share]) -> DraftingInputs:
        rows = np.array([share.row for share in shares for _ in range(share.draws)], dtype=np.int64)
        return DraftingInputs(self._send(rows), UNKNOWN in shares[0].tokens)

    def _chooses(self, share: Share) -> bool:
        return self._choosing[share.kind is not ShareKind.DECODE]

    def _cold_table(self, share: Share) -> Table:
        return self._cold[share.row, : share.cold_start // self._block_size]

    def moves_of_rows(self, shares: Sequence[Share]) -> tuple[ColdInputs, Moves]:
        """Return what rows of a recorded step attend to beyond the pages, and what moves for that."""
        tiling, positions = self._tile(shares), tuple(share.start for share in shares)
        cold = ColdInputs(tiling.cold, positions, seen=self._seen(tiling, shares))
        return cold, Moves(cold, tiling.tiles)

    def _sends(self, shares: Sequence[Share], first: Ints) -> Iterator[Send]:
        for at, share in zip(first, shares, strict=True):
            if share.cold_stop > share.start:
                blocks = self._cold[
                    share.row, share.start // self._block_size : share.cold_stop // self._block_size
                ]
                yield Send(int(at), tuple(HostBlockId(block) for block in blocks.tolist()))

    def _tile(self, shares: Sequence[Share]) -> "_Tiling":
        kept = (
            self.tables.cold_changes,
            tuple((share.row, share.cold_start, share.kind) for share in shares),
        )
        if self._tiling is None or self._tiling[0] != kept:
            tables: list[Table] = [
                self._cold_table(share)[: 0 if self._chooses(share) else None] for share in shares
            ]
            self._tiling = kept, self._tiling_of(stretches(tables, self._tile_blocks), shares)
        return self._tiling[1]

    def _tiling_of(self, found: Sequence[Stretch], shares: Sequence[Share]) -> "_Tiling":
        singles = sum(share.kind is ShareKind.DECODE for share in shares)
        rows = [[member for member in stretch.members if member < singles] for stretch in found]
        index = torch.split(
            self._send(np.array([row for some in rows for row in some], dtype=np.int64)),
            [len(some) for some in rows],
        )
        tiles, cold = [], []
        for stretch, some, at in zip(found, rows, index, strict=True):
            keys = len(stretch.blocks) * self._block_size
            runs = tuple(member - singles for member in stretch.members if member >= singles)
            cold.append(ColdTile(stretch.first * self._block_size, keys, tuple(some), at, runs))
            tiles.append(Tile(tuple(HostBlockId(block) for block in stretch.blocks.tolist()), keys))
        return _Tiling(tuple(tiles), tuple(cold), tuple(stretch.members for stretch in found))

    def _seen(self, tiling: "_Tiling", shares: Sequence[Share]) -> dict[int | None, tuple[int, ...]]:
        """Return the tiles that a layer with each window sees.

        A tile before its first query's window is hidden.
        """
        oldest = [min(shares[member].start for member in members) for members in tiling.members]
        return {
            window: tuple(
                index
                for index, (tile, start) in enumerate(zip(tiling.cold, oldest, strict=True))
                if tile.start + tile.keys > start - window + 1
            )
            for window in self._windows
            if window is not None
        }

    def _send(self, values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        return send(values, self._device)

    def _rope_lengths(self, shares: Sequence[Share]) -> list[int]:
        """Return the sequence length of each token that dynamic RoPE uses.

        It is the prompt's length for a prompt's tokens, and the position's for later ones.
        """
        return [max(share.prompt_length, position + 1) for share in shares for position in share.positions]

    def _last(self, shares: Sequence[Share]) -> AttentionInputs:
        """Return the newest token of each sampling share as a row.

        It must be in pages. Nothing is written.
        """
        nowhere = self._send(np.empty(0, dtype=np.int64))
        return AttentionInputs(
            nowhere, nowhere, nowhere, self._rows([share for share in shares if share.sample]), ()
        )

    def _rows(self, shares: Sequence[Share]) -> Rows | None:
        """Return these shares as rows. Their other tokens are in pages, or before the tail."""
        if not shares:
            return None
        cold = np.array([share.cold_start for share in shares], dtype=np.int32)
        lengths = np.array([share.stop for share in shares], dtype=np.int32) - cold
        longest = int(lengths.max())
        # Of a long request the table begins where its tail does.
        columns = np.minimum(
            cold[:, None] // self._block_size + np.arange(-(-longest // self._block_size)),
            self._table.shape[1] - 1,
        )
        table = self._table[np.array([share.row for share in shares])[:, None], columns]
        return self._rows_of(table, lengths, longest, cold > 0)

    def _rows_of(
        self,
        table: NDArray[np.int32],
        lengths: NDArray[np.int32],
        longest: int,
        cold: NDArray[np.bool_] | None = None,
    ) -> Rows:
        """Return rows with these tables and lengths.

        cold: which of them also attend to tiles; None for none.
        """
        groups = () if self._reads_pages else LaterGroups(partial(self._groups, lengths, table, cold))
        return Rows(len(table), self._send(table), self._send(lengths), longest, groups, scratch=self.scratch)

    def _groups(
        self, lengths: NDArray[np.int32], table: NDArray[np.int32], cold: NDArray[np.bool_] | None
    ) -> list[RowGroup]:
        if cold is None:
            cold = np.zeros(len(lengths), dtype=np.bool_)
        order = np.lexsort((-lengths, ~cold))
        groups, begin = [], 0
        for end in range(1, len(order) + 1):
            longest = int(lengths[order[begin]])
            full = longest > PAST_TILE or cold[order[begin]] or (end - begin + 1) * longest > ROW_KEYS
            if end == len(order) or full or longest > _PADDING * lengths[order[end]] + self._block_size:
                groups.append(self._group(order[begin:end], lengths, table, bool(cold[order[begin]])))
                begin = end
        return groups

    def _group(
        self, rows: Ints, lengths: NDArray[np.int32], table: NDArray[np.int32], cold: bool
    ) -> RowGroup:
        keys = int(lengths[rows[0]])
        used = -(-keys // self._block_size)
        # Beyond a row's end its table holds blocks of other rows; what is read there is cleared and masked.
        blocks = self._send(table[rows, :used].astype(np.int64))
        lengths_here = torch.from_numpy(lengths[rows].astype(np.int64)).to(self._device)[:, None]
        masks: dict[int | None, Tensor | None] = {}
        shortest = int(lengths[rows[-1]])
        key = torch.arange(keys, device=self._device)
        for window in self._windows:
            if cold or keys > PAST_TILE or (shortest == keys and (window is None or window >= keys)):
                masks[window] = None
                continue
            seen = key < lengths_here
            if window is not None:
                seen &= key >= lengths_here - window
            masks[window] = seen[:, None, None]
        beyond = None if shortest == keys else key[shortest:] >= lengths_here
        return RowGroup(
            self._send(rows),
            blocks,
            keys,
            masks,
            shortest,
            None if beyond is None else beyond[:, :, None, None],
            cold,
        )

    def _runs(self, shares: Sequence[Share], first: Ints) -> tuple[QueryRun, ...]:
        size = self._block_size
        found = [pair for pair in zip(first, shares, strict=True) if pair[1].kind is not ShareKind.DECODE]
        if not found:
            return ()
        spans = [(share.cold_start, share.start) if share.near else (0, share.stop) for _, share in found]
        rows = [
            self._table[share.row, begin // size : -(-end // size)]
            for (_, share), (begin, end) in zip(found, spans, strict=True)
        ]
        flat, places = in_one(rows)
        sent = self._send(flat)
        return tuple(
            QueryRun(int(at), len(share.tokens), share.start, sent[place], not share.near, begin, tree)
            for (at, share), (begin, _), place in zip(found, spans, places, strict=True)
            for tree in [run_tree(share, self._windows, self._device)]
        )

    def _batches(self, runs: Sequence[QueryRun], shares: Sequence[Share]) -> Iterator[RunBatch]:
        for index in batches(runs):
            some, width = runs[index.start : index.stop], max(len(runs[at].blocks) for at in index)
            table = self._table[[shares[at].row for at in index], :width]
            yield RunBatch(some, index, self._send(table), self._send)


def _positions(places: Ints, shares: Sequence[Share], first: Ints) -> Ints:
    """Return the positions of a step's tokens, whose KV is at these places of their sequences."""
    trees = [(int(at), share) for at, share in zip(first, shares, strict=True) if share.parents]
    positions = places.copy() if trees else places
    for at, share in trees:
        positions[at : at + len(share.tokens)] = share.positions
    return positions


def _plain(share: Share) -> bool:
    """Tell whether a share of one token samples, reads and writes only pages, and reports no prompt."""
    return share.sample and not (share.near or share.cold_start or share.next_prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Holds a step's tiles, as they are moved and as they are attended to.

    members: indices of the shares that attend to each tile.
    """

    tiles: tuple[Tile, ...]
    cold: tuple[ColdTile, ...]
    members: tuple[tuple[int, ...], ...]
