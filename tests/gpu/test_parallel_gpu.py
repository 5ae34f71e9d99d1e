"""A model divided among two GPUs says what it says on one, recorded and not; what befalls a rank ends the run
and leaves nothing."""

import os
import signal
from functools import partial
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch

import tiny
from penstock import LLM, SamplingParams
from penstock.base.errors import DeviceError, EngineClosedError
from penstock.engine.boot import boot
from penstock.engine.placing import Override
from penstock.weights.streaming.residency import WeightLimits
from streams import LONG, within

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs; there are {torch.cuda.device_count()}"
)

SETTINGS = {
    "device": "cuda",
    "dtype": "float32",
    "check": True,
    "max_step_tokens": 64,
    "block_size": 4,
    "max_sequences": 12,
}
QUICK = SamplingParams(temperature=0, max_tokens=tiny.OUTPUT, ignore_eos=True)
NAMES = [
    "llama_biases",
    "llama_tied",
    "mistral",
    "qwen2_windows",
    "qwen3",
    "mixtral",
    "qwen3_moe_dense_layer",
]


def followers() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_reference(name: str, graphs: bool) -> None:
    references = tiny.references(name)
    with LLM(tiny.checkpoint(name), **SETTINGS, tensor_parallel=2, graphs=graphs) as llm:
        for _ in range(2):
            for one, reference in zip(
                llm.generate([one.prompt for one in references], QUICK), references, strict=True
            ):
                assert list(one.tokens) == reference.tokens
    assert not followers()


def test_what_is_sampled_is_the_same_run_after_run() -> None:
    prompts = [one.prompt for one in tiny.references("llama")] * 2
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=20, top_p=0.9 if seed % 2 else 1.0)
        for seed in range(len(prompts))
    ]
    found = []
    for graphs in (True, False, True):
        with LLM(tiny.checkpoint("llama"), **SETTINGS, tensor_parallel=2, graphs=graphs) as llm:
            found.append([one.tokens for one in llm.generate(prompts, params)])
    assert found[0] == found[1] == found[2]


def test_requests_that_push_each_other_out() -> None:
    references = tiny.references("llama")
    settings = SETTINGS | {"kv_blocks": 40, "max_sequences": 5, "max_length": 110}
    with LLM(tiny.checkpoint("llama"), **settings, tensor_parallel=2) as llm:
        found = llm.generate([one.prompt for one in references] * 4, QUICK)
        assert llm.stats().preemptions > 0
    for one, reference in zip(found, references * 4, strict=True):
        assert list(one.tokens) == reference.tokens


def test_each_rank_streams_its_own_share(tmp_path: Path) -> None:
    references = tiny.references("llama")
    with LLM(tiny.checkpoint("llama"), **SETTINGS, tensor_parallel=2) as llm:
        whole = llm.booted.weights.bytes
    some = Override(limits=WeightLimits(whole // 2, whole // 2))
    with (
        patch("penstock.api.opening.boot", partial(boot, override=some)),
        LLM(tiny.checkpoint("llama"), **SETTINGS, tensor_parallel=2, cache=tmp_path) as llm,
    ):
        for one, reference in zip(
            llm.generate([one.prompt for one in references], QUICK), references, strict=True
        ):
            assert list(one.tokens) == reference.tokens
        assert llm.memory.weights.copied > 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_is_an_error_within_seconds(how: signal.Signals) -> None:
    def run() -> None:
        with LLM(tiny.checkpoint("llama"), **SETTINGS, tensor_parallel=2) as llm:
            prompts = [one.prompt for one in tiny.references("llama")]
            llm.generate(prompts, QUICK)
            [follower] = followers()
            os.kill(follower.pid, how)

            def go_on() -> None:
                while True:
                    llm.generate(prompts, QUICK)

            with pytest.raises(DeviceError, match="rank 1 of 2"):
                go_on()
            with pytest.raises(EngineClosedError):
                llm.generate(prompts, QUICK)

    assert within(3 * LONG, run)
    assert not followers()
