"""Turns a Plan into the tensors of a step. Keeps what the workers must remember of each row: its block table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.arch.spec import ModelSpec, RopeKind
from penstock.models.inputs import StepInputs
from penstock.ops.attention import PAST_TILE, AttentionInputs, RowGroup, Rows, Run, reads_pages
from penstock.ops.rope import RotaryAngles
from penstock.step.plan import Plan, Share

Ints = NDArray[np.int64]

_PADDING = 1.3
"""A group of rows is padded to its longest; a row that would be padded by more than this starts a new group."""

ROW_KEYS = 2 * PAST_TILE
"""Keys, padding included, that a group of rows gathers at most: what bounds its memory."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's inputs, and which of the wanted hidden states belong to whom: first one per sampling share, in order, then the prompt's."""

    inputs: StepInputs
    samples: int
    prompt_positions: tuple[int, ...]
    """For each share, how many of its positions report a prompt token's log-probability."""


class InputBuilder:
    """Owns the block tables; every row's is valid up to what the last Plan told."""

    def __init__(self, spec: ModelSpec, device: torch.device, *, rows: int, blocks_per_row: int, block_size: int) -> None:
        self._device = device
        self._block_size = block_size
        self._angles = RotaryAngles(spec.rope, device)
        self._dynamic = spec.rope.kind is RopeKind.DYNAMIC
        self._windows = tuple(dict.fromkeys(spec.windows))
        # Host pages that no row has reached yet are never touched, so a table for the longest context costs what is used.
        self._table = np.zeros((rows, blocks_per_row), dtype=np.int32)

    def build(self, plan: Plan) -> StepTensors:
        for share in plan.shares:
            self._table[share.row, share.first_new_block : share.first_new_block + len(share.new_blocks)] = share.new_blocks
        shares = plan.shares
        counts = np.array([len(share.tokens) for share in shares], dtype=np.int64)
        starts = np.array([share.start for share in shares], dtype=np.int64)
        first = np.cumsum(counts) - counts
        total = int(counts.sum())
        positions = np.arange(total) - np.repeat(first - starts, counts)
        blocks = self._table[np.repeat([share.row for share in shares], counts), positions // self._block_size].astype(np.int64)
        offsets = positions % self._block_size
        wanted = [int(at + count - 1) for at, count, share in zip(first, counts, shares, strict=True) if share.sample]
        samples = len(wanted)
        for at, share in zip(first, shares, strict=True):
            wanted.extend(range(int(at), int(at) + len(share.next_prompt_tokens)))
        where = self._send(positions)
        cos, sin = self._angles.tables(where, self._rope_lengths(shares) if self._dynamic else None)
        attention = AttentionInputs(
            blocks=self._send(blocks),
            offsets=self._send(offsets),
            slots=self._send(blocks * self._block_size + offsets),
            rows=self._rows(shares),
            runs=self._runs(shares, first),
        )
        tokens = np.fromiter((token for share in shares for token in share.tokens), dtype=np.int64, count=total)
        inputs = StepInputs(self._send(tokens), cos, sin, attention, self._send(np.array(wanted, dtype=np.int64)))
        return StepTensors(inputs, samples, tuple(len(share.next_prompt_tokens) for share in shares))

    def _send(self, values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _rope_lengths(self, shares: Sequence[Share]) -> list[int]:
        """Dynamic scaling makes a prompt's frequencies for the prompt's length, and each later token's for its own position's."""
        return [max(share.prompt_length, position + 1) for share in shares for position in range(share.start, share.stop)]

    def _rows(self, shares: Sequence[Share]) -> Rows | None:
        single = [share for share in shares if len(share.tokens) == 1]
        if not single:
            return None
        assert all(len(share.tokens) == 1 for share in shares[: len(single)]), "a plan's single-token shares come first"
        lengths = np.array([share.stop for share in single], dtype=np.int32)
        longest = int(lengths.max())
        table = self._table[[share.row for share in single], : -(-longest // self._block_size)]
        groups = () if reads_pages(self._device) else tuple(self._groups(lengths, table))
        return Rows(len(single), self._send(table), self._send(lengths), longest, groups)

    def _groups(self, lengths: NDArray[np.int32], table: NDArray[np.int32]) -> list[RowGroup]:
        order = np.argsort(-lengths, kind="stable")
        groups, begin = [], 0
        for end in range(1, len(order) + 1):
            longest = int(lengths[order[begin]])
            full = longest > PAST_TILE or (end - begin + 1) * longest > ROW_KEYS
            if end == len(order) or full or longest > _PADDING * lengths[order[end]] + self._block_size:
                groups.append(self._group(order[begin:end], lengths, table))
                begin = end
        return groups

    def _group(self, rows: Ints, lengths: NDArray[np.int32], table: NDArray[np.int32]) -> RowGroup:
        keys = int(lengths[rows[0]])
        used = -(-keys // self._block_size)
        # Beyond a row's end its table holds blocks of other rows; what is read there is cleared and masked.
        blocks = self._send(table[rows, :used].astype(np.int64))
        lengths_here = torch.from_numpy(lengths[rows].astype(np.int64)).to(self._device)[:, None]
        masks: dict[int | None, Tensor | None] = {}
        shortest = int(lengths[rows[-1]])
        key = torch.arange(keys, device=self._device)
        for window in self._windows:
            if keys > PAST_TILE or (shortest == keys and (window is None or window >= keys)):
                masks[window] = None
                continue
            seen = key < lengths_here
            if window is not None:
                seen &= key >= lengths_here - window
            masks[window] = seen[:, None, None]
        beyond = None if shortest == keys else key[shortest:] >= lengths_here
        return RowGroup(self._send(rows), blocks, keys, masks, shortest, None if beyond is None else beyond[:, :, None, None])

    def _runs(self, shares: Sequence[Share], first: Ints) -> tuple[Run, ...]:
        runs = []
        for at, share in zip(first, shares, strict=True):
            if len(share.tokens) > 1:
                blocks = self._send(self._table[share.row, : -(-share.stop // self._block_size)].astype(np.int64))
                runs.append(Run(int(at), len(share.tokens), share.start, blocks))
        return tuple(runs)
