"""BootPlan: everything that a boot decides about memory, weights, graphs and launches, as a value.

It is made in two pure steps. `outline` needs the model, the machine and the settings. `plan_boot` also needs
what can only be measured there: what the largest step takes, and how fast links and the disk are. Nothing
here reaches torch, so `penstock plan` makes the same value for a machine that is elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

from penstock.arch.layout import GroupKind, GroupLayout, KVLayout, mixture_layouts, state_layout
from penstock.arch.lora import LoraRoom
from penstock.arch.shards import WHOLE, Shard
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import BudgetError
from penstock.base.tiers import Tier
from penstock.base.units import counted, format_size
from penstock.engine.budget import Budget, Demand, cpu_ring, divide, weights_room
from penstock.engine.cpu import may_share, with_cpu
from penstock.engine.draft import DraftModel, draft_limit
from penstock.engine.rooms import Hardware, host_room
from penstock.sched.rules import SchedulerLimits
from penstock.step.plan import MOST_DRAFTED
from penstock.weights.streaming.residency import ExpertRoom, Placement, Use, WeightLimits, padded
from penstock.weights.streaming.ring import StreamRates
from penstock.weights.streaming.solver import solve, solve_model
from penstock.worker.sizes import StepSizes, graph_blocker, graph_bytes

USUAL = StreamRates(host_to_device=25e9, disk_to_host=3e9, device_read=1e12)
"""Rates before anything was measured. They decide only whether there is a placement at all."""


class FarRoom(Protocol):
    """Says how many bytes KV beyond the device takes."""

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the device through which it streams."""

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the host."""


Far = TypeVar("Far", bound=FarRoom)


class Rest(IntEnum):
    """Tells which weights stay on the device. Ranks use the least of theirs."""

    SOME = 0
    EXPERTS = 1
    """All experts, if there are any."""
    ALL = 2


@dataclass(frozen=True, slots=True)
class Outline(Generic[Far]):
    """Holds what is decided before anything of an engine is constructed.

    spec: of the whole model. shard: this rank's part of it, of which all that follows speaks. one_memory:
    whether host memory is no more than the device: on a CPU, unless host_memory allows more. total: bytes on
    the device, without what far KV takes of them as host memory. far: None without KV beyond the device.
    draft: a second model, None without one. lora: room for LoRA adapters, None without any. head: the draft
    head that this is the outline of, None of a model. only_drafts: whether it is a draft model's, which
    verifies nothing: its decode steps have a row for each sequence.
    """

    settings: Config
    hardware: Hardware
    spec: ModelSpec
    shard: Shard
    dtype: str
    limits: SchedulerLimits
    one_memory: bool
    total: int
    layouts: Sequence[GroupLayout]
    kv: KVLayout
    far: Far | None
    draft: DraftModel | None = None
    lora: LoraRoom | None = None
    head: DraftModel | None = None
    only_drafts: bool = False

    @property
    def of_draft(self) -> "Outline[Far] | None":
        """The same of the draft model: its steps and sequences have the same limits. Of a draft head every
        rank has all, so the outline is that of a single rank."""
        if (draft := self.draft) is None:
            return None
        own = replace(self, spec=draft.spec, dtype=draft.dtype, layouts=draft.layouts, kv=draft.kv)
        alone = replace(self.settings, cpu_compute="off")  # All of its weights rest.
        own = replace(own, settings=alone, far=None, draft=None, lora=None, only_drafts=True)
        return replace(own, shard=WHOLE, head=draft) if draft.head else own

    @property
    def models(self) -> "tuple[Outline[Far], ...]":
        """Return the outline of each model, the target's first."""
        return (self,) if (of_draft := self.of_draft) is None else (self, of_draft)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one KV block on the device, of all models."""
        return self.kv.block_bytes + (self.draft.block_bytes if self.draft else 0)

    @property
    def blocks_per_row(self) -> int:
        """Return the KV blocks of the longest sequence."""
        return -(-self.limits.max_length // self.limits.block_size)

    @property
    def sizes(self) -> StepSizes:
        """Return the most that a step and a sequence have."""
        limits = self.limits
        drafted = 0 if self.settings.speculate == "off" else MOST_DRAFTED
        most = limits.max_step_tokens, limits.max_sequences, limits.max_length, limits.block_size
        return StepSizes(*most, drafted, verifies=not self.only_drafts)

    @property
    def may_rest(self) -> bool:
        """Tell whether all weights would fit on the device if nothing else were there."""
        beside = self.draft.weights if self.draft else 0
        return sum(map(padded, self.layouts)) + beside <= self.total

    @property
    def decides(self) -> bool:
        """Tell whether the device decides which experts it has, where they do not all fit: it has kernels for
        that, host memory has room for all of them, all layers have as many, and there are no other ranks."""
        found, mixtures = self.hardware, mixture_layouts(self.layouts).values()
        if not (found.cuda and found.kernels and mixtures) or not all(one.kernels for one in mixtures):
            return False
        if self.shard.ranks > 1 or len({one.experts for one in mixtures}) > 1:
            return False
        experts = [padded(layout) for layout in self.layouts if layout.id.kind is GroupKind.EXPERT]
        return len(experts) * max(experts) <= self.host_room

    @property
    def asked(self) -> int:
        """Return the most experts of a layer that a step with a token of every sequence asks for."""
        moe = self.spec.moe
        return min(moe.experts, self.limits.max_sequences * moe.top_k) if moe else 0

    @property
    def host_room(self) -> int:
        """Return the bytes of host memory that weights may take. Raises BudgetError."""
        far = self.far.host_bytes if self.far else 0
        return max(host_room(self.settings, self.hardware) - far, 0)

    @property
    def early(self) -> bool:
        """Tell whether kernels will most likely begin early (programmatic dependent launch)."""
        return (self.may_rest or self.decides) and self.hardware.pdl

    @property
    def recorded(self) -> bool:
        """Tell whether steps are recorded as CUDA graphs, if all weights stay that can."""
        return self.settings.graphs and self.blocker(host_decides=not (self.may_rest or self.decides)) is None

    @property
    def beside(self) -> int:
        """Bytes of the device that far KV, adapters and recorded steps of all models take, beside weights, KV
        and a step."""
        limits, tokens = self.limits, self.limits.max_step_tokens if self.may_rest else 0
        graphs, rows = 0, self.sizes.rows(self.spec)
        if self.recorded:
            shared = may_share(self)
            graphs = graph_bytes(
                self.spec, self.dtype, rows, tokens, blocks=self.blocks_per_row, shared=shared,
                cold=self.far is not None, lora=self.lora,
            )  # fmt: skip
        of_draft = self.of_draft
        if self.head is not None:  # A CPU's heap holds the memory of a step twice.
            graphs += (1 if self.hardware.cuda else 2) * self.head.tapped * limits.max_step_tokens
        far = self.far.device_bytes if self.far else 0
        return graphs + self._adapters + far + (of_draft.beside if of_draft else 0)

    @property
    def _adapters(self) -> int:
        return self.lora.bytes(self.spec, self.shard, self.dtype) if self.lora else 0

    @property
    def _draft_blocks(self) -> int | None:
        """The KV blocks for which a draft model's pool has room in draft_memory; None without a bound."""
        limit = draft_limit(self.settings, self.hardware.whole)
        if self.draft is None or limit is None or not self.draft.block_bytes:
            return None
        return max(limit - self.draft.weights, 0) // self.draft.block_bytes

    def check_draft_memory(self) -> None:
        """Raise BudgetError if a draft takes more than draft_memory: its weights and a block of KV, or as
        many as were asked for."""
        draft, limit = self.draft, draft_limit(self.settings, self.hardware.whole)
        if draft is None or limit is None:
            return
        blocks, kv = self.settings.kv_blocks or 1, ""
        if draft.block_bytes:
            kv = f" and {format_size(blocks * draft.block_bytes)} for {counted(blocks, 'block')} of its KV"
        if draft.weights + blocks * draft.block_bytes > limit:
            what = "copy in few bits" if draft.shares_kv else "draft model"
            raise BudgetError(
                f"the {what} takes {format_size(draft.weights)} of weights{kv} on the device, but "
                f"draft_memory is {format_size(limit)}; raise it, or give speculate suffix"
            )

    def blocker(self, *, host_decides: bool) -> str | None:
        """Return why steps cannot be recorded here, or None if they can."""
        found = self.hardware
        if self.head is not None:
            return "the host launches the kernels of a draft head"
        return graph_blocker(
            self.spec,
            cuda=found.cuda,
            kernels=found.kernels,
            host_decides=host_decides,
            mixtures=mixture_layouts(self.layouts).values(),
        )

    def demand(self, activations: int) -> Demand:
        """Return what the device must have room for besides weights.

        activations: bytes of everything but weights and KV.
        """
        useful = self.limits.max_sequences * self.blocks_per_row
        if (most := self._draft_blocks) is not None:
            useful = min(useful, most)
        return Demand(
            activations=activations,
            block_bytes=self.block_bytes,
            block_size=self.limits.block_size,
            useful_blocks=useful,
            fixed_blocks=self.settings.kv_blocks,
            length=None if self.far else self.settings.max_length,
            draft_weights=self.draft.weights if self.draft else 0,
            state=state_layout(self.spec, self.dtype, self.shard).bytes(self.limits.max_sequences),
            adapters=self._adapters,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Holds what a boot measures.

    activations: bytes of the device for all but weights and KV.
    hardware: the machine at that time.
    disk: whether weights can be read from one.
    rates: of links. None before they were measured, which is needed only where weights stream.
    """

    activations: int
    hardware: Hardware
    disk: bool
    rates: StreamRates | None = None


@dataclass(frozen=True, slots=True)
class BootPlan(Generic[Far]):
    """Says what a boot builds, and `penstock plan` shows.

    budget: how the device's memory is divided, for all models. limits: bytes of each tier for weights.
    placement: where each group of weights rests; experts: the same of those that are placed by number.
    beside: bytes of the device's room that the host's part of weights takes: on a CPU, where both are one
    memory. needs_disk: whether weights stream from there. rest: what of the weights is on the device for
    good, on all ranks.
    """

    outline: Outline[Far]
    budget: Budget
    limits: WeightLimits
    placement: Placement
    experts: ExpertRoom | None
    beside: int
    needs_disk: bool
    rest: Rest

    @property
    def of_draft(self) -> "BootPlan[Far] | None":
        """The plan of the draft model, in the same budget: all of its weights are on the device."""
        if (outline := self.outline.of_draft) is None:
            return None
        limits = WeightLimits(sum(map(padded, outline.layouts)), 0, 0)
        return BootPlan(outline, self.budget, limits, _resident(outline.layouts), None, 0, False, Rest.ALL)

    @property
    def streams(self) -> bool:
        """Tell whether weights do not all fit on the device, so that links and the disk are measured."""
        return sum(map(padded, self.outline.layouts)) > self.limits.device

    @property
    def experts_rest(self) -> bool:
        """Tell whether all experts are on the device for good."""
        return self.rest >= Rest.EXPERTS

    @property
    def early(self) -> bool:
        """Tell whether kernels begin before the one before has ended (programmatic dependent launch): where
        nothing moves, or nothing but experts about which the device decides."""
        slots = self.placement.everything_resident and self.experts is not None and self.experts.copies
        return (self.rest is Rest.ALL or slots) and self.outline.hardware.pdl

    @property
    def graph_blocker(self) -> str | None:
        """Say why steps cannot be recorded as CUDA graphs; None if they can."""
        decides = self.experts is not None and self.experts.copies
        return self.outline.blocker(host_decides=not (self.experts_rest or decides))

    @property
    def recorded(self) -> bool:
        """Tell whether decode steps are recorded as CUDA graphs."""
        return self.outline.settings.graphs and self.graph_blocker is None

    @property
    def record_runs(self) -> bool:
        """Tell whether short prompts are recorded, too: not where weights stream."""
        return self.recorded and self.rest is Rest.ALL

    @property
    def compile_again(self) -> bool:
        """Tell whether the kernels compiled so far are for other launches than the engine's."""
        return self.early != self.outline.early

    def agreed(self, blocks: int, rest: int) -> "BootPlan[Far]":
        """Return the plan with the least KV blocks, and the least that stays, of all ranks."""
        return replace(self, budget=replace(self.budget, blocks=blocks), rest=Rest(rest))


def plan_boot(outline: Outline[Far], measured: Measured, given: WeightLimits | None = None) -> BootPlan[Far]:
    """Return where weights rest, how the device's memory is divided, and what follows for graphs and
    launches.

    given: bytes of each tier for weights, instead of what the budgets leave. Raises BudgetError if weights,
    the largest step and a block of KV do not fit.
    """
    outline.check_draft_memory()
    layouts, demand = outline.layouts, outline.demand(measured.activations)
    room = (
        given.device
        if given
        else weights_room(outline.total, layouts, demand, host_is_device=outline.one_memory)
    )
    whole, beside, needs_disk = sum(map(padded, layouts)), 0, False
    experts: ExpertRoom | None = None
    if whole <= room:
        limits = WeightLimits(whole, 0, 0)
        placement = _resident(layouts)
    else:
        far = outline.far.host_bytes if outline.far else 0
        host = max(host_room(outline.settings, measured.hardware) - far, 0)
        if not given and not outline.hardware.cuda and host == 0:
            host = beside = cpu_ring(room, layouts)
        limits = given or WeightLimits(
            max(room - beside, 0), host, copies=outline.decides, asked=outline.asked
        )
        disk = measured.rates.disk_to_host > 0 if measured.rates else measured.disk
        placement, experts, needs_disk = solve_model(
            layouts, outline.spec.tied_embeddings, limits, measured.rates or USUAL, disk
        )
    placement, experts = with_cpu(outline, placement, experts, limits, measured.rates or USUAL)
    taken = placement.resting(Tier.DEVICE) + placement.device_ring.size + (experts.device if experts else 0)
    budget = divide(outline.total, taken + beside + demand.draft_weights, demand)
    rest = _rest(placement, experts)
    return BootPlan(outline, budget, limits, placement, experts, beside, needs_disk, rest)


def _resident(layouts: Sequence[GroupLayout]) -> Placement:
    """Return the placement of weights that are all on the device."""
    uses = [Use(layout.id, padded(layout)) for layout in layouts]
    return solve(uses, WeightLimits(sum(use.size for use in uses), 0, 0), USUAL)


def _rest(placement: Placement, experts: ExpertRoom | None) -> Rest:
    if experts is None and placement.everything_resident:
        return Rest.ALL
    whole = (
        all(home is Tier.DEVICE for id, home in placement.homes.items() if id.kind is GroupKind.EXPERT)
        if experts is None
        else experts.on_device == experts.experts
    )
    return Rest.EXPERTS if whole else Rest.SOME
