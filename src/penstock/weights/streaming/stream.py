"""Lends weights to the decoder: it takes a group and releases it, and cannot tell whether the group rests on
the device or streams to it."""

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupKind, GroupLayout, mixture_layouts
from penstock.base.errors import CheckpointError
from penstock.base.meter import ExpertCounts, ExpertMap, WeightStats
from penstock.base.tiers import Tier
from penstock.base.trace import Trace
from penstock.memory.arena import Arena
from penstock.memory.link import LumpStream, streams_of
from penstock.memory.streams import CallerStream, CudaStream, Stream, Ticket
from penstock.ops.matrix import GroupViews
from penstock.weights.streaming.copied import CopiedExperts, copied_experts
from penstock.weights.streaming.cpu_dense import CpuFeedForwards
from penstock.weights.streaming.cpu_experts import CpuService, cpu_experts
from penstock.weights.streaming.experts import Experts
from penstock.weights.streaming.feeder import Feeder, Piece, RingCopy, spans
from penstock.weights.streaming.lending import ExpertStream
from penstock.weights.streaming.loading import LOADERS, Loading, counted, load
from penstock.weights.streaming.orders import PassTurns, RingOrder, ring_order, turns_of
from penstock.weights.streaming.residency import CpuOrder, ExpertRoom, Placement, piece_of
from penstock.weights.streaming.ring import Link, RingLayout, RingRun, StreamRates
from penstock.weights.streaming.slotted import SlotExperts
from penstock.weights.streaming.snapshots import SlotSnapshots
from penstock.weights.streaming.source import Sources, reading
from penstock.weights.streaming.views import Standing, StillExperts, group_views, next_run
from penstock.weights.streaming.waits import StreamWaits

_FIRST = GroupId(GroupKind.ATTENTION, 0)
"""Every pass uses it exactly once, so passes are counted by it."""


