"""Weights as the decoder borrows them: `take` a group, `release` it. Here every group is resident on the device."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupLayout
from penstock.weights.checkpoint import Checkpoint


class WeightStream:
    """All groups in one arena on the device, in the order of a pass."""

    def __init__(self, layouts: Sequence[GroupLayout], dtype: str, device: torch.device) -> None:
        self._layouts = layouts
        self._dtype = dtype
        self.bytes = sum(layout.size for layout in layouts)
        self._arena = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        self._views: dict[GroupId, Mapping[str, Tensor]] = {}
        self._places: list[Tensor] = []
        start = 0
        for layout in layouts:
            place = self._arena[start : start + layout.size]
            self._places.append(place)
            self._views[layout.id] = group_views(layout, place, dtype)
            start += layout.size

    def load(self, checkpoint: Checkpoint) -> None:
        """Fill every group from the checkpoint."""
        on_host = self._arena.device.type == "cpu"
        largest = max(layout.size for layout in self._layouts)
        staging = None if on_host else torch.empty(largest, dtype=torch.uint8, pin_memory=True)
        for layout, place in zip(self._layouts, self._places, strict=True):
            if staging is None:
                checkpoint.read_group(layout, self._dtype, place)
            else:
                checkpoint.read_group(layout, self._dtype, staging[: layout.size])
                place.copy_(staging[: layout.size])

    def fill_random(self, seed: int = 0, std: float = 0.02) -> None:
        """Random weights of a usual size instead of a checkpoint's, for measuring speed; norms are ones."""
        generator = torch.Generator(self._arena.device).manual_seed(seed)
        for views in self._views.values():
            for name, view in views.items():
                if name.endswith("norm"):
                    view.fill_(1)
                else:
                    view.normal_(0, std, generator=generator)

    def take(self, group: GroupId) -> Mapping[str, Tensor]:
        """The group's fields, ready on the compute stream until it is released."""
        return self._views[group]

    def release(self, group: GroupId) -> None:
        """The compute stream needs the group no more. Residents stay."""


def group_views(layout: GroupLayout, place: Tensor, dtype: str) -> Mapping[str, Tensor]:
    """A group's fields as typed views of its bytes, a flat uint8 tensor."""
    kind: torch.dtype = getattr(torch, dtype)
    views = {}
    for field in layout.fields:
        size = prod(field.shape) * kind.itemsize
        views[field.name] = place[field.offset : field.offset + size].view(kind).view(field.shape)
    return views
