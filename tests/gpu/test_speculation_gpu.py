"""Speculative decoding on a GPU, with recorded steps and without: no token is another, whatever is said."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("transformers")

import tiny
from cpu.test_run_ahead import alike
from cpu.test_speculation import FAMILIES, always, truth_of, wanted
from drafters import Adversary
from pairs import near
from penstock import LLM, Completion, SamplingParams, Structure
from penstock.engine.boot import boot
from penstock.engine.placing import Override
from penstock.step.plan import Plan, ShareKind
from penstock.weights.streaming.residency import WeightLimits
from penstock.worker.graphs import DecodeGraphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SETTINGS: dict[str, object] = {
    "device": "cuda",
    "dtype": "float32",
    "check": True,
    "device_memory": "4GiB",
    "max_step_tokens": 64,
    "block_size": 16,
    "max_length": 80,
}
OFF = 1e-4
"""By which log-probabilities may differ: products of other numbers of rows sum in another order."""


def answers(name: str, **more: object) -> list[Completion]:
    asked = wanted()
    with LLM(tiny.checkpoint(name), **(SETTINGS | more)) as llm:
        return llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_token_is_another_whatever_is_drafted(name: str, graphs: bool) -> None:
    plain = answers(name, graphs=graphs)
    for kinds in ("tbedgn", "t"):
        with always(Adversary(truth_of(plain), tiny.VOCAB, ends=[3, 0, 1, 2], kinds=kinds, seed=len(name))):
            found = answers(name, graphs=graphs, speculate="suffix")
        alike(found, plain, OFF)
        assert 0 < sum(one.accepted_tokens for one in found) <= sum(one.drafted_tokens for one in found)


@pytest.mark.parametrize(
    "more",
    [
        {"kv_blocks": 14, "max_sequences": 6},
        {"kv_blocks": 8, "max_sequences": 3, "host_kv_memory": "1MiB"},
        {"max_sequences": 1, "max_step_tokens": 16},
    ],
    ids=["preempted", "long", "alone"],
)
def test_nor_where_room_is_short(more: dict[str, object]) -> None:
    plain = answers("llama")
    with always(Adversary(truth_of(plain), tiny.VOCAB, ends=[3], kinds="tbbg")):
        found = answers("llama", speculate="suffix", **more)
    alike(found, plain, OFF)
    assert sum(one.accepted_tokens for one in found)


def test_nor_where_weights_stream() -> None:
    plain = answers("llama")
    with LLM(tiny.checkpoint("llama"), **SETTINGS) as llm:
        whole = llm.booted.weights.bytes
    some = Override(limits=WeightLimits(whole // 2, whole))
    with (
        patch("penstock.api.opening.boot", partial(boot, override=some)),
        always(Adversary(truth_of(plain), tiny.VOCAB, kinds="tbg")),
    ):
        found = answers("llama", speculate="suffix")
    alike(found, plain, OFF)
    assert sum(one.accepted_tokens for one in found)


def test_drafts_are_verified_by_recorded_steps() -> None:
    """Of several requests, and of one alone."""
    for more in ({}, {"max_sequences": 1}):
        plain, run, drafts = answers("llama", **more), DecodeGraphs.run, []

        def noted(self: DecodeGraphs, plan: Plan, run: object = run, drafts: list[int] = drafts) -> object:
            drafts.append(sum(share.kind is ShareKind.VERIFY for share in plan.shares))
            return run(self, plan)  # type: ignore[operator]

        with (
            patch.object(DecodeGraphs, "run", noted),
            always(Adversary(truth_of(plain), tiny.VOCAB, ends=[3], kinds="tbg")),
        ):
            found = answers("llama", speculate="suffix", **more)
        alike(found, plain, OFF)
        assert sum(map(bool, drafts)) > 5
        assert more or max(drafts) > 1


@pytest.mark.parametrize("graphs", [True, False])
def test_a_draft_model_changes_no_token(graphs: bool) -> None:
    plain = answers("llama", graphs=graphs)
    with always(Adversary({}, tiny.VOCAB, kinds="n")):
        found = answers("llama", graphs=graphs, speculate=str(near("llama", 0.02)))
    alike(found, plain, OFF)
    drafted = sum(one.drafted_tokens for one in found)
    assert sum(one.accepted_tokens for one in found) > drafted / 3 > 10


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("draft", ["suffix", "model"])
def test_nor_on_two_devices(draft: str) -> None:
    plain = answers("llama", tensor_parallel=2)
    kinds, speculate = ("tbg", draft) if draft == "suffix" else ("n", str(near("llama", 0.02)))
    with always(Adversary(truth_of(plain), tiny.VOCAB, kinds=kinds)):
        found = answers("llama", tensor_parallel=2, speculate=speculate)
    alike(found, plain, OFF)
    assert sum(one.accepted_tokens for one in found)


def test_the_shipped_model_says_the_same_by_its_own_drafts() -> None:
    """Look-up with the engine's own choice of how much is verified; texts, JSON and what repeats."""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    schema |= {"required": ["name", "age"], "additionalProperties": False}
    story = "Tom had a red ball. Tom had a red ball. Tom had a red ball. Tom had a"
    params = [
        SamplingParams(temperature=heat, seed=seed, max_tokens=100, structure=form)
        for seed, heat in enumerate((0.0, 0.6, 1.0))
        for form in (None, Structure.json_schema(schema))
    ]
    settings = {"device": "cuda", "dtype": "float32", "max_length": 512, "device_memory": "4GiB"}
    said = []
    for speculate in ("off", "suffix"):
        with LLM(**settings, speculate=speculate) as llm:
            said.append([one.tokens for one in llm.generate([story] * len(params), params)])
    assert said[0] == said[1]
