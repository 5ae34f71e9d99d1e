"""Recorded decode steps on a GPU: the tokens of every family are those of steps that are not, and steps run
ahead of each other."""

import random
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton import knobs

import tiny
from penstock import LLM, SamplingParams
from penstock.api import opening as api
from penstock.arch.layout import group_layouts
from penstock.base.config import Config
from penstock.bench.shapes import SHAPES
from penstock.bench.speed.throughput import OfflineRequest, _round
from penstock.engine.boot import boot
from penstock.engine.placing import Override
from penstock.memory.device import give_back
from penstock.ops.triton import attention as triton_attention
from penstock.ops.triton import linear as triton_linear
from penstock.step.plan import Plan
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.residency import WeightLimits, padded
from penstock.worker.graphs import DecodeGraphs
from penstock.worker.runner import Runner
from penstock.worker.sizes import graph_blocker

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "check": True,
    "max_length": 128,
    "max_step_tokens": 64,
    "block_size": 4,
    "max_sequences": 12,
}
GREEDY = SamplingParams(temperature=0, max_tokens=tiny.OUTPUT, ignore_eos=True, logprobs=0)
QUICK = SamplingParams(temperature=0, max_tokens=tiny.OUTPUT, ignore_eos=True)


@pytest.mark.parametrize("name", sorted(tiny.CASES))
def test_tokens_are_those_of_steps_that_are_not_recorded(name: str) -> None:
    references = tiny.references(name)
    prompts = [one.prompt for one in references]
    replayed = []
    run = DecodeGraphs.run

    def noted(self: DecodeGraphs, plan: object) -> object:
        replayed.append(len(plan.shares))  # type: ignore[attr-defined]
        return run(self, plan)  # type: ignore[arg-type]

    with LLM(tiny.checkpoint(name), **SETTINGS) as llm, patch.object(DecodeGraphs, "run", noted):
        recordable = (
            graph_blocker(
                llm.booted.spec, cuda=True, kernels=True, host_decides=not llm.booted.weights.experts_rest
            )
            is None
        )
        for params in (QUICK, GREEDY, QUICK):
            for one, reference in zip(llm.generate(prompts, params), references, strict=True):
                assert list(one.tokens) == reference.tokens
        scored = llm.generate(prompts, GREEDY)
    assert bool(replayed) == recordable
    with LLM(tiny.checkpoint(name), **SETTINGS, graphs=False) as llm:
        expected = llm.generate(prompts, GREEDY)
    for one, other in zip(scored, expected, strict=True):
        assert one.tokens == other.tokens
        assert (
            max(abs(a.logprob - b.logprob) for a, b in zip(one.logprobs, other.logprobs, strict=True)) < 5e-5
        )


def test_engines_one_after_another_leave_no_more_behind_than_one() -> None:
    """The library of products keeps 32 MiB for each stream that they were recorded on."""
    left = []
    for _ in range(3):
        with LLM(tiny.checkpoint("llama"), **SETTINGS) as llm:
            llm.generate([one.prompt for one in tiny.references("llama")], QUICK)
        give_back(torch.device("cuda", 0))
        left.append(torch.cuda.memory_allocated())
    assert left[1:] == left[:1] * 2


def test_a_closed_engine_has_freed_its_weights_though_it_is_still_known() -> None:
    give_back(torch.device("cuda", 0))
    before = torch.cuda.memory_allocated()
    with LLM(device="cuda", max_length=512, kv_blocks=16) as llm:
        llm.generate(["Once upon a time"], QUICK)
        weights = llm.booted.weights.bytes
        assert torch.cuda.memory_allocated() >= before + weights
    give_back(torch.device("cuda", 0))
    assert torch.cuda.memory_allocated() < before + weights // 10 + (64 << 20)
    assert llm.memory.weights.device > 0


@pytest.mark.parametrize("name", ["llama", "qwen2_windows", "qwen3", "mistral"])
def test_prompts_one_by_one(name: str) -> None:
    """Whole ones, the last pieces of longer ones, and what is left of those that are known."""
    references, replayed = tiny.references(name), []
    run = DecodeGraphs.run

    def noted(self: DecodeGraphs, plan: Plan) -> object:
        replayed.append(len(plan.runs))
        return run(self, plan)

    with (
        LLM(tiny.checkpoint(name), **(SETTINGS | {"max_step_tokens": 40})) as llm,
        patch.object(DecodeGraphs, "run", noted),
    ):
        for one in references * 2:
            assert list(llm.generate([one.prompt], QUICK)[0].tokens) == one.tokens
    assert sum(replayed) > len(references) // 2


