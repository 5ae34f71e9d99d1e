"""Measures what steps cost on a CPU, for `penstock plan`: in a model's dtype, with dense weights and with
those of few bits.

A step takes the least of several times, since others that share the cores only ever add to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.arch.formats.recipe import config_in
from penstock.base.config import Config
from penstock.base.cores import cpu_name
from penstock.base.units import counted
from penstock.bench.doctor.calibration import (
    Calibration,
    Ceilings,
    StepSample,
    ceilings_of,
    measured_now,
    run_of,
    step_sample,
)
from penstock.bench.doctor.fitting import UNKNOWN, least_squares, rate_of
from penstock.bench.shapes import HOST_LAYERS_OF
from penstock.bench.speed import measure
from penstock.engine.costs import DecodeCosts, PromptCosts, StepCosts
from penstock.engine.passes import decode_step, prompt_step
from penstock.engine.placing import Say
from penstock.weights.checkpoint.shape import Shape

ROWS = (1, 4, 16)
CONTEXTS = (64, 768)
PROMPTS = (128, 512)
OUTPUT, REPEAT = 16, 2
_CPU = torch.device("cpu")


def calibrate_host(
    dtype: str,
    format: str | None = None,
    *,
    shapes: Mapping[str, tuple[Mapping[str, object], tuple[int, int]]] = HOST_LAYERS_OF,
    say: Say = lambda _: None,
) -> Calibration:
    """Measure steps and fit costs to them, in half a minute on idle cores.

    format: of weights of few bits; None for dense ones. shapes: a config and two numbers of layers for each
    width.
    """
    samples: list[StepSample] = []
    for name, (config, depths) in shapes.items():
        for layers in depths:
            body = config_in(format, {**config, "num_hidden_layers": layers}, name)
            samples += _probe(name, Shape.of(dict(body), name), dtype)
        say(f"measured steps of {counted(depths[-1], 'layer')} of {name} in {format or dtype}")
    costs = fit_host(samples, ceilings_of(_CPU, dtype), dtype)
    errors = {
        f"{one.shape}, {one.layers} layers, {one.rows} rows after {one.context}": predicted(costs, one)
        / one.seconds
        - 1
        for one in samples
    }
    return Calibration(costs, tuple(samples), errors)


def predicted(costs: StepCosts, sample: StepSample) -> float:
    """Return the seconds that the costs give for a sample."""
    if sample.rows:
        return costs.decode_seconds(sample.rows, sample.work)
    return costs.chunk_seconds(sample.work)


def fit_host(samples: Sequence[StepSample], ceilings: Ceilings, dtype: str) -> StepCosts:
    """Return the costs of a CPU that give the samples' seconds with the least relative error."""
    decode = []
    for rows in sorted({sample.rows for sample in samples} - {0}):
        those = [sample for sample in samples if sample.rows == rows]
        table = [
            [1.0, it.layers, it.moe_layers, it.weights, it.experts, it.kv]
            for it in (one.work for one in those)
        ]
        step, layer, moe_layer, *slow = least_squares(table, [one.seconds for one in those])
        rates = [rate_of(each, ceilings.copy) for each in slow]
        decode.append(DecodeCosts(rows, step, layer, moe_layer, *rates))
    costs: dict[str, Any] = {"device": cpu_name(), "dtype": dtype, "measured": measured_now()}
    costs |= {"link_rate": ceilings.link, "device_read": ceilings.read, "compute": ceilings.compute}
    unknown = PromptCosts(UNKNOWN, UNKNOWN, UNKNOWN, ceilings.copy, 0.0, 0.0, 0.0, 0.0)
    found = StepCosts(**costs, decode=tuple(decode), prompt=unknown, host=True)
    prompts = [one for one in samples if not one.rows]
    works = [one.work for one in prompts]
    rest = [
        max(one.seconds - found.fixed_seconds(1, one.work) - one.work.activations / ceilings.copy, 0.0)
        for one in prompts
    ]
    slow = least_squares(
        [[it.products, it.expert_products, it.attention] for it in works],
        rest,
        [one.seconds for one in prompts],
    )
    products, experts, attention = (rate_of(each, UNKNOWN) for each in slow)
    return replace(found, prompt=replace(unknown, products=products, experts=experts, attention=attention))


def _probe(name: str, shape: Shape, dtype: str) -> Iterator[StepSample]:
    """Measure every kind of step of one model."""
    spec = shape.spec
    longest = max(*CONTEXTS, *PROMPTS) + 4 * OUTPUT + max(ROWS)
    config = Config(
        Path(), device="cpu", dtype=dtype, max_length=longest, max_sequences=max(ROWS), prefix_cache=False
    )
    with run_of(config, shape) as booted:
        for context in CONTEXTS:
            for rows in ROWS if context == CONTEXTS[0] else ROWS[:1]:
                decoded = measure.decode(booted, measure.BatchWork(rows, context, OUTPUT, REPEAT))
                step = decode_step(spec, dtype, rows, sum(decoded.lengths) / rows)
                yield step_sample(name, shape, dtype, step, rows, context, decoded.times.least)
        for tokens in PROMPTS:
            times = measure.prefill(booted, measure.BatchWork(1, tokens, 1, REPEAT))
            step = prompt_step(spec, dtype, 1, tokens, tokens)
            yield step_sample(name, shape, dtype, step, 0, tokens, times.least)
