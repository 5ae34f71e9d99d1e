"""A forecast for those who asked for it: as a table, and as one line of JSON with the same numbers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from penstock.arch import bounds
from penstock.arch.families import TensorNames
from penstock.arch.formats.recipe import name_of
from penstock.arch.layout import GroupKind, group_layouts
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.report import JsonLine
from penstock.base.tiers import Tier
from penstock.base.units import counted, format_size
from penstock.cli.columns import aligned, headed
from penstock.cli.figures import format_count, format_figure, format_pace, format_seconds
from penstock.cli.plan_drafts import WORDS, SpeculationShown
from penstock.engine.contexts import LongRoom
from penstock.engine.costs import StepCosts
from penstock.engine.cpu import cpu_note
from penstock.engine.cpu_share import CpuPart
from penstock.engine.forecast import ExpertTraffic, Forecast, Pace
from penstock.engine.gains import Gain, gains
from penstock.engine.machines import PROCESS
from penstock.engine.plan import BootPlan
from penstock.ops.row_classes import MOST_TOKENS
from penstock.weights.streaming.ring import Link
from penstock.worker.sizes import prefix_blocker, run_counts

ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a machine, in bytes, bytes/s or operations/s, and where it is from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Setting:
    """Holds a machine's figures by the flag that gives each, without dashes.

    machine: its name, if it is one that is known by name.
    """

    machine: str | None
    figures: Mapping[str, Figure]
    costs: StepCosts | None = None
    """Steps cost this there, if anybody measured it."""
    elsewhere: bool = False
    """Says that nobody measured steps here: these costs are of another CPU, and taken to hold here."""
    cpu_read: tuple[float, ...] = ()
    cpu_source: str = ""
    """Bytes/s that the CPU reads of what it computes, by class of rows, and where they are from."""


@dataclass(frozen=True, slots=True)
class TierHeld:
    """Bytes on a tier; `capacity` and `free` are None on DISK. On a CPU, what HOST has is taken from DEVICE.

    draft: weights and KV of a draft model. process: what it takes beside weights. groups: of each kind, how
    many rest there.
    """

    tier: Tier
    capacity: int | None
    weights: int
    ring: int
    kv: int
    state: int
    draft: int
    activations: int
    process: int
    free: int | None
    groups: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PaceShown:
    """`tokens`, `seconds`, `copied` and `read` are a pass's; `busy`: of its time, by link. `experts`: None
    where none stream. `cpu`: None where it computes nothing."""

    tokens_per_second: float
    tokens: float
    seconds: float
    copied: float
    read: float
    binding: str
    busy: Mapping[str, float]
    experts: ExpertTraffic | None = None
    cpu: CpuPart | None = None

    @classmethod
    def of(cls, pace: Pace) -> Self:
        """Return what is shown of a pace."""
        busy = {WORDS[link]: pace.share(link) for link in Link}
        return cls(
            pace.tokens_per_second,
            pace.tokens,
            pace.seconds,
            pace.copied,
            pace.read,
            WORDS[pace.binding],
            busy,
            pace.experts,
            pace.cpu,
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """A use of a group in a pass, where it rests, and its bytes."""

    group: str
    home: Tier
    size: int


@dataclass(frozen=True, slots=True)
class LongShown:
    """Shows the room for KV beyond the device, of one rank: blocks, tokens and bytes.

    dtype: of KV there. policies: those for tokens and for prompts. about: all of it in words.
    """

    host_blocks: int
    disk_blocks: int
    tile_tokens: int
    chunk_tokens: int
    host_bytes: int
    device_bytes: int
    store_bytes: int
    dtype: str
    policies: tuple[str, str]
    about: str

    @classmethod
    def of(cls, room: LongRoom, settings: Config) -> Self:
        """Return what is shown of a room that these settings ask for."""
        return cls(
            room.blocks,
            room.on_disk,
            room.tile_tokens,
            room.chunk_tokens,
            room.host_bytes,
            room.device_bytes,
            room.store_bytes,
            room.layout.dtype,
            (settings.attention_policy, settings.prefill_policy),
            str(room),
        )


@dataclass(frozen=True, slots=True)
class Report(JsonLine):
    """`kinds`: how many groups there are of each kind. `order`: of a pass, without experts.

    format: of weights of few bits; empty for dense ones, which have the dtype.
    ranks: how many compute together; weights, tiers and `far` are then those of the last.
    """

    model: str
    family: str
    layers: int
    parameters: int
    dtype: str
    format: str
    weights: int
    batch: int
    context: int
    step_tokens: int
    ranks: int
    setting: Setting
    everything_resident: bool
    steps: str
    """Says which steps are recorded as CUDA graphs, or why none is."""
    prefixes: str
    cpu: str
    """Say why prefixes are not shared, and what of experts the CPU computes; perhaps empty."""
    decode: PaceShown
    prefill: PaceShown
    far: LongShown | None
    speculation: SpeculationShown | None
    gains: tuple[Gain, ...]
    tiers: tuple[TierHeld, ...]
    kinds: Mapping[str, int]
    order: tuple[Cell, ...]

    @classmethod
    def of(cls, model: str, spec: ModelSpec, names: TensorNames, setting: Setting, found: Forecast) -> Self:
        """Return the report of a forecast for a model."""
        work, placement, far = found.work, found.placement, found.plan.outline.far
        layouts = group_layouts(spec, names, work.dtype)
        return cls(
            model=model,
            family=spec.family,
            layers=spec.layers,
            parameters=bounds.parameters(layouts),
            dtype=work.dtype,
            format=name_of(spec.format),
            weights=sum(found.resting(tier) for tier in Tier),
            batch=work.batch,
            context=work.context,
            step_tokens=work.step_tokens,
            ranks=work.shard.ranks,
            setting=setting,
            everything_resident=found.everything_resident,
            steps=_steps(found.plan),
            prefixes=_prefixes(found.plan),
            cpu=_cpu(found),
            decode=PaceShown.of(found.decode),
            prefill=PaceShown.of(found.prefill),
            far=LongShown.of(far, work.settings) if far else None,
            speculation=SpeculationShown.of(spec, names, found),
            gains=gains(spec, names, found),
            tiers=tuple(_held(found, tier) for tier in reversed(Tier)),
            kinds=dict(Counter(layout.id.kind.value for layout in layouts)),
            order=tuple(Cell(str(use.id), placement.homes[use.id], use.size) for use in placement.uses),
        )

    def __str__(self) -> str:
        blocks = (
            [self.title, f"  {self.subtitle}"],
            _machine(self.setting),
            _tiers(self),
            _homes(self),
            *([_far(self.far)] if self.far else []),
            _paces(self),
            *([self.speculation.lines()] if self.speculation else []),
            _gains(self),
        )
        return "\n\n".join("\n".join(block) for block in blocks)

    @property
    def title(self) -> str:
        """Name the model, its size and its dtype."""
        size = f"{format_size(self.weights)} of {self.kind_of_weights}"
        if self.ranks > 1:
            size += f" on each of {self.ranks} ranks"
        return (
            f"{self.model}: {self.family}, {counted(self.layers, 'layer')}, "
            f"{format_count(self.parameters)} parameters, {size}"
        )

    @property
    def kind_of_weights(self) -> str:
        """Name what weights rest in, and what is computed in."""
        rest = f"weights in {self.format} for {self.dtype}" if self.format else f"weights in {self.dtype}"
        return f"{rest} (activations up to 65,504)" if self.dtype == "float16" else rest

    @property
    def subtitle(self) -> str:
        """Name the work, and the machine if it has a name."""
        work = f"batch {self.batch:,}, context {self.context:,}, at most {self.step_tokens:,} tokens a step"
        return work + (f", on {self.setting.machine}" if self.setting.machine else "")


def _held(found: Forecast, tier: Tier) -> TierHeld:
    machine, budget, weights, ring = found.own, found.budget, found.resting(tier), found.ring(tier)
    kv = state = draft = activations = process = 0
    capacity: int | None = None
    if tier is Tier.DEVICE:
        capacity, kv, activations = machine.device - found.plan.beside, budget.kv, budget.activations
        state, beside = budget.state, found.work.draft
        if beside:
            kv -= budget.blocks * beside.block_bytes
            draft = budget.kv - kv + beside.weights
        process = machine.device - machine.usable
    elif tier is Tier.HOST:
        capacity, process = (
            (found.plan.beside, 0) if machine.host is None else (machine.host, min(PROCESS, machine.host))
        )
        kv = found.far
    taken = weights + ring + kv + state + draft + activations + process
    free = None if capacity is None else capacity - taken
    groups = Counter(id.kind.value for id, home in found.placement.homes.items() if home is tier)
    groups[GroupKind.EXPERT.value] += found.experts_on(tier)
    return TierHeld(
        tier,
        capacity,
        weights,
        ring,
        kv,
        state,
        draft,
        activations,
        process,
        free,
        {kind: count for kind, count in groups.items() if count},
    )


# ---- the table


def _machine(setting: Setting) -> list[str]:
    named = (setting.machine or "").partition(":")[0]
    rows = [
        (
            name.replace("_", " "),
            format_figure(name, figure.value),
            "" if figure.source == named else figure.source,
        )
        for name, figure in setting.figures.items()
    ]
    if setting.cpu_read:
        one, most = (format_figure("cpu_rate", rate) for rate in (setting.cpu_read[0], setting.cpu_read[-1]))
        rows.append(("cpu rate", f"{one}, of {MOST_TOKENS} rows {most}", setting.cpu_source))
    assumed = any(figure.source == ASSUMED for figure in setting.figures.values())
    steps = (
        "  What steps cost there was not measured: where the device binds, the pace is a bound. "
        "`penstock doctor` measures it on the machine itself."
    )
    if setting.costs:
        where = f"what they did on {setting.costs.device}, {setting.costs.measured}."
        assumed_too = "  Nobody measured steps here: they are taken to cost "
        steps = f"{assumed_too if setting.elsewhere else '  Steps cost '}{where}"
    return [
        "Machine",
        *aligned(rows, "<><"),
        *(["  What is assumed, `penstock doctor` measures."] if assumed else []),
        steps,
    ]


def _tiers(it: Report) -> list[str]:
    some = [name for name in ("state", "draft") if any(getattr(one, name) for one in it.tiers)]

    def held(one: TierHeld) -> list[str]:
        beside = [getattr(one, name) for name in some]
        sizes = (
            size or None for size in (one.weights, one.ring, one.kv, *beside, one.activations, one.process)
        )
        return [
            one.tier.value,
            *("-" if size is None else format_size(size) for size in (one.capacity, *sizes, one.free)),
        ]

    title = "Tiers of a rank" if it.ranks > 1 else "Tiers"
    head = [title, "capacity", "weights", "ring", "KV", *some, "activations", "process", "free"]
    return headed(head, map(held, it.tiers))


def _homes(it: Report) -> list[str]:
    rows = [(one.tier.value, homes(it, one)) for one in it.tiers if one.groups]
    far = any(one.kv for one in it.tiers if one.tier is not Tier.DEVICE)
    title = "Homes" + (
        f": all weights stay on the device, {'only KV' if far else 'nothing'} streams"
        if it.everything_resident
        else ""
    )
    return [title, *aligned(rows, "<<")]


def _far(far: LongShown) -> list[str]:
    lines = ["KV beyond the device", *(f"  {part}" for part in far.about.split("; "))]
    if any(policy != "full" for policy in far.policies):
        lines.append("  The pace is that of reading all of it; attention policies read less.")
    return lines


def _steps(plan: BootPlan[LongRoom]) -> str:
    if not plan.recorded:
        return f"Every kernel is launched by itself, since {plan.graph_blocker}."
    outline = plan.outline
    recorded = plan.record_runs and run_counts(outline.spec, outline.limits.max_step_tokens)
    runs = " and short prompts" if recorded else ""
    return f"Decode steps{runs} are recorded as CUDA graphs."


def _cpu(found: Forecast) -> str:
    plan, part = found.plan, found.decode.cpu
    if part is None:
        known = bool(found.own.rates.cpu_read)
        return cpu_note(plan.outline, plan.placement, plan.experts, known=known)
    what = "experts" if plan.experts else "feed-forwards"
    return (
        f"Of a decode step the CPU computes {part.groups:,.0f} {what}, {format_size(part.size)}, in "
        f"{format_seconds(part.seconds)}, with other roundings; without it a step takes "
        f"{format_seconds(part.alone)}."
    )


def _prefixes(plan: BootPlan[LongRoom]) -> str:
    why = prefix_blocker(plan.outline.spec)
    return f"Prefixes are not shared, since {why}." if why else ""


def _paces(it: Report) -> list[str]:
    def shown(name: str, pace: PaceShown) -> list[str]:
        rates = [
            format_pace(pace.tokens_per_second),
            format_seconds(pace.seconds),
            format_size(pace.copied),
            format_size(pace.read),
        ]
        return [name, *rates, *(f"{pace.busy[word]:.0%}" for word in WORDS.values()), f"the {pace.binding}"]

    head = [
        "Pace",
        "tokens/s",
        "a pass",
        "copied",
        "read",
        *(f"{word} busy" for word in WORDS.values()),
        "bound by",
    ]
    notes = [f"  {note}" for note in (it.steps, it.prefixes, it.cpu) if note]
    if experts := it.decode.experts:
        notes.append(
            f"  A decode step asks for {experts.asked:,.0f} experts; {experts.hits:.1%} of them are on the "
            f"device ({experts.source}), {experts.come:,.0f} come."
        )
    if it.ranks > 1:
        notes.append("  What ranks exchange takes time, too, which is left out.")
    return [*headed(head, [shown("decode", it.decode), shown("prefill", it.prefill)]), *notes]


def _gains(it: Report) -> list[str]:
    return headed(
        ["What more would buy, tokens/s", "decode", "prefill"],
        [[gain.more.value, *gain_texts(it, gain)] for gain in it.gains],
    )


def gain_texts(it: Report, gain: Gain) -> tuple[str, str]:
    """Return for decode and prefill what is gained in tokens/s, and in per cent; or `nothing`."""
    return _gain(gain.decode, it.decode.tokens_per_second), _gain(gain.prefill, it.prefill.tokens_per_second)


def _gain(more: float, now: float) -> str:
    return "nothing" if more < 5e-4 * now else f"+{format_pace(more)} ({more / now:+.1%})"


def homes(it: Report, held: TierHeld) -> str:
    """Say what rests on a tier, in words: `embedding, 12 of 80 attention`."""
    parts = []
    for kind, count in held.groups.items():
        whole = it.kinds[kind]
        parts.append(
            kind if whole == 1 else f"all {whole} {kind}" if count == whole else f"{count} of {whole} {kind}"
        )
    return ", ".join(parts)