def test_requests_that_push_each_other_out() -> None:
    references = tiny.references("llama")
    with LLM(
        tiny.checkpoint("llama"), **(SETTINGS | {"kv_blocks": 40, "max_sequences": 5, "max_length": 110})
    ) as llm:
        found = llm.generate([one.prompt for one in references] * 4, QUICK)
        assert llm.stats().preemptions > 0
    for one, reference in zip(found, references * 4, strict=True):
        assert list(one.tokens) == reference.tokens


def test_what_is_sampled_is_the_same_whether_steps_are_recorded_or_run_ahead() -> None:
    prompts = [one.prompt for one in tiny.references("llama")] * 2
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=20, top_p=0.9 if seed % 2 else 1.0)
        for seed in range(len(prompts))
    ]
    found = []
    for graphs in (True, False):
        for ahead in (True, False):
            with (
                patch.object(Runner, "ahead", ahead),
                LLM(tiny.checkpoint("llama"), **SETTINGS, graphs=graphs) as llm,
            ):
                found.append([one.tokens for one in llm.generate(prompts, params)])
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_weights_that_stream_pass_through_recorded_steps(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, references = tiny.checkpoint("llama"), tiny.references("llama")
    with Checkpoint.open(path) as checkpoint:
        sizes = [padded(layout) for layout in group_layouts(checkpoint.spec, checkpoint.names, "float32")]
    override = Override(WeightLimits(max(sizes) + int(share * sum(sizes)), 4 * sum(sizes)))
    monkeypatch.setattr(api, "boot", partial(boot, override=override))
    with LLM(path, **SETTINGS) as llm:
        for _ in range(3):
            for one, reference in zip(
                llm.generate([one.prompt for one in references], QUICK), references, strict=True
            ):
                assert list(one.tokens) == reference.tokens
        assert llm.memory.weights.copied > 0
        assert not llm.booted.weights.all_stay


@pytest.mark.parametrize(("heads", "streams"), [((6, 2), False), ((5, 5), False), ((9, 3), True)])
def test_no_request_waits_for_a_compiler(
    heads: tuple[int, int], streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few and many at once, short prompts and long ones, alone and beside others, behind what was found,
    whatever is drawn: a shape that no other test has compiled kernels for. Also where weights would fit, but
    stream in the end."""
    shapes = {
        "num_hidden_layers": 2,
        "hidden_size": 320,
        "intermediate_size": 576,
        "head_dim": 128,
        "vocab_size": 640,
    }
    shape = (
        SHAPES["0.6B"]
        | shapes
        | dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True))
    )
    config = Config(
        Path(), device="cuda", dtype="bfloat16", max_length=4096, max_sequences=128, max_step_tokens=4096
    )
    rng, late, told = random.Random(0), list[str](), "{repr} {compile}".format
    model = Shape.of(shape)
    sizes = [padded(layout) for layout in group_layouts(model.spec, model.names, "bfloat16")]
    limits = WeightLimits(max(sizes) + sum(sizes) // 4, 4 * sum(sizes))
    booted = boot(config, model, override=Override(limits) if streams else None)
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **compiled: late.append(told(**compiled)[:900])
    )
    with closing(booted.engine):
        assert booted.weights.all_stay is not streams
        known = [rng.randrange(600) for _ in range(3000)]
        for temperature in (0.0, 0.8):
            for count in (1, 3, 100):
                prompts = [[*known[: rng.randrange(2, 3000)], rng.randrange(600)] for _ in range(count)]
                _round(
                    booted, [OfflineRequest(prompt, rng.randrange(1, 30)) for prompt in prompts], temperature
                )
    assert not late


@pytest.mark.parametrize(
    ("heads", "hidden", "inner", "some"),
    [(7, 192, 576, {"decode"}), (6, 256, 640, {"decode", "_few_rows"})],
)
def test_what_takes_long_is_compiled_side_by_side(
    heads: int, hidden: int, inner: int, some: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead, on other threads, and what is needed afterwards is just that."""
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "head_dim": 128,
        "vocab_size": 704,
    }
    shape = SHAPES["0.6B"] | sizes | {"num_attention_heads": heads, "num_key_value_heads": 1}
    config = Config(
        Path(), device="cuda", dtype="bfloat16", max_length=4096, max_sequences=128, max_step_tokens=4096
    )
    for kernel in (triton_attention.decode, triton_linear._few_rows):
        kernel.device_caches.clear()  # Of other tests' shapes, which may need the same.
    here, aside = set[str](), set[str]()

    def compiled(repr: str, **more: object) -> None:
        (here if threading.current_thread() is threading.main_thread() else aside).add(repr.split("[")[0])

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", compiled)
    booted = boot(config, Shape.of(shape))
    with closing(booted.engine):
        _round(booted, [OfflineRequest([1, 2, 3] * count, 4) for count in (1, 2, 900)], 0.8)
    assert some <= aside or torch.cuda.get_device_capability() != (9, 0)
    assert here.isdisjoint(aside)
