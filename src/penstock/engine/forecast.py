"""Forecast how a model would run on a machine, from its shape and the machine's figures alone: where weights
rest, and how fast a pass is.

Its plan is a BootPlan, as a boot there would build it (`engine.plan`). A pass then takes as long as disk,
link and arithmetic hold each other up (`solver.predict`). What each use of a group takes on the device
follows from the costs of a step that `penstock doctor` measured there (`engine.costs`); where nobody
measured, it is the slower of reading and computing, which is a bound, not a forecast: small resident models
are slower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import Self

from penstock.arch import bounds
from penstock.arch.families import TensorNames
from penstock.arch.layout import GroupKind, GroupLayout, group_layouts
from penstock.arch.parts import local_spec
from penstock.arch.spec import ModelSpec
from penstock.base.errors import ConfigError
from penstock.base.tiers import Tier
from penstock.engine.budget import Budget
from penstock.engine.contexts import LongRoom
from penstock.engine.costs import RECORDED_TOKENS, prompt_seconds
from penstock.engine.cpu_share import CpuPart, class_with_cpu, dense_pass, shared_experts
from penstock.engine.draft import check_state
from penstock.engine.machines import BLOCK_SIZE, Machine, Work, plan_of
from penstock.engine.passes import (
    MixtureSize,
    StepShape,
    UseWork,
    decode_step,
    mixtures_of,
    pass_work,
    prompt_step,
)
from penstock.engine.plan import BootPlan
from penstock.weights.streaming.residency import ExpertRoom, Placement, padded, pass_order
from penstock.weights.streaming.ring import Link, StreamRates
from penstock.weights.streaming.solver import predict, solve_model

_TAIL = 4
"""Pages of a long sequence with KV that is only there."""


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """Counts the experts of a pass, of all layers.

    asked: those that tokens chose. hits: the share of them that was on the device. come: the others.
    source: where the hits are from, in words.
    """

    asked: float
    hits: float
    come: float
    source: str


@dataclass(frozen=True, slots=True)
class Pace:
    """Describes passes of one kind in the steady state. With several ranks all keep one pace, and what they
    exchange is left out.

    tokens: in a pass, of all sequences together. copied, read: bytes of weights, and of KV, that come to
    DEVICE and from DISK in a pass. busy: of its seconds, for how many each link is; of prompts longer than
    one pass everything is the mean of their passes. experts: those that it asks for; None where all stay on
    the device, or there are none. cpu: what the CPU computes of it, which counts as nobody's time here; None
    if it computes nothing.
    """

    tokens: float
    seconds: float
    copied: float
    read: float
    busy: Mapping[Link, float]
    experts: ExpertTraffic | None = None
    cpu: CpuPart | None = None

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens a second of all sequences together."""
        return self.tokens / self.seconds

    @property
    def binding(self) -> Link:
        """Return the link that everything else waits for."""
        return max(Link, key=lambda link: self.busy[link])

    def share(self, link: Link) -> float:
        """Return the part of the time in which the link is busy."""
        return self.busy[link] / self.seconds


@dataclass(frozen=True, slots=True)
class Pacing:
    """Holds what the pace of any step of a model on a machine follows from.

    spec, machine: of a rank. placement: of the groups that every pass needs; experts: of the others, if there
    are any. order: the groups of a pass. mixtures: see `mixtures_of`.
    """

    spec: ModelSpec
    dtype: str
    machine: Machine
    work: Work
    plan: BootPlan[LongRoom]
    placement: Placement
    experts: ExpertRoom | None
    order: Sequence[GroupLayout]
    mixtures: Mapping[int, MixtureSize]

    @classmethod
    def of(cls, plan: BootPlan[LongRoom], machine: Machine, work: Work) -> Self:
        """Return what the paces of a plan follow from. machine: of a rank."""
        outline, placement, experts = plan.outline, plan.placement, plan.experts
        layouts, tied = outline.layouts, outline.spec.tied_embeddings
        if not plan.streams:  # A boot takes all groups alike then; a forecast counts experts by themselves.
            slots = [padded(layout) for layout in layouts if layout.id.kind is GroupKind.EXPERT]
            # Slots have one size.
            room = plan.limits.device + len(slots) * max(slots, default=0) - sum(slots)
            placement, experts, _ = solve_model(
                layouts, tied, replace(plan.limits, device=room), machine.rates, disk=False
            )
        spec, order = local_spec(outline.spec, outline.shard), pass_order(layouts, tied)
        return cls(spec, outline.dtype, machine, work, plan, placement, experts, order, mixtures_of(layouts))

    @property
    def near(self) -> int:
        """Return the newest tokens of each sequence whose KV is on the device, where that of others is
        not."""
        blocks = self.plan.budget.blocks // self.work.batch
        return max(blocks - _TAIL, 0) * BLOCK_SIZE if self.plan.outline.far else 0

    def pace(self, step: StepShape) -> Pace:
        """Return how long such steps take, by the faster of two ways where a CPU may compute some of them. It
        computes no feed-forwards of steps that verify drafts."""
        machine, rates = self.machine, self.machine.rates
        uses = pass_work(self.spec, self.dtype, self.order, self.mixtures, step)
        arithmetic, far = _arithmetic(self.spec, machine, uses, step), self.plan.outline.far
        others = self.placement, self.experts, step, arithmetic, _passing(far, self.work), self.work
        alone = _pace(self.spec, replace(machine, rates=replace(rates, cpu_read=())), *others)
        if not step.decodes or not rates.cpu_read or (step.verifies and self.experts is None):
            return alone
        shared = _pace(self.spec, machine, *others)
        auto = self.work.settings.cpu_compute == "auto"
        if shared.cpu is None or (auto and shared.seconds >= alone.seconds):
            return alone
        return replace(shared, cpu=replace(shared.cpu, alone=alone.seconds))


