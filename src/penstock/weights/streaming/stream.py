"""Weights as the decoder borrows them: `take` a group, `release` it. Whether it rests on the device or
streams to it cannot be told."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupKind, GroupLayout
from penstock.base.meter import WeightStats
from penstock.base.tiers import Tier
from penstock.base.trace import Trace
from penstock.memory.arena import Arena
from penstock.memory.device import send
from penstock.memory.streams import Stream, streams_of
from penstock.ops.matrix import GroupViews, Matrix
from penstock.weights.streaming.experts import Experts
from penstock.weights.streaming.feeder import Feeder, Piece, Segment
from penstock.weights.streaming.loading import LOADERS, Loading, counted, load
from penstock.weights.streaming.residency import ExpertRoom, Placement, piece_of
from penstock.weights.streaming.ring import Link, Rates, Run
from penstock.weights.streaming.source import Source
from penstock.weights.streaming.waits import Waits

_FIRST = GroupId(GroupKind.ATTENTION, 0)
"""What every pass uses exactly once, by which passes are counted."""


class WeightStream:
    """All groups: residents in an arena on the device, the others on their way through a ring beside it."""

    def __init__(
        self,
        placement: Placement,
        layouts: Sequence[GroupLayout],
        source: Source,
        device: torch.device,
        *,
        disk: Source | None = None,
        experts: ExpertRoom | None = None,
        rates: Rates | None = None,
        trace: Trace | None = None,
        streams: tuple[Stream, Stream] | None = None,
    ) -> None:
        """placement: of uses in `padded` sizes. disk: where what stays on DISK is read from, if not from
        `source`. experts: room for those, if they are not among the uses. rates: what both were made for, to
        be told by `stats`. Nothing is loaded yet."""
        self.placement, self._source, self._device, self.rates = placement, source, device, rates
        self._disk = disk or source
        self._layouts = {layout.id: layout for layout in layouts}
        ring, host_ring = placement.device_ring, placement.host_ring
        on_device = ring.size + placement.resting(Tier.DEVICE)
        on_host = host_ring.size + placement.resting(Tier.HOST)
        self.bytes = on_device + (experts.device if experts else 0)
        self.host_bytes = on_host + (experts.host if experts else 0)
        self.room = experts
        self._arena = Arena(self.bytes, device)
        self._host = Arena(self.host_bytes, torch.device("cpu"), pinned_for=device)
        self._homes = {
            **_laid(placement, Tier.DEVICE, self._arena.bytes[ring.size : on_device]),
            **_laid(placement, Tier.HOST, self._host.bytes[host_ring.size : on_host]),
        }
        self._slots = self._host.bytes[: host_ring.size]
        self._views: dict[GroupId, GroupViews] = {
            id: group_views(self._layouts[id], self._homes[id])
            for id, home in placement.homes.items()
            if home is Tier.DEVICE
        }
        self._in_ring = [
            group_views(self._layouts[self._id(run)], self._arena.bytes[run.offset :]) for run in ring.runs
        ]
        self._runs_of: dict[GroupId, list[int]] = {}
        for index, run in enumerate(ring.runs):
            self._runs_of.setdefault(self._id(run), []).append(index)
        self._streams = streams or streams_of(device)
        self._waits = Waits(trace)
        self._feeder: Feeder | None = None
        self._next = 0
        """Where in the ring's order the next use is looked for."""
        self._experts: Experts | None = None
        self._in_slots: dict[int, GroupViews] = {}
        """Views of the slots for experts, whose fields all lie alike, by the slot's address."""
        self._tables: dict[int, Tensor] = {}
        self._experts_of: dict[int, list[GroupId]] = {}
        for id in self._layouts:
            if id.kind is GroupKind.EXPERT:
                self._experts_of.setdefault(id.layer, []).append(id)
        if experts is not None:
            on_each = (
                self._arena.bytes[on_device:].view(-1, experts.size),
                self._host.bytes[on_host:].view(-1, experts.size),
            )
            those = [layout for layout in layouts if layout.id.kind is GroupKind.EXPERT]
            self._experts = Experts(
                those, experts, on_each[0], on_each[1], self._disk, *self._streams, self._waits
            )
        self._passes = 0
        self._moving: list[Feeder | Experts] = [self._experts] if self._experts else []
        # What is freed on a CUDA device is given to nobody who is not behind what was launched before.
        compute = self._streams[1] if device.type == "cpu" else None
        self._close = weakref.finalize(
            self,
            _close,
            (self._host, self._arena),
            self._streams[0],
            compute,
            {source, self._disk},
            self._moving,
        )

    def load(self, loading: Loading | None = None) -> None:
        """Bring what stays on DEVICE and HOST there, in the order of a pass, and begin to fill the rings for
        the first.

        Together with the first pass, which reads what stays on DISK, every byte is then read once. Raises
        CheckpointError.
        """
        staging: Arena | None = None
        slots = list[Tensor]()
        if self._device.type == "cuda":
            size = piece_of(tuple(self._layouts.values()))
            fits = self.placement.piece >= size and len(self._slots) >= LOADERS * self.placement.piece
            staging = (
                None if fits else Arena(2 * LOADERS * size, torch.device("cpu"), pinned_for=self._device)
            )
            slots = list(
                torch.split(staging.bytes, size)
                if staging
                else torch.split(self._slots, self.placement.piece)
            )
        try:
            groups = [(self._layouts[id], place) for id, place in self._homes.items()]
            groups += self._experts.places() if self._experts else ()
            order = {id: number for number, id in enumerate(self._layouts)}
            groups.sort(key=lambda group: order[group[0].id])
            load(
                groups,
                self._source,
                slots,
                self._streams[0],
                counted("loading weights", sum(len(place) for _, place in groups), loading),
            )
        finally:
            if staging:
                self._streams[0].mark().wait()
                staging.close()
        if self.placement.device_ring.runs:
            self._feeder = self._feed()
            self._moving.append(self._feeder)

    def take(self, group: GroupId) -> GroupViews:
        """The group's fields, ready on the compute stream until it is released.

        Streamed groups are taken one at a time; those that a pass leaves out are passed over. Raises
        CheckpointError for one that cannot be read.
        """
        self._passes += group == _FIRST
        views = self._views.get(group)
        if views is not None:
            return views
        if group.kind is GroupKind.EXPERT and self._experts is not None:
            return self._in_slot(group, self._experts.take(group))
        assert self._feeder is not None, "take before load"
        run = _next_run(self._runs_of[group], self._next, len(self._in_ring))
        self._feeder.take(run)
        self._next = run + 1
        return self._in_ring[run]

    def release(self, group: GroupId) -> None:
        """The compute stream needs the group no more."""
        if group in self._views:
            return
        if group.kind is GroupKind.EXPERT and self._experts is not None:
            self._experts.release(group)
            return
        assert self._feeder is not None
        self._feeder.release(self._next - 1)

    def begin_pass(self) -> None:
        """What is taken next is the first of a pass, wherever the last one ended. A group that a pass uses
        twice is lent where its first use is laid."""
        self._next = 0

    def moves(self, group: GroupId) -> bool:
        """Whether the group is not on the device for good."""
        return group not in self._views and not (group.kind is GroupKind.EXPERT and self.experts_rest)

    @property
    def all_stay(self) -> bool:
        """Whether all groups are on the device for good."""
        return not self._moving

    @property
    def experts_rest(self) -> bool:
        """Whether all experts of all layers are on the device for good."""
        if self.room is not None:
            return self.room.on_device == self.room.experts
        return all(id in self._views for ids in self._experts_of.values() for id in ids)

    def standing(self) -> "Standing":
        """Where groups are lent in a pass, lent without being there."""
        return Standing(self._views, self._runs_of, self._in_ring, self.table)

    def expect(self, experts: Sequence[GroupId]) -> None:
        """These experts will be taken next, in this order: those that are not on the device set out for
        it."""
        if self._experts is not None:
            self._experts.expect(experts)

    def table(self, layer: int) -> Tensor | None:
        """Addresses of all experts of a layer, int64 `[experts, 2]`, the same tensor each time; None unless
        all are on the device for good."""
        if layer not in self._tables and self.experts_rest:
            self._tables[layer] = self._addresses(self._experts_of[layer])
        return self._tables.get(layer)

    def waves(self, experts: Sequence[GroupId]) -> Iterator[tuple[Sequence[GroupId], Tensor]]:
        """Some experts of one layer, in order, as many at a time as can be on the device while others are on
        their way: a wave and its table, as `table` has it, with 0 for all others. Released when the next is
        asked for. Raises CheckpointError.

        Nothing is waited for on the host but what comes from DISK.
        """
        assert self._experts is not None, "waves of experts that are not lent as such"
        for wave in self._experts.waves(experts):
            # Sent ahead of the wait for the wave itself, among whose copies it has its turn on the link.
            table = self._addresses(self._experts_of[wave[0].layer], frozenset(wave))
            self._experts.take_wave(wave)
            yield wave, table
            self._experts.release_wave(wave)

    def stats(self) -> WeightStats:
        placement, rates, room, moving = self.placement, self.rates, self.room, self._moving
        stalled = self._waits.stalled()
        disk = min(sum(one.disk_late for one in moving), stalled)
        on_disk = placement.resting(Tier.DISK) + (room.on_disk * room.size if room else 0)
        return WeightStats(
            device=placement.resting(Tier.DEVICE) + (room.on_device * room.size if room else 0),
            host=placement.resting(Tier.HOST) + (room.on_host * room.size if room else 0),
            disk=on_disk,
            device_ring=placement.device_ring.size + (room.device_ring * room.size if room else 0),
            host_ring=placement.host_ring.size + (room.host_ring * room.size if room else 0),
            passes=self._passes,
            copied=sum(one.copied_bytes for one in moving),
            read=sum(one.read_bytes for one in moving),
            stalled_link=stalled - disk,
            stalled_disk=disk,
            link_rate=rates.host_to_device if rates else 0.0,
            disk_rate=rates.disk_to_host if rates and on_disk else 0.0,
            predicted=placement.prediction.seconds
            if rates and self.experts_rest
            else 0.0,  # Nobody knows which experts will be chosen.
            binding=placement.prediction.binding
            if self.experts_rest or not room
            else Link.DISK
            if room.on_disk
            else Link.LINK,
        )

    def close(self) -> None:
        """End all threads, and free the memory. Nothing may be taken afterwards; a second call does
        nothing."""
        self._close()

    def _id(self, run: Run) -> GroupId:
        return self.placement.uses[run.use].id

    def _in_slot(self, expert: GroupId, slot: Tensor) -> GroupViews:
        views = self._in_slots.get(slot.data_ptr())
        if views is None:
            views = self._in_slots[slot.data_ptr()] = group_views(self._layouts[expert], slot)
        return views

    def _addresses(self, experts: Sequence[GroupId], lent: "frozenset[GroupId] | None" = None) -> Tensor:
        """Of those that are lent, all if nothing is said; 0 for the others."""

        def of(id: GroupId) -> tuple[int, ...]:
            if lent is not None and id not in lent:
                return (0,) * len(self._layouts[id].fields)
            views = self._views.get(id)
            if views is None:
                assert self._experts is not None
                views = self._in_slot(id, self._experts.slot(id))
            return views.addresses

        return send(np.array([of(id) for id in experts], dtype=np.int64), self._device)

    def _feed(self) -> Feeder:
        ring, host_ring = self.placement.device_ring, self.placement.host_ring
        pieces, of_use = list[Piece](), dict[int, list[tuple[Run, int]]]()
        for number, piece in enumerate(host_ring.runs):
            layout = self._layouts[self._id(piece)]
            into = self._slots[piece.offset : piece.offset + piece.size]
            name = f"{layout.id} from {piece.start >> 20} MiB" if piece.start else str(layout.id)
            pieces.append(
                Piece(
                    name,
                    piece.offset // self.placement.piece,
                    into,
                    _reading(self._disk, layout, piece.start),
                )
            )
            of_use.setdefault(piece.use, []).append((piece, number))
        segments = []
        for run in ring.runs:
            target = self._arena.bytes[run.offset : run.offset + run.size]
            home = self._homes.get(self._id(run))
            cuts = {wait.at: wait.run for wait in run.waits}
            if home is not None:
                segments.append(
                    [
                        Segment(target[a:b], home[a:b], cuts.get(a), None, False)
                        for a, b in _spans(run.size, cuts)
                    ]
                )
                continue
            own = list[Segment]()
            for piece, number in of_use[run.use]:
                slot, first = self._slots[piece.offset : piece.offset + piece.size], piece.start
                for a, b in _spans(piece.size, [at - first for at in cuts]):
                    own.append(
                        Segment(
                            target[first + a : first + b],
                            slot[a:b],
                            cuts.get(first + a),
                            number,
                            b == piece.size,
                        )
                    )
            segments.append(own)
        names = [str(self._id(run)) for run in ring.runs]
        return Feeder(names, segments, pieces, *self._streams, waits=self._waits, device=self._device)


