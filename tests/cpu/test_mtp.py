"""Drafts of the MTP layer in a model's own checkpoint: they are those of the published arithmetic, and change
no token."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import mtps
import tiny
from cpu.test_draft_heads import NOBODY, Seen, accepted, asked_of, watched
from cpu.test_run_ahead import alike
from cpu.test_speculation import SETTINGS, always, wanted
from penstock import LLM, Completion, SamplingParams
from penstock.base.errors import CheckpointError, ConfigError
from penstock.ops.sampling import draw, pack_sampling
from penstock.step.params import Sampling
from penstock.step.plan import Admission
from penstock.worker.runner import Runner
from penstock.worker.sampler import Sampler


class Reference:
    """What plain torch makes of a target and its MTP layer."""

    def __init__(self, path: Path) -> None:
        self.plain = mtps.PlainMtp(path)

    def logits(self, seen: Seen) -> Iterator[torch.Tensor]:
        """Logits behind each token of a draft."""
        tokens = [*seen.tokens, *seen.draft]
        hidden = self.plain.hidden(seen.tokens[:-1])[seen.base :]
        for level in range(len(seen.draft)):
            behind = tokens[seen.base + 1 : len(seen.tokens) + level]
            yield self.plain.logits(self.plain.output(hidden, behind))

    def lead(self, seen: Seen) -> float:
        """By how much a token of a draft is less likely than the likeliest there: nothing, but for
        rounding."""
        pairs = zip(self.logits(seen), seen.draft, strict=True)
        return max(float(logits.max() - logits[token]) for logits, token in pairs)

    def drawn(self, seen: Seen, sampling: Sampling) -> list[int]:
        """What is drawn of the layer's logits with the noise of the target, behind each token of a draft."""
        found = list[int]()
        for level, own in enumerate(self.logits(seen)):
            logits = own[None].clone()
            chosen = logits.argmax(-1)
            asked = pack_sampling([0], [sampling], [len(seen.tokens) + level])
            draw(logits, torch.from_numpy(asked), chosen)
            found.append(int(chosen))
        return found


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtps.checkpoint(tmp_path_factory.mktemp("glm"))


def answers(
    path: Path, asked: Sequence[tuple[Sequence[int], SamplingParams]], **more: object
) -> list[Completion]:
    with LLM(path, **(SETTINGS | more)) as llm:
        return llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])


VARIANTS = [("glm4_moe", False), ("glm4_moe_groups", True), ("glm4_moe_yarn", False)]


@pytest.mark.parametrize(("name", "shares"), VARIANTS, ids=[name for name, _ in VARIANTS])
def test_drafts_are_those_of_the_published_arithmetic(name: str, shares: bool, tmp_path: Path) -> None:
    """Of prompts in chunks and of found ones, and where some of a draft did not hold; tokens are those of
    plain decoding."""
    path = mtps.checkpoint(tmp_path, name, shares=shares)
    reference, prompts = Reference(path), [prompt[:40] for prompt in tiny.prompts()][:4]
    settings = SETTINGS | {"max_step_tokens": 24, "max_sequences": 3}
    with LLM(path, **settings) as llm:
        plain = llm.generate(prompts, asked_of(prompts))
    with always(NOBODY), watched() as seen, LLM(path, **settings, speculate="mtp") as llm:
        assert llm.drafter == "mtp"
        found = llm.generate(prompts, asked_of(prompts))
        again = llm.generate([prompt[:37] for prompt in prompts], asked_of(prompts, 6))
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert sum(one.cached_tokens for one in again) > 30
    assert sum(len(one.draft) for one in seen) > 60
    assert any(len(one.draft) > 3 for one in seen)
    assert max(map(reference.lead, seen)) < 1e-3


def test_drafts_are_drawn_with_the_noise_of_the_target(glm: Path) -> None:
    reference, prompt = Reference(glm), tiny.prompts()[0][:20]
    wish = SamplingParams(temperature=1.0, top_k=30, seed=5, max_tokens=40, ignore_eos=True)
    admitted = list[Sampling]()
    admit = Sampler.admit

    def noted(self: Sampler, admission: Admission) -> None:
        admitted.append(admission.sampling)
        admit(self, admission)

    with always(NOBODY), watched() as seen, patch.object(Sampler, "admit", noted):
        answers(glm, [(prompt, wish)], speculate="mtp")
    sampling = next(one for one in admitted if one.seed == 5)
    alike_ones = [one.draft == tuple(reference.drawn(one, sampling)) for one in seen]
    assert len(alike_ones) > 20
    assert all(alike_ones)
