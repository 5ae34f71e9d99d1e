"""What rows with a structure may say next: masks made on the host, put on logits where these are.

A mask needs the row's newest token, which may be under way. It is waited for here, where the forward pass
behind it has been launched: the device computes meanwhile, and the others in the step lose nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.memory.device import send
from penstock.step.params import Sampling
from penstock.step.plan import Admission, Row

_ROWS = 16
"""Rows that are masked at a time: that takes their logits once more, and two bytes for each."""


class Guide(Protocol):
    """The keeper of structures, who knows how far each row has come in its own. It raises nothing: what
    cannot be followed any further may only end."""

    def begin(self, row: Row, sampling: Sampling) -> None:
        """Begin an output in this row, without tokens so far."""
        ...

    def end(self, row: Row) -> None:
        """Forget the output in this row."""
        ...

    def take(self, row: Row, tokens: Sequence[int]) -> None:
        """Note that these tokens have been said."""
        ...

    def masks(self, rows: Sequence[Row]) -> tuple[NDArray[np.int32], frozenset[int]]:
        """Return which tokens may be next: token t is bit t % 32 of word t // 32, `[rows, words]`, at least
        one for each row. And which of the rows, by their place, have broken off: these may only end, and are
        not what they should be."""
        ...


class Arriving(Protocol):
    """The tokens of a step, one for each share, on their way to the host. wrong: shares that have none, known
    when they have been read."""

    wrong: frozenset[int]

    def read(self) -> list[int]:
        """Wait for the tokens."""
        ...


@dataclass(slots=True)
class _Line:
    """What one row has said."""

    sampling: Sampling
    untaken: Sequence[int]
    """The tokens that are known here and not to the guide."""
    begun: bool = False
    newest: tuple[Arriving, int] | None = None
    """Of the step that drew its newest token: all tokens, and which is its own."""


class Masks:
    """The masks of the rows whose output has a structure."""

    def __init__(self, guide: Guide, device: torch.device) -> None:
        self._guide, self._device = guide, device
        self._lines: dict[Row, _Line] = {}

    def admit(self, admission: Admission) -> None:
        """Remember a newcomer. Nothing is made of a structure before the row is to say something: then a pass
        is under way."""
        before = self._lines.pop(admission.row, None)
        if before is not None and before.begun:
            self._guide.end(admission.row)
        if admission.sampling.structure is not None:
            self._lines[admission.row] = _Line(admission.sampling, admission.output)

    def drawn(self, rows: dict[int, Row], tokens: Arriving) -> None:
        """Note what a step has drawn for the rows, by their shares. It may be on its way."""
        for share, row in rows.items():
            self._lines[row].newest = tokens, share

    def put(self, logits: Tensor, rows: dict[int, Row]) -> frozenset[int]:
        """Mask logits float32 `[shares, vocab]`, in place. rows: those with a structure, by their shares.
        Return the shares that break off.

        What a structure does not allow becomes impossible. If all else was impossible before, what it allows
        is equally likely.
        """
        shares = list(rows)
        masks, broken = self._next(list(rows.values()))
        for start in range(0, len(shares), _ROWS):
            some = send(np.array(shares[start : start + _ROWS]), self._device)
            allowed = _bits(send(masks[start : start + _ROWS], self._device), logits.shape[1])
            part = logits[some].masked_fill_(~allowed, -torch.inf)
            nothing = part.amax(-1, keepdim=True) == -torch.inf
            logits[some] = part.masked_fill_(allowed & nothing, 0.0)
        return frozenset(shares[place] for place in broken)

    def _next(self, rows: Sequence[Row]) -> tuple[NDArray[np.int32], frozenset[int]]:
        for row in rows:
            line = self._lines[row]
            if not line.begun:
                self._guide.begin(row, line.sampling)
                line.begun = True
            if line.newest is not None:
                tokens, share = line.newest
                said = tokens.read()[share]
                line.untaken, line.newest = (
                    (line.untaken if share in tokens.wrong else (*line.untaken, said)),
                    None,
                )
            self._guide.take(row, line.untaken)
            line.untaken = ()
        return self._guide.masks(rows)


def _bits(masks: Tensor, count: int) -> Tensor:
    """The first so many bits of each row of words, bool `[rows, count]`."""
    parts = masks.view(
        torch.uint8
    )  # The first of a word's bytes has its first bits, on all machines that this runs on.
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    return ((parts[..., None] >> shifts) & 1).view(torch.bool).flatten(1)[:, :count]
