"""Fitted costs are those that the measured steps had, and an engine can be measured."""

import math
from dataclasses import replace

import pytest
import torch

from penstock.bench.doctor.calibration import (
    LAUNCHED,
    Calibration,
    Ceilings,
    StepSample,
    calibrate,
    fit,
    predicted,
    work_of,
)
from penstock.bench.doctor.host_steps import fit_host
from penstock.bench.doctor.host_steps import predicted as predicted_on_host
from penstock.bench.shapes import HOST_LAYERS_OF, LAYERS_OF, SHAPES
from penstock.engine.costs import DecodeCosts, PromptCosts, StepCosts, prompt_seconds
from penstock.engine.passes import decode_step, prompt_step
from penstock.weights.checkpoint.shape import Shape

CEILINGS = Ceilings(link=5e10, read=4.2e12, copy=4e12, compute=8e14)
PROMPT = PromptCosts(7e14, 5e14, 6e14, CEILINGS.copy, 1e-3, 2e-3, 3e-4, 5e-4)
TRUE = StepCosts(
    "gpu",
    "bfloat16",
    "now",
    CEILINGS.link,
    CEILINGS.read,
    CEILINGS.compute,
    (
        DecodeCosts(1, 1e-5, 2e-5, 4e-5, 4e12, 3e12, 2e12),
        DecodeCosts(16, 3e-5, 4e-5, 6e-5, 3.9e12, 2e12, 2.5e12),
    ),
    PROMPT,
)


def samples() -> list[StepSample]:
    """What would be measured of every model on a device with the costs of TRUE."""
    found = []
    for name, (config, depths) in LAYERS_OF.items():
        for layers in depths:
            shape = Shape.of({**config, "num_hidden_layers": layers}, name)
            moe = sum(shape.spec.moe_layers)
            launches = (layers - moe, moe)
            for one in TRUE.decode:
                for context in (80, 2080):
                    work = work_of(shape, "bfloat16", decode_step(shape.spec, "bfloat16", one.rows, context))
                    seconds = TRUE.decode_seconds(one.rows, work)
                    found.append(StepSample(name, layers, one.rows, context, work, launches, seconds))
            for tokens in (LAUNCHED, 8192, 16384):
                work = work_of(shape, "bfloat16", prompt_step(shape.spec, "bfloat16", 1, tokens, tokens))
                launched = (
                    PROMPT.host_step + launches[0] * PROMPT.host_layer + launches[1] * PROMPT.host_moe_layer
                )
                found.append(
                    StepSample(
                        name, layers, 0, tokens, work, launches, max(prompt_seconds(PROMPT, work), launched)
                    )
                )
    return found


def test_the_costs_of_a_device_are_found_again() -> None:
    found = fit(samples(), CEILINGS, "gpu", "bfloat16", "now")
    for got, true in zip(found.decode, TRUE.decode, strict=True):
        for name in ("rows", "step", "layer", "moe_layer", "weight_read", "expert_read", "kv_read"):
            assert getattr(got, name) == pytest.approx(getattr(true, name), rel=1e-3), name
    for name in (
        "products",
        "experts",
        "attention",
        "activations",
        "step",
        "host_step",
        "host_layer",
        "host_moe_layer",
    ):
        assert getattr(found.prompt, name) == pytest.approx(getattr(PROMPT, name), rel=0.02), name
    assert replace(found, decode=(), prompt=PROMPT) == replace(TRUE, decode=())


def test_no_cost_is_negative_however_the_steps_scatter() -> None:
    shaken = [
        replace(sample, seconds=sample.seconds * (1 + 0.2 * math.sin(37 * number)))
        for number, sample in enumerate(samples())
    ]
    found = fit(shaken, CEILINGS, "gpu", "bfloat16", "now")
    StepCosts.parse(found.line(), "here")  # Which refuses what cannot be.
    apart = sorted(abs(predicted(found, sample) / sample.seconds - 1) for sample in shaken)
    assert apart[len(apart) // 2] < 0.2


def test_an_engine_is_measured() -> None:
    tiny = SHAPES["100M"] | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 256, "head_dim": 16}
    mixed = tiny | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    shapes = {
        "narrow": (tiny, (1, 2)),
        "wide": (tiny | {"hidden_size": 128}, (1, 2)),
        "mixed": (mixed, (1, 2)),
    }
    said: list[str] = []
    found = calibrate(
        torch.device("cpu"),
        "float32",
        shapes=shapes,
        rows=(1, 2),
        contexts=(16,),
        prompts=(),
        say=said.append,
    )
    assert isinstance(found, Calibration)
    assert [one.rows for one in found.costs.decode] == [1, 2]
    assert {(one.shape, one.layers, one.rows) for one in found.samples if one.rows} == {
        (name, layers, rows) for name in shapes for layers in (1, 2) for rows in (1, 2)
    }
    assert all(one.seconds > 0 for one in found.samples)
    assert StepCosts.parse(found.costs.line(), "here") == found.costs
    assert said == [f"measured steps of {name}" for name in shapes]


def test_the_costs_of_a_cpu_are_found_again() -> None:
    """Of steps in which launching and computing add up."""
    ceilings = Ceilings(link=1e10, read=3e10, copy=3e10, compute=4e11)
    decode = tuple(DecodeCosts(rows, 2e-4, 2e-4, 3e-4, 2e10 / rows, 1e10 / rows, 8e9) for rows in (1, 16))
    prompt = PromptCosts(2e11, 1e11, 3e11, ceilings.copy, 0.0, 0.0, 0.0, 0.0)
    true = replace(TRUE, host=True, decode=decode, prompt=prompt)
    found = []
    for name, (config, depths) in HOST_LAYERS_OF.items():
        for layers in depths:
            shape = Shape.of({**config, "num_hidden_layers": layers}, name)
            for one in true.decode:
                for context in (80, 800):
                    work = work_of(shape, "bfloat16", decode_step(shape.spec, "bfloat16", one.rows, context))
                    seconds = true.decode_seconds(one.rows, work)
                    found.append(StepSample(name, layers, one.rows, context, work, (0, 0), seconds))
            for tokens in (128, 512):
                work = work_of(shape, "bfloat16", prompt_step(shape.spec, "bfloat16", 1, tokens, tokens))
                found.append(StepSample(name, layers, 0, tokens, work, (0, 0), true.chunk_seconds(work)))
    costs = fit_host(found, ceilings, "bfloat16")
    assert costs.host
    for got, right in zip(costs.decode, true.decode, strict=True):
        assert (got.layer, got.weight_read) == pytest.approx((right.layer, right.weight_read), rel=1e-2)
    for sample in found:
        assert predicted_on_host(costs, sample) == pytest.approx(sample.seconds, rel=0.02)
