"""Measures what steps cost on a device beyond the bytes they move, for `penstock plan`.

The engine runs models of a few layers with random weights, in the widths that real models have, and
`StepCosts` are fitted to the times of its steps.

Two depths of each width tell what a layer takes from what a step does; several widths tell what a layer takes
whatever its size from the rate at which its weights are read.
"""

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from penstock.arch.layout import GroupKind, group_layouts
from penstock.base.config import Config
from penstock.base.errors import BudgetError, DeviceError
from penstock.base.units import counted
from penstock.bench.doctor.fitting import UNKNOWN, least_squares, rate_of
from penstock.bench.machine import machine
from penstock.bench.shapes import LAYERS_OF
from penstock.bench.speed import measure
from penstock.engine.boot import Booted, boot
from penstock.engine.costs import DecodeCosts, PromptCosts, StepCosts, prompt_seconds
from penstock.engine.passes import StepShape, UseWork, decode_step, mixtures_of, pass_work, prompt_step
from penstock.engine.placing import Override, Say
from penstock.memory.device import device_name, give_back
from penstock.memory.probe import copy_rate, matmul_rate, memory_copy, memory_read
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.residency import WeightLimits, padded, pass_order

ROWS = (1, 4, 16, 64, 256)
CONTEXTS = (64, 2048, 16384)
PROMPTS = (2048, 8192, 16384)
LAUNCHED = 640
"""Tokens of a prompt that is not replayed as a graph, and which the device computes faster than the host
launches it."""
KV_TOKENS = 64 * (2048 + 256)
"""Most tokens in KV, of all sequences together."""
SURE = 1.2
"""A prompt counts as the device's where it takes so many times what launching it does."""
OUTPUT, REPEAT = 32, 3
STREAMED_STEPS, STREAMED_SPAN = 48, 8
"""Steps before any is timed and as many that are, in spans of so many: counters are read between spans
alone."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """Holds what was measured of one kind of step of one model.

    rows: sequences that are decoded; 0 for a prompt.
    work: all that the step does.
    launches: how many dense layers, and layers with experts.
    seconds: the median.
    """

    shape: str
    layers: int
    rows: int
    context: int
    work: UseWork
    launches: tuple[int, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Costs that were fitted to samples. errors: predicted over measured seconds, less one, of every
    sample."""

    costs: StepCosts
    samples: tuple[StepSample, ...]
    errors: Mapping[str, float]

    @property
    def typical(self) -> float:
        """Return the median error: half of them are smaller."""
        return statistics.median(map(abs, self.errors.values()))

    @property
    def worst(self) -> float:
        """Return the largest error."""
        return max(map(abs, self.errors.values()), default=0.0)


def calibrate(
    device: torch.device,
    dtype: str,
    *,
    shapes: Mapping[str, tuple[Mapping[str, object], tuple[int, int]]] = LAYERS_OF,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    prompts: Sequence[int] = PROMPTS,
    say: Say = lambda _: None,
) -> Calibration:
    """Measure steps and fit costs to them, in about a minute on a GPU. Raises DeviceError where not even two
    widths fit on the device. shapes: a config and two numbers of layers for each width."""
    samples: list[StepSample] = []
    for name, (config, depths) in shapes.items():
        for layers in depths:
            shape = Shape.of({**config, "num_hidden_layers": layers}, name)
            try:
                samples += _probe(name, shape, device, dtype, rows, contexts, prompts)
            except BudgetError:
                say(f"{name} with {counted(layers, 'layer')} does not fit beside its KV: left out")
        say(f"measured steps of {name}")
    if len({sample.shape for sample in samples}) < 2:
        raise DeviceError(
            f"{device_name(device)} has too little free memory for the models that steps are measured with; "
            "close what uses it, and run again"
        )
    ceilings = ceilings_of(device, dtype)
    costs = fit(samples, ceilings, device_name(device), dtype, measured_now())
    if device.type == "cuda":
        host, slots = (
            _expert_layer(shapes, device, dtype, samples, costs, copies=copies) for copies in (False, True)
        )
        costs = replace(costs, expert_layer=host, slot_layer=slots)
    return Calibration(
        costs,
        tuple(samples),
        {_title(sample): predicted(costs, sample) / sample.seconds - 1 for sample in samples},
    )


def predicted(costs: StepCosts, sample: StepSample) -> float:
    """Return the seconds that the costs give for a sample."""
    if sample.rows:
        return costs.decode_seconds(sample.rows, sample.work)
    prompt, (dense, moe) = costs.prompt, sample.launches
    launched = prompt.host_step + dense * prompt.host_layer + moe * prompt.host_moe_layer
    return max(prompt_seconds(prompt, sample.work), launched)


