"""Shows the machine at this moment, as the page has it beside the chat, in numbers that others count. No
paths, and nothing of any prompt but how long it is."""

from collections import deque
from dataclasses import dataclass
from time import perf_counter

import torch

from penstock.api.snapshots import MemoryUse
from penstock.arch.formats.recipe import name_of
from penstock.base.meter import KVStats, MeterSample, Passes, PromptProgress, TierStats, WeightStats
from penstock.base.tiers import Tier
from penstock.engine.engine import Stats
from penstock.memory.device import device_name, free_memory, total_memory
from penstock.server.broker.backend import LocalBackend
from penstock.server.broker.broker import RequestBroker
from penstock.server.broker.calls import Call
from penstock.server.broker.metrics import NO_KV, NO_TIERS
from penstock.server.monitoring.counts import CacheState, MissedState, SpeculationState
from penstock.server.monitoring.served import ServedModel

_WINDOW = 2.0
"""Seconds over which rates are taken; two passes of weights that stream, where these are longer."""
_STALE = 10.0
"""Seconds without a look after which rates begin anew, if passes are not longer."""
_CLOSE = 0.1
"""Seconds between two looks that are both kept, at least: several pages may ask."""
_LETTERS = {Tier.DEVICE: "D", Tier.HOST: "H", Tier.DISK: "S"}
_MOST_WAITING = 32
"""Outputs that wait which are described one by one."""
_PATIENCE = 0.5
"""Seconds after which a prompt is shown: what is computed sooner comes and goes too fast to be read."""


@dataclass(frozen=True, slots=True)
class TierPart:
    """Counts the bytes of a tier that one thing takes."""

    what: str
    """weights, ring (weights on their way), beside (the host's part of weights, on a CPU), kv (of requests),
    kept (KV for later ones), empty (room for KV), recurrent (state of sequences), activations, other,
    free."""
    bytes: int


@dataclass(frozen=True, slots=True)
class TierState:
    """Divides the memory of a tier into parts, which add up to it.

    bytes: all that penstock may use of the device, all there is of host memory, and all that penstock has on
        disk or may put there.
    """

    tier: str
    bytes: int
    parts: tuple[TierPart, ...]


@dataclass(frozen=True, slots=True)
class LinkState:
    """Measures the traffic of a link, in bytes per second.

    ceiling: as measured at start, 0 if it was not.
    waited: share of the time for which arithmetic waited for weights because of it.
    """

    link: str
    weights: float
    kv: float
    ceiling: float
    waited: float


@dataclass(frozen=True, slots=True)
class PromptState:
    """Follows a prompt that is being computed.

    rate: tokens a second; None if not known yet.
    left: seconds; None if not known yet.
    """

    reached: int
    length: int
    rate: float | None
    left: float | None


@dataclass(frozen=True, slots=True)
class WaitState:
    """Describes an output that waits.

    place: outputs that wait before it. length: tokens of its prompt. left: seconds until its first token, by
    forecast; None if not known yet.
    """

    place: int
    length: int
    left: float | None


@dataclass(frozen=True, slots=True)
class PlanState:
    """Places the weights, and counts the bytes that a pass over them moves.

    decode_predicted: seconds of a pass that decodes one sequence, as predicted at start; 0 if it was not.
    decode_seconds, prefill_seconds: seconds that a decode pass and a pass with some of a prompt have taken
        lately; 0 if there was none. Compare a prediction with its kind alone.
    binding: the bound of a decode pass, "disk", "link" or "compute"; empty if nothing streams.
    """

    device: int
    host: int
    disk: int
    copied: int
    read: int
    decode_predicted: float
    decode_seconds: float
    prefill_seconds: float
    binding: str