class WeightStream:
    """Lends all groups of a model: residents from an arena on the device, the others on their way through a
    ring beside it."""

    def __init__(
        self,
        placement: Placement,
        layouts: Sequence[GroupLayout],
        sources: Sources,
        device: torch.device,
        *,
        experts: ExpertRoom | None = None,
        rates: StreamRates | None = None,
        trace: Trace | None = None,
        streams: tuple[Stream, Stream] | None = None,
    ) -> None:
        """Allocate memory; nothing is loaded yet. Sources are closed with the stream.

        placement: of uses in `padded` sizes. experts: their room, if they are not among the uses. rates: what
        both were made for, which `stats` reports. streams: for copies and for arithmetic, instead of the
        device's.
        """
        self.placement, self.room, self.rates = placement, experts, rates
        self._sources, self._device = sources, device
        self._layouts = {layout.id: layout for layout in layouts}
        ring, host_ring = placement.device_ring, placement.host_ring
        on_device = ring.size + placement.resting(Tier.DEVICE)
        on_host = host_ring.size + placement.resting(Tier.HOST)
        self.bytes = on_device + (experts.device if experts else 0)
        self.host_bytes = on_host + (experts.host if experts else 0)
        self._arena = Arena(self.bytes, device)
        self._host = Arena(self.host_bytes, torch.device("cpu"), pinned_for=device)
        resident = _laid(placement, Tier.DEVICE, self._arena.bytes[ring.size : on_device])
        self._homes = resident | _laid(placement, Tier.HOST, self._host.bytes[host_ring.size : on_host])
        self._slots = self._host.bytes[: host_ring.size]
        self._streams = streams or streams_of(device)
        self._waits = StreamWaits(trace)
        self._moving: list[Feeder | Experts] = []
        self.experts: StillExperts | ExpertStream | None = None
        self.cpu: CpuService | None = None
        """What has the CPU compute some of the experts, or of the feed-forwards."""
        self.copied: CopiedExperts | None = None
        """What has the copy engine bring experts as the device asks for them."""
        self._by_cpu: CpuFeedForwards | None = None
        beside = [self._streams[0]]
        mixtures = mixture_layouts(layouts)
        if experts is not None:
            those = [layout for layout in layouts if layout.id.kind is GroupKind.EXPERT]
            memory = self._arena.bytes[on_device:].view(-1, experts.size)
            host = self._host.bytes[on_host:].view(-1, experts.size)
            slots = Experts(
                those,
                experts,
                memory[experts.slots :],
                host,
                sources.streamed,
                *self._streams,
                self._waits,
            )
            places = {layout.id: place for layout, place in slots.places()}
            self._homes |= places
            if experts.on_device == experts.experts:
                resident |= places
            else:
                self._moving.append(slots)
                if experts.copies:
                    beside.append(_link(device, self._streams[1]))
                    by_device = beside[1], self._streams[1]
                    self.cpu = cpu = cpu_experts(experts, those, host, device, by_device[1])
                    if cpu is None and placement.everything_resident:
                        self.copied = copied_experts(experts, len(mixtures), memory, host, by_device[1])
                    self.experts = SlotExperts(
                        those, mixtures, slots, memory, host, by_device, cpu=cpu, copied=self.copied
                    )
                else:
                    self.experts = ExpertStream(those, mixtures, slots, device)
                if placement.everything_resident:
                    self.experts.look_ahead()
        views = {id: group_views(self._layouts[id], place) for id, place in resident.items()}
        if mixtures and self.experts is None:
            self.experts = StillExperts(views.__getitem__, mixtures, device)
        if placement.cpu is not None:
            at_rest = {id: group_views(self._layouts[id], self._homes[id]) for id in placement.cpu.groups}
            self.cpu = self._by_cpu = CpuFeedForwards(placement.cpu, at_rest, device, self._streams[1])
        self._next = 0
        """Where in the ring's order the next use is looked for."""
        self._lend(self._order(ring, views))
        self._turning: PassTurns | None = None
        """Decides which passes the CPU shares."""
        self._passes = 0
        # What is freed on a CUDA device is given away only behind all that was launched before.
        compute = self._streams[1] if device.type == "cpu" else None
        arenas = self._host, self._arena
        self.asked: list[CpuService | CopiedExperts] = [
            one for one in (self.cpu, self.copied) if one is not None
        ]
        """What the device waits for."""
        self._close = weakref.finalize(
            self, _close, arenas, beside, compute, sources, self._moving, self.asked
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
            groups = [(layout, self._homes[id]) for id, layout in self._layouts.items() if id in self._homes]
            load(
                groups,
                self._sources.loaded,
                slots,
                self._streams[0],
                counted("loading weights", sum(len(place) for _, place in groups), loading),
            )
        finally:
            if staging:
                self._streams[0].mark().wait()
                staging.close()
        self._check_corrections()
        if isinstance(self.experts, SlotExperts):
            self.experts.fill()
        if self.placement.device_ring.runs:
            streamed = self._order(self.placement.device_ring, self._views, self._feed())
            self._lend(streamed)
            if self._by_cpu is not None and self.placement.cpu is not None:
                by_cpu, orders = self._by_cpu.views(), dict[CpuOrder, RingOrder]()
                for one in dict.fromkeys(self.placement.cpu.orders):
                    views = {**self._views, **{id: by_cpu[id] for id in one.groups}}
                    orders[one] = self._order(one.ring, views, self._feed(one.ring))
                shared = [orders[one] for one in self.placement.cpu.orders]
                turns = turns_of(self.placement, self.rates)
                self._turning = PassTurns(streamed, shared, turns, self._streams[1])

    def _order(
        self, ring: RingLayout, views: Mapping[GroupId, GroupViews], feeder: Feeder | None = None
    ) -> RingOrder:
        """Return the order of passes with this ring. views: of groups that do not move in them."""
        return ring_order(self.placement.uses, ring, self._layouts, self._arena.bytes, views, feeder)

    def _lend(self, order: RingOrder) -> None:
        """Lend groups in this order from now on."""
        self._views, self._in_ring, self._runs_of = order.views, order.in_ring, order.runs_of
        self._sooner, self._feeder, self._next = order.sooner, order.feeder, 0

    def _check_corrections(self) -> None:
        """Raise CheckpointError for a router that chooses by what are no numbers: nothing else would show
        it."""
        for id, place in self._homes.items():
            if id.kind is not GroupKind.ROUTER:
                continue
            correction = group_views(self._layouts[id], place).vectors.get("correction")
            if correction is not None and not bool(correction.isfinite().all()):
                raise CheckpointError(
                    f"what {id} adds to scores of experts (e_score_correction_bias) has values that are not "
                    "finite (NaN); fetch the model again"
                )

    def take(self, group: GroupId) -> GroupViews:
        """Return the fields of a group that is no expert, ready on the compute stream until it is released.

        Streamed groups are taken one at a time; those that a pass leaves out are passed over. Raises
        CheckpointError for one that cannot be read.
        """
        self._passes += group == _FIRST
        views = self._views.get(group)
        if views is not None:
            return views
        assert self._feeder is not None, "take before load"
        run = next_run(self._runs_of[group], self._next, len(self._in_ring))
        self._feeder.take(run)
        self._next = run + 1
        return self._in_ring[run]

    def release(self, group: GroupId) -> None:
        """Note that the compute stream needs the group no more."""
        if group in self._views:
            return
        assert self._feeder is not None
        self._feeder.release(self._next - 1)

    @property
    def asks(self) -> int:
        """Return how many layers have been recorded that ask the copy engine."""
        return self.copied.layers if self.copied is not None else 0

    def begin_pass(self) -> None:
        """Begin a pass with what is taken next, wherever the last one ended. A group that a pass uses twice
        is lent where its first use is laid."""
        self._next = 0
        if isinstance(self.experts, SlotExperts):
            self.experts.begin_recorded()

    def turn(self, rows: int) -> bool:
        """Choose the kind of the next pass, and return whether the CPU shares it. rows: of a step that
        decodes one token each; 0 for any other step. To be called before each pass, where `shares`."""
        turning = self._turning
        if turning is None:
            return False
        # An interrupt may come at any time, so what is lent is known only when all is done.
        if (order := turning.choose(rows)) is not turning.lent:
            turning.change(order)
            self._lend(order)
            turning.lent = order
        turning.begin(rows)
        return order is not turning.streamed

    def end_pass(self) -> None:
        """Note that all of a pass has been queued."""
        if self._turning is not None:
            self._turning.end()

    @property
    def shares(self) -> bool:
        """Tell whether the CPU may share passes of few decode rows."""
        return self._by_cpu is not None

    def share_link(self, shared: bool) -> None:
        """Say whether copies of others come between the parts of large ones from now on."""
        if isinstance(self._streams[0], LumpStream):
            self._streams[0].shared = shared

    def queued_before(self, layer: int) -> Ticket | None:
        """Return a ticket behind the copies of weights that are queued and needed before the layer's mixer
        can begin. None if there are none: it has begun, say. Any thread may wait for it, since what these
        copies wait for is queued too."""
        run = self._sooner.get(layer, -1)
        return None if self._feeder is None or run < self._next else self._feeder.queued_for(run)

    @property
    def all_stay(self) -> bool:
        """Tell whether all groups are on the device for good."""
        return not self._moving

    @property
    def experts_rest(self) -> bool:
        """Tell whether all experts of all layers are on the device for good."""
        return not isinstance(self.experts, ExpertStream)

    def standing(self, *, shared: int = 0) -> Standing:
        """Return what lends the places where groups are lent in a pass, without their being there. All
        experts rest, or the device decides about them. shared: decode rows of a pass that the CPU shares, 0
        for any other."""
        experts = self.experts
        if self._turning is not None:
            order = self._turning.of_rows(shared) if shared else self._turning.streamed
            return Standing(order.views, order.runs_of, order.in_ring, None)
        if isinstance(experts, SlotExperts):
            return Standing(self._views, self._runs_of, self._in_ring, experts.recorded())
        assert not isinstance(experts, ExpertStream), "experts that stream have no places of their own"
        return Standing(self._views, self._runs_of, self._in_ring, experts)

    @property
    def snapshots(self) -> SlotSnapshots | None:
        """Return what copies a device's counts to the host, where the device decides about experts."""
        return self.experts.snapshots if isinstance(self.experts, SlotExperts) else None

    def expert_map(self, *, exact: bool) -> ExpertMap:
        """Return how experts are used lately; of none where all rest. exact: as of `stats`."""
        return self.experts.use(exact=exact) if isinstance(self.experts, ExpertStream) else ExpertMap()

    def stats(self, *, exact: bool = True) -> WeightStats:
        """Return where weights rest, and the traffic and waits since they were made.

        exact: wait for a device that counts experts; else what it said last counts. Any thread may call it.
        """
        placement, rates, room, moving = self.placement, self.rates, self.room, self._moving
        stalled = self._waits.stalled()
        disk = min(sum(one.disk_late for one in moving), stalled)
        lent = self.experts
        experts = lent.counts(exact=exact) if isinstance(lent, ExpertStream) else ExpertCounts()
        on_disk = placement.resting(Tier.DISK) + (room.resting(Tier.DISK) if room else 0)
        return WeightStats(
            device=placement.resting(Tier.DEVICE) + (room.resting(Tier.DEVICE) if room else 0),
            host=placement.resting(Tier.HOST) + (room.resting(Tier.HOST) if room else 0),
            disk=on_disk,
            device_ring=placement.device_ring.size + (room.beside(Tier.DEVICE) if room else 0),
            host_ring=placement.host_ring.size + (room.beside(Tier.HOST) if room else 0),
            passes=self._turning.passes if self._turning else self._passes,
            copied=sum(one.copied_bytes for one in moving if isinstance(one, Feeder)) + experts.copied,
            read=sum(one.read_bytes for one in moving),
            stalled_link=stalled - disk,
            stalled_disk=disk,
            link_rate=rates.host_to_device if rates else 0.0,
            disk_rate=rates.disk_to_host if rates and on_disk else 0.0,
            predicted=(self._turning.predicted if self._turning else placement.prediction.seconds)
            if rates and self.experts_rest
            else 0.0,  # It is not known which experts will be chosen.
            binding=placement.prediction.binding
            if self.experts_rest or not room
            else Link.DISK
            if room.on_disk
            else Link.LINK,
            experts=experts,
            by_cpu=self._by_cpu.bytes if self._by_cpu else 0,
            shared=self._turning.passes_shared if self._turning else 0,
            worked=self._by_cpu.worked if self._by_cpu else 0.0,
        )

    def close(self) -> None:
        """End all threads, and free the memory. Nothing may be taken afterwards; a second call does
        nothing."""
        self._close()

    def _id(self, run: RingRun) -> GroupId:
        return self.placement.uses[run.use].id

    def _feed(self, shared: RingLayout | None = None) -> Feeder:
        """Return what fills the ring in passes in which all groups stream, or in `shared` ones."""
        ring, host_ring = shared or self.placement.device_ring, self.placement.host_ring
        pieces, of_use = list[Piece](), dict[int, list[tuple[RingRun, int]]]()
        for number, piece in enumerate(host_ring.runs):
            layout = self._layouts[self._id(piece)]
            into = self._slots[piece.offset : piece.offset + piece.size]
            name = f"{layout.id} from {piece.start >> 20} MiB" if piece.start else str(layout.id)
            pieces.append(
                Piece(
                    name,
                    piece.offset // self.placement.piece,
                    into,
                    reading(self._sources.streamed, layout, piece.start),
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
                        RingCopy(target[a:b], home[a:b], cuts.get(a), None, False)
                        for a, b in spans(run.size, cuts)
                    ]
                )
                continue
            own = list[RingCopy]()
            for piece, number in of_use[run.use]:
                slot, first = self._slots[piece.offset : piece.offset + piece.size], piece.start
                for a, b in spans(piece.size, [at - first for at in cuts]):
                    own.append(
                        RingCopy(
                            target[first + a : first + b],
                            slot[a:b],
                            cuts.get(first + a),
                            number,
                            b == piece.size,
                        )
                    )
            segments.append(own)
        names = [str(self._id(run)) for run in ring.runs]
        feeder = Feeder(
            names,
            segments,
            pieces,
            *self._streams,
            waits=self._waits,
            device=self._device,
            begins=shared is None,
        )
        self._moving.append(feeder)
        return feeder


def _link(device: torch.device, compute: Stream) -> Stream:
    """Return a stream for kernels that fetch, with the clock of `compute`. Interpreted ones fetch at once."""
    if not isinstance(compute, CudaStream):
        return CallerStream()
    return CudaStream(device, clock=compute.clock, first=True)


def _laid(placement: Placement, tier: Tier, arena: Tensor) -> dict[GroupId, Tensor]:
    """Return places for the groups with their home on `tier`, one behind the other in the order of a pass."""
    places, at = dict[GroupId, Tensor](), 0
    for use in placement.uses:
        if placement.homes[use.id] is tier and use.id not in places:
            places[use.id] = arena[at : at + use.size]
            at += use.size
    return places


def _close(
    arenas: Sequence[Arena],
    beside: Sequence[Stream],
    compute: Stream | None,
    sources: Sources,
    moving: Sequence[Feeder | Experts],
    asked: Sequence[CpuService | CopiedExperts],
) -> None:
    """Close all. beside: the streams whose work the compute stream need not have in front. asked: what the
    device waits for."""
    for service in asked:
        service.close()
    for one in (*moving, *beside):
        one.close()
    if compute is not None:
        compute.mark().wait()
    for service in asked:
        service.free()
    for arena in arenas:
        arena.close()
    sources.close()