# ---- measuring


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Holds the rates of a device: bytes/s of the link to it, of its memory read, and of its memory copied
    counting both, and operations/s of a large product."""

    link: float
    read: float
    copy: float
    compute: float


def ceilings_of(device: torch.device, dtype: str) -> Ceilings:
    """Measure the rates of a device."""
    found = []
    for measured in (
        copy_rate,
        memory_read,
        memory_copy,
        lambda device: matmul_rate(device, getattr(torch, dtype)),
    ):
        found.append(measured(device))
        give_back(device)  # What one leaves must not keep the next one's memory in parts.
    link, read, copy, compute = found
    return Ceilings(link, read, copy, compute)


def _probe(
    name: str,
    shape: Shape,
    device: torch.device,
    dtype: str,
    rows: Sequence[int],
    contexts: Sequence[int],
    prompts: Sequence[int],
) -> Iterator[StepSample]:
    """Measure every kind of step of one model, in one engine with one KV for all of them."""
    spec = shape.spec
    longest = max(*contexts, *prompts, LAUNCHED) + 4 * OUTPUT + max(rows)
    least = Config(
        Path(),
        device=str(device),
        dtype=dtype,
        max_length=longest,
        max_sequences=max(rows),
        prefix_cache=False,
        host_kv_memory="0",
    )
    with run_of(least, shape) as booted:
        if not booted.weights.all_stay:
            raise BudgetError(f"{name} does not fit into the device memory that is free; free some of it")
        for context in contexts:
            for count in rows:
                work = measure.BatchWork(count, context, OUTPUT, REPEAT)
                if count * work.room(booted.limits.max_step_tokens) > min(
                    KV_TOKENS, booted.budget.kv_tokens // 2
                ):
                    continue
                decoded = measure.decode(booted, work)
                step = decode_step(spec, dtype, count, sum(decoded.lengths) / count)
                yield step_sample(name, shape, dtype, step, count, context, decoded.times.median)
        for tokens in (LAUNCHED, *prompts):
            if tokens <= min(booted.limits.max_step_tokens, booted.budget.kv_tokens // 2):
                times = measure.prefill(booted, measure.BatchWork(1, tokens, 1, REPEAT))
                yield step_sample(
                    name, shape, dtype, prompt_step(spec, dtype, 1, tokens, tokens), 0, tokens, times.median
                )


def step_sample(
    name: str, shape: Shape, dtype: str, step: StepShape, rows: int, context: int, ms: float
) -> StepSample:
    """Return what was measured of a step. ms: its milliseconds."""
    moe = sum(shape.spec.moe_layers)
    return StepSample(
        name,
        shape.spec.layers,
        rows,
        context,
        work_of(shape, dtype, step),
        (shape.spec.layers - moe, moe),
        ms / 1e3,
    )


def work_of(shape: Shape, dtype: str, step: StepShape) -> UseWork:
    """Return all that a pass does."""
    layouts = group_layouts(shape.spec, shape.names, dtype)
    every = pass_order(layouts, shape.spec.tied_embeddings)
    return UseWork.sum(pass_work(shape.spec, dtype, every, mixtures_of(layouts), step))


@contextmanager
def run_of(config: Config, shape: Shape, override: Override | None = None) -> Iterator[Booted]:
    """Lend an engine of random weights in a shape."""
    booted = boot(config, shape, override=override)
    device = booted.device
    try:
        with closing(booted.engine):
            yield booted
    finally:
        del booted
        give_back(device)


def _expert_layer(
    shapes: Mapping[str, tuple[Mapping[str, object], tuple[int, int]]],
    device: torch.device,
    dtype: str,
    samples: Sequence[StepSample],
    costs: StepCosts,
    *,
    copies: bool = False,
) -> float:
    """Return the seconds that a layer of a decode step takes more where half of its experts are in host
    memory, without those of their copies.

    costs: without these seconds. copies: the device decides which come, and host memory has all.
    """
    found = [
        (name, config, depths[-1]) for name, (config, depths) in shapes.items() if "num_experts" in config
    ]
    for name, config, layers in found:
        resident = [
            one.seconds
            for one in samples
            if (one.shape, one.layers, one.rows, one.context) == (name, layers, 1, CONTEXTS[0])
        ]
        if not resident:
            continue
        shape = Shape.of({**config, "num_hidden_layers": layers}, name)
        layouts = group_layouts(shape.spec, shape.names, dtype)
        whole = sum(map(padded, layouts))
        half = sum(padded(layout) for layout in layouts if layout.id.kind is GroupKind.EXPERT) // 2
        config_of = Config(
            Path(), device=str(device), dtype=dtype, max_length=2048, max_sequences=1, prefix_cache=False
        )
        on_host = half * (5 if copies else 3) // 2
        limits = WeightLimits(whole - half, on_host, copies=copies)
        with run_of(config_of, shape, Override(limits)) as booted:
            rng = random.Random(0)
            [request] = measure.submit(
                booted.engine,
                measure.BatchWork(1, CONTEXTS[0], 2 * STREAMED_STEPS, 1),
                shape.spec.vocab_size,
                rng,
            )
            got = {request: 0}
            while got[request] <= STREAMED_STEPS:
                measure.step(booted.engine, got)
            spans = [
                measure.time_decode(booted, got, STREAMED_SPAN)
                for _ in range(STREAMED_STEPS // STREAMED_SPAN)
            ]
            link, room = booted.weights.stats().link_rate, booted.weights.room
        mixtures, moe = sum(shape.spec.moe_layers), shape.spec.moe
        assert moe is not None
        assert room is not None
        spent = []
        for span in spans:
            coming = span.copied / link
            if copies:
                come = span.copied / room.mean
                coming = costs.slot_seconds(1, mixtures, mixtures * moe.top_k, come, room.mean, link)
            spent.append(statistics.fmean(span.seconds) - coming)
        return max(statistics.median(spent) - resident[0], 0.0) / mixtures
    return 0.0


def measured_now() -> str:
    """Return the date and versions of a measurement."""
    about = machine()
    return f"{about.date}, penstock {about.commit or about.penstock}, torch {about.torch}"


# ---- fitting


def fit(
    samples: Sequence[StepSample], ceilings: Ceilings, device: str, dtype: str, measured: str
) -> StepCosts:
    """Return the costs that give the samples' seconds with the least relative error. device, dtype, measured:
    noted in the costs."""
    decode = []
    for rows in sorted({sample.rows for sample in samples} - {0}):
        those = [sample for sample in samples if sample.rows == rows]
        works = [sample.work for sample in those]
        table = [[1.0, it.layers, it.moe_layers, it.weights, it.experts, it.kv] for it in works]
        step, layer, moe_layer, *slow = least_squares(table, [sample.seconds for sample in those])
        decode.append(
            DecodeCosts(rows, step, layer, moe_layer, *(rate_of(each, ceilings.copy) for each in slow))
        )
    prompt = _prompt_costs([sample for sample in samples if not sample.rows], ceilings.copy)
    return StepCosts(
        device, dtype, measured, ceilings.link, ceilings.read, ceilings.compute, tuple(decode), prompt
    )


def _prompt_costs(samples: Sequence[StepSample], moved: float) -> PromptCosts:
    """Fit the costs of prompts. Rates come from what one layer more takes, which leaves out what a step takes
    once. Only layers count that the device takes longer to compute than the host to launch."""
    pairs = _pairs(samples)
    launched = [_Grown.of(few, many) for few, many in pairs if few.context == LAUNCHED]
    dense, mixed = (_launching([one for one in launched if one.moe is moe]) for moe in (False, True))
    at_least = [
        one.seconds - one.launches[0] * dense - one.launches[1] * mixed
        for one in samples
        if one.context == LAUNCHED
    ]
    host_step = max(min(at_least, default=0.0), 0.0)

    def is_the_devices(sample: StepSample) -> bool:
        launched = host_step + sample.launches[0] * dense + sample.launches[1] * mixed
        return sample.context > LAUNCHED and sample.seconds > SURE * launched

    bound = [_Grown.of(few, many) for few, many in pairs if is_the_devices(few) and is_the_devices(many)]
    slow = [0.0, 0.0, 0.0]
    if bound:
        rest = [one.seconds - one.work.activations / moved for one in bound]
        table = [[one.work.products, one.work.expert_products, one.work.attention] for one in bound]
        slow = least_squares(table, rest, [one.seconds for one in bound])
    products, experts, attention = (rate_of(each, UNKNOWN) for each in slow)
    costs = PromptCosts(products, experts, attention, moved, 0.0, host_step, dense, mixed)
    rest = [
        sample.seconds - prompt_seconds(costs, sample.work) for sample in samples if is_the_devices(sample)
    ]
    return replace(costs, step=max(statistics.median(rest), 0.0) if rest else 0.0)


def _launching(grown: Sequence["_Grown"]) -> float:
    """Return the seconds in which the host launches a layer.

    It is the mean of what a layer more takes in the two narrowest models, where the device has least to do
    for the same launches. Of models with experts the second is too wide for that.
    """
    narrow = sorted(grown, key=lambda one: one.work.operations)[: 1 if any(one.moe for one in grown) else 2]
    return max(statistics.fmean(one.seconds for one in narrow), 0.0) if narrow else 0.0


@dataclass(frozen=True, slots=True)
class _Grown:
    """The seconds and the work that one layer more adds to a prompt's step."""

    context: int
    moe: bool
    seconds: float
    work: UseWork

    @classmethod
    def of(cls, few: StepSample, many: StepSample) -> "_Grown":
        more = many.layers - few.layers
        work = UseWork(
            *(
                (getattr(many.work, field.name) - getattr(few.work, field.name)) / more
                for field in fields(UseWork)
            )
        )
        return cls(many.context, many.launches[1] > 0, (many.seconds - few.seconds) / more, work)


def _pairs(samples: Sequence[StepSample]) -> list[tuple[StepSample, StepSample]]:
    """Return pairs of samples of the same shape and prompt: of the fewest layers and of the most."""
    by: dict[tuple[str, int], list[StepSample]] = {}
    for sample in samples:
        by.setdefault((sample.shape, sample.context), []).append(sample)
    ordered = [sorted(those, key=lambda one: one.layers) for those in by.values()]
    return [(those[0], those[-1]) for those in ordered if those[0].layers < those[-1].layers]


def _title(sample: StepSample) -> str:
    what = f"{sample.rows} rows after {sample.context:,}" if sample.rows else f"prompt of {sample.context:,}"
    return f"{sample.shape}, {sample.layers} layers, {what}"
