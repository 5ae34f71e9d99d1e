"""Caps of scores and logits, and scales of embedding, blocks and logits: a family with all of them, against
float64, however its KV rests and its weights come."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import exact
import toys
from exact import LIMIT, SETTINGS, close, host, outputs, prompts
from members import pass_of
from penstock.api.llm import LLM
from penstock.arch.mixers.attention import Attention
from penstock.arch.spec import ModelSpec
from penstock.sched.rates import TransferRates
from penstock.step.params import SamplingParams
from penstock.weights.checkpoint.reader import Checkpoint


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with toys.capped_known():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.capped_checkpoint(tmp_path_factory.mktemp("capped") / "model")


LONG = {"kv_blocks": 6, "max_step_tokens": 24, "kv_tile": 32}


def test_logits_are_those_of_the_reference(model: Path) -> None:
    assert exact.confirms(model, outputs(model))


@pytest.mark.parametrize("switch", ["cap", "scale", "layer", "embedding_scale", "logits_scale", "logits_cap"])
def test_each_of_them_matters(model: Path, switch: str) -> None:
    """Without one the reference says something else: else the test above would prove nothing of it."""
    reference = exact.Reference(model)
    with Checkpoint.open(model) as checkpoint:
        spec = checkpoint.spec
    plain = {"embedding_scale": 1.0, "logits_scale": 1.0, "logits_cap": None}
    tokens = prompts()[1]
    expected = reference.logits(tokens).log_softmax(-1)
    reference.spec = replace(spec, **{switch: plain[switch]}) if switch in plain else without(spec, switch)
    assert (reference.logits(tokens).log_softmax(-1) - expected).abs().max() > 100 * LIMIT


def without(spec: ModelSpec, switch: str) -> ModelSpec:
    stack = []
    for layer in spec.stack:
        assert isinstance(layer.mixer, Attention)
        changed = (
            replace(layer, scale=1.0)
            if switch == "layer"
            else replace(layer, mixer=replace(layer.mixer, **{switch: None}))
        )
        stack.append(changed)
    return replace(spec, stack=tuple(stack))


@pytest.mark.parametrize("tokens", [24, 64])
def test_contexts_longer_than_the_device_give_the_same(model: Path, tokens: int) -> None:
    long = LONG | {"max_step_tokens": tokens, "host_kv_memory": host(model, 60)}
    assert close(outputs(model, **long), outputs(model))


@pytest.mark.parametrize("policy", ["topk:3", "window:8,16"])
def test_what_a_policy_misses_is_read_where_none_may_be_missed(model: Path, policy: str) -> None:
    long = LONG | {"host_kv_memory": host(model, 60)}
    chosen = {"attention_policy": policy, "prefill_policy": policy, "missed_limit": 1e-9}
    assert close(outputs(model, **long, **chosen), outputs(model))


def test_kv_in_fp8_is_near(model: Path) -> None:
    long = LONG | {"host_kv_memory": host(model, 60)}
    found, expected = outputs(model, **long, host_kv_dtype="fp8"), outputs(model)
    apart = [
        (torch.tensor(scores[:110]) - torch.tensor(others[:110])).abs().mean()
        for (_, scores), (_, others) in zip(found, expected, strict=True)
    ]
    assert apart[0] < LIMIT < max(apart) < 1


def test_prefixes_that_were_kept_give_the_same(model: Path, tmp_path: Path) -> None:
    kept = {
        "host_kv_memory": "8MiB",
        "disk_kv_memory": "32MiB",
        "kv_directory": tmp_path / "kv",
        "block_size": 16,
    }
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    with (
        patch.object(TransferRates, "loading_pays", lambda *_: True),
        patch.object(TransferRates, "computed_first", lambda *_: 0),
    ):
        answers = []
        for _ in range(2):
            with LLM(model, **SETTINGS | kept) as llm:  # type: ignore[arg-type]
                answers.append(llm.generate(prompts(), params))
    first, again = answers
    assert [one.tokens for one in again] == [one.tokens for one in first]
    assert (first[1].cached_tokens, again[1].cached_disk) == (0, 112)


def test_two_ranks(model: Path) -> None:
    """In processes of their own, with KV in host memory."""
    long = LONG | {"host_kv_memory": 2 * host(model, 60)}
    assert exact.confirms(model, outputs(model, tensor_parallel=2, **long))


def test_ranks_and_weights_that_stream(model: Path) -> None:
    alone = pass_of(model, 0)
    for one, other in zip(pass_of(model, 0, part=0.5), alone, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(pass_of(model, 2), alone, strict=True):
        assert (one - other).abs().max() < 1e-5
