"""Whole groups of packs."""

import torch
from torch import Tensor

from penstock.arch.layout import GroupId
from penstock.weights.pack.manifest import PackedRun
from penstock.weights.pack.reader import Pack


def run_of(pack: Pack, group: GroupId) -> PackedRun:
    return next(run for run in pack.manifest.runs if run.id == str(group))


def read_group(pack: Pack, group: GroupId, into: Tensor, check: bool = False) -> None:
    """Fill `into`, of the group's size, by way of its whole pages."""
    whole = torch.empty(run_of(pack, group).length, dtype=torch.uint8)
    pack.read_piece(group, 0, whole, check)
    into.copy_(whole[: len(into)])