@dataclass(frozen=True, slots=True)
class Forecast:
    """Holds the plan that a boot would build on a machine, and the pace that follows.

    pacing: what the pace of other steps follows from.
    """

    machine: Machine
    work: Work
    plan: BootPlan[LongRoom]
    pacing: Pacing
    decode: Pace
    prefill: Pace

    @property
    def own(self) -> Machine:
        """A rank has so much of the machine, of which the plan speaks; all of it without other ranks."""
        return self.pacing.machine

    @property
    def placement(self) -> Placement:
        """Return where the groups rest that every pass needs."""
        return self.pacing.placement

    @property
    def experts(self) -> ExpertRoom | None:
        """Return where the other groups rest, if the model has any."""
        return self.pacing.experts

    @property
    def budget(self) -> Budget:
        """Return how the device's memory is divided."""
        return self.plan.budget

    @property
    def far(self) -> int:
        """Return the bytes of KV that rest in host memory because the device has no room for a context's."""
        far = self.plan.outline.far
        return far.host_bytes if far else 0

    @property
    def everything_resident(self) -> bool:
        """Tell whether all weights stay on the device."""
        return self.placement.everything_resident and self.experts_on(Tier.DEVICE) == (
            self.experts.experts if self.experts else 0
        )

    def experts_on(self, tier: Tier) -> int:
        """Return how many experts have their home on `tier`, where these are counted by themselves."""
        if self.experts is None:
            return 0
        return {
            Tier.DEVICE: self.experts.on_device,
            Tier.HOST: self.experts.on_host,
            Tier.DISK: self.experts.on_disk,
        }[tier]

    def resting(self, tier: Tier) -> int:
        """Return the bytes of weights with their home on `tier`."""
        return self.placement.resting(tier) + (self.experts.resting(tier) if self.experts else 0)

    def ring(self, tier: Tier) -> int:
        """Return the bytes of a tier's ring, through which the other weights stream, and of slots beside the
        experts in them."""
        if tier is Tier.DISK or not self.plan.streams:
            return 0
        ring = (self.placement.device_ring if tier is Tier.DEVICE else self.placement.host_ring).size
        return ring + (self.experts.beside(tier) if self.experts else 0)


def forecast(spec: ModelSpec, names: TensorNames, machine: Machine, work: Work) -> Forecast:
    """Forecast a workload on a machine.

    Raises BudgetError as a boot would, if KV for all sequences, the largest step and the ring do not fit; and
    ConfigError.
    """
    check_state(work.settings, spec)
    if not spec.reaches(work.context):
        raise ConfigError(
            f"a context of {work.context:,} is more than the {spec.max_length:,} positions the model was "
            "trained for; lower --context"
        )
    if work.batch > work.step_tokens:
        raise ConfigError(
            f"a batch of {work.batch:,} is more than {work.step_tokens:,} tokens a step; each sequence "
            "needs a token in every step; lower --batch, or raise --step-tokens"
        )
    layouts = group_layouts(spec, names, work.dtype, work.shard)
    own = machine.of_rank(work.settings.tensor_parallel)
    plan = plan_of(spec, layouts, own, work)
    pacing, far = Pacing.of(plan, own, work), plan.outline.far
    local, dtype, batch, context = pacing.spec, work.dtype, work.batch, work.context
    return Forecast(
        machine,
        work,
        plan,
        pacing,
        decode=pacing.pace(decode_step(local, dtype, batch, context, pacing.near)),
        prefill=pacing.pace(prompt_step(local, dtype, batch, context, work.step_tokens, needed=not far)),
    )


