"""Plan a boot on a machine that need not be here: its figures, the work, and the plan that a boot there would
build."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.arch.layout import GroupLayout, KVLayout, kv_layout, state_layout
from penstock.arch.lora import LEAST_RANK, LoraRoom
from penstock.arch.parts import local_spec
from penstock.arch.shards import Shard
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import BudgetError
from penstock.base.units import format_size
from penstock.engine.budget import GROWTH, goes_to_host, on_heap, usual_activations, weights_room
from penstock.engine.contexts import LongRoom, long_room
from penstock.engine.costs import StepCosts
from penstock.engine.cpu import may_share
from penstock.engine.draft import DraftModel
from penstock.engine.plan import BootPlan, Measured, Outline, plan_boot
from penstock.engine.rooms import Hardware, host_room
from penstock.sched.rules import SchedulerLimits
from penstock.step.plan import MOST_DRAFTED
from penstock.weights.streaming.residency import padded
from penstock.weights.streaming.ring import SKEW, StreamRates
from penstock.worker.sizes import HEAD_ROWS, cold_bytes, shared_bytes

BLOCK_SIZE = 32
PROCESS = GROWTH + (1200 << 20)
"""Host memory that a process takes beside weights: what a boot sets aside, and what Python, torch and CUDA
took on an H200."""
TABLES = 512
"""The GPU's page tables take one byte for so many bytes of pinned host memory."""
CONTEXT = 1000 << 20
"""Memory of a GPU that its driver takes, and what a boot sets aside for kernels: as it was on an H100 and an
H200."""
FIXED = 384 << 20
"""Memory of a GPU for recorded steps, partial results and what libraries keep, whatever the step: as it was
on an H100 and an H200."""
_MOST = 1 << 24
"""MiB of a device up to which one is looked for that would do: 16 TiB."""
BUFFERS = 40 << 20
"""Memory that a CPU's library of products keeps: that of eight threads."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes that an engine may take on DEVICE and on HOST, rates in bytes/s, and what DEVICE computes in
    operations/s.

    A disk is there, and large enough, if its rate is above zero. On a CPU `host` is None: DEVICE is in host
    memory itself, and gives some of its room to the ring through which weights stream from disk.
    """

    device: int
    host: int | None
    rates: StreamRates
    operations: float
    costs: StepCosts | None = None
    """Steps cost this beyond bytes; without it a forecast is a bound of the device."""

    def of_rank(self, ranks: int) -> "Machine":
        """Return what one of several ranks has: a device and a link of its own, and a part of host memory and
        of the disk. On a CPU a part of everything, and its time is a bound."""
        host, rates, shares = self.host, self.rates, 1 if self.host is not None else ranks
        return replace(
            self,
            device=self.device // shares,
            host=host // ranks if host is not None else None,
            rates=StreamRates(
                rates.host_to_device / shares,
                rates.disk_to_host / ranks,
                rates.device_read / shares,
                rates.cpu_read,
                SKEW if host is not None and ranks > 1 else 0.0,
            ),
            operations=self.operations / shares,
            costs=self.costs if shares == 1 else None,  # What ranks share a CPU for was not measured.
        )

    @property
    def own(self) -> int:
        """The driver and what a boot sets aside for kernels take so many bytes of DEVICE."""
        return 0 if self.host is None else CONTEXT + self.host // TABLES

    @property
    def usable(self) -> int:
        """Weights, KV and activations have so many bytes of DEVICE."""
        return max(self.device - self.own, 0)


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """Says how decode steps use the experts of a mixture, as it was given or recorded.

    hits: of the experts that a step asks for, the share that is on the device: points of the share of all
        experts that are there, and the hits, by the first; between two of them in proportion.
    asked: distinct experts that a layer is asked for in a step; None is as many as if tokens chose evenly.
    source: where this is from, in a word.
    """

    hits: tuple[tuple[float, float], ...]
    asked: float | None = None
    source: str = "given"

    def at(self, share: float) -> float:
        """Return the hits where such a share of the experts is on the device."""
        above = bisect_left(self.hits, (share, 0.0))
        if above == 0 or above == len(self.hits):
            return self.hits[min(above, len(self.hits) - 1)][1]
        (low, few), (high, many) = self.hits[above - 1 : above + 1]
        return few + (many - few) * (share - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Work:
    """`batch` sequences at once, each of up to `context` tokens, computed at most `step_tokens` in a pass;
    weights and KV in `dtype`.

    experts_fetched: how many experts a decode step brings to the device, if that was counted; experts_read:
    how many of these from disk. expert_use: how many are there, if that is known. Without these, tokens are
    taken to choose evenly. settings: of them those for KV beyond the device, for adapters, for drafts and for
    several ranks are looked at. draft: the draft model, if these name one, with KV in blocks of BLOCK_SIZE.
    """

    dtype: str
    batch: int = 1
    context: int = 4096
    step_tokens: int = 8192
    experts_fetched: float | None = None
    experts_read: float | None = None
    expert_use: ExpertUse | None = None
    settings: Config = field(default_factory=lambda: Config(Path()))
    draft: DraftModel | None = None

    @property
    def shard(self) -> Shard:
        """The part of the model that is forecast: the last rank's, than which none is larger."""
        ranks = self.settings.tensor_parallel
        return Shard(ranks - 1, ranks)


def plan_of(
    spec: ModelSpec, layouts: Sequence[GroupLayout], machine: Machine, work: Work
) -> BootPlan[LongRoom]:
    """Return the plan of a boot with KV for all sequences at their longest, no more and no less. Raises
    BudgetError, which names less work that would fit where that is all it takes."""
    outline, measured = _outline_of(spec, layouts, machine, work)
    outline.check_draft_memory()
    try:
        _weights_room(outline, measured)
    except BudgetError as error:
        what = _too_small(outline, measured, machine)
        if less := _less(spec, layouts, machine, work):
            way = f"{less} would fit; or raise --device-memory"
        else:
            way = f"raise --device-memory to {_least_device(spec, layouts, machine, work):,} MiB"
        none = ", or do without the draft model" if work.draft else ""
        raise BudgetError(f"{what}; {way}{none}") from error
    return plan_boot(outline, measured)


def _outline_of(
    spec: ModelSpec, layouts: Sequence[GroupLayout], machine: Machine, work: Work
) -> tuple[Outline[LongRoom], Measured]:
    """Return what is decided before weights are placed, and what would be measured."""
    cuda, kv = machine.host is not None, kv_layout(spec, work.dtype, BLOCK_SIZE, work.shard)
    blocks = work.batch * -(-work.context // BLOCK_SIZE)
    tokens = min(work.step_tokens, max(work.batch * work.context, BLOCK_SIZE))
    drafted = 0 if work.settings.speculate == "off" else MOST_DRAFTED
    rows = max(work.batch, min(HEAD_ROWS, work.batch * (1 + drafted))) if drafted else work.batch
    activations = usual_activations(spec, work.dtype, tokens, rows)
    if draft := work.draft:  # Steps of one model and of another take the same memory in turn.
        activations = max(activations, usual_activations(draft.spec, draft.dtype, tokens, rows))
    activations = activations + FIXED if cuda else on_heap(activations, BUFFERS)
    state = state_layout(spec, work.dtype, work.shard).bytes(work.batch)
    lora, slots = None, work.settings.max_loras
    if slots:
        lora = LoraRoom(slots, work.settings.max_lora_rank or LEAST_RANK)
        activations += lora.bytes(spec, work.shard, work.dtype)
    resident, far = sum(map(padded, layouts)) + activations + state, None
    if draft:
        resident += draft.weights + blocks // work.batch * draft.block_bytes
    host = machine.host or 0
    hardware = Hardware(
        cuda, machine.usable, machine.usable, host, host, process=PROCESS - GROWTH, kernels=cuda
    )
    settings = replace(work.settings, host_memory=machine.host or None, max_length=work.context)
    limits = SchedulerLimits(BLOCK_SIZE, work.step_tokens, work.batch, work.context)
    if cuda and goes_to_host(blocks // work.batch * kv.block_bytes, machine.usable, resident):
        far = _far(replace(settings, host_kv_memory=None), spec, limits, kv, hardware, resident, blocks)
    settings = replace(settings, kv_blocks=None if far else blocks)
    shard, total = work.shard, machine.usable
    outline = Outline(
        settings, hardware, spec, shard, work.dtype, limits, not cuda, total, layouts, kv, far, draft, lora
    )
    activations += far.device_bytes + cold_bytes(rows) if far else 0
    activations += outline.of_draft.beside if outline.of_draft else 0
    if may_share(outline) and not outline.may_rest:
        activations += shared_bytes(work.batch)
    return outline, Measured(activations, hardware, machine.rates.disk_to_host > 0, machine.rates)


def _weights_room(outline: Outline[LongRoom], measured: Measured) -> int:
    """Return the bytes that weights may take on the device. Raises BudgetError."""
    demand = outline.demand(measured.activations)
    return weights_room(outline.total, outline.layouts, demand, host_is_device=outline.one_memory)


def _too_small(outline: Outline[LongRoom], measured: Measured, machine: Machine) -> str:
    """Say what a device takes beside weights, and that it has no room for one group of these."""
    demand, limits = outline.demand(measured.activations), outline.limits
    kv = format_size((demand.fixed_blocks or 1) * demand.block_bytes)
    draft = f", {format_size(demand.draft_weights)} for the draft model" if outline.draft else ""
    batch = limits.max_sequences
    own = f", of which its driver and kernels take {format_size(machine.own)}" if machine.own else ""
    return (
        f"{f'a batch of {batch:,}' if batch > 1 else 'a sequence'} with a context of {limits.max_length:,} "
        f"takes {kv} of KV{draft} and {format_size(demand.beside)} for {demand.beside_parts}, which leaves "
        f"no room for one group of weights, {format_size(max(map(padded, outline.layouts)))}, in "
        f"{format_size(machine.device)} of the device{own}"
    )


def _least_device(spec: ModelSpec, layouts: Sequence[GroupLayout], machine: Machine, work: Work) -> int:
    """Return the MiB of the smallest device for which a boot can be planned; on a CPU those of all ranks."""
    ranks = work.settings.tensor_parallel if machine.host is None else 1

    def fits(size: int) -> bool:
        try:
            plan_boot(*_outline_of(spec, layouts, replace(machine, device=(size << 20) // ranks), work))
        except BudgetError:
            return False
        return True

    return bisect_left(range(_MOST), True, key=fits)


def _less(spec: ModelSpec, layouts: Sequence[GroupLayout], machine: Machine, work: Work) -> str:
    """Say which smaller batch, context or step leaves room for weights, each with the others as they are."""

    def fits(**other: int) -> bool:
        try:
            _weights_room(*_outline_of(spec, layouts, machine, replace(work, **other)))  # type: ignore[arg-type]
        except BudgetError:
            return False
        return True

    ways = []
    for name, unit, text in (
        ("batch", 1, "a batch of {:,}"),
        ("context", BLOCK_SIZE, "a context of {:,}"),
        ("step_tokens", BLOCK_SIZE, "--step-tokens {}"),
    ):
        least = work.batch if name == "step_tokens" else 1
        tried = range(-(-least // unit), -(-getattr(work, name) // unit))
        if count := bisect_left(tried, True, key=lambda units: not fits(**{name: units * unit})):
            ways.append(text.format(tried[count - 1] * unit))
    return " or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)


def _far(
    settings: Config,
    spec: ModelSpec,
    limits: SchedulerLimits,
    kv: KVLayout,
    hardware: Hardware,
    resident: int,
    blocks: int,
) -> LongRoom:
    """Return the room for so many blocks beyond the device, as a boot makes it where that is asked for.

    Raises BudgetError if host memory and the disk do not hold them.
    """
    there, disk, ranks = host_room(settings, hardware), settings.disk_kv_memory, settings.tensor_parallel
    layout = kv.in_fp8 if settings.host_kv_dtype == "fp8" else kv
    wanted = blocks * layout.block_bytes
    on_host = min(wanted, there) if disk is not None else wanted
    if on_host <= there:
        asked = replace(settings, host_kv_memory=max(on_host, layout.block_bytes) * ranks)
        least = replace(limits, max_step_tokens=max(limits.max_step_tokens, BLOCK_SIZE))
        local = local_spec(spec, Shard(ranks - 1, ranks))
        far = long_room(asked, local, least, kv, hardware, hardware.free, resident)
        if far is not None and far.blocks + far.on_disk >= blocks:
            return far
    behind = ", nor the disk (kv_store off leaves it more)" if disk is not None else ""
    raise BudgetError(
        f"KV of {limits.max_sequences:,} x {limits.max_length:,} tokens takes {format_size(wanted)}, which "
        f"neither the device holds nor the {format_size(there)} that host memory has for it{behind}; raise "
        "--host-memory, or lower --batch or --context"
    )
