"""Draft heads and MTP layers with two ranks, each of which has all of one: they draft what the published
arithmetic drafts, alike on both ranks, and change no token."""

import importlib
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch

import heads
import mtps
import tiny
from cpu.test_draft_heads import NOBODY, VARIANTS, Reference, accepted, asked_of, watched
from cpu.test_mtp import Reference as MtpReference
from cpu.test_plan import json_of
from cpu.test_run_ahead import alike
from cpu.test_speculation import (
    BRIEF,
    EVERY_WAY,
    FAMILIES,
    SETTINGS,
    WAYS,
    always,
    answers,
    formed,
    plainly,
    wanted,
)
from cpu.test_tensor_parallel import children
from penstock import LLM, Completion
from penstock.base.config import SHIPPED_MODEL, Config
from penstock.base.errors import DeviceError
from penstock.cli.shape import open_head, open_model, open_mtp
from penstock.engine.acceptance import speculation
from penstock.engine.boot import boot
from penstock.engine.draft import DraftModel
from penstock.engine.forecast import forecast
from penstock.engine.machines import BLOCK_SIZE, Machine, Work
from penstock.engine.placing import Override
from penstock.engine.plan import USUAL
from penstock.sched.arrivals import Arrivals
from penstock.sched.rates import TransferRates
from penstock.step.plan import ModelRole
from penstock.weights.streaming.residency import WeightLimits
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.rank import Leader
from penstock.worker.runner import Runner

TWO = {"tensor_parallel": 2}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_changes_no_token(name: str, tmp_path: Path) -> None:
    """Nor where it has fewer attention heads than there are ranks."""
    asked = wanted(BRIEF)
    plain = plainly(name, BRIEF)
    few = {"num_attention_heads": 1, "num_key_value_heads": 1} if name == "llama" else {}
    head = heads.random_head(tmp_path / "head", name, nested=name == "qwen3", **few)
    for ahead, restless in WAYS if name in EVERY_WAY else WAYS[-1:]:
        with patch.object(Runner, "ahead", ahead), always(NOBODY, restless):
            found = answers(name, asked, speculate=str(head), **TWO)
        alike(found, plain, 1e-4)
        drafted, held = accepted(found)
        assert drafted > 100
        assert held < drafted / 2


@pytest.mark.parametrize("variant", ["authors", "target embeds", "a norm of each tap", "residual normed"])
def test_drafts_are_those_of_the_published_arithmetic(variant: str, tmp_path: Path) -> None:
    """Of prompts in chunks and of found ones. The target's embedding is divided, a head's copy is whole."""
    head = heads.random_head(tmp_path / "head", "llama", **VARIANTS[variant])
    reference = Reference(tiny.checkpoint("llama"), head)
    prompts = [prompt[:40] for prompt in tiny.prompts()][:4]
    settings = SETTINGS | TWO | {"max_step_tokens": 24, "max_sequences": 3}
    with (
        always(NOBODY),
        watched() as seen,
        LLM(tiny.checkpoint("llama"), **settings, speculate=str(head)) as llm,
    ):
        llm.generate(prompts, asked_of(prompts))
        again = llm.generate([prompt[:37] for prompt in prompts], asked_of(prompts, 6))
    assert sum(one.cached_tokens for one in again) > 30
    assert sum(len(one.draft) for one in seen) > 60
    assert max(reference.leads(seen)) < 1e-3


@pytest.mark.parametrize(("name", "shares"), [("glm4_moe", False), ("glm4_moe_groups", True)])
def test_an_mtp_layer_drafts_as_published_and_changes_no_token(
    name: str, shares: bool, tmp_path: Path
) -> None:
    path, asked = mtps.checkpoint(tmp_path, name, shares=shares), wanted(BRIEF)
    prompts, wishes = [prompt for prompt, _ in asked], [wish for _, wish in asked]
    with LLM(path, **SETTINGS) as llm:
        plain = llm.generate(prompts, wishes)
    reference, greedy = MtpReference(path), [prompt[:40] for prompt in tiny.prompts()][:4]
    for ahead, restless in ((False, None), (True, 1)):
        with (
            patch.object(Runner, "ahead", ahead),
            always(NOBODY, restless),
            LLM(path, **SETTINGS, **TWO, speculate="mtp", prefix_cache=False) as llm,
        ):
            found = llm.generate(prompts, wishes)
            with watched() as seen:
                llm.generate(greedy, asked_of(greedy))
        alike(found, plain, 1e-4)
        assert accepted(found)[0] > 100
        assert sum(len(one.draft) for one in seen) > 30
        assert max(reference.leads(seen)) < 1e-3