class Standing:
    """Lends the places at which groups will be lent in a pass from its beginning; nothing moves, and those
    that stream are not there."""

    def __init__(
        self,
        views: Mapping[GroupId, GroupViews],
        runs: Mapping[GroupId, Sequence[int]],
        in_ring: Sequence[GroupViews],
        table: Callable[[int], Tensor | None],
    ) -> None:
        self._views, self._runs, self._in_ring, self.table = views, runs, in_ring, table
        self._next = 0

    def take(self, group: GroupId) -> GroupViews:
        views = self._views.get(group)
        if views is not None:
            return views
        run = _next_run(self._runs[group], self._next, len(self._in_ring))
        self._next = run + 1
        return self._in_ring[run]

    def release(self, group: GroupId) -> None:
        pass

    def expect(self, experts: Sequence[GroupId]) -> None:
        pass

    def waves(self, experts: Sequence[GroupId]) -> Iterator[tuple[Sequence[GroupId], Tensor]]:
        raise AssertionError("experts that stream have no places of their own")


class Blank:
    """Zeros in place of all weights, in memory for the largest group: what the activations of a step are
    measured with."""

    def __init__(self, layouts: Sequence[GroupLayout], device: torch.device) -> None:
        self._layouts = {layout.id: layout for layout in layouts}
        self._bytes = torch.zeros(max(layout.size for layout in layouts), dtype=torch.uint8, device=device)
        self._experts = Counter(layout.id.layer for layout in layouts if layout.id.kind is GroupKind.EXPERT)

    def take(self, group: GroupId) -> GroupViews:
        return group_views(self._layouts[group], self._bytes)

    def release(self, group: GroupId) -> None:
        pass

    def expect(self, experts: Sequence[GroupId]) -> None:
        pass

    def table(self, layer: int) -> Tensor:
        views = self.take(GroupId(GroupKind.EXPERT, layer, 0))
        addresses = [views.addresses] * self._experts[layer]
        return send(np.array(addresses, dtype=np.int64), self._bytes.device)

    def waves(self, experts: Sequence[GroupId]) -> Iterator[tuple[Sequence[GroupId], Tensor]]:
        raise AssertionError("all experts are lent at once")


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


