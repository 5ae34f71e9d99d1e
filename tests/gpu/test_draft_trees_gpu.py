"""Draft trees and draft heads on a GPU, with recorded steps and without: no token is another."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("transformers")

import heads
import mtps
import tiny
from cpu.test_draft_heads import NOBODY, Reference, accepted, asked_of, watched
from cpu.test_draft_trees import counted, of_trees
from cpu.test_mtp import Reference as MtpReference
from cpu.test_run_ahead import alike
from cpu.test_speculation import FAMILIES, always, truth_of, wanted
from drafters import TreeAdversary
from gpu.test_speculation_gpu import OFF, SETTINGS, answers
from pairs import near
from penstock import LLM, Completion, SamplingParams
from penstock.engine.boot import boot
from penstock.engine.placing import Override
from penstock.weights.streaming.residency import WeightLimits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def compared(name: str, plain: Sequence[Completion], **more: object) -> None:
    """Compare answers with plain ones, with trees in all steps."""
    drafter = TreeAdversary(truth_of(plain), tiny.VOCAB, ends=[3, 0, 1, 2], seed=len(name))
    with always(drafter), counted() as counts:
        found = answers(name, speculate="suffix", **more)
    alike(found, plain, OFF)
    assert counts["trees"] > 20
    assert counts["beside"] > 5


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_token_is_another_whatever_trees_hold(name: str, graphs: bool) -> None:
    compared(name, answers(name, graphs=graphs), graphs=graphs)


@pytest.mark.parametrize(
    "more",
    [
        {"kv_blocks": 14, "max_sequences": 6},
        {"kv_blocks": 8, "max_sequences": 3, "host_kv_memory": "1MiB"},
        {"max_sequences": 1, "max_step_tokens": 24},
    ],
    ids=["preempted", "long", "alone"],
)
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_nor_where_room_is_short(name: str, more: dict[str, object]) -> None:
    compared(name, answers(name), **more)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nor_on_two_devices() -> None:
    plain = answers("llama", tensor_parallel=2)
    compared("llama", plain, tensor_parallel=2)
    with of_trees(14), counted() as counts:
        found = answers("llama", tensor_parallel=2, speculate=str(near("llama", 0.05)))
    alike(found, plain, OFF)
    assert counts["trees"] > 5


def test_nor_where_weights_stream() -> None:
    plain = answers("llama")
    with LLM(tiny.checkpoint("llama"), **SETTINGS) as llm:
        whole = llm.booted.weights.bytes
    some = Override(limits=WeightLimits(whole // 2, whole))
    with patch("penstock.api.opening.boot", partial(boot, override=some)):
        compared("llama", plain)


def test_what_is_found_later_was_accepted() -> None:
    """A later request finds the KV that trees have left, and goes on as one that computes it anew."""
    asked = [(prompt, wish) for prompt, wish in wanted() if wish.n == 1]
    prompts, wishes = [prompt for prompt, _ in asked], [wish for _, wish in asked]
    more_of_it = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(tiny.checkpoint("llama"), **SETTINGS, prefix_cache=False) as llm:
        plain = llm.generate(prompts, wishes)
        said = [[*one.prompt_tokens, *one.tokens][:60] for one in plain]
        after = llm.generate(said, [more_of_it] * len(said))
    drafter = TreeAdversary(truth_of(plain), tiny.VOCAB, ends=[3], seed=1)
    with (
        always(drafter),
        counted() as counts,
        LLM(tiny.checkpoint("llama"), **SETTINGS, speculate="suffix") as llm,
    ):
        alike(llm.generate(prompts, wishes), plain, OFF)
        again = llm.generate(said, [more_of_it] * len(said))
    alike(again, after, OFF)
    assert counts["beside"] > 3
    assert sum(one.cached_tokens for one in again) > 100


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("draft", ["model", "self"])
def test_the_trees_of_a_draft_change_no_token(draft: str, graphs: bool, tmp_path: Path) -> None:
    plain = answers("llama", graphs=graphs)
    speculate = "self" if draft == "self" else str(near("llama", 0.05))
    with of_trees(14), counted() as counts:
        found = answers("llama", graphs=graphs, speculate=speculate, cache=tmp_path)
    alike(found, plain, OFF)
    assert counts["trees"] > 5
    assert sum(one.accepted_tokens for one in found) > 10


@pytest.mark.parametrize("name", ["llama", "llama_dynamic", "qwen2_windows"])
def test_a_draft_model_that_is_the_model_knows_what_comes(name: str) -> None:
    """At any temperature: its trees are computed at the right positions, and it knows the noise of each."""
    prompt = tiny.prompts()[0][:20]
    params = [
        SamplingParams(temperature=heat, seed=3, max_tokens=40, ignore_eos=True, top_k=top)
        for heat, top in ((0, 0), (0.6, 0), (1, 0), (1, 9))
    ]
    said = []
    for more in ({}, {"speculate": str(near(name, 0.0))}):
        with of_trees(48), LLM(tiny.checkpoint(name), **(SETTINGS | {"max_step_tokens": 256} | more)) as llm:
            said.append(llm.generate([prompt] * len(params), params))
    alike(said[1], said[0], OFF)
    assert max(len(one.tokens) - one.accepted_tokens for one in said[1]) <= 7


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_changes_no_token(name: str, tmp_path: Path) -> None:
    plain = answers(name)
    head = heads.random_head(tmp_path / "head", name, nested=name == "qwen3")
    for restless in (None, 1):
        with always(NOBODY, restless):
            found = answers(name, speculate=str(head))
        alike(found, plain, OFF)
        assert accepted(found)[0] > 50


def test_a_heads_drafts_are_those_of_the_published_arithmetic(tmp_path: Path) -> None:
    """With decode steps recorded, behind which features must be too."""
    head = heads.random_head(tmp_path / "head", "llama")
    reference, prompts = Reference(tiny.checkpoint("llama"), head), [one[:40] for one in tiny.prompts()][:4]
    for restless in (None, 3):
        with (
            always(NOBODY, restless),
            watched() as seen,
            LLM(tiny.checkpoint("llama"), **SETTINGS, prefix_cache=False, speculate=str(head)) as llm,
        ):
            llm.generate(prompts, asked_of(prompts, 30))
        assert len(seen) > 10
        assert max(reference.leads(seen)) < 1e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", ["head", "mtp"])
def test_nor_do_heads_on_two_devices_and_they_draft_as_published(
    kind: str, graphs: bool, tmp_path: Path
) -> None:
    """Each device has all of a head. Hidden states are summed where it reads them, in recorded steps too."""
    if kind == "mtp":
        path, speculate = mtps.checkpoint(tmp_path), "mtp"
        lead = MtpReference(path).lead
    else:
        path, head = tiny.checkpoint("llama"), heads.random_head(tmp_path / "head", "llama", embeds=False)
        speculate, lead = str(head), Reference(path, head).lead
    asked, settings = wanted(), SETTINGS | {"graphs": graphs, "tensor_parallel": 2, "prefix_cache": False}
    prompts, wishes = [prompt for prompt, _ in asked], [wish for _, wish in asked]
    with LLM(path, **settings) as llm:
        plain = llm.generate(prompts, wishes)
    for restless in (None, 3):
        with (
            always(NOBODY, restless),
            watched() as seen,
            LLM(path, **settings, speculate=speculate) as llm,
        ):
            found = llm.generate(prompts, wishes)
            seen.clear()
            llm.generate([one[:40] for one in prompts[:4]], asked_of(prompts[:4], 30))
        alike(found, plain, OFF)
        assert accepted(found)[0] > 50
        assert len(seen) > 10
        assert max(map(lead, seen)) < 1e-3


def test_an_mtp_layer_changes_no_token_and_drafts_as_published(tmp_path: Path) -> None:
    """Of GLM-4, a mixture of its own, in pages of the target's numbers."""
    glm, asked = mtps.checkpoint(tmp_path), wanted()
    prompts, wishes = [prompt for prompt, _ in asked], [wish for _, wish in asked]
    with LLM(glm, **SETTINGS) as llm:
        plain = llm.generate(prompts, wishes)
    reference = MtpReference(glm)
    for restless in (None, 1):
        with (
            always(NOBODY, restless),
            watched() as seen,
            LLM(glm, **SETTINGS, prefix_cache=False, speculate="mtp") as llm,
        ):
            alike(llm.generate(prompts, wishes), plain, OFF)
            seen.clear()
            llm.generate([one[:40] for one in prompts[:4]], asked_of(prompts[:4], 30))
        assert len(seen) > 10
        assert max(map(reference.lead, seen)) < 1e-3
