"""Lends experts that the device itself decides about, where host memory holds all of a mixture.

Each layer has slots on the device, with copies of some of its experts. A step of few tokens asks the device:
one kernel looks up which experts are in slots and which slots give way, the next one reads those that come
through the link (`ops.triton.slots`). The host waits for nothing and learns nothing, so such a step can be
recorded. A step of many tokens asks for nearly all experts anyway: all of them come in their order through a
ring by the copy engine, as `Experts` has it, those of the next layer while this one is computed; those in
slots are used where they are.

Experts come in parts, and a part is computed while the next one comes: the compute stream looks up, gives way
and computes, another stream, the link's, fetches. Those in slots are in the first part.

Why this is safe. Only the link's stream writes to slots and, while the device decides, to the ring, through
which experts without a slot pass; only the compute stream reads them. Three waits order the two.
1. A layer's first fetch waits for the mark behind the layer's decision. Whatever was computed before, of this
   layer in the step before or of the layer before, is in front of that mark, so who reads what gives way is
   done, and so is who reads the ring.
2. What computes with a part waits for the mark behind its fetch. Those in slots are in the first part: they
   do not leave in a step that asks for them, so nothing of the step writes to them.
3. The ring holds `Places.parts` parts at once. A fetch of a later part waits for the mark behind what was
   computed with the part whose places it takes.
The last part's wait is also the end of the link's work for the layer, so the compute stream has all of it in
front: whoever allocates there, or marks it, comes after it. A recorded step has the marks and waits as edges
between its kernels. They begin and end within a layer, where a recording is never cut. Where launches of the
compute stream may be early, each kernel waits for the end of all before it ahead of what it reads and writes:
so a mark behind it still has all of them in front. The link's launches are never early.

Ahead. While a layer's experts come, the router of the next layer is applied to hidden states of this one, and
the likeliest expert that has no slot is fetched behind the last part, to a place of its own at the end of the
ring, until that layer has decided (`ops.triton.slots`). What has come of it then need not come again; what is
computed, and who has slots, is as if nothing had been foretold.

Why this is safe. The link's stream does it all in one order: the pieces that come ahead, the next layer's
fetch, which reads them, and what comes ahead next. It waits for the mark behind what was foretold. That is in
arrays of which layers in turn have one of two, so those of a layer are written behind the last wait for the
layer that had them before. What is foretold counts only for the very next decision, and if that is about the
same layer. It may still be coming when a pass ends or is broken off: then the compute stream waits for the
link before the host decides or a recorded step begins; a place that the host writes to is foretold no more.
A recorded step ends with its last layer, for which the link has nothing to do ahead; it is not cut between
two layers, since nothing is foretold where other groups move, nor in a step that is cut for KV beyond the
device (`recording.InTime`).

`Experts` writes to the ring on a third stream: behind a mark on the compute stream that is left when the host
takes over, so not before everything that the device decided is done. When the device takes over, the compute
stream first waits for all copies that were queued. The host knows which experts are in slots from a copy of
the arrays, which it takes when it takes over; nothing changes them before the device does.

What is decided for a layer is queued before what fetches. Where an interrupt or an error comes between, slots
do not hold what the arrays say: all slots of that layer are taken for empty before anything else is decided,
and the compute stream waits for what was fetched. The fetch reads tensors that are kept until then.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupLayout, MixtureLayout
from penstock.base.meter import ExpertCounts, ExpertMap, LayerExperts
from penstock.base.tiers import Tier
from penstock.memory.sending import send
from penstock.memory.streams import Stream, Ticket
from penstock.ops.handover import StepRows
from penstock.ops.kernels import triton_kernels
from penstock.ops.slots import ExpertParts, Places
from penstock.weights.streaming.cpu_experts import CpuExperts
from penstock.weights.streaming.experts import WAVES, Experts
from penstock.weights.streaming.lending import ExpertStream
from penstock.weights.streaming.slots import SlotRule, SlotTable
from penstock.weights.streaming.snapshots import SlotSnapshot, SlotSnapshots
from penstock.weights.streaming.views import DecidedExperts, sent_addresses

_RULE = SlotRule()
_LEAST_RING = 4
"""Places of a ring that has one to spare for what is fetched ahead."""
_MANY = 4
"""A step with so many times as many pairs as there are experts asks for nearly all of them."""
_FEW = 1
"""A step with more than so many times as many pairs foretells nothing: the link hardly idles, and each token
makes foretelling longer."""


class SlotExperts(ExpertStream):
    """Lends the experts of all layers, in slots that the device gives to those that are used most."""

    decided = True
    """The device decides, about steps of few tokens."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        mixtures: Mapping[int, MixtureLayout],
        ring: Experts,
        memory: Tensor,
        host: Tensor,
        streams: tuple[Stream, Stream],
        rule: SlotRule = _RULE,
        cpu: CpuExperts | None = None,
    ) -> None:
        """Begin with empty slots. layouts: of all experts, layer by layer, as they lie on the host.

        ring: the slots through which others pass, which are the last of `memory`, and all experts at home on
        HOST. memory: uint8 `[slots, size]` on the device. host: uint8 `[experts, size]`, which the device can
        read. streams: the link's, on which nothing else is queued, and the one that computes. cpu: computes
        some of the missing where they rest.
        """
        super().__init__(layouts, mixtures, ring, memory.device)
        self._memory, self._host = memory, host
        self._link, self._compute = streams
        self._cpu = cpu
        self._layers = {layer: number for number, layer in enumerate(self._of_layer)}
        experts = [len(every) for every in self._of_layer.values()]
        assert len(set(experts)) == 1, "layers with different numbers of experts"
        self._experts = experts[0]
        self._each, self._fuller = divmod(len(memory) - ring.ring_slots, len(experts))
        self._slot_table = SlotTable(
            len(experts), self._experts, self._each, memory.device, rule, fuller=self._fuller
        )
        if cpu is not None:
            self._slot_table.computed = cpu.handover.computed
        self._margin, self._decay = rule.margin, 0.5 ** (1 / rule.half_life)
        self.snapshots = SlotSnapshots(self._slot_table, ring.compute)
        self._foretold: Callable[[], None] | None = None
        """Fetches what is foretold; it is to be called when all parts of the layer before are."""
        self._running_ahead = False
        """Whether that may be under way on the link, and no layer has been decided about since."""
        self._places = {layer: self._places_of(layer) for layer in self._layers}
        self._decides = False
        """True while the device decides; else the host may have queued copies to the ring."""
        self._known: list[list[int]] = []
        """Slots of each layer's experts, while the host decides."""
        self._changing = -1
        """The layer, by its number, of which something is decided that may not have been fetched."""
        self._decided: ExpertParts | None = None
        """What fetches of that layer read."""

        self._here = 0
        """Experts that were in slots when the host decided."""

    def parts(
        self, layer: int, pairs: Tensor, most: int, rows: StepRows | None = None, *, recorded: bool = False
    ) -> Iterator[Tensor] | None:
        """Return the tables of a layer's experts, part by part: of those that this step's tokens chose, or of
        all of them where tokens are many, unless the step is `recorded`.

        Each has addresses of some of them, and 0 for all others: work with them is queued before the next is
        asked for. The first parts begin to come at once: what is queued before the first table is asked for
        is computed meanwhile. None where plain torch computes. pairs: int32 `[experts]`, on the device, how
        many pairs of a token and an expert each expert has; most: of all of them. rows: of the step, where
        the CPU may compute some of the experts; their outputs are there when the last table has been asked
        for and another one is. Raises CheckpointError.
        """
        kernels = triton_kernels("slots")
        if kernels is None:
            return None
        if most > _MANY * self._experts and not recorded:
            return self._every(layer)
        self.device_decides()
        most = min(most, self._experts)
        # A kernel is compiled for each bound: steps that were not recorded have few of them.
        bound = most if recorded else min(1 << (most - 1).bit_length(), self._experts)
        number, places = self._layers[layer], self._places[layer]
        cpu = self._cpu if self._cpu is not None and self._cpu.takes(rows) else None
        if number == 0:
            self._slot_table.begin()
            if cpu is not None and not recorded:
                cpu.begin_pass()
        shares = None if cpu is None or rows is None else cpu.shares(len(rows.x))
        count, at_once = places.parts(most)
        arrays, first = self._slot_table.arrays(number), self._host[number * self._experts].data_ptr()
        self._changing = number
        self._decided = kernels.expert_step(arrays, pairs, bound, self._margin, places, count, shares)
        fetch = partial(self._fetch, partial(kernels.fetch, self._decided, places, first))
        self._foretold, self._running_ahead = None, False
        self._link.wait(self._compute.mark())
        coming = [fetch(part) for part in range(min(at_once, count))]
        if cpu is not None and rows is not None:
            cpu.give(rows, pairs, number, self._decided)
        return self._parts(self._decided, coming, fetch, rows if cpu is not None else None)

    def recorded(self) -> DecidedExperts:
        """Return what lends experts to steps that are recorded."""
        parts = partial(self.parts, recorded=True)
        return DecidedExperts(self.mixtures, parts, self.foretells, self.foretell)

    def look_ahead(self) -> None:
        """Let each layer foretell an expert of the next, if the ring has a place to spare. To be called
        before anything is decided, where no groups but experts move."""
        self._ahead = self._slots.ring_slots >= _LEAST_RING
        self._places = {layer: self._places_of(layer) for layer in self._layers}

    def foretells(self, layer: int, most: int) -> int | None:
        """Return the next layer with experts, if one of them is to be foretold for it; else None."""
        return self._following.get(layer) if self._ahead and most <= _FEW * self._experts else None

    def foretell(self, layer: int, scores: Tensor, most: int, padding: Tensor | None) -> None:
        """Foretell an expert of a layer, and fetch it behind what comes now.

        To be called between `parts` of the layer before and asking for its first table. Arguments are as of
        `ExpertWeights.foretell`.
        """
        kernels = triton_kernels("slots")
        assert kernels is not None, "parts() says whether there are kernels"
        arrays = self._slot_table.arrays(self._layers[layer])
        kernels.foretell(arrays, scores, most, padding)
        fetch = partial(kernels.fetch_ahead, arrays, self._places[layer], self._host.data_ptr())
        self._foretold = partial(self._fetch_ahead, fetch, self._compute.mark())

    def _await_ahead(self) -> None:
        """Let what is computed from now on wait for what comes ahead."""
        if self._running_ahead:
            self._compute.wait(self._link.mark())
            self._running_ahead = False

    def _fetch_ahead(self, launch: Callable[[], None], told: Ticket) -> None:
        self._running_ahead = True
        self._link.wait(told)
        self._link.run(launch)

    def _fetch(self, launch: Callable[[int], None], part: int) -> Ticket:
        """Queue the fetch of a part, and return the mark behind it."""
        self._link.run(partial(launch, part))
        return self._link.mark()

    def _parts(
        self,
        parts: ExpertParts,
        coming: list[Ticket],
        fetch: Callable[[int], Ticket],
        rows: StepRows | None,
    ) -> Iterator[Tensor]:
        """Yield the table of each part when it has come. coming: the marks of those that are on their way;
        the others come to the places of what has been computed. rows: of which the CPU computes some."""
        tables = parts.tables
        for part, table in enumerate(tables):
            if len(coming) == len(tables) and self._foretold is not None:
                self._foretold()
                self._foretold = None
            self._compute.wait(coming[part])
            yield table
            if len(coming) < len(tables):
                self._link.wait(self._compute.mark())
                coming.append(fetch(len(coming)))
        if rows is not None and self._cpu is not None:
            self._cpu.take(rows, parts)
        self._changing, self._decided = -1, None

    def _every(self, layer: int) -> Iterator[Tensor]:
        """Yield tables of all experts of a layer, which come in their order; those of the next layer begin to
        come when the last has been computed."""
        for _, table in self.waves(self._of_layer[layer]):
            yield table
        if (following := self._following.get(layer)) is not None:
            self._slots.expect_ahead(self._without_slot(self._of_layer[following]))

    def _without_slot(self, experts: Sequence[GroupId]) -> list[GroupId]:
        slot_of = self._known[self._layers[experts[0].layer]]
        return [expert for expert in experts if slot_of[expert.expert] < 0]

    def fill(self) -> None:
        """Copy the first experts of each layer to its slots: at the beginning all are equally likely."""
        for number, places in enumerate(self._places.values()):
            held = self._slot_table.arrays(number).expert_of
            experts = self._host[number * self._experts :][: len(held)]
            self._memory[places.first :][: len(held)].copy_(experts)
            self._slot_table.slot_of[number, : len(held)] = held.copy_(
                torch.arange(len(held), device=self._device)
            )

    def begin_recorded(self) -> None:
        """Note that a recorded step comes next: of that, only the device knows what the link does."""
        if self._cpu is not None:
            self._cpu.begin_pass()
        self._await_ahead()
        self.device_decides()

    def device_decides(self) -> None:
        """Note that what is queued from now on, recorded steps too, asks the device."""
        self._mend()
        if not self._decides:
            self._slots.lend_ring()
            self._decides = True

    def waves(self, experts: Sequence[GroupId]) -> Iterator[tuple[Sequence[GroupId], Tensor]]:
        """Yield these experts of one layer: those in slots, and the others in waves. The host waits once,
        when the device has decided before.

        Where others came ahead, as many as the ring holds, these are first: while those in slots are
        computed, more come to the places that they leave.
        """
        self._mend()
        if self._decides:
            self._await_ahead()
            self._slot_table.turn += 1
            self._slots.take_ring_back()
        if self._decides or not self._known:
            self._known = self._slot_table.slot_of.tolist()
            self._decides = False  # Not before it is known: an interrupt may come between.
        number = self._layers[experts[0].layer]
        slot_of = self._known[number]
        here = [expert for expert in experts if slot_of[expert.expert] >= 0]
        self._here += len(here)
        rest = self._without_slot(experts)
        coming = super().waves(rest)
        if self._slots.ahead == rest:
            yield from islice(coming, WAVES)
        if here:
            yield here, self._table_of(here, number, slot_of)
        yield from coming

    def _mend(self) -> None:
        """Take the slots of a layer for empty, if a step was broken off before all had come to them."""
        if self._changing >= 0:
            if self._cpu is not None and self._decided is not None and self._decided.shared:
                self._cpu.settle(self._decided)
            self._compute.wait(self._link.mark())
            self._slot_table.empty(self._changing)
            self._changing, self._decided = -1, None

    def counts(self, *, exact: bool) -> ExpertCounts:
        """Return what was asked for and what came: by the device's count, and of steps of many tokens by the
        host's. exact: wait for the device; else what it said last."""
        host, seen = super().counts(exact=exact), self._seen(exact=exact)
        asked, hit, foretold, right = seen.counts.sum(0).tolist() if seen is not None else (0,) * 4
        computed = int(seen.computed) if seen is not None else 0
        fetched = (asked - hit - computed) * self._memory.shape[1]
        return ExpertCounts(
            host.asked + self._here + asked,
            host.hit + self._here + hit,
            host.from_disk,
            host.copied + fetched,
            host.read,
            fetched,
            perf_counter() - seen.when if seen is not None else 0.0,
            foretold,
            right,
            computed,
            self._cpu.worked if self._cpu is not None else 0.0,
        )

    def use(self, *, exact: bool) -> ExpertMap:
        """Return the use of all experts in steps of few tokens, about which the device decides."""
        seen = self._seen(exact=exact)
        if seen is None:
            return ExpertMap()
        rates, slots = seen.rates(self._decay).tolist(), seen.slot_of.tolist()
        layers = [
            LayerExperts(
                layer, rates[number], [Tier.DEVICE if slot >= 0 else Tier.HOST for slot in slots[number]]
            )
            for layer, number in self._layers.items()
        ]
        return ExpertMap(layers, perf_counter() - seen.when)

    def _seen(self, *, exact: bool) -> SlotSnapshot | None:
        return self.snapshots.exact() if exact else self.snapshots.last()

    def _places_of(self, layer: int) -> Places:
        offsets = [field.offset for field in self._layouts[self._of_layer[layer][0]].fields]
        number, ring = self._layers[layer], self._slots.ring_slots - self._ahead
        return Places(
            first=number * self._each + min(number, self._fuller),
            transit=len(self._memory) - self._slots.ring_slots,
            ring=ring,
            base=self._memory.data_ptr(),
            size=self._memory.shape[1],
            offsets=send(np.array(offsets, np.int64), self._device),
        )

    def _table_of(self, here: Sequence[GroupId], number: int, slot_of: Sequence[int]) -> Tensor:
        places = self._places[here[0].layer]
        fields = self._layouts[here[0]].fields
        none, lent = (0,) * len(fields), {expert.expert for expert in here}
        starts = [places.base + (places.first + slot) * places.size for slot in slot_of]
        return sent_addresses(
            [
                tuple(starts[expert] + field.offset for field in fields) if expert in lent else none
                for expert in range(self._experts)
            ],
            self._device,
        )