def _next_run(runs: Sequence[int], at: int, ring: int) -> int:
    """The first of these runs that comes from `at` on, in the order of the ring."""
    return min(runs, key=lambda run: (run - at) % ring)


def _laid(placement: Placement, tier: Tier, arena: Tensor) -> dict[GroupId, Tensor]:
    """Places for the groups with their home on `tier`, one behind the other in the order of a pass."""
    places, at = dict[GroupId, Tensor](), 0
    for use in placement.uses:
        if placement.homes[use.id] is tier and use.id not in places:
            places[use.id] = arena[at : at + use.size]
            at += use.size
    return places


def _spans(size: int, cuts: "Sequence[int] | Mapping[int, int]") -> list[tuple[int, int]]:
    """The parts between `cuts`, those of them that lie within `size` bytes."""
    bounds = sorted({0, size, *(cut for cut in cuts if 0 < cut < size)})
    return list(pairwise(bounds))


def _reading(source: Source, layout: GroupLayout, start: int) -> Callable[[Tensor, bool], None]:
    return lambda into, check: source.read(layout, start, into, check)


def _close(
    arenas: Sequence[Arena],
    copies: Stream,
    compute: Stream | None,
    sources: set[Source],
    moving: "list[Feeder | Experts]",
) -> None:
    for one in moving:
        one.close()
    copies.close()
    if compute is not None:
        compute.mark().wait()
    for arena in arenas:
        arena.close()
    for source in sources:
        source.close()
