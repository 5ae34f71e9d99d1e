"""Declares what a device and the CPU hand over to each other where the CPU computes experts in host
memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.row_classes import MOST_TOKENS

LISTED = 4
"""Numbers of a list before those of experts: layer, experts, rows, tokens."""
_LINE = 64
"""Bytes that processors exchange at a time: what two sides write lies that far apart."""
_WORDS = 4 * _LINE // 4


@dataclass(frozen=True, slots=True)
class StepRows:
    """StepRows are what a step gives to a mixture, and where the outputs go.

    x: `[tokens, hidden]`. order: int32 `[pairs]`, pairs of a token and an expert in the order of experts; a
    pair's token is its number by the pairs of a token. y: `[pairs, hidden]`, outputs by pair.
    """

    x: Tensor
    order: Tensor
    y: Tensor


class HandoverBox:
    """A box is host memory through which the device gives rows to the CPU, and gets outputs.

    asked, done, over: int32 `[1]`: the number of what the device asks for; of what the CPU has done; whether
    nobody waits any more. spent: int64 `[1]`: nanoseconds that the CPU took for that. list: int32 `[LISTED +
    2 * most + rows]`: see service.c. x: `[MOST_TOKENS, hidden]`. y: `[rows, hidden]`. most, rows: experts,
    and pairs of a token and an expert, of one layer at most.
    """

    def __init__(self, memory: Tensor, most: int, rows: int, hidden: int, dtype: torch.dtype) -> None:
        """Lay a box in `memory`, uint8 `[bytes_of(...)]`, and close it."""
        words, lists, x, y = torch.split(memory, _sizes(most, rows, hidden))
        of_words = words.view(torch.int32).zero_()
        lines = torch.split(of_words, _LINE // 4)
        self.asked, self.done, self.over = (line[:1] for line in lines[:3])
        self.spent = lines[3][:2].view(torch.int64)
        self.list = lists.view(torch.int32)[: LISTED + 2 * most + rows].zero_()
        self.x = x.view(dtype)[: MOST_TOKENS * hidden].view(MOST_TOKENS, hidden)
        self.y = y.view(dtype)[: rows * hidden].view(rows, hidden)
        self.most, self.rows = most, rows

    @staticmethod
    def bytes_of(most: int, rows: int, hidden: int) -> int:
        """Return the bytes of a box for numbers of 16 bits."""
        return sum(_sizes(most, rows, hidden))


def _sizes(most: int, rows: int, hidden: int) -> list[int]:
    sizes = (4 * _WORDS, 4 * (LISTED + 2 * most + rows), 2 * MOST_TOKENS * hidden, 2 * rows * hidden)
    return [-(-size // _LINE) * _LINE for size in sizes]


@dataclass(frozen=True, slots=True)
class Handover:
    """A handover has a box, and what the device keeps beside it in its own memory.

    asked: int32 `[1]`, the number of what was asked for last. mine: int32 `[1 + rows]`, how many rows the CPU
    computes for the layer at hand, and the pair of each. computed: int64 `[]`, experts that were asked of the
    CPU so far. begun: int64 `[1]`, when the layer at hand was decided, in nanoseconds. shares: int32
    `[CLASSES, experts + 1]`: of so many missing experts, how many the CPU takes. times: int64 `[CLASSES + 1,
    4, experts + 1, 2]`: how often something took place, and nanoseconds in all; see
    `weights.streaming.shares`. limit: nanoseconds for which the device waits at most, or looks where it has
    no clock.
    """

    box: HandoverBox
    asked: Tensor
    mine: Tensor
    computed: Tensor
    begun: Tensor
    shares: Tensor
    times: Tensor
    limit: int
