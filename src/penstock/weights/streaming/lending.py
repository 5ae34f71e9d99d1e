"""Lends experts that come and go: as views of the slots that `Experts` fills."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupLayout, MixtureLayout
from penstock.base.meter import ExpertCounts, ExpertMap
from penstock.base.tiers import Tier
from penstock.ops.handover import StepRows
from penstock.ops.matrix import GroupViews
from penstock.weights.streaming.experts import Experts
from penstock.weights.streaming.views import group_views, sent_addresses

_Lent = TypeVar("_Lent")


class ExpertStream:
    """Lends the experts of all layers: on the device one at a time or in waves, or where they rest on the
    host."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        mixtures: Mapping[int, MixtureLayout],
        slots: Experts,
        device: torch.device,
    ) -> None:
        """Lend nothing yet. layouts: of all experts, layer by layer. mixtures: what each of these layers
        has."""
        self._slots, self.mixtures, self._device = slots, mixtures, device
        self._layouts = {layout.id: layout for layout in layouts}
        self._of_layer: dict[int, list[GroupId]] = {}
        for id in self._layouts:
            self._of_layer.setdefault(id.layer, []).append(id)
        self._following = dict(pairwise(self._of_layer))
        """The next layer with experts, by layer."""
        self._ahead = False
        """Whether layers foretell what the next one asks for."""
        self._later: tuple[int, Callable[[], Tensor]] | None = None
        """A layer, and what finds its likely experts when those of the layer before are on their way."""
        alike = dict[object, dict[int, GroupViews]]()
        self._views = {layer: alike.setdefault(mixture.formats, {}) for layer, mixture in mixtures.items()}
        """Of each layer by the address of a slot: fields of experts in the same formats lie alike."""

    def table(self, layer: int) -> None:
        """Return None: some of the experts come and go."""

    decided = False
    """The host decides which experts come."""

    def parts(
        self, layer: int, pairs: Tensor, most: int, rows: StepRows | None = None
    ) -> Iterator[Tensor] | None:
        """Return None: the host decides which experts come."""
        return None

    def look_ahead(self) -> None:
        """Let each layer foretell what the next one asks for. To be called before anything is asked for,
        where no groups but experts move."""
        self._ahead = True

    def foretells(self, layer: int, most: int) -> int | None:
        """Return the next layer with experts, if some of those that it will ask for are on DISK, and it pays
        to read them ahead; else None. A step of many tokens asks for nearly all of them anyway."""
        self._later = None  # Of a step that was broken off.
        following = self._following.get(layer) if self._ahead else None
        if following is None or most > len(self._of_layer[following]) or not self._slots.foretells():
            return None
        return following

    def foretell(self, layer: int, scores: Tensor, most: int, padding: Tensor | None) -> None:
        """Do nothing: the host foretells later."""

    def foretell_later(self, layer: int, chosen: Callable[[], Tensor]) -> None:
        """Read likely experts of a layer from DISK, the likeliest of each token first, behind those that are
        borrowed next. The host waits for what `chosen` returns."""
        self._later = layer, chosen

    def _foretell(self) -> None:
        later, self._later = self._later, None
        if later is not None:
            layer, chosen = later
            likeliest = dict.fromkeys(chosen().t().flatten().tolist())
            self._slots.foretell([self._of_layer[layer][expert] for expert in likeliest])

    def waves(self, experts: Sequence[GroupId]) -> Iterator[tuple[Sequence[GroupId], Tensor]]:
        """Yield these experts of one layer and their tables, as many at a time as can be on the device while
        others are on their way. Raises CheckpointError.

        The host waits for nothing but what comes from DISK.
        """
        return self._waves(experts, self._table)

    def waves_of_views(self, experts: Sequence[GroupId]) -> Iterator[Mapping[GroupId, GroupViews]]:
        """Yield these experts of one layer as views of their slots, in the waves of `waves`. Raises
        CheckpointError."""
        return (views for _, views in self._waves(experts, self._in_slots))

    def _waves(
        self, experts: Sequence[GroupId], lent: Callable[[Sequence[GroupId]], _Lent]
    ) -> Iterator[tuple[Sequence[GroupId], _Lent]]:
        for wave in self._slots.waves(experts):
            # A table is sent ahead of the wait for the wave itself: it need not wait for copies.
            found = lent(wave)
            if self._slots.homes[wave[0]].tier is not Tier.DEVICE:
                self._foretell()
            self._slots.take_wave(wave)
            yield wave, found
            self._foretell()  # Those on the device are computed first.
            self._slots.release_wave(wave)

    def each(self, experts: Sequence[GroupId]) -> Iterator[tuple[GroupId, GroupViews]]:
        """Yield these experts of one layer, each on the device until the next is asked for. Raises
        CheckpointError."""
        self._slots.expect(experts)
        self._foretell()
        for expert in experts:
            yield expert, self._in_slot(expert, self._slots.take(expert))
            self._slots.release(expert)

    def counts(self, *, exact: bool) -> ExpertCounts:
        """Return what was asked for and what came, since the beginning.

        exact: wait for a device that counts; else what it said last.
        """
        return self._slots.counts()

    def use(self, *, exact: bool) -> ExpertMap:
        """Return the use of all experts lately. exact: as of `counts`."""
        return ExpertMap(self._slots.use())

    def _in_slot(self, expert: GroupId, slot: Tensor) -> GroupViews:
        known = self._views[expert.layer]
        views = known.get(slot.data_ptr())
        if views is None:
            views = group_views(self._layouts[expert], slot)
            if self.mixtures[expert.layer].formats is not None:
                known[slot.data_ptr()] = views
        return views

    def _in_slots(self, wave: Sequence[GroupId]) -> Mapping[GroupId, GroupViews]:
        return {expert: self._in_slot(expert, self._slots.slot(expert)) for expert in wave}

    def _table(self, wave: Sequence[GroupId]) -> Tensor:
        """Return the addresses of the wave's experts on the device, with 0 for the others of their layer."""
        none = (0,) * len(self._layouts[wave[0]].fields)
        lent = {expert: views.addresses for expert, views in self._in_slots(wave).items()}
        every = self._of_layer[wave[0].layer]
        return sent_addresses([lent.get(expert, none) for expert in every], self._device)