@dataclass(frozen=True, slots=True)
class ExpertState:
    """Counts the experts of a mixture that layers were asked for since the start, where not all of them rest
    on the device.

    device, host, disk: by the tier where they were.
    copied, read: bytes that came for them, to the device and from disk.
    recent_asked, recent_hit: those that were asked for lately, and were on the device.
    rate: bytes a second that came to the device lately.
    age: seconds since it was so: a device that counts is not waited for while steps run.
    """

    device: int
    host: int
    disk: int
    copied: int
    read: int
    recent_asked: int
    recent_hit: int
    rate: float
    age: float


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Shows the experts of a layer, in their order.

    asked: how many of a thousand recent steps asked for each; the longer ago a step was, the less it counts.
    where: a letter for each: D on the device, in a slot or for good, H in host memory, S on disk.
    """

    layer: int
    asked: tuple[int, ...]
    where: str


@dataclass(frozen=True, slots=True)
class ExpertsState:
    """Shows the experts of all layers that have some; of none where all of them rest on the device.

    age: seconds since it was so.
    """

    layers: tuple[ExpertLayer, ...]
    age: float


@dataclass(frozen=True, slots=True)
class State:
    """Describes the machine at this moment: of several models, as that has it which was used last."""

    model: str
    family: str
    layers: int
    dtype: str
    format: str
    """The format of weights of few bits; empty for dense ones, which have the dtype."""
    device: str
    longest: int
    open: bool
    """The server takes requests."""
    running: int
    waiting: int
    output_tokens: int
    output_rate: float
    computed_rate: float
    """Tokens a second: of outputs, and all that were computed."""
    prompt: PromptState | None
    queue: tuple[WaitState, ...]
    """The first outputs that wait, in the order in which they are likely to come."""
    tiers: tuple[TierState, ...]
    links: tuple[LinkState, ...]
    cache: CacheState
    plan: PlanState
    missed: MissedState
    experts: ExpertState | None
    """Counts of experts. None where all of them rest on the device, and before any was asked for."""
    speculation: SpeculationState | None = None
    """Counts of drafts. None where nothing drafts."""
    models: tuple[ServedModel, ...] = ()
    """The models of a server that loads them at their first use."""


@dataclass(frozen=True, slots=True)
class _Look:
    """Keeps what was counted at a moment."""

    counts: MeterSample
    stats: Stats

    def is_of_another(self, before: "_Look") -> bool:
        """Tell whether it is of another engine than one before, which counts from 0: the model has slept."""
        ours, theirs = self.counts.weights.passes, before.counts.weights.passes
        return self.stats.steps < before.stats.steps or ours < theirs


class StateMonitor:
    """Looks at a model again and again. Runs on the broker's loop: it reads what steps change as they leave
    it, and waits for nothing."""

    def __init__(self, backend: LocalBackend, broker: RequestBroker, name: str) -> None:
        """name: of the model, as clients know it."""
        self._backend, self._llm, self._broker, self._name = backend, backend.llm, broker, name
        self._on = torch.device(self._llm.device)
        self._seen = deque[_Look]()
        self._prompt: tuple[Call, PromptProgress] | None = None

    def look(self) -> State:
        """Return the state at this moment."""
        memory, stats = self._llm.memory, self._backend.stats
        weights, kv = memory.weights, memory.kv
        now = _Look(MeterSample(perf_counter(), weights, kv), stats)
        first = self._since(now)
        seconds = now.counts.when - first.counts.when

        def rate(counted: float) -> float:
            return counted / seconds if seconds > 0 else 0.0

        spec, found, missed, drafter = self._llm.spec, memory.prefixes, stats.missed, self._llm.drafter
        computed = max(found.prompt_tokens - found.device - found.host - found.disk, 0)
        return State(
            model=self._name,
            family=spec.family,
            layers=spec.layers,
            dtype=self._llm.dtype,
            format=name_of(spec.format),
            device=device_name(self._on, self._llm.threads),
            longest=self._llm.limits.max_model_len,
            open=self._broker.open and not self._broker.paused,
            running=stats.running,
            waiting=max(self._broker.outputs - stats.running, stats.waiting),
            output_tokens=stats.output_tokens,
            output_rate=rate(stats.output_tokens - first.stats.output_tokens),
            computed_rate=rate(stats.computed_tokens - first.stats.computed_tokens),
            prompt=self._prompt_at(now.counts.when),
            queue=tuple(
                WaitState(place, length, left)
                for place, (length, left) in enumerate(self._broker.queue(_MOST_WAITING))
            ),
            tiers=(
                _on_device(stats, memory),
                _on_host(stats.tiers, memory),
                _on_disk(stats.tiers, memory),
            ),
            links=_links(first, now, seconds),
            cache=CacheState(computed, found.device, found.host, found.disk),
            plan=_plan(memory, first.stats.passes, stats.passes),
            missed=MissedState(
                missed.choices, missed.fallbacks, missed.read, missed.most, missed.worst, missed.mean
            ),
            experts=_experts(first.counts.weights, weights, seconds),
            speculation=SpeculationState.of(stats, drafter) if drafter != "off" else None,
        )

    def experts(self) -> ExpertsState:
        """Return the use of each expert. May be called on any thread."""
        found = self._llm.expert_map()
        layers = [
            ExpertLayer(
                one.layer,
                tuple(round(1000 * rate) for rate in one.rates),
                "".join(_LETTERS[tier] for tier in one.tiers),
            )
            for one in found.layers
        ]
        return ExpertsState(tuple(layers), found.age)

    def _since(self, now: _Look) -> _Look:
        """Return the look from which on rates are taken."""
        seen, when = self._seen, now.counts.when
        window = max(_WINDOW, 2 * now.counts.weights.predicted) if now.counts.weights.streams else _WINDOW
        if seen and (when - seen[-1].counts.when > max(_STALE, window) or now.is_of_another(seen[-1])):
            seen.clear()
        if not seen or when - seen[-1].counts.when >= _CLOSE:
            seen.append(now)
        while len(seen) > 2 and when - seen[1].counts.when >= window:
            seen.popleft()
        return seen[0]

    def _prompt_at(self, now: float) -> PromptState | None:
        call, progress, stats = self._broker.reading, self._llm.progress, self._backend.stats
        # A prompt without computed tokens may still be waiting.
        if call is None or not (progress.reached or stats.waiting == 0):
            self._prompt = None
            return None
        if self._prompt is None or self._prompt[0] is not call:
            self._prompt = call, PromptProgress(len(call.prompt.tokens), now, progress.computed)
        prompt = self._prompt[1]
        prompt.see(now, progress.reached, progress.computed)
        if now - prompt.begin < _PATIENCE:
            return None
        rate = prompt.rate
        # Until a step of it is over between two looks, what it had reached before is not known by
        # `prompt`.
        reached = max(prompt.reached, min(progress.reached, prompt.length))
        return PromptState(
            reached, prompt.length, rate or None, prompt.left(now) if rate and prompt.reached else None
        )


def _on_device(stats: Stats, memory: MemoryUse) -> TierState:
    budget, weights, block = memory.budget, memory.weights, memory.budget.block_bytes
    beside = budget.weights - weights.device - weights.device_ring
    parts = [TierPart("weights", weights.device)]
    parts += [
        TierPart(what, size) for what, size in (("ring", weights.device_ring), ("beside", beside)) if size > 0
    ]
    held = (stats.kv_blocks - stats.kv_blocks_free) * block
    parts += _kv_parts(budget.kv, held, stats.kv_blocks_cached * block)
    if budget.state:
        parts.append(TierPart("recurrent", budget.state))
    parts.append(TierPart("activations", budget.activations))
    return _tier("device", budget.total, parts)


def _on_host(tiers: TierStats | None, memory: MemoryUse) -> TierState:
    host, kv, weights = torch.device("cpu"), memory.kv, memory.weights
    whole, free = total_memory(host), free_memory(host)
    parts = [
        TierPart(what, size)
        for what, size in (("weights", weights.host), ("ring", weights.host_ring))
        if size
    ]
    if kv is not None:
        kept = tiers.cached_host * _host_block(memory, kv) if tiers is not None else 0
        parts += _kv_parts(kv.room, kv.host, kept)
    # What is pinned for penstock is not free, and neither is what others have.
    parts.append(TierPart("other", max(whole - free - sum(part.bytes for part in parts), 0)))
    return _tier("host", whole, parts)


def _on_disk(tiers: TierStats | None, memory: MemoryUse) -> TierState:
    kv, parts = memory.kv, [TierPart("weights", memory.weights.disk)] if memory.weights.disk else []
    room = memory.disk_blocks * _host_block(memory, kv) if kv is not None else 0
    if kv is not None and room:
        parts += _kv_parts(room, kv.disk, tiers.disk_bytes if tiers is not None else 0)
    return _tier("disk", sum(part.bytes for part in parts), parts)


def _host_block(memory: MemoryUse, kv: KVStats) -> int:
    """Return the bytes of a KV block on the host."""
    return kv.room // memory.host_blocks


def _plan(memory: MemoryUse, before: Passes, after: Passes) -> PlanState:
    weights = memory.weights
    return PlanState(
        weights.device,
        weights.host,
        weights.disk,
        memory.copied_per_pass,
        memory.read_per_pass,
        weights.predicted,
        after.decode_pass(before),
        after.prefill_pass(before),
        weights.binding if weights.streams else "",
    )


def _experts(first: WeightStats, now: WeightStats, seconds: float) -> ExpertState | None:
    found, since = now.experts, now.experts.since(first.experts)
    if not found.asked:
        return None
    return ExpertState(
        **found.found,
        copied=found.copied,
        read=found.read,
        recent_asked=since.asked,
        recent_hit=since.hit,
        rate=since.rate(seconds) if seconds > 0 else 0.0,
        age=found.age,
    )


def _kv_parts(room: int, held: int, kept: int) -> list[TierPart]:
    """Divide room for KV into what requests hold, what is kept for later ones, and what is empty."""
    kept = max(min(kept, room - held), 0)
    return [TierPart("kv", held), TierPart("kept", kept), TierPart("empty", max(room - held - kept, 0))]


def _tier(name: str, size: int, parts: list[TierPart]) -> TierState:
    """Return a tier with what is left. It is no smaller than what was counted on it: some may have moved."""
    taken = sum(part.bytes for part in parts)
    if size > taken:
        parts = [*parts, TierPart("free", size - taken)]
    return TierState(name, max(size, taken), tuple(parts))


def _links(first: _Look, now: _Look, seconds: float) -> tuple[LinkState, ...]:
    """Return the links that something has crossed or is meant to."""
    before, after = first.counts, now.counts
    weights, flow = after.weights, after.weights.since(before.weights).flow(seconds)
    tiers, tiers_before = now.stats.tiers or NO_TIERS, first.stats.tiers or NO_TIERS
    kv, kv_before = after.kv or NO_KV, before.kv or NO_KV
    up = kv.copied - kv_before.copied + tiers.up.bytes - tiers_before.up.bytes
    inward = kv.read - kv_before.read + tiers.inward.bytes - tiers_before.inward.bytes
    links = []
    if weights.copied or weights.link_rate or after.kv is not None:
        rate = up / seconds if seconds > 0 else 0.0
        links.append(LinkState("host to device", flow.copied, rate, weights.link_rate, flow.waited_link))
    if weights.disk or kv.read or tiers.disk_bytes or tiers.inward.bytes:
        rate = inward / seconds if seconds > 0 else 0.0
        links.append(LinkState("disk to host", flow.read, rate, weights.disk_rate, flow.waited_disk))
    return tuple(links)
