"""Declares what a device and the host's thread hand over to each other where a copy engine brings experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

_LINE = 16
"""Numbers of 32 bits that processors exchange at a time: what two sides write lies that far apart."""
HEAD = 2
"""Numbers of a list before ends and experts, as copier.c has it."""


class CopyBox:
    """A box is host memory in which the device asks for experts.

    asked, over: int32 `[1]`: the last part that may come; whether nobody waits any more. list: int32 `[HEAD +
    3 * most]`. See copier.c. most: experts of a layer.
    """

    def __init__(self, memory: Tensor, most: int) -> None:
        """Lay a box in `memory`, uint8 `[bytes_of(most)]`."""
        words = memory.view(torch.int32).zero_()
        self.asked, self.over = (words[at * _LINE :][:1] for at in range(2))
        self.list = words[2 * _LINE :][: HEAD + 3 * most]
        self.most = most

    @staticmethod
    def bytes_of(most: int) -> int:
        """Return the bytes of a box."""
        return 4 * (2 * _LINE - (-(HEAD + 3 * most) // _LINE) * _LINE)


@dataclass(frozen=True, slots=True)
class CopyRequests:
    """CopyRequests are a box, and what the device keeps beside it in its own memory.

    asked: int32 `[2]`: the last part that was asked for; the one before the first of the layer at hand. came:
    int32 `[1]`: the last part that has come. limit: nanoseconds for which the device waits at most, or looks
    where it has no clock.
    """

    box: CopyBox
    asked: Tensor
    came: Tensor
    limit: int