@pytest.mark.parametrize(
    "more",
    [
        {"kv_blocks": 24, "max_sequences": 6},
        {"kv_blocks": 12, "max_sequences": 3, "host_kv_memory": "1MiB"},
        {"max_sequences": 1, "max_step_tokens": 16},
    ],
    ids=["preempted", "long", "alone"],
)
def test_nor_where_room_is_short(more: dict[str, object], tmp_path: Path) -> None:
    """What is drafted is still what the published arithmetic drafts, from where its features begin."""
    most = 8 if more["max_sequences"] == 1 else BRIEF
    asked, plain = wanted(most), plainly("llama", most)
    head = heads.random_head(tmp_path / "head", "llama")
    reference = Reference(tiny.checkpoint("llama"), head)
    greedy = [(prompt, params) for (prompt, _), params in zip(asked[:6], asked_of(asked[:6], 8), strict=True)]
    for ahead, restless in WAYS[::2] if "host_kv_memory" in more else WAYS[-1:]:
        with patch.object(Runner, "ahead", ahead), always(NOBODY, restless):
            found = answers("llama", asked, speculate=str(head), **TWO, **more)
        alike(found, plain, 1e-4)
        assert accepted(found)[0] > 10
    with patch.object(Runner, "ahead", True), always(NOBODY), watched() as seen:
        answers("llama", greedy, speculate=str(head), prefix_cache=False, **TWO, **more)
    assert len(seen) > 10
    assert max(reference.leads(seen)) < 1e-3


def test_a_prefix_from_host_memory_has_no_features_and_the_head_begins_behind_it(tmp_path: Path) -> None:
    head = heads.random_head(tmp_path / "head", "llama")
    reference = Reference(tiny.checkpoint("llama"), head)
    chance = random.Random(5)
    prompts = [[chance.randrange(tiny.VOCAB) for _ in range(38)] for _ in range(7)]
    more = SETTINGS | {"kv_blocks": 26, "max_sequences": 2, "host_kv_memory": "1MiB", "max_length": 60}
    with LLM(tiny.checkpoint("llama"), **more) as llm:
        plain = llm.generate(prompts, asked_of(prompts))
    with (
        always(NOBODY),
        patch.object(TransferRates, "copying_pays", lambda *_: True),
        patch.object(Arrivals, "is_late", lambda *_: False),
        watched() as seen,
        LLM(tiny.checkpoint("llama"), **more, **TWO, speculate=str(head)) as llm,
    ):
        first = llm.generate(prompts, asked_of(prompts))
        again = [llm.generate([prompt], asked_of([prompt]))[0] for prompt in prompts]
    assert sum(one.cached_host for one in again) > 60
    assert [one.tokens for one in first] == [one.tokens for one in again] == [one.tokens for one in plain]
    assert len([one for one in seen if one.base]) > 5
    assert max(reference.leads(seen)) < 1e-3


