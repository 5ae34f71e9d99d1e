"""Forecasts how a model would run on a machine, from its shape and the machine's figures.

Its plan is a BootPlan, as a boot there would build it (`engine.plan`). A pass then takes as long as disk,
link and arithmetic hold each other up (`residency.predict`). The time of each use of a group on the device
follows from the costs of a step that `penstock doctor` measured there (`engine.costs`). Without them it is
the slower of reading and computing, which is a bound, not a forecast: small resident models are slower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import comb
from pathlib import Path

from penstock.arch import bounds
from penstock.arch.families import TensorNames
from penstock.arch.layout import GroupKind, GroupLayout, KVLayout, group_layouts, kv_layout
from penstock.arch.shards import WHOLE
from penstock.arch.spec import ModelSpec, RopeKind
from penstock.base.config import Config
from penstock.base.errors import BudgetError, ConfigError
from penstock.base.tiers import Tier
from penstock.base.units import format_size
from penstock.engine.budget import GROWTH, Budget, goes_to_host, on_heap, usual_activations
from penstock.engine.costs import RECORDED_TOKENS, StepCosts, prompt_seconds
from penstock.engine.passes import StepShape, UseWork, decode_step, pass_work, prompt_step
from penstock.engine.plan import BootPlan, Hardware, Measured, Outline, plan_boot
from penstock.kv.movement.sizes import carrier_bytes, usual_tile
from penstock.sched.rules import Limits
from penstock.weights.streaming.residency import (
    ExpertRoom,
    Placement,
    padded,
    pass_order,
    predict,
    solve_model,
)
from penstock.weights.streaming.ring import Link, Rates

BLOCK_SIZE = 32
PROCESS = GROWTH + (1200 << 20)
"""Host memory of a process beside weights: a boot's reserve, and Python, torch and CUDA (on an H200)."""
TABLES = 512
"""Bytes of pinned host memory for each byte of the GPU's page tables."""
CONTEXT = 1000 << 20
"""GPU memory of the driver, and a boot's reserve for kernels, measured on an H100 and an H200."""
FIXED = 384 << 20
"""GPU memory of recorded steps, partial results and libraries, whatever the step, on an H100 and an H200."""
BUFFERS = 40 << 20
"""Memory that a CPU's library of products keeps for eight threads."""
GB = 10**9
_TAIL = 4
"""Pages of a long sequence with KV that is only there."""
MORE = 1.1
"""Factor by which faster links are tried."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Describes a machine: memory that an engine may take, and rates.

    The disk is used if its rate is above zero, and is large enough. On a CPU `host` is None: DEVICE is in
    host memory itself, and gives some of its room to the ring through which weights stream from disk.

    device, host: bytes.
    rates: bytes/s.
    operations: operations/s of the device.
    costs: costs of steps. Without them a forecast is a bound.
    """

    device: int
    host: int | None
    rates: Rates
    operations: float
    costs: StepCosts | None = None

    @property
    def usable(self) -> int:
        """Return the bytes of DEVICE for weights, KV and activations."""
        return self.device if self.host is None else max(self.device - CONTEXT - self.host // TABLES, 0)


@dataclass(frozen=True, slots=True)
class FarBytes:
    """Says how many bytes of the device and of the host KV beyond the device takes."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """Describes a workload: `batch` sequences at once, each of up to `context` tokens.

    dtype: of weights and KV.
    step_tokens: most tokens of a pass.
    experts_fetched: experts that a decode step brings to the device, if that was counted. None takes tokens
        to choose evenly.
    """

    dtype: str
    batch: int = 1
    context: int = 4096
    step_tokens: int = 8192
    experts_fetched: float | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """Describes passes of one kind in the steady state. For long prompts it is the mean of their passes.

    tokens: of all sequences together, in a pass.
    seconds: of a pass.
    copied, read: bytes of weights and KV that come to DEVICE, and from DISK, in a pass.
    busy: seconds of a pass in which each link is busy.
    """

    tokens: float
    seconds: float
    copied: float
    read: float
    busy: Mapping[Link, float]

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
class Forecast:
    """Holds the plan that a boot would build on a machine, and the pace that follows.

    placement: of the groups that every pass needs.
    experts: of the others, if the model has any.
    """

    machine: Machine
    work: Work
    plan: BootPlan[FarBytes]
    placement: Placement
    experts: ExpertRoom | None
    decode: Pace
    prefill: Pace

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
        return self.placement.resting(tier) + self.experts_on(tier) * (
            self.experts.size if self.experts else 0
        )

    def ring(self, tier: Tier) -> int:
        """Return the bytes of a tier's ring, through which the other weights stream."""
        if tier is Tier.DISK:
            return 0
        device = tier is Tier.DEVICE
        ring = (self.placement.device_ring if device else self.placement.host_ring).size
        return ring + (
            (self.experts.device_ring if device else self.experts.host_ring) * self.experts.size
            if self.experts
            else 0
        )


class More(StrEnum):
    """Names what a machine might have more of."""

    DEVICE = "1 GB more device memory"
    HOST = "1 GB more host memory"
    LINK = "a link 10 % faster"
    DISK = "a disk 10 % faster"


@dataclass(frozen=True, slots=True)
class Gain:
    """Says how many tokens/s more of something would add: 0 where it would not help."""

    more: More
    decode: float
    prefill: float


def forecast(spec: ModelSpec, names: TensorNames, machine: Machine, work: Work) -> Forecast:
    """Forecast a workload on a machine.

    Raises BudgetError as a boot would, if KV for all sequences, the largest step and the ring do not fit; and
    ConfigError.
    """
    if work.context > spec.max_length and spec.rope.kind is not RopeKind.DYNAMIC:
        raise ConfigError(
            f"a context of {work.context:,} is more than the {spec.max_length:,} positions the model was "
            "trained for; lower it"
        )
    if work.batch > work.step_tokens:
        raise ConfigError(
            f"a batch of {work.batch:,} is more than {work.step_tokens:,} tokens a step; every sequence "
            "needs a token a step"
        )
    layouts = group_layouts(spec, names, work.dtype)
    every = pass_order(layouts, spec.tied_embeddings)
    expert = next((layout for layout in layouts if layout.id.kind is GroupKind.EXPERT), None)
    plan = _plan(spec, layouts, machine, work)
    placement, experts, far = plan.placement, plan.experts, plan.outline.far
    if not plan.streams:  # A boot takes all groups alike then; a forecast counts experts by themselves.
        placement, experts, _ = solve_model(
            layouts, spec.tied_embeddings, plan.limits, machine.rates, disk=False
        )

    def pace(step: StepShape) -> Pace:
        arithmetic = _arithmetic(spec, machine, pass_work(spec, work.dtype, every, expert, step), step)
        return _pace(
            spec,
            machine,
            placement,
            experts,
            step,
            arithmetic,
            bool(far),
            work.experts_fetched if step.decodes else None,
        )

    near = max(plan.budget.blocks // work.batch - _TAIL, 0) * BLOCK_SIZE if far else 0
    decode = pace(decode_step(spec, work.dtype, work.batch, work.context, near))
    prefill = pace(prompt_step(spec, work.dtype, work.batch, work.context, work.step_tokens, needed=not far))
    return Forecast(machine, work, plan, placement, experts, decode, prefill)


def gains(spec: ModelSpec, names: TensorNames, now: Forecast) -> tuple[Gain, ...]:
    """Return how much more of each tier and link would help."""
    machine, rates = now.machine, now.machine.rates
    others = {
        More.DEVICE: replace(machine, device=machine.device + GB),
        More.LINK: replace(machine, rates=replace(rates, host_to_device=rates.host_to_device * MORE)),
    }
    if machine.host is not None:
        others[More.HOST] = replace(machine, host=machine.host + GB)
    if rates.disk_to_host:
        others[More.DISK] = replace(machine, rates=replace(rates, disk_to_host=rates.disk_to_host * MORE))
    found = []
    for more in More:
        if more not in others:
            continue
        then = forecast(spec, names, others[more], now.work)
        paces = ((then.decode, now.decode), (then.prefill, now.prefill))
        found.append(
            Gain(
                more,
                *(max(after.tokens_per_second - before.tokens_per_second, 0.0) for after, before in paces),
            )
        )
    return tuple(found)


def _plan(
    spec: ModelSpec, layouts: Sequence[GroupLayout], machine: Machine, work: Work
) -> BootPlan[FarBytes]:
    """Return the plan of a boot with exactly the KV of all sequences at their longest."""
    cuda, kv = machine.host is not None, kv_layout(spec, work.dtype, BLOCK_SIZE)
    blocks = work.batch * -(-work.context // BLOCK_SIZE)
    tokens = min(work.step_tokens, max(work.batch * work.context, BLOCK_SIZE))
    activations = usual_activations(spec, work.dtype, tokens, work.batch)
    activations = activations + FIXED if cuda else on_heap(activations, BUFFERS)
    resident, far = sum(map(padded, layouts)) + activations, None
    if cuda and goes_to_host(blocks // work.batch * kv.block_bytes, machine.usable, resident):
        far = FarBytes(_ways(kv, machine, work), _far_kv(machine, work, blocks * kv.block_bytes))
    host = machine.host or 0
    hardware = Hardware(
        cuda, machine.usable, machine.usable, host, host, process=PROCESS - GROWTH, kernels=cuda
    )
    settings = Config(
        Path(), host_memory=machine.host or None, max_length=work.context, kv_blocks=None if far else blocks
    )
    limits = Limits(BLOCK_SIZE, work.step_tokens, work.batch, work.context)
    outline = Outline(
        settings, hardware, spec, WHOLE, work.dtype, limits, not cuda, machine.usable, layouts, kv, far
    )
    activations += far.device_bytes if far else 0
    return plan_boot(outline, Measured(activations, hardware, machine.rates.disk_to_host > 0, machine.rates))


def _far_kv(machine: Machine, work: Work, far: int) -> int:
    """Return the bytes of all sequences' KV. Raises BudgetError if host memory does not hold it."""
    assert machine.host is not None
    there = max(machine.host - PROCESS, 0)
    if far > there:
        raise BudgetError(
            f"KV of {work.batch:,} x {work.context:,} tokens takes {format_size(far)}, which neither the "
            "device holds nor the "
            f"{format_size(there)} that host memory has for it; allow more, or a shorter context"
        )
    return far


def _ways(layout: KVLayout, machine: Machine, work: Work) -> int:
    """Return the bytes of the device through which KV goes to host memory and back."""
    tile = usual_tile(layout, machine.usable, work.context, "cuda")
    return carrier_bytes(layout, tile, max(work.step_tokens // BLOCK_SIZE, 1) * BLOCK_SIZE)


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
    if step.tokens <= RECORDED_TOKENS:  # With so few tokens, reading weights may take longer than computing.
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
    far: bool,
    fetched: float | None,
) -> Pace:
    """Return how long passes take.

    Experts are known only when their router has run, so nothing overlaps their copies. Far KV is copied
    beside everything else, over the same link as weights.

    fetched: as Work.experts_fetched.
    """
    dense = predict(placement, machine.rates, arithmetic, placement.piece)
    seconds, copied, read, busy = (
        dense.seconds,
        float(placement.streamed),
        float(placement.read),
        dict(dense.busy),
    )
    if experts is not None and spec.moe is not None:
        last = int(spec.moe_layers[-1])  # In the last layer only tokens that need logits choose experts.
        counts = ((sum(spec.moe_layers) - last, step.tokens), (last, step.rows))
        layers = [(count, bounds.experts_chosen(spec.moe, tokens)) for count, tokens in counts if count]
        chosen = sum(count * each for count, each in layers)
        come = chosen * (1 - experts.on_device / experts.experts) if fetched is None else fetched
        experts_copied = come * experts.size
        experts_read = experts_copied * experts.on_disk / max(experts.experts - experts.on_device, 1)
        if fetched is None:
            seconds += sum(count * _fetch(experts, each, machine.rates) for count, each in layers)
        else:
            seconds += max(
                experts_copied / machine.rates.host_to_device,
                experts_read / machine.rates.disk_to_host if experts_read else 0,
            )
        if machine.costs and experts.on_device < experts.experts:
            seconds += sum(spec.moe_layers) * machine.costs.expert_layer
        copied, read = copied + experts_copied, read + experts_read
        busy[Link.LINK] += experts_copied / machine.rates.host_to_device
        busy[Link.DISK] += experts_read / machine.rates.disk_to_host if experts_read else 0.0
    if machine.costs and machine.host is not None and not step.decodes:
        busy[Link.COMPUTE] = max(busy[Link.COMPUTE], machine.costs.launch_seconds(spec, step.tokens))
        seconds = max(seconds, busy[Link.COMPUTE])
    if far:
        tiles = sum(step.far(layer) for layer in range(spec.layers))
        copied += tiles
        busy[Link.LINK] += tiles / machine.rates.host_to_device
        seconds = max(seconds, busy[Link.LINK])
    return Pace(step.tokens, seconds, copied, read, busy)


def _fetch(experts: ExpertRoom, chosen: float, rates: Rates) -> float:
    """Return the mean seconds until all chosen experts of a layer are on DEVICE, as if chosen evenly.

    Those on DISK are read while others are copied. Then the last of them is copied.
    """
    count = max(round(chosen), 1)
    on_disk = experts.on_disk / experts.experts
    on_host = experts.on_host / max(experts.experts - experts.on_disk, 1)
    copy, mean = experts.size / rates.host_to_device, 0.0
    for read in range(count + 1 if on_disk else 1):
        chance = comb(count, read) * on_disk**read * (1 - on_disk) ** (count - read)
        reading = read * experts.size / rates.disk_to_host + copy if read else 0.0
        mean += chance * max(reading, (read + (count - read) * on_host) * copy)
    return mean * chosen / count