def decode_pace(
    spec: ModelSpec,
    layouts: Sequence[GroupLayout],
    machine: Machine,
    placement: Placement,
    experts: ExpertRoom | None,
    work: Work,
) -> Pace:
    """Return how long decode steps take where weights rest so, with all KV on the device.

    It is the decode pace of `forecast`, for an engine that is there. spec, layouts, machine: of a rank.
    """
    every = pass_order(layouts, spec.tied_embeddings)
    step = decode_step(spec, work.dtype, work.batch, work.context)
    uses = pass_work(spec, work.dtype, every, mixtures_of(layouts), step)
    return _pace(spec, machine, placement, experts, step, _arithmetic(spec, machine, uses, step), None, work)


def _passing(far: LongRoom | None, work: Work) -> tuple[float, float] | None:
    """Return what comes over the link, and from the disk, for each byte of far KV that is read: less than one
    where it rests in fp8. None if there is none."""
    if far is None:
        return None
    copied, blocks = far.layout.block_bytes / far.layout.exact.block_bytes, far.layout.block_size
    needed = work.batch * -(-work.context // blocks)
    return copied, copied * max(needed - far.blocks, 0) / needed


# ---- what a pass does


def _arithmetic(spec: ModelSpec, machine: Machine, work: Sequence[UseWork], step: StepShape) -> list[float]:
    """Return the device's seconds for each use: by costs where they are known, else the bound."""
    costs = machine.costs
    if costs is None:
        return [
            max(use.bytes / machine.rates.device_read, use.operations / machine.operations) for use in work
        ]
    if step.decodes:
        return [costs.decode_seconds(step.tokens, use) for use in work]
    if costs.host:
        return [costs.chunk_seconds(use) for use in work]
    if step.tokens <= RECORDED_TOKENS:  # As few as that may take longer to read weights for than to compute.
        return [
            max(costs.decode_seconds(step.tokens, use), prompt_seconds(costs.prompt, use)) for use in work
        ]
    return [prompt_seconds(costs.prompt, use) for use in work]


def _pace(
    spec: ModelSpec,
    machine: Machine,
    placement: Placement,
    experts: ExpertRoom | None,
    step: StepShape,
    arithmetic: Sequence[float],
    far: tuple[float, float] | None,
    work: Work,
) -> Pace:
    """Return how long passes take. Experts are known only once their router has run, so nothing hides their
    coming; KV that is far comes while everything else goes on, over the same links as weights. A CPU of known
    rates takes its part of steps of few decode rows. far: see `_passing`."""
    kind = class_with_cpu(machine.rates, step.tokens) if step.decodes and far is None else None
    copied, read, cpu = float(placement.streamed), float(placement.read), None
    if kind is not None and placement.cpu is not None:
        dense, cpu = dense_pass(placement, machine.rates, kind, arithmetic)
        copied -= cpu.size
    else:
        dense = predict(placement, machine.rates, arithmetic, placement.piece)
    seconds, busy, traffic = dense.seconds, dict(dense.busy), None
    if experts is not None and spec.moe is not None:
        layers = _asked(spec, step, work)
        traffic = _traffic(experts, layers, step, work)
        taken = 0.0
        if kind is not None and experts.cpu is not None and traffic.come:
            taken, cpu = _shared(spec, machine, traffic.come, experts.mean, kind)
        experts_copied = traffic.come * experts.mean - (cpu.size if cpu else 0)
        experts_read = _from_disk(experts, traffic, step, work) * experts.mean
        if machine.costs and step.decodes and experts.copies:
            mixtures, link = sum(spec.moe_layers), machine.rates.host_to_device
            seconds += machine.costs.slot_seconds(
                step.tokens, mixtures, traffic.asked, traffic.come, experts.mean, link, taken
            )
        elif taken:
            seconds += taken
        elif step.decodes and (work.experts_fetched is not None or work.expert_use is not None):
            seconds += max(
                experts_copied / machine.rates.host_to_device,
                experts_read / machine.rates.disk_to_host if experts_read else 0,
            )
        else:
            seconds += sum(count * _fetch(experts, each, machine.rates) for count, each in layers)
        if machine.costs and experts.on_device < experts.experts and not experts.copies:
            seconds += sum(spec.moe_layers) * machine.costs.expert_layer
        copied, read = copied + experts_copied, read + experts_read
        busy[Link.LINK] += experts_copied / machine.rates.host_to_device
        busy[Link.DISK] += experts_read / machine.rates.disk_to_host if experts_read else 0.0
        if experts.on_device == experts.experts:
            traffic = None
    if machine.costs and machine.host is not None and (step.verifies or not step.decodes):
        costs = machine.costs
        launches = costs.eager_seconds(spec) if step.verifies else costs.launch_seconds(spec, step.tokens)
        busy[Link.COMPUTE] = max(busy[Link.COMPUTE], launches)
        seconds = max(seconds, busy[Link.COMPUTE])
    if far:
        tiles = sum(step.far(layer) for layer in range(spec.layers))
        copied += tiles * far[0]
        busy[Link.LINK] += tiles * far[0] / machine.rates.host_to_device
        if from_disk := tiles * far[1]:
            read += from_disk
            busy[Link.DISK] += from_disk / machine.rates.disk_to_host
        seconds = max(seconds, busy[Link.LINK], busy[Link.DISK])
    return Pace(step.tokens, seconds, copied, read, busy, traffic, cpu)


def _shared(spec: ModelSpec, machine: Machine, come: float, size: float, kind: int) -> tuple[float, CpuPart]:
    """Return the seconds until experts of a decode step have come or been computed by the CPU, and its
    part."""
    link = machine.rates.host_to_device
    link = machine.costs.slot_rate(link) if machine.costs else link
    return shared_experts(sum(spec.moe_layers), come, size, link, machine.rates.cpu_read[kind])


def _asked(spec: ModelSpec, step: StepShape, work: Work) -> list[tuple[int, float]]:
    """Return numbers of layers, and the distinct experts that each of these is asked for."""
    assert spec.moe is not None
    use = work.expert_use if step.decodes else None
    if use is not None and use.asked is not None:
        # What was recorded is of a token of each sequence; more tokens ask for more, as if chosen evenly.
        more = bounds.experts_chosen(spec.moe, step.tokens) / bounds.experts_chosen(spec.moe, work.batch)
        return [(sum(spec.moe_layers), min(use.asked * more, spec.moe.experts))]
    last = int(spec.moe_layers[-1])  # There tokens whose logits are not wanted choose none.
    counts = ((sum(spec.moe_layers) - last, step.tokens), (last, step.rows))
    return [(count, bounds.experts_chosen(spec.moe, tokens)) for count, tokens in counts if count]


def _traffic(
    experts: ExpertRoom, layers: Sequence[tuple[int, float]], step: StepShape, work: Work
) -> ExpertTraffic:
    """Return what a pass asks for, and what comes: as it was counted, given or recorded, else as if tokens
    chose evenly."""
    asked = sum(count * each for count, each in layers)
    hits, source = experts.near / experts.experts, "tokens choose evenly"
    if step.decodes and work.experts_fetched is not None:
        hits, source = 1 - work.experts_fetched / asked, "counted"
    elif step.decodes and work.expert_use is not None and hits < 1:
        hits, source = work.expert_use.at(hits), work.expert_use.source
    return ExpertTraffic(asked, hits, asked * (1 - hits), source)


def _from_disk(experts: ExpertRoom, traffic: ExpertTraffic, step: StepShape, work: Work) -> float:
    """Return how many of those that come are on DISK: as it was counted or recorded, else as if tokens chose
    evenly among them."""
    use = work.expert_use if step.decodes else None
    if step.decodes and work.experts_read is not None:
        return work.experts_read
    if use is not None and len(use.hits) > 1:  # What is used most is on DEVICE, and on HOST what is next.
        return min(traffic.asked * (1 - use.at(1 - experts.on_disk / experts.experts)), traffic.come)
    return traffic.come * experts.on_disk / max(experts.experts - experts.on_device, 1)


def _fetch(experts: ExpertRoom, chosen: float, rates: StreamRates) -> float:
    """Return the mean seconds until all chosen experts of a layer are on DEVICE, as if chosen evenly.

    Those on DISK are read while others are copied. Then the last of them is copied.
    """
    count = max(round(chosen), 1)
    on_disk = experts.on_disk / experts.experts
    on_host = (experts.on_host - experts.slots) / max(experts.experts - experts.on_disk, 1)
    copy, mean = experts.mean / rates.host_to_device, 0.0
    for read in range(count + 1 if on_disk else 1):
        chance = comb(count, read) * on_disk**read * (1 - on_disk) ** (count - read)
        reading = read * experts.mean / rates.disk_to_host + copy if read else 0.0
        mean += chance * max(reading, (read + (count - read) * on_host) * copy)
    return mean * chosen / count