def test_nor_where_weights_stream(tmp_path: Path) -> None:
    """From a pack of each rank's part. The head has a whole copy of the embedding, which is the target's head
    too."""
    head = heads.random_head(tmp_path / "head", "llama_tied", embeds=False)
    reference, asked = Reference(tiny.checkpoint("llama_tied"), head), wanted(BRIEF)
    more = {"speculate": str(head), "cache": tmp_path, "prefix_cache": False} | TWO
    plain = plainly("llama_tied", BRIEF)
    with LLM(tiny.checkpoint("llama_tied"), **(SETTINGS | more)) as llm:
        whole = llm.booted.weights.bytes
    some = Override(limits=WeightLimits(whole // 2, whole // 2))
    with (
        patch("penstock.api.opening.boot", partial(boot, override=some)),
        always(NOBODY),
        watched() as seen,
        LLM(tiny.checkpoint("llama_tied"), **(SETTINGS | more)) as llm,
    ):
        found = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
        assert llm.memory.weights.read > 0
        seen.clear()
        prompts = [prompt[:30] for prompt in tiny.prompts()]
        llm.generate(prompts, asked_of(prompts))
    alike(found, plain, 1e-4)
    assert accepted(found)[0] > 100
    assert len(seen) > 10
    assert max(reference.leads(seen)) < 1e-3


def test_a_structure_is_kept_along_its_drafts(tmp_path: Path) -> None:
    """Rank 0 alone knows it."""
    pytest.importorskip("llguidance")
    path, (prompts, params) = mtps.checkpoint(tmp_path, vocab=4096), formed()
    for file in SHIPPED_MODEL.glob("tokenizer*"):
        shutil.copy(file, path)
    settings = {"device": "cpu", "dtype": "float32", "check": True, "max_length": 256}
    with LLM(path, **settings) as llm:
        plain = llm.generate(prompts, params)
    with always(NOBODY), LLM(path, **settings, **TWO, speculate="mtp") as llm:
        found = llm.generate(prompts, params)
    alike(found, plain, 1e-4)
    assert accepted(found)[0] > 100


# ---- what the other rank does


NOTING = """
import torch
from penstock.engine import boot
from penstock.models.draft_head import _Spread
from penstock.step.plan import ModelRole
from penstock.worker.runner import Runner

def note(into):
    # The tokens that a rank's head draws, and its pages and each row's newest output at the end.
    attach, run, close = Runner.attach, Runner.end, Runner.close
    drawn = []

    def attached(self, weights, pool, *given, **more):
        attach(self, weights, pool, *given, **more)
        pool.bytes.zero_()

    def end(self, begun):
        outcome = run(self, begun)
        if begun.plan.model is ModelRole.DRAFT:
            drawn.extend(token for result in outcome.results for token in result.tokens)
        return outcome

    def closed(self):
        model = self.models[ModelRole.DRAFT]
        if model.pool is not None:
            torch.save((drawn, model.decoder._newest, model.pool.bytes.view(torch.float32)), into)
        close(self)

    Runner.attach, Runner.end, Runner.close = attached, end, closed

def follow(seat, *given, into, off):
    note(into)
    if off:
        make = _Spread.__call__

        def shifted(self, rows, out=None):
            return make(self, rows, out).roll(1, -1)

        _Spread.__call__ = shifted
    boot.follow(seat, *given)
"""
"""What notes the drafts of a rank. off: the follower's likeliest tokens are others, as they may be on another
device."""


@contextmanager
def noted(folder: Path, monkeypatch: pytest.MonkeyPatch, *, off: bool) -> Iterator[list[Path]]:
    """Note what both ranks' heads draw and keep, in these files."""
    (folder / "noting.py").write_text(NOTING)
    monkeypatch.syspath_prepend(str(folder))
    importlib.import_module("noting")
    monkeypatch.setitem(sys.modules, "noting", noting := sys.modules.pop("noting"))  # Gone behind the test.
    files = [folder / f"rank{rank}" for rank in range(2)]
    with (
        patch.object(Runner, "attach", Runner.attach),
        patch.object(Runner, "end", Runner.end),
        patch.object(Runner, "close", Runner.close),
        patch("penstock.engine.boot.follow", partial(noting.follow, into=files[1], off=off)),
    ):
        noting.note(files[0])
        yield files


@pytest.mark.parametrize("off", [False, True], ids=["as it is", "rounded otherwise"])
def test_both_ranks_draft_alike(off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All use rank 0's tokens, and have the same features and KV: at every temperature, and in steps of the
    likeliest tokens alone, of logits as they are or adjusted."""
    head, (prompts, wishes) = heads.random_head(tmp_path / "head", "llama"), zip(*wanted(), strict=True)
    likeliest = asked_of(prompts)
    turns = [[*wishes], likeliest, [replace(one, presence_penalty=0.5) for one in likeliest]]

    def said(**more: object) -> list[Completion]:
        with LLM(tiny.checkpoint("llama"), **(SETTINGS | more)) as llm:
            return [one for turn in turns for one in llm.generate([*prompts], turn)]

    plain = said()
    with always(NOBODY), noted(tmp_path, monkeypatch, off=off) as files:
        found = said(speculate=str(head), **TWO)
    alike(found, plain, 1e-4)
    (drawn, *kept), (drawn_there, *kept_there) = map(torch.load, files)
    assert drawn == drawn_there
    assert len(drawn) > 100
    for mine, other in zip(kept, kept_there, strict=True):
        assert mine.count_nonzero() > 500
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_a_rank_that_is_killed_while_a_head_drafts_is_an_error_that_says_so(tmp_path: Path) -> None:
    before, head = children(), heads.random_head(tmp_path / "head", "llama")
    with always(NOBODY), LLM(tiny.checkpoint("llama"), **SETTINGS, **TWO, speculate=str(head)) as llm:
        [follower] = children() - before
        llm.generate(tiny.prompts()[0][:30], asked_of([()])[0])
        threading.Timer(0.05, lambda: psutil.Process(follower).kill()).start()
        began = time.monotonic()
        with pytest.raises(DeviceError, match=r"rank 1 of 2 was killed by SIGKILL"):
            llm.generate([prompt[:30] for prompt in tiny.prompts()] * 100, asked_of(tiny.prompts() * 100))
        assert time.monotonic() - began < 60
    assert children() <= before


# ---- its memory


def test_a_plan_for_ranks_shows_all_of_the_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, glm = heads.random_head(tmp_path / "head", "llama"), mtps.checkpoint(tmp_path)
    for model, speculate in ((tiny.checkpoint("llama"), str(head)), (glm, "mtp")):
        asked = [str(model), "--machine", "desktop-24", "--speculate", speculate]
        alone, both = json_of(capsys, *asked), json_of(capsys, *asked, "--tensor-parallel", "2")
        assert both["speculation"]["draft"] == alone["speculation"]["draft"]
        assert both["ranks"] == 2


@pytest.mark.parametrize("kind", ["head", "mtp"])
def test_a_boot_decides_what_was_planned(kind: str, tmp_path: Path) -> None:
    """To the byte, on each rank: what a whole head takes, and what is left to a part of the model. Both ranks
    have as many rows of the vocabulary."""
    if kind == "mtp":
        target, speculate = mtps.checkpoint(tmp_path, vocab=96), "mtp"
    else:
        target = tiny.write(tiny.CASES["llama"], tmp_path / "llama", vocab_size=96)
        speculate = str(heads.random_head(tmp_path / "head", "llama", vocab_size=96))
    more: dict[str, object] = {
        "kv_blocks": 3 * 128 // BLOCK_SIZE,
        "max_length": 128,
        "max_sequences": 3,
        "block_size": BLOCK_SIZE,
    }
    with LLM(target, **(SETTINGS | TWO | more), speculate=speculate) as llm:
        ranks = llm.booted.engine._ranks
        assert isinstance(ranks, Leader)
        assert isinstance(ranks._part, Runner)
        model, budget = ranks._part.models[ModelRole.DRAFT], llm.booted.budget
        assert isinstance(model.weights, WeightStream)
        assert model.pool is not None
        taken, mine = model.weights.bytes + model.pool.bytes.numel(), llm.booted.weights.bytes
    spec, names = open_model(str(target))[1:]
    found = open_mtp(str(target), spec) if kind == "mtp" else open_head(speculate)
    assert found is not None
    draft = DraftModel.of_head(found, "float32", BLOCK_SIZE)
    settings = Config(Path(), speculate="suffix", tensor_parallel=2)
    work = Work("float32", 3, 128, SETTINGS["max_step_tokens"], settings=settings, draft=draft)
    shown = forecast(spec, names, Machine(2 * budget.total, None, USUAL, 1e12), work)
    said = speculation(spec, names, shown)
    assert said.weights + said.kv == taken
    assert replace(shown.budget, activations=budget.activations) == budget
    assert budget.weights == said.weights + mine
    alone = replace(work, settings=replace(settings, tensor_parallel=1))
    whole = speculation(
        spec, names, forecast(spec, names, Machine(2 * budget.total, None, USUAL, 1e12), alone)
    )
    assert (said.weights, said.kv) == (whole.weights, whole.kv)
    # Ranks of one CPU have a half of it each.
    assert [one.drafting for one in said.paces] == pytest.approx([2 * one.drafting for one in whole.paces])
