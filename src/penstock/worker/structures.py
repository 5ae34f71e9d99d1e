"""Masks the logits of rows with structured output (guided decoding). Masks are made on the host.

A mask needs the row's newest token, which may still be computed. It is waited for here, when the forward pass
behind it has been launched. So the device computes meanwhile, and the other rows of the step lose no time.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.memory.sending import send
from penstock.step.params import Sampling
from penstock.step.plan import Admission, Row
from penstock.step.tree import walk

_ROWS = 16
"""Rows that are masked at a time. That takes their logits once more, and two bytes for each."""


Held = Mapping[int, tuple[Row, Sequence[int], Sequence[int]]]
"""Rows with a structure, and the draft that each verifies, with its tokens' parents if it is a tree, by the
place of their first draw."""


class Guide(Protocol):
    """Keeps the structures of all rows, and how far each row has come. It raises nothing.

    A row that can no longer follow its structure may only end.
    """

    def begin(self, row: Row, sampling: Sampling) -> None:
        """Begin an output in this row, without tokens."""
        ...

    def end(self, row: Row) -> None:
        """Forget the output in this row."""
        ...

    def take(self, row: Row, tokens: Sequence[int]) -> None:
        """Append these tokens to the row's output."""
        ...

    def masks(
        self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> tuple[NDArray[np.int32], frozenset[int]]:
        """Return which tokens may be next, and which of the masks are of rows that have broken off, by index.

        In masks `[masks, words]` token t is bit t % 32 of word t // 32. A row has a mask for its next token,
        and one behind each token of its draft. Each has at least one token. A row that has broken off may
        only end, and its output is not what it should be. parents: of drafts that are trees, those of each
        token.
        """
        ...


class Arriving(Protocol):
    """Holds the tokens of a step, one for each share, while they are copied to the host.

    wrong: shares without a token, once they have been read.
    """

    wrong: frozenset[int]

    def read(self) -> list[int]:
        """Wait for the tokens."""
        ...


@dataclass(slots=True)
class _Line:
    """Holds the output of one row.

    untaken: tokens that the guide does not have yet.
    newest: the tokens of the step that drew its newest one, the index of that, and the draft that it
        verified, of which more may have been accepted, with its tokens' parents.
    """

    sampling: Sampling
    untaken: Sequence[int]
    begun: bool = False
    newest: tuple[Arriving, int, Sequence[int], Sequence[int]] | None = None


class Masks:
    """Masks the rows with a structured output."""

    def __init__(self, guide: Guide, device: torch.device) -> None:
        self._guide, self._device = guide, device
        self._lines: dict[Row, _Line] = {}

    def admit(self, admission: Admission) -> None:
        """Store the settings of a new request. Its structure is begun later, while a pass is under way."""
        before = self._lines.pop(admission.row, None)
        if before is not None and before.begun:
            self._guide.end(admission.row)
        if admission.sampling.structure is not None:
            self._lines[admission.row] = _Line(admission.sampling, admission.output)

    def drawn(self, held: Held, tokens: Arriving) -> None:
        """Note the tokens that a step has drawn for these rows. They may still be on their way."""
        for first, (row, draft, parents) in held.items():
            self._lines[row].newest = tokens, first, draft, parents

    def put(self, logits: Tensor, held: Held) -> frozenset[int]:
        """Mask logits float32 `[draws, vocab]`, in place. Return the draws that break off.

        Tokens that a structure does not allow become impossible. If all allowed ones were impossible before,
        they become equally likely.
        """
        draws = [first + at for first, (_, draft, _) in held.items() for at in range(1 + len(draft))]
        masks, broken = self._next(held.values())
        for start in range(0, len(draws), _ROWS):
            some = send(np.array(draws[start : start + _ROWS]), self._device)
            allowed = _bits(send(masks[start : start + _ROWS], self._device), logits.shape[1])
            part = logits[some].masked_fill_(~allowed, -torch.inf)
            nothing = part.amax(-1, keepdim=True) == -torch.inf
            logits[some] = part.masked_fill_(allowed & nothing, 0.0)
        return frozenset(draws[place] for place in broken)

    def _next(
        self, held: Collection[tuple[Row, Sequence[int], Sequence[int]]]
    ) -> tuple[NDArray[np.int32], frozenset[int]]:
        for row, *_ in held:
            line = self._lines[row]
            if not line.begun:
                self._guide.begin(row, line.sampling)
                line.begun = True
            if line.newest is not None:
                tokens, first, draft, parents = line.newest
                said = tokens.read()[first : first + 1 + len(draft)]
                nodes = walk(said, draft, parents)
                last = next((at for at, node in enumerate(nodes) if first + node in tokens.wrong), len(nodes))
                line.untaken, line.newest = (*line.untaken, *[said[node] for node in nodes[:last]]), None
            self._guide.take(row, line.untaken)
            line.untaken = ()
        rows, drafts, parents = zip(*held, strict=True)
        return self._guide.masks(rows, drafts, parents)


def _bits(masks: Tensor, count: int) -> Tensor:
    """Return the first `count` bits of each row of words, bool `[rows, count]`."""
    parts = masks.view(torch.uint8)  # Little-endian: the first byte of a word has its first bits.
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    return ((parts[..., None] >> shifts) & 1).view(torch.bool).flatten(1)[:, :count]
