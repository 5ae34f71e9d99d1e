"""Makes views of groups in memory, and lends groups that do not move."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupKind, GroupLayout, MixtureLayout, mixture_layouts
from penstock.memory.sending import send
from penstock.ops.handover import StepRows
from penstock.ops.matrix import GroupViews, Matrix


def group_views(layout: GroupLayout, place: Tensor) -> GroupViews:
    """Return a group's matrices and vectors as views of its bytes, a flat uint8 tensor."""
    views = {
        field.name: place[field.offset : field.offset + field.size]
        .view(getattr(torch, field.dtype))
        .view(field.shape)
        for field in layout.fields
    }
    matrices = {
        one.name: Matrix(one.format, one.shape, {part: views[field.name] for part, field in one.parts})
        for one in layout.matrices
    }
    vectors = {field.name: views[field.name] for field in layout.vectors}
    return GroupViews(matrices, vectors, tuple(view.data_ptr() for view in views.values()))


def sent_addresses(addresses: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Return the addresses of each expert's tensors as a table on the device, int64 `[experts, tensors]`."""
    return send(np.array(addresses, dtype=np.int64), device)


class StillExperts:
    """Lends experts that are all on the device for good: `ExpertWeights` without any motion."""

    def __init__(
        self,
        views: Callable[[GroupId], GroupViews],
        mixtures: Mapping[int, MixtureLayout],
        device: torch.device,
    ) -> None:
        """Lend nothing yet. views: what lends one expert. mixtures: what each layer has that is one."""
        self._views, self.mixtures, self._device = views, mixtures, device
        self._tables: dict[int, Tensor] = {}

    def table(self, layer: int) -> Tensor:
        """Return the addresses of all experts of a layer, int64 `[experts, tensors]`, the same tensor each
        time."""
        if layer not in self._tables:
            every = (
                GroupId(GroupKind.EXPERT, layer, expert) for expert in range(self.mixtures[layer].experts)
            )
            addresses = [self._views(expert).addresses for expert in every]
            self._tables[layer] = sent_addresses(addresses, self._device)
        return self._tables[layer]

    decided = False
    """The host decides which experts come."""

    def parts(
        self, layer: int, pairs: Tensor, most: int, rows: StepRows | None = None
    ) -> Iterator[Tensor] | None:
        """Return None: the host decides which experts come."""
        return None

    def foretells(self, layer: int, most: int) -> int | None:
        """Return None: no expert comes ahead."""
        return None

    def foretell(self, layer: int, scores: Tensor, most: int, padding: Tensor | None) -> None:
        """Do nothing."""

    def foretell_later(self, layer: int, chosen: Callable[[], Tensor]) -> None:
        """Do nothing."""

    def waves(self, experts: Sequence[GroupId]) -> Iterator[tuple[Sequence[GroupId], Tensor]]:
        """Yield all of them at once, if there are any."""
        if experts:
            yield experts, self.table(experts[0].layer)

    def waves_of_views(self, experts: Sequence[GroupId]) -> Iterator[Mapping[GroupId, GroupViews]]:
        """Yield all of them at once, if there are any."""
        if experts:
            yield {expert: self._views(expert) for expert in experts}

    def each(self, experts: Sequence[GroupId]) -> Iterator[tuple[GroupId, GroupViews]]:
        """Yield each expert and its views."""
        return ((expert, self._views(expert)) for expert in experts)


class DecidedExperts:
    """Lends experts to a step that is recorded: the device decides which come, whatever the step asks
    for."""

    def __init__(
        self,
        mixtures: Mapping[int, MixtureLayout],
        parts: Callable[[int, Tensor, int, StepRows | None], Iterator[Tensor] | None],
        foretells: Callable[[int, int], int | None],
        foretell: Callable[[int, Tensor, int, Tensor | None], None],
    ) -> None:
        """Lend nothing yet. parts: as of `ExpertWeights`, never None; foretells and foretell, too."""
        self.mixtures, self._parts, self.decided = mixtures, parts, True
        self.foretells, self.foretell = foretells, foretell

    def table(self, layer: int) -> None:
        """Return None: some of the experts come and go."""

    def parts(
        self, layer: int, pairs: Tensor, most: int, rows: StepRows | None = None
    ) -> Iterator[Tensor] | None:
        """Return the tables of a layer's experts, part by part."""
        return self._parts(layer, pairs, most, rows)

    def waves(self, experts: Sequence[GroupId]) -> NoReturn:
        """Raise AssertionError, as the other ways do by which the host decides."""
        raise AssertionError("the host decides about experts in a recorded step")

    waves_of_views = each = waves

    def foretell_later(self, layer: int, chosen: Callable[[], Tensor]) -> NoReturn:
        """Raise AssertionError: where the device decides, `foretell` is called."""
        raise AssertionError("the device decides about experts in a recorded step")


class Standing:
    """Lends the places at which groups will be lent in a pass from its beginning; nothing moves, and those
    that stream are not there."""

    def __init__(
        self,
        views: Mapping[GroupId, GroupViews],
        runs: Mapping[GroupId, Sequence[int]],
        in_ring: Sequence[GroupViews],
        experts: StillExperts | DecidedExperts | None,
    ) -> None:
        """Lend nothing yet. views: of groups that stay. runs: the runs of each other group in the ring;
        in_ring: the views of each run."""
        self._views, self._runs, self._in_ring, self.experts = views, runs, in_ring, experts
        self._next = 0

    all_stay = False
    """Recorded steps take one group after the other."""

    def take(self, group: GroupId) -> GroupViews:
        """Return the views that `WeightStream.take` will lend, if groups are taken in the order of a pass."""
        views = self._views.get(group)
        if views is not None:
            return views
        run = next_run(self._runs[group], self._next, len(self._in_ring))
        self._next = run + 1
        return self._in_ring[run]

    def moves(self, group: GroupId) -> bool:
        """Tell whether a group streams to the place that is lent."""
        return group not in self._views

    def release(self, group: GroupId) -> None:
        """Do nothing: the place is not needed for another group."""


class Blank:
    """Lends zeros in place of all weights, in memory for the largest group: what the activations of a step
    are measured with."""

    all_stay = False
    """Each group is lent where the one before was."""

    def __init__(self, layouts: Sequence[GroupLayout], device: torch.device) -> None:
        self._layouts = {layout.id: layout for layout in layouts}
        self._bytes = torch.zeros(max(layout.size for layout in layouts), dtype=torch.uint8, device=device)
        self._mixtures = mixture_layouts(layouts)

    @property
    def experts(self) -> StillExperts | None:
        """Return what lends the experts, anew each time: their tables are gone when a layer is."""
        return StillExperts(self.take, self._mixtures, self._bytes.device) if self._mixtures else None

    def take(self, group: GroupId) -> GroupViews:
        """Return views of zeros."""
        return group_views(self._layouts[group], self._bytes)

    def release(self, group: GroupId) -> None:
        """Do nothing: the zeros stay."""


def next_run(runs: Sequence[int], at: int, ring: int) -> int:
    """Return the first of these runs that comes from `at` on, in the order of a ring of so many runs."""
    return min(runs, key=lambda run: (run - at) % ring)
